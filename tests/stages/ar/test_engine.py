"""The engine on a tiny model: what goes in and out beside tokens, what a hit gives, what is left when jobs end in any way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.blocks import Content  # noqa: E402
from stages.ar.engine import Embeddings, Engine, Job, Next  # noqa: E402
from stages.ar.params import Sampling  # noqa: E402
from stages.ar.sampler import Sampled  # noqa: E402
from streamrt import ConfigError, Overloaded, StageFailed, TooLong  # noqa: E402
from tests.stages.ar import families  # noqa: E402

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    families.save("qwen3", folder)
    return folder


def fresh(folder: Path, **options: Any) -> Engine:
    return families.engine(families.runner("qwen3", folder, row_layers=LAYERS), **options)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    return fresh(folder)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Empty before and after; nothing is cached."""
    shared.pool.invalidate()
    yield shared
    assert_empty(shared)


def assert_empty(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert engine.pool.held == 0
    assert sorted(scheduler._rows) == list(range(scheduler.max_sequences))
    assert not engine.has_work


def run(engine: Engine, *jobs: Job, new: int = 6) -> list[list[int]]:
    """Add them, go on until each has `new` tokens, end them: their new tokens."""
    for job in jobs:
        engine.add(job)
    while engine.has_work:
        for advance in engine.step():
            if len(advance.job.tokens) == advance.job.prompt_length + new:
                engine.remove(advance.job)
    return [job.tokens[job.prompt_length :] for job in jobs]


def prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(20, 140) for _ in range(length)]


def test_embeddings_in_the_place_of_tokens_say_what_the_tokens_say(engine: Engine) -> None:
    tokens = prompt(31)
    expected = run(engine, engine.job(tokens, Sampling()))
    rows = engine.runner.embed(torch.tensor(tokens))
    whole = engine.job([0] * 31, Sampling(), embeddings=[(0, rows)])
    middle = engine.job(tokens[:5] + [0] * 20 + tokens[25:], Sampling(), embeddings=[(5, rows[5:12]), (12, rows[12:25])])
    assert run(engine, whole, middle) == expected * 2
    assert (whole.cached, middle.cached) == (0, 4), "what comes before the embeddings is found"


def test_embeddings_with_a_name_are_found_again_and_others_are_not(engine: Engine) -> None:
    rows = {name: torch.randn(12, 64, generator=torch.Generator().manual_seed(n)) for n, name in enumerate((b"cat", b"dog"))}

    def job(name: bytes) -> Job:
        tokens = prompt(8) + [0] * 12 + prompt(8, 1)
        return engine.job(tokens, Sampling(), embeddings=[(8, rows[name])], contents=[Content(8, 20, name)])

    first, again, other = job(b"cat"), job(b"cat"), job(b"dog")
    said = [run(engine, j)[0] for j in (first, again, other)]
    assert [j.cached for j in (first, again, other)] == [0, 24, 8]
    assert said[0] == said[1] != said[2]


class Scripted:
    """A hook that gives the embedding of the sampled token itself, or has the job wait for it."""

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        self.engine, self.waits = engine, waits
        self.sizes: list[int] = []

    def after(self, jobs: list[Job], sampled: list[Sampled], hidden: Any) -> list[Next]:
        assert hidden.shape == (len(jobs), 64)
        self.sizes.append(len(jobs))
        if self.waits:
            return [Next(waits=True, made=choice.token) for choice in sampled]
        rows = self.engine.runner.embed(torch.tensor([choice.token for choice in sampled]))
        return [Next(row, made=choice.token) for row, choice in zip(rows, sampled, strict=True)]


def test_a_hook_gives_the_next_input_of_all_its_jobs_at_once(engine: Engine) -> None:
    prompts = [prompt(5), prompt(9, 1)]
    expected = [run(engine, engine.job(p, Sampling()))[0] for p in prompts]
    hook = Scripted(engine, waits=False)
    assert run(engine, *(engine.job(p, Sampling(), hook=hook) for p in prompts)) == expected
    assert hook.sizes.count(2) >= 5


