"""A voice session: what was heard, what was said, and whose turn it is. Pure: events in, actions out.

    conversation.py:  samples appended, events of the `listen` call, words of a `transcribe` call, chunks of a `respond` call,
                      what the client asks for, the time                                            -> a method of `Session`
    conversation.py  <- what to do: open, feed, release and cancel calls, drop audio, tell the client

Knows turns, items and responses, in words of no protocol. Knows no sockets, no clock and no samples: audio is counted, never touched.

Rules
- One response at most is active in the conversation. Each that was told as started is told as ended, exactly once, and nothing of
  it is told afterwards. Responses outside of the conversation may run beside it.
- Each committed audio item gets exactly one transcript or one failure.
- A command that can not be carried out raises `Refused` and changes nothing.
- What a call says after the session has turned away from it is ignored: calls have ids of their own, never used twice.
- A turn is answered early: when speech pauses, the provisional transcript opens a `respond` call whose output is held back. When the
  turn ends with the same words the output is released; when speech goes on, or the words differ, the call is cancelled unheard.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Sequence, Sized
from typing import Any

import msgspec

# ---- settings -----------------------------------------------------------------------------------------------------------------


class TurnDetection(msgspec.Struct, frozen=True):
    """How a turn begins and ends."""

    threshold: float = 0.5  # of the VAD, 0..1
    prefix_padding_ms: int = 300  # audio before the detected start that belongs to the turn
    silence_duration_ms: int = 500  # silence that ends the turn
    create_response: bool = True  # answer when a turn ends
    interrupt_response: bool = True  # stop speaking when the user starts


class Settings(msgspec.Struct, frozen=True):
    """What a client may change while the session runs."""

    instructions: str = ""
    modality: str = "audio"  # "audio" | "text": how the answer is given
    voice: str = ""
    speed: float = 1.0
    max_tokens: int | None = None
    temperature: float | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = "auto"
    turn_detection: TurnDetection | None = TurnDetection()  # None: the client commits
    tells_transcripts: bool = True  # whether the client hears of transcripts; they are made anyway
    language: str = ""  # of speech, "" = any
    prompt: str = ""  # words to expect in speech
    answers: bool = True  # False: transcription only


class Abilities(msgspec.Struct, frozen=True):
    """Which tasks the pipeline has."""

    listen: bool = True
    transcribe: bool = True
    respond: bool = True
    speaks: bool = True  # `respond` can give audio


class Limits(msgspec.Struct, frozen=True):
    """What bounds a session."""

    session_s: float = 3600.0
    idle_s: float = 300.0  # without audio or a command of the client
    buffer_s: float = 60.0  # longest turn, and the most audio that waits for a commit
    lookback_s: float = 10.0  # audio kept while nobody speaks: the prefix of a turn, and what the VAD has not judged yet
    stall_s: float = 2.0  # a speaker from whom no audio comes for so long has ended the turn
    min_commit_ms: int = 100
    max_items: int = 1000  # the oldest go first
    max_chars: int = 1_000_000  # of text in all items
    max_parallel: int = 4  # responses outside of the conversation


class Refused(Exception):
    """The client asked for what can not be done now; nothing has changed."""

    def __init__(self, code: str, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


MS_PER_CHAR = 65.0  # of speech, where nothing better is known

# ---- the conversation ---------------------------------------------------------------------------------------------------------


class Part(msgspec.Struct):
    """One part of a message."""

    kind: str  # "text" | "audio"
    text: str | None = None  # of audio: its transcript, None while it is not known


class Span(msgspec.Struct, frozen=True):
    """The characters [start, end) of an answer are spoken from `at_ms` of its audio on."""

    start: int
    end: int
    at_ms: float


class Item(msgspec.Struct):
    """One entry of the conversation."""

    id: str
    kind: str = "message"  # "message" | "function_call" | "function_call_output"
    role: str = ""  # of a message: "user" | "assistant" | "system"
    parts: list[Part] = []
    status: str = "completed"  # "in_progress" | "completed" | "incomplete"
    name: str = ""  # function_call
    call_id: str = ""  # function_call, function_call_output
    arguments: str = ""  # function_call
    output: str = ""  # function_call_output
    failure: tuple[str, str] | None = None  # why its audio was not understood: code, message
    audio_ms: float = 0.0  # assistant: audio given to the client
    spans: list[Span] = []
    truncated_of_ms: float = 0.0  # > 0: cut by the client from speech of this length; nothing is added any more

    @property
    def text(self) -> str:
        return "".join(part.text or "" for part in self.parts)

    def copy(self) -> Item:
        twin = msgspec.structs.replace(self, spans=list(self.spans))
        twin.parts = [msgspec.structs.replace(part) for part in self.parts]
        return twin

    def message(self) -> dict[str, Any] | None:
        """As a language model reads it; None when there is nothing to read."""
        if self.kind == "function_call" and self.status != "completed":
            return None  # half a call is nothing to read
        if self.kind == "function_call":
            call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.kind == "function_call_output":
            return {"role": "tool", "content": self.output, "tool_call_id": self.call_id}
        return {"role": self.role, "content": self.text} if self.text.strip() else None


class Wish(msgspec.Struct, frozen=True):
    """What a client says of one response; None = as the session is set."""

    instructions: str | None = None
    modality: str | None = None
    voice: str | None = None
    max_tokens: int | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: Any = None
    in_conversation: bool = True
    metadata: dict[str, str] | None = None
    input: tuple[Item | str, ...] | None = None  # instead of the conversation: items, or ids of its items


class Response(msgspec.Struct):
    """One answer, from its start to its end."""

    id: str
    settings: Settings  # as they stood, with the wish applied
    in_conversation: bool = True
    metadata: dict[str, str] | None = None
    status: str = "in_progress"  # then "completed" | "cancelled" | "failed" | "incomplete"
    reason: str = ""  # "turn_detected" | "client_cancelled" | "max_output_tokens" | an error code
    message: str = ""  # of a failure
    item: Item | None = None  # once there is text or sound
    calls: list[Item] = []  # of functions, in order
    usage: dict[str, int] = {}

    def copy(self) -> Response:
        item, calls = self.item.copy() if self.item else None, [call.copy() for call in self.calls]
        return msgspec.structs.replace(self, item=item, calls=calls, usage=dict(self.usage))


# ---- actions: calls --------------------------------------------------------------------------------------------------------------


class OpenListen(msgspec.Struct, frozen=True):
    call_id: str
    params: dict[str, Any]


class FeedListen(msgspec.Struct, frozen=True):
    """The samples [start, end), counted from the session's start."""

    call_id: str
    start: int
    end: int


