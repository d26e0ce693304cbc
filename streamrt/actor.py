"""The body of a stage process: pull work, feed the stage, send its chunks on, obey cancel.

Knows one stage, its inputs and its edges. Knows nothing of how it was started or where a request goes after the next peer:
the work item names the peers.

Rules
- Every Work is answered by exactly one Finished, whatever happens.
- Every edge of a request carries exactly one last chunk, unless the request was cancelled or failed.
- What `process` raises fails that request alone; the actor lives on.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import msgspec

from streamrt.admission import Admission, Admit, Queue, Refuse
from streamrt.errors import Cancelled, Expired, StageFailed, StreamrtError
from streamrt.log import get_logger
from streamrt.metrics import Metrics
from streamrt.stage import Request, Stage
from streamrt.trace import Tracer
from transport.chunk import Chunk, ChunkHeader, Place, describe
from transport.connector import Connector, Lease, Outlet
from transport.errors import Broken, Closed, TransportError, WouldBlock
from transport.lanes import LaneServer
from transport.messages import Cancel, Finished, Join, Leave, Window, Work
from transport.outlet import send_to_all

log = get_logger("streamrt.actor")

EARLY_CHUNK_S = 1.0  # a chunk that comes before its work item waits this long for it
# Causes of cancels that are none:
DEADLINE = "deadline"  # the request expires
BROKEN = "broken"  # the stage is, and the request fails


class Inbox:
    """The chunks of one request on their way into the stage. Written by the loop, read by the request's task.

    Iterating gives chunks until every source has ended. A chunk's credit goes back when the next one is asked for; its slot
    goes back when the stage has dropped its arrays, too.
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.peers: dict[str, str] = {}  # source that is still open -> the process that feeds it, once it has been heard
        self._open = set(sources)
        self._leases: deque[Lease] = deque()
        self._current: Lease | None = None
        self._next_seq: dict[str, int] = {}
        self._wake: asyncio.Future[None] | None = None
        self._error: StreamrtError | None = None

    def put(self, lease: Lease) -> None:
        self._leases.append(lease)
        self._wake_reader()

    def fail(self, error: StreamrtError) -> None:
        """The reader gets `error` once it has read what is there."""
        self._error = error
        self._wake_reader()

    def close(self) -> None:
        """Give back what nobody read."""
        self._give_back()
        while self._leases:
            self._leases.popleft().release()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Chunk:
        self._give_back()
        while self._open:
            while not self._leases:
                if self._error is not None:
                    raise type(self._error)(*self._error.args)  # a new one: its traceback would hold the reader's chunks
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            self._current = self._leases.popleft()
            chunk = self._accept(self._current)
            if chunk is not None:
                return chunk
            self._give_back()
        raise StopAsyncIteration

    def _accept(self, lease: Lease) -> Chunk | None:
        header = lease.header
        source = header.stage if header.stage == "client" else f"{header.stage}.{header.port}"
        expected = self._next_seq.get(source, 0)
        if header.seq < expected:
            return None  # a repeat
        if header.seq > expected or source not in self._open:
            raise StageFailed(f"chunk {header.seq} from {source}: expected chunk {expected} of one of {sorted(self._open)}")
        self._next_seq[source] = expected + 1
        self.peers[source] = lease.peer
        if header.place == Place.FAILED:
            raise StageFailed(f"{source}: {header.meta.get('error', 'failed')}")
        if header.place != Place.PARTIAL:
            self._open.discard(source)
            del self.peers[source]
        return None if header.place == Place.EMPTY_FINAL else chunk_of(lease)

    def _give_back(self) -> None:
        if self._current is not None:
            self._current.release()
            self._current = None

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def chunk_of(lease: Lease) -> Chunk:
    """The chunk that `lease` holds; its arrays view the lease's memory."""
    header = lease.header
    arrays = lease.arrays()
    return Chunk(
        header.modality,
        {spec.name: array for spec, array in zip(header.tensors, arrays, strict=True)},
        port=header.port,
        sample_rate_hz=header.sample_rate_hz,
        fps=header.fps,
        meta=header.meta,
        place=Place(header.place),
        request_id=header.request_id,
        stage=header.stage,
        epoch=header.epoch,
        seq=header.seq,
    )


