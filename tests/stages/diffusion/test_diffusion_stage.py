"""The stage as its actor sees it: requests in, chunks out, on the loop and the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.args import DiffusionArgs  # noqa: E402
from stages.diffusion.pipeline import Burst, DiffusionPipeline  # noqa: E402
from streamrt import BadRequest, Chunk, ConfigError, Context, Request, text_chunk  # noqa: E402
from streamrt.config import parse_pipeline  # noqa: E402
from streamrt.registry import load_graph, parse_args  # noqa: E402
from tests.stages.diffusion.tiny import build  # noqa: E402

PARAMS = {"class_label": 7, "num_inference_steps": 3, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("dit", tmp_path_factory.mktemp("dit"))


def make(folder: Path, compute: Any = None, **args: Any) -> Any:
    options = DiffusionArgs(model=str(folder), **args)
    return DiffusionPipeline.configured(options)(options, Context(stage="draw", resolve=Path, compute=compute))


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as compute:
        stage = make(folder, compute, window_ms=200, steps=4, max_steps=10, slice_ms=0)
        compute.submit(stage.load).result()
        yield stage
        stage.close()


async def fed(*chunks: Chunk):
    for chunk in chunks:
        yield chunk


async def run(stage: Any, name: str, params: dict[str, Any], *chunks: Chunk) -> list[Chunk]:
    return [chunk async for chunk in stage.process(Request(name, "image", params), fed(*chunks))]


async def test_a_request_gives_events_an_image_and_an_end(stage: Any) -> None:
    *given, last = await run(stage, "a", PARAMS)
    assert [(chunk.port, chunk.modality) for chunk in given] == [("progress", "event")] * 3 + [("image", "image")]
    assert last.is_last
    assert (last.meta["seed"], last.meta["steps"]) == (1, 3)


async def test_the_class_may_stand_in_text_that_is_fed(stage: Any) -> None:
    said = await run(stage, "said", {"seed": 1}, text_chunk("draw "), text_chunk("a 7"))
    asked = await run(stage, "asked", {"seed": 1, "prompt": "a 7"})
    images = [next(chunk.tensors["image"] for chunk in chunks if chunk.modality == "image") for chunks in (said, asked)]
    assert np.array_equal(*images)
    assert len(said) == 4 + 1 + 1  # the stage's own number of steps
    with pytest.raises(BadRequest, match="exactly one class"):
        await run(stage, "unclear", {}, text_chunk("draw something"))


async def test_what_is_wrong_is_said_before_any_wait(stage: Any) -> None:
    with pytest.raises(BadRequest, match="num_inference_steps: got 11, expected at most 10"):
        await run(stage, "a", {**PARAMS, "num_inference_steps": 11})


async def test_the_requests_of_a_burst_start_together(stage: Any) -> None:
    before = stage.host.engine.calls
    ends = await asyncio.gather(*(run(stage, f"r{seed}", {**PARAMS, "seed": seed}) for seed in range(4)))
    assert stage.host.engine.calls - before == 3  # of four requests of three steps
    assert {chunks[-1].meta["batch"] for chunks in ends} == {8.0}  # rows: guidance makes two of an image


async def test_a_full_burst_does_not_wait_for_its_window() -> None:
    burst = Burst(60.0, 2)
    async with asyncio.timeout(5):
        await asyncio.gather(burst.gathered(), burst.gathered())


async def test_leaving_early_cancels_within_a_step(stage: Any) -> None:
    stream = stage.process(Request("left", "image", {**PARAMS, "n": 5}), fed())
    async for chunk in stream:
        assert chunk.event == "progress"
        break
    await stream.aclose()
    await stage.compute(lambda: None)  # after the step that ran meanwhile; the next turn begins with the cancel
    assert await stage.compute(lambda: stage.host.engine.requests) == 0
    assert stage.state()["denoising"] == 0


async def test_the_stage_says_what_it_is(stage: Any) -> None:
    facts = stage.describe()
    assert (facts["pipeline"], facts["labels"], facts["max_steps"]) == ("DiTPipeline", [str(n) for n in range(10)], 10)
    assert facts["qualities"] == ["lossless"]


def test_a_default_that_the_pipeline_does_not_know_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="width: DiTPipeline has nothing like it"):
        make(folder, width=64).make_engine()


def test_the_file_decides_what_the_stage_takes_and_gives(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text("""
[pipeline]
name = "film"
[[stage]]
name = "encode"
use = "diffusion.pipeline"
args = { model = "m", task = "video", part = "encoder", loras = { ink = "ink.safetensors" } }
[[stage]]
name = "denoise"
use = "diffusion.pipeline"
inputs = ["encode"]
args = { model = "m", task = "video", part = "denoiser" }
[[stage]]
name = "decode"
use = "diffusion.pipeline"
inputs = ["denoise.latents"]
args = { model = "m", task = "video", part = "decoder" }
""")
    config = parse_pipeline(file.read_text(), str(file))
    graph, kinds = load_graph(config)
    assert [(node.takes, node.gives, node.tasks) for node in graph.nodes.values()] == [
        ({"text"}, {"embeddings": "hidden"}, ("video",)),
        ({"hidden"}, {"latents": "latents", "progress": "event"}, ()),
        ({"latents"}, {"video": "video"}, ()),
    ]
    assert parse_args(kinds["encode"], config.stages[0], file).loras == {"ink": tmp_path / "ink.safetensors"}
