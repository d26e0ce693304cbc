"""A pipeline in three: the encoder's results are recorded, played back to the denoiser, and its latents decoded, each in a stage of its own.

The encoder runs the pipeline's own call until the denoiser is asked for, and records what its `encode_` methods return. The denoiser runs
the same call with these results in their place, and ends when the VAE is asked to decode. The decoder does that, and no more. So the parts
agree for every pipeline, whatever its encoders are called. Components of another part are there as shapes without weights.

Knows pipelines and chunks. Knows nothing of queues.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.diffusion.cut import components_of, part_of, read_index
from stages.diffusion.denoising import ENCODING, OnStep, Stepwise, Twin, denoiser_names, guided, own_copy
from stages.diffusion.frames import comes_in_parts, telling
from stages.tensors import to_array, to_torch
from streamrt import BadRequest, Chunk, StageFailed

MAX_EMBEDDINGS = 64  # tensors that one request's encoders may give


def shapes_of_others(folder: Path, part: str, dtype: torch.dtype) -> dict[str, Any]:
    """The components that `part` needs no weights of, as modules on the meta device. The denoiser keeps the VAE: pipelines read its statistics."""
    found: dict[str, Any] = {}
    for name, (library, kind) in components_of(read_index(folder)).items():
        if part_of(name) == part or (part, name) == ("denoiser", "vae"):
            continue
        cls: Any = _class(library, kind)
        is_model = isinstance(cls, type) and issubclass(cls, torch.nn.Module)
        if not is_model:
            continue
        with torch.device("meta"):
            if hasattr(cls, "load_config"):  # diffusers
                module = cls.from_config(cls.load_config(folder / name))
            else:
                module = cls(cls.config_class.from_pretrained(folder / name))
        found[name] = module.to(dtype)
    return found


def _class(library: str, kind: str) -> Any:
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError:
        module = importlib.import_module(f"diffusers.pipelines.{library}")
    return getattr(module, kind)


class _Enough(Exception):
    """Leaves a pipeline's call where this part ends."""


# ---- encoder ---------------------------------------------------------------------------------------------------------------


def encode(pipeline: Any, arguments: dict[str, Any], device: str) -> Chunk:
    """What the pipeline's encoders say of a request, as one `hidden` chunk. Raises BadRequest for what the pipeline refuses."""
    pipeline, arguments = guided(pipeline, arguments)
    own = _on(own_copy(pipeline, lambda *_: None), device)
    recorded: list[Any] = []

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorded.append(method(*args, **kwargs))
            return recorded[-1]

        return call

    def enough(*_: Any, **__: Any) -> Any:
        raise _Enough

    for name in ENCODING:
        if hasattr(own, name):
            object.__setattr__(own, name, recording(getattr(own, name)))
    if hasattr(own, "prepare_latents"):  # what comes before the denoiser, and needs none of the results
        object.__setattr__(own, "prepare_latents", functools.wraps(own.prepare_latents)(enough))
    for name in denoiser_names(pipeline):
        getattr(own, name).forward = enough
    try:
        own(**arguments)
    except _Enough:
        pass
    except ValueError as error:
        raise BadRequest(f"{type(pipeline).__name__}: {error}") from error
    tensors: dict[str, np.ndarray] = {}
    layout = [_write(value, tensors) for value in recorded]
    return Chunk("hidden", tensors, port="embeddings", meta={"layout": layout})


def _write(value: Any, tensors: dict[str, np.ndarray]) -> Any:
    """`value` as plain data, its tensors put into `tensors`."""
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = to_array(value)
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_write(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise StageFailed(f"an encoder gave {type(value).__name__}, expected tensors, numbers, text or lists of them")


def encoded_of(chunk: Chunk, device: str) -> list[Any]:
    """The encoders' results out of a `hidden` chunk, on `device`. Raises BadRequest when it is none of `encode`."""
    layout = chunk.meta.get("layout")
    if not isinstance(layout, list) or len(chunk.tensors) > MAX_EMBEDDINGS:
        raise BadRequest("hidden: expected what an encoder stage of a diffusion pipeline gives")

    def read(plain: Any) -> Any:
        match plain:
            case {"tensor": str(name)} if name in chunk.tensors:
                return to_torch(chunk.tensors[name], device)
            case {"list": list(items)}:
                return [read(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(read(item) for item in items)
            case {"value": value}:
                return value
        raise BadRequest("hidden: expected what an encoder stage of a diffusion pipeline gives")

    return [read(plain) for plain in layout]


# ---- denoiser --------------------------------------------------------------------------------------------------------------


class Undecoded:
    """Latents as the VAE would have got them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def chunk(self, **meta: Any) -> Chunk:
        return Chunk("latents", {f"t{place}": to_array(tensor) for place, tensor in enumerate(self.tensors)}, port="latents", meta=meta)


class Uncoded(Stepwise):
    """`Denoising` between an encoder and a decoder that are elsewhere."""

    def __init__(
        self, pipeline: Any, encoded: list[Any], arguments: dict[str, Any], on_step: OnStep, twin: Twin | None = None, *, device: str
    ) -> None:
        results: Iterator[Any] = iter(encoded)

        def play(*_: Any, **__: Any) -> Any:
            return next(results)

        placed = _on(pipeline, device)
        for name in ENCODING:
            if hasattr(placed, name):
                object.__setattr__(placed, name, functools.wraps(getattr(placed, name))(play))
        super().__init__(placed, arguments, on_step, twin)

    def finish(self) -> Any:
        assert self.decoder is not None
        return Undecoded([value for value in self.decoder.asked if isinstance(value, torch.Tensor)])


# ---- decoder ---------------------------------------------------------------------------------------------------------------


def decode(pipeline: Any, chunk: Chunk, task: str, device: str, give: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Give floats in [0, 1] as the pipeline would have: {"images": (1, H, W, C)}, or {"frames": (1, T, H, W, C)}, several times where the VAE
    decodes in parts."""
    latents = [to_torch(chunk.tensors[f"t{place}"], device) for place in range(len(chunk.tensors))]
    latents[0] = latents[0].to(pipeline.vae.dtype)

    def give_frames(part: torch.Tensor) -> None:
        give({"frames": _shown(part).permute(0, 2, 3, 4, 1).numpy()})

    with torch.no_grad():
        if task == "video" and comes_in_parts(pipeline):
            telling(pipeline.vae, give_frames).decode(*latents)
            return
        values = pipeline.vae.decode(*latents, return_dict=False)[0]
        if task == "video":
            give_frames(values)
        else:
            give({"images": _shown(values[:, :, 0] if values.dim() == 5 else values).permute(0, 2, 3, 1).numpy()})


def _shown(values: torch.Tensor) -> torch.Tensor:
    return (values / 2 + 0.5).clamp(0, 1).float().cpu()


def _on(pipeline: Any, device: str) -> Any:
    """A copy of `pipeline` that computes on `device`, whatever its parts without weights say."""
    own = copy.copy(pipeline)
    kind: Any = type(pipeline)
    own.__class__ = _placed(kind, device)
    return own


@functools.cache
def _placed(kind: Any, device: str) -> Any:
    return type(kind.__name__, (kind,), {"_execution_device": property(lambda _: torch.device(device))})
