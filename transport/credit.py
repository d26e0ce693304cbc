"""The credit of all requests on one channel.

`Windows` keeps one `Window` per request while it is in use, and knows which requests are over. `take` lends room for one chunk in
private memory (in-process, TCP); the shared-memory outlet enters the windows itself.
Knows counts and requests. Knows nothing of sockets or memory.

Rules
- A later epoch of a request ends its earlier ones; so does a cancel.
- A loan comes back exactly once, however often and in whatever order its ends are reached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from transport.chunk import ChunkHeader
from transport.connector import ConnectorOptions, ConnectorStats
from transport.errors import Closed, TooLarge, TransportError
from transport.window import Tombstones, Window


class Windows:
    """What one outlet may have on its way: a window per request."""

    def __init__(self, options: ConnectorOptions, stats: ConnectorStats) -> None:
        self._options = options
        self._stats = stats
        self._windows: dict[str, Window] = {}
        self._over = Tombstones()
        self.error: TransportError | None = None  # why nothing can be sent any more
        self._loans: set[Loan] = set()

    async def take(self, header: ChunkHeader, nbytes: int) -> Loan:
        """Room for one chunk and the turn to send it, until `loan.sent()` or `loan.give_back()`.

        Waits: for this request's credit and the sends before it.
        Cancelled: nothing is taken.
        Raises: TooLarge, Closed (the request is over), or what `end` was given.
        """
        if nbytes > self._options.max_chunk_bytes:
            raise TooLarge(f"a chunk of {nbytes} bytes, and max_chunk_bytes is {self._options.max_chunk_bytes}")
        window = self.of(header)
        if window.try_enter(nbytes):
            window.hold()
        else:
            await self.enter(window, nbytes)
        loan = Loan(self, window, nbytes)
        self._loans.add(loan)
        self._stats.slots_in_use += 1
        self._stats.bytes_in_use += nbytes
        return loan

    def cancel(self, request_id: str, epoch: int) -> bool:
        """The request is over up to `epoch`: sends that wait, and later ones, get Closed. False when it was over already."""
        if not self._over.add(request_id, epoch):
            return False
        window = self._windows.get(request_id)
        if window is not None and window.epoch <= epoch:
            self._end_window(window, Closed(f"request {request_id} was cancelled"))
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended: nobody will send for it any more."""
        self._over.discard(request_id)

    def end(self, error: TransportError) -> None:
        """The channel is gone: sends that wait, and later ones, get `error`; what is on its way is given back. Idempotent."""
        if self.error is None:
            self.error = error
            for window in list(self._windows.values()):
                self._end_window(window, error)
            for loan in list(self._loans):
                loan.give_back()

    def of(self, header: ChunkHeader) -> Window:
        """The credit of this request and epoch. Raises Closed (the request is over), or what `end` was given."""
        request_id, epoch = header.request_id, header.epoch
        window = self._windows.get(request_id)
        return window if window is not None and window.epoch == epoch else self._open(request_id, epoch, window)

    async def enter(self, window: Window, nbytes: int) -> None:
        """Wait for credit and the turn, and count that. Raises what `end` or `cancel` says."""
        with self.counted_wait():
            try:
                await window.enter(nbytes)
            finally:
                self.retire(window)

    @contextlib.contextmanager
    def counted_wait(self) -> Iterator[None]:
        since_ns = time.monotonic_ns()
        self._stats.credit_waits += 1
        try:
            yield
        finally:
            self._stats.credit_wait_ns += time.monotonic_ns() - since_ns

    def retire(self, window: Window) -> None:
        """Keep no state of a request that has nothing unreleased."""
        if window.idle and self._windows.get(window.request_id) is window:
            del self._windows[window.request_id]

    def returned(self, loan: Loan, window: Window) -> None:
        self._loans.discard(loan)
        self._stats.slots_in_use -= 1
        self._stats.bytes_in_use -= loan.nbytes
        self.retire(window)

    def _open(self, request_id: str, epoch: int, window: Window | None) -> Window:
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        if self._over.covers(request_id, epoch):
            raise Closed(f"request {request_id} was cancelled")
        if window is not None:
            if window.epoch > epoch:
                raise Closed(f"request {request_id} is in epoch {window.epoch}, this chunk is of {epoch}")
            self._end_window(window, Closed(f"request {request_id} is in epoch {epoch} now"))
        window = self._windows[request_id] = Window(request_id, epoch, self._options.window_chunks, self._options.window_bytes)
        return window

    def _end_window(self, window: Window, error: TransportError) -> None:
        window.fail(error)
        del self._windows[window.request_id]


class Loan:
    """The room of one chunk, and at first the turn of its request."""

    __slots__ = ("_has_turn", "_is_out", "_window", "_windows", "nbytes")

    def __init__(self, windows: Windows, window: Window, nbytes: int) -> None:
        self.nbytes = nbytes
        self._windows = windows
        self._window = window
        self._has_turn = True
        self._is_out = True

    def check(self) -> None:
        """Raises why the request has ended since we took this; to be asked after an await and before the send."""
        self._window.check()

    def sent(self) -> None:
        """The chunk is on its way: the next send's turn."""
        if self._has_turn:
            self._has_turn = False
            self._window.leave()

    def give_back(self) -> None:
        """The chunk was released, or never sent. Idempotent."""
        if self._is_out:
            self._is_out = False
            self._window.give_back(self.nbytes)
            self.sent()
            self._windows.returned(self, self._window)
