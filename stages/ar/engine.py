"""The autoregressive engine: one step for all sequences.

    admit -> schedule -> one forward pass -> sample -> hooks -> what each sequence has now
             `---- begun before the pass before it is sampled, where the runner runs ahead

Knows tokens, embeddings and hidden states. Knows nothing of text or requests: `text_engine.py` and others put a meaning on sequences.

Rules
- A step is one forward pass of at most `max_tokens` tokens, so a cancel waits no longer than that.
- A job's tokens but the last are computed, or will be before it is sampled again; its sampler and its inputs survive preemption.
- An input is a token, or an embedding in its place. A hook may give the next one, or have the job wait until somebody gives it (`give`).
- A pass may be begun whose tokens only the device knows: of jobs that take the likeliest. A token that is not known yet stands as 0 at its job's
  end, never longer than until `step` returns. What a job does after its end is thrown away.
- Who owns a job decides when it ends (`remove`); then nothing of it is left but cached blocks. What a hook raises for a job ends that job alone
  (`Advance.error`), in the step in which it does.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from stages.ar.attention import Prefill
from stages.ar.blocks import BlockPool, Content, PrefixKeys
from stages.ar.params import Sampling
from stages.ar.runner import Batch, Result, Runner
from stages.ar.sampler import Grammar, Row, Sampled, sample
from stages.ar.scheduler import Scheduler, Sequence, Span
from streamrt import StageFailed, StreamrtError

log = logging.getLogger(__name__)


class Embeddings:
    """What a sequence has beside its tokens, by position: inputs, features. Kept to its end: what is preempted is computed again."""

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._rows = torch.empty(0, 0)

    def __len__(self) -> int:
        return len(self._positions)

    @torch.inference_mode()
    def put(self, position: int, rows: torch.Tensor) -> None:
        """(n, ...) at `position` and after, which come after all before; all of one shape but for n."""
        start, end = len(self._positions), len(self._positions) + len(rows)
        if self._positions and position <= self._positions[-1]:
            raise ValueError(f"position {position} comes after {self._positions[-1]}")
        if end > len(self._rows):
            grown = rows.new_empty(max(end, 2 * start), *rows.shape[1:])
            if start:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = rows
        self._positions.extend(range(position, position + len(rows)))

    def between(self, start: int, end: int) -> tuple[list[int], torch.Tensor]:
        """Positions from `start` up to `end` that have one, and their rows."""
        first, last = bisect_left(self._positions, start), bisect_left(self._positions, end)
        return self._positions[first:last], self._rows[first:last]


class Next(NamedTuple):
    """What a hook says of one job."""

    embedding: torch.Tensor | None = None  # (hidden,): the next input, instead of the sampled token
    made: Any = None  # for the job's owner, in `Advance.made`
    waits: bool = False  # the next input comes later, by `Engine.give`


class Hook(Protocol):
    """Work between two steps, for the jobs that share it, all at once: a nested loop of codebooks, the next embedding."""

    def after(self, jobs: list[Job], sampled: list[Sampled], hidden: torch.Tensor) -> list[Next]:
        """What comes after each of the jobs' new tokens.

        What it raises fails one job: with several it is called again, for each of them alone. So it raises before it has changed anything.
        On the compute thread, in inference mode.

        Args:
            jobs: at least one.
            sampled: their new tokens, which `Job.tokens` ends with.
            hidden: (jobs, hidden), of the rows that were sampled from, after the last norm.
        """
        ...


@dataclass(eq=False, kw_only=True)
class Job(Sequence):
    """A sequence with all that a model and a sampler have to know."""

    sampler: Row
    inputs: Embeddings = field(default_factory=Embeddings)
    deepstack: Embeddings = field(default_factory=Embeddings)
    positions: torch.Tensor | None = None  # (3, prompt) int64 for models with three-dimensional positions; None: 0, 1, 2 ...
    hook: Hook | None = None
    state: Any = None  # the hook's
    ends: Collection[int] = ()  # tokens that end it, for its owner and its hook
    is_paused: bool = False  # its reader is slow
    is_waiting: bool = False  # for an input
    is_over: bool = False
    prompt_length: int = 0
    shift: int = 0  # from a token's index to its position, after the prompt

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        if self.positions is not None:
            self.shift = int(self.positions.max()) + 1 - self.prompt_length


class Advance(NamedTuple):
    """A job has one token more."""

    job: Job
    sampled: Sampled
    made: Any = None
    error: StreamrtError | None = None  # its hook failed: the job is over


class _Pass(NamedTuple):
    """A forward pass that has been begun."""

    spans: list[Span[Job]]
    jobs: list[Job]  # that get a token by it, a row of `result` each
    ats: list[int]  # where in the job's tokens
    result: Result

    @property
    def is_known_to_device(self) -> bool:
        """Whether the likeliest tokens are the ones, and nobody asks for more."""
        return all(job.sampler.is_plain and job.sampler.logprobs is None and job.hook is None for job in self.jobs)


class Engine:
    """All jobs on one model. Called on one thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        blocks: int,
        block_size: int,
        max_tokens: int,
        max_sequences: int,
        max_context: int,
        max_waiting: int = 1024,
        caches: bool = True,
        revision: bytes = b"",
    ) -> None:
        """
        Args:
            runner: with no store yet.
            blocks: of memory; one of them is for what has no place.
            block_size: tokens of each.
            max_tokens: in one step, of all jobs together; at least `max_sequences`.
            max_sequences: jobs that run at a time.
            max_context: tokens of the longest job.
            max_waiting: jobs; more are refused.
            caches: prompts that begin alike are computed once.
            revision: what cached keys and values depend on beside tokens: the model's weights, its adapter.
        """
        runner.allocate(blocks, block_size)
        runner.check()
        runner.prepare(max_tokens=max_tokens, max_sequences=max_sequences, max_context=max_context)
        self.runner = runner
        self.pool = BlockPool(blocks, block_size, caches=caches)
        self.scheduler: Scheduler[Job] = Scheduler(
            self.pool, max_tokens=max_tokens, max_sequences=max_sequences, max_context=max_context, max_waiting=max_waiting
        )
        self.revision = revision
        self._embedding_shape = (runner.config.hidden_size,)
        self._features_shape = (runner.deepstack_layers, runner.config.hidden_size)
        self._begun: _Pass | None = None

    # -- jobs

    def job(
        self,
        tokens: Tokens[int],
        sampling: Sampling,
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        min_tokens: int = 0,
        ends: Collection[int] = (),
        suppressed: Collection[int] = (),
        embeddings: Tokens[tuple[int, torch.Tensor]] = (),
        deepstack: Tokens[tuple[int, torch.Tensor]] = (),
        contents: Tokens[Content] = (),
        **fields: Any,
    ) -> Job:
        """A job that `add` takes.

        Args:
            tokens: the prompt; any id where an embedding or a content stands.
            sampling: see `sampler.Row`, and so the next five.
            grammar: what may follow.
            logprobs: how many to tell.
            min_tokens: before one of `ends`.
            ends: end tokens.
            suppressed: never chosen.
            embeddings: (position, (n, hidden)) in order, instead of the tokens there. Without a content of the same span nothing from there on
                is found again.
            deepstack: (position, (n, layers, hidden)) in order: features that are added to these tokens' hidden states, behind each of the
                model's first layers. For `Runner.deepstack_layers` of them. Contents as with embeddings.
            contents: what the tokens of a span stand for; the digest is of all that is given for it.
            fields: the others of Job.
        Raises:
            ValueError: embeddings or features have another shape, or are not in order.
        """
        keys = PrefixKeys(self.revision, self.pool.block_size, contents)
        kept = []
        for name, given, shape in (("embeddings", embeddings, self._embedding_shape), ("deepstack", deepstack, self._features_shape)):
            kept.append(Embeddings())
            for position, rows in given:
                if rows.shape[1:] != shape:
                    raise ValueError(f"{name}: the shape {tuple(rows.shape)}, expected (n, {', '.join(map(str, shape))})")
                kept[-1].put(position, rows)
                if not any(c.start <= position and position + len(rows) <= c.end for c in contents):
                    keys.stop_at(position)
        sampler = Row(sampling, tokens, grammar=grammar, logprobs=logprobs, min_tokens=min_tokens, ends=ends, suppressed=suppressed)
        return Job(tokens=list(tokens), keys=keys, sampler=sampler, inputs=kept[0], deepstack=kept[1], ends=ends, **fields)

    def add(self, job: Job) -> None:
        """Raises TooLong, Overloaded; see Scheduler.add."""
        if not job.tokens:
            raise ValueError("a job needs a token to begin with")
        self.scheduler.add(job)

    def remove(self, job: Job) -> None:
        """End it. Of one that is gone: nothing."""
        job.is_over = True
        self.scheduler.remove(job)

    def pause(self, job: Job, *, is_paused: bool) -> None:
        job.is_paused = is_paused
        self.scheduler.hold(job, is_held=job.is_paused or job.is_waiting)

    def give(self, job: Job, embedding: torch.Tensor) -> None:
        """The input, (hidden,), that a job waits for. Raises ValueError where it is none."""
        self.check_embedding(embedding)
        self._put(job, embedding)
        job.is_waiting = False
        self.scheduler.hold(job, is_held=job.is_paused)

    def check_embedding(self, embedding: torch.Tensor) -> None:
        """Raise ValueError unless it is one: a wrong one would fail the pass of all."""
        if embedding.shape != self._embedding_shape:
            raise ValueError(f"an embedding has the shape {tuple(embedding.shape)}, expected {self._embedding_shape}")

    def rows(self, job: Job, layer: int, start: int, end: int) -> torch.Tensor:
        """(end - start, hidden): what layer `layer` was given for tokens that are computed, cached ones included. Of a job that runs."""
        at = torch.arange(start, end)
        return self.runner.store.read_rows(layer, self._slots(job, at))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._begun is not None and not all(job.is_over for job in self._begun.jobs)

    # -- a step

    @torch.inference_mode()
    def step(self) -> list[Advance]:
        """One forward pass; the jobs that have a token more."""
        now, self._begun = self._begun or self._begin(None), None
        if now is None:
            return []
        if self.runner.runs_ahead and now.is_known_to_device:
            self._begun = self._begin(now)
        return self._finish(now)

    def _begin(self, last: _Pass | None) -> _Pass | None:
        """Hand the next pass to the device. `last` has not been finished; its tokens are known to the device only."""
        pending: dict[Job, int] = {}
        if last is not None:
            pending = {job: n for n, job in enumerate(last.jobs) if not job.is_over}
            for job in pending:
                job.tokens.append(0)
        spans = self.scheduler.schedule()
        if not spans:
            return None
        result = self.runner.forward(self._batch(spans, pending))
        self.scheduler.advance(spans)
        jobs = [span.sequence for span in spans if span.sequence.missing == 0]
        return _Pass(spans, jobs, [len(job.tokens) for job in jobs], result)

    def _finish(self, now: _Pass) -> list[Advance]:
        """Its tokens."""
        self.scheduler.publish(now.spans)
        rows = [n for n, job in enumerate(now.jobs) if not job.is_over]
        if not rows:
            return []
        if now.is_known_to_device:
            tokens = now.result.likeliest()
            advances = [Advance(now.jobs[n], Sampled(tokens[n])) for n in rows]
            for n, advance in zip(rows, advances, strict=True):
                advance.job.tokens[now.ats[n] :] = [tokens[n]]
                advance.job.sampler.push(tokens[n])
            return advances
        jobs = now.jobs if len(rows) == len(now.jobs) else [now.jobs[n] for n in rows]
        logits, hidden = (x if jobs is now.jobs else x[rows] for x in (now.result.logits, now.result.hidden))
        sampled = sample(logits, [job.sampler for job in jobs])
        for job, choice in zip(jobs, sampled, strict=True):
            job.tokens.append(choice.token)
        advances = [Advance(job, choice) for job, choice in zip(jobs, sampled, strict=True)]
        groups: dict[Hook, list[int]] = {}
        for n, job in enumerate(jobs):
            if job.hook is not None:
                groups.setdefault(job.hook, []).append(n)
        for hook, group in groups.items():
            for n, advance in zip(group, self._hooked(hook, [advances[n] for n in group], hidden[group]), strict=True):
                advances[n] = advance
        return advances

    def _hooked(self, hook: Hook, advances: list[Advance], hidden: torch.Tensor) -> list[Advance]:
        """`advances` of the jobs that share `hook`, with what it says of them."""
        try:
            nexts = hook.after([advance.job for advance in advances], [advance.sampled for advance in advances], hidden)
            if len(nexts) != len(advances):
                raise ValueError(f"{len(nexts)} results for {len(advances)} jobs")
        except Exception as error:  # a hook is its jobs' own: what is wrong with one must not end the others
            if len(advances) > 1:
                return [one for n, advance in enumerate(advances) for one in self._hooked(hook, [advance], hidden[n : n + 1])]
            log.exception("engine.hook_failed")
            return [self._fail(advances[0], error)]
        return [self._follow(advance, following) for advance, following in zip(advances, nexts, strict=True)]

    def _follow(self, advance: Advance, following: Next) -> Advance:
        job = advance.job
        if following.embedding is not None:
            try:
                self.check_embedding(following.embedding)
            except ValueError as error:
                return self._fail(advance, error)
            self._put(job, following.embedding)
        if following.waits:
            job.is_waiting = True
            self.scheduler.hold(job, is_held=True)
        return advance._replace(made=following.made)

    def _fail(self, advance: Advance, error: Exception) -> Advance:
        """Its hook can not go on with it."""
        self.remove(advance.job)
        name = type(advance.job.hook).__name__
        return advance._replace(error=error if isinstance(error, StreamrtError) else StageFailed(f"{name} failed: {error!r}"))

    def _put(self, job: Job, embedding: torch.Tensor) -> None:
        position = len(job.tokens) - 1
        job.inputs.put(position, embedding[None])
        job.keys.stop_at(position)

    def _batch(self, spans: list[Span[Job]], pending: dict[Job, int]) -> Batch:
        size, tables = self.pool.block_size, self.scheduler.block_tables
        decodes = sum(span.end - span.start == 1 for span in spans)
        # 1. who decodes: all of them at once
        rows = np.array([span.sequence.row for span in spans[:decodes]], np.int64)
        at = np.array([span.start for span in spans[:decodes]], np.int64)
        tokens = [span.sequence.tokens[span.start] for span in spans[:decodes]]
        slots = [torch.from_numpy(tables[rows, at // size].astype(np.int64) * size + at % size)]
        block_tables = tables[rows, : int(at.max()) // size + 1] if decodes else tables[:0, :0]
        # 2. prompts
        prefills = []
        wanted = [n for n, span in enumerate(spans[:decodes]) if span.end == len(span.sequence.tokens)]
        for job, start, end in spans[decodes:]:
            begin = len(tokens)
            tokens += job.tokens[start:end]
            slots.append(self._slots(job, torch.arange(start, end)))
            blocks = torch.from_numpy(tables[job.row, : (end - 1) // size + 1].copy())
            prefills.append(Prefill(begin, len(tokens), end, blocks))
            if end == len(job.tokens):
                wanted.append(len(tokens) - 1)
        embedded, embeddings = self._rows_of(spans, [span.sequence.inputs for span in spans])
        deepstacked, deepstack = None, None
        if self.runner.deepstack_layers:
            deepstacked, deepstack = self._rows_of(spans, [span.sequence.deepstack for span in spans])
        return Batch(
            tokens=torch.tensor(tokens),
            positions=self._positions(spans, at, decodes),
            slots=torch.cat(slots) if prefills else slots[0],
            decodes=decodes,
            block_tables=torch.from_numpy(block_tables),
            context_lens=torch.from_numpy((at + 1).astype(np.int32)),
            prefills=tuple(prefills),
            wanted=torch.tensor(wanted, dtype=torch.int64),
            embedded=embedded,
            embeddings=embeddings,
            deepstacked=deepstacked,
            deepstack=deepstack,
            following=torch.tensor([pending.get(span.sequence, -1) for span in spans[:decodes]]) if pending and decodes else None,
        )

    def _slots(self, job: Job, at: torch.Tensor) -> torch.Tensor:
        size = self.pool.block_size
        blocks = torch.from_numpy(self.scheduler.block_tables[job.row]).long()
        return blocks[at // size] * size + at % size

    def _positions(self, spans: list[Span[Job]], at: np.ndarray, decodes: int) -> torch.Tensor:
        dims = self.runner.position_dims
        if dims == 1:
            parts = [torch.from_numpy(at), *(torch.arange(start, end) for _, start, end in spans[decodes:])]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        pieces = []
        for job, start, end in spans:
            known = max(start, min(end, job.prompt_length)) if job.positions is not None else start
            if known > start and job.positions is not None:
                pieces.append(job.positions[:, start:known])
            if end > known:
                pieces.append((torch.arange(known, end) + job.shift).expand(dims, -1))
        return torch.cat(pieces, 1)

    @staticmethod
    def _rows_of(spans: list[Span[Job]], kept: list[Embeddings]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tokens of the batch that have something in `kept`, one of each span, and what."""
        rows: list[int] = []
        pieces = []
        begin = 0
        for (_, start, end), one in zip(spans, kept, strict=True):
            if len(one):
                positions, found = one.between(start, end)
                if positions:
                    rows += [begin + position - start for position in positions]
                    pieces.append(found)
            begin += end - start
        return (torch.tensor(rows), torch.cat(pieces)) if pieces else (None, None)
