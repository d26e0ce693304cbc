"""The engine host: runs a stepped engine on the one compute thread, beside the actor's event loop.

    loop                                   compute thread
    submit feed end cancel ---commands---> apply, then one `step`
    `async for output in call` <--one hand-over per step--- outputs

Knows requests, commands, outputs and credit. Knows nothing of models: `Engine` is all it asks of them.

Rules
- Only the compute thread touches the engine, one command or step at a time.
- The compute thread is the process's single-thread pool. Each step is one job on it, so that other work of the stage
  (`Stage.compute`, `close`) gets its turn between steps, and an engine without work leaves the thread asleep in the pool's queue.
- A step never waits for a reader: a request whose outputs are not read (`high`) is paused, and resumed when few are left (`low`).
- A call ends once: finished, failed, or cancelled by its reader. The engine yields nothing for a request after its end.
- What `submit`, `feed` or `end` raises fails that request; what `step` raises fails all of them, and the host goes on. After
  `MAX_FAILED_STEPS` in a row it gives up and says so to `on_broken`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from streamrt.errors import Cancelled, StageFailed, StreamrtError, Unavailable
from streamrt.stage import Request, Stage
from transport.chunk import Chunk, end_chunk

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the engine is taken to be broken for good
MAX_UNREAD_FEEDS = 16  # chunks of one request that wait for the compute thread; more and `feed` waits


class Output(msgspec.Struct):
    """What one step made for one request: a chunk, or its end (`finished` with `meta`, or `error`)."""

    request_id: str
    chunk: Chunk | None = None
    finished: bool = False
    meta: dict[str, Any] = {}  # of the end: finish_reason, usage ...; small, msgpack-able
    error: Exception | None = None

    @property
    def is_end(self) -> bool:
        return self.finished or self.error is not None


class Engine(Protocol):
    """A model that serves many requests, one step at a time. Called on the compute thread only.

    `cancel` forgets the request at once; it, `pause`, `resume` and `end` of an unknown request are no error.
    `step` does a bounded amount of work for requests that are neither paused nor waiting for input, and never waits.
    """

    def submit(self, request: Request, params: Any) -> None: ...
    def feed(self, request_id: str, chunk: Chunk) -> None: ...
    def end(self, request_id: str) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def pause(self, request_id: str) -> None: ...
    def resume(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Output]: ...
    def close(self) -> None: ...


class EngineCall:
    """One request in the engine, as its reader sees it: an iterator of outputs, the end included, that raises what failed it."""

    def __init__(self, host: EngineHost, request: Request) -> None:
        self.request = request
        self._host = host
        self._ready: deque[Output] = deque()  # the loop's
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self.is_over = False  # the loop has seen its end, or cancelled it
        # Shared by both threads, under the host's lock:
        self.held = 0  # outputs made and not read
        self.paused = False
        self.unread_feeds = 0
        self.wants_room = False

    async def feed(self, chunk: Chunk) -> None:
        """Give the engine one more chunk. Waits while MAX_UNREAD_FEEDS are unread. After the end: drops it."""
        while not self.is_over and not self._take_room():
            await self._room.wait()
        if not self.is_over:
            self._host.post(self._host.apply_feed, self, chunk)

    def _take_room(self) -> bool:
        with self._host.lock:
            self.wants_room = self.unread_feeds >= MAX_UNREAD_FEEDS
            if self.wants_room:
                self._room.clear()
                return False
            self.unread_feeds += 1
            return True

    def end(self) -> None:
        """Say that no more input comes."""
        if not self.is_over:
            self._host.post(self._host.apply_end, self)

    def cancel(self) -> None:
        """End it now. Idempotent, never waits; nothing is read afterwards."""
        if not self.is_over:
            self._close()
            self._ready.clear()
            self._host.post(self._host.apply_cancel, self)

    def fail(self, error: Exception) -> None:
        """Cancel it; its reader gets `error`."""
        if not self.is_over:
            self.cancel()
            self._ready.append(Output(self.request.id, error=error))

    def deliver(self, output: Output) -> None:
        """One output has come over (on the loop)."""
        if self.is_over:
            return
        self._ready.append(output)
        if output.is_end:
            self._close()
        self._changed.set()

    def make_room(self) -> None:
        self._room.set()

    def _close(self) -> None:
        self.is_over = True
        self._changed.set()
        self._room.set()

    def __aiter__(self) -> EngineCall:
        return self

    async def __anext__(self) -> Output:
        while not self._ready:
            if self.is_over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        output = self._ready.popleft()
        self._host.read(self)
        if output.error is not None:
            raise output.error
        return output


class EngineHost:
    """Runs `engine` on `pool`; see the module's picture. Made on any thread; `submit` and calls belong to one event loop."""

    def __init__(
        self,
        engine: Engine,
        pool: Executor | None = None,
        *,
        high: int = 32,
        low: int = 8,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 <= low < high:
            raise ValueError(f"low must be below high: got low={low}, high={high}")
        self.engine = engine
        self.lock = threading.Lock()
        self._own_pool = ThreadPoolExecutor(1, "engine") if pool is None else None
        self._pool: Executor = pool or self._own_pool  # type: ignore[assignment]
        self._high, self._low = high, low
        self._on_broken = on_broken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # under the lock
        self._scheduled = False  # a turn is in the pool, or runs; under the lock
        self._closed = False
        self._broken = ""
        # The compute thread's:
        self._live: dict[str, EngineCall] = {}
        self._outbox: list[tuple[EngineCall, Output]] = []
        self._relieved: list[EngineCall] = []  # whose `feed` waits for room that there is now
        self._worked = False  # the last turn's step had work, so the next one may
        self._failed_steps = 0  # in a row
        self.steps = 0

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._live)

    # -- the loop's side

    def submit(self, request: Request, params: Any = None) -> EngineCall:
        """Put a request into the engine. Never waits.

        Raises:
            Unavailable: closed, or the engine is broken.
        """
        self._loop = asyncio.get_running_loop()
        call = EngineCall(self, request)
        if self._broken or not self.post(self._apply_submit, call, params):
            raise Unavailable(self._broken or "the engine is closed")
        return call

    def read(self, call: EngineCall) -> None:
        """One output of `call` has been read: resume it when few are left."""
        with self.lock:
            call.held -= 1
            resumes = call.paused and call.held <= self._low
            if resumes:
                call.paused = False
        if resumes:
            self.post(self._apply_resume, call)

    def close(self) -> None:
        """End every call with `Unavailable` and close the engine, after the step that runs. Idempotent, any thread, never waits."""
        self._end_commands()
        self._schedule()
        if self._own_pool is not None:
            self._own_pool.shutdown(wait=False)

    def post(self, command: Callable[..., None], *args: Any) -> bool:
        """Queue a command for the compute thread; False when closed. A call has at most MAX_UNREAD_FEEDS chunks and a few controls in it."""
        with self.lock:
            if self._closed:
                return False
            self._commands.append((command, args))
        self._schedule()
        return True

    def _end_commands(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                self._commands.append((self._apply_close, ()))

    def _schedule(self) -> None:
        with self.lock:
            if self._scheduled or not self._commands and not self._worked:
                return
            self._scheduled = True
        try:
            self._pool.submit(self._turn)
        except RuntimeError:  # the pool was shut down; its last turn is over, so this thread may do the closing one
            self._end_commands()
            self._turn()

    # -- the compute thread's side

    def _turn(self) -> None:
        """Apply the commands, do one step, hand everything over, and come back while there is more."""
        # 1. commands
        with self.lock:
            commands, self._commands = self._commands, deque()
        for command, args in commands:
            command(*args)
        # 2. one step
        self._worked = not self._closed and not self._broken and self._step()
        # 3. one hand-over
        self._hand_over()
        # 4. again?
        with self.lock:
            self._scheduled = False
        self._schedule()

    def _step(self) -> bool:
        """Whether there was work."""
        try:
            if not self.engine.has_work():
                return False
            outputs = self.engine.step()
        except Exception as error:  # the host outlives its engine's bugs: all requests fail, the next ones may work
            log.exception("engine.step_failed")
            self._failed_steps += 1
            self._fail_all(error if isinstance(error, StreamrtError) else StageFailed(f"the engine failed: {error!r}"))
            if self._failed_steps >= MAX_FAILED_STEPS:
                self._broken = f"the engine failed {self._failed_steps} times in a row, at last with {error!r}"
                if self._on_broken is not None:
                    self._on_broken(self._broken)
            return True
        self._failed_steps = 0
        self.steps += 1
        for output in outputs:
            call = self._live.get(output.request_id)
            if call is not None:
                self._emit(call, output)
        return True

    def _emit(self, call: EngineCall, output: Output) -> None:
        self._outbox.append((call, output))
        with self.lock:
            call.held += 1
            pauses = not output.is_end and not call.paused and call.held >= self._high
            if pauses:
                call.paused = True
        if output.is_end:
            del self._live[call.request.id]
        elif pauses:
            self._guard(call, self.engine.pause, call.request.id)

    def _hand_over(self) -> None:
        if not self._outbox and not self._relieved:
            return
        outbox, self._outbox = self._outbox, []
        relieved, self._relieved = self._relieved, []
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_deliver, outbox, relieved)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._end_commands()

    def _fail_all(self, error: Exception) -> None:
        for request_id, call in list(self._live.items()):
            self._forget(request_id)
            self._emit(call, Output(request_id, error=error))

    def _forget(self, request_id: str) -> None:
        try:
            self.engine.cancel(request_id)
        except Exception:  # an engine that can not even forget must not stop the others' end
            log.exception("engine.cancel_failed")

    def _guard(self, call: EngineCall, fn: Callable[..., None], *args: Any) -> None:
        """Run one of the engine's methods for one call; what it raises fails that call alone."""
        try:
            fn(*args)
        except Exception as error:  # one request's input must not end the others
            if not isinstance(error, StreamrtError):
                log.exception("engine.request_failed")
                error = StageFailed(f"the engine refused the request: {error!r}")
            self._forget(call.request.id)
            self._emit(call, Output(call.request.id, error=error))

    def _is_live(self, call: EngineCall) -> bool:
        return self._live.get(call.request.id) is call

    def _apply_submit(self, call: EngineCall, params: Any) -> None:
        if call.request.id in self._live:  # a retry overtook the end of its first try
            self._forget(call.request.id)
            self._emit(self._live[call.request.id], Output(call.request.id, error=Cancelled(cause="superseded")))
        self._live[call.request.id] = call
        if self._broken:
            self._emit(call, Output(call.request.id, error=Unavailable(self._broken)))
            return
        self._guard(call, self.engine.submit, call.request, params)

    def apply_feed(self, call: EngineCall, chunk: Chunk) -> None:
        with self.lock:
            call.unread_feeds -= 1
            relieved, call.wants_room = call.wants_room, False
        if relieved:
            self._relieved.append(call)
        if self._is_live(call):
            self._guard(call, self.engine.feed, call.request.id, chunk)

    def apply_end(self, call: EngineCall) -> None:
        if self._is_live(call):
            self._guard(call, self.engine.end, call.request.id)

    def apply_cancel(self, call: EngineCall) -> None:
        if self._is_live(call):
            del self._live[call.request.id]
            self._forget(call.request.id)

    def _apply_resume(self, call: EngineCall) -> None:
        if self._is_live(call):
            self._guard(call, self.engine.resume, call.request.id)

    def _apply_close(self) -> None:
        self._fail_all(Unavailable("the engine is closing"))
        try:
            self.engine.close()
        except Exception:  # the process ends all the same
            log.exception("engine.close_failed")


