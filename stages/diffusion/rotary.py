"""QwenImage's rotary embeddings in real numbers. The compiler makes no code for complex ones: each would be passes of its own over all tokens.

Knows one class of diffusers. The numbers are the same, to rounding.
"""

from __future__ import annotations

from typing import Any

import torch


def make_real(module: Any) -> None:
    """Have a QwenImageTransformer2DModel rotate by real tables. Any other module is left as it is. Idempotent."""
    if type(module).__name__ != "QwenImageTransformer2DModel":
        return
    from diffusers.models.transformers import transformer_qwenimage

    complex_one = transformer_qwenimage.apply_rotary_emb_qwen
    if complex_one is not _apply:
        _apply.complex_one = complex_one  # type: ignore[attr-defined]
        transformer_qwenimage.apply_rotary_emb_qwen = _apply
    module.pos_embed.register_forward_hook(lambda _, __, tables: tuple(map(_real, tables)))


def _apply(x: torch.Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1) -> torch.Tensor:
    """In the place of diffusers' function of these arguments; what it does not know goes there."""
    if use_real or freqs_cis.is_complex():
        return _apply.complex_one(x, freqs_cis, use_real, use_real_unbind_dim)  # type: ignore[attr-defined]
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (rows, tokens, heads, channels / 2)
    cos, sin = freqs_cis.unsqueeze(1).unbind(-1)  # (tokens, 1, channels / 2)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(3).type_as(x)


def _real(table: torch.Tensor) -> torch.Tensor:
    """(tokens, channels / 2) complex as (tokens, channels / 2, 2)."""
    return torch.view_as_real(table) if table.is_complex() else table
