"""Arrays that are written when their chunk is sent: off the loop, into the slot, never half. On a GPU: tests/stages/test_host_tensors.py."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.transport.conftest import Inbox, settle
from transport.blocking import BlockingInbound, BlockingOutlet
from transport.chunk import ChunkHeader, describe, numpy_dtype
from transport.connector import Connector, ConnectorOptions
from transport.deferred import Deferred
from transport.memfile import mapping_of
from transport.shm import ShmConnector

MIB = 2**20
INT32 = np.dtype(np.int32)


class Late(Deferred):
    """Counts 0, 1, 2 ..., when it is let."""

    go: threading.Event
    wrote_on: list[int]
    failure: Exception | None = None

    def __new__(cls, shape: tuple[int, ...], dtype: np.dtype[Any] = INT32) -> Self:
        array = super().__new__(cls, shape, dtype)
        array.go, array.wrote_on = threading.Event(), []
        array.go.set()
        return array

    def write(self, target: np.ndarray) -> None:
        self.go.wait()
        self.wrote_on.append(threading.get_ident())
        if self.failure is not None:
            raise self.failure
        target[...] = np.arange(self.size).reshape(self.shape)


def carrying(*tensors: np.ndarray) -> tuple[ChunkHeader, list[np.ndarray]]:
    specs, arrays, _ = describe({f"t{i}": tensor for i, tensor in enumerate(tensors)})
    return ChunkHeader("r", 0, "s", "p", 0, "hidden", 0, specs), arrays


@pytest.mark.parametrize("scheme", ["shm", "tcp", "memory"])
@pytest.mark.parametrize("shape", [(40, 500), (3, MIB)], ids=["slot", "jumbo area"])
async def test_it_arrives_as_an_array_and_the_loop_goes_on_meanwhile(
    connectors: Callable[..., Connector], inbox: Inbox, scheme: str, shape: tuple[int, ...]
) -> None:
    producer, consumer = connectors(scheme, "producer"), connectors(scheme, "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    late, plain = Late(shape), np.full(100, 7, np.uint8)
    late.go.clear()
    sending = asyncio.create_task(outlet.send(*carrying(plain, late)))
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not sending.done()
    late.go.set()
    await sending
    assert late.wrote_on != [threading.get_ident()]
    _, (first, second) = await inbox.take()
    assert (first == 7).all()
    assert np.array_equal(second, np.arange(late.size, dtype=np.int32).reshape(shape))


async def test_a_small_one_rides_in_the_descriptor_and_a_carried_dtype_keeps_its_name(
    connectors: Callable[..., Connector], inbox: Inbox
) -> None:
    producer, consumer = connectors("shm", "producer"), connectors("shm", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*carrying(Late((7,), numpy_dtype("bfloat16"))))
    header, (array,) = await inbox.take()
    assert header.tensors[0].dtype == "bfloat16"
    assert array.tolist() == [0, 1, 2, 3, 4, 5, 6]


async def test_a_send_that_is_cancelled_keeps_the_slot_until_the_writing_has_ended(
    connectors: Callable[..., Connector], inbox: Inbox
) -> None:
    producer, consumer = connectors("shm", "producer"), connectors("shm", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    late = Late((50, 500))
    late.go.clear()
    sending = asyncio.create_task(outlet.send(*carrying(late)))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    assert producer.stats().slots_in_use == 1
    late.go.set()
    await settle(lambda: producer.stats().slots_in_use == 0)
    assert inbox.leases.empty()


async def test_one_that_fails_fails_its_send_alone(connectors: Callable[..., Connector], inbox: Inbox) -> None:
    producer, consumer = connectors("shm", "producer"), connectors("shm", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    late = Late((50, 500))
    late.failure = OSError("the device is lost")
    with pytest.raises(OSError, match="lost"):
        await outlet.send(*carrying(late))
    assert producer.stats().slots_in_use == 0
    await outlet.send(*carrying(Late((50, 500))))
    assert (await inbox.take())[1][0][49, 499] == 24_999


def test_ends_that_block_write_it_too(tmp_path: Path) -> None:
    with BlockingInbound(tmp_path / "lane", timeout_s=5) as inbound, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(inbound.accept)
        with BlockingOutlet(inbound.endpoint, "producer", ConnectorOptions(arena_bytes=8 * MIB), timeout_s=5) as outlet:
            accepted.result()
            outlet.send(*carrying(Late((50, 500))))
            assert inbound.recv().arrays()[0][49, 499] == 24_999


def test_nothing_reads_it_by_mistake() -> None:
    late = Late((4, 5))
    for read in (lambda: late + 1, lambda: np.concatenate([late, late]), lambda: late[0], lambda: np.sum(late)):
        with pytest.raises(TypeError, match="not in host memory"):
            read()
    assert late.copy()[3, 4] == 19


async def test_what_pins_a_ring_dies_with_its_mapping_and_before_it(tmp_path: Path, inbox: Inbox) -> None:
    """How the driver learns that a ring goes: nobody unmaps one by hand."""

    class Pin:
        def __init__(self, address: int) -> None:
            self.address = address

        def __del__(self) -> None:
            mapped.append(is_mapped(self.address))

    class Pinning(Late):
        def write(self, target: np.ndarray) -> None:
            mapping = mapping_of(target)
            assert mapping is not None
            addresses.append(np.frombuffer(mapping, np.uint8).ctypes.data)
            mapping.pinned = mapping.pinned or Pin(addresses[0])
            super().write(target)

    mapped: list[bool] = []
    addresses: list[int] = []
    producer, consumer = (ShmConnector(name, tmp_path, ConnectorOptions(arena_bytes=8 * MIB)) for name in ("producer", "consumer"))
    outlet = await producer.dial(await inbox.open(consumer))
    for _ in range(3):
        await outlet.send(*carrying(Pinning((50, 500))))
        await inbox.take()
    assert len(set(addresses)) == 1
    assert mapped == []
    assert mapping_of(np.zeros(3)) is None
    await producer.close()
    await consumer.close()
    del outlet, producer, consumer
    gc.collect()
    assert mapped == [True]
    assert not is_mapped(addresses[0])


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
