"""Credit of one request on one channel: how much of it may be unreleased, the line of sends that wait for more, and what was cancelled.

Knows counts and futures; knows nothing of slots, sockets or messages.

Rules
- First come, first served, and one send at a time between `enter` and `leave`: chunks of a request leave in the order of their sends.
  A send that had credit at once takes the turn (`hold`) only when it comes to wait for something else.
- A chunk larger than the whole window may go when nothing else is unreleased.
- Only the sends of this request wait here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

from transport.errors import TransportError


class Window:
    """Credit of one request and epoch."""

    __slots__ = ("_line", "_max_bytes", "_max_chunks", "bytes", "chunks", "epoch", "error", "place", "request_id", "taken")

    def __init__(self, request_id: str, epoch: int, max_chunks: int, max_bytes: int) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.chunks = 0  # unreleased
        self.bytes = 0
        self.error: TransportError | None = None  # why it is over
        self.place: asyncio.Future[Any] | None = None  # what the send that has the turn waits for, if it waits
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self.taken = False  # the turn: a send that waits, or has waited, is on its way to `leave`
        self._line: deque[tuple[asyncio.Future[None], int]] | None = None

    @property
    def idle(self) -> bool:
        return not self.chunks and not self.taken and not self._line

    def try_enter(self, nbytes: int) -> bool:
        """Take credit now, if there is some and it is nobody's turn; the turn is free."""
        chunks, after = self.chunks, self.bytes + nbytes
        if self.taken or self._line or (chunks and (chunks >= self._max_chunks or after > self._max_bytes)):
            return False
        self.chunks = chunks + 1
        self.bytes = after
        return True

    def hold(self) -> None:
        """Take the turn, from `try_enter` on: what comes next may wait."""
        self.taken = True

    async def enter(self, nbytes: int) -> None:
        """Take credit and the turn; waits for both. Raises what `fail` was given."""
        future = asyncio.get_running_loop().create_future()
        if self._line is None:
            self._line = deque()
        place = (future, nbytes)
        self._line.append(place)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:  # granted and cancelled at once
                self.leave()
                self.give_back(nbytes)
            elif self._line and place in self._line:
                self._line.remove(place)
                self._wake()
            raise

    def check(self) -> None:
        """Raises why it is over, if it is. To be asked after any await and before the send: much may happen meanwhile."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def leave(self) -> None:
        """The send has been made or given up: the next one's turn."""
        self.taken = False
        if self._line:
            self._wake()

    def give_back(self, nbytes: int) -> None:
        """One chunk was released, or never sent."""
        self.chunks -= 1
        self.bytes -= nbytes
        if self._line:
            self._wake()

    def fail(self, error: TransportError) -> None:
        """No send may enter any more; those that wait raise `error`."""
        self.error = error
        line, self._line = self._line, None
        for future in (*(future for future, _ in line or ()), self.place):
            if future is not None and not future.done():
                future.set_exception(type(error)(*error.args))

    def _fits(self, nbytes: int) -> bool:
        return not self.chunks or (self.chunks < self._max_chunks and self.bytes + nbytes <= self._max_bytes)

    def _wake(self) -> None:
        while self._line and not self.taken:
            future, nbytes = self._line[0]
            if future.done():  # cancelled; its task has yet to run
                self._line.popleft()
            elif self._fits(nbytes):
                self._line.popleft()
                self.taken = True
                self.chunks += 1
                self.bytes += nbytes
                future.set_result(None)
            else:
                return


class Tombstones:
    """Requests that are over, each up to an epoch; the oldest are forgotten beyond `limit`."""

    __slots__ = ("_limit", "epochs")

    def __init__(self, limit: int = 4096) -> None:
        self.epochs: OrderedDict[str, int] = OrderedDict()  # request -> the last epoch that is over; not to be changed from outside
        self._limit = limit

    def add(self, request_id: str, epoch: int) -> bool:
        """False when it was known."""
        if self.covers(request_id, epoch):
            return False
        self.epochs[request_id] = epoch
        self.epochs.move_to_end(request_id)
        if len(self.epochs) > self._limit:
            self.epochs.popitem(last=False)
        return True

    def covers(self, request_id: str, epoch: int) -> bool:
        return epoch <= self.epochs.get(request_id, -1)

    def discard(self, request_id: str) -> None:
        self.epochs.pop(request_id, None)
