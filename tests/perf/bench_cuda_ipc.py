"""A CUDA tensor from one process to another on one GPU: by CUDA IPC with and without a copy into the pool, and by way of the host.

    python tests/perf/bench_cuda_ipc.py [--cores any|own|awake] [--json FILE]

Two processes, both coroutines on uvloop, over the shared-memory connector as stages use it. One chunk at a time.
- one way: the producer's clock before it hands over a tensor that is ready -> the consumer's clock when it has a tensor that it may use
  (`usable`: ordered on its stream) and when the GPU has really passed that point (`done`: the stream was synchronised).
- hop: a chunk of as many bytes as say where a tensor lies, and no tensor: what the lane itself takes.
- pool: one device-to-device copy into the pool. loan: the tensor was written in the pool. host: to the CPU, through the ring, to the GPU.
  ring: from the GPU straight into the ring, to the GPU.
- where the time goes: medians of the steps of a chunk between the two; and of each call on the way alone, in a loop, its code in the caches.
Every tensor that arrives is compared on the GPU, outside of what is timed. Then: chunks whose producer's stream still works when they are
opened; blocks that are used again at once; a consumer, then a producer, that is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402 - found through the line above
import torch  # noqa: E402
import uvloop  # noqa: E402

from stages.tensors import DeviceTensors, HostTensors, _over, to_array, to_torch  # noqa: E402
from transport import channel  # noqa: E402
from transport.chunk import ChunkHeader, describe  # noqa: E402
from transport.connector import ConnectorOptions, Lease  # noqa: E402
from transport.cuda_ipc import _decoded, driver  # noqa: E402
from transport.lease import to_consumer  # noqa: E402
from transport.schemes import make_connector  # noqa: E402

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
BLOCK_BYTES = 256  # what a chunk says of a block
ROUNDS = {BLOCK_BYTES: 1000, 64 * KIB: 1000, MIB: 1000, 16 * MIB: 1000, 256 * MIB: 200}
HOST_ROUNDS = {64 * KIB: 300, MIB: 300, 16 * MIB: 60, 256 * MIB: 10}
REPETITIONS = 5
OPTIONS = ConnectorOptions(arena_bytes=64 * MIB, window_bytes=512 * MIB, max_chunk_bytes=256 * MIB + KIB)
SLEEP_CYCLES = 4_000_000  # about 2 ms of GPU


class End:
    """One process's end: its connector, what arrived, and its device memory."""

    def __init__(self, name: str, directory: str, pool_bytes: int, max_tensors: int = 64) -> None:
        self.name = name
        self.connector = make_connector("shm", name, Path(directory), OPTIONS)
        self.devices = DeviceTensors(pool_bytes, max_tensors=max_tensors)
        self.host = HostTensors()
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.seq = 0

    async def open(self) -> str:
        return await self.connector.open(self.leases.put_nowait, lambda peer: self.lost.set(), lambda request_id, epoch: None)

    async def dial(self, endpoint: str) -> None:
        self.outlet = await self.connector.dial(endpoint)

    async def send(self, array: np.ndarray | None, **meta: Any) -> None:
        specs, arrays, _ = describe({} if array is None else {"hidden": array})
        header = ChunkHeader("r", 0, self.name, "out", self.seq, "hidden", 0, specs, meta=meta)
        self.seq += 1
        await self.outlet.send(header, arrays)

    async def ask(self, array: np.ndarray | None, **meta: Any) -> dict[str, Any]:
        await self.send(array, **meta)
        lease = await self.leases.get()
        answer = lease.header.meta
        lease.release()
        return answer

    async def close(self) -> None:
        await self.connector.close()
        self.devices.close()


async def consume(directory: str) -> None:
    end = End("consumer", directory, MIB)
    torch.cuda.init()
    stream = torch.cuda.Stream()
    held: list[Any] = []
    with torch.cuda.stream(stream):
        print(await end.open(), flush=True)
        await end.dial(sys.stdin.readline().strip())
        while True:
            lease = await end.leases.get()
            meta = lease.header.meta
            match meta["do"]:
                case "time":
                    came_ns = time.monotonic_ns()
                    [array] = lease.arrays()
                    match meta["way"]:
                        case "hop":
                            tensor = array
                        case "host" | "ring":
                            tensor = to_torch(array, "cuda", borrow=True)
                        case _:
                            tensor = end.devices.open(array)
                    usable_ns = time.monotonic_ns()
                    if meta["way"] != "hop":
                        stream.synchronize()
                    done_ns = time.monotonic_ns()
                    good = bool((tensor == meta["value"]).all())
                    del tensor, array
                    lease.release()
                    await end.send(None, came_ns=came_ns, usable_ns=usable_ns, done_ns=done_ns, good=good)
                case "keep":  # read behind the producer's unfinished work, and let go while our own is unfinished
                    [array] = lease.arrays()
                    with torch.cuda.stream(torch.cuda.Stream()) as other:
                        tensor = end.devices.open(array)
                        was_early = not torch.cuda.current_stream().query()
                        torch.cuda._sleep(SLEEP_CYCLES)
                        held.append(((tensor != meta["value"]).sum(), was_early))
                    del tensor, array, other
                    lease.release()
                case "count":
                    lease.release()
                    torch.cuda.synchronize()
                    wrong = sum(int(count) > 0 for count, _ in held)
                    await end.send(None, n=len(held), wrong=wrong, opened_before_written=sum(was_early for _, was_early in held))
                    held.clear()
                case "hold":
                    held.append((lease, end.devices.open(lease.arrays()[0])))
                    await end.send(None)


