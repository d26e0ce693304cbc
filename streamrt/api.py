"""The Python API: a pipeline as an object.

    with Pipeline("pipeline.toml") as p:
        print(p.generate("What is the capital of France?").text)
        for chunk in p.stream("Tell me a story."):
            ...

    async with AsyncPipeline("pipeline.toml") as p:
        result = await p.generate("Hello")

`Pipeline(path)` starts the run and ends it; `Pipeline(name="voice-chat")` joins one that is up. Both go through the same
client as the gateway. Stages run in processes of their own, so nothing here blocks on a model.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from streamrt.client import Call, Client
from streamrt.errors import BadRequest, Unavailable
from streamrt.rundir import RunDir
from transport.chunk import Chunk, audio_chunk, text_chunk

T = TypeVar("T")

STOP_S = 20.0


class Result:
    """What came of one request: all chunks, and their content joined."""

    def __init__(self, chunks: Sequence[Chunk], timings: dict[str, dict[str, float]]) -> None:
        self.chunks = list(chunks)
        self.timings = timings  # milliseconds per stage

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.modality == "text")

    @property
    def audio(self) -> np.ndarray:
        """(samples,) float32 at `sample_rate_hz`."""
        parts = [chunk.samples for chunk in self.chunks if chunk.modality == "audio"]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @property
    def sample_rate_hz(self) -> int:
        return next((chunk.sample_rate_hz for chunk in self.chunks if chunk.modality == "audio" and chunk.sample_rate_hz), 0)

    @property
    def meta(self) -> dict[str, Any]:
        """The final metadata of all streams: usage, finish_reason ..."""
        return {key: value for chunk in self.chunks if chunk.is_last for key, value in chunk.meta.items()}


class AsyncPipeline:
    """A pipeline for asyncio. Starts (or joins) on `async with`; ends what it started on the way out."""

    def __init__(
        self, path: str | Path | None = None, *, name: str | None = None, overrides: Sequence[str] = (), gateway: bool = False
    ) -> None:
        """
        Args:
            path: a pipeline.toml to start as a run of its own.
            name: a run that is up, to join instead ("" = the only one).
            overrides: as `--set`: "stage.llm.args.max_tokens=20".
            gateway: start the gateway, too.
        """
        if (path is None) == (name is None):
            raise ValueError("give either the path of a pipeline.toml, or the name of a run that is up")
        self._path = None if path is None else Path(path)
        self._name = name
        self._overrides = tuple(overrides)
        self._gateway = gateway
        self._process: asyncio.subprocess.Process | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client underneath, for what has no shortcut here."""
        if self._client is None:
            raise RuntimeError("the pipeline is not open; use it in a `with` block")
        return self._client

    @property
    def url(self) -> str:
        """Where the gateway listens; "" without one."""
        return next(iter(self.client.table.gateways), "")

    async def __aenter__(self) -> AsyncPipeline:
        run_name = self._name or None
        try:
            if self._path is not None:
                run_name = f"api-{os.getpid()}-{secrets.token_hex(2)}"
                await self._start(run_name)
            self._client = await Client.connect(RunDir.find(run_name))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        await self._stop()

    async def submit(
        self, task: str | None, prompt: Any = None, *, outputs: Collection[str] | None = None, timeout_s: float | None = 60.0, **params: Any
    ) -> Call:
        """Start a request and return its `Call`; see `generate` for the arguments."""
        task = task or self._only_task(prompt)
        inputs, more = _as_input(prompt)
        return await self.client.submit(task, {**more, **params}, inputs, outputs=outputs, timeout_s=timeout_s)

    async def generate(
        self, prompt: Any, *, task: str | None = None, outputs: Collection[str] | None = None, timeout_s: float | None = 60.0, **params: Any
    ) -> Result:
        """Run one request to its end.

        Args:
            prompt: text; or (samples, rate); or a list of messages {"role", "content"}; or chunks.
            task: what to do; by default what the pipeline does with such a prompt.
            outputs: modalities wanted, all by default.
            timeout_s: deadline; None for none.
            params: parameters of the task, see `streamrt.stage.Request`.

        Raises: BadRequest, Overloaded, StageFailed, Expired, Unavailable.
        """
        call = await self.submit(task, prompt, outputs=outputs, timeout_s=timeout_s, **params)
        try:
            return Result([chunk async for chunk in call], call.timings)
        finally:
            call.cancel()

    async def stream(
        self, prompt: Any, *, task: str | None = None, outputs: Collection[str] | None = None, timeout_s: float | None = 60.0, **params: Any
    ) -> AsyncIterator[Chunk]:
        """`generate`, chunk by chunk. Leaving the loop early cancels the request."""
        call = await self.submit(task, prompt, outputs=outputs, timeout_s=timeout_s, **params)
        try:
            async for chunk in call:
                yield chunk
        finally:
            call.cancel()

    def _only_task(self, prompt: Any) -> str:
        tasks = self.client.tasks()
        wanted = "transcribe" if isinstance(prompt, tuple) else "respond"
        if wanted in tasks:
            return wanted
        usable = [task for task in tasks if task != "listen"]
        if len(usable) == 1:
            return usable[0]
        raise BadRequest(f"task: got none, expected one of {', '.join(sorted(tasks))}", param="task")

    async def _start(self, run_name: str) -> None:
        command = [sys.executable, "-m", "streamrt", "up", str(self._path), "--name", run_name, "--ready-fd"]
        read_fd, write_fd = os.pipe()
        command += [str(write_fd), *(word for override in self._overrides for word in ("--set", override))]
        if not self._gateway:
            command.append("--no-gateway")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(write_fd,), stdin=subprocess.DEVNULL, env={**os.environ, "STREAMRT_OWNER": str(os.getpid())}
            )
        finally:
            os.close(write_fd)
        report = await asyncio.get_running_loop().run_in_executor(None, _read_all, read_fd)
        if report != "ready":
            raise Unavailable(report.strip() or "the pipeline ended before it was ready; see `streamrt logs`")

    async def _stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class Pipeline:
    """`AsyncPipeline` for plain Python: the same arguments and methods, blocking. Its event loop runs on a thread of its own."""

    def __init__(
        self, path: str | Path | None = None, *, name: str | None = None, overrides: Sequence[str] = (), gateway: bool = False
    ) -> None:
        self._inner = AsyncPipeline(path, name=name, overrides=overrides, gateway=gateway)
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is open
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def client(self) -> Client:
        return self._inner.client

    def __enter__(self) -> Pipeline:
        if self._loop is not None:
            raise RuntimeError("the pipeline is open already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="streamrt", daemon=True)
        self._thread.start()
        try:
            self._run(self._inner.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._run(self._inner.__aexit__(kind, error, trace))
        finally:
            self._end()

    def generate(
        self, prompt: Any, *, task: str | None = None, outputs: Collection[str] | None = None, timeout_s: float | None = 60.0, **params: Any
    ) -> Result:
        """See `AsyncPipeline.generate`."""
        return self._run(self._inner.generate(prompt, task=task, outputs=outputs, timeout_s=timeout_s, **params))

    def stream(
        self, prompt: Any, *, task: str | None = None, outputs: Collection[str] | None = None, timeout_s: float | None = 60.0, **params: Any
    ) -> Iterator[Chunk]:
        """See `AsyncPipeline.stream`."""
        # One chunk is taken at a time, so a slow reader holds the stages back and nothing piles up here.
        call: Call = self._run(self._inner.submit(task, prompt, outputs=outputs, timeout_s=timeout_s, **params))

        async def following() -> Chunk | None:
            return await anext(iterator, None)

        iterator = aiter(call)
        try:
            while (chunk := self._run(following())) is not None:
                yield chunk
        finally:
            if self._loop is not None:  # else the pipeline was closed first, and has cancelled it
                self._loop.call_soon_threadsafe(call.cancel)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the pipeline is not open; use it in a `with` block")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, too: nobody waits for it any more
            future.cancel()
            raise

    def _end(self) -> None:
        assert self._loop is not None and self._thread is not None
        self._run(self._loop.shutdown_asyncgens())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


def _as_input(prompt: Any) -> tuple[list[Chunk] | None, dict[str, Any]]:
    """A prompt as the chunks that are fed and the parameters that go beside them."""
    if prompt is None:
        return None, {}
    if isinstance(prompt, str):
        return [text_chunk(prompt)], {}
    if isinstance(prompt, tuple) and len(prompt) == 2:
        samples, rate = prompt
        step = int(rate)  # a second at a time
        return [audio_chunk(samples[i : i + step], rate) for i in range(0, len(samples), step)], {}
    if isinstance(prompt, list) and all(isinstance(item, Chunk) for item in prompt):
        return prompt, {}
    if isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt):
        last = next((str(m.get("content", "")) for m in reversed(prompt) if m.get("role") == "user"), "")
        return [text_chunk(last)], {"messages": prompt}
    raise BadRequest(f"prompt: got {type(prompt).__name__}, expected text, (samples, rate), messages or chunks", param="prompt")


def _read_all(fd: int) -> str:
    with os.fdopen(fd) as file:
        return file.read()
