"""The web page in a real browser: headless Chromium hears a WAV file as its microphone and talks to a pipeline of scripted stages.

The page shows what it did in data attributes of its body; what went over the WebSocket is read from the browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import wave
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.async_api import async_playwright

from streamrt import Pipeline

HEARD = "What is the capital of France?"
REPLY = "The capital of France is Paris. " + "It lies on the river Seine, and many people live there. " * 8  # about 19 s of tone
WRITTEN = "This was written, not said."

PIPELINE = f"""
[pipeline]
name = "page"

[gateway]
port = 0

[[stage]]
name = "vad"
use = "stages.testing:EnergyVad"

[[stage]]
name = "asr"
use = "stages.testing:ScriptAsr"
[stage.args]
text = "{HEARD}"

[[stage]]
name = "llm"
use = "stages.testing:ScriptLlm"
[stage.args]
reply = "{WRITTEN}"
[stage.args.replies]
"{HEARD}" = "{REPLY.strip()}"

[[stage]]
name = "tts"
use = "stages.testing:ToneTts"
inputs = ["llm"]

[[stage]]
name = "painter"
use = "stages.testing:ScriptImage"
"""

MIC_HZ = 48_000
RATES_HZ = [(48_000, 24_000), (44_100, 24_000), (16_000, 24_000), (24_000, 48_000), (24_000, 44_100), (24_000, 24_000)]

OpenPage = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def voice_url(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running pipeline of scripted voice stages."""
    path = tmp_path_factory.mktemp("page") / "pipeline.toml"
    path.write_text(PIPELINE)
    with Pipeline(path, gateway=True) as pipeline:
        yield pipeline.url


@pytest.fixture
def open_page(chromium: str, voice_url: str, tmp_path: Path) -> OpenPage:
    """`async with open_page(says=[(1, 0), (1, 0.3)]) as page`: the page, with a microphone that hears (seconds, loudness) and then silence."""

    @asynccontextmanager
    async def opened(
        *, says: Sequence[tuple[float, float]] = (), allowed: bool = True, url: str = voice_url, **context: Any
    ) -> AsyncIterator[Any]:
        wav = tmp_path / "microphone.wav"
        write_wav(wav, [*says, (30.0, 0.0)])
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={wav}%noloop"]
        arguments.append("--use-fake-ui-for-media-stream" if allowed else "--deny-permission-prompts")
        async with async_playwright() as browsers:
            browser = await browsers.chromium.launch(executable_path=chromium, args=arguments)
            page = await browser.new_page(**context)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda request: None if request.url.startswith(url) else problems.append(f"external: {request.url}"))
            await page.goto(url)
            yield page
            await browser.close()
            assert problems == []

    return opened


def write_wav(path: Path, parts: list[tuple[float, float]]) -> None:
    """Parts of (seconds, loudness); loudness 0 is silence."""
    tone = [level * np.sin(2 * np.pi * 180 * np.arange(int(seconds * MIC_HZ)) / MIC_HZ) for seconds, level in parts]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MIC_HZ)
        file.writeframes((np.concatenate(tone) * 32767).astype("<i2").tobytes())


class Cable:
    """A line to the gateway that can be pulled out, and is in again at once."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self._far = urlsplit(url)
        self._ends: set[asyncio.StreamWriter] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._far.hostname, self._far.port)
        ends = {writer, far_writer}
        self._ends |= ends
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        self._ends -= ends

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def pull(self) -> None:
        for end in self._ends:
            end.transport.abort()


@asynccontextmanager
async def cable_to(url: str) -> AsyncIterator[Cable]:
    cable = Cable(url)
    async with await asyncio.start_server(cable.carry, "127.0.0.1", 0) as server:
        cable.url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        yield cable
        cable.pull()


async def until(page: Any, condition: str) -> dict[str, str]:
    """Wait for a condition on `at`, the body's counters; returns them as they were then."""
    handle = await page.wait_for_function(
        f"() => {{ const at = {{...document.body.dataset}}; return ({condition}) && at; }}", timeout=30_000
    )
    counters: dict[str, str] = await handle.json_value()
    return counters


async def last_line(page: Any, who: str) -> str:
    text: str = await page.locator(f"#talk-lines .line.{who} p").last.inner_text()
    return text


