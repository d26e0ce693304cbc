"""The SEQPACKET lane of one pair: descriptors one way, releases the other way, joined to the event loop.

    producer                                consumer
      Hello + arena's descriptor   ------>
                                   <------  Welcome | Refused
      FileComing, File + descriptor  ---->  (a jumbo area, before the first chunk that lies in it)
      Data, Cancel, FileGone, Hurry  ---->
                                   <------  Release (many chunks at once)
      Ping                         ------>
                                   <------  Pong
      end-of-file = that side is gone

Knows sockets and messages. Knows nothing of slots, credit or requests.

Rules
- Nothing blocks and nothing spins: what the socket does not take now waits in a queue for `add_writer`; credit bounds the queue.
- At most 64 messages are read per callback, so that the loop's other work gets its turn; looking for one that is not there costs as much
  as reading one, so where messages come alone they are read one per callback.
- File descriptors are taken only with the two messages that announce them.
- A message that can not be understood ends the lane.

Source: a message that names a slot orders its bytes for the reader (the kernel's socket lock does), so no shared word is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from transport.chunk import ChunkHeader
from transport.errors import Broken, ProtocolError, TooLarge

VERSION = 2  # of these messages; 1 knew no Hurry, Ping and Pong
MAX_MESSAGE_BYTES = 128 * 2**10
MAX_READS = 64  # messages per callback
_LONE = 16  # callbacks that read one message only, after one that found no second
_ONE, _MANY = range(1), range(MAX_READS)
INLINE = -1  # `Data.file` of a payload that came along
END_OF_FILE = "end-of-file"  # what `on_end` is told when the peer hung up
_SEND_BUFFER_BYTES = 4 * 2**20  # about ten thousand descriptors, as far as the system allows it
_SO_SNDBUFFORCE = 32
_MAX_ADDRESS_BYTES = 107  # of a unix socket


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """Who dials, and the slots of its arena, whose descriptor comes along."""

    version: int
    peer: str
    classes: tuple[tuple[int, int], ...]


class Data(msgspec.Struct, array_like=True, gc=False, tag=1):
    """One chunk: its header, and where its payload lies. Read as a `ShmLease` (lease.py), which adds what no message says."""

    number: int  # counts the chunks of this lane; the release names it
    header: ChunkHeader
    file: int  # which area; INLINE: the payload came along
    slot: int
    generation: int  # of the slot, when it was sealed
    nbytes: int
    inline: bytes = b""


class Cancel(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """This request is over; what comes of it after this is not wanted."""

    request_id: str
    epoch: int


class FileComing(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The next message carries a descriptor."""


