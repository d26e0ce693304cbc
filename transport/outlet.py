"""The producer's end of the shared-memory lane to one consumer: credit, slot, copy, descriptor; then releases.

Joins credit.py, arena.py and channel.py. Knows nothing of routes, nor of other consumers.

Rules
- A chunk is the consumer's once its descriptor is posted; until then a cancelled send leaves no trace.
- What is lent (`_lent`) comes back by `Release`, or all at once when the consumer is gone: slots, credit, blocks of device memory.
- `close` only ends sending: the lane stays until what was sent has been released.
- A consumer that hangs while a send waits for it is given up, and what it was lent is quarantined: it comes back when the consumer has
  released it or has hung up, by waking or by dying, and not before. Until then it may be reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from transport import channel
from transport.arena import ARENA_FILE, Arena
from transport.channel import INLINE, Cancel, Data, File, FileComing, FileGone, Hello, Hurry, Lane, Refused, Release, Welcome, encode
from transport.chunk import ChunkHeader, on_device
from transport.connector import ConnectorOptions, ConnectorStats, Outlet
from transport.credit import Windows
from transport.deferred import any_deferred
from transport.errors import Broken, Closed, ProtocolError, TooLarge, TransportError
from transport.payload import fill, pack, payload_bytes
from transport.ring import Loan
from transport.watch import Watch
from transport.window import Window

log = logging.getLogger(__name__)

THREAD_COPY_BYTES = 4 * 2**20  # a longer copy would hold the loop for more than about 0.2 ms
_HURRY = encode(Hurry())
_MAX_INLINE_BYTES = channel.MAX_MESSAGE_BYTES // 2


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
        self._hangs = False  # given up while it may still read
        self._arena = arena
        self._threads = threads
        self._max_chunk_bytes = options.max_chunk_bytes
        self.inline_bytes = min(options.inline_bytes, _MAX_INLINE_BYTES)
        self._counters = counters
        self._on_ended = on_ended
        self._on_gone = on_gone
        self._windows = Windows(options, counters)
        self._waits = 0  # sends that wait for credit
        # By number: window, bytes, slot (None: inline), and arrays that own device memory which the consumer may read.
        self._lent: dict[int, tuple[Window, int, Loan | None, Sequence[np.ndarray]]] = {}
        self._next_number = 0
        self._batch = max(2, options.window_chunks // 4)
        self._hear_at = self._batch  # with so many lent, see whether some have come back
        self._known_files = {ARENA_FILE}  # what the consumer has been given
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hang_timeout_s = options.hang_timeout_s
        self._watch = Watch(options.hang_timeout_s, self._is_waited_for, self._ask, self._on_hung)
        self._lane = Lane(sock, buffer, channel.to_producer, self._on_message, self._on_end)
        self._post = self._lane.post

    async def introduce(self, name: str) -> None:
        """Hand the arena over and wait for the answer. Raises Broken, ProtocolError."""
        hello = Hello(channel.VERSION, name, self._arena.ring.layout.classes)
        self._lane.post(encode(hello), self._arena.files[ARENA_FILE])
        self._watch.begin()
        await self._welcome

    @property
    def bytes_quarantined(self) -> int:
        """What a consumer that hangs may still read."""
        return sum(nbytes for _, nbytes, loan, _ in self._lent.values() if loan is not None) if self._hangs else 0

    async def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        nbytes = payload_bytes(header.tensors, arrays)
        if nbytes > self._max_chunk_bytes:
            self.check_size(nbytes)
        if len(self._lent) >= self._hear_at:
            self._hear()
        # 1. The request's credit, and its turn: sends of one request leave in order.
        window = self._windows.of(header)
        if not window.try_enter(nbytes):
            await self._wait(window, nbytes)
        try:
            # 2. The bytes, beside the header when they are few, else in a slot. 3. The consumer hears of it.
            if nbytes <= self.inline_bytes:
                self.post(header, arrays, window, nbytes, pack(header.tensors, arrays, nbytes), None)
            elif not self._send_at_once(header, arrays, window, nbytes):
                window.hold()
                loan = await self.seal(header, arrays, nbytes, (self,), (window,))
                self.post(header, arrays, window, nbytes, b"", loan)
        except BaseException:
            self.give_up(window, nbytes)
            raise
        if window.taken:
            window.leave()

    def cancel(self, request_id: str, epoch: int) -> None:
        if self.error is None and self._windows.cancel(request_id, epoch):
            with contextlib.suppress(Broken):  # nobody is left to tell
                self._lane.post(encode(Cancel(request_id, epoch)))

    def forget(self, request_id: str) -> None:
        self._windows.forget(request_id)

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
                self._lane.post(encode(FileGone(number)))

    def hurry(self) -> None:
        """A send waits for what the consumer may have done with."""
        if self._lent:
            self._watch.begin()
            with contextlib.suppress(Broken):  # end-of-file gives it back
                self._lane.post(_HURRY)

    # ---- the steps of a send, for `send` and `send_to_all`

    def check_size(self, nbytes: int) -> None:
        if nbytes > self._max_chunk_bytes:
            raise TooLarge(f"a chunk of {nbytes} bytes, and max_chunk_bytes is {self._max_chunk_bytes}")

    async def enter(self, header: ChunkHeader, nbytes: int) -> Window:
        """Credit and turn of the request, to be ended with `give_up`, or `post` and `leave`."""
        window = self._windows.of(header)
        if window.try_enter(nbytes):
            window.hold()
        else:
            await self._wait(window, nbytes)
        return window

    def give_up(self, window: Window, nbytes: int) -> None:
        window.give_back(nbytes)
        window.leave()
        self._windows.retire(window)

    def _send_at_once(self, header: ChunkHeader, arrays: Sequence[np.ndarray], window: Window, nbytes: int) -> bool:
        """`seal` and `post` for this outlet alone; False where that has to wait."""
        if nbytes >= THREAD_COPY_BYTES or any_deferred(arrays):
            return False
        arena = self._arena
        loan = arena.try_loan(nbytes, header.request_id)
        if loan is None:
            return False
        try:
            # Before the copy, which pushes all else out of the cache.
            message = encode(Data(self._next_number, header, loan.ring.file, loan.slot, loan.generation + 1, nbytes))
            fill(loan.payload, header.tensors, arrays)
        except BaseException:
            arena.abort(loan)
            raise
        loan.ring.seal(loan, (self,), nbytes)
        self.post(header, arrays, window, nbytes, b"", loan, message)
        return True

    async def seal(
        self, header: ChunkHeader, arrays: Sequence[np.ndarray], nbytes: int, outlets: Sequence[ShmOutlet], windows: Sequence[Window]
    ) -> Loan:
        """A slot with the payload in it, borrowed by `outlets`. Given back when that fails, or when a request ends meanwhile."""
        arena = self._arena
        loan = arena.try_loan(nbytes, header.request_id) or await self._loan(header.request_id, nbytes, windows)
        copied: asyncio.Future[None] | None = None
        try:
            if nbytes < THREAD_COPY_BYTES and not any_deferred(arrays):
                fill(loan.payload, header.tensors, arrays)
            else:
                copied = asyncio.get_running_loop().run_in_executor(self._threads, fill, loan.payload, header.tensors, arrays)
                await asyncio.shield(copied)
            for window in windows:
                window.check()
        except BaseException:
            if copied is None or copied.done():
                arena.abort(loan)
            else:  # the thread still writes
                copied.add_done_callback(lambda _: arena.abort(loan))
            raise
        loan.ring.seal(loan, outlets, nbytes)
        return loan

    def post(
        self,
        header: ChunkHeader,
        arrays: Sequence[np.ndarray],
        window: Window,
        nbytes: int,
        inline: bytes,
        loan: Loan | None,
        message: bytes = b"",
    ) -> None:
        """Tell the consumer of a chunk, in line or in a sealed slot; the slot is released for this consumer when that fails.

        `message`: the `Data` that says it, where that was made before.
        """
        number = self._next_number
        if loan is None:
            self._post(encode(Data(number, header, INLINE, 0, 0, nbytes, inline)))
        else:
            ring = loan.ring
            try:
                if ring.file not in self._known_files:
                    self._lane.post(encode(FileComing()))
                    self._lane.post(encode(File(ring.file, ring.layout.classes)), self._arena.files[ring.file])
                    self._known_files.add(ring.file)
                self._post(message or encode(Data(number, header, ring.file, loan.slot, loan.generation, nbytes)))
            except BaseException:
                ring.release(loan.slot, self)
                self._arena.released()
                raise
        self._lent[number] = (window, nbytes, loan, tuple(arrays) if on_device(header.tensors) else ())
        if loan is not None and self._arena.line:
            self._watch.begin()
        self._next_number = number + 1
        counters = self._counters
        counters.chunks_sent += 1
        counters.bytes_sent += nbytes

    async def _wait(self, window: Window, nbytes: int) -> None:
        self._waits += 1
        self.hurry()
        try:
            await self._windows.enter(window, nbytes)
        finally:
            self._waits -= 1
        try:
            window.check()  # much may have happened since the turn was given
        except BaseException:
            self.give_up(window, nbytes)
            raise

    async def _loan(self, request_id: str, nbytes: int, windows: Sequence[Window]) -> Loan:
        """A slot, after those who are in line for one."""
        place = self._arena.line_up(nbytes, request_id)
        for window in windows:
            window.place = place
        try:
            with self._windows.counted_wait():
                return await place
        except BaseException:
            self._arena.leave(place)
            raise
        finally:
            for window in windows:
                window.place = None

    # ---- ending

    def _end(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error
            self._watch.end()
            self._windows.end(error)
            self._on_ended(self)

    def _is_waited_for(self) -> bool:
        if self.error is not None:
            return False
        return not self._welcome.done() or bool(self._lent and (self._waits or self._arena.line))

    def _ask(self) -> None:
        with contextlib.suppress(Broken):  # end-of-file says so
            self._lane.post(encode(channel.Ping()))

    def _on_hung(self) -> None:
        peer = self.peer or self.endpoint
        error = Broken(f"{peer} hangs: a send waits for it, and it has said nothing for {self._hang_timeout_s:g} s")
        log.warning("%s: it is given up, and keeps %d chunks until it wakes or ends", error, len(self._lent))
        self._counters.peers_hung += 1
        self._hangs = True
        self._answered(error)
        self._end(error)
        self._lane.cut()
        self._hang_up_if_done()

    def _hang_up_if_done(self) -> None:
        if self.error is not None and not self._lent:
            self.hang_up(self.error)

    # ---- hearing

    def _hear(self) -> None:
        """Take the releases that have come: a burst of sends does not return to the loop before it has to wait."""
        self._lane.read()
        self._hear_later()

    def _hear_later(self) -> None:
        self._hear_at = max(self._batch, len(self._lent) + self._batch // 2)

    def _on_message(self, message: Welcome | Release | Refused | channel.Pong, fd: int) -> None:
        self._watch.heard = True
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
            window, nbytes, loan, _ = lent
            if loan is not None:
                loan.ring.release(loan.slot, self)
            window.give_back(nbytes)
            if not window.chunks:
                self._windows.retire(window)
        self._hear_later()
        self._arena.released()
        if self.error is not None:
            self._hang_up_if_done()
        elif self._waits or self._arena.line:  # the one that waits may need more than this
            self.hurry()

    def _on_end(self, why: str) -> None:
        self._answered(Broken(f"{self.endpoint} hung up before it answered"))
        self.hang_up(Broken(f"{self.peer or self.endpoint} is gone: {why}"))

    def _answered(self, error: TransportError | None) -> None:
        if not self._welcome.done():
            if error is None:
                self._welcome.set_result(None)
            else:
                self._welcome.set_exception(error)


async def send_to_all(outlets: Sequence[Outlet], header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
    """`send` on each of one process's outlets; those over shared memory share one slot and one copy.

    Waits: for the request's credit on each, and for a slot.
    Cancelled: no consumer over shared memory has seen it.
    Raises: as `send`. When one consumer is gone, the others have the chunk all the same.
    """
    shared = [outlet for outlet in outlets if isinstance(outlet, ShmOutlet)]
    failure: TransportError | None = None
    if len(shared) > 1:
        failure = await _send_shared(shared, header, arrays)
    for outlet in outlets:
        if len(shared) == 1 or not isinstance(outlet, ShmOutlet):
            try:
                await outlet.send(header, arrays)
            except Broken as error:
                failure = failure or error
    if failure is not None:
        raise failure


async def _send_shared(outlets: Sequence[ShmOutlet], header: ChunkHeader, arrays: Sequence[np.ndarray]) -> TransportError | None:
    """Returns why one of the consumers did not get it."""
    nbytes = payload_bytes(header.tensors, arrays)
    first, windows = outlets[0], []
    first.check_size(nbytes)
    try:
        # All outlets are entered in the caller's order, so two sends of a request can not wait for each other.
        for outlet in outlets:
            windows.append(await outlet.enter(header, nbytes))
        inline, loan = b"", None
        if nbytes <= first.inline_bytes:
            inline = pack(header.tensors, arrays, nbytes)
            for window in windows:
                window.check()
        else:
            loan = await first.seal(header, arrays, nbytes, outlets, windows)
    except BaseException:
        for outlet, window in zip(outlets, windows, strict=False):
            outlet.give_up(window, nbytes)
        raise
    failure: TransportError | None = None
    for outlet, window in zip(outlets, windows, strict=True):
        try:
            outlet.post(header, arrays, window, nbytes, inline, loan)
        except TransportError as error:
            outlet.give_up(window, nbytes)
            failure = failure or error
        else:
            window.leave()
    return failure
