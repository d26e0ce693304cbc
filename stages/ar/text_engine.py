"""Text in, text out, on the autoregressive engine: what `ar.causal_lm` hosts.

    conversation -> prompt tokens -> jobs, one for each choice -> tokens -> text -> text and calls

Knows requests, conversations and text. Knows nothing of scheduling, memory and tensors: `engine.py` steps, `Prompter`, `Detokenizer` and
`ToolCallParser` translate.

Rules
- A request ends once, when all its choices have; its jobs go with it.
- The choices of a request share their prompt's blocks: those after the first wait for it to be computed.
- The chunks of a request say the text of its tokens in order; with `n` > 1 `meta["choice"]` says whose.
"""

from __future__ import annotations

import time
from typing import Any

from stages.ar.detokenizer import Detokenizer
from stages.ar.engine import Advance, Engine, Job
from stages.ar.logprobs import TokenTexts
from stages.ar.params import Generation, with_instructions
from stages.ar.prompt import Prompter
from stages.ar.sampler import Sampled
from stages.ar.structured import Grammars
from stages.ar.tool_calls import Piece, ToolCallParser, piece_chunk
from streamrt import BadRequest, Chunk, Output, Request, StageFailed, TooLong


class Choice:
    """One of a request's replies on its way."""

    def __init__(self, index: int, job: Job, detokenizer: Detokenizer, calls: ToolCallParser | None, echo: str = "") -> None:
        self.index = index
        self.job = job
        self.detokenizer = detokenizer
        self.calls = calls  # None: its text is text
        self.echo = echo  # what it says before its first token; "" once that is said
        self.untold: list[Sampled] = []  # tokens whose log probabilities are asked for and have not been told
        self.reason = ""  # why it ended

    @property
    def completion_tokens(self) -> int:
        return len(self.job.tokens) - self.job.prompt_length

    def read(self, token: int) -> list[Piece]:
        """What is sure with one token more."""
        text = self.detokenizer.push(token)
        return self._pieces(text)

    def finish(self) -> list[Piece]:
        """What is left when no token follows."""
        pieces = self._pieces(self.detokenizer.finish())
        if self.calls is not None:
            pieces += self.calls.finish()
            if self.reason == "stop" and self.calls.num_calls:
                self.reason = "tool_calls"
        return pieces

    def _pieces(self, text: str) -> list[Piece]:
        if self.calls is not None:
            return self.calls.push(text)
        return [text] if text else []


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
        self.vocabulary: int = engine.runner.config.vocab_size
        self.tokenizer = tokenizer
        self.prompter = Prompter(tokenizer)
        self._texts = TokenTexts(tokenizer)
        self.tokens_per_s = 0.0  # while decoding, of all requests together, smoothed
        self._instructions = instructions
        self._ends = engine.runner.end_tokens(tokenizer.eos_token_id)
        self.grammars = Grammars(tokenizer, self.vocabulary, self._ends)
        self._replies: dict[str, Reply] = {}
        self._choices: dict[Job, tuple[Reply, Choice]] = {}

    # -- commands

    def submit(self, request: Request, params: Generation) -> None:
        reply = self._replies[request.id] = Reply(request.id, params)
        if params.messages is not None or params.prompt is not None:
            self._begin(reply, params.messages)

    def feed(self, request_id: str, chunk: Chunk) -> None:
        reply = self._replies[request_id]
        if not reply.choices and chunk.modality == "text":
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

    def _begin(self, reply: Reply, messages: list[dict[str, Any]] | None) -> None:
        """Its input is whole: make the prompt, and a job for each choice."""
        generation = reply.generation
        room = self.max_context - min(generation.max_tokens, self.max_context // 4)  # some of the context is the reply's
        if messages is None:
            assert generation.prompt is not None
            tokens = self.prompter.plain(generation.prompt, room)
        else:
            tokens, reply.dropped_messages = self.prompter.build(
                messages, room, tools=generation.tools, may_truncate=generation.may_truncate
            )
        for index in range(generation.n):
            job = self.engine.job(
                tokens,
                generation.sampling_of(index),
                grammar=self.grammars.start(generation.grammar) if generation.grammar is not None else None,
                logprobs=generation.logprobs,
                min_tokens=generation.min_tokens,
                ends={*self._ends, *generation.stop_token_ids},
                priority=generation.priority,
                leader=reply.choices[0].job if index else None,
            )
            self.engine.add(job)
            calls = ToolCallParser() if generation.has_tool_calls else None
            choice = Choice(index, job, Detokenizer(self._decode, generation.stop), calls, self._echo(generation))
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
        if advance.job not in self._choices:  # another choice of its request has failed in this step
            return []
        reply, choice = self._choices[advance.job]
        generation, token = reply.generation, advance.sampled.token
        error: Exception | None = advance.error
        if error is None and (why := advance.job.sampler.error):
            error = StageFailed(f"the reply's grammar takes too much work: {why}")
        if error is not None:
            self.cancel(reply.request_id)
            return [Output(reply.request_id, error=error)]
        # 1. what this token says, and whether it is the last
        pieces: list[Piece] = []
        if token in generation.stop_token_ids or token in self._ends and not generation.ignore_eos:
            choice.reason = "stop"
        else:
            pieces = choice.read(token)
            if generation.logprobs is not None:
                choice.untold.append(advance.sampled)
            if choice.detokenizer.is_stopped:
                choice.reason = "stop"
            elif choice.completion_tokens >= generation.max_tokens or len(choice.job.tokens) >= self.max_context:
                choice.reason = "length"
        if choice.reason:
            pieces += choice.finish()
            self._retire(choice)
        if choice.echo:
            pieces.insert(0, choice.echo)
            choice.echo = ""
        # 2. chunks; log probabilities go with the first text that is said after their tokens
        is_one_of_many = generation.n > 1
        if choice.reason and not pieces and (choice.untold or is_one_of_many):
            pieces = [""]
        chunks = [piece_chunk(piece, **({"choice": choice.index} if is_one_of_many else {})) for piece in pieces]
        if choice.reason and is_one_of_many:
            chunks[-1].meta["finish_reason"] = choice.reason
        if choice.untold and chunks:
            chunks[0].meta["logprobs"], choice.untold = self._texts.entries(choice.untold), []
        outputs = [Output(reply.request_id, chunk) for chunk in chunks]
        # 3. the end
        if all(other.reason for other in reply.choices):
            del self._replies[reply.request_id]
            outputs.append(Output(reply.request_id, finished=True, meta=_final(reply)))
        return outputs

    def _retire(self, choice: Choice) -> None:
        self._choices.pop(choice.job, None)
        self.engine.remove(choice.job)

    def _echo(self, generation: Generation) -> str:
        """The prompt as text, where it is to be said; of token ids, with the special ones."""
        prompt = generation.prompt if generation.echo else None
        if isinstance(prompt, tuple):
            return str(self.tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False))
        return prompt or ""

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
