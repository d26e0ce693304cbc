"""Responses that are written as their content comes.

Knows bytes and time; knows nothing of what they mean.

Rules
- What goes wrong before the first piece is raised, and becomes a status and a JSON error. After it, an event stream ends with one error
  event, and a byte stream is cut off, so that no client takes a broken answer for a whole one.
- Every write has a deadline, `slow_client_s`: a client that does not read is closed, and its call cancelled.
- However a response ends, `pieces` is closed, and with it the call that it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from gateway import errors, sse
from gateway.limits import REQUEST_ID
from gateway.state import CONFIG
from streamrt.errors import StreamrtError
from streamrt.log import get_logger

if TYPE_CHECKING:
    from streamrt import Call, Chunk

log = get_logger("gateway")

T = TypeVar("T")


class SlowClient(ConnectionError):
    """The client did not read what we wrote; `envelope` cuts the connection."""


async def chunks_of(call: Call) -> AsyncGenerator[Chunk, None]:
    """The chunks of `call`; a reader that stops early ends the call."""
    try:
        async for chunk in call:
            yield chunk
    finally:
        call.cancel("disconnect")  # nothing happens to a call that has ended


async def event_response(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """An event stream of `events`, each already in SSE form, with keepalive comments while nothing comes."""
    async with aclosing(paced(events, request.app[CONFIG].keepalive_s)) as pieces:
        first = await anext(pieces, b"")
        response = web.StreamResponse(headers=sse.HEADERS)
        await response.prepare(request)
        await write(request, response, sse.KEEPALIVE + (first or b""))  # a first comment opens the way through proxies
        try:
            async for piece in pieces:
                await write(request, response, sse.KEEPALIVE if piece is None else piece)
        except StreamrtError as error:
            log.warning("stream.failed", id=request[REQUEST_ID], code=error.code, error=error.message)
            await write(request, response, sse.data(errors.body(error)))
        except ConnectionError:
            raise
        except Exception:  # the headers are out: the error can only be told inside the stream
            log.exception("request.fault", id=request[REQUEST_ID], path=request.path)
            await write(request, response, sse.data(errors.body(StreamrtError(f"internal error; see {request[REQUEST_ID]}"))))
        await response.write_eof()
    return response


async def byte_response(request: web.Request, pieces: AsyncGenerator[bytes, None], content_type: str) -> web.StreamResponse:
    """A chunked response of `pieces`."""
    async with aclosing(pieces):
        first = await anext(pieces, b"")
        response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        try:
            await write(request, response, first)
            async for piece in pieces:
                await write(request, response, piece)
        except StreamrtError as error:
            log.warning("stream.failed", id=request[REQUEST_ID], code=error.code, error=error.message)
            raise ConnectionAbortedError("the answer broke off") from error  # `envelope` cuts the connection
        except ConnectionError:
            raise
        except Exception as error:  # the headers are out: no answer but to break off
            log.exception("request.fault", id=request[REQUEST_ID], path=request.path)
            raise ConnectionAbortedError("the answer broke off") from error
        await response.write_eof()
    return response


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write `data`. Raises SlowClient when the client has not made room within `slow_client_s`."""
    if not data:
        return
    try:
        async with asyncio.timeout(request.app[CONFIG].slow_client_s):
            await response.write(data)
    except TimeoutError:
        log.warning("client.slow", id=request[REQUEST_ID])
        raise SlowClient("the client does not read") from None


async def paced(items: AsyncGenerator[T, None], every_s: float) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever nothing came for `every_s`."""
    async with aclosing(items):
        while True:
            waiting = asyncio.ensure_future(_next(items))
            try:
                while not (await asyncio.wait([waiting], timeout=every_s))[0]:
                    yield None
                try:
                    item = waiting.result()
                except StopAsyncIteration:
                    return
                yield item
            finally:
                if not waiting.done():
                    waiting.cancel()
                    await asyncio.wait([waiting])


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What the streams yield, as it comes; of each, one item is taken ahead. What one raises ends all of them."""
    waiting: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {}
    try:
        waiting |= {asyncio.create_task(_next(stream)): stream for stream in streams}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.create_task(_next(stream))] = stream
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)  # a second error has nobody to go to
        for stream in streams:
            await stream.aclose()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)