class _Running:
    """One request on this replica. Created on its Work; ends with its Finished."""

    def __init__(self, client: str, work: Work, arrived_ns: int) -> None:
        self.client = client
        self.work = work
        self.key = (work.request_id, work.epoch)
        self.inbox = Inbox(work.sources)
        self.arrived_ns = arrived_ns
        self.started_ns = 0
        self.first_chunk_ns = 0
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # of its deadline
        self.cancel_cause = ""
        self.outlets: list[Outlet] = []


class Actor:
    """Runs one stage for many requests. One per process; driven by the loop of that process."""

    def __init__(
        self,
        stage: Stage,
        *,
        name: str,
        replica: str,
        incarnation: str,
        max_requests: int,
        connectors: dict[str, Connector],
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.stage = stage
        self.name = name
        self.replica = replica
        self.incarnation = incarnation
        self.admission = Admission(max_requests)
        self._connectors = connectors
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="process")
        self._metrics = metrics
        self._tracer = tracer
        self._lane: LaneServer | None = None
        self._requests: dict[tuple[str, int], _Running] = {}
        self._early: dict[tuple[str, int], list[Lease]] = {}
        self._clients: frozenset[str] = frozenset()  # as the membership last had them
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._broken = ""
        self._default_port = next(iter(stage.gives), "")

    # ---- life --------------------------------------------------------------------------------------------------------

    def serve(self, lane: LaneServer) -> None:
        """Answer work on `lane` from now on."""
        self._lane = lane

    async def drain(self, within_s: float) -> None:
        """Admit nothing more and wait for what runs, at most `within_s`; what is left then expires."""
        self._draining = True
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            for running in list(self._requests.values()):
                self._cancel(running, "drain")
            await self._idle.wait()

    async def close(self, broken: str = "") -> None:
        """End what runs; it fails, where `broken` says why the stage can not go on."""
        self._draining, self._broken = True, broken
        for running in list(self._requests.values()):
            self._cancel(running, BROKEN if broken else "shutdown")
        for key in list(self._early):
            self._drop_early(key)
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """Small facts for the heartbeat."""
        try:
            own = msgspec.to_builtins(self.stage.state())
        except Exception:  # the stage's own code; without a heartbeat the whole replica would be taken for dead
            log.exception("stage.state_failed", stage=self.name)
            own = {}
        counts = {"running": self.admission.running, "queued": self.admission.queued, "max_requests": self.admission.max_requests}
        return {**counts, **own}

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def on_work_message(self, client: str, message: Any) -> None:
        match message:
            case Join():
                self._send_windows(self.admission.join(client))
            case Leave():
                self.on_client_lost(client)
            case Work():
                self._on_work(client, message)
            case Cancel():
                self._on_cancel(message)

    def on_chunk(self, lease: Lease) -> None:
        header = lease.header
        key = (header.request_id, header.epoch)
        if header.sent_ns:
            self._metrics.observe("streamrt_chunk_hop_seconds", self.name, value=max(0, time.monotonic_ns() - header.sent_ns) / 1e9)
        running = self._requests.get(key)
        if running is not None:
            running.inbox.put(lease)
        elif self.admission.is_dead(*key):
            lease.release()
        else:  # its work item is still on the way; what never gets one is given back
            if key not in self._early:
                self._early[key] = []
                asyncio.get_running_loop().call_later(EARLY_CHUNK_S, self._give_up_early, key)
            self._early[key].append(lease)

    def on_cancel_in_lane(self, request_id: str, epoch: int) -> None:
        """The producer has cancelled: nothing more will come, so what still waits for it ends."""
        self._drop_early((request_id, epoch))
        running = self._requests.get((request_id, epoch))
        if running is not None:
            self._cancel(running, "upstream")

    def on_peer_lost(self, peer: str) -> None:
        """A process that sent chunks to us is gone; requests that wait for more of them would wait for good."""
        for running in self._requests.values():
            if peer in running.inbox.peers.values():
                running.inbox.fail(StageFailed(f"{peer} is gone"))

    def on_clients(self, alive: frozenset[str]) -> None:
        """The membership has changed: requests of clients that are gone end here."""
        # A client's Join may overtake the table that first lists it, so only who has been listed can be gone.
        for client in self._clients - alive:
            self.on_client_lost(client)
        self._clients = alive

    def on_client_lost(self, client: str) -> None:
        for running in [r for r in self._requests.values() if r.client == client]:
            self._cancel(running, "client_lost")
        self._send_windows(self.admission.leave(client))

    def _on_work(self, client: str, work: Work) -> None:
        running = _Running(client, work, time.monotonic_ns())
        if self._draining:
            self._drop_early(running.key)
            self._finish(running, "refused", StreamrtError("this replica is draining"))
            return
        match self.admission.offer(client, *running.key):
            case Admit():
                self._accept(running)
                self._start(running)
            case Queue():
                self._accept(running)
            case Refuse(reason=reason):
                self._drop_early(running.key)
                self._finish(running, "cancelled" if reason == "cancelled" else "refused", StreamrtError(reason))
        self._send_windows(self.admission.rebalance())

    def _accept(self, running: _Running) -> None:
        """From now on its chunks go to its inbox, those that came before it first."""
        self._requests[running.key] = running
        for lease in self._early.pop(running.key, ()):
            running.inbox.put(lease)
        if running.work.time_left_s is not None:
            running.timer = asyncio.get_running_loop().call_later(max(0.0, running.work.time_left_s), self._cancel, running, DEADLINE)

    def _on_cancel(self, message: Cancel) -> None:
        self._drop_early((message.request_id, message.epoch))
        running = self._requests.get((message.request_id, message.epoch))
        if running is None:
            self.admission.bury(message.request_id, message.epoch)
        else:
            self._cancel(running, message.cause)

    # ---- one request ---------------------------------------------------------------------------------------------------

    def _start(self, running: _Running) -> None:
        self._idle.clear()
        running.task = asyncio.get_running_loop().create_task(self._run(running), name=f"{self.replica} {running.work.request_id}")
        self._tasks.add(running.task)
        running.task.add_done_callback(self._tasks.discard)

    async def _run(self, running: _Running) -> None:
        """One request from its start on this replica to its Finished."""
        work = running.work
        running.started_ns = time.monotonic_ns()
        self._metrics.observe("streamrt_queue_wait_seconds", self.name, value=(running.started_ns - running.arrived_ns) / 1e9)
        deadline = None if work.time_left_s is None else running.arrived_ns + int(work.time_left_s * 1e9)
        request = Request(work.request_id, work.task, work.params, work.epoch, deadline)
        outcome = "completed"
        error: Exception | None = None
        try:
            await self._stream(running, request)
        except asyncio.CancelledError:
            outcome, error = self._why(running)
        except (Closed, Cancelled) as exception:
            # Its traceback holds frames, and these the chunks that the stage had in hand, which would keep their slots.
            outcome, error = "cancelled", exception.with_traceback(None)
        except Broken as exception:
            outcome, error = "failed", StageFailed(f"stage {self.name}: the next process is gone: {exception}")
        except StreamrtError as exception:
            outcome, error = "failed", exception.with_traceback(None)
        except Exception as exception:  # the stage's own code: it may raise anything, and only this request ends
            log.exception("request.failed", request=work.request_id, stage=self.name)
            outcome, error = "failed", StageFailed(f"stage {self.name}: {type(exception).__name__}: {exception}")
        self._end(running, outcome, error)

    async def _stream(self, running: _Running, request: Request) -> None:
        work = running.work
        for edge in work.edges:
            scheme = edge.endpoint.partition(":")[0]
            running.outlets.append(await self._connectors[scheme].dial(edge.endpoint))
        seqs: dict[str, int] = {}
        last: Chunk | None = None
        previous_ns = 0
        # Closed here and not by the collector, so that the stage's clean-up is over before Finished is said.
        async with aclosing(self._outputs(request, running.inbox)) as outputs:
            async for chunk in outputs:
                if chunk.place == Place.EMPTY_FINAL:
                    last = chunk
                    continue
                port = chunk.port or self._default_port
                if port not in self.stage.gives:
                    raise StageFailed(f'stage {self.name}: got a chunk for port "{port}", expected one of {sorted(self.stage.gives)}')
                now = time.monotonic_ns()
                if not running.first_chunk_ns:
                    running.first_chunk_ns = now
                    self._metrics.observe("streamrt_first_chunk_seconds", self.name, value=(now - running.started_ns) / 1e9)
                else:
                    self._metrics.observe("streamrt_chunk_gap_seconds", self.name, value=(now - previous_ns) / 1e9)
                previous_ns = now
                await self._send(running, chunk, port, seqs, Place.PARTIAL)
        ending = last or Chunk("event")
        for port in {edge.port or self._default_port for edge in work.edges}:
            await self._send(running, ending, port, seqs, Place.EMPTY_FINAL)

    async def _send(self, running: _Running, chunk: Chunk, port: str, seqs: dict[str, int], place: Place) -> None:
        """One chunk to every edge of its port."""
        work = running.work
        seq = seqs.get(port, 0)
        seqs[port] = seq + 1
        specs, arrays, _ = describe(chunk.tensors)
        start_ns = time.monotonic_ns()
        header = ChunkHeader(work.request_id, work.epoch, self.name, port, seq, chunk.modality, int(place), specs,
                             chunk.sample_rate_hz, chunk.fps, chunk.meta, start_ns)  # fmt: skip
        edges = zip(work.edges, running.outlets, strict=True)
        outlets = [outlet for edge, outlet in edges if (edge.port or self._default_port) == port]
        if len(outlets) == 1:
            await outlets[0].send(header, arrays)
        else:
            await send_to_all(outlets, header, arrays)
        self._metrics.count("streamrt_chunks_total", self.name, chunk.modality)
        self._tracer.span(f"send {chunk.modality}", work.request_id, start_ns, time.monotonic_ns(), stage=self.name, seq=seq, port=port)

    def _outputs(self, request: Request, inbox: Inbox) -> AsyncGenerator[Chunk, None]:
        """What the stage makes of `inbox`, whichever way it is written."""
        if inspect.isgeneratorfunction(self.stage.process):
            return _run_in_thread(self.stage.process, request, inbox, self._threads)
        stream = self.stage.process(request, inbox)
        if isinstance(stream, AsyncGenerator):
            return stream
        if inspect.iscoroutine(stream):
            stream.close()
        raise StageFailed(f"stage {self.name}: process must be a generator (use `yield`), got {type(stream).__name__}")

    def _cancel(self, running: _Running, cause: str) -> None:
        if running.cancel_cause:
            return
        running.cancel_cause = cause
        for outlet in running.outlets:
            outlet.cancel(running.work.request_id, running.work.epoch)
        if running.task is not None:
            running.task.cancel()
        if not running.started_ns:  # still queued, or its task has not had its first step and will never have it
            self._end(running, *self._why(running))

    def _why(self, running: _Running) -> tuple[str, StreamrtError]:
        """Outcome and error of a request whose task was cancelled."""
        if running.cancel_cause == DEADLINE:
            return "expired", Expired(f"stage {self.name}: the request's deadline passed")
        if running.cancel_cause == BROKEN:
            return "failed", StageFailed(f"stage {self.name}: {self._broken}", hint="try again in a moment")
        if running.cancel_cause:
            return "cancelled", Cancelled(f"stage {self.name}: cancelled ({running.cancel_cause})", cause=running.cancel_cause)
        return "failed", StageFailed(f"stage {self.name}: it cancelled itself")

    def _end(self, running: _Running, outcome: str, error: BaseException | None) -> None:
        work = running.work
        if outcome != "completed" and not running.cancel_cause:
            for outlet in running.outlets:
                outlet.cancel(work.request_id, work.epoch)
        if running.timer is not None:
            running.timer.cancel()
        running.inbox.close()
        for outlet in running.outlets:
            outlet.forget(work.request_id)
        self._requests.pop(running.key, None)
        self._finish(running, outcome, error)
        following = self.admission.done(*running.key)
        if following is not None:
            self._start(self._requests[following])
        elif not self._requests:
            self._idle.set()

    def _finish(self, running: _Running, outcome: str, error: BaseException | None) -> None:
        work, now = running.work, time.monotonic_ns()
        self._metrics.count("streamrt_requests_total", self.name, work.task, outcome)
        self._metrics.observe("streamrt_request_seconds", self.name, value=(now - running.arrived_ns) / 1e9)
        if outcome == "cancelled":
            self._metrics.count("streamrt_cancels_total", running.cancel_cause or "client")
        if running.started_ns:
            self._tracer.span(self.name, work.request_id, running.started_ns, now, outcome=outcome)
        log.info("request.done", request=work.request_id, task=work.task, outcome=outcome, total_ms=(now - running.arrived_ns) / 1e6)
        message = Finished(
            work.request_id, work.epoch, outcome,
            error_code=getattr(error, "code", "stage_failed") if error else "",
            error=getattr(error, "message", str(error)) if error else "",
            error_param=getattr(error, "param", ""),
            timings=_timings(running, now),
        )  # fmt: skip
        self._tell(running.client, message)

    def _send_windows(self, windows: dict[str, int]) -> None:
        for client, size in windows.items():
            self._tell(client, Window(size, self.incarnation))

    def _tell(self, client: str, message: Any) -> None:
        assert self._lane is not None
        try:
            self._lane.send(client, message)
        except Broken:
            pass  # the client is gone, so nobody waits for this; the membership will say so
        except (WouldBlock, TransportError) as error:
            log.error("client.unreachable", client=client, error=error)

    def _give_up_early(self, key: tuple[str, int]) -> None:
        """No work item has come for these chunks. Should one come yet it is refused, for its beginning is lost."""
        if key in self._early:
            log.warning("chunks.unclaimed", request=key[0], chunks=len(self._early[key]))
            self._drop_early(key)
            self.admission.bury(*key)

    def _drop_early(self, key: tuple[str, int]) -> None:
        for lease in self._early.pop(key, ()):
            lease.release()


