from __future__ import annotations

import numpy as np
import pytest

from stages.speech.resample import Resampler
from streamrt import BadRequest


def tone(rate_hz: int, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz).astype(np.float32)


@pytest.mark.parametrize("quality", ["MQ", "HQ"])
@pytest.mark.parametrize(("from_hz", "to_hz"), [(24_000, 16_000), (48_000, 16_000), (44_100, 16_000), (8_000, 16_000)])
def test_pieces_give_the_samples_of_the_whole(from_hz, to_hz, quality):
    audio = tone(from_hz)
    once = Resampler(from_hz, to_hz, quality)
    whole = np.concatenate([once.push(audio), once.finish()])
    many = Resampler(from_hz, to_hz, quality)
    pieces = [many.push(audio[start : start + 317]) for start in range(0, len(audio), 317)]
    np.testing.assert_array_equal(np.concatenate([*pieces, many.finish()]), whole)
    assert abs(len(whole) - to_hz) <= 1
    middle = slice(to_hz // 4, 3 * to_hz // 4)  # no delay: the tone lies where it lay
    np.testing.assert_allclose(whole[middle], tone(to_hz)[middle], atol=2e-3)


def test_medium_quality_holds_back_little():
    stream = Resampler(24_000, 16_000)
    got = sum(len(stream.push(tone(24_000)[start : start + 480])) for start in range(0, 24_000, 480))
    assert got >= 16_000 - 16 * 20  # less than 20 ms


def test_equal_rates_pass_through():
    stream = Resampler(16_000, 16_000)
    audio = tone(16_000)
    assert stream.push(audio) is audio
    assert len(stream.finish()) == 0


@pytest.mark.parametrize("rate_hz", [0, -1, 3_999, 1_000_000])
def test_an_impossible_rate_is_the_callers_mistake(rate_hz):
    with pytest.raises(BadRequest, match=f"got {rate_hz}, expected 4000 to 384000"):
        Resampler(rate_hz, 16_000)
