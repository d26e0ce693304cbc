"""What is open in one gateway now: requests in work, WebSockets. Bounded, and drained on shutdown.

Knows counts and sockets; knows nothing of what they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import WSCloseCode, web

from streamrt.errors import Overloaded, Unavailable
from streamrt.log import get_logger

log = get_logger("gateway")


class Gate:
    """What is open now. Made by the application; `close` on shutdown, after which nothing is admitted."""

    def __init__(self, max_requests: int) -> None:
        self.closed = asyncio.Event()  # streams without an end wait for it too
        self.sockets: set[web.WebSocketResponse] = set()
        self._max_requests = max_requests
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One request, from here to the end of the block. Raises Overloaded, Unavailable."""
        self.check_open()
        if self._running >= self._max_requests:
            raise Overloaded(f"{self._running} requests are in work, the most that this server takes", retry_after_s=1.0)
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def check_open(self) -> None:
        if self.closed.is_set():
            raise Unavailable("this server is shutting down")

    async def close(self, within_s: float) -> None:
        """Admit nothing more, tell the WebSockets to go, and wait for the requests in work, at most `within_s`."""
        self.closed.set()
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(ws.close(code=WSCloseCode.GOING_AWAY, message=b"shutting down") for ws in list(self.sockets)))
                await self._idle.wait()
        except TimeoutError:
            log.warning("gateway.drain_expired", requests=self._running, sockets=len(self.sockets))
