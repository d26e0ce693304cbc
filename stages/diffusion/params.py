"""What a request of task `image`, `video` or `audio` may ask for, checked before any work is done.

Knows names, types, ranges, and which arguments the loaded pipeline has. Knows nothing of torch, so it runs on the loop.

Rules
- What the pipeline has no argument for is refused, never dropped.
- Every random number of a request comes from its seeds; one that is not given is drawn here and told in the end's metadata.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamrt import BadRequest, TooLong

Count = Annotated[int, Meta(ge=1)]
Quality = Literal["lossless", "high", "fast"]
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 32_000
SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")

GUIDER_SCALE = "guider.guidance_scale"  # of pipelines whose guidance is a component with a scale, and no argument of the call

# What a request says -> what diffusers' pipelines call it, the first of these that the pipeline has.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "negative_prompt": ("negative_prompt",),
    "width": ("width",),
    "height": ("height",),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale", GUIDER_SCALE),
    "true_cfg_scale": ("true_cfg_scale",),
    "strength": ("strength",),
    "num_frames": ("num_frames",),
    "fps": ("frame_rate", "fps"),
}


class Limits(msgspec.Struct, frozen=True):
    """The most that one request may ask for, and what it gets when it asks for nothing."""

    max_steps: int = 100
    max_side: int = 4096  # pixels
    max_pixels: int = 4096 * 4096  # of one image or frame
    max_frames: int = 1025
    max_seconds: float = 300.0  # of audio
    max_images: int = 10
    steps: int | None = None  # None: the pipeline's own default. So are the next three
    width: int | None = None
    height: int | None = None
    guidance_scale: float | None = None
    quality: Quality = "lossless"


class Accepts(msgspec.Struct, frozen=True):
    """What the loaded pipeline can be asked, as the signature of its `__call__` says."""

    pipeline: str  # class name, for messages
    names: frozenset[str]  # parameters of the call, and GUIDER_SCALE
    steps: int = 50  # its default
    needs_image: bool = False  # it starts from one, always
    size_multiple: int = 1  # width and height are multiples of this
    labels: dict[str, int] = {}  # class-conditional models: name -> class
    loras: frozenset[str] = frozenset()
    qualities: frozenset[str] = frozenset({"lossless"})
    frames_per_s: float = 0.0  # of its video, when the request names none
    frame_multiple: int = 1  # num_frames - 1 is a multiple of this

    @property
    def by_class(self) -> bool:
        return "class_labels" in self.names


class Job(msgspec.Struct, frozen=True):
    """One request, checked. `arguments` are the pipeline's own, without prompt, generator and images."""

    task: str
    seeds: tuple[int, ...]  # one for each image, video or sound that is asked for
    steps: int
    arguments: dict[str, Any]
    prompt: str | None = None
    needs_prompt: bool = True
    takes_image: bool = False
    needs_image: bool = False
    fps: float = 0.0
    previews: int = 0  # partial images on the way
    lora: tuple[tuple[str, float], ...] = ()  # (name, scale), sorted
    quality: str = "lossless"
    priority: int = 0

    @property
    def likeness(self) -> str:
        """Requests of one likeness can probably share denoiser calls; known before anything is computed."""
        names = ("width", "height", "num_frames", "audio_end_in_s")
        guided = (self.arguments.get("guidance_scale") or self.arguments.get(GUIDER_SCALE) or 0) > 1
        return repr(([self.arguments.get(name) for name in names], guided, self.lora, self.quality))


