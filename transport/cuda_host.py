"""Device memory to the host, straight into the slot of the chunk that carries it.

    copies = HostCopies(device)
    array = copies.of(pointer, nbytes, shape, dtype, stream, owner)      a `Deferred`; put it into a chunk
    ... `send` takes a slot, and a thread of the connector has the GPU write it, while the loop and `stream` go on

Without it: device -> pageable memory -> slot, the first half at a fraction of the bus's rate, and both on the loop.

Knows pointers, streams and mappings. Knows nothing of torch, rings or sockets. The driver is loaded at first use.

Rules
- Copies run on a stream of their own, after what `stream` had been given when `of` was called. `owner` keeps the memory until they are done.
- A ring is pinned whole, at the first copy that goes there (some milliseconds per 10 MiB), and stays so until it is unmapped.
- Where the slot is no shared memory (TCP, in-process), the same copy goes through the driver's own buffer.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from transport.cuda_ipc import Device
from transport.deferred import Deferred
from transport.memfile import Mapping, mapping_of

_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_STREAM_NON_BLOCKING = 1
_REGISTER_PORTABLE = 1


class HostCopies:
    """The side stream of one GPU, and what is pinned for it. Made by `Stage.load`, or later; of use to any thread."""

    def __init__(self, device: int = 0) -> None:
        """Raises DeviceError: no driver, or no such GPU."""
        self.device = Device(device)
        self._pinning = threading.Lock()
        stream = ctypes.c_void_p()
        with self.device as cuda:
            cuda.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING)
        self.stream = stream.value or 0

    def of(self, pointer: int, nbytes: int, shape: Sequence[int], dtype: np.dtype[Any], stream: int, owner: object) -> Deferred:
        """The `nbytes` at `pointer`, as `stream` has them after what it was given so far; not to be written before they were sent."""
        return _DeviceArray(self, pointer, nbytes, shape, dtype, stream, owner)

    def pin(self, target: np.ndarray) -> bool:
        """Have the GPU write `target` itself. False when it is no shared memory. Raises DeviceError: the driver does not pin it."""
        mapping = mapping_of(target)
        if mapping is None:
            return False
        with self._pinning:
            if mapping.pinned is None:
                mapping.pinned = _Pinned(self.device, mapping)
        return True

    def __del__(self) -> None:
        stream = getattr(self, "stream", 0)
        if stream and not sys.is_finalizing():
            with self.device as cuda:
                cuda.cuStreamDestroy_v2(stream)


class _DeviceArray(Deferred):
    """Numbers on a GPU."""

    _copies: HostCopies

    def __new__(
        cls, copies: HostCopies, pointer: int, nbytes: int, shape: Sequence[int], dtype: np.dtype[Any], stream: int, owner: object
    ) -> Self:
        array = super().__new__(cls, shape, dtype)
        if array.nbytes != nbytes:
            raise ValueError(f"{nbytes} bytes of device memory can not hold {tuple(shape)} {dtype}")
        event = ctypes.c_void_p()
        with copies.device as cuda:
            cuda.cuEventCreate(ctypes.byref(event), _EVENT_DISABLE_TIMING | _EVENT_BLOCKING_SYNC)
            cuda.cuEventRecord(event, stream)
        array._copies, array._pointer, array._event, array._owner = copies, pointer, event, owner
        return array

    def write(self, target: np.ndarray) -> None:
        copies = self._copies
        copies.pin(target)
        with copies.device as cuda:
            cuda.cuStreamWaitEvent(copies.stream, self._event, 0)
            cuda.cuMemcpyDtoHAsync_v2(target.ctypes.data, self._pointer, self.nbytes, copies.stream)
            cuda.cuEventRecord(self._event, copies.stream)
            cuda.cuEventSynchronize(self._event)  # asleep, and other threads run

    def __array_finalize__(self, made_from: object) -> None:
        self._event: ctypes.c_void_p | None = None
        self._pointer = 0
        self._owner: object = None

    def __del__(self) -> None:
        if self._event is not None and not sys.is_finalizing():
            with self._copies.device as cuda:
                cuda.cuEventDestroy_v2(self._event)


class _Pinned:
    """A mapping that the GPU writes itself, for as long as this lives."""

    def __init__(self, device: Device, mapping: Mapping) -> None:
        self._device = device
        self._address = 0
        memory = np.frombuffer(mapping, np.uint8)
        with device as cuda:
            cuda.cuMemHostRegister_v2(memory.ctypes.data, len(memory), _REGISTER_PORTABLE)
        self._address = memory.ctypes.data

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            with self._device as cuda:
                cuda.cuMemHostUnregister(self._address)
