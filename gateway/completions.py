"""POST /v1/completions: prompts -> the text that follows them, through the `respond` task, one request a prompt.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from aiohttp import web

from gateway import models, schema, sse, streaming
from gateway.chat import text_params
from gateway.choices import Ending, Message, ends_choice, index_of, text_logprobs, usage_of
from gateway.limits import read_body
from gateway.schema import CompletionBody
from gateway.state import CLIENT, CONFIG
from streamrt import text_chunk
from streamrt.errors import BadRequest, TooLong

if TYPE_CHECKING:
    from streamrt import Chunk, Client


class Part(NamedTuple):
    """A chunk, and which prompt it answers."""

    prompt: int
    chunk: Chunk


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    client, config = request.app[CLIENT], request.app[CONFIG]
    # 1. What is wrong with it, before any stage hears of it.
    body = schema.decode(await read_body(request), CompletionBody)
    model = models.check_model(client, "respond", body.model)
    honoured = models.honoured(client, "respond")
    schema.refuse_unsupported(body, honoured)
    prompts = schema.prompts(body)
    if (size := sum(map(len, prompts))) > config.max_prompt_chars:
        raise TooLong(f"prompt: got {size} characters or tokens, expected at most {config.max_prompt_chars}", param="prompt")
    if "prompt" not in honoured and not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompt: got token ids, but this pipeline reads text", param="prompt")
    # 2. Ask, once a prompt, all at a time.
    params = params_of(body)
    parts = streaming.merged([_answer(client, n, prompt, params, config.request_timeout_s) for n, prompt in enumerate(prompts)])
    # 3. Answer.
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return await streaming.event_response(request, chunk_events(parts, head, len(prompts), body.n or 1, has_usage))
    answer = await completion(parts, head, len(prompts), body.n or 1)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def params_of(body: CompletionBody) -> dict[str, Any]:
    """The parameters of `respond` but for `prompt`. The `logprobs` here are how many likely tokens to tell."""
    told = {} if body.logprobs is None else {"logprobs": True, "top_logprobs": body.logprobs}
    echoed = {"echo": True} if body.echo else {}
    return {"max_tokens": 16, **{name: value for name, value in text_params(body).items() if value is not None}, **told, **echoed}


async def completion(parts: AsyncGenerator[Part, None], head: dict[str, Any], num_prompts: int, n: int) -> dict[str, Any]:
    """The whole answer: `n` choices a prompt, those of the first prompt first."""
    endings, messages = [Ending() for _ in range(num_prompts)], [[Message() for _ in range(n)] for _ in range(num_prompts)]
    async with aclosing(parts):
        async for prompt, chunk in parts:
            endings[prompt].note(chunk)
            if chunk.modality == "text":
                messages[prompt][index_of(chunk)].add(chunk)
    choices = [
        {
            "index": prompt * n + index,
            "text": message.text,
            "logprobs": text_logprobs(message.entries, 0)[0] if message.entries else None,
            "finish_reason": endings[prompt].finish_reason(index),
        }
        for prompt, of_prompt in enumerate(messages)
        for index, message in enumerate(of_prompt)
    ]
    return {**head, "choices": choices, "usage": usage_of(endings)}


async def chunk_events(
    parts: AsyncGenerator[Part, None], head: dict[str, Any], num_prompts: int, n: int, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as events, text as it comes, and [DONE]."""
    endings, offsets = [Ending() for _ in range(num_prompts)], [0] * (num_prompts * n)
    open_choices = set(range(num_prompts * n))

    def event(index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.data({**head, "choices": [choice], **({"usage": None} if has_usage else {})})

    async with aclosing(parts):
        async for prompt, chunk in parts:
            endings[prompt].note(chunk)
            index, entries = prompt * n + index_of(chunk), chunk.meta.get("logprobs")
            if chunk.modality == "text" and (chunk.text or entries):
                told = None
                if entries:
                    told, offsets[index] = text_logprobs(entries, offsets[index])
                yield event(index, chunk.text, told)
            ended = {index} if ends_choice(chunk) else set(range(prompt * n, prompt * n + n)) if chunk.is_last else set()
            for index in sorted(ended & open_choices):
                open_choices.discard(index)
                yield event(index, "", finish_reason=endings[prompt].finish_reason(index - prompt * n))
    if has_usage:
        yield sse.data({**head, "choices": [], "usage": usage_of(endings)})
    yield sse.DONE


async def _answer(client: Client, n: int, prompt: str | list[int], params: dict[str, Any], timeout_s: float) -> AsyncGenerator[Part, None]:
    fed = [text_chunk(prompt)] if isinstance(prompt, str) else []
    call = await client.submit("respond", {**params, "prompt": prompt}, fed, outputs={"text"}, timeout_s=timeout_s)
    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            yield Part(n, chunk)
