"""The session machine: tables of what happens to what follows, and random sequences against the rules in its docstring."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrt import session as s
from streamrt.session import Abilities, Limits, Refused, Session, Settings, Span, TurnDetection, Wish, heard_text

RATE = 1000  # a sample is a millisecond
MANUAL = Settings(turn_detection=None, instructions="Be brief.")
VAD = Settings(voice="v", max_tokens=50)


class Driver:
    """A session, what it did, and the rules that must hold at every step."""

    def __init__(self, of: Settings = VAD, abilities: Abilities | None = None, limits: Limits | None = None) -> None:
        ids = itertools.count()
        self.session = Session(of, abilities, rate_hz=RATE, limits=limits, new_id=lambda prefix: f"{prefix}{next(ids)}")
        self.now_s = 0.0
        self.told: list[Any] = []
        self.calls: dict[str, str] = {}  # open call -> kind
        self.opened: list[Any] = []
        self.cancelled: dict[str, str] = {}  # call -> cause
        self.fed: dict[str, list[tuple[int, int]]] = {}
        self.dropped = 0
        self.live: set[str] = set()
        self.ended: set[str] = set()
        self.in_conversation: set[str] = set()
        self.owes_transcript: list[str] = []
        self.closed = ""
        self.do(self.session.start())

    def do(self, actions: list[s.Action]) -> list[Any]:
        """Carry them out on paper; returns what the client was told."""
        said = []
        for action in actions:
            match action:
                case s.OpenListen(call) | s.OpenTranscribe(call) | s.OpenRespond(call):
                    assert call not in self.calls, "a call id is used twice"
                    assert call not in self.cancelled
                    self.calls[call] = type(action).__name__
                    self.opened.append(action)
                case s.FeedListen(call, start, end) | s.FeedTranscribe(call, start, end):
                    assert call in self.calls, f"{call} is fed and not open"
                    assert self.dropped <= start < end <= self.session.appended
                    ranges = self.fed.setdefault(call, [])
                    assert not ranges or ranges[-1][1] == start, "audio has a hole"
                    ranges.append((start, end))
                case s.CancelCall(call, cause):
                    assert call in self.calls, f"{call} is cancelled and not open"
                    del self.calls[call]
                    self.cancelled[call] = cause
                case s.EndTranscribe(call) | s.AskProvisional(call) | s.ReleaseRespond(call) | s.ControlListen(call) | s.FeedSamples(call):
                    assert call in self.calls
                case s.DropAudio(before):
                    self.dropped = before
                case s.Close(reason):
                    self.closed = reason
                case s.Tell(event):
                    said.append(event)
                    self.check(event)
        self.told += said
        assert len(self.live & self.in_conversation) <= 1, "two voices"
        assert (self.session.active_response in self.live) == bool(self.live & self.in_conversation)
        return said

    def check(self, event: Any) -> None:
        match event:
            case s.ResponseStarted(response):
                assert response.id not in self.live | self.ended
                self.live.add(response.id)
                if response.in_conversation:
                    self.in_conversation.add(response.id)
            case s.OutputStarted(response):
                assert response.id in self.live
            case s.TextDelta(response_id) | s.AudioDelta(response_id) | s.CallDelta(response_id):
                assert response_id in self.live, "output of a response that is over"
            case s.ResponseEnded(response):
                assert response.id in self.live, "ended twice, or never begun"
                assert response.status != "in_progress"
                self.live.discard(response.id)
                self.ended.add(response.id)
            case s.Committed(item_id):
                self.owes_transcript.append(item_id)
            case s.TranscriptDone(item_id) | s.TranscriptFailed(item_id):
                assert item_id in self.owes_transcript, "a second transcript"
                self.owes_transcript.remove(item_id)

    # what a test says

    def call(self, kind: str) -> str:
        """The open call of that kind that was opened last."""
        return [name for name, of in self.calls.items() if of == kind][-1]

    def hear(self, ms: int) -> list[Any]:
        self.now_s += ms / 1000
        return self.do(self.session.append(ms, self.now_s))

    def start_speech(self, at: int) -> list[Any]:
        return self.do(self.session.on_speech_started(self.call("OpenListen"), at))

    def stop_speech(self, at: int) -> list[Any]:
        return self.do(self.session.on_speech_stopped(self.call("OpenListen"), at))

    def pause(self, words: str = "") -> list[Any]:
        said = self.do(self.session.on_speech_paused(self.call("OpenListen")))
        return said + (self.do(self.session.on_provisional(self.call("OpenTranscribe"), words)) if words else [])

    def understand(self, words: str) -> list[Any]:
        call = self.call("OpenTranscribe")
        said = self.do(self.session.on_segment(call, words))
        del self.calls[call]
        return said + self.do(self.session.on_transcribed(call))

    def answer(self, *words: str, audio_ms: int = 0, finish: str = "stop") -> list[Any]:
        call, said = self.call("OpenRespond"), []
        for word in words:
            said += self.do(self.session.on_text(call, word))
        if audio_ms:
            said += self.do(self.session.on_audio(call, object(), audio_ms, 1000, 0, sum(map(len, words))))
        del self.calls[call]
        return said + self.do(self.session.on_responded(call, finish, {"completion_tokens": len(words)}))

    def turn(self, words: str = "hello", ms: int = 1000) -> list[Any]:
        start = self.session.appended
        said = self.hear(ms) + self.start_speech(start) + self.hear(500) + self.stop_speech(start + ms)
        return said + self.understand(words)


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


# ---- turns


def test_a_turn_is_told_in_the_order_of_the_protocol():
    driver = Driver()
    said = driver.turn("hi there")
    assert kinds(said) == [
        "SpeechStarted", "SpeechStopped", "Committed", "ItemAdded", "ItemDone", "ResponseStarted", "TranscriptDelta", "TranscriptDone",
    ]  # fmt: skip
    assert len({said[i].item_id for i in (0, 1, 2)} | {said[3].item.id}) == 1
    assert kinds(driver.answer("Hello.", audio_ms=300)) == ["OutputStarted", "TextDelta", "AudioDelta", "ResponseEnded"]
    assert not driver.owes_transcript


def test_a_turn_begins_before_the_detected_start_and_not_before_the_last_turn():
    driver = Driver()
    driver.hear(2000)
    assert driver.start_speech(1000)[0].at_ms == 700
    assert driver.fed[driver.call("OpenTranscribe")] == [(700, 2000)]
    driver.stop_speech(1500)
    assert driver.start_speech(1600)[0].at_ms == 1500


def test_the_answer_is_asked_for_with_the_whole_conversation():
    driver = Driver(Settings(instructions="Be brief.", voice="v", max_tokens=9))
    driver.turn("one")
    driver.answer("two")
    driver.turn("three")
    opened = driver.opened[-1]
    assert [m["content"] for m in opened.params["messages"]] == ["Be brief.", "one", "two", "three"]
    assert opened.said == "three"
    assert opened.outputs == {"text", "audio"}
    assert opened.params["max_tokens"] == 9
    assert opened.params["voice"] == "v"


def test_a_noise_without_words_is_committed_and_not_answered():
    driver = Driver()
    said = driver.turn(" ")
    assert said[-1].response.status == "completed"
    assert said[-1].response.item is None
    assert "OpenRespond" not in driver.calls.values()


def test_a_failed_transcript_ends_the_turn_and_its_answer_and_the_next_turn_works():
    driver = Driver()
    driver.hear(1000)
    driver.start_speech(0)
    driver.stop_speech(900)
    call = driver.call("OpenTranscribe")
    del driver.calls[call]
    said = driver.do(driver.session.on_transcribe_failed(call, "stage_failed", "died"))
    assert kinds(said) == ["TranscriptFailed", "ResponseEnded"]
    assert said[1].response.status == "failed"
    driver.turn("again")
    assert driver.answer("yes")[-1].response.status == "completed"


def test_a_speaker_from_whom_nothing_comes_has_ended_the_turn():
    driver = Driver()
    driver.hear(1000)
    driver.start_speech(200)
    assert driver.session.deadline_s == pytest.approx(driver.now_s + 2.0)
    assert driver.do(driver.session.tick(driver.now_s + 1.9)) == []
    assert "SpeechStopped" in kinds(driver.do(driver.session.tick(driver.now_s + 2.0)))


def test_a_turn_that_fills_the_buffer_is_ended():
    driver = Driver(limits=Limits(buffer_s=5))
    driver.hear(1000)
    driver.start_speech(500)
    said = list(itertools.chain(*(driver.hear(1000) for _ in range(5))))
    assert "Committed" in kinds(said)


def test_audio_that_came_faster_than_speech_is_given_to_its_own_turn():
    driver = Driver()
    driver.hear(9000)  # two sentences in one burst: everything is fed to the first before its end is known
    driver.start_speech(0)
    driver.stop_speech(2000)
    assert list(driver.cancelled.values()) == ["superseded"]
    assert driver.fed[driver.call("OpenTranscribe")] == [(0, 2500)]
    driver.understand("first")
    driver.start_speech(4000)
    assert driver.fed[driver.call("OpenTranscribe")] == [(3700, 9000)]


def test_what_the_vad_said_before_a_clear_is_ignored():
    driver = Driver()
    driver.hear(2000)
    driver.do(driver.session.clear())
    assert driver.start_speech(1500) == []
    driver.hear(1000)
    assert kinds(driver.start_speech(2500)) == ["SpeechStarted"]


def test_a_failed_listener_is_said_once_and_opened_again_when_audio_comes():
    driver = Driver()
    for n in range(2):
        driver.hear(500)
        call = driver.call("OpenListen")
        del driver.calls[call]
        said = driver.do(driver.session.on_listen_over(call, "stage_failed", "died", driver.now_s))
        assert kinds(said) == (["Problem"] if n == 0 else [])
        driver.hear(500)
        assert "OpenListen" not in driver.calls.values()
        driver.hear(600)
        assert "OpenListen" in driver.calls.values()
    start = driver.session.appended - 600  # the new call counts from its own first sample
    assert driver.start_speech(400)[0].at_ms == start + 400 - 300


# ---- answering early


def test_a_pause_begins_the_answer_and_the_same_words_release_it():
    driver = Driver()
    driver.hear(1000)
    driver.start_speech(0)
    driver.pause("hello")
    early = driver.opened[-1]
    assert early.held
    assert driver.live == set()
    driver.stop_speech(900)
    actions = driver.session.on_segment(driver.call("OpenTranscribe"), " hello")
    driver.do(actions)
    actions = driver.session.on_transcribed(driver.call("OpenTranscribe"))
    assert s.ReleaseRespond(early.call_id) in actions
    driver.do(actions)
    assert driver.answer("Hi.")[-1].response.id == early.response_id


@pytest.mark.parametrize("how", ["resumed", "other words", "failed"])
def test_an_early_answer_that_is_wrong_is_never_heard(how):
    driver = Driver()
    driver.hear(1000)
    driver.start_speech(0)
    driver.pause("hello")
    early = driver.opened[-1].call_id
    if how == "resumed":
        driver.do(driver.session.on_speech_resumed(driver.call("OpenListen")))
        assert driver.cancelled[early] == "superseded"
    if how == "failed":
        del driver.calls[early]
        assert driver.do(driver.session.on_respond_failed(early, "overloaded", "full")) == []
    driver.stop_speech(900)
    driver.understand("hello world")
    assert driver.session.on_text(early, "stale") == []
    assert driver.opened[-1].said == "hello world"
    assert not driver.opened[-1].held
    assert driver.answer("Hi.")[-1].response.status == "completed"


def test_a_second_pause_with_other_words_begins_anew():
    driver = Driver()
    driver.hear(1000)
    driver.start_speech(0)
    driver.pause("what is")
    first = driver.opened[-1].call_id
    assert driver.do(driver.session.on_provisional(driver.call("OpenTranscribe"), "what is ")) == []
    driver.do(driver.session.on_provisional(driver.call("OpenTranscribe"), "what is love"))
    assert driver.cancelled[first] == "superseded"
    assert driver.opened[-1].said == "what is love"


# ---- barge-in


def test_speech_interrupts_the_answer_at_once():
    driver = Driver()
    driver.turn()
    driver.do(driver.session.on_text(driver.call("OpenRespond"), "A long "))
    driver.hear(1000)
    said = driver.start_speech(driver.session.appended - 500)
    assert kinds(said) == ["SpeechStarted", "ResponseEnded"]
    assert (said[1].response.status, said[1].response.reason) == ("cancelled", "turn_detected")
    assert "turn_detected" in driver.cancelled.values()
    assert driver.session.items[-1].status == "incomplete"


def test_an_answer_that_may_not_be_interrupted_is_followed_by_the_next():
    driver = Driver(Settings(turn_detection=TurnDetection(interrupt_response=False)))
    driver.turn("one")
    said = driver.turn("two")
    assert "ResponseStarted" not in kinds(said)
    said = driver.answer("1")
    assert kinds(said)[-2:] == ["ResponseEnded", "ResponseStarted"]
    assert driver.opened[-1].said == "two"


# ---- what the client asks for


def test_a_second_answer_is_refused_while_one_is_active():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    with pytest.raises(Refused, match="already has an active response in progress: resp0") as refused:
        driver.session.create_response()
    assert refused.value.code == "conversation_already_has_active_response"


def test_an_answer_outside_of_the_conversation_runs_beside_it_and_leaves_nothing():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    inside = driver.call("OpenRespond")
    wish = Wish(
        in_conversation=False, instructions="Sum up.", input=(s.Item("x", role="user", parts=[s.Part("text", "abc")]),), metadata={"a": "b"}
    )
    driver.do(driver.session.create_response(wish))
    assert [m["content"] for m in driver.opened[-1].params["messages"]] == ["Sum up.", "abc"]
    driver.answer("short")
    assert driver.session.items == []
    assert driver.calls == {inside: "OpenRespond"}


def test_an_answer_waits_for_the_transcripts_that_it_needs():
    driver = Driver(MANUAL)
    driver.hear(500)
    driver.do(driver.session.commit())
    driver.do(driver.session.create_response())
    assert "OpenRespond" not in driver.calls.values()
    driver.understand("now")
    assert driver.opened[-1].said == "now"


@pytest.mark.parametrize("ms", [0, 40, 99])
def test_a_commit_of_too_little_is_refused_and_the_audio_is_kept(ms):
    driver = Driver(MANUAL)
    if ms:
        driver.hear(ms)
    with pytest.raises(Refused, match=f"at least 100ms of audio, but buffer only has {ms}.00ms") as refused:
        driver.session.commit()
    assert refused.value.code == "input_audio_buffer_commit_empty"
    driver.hear(100 - ms)
    assert kinds(driver.do(driver.session.commit())) == ["Committed", "ItemAdded", "ItemDone"]


def test_a_full_buffer_refuses_audio_and_takes_it_again_after_a_commit():
    driver = Driver(MANUAL, limits=Limits(buffer_s=1))
    driver.hear(900)
    with pytest.raises(Refused) as refused:
        driver.session.append(200, 1.0)
    assert refused.value.code == "input_audio_buffer_full"
    driver.do(driver.session.commit())
    driver.hear(900)


def test_a_pipeline_that_can_not_do_it_says_so():
    deaf = Driver(VAD, Abilities(listen=False, transcribe=False, speaks=False))
    assert deaf.session.settings.turn_detection is None
    assert deaf.session.settings.modality == "text"
    deaf.hear(500)
    for command in (deaf.session.commit, Driver(MANUAL, Abilities(respond=False)).session.create_response):
        with pytest.raises(Refused, match="no stage"):
            command()


def test_items_are_put_where_they_are_asked_to_be():
    driver = Driver(MANUAL)
    for name, after in (("a", None), ("b", None), ("c", "a"), ("d", "root")):
        driver.do(driver.session.create_item(s.Item(name, role="user", parts=[s.Part("text", name)]), after))
    assert [item.id for item in driver.session.items] == ["d", "a", "c", "b"]
    driver.do(driver.session.delete_item("a"))
    assert [item.id for item in driver.session.items] == ["d", "c", "b"]
    with pytest.raises(Refused, match="not found: 'zz'"):
        driver.session.create_item(s.Item("e"), "zz")


def test_tools_and_their_results_are_read_by_the_model():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_item(s.Item("f", "function_call", name="now", call_id="c1", arguments="{}")))
    driver.do(driver.session.create_item(s.Item("o", "function_call_output", call_id="c1", output="noon")))
    driver.do(driver.session.create_response())
    _, call, result = driver.opened[-1].params["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert result == {"role": "tool", "content": "noon", "tool_call_id": "c1"}


def test_a_function_that_the_model_calls_is_an_item_and_is_read_by_it_later():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response(s.Wish(tools=(tool,), tool_choice={"type": "function", "name": "look"})))
    opened = driver.opened[-1]
    assert opened.params["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert opened.params["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    said = driver.do(driver.session.on_text(opened.call_id, "Let me see."))
    for name, arguments in (("look", ""), ("", '{"a":'), ("", " 1}"), ("look", "{}")):
        said += driver.do(driver.session.on_function_call(opened.call_id, name, arguments))
    assert [type(event).__name__ for event in said[2:]] == ["CallStarted", "CallDelta", "CallDelta", "CallStarted", "CallDelta"]
    [ended] = driver.answer(finish="tool_calls")
    assert [(call.name, call.arguments, call.status) for call in ended.response.calls] == [
        ("look", '{"a": 1}', "completed"), ("look", "{}", "completed"),
    ]  # fmt: skip
    driver.do(driver.session.create_item(s.Item("o", "function_call_output", call_id=ended.response.calls[0].call_id, output="seen")))
    driver.do(driver.session.create_response())
    *_, text, call, other, result = driver.opened[-1].params["messages"]
    assert text["content"] == "Let me see."
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert (other["tool_calls"][0]["id"] != call["tool_calls"][0]["id"]) and result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_a_call_that_was_cut_off_is_not_read_by_the_model():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    driver.do(driver.session.on_function_call(driver.call("OpenRespond"), "look", '{"a"'))
    [ended] = driver.answer(finish="length")
    assert ended.response.calls[0].status == "incomplete"
    driver.do(driver.session.create_response())
    assert not any("tool_calls" in message for message in driver.opened[-1].params["messages"])


def test_the_oldest_item_makes_room_and_the_client_is_told():
    driver = Driver(MANUAL, limits=Limits(max_items=2))
    said = list(itertools.chain(*(driver.do(driver.session.create_item(s.Item(name, role="user"))) for name in "abc")))
    assert [event.item_id for event in said if isinstance(event, s.ItemDeleted)] == ["a"]


def test_the_voice_is_locked_once_it_was_heard_and_a_refused_update_changes_nothing():
    driver = Driver(MANUAL)
    driver.do(driver.session.update(Settings(voice="a", turn_detection=None)))
    driver.do(driver.session.create_response())
    driver.answer("hi", audio_ms=10)
    with pytest.raises(Refused) as refused:
        driver.session.update(Settings(voice="b", instructions="new", turn_detection=None))
    assert refused.value.code == "cannot_update_voice"
    assert driver.session.settings.instructions == ""


def test_turn_detection_can_be_set_and_taken_away():
    driver = Driver(MANUAL)
    driver.hear(500)
    driver.do(driver.session.update(VAD))
    assert driver.calls[driver.call("OpenListen")] == "OpenListen"
    driver.hear(1000)
    driver.start_speech(300)
    driver.do(driver.session.update(MANUAL))
    assert driver.calls == {}
    said = driver.do(driver.session.commit())  # what was spoken is still there
    assert said[0].item_id == said[1].item.id
    assert driver.fed[driver.call("OpenTranscribe")] == [(500, 1500)]


@pytest.mark.parametrize("now_s, code", [(3600.0, "session_expired"), (301.0, "session_idle")])
def test_a_session_ends_by_time_and_everything_in_it_ends(now_s, code):
    driver = Driver(limits=Limits(idle_s=1e9 if code == "session_expired" else 300.0))
    driver.turn()
    driver.answer("hi")
    driver.hear(1000)
    driver.start_speech(driver.session.appended - 500)
    driver.stop_speech(driver.session.appended)
    driver.do(driver.session.cancel_response())
    said = driver.do(driver.session.tick(driver.now_s + now_s))
    assert said[0].code == code
    assert driver.closed == code
    assert driver.session.deadline_s == math.inf
    assert driver.calls == {}
    assert driver.owes_transcript == []


# ---- truncation


SPANS = (Span(0, 6, 0.0), Span(6, 21, 500.0))


@pytest.mark.parametrize(
    "spans, heard_ms, text",
    [
        (SPANS, 0, ""),
        (SPANS, 250, ""),  # half of a word is no word
        (SPANS, 500, "First."),
        (SPANS, 1000, "First. Then"),
        (SPANS, 1499, "First. Then the"),
        (SPANS, 1500, "First. Then the secon"),
        (SPANS, 9999, "First. Then the secon"),
        (SPANS[:1], 9999, "First."),  # the rest was written and never spoken
        ((), 750, "First."),
    ],
)  # fmt: skip
def test_truncation_keeps_the_words_that_were_heard(spans, heard_ms, text):
    whole = "First. Then the secon"
    assert heard_text(whole, spans, 1500.0, heard_ms) == text


def test_truncation_is_bounded_by_the_audio_and_shortens_the_history():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    driver.answer("one two ", "three four", audio_ms=1000)
    item = driver.session.items[-1]
    for ms in (1001, 57_340, -1):
        with pytest.raises(Refused) as refused:
            driver.session.truncate_item(item.id, ms)
        assert refused.value.code == "invalid_value"
    driver.do(driver.session.truncate_item(item.id, 500))
    assert item.text == "one two"
    with pytest.raises(Refused, match="Audio content of 500ms is already shorter than 501ms"):
        driver.session.truncate_item(item.id, 501)
    driver.do(driver.session.truncate_item(item.id, 0))
    assert kinds(driver.do(driver.session.truncate_item(item.id, 0))) == ["ItemTruncated"]
    assert item.text == ""


def test_only_spoken_answers_can_be_truncated():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_item(s.Item("u", role="user", parts=[s.Part("text", "hi")])))
    for item_id, code in (("u", "unsupported_content_type"), ("nobody", "item_truncate_invalid_item_id")):
        with pytest.raises(Refused) as refused:
            driver.session.truncate_item(item_id, 0)
        assert refused.value.code == code


def test_what_comes_after_a_truncation_is_not_remembered():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    call = driver.call("OpenRespond")
    driver.do(driver.session.on_text(call, "one two"))
    driver.do(driver.session.on_audio(call, object(), 1000, 1000, 0, 7))
    driver.do(driver.session.truncate_item(driver.session.items[-1].id, 600))
    driver.do(driver.session.on_text(call, " three"))
    assert driver.session.items[-1].text == "one"


def test_of_a_clause_that_was_stopped_no_more_is_kept_than_its_part_that_was_heard():
    driver = Driver(MANUAL)
    driver.do(driver.session.create_response())
    call, text = driver.call("OpenRespond"), "Ten chars. And a second clause that is long"
    driver.do(driver.session.on_text(call, text))
    driver.do(driver.session.on_audio(call, object(), 500, 1000, 0, 11))  # 45 ms a character
    driver.do(driver.session.on_audio(call, object(), 500, 1000, 11, len(text)))
    driver.do(driver.session.cancel_response())
    driver.do(driver.session.truncate_item(driver.session.items[-1].id, 1000))
    assert driver.session.items[-1].text == "Ten chars. And a"


# ---- any sequence

OPS = [
    "hear", "hear", "hear", "started", "stopped", "paused", "resumed", "stale", "provisional", "segment", "transcribed", "transcribe fails",
    "text", "audio", "responded", "respond fails", "listen fails", "commit", "clear", "create", "aside", "cancel", "truncate", "delete",
    "item", "settings", "tick",
]  # fmt: skip
ALL_SETTINGS = [
    VAD,
    MANUAL,
    Settings(turn_detection=TurnDetection(interrupt_response=False)),
    Settings(turn_detection=TurnDetection(create_response=False), modality="text"),
    Settings(answers=False),
]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), first=st.sampled_from(ALL_SETTINGS), ops=st.lists(st.sampled_from(OPS), max_size=60))
def test_no_sequence_breaks_the_rules(data, first, ops):
    driver = Driver(first, limits=Limits(buffer_s=8, lookback_s=2, max_items=5, session_s=1000))
    session = driver.session
    words = st.sampled_from(["", "yes", "no", " yes "])

    def some_call(kind: str) -> str:
        return data.draw(st.sampled_from([name for name, of in driver.calls.items() if of == kind] or ["nobody"]))

    def over(kind: str, how: Any) -> list[s.Action]:
        call = some_call(kind)
        driver.calls.pop(call, None)
        return list(how(call))

    at = st.integers(0, 12_000)
    for op in ops:
        if driver.closed:
            break
        try:
            match op:
                case "hear":
                    driver.hear(data.draw(st.sampled_from([1, 20, 300, 3000])))
                    continue
                case "started":
                    actions = session.on_speech_started(some_call("OpenListen"), min(data.draw(at), session.appended))
                case "stopped":
                    actions = session.on_speech_stopped(some_call("OpenListen"), min(data.draw(at), session.appended))
                case "paused":
                    actions = session.on_speech_paused(some_call("OpenListen"))
                case "resumed":
                    actions = session.on_speech_resumed(some_call("OpenListen"))
                case "stale":
                    call = data.draw(st.sampled_from([*driver.cancelled, "nobody"]))
                    actions = [*session.on_text(call, "late"), *session.on_segment(call, "late"), *session.on_responded(call, "stop", {})]
                    assert actions == []
                case "provisional":
                    actions = session.on_provisional(some_call("OpenTranscribe"), data.draw(words))
                case "segment":
                    actions = session.on_segment(some_call("OpenTranscribe"), data.draw(words))
                case "transcribed":
                    actions = over("OpenTranscribe", session.on_transcribed)
                case "transcribe fails":
                    actions = over("OpenTranscribe", lambda call: session.on_transcribe_failed(call, "stage_failed", "x"))
                case "text":
                    actions = session.on_text(some_call("OpenRespond"), data.draw(words))
                case "audio":
                    actions = session.on_audio(some_call("OpenRespond"), None, data.draw(st.integers(0, 500)), RATE, 0, 3)
                case "responded":
                    actions = over(
                        "OpenRespond", lambda call: session.on_responded(call, data.draw(st.sampled_from(["stop", "length"])), {})
                    )
                case "respond fails":
                    actions = over("OpenRespond", lambda call: session.on_respond_failed(call, "stage_failed", "x"))
                case "listen fails":
                    actions = over("OpenListen", lambda call: session.on_listen_over(call, "stage_failed", "x", driver.now_s))
                case "commit":
                    actions = session.commit()
                case "clear":
                    actions = session.clear()
                case "create":
                    actions = session.create_response()
                case "aside":
                    actions = session.create_response(Wish(in_conversation=False))
                case "cancel":
                    actions = session.cancel_response(data.draw(st.sampled_from(["", *driver.live])))
                case "truncate":
                    ids = [item.id for item in session.items] or ["nobody"]
                    actions = session.truncate_item(data.draw(st.sampled_from(ids)), data.draw(st.integers(0, 600)))
                case "delete":
                    actions = session.delete_item(data.draw(st.sampled_from([item.id for item in session.items] or ["nobody"])))
                case "item":
                    audio = [0.0] * 5 if data.draw(st.booleans()) else None
                    item = s.Item(f"client{len(driver.told)}", role="user", parts=[s.Part("audio" if audio else "text")])
                    actions = session.create_item(item, None, audio)
                    if audio:
                        driver.owes_transcript.append(item.id)
                case "settings":
                    actions = session.update(data.draw(st.sampled_from(ALL_SETTINGS)))
                case "tick":
                    driver.now_s = max(driver.now_s, min(session.deadline_s, driver.now_s + 5))
                    actions = session.tick(driver.now_s)
        except Refused:
            continue
        driver.do(actions)
    driver.do(session.close())
    assert driver.live == set()
    assert driver.owes_transcript == []
    assert driver.calls == {}
