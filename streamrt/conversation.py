"""A voice session at work: drives the pure `Session` with a `Client`.

    async with Conversation(client, settings) as conversation:
        await conversation.append(samples)                       # what the microphone hears
        conversation.do(conversation.session.commit())           # any command of `session.py`
        async for event in conversation: ...                     # `session.Event`s and `TurnTimings`, for one taker

Calls: one long `listen`, per turn a `transcribe` that is fed while the user still speaks, and per answer a `respond`.
Knows calls, chunks and time. Knows no protocol; decides nothing that `session.py` can decide.

Rules
- Nothing here grows without bound: audio waits at most `Limits.buffer_s`, an answer is read at most `AHEAD_S` ahead of what is
  told, and what makes events waits while `OUTBOX` of them are not taken.
- Audio is told at the pace at which it is played, `lead_s` ahead, so that an interruption finds little to take back.
- The end of the `async with` cancels every call; no task outlives it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from streamrt import session as s
from streamrt.client import Call, Client
from streamrt.errors import Overloaded, StageFailed, StreamrtError
from streamrt.log import get_logger
from transport.chunk import Chunk, audio_chunk, event_chunk, text_chunk

log = get_logger("streamrt.conversation")
T = TypeVar("T")

OUTBOX = 64  # events that may wait for the client before answers are slowed down
AHEAD_S = 10.0  # audio of an answer that is read before it is told
AHEAD_CHUNKS = 512
FEED_CHUNKS = 16  # input that waits for a call's credit
PIECE_S = 0.1  # the longest piece of audio that is fed or told at a time
LISTEN_S = 5.0  # to get a place at a listening stage
RESPOND_S = 600.0  # deadline of an answer; it is told at the pace of speech
TRANSCRIBE_S = 60.0  # deadline of a transcript, beyond the longest turn


class TurnTimings(msgspec.Struct, frozen=True):
    """Where the time of a spoken turn went. Milliseconds from the end of speech; None = it did not happen."""

    item_id: str
    response_id: str
    stopped_ms: float  # the turn was found to be over: the VAD's wait for silence
    provisional_ms: float | None  # a first transcript was there
    transcript_ms: float | None  # the transcript was there
    first_text_ms: float | None  # the answer's first text was made
    first_audio_ms: float | None  # the answer's first audio was made
    heard_ms: float | None  # the first audio (of a text answer: text) was told to the client
    early: bool  # the answer was begun before the turn was over

    @property
    def work_ms(self) -> float | None:
        """`heard_ms` without the wait for silence."""
        return None if self.heard_ms is None else self.heard_ms - self.stopped_ms


class Lane(Generic[T]):
    """First in, first out, from several tasks to one: `put` never waits, `room` does. Ends with `end`, perhaps with an error."""

    def __init__(self, most: float, weight: Callable[[T], float] = lambda _: 1.0) -> None:
        self._most = most
        self._weight = weight
        self._entries: deque[T] = deque()
        self._load = 0.0
        self._ended = False
        self._error: Exception | None = None
        self._filled = asyncio.Event()
        self._roomy = asyncio.Event()
        self._roomy.set()

    def put(self, entry: T) -> None:
        if not self._ended:
            self._entries.append(entry)
            self._weigh(self._weight(entry))
            self._filled.set()

    async def room(self) -> None:
        """Wait until less than `most` is in it, or it has ended."""
        await self._roomy.wait()

    def end(self, error: Exception | None = None, *, discard: bool = False) -> None:
        """Nothing more comes. `discard`: and nothing of what is in it is wanted."""
        if not self._ended:
            self._ended, self._error = True, error
        if discard:
            self._entries.clear()
        self._filled.set()
        self._roomy.set()

    def drop(self, stale: Callable[[T], bool]) -> None:
        self._entries = deque(entry for entry in self._entries if not stale(entry))
        self._weigh(sum(map(self._weight, self._entries)) - self._load)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._entries:
            if self._ended:
                raise self._error or StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()
        entry = self._entries.popleft()
        self._weigh(-self._weight(entry))
        return entry

    def _weigh(self, change: float) -> None:
        self._load = max(0.0, self._load + change)
        if self._load < self._most or self._ended:
            self._roomy.set()
        else:
            self._roomy.clear()


class _Microphone:
    """The input audio that may still be asked for, by offset."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, np.ndarray, float]] = deque()  # first sample's offset, samples, when it came
        self._end = 0

    def add(self, samples: np.ndarray, now_s: float) -> None:
        self._pieces.append((self._end, samples, now_s))
        self._end += len(samples)

    def read(self, start: int, end: int, piece: int) -> list[np.ndarray]:
        """[start, end) in pieces of at most `piece` samples."""
        found = []
        for first, samples, _ in self._pieces:
            for at in range(max(start, first), min(end, first + len(samples)), piece):
                found.append(samples[at - first : min(at + piece, end) - first])
        return found

    def came_s(self, offset: int) -> float | None:
        """When the sample before `offset` came."""
        return next((now_s for first, samples, now_s in self._pieces if first < offset <= first + len(samples)), None)

    def drop(self, before: int) -> None:
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) <= before:
            self._pieces.popleft()


