"""/v1/audio/generate on real processes with a scripted synthesizer."""

import asyncio
import io

import av
import numpy as np
import pytest

from gateway.media import CONTENT_TYPES

GENERATE = "/v1/audio/generate"


def strongest_hz(samples, rate_hz):
    return float(np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * rate_hz / len(samples))


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "opus", "aac"])
async def test_every_format_has_both_channels(studio_http, name):
    async with studio_http.post(GENERATE, json={"input": "a bell", "audio_length": 2, "response_format": name}) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, CONTENT_TYPES[name])
        data = await response.read()
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        assert stream.codec_context.channels == 2
        resampler = av.AudioResampler(format="fltp", layout="stereo", rate=stream.rate)
        planes = [piece.to_ndarray() for frame in container.decode(stream) for piece in resampler.resample(frame)]
    left, right = np.concatenate(planes, axis=1)
    assert 1.9 < len(left) / stream.rate < 2.2
    assert abs(strongest_hz(left, stream.rate) - 440) < 3
    assert abs(strongest_hz(right, stream.rate) - 660) < 3


async def test_pcm_is_mono_at_24_khz(studio_http):
    async with studio_http.post(GENERATE, json={"input": "a bell", "audio_length": 1, "response_format": "pcm"}) as response:
        assert len(await response.read()) == 24_000 * 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"audio_length": 31}, "audio_length"),
        ({"audio_length": 0}, "audio_length"),
        ({"num_inference_steps": 1000}, "num_inference_steps"),
        ({"input": ""}, "input"),
        ({"input": "x" * 32_001}, "input"),
        ({"response_format": "midi"}, "response_format"),
        ({"voice": "alloy"}, "voice"),
    ],
    ids=str,
)
async def test_what_can_not_be_made_is_a_400(studio_http, body, param):
    async with studio_http.post(GENERATE, json={"input": "a bell", **body}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)


async def test_a_client_that_goes_away_ends_the_work(studio_http, work_of):
    asking = asyncio.create_task(studio_http.post(GENERATE, json={"input": "20 ms", "num_inference_steps": 100}))
    await work_of("synth", running=1)
    asking.cancel()
    async with asyncio.timeout(1):  # the work would take 2 s
        await work_of("synth", running=0)
