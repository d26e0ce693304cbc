"""POST /v1/audio/transcriptions: any audio file -> text, through the `transcribe` task.

The file is decoded block by block while the stage already listens, so an hour of opus never lies in memory as samples. Its first
block is decoded before anything is submitted: what can not be read costs the stages nothing.

Source: https://platform.openai.com/docs/api-reference/audio/createTranscription
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from gateway import models, schema, sse, streaming
from gateway.forms import read_form
from gateway.media import Decoder, MediaPool
from gateway.schema import TranscriptionForm
from gateway.state import CLIENT, CONFIG, MEDIA
from streamrt import audio_chunk
from streamrt.errors import BadRequest, StreamrtError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from streamrt import Call, Chunk, Client

TEXT_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


class Segment(NamedTuple):
    """One stretch of speech, as the stage tells it."""

    text: str
    start_s: float
    end_s: float
    meta: dict[str, Any]


async def transcriptions(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/transcriptions"""
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    sent = await read_form(request, files=("file",))
    data, form = sent.file("file", "send the audio as the form field 'file'"), schema.convert_form(sent.fields, TranscriptionForm)
    models.check_model(client, "transcribe", form.model)
    if form.chunking_strategy not in (None, "auto"):
        raise BadRequest(f'chunking_strategy: got "{form.chunking_strategy}", expected "auto"', param="chunking_strategy")
    params = {
        "language": form.language,
        "prompt": form.prompt,
        "temperature": form.temperature,
        "timestamps": "word" in form.timestamp_granularities,  # segments have times anyway
    }
    decoder, first = await open_audio(data, pool, max_s=config.max_audio_s, param="file")
    heard = transcribe(client, params, decoder, first, pool, timeout_s=config.request_timeout_s)
    if form.stream:
        return await streaming.event_response(request, transcript_events(heard))
    async with aclosing(heard):
        chunks = [chunk async for chunk in heard]
    segments = segments_of(chunks, decoder.duration_s)
    language = next((chunk.meta["language"] for chunk in chunks if chunk.meta.get("language")), form.language)
    return whole(form, segments, decoder.duration_s, language)


async def open_audio(data: bytes, pool: MediaPool, *, max_s: float, param: str) -> tuple[Decoder, np.ndarray]:
    """A decoder for `data` and its first block. Raises BadRequest for what is not audio, or has none in it."""
    decoder = await pool.run(lambda: Decoder(data, max_s=max_s, param=param))
    first = await pool.run(decoder.read)
    if not len(first):
        raise BadRequest(f"{param}: there is no audio in this file", param=param)
    return decoder, first


async def transcribe(
    client: Client, params: dict[str, Any], decoder: Decoder, first: np.ndarray, pool: MediaPool, *, timeout_s: float
) -> AsyncGenerator[Chunk, None]:
    """The text chunks of what `decoder` reads, while it reads. Raises BadRequest for a file that breaks off in the middle."""
    call = await client.submit("transcribe", params, outputs={"text"}, timeout_s=timeout_s)
    feeding = asyncio.create_task(_feed(call, decoder, first, pool), name="transcription.feed")
    try:
        async with aclosing(streaming.chunks_of(call)) as chunks:
            async for chunk in chunks:
                if chunk.modality == "text" and not chunk.meta.get("provisional"):
                    yield chunk
    except StreamrtError:
        await asyncio.wait([feeding])
        if broken := feeding.exception():
            raise broken from None  # most often the file, and the call was ended for it
        raise
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(call: Call, decoder: Decoder, block: np.ndarray, pool: MediaPool) -> None:
    try:
        while len(block):
            await call.feed(audio_chunk(block, decoder.rate_hz))
            block = await pool.run(decoder.read)
        await call.end()
    except Exception:  # whatever it was: a call whose input has stopped must not wait for its deadline
        call.cancel("bad_input")
        raise


async def transcript_events(heard: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
    """`transcript.text.delta` events and one `transcript.text.done`. The deltas, joined, are the text."""
    text = ""
    async with aclosing(heard):
        async for chunk in heard:
            piece = chunk.text if text else chunk.text.lstrip()
            if piece:
                text += piece
                yield sse.data({"type": "transcript.text.delta", "delta": piece})
    yield sse.data({"type": "transcript.text.done", "text": text})


def segments_of(chunks: Iterable[Chunk], duration_s: float) -> list[Segment]:
    """The segments; one without times begins where the one before ended, and lasts to the end of the audio."""
    segments: list[Segment] = []
    for chunk in chunks:
        if chunk.text:
            start_s = float(chunk.meta.get("start_s", segments[-1].end_s if segments else 0.0))
            segments.append(Segment(chunk.text, start_s, float(chunk.meta.get("end_s", duration_s)), chunk.meta))
    return segments


def whole(form: TranscriptionForm, segments: list[Segment], duration_s: float, language: str | None) -> web.Response:
    """The answer in the format that was asked for."""
    text = "".join(segment.text for segment in segments).strip()
    if form.response_format in TEXT_TYPES:
        body = {"text": lambda: f"{text}\n", "srt": lambda: srt(segments), "vtt": lambda: vtt(segments)}[form.response_format]()
        return web.Response(text=body, content_type=TEXT_TYPES[form.response_format], charset="utf-8")
    answer: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": math.ceil(duration_s)}}
    if form.response_format == "verbose_json":
        answer |= {"task": "transcribe", "language": language or "", "duration": round(duration_s, 3)}
        answer["segments"] = [verbose(index, segment) for index, segment in enumerate(segments)]
        if "word" in form.timestamp_granularities:
            answer["words"] = [word for segment in segments for word in segment.meta.get("words", ())]
    return web.json_response(answer)


def verbose(index: int, segment: Segment) -> dict[str, Any]:
    """OpenAI's segment; figures that the stage does not tell are 0."""
    meta = segment.meta
    return {
        "id": index,
        "seek": 0,
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": meta.get("tokens", []),
        "temperature": meta.get("temperature", 0.0),
        "avg_logprob": meta.get("avg_logprob", 0.0),
        "compression_ratio": meta.get("compression_ratio", 0.0),
        "no_speech_prob": meta.get("no_speech_prob", 0.0),
    }


def srt(segments: list[Segment]) -> str:
    cues = (f"{n}\n{clock(s.start_s, ',')} --> {clock(s.end_s, ',')}\n{s.text.strip()}\n" for n, s in enumerate(segments, 1))
    return "\n".join(cues)


def vtt(segments: list[Segment]) -> str:
    return "\n".join(["WEBVTT\n", *(f"{clock(s.start_s, '.')} --> {clock(s.end_s, '.')}\n{s.text.strip()}\n" for s in segments)])


def clock(seconds: float, point: str) -> str:
    """90.5 -> "00:01:30,500"."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
