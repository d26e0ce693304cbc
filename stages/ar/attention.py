"""Attention over paged keys and values, as one of transformers' attention functions.

    runner ---Step---> transformers' layers ---> Step.update(k, v) writes, `paged_attention(q)` reads; one pair per layer

Knows tensors and the layout of `kv.py`. Knows nothing of sequences or models.

Rules
- One step's tokens are packed into one row, (1, tokens): first `decodes` tokens of as many sequences, then prompts' chunks.
- A step's `Step` is all that attention knows beside q, k and v. Host-side plans are made once a step, not once a layer.
- The device chooses the backend, `BACKENDS`. What a backend can not do it refuses when the runner is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from stages.ar.kv import KVStore

NAME = "streamrt_paged"
FEW_TOKENS = 96  # on average in a batch, below which one padded gather beats a call per sequence


class Prefill(NamedTuple):
    """A chunk of one prompt."""

    start: int  # rows of the packed batch
    end: int
    context: int  # tokens of the sequence that it sees: those before it, and itself
    blocks: torch.Tensor  # (blocks,) int32, of the context


@dataclass(eq=False)
class Step:
    """One forward pass as attention sees it. Is also the model's cache: transformers calls `update` and asks for no length."""

    store: KVStore
    slots: torch.Tensor  # (tokens,) int64: where each token's keys and values go
    decodes: int  # the first so many tokens
    block_tables: torch.Tensor  # (decodes, blocks) int32, 0 where there is none
    context_lens: torch.Tensor  # (decodes,) int32: what each sees, itself included
    prefills: tuple[Prefill, ...] = ()
    plan: Any = field(default=None, repr=False)  # the backend's own

    is_compileable = False

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v: (1, kv heads, tokens, head dim). Called by the layers, before attention."""
        self.store.keys[layer].flatten(0, 1).index_copy_(0, self.slots, k[0].transpose(0, 1))
        self.store.values[layer].flatten(0, 1).index_copy_(0, self.slots, v[0].transpose(0, 1))
        return k, v

    def get_seq_length(self, *_: Any) -> int:
        return 0


Backend = Callable[[torch.Tensor, Step, int, float, "int | None"], torch.Tensor]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: (1, heads, tokens, head dim) -> (1, tokens, heads, head dim). What this step wrote is read back from the store."""
    if softcap is not None or s_aux is not None:
        raise ValueError("paged attention has neither soft caps nor sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = BACKENDS[query.device.type](query[0].transpose(0, 1), step, module.layer_idx, scale, sliding_window)
    return out[None], None


# -- the CPU's backend: a call of torch's fused attention per sequence, over views where its blocks lie side by side


class _Run(NamedTuple):
    """One sequence's context: slots [start, start + length) side by side, or `blocks` to be gathered."""

    start: int
    length: int
    blocks: torch.Tensor | None

    def of(self, memory: torch.Tensor, window: int | None) -> torch.Tensor:
        """(1, kv heads, tokens, head dim), the last `window` tokens of it."""
        skipped = 0 if window is None else max(0, self.length - window)
        size, heads, dim = memory.shape[1:]
        if self.blocks is None:  # one call makes the view: there are two for every sequence and layer
            token = heads * dim
            return memory.as_strided((1, heads, self.length - skipped, dim), (0, dim, token, 1), (self.start + skipped) * token)
        first = skipped // size  # whole blocks outside of the window are not gathered
        tokens = memory.index_select(0, self.blocks[first:]).flatten(0, 1)[skipped - first * size : self.length - first * size]
        return tokens.transpose(0, 1)[None]


def _run(blocks: torch.Tensor, length: int, block_size: int) -> _Run:
    count = -(-length // block_size)
    numbers = blocks.numpy()[:count]
    first = int(numbers[0])
    is_run = int(numbers[-1]) - first == count - 1 and (count < 3 or bool((numbers[1:] - numbers[:-1] == 1).all()))
    return _Run(first * block_size, length, None) if is_run else _Run(0, length, blocks[:count])


class _CpuPlan:
    """What all layers of a step share."""

    def __init__(self, step: Step) -> None:
        size = step.store.block_size
        lengths = step.context_lens.tolist()
        self.decodes: list[_Run] = []
        self.padded: torch.Tensor | None = None  # (decodes * blocks,): one gather for all of them
        if step.decodes > 2 and sum(lengths) < FEW_TOKENS * step.decodes:
            self.width = -(-max(lengths) // size)
            self.padded = step.block_tables[:, : self.width].flatten()
        else:
            self.decodes = [_run(table, length, size) for table, length in zip(step.block_tables, lengths, strict=True)]
        self.prefills = [_run(prefill.blocks, prefill.context, size) for prefill in step.prefills]
        self._lengths = step.context_lens
        self._masks: dict[Any, torch.Tensor | None] = {}

    def decode_mask(self, tokens: int, window: int | None) -> torch.Tensor | None:
        """(decodes, 1, 1, tokens), True where a token is seen."""
        if (None, window) not in self._masks:
            at, lengths = torch.arange(tokens), self._lengths[:, None]
            seen = at < lengths
            if window is not None:
                seen &= at >= lengths - window
            self._masks[None, window] = seen[:, None, None]
        return self._masks[None, window]

    def prefill_mask(self, n: int, queries: int, tokens: int, window: int | None) -> torch.Tensor | None:
        """(queries, tokens) of the n-th prompt, or None where the fused kernel's own causal order is the same."""
        if (n, window) not in self._masks:
            if queries == tokens and (window is None or window >= tokens):
                self._masks[n, window] = None
            else:
                seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
                if window is not None:
                    seen = seen.triu(tokens - queries - window + 1)
                self._masks[n, window] = seen
        return self._masks[n, window]


def _cpu(query: torch.Tensor, step: Step, layer: int, scale: float, window: int | None) -> torch.Tensor:
    """query: (tokens, heads, head dim); so is what comes out."""
    plan: _CpuPlan = step.plan
    if plan is None:
        plan = step.plan = _CpuPlan(step)
    keys, values = step.store.keys[layer], step.store.values[layer]
    tokens, heads, dim = query.shape
    groups = keys.shape[2]
    # Queries that share keys are rows of one matrix: (.., kv heads, queries of one kv head, head dim)
    if tokens == 1 and plan.decodes:
        run = plan.decodes[0]
        packed = query.reshape(1, groups, heads // groups, dim)
        out = F.scaled_dot_product_attention(packed, run.of(keys, window), run.of(values, window), scale=scale)
        return out.reshape(1, heads, dim)
    result = query.new_empty(tokens, heads, dim)
    if plan.padded is not None:
        packed = query[: step.decodes].reshape(step.decodes, groups, heads // groups, dim)
        shape = (step.decodes, -1, groups, dim)
        k = keys.index_select(0, plan.padded).view(shape).transpose(1, 2)
        v = values.index_select(0, plan.padded).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=plan.decode_mask(k.shape[2], window), scale=scale)
        result[: step.decodes] = out.reshape(step.decodes, heads, dim)
    if plan.decodes:
        packed = query[: step.decodes].reshape(step.decodes, 1, groups, heads // groups, dim).unbind()
        outs = [
            F.scaled_dot_product_attention(one, run.of(keys, window), run.of(values, window), scale=scale)
            for one, run in zip(packed, plan.decodes, strict=True)
        ]
        torch.cat(outs, out=result[: step.decodes].view(step.decodes, groups, heads // groups, dim))
    for n, (prefill, run) in enumerate(zip(step.prefills, plan.prefills, strict=True)):
        queries = prefill.end - prefill.start
        k, v = (
            run.of(keys, None if window is None else window + queries - 1),
            run.of(values, None if window is None else window + queries - 1),
        )
        mask = plan.prefill_mask(n, queries, k.shape[2], window)
        q = query[prefill.start : prefill.end].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups != heads)
        result[prefill.start : prefill.end] = out[0].transpose(0, 1)
    return result


BACKENDS: dict[str, Backend] = {"cpu": _cpu}


def register() -> None:
    """Make `NAME` one of transformers' attention functions. It has no mask function, so the models make none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
