from __future__ import annotations

import numpy as np
import pytest

from stages.speech.tts import Kokoro
from tests.stages.harness import loaded


@pytest.fixture(scope="session")
def kokoro():
    """The real voice, loaded once."""
    pytest.importorskip("kokoro_onnx", reason="needs streamrt[voice]")
    with loaded(Kokoro) as stage:
        yield stage


@pytest.fixture(scope="session")
def spoken_sentence(kokoro) -> np.ndarray:
    """A question, spoken: (samples,) float32 at 24 kHz, without silence around it."""
    return kokoro.sound("What is the capital of France?", "jm_kumo", 1.0, "en-us")
