"""Device memory between processes on one GPU, by CUDA IPC.

    producer                                             consumer
    block = await pool.loan(nbytes, stream)
    ... work on `stream` writes the block ...
    array = block.seal(dtype, shape)  -- chunk ------- -> view = reader.open(array, stream): `stream` waits for the work above
              <-------------- release -------------------  view dies, and what `stream` was given by then is done

A chunk that carries device memory is an ordinary chunk of the shared-memory connector. In the place of the tensor's bytes it has a
`Block`, some 250 bytes of dtype `DEVICE_DTYPE`, which says where they lie. The array that `seal` returns owns the block: whoever holds
it (the stage, an outlet until the consumer's release or end) holds the block, and the last one to let go gives it back to the pool.

Knows pointers, streams, events and handles. Knows nothing of torch, requests or sockets. The driver is loaded at first use.

Rules
- One allocation per pool, exported once, opened once per consumer. One interprocess event for each block that may be out at a time.
- A view may be used on the stream that it was opened for. Work on others must be joined to that one before the view dies.
- A block is the reader's from `seal` on: its producer neither writes nor reads it any more. A reader does not write it.
- A block is used again when each reader's stream has passed the death of its views. What nobody read may still be being written:
  the stream of the next loan waits for that.
- A view outlives its producer's process only as far as the driver keeps the memory; the chunk's stream ends with `Broken` then.
"""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import functools
import logging
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transport.chunk import DEVICE_DTYPE, numpy_dtype
from transport.errors import Closed, DeviceError, ProtocolError, TooLarge, WouldBlock

log = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 512  # as of cuMemAlloc: any kernel may load from a block's start
_ALLOCATION_BYTES = 2 * 2**20  # smaller allocations share a page, and a handle names the page


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a tensor lies in device memory: the payload of `DEVICE_DTYPE`, as msgpack."""

    pool: str  # unique among all pools
    pid: int  # the process that owns it
    device: bytes  # the GPU's UUID
    memory: bytes  # IPC handle of the pool's allocation
    pool_bytes: int
    event: bytes  # IPC handle of the event after which the block may be read
    offset: int  # bytes from the start of the allocation
    nbytes: int
    dtype: str  # numpy name, or one of CARRIED_DTYPES
    shape: tuple[int, ...]


class FreeSpans:
    """Which ranges of an area are free. First fit; neighbours join. Pure."""

    def __init__(self, nbytes: int) -> None:
        self._spans = [(0, nbytes)]  # (offset, bytes), by offset

    def take(self, nbytes: int) -> int | None:
        """The offset of a range, or None when none is long enough."""
        for index, (offset, length) in enumerate(self._spans):
            if length >= nbytes:
                self._spans[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        at = bisect.bisect(self._spans, (offset, nbytes))
        if at < len(self._spans) and self._spans[at][0] == offset + nbytes:
            nbytes += self._spans.pop(at)[1]
        if at and sum(self._spans[at - 1]) == offset:
            offset, before = self._spans[at - 1][0], self._spans.pop(at - 1)[1]
            nbytes, at = nbytes + before, at - 1
        self._spans.insert(at, (offset, nbytes))


# ---- producer


class Loan:
    """A block that its producer fills. Dropped unsealed, it goes back. `pointer`: where it starts on the device."""

    def __init__(self, pool: CudaPool, offset: int, nbytes: int, event: int, stream: int) -> None:
        self.pointer = pool.base + offset
        self.nbytes = nbytes
        self._pool = pool
        self._offset = offset
        self._event = event  # its number in the pool
        self._stream = stream
        self._sealed: weakref.ref[np.ndarray] | None = None
        self._is_out = True

    def copy_from(self, pointer: int) -> None:
        """Have the stream copy `nbytes` of device memory into the block."""
        with self._pool.device as cuda:
            cuda.cuMemcpyDtoDAsync_v2(self.pointer, pointer, self.nbytes, self._stream)

    def seal(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """What a chunk carries: readable after what the stream has been given so far. It owns the block from here on."""
        if not self._is_out or self._sealed is not None:
            raise Closed("this block was given back, or sealed before")
        array = np.frombuffer(self._pool.describe(self._offset, self.nbytes, self._event, self._stream, dtype, shape), _PAYLOAD)
        self._sealed = weakref.ref(array, self.give_back)
        self._pool.sealed[self._event] = self  # until `array` dies
        return array

    def give_back(self, _: object = None) -> None:
        """Idempotent; never waits; may be called on any thread, inside any allocation."""
        if self._is_out:
            self._is_out = False
            self._pool.sealed.pop(self._event, None)
            self._pool.give_back(_Returned(self._offset, self.nbytes, self._event, self._stream if self._sealed is None else None))

    def __del__(self) -> None:
        self.give_back()


class _Returned(NamedTuple):
    """A block that has come back and is not free yet."""

    offset: int
    nbytes: int
    event: int
    unsealed: int | None  # the stream that may still write it, unknown to the event


class CudaPool:
    """A bounded allocation on one GPU whose blocks are lent to other processes.

    Loans wait in one line, first come, first served. All of it may be called on any thread except `loan`, which waits on its loop.
    """

    def __init__(self, pool_bytes: int, *, device: int = 0, max_blocks: int = 64) -> None:
        """Allocate it. Raises DeviceError: no driver, no such GPU, not enough memory, or no IPC there."""
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.device = Device(device)
        self.bytes_total = -(-pool_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        self._free = FreeSpans(self.bytes_total)
        self._lock = threading.Lock()  # of what is free
        self._returned: deque[_Returned] = deque()  # by any thread
        self.sealed: dict[int, Loan] = {}  # by event; whose arrays live
        self._unfinished: set[int] = set()  # events whose work was not done when their block came back
        self._line: deque[tuple[asyncio.Future[Loan], int, int]] = deque()  # (who waits, bytes, stream)
        self._loop: asyncio.AbstractEventLoop | None = None  # where they wait
        self._closed = False
        self.blocks_out = 0
        self.bytes_out = 0
        pointer, memory = ctypes.c_uint64(), _IpcHandle()
        self._events: list[tuple[int, bytes]] = []  # by number: (event, its handle)
        with self.device as cuda:
            cuda.cuMemAlloc_v2(ctypes.byref(pointer), self.bytes_total)
            cuda.cuIpcGetMemHandle(ctypes.byref(memory), pointer.value)
            for _ in range(max_blocks):
                event, handle = ctypes.c_void_p(), _IpcHandle()
                cuda.cuEventCreate(ctypes.byref(event), _EVENT_DISABLE_TIMING | _EVENT_INTERPROCESS)
                cuda.cuIpcGetEventHandle(ctypes.byref(handle), event)
                self._events.append((event.value or 0, bytes(handle)))
        self.base = pointer.value
        self._memory = bytes(memory)
        self._free_events = list(range(max_blocks))

    def try_loan(self, nbytes: int, stream: int) -> Loan:
        """A block to be written by work on `stream`. Raises WouldBlock, TooLarge, Closed."""
        if self._line:
            raise WouldBlock("others wait for device memory")
        loan = self._find(nbytes, stream)
        if loan is None:
            raise WouldBlock(f"no {nbytes} bytes of the pool's {self.bytes_total} are free")
        return loan

    async def loan(self, nbytes: int, stream: int) -> Loan:
        """The same; waits until there is room. Raises TooLarge, Closed."""
        loan = self._find(nbytes, stream) if not self._line else None
        if loan is not None:
            return loan
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Loan] = self._loop.create_future()
        self._line.append((future, nbytes, stream))
        self._serve()  # a block that came back before we stood in line woke nobody
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:  # granted and cancelled at once
                future.result().give_back()
            self._serve()
            raise

    def settle(self) -> None:
        """Count what has come back, without lending: for metrics and tests."""
        with self._lock:
            self._take_back()

    def close(self) -> None:
        """Free the memory. To be called when the consumers are done with it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for future, _, _ in self._line:
            if not future.done():
                future.set_exception(Closed("the device pool was closed"))
        self._line.clear()
        with self.device as cuda:
            for event, _ in self._events:
                cuda.cuEventDestroy_v2(event)
            cuda.cuMemFree_v2(self.base)

    # ---- for loans

    def describe(self, offset: int, nbytes: int, event: int, stream: int, dtype: str, shape: tuple[int, ...]) -> bytes:
        """Record the block's event on `stream`, and say where the block lies."""
        number, handle = self._events[event]
        with self.device as cuda:
            cuda.cuEventRecord(number, stream)
        return _encoder.encode(
            Block(self.name, os.getpid(), self.device.uuid, self._memory, self.bytes_total, handle, offset, nbytes, dtype, shape)
        )

    def give_back(self, returned: _Returned) -> None:
        self._returned.append(returned)
        if self._line and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._serve)
            except RuntimeError:
                if not self._loop.is_closed():  # closed with somebody in line: nobody waits any more
                    raise

    def _find(self, nbytes: int, stream: int) -> Loan | None:
        if self._closed:
            raise Closed("the device pool was closed")
        size = _rounded(nbytes)
        if size > self.bytes_total:
            raise TooLarge(f"{nbytes} bytes of device memory, and the pool has {self.bytes_total}")
        with self._lock:
            self._take_back()
            offset = self._free.take(size) if self._free_events else None
            if offset is None:
                return None
            # Events used again meanwhile are waited for as well: each was recorded on a stream that had waited for its earlier use.
            if self._unfinished:
                with self.device as cuda:
                    for event in self._unfinished:
                        cuda.cuStreamWaitEvent(stream, self._events[event][0], 0)
            self.blocks_out += 1
            self.bytes_out += size
            return Loan(self, offset, nbytes, self._free_events.pop(), stream)

    def _take_back(self) -> None:
        if self._closed:
            return
        while self._returned:
            offset, nbytes, event, unsealed = self._returned.popleft()
            if unsealed is not None:
                with self.device as cuda:
                    cuda.cuEventRecord(self._events[event][0], unsealed)
            self._free.give(offset, _rounded(nbytes))
            self._free_events.append(event)
            self._unfinished.add(event)
            self.blocks_out -= 1
            self.bytes_out -= _rounded(nbytes)
        if self._unfinished:
            cuda = driver()
            self._unfinished = {event for event in self._unfinished if not cuda.is_done(self._events[event][0])}

    def _serve(self) -> None:
        """Give blocks to those in line, in order."""
        while self._line:
            future, nbytes, stream = self._line[0]
            if not future.done():
                try:
                    loan = self._find(nbytes, stream)
                except (TooLarge, Closed, DeviceError) as error:
                    future.set_exception(error)
                else:
                    if loan is None:
                        return
                    future.set_result(loan)
            self._line.popleft()


