"""Requests on the engine: choices, ends, log-probabilities, and what one request can not do to the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.params import Generation, Sampling  # noqa: E402
from stages.ar.text_engine import TextEngine  # noqa: E402
from streamrt import BadRequest, ConfigError, Output, Overloaded, Request, StageFailed, TooLong, text_chunk  # noqa: E402
from tests.stages.ar import families  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    families.save("llama", folder)
    return folder


@pytest.fixture(scope="module")
def shared(folder: Path) -> TextEngine:
    return make(folder)


@pytest.fixture
def engine(shared: TextEngine) -> Iterator[TextEngine]:
    yield shared
    assert shared.running == 0
    assert not shared.has_work()
    assert shared.engine.pool.held == 0
    assert not shared._choices


def make(folder: Path, **options: Any) -> TextEngine:
    return TextEngine(families.engine(families.runner("llama", folder), **options), families.tokenizer())


def ask(text: str = "w30 w31 w32 w33 w34 w35", **fields: Any) -> Generation:
    sampling = fields.pop("sampling", Sampling())
    fields = {"tools": None, "max_tokens": 8, "stop": (), "may_truncate": False, **fields}
    return Generation(messages=[{"role": "user", "content": text}], sampling=sampling, **fields)


def run(engine: TextEngine, generation: Generation, name: str = "r") -> list[Output]:
    engine.submit(Request(name, "respond"), generation)
    outputs: list[Output] = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finished
    assert not any(o.finished for o in outputs[:-1])
    return outputs


def words(outputs: list[Output], choice: int | None = None) -> list[str]:
    chunks = [o.chunk for o in outputs if o.chunk is not None]
    return "".join(c.text for c in chunks if choice is None or c.meta["choice"] == choice).split()


def test_choices_share_the_prompt_and_end_each_on_its_own(engine: TextEngine) -> None:
    prompt = " ".join(f"w{n}" for n in range(30, 61))
    generation = ask(prompt, n=3, sampling=Sampling(temperature=1.5, seed=5), max_tokens=6)
    outputs = run(engine, generation)
    replies = [words(outputs, n) for n in range(3)]
    assert len({tuple(reply) for reply in replies}) == 3
    assert replies[0] == words(run(engine, ask(prompt, sampling=Sampling(temperature=1.5, seed=5), max_tokens=6)))
    ends = [o.chunk.meta for o in outputs if o.chunk is not None and "finish_reason" in o.chunk.meta]
    assert sorted((m["choice"], m["finish_reason"]) for m in ends) == [(n, "length") for n in range(3)]
    usage = outputs[-1].meta["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (31, 18)


@pytest.mark.parametrize("caches", [True, False])
def test_the_prompt_of_many_choices_is_computed_once(folder: Path, caches: bool) -> None:
    engine = make(folder, caches=caches)
    engine.submit(Request("r", "respond"), ask(" ".join(f"w{n}" for n in range(30, 61)), n=4))
    computed = []
    for _ in range(4):
        before = {id(job): job.computed for job in engine._choices}
        engine.step()
        computed.append(sum(max(0, job.computed - before[id(job)]) for job in engine._choices))
    # 31 tokens in two steps; then the others' 3 tokens after the last whole block, which 28 shared ones come before
    assert computed[0] == 24
    assert computed[1] == 7
    assert computed[2] == 1 + 3 * 31
    assert computed[3] == 4
    engine.cancel("r")
    assert engine.engine.pool.held == 0


def test_stop_tokens_end_without_being_said_and_the_models_end_can_be_ignored(engine: TextEngine) -> None:
    whole = words(run(engine, ask()))
    ids = [int(word[1:]) for word in whole]
    at = next(n for n in range(1, 8) if ids[n] not in ids[:n])
    stopped = run(engine, ask(stop_token_ids=(ids[at],)))
    assert words(stopped) == whole[:at]
    assert stopped[-1].meta["finish_reason"] == "stop"
    engine._ends = frozenset({ids[at]})
    try:
        assert words(run(engine, ask())) == whole[:at]
        assert words(run(engine, ask(ignore_eos=True))) == whole
        assert len(words(run(engine, ask(min_tokens=at + 2)))) >= at + 2
    finally:
        engine._ends = frozenset()


def test_log_probabilities_come_with_the_text_of_their_tokens(engine: TextEngine) -> None:
    outputs = run(engine, ask(logprobs=0))
    told = [entry for o in outputs if o.chunk is not None for entry in o.chunk.meta.get("logprobs", [])]
    assert [entry["token"] for entry in told] == words(outputs)
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in told)


class Broken:
    def after(self, jobs: list[Any], sampled: list[Any], hidden: Any) -> list[Any]:
        raise RuntimeError("bug")


def test_a_broken_hook_fails_its_own_request(engine: TextEngine) -> None:
    expected = words(run(engine, ask()))
    for name, n in (("broken", 2), ("whole", 1)):
        engine.submit(Request(name, "respond"), ask(n=n))
    for job in engine._choices:
        if engine._choices[job][0].request_id == "broken":
            job.hook = Broken()
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    (failed,) = [o for o in outputs if o.request_id == "broken"]
    assert isinstance(failed.error, StageFailed)
    assert words([o for o in outputs if o.request_id == "whole"]) == expected


def test_a_paused_request_waits_and_the_others_do_not(engine: TextEngine) -> None:
    expected = words(run(engine, ask()))
    engine.submit(Request("slow", "respond"), ask())
    engine.pause("slow")
    assert not engine.has_work()
    assert words(run(engine, ask("w50 w51"), "fast"))
    engine.resume("slow")
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert words(outputs) == expected


def test_a_refused_request_leaves_nothing(folder: Path) -> None:
    engine = make(folder, max_waiting=2)
    with pytest.raises(TooLong):
        engine.submit(Request("long", "respond"), ask(" ".join(["w30"] * 300)))
    engine.cancel("long")
    with pytest.raises(Overloaded):  # its first two choices wait, the third can not
        engine.submit(Request("many", "respond"), ask(n=3))
    engine.cancel("many")
    engine.submit(Request("empty", "respond"), Generation(None, None, Sampling(), 8, (), False))
    engine.feed("empty", text_chunk("  "))
    with pytest.raises(BadRequest, match="none to respond"):
        engine.end("empty")
    engine.cancel("empty")
    assert engine.running == 0
    assert not engine._choices
    assert words(run(engine, ask()))


def test_memory_that_does_not_hold_one_context_is_refused_with_what_would(folder: Path) -> None:
    import msgspec

    from stages.ar.causal_lm import CausalLMArgs, sizes

    runner = families.runner("llama", folder, row_layers=(0, 1, 2))  # 1536 bytes a token
    with pytest.raises(ConfigError, match=r"kv_cache_mb: 1 MB hold \d+ tokens, expected at least max_context, 512") as error:
        sizes(CausalLMArgs(model="", kv_cache_mb=1, block_size=256, max_context=512), runner)
    enough = int(error.value.hint.split(",")[0].rpartition("= ")[2])
    args = CausalLMArgs(model="", kv_cache_mb=enough, block_size=256, max_context=512)
    assert sizes(args, runner)["blocks"] > 2
    with pytest.raises(ConfigError, match="max_context: got 4096, the model was made for 512"):
        sizes(msgspec.structs.replace(args, max_context=4096), runner)
