"""Speech to text with faster-whisper (CTranslate2).

Knows audio and Whisper. Knows nothing of turns: who wants an early transcript says so with a `provisional` event.

Rules
- Nothing is loaded from a hub: the model is a local folder.
- Silence gives no text. Whisper invents some; audio without energy never reaches it, and what it doubts itself is dropped.
- A transcript is reused when only silence was added to the audio that it was made from.

Whisper takes 30 s of features whatever was said, and its encoder spends most of a short turn's time on the padding. The encoder does
take less, so an utterance gets its own length and a margin (`MARGIN_FRAMES`). With too small a margin the decoder misses the end and
says everything again and again; a result that looks like that is made anew over the whole 30 s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from stages.speech.resample import Resampler
from streamrt import BadRequest, Chunk, ConfigError, Request, Stage, TooLong, text_chunk

MODEL_HZ = 16_000
SHORT_S = 20.0  # audio up to here is worth a shorter encoder window
MARGIN_FRAMES = 500  # of 10 ms: padding after the speech; 200 was tried and cost words
LEAST_FRAMES = 1000
SHORTEST_S = 0.1  # less than this says nothing
FRAME = 320  # samples: 20 ms, the grain of the energy measure
SILENCE_RMS = 0.001  # -60 dBFS; nothing that is understood is as quiet
SILENCE_RATIO = 0.06  # -24 dB under the speech before it: what was added is silence
TOKENS_PER_S = 10  # nobody speaks faster, except a decoder in a loop


class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[stage.args]` of speech.asr.faster_whisper."""

    model: str = "weights:whisper-tiny.en"  # model source: a folder in CTranslate2's format
    compute_type: str = "int8"  # of CTranslate2: "int8", "float32", "int8_float16", "float16", "auto"
    beam_size: Annotated[int, Meta(ge=1, le=20)] = 1  # hypotheses kept while decoding; 1 is the fastest
    language: str = ""  # spoken language, such as "en"; "" finds it out when the model knows several
    max_audio_s: Annotated[float, Meta(gt=0)] = 600.0  # one request's audio; more is refused


class Segment(msgspec.Struct, frozen=True):
    """A stretch of speech as Whisper cuts it."""

    text: str  # with its leading space
    start_s: float  # since the start of the request's audio
    end_s: float
    words: list[dict[str, Any]] | None  # {"word", "start", "end"}, when asked for


