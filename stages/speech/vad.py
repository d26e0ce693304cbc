"""When somebody speaks: Silero VAD (ONNX) over audio as it comes, and the rules that make turn events of its probabilities.

`TurnDetector` decides and is pure: probabilities in, events out. `SileroVad` is the stage around it: rates, windows, the model.
Knows nothing of sessions: it reports, the session decides what to do about it (and keeps `prefix_padding_ms` of audio itself).

Rules
- Event offsets are samples of the input since the request's start, at the input's own rate; `clear` and `commit` do not reset them.
- `configure`, `clear` and `commit` act exactly at their place in the audio.
- The same audio gives the same events, however it is cut into chunks.
- Each request has its own model state; the session of ONNX Runtime is shared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from stages.speech.resample import Resampler
from streamrt import BadRequest, Chunk, Request, Stage, event_chunk

MODEL_HZ = 16_000
WINDOW = 512  # samples: 32 ms, the only length that the model takes
CONTEXT = 64  # samples of the window before, which the model sees again
WINDOW_MS = 1000 * WINDOW / MODEL_HZ
BATCH_WINDOWS = 64  # windows in one call on the compute thread: 2 s of audio, some 12 ms of work
STATE_SHAPE = (2, 1, 128)  # (layers, sessions, hidden)


class TurnSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How probabilities become turns."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5  # speech begins at this probability
    hysteresis: Annotated[float, Meta(ge=0, le=1)] = 0.15  # and goes on down to this much below
    onset_ms: Annotated[int, Meta(ge=0)] = 64  # of speech without a gap before a start is believed: a click is no speech
    pause_ms: Annotated[int, Meta(ge=0)] = 96  # of silence before the early hint
    silence_duration_ms: Annotated[int, Meta(ge=0)] = 500  # of silence that ends the speech


class TurnDetector:
    """Probabilities of successive windows -> events. One per request; no clock, no audio.

        state     window         what happens
        silent    speech         after `onset_ms` of it without a gap: speaking, "speech_started" at its first window
        speaking  silence        counted from its first window
                    pause_ms     "speech_paused", once
                    silence_duration_ms   silent, "speech_stopped" at the first silent window
                  speech         the count is dropped; "speech_resumed" when the pause had been told

    A window is speech at `threshold`, silence below `threshold - hysteresis`; in between it is what the windows before it were.
    """

    def __init__(self, settings: TurnSettings) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Back to silence, telling nobody."""
        self.is_speaking = False
        self._since: int | None = None  # first window of the run against the present state
        self._told_pause = False

    def push(self, window: int, probability: float) -> list[tuple[str, int]]:
        """(event, window that it is about) for what window number `window` brings."""
        settings = self.settings
        floor = max(settings.threshold - settings.hysteresis, 0.01)
        if not self.is_speaking:
            if probability < settings.threshold:
                self._since = None
                return []
            self._since = window if self._since is None else self._since
            if (window - self._since + 1) * WINDOW_MS < settings.onset_ms:
                return []
            start, self._since, self.is_speaking = self._since, None, True
            return [("speech_started", start)]

        if probability >= settings.threshold or (probability >= floor and self._since is None):
            resumed = self._told_pause
            self._since, self._told_pause = None, False
            return [("speech_resumed", window)] if resumed else []
        self._since = window if self._since is None else self._since
        silence_ms = (window - self._since + 1) * WINDOW_MS
        events = []
        if silence_ms >= settings.pause_ms and not self._told_pause:
            self._told_pause = True
            events.append(("speech_paused", self._since))
        if silence_ms >= settings.silence_duration_ms:
            events.append(("speech_stopped", self._since))
            self.reset()
        return events

    def finish(self, window: int) -> list[tuple[str, int]]:
        """The audio is over; `window` is the number after the last."""
        events = [("speech_stopped", window if self._since is None else self._since)] if self.is_speaking else []
        self.reset()
        return events


