"""`[stage.args]` of `diffusion.pipeline`. Imports nothing heavy: `streamrt check` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from stages.diffusion.params import Limits

Count = Annotated[int, Meta(ge=1)]
Attention = Literal["auto", "native", "math", "flex", "cudnn", "efficient", "flash", "flash_3", "flash_4", "sage", "xformers"]
Quantization = Literal["none", "int8", "int8_dynamic", "fp8", "fp8_dynamic"]
CacheName = Literal["none", "first_block", "pab", "faster", "taylorseer", "mag", "teacache", "dbcache"]


class DiffusionArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # a folder in diffusers' layout, weights:NAME, or a hub id in the local cache
    task: Literal["image", "video", "audio"] = "image"  # what the pipeline makes
    part: Literal["all", "encoder", "denoiser", "decoder"] = "all"  # of the pipeline, when it is cut into three stages
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on the CPU, else bfloat16
    mode: Literal["step", "request"] = "step"  # request: one after the other, each in one piece; for pipelines without a known denoiser
    max_running: Count = 8  # images that are denoised side by side; each holds its latents
    max_queued: Count = 64  # images that wait for that; one more is refused
    max_batch: Count = 16  # rows of one denoiser call; guidance makes two rows of an image in some pipelines
    window_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0  # an idle engine waits so long for others after the first request of a burst
    slice_ms: Annotated[float, Meta(ge=0, le=1000)] = 50.0  # short steps are made together for so long before anybody is heard or told
    # Of requests that name none; the pipeline's own when left out.
    steps: Count | None = None
    width: Count | None = None
    height: Count | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    quality: Literal["lossless", "high", "fast"] = "lossless"
    # The most that a request may ask for; checked before any work.
    max_steps: Count = 100
    max_side: Count = 4096  # pixels
    max_pixels: Count = 4096 * 4096
    max_frames: Count = 1025
    max_seconds: Annotated[float, Meta(gt=0)] = 300.0
    max_images: Count = 10
    # What makes it smaller or faster. Off by default; what can not be done is refused at start.
    attention: Attention = "auto"  # the denoisers' kernels; auto: torch's own choice
    quantize: dict[str, Quantization] = {}  # component -> how: { transformer = "fp8", vae = "none" }
    casting: Literal["none", "fp8"] = "none"  # the denoisers' weights are kept in float8 and computed with in `dtype`
    vae_tiling: bool = False
    vae_slicing: bool = False
    offload: Literal["none", "model", "group"] = "none"
    compile: bool = False  # the denoisers' repeated blocks
    cuda_graphs: bool = False  # a denoiser call of a shape that comes again is captured once, then replayed
    max_cuda_graphs: Count = 32  # one for each shape, rows included; the one not used for longest goes first
    warmup_sizes: tuple[str, ...] = ("auto",)  # what is drawn before the stage is ready, to compile and to capture; auto: the usual size
    cache: CacheName = "none"  # for requests of quality "high" and "fast"
    mag_ratios: list[float] = []  # of cache = "mag": they belong to the checkpoint
    loras: dict[str, Path] = {}  # name -> file; relative to the pipeline file
    max_loras: Count = 4  # in memory; the least used go first

    @property
    def limits(self) -> Limits:
        """What requests are checked against."""
        return Limits(**{field.name: getattr(self, field.name) for field in msgspec.structs.fields(Limits)})