class _Lora(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scale: Annotated[float, Meta(ge=-4, le=4)] = 1.0


class _Params(msgspec.Struct):
    """As they travel. None of them is required; `prompt` may also come as text chunks."""

    prompt: str | None = None
    negative_prompt: str | None = None
    class_label: int | str | None = None
    size: str | None = None  # "1024x768", or "auto"
    width: Count | None = None
    height: Count | None = None
    num_inference_steps: Count | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    strength: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    n: Count | None = None
    num_frames: Count | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    seconds: Annotated[float, Meta(gt=0)] | None = None
    previews: Annotated[int, Meta(ge=0, le=8)] | None = None
    lora: str | list[_Lora] | None = None
    quality: Quality | Literal["auto"] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None


def parse(task: str, params: Mapping[str, Any], limits: Limits, accepts: Accepts) -> Job:
    """A request's `params`.

    Raises:
        BadRequest: a wrong type, a value beyond the limits, or something that this pipeline can not be asked; `param` names it.
        TooLong: the prompt.
    """
    try:
        asked = msgspec.convert(params, _Params)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")  # "Expected `int` >= 1 - at `$.num_inference_steps`"
        name = path.rstrip("`").partition("[")[0]
        raise BadRequest(f"{name or 'params'}: {what[0].lower()}{what[1:]}", param=name) from None
    for name in ("prompt", "negative_prompt"):
        if len(getattr(asked, name) or "") > MAX_PROMPT_CHARS:
            raise TooLong(f"{name}: longer than {MAX_PROMPT_CHARS} characters", param=name)
    if asked.previews and task != "image":
        raise BadRequest(f"previews: there are none of {task}", param="previews")
    arguments = _arguments(asked, limits, accepts)
    steps = arguments.get("num_inference_steps", accepts.steps)
    _at_most("num_inference_steps", steps, limits.max_steps)
    images = asked.n or 1
    _at_most("n", images, limits.max_images)
    seed = asked.seed if asked.seed is not None else secrets.randbelow(2**31)
    if accepts.by_class and (asked.class_label is not None or asked.prompt is not None):
        arguments["class_labels"] = [label_of(asked.class_label, asked.prompt or "", accepts)]
    return Job(
        task=task,
        seeds=tuple((seed + index) % (MAX_SEED + 1) for index in range(images)),
        steps=steps,
        arguments=arguments,
        prompt=asked.prompt,
        needs_prompt="prompt" in accepts.names,
        takes_image="image" in accepts.names,
        needs_image=accepts.needs_image,
        fps=asked.fps or accepts.frames_per_s,
        previews=asked.previews or 0,
        lora=_loras(asked.lora, accepts),
        quality=_quality(asked.quality, limits, accepts),
        priority=asked.priority or 0,
    )


def _arguments(asked: _Params, limits: Limits, accepts: Accepts) -> dict[str, Any]:
    width, height = _size(asked, limits, accepts)
    frames = _frames(asked, limits, accepts)
    given: dict[str, Any] = {
        "negative_prompt": asked.negative_prompt or None,
        "width": width,
        "height": height,
        "num_inference_steps": asked.num_inference_steps or limits.steps,
        "guidance_scale": asked.guidance_scale if asked.guidance_scale is not None else limits.guidance_scale,
        "true_cfg_scale": asked.true_cfg_scale,
        "strength": asked.strength,
        "num_frames": frames,
    }
    if "frame_rate" in accepts.names:
        given["fps"] = asked.fps
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        spelled = next((spelling for spelling in SPELLINGS[name] if spelling in accepts.names), None)
        if spelled is None:
            raise BadRequest(f"{name}: {accepts.pipeline} has nothing like it", param=name)
        arguments[spelled] = value
    if asked.seconds is not None and "audio_end_in_s" in accepts.names:
        _at_most("seconds", asked.seconds, limits.max_seconds)
        arguments["audio_end_in_s"] = asked.seconds
    elif asked.seconds is not None and "num_frames" not in accepts.names:
        raise BadRequest(f"seconds: {accepts.pipeline} has nothing like it", param="seconds")
    return arguments


def _size(asked: _Params, limits: Limits, accepts: Accepts) -> tuple[int | None, int | None]:
    """(width, height) in pixels, checked; None where the pipeline chooses."""
    width, height = asked.width, asked.height
    if asked.size not in (None, "auto"):
        match = SIZE.fullmatch(asked.size or "")
        if match is None:
            raise BadRequest(f'size: got "{asked.size}", expected "WIDTHxHEIGHT" in pixels, or "auto"', param="size")
        if width is not None or height is not None:
            raise BadRequest("size: got width or height beside it, expected one or the other", param="size")
        width, height = int(match[1]), int(match[2])
    if "width" in accepts.names:
        width = limits.width if width is None else width
        height = limits.height if height is None else height
    for name, side in (("width", width), ("height", height)):
        if side is None:
            continue
        name = "size" if asked.size else name
        _at_most(name, side, limits.max_side)
        if side < 1 or side % accepts.size_multiple:
            raise BadRequest(f"{name}: got {side}, expected a multiple of {accepts.size_multiple}", param=name)
    if width is not None and height is not None and width * height > limits.max_pixels:
        raise BadRequest(f"size: got {width}x{height}, expected at most {limits.max_pixels} pixels", param="size")
    return width, height


def _frames(asked: _Params, limits: Limits, accepts: Accepts) -> int | None:
    """num_frames, given as such or in seconds: then the nearest count that the model can make."""
    frames = asked.num_frames
    if frames is not None and asked.seconds is not None:
        raise BadRequest("seconds: got num_frames beside it, expected one or the other", param="seconds")
    if frames is None and asked.seconds is not None and "num_frames" in accepts.names:
        rate = asked.fps or accepts.frames_per_s
        if not rate:
            raise BadRequest("fps: seconds of video need it", param="fps")
        frames = 1 + round((asked.seconds * rate - 1) / accepts.frame_multiple) * accepts.frame_multiple
        frames = max(1, frames)
    if frames is not None:
        _at_most("seconds" if asked.seconds else "num_frames", frames, limits.max_frames, unit=" frames")
    return frames


def label_of(label: int | str | None, prompt: str, accepts: Accepts) -> int:
    """The class to draw: a number, a name, or the one name that the prompt holds as a word. Raises BadRequest."""
    known = accepts.labels
    names = ", ".join(list(known)[:12]) + (" ..." if len(known) > 12 else "")
    if isinstance(label, int):
        if known and label not in known.values():
            raise BadRequest(f"class_label: got {label}, expected one of {sorted(known.values())[:12]}", param="class_label")
        return label
    if isinstance(label, str):
        if label not in known:
            raise BadRequest(f'class_label: got "{label}", expected one of {names or "the numbers of the classes"}', param="class_label")
        return known[label]
    found = {known[name] for name in known if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt, re.IGNORECASE)}
    if len(found) != 1:
        raise BadRequest(f"prompt: expected the name of exactly one class in it: {names or 'this model has no names'}", param="prompt")
    return found.pop()


def _loras(asked: str | list[_Lora] | None, accepts: Accepts) -> tuple[tuple[str, float], ...]:
    loras = [_Lora(asked)] if isinstance(asked, str) else asked or []
    for lora in loras:
        if lora.name not in accepts.loras:
            have = ", ".join(sorted(accepts.loras)) or "none"
            raise BadRequest(f'lora: got "{lora.name}", this stage has {have}', param="lora")
    if len({lora.name for lora in loras}) < len(loras):
        raise BadRequest("lora: got one twice", param="lora")
    return tuple(sorted((lora.name, lora.scale) for lora in loras))


def _quality(asked: str | None, limits: Limits, accepts: Accepts) -> str:
    if asked in (None, "auto"):
        return limits.quality
    if asked not in accepts.qualities:
        have = ", ".join(sorted(accepts.qualities))
        raise BadRequest(f'quality: got "{asked}", this stage has {have}', param="quality")
    return asked or ""


def _at_most(name: str, value: float, limit: float, unit: str = "") -> None:
    if value > limit:
        raise BadRequest(f"{name}: got {value:g}{unit}, expected at most {limit:g}", param=name)
