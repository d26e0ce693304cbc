"""The memory behind the blocks: keys and values of every layer, and rows that go with tokens.

    keys[layer], values[layer]   (blocks, block_size, kv_heads, head_dim)
    rows[layer]                  (blocks, block_size, hidden): hidden states of chosen layers, so that a prefix hit has them too

Knows shapes and a model's config. Knows nothing of sequences: whoever writes says where, by slot = block * block_size + offset.

Rules
- Block 0 is written to by what has no place (padding), and never read.
- A slot's content is valid once the forward pass that wrote it is over, and belongs to whoever holds its block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


class KVStore:
    """Allocated once, for `blocks` blocks."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        row_layers: tuple[int, ...] = (),
        hidden_size: int = 0,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        shape = (blocks, block_size, kv_heads, head_dim)
        self.keys = [zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [zeros(shape, dtype, device) for _ in range(layers)]
        self.rows = {n: zeros((blocks, block_size, hidden_size), dtype, device) for n in row_layers}

    def read_rows(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """(slots, hidden): a copy."""
        return self.rows[layer].flatten(0, 1).index_select(0, slots.to(self.rows[layer].device))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Like torch's, but on a CPU the memory is not there until it is written to."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)


def text_config(model: Any) -> Any:
    """The part of a model's config that says what its decoder looks like."""
    return model.config.get_text_config(decoder=True)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def token_bytes(config: Any, dtype: torch.dtype, row_layers: tuple[int, ...] = (), ranks: int = 1) -> int:
    """Bytes that one token takes in a store, on each of `ranks`."""
    kv = 2 * config.num_hidden_layers * kv_heads(config) * head_dim(config) // ranks
    return (kv + len(row_layers) * config.hidden_size) * dtype.itemsize


def unsupported(config: Any) -> str:
    """Why a model with this config can not run on a paged store, "" when it can."""
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := types - KNOWN_LAYERS:
        return f"layers of {', '.join(sorted(unknown))}"
    if getattr(config, "attn_logit_softcapping", None):
        return "soft-capped attention scores"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    return ""
