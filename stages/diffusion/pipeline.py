"""`diffusion.pipeline`: images, video or sound by any pipeline of diffusers.

The stage knows its arguments, what to load and how a request becomes a call of the pipeline; the rest is `engine.py`'s. Imports no torch
before `load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stages.diffusion.params import Accepts, Job, Limits, parse
from streamrt import BadRequest, Chunk, ConfigError, EngineStage, Request, Stage

if TYPE_CHECKING:
    from stages.diffusion.denoising import Denoising, OnStep
    from stages.diffusion.engine import DiffusionEngine, Inputs

Count = Annotated[int, Meta(ge=1)]


class DiffusionArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # a folder in diffusers' layout, weights:NAME, or a hub id in the local cache
    task: Literal["image", "video", "audio"] = "image"  # what the pipeline makes
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on the CPU, else bfloat16
    mode: Literal["step", "request"] = "step"  # request: one after the other, each in one piece; for pipelines without a known denoiser
    max_running: Count = 8  # images that are denoised side by side; each holds its latents
    max_queued: Count = 64  # images that wait for that; one more is refused
    max_batch: Count = 16  # rows of one denoiser call; guidance makes two rows of an image in some pipelines
    window_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0  # an idle engine waits so long for others after the first request of a burst
    # Of requests that name none; the pipeline's own when left out.
    steps: Count | None = None
    width: Count | None = None
    height: Count | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    # The most that a request may ask for; checked before any work.
    max_steps: Count = 100
    max_side: Count = 4096  # pixels
    max_pixels: Count = 4096 * 4096
    max_frames: Count = 1025
    max_seconds: Annotated[float, Meta(gt=0)] = 300.0
    max_images: Count = 10


class DiffusionPipeline(EngineStage):
    """What an image, a video and a sound stage have in common; `configured` says which it is."""

    takes = {"text", "image"}
    Args = DiffusionArgs
    models = ("model",)
    load_s = 15.0
    max_requests = 16
    args: DiffusionArgs
    accepts: Accepts
    limits: Limits
    sample_rate_hz: int  # of its sound, also beside a video; 0: it makes none

    @classmethod
    def configured(cls, args: DiffusionArgs) -> type[Stage]:
        return {"image": ImageStage, "video": VideoStage, "audio": AudioStage}[args.task]

    def make_engine(self) -> DiffusionEngine:
        args, context = self.args, self.context
        # 1. the pipeline, and what it can do
        from stages.diffusion.loading import accepts_of, given_of, load

        pipeline = load(
            context.model_path(args.model), dtype=args.dtype, device=context.device, threads=context.threads, progress=context.progress
        )
        given = given_of(pipeline, args.task)
        self.sample_rate_hz = given.sample_rate_hz
        accepts = accepts_of(pipeline)
        self.accepts = msgspec.structs.replace(accepts, frames_per_s=args.fps or accepts.frames_per_s)
        self.limits = Limits(
            max_steps=args.max_steps,
            max_side=args.max_side,
            max_pixels=args.max_pixels,
            max_frames=args.max_frames,
            max_seconds=args.max_seconds,
            max_images=args.max_images,
            steps=args.steps,
            width=args.width,
            height=args.height,
            guidance_scale=args.guidance_scale,
        )
        # 2. how a request becomes a call
        from stages.diffusion.denoising import Stepwise, Whole, denoiser_names

        names = denoiser_names(pipeline)
        if args.mode == "step" and not names:
            raise ConfigError(
                f"mode: {self.accepts.pipeline} has no component that is known to be its denoiser",
                hint='set mode = "request"',
                param="mode",
            )
        kind = Stepwise if args.mode == "step" else Whole

        def make(job: Job, seed: int, inputs: Inputs, on_step: OnStep) -> Denoising:
            return kind(pipeline, call_arguments(self.accepts, job, seed, inputs), on_step)

        # 3. the engine around it
        from stages.diffusion.engine import DiffusionEngine
        from stages.diffusion.scheduler import StepScheduler

        scheduler = StepScheduler(args.max_running if args.mode == "step" else 1, args.max_queued, args.max_batch)
        modules = {name: getattr(pipeline, name) for name in names}
        self._burst = Burst(args.window_ms / 1e3, args.max_running)
        return DiffusionEngine(modules, make, given, scheduler, max_input_pixels=args.max_pixels)

    def parse(self, request: Request) -> Job:
        return parse(request.task, request.params, self.limits, self.accepts)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        self.parse(request)  # what is wrong is said before any wait
        if not self.host.running:
            await self._burst.gathered()
        async for chunk in super().process(request, chunks):
            yield chunk

    def describe(self) -> dict[str, Any]:
        limits = {
            name: getattr(self.args, name) for name in ("max_steps", "max_side", "max_pixels", "max_frames", "max_seconds", "max_images")
        }
        return {
            "model": self.args.model.removeprefix("weights:").rstrip("/").rpartition("/")[2],
            "pipeline": self.accepts.pipeline,
            "accepts": sorted(self.accepts.names),
            "needs_image": self.accepts.needs_image,
            "size_multiple": self.accepts.size_multiple,
            "labels": list(self.accepts.labels),
            "qualities": sorted(self.accepts.qualities),
            "loras": sorted(self.accepts.loras),
            "fps": self.accepts.frames_per_s,
            "sample_rate_hz": self.sample_rate_hz,
            **limits,
        }

    def state(self) -> dict[str, Any]:
        engine: DiffusionEngine = self.host.engine  # type: ignore[assignment]
        return {
            "requests": engine.requests,
            "denoising": engine.scheduler.running,
            "images_queued": engine.scheduler.queued,
            "calls": engine.calls,
            "rows_per_call": round(engine.rows / max(engine.calls, 1), 2),
        }


class ImageStage(DiffusionPipeline):
    gives = {"image": "image", "progress": "event"}
    tasks = ("image",)


class VideoStage(DiffusionPipeline):
    gives = {"video": "video", "audio": "audio", "progress": "event"}
    tasks = ("video",)


class AudioStage(DiffusionPipeline):
    gives = {"audio": "audio", "progress": "event"}
    tasks = ("audio",)


class Burst:
    """Lets the requests of a burst start together: the first waits a little, and those that come meanwhile wait with it.

    Owned by the loop.
    """

    def __init__(self, window_s: float, size: int) -> None:
        self._window_s = window_s
        self._size = size  # of a burst that needs no more waiting
        self._waiting = 0
        self._go: asyncio.Event | None = None  # while a window is open

    async def gathered(self) -> None:
        """Waits: at most the window."""
        if not self._window_s:
            return
        if self._go is None:
            self._go = asyncio.Event()
            asyncio.get_running_loop().call_later(self._window_s, self._open, self._go)
        go = self._go
        self._waiting += 1
        try:
            if self._waiting >= self._size:
                self._open(go)
            await go.wait()
        finally:
            self._waiting -= 1

    def _open(self, go: asyncio.Event) -> None:
        go.set()
        if self._go is go:
            self._go = None


def call_arguments(accepts: Accepts, job: Job, seed: int, inputs: Inputs) -> dict[str, Any]:
    """What the pipeline is called with for one piece of `job`."""
    import torch

    arguments = dict(job.arguments)
    if job.needs_prompt:
        arguments["prompt"] = job.prompt or inputs.text
    # On the CPU wherever the model is: the same seed is then the same noise on every device.
    arguments["generator"] = torch.Generator("cpu").manual_seed(seed)
    for role, argument in (("image", "image"), ("mask", "mask_image"), ("last", "last_image")):
        if images := inputs.images.get(role):
            if argument not in accepts.names:
                raise BadRequest(f"image: {accepts.pipeline} takes none as {role}", param="image")
            arguments[argument] = images[0] if len(images) == 1 else images
    if "output_type" in accepts.names:
        arguments["output_type"] = "np"
    return arguments
