"""The official `openai` client against a voice pipeline that is up: chat, speech, transcription and realtime, no private options.

streamrt up examples/03_voice/pipeline.toml --detach
python examples/04_openai_client/client.py http://127.0.0.1:8000
"""

import asyncio
import base64
import io
import sys
import wave

from openai import AsyncOpenAI, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

# 1. Chat, streamed.
print("chat: ", end="")
for chunk in client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is the capital of France?"}], stream=True, temperature=0, max_tokens=40
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# 2. Text to speech, then that speech back to text.
with client.audio.speech.with_streaming_response.create(
    model="tts-1", voice="alloy", input="The weather is nice today.", response_format="wav"
) as speech:
    spoken = speech.read()
heard = client.audio.transcriptions.create(model="whisper-1", file=("speech.wav", spoken))
print("heard:", heard.text)


# 3. A spoken question over the realtime WebSocket; a spoken answer comes back.
async def ask(question: bytes) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none").realtime.connect(model=model) as connection:
        audio_input = {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None, "transcription": {"model": "whisper-1"}}
        await connection.session.update(session={"type": "realtime", "output_modalities": ["audio"], "audio": {"input": audio_input}})
        await connection.input_audio_buffer.append(audio=base64.b64encode(question).decode())
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        transcript, num_bytes = "", 0
        async for event in connection:
            if event.type == "response.output_audio_transcript.delta":
                transcript += event.delta
            elif event.type == "response.output_audio.delta":
                num_bytes += len(base64.b64decode(event.delta))
            elif event.type == "response.done":
                break
        print(f"realtime: {transcript} ({num_bytes / 48000:.1f} s of audio)")


with (
    client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="What is the capital of France?", response_format="wav"
    ) as speech,
    wave.open(io.BytesIO(speech.read())) as question,
):
    asyncio.run(ask(question.readframes(question.getnframes())))
