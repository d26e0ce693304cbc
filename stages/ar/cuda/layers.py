"""Decoder layers of a loaded model, exchanged for ones that do the same in a few large kernels.

    norm + qkv product, [rope + cache], [attention], output product + residual, norm + gate and up product + SwiGLU, down product + residual

Knows the anatomy of the layers that it exchanges (FUSED): pre-norm, rotary over whole heads, grouped queries, SwiGLU. The model around
them stays transformers' own. Knows nothing of requests and scheduling.

Rules
- Only classes that are named here are exchanged, each checked for the parts it must have; what is not stays as it is, and `Fusion` says so.
- The weights are moved, not copied: q, k and v become one matrix, gate and up another, and the old ones are freed layer by layer.
- Of a layer that ranks share, each has some heads and some inner features: it sums its two products that are added to the residual over them, as
  transformers' modules do at their end.
- One token at a time is bound by the reading of weights: then each product is a kernel of ours, with the norm and the residual in it.
  More tokens are cuBLAS's, or for weights in 8 bits a kernel of ours while they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from stages.ar.attention import Step
from stages.ar.cpu_layers import NORMS
from stages.ar.cuda import kernels
from stages.ar.cuda.attention import attend

FUSED = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


class FusedRMSNorm(nn.Module):
    """In the place of a transformers RMS norm that multiplies with its weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(hidden_states, self.weight, self.eps)


class FusedLayer(nn.Module):
    """In the place of a transformers decoder layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.group = _group(attention.o_proj)  # of the ranks that share it; None: it is whole
        self.heads: int = _own(attention.q_proj.weight).shape[0] // self.head_dim
        self.kv_heads: int = _own(attention.k_proj.weight).shape[0] // self.head_dim
        self.scale: float = attention.scaling
        self.window: int | None = getattr(attention, "sliding_window", None)
        self.input_norm = FusedRMSNorm(layer.input_layernorm)
        self.mlp_norm = FusedRMSNorm(layer.post_attention_layernorm)
        self.q_norm = FusedRMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = FusedRMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.qkv_proj = _joined(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = _joined(attention, "o_proj")
        self.gate_up_proj = _joined(mlp, "gate_proj", "up_proj")
        self.down_proj = _joined(mlp, "down_proj")

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: Step, **__: Any
    ) -> torch.Tensor:
        """(1, tokens, hidden) in and out; position_embeddings: cos and sin, (1, tokens, head_dim)."""
        x = hidden_states[0]
        keys, values = step.store.keys[self.layer_idx], step.store.values[self.layer_idx]
        cos, sin = (table.reshape(-1, self.head_dim).contiguous() for table in position_embeddings)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm and self.k_norm else None
        is_vector = x.shape[0] == 1

        qkv = _matvec(x, self.qkv_proj, norm=self.input_norm) if is_vector else _product(self.input_norm(x), self.qkv_proj)
        q = kernels.rope_and_store(qkv, norms, cos, sin, step.slots, keys, values, heads=self.heads)
        out = attend(q, step, self.layer_idx, self.scale, self.window).flatten(1)
        if is_vector:
            x = _add_product(x, out, self.o_proj, self.group)
            out = _matvec(x, self.gate_up_proj, norm=self.mlp_norm, glu=True)
            return _add_product(x, out, self.down_proj, self.group)[None]
        x, normed = kernels.add_rms_norm(x, _sum(_product(out, self.o_proj), self.group), self.mlp_norm.weight, self.mlp_norm.eps)
        return _add_product(x, kernels.swiglu(_product(normed, self.gate_up_proj)), self.down_proj, self.group)[None]


def _joined(parent: Any, *names: str) -> nn.Linear:
    """Linear layers of one input as one, this rank's part of them; the parent loses them."""
    parts = [getattr(parent, name) for name in names]
    weights, biases = [_own(part.weight) for part in parts], [_own(part.bias) for part in parts if part.bias is not None]
    weight = torch.cat(weights) if len(parts) > 1 else weights[0]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    for name in names:
        delattr(parent, name)
    return joined


