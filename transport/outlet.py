"""The producer's end of the shared-memory lane to one consumer: credit, slot, copy, descriptor; then releases.

Joins window.py, arena.py and channel.py. Knows nothing of routes, nor of other consumers.

Rules
- A chunk is the consumer's once its descriptor is posted; until then a cancelled send leaves no trace.
- What is lent (`_lent`) comes back by `Release`, or all at once when the consumer is gone.
- `close` only ends sending: the lane stays until what was sent has been released.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from transport import channel
from transport.arena import ARENA_FILE, Arena
from transport.channel import Cancel, Data, File, FileComing, FileGone, Hello, Lane, Refused, Release, Welcome
from transport.chunk import ChunkHeader, on_device
from transport.connector import ConnectorOptions, ConnectorStats, Outlet
from transport.errors import Broken, Closed, ProtocolError, TooLarge, TransportError
from transport.payload import fill, pack, payload_bytes
from transport.ring import Loan, Ring
from transport.window import Tombstones, Window

THREAD_COPY_BYTES = 4 * 2**20  # a longer copy would hold the loop for more than about 0.2 ms
_MAX_INLINE_BYTES = channel.MAX_MESSAGE_BYTES // 2


class _Lent(NamedTuple):
    """A chunk that the consumer has."""

    request_id: str
    window: Window
    nbytes: int
    ring: Ring | None  # None: it went inline
    slot: int
    blocks: Sequence[np.ndarray]  # these own device memory that the consumer may read


class ShmOutlet(Outlet):
    """Made by `ShmConnector.dial`. `on_ended(outlet)`: takes no more sends; `on_gone(outlet)`: and nothing is lent any more."""

    def __init__(
        self,
        endpoint: str,
        sock: socket.socket,
        arena: Arena,
        threads: ThreadPoolExecutor,
        options: ConnectorOptions,
        counters: ConnectorStats,
        buffer: bytearray,
        on_ended: Callable[[ShmOutlet], None],
        on_gone: Callable[[ShmOutlet], None],
    ) -> None:
        self.endpoint = endpoint
        self.peer = ""  # the consumer's name
        self.error: TransportError | None = None  # why nothing can be sent any more
        self._arena = arena
        self._threads = threads
        self._options = options
        self._inline_bytes = min(options.inline_bytes, _MAX_INLINE_BYTES)
        self._counters = counters
        self._on_ended = on_ended
        self._on_gone = on_gone
        self._windows: dict[str, Window] = {}  # by request; only those with something unreleased or waiting
        self._tombstones = Tombstones()
        self._lent: dict[int, _Lent] = {}  # by number
        self._next_number = 0
        self._known_files = {ARENA_FILE}  # what the consumer has been given
        self._places: dict[asyncio.Future[Loan], Window] = {}  # sends in line for a slot
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lane = Lane(sock, buffer, channel.to_producer, self._on_message, self._on_end)

    async def introduce(self, name: str) -> None:
        """Hand the arena over and wait for the answer. Raises Broken, ProtocolError."""
        hello = Hello(channel.VERSION, name, self._arena.ring.layout.classes)
        self._lane.post(channel.encode(hello), self._arena.files[ARENA_FILE])
        await self._welcome

    async def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        nbytes = payload_bytes(header.tensors, arrays)
        if nbytes > self._options.max_chunk_bytes:
            raise TooLarge(f"a chunk of {nbytes} bytes, and max_chunk_bytes is {self._options.max_chunk_bytes}")
        blocks = tuple(arrays) if on_device(header.tensors) else ()
        # 1. The request's credit, and its turn: sends of one request leave in order.
        window = self._window(header)
        if not window.try_enter(nbytes):
            with self._counted_wait():
                await window.enter(nbytes)
        try:
            # 2. The bytes, beside the header when they are few, else in a slot. 3. The consumer hears of it.
            if nbytes <= self._inline_bytes:
                window.check()
                self._post_inline(header, window, nbytes, pack(header.tensors, arrays, nbytes), blocks)
            else:
                loan = await self._loan(header, window, nbytes)
                await self._fill(loan, header, arrays, window)
                self._post(header, window, nbytes, loan, blocks)
        except BaseException:
            window.give_back(nbytes)
            raise
        finally:
            window.leave()
            self._retire(header.request_id, window)
        self._counters.chunks_sent += 1
        self._counters.bytes_sent += nbytes

    def cancel(self, request_id: str, epoch: int) -> None:
        if self.error is not None or not self._tombstones.add(request_id, epoch):
            return
        window = self._windows.get(request_id)
        if window is not None and window.epoch <= epoch:
            self._end_window(request_id, window, Closed(f"request {request_id} was cancelled"))
        with contextlib.suppress(Broken):  # nobody is left to tell
            self._lane.post(channel.encode(Cancel(request_id, epoch)))

    def forget(self, request_id: str) -> None:
        self._tombstones.discard(request_id)

    async def close(self) -> None:
        if self.error is None:
            self._end(Closed(f"the outlet to {self.endpoint} was closed"))
            self._lane.finish()
            self._hang_up_if_done()

    def hang_up(self, error: TransportError) -> None:
        """End now: what was lent comes back at once. Idempotent."""
        self._end(error)
        if not self._lane.closed:
            self._lane.close()
            self._lent.clear()
            self._arena.drop(self)
            self._on_gone(self)

    def drop_file(self, number: int) -> None:
        """A jumbo area is no more; nothing in it is lent."""
        if number in self._known_files:
            self._known_files.discard(number)
            with contextlib.suppress(Broken):  # it has let go of everything
                self._lane.post(channel.encode(FileGone(number)))

    # ---- sending

    def _window(self, header: ChunkHeader) -> Window:
        """The credit of this request and epoch. Raises Broken, Closed."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        request_id, epoch = header.request_id, header.epoch
        if self._tombstones.covers(request_id, epoch):
            raise Closed(f"request {request_id} was cancelled")
        window = self._windows.get(request_id)
        if window is not None and window.epoch != epoch:
            if epoch < window.epoch:
                raise Closed(f"request {request_id} is in epoch {window.epoch}, this chunk is of epoch {epoch}")
            self._end_window(request_id, window, Closed(f"request {request_id} is in epoch {epoch} now"))
            window = None
        if window is None:
            window = Window(epoch, self._options.window_chunks, self._options.window_bytes)
            self._windows[request_id] = window
        return window

    async def _loan(self, header: ChunkHeader, window: Window, nbytes: int) -> Loan:
        loan = self._arena.try_loan(nbytes, header.request_id)
        if loan is not None:
            return loan
        place = self._arena.line_up(nbytes, header.request_id)
        self._places[place] = window
        try:
            with self._counted_wait():
                return await place
        except BaseException:
            self._arena.leave(place)
            raise
        finally:
            del self._places[place]

    async def _fill(self, loan: Loan, header: ChunkHeader, arrays: Sequence[np.ndarray], window: Window) -> None:
        """Copy into the slot, which is given back when that fails."""
        copied: asyncio.Future[None] | None = None
        try:
            if sum(array.nbytes for array in arrays) < THREAD_COPY_BYTES:
                fill(loan.payload, header.tensors, arrays)
            else:
                copied = asyncio.get_running_loop().run_in_executor(self._threads, fill, loan.payload, header.tensors, arrays)
                await asyncio.shield(copied)
            window.check()
        except BaseException:
            if copied is None or copied.done():
                self._arena.abort(loan)
            else:  # the thread still writes
                copied.add_done_callback(lambda _: self._arena.abort(loan))
            raise

    def _post_inline(self, header: ChunkHeader, window: Window, nbytes: int, payload: bytes, blocks: Sequence[np.ndarray]) -> None:
        number = self._next_number
        self._lane.post(channel.encode(Data(number, header, channel.INLINE, 0, 0, nbytes, payload)))
        self._next_number = number + 1
        self._lent[number] = _Lent(header.request_id, window, nbytes, None, 0, blocks)

    def _post(self, header: ChunkHeader, window: Window, nbytes: int, loan: Loan, blocks: Sequence[np.ndarray]) -> None:
        number, ring, slot = self._next_number, loan.ring, loan.slot
        ring.seal(loan, (self,), nbytes)
        try:
            if ring.file not in self._known_files:
                self._lane.post(channel.encode(FileComing()))
                self._lane.post(channel.encode(File(ring.file, ring.layout.classes)), self._arena.files[ring.file])
                self._known_files.add(ring.file)
            self._lane.post(channel.encode(Data(number, header, ring.file, slot, loan.generation, nbytes)))
        except BaseException:
            ring.release(slot, self)
            self._arena.released()
            raise
        self._next_number = number + 1
        self._lent[number] = _Lent(header.request_id, window, nbytes, ring, slot, blocks)

    @contextlib.contextmanager
    def _counted_wait(self) -> Iterator[None]:
        since_ns = time.monotonic_ns()
        self._counters.credit_waits += 1
        try:
            yield
        finally:
            self._counters.credit_wait_ns += time.monotonic_ns() - since_ns

    # ---- ending

    def _end_window(self, request_id: str, window: Window, error: TransportError) -> None:
        """The sends that wait for this request's credit or slot raise `error`."""
        del self._windows[request_id]
        window.fail(error)
        for place, its_window in self._places.items():
            if its_window is window and not place.done():
                place.set_exception(type(error)(*error.args))

    def _retire(self, request_id: str, window: Window) -> None:
        """Keep no state of a request that has nothing unreleased."""
        if window.idle and self._windows.get(request_id) is window:
            del self._windows[request_id]

    def _end(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error
            for request_id, window in list(self._windows.items()):
                self._end_window(request_id, window, error)
            self._on_ended(self)

    def _hang_up_if_done(self) -> None:
        if self.error is not None and not self._lent:
            self.hang_up(self.error)

    # ---- hearing

    def _on_message(self, message: Welcome | Release | Refused, fd: int) -> None:
        match message:
            case Release():
                self._on_release(message.numbers)
            case Welcome():
                self.peer = message.peer
                self._answered(None)
            case Refused():
                self._answered(ProtocolError(message.reason))

    def _on_release(self, numbers: list[int]) -> None:
        for number in numbers:
            lent = self._lent.pop(number, None)
            if lent is None:
                self._on_end(f"it released chunk {number}, which it does not have")
                return
            if lent.ring is not None:
                lent.ring.release(lent.slot, self)
            lent.window.give_back(lent.nbytes)
            self._retire(lent.request_id, lent.window)
        self._arena.released()
        self._hang_up_if_done()

    def _on_end(self, why: str) -> None:
        self._answered(Broken(f"{self.endpoint} hung up before it answered"))
        self.hang_up(Broken(f"{self.peer or self.endpoint} is gone: {why}"))

    def _answered(self, error: TransportError | None) -> None:
        if not self._welcome.done():
            if error is None:
                self._welcome.set_result(None)
            else:
                self._welcome.set_exception(error)
