"""Greedy tokens of many requests at once equal those of transformers' `generate`, one by one, for every family of models."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.engine import Engine, Job  # noqa: E402
from stages.ar.params import Sampling  # noqa: E402
from tests.stages.ar import families  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> folder, each made once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        key = "omni" if family in families.OMNI else family
        if key not in made:
            made[key] = tmp_path_factory.mktemp(key)
            families.save(family, made[key])
        return made[key]

    return of


@dataclass
class Case:
    """A request, and what became of it."""

    prompt: list[int]
    new: int
    arrives: int  # step
    cancelled: int | None = None  # step
    job: Job | None = None
    logits: list[Any] = field(default_factory=list)


def mixed(count: int, dice: random.Random) -> list[Case]:
    """Prompts of 1 to 70 tokens, many of which begin alike; arrivals over 40 steps; every eighth is cancelled."""
    beginnings = [[dice.randrange(20, 140) for _ in range(length)] for length in (9, 24, 40)]
    cases = []
    for n in range(count):
        start = dice.choice(beginnings) if n % 2 else []
        prompt = start + [dice.randrange(20, 140) for _ in range(dice.choice([1, 3, 8, 17, 30]))]
        arrives = dice.randrange(40)
        cases.append(Case(prompt, dice.randrange(4, 24), arrives, arrives + dice.randrange(12) if n % 8 == 5 else None))
    return cases


def serve(engine: Engine, cases: list[Case]) -> None:
    """All of them, with every sampled token's logits."""
    kept: list[Any] = []
    forward = engine.runner.forward

    def keeping(batch: Any) -> Any:
        result = forward(batch)
        kept[:] = [result.logits.float()]
        return result

    engine.runner.forward = keeping  # type: ignore[method-assign]
    by_job: dict[Job, Case] = {}
    step = 0
    while step <= 40 or engine.has_work:
        for case in cases:
            if case.arrives == step:
                case.job = engine.job(case.prompt, Sampling())
                by_job[case.job] = case
                engine.add(case.job)
        for row, advance in enumerate(engine.step()):
            case = by_job[advance.job]
            case.logits.append(kept[0][row].clone())
            if len(case.logits) == case.new:
                engine.remove(advance.job)
        for case in cases:
            if case.cancelled == step and case.job is not None:
                engine.remove(case.job)
        step += 1
        assert step < 5000, "no progress"
    engine.runner.forward = forward  # type: ignore[method-assign]


@torch.inference_mode()
def generated(model: Any, family: str, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    if family == "talker":  # its `generate` wants a conversation; the same loop without one
        for _ in range(new):
            hidden = model.model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).last_hidden_state
            ids = torch.cat([ids, model.codec_head(hidden[:, -1]).argmax(-1, keepdim=True)], 1)
        return ids[0, len(prompt) :].tolist()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_logits(model: Any, family: str, tokens: list[int]) -> Any:
    ids = torch.tensor([tokens])
    if family == "talker":
        return model.codec_head(model.model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).last_hidden_state)[0, -1]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]


def assert_equal(model: Any, family: str, case: Case) -> None:
    """Token by token; where one differs, the two likeliest of the reference are closer than its logits are to ours, which is 1e-4 at most."""
    assert case.job is not None
    ours = case.job.tokens[len(case.prompt) :]
    assert len(ours) == case.new or case.cancelled is not None
    expected = generated(model, family, case.prompt, len(ours)) if ours else []
    for n, (mine, reference) in enumerate(zip(ours, expected, strict=True)):
        if mine != reference:
            logits = reference_logits(model, family, case.prompt + expected[:n])
            first, second = logits.topk(2).values.tolist()
            assert (case.logits[n] - logits).abs().max() < 1e-4
            assert first - second < 1e-4
            return  # from here on the two say different things
    if ours:
        assert (case.logits[-1] - reference_logits(model, family, case.prompt + ours[:-1])).abs().max() < 1e-4


@pytest.mark.parametrize("family", families.FAMILIES)
def test_thirty_two_mixed_requests_say_what_generate_says(checkpoint: Any, family: str) -> None:
    folder = checkpoint(family)
    # 40 blocks of 4 tokens are less than four of the longest requests: many are preempted.
    engine = families.engine(families.runner(family, folder), blocks=41, max_context=128)
    cases = mixed(32, random.Random(family))
    serve(engine, cases)
    assert engine.scheduler.preemptions > 3
    assert engine.pool.stats.hits > 10
    assert engine.pool.held == 0
    reference = families.read(family, folder)
    for case in cases:
        assert_equal(reference, family, case)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_the_prefix_cache_and_in_large_steps_too(checkpoint: Any, family: str) -> None:
    folder = checkpoint(family)
    engine = families.engine(families.runner(family, folder), caches=False, max_tokens=256, block_size=16, blocks=65)
    cases = mixed(12, random.Random(1))
    serve(engine, cases)
    assert engine.pool.stats.hits == engine.pool.stats.evictions == 0
    reference = families.read(family, folder)
    for case in cases:
        assert_equal(reference, family, case)


def test_three_dimensional_positions_go_on_after_the_prompt(checkpoint: Any) -> None:
    """A prompt whose middle is an image: positions that repeat, and a reply that starts behind the largest of them."""
    folder = checkpoint("thinker")
    engine = families.engine(families.runner("thinker", folder))
    model = families.read("thinker", folder)
    dice = random.Random(4)
    cases = []
    for n in range(4):
        before, rows, columns, after = 3 + n, 2, 3, 9
        grid = (
            torch.stack(torch.meshgrid(torch.zeros(1).long(), torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1) + before
        )
        edge = int(grid.max()) + 1
        positions = torch.cat([torch.arange(before).expand(3, -1), grid, (torch.arange(after) + edge).expand(3, -1)], 1)
        prompt = [dice.randrange(20, 140) for _ in range(positions.shape[1])]
        job = engine.job(prompt, Sampling(), positions=positions)
        engine.add(job)
        cases.append((prompt, positions, job))
    for _ in range(10):
        engine.step()
    text = model.get_decoder()
    for prompt, positions, job in cases:
        tokens, at = list(prompt), positions
        for _ in range(6):
            with torch.inference_mode():
                hidden = text(input_ids=torch.tensor([tokens]), position_ids=at[:, None], use_cache=False).last_hidden_state
                tokens.append(int(model.lm_head(hidden[0, -1]).argmax()))
            at = torch.cat([at, at.max().repeat(3, 1) + 1], 1)
        assert job.tokens[: len(tokens)] == tokens
