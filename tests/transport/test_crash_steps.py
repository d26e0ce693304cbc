"""Processes that die at each step of a write and of a read: the survivor is told, has everything back, and goes on with the next one.

The steps are named by the functions of `transport` that they begin or end with; a hundred more are lines of it, picked by seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.transport import crashing
from tests.transport.conftest import left, settle
from tests.transport.crashing import STEP_CHUNKS, Step, halves
from transport.connector import Connector, Lease
from transport.errors import Broken
from transport.shm import ShmConnector

SLOT, JUMBO = 50_000, 5_000_000  # bytes; STEP_CHUNKS of the former wait for nothing
LAST = STEP_CHUNKS - 1

pytestmark = pytest.mark.timeout(30)


# What dies, and how many of its chunks had been announced by then.
WRITE = {
    "credit taken": (Step("transport.window:Window.try_enter", "return", STEP_CHUNKS), SLOT, LAST),
    "slot taken": (Step("transport.ring:Ring.loan", "return", STEP_CHUNKS), SLOT, LAST),
    "half the payload copied": (Step("transport.payload:fill", "target[...] = array", 2 * STEP_CHUNKS), SLOT, LAST),
    "payload copied": (Step("transport.ring:Ring.seal", "call", STEP_CHUNKS), SLOT, LAST),
    "slot sealed": (Step("transport.ring:Ring.seal", "return", STEP_CHUNKS), SLOT, LAST),
    "descriptor ready": (Step("transport.channel:Lane.post", "call", STEP_CHUNKS), SLOT, LAST),
    "announced": (Step("transport.channel:Lane.post", "return", STEP_CHUNKS), SLOT, STEP_CHUNKS),
    "recorded": (Step("transport.outlet:ShmOutlet.post", "return", STEP_CHUNKS), SLOT, STEP_CHUNKS),
    "release received": (Step("transport.outlet:ShmOutlet._on_release", "call"), SLOT, STEP_CHUNKS),
    "slot free again": (Step("transport.ring:Ring.release", "return"), SLOT, STEP_CHUNKS),
    "jumbo area made": (Step("transport.arena:_make_file", "return"), JUMBO, 0),
    "jumbo area half copied": (Step("transport.payload:fill", "target[...] = array", 2), JUMBO, 0),
    "jumbo descriptor on its way": (Step("transport.channel:Lane.post", "return", 1), JUMBO, 0),
    "jumbo area known": (Step("transport.channel:Lane.post", "return", 2), JUMBO, 0),
    "jumbo chunk announced": (Step("transport.channel:Lane.post", "return", 3), JUMBO, 1),
}

READ = {
    "connected": Step("transport.shm:ShmConnector._on_peer", "return"),
    "introduced": Step("transport.inbound:Inbound._on_hello", "call"),
    "arena mapped": Step("transport.inbound:Inbound._map", "return"),
    "welcomed": Step("transport.inbound:Inbound._on_hello", "return"),
    "descriptor received": Step("transport.inbound:Inbound._on_message", "message.borrower", STEP_CHUNKS),
    "lease made": Step("transport.inbound:Inbound._on_message", "self._on_chunk(message)", STEP_CHUNKS),
    "view taken": Step("transport.lease:ShmLease.arrays", "return", STEP_CHUNKS),
    "half read": Step("tests.transport.crashing:read_half", "return", STEP_CHUNKS),
    "lease let go": Step("transport.lease:ShmLease.release", "call", STEP_CHUNKS),
    "settled": Step("transport.inbound:Inbound.settle", "return", STEP_CHUNKS),
    "release ready": Step("transport.inbound:Inbound._flush", "call"),
    "release sent": Step("transport.inbound:Inbound._flush", "return"),
}


OFTEN = {"half the payload copied", "announced", "half read", "release ready"}  # the others with the slow tests


def steps(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in names]


@pytest.fixture
async def survivor(connectors: Callable[..., Connector], processes: ForkServerContext) -> Survivor:
    first = processes.Process(target=int)  # starts the server
    first.start()
    await asyncio.to_thread(first.join)
    first.close()
    options = {name: getattr(crashing.OPTIONS, name) for name in crashing.OPTIONS.__struct_fields__}
    connector = connectors("shm", "survivor", **options)
    assert isinstance(connector, ShmConnector)
    survivor = Survivor(connector)
    survivor.endpoint = await connector.open(
        lambda lease: survivor.on_chunk(lease), survivor.lost.put_nowait, lambda request_id, epoch: None
    )
    await connector.reserve()
    return survivor


class Survivor:
    """The process that is left. It reads what comes, and lets go of it at once."""

    endpoint: str

    def __init__(self, connector: ShmConnector) -> None:
        self.connector = connector
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.seen: list[int] = []

    def on_chunk(self, lease: Lease) -> None:
        seq = lease.header.seq
        assert [int(word) for array in lease.arrays() for word in (array.min(), array.max())] == 2 * len(lease.header.tensors) * [seq]
        self.seen.append(seq)
        lease.release()

    async def has_nothing_left(self, before: tuple[int, list[str]]) -> None:
        """No slot, no peer, no descriptor and no file more than before."""
        stats = self.connector.stats
        await settle(lambda: stats().slots_in_use == stats().peers == 0 and not self.connector._inbounds)
        assert left() == before

    async def talks_to_itself(self) -> None:
        """A peer that lives gets, in this arena and by this listener, what one should."""
        self.seen.clear()
        outlet = await self.connector.dial(self.endpoint)
        for seq, size in enumerate((100, SLOT, SLOT)):
            await outlet.send(*halves(seq, size))
        await settle(lambda: self.seen == [0, 1, 2] and self.connector.stats().slots_in_use == 0)
        await outlet.close()
        await self.lost.get()
        await settle(lambda: self.connector.stats().peers == 0)


async def ended(process: ForkServerProcess) -> None:
    await asyncio.to_thread(process.join)
    assert process.exitcode == -9
    process.close()


@pytest.mark.parametrize("step", steps(WRITE))
async def test_a_producer_that_dies_at_a_step_of_a_write(
    survivor: Survivor, processes: ForkServerContext, tmp_path: Path, step: str
) -> None:
    where, size, announced = WRITE[step]
    await survivor.talks_to_itself()
    survivor.seen.clear()
    before = left()
    producer = processes.Process(target=crashing.produce_until, args=(tmp_path / "peer", survivor.endpoint, where, size), daemon=True)
    producer.start()
    async with asyncio.timeout(10):
        assert await survivor.lost.get() == "producer"
    await ended(producer)
    assert survivor.seen == list(range(announced))
    await survivor.has_nothing_left(before)
    await survivor.talks_to_itself()


@pytest.mark.parametrize("step", steps(READ))
async def test_a_consumer_that_dies_at_a_step_of_a_read(
    survivor: Survivor, processes: ForkServerContext, tmp_path: Path, step: str
) -> None:
    await survivor.talks_to_itself()
    before = left()
    hears, says = processes.Pipe()
    consumer = processes.Process(target=crashing.consume_until, args=(tmp_path / "peer", says, READ[step]), daemon=True)
    consumer.start()
    says.close()
    endpoint = await asyncio.to_thread(hears.recv)
    hears.close()
    with pytest.raises(Broken):
        async with asyncio.timeout(10):
            outlet = await survivor.connector.dial(endpoint)
            for seq in range(10_000):
                await outlet.send(*halves(seq % 251, SLOT))
    await ended(consumer)
    await survivor.has_nothing_left(before)
    await survivor.talks_to_itself()


# ---- a hundred lines each way, picked by seed, half of them on each event loop ----------------------------------------------------

POINTS = 50
MOST_LINES = 5_000  # some thirty chunks


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_producer_that_dies_at_any_line(survivor: Survivor, processes: ForkServerContext, tmp_path: Path) -> None:
    await survivor.talks_to_itself()
    dice, before, count = random.Random(f"producer {type(asyncio.get_running_loop())}"), left(), 0
    for point in range(POINTS):
        reader = crashing.Reader(point, most_held=0)
        survivor.on_chunk = reader.on_chunk  # type: ignore[method-assign]
        producer = processes.Process(
            target=crashing.produce, args=(tmp_path / "peer", survivor.endpoint, point, dice.randrange(1, MOST_LINES)), daemon=True
        )
        producer.start()
        await ended(producer)
        await settle(lambda: not survivor.connector._inbounds)
        await survivor.has_nothing_left(before)
        count += reader.count
    assert count > POINTS


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_consumer_that_dies_at_any_line(survivor: Survivor, processes: ForkServerContext, tmp_path: Path) -> None:
    await survivor.talks_to_itself()
    dice, before = (
        random.Random(f"consumer {type(asyncio.get_running_loop())}"),
        left()[1],
    )  # its own descriptors are more once it has had to make jumbo areas

    def stats_are_zero() -> bool:
        stats = survivor.connector.stats()
        return stats.slots_in_use == stats.peers == 0

    for point in range(POINTS):
        hears, says = processes.Pipe()
        lines = dice.randrange(1, MOST_LINES)
        consumer = processes.Process(target=crashing.consume, args=(tmp_path / "peer", says, point, lines), daemon=True)
        consumer.start()
        says.close()
        endpoint = await asyncio.to_thread(hears.recv)
        hears.close()
        with pytest.raises((Broken, ExceptionGroup)) as caught:
            async with asyncio.timeout(20):
                await crashing.send_for_ever(survivor.connector, endpoint, point)
        assert caught.errisinstance(Broken) or caught.group_contains(Broken)
        del caught
        await ended(consumer)
        await settle(stats_are_zero)
        assert left()[1] == before
    assert survivor.connector.stats().chunks_sent > POINTS
