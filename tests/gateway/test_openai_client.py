"""The official client, without private options, against scripted stages."""

import io
import wave

import numpy as np
import openai
import pytest

from gateway.media import encoder

CAPITAL = "The capital of France is Paris. It is a large city."
ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(pipeline):
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(client):
    assert "llm" in {model.id async for model in client.models.list()}


async def test_chat(client):
    answer = await client.chat.completions.create(model="llm", messages=ASK, temperature=0.2, max_tokens=50, seed=1, stop=["\n\n"])
    assert answer.choices[0].message.content == CAPITAL
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens > 0
    assert answer._request_id.startswith("req_")


async def test_chat_stream(client):
    stream = await client.chat.completions.create(model="llm", messages=ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == CAPITAL
    assert chunks[-1].usage.total_tokens > 0


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def test_choices_and_log_probabilities(client):
    answer = await client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": "pick"}], n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Choice 0 of some.", "Choice 1 of some."]
    first = answer.choices[1].logprobs.content[0]
    assert (first.token, first.logprob, bytes(first.bytes)) == ("Choice ", -0.5, b"Choice ")
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("Choice ", -0.5), ("Choice ?", -1.5)]
    assert answer.usage.completion_tokens == 8


async def test_tool_calls_whole_and_streamed(client):
    ask = {"model": "llm", "messages": [{"role": "user", "content": "weather"}], "tools": TOOLS}
    whole = (await client.chat.completions.create(**ask)).choices[0]
    assert whole.finish_reason == "tool_calls"
    chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    for n, call in enumerate(whole.message.tool_calls):
        own = [part for part in parts if part.index == n]
        assert [bool(part.id) for part in own] == [True] + [False] * (len(own) - 1)
        assert own[0].function.name == call.function.name
        assert "".join(part.function.arguments for part in own) == call.function.arguments
    assert len([part for part in parts if part.index == 0]) > 2, "arguments come in pieces"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_completions_of_text_and_token_ids(client):
    answer = await client.completions.create(model="llm", prompt=["pick", "What is the capital?", [7, 8]], n=2, max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == [
        "Choice 0 of ", "Choice 1 of ", "The capital of ", "The capital of ", "You said: 7 ", "You said: 7 ",
    ]  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    told = answer.choices[0].logprobs
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["Choice ", "0 ", "of "], [-0.5] * 3, [0, 7, 9])
    assert told.top_logprobs[0] == {"Choice ": -0.5}
    assert answer.usage.completion_tokens == 18


async def test_completions_that_begin_with_their_prompt(client):
    ask = {"model": "llm", "prompt": ["pick", "unicode"], "n": 2, "max_tokens": 2, "echo": True}
    expected = ["pickChoice 0 ", "pickChoice 1 ", "unicode你好🌍é", "unicode你好🌍é"]
    answer = await client.completions.create(**ask)
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 4
    async for chunk in await client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


async def test_completions_stream(client):
    stream = await client.completions.create(
        model="llm", prompt=["pick", "unicode"], n=2, logprobs=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts, offsets, ends = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
        ends[choice.index].append(choice.finish_reason)
    assert texts == ["Choice 0 of some.", "Choice 1 of some.", "你好🌍é", "你好🌍é"]
    assert offsets[1] == [0, 7, 9, 12]
    assert all(end == [None] * (len(end) - 1) + ["stop"] for end in ends)
    assert chunks[-1].usage.completion_tokens == 10


async def test_completions_that_can_not_be_done_are_refused_by_name(client):
    for more, param in (({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"prompt": []}, "prompt"),
                        ({"prompt": "x" * 300_000}, "prompt"), ({"max_tokens": 0}, "max_tokens")):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**{"model": "llm", "prompt": "x", **more})
        assert refused.value.param == param


async def test_spoken_chat(client):
    answer = await client.chat.completions.create(
        model="llm", messages=ASK, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
    )
    assert answer.choices[0].message.audio.transcript == CAPITAL


async def test_speech_whole_and_streamed(client):
    whole = await client.audio.speech.create(model="tts-1", voice="alloy", input=CAPITAL, response_format="pcm")
    async with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="nova", input=CAPITAL, response_format="pcm"
    ) as response:
        streamed = b"".join([piece async for piece in response.iter_bytes()])
    assert streamed == whole.content
    assert len(streamed) > 20_000


async def test_transcription_plain_and_streamed(client):
    writer = encoder("wav", 16_000, True)
    file = ("audio.wav", writer.encode(np.full(8000, 0.25, np.float32)) + writer.finish())
    assert (await client.audio.transcriptions.create(model="whisper-1", file=file)).text == "I heard 8000 samples."
    verbose = await client.audio.transcriptions.create(
        model="whisper-1", file=file, response_format="verbose_json", timestamp_granularities=["segment", "word"]
    )
    assert (verbose.language, verbose.segments[0].end) == ("en", 0.5)
    stream = await client.audio.transcriptions.create(model="gpt-4o-mini-transcribe", file=file, stream=True)
    events = [event async for event in stream]
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", "I heard 8000 samples.")


async def test_speech_is_read_back(client):
    spoken = await client.audio.speech.create(model="tts-1", voice="alloy", input="One, two, three.", response_format="wav")
    with wave.open(io.BytesIO(spoken.content)) as file:
        samples = len(file.readframes(10**7)) // 2
    heard = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", spoken.content))
    assert heard.text == f"I heard {samples} samples."


async def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4o", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.speech.create(model="tts-1", voice="nobody", input="hi")
    assert refused.value.param == "voice"
