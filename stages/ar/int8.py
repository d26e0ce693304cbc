"""Linear layers in 8 bits for processors that have nothing better: int8 weights, one scale per row, activations quantized as they come.

Half the time of float32 per token where there is neither bfloat16 nor AVX-512, as reading the weights is what decoding costs.
Activations share one scale per forward pass, so what a token gives depends a little on what is computed beside it.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from streamrt import ConfigError


class Int8Linear(nn.Module):
    """`nn.Linear` with packed int8 weights; float32 in and out, CPU only."""

    def __init__(self, linear: nn.Linear, *, reduce_range: bool) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).clamp(min=1e-12).double()
        with warnings.catch_warnings():
            # torch means to remove quantized tensors; nothing else in it runs int8 fast on AVX2 yet. `quantize` looks whether they are there.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales, torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias)
        self._reduce_range = reduce_range
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x, self._packed, self._reduce_range)


def quantize(model: nn.Module, *, has_vnni: bool) -> None:
    """Put an `Int8Linear` in the place of every linear layer of `model`, which is float32 and on the CPU."""
    if torch.backends.quantized.engine == "none" or not hasattr(torch, "quantize_per_channel"):
        raise ConfigError('dtype: this build of torch has no int8 kernels for this processor: choose "float32"', param="dtype")
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                # Without VNNI two products are added in 16 bits: 7-bit activations can not overflow them.
                setattr(parent, name, Int8Linear(child, reduce_range=not has_vnni))
                found += 1
    if not found:
        raise ConfigError(f"dtype: {type(model).__name__} has no plain linear layer to quantize", param="dtype")
