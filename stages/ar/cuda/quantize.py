"""Weights in 8 bits, by torchao: half as much to read for each token.

Knows torchao. `layers.py` reads what it makes with our kernels while tokens are few; many tokens are torchao's own products.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from stages.ar.cuda.layers import FusedLayer
from streamrt import ConfigError

Kind = Literal["int8", "float8"]
FLOAT8_FROM = (8, 9)  # compute capability


def refusal(kind: Kind, *, capability: tuple[int, int], has_torchao: bool) -> str:
    """Why `kind` can not be had here, empty when it can."""
    if not has_torchao:
        return "torchao is not installed"
    if kind == "float8" and capability < FLOAT8_FROM:
        return f"it needs compute capability 8.9, not {capability[0]}.{capability[1]}"
    return ""


def quantize(model: Any, kind: Kind, capability: tuple[int, int]) -> None:
    """The products of the decoder's layers in 8 bits, one scale for each row; in place. Embeddings and the head stay as they are.

    Raises:
        ConfigError: it can not be had here.
    """
    if why := refusal(kind, capability=capability, has_torchao=importlib.util.find_spec("torchao") is not None):
        raise ConfigError(f'dtype: "{kind}": {why}', param="dtype")
    from torch import nn
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    for layer in model.layers:
        parts = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj) if isinstance(layer, FusedLayer) else None
        quantize_(
            layer,
            Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, nn.Linear) and (parts is None or module in parts),  # noqa: B023  called at once
        )