class FasterWhisper(Stage):
    """Audio in, one text chunk per segment out."""

    takes = {"audio", "event"}
    gives = {"text": "text"}
    tasks = ("transcribe",)
    Args = Args
    load_s = 3.0
    max_requests = 8
    models = ("model",)

    def load(self) -> None:
        from faster_whisper import WhisperModel

        class Whisper(WhisperModel):
            """Whisper whose encoder may be given less than 30 s."""

            is_short = False  # one thread uses the model, so this is set before a call

            def encode(self, features: np.ndarray) -> Any:
                if self.is_short:
                    used = int(np.flatnonzero(features.any(axis=0)).max(initial=0)) + 1  # padding is exact zeros
                    frames = max(LEAST_FRAMES, used + MARGIN_FRAMES)
                    features = features[:, : min(frames + frames % 2, features.shape[1])]  # (mels, frames)
                return super().encode(features)

        path = self.context.model_path(self.args.model)
        if not (Path(path) / "model.bin").is_file():
            raise ConfigError(
                f"{path}: there is no model.bin", hint="this stage takes a Whisper model in CTranslate2's format", param="model"
            )
        self.context.progress("reading Whisper")
        try:
            self._model = Whisper(
                str(path), device="cpu", compute_type=self.args.compute_type, cpu_threads=self.context.threads, local_files_only=True
            )
        except ValueError as error:  # a compute type that does not exist, or not on this machine
            raise ConfigError(f"compute_type: {error}", hint='compute_type = "int8" works everywhere') from error
        self._is_multilingual = bool(self._model.model.is_multilingual)
        self.context.progress("warming up")
        warm_up = np.random.default_rng(0).normal(0, 0.01, 2 * MODEL_HZ).astype(np.float32)
        self._short(warm_up, {})
        self._long(warm_up, {})

    def describe(self) -> dict[str, Any]:
        return {"model": self.args.model, "languages": self._model.supported_languages}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        options = self._options(request)
        heard = _Heard(self.args.max_audio_s)
        made: list[Segment] | None = None  # the provisional transcript ...
        made_of = 0  # ... and how many samples it was made from

        async for chunk in chunks:
            if chunk.modality == "audio":
                heard.add(chunk)
            elif chunk.event == "provisional":
                audio = heard.audio()
                if made is None or not only_silence_added(audio, made_of):
                    made, made_of = await self.compute(self._short, audio, options), len(audio)
                yield text_chunk("".join(s.text for s in made).strip(), provisional=True, language=self._language(options))
            elif chunk.event:
                raise BadRequest(f'transcribe: got the event "{chunk.event}", expected "provisional"')

        audio = heard.finish()
        is_first = True
        async for segment in self._segments(audio, options, made, made_of):
            meta: dict[str, Any] = {
                "start_s": round(segment.start_s, 3),
                "end_s": round(segment.end_s, 3),
                "language": self._language(options),
            }
            if segment.words is not None:
                meta["words"] = segment.words
            yield text_chunk(segment.text.lstrip() if is_first else segment.text, **meta)
            is_first = False

    async def _segments(
        self, audio: np.ndarray, options: dict[str, Any], made: list[Segment] | None, made_of: int
    ) -> AsyncIterator[Segment]:
        """The final transcript: the provisional one, or a new one; window by window when it is long, so that others get their turn."""
        if made is None or not only_silence_added(audio, made_of):
            if len(audio) > SHORT_S * MODEL_HZ:
                windows = self._windows(audio, options)
                while (segment := await self.compute(next, windows, None)) is not None:
                    yield segment
                return
            made = await self.compute(self._short, audio, options)
        for segment in made:
            yield segment

    # --- on the compute thread

    def _short(self, audio: np.ndarray, options: dict[str, Any]) -> list[Segment]:
        """The transcript of an utterance, over a window of its own length when that goes well."""
        if is_silent(audio):
            return []
        if len(audio) > SHORT_S * MODEL_HZ:
            return self._long(audio, options)
        self._model.is_short = True
        try:
            found, _ = self._model.transcribe(audio, **{**self._decoding, **options, "temperature": [options.get("temperature", 0.0)]})
            raw = list(found)
        finally:
            self._model.is_short = False
        tokens = sum(len(segment.tokens) for segment in raw)
        if tokens > TOKENS_PER_S * len(audio) / MODEL_HZ + 10 or any(s.compression_ratio > 2.4 or s.avg_logprob < -1.0 for s in raw):
            return self._long(audio, options)
        return [_segment(s) for s in raw if _is_believed(s)]

    def _long(self, audio: np.ndarray, options: dict[str, Any]) -> list[Segment]:
        return list(self._windows(audio, options))

    def _windows(self, audio: np.ndarray, options: dict[str, Any]) -> Iterator[Segment]:
        """The transcript over windows of 30 s, each decoded when it is asked for."""
        if is_silent(audio):
            return
        # A decoder that loops is tried once more with some chance in it.
        temperatures = [options.get("temperature", 0.0), 0.4]
        found, _ = self._model.transcribe(audio, **{**self._decoding, **options, "temperature": temperatures})
        for segment in found:
            if _is_believed(segment):
                yield _segment(segment)

    @property
    def _decoding(self) -> dict[str, Any]:
        return {"beam_size": self.args.beam_size, "condition_on_previous_text": False, "vad_filter": False}

    # --- options

    def _options(self, request: Request) -> dict[str, Any]:
        """Arguments of faster-whisper for what the request asks. Raises BadRequest."""
        language = str(request.param("language", self.args.language)).lower()
        if not self._is_multilingual and language not in ("", "en", "english"):
            raise BadRequest(f'language: got "{language}", this model hears English only', param="language")
        if self._is_multilingual and language and language not in self._model.supported_languages:
            raise BadRequest(f'language: got "{language}", expected one of {", ".join(self._model.supported_languages)}', param="language")
        temperature = float(request.param("temperature", 0.0))
        if not 0 <= temperature <= 1:
            raise BadRequest(f"temperature: got {temperature}, expected 0 to 1", param="temperature")
        options: dict[str, Any] = {"temperature": temperature, "word_timestamps": bool(request.param("timestamps", False))}
        if self._is_multilingual and language:
            options["language"] = language
        if prompt := str(request.param("prompt", "")):
            options["initial_prompt"] = prompt
        return options

    def _language(self, options: dict[str, Any]) -> str:
        return str(options.get("language", "" if self._is_multilingual else "en"))