def _deliver(outbox: list[tuple[EngineCall, Output]], relieved: list[EngineCall]) -> None:
    for call in relieved:
        call.make_room()
    for call, output in outbox:
        call.deliver(output)


class EngineStage(Stage):
    """A stage whose work is an engine's. Its author writes `make_engine`, and `parse` when requests have parameters."""

    host: EngineHost

    def make_engine(self) -> Engine:
        """Read weights, warm up, and return the engine. On the compute thread."""
        raise NotImplementedError

    def parse(self, request: Request) -> Any:
        """What `Engine.submit` gets as `params`. On the loop, so cheap; raises BadRequest."""
        return None

    async def prepare(self, request: Request) -> Any:
        """`parse`, and what takes longer and needs neither the loop nor the compute thread. Raises BadRequest."""
        return self.parse(request)

    def load(self) -> None:
        self.host = EngineHost(self.make_engine(), self.context.compute_pool, on_broken=self.context.broken)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        call = self.host.submit(request, await self.prepare(request))
        feeder = asyncio.create_task(_feed(call, chunks))
        try:
            async for output in call:
                if output.chunk is not None:
                    yield output.chunk
                if output.finished:
                    yield end_chunk(**output.meta)
        finally:
            call.cancel()
            feeder.cancel()
            await asyncio.wait([feeder])

    def close(self) -> None:
        self.host.close()


async def _feed(call: EngineCall, chunks: AsyncIterator[Chunk]) -> None:
    try:
        async for chunk in chunks:
            await call.feed(chunk)
        call.end()
    except Exception as error:  # noqa: BLE001 - not lost: the call's reader raises it
        call.fail(error)
