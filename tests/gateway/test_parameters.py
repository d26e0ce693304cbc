"""Every parameter that the official client can send: it reaches the language model, or the gateway serves it, or it is refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions

from gateway import chat, completions, schema
from stages.ar.params import HONOURED, Generation, Sampling, parse
from streamrt.errors import BadRequest

DOCS = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # of the client, about the call
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Case(NamedTuple):
    """A value that asks for something."""

    value: Any
    beside: dict[str, Any] = {}  # what it needs


# What changes what the language model is asked for, by a value that does.
BOTH: dict[str, Case] = {
    "frequency_penalty": Case(0.5),
    "logit_bias": Case({"7": 2}),
    "max_tokens": Case(9),
    "n": Case(2),
    "presence_penalty": Case(0.5),
    "seed": Case(3),
    "stop": Case(["end"]),
    "temperature": Case(0.7),
    "top_p": Case(0.5),
}
STAGE = {
    "chat": BOTH
    | {
        "logprobs": Case(True),
        "max_completion_tokens": Case(9),
        "messages": Case([{"role": "user", "content": "and now?"}]),
        "parallel_tool_calls": Case(False, {"tools": TOOLS, "tool_choice": "required"}),
        "response_format": Case({"type": "json_object"}),
        "tool_choice": Case("required", {"tools": TOOLS}),
        "tools": Case(TOOLS),
        "top_logprobs": Case(2, {"logprobs": True}),
    },
    "completions": BOTH | {"echo": Case(True), "logprobs": Case(2), "prompt": Case("and now?")},
}
# What the gateway does itself: whose answer, in which form.
GATEWAY = {
    "chat": {
        "audio": {"voice": "alloy", "format": "wav"},
        "modalities": ["text", "audio"],
        "model": "llm",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {"model": "llm", "stream": True, "stream_options": {"include_usage": True}},
}
REFUSED = {
    "chat": {
        "function_call": {"name": "look"},
        "functions": [{"name": "look"}],
        "moderation": {"model": "m"},
        "reasoning_effort": "high",
        "verbosity": "high",
        "web_search_options": {},
    },
    "completions": {"best_of": 2, "suffix": "the end"},
}
# What asks nothing of the answer: whose account it is, what is kept, how it may be made sooner.
INERT = {
    "chat": {
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {},
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "user": "u",
    },
    "completions": {"user": "u"},
}
ENDPOINTS: dict[str, Any] = {"chat": Chat.create, "completions": Completions.create}


def body_of(endpoint: str, **params: Any) -> Any:
    if endpoint == "chat":
        asked = {"messages": [{"role": "user", "content": "hi"}], **params}
        return schema.decode(msgspec.json.encode(asked), schema.ChatBody)
    return schema.decode(msgspec.json.encode({"prompt": "hi", **params}), schema.CompletionBody)


def asked(endpoint: str, **params: Any) -> Generation:
    """What the language model's stage makes of a body that the gateway lets pass."""
    body = body_of(endpoint, **params)
    schema.refuse_unsupported(body, HONOURED)
    if endpoint == "chat":
        given = chat.params_of(body, [{"role": m.role, "content": m.content} for m in body.messages], None)
    else:
        given = {**completions.params_of(body), "prompt": schema.prompts(body)[0]}
    return parse(given, Sampling(), 256, vocabulary=100)


def table(of: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(endpoint, name) for endpoint, names in of.items() for name in names]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_parameter_of_the_client_is_in_exactly_one_table(endpoint: str) -> None:
    told = [name for of in (STAGE, GATEWAY, REFUSED, INERT) for name in of[endpoint]]
    assert sorted(told) == sorted(set(inspect.signature(ENDPOINTS[endpoint]).parameters) - NOT_SENT)


@pytest.mark.parametrize(("endpoint", "name"), table(STAGE))
def test_it_reaches_the_language_model(endpoint: str, name: str) -> None:
    case = STAGE[endpoint][name]
    assert asked(endpoint, **{name: case.value}, **case.beside) != asked(endpoint, **case.beside)


@pytest.mark.parametrize(("endpoint", "name"), table(GATEWAY))
def test_it_is_the_gateways(endpoint: str, name: str) -> None:
    body = body_of(endpoint, **{name: GATEWAY[endpoint][name]})
    schema.refuse_unsupported(body)
    assert getattr(body, name) != getattr(body_of(endpoint), name)


@pytest.mark.parametrize(("endpoint", "name"), table(REFUSED))
def test_it_is_refused_by_name(endpoint: str, name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(endpoint, **{name: REFUSED[endpoint][name]})
    assert refused.value.param == name
    assert refused.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize(("endpoint", "name"), [(endpoint, name) for endpoint, name in table(STAGE) if name in schema.NEUTRAL])
def test_it_is_refused_by_name_where_no_stage_honours_it(endpoint: str, name: str) -> None:
    case = STAGE[endpoint][name]
    with pytest.raises(BadRequest, match=f"^{name}: "):
        schema.refuse_unsupported(body_of(endpoint, **{name: case.value}))


@pytest.mark.parametrize(("endpoint", "name"), table(INERT))
def test_it_is_said_to_change_nothing_and_changes_nothing(endpoint: str, name: str) -> None:
    assert asked(endpoint, **{name: INERT[endpoint][name]}) == asked(endpoint)
    row = next(line for line in DOCS.splitlines() if line.endswith("| Accepted; they change nothing. |"))
    assert f"`{name}`" in row
