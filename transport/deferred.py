"""An array whose numbers are not in host memory yet: they are written where they go, once, when the chunk that has it is sent.

    array = Deferred(shape, dtype)        describe, headers and credit take it for an array of that shape
    np.copyto(target, array)              array.write(target): may wait, so not on the loop

Knows shapes and dtypes. Knows nothing of devices (`cuda_host.py` is who does) or of where `target` lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np


class Deferred(np.ndarray):
    """Has nothing to read: what would read it is a TypeError, but for `np.copyto` from it, `copy` and `tobytes`. Derive, and write `write`."""

    def __new__(cls, shape: Sequence[int], dtype: np.dtype[Any]) -> Self:
        return np.ndarray.__new__(cls, tuple(shape), dtype, bytes(dtype.itemsize), 0, (0,) * len(shape))

    def write(self, target: np.ndarray) -> None:
        """Bring the numbers into `target`, of this shape and dtype and C-contiguous. Blocks; on any thread."""
        raise NotImplementedError

    def tobytes(self, order: Any = "C") -> bytes:
        target = np.empty(self.shape, self.dtype)
        self.write(target)
        return target.tobytes(order)

    def copy(self, order: Any = "C") -> np.ndarray:  # type: ignore[override] # there is nothing of this class to be had
        target = np.empty(self.shape, self.dtype)
        self.write(target)
        return target

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        if function is np.copyto and len(arguments) == 2 and not keywords and arguments[1] is self:
            self.write(arguments[0])
            return None
        raise TypeError(f"{function.__name__}: the numbers of this array are not in host memory; send it in a chunk")

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        raise TypeError(f"{ufunc.__name__}: the numbers of this array are not in host memory; send it in a chunk")

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("the numbers of this array are not in host memory; send it in a chunk")


def any_deferred(arrays: Sequence[np.ndarray]) -> bool:
    """Whether filling a payload with these may wait."""
    for array in arrays:  # noqa: SIM110 (on every chunk's way, and `any` takes longer)
        if type(array) is not np.ndarray and isinstance(array, Deferred):
            return True
    return False
