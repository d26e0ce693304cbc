"""The client: submits requests to a running pipeline and composes how each one ends.

Gateways, the Python API, `talk` and tests all go through it. It holds the router (which replicas serve a request) and is a
peer on the data path like any stage: it feeds entry stages and takes what exit stages send.

Knows routes, credit and chunks. Knows nothing of HTTP.

Rules
- Every `Call` ends exactly once: its iteration stops (completed) or raises (failed, expired, cancelled, unavailable).
- Chunks are copied out of the ring as they come, up to `MAX_COPIED` and `MAX_COPIED_BYTES`; beyond that they stay leased, which holds
  back that request only.
- Cancel is immediate here and told to every replica of the route; what arrives later is dropped.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from streamrt.actor import chunk_of
from streamrt.config import PipelineConfig
from streamrt.errors import BadRequest, Cancelled, Expired, Overloaded, StageFailed, StreamrtError, TooLong, Unavailable, from_code
from streamrt.log import get_logger
from streamrt.member import Member
from streamrt.metrics import Metrics, Sample, render
from streamrt.pipeline import Graph, Node
from streamrt.router import CLIENT, Assignment, Router, TaskRoute, route_of, task_routes
from streamrt.rundir import RunDir
from transport.chunk import Chunk, ChunkHeader, Place, describe
from transport.connector import Connector, Lease, Outlet
from transport.errors import Broken, Closed, TooLarge, TransportError
from transport.lanes import LaneClient
from transport.messages import Cancel, Edge, Finished, Join, Leave, Replica, Table, ToClient, Window, Work
from transport.schemes import make_connector

log = get_logger("streamrt.client")

MAX_COPIED = 256  # chunks of one request that are held here before its credit is withheld
MAX_COPIED_BYTES = 64 << 20  # and bytes of them: frames of a video can be megabytes each
MAX_RETRIES = 1  # of a request that nothing had come of yet when its replica died
TABLE_S = 20.0


class Call:
    """One request, as its caller sees it. Made by `Client.submit`; ended by its stages, by its deadline or by `cancel`."""

    def __init__(
        self, client: Client, request_id: str, task: str, params: dict[str, Any], route: TaskRoute, deadline_ns: int | None
    ) -> None:
        self.id = request_id
        self.task = task
        self.params = params
        self.route = route
        self.epoch = 0
        self.deadline_ns = deadline_ns
        self.submitted_ns = time.monotonic_ns()
        self.timings: dict[str, dict[str, float]] = {}  # stage -> queue_wait_ms, first_chunk_ms, total_ms
        self.error: StreamrtError | None = None  # how it ended, when not well
        self.is_over = False
        self._client = client
        self._assignment: Assignment | None = None
        self._entry: Outlet | None = None
        self._fed = 0  # seq of the next chunk that is fed; -1 once its input has ended
        self._feeding = asyncio.Lock()
        self._ready: deque[Chunk | Lease] = deque()
        self._copied_bytes = 0  # of the chunks in `_ready`
        self._wake: asyncio.Future[None] | None = None
        self._open_exits = set(route.outputs.values())
        self._unfinished: set[str] = set(route.stages)
        self._next_seq: dict[str, int] = {}
        self._first_ns: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # its feeder, its retry; cancelled when it ends
        self._timer: asyncio.TimerHandle | None = None
        self._gives_up = False  # a stage was cancelled by somebody else: the others are told, and one of them may say why
        self._replay: list[Chunk] | None = None  # the whole input, when it was given at once
        self._retries = 0

    async def feed(self, chunk: Chunk) -> None:
        """Send one chunk to the entry stage.

        Waits: for its credit, and for the feeds before it. Cancelled: it was not fed.
        Raises the error that ended the request, when it is over; BadRequest when its input has ended; TooLong.
        """
        await self._feed(chunk, Place.PARTIAL)

    async def end(self) -> None:
        """Say that no more input will come."""
        await self._feed(Chunk("event"), Place.EMPTY_FINAL)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """What the stages send, private copies, of all outputs in the order of arrival; each output ends with an empty final chunk."""
        while True:
            while self._ready:
                item = self._ready.popleft()
                if isinstance(item, Chunk):
                    self._copied_bytes -= _size(item)
                yield item if isinstance(item, Chunk) else _copy_out(item)
            if self.error is not None:
                raise self.error
            if self.is_over:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    async def text(self) -> str:
        """All text that comes, joined."""
        return "".join([chunk.text async for chunk in self if chunk.modality == "text"])

    def cancel(self, cause: str = "client") -> None:
        """End it now; what has not been read is dropped. Idempotent, and no more than a look once it is over."""
        if not self.is_over:
            self._drop_unread()
            self._client._end(self, Cancelled(f"request {self.id} was cancelled ({cause})", cause=cause))

    # ---- for the client ----------------------------------------------------------------------------------------------

    async def _feed(self, chunk: Chunk, place: Place) -> None:
        async with self._feeding:  # one at a time: a feed that is given up must leave no gap before the next one
            if self.error is not None:
                raise self.error
            if self._fed < 0:
                raise BadRequest(f"request {self.id}: its input has ended")
            entry, epoch = self._entry, self.epoch
            if self.is_over or entry is None:
                return  # the stages wanted no more of it
            specs, arrays, _ = describe(chunk.tensors)
            header = ChunkHeader(self.id, epoch, CLIENT, "", self._fed, chunk.modality, int(place), specs,
                                 chunk.sample_rate_hz, chunk.fps, chunk.meta, time.monotonic_ns())  # fmt: skip
            try:
                await entry.send(header, arrays)
            except TooLarge as error:
                raise TooLong(f"request {self.id}: {error}") from None
            except Broken:
                self._client._lose_entry(self)
            except Closed:
                pass  # it is over, or tried again from the start
            except TransportError as error:
                raise Unavailable(f"request {self.id}: {error}") from error
            else:
                if self.epoch == epoch:
                    self._fed = self._fed + 1 if place == Place.PARTIAL else -1
            if self.error is not None:
                raise self.error

    async def _feed_all(self, chunks: Sequence[Chunk]) -> None:
        try:
            for chunk in chunks:
                await self._feed(chunk, Place.PARTIAL)
            await self._feed(Chunk("event"), Place.EMPTY_FINAL)
        except StreamrtError as error:
            self._client._end(self, error)  # the call's reader is who is told
        except Exception as error:  # the caller's chunks: whatever is wrong with them, the reader must not wait for ever
            log.exception("request.unfit_input", request=self.id)
            self._client._end(self, BadRequest(f"request {self.id}: its input can not be sent: {error}"))

    def _put(self, lease: Lease) -> None:
        """A chunk has come. Called by the client, in order per stage."""
        header = lease.header
        source = f"{header.stage}.{header.port}"
        expected = self._next_seq.get(source, 0)
        if self.is_over or header.seq < expected or source not in self._open_exits:
            lease.release()
            return
        if header.seq > expected:
            lease.release()
            self._client._end(self, StageFailed(f"chunk {header.seq} from {source}: expected chunk {expected}"))
            return
        self._next_seq[source] = expected + 1
        if header.place == Place.PARTIAL:
            self._note_first(header.modality)
        else:
            self._open_exits.discard(source)
        if len(self._ready) < MAX_COPIED and self._copied_bytes < MAX_COPIED_BYTES:
            chunk = _copy_out(lease)
            self._copied_bytes += _size(chunk)
            self._ready.append(chunk)
        else:
            self._ready.append(lease)
        self._notify()
        self._client._end_if_complete(self)

    def _note_first(self, modality: str) -> None:
        if modality not in self._first_ns:
            now = self._first_ns[modality] = time.monotonic_ns()
            self._client.metrics.observe("streamrt_client_first_chunk_seconds", self.task, modality, value=(now - self.submitted_ns) / 1e9)

    def _drop_unread(self) -> None:
        while self._ready:
            item = self._ready.popleft()
            if not isinstance(item, Chunk):
                item.release()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Client:
    """A member of a running pipeline that submits requests. One per process; driven by that process's loop."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.metrics = Metrics()
        self.gauges: dict[str, Callable[[], float]] = {}  # metrics labelled with this process alone, looked at when they are asked for
        self._connectors: dict[str, Connector] = {}
        self._endpoints: dict[str, str] = {}
        self._routes: dict[str, TaskRoute] = {}
        self._graph: Graph | None = None
        self._router = Router()
        self._lanes: dict[str, LaneClient] = {}  # replica name -> its work lane
        self._calls: dict[tuple[str, int], Call] = {}
        self._waiting: dict[str, tuple[Call, asyncio.Future[Assignment]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()  # of lanes to lost replicas; these run to their end
        self._next_table: asyncio.Future[Table] | None = None  # for who waits in `table_changed`
        self._why_closed = ""  # why nothing can be submitted any more

    @classmethod
    async def connect(
        cls, run: RunDir | str | None = None, *, kind: str = "client", name: str | None = None, member: Member | None = None
    ) -> Client:
        """Join a run that is up: its folder, its name, or None for the only one. Raises NotRunning."""
        if not isinstance(run, RunDir):
            run = RunDir.find(run)
        client = cls(member or Member(run, name or f"client-{os.getpid()}-{secrets.token_hex(2)}"))
        try:
            await client._open(run, kind)
        except BaseException:
            await client.close()
            raise
        if member is None:  # else its owner knows what to do
            client.member.on_lost = client._on_run_lost
        return client

    async def _open(self, run: RunDir, kind: str) -> None:
        member = self.member
        welcome = await member.join(kind)
        config = member.pipeline
        self._graph = Graph(msgspec.json.decode(welcome.graph, type=tuple[Node, ...]), config.file)
        self._routes = task_routes(self._graph, config.tasks, config.file)
        self._router = Router(config.run.max_queued_requests)
        options = config.deployed("").connector_options()
        for scheme in {config.deployed(stage.name).connector for stage in config.stages}:
            connector = make_connector(scheme, member.identity, run.path, options, token=run.facts.token if run.facts else "")
            self._connectors[scheme] = connector
            self._endpoints[scheme] = await connector.open(self._on_chunk, self._on_peer_lost, self._on_cancel_in_lane)
        async with asyncio.timeout(TABLE_S):
            self._on_table(await member.has_table())
        member.on_table = self._on_table

    async def reserve(self) -> None:
        """Allocate now what feeding needs, so that the first request finds it. Raises NoSpace."""
        for connector in self._connectors.values():
            await connector.reserve()

    @property
    def pipeline(self) -> PipelineConfig:
        return self.member.pipeline

    @property
    def graph(self) -> Graph:
        """What the stages declare, and how they are joined."""
        assert self._graph is not None, "connect first"
        return self._graph

    @property
    def table(self) -> Table:
        return self.member.table

    async def table_changed(self) -> Table:
        """The next table: one comes with each change, and with the heartbeats while something runs."""
        if self._next_table is None or self._next_table.done():
            self._next_table = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next_table)

    def tasks(self) -> dict[str, TaskRoute]:
        """What this pipeline can do."""
        return dict(self._routes)

    def describe(self, stage: str) -> dict[str, Any]:
        """`Stage.describe()` of a ready replica; {} when there is none."""
        return next((row.describe for row in self.table.replicas if row.stage == stage and row.describe), {})

    def is_ready(self, task: str) -> bool:
        return task in self._routes and self._router.is_ready(self._routes[task])

    async def submit(
        self,
        task: str,
        params: dict[str, Any] | None = None,
        inputs: Sequence[Chunk] | None = None,
        *,
        outputs: Collection[str] | None = None,
        timeout_s: float | None = 60.0,
        request_id: str | None = None,
        affinity: str = "",
    ) -> Call:
        """Start a request.

        Args:
            task: one of `tasks()`.
            params: parameters of the task, see `streamrt.stage.Request`.
            inputs: the whole input; None when the caller feeds it (`Call.feed`, `Call.end`).
            outputs: modalities that are wanted; None = all that the task gives.
            timeout_s: deadline; None for none.
            request_id: "" or None makes one.
            affinity: requests of one affinity prefer one replica (warm caches); for listen and duplex they insist.

        Waits: for work credit, in order, at most until the deadline.
        Cancelled: nothing was started.
        Raises: UnknownTask, BadRequest, Overloaded, Unavailable, Expired.
        """
        if self._why_closed:
            raise Unavailable(self._why_closed)
        route = route_of(self._routes, task).narrowed(outputs)
        deadline_ns = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        call = Call(self, request_id or f"req-{secrets.token_hex(8)}", task, dict(params or {}), route, deadline_ns)
        try:
            assignment = self._router.route(call.id, route, affinity=affinity) or await self._wait_for_turn(call)
        except (Overloaded, Unavailable, Expired) as error:
            self.metrics.count("streamrt_client_requests_total", task, error.code)
            raise
        call._replay = list(inputs) if inputs is not None else None
        await self._launch(call, assignment)
        if call.deadline_ns is not None:
            call._timer = asyncio.get_running_loop().call_later(_left_s(call) or 0.0, self._expire, call)
        return call

    async def metrics_text(self) -> bytes:
        """Prometheus text of all processes of the run. Raises Unavailable."""
        rows = await self.member.query("metrics")
        return render([msgspec.convert(row, Sample) for row in rows] + self.snapshot(0.0))

    def state(self) -> dict[str, Any]:
        """Small facts for the heartbeat."""
        return {"open": len(self._calls), "waiting": self._router.num_waiting}

    def snapshot(self, lag_s: float) -> list[Sample]:
        """This process's series."""
        self.metrics.set("streamrt_client_waiting_requests", self.member.name, value=self._router.num_waiting)
        for name, look in self.gauges.items():
            self.metrics.set(name, self.member.name, value=look())
        return self.metrics.snapshot()

    async def close(self) -> None:
        """Cancel what is open and leave the run. Idempotent."""
        for call in list(self._calls.values()):
            call.cancel("shutdown")
        self._refuse_all("this client is closed")
        for lane in self._lanes.values():
            self._send(lane, Leave())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()), *self._closing)
        self._lanes.clear()
        for connector in self._connectors.values():
            await connector.close()
        await self.member.close()

    # ---- starting and ending a call ------------------------------------------------------------------------------------

    async def _wait_for_turn(self, call: Call) -> Assignment:
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = (call, future)
        try:
            async with asyncio.timeout(_left_s(call)):
                try:
                    return await future
                except asyncio.CancelledError:
                    if future.done() and not future.cancelled() and future.exception() is None:
                        # admitted in the same moment in which we gave up
                        self._abandon(future.result(), future.result().replicas.values())
                    self._admit(self._router.on_cancel(call.id, call.epoch))
                    raise
        except TimeoutError:
            raise Expired(f"request {call.id}: no replica became free before its deadline") from None
        finally:
            del self._waiting[call.id]

    async def _launch(self, call: Call, assignment: Assignment) -> None:
        """Tell every replica of the route, then begin to feed. Raises what ended the call meanwhile."""
        call._assignment = assignment
        self._calls[call.id, call.epoch] = call
        first = assignment.replicas[call.route.entry]
        scheme = self._scheme(call.route.entry)
        untold = dict(assignment.replicas)
        try:
            async with asyncio.timeout(_left_s(call)):
                entry = await self._connectors[scheme].dial(first.connectors[scheme])
            if not call.is_over and call.epoch == assignment.epoch:  # else cancelled, expired or lost while we dialed
                for stage in call.route.stages:
                    self._lanes[assignment.replicas[stage].name].send(self._work(call, assignment, stage))
                    del untold[stage]
                call._entry = entry
                if call._replay is not None:
                    self._own(call._feed_all(call._replay), f"feed {call.id}", call)
        except Broken:
            self._on_peer_lost(f"{first.name}/{first.incarnation}")
        except TooLarge as error:
            self._end(call, TooLong(f"params: {error}", param="params"))
        except (TransportError, KeyError) as error:
            self._end(call, Unavailable(f"a stage can not be reached ({error})"))
        except (TypeError, ValueError, OverflowError) as error:
            self._end(call, BadRequest(f"params: they can not be sent: {error}", param="params"))
        except TimeoutError:
            self._expire(call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._abandon(assignment, untold.values())
        if call.error is not None:
            raise call.error

    def _work(self, call: Call, assignment: Assignment, stage: str) -> Work:
        edges = []
        for edge in call.route.edges_from(stage):
            if edge.target == CLIENT:
                edges.append(Edge(CLIENT, self._endpoints[self._scheme(stage)], edge.port))
            else:
                edges.append(Edge(edge.target, assignment.replicas[edge.target].connectors[self._scheme(edge.target)], edge.port))
        return Work(call.id, call.epoch, call.task, call.route.sources(stage), tuple(edges), _left_s(call), call.params)

    def _scheme(self, stage: str) -> str:
        return self.pipeline.deployed(stage).connector

    def _expire(self, call: Call) -> None:
        if not call.is_over:
            call._drop_unread()
            self._end(call, Expired(f"request {call.id}: its deadline passed"))

    def _refuse_all(self, why: str) -> None:
        """Nothing is submitted any more; what is open or waits is Unavailable."""
        self._why_closed = self._why_closed or why
        for call in list(self._calls.values()):
            self._end(call, Unavailable(why))
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(why))

    def _end_if_complete(self, call: Call) -> None:
        if not call.is_over and not call._open_exits and not call._unfinished:
            self._end(call, None)

    def _end(self, call: Call, error: StreamrtError | None) -> None:
        """The one terminal of a call. Whatever still runs for it is cancelled."""
        if call.is_over:
            return
        call.is_over = True
        call.error = error
        self._calls.pop((call.id, call.epoch), None)
        if call._timer is not None:
            call._timer.cancel()
        if error is not None:
            cause = error.cause if isinstance(error, Cancelled) else error.code
            self._cancel_everywhere(call, cause)
            self.metrics.count("streamrt_cancels_total", cause)
        elif call._entry is not None and call._fed >= 0:  # the stages wanted no more of it: a feed that waits returns
            call._entry.cancel(call.id, call.epoch)
        for task in call._tasks:
            task.cancel()
        if call._entry is not None:
            call._entry.forget(call.id)
        outcome = "completed" if error is None else error.code
        self.metrics.count("streamrt_client_requests_total", call.task, outcome)
        self.metrics.observe("streamrt_client_request_seconds", call.task, value=(time.monotonic_ns() - call.submitted_ns) / 1e9)
        call._notify()

    def _cancel_everywhere(self, call: Call, cause: str) -> None:
        if call._entry is not None:
            call._entry.cancel(call.id, call.epoch)
        if call._assignment is not None:
            self._give_up(call._assignment, cause)

    def _give_up(self, assignment: Assignment, cause: str = "client") -> None:
        for replica in assignment.replicas.values():
            lane = self._lanes.get(replica.name)
            if lane is not None:
                self._send(lane, Cancel(assignment.request_id, assignment.epoch, cause))

    def _abandon(self, assignment: Assignment, replicas: Iterable[Replica]) -> None:
        """These replicas were never told of the request, so they will not say Finished: take their credit back ourselves."""
        for replica in list(replicas):
            self._admit(self._router.on_finished(replica.name, assignment.request_id, assignment.epoch))

    def _lose(self, call: Call, replica: Replica) -> None:
        """A replica that serves this call is gone: retry when nothing has come of it and its input is at hand, else fail."""
        exits = any(stream.partition(".")[0] == replica.stage for stream in call._open_exits)
        if call.is_over or not (exits or replica.stage in call._unfinished):
            return  # it had done its part
        why = f"stage {replica.stage} was lost ({replica.name})"
        if call._replay is None or call._next_seq or call._retries >= MAX_RETRIES:
            self._end(call, StageFailed(why) if call._fed or call._next_seq else Unavailable(why))
            return
        self._cancel_everywhere(call, "retry")
        del self._calls[call.id, call.epoch]
        for task in call._tasks:
            task.cancel()
        call.epoch += 1
        call._retries += 1
        call._fed = 0
        call._unfinished = set(call.route.stages)
        call._gives_up = False
        call._entry = call._assignment = None
        self._calls[call.id, call.epoch] = call
        self._own(self._retry(call, why), f"retry {call.id}", call)

    def _lose_entry(self, call: Call) -> None:
        """Feeding found that the entry's replica has hung up."""
        if call._assignment is not None:
            replica = call._assignment.replicas[call.route.entry]
            self._on_peer_lost(f"{replica.name}/{replica.incarnation}")

    async def _retry(self, call: Call, why: str) -> None:
        try:
            assignment = self._router.route(call.id, call.route, epoch=call.epoch) or await self._wait_for_turn(call)
            await self._launch(call, assignment)
            log.info("request.retried", request=call.id, why=why)
        except StreamrtError as error:
            self._end(call, Unavailable(f"{why}, and {error.message}"))

    # ---- what arrives ----------------------------------------------------------------------------------------------------

    def _on_chunk(self, lease: Lease) -> None:
        call = self._calls.get((lease.header.request_id, lease.header.epoch))
        if call is None:
            lease.release()
        else:
            call._put(lease)

    def _on_peer_lost(self, peer: str) -> None:
        """The end of a channel, which is seen before the orchestrator can say it."""
        name, _, incarnation = peer.partition("/")
        self._router.on_hang_up(name, incarnation)
        for call in list(self._calls.values()):
            replica = next((r for r in call._assignment.replicas.values() if r.name == name), None) if call._assignment else None
            if replica is not None and replica.incarnation == incarnation:
                self._lose(call, replica)

    def _on_cancel_in_lane(self, request_id: str, epoch: int) -> None:
        """A stage has given up; its Finished says why."""

    def _on_finished(self, replica: str, message: Finished) -> None:
        self._admit(self._router.on_finished(replica, message.request_id, message.epoch))
        call = self._calls.get((message.request_id, message.epoch))
        if call is None:
            return
        stage = replica.partition("#")[0]
        call._unfinished.discard(stage)
        call.timings[stage] = message.timings
        match message.outcome:
            case "completed":
                self._end_if_complete(call)
            case "expired":
                self._end(call, Expired(message.error))
            case "failed":
                self._end(call, from_code(message.error_code, message.error, param=message.error_param))
            case "refused":
                self._end(call, Unavailable(f"stage {stage}: {message.error}"))
            case _:  # it was cancelled by a neighbour that failed, and that one says why; or it shuts down
                if not call._unfinished:
                    self._end(call, Unavailable(f"stage {stage} gave up: {message.error}"))
                elif not call._gives_up:  # what is left of it can not come to anything, but may wait for ever
                    call._gives_up = True
                    self._cancel_everywhere(call, "neighbour")

    def _on_table(self, table: Table) -> None:
        if self._why_closed:
            return
        if self._next_table is not None and not self._next_table.done():
            self._next_table.set_result(table)
        stages = tuple(row for row in table.replicas if row.stage in self.graph.nodes)
        change = self._router.on_table(msgspec.structs.replace(table, replicas=stages))
        for replica in change.gone:
            lane = self._lanes.pop(replica.name, None)
            if lane is not None:
                self._let_go(lane)
        for replica in change.joined:
            self._own(self._join(replica), f"join {replica.name}")
        for lost in change.lost:
            call = self._calls.get((lost.assignment.request_id, lost.assignment.epoch))
            if call is not None:
                self._lose(call, lost.assignment.replicas[lost.stage])
        for request_id in change.stranded:
            waiting = self._waiting.get(request_id)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_exception(Unavailable("a stage on the way was lost", hint="try again when it is back"))
        self._admit(change.admitted)

    def _on_run_lost(self) -> None:
        """The orchestrator is gone, and every process of the run goes with it."""
        self._refuse_all("the pipeline has ended")

    async def _join(self, replica: Replica) -> None:
        def on_message(message: Window | Finished) -> None:
            if isinstance(message, Window):
                self._admit(self._router.on_window(replica.name, message.incarnation, message.max_requests))
            else:
                self._on_finished(replica.name, message)

        lane = await LaneClient.connect(replica.work_endpoint, self.member.identity, ToClient, on_message)
        if not self._router.knows(replica):  # a newer table came first
            self._let_go(lane)
            return
        self._lanes[replica.name] = lane
        self._send(lane, Join(self.member.identity))
        if any(route.entry == replica.stage for route in self._routes.values()):
            scheme = self._scheme(replica.stage)
            try:  # so that the first request finds the channel made
                await self._connectors[scheme].dial(replica.connectors[scheme])
            except TransportError as error:
                log.info("replica.not_dialed", replica=replica.name, error=error)  # the first request dials again, and says why not

    def _let_go(self, lane: LaneClient) -> None:
        """Close a lane to a replica that is gone; nothing cancels that, so that no socket stays open."""
        closing = asyncio.get_running_loop().create_task(lane.close(linger_s=0), name=f"close {lane.endpoint}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _admit(self, admitted: Sequence[Assignment]) -> None:
        for assignment in admitted:
            waiting = self._waiting.get(assignment.request_id)
            if waiting is None or waiting[1].done():
                self._abandon(assignment, assignment.replicas.values())  # whoever waited has left
            else:
                waiting[1].set_result(assignment)

    def _send(self, lane: LaneClient, message: Any) -> None:
        try:
            lane.send(message)
        except TransportError as error:
            log.error("replica.unreachable", endpoint=lane.endpoint, error=error)

    def _own(self, coroutine: Any, name: str, call: Call | None = None) -> None:
        """Run it as a task that ends with this client, and with `call`."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        task.add_done_callback(_report)
        for owned in [self._tasks] if call is None else [self._tasks, call._tasks]:
            owned.add(task)
            task.add_done_callback(owned.discard)


def _report(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("client.task_failed", task=task.get_name(), error=repr(error))


def _left_s(call: Call) -> float | None:
    """Seconds until its deadline; None = it has none."""
    return None if call.deadline_ns is None else max(0.0, (call.deadline_ns - time.monotonic_ns()) / 1e9)


def _size(chunk: Chunk) -> int:
    """Bytes of its tensors."""
    return sum(array.nbytes for array in chunk.tensors.values())


def _copy_out(lease: Lease) -> Chunk:
    """A private copy of the chunk; its slot and its credit go back."""
    chunk = chunk_of(lease).copy()
    lease.release()
    return chunk
