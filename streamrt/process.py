"""What every process of a run begins with: `python -m streamrt.process stage llm --replica 0 --run DIR`.

Joins the run, builds its part (an actor around a stage, a stage that follows its rank 0, or a client around a gateway), says when it
is ready, and leaves when it is told to, when a signal says so or when the orchestrator is gone. The orchestrator alone starts these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from streamrt import registry, weights
from streamrt.actor import Actor
from streamrt.client import Client
from streamrt.config import PipelineConfig
from streamrt.errors import StreamrtError
from streamrt.log import configure, get_logger
from streamrt.member import Member
from streamrt.metrics import Metrics
from streamrt.rundir import RunDir
from streamrt.stage import Context, Stage
from streamrt.trace import Tracer
from transport.connector import Connector
from transport.errors import NoSpace
from transport.lanes import LaneServer
from transport.messages import ToReplica
from transport.schemes import make_connector

log = get_logger("streamrt.process")

LOST_S = 1.5  # how long a process may take to leave once its orchestrator is gone
PR_SET_PDEATHSIG = 1
GC_THRESHOLD = gc.get_threshold()
LOADING_GC_THRESHOLD = 100_000  # objects made between two collections while libraries are imported, which make millions that stay


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m streamrt.process")
    parser.add_argument("kind", choices=("stage", "gateway"))
    parser.add_argument("name")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--run", type=Path, required=True)
    args = parser.parse_args()
    _die_with_parent(signal.SIGKILL if args.kind == "stage" else signal.SIGTERM)
    name = f"{args.name}#{args.replica}" + (f".{args.rank}" if args.rank else "")
    configure(name, os.environ.get("STREAMRT_LOG", "INFO"))
    _name_process(name)
    gc.set_threshold(LOADING_GC_THRESHOLD)
    run = RunDir.at(args.run)
    if args.kind == "gateway":
        status = uvloop.run(_gateway(run, args.name, args.replica))
    elif args.rank == 0:
        status = uvloop.run(_stage(run, args.name, args.replica))
    else:
        status = uvloop.run(_follower(run, name, args.name, args.replica, args.rank))
    # Everything of ours is closed; what the libraries would still tear down takes them seconds, and the kernel none.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _stage(run: RunDir, stage_name: str, replica: int) -> int:
    """A stage process from start to end; the exit status."""
    async with _Life(run, f"{stage_name}#{replica}") as life:
        # 1. Join, and be reachable.
        member = life.member
        welcome = await member.join("stage")
        config = member.pipeline
        deploy = config.deployed(stage_name)
        lane = await LaneServer.bind(f"ipc://{run.work_socket(member.name, member.incarnation)}", ToReplica, life.on_work)
        life.push(lane.close)
        connectors: dict[str, Connector] = {}
        endpoints: dict[str, str] = {}
        for scheme in {config.deployed(stage.name).connector for stage in config.stages}:
            connector = make_connector(
                scheme, member.identity, run.path, deploy.connector_options(), token=run.facts.token if run.facts else ""
            )
            endpoints[scheme] = await connector.open(life.on_chunk, life.on_peer_lost, life.on_cancel_in_lane)
            connectors[scheme] = connector
            life.push(connector.close)
        # 2. Load, beside the loop.
        compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        life.push(_shut(compute))
        with life.telling(stage_name):
            stage = await life.load(compute, stage_name, replica)
            facts = msgspec.to_builtins(stage.describe())
            for way in _sends_by(config, stage_name) if stage.gives else ():
                await connectors[way].reserve()
        # 3. Serve.
        metrics = Metrics()
        trace = os.environ.get("STREAMRT_TRACE")
        tracer = Tracer(Path(trace) if trace else None, member.name)
        max_requests = deploy.max_requests or stage.max_requests
        actor = Actor(stage, name=stage_name, replica=member.name, incarnation=member.incarnation, max_requests=max_requests,
                      connectors=connectors, metrics=metrics, tracer=tracer)  # fmt: skip
        actor.serve(lane)
        life.attach(actor)
        life.push(_in_executor(compute, stage.close))
        life.push(lambda: actor.close(life.broken))
        member.start_heartbeats(actor.state, lambda lag_s: _snapshot(actor, connectors, metrics, lag_s))
        member.ready(work_endpoint=lane.endpoint, connectors=endpoints, max_requests=max_requests, describe=facts)
        log.info("stage.ready", stage=stage_name, run=welcome.run_id)
        await life.until_stopped(actor.drain)
    return life.status


async def _follower(run: RunDir, name: str, stage_name: str, replica: int, rank: int) -> int:
    """A process of a rank above 0, from start to end; the exit status."""
    async with _Life(run, name) as life:
        await life.member.join("stage")
        compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        life.push(_shut(compute))
        with life.telling(stage_name):
            stage = await life.load(compute, stage_name, replica, rank)
        life.member.start_heartbeats(dict, lambda lag_s: [])
        life.stop_when_done(asyncio.create_task(life.follow(compute, stage), name="follow"))
        life.member.ready()
        log.info("stage.follows", stage=stage_name, rank=rank)
        await life.stopped.wait()
    return life.status


async def _gateway(run: RunDir, name: str, replica: int) -> int:
    """A gateway process from start to end; the exit status."""
    async with _Life(run, f"{name}#{replica}") as life:
        client = await Client.connect(run, kind="gateway", name=f"{name}#{replica}", member=life.member)
        life.push(client.close)
        try:
            await client.reserve()
        except NoSpace as error:
            life.member.load_failed(f"{name}: {error}")
            return 3
        serve = importlib.import_module("gateway").serve
        _settle()
        stop = asyncio.Event()

        def ready(address: str) -> None:
            life.member.start_heartbeats(client.state, client.snapshot)
            life.member.ready(address=address)

        async def drain(within_s: float) -> None:
            stop.set()
            await asyncio.wait([serving], timeout=within_s)

        serving = asyncio.create_task(serve(client, replica, ready, stop), name="gateway")
        life.stop_when_done(serving)
        await life.until_stopped(drain)
        stop.set()
        try:
            async with asyncio.timeout(LOST_S if life.is_lost else 5.0):
                await serving
        except TimeoutError:
            log.warning("gateway.slow_stop")
        except StreamrtError as error:
            life.member.load_failed(error.message, error.hint)
            return 3
    return 0


class _LoadFailed(Exception):
    """It has been told; nothing is left to do but to leave."""


class _Life:
    """The frame of a process: signals, membership, and what is closed at the end, last opened first."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.member = Member(run, name)
        self.is_lost = False
        self.status = 0  # what the process exits with
        self.broken = ""  # why the stage will never work again
        self._actor: Actor | None = None
        self._closing = contextlib.AsyncExitStack()
        self.stopped = asyncio.Event()
        self._drain_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> _Life:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopped.set)
        self.push(self.member.close)
        self.member.on_drain = lambda within_s: None if self._drain_s.done() else self._drain_s.set_result(within_s)
        self.member.on_stop = self.stopped.set
        self.member.on_lost = self._lost
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> bool:
        await self._closing.aclose()
        return kind is _LoadFailed

    def push(self, close: Callable[[], Awaitable[Any]]) -> None:
        """Run `close` at the end, before what was pushed earlier, which is closed even if this raises."""
        self._closing.push_async_callback(close)

    @contextlib.contextmanager
    def telling(self, stage_name: str) -> Iterator[None]:
        """What goes wrong inside is told to the orchestrator, which tells the user; this process ends."""
        try:
            yield
        except StreamrtError as error:
            self.member.load_failed(error.message, error.hint)
        except NoSpace as error:
            self.member.load_failed(f"stage {stage_name}: {error}", f"set a smaller arena in [deploy.{stage_name}]")
        except Exception as error:  # the stage's own code may raise anything in `load`; the user is to see what
            log.exception("stage.load_failed", stage=stage_name)
            self.member.load_failed(f"stage {stage_name}: {type(error).__name__}: {error}")
        else:
            return
        self.status = 3
        raise _LoadFailed

    async def load(self, compute: ThreadPoolExecutor, stage_name: str, replica: int, rank: int = 0) -> Stage:
        """The stage, made and loaded on the compute thread; whatever it raises."""
        loop = asyncio.get_running_loop()

        def progress(text: str) -> None:
            loop.call_soon_threadsafe(self.member.progress, text)

        def broken(reason: str) -> None:
            loop.call_soon_threadsafe(self.give_up, reason)

        config, deploy = self.member.pipeline, self.member.pipeline.deployed(stage_name)
        rendezvous = os.environ.get("STREAMRT_RENDEZVOUS")
        context = Context(
            stage=stage_name,
            replica=replica,
            rank=rank,
            ranks=deploy.tp,
            rendezvous=Path(rendezvous) if rendezvous else None,
            threads=deploy.threads,
            device=deploy.devices_of(replica)[rank],
            resolve=lambda source: weights.resolve(source, config.folder, fetch_line=f"streamrt fetch {config.file}"),
            progress=progress,
            compute=compute,
            broken=broken,
        )
        return await loop.run_in_executor(compute, _load, config, context)

    async def follow(self, compute: ThreadPoolExecutor, stage: Stage) -> None:
        """Until rank 0 has closed, or has been lost."""
        try:
            await asyncio.get_running_loop().run_in_executor(compute, stage.follow)
        except Exception:  # the stage's own code; this process ends, and the replica with it
            log.exception("stage.follow_failed", process=self.member.name)
            self.status = 5

    def attach(self, actor: Actor) -> None:
        """Work and chunks go to `actor` from now on."""
        self._actor = actor
        self.member.on_table = lambda table: actor.on_clients(frozenset(table.clients))

    def stop_when_done(self, task: asyncio.Future[Any]) -> None:
        task.add_done_callback(lambda _: self.stopped.set())

    async def until_stopped(self, drain: Callable[[float], Awaitable[None]]) -> None:
        """Until we are to go; a drain that is asked for first is carried out and answered."""
        stopped = asyncio.ensure_future(self.stopped.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [stopped, self._drain_s]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._drain_s.done() and not stopped.done():
                await drain(self._drain_s.result())
                self.member.drained()
                await stopped
        finally:
            stopped.cancel()

    # Nothing may come before there is an actor: peers learn of us only from the table, which lists us when we are ready.
    def on_work(self, peer: str, message: Any) -> None:
        if self._actor is not None:
            self._actor.on_work_message(peer, message)

    def on_chunk(self, lease: Any) -> None:
        if self._actor is None:
            lease.release()
        else:
            self._actor.on_chunk(lease)

    def on_peer_lost(self, peer: str) -> None:
        if self._actor is not None:
            self._actor.on_peer_lost(peer)

    def on_cancel_in_lane(self, request_id: str, epoch: int) -> None:
        if self._actor is not None:
            self._actor.on_cancel_in_lane(request_id, epoch)

    def give_up(self, reason: str) -> None:
        """The stage will never work again: leave, so that the orchestrator starts another."""
        log.error("stage.broken", process=self.member.name, reason=reason)
        self.status, self.broken = 5, reason
        self.stopped.set()

    def _lost(self) -> None:
        # A signal may have come first: the kernel sends a gateway one when its parent dies.
        log.error("orchestrator.lost")
        self.is_lost = True
        self.stopped.set()
        # Whatever hangs on the way out must not keep an orphan alive.
        asyncio.get_running_loop().call_later(LOST_S, os._exit, 4)


def _sends_by(config: PipelineConfig, name: str) -> set[str]:
    """The connectors that a stage sends by: the client's, which is its own, and those of the stages that it feeds."""
    fed = (stage.name for stage in config.stages if any(source.partition(".")[0] == name for source in stage.inputs))
    return {config.deployed(stage).connector for stage in (name, *fed)}


def _load(config: PipelineConfig, context: Context) -> Stage:
    spec = config.stage_named(context.stage)
    kind = registry.load_class(spec.use, config.folder)
    args = registry.parse_args(kind, spec, config.file)
    stage = kind.configured(args)(args, context)
    stage.load()
    _settle()
    return stage


def _settle() -> None:
    """What is loaded stays, so the garbage collector need not look at it again: no request waits while it goes through a library's modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def _snapshot(actor: Actor, connectors: dict[str, Connector], metrics: Metrics, lag_s: float) -> list[Any]:
    """This replica's series, with the gauges as they are now."""
    labels = (actor.name, actor.replica.rpartition("#")[2])
    metrics.set("streamrt_running_requests", *labels, value=actor.admission.running)
    metrics.set("streamrt_queued_requests", *labels, value=actor.admission.queued)
    metrics.set("streamrt_loop_lag_seconds", *labels, value=lag_s)
    stats = [connector.stats() for connector in connectors.values()]
    metrics.set("streamrt_ring_bytes_in_use", *labels, value=sum(s.bytes_in_use for s in stats))
    metrics.set("streamrt_ring_bytes_total", *labels, value=sum(s.bytes_total for s in stats))
    metrics.set("streamrt_credit_waits_total", *labels, value=sum(s.credit_waits for s in stats))
    metrics.set("streamrt_credit_wait_seconds_total", *labels, value=sum(s.credit_wait_ns for s in stats) / 1e9)
    metrics.set("streamrt_stale_chunks_total", *labels, value=sum(s.dropped_stale for s in stats))
    metrics.set("streamrt_hung_peers_total", *labels, value=sum(s.peers_hung for s in stats))
    metrics.set("streamrt_quarantined_bytes", *labels, value=sum(s.bytes_quarantined for s in stats))
    return metrics.snapshot()


def _shut(pool: ThreadPoolExecutor) -> Callable[[], Awaitable[None]]:
    async def shut() -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    return shut


def _in_executor(pool: ThreadPoolExecutor, fn: Callable[[], Any]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, fn)

    return run


def _die_with_parent(number: int) -> None:
    """Have the kernel end us when the orchestrator dies, even if our own loop hangs. A gateway gets a signal it can handle,
    to close its connections; a stage, which runs others' code, gets one that nobody can ignore."""
    parent = int(os.environ.get("STREAMRT_PARENT", "0"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent and os.getppid() != parent:  # it died before we asked
        sys.exit(4)


def _name_process(name: str) -> None:
    """So that `ps` and `top` tell the processes apart."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"streamrt {name}"[:15])


if __name__ == "__main__":
    main()
