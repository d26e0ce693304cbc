"""/v1/realtime on real pipelines of scripted stages. Every frame goes through openai-agents' strict parser."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from agents.realtime.openai_realtime import get_server_event_type_adapter
from openai import AsyncOpenAI

import gateway
import streamrt
from tests.pipelines import up

SENTENCES = "One is first. Two comes after it. Three is the middle. Four is near the end. Five is the last one."
VOICE = f"""
[pipeline]
name = "realtime-tests"
[session]
instructions = "Be brief."
[session.turn_detection]
silence_duration_ms = 300
[[stage]]
name = "vad"
use = "testing.vad"
[[stage]]
name = "asr"
use = "testing.asr"
[stage.args]
text = "What is the capital of France?"
[[stage]]
name = "llm"
use = "testing.llm"
[stage.args.replies]
capital = "It is Paris."
unicode = "你好🌍é — ok"
"five sentences" = "{SENTENCES}"
weather = '''Let me see. <tool_call> {{"name": "weather", "arguments": {{"city": "Paris"}}}} </tool_call>'''
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[stage.args]
ms_per_char = 20
"""
# An ASR that takes its time and tells what it was given, and a TTS that makes audio at the pace of speech.
SLOW = """
[pipeline]
name = "realtime-slow-tests"
[run]
restart_delay_s = 0.05
[[stage]]
name = "vad"
use = "testing.vad"
[[stage]]
name = "asr"
use = "testing.asr"
[stage.args]
text = "{samples} samples, peak {peak}"
delay_ms = 300
[[stage]]
name = "llm"
use = "testing.llm"
[stage.args]
reply = "This is an answer that is some thirty words long so that it goes on for a good while and can be looked at as it comes and be cut off."
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[stage.args]
ms_per_char = 20
pace = 1.0
"""
STRICT = get_server_event_type_adapter()


@pytest.fixture(scope="module")
def voice():
    with up(VOICE) as run:
        yield run


@pytest.fixture(scope="module")
def slow():
    with up(SLOW) as run:
        yield run


def sine(seconds: float, hz: float = 300.0, rate: int = 24_000, level: float = 0.3) -> bytes:
    return np.rint(level * 32767 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype("<i2").tobytes()


def frequency(pcm: bytes) -> float:
    samples = np.frombuffer(pcm, "<i2").astype(np.float32)
    return float(np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 24_000))))


class Client:
    """A client that checks the rules of the protocol on every frame that it gets."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.frames: list[dict[str, Any]] = []
        self.live: set[str] = set()
        self.audio: dict[str, bytes] = {}  # response id -> its audio
        self.text: dict[str, str] = {}
        self.session: dict[str, Any] = {}

    async def send(self, kind: str, **fields: Any) -> None:
        await self.ws.send_str(json.dumps({"type": kind, **fields}))

    async def speak(self, data: bytes, size: int = 4800) -> None:
        for first in range(0, len(data), size):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data[first : first + size]).decode())

    async def say(self, text: str, **response: Any) -> None:
        await self.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        )
        await self.send("response.create", response=response)

    async def next(self, within_s: float = 20.0) -> dict[str, Any]:
        message = await self.ws.receive(within_s)
        assert message.type == aiohttp.WSMsgType.TEXT, message
        frame = json.loads(message.data)
        if not frame["type"].startswith("streamrt."):
            STRICT.validate_python(frame)
        self.frames.append(frame)
        self.check(frame)
        return frame

    async def until(self, *kinds: str, **fields: Any) -> dict[str, Any]:
        while True:
            frame = await self.next()
            if frame["type"] in kinds and all(frame.get(name) == value for name, value in fields.items()):
                return frame

    async def unasked(self, within_s: float) -> list[dict[str, Any]]:
        """What comes within a while in which nothing is expected."""
        found = []
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found.append(await self.next(within_s + 1))
        except TimeoutError:
            return found

    def check(self, frame: dict[str, Any]) -> None:
        response_id = frame.get("response_id") or frame.get("response", {}).get("id")
        match frame["type"]:
            case "session.created" | "session.updated":
                self.session = frame["session"]
            case "response.created":
                assert response_id not in self.text
                self.live.add(response_id)
                self.audio[response_id], self.text[response_id] = b"", ""
            case "response.done":
                assert response_id in self.live
                self.live.discard(response_id)
            case kind if kind.startswith("response."):
                assert response_id in self.live, "output of a response that is over"
                if kind == "response.output_audio.delta":
                    self.audio[response_id] += base64.b64decode(frame["delta"])
                elif kind.endswith((".output_text.delta", "transcript.delta")):
                    self.text[response_id] += frame["delta"]

    def kinds(self) -> list[str]:
        return [frame["type"] for frame in self.frames]