async def produce(directory: str, quick: bool, flags: list[str]) -> dict[str, Any]:
    end = End("producer", directory, 512 * MIB)
    endpoint = await end.open()
    consumer = await start("consumer", directory, *flags)
    assert consumer.stdout is not None
    assert consumer.stdin is not None
    theirs = (await consumer.stdout.readline()).decode().strip()
    consumer.stdin.write(f"{endpoint}\n".encode())
    await end.dial(theirs)
    report: dict[str, Any] = {"rows": []}
    with torch.cuda.stream(torch.cuda.Stream()):
        cells = [(BLOCK_BYTES, "hop"), *((nbytes, way) for nbytes in SIZES for way in ("pool", "loan", "ring", "host"))]
        rounds: dict[tuple[int, str], list[list[Round]]] = {cell: [] for cell in cells}
        for repetition in range(REPETITIONS):
            for cell in random.Random(repetition).sample(cells, len(cells)):
                rounds[cell].append(await timed(end, *cell))
        report["rows"] = [row_of(*cell, rounds[cell]) for cell in cells]
        report["steps"] = [steps_of(*cell, rounds[cell]) for cell in cells]
        report["calls"] = await calls(end)
        if quick:
            await end.close()
            consumer.kill()
            await consumer.wait()
            return report
        report["ordering"] = await ordered(end)
        report["killed"] = await killed(end, consumer)
    await end.close()
    return report


class Round(NamedTuple):
    """Microseconds since the producer began, at which ..."""

    made: float  # the producer had what a chunk carries
    sent: float  # `send` returned
    came: float  # the consumer's coroutine had the chunk
    usable: float
    done: float
    good: bool  # the numbers were right


