"""A pipeline in three stages gives what it gives in one; what can not be cut is said by `check` and refused at start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.diffusion.args import DiffusionArgs
from stages.diffusion.cut import why_not
from stages.diffusion.pipeline import DiffusionPipeline
from streamrt import Chunk, Context, Request, Stage

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # what the libraries do to each other

MODULE = ["diffusers", "Thing"]
WHOLE = {"_class_name": "DrawPipeline", "text_encoder": MODULE, "transformer": MODULE, "vae": MODULE}


@pytest.mark.parametrize(
    ("index", "task", "reason"),
    [
        (WHOLE, "image", ""),
        (WHOLE, "audio", "cuts sound to length"),
        ({**WHOLE, "vocoder": MODULE}, "video", "cuts sound to length"),
        ({**WHOLE, "_class_name": "DrawEditPipeline"}, "image", "DrawEditPipeline encodes images with its VAE before it denoises"),
        ({**WHOLE, "text_encoder": [None, None]}, "image", "DrawPipeline has no text encoder"),
        ({**WHOLE, "vae": [None, None]}, "image", "DrawPipeline has no component called vae"),
    ],
)
def test_why_a_pipeline_can_not_be_cut(index, task: str, reason: str) -> None:
    assert why_not(index, task).find(reason) >= 0
    assert bool(why_not(index, task)) == bool(reason)


def test_check_says_why_without_torch(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_bytes(msgspec.json.encode({**WHOLE, "_class_name": "DrawEditPipeline"}))
    remarks = DiffusionPipeline.remarks(DiffusionArgs(model=str(tmp_path), part="encoder"), tmp_path)
    assert remarks == [
        'part = "encoder": this pipeline stays one stage: DrawEditPipeline encodes images with its VAE before it denoises, so its parts need '
        "each other's models"
    ]
    assert DiffusionPipeline.remarks(DiffusionArgs(model=str(tmp_path)), tmp_path) == []


@contextlib.contextmanager
def loaded(folder: Path, task: str, part: str) -> Iterator[Stage]:
    with ThreadPoolExecutor(1) as compute:
        args = DiffusionArgs(model=str(folder), task=task, part=part)
        stage = DiffusionPipeline.configured(args)(args, Context(stage=part, resolve=Path, compute=compute))
        compute.submit(stage.load).result()
        try:
            yield stage
        finally:
            stage.close()


async def fed(chunks: list[Chunk]):
    for chunk in chunks:
        yield chunk


async def run(stage: Stage, request: Request, chunks: list[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stage.process(request, fed(chunks)) if not chunk.is_last]


@pytest.mark.parametrize(
    "name",
    [
        "flux",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwenimage", "sd3", "sdxl", "flux2", "zimage", "wan", "ltx", "hunyuan")),
    ],
)
async def test_three_stages_give_what_one_gives(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")
    from tests.stages.diffusion.tiny import PIPELINES, build

    tiny = PIPELINES[name]
    folder = build(name, tmp_path)
    params: dict[str, Any] = {**tiny.params, "seed": 5, "num_inference_steps": 3, "n": 2}
    request = Request("r", tiny.task, params)
    with loaded(folder, tiny.task, "encoder") as encoder:
        embeddings = await run(encoder, request, [])
        assert [chunk.modality for chunk in embeddings] == ["hidden"]
        assert any(tensor.is_meta for tensor in denoiser_of(encoder).parameters())
    with loaded(folder, tiny.task, "denoiser") as denoiser:
        given = await run(denoiser, request, embeddings)
    latents = [chunk for chunk in given if chunk.modality == "latents"]
    assert [chunk.event for chunk in given if chunk.modality == "event"] == ["progress"] * 6
    with loaded(folder, tiny.task, "decoder") as decoder:
        parts = await run(decoder, request, latents)
    with loaded(folder, tiny.task, "all") as whole:
        expected = [chunk for chunk in await run(whole, request, []) if chunk.modality == tiny.task]
    assert len(parts) == len(expected) == (2 if name != "wan" else 6)  # Wan's frames leave as they are decoded
    places = {(chunk.meta["index"], chunk.meta.get("frame")): chunk for chunk in parts}
    for chunk in expected:
        other = places[chunk.meta["index"], chunk.meta.get("frame")]
        assert (other.meta, other.fps) == (chunk.meta, chunk.fps)
        for tensor, values in chunk.tensors.items():
            assert np.abs(other.tensors[tensor].astype(int) - values.astype(int)).max() <= 1  # a rounding apart


def denoiser_of(stage: Any) -> Any:
    pipeline = stage._pipeline
    return getattr(pipeline, "unet", None) or pipeline.transformer
