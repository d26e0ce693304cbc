"""Processes killed or stopped at random points of a write and a read: clear errors, right bytes, nothing left behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transport import crashing
from tests.transport.conftest import left, settle
from transport.connector import Connector
from transport.errors import Broken
from transport.shm import ShmConnector

POINTS = 100  # on each of two event loops
SEEN_WITHIN_S = 0.1  # twice what is promised: the machine may be busy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]


def crash_connector(connectors: Callable[..., Connector], name: str) -> ShmConnector:
    options = {name: getattr(crashing.OPTIONS, name) for name in crashing.OPTIONS.__struct_fields__}
    connector = connectors("shm", name, **options)
    assert isinstance(connector, ShmConnector)
    return connector


async def test_a_producer_killed_at_any_point_is_lost_and_what_it_sent_is_right(
    connectors: Callable[..., Connector], processes: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    dice, late = random.Random(5), []
    connector = crash_connector(connectors, "consumer")
    reader: list[crashing.Reader] = []
    lost: asyncio.Queue[float] = asyncio.Queue()
    endpoint = await connector.open(
        lambda lease: reader[-1].on_chunk(lease), lambda peer: lost.put_nowait(time.monotonic()), lambda request_id, epoch: None
    )
    before = None
    for point in range(POINTS):
        reader.append(crashing.Reader(point))
        producer = processes.Process(target=crashing.produce, args=(tmp_path / "peer", endpoint, point), daemon=True)
        producer.start()
        async with asyncio.timeout(20):
            while reader[-1].count == 0:
                await asyncio.sleep(0.001)
            await asyncio.sleep(dice.random() * 0.03)
            killed = time.monotonic()
            os.kill(producer.pid or 0, signal.SIGKILL)
            late.append(await lost.get() - killed)
        for lease in reader[-1].held:  # still readable, and still right
            (array,) = lease.arrays()
            assert array.min() == array.max() == lease.header.seq
            del array
            lease.release()
        reader[-1].held.clear()
        await asyncio.to_thread(producer.join)
        producer.close()
        await settle(lambda: not connector._inbounds)
        before = before or left()
    assert left() == before
    assert sum(reader.count for reader in reader) > 10 * POINTS
    assert sorted(late)[POINTS // 2] < SEEN_WITHIN_S


async def test_a_consumer_killed_at_any_point_breaks_the_sends_and_gives_everything_back(
    connectors: Callable[..., Connector], processes: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    dice, late = random.Random(6), []
    connector = crash_connector(connectors, "producer")
    await connector.reserve()
    before = None
    for point in range(POINTS):
        hears, says = processes.Pipe()
        consumer = processes.Process(target=crashing.consume, args=(tmp_path / "peer", says, point), daemon=True)
        consumer.start()
        says.close()
        endpoint = await asyncio.to_thread(hears.recv)
        hears.close()
        sending = asyncio.create_task(crashing.send_for_ever(connector, endpoint, point))
        await asyncio.sleep(0.005 + dice.random() * 0.03)
        assert not sending.done()
        killed = time.monotonic()
        os.kill(consumer.pid or 0, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(ExceptionGroup) as caught:
                await sending
        late.append(time.monotonic() - killed)
        assert caught.group_contains(Broken)
        del caught, sending
        await settle(lambda: connector.stats().slots_in_use == connector.stats().peers == 0)
        await asyncio.to_thread(consumer.join)
        consumer.close()
        before = before or (left()[1], connector.stats().bytes_total)
    assert left()[1] == before[0]
    assert connector.stats().bytes_total <= before[1] + crashing.OPTIONS.max_chunk_bytes
    assert connector.stats().chunks_sent > 10 * POINTS
    assert sorted(late)[POINTS // 2] < SEEN_WITHIN_S


async def test_a_stopped_producer_holds_nobody_and_goes_on(
    connectors: Callable[..., Connector], processes: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    connector = crash_connector(connectors, "consumer")
    reader = crashing.Reader(0)
    lost: list[str] = []
    endpoint = await connector.open(reader.on_chunk, lost.append, lambda request_id, epoch: None)
    producer = processes.Process(target=crashing.produce, args=(tmp_path / "peer", endpoint, 0), daemon=True)
    producer.start()
    for _ in range(20):
        seen = reader.count
        async with asyncio.timeout(20):
            while reader.count < seen + 20:
                await asyncio.sleep(0.001)
                if reader.held:  # what it keeps may be all that the producer has
                    reader.held.popleft().release()
        os.kill(producer.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(0.01)
        for lease in reader.held:
            assert lease.arrays()[0].max() == lease.header.seq
        os.kill(producer.pid or 0, signal.SIGCONT)
    assert not lost
    producer.kill()
    await asyncio.to_thread(producer.join)
    producer.close()
    reader.held.clear()
    await settle(lambda: bool(lost))
