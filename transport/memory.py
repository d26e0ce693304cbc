"""The connector inside one process: chunks pass from hand to hand. For tests, and for pipelines that live in one process.

Keeps every promise of `connector.py`: credit, order, cancel, loss and leases behave as between processes. `Inlet` and `HeapLease`, the
consumer's side of chunks in private memory, serve the TCP connector too.

Rules
- Arrays are copied once, in `send`, so the producer may use its buffers again.
- Credit comes back when a lease is released and no array of it lives; nothing but credit bounds the memory.
- Callbacks run in a later turn of the loop than the call that caused them, in its order.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from transport.chunk import ChunkHeader, TensorSpec, on_device, view
from transport.connector import Connector, ConnectorOptions, ConnectorStats, Lease, Outlet
from transport.credit import Windows
from transport.deferred import any_deferred
from transport.errors import Broken, Closed, TransportError
from transport.payload import fill, payload_bytes
from transport.window import Tombstones

THREAD_COPY_BYTES = 4 * 2**20  # a longer copy would hold the loop for more than about 0.2 ms


class MemoryConnector(Connector):
    """The connectors of one process find each other by endpoint, "memory:<name>-<n>"."""

    scheme = "memory"

    def __init__(self, name: str, options: ConnectorOptions) -> None:
        self.name = name
        self.options = options
        self.counters = ConnectorStats()
        self.inlet: Inlet | None = None  # once open
        self.producers: set[MemoryOutlet] = set()  # outlets of others that lead here
        self._outlets: dict[str, MemoryOutlet] = {}
        self._endpoint = ""
        self._closed = False

    async def open(self, on_chunk: Callable[[Lease], None], on_lost: Callable[[str], None], on_cancel: Callable[[str, int], None]) -> str:
        if self._closed:
            raise Closed(f"connector {self.name} was closed")
        if self.inlet is None:
            self.inlet = Inlet(on_chunk, on_lost, on_cancel, self.counters)
            self._endpoint = f"memory:{self.name}-{next(_numbers)}"
            _listening[self._endpoint] = self
        return self._endpoint

    async def reserve(self) -> None:
        """Nothing: memory comes with each chunk."""

    async def dial(self, endpoint: str) -> MemoryOutlet:
        if self._closed:
            raise Closed(f"connector {self.name} was closed")
        outlet = self._outlets.get(endpoint)
        if outlet is None or not outlet.is_open:
            consumer = _listening.get(endpoint)
            if consumer is None or consumer.inlet is None:
                raise Broken(f"{endpoint}: nobody listens there")
            outlet = self._outlets[endpoint] = MemoryOutlet(endpoint, self, consumer.inlet, consumer.producers)
        return outlet

    def stats(self) -> ConnectorStats:
        self.counters.peers = len(self.producers) + sum(outlet.is_open for outlet in self._outlets.values())
        return self.counters

    async def close(self) -> None:
        self._closed = True
        _listening.pop(self._endpoint, None)
        if self.inlet is not None:
            self.inlet.close()
        for outlet in list(self.producers):
            outlet.end(Broken(f"{self._endpoint}: the consumer is gone"))
        for outlet in self._outlets.values():
            await outlet.close()


class MemoryOutlet(Outlet):
    """The producer's end of a channel inside the process. Made by `MemoryConnector.dial`."""

    def __init__(self, endpoint: str, producer: MemoryConnector, inlet: Inlet, siblings: set[MemoryOutlet]) -> None:
        self.endpoint = endpoint
        self._name = producer.name
        self._counters = producer.counters
        self._windows = Windows(producer.options, producer.counters)
        self._loop = asyncio.get_running_loop()
        self._inlet = inlet
        self._siblings = siblings  # all outlets that lead to the same consumer
        siblings.add(self)

    @property
    def is_open(self) -> bool:
        return self in self._siblings

    async def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        nbytes = payload_bytes(header.tensors, arrays)
        loan = await self._windows.take(header, nbytes)
        try:
            payload = await gathered(header.tensors, arrays, nbytes)
            loan.check()
        except BaseException:
            loan.give_back()
            raise
        lease = HeapLease(header, self._name, payload, loan.give_back)
        self._loop.call_soon(self._inlet.arrive, lease)
        loan.sent()
        self._counters.chunks_sent += 1
        self._counters.bytes_sent += nbytes

    def cancel(self, request_id: str, epoch: int) -> None:
        if self.is_open and self._windows.cancel(request_id, epoch):
            self._loop.call_soon(self._inlet.cancel, request_id, epoch)

    def forget(self, request_id: str) -> None:
        self._windows.forget(request_id)

    async def close(self) -> None:
        if self.is_open:
            self.end(Closed(f"the outlet to {self.endpoint} was closed"))
            self._loop.call_soon(self._inlet.lose, self._name)

    def end(self, error: TransportError) -> None:
        """Nothing more goes this way: sends raise `error`. Idempotent."""
        self._siblings.discard(self)
        self._windows.end(error)


