"""Sample-rate conversion of audio that arrives in pieces.

Knows samples and rates. Knows nothing of chunks or requests.

Rules
- What comes out of all pushes together is, sample for sample, what one push of the whole would give.
- Output sample k stands for the time k / to_hz of the input: the filter's delay is held back, not passed on.
"""

from __future__ import annotations

import numpy as np

from streamrt import BadRequest

LOWEST_HZ, HIGHEST_HZ = 4_000, 384_000


class Resampler:
    """One stream from `from_hz` to `to_hz`; mono float32. Equal rates pass through untouched.

    `quality` is soxr's: "MQ" holds back 15 ms of the audio and is enough for speech, "HQ" 21 ms.
    """

    def __init__(self, from_hz: int, to_hz: int, quality: str = "MQ") -> None:
        if not LOWEST_HZ <= from_hz <= HIGHEST_HZ:
            raise BadRequest(f"sample rate: got {from_hz}, expected {LOWEST_HZ} to {HIGHEST_HZ} Hz", param="sample_rate_hz")
        self.from_hz = from_hz
        self.to_hz = to_hz
        self._stream = None
        if from_hz != to_hz:
            import soxr

            self._stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32", quality=quality)

    def push(self, samples: np.ndarray) -> np.ndarray:
        """What is ready after `samples`; may be empty."""
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def finish(self) -> np.ndarray:
        """The rest. The stream is over."""
        nothing = np.zeros(0, np.float32)
        return nothing if self._stream is None else self._stream.resample_chunk(nothing, last=True)
