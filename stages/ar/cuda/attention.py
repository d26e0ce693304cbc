"""Attention of one packed step on a CUDA device: decode rows by the paged kernel, prompts by the backend that was chosen at load.

    queries of the step's tokens, decode rows first  ->  out (tokens, heads, head_dim)

Knows the layout of a step and of the store, and torch's attention backends. Knows nothing of models and requests.

Rules
- A backend is chosen once, by what device and dtype can do; its name is logged and described. One that was asked for and can not run is an error.
- A long lone prompt from its beginning goes to cuDNN on Hopper, whose kernel takes half of flash's time there. It builds a plan for each shape, in
  40 ms, so only lengths in whole GRANULEs go there. Everything else is one variable-length call for all prompts of the step.
- A prompt's keys and values are gathered from their blocks first: torch's variable-length kernels read no block table before FlashAttention 3.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.ar.attention import Prefill, Step
from stages.ar.cuda.paged import paged_decode_attention
from streamrt import ConfigError

BACKENDS = ("flash_attn", "cudnn", "flash", "sdpa")
GRANULE = 512  # tokens
CUDNN_FROM = 1024  # tokens: below that flash is as fast, and builds no plans


@dataclass(frozen=True)
class Prompts:
    """The prompt chunks of a step, one after the other behind its decode rows."""

    query_lens: list[int]
    key_lens: list[int]  # what each sees: tokens before it, and itself
    query_starts: torch.Tensor  # (prompts + 1,) int32, from 0
    key_starts: torch.Tensor  # (prompts + 1,) int32
    places: torch.Tensor  # (all keys,) int64: their slots


@dataclass(frozen=True)
class Plan:
    """What all layers of a step share: `Step.plan` on a CUDA device."""

    backend: str  # for prompts, one of BACKENDS
    splits: int  # for decode rows, see paged.split_count
    prompts: Prompts | None = None


@dataclass(frozen=True)
class PromptBackend:
    """How prompts are attended. `why` says what decided."""

    name: str
    why: str


def has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def cudnn_refusal(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why cuDNN's attention can not run these heads on `device`; empty when it can. Runs it once."""
    q = torch.zeros(1, heads, CUDNN_FROM, head_dim, dtype=dtype, device=device)
    k = torch.zeros(1, kv_heads, CUDNN_FROM, head_dim, dtype=dtype, device=device)
    try:
        _cudnn(q, k, k, 1.0)
    except RuntimeError as error:  # torch says why in a warning, and that no kernel is left in this
        return str(error).splitlines()[0]
    return ""


def choose_prompt_backend(
    asked: str, *, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, has_flash_attn: bool, cudnn_refusal: str
) -> PromptBackend:
    """The backend that `asked` ("auto" or one of BACKENDS) stands for.

    Raises:
        ConfigError: it can not run here.
    """
    if asked not in ("auto", *BACKENDS):
        raise ConfigError(f'attention: got "{asked}", expected one of auto, {", ".join(BACKENDS)}', param="attention")
    is_half = dtype in (torch.bfloat16, torch.float16)
    no_flash = (
        f"needs bfloat16 or float16, not {dtype}"
        if not is_half
        else f"needs heads of at most 256, not {head_dim}"
        if head_dim > 256
        else f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
        if capability < (8, 0)
        else ""
    )
    refusals = {
        "flash_attn": no_flash or ("" if has_flash_attn else "the flash-attn package is not installed"),
        "cudnn": no_flash or ("" if capability[0] == 9 else "is chosen on Hopper only") or cudnn_refusal,
        "flash": no_flash,
        "sdpa": "",
    }
    if asked != "auto" and refusals[asked]:
        raise ConfigError(
            f'attention: "{asked}" {refusals[asked]}', hint='attention = "auto" takes what this device can run', param="attention"
        )
    name = asked if asked != "auto" else next(name for name in BACKENDS if not refusals[name])
    passed = [f"{other}: {refusals[other]}" for other in BACKENDS[: BACKENDS.index(name)] if refusals[other]]
    return PromptBackend(name, "asked for" if asked != "auto" else "; ".join(passed) or "the first choice")