@asynccontextmanager
async def connected(run: Any, query: str = "?model=any", **options: Any):
    async with aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{run.url}/v1/realtime{query}", max_msg_size=0, **options) as ws:
            client = Client(ws)
            assert (await client.next())["type"] == "session.created"
            yield client


@asynccontextmanager
async def serving(run: Any, **settings: Any):
    """A gateway of the test's own over the same stages, with other limits."""
    member = await streamrt.Client.connect(run.name)
    config = msgspec.structs.replace(member.pipeline.gateway, port=0, **settings)
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(gateway.serve(member, 0, address.set_result, stop, config))
    try:
        await asyncio.wait([running, address], return_when=asyncio.FIRST_COMPLETED)
        async with aiohttp.ClientSession(await address) as http:
            yield http
    finally:
        stop.set()
        await running
        await member.close()


async def manual(client: Client) -> None:
    await client.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    await client.until("session.updated")


def gauges(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


# ---- turns


async def test_a_spoken_turn_is_heard_and_answered(voice):
    async with connected(voice, "?streamrt=1") as client:
        await client.speak(sine(1.0) + bytes(48_000))
        done = await client.until("response.done")
    order = [
        "session.created", "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed",
        "conversation.item.added", "conversation.item.done", "response.created", "conversation.item.input_audio_transcription.delta",
        "conversation.item.input_audio_transcription.completed", "response.output_item.added", "conversation.item.added",
        "response.content_part.added", "response.output_audio.delta", "streamrt.turn_timings",
        "response.output_audio.done", "response.output_audio_transcript.done", "response.content_part.done", "response.output_item.done",
        "conversation.item.done", "response.done",
    ]  # fmt: skip
    firsts = [kind for n, kind in enumerate(client.kinds()) if kind not in client.kinds()[:n]]
    words = firsts.index("response.output_audio_transcript.delta")  # from another stage than the sound: either may be first
    assert firsts.index("response.content_part.added") < words < firsts.index("response.output_audio_transcript.done")
    firsts.pop(words)
    assert firsts == [kind for n, kind in enumerate(order) if kind not in order[:n]]
    item_ids = {frame["item_id"] for frame in client.frames if frame["type"].startswith("input_audio_buffer.")}
    assert len(item_ids) == 1
    response = done["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"] == [{"type": "output_audio", "transcript": "It is Paris."}]
    assert response["usage"]["output_tokens"] == 3
    assert len(client.audio[response["id"]]) == 2 * 24_000 * 20 * len("It is Paris.") // 1000


async def test_timings_are_told_only_to_those_who_ask(voice):
    async with connected(voice) as client:
        await client.speak(sine(0.5) + bytes(48_000))
        await client.until("response.done")
    assert not any(kind.startswith("streamrt.") for kind in client.kinds())


async def test_a_client_that_commits_by_itself_is_answered_when_it_asks(slow):
    async with connected(slow) as client:
        await manual(client)
        await client.speak(sine(0.5))
        await client.send("input_audio_buffer.commit")
        await client.send("response.create", response={"output_modalities": ["text"], "metadata": {"client_event_id": "x"}})
        created = await client.until("response.created")
        assert created["response"]["metadata"] == {"client_event_id": "x"}
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        assert completed["transcript"].startswith("12000 samples")
        assert completed["usage"] == {"type": "duration", "seconds": 0.5}
        done = await client.until("response.done")
        assert done["response"]["output"][0]["content"][0]["type"] == "output_text"
        assert "response.output_text.done" in client.kinds()


async def test_samples_that_are_split_between_frames_are_not_shifted(slow):
    async with connected(slow) as client:
        await manual(client)
        data = sine(0.5)
        at = 0
        for size in [959, 1, 961, 3] * 20:
            await client.send("input_audio_buffer.append", audio=base64.b64encode(data[at : at + size]).decode())
            at += size
        await client.send("input_audio_buffer.append", audio=base64.b64encode(data[at:] + b"\x01").decode())
        await client.send("input_audio_buffer.commit")
        assert (await client.until("conversation.item.input_audio_transcription.completed"))["transcript"] == "12000 samples, peak 0.3"
        await client.speak(data)  # the half sample is forgotten
        await client.send("input_audio_buffer.commit")
        assert (await client.until("conversation.item.input_audio_transcription.completed"))["transcript"] == "12000 samples, peak 0.3"


async def test_every_commit_gets_one_transcript_though_hearing_is_slow(slow):
    async with connected(slow) as client:
        await manual(client)
        for _ in range(3):
            await client.speak(sine(1.0), size=960)
            await client.send("input_audio_buffer.commit")
        items = [(await client.until("input_audio_buffer.committed"))["item_id"] for _ in range(3)]
        heard = [frame for frame in client.frames if frame["type"].endswith("transcription.completed")]
        while len(heard) < 3:
            heard.append(await client.until("conversation.item.input_audio_transcription.completed"))
        assert sorted(frame["item_id"] for frame in heard) == sorted(items)
        assert {frame["transcript"] for frame in heard} == {"24000 samples, peak 0.3"}
        assert await client.unasked(0.3) == []


@pytest.mark.parametrize("data", [b"", sine(0.04)])
async def test_a_commit_of_too_little_audio_is_an_error_and_the_next_turn_works(slow, data):
    async with connected(slow) as client:
        await manual(client)
        await client.speak(data)
        await client.send("input_audio_buffer.commit", event_id="mine")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        await client.speak(sine(0.5))
        await client.send("input_audio_buffer.commit")
        await client.until("conversation.item.input_audio_transcription.completed")


async def test_two_answers_asked_for_at_once_are_one_answer_and_one_error(voice):
    async with connected(voice) as client:
        await client.say("tell me five sentences")
        await client.send("response.create", event_id="second")
        error = await client.until("error")
        assert error["error"]["code"] == "conversation_already_has_active_response"
        assert error["error"]["event_id"] == "second"
        (active,) = client.live
        assert active in error["error"]["message"]


async def test_an_answer_asked_for_while_one_comes_by_itself_is_refused(voice):
    async with connected(voice) as client:
        await client.speak(sine(0.5) + bytes(24_000))
        await client.until("input_audio_buffer.committed")
        await client.send("response.create")
        await client.until("error", "response.done")
        assert client.kinds().count("response.created") - client.kinds().count("response.done") <= 1


async def test_a_turn_ends_when_no_more_audio_comes(voice):
    async with connected(voice) as client:
        await client.speak(sine(1.0))
        await client.until("input_audio_buffer.speech_started")
        stopped = await client.until("input_audio_buffer.speech_stopped")
        assert stopped["audio_end_ms"] == 1000
        assert (await client.until("response.done"))["response"]["status"] == "completed"


@pytest.mark.parametrize("kind, loud, silence", [("audio/pcmu", b"\x80\x00", b"\xff"), ("audio/pcma", b"\xaa\x2a", b"\xd5")])
async def test_telephone_audio_is_spoken_both_ways(voice, kind, loud, silence):
    async with connected(voice) as client:
        audio = {"input": {"format": {"type": kind}}, "output": {"format": {"type": kind}}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        await client.until("session.updated")
        assert client.session["audio"]["input"]["format"] == {"type": kind}
        await client.speak(loud * 2000 + silence * 4000, size=400)
        started = await client.until("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == 0
        assert (await client.until("input_audio_buffer.speech_stopped"))["audio_end_ms"] == 500
        done = await client.until("response.done")
        assert len(client.audio[done["response"]["id"]]) == 8 * 20 * len("It is Paris.")


# ---- interruptions


@pytest.mark.parametrize("deltas", [1, 5, 12])
async def test_nothing_of_an_interrupted_answer_is_heard_in_the_next(slow, deltas):
    async with connected(slow) as client:
        await client.say("go on", audio={"output": {"voice": "tone-300"}})
        first = (await client.until("response.created"))["response"]["id"]
        for _ in range(deltas):
            await client.until("response.output_audio.delta")
        await client.send("response.cancel")
        done = await client.until("response.done")
        assert done["response"]["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        await client.say("something else", audio={"output": {"voice": "tone-900"}})
        second = (await client.until("response.created"))["response"]["id"]
        while len(client.audio[second]) < 24_000:
            await client.until("response.output_audio.delta")
        assert frequency(client.audio[second]) == pytest.approx(900, abs=3)
        assert frequency(client.audio[first]) == pytest.approx(300, abs=30)


async def test_speech_stops_the_answer_and_the_client_says_how_much_was_heard(slow):
    async with connected(slow) as client:
        await client.say("go on")
        item_id = (await client.until("response.output_item.added"))["item"]["id"]
        while sum(map(len, client.audio.values())) < 24_000:  # half a second
            await client.until("response.output_audio.delta")
        await client.speak(sine(0.3))
        started = await client.until("input_audio_buffer.speech_started")
        done = await client.until("response.done")
        assert done["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert client.kinds().index("input_audio_buffer.speech_started") < client.kinds().index("response.done")
        assert done["response"]["output"][0]["status"] == "incomplete"
        await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=300)
        await client.until("conversation.item.truncated", item_id=item_id, audio_end_ms=300)
        await client.send("conversation.item.retrieve", item_id=item_id)
        heard = (await client.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
        assert heard == "This"  # at the pace of speech, which is what is known of a clause that was stopped
        assert started["item_id"] != item_id


async def test_truncation_is_checked_against_what_was_said(voice):
    async with connected(voice) as client:
        await client.say("the capital?")
        done = await client.until("response.done")
        item_id = done["response"]["output"][0]["id"]
        user_id = next(f["item"]["id"] for f in client.frames if f["type"] == "conversation.item.added")
        for target, ms, code in (
            (item_id, 241, "invalid_value"),
            (item_id, 57_340, "invalid_value"),
            (item_id, -1, "invalid_value"),
            (user_id, 0, "unsupported_content_type"),
            ("nobody", 0, "item_truncate_invalid_item_id"),
        ):
            await client.send("conversation.item.truncate", item_id=target, content_index=0, audio_end_ms=ms)
            assert (await client.until("error"))["error"]["code"] == code
        for ms in (240, 0, 0):
            await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=ms)
            await client.until("conversation.item.truncated")


async def test_there_is_nothing_to_cancel_when_nothing_runs(voice):
    async with connected(voice) as client:
        await client.send("response.cancel")
        error = (await client.until("error"))["error"]
        assert error["code"] == "response_cancel_not_active"
        assert error["message"].startswith("Cancellation failed: no active response found")


# ---- audio out


async def test_audio_comes_as_it_is_made(slow):
    loop = asyncio.get_running_loop()
    async with connected(slow) as client:
        await client.say("go on")
        await client.until("response.created")
        times = []
        while (await client.until("response.output_audio.delta", "response.done"))["type"] != "response.done":
            times.append(loop.time())
        assert len(times) >= 50
        assert times[-1] - times[0] >= 2.0


async def test_audio_is_sent_at_most_a_few_seconds_before_it_is_played(voice):
    loop = asyncio.get_running_loop()
    async with connected(voice) as client:
        await client.say("five sentences, then five sentences")
        response_id = (await client.until("response.created"))["response"]["id"]
        start = 0.0
        while (frame := await client.until("response.output_audio.delta", "response.done"))["type"] != "response.done":
            start = start or loop.time()
            assert len(client.audio[response_id]) / 48_000 <= loop.time() - start + 2.5 + 0.5
            assert len(frame["delta"]) <= 4 * 4800 // 3 + 4
        assert len(client.audio[response_id]) / 48_000 < 2.6


async def test_each_session_hears_only_its_own_voice(voice):
    async def talk(hz: int) -> None:
        async with connected(voice) as client:
            await client.send("session.update", session={"type": "realtime", "audio": {"output": {"voice": f"tone-{hz}"}}})
            await client.until("session.updated")
            for _ in range(2):
                await client.say("the capital?")
                await client.until("response.done")
            assert len(client.audio) == 2
            for data in client.audio.values():
                assert frequency(data) == pytest.approx(hz, abs=5)

    await asyncio.gather(*(talk(hz) for hz in range(300, 1100, 100)))


async def test_characters_are_never_split(voice):
    async with connected(voice) as client:
        await client.say("unicode please")
        done = await client.until("response.done")
        assert client.text[done["response"]["id"]] == "你好🌍é — ok"


# ---- the session


async def test_each_update_is_answered_once_and_in_order(voice):
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{voice.url}/v1/realtime") as ws:
        client = Client(ws)
        updates: list[tuple[dict[str, Any], str]] = [  # sent before session.created is read
            ({"type": "realtime", "instructions": "A"}, "session.updated"),
            ({"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 7}}}}, "error"),
            ({"type": "realtime", "instructions": "B", "nonsense": 1}, "error"),
            ({"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcm", "rate": 16000}}}}, "error"),
            ({"instructions": "C"}, "session.updated"),
            ({"type": "realtime", "instructions": None}, "session.updated"),
        ]
        for n, (update, _) in enumerate(updates):
            await client.send("session.update", session=update, event_id=f"u{n}")
        assert (await client.next())["type"] == "session.created"
        answers = [await client.next() for _ in updates]
        assert [frame["type"] for frame in answers] == [kind for _, kind in updates]
        assert [f["session"]["instructions"] for f in answers if f["type"] == "session.updated"] == ["A", "C", ""]
        assert [f["error"]["event_id"] for f in answers if f["type"] == "error"] == ["u1", "u2", "u3"]
        assert answers[2]["error"]["code"] == "unknown_parameter"
        assert answers[2]["error"]["param"] == "session.nonsense"
        assert answers[1]["error"]["param"] == "session.audio.input.turn_detection.threshold"


@pytest.mark.parametrize(
    "field, value", [("threshold", 0.8), ("prefix_padding_ms", 100), ("silence_duration_ms", 200), ("create_response", False)]
)
async def test_a_part_of_turn_detection_is_changed_and_its_siblings_stay(voice, field, value):
    async with connected(voice) as client:
        before = client.session["audio"]["input"]["turn_detection"]
        await client.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": {field: value}}}})
        await client.until("session.updated")
        assert client.session["audio"]["input"]["turn_detection"] == {**before, field: value}
        await client.speak(sine(0.5) + bytes(48_000))
        await client.until("input_audio_buffer.committed")


async def test_what_strict_clients_open_with_is_taken_and_what_is_used_is_shown(voice):
    async with connected(voice) as client:
        session = {
            "type": "realtime", "model": "gpt-realtime-2.1", "output_modalities": ["audio"], "tracing": "auto",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000}, "transcription": {"model": "gpt-4o-mini-transcribe"},
                    "turn_detection": {"type": "semantic_vad", "interrupt_response": True},
                },
                "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash"},
            },
        }  # fmt: skip
        await client.send("session.update", session=session)
        await client.until("session.updated")
        audio = client.session["audio"]
        assert audio["input"]["turn_detection"]["type"] == "semantic_vad"
        assert audio["input"]["turn_detection"]["interrupt_response"] is True
        assert audio["output"]["voice"] == "tone"
        assert client.session["model"] == voice.name


