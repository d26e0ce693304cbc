"""Logits to the next tokens, for all sequences of a step at once.

    logits -> penalties -> bias, bans -> grammar -> temperature -> top-k -> top-p -> min-p -> one token a row

Knows torch and `Sampling`. Knows nothing of models, text and grammars (it asks one which tokens may follow).

Rules
- A row's token depends on its logits, its parameters and its own generator alone, never on the rows beside it. So each row draws
  one number of its own a step, and nothing is summed in an order that the batch decides.
- A row pays for what it asks: rows that ask for nothing get `argmax`, and a batch of them is nothing else.
- Limits cut by value: what is as likely as the last token that stays, stays.
- What is banned is all but impossible (`BANNED`), what the grammar forbids is impossible: a grammar always leaves something to say.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from stages.ar.params import Sampling

BANNED = -1e30  # added to a logit; finite, also after a division by the smallest temperature
GREEDY_BELOW = 1e-5  # temperatures that divide logits out of float32
CPU_PIECE = 1 << 16  # logits that are worked on at a time: what fits a core's cache, and memory that is not asked for anew in each step
NUCLEUS = 1024  # top-p looks at so many likeliest tokens first; few distributions need more, and sorting all of them is slow


class Sampled(NamedTuple):
    """One row's next token. The log probabilities are those of the model, before any parameter has changed them."""

    token: int
    logprob: float | None = None  # None: not asked for
    top: tuple[tuple[int, float], ...] = ()  # (token, log probability), the likeliest first


class Grammar(Protocol):
    """What may follow; see `structured.Matcher`."""

    def mask(self) -> np.ndarray:
        """(ceil(vocabulary / 32),) int32: a bit a token, lowest first; set = may follow. Never all zero."""
        ...

    def push(self, token: int) -> None: ...

    @property
    def error(self) -> str:
        """Why it can not go on, "" while it can."""
        ...


