"""Tensors from a GPU straight into chunks: bits, order, what is pinned, what is let go. Without a GPU: tests/transport/test_deferred.py."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs streamrt[torch]")

from stages.tensors import HostTensors, to_torch  # noqa: E402 - after the skip
from transport.chunk import ChunkHeader, describe  # noqa: E402
from transport.connector import ConnectorOptions, Lease  # noqa: E402
from transport.deferred import Deferred  # noqa: E402
from transport.memfile import Mapping, mapping_of  # noqa: E402
from transport.schemes import make_connector  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
BUSY_CYCLES = 20_000_000  # about 10 ms of GPU


class Pair:
    """A producer, and a consumer that copies."""

    def __init__(self, scheme: str, directory: Path) -> None:
        options = ConnectorOptions(arena_bytes=16 * MIB, max_chunk_bytes=64 * MIB)
        self.producer, self.consumer = (make_connector(scheme, name, directory, options, token="t") for name in ("producer", "consumer"))
        self.host = HostTensors()
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.seq = 0

    async def send(self, *tensors: torch.Tensor) -> None:
        specs, arrays, _ = describe({f"t{n}": self.host.array(tensor) for n, tensor in enumerate(tensors)})
        await self.outlet.send(ChunkHeader("r", 0, "producer", "out", self.seq, "hidden", 0, specs), arrays)
        self.seq += 1

    async def recv(self) -> list[torch.Tensor]:
        lease = await self.leases.get()
        tensors = [to_torch(array) for array in lease.arrays()]
        lease.release()
        return tensors


@asynccontextmanager
async def pair_of(scheme: str, directory: Path):
    pair = Pair(scheme, directory)
    endpoint = await pair.consumer.open(pair.leases.put_nowait, lambda peer: None, lambda request_id, epoch: None)
    pair.outlet = await pair.producer.dial(endpoint)
    try:
        async with asyncio.timeout(60):
            yield pair
    finally:
        await pair.producer.close()
        await pair.consumer.close()


@pytest.mark.parametrize("scheme", ["shm", "tcp", "memory"])
async def test_tensors_of_every_kind_arrive_bit_for_bit(tmp_path, scheme):
    base = torch.randn(640, 960, device="cuda") * 9
    async with pair_of(scheme, tmp_path) as pair:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64):
            whole = base.to(dtype)
            for tensor in (whole, whole.t(), whole[3:, ::2], whole[0, 0], whole[:0]):
                await pair.send(tensor, torch.full((3,), 7))
                back, seven = await pair.recv()
                assert back.dtype == dtype
                assert back.shape == tensor.shape
                assert torch.equal(back.view(-1).view(torch.uint8), tensor.cpu().contiguous().view(-1).view(torch.uint8))
                assert seven.tolist() == [7, 7, 7]


@pytest.mark.parametrize("elements", [MIB, 8 * MIB], ids=["slot", "jumbo area"])
async def test_it_is_copied_after_the_work_that_makes_it_and_the_loop_goes_on(tmp_path, elements):
    async with pair_of("shm", tmp_path) as pair:
        tensor = torch.zeros(elements, device="cuda")
        await pair.send(tensor)  # pins
        await pair.recv()
        for n in range(1, 6):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(BUSY_CYCLES)
                tensor.fill_(n)
                sending = asyncio.create_task(pair.send(tensor))
                await asyncio.sleep(0.001)
                assert not sending.done()
            await sending
            tensor.fill_(-1)  # what was sent is ours again
            (back,) = await pair.recv()
            assert (back == n).all()


async def test_other_streams_do_not_wait_for_a_copy(tmp_path):
    async with pair_of("shm", tmp_path) as pair:
        tensor = torch.ones(8 * MIB, device="cuda")
        await pair.send(tensor)
        await pair.recv()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10 * BUSY_CYCLES)
            sending = asyncio.create_task(pair.send(tensor))
            await asyncio.sleep(0)
        with torch.cuda.stream(torch.cuda.Stream()) as other:
            torch.ones(4, device="cuda").sum()
            torch.cuda.current_stream().synchronize()
            del other
        assert not sending.done()
        await sending
        assert (await pair.recv())[0].sum() == 8 * MIB


async def test_a_ring_is_pinned_once_and_let_go_with_its_mapping(tmp_path):
    seen: set[int] = set()
    async with pair_of("shm", tmp_path) as pair:
        ring = pair.producer._arena.files[0].memory
        for n in range(4):
            await pair.send(torch.full((MIB // 4,), float(n), device="cuda"))
            assert ((await pair.recv())[0] == n).all()
            mapping = ring.obj
            assert isinstance(mapping, Mapping)
            seen.add(id(mapping.pinned))
        assert len(seen) == 1
        del ring, mapping
    del pair
    gc.collect()
    for _ in range(3):  # the same addresses may come again: to register what is registered is an error
        async with pair_of("shm", tmp_path) as pair:
            await pair.send(torch.ones(MIB, device="cuda"))
            assert (await pair.recv())[0].sum() == MIB
        del pair
        gc.collect()


async def test_areas_that_come_and_go_are_pinned_and_let_go(tmp_path):
    async with pair_of("shm", tmp_path) as pair:
        for mib in (20, 40, 24, 64, 20, 33):
            await pair.send(torch.full((mib * MIB,), mib, dtype=torch.uint8, device="cuda"))
            (back,) = await pair.recv()
            assert back.numel() == mib * MIB
            assert (back == mib).all()


async def test_a_send_that_is_cancelled_while_the_gpu_writes_gives_its_slot_back(tmp_path):
    async with pair_of("shm", tmp_path) as pair:
        tensor = torch.ones(MIB, device="cuda")
        await pair.send(tensor)
        await pair.recv()
        torch.cuda._sleep(10 * BUSY_CYCLES)
        sending = asyncio.create_task(pair.send(tensor))
        await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert pair.producer.stats().slots_in_use == 1
        torch.cuda.synchronize()
        while pair.producer.stats().slots_in_use:
            await asyncio.sleep(0.001)
        assert pair.leases.empty()


async def test_small_tensors_and_those_of_the_cpu_are_plain_arrays():
    host = HostTensors()
    assert not isinstance(host.array(torch.ones(100, device="cuda")), Deferred)
    assert not isinstance(host.array(torch.ones(MIB)), Deferred)
    array = host.array(torch.arange(MIB, device="cuda"))
    assert isinstance(array, Deferred)
    assert mapping_of(array) is None
    assert array.copy()[-1] == MIB - 1
    memory = torch.cuda.memory_allocated()
    del array
    assert torch.cuda.memory_allocated() == memory - 8 * MIB
