"""Connectors under test, their far ends in this process (`Inbox`) or in another one (`peer_process`), on both event loops."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import numpy as np
import pytest
import uvloop

from transport.chunk import ChunkHeader, describe
from transport.connector import Connector, ConnectorOptions, Lease
from transport.schemes import make_connector

PEER = Path(__file__).with_name("peer.py")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test of this folder runs on both loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Inbox:
    """A consumer: everything that its connector calls it with, in order."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def open(self, connector: Connector) -> str:
        return await connector.open(
            self.leases.put_nowait, self.lost.put_nowait, lambda request_id, epoch: self.cancelled.put_nowait((request_id, epoch))
        )

    async def take(self) -> tuple[ChunkHeader, list[np.ndarray]]:
        """The next chunk, copied and released."""
        lease = await self.leases.get()
        arrays = [array.copy() for array in lease.arrays()]
        lease.release()
        return lease.header, arrays


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def chunk(request_id: str, seq: int, *arrays: np.ndarray, epoch: int = 0) -> tuple[ChunkHeader, list[np.ndarray]]:
    """What `Outlet.send` takes."""
    specs, contiguous, _ = describe({f"t{i}": array for i, array in enumerate(arrays)})
    return ChunkHeader(request_id, epoch, "stage", "port", seq, "tokens", 0, specs), contiguous


async def settle(condition: Callable[[], bool]) -> None:
    """Run the loop until `condition` holds; what it waits for is on its way."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def connectors(tmp_path: Path) -> AsyncIterator[Callable[..., Connector]]:
    """`make(scheme, name, **options)`; all are closed at the end."""
    made: list[Connector] = []

    def make(scheme: str, name: str, **options: float) -> Connector:
        connector = make_connector(scheme, name, tmp_path, ConnectorOptions(**{"arena_bytes": 8 * 2**20, **options}), token="t")
        made.append(connector)
        return connector

    yield make
    for connector in made:
        await connector.close()


def left() -> tuple[int, list[str]]:
    """What this process has open, and what lies in /dev/shm."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))


@pytest.fixture(scope="module")
def processes() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Makes fresh processes in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transport.crashing"])
    yield context
    forkserver._forkserver._stop()  # they would stay until this process ends
    resource_tracker._resource_tracker._stop()


class PeerProcess:
    """`peer.py` in a process of its own; what it does is its first argument."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen([sys.executable, str(PEER), *arguments], stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    async def line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def peer_process() -> Iterator[Callable[..., PeerProcess]]:
    started: list[PeerProcess] = []

    def start(*arguments: str) -> PeerProcess:
        started.append(PeerProcess(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.end()
