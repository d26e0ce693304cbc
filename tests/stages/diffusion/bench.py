"""A diffusion stage's engine driven step by step, beside plain diffusers calls of the same pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import torch

from stages.diffusion.apart import call_arguments
from stages.diffusion.denoising import Denoising, OnStep
from stages.diffusion.engine import Inputs
from stages.diffusion.frames import Frames
from stages.diffusion.loading import extra_components, pick_dtype
from stages.diffusion.params import Job
from stages.diffusion.pipeline import DiffusionPipeline
from streamrt import Chunk, Context, Output, Request


class Bench:
    """A stage's engine driven step by step, and the same pipeline loaded once more, to be called plainly."""

    def __init__(self, folder: Path, task: str, *, device: str = "cpu", **args: Any) -> None:
        options = msgspec.convert({"model": str(folder), "task": task, "slice_ms": 0, **args}, DiffusionPipeline.Args)
        self.stage = DiffusionPipeline.configured(options)(options, Context(stage="draw", device=device, resolve=Path))
        self.engine = self.stage.make_engine()
        self.pipeline = inspect.getclosurevars(self.engine._make).nonlocals["pipeline"]
        self.outputs: list[Output] = []
        self.made: dict[Any, np.ndarray] = {}  # seed -> what the pipeline gave, as floats
        self.parts: dict[Any, list[np.ndarray]] = {}  # seed -> what left while its VAE decoded
        self._jobs: dict[int, tuple[Job, Inputs]] = {}
        self._make, self.engine._make = self.engine._make, self._record

    def _record(self, job: Job, seed: int, inputs: Inputs, on_step: OnStep) -> Denoising:
        denoising = self._make(job, seed, inputs, on_step)
        finish = denoising.finish
        self._jobs[seed] = job, inputs

        def recorded() -> Any:
            result = finish()
            if isinstance(result, Frames):
                self.parts.setdefault(seed, []).append(result.array)
            else:
                self.made[seed] = array_of(result)
            return result

        denoising.finish = recorded
        return denoising

    def request(self, name: str, params: dict[str, Any]) -> tuple[Request, Job]:
        request = Request(name, self.stage.tasks[0], params)
        return request, self.stage.parse(request)

    def submit(self, name: str, params: dict[str, Any], images: Iterable[Chunk] = ()) -> None:
        self.engine.submit(*self.request(name, params))
        for image in images:
            self.engine.feed(name, image)
        self.engine.end(name)

    def step(self) -> None:
        self.outputs += self.engine.step()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def plain(self, seed: int) -> np.ndarray:
        """What diffusers gives for the request that had `seed`, called by itself."""
        pipeline = diffusers.DiffusionPipeline.from_pretrained(self.stage.args.model, **extra_components(Path(self.stage.args.model)))
        pipeline.to(self.stage.context.device, getattr(torch, pick_dtype(self.stage.args.dtype, self.stage.context.device)))
        pipeline.set_progress_bar_config(disable=True)
        arguments = call_arguments(self.stage.accepts, self._jobs[seed][0], seed, self._jobs[seed][1])
        if (scale := arguments.pop("guider.guidance_scale", None)) is not None:
            pipeline.guider = type(pipeline.guider)(guidance_scale=scale)
        return array_of(pipeline(**arguments))

    def failures(self) -> list[Exception]:
        return [output.error for output in self.outputs if output.error is not None]


def array_of(result: Any) -> np.ndarray:
    given = [result[name] for name in ("images", "frames", "audio", "audios") if result.get(name) is not None]
    arrays = [value.float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for value in given]
    return np.concatenate([array.astype(np.float64).ravel() for array in arrays])
