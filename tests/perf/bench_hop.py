"""One hop between two processes, ours and others', side by side in one run: what the transport costs, as ratios.

    python tests/perf/bench_hop.py [--quick] [--json] [--loop uvloop|asyncio] [--repetitions 3]

- one-way: the sender's clock before `send` of a private array -> the receiver's clock when it has read the first and last byte.
- rtt: until the sender has the receiver's answer (a small message on the same mechanism, the other way).
- rate: messages per second of a stream with the mechanism's own backpressure, one answer at the end.
- cpu: processor time of the receiving process per message at 1 kHz; idle: its share of a core when nothing comes.
Cells (mechanism, size) are shuffled within each repetition; the median of the repetitions' medians counts. p99 is over all samples.

memcpy       np.copyto to one warm place
blocking     our ring, calls that block (transport/blocking.py)
shm          our connector, coroutine to coroutine
zmq.asyncio  zmq.asyncio over ipc, [descriptor, payload], coroutine to coroutine
iceoryx2     its Python package, publish-subscribe with event notification, calls that block (when installed)
pipe         multiprocessing.Pipe
segment      one multiprocessing.shared_memory segment per message, its name through a pipe
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
import zmq
import zmq.asyncio

from transport.blocking import BlockingInbound, BlockingOutlet
from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease
from transport.schemes import make_connector

KIB, MIB = 2**10, 2**20
SIZES = {"64 B": 64, "1920 B": 1920, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
ROUNDS = {64: 400, 1920: 400, 64 * KIB: 300, MIB: 100, 16 * MIB: 15, 64 * MIB: 6}  # lone messages per cell
STREAM = {64: 3000, 1920: 3000, 64 * KIB: 1500, MIB: 200, 16 * MIB: 20, 64 * MIB: 6}
PACED = ("1920 B", "64 KiB", "1 MiB")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}

# ratio -> metric, (mechanism, size) above, below the line; whether less is better; pass, stretch
TARGETS: dict[str, tuple[str, tuple[str, str], tuple[str, str], bool, float, float]] = {
    "blocking one-way 64 KiB / iceoryx2": ("one_way_us", ("blocking", "64 KiB"), ("iceoryx2", "64 KiB"), True, 0.8, 0.5),
    "blocking one-way 1 MiB / memcpy": ("one_way_us", ("blocking", "1 MiB"), ("memcpy", "1 MiB"), True, 1.6, 1.35),
    "blocking one-way 16 MiB / memcpy": ("one_way_us", ("blocking", "16 MiB"), ("memcpy", "16 MiB"), True, 1.25, 1.10),
    "blocking one-way 64 MiB / memcpy": ("one_way_us", ("blocking", "64 MiB"), ("memcpy", "64 MiB"), True, 1.15, 1.05),
    "blocking one-way 64 KiB / segment": ("one_way_us", ("blocking", "64 KiB"), ("segment", "64 KiB"), True, 1 / 20, 1 / 40),
    "asyncio rtt 1920 B / zmq.asyncio": ("rtt_us", ("shm", "1920 B"), ("zmq.asyncio", "1920 B"), True, 0.30, 0.18),
    "asyncio one-way 1 MiB / memcpy": ("one_way_us", ("shm", "1 MiB"), ("memcpy", "1 MiB"), True, 2.2, 2.2),
    "asyncio one-way 16 MiB / memcpy": ("one_way_us", ("shm", "16 MiB"), ("memcpy", "16 MiB"), True, 1.5, 1.5),
    "asyncio rate 64 KiB / zmq.asyncio": ("per_s", ("shm", "64 KiB"), ("zmq.asyncio", "64 KiB"), False, 3.0, 6.0),
    "asyncio consumer cpu 64 KiB / zmq.asyncio": ("cpu_us", ("shm", "64 KiB"), ("zmq.asyncio", "64 KiB"), True, 0.4, 0.25),
}
IDLE_PASS, IDLE_STRETCH = 0.1, 0.02  # percent of a core


# ---- mechanisms: both ends of each. `seq` counts down in a stream; the receiver answers when it is 0 ---------------------------


class Blocking:
    """Our ring. Each end has an outlet and an inbound."""

    def __init__(self, directory: Path, name: str, peer: str) -> None:
        self._inbound = BlockingInbound(directory / f"{name}.blocking", name)
        self._peer = f"shm:{directory}/{peer}.blocking"
        self._name = name

    def join(self, first: bool) -> None:
        options = ConnectorOptions(arena_bytes=512 * MIB if first else MIB)
        if not first:
            self._inbound.accept()
        self._outlet = BlockingOutlet(self._peer, self._name, options)
        if first:
            self._inbound.accept()

    def send(self, seq: int, array: np.ndarray) -> None:
        specs, arrays, _ = describe({"data": array})
        self._outlet.send(ChunkHeader("bench", 0, "bench", "out", seq, "hidden", 0, specs), arrays)

    def recv(self) -> tuple[int, int]:
        lease = self._inbound.recv()
        (array,) = lease.arrays()
        _ = array[0], array[-1]
        at_ns = time.monotonic_ns()
        del array
        lease.release()
        return lease.header.seq, at_ns

    def answer(self, at_ns: int) -> None:
        self._outlet.send(ChunkHeader("answer", 0, "bench", "out", 0, "event", 0, (), 0, 0.0, {"at": at_ns}))

    def answered(self) -> int:
        lease = self._inbound.recv()
        lease.release()
        return int(lease.header.meta["at"])


class Shm:
    """Our connector; answers are chunks on the way back."""

    def __init__(self, directory: Path, name: str, peer: str) -> None:
        self._directory, self._name, self._peer = directory, name, peer
        self._connector = make_connector("shm", name, directory, ConnectorOptions(), token="bench")
        self._leases: deque[Lease] = deque()  # as the inbox of a request in streamrt/actor.py has them: with one future
        self._wake: asyncio.Future[None] | None = None

    async def join(self, first: bool) -> None:
        endpoint = await self._connector.open(self._put, lambda peer: None, lambda request_id, epoch: None)
        (self._directory / f"{self._name}.endpoint.new").write_text(endpoint)
        (self._directory / f"{self._name}.endpoint.new").rename(self._directory / f"{self._name}.endpoint")
        there = self._directory / f"{self._peer}.endpoint"
        while not there.exists():
            await asyncio.sleep(0.01)
        self._outlet = await self._connector.dial(there.read_text())

    async def send(self, seq: int, array: np.ndarray) -> None:
        specs, arrays, _ = describe({"data": array})
        await self._outlet.send(ChunkHeader("bench", 0, "bench", "out", seq, "hidden", 0, specs), arrays)

    async def recv(self) -> tuple[int, int]:
        lease = await self._next()
        (array,) = lease.arrays()
        _ = array[0], array[-1]
        at_ns = time.monotonic_ns()
        del array
        lease.release()
        return lease.header.seq, at_ns

    async def answer(self, at_ns: int) -> None:
        await self._outlet.send(ChunkHeader("answer", 0, "bench", "out", 0, "event", 0, (), 0, 0.0, {"at": at_ns}))

    async def answered(self) -> int:
        lease = await self._next()
        lease.release()
        return int(lease.header.meta["at"])

    def _put(self, lease: Lease) -> None:
        self._leases.append(lease)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _next(self) -> Lease:
        while not self._leases:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._leases.popleft()


class Zmq:
    """zmq.asyncio over ipc, without a copy of its own where that is faster."""

    def __init__(self, directory: Path, name: str, peer: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.linger = 0
        self._endpoint = f"ipc://{directory}/zmq"

    async def join(self, first: bool) -> None:
        if first:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)

    async def send(self, seq: int, array: np.ndarray) -> None:
        specs, _, _ = describe({"data": array})
        header = msgspec.msgpack.encode(ChunkHeader("bench", 0, "bench", "out", seq, "hidden", 0, specs))
        await self._socket.send_multipart([header, array], copy=array.nbytes < 64 * KIB)

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


class Iceoryx2:
    """One publish-subscribe service per size and direction, one event service per direction."""

    def __init__(self, directory: Path, name: str, peer: str) -> None:
        import iceoryx2 as iox2

        self._iox2, self._run, self._name, self._peer = iox2, directory.name, name, peer
        iox2.set_log_level(iox2.LogLevel.Error)
        self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        sizes = [*SIZES.values(), 8]  # 8: the answers
        self._out = {size + 8: self._service(name, size + 8).publisher_builder().initial_max_slice_len(size + 8)
                     .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered).create() for size in sizes}  # fmt: skip
        self._in = [self._service(peer, size + 8).subscriber_builder().create() for size in sizes]
        self._listener = self._event(peer).listener_builder().create()
        self._notifier = self._event(name).notifier_builder().create()

    def join(self, first: bool) -> None:
        pass

    def send(self, seq: int, array: np.ndarray) -> None:
        nbytes = array.nbytes + 8
        publisher = self._out[nbytes]
        loan = publisher.loan_slice_uninit(nbytes)
        target = np.frombuffer(loan.payload().as_memory_view(), np.uint8)
        target[:8].view(np.int64)[0] = seq
        np.copyto(target[8:], array)
        loan.assume_init().send()
        self._notifier.notify()

    def recv(self) -> tuple[int, int]:
        sample = self._next()
        array = np.frombuffer(sample.payload().as_memory_view(), np.uint8)
        _ = array[8], array[-1]
        at_ns = time.monotonic_ns()
        seq = int(array[:8].view(np.int64)[0])
        del array
        sample.delete()
        return seq, at_ns

    def answer(self, at_ns: int) -> None:
        self.send(at_ns, np.zeros(8, np.uint8))

    def answered(self) -> int:
        return self.recv()[0]

    def _next(self) -> Any:
        while True:
            for index, subscriber in enumerate(self._in):
                sample = subscriber.receive()
                if sample is not None:
                    if index:  # look there first: the next one is most likely of this size
                        self._in.insert(0, self._in.pop(index))
                    return sample
            self._listener.blocking_wait()

    def _service(self, name: str, nbytes: int) -> Any:
        service = self._node.service_builder(self._iox2.ServiceName.new(f"{self._run}/{name}/{nbytes}"))
        service = service.publish_subscribe(self._iox2.Slice[ctypes.c_uint8]).payload_alignment(self._iox2.Alignment.new(64))
        return service.enable_safe_overflow(False).subscriber_max_buffer_size(8).open_or_create()

    def _event(self, name: str) -> Any:
        return self._node.service_builder(self._iox2.ServiceName.new(f"{self._run}/{name}")).event().open_or_create()


class Pipe:
    """A `multiprocessing.Pipe`; its two ends are made before the fork."""

    def __init__(self, directory: Path, name: str, peer: str, connection: Connection) -> None:
        self._connection = connection

    def join(self, first: bool) -> None:
        pass

    def send(self, seq: int, array: np.ndarray) -> None:
        self._connection.send_bytes(seq.to_bytes(8, "little"))
        self._connection.send_bytes(array)

    def recv(self) -> tuple[int, int]:
        seq = int.from_bytes(self._connection.recv_bytes(), "little")
        data = self._connection.recv_bytes()
        _ = data[0], data[-1]
        return seq, time.monotonic_ns()

    def answer(self, at_ns: int) -> None:
        self._connection.send_bytes(at_ns.to_bytes(8, "little"))

    def answered(self) -> int:
        return int.from_bytes(self._connection.recv_bytes(), "little")


class Segment(Pipe):
    """A fresh shared-memory segment for each message; the receiver unlinks it."""

    def send(self, seq: int, array: np.ndarray) -> None:
        segment = shared_memory.SharedMemory(create=True, size=array.nbytes)
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined] # the receiver unlinks it
        target = np.frombuffer(segment.buf, np.uint8, array.nbytes)
        np.copyto(target, array)
        del target
        self._connection.send((seq, segment.name))
        segment.close()

    def recv(self) -> tuple[int, int]:
        seq, name = self._connection.recv()
        segment = shared_memory.SharedMemory(name=name)
        _ = segment.buf[0], segment.buf[segment.size - 1]
        at_ns = time.monotonic_ns()
        segment.close()
        segment.unlink()
        return seq, at_ns


MECHANISMS: dict[str, type[Any]] = {
    "blocking": Blocking, "shm": Shm, "zmq.asyncio": Zmq, "iceoryx2": Iceoryx2, "pipe": Pipe, "segment": Segment,
}  # fmt: skip


# ---- the two processes ------------------------------------------------------------------------------------------------------


async def ready(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def receive(mechanism: str, directory: Path, loop: str, *connection: Connection) -> None:
    """The other process: answers for ever."""

    async def on_loop() -> None:
        end = MECHANISMS[mechanism](directory, "receiver", "sender", *connection)
        await ready(end.join(first=False))
        while inspect.iscoroutinefunction(end.recv):
            seq, at_ns = await end.recv()
            if seq == 0:
                await end.answer(at_ns)
        while True:
            seq, at_ns = end.recv()
            if seq == 0:
                end.answer(at_ns)

    with contextlib.suppress(KeyboardInterrupt, EOFError), asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(on_loop())


class Hop:
    """The sending end, with a receiver in a process of its own."""

    def __init__(self, mechanism: str, directory: Path, loop: str) -> None:
        self.mechanism = mechanism
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        connections = [[ours], [theirs]] if mechanism in ("pipe", "segment") else [[], []]
        self._process = context.Process(target=receive, args=(mechanism, directory, loop, *connections[1]), daemon=True)
        self._process.start()
        self.end = MECHANISMS[mechanism](directory, "sender", "receiver", *connections[0])

    async def join(self) -> None:
        if self.mechanism in ("blocking", "iceoryx2"):
            time.sleep(1.5)  # the other process has made its end
        await ready(self.end.join(first=True))

    def cpu_ns(self) -> int:
        """Processor time of the receiver, all threads."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


