"""The sampler against a slow one that does one row at a time, in float64 and plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.ar.params import Sampling

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")

from stages.ar import sampler  # noqa: E402 (it imports torch)
from stages.ar.sampler import Row, sample  # noqa: E402

VOCABULARY = 12
NEVER = -math.inf


class Only:
    """A grammar that allows the same tokens always."""

    error = ""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def mask(self) -> np.ndarray:
        word = sum(1 << token for token in self.tokens)
        return np.array([word - 2**32 if word >= 2**31 else word], np.int32)

    def push(self, token: int) -> None:
        assert token in self.tokens


def slow_sample(
    logits: list[float],
    asked: Sampling,
    prompt: list[int],
    said: list[int],
    number: float,
    *,
    banned: set[int],
    allowed: set[int] | None,
) -> int:
    """One row's token: what the parameters mean, step by step."""
    scores = list(logits)
    for token in {*prompt, *said}:
        scores[token] = scores[token] / asked.repetition_penalty if scores[token] > 0 else scores[token] * asked.repetition_penalty
    for token, times in Counter(said).items():
        scores[token] -= asked.frequency_penalty * times + asked.presence_penalty
    for token, bias in asked.logit_bias:
        scores[token] += bias
    for token in banned:
        scores[token] = -1e30
    if allowed is not None:
        scores = [score if token in allowed else NEVER for token, score in enumerate(scores)]
    if asked.temperature == 0:
        return scores.index(max(scores))
    scores = [score / asked.temperature for score in scores]
    if 0 < asked.top_k < len(scores):
        least = sorted(scores)[-asked.top_k]
        scores = [score if score >= least else NEVER for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    weights = [weight / sum(weights) for weight in weights]
    least = 0.0
    if asked.top_p < 1:
        before = 0.0
        for weight in sorted(weights, reverse=True):
            if before >= asked.top_p:
                break
            least, before = weight, before + weight
    least = max(least, asked.min_p * max(weights))
    weights = [weight if weight >= least else 0.0 for weight in weights]
    at, passed = number * sum(weights), 0.0
    for token, weight in enumerate(weights):
        passed += weight
        if passed > at:
            return token
    return max(token for token, weight in enumerate(weights) if weight)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.7]),
    logit_bias=st.sampled_from([(), ((2, 3.5),), ((0, -100.0), (7, 1.25))]),
    seed=st.integers(0, 2**63),
)
ROWS = st.fixed_dictionaries(
    {
        "sampling": SAMPLINGS,
        "prompt": st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
        "min_tokens": st.sampled_from([0, 2]),
        "ends": st.sampled_from([(), (1, 5)]),
        "suppressed": st.sampled_from([(), (3,)]),
        "allowed": st.sampled_from([None, (1, 3, 5, 9), tuple(range(11))]),
    }
)


def row_of(asked: dict[str, Any]) -> Row:
    grammar = None if asked["allowed"] is None else Only(*asked["allowed"])
    return Row(**{name: value for name, value in asked.items() if name != "allowed"}, grammar=grammar)


def random_logits(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 10_000))
def test_each_row_gets_what_the_slow_sampler_gives(asked: list[dict[str, Any]], seed: int) -> None:
    rows = [row_of(one) for one in asked]
    numbers = [random.Random(one["sampling"].seed % 2**64) for one in asked]
    said: list[list[int]] = [[] for _ in rows]
    for step in range(4):
        logits = random_logits(len(rows), seed + step)
        kept = logits.clone()
        tokens = [sampled.token for sampled in sample(logits, rows)]
        assert torch.equal(logits, kept)
        for n, one in enumerate(asked):
            drawn = numbers[n].random() if one["sampling"].temperature else 0.0
            banned = {*one["suppressed"], *(one["ends"] if step < one["min_tokens"] else ())}
            expected = slow_sample(
                logits[n].tolist(), one["sampling"], one["prompt"], said[n], drawn, banned=banned,
                allowed=None if one["allowed"] is None else set(one["allowed"]),
            )  # fmt: skip
            assert tokens[n] == expected
            said[n].append(tokens[n])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(ROWS, min_size=2, max_size=6), st.integers(0, 10_000), st.sampled_from([1, 2 * VOCABULARY, 1 << 16]))
def test_a_row_says_alone_what_it_says_in_any_company(asked: list[dict[str, Any]], seed: int, piece: int) -> None:
    together, alone = [row_of(one) for one in asked], [row_of(one) for one in asked]
    for step in range(3):
        logits = random_logits(len(asked), seed + step)
        expected = [sample(logits[n : n + 1], [row])[0].token for n, row in enumerate(alone)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "CPU_PIECE", piece)
            assert [sampled.token for sampled in sample(logits, together)] == expected


