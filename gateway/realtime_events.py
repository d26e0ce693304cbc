"""What a session says -> the frames of `/v1/realtime`, in OpenAI's GA names and order. Pure, but for ids and encoders.

Knows the protocol's objects (session, item, response, error) and nothing of sockets.

Rules
- Every frame has an `event_id`. Names, enums and required fields are those that openai-agents' strict parser checks.
- What an answer has opened (item, part) is closed before its `response.done`, however it ends.

Source: https://platform.openai.com/docs/api-reference/realtime-server-events
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.pcm import WireEncoder
from streamrt import session as s
from streamrt.conversation import TurnTimings
from streamrt.session import random_id

Frame = dict[str, Any]

SERVER_CODES = {"overloaded", "unavailable", "stage_failed", "expired", "session_expired", "session_idle", "internal"}


class Frames:
    """The frames of one session. Holds one encoder per answer that speaks."""

    def __init__(self, audio_format: Frame, *, tells_timings: bool = False) -> None:
        self.audio_format = audio_format  # of answers that begin from now on
        self.conversation_id = random_id("conv")
        self._tells_timings = tells_timings
        self._formats: dict[str, Frame] = {}  # response id -> its format
        self._encoders: dict[str, WireEncoder] = {}
        self._outputs: dict[str, dict[str, str | None]] = {}  # response id -> its items in order, each with the one before it

    def of(self, event: Any) -> Iterator[Frame]:
        """The frames that tell `event`: one of the session's, `TurnTimings`, or a frame as it stands."""
        for frame in self._frames(event):
            yield {"type": frame["type"], "event_id": random_id("event"), **frame}

    def _frames(self, event: Any) -> Iterator[Frame]:
        match event:
            case dict():
                yield event
            case s.SpeechStarted(item_id, at_ms):
                yield {"type": "input_audio_buffer.speech_started", "audio_start_ms": at_ms, "item_id": item_id}
            case s.SpeechStopped(item_id, at_ms):
                yield {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": at_ms, "item_id": item_id}
            case s.Committed(item_id, previous_id):
                yield {"type": "input_audio_buffer.committed", "item_id": item_id, "previous_item_id": previous_id}
            case s.Cleared():
                yield {"type": "input_audio_buffer.cleared"}
            case s.ItemAdded(item, previous_id):
                yield {"type": "conversation.item.added", "item": item_object(item), "previous_item_id": previous_id}
            case s.ItemDone(item, previous_id):
                yield {"type": "conversation.item.done", "item": item_object(item), "previous_item_id": previous_id}
            case s.ItemRetrieved(item):
                yield {"type": "conversation.item.retrieved", "item": item_object(item)}
            case s.ItemDeleted(item_id):
                yield {"type": "conversation.item.deleted", "item_id": item_id}
            case s.ItemTruncated(item_id, audio_end_ms):
                yield {"type": "conversation.item.truncated", "item_id": item_id, "content_index": 0, "audio_end_ms": audio_end_ms}
            case s.TranscriptDelta(item_id, text):
                yield {"type": "conversation.item.input_audio_transcription.delta", "item_id": item_id, "content_index": 0, "delta": text}
            case s.TranscriptDone(item_id, text, audio_s):
                usage = {"type": "duration", "seconds": round(audio_s, 3)}
                completed = "conversation.item.input_audio_transcription.completed"
                yield {"type": completed, "item_id": item_id, "content_index": 0, "transcript": text, "usage": usage}
            case s.TranscriptFailed(item_id, code, message):
                error = {"type": error_type(code), "code": code, "message": message, "param": None}
                yield {"type": "conversation.item.input_audio_transcription.failed", "item_id": item_id, "content_index": 0, "error": error}
            case s.ResponseStarted(response):
                self._formats[response.id] = self.audio_format
                yield {"type": "response.created", "response": self.response_object(response)}
            case s.OutputStarted(response, previous_id):
                yield from self._output_started(response, previous_id)
            case s.TextDelta(response_id, item_id, modality, text):
                kind = "response.output_audio_transcript.delta" if modality == "audio" else "response.output_text.delta"
                yield {"type": kind, **self._place(response_id, item_id), "delta": text}
            case s.AudioDelta(response_id, item_id, samples, rate_hz):
                encoder = self._encoders.get(response_id)
                if encoder is None:
                    encoder = self._encoders[response_id] = WireEncoder(self._formats[response_id]["type"], rate_hz)
                yield from _audio_delta(self._place(response_id, item_id), encoder.feed(samples))
            case s.CallStarted(response, item, previous_id):
                yield from self._item_added(response, item_object(item), previous_id)
            case s.CallDelta(response_id, item_id, call_id, arguments):
                place = self._output_place(response_id, item_id)
                yield {"type": "response.function_call_arguments.delta", **place, "call_id": call_id, "delta": arguments}
            case s.ResponseEnded(response, previous_id):
                yield from self._response_ended(response, previous_id)
            case s.Problem(code, message):
                yield error_frame(s.Refused(code, message))
            case TurnTimings():
                if self._tells_timings:
                    yield {"type": "streamrt.turn_timings", **msgspec.to_builtins(event), "work_ms": event.work_ms}
            case _:
                raise TypeError(f"no frame tells {event!r:.80}")

    def _output_started(self, response: s.Response, previous_id: str | None) -> Iterator[Frame]:
        assert response.item is not None
        yield from self._item_added(response, {**item_object(response.item), "content": []}, previous_id)
        part = {"type": "audio", "transcript": ""} if response.item.parts[0].kind == "audio" else {"type": "text", "text": ""}
        yield {"type": "response.content_part.added", **self._place(response.id, response.item.id), "part": part}

    def _item_added(self, response: s.Response, item: Frame, previous_id: str | None) -> Iterator[Frame]:
        outputs = self._outputs.setdefault(response.id, {})
        yield {"type": "response.output_item.added", "response_id": response.id, "output_index": len(outputs), "item": item}
        outputs[item["id"]] = previous_id
        if response.in_conversation:
            yield {"type": "conversation.item.added", "item": item, "previous_item_id": previous_id}

    def _item_done(self, response: s.Response, item: s.Item, previous_id: str | None) -> Iterator[Frame]:
        told = item_object(item)
        place = self._output_place(response.id, item.id)
        yield {"type": "response.output_item.done", "response_id": response.id, "output_index": place["output_index"], "item": told}
        if response.in_conversation:
            yield {"type": "conversation.item.done", "item": told, "previous_item_id": previous_id}

    def _response_ended(self, response: s.Response, previous_id: str | None) -> Iterator[Frame]:
        encoder = self._encoders.pop(response.id, None)
        item = response.item
        if item is not None:
            place, text = self._place(response.id, item.id), item.text
            if item.parts[0].kind == "audio":
                if encoder is not None and response.status != "cancelled":
                    yield from _audio_delta(place, encoder.finish())
                yield {"type": "response.output_audio.done", **place}
                yield {"type": "response.output_audio_transcript.done", **place, "transcript": text}
                part = {"type": "audio", "transcript": text}
            else:
                yield {"type": "response.output_text.done", **place, "text": text}
                part = {"type": "text", "text": text}
            yield {"type": "response.content_part.done", **place, "part": part}
            yield from self._item_done(response, item, previous_id)
        for call in response.calls:
            place = self._output_place(response.id, call.id)
            done = "response.function_call_arguments.done"
            yield {"type": done, **place, "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            yield from self._item_done(response, call, self._outputs[response.id][call.id])
        yield {"type": "response.done", "response": self.response_object(response)}
        self._formats.pop(response.id, None)
        self._outputs.pop(response.id, None)

    def _output_place(self, response_id: str, item_id: str) -> Frame:
        return {"response_id": response_id, "item_id": item_id, "output_index": list(self._outputs[response_id]).index(item_id)}

    def _place(self, response_id: str, item_id: str) -> Frame:
        return {**self._output_place(response_id, item_id), "content_index": 0}

    def response_object(self, response: s.Response) -> Frame:
        details: Frame | None
        match response.status:
            case "cancelled":
                details = {"type": "cancelled", "reason": response.reason}
            case "incomplete":
                details = {"type": "incomplete", "reason": response.reason}
            case "failed":
                error = {"type": error_type(response.reason), "code": response.reason, "message": response.message}
                details = {"type": "failed", "error": error}
            case _:
                details = None
        settings = response.settings
        shown = {
            "object": "realtime.response",
            "id": response.id,
            "status": response.status,
            "status_details": details,
            "output": [item_object(item) for item in self._items_of(response)] if response.status != "in_progress" else [],
            "conversation_id": self.conversation_id if response.in_conversation else None,
            "output_modalities": [settings.modality],
            "max_output_tokens": settings.max_tokens if settings.max_tokens is not None else "inf",
            "metadata": response.metadata,
            "usage": None if response.status == "in_progress" else usage_object(response.usage),
        }
        if settings.modality == "audio":
            shown["audio"] = {"output": {"format": self._formats.get(response.id, self.audio_format), "voice": settings.voice or None}}
        return shown

    def _items_of(self, response: s.Response) -> list[s.Item]:
        """What it has put out, in order."""
        items = [*([response.item] if response.item is not None else []), *response.calls]
        return sorted(items, key=lambda item: list(self._outputs[response.id]).index(item.id))


def item_object(item: s.Item) -> Frame:
    shown: Frame = {"id": item.id, "object": "realtime.item", "type": item.kind, "status": item.status}
    if item.kind == "function_call":
        return {**shown, "name": item.name, "call_id": item.call_id, "arguments": item.arguments}
    if item.kind == "function_call_output":
        return {**shown, "call_id": item.call_id, "output": item.output}
    side = "output" if item.role == "assistant" else "input"
    content = [{"type": f"{side}_{part.kind}", "transcript" if part.kind == "audio" else "text": part.text} for part in item.parts]
    return {**shown, "role": item.role, "content": content}


def usage_object(usage: dict[str, int]) -> Frame:
    given, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "total_tokens": given + made,
        "input_tokens": given,
        "output_tokens": made,
        "input_token_details": {"text_tokens": given, "audio_tokens": 0, "cached_tokens": 0},
        "output_token_details": {"text_tokens": made, "audio_tokens": 0},
    }


def error_type(code: str) -> str:
    return "server_error" if code in SERVER_CODES else "invalid_request_error"


def error_frame(refused: s.Refused, event_id: str | None = None) -> Frame:
    """`event_id` is the client's own, of the event that went wrong."""
    error = {
        "type": error_type(refused.code),
        "code": refused.code,
        "message": refused.message,
        "param": refused.param or None,
        "event_id": event_id,
    }
    return {"type": "error", "error": error}


def _audio_delta(place: Frame, data: bytes) -> Iterator[Frame]:
    if data:
        yield {"type": "response.output_audio.delta", **place, "delta": base64.b64encode(data).decode()}
