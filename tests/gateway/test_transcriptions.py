"""POST /v1/audio/transcriptions on real processes with a scripted ear, which tells how many samples it heard."""

import json
import re

import aiohttp
import numpy as np
import pytest

from gateway.media import encoder

URL = "/v1/audio/transcriptions"


def sound(name="wav", seconds=1.5, rate_hz=24_000, whole=True):
    writer = encoder(name, rate_hz, whole)
    return writer.encode((0.3 * np.sin(np.arange(int(seconds * rate_hz)) * 0.1)).astype(np.float32)) + writer.finish()


def form(data, **fields):
    body = aiohttp.FormData()
    body.add_field("file", data, filename="audio.bin")
    for name, value in {"model": "whisper-1", **fields}.items():
        body.add_field(name, value)
    return body


async def test_json_is_the_text(http):
    async with http.post(URL, data=form(sound())) as response:
        body = await response.json()
    assert body["text"] == "I heard 36000 samples."
    assert body["usage"] == {"type": "duration", "seconds": 2}


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "opus", "aac"])
@pytest.mark.parametrize("whole", [True, False])
async def test_every_container_is_heard(http, name, whole):
    async with http.post(URL, data=form(sound(name, whole=whole))) as response:
        body = await response.json()
    match = re.fullmatch(r"I heard (\d+) samples\.", body["text"])
    rate_hz = 48_000 if name == "opus" else 24_000
    assert abs(int(match[1]) / rate_hz - 1.5) < 0.15


async def test_text_srt_and_vtt(http):
    async with http.post(URL, data=form(sound(), response_format="text")) as response:
        assert (response.content_type, await response.text()) == ("text/plain", "I heard 36000 samples.\n")
    async with http.post(URL, data=form(sound(), response_format="srt")) as response:
        assert await response.text() == "1\n00:00:00,000 --> 00:00:01,500\nI heard 36000 samples.\n"
    async with http.post(URL, data=form(sound(), response_format="vtt")) as response:
        assert await response.text() == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nI heard 36000 samples.\n"


async def test_verbose_json_has_segments_language_and_duration(http):
    async with http.post(URL, data=form(sound(), response_format="verbose_json")) as response:
        body = await response.json()
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "en", 1.5)
    assert [(s["id"], s["start"], s["end"]) for s in body["segments"]] == [(0, 0.0, 1.5)]


async def test_a_stream_is_deltas_and_the_whole_text(http):
    async with http.post(URL, data=form(sound(), stream="true")) as response:
        assert response.content_type == "text/event-stream"
        events = [json.loads(line[6:]) for line in (await response.read()).split(b"\n") if line.startswith(b"data: ")]
    assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"] == "I heard 36000 samples."
    assert events[-1]["type"] == "transcript.text.done"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (form(b"this is not audio" * 50), 400, "file"),
        (form(b"RIFF" + bytes(100)), 400, "file"),
        (form(b""), 400, "file"),
        (form(sound(seconds=0)), 400, "file"),
        (form(sound(), model="gpt-9"), 404, "model"),
        (form(sound(), response_format="diarized_json"), 400, "response_format"),
        (form(sound(), temperature="warm"), 400, "temperature"),
        (form(sound(), **{"include[]": "logprobs"}), 400, "include"),
        (form(sound(), nonsense="1"), 400, "nonsense"),
    ],
    ids=range(9),
)
async def test_what_can_not_be_heard_is_refused(http, body, status, param):
    async with http.post(URL, data=body) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (status, param)


async def test_a_body_that_is_no_form_is_a_400(http):
    for data, headers in (
        (b"{}", {"Content-Type": "application/json"}),
        (b"x", {"Content-Type": "multipart/form-data"}),
        (b"x", {"Content-Type": "multipart/form-data; boundary=b"}),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n', {"Content-Type": "multipart/form-data; boundary=b"}),
    ):
        async with http.post(URL, data=data, headers=headers) as response:
            assert response.status == 400, (data, await response.text())


async def test_audio_over_the_limit_is_refused(serving):
    async with serving(max_audio_s=1.0) as session:
        async with session.post(URL, data=form(sound(seconds=5))) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "too_long")
        async with session.post(URL, data=form(sound(seconds=0.5))) as response:
            assert response.status == 200
