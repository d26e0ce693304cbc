"""The shared-memory connector: chunks between processes of one host, written once and read in place.

    outlet.py   credit -> slot -> copy -> Data ~~~> on_chunk(lease) -> arrays -> release   inbound.py
                slot and credit come back <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ Release

Holds the outlets, the inbounds, the arena and the listening socket of one process; knows nothing of routes or models.

Rules
- One arena per producing process, made by `reserve` or at the first `dial`; one lane per (producer, consumer).
- Credit and slot come back together, when the lease is released and no view of its memory lives.
- A view is valid memory for as long as it lives. Its content is kept until then as well, unless the connector that took it is closed
  or the producer takes this process for dead: then the slot may be used again.
- End-of-file is death. What a dead consumer had borrowed comes back at once; what a dead producer wrote stays readable.
- A consumer that hangs is not dead: what it had borrowed is quarantined, see outlet.py. It is told by end-of-file when it wakes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transport import channel
from transport.arena import Arena
from transport.connector import Connector, ConnectorOptions, ConnectorStats, Lease
from transport.errors import Broken, Closed
from transport.inbound import Callbacks, Inbound
from transport.outlet import ShmOutlet
from transport.window import Tombstones


class ShmConnector(Connector):
    """Shared memory between the processes of one user on one host. Endpoint: "shm:<path of a socket>"."""

    scheme = "shm"

    def __init__(self, name: str, directory: Path, options: ConnectorOptions) -> None:
        """`name`: what peers call this process. `directory`: where its socket is made, 0700. Nothing is allocated yet."""
        self.name = name
        self._directory = Path(directory)
        self._options = options
        self._counters = ConnectorStats()
        self._listener: channel.Listener | None = None
        self._endpoint = ""
        self._inbounds: set[Inbound] = set()
        self._tombstones = Tombstones()
        self._outlets: dict[str, ShmOutlet] = {}  # by endpoint
        self._closing: set[ShmOutlet] = set()  # closed here, and not all released there
        self._dialing: dict[str, asyncio.Task[ShmOutlet]] = {}
        self._making_arena: asyncio.Task[Arena] | None = None
        self._threads: ThreadPoolExecutor | None = None  # for what would hold the loop too long: big copies, fresh memory
        self._buffer = bytearray(channel.MAX_MESSAGE_BYTES)
        self._closed = False

    async def open(self, on_chunk: Callable[[Lease], None], on_lost: Callable[[str], None], on_cancel: Callable[[str, int], None]) -> str:
        self._check_open()
        if self._listener is None:
            callbacks = Callbacks(on_chunk, on_lost, on_cancel)
            # The name is for people; the random part lets a restarted process listen beside what its killed predecessor left.
            path = self._directory / f"{self.name.replace(os.sep, '_')}-{secrets.token_hex(4)}.sock"
            self._listener = channel.Listener(path, lambda sock: self._on_peer(sock, callbacks))
            self._endpoint = f"{self.scheme}:{path}"
        return self._endpoint

    async def reserve(self) -> None:
        self._check_open()
        await self._shared_arena(self._pool())

    async def dial(self, endpoint: str) -> ShmOutlet:
        """Raises NoSpace as well, when the arena can not be made, and ProtocolError when the peer is of another version."""
        self._check_open()
        outlet = self._outlets.get(endpoint)
        if outlet is not None:
            return outlet
        dialing = self._dialing.get(endpoint)
        if dialing is None:
            dialing = asyncio.get_running_loop().create_task(self._dial(endpoint))
            self._dialing[endpoint] = dialing
            dialing.add_done_callback(lambda task: self._on_dialed(endpoint, task))
        return await asyncio.shield(dialing)  # others may wait for it as well

    def stats(self) -> ConnectorStats:
        counters, arena = self._counters, self._arena
        counters.peers = sum(inbound.is_live for inbound in self._inbounds) + len(self._outlets)
        counters.slots_in_use = arena.slots_in_use if arena else 0
        counters.bytes_in_use = arena.bytes_in_use if arena else 0
        counters.bytes_total = arena.bytes_total if arena else 0
        counters.bytes_quarantined = sum(outlet.bytes_quarantined for outlet in self._closing)
        return counters

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        tasks: list[asyncio.Task[Any]] = list(self._dialing.values())
        if self._making_arena is not None:
            tasks.append(self._making_arena)
        for task in tasks:
            task.cancel()  # nothing happens to those that are done
        await asyncio.gather(*tasks, return_exceptions=True)
        for outlet in (*self._outlets.values(), *self._closing):
            outlet.hang_up(Closed(f"connector {self.name} was closed"))
        for inbound in list(self._inbounds):
            inbound.close()
        if self._arena is not None:
            self._arena.close()
        self._making_arena = None
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"connector {self.name} was closed")

    # ---- consumer side

    def _on_peer(self, sock: socket.socket, callbacks: Callbacks) -> None:
        batch = max(1, self._options.window_chunks // 4)
        inbound = Inbound(self.name, sock, callbacks, self._tombstones, self._counters, batch, self._buffer, self._inbounds.discard)
        self._inbounds.add(inbound)

    # ---- producer side

    @property
    def _arena(self) -> Arena | None:
        making = self._making_arena
        made = making is not None and making.done() and not making.cancelled() and making.exception() is None
        return making.result() if making is not None and made else None

    async def _dial(self, endpoint: str) -> ShmOutlet:
        scheme, _, path = endpoint.partition(":")
        if scheme != self.scheme or not path:
            raise ValueError(f"got endpoint {endpoint!r}, expected shm:<path of a socket>")
        threads = self._pool()
        sock = await channel.connect(Path(path))
        try:
            arena = await self._shared_arena(threads)
        except BaseException:
            sock.close()
            raise
        outlet = ShmOutlet(
            endpoint, sock, arena, threads, self._options, self._counters, self._buffer, self._on_outlet_ended, self._closing.discard
        )
        try:
            await outlet.introduce(self.name)
        except BaseException:
            outlet.hang_up(Broken(f"{endpoint} was not reached"))
            raise
        self._outlets[endpoint] = outlet
        return outlet

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix=f"shm-{self.name}")
        return self._threads

    async def _shared_arena(self, threads: ThreadPoolExecutor) -> Arena:
        making = self._making_arena
        if making is None or (making.done() and self._arena is None):  # the first, or the last try found no space
            making = asyncio.get_running_loop().create_task(self._make_arena(threads))
            self._making_arena = making
        return await asyncio.shield(making)

    async def _make_arena(self, threads: ThreadPoolExecutor) -> Arena:
        options = self._options
        return await Arena.create(
            options.arena_bytes, options.max_chunk_bytes, threads, on_drop=self._on_file_dropped, on_wait=self._on_arena_wait
        )

    def _on_dialed(self, endpoint: str, task: asyncio.Task[ShmOutlet]) -> None:
        del self._dialing[endpoint]
        if not task.cancelled():
            task.exception()  # those who wait raise it; when all have gone away nobody needs to hear of it

    def _on_outlet_ended(self, outlet: ShmOutlet) -> None:
        if self._outlets.get(outlet.endpoint) is outlet:
            del self._outlets[outlet.endpoint]
            self._closing.add(outlet)

    def _on_file_dropped(self, number: int) -> None:
        for outlet in (*self._outlets.values(), *self._closing):
            outlet.drop_file(number)

    def _on_arena_wait(self) -> None:
        for outlet in (*self._outlets.values(), *self._closing):
            outlet.hurry()
