"""Text to speech with Kokoro (ONNX), clause by clause, while the text is still coming.

`text.py` says where a clause ends and what is said for it; this file makes phonemes (espeak-ng) and sound of it, and joins the sounds.
Knows text and audio. Knows nothing of conversations.

Rules
- The first clause is short, so the first sound is early. Text that comes meanwhile is taken in; the language model never waits for us.
- Audio depends on the text alone, not on how it arrived or how the audio is cut into chunks.
- A clause's sound is trimmed, faded at both ends and parted from the one before it by the pause that the punctuation asks for, so joins
  do not click.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from stages.speech.text import FIRST_WORDS, Clause, ClauseSplitter, spoken
from streamrt import BadRequest, Chunk, ConfigError, Request, Stage, TooLong, UnknownVoice, audio_chunk

RATE_HZ = 24_000
SLICE = RATE_HZ * 80 // 1000  # samples of one chunk
FRAME = RATE_HZ // 100  # samples: 10 ms, the grain of the trim
GAIN = 0.8  # the loudest voice reaches 1.15
SILENCE_RATIO = 0.02  # of the clause's loudest frame; below is silence at its ends
LEAD_FRAMES, TAIL_FRAMES = 3, 6  # kept around the sound: breath and decay
FADE = FRAME // 2  # samples
SPEEDS = (0.5, 2.0)  # what Kokoro speaks well; beyond, the nearest of these
ASKED_SPEEDS = (0.25, 4.0)  # what the API allows to ask for
STOCK_VOICES = frozenset("alloy ash ballad coral echo fable nova onyx sage shimmer verse marin cedar".split())  # OpenAI's names  # noqa: SIM905


class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[stage.args]` of speech.tts.kokoro."""

    model: str = "weights:kokoro-82m"  # model source: a folder with *.onnx, voices*.npz (or .bin) and, if need be, vocab.json
    voice: str = "jm_kumo"  # default voice, one of the voices file; of the five it is the best understood
    language: str = "en-us"  # of the phonemes, as espeak-ng names it: "en-us", "en-gb" ...
    speed: Annotated[float, Meta(ge=0.5, le=2.0)] = 1.0  # default speed
    first_words: Annotated[int, Meta(ge=1, le=40)] = FIRST_WORDS  # most of the first clause: fewer are heard sooner, more sound better
    max_text_chars: Annotated[int, Meta(ge=1)] = 100_000  # of one request; more is refused


