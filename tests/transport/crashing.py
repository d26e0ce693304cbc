"""What the processes of the crash tests do until they are killed: by others at a random time, or by themselves at a step of their own code.

Patterned chunks, so that a reader can tell whether bytes are right. A step is found by the interpreter's trace function, so the code under
test knows nothing of it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pkgutil
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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


class Step(NamedTuple):
    """A moment in a process's life: the `nth` time that `function` is at `event`."""

    function: str  # "transport.ring:Ring.loan"
    event: str  # "call", "return", or a piece of the source line that is about to run
    nth: int = 1


def die_at(step: Step) -> Callable[[], None]:
    """This process kills itself there, with a signal that nothing handles. Before any thread is made; counts from when it calls what returns."""
    function = inspect.unwrap(pkgutil.resolve_name(step.function))
    code, line = function.__code__, 0
    if step.event not in ("call", "return"):
        source, first = inspect.getsourcelines(function)
        [line] = [first + i for i, text in enumerate(source) if step.event in text]
    left, armed = step.nth, threading.Event()

    def on_event(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        nonlocal left
        if armed.is_set() and ((event == "line" and frame.f_lineno == line) or event == step.event):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_event

    _trace(lambda frame, event, arg: on_event(frame, event, arg) if frame.f_code is code else None)
    return armed.set


def die_after(lines: int) -> None:
    """This process kills itself when so many lines of `transport` have run."""
    left = lines

    def on_event(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        nonlocal left
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_event

    folder = f"{os.sep}transport{os.sep}"
    _trace(lambda frame, event, arg: on_event if folder in frame.f_code.co_filename and __file__ != frame.f_code.co_filename else None)


def _trace(function: Callable[..., Any]) -> None:
    threading.settrace(function)
    sys.settrace(function)


def produce(directory: Path, endpoint: str, seed: int, lines: int = 0) -> None:
    """Four streams, until it is killed."""

    async def run() -> None:
        if lines:
            die_after(lines)
        await send_for_ever(ShmConnector("producer", directory, OPTIONS), endpoint, seed)

    asyncio.run(run())


def consume(directory: Path, says: Connection, seed: int, lines: int = 0) -> None:
    """Says its endpoint and reads, until it is killed."""

    async def run() -> None:
        reader = Reader(seed)
        connector = ShmConnector("consumer", directory, OPTIONS)
        says.send(await connector.open(reader.on_chunk, lambda peer: None, lambda request_id, epoch: None))
        if lines:
            die_after(lines)
        await asyncio.Event().wait()

    asyncio.run(run())


STEP_CHUNKS = 4  # a producer that dies at a step of a write dies in the last of so many


def halves(seq: int, size: int) -> tuple[ChunkHeader, list[np.ndarray]]:
    """A chunk of two tensors that say `seq`."""
    specs, arrays, _ = describe({name: np.full(size // 2, seq, np.uint8) for name in ("first", "second")})
    return ChunkHeader("r", 0, "s", "out", seq, "tokens", 0, specs), arrays


def read_half(array: np.ndarray) -> int:
    """A reader between the two halves of a chunk."""
    return int(array.max())


def produce_until(directory: Path, endpoint: str, step: Step, size: int) -> None:
    """STEP_CHUNKS chunks, and dies on the way, or when their releases come."""

    async def run() -> None:
        begin = die_at(step)
        outlet = await ShmConnector("producer", directory, OPTIONS).dial(endpoint)
        begin()
        for seq in range(STEP_CHUNKS):
            await outlet.send(*halves(seq, size))
        await asyncio.Event().wait()

    asyncio.run(run())


def consume_until(directory: Path, says: Connection, step: Step) -> None:
    """Reads, and dies on the way."""

    def on_chunk(lease: Lease) -> None:
        first, second = lease.arrays()
        assert read_half(first) == lease.header.seq
        assert second.max() == lease.header.seq
        del first, second
        lease.release()

    async def run() -> None:
        begin = die_at(step)
        connector = ShmConnector("consumer", directory, OPTIONS)
        says.send(await connector.open(on_chunk, lambda peer: None, lambda request_id, epoch: None))
        begin()
        await asyncio.Event().wait()

    asyncio.run(run())
