"""Sixteen streams on one edge for as long as asked, with stalls and cancels: no gap, no repeat, memory flat, waits bounded.

    python tests/perf/soak_hop.py [--seconds 600] [--json]

The producer sends without pause; stream 0 never stalls and is never cancelled, the others stall at their reader for up to a second now
and then, and are cancelled and begun again. Both processes check; exit status 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from transport.chunk import ChunkHeader, Place, describe
from transport.connector import ConnectorOptions, Lease
from transport.errors import Closed
from transport.shm import ShmConnector

STREAMS = 16
MOST_STALL_S = 1.0
MOST_WAIT_S = 5 * MOST_STALL_S  # of a stream that stalls
MOST_WAIT_LIVE_S = 2 * MOST_STALL_S  # of the one that does not: the others may have all slots of a size, for one stall
MOST_GROWTH_BYTES = 8 * 2**20
SIZES = ((0.6, 4_000), (0.9, 60_000), (0.995, 600_000), (1.0, 10_000_000))


def resident_bytes() -> int:
    """Private memory of this process: shared memory does not count."""
    words = Path("/proc/self/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * 4096


class Growth:
    """Memory, from a fifth of the time on."""

    def __init__(self, seconds: float) -> None:
        self._from = time.monotonic() + seconds / 5
        self._first = 0

    def bytes(self) -> int:
        now = resident_bytes()
        if time.monotonic() < self._from or not self._first:
            self._first = now
        return now - self._first


def read(directory: Path, says: Connection, seconds: float) -> None:
    """The consumer: one reader per stream, which stalls now and then."""

    async def run() -> None:
        queues: dict[str, asyncio.Queue[Lease]] = defaultdict(asyncio.Queue)
        cancelled: dict[str, int] = {}
        report = {"chunks": 0, "wrong": 0, "cancels": 0, "growth_bytes": 0}
        growth = Growth(seconds)

        def on_cancel(request_id: str, epoch: int) -> None:
            cancelled[request_id] = epoch
            report["cancels"] += 1

        async def reader(name: str) -> None:
            dice, epoch, seq = random.Random(name), 0, 0
            while True:
                lease = await queues[name].get()
                header = lease.header
                if header.epoch > epoch:
                    epoch, seq = header.epoch, 0
                right = (header.epoch, header.seq) == (epoch, seq)
                seq += 1
                for array in lease.arrays():
                    right = right and bool((array == header.seq % 251).all())
                    del array
                report["chunks"] += 1
                report["wrong"] += not right
                if name != "s0" and dice.random() < 0.001 and cancelled.get(name, -1) < header.epoch:
                    await asyncio.sleep(dice.random() * MOST_STALL_S)
                lease.release()
                report["growth_bytes"] = growth.bytes() if report["chunks"] % 500 == 0 else report["growth_bytes"]
                if header.place != Place.PARTIAL:
                    return
                await asyncio.sleep(0)

        connector = ShmConnector("reader", directory, ConnectorOptions())
        says.send(await connector.open(lambda lease: queues[lease.header.request_id].put_nowait(lease), lambda peer: None, on_cancel))
        async with asyncio.TaskGroup() as tasks:
            for i in range(STREAMS):
                tasks.create_task(reader(f"s{i}"))
        await asyncio.sleep(0.1)  # the last releases go out
        says.send(report)
        await connector.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def produce(directory: Path, endpoint: str, seconds: float) -> dict[str, Any]:
    connector = ShmConnector("producer", directory, ConnectorOptions())
    outlet = await connector.dial(endpoint)
    end = time.monotonic() + seconds
    growth = Growth(seconds)
    waits = {f"s{i}": 0.0 for i in range(STREAMS)}
    counts = dict.fromkeys(waits, 0)
    report: dict[str, Any] = {"chunks": 0, "cancels": 0, "growth_bytes": 0}
    sources = [np.full(10_000_000, value, np.uint8) for value in range(2)]

    async def stream(name: str) -> None:
        dice, epoch, seq = random.Random(f"send {name}"), 0, 0
        scratch = np.empty(600_000, np.uint8)

        async def cancel_later(after_s: float) -> None:
            await asyncio.sleep(after_s)
            outlet.cancel(name, epoch)

        while time.monotonic() < end:
            canceller = asyncio.create_task(cancel_later(dice.random())) if name != "s0" and dice.random() < 0.05 else None
            for _ in range(dice.randrange(1, 50)):
                share = dice.random()
                size = dice.randrange(next(most for limit, most in SIZES if share <= limit))
                if size > len(scratch):
                    array = sources[seq % 251] if seq % 251 < 2 else np.full(size, seq % 251, np.uint8)
                    array = array[:size]
                else:
                    array = scratch[:size]
                    array[:] = seq % 251
                specs, arrays, _ = describe({"t": array})
                start = time.monotonic()
                try:
                    await outlet.send(ChunkHeader(name, epoch, "soak", "out", seq, "tokens", 0, specs), arrays)
                except Closed:
                    break
                finally:
                    waits[name] = max(waits[name], time.monotonic() - start)
                seq += 1
                counts[name] += 1
                report["growth_bytes"] = growth.bytes() if seq % 100 == 0 else report["growth_bytes"]
                await asyncio.sleep(0)
            if canceller is not None:
                await canceller
                report["cancels"] += 1
                epoch, seq = epoch + 1, 0
        await outlet.send(ChunkHeader(name, epoch, "soak", "out", seq, "tokens", Place.EMPTY_FINAL))

    async with asyncio.TaskGroup() as tasks:
        for name in waits:
            tasks.create_task(stream(name))
    async with asyncio.timeout(10):
        while connector.stats().slots_in_use:
            await asyncio.sleep(0.01)
    report |= {"chunks": sum(counts.values()) + STREAMS, "least_of_a_stream": min(counts.values()), "max_wait_s": max(waits.values()),
               "max_wait_live_s": waits["s0"], "credit_waits": connector.stats().credit_waits, "arena_bytes": connector.stats().bytes_total}  # fmt: skip
    await connector.close()
    return report


def soak(seconds: float) -> dict[str, Any]:
    """Both reports, and `failed`: what does not hold."""
    context = multiprocessing.get_context("spawn")
    hears, says = context.Pipe()
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reader = context.Process(target=read, args=(Path(directory), says, seconds), daemon=True)
        reader.start()
        says.close()
        producer = runner.run(produce(Path(directory), hears.recv(), seconds))
        consumer = hears.recv()
        reader.join()
    claims = {
        "every chunk came once, in order and intact": consumer["wrong"] == 0 and consumer["chunks"] == producer["chunks"],
        "every cancel was heard": consumer["cancels"] == producer["cancels"],
        "memory is flat": max(consumer["growth_bytes"], producer["growth_bytes"]) < MOST_GROWTH_BYTES,
        "every wait is bounded": producer["max_wait_s"] < MOST_WAIT_S and producer["max_wait_live_s"] < MOST_WAIT_LIVE_S,
        "every stream moves": producer["least_of_a_stream"] > 2 * seconds,
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    return {"seconds": seconds, "producer": producer, "consumer": consumer, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = soak(options.seconds)
    print(json.dumps(report) if options.json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    sys.exit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()
