"""Video jobs: made in the background by the gateway that took them, kept in the store that all gateways of the run share.

    queued -> in_progress (0 ... 99) -> completed | failed

Knows calls and the store. Knows nothing of HTTP.

Rules
- A job is one of the requests in work that `max_requests` bounds and that a drain waits for.
- Its state is on disk at each change, so any gateway can tell it, and what a gateway that died has left is told as failed.
- Deleting a job stops its work: at once where it runs, and where another gateway runs it at that one's next step, when it finds the job gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway import errors
from gateway.film import Film
from gateway.pixels import VIDEO_TYPE
from gateway.store import Gone, Item, Store
from streamrt.errors import StreamrtError, Unavailable
from streamrt.log import get_logger

if TYPE_CHECKING:
    from gateway.gate import Gate
    from gateway.media import MediaPool
    from streamrt import Chunk, Client

log = get_logger("gateway")

KIND = "video"
RETRY_S = 60.0  # after a store that could not be read


class Ask(NamedTuple):
    """A video that is asked for, checked."""

    model: str
    params: dict[str, Any]
    inputs: list[Chunk]
    outputs: set[str]
    audio_hz: int


class VideoJobs:
    """The jobs that run in this process. Made by the application, closed with it."""

    def __init__(self, client: Client, store: Store, pool: MediaPool, gate: Gate, timeout_s: float) -> None:
        self._client = client
        self._store = store
        self._pool = pool
        self._gate = gate
        self._timeout_s = timeout_s
        self._running: dict[str, tuple[Item, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def create(self, ask: Ask) -> Item:
        """Start a job. Raises Overloaded when the line for its stages is full, and Unavailable; then there is no job."""
        # Shielded: a client that goes away now must not leave a job that nobody runs.
        return await asyncio.shield(self._own(self._create(ask), "video.create"))

    async def delete(self, item: Item) -> None:
        """Stop its work and forget it."""
        _, task = self._running.get(item.id, (None, None))
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._pool.run(self._store.delete, item.id)

    async def sweep(self) -> None:
        """Delete what expires, when it does; for ever."""
        while True:
            try:
                await self._pool.run(self._store.sweep_others)
                next_s = await self._pool.run(self._store.sweep)
            except OSError as error:
                log.error("store.not_swept", error=error)
                next_s = RETRY_S
            await asyncio.sleep(max(1.0, next_s))  # noqa: ASYNC110 - it is time that it waits for

    async def close(self) -> None:
        """Stop all of them; each is told as failed."""
        left = [item for item, _ in self._running.values()]
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item in left:
            if item.state["status"] not in ("completed", "failed"):
                await self._end(item, Unavailable("the gateway was stopped while it made the video"))

    async def _create(self, ask: Ask) -> Item:
        room = ExitStack()
        room.enter_context(self._gate.enter())
        try:
            item = await self._pool.run(self._store.create, KIND, first_state(ask), VIDEO_TYPE)
        except BaseException:
            room.close()
            raise
        task = self._own(self._run(item, ask), f"video {item.id}")
        # A request for which there is no place, not even in the line, is refused in the first step of its task, which comes before our next.
        await asyncio.sleep(0)
        if task.done():
            room.close()
            await self._pool.run(self._store.delete, item.id)
            await task  # raises why
        self._running[item.id] = (item, task)

        def ended(_: asyncio.Task[None]) -> None:
            del self._running[item.id]
            room.close()

        task.add_done_callback(ended)
        return item

    async def _run(self, item: Item, ask: Ask) -> None:
        error: StreamrtError | None = None
        try:
            await self._make(item, ask)
        except Gone:
            return
        except StreamrtError as failure:
            if item.id not in self._running:
                raise  # whoever asked for the job is told, and gets none
            error = failure
        except Exception:  # whatever it was: the job must end, and its caller be told
            log.exception("video.fault", id=item.id)
            error = StreamrtError(f"internal error; the log knows more under {item.id}")
        await self._end(item, error)

    async def _make(self, item: Item, ask: Ask) -> None:
        call = await self._client.submit(
            "video", ask.params, ask.inputs, outputs=ask.outputs, timeout_s=self._timeout_s, request_id=item.id
        )
        film = Film(call, self._pool, ask.audio_hz)
        async with aclosing(film.pieces()) as pieces:
            await self._note(item, status="in_progress")
            async for piece in pieces:
                if piece:
                    await self._pool.run(self._store.append, item, piece)
                if film.percent != item.state["progress"]:
                    await self._note(item, progress=film.percent)
        item.state |= {"size": film.size, "seconds": f"{film.seconds:g}"}

    async def _note(self, item: Item, **news: Any) -> None:
        item.state |= news
        await self._pool.run(self._store.save, item)

    async def _end(self, item: Item, error: StreamrtError | None) -> None:
        now = int(time.time())
        if error is None:
            item.state |= {"status": "completed", "progress": 100, "completed_at": now}
        else:
            told = errors.body(error)["error"]
            item.state |= {"status": "failed", "error": {"code": told["code"], "message": told["message"]}}
        log.info("video.done", id=item.id, status=item.state["status"])
        try:
            if error is not None:
                await self._pool.run(self._store.discard, item)
            await self._pool.run(self._store.finish, item)
        except Gone:
            log.info("video.gone", id=item.id)

    def _own(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def first_state(ask: Ask) -> dict[str, Any]:
    return {
        "status": "queued",
        "progress": 0,
        "model": ask.model,
        "prompt": ask.params["prompt"],
        "size": ask.params.get("size", "auto"),
        "seconds": f"{ask.params['seconds']:g}" if "seconds" in ask.params else "auto",
        "completed_at": None,
        "error": None,
    }


def told(item: Item) -> dict[str, Any]:
    """The job as OpenAI's `video` object."""
    state = dict(item.state)
    if item.is_orphan:
        state |= {"status": "failed", "error": {"code": "unavailable", "message": "the gateway that made the video has stopped"}}
    return {
        "id": item.id,
        "object": "video",
        "created_at": int(item.created_at),
        "expires_at": None if item.is_held else int(item.expires_at),
        "remixed_from_video_id": None,
        **state,
    }
