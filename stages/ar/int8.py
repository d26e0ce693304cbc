"""Linear layers in 8 bits, for processors that have neither bfloat16 nor AVX-512.

Reading the weights is what decoding costs, and int8 reads a quarter of what float32 does.

Rules
- One scale per row of the weight, fixed; one scale per token, found as it comes. The first token of a text is an outlier by a factor of
  hundreds in many models: one scale for a whole pass, as torch's own dynamic quantization has it, would leave the others two bits.
- So a token's result does not depend on what is computed beside it: products are summed in integers.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from streamrt import ConfigError

LEVELS, ZERO = 127, 128  # activations: uint8, 1..255 around 128
ROWS = 256  # of a weight, quantized at a time: what lies between fits into the caches


class Int8Linear(nn.Module):
    """`nn.Linear` with packed int8 weights; float32 in and out, CPU only."""

    def __init__(self, linear: nn.Linear, *, has_vnni: bool) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # Without VNNI two products are added in 16 bits with saturation: 2 * 255 * 63 is what fits.
        levels = 127 if has_vnni else 63
        scales = (torch.maximum(weight.amax(1), -weight.amin(1)) / levels).clamp(min=1e-12)
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        for rows in range(0, len(weight), ROWS):
            at = slice(rows, rows + ROWS)
            rounded[at] = torch.div(weight[at], scales[at, None]).round_()
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)  # noqa: SLF001 - no public name
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12)  # (..., 1): every token is brought to [-1, 1]
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x / largest, 1 / LEVELS, ZERO, self._packed)
        y *= largest
        return y if self._bias is None else y.add_(self._bias)


def quantize(model: nn.Module, *, has_vnni: bool) -> None:
    """Put an `Int8Linear` in the place of every linear layer of `model`, which is float32 and on the CPU."""
    if torch.backends.quantized.engine == "none" or not hasattr(torch, "quantize_per_channel"):
        raise ConfigError('dtype: this build of torch has no int8 kernels for this processor: choose "float32"', param="dtype")
    linears = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children() if type(child) is nn.Linear]
    if not linears:
        raise ConfigError(f"dtype: {type(model).__name__} has no plain linear layer to quantize", param="dtype")
    # Packing is one thread's work a layer, and loading waits for it.
    with warnings.catch_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # torch means to remove quantized tensors; nothing else in it runs int8 fast on AVX2 yet. We have looked whether they are there.
        warnings.simplefilter("ignore", UserWarning)
        packed = pool.map(lambda linear: Int8Linear(linear, has_vnni=has_vnni), [child for _, _, child in linears])
        for (parent, name, _), layer in zip(linears, packed, strict=True):
            setattr(parent, name, layer)
