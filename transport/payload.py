"""Arrays into the bytes of one payload, as their specs say; `chunk.view` is the way back. Pure.

Source: numpy.copyto lets other threads run while it copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.chunk import TensorSpec


def payload_bytes(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> int:
    """Length of the payload. Raises ValueError when `arrays` are not what `specs` describe."""
    if len(specs) != len(arrays):
        raise ValueError(f"the header describes {len(specs)} tensors, got {len(arrays)} arrays")
    end = 0
    for spec, array in zip(specs, arrays, strict=True):
        if array.nbytes != spec.nbytes or spec.offset < 0:
            raise ValueError(f"tensor {spec.name}: got {array.nbytes} bytes, the header says {spec.nbytes} at {spec.offset}")
        end = max(end, spec.offset + spec.nbytes)
    return end


def fill(payload: np.ndarray, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
    """Copy `arrays` to their places in `payload` (bytes)."""
    for spec, array in zip(specs, arrays, strict=True):
        if spec.nbytes:
            np.copyto(payload[spec.offset : spec.offset + spec.nbytes], array.reshape(-1).view(np.uint8))


def pack(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], nbytes: int) -> bytes:
    """The payload of `nbytes` as a bytes object, for small ones."""
    if not nbytes:
        return b""
    if len(specs) == 1 and not specs[0].offset:
        return arrays[0].tobytes()
    payload = np.zeros(nbytes, np.uint8)
    fill(payload, specs, arrays)
    return payload.tobytes()
