"""`talk` on a real pipeline of scripted stages, and the WAV files that it reads and writes."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from streamrt import BadRequest, Client
from streamrt.talk import read_wav, talk, write_wav
from tests.pipelines import Running


def tone(path: Path, seconds: float = 0.6, rate_hz: int = 16_000) -> Path:
    write_wav(path, 0.3 * np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate_hz)) / rate_hz), rate_hz)
    return path


async def test_a_file_is_heard_answered_and_measured(voice_script: Running, tmp_path: Path):
    client = await Client.connect(voice_script.name)
    try:
        for _ in range(2):  # the first answer of a client also opens its connections
            report = await talk(client, tone(tmp_path / "question.wav"), tmp_path / "reply.wav")
    finally:
        await client.close()
    assert report.transcript == "What is the capital of France?"
    assert report.reply == "The capital of France is Paris. It lies on the Seine, and it is old."
    samples, rate_hz = read_wav(tmp_path / "reply.wav")
    assert rate_hz == 24_000
    assert len(samples) / rate_hz == pytest.approx(report.audio_s)
    timings = report.timings
    assert timings is not None
    assert timings.early
    assert timings.first_text_ms is not None
    assert timings.first_audio_ms is not None
    assert timings.heard_ms is not None
    assert timings.first_text_ms <= timings.first_audio_ms < timings.stopped_ms <= timings.heard_ms
    assert timings.work_ms == pytest.approx(timings.heard_ms - timings.stopped_ms)
    assert "without the silence" in report.as_text()
    assert json.loads(report.as_json())["timings"]["early"] is True


@pytest.mark.parametrize("width, channels", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_wav_files_of_every_width_are_read(tmp_path: Path, width: int, channels: int):
    path = tmp_path / "x.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8_000)
        half = 192 if width == 1 else 2 ** (8 * width - 2)
        file.writeframes(half.to_bytes(width, "little") * channels * 10)
    samples, rate_hz = read_wav(path)
    assert rate_hz == 8_000
    assert samples.tolist() == [0.5] * 10


@pytest.mark.parametrize("data", [b"", b"RIFF", b"no sound at all", b"RIFF\x24\x00\x00\x00WAVEfmt "])
def test_what_is_no_wav_file_is_said_to_be_none(tmp_path: Path, data: bytes):
    path = tmp_path / "x.wav"
    path.write_bytes(data)
    with pytest.raises(BadRequest, match=r"x\.wav: this is not a WAV file"):
        read_wav(path)
