"""Both ends of the shared-memory lane for threads without an event loop: one producer, one consumer, calls that block.

    with BlockingInbound(path) as inbound:            # one process; any shm producer may dial
        lease = inbound.recv()
    with BlockingOutlet(endpoint, "me") as outlet:    # another; any shm consumer may be dialed
        outlet.send(header, arrays)

The same ring, messages, leases and credit as `outlet.py` and `inbound.py`; what differs is who waits. Knows nothing of asyncio.

Rules
- Each end belongs to one thread; leases and their views may die on any.
- Releases go out when a quarter of a window or a big chunk has settled, and at once when the producer waits and the consumer hears it:
  in `recv`. A consumer that does not come back to `recv` within the producer's `hang_timeout_s`, while a send waits for it, is given up.
- No jumbo areas are made: the arena must have slots for the largest chunk. Those of a dialing `ShmOutlet` are read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from transport import channel, memfile
from transport.channel import INLINE, Cancel, Data, File, FileComing, FileGone, Hello, Hurry, Refused, Release, Welcome, encode
from transport.chunk import ChunkHeader, on_device
from transport.connector import ConnectorOptions, ConnectorStats
from transport.credit import Windows
from transport.errors import Broken, Closed, ProtocolError, TransportError, WouldBlock
from transport.layout import Layout, arena_layout
from transport.lease import Area, ShmLease, to_consumer
from transport.memfile import MemFile
from transport.payload import fill, pack, payload_bytes
from transport.ring import Loan, Ring
from transport.window import Tombstones, Window

_BIG_BYTES = 256 * 2**10  # the slot of a chunk that big is worth having back while it is warm in the cache
_HURRY = encode(Hurry())


class _End:
    """A socket that blocks, for at most `timeout_s` per call."""

    _sock: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()

    def _use(self, sock: socket.socket, timeout_s: float | None) -> None:
        self._sock = sock
        channel.enlarge(sock)
        if timeout_s is not None:
            bound = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, bound)

    def _post(self, data: bytes) -> None:
        channel.check_size(data)
        try:
            self._sock.send(data)
        except BlockingIOError:
            raise TimeoutError("the peer reads nothing") from None
        except OSError as error:
            raise (Broken("the peer has hung up") if self._sock.fileno() >= 0 else Closed("this end was closed")) from error


class BlockingOutlet(_End):
    """The producer's end, with an arena of its own."""

    def __init__(self, endpoint: str, name: str, options: ConnectorOptions | None = None, *, timeout_s: float | None = None) -> None:
        """Raises Broken, NoSpace, ProtocolError, TimeoutError."""
        options = options or ConnectorOptions()
        self._options = options
        self._windows = Windows(options, ConnectorStats())
        # By number: window, bytes, slot (None: inline), and arrays that own device memory which the consumer may read.
        self._lent: dict[int, tuple[Window, int, Loan | None, Sequence[np.ndarray]]] = {}
        self._next_number = 0
        self._batch = max(1, options.window_chunks // 4)
        self._buffer = bytearray(channel.MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)
        layout = arena_layout(options.arena_bytes)
        self._file = MemFile(layout.total_bytes)
        self._ring = Ring(layout, self._file.memory)
        self._sock = channel.seqpacket(0)
        try:
            self._connect(endpoint)
            self._use(self._sock, timeout_s)
            socket.send_fds(self._sock, [encode(Hello(channel.VERSION, name, layout.classes))], [self._file.fd])
            answer = self._recv()
            if not isinstance(answer, Welcome):
                raise ProtocolError(answer.reason if isinstance(answer, Refused) else "it released what it was not sent")
        except BaseException:
            self.close()
            raise
        self.peer = answer.peer

    def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        """Copy `arrays` into the ring and tell the consumer.

        Waits: for credit and a slot.
        Raises: TooLarge (no slot is that big), Broken, Closed (the request was cancelled), TimeoutError.
        """
        nbytes = payload_bytes(header.tensors, arrays)
        window = self._windows.of(header)
        if self._lent and (nbytes >= _BIG_BYTES or len(self._lent) >= self._batch):
            self._hear(wait=False)
        while not window.try_enter(nbytes):
            self._hear(wait=True)
        loan: Loan | None = None
        try:
            if nbytes <= self._options.inline_bytes:
                message = encode(Data(self._next_number, header, INLINE, 0, 0, nbytes, pack(header.tensors, arrays, nbytes)))
            else:
                loan = self._loan(nbytes, header.request_id)
                # Before the copy, which pushes all else out of the cache.
                message = encode(Data(self._next_number, header, 0, loan.slot, loan.generation + 1, nbytes))
                fill(loan.payload, header.tensors, arrays)
                self._ring.seal(loan, (self,), nbytes)
            self._post(message)
        except BaseException:
            if loan is not None:
                self._ring.abort(loan)
            window.give_back(nbytes)
            window.leave()
            self._windows.retire(window)
            raise
        window.leave()
        self._lent[self._next_number] = (window, nbytes, loan, tuple(arrays) if on_device(header.tensors) else ())
        self._next_number += 1

    def cancel(self, request_id: str, epoch: int) -> None:
        """As `Outlet.cancel`."""
        if self._windows.cancel(request_id, epoch):
            with contextlib.suppress(Broken):
                self._post(encode(Cancel(request_id, epoch)))

    def close(self) -> None:
        super().close()
        self._lent.clear()
        self._ring.close()
        self._file.close()

    def _connect(self, endpoint: str) -> None:
        try:
            with channel.socket_address(Path(endpoint.removeprefix("shm:"))) as address:
                self._sock.connect(address)
        except OSError as error:
            raise Broken(f"nobody listens at {endpoint}: {error.strerror or error}") from error
        if not channel.is_ours(self._sock):
            raise Broken(f"{endpoint} belongs to another user")

    def _loan(self, nbytes: int, holder: str) -> Loan:
        while True:
            try:
                return self._ring.loan(nbytes, holder)
            except WouldBlock:
                self._hear(wait=True)

    def _hear(self, *, wait: bool) -> None:
        """Take releases: those that have come, or at least one message of them."""
        if wait:
            self._post(_HURRY)
            self._released(self._recv())
        with contextlib.suppress(BlockingIOError):
            while self._lent:
                nbytes = self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                self._released(_decoded(channel.to_producer, self._view[:nbytes]))

    def _released(self, message: Any) -> None:
        if not isinstance(message, Release):
            raise ProtocolError(f"it said {type(message).__name__}")
        for number in message.numbers:
            if number not in self._lent:
                raise ProtocolError(f"it released chunk {number}, which it does not have")
            window, nbytes, loan, _ = self._lent.pop(number)
            if loan is not None:
                self._ring.release(loan.slot, self)
            window.give_back(nbytes)
            self._windows.retire(window)

    def _recv(self) -> Any:
        try:
            nbytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            raise TimeoutError("the peer releases nothing") from None
        except OSError as error:
            raise Broken(f"the peer is gone: {error.strerror}") from error
        return _decoded(channel.to_producer, self._view[:nbytes])


class BlockingInbound(_End):
    """The consumer's end; listens at once, for one producer."""

    def __init__(self, path: Path, name: str = "inbound", *, release_batch: int = 8, timeout_s: float | None = None) -> None:
        """Raises OSError when `path` can not be bound."""
        self.endpoint = f"shm:{path}"
        self.peer = ""  # the producer's name, once it has introduced itself
        self._name = name
        self._path = path
        self._timeout_s = timeout_s
        self._areas: dict[int, Area] = {}
        self._over = Tombstones()
        self._settled: deque[int] = deque()  # appended by any thread
        self._batch = release_batch
        self._hurry = False  # a send of the producer waits
        self._buffer = bytearray(channel.MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)
        self._takes_fd = True
        self._sock = channel.seqpacket(0)
        try:
            with channel.socket_address(path) as address:
                self._sock.bind(address)
            path.chmod(0o600)
            self._sock.listen(1)
        except BaseException:
            self._sock.close()
            raise

    def accept(self) -> None:
        """Wait for the producer. `recv` does it too."""
        listener = self._sock
        sock, _ = listener.accept()
        listener.close()
        self._path.unlink(missing_ok=True)
        self._use(sock, self._timeout_s)
        if not channel.is_ours(sock):
            raise Broken("the producer belongs to another user")
        message, fd = self._next()
        if not isinstance(message, Hello):
            raise ProtocolError(f"it said {type(message).__name__} before Hello")
        try:
            channel.check_version(message.version)
            self._map(0, message.classes, fd)
        except TransportError as error:
            self._post(encode(Refused(str(error))))
            raise
        self.peer = message.peer
        self._post(encode(Welcome(channel.VERSION, self._name)))

    def recv(self) -> ShmLease:
        """The next chunk. Raises Broken when the producer is gone, ProtocolError, TimeoutError."""
        if not self.peer:
            self.accept()
        while True:
            message, fd = self._next()
            if type(message) is ShmLease:
                message.borrower, message.peer = self, self.peer
                if not self._over.covers(message.header.request_id, message.header.epoch):
                    return message
                message.release()
            elif isinstance(message, Hurry):
                self._hurry = True
                self._flush()
            elif isinstance(message, Cancel):
                self._over.add(message.request_id, message.epoch)
            elif isinstance(message, FileComing):
                self._takes_fd = True
            elif isinstance(message, File):
                self._map(message.file, message.classes, fd)
            elif isinstance(message, FileGone):
                self._areas.pop(message.file, None)
            elif isinstance(message, channel.Ping):
                with contextlib.suppress(Broken):  # said by the next read
                    self._post(encode(channel.Pong()))

    def close(self) -> None:
        super().close()
        self._areas.clear()
        if not self.peer:
            self._path.unlink(missing_ok=True)

    # ---- for leases

    def area(self, file: int) -> Area:
        if file not in self._areas:
            raise Closed(f"the memory of {self.peer} was let go")
        return self._areas[file]

    def settle(self, number: int, nbytes: int) -> None:
        self._settled.append(number)
        if self._hurry or nbytes >= _BIG_BYTES or len(self._settled) >= self._batch:
            self._flush()

    def _flush(self) -> None:
        numbers: list[int] = []
        while self._settled:
            try:
                numbers.append(self._settled.popleft())
            except IndexError:  # another thread was faster
                break
        if numbers:
            self._hurry = False
            with contextlib.suppress(Broken, Closed):  # nobody is left who would want them
                self._post(encode(Release(numbers)))

    # ---- hearing

    def _next(self) -> tuple[Any, int]:
        fd = -1
        try:
            if self._takes_fd:
                nbytes, fd = channel.recv_with_fd(self._sock, self._buffer)
                self._takes_fd = False
            else:
                nbytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            raise TimeoutError("nothing has come") from None
        except OSError as error:
            raise Broken(f"{self.peer or 'the producer'} is gone: {error.strerror}") from error
        if not nbytes:
            self._flush()
        return _decoded(to_consumer, self._view[:nbytes]), fd

    def _map(self, number: int, classes: tuple[tuple[int, int], ...], fd: int) -> None:
        if fd < 0:
            raise ProtocolError(f"no descriptor for area {number}")
        try:
            layout = Layout(classes)
            self._areas[number] = Area(layout, memfile.attach(fd, layout.total_bytes))
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        finally:
            os.close(fd)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    if not len(data):
        raise Broken("the peer has hung up")
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not understood: {error}") from error