class ControlListen(msgspec.Struct, frozen=True):
    """An event in the audio stream: "configure", "commit" or "clear"."""

    call_id: str
    event: str
    fields: dict[str, Any] = {}


class OpenTranscribe(msgspec.Struct, frozen=True):
    call_id: str
    item_id: str
    params: dict[str, Any]


class FeedTranscribe(msgspec.Struct, frozen=True):
    call_id: str
    start: int
    end: int


class FeedSamples(msgspec.Struct, frozen=True):
    """Audio that came with an item rather than through the buffer."""

    call_id: str
    samples: Any


class AskProvisional(msgspec.Struct, frozen=True):
    call_id: str


class EndTranscribe(msgspec.Struct, frozen=True):
    call_id: str


class OpenRespond(msgspec.Struct, frozen=True):
    call_id: str
    response_id: str
    params: dict[str, Any]
    said: str  # the last user message, for stages that take plain text
    outputs: frozenset[str]
    held: bool  # True: nothing of it is reported before ReleaseRespond


class ReleaseRespond(msgspec.Struct, frozen=True):
    call_id: str


class CancelCall(msgspec.Struct, frozen=True):
    call_id: str
    cause: str  # "turn_detected" | "client_cancelled" | "superseded" | "cleared" | "disconnected" | "expired"


class DropAudio(msgspec.Struct, frozen=True):
    """Samples before this one are not needed any more."""

    before: int


class Close(msgspec.Struct, frozen=True):
    """The session is over."""

    reason: str


class Tell(msgspec.Struct, frozen=True):
    """Say it to the client."""

    event: Event


# ---- actions: what the client is told -----------------------------------------------------------------------------------------


class SpeechStarted(msgspec.Struct, frozen=True):
    item_id: str
    at_ms: int


class SpeechStopped(msgspec.Struct, frozen=True):
    item_id: str
    at_ms: int


class Committed(msgspec.Struct, frozen=True):
    item_id: str
    previous_id: str | None


class Cleared(msgspec.Struct, frozen=True):
    pass


class ItemAdded(msgspec.Struct, frozen=True):
    item: Item
    previous_id: str | None


class ItemDone(msgspec.Struct, frozen=True):
    item: Item
    previous_id: str | None


class ItemRetrieved(msgspec.Struct, frozen=True):
    item: Item


class ItemDeleted(msgspec.Struct, frozen=True):
    item_id: str


class ItemTruncated(msgspec.Struct, frozen=True):
    item_id: str
    audio_end_ms: int


class TranscriptDelta(msgspec.Struct, frozen=True):
    item_id: str
    text: str


class TranscriptDone(msgspec.Struct, frozen=True):
    item_id: str
    text: str
    audio_s: float


class TranscriptFailed(msgspec.Struct, frozen=True):
    item_id: str
    code: str
    message: str


class ResponseStarted(msgspec.Struct, frozen=True):
    response: Response


class OutputStarted(msgspec.Struct, frozen=True):
    response: Response
    previous_id: str | None


class TextDelta(msgspec.Struct, frozen=True):
    response_id: str
    item_id: str
    modality: str  # "audio": the text is what is spoken
    text: str


class AudioDelta(msgspec.Struct, frozen=True):
    response_id: str
    item_id: str
    samples: Any
    rate_hz: int


class CallStarted(msgspec.Struct, frozen=True):
    response: Response
    item: Item
    previous_id: str | None


class CallDelta(msgspec.Struct, frozen=True):
    response_id: str
    item_id: str
    call_id: str  # the function call's
    arguments: str


class ResponseEnded(msgspec.Struct, frozen=True):
    response: Response
    previous_id: str | None


class Problem(msgspec.Struct, frozen=True):
    """Something failed that no request stands for."""

    code: str
    message: str


Event = (
    SpeechStarted
    | SpeechStopped
    | Committed
    | Cleared
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | TranscriptDelta
    | TranscriptDone
    | TranscriptFailed
    | ResponseStarted
    | OutputStarted
    | TextDelta
    | AudioDelta
    | CallStarted
    | CallDelta
    | ResponseEnded
    | Problem
)

Action = (
    OpenListen
    | FeedListen
    | ControlListen
    | OpenTranscribe
    | FeedTranscribe
    | FeedSamples
    | AskProvisional
    | EndTranscribe
    | OpenRespond
    | ReleaseRespond
    | CancelCall
    | DropAudio
    | Close
    | Tell
)


