"""Modules of a loaded float32 model, exchanged for ones that do the same and that a CPU runs faster.

torch hands a weight to its matrix library as it is, which arranges it anew at each call: for the few rows of a decoding batch that costs as much
as the product. Arranged once, at load, the head of a small model takes half the time at 2 to 64 rows, and an MLP's wide layers take 4/5. RMS norms
and gated MLPs of the classes that are named here become fewer calls.

Rules
- Only layers that widen are packed (`WIDE`): the others take as long either way.
- A weight is there once, in the new arrangement, unless an embedding has it too: then a single row, which is faster without, is multiplied by that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDE = 2  # outputs per input, at least
ROWS = 8  # that the arrangement is made for; it is as good for others
NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm", "MixtralRMSNorm"}  # times a weight
GATED = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Gemma3MLP"}  # down(act(gate(x)) * up(x))


class PackedLinear(nn.Module):
    """`nn.Linear` of float32, CPU only. x: (..., in) -> (..., out)."""

    def __init__(self, *linears: nn.Linear, is_tied: bool = False) -> None:
        """Several linears of one input are as one, their outputs side by side. `is_tied`: the weight stays in memory, whatever becomes of `linears`."""
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # noqa: SLF001 - no public name
        self._weight = weight if is_tied else None
        self._bias = torch.cat(biases) if biases else None
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """(out, in), a copy; models ask for its dtype and shape."""
        return self._packed.to_dense() if self._weight is None else self._weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight is not None and x.numel() == self.in_features:
            return nn.functional.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return y


class GatedMLP(nn.Module):
    """A transformers MLP with its gate and its way up in one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        y: torch.Tensor = self.down_proj(self.act_fn(gate).mul_(up))
        return y


def can_exchange() -> bool:
    """Whether this build of torch has the kernels."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def is_wide(layer: Any) -> bool:
    """Whether packing it is possible and worth it."""
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return False
    return layer.out_features >= WIDE * layer.in_features


def exchange(model: nn.Module) -> None:
    """Exchange what can be exchanged inside of `model`, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if kind in NORMS and child.weight.dtype == torch.float32:
                setattr(parent, name, _norm(child))
            elif kind in GATED and is_wide(child.gate_proj) and is_wide(child.up_proj):
                setattr(parent, name, GatedMLP(child))
            elif is_wide(child) and type(parent).__name__ not in GATED:
                setattr(parent, name, PackedLinear(child))


def _norm(norm: Any) -> nn.RMSNorm:
    own = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, elementwise_affine=False)
    own.weight = norm.weight
    return own
