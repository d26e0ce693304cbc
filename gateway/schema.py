"""Typed bodies of the OpenAI resources that this gateway speaks, and how a wrong one is told.

Each struct lists every parameter of its spec: supported ones with their bounds, the others so that a value which would change
the result is refused by name and a neutral one is let pass. A field that no spec knows is refused.

Source: https://platform.openai.com/docs/api-reference, checked against openai-python 3.57.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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


class Function(Struct, omit_defaults=True):
    """What a tool is called, and the JSON schema of its arguments."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A function that the model may ask the caller to run."""

    function: Function
    type: Literal["function"]


class FunctionName(Struct):
    name: str


class NamedTool(Struct):
    """The one tool that is to be called."""

    function: FunctionName
    type: Literal["function"]


class ResponseFormat(Struct, omit_defaults=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class TextBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions share."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: int | None = None
    # honoured where the pipeline's language model says so, else refused unless neutral: see NEUTRAL
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    # the same, and not in OpenAI's API
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    # accepted; they change nothing here
    user: str | None = None


class ChatBody(TextBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)]
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)] | None = None
    audio: ChatAudio | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    # honoured where the pipeline's language model says so, else refused unless neutral: see NEUTRAL
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # refused unless neutral
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    # accepted; they change nothing here
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


# ---- https://platform.openai.com/docs/api-reference/completions/create ------------------------------------------------------

TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


class CompletionBody(TextBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[Any], Meta(min_length=1)]  # text, token ids, or a list of either: see `prompts`
    # honoured where the pipeline's language model says so, else refused unless neutral: see NEUTRAL
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    # refused unless neutral
    best_of: int | None = None
    suffix: str | None = None


MAX_PROMPTS = 64  # in one body


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of the body, each text or token ids. Raises BadRequest that names the one that is neither."""
    given = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise BadRequest(f"prompt: got {len(given)} prompts, expected at most {MAX_PROMPTS}", param="prompt")
    found: list[str | list[int]] = []
    for n, one in enumerate(given):
        try:
            found.append(msgspec.convert(one, str | TokenIds))
        except msgspec.ValidationError:
            raise BadRequest(f"prompt[{n}]: expected text or a list of token ids", param=f"prompt[{n}]") from None
    return found


# Parameters that not every language model honours, and the values of theirs that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": (ResponseFormat("text"),),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_k": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "regex": (),
    "grammar": (),
    "echo": (False,),
    # none does
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "best_of": (1,),
    "suffix": ("",),
}


def refuse_unsupported(body: TextBody, honoured: Collection[str] = ()) -> None:
    """Raise BadRequest for the first parameter of NEUTRAL that asks for something and is not in `honoured`."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        # 0 == False, and `logprobs: 0` asks for something.
        is_neutral = value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
        if not is_neutral and name not in honoured:
            raise BadRequest(
                f"{name}: got {msgspec.to_builtins(value)!r:.80}, which this server does not support", hint=f"leave {name} out", param=name
            )


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
