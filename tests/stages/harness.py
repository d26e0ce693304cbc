"""Drive a stage as an actor would, without one: load it, feed it, collect what it yields."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrt import Chunk, Context, Request, Stage, weights


@contextlib.contextmanager
def loaded(cls: type[Stage], args: dict[str, Any] | None = None, *, threads: int = 2) -> Iterator[Stage]:
    """A stage that is ready, and is closed afterwards. Models come from the cache; what is not there is fetched."""

    def resolve(source: str) -> Path | weights.ModelSource:
        return weights.fetch(source)

    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        context = Context(stage="stage", threads=threads, resolve=resolve, compute=compute)
        stage = cls(msgspec.convert(args or {}, cls.Args), context)
        compute.submit(stage.load).result()
        try:
            yield stage
        finally:
            stage.close()


async def feed(chunks: Iterable[Chunk] | AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """`chunks` as a stage gets them: with a turn of the loop between two."""
    if isinstance(chunks, AsyncIterator):
        async for chunk in chunks:
            yield chunk
        return
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk


async def run(stage: Stage, request: Request, chunks: Iterable[Chunk] | AsyncIterator[Chunk]) -> list[Chunk]:
    """All that `stage` yields for `request` over `chunks`."""
    return [chunk async for chunk in stage.process(request, feed(chunks))]


def request(task: str, **params: Any) -> Request:
    return Request("r1", task, params)


def joined(chunks: Iterable[Chunk]) -> np.ndarray:
    """The samples of the audio chunks, one after the other."""
    return np.concatenate([np.zeros(0, np.float32), *(chunk.samples for chunk in chunks if chunk.modality == "audio")])


def sliced(samples: np.ndarray, size: int, make: Callable[[np.ndarray], Chunk]) -> list[Chunk]:
    """`samples` as chunks of `size`."""
    return [make(samples[start : start + size]) for start in range(0, len(samples), size)]
