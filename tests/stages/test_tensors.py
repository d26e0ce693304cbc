"""torch tensors in chunks: every dtype and stride, through a real lane, and what is refused. The GPU's part is in test_device_tensors.py."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs streamrt[torch]")

from stages.tensors import dtype_name, to_array, to_torch  # noqa: E402 - after the skip
from transport.chunk import ChunkHeader, describe, view  # noqa: E402
from transport.connector import ConnectorOptions, Lease  # noqa: E402
from transport.cuda_ipc import Block  # noqa: E402
from transport.payload import pack  # noqa: E402
from transport.schemes import make_connector  # noqa: E402

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def through_a_payload(array: np.ndarray) -> np.ndarray:
    specs, arrays, nbytes = describe({"t": array})
    return view(specs[0], pack(specs, arrays, nbytes))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=generator) * 9).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and to_array(a).tobytes() == to_array(b).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 2)])
def test_a_tensor_comes_back_bit_for_bit_with_its_dtype_and_shape(dtype, shape):
    tensor = random_tensor(shape, dtype)
    assert same(to_torch(through_a_payload(to_array(tensor))), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=dtype_name)
@pytest.mark.parametrize(
    "strided",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:], lambda t: t[0].expand(4, 6), lambda t: t.flip(0)],
    ids=["transposed", "every second", "inner", "expanded", "flipped"],
)
def test_a_tensor_of_any_stride_comes_back_the_same(dtype, strided):
    tensor = strided(random_tensor((4, 6), torch.float32).to(dtype))
    array = to_array(tensor)
    assert array.flags.c_contiguous
    assert same(to_torch(through_a_payload(array)), tensor.contiguous())


def test_a_contiguous_tensor_is_not_copied():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros(8, dtype=dtype)
        assert to_array(tensor).__array_interface__["data"][0] == tensor.data_ptr()


def test_a_tensor_that_wants_gradients_and_a_conjugate_are_sent_as_numbers():
    assert to_array(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert to_array(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


def test_carried_dtypes_keep_their_names_in_the_header():
    specs, _, _ = describe({"a": to_array(torch.zeros(2, dtype=torch.bfloat16)), "b": to_array(torch.zeros(2, dtype=torch.float8_e4m3fn))})
    assert [spec.dtype for spec in specs] == ["bfloat16", "float8_e4m3fn"]


def test_a_dtype_that_chunks_do_not_carry_is_named():
    with pytest.raises(ValueError, match="got a tensor of float8_e8m0fnu"):
        to_array(torch.zeros(2, dtype=torch.float8_e8m0fnu))


def test_to_torch_copies_unless_it_may_borrow():
    array = through_a_payload(to_array(torch.arange(4)))
    to_torch(array)[0] = 9
    assert array.tolist() == [0, 1, 2, 3]
    assert to_torch(array, borrow=True).data_ptr() == array.__array_interface__["data"][0]


def test_a_tensor_in_device_memory_is_not_mistaken_for_bytes():
    array = np.zeros(4, np.dtype("uint8", metadata={"carries": "device_block"}))
    with pytest.raises(ValueError, match=r"DeviceTensors\.open"):
        to_torch(array)


async def test_a_borrowed_tensor_holds_its_chunk_until_it_dies(tmp_path):
    options = ConnectorOptions(arena_bytes=8 * 2**20)
    producer, consumer = (make_connector("shm", name, tmp_path, options) for name in ("producer", "consumer"))
    leases: asyncio.Queue[Lease] = asyncio.Queue()
    try:
        outlet = await producer.dial(await consumer.open(leases.put_nowait, lambda peer: None, lambda request_id, epoch: None))
        sent = random_tensor((300, 200), torch.float32).to(torch.bfloat16)
        specs, arrays, _ = describe({"hidden": to_array(sent)})
        await outlet.send(ChunkHeader("r", 0, "a", "out", 0, "hidden", 0, specs), arrays)
        lease = await leases.get()
        tensor = to_torch(lease.arrays()[0], borrow=True)[10:]
        lease.release()
        await outlet.send(ChunkHeader("r", 0, "a", "out", 1, "event"))  # what follows it has been dealt with
        (await leases.get()).release()
        assert same(tensor, sent[10:])
        assert producer.stats().slots_in_use == 1
        del tensor
        while producer.stats().slots_in_use:
            await asyncio.sleep(0)
    finally:
        await producer.close()
        await consumer.close()


def test_the_description_of_a_device_block_rides_inside_the_descriptor():
    import msgspec

    block = Block("1-abc", 1, bytes(16), bytes(64), 2**30, bytes(64), 2**29, 2**24, "bfloat16", (1, 4096, 2048))
    assert len(msgspec.msgpack.encode(block)) < ConnectorOptions().inline_bytes