class Kokoro(Stage):
    """Text in, speech out."""

    takes = {"text"}
    gives = {"audio": "audio"}
    tasks = ("speak",)
    Args = Args
    load_s = 4.0
    max_requests = 8
    models = ("model",)

    def load(self) -> None:
        import kokoro_onnx
        import onnxruntime

        folder = Path(self.context.model_path(self.args.model))
        model, voices, vocab = _one(folder, "*.onnx"), _one(folder, "voices*"), folder / "vocab.json"
        self.context.progress("reading Kokoro")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.context.threads
        options.inter_op_num_threads = 1
        # What the higher levels would change runs no faster here, and costs half a second at every start.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.enable_mem_pattern = False  # every clause has other shapes, so a remembered pattern never fits
        # Threads that spin while they wait for each other take the cores from the language model, which runs at the same time.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        logging.getLogger("phonemizer").setLevel(logging.ERROR)  # it warns of harmless word counts
        self._kokoro = kokoro_onnx.Kokoro.from_session(session, str(voices), vocab_config=str(vocab) if vocab.exists() else None)
        with np.load(voices) as file:
            self._voices = {name: file[name] for name in file.files}  # each (510, 1, 256) float32: a style for every length
        if self.args.voice not in self._voices:
            raise ConfigError(f'voice: got "{self.args.voice}", expected one of {", ".join(self._voices)}', param="voice")
        self._language(self.args.language)
        # The first call of espeak is slow, and so is the first run of a session.
        self.context.progress("warming up")
        self.sound("Sure.", self.args.voice, 1.0, self.args.language)

    def describe(self) -> dict[str, Any]:
        voices = sorted(self._voices)
        return {"model": self.args.model, "voices": voices, "default_voice": self.args.voice, "sample_rate_hz": RATE_HZ}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        voice = self._voice(str(request.param("voice", self.args.voice)))
        speed = self._speed(request.param("speed", self.args.speed))
        language = self._language(str(request.param("language", self.args.language)))

        # Reading goes on while we synthesize; `max_text_chars` bounds the queue.
        clauses: asyncio.Queue[Clause | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(chunks, clauses), name="tts.read")
        pause_s = 0.0
        try:
            while (clause := await clauses.get()) is not None:
                words = spoken(clause.text)
                sound = await self.compute(self.sound, words, voice, speed, language) if words else np.zeros(0, np.float32)
                if not len(sound):
                    continue
                audio = np.concatenate([np.zeros(int(pause_s * RATE_HZ), np.float32), sound])
                meta: dict[str, Any] = {"text": clause.text, "text_start": clause.start, "text_end": clause.end}
                for start in range(0, len(audio), SLICE):
                    yield audio_chunk(audio[start : start + SLICE], RATE_HZ, **meta)
                    meta = {}
                pause_s = pause_after(clause.text) / speed
            await reading  # raises what ended it
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, chunks: AsyncIterator[Chunk], clauses: asyncio.Queue[Clause | None]) -> None:
        splitter = ClauseSplitter(self.args.first_words)
        length = 0
        try:
            async for chunk in chunks:
                text = chunk.text
                length += len(text)
                if length > self.args.max_text_chars:
                    raise TooLong(f"text: more than {self.args.max_text_chars} characters in one request", param="input")
                for clause in splitter.push(text):
                    clauses.put_nowait(clause)
            for clause in splitter.finish():
                clauses.put_nowait(clause)
        finally:
            clauses.put_nowait(None)

    # --- on the compute thread

    def sound(self, words: str, voice: str, speed: float, language: str) -> np.ndarray:
        """The sound of `words`: (samples,) float32 at RATE_HZ, trimmed and faded; empty when espeak has nothing to say for them."""
        phonemes = " ".join(self._kokoro.tokenizer.phonemize(words, language).split())
        if not any(phoneme.isalpha() for phoneme in phonemes):
            return np.zeros(0, np.float32)
        # More than 510 phonemes are spoken in several batches.
        audio, _ = self._kokoro.create(phonemes, self._voices[voice], speed, is_phonemes=True, trim=False)
        return trimmed(audio)

    # --- what a request asks for

    def _voice(self, name: str) -> str:
        if name in self._voices:
            return name
        if name in STOCK_VOICES:
            return self.args.voice
        raise UnknownVoice(f'voice: got "{name}", expected one of {", ".join(sorted(self._voices))}', param="voice")

    def _speed(self, speed: Any) -> float:
        low, high = ASKED_SPEEDS
        if not isinstance(speed, int | float) or not low <= speed <= high:
            raise BadRequest(f"speed: got {speed!r}, expected {low:g} to {high:g}", param="speed")
        return min(max(float(speed), SPEEDS[0]), SPEEDS[1])

    def _language(self, name: str) -> str:
        from phonemizer.backend import EspeakBackend

        name = {"en": "en-us"}.get(name.lower(), name.lower())
        if name not in EspeakBackend.supported_languages():
            raise BadRequest(f'language: got "{name}", expected one that espeak-ng knows, such as "en-us"', param="language")
        return name


def pause_after(text: str) -> float:
    """Seconds of silence after a clause, at speed 1."""
    last = text.rstrip("\"'”’)]}*_`")[-1:]
    if last in tuple(".!?…"):
        return 0.3
    return 0.15 if last in tuple(",;:–—") else 0.02


def trimmed(audio: np.ndarray) -> np.ndarray:
    """`audio` without the silence at its ends, at our loudness, faded in and out over 5 ms."""
    frames = len(audio) // FRAME
    level = np.sqrt((audio[: frames * FRAME].reshape(frames, FRAME) ** 2).mean(axis=1))  # (frames,)
    loud = np.flatnonzero(level > SILENCE_RATIO * level.max(initial=0.0))
    if not len(loud):
        return np.zeros(0, np.float32)
    start, end = max(0, loud[0] - LEAD_FRAMES) * FRAME, min(len(audio), (loud[-1] + 1 + TAIL_FRAMES) * FRAME)
    sound = np.clip(audio[start:end] * GAIN, -1.0, 1.0).astype(np.float32)
    ramp = np.linspace(0.0, 1.0, FADE, dtype=np.float32)
    sound[:FADE] *= ramp
    sound[-FADE:] *= ramp[::-1]
    return sound


def _one(folder: Path, pattern: str) -> Path:
    """The one file in `folder` that matches. Raises ConfigError."""
    found = sorted(folder.glob(pattern)) if folder.is_dir() else []
    if len(found) != 1:
        raise ConfigError(f"{folder}: found {len(found)} files {pattern}, expected one", param="model")
    return found[0]
