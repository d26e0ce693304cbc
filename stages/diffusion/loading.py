"""A checkpoint on this machine to a diffusers pipeline that is ready to run, and what can be asked of it.

Knows diffusers' pipelines. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stages.diffusion.cut import NEED_IMAGE, read_index, task_of
from stages.diffusion.output import Given
from stages.diffusion.params import GUIDER_SCALE, Accepts
from streamrt import ConfigError

DEFAULT_FPS = 16.0


def load(
    source: Any, *, part: str = "all", dtype: str, device: str, moves: bool = True, threads: int, progress: Callable[[str], None]
) -> Any:
    """The pipeline in `source`, a folder in diffusers' layout, in evaluation mode; on `device` when it `moves` there. Of a `part`, other
    parts' components are shapes without weights.

    Blocks for seconds to minutes.
    Raises:
        ConfigError: it is no such folder, or a component does not load.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    path = Path(getattr(source, "path", source))
    if not (path / "model_index.json").is_file():
        raise ConfigError(f"{path}: expected a folder in diffusers' layout: there is no model_index.json in it", param="model")
    progress("importing torch")
    import torch

    torch.set_num_threads(threads)
    progress("importing diffusers")
    import diffusers
    from diffusers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    chosen = pick_dtype(dtype, device)
    progress(f"reading weights as {chosen}")
    kind: torch.dtype = getattr(torch, chosen)
    try:
        others = extra_components(path)
        if part != "all":
            from stages.diffusion.parts import shapes_of_others

            others |= shapes_of_others(path, part, kind)
        with _without(path, others) as folder:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=kind, local_files_only=True, **others)
        for name, component in others.items():
            setattr(pipeline, name, component)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError) as error:  # diffusers' ways to say so
        raise ConfigError(f"{path}: not a pipeline that diffusers can load: {error}", param="model") from error
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
            if moves and not any(tensor.is_meta for tensor in component.parameters()):
                component.to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextlib.contextmanager
def _without(path: Path, components: Collection[str]) -> Iterator[Path]:
    """`path` without these components: diffusers loads those that its pipelines call optional, even when they are given."""
    if not components:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="streamrt-") as name:
        folder = Path(name)
        for entry in path.iterdir():
            if entry.name != "model_index.json":
                (folder / entry.name).symlink_to(entry.absolute())
        index = {key: [None, None] if key in components else value for key, value in read_index(path).items()}
        (folder / "model_index.json").write_bytes(msgspec.json.encode(index))
        yield folder


def extra_components(folder: Path) -> dict[str, Any]:
    """Components of the checkpoint in `folder` that the libraries here can not build, and ours can."""
    index = read_index(folder)
    if (index.get("processor") or [None, None])[1] == "Qwen2VLProcessor" and importlib.util.find_spec("torchvision") is None:
        from stages.diffusion.processor import QwenVLProcessor

        return {"processor": QwenVLProcessor.from_folder(folder / "processor")}
    return {}


def pick_dtype(asked: str, device: str) -> str:
    """The dtype that `asked` stands for on `device`."""
    return asked if asked != "auto" else "float32" if device == "cpu" else "bfloat16"


def accepts_of(pipeline: Any) -> Accepts:
    """What a request may ask of `pipeline`."""
    call = inspect.signature(type(pipeline).__call__).parameters
    image = call.get("image")
    kind = type(pipeline).__name__
    return Accepts(
        pipeline=kind,
        names=frozenset(call) | ({GUIDER_SCALE} if hasattr(getattr(pipeline, "guider", None), "guidance_scale") else set()),
        steps=_default(call, "num_inference_steps", 50),
        needs_image=image is not None and (image.default is inspect.Parameter.empty or any(word in kind for word in NEED_IMAGE)),
        size_multiple=_size_multiple(pipeline),
        labels=dict(getattr(pipeline, "labels", None) or {}),
        frames_per_s=float(_default(call, "frame_rate", _default(call, "fps", DEFAULT_FPS))) if "num_frames" in call else 0.0,
        frame_multiple=_first(pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio") or 1,
    )


def given_of(pipeline: Any, task: str) -> Given:
    """What `pipeline` gives, in a stage of `task`. Raises ConfigError when that is plainly something else."""
    found = task_of(inspect.signature(type(pipeline).__call__).parameters)
    if found != task:
        raise ConfigError(f'task: got "{task}", but {type(pipeline).__name__} makes {found}', hint=f'set task = "{found}"', param="task")
    accepts = accepts_of(pipeline)
    return Given(
        pipeline=type(pipeline).__name__,
        task=task,
        sample_rate_hz=_sample_rate(pipeline),
        fps=accepts.frames_per_s,
    )


def _default(call: Any, name: str, otherwise: Any) -> Any:
    """The default of a parameter, when there is one that says something."""
    found = call[name].default if name in call else None
    return otherwise if found is None or found is inspect.Parameter.empty else found


def _first(pipeline: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(pipeline, name, None))), None)


def _size_multiple(pipeline: Any) -> int:
    """What sides must be a multiple of, so that neither the VAE nor the patches of the denoiser cut anything off."""
    processor = _first(pipeline, "image_processor", "video_processor")
    multiple = int(getattr(getattr(processor, "config", None), "vae_scale_factor", 1) or 1)
    transformer = getattr(pipeline, "transformer", None)
    patch = getattr(getattr(transformer, "config", None), "patch_size", 1)
    # Where the patch is one number, the pipeline's processor has it in its factor already, or the pipeline itself refuses.
    return multiple * int(patch[-1]) if isinstance(patch, (list, tuple)) else multiple


def _sample_rate(pipeline: Any) -> int:
    for part, name in (("vocoder", "output_sampling_rate"), ("vocoder", "sampling_rate"), ("vae", "sampling_rate"), ("vae", "sample_rate")):
        config = getattr(getattr(pipeline, part, None), "config", None)
        if rate := getattr(config, name, None):
            return int(rate)
    return 0
