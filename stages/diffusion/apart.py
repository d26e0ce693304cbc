"""The encoder and the decoder of a pipeline that is cut in three, as stages; its denoiser is the stage `pipeline.py` has anyway.

Knows requests and chunks; what is computed is `parts.py`'s. Imports no torch before `load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.diffusion.args import DiffusionArgs
from stages.diffusion.cut import read_index, why_not
from stages.diffusion.params import MAX_PROMPT_CHARS, Accepts, Job, label_of, parse
from streamrt import BadRequest, Cancelled, Chunk, ConfigError, Request, Stage, TooLong

if TYPE_CHECKING:
    import numpy as np

    from stages.diffusion.engine import Inputs


class _Part(Stage):
    """What encoder and decoder have in common: one pipeline, most of it without weights."""

    Args = DiffusionArgs
    models = ("model",)
    load_s = 10.0
    max_requests = 16
    args: DiffusionArgs

    def load(self) -> None:
        args, context = self.args, self.context
        model = context.model_path(args.model)
        if reason := why_not(read_index(Path(model)), args.task):
            raise ConfigError(f"part: this pipeline stays one stage: {reason}", hint='set part = "all"', param="part")
        from stages.diffusion.loading import accepts_of, given_of, load

        self._pipeline = load(
            model, part=args.part, dtype=args.dtype, device=context.device, threads=context.threads, progress=context.progress
        )
        self._given = given_of(self._pipeline, args.task)
        self._accepts: Accepts = accepts_of(self._pipeline)


class EncoderStage(_Part):
    """Prompt in, embeddings out, for the tasks that the whole pipeline would serve."""

    takes = {"text"}
    gives = {"embeddings": "hidden"}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        job = parse(request.task, request.params, self.args.limits, self._accepts)
        if job.previews:
            raise BadRequest("previews: a pipeline in several stages gives none", param="previews")
        text = ""
        async for chunk in chunks:
            text += chunk.text
            if len(text) > MAX_PROMPT_CHARS:
                raise TooLong(f"prompt: longer than {MAX_PROMPT_CHARS} characters", param="prompt")
        prompt = job.prompt or text
        if not prompt.strip():
            raise BadRequest("prompt: there is none", param="prompt")
        yield await self.compute(self._encode, job, prompt)

    def _encode(self, job: Job, prompt: str) -> Chunk:
        import torch

        from stages.diffusion.parts import encode

        with torch.no_grad():
            return encode(self._pipeline, {**job.arguments, "prompt": prompt, "output_type": "latent"}, self.context.device)


class DecoderStage(_Part):
    """Latents in, images or frames out, one after the other as they come."""

    takes = {"latents"}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        made: asyncio.Queue[Chunk | None] = asyncio.Queue()  # of one image or video, which bounds it; None: that was all
        is_over = False
        decoding: asyncio.Future[None] | None = None

        def give(chunk: Chunk) -> None:
            if is_over:
                raise Cancelled("nobody wants the rest")  # ends the decoding between two of its parts
            loop.call_soon_threadsafe(made.put_nowait, chunk)

        try:
            async for latents in chunks:
                decoding = asyncio.ensure_future(self.compute(self._decode, latents, give))
                decoding.add_done_callback(lambda _: made.put_nowait(None))
                while (chunk := await made.get()) is not None:
                    yield chunk
                await decoding
        finally:
            is_over = True
            if decoding is not None:
                decoding.cancel()

    def _decode(self, latents: Chunk, give: Callable[[Chunk], None]) -> None:
        from stages.diffusion.output import picture_chunks, video_chunks
        from stages.diffusion.parts import decode

        meta, fps = {name: latents.meta[name] for name in ("index", "seed")}, latents.meta["fps"]
        frames = 0

        def give_chunks(made: dict[str, np.ndarray]) -> None:
            nonlocal frames
            if self.args.task == "video":
                chunks = video_chunks(made["frames"][0], fps, meta, first=frames)
                frames += len(made["frames"][0])
            else:
                chunks = picture_chunks(made, self._given, fps, meta)
            for chunk in chunks:
                give(chunk)

        decode(self._pipeline, latents, self.args.task, self.context.device, give_chunks)


class ImageEncoder(EncoderStage):
    tasks = ("image",)


class VideoEncoder(EncoderStage):
    tasks = ("video",)


class ImageDecoder(DecoderStage):
    gives = {"image": "image"}


class VideoDecoder(DecoderStage):
    gives = {"video": "video"}


# By task. No sound: `why_not` says why; its stages exist so that the reason is what the user reads.
ENCODERS: dict[str, type[Stage]] = {"image": ImageEncoder, "video": VideoEncoder, "audio": EncoderStage}
DECODERS: dict[str, type[Stage]] = {"image": ImageDecoder, "video": VideoDecoder, "audio": DecoderStage}


def call_arguments(accepts: Accepts, job: Job, seed: int, inputs: Inputs) -> dict[str, Any]:
    """What the pipeline is called with for one piece of `job`."""
    import torch

    arguments = dict(job.arguments)
    if job.needs_prompt:
        arguments["prompt"] = job.prompt or inputs.text
    if accepts.by_class and "class_labels" not in arguments:
        arguments["class_labels"] = [label_of(None, inputs.text, accepts)]
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
