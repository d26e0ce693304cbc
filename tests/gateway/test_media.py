"""Containers: what is encoded in pieces is one file, and comes back."""

import base64
import io
import sys
import wave

import numpy as np
import pytest

from gateway.media import CONTENT_TYPES, UNKNOWN_LENGTH, Base64Pieces, Decoder, encoder, pcm16, wav_header
from streamrt.errors import BadRequest, ConfigError, TooLong

RATE_HZ = 24_000
TONE = (0.3 * np.sin(2 * np.pi * 440 * np.arange(48_137) / RATE_HZ)).astype(np.float32)


def encoded(name: str, *, rate_hz: int = RATE_HZ, whole: bool = False, step: int = 2400) -> list[bytes]:
    writer = encoder(name, rate_hz, whole)
    return [writer.encode(TONE[at : at + step]) for at in range(0, len(TONE), step)] + [writer.finish()]


def decoded(data: bytes) -> tuple[np.ndarray, int]:
    reader = Decoder(data, max_s=60)
    blocks = []
    while len(block := reader.read()):
        blocks.append(block)
    return np.concatenate(blocks), reader.rate_hz


def pitch_hz(samples: np.ndarray, rate_hz: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate_hz / len(samples))


@pytest.mark.parametrize("name", sorted(set(CONTENT_TYPES) - {"pcm", "pcm16"}))
@pytest.mark.parametrize("whole", [False, True])
def test_every_container_comes_back_with_its_pitch_and_its_length(name, whole):
    samples, rate_hz = decoded(b"".join(encoded(name, whole=whole)))
    assert abs(pitch_hz(samples, rate_hz) - 440) < 2
    assert abs(len(samples) / rate_hz - len(TONE) / RATE_HZ) < 0.15  # a codec's own delay


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_lossless_containers_give_the_samples_back(name):
    samples, _ = decoded(b"".join(encoded(name)))
    assert len(samples) == len(TONE)
    assert np.max(np.abs(samples - TONE)) < 1 / 16384


@pytest.mark.parametrize("name", sorted(CONTENT_TYPES))
def test_pieces_come_while_the_audio_does(name):
    pieces = encoded(name, step=12_000)
    assert sum(map(bool, pieces[:-1])) >= 2


def test_a_streamed_wav_has_one_header_and_no_length():
    data = b"".join(encoded("wav"))
    assert data.count(b"RIFF") == 1
    assert data[:44] == wav_header(RATE_HZ)
    assert data[4:8] == data[40:44] == UNKNOWN_LENGTH.to_bytes(4, "little")


def test_a_whole_wav_counts_its_frames_right():
    data = b"".join(encoded("wav", whole=True))
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnframes() == len(TONE) == (len(data) - 44) // 2


def test_pcm_has_no_header_and_the_rate_that_is_promised():
    assert b"".join(encoded("pcm")) == pcm16(TONE)
    other = b"".join(encoded("pcm16", rate_hz=16_000))
    assert abs(len(other) / 2 - len(TONE) * 1.5) <= 2


@pytest.mark.parametrize("rate_hz", [22_050, 44_100])
def test_a_rate_that_opus_lacks_is_resampled(rate_hz):
    samples, out_hz = decoded(b"".join(encoded("opus", rate_hz=rate_hz)))
    assert abs(pitch_hz(samples, out_hz) - 440 * rate_hz / RATE_HZ) < 2


def test_samples_beyond_full_scale_are_clipped_not_wrapped():
    assert np.frombuffer(pcm16(np.array([1.5, -1.5, 1.0, 0.0], np.float32)), "<i2").tolist() == [32767, -32768, 32767, 0]


def test_base64_pieces_decode_one_by_one_and_joined():
    data, pieces = bytes(range(256)), Base64Pieces()
    parts = [pieces.feed(data[at : at + 7]) for at in range(0, len(data), 7)] + [pieces.finish()]
    assert base64.b64decode("".join(parts)) == data
    assert b"".join(map(base64.b64decode, parts)) == data
    assert all(len(base64.b64decode(part)) % 2 == 0 for part in parts)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not audio at all" * 100,
        b"RIFF" + bytes(200),
        b"ID3\x04" + bytes(500),
        b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        b"\x7fELF" + bytes(300),
    ],
)
def test_what_is_not_audio_is_the_senders_fault(data):
    with pytest.raises(BadRequest, match="file: "):
        Decoder(data, max_s=60, param="file").read()


def test_a_file_that_is_too_long_is_refused_while_it_is_read():
    reader = Decoder(b"".join(encoded("wav")), max_s=1.0)
    with pytest.raises(TooLong, match="longer than 1 s"):
        list(iter(lambda: len(reader.read()), 0))


def test_stereo_becomes_mono_and_broken_floats_become_silence():
    import soundfile

    file = io.BytesIO()
    samples = np.stack([np.full(8000, 0.5), np.full(8000, 0.1)], axis=1).astype(np.float32)
    samples[10] = np.nan
    soundfile.write(file, samples, 8000, format="WAV", subtype="FLOAT")
    got, rate_hz = decoded(file.getvalue())
    assert (len(got), rate_hz) == (8000, 8000)
    assert np.isfinite(got).all()
    assert got[100] == pytest.approx(0.3, abs=0.01)


def test_pcm_and_wav_need_no_media_library_and_the_others_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for name in ("wav", "pcm"):
        assert encoder(name, 22_050).encode(TONE[:100])
    with pytest.raises(ConfigError, match="PyAV") as caught:
        encoder("mp3", RATE_HZ)
    assert "streamrt[media]" in caught.value.hint
