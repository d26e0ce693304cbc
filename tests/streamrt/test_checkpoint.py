"""A folder with a checkpoint as a pipeline: what is found in it, what can not be served, and that it is served."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrt import Pipeline
from streamrt.check import check
from streamrt.checkpoint import name_of, open_source
from streamrt.config import parse_pipeline, to_toml
from streamrt.errors import ConfigError
from streamrt.plan import Machine
from tests.pipelines import run_cli, up

MACHINE = Machine(cores=(0, 1), memory_bytes=8 * 2**30, shm_bytes=2**30)
needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs the extra streamrt[diffusion]")


def diffusers_folder(folder: Path, kind: str, **components: str) -> Path:
    """What `save_pretrained` leaves, without weights."""
    index = {"_class_name": kind, **{name: ["diffusers", cls] for name, cls in components.items()}, "image_encoder": [None, None]}
    for name in components:
        (folder / name).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def causal_folder(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@needs_diffusers
def test_a_pipeline_of_diffusers_is_found_out_by_its_files_alone(tmp_path: Path) -> None:
    folder = diffusers_folder(
        tmp_path / "Qwen Image!", "QwenImagePipeline", text_encoder="X", transformer="QwenImageTransformer2DModel", vae="Y"
    )
    source = open_source(folder, ["stage.model.args.max_steps=30"])
    assert source.config.name == "Qwen-Image-"
    (stage,) = source.config.stages
    assert (stage.name, stage.use) == ("model", "diffusion.pipeline")
    assert stage.args == {"model": str(folder), "task": "image", "max_steps": 30}
    assert source.found == (
        "QwenImagePipeline, a pipeline of diffusers: image from text",
        "denoised by transformer (QwenImageTransformer2DModel): step by step, the steps of different requests together",
        "can be cut in three stages: encoder, denoiser, decoder",
        "where a request says nothing: 50 steps",
        "at most: 100 steps, sides of 4096 and 16777216 pixels, 10 of a request",
    )
    report = check(source.config, MACHINE, found=source.found)
    assert json.loads(report.as_json())["found"] == list(source.found)
    assert [(task.task, task.outputs) for task in report.tasks] == [("image", {"image": "model.image", "event": "model.progress"})]
    assert report.endpoints == ("POST /v1/images/generations", "POST /v1/images/edits")
    assert f"\n  {source.found[0]}\n" in report.as_text()
    again = parse_pipeline(to_toml(source.config), folder)
    assert again == source.config


@needs_diffusers
@pytest.mark.parametrize(
    ("kind", "denoiser", "task", "mode", "said"),
    [
        ("FluxPipeline", "transformer", "image", None, "stays one stage: FluxPipeline has no text encoder"),
        ("StableDiffusionXLPipeline", "unet", "image", None, "denoised by unet (M)"),
        ("QwenImageEditPipeline", "transformer", "image", None, "image from text and images"),
        ("DiTPipeline", "transformer", "image", None, "image from a class"),
        (
            "WanPipeline",
            "transformer",
            "video",
            None,
            "at most: 100 steps, sides of 4096 and 16777216 pixels, 1025 frames, 10 of a request",
        ),
        ("HunyuanVideo15Pipeline", "transformer", "video", None, "video from text"),
        ("LTX2Pipeline", "transformer", "video", None, "where a request says nothing: 30 steps, 768x512 pixels"),
        ("StableAudioPipeline", "transformer", "audio", None, "at most: 100 steps, 300 s, 10 of a request"),
        ("StableCascadeDecoderPipeline", "decoder", "image", "request", "requests are served whole, one after the other"),
    ],
)
def test_the_signature_says_what_a_pipeline_makes(tmp_path: Path, kind: str, denoiser: str, task: str, mode: str | None, said: str) -> None:
    source = open_source(diffusers_folder(tmp_path, kind, **{denoiser: "M"}))
    args = source.config.stages[0].args
    assert (args["task"], args.get("mode")) == (task, mode)
    assert said in "\n".join(source.found)


@needs_diffusers
def test_what_can_not_be_served_is_said(tmp_path: Path) -> None:
    cases = {
        "empty": ("expected pipeline.toml, or a checkpoint: model_index.json or config.json", None, None),
        "unknown": (
            "NoSuchPipeline is no pipeline of the diffusers that is installed here",
            "model_index.json",
            {"_class_name": "NoSuchPipeline"},
        ),
        "own": ("expected a class of diffusers", "model_index.json", {"_class_name": ["mine", "MyPipeline"]}),
        "torn": (
            "there is no folder for vae, which model_index.json names",
            "model_index.json",
            {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]},
        ),
        "omni": ("config.json names SpeaksForConditionalGeneration", "config.json", {"architectures": ["SpeaksForConditionalGeneration"]}),
        "mute": ("there is no tokenizer beside config.json", "config.json", {"architectures": ["LlamaForCausalLM"]}),
    }
    for name, (message, file, content) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        if file is not None:
            (folder / file).write_text(json.dumps(content))
        with pytest.raises(ConfigError) as caught:
            open_source(folder)
        assert message in caught.value.message
        assert str(folder) in caught.value.message


def test_a_language_model_is_a_stage_of_respond(tmp_path: Path) -> None:
    source = open_source(causal_folder(tmp_path, architectures=["LlamaForCausalLM"], max_position_embeddings=2048))
    assert source.config.stages[0].use == "ar.causal_lm"
    assert source.found == (
        "LlamaForCausalLM, a causal language model of transformers: text to text",
        "made for 2048 tokens of prompt and reply together",
    )
    assert [task.task for task in check(source.config, MACHINE).tasks] == ["respond"]


def test_a_folder_with_a_pipeline_file_is_that_pipeline(tmp_path: Path) -> None:
    causal_folder(tmp_path, architectures=["LlamaForCausalLM"])
    (tmp_path / "pipeline.toml").write_text('[pipeline]\nname = "own"\n[[stage]]\nname = "e"\nuse = "echo"\n')
    source = open_source(tmp_path)
    assert (source.config.name, source.found) == ("own", ())


@pytest.mark.parametrize(
    ("folder", "name"), [("a/Qwen Image", "Qwen-Image"), ("a/.cache", "cache"), ("a/模型", "model"), ("a/" + "x" * 60, "x" * 40)]
)
def test_a_run_is_named_after_the_folder(folder: str, name: str) -> None:
    assert name_of(Path("/") / folder) == name


@needs_diffusers
def test_it_needs_no_heavy_library(tmp_path: Path) -> None:
    diffusers_folder(tmp_path, "FluxPipeline", transformer="M")
    code = f"""
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys(["torch", "transformers"]))
from streamrt.checkpoint import open_source
print(open_source(Path({str(tmp_path)!r})).config.stages[0].args["task"], "diffusers" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout == "image False\n", done.stderr


@pytest.mark.slow
def test_a_checkpoint_is_served_by_one_command(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")
    from tests.stages.diffusion.tiny import build

    folder = build("dit", tmp_path / "tiny-dit")
    printed = run_cli("up", str(folder), "--print")
    assert (printed.returncode, parse_pipeline(printed.stdout).name) == (0, "tiny-dit")
    with up(folder) as run, Pipeline(name=run.name) as pipeline:
        assert run.output.startswith("DiTPipeline, a pipeline of diffusers: image from a class\n")
        made = pipeline.generate("a seven", task="image", class_label=7, num_inference_steps=2)
        assert [chunk.tensors["image"].shape for chunk in made.chunks if "image" in chunk.tensors] == [(8, 8, 3)]
