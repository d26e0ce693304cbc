"""POST /v1/audio/generate: a description -> sound or music, through the `audio` task.

Source: the parameters of https://docs.vllm.ai/projects/vllm-omni/en/stable/serving/audio_generate_api/; OpenAI has no such call.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from gateway import generation, media, models, schema, streaming
from gateway.limits import read_body
from gateway.media import CONTENT_TYPES, MediaPool
from gateway.schema import SoundBody
from gateway.state import CLIENT, CONFIG, MEDIA
from streamrt.errors import StageFailed

if TYPE_CHECKING:
    from streamrt import Call

CALLED = {"prompt": "input", "seconds": "audio_length"}


async def generate(request: web.Request) -> web.Response:
    """POST /v1/audio/generate"""
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    body = schema.decode(await read_body(request), SoundBody)
    models.check_model(client, "audio", body.model or "")
    params = generation.params_of(body, body.input, generation.facts_of(client, "audio"), CALLED, seconds=body.audio_length)
    call = await client.submit("audio", params, [], outputs={"audio"}, timeout_s=config.request_timeout_s)
    data = await heard(call, body.response_format, pool)
    return web.Response(body=data, content_type=CONTENT_TYPES[body.response_format])


async def heard(call: Call, audio_format: str, pool: MediaPool) -> bytes:
    """The call's sound as a file, in stereo where the stage gives two channels. It is made in one piece, so the file is whole.

    Raises StageFailed when there is none.
    """
    encoder: media.Encoder | None = None
    pieces: list[bytes] = []
    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            if chunk.modality != "audio" or not len(chunk.samples):
                continue
            planes = chunk.tensors.get("channels", chunk.samples[None])
            samples = planes if len(planes) == 2 and audio_format != "pcm" else chunk.samples  # no header says how many pcm has
            if encoder is None:
                encoder = await pool.run(media.encoder, audio_format, chunk.sample_rate_hz, True, samples.ndim)
            pieces.append(await pool.run(encoder.encode, samples))
    if encoder is None:
        raise StageFailed("the stage gave no sound")
    pieces.append(await pool.run(encoder.finish))
    return b"".join(pieces)
