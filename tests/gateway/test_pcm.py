"""Audio on the realtime wire."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.pcm import RATES_HZ, Resampler, WireDecoder, WireEncoder


def sine(hz: float, rate_hz: int, seconds: float = 1.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(rate_hz * seconds)) / rate_hz)).astype(np.float32)


def test_sixteen_bit_samples_come_back_bit_for_bit():
    data = np.arange(-32768, 32768).astype("<i2").tobytes()
    assert WireEncoder("audio/pcm", 24_000).feed(WireDecoder("audio/pcm").feed(data)) == data


@pytest.mark.parametrize("sizes", [[1], [3, 1], [959, 1, 961, 3]])
def test_half_a_sample_waits_for_its_other_half(sizes):
    data = np.arange(1000).astype("<i2").tobytes()
    decoder, parts, at = WireDecoder("audio/pcm"), [], 0
    while at < len(data):
        for size in sizes:
            parts.append(decoder.feed(data[at : at + size]))
            at += size
    assert np.array_equal(np.concatenate(parts) * 32768, np.arange(1000))


def test_a_reset_forgets_half_a_sample():
    decoder = WireDecoder("audio/pcm")
    decoder.feed(b"\x01")
    decoder.reset()
    assert decoder.feed(b"\x02\x00").tolist() == [2 / 32768]


@pytest.mark.parametrize("name, silence", [("audio/pcmu", 0xFF), ("audio/pcma", 0xD5)])
def test_telephone_codes_are_those_of_g711(name, silence):
    decoder, encoder = WireDecoder(name), WireEncoder(name, RATES_HZ[name])
    assert abs(decoder.feed(bytes([silence]))[0]) <= 8 / 32768
    codes = bytes(code for code in range(256) if not (name == "audio/pcmu" and code == 0x7F))  # negative zero
    assert encoder.feed(decoder.feed(codes)) == codes
    loudest = {"audio/pcmu": 32124, "audio/pcma": 32256}[name]
    assert np.abs(decoder.feed(bytes(range(256)))).max() == loudest / 32768


@pytest.mark.parametrize("name", ["audio/pcmu", "audio/pcma"])
def test_what_a_telephone_code_loses_is_a_few_percent(name):
    samples = sine(440, 8_000)
    heard = WireDecoder(name).feed(WireEncoder(name, 8_000).feed(samples))
    assert np.sqrt(np.mean((heard - samples) ** 2)) < 0.02


@pytest.mark.parametrize("from_hz, to_hz", [(24_000, 8_000), (16_000, 24_000), (22_050, 24_000), (44_100, 24_000), (48_000, 24_000)])
def test_a_change_of_rate_keeps_the_tone_however_it_is_cut(from_hz, to_hz):
    samples = sine(1000, from_hz)
    whole = Resampler(from_hz, to_hz)
    expected = np.concatenate([whole.feed(samples), whole.finish()])
    assert len(expected) == to_hz
    assert np.abs(expected - sine(1000, to_hz))[200:-200].max() < 1e-3
    random = np.random.default_rng(1)
    parts, rest = Resampler(from_hz, to_hz), samples
    got = []
    while len(rest):
        n = int(random.integers(1, 700))
        got.append(parts.feed(rest[:n]))
        rest = rest[n:]
    assert np.array_equal(np.concatenate([*got, parts.finish()]), expected)


def test_what_the_lower_rate_can_not_hold_is_taken_out():
    resampler = Resampler(24_000, 8_000)
    alias = np.concatenate([resampler.feed(sine(6_000, 24_000)), resampler.finish()])
    assert np.abs(alias[100:-100]).max() < 5e-3
