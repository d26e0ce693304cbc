"""What a lane does with chunks that carry device memory, and the pool's arithmetic; no GPU. With one: tests/stages/test_device_tensors.py."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.blocking import BlockingInbound, BlockingOutlet
from transport.chunk import DEVICE_DTYPE, ChunkHeader, describe, numpy_dtype
from transport.connector import Connector, ConnectorOptions, Lease
from transport.cuda_ipc import Block, CudaReader, FreeSpans
from transport.errors import ProtocolError
from transport.outlet import send_to_all
from transport.schemes import make_connector

PEER = Path(__file__).with_name("peer.py")
OPTIONS = ConnectorOptions(arena_bytes=8 * 2**20)
BLOCK = Block("1-a", 1, bytes(16), bytes(64), 4096, bytes(64), 0, 512, "float16", (256,))


def block_array(block: Block = BLOCK) -> np.ndarray:
    return np.frombuffer(msgspec.msgpack.encode(block), numpy_dtype(DEVICE_DTYPE))


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


class Given:
    """Whether the block that an array owns was given back."""

    def __init__(self, array: np.ndarray) -> None:
        self.back = False
        weakref.finalize(array, setattr, self, "back", True)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30))))
def test_spans_are_lent_once_and_join_again(steps):
    free, lent = FreeSpans(100), []
    for take, nbytes, pick in steps:
        if take:
            offset = free.take(nbytes)
            gaps = np.ones(100, bool)
            for start, length in lent:
                gaps[start : start + length] = False
            if offset is None:
                assert "1" * nbytes not in "".join("01"[int(gap)] for gap in gaps)
            else:
                assert offset + nbytes <= 100
                assert gaps[offset : offset + nbytes].all()
                lent.append((offset, nbytes))
        elif lent:
            free.give(*lent.pop(pick % len(lent)))
    for span in lent:
        free.give(*span)
    assert free.take(100) == 0


@pytest.mark.parametrize("inline_bytes", [4096, 0], ids=["inline", "in a slot"])
async def test_a_block_is_held_until_the_readers_array_dies_though_the_lease_was_released(tmp_path, inline_bytes):
    producer = make_connector("shm", "producer", tmp_path, msgspec.structs.replace(OPTIONS, inline_bytes=inline_bytes))
    consumer = make_connector("shm", "consumer", tmp_path, OPTIONS)
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    try:
        outlet = await producer.dial(await consumer.open(leases.put_nowait, lambda peer: None, lambda request_id, epoch: None))
        array = block_array()
        given = Given(array)
        specs, arrays, _ = describe({"hidden": array})
        await outlet.send(ChunkHeader("r", 0, "a", "out", 0, "hidden", 0, specs), arrays)
        del array, arrays
        lease = await leases.get()
        [arrived] = lease.arrays()
        assert msgspec.msgpack.decode(memoryview(arrived), type=Block) == BLOCK
        lease.release()
        await outlet.send(ChunkHeader("r", 0, "a", "out", 1, "event"))
        (await leases.get()).release()
        await asyncio.sleep(0.05)  # longer than a release waits for others
        assert not given.back
        del arrived
        await until(lambda: given.back)
    finally:
        await producer.close()
        await consumer.close()


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "send_to_all"])
async def test_a_block_for_two_consumers_comes_back_when_both_have_released_it(tmp_path, at_once):
    producer = make_connector("shm", "producer", tmp_path, OPTIONS)
    consumers = [make_connector("shm", f"consumer-{n}", tmp_path, OPTIONS) for n in range(2)]
    leases: list[Lease] = []
    try:
        array = block_array()
        given = Given(array)
        specs, arrays, _ = describe({"hidden": array})
        header = ChunkHeader("r", 0, "a", "out", 0, "hidden", 0, specs)
        outlets = [
            await producer.dial(await consumer.open(leases.append, lambda peer: None, lambda request_id, epoch: None))
            for consumer in consumers
        ]
        if at_once:
            await send_to_all(outlets, header, arrays)
        else:
            for outlet in outlets:
                await outlet.send(header, arrays)
        del array, arrays
        await until(lambda: len(leases) == 2)
        leases[0].release()
        await until(lambda: not outlet_holds(producer, 1))
        assert not given.back
        leases[1].release()
        await until(lambda: given.back)
    finally:
        for connector in (producer, *consumers):
            await connector.close()


def outlet_holds(producer: Connector, more_than: int) -> bool:
    outlets = producer._outlets.values()
    return sum(len(outlet._lent) for outlet in outlets) > more_than


def test_ends_that_block_hold_a_block_until_the_readers_array_dies(tmp_path):
    with BlockingInbound(tmp_path / "lane", timeout_s=5) as inbound, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(inbound.accept)
        with BlockingOutlet(inbound.endpoint, "producer", msgspec.structs.replace(OPTIONS, window_chunks=1), timeout_s=5) as outlet:
            accepted.result()
            array = block_array()
            given = Given(array)
            specs, arrays, _ = describe({"hidden": array})
            outlet.send(ChunkHeader("r", 0, "a", "out", 0, "hidden", 0, specs), arrays)
            del array, arrays
            lease = inbound.recv()
            [arrived] = lease.arrays()
            lease.release()
            assert not given.back
            del arrived  # released without company
            outlet.send(ChunkHeader("r", 0, "a", "out", 1, "event"))
            assert given.back


async def test_a_killed_consumers_blocks_come_back(tmp_path):
    producer = make_connector("shm", "producer", tmp_path, OPTIONS)
    peer = await asyncio.create_subprocess_exec(sys.executable, PEER, "hold", "shm", str(tmp_path), stdout=asyncio.subprocess.PIPE)
    try:
        assert peer.stdout is not None
        outlet = await producer.dial((await peer.stdout.readline()).decode().strip())
        given = []
        for seq in range(3):
            array = block_array()
            given.append(Given(array))
            specs, arrays, _ = describe({"hidden": array})
            await outlet.send(ChunkHeader("r", 0, "a", "out", seq, "hidden", 0, specs), arrays)
        del array, arrays
        assert not any(one.back for one in given)
        peer.send_signal(signal.SIGKILL)
        await until(lambda: all(one.back for one in given))
    finally:
        with contextlib.suppress(ProcessLookupError):
            peer.kill()
        await peer.wait()
        await producer.close()


async def test_other_connectors_refuse_device_memory(tmp_path):
    specs, arrays, _ = describe({"hidden": block_array()})
    connector = make_connector("memory", "both", tmp_path, OPTIONS)
    outlet = await connector.dial(await connector.open(lambda lease: None, lambda peer: None, lambda request_id, epoch: None))
    with pytest.raises(ValueError, match="by the shm connector"):
        await outlet.send(ChunkHeader("r", 0, "a", "out", 0, "hidden", 0, specs), arrays)
    await connector.close()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(9, np.uint8),
        block_array(msgspec.structs.replace(BLOCK, offset=4000)),
        block_array(msgspec.structs.replace(BLOCK, event=b"")),
    ],
    ids=["not a block", "past the end", "no handle"],
)
async def test_what_is_not_a_block_of_its_pool_is_refused(array):
    reader = CudaReader()
    with pytest.raises(ProtocolError):
        reader.open(array, 0)
    reader.close()