def plan_prompts(prefills: Sequence[Prefill], block_size: int, device: torch.device) -> Prompts | None:
    """The chunks as one variable-length call sees them; `prefills` is on the CPU. One copy to the device."""
    if not prefills:
        return None
    query_lens = [prefill.end - prefill.start for prefill in prefills]
    key_lens = [prefill.context for prefill in prefills]
    places = [(prefill.blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[: prefill.context] for prefill in prefills]
    count = len(prefills) + 1
    packed = torch.cat([*(torch.tensor([0, *lens]).cumsum(0) for lens in (query_lens, key_lens)), *places]).to(device)
    return Prompts(query_lens, key_lens, packed[:count].int(), packed[count : 2 * count].int(), packed[2 * count :])


def attend(query: torch.Tensor, step: Step, layer: int, scale: float, window: int | None) -> torch.Tensor:
    """Attention of every token of the step over its sequence, as `stages.ar.attention.Backend` says it.

    query: (tokens, heads, head_dim), and so is what comes out. The step's own keys and values are in the store already.
    """
    plan: Plan = step.plan
    keys, values, rows = step.store.keys[layer], step.store.values[layer], step.decodes
    decoded = None
    if rows:
        decoded = paged_decode_attention(
            query[:rows], keys, values, step.block_tables, step.context_lens, scale=scale, splits=plan.splits, window=window or 0
        )
        if plan.prompts is None:
            return decoded
    prompts = plan.prompts
    assert prompts is not None  # a step has tokens
    k, v = (memory.flatten(0, 1).index_select(0, prompts.places) for memory in (keys, values))
    out = _attend_prompts(query[rows:], k, v, prompts, scale, window or 0, plan.backend)
    return out if decoded is None else torch.cat([decoded, out])


def _attend_prompts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompts: Prompts, scale: float, window: int, backend: str
) -> torch.Tensor:
    """(query tokens, heads, head_dim); the last query of a chunk sees the last key."""
    if backend == "cudnn" and not window and _suits_cudnn(prompts):
        return _cudnn(_batched(q), _batched(k), _batched(v), scale)[0].transpose(0, 1)
    left = window - 1 if window else -1
    starts = (prompts.query_starts, prompts.key_starts, max(prompts.query_lens), max(prompts.key_lens))
    if backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        out: torch.Tensor = flash_attn_varlen_func(q, k, v, *starts, softmax_scale=scale, causal=True, window_size=(left, 0))
        return out
    if backend in ("cudnn", "flash"):
        sides: dict[str, Any] = {"window_size_left": left, "window_size_right": 0} if window else {}
        # What torch.nn.attention.varlen calls; its own arguments are not the same in every version.
        return torch.ops.aten._flash_attention_forward(q, k, v, *starts, 0.0, True, False, scale=scale, **sides)[0]  # noqa: SLF001
    return _sdpa(q, k, v, prompts, scale, window)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, head_dim) as torch's attention has it: (1, heads, tokens, head_dim)."""
    return x.transpose(0, 1)[None]


def _suits_cudnn(prompts: Prompts) -> bool:
    size = prompts.query_lens[0]
    return prompts.key_lens == [size] and size >= CUDNN_FROM and size % GRANULE == 0


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal, (1, heads, tokens, head_dim) each."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompts: Prompts, scale: float, window: int) -> torch.Tensor:
    """One call a prompt, for dtypes that no flash kernel has."""
    outs = []
    for chunk, past, future in zip(q.split(prompts.query_lens), k.split(prompts.key_lens), v.split(prompts.key_lens), strict=True):
        queries, size = chunk.shape[0], past.shape[0]
        mask = torch.ones(queries, size, dtype=torch.bool, device=q.device).tril(size - queries)
        if window:
            mask = mask.triu(size - queries - window + 1)
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            _batched(chunk), _batched(past), _batched(future), attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
