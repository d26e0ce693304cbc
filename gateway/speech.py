"""POST /v1/audio/speech and GET /v1/audio/voices: text -> audio, through the `speak` task.

Source: https://platform.openai.com/docs/api-reference/audio/createSpeech
"""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateway import media, models, schema, sse, streaming
from gateway.limits import read_body
from gateway.media import CONTENT_TYPES, Base64Pieces, MediaPool
from gateway.schema import SpeechBody
from gateway.state import CLIENT, CONFIG, MEDIA
from streamrt import text_chunk
from streamrt.errors import BadRequest, TooLong

if TYPE_CHECKING:
    from streamrt import Call

NOTHING_TO_SAY = "input: there is nothing to say in this text"


async def speech(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/speech"""
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    body = schema.decode(await read_body(request), SpeechBody)
    models.check_model(client, "speak", body.model)
    voice = models.check_voice(client, "speak", schema.voice_name(body.voice))
    check_input(body, config.max_input_chars)
    params = {"voice": voice, "speed": body.speed, "language": body.language}
    call = await client.submit("speak", params, [text_chunk(body.input)], outputs={"audio"}, timeout_s=config.request_timeout_s)
    if body.stream_format == "sse":
        return await streaming.event_response(request, speech_events(call, body.response_format, pool))
    # A FLAC file that does not say its length can not be read by libsndfile, so it comes whole unless a stream is asked for.
    whole = body.stream is False or (body.stream is None and body.response_format == "flac")
    pieces = encoded(call, body.response_format, pool, whole=whole)
    if not whole:
        return await streaming.byte_response(request, pieces, CONTENT_TYPES[body.response_format])
    async with aclosing(pieces):
        data = b"".join([piece async for piece in pieces])
    return web.Response(body=data, content_type=CONTENT_TYPES[body.response_format])


async def list_voices(request: web.Request) -> web.Response:
    """GET /v1/audio/voices"""
    client = request.app[CLIENT]
    models.check_task(client, "speak")
    voices = models.voices(client, "speak")
    data = [{"id": voice, "object": "voice", "name": voice} for voice in voices]
    return web.json_response({"object": "list", "data": data, "default": models.default_voice(client, "speak")})


def check_input(body: SpeechBody, max_chars: int) -> None:
    """Raise BadRequest, TooLong for a text that costs a stage time for nothing."""
    if len(body.input) > max_chars:
        raise TooLong(f"input: got {len(body.input)} characters, expected at most {max_chars}", hint="send it in parts", param="input")
    if not is_sayable(body.input):
        raise BadRequest(NOTHING_TO_SAY, hint="it has no letter and no number", param="input")
    if body.instructions and body.instructions.strip():
        raise BadRequest(
            "instructions: no voice of this pipeline follows instructions", hint="leave instructions out", param="instructions"
        )


def is_sayable(text: str) -> bool:
    """Whether there is a letter, a number or a currency sign; punctuation, emoji and control characters have no sound."""
    return any(unicodedata.category(char)[0] in "LN" or unicodedata.category(char) == "Sc" for char in text)


async def encoded(call: Call, audio_format: str, pool: MediaPool, *, whole: bool = False) -> AsyncGenerator[bytes, None]:
    """The call's audio in a container, piece by piece. Raises BadRequest when the call has none."""
    encoder: media.Encoder | None = None
    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            if chunk.modality != "audio" or not len(chunk.samples):
                continue
            if encoder is None:
                encoder = await pool.run(media.encoder, audio_format, chunk.sample_rate_hz, whole)
            if piece := await pool.run(encoder.encode, chunk.samples):
                yield piece
    if encoder is None:
        raise BadRequest(NOTHING_TO_SAY, param="input")
    yield await pool.run(encoder.finish)


async def speech_events(call: Call, audio_format: str, pool: MediaPool) -> AsyncGenerator[bytes, None]:
    """`speech.audio.delta` events and one `speech.audio.done`."""
    base64 = Base64Pieces()
    async with aclosing(encoded(call, audio_format, pool)) as pieces:
        async for piece in pieces:
            if audio := base64.feed(piece):
                yield sse.data(delta(audio))
    if audio := base64.finish():
        yield sse.data(delta(audio))
    # Speaking stages count no tokens.
    yield sse.data({"type": "speech.audio.done", "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}})


def delta(audio: str) -> dict[str, Any]:
    return {"type": "speech.audio.delta", "audio": audio}
