"""One model on two GPUs, as `streamrt up` runs it: it says what one GPU says, and dies and comes back as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from streamrt import AsyncPipeline, StageFailed  # noqa: E402
from tests import pipelines  # noqa: E402
from tests.pipelines import Running, up  # noqa: E402
from tests.stages.ar.test_ranks import PROMPTS, said_by_two, save  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PIPELINE = """
[pipeline]
name = "{name}"
[[stage]]
name = "llm"
use = "ar.causal_lm"
[stage.args]
model = "{model}"
kv_cache_mb = 2
max_tokens = 300
max_context = 400
max_sequences = 4
max_batch_tokens = 24
dtype = "{dtype}"
cuda_graphs = {graphs}
[deploy.llm]
tp = {tp}
device = {devices}
max_requests = 8
load_timeout_s = 200
[run]
restart_delay_s = 0.05
"""


@pytest.fixture(autouse=True)
def _kernels_are_compiled_at_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "START_S", 240.0)


def pipeline(model: Path, tp: int, *, dtype: str = "float32", has_graphs: bool = True) -> str:
    devices = '["cuda:0", "cuda:1"]' if tp == 2 else '"cuda:0"'
    name, graphs = f"gpu-ranks-{tp}", str(has_graphs).lower()
    return PIPELINE.format(name=name, model=model, tp=tp, devices=devices, dtype=dtype, graphs=graphs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save(family, tmp_path_factory.mktemp(family)) for family in ("qwen3", "llama", "qwen3_moe")}


def chosen(running: Running) -> dict[str, str]:
    """What the model's runner says of itself."""
    return running.rows()["llm#0"]["describe"]


@pytest.fixture(scope="module")
def said_by_one() -> dict[str, list[str]]:
    """What one GPU says, by family, once it has been asked."""
    return {}


@pytest.mark.parametrize(("family", "has_graphs"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", True)])
async def test_two_gpus_say_what_one_says(
    checkpoints: dict[str, Path], said_by_one: dict[str, list[str]], family: str, has_graphs: bool
) -> None:
    if family not in said_by_one:
        with up(pipeline(checkpoints[family], 1), gateway=False) as running:
            said_by_one[family] = await said_by_two(running)
    with up(pipeline(checkpoints[family], 2, has_graphs=has_graphs), gateway=False) as running:
        said = await said_by_two(running)
        facts = chosen(running)
    assert said == said_by_one[family]
    assert facts["ranks"] == "2, joined by nccl"
    is_dense = family == "qwen3"
    assert len(set(said)) >= len(PROMPTS) - (not is_dense)  # the random MoE, on one GPU too, says one thing to two prompts
    assert ("3 layers" in facts["layers"]) == is_dense
    assert facts["graphs"].startswith("for 1, 2, 4 rows" if has_graphs and is_dense else "none: ")


async def test_half_precision_runs(checkpoints: dict[str, Path]) -> None:
    with up(pipeline(checkpoints["llama"], 2, dtype="bfloat16"), gateway=False) as running:
        said = await said_by_two(running)
    assert all(len(text.split()) == 24 for text in said)


@pytest.fixture(scope="module")
def ranked(checkpoints: dict[str, Path]) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "START_S", 240.0)
        with up(pipeline(checkpoints["qwen3"], 2), gateway=False) as running:
            yield running


@pytest.mark.parametrize("victim", ["llm#0.1", "llm#0"])
async def test_a_killed_rank_fails_what_runs_and_the_model_comes_back(ranked: Running, victim: str) -> None:
    """Though the other one's GPU waits in a sum that never comes."""
    expected, before = await said_by_two(ranked), ranked.pids()
    assert set(before) == {"llm#0", "llm#0.1"}
    async with AsyncPipeline(name=ranked.name) as pipeline:
        chunks = pipeline.stream("w1 w2", max_tokens=300, timeout_s=60)
        await anext(chunks)
        ranked.kill(victim)
        with pytest.raises(StageFailed, match=r"stage llm was lost|a rank of the model is gone"):
            async for _ in chunks:
                pass
    await asyncio.to_thread(ranked.wait_for, lambda: set(ranked.pids()) == set(before) and ranked.pids()[victim] != before[victim], 100.0)
    await asyncio.to_thread(ranked.wait_for, lambda: ranked.rows()["llm#0"]["state"] == "ready", 200.0)
    assert not set(ranked.pids().values()) & set(before.values())
    assert await said_by_two(ranked) == expected
