"""Audio on the realtime wire: PCM16 at 24 kHz and G.711 at 8 kHz, to and from mono float32. Streaming, with numpy alone.

Knows bytes and samples; knows nothing of events or base64.

Rules
- A sample that is split between two pieces is put together again; nothing is ever shifted by a byte.
- 16-bit samples come back bit for bit: decode, then encode, is the identity.

Source: ITU-T G.711; a windowed sinc, evaluated per output sample, for the change of rate.
"""

from __future__ import annotations

import functools
from math import gcd

import numpy as np

RATES_HZ = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}


class WireDecoder:
    """Bytes as a client sends them -> samples at `rate_hz`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rate_hz = RATES_HZ[name]
        self._odd = b""

    def feed(self, data: bytes) -> np.ndarray:
        """(samples,) float32; a byte that is half a sample waits for the other half."""
        if self.name != "audio/pcm":
            return _expand_table(self.name)[np.frombuffer(data, np.uint8)]
        data = self._odd + data
        whole = len(data) & ~1
        self._odd = data[whole:]
        return np.frombuffer(data, "<i2", whole // 2).astype(np.float32) / 32768

    def reset(self) -> None:
        """The stream begins anew: half a sample that waits is dropped."""
        self._odd = b""


class WireEncoder:
    """Samples at `rate_hz` -> bytes as a client wants them."""

    def __init__(self, name: str, rate_hz: int) -> None:
        self._name = name
        self._resampler = None if rate_hz == RATES_HZ[name] else Resampler(rate_hz, RATES_HZ[name])

    def feed(self, samples: np.ndarray) -> bytes:
        return self._bytes(self._resampler.feed(samples) if self._resampler else samples)

    def finish(self) -> bytes:
        """What the change of rate has held back."""
        return self._bytes(self._resampler.finish()) if self._resampler else b""

    def _bytes(self, samples: np.ndarray) -> bytes:
        pcm = np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2")
        return bytes(pcm if self._name == "audio/pcm" else _compress_table(self._name)[pcm.view(np.uint16)])


class Resampler:
    """Change of rate of a stream by a ratio of whole numbers; sample-identical however the stream is cut."""

    HALF = 16  # zero crossings on each side

    def __init__(self, from_hz: int, to_hz: int) -> None:
        common = gcd(from_hz, to_hz)
        self._up, self._down = to_hz // common, from_hz // common
        self._filters = _filters(self._up, self._down, self.HALF)  # (phases, taps)
        self._reach = self._filters.shape[1] // 2
        self._held = np.zeros(self._reach, np.float32)  # input from `_start` on
        self._start = -self._reach
        self._fed = 0
        self._made = 0

    def feed(self, samples: np.ndarray) -> np.ndarray:
        self._fed += len(samples)
        self._held = np.concatenate([self._held, samples])
        return self._make(max(0, self._fed - self._reach))

    def finish(self) -> np.ndarray:
        self._held = np.concatenate([self._held, np.zeros(self._reach + 1, np.float32)])
        return self._make(self._fed)

    def _make(self, before: int) -> np.ndarray:
        """Every output sample whose place in the input lies before input sample `before`."""
        count = -(-before * self._up // self._down)
        index = np.arange(self._made, max(self._made, count), dtype=np.int64) * self._down
        self._made = max(self._made, count)
        if not len(index):
            return np.zeros(0, np.float32)
        base, phase = index // self._up, index % self._up
        windows = np.lib.stride_tricks.sliding_window_view(self._held, self._filters.shape[1])
        made: np.ndarray = np.einsum("nt,nt->n", windows[base - self._reach + 1 - self._start], self._filters[phase])
        # What no later output sample looks at is forgotten.
        first = self._made * self._down // self._up - self._reach + 1
        self._held = self._held[first - self._start :]
        self._start = first
        return made.astype(np.float32, copy=False)


@functools.lru_cache(maxsize=16)
def _filters(up: int, down: int, half: int) -> np.ndarray:
    """(up, taps): one filter per place of an output sample between two input samples."""
    cutoff = min(1.0, up / down) * 0.95
    reach = int(np.ceil(half / cutoff))
    at = np.arange(1 - reach, reach + 1)[None, :] - (np.arange(up) / up)[:, None]
    window = np.where(np.abs(at) < reach, np.cos(np.pi * at / (2 * reach)) ** 2, 0.0)
    taps = cutoff * np.sinc(cutoff * at) * window
    return np.asarray(taps / taps.sum(axis=1, keepdims=True), np.float32)


# ---- G.711 -----------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _expand_table(name: str) -> np.ndarray:
    """(256,) float32: what each byte sounds like."""
    code = np.arange(256)
    if name == "audio/pcmu":
        code = ~code & 0xFF
        size = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
        value = np.where(code & 0x80, -size, size)
    else:
        code = code ^ 0x55
        exponent = (code & 0x70) >> 4
        step = ((code & 0x0F) << 4) + 8
        size = np.where(exponent == 0, step, (step + 0x100) << np.maximum(exponent - 1, 0))
        value = np.where(code & 0x80, size, -size)
    return np.asarray(value / 32768, np.float32)


@functools.lru_cache(maxsize=2)
def _compress_table(name: str) -> np.ndarray:
    """(65536,) uint8: the byte of each 16-bit sample, indexed by its bits."""
    value = np.arange(65536, dtype=np.uint16).view(np.int16).astype(np.int64)
    if name == "audio/pcmu":
        size = np.minimum(np.abs(value), 32635) + 0x84
        exponent = np.floor(np.log2(size)).astype(np.int64) - 7
        mantissa = (size >> (exponent + 3)) & 0x0F
        code = ~(np.where(value < 0, 0x80, 0) | (exponent << 4) | mantissa)
    else:
        size = np.where(value < 0, -value - 1, value)
        exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 7, 0)
        mantissa = (size >> np.where(exponent == 0, 4, exponent + 3)) & 0x0F
        code = (np.where(value < 0, 0, 0x80) | (exponent << 4) | mantissa) ^ 0x55
    return np.asarray(code & 0xFF, np.uint8)
