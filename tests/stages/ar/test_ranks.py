"""One model on two processes: it says what one process says, and dies and comes back as one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.attention import Prefill  # noqa: E402
from stages.ar.ranks import Allocate, Call, Check, End, Forward, Prepare, check_shares, decode, encode  # noqa: E402
from stages.ar.runner import Batch  # noqa: E402
from streamrt import AsyncPipeline, ConfigError, StageFailed  # noqa: E402
from tests.pipelines import Running, run_cli, up  # noqa: E402
from tests.stages.ar import families  # noqa: E402
from tests.stages.test_causal_lm import loaded, run  # noqa: E402

ARGS = {"kv_cache_mb": 2, "max_tokens": 300, "max_context": 400, "max_sequences": 4, "max_batch_tokens": 24, "dtype": "float32"}
PROMPTS = ["w5 w6 w7", "w8", "w9 w10 w11 " * 20, "w9 w10 w11 " * 20 + "w3", "w100 w101", "w17 w16 w15"]
IDLE_S = 0.1  # of a core, that each rank may use in 5 s without work

PIPELINE = """
[pipeline]
name = "{name}"
[[stage]]
name = "llm"
use = "ar.causal_lm"
[stage.args]
model = "{model}"
{args}
[deploy.llm]
tp = 2
max_requests = 8
[run]
restart_delay_s = 0.05
"""


def save(family: str, folder: Path) -> Path:
    families.save(family, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def two_ranks(model: Path | str, name: str) -> Iterator[Running]:
    args = "\n".join(f"{key} = {value!r}" for key, value in ARGS.items())
    with up(PIPELINE.format(name=name, model=model, args=args), gateway=False) as running:
        yield running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def ranked(checkpoint: Path) -> Iterator[Running]:
    with two_ranks(checkpoint, "ranks") as running:
        yield running


async def said_by_two(running: Running) -> list[str]:
    """What they reply to all prompts, side by side."""
    async with AsyncPipeline(name=running.name) as pipeline:
        return [r.text for r in await asyncio.gather(*(pipeline.generate(prompt, max_tokens=24, timeout_s=60) for prompt in PROMPTS))]


async def said_by_one(folder: Path) -> list[str]:
    with loaded(folder, **ARGS) as stage:
        return [(await run(stage, prompt, max_tokens=24))[0] for prompt in PROMPTS]


@pytest.mark.slow
async def test_two_ranks_say_what_one_process_says(ranked: Running, checkpoint: Path) -> None:
    assert set(ranked.pids()) == {"llm#0", "llm#0.1"}
    said = await said_by_two(ranked)
    assert said == await said_by_one(checkpoint)
    assert len(set(said)) == len(PROMPTS)
    assert all(len(text.split()) == 24 for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["llm#0.1", "llm#0"])
async def test_a_killed_rank_fails_what_runs_and_the_model_comes_back(ranked: Running, checkpoint: Path, victim: str) -> None:
    before = ranked.pids()
    async with AsyncPipeline(name=ranked.name) as pipeline:
        chunks = pipeline.stream("w1 w2", max_tokens=300, timeout_s=60)
        await anext(chunks)
        ranked.kill(victim)
        start = time.monotonic()
        with pytest.raises(StageFailed, match=r"stage llm was lost|a rank of the model is gone"):
            async for _ in chunks:
                pass
        assert time.monotonic() - start < 4
    await asyncio.to_thread(ranked.wait_for, lambda: set(ranked.pids()) == set(before) and ranked.pids()[victim] != before[victim], 60.0)
    await asyncio.to_thread(ranked.wait_for, lambda: ranked.rows()["llm#0"]["state"] == "ready", 60.0)
    assert not set(ranked.pids().values()) & set(before.values())
    assert await said_by_two(ranked) == await said_by_one(checkpoint)


@pytest.mark.slow
def test_an_idle_model_costs_its_ranks_nothing(ranked: Running) -> None:
    pids = ranked.pids().values()
    before = [cpu_s(pid) for pid in pids]
    time.sleep(5)
    used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(used) < 2 * IDLE_S, used


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_families_say_the_same_on_two_ranks(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    with two_ranks(tmp_path, f"ranks-{family}") as running:
        assert await said_by_two(running) == await said_by_one(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
async def test_random_weights_are_shared_out_too(tmp_path: Path, is_tied: bool) -> None:
    save("llama", tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.tie_word_embeddings = is_tied
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with two_ranks(f"random:{tmp_path}/config.json", "ranks-random") as running:
        said = await said_by_two(running)
    from streamrt.weights import resolve

    with loaded(tmp_path, resolve, **{**ARGS, "model": f"random:{tmp_path}/config.json"}) as stage:
        assert said == [(await run(stage, prompt, max_tokens=24))[0] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "args", "words"),
    [
        (1, "", "tp: got 2, the model's num_key_value_heads is 1, which 2 ranks can not share evenly"),
        (2, 'dtype = "int8"', "tp: got 2, expected 1 with dtype int8"),
    ],
)
def test_what_can_not_be_shared_out_is_said(kv_heads: int, args: str, words: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.num_key_value_heads = kv_heads
    config.save_pretrained(tmp_path)
    (tmp_path / "p.toml").write_text(PIPELINE.format(name="unshared", model=tmp_path, args=args))
    done = run_cli("up", str(tmp_path / "p.toml"), "--no-gateway")
    assert done.returncode == 2
    assert words in done.stderr


def test_heads_that_can_not_be_shared_evenly_are_refused() -> None:
    check_shares(transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 2)
    with pytest.raises(ConfigError, match="tp: got 4, the model's num_key_value_heads is 2"):
        check_shares(transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4)


@pytest.mark.parametrize("dims", [1, 3])
def test_a_batch_is_the_same_on_every_rank(dims: int) -> None:
    batch = Batch(
        tokens=torch.arange(5),
        positions=torch.arange(5) if dims == 1 else torch.arange(5).expand(3, -1),
        slots=torch.arange(10)[::2],
        decodes=2,
        block_tables=torch.zeros(2, 0, dtype=torch.int32),
        context_lens=torch.ones(2, dtype=torch.int32),
        prefills=(Prefill(2, 5, 3, torch.arange(2, dtype=torch.int32)),),
        wanted=torch.zeros(0, dtype=torch.int64),
        embedded=torch.tensor([1]),
        embeddings=torch.randn(1, 8, dtype=torch.bfloat16),
        deepstacked=torch.tensor([1, 3]),
        deepstack=torch.randn(2, 3, 8),
    )
    heard = decode(encode(Forward(batch)))
    assert isinstance(heard, Forward)
    for name in Batch.__dataclass_fields__:
        assert same(getattr(heard.batch, name), getattr(batch, name)), name


@pytest.mark.parametrize("call", [Allocate(9, 4), Check(), Prepare(24, 8, 256), End()], ids=lambda call: type(call).__name__)
def test_every_other_call_is_too(call: Call) -> None:
    assert decode(encode(call)) == call


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def cpu_s(pid: int) -> float:
    """What a process has used of a core so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
