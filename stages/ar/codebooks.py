"""Frames of several codebooks: a small model that is run inside of each step of a large one.

    talker's hidden state + first code --> code predictor, one code after the other --> the frame
    the frame's embeddings + the next text embedding --> the talker's next input

Knows the modules of Qwen3-Omni's talker. Knows nothing of text or audio; a text embedding comes with `feed`, in its time.

Rules
- All jobs of a step are predicted together, with a cache of their own that lives for one frame.
- A job that has no text embedding for its next input waits for `feed` or `end`; after `end`, the last embedding is repeated for ever.
"""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch

from stages.ar.engine import Engine, Job, Next
from stages.ar.sampler import Row, Sampled, choose


class Frames:
    """One job's state: `Job.state` of those whose hook is a CodePredictor."""

    def __init__(self, sampler: Row) -> None:
        self.sampler = sampler  # of the codes after the first
        self.texts: deque[torch.Tensor] = deque()  # embeddings that have come and are not used yet
        self.filler: torch.Tensor | None = None  # after the last
        self.pending: torch.Tensor | None = None  # the frame that waits for a text embedding

    def next_text(self) -> torch.Tensor | None:
        return self.texts.popleft() if self.texts else self.filler


class CodePredictor:
    """A `Hook`: completes frames, and gives the next input. `Advance.made` is the frame, (codebooks,) int64."""

    def __init__(self, talker: Any) -> None:
        self._predictor = talker.code_predictor
        self._embed_first = talker.get_input_embeddings()
        self._embed_others = self._predictor.model.get_input_embeddings()
        names = inspect.signature(type(self._predictor.model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.24

    def after(self, jobs: list[Job], sampled: list[Sampled], hidden: torch.Tensor) -> list[Next]:
        going = [n for n, (job, choice) in enumerate(zip(jobs, sampled, strict=True)) if choice.token not in job.ends]
        nexts = [Next()] * len(jobs)
        if going:
            first = torch.tensor([sampled[n].token for n in going], device=hidden.device)
            frames, embeddings = self._complete(hidden[going], first, [jobs[n].state.sampler for n in going])
            for n, frame, embedding in zip(going, frames, embeddings, strict=True):
                nexts[n] = self._next(jobs[n].state, frame, embedding)
        return nexts

    def feed(self, engine: Engine, job: Job, text: torch.Tensor) -> None:
        """The next text embedding, (hidden,). Raises ValueError where it is none."""
        engine.check_embedding(text)
        state: Frames = job.state
        if state.pending is None:
            state.texts.append(text)
        else:
            pending, state.pending = state.pending, None
            engine.give(job, pending + text)

    def end(self, engine: Engine, job: Job, filler: torch.Tensor) -> None:
        """No more text: `filler`, (hidden,), stands for it from here on. Raises ValueError where it is no embedding."""
        engine.check_embedding(filler)
        job.state.filler = filler
        if job.state.pending is not None:
            self.feed(engine, job, filler)

    def _complete(self, hidden: torch.Tensor, first: torch.Tensor, samplers: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """(jobs, hidden), (jobs,) -> frames (jobs, codebooks), and the sum of each one's embeddings (jobs, hidden)."""
        from transformers import DynamicCache

        embedding = self._embed_first(first)
        inputs = torch.stack([hidden, embedding], 1)  # (jobs, 2, hidden)
        cache = DynamicCache(config=self._predictor.config)
        codes, total = [first], embedding
        for head, embed in zip(self._predictor.lm_head, self._embed_others, strict=True):
            out = self._predictor.model(inputs_embeds=inputs, use_cache=True, **{self._cache_name: cache}).last_hidden_state[:, -1]
            code = choose(head(out), samplers)
            codes.append(code)
            embedding = embed(code)
            inputs, total = embedding[:, None], total + embedding
        return torch.stack(codes, 1), total

    @staticmethod
    def _next(state: Frames, frame: torch.Tensor, embedding: torch.Tensor) -> Next:
        text = state.next_text()
        if text is None:
            state.pending = embedding
            return Next(made=frame, waits=True)
        return Next(embedding + text, made=frame)
