"""The blocking ends, against each other and against the connector on a loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.transport.conftest import Inbox, chunk
from transport.blocking import BlockingInbound, BlockingOutlet
from transport.connector import Connector, ConnectorOptions
from transport.errors import Broken, Closed, TooLarge

MIB = 2**20
OPTIONS = ConnectorOptions(arena_bytes=8 * MIB, window_chunks=4)


def pair(path: Path, options: ConnectorOptions = OPTIONS) -> tuple[BlockingOutlet, BlockingInbound]:
    inbound = BlockingInbound(path / "x.sock", timeout_s=5)
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(inbound.accept)
        outlet = BlockingOutlet(inbound.endpoint, "producer", options, timeout_s=5)
        accepting.result()
    return outlet, inbound


def test_chunks_of_all_sizes_arrive_in_order_and_intact(tmp_path: Path) -> None:
    outlet, inbound = pair(tmp_path)
    sizes = (0, 10, 5_000, 100_000, MIB)

    def produce() -> None:
        for seq in range(200):
            outlet.send(*chunk("r", seq, np.full(sizes[seq % 5], seq % 251, np.uint8)))

    with outlet, inbound, ThreadPoolExecutor(1) as thread:
        producing = thread.submit(produce)
        for seq in range(200):
            lease = inbound.recv()
            assert (lease.header.seq, lease.peer) == (seq, "producer")
            assert np.array_equal(lease.arrays()[0], np.full(sizes[seq % 5], seq % 251, np.uint8))
            lease.release()
        producing.result()
    assert os.listdir(tmp_path) == []


def test_a_send_waits_for_the_last_view_which_may_die_on_another_thread(tmp_path: Path) -> None:
    outlet, inbound = pair(tmp_path, ConnectorOptions(arena_bytes=8 * MIB, window_chunks=1))
    with outlet, inbound, ThreadPoolExecutor(1) as thread:
        outlet.send(*chunk("r", 0, np.arange(10_000)))
        lease = inbound.recv()
        views = [lease.arrays()[0][5:]]
        lease.release()
        sending = thread.submit(outlet.send, *chunk("r", 1, np.zeros(3)))
        receiving = threading.Thread(target=lambda: inbound.recv().release())
        receiving.start()
        assert views[0][0] == 5
        assert not sending.done()
        views.clear()
        sending.result(5)
        receiving.join()


def test_ends_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="nobody listens"):
        BlockingOutlet(f"shm:{tmp_path}/none", "x")
    with BlockingInbound(tmp_path / "deaf.sock") as deaf, pytest.raises(TimeoutError):
        BlockingOutlet(deaf.endpoint, "x", OPTIONS, timeout_s=0.05)
    outlet, inbound = pair(tmp_path)
    with pytest.raises(TooLarge):
        outlet.send(*chunk("r", 0, np.zeros(9 * MIB, np.uint8)))
    outlet.send(*chunk("r", 0, np.zeros(100_000, np.uint8)))
    outlet.cancel("r", 0)
    with pytest.raises(Closed):
        outlet.send(*chunk("r", 1))
    lease = inbound.recv()
    view = lease.arrays()[0]
    outlet.close()
    with pytest.raises(Broken):
        inbound.recv()
    inbound.close()
    assert view.sum() == 0
    with pytest.raises(Closed):
        lease.release() or inbound.area(0)


async def test_a_blocking_end_speaks_with_a_connector(connectors: Callable[..., Connector], inbox: Inbox, tmp_path: Path) -> None:
    connector = connectors("shm", "looped", window_chunks=2)
    inbound = BlockingInbound(tmp_path / "blocking.sock", timeout_s=10)
    endpoint = await inbox.open(connector)

    def echo() -> None:
        inbound.accept()
        with inbound, BlockingOutlet(endpoint, "echo", OPTIONS, timeout_s=10) as outlet:
            for seq in range(51):
                lease = inbound.recv()
                outlet.send(*chunk("r", seq, np.array([lease.arrays()[0].sum()])))
                lease.release()

    echoing = asyncio.create_task(asyncio.to_thread(echo))
    outlet = await connector.dial(inbound.endpoint)
    async with asyncio.timeout(20):
        for seq, size in enumerate([seq * 3000 for seq in range(50)] + [20 * MIB]):  # the last one in a jumbo area
            await outlet.send(*chunk("r", seq, np.ones(size, np.uint8)))
            header, (total,) = await inbox.take()
            assert (header.seq, total[0]) == (seq, size)
        await echoing
    assert await inbox.lost.get() == "echo"


async def test_a_burst_of_sends_hears_releases_without_returning_to_the_loop(connectors: Callable[..., Connector], tmp_path: Path) -> None:
    producer = connectors("shm", "producer", window_chunks=4)
    inbound = BlockingInbound(tmp_path / "x.sock", release_batch=1, timeout_s=5)

    def read(count: int) -> None:
        for _ in range(count):
            inbound.recv().release()

    with inbound, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(inbound.accept)
        outlet = await producer.dial(inbound.endpoint)
        accepting.result(5)
        for burst in range(3):
            for seq in range(4):
                await outlet.send(*chunk("r", 4 * burst + seq, np.zeros(100_000, np.uint8)))
            thread.submit(read, 4).result(5)  # the loop stands still meanwhile
        assert producer.stats().credit_waits == 0
