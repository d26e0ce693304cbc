"""A chunk that lies in its producer's memory: how it is read in place, and how its end is noticed.

Knows mappings and descriptors. Knows nothing of sockets or loops; what is released goes to a `Borrower`.

Rules
- Only what a message has named is read; the slot's generation is checked when its lease is opened.
- A chunk is released once: when its lease was released (or dropped) and no view of its memory lives. Views may die on any thread.
- What came inline is released with its lease, except where it names device memory: that waits for the views as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from transport import channel
from transport.channel import INLINE, Data
from transport.chunk import on_device, view
from transport.errors import Broken, Closed, ProtocolError
from transport.layout import Layout

_AT_ONCE = 2**62  # as the bytes of a chunk: its release waits for no other


class Borrower(Protocol):
    """Who has the mappings, and tells the producer what is not read any more."""

    peer: str

    def area(self, file: int) -> Area:
        """Raises Closed."""

    def settle(self, number: int, nbytes: int) -> None:
        """Release that chunk, soon. May be called from any thread, inside any allocation."""


class Area:
    """A file of the producer, read-only."""

    __slots__ = ("_lines", "_memory", "_offsets", "_sizes", "_words_per_line")

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self._sizes = [layout.slot_bytes(slot) for slot in range(layout.slots)]
        self._offsets = layout.payload_offset
        self._memory = memory
        self._lines = memory[layout.line_offset(0) : layout.line_offset(layout.slots)].cast("Q")
        self._words_per_line = len(self._lines) // layout.slots

    def read(self, data: ShmLease) -> _Payload:
        """The chunk's bytes, in place. Raises Broken, ProtocolError."""
        slot, nbytes = data.slot, data.nbytes
        if not 0 <= slot < len(self._sizes) or not 0 <= nbytes <= self._sizes[slot]:
            raise ProtocolError(f"a chunk of {nbytes} bytes in slot {slot}, which the area does not have")
        if self._lines[slot * self._words_per_line] != data.generation:
            raise Broken(f"slot {slot} was given to another chunk: its producer took this process for dead")
        return _Payload(nbytes, np.uint8, self._memory, self._offsets[slot])


class _Payload(np.ndarray):
    """The bytes of one chunk. All arrays over them hang on this one; with the last of them it dies, and settles the chunk."""

    borrower: Borrower | None = None  # stays None in what is sliced from one
    number = 0

    def __del__(self) -> None:
        borrower = self.borrower
        if borrower is not None:
            borrower.settle(self.number, self.nbytes)


class _BlockPayload(_Payload):
    """The same where it came inline and names device memory, which its producer may wait for without a word on the lane."""

    def __del__(self) -> None:
        if self.borrower is not None:
            self.borrower.settle(self.number, _AT_ONCE)


if TYPE_CHECKING:
    _Lender = Borrower | None
    _Seen = _Payload | None
    _Name = str
else:
    _Lender = _Seen = _Name = None  # what a message may say of them


class ShmLease(Data, gc=True, eq=False, tag=1):
    """A chunk that lies in its producer's memory (or came inline): its `Data`, with what makes it a `Lease`.

    Decoded as it stands, since this is on every chunk's way; a borrower sets `borrower` and `peer`, which no message can say.
    """

    borrower: _Lender = None  # None: not lent, or released
    payload: _Seen = None  # of the views, once there are some
    peer: _Name = None  # type: ignore[assignment] # the producer's name

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Raises Closed after `release`, Broken when the producer took this process for dead and used the slot again."""
        if self.borrower is None:
            raise Closed("this lease was released")
        specs = self.header.tensors
        if not specs:
            return ()
        payload: Any = self.payload
        if payload is None:
            payload = self.inline if self.file == INLINE and not on_device(specs) else self._open()
        arrays = []
        for spec in specs:
            arrays.append(view(spec, payload))
        return tuple(arrays)

    def release(self) -> None:
        borrower = self.borrower
        if borrower is not None:
            self.borrower = None
            if self.payload is None:
                borrower.settle(self.number, self.nbytes)
            else:
                self.payload = None  # it settles the chunk when it dies: now, or with the last view

    def __del__(self) -> None:
        try:
            is_out = self.borrower is not None
        except AttributeError:  # a message that was not understood
            return
        if is_out:
            self.release()

    def _open(self) -> _Payload:
        assert self.borrower is not None
        if self.file == INLINE:
            payload: _Payload = _BlockPayload(len(self.inline), np.uint8, self.inline)
        else:
            payload = self.borrower.area(self.file).read(self)
        payload.borrower, payload.number = self.borrower, self.number
        self.payload = payload
        return payload


to_consumer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    channel.Hello | ShmLease | channel.Cancel | channel.FileComing | channel.File | channel.FileGone | channel.Hurry | channel.Ping
)