async def timed(end: End, nbytes: int, way: str) -> list[Round]:
    source = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    rounds = []
    warm_up = 2 if way in ("host", "ring") else 20
    for n in range(warm_up + (HOST_ROUNDS if way in ("host", "ring") else ROUNDS)[nbytes] // REPETITIONS):
        value = n % 251  # exact in bfloat16
        if way == "loan":
            loan = await end.devices.loan(source.shape, source.dtype)
            loan.tensor.fill_(value)
        else:
            source.fill_(value)
        torch.cuda.current_stream().synchronize()
        start_ns = time.monotonic_ns()
        match way:
            case "pool":
                array = await end.devices.lend(source)
            case "loan":
                array = loan.seal()
            case "host":
                array = to_array(source)
            case "ring":
                array = end.host.array(source)
            case _:
                array = np.full(nbytes, value, np.uint8)
        made_ns = time.monotonic_ns()
        await end.send(array, do="time", way=way, value=value)
        sent_ns = time.monotonic_ns()
        del array
        loan = None
        lease = await end.leases.get()
        answer = lease.header.meta
        lease.release()
        times_ns = (made_ns, sent_ns, answer["came_ns"], answer["usable_ns"], answer["done_ns"])
        rounds.append(Round(*((at_ns - start_ns) / 1e3 for at_ns in times_ns), answer["good"]))
    return rounds[warm_up:]


def row_of(nbytes: int, way: str, repetitions: list[list[Round]]) -> dict[str, Any]:
    """All rounds of a cell; and how far the medians of its repetitions are apart."""
    rounds = [one for repetition in repetitions for one in repetition]
    row = {"nbytes": nbytes, "way": way, "n": len(rounds), "wrong": sum(not one.good for one in rounds)}
    for name in ("made", "sent", "came", "usable", "done"):
        values = sorted(getattr(one, name) for one in rounds)
        row[f"{name}_us_p50"] = round(statistics.median(values), 1)
        row[f"{name}_us_p99"] = round(values[int(len(values) * 0.99)], 1)
    medians = [statistics.median(one.usable for one in repetition) for repetition in repetitions]
    row["usable_us_p50_of_repetitions"] = [round(min(medians), 1), round(max(medians), 1)]
    return row


STEPS = {
    "make": lambda one: one.made,  # what a chunk carries: into the pool, record, describe
    "send": lambda one: one.sent - one.made,  # descriptor, socket; the consumer wakes meanwhile
    "wake": lambda one: (
        one.came - one.made
    ),  # from there to the consumer's coroutine: descriptor, socket, wake, decode, two turns of the loop
    "open": lambda one: one.usable - one.came,  # block, event, tensor (host, ring: the copy up)
    "gpu": lambda one: one.done - one.usable,  # until the stream has passed it
}


def steps_of(nbytes: int, way: str, repetitions: list[list[Round]]) -> dict[str, Any]:
    rounds = [one for repetition in repetitions for one in repetition]
    return {"nbytes": nbytes, "way": way} | {f"{name}_us": round(statistics.median(map(step, rounds)), 1) for name, step in STEPS.items()}


async def calls(end: End) -> dict[str, float]:
    """Microseconds of each call on the way of a block, alone and warm."""
    pool, stream = end.devices.pool, torch.cuda.current_stream().cuda_stream
    source = torch.empty(8 * MIB, dtype=torch.bfloat16, device="cuda")
    held = await pool.loan(source.nbytes, stream)
    array = held.seal("bfloat16", tuple(source.shape))
    mine = _decoded(array)
    specs, arrays, _ = describe({"hidden": array})
    header = ChunkHeader("r", 0, "bench", "out", 0, "hidden", 0, specs)
    message = channel.encode(channel.Data(0, header, channel.INLINE, 0, 0, array.nbytes, array.tobytes()))

    def context() -> None:
        with pool.device:
            pass

    def event() -> None:
        with pool.device as cuda:
            cuda.cuEventRecord(pool._events[0][0], stream)

    timed_calls: dict[str, Callable[[], object]] = {
        "context: push and pop": context,
        "event: the same, and record": event,
        "pool.try_loan and back": lambda: pool.try_loan(source.nbytes, stream).give_back(),
        "copy_from": lambda: held.copy_from(source.data_ptr()),
        "pool.describe": lambda: pool.describe(0, source.nbytes, 0, stream, "bfloat16", tuple(source.shape)),
        "chunk.describe": lambda: describe({"hidden": array}),
        "encode": lambda: channel.encode(channel.Data(0, header, channel.INLINE, 0, 0, array.nbytes, array.tobytes())),
        "decode": lambda: to_consumer.decode(message),
        "block decode": lambda: _decoded(array),
        "event query": lambda: driver().is_done(pool._events[0][0]),
        "torch tensor over it": lambda: _over(held, mine.dtype, mine.shape, 0),
    }
    result = {}
    for name, call in timed_calls.items():
        times = []
        for _ in range(2000):
            start_ns = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start_ns)
        torch.cuda.synchronize()
        result[name] = round(statistics.median(times) / 1e3, 2)
    return result


