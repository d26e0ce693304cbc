"""POST /v1/audio/speech on real processes with a scripted voice."""

import asyncio
import base64
import io
import json
import os
import signal
import wave

import aiohttp
import numpy as np
import pytest

from gateway.media import CONTENT_TYPES, Decoder
from streamrt import Pipeline

SPEECH = "/v1/audio/speech"
FIVE = "One sentence here. Two sentences here. Three of them now. Four of them now. Five, and the end."


def said(text=FIVE, **more):
    return {"model": "tts-1", "voice": "alloy", "input": text, **more}


def steps(data):
    return np.abs(np.diff(np.frombuffer(data, "<i2").astype(np.float32) / 32768))


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav"])
async def test_every_format_can_be_read_back(http, name):
    async with http.post(SPEECH, json=said(response_format=name)) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == CONTENT_TYPES[name]
        data = await response.read()
    reader = Decoder(data, max_s=60)
    while len(reader.read()):
        pass
    assert 0.5 < reader.duration_s < 2


async def test_a_stream_has_one_header_and_no_click(http):
    async with http.post(SPEECH, json=said(response_format="pcm")) as response:
        pcm = await response.read()
    async with http.post(SPEECH, json=said(response_format="wav")) as response:
        wav = await response.read()
    assert b"RIFF" not in pcm
    assert wav.count(b"RIFF") == 1
    assert wav[44:] == pcm  # the same request twice, in two containers, to the sample
    assert steps(pcm).max() < 0.3 * 2 * np.pi * 440 / 24_000 * 1.05


async def test_a_whole_wav_says_its_length(http):
    async with http.post(SPEECH, json=said(response_format="wav", stream=False)) as response:
        data = await response.read()
    assert int(response.headers["Content-Length"]) == len(data)
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnframes() == (len(data) - 44) // 2


async def test_a_flac_file_says_its_length_unless_it_is_streamed(http):
    import soundfile

    async with http.post(SPEECH, json=said(response_format="flac")) as response:
        samples, rate_hz = soundfile.read(io.BytesIO(await response.read()))
    assert (rate_hz, len(samples) > 12_000) == (24_000, True)


async def test_sse_is_deltas_and_one_done(http):
    async with http.post(SPEECH, json=said(response_format="pcm", stream_format="sse")) as response:
        lines = (await response.read()).split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert all(line == b"" or line.startswith((b"data: ", b":")) for line in lines)
    assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
    assert events[-1]["type"] == "speech.audio.done"
    assert set(events[-1]["usage"]) == {"input_tokens", "output_tokens", "total_tokens"}
    async with http.post(SPEECH, json=said(response_format="pcm")) as response:
        assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == await response.read()


@pytest.mark.parametrize("text", ["", " \n", ".", "…", "👍", "👩‍👩‍👧", "\x00\x07"])
async def test_a_text_without_a_sound_is_a_400(http, text):
    async with http.post(SPEECH, json=said(text)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (said("x" * 4097), 400, "too_long"),
        (said("x" * 1_000_000), 400, "too_long"),
        (said(voice="nobody"), 400, "unknown_voice"),
        (said(model="gpt-4o"), 404, "model_not_found"),
        (said(speed=9), 400, "bad_request"),
        (said(response_format="ogg"), 400, "bad_request"),
        (said(instructions="Whisper."), 400, "bad_request"),
        ({"model": "tts-1"}, 400, "bad_request"),
    ],
    ids=range(8),
)
async def test_what_can_not_be_said_is_refused(http, body, status, code):
    async with http.post(SPEECH, json=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_voices_are_listed(http):
    async with http.get("/v1/audio/voices") as response:
        body = await response.json()
    assert {"tone", "tone-500"} <= {voice["id"] for voice in body["data"]}
    assert body["default"] == "tone"


async def test_requests_at_once_each_get_their_own_voice(http):
    async def pitch_hz(hz):
        async with http.post(SPEECH, json=said(voice=f"tone-{hz}", response_format="pcm")) as response:
            samples = np.frombuffer(await response.read(), "<i2").astype(np.float32)
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
        strongest = float(np.argmax(spectrum) * 24_000 / len(samples))
        return strongest, float(
            np.sum(spectrum**2 * (np.abs(np.arange(len(spectrum)) * 24_000 / len(samples) - hz) > 50)) / np.sum(spectrum**2)
        )

    voices = [200, 300, 400, 500, 600, 700, 800, 900]
    for hz, (strongest, rest) in zip(voices, await asyncio.gather(*map(pitch_hz, voices)), strict=True):
        assert abs(strongest - hz) < 5
        assert rest < 0.01  # of the energy is anywhere else


async def test_a_voice_that_dies_while_it_speaks_cuts_the_file_off(run_folders, tmp_path):
    path = tmp_path / "pipeline.toml"
    path.write_text(
        '[pipeline]\nname = "dies"\n[gateway]\nport = 0\n[[stage]]\nname = "tts"\nuse = "testing.tone"\n[stage.args]\npace = 1.0\n'
    )
    with Pipeline(path, gateway=True) as running:
        async with aiohttp.ClientSession(running.url) as session, session.post(SPEECH, json=said(response_format="pcm")) as response:
            assert await response.content.readany()
            os.kill(next(replica.pid for replica in running.client.table.replicas), signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                async with asyncio.timeout(2):
                    await response.read()
