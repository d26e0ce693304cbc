"""POST /v1/chat/completions on real processes with scripted stages."""

import base64
import io
import json
import wave

import numpy as np
import pytest

from gateway.media import encoder

CHAT = "/v1/chat/completions"
CAPITAL = "The capital of France is Paris. It is a large city."


def asked(content="What is the capital?", **more):
    return {"messages": [{"role": "user", "content": content}], **more}


async def events_of(response):
    """The data of every event; comments are skipped, and anything else is a fault."""
    events = []
    async for line in response.content:
        assert line == b"\n" or line.startswith((b"data: ", b":")), line
        if line.startswith(b"data: "):
            events.append(line[6:-1])
    return events


async def test_a_plain_answer(http):
    async with http.post(CHAT, json=asked(model="llm")) as response:
        body = await response.json()
    assert (body["object"], body["model"]) == ("chat.completion", "llm")
    choice = body["choices"][0]
    assert choice["message"]["content"] == CAPITAL
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 11, "total_tokens": 15}


async def test_a_limit_on_tokens_ends_with_length(http):
    async with http.post(CHAT, json=asked(max_completion_tokens=3)) as response:
        choice = (await response.json())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of ", "length")


async def test_a_stream_is_role_deltas_reason_usage_done(http):
    async with http.post(CHAT, json=asked(stream=True, stream_options={"include_usage": True})) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        *events, done = await events_of(response)
    assert done == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == CAPITAL
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 15)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_text_beyond_ascii_arrives_whole(http):
    async with http.post(CHAT, json=asked("unicode", stream=True)) as response:
        chunks = [json.loads(event) for event in (await events_of(response))[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "你好🌍é"


async def test_a_spoken_answer_has_transcript_and_sound(http):
    spoken = asked(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})
    async with http.post(CHAT, json=spoken) as response:
        message = (await response.json())["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"]["transcript"] == CAPITAL
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert file.getframerate() == 24_000
        assert file.getnframes() > 24_000 * 0.3


async def test_a_spoken_stream_says_id_transcript_sound_expiry(http):
    spoken = asked(modalities=["text", "audio"], audio={"voice": "tone", "format": "pcm16"}, stream=True)
    async with http.post(CHAT, json=spoken) as response:
        *events, done = await events_of(response)
    assert done == b"[DONE]"
    audio = [json.loads(event)["choices"][0]["delta"].get("audio", {}) for event in events]
    assert sum("id" in delta for delta in audio) == 1
    assert "".join(delta.get("transcript", "") for delta in audio) == CAPITAL
    joined = base64.b64decode("".join(delta.get("data", "") for delta in audio))
    assert joined == b"".join(base64.b64decode(delta.get("data", "")) for delta in audio)
    samples = np.frombuffer(joined, "<i2").astype(np.float32) / 32768
    assert np.abs(np.diff(samples)).max() < 0.3 * 2 * np.pi * 440 / 24_000 * 1.05  # no step at a join is larger than inside
    assert "expires_at" in audio[-2]


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")]


async def test_calls_of_tools_are_told_beside_the_text(http):
    async with http.post(CHAT, json=asked("weather", tools=TOOLS)) as response:
        choice = (await response.json())["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "days": [1, 2]}
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    again = [*asked("weather")["messages"], message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}]
    async with http.post(CHAT, json={"messages": [*again, {"role": "user", "content": "thanks"}], "tools": TOOLS}) as response:
        assert (await response.json())["choices"][0]["message"] == {"role": "assistant", "content": "You said: thanks", "refusal": None}


async def test_without_tools_or_with_tool_choice_none_the_text_is_what_was_said(http):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        async with http.post(CHAT, json=asked("weather", **more)) as response:
            choice = (await response.json())["choices"][0]
        assert "<tool_call>" in choice["message"]["content"]
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


async def test_choices_stream_side_by_side_and_each_has_its_end(http):
    async with http.post(CHAT, json=asked("pick", n=3, stream=True, max_tokens=3)) as response:
        chunks = [json.loads(event)["choices"][0] for event in (await events_of(response))[:-1]]
    for index in range(3):
        own = [choice for choice in chunks if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == f"Choice {index} of "
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


async def test_audio_in_a_message_is_heard_first(http):
    writer = encoder("wav", 16_000, True)
    sound = writer.encode(np.full(4000, 0.25, np.float32)) + writer.finish()
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
    async with http.post(CHAT, json=asked([{"type": "text", "text": "Listen: "}, part])) as response:
        body = await response.json()
    assert body["choices"][0]["message"]["content"] == "You said: Listen: I heard 4000 samples."


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (asked(model="gpt-4o"), 404, "model"),
        (asked(tools=[{"type": "function"}]), 400, "tools[0].function"),
        (asked(n=0), 400, "n"),
        (asked(n=2, modalities=["text", "audio"], audio={"voice": "tone"}), 400, "n"),
        (asked(response_format={"type": "json_object"}), 400, "response_format"),
        (asked(top_k=5), 400, "top_k"),
        (asked([{"type": "image_url", "image_url": {"url": "http://x"}}]), 400, "messages[0].content[0]"),
        (asked([{"type": "text"}]), 400, "messages[0].content[0].text"),
        (asked([{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}]), 400, "messages[0].content[0].input_audio.data"),
        (
            asked([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
            400,
            "messages[0].content[0].input_audio.data",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, 400, "messages[0].audio"),
        (asked(modalities=["text", "audio"]), 400, "audio"),
        (asked(modalities=["text", "audio"], audio={"voice": "nobody"}), 400, "audio.voice"),
        (asked("x" * 300_000), 400, "messages"),
    ],
    ids=range(14),
)
async def test_what_can_not_be_done_is_refused_by_name(http, body, status, param):
    async with http.post(CHAT, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (status, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": 5}'], ids=range(6))
async def test_a_broken_body_is_a_400_and_the_server_goes_on(http, body):
    async with http.post(CHAT, data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with http.post(CHAT, json=asked()) as response:
        assert response.status == 200
