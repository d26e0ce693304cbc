"""The connector against a plain model: per stream a deque of what was sent. All sizes, interleaved streams, cancels, late releases."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.conftest import Inbox, chunk, settle
from transport.connector import ConnectorOptions, Lease
from transport.errors import Closed
from transport.shm import ShmConnector

KIB, MIB = 2**10, 2**20
STREAMS, WINDOW, WINDOW_BYTES, MOST_HELD = 6, 8, 4 * MIB, 40
NOISE = np.random.default_rng(3).integers(0, 256, 13 * MIB, dtype=np.uint8)


class Driver:
    """Random operations, each checked against the model. Everything follows from `seed`."""

    def __init__(self, seed: int, consumer: ShmConnector, producer: ShmConnector) -> None:
        self.dice = random.Random(seed)
        self.consumer, self.producer = consumer, producer
        self.inbox = Inbox()
        self.epoch = [0] * STREAMS
        self.seq = [0] * STREAMS
        self.sent: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}  # stream, epoch -> (seq, start, size) on their way
        self.held: list[tuple[Lease, np.ndarray | None, int, int]] = []
        self.done = 0  # operations

    async def run(self, operations: int) -> None:
        self.outlet = await self.producer.dial(await self.inbox.open(self.consumer))
        while self.done < operations:
            what = self.dice.random()
            if what < 0.36:
                await self.send()
            elif what < 0.68:
                await self.take()
            elif what < 0.999:
                self.release()
            else:
                await self.cancel()
            self.done += 1
        while self.sent or self.held:
            await self.take()
            self.release()
        await settle(lambda: self.producer.stats().slots_in_use == 0)

    def size(self) -> int:
        kind = self.dice.random()
        most = 4 * KIB if kind < 0.8 else 64 * KIB if kind < 0.98 else MIB if kind < 0.9995 else 12 * MIB
        return self.dice.randrange(most)

    async def send(self) -> None:
        stream, size = self.dice.randrange(STREAMS), self.size()
        start = self.dice.randrange(len(NOISE) - size)
        key, seq = (f"r{stream}", self.epoch[stream]), self.seq[stream]
        arrays = NOISE[start : start + size]
        self.seq[stream] += 1
        self.sent.setdefault(key, deque()).append((seq, start, size))
        sending = self.outlet.send(*chunk(key[0], seq, arrays, epoch=key[1]))
        try:
            sending.send(None)  # the whole send, when nothing need be waited for
        except StopIteration:
            return
        sending.close()  # it leaves no trace
        task = asyncio.create_task(self.outlet.send(*chunk(key[0], seq, arrays, epoch=key[1])))
        async with asyncio.timeout(30):
            while not task.done():  # for credit, a slot, or a copy on a thread
                await self.take()
                self.release()
        await task

    async def take(self) -> None:
        if self.inbox.leases.empty():
            await asyncio.sleep(0)
            if self.inbox.leases.empty():
                return
        lease = self.inbox.leases.get_nowait()
        header = lease.header
        key = (header.request_id, header.epoch)
        waiting = self.sent[key]
        seq, start, size = waiting.popleft()
        if not waiting:
            del self.sent[key]
        assert (header.seq, header.tensors[0].nbytes) == (seq, size)
        (array,) = lease.arrays()
        assert np.array_equal(array, NOISE[start : start + size])
        self.held.append((lease, array if self.dice.random() < 0.5 else None, start, size))
        if len(self.held) > MOST_HELD:
            self.release()

    def release(self) -> None:
        if self.held:
            lease, array, start, size = self.held.pop(self.dice.randrange(len(self.held)))
            lease.release()
            if array is not None:  # a view keeps the bytes, released or not
                assert np.array_equal(array, NOISE[start : start + size])

    async def cancel(self) -> None:
        """What has been sent arrives still, since the cancel follows it; nothing of that epoch is sent any more."""
        stream = self.dice.randrange(STREAMS)
        self.outlet.cancel(f"r{stream}", self.epoch[stream])
        with pytest.raises(Closed):
            await self.outlet.send(*chunk(f"r{stream}", self.seq[stream], epoch=self.epoch[stream]))
        self.epoch[stream] += 1
        self.seq[stream] = 0


async def drive(seed: int, operations: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        options = ConnectorOptions(arena_bytes=8 * MIB, max_chunk_bytes=16 * MIB, window_chunks=WINDOW, window_bytes=WINDOW_BYTES)
        consumer, producer = (ShmConnector(name, Path(directory), options) for name in ("consumer", "producer"))
        try:
            await Driver(seed, consumer, producer).run(operations)
            assert producer.stats().chunks_sent == consumer.stats().chunks_received
        finally:
            await producer.close()
            await consumer.close()


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_the_connector_agrees_with_a_plain_model(seed: int) -> None:
    asyncio.run(drive(seed, 300))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_a_million_operations_agree_with_a_plain_model(seed: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drive(seed, 500_000))
