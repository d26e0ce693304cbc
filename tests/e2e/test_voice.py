"""The voice agent of `make voice`, with its real models, end to end: what a newcomer gets.

Timing limits here are twice the stated ones; `tests/perf/bench_voice.py` shows the stated figures.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
from openai import OpenAI
from playwright.async_api import async_playwright, expect

from tests.pipelines import Running, children_of, run_cli, start

ROOT = Path(__file__).parents[2]
VOICE = ROOT / "examples/03_voice/pipeline.toml"
QUESTION = "What is the capital of France?"

START_S = 15.0  # from start to ready, with a warm file cache
TURN_S = 2.0  # from the end of speech to the first audio, without the wait for silence
MAX_WER = 0.10
IDLE_CORE = 0.01  # of one core, all processes together

# The usual: case and punctuation do not count, and numbers are words.
WORDS = jiwer.Compose(
    [jiwer.ToLowerCase(), jiwer.SubstituteRegexes({r"\b9\b": "nine", r"\b20\b": "twenty", r"o'clock": "oclock", r"[^\w\s]": " "}),
     jiwer.RemoveMultipleSpaces(), jiwer.Strip(), jiwer.ReduceToListOfListOfWords()]
)  # fmt: skip


@pytest.fixture(scope="module")
def voice() -> Iterator[Running]:
    """The pipeline of examples/03_voice on a free port."""
    started = time.monotonic()
    running = start(VOICE, "--set", "gateway.port=0")
    running.took_s = time.monotonic() - started
    try:
        yield running
    finally:
        running.down()


@pytest.fixture(scope="module")
def client(voice: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{voice.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def question(client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The question as our own TTS says it, a 24 kHz WAV file."""
    path = tmp_path_factory.mktemp("question") / "question.wav"
    path.write_bytes(speak(client, QUESTION))
    return path


def speak(client: OpenAI, text: str, form: Any = "wav") -> bytes:
    return client.audio.speech.create(model="tts-1", voice="alloy", input=text, response_format=form).read()


def hear(client: OpenAI, audio: bytes, name: str = "speech.wav") -> str:
    return client.audio.transcriptions.create(model="whisper-1", file=(name, audio)).text


def test_it_is_ready_soon_after_its_start(voice: Running) -> None:
    assert voice.took_s < 2 * START_S
    assert json.load(urllib.request.urlopen(f"{voice.url}/ready"))["ready"] is True
    assert b"<title>" in urllib.request.urlopen(voice.url).read()


