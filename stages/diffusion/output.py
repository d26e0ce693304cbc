"""A pipeline's output as chunks, chunks as input images, and previews.

Knows diffusers' outputs and chunks. Knows nothing of requests' turns.

Shapes: H height, W width, T frames; images are RGB (H, W, 3) uint8, videos (T, H, W, 3) uint8.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from stages.diffusion.frames import Frames
from stages.diffusion.params import Job
from stages.diffusion.parts import Undecoded
from streamrt import BadRequest, Chunk, StageFailed

VIDEO_CHUNK_BYTES = 16 << 20
AUDIO_CHUNK_SAMPLES = 48_000


class Given(msgspec.Struct, frozen=True):
    """What a loaded pipeline gives."""

    pipeline: str  # class name
    task: str  # "image", "video" or "audio"
    sample_rate_hz: int = 0
    fps: float = 0.0
    spatial: int = 8  # pixels of a latent


def chunks_of(made: Any, given: Given, job: Job, index: int, *, first: int = 0) -> Iterator[Chunk]:
    """The chunks of one piece, of a video those from its frame `first` on. Raises StageFailed when the pipeline gave something else."""
    meta = {"index": index, "seed": job.seeds[index]}
    if isinstance(made, Undecoded):
        yield made.chunk(fps=job.fps or given.fps, **meta)
    elif isinstance(made, Frames):
        yield from video_chunks(made.array, job.fps or given.fps, meta, first=first)
    elif given.task != "audio":
        yield from picture_chunks(made, given, job.fps or given.fps, meta, first=first)
    elif (audio := _field(made, "audios", "audio")) is not None:
        yield from _audio(audio[0], given.sample_rate_hz, meta)
    else:
        raise _something_else(made, given)


def picture_chunks(made: Any, given: Given, fps: float, meta: dict[str, Any], *, first: int = 0) -> Iterator[Chunk]:
    """The chunks of an image, or of a video from its frame `first` on and its sound."""
    if given.task == "image" and (images := _field(made, "images")) is not None:
        for image in images:
            yield Chunk("image", {"image": pixels(image)}, port="image", meta=meta)
    elif given.task == "video" and (frames := _field(made, "frames")) is not None:
        yield from video_chunks(_array(frames[0])[first:], fps, meta, first=first)
        if (audio := _field(made, "audio", "audios")) is not None:
            yield from _audio(audio[0], given.sample_rate_hz, meta)
    else:
        raise _something_else(made, given)


def _something_else(made: Any, given: Given) -> StageFailed:
    return StageFailed(f"{given.pipeline} gave {type(made).__name__}, expected {given.task}")


def pixels(values: Any) -> np.ndarray:
    """(..., H, W, C) floats in [0, 1] as uint8, rounded as diffusers does for PIL; one channel becomes three."""
    array = _array(values)
    if array.dtype != np.uint8:
        array = (array * 255).round().clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array)


def video_chunks(frames: np.ndarray, fps: float, meta: dict[str, Any], *, first: int = 0) -> Iterator[Chunk]:
    """(T, H, W, 3) as chunks of bounded size; `frame` is the number of a chunk's first, where that of `frames` is `first`."""
    size = max(1, VIDEO_CHUNK_BYTES // max(1, frames[:1].size))
    for start in range(0, len(frames), size):
        more = {**meta, "frame": first + start}
        yield Chunk("video", {"frames": pixels(frames[start : start + size])}, port="video", fps=fps, meta=more)


def _audio(samples: Any, rate: int, meta: dict[str, Any]) -> Iterator[Chunk]:
    """(channels, samples) or (samples,): "audio" is the mono mix, as on every edge; "channels" has them all where there are several."""
    array = np.atleast_2d(_array(samples)).astype(np.float32)
    for start in range(0, array.shape[1], AUDIO_CHUNK_SAMPLES):
        piece = np.ascontiguousarray(array[:, start : start + AUDIO_CHUNK_SAMPLES])
        tensors = {"audio": piece.mean(axis=0)}
        if len(piece) > 1:
            tensors["channels"] = piece
        yield Chunk("audio", tensors, port="audio", sample_rate_hz=rate, meta=meta)


def preview_chunk(latents: torch.Tensor, given: Given, job: Job, index: int, step: int) -> Chunk:
    """A small picture of latents, without the VAE: its three strongest directions as colours, one pixel for each latent."""
    grid = _grid(latents.detach().float(), given, job)  # (C, H, W)
    flat = grid.flatten(1) - grid.flatten(1).mean(1, keepdim=True)
    if len(flat) > 3:
        flat = torch.linalg.svd(flat @ flat.T)[0][:, :3].T @ flat
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    picture = ((flat - low) / (high - low).clamp_min(1e-6)).view(len(flat), *grid.shape[1:]).permute(1, 2, 0)
    if picture.shape[-1] < 3:
        picture = picture[..., :1]
    meta = {"index": index, "seed": job.seeds[index], "preview": True, "step": step}
    return Chunk("image", {"image": pixels(picture.cpu().numpy())}, port="image", meta=meta)


def _grid(latents: torch.Tensor, given: Given, job: Job) -> torch.Tensor:
    """(C, H, W) of the first image or frame: of (rows, C, H, W), of video (rows, C, T, H, W), or of packed (rows, H*W, C)."""
    first = latents[0]
    if first.dim() == 4:
        return first[:, 0]
    if first.dim() == 3:
        return first
    tokens, channels = first.shape
    width, height = job.arguments.get("width") or 1, job.arguments.get("height") or 1
    across = max(1, round((tokens * width / height) ** 0.5))
    if tokens % across:
        across = next(count for count in range(across, 0, -1) if tokens % count == 0)
    return first.T.reshape(channels, tokens // across, across)


def image_of(chunk: Chunk, max_pixels: int) -> Any:
    """An input image as PIL has it, RGB (or L for a mask): of an `image` chunk with "image" (H, W, 1, 3 or 4) uint8, or "file", the bytes
    of an encoded image.

    Raises:
        BadRequest: it is broken, or too big.
    """
    from PIL import Image, UnidentifiedImageError

    if "file" in chunk.tensors:
        try:
            with Image.open(io.BytesIO(bytes(chunk.tensors["file"]))) as image:
                _check_size(image.height, image.width, max_pixels)
                return image.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadRequest(f"image: it can not be read: {error}", param="image") from None
    array = chunk.tensors.get("image")
    if array is None or array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        got = "nothing" if array is None else f"{array.dtype} {tuple(array.shape)}"
        raise BadRequest(f"image: got {got}, expected uint8 (height, width, 1, 3 or 4)", param="image")
    _check_size(array.shape[0], array.shape[1], max_pixels)
    picture = Image.fromarray(array[..., 0] if array.shape[2] == 1 else np.array(array))
    return picture.convert("RGB")


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadRequest(f"image: got {width}x{height}, expected at most {max_pixels} pixels", param="image")


def _field(made: Any, *names: str) -> Any:
    return next((made[name] for name in names if name in made and made[name] is not None), None)


def _array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
