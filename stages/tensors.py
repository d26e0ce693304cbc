"""torch tensors into chunks and back, on the CPU and on one GPU.

    array = to_array(tensor)                     Chunk("hidden", {"hidden": array})
    tensor = to_torch(chunk.tensors["hidden"])

    host = HostTensors()                         from the GPU straight into the chunk's slot, beside the loop and the model
    array = host.array(tensor)

    devices = DeviceTensors(pool_bytes)          between two stages on one GPU, without the host: a copy into the pool ...
    array = await devices.lend(tensor)
    loan = await devices.loan(shape, dtype)      ... or none: what is written to `loan.tensor` is sent in place
    array = loan.seal()
    tensor = devices.open(array)

Knows dtypes and devices; knows nothing of requests. How device memory is shared or copied, and what must hold: `transport/cuda_ipc.py`,
`transport/cuda_host.py`.

Rules
- A tensor of any stride is made contiguous once. bfloat16 and float8 keep their bits and their names.
- A tensor from `open` is read-only and used on the stream that was current then. The producer waits for its death, so do not hoard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streamrt.device import CARRIED_DTYPES, DEVICE_DTYPE, CudaPool, CudaReader, HostCopies, Loan, View

# torch dtypes that numpy lacks, by the names that chunks carry, and torch's integers of the same width.
_CARRIED: dict[torch.dtype, str] = {getattr(torch, name): name for name in CARRIED_DTYPES if hasattr(torch, name)}
_WORD: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name that chunks carry. Raises ValueError for those they do not."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in _CARRIED and name not in np.sctypeDict:
        raise ValueError(f"got a tensor of {name}, expected a dtype that numpy knows or one of {', '.join(_CARRIED.values())}")
    return name


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """The same numbers for a chunk: over the tensor's own memory when it is contiguous and on the CPU, else a copy."""
    dtype_name(tensor.dtype)  # or say so before anything is copied
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if tensor.dtype not in _CARRIED:
        return tensor.numpy()
    return tensor.view(_WORD[tensor.dtype.itemsize]).numpy().view(_array_dtype(tensor.dtype))


def to_torch(array: np.ndarray, device: str | torch.device = "cpu", *, borrow: bool = False) -> torch.Tensor:
    """The tensor that `array`, out of a chunk, holds: a copy on `device`.

    `borrow`: no copy on the CPU. The chunk stays leased while the tensor lives, and writing to it ends the process: an arrived chunk's
    memory is read-only, which torch has no notion of.
    """
    metadata: Mapping[str, Any] = array.dtype.metadata or {}
    carried = str(metadata.get("carries", ""))
    if carried == DEVICE_DTYPE:
        raise ValueError("this tensor lies in device memory: DeviceTensors.open")
    tensor = torch.from_numpy(np.asarray(_Borrowed(array)))
    if carried in _CARRIED.values():
        tensor = tensor.view(getattr(torch, carried))
    return tensor if borrow and torch.device(device).type == "cpu" else tensor.to(device, copy=True)


MIN_ASIDE_BYTES = 64 * 2**10  # what is smaller is copied sooner than a thread is woken


class HostTensors:
    """Tensors of one GPU that leave it in chunks. One per stage; nothing of CUDA is touched before the first of them."""

    def __init__(self, *, device: int = 0) -> None:
        """`device`: index of the GPU, as torch counts."""
        self._device = device
        self._copies: HostCopies | None = None

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """What a chunk carries: `tensor` as the current stream has it after what it was given so far.

        The GPU copies it when the chunk is sent, on a stream of its own, and `send` waits for that. Until then it is kept, and must not be
        written; and there is nothing to read in the array. A small one is copied now. Raises DeviceError.
        """
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.device.type != "cuda" or tensor.nbytes < MIN_ASIDE_BYTES:
            return to_array(tensor)
        if tensor.device.index != self._device:
            raise ValueError(f"got a tensor on GPU {tensor.device.index}, expected one on GPU {self._device}")
        if self._copies is None:
            self._copies = HostCopies(self._device)
        stream = _raw_stream(self._device)
        return self._copies.of(tensor.data_ptr(), tensor.nbytes, tuple(tensor.shape), _array_dtype(tensor.dtype), stream, tensor)