class File(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """A jumbo area, whose descriptor comes along."""

    file: int
    classes: tuple[tuple[int, int], ...]


class FileGone(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """No chunk will lie in this jumbo area any more."""

    file: int


class Hurry(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """A send waits for credit or for a slot: release what you have, and what you have next, at once."""


class Ping(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """A send has waited for long: say that you live."""


ToConsumer = Hello | Data | Cancel | FileComing | File | FileGone | Hurry | Ping


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """Answer to Hello."""

    version: int
    peer: str


class Release(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """These chunks are not read any more: their slots and their credit come back."""

    numbers: list[int]


class Refused(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """Answer to a Hello that does not fit; the lane ends."""

    reason: str


class Pong(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Answer to Ping."""


ToProducer = Welcome | Release | Refused | Pong

encode = msgspec.msgpack.Encoder().encode
to_producer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToProducer)  # the other way: in lease.py


def check_size(data: bytes) -> None:
    """Raises TooLarge: the lane is for descriptors; what is big belongs into a tensor."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a message of {len(data)} bytes, and the lane takes {MAX_MESSAGE_BYTES}: put what is big into a tensor, not into meta"
        )


class Descriptor(Protocol):
    """Something with a descriptor to hand over; kept open until it was sent."""

    fd: int


class Lane:
    """One end of a lane.

    `on_message(message, fd)` and `on_end(why)` run on the loop; `on_end` once, after the last message, and never after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        buffer: bytearray,  # MAX_MESSAGE_BYTES to read into; may be shared by the lanes of one loop
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Any, int], None],
        on_end: Callable[[str], None],
        *,
        takes_fd: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._recv_into, self._send_now = sock.recv_into, sock.send
        self._fd = sock.fileno()
        self._buffer = buffer
        self._lone = 0
        self._view = memoryview(buffer)
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_end = on_end
        self._takes_fd = takes_fd  # the next message brings a descriptor
        self._queue: deque[tuple[bytes, Descriptor | None]] = deque()
        self._reading = True
        self._finishing = False
        self._hung_up = False  # the peer takes nothing any more
        self.closed = False
        self._loop.add_reader(self._fd, self._on_readable)

    @property
    def reading(self) -> bool:
        """The peer's end-of-file has not come yet."""
        return self._reading

    def post(self, data: bytes, file: Descriptor | None = None) -> None:
        """Send one message, now or as soon as the socket takes it; never waits. Raises Broken when the peer is gone, TooLarge."""
        if len(data) > MAX_MESSAGE_BYTES:
            check_size(data)
        if self._hung_up or self.closed:
            raise Broken("the peer has hung up")
        if file is None and not self._queue:
            try:
                self._send_now(data)
                return
            except OSError:  # full or gone: said below
                pass
        if self._queue or not self._send(data, file):
            if not self._queue:
                self._loop.add_writer(self._fd, self._on_writable)
            self._queue.append((data, file))
        elif self._hung_up:
            raise Broken("the peer has hung up")

    def read(self) -> None:
        """Hear at once what has come, where the loop would only come to it later."""
        if self._reading:
            self._on_readable()

    def take_fd(self) -> None:
        """The next message brings a descriptor."""
        self._takes_fd = True

    def finish(self) -> None:
        """No more posts: the peer reads end-of-file after what is queued. Messages from it still come. Idempotent."""
        self._finishing = True
        if not self._queue and not self.closed:
            with contextlib.suppress(OSError):  # the peer was faster
                self._sock.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """No more posts, and what is queued is dropped: the peer reads end-of-file after what it was sent. Messages from it still come."""
        self._hung_up = True
        if self._queue:
            self._queue.clear()
            self._loop.remove_writer(self._fd)
        self.finish()

    def close(self) -> None:
        """Hang up. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._stop_reading()
        if self._queue:
            self._queue.clear()
            self._loop.remove_writer(self._fd)
        self._sock.close()

    # ---- reading

    def _on_readable(self) -> None:
        reads, lone = _MANY, self._lone
        if lone:
            reads, self._lone = _ONE, lone - 1
        for already in reads:
            fd = -1
            try:
                if self._takes_fd:
                    nbytes, fd = self._recv_with_fd()
                else:
                    nbytes = self._recv_into(self._buffer)
            except BlockingIOError:
                if already == 1:
                    self._lone = _LONE
                return
            except ConnectionResetError:
                self._lone = 0  # it hung up with messages of ours unread; what it sent before still comes,
                self._on_readable()  # and libuv does not call again after an error
                return
            if nbytes == 0:
                self._end(END_OF_FILE)
                return
            try:
                message = self._decode(self._view[:nbytes])
            except msgspec.MsgspecError as error:  # not decodable, or not of this version
                if fd >= 0:
                    os.close(fd)
                self._end(f"not understood: {error}")
                return
            self._on_message(message, fd)
            if not self._reading:
                return

    def _recv_with_fd(self) -> tuple[int, int]:
        message = recv_with_fd(self._sock, self._buffer)
        self._takes_fd = False  # only now: there may have been nothing to read yet
        return message

    def _end(self, why: str) -> None:
        self._stop_reading()
        self._on_end(why)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    # ---- writing

    def _send(self, data: bytes, file: Descriptor | None) -> bool:
        """False when the socket is full. A peer that is gone takes everything: end-of-file says so."""
        try:
            if file is None:
                self._sock.send(data)
            else:
                socket.send_fds(self._sock, [data], [file.fd])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._hung_up = True
        return True

    def _on_writable(self) -> None:
        while self._queue:
            if not self._send(*self._queue[0]):
                return
            self._queue.popleft()
        self._loop.remove_writer(self._fd)
        if self._finishing:
            self.finish()


class Listener:
    """A socket in a directory of this user; `on_peer(socket)` for each process of this user that connects."""

    def __init__(self, path: Path, on_peer: Callable[[socket.socket], None]) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._on_peer = on_peer
        self._sock = seqpacket()
        try:
            with socket_address(path) as address:
                self._sock.bind(address)
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._sock.listen(1024)
        except BaseException:
            self._sock.close()
            raise
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._path.unlink(missing_ok=True)

    def _on_readable(self) -> None:
        for _ in range(MAX_READS):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            if is_ours(sock):
                enlarge(sock)
                self._on_peer(sock)
            else:
                sock.close()


async def connect(path: Path) -> socket.socket:
    """Raises Broken when nobody of this user listens at `path`."""
    sock = seqpacket()
    try:
        with socket_address(path) as address:
            try:
                sock.connect(address)
            except BlockingIOError:  # its queue of callers is full, and there is no event for that: wait on a thread
                sock.setblocking(True)
                sock.settimeout(5.0)
                await asyncio.to_thread(sock.connect, address)
                sock.setblocking(False)
        if not is_ours(sock):
            raise Broken(f"{path} belongs to another user")
        enlarge(sock)
    except OSError as error:
        sock.close()
        raise Broken(f"nobody listens at {path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def recv_with_fd(sock: socket.socket, buffer: bytearray) -> tuple[int, int]:
    """Read one message; its length, and the descriptor that came along (-1: none)."""
    nbytes, ancillary, _, _ = sock.recvmsg_into([buffer], socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) == 4:
            return nbytes, struct.unpack("i", data)[0]
    return nbytes, -1


def check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the shared-memory lane, this process {VERSION}")


def seqpacket(kind: int = socket.SOCK_NONBLOCK) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | kind)


def is_ours(sock: socket.socket) -> bool:
    """The process at the other end belongs to this user."""
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def enlarge(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # cut to net.core.wmem_max


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """`path` as a socket address, by way of its directory's descriptor when it is too long for one."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