class Inlet:
    """The consumer's side of all its channels: hands on what is still wanted, releases what comes too late."""

    def __init__(
        self,
        on_chunk: Callable[[Lease], None],
        on_lost: Callable[[str], None],
        on_cancel: Callable[[str, int], None],
        counters: ConnectorStats,
    ) -> None:
        self._on_chunk = on_chunk
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._counters = counters
        self._over = Tombstones()
        self._closed = False

    def arrive(self, lease: HeapLease) -> None:
        if self._closed or self._over.covers(lease.header.request_id, lease.header.epoch):
            self._counters.dropped_stale += 1
            lease.release()
            return
        self._counters.chunks_received += 1
        self._counters.bytes_received += sum(spec.nbytes for spec in lease.header.tensors)
        try:
            self._on_chunk(lease)
        except BaseException:
            lease.release()
            raise

    def cancel(self, request_id: str, epoch: int) -> None:
        if not self._closed and self._over.add(request_id, epoch):
            self._on_cancel(request_id, epoch)

    def lose(self, peer: str) -> None:
        if not self._closed:
            self._on_lost(peer)

    def close(self) -> None:
        self._closed = True


class HeapLease(Lease):
    """A lease over memory of this process.

    `give_back` is called once, on the loop: after `release`, when no array lives. A lease that is dropped unreleased gives back too: its
    reader has failed, and the producer must not wait for ever.
    """

    def __init__(self, header: ChunkHeader, peer: str, payload: np.ndarray, give_back: Callable[[], None]) -> None:
        self.header = header
        self.peer = peer
        payload.flags.writeable = False
        self._payload: np.ndarray | None = payload  # bytes
        self._arrays: tuple[np.ndarray, ...] | None = None
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Raises Closed after `release`, ValueError or TypeError when the header does not fit the bytes."""
        if self._payload is None:
            raise Closed("the lease has been released")
        if self._arrays is None:
            if not self.header.tensors:
                return ()
            # numpy keeps the payload itself alive for every array over it, and for whatever is sliced from one.
            self._arrays = tuple(view(spec, self._payload) for spec in self.header.tensors)
            weakref.finalize(self._payload, _on_loop, self._loop, self._thread, self._give_back).atexit = False
        return self._arrays

    def release(self) -> None:
        if self._payload is not None:
            had_arrays, self._arrays, self._payload = self._arrays is not None, None, None
            if not had_arrays:
                self._give_back()

    def __del__(self) -> None:
        if self._payload is not None and self._arrays is None:
            _on_loop(self._loop, self._thread, self._give_back)


async def gathered(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], nbytes: int) -> np.ndarray:
    """The payload in private memory. Waits: for a thread when it is big. Raises ValueError: device memory goes by shared memory only."""
    if on_device(specs):
        raise ValueError("a tensor in device memory goes to processes of this host only, by the shm connector; send it as an array")
    payload = np.empty(nbytes, np.uint8)
    if nbytes < THREAD_COPY_BYTES and not any_deferred(arrays):
        fill(payload, specs, arrays)
    else:
        await asyncio.to_thread(fill, payload, specs, arrays)
    return payload


def _on_loop(loop: asyncio.AbstractEventLoop, thread: int, call: Callable[[], None]) -> None:
    """Run `call` on the loop soon, from wherever the last reference died: a compute thread, or the middle of anything."""
    try:
        if threading.get_ident() == thread:
            loop.call_soon(call)
        else:
            loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop ended before the last array: there is nobody to tell
        if not loop.is_closed():
            raise


_listening: dict[str, MemoryConnector] = {}
_numbers = itertools.count(1)