async def lone_messages(end: Any, array: np.ndarray, count: int) -> tuple[list[float], list[float]]:
    """One-way and round-trip times of messages with one in flight, microseconds."""
    one_way, rtt = [], []
    is_async = inspect.iscoroutinefunction(end.send)
    warm = max(1, count // 10)
    for i in range(count + warm):
        start_ns = time.monotonic_ns()
        if is_async:
            await end.send(0, array)
            at_ns = await end.answered()
        else:
            end.send(0, array)
            at_ns = end.answered()
        end_ns = time.monotonic_ns()
        if i >= warm:
            one_way.append((at_ns - start_ns) / 1e3)
            rtt.append((end_ns - start_ns) / 1e3)
    return one_way, rtt


async def stream(end: Any, array: np.ndarray, count: int, interval_s: float = 0.0) -> float:
    """Messages per second."""
    is_async = inspect.iscoroutinefunction(end.send)
    start = time.monotonic()
    for seq in reversed(range(count)):
        if interval_s and (left := start + (count - seq) * interval_s - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if is_async:
            await end.send(seq, array)
        else:
            end.send(seq, array)
    await ready(end.answered())
    return count / (time.monotonic() - start)


def memcpy(array: np.ndarray, count: int) -> list[float]:
    """Copies to one warm place, microseconds."""
    target, times = np.zeros_like(array), []
    for _ in range(count):
        start_ns = time.monotonic_ns()
        np.copyto(target, array)
        times.append((time.monotonic_ns() - start_ns) / 1e3)
    return times


async def measure(loop: str, repetitions: int, sizes: dict[str, int], mechanisms: list[str], divisor: int) -> list[dict[str, Any]]:
    samples: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)  # one list per repetition
    dice = random.Random(1)
    with contextlib.ExitStack() as stack:
        hops: dict[str, Hop] = {}
        for mechanism in mechanisms:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hops[mechanism] = hop = Hop(mechanism, directory, loop)
            stack.callback(hop.close)
            await hop.join()
        cells = list(itertools.product(["memcpy", *mechanisms], sizes))
        for _ in range(repetitions):
            dice.shuffle(cells)
            for mechanism, size in cells:
                array, rounds = np.ones(sizes[size], np.uint8), max(3, ROUNDS[sizes[size]] // divisor)
                if mechanism == "memcpy":
                    samples["one_way_us", mechanism, size].append(memcpy(array, rounds))
                    continue
                one_way, rtt = await lone_messages(hops[mechanism].end, array, rounds)
                samples["one_way_us", mechanism, size].append(one_way)
                samples["rtt_us", mechanism, size].append(rtt)
                rate = await stream(hops[mechanism].end, array, max(3, STREAM[sizes[size]] // divisor))
                samples["per_s", mechanism, size].append([rate])
            for mechanism, size in itertools.product(mechanisms, PACED):
                hop, count = hops[mechanism], 600 // divisor
                before_ns = hop.cpu_ns()
                await stream(hop.end, np.ones(sizes[size], np.uint8), count, 0.001)
                samples["cpu_us", mechanism, size].append([(hop.cpu_ns() - before_ns) / 1e3 / count])
            before = {mechanism: hop.cpu_ns() for mechanism, hop in hops.items()}
            await asyncio.sleep(3 / divisor)
            for mechanism, hop in hops.items():
                samples["idle_percent", mechanism, "-"].append([(hop.cpu_ns() - before[mechanism]) / 1e7 / 3 * divisor])
    return [summary(*cell, runs) for cell, runs in samples.items()]


# ---- what is said of it -------------------------------------------------------------------------------------------------------


def summary(metric: str, mechanism: str, size: str, runs: list[list[float]]) -> dict[str, Any]:
    pooled = sorted(value for run in runs for value in run)
    median = statistics.median(statistics.median(run) for run in runs)
    p99 = pooled[min(len(pooled) - 1, int(len(pooled) * 0.99))]
    return {"metric": metric, "mechanism": mechanism, "size": size, "n": len(pooled), "median": round(median, 3), "p99": round(p99, 3)}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {"cpu": model, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "kernel": platform.release(),
            "python": platform.python_version(), "numpy": np.__version__, "pyzmq": zmq.__version__}  # fmt: skip


def table(rows: list[dict[str, Any]], metric: str) -> Iterator[str]:
    """median / p99 (where there are many samples), one line per mechanism."""
    mine = {(row["mechanism"], row["size"]): row for row in rows if row["metric"] == metric}
    sizes = list(dict.fromkeys(size for size in (*SIZES, "-") if any(size == column for _, column in mine)))
    yield f"{metric:<13}" + "".join(f"{size:>20}" for size in sizes)
    for mechanism in dict.fromkeys(mechanism for mechanism in ("memcpy", *MECHANISMS) if any(mechanism == row for row, _ in mine)):
        cells = [mine[mechanism, size] for size in sizes]
        texts = [f"{c['median']:,.1f} / {c['p99']:,.1f}" if metric in ("one_way_us", "rtt_us") else f"{c['median']:,.3g}" for c in cells]
        yield f"{mechanism:<13}" + "".join(f"{text:>20}" for text in texts)


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures say, whatever the machine; those whose rows are there."""
    at = {(row["metric"], row["mechanism"], row["size"]): row["median"] for row in rows}
    found = []
    for name, (metric, above, below, less, enough, stretch) in TARGETS.items():
        if (metric, *above) in at and (metric, *below) in at:
            value = at[(metric, *above)] / at[(metric, *below)]
            found.append(verdict(name, value, less, enough, stretch))
    found.append(verdict("asyncio idle cpu, % of a core", at["idle_percent", "shm", "-"], True, IDLE_PASS, IDLE_STRETCH))
    return found


def verdict(name: str, value: float, less: bool, enough: float, stretch: float) -> dict[str, Any]:
    sign = 1 if less else -1
    grade = "stretch" if sign * value <= sign * stretch else "pass" if sign * value <= sign * enough else "MISSED"
    return {"name": name, "value": round(value, 3), "pass": round(enough, 3), "stretch": round(stretch, 3), "grade": grade}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one repetition of a third of the messages")
    parser.add_argument("--loop", choices=sorted(LOOPS), default="uvloop")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    repetitions, divisor = (1, 3) if options.quick else (options.repetitions, 1)
    mechanisms = [name for name in MECHANISMS if name != "iceoryx2" or importlib.util.find_spec("iceoryx2")]
    about = {"command": " ".join(["python", *sys.argv]), "loop": options.loop, "repetitions": repetitions, "machine": machine()}
    start = time.monotonic()
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        rows = runner.run(measure(options.loop, repetitions, SIZES, mechanisms, divisor))
    if options.json:
        print(json.dumps({**about, "rows": rows, "ratios": ratios(rows)}))
        return
    print(about["command"])
    print(", ".join(f"{name} {value}" for name, value in about["machine"].items()), f"({time.monotonic() - start:.0f} s)\n")
    for metric in ("one_way_us", "rtt_us", "per_s", "cpu_us", "idle_percent"):
        print(*table(rows, metric), "", sep="\n")
    for ratio in ratios(rows):
        print(f"{ratio['name']:<45}{ratio['value']:>8}   pass {ratio['pass']}, stretch {ratio['stretch']}: {ratio['grade']}")


if __name__ == "__main__":
    main()