async def test_the_names_of_the_beta_are_taken(voice):
    async with connected(voice) as client:
        beta = {
            "modalities": ["text"], "input_audio_format": "g711_ulaw", "turn_detection": None, "voice": "tone-300",
            "max_response_output_tokens": 7, "temperature": 0.9, "input_audio_transcription": None,
        }  # fmt: skip
        await client.send("session.update", session=beta)
        await client.until("session.updated")
        assert client.session["output_modalities"] == ["text"]
        assert client.session["max_output_tokens"] == 7
        audio = client.session["audio"]
        assert audio["input"] == {"format": {"type": "audio/pcmu"}, "transcription": None, "noise_reduction": None, "turn_detection": None}
        assert audio["output"]["voice"] == "tone-300"


async def test_a_response_of_its_own_leaves_no_trace(voice):
    async with connected(voice) as client:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the capital?"}]}
        await client.send(
            "response.create", response={"conversation": "none", "output_modalities": ["text"], "metadata": {"topic": "t"}, "input": [item]}
        )
        done = await client.until("response.done")
        assert done["response"]["conversation_id"] is None
        assert done["response"]["metadata"] == {"topic": "t"}
        assert done["response"]["output"][0]["content"] == [{"type": "output_text", "text": "It is Paris."}]
        assert "conversation.item.added" not in client.kinds()