class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[stage.args]` of speech.vad.silero; what a request or a `configure` event says goes before."""

    model: str = "weights:silero-vad"  # model source: a folder with model.onnx, or the file
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5  # speech probability at which speech begins
    silence_duration_ms: Annotated[int, Meta(ge=0)] = 500  # silence that ends a turn
    onset_ms: Annotated[int, Meta(ge=0)] = 64  # speech without a gap before a start is believed
    pause_ms: Annotated[int, Meta(ge=0)] = 96  # silence before the early `speech_paused` hint


class SileroVad(Stage):
    """Audio in, turn events out."""

    takes = {"audio", "event"}
    gives = {"events": "event"}
    tasks = ("listen",)
    Args = Args
    max_requests = 64
    models = ("model",)

    def load(self) -> None:
        import onnxruntime

        path = self.context.model_path(self.args.model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = (
            1  # a window is 0.2 ms of work: threads would only wait for each other
        )
        options.log_severity_level = 3
        model = path / "model.onnx" if path.is_dir() else path
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.probabilities(np.zeros((2, WINDOW), np.float32), np.zeros(CONTEXT, np.float32), np.zeros(STATE_SHAPE, np.float32))

    def probabilities(self, windows: np.ndarray, context: np.ndarray, state: np.ndarray) -> tuple[list[float], np.ndarray]:
        """Speech probability of each of `windows` (n, WINDOW) in turn, and the model's state after them. On the compute thread."""
        found = []
        for window in windows:
            framed = np.concatenate([context, window])[None]  # (1, CONTEXT + WINDOW) float32
            output, state = self._session.run(None, {"input": framed, "state": state, "sr": np.array(MODEL_HZ, np.int64)})
            found.append(float(output[0, 0]))
            context = window[-CONTEXT:]
        return found, state

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        defaults = TurnSettings(
            threshold=self.args.threshold,
            silence_duration_ms=self.args.silence_duration_ms,
            onset_ms=self.args.onset_ms,
            pause_ms=self.args.pause_ms,
        )
        ear = _Ear(self, _configured(defaults, request.params))
        async for chunk in chunks:
            if chunk.modality == "audio":
                for event in await ear.hear(chunk.samples, chunk.sample_rate_hz):
                    yield event
            elif chunk.event == "configure":
                ear.configure(_configured(ear.detector.settings, chunk.meta), enabled=chunk.meta.get("enabled"))
            elif chunk.event in ("clear", "commit"):
                ear.forget()
            elif chunk.event:
                raise BadRequest(f'listen: got the event "{chunk.event}", expected "configure", "clear" or "commit"')
        for event in await ear.finish():
            yield event

    def describe(self) -> dict[str, Any]:
        return {"model": self.args.model}


class _Ear:
    """One request's listening: rate, windows, model state, detector."""

    def __init__(self, stage: SileroVad, settings: TurnSettings) -> None:
        self.detector = TurnDetector(settings)
        self._stage = stage
        self._is_enabled = True
        self._resampler: Resampler | None = None
        self._carry = np.zeros(0, np.float32)  # samples at MODEL_HZ that do not fill a window yet
        self._heard = 0  # samples at MODEL_HZ before `_carry`
        self._came = 0  # samples of the input
        self._deaf = 0  # samples at MODEL_HZ to pass over: they came before `forget`, and the resampler still held them
        self._context = np.zeros(CONTEXT, np.float32)
        self._state = np.zeros(STATE_SHAPE, np.float32)

    async def hear(self, samples: np.ndarray, rate_hz: int) -> list[Chunk]:
        if self._resampler is None:
            self._resampler = Resampler(rate_hz, MODEL_HZ)
        elif rate_hz != self._resampler.from_hz:
            raise BadRequest(f"sample rate: got {rate_hz} in a stream of {self._resampler.from_hz} Hz", param="sample_rate_hz")
        self._came += len(samples)
        return await self._take(self._resampler.push(samples))

    async def finish(self) -> list[Chunk]:
        if self._resampler is None:
            return []
        events = await self._take(self._resampler.finish())
        number, offset = divmod(self._heard, WINDOW)
        return events + [self._event(name, window * WINDOW + offset) for name, window in self.detector.finish(number)]

    def configure(self, settings: TurnSettings, *, enabled: bool | None) -> None:
        self.detector.settings = settings
        if enabled is not None and enabled != self._is_enabled:
            self._is_enabled = enabled
            self.forget()

    def forget(self) -> None:
        """What was heard so far is nobody's turn. What speaks on from here begins a new one."""
        self.detector.reset()
        self._heard += len(self._carry)
        self._carry = np.zeros(0, np.float32)
        if self._resampler is not None:
            self._deaf = max(0, self._came * MODEL_HZ // self._resampler.from_hz - self._heard)

    async def _take(self, samples: np.ndarray) -> list[Chunk]:
        if self._deaf:
            passed = min(self._deaf, len(samples))
            self._heard, self._deaf, samples = self._heard + passed, self._deaf - passed, samples[passed:]
        audio = np.concatenate([self._carry, samples])
        whole = len(audio) // WINDOW
        windows, self._carry = audio[: whole * WINDOW].reshape(whole, WINDOW), audio[whole * WINDOW :]
        if not self._is_enabled:
            self._heard += whole * WINDOW
            return []
        events: list[Chunk] = []
        for start in range(0, whole, BATCH_WINDOWS):
            batch = windows[start : start + BATCH_WINDOWS]
            found, self._state = await self._stage.compute(self._stage.probabilities, batch, self._context, self._state)
            self._context = batch[-1, -CONTEXT:]
            for probability in found:
                # Windows are numbered from an origin that moves with `forget`, so count in samples: `at` is the window's first.
                number, offset = divmod(self._heard, WINDOW)
                events += [self._event(name, window * WINDOW + offset) for name, window in self.detector.push(number, probability)]
                self._heard += WINDOW
        return events

    def _event(self, name: str, at: int) -> Chunk:
        assert self._resampler is not None
        rate_hz = self._resampler.from_hz
        return event_chunk(name, at_samples=round(at * rate_hz / MODEL_HZ), rate_hz=rate_hz)


def _configured(settings: TurnSettings, given: dict[str, Any]) -> TurnSettings:
    """`settings` with what `given` says of them. Raises BadRequest."""
    known = {name: given[name] for name in ("threshold", "silence_duration_ms") if given.get(name) is not None}
    try:
        return msgspec.convert({**msgspec.to_builtins(settings), **known}, TurnSettings)
    except msgspec.ValidationError as error:
        raise BadRequest(f"turn detection: {error}") from error
