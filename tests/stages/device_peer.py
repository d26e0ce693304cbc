"""The other process of test_device_tensors.py: `device_peer.py ROLE DIRECTORY ENDPOINT`, until it is killed.

echo   opens, prints its endpoint, lends to ENDPOINT a copy of each tensor that it is lent
hold   opens, prints its endpoint, keeps every tensor open
late   as echo, but its stream is busy for a while before it reads, and the tensor is let go at once
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from stages.tensors import DeviceTensors
from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions, Lease
from transport.schemes import make_connector


async def main(role: str, directory: str, endpoint: str) -> None:
    connector = make_connector("shm", f"peer-{role}", Path(directory), ConnectorOptions(arena_bytes=8 * 2**20))
    devices = DeviceTensors(64 * 2**20)
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    held: list[Any] = []
    print(await connector.open(leases.put_nowait, lambda peer: None, lambda request_id, epoch: None), flush=True)
    outlet = await connector.dial(endpoint)
    seq = 0
    while True:
        lease = await leases.get()
        tensor = devices.open(lease.arrays()[0])
        if role == "hold":
            held.append((lease, tensor))
            tensor = torch.zeros(1, device="cuda")
        if role == "late":
            torch.cuda._sleep(4_000_000)
        array = await devices.lend(tensor)
        del tensor
        lease.release()
        specs, arrays, _ = describe({"t": array})
        await outlet.send(ChunkHeader("r", 0, "peer", "out", seq, "hidden", 0, specs), arrays)
        seq += 1


asyncio.run(main(*sys.argv[1:]))