# ---- consumer


class View:
    """Device memory of another process, to be read on the stream it was opened for. Hold it while what lies there is used."""

    __slots__ = ("_on_dead", "_owned", "dtype", "nbytes", "pointer", "shape")

    def __init__(self, pointer: int, block: Block, owned: _Owned, on_dead: Callable[[_Owned], None]) -> None:
        self.pointer = pointer
        self.nbytes = block.nbytes
        self.dtype = block.dtype
        self.shape = block.shape
        self._owned = owned
        self._on_dead = on_dead

    def __del__(self) -> None:
        self._on_dead(self._owned)  # on any thread, inside any allocation


class _Owned(NamedTuple):
    """What a view holds on to."""

    pool: _OpenedPool
    array: np.ndarray
    stream: int


class CudaReader:
    """Opens the blocks that chunks carry. Has one thread, which waits for streams; none before the first block, idle without any."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, _OpenedPool] = {}  # by name
        self._dead: SimpleQueue[_Owned | None] = SimpleQueue()  # of views that died
        self._thread: threading.Thread | None = None

    def open(self, array: np.ndarray, stream: int) -> View:
        """The memory that `array`, out of a chunk, stands for. `stream` waits on the device until it may be read; nothing waits here.

        The chunk is released when `array`, the view, and all that is made of it have died and `stream` has passed that point.

        Raises:
            ProtocolError: it is not a block, or not inside its pool.
            DeviceError: its GPU is not visible here, or the driver refuses; its producer may be gone.
        """
        block = _decoded(array)
        pool = self._pools.get(block.pool)
        if pool is None:
            pool = self._open_pool(block)
        pool.wait(stream, block.event)
        return View(pool.base + block.offset, block, _Owned(pool, array, stream), self._dead.put)

    def close(self) -> None:
        """Let go of every pool, when the views that are dying have. Idempotent."""
        if self._thread is not None:
            self._dead.put(None)
            self._thread.join()
            self._thread = None
        for name in list(self._pools):
            self._forget(name)

    def _open_pool(self, block: Block) -> _OpenedPool:
        pool = _OpenedPool(block)
        self._pools[block.pool] = pool
        # Its memory is kept by us who have opened it: let go when its process has ended.
        self._loop.call_soon_threadsafe(self._watch, block.pool)
        if self._thread is None:
            self._thread = threading.Thread(target=self._let_go, name="cuda-reader", daemon=True)
            self._thread.start()
        return pool

    def _watch(self, name: str) -> None:
        pool = self._pools.get(name)
        if pool is not None:
            self._loop.add_reader(pool.pidfd, self._forget, name)

    def _forget(self, name: str) -> None:
        pool = self._pools.pop(name, None)
        if pool is not None:
            self._loop.remove_reader(pool.pidfd)

    def _let_go(self) -> None:
        """Release what died, once the work that its stream had been given by then is done. On the thread."""
        while (dead := self._dead.get()) is not None:
            try:
                dead.pool.finish(dead.stream)
            except DeviceError:  # the stream's work has failed, so nothing reads the block; a thread that ends would release no more
                log.exception("a stream that read device memory failed")
            del dead  # the release


class _OpenedPool:
    """Another process's pool, mapped. Unmapped when nothing refers to it any more."""

    def __init__(self, block: Block) -> None:
        self.base = 0
        self.pidfd = -1
        self._events: dict[bytes, int] = {}  # by handle
        self._device = device = Device.by_uuid(block.device)
        try:
            self.pidfd = os.pidfd_open(block.pid)
        except ProcessLookupError as error:
            raise DeviceError(f"process {block.pid}, whose device memory this is, has ended") from error
        pointer, passed = ctypes.c_uint64(), ctypes.c_void_p()
        with device as cuda:
            cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), _IpcHandle.from_buffer_copy(block.memory), _IPC_LAZY_PEER_ACCESS)
            cuda.cuEventCreate(ctypes.byref(passed), _EVENT_DISABLE_TIMING | _EVENT_BLOCKING_SYNC)
        self.base = pointer.value
        self._passed = passed.value or 0  # used by the reader's thread alone

    def wait(self, stream: int, handle: bytes) -> None:
        """Have `stream` wait for the event of `handle`, unless that is past: work on a second context is slow while another has the GPU."""
        event = self._events.get(handle)
        if event is None:
            opened = ctypes.c_void_p()
            with self._device as cuda:
                cuda.cuIpcOpenEventHandle(ctypes.byref(opened), _IpcHandle.from_buffer_copy(handle))
            event = self._events[handle] = opened.value or 0
        if not driver().is_done(event):
            with self._device as cuda:
                cuda.cuStreamWaitEvent(stream, event, 0)

    def finish(self, stream: int) -> None:
        """Wait, asleep, until `stream` has done what it has been given."""
        with self._device as cuda:
            if not cuda.is_idle(stream):
                cuda.cuEventRecord(self._passed, stream)
                cuda.cuEventSynchronize(self._passed)

    def __del__(self) -> None:
        if self.base:
            with self._device as cuda:
                for event in (*self._events.values(), self._passed):
                    cuda.cuEventDestroy_v2(event)
                cuda.cuIpcCloseMemHandle(self.base)
        if self.pidfd >= 0:
            os.close(self.pidfd)