# ---- the machine -----------------------------------------------------------------------------------------------------------------


class Turn(msgspec.Struct):
    """The user speaks."""

    item_id: str
    start: int
    call_id: str  # of its transcribe call
    paused: bool = False


class Hearing(msgspec.Struct):
    """One transcribe call."""

    item_id: str
    fed: int = 0  # samples, from the session's start
    samples: int = 0  # of its audio
    text: str = ""
    committed: bool = False
    over: bool = False
    failure: tuple[str, str] | None = None  # code, message


class Answering(msgspec.Struct):
    """A response that is being made."""

    response: Response
    call_id: str = ""  # "" while it waits for transcripts
    waits: set[str] = set()  # ids of items whose transcript it needs
    turn_item: str = ""  # the turn that it answers, when nobody asked for it
    guess: str | None = None  # the provisional transcript that it was begun with
    input: tuple[Item | str, ...] | None = None


def random_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(10)}"


class Session:
    """See the module. Every public method returns what is to be done, in order."""

    def __init__(
        self,
        settings: Settings,
        abilities: Abilities | None = None,
        *,
        rate_hz: int = 24_000,
        limits: Limits | None = None,
        now_s: float = 0.0,
        new_id: Callable[[str], str] = random_id,
    ) -> None:
        self.abilities = abilities or Abilities()
        self.settings = self._possible(settings)
        self.rate_hz = rate_hz
        self.limits = limits or Limits()
        self.items: list[Item] = []
        self.appended = 0  # samples since the session's start
        self._new_id = new_id
        self._serial = itertools.count()
        self._expires_s = now_s + self.limits.session_s
        self._appended_s = now_s  # when audio last came
        self._touched_s = now_s  # when the client last did anything
        self._floor = 0  # samples before this one belong to earlier turns, or were cleared
        self._dropped = 0
        self._turn: Turn | None = None
        self._hearings: dict[str, Hearing] = {}
        self._answers: dict[str, Answering] = {}  # by response id
        self._active = ""  # response id
        self._early: Answering | None = None  # begun before the turn has ended; nobody knows of it
        self._owed = ""  # item id of a turn that ended while another response was active
        self._listen_id = ""
        self._listen_from = 0  # offset of the listen call's first sample
        self._listen_again_s = now_s
        self._is_deaf = False  # the last listen call failed; said once
        self._has_spoken = False
        self._closed = False

    # -- what others ask of it

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do; inf once the session is over."""
        if self._closed:
            return math.inf
        over = min(self._expires_s, self._touched_s + self.limits.idle_s)
        return min(over, self._appended_s + self.limits.stall_s) if self._turn else over

    @property
    def active_response(self) -> str:
        """The id of the response that is being made in the conversation, or ""."""
        return self._active

    def offset_of(self, at: int) -> int:
        """The offset in the session of a sample that the listen call counts as `at`."""
        return at + self._listen_from

    # -- the session itself

    def start(self) -> list[Action]:
        return self._open_listen()

    def update(self, settings: Settings, *, rate_hz: int | None = None) -> list[Action]:
        """Change the settings, all or none; `settings` then says what is used."""
        settings = self._possible(settings)
        if self._has_spoken and settings.voice != self.settings.voice:
            raise Refused(
                "cannot_update_voice",
                "Cannot update a conversation's voice if assistant audio is present.",
                param="session.audio.output.voice",
            )
        if rate_hz is not None and rate_hz != self.rate_hz:
            if self.appended:
                raise Refused(
                    "invalid_value",
                    "The input audio format cannot change once audio has been appended.",
                    param="session.audio.input.format",
                )
            self.rate_hz = rate_hz
        before, self.settings = self.settings, settings
        if settings.turn_detection == before.turn_detection:
            return []
        if settings.turn_detection is None:
            return [
                *self._abandon_turn("superseded", floor=self._turn.start if self._turn else self.appended),
                *self._close_listen("superseded"),
            ]
        if not self._listen_id:
            return self._open_listen()
        return [ControlListen(self._listen_id, "configure", self._listen_params())]

    def touch(self, now_s: float) -> None:
        """The client has done something."""
        self._touched_s = now_s

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if self._closed:
            return []
        if now_s >= self._expires_s:
            return self._expire("session_expired", f"Your session hit the maximum duration of {self.limits.session_s / 60:g} minutes.")
        if now_s >= self._touched_s + self.limits.idle_s:
            if not self._answers:
                return self._expire("session_idle", f"Nothing came from the client for {self.limits.idle_s:g} s.")
            self._touched_s = now_s  # it listens to an answer
        if self._turn and now_s >= self._appended_s + self.limits.stall_s:
            return [*self._stop_speech(self.appended), *self._control_listen("commit")]
        return []

    def close(self, cause: str = "disconnected") -> list[Action]:
        """End everything that runs."""
        if self._closed:
            return []
        self._closed = True
        self._owed = ""
        actions = self._abandon_turn(cause, floor=self.appended)
        while self._hearings:
            call_id, hearing = self._hearings.popitem()
            actions += [CancelCall(call_id, cause), *self._transcript_failed(hearing.item_id, cause, "The session is over.")]
        for answer in list(self._answers.values()):
            actions += self._stop_response(answer, "failed", cause, "The session is over.")
        return [*actions, *self._close_listen(cause)]

    def _expire(self, code: str, message: str) -> list[Action]:
        return [Tell(Problem(code, message)), *self.close("expired"), Close(code)]

    # -- audio in

    def append(self, samples: int, now_s: float) -> list[Action]:
        """Audio has come. Refused when more would wait for a commit than the buffer may hold."""
        waits = (self.appended + samples - self._floor) / self.rate_hz
        if self.settings.turn_detection is None and waits > self.limits.buffer_s:
            raise Refused(
                "input_audio_buffer_full",
                f"The input audio buffer holds at most {self.limits.buffer_s:g} s of audio. Commit or clear it.",
                param="audio",
            )
        start, self.appended = self.appended, self.appended + samples
        self._appended_s = self._touched_s = now_s
        actions: list[Action] = []
        if self.settings.turn_detection is not None and not self._listen_id and now_s >= self._listen_again_s:
            actions += self._open_listen(start)
        if self._listen_id:
            actions.append(FeedListen(self._listen_id, start, self.appended))
        if self._turn:
            actions += self._feed(self._turn.call_id, self.appended)
            if self.appended - self._turn.start >= self.limits.buffer_s * self.rate_hz:
                actions += [*self._stop_speech(self.appended), *self._control_listen("commit")]
        return [*actions, *self._drop()]

    def commit(self) -> list[Action]:
        """The client says that its turn is over. Creates no response."""
        if not self.abilities.transcribe:
            raise Refused("no_transcription", "This pipeline has no stage that transcribes: audio cannot be committed.")
        start = self._turn.start if self._turn else max(self._floor, self._dropped)
        ms = (self.appended - start) * 1000 / self.rate_hz
        if ms < self.limits.min_commit_ms:
            raise Refused(
                "input_audio_buffer_commit_empty",
                "Error committing input audio buffer: buffer too small. "
                f"Expected at least {self.limits.min_commit_ms}ms of audio, but buffer only has {ms:.2f}ms of audio.",
            )
        actions = [] if self._turn else self._begin_turn(start)
        return [*actions, *self._end_turn(self.appended), *self._control_listen("commit"), *self._drop()]

    def clear(self) -> list[Action]:
        """Forget the audio that is not committed."""
        return [*self._abandon_turn("cleared", floor=self.appended), *self._control_listen("clear"), Tell(Cleared()), *self._drop()]

    # -- what the listen call says

    def on_speech_started(self, call_id: str, at: int) -> list[Action]:
        detection, at = self.settings.turn_detection, self.offset_of(at)
        if call_id != self._listen_id or detection is None or self._turn or at < self._floor:
            return []  # it was said before a commit or a clear that the client has been told of
        self._is_deaf = False
        start = max(at - detection.prefix_padding_ms * self.rate_hz // 1000, self._floor, self._dropped)
        actions = self._begin_turn(start)
        assert self._turn is not None
        actions.append(Tell(SpeechStarted(self._turn.item_id, self._ms(start))))
        if detection.interrupt_response:
            self._owed = ""
            if self._active:
                actions += self._stop_response(self._answers[self._active], "cancelled", "turn_detected")
        return actions

    def on_speech_paused(self, call_id: str) -> list[Action]:
        """It may be the end: let the turn be understood, and answered, while we wait."""
        if call_id != self._listen_id or not self._turn:
            return []
        self._turn.paused = True
        hearing = self._hearings.get(self._turn.call_id)
        return [AskProvisional(self._turn.call_id)] if hearing and not hearing.over else []

    def on_speech_resumed(self, call_id: str) -> list[Action]:
        if call_id != self._listen_id or not self._turn:
            return []
        self._turn.paused = False
        return self._forget_early()

    def on_speech_stopped(self, call_id: str, at: int) -> list[Action]:
        at = self.offset_of(at)
        if call_id != self._listen_id or not self._turn or at < self._turn.start:
            return []
        return [*self._stop_speech(at), *self._drop()]

    def on_listen_over(self, call_id: str, code: str, message: str, now_s: float) -> list[Action]:
        """The listen call has failed: a turn that was open ends here. It is opened again when audio comes, after a second."""
        if call_id != self._listen_id:
            return []
        self._listen_id = ""
        self._listen_again_s = now_s + 1.0
        actions: list[Action] = [] if self._is_deaf else [Tell(Problem(code, f"Turn detection has failed: {message}"))]
        self._is_deaf = True
        return [*actions, *(self._stop_speech(self.appended) if self._turn else [])]

    # -- what a transcribe call says

    def on_provisional(self, call_id: str, text: str) -> list[Action]:
        """The words so far. Begin the answer, held back, when the turn may be over."""
        text = text.strip()
        if not self._turn or self._turn.call_id != call_id or not self._turn.paused or not text or not self._may_begin_early():
            return []
        if self._early is not None and self._early.guess == text:
            return []
        actions = self._forget_early()
        response = Response(self._new_id("resp"), self.settings)
        self._early = Answering(response, turn_item=self._turn.item_id, guess=text)
        return [*actions, self._open_respond(self._early, [*self._messages(None), {"role": "user", "content": text}], held=True)]

    def on_segment(self, call_id: str, text: str) -> list[Action]:
        """Final words, more may follow."""
        hearing = self._hearings.get(call_id)
        if hearing is not None and not hearing.text:
            text = text.lstrip()
        if hearing is None or not text:
            return []
        hearing.text += text
        return [Tell(TranscriptDelta(hearing.item_id, text))] if hearing.committed and self.settings.tells_transcripts else []

    def on_transcribed(self, call_id: str) -> list[Action]:
        """There are no more words."""
        return self._hearing_over(call_id, None)

    def on_transcribe_failed(self, call_id: str, code: str, message: str) -> list[Action]:
        return self._hearing_over(call_id, (code, message))

    # -- what a respond call says

    def on_text(self, call_id: str, text: str) -> list[Action]:
        answer = self._answer(call_id)
        if answer is None or not text:
            return []
        actions, item = self._output(answer.response)
        if not item.truncated_of_ms:
            item.parts[0].text = (item.parts[0].text or "") + text
        return [*actions, Tell(TextDelta(answer.response.id, item.id, answer.response.settings.modality, text))]

    def on_audio(
        self, call_id: str, samples: Any, count: int, rate_hz: int, text_start: int | None = None, text_end: int | None = None
    ) -> list[Action]:
        answer = self._answer(call_id)
        if answer is None or not count:
            return []
        self._has_spoken = True
        actions, item = self._output(answer.response)
        if not item.truncated_of_ms:
            if text_start is not None and text_end is not None:
                item.spans.append(Span(text_start, text_end, item.audio_ms))
            item.audio_ms += count * 1000 / rate_hz
        return [*actions, Tell(AudioDelta(answer.response.id, item.id, samples, rate_hz))]

    def on_function_call(self, call_id: str, name: str, arguments: str) -> list[Action]:
        """Part of a function call: the first one has its `name`, each may have some of its arguments' JSON."""
        answer = self._answer(call_id)
        if answer is None:
            return []
        response, actions = answer.response, list[Action]()
        if name:
            item = Item(self._new_id("item"), kind="function_call", status="in_progress", name=name, call_id=self._new_id("call"))
            response.calls.append(item)
            previous_id = self.items[-1].id if self.items and response.in_conversation else None
            actions.append(Tell(CallStarted(response.copy(), item.copy(), previous_id)))
            if response.in_conversation:
                self.items.append(item)
                actions += self._make_room()
        item = response.calls[-1]
        item.arguments += arguments
        return [*actions, *([Tell(CallDelta(response.id, item.id, item.call_id, arguments))] if arguments else [])]

    def on_responded(self, call_id: str, finish_reason: str, usage: dict[str, int]) -> list[Action]:
        answer = self._answer(call_id)
        if answer is None:
            return []
        answer.response.usage = usage
        answer.call_id = ""
        if finish_reason == "length":
            return self._end_response(answer, "incomplete", "max_output_tokens")
        return self._end_response(answer, "completed")

    def on_respond_failed(self, call_id: str, code: str, message: str) -> list[Action]:
        if self._early is not None and self._early.call_id == call_id:
            self._early = None  # nobody knows of it; the turn's end tries again
            return []
        answer = self._answer(call_id)
        if answer is None:
            return []
        answer.call_id = ""
        if answer.waits:
            return []  # it was begun early; the transcript opens it again
        return self._end_response(answer, "failed", code, message)

    # -- what the client asks for

    def create_response(self, wish: Wish | None = None) -> list[Action]:
        wish = wish or Wish()
        if not self.settings.answers or not self.abilities.respond:
            why = "This pipeline has no stage that responds." if self.settings.answers else "A transcription session creates no responses."
            raise Refused("no_responses", why)
        if wish.in_conversation and self._active:
            raise Refused(
                "conversation_already_has_active_response",
                f"Conversation already has an active response in progress: {self._active}. "
                "Wait until the response is finished before creating a new one.",
            )
        if not wish.in_conversation and sum(not a.response.in_conversation for a in self._answers.values()) >= self.limits.max_parallel:
            raise Refused("too_many_responses", f"At most {self.limits.max_parallel} responses run outside of the conversation.")
        for index, entry in enumerate(wish.input or ()):
            if isinstance(entry, str):
                self._find(entry, "invalid_value", param=f"response.input[{index}].id")
        changes = {
            name: value
            for name in ("instructions", "modality", "voice", "max_tokens", "tools", "tool_choice")
            if (value := getattr(wish, name)) is not None
        }
        response = Response(
            self._new_id("resp"),
            self._possible(msgspec.structs.replace(self.settings, **changes)),
            in_conversation=wish.in_conversation,
            metadata=wish.metadata,
        )
        actions: list[Action] = []
        if wish.in_conversation:
            self._owed = ""
            actions = self._forget_early()
        return [*actions, *self._start_response(Answering(response, input=wish.input))]

    def cancel_response(self, response_id: str = "") -> list[Action]:
        answer = self._answers.get(response_id or self._active)
        if answer is None:
            raise Refused("response_cancel_not_active", "Cancellation failed: no active response found")
        return self._stop_response(answer, "cancelled", "client_cancelled")

    def create_item(self, item: Item, previous_id: str | None = None, audio: Sized | None = None) -> list[Action]:
        """Put an item behind `previous_id` ("root": first; None: last). `audio` is transcribed as if it had been spoken."""
        if any(item.id == known.id for known in self.items):
            raise Refused("invalid_value", f"An item with the id '{item.id}' is in the conversation already.", param="item.id")
        size = len(item.text) + len(item.arguments) + len(item.output)
        if size + sum(len(known.text) + len(known.arguments) + len(known.output) for known in self.items) > self.limits.max_chars:
            raise Refused("too_long", f"The conversation holds at most {self.limits.max_chars} characters of text.", param="item")
        if audio is not None and not self.abilities.transcribe:
            raise Refused(
                "no_transcription", "This pipeline has no stage that transcribes: an item cannot hold audio.", param="item.content"
            )
        index = len(self.items)
        if previous_id == "root":
            index = 0
        elif previous_id is not None:
            index = self.items.index(self._find(previous_id, "invalid_value", param="previous_item_id")) + 1
        actions: list[Action] = []
        if audio is not None:
            actions.append(self._open_transcribe(item.id))
            call_id = next(reversed(self._hearings))
            hearing = self._hearings[call_id]
            hearing.committed = True
            hearing.samples = len(audio)
            actions += [FeedSamples(call_id, audio), EndTranscribe(call_id)]
        return [*self._add(item, index), *actions]

    def retrieve_item(self, item_id: str) -> list[Action]:
        return [Tell(ItemRetrieved(self._find(item_id, "item_retrieve_invalid_item_id", param="item_id").copy()))]

    def delete_item(self, item_id: str) -> list[Action]:
        self.items.remove(self._find(item_id, "item_delete_invalid_item_id", param="item_id"))
        return [Tell(ItemDeleted(item_id))]

    def truncate_item(self, item_id: str, audio_end_ms: int, content_index: int = 0) -> list[Action]:
        """The client has played no more than `audio_end_ms` of this item: forget the words that were not heard."""
        item = self._find(item_id, "item_truncate_invalid_item_id", param="item_id")
        if item.role != "assistant" or not item.parts or item.parts[0].kind != "audio" or not (item.audio_ms or item.truncated_of_ms):
            raise Refused("unsupported_content_type", "Only model output audio messages can be truncated", param="item_id")
        if content_index != 0:
            raise Refused("invalid_value", f"Item '{item_id}' has no content at index {content_index}.", param="content_index")
        actual_ms = -int(-item.audio_ms // 1)
        if not 0 <= audio_end_ms <= actual_ms:
            raise Refused("invalid_value", f"Audio content of {actual_ms}ms is already shorter than {audio_end_ms}ms", param="audio_end_ms")
        item.truncated_of_ms = item.truncated_of_ms or spoken_ms(item)
        item.parts[0].text = heard_text(item.text, item.spans, item.truncated_of_ms, audio_end_ms)
        item.audio_ms = min(item.audio_ms, float(audio_end_ms))
        return [Tell(ItemTruncated(item_id, audio_end_ms))]

    # -- turns

    def _begin_turn(self, start: int) -> list[Action]:
        item_id = self._new_id("item")
        if not self.abilities.transcribe:
            self._turn = Turn(item_id, start, "")
            return []
        opened = self._open_transcribe(item_id)
        self._turn = Turn(item_id, start, opened.call_id)
        self._hearings[opened.call_id].fed = start
        return [opened, *self._feed(opened.call_id, self.appended)]

    def _stop_speech(self, at: int) -> list[Action]:
        """The VAD, or the want of audio, ends the turn: commit it, and answer."""
        assert self._turn is not None
        item_id = self._turn.item_id
        early, self._early = self._early, None
        actions: list[Action] = [Tell(SpeechStopped(item_id, self._ms(at))), *self._end_turn(at)]
        detection = self.settings.turn_detection
        if detection is None or not detection.create_response or not self.settings.answers or not self.abilities.respond:
            self._early = early
            return [*actions, *self._forget_early()]
        if self._active:  # it was not to be interrupted, or was asked for while the user spoke
            self._owed = item_id
            return actions
        return [*actions, *self._start_response(early or Answering(Response(self._new_id("resp"), self.settings), turn_item=item_id))]

    def _end_turn(self, at: int) -> list[Action]:
        """Commit the turn's audio up to `at` as an item."""
        turn = self._turn
        assert turn is not None
        self._turn = None
        actions = self._forget_early()
        self._floor = at
        previous_id = self.items[-1].id if self.items else None
        item = Item(turn.item_id, role="user", parts=[Part("audio")])
        actions += [Tell(Committed(item.id, previous_id)), *self._add(item, len(self.items))]
        if not turn.call_id:
            return [*actions, *self._transcript_failed(item.id, "no_transcription", "This pipeline has no stage that transcribes.")]
        hearing = self._hearings[turn.call_id]
        # A client may send faster than it speaks: what was fed beyond the silence that ended the turn is of later turns.
        silence = int(self.rate_hz * ((self.settings.turn_detection or TurnDetection()).silence_duration_ms / 1000))
        if hearing.fed > at + silence + self.rate_hz and not hearing.over:
            actions.append(CancelCall(turn.call_id, "superseded"))
            del self._hearings[turn.call_id]
            opened = self._open_transcribe(item.id)
            turn.call_id = opened.call_id
            hearing = self._hearings[turn.call_id]
            hearing.fed = turn.start
            actions += [opened, *self._feed(turn.call_id, at + silence)]
        hearing.committed = True
        hearing.samples = at - turn.start
        if not hearing.over:
            actions.append(EndTranscribe(turn.call_id))
        if hearing.text and self.settings.tells_transcripts:
            actions.append(Tell(TranscriptDelta(item.id, hearing.text)))
        if hearing.over:
            actions += self._hearing_over(turn.call_id, hearing.failure)
        return actions

    def _abandon_turn(self, cause: str, *, floor: int) -> list[Action]:
        """Forget the turn that is open, and the audio before `floor`."""
        turn, self._turn, self._floor = self._turn, None, floor
        if turn is None:
            return []
        running = self._hearings.pop(turn.call_id, None)
        return [*self._forget_early(), *([CancelCall(turn.call_id, cause)] if running and not running.over else [])]

    def _drop(self) -> list[Action]:
        """Say which audio will not be asked for again, a second at a time."""
        if self._turn:
            keep = self._turn.start
        elif self.settings.turn_detection is None:
            keep = self._floor
        else:
            keep = max(self._floor, self.appended - int(self.limits.lookback_s * self.rate_hz))
        if keep - self._dropped < self.rate_hz:
            return []
        self._dropped = keep
        return [DropAudio(keep)]

    # -- listening and hearing

    def _open_listen(self, at: int | None = None) -> list[Action]:
        if not self.abilities.listen or self.settings.turn_detection is None:
            return []
        self._listen_id = f"listen-{next(self._serial)}"
        self._listen_from = self.appended if at is None else at
        return [OpenListen(self._listen_id, self._listen_params())]

    def _close_listen(self, cause: str) -> list[Action]:
        call_id, self._listen_id = self._listen_id, ""
        return [CancelCall(call_id, cause)] if call_id else []

    def _control_listen(self, event: str) -> list[Action]:
        return [ControlListen(self._listen_id, event)] if self._listen_id else []

    def _listen_params(self) -> dict[str, Any]:
        detection = self.settings.turn_detection
        assert detection is not None
        return {
            "threshold": detection.threshold,
            "prefix_padding_ms": detection.prefix_padding_ms,
            "silence_duration_ms": detection.silence_duration_ms,
            "enabled": True,
        }

    def _open_transcribe(self, item_id: str) -> OpenTranscribe:
        call_id = f"transcribe-{next(self._serial)}"
        self._hearings[call_id] = Hearing(item_id)
        known = {"language": self.settings.language, "prompt": self.settings.prompt}
        return OpenTranscribe(call_id, item_id, {name: value for name, value in known.items() if value})

    def _feed(self, call_id: str, end: int) -> list[Action]:
        hearing = self._hearings.get(call_id)
        if hearing is None or hearing.over or end <= hearing.fed:
            return []
        start, hearing.fed = hearing.fed, end
        return [FeedTranscribe(call_id, start, end)]

    def _hearing_over(self, call_id: str, failure: tuple[str, str] | None) -> list[Action]:
        hearing = self._hearings.get(call_id)
        if hearing is None:
            return []
        hearing.over, hearing.failure = True, failure
        if not hearing.committed:
            return []  # said when the turn is committed
        del self._hearings[call_id]
        if failure is not None:
            return self._transcript_failed(hearing.item_id, *failure)
        text = hearing.text.strip()
        for item in self.items:
            if item.id == hearing.item_id:
                next(part for part in item.parts if part.kind == "audio").text = text
        actions: list[Action] = []
        if self.settings.tells_transcripts:
            actions.append(Tell(TranscriptDone(hearing.item_id, text, hearing.samples / self.rate_hz)))
        return [*actions, *self._heard(hearing.item_id)]

    def _transcript_failed(self, item_id: str, code: str, message: str) -> list[Action]:
        for item in self.items:
            if item.id == item_id:
                item.failure = (code, message)
        actions: list[Action] = []
        if self.settings.tells_transcripts:
            actions.append(Tell(TranscriptFailed(item_id, code, message)))
        for answer in list(self._answers.values()):
            if item_id in answer.waits:
                actions += self._stop_response(answer, "failed", code, message)
        if self._owed == item_id:
            self._owed = ""
        return actions

    def _heard(self, item_id: str) -> list[Action]:
        """A transcript is there: go on with what has waited for it."""
        actions: list[Action] = []
        for answer in list(self._answers.values()):
            if item_id not in answer.waits:
                continue
            answer.waits.discard(item_id)
            if not answer.waits:
                actions += self._open_answer(answer)
        return actions

    # -- answering

    def _may_begin_early(self) -> bool:
        detection = self.settings.turn_detection
        return bool(
            detection
            and detection.create_response
            and self.settings.answers
            and self.abilities.respond
            and not self._active
            and not self._owed
            and not any(hearing.committed for hearing in self._hearings.values())
        )

    def _forget_early(self) -> list[Action]:
        early, self._early = self._early, None
        return [CancelCall(early.call_id, "superseded")] if early and early.call_id else []

    def _start_response(self, answer: Answering) -> list[Action]:
        response = answer.response
        self._answers[response.id] = answer
        if response.in_conversation:
            self._active = response.id
        answer.waits = {hearing.item_id for hearing in self._hearings.values() if hearing.committed} if answer.input is None else set()
        actions: list[Action] = [Tell(ResponseStarted(response.copy()))]
        return actions if answer.waits else [*actions, *self._open_answer(answer)]

    def _open_answer(self, answer: Answering) -> list[Action]:
        """Every transcript is there."""
        turn = next((item for item in self.items if item.id == answer.turn_item), None)
        if turn is not None and turn.failure is not None:
            return self._stop_response(answer, "failed", *turn.failure)
        if turn is not None and not turn.text:
            return self._stop_response(answer, "completed")  # a noise, not words: nothing to answer
        if turn is not None and answer.call_id and answer.guess == turn.text:
            answer.guess = None
            return [ReleaseRespond(answer.call_id)]
        actions: list[Action] = []
        if answer.call_id:
            actions.append(CancelCall(answer.call_id, "superseded"))
        answer.guess = None
        return [*actions, self._open_respond(answer, self._messages(answer), held=False)]

    def _open_respond(self, answer: Answering, messages: list[dict[str, Any]], *, held: bool) -> OpenRespond:
        settings = answer.response.settings
        if settings.instructions:
            messages = [{"role": "system", "content": settings.instructions}, *messages]
        params: dict[str, Any] = {"messages": messages}
        if settings.max_tokens is not None:
            params["max_tokens"] = settings.max_tokens
        if settings.temperature is not None:
            params["temperature"] = settings.temperature
        if settings.tools:
            params["tools"] = [_nested(tool) for tool in settings.tools]
            params["tool_choice"] = _nested(settings.tool_choice) if isinstance(settings.tool_choice, dict) else settings.tool_choice
        outputs = {"text"}
        if settings.modality == "audio":
            outputs.add("audio")
            params |= {"voice": settings.voice, "speed": settings.speed}
        said = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        answer.call_id = f"respond-{next(self._serial)}"
        return OpenRespond(answer.call_id, answer.response.id, params, said, frozenset(outputs), held)

    def _messages(self, answer: Answering | None) -> list[dict[str, Any]]:
        entries: Sequence[Item | str] = self.items if answer is None or answer.input is None else answer.input
        items = (self._find(entry, "invalid_value") if isinstance(entry, str) else entry for entry in entries)
        return [message for item in items if (message := item.message()) is not None]

    def _answer(self, call_id: str) -> Answering | None:
        """The response that this call makes now."""
        return next((answer for answer in self._answers.values() if call_id and answer.call_id == call_id), None)

    def _output(self, response: Response) -> tuple[list[Action], Item]:
        """The item that this response makes, begun when there is none yet."""
        if response.item is not None:
            return [], response.item
        kind = "audio" if response.settings.modality == "audio" else "text"
        item = response.item = Item(self._new_id("item"), role="assistant", parts=[Part(kind, "")], status="in_progress")
        previous_id = self.items[-1].id if self.items and response.in_conversation else None
        actions: list[Action] = [Tell(OutputStarted(response.copy(), previous_id))]
        if response.in_conversation:
            self.items.append(item)
            actions += self._make_room()
        return actions, item

    def _stop_response(self, answer: Answering, status: str, reason: str = "", message: str = "") -> list[Action]:
        """End a response whose call may still run."""
        call_id, answer.call_id = answer.call_id, ""
        cause = reason if status == "cancelled" else "superseded"
        return [*([CancelCall(call_id, cause)] if call_id else []), *self._end_response(answer, status, reason, message)]

    def _end_response(self, answer: Answering, status: str, reason: str = "", message: str = "") -> list[Action]:
        response = answer.response
        del self._answers[response.id]
        response.status, response.reason, response.message = status, reason, message
        previous_id = None
        if response.item is not None:
            response.item.status = "completed" if status == "completed" else "incomplete"
            index = next((i for i, item in enumerate(self.items) if item is response.item), 0)
            previous_id = self.items[index - 1].id if index else None
        for call in response.calls:
            call.status = "completed" if status == "completed" else "incomplete"
        actions: list[Action] = [Tell(ResponseEnded(response.copy(), previous_id))]
        if self._active != response.id:
            return actions
        self._active = ""
        owed, self._owed = self._owed, ""
        if owed and not self._closed:
            actions += self._start_response(Answering(Response(self._new_id("resp"), self.settings), turn_item=owed))
        return actions

    # -- items

    def _find(self, item_id: str, code: str, *, param: str = "") -> Item:
        for item in self.items:
            if item.id == item_id:
                return item
        raise Refused(code, f"Item with item_id not found: '{item_id}'", param=param)

    def _add(self, item: Item, index: int) -> list[Action]:
        previous_id = self.items[index - 1].id if index else None
        self.items.insert(index, item)
        return [Tell(ItemAdded(item.copy(), previous_id)), Tell(ItemDone(item.copy(), previous_id)), *self._make_room()]

    def _make_room(self) -> list[Action]:
        actions: list[Action] = []
        while len(self.items) > self.limits.max_items:
            actions.append(Tell(ItemDeleted(self.items.pop(0).id)))
        return actions

    def _possible(self, settings: Settings) -> Settings:
        """`settings` without what the pipeline can not do."""
        if not self.abilities.listen:
            settings = msgspec.structs.replace(settings, turn_detection=None)
        return settings if self.abilities.speaks else msgspec.structs.replace(settings, modality="text")

    def _ms(self, samples: int) -> int:
        return samples * 1000 // self.rate_hz


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as `respond` takes it, and chat completions do: in this protocol its fields lie beside its type."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def spoken_ms(item: Item) -> float:
    """How long an answer speaks from its first to its last clause that has begun; estimated when it was stopped inside of that."""
    if item.status == "completed":
        return item.audio_ms
    last = item.spans[-1] if item.spans else Span(0, len(item.text), 0.0)
    ms_per_char = last.at_ms / last.start if last.at_ms and last.start else MS_PER_CHAR
    return max(item.audio_ms, last.at_ms + (last.end - last.start) * ms_per_char)


def heard_text(text: str, spans: Sequence[Span], speech_ms: float, heard_ms: float) -> str:
    """What of `text` was heard in the first `heard_ms` of its `speech_ms`: whole clauses, and of the last one whole words.

    Without spans the text is taken to be spoken evenly. Text behind the last span was not spoken at all.
    """
    whole = spans or (Span(0, len(text), 0.0),)
    cut = 0
    for span, end_ms in zip(whole, [span.at_ms for span in whole[1:]] + [speech_ms], strict=True):
        if heard_ms >= end_ms:
            cut = span.end
        elif heard_ms > span.at_ms:
            reached = span.start + int((span.end - span.start) * (heard_ms - span.at_ms) / (end_ms - span.at_ms))
            words = text.rfind(" ", span.start, reached + 1)
            cut = words if words > span.start else span.start
    return text[:cut].rstrip()
