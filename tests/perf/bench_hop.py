"""One hop between two processes: memcpy, our shared-memory connector and ZeroMQ (zmq.asyncio, ipc), side by side in one run.

    python tests/perf/bench_hop.py [--json] [--loop uvloop|asyncio] [--repetitions 3]

- one-way: the sender's clock before `send` of a private array -> the receiver's clock when it has read the first and last byte.
- RTT: until the sender's coroutine has the receiver's answer (a small message on the same mechanism).
- throughput: a stream with the mechanism's own backpressure, one answer at the end.
Both ends are coroutines that wait on a queue. Cells are shuffled within each repetition; what is compared are ratios within a run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import uvloop
import zmq
import zmq.asyncio

from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease
from transport.schemes import make_connector

SIZES = (64, 1920, 64 * 2**10, 2**20, 16 * 2**20)
ROUNDS = {64: 1000, 1920: 1000, 64 * 2**10: 600, 2**20: 200, 16 * 2**20: 30}
STREAM = {64: 4000, 1920: 4000, 64 * 2**10: 2000, 2**20: 400, 16 * 2**20: 40}
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class End(Protocol):
    """One end of a mechanism. `seq` counts down in a stream: the receiver answers when it is 0."""

    async def send(self, seq: int, array: np.ndarray) -> None: ...

    async def recv(self) -> tuple[int, int]:
        """(seq, clock when the first and last byte had been read)."""

    async def answer(self, at_ns: int) -> None: ...

    async def answered(self) -> int: ...


class ConnectorEnd:
    """A connector of ours; answers are chunks on the way back."""

    def __init__(self, scheme: str, name: str, directory: Path) -> None:
        self._connector = make_connector(scheme, name, directory, ConnectorOptions(), token="bench")
        self._leases: asyncio.Queue[Lease] = asyncio.Queue()

    async def open(self) -> str:
        return await self._connector.open(self._leases.put_nowait, lambda peer: None, lambda request_id, epoch: None)

    async def dial(self, endpoint: str) -> None:
        self._outlet = await self._connector.dial(endpoint)

    async def send(self, seq: int, array: np.ndarray) -> None:
        specs, arrays, _ = describe({"data": array})
        await self._outlet.send(ChunkHeader("bench", 0, "bench", "out", seq, "hidden", 0, specs), arrays)

    async def recv(self) -> tuple[int, int]:
        lease = await self._leases.get()
        (array,) = lease.arrays()
        _ = array[0], array[-1]
        at_ns = time.monotonic_ns()
        seq = lease.header.seq
        del array
        lease.release()
        return seq, at_ns

    async def answer(self, at_ns: int) -> None:
        await self._outlet.send(ChunkHeader("answer", 0, "bench", "out", 0, "event", 0, (), 0, 0.0, {"at": at_ns}))

    async def answered(self) -> int:
        lease = await self._leases.get()
        lease.release()
        return int(lease.header.meta["at"])

    async def close(self) -> None:
        await self._connector.close()


class ZmqEnd:
    """zmq.asyncio over ipc: [descriptor, payload], without a copy of its own where that is faster."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._endpoint = f"ipc://{directory}/zmq-{os.getpid()}"

    async def open(self) -> str:
        self._socket.bind(self._endpoint)
        return self._endpoint

    async def dial(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    async def send(self, seq: int, array: np.ndarray) -> None:
        specs, _, _ = describe({"data": array})
        header = msgspec.msgpack.encode(ChunkHeader("bench", 0, "bench", "out", seq, "hidden", 0, specs))
        await self._socket.send_multipart([header, array], copy=array.nbytes < 64 * 2**10)

    async def recv(self) -> tuple[int, int]:
        header, payload = await self._socket.recv_multipart(copy=False)
        array = np.frombuffer(payload.buffer, np.uint8)
        _ = array[0], array[-1]
        at_ns = time.monotonic_ns()
        return msgspec.msgpack.decode(header.buffer, type=ChunkHeader).seq, at_ns

    async def answer(self, at_ns: int) -> None:
        await self._socket.send(at_ns.to_bytes(8, "little"))

    async def answered(self) -> int:
        return int.from_bytes(await self._socket.recv(), "little")

    async def close(self) -> None:
        self._context.destroy(linger=0)


def make_end(mechanism: str, name: str, directory: Path) -> Any:
    return ZmqEnd(directory) if mechanism == "zmq.asyncio" else ConnectorEnd(mechanism, name, directory)


async def receive(mechanism: str, directory: Path, endpoint: str) -> None:
    """The other process: answers for ever."""
    end = make_end(mechanism, "receiver", directory)
    if mechanism == "zmq.asyncio":
        await end.dial(endpoint)
        print("dialled", flush=True)
    else:
        print(await end.open(), flush=True)
        await end.dial(endpoint)
    while True:
        seq, at_ns = await end.recv()
        if seq == 0:
            await end.answer(at_ns)


@contextlib.asynccontextmanager
async def hop(mechanism: str, directory: Path, loop: str) -> AsyncIterator[End]:
    """The sending end, with a receiver in a process of its own."""
    end = make_end(mechanism, "sender", directory)
    endpoint = await end.open()
    receiver = subprocess.Popen(  # noqa: ASYNC220 (before anything is measured)
        [sys.executable, __file__, "--receive", mechanism, str(directory), endpoint, "--loop", loop], stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        answer = (await asyncio.to_thread(receiver.stdout.readline)).strip()
        if mechanism != "zmq.asyncio":
            await end.dial(answer)
        yield end
    finally:
        receiver.kill()
        receiver.communicate()
        await end.close()


async def lone_messages(end: End, size: int, count: int) -> tuple[list[float], list[float]]:
    """One-way and RTT of `count` messages with one in flight, microseconds."""
    array = np.ones(size, np.uint8)
    one_way, rtt = [], []
    for i in range(count + count // 10):
        start_ns = time.monotonic_ns()
        await end.send(0, array)
        at_ns = await end.answered()
        end_ns = time.monotonic_ns()
        if i >= count // 10:  # warm
            one_way.append((at_ns - start_ns) / 1e3)
            rtt.append((end_ns - start_ns) / 1e3)
    return one_way, rtt


async def stream(end: End, size: int, count: int) -> float:
    """Messages per second."""
    array = np.ones(size, np.uint8)
    start_ns = time.monotonic_ns()
    for seq in reversed(range(count)):
        await end.send(seq, array)
    await end.answered()
    return count / (time.monotonic_ns() - start_ns) * 1e9


def memcpy(size: int, count: int) -> list[float]:
    """Copies to one warm place, microseconds."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(count):
        start_ns = time.monotonic_ns()
        np.copyto(target, source)
        times.append((time.monotonic_ns() - start_ns) / 1e3)
    return times


async def measure(loop: str, repetitions: int, mechanisms: list[str]) -> list[dict[str, Any]]:
    samples: dict[tuple[str, str, int], list[list[float]]] = defaultdict(list)  # one list per repetition
    dice = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ends = {mechanism: await stack.enter_async_context(hop(mechanism, directory, loop)) for mechanism in mechanisms}
        cells = [(mechanism, size) for mechanism in ["memcpy", *mechanisms] for size in SIZES]
        for _ in range(repetitions):
            dice.shuffle(cells)
            for mechanism, size in cells:
                if mechanism == "memcpy":
                    samples["one_way_us", mechanism, size].append(memcpy(size, ROUNDS[size]))
                    continue
                one_way, rtt = await lone_messages(ends[mechanism], size, ROUNDS[size])
                samples["one_way_us", mechanism, size].append(one_way)
                samples["rtt_us", mechanism, size].append(rtt)
                samples["per_s", mechanism, size].append([await stream(ends[mechanism], size, STREAM[size])])
    return [summary(metric, mechanism, size, runs) for (metric, mechanism, size), runs in sorted(samples.items())]


def summary(metric: str, mechanism: str, size: int, runs: list[list[float]]) -> dict[str, Any]:
    pooled = sorted(value for run in runs for value in run)
    return {
        "metric": metric,
        "mechanism": mechanism,
        "bytes": size,
        "n": len(pooled),
        "median": round(statistics.median(statistics.median(run) for run in runs), 1),
        "p99": round(pooled[min(len(pooled) - 1, int(len(pooled) * 0.99))], 1),
    }


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyzmq": zmq.__version__,
    }


def table(rows: list[dict[str, Any]], metric: str) -> str:
    """median / p99, one line per mechanism."""
    lines = [f"{metric:<12}" + "".join(f"{size:>22,} B" for size in SIZES)]
    for mechanism in sorted({row["mechanism"] for row in rows if row["metric"] == metric}):
        cells = {row["bytes"]: row for row in rows if (row["metric"], row["mechanism"]) == (metric, mechanism)}
        lines.append(f"{mechanism:<12}" + "".join(f"{cells[size]['median']:>12,.1f} /{cells[size]['p99']:>10,.1f}" for size in SIZES))
    return "\n".join(lines)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the figures say, independent of the machine."""
    at = {(row["metric"], row["mechanism"], row["bytes"]): row["median"] for row in rows}
    found = {
        "one-way 1 MiB / memcpy": at["one_way_us", "shm", 2**20] / at["one_way_us", "memcpy", 2**20],
        "one-way 16 MiB / memcpy": at["one_way_us", "shm", 16 * 2**20] / at["one_way_us", "memcpy", 16 * 2**20],
    }
    for size, name in ((1920, "1920 B"), (64 * 2**10, "64 KiB"), (2**20, "1 MiB")):
        found[f"RTT {name} / zmq.asyncio"] = at["rtt_us", "shm", size] / at["rtt_us", "zmq.asyncio", size]
        found[f"rate {name} / zmq.asyncio"] = at["per_s", "shm", size] / at["per_s", "zmq.asyncio", size]
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--loop", choices=sorted(LOOPS), default="uvloop")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--receive", nargs=3, metavar=("MECHANISM", "DIRECTORY", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        if options.receive:
            mechanism, directory, endpoint = options.receive
            runner.run(receive(mechanism, Path(directory), endpoint))
            return
        command = f"python tests/perf/bench_hop.py --loop {options.loop} --repetitions {options.repetitions}"
        about = {"command": command, "loop": options.loop, "repetitions": options.repetitions, "machine": machine()}
        rows = runner.run(measure(options.loop, options.repetitions, ["shm", "zmq.asyncio"]))
    if options.json:
        print(json.dumps({**about, "rows": rows, "ratios": ratios(rows)}))
        return
    print(command)
    print(", ".join(f"{name} {value}" for name, value in about["machine"].items()))
    print(f"n = {', '.join(f'{ROUNDS[size] * options.repetitions} at {size:,} B' for size in SIZES)}; median / p99\n")
    for metric in ("one_way_us", "rtt_us", "per_s"):
        print(table(rows, metric), end="\n\n")
    for name, value in ratios(rows).items():
        print(f"{name:<28}{value}")


if __name__ == "__main__":
    main()
