"""Logits to the next tokens: each sequence's parameters, its generator, its history.

Knows torch and `Sampling`. Knows nothing of models and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stages.ar.params import Sampling


class Sampled(NamedTuple):
    """One sequence's next token."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Row:
    """One sequence's choices. The same seed over the same logits gives the same tokens."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], *, device: torch.device, grammar: Any = None) -> None:
        self.sampling = sampling
        self._seen = torch.tensor(sorted(set(prompt)), device=device) if sampling.repetition_penalty != 1 else None
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator(device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed % 2**63)

    @property
    def is_plain(self) -> bool:
        return self.sampling.temperature == 0 and self._seen is None

    def choose(self, logits: torch.Tensor) -> int:
        """The next token; `logits`: (vocabulary,)."""
        logits = logits.float()
        if self._seen is not None:
            logits = penalized(logits, self._seen, self.sampling.repetition_penalty)
        if self.sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = truncated(logits / self.sampling.temperature, self.sampling).softmax(-1)
            token = int(torch.multinomial(weights, 1, generator=self._generator))
        if self._seen is not None:
            self._seen = torch.cat([self._seen[self._seen != token], self._seen.new_tensor([token])])
        return token


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """One token for each row; `logits`: (rows, vocabulary)."""
    if all(row.is_plain for row in rows):
        return [Sampled(token) for token in logits.argmax(-1).tolist()]
    return [Sampled(row.choose(line)) for row, line in zip(rows, logits, strict=True)]


def penalized(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Tokens that were there already, made less likely: positive logits divided, negative ones multiplied."""
    scores = logits[seen]
    return logits.scatter(0, seen, torch.where(scores > 0, scores / penalty, scores * penalty))


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`logits` with -inf for what top-k, min-p and top-p, in this order, leave out; the likeliest token always stays."""
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.min_p > 0:
        weights = logits.softmax(-1)
        logits = logits.masked_fill(weights < sampling.min_p * weights.max(), -torch.inf)
    if sampling.top_p < 1:
        weights, order = logits.softmax(-1).sort(descending=True, stable=True)
        is_out = weights.cumsum(-1) - weights >= sampling.top_p
        is_out[0] = False
        logits = logits.index_fill(0, order[is_out], -torch.inf)
    return logits