def record_frames(page: Any) -> list[dict[str, Any]]:
    """Every event that goes over the page's WebSockets, both ways, audio aside; of those that the page sent, `sent` is true."""
    events: list[dict[str, Any]] = []

    def keep(frame: str | bytes, *, sent: bool) -> None:
        event = json.loads(frame)
        if event["type"] not in ("input_audio_buffer.append", "response.output_audio.delta"):
            events.append({**event, "sent": sent})

    def attach(socket: Any) -> None:
        socket.on("framesent", lambda frame: keep(frame, sent=True))
        socket.on("framereceived", lambda frame: keep(frame, sent=False))

    page.on("websocket", attach)
    return events


async def test_what_is_said_shows_and_the_reply_is_heard_and_shows_as_it_is_spoken(open_page: OpenPage) -> None:
    async with open_page(says=[(0.5, 0.0), (1.0, 0.3)]) as page:
        await page.get_by_role("button", name="Talk", exact=True).click()
        await until(page, "at.state === 'speaking'")
        assert await last_line(page, "user") == HEARD
        at = await until(page, "at.samplesPlayed > 3 * 24000")
        assert int(at["underruns"]) == 0
        assert int(at["samplesSent"]) > 24_000
        shown = await last_line(page, "assistant")  # as far as it was spoken
        assert REPLY.startswith(shown)
        assert len("The capital of France is Paris.") <= len(shown) < len(REPLY) / 2
        assert "first audio after" in await page.locator("#talk-lines .line.assistant small").inner_text()
        assert await page.locator("#turns li").count() == 1

        await page.get_by_role("button", name="End", exact=True).click()
        await until(page, "at.state === 'off'")
        assert await page.locator("#talk-lines .line.assistant").get_attribute("data-state") == "cut"


async def test_speaking_stops_the_reply_and_the_server_learns_what_was_heard(open_page: OpenPage) -> None:
    async with open_page(says=[(0.5, 0.0), (1.0, 0.3), (5.0, 0.0), (1.0, 0.3)]) as page:
        events = record_frames(page)
        await page.get_by_role("button", name="Talk", exact=True).click()
        await until(page, "at.state === 'speaking'")
        at = await until(page, "at.flushes === '1'")
        assert await page.locator("#talk-lines .line.assistant").first.get_attribute("data-state") == "cut"
        heard = await page.locator("#talk-lines .line.assistant p").first.inner_text()
        assert REPLY.startswith(heard)
        assert len(heard) < len(REPLY.strip())

        await until(page, "at.turns === '2'")  # the interruption is answered
        truncate = next(event for event in events if event["type"] == "conversation.item.truncate" and event["sent"])
        assert abs(truncate["audio_end_ms"] - int(at["samplesPlayed"]) / 24) < 100
        assert any(event["type"] == "conversation.item.truncated" and event["item_id"] == truncate["item_id"] for event in events)
        assert not any(event["type"] == "error" for event in events)


@pytest.mark.slow
async def test_a_lost_connection_comes_back_with_the_conversation(open_page: OpenPage, voice_url: str) -> None:
    async with cable_to(voice_url) as cable, open_page(says=[(0.5, 0.0), (1.0, 0.3)], url=cable.url) as page:
        events = record_frames(page)
        await page.get_by_role("button", name="Talk", exact=True).click()
        await until(page, "at.samplesPlayed > 24000")
        events.clear()
        cable.pull()
        await until(page, "at.state === 'connecting'")
        await until(page, "at.state === 'listening'")
        sent = [event for event in events if event["sent"]]
        assert [event["type"] for event in sent] == ["session.update", "conversation.item.create", "conversation.item.create"]
        question, answer = (event["item"] for event in sent[1:])
        assert question["content"] == [{"type": "input_text", "text": HEARD}]
        assert answer["content"][0]["text"] == await last_line(page, "assistant")
        await page.wait_for_selector("#readiness[data-state=ready]")  # the picture is back, too


