"""A pass begun before the tokens of the one before it are known gives the same tokens."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.ar.engine import Engine
from stages.ar.params import Sampling
from stages.ar.runner import Runner

GREEDY = Sampling(0.0, 1.0, 0)
SAMPLED = Sampling(0.8, 1.0, 0, seed=3)


class AheadRunner(Runner):
    runs_ahead = True


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=256, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    return model


def engine(runner: Runner, blocks: int = 200) -> Engine:
    return Engine(runner, blocks=blocks, block_size=4, max_tokens=24, max_sequences=6, max_context=64)


def run(core: Engine, sampling: list[Sampling], *, cancelled: frozenset[int] = frozenset()) -> list[list[int]]:
    """Twelve prompts, one or two more each step, each to its own length; those in `cancelled` go after their third token."""
    dice = random.Random(1)
    prompts = [[dice.randrange(64) for _ in range(dice.randrange(1, 30))] for _ in range(12)]
    prompts[7] = prompts[2] + [5]  # begins like another
    lengths = [dice.randrange(1, 20) for _ in prompts]
    jobs, ends = [], {}
    while len(ends) < len(prompts):
        for _ in range(dice.choice([1, 2])):
            if len(jobs) < len(prompts):
                more = {"min_tokens": 4, "ends": range(32)} if len(jobs) % 4 == 3 else {}  # whose first tokens are chosen on the host
                jobs.append(core.job(prompts[len(jobs)], sampling[len(jobs) % len(sampling)], **more))
                core.add(jobs[-1])
        for job, choice, *_ in core.step():
            n = jobs.index(job)
            ends.setdefault(n, [])
            made = job.tokens[job.prompt_length :]
            assert made[-1] == choice.token
            if len(made) == (3 if n in cancelled else lengths[n]):
                core.remove(job)
        ends = {n: job for n, job in enumerate(jobs) if job.is_over}
    assert not core.has_work
    assert core.step() == []
    assert core.pool.held == 0
    return [job.tokens[job.prompt_length :] for job in jobs]


@pytest.mark.parametrize("sampling", [[GREEDY], [GREEDY, GREEDY, SAMPLED]])
@pytest.mark.parametrize("blocks", [200, 24])
def test_running_ahead_gives_the_same_tokens(model, sampling, blocks):
    cancelled = frozenset({1, 4})
    want = run(engine(Runner(copy.deepcopy(model))), sampling, cancelled=cancelled)
    core = engine(AheadRunner(copy.deepcopy(model)), blocks)
    assert run(core, sampling, cancelled=cancelled) == want
    assert (core.scheduler.preemptions > 0) == (blocks == 24)


def test_what_was_computed_ahead_is_cached_under_its_real_tokens(model):
    core = engine(AheadRunner(copy.deepcopy(model)))
    first = core.job([1, 2, 3], GREEDY)
    core.add(first)
    while len(first.tokens) < 20:
        core.step()
    core.remove(first)
    second = core.job(first.tokens, GREEDY)
    core.add(second)
    while len(second.tokens) < 24:
        core.step()
    assert second.cached == 16
    plain = engine(Runner(copy.deepcopy(model)))
    whole = plain.job(first.tokens, GREEDY)
    plain.add(whole)
    while len(whole.tokens) < 24:
        plain.step()
    assert second.tokens == whole.tokens
