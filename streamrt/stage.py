"""The contract that a stage's author fills in.

    class Upper(Stage):
        takes = {"text"}
        gives = {"out": "text"}

        async def process(self, request, chunks):
            async for chunk in chunks:
                yield text_chunk(chunk.text.upper())

Knows requests and chunks. Knows nothing of processes, queues or sockets: `actor.py` feeds it.

Rules
- The module that defines a stage imports without its heavy libraries; `load` imports them.
- `load` runs once, on the compute thread, before the replica is ready; it may block and may raise (`ConfigError` for what the user can mend).
- An `async def process` must not block: heavy work goes through `await self.compute(fn, *args)`, which runs on the one compute
  thread. A plain generator `def process(self, request, chunks)` runs wholly off the loop and reads `chunks` as an iterator.
- Cancel: an async `process` gets `asyncio.CancelledError` at its next await, a plain one `GeneratorExit` at its next yield or
  `Cancelled` from `chunks`; `finally` blocks run. Nothing that it yields after that is sent.
- Whatever `process` raises fails that request alone.
- The stream's end is said by the actor when `process` returns; a stage does not send final chunks itself.
- Ranks: with `tp = N` a stage that `supports_tp` runs in N processes. All of them `load`, and find each other by what they put into
  `context.rendezvous`. Rank 0 serves as always, and its `close` ends the others; those do `follow`, and hold nothing that must be closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from transport.chunk import Chunk

T = TypeVar("T")

TASKS = ("respond", "speak", "transcribe", "listen", "image", "video", "audio", "duplex")


class Message(msgspec.Struct):
    """One message of a conversation (OpenAI roles). `content` is text; media parts reference chunks on the entry edge by `media` id."""

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: list[dict[str, Any]] = []


class Request(msgspec.Struct):
    """One ask, as a stage sees it. Identity never changes across stages.

    `params` of the tasks (all optional unless said):
      respond     messages: list[{role, content, ...}], max_tokens: int, temperature: float, top_p: float, seed: int,
                  stop: list[str], tools: list, voice: str, speed: float, modalities: list[str]
                  (without `messages` the text chunks on the entry edge are the one user message)
                  A stage may honour more by OpenAI's names (n, logprobs, response_format ..., see stages/ar/params.py);
                  the gateway passes on those that `describe()["parameters"]` lists and refuses the others.
      speak       voice: str, speed: float, language: str            text arrives as text chunks
      transcribe  language: str, prompt: str, temperature: float, timestamps: bool     audio arrives as audio chunks
      listen      threshold: float, prefix_padding_ms: int, silence_duration_ms: int    audio and event chunks arrive
      image, video, audio     see `stages/diffusion/params.py`: prompt, size, num_inference_steps, guidance_scale, seed, n ...
    """

    id: str
    task: str
    params: dict[str, Any] = {}
    epoch: int = 0
    deadline_ns: int | None = None  # CLOCK_MONOTONIC of this process; None = no deadline

    def param(self, name: str, default: T) -> T:
        """`params[name]`, or `default` when it is absent or None."""
        value = self.params.get(name)
        return default if value is None else value


class Context:
    """What a stage may ask of its process."""

    def __init__(
        self,
        *,
        stage: str,
        replica: int = 0,
        rank: int = 0,
        ranks: int = 1,
        rendezvous: Path | None = None,
        threads: int = 1,
        device: str = "cpu",
        resolve: Callable[[str], Any] | None = None,
        progress: Callable[[str], None] | None = None,
        compute: Executor | None = None,
        broken: Callable[[str], None] | None = None,
    ) -> None:
        self.stage = stage
        self.replica = replica
        self.rank = rank
        self.ranks = ranks  # processes of this replica; 1 unless [deploy] has tp
        self.rendezvous = rendezvous  # a folder that these ranks alone share, made anew at each start; None with one rank
        self.threads = threads  # intra-op threads that this process may use
        self.device = device
        self._resolve = resolve
        self._progress = progress
        self._broken = broken
        self.compute_pool = compute

    def model_path(self, source: str) -> Any:
        """The local path of a model source (`weights:name`, local path, hub id in the cache). Raises MissingWeights; never downloads."""
        if self._resolve is None:
            raise RuntimeError("this context resolves no model sources")
        return self._resolve(source)

    def broken(self, reason: str) -> None:
        """Say that this replica will never work again (its engine or device is lost), so that it is restarted. Callable from any thread."""
        if self._broken is not None:
            self._broken(reason)

    def progress(self, text: str) -> None:
        """Say what loading is doing; shown by `streamrt up`. Callable from any thread."""
        if self._progress is not None:
            self._progress(text)


class NoArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[stage.args]` of a stage that takes none."""


class Stage:
    """One step of a pipeline. Created by its actor, once per replica; `process` runs once per request, many at a time."""

    takes: ClassVar[set[str]] = set()  # modalities of the input chunks; empty = any
    gives: ClassVar[Mapping[str, str]] = {}  # output port -> modality; the first is the default port
    device_ports: ClassVar[frozenset[str]] = frozenset()  # output ports whose tensors stay in device memory: for stages on that GPU alone
    tasks: ClassVar[tuple[str, ...]] = ()  # tasks that enter here
    Args: ClassVar[type[msgspec.Struct]] = NoArgs  # what [stage.args] may hold; strict
    load_s: ClassVar[float] = 1.0  # about how long `load` takes on one core; what takes longest is started first
    max_requests: ClassVar[int] = 4  # default of [deploy.<stage>] max_requests
    supports_tp: ClassVar[bool] = False  # [deploy.<stage>] tp may be more than 1
    models: ClassVar[tuple[str, ...]] = ()  # names of Args fields that hold a model source: fetched by `streamrt fetch`

    def __init__(self, args: Any, context: Context) -> None:
        self.args = args
        self.context = context

    @classmethod
    def configured(cls, args: Any) -> type[Stage]:
        """The class that these arguments ask for: this one, or a subclass that declares other ports and tasks."""
        return cls

    @classmethod
    def remarks(cls, args: Any, model: Path | None) -> list[str]:
        """What `streamrt check` should say of these arguments and the model they name (None: it is not here). No heavy imports."""
        return []

    @classmethod
    def recognize(cls, folder: Path) -> tuple[dict[str, Any], list[str]]:
        """For `streamrt up FOLDER`: the `[stage.args]` that serve the checkpoint in `folder`, and lines that say what it is. No heavy imports.

        Raises ConfigError for a checkpoint that this stage can not serve.
        """
        raise NotImplementedError

    def load(self) -> None:
        """Import, read weights, warm up. Blocking; on the compute thread."""

    def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        """Chunks in, chunks out; see the rules above."""
        raise NotImplementedError

    def follow(self) -> None:
        """On each rank but the first, after `load`, in place of `process`: take part in what rank 0 does, until its `close`.
        Blocking; on the compute thread. Whatever it raises ends the whole replica, as the death of any rank does."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back. Called once, after the last request; not on the ranks that follow."""

    def state(self) -> dict[str, Any]:
        """Small facts for the heartbeat (`ps`, /ready, the page)."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Facts that clients may ask for, fixed after `load`: {"model": str, "voices": [str], "sample_rate_hz": int,
        "parameters": [str] ...}."""
        return {}

    async def compute(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn(*args)` on the compute thread. Cancelled: the caller stops waiting; a call that already runs finishes unseen."""
        return await asyncio.get_running_loop().run_in_executor(self.context.compute_pool, fn, *args)
