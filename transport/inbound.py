"""The consumer's end of the shared-memory lane from one producer: descriptors become leases, leases become releases.

Knows mappings, leases and messages. Knows nothing of routes, nor of other producers.

Rules
- Only what a message has named is read; the slot's generation is checked when its lease is opened.
- A chunk is released once: when its lease was released (or dropped) and no view of its memory lives. Views may die on any thread.
- Releases go out in batches: at a quarter of a window, or when the loop has done with what it is doing.
- After the producer's end-of-file its open leases may still be read and released, for as long as somebody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transport import channel, memfile
from transport.arena import ARENA_FILE
from transport.channel import Cancel, Data, File, FileComing, FileGone, Hello, Lane, Refused, Release, Welcome
from transport.chunk import on_device, view
from transport.connector import ConnectorStats, Lease
from transport.errors import Broken, Closed, ProtocolError
from transport.layout import Layout
from transport.window import Tombstones

log = logging.getLogger(__name__)

_RELEASES_PER_MESSAGE = 4096


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
        self._tombstones = tombstones
        self._counters = counters
        self._release_batch = release_batch
        self._on_gone = on_gone
        self._files: dict[int, _Mapped] = {}
        self._unreleased = 0  # chunks that came and were not released
        self._watches: dict[int, weakref.ref[np.ndarray]] = {}  # by number: leases released while a view lives
        self._settled: deque[int] = deque()  # numbers to release; appended by any thread
        self._flush_due = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lane = Lane(sock, buffer, channel.to_consumer, self._on_message, self._on_end, takes_fd=True)

    @property
    def is_live(self) -> bool:
        """It has introduced itself and is not gone."""
        return self.peer != "" and self._lane.reading

    def close(self) -> None:
        """Hang up; the producer takes its slots back. Views that live stay valid memory. Idempotent."""
        if not self._lane.closed:
            self._lane.close()
            self._files.clear()
            self._on_gone(self)

    # ---- for leases

    def read(self, data: Data) -> np.ndarray:
        """The chunk's bytes, in place. Raises Broken, Closed, ProtocolError."""
        if data.file == channel.INLINE:
            return np.frombuffer(data.inline, np.uint8)
        mapped = self._files.get(data.file)
        if mapped is None:
            raise Closed(f"the memory of {self.peer} was let go")
        return mapped.read(data)

    def release(self, number: int) -> None:
        self._settled.append(number)
        if len(self._settled) >= self._release_batch and threading.get_ident() == self._thread:
            self._flush()
        else:
            self._flush_soon()

    def release_unviewed(self, number: int, memory: np.ndarray) -> None:
        """Release when the last view of `memory` has died, wherever that is: on any thread, inside any allocation."""

        def on_dead(watch: weakref.ref[np.ndarray]) -> None:
            self._watches.pop(number, None)
            self._settled.append(number)
            self._flush_soon()

        self._watches[number] = weakref.ref(memory, on_dead)

    def _flush_soon(self) -> None:
        if self._flush_due:
            return
        self._flush_due = True
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._flush)
            else:
                self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:
            if not self._loop.is_closed():  # closed before the last view died: nobody is left to tell
                raise

    def _flush(self) -> None:
        """Release all that has settled."""
        self._flush_due = False
        numbers: list[int] = []
        while self._settled:
            numbers.append(self._settled.popleft())
        if not numbers or self._lane.closed:
            return
        self._unreleased -= len(numbers)
        with contextlib.suppress(Broken):  # nobody is left who would want them
            for start in range(0, len(numbers), _RELEASES_PER_MESSAGE):
                self._lane.post(channel.encode(Release(numbers[start : start + _RELEASES_PER_MESSAGE])))
        if not self._lane.reading and not self._unreleased:
            self.close()

    # ---- hearing

    def _on_message(self, message: Any, fd: int) -> None:
        try:
            if type(message) is Data and self.peer:
                self._on_data(message)
            elif isinstance(message, Hello):
                self._on_hello(message, fd)
            else:
                self._on_word(message, fd)
        except ProtocolError as error:
            self._on_end(str(error))
        finally:
            if fd >= 0:  # a mapping has its own
                os.close(fd)

    def _on_data(self, data: Data) -> None:
        self._unreleased += 1
        header = data.header
        if self._tombstones.covers(header.request_id, header.epoch):
            self._counters.dropped_stale += 1
            self.release(data.number)
            return
        self._counters.chunks_received += 1
        self._counters.bytes_received += data.nbytes
        self._callbacks.on_chunk(ShmLease(self, data))

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
                self._files.pop(message.file, None)

    def _map(self, number: int, classes: tuple[tuple[int, int], ...], fd: int) -> None:
        if fd < 0 or number in self._files:
            raise ProtocolError(f"no descriptor for area {number}, or a second one")
        try:
            layout = Layout(classes)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        self._files[number] = _Mapped(layout, memfile.attach(fd, layout.total_bytes))

    def _on_end(self, why: str) -> None:
        peer = self.peer
        orderly = why == channel.END_OF_FILE
        if not orderly:
            log.warning("lane from %s ended: %s", peer or "an unknown process", why)
        if not orderly or not self._unreleased or not peer:
            self.close()
        if peer:
            self._callbacks.on_lost(peer)


class ShmLease(Lease):
    """A chunk that lies in its producer's memory (or came inline)."""

    __slots__ = ("_data", "_inbound", "_memory", "header", "peer")

    def __init__(self, inbound: Inbound, data: Data) -> None:
        self.header = data.header
        self.peer = inbound.peer
        self._inbound = inbound
        self._data: Data | None = data
        self._memory: np.ndarray | None = None  # all views hang on this one

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Raises Closed after `release`, Broken when the producer took this process for dead and used the slot again."""
        if self._data is None:
            raise Closed("this lease was released")
        if not self.header.tensors:
            return ()
        if self._memory is None:
            self._memory = self._inbound.read(self._data)
        return tuple(view(spec, self._memory) for spec in self.header.tensors)

    def release(self) -> None:
        data, memory = self._data, self._memory
        if data is None:
            return
        self._data = self._memory = None
        if memory is None or (data.file == channel.INLINE and not on_device(self.header.tensors)):
            self._inbound.release(data.number)
        else:
            self._inbound.release_unviewed(data.number, memory)

    def __del__(self) -> None:
        self.release()


class _Mapped:
    """An area of the producer, read-only."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self._layout = layout
        self._memory = memory
        self._lines = memory[layout.line_offset(0) : layout.line_offset(layout.slots)].cast("Q")
        self._words_per_line = len(self._lines) // layout.slots

    def read(self, data: Data) -> np.ndarray:
        layout, slot = self._layout, data.slot
        if not 0 <= slot < layout.slots or not 0 <= data.nbytes <= layout.slot_bytes(slot):
            raise ProtocolError(f"a chunk of {data.nbytes} bytes in slot {slot}, which the area does not have")
        if self._lines[slot * self._words_per_line] != data.generation:
            raise Broken(f"slot {slot} was given to another chunk: its producer took this process for dead")
        return np.frombuffer(self._memory, np.uint8, data.nbytes, layout.payload_offset[slot])