class Failing(Scripted):
    """And of one job can not, from its third token on: it raises, or gives what is no embedding, or too little."""

    victim: Job
    how = ""

    def after(self, jobs: list[Job], sampled: list[Sampled], hidden: Any) -> list[Next]:
        nexts = super().after(jobs, sampled, hidden)
        if self.how and self.victim in jobs and len(self.victim.tokens) == self.victim.prompt_length + 3:
            if self.how == "raises":
                raise RuntimeError("no more of this")
            if self.how == "too few":
                return nexts[:-1]
            nexts[jobs.index(self.victim)] = Next(torch.zeros(63))
        return nexts


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", r"Failing failed: RuntimeError\('no more of this'\)"),
        ("too few", r"Failing failed: ValueError\('0 results for 1 jobs'\)"),
        ("no embedding", r"the shape \(63,\), expected \(64,\)"),
    ],
)
def test_a_hook_that_fails_ends_its_own_job_and_costs_the_others_nothing(engine: Engine, how: str, words: str) -> None:
    prompts = [prompt(5), prompt(9, 1), prompt(7, 2)]

    def serve(how: str) -> tuple[list[Job], int, list[Any]]:
        """Jobs, passes, errors."""
        engine.pool.invalidate()
        hook = Failing(engine, waits=False)
        jobs = [engine.job(p, Sampling(), hook=hook) for p in prompts]
        hook.victim, hook.how = jobs[1], how
        errors, passes = [], 0
        for job in jobs:
            engine.add(job)
        while engine.has_work:
            passes += 1
            for advance in engine.step():
                if advance.error is not None:
                    errors.append((advance.job, advance.error))
                elif len(advance.job.tokens) == advance.job.prompt_length + 6:
                    engine.remove(advance.job)
        return jobs, passes, errors

    expected, passes, none = serve("")
    jobs, passes_beside_a_failure, errors = serve(how)
    assert none == []
    assert passes_beside_a_failure == passes
    assert [job.tokens for job in jobs] == [expected[0].tokens, expected[1].tokens[: 9 + 3], expected[2].tokens]
    ((job, error),) = errors
    assert job is jobs[1]
    with pytest.raises(StageFailed, match=words):
        raise error


def test_an_embedding_that_is_none_is_refused_where_it_comes_in(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"\(4, 63\)"):
        engine.job(prompt(8), Sampling(), embeddings=[(2, torch.zeros(4, 63))])
    job = engine.job(prompt(5), Sampling(), hook=Scripted(engine, waits=True))
    engine.add(job)
    engine.step()
    with pytest.raises(ValueError, match=r"\(1, 64\), expected \(64,\)"):
        engine.give(job, torch.zeros(1, 64))
    assert job.is_waiting
    engine.remove(job)


def test_a_job_waits_for_its_input_while_others_go_on_and_is_preempted_for_them(folder: Path) -> None:
    engine = fresh(folder, blocks=33, max_context=128)
    slow_prompt = prompt(40)
    expected = run(engine, engine.job(slow_prompt, Sampling()), new=5)[0]
    slow = engine.job(slow_prompt, Sampling(), hook=Scripted(engine, waits=True))
    engine.add(slow)
    while not slow.is_waiting:
        engine.step()
    assert not engine.has_work
    assert engine.step() == []
    others = [engine.job(prompt(60, n), Sampling()) for n in (1, 2)]
    run(engine, *others, new=30)  # there is no room for the three
    assert slow.preemptions == 1
    for n in range(4):
        engine.give(slow, engine.runner.embed(torch.tensor(slow.tokens[-1])))
        while not slow.is_waiting:
            engine.step()
        assert slow.tokens[40 : 42 + n] == expected[: n + 2]
    engine.remove(slow)
    assert_empty(engine)


def test_a_paused_job_keeps_its_place_and_goes_on(engine: Engine) -> None:
    expected = run(engine, engine.job(prompt(7), Sampling()))[0]
    job = engine.job(prompt(7), Sampling())
    engine.add(job)
    engine.step()
    engine.pause(job, is_paused=True)
    assert not engine.has_work
    engine.pause(job, is_paused=False)
    while len(job.tokens) < 13:
        engine.step()
    engine.remove(job)
    assert job.tokens[7:] == expected


def test_hidden_states_on_a_hit_equal_those_on_a_miss(folder: Path, engine: Engine) -> None:
    tokens = prompt(57)

    def rows(job: Job) -> list[Any]:
        engine.add(job)
        while job.missing or len(job.tokens) < 60:
            engine.step()
            if len(job.tokens) >= 60:
                break
        found = [engine.rows(job, layer, 0, job.computed) for layer in LAYERS]
        engine.remove(job)
        return found

    miss, hit = engine.job(tokens, Sampling()), engine.job(tokens, Sampling())
    from_miss, from_hit = rows(miss), rows(hit)
    assert (miss.cached, hit.cached) == (0, 56)
    for ours, again in zip(from_miss, from_hit, strict=True):
        assert torch.equal(ours[:56], again[:56])
        assert torch.allclose(ours, again, atol=1e-5)
    model = families.read("qwen3", folder)
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([hit.tokens[:59]]), output_hidden_states=True)
    for layer, ours in zip(LAYERS, from_hit, strict=True):
        assert torch.allclose(ours, out.hidden_states[layer][0], atol=1e-4)


def test_rows_of_a_layer_that_is_not_there_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="row_layers: got 3"):
        families.runner("qwen3", folder, row_layers=(3,))


