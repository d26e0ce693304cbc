"""The autoregressive engine: many requests, one forward pass of one of them per step, in turn.

    text -> prompt tokens -> [cached beginning] -> prefill, some tokens a step -> one token a step -> text

Knows sequences and when each gets its turn. The model, prompts, sampling and text are told apart in `Runner`, `Prompter`,
`Row` and `Detokenizer`; threads and queues are the host's.

Rules
- A step is one forward pass of at most `prefill_tokens` tokens, so a cancel never waits longer than that.
- A sequence's cache holds its first `computed` tokens, always; the last sampled token is not computed yet.
- When a sequence ends in any way, what it computed is kept for the next turn of its conversation.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from typing import Any

import torch
from transformers.cache_utils import Cache

from stages.ar.cache import PrefixStore, begin_with, new_cache
from stages.ar.detokenizer import Detokenizer
from stages.ar.params import Generation, with_instructions
from stages.ar.prompt import Prompter
from stages.ar.sampler import Row, sample
from streamrt import BadRequest, Chunk, Output, Request, TooLong, text_chunk


class Runner:
    """A transformers causal LM as one function: tokens that follow what `cache` holds in, logits of the last one out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device = model.device
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.24
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def new_cache(self) -> Cache:
        return new_cache(self.model.config)

    def begin_with(self, stored: Cache, length: int) -> Cache:
        return begin_with(self.model.config, stored, length)

    def forward(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """(vocabulary,) logits; `cache` holds `tokens` too afterwards."""
        ids = torch.tensor([tokens], device=self.device)  # (1, tokens)
        logits = self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}, **self._only_last).logits
        return logits[0, -1]

    def end_tokens(self, tokenizer: Any) -> frozenset[int]:
        """Tokens after which the model has nothing more to say."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset({*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None})


class Sequence:
    """One request on its way."""

    def __init__(self, request_id: str, generation: Generation) -> None:
        self.request_id = request_id
        self.generation = generation
        self.fed: list[str] = []  # text of the one user message, when there are no `messages`
        self.fed_chars = 0
        self.is_paused = False
        # From here on: once its input is whole.
        self.tokens: list[int] = []  # of the prompt and the reply; empty while input is awaited
        self.prompt_tokens = 0
        self.dropped_messages = 0
        self.computed = 0
        self.cached = 0  # of these, not computed by this request
        self.cache: Cache | None = None
        self.row: Row
        self.detokenizer: Detokenizer

    @property
    def is_runnable(self) -> bool:
        return bool(self.tokens) and not self.is_paused

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


class CausalEngine:
    """Implements `streamrt.Engine`; `params` of `submit` is a `Generation`."""

    def __init__(
        self, runner: Runner, tokenizer: Any, *, max_context: int, prefill_tokens: int, prefix_bytes: int, instructions: str = ""
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.prompter = Prompter(tokenizer)
        self.prefixes = PrefixStore(prefix_bytes)
        self.max_context = max_context
        self.tokens_per_s = 0.0  # while decoding, of all requests together, smoothed
        self._instructions = instructions
        self._prefill_tokens = prefill_tokens
        self._ends = runner.end_tokens(tokenizer)
        self._sequences: dict[str, Sequence] = {}
        self._turns: deque[Sequence] = deque()  # each sequence once; the next to run is the first that can

    # -- commands

    def submit(self, request: Request, params: Generation) -> None:
        sequence = Sequence(request.id, params)
        if params.messages is not None:
            self._begin(sequence, params.messages)
        self._sequences[request.id] = sequence
        self._turns.append(sequence)

    def feed(self, request_id: str, chunk: Chunk) -> None:
        sequence = self._sequences[request_id]
        if sequence.generation.messages is None and chunk.modality == "text":
            sequence.fed_chars += len(chunk.text)
            if sequence.fed_chars > self.prompter.max_chars(self.max_context):
                raise TooLong(f"text: longer than {self.max_context} tokens can be")
            sequence.fed.append(chunk.text)

    def end(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.tokens:
            return
        text = "".join(sequence.fed)
        if not text.strip():
            raise BadRequest("text: there is none to respond to")
        self._begin(sequence, with_instructions([{"role": "user", "content": text}], self._instructions))

    def cancel(self, request_id: str) -> None:
        if request_id in self._sequences:
            self._retire(self._sequences[request_id])

    def pause(self, request_id: str) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].is_paused = True

    def resume(self, request_id: str) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].is_paused = False

    def close(self) -> None:
        self._sequences.clear()
        self._turns.clear()
        self.prefixes.clear()

    # -- work

    @property
    def running(self) -> int:
        return len(self._sequences)

    def has_work(self) -> bool:
        return any(sequence.is_runnable for sequence in self._turns)

    def step(self) -> list[Output]:
        """One forward pass of the next sequence in turn."""
        sequence = next(s for s in self._turns if s.is_runnable)
        self._turns.remove(sequence)
        self._turns.append(sequence)
        with torch.inference_mode():
            return self._advance(sequence)

    def _advance(self, sequence: Sequence) -> list[Output]:
        began = time.perf_counter()
        # 1. the beginning that is known already
        if sequence.cache is None:
            stored, sequence.cached = self.prefixes.longest(sequence.tokens)
            sequence.cache = self.runner.begin_with(stored, sequence.cached) if stored else self.runner.new_cache()
            sequence.computed = sequence.cached
        # 2. one pass
        tokens = sequence.tokens[sequence.computed : sequence.computed + self._prefill_tokens]
        cache, sequence.cache = sequence.cache, None  # nobody keeps a cache that a failed pass has left half written
        logits = self.runner.forward(tokens, cache)
        sequence.cache = cache
        sequence.computed += len(tokens)
        if sequence.computed < len(sequence.tokens):
            return []
        # 3. one token
        token = sample(logits.unsqueeze(0), [sequence.row])[0].token
        sequence.tokens.append(token)
        if len(tokens) == 1:
            self._measure(time.perf_counter() - began)
        return self._say(sequence, token)

    def _begin(self, sequence: Sequence, messages: list[dict[str, Any]]) -> None:
        """Its input is whole: make the prompt."""
        generation = sequence.generation
        room = self.max_context - min(generation.max_tokens, self.max_context // 4)  # some of the context is the reply's
        tokens, sequence.dropped_messages = self.prompter.build(
            messages, room, tools=generation.tools, may_truncate=generation.may_truncate
        )
        sequence.tokens, sequence.prompt_tokens = tokens, len(tokens)
        sequence.row = Row(generation.sampling, tokens)
        sequence.detokenizer = Detokenizer(self._decode, generation.stop)

    def _say(self, sequence: Sequence, token: int) -> list[Output]:
        reason, text = "", ""
        if token in self._ends:
            reason = "stop"
        else:
            text = sequence.detokenizer.push(token)
            if sequence.detokenizer.is_stopped:
                reason = "stop"
            elif sequence.completion_tokens >= sequence.generation.max_tokens or len(sequence.tokens) >= self.max_context:
                reason = "length"
        if reason:
            text += sequence.detokenizer.finish()
        outputs = [Output(sequence.request_id, text_chunk(text))] if text else []
        if reason:
            self._retire(sequence)
            outputs.append(Output(sequence.request_id, finished=True, meta=_final(sequence, reason)))
        return outputs

    def _retire(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._turns.remove(sequence)
        if sequence.cache is not None:
            self.prefixes.put(sequence.tokens[: sequence.computed], sequence.cache)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _measure(self, seconds: float) -> None:
        rate = 1 / max(seconds, 1e-9)
        self.tokens_per_s += 0.05 * (rate - self.tokens_per_s) if self.tokens_per_s else rate


def _final(sequence: Sequence, reason: str) -> dict[str, Any]:
    """The end's metadata: OpenAI's words for why it ended and what it cost."""
    usage = {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.completion_tokens,
        "cached_tokens": sequence.cached,
    }
    truncated = {"truncated_messages": sequence.dropped_messages} if sequence.dropped_messages else {}
    return {"finish_reason": reason, "usage": usage, **truncated}
