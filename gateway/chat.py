"""POST /v1/chat/completions: messages -> text, and audio when the pipeline speaks, through the `respond` task.

Source: https://platform.openai.com/docs/api-reference/chat and /chat-streaming
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateway import media, models, schema, sse, streaming
from gateway.choices import Ending, Message, call_delta, chat_logprobs, ends_choice, index_of
from gateway.limits import read_body
from gateway.media import Base64Pieces, MediaPool
from gateway.schema import ChatBody, ChatMessage, ContentPart, TextBody
from gateway.state import CLIENT, CONFIG, MEDIA
from gateway.transcriptions import open_audio, transcribe
from streamrt import text_chunk
from streamrt.errors import BadRequest, TooLong

if TYPE_CHECKING:
    from streamrt import Call

# Passed on by these names when they are there; a stage that does not honour one has been asked for its neutral value only.
TEXT_PARAMS = (
    "n", "logit_bias", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids",
    "ignore_eos", "regex", "grammar",
)  # fmt: skip
CHAT_PARAMS = ("tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "response_format")


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    # 1. What is wrong with it, before any stage hears of it.
    body = schema.decode(await read_body(request), ChatBody)
    model = models.check_model(client, "respond", body.model)
    schema.refuse_unsupported(body, models.honoured(client, "respond"))
    spoken = "audio" in (body.modalities or ())
    if spoken and not models.speaker(client, "respond"):
        raise BadRequest('modalities: got "audio", but this pipeline answers with text only', param="modalities")
    if spoken and body.audio is None:
        raise BadRequest(
            'audio: missing, and needed for modalities with "audio"', hint='"audio": {"voice": ..., "format": ...}', param="audio"
        )
    if spoken and (body.n or 1) > 1:
        raise BadRequest(f"n: got {body.n}, but one answer can be spoken at a time", param="n")
    voice = models.check_voice(client, "respond", schema.voice_name(body.audio.voice), "audio.voice") if spoken and body.audio else None
    # 2. What it says.
    messages = [await _message(request, index, message) for index, message in enumerate(body.messages)]
    if (chars := sum(len(message["content"]) for message in messages)) > config.max_prompt_chars:
        raise TooLong(f"messages: got {chars} characters, expected at most {config.max_prompt_chars}", param="messages")
    # 3. Ask.
    outputs = {"text", "audio"} if spoken else {"text"}
    said = next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])
    call = await client.submit(
        "respond", params_of(body, messages, voice), [text_chunk(said)], outputs=outputs, timeout_s=config.request_timeout_s
    )
    # 4. Answer.
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    audio_format = body.audio.format if spoken and body.audio else ""
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return await streaming.event_response(request, chunk_events(call, head, audio_format, pool, has_usage, body.n or 1))
    answer = await completion(call, head, audio_format, pool, body.n or 1)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def params_of(body: ChatBody, messages: list[dict[str, Any]], voice: str | None) -> dict[str, Any]:
    """The parameters of `respond`; see streamrt/stage.py."""
    return {
        **text_params(body),
        "messages": messages,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "voice": voice,
        "modalities": body.modalities or ["text"],
        **{name: msgspec.to_builtins(getattr(body, name)) for name in CHAT_PARAMS if getattr(body, name) is not None},
    }


def text_params(body: TextBody) -> dict[str, Any]:
    """Those that chat and completions share."""
    return {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        **{name: getattr(body, name) for name in TEXT_PARAMS if getattr(body, name) is not None},
    }


async def completion(call: Call, head: dict[str, Any], audio_format: str, pool: MediaPool, n: int = 1) -> dict[str, Any]:
    """The whole answer as one `chat.completion` of `n` choices."""
    ending, messages, pieces = Ending(), [Message() for _ in range(n)], []
    encoder: media.Encoder | None = None
    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            ending.note(chunk)
            if chunk.modality == "text":
                messages[index_of(chunk)].add(chunk)
            elif chunk.modality == "audio" and audio_format and len(chunk.samples):
                if encoder is None:
                    encoder = await pool.run(media.encoder, audio_format, chunk.sample_rate_hz, True)
                pieces.append(await pool.run(encoder.encode, chunk.samples))
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": message.as_dict(),
            "logprobs": chat_logprobs(message.entries) if message.entries else None,
            "finish_reason": ending.finish_reason(index),
        }
        for index, message in enumerate(messages)
    ]
    if audio_format:
        pieces.append(await pool.run(encoder.finish) if encoder else b"")
        data = base64.b64encode(b"".join(pieces)).decode()
        # Replies are not kept, so the id can not be referred to later: it has expired already.
        audio = {"id": _audio_id(head), "data": data, "expires_at": head["created"], "transcript": messages[0].text}
        choices[0]["message"] |= {"content": None, "audio": audio}
    return {**head, "object": "chat.completion", "choices": choices, "usage": ending.usage}


async def chunk_events(
    call: Call, head: dict[str, Any], audio_format: str, pool: MediaPool, has_usage: bool, n: int = 1
) -> AsyncGenerator[bytes, None]:
    """The answer as `chat.completion.chunk` events and [DONE]. Nothing comes before the stage's first chunk, so that an error
    that precedes it has a status of its own."""
    ending, pieces, begun, open_choices = Ending(), Base64Pieces(), False, set(range(n))
    encoder: media.Encoder | None = None

    def event(delta: dict[str, Any], finish_reason: str | None = None, *, index: int = 0, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.data({**head, "object": "chat.completion.chunk", "choices": [choice], **({"usage": None} if has_usage else {})})

    def beginning() -> Iterator[bytes]:
        for index in range(n):
            yield event({"role": "assistant", "content": None if audio_format else ""}, index=index)

    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            ending.note(chunk)
            if not begun:
                begun = True
                for piece in beginning():
                    yield piece
                if audio_format:
                    yield event({"audio": {"id": _audio_id(head)}})
            if chunk.modality == "text":
                delta: dict[str, Any] = {}
                if chunk.text:
                    delta = {"audio": {"transcript": chunk.text}} if audio_format else {"content": chunk.text}
                if calls := call_delta(chunk):
                    delta["tool_calls"] = calls
                entries = chunk.meta.get("logprobs")
                if delta or entries:
                    yield event(delta, index=index_of(chunk), logprobs=chat_logprobs(entries) if entries else None)
                if ends_choice(chunk):
                    open_choices.discard(index_of(chunk))
                    yield event({}, ending.finish_reason(index_of(chunk)), index=index_of(chunk))
            elif chunk.modality == "audio" and audio_format and len(chunk.samples):
                if encoder is None:
                    encoder = await pool.run(media.encoder, audio_format, chunk.sample_rate_hz)
                if data := pieces.feed(await pool.run(encoder.encode, chunk.samples)):
                    yield event({"audio": {"data": data}})
    if not begun:
        for piece in beginning():
            yield piece
    if encoder is not None:
        data = pieces.feed(await pool.run(encoder.finish)) + pieces.finish()
        if data:
            yield event({"audio": {"data": data}})
    if audio_format:
        yield event({"audio": {"expires_at": head["created"]}})
    for index in sorted(open_choices):
        yield event({}, ending.finish_reason(index), index=index)
    if has_usage:
        yield sse.data({**head, "object": "chat.completion.chunk", "choices": [], "usage": ending.usage})
    yield sse.DONE


async def _message(request: web.Request, index: int, message: ChatMessage) -> dict[str, Any]:
    """One message as the stages know it: its content is text. Raises BadRequest that names the part."""
    where = f"messages[{index}]"
    if message.audio is not None and message.content is None:
        raise BadRequest(
            f"{where}.audio: earlier replies are not kept", hint="send the reply's transcript as content", param=f"{where}.audio"
        )
    parts = message.content if isinstance(message.content, list) else [ContentPart("text", message.content or message.refusal or "")]
    text = "".join([await _part(request, f"{where}.content[{n}]", part) for n, part in enumerate(parts)])
    known: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": message.tool_calls}
    return known | {name: value for name, value in more.items() if value}


async def _part(request: web.Request, where: str, part: ContentPart) -> str:
    """The text of one part; audio is transcribed."""
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "input_audio" and part.input_audio is not None:
        return await _hear(request, f"{where}.input_audio.data", part.input_audio.data)
    if part.type in ("text", "refusal", "input_audio"):
        raise BadRequest(f'{where}.{part.type}: missing in a part of type "{part.type}"', param=f"{where}.{part.type}")
    raise BadRequest(f'{where}: got a part of type "{part.type}", expected "text" or "input_audio"', param=where)


async def _hear(request: web.Request, where: str, data: str) -> str:
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    if "transcribe" not in client.tasks():
        raise BadRequest(f"{where}: this pipeline does not understand audio", hint="send text", param=where)
    try:
        audio = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadRequest(
            f"{where}: got no base64 ({error})", hint="send the file's bytes as base64, not a data: URL", param=where
        ) from None
    decoder, first = await open_audio(audio, pool, max_s=config.max_audio_s, param=where)
    async with aclosing(transcribe(client, {}, decoder, first, pool, timeout_s=config.request_timeout_s)) as chunks:
        return "".join([chunk.text async for chunk in chunks]).strip()


def _audio_id(head: dict[str, Any]) -> str:
    return str(head["id"]).replace("chatcmpl-", "audio_")