class DeviceTensors:
    """Tensors that cross between the stages of one GPU. One per stage; made on its loop, closed with it."""

    def __init__(self, pool_bytes: int, *, device: int = 0, max_tensors: int = 64) -> None:
        """Nothing is allocated before the first tensor is lent.

        Args:
            pool_bytes: device memory for what is lent and not yet released.
            device: index of the GPU, as torch counts.
            max_tensors: how many may be lent at a time.
        """
        self._pool_bytes = pool_bytes
        self._device = device
        self._max_tensors = max_tensors
        self._pool: CudaPool | None = None
        self._reader = CudaReader()

    @property
    def pool(self) -> CudaPool:
        """Made now, if it was not. Raises DeviceError."""
        if self._pool is None:
            torch.cuda.init()  # torch makes the context its own way; the driver shares it
            self._pool = CudaPool(self._pool_bytes, device=self._device, max_blocks=self._max_tensors)
        return self._pool

    async def lend(self, tensor: torch.Tensor) -> np.ndarray:
        """Copy into the pool, on the current stream; nothing waits for the copy. Waits: for room. Raises TooLarge, DeviceError."""
        name = dtype_name(tensor.dtype)
        loan = await self.pool.loan(tensor.nbytes, _raw_stream(self._device))
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and tensor.nbytes:
            loan.copy_from(tensor.data_ptr())
        else:
            _over(loan, name, tuple(tensor.shape), self._device).copy_(tensor)
        return loan.seal(name, tuple(tensor.shape))

    async def loan(self, shape: Sequence[int], dtype: torch.dtype) -> LoanedTensor:
        """Room for a tensor, to be written on the current stream and then sent as it is. Waits: for room. Raises TooLarge, DeviceError."""
        name = dtype_name(dtype)
        loan = await self.pool.loan(math.prod(shape) * dtype.itemsize, _raw_stream(self._device))
        return LoanedTensor(loan, name, tuple(shape), self._device)

    def open(self, array: np.ndarray) -> torch.Tensor:
        """The tensor that `array`, out of a chunk, stands for, in its producer's memory. Nothing waits but the current stream."""
        view = self._reader.open(array, _raw_stream(self._device))
        return _over(view, view.dtype, view.shape, self._device)

    def close(self) -> None:
        self._reader.close()
        if self._pool is not None:
            self._pool.close()


class LoanedTensor:
    """Device memory to be written and sent. Dropped unsealed, it goes back."""

    def __init__(self, loan: Loan, name: str, shape: tuple[int, ...], device: int) -> None:
        self.tensor = _over(loan, name, shape, device)
        self._loan = loan
        self._name = name

    def seal(self) -> np.ndarray:
        """What a chunk carries: what the stream of `DeviceTensors.loan` has written by now. `tensor` is not to be used after this."""
        return self._loan.seal(self._name, tuple(self.tensor.shape))


def _raw_stream(device: int) -> int:
    # A tenth of the time that torch.cuda.current_stream takes, and what Triton's launcher asks.
    return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001 - no public name


def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    name = dtype_name(dtype)
    return np.dtype(CARRIED_DTYPES[name], metadata={"carries": name}) if dtype in _CARRIED else np.dtype(name)


class _Borrowed:
    """Memory of an array, said to be writable, because torch warns of any other."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array = np.asarray(array, order="C")
        self.__array_interface__: dict[str, Any] = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


class _DeviceArray:
    """Device memory as torch takes it in, and what keeps it alive."""

    def __init__(self, memory: Loan | View, typestr: str, shape: tuple[int, ...]) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (memory.pointer, False), "version": 2}


def _over(memory: Loan | View, name: str, shape: tuple[int, ...], device: int) -> torch.Tensor:
    """A tensor over device memory, which it keeps."""
    dtype, typestr, is_carried = _as_words(name)
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
    tensor = torch.as_tensor(_DeviceArray(memory, typestr, shape))
    return tensor.view(dtype) if is_carried else tensor


@functools.cache
def _as_words(name: str) -> tuple[torch.dtype, str, bool]:
    """The dtype, how `__cuda_array_interface__` spells it or a word of its width, and whether it is a word."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype in _CARRIED or name in ("uint16", "uint32", "uint64"):  # the others that this way knows nothing of
        return dtype, {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[dtype.itemsize], True
    return dtype, np.dtype(name).str, False
