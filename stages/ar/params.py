"""What a `respond` request may ask of a language model, checked.

Knows names, types and ranges. Knows nothing of torch, so it runs on the loop.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from streamrt import BadRequest

Temperature = Annotated[float, Meta(ge=0, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]

# Parameters of the OpenAI API that this engine does not have, and the value that asks for nothing.
REFUSED: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


class Generation(msgspec.Struct, frozen=True):
    """One request, checked."""

    messages: list[dict[str, Any]] | None  # None: the text that is fed is the one user message
    tools: list[dict[str, Any]] | None
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    may_truncate: bool  # drop the oldest turns when the conversation is too long
    n: int = 1  # replies
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # how many of the likeliest tokens are told with each; None: not even its own
    grammar: Any = None
    ignore_eos: bool = False
    priority: int = 0  # lower runs sooner


class _Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: list[dict[str, Any]] = []


class _Params(msgspec.Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)] | None = None
    truncation: Annotated[str, Meta(pattern="^(auto|disabled)$")] | None = None


def parse(params: dict[str, Any], defaults: Sampling, max_tokens: int, instructions: str = "") -> Generation:
    """A request's `params`; `max_tokens` is the default and the cap, `instructions` the system message when there is none.

    Raises:
        BadRequest: a wrong type or range, or a parameter that this engine does not have.
    """
    for name, neutral in REFUSED.items():
        if params.get(name) not in (None, neutral):
            raise BadRequest(f"{name}: this model's stage does not support it", param=name)
    try:
        asked = msgspec.convert(params, _Params)
    except msgspec.ValidationError as error:
        # "Expected `float` <= 2.0 - at `$.temperature`"
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise BadRequest(f"{name or 'params'}: {what[0].lower()}{what[1:]}", param=name) from None
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    messages = None if asked.messages is None else with_instructions([_plain(m) for m in asked.messages], instructions)
    given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(asked, name)) is not None}
    return Generation(
        messages=messages,
        tools=asked.tools or None,
        sampling=msgspec.structs.replace(defaults, **given),
        max_tokens=min(asked.max_tokens or max_tokens, max_tokens),
        stop=tuple(text for text in stop if text),
        may_truncate=asked.truncation != "disabled",
    )


def with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """`messages`, with `instructions` as the system message when they have none."""
    if not instructions or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": instructions}, *messages]


def _plain(message: _Message) -> dict[str, Any]:
    content = message.content or ""
    if not isinstance(content, str):
        for part in content:
            if part.type not in ("text", "input_text", "output_text"):
                raise BadRequest(f"messages: this model reads text only, got a part of type {part.type}", param="messages")
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "tool_calls"):
        if value := getattr(message, name):
            plain[name] = value
    return plain
