"""The chunk: the unit that streams on an edge.

`ChunkHeader` is what is said of a chunk (one small msgpack message); its bytes lie beside it, in a ring slot, inline or in
a TCP frame. `Chunk` is the two together as a stage sees it: numpy views and typed fields.

Knows dtype names and byte ranges; knows nothing of models, requests' meaning or torch.

Rules
- `seq` counts 0, 1, 2 ... per (request, source stage, port, epoch) on each edge; a gap is an error, a repeat is dropped.
- The last chunk of a stream has a `place` other than `PARTIAL`, always, exactly once.
- Tensors are C-contiguous. dtypes that numpy lacks (bfloat16, float8_*) travel by name over a uint8/uint16 view.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from transport.deferred import Deferred

Modality = Literal["text", "tokens", "audio", "codes", "hidden", "image", "video", "latents", "kv", "action", "event"]
MODALITIES: tuple[str, ...] = Modality.__args__  # type: ignore[attr-defined]

# Names that numpy does not know, and the numpy type of the same width that carries their bits.
CARRIED_DTYPES: dict[str, str] = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "utf8": "uint8"}

# Not the tensor but where it lies in device memory, see cuda_ipc.py. The lane holds what such an array owns until it is released.
DEVICE_DTYPE = "device_block"


class Place(IntEnum):
    """Where a chunk stands in its stream."""

    PARTIAL = 0  # more will follow
    FINAL = 1  # the last one, and it has content
    EMPTY_FINAL = 2  # the stream has ended; nothing in this one
    FAILED = 3  # the stream ended early; `meta["error"]` says why


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor in a chunk's payload."""

    name: str
    dtype: str  # numpy name, or one of CARRIED_DTYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload, a multiple of 64
    nbytes: int


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is said of a chunk; its bytes lie beside it."""

    request_id: str
    epoch: int  # chunks of an older epoch are dropped where they are found
    stage: str  # who made it; "client" for what the client feeds
    port: str  # its output port
    seq: int  # 0, 1, 2 ... per request, stage, port and epoch; no gaps
    modality: str  # one of MODALITIES
    place: int = 0  # Place
    tensors: tuple[TensorSpec, ...] = ()
    sample_rate_hz: int = 0  # audio only; mono float32 on every edge
    fps: float = 0.0  # video only
    meta: dict[str, Any] = {}  # small, msgpack-able; audio: {"text_start": int, "text_end": int} when known
    sent_ns: int = 0  # CLOCK_MONOTONIC of the sender (meaningful on one host only)


class Chunk:
    """A chunk as a stage or a client sees it: modality, tensors (numpy views, read-only when they arrived), units, meta.

    What a stage yields needs only content; the actor fills in request, stage and seq. Arrays of an arrived chunk may lie
    in shared memory: the slot stays leased while any view of it lives, so keep an array as long as you like, but a stage
    that hoards big ones stalls its producer. `copy()` detaches.
    """

    __slots__ = ("epoch", "fps", "meta", "modality", "place", "port", "request_id", "sample_rate_hz", "seq", "stage", "tensors")

    def __init__(
        self,
        modality: Modality | str,
        tensors: dict[str, np.ndarray] | None = None,
        *,
        port: str = "",
        sample_rate_hz: int = 0,
        fps: float = 0.0,
        meta: dict[str, Any] | None = None,
        place: Place = Place.PARTIAL,
        request_id: str = "",
        stage: str = "",
        epoch: int = 0,
        seq: int = -1,
    ) -> None:
        self.modality = modality
        self.tensors = tensors if tensors is not None else {}
        self.port = port  # "" means the stage's only port
        self.sample_rate_hz = sample_rate_hz
        self.fps = fps
        self.meta = meta if meta is not None else {}
        self.place = place
        self.request_id = request_id
        self.stage = stage
        self.epoch = epoch
        self.seq = seq

    @property
    def is_last(self) -> bool:
        return self.place != Place.PARTIAL

    @property
    def text(self) -> str:
        """The text of a `text` chunk ("" when it carries none)."""
        data = self.tensors.get("text")
        return "" if data is None else bytes(data).decode()

    @property
    def samples(self) -> np.ndarray:
        """The samples of an `audio` chunk: (samples,) float32, mono, at `sample_rate_hz`."""
        data = self.tensors.get("audio")
        return np.zeros(0, np.float32) if data is None else data

    @property
    def event(self) -> str:
        """The name of an `event` chunk; its fields are the rest of `meta`."""
        return str(self.meta.get("event", ""))

    def copy(self) -> Chunk:
        """The same chunk over private memory."""
        twin = Chunk.__new__(Chunk)
        for name in Chunk.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.tensors = {name: array.copy() for name, array in self.tensors.items()}
        return twin

    def __repr__(self) -> str:
        what = ", ".join(f"{name}{list(array.shape)}" for name, array in self.tensors.items())
        return f"<Chunk {self.modality} {self.stage}.{self.port}#{self.seq} {Place(self.place).name} {what} {self.meta or ''}>"


def text_chunk(text: str, *, port: str = "", **meta: Any) -> Chunk:
    """A `text` chunk. Text is never split inside a character."""
    return Chunk("text", {"text": np.frombuffer(text.encode(), np.uint8)} if text else {}, port=port, meta=meta)


def audio_chunk(samples: np.ndarray, sample_rate_hz: int, *, port: str = "", **meta: Any) -> Chunk:
    """An `audio` chunk: (samples,) float32, mono, in [-1, 1]."""
    samples = np.ascontiguousarray(samples, np.float32)
    if samples.ndim != 1:
        raise ValueError(f"audio on edges is mono: got shape {samples.shape}, expected (samples,)")
    return Chunk("audio", {"audio": samples}, port=port, sample_rate_hz=sample_rate_hz, meta=meta)


def event_chunk(event: str, *, port: str = "", **fields: Any) -> Chunk:
    """An `event` chunk: a name and small msgpack-able fields."""
    return Chunk("event", port=port, meta={"event": event, **fields})


def end_chunk(*, port: str = "", **meta: Any) -> Chunk:
    """An empty final `event` chunk: says that a stream has ended, with metadata."""
    return Chunk("event", port=port, meta=meta, place=Place.EMPTY_FINAL)


def describe(tensors: dict[str, np.ndarray]) -> tuple[tuple[TensorSpec, ...], list[np.ndarray], int]:
    """Specs, C-contiguous arrays and total bytes of a payload that holds `tensors` one after the other, 64-byte aligned.

    An array named "text" of uint8 travels as dtype "utf8". Bits that numpy can not name come as an array of their width whose
    dtype says so: `np.dtype("uint16", metadata={"carries": "bfloat16"})`.
    """
    specs: list[TensorSpec] = []
    arrays: list[np.ndarray] = []
    offset = 0
    for name, array in tensors.items():
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            array = array if isinstance(array, Deferred) else np.asarray(array, order="C")  # keeps 0-d as it is
        nbytes, dtype = array.nbytes, array.dtype
        known = _names.get(dtype) if dtype.metadata is None and name != "text" else None
        specs.append(TensorSpec(name, known or _dtype_name(name, dtype), array.shape, offset, nbytes))
        arrays.append(array)
        offset += -(-nbytes // 64) * 64
    return tuple(specs), arrays, offset


def on_device(specs: Sequence[TensorSpec]) -> bool:
    """Whether any of these tensors lies in device memory."""
    for spec in specs:  # noqa: SIM110 (on every chunk's way, and `any` takes longer)
        if spec.dtype == DEVICE_DTYPE:
            return True
    return False


@lru_cache(256)  # peers name them
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of arrays that hold what is called `name`. Raises TypeError for what nobody knows."""
    word = "uint8" if name == DEVICE_DTYPE else CARRIED_DTYPES.get(name, name)
    return np.dtype(word) if word == name or name == "utf8" else np.dtype(word, metadata={"carries": name})


def view(spec: TensorSpec, payload: Any) -> np.ndarray:
    """A read-only array over `payload` (a read-only buffer) as `spec` describes it; raises ValueError when the range does not fit."""
    try:
        array: np.ndarray = np.ndarray(spec.shape, numpy_dtype(spec.dtype), payload, spec.offset)
    except TypeError as error:  # beyond the end
        raise ValueError(f"tensor {spec.name}: {error}") from error
    if array.nbytes != spec.nbytes:
        raise ValueError(f"tensor {spec.name}: {spec.nbytes} bytes can not hold {spec.shape} {spec.dtype}")
    return array


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    metadata = dtype.metadata
    if metadata and "carries" in metadata:
        return str(metadata["carries"])
    known = _names.get(dtype)  # numpy takes 4 us to spell it
    if known is None:
        known = _names[dtype] = dtype.name
    return "utf8" if name == "text" and known == "uint8" else known


_names: dict[np.dtype[Any], str] = {}
