"""What a `respond` request may ask of a language model, checked.

Knows names, types and ranges, and what each asks of the engine. Knows nothing of torch or of grammar compilers, so it runs on the loop.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stages.ar.structured import ANY_OBJECT, Grammar, answer_grammar
from streamrt import BadRequest

Temperature = Annotated[float, Meta(ge=0, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20

# Parameters of the OpenAI API that this engine does not have, and the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prediction": (),
}

# What the gateway may pass on, because the engine honours it; see `Stage.describe`.
HONOURED = (
    "prompt", "echo", "n", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "logit_bias", "response_format",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos",
    "priority", "regex", "grammar",
)  # fmt: skip


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # of tokens of the prompt and the reply; 1 = none
    presence_penalty: float = 0.0  # of tokens that the reply has
    frequency_penalty: float = 0.0  # the same, for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    seed: int | None = None


class Generation(msgspec.Struct, frozen=True):
    """One request, checked."""

    messages: list[dict[str, Any]] | None  # None, and no `prompt`: the text that is fed is the one user message
    tools: list[dict[str, Any]] | None  # for the chat template; None: the model knows of none
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    may_truncate: bool  # drop the oldest turns when the conversation is too long
    prompt: str | tuple[int, ...] | None = None  # goes to the model as it is, in place of `messages`
    echo: bool = False  # say the prompt before the reply
    n: int = 1  # independent replies to the one prompt
    min_tokens: int = 0  # no end before so many
    stop_token_ids: tuple[int, ...] = ()  # end the reply like the model's own end tokens, and are not said
    ignore_eos: bool = False  # the model's own end tokens do not end the reply
    logprobs: int | None = None  # how many of the likeliest tokens to tell beside each token; None: tell nothing
    grammar: Grammar | None = None  # what the reply must be
    priority: int = 0  # lower runs sooner

    @property
    def has_tool_calls(self) -> bool:
        """Whether calls are to be read out of the reply."""
        return self.tools is not None

    def sampling_of(self, choice: int) -> Sampling:
        """How choice number `choice` of `n` is made: a seed gives each its own."""
        seed = self.sampling.seed
        return self.sampling if seed is None or not choice else msgspec.structs.replace(self.sampling, seed=seed + choice)


class _Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str = ""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: list[_ToolCall] = []


class _Function(msgspec.Struct, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    """`tool_choice` that names one."""

    function: _NamedFunction
    type: Literal["function"] = "function"


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _Params(msgspec.Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)] | None = None
    prompt: str | Annotated[list[TokenId], Meta(min_length=1)] | None = None
    echo: bool | None = None
    tools: Annotated[list[_Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str | int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stop: str | Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    truncation: Literal["auto", "disabled"] | None = None


def parse(
    params: dict[str, Any], defaults: Sampling, max_tokens: int, instructions: str = "", *, vocabulary: int | None = None
) -> Generation:
    """A request's `params`.

    Args:
        params: by the names of the OpenAI API and of `HONOURED`; what other stages of the pipeline read may be among them.
        defaults: for what the request leaves out.
        max_tokens: the default and the cap.
        instructions: the system message when there is none.
        vocabulary: how many token ids the model has, where that is known; ids beyond are refused.

    Raises:
        BadRequest: a wrong type or range, or a parameter that this engine does not have.
    """
    for name, neutral in REFUSED.items():
        if (value := params.get(name)) is not None and value not in neutral:
            raise BadRequest(f"{name}: this model's stage does not support it", param=name)
    asked = _convert(params)
    if asked.messages is not None and asked.prompt is not None:
        raise BadRequest("prompt: got messages, too; expected one of them", param="prompt")
    if asked.echo and asked.prompt is None:
        raise BadRequest("echo: got true, but there is no prompt", param="echo")
    if asked.echo and asked.logprobs:  # which would have to tell of the prompt's tokens, too
        raise BadRequest("echo: got true together with logprobs, which are told of the reply's tokens only", param="echo")
    bias = _logit_bias(asked.logit_bias or {})
    ids = {"logit_bias": [token for token, _ in bias], "stop_token_ids": asked.stop_token_ids or []}
    if isinstance(asked.prompt, list):
        ids["prompt"] = asked.prompt
    _check_ids(ids, vocabulary)
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    messages = None if asked.messages is None else with_instructions([_plain(m) for m in asked.messages], instructions)
    given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(asked, name)) is not None}
    wanted = min(asked.max_completion_tokens or asked.max_tokens or max_tokens, max_tokens)
    grammar = _grammar(asked)
    if grammar is not None and asked.ignore_eos:
        raise BadRequest("ignore_eos: got true, but what has a format has an end", param="ignore_eos")
    return Generation(
        messages=messages,
        prompt=tuple(asked.prompt) if isinstance(asked.prompt, list) else asked.prompt,
        tools=[msgspec.to_builtins(tool) for tool in asked.tools] if asked.tools and asked.tool_choice != "none" else None,
        sampling=msgspec.structs.replace(defaults, **given | {"logit_bias": bias}),
        max_tokens=wanted,
        min_tokens=min(asked.min_tokens or 0, wanted),
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        may_truncate=asked.truncation != "disabled",
        echo=bool(asked.echo),
        n=asked.n or 1,
        logprobs=_logprobs(asked),
        grammar=grammar,
        priority=asked.priority or 0,
    )


def with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """`messages`, with `instructions` as the system message when they have none."""
    if not instructions or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": instructions}, *messages]


def _convert(params: dict[str, Any]) -> _Params:
    try:
        return msgspec.convert(params, _Params)
    except msgspec.ValidationError as error:
        # "Expected `float` <= 2.0 - at `$.temperature`", "Object missing required field `name` - at `$.tools[0].function`"
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise BadRequest(f"{name or 'params'}: {what[0].lower()}{what[1:]}", param=name) from None


def _logit_bias(bias: dict[str | int, float]) -> tuple[tuple[int, float], ...]:
    """JSON has text keys only: "50256" is a token id."""
    try:
        return tuple((int(token), value) for token, value in bias.items())
    except ValueError as error:
        raise BadRequest(f"logit_bias: expected token ids as keys ({error})", param="logit_bias") from None


def _check_ids(ids: dict[str, list[int]], vocabulary: int | None) -> None:
    for name, tokens in ids.items():
        beyond = next((token for token in tokens if token < 0 or vocabulary is not None and token >= vocabulary), None)
        if beyond is not None:
            raise BadRequest(f"{name}: got token id {beyond}, expected 0 to {(vocabulary or 0) - 1}", param=name)


def _logprobs(asked: _Params) -> int | None:
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs: needs logprobs true", param="top_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def _grammar(asked: _Params) -> Grammar | None:
    """What the reply must be: at most one format for text, and calls beside it or in its place."""
    # 1. text
    formats: dict[str, Grammar] = {}
    if asked.response_format is not None and asked.response_format.type != "text":
        formats["response_format"] = Grammar("json", _schema(asked.response_format), "response_format")
    if asked.regex is not None:
        formats["regex"] = Grammar("regex", asked.regex, "regex")
    if asked.grammar is not None:
        formats["grammar"] = Grammar("lark", asked.grammar, "grammar")
    if len(formats) > 1:
        raise BadRequest(f"{list(formats)[1]}: got {' and '.join(formats)}, expected one of them", param=list(formats)[1])
    text = next(iter(formats.values()), None)
    # 2. calls
    choice = asked.tool_choice
    if choice in (None, "none", "auto") and (not asked.tools or choice == "none" or text is None):
        return text
    tools = [tool.function for tool in asked.tools or ()]
    if isinstance(choice, _NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    if not tools:
        wanted = f'"{choice.function.name}"' if isinstance(choice, _NamedTool) else choice
        raise BadRequest(f"tool_choice: got {wanted}, which is not among tools", param="tool_choice")
    if text is not None and text.kind != "json":
        raise BadRequest(f"tools: can not be used together with {next(iter(formats))}", param="tools")
    many = asked.parallel_tool_calls is not False and not isinstance(choice, _NamedTool)
    schemas = {tool.name: _json(tool.parameters or ANY_OBJECT) for tool in tools}
    return answer_grammar(schemas, many=many, or_json=text.text if text is not None and choice in (None, "auto") else None)


def _schema(asked: _ResponseFormat) -> str:
    if asked.type == "json_object":
        return _json(ANY_OBJECT)
    if asked.json_schema is None:
        raise BadRequest("response_format.json_schema: missing", param="response_format.json_schema")
    return _json(asked.json_schema.schema)


def _json(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()


def _plain(message: _Message) -> dict[str, Any]:
    """As chat templates want it: text for content, and the arguments of calls as objects."""
    content = message.content or ""
    if not isinstance(content, str):
        for part in content:
            if part.type not in ("text", "input_text", "output_text"):
                raise BadRequest(f"messages: this model reads text only, got a part of type {part.type}", param="messages")
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_called(call) for call in message.tool_calls]
    return plain


def _called(call: _ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass  # models say what is no JSON, too; the template gets it as it was said
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
