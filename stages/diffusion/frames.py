"""Frames of a video while its VAE still decodes, for VAEs that decode some of them at a time.

    latents (T) -> decoder(some of them) -> frames -> decoder(the next) -> frames ... -> joined in time: what `decode` gives

A causal VAE calls its decoder once for every few latents, and joins what comes. A twin of it, which shares its weights, tells each result as
it comes and goes on unchanged. What it keeps between the calls is the twin's own, so decodings can stop in the middle or take turns.

Knows diffusers' VAEs. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stages.diffusion.caches import shared_copy


def _unpatched(vae: Any, result: Any) -> torch.Tensor:
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    frames: torch.Tensor = unpatchify(result, vae.config.patch_size or 1)
    return frames


# VAE class -> the frames in one result of its decoder, as its `decode` would give them.
IN_PARTS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "AutoencoderKLWan": _unpatched,
    "AutoencoderKLCogVideoX": lambda _vae, result: result[0],
}

# Pipelines that give what their VAE has decoded, frame by frame. Of the others some cut it or join it with other frames.
GIVE_IT_ALL = {
    *("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"),
    *("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline", "SkyReelsV2DiffusionForcingPipeline"),
    *("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline", "CogVideoXFunControlPipeline"),
}


class Frames:
    """Some frames of one video: (T, H, W, C) floats in [0, 1]."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def comes_in_parts(pipeline: Any) -> bool:
    """Whether the frames of `pipeline` can leave while it decodes. In tiles, each frame is complete only at the end."""
    vae: Any = getattr(pipeline, "vae", None)
    return type(pipeline).__name__ in GIVE_IT_ALL and type(vae).__name__ in IN_PARTS and not vae.use_tiling


def telling(vae: Any, tell: Callable[[torch.Tensor], Any]) -> Any:
    """A twin of `vae` whose `decode` calls `tell` with (rows, C, T, H, W) for each of its parts, in order."""
    twin = shared_copy(vae)
    finish = IN_PARTS[type(vae).__name__]

    def hook(_module: Any, _inputs: Any, result: Any) -> None:
        tell(finish(twin, result))

    twin.decoder.register_forward_hook(hook)
    return twin
