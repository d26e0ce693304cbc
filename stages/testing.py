"""Scripted stages: real stages in real processes whose behaviour is known to the sample. Protocols are tested on them.

    listen      EnergyVad     speech is what is loud
    transcribe  ScriptAsr     always hears the same words
    respond     ScriptLlm     streams the reply that the script holds for a message
    speak       ToneTts       a sine per clause, sample-exact
    image       ScriptImage   one colour per seed, or the given image with its mask painted over
    video       ScriptVideo   frames that count, with or without a tone
    audio       ScriptSound   a tone in stereo
    anything    Slow, Crash, Hang, Ranked, Ramp

They ship because users test their own pipelines with them. No model, no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, TextIO

import msgspec
import numpy as np

from stages.ar.tool_calls import ToolCallParser, piece_chunk
from streamrt import Chunk, Request, Stage, StageFailed, UnknownVoice, audio_chunk, end_chunk, event_chunk, text_chunk


class EnergyVad(Stage):
    """Reports speech where the sound is louder than a threshold. The contract of `listen`, without a model."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        level: float = 0.02  # RMS over one window from which on it is speech
        window_ms: int = 20
        pause_ms: int = 100  # silence after which `speech_paused` is reported
        silence_ms: int = 300  # silence that ends a turn, unless the session says otherwise

    takes = {"audio", "event"}
    gives = {"events": "event"}
    tasks = ("listen",)
    max_requests = 64

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        silence_ms = request.param("silence_duration_ms", self.args.silence_ms)
        enabled = True
        rate = 0
        at = 0  # samples of the input before the window that is looked at
        pending = np.zeros(0, np.float32)
        speaking = paused = False
        speech_end = 0
        async for chunk in chunks:
            if chunk.modality == "event":
                match chunk.event:
                    case "configure":
                        silence_ms = int(chunk.meta.get("silence_duration_ms", silence_ms))
                        enabled = bool(chunk.meta.get("enabled", enabled))
                    case "clear" | "commit":
                        speaking = paused = False
                continue
            rate = chunk.sample_rate_hz or rate
            if not len(chunk.samples) or not rate:
                continue
            pending = np.concatenate([pending, chunk.samples])
            window = max(1, rate * self.args.window_ms // 1000)
            while len(pending) >= window:
                loud = float(np.sqrt(np.mean(pending[:window] ** 2))) >= self.args.level
                pending = pending[window:]
                start, at = at, at + window
                if not enabled:
                    speaking = paused = False
                    continue
                if loud:
                    if not speaking:
                        speaking = True
                        yield event_chunk("speech_started", at_samples=start, rate_hz=rate)
                    elif paused:
                        yield event_chunk("speech_resumed", at_samples=start, rate_hz=rate)
                    paused = False
                    speech_end = at
                elif speaking:
                    quiet_ms = (at - speech_end) * 1000 // rate
                    if quiet_ms >= silence_ms:
                        speaking = paused = False
                        yield event_chunk("speech_stopped", at_samples=speech_end, rate_hz=rate)
                    elif quiet_ms >= self.args.pause_ms and not paused:
                        paused = True
                        yield event_chunk("speech_paused", at_samples=speech_end, rate_hz=rate)


class ScriptAsr(Stage):
    """Hears `text`, whatever is said. `{samples}`, `{seconds}` and `{peak}` in it tell what really arrived."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        text: str = "What is the capital of France?"
        delay_ms: int = 0  # how long the end of the audio takes to be understood
        fail: str = ""  # raise this when the text is asked for

    takes = {"audio", "event"}
    gives = {"text": "text"}
    tasks = ("transcribe",)
    max_requests = 16

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        samples, peak, rate = 0, 0.0, 1
        async for chunk in chunks:
            if chunk.event == "provisional":
                yield text_chunk(self._text(samples, rate, peak), provisional=True)
            elif chunk.modality == "audio" and len(chunk.samples):
                samples += len(chunk.samples)
                rate = chunk.sample_rate_hz
                peak = max(peak, float(np.abs(chunk.samples).max()))
        await asyncio.sleep(self.args.delay_ms / 1000)
        if self.args.fail:
            raise RuntimeError(self.args.fail)
        yield text_chunk(self._text(samples, rate, peak), start_s=0.0, end_s=samples / rate, language="en")

    def _text(self, samples: int, rate: int, peak: float) -> str:
        return self.args.text.format(samples=samples, seconds=round(samples / rate, 3), peak=round(peak, 3))


class ScriptLlm(Stage):
    """Answers from a script: the first key that the last user message (or the prompt) contains, else `reply`.

    `{text}` in a reply is that message, `{choice}` the number of the choice, when several are asked for. Each word is a token; `echo` says the
    message first. A reply with `<tool_call>` in it makes calls when the request has tools. Log probabilities: -0.5 for each word, less for the
    next likely ones.
    """

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        reply: str = "You said: {text}"
        replies: dict[str, str] = {}
        delay_ms: int = 0  # before each word
        first_delay_ms: int = 0  # before the first word

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)
    max_requests = 16

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        heard = "".join([chunk.text async for chunk in chunks])
        messages: list[dict[str, Any]] = request.param("messages", [])
        prompt = request.param("prompt", heard)
        said = next((m.get("content") or "" for m in reversed(messages) if m.get("role") == "user"), _as_text(prompt))
        reply = next((text for key, text in self.args.replies.items() if key in said), self.args.reply).replace("{text}", said)
        await asyncio.sleep(self.args.first_delay_ms / 1000)
        n = request.param("n", 1)
        tokens, reason = 0, ""
        for choice in range(n):
            words = re.findall(r"\S+\s*|\s+", reply.replace("{choice}", str(choice)) if n > 1 else reply)
            limit = request.param("max_tokens", len(words))
            parser = ToolCallParser() if request.param("tools", []) and request.param("tool_choice", "auto") != "none" else None
            more: dict[str, Any] = {"choice": choice} if n > 1 else {}
            if request.param("echo", False):
                yield text_chunk(said, **more)
            for word in words[:limit]:
                await asyncio.sleep(self.args.delay_ms / 1000)
                told: dict[str, Any] = (
                    {"logprobs": [_told(word, request.param("top_logprobs", 0))]} if request.param("logprobs", False) else {}
                )
                if parser is None:
                    yield text_chunk(word, **more, **told)
                    continue
                for piece in parser.push(word):
                    yield piece_chunk(piece, **more)
            for piece in parser.finish() if parser else ():
                yield piece_chunk(piece, **more)
            tokens += min(limit, len(words))
            reason = "length" if limit < len(words) else "tool_calls" if parser and parser.num_calls else "stop"
            if n > 1:
                yield text_chunk("", **more, finish_reason=reason)
        yield end_chunk(finish_reason=reason, usage={"prompt_tokens": len(said.split()), "completion_tokens": tokens})

    def describe(self) -> dict[str, Any]:
        return {"parameters": ["prompt", "echo", "n", "tools", "tool_choice", "logprobs", "top_logprobs"]}


def _as_text(prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def _told(word: str, top: int) -> dict[str, Any]:
    """The log probability of a word, as language models tell it."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "id": len(text), "logprob": logprob, "bytes": list(text.encode())}

    return {**entry(word, -0.5), "top": [entry(word + "?" * n, -0.5 - n) for n in range(top)]}


class ToneTts(Stage):
    """Speaks each clause as a sine whose length follows the clause's, gapless in phase over the whole request."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        hz: float = 440.0  # of voice "tone"; voice "tone-523" is 523 Hz
        ms_per_char: int = 40
        chunk_ms: int = 40
        pace: float = 0.0  # seconds that a second of sound takes; 0 = at once
        first_delay_ms: int = 0

    takes = {"text"}
    gives = {"audio": "audio"}
    tasks = ("speak",)
    max_requests = 16
    rate_hz = 24_000

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        hz = self._hz(request.param("voice", "tone"))
        state = {"at": 0, "chars": 0}
        text = ""
        await asyncio.sleep(self.args.first_delay_ms / 1000)
        async for chunk in chunks:
            text += chunk.text
            while (cut := re.search(r"[.!?,;:]\s", text)) is not None:
                clause, text = text[: cut.end()], text[cut.end() :]
                async for sound in self._speak(clause, hz, state):
                    yield sound
        async for sound in self._speak(text, hz, state):
            yield sound

    async def _speak(self, clause: str, hz: float, state: dict[str, int]) -> AsyncIterator[Chunk]:
        start, state["chars"] = state["chars"], state["chars"] + len(clause)
        if not any(c.isalnum() for c in clause):
            return
        total = self.rate_hz * self.args.ms_per_char * len(clause.strip()) // 1000
        step = self.rate_hz * self.args.chunk_ms // 1000
        for first in range(0, total, step):
            n = min(step, total - first)
            phase = 2 * np.pi * hz * np.arange(state["at"], state["at"] + n) / self.rate_hz
            state["at"] += n
            meta: dict[str, Any] = {"text": clause, "text_start": start, "text_end": state["chars"]} if first == 0 else {}
            await asyncio.sleep(self.args.pace * n / self.rate_hz)
            yield audio_chunk((0.3 * np.sin(phase)).astype(np.float32), self.rate_hz, **meta)

    def _hz(self, voice: str) -> float:
        if voice in ("", "tone", "alloy", "ash", "marin"):
            return float(self.args.hz)
        if re.fullmatch(r"tone-\d+", voice):
            return float(voice.removeprefix("tone-"))
        raise UnknownVoice(f'voice: got "{voice}", expected "tone" or "tone-<hertz>"', param="voice")

    def describe(self) -> dict[str, Any]:
        return {
            "model": "tone",
            "voices": ["tone", *(f"tone-{hz}" for hz in range(200, 3001, 100))],
            "default_voice": "tone",
            "sample_rate_hz": self.rate_hz,
        }


class Ramp(Stage):
    """An audio stream whose every sample says its own index: `params["samples"]` of them, in chunks of `chunk`."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        chunk: int = 480
        samples: int = 24_000

    gives = {"audio": "audio"}
    tasks = ("audio",)

    def process(self, request: Request, chunks: Iterator[Chunk]) -> Iterator[Chunk]:  # type: ignore[override]
        total = request.param("samples", self.args.samples)
        for start in range(0, total, self.args.chunk):
            yield audio_chunk(np.arange(start, min(total, start + self.args.chunk), dtype=np.float32), 24_000)


class Steps(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Arguments of the three stages below, which follow the contract of the diffusion stages (docs/architecture.md) without a model."""

    steps: int = 4  # of a request that names none
    max_steps: int = 100
    max_side: int = 1024
    max_pixels: int = 512 * 512
    max_frames: int = 240
    max_seconds: float = 30.0
    max_images: int = 4
    has_sound: bool = False  # of videos


class _Denoising(Stage):
    """Steps that do nothing but take time and tell of themselves.

    In the prompt "fail at N" raises at that step, and "N ms" is how long each takes.
    """

    Args = Steps
    args: Steps
    takes = {"text", "image"}
    max_requests = 8

    async def denoise(self, request: Request, index: int) -> AsyncIterator[Chunk]:
        steps = request.param("num_inference_steps", self.args.steps)
        fails_at = re.search(r"fail at (\d+)", request.param("prompt", ""))
        takes_ms = re.search(r"(\d+) ms", request.param("prompt", ""))
        previews = request.param("previews", 0)
        for step in range(1, steps + 1):
            await asyncio.sleep(int(takes_ms[1]) / 1000 if takes_ms else 0)
            if fails_at and int(fails_at[1]) == step:
                raise RuntimeError(f"this stage was told to fail at step {step}")
            yield event_chunk("progress", port="progress", step=step, steps=steps, index=index)
            if previews and step % max(1, steps // (previews + 1)) == 0 and step < steps:
                grey = np.full((8, 8, 3), 255 * step // steps, np.uint8)
                yield Chunk("image", {"image": grey}, port="image", meta={"index": index, "preview": True, "step": step})

    def describe(self) -> dict[str, Any]:
        limits = ("max_steps", "max_side", "max_pixels", "max_frames", "max_seconds", "max_images")
        return {
            "model": "script",
            "pipeline": type(self).__name__,
            "accepts": ["prompt", "image", "mask_image", "num_frames", "width", "height"],
            "size_multiple": 8,
            "qualities": ["lossless", "fast"],
            "loras": [],
            "fps": 8.0,
            **{name: getattr(self.args, name) for name in limits},
        }

    def size(self, request: Request) -> tuple[int, int]:
        """(width, height)"""
        size = request.param("size", "auto")
        width, _, height = ("64x48" if size == "auto" else size).partition("x")
        return int(width), int(height)

    def colour(self, seed: int) -> tuple[int, int, int]:
        """Of pictures of this seed."""
        return seed % 256, 128, 64


class ScriptImage(_Denoising):
    """`n` images, each of the colour of its seed; an image that is given comes back with its mask (all of it, without one) in that colour."""

    gives = {"image": "image", "progress": "event"}
    tasks = ("image",)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        given = {chunk.meta["role"]: bytes(chunk.tensors["file"]) async for chunk in chunks if chunk.modality == "image"}
        seed = request.param("seed", 7)
        for index in range(request.param("n", 1)):
            async for told in self.denoise(request, index):
                yield told
            meta = {"index": index, "seed": seed + index}
            yield Chunk("image", {"image": self._draw(request, seed + index, given)}, port="image", meta=meta)
        yield end_chunk(port="image", seed=seed)

    def _draw(self, request: Request, seed: int, given: dict[str, bytes]) -> np.ndarray:
        width, height = self.size(request)
        if "image" not in given:
            return np.full((height, width, 3), self.colour(seed), np.uint8)
        from PIL import Image

        image = np.array(Image.open(io.BytesIO(given["image"])).convert("RGB"))
        mask = np.array(Image.open(io.BytesIO(given["mask"])).convert("L")) if "mask" in given else np.full(image.shape[:2], 255)
        image[mask > 127] = self.colour(seed)
        return image


class ScriptVideo(_Denoising):
    """Grey frames, each brighter than the one before; with `has_sound` a tone of the same length after them."""

    gives = {"video": "video", "audio": "audio", "progress": "event"}
    tasks = ("video",)
    rate_hz = 16_000
    fps = 8.0

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for _ in chunks:
            pass
        async for told in self.denoise(request, 0):
            yield told
        fps = request.param("fps", self.fps)
        count = request.param("num_frames", round(request.param("seconds", 2.0) * fps))
        width, height = self.size(request)
        for first in range(0, count, 4):
            levels = (np.arange(first, min(first + 4, count)) * 8 % 256).astype(np.uint8)
            frames = np.broadcast_to(levels[:, None, None, None], (len(levels), height, width, 3))
            yield Chunk("video", {"frames": frames}, port="video", fps=fps, meta={"index": 0, "frame": first})
        if self.args.has_sound:
            tone = np.sin(2 * np.pi * 440 * np.arange(int(count / fps * self.rate_hz)) / self.rate_hz)
            yield audio_chunk((0.3 * tone).astype(np.float32), self.rate_hz, port="audio")

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "sample_rate_hz": self.rate_hz if self.args.has_sound else 0}


class ScriptSound(_Denoising):
    """A tone of 440 Hz on the left and of 660 Hz on the right."""

    gives = {"audio": "audio", "progress": "event"}
    tasks = ("audio",)
    rate_hz = 44_100

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for _ in chunks:
            pass
        async for told in self.denoise(request, 0):
            yield told
        at = np.arange(int(request.param("seconds", 1.0) * self.rate_hz)) / self.rate_hz
        both = np.stack([0.3 * np.sin(2 * np.pi * hz * at) for hz in (440, 660)]).astype(np.float32)
        for first in range(0, both.shape[1], 8192):
            piece = np.ascontiguousarray(both[:, first : first + 8192])
            yield Chunk("audio", {"audio": piece.mean(axis=0), "channels": piece}, port="audio", sample_rate_hz=self.rate_hz)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "fps": 0.0, "sample_rate_hz": self.rate_hz}


class Slow(Stage):
    """Passes text on, after a while. As `respond` it can be an entry."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        chunk_ms: int = 50  # per chunk
        load_s: float = 0.0
        repeat: int = 1  # how often each chunk is passed on

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)
    max_requests = 4

    def load(self) -> None:
        time.sleep(self.args.load_s)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            for _ in range(self.args.repeat if chunk.text else 0):
                await asyncio.sleep(self.args.chunk_ms / 1000)
                yield text_chunk(chunk.text)


class Crash(Stage):
    """Passes text on until it meets the word for how to fail: "raise" raises, "die" kills the process, "break" says that the stage is broken;
    or fails in `load`."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        in_load: bool = False
        in_load_once: str = ""  # fail while this file does not exist, and make it

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)

    def load(self) -> None:
        if self.args.in_load:
            raise RuntimeError("this stage was told to fail in load")
        if self.args.in_load_once and not os.path.exists(self.args.in_load_once):
            open(self.args.in_load_once, "w").close()
            raise RuntimeError("this stage was told to fail in its first load")

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if "raise" in chunk.text:
                raise RuntimeError("this stage was told to raise")
            if "die" in chunk.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "break" in chunk.text:
                self.context.broken("this stage was told to break")
                await asyncio.Event().wait()  # it never says a word again
            if chunk.text:
                yield text_chunk(chunk.text)


class Ranked(Stage):
    """Passes words on, each with the ranks that saw it: "hi" becomes "hi/0/1". What ranks promise each other, without a model.

    Two pipes join rank 0 to each of the others. Opening one waits for its other end, so nobody looks twice.
    """

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        word_ms: int = 0  # before each word
        fails: int = -1  # the rank that fails in `load`

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)
    supports_tp = True

    def load(self) -> None:
        rank = self.context.rank
        if rank == self.args.fails:
            raise RuntimeError("this rank was told to fail in load")
        self._pipes = [self._open(other) for other in (range(1, self.context.ranks) if rank == 0 else [rank])]

    def _open(self, other: int) -> tuple[TextIO, TextIO]:
        """To read from, to write to: between rank 0 and `other`."""
        assert self.context.rendezvous is not None
        down, up = (self.context.rendezvous / f"{way}-{other}" for way in ("down", "up"))
        for path in (down, up):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path)
        if self.context.rank == 0:
            writer = down.open("w", buffering=1)
            return up.open(), writer
        reader = down.open()
        return reader, up.open("w", buffering=1)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            for word in chunk.text.split():
                await asyncio.sleep(self.args.word_ms / 1000)
                yield text_chunk(f"{await self.compute(self._show, word)} ")

    def _show(self, word: str) -> str:
        seen = [word, "0"]
        try:
            for reader, writer in self._pipes:
                writer.write(f"{word}\n")
                seen.append(reader.readline().strip())
        except BrokenPipeError as error:
            raise StageFailed("a rank is gone") from error
        return "/".join(seen)

    def follow(self) -> None:
        ((reader, writer),) = self._pipes
        for _ in reader:
            writer.write(f"{self.context.rank}\n")

    def close(self) -> None:
        for pipes in self._pipes:
            for pipe in pipes:
                pipe.close()


class Hang(Stage):
    """Blocks its event loop for `seconds` when it reads "hang": what a badly written stage does."""

    class Args(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
        seconds: float = 3600.0

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if "hang" in chunk.text:
                time.sleep(self.args.seconds)  # noqa: ASYNC251 - blocking is what this stage is for
            if chunk.text:
                yield text_chunk(chunk.text)
