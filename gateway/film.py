"""The video of a call as the pieces of one mp4 file, while it is being made.

Knows chunks and the encoder. Knows nothing of HTTP or jobs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from gateway.pixels import VideoEncoder
from streamrt.errors import StageFailed

if TYPE_CHECKING:
    from gateway.media import MediaPool
    from streamrt import Call, Chunk

DEFAULT_FPS = 24.0  # of a stage that tells none


class Film:
    """One video on its way. Read by one caller, which reads `pieces` and looks at the rest in between."""

    def __init__(self, call: Call, pool: MediaPool, audio_hz: int) -> None:
        self.percent = 0  # of the denoising steps; 99 at most, for decoding takes time too
        self.size = ""  # "WIDTHxHEIGHT", once there are frames
        self.seconds = 0.0  # of what has been encoded
        self._call = call
        self._pool = pool
        self._audio_hz = audio_hz
        self._encoder: VideoEncoder | None = None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The file's pieces; b"" when there is news but no piece. A reader that stops early ends the call.

        Raises StageFailed when the call gives no video.
        """
        try:
            async for chunk in self._call:
                if chunk.event == "progress":
                    self.percent = min(99, 100 * int(chunk.meta["step"]) // max(1, int(chunk.meta["steps"])))
                    yield b""
                elif "frames" in chunk.tensors:
                    yield await self._encode(chunk)
                elif chunk.modality == "audio" and self._encoder is not None:
                    channels = chunk.tensors.get("channels")
                    is_stereo = channels is not None and len(channels) == 2
                    yield await self._pool.run(self._encoder.add_sound, channels if is_stereo else chunk.samples)
        finally:
            self._call.cancel("disconnect")  # nothing happens to a call that has ended
        if self._encoder is None:
            raise StageFailed("the stage gave no video")
        yield await self._pool.run(self._encoder.finish)

    async def _encode(self, chunk: Chunk) -> bytes:
        frames = chunk.tensors["frames"]
        fps = chunk.fps or DEFAULT_FPS
        if self._encoder is None:
            height, width = frames.shape[1:3]
            self.size = f"{width}x{height}"
            self._encoder = await self._pool.run(VideoEncoder, width, height, fps, self._audio_hz)
        self.seconds += len(frames) / fps
        return await self._pool.run(self._encoder.encode, frames)


def outputs_of(route_outputs: dict[str, str], facts: dict[str, Any]) -> tuple[set[str], int]:
    """(outputs to ask for, the rate of the sound to the video; 0 = it has none)."""
    audio_hz = int(facts.get("sample_rate_hz", 0)) if "audio" in route_outputs else 0
    return {"video", "event", *(["audio"] if audio_hz else [])} & set(route_outputs), audio_hz
