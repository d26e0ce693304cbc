"""`streamrt talk`: say a WAV file to a pipeline as a user would, and measure where the time of the turn goes.

The audio is sent at the pace of speech and is followed by silence until the turn has ended, so that what is measured is what a
user with a microphone meets. Knows WAV files; everything else is `conversation.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np

from streamrt.client import Client
from streamrt.conversation import Conversation, TurnTimings, default_settings
from streamrt.errors import BadRequest, StageFailed, UnknownTask
from streamrt.session import AudioDelta, Problem, ResponseEnded, TextDelta, TranscriptDone, TranscriptFailed

PIECE_MS = 20
REPLY_S = 120.0  # from the end of the file to the end of the reply


class TalkReport(msgspec.Struct):
    """What was understood, what was answered, and when."""

    transcript: str = ""
    reply: str = ""
    audio_s: float = 0.0  # of the reply
    out: str = ""  # the WAV file that holds it
    timings: TurnTimings | None = None
    silence_ms: int = 0  # the wait that the settings ask for before a turn is taken to be over
    cpus: int = 0

    def rows(self) -> list[tuple[str, float]]:
        """What happened when, in milliseconds from the end of speech."""
        t = self.timings
        if t is None:
            return []
        rows = [
            ("first words understood", t.provisional_ms),
            ("turn detected", t.stopped_ms),
            ("transcript", t.transcript_ms),
            ("first text", t.first_text_ms),
            ("first audio made", t.first_audio_ms),
            ("first audio heard", t.heard_ms),
        ]
        return sorted(((name, ms) for name, ms in rows if ms is not None), key=lambda row: row[1])

    def as_text(self) -> str:
        lines = [f"user       {self.transcript}", f"assistant  {self.reply}"]
        if self.out:
            lines.append(f"audio      {self.audio_s:.1f} s in {self.out}")
        if self.timings is not None:
            lines += ["", f"{'after the end of speech':28}{'ms':>8}", *(f"{name:28}{ms:8.0f}" for name, ms in self.rows())]
            if self.timings.work_ms is not None:
                lines += [
                    "",
                    f"{'of which silence':28}{self.timings.stopped_ms:8.0f}",
                    f"{'without the silence':28}{self.timings.work_ms:8.0f}",
                ]
            lines.append(f"({self.cpus} CPUs; the turn's end is told by {self.silence_ms} ms of silence)")
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps({**msgspec.to_builtins(self), "work_ms": self.timings.work_ms if self.timings else None})


async def talk(client: Client, wav: Path, out: Path | None = None) -> TalkReport:
    """Say `wav`, hear the reply, and write it to `out`.

    Raises: BadRequest for a file that is no WAV; UnknownTask for a pipeline without ears or answers; StageFailed when the turn failed.
    """
    missing = [task for task in ("listen", "transcribe", "respond") if task not in client.tasks()]
    if missing:
        raise UnknownTask(f"this pipeline has no stage for {' and '.join(missing)}", hint="streamrt check shows what a pipeline can do")
    samples, rate_hz = read_wav(wav)
    settings = default_settings(client)
    assert settings.turn_detection is not None
    report = TalkReport(silence_ms=settings.turn_detection.silence_duration_ms, cpus=os.cpu_count() or 1)
    async with Conversation(client, settings, rate_hz=rate_hz, lead_s=math.inf) as conversation:
        speaking = asyncio.create_task(_speak(conversation, samples, rate_hz), name="speak")
        hearing = asyncio.create_task(_hear(conversation, report), name="hear")
        try:
            done, _ = await asyncio.wait({speaking, hearing}, timeout=len(samples) / rate_hz + REPLY_S, return_when=asyncio.FIRST_COMPLETED)
            if hearing not in done:
                await asyncio.gather(*done)  # speaking ends only by failing
                raise StageFailed(f"no reply within {REPLY_S:g} s of the end of {wav}", hint="does the file hold speech?")
            audio, audio_hz = hearing.result()
        finally:
            speaking.cancel()
            hearing.cancel()
            await asyncio.wait({speaking, hearing})
    report.audio_s = len(audio) / audio_hz
    if out is not None:
        write_wav(out, audio, audio_hz)
        report.out = str(out)
    return report


async def _speak(conversation: Conversation, samples: np.ndarray, rate_hz: int) -> None:
    """The file, then silence for as long as we are let, each piece when a microphone would have it."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    sent = 0
    async for piece in _pieces(samples, rate_hz * PIECE_MS // 1000):
        sent += len(piece)
        await asyncio.sleep(start_s + sent / rate_hz - loop.time())
        await conversation.append(piece)


async def _pieces(samples: np.ndarray, size: int) -> AsyncIterator[np.ndarray]:
    for first in range(0, len(samples), size):
        yield samples[first : first + size]
    while True:
        yield np.zeros(size, np.float32)


async def _hear(conversation: Conversation, report: TalkReport) -> tuple[np.ndarray, int]:
    """One reply that was not interrupted: what was said into a pause of the file is part of the user's words."""
    words: list[str] = []
    sound: list[np.ndarray] = []
    rate_hz = 24_000
    async for event in conversation:
        match event:
            case TranscriptDone(text=text):
                report.transcript = f"{report.transcript} {text}".strip()
            case TranscriptFailed(code=code, message=message) | Problem(code=code, message=message):
                raise StageFailed(f"{code}: {message}")
            case TextDelta(text=text):
                words.append(text)
            case AudioDelta(samples=samples, rate_hz=rate_hz):
                sound.append(samples)
            case TurnTimings():
                report.timings = event
            case ResponseEnded(response) if response.status == "failed":
                raise StageFailed(f"{response.reason}: {response.message}")
            case ResponseEnded(response) if response.status == "cancelled" or response.item is None:
                words.clear()
                sound.clear()
            case ResponseEnded():
                break
    report.reply = "".join(words).strip()
    return np.concatenate([np.zeros(0, np.float32), *sound]), rate_hz


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """(samples,) float32 mono and the rate. Raises BadRequest."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate_hz, frames = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            data = file.readframes(frames)
    except (wave.Error, EOFError, OSError) as error:
        raise BadRequest(
            f"{path}: this is not a WAV file that can be read ({error or 'it ends too early'})", hint="give PCM WAV, 8 to 32 bits"
        ) from None
    if width == 3:  # 24 bits: put each sample into the upper bytes of 32
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8, len(data) // 3 * 3).reshape(-1, 3)
        samples = padded.view("<i4")[:, 0] / np.float32(2**31)
    elif width == 1:
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    else:
        samples = np.frombuffer(data, f"<i{width}", len(data) // width) / np.float32(2 ** (8 * width - 1))
    samples = samples[: len(samples) // channels * channels].reshape(-1, channels).mean(axis=1).astype(np.float32)
    if not len(samples) or not 8_000 <= rate_hz <= 192_000:
        raise BadRequest(f"{path}: got {len(samples)} samples at {rate_hz} Hz, expected some at 8000 to 192000 Hz")
    return samples, rate_hz


def write_wav(path: Path, samples: np.ndarray, rate_hz: int) -> None:
    """16-bit mono. Raises BadRequest where the file can not be written."""
    try:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate_hz)
            file.writeframes(np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    except OSError as error:
        raise BadRequest(f"{path}: can not be written ({error.strerror})") from None