class Row:
    """One sequence, as sampling knows it. Made when its prompt is known, survives preemption, changed by `sample` only."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        min_tokens: int = 0,
        ends: Collection[int] = (),
        suppressed: Collection[int] = (),
    ) -> None:
        """
        Args:
            sampling: how to choose. Its ids are below the vocabulary's size.
            prompt: its token ids, for the repetition penalty.
            grammar: what may follow; its own, not shared.
            logprobs: how many of the likeliest tokens to tell beside the chosen one; None for no log probabilities at all.
            min_tokens: none of `ends` is chosen before so many tokens.
            ends: tokens that end the sequence.
            suppressed: tokens that are never chosen.
        """
        self.sampling = sampling
        self.grammar = grammar
        self.logprobs = logprobs
        self.num_tokens = 0  # chosen so far
        self.is_drawn = sampling.temperature >= GREEDY_BELOW
        self.is_penalized = bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
        # None: from the system's entropy. `Random` takes a seed's absolute value.
        self._random = random.Random(None if sampling.seed is None else sampling.seed % 2**64)
        self._counts = _Counts(prompt) if self.is_penalized else None
        self._min_tokens = min_tokens if ends else 0
        bias = dict(sampling.logit_bias) | dict.fromkeys(suppressed, BANNED)
        self._bias = _Bias.of(bias)
        self._first_bias = _Bias.of(bias | dict.fromkeys(ends, BANNED)) if self._min_tokens else self._bias

    @property
    def is_plain(self) -> bool:
        """Whether its token is the likeliest one, as it is."""
        return not (self.is_drawn or self.is_penalized or self.grammar is not None or self.bias is not None)

    @property
    def bias(self) -> _Bias | None:
        return self._first_bias if self.num_tokens < self._min_tokens else self._bias

    @property
    def counts(self) -> _Counts:
        assert self._counts is not None
        return self._counts

    @property
    def error(self) -> str:
        """Why it can not go on, "" while it can: its grammar has failed."""
        return self.grammar.error if self.grammar is not None else ""

    def draw(self) -> float:
        """Its next random number, in [0, 1)."""
        return self._random.random()

    def push(self, token: int) -> None:
        """Its next token is chosen."""
        self.num_tokens += 1
        if self._counts is not None:
            self._counts.push(token)
        if self.grammar is not None:
            self.grammar.push(token)


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """The next token of each row, which is pushed to it. `logits`: (len(rows), vocabulary), of any float dtype; not changed."""
    told = _logprobs_of(logits, rows)
    tokens: list[int] = choose(logits, rows).tolist()
    for row, token in zip(rows, tokens, strict=True):
        row.push(token)
    if told is None:
        return [Sampled(token) for token in tokens]
    return [told.sampled(n, row, token) for n, (row, token) in enumerate(zip(rows, tokens, strict=True))]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """`sample` without its end: (rows,) tokens, on the logits' device and pushed to no row.

    For loops that want no token on the CPU, of rows without grammar, penalties and `min_tokens`.
    """
    shaped = [n for n, row in enumerate(rows) if not row.is_plain]
    tokens = logits.argmax(-1) if len(shaped) < len(rows) else torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    at_once = max(1, CPU_PIECE // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    for start in range(0, len(shaped), at_once):
        piece = shaped[start : start + at_once]
        index = torch.tensor(piece, device=logits.device)
        tokens[index] = _choose(logits[index].float(), [rows[n] for n in piece])
    return tokens


def _choose(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """(rows,) tokens; `scores`, (rows, vocabulary) float32, are overwritten."""
    _penalize(scores, rows)
    _add_bias(scores, rows)
    _obey_grammars(scores, rows)
    drawn = [n for n, row in enumerate(rows) if row.is_drawn]
    if len(drawn) == len(rows):
        return _draw(scores, rows)
    tokens = scores.argmax(-1)
    if drawn:
        index = torch.tensor(drawn, device=scores.device)
        tokens[index] = _draw(scores[index], [rows[n] for n in drawn])
    return tokens


def _penalize(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Make less likely what was there already: repetition scales (of prompt and reply), frequency and presence subtract (reply only)."""
    which = [n for n, row in enumerate(rows) if row.is_penalized]
    if not which:
        return
    counts = [rows[n].counts for n in which]
    lengths = [len(c) for c in counts]
    device = scores.device
    at = np.repeat(which, lengths)
    row, token = _tensor(at, device), _tensor(np.concatenate([c.tokens for c in counts]), device)
    count = _tensor(np.concatenate([c.times for c in counts]), device)

    def of_rows(name: str) -> torch.Tensor:
        return _tensor(np.repeat(np.array([getattr(rows[n].sampling, name) for n in which], np.float32), lengths), device)

    score, repetition = scores[row, token], of_rows("repetition_penalty")
    score = torch.where(score > 0, score / repetition, score * repetition)
    score -= of_rows("frequency_penalty") * count + of_rows("presence_penalty") * (count > 0)
    scores[row, token] = score


def _add_bias(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    which = [(n, bias) for n, row in enumerate(rows) if (bias := row.bias) is not None]
    if which:
        device = scores.device
        row = _tensor(np.repeat([n for n, _ in which], [len(bias.tokens) for _, bias in which]), device)
        token = _tensor(np.concatenate([bias.tokens for _, bias in which]), device)
        scores[row, token] += _tensor(np.concatenate([bias.values for _, bias in which]), device)


def _obey_grammars(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    which = [(n, row.grammar) for n, row in enumerate(rows) if row.grammar is not None]
    if which:
        words = _tensor(np.stack([grammar.mask() for _, grammar in which]), scores.device)  # (grammars, words) int32
        bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=scores.device)) & 1  # (grammars, words, 32)
        index = torch.tensor([n for n, _ in which], device=scores.device)
        is_out = bits.flatten(1)[:, : scores.shape[1]] == 0
        scores[index] = scores[index].masked_fill(is_out, -torch.inf)


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """(rows,) tokens, each by its row's number on the scale of its row's weights; `scores` are overwritten."""
    device = scores.device
    scores /= _column([row.sampling.temperature for row in rows], device)
    weights = _likeliest(scores, [row.sampling.top_k for row in rows]).softmax(-1)
    _cut(weights, [row.sampling for row in rows])
    scale = weights.double().cumsum_(-1)
    total = scale[:, -1:]
    # Below the whole of the scale, so that what is found has a weight.
    at = torch.minimum(_column([row.draw() for row in rows], device, torch.float64) * total, total.nextafter(total.new_zeros(())))
    return torch.searchsorted(scale, at, right=True).squeeze(-1)


