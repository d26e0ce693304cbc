"""How soon a killed peer is seen: `kill -9` of a consumer that a send waits for, and of a producer in the middle of a stream.

    python tests/perf/bench_kill.py [--kills 100] [--loop uvloop|asyncio] [--json]

From just before the signal to `Broken` in the sending coroutine, and to `on_lost` in the consumer. The time in which the kernel takes the dead
process apart is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease, Outlet
from transport.errors import Broken
from transport.shm import ShmConnector

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
PASS_MS, STRETCH_MS = 50.0, 5.0
OPTIONS = ConnectorOptions(arena_bytes=16 * 2**20)
CHUNK_BYTES = 64 * 2**10


async def flood(outlet: Outlet) -> None:
    array = np.ones(CHUNK_BYTES, np.uint8)
    specs, arrays, _ = describe({"t": array})
    seq = 0
    while True:
        await outlet.send(ChunkHeader("r", 0, "bench", "out", seq, "tokens", 0, specs), arrays)
        seq += 1


def consume(directory: Path, says: Connection) -> None:
    """Holds what comes, until it is killed."""

    async def run() -> None:
        held: list[Lease] = []
        connector = ShmConnector("consumer", directory, OPTIONS)
        says.send(await connector.open(held.append, lambda peer: None, lambda request_id, epoch: None))
        await asyncio.Event().wait()

    asyncio.run(run())


def produce(directory: Path, endpoint: str) -> None:
    """Sends without pause, until it is killed."""

    async def run() -> None:
        await flood(await ShmConnector("producer", directory, OPTIONS).dial(endpoint))

    asyncio.run(run())


async def kill_consumers(kills: int, directory: Path, context: Any) -> list[float]:
    """Milliseconds until the send that waits is Broken."""
    connector = ShmConnector("survivor", directory / "survivor", OPTIONS)
    times = []
    for _ in range(kills):
        hears, says = context.Pipe()
        consumer = context.Process(target=consume, args=(directory / "peer", says), daemon=True)
        consumer.start()
        says.close()
        sending = asyncio.create_task(flood(await connector.dial(await asyncio.to_thread(hears.recv))))
        hears.close()
        waits = connector.stats().credit_waits
        while connector.stats().credit_waits == waits:
            await asyncio.sleep(0.001)
        killed = time.monotonic()
        os.kill(consumer.pid, signal.SIGKILL)
        try:
            await sending
        except Broken:
            times.append((time.monotonic() - killed) * 1e3)
        await asyncio.to_thread(consumer.join)
    await connector.close()
    return times


async def kill_producers(kills: int, directory: Path, context: Any) -> list[float]:
    """Milliseconds until `on_lost`."""
    connector = ShmConnector("survivor", directory / "survivor", OPTIONS)
    lost: asyncio.Queue[float] = asyncio.Queue()
    count = 0

    def on_chunk(lease: Lease) -> None:
        nonlocal count
        count += 1
        lease.release()

    endpoint = await connector.open(on_chunk, lambda peer: lost.put_nowait(time.monotonic()), lambda request_id, epoch: None)
    times = []
    for _ in range(kills):
        count = 0
        producer = context.Process(target=produce, args=(directory / "peer", endpoint), daemon=True)
        producer.start()
        while count < 100:
            await asyncio.sleep(0.001)
        killed = time.monotonic()
        os.kill(producer.pid, signal.SIGKILL)
        times.append((await lost.get() - killed) * 1e3)
        await asyncio.to_thread(producer.join)
    await connector.close()
    return times


def row_of(name: str, times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    median = statistics.median(ordered)
    grade = "stretch" if median <= STRETCH_MS else "pass" if median <= PASS_MS else "MISSED"
    row: dict[str, Any] = {"killed": name, "n": len(ordered), "p50_ms": median, "p90_ms": ordered[int(len(ordered) * 0.9)],
                           "p99_ms": ordered[int(len(ordered) * 0.99)], "max_ms": ordered[-1], "grade": grade}  # fmt: skip
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--loop", choices=sorted(LOOPS), default="uvloop")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transport.shm"])
    rows = []
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        for name, kill in (("consumer", kill_consumers), ("producer", kill_producers)):
            rows.append(row_of(name, runner.run(kill(options.kills, Path(directory), context))))
    if options.json:
        print(json.dumps({"loop": options.loop, "pass_ms": PASS_MS, "stretch_ms": STRETCH_MS, "rows": rows}))
        return
    print(f"{'killed':<10}{'n':>5}{'p50 ms':>9}{'p90':>9}{'p99':>9}{'max':>9}   pass {PASS_MS:g}, stretch {STRETCH_MS:g} (of the median)")
    for row in rows:
        print(f"{row['killed']:<10}{row['n']:>5}{row['p50_ms']:>9}{row['p90_ms']:>9}{row['p99_ms']:>9}{row['max_ms']:>9}   {row['grade']}")


if __name__ == "__main__":
    main()