# ---- the driver


class Device:
    """A GPU of this process. `with device as cuda:` makes its primary context, which torch uses as well, current on this thread."""

    def __init__(self, index: int) -> None:
        self._cuda = cuda = driver()
        device, context, uuid = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # kept until the process ends, as the runtime does
        self.index = index
        self.uuid = bytes(uuid)
        self._context = context

    @staticmethod
    @functools.cache
    def by_uuid(uuid: bytes) -> Device:
        """Raises DeviceError when this process does not see it."""
        count = ctypes.c_int()
        driver().cuDeviceGetCount(ctypes.byref(count))
        for index in range(count.value):
            device = Device(index)
            if device.uuid == uuid:
                return device
        raise DeviceError(f"GPU {uuid.hex()} holds the tensor, and is none of the {count.value} that this process sees")

    def __enter__(self) -> _Driver:
        self._cuda.cuCtxPushCurrent_v2(self._context)
        return self._cuda

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def driver() -> _Driver:
    """The CUDA driver, initialised. Raises DeviceError when there is none."""
    return _Driver()


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING, _EVENT_INTERPROCESS = 1, 2, 4
_IPC_LAZY_PEER_ACCESS = 1

_out, _int, _size, _address, _handle = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_int,),
    "cuDeviceGet": (_out, _int),
    "cuDeviceGetCount": (_out,),
    "cuDeviceGetUuid_v2": (_out, _int),
    "cuDevicePrimaryCtxRetain": (_out, _int),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (_out,),
    "cuMemAlloc_v2": (_out, _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _handle),
    "cuMemcpyDtoHAsync_v2": (_address, _address, _size, _handle),
    "cuMemHostRegister_v2": (_address, _size, _int),
    "cuMemHostUnregister": (_address,),
    "cuStreamCreate": (_out, _int),
    "cuStreamDestroy_v2": (_handle,),
    "cuIpcGetMemHandle": (_out, _address),
    "cuIpcOpenMemHandle_v2": (_out, _IpcHandle, _int),
    "cuIpcCloseMemHandle": (_address,),
    "cuIpcGetEventHandle": (_out, _handle),
    "cuIpcOpenEventHandle": (_out, _IpcHandle),
    "cuEventCreate": (_out, _int),
    "cuEventDestroy_v2": (_handle,),
    "cuEventRecord": (_handle, _handle),
    "cuEventSynchronize": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, _int),
}


