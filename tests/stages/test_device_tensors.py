"""Device memory between real processes on a GPU: content, order, bounds, death. Without a GPU: tests/transport/test_device_blocks.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs streamrt[torch]")

from stages.tensors import DeviceTensors, dtype_name  # noqa: E402 - after the skip
from streamrt.device import TooLarge, WouldBlock  # noqa: E402
from transport.chunk import ChunkHeader, describe  # noqa: E402
from transport.connector import ConnectorOptions, Lease  # noqa: E402
from transport.schemes import make_connector  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PEER = Path(__file__).with_name("device_peer.py")
ROOT = Path(__file__).parents[2]
MIB = 2**20


class Here:
    """This process's end, and the peer."""

    def __init__(self, directory: Path, pool_bytes: int, max_tensors: int) -> None:
        self.connector = make_connector("shm", "here", directory, ConnectorOptions(arena_bytes=8 * MIB))
        self.devices = DeviceTensors(pool_bytes, max_tensors=max_tensors)
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.seq = 0

    async def send(self, array) -> None:
        specs, arrays, _ = describe({"t": array})
        await self.outlet.send(ChunkHeader("r", 0, "here", "out", self.seq, "hidden", 0, specs), arrays)
        self.seq += 1

    async def recv(self) -> torch.Tensor:
        lease = await self.leases.get()
        tensor = self.devices.open(lease.arrays()[0])
        lease.release()
        return tensor

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.devices.pool.settle() or self.devices.pool.blocks_out:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def with_peer(role: str, directory: Path, pool_bytes: int = 64 * MIB, max_tensors: int = 64):
    here = Here(directory, pool_bytes, max_tensors)
    endpoint = await here.connector.open(here.leases.put_nowait, lambda peer: None, lambda request_id, epoch: None)
    here.peer = await asyncio.create_subprocess_exec(
        sys.executable,
        PEER,
        role,
        str(directory),
        endpoint,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    try:
        here.outlet = await here.connector.dial((await here.peer.stdout.readline()).decode().strip())
        yield here
    finally:
        if here.peer.returncode is None:
            here.peer.kill()
        await here.peer.wait()
        await here.connector.close()
        here.devices.close()


async def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path):
    base = torch.randn(64, 96, device="cuda") * 9
    async with with_peer("echo", tmp_path) as here:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64):
            whole = base.to(dtype)
            for tensor in (whole, whole.t(), whole[3:, ::2], whole[0, 0], whole[:0]):
                await here.send(await here.devices.lend(tensor))
                back = await here.recv()
                assert dtype_name(back.dtype) == dtype_name(dtype)
                assert back.shape == tensor.shape
                assert (
                    torch.equal(back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
                    if tensor.dim()
                    else back == tensor
                )
                del back
        await here.idle()


async def test_what_is_written_in_place_is_sent_in_place(tmp_path):
    async with with_peer("echo", tmp_path) as here:
        loan = await here.devices.loan((4, 5), torch.bfloat16)
        loan.tensor.copy_(torch.arange(20, device="cuda").view(4, 5))
        await here.send(loan.seal())
        del loan
        assert (await here.recv()).flatten().tolist() == list(range(20))
        await here.idle()


async def test_reads_follow_writes_and_writes_follow_reads_on_the_device(tmp_path):
    # Two blocks for forty tensors; each is written late, and read late after it was let go.
    async with with_peer("late", tmp_path, pool_bytes=4 * MIB, max_tensors=2) as here:
        sums = []

        async def collect() -> None:
            for n in range(40):
                sums.append((await here.recv() != n).sum())

        collecting = asyncio.create_task(collect())
        for n in range(40):
            with torch.cuda.stream(torch.cuda.Stream()):
                loan = await here.devices.loan((MIB // 2,), torch.float32)
                torch.cuda._sleep(2_000_000)
                loan.tensor.fill_(n)
                array = loan.seal()
                del loan
                await here.send(array)
                del array
        await collecting
        torch.cuda.synchronize()
        assert [int(count) for count in sums] == [0] * 40
        await here.idle()


async def test_a_loan_given_up_is_not_written_into_the_next_one(tmp_path):
    async with with_peer("echo", tmp_path, pool_bytes=2 * MIB, max_tensors=2) as here:
        with torch.cuda.stream(torch.cuda.Stream()):
            loan = await here.devices.loan((2 * MIB,), torch.uint8)
            torch.cuda._sleep(20_000_000)
            loan.tensor.fill_(9)
            del loan
        ones = torch.ones(2 * MIB, dtype=torch.uint8, device="cuda")
        await here.send(await here.devices.lend(ones))
        assert torch.equal(await here.recv(), ones)


async def test_a_killed_consumer_gives_every_block_back(tmp_path):
    async with with_peer("hold", tmp_path) as here:
        for _ in range(8):
            await here.send(await here.devices.lend(torch.ones(MIB, device="cuda")))
            (await here.leases.get()).release()
        here.devices.pool.settle()
        assert here.devices.pool.blocks_out == 8
        here.peer.send_signal(signal.SIGKILL)
        await here.idle()
        assert here.devices.pool.bytes_out == 0


async def test_a_full_pool_makes_loans_wait_in_line_and_a_cancelled_one_takes_nothing():
    devices = DeviceTensors(4 * MIB, max_tensors=4)
    held = [await devices.loan((2 * MIB,), torch.uint8) for _ in range(2)]
    with pytest.raises(TooLarge, match="the pool has"):
        await devices.loan((5 * MIB,), torch.uint8)
    with pytest.raises(WouldBlock):
        devices.pool.try_loan(MIB, 0)
    given_up = asyncio.create_task(devices.loan((2 * MIB,), torch.uint8))
    waiting = asyncio.create_task(devices.loan((MIB,), torch.uint8))
    await asyncio.sleep(0)
    given_up.cancel()
    held.pop()
    async with asyncio.timeout(5):
        held.append(await waiting)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    del waiting, given_up
    held.clear()
    await asyncio.sleep(0)  # the loop lets go of the task that woke us
    devices.pool.settle()
    assert devices.pool.blocks_out == 0
    devices.close()
