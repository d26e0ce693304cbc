"""Replies that have a form: a JSON schema, a regular expression, a grammar, tool calls.

    Grammar (what was asked, small) -> Grammars.start (compiled once, kept) -> Matcher (one sequence's, moved on by its tokens)

Knows the grammar compiler, `llguidance`, and imports it when the first grammar comes. Knows nothing of torch and of requests.

Rules
- A grammar that can not be compiled is the caller's fault, and said so with the name of the parameter it came in.
- White space between JSON's parts is bounded, so that a reply can not be all white space; every reply that ends has its form.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from stages.ar.tool_calls import CLOSE, OPEN
from streamrt import BadRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}
WHITE_SPACE = r"\n[ \t]{0,40}| "  # where JSON may have some: a line break with its indentation, or one space
MAX_CALLS = 16  # in one reply that must be calls


class Grammar(msgspec.Struct, frozen=True):
    """What a reply must be. Equal ones are compiled once."""

    kind: Literal["json", "regex", "lark", "calls"]
    text: str  # a JSON schema, a regular expression in Rust's syntax, a grammar in llguidance's Lark, the same without the two tags
    param: str = ""  # the parameter that asked for it


def answer_grammar(schemas: Mapping[str, str], *, many: bool, or_json: str | None = None, param: str = "tools") -> Grammar:
    """Calls as `tool_calls.py` reads them.

    Args:
        schemas: the tools' names, and the JSON schemas of their arguments.
        many: whether more than one call may be made.
        or_json: a schema that the reply may follow in place of making calls.
        param: the parameter that asks for it.
    """
    lines = [
        "start: calls" + (" | answer" if or_json is not None else ""),
        f'calls: call ("\\n" call){{0,{MAX_CALLS - 1}}}' if many else "calls: call",
        "call: " + " | ".join(f"call_{n}" for n in range(len(schemas))),
    ]
    for n, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'call_{n}: open {head} %json {_spaced(schema)} "}}\\n" close')
    if or_json is not None:
        lines.append(f"answer: %json {_spaced(or_json)}")
    return Grammar("calls", "\n".join(lines), param)


class Grammars:
    """The compiled grammars of one model. Made at load; `start` may be called from any thread."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int], *, max_kept: int = 64) -> None:
        """
        Args:
            tokenizer: one of transformers' fast tokenizers.
            vocabulary: the width of the logits.
            ends: the model's end tokens: what may follow a reply that is whole.
            max_kept: compiled grammars that are kept.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._max_kept = max_kept
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the one used last comes last
        self._lock = threading.Lock()  # of `_kept`
        self._tries: LLTokenizer | None = None  # the tokenizer in the compiler's form
        self._tries_lock = threading.Lock()

    def start(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning. The first one of a grammar takes milliseconds to a second, and the model's first one a second more.

        Raises:
            BadRequest: the grammar can not be compiled.
        """
        with self._lock:
            compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
            return Matcher(compiled.deep_copy())

    def __len__(self) -> int:
        return len(self._kept)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if grammar.kind == "json":
            source = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITE_SPACE})
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            tags = f"\nopen: {self._tag(OPEN)}\nclose: {self._tag(CLOSE)}" if grammar.kind == "calls" else ""
            source = LLMatcher.grammar_from_lark(grammar.text + tags)
        compiled = LLMatcher(self._trie(), source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if compiled.is_error():
            raise BadRequest(f"{grammar.param}: {compiled.get_error()}", param=grammar.param)
        return compiled

    def _tag(self, text: str) -> str:
        """A tag as the grammar names it: as a token where the model has one that the compiler keeps apart from text, else as text."""
        token = self._tokenizer.get_vocab().get(text)
        return text if token is not None and self._trie().is_special_token(token) else json.dumps(text)

    def _trie(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        with self._tries_lock:
            if self._tries is None:
                self._tries = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None)
            return self._tries


class Matcher:
    """Where one sequence stands in its grammar. Implements `sampler.Grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> np.ndarray:
        """(ceil(vocabulary / 32),) int32. A reply that is whole, or has failed, may only end."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the sequence can not go on, "" while it can: the grammar took more work than its limits allow."""
        return self._matcher.get_error() if self._matcher.is_error() else ""


def _spaced(schema: str) -> str:
    """The schema with our white space, unless it says its own."""
    options = {"whitespace_pattern": WHITE_SPACE}
    decoded = json.loads(schema)
    return json.dumps(decoded | {"x-guidance": options | decoded.get("x-guidance", {})})
