"""What a request for an image, a video or a sound asks of the stages, and whether they can do it.

Knows what stages say of themselves (`Stage.describe`; see "Diffusion stages" in docs/architecture.md). Knows nothing of HTTP.

Rules
- What is beyond a limit is refused here, before any stage hears of it. The stage looks again: it alone knows its pipeline's arguments.
- A quality is the least that the caller takes: a stage that does not have it serves the next better one, never a worse one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrt import Chunk
from streamrt.errors import BadRequest, TooLong

if TYPE_CHECKING:
    from gateway.schema import GenerationBody
    from streamrt import Client

MAX_PROMPT_CHARS = 32_000
SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
QUALITIES = ("fast", "high", "lossless")  # what stages have, the better the later
# OpenAI's words for them; its "high" is ours.
OPENAI_QUALITIES = {"low": "fast", "medium": "high", "standard": "high", "hd": "lossless", "xhigh": "lossless", "max": "lossless"}


def facts_of(client: Client, task: str) -> dict[str, Any]:
    """What the stages on the way of `task` say of themselves, together; {} when none is ready."""
    return together([client.describe(stage) for stage in client.tasks()[task].stages])


def together(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a limit the least, of lists what any has, of the rest what the first on the way says."""
    facts: dict[str, Any] = {}
    for one in told:
        for name, value in one.items():
            known = facts.get(name, value)
            if name.startswith("max_"):
                facts[name] = min(known, value)
            elif isinstance(value, list):
                facts[name] = [*known, *(item for item in value if item not in known)]
            else:
                facts[name] = known
    return facts


def params_of(body: GenerationBody, prompt: str, facts: dict[str, Any], called: Mapping[str, str] = {}, **more: Any) -> dict[str, Any]:
    """The parameters of the task, checked. `more` are those that only one task has; `called`: see `check`. Raises BadRequest, TooLong."""
    params = {
        "prompt": prompt,
        "negative_prompt": body.negative_prompt,
        "num_inference_steps": body.num_inference_steps,
        "guidance_scale": body.guidance_scale,
        "true_cfg_scale": body.true_cfg_scale,
        "seed": body.seed,
        "class_label": body.class_label,
        "lora": [{"name": lora.name, "scale": lora.scale} for lora in body.lora] if isinstance(body.lora, list) else body.lora,
        "quality": quality_of(body.quality, facts.get("qualities", ())),
        **more,
    }
    params = {name: value for name, value in params.items() if value is not None}
    check(params, facts, called)
    return params


def quality_of(asked: str | None, known: Any) -> str | None:
    """The stage's own quality for one that was asked for; None leaves it to the stage."""
    if asked in (None, "auto"):
        return None
    least = QUALITIES.index(OPENAI_QUALITIES.get(asked, asked))
    return next((quality for quality in QUALITIES[least:] if quality in known), "lossless")


def check(params: dict[str, Any], facts: dict[str, Any], called: Mapping[str, str] = {}) -> None:
    """Raise BadRequest, TooLong for the first parameter that is beyond what the stages say they can do.

    `called`: what the body calls a parameter, where it is not the parameter's own name.
    """
    for name in ("prompt", "negative_prompt"):
        if len(params.get(name, "")) > MAX_PROMPT_CHARS:
            field = called.get(name, name)
            raise TooLong(f"{field}: got {len(params[name])} characters, expected at most {MAX_PROMPT_CHARS}", param=field)
    if not params["prompt"].strip() and "class_label" not in params:
        raise BadRequest(f"{called.get('prompt', 'prompt')}: it is empty", param=called.get("prompt", "prompt"))
    limits = {
        "num_inference_steps": facts.get("max_steps"),
        "n": facts.get("max_images"),
        "num_frames": facts.get("max_frames"),
        "seconds": _most_seconds(params, facts),
    }
    for name, limit in limits.items():
        _at_most(called.get(name, name), params.get(name, 0), limit)
    if (size := params.get("size", "auto")) != "auto":
        _check_size(size, facts)


def _most_seconds(params: dict[str, Any], facts: dict[str, Any]) -> float | None:
    """Of a video as many as its frames last, of a sound as the stage says; None = not known."""
    fps = params.get("fps") or facts.get("fps")
    return facts["max_frames"] / fps if fps and "max_frames" in facts else facts.get("max_seconds")


def image_chunk(file: bytes, role: str) -> Chunk:
    """An encoded image for the entry stage."""
    return Chunk("image", {"file": np.frombuffer(file, np.uint8)}, meta={"role": role})


def check_takes_image(facts: dict[str, Any], given: bool, param: str) -> None:
    """Raise BadRequest when the stages need an image that is not `given`, or take none that is."""
    model = facts.get("pipeline") or "this pipeline"
    if facts.get("needs_image") and not given:
        raise BadRequest(f"{param}: missing, and {model} starts from one", param=param)
    if given and "accepts" in facts and "image" not in facts["accepts"]:
        raise BadRequest(f"{param}: {model} starts from none", param=param)


def _check_size(size: str, facts: dict[str, Any]) -> None:
    match = SIZE.fullmatch(size)
    if match is None:
        raise BadRequest(f'size: got "{size[:80]}", expected "WIDTHxHEIGHT" in pixels, or "auto"', param="size")
    width, height = int(match[1]), int(match[2])
    for side in (width, height):
        _at_most("size", side, facts.get("max_side"))
        if side % (multiple := facts.get("size_multiple", 1)):
            raise BadRequest(f"size: got {size}, expected multiples of {multiple}", param="size")
    if width * height > facts.get("max_pixels", width * height):
        raise BadRequest(f"size: got {size}, expected at most {facts['max_pixels']} pixels", param="size")


def _at_most(name: str, value: float, limit: float | None) -> None:
    if limit is not None and not value <= limit:  # NaN is not
        raise BadRequest(f"{name}: got {value:g}, expected at most {limit:g}", param=name)
