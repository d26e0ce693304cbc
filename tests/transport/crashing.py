"""What the processes of test_crash.py do until they are killed. Patterned chunks, so that a reader can tell whether bytes are right."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease
from transport.shm import ShmConnector

OPTIONS = ConnectorOptions(arena_bytes=4 * 2**20, max_chunk_bytes=16 * 2**20, window_chunks=16)


def patterned(dice: random.Random, seq: int) -> np.ndarray:
    """Words that all say `seq`, inline, in slots and in jumbo areas."""
    kind = dice.random()
    most = 400 if kind < 0.5 else 8_000 if kind < 0.8 else 100_000 if kind < 0.99 else 400_000
    return np.full(dice.randrange(1, most), seq, np.int64)


async def send_for_ever(connector: ShmConnector, endpoint: str, seed: int) -> None:
    """Four streams, until the peer is gone."""
    outlet = await connector.dial(endpoint)

    async def stream(name: str) -> None:
        dice, seq = random.Random(f"{seed}{name}"), 0
        while True:
            specs, arrays, _ = describe({"t": patterned(dice, seq)})
            await outlet.send(ChunkHeader(name, 0, "s", "out", seq, "tokens", 0, specs), arrays)
            seq += 1

    async with asyncio.TaskGroup() as tasks:
        for i in range(4):
            tasks.create_task(stream(f"r{i}"))


class Reader:
    """Checks what comes, and keeps some leases for a while."""

    def __init__(self, seed: int) -> None:
        self.held: deque[Lease] = deque()
        self.count = 0
        self._dice = random.Random(seed)
        self._next_seq: dict[str, int] = {}

    def on_chunk(self, lease: Lease) -> None:
        request_id, seq = lease.header.request_id, lease.header.seq
        assert seq == self._next_seq.get(request_id, 0)
        self._next_seq[request_id] = seq + 1
        (array,) = lease.arrays()
        assert array.min() == array.max() == seq
        self.count += 1
        self.held.append(lease)
        if len(self.held) > 12:
            self.held.rotate(-self._dice.randrange(12))
            self.held.popleft().release()


def produce(directory: Path, endpoint: str, seed: int) -> None:
    async def run() -> None:
        await send_for_ever(ShmConnector("producer", directory, OPTIONS), endpoint, seed)

    asyncio.run(run())


def consume(directory: Path, says: Connection, seed: int) -> None:
    async def run() -> None:
        reader = Reader(seed)
        connector = ShmConnector("consumer", directory, OPTIONS)
        says.send(await connector.open(reader.on_chunk, lambda peer: None, lambda request_id, epoch: None))
        await asyncio.Event().wait()

    asyncio.run(run())
