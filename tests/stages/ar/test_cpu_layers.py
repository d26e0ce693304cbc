"""What a CPU runs instead of a model's own modules, beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stages.ar.cpu_layers import GatedMLP, PackedLinear, can_exchange, exchange

pytestmark = pytest.mark.skipif(not can_exchange(), reason="this torch has no oneDNN")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_layer_gives_what_plain_ones_do(is_tied: bool, bias: bool) -> None:
    torch.manual_seed(0)
    plain, other = nn.Linear(48, 200, bias=bias), nn.Linear(48, 120, bias=bias)
    packed, both = PackedLinear(plain, is_tied=is_tied), PackedLinear(plain, other)
    for rows in (1, 2, 8, 65):
        x = torch.randn(1, rows, 48)
        close(packed(x), plain(x))
        close(both(x), torch.cat([plain(x), other(x)], -1))
    torch.testing.assert_close(packed.weight, plain.weight, rtol=0, atol=0)


@torch.inference_mode()
def test_norms_and_gated_layers_of_a_model_are_exchanged_and_give_the_same() -> None:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    model: Any = Qwen3Model(config).eval()
    for norm in (model.norm, model.layers[0].self_attn.q_norm):
        norm.weight.uniform_(0.5, 2)
    tokens = torch.arange(7)[None]
    expected = model(input_ids=tokens).last_hidden_state
    exchange(model)
    close(model(input_ids=tokens).last_hidden_state, expected)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(GatedMLP) == 2
    assert kinds.count(nn.RMSNorm) == 2 * 4 + 1


def test_only_wide_float32_layers_are_packed() -> None:
    model = nn.ModuleDict(
        {
            "up": nn.Linear(16, 64),
            "square": nn.Linear(16, 16),
            "up16": nn.Linear(16, 64, dtype=torch.bfloat16),
            "inside": nn.ModuleDict({"up": nn.Linear(16, 32)}),
        }
    )
    exchange(model)
    assert [name for name, layer in model.named_modules() if isinstance(layer, PackedLinear)] == ["up", "inside.up"]
