"""Carries out a plan: starts the processes, watches them, publishes who is there, drains and stops them. Never sees a chunk.

The policy is `supervisor.py`'s: every event goes in there, every action that comes out is done here. Runs on the main thread of
`streamrt up` (the kernel ties the children's lives to that thread).

Rules
- A child's end is seen through its pidfd; a guest's (gateways and clients alike) through its liveness socket.
- The ranks of a replica are children of their own; to the policy and in the table they are one, named after rank 0.
- The table is published whole, with a rising version, whenever anything in it has changed; many changes at once are one table.
- When `run` returns, no process, no socket file and no folder of the run is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streamrt.config import PipelineConfig, to_json
from streamrt.errors import ConfigError, StageFailed, StreamrtError
from streamrt.log import get_logger
from streamrt.metrics import Sample
from streamrt.pipeline import Graph
from streamrt.plan import Plan, Process
from streamrt.rundir import RunDir, RunFacts, new_token, process_started
from streamrt.supervisor import Action, Drain, GiveUp, Kill, Start, Stop, Supervisor, Watched
from streamrt.trace import Tracer
from transport import messages
from transport.errors import TransportError, WouldBlock
from transport.lanes import LaneServer
from transport.messages import (
    Answer,
    Drained,
    Heartbeat,
    LoadFailed,
    Progress,
    Query,
    Ready,
    Register,
    Rejected,
    Replica,
    Table,
    ToOrchestrator,
    Welcome,
)

log = get_logger("streamrt.orchestrator")

MAX_GUESTS = 256  # registered clients, beside the run's own processes
SLOW_PEER_S = 1.0  # who could not take a table is sent the next one after so long
INFO_S = 0.2  # changes of running and queued counts are published at most this often
PR_SET_PDEATHSIG = 1


class _Child:
    """A process that this run has started. Written here alone."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.log_name = f"{process.name.replace('#', '-')}.log"
        self.popen: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.incarnation = ""
        self.ready: Ready | None = None
        self.progress = ""
        self.info: dict[str, Any] = {}
        self.metrics: list[Any] = []


