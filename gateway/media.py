"""Audio containers: samples in, bytes out as they come; any file in, mono samples out. Off the loop.

Knows numpy, and av (the [media] extra) lazily: wav, and pcm at its own rate, need nothing. Knows nothing of HTTP or requests.

Rules
- A stream has one header, in its first piece; the pieces of a stream, joined, are the file.
- Encoders and decoders keep state and are used by one caller at a time; `MediaPool.run` is how a handler calls them.
- A decoder reads at most `max_s` seconds and opens nothing but the bytes that it was given.

Source: RIFF sizes of a stream of unknown length are 0xFFFFFFFF, as OpenAI's own service writes them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from gateway.pcm import Resampler
from streamrt.errors import BadRequest, ConfigError, TooLong

T = TypeVar("T")

PCM_HZ = 24_000  # of `pcm` and `pcm16`, as OpenAI says
UNKNOWN_LENGTH = 0xFFFFFFFF
BLOCK_S = 0.5  # of what a decoder gives at a time
# What a decoder may find. Playlists and the like, which make ffmpeg open other files and addresses, are not among them.
DEMUXERS = "wav,w64,aiff,au,caf,mp3,flac,ogg,aac,amr,mov,matroska,webm,asf,mpeg,mpegts,flv,ac3"

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}


class MediaPool:
    """The threads that encode and decode. Made by the application, closed with it."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="media")

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` on a thread. Cancelled: a call that already runs finishes unseen."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


# ---- samples -> bytes --------------------------------------------------------------------------------------------------------


class Encoder(Protocol):
    """One audio stream being written."""

    def encode(self, samples: np.ndarray) -> bytes:
        """(samples,) or (channels, samples) float32 -> what of the file is ready by now; may be nothing yet."""
        ...

    def finish(self) -> bytes:
        """The rest of the file."""
        ...


def encoder(name: str, rate_hz: int, whole: bool = False, channels: int = 1) -> Encoder:
    """An encoder of format `name` (a key of CONTENT_TYPES) for samples at `rate_hz`, mono or stereo; `pcm` is mono always.

    `whole`: a file with a header comes in one piece from `finish`, and its header tells the true length.
    """
    match name:
        case "pcm" | "pcm16":
            return _Pcm(rate_hz)
        case "wav":
            return _Wav(rate_hz, whole, channels)
        case _:
            return _Packets(_CODECS[name], rate_hz, whole, channels)


def pcm16(samples: np.ndarray) -> bytes:
    """float32 in [-1, 1] -> little-endian int16."""
    return bytes(np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes())


def wav_header(rate_hz: int, data_bytes: int = UNKNOWN_LENGTH, channels: int = 1) -> bytes:
    """The 44 bytes before s16 data."""
    riff_bytes = UNKNOWN_LENGTH if data_bytes == UNKNOWN_LENGTH else data_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff_bytes, b"WAVE",
        b"fmt ", 16, 1, channels, rate_hz, rate_hz * channels * 2, channels * 2, 16,
        b"data", data_bytes,
    )  # fmt: skip


class _Pcm:
    def __init__(self, rate_hz: int) -> None:
        self._resampler = None if rate_hz == PCM_HZ else Resampler(rate_hz, PCM_HZ)

    def encode(self, samples: np.ndarray) -> bytes:
        return pcm16(self._resampler.feed(samples) if self._resampler else samples)

    def finish(self) -> bytes:
        return pcm16(self._resampler.finish()) if self._resampler else b""


class _Wav:
    def __init__(self, rate_hz: int, whole: bool, channels: int) -> None:
        self._rate_hz = rate_hz
        self._whole = whole
        self._channels = channels
        self._pieces = [] if whole else [wav_header(rate_hz, channels=channels)]

    def encode(self, samples: np.ndarray) -> bytes:
        self._pieces.append(pcm16(samples.T))  # channels side by side
        return b"" if self._whole else self._take()

    def finish(self) -> bytes:
        if self._whole:
            self._pieces.insert(0, wav_header(self._rate_hz, sum(map(len, self._pieces)), self._channels))
        return self._take()

    def _take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data


class _Codec(NamedTuple):
    """One of ffmpeg's encoders and the container that its packets go in."""

    container: str
    codec: str
    rates_hz: tuple[int, ...]  # () = any
    bits_per_s: int = 0
    options: dict[str, str] = {}


_MPEG_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_CODECS = {
    "mp3": _Codec("mp3", "libmp3lame", _MPEG_HZ, 64_000),
    "aac": _Codec("adts", "aac", _MPEG_HZ, 64_000),
    # One ogg page per 100 ms; the default of 1 s would hold audio back.
    "opus": _Codec("ogg", "libopus", (8000, 12000, 16000, 24000, 48000), 32_000, {"page_duration": "100000"}),
    "flac": _Codec("flac", "flac", ()),
}


class _Packets:
    """A container written packet by packet through ffmpeg."""

    def __init__(self, codec: _Codec, rate_hz: int, whole: bool, channels: int) -> None:
        av = import_av()
        self._out: io.BytesIO | Tail = io.BytesIO() if whole else Tail()  # ffmpeg goes back to a header only where it can seek
        self._rate_hz = rate_hz
        self._position = 0  # samples so far
        rate = rate_hz if not codec.rates_hz or rate_hz in codec.rates_hz else _next_above(rate_hz, codec.rates_hz)
        self._container = av.open(self._out, "w", format=codec.container, options=codec.options)
        self._stream = self._container.add_stream(codec.codec, rate=rate)
        self._layout = self._stream.layout = "stereo" if channels == 2 else "mono"
        if codec.bits_per_s:
            self._stream.bit_rate = codec.bits_per_s * channels
        self._frame = av.AudioFrame.from_ndarray

    def encode(self, samples: np.ndarray) -> bytes:
        if samples.size:
            planes = np.ascontiguousarray(np.atleast_2d(np.clip(samples, -1.0, 1.0)), np.float32)
            frame = self._frame(planes, format="fltp", layout=self._layout)
            frame.sample_rate = self._rate_hz
            frame.time_base = Fraction(1, self._rate_hz)
            frame.pts = self._position
            self._position += samples.shape[-1]
            self._container.mux(self._stream.encode(frame))
        return self._take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._out.getvalue() if isinstance(self._out, io.BytesIO) else self._out.take()

    def _take(self) -> bytes:
        return b"" if isinstance(self._out, io.BytesIO) else self._out.take()


class Tail:
    """A file that is written and never sought: keeps what was not taken yet."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._bytes)
        self._bytes.clear()
        return data


class Base64Pieces:
    """Bytes -> base64 pieces that may be decoded one by one or joined: each but the last holds whole samples and no padding."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> str:
        data = self._rest + data
        whole = len(data) - len(data) % 6  # 3 bytes are 4 characters, 2 bytes are a sample
        self._rest = data[whole:]
        return base64.b64encode(data[:whole]).decode()

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode()


# ---- bytes -> samples --------------------------------------------------------------------------------------------------------


class Decoder:
    """Reads the first audio stream of a file as mono float32, block by block. Raises BadRequest for what it can not read."""

    def __init__(self, data: bytes, *, max_s: float, param: str = "file") -> None:
        av = import_av()
        self._errors = (av.error.FFmpegError, ValueError, EOFError)
        self._param = param
        self._max_s = max_s
        self._count = 0  # samples given so far
        self._ended = False
        try:
            self._container = av.open(io.BytesIO(data), options={"format_whitelist": DEMUXERS, "protocol_whitelist": ""})
            stream = next(iter(self._container.streams.audio), None)
            if stream is None:
                raise BadRequest(f"{param}: there is no audio in this file", param=param)
            source_hz = stream.rate or 0
            if not 4_000 <= source_hz <= 384_000:
                raise BadRequest(f"{param}: got a sample rate of {source_hz} Hz, expected 4000 to 384000", param=param)
            self.rate_hz = min(source_hz, 48_000)  # of what `read` gives
            self._resampler = av.AudioResampler(format="fltp", rate=self.rate_hz)
            self._frames = self._container.decode(stream)
        except self._errors as error:
            raise self._unreadable(error) from None

    @property
    def duration_s(self) -> float:
        """Of what was read so far."""
        return self._count / self.rate_hz

    def read(self) -> np.ndarray:
        """The next block: (samples,) float32; empty at the end. Raises BadRequest, TooLong."""
        blocks: list[np.ndarray] = []
        while not self._ended and sum(map(len, blocks)) < BLOCK_S * self.rate_hz:
            try:
                frame = next(self._frames, None)
                self._ended = frame is None
                # Mean of the channels: ffmpeg's own way to mono makes two equal channels louder than one.
                blocks += [piece.to_ndarray().mean(axis=0) for piece in self._resampler.resample(frame)]
            except self._errors as error:
                raise self._unreadable(error) from None
        block = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
        self._count += len(block)
        if self.duration_s > self._max_s:
            raise TooLong(f"{self._param}: the audio is longer than {self._max_s:g} s", hint="send it in parts", param=self._param)
        return np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0)

    def _unreadable(self, error: Exception) -> BadRequest:
        return BadRequest(
            f"{self._param}: this is not audio that can be read ({getattr(error, 'strerror', None) or error})",
            hint="send wav, mp3, flac, ogg, opus, m4a or webm",
            param=self._param,
        )


def _next_above(rate_hz: int, rates_hz: tuple[int, ...]) -> int:
    return next((rate for rate in rates_hz if rate >= rate_hz), rates_hz[-1])


def import_av() -> Any:
    try:
        import av
        import av.error
    except ImportError:
        raise ConfigError("this audio format needs PyAV, which is not installed", hint="pip install 'streamrt[media]'") from None
    av.logging.set_level(None)  # ffmpeg's own lines would go to stderr unasked; errors come as exceptions
    return av