def test_talk_answers_a_spoken_question_with_paris(voice: Running, client: OpenAI, question: Path, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    done = run_cli("talk", str(question), "--out", str(reply), "--run", voice.name, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "France" in report["transcript"]
    assert "Paris" in report["reply"]
    assert "Paris" in hear(client, reply.read_bytes())
    timings = report["timings"]
    assert timings["stopped_ms"] <= timings["heard_ms"]
    work_s = (timings["heard_ms"] - timings["stopped_ms"]) / 1000
    assert work_s < 2 * TURN_S, timings
    as_text = run_cli("talk", str(question), "--run", voice.name).stdout
    assert "first audio heard" in as_text
    assert "of which silence" in as_text


@pytest.mark.parametrize("count", [3, pytest.param(14, marks=pytest.mark.slow)])
def test_what_is_spoken_is_understood(client: OpenAI, count: int) -> None:
    sentences = (ROOT / "tests/data/sentences.txt").read_text().splitlines()[:count]
    assert len(sentences) == count
    heard = [hear(client, speak(client, sentence)) for sentence in sentences]
    rate = jiwer.wer(sentences, heard, reference_transform=WORDS, hypothesis_transform=WORDS)
    assert rate <= MAX_WER, list(zip(sentences, heard, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wav", "mp3", "opus", "flac"])
def test_every_container_is_read_back(client: OpenAI, form: str) -> None:
    assert "weather" in hear(client, speak(client, "The weather is nice today.", form), f"speech.{form}").lower()


@pytest.mark.slow
def test_speech_is_the_same_streamed_and_whole(client: OpenAI, voice: Running) -> None:
    text = "The weather is nice today. We bought some fresh bread and cheese at the market."
    whole = speak(client, text, "pcm")
    with client.audio.speech.with_streaming_response.create(model="tts-1", voice="alloy", input=text, response_format="pcm") as answer:
        pieces = list(answer.iter_bytes())
    assert b"".join(pieces) == whole
    samples = np.frombuffer(whole, "<i2")
    assert 3 * 24_000 < len(samples) < 12 * 24_000


def test_chat_answers_in_text_and_sound(client: OpenAI, voice: Running) -> None:
    answer = client.chat.completions.create(
        model=voice.name,
        messages=[{"role": "user", "content": QUESTION}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
        temperature=0,
        max_tokens=20,
    )
    sound = answer.choices[0].message.audio
    assert sound is not None
    assert "Paris" in sound.transcript
    assert "Paris" in hear(client, base64.b64decode(sound.data))


def test_a_sentence_is_spoken_before_the_model_has_ended_the_reply(client: OpenAI, voice: Running) -> None:
    """The first sound leaves while text still comes: the TTS starts at the first clause of the model's stream."""
    stream = client.chat.completions.create(
        model=voice.name,
        messages=[{"role": "user", "content": "Tell me about the city of Paris in five sentences."}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
        temperature=0,
        max_tokens=120,
    )
    kinds: list[str] = []
    for chunk in stream:
        audio = chunk.choices[0].delta.to_dict().get("audio") if chunk.choices else None
        if isinstance(audio, dict):
            kinds += [key for key in ("transcript", "data") if audio.get(key)]
        if "data" in kinds and kinds[-1] == "transcript":
            break  # text after sound: that is all we want to see
    stream.close()
    assert "data" in kinds
    assert kinds[-1] == "transcript", "text came only before the sound"


@pytest.mark.slow
def test_the_openai_example_runs(voice: Running) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/04_openai_client/client.py"), voice.url], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "weather" in done.stdout.lower()
    assert "s of audio)" in done.stdout


def test_bad_input_is_refused_and_the_server_goes_on(client: OpenAI, voice: Running) -> None:
    def post(path: str, data: bytes, kind: str = "application/json") -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"{voice.url}{path}", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, {}
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def speech(**fields: Any) -> tuple[int, dict[str, Any]]:
        return post("/v1/audio/speech", json.dumps({"model": "tts-1", "voice": "alloy", "input": "hello", **fields}).encode())

    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nnot a wav\r\n--b--\r\n'
    cases = {
        "broken JSON": post("/v1/chat/completions", b"{"),
        "an unreadable WAV": post("/v1/audio/transcriptions", form, "multipart/form-data; boundary=b"),
        "empty text": speech(input=""),
        "1 MB of text": speech(input="word " * 200_000),
        "an unknown model": speech(model="nonsense"),
        "an unknown voice": speech(voice="nobody"),
    }
    for what, (status, error) in cases.items():
        assert 400 <= status < 500, (what, status, error)
        assert len(error["message"]) > 10, what
    assert "weather" in hear(client, speak(client, "The weather is nice today.")).lower()


@pytest.mark.slow
def test_idle_costs_nothing(voice: Running) -> None:
    def cpu_s() -> float:
        ticks = 0
        for pid in [voice.process.pid, *children_of(voice.process.pid)]:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    time.sleep(2)  # what the tests before this one have left to do
    before = cpu_s()
    time.sleep(30)
    share = (cpu_s() - before) / 30
    print(f"idle: {share:.2%} of one core")
    assert share < 2 * IDLE_CORE


@pytest.mark.slow
def test_wav_that_is_streamed_has_one_header(client: OpenAI) -> None:
    data = speak(client, "One. Two. Three.")
    assert data.count(b"RIFF") == 1
    with wave.open(io.BytesIO(data)) as file:
        assert file.getframerate() == 24_000
        assert len(file.readframes(10**9)) > 24_000


async def test_the_page_hears_a_question_and_answers_aloud(voice: Running, chromium: str, question: Path, tmp_path: Path) -> None:
    """A browser whose microphone is a file: the words of both sides show, and sound is played."""
    microphone = tmp_path / "microphone.wav"
    with wave.open(str(question)) as file:
        rate, spoken = file.getframerate(), file.readframes(file.getnframes())
    with wave.open(str(microphone), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2 * rate) + spoken + bytes(2 * 40 * rate))
    arguments = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    arguments.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    async with async_playwright() as browsers:
        browser = await browsers.chromium.launch(executable_path=chromium, args=arguments)
        page = await browser.new_page()
        await page.goto(voice.url)
        await page.get_by_role("button", name="Talk", exact=True).click()
        lines = page.locator("#talk-lines")
        await expect(lines.locator(".line.user p").first).to_contain_text("capital of France", timeout=30_000)
        await expect(lines.locator(".line.assistant p").first).to_contain_text("Paris", timeout=30_000)
        await page.wait_for_function("() => Number(document.body.dataset.samplesPlayed) > 24000", timeout=30_000)
        await browser.close()


@pytest.mark.slow
async def test_two_speak_at_once(voice: Running) -> None:
    """Two requests share the models, and neither gets the other's words."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{voice.url}/v1", api_key="none") as client:

        async def round_trip(text: str) -> str:
            sound = await client.audio.speech.create(model="tts-1", voice="alloy", input=text, response_format="wav")
            return (await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound.read()))).text.lower()

        one, two = await asyncio.gather(round_trip("The children are playing in the garden."), round_trip("Please close the window."))
    assert "children" in one and "window" not in one
    assert "window" in two and "children" not in two