@pytest.mark.slow
async def test_muted_the_microphone_goes_on_as_silence(open_page: OpenPage) -> None:
    async with open_page(says=[(30.0, 0.3)]) as page:
        await page.get_by_role("button", name="Talk", exact=True).click()
        await until(page, "at.state === 'hearing'")
        await page.get_by_role("button", name="Mute").click()
        await until(page, "at.state !== 'hearing'")  # the server heard the turn end


@pytest.mark.slow
async def test_a_refused_microphone_is_explained_and_chat_works(open_page: OpenPage) -> None:
    async with open_page(allowed=False) as page:
        await page.get_by_role("button", name="Talk", exact=True).click()
        await page.wait_for_selector("#problem:not([hidden])")
        assert "did not allow the microphone" in await page.locator("#problem-text").inner_text()
        assert await page.locator("body").get_attribute("data-state") == "off"

        await page.get_by_role("tab", name="Chat").click()
        await page.get_by_label("Message").fill("Hello")
        await page.get_by_label("Message").press("Enter")
        await page.wait_for_selector("#chat-lines .line.assistant[data-state=done]")
        assert await page.locator("#chat-lines .line.assistant p").inner_text() == WRITTEN


async def test_an_image_is_drawn_from_coarse_to_fine(open_page: OpenPage) -> None:
    async with open_page() as page:
        await page.get_by_role("tab", name="Chat").press("ArrowRight")
        await page.get_by_label("Description").fill("a cat, 100 ms a step")
        await page.keyboard.press("Enter")
        await page.wait_for_function("() => document.getElementById('image').naturalWidth === 8")
        await page.wait_for_function("() => document.getElementById('image').naturalWidth === 64")
        assert "64x48, seed 7" in await page.inner_text("#image-note")
        await page.get_by_label("Description").fill("fail at 2")
        await page.get_by_role("button", name="Draw").click()
        await page.wait_for_function("() => document.getElementById('image-note').textContent.includes('told to fail')")


@pytest.mark.slow
async def test_the_picture_shows_every_stage_and_its_state(open_page: OpenPage) -> None:
    async with open_page() as page:
        await page.wait_for_selector("#readiness[data-state=ready]")
        assert await page.locator("#picture .stage.is-ready .name").all_text_contents() == ["vad", "asr", "llm", "tts", "painter"]
        assert await page.locator("#picture .edge").count() == 5  # the gateway to vad, asr, llm and painter; llm to tts
        assert "tts ready, 0 running, 0 queued" in await page.locator("#picture svg").get_attribute("aria-label")


@pytest.mark.slow
async def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: OpenPage) -> None:
    async with open_page(viewport={"width": 360, "height": 740}) as page:
        await page.wait_for_selector("#picture svg")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert await page.get_by_role("button", name="Talk", exact=True).is_visible()


@pytest.mark.slow
async def test_resampling_keeps_a_tone_however_it_is_cut(open_page: OpenPage) -> None:
    async with open_page() as page:
        results: list[list[list[float]]] = await page.evaluate(
            """async (rates) => {
                const { Resampler } = await import("/static/resampler.js");
                return rates.map(([from, to]) => {
                    const tone = Float32Array.from({ length: from / 10 }, (_, i) => Math.sin((2 * Math.PI * 440 * i) / from));
                    return [tone.length, 128, 7].map((cut) => {
                        const resampler = new Resampler(from, to);
                        const out = new Float32Array(to);
                        let n = 0;
                        for (let i = 0; i < tone.length; i += cut) {
                            resampler.push(tone.subarray(i, i + cut));
                            n += resampler.pull(out.subarray(n));
                        }
                        resampler.end();
                        n += resampler.pull(out.subarray(n));
                        if (resampler.consumed !== tone.length) throw new Error(`${resampler.consumed} of ${tone.length} were consumed`);
                        return [...out.subarray(0, n)];
                    });
                });
            }""",
            RATES_HZ,
        )
    for (_, to_hz), (whole, blocks, bits) in zip(RATES_HZ, results, strict=True):
        assert len(whole) == to_hz // 10
        assert blocks == whole
        assert bits == whole
        expected = np.sin(2 * np.pi * 440 * np.arange(len(whole)) / to_hz)
        edge = to_hz // 200  # the tone begins and ends at once, which a band limit rounds off
        assert np.abs(np.array(whole) - expected)[edge:-edge].max() < 2e-3
