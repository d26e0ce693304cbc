"""Text in, text out, on the autoregressive engine: what `ar.causal_lm` hosts.

    conversation -> prompt tokens -> jobs, one for each choice -> tokens -> text

Knows requests, conversations and text. Knows nothing of scheduling, memory and tensors: `engine.py` steps, `Prompter` and `Detokenizer` translate.

Rules
- A request ends once, when all its choices have; its jobs go with it.
- The choices of a request share their prompt's blocks: those after the first wait for it to be computed.
- The chunks of a request say the text of its tokens in order; with `n` > 1 `meta["choice"]` says whose.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stages.ar.detokenizer import Detokenizer
from stages.ar.engine import Advance, Engine, Job
from stages.ar.params import Generation, Sampling, with_instructions
from stages.ar.prompt import Prompter
from stages.ar.sampler import Sampled
from streamrt import BadRequest, Chunk, Output, Request, TooLong, text_chunk


class Choice:
    """One of a request's replies on its way."""

    def __init__(self, index: int, job: Job, detokenizer: Detokenizer) -> None:
        self.index = index
        self.job = job
        self.detokenizer = detokenizer
        self.logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been said yet
        self.reason = ""  # why it ended

    @property
    def completion_tokens(self) -> int:
        return len(self.job.tokens) - self.job.prompt_length


class Reply:
    """One request."""

    def __init__(self, request_id: str, generation: Generation) -> None:
        self.request_id = request_id
        self.generation = generation
        self.fed: list[str] = []  # text of the one user message, when there are no `messages`
        self.fed_chars = 0
        self.is_paused = False
        self.dropped_messages = 0
        self.choices: list[Choice] = []  # once its input is whole