class _Driver:
    """libcuda's functions by their names; each raises DeviceError when the driver refuses."""

    def __init__(self) -> None:
        try:
            self._library = library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"no CUDA driver: {error}") from error
        for name, types in _SIGNATURES.items():
            setattr(self, name, self._checked(name, types))
        self._query_event, self._query_stream = library.cuEventQuery, library.cuStreamQuery
        self._query_event.argtypes = self._query_stream.argtypes = (_handle,)
        self.cuInit(0)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not among the driver's functions that are used")

    def is_done(self, event: int) -> bool:
        """Whether the work before `event` is done."""
        return bool(self._query_event(event) == 0)

    def is_idle(self, stream: int) -> bool:
        """Whether `stream` has done all it was given."""
        return bool(self._query_stream(stream) == 0)

    def _checked(self, name: str, types: tuple[Any, ...]) -> Any:
        function = getattr(self._library, name)
        function.argtypes = types
        function.errcheck = self._check
        return function

    def _check(self, code: int, function: Any, arguments: tuple[Any, ...]) -> int:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DeviceError(f"{function.__name__}: {(text.value or b'unknown error').decode()} ({code})")
        return code


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES


def _decoded(array: np.ndarray) -> Block:
    try:
        block = _decoder.decode(array.tobytes())
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"not a block of device memory: {error}") from error
    if not 0 <= block.offset <= block.offset + block.nbytes <= block.pool_bytes or len(block.memory) != 64 or len(block.event) != 64:
        raise ProtocolError(f"{block.nbytes} bytes at {block.offset} of a pool of {block.pool_bytes}")
    return block


_PAYLOAD = numpy_dtype(DEVICE_DTYPE)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Block)
