"""Tool calls in a stream of text, however it is cut."""

from __future__ import annotations

import json
import random

import pytest

from stages.ar.tool_calls import Call, ToolCallParser


def read(*pieces: str) -> list[str | Call]:
    parser = ToolCallParser()
    return [piece for text in pieces for piece in parser.push(text)] + parser.finish()


def merged(pieces: list[str | Call]) -> list[str | tuple[str, str]]:
    """Text and whole calls, in order."""
    whole: list[str | tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, str):
            whole.append(whole.pop() + piece if whole and isinstance(whole[-1], str) else piece)
        elif piece.name:
            whole.append((piece.name, piece.arguments))
        else:
            name, arguments = whole.pop()
            whole.append((name, arguments + piece.arguments))
    return whole


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"}ris", "days": [1, {"a": 2}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Pa\\"}ris", "days": [1, {"a": 2}]}'

CASES = [
    ("just text with a < and a <tool", ["just text with a < and a <tool"]),
    (" \n", [" \n"]),
    (WEATHER, [("weather", ARGUMENTS)]),
    (f"Let me see.\n\n{WEATHER}\n", ["Let me see.", ("weather", ARGUMENTS)]),
    (f"{WEATHER}\n{WEATHER} \n done", [("weather", ARGUMENTS), ("weather", ARGUMENTS), "done"]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}, "id": 3}</tool_call>!', [("f", '{"a": "</tool_call>"}'), "!"]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call> so', [("f", '{"a": [1'), "so"]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f", "arguments": {"é": "日"}}', [("f", '{"é": "日"}')]),
    # what is no call stays text, to the letter
    ("a \n<tool_call>hello</tool_call>\n b", ["a \n<tool_call>hello</tool_call>\n b"]),
    ("a <tool_call>", ["a <tool_call>"]),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', ['<tool_call>{"name": 5, "arguments": {}}</tool_call>']),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>']),
    ('<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    (f"<tool_call>nope</tool_call>{WEATHER}", ["<tool_call>nope</tool_call>", ("weather", ARGUMENTS)]),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
def test_calls_are_read_the_same_however_the_text_is_cut(text: str, expected: list[str | tuple[str, str]]) -> None:
    assert merged(read(text)) == expected
    assert merged(read(*text)) == expected
    dice = random.Random(1)
    for _ in range(20):
        cuts = sorted(dice.sample(range(len(text) + 1), min(3, len(text))))
        assert merged(read(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)))) == expected


def test_arguments_stream_and_no_tag_leaks() -> None:
    pieces = read(*f"Well. {WEATHER}")
    texts = [piece for piece in pieces if isinstance(piece, str)]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert "".join(texts) == "Well."
    assert [call.name for call in calls] == ["weather"] + [""] * (len(calls) - 1)
    assert [len(call.arguments) for call in calls] == [1] * len(ARGUMENTS), "each character of the arguments goes on at once"
    assert json.loads("".join(call.arguments for call in calls))["days"] == [1, {"a": 2}]


def test_calls_are_counted() -> None:
    assert [piece.number for piece in read(WEATHER, WEATHER) if isinstance(piece, Call) and piece.name] == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_any_text_of_the_formats_letters_is_read_the_same_whole_and_cut(seed: int) -> None:
    dice = random.Random(seed)
    parts = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": 1}', "}", "{", '"', "\\", " ", "\n", "x", "<", "[", "]"]
    text = "".join(dice.choice(parts) for _ in range(25))
    assert merged(read(*text)) == merged(read(text))
    if not any(isinstance(piece, Call) for piece in read(text)):
        assert "".join(str(piece) for piece in read(text)) == text
