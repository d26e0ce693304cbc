"""Processes that are stopped while others wait for them: given up, never overwritten, welcome again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.transport.conftest import Inbox, PeerProcess, chunk, settle
from transport.connector import Connector, Outlet
from transport.errors import Broken

HANG_S = 0.2
SIZE = 100_000

pytestmark = pytest.mark.timeout(30)


async def flood(outlet: Outlet, request_id: str = "r") -> None:
    """Send until it ends; every byte of a chunk is its seq, modulo 251."""
    for seq in range(10_000):
        await outlet.send(*chunk(request_id, seq, np.full(SIZE, seq % 251, np.uint8)))


@pytest.mark.parametrize("end", [pytest.param(signal.SIGCONT, id="wakes"), pytest.param(signal.SIGKILL, id="dies", marks=pytest.mark.slow)])
async def test_what_a_stopped_consumer_may_read_is_not_used_before_it_has_let_go(
    connectors: Callable[..., Connector], inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path, end: signal.Signals
) -> None:
    producer, other = (connectors("shm", name, hang_timeout_s=HANG_S, window_chunks=4) for name in ("producer", "other"))
    peer = peer_process("hold", "shm", str(tmp_path))
    outlet = await producer.dial(await peer.line())
    flooding = asyncio.create_task(flood(outlet))
    await settle(lambda: producer.stats().credit_waits > 0)
    peer.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(Broken, match="hangs"):
        await flooding
    assert HANG_S <= time.monotonic() - stopped < 4 * HANG_S
    with pytest.raises(Broken, match="hangs"):
        await outlet.send(*chunk("late", 0))

    # Its 4 chunks stay where they are, whatever others are sent.
    stats = producer.stats()
    assert (stats.peers_hung, stats.slots_in_use, stats.bytes_quarantined) == (1, 4, 4 * SIZE)
    to_other = await producer.dial(await inbox.open(other))
    for seq in range(100):
        await to_other.send(*chunk("live", seq, np.full(SIZE, 255, np.uint8)))
        assert (await inbox.take())[0].seq == seq
    await settle(lambda: producer.stats().slots_in_use == 4)

    peer.signal(end)
    if end == signal.SIGCONT:
        assert await peer.line() == "4 chunks, whole"
    await settle(lambda: producer.stats().slots_in_use == producer.stats().bytes_quarantined == 0)
    assert producer.stats().peers == 1
    if end == signal.SIGCONT:  # it is as good as new
        again = await producer.dial(outlet.endpoint)
        await again.send(*chunk("r", 0, np.full(SIZE, 0, np.uint8)))
        await producer.close()
        assert await peer.line() == "1 chunks, whole"


@pytest.mark.slow
async def test_chunks_that_a_stopped_consumer_was_not_told_of_are_dropped_and_come_back(
    connectors: Callable[..., Connector], peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    """More than its socket takes: the rest waits in the producer when it is given up."""
    producer = connectors("shm", "producer", hang_timeout_s=HANG_S, window_chunks=4)
    peer = peer_process("hold", "shm", str(tmp_path))
    outlet = await producer.dial(await peer.line())
    peer.signal(signal.SIGSTOP)
    big = np.zeros(30_000, np.uint8)
    for i in range(3_000):  # in line, so none of these waits
        await outlet.send(*chunk(f"small-{i}", 0, np.zeros(4_000, np.uint8)))
    for seq in range(4):
        await outlet.send(*chunk("r", seq, big))
    with pytest.raises(Broken, match="hangs"):
        await outlet.send(*chunk("r", 4, big))
    assert producer.stats().slots_in_use == 4
    peer.signal(signal.SIGCONT)
    told = int((await peer.line()).split()[0])
    assert 0 < told < 3_004
    await settle(lambda: producer.stats().slots_in_use == 0)


@pytest.mark.slow
async def test_a_consumer_that_is_slow_is_not_given_up(
    connectors: Callable[..., Connector], peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    producer = connectors("shm", "producer", hang_timeout_s=HANG_S, window_chunks=4)
    peer = peer_process("hold", "shm", str(tmp_path))
    flooding = asyncio.create_task(flood(await producer.dial(await peer.line())))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flooding, 5 * HANG_S)
    assert producer.stats().peers_hung == 0


@pytest.mark.slow
async def test_one_that_hangs_with_the_slots_of_others_is_given_up_for_them(
    connectors: Callable[..., Connector], inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    """No send to it waits; a send to somebody else needs a slot, and half of them are with it."""
    producer, other = (connectors("shm", name, arena_bytes=2**20, window_chunks=100, hang_timeout_s=HANG_S) for name in ("a", "b"))
    peer = peer_process("hold", "shm", str(tmp_path))
    outlet = await producer.dial(await peer.line())
    to_other = await producer.dial(await inbox.open(other))
    for seq in range(4):  # as many as one request may hold of so small an arena
        await outlet.send(*chunk("r", seq, np.full(60_000, seq, np.uint8)))
    peer.signal(signal.SIGSTOP)
    waiting = asyncio.create_task(flood_small(to_other))
    await settle(lambda: producer.stats().peers_hung == 1)
    assert not waiting.done()
    while not inbox.leases.empty():
        await inbox.take()
    peer.signal(signal.SIGCONT)
    assert await peer.line() == "4 chunks, whole"
    waiting.cancel()


async def flood_small(outlet: Outlet) -> None:
    for seq in range(10_000):
        await outlet.send(*chunk("other", seq, np.zeros(60_000, np.uint8)))


@pytest.mark.slow
async def test_a_dial_to_a_stopped_process_ends(
    connectors: Callable[..., Connector], peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    producer = connectors("shm", "producer", hang_timeout_s=HANG_S)
    peer = peer_process("hold", "shm", str(tmp_path))
    endpoint = await peer.line()
    peer.signal(signal.SIGSTOP)
    with pytest.raises(Broken, match="hangs"):
        await producer.dial(endpoint)
    peer.signal(signal.SIGCONT)
    await producer.dial(endpoint)


@pytest.mark.slow
async def test_a_producer_that_was_stopped_itself_gives_nobody_up(
    connectors: Callable[..., Connector], inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    consumer = connectors("shm", "consumer")
    peer = peer_process("flood", "shm", str(tmp_path), await inbox.open(consumer))
    async with asyncio.timeout(10):
        held = [await inbox.leases.get() for _ in range(4)]
    for _ in range(3):
        peer.signal(signal.SIGSTOP)
        await asyncio.sleep(2 * HANG_S)
        assert [int(lease.arrays()[0].max()) for lease in held] == [lease.header.seq for lease in held]
        peer.signal(signal.SIGCONT)
    for lease in held:
        lease.release()
    async with asyncio.timeout(10):
        for seq in range(4, 200):
            header, (array,) = await inbox.take()
            assert (header.seq, array.min(), array.max()) == (seq, seq % 251, seq % 251)
    assert inbox.lost.empty()
