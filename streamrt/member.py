"""One process's membership of a run: control lane, liveness, heartbeats, the replica table.

Stages, gateways and outside clients join alike. Knows the orchestrator's messages; knows nothing of work or chunks.

Rules
- A process that hears the end of the liveness socket has lost its orchestrator: `on_lost` runs, once.
- The table that is held is always the newest version.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from streamrt.config import PipelineConfig, from_json
from streamrt.errors import NotRunning, Unavailable
from streamrt.log import get_logger
from streamrt.rundir import RunDir
from transport.errors import TransportError
from transport.lanes import LaneClient
from transport.messages import (
    Answer,
    Drain,
    Drained,
    FromOrchestrator,
    Heartbeat,
    LoadFailed,
    Progress,
    Query,
    Ready,
    Register,
    Rejected,
    Stop,
    Table,
    Welcome,
)

log = get_logger("streamrt.member")

JOIN_S = 20.0
QUERY_S = 5.0
LAG_LOG_MS = 200.0


class Member:
    """This process, as the orchestrator knows it. Made by `join`; ends with `close`."""

    def __init__(self, run: RunDir, name: str) -> None:
        self.run = run
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self.table = Table(0, ())
        self.heartbeat_s = 1.0
        self.on_table: Callable[[Table], None] = lambda table: None
        self.on_drain: Callable[[float], None] = lambda within_s: None
        self.on_stop: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._pipeline: PipelineConfig | None = None
        self._lane: LaneClient | None = None
        self._live: asyncio.StreamWriter | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._has_table = asyncio.Event()
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pipeline(self) -> PipelineConfig:
        assert self._pipeline is not None, "join first"
        return self._pipeline

    @property
    def identity(self) -> str:
        """This incarnation of this process, as its peers know it."""
        return f"{self.name}/{self.incarnation}"

    async def join(self, kind: str) -> Welcome:
        """Register and learn what the pipeline is. Raises NotRunning when nobody answers, Unavailable when we are not wanted."""
        facts = self.run.facts
        assert facts is not None
        try:
            reader, self._live = await asyncio.open_unix_connection(str(self.run.socket("live")))
        except OSError as error:
            raise NotRunning(f'pipeline "{self.run.name}": its orchestrator does not answer ({error})') from error
        self._live.write(f"{self.name} {self.incarnation} {os.getpid()}\n".encode())
        self._tasks.append(asyncio.create_task(self._watch(reader), name="liveness"))
        self._lane = await LaneClient.connect(facts.control, self.identity, FromOrchestrator, self._on_message)
        self._lane.send(Register(self.name, kind, self.incarnation, os.getpid(), facts.token))
        try:
            async with asyncio.timeout(JOIN_S):
                welcome = await self._welcome
        except TimeoutError:
            raise NotRunning(f'pipeline "{self.run.name}": its orchestrator did not answer within {JOIN_S:.0f} s') from None
        self._pipeline = from_json(welcome.pipeline)
        self.heartbeat_s = welcome.heartbeat_s
        return welcome

    async def has_table(self) -> Table:
        """The first table; the caller bounds the wait."""
        await self._has_table.wait()
        return self.table

    def progress(self, text: str) -> None:
        self._send(Progress(self.name, self.incarnation, text))

    def load_failed(self, error: str, hint: str = "") -> None:
        self._send(LoadFailed(self.name, self.incarnation, error, hint))

    def ready(self, **facts: Any) -> None:
        """Loaded and warm; `facts` as in `Ready`."""
        self._send(Ready(self.name, self.incarnation, **facts))

    def drained(self) -> None:
        self._send(Drained(self.name, self.incarnation))

    def start_heartbeats(self, state: Callable[[], dict[str, Any]], metrics: Callable[[float], list[Any]]) -> None:
        """From now on say each second that we live: `state()` for `ps` and the page, `metrics(loop lag in seconds)` for /metrics."""
        self._tasks.append(asyncio.create_task(self._beat(state, metrics), name="heartbeat"))

    async def query(self, what: str) -> Any:
        """Ask the orchestrator. Raises Unavailable when it does not answer in time."""
        query_id = secrets.token_hex(8)
        future = self._answers[query_id] = asyncio.get_running_loop().create_future()
        assert self.run.facts is not None
        try:
            self._send(Query(query_id, what, self.run.facts.token))
            async with asyncio.timeout(QUERY_S):
                return await future
        except TimeoutError:
            raise Unavailable(f"the orchestrator did not answer {what!r} within {QUERY_S:.0f} s") from None
        finally:
            del self._answers[query_id]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._lane is not None:
            await self._lane.close()
            self._lane = None
        if self._live is not None:
            self._live.close()
            self._live = None

    def _on_message(self, message: Any) -> None:
        match message:
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Rejected(reason=reason):
                if not self._welcome.done():
                    self._welcome.set_exception(Unavailable(f"{self.name}: {reason}"))
            case Table():
                if message.version > self.table.version:
                    self.table = message
                    self._has_table.set()
                    self.on_table(message)
            case Drain(within_s=within_s):
                self.on_drain(within_s)
            case Stop():
                self.on_stop()
            case Answer(query_id=query_id, data=data):
                future = self._answers.get(query_id)
                if future is not None and not future.done():
                    future.set_result(data)

    def _send(self, message: Any) -> None:
        if self._lane is not None:
            try:
                self._lane.send(message)
            except TransportError as error:  # the orchestrator does not read; if it is gone, the liveness socket says so
                log.error("orchestrator.unreachable", process=self.name, error=error)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        try:
            await reader.read()  # nothing is ever said here; only the end arrives
        except ConnectionError:
            pass
        if not self._welcome.done():
            self._welcome.set_exception(NotRunning(f'pipeline "{self.run.name}": its orchestrator has ended'))
        self.on_lost()

    async def _beat(self, state: Callable[[], dict[str, Any]], metrics: Callable[[float], list[Any]]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            lag_ms = max(0.0, (loop.time() - due) * 1000)
            if lag_ms > LAG_LOG_MS:
                log.warning("loop.late", process=self.name, lag_ms=lag_ms, at_ns=time.monotonic_ns())
                due = loop.time()
            self._send(Heartbeat(self.name, self.incarnation, lag_ms, state(), metrics(lag_ms / 1000)))
            due += self.heartbeat_s
            await asyncio.sleep(due - loop.time())