def _timings(running: _Running, now: int) -> dict[str, float]:
    timings = {"total_ms": (now - running.arrived_ns) / 1e6}
    if running.started_ns:
        timings["queue_wait_ms"] = (running.started_ns - running.arrived_ns) / 1e6
    if running.first_chunk_ns:
        timings["first_chunk_ms"] = (running.first_chunk_ns - running.started_ns) / 1e6
    return timings


async def _run_in_thread(process: Any, request: Request, inbox: Inbox, pool: ThreadPoolExecutor) -> AsyncGenerator[Chunk, None]:
    """Drive a plain generator `process` on a thread of its own, one chunk at a time: it never runs ahead of its reader."""
    loop = asyncio.get_running_loop()
    ended = object()
    stopped = False

    async def following() -> Any:
        return await anext(inbox, ended)

    def read() -> Iterator[Chunk]:
        while True:
            if stopped:
                raise Cancelled()
            chunk = asyncio.run_coroutine_threadsafe(following(), loop).result()
            if chunk is ended:
                return
            yield chunk

    generator = process(request, read())
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            pending = loop.run_in_executor(pool, next, generator, ended)
            chunk = await asyncio.shield(pending)
            if chunk is ended:
                return
            yield chunk
    finally:
        stopped = True
        inbox.fail(Cancelled())
        if pending is not None:
            await asyncio.wait([pending])  # a step that runs can not be stopped; the next one will not begin
            pending.exception()  # raised above already, or of no interest any more
            pending = None  # it holds that exception, whose traceback holds this frame
        await loop.run_in_executor(pool, generator.close)
