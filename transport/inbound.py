"""The consumer's end of the shared-memory lane from one producer: descriptors become leases, leases become releases.

Knows mappings and messages. Knows nothing of routes, nor of other producers.

Rules
- Releases go out in batches: a quarter of a window, or what has settled within 50 ms. They go out as soon as the loop has done with what it
  is doing when the chunk was big (its slot is still warm in the cache), when a send of the producer waits, and when it has hung up.
- After the producer's end-of-file its open leases may still be read and released, for as long as somebody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from transport import channel, memfile
from transport.arena import ARENA_FILE
from transport.channel import Cancel, File, FileComing, FileGone, Hello, Hurry, Lane, Refused, Release, Welcome
from transport.connector import ConnectorStats, Lease
from transport.errors import Broken, Closed, ProtocolError
from transport.layout import Layout
from transport.lease import Area, ShmLease, to_consumer
from transport.window import Tombstones

log = logging.getLogger(__name__)

_RELEASES_PER_MESSAGE = 4096
_LATE_S = 0.05  # a release that nobody waits for
_BIG_BYTES = 256 * 2**10


class Callbacks(NamedTuple):
    """What `Connector.open` was given."""

    on_chunk: Callable[[Lease], None]
    on_lost: Callable[[str], None]
    on_cancel: Callable[[str, int], None]


class Inbound:
    """`on_gone(inbound)`: nothing of it is left."""

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        callbacks: Callbacks,
        tombstones: Tombstones,
        counters: ConnectorStats,
        release_batch: int,
        buffer: bytearray,
        on_gone: Callable[[Inbound], None],
    ) -> None:
        self.peer = ""  # the producer's name; "" until its Hello
        self._name = name
        self._callbacks = callbacks
        self._on_chunk = callbacks.on_chunk
        self._tombstones = tombstones
        self._over = tombstones.epochs.get
        self._counters = counters
        self._release_batch = release_batch
        self._on_gone = on_gone
        self._areas: dict[int, Area] = {}
        self._unreleased = 0  # chunks that came and were not released
        self._settled: deque[int] = deque()  # numbers to release; appended by any thread
        self._flush_due = False  # in the next turn of the loop
        self._late_due = False  # within _LATE_S
        self._hurry = False  # a send of the producer waits
        self._is_calm = False  # what settles may wait for a flush that is due: nothing presses
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._lane = Lane(sock, buffer, to_consumer, self._on_message, self._on_end, takes_fd=True)

    @property
    def is_live(self) -> bool:
        """It has introduced itself and is not gone."""
        return self.peer != "" and self._lane.reading

    def close(self) -> None:
        """Hang up; the producer takes its slots back. Views that live stay valid memory. Idempotent."""
        if not self._lane.closed:
            self._lane.close()
            self._areas.clear()
            self._on_gone(self)

    # ---- for leases

    def area(self, file: int) -> Area:
        area = self._areas.get(file)
        if area is None:
            raise Closed(f"the memory of {self.peer} was let go")
        return area

    def settle(self, number: int, nbytes: int) -> None:
        settled = self._settled
        settled.append(number)
        if not self._is_calm or len(settled) >= self._release_batch or nbytes >= _BIG_BYTES or get_ident() != self._thread:
            self._plan_flush(nbytes)

    def _plan_flush(self, nbytes: int) -> None:
        """As soon as what settled last, of `nbytes`, asks for."""
        try:
            if get_ident() != self._thread:
                self._loop.call_soon_threadsafe(self._flush)
            elif self._flush_due:
                pass
            elif self._hurry or nbytes >= _BIG_BYTES or len(self._settled) >= self._release_batch or not self._lane.reading:
                self._flush_due = True
                self._loop.call_soon(self._flush)
            else:
                self._is_calm = True
                if not self._late_due:
                    self._late_due = True
                    self._loop.call_later(_LATE_S, self._flush_late)
        except RuntimeError:
            if not self._loop.is_closed():  # closed before the last view died: nobody is left to tell
                raise

    def _flush_late(self) -> None:
        self._late_due = self._is_calm = False
        self._flush()

    def _flush(self) -> None:
        """Release all that has settled."""
        self._flush_due = False
        settled = self._settled
        numbers = [settled.popleft() for _ in range(len(settled))]
        if not numbers or self._lane.closed:
            return
        self._hurry = False
        self._unreleased -= len(numbers)
        with contextlib.suppress(Broken):  # nobody is left who would want them
            for start in range(0, len(numbers), _RELEASES_PER_MESSAGE):
                self._lane.post(channel.encode(Release(numbers[start : start + _RELEASES_PER_MESSAGE])))
        if not self._lane.reading and not self._unreleased:
            self.close()

    # ---- hearing

    def _on_message(self, message: Any, fd: int) -> None:
        if type(message) is ShmLease and fd < 0 and self.peer:
            self._unreleased += 1
            message.borrower, message.peer = self, self.peer
            header = message.header
            over = self._over(header.request_id)
            if over is None or header.epoch > over:
                counters = self._counters
                counters.chunks_received += 1
                counters.bytes_received += message.nbytes
                self._on_chunk(message)
            else:
                self._counters.dropped_stale += 1
                self._press()  # of what is over, nothing stays behind
                message.release()
            return
        try:
            if isinstance(message, Hello):
                self._on_hello(message, fd)
            else:
                self._on_word(message, fd)
        except ProtocolError as error:
            self._on_end(str(error))
        finally:
            if fd >= 0:  # a mapping has its own
                os.close(fd)

    def _press(self) -> None:
        """What settles next is released at once."""
        self._hurry = True
        self._is_calm = False

    def _on_hello(self, hello: Hello, fd: int) -> None:
        try:
            if self.peer:
                raise ProtocolError("it said Hello twice")
            channel.check_version(hello.version)
            self._map(ARENA_FILE, hello.classes, fd)
        except ProtocolError as error:
            with contextlib.suppress(Broken):  # it did not wait for the answer
                self._lane.post(channel.encode(Refused(str(error))))
            raise
        self.peer = hello.peer
        with contextlib.suppress(Broken):  # end-of-file is about to come
            self._lane.post(channel.encode(Welcome(channel.VERSION, self._name)))

    def _on_word(self, message: Any, fd: int) -> None:
        if not self.peer:
            raise ProtocolError(f"it said {type(message).__name__} before Hello")
        match message:
            case Cancel():
                if self._tombstones.add(message.request_id, message.epoch):
                    self._callbacks.on_cancel(message.request_id, message.epoch)
            case FileComing():
                self._lane.take_fd()
            case File():
                self._map(message.file, message.classes, fd)
            case FileGone():
                self._areas.pop(message.file, None)
            case Hurry():
                self._press()
                if self._settled:
                    self._flush()
            case channel.Ping():
                with contextlib.suppress(Broken):  # it did not wait for the answer
                    self._lane.post(channel.encode(channel.Pong()))

    def _map(self, number: int, classes: tuple[tuple[int, int], ...], fd: int) -> None:
        if fd < 0 or number in self._areas:
            raise ProtocolError(f"no descriptor for area {number}, or a second one")
        try:
            layout = Layout(classes)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        self._areas[number] = Area(layout, memfile.attach(fd, layout.total_bytes))

    def _on_end(self, why: str) -> None:
        peer = self.peer
        orderly = why == channel.END_OF_FILE
        if not orderly:
            log.warning("lane from %s ended: %s", peer or "an unknown process", why)
        self._is_calm = False
        self._flush()
        if not orderly or not self._unreleased or not peer:
            self.close()
        if peer:
            self._callbacks.on_lost(peer)
