"""`diffusion.pipeline`: images, video or sound by any pipeline of diffusers.

The stage knows its arguments, what to load and how a request becomes a call of the pipeline; the rest is `engine.py`'s. Imports no torch
before `load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stages.diffusion.apart import DECODERS, ENCODERS, call_arguments
from stages.diffusion.args import DiffusionArgs
from stages.diffusion.checkpoint import recognize
from stages.diffusion.cut import read_index, why_not
from stages.diffusion.params import SPELLINGS, Accepts, Job, Limits, parse
from streamrt import BadRequest, Chunk, ConfigError, EngineStage, Request, Stage

if TYPE_CHECKING:
    from stages.diffusion.denoising import Denoising, OnStep
    from stages.diffusion.engine import DiffusionEngine, Inputs


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
        if args.part == "encoder":
            return ENCODERS[args.task]
        if args.part == "decoder":
            return DECODERS[args.task]
        return DenoiserStage if args.part == "denoiser" else {"image": ImageStage, "video": VideoStage, "audio": AudioStage}[args.task]

    @classmethod
    def remarks(cls, args: DiffusionArgs, model: Path | None) -> list[str]:
        reason = why_not(read_index(model), args.task) if model is not None and args.part != "all" else ""
        return [f'part = "{args.part}": this pipeline stays one stage: {reason}'] if reason else []

    @classmethod
    def recognize(cls, folder: Path) -> tuple[dict[str, Any], list[str]]:
        return recognize(folder)

    def make_engine(self) -> DiffusionEngine:
        args, context = self.args, self.context
        from stages.diffusion.loading import load

        model = context.model_path(args.model)
        if args.part != "all" and (reason := why_not(read_index(Path(model)), args.task)):
            raise ConfigError(f"part: this pipeline stays one stage: {reason}", hint='set part = "all"', param="part")
        pipeline = load(
            model,
            part=args.part,
            dtype=args.dtype,
            device=context.device,
            moves=args.offload == "none",
            threads=context.threads,
            progress=context.progress,
        )
        engine = self.engine_of(pipeline)
        if (args.compile or args.cuda_graphs) and args.part == "all":
            from stages.diffusion.warmup import warm_up

            warm_up(engine, self.parse, self.accepts, args.task, args.warmup_sizes, context.progress)
        return engine

    def engine_of(self, pipeline: Any) -> DiffusionEngine:
        """The engine around a loaded pipeline of diffusers. Raises ConfigError for what the arguments ask of it and it can not do."""
        args, context = self.args, self.context
        # 1. the pipeline
        import torch

        from stages.diffusion.acceleration import accelerate
        from stages.diffusion.caches import Caches
        from stages.diffusion.denoising import Stepwise, Whole, denoiser_names, guided
        from stages.diffusion.frames import comes_in_parts
        from stages.diffusion.loading import accepts_of, given_of
        from stages.diffusion.lora import Adapters
        from stages.diffusion.parts import Uncoded, encoded_of

        if context.device.startswith("cuda"):
            # Of the compute thread: events and graphs are of the current one.
            torch.cuda.set_device(torch.device(context.device).index or 0)
        given = given_of(pipeline, args.task)
        self.sample_rate_hz = given.sample_rate_hz
        names = denoiser_names(pipeline)
        denoisers = {name: getattr(pipeline, name) for name in names}
        if args.mode == "step" and not names:
            kind = type(pipeline).__name__
            raise ConfigError(f"mode: {kind} has no component that is known to be its denoiser", hint='set mode = "request"', param="mode")
        if args.cache != "none" and (args.mode == "request" or args.offload != "none" or args.compile):
            raise ConfigError('cache: can not be combined with mode = "request", offload or compile', param="cache")
        if args.cache == "none" and args.quality != "lossless":
            raise ConfigError(f'quality: "{args.quality}" needs a cache', hint='set cache = "first_block", or another', param="quality")
        accelerate(pipeline, names, args, context.device)
        adapters = Adapters(pipeline, args.loras, args.max_loras)
        in_parts = args.offload == "none" and comes_in_parts(pipeline)  # a twin of the VAE would not have the hooks that move it
        caches = Caches(args.cache, denoisers, mag_ratios=args.mag_ratios) if args.cache != "none" else None
        # 2. what a request may ask, and how it becomes a call
        accepts = accepts_of(pipeline)
        self.accepts = msgspec.structs.replace(
            accepts,
            frames_per_s=args.fps or accepts.frames_per_s,
            loras=frozenset(args.loras),
            qualities=frozenset({"lossless", "high", "fast"} if caches else {"lossless"}),
        )
        self.limits = args.limits
        for name in ("width", "height", "guidance_scale"):
            if getattr(args, name) is not None and accepts.names.isdisjoint(SPELLINGS[name]):
                raise ConfigError(f"{name}: {accepts.pipeline} has nothing like it", param=name)

        def make(job: Job, seed: int, inputs: Inputs, on_step: OnStep) -> Denoising:
            source, arguments = guided(pipeline, call_arguments(self.accepts, job, seed, inputs))
            encodings = inputs.encodings if len(job.seeds) > 1 else None
            if args.mode == "request":
                return Whole(source, arguments, on_step, encodings=encodings)
            is_cached = caches is not None and job.quality != "lossless"
            twin = partial(caches.twin, quality=job.quality, steps=job.steps) if caches is not None and is_cached else None
            if args.part == "denoiser" and inputs.encoded is None:
                raise BadRequest("hidden: this stage denoises what an encoder stage sends, and nothing came")
            if inputs.encoded is None:
                return Stepwise(source, arguments, on_step, twin, encodings=encodings, in_parts=in_parts)
            return Uncoded(source, encoded_of(inputs.encoded, context.device), arguments, on_step, twin, device=context.device)

        # 3. the engine around it
        from stages.diffusion.engine import DiffusionEngine
        from stages.diffusion.graphs import DenoiserGraphs
        from stages.diffusion.scheduler import StepScheduler

        scheduler = StepScheduler(args.max_running if args.mode == "step" else 1, args.max_queued, args.max_batch)
        self._burst = Burst(args.window_ms / 1e3, args.max_running)
        return DiffusionEngine(
            make,
            adapters.use,
            given,
            scheduler,
            max_input_pixels=args.max_pixels,
            slice_s=args.slice_ms / 1e3,
            graphs=DenoiserGraphs(context.device, args.max_cuda_graphs) if args.cuda_graphs else None,
        )

    def parse(self, request: Request) -> Job:
        return parse(request.task, request.params, self.limits, self.accepts)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        self.parse(request)  # what is wrong is said before any wait
        if not self.host.running:
            await self._burst.gathered()
        async with aclosing(super().process(request, chunks)) as outputs:  # type: ignore[type-var]
            async for chunk in outputs:
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


class DenoiserStage(DiffusionPipeline):
    """Between an encoder and a decoder stage, of any task."""

    takes = {"hidden"}
    gives = {"latents": "latents", "progress": "event"}


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