class Orchestrator:
    """One run, from its first process to its last. Made for one `run`."""

    def __init__(
        self,
        config: PipelineConfig,
        graph: Graph,
        plan: Plan,
        *,
        trace: Path | None = None,
        on_change: Callable[[Table], None] = lambda table: None,
        on_ready: Callable[[list[str]], None] = lambda addresses: None,
    ) -> None:
        self.config = config
        self.failure: StreamrtError | None = None  # why it ended, when it could not start
        self._graph = graph
        self._trace = None if trace is None else trace.absolute()
        self._on_change = on_change
        self._on_ready = on_ready
        self._children = {process.name: _Child(process) for process in plan.processes}
        self._replicas: dict[str, list[_Child]] = {}  # rank 0 first
        for child in self._children.values():
            self._replicas.setdefault(child.process.leader, []).append(child)
        leaders = [ranks[0].process for ranks in self._replicas.values()]
        self._supervisor = Supervisor(
            [Watched(p.name, p.level, p.load_s, p.load_timeout_s, p.hang_timeout_s, p.ranks) for p in leaders],
            config.run,
            max_loading=max(2, len(plan.machine.cores)),
        )
        self._guests: dict[str, str] = {}  # identity -> kind, of registered gateways and clients
        self._left: deque[str] = deque(maxlen=MAX_GUESTS)  # whose liveness socket ended before their Register came
        self._peers: set[str] = set()  # identities that get the table
        self._table = Table(0, ())
        self._run: RunDir | None = None
        self._lane: LaneServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._publish_at = 0.0  # CLOCK_MONOTONIC, seconds
        self._ended = asyncio.Event()
        self._was_ready = False

    async def run(self) -> int:
        """Start everything, serve until it is stopped; the exit status.

        Raises: AlreadyRunning, ConfigError before anything is started. Afterwards `failure` says what went wrong.
        """
        _follow_owner()
        run = self._run = RunDir.create(self.config.name)
        loop = asyncio.get_running_loop()
        live: asyncio.Server | None = None
        try:
            run.logs.mkdir(parents=True, exist_ok=True)
            if self._trace is not None:
                Tracer.begin(self._trace)
            self._lane = await LaneServer.bind(f"ipc://{run.socket('control')}", ToOrchestrator, self._on_message)
            live = await asyncio.start_unix_server(self._hold, str(run.socket("live")))
            run.socket("live").chmod(0o600)
            self._facts = RunFacts(
                self.config.name, new_token(), new_token(), os.getpid(), process_started(os.getpid()), self._lane.endpoint, self.config.file
            )
            run.publish(self._facts)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop)
            self._act(self._supervisor.start(time.monotonic_ns()))
            await self._ended.wait()
        finally:
            for child in self._children.values():
                _end(child)
            for handle in (self._timer, self._publishing):
                if handle is not None:
                    handle.cancel()
            if live is not None:
                live.close()
            if self._lane is not None:
                await self._lane.close(linger_s=0.2)
            run.remove()
        return 0 if self.failure is None else 1

    # ---- actions ---------------------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        """Do what the policy says, then see what has become of the table, the timer and the run."""
        for action in actions:
            child = self._children[action.name]
            match action:
                case Start():
                    self._start(self._replicas[action.name])
                case Drain():
                    self._tell(self._identity(child), messages.Drain(action.within_s))
                case Stop():
                    self._tell(self._identity(child), messages.Stop())
                case Kill(reason=reason):
                    log.warning("process.killed", process=action.name, reason=reason)
                    for rank in self._replicas[action.name]:
                        if rank.pidfd >= 0:
                            signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
                case GiveUp():
                    self._give_up(action)
        self._set_timer()
        self._changed()
        if self._supervisor.is_stopped:
            self._ended.set()
        elif self._supervisor.is_ready and not self._was_ready:
            self._was_ready = True
            self._publish()
            self._on_ready(self._addresses())

    def _start(self, ranks: list[_Child]) -> None:
        assert self._run is not None
        more = {"STREAMRT_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        if self._trace is not None:
            more["STREAMRT_TRACE"] = str(self._trace)
        try:
            if len(ranks) > 1:
                more["STREAMRT_RENDEZVOUS"] = str(self._run.new_rendezvous(ranks[0].process.name))
        except OSError as error:
            for child in ranks:
                self._not_started(child.process, error)
        else:
            for child in ranks:
                self._spawn(child, more)

    def _spawn(self, child: _Child, more: dict[str, str]) -> None:
        """Start one process; `more` is what its environment has beside the plan's."""
        assert self._run is not None
        process = child.process
        child.incarnation, child.ready, child.progress, child.info = "", None, "", {}
        environment = {**os.environ, **process.env, **more}
        environment.pop("STREAMRT_OWNER", None)
        path = self._run.logs / child.log_name
        try:
            with path.open("ab" if self._supervisor.children[process.leader].restarts else "wb") as output:
                child.popen = subprocess.Popen(
                    process.command(self._run.path),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,  # Ctrl-C is ours to handle; one session, because the kernel weighs `nice` inside a session only
                )
        except OSError as error:
            self._not_started(process, error)
            return
        child.pidfd = os.pidfd_open(child.popen.pid)
        if process.cores:
            os.sched_setaffinity(child.popen.pid, process.cores)
        asyncio.get_running_loop().add_reader(child.pidfd, self._on_exit, child)

    def _not_started(self, process: Process, error: OSError) -> None:
        """No memory, no descriptor, no space or no process is left: as if it had died at once."""
        log.error("process.not_started", process=process.name, error=error)
        asyncio.get_running_loop().call_soon(self._on_not_started, process, f"it could not be started: {error}")

    def _give_up(self, action: GiveUp) -> None:
        log.error("process.given_up", process=action.name, error=action.error)
        if action.is_fatal and self.failure is None:
            assert self._run is not None
            kind = ConfigError if action.hint else StageFailed
            logs = [child.log_name for child in self._replicas[action.name]]
            where = f"{action.name}: {action.error}" if not action.error.startswith("stage ") else action.error
            self.failure = kind(where, hint=action.hint or f"its log: {self._run.logs}/{', '.join(logs)}")
            self._act(self._supervisor.stop(time.monotonic_ns(), 0))

    def _stop(self) -> None:
        self._act(self._supervisor.stop(time.monotonic_ns()))

    def _tick(self) -> None:
        self._act(self._supervisor.tick(time.monotonic_ns()))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self._supervisor.next_ns
        if due_ns is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, (due_ns - time.monotonic_ns()) / 1e9), self._tick)

    # ---- events ----------------------------------------------------------------------------------------------------------

    def _on_exit(self, child: _Child) -> None:
        assert child.popen is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        status = child.popen.wait()
        os.close(child.pidfd)
        child.pidfd = -1
        self._peers.discard(self._identity(child))
        self._guests.pop(self._identity(child), None)
        if not self._supervisor.is_stopping:
            log.warning("process.exited", process=child.process.name, status=status)
        child.ready, child.info, child.metrics = None, {}, []
        self._act(self._supervisor.on_exited(child.process.leader, status, time.monotonic_ns(), child.process.rank))

    def _on_not_started(self, process: Process, error: str) -> None:
        self._act(self._supervisor.on_load_failed(process.leader, error))
        self._act(self._supervisor.on_exited(process.leader, os.EX_OSERR, time.monotonic_ns(), process.rank))

    def _on_message(self, peer: str, message: Any) -> None:
        if isinstance(message, Register):
            self._on_register(peer, message)
            return
        if isinstance(message, Query):
            self._on_query(peer, message)
            return
        child = self._children.get(message.name)
        if child is None or child.incarnation != message.incarnation:
            return  # of an incarnation that is gone, or of a guest, which is not watched
        now, replica, rank = time.monotonic_ns(), child.process.leader, child.process.rank
        match message:
            case Progress(text=text):
                child.progress = text
                self._changed()
            case Ready():
                child.ready = message
                _give_way(child)
                if message.address and self._run is not None:
                    self._facts.gateways = self._addresses()
                    self._run.publish(self._facts)
                self._act(self._supervisor.on_ready(replica, now, rank))
            case LoadFailed(error=error, hint=hint):
                self._act(self._supervisor.on_load_failed(replica, error if rank == 0 else f"rank {rank}: {error}", hint))
            case Heartbeat():
                child.metrics = message.metrics
                self._supervisor.on_heartbeat(replica, now, rank)
                self._set_timer()
                if child.info != message.state:
                    child.info = message.state
                    self._changed(INFO_S)
            case Drained():
                self._act(self._supervisor.on_drained(replica, now))

    def _on_register(self, peer: str, message: Register) -> None:
        child = self._children.get(message.name)
        if message.token != self._facts.token:
            self._tell(peer, Rejected("wrong token"))
        elif message.version != messages.WIRE_VERSION:
            self._tell(peer, Rejected(f"wire version: got {message.version}, expected {messages.WIRE_VERSION}"))
        elif child is not None and (child.popen is None or child.popen.pid != message.pid):
            self._tell(peer, Rejected(f"{message.name} is another process"))
        elif peer in self._left:
            self._tell(peer, Rejected("it has left already"))
        elif child is None and len(self._guests) >= MAX_GUESTS:
            self._tell(peer, Rejected(f"{MAX_GUESTS} clients are here already"))
        else:
            if child is not None:
                child.incarnation = message.incarnation
            if message.kind != "stage":
                self._guests[peer] = message.kind
            self._peers.add(peer)
            graph = msgspec.json.encode(list(self._graph.nodes.values())).decode()
            self._tell(peer, Welcome(to_json(self.config), graph, self._facts.run_id, self.config.run.heartbeat_s))
            if child is not None:
                self._act(self._supervisor.on_registered(child.process.leader))
            self._publish()

    def _on_query(self, peer: str, message: Query) -> None:
        if message.token != self._facts.token:
            self._tell(peer, Rejected("wrong token"))
        elif message.what == "metrics":
            own = [Sample("streamrt_restarts_total", (name,), child.restarts) for name, child in self._supervisor.children.items()]
            others = [row for child in self._children.values() if self._identity(child) != peer for row in child.metrics]
            self._tell(peer, Answer(message.query_id, [*others, *own]))
        else:
            self._tell(peer, Answer(message.query_id, None))

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A liveness socket: nothing is said on it after the first line; its end is the end of the process that holds it."""
        identity = ""
        try:
            name, incarnation, _ = (await reader.readline()).decode().split()
            identity = f"{name}/{incarnation}"
            await reader.read()
        except (ConnectionError, ValueError):
            pass
        finally:
            writer.close()
            if self._guests.pop(identity, None) is not None:
                self._peers.discard(identity)
                self._changed()
            elif identity not in self._peers:
                self._left.append(identity)

    # ---- the table -------------------------------------------------------------------------------------------------------

    def _changed(self, within_s: float = 0.0) -> None:
        """Publish soon; changes until then go along."""
        due = time.monotonic() + within_s
        if self._publishing is not None:
            if self._publish_at <= due:
                return
            self._publishing.cancel()
        self._publish_at = due
        self._publishing = asyncio.get_running_loop().call_later(within_s, self._publish)

    def _publish(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        rows = tuple(self._row(*ranks) for ranks in self._replicas.values())
        table = Table(self._table.version + 1, rows, tuple(self._addresses()), tuple(self._guests))
        self._table = table
        for peer in list(self._peers):
            self._tell(peer, table)
        self._on_change(table)

    def _row(self, child: _Child, *others: _Child) -> Replica:
        watched = self._supervisor.children[child.process.name]
        ready = child.ready
        return Replica(
            child.process.name,
            child.process.stage,
            child.incarnation,
            watched.state,
            _pid(child),
            rank_pids=tuple(map(_pid, others)),
            work_endpoint=ready.work_endpoint if ready else "",
            connectors=ready.connectors if ready else {},
            max_requests=ready.max_requests if ready else 1,
            error=watched.error,
            progress=child.progress,
            restarts=watched.restarts,
            describe=ready.describe if ready else {},
            info=child.info,
        )

    def _tell(self, peer: str, message: Any) -> None:
        assert self._lane is not None
        try:
            self._lane.send(peer, message)
        except WouldBlock:  # it does not read; it may again, and must not be left with an old table then
            log.warning("peer.slow", peer=peer)
            self._changed(SLOW_PEER_S)
        except TransportError:
            self._peers.discard(peer)  # gone; its process's end is seen elsewhere

    def _addresses(self) -> list[str]:
        """Where the gateways listen now."""
        return [child.ready.address for child in self._children.values() if child.ready and child.ready.address]

    @staticmethod
    def _identity(child: _Child) -> str:
        return f"{child.process.name}/{child.incarnation}"


def _pid(child: _Child) -> int:
    """0 when it does not live."""
    return child.popen.pid if child.popen and child.pidfd >= 0 else 0


def _give_way(child: _Child) -> None:
    """Set `nice`, once loading is over: everybody waits for that. The kernel keeps it per thread."""
    if child.process.nice and child.popen is not None:
        for thread in os.listdir(f"/proc/{child.popen.pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), child.process.nice)


def _end(child: _Child) -> None:
    """Whatever is left of a child when the run ends in an error of our own."""
    if child.popen is not None and child.pidfd >= 0:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        child.popen.wait()
        os.close(child.pidfd)
        child.pidfd = -1


def _follow_owner() -> None:
    """A run that a Python program has started for itself ends with that program, however that ends."""
    owner = int(os.environ.get("STREAMRT_OWNER", "0"))
    if owner:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != owner:
            raise ConfigError("the program that started this run has ended")