def _likeliest(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """`scores` with -inf for all but each row's `top_k` likeliest; 0 keeps all."""
    size = scores.shape[1]
    most = max((k for k in top_k if k < size), default=0)
    if not most:
        return scores
    last = _largest(scores, most).gather(1, _column([max(min(k, most) - 1, 0) for k in top_k], scores.device, torch.int64))
    is_limited = _column([0 < k < size for k in top_k], scores.device, torch.bool)
    return scores.masked_fill((scores < last) & is_limited, -torch.inf)


def _cut(weights: torch.Tensor, asked: Sequence[Sampling]) -> None:
    """Set to 0 what top-p and min-p leave out; each row's `weights` sum to 1, and its likeliest token always stays."""
    device = weights.device
    least = weights.new_zeros((len(asked), 1))
    if which := [n for n, sampling in enumerate(asked) if sampling.top_p < 1]:
        index = torch.tensor(which, device=device)
        least[index] = _nucleus(weights[index], _column([asked[n].top_p for n in which], device, torch.float64), NUCLEUS)
    if any(sampling.min_p for sampling in asked):
        shares = _column([sampling.min_p for sampling in asked], device)
        least = torch.maximum(least, weights.amax(-1, keepdim=True) * shares)
    elif not which:
        return
    weights.masked_fill_(weights < least, 0)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor, looks_at: int) -> torch.Tensor:
    """(rows, 1): the smallest weight in the fewest likeliest tokens that weigh `top_p`, (rows, 1), together."""
    looks_at = min(looks_at, weights.shape[1])
    heaviest = _largest(weights, looks_at)
    size = (heaviest.cumsum(-1, dtype=torch.float64) - heaviest < top_p).sum(-1, keepdim=True)
    smallest = heaviest.gather(1, (size - 1).clamp_min(0))
    if looks_at < weights.shape[1]:
        more = (size == looks_at).flatten().nonzero().flatten()
        if len(more):
            smallest[more] = _nucleus(weights[more], top_p[more], weights.shape[1])
    return smallest


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """(rows, count): each row's largest, in falling order."""
    if values.device.type != "cpu":
        return values.topk(count).values
    array = values.numpy()  # which sorts ten times faster than torch does
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


class _Told:
    """Log probabilities of the rows that ask for them."""

    def __init__(self, logprobs: torch.Tensor, which: Sequence[int], most: int) -> None:
        self._logprobs = logprobs  # (which, vocabulary)
        self._at = {n: at for at, n in enumerate(which)}
        top = logprobs.topk(min(most, logprobs.shape[1]))
        self._values, self._tokens = top.values.tolist(), top.indices.tolist()

    def sampled(self, n: int, row: Row, token: int) -> Sampled:
        if row.logprobs is None:
            return Sampled(token)
        at = self._at[n]
        top = zip(self._tokens[at][: row.logprobs], self._values[at][: row.logprobs], strict=True)
        return Sampled(token, float(self._logprobs[at, token]), tuple(top))


def _logprobs_of(logits: torch.Tensor, rows: Sequence[Row]) -> _Told | None:
    which = [n for n, row in enumerate(rows) if row.logprobs is not None]
    if not which:
        return None
    most = max(row.logprobs or 0 for row in rows)
    return _Told(logits[torch.tensor(which, device=logits.device)].float().log_softmax(-1), which, most)


class _Bias(NamedTuple):
    """What is added to some logits."""

    tokens: np.ndarray  # (n,) int64, each once
    values: np.ndarray  # (n,) float32

    @classmethod
    def of(cls, bias: Mapping[int, float]) -> _Bias | None:
        return cls(np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)) if bias else None


class _Counts:
    """Which tokens a sequence has, prompt included, and how often each was chosen."""

    def __init__(self, prompt: Sequence[int]) -> None:
        known = np.unique(np.asarray(prompt, np.int64))
        self._at = {token: n for n, token in enumerate(known.tolist())}
        self._tokens = np.concatenate([known, np.zeros(64, np.int64)])
        self._times = np.zeros(len(self._tokens), np.float32)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: len(self)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self)]

    def push(self, token: int) -> None:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._tokens[at] = token
        self._times[at] += 1


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _column(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(len(values), 1)"""
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)
