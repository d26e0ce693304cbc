"""The other process of the connector tests: `peer.py ROLE SCHEME DIRECTORY [ENDPOINT]`, until it is killed.

hold     opens, prints its endpoint, keeps every chunk unreleased; when its producer is lost it prints how many there are and whether
         each still holds its seq (modulo 251) in every byte, and lets go of them
echo     opens, prints its endpoint, sends each chunk back to ENDPOINT
produce  sends 4 chunks of 100,000 bytes (each filled with its seq) to ENDPOINT, prints "sent"
flood    the same without end; gives a consumer up that says nothing for 0.2 s
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np

from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease
from transport.schemes import make_connector


async def main(role: str, scheme: str, directory: str, endpoint: str = "") -> None:
    options = ConnectorOptions(arena_bytes=8 * 2**20, hang_timeout_s=0.2)
    connector = make_connector(scheme, f"peer-{role}", Path(directory), options, token="t")
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    held: list[Lease] = []

    def on_lost(peer: str) -> None:
        right = all((lease.arrays()[0] == lease.header.seq % 251).all() for lease in held)
        print(f"{len(held)} chunks, {'whole' if right else 'overwritten'}", flush=True)
        held.clear()

    on_chunk = held.append if role == "hold" else leases.put_nowait
    mine = await connector.open(on_chunk, on_lost if role == "hold" else lambda peer: None, lambda request_id, epoch: None)
    if role in ("hold", "echo"):
        print(mine, flush=True)
    if role == "hold":
        await asyncio.Event().wait()
    outlet = await connector.dial(endpoint)
    if role == "echo":
        while True:
            lease = await leases.get()
            await outlet.send(lease.header, lease.arrays())
            lease.release()
    for seq in range(4) if role == "produce" else itertools.count():
        specs, arrays, _ = describe({"t": np.full(100_000, seq % 251, np.uint8)})
        await outlet.send(ChunkHeader("r", 0, "peer", "out", seq, "tokens", 0, specs), arrays)
    print("sent", flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
