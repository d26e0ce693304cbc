"""Arrays into the bytes of one payload, as their specs say; `chunk.view` is the way back. Pure.

Source: numpy lets other threads run while it copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.chunk import TensorSpec
from transport.deferred import Deferred


def payload_bytes(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> int:
    """Length of the payload. Raises ValueError when `arrays` are not what `specs` describe."""
    if len(specs) != len(arrays):
        raise ValueError(f"the header describes {len(specs)} tensors, got {len(arrays)} arrays")
    end = index = 0
    for spec in specs:
        nbytes, offset = spec.nbytes, spec.offset
        if arrays[index].nbytes != nbytes or offset < 0:
            raise ValueError(f"tensor {spec.name}: got {arrays[index].nbytes} bytes, the header says {nbytes} at {offset}")
        if offset + nbytes > end:
            end = offset + nbytes
        index += 1  # noqa: SIM113 (on every chunk's way, and `enumerate` takes longer)
    return end


def fill(payload: np.ndarray, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
    """Copy `arrays` to their places in `payload` (bytes)."""
    for spec, array in zip(specs, arrays):  # noqa: B905 (compared in `payload_bytes`)
        if spec.nbytes:
            target = np.ndarray(array.shape, array.dtype, payload, spec.offset)
            if isinstance(array, Deferred):
                array.write(target)
            else:
                target[...] = array  # np.copyto, without the microsecond that it takes to see whether others overrule it


def pack(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], nbytes: int) -> bytes:
    """The payload of `nbytes` as a bytes object, for small ones."""
    if len(arrays) == 1 and not specs[0].offset:
        return arrays[0].tobytes()
    if not nbytes:
        return b""
    payload = np.zeros(nbytes, np.uint8)
    fill(payload, specs, arrays)
    return payload.tobytes()
