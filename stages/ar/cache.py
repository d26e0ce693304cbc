"""Keys and values: a cache that grows in place, and a small store of finished conversations whose beginnings are used again.

Knows transformers' cache classes. Knows nothing of requests.

Rules
- A stored cache is never written again; a hit copies its first tokens.
- Only caches whose every layer keeps all tokens are stored: a sliding window or a recurrent state can not be cut short.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

SLACK = 128  # tokens of room that a buffer starts with


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, as views of buffers that double when full: a step copies its own token, not all before it."""

    is_croppable = False
    is_initialized: bool
    keys: torch.Tensor
    values: torch.Tensor
    _key_buffer: torch.Tensor  # (1, heads, room, head size)
    _value_buffer: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.is_initialized or end > self._key_buffer.shape[-2]:
            self._grow(key_states, value_states, end)
        self._key_buffer[..., start:end, :] = key_states
        self._value_buffer[..., start:end, :] = value_states
        self.keys, self.values = self._key_buffer[..., :end, :], self._value_buffer[..., :end, :]
        return self.keys, self.values

    def _grow(self, like_keys: torch.Tensor, like_values: torch.Tensor, length: int) -> None:
        room = max(length + SLACK, 2 * self.get_seq_length())
        old_keys, old_values, was_initialized = self.keys, self.values, self.is_initialized
        self._key_buffer, self._value_buffer = _with_length(like_keys, room), _with_length(like_values, room)
        self.device, self.dtype, self.is_initialized = like_keys.device, like_keys.dtype, True
        if was_initialized:
            self._key_buffer[..., : old_keys.shape[-2], :] = old_keys
            self._value_buffer[..., : old_values.shape[-2], :] = old_values

    @property
    def nbytes(self) -> int:
        return self._key_buffer.nbytes + self._value_buffer.nbytes if self.is_initialized else 0


def _with_length(like: torch.Tensor, length: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:-2], length, like.shape[-1]))


def new_cache(config: Any) -> Cache:
    """An empty cache for a model: growing layers where all tokens are kept, transformers' own where they are not."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def begin_with(config: Any, stored: Cache, length: int) -> Cache:
    """A new cache that holds the first `length` tokens of `stored`."""
    cache = new_cache(config)
    for layer, old in zip(cache.layers, stored.layers, strict=True):
        if old.is_initialized:
            layer.update(old.keys[..., :length, :], old.values[..., :length, :])
    return cache


class PrefixStore:
    """Token sequences and their caches, the least recently used dropped first. `max_bytes` 0 stores nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[tuple[int, ...], tuple[Cache, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: list[int]) -> tuple[Cache | None, int]:
        """The stored cache that shares the longest beginning with `tokens`, and that length; at least one token is left to compute."""
        best: tuple[int, ...] | None = None
        length = 0
        for stored in self._entries:
            if (shared := common_prefix(stored, tokens)) > length:
                best, length = stored, shared
        length = min(length, len(tokens) - 1)
        if best is None or length == 0:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best][0], length

    def put(self, tokens: list[int], cache: Cache) -> None:
        """Keep `cache`, which holds exactly `tokens`; entries that `tokens` begin with go, as this one serves for them."""
        if not tokens or not all(isinstance(layer, GrowingLayer) for layer in cache.layers):
            return
        nbytes = sum(layer.nbytes for layer in cache.layers)
        if nbytes > self.max_bytes:
            return
        key = tuple(tokens)
        for stored in [s for s in self._entries if key[: len(s)] == s]:
            self._drop(stored)
        self._entries[key] = cache, nbytes
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, key: tuple[int, ...]) -> None:
        self.nbytes -= self._entries.pop(key)[1]


def common_prefix(a: tuple[int, ...], b: list[int]) -> int:
    """How many tokens `a` and `b` begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
