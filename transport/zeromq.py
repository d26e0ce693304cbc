"""A ZeroMQ socket joined to the running event loop: what the lanes and the TCP connector stand on.

Knows frames, peers' routing ids and the end of a connection. Knows nothing of messages, chunks or credit.

Rules
- The socket's file descriptor is edge-triggered: it is drained until nothing is left, and looked at again after every send. At most
  `DRAIN_AT_ONCE` messages are taken per turn of the loop; the rest follows in the next turn.
- Nothing waits except `close`, which ends when ZeroMQ has handed over or dropped the last message, and is bounded.
- One ZeroMQ context per process, with one I/O thread. Sockets belong to the loop that made them.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import importlib
import ipaddress
import itertools
import logging
import os
import socket as sockets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.errors import Broken, Closed, WouldBlock

log = logging.getLogger(__name__)

DRAIN_AT_ONCE = 64
HEARTBEAT_MS = 1000  # tcp only: a dead host sends no end-of-file
HEARTBEAT_TIMEOUT_MS = 3000
RECONNECT_MS = 20  # first try; doubles up to
RECONNECT_MAX_MS = 1000
HANDSHAKE_MS = 5000  # a connection that says nothing is dropped


class CurveKeys(msgspec.Struct, frozen=True):
    """The key pair of a run, held by every member of it; whoever has it may connect, and traffic is encrypted.

    The public half never crosses the wire (a client proves that it knows it), so keep both halves as secret as the run's token.
    """

    public: str  # Z85, 40 characters
    secret: str

    @classmethod
    def generate(cls) -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def require_curve(endpoint: str, curve: CurveKeys | None) -> None:
    """Raises ValueError for a tcp endpoint beyond loopback without keys: its traffic would be open to the network."""
    if curve is not None or not endpoint.startswith("tcp://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host in ("localhost", "lo")
    if not is_loopback:
        raise ValueError(
            f"{endpoint}: got no CURVE keys, expected some beyond loopback\nhint: give the run a key pair, or use tcp://127.0.0.1"
        )


class LoopSocket:
    """One ROUTER or DEALER on the loop that made it; the owner's callbacks run on that loop and must not block.

    `on_frames(frames)`: a message has arrived; `zmq.Frame`s when `copy` is false, else bytes. Without `copy`, what is sent
        from 64 KiB on is not copied either: it must not change any more.
    `on_event(event, value)`: a monitor event (`zmq.Event`) and its value, mostly the connection's file descriptor.
    `on_drained()`: everything that had arrived has been delivered.
    """

    def __init__(
        self,
        kind: int,
        on_frames: Callable[[list[Any]], None],
        *,
        on_event: Callable[[zmq.Event, int], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        copy: bool = True,
        options: dict[int, int | bytes] | None = None,
    ) -> None:
        self.endpoint = ""
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_event = on_event
        self._on_drained = on_drained
        self._copy = copy
        self._scheduled = False  # a drain is due in the next turn
        self._linger_s = 0.0
        self._ipc_file: tuple[str, int] | None = None  # path and inode of what we bound
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._socket: zmq.Socket[bytes] = _context().socket(kind)
        # An exit that never closes must not hang, so nothing lingers unless `close` says so.
        for option, value in {zmq.LINGER: 0, zmq.HANDSHAKE_IVL: HANDSHAKE_MS, **(options or {})}.items():
            self._socket.setsockopt(option, value)
        address = f"inproc://monitor-{next(_numbers)}"
        self._socket.monitor(address, zmq.EVENT_ALL if on_event else zmq.EVENT_MONITOR_STOPPED)
        self._monitor: zmq.Socket[bytes] = _context().socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(address)
        self._loop.add_reader(self._socket.FD, self.drain)
        self._loop.add_reader(self._monitor.FD, self.drain_events)
        # ZeroMQ tells only a reader that has found nothing: before the first look, a message may come without a sign.
        self._loop.call_soon(self.drain_events)
        self.drain_soon()

    def bind(self, endpoint: str, curve: CurveKeys | None = None) -> str:
        """Listen; returns the real endpoint, its port filled in. Raises OSError (in use, no such folder) or ValueError."""
        require_curve(endpoint, curve)
        if curve is not None:
            self._socket.curve_server = True
            self._set_curve(curve)
        path = _ipc_path(endpoint)
        if path:
            _refuse_if_alive(path)
        self._configure_for(endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if path:
            os.chmod(path, 0o600)
            self._ipc_file = (path, os.stat(path).st_ino)
        return self.endpoint

    def connect(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        """Join what listens there, now or later. Raises ValueError for an endpoint that can not be."""
        require_curve(endpoint, curve)
        if curve is not None:
            self._socket.curve_serverkey = curve.public.encode()
            self._set_curve(curve)
        self._configure_for(endpoint)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{endpoint}: {error.strerror}") from error
        self.endpoint = endpoint

    def send(self, frames: Sequence[Any]) -> None:
        """Queue one message; never waits. Raises WouldBlock (full), Broken (no such peer, ROUTER), Closed."""
        if self._socket.closed:
            raise Closed(self.endpoint)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=self._copy)
        except zmq.Again:
            raise WouldBlock(f"{self.endpoint}: the queue is full") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise Broken(f"{self.endpoint}: no such peer") from None
        finally:
            # The send may have consumed the edge that announced a message.
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.drain_soon()

    def drain_events(self) -> None:
        """Deliver the monitor events that have come; what happened before a message arrived is among them."""
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                self._loop.remove_reader(self._monitor.FD)
                self._monitor.close()
                self._stopped.set_result(None)
            elif self._on_event is not None:
                self._on_event(zmq.Event(event["event"]), event["value"])

    def shut(self, linger_s: float = 0.0) -> None:
        """Nothing more is received or taken; what is queued may go out for at most `linger_s`. Idempotent, never waits."""
        if not self._socket.closed:
            self._linger_s = linger_s
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=int(linger_s * 1000))

    async def close(self, linger_s: float = 0.0) -> None:
        """`shut`, and wait until what was queued has gone out or been dropped. Idempotent."""
        self.shut(linger_s)
        # ZeroMQ takes a socket apart in its own threads; the monitor's last event says that it is done.
        await asyncio.wait((self._stopped,), timeout=self._linger_s + 0.5)
        if not self._stopped.done():
            log.warning("zeromq.close_late endpoint=%s linger_s=%s", self.endpoint, self._linger_s)
        if self._ipc_file is not None:
            (path, inode), self._ipc_file = self._ipc_file, None
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # not the file of somebody who has bound the path since
                    os.unlink(path)

    def drain_soon(self) -> None:
        """Have another look at what has come, in the loop's next turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def drain(self) -> None:
        """Deliver what has come."""
        for _ in range(DRAIN_AT_ONCE):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
            except zmq.Again:
                if self._on_drained is not None:
                    self._on_drained()
                return
            try:
                self._on_frames(frames)
            except Exception:
                # The lane must outlive one message: the edge is spent, and those behind it would wait for the next one's.
                log.exception("zeromq.callback_failed endpoint=%s", self.endpoint)
        self.drain_soon()

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self.drain()

    def _set_curve(self, curve: CurveKeys) -> None:
        self._socket.curve_publickey = curve.public.encode()
        self._socket.curve_secretkey = curve.secret.encode()

    def _configure_for(self, endpoint: str) -> None:
        if endpoint.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            if endpoint.startswith("tcp://["):
                self._socket.setsockopt(zmq.IPV6, 1)


_numbers = itertools.count()  # of sockets; an id() may come again while its old monitor still lives


@cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    # ZeroMQ's thread reads what is in flight from the interpreter's memory, so at exit it must end before that memory is freed: ours
    # must run before the exit handler that pyzmq's garbage collector registers, thus be registered after it.
    importlib.import_module("zmq.utils.garbage")
    atexit.register(context.destroy, linger=0)
    return context


def _ipc_path(endpoint: str) -> str:
    """The file of an ipc endpoint; "" for tcp and for abstract names."""
    path = endpoint.removeprefix("ipc://")
    return "" if path == endpoint or path.startswith("@") else path


def _refuse_if_alive(path: str) -> None:
    # ZeroMQ takes the path of a living server without a word; a file that a dead one left may go.
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # alive, and many are waiting to be accepted
            pass
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, f"ipc://{path}: somebody listens there already")
