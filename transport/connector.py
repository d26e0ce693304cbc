"""The data path between processes: one interface, several ways (shared memory, TCP, in-process).

A process has one `Connector` per scheme. It *opens* to be reachable (consumer side) and *dials* peers (producer side):

    producer                                             consumer
    outlet = await connector.dial(endpoint)              endpoint = await connector.open(on_chunk, on_lost)
    await outlet.send(chunk-header, arrays)   -- data -> on_chunk(lease)        called on the loop, in order per producer
              <------------------------- release ------- lease.release()

Knows headers, bytes and peers. Knows nothing of routes, stages' meaning or HTTP.

Rules
- Endpoints are opaque strings ("shm:/run/dir/x.sock", "tcp://127.0.0.1:4711", "memory:x"); the scheme picks the connector.
- All requests of one (producer, consumer) pair share one channel; chunks of one request stay in order.
- Credit: a request may have at most `window_chunks` chunks and `window_bytes` bytes unreleased on a channel; only that request waits.
- Nothing polls and nothing blocks the loop. A peer's death is `on_lost` (consumer) or `Broken` (producer), within milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from transport.chunk import ChunkHeader


class ConnectorOptions(msgspec.Struct, frozen=True):
    """Sizes and bounds; `[deploy.<stage>.connector]` in pipeline.toml."""

    arena_bytes: int = 64 * 2**20  # shared memory of one producing replica, allocated and touched at start
    window_chunks: int = 32  # unreleased chunks of one request on one edge
    window_bytes: int = 32 * 2**20  # unreleased bytes of one request on one edge
    max_chunk_bytes: int = 256 * 2**20  # one chunk; larger is TooLarge
    inline_bytes: int = 16 * 2**10  # payloads up to this ride inside the descriptor: below it a slot costs more than the copies
    hang_timeout_s: float = 10.0  # a consumer for which a send waits and that says nothing for so long hangs, and is given up


@dataclass(slots=True)
class ConnectorStats:
    """Counters since start, for metrics and tests."""

    chunks_sent: int = 0
    bytes_sent: int = 0
    chunks_received: int = 0
    bytes_received: int = 0
    credit_waits: int = 0  # sends that had to wait for credit or a slot
    credit_wait_ns: int = 0
    slots_in_use: int = 0
    bytes_in_use: int = 0
    bytes_total: int = 0
    peers: int = 0
    dropped_stale: int = 0  # chunks of cancelled requests released unread
    peers_hung: int = 0  # consumers that were given up because they hung
    bytes_quarantined: int = 0  # what those may still read


class Lease(Protocol):
    """An arrived chunk whose bytes are borrowed from the producer."""

    header: ChunkHeader
    peer: str  # the producer's name, as said in its HELLO

    def arrays(self) -> tuple[np.ndarray, ...]:
        """One read-only array per `header.tensors`, viewing the producer's memory. The slot stays leased while any of them lives."""

    def release(self) -> None:
        """Give the credit back, and the slot as soon as no array of `arrays()` lives. Idempotent; never waits."""


class Outlet(Protocol):
    """The producer's end of a channel to one consumer."""

    endpoint: str

    async def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        """Copy `arrays` (described, in order, by `header.tensors`) into the ring and tell the consumer.

        Waits: for this request's credit and a free slot; the caller bounds it (asyncio.timeout).
        Cancelled: nothing of this chunk is seen by the consumer.
        Raises: TooLarge, Broken (consumer gone), Closed.
        """

    def cancel(self, request_id: str, epoch: int) -> None:
        """Say in-lane that this request is over: waiting sends fail with Closed, the consumer releases what it has unread. Idempotent."""

    def forget(self, request_id: str) -> None:
        """Drop the per-request state (tombstone, window) once the request has ended on this side."""

    async def close(self) -> None:
        """Idempotent. What was sent stays readable until released."""


class Connector(Protocol):
    """One way of moving chunks, for one process."""

    scheme: str

    async def open(self, on_chunk: Callable[[Lease], None], on_lost: Callable[[str], None], on_cancel: Callable[[str, int], None]) -> str:
        """Be reachable; returns this process's endpoint.

        `on_chunk(lease)`: a chunk has arrived. `on_lost(peer)`: that producer is gone, nothing more will come from it.
        `on_cancel(request_id, epoch)`: a producer cancelled it in-lane. All three run on the loop and must not block.
        """

    async def reserve(self) -> None:
        """Allocate now what sending needs, so that no `dial` or `send` pays for it. Idempotent. Raises NoSpace."""

    async def dial(self, endpoint: str) -> Outlet:
        """The channel to `endpoint`; made on first use, then the same one. Raises Broken when nobody listens there."""

    def stats(self) -> ConnectorStats: ...

    async def close(self) -> None:
        """Close every channel, give all memory back. Idempotent."""


def pack_header(header: ChunkHeader) -> bytes:
    return _encoder.encode(header)


def unpack_header(data: bytes | memoryview) -> ChunkHeader:
    return _decoder.decode(data)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)
