"""Tool calls read out of a model's text as it comes, in the Hermes and Qwen format.

    Let me see. <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Pure: text in, text and calls out. How the text is cut into pieces changes nothing but how the output is cut.

Rules
- No part of a tag is ever passed on as text. White space beside a call belongs to it.
- A call is told once its name is sure and its arguments begin; from then on they are passed on as they come. They are what the model
  says: balanced, but not validated, as with OpenAI's API.
- What is no call after all stays text, tags included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from streamrt import Chunk, text_chunk

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# A call's beginning, up to its arguments. Other orders and forms are read when the call is whole.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
MARK = re.compile(r'["{}\[\]\\<]')
IN_STRING = re.compile(r'["\\]')


class Call(NamedTuple):
    """Part of a call: the first one has its name, each may have some of its arguments' JSON."""

    number: int  # 0, 1 ... within one reply
    name: str = ""
    arguments: str = ""


Piece = str | Call  # text, or part of a call


def piece_chunk(piece: Piece, **meta: Any) -> Chunk:
    """A piece as a `text` chunk; a part of a call is in its metadata, under "tool_call"."""
    if isinstance(piece, str):
        return text_chunk(piece, **meta)
    call = {"index": piece.number, "arguments": piece.arguments}
    return text_chunk("", tool_call=call | ({"name": piece.name} if piece.name else {}), **meta)


class _At(Enum):
    TEXT = "between calls"
    HEAD = "after the opening tag"
    ARGUMENTS = "inside the arguments"
    TAIL = "after the arguments"


class ToolCallParser:
    """Reads one reply."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._at = _At.TEXT
        self._held = ""  # read, and not understood yet
        self._gap = ""  # white space before the tag that was read last
        self._follows_call = False  # nothing but white space has been read since a call
        # Within arguments:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[Piece]:
        """What is sure now."""
        self._held += text
        return _joined(self._read(is_last=False))

    def finish(self) -> list[Piece]:
        """What is left when no text follows. A call whose arguments have begun stays one."""
        return _joined(self._read(is_last=True))

    def _read(self, *, is_last: bool) -> Iterator[Piece]:
        readers = {_At.TEXT: self._text, _At.HEAD: self._head, _At.ARGUMENTS: self._arguments, _At.TAIL: self._tail}
        before = None
        while before != (self._at, self._held):  # until a reader needs more than there is
            before = self._at, self._held
            yield from readers[self._at](is_last)

    def _text(self, is_last: bool) -> Iterator[Piece]:
        if self._follows_call:
            self._held = self._held.lstrip()
            self._follows_call = not self._held
        tag = self._held.find(OPEN)
        sure = len(self._held) if is_last else len(self._held) - _overlap(self._held, OPEN)
        if tag >= 0 or not is_last:
            sure = len(self._held[: tag if tag >= 0 else sure].rstrip())
        text, self._held = self._held[:sure], self._held[sure:]
        if tag >= 0:
            self._gap, self._held, self._at = self._held[: tag - sure], self._held[tag - sure + len(OPEN) :], _At.HEAD
        if text:
            yield text

    def _head(self, is_last: bool) -> Iterator[Piece]:
        close = self._held.find(CLOSE)
        head = HEAD.match(self._held)
        if head and (close < 0 or head.end() <= close) and (name := _name(head[1])):
            self._held, self._at = self._held[head.end() :], _At.ARGUMENTS
            self._depth, self._in_string, self._escaped = 0, False, False
            yield self._begin(name)
        elif close >= 0:
            whole, self._held, self._at = self._held[:close], self._held[close + len(CLOSE) :], _At.TEXT
            call = _whole(whole)
            self._follows_call = call is not None
            yield self._begin(*call) if call else self._gap + OPEN + whole + CLOSE
        elif is_last:
            text, self._held, self._at = self._gap + OPEN + self._held, "", _At.TEXT
            yield text

    def _arguments(self, is_last: bool) -> Iterator[Piece]:
        end, is_over = self._scan(self._held)
        said, self._held = self._held[:end], self._held[end:]
        if is_over:
            self._at = _At.TAIL
        if said:
            yield Call(self.num_calls - 1, arguments=said)

    def _scan(self, text: str) -> tuple[int, bool]:
        """How much of `text` are arguments, and whether they end there."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            mark = (IN_STRING if self._in_string else MARK).search(text, at)
            if mark is None:
                break
            at = mark.end()
            match mark[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "<":  # no JSON: the closing tag, before its time
                    return mark.start(), True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return at, True
        return len(text), False

    def _tail(self, is_last: bool) -> Iterator[Piece]:
        close = self._held.find(CLOSE)
        if close >= 0:
            self._held, self._at, self._follows_call = self._held[close + len(CLOSE) :], _At.TEXT, True
        elif is_last:
            self._held = ""
        else:
            self._held = self._held[-len(CLOSE) :]  # all that a tag can still need
        return iter(())

    def _begin(self, name: str, arguments: str = "") -> Call:
        self.num_calls += 1
        return Call(self.num_calls - 1, name, arguments)


def _whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is whole, None when it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = {} if call.get("arguments") is None else call["arguments"]
    if isinstance(arguments, str):  # some models write the object as text
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            return None
        return (call["name"], arguments) if is_object else None
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _name(text: str) -> str:
    """The name that a JSON string says, "" when it is none."""
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """Neighbours that are one: text and text, a call's name and its arguments."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, Call) and isinstance(last, Call) and piece.number == last.number:
            joined[-1] = Call(last.number, last.name or piece.name, last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return joined


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
