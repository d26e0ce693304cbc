"""Calls of one module, of several requests, as one call: `key` says which may go together, `Merged` joins and splits them.

    call of A (2 rows) --+                          +--> its 2 rows of the result
                         +-- one call (3 rows) --+--+
    call of B (1 row)  --+                          +--> its row

Knows tensors, lists and dicts as modules take them. Knows nothing of requests.

Rules
- A tensor whose first dimension is the call's rows, or 1, is a batch and is joined along it; a 0-d tensor is one value per call.
- Any other tensor (position ids, rotary tables) is shared: calls go together when its content is the same.
- A list with one element per row is joined; a list of tensors goes together when their shapes are the same.
- Text of different lengths goes together where the module takes a mask for it (`MASKED`): the shorter is padded, and the padding masked.
- Everything else must be equal. A single call is passed on untouched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

# module class -> its argument of shape (rows, tokens, channels) -> the argument that masks it: (rows, tokens), 1 = valid.
MASKED: dict[str, dict[str, str]] = {"QwenImageTransformer2DModel": {"encoder_hidden_states": "encoder_hidden_states_mask"}}

# Arguments that never carry a batch dimension, whatever their shape looks like.
SHARED = ("img_ids", "txt_ids", "image_rotary_emb", "rotary_embedding", "freqs_cis")


class Call:
    """One call that a request waits for."""

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.rows = _rows(args, kwargs)
        self.masked = MASKED.get(type(module).__name__, {})


class Digests:
    """Content of shared tensors, hashed once for each. Owned by one request, which keeps these tensors alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def of(self, tensor: torch.Tensor) -> str:
        known = self._known.get(id(tensor))
        if known is None:
            if len(self._known) >= 64:  # of tensors that are made anew at each step
                self._known.clear()
            content = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
            known = self._known[id(tensor)] = (tensor, hashlib.blake2b(content, digest_size=8).hexdigest())
        return known[1]


def key(call: Call, digests: Digests) -> Hashable:
    """Calls with equal keys can be merged."""
    padded = set(call.masked) | set(call.masked.values())

    def sign(name: str, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if _is_shared(name, value, call.rows):
                return "shared", tuple(value.shape), value.dtype, digests.of(value)
            return "rows", tuple(value.shape[1:]), value.dtype
        if isinstance(value, (list, tuple)):
            if _is_per_row(name, value, call.rows) and not any(isinstance(item, torch.Tensor) for item in value):
                return "list", tuple(repr(item) for item in value[:1])
            return type(value).__name__, tuple(sign(name, item) for item in value)
        if isinstance(value, Mapping):
            return "dict", tuple((inner, sign(inner, item)) for inner, item in value.items())
        return repr(value)

    positional = tuple(sign("", value) for value in call.args)
    named = tuple((name, sign(name, value)) for name, value in call.kwargs.items() if name not in padded)
    masks = tuple((name, call.kwargs[name].shape[2:]) for name in call.masked if isinstance(call.kwargs.get(name), torch.Tensor))
    return id(call.module), positional, named, masks


class Merged:
    """Calls of one key as one."""

    def __init__(self, calls: Sequence[Call], *, text_multiple: int = 1) -> None:
        """Text that has to be padded is padded to a multiple of `text_multiple` tokens."""
        self._rows = [call.rows for call in calls]
        first = calls[0]
        if len(calls) == 1:
            self.args, self.kwargs = first.args, first.kwargs
            return
        named = [_padded(calls, name, text_multiple) if name in first.masked else None for name in first.kwargs]
        self.args = tuple(self._join("", [call.args[place] for call in calls]) for place in range(len(first.args)))
        self.kwargs = {
            name: self._join(name, [call.kwargs[name] for call in calls])
            for name in first.kwargs
            if name not in first.masked and name not in first.masked.values()
        }
        for pair in filter(None, named):
            self.kwargs.update(pair)

    def split(self, result: Any) -> list[Any]:
        """The result of the one call as the results of each."""
        if len(self._rows) == 1:
            return [result]
        if isinstance(result, torch.Tensor):
            return list(result.split(self._rows))
        if isinstance(result, Mapping):  # a ModelOutput
            pieces = {name: self.split(value) for name, value in result.items()}
            return [type(result)(**{name: piece[i] for name, piece in pieces.items()}) for i in range(len(self._rows))]
        if isinstance(result, tuple):
            columns = [self.split(value) for value in result]
            return [tuple(column[i] for column in columns) for i in range(len(self._rows))]
        if isinstance(result, list):
            ends = [sum(self._rows[: i + 1]) for i in range(len(self._rows))]
            return [result[end - rows : end] for end, rows in zip(ends, self._rows, strict=True)]
        if result is None:
            return [None] * len(self._rows)
        raise TypeError(f"a module gave {type(result).__name__}, expected tensors, or tuples, lists or a ModelOutput of them")

    def _join(self, name: str, values: list[Any]) -> Any:
        first, rows = values[0], self._rows[0]
        if isinstance(first, torch.Tensor):
            if _is_shared(name, first, rows):
                return first
            return torch.cat([_expanded(value, count) for value, count in zip(values, self._rows, strict=True)])
        if isinstance(first, (list, tuple)):
            if _is_per_row(name, first, rows):
                return type(first)(item for value in values for item in value)
            return type(first)(self._join(name, [value[place] for value in values]) for place in range(len(first)))
        if isinstance(first, Mapping):
            return {inner: self._join(inner, [value[inner] for value in values]) for inner in first}
        return first


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of a call: those of its first batch."""
    for value in (*args, kwargs.get("hidden_states"), kwargs.get("sample"), kwargs.get("x")):
        if isinstance(value, torch.Tensor):
            return value.shape[0]
        if isinstance(value, list):
            return len(value)
    raise TypeError(f"got a call without hidden_states or sample: {sorted(kwargs)}")


def _is_shared(name: str, value: torch.Tensor, rows: int) -> bool:
    if name in SHARED and value.dim() < 3:
        return True
    return value.dim() > 0 and value.shape[0] not in (1, rows)


def _is_per_row(name: str, value: Sequence[Any], rows: int) -> bool:
    return isinstance(value, list) and len(value) == rows and name not in SHARED


def _expanded(value: torch.Tensor, rows: int) -> torch.Tensor:
    if value.dim() == 0:
        return value.expand(rows)
    return value if value.shape[0] == rows else value.expand(rows, *value.shape[1:])


def _padded(calls: Sequence[Call], name: str, multiple: int) -> dict[str, Any]:
    """Argument `name` of all calls, padded to the longest, and its mask; no mask when nothing is padded or masked."""
    mask_name = calls[0].masked[name]
    lengths = [call.kwargs[name].shape[1] for call in calls]
    longest = max(lengths)
    needed = any(call.kwargs.get(mask_name) is not None for call in calls) or min(lengths) < longest
    if needed:
        longest = -(-longest // multiple) * multiple
    values, masks = [], []
    for call in calls:
        value, mask = call.kwargs[name], call.kwargs.get(mask_name)
        if mask is None:
            mask = value.new_ones(value.shape[:2], dtype=torch.long)
        missing = longest - value.shape[1]
        values.append(functional.pad(value, (0, 0, 0, missing)))
        masks.append(functional.pad(mask, (0, missing)))
    return {name: torch.cat(values), mask_name: torch.cat(masks) if needed else None}