class TextEngine:
    """Implements `streamrt.Engine`; `params` of `submit` is a `Generation`."""

    def __init__(self, engine: Engine, tokenizer: Any, *, instructions: str = "") -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompter = Prompter(tokenizer)
        self.tokens_per_s = 0.0  # while decoding, of all requests together, smoothed
        self._instructions = instructions
        self._ends = engine.runner.end_tokens(tokenizer.eos_token_id)
        self._replies: dict[str, Reply] = {}
        self._choices: dict[Job, tuple[Reply, Choice]] = {}

    # -- commands

    def submit(self, request: Request, params: Generation) -> None:
        reply = self._replies[request.id] = Reply(request.id, params)
        if params.messages is not None:
            self._begin(reply, params.messages)

    def feed(self, request_id: str, chunk: Chunk) -> None:
        reply = self._replies[request_id]
        if reply.generation.messages is None and chunk.modality == "text":
            reply.fed_chars += len(chunk.text)
            if reply.fed_chars > self.prompter.max_chars(self.max_context):
                raise TooLong(f"text: longer than {self.max_context} tokens can be")
            reply.fed.append(chunk.text)

    def end(self, request_id: str) -> None:
        reply = self._replies.get(request_id)
        if reply is None or reply.choices:
            return
        text = "".join(reply.fed)
        if not text.strip():
            raise BadRequest("text: there is none to respond to")
        self._begin(reply, with_instructions([{"role": "user", "content": text}], self._instructions))

    def cancel(self, request_id: str) -> None:
        reply = self._replies.pop(request_id, None)
        for choice in reply.choices if reply is not None else ():
            self._retire(choice)

    def pause(self, request_id: str) -> None:
        self._pause(request_id, is_paused=True)

    def resume(self, request_id: str) -> None:
        self._pause(request_id, is_paused=False)

    def close(self) -> None:
        for request_id in list(self._replies):
            self.cancel(request_id)
        self.engine.pool.invalidate()

    # -- work

    @property
    def max_context(self) -> int:
        return self.engine.scheduler.max_context

    @property
    def running(self) -> int:
        """Requests."""
        return len(self._replies)

    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[Output]:
        began = time.perf_counter()
        advances = self.engine.step()
        if advances:
            self._measure(len(advances), time.perf_counter() - began)
        return [output for advance in advances for output in self._say(advance)]

    def _begin(self, reply: Reply, messages: list[dict[str, Any]]) -> None:
        """Its input is whole: make the prompt, and a job for each choice."""
        generation = reply.generation
        room = self.max_context - min(generation.max_tokens, self.max_context // 4)  # some of the context is the reply's
        tokens, reply.dropped_messages = self.prompter.build(messages, room, tools=generation.tools, may_truncate=generation.may_truncate)
        for index in range(generation.n):
            job = self.engine.job(
                tokens,
                _sampling(generation, index),
                grammar=generation.grammar,
                priority=generation.priority,
                leader=reply.choices[0].job if index else None,
                min_length=len(tokens) + generation.min_tokens,
                ends=tuple({*self._ends, *generation.stop_token_ids}),
            )
            self.engine.add(job)
            choice = Choice(index, job, Detokenizer(self._decode, generation.stop))
            reply.choices.append(choice)
            self._choices[job] = reply, choice
            self.engine.pause(job, is_paused=reply.is_paused)

    def _pause(self, request_id: str, *, is_paused: bool) -> None:
        reply = self._replies.get(request_id)
        if reply is not None:
            reply.is_paused = is_paused
            for choice in reply.choices:
                self.engine.pause(choice.job, is_paused=is_paused)

    def _say(self, advance: Advance) -> list[Output]:
        reply, choice = self._choices[advance.job]
        generation, token = reply.generation, advance.sampled.token
        # 1. what this token says, and whether it is the last
        text = ""
        if token in generation.stop_token_ids or token in self._ends and not generation.ignore_eos:
            choice.reason = "stop"
        else:
            text = choice.detokenizer.push(token)
            if generation.logprobs is not None:
                choice.logprobs.append(self._logprob(advance.sampled))
            if choice.detokenizer.is_stopped:
                choice.reason = "stop"
            elif choice.completion_tokens >= generation.max_tokens or len(choice.job.tokens) >= self.max_context:
                choice.reason = "length"
        if choice.reason:
            text += choice.detokenizer.finish()
            self._retire(choice)
        # 2. chunks: the text, and the end of a choice that is not the only one
        outputs = []
        meta: dict[str, Any] = {}
        if generation.n > 1:
            meta["choice"] = choice.index
            if choice.reason:
                meta["finish_reason"] = choice.reason
        if choice.logprobs and (text or choice.reason):
            meta["logprobs"], choice.logprobs = choice.logprobs, []
        if text or meta and (choice.reason or "logprobs" in meta):
            outputs.append(Output(reply.request_id, text_chunk(text, **meta)))
        # 3. the end
        if all(other.reason for other in reply.choices):
            del self._replies[reply.request_id]
            outputs.append(Output(reply.request_id, finished=True, meta=_final(reply)))
        return outputs

    def _logprob(self, sampled: Sampled) -> dict[str, Any]:
        """As OpenAI tells it."""
        top = [self._told(token, logprob) for token, logprob in sampled.top]
        return {**self._told(sampled.token, sampled.logprob), "top_logprobs": top}

    def _told(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _retire(self, choice: Choice) -> None:
        self._choices.pop(choice.job, None)
        self.engine.remove(choice.job)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _measure(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-9)
        self.tokens_per_s += 0.05 * (rate - self.tokens_per_s) if self.tokens_per_s else rate


def _final(reply: Reply) -> dict[str, Any]:
    """The end's metadata: OpenAI's words for why it ended and what it cost."""
    first = reply.choices[0]
    usage = {
        "prompt_tokens": first.job.prompt_length,
        "completion_tokens": sum(choice.completion_tokens for choice in reply.choices),
        "cached_tokens": first.job.cached,
    }
    truncated = {"truncated_messages": reply.dropped_messages} if reply.dropped_messages else {}
    return {"finish_reason": first.reason, "usage": usage, **truncated}


def _sampling(generation: Generation, index: int) -> Sampling:
    """That of one choice: each has a seed of its own."""
    sampling = generation.sampling
    if index == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)
