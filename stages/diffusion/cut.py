"""Whether a pipeline can be cut into encoder, denoiser and decoder, of its model_index.json alone. Pure; needs no torch.

prompt -> [encoder: text encoders] -> embeddings -> [denoiser: transformer] -> latents -> [decoder: VAE] -> image, video
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

# Edits and image-to-video: their signature calls the image optional and their code does not.
NEED_IMAGE = ("Edit", "ImageToVideo", "Img2Img", "Inpaint", "Kontext")

ENCODERS = ("text_encoder", "tokenizer", "prompt_enhancer")
DENOISERS = ("transformer", "unet")


def read_index(folder: Path) -> dict[str, Any]:
    """model_index.json of a pipeline; {} when there is none."""
    file = folder / "model_index.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def components_of(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Component name -> (library, class), of those that the checkpoint has."""
    return {name: (entry[0], entry[1]) for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and all(entry)}


def is_denoiser(component: str) -> bool:
    """Whether it is called once or more at each step."""
    return component.startswith(DENOISERS)


def task_of(parameters: Collection[str]) -> str:
    """What a pipeline makes, of the parameters of its call: "image", "video" or "audio"."""
    if "num_frames" in parameters:
        return "video"
    return "audio" if any("audio" in name for name in parameters) else "image"


def part_of(component: str) -> str:
    """The part that needs the weights of `component`: "encoder", "denoiser" or "decoder"."""
    if component.startswith(ENCODERS):
        return "encoder"
    return "decoder" if component == "vae" else "denoiser"


def why_not(index: dict[str, Any], task: str) -> str:
    """Why the pipeline of `index` can not be cut; "" when it can."""
    kind = str(index.get("_class_name", "this pipeline"))
    components = components_of(index)
    if any(word in kind for word in NEED_IMAGE):
        return f"{kind} encodes images with its VAE before it denoises, so its parts need each other's models"
    if not any(name.startswith("text_encoder") for name in components):
        return f"{kind} has no text encoder"
    if "vae" not in components or not any(map(is_denoiser, components)):
        return f"{kind} has no component called vae, transformer or unet"
    if task == "audio" or any(name in components for name in ("audio_vae", "vocoder")):
        return f"{kind} cuts sound to length where it decodes it, which the decoder alone can not"
    return ""