async def ordered(end: End) -> dict[str, Any]:
    """The consumer opens what our stream has yet to write, and lets go of what its stream has yet to read; blocks are used again at once."""
    small = End("small", str(end.connector._directory), 4 * MIB, max_tensors=3)  # room for two tensors
    source = torch.empty(MIB, dtype=torch.bfloat16, device="cuda")
    for n in range(200):
        loan = None
        if n % 4 == 3:  # a loan that is given up with its stream at work
            loan = await small.devices.loan(source.shape, source.dtype)
            torch.cuda._sleep(SLEEP_CYCLES // 4)
            loan.tensor.fill_(255)
            loan = None
        with torch.cuda.stream(torch.cuda.Stream()):
            if n % 2:
                loan = await small.devices.loan(source.shape, source.dtype)
                torch.cuda._sleep(SLEEP_CYCLES)
                loan.tensor.fill_(n % 251)
                array = loan.seal()
            else:
                mine = torch.empty_like(source)
                torch.cuda._sleep(SLEEP_CYCLES)
                mine.fill_(n % 251)
                array = await small.devices.lend(mine)
        await end.send(array, do="keep", value=n % 251)
        del array
        loan = None
    answer = await end.ask(None, do="count")
    torch.cuda.synchronize()
    await until_idle(small)
    await small.close()
    return answer


async def until_idle(end: End) -> float:
    """Milliseconds until no block is out."""
    start_ns = time.monotonic_ns()
    async with asyncio.timeout(10):
        while True:
            end.devices.pool.settle()
            if not end.devices.pool.blocks_out:
                return round((time.monotonic_ns() - start_ns) / 1e6, 2)
            await asyncio.sleep(0.0002)


async def killed(end: End, consumer: asyncio.subprocess.Process) -> dict[str, Any]:
    """kill -9 of a consumer that holds blocks; then a producer's, whose block we hold."""
    await until_idle(end)
    source = torch.ones(MIB, dtype=torch.bfloat16, device="cuda")
    for _ in range(16):
        await end.ask(await end.devices.lend(source), do="hold")
    end.devices.pool.settle()
    held = end.devices.pool.blocks_out
    consumer.send_signal(signal.SIGKILL)
    idle_ms = await until_idle(end)
    await consumer.wait()
    await asyncio.sleep(0.5)
    free_before = torch.cuda.mem_get_info()[0]
    result = {"consumer_held_blocks": held, "blocks_out_after": end.devices.pool.blocks_out, "back_after_ms": idle_ms}

    # A dying producer: what is open stays readable, and is let go when its last tensor dies.
    producer = await start("dying", str(end.connector._directory))
    assert producer.stdin is not None
    producer.stdin.write(f"{await end.open()}\n".encode())
    lease = await end.leases.get()
    tensor = end.devices.open(lease.arrays()[0])
    lease.release()
    torch.cuda.current_stream().synchronize()
    with_producer = torch.cuda.mem_get_info()[0]
    end.lost.clear()
    producer.send_signal(signal.SIGKILL)
    start_ns = time.monotonic_ns()
    await end.lost.wait()
    result["producer_lost_after_ms"] = round((time.monotonic_ns() - start_ns) / 1e6, 2)
    await producer.wait()
    await asyncio.sleep(0.5)
    try:
        result["tensor_of_killed_producer_intact"] = bool((tensor == 7).all())
    except RuntimeError as error:  # the context is of no use after that
        return {**result, "tensor_of_killed_producer_intact": str(error)}
    del tensor
    await asyncio.sleep(0.5)
    result["pools_still_open"] = len(end.devices._reader._pools)
    result["free_mib"] = {
        "before": free_before // MIB,
        "with a 1 GiB producer": with_producer // MIB,
        "after all": torch.cuda.mem_get_info()[0] // MIB,
    }
    return result


async def die(directory: str) -> None:
    end = End("dying", directory, 1024 * MIB)
    await end.dial(sys.stdin.readline().strip())
    await end.send(await end.devices.lend(torch.full((MIB,), 7, dtype=torch.bfloat16, device="cuda")), do="none")
    await asyncio.Event().wait()


async def start(role: str, directory: str, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--role",
        role,
        "--directory",
        directory,
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


def keep_awake() -> None:
    """A process that runs on this one's cores when nothing else does, until this one ends. Before any thread or context is made."""
    parent = os.getpid()
    if os.fork() == 0:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while os.getppid() == parent:
            pass
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", default="producer", choices=("producer", "consumer", "dying"))
    parser.add_argument("--directory")
    parser.add_argument("--quick", action="store_true", help="only the times")
    parser.add_argument("--cores", choices=("any", "own", "awake"), default="any",
                        help="any: as the kernel likes; own: one each; awake: and kept from sleeping by a process of the lowest priority")  # fmt: skip
    args = parser.parse_args()
    if args.cores != "any":
        cores = os.cpu_count() or 2
        os.sched_setaffinity(0, {cores // 4 if args.role == "producer" else cores * 3 // 4 - 1})
    if args.cores == "awake":
        keep_awake()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if args.role != "producer":
            runner.run({"consumer": consume, "dying": die}[args.role](args.directory))
            return
        with tempfile.TemporaryDirectory() as directory:
            report = runner.run(produce(directory, args.quick, ["--cores", args.cores]))
    report["machine"] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
        "kernel": platform.release(),
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    print(
        f"{'bytes':>10} {'way':5} {'n':>5} {'usable p50':>11} {'(of repetitions)':>16} {'p99':>8} {'done p50':>9} {'p99':>8} {'made':>6} {'sent':>6} {'came':>6} wrong  (us)"
    )
    for row in report["rows"]:
        print(
            f"{row['nbytes']:>10} {row['way']:5} {row['n']:>5} {row['usable_us_p50']:>11}"
            f" {'{} - {}'.format(*row['usable_us_p50_of_repetitions']):>16} {row['usable_us_p99']:>8} {row['done_us_p50']:>9}"
            f" {row['done_us_p99']:>8} {row['made_us_p50']:>6} {row['sent_us_p50']:>6} {row['came_us_p50']:>6} {row['wrong']:>5}"
        )
    print("\nwhere the time goes, us (p50 of each step)")
    print(f"{'bytes':>10} {'way':5}" + "".join(f"{name:>8}" for name in STEPS))
    for row in report["steps"]:
        print(f"{row['nbytes']:>10} {row['way']:5}" + "".join(f"{row[f'{name}_us']:>8}" for name in STEPS))
    print("\neach call alone and warm, us")
    for name, value in report["calls"].items():
        print(f"  {name:<30}{value:>8}")
    print({name: value for name, value in report.items() if name not in ("rows", "steps", "calls")})


if __name__ == "__main__":
    main()
