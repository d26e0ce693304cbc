"""Replies that have a form: whatever the model would rather say."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from stages.ar.params import Sampling, parse
from stages.ar.structured import Grammar
from stages.ar.tool_calls import Call, ToolCallParser
from streamrt import BadRequest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.sampler import Row, sample  # noqa: E402 (it imports torch)
from stages.ar.structured import Grammars  # noqa: E402

VOCABULARY = 352  # more than the tokenizer has, as in many checkpoints
END = 2
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6, "pattern": "^[a-zé😀]*$"},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 50}, "maxItems": 3},
    },
    "required": ["city", "size", "parts"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]


def tokenizer(*extra: str) -> Any:
    """Byte-level BPE; `extra` are tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(['{"city": "small", "size": "large"} name arguments tool call'], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in extra])
    return fast


@pytest.fixture(scope="module")
def tokens() -> Any:
    return tokenizer()


@pytest.fixture(scope="module")
def grammars(tokens: Any) -> Grammars:
    return Grammars(tokens, VOCABULARY, [END])


def grammar_of(**params: Any) -> Grammar:
    grammar = parse({"messages": [{"role": "user", "content": "x"}], **params}, Sampling(), 100).grammar
    assert grammar is not None
    return grammar


def said(grammars: Grammars, tokens: Any, grammar: Grammar, *, seed: int = 0, limit: int = 400, temperature: float = 1.0) -> str:
    """What a model of random logits says under `grammar`, which must come to an end."""
    random = torch.Generator().manual_seed(seed)
    matcher = grammars.start(grammar)
    row = Row(Sampling(temperature, seed=seed), [], grammar=matcher, ends=[END], min_tokens=3)
    ids: list[int] = []
    for _ in range(limit):
        ids.append(sample(torch.randn(1, VOCABULARY, generator=random) * 3, [row])[0].token)
        assert not matcher.error
        if ids[-1] == END:
            return str(tokens.decode(ids[:-1]))
    raise AssertionError(f"no end after {tokens.decode(ids)}")


def assert_is_city(value: Any) -> None:
    assert list(value) == ["city", "size", "parts"]
    assert re.fullmatch("[a-zé😀]{0,6}", value["city"])
    assert value["size"] in ("small", "large")
    assert len(value["parts"]) <= 3 and all(type(n) is int and -5 <= n <= 50 for n in value["parts"])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_kept_whatever_the_weights(grammars: Grammars, tokens: Any, seed: int, temperature: float) -> None:
    grammar = grammar_of(response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}})
    assert_is_city(json.loads(said(grammars, tokens, grammar, seed=seed, temperature=temperature)))