class _Heard:
    """A request's audio so far, at the model's rate."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._pieces: list[np.ndarray] = []
        self._samples = 0
        self._resampler: Resampler | None = None

    def add(self, chunk: Chunk) -> None:
        if self._resampler is None:
            self._resampler = Resampler(chunk.sample_rate_hz, MODEL_HZ, "HQ")
        elif chunk.sample_rate_hz != self._resampler.from_hz:
            raise BadRequest(f"sample rate: got {chunk.sample_rate_hz} in a stream of {self._resampler.from_hz} Hz", param="sample_rate_hz")
        self._keep(self._resampler.push(chunk.samples).copy())  # a copy: the chunk's slot goes back to its ring
        if self._samples > self._max_s * MODEL_HZ:
            raise TooLong(f"audio: more than {self._max_s:g} s in one request", param="max_audio_s")

    def audio(self) -> np.ndarray:
        """(samples,) float32."""
        self._pieces = [np.concatenate([np.zeros(0, np.float32), *self._pieces])]
        return self._pieces[0]

    def finish(self) -> np.ndarray:
        if self._resampler is not None:
            self._keep(self._resampler.finish())
        return self.audio()

    def _keep(self, samples: np.ndarray) -> None:
        self._pieces.append(samples)
        self._samples += len(samples)


def is_silent(audio: np.ndarray) -> bool:
    """Nothing in `audio` (16 kHz) can be speech."""
    return len(audio) < SHORTEST_S * MODEL_HZ or float(_levels(audio).max()) < SILENCE_RMS


def only_silence_added(audio: np.ndarray, made_of: int) -> bool:
    """Nothing after the first `made_of` samples of `audio` is as loud as speech is in them."""
    added = _levels(audio[made_of:])
    before = _levels(audio[:made_of])
    speech = float(np.percentile(before, 95)) if len(before) else 0.0
    return float(added.max(initial=0.0)) < max(SILENCE_RMS, SILENCE_RATIO * speech)


def _levels(audio: np.ndarray) -> np.ndarray:
    """RMS of each frame of 20 ms (frames,); a last piece counts as a frame."""
    padded = np.pad(audio, (0, -len(audio) % FRAME)).reshape(-1, FRAME)
    return np.sqrt((padded**2).mean(axis=1))


def _is_believed(segment: Any) -> bool:
    """Whisper says itself when it hears no speech; then its words are an invention unless it is sure of them."""
    return not (segment.no_speech_prob > 0.6 and segment.avg_logprob < -0.7)


def _segment(found: Any) -> Segment:
    words = None
    if found.words is not None:
        words = [{"word": w.word.strip(), "start": round(float(w.start), 3), "end": round(float(w.end), 3)} for w in found.words]
    return Segment(found.text, float(found.start), float(found.end), words)
