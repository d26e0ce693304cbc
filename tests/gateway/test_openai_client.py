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