class TestPrefixes:
    def steps_to_first(self, engine: Engine, job: Job) -> int:
        engine.add(job)
        steps = 1
        while not engine.step():
            steps += 1
        engine.remove(job)
        return steps

    def test_a_long_prompt_with_the_same_beginning_starts_at_once(self, folder: Path) -> None:
        engine = fresh(folder, blocks=300, max_context=600 // 4 * 3, max_tokens=64)
        first, second = (engine.job(prompt(400) + [30 + n], Sampling()) for n in range(2))
        assert self.steps_to_first(engine, first) == 7
        assert self.steps_to_first(engine, second) == 1
        assert (first.cached, second.cached) == (0, 400)
        assert engine.pool.stats.hits == 100
        assert engine.pool.stats.misses == 100

    def test_turned_off_nothing_is_found(self, folder: Path) -> None:
        engine = fresh(folder, caches=False)
        jobs = [engine.job(prompt(40), Sampling()) for _ in range(2)]
        said = [run(engine, job) for job in jobs]
        assert said[0] == said[1]
        assert [job.cached for job in jobs] == [0, 0]
        assert engine.pool.cached == 0

    def test_what_was_evicted_is_computed_again(self, folder: Path) -> None:
        engine = fresh(folder, blocks=26, max_context=100)
        first = run(engine, engine.job(prompt(60), Sampling()))
        run(engine, engine.job(prompt(80, 1), Sampling()))
        assert engine.pool.stats.evictions > 0
        again = engine.job(prompt(60), Sampling())
        assert run(engine, again) == first
        assert again.cached < 60 // 4 * 4

    def test_after_invalidation_nothing_is_found(self, engine: Engine) -> None:
        run(engine, engine.job(prompt(40), Sampling()))
        engine.pool.invalidate()
        again = engine.job(prompt(40), Sampling())
        run(engine, again)
        assert again.cached == 0

    def test_another_revision_finds_nothing(self, engine: Engine) -> None:
        run(engine, engine.job(prompt(40), Sampling()))
        engine.revision, kept = b"adapter", engine.revision
        other = engine.job(prompt(40), Sampling())
        run(engine, other)
        engine.revision = kept
        assert other.cached == 0

    def test_replies_are_found_by_the_next_turn(self, engine: Engine) -> None:
        first = engine.job(prompt(10), Sampling())
        reply = run(engine, first, new=20)[0]
        second = engine.job(prompt(10) + reply + prompt(6, 1), Sampling())
        run(engine, second)
        assert second.cached == 28  # the last token was never computed


def test_a_late_job_has_its_first_token_within_two_steps(engine: Engine) -> None:
    early = [engine.job(prompt(6, n), Sampling()) for n in range(6)]
    for job in early:
        engine.add(job)
    for _ in range(5):
        engine.step()
    late = engine.job(prompt(12, 9), Sampling())
    engine.add(late)
    engine.step()
    engine.step()
    assert len(late.tokens) > 12
    for job in [*early, late]:
        engine.remove(job)


def test_a_shortest_length_keeps_the_end_away(engine: Engine) -> None:
    free = run(engine, engine.job(prompt(7), Sampling()), new=8)[0]
    kept = engine.job(prompt(7), Sampling(), ends=(free[2],), min_tokens=5)
    said = run(engine, kept, new=8)[0]
    assert free[2] not in said[:5]
    assert said[:2] == free[:2]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_thousand_aborts_leave_nothing_and_the_others_say_what_they_say(folder: Path, seed: int) -> None:
    """Jobs that are removed anywhere: waiting, in their prompt, decoding, held, preempted, twice."""
    engine = fresh(folder, blocks=49, max_context=96, max_tokens=48)
    dice = random.Random(seed)
    kept = [prompt(dice.randrange(1, 40), n) for n in range(4)]
    expected = [run(engine, engine.job(p, Sampling()), new=30)[0] for p in kept]
    keepers = [engine.job(p, Sampling()) for p in kept]
    hook = Scripted(engine, waits=True)
    live: list[Job] = []
    aborted = 0
    said: dict[Job, list[int]] = {}
    waiting = list(keepers)
    while aborted < 1000 or waiting or len(said) < len(keepers):
        if waiting and aborted % 200 == 0:
            engine.add(waiting.pop())
        while len(live) < 12:
            job = engine.job(prompt(dice.randrange(1, 50), dice.randrange(30)), Sampling(), hook=dice.choice([None, None, hook]))
            engine.add(job)
            live.append(job)
        for _ in range(dice.randrange(1, 6)):
            victim = live.pop(dice.randrange(len(live)))
            engine.remove(victim)
            engine.remove(victim)
            aborted += 1
        for advance in engine.step() if dice.random() < 0.8 else []:
            job = advance.job
            if job in keepers and len(job.tokens) == job.prompt_length + 30:
                said[job] = job.tokens[job.prompt_length :]
                engine.remove(job)
            elif job in live and len(job.tokens) > 90:
                engine.remove(job)
                live.remove(job)
    for job in live:
        engine.remove(job)
    assert_empty(engine)
    assert [said[job] for job in keepers] == expected


def kept_beside_aborts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, aborts_a_step: int
) -> tuple[list[list[int]], list[list[int]], int, int]:
    """Four jobs of 100 tokens, beside others that are aborted: their tokens, the passes in which these came, how many of their tokens
    all passes computed, and how many aborts there were."""
    dice = random.Random(3)
    jobs = [engine.job(prompt(length, length), Sampling()) for length in (1, 17, 30, 9)]
    came: dict[Job, list[int]] = {job: [] for job in jobs}
    live: list[Job] = []
    passes = computed = aborted = 0
    forward, schedule = engine.runner.forward, engine.scheduler.schedule

    def counting(batch: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(batch)

    def looking() -> Any:
        nonlocal computed
        spans = schedule()
        assert not any(span.sequence.is_over for span in spans), "work for a job that is gone"
        computed += sum(span.end - span.start for span in spans if span.sequence in came)
        return spans

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", counting)
        patch.setattr(engine.scheduler, "schedule", looking)
        for job in jobs:
            engine.add(job)
        steps = 0
        while not all(job.is_over for job in jobs):
            for _ in range(min(aborts_a_step, len(live))):
                engine.remove(live.pop(dice.randrange(len(live))))
                aborted += 1
            while aborts_a_step and len(live) < 48:
                live.append(engine.job(prompt(dice.randrange(1, 50), dice.randrange(30)), Sampling()))
                engine.add(live[-1])
            steps += 1
            for advance in engine.step():
                if advance.job in came:
                    came[advance.job].append(passes)
                    if len(came[advance.job]) == 100:
                        engine.remove(advance.job)
        assert passes == steps
    for job in live:
        engine.remove(job)
    assert_empty(engine)
    assert [job.preemptions for job in jobs] == [0] * 4
    return [job.tokens for job in jobs], list(came.values()), computed, aborted


def test_a_thousand_aborts_cost_the_others_no_pass_and_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was there first has each of its tokens in the very pass in which it would have it alone, though rows and blocks are short."""
    sizes = {"blocks": 126, "max_tokens": 48}
    alone, beside = fresh(folder, **sizes), fresh(folder, **sizes)
    *expected, none = kept_beside_aborts(alone, monkeypatch, 0)
    *got, aborted = kept_beside_aborts(beside, monkeypatch, 11)
    assert none == 0
    assert aborted >= 1000
    assert beside.pool.stats.evictions > 0
    assert got == expected


def test_what_can_not_be_is_refused_and_the_engine_goes_on(folder: Path) -> None:
    engine = fresh(folder, max_waiting=1)
    with pytest.raises(TooLong, match="256 tokens, expected fewer than 256"):
        engine.add(engine.job(prompt(256), Sampling()))
    with pytest.raises(ValueError, match="a token to begin with"):
        engine.add(engine.job([], Sampling()))
    engine.add(engine.job(prompt(3), Sampling()))
    with pytest.raises(Overloaded):
        engine.add(engine.job(prompt(3), Sampling()))
    while not engine.step():
        pass
    engine.remove(engine.scheduler.running[0])
    assert len(run(engine, engine.job(prompt(3), Sampling()))[0]) == 6
    assert_empty(engine)


def test_a_pass_that_fails_leaves_what_was_computed_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine, engine.job(prompt(30), Sampling()))[0]
    engine.pool.invalidate()
    job = engine.job(prompt(30), Sampling())
    engine.add(job)
    engine.step()
    computed = job.computed

    def fails(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    assert job.computed == computed
    while len(job.tokens) < 36:
        engine.step()
    engine.remove(job)
    assert job.tokens[30:] == expected


def test_a_model_that_does_more_than_the_runner_knows_is_refused(folder: Path) -> None:
    from stages.ar.runner import Runner

    model = families.read("qwen3", folder)
    runner = Runner(model)
    head = runner.head
    runner.head = lambda hidden: head(hidden) * 1.1
    with pytest.raises(ConfigError, match="logits differ from Qwen3ForCausalLM's own"):
        families.engine(runner)


def test_embeddings_are_kept_by_position() -> None:
    kept = Embeddings()
    kept.put(2, torch.ones(2, 3))
    kept.put(7, 7 * torch.ones(1, 3))
    positions, rows = kept.between(3, 9)
    assert positions == [3, 7]
    assert rows[:, 0].tolist() == [1, 7]
    assert kept.between(4, 7)[0] == []
    with pytest.raises(ValueError, match="position 7 comes after 7"):
        kept.put(7, torch.ones(1, 3))