async def test_a_function_is_called_and_its_output_answered(voice):
    async with connected(voice) as client:
        tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
        await client.say("the weather?", tools=[tool])
        done = await client.until("response.done")
        message, call = done["response"]["output"]
        assert message["content"] == [{"type": "output_audio", "transcript": "Let me see."}]
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        told = [frame for frame in client.frames if frame["type"].startswith("response.function_call_arguments")]
        assert {(frame["item_id"], frame["call_id"], frame["output_index"]) for frame in told} == {(call["id"], call["call_id"], 1)}
        assert "".join(frame.get("delta", "") for frame in told) == told[-1]["arguments"] == call["arguments"] == '{"city": "Paris"}'
        own = [frame["type"] for frame in client.frames if frame.get("item", {}).get("id") == call["id"]]
        assert own == [
            "response.output_item.added", "conversation.item.added", "response.output_item.done", "conversation.item.done",
        ]  # fmt: skip
        await client.send("conversation.item.create", item={"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
        await client.send("response.create", response={"output_modalities": ["text"]})
        assert (await client.until("response.done"))["response"]["status"] == "completed"


async def test_a_response_that_is_cut_short_says_so(voice):
    async with connected(voice) as client:
        await client.say("five sentences", output_modalities=["text"], max_output_tokens=2)
        done = await client.until("response.done")
        assert done["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert client.text[done["response"]["id"]] == "One is "


async def test_items_are_created_found_and_deleted(voice):
    async with connected(voice) as client:
        for item in (
            {"id": "first", "type": "message", "role": "system", "content": [{"type": "input_text", "text": "x"}]},
            {"id": "call", "type": "function_call", "name": "now", "call_id": "c", "arguments": "{}"},
            {"id": "out", "type": "function_call_output", "call_id": "c", "output": "noon"},
            {"id": "said", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Noon."}]},
        ):
            await client.send("conversation.item.create", item=item)
            await client.until("conversation.item.done")
        for item_id, kind in (("call", "conversation.item.retrieved"), ("nobody", "error")):
            await client.send("conversation.item.retrieve", item_id=item_id)
            await client.until(kind)
        await client.send("conversation.item.delete", item_id="call")
        await client.until("conversation.item.deleted", item_id="call")
        await client.send("conversation.item.delete", item_id="call")
        assert (await client.until("error"))["error"]["code"] == "item_delete_invalid_item_id"
        for item in (
            {"type": "message", "role": "assistant", "content": [{"type": "output_audio", "transcript": "x"}]},
            {"type": "message", "content": []},
            {"id": "x" * 33, "type": "message", "role": "user", "content": []},
            {"id": "out", "type": "message", "role": "user", "content": []},
        ):
            await client.send("conversation.item.create", item=item)
            await client.until("error")


async def test_audio_can_be_given_as_an_item(slow):
    async with connected(slow) as client:
        content = [{"type": "input_audio", "audio": base64.b64encode(sine(0.5)).decode()}]
        await client.send("conversation.item.create", item={"id": "a", "type": "message", "role": "user", "content": content})
        assert (await client.until("conversation.item.input_audio_transcription.completed"))["transcript"] == "12000 samples, peak 0.3"


async def test_a_transcription_session_answers_nothing(voice):
    async with connected(voice, "?intent=transcription") as client:
        assert client.session["type"] == "transcription"
        await client.speak(sine(0.5) + bytes(48_000))
        await client.until("conversation.item.input_audio_transcription.completed")
        await client.send("response.create")
        assert (await client.until("error"))["error"]["code"] == "no_responses"
        assert "response.created" not in client.kinds()


# ---- bad input


BAD_FRAMES = [
    "]", "{", "null", "[]", '"x"', '{"type":5}', "{}", '{"type":"nope"}', '{"type":"response.create","event_id":7}', "NaN",
    '{"type":"input_audio_buffer.append","audio":NaN}', '{"type":"input_audio_buffer.append","audio":"%%%"}',
    '{"type":"input_audio_buffer.append","audio":"\\ud800"}', '{"type":"input_audio_buffer.append"}', "[" * 10_000,
    '{"type":"session.update","session":' + '{"a":' * 5_000 + "1" + "}" * 5_001,
    '{"type":"session.update","session":[]}', '{"type":"session.update","session":{"audio":7}}',
    '{"type":"session.update","session":{"audio":{"input":{"turn_detection":[]}}}}', '{"type":"session.update","session":{"tools":7}}',
    '{"type":"response.create","response":{"output_modalities":["smell"]}}', '{"type":"response.create","response":{"input":[{"type":"item_reference","id":"z"}]}}',
    '{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[{"type":"input_image"}]}}',
    '{"type":"conversation.item.truncate","item_id":"x","audio_end_ms":1.5}', "\x00",
]  # fmt: skip


async def test_a_frame_that_is_wrong_is_one_error_and_the_session_goes_on(voice):
    async with connected(voice) as other, connected(voice) as client:
        for frame in BAD_FRAMES:
            await client.ws.send_str(frame)
            answer = await client.next()
            assert answer["type"] == "error", frame[:80]
            assert answer["error"]["type"] == "invalid_request_error"
        await client.ws.send_bytes(b"\x00\x01")
        assert (await client.next())["type"] == "error"
        for each in (client, other):
            await each.say("the capital?")
            assert (await each.until("response.done"))["response"]["status"] == "completed"


@pytest.mark.parametrize(
    "frame, code", [(b"\x81\x82\x00\x00\x00\x00\xff\xfe", 1007), (b"\xc1\x82\x00\x00\x00\x00{}", 1002), (b"\x83\x80\x00\x00\x00\x00", 1002)]
)
async def test_a_broken_websocket_frame_ends_that_socket_alone(voice, frame, code):
    host, port = voice.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /v1/realtime HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(frame)
    async with asyncio.timeout(10):
        rest = await reader.read()
    assert rest.endswith(struct.pack(">H", code)) or struct.pack(">H", code) in rest
    writer.close()
    async with connected(voice) as client:
        await client.say("the capital?")
        await client.until("response.done")


async def test_more_audio_than_the_buffer_holds_is_an_error(slow):
    async with connected(slow) as client:
        await manual(client)
        await client.speak(bytes(48_000 * 61), size=48_000)
        assert (await client.until("error"))["error"]["code"] == "input_audio_buffer_full"
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.speak(sine(0.2))
        await client.send("input_audio_buffer.commit")
        await client.until("conversation.item.input_audio_transcription.completed")


async def test_a_client_that_sends_much_faster_than_speech_costs_bounded_memory(voice):
    gateway = voice.pids()["gateway#0"]
    async with connected(voice) as client:
        before = rss_mib(gateway)
        silence = base64.b64encode(bytes(48_000 * 100)).decode()
        for _ in range(6):  # ten minutes
            await client.send("input_audio_buffer.append", audio=silence)
        await client.send("conversation.item.retrieve", item_id="x")
        await client.until("error")
        assert rss_mib(gateway) - before < 80


async def test_a_client_that_does_not_read_is_paced_and_its_neighbours_do_not_notice(voice):
    gateway = voice.pids()["gateway#0"]
    async with connected(voice) as deaf, connected(voice) as client:
        before = rss_mib(gateway)
        for _ in range(200):
            await deaf.say("five sentences")
        for _ in range(3):
            await client.say("the capital?")
            await client.until("response.done")
        assert rss_mib(gateway) - before < 30


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---- disconnects and failures


async def test_clients_that_vanish_leave_nothing_behind(slow):
    gateway = slow.pids()["gateway#0"]

    async def vanish(n: int) -> None:
        async with aiohttp.ClientSession() as http:
            ws = await http.ws_connect(f"{slow.url}/v1/realtime")
            client = Client(ws)
            await client.next()
            await client.say("go on")
            await client.speak(sine(0.2))
            if n % 3:
                await client.until("response.created")
            if n % 2:
                await ws.close()
            else:
                ws._response.connection.transport.abort()

    await vanish(1)
    fds = len(os.listdir(f"/proc/{gateway}/fd"))
    for first in range(0, 24, 6):
        await asyncio.gather(*(vanish(first + n) for n in range(6)))
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(20):
            while True:
                async with http.get(f"{slow.url}/metrics") as response:
                    text = await response.text()
                if not gauges(text, "streamrt_realtime_sessions{") and not gauges(text, "streamrt_running_requests{"):
                    break
                await asyncio.sleep(0.5)  # the gauges ride on heartbeats, one a second
    assert len(os.listdir(f"/proc/{gateway}/fd")) <= fds + 3
    async with connected(slow) as client:
        assert await client.unasked(0.5) == []
        await client.say("something", audio={"output": {"voice": "tone-900"}})
        response_id = (await client.until("response.created"))["response"]["id"]
        while len(client.audio[response_id]) < 24_000:
            await client.until("response.output_audio.delta")
        assert frequency(client.audio[response_id]) == pytest.approx(900, abs=3)


@pytest.mark.parametrize("stage", ["tts", "asr", "vad"])
async def test_a_stage_that_dies_ends_its_work_and_not_the_session(slow, stage):
    async with connected(slow) as client:
        if stage == "tts":
            await client.say("go on")
            await client.until("response.output_audio.delta")
        else:
            await client.speak(sine(1.0))
            await client.until("input_audio_buffer.speech_started")
        slow.kill(f"{stage}#0")
        if stage == "vad":
            await client.until("error")
        elif stage == "asr":
            await client.until("conversation.item.input_audio_transcription.failed")
        if stage != "vad":
            done = await client.until("response.done")
            assert done["response"]["status"] == "failed"
            assert done["response"]["status_details"]["error"]["type"] == "server_error"
        slow.wait_for(lambda: slow.rows()[f"{stage}#0"]["state"] == "ready")
    async with connected(slow) as client:
        await client.speak(sine(0.5) + bytes(48_000))
        await client.until("conversation.item.input_audio_transcription.completed")
        await client.until("response.output_audio.delta")


# ---- who may come in


async def test_a_key_may_come_as_a_subprotocol_and_only_realtime_is_selected(voice, monkeypatch):
    monkeypatch.setenv("REALTIME_TEST_KEY", "secret")
    async with serving(voice, api_key_env="REALTIME_TEST_KEY") as http:
        async with http.ws_connect("/v1/realtime", protocols=("realtime", "openai-insecure-api-key.secret")) as ws:
            assert ws.protocol == "realtime"
            assert (await ws.receive_json())["type"] == "session.created"
        async with http.ws_connect("/v1/realtime", headers={"Authorization": "Bearer secret"}) as ws:
            assert (await ws.receive_json())["type"] == "session.created"
        for protocols in ((), ("realtime", "openai-insecure-api-key.wrong")):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect("/v1/realtime", protocols=protocols)
            assert refused.value.status == 401


async def test_there_are_so_many_sessions_and_no_more(voice):
    async with serving(voice, max_sessions=1) as http:
        ws = await http.ws_connect("/v1/realtime")
        await ws.receive_json()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect("/v1/realtime")
        assert refused.value.status == 429
        await ws.close()
        async with asyncio.timeout(10):
            while True:
                try:
                    again = await http.ws_connect("/v1/realtime")
                except aiohttp.WSServerHandshakeError:
                    continue  # the server is about to see the close
                break
        await again.close()


async def test_a_session_that_has_lasted_too_long_is_told_so_and_closed():
    with up(
        VOICE.replace("realtime-tests", "realtime-short"), "--set", "session.max_session_s=1.5", "--set", "stage.tts.args.ms_per_char=100"
    ) as run:
        async with connected(run) as client:
            await client.say("five sentences")
            assert (await client.until("error"))["error"]["code"] == "session_expired"
            assert (await client.until("response.done"))["response"]["status"] == "failed"
            assert (await client.ws.receive(10)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_a_plain_request_is_told_that_this_is_a_websocket(voice):
    async with aiohttp.ClientSession() as http, http.get(f"{voice.url}/v1/realtime") as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


# ---- official clients


async def test_the_openai_client_talks(voice):
    client = AsyncOpenAI(api_key="any", base_url=f"{voice.url}/v1")
    async with client.realtime.connect(model="any") as connection:
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        await connection.input_audio_buffer.append(audio=base64.b64encode(sine(0.6) + bytes(48_000)).decode())
        transcript, audio = "", b""
        async with asyncio.timeout(20):
            async for event in connection:
                STRICT.validate_python(event.to_dict())
                if event.type == "conversation.item.input_audio_transcription.completed":
                    transcript = event.transcript
                elif event.type == "response.output_audio.delta":
                    audio += base64.b64decode(event.delta)
                elif event.type == "response.done":
                    assert event.response.output[0].content[0].transcript == "It is Paris."
                    break
    assert transcript == "What is the capital of France?"
    assert audio
    await client.close()


async def test_the_agents_sdk_holds_a_conversation(voice):
    from agents.realtime import RealtimeAgent, RealtimeRunner

    runner = RealtimeRunner(RealtimeAgent(name="guide", instructions="Be brief."))
    options = {"api_key": "any", "url": voice.url.replace("http", "ws") + "/v1/realtime?model=any"}
    seen: list[str] = []
    audio = b""
    async with await runner.run(model_config=options) as session:
        await session.send_message("the capital?")
        async with asyncio.timeout(20):
            async for event in session:
                seen.append(event.type)
                assert event.type != "error", event
                if event.type == "audio":
                    audio += event.audio.data
                if event.type == "agent_end":
                    break
        assert len(audio) == 2 * 24_000 * 20 * len("It is Paris.") // 1000
        await session.send_audio(sine(0.6) + bytes(48_000))
        async with asyncio.timeout(20):
            async for event in session:
                assert event.type != "error", event
                if event.type == "agent_end":
                    break
