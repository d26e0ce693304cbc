"""What a client of `/v1/realtime` may send, typed; and the session object, merged and checked. Pure.

    frame -> `parse` -> a ClientEvent            session.update -> `merged` -> SessionBody -> `settings_of`

Knows OpenAI's Realtime events (GA names; the beta's session fields are taken too). Knows nothing of sockets.

Rules
- A session update is merged field by field into what is in force, checked as a whole, and changes all or nothing.
- Unknown names of models, voices and transcription models are taken, and the answer shows what is used instead; unknown fields are errors.

Source: https://platform.openai.com/docs/api-reference/realtime-client-events, checked against openai-python 3.57 and openai-agents 0.24.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from streamrt.session import Item, Part, Refused, Settings, TurnDetection

MAX_APPEND_BYTES = 15 * 1024 * 1024
MAX_ID_CHARS = 32
SILENCE_MS = {"low": 1000, "medium": 500, "auto": 500, "high": 300}  # what `semantic_vad`'s eagerness is taken to mean

AudioType = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)]
Tokens = Annotated[int, Meta(ge=1, le=4096)] | Literal["inf"] | None
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]


# ---- the session object ------------------------------------------------------------------------------------------------------


class AudioFormat(Struct, forbid_unknown_fields=True):
    type: AudioType
    rate: Literal[24000] | UnsetType = UNSET  # of audio/pcm


class TurnDetectionBody(Struct, forbid_unknown_fields=True):
    type: Literal["server_vad", "semantic_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    prefix_padding_ms: Milliseconds | UnsetType = UNSET
    silence_duration_ms: Milliseconds | UnsetType = UNSET
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: int | None | UnsetType = UNSET  # accepted; nothing is said unasked
    eagerness: Literal["low", "medium", "high", "auto"] | UnsetType = UNSET


class TranscriptionBody(Struct):
    model: str = ""
    language: str | None = None
    prompt: str | None = None


class AudioInputBody(Struct, forbid_unknown_fields=True):
    format: AudioFormat
    transcription: TranscriptionBody | None = None
    noise_reduction: dict[str, Any] | None = None  # accepted; audio is taken as it is
    turn_detection: TurnDetectionBody | None = None


class VoiceId(Struct):
    id: str


class AudioOutputBody(Struct, forbid_unknown_fields=True):
    format: AudioFormat
    voice: str | VoiceId | None = None
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] = 1.0


class AudioBody(Struct, forbid_unknown_fields=True):
    input: AudioInputBody
    output: AudioOutputBody


class SessionBody(Struct, forbid_unknown_fields=True):
    """The session object. The last block is accepted and shown, and changes nothing here."""

    type: Literal["realtime", "transcription"]
    audio: AudioBody
    id: str = ""
    object: str = ""
    model: str | None = None
    expires_at: int | None = None
    output_modalities: Modalities | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Tokens = None

    temperature: float | None = None
    parallel_tool_calls: bool | None = None
    truncation: Any = None
    tracing: Any = None
    prompt: Any = None
    include: Any = None
    reasoning: Any = None


_BETA_FORMATS = {"pcm16": {"type": "audio/pcm", "rate": 24000}, "g711_ulaw": {"type": "audio/pcmu"}, "g711_alaw": {"type": "audio/pcma"}}
# beta name -> where it stands now
_BETA_FIELDS = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "max_response_output_tokens": ("max_output_tokens",),
}
_OURS = ("id", "object", "expires_at", "model")  # what a client may send and not change
_KINDS = ("format", "turn_detection")  # objects whose `type` says which fields they have


def server_vad(detection: TurnDetection) -> dict[str, Any]:
    return {
        "type": "server_vad",
        "threshold": detection.threshold,
        "prefix_padding_ms": detection.prefix_padding_ms,
        "silence_duration_ms": detection.silence_duration_ms,
        "create_response": detection.create_response,
        "interrupt_response": detection.interrupt_response,
    }


def merged(shown: dict[str, Any], update: dict[str, Any], defaults: Settings) -> tuple[dict[str, Any], SessionBody]:
    """The session object `shown` with the fields of `update`, and the same checked. Raises Refused; `shown` is left alone."""
    changes: dict[str, Any] = {}
    for name, value in update.items():
        if name in _OURS:
            continue
        path = _BETA_FIELDS.get(name, (name,))
        if path[-1] == "format" and isinstance(value, str):
            value = _BETA_FORMATS.get(value, {"type": value})
        changes = _merge(changes, _nested(path, value))
    detection = changes.get("audio", {}).get("input", {}) if isinstance(changes.get("audio"), dict) else {}
    if (
        isinstance(detection, dict)
        and isinstance(detection.get("turn_detection"), dict)
        and not _at(shown, "audio", "input", "turn_detection")
    ):
        # It was off: what is not said is as the server has it.
        asked = detection["turn_detection"]
        base = server_vad(defaults.turn_detection or TurnDetection()) if asked.get("type", "server_vad") == "server_vad" else {}
        detection["turn_detection"] = {**base, **asked}
    session = _merge(shown, changes)
    for side in ("input", "output"):
        audio_format = _at(session, "audio", side, "format")
        if isinstance(audio_format, dict) and audio_format.get("type") == "audio/pcm":
            audio_format.setdefault("rate", 24000)
    return session, convert(session, SessionBody, "session")


def settings_of(body: SessionBody, defaults: Settings, voice: str) -> Settings:
    """What the session is to do; `voice` is one that the pipeline has."""
    detection = body.audio.input.turn_detection
    heard = body.audio.input.transcription
    return Settings(
        instructions=body.instructions or "",
        modality="audio" if "audio" in (body.output_modalities or ["audio"]) else "text",
        voice=voice,
        speed=body.audio.output.speed,
        max_tokens=defaults.max_tokens if body.max_output_tokens in (None, "inf") else int(body.max_output_tokens),
        temperature=defaults.temperature,
        tools=tuple(body.tools or ()),
        tool_choice=body.tool_choice or "auto",
        turn_detection=None if detection is None else _turn_detection(detection, defaults.turn_detection or TurnDetection()),
        tells_transcripts=heard is not None or body.type == "transcription",
        language=(heard and heard.language) or defaults.language,
        prompt=(heard and heard.prompt) or "",
        answers=body.type == "realtime",
    )


def _turn_detection(body: TurnDetectionBody, defaults: TurnDetection) -> TurnDetection:
    silence_ms = defaults.silence_duration_ms
    if body.type == "semantic_vad" and body.eagerness is not UNSET and body.eagerness != "auto":
        silence_ms = SILENCE_MS[body.eagerness]
    return TurnDetection(
        threshold=defaults.threshold if body.threshold is UNSET else body.threshold,
        prefix_padding_ms=defaults.prefix_padding_ms if body.prefix_padding_ms is UNSET else body.prefix_padding_ms,
        silence_duration_ms=silence_ms if body.silence_duration_ms is UNSET else body.silence_duration_ms,
        create_response=body.create_response,
        interrupt_response=body.interrupt_response,
    )


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in changes.items():
        old = out.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            other_kind = name in _KINDS and "type" in value and value["type"] != old.get("type")
            out[name] = dict(value) if other_kind else _merge(old, value)
        else:
            out[name] = _merge({}, value) if isinstance(value, dict) else value
    return out


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _at(tree: Any, *path: str) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


# ---- client events -----------------------------------------------------------------------------------------------------------


class _Event(Struct, tag_field="type"):
    event_id: str | None = None


class SessionUpdate(_Event, tag="session.update", kw_only=True):
    session: dict[str, Any]


class Append(_Event, tag="input_audio_buffer.append", kw_only=True):
    audio: str  # base64


class Commit(_Event, tag="input_audio_buffer.commit"):
    pass


class Clear(_Event, tag="input_audio_buffer.clear"):
    pass


class ItemCreate(_Event, tag="conversation.item.create", kw_only=True):
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemRetrieve(_Event, tag="conversation.item.retrieve", kw_only=True):
    item_id: str


class ItemDelete(_Event, tag="conversation.item.delete", kw_only=True):
    item_id: str


class ItemTruncate(_Event, tag="conversation.item.truncate", kw_only=True):
    item_id: str
    audio_end_ms: int
    content_index: int = 0


class ResponseCreate(_Event, tag="response.create"):
    response: dict[str, Any] | None = None


class ResponseCancel(_Event, tag="response.cancel"):
    response_id: str | None = None


class OutputClear(_Event, tag="output_audio_buffer.clear"):
    pass


ClientEvent = (
    SessionUpdate
    | Append
    | Commit
    | Clear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | OutputClear
)
EVENT_TYPES = tuple(str(cls.__struct_config__.tag) for cls in ClientEvent.__args__)


class ResponseOutputBody(Struct):
    format: AudioFormat | None = None
    voice: str | VoiceId | None = None


class ResponseAudioBody(Struct):
    output: ResponseOutputBody | None = None


class ResponseBody(Struct):
    """`response` of `response.create`: what differs from the session, for this one."""

    instructions: str | None = None
    output_modalities: Modalities | None = None
    modalities: Modalities | None = None  # beta
    audio: ResponseAudioBody | None = None
    voice: str | VoiceId | None = None  # beta
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Tokens = None
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    conversation: str | None = None
    input: list[dict[str, Any]] | None = None


class ContentBody(Struct):
    type: str
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None


class ItemBody(Struct):
    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system"] | None = None
    content: list[ContentBody] = []
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: str = ""


def parse(frame: str) -> tuple[str | None, ClientEvent]:
    """(the client's event_id, the event). Raises `BadFrame`, which knows the event_id when there was one."""
    try:
        raw = msgspec.json.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise BadFrame(Refused("invalid_json", f"This is not JSON: {error}")) from None
    if not isinstance(raw, dict):
        raise BadFrame(Refused("invalid_json", "An event is a JSON object with a `type`."))
    event_id = raw.get("event_id")
    if event_id is not None and not isinstance(event_id, str):
        raise BadFrame(Refused("invalid_event_id", "`event_id` is a string.", param="event_id"))
    kind = raw.get("type")
    if kind not in EVENT_TYPES:
        code, param = ("missing_required_parameter", "type") if kind is None else ("unknown_event", "type")
        raise BadFrame(Refused(code, f"Unknown event type: {kind!r:.80}. Known are {', '.join(EVENT_TYPES)}.", param=param), event_id)
    try:
        return event_id, convert(raw, ClientEvent)
    except Refused as refused:
        raise BadFrame(refused, event_id) from None


class BadFrame(Exception):
    """A frame that is no event."""

    def __init__(self, refused: Refused, event_id: str | None = None) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.event_id = event_id


def audio_bytes(data: str, param: str) -> bytes:
    """Base64 -> bytes. Raises Refused."""
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("invalid_value", f"`{param}` is not base64: {error}", param=param) from None
    if len(found) > MAX_APPEND_BYTES:
        raise Refused("invalid_value", f"`{param}` holds {len(found)} bytes, expected at most {MAX_APPEND_BYTES}.", param=param)
    return found


def voice_name(voice: str | VoiceId | None) -> str:
    return voice.id if isinstance(voice, VoiceId) else voice or ""


def item_of(body: ItemBody, new_id: str, param: str) -> tuple[Item, str | None]:
    """An item, and the base64 audio that is to be transcribed for it. Raises Refused."""
    item_id = body.id or new_id
    if len(item_id) > MAX_ID_CHARS:
        raise Refused("invalid_value", f"`{param}.id` has {len(item_id)} characters, expected at most {MAX_ID_CHARS}.", param=f"{param}.id")
    if body.type in ("function_call", "function_call_output"):
        return Item(item_id, body.type, name=body.name, call_id=body.call_id, arguments=body.arguments, output=body.output), None
    if body.role is None:
        raise Refused("missing_required_parameter", f"Missing required parameter: '{param}.role'.", param=f"{param}.role")
    parts: list[Part] = []
    audio: str | None = None
    for index, content in enumerate(body.content):
        where = f"{param}.content[{index}]"
        match content.type:
            case "input_text" | "output_text" | "text":
                parts.append(Part("text", content.text or ""))
            case "input_audio" if body.role == "user" and audio is None:
                parts.append(Part("audio", content.transcript))
                audio = content.audio if content.transcript is None else None
                if content.audio is None and content.transcript is None:
                    raise Refused("missing_required_parameter", f"Missing required parameter: '{where}.audio'.", param=f"{where}.audio")
            case _:
                kinds = {"user": "input_text or one input_audio", "assistant": "output_text", "system": "input_text"}[body.role]
                raise Refused("invalid_value", f"'{where}.type': got {content.type!r:.40}, expected {kinds}.", param=f"{where}.type")
    return Item(item_id, "message", body.role, parts), audio


_MISSING = re.compile(r"missing required field `(\w+)`")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")


def convert(value: Any, kind: Any, where: str = "") -> Any:
    """`value` as `kind`. Raises Refused with OpenAI's codes."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        found = _PATH.search(text)
        path = ".".join(filter(None, (where, found.group(1) if found else "")))
        text = _PATH.sub("", text)
        for pattern, code, what in (
            (_MISSING, "missing_required_parameter", "Missing required parameter"),
            (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
        ):
            if match := pattern.search(text):
                param = ".".join(filter(None, (path, match.group(1))))
                raise Refused(code, f"{what}: '{param}'.", param=param) from None
        raise Refused("invalid_value", f"Invalid value for '{path}': {text}.", param=path) from None