def _own(weight: Any) -> torch.Tensor:
    """What this rank has of `weight`."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _group(linear: Any) -> Any:
    """The ranks that share the weight of `linear`; None: it is whole."""
    return linear.weight.device_mesh.get_group() if hasattr(linear.weight, "device_mesh") else None


def _sum(part: torch.Tensor, group: Any) -> torch.Tensor:
    """`part` over all ranks of `group`, in place."""
    if group is not None:
        dist.all_reduce(part, group=group)
    return part


def is_plain(linear: Any) -> bool:
    """Whether it is a product with a matrix and nothing else: no bias, no quantized weight."""
    return type(linear) is nn.Linear and linear.bias is None and type(linear.weight) is nn.Parameter


def weight_and_scales(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """What our kernel reads of `linear`: its weight, or torchao's 8-bit one and a scale for each row. None: something else."""
    if is_plain(linear):
        return linear.weight, None
    scale = getattr(linear.weight, "scale", None)
    if linear.bias is None and isinstance(scale, torch.Tensor) and scale.numel() == linear.out_features:
        return linear.weight.qdata, scale.view(-1)
    return None


def _matvec(
    x: torch.Tensor, linear: nn.Linear, *, norm: FusedRMSNorm | None = None, residual: torch.Tensor | None = None, glu: bool = False
) -> torch.Tensor:
    """One token through `linear`, by our kernel where that can."""
    if parts := weight_and_scales(linear):
        weight, scales = parts
        return kernels.matvec(x, weight, scales=scales, norm=(norm.weight, norm.eps) if norm else None, residual=residual, glu=glu)
    out = F.linear(norm(x) if norm else x, linear.weight, linear.bias)
    out = kernels.swiglu(out) if glu else out
    return out if residual is None else out + residual


def _add_product(x: torch.Tensor, y: torch.Tensor, linear: nn.Linear, group: Any) -> torch.Tensor:
    """`x` plus `y` through `linear`, of which each rank of `group` has a part; `x` is overwritten where the product can be added to it in place."""
    if group is not None:
        return x + _sum(_matvec(y, linear) if len(y) == 1 else _product(y, linear), group)
    if len(y) == 1:
        return _matvec(y, linear, residual=x)
    if is_plain(linear):
        return x.addmm_(y, linear.weight.T)
    return x + _product(y, linear)


def _product(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """`x` through `linear`: few rows by our kernel where the weight has 8 bits, which torchao would bring to 16 first."""
    if len(x) <= kernels.FEW and (parts := weight_and_scales(linear)) and parts[1] is not None:
        return kernels.few_rows(x, parts[0], parts[1])
    out: torch.Tensor = linear(x)
    return out


@dataclass
class Fusion:
    """What `fuse` exchanged and what it left."""

    layers: int = 0
    norms: int = 0
    left: dict[str, int] = field(default_factory=dict)  # class name: how many

    def __str__(self) -> str:
        left = ", ".join(f"{count} {name} as they are" for name, count in self.left.items())
        return f"{self.layers} layers and {self.norms} norms fused" + (f"; {left}" if left else "")


def fuse(model: nn.Module) -> Fusion:
    """Exchange what can be exchanged in a loaded `model`, in place."""
    fusion = Fusion()
    for name, parent in _places(model, lambda child: type(child).__name__.endswith("DecoderLayer")):
        layer = getattr(parent, name)
        kind = type(layer).__name__
        if kind in FUSED and _has_the_anatomy(layer):
            setattr(parent, name, FusedLayer(layer))
            fusion.layers += 1
        else:
            fusion.left[kind] = fusion.left.get(kind, 0) + 1
    for name, parent in _places(model, lambda child: type(child).__name__ in NORMS):
        setattr(parent, name, FusedRMSNorm(getattr(parent, name)))
        fusion.norms += 1
    return fusion


def _places(model: nn.Module, is_meant: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """Where the modules are that are meant, as name and parent: nothing holds the modules themselves, so their weights can go."""
    return [(name, parent) for parent in model.modules() for name, child in parent.named_children() if is_meant(child)]


def _has_the_anatomy(layer: Any) -> bool:
    """Whether a layer of a class in FUSED has the usual parts: nothing more, SwiGLU, whole heads rotated."""
    attention, mlp = layer.self_attn, layer.mlp
    rope = getattr(attention.config, "rope_parameters", None) or {}
    return (
        {name for name, _ in layer.named_children()} == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and {name for name, _ in attention.named_children()} - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and all(getattr(mlp, name).bias is None for name in ("gate_proj", "up_proj", "down_proj"))
        and _is_shared_out_alike(attention, mlp)
        and attention.config.hidden_act == "silu"
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def _is_shared_out_alike(attention: Any, mlp: Any) -> bool:
    """Whether all products are whole, or all are parts: of those that end in a sum a bias would be summed, too."""
    inner = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")] + [mlp.gate_proj, mlp.up_proj]
    ends = [attention.o_proj, mlp.down_proj]
    shared = {hasattr(linear.weight, "device_mesh") for linear in inner + ends}
    return shared == {False} or shared == {True} and all(linear.bias is None for linear in ends)