def test_json_object_begins_with_a_brace_and_parses_when_it_ends(grammars: Grammars, tokens: Any) -> None:
    grammar = grammar_of(response_format={"type": "json_object"})
    matcher = grammars.start(grammar)
    allowed = [n for n in range(VOCABULARY) if matcher.mask()[n // 32] >> (n % 32) & 1]
    assert all(tokens.decode([token]).startswith("{") for token in allowed)
    for token in tokens('{"a": [1, {"b": null}]}').input_ids:
        assert matcher.mask()[token // 32] >> (token % 32) & 1
        matcher.push(token)
    assert [n for n in range(VOCABULARY) if matcher.mask()[n // 32] >> (n % 32) & 1] == [END]


def test_white_space_is_allowed_where_models_put_it_and_bounded(grammars: Grammars, tokens: Any) -> None:
    grammar = grammar_of(response_format={"type": "json_object"})

    def fits(text: str) -> bool:
        matcher = grammars.start(grammar)
        for token in tokens(text).input_ids:
            matcher.push(token)
        return not matcher.error

    assert fits('{"a": 1, "b": [1, 2]}')
    assert fits('{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}')
    assert not fits('{"a":   1}')
    assert not fits("{\n\n}")


@pytest.mark.parametrize(
    ("params", "pattern"), [({"regex": "[ab]{2,4}-[0-9]{3}"}, "[ab]{2,4}-[0-9]{3}"), ({"grammar": 'start: "yes" | "no"'}, "yes|no")]
)
def test_a_regex_and_a_grammar_are_kept(grammars: Grammars, tokens: Any, params: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        assert re.fullmatch(pattern, said(grammars, tokens, grammar_of(**params), seed=seed))


def calls_in(text: str) -> list[tuple[str, str]]:
    parser = ToolCallParser()
    pieces = parser.push(text) + parser.finish()
    assert all(isinstance(piece, Call) for piece in pieces), pieces
    return [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, Call)]


@pytest.mark.parametrize("extra", [(), ("<tool_call>", "</tool_call>")], ids=["bytes", "own tokens"])
def test_required_calls_are_calls_of_the_tools(extra: tuple[str, ...]) -> None:
    tokens = tokenizer(*extra)
    grammars = Grammars(tokens, VOCABULARY, [END])
    names = set()
    for seed in range(6):
        text = said(grammars, tokens, grammar_of(tools=TOOLS, tool_choice="required"), seed=seed, limit=3000)
        for name, arguments in calls_in(text):
            names.add(name)
            if name == "look_up":
                assert_is_city(json.loads(arguments))
            else:
                assert json.loads(arguments) == {}
    assert names == {"look_up", "stop"}


def test_a_named_tool_is_called_once(grammars: Grammars, tokens: Any) -> None:
    grammar = grammar_of(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "look_up"}})
    for seed in range(3):
        [(name, arguments)] = calls_in(said(grammars, tokens, grammar, seed=seed, limit=1000))
        assert name == "look_up"
        assert_is_city(json.loads(arguments))


def test_one_call_without_parallel_calls(grammars: Grammars, tokens: Any) -> None:
    grammar = grammar_of(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert all(len(calls_in(said(grammars, tokens, grammar, seed=seed, limit=1000))) == 1 for seed in range(3))


def test_a_format_with_tools_is_either(grammars: Grammars, tokens: Any) -> None:
    schema = {"name": "city", "schema": CITY}
    grammar = grammar_of(tools=TOOLS, response_format={"type": "json_schema", "json_schema": schema})
    starts = set()
    for seed in range(8):
        text = said(grammars, tokens, grammar, seed=seed, limit=3000)
        starts.add(text[0])
        if text[0] == "<":
            assert calls_in(text)
        else:
            assert_is_city(json.loads(text))
    assert starts == {"<", "{"}


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}, "response_format", "nonsense"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "not": {}}}}}, "response_format", "not"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}}, "response_format", "/x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"anyOf": []}}}}, "response_format", "anyOf"),
        ({"regex": "a("}, "regex", "unclosed"),
        ({"grammar": "start: what"}, "grammar", "what"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}], "tool_choice": "required"}, "tools", "wrong"),
    ],
    ids=range(7),
)  # fmt: skip
def test_what_can_not_be_compiled_is_refused_by_name(grammars: Grammars, params: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as error:
        grammars.start(grammar_of(**params))
    assert error.value.param == param
    assert error.value.message.startswith(f"{param}: ")


def test_grammars_are_compiled_once_and_the_one_not_used_for_longest_goes(tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(tokens, VOCABULARY, [END], max_kept=2), []
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: compiled.append(grammar.text) or compile_one(self, grammar))
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.start(Grammar("regex", text))
    assert compiled == ["a", "b", "c", "b"]
    assert len(grammars) == 2


def test_two_sequences_of_one_grammar_do_not_meet(grammars: Grammars, tokens: Any) -> None:
    grammar = Grammar("regex", "ab|cd")
    first, second = grammars.start(grammar), grammars.start(grammar)
    first.push(tokens("a").input_ids[0])
    assert (first.mask() != second.mask()).any()
    second.push(tokens("c").input_ids[0])
    assert not first.error and not second.error


def test_a_token_that_does_not_fit_is_told_and_the_sequence_may_only_end(grammars: Grammars, tokens: Any) -> None:
    matcher = grammars.start(Grammar("regex", "ab"))
    matcher.push(tokens("x").input_ids[0])
    assert matcher.error
    assert [n for n in range(VOCABULARY) if matcher.mask()[n // 32] >> (n % 32) & 1] == [END]
