"""Typed bodies of the OpenAI resources that this gateway speaks, and how a wrong one is told.

Each struct lists every parameter of its spec: supported ones with their bounds, the others so that a value which would change
the result is refused by name and a neutral one is let pass. A field that no spec knows is refused.

Source: https://platform.openai.com/docs/api-reference, checked against openai-python 3.57.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from streamrt.errors import BadRequest

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
ChatAudioFormat = Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]
TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
T = TypeVar("T", bound=Struct)


class VoiceId(Struct, forbid_unknown_fields=True):
    """A voice by id: OpenAI's second way to name one."""

    id: str


# ---- https://platform.openai.com/docs/api-reference/chat/create -------------------------------------------------------------


class InputAudio(Struct, forbid_unknown_fields=True):
    """The audio of an `input_audio` part."""

    data: str  # base64, no data: URL
    format: str = ""  # told by the bytes themselves


class ContentPart(Struct):
    """One part of a message's content; which types are understood is for `chat.py` to say."""

    type: str
    text: str | None = None
    refusal: str | None = None
    input_audio: InputAudio | None = None


class ChatMessage(Struct):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    audio: dict[str, Any] | None = None
    refusal: str | None = None


class ChatAudio(Struct, forbid_unknown_fields=True):
    """How the answer sounds, with `modalities` ["text", "audio"]."""

    voice: str | VoiceId | None = None
    format: ChatAudioFormat = "pcm16"


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream carries beside its deltas."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted; nothing is padded


class ChatBody(Struct, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)]
    model: str = ""
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)] | None = None
    audio: ChatAudio | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # accepted when neutral, else refused: see NEUTRAL
    n: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    # accepted; they change nothing here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


# Parameters that we can not honour, and the values of theirs that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}


def refuse_unsupported(body: Struct) -> None:
    """Raise BadRequest for the first parameter of NEUTRAL whose value asks for something."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: got {value!r:.80}, which this server does not support", hint=f"leave {name} out", param=name)


# ---- https://platform.openai.com/docs/api-reference/audio/createSpeech -----------------------------------------------------


class SpeechBody(Struct, forbid_unknown_fields=True):
    """POST /v1/audio/speech."""

    input: str
    model: str = ""
    voice: str | VoiceId | None = None
    response_format: AudioFormat = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    instructions: str | None = None  # refused unless empty: no speaking stage takes them
    language: str | None = None  # extension: the language of `input`, for stages that speak several
    stream: bool | None = None  # extension: false = the whole file at once, with its length and true sizes in its header


# ---- https://platform.openai.com/docs/api-reference/audio/createTranscription ----------------------------------------------


class TranscriptionForm(Struct, forbid_unknown_fields=True):
    """POST /v1/audio/transcriptions: the fields beside `file`. Form fields are text; `convert_form` makes them these types."""

    model: str = ""
    language: str | None = None
    prompt: str | None = None
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = []
    stream: bool = False
    chunking_strategy: str | None = None  # "auto" or absent: the stage decides


# ---- images, videos and sounds ------------------------------------------------------------------------------------------------


class Lora(Struct, forbid_unknown_fields=True):
    """An adapter of the stage, by name."""

    name: str
    scale: Annotated[float, Meta(ge=-4, le=4)] = 1.0


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What all of them may ask for; extensions, under the names that diffusers gives them."""

    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Meta(ge=1)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    class_label: int | str | None = None
    lora: str | list[Lora] | None = None
    quality: Literal["auto", "low", "medium", "standard", "high", "hd", "xhigh", "max", "fast", "lossless"] | None = None


# https://platform.openai.com/docs/api-reference/images/create
class ImageBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/images/generations."""

    prompt: str
    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque"] | None = None  # no stage draws transparency
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    # accepted; they change nothing here
    moderation: Literal["auto", "low"] | None = None
    user: str | None = None
    safety_identifier: str | None = None


# https://platform.openai.com/docs/api-reference/images/createEdit
class ImageEditForm(ImageBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/images/edits: the fields beside `image` and `mask`."""

    strength: Annotated[float, Meta(gt=0, le=1)] | None = None  # extension: how much of the image is made anew
    input_fidelity: Literal["low"] | None = None  # OpenAI's default, and no stage has another


class ImageReference(Struct, forbid_unknown_fields=True):
    """An image inside JSON."""

    image_url: str  # a data: URL; nothing is fetched


# https://platform.openai.com/docs/api-reference/videos/create
class VideoBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/videos and /v1/videos/sync, as JSON or as a form beside the file `input_reference`."""

    prompt: str
    model: str | None = None
    seconds: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # OpenAI sends it as text
    size: str | None = None
    input_reference: ImageReference | None = None
    num_frames: Annotated[int, Meta(ge=1)] | None = None  # extension: instead of `seconds`
    fps: Annotated[float, Meta(ge=1, le=240)] | None = None  # extension


class SoundBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/audio/generate; named as vLLM-Omni names it."""

    input: str
    model: str | None = None
    audio_length: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    response_format: AudioFormat = "wav"


def decode(data: bytes, cls: type[T], *, strict: bool = True) -> T:
    """`data` as JSON of `cls`. Not `strict`: numbers may come as text. Raises BadRequest that names the field."""
    if not data.strip():
        raise BadRequest("the body is empty, expected a JSON object")
    try:
        return msgspec.json.decode(data, type=cls, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def convert_form(fields: dict[str, Any], cls: type[T]) -> T:
    """Form fields as `cls`. Raises BadRequest that names the field."""
    try:
        return msgspec.convert(fields, cls, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def voice_name(voice: str | VoiceId | None) -> str | None:
    return voice.id if isinstance(voice, VoiceId) else voice


def _invalid(error: msgspec.ValidationError) -> BadRequest:
    """msgspec says "Expected `int`, got `str` - at `$.messages[0].role`"; clients want `messages[0].role` in `param`."""
    text = str(error)
    what, _, path = text.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".")
    if field := re.search(r"(?:required|unknown) field `([^`]+)`", what):
        param = f"{param}.{field[1]}" if param else field[1]
    what = what.replace("`", "'")
    return BadRequest(f"{param}: {what}" if param else f"the body: {what}", param=param)