class _Running:
    """A call of this session, from the wish for it to its end."""

    def __init__(self, *, held: bool = False) -> None:
        self.feed: Lane[Chunk] = Lane(FEED_CHUNKS)
        self.ahead: Lane[Chunk] = Lane(AHEAD_S, _weight)  # of an answer: read and not told
        self.call: Call | None = None
        self.task: asyncio.Task[None] | None = None
        self.cause = "disconnected"  # said when the task is cancelled
        self.released = asyncio.Event()
        self.first_s: dict[str, float] = {}  # modality -> when its first chunk was made
        if not held:
            self.released.set()


class _Timeline:
    """When things happened in the turn that is measured."""

    def __init__(self, item_id: str, end_s: float, stopped_s: float, provisional_s: float | None) -> None:
        self.item_id = item_id
        self.end_s = end_s
        self.stopped_s = stopped_s
        self.provisional_s = provisional_s
        self.transcript_s: float | None = None
        self.response_id = ""
        self.early = False
        self.told = False


class Conversation:
    """One session. See the module."""

    def __init__(
        self,
        client: Client,
        settings: s.Settings | None = None,
        *,
        rate_hz: int = 24_000,
        lead_s: float = 2.5,
        limits: s.Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            client: a member of the run; not closed here.
            settings: None = as `[session]` of the pipeline says.
            rate_hz: of the audio that is appended.
            lead_s: how far audio is told ahead of being played; inf = as soon as it is made.
            limits: None = as `[session]` says.
            clock: seconds that only grow.
        """
        self.id = s.random_id("sess")
        self._client = client
        self._clock = clock
        self._lead_s = lead_s
        self.session = s.Session(
            settings or default_settings(client),
            abilities(client),
            rate_hz=rate_hz,
            limits=limits or s.Limits(session_s=client.pipeline.session.max_session_s, idle_s=client.pipeline.session.idle_timeout_s),
            now_s=clock(),
        )
        self.closed = ""  # why the session has ended by itself
        self._outbox: Lane[Any] = Lane(OUTBOX)
        self._microphone = _Microphone()
        self._running: dict[str, _Running] = {}
        self._listening: _Running | None = None
        self._group = asyncio.TaskGroup()
        self._timer: asyncio.Handle | None = None
        self._timer_due_s = math.inf
        self._speech_end_s: float | None = None  # of the turn that ends right now
        self._provisional_s: float | None = None
        self._timeline: _Timeline | None = None

    async def __aenter__(self) -> Conversation:
        await self._group.__aenter__()
        self.do(self.session.start())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.do(self.session.close())
        if self._timer is not None:
            self._timer.cancel()
        for call_id in list(self._running):
            self._cancel(call_id, "disconnected")
        self._outbox.end()
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)  # from outside, or because a task of ours has failed
        else:
            await self._group.__aexit__(None, None, None)  # the holder's own error goes on as it is

    # -- for the one who holds the conversation

    async def append(self, samples: np.ndarray) -> None:
        """Audio of the user, (samples,) float32 mono at `rate_hz`.

        Waits: while the listening stage has more to do than it can. Raises Refused when the buffer is full.
        """
        whole = self.session.settings.turn_detection is None
        piece = len(samples) if whole else self._piece()
        for first in range(0, len(samples), max(1, piece)):
            part = samples[first : first + piece]
            now_s = self._clock()
            actions = self.session.append(len(part), now_s)
            self._microphone.add(part, now_s)
            self.do(actions)
            if self._listening is not None:
                await self._listening.feed.room()

    def say(self, event: Any) -> None:
        """Put an event of the holder's own in its place among the others."""
        self._outbox.put(event)

    async def room(self) -> None:
        """Wait until the taker has taken enough. What answers commands waits here, so that a client that only asks is slowed down."""
        await self._outbox.room()

    def end(self) -> None:
        """No more events: the iteration ends when the taker has what there is."""
        self._outbox.end()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._outbox

    # -- carrying out

    def do(self, actions: list[s.Action]) -> None:
        """Carry out what the session has decided, in order. Never waits."""
        for action in actions:
            match action:
                case s.Tell(event):
                    self._tell(event)
                case s.FeedListen(call_id, start, end) | s.FeedTranscribe(call_id, start, end):
                    for samples in self._microphone.read(start, end, self._piece()):
                        self._feed(call_id, audio_chunk(samples, self.session.rate_hz))
                case s.FeedSamples(call_id, samples):
                    for first in range(0, len(samples), self._piece()):
                        self._feed(call_id, audio_chunk(samples[first : first + self._piece()], self.session.rate_hz))
                case s.ControlListen(call_id, event, fields):
                    self._feed(call_id, event_chunk(event, **fields))
                case s.AskProvisional(call_id):
                    self._feed(call_id, event_chunk("provisional"))
                case s.EndTranscribe(call_id):
                    if call_id in self._running:
                        self._running[call_id].feed.end()
                case s.OpenListen(call_id, params):
                    self._listening = self._start(call_id, _Running(), self._listen, params)
                    self._feed(call_id, event_chunk("configure", **params))
                case s.OpenTranscribe(call_id, _, params):
                    self._start(call_id, _Running(), self._transcribe, params)
                case s.OpenRespond(call_id, held=held):
                    self._start(call_id, _Running(held=held), self._respond, action)
                case s.ReleaseRespond(call_id):
                    if call_id in self._running:
                        self._running[call_id].released.set()
                case s.CancelCall(call_id, cause):
                    self._cancel(call_id, cause)
                case s.DropAudio(before):
                    self._microphone.drop(before)
                case s.Close(reason):
                    self.closed = reason
                    self._outbox.end()
        self._arm()

    def _tell(self, event: s.Event) -> None:
        now_s = self._clock()
        timeline = self._timeline
        match event:
            case s.Committed(item_id):
                end_s = self._speech_end_s if self._speech_end_s is not None else now_s
                self._timeline = _Timeline(item_id, end_s, now_s, self._provisional_s)
                self._provisional_s = None
            case s.TranscriptDone(item_id) if timeline and timeline.item_id == item_id:
                timeline.transcript_s = now_s
            case s.ResponseStarted(response) if timeline and not timeline.response_id and response.in_conversation:
                timeline.response_id = response.id
            case s.ResponseEnded(response) if response.status == "cancelled":
                # What was not sent yet is not to be heard any more.
                self._outbox.drop(
                    lambda entry: isinstance(entry, s.TextDelta | s.AudioDelta | s.CallDelta) and entry.response_id == response.id
                )
        self._outbox.put(event)

    def _measure(self, running: _Running, response_id: str, now_s: float) -> None:
        """The first of an answer was told: say how long it took."""
        timeline = self._timeline
        if timeline is None or timeline.told or timeline.response_id != response_id:
            return
        timeline.told = True
        self._client.metrics.observe("streamrt_turn_first_audio_seconds", value=now_s - timeline.end_s)
        end_s = timeline.end_s

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else (at_s - end_s) * 1000

        self._outbox.put(
            TurnTimings(
                item_id=timeline.item_id,
                response_id=response_id,
                stopped_ms=(timeline.stopped_s - timeline.end_s) * 1000,
                provisional_ms=since(timeline.provisional_s),
                transcript_ms=since(timeline.transcript_s),
                first_text_ms=since(running.first_s.get("text")),
                first_audio_ms=since(running.first_s.get("audio")),
                heard_ms=since(now_s),
                early=min(running.first_s.values()) < timeline.stopped_s,
            )
        )

    def _arm(self) -> None:
        """Have `tick` called when the session wants it. A timer that fires early arms itself again."""
        due_s = self.session.deadline_s
        if due_s < self._timer_due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due_s = due_s
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer_due_s = math.inf
        self.do(self.session.tick(self._clock()))

    def _piece(self) -> int:
        return max(1, int(self.session.rate_hz * PIECE_S))

    # -- calls

    def _start(self, call_id: str, running: _Running, body: Callable[[str, _Running, Any], Any], argument: Any) -> _Running:
        self._running[call_id] = running
        running.task = self._group.create_task(self._run(call_id, running, body, argument), name=call_id)
        return running

    async def _run(self, call_id: str, running: _Running, body: Callable[[str, _Running, Any], Any], argument: Any) -> None:
        try:
            await body(call_id, running, argument)
        finally:
            running.feed.end(discard=True)
            if running.call is not None:
                running.call.cancel(running.cause)  # after its end this is nothing
            self._running.pop(call_id, None)

    def _cancel(self, call_id: str, cause: str) -> None:
        running = self._running.pop(call_id, None)  # here: a task that is cancelled before its first step runs no `finally`
        if running is None:
            return
        running.cause = cause
        running.feed.end(discard=True)
        if running.call is not None:
            running.call.cancel(cause)
        if running.task is not None:
            running.task.cancel()

    def _feed(self, call_id: str, chunk: Chunk) -> None:
        if call_id in self._running:
            self._running[call_id].feed.put(chunk)

    async def _feed_all(self, call: Call, feed: Lane[Chunk]) -> None:
        """Input, as the call has credit for it. Its end, or a failure, is told by the call's own iteration."""
        try:
            async for chunk in feed:
                await call.feed(chunk)
            await call.end()
        except StreamrtError:
            feed.end(discard=True)

    async def _open(self, running: _Running, task: str, params: dict[str, Any], timeout_s: float | None) -> Call:
        """A call that is fed from `running.feed`."""
        try:
            async with asyncio.timeout(LISTEN_S if timeout_s is None else None):
                running.call = await self._client.submit(task, params, timeout_s=timeout_s, affinity=self.id)
        except TimeoutError:
            raise Overloaded(f"no stage had a place for {task} within {LISTEN_S:g} s") from None
        self._group.create_task(self._feed_all(running.call, running.feed), name=f"feed {task}")
        return running.call

    async def _listen(self, call_id: str, running: _Running, params: dict[str, Any]) -> None:
        session = self.session
        error: StreamrtError = StageFailed("the stage has stopped listening")
        try:
            async for chunk in await self._open(running, "listen", params, None):
                await self.room()
                at = int(chunk.meta.get("at_samples", 0))
                match chunk.event:
                    case "speech_started":
                        self.do(session.on_speech_started(call_id, at))
                    case "speech_paused":
                        self.do(session.on_speech_paused(call_id))
                    case "speech_resumed":
                        self._provisional_s = None
                        self.do(session.on_speech_resumed(call_id))
                    case "speech_stopped":
                        self._speech_end_s = self._microphone.came_s(session.offset_of(at))
                        self.do(session.on_speech_stopped(call_id, at))
                        self._speech_end_s = None
        except StreamrtError as failure:
            error = failure
        log.warning("listen.over", code=error.code, reason=error.message)
        self.do(session.on_listen_over(call_id, error.code, error.message, self._clock()))

    async def _transcribe(self, call_id: str, running: _Running, params: dict[str, Any]) -> None:
        timeout_s = self.session.limits.buffer_s + TRANSCRIBE_S
        try:
            async for chunk in await self._open(running, "transcribe", params, timeout_s):
                await self.room()
                if chunk.modality != "text":
                    continue
                if chunk.meta.get("provisional"):
                    self._provisional_s = self._clock()
                    self.do(self.session.on_provisional(call_id, chunk.text))
                else:
                    self.do(self.session.on_segment(call_id, chunk.text))
        except StreamrtError as error:
            self.do(self.session.on_transcribe_failed(call_id, error.code, error.message))
        else:
            self.do(self.session.on_transcribed(call_id))

    async def _respond(self, call_id: str, running: _Running, wish: s.OpenRespond) -> None:
        session = self.session
        pace = _Pace(self._lead_s, self._clock)
        finish_reason = "stop"
        usage: dict[str, int] = {}
        try:
            running.call = await self._client.submit(
                "respond", wish.params, [text_chunk(wish.said)], outputs=wish.outputs, timeout_s=RESPOND_S, affinity=self.id
            )
            reader = self._group.create_task(self._read(running.call, running), name=f"read {call_id}")
            try:
                await running.released.wait()
                async for chunk in running.ahead:
                    finish_reason = chunk.meta.get("finish_reason", finish_reason)
                    usage = usage | chunk.meta.get("usage", {})
                    if chunk.modality == "text" and chunk.text:
                        await self.room()
                        self.do(session.on_text(call_id, chunk.text))
                        if "audio" not in wish.outputs:
                            self._measure(running, wish.response_id, self._clock())
                    elif call := chunk.meta.get("tool_call"):
                        await self.room()
                        self.do(session.on_function_call(call_id, call.get("name", ""), call.get("arguments", "")))
                    elif chunk.modality == "audio":
                        await self._play(call_id, running, wish.response_id, chunk, pace)
            finally:
                reader.cancel()
        except StreamrtError as error:
            self.do(session.on_respond_failed(call_id, error.code, error.message))
        else:
            self.do(session.on_responded(call_id, finish_reason, usage))

    async def _read(self, call: Call, running: _Running) -> None:
        """Read an answer ahead of its being told, within bounds."""
        try:
            async for chunk in call:
                if chunk.tensors:
                    running.first_s.setdefault(chunk.modality, self._clock())
                running.ahead.put(chunk)
                await running.ahead.room()
        except StreamrtError as error:
            # An answer that nobody knows of yet fails at once, and unheard.
            running.ahead.end(error, discard=not running.released.is_set())
            running.released.set()
        else:
            running.ahead.end()

    async def _play(self, call_id: str, running: _Running, response_id: str, chunk: Chunk, pace: _Pace) -> None:
        """Tell audio in short pieces, each when it is due."""
        samples, rate_hz = chunk.samples, chunk.sample_rate_hz
        span = (chunk.meta.get("text_start"), chunk.meta.get("text_end"))
        piece = max(1, int(rate_hz * PIECE_S))
        for first in range(0, len(samples), piece):
            part = samples[first : first + piece]
            await pace.due(len(part) / rate_hz)
            await self.room()
            self.do(self.session.on_audio(call_id, part, len(part), rate_hz, *span))
            self._measure(running, response_id, self._clock())
            span = (None, None)


class _Pace:
    """Audio leaves at most `lead_s` before it is played, when playing starts with the first of it and stops for nothing but the want of it."""

    def __init__(self, lead_s: float, clock: Callable[[], float]) -> None:
        self._lead_s = lead_s
        self._clock = clock
        self._played_s = 0.0  # when all that has left is played

    async def due(self, duration_s: float) -> None:
        now_s = self._clock()
        self._played_s = max(self._played_s, now_s)
        early_s = self._played_s - now_s - self._lead_s
        self._played_s += duration_s
        if early_s > 0:
            await asyncio.sleep(early_s)


def _weight(chunk: Chunk) -> float:
    """Seconds of a chunk of an answer; text counts by the chunk."""
    sound_s = len(chunk.samples) / chunk.sample_rate_hz if chunk.modality == "audio" and chunk.sample_rate_hz else 0.0
    return sound_s + AHEAD_S / AHEAD_CHUNKS


def abilities(client: Client) -> s.Abilities:
    """What the pipeline can do in a session."""
    tasks = client.tasks()
    respond = tasks.get("respond")
    return s.Abilities("listen" in tasks, "transcribe" in tasks, respond is not None, respond is not None and "audio" in respond.outputs)


def usable_voice(client: Client, voice: str) -> str:
    """`voice` when the speaking stage has it, else that stage's own; "" when nothing speaks or nothing is known of it yet."""
    respond = client.tasks().get("respond")
    if respond is None or "audio" not in respond.outputs:
        return ""
    facts = client.describe(respond.outputs["audio"].partition(".")[0])
    voices = facts.get("voices", [])
    return voice if voice in voices or not voices else str(facts.get("default_voice", voices[0]))


def default_settings(client: Client) -> s.Settings:
    """`[session]` of the pipeline."""
    config = client.pipeline.session
    detection = config.turn_detection
    return s.Settings(
        instructions=config.instructions,
        voice=usable_voice(client, config.voice),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        language=config.language,
        turn_detection=s.TurnDetection(
            threshold=detection.threshold,
            prefix_padding_ms=detection.prefix_padding_ms,
            silence_duration_ms=detection.silence_duration_ms,
            create_response=detection.create_response,
            interrupt_response=detection.interrupt_response,
        ),
    )