def test_a_large_vocabulary_is_drawn_from_the_same_alone_and_together() -> None:
    torch.manual_seed(0)
    shapes = [{}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 0.01}, {"top_p": 0.5, "top_k": 2000}]
    logits = torch.randn(len(shapes), 40_000) * 2
    for seed in range(5):
        together = [Row(Sampling(1.0, seed=seed, **shape), []) for shape in shapes]
        alone = [Row(Sampling(1.0, seed=seed, **shape), []) for shape in shapes]
        expected = [sample(logits[n : n + 1], [row])[0] for n, row in enumerate(alone)]
        assert sample(logits, together) == expected


def test_a_flat_distribution_has_a_nucleus_beyond_the_tokens_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.rand(3, 500, generator=torch.Generator().manual_seed(1)).softmax(-1)
    top_p = torch.tensor([[0.99], [0.5], [0.001]], dtype=torch.float64)
    whole = sampler._nucleus(weights, top_p, 500)
    assert torch.equal(sampler._nucleus(weights, top_p, 8), whole)
    held = (weights * (weights >= whole)).sum(-1)
    assert (held.unsqueeze(-1) >= top_p).all()


@pytest.mark.parametrize("shape", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_frequencies_follow_the_weights(shape: dict[str, Any]) -> None:
    """Chi-square of 4,000 draws at a fixed seed; 26.1 is the 0.1 % point of 8 degrees of freedom."""
    logits = torch.tensor([2.0, 1.5, 1.2, 1.0, 0.5, 0.2, 0.0, -0.5, -1.0])
    weights = (logits / 0.8).softmax(-1).double()
    order = weights.sort(descending=True)
    kept = {
        "top_k": lambda: weights >= order.values[3],
        "top_p": lambda: weights >= order.values[int((order.values.cumsum(-1) < 0.8).sum())],
        "min_p": lambda: weights >= 0.2 * weights.max(),
    }
    weights = weights * next((kept[name]() for name in shape), torch.ones_like(weights))
    weights /= weights.sum()
    draws, batch = 4000, 500
    rows = [Row(Sampling(0.8, seed=n, **shape), []) for n in range(batch)]
    counts = torch.zeros(9, dtype=torch.float64)
    for _ in range(draws // batch):
        for sampled in sample(logits.expand(batch, -1), rows):
            counts[sampled.token] += 1
    assert (counts[weights == 0] == 0).all()
    expected = weights[weights > 0] * draws
    assert (((counts[weights > 0] - expected) ** 2) / expected).sum() < 26.1


def test_rows_that_ask_for_nothing_get_the_likeliest_token_in_any_dtype() -> None:
    logits = random_logits(6, 3)
    for dtype in (torch.float32, torch.bfloat16):
        rows = [Row(Sampling(), [1, 2]) for _ in range(6)]
        assert all(row.is_plain for row in rows)
        assert [s.token for s in sample(logits.to(dtype), rows)] == logits.to(dtype).argmax(-1).tolist()


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(3, 4)
    told = logits.log_softmax(-1)
    shaped = Sampling(1.2, top_k=3, repetition_penalty=2.0, logit_bias=((0, 50.0),), seed=1)
    rows = [Row(shaped, [1], logprobs=2), Row(Sampling(), []), Row(Sampling(), [], logprobs=0)]
    first, second, third = sample(logits, rows)
    assert first.token == 0, "biased into being chosen"
    assert first.logprob == pytest.approx(told[0, 0].item())
    assert [token for token, _ in first.top] == told[0].topk(2).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(told[0].topk(2).values.tolist())
    assert second == (int(logits[1].argmax()), None, ())
    assert third.logprob == pytest.approx(told[2].max().item())
    assert third.top == ()


def test_no_end_comes_before_the_fewest_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 4] = 9.0
    row = Row(Sampling(), [], min_tokens=2, ends=[4])
    assert [sample(logits, [row])[0].token for _ in range(3)] == [0, 0, 4]


def test_a_grammar_that_leaves_only_what_is_banned_is_obeyed() -> None:
    for temperature in (0.0, 1.0, 1e-4):
        row = Row(Sampling(temperature, top_p=0.5, seed=0), [], grammar=Only(4), min_tokens=5, ends=[4])
        assert sample(random_logits(1, 1), [row])[0].token == 4


def test_seeds_of_opposite_sign_differ_and_no_seed_is_random() -> None:
    logits = torch.zeros(1, 10_000)

    def said(seed: int | None) -> list[int]:
        row = Row(Sampling(1.0, seed=seed), [])
        return [sample(logits, [row])[0].token for _ in range(4)]

    assert said(5) == said(5) != said(-5)
    assert said(None) != said(None)
    assert said(2**200) == said(2**200)


def test_counts_of_a_long_reply_are_kept() -> None:
    row = Row(Sampling(presence_penalty=1.0), [7] * 10)
    for n in range(1000):
        row.push(n % 200)
    assert len(row.counts) == 200
    assert dict(zip(row.counts.tokens.tolist(), row.counts.times.tolist(), strict=True)) == dict.fromkeys(range(200), 5.0)
