"""Chunks of the `respond` task as OpenAI's choices: which one, its text, its calls, its log probabilities, its end. Pure.

A stage says in the metadata of its chunks (all optional):
    text chunk   "choice": int, when more than one was asked for; the choice's last chunk has its "finish_reason"
                 "tool_call": {"index": int, "name": str, "arguments": str}: the first part of a call has its name
                 "logprobs": [{"token", "id", "logprob", "bytes", "top": [the same]}] of the tokens sampled since the last such chunk
    last chunk   "finish_reason": str; "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"} of all choices
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrt import Chunk


class Ending:
    """What the last chunks of a call say: why each choice ended and what it cost. Written by the reader of the chunks."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._usage: dict[str, int] = {}  # empty where the stage counts no tokens

    def note(self, chunk: Chunk) -> None:
        if reason := chunk.meta.get("finish_reason"):
            self._reasons[index_of(chunk)] = str(reason)
        self._usage = chunk.meta.get("usage", self._usage)

    def finish_reason(self, index: int) -> str:
        return self._reasons.get(index, "stop")

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of([self])

    @property
    def counts(self) -> dict[str, int]:
        return self._usage


def usage_of(endings: Iterable[Ending]) -> dict[str, Any]:
    """OpenAI's `usage` of one or more calls."""
    counts = [ending.counts for ending in endings]
    prompt, completion, cached = (sum(c.get(f"{name}_tokens", 0) for c in counts) for name in ("prompt", "completion", "cached"))
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if any("cached_tokens" in c for c in counts):
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def index_of(chunk: Chunk) -> int:
    return int(chunk.meta.get("choice", 0))


def ends_choice(chunk: Chunk) -> bool:
    """Whether one choice of several ends here, before the others."""
    return "choice" in chunk.meta and "finish_reason" in chunk.meta


def call_delta(chunk: Chunk) -> list[dict[str, Any]]:
    """`delta.tool_calls` of a chunk, [] when it has no part of a call. A call gets its id where it begins."""
    part = chunk.meta.get("tool_call")
    if part is None:
        return []
    function = {"arguments": part.get("arguments", "")}
    if name := part.get("name"):
        head = {"index": part["index"], "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return [{**head, "function": {"name": name, **function}}]
    return [{"index": part["index"], "function": function}]


def chat_logprobs(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`choice.logprobs` of chat completions."""
    return {"content": [{**_told(entry), "top_logprobs": [_told(top) for top in entry["top"]]} for entry in entries], "refusal": None}


def text_logprobs(entries: Iterable[dict[str, Any]], offset: int) -> tuple[dict[str, Any], int]:
    """`choice.logprobs` of completions, whose first token stands `offset` characters into the text; and where the next one does."""
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        told["tokens"].append(entry["token"])
        told["token_logprobs"].append(entry["logprob"])
        told["top_logprobs"].append({top["token"]: top["logprob"] for top in entry["top"]})
        told["text_offset"].append(offset)
        offset += len(entry["token"])
    return told, offset


class Message:
    """One choice of a whole answer, put together from its chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []  # of its tokens' log probabilities

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.entries += chunk.meta.get("logprobs", ())
        for part in call_delta(chunk):
            if "id" in part:
                self.calls.append({name: part[name] for name in ("id", "type", "function")})
            else:
                self.calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]

    def as_dict(self) -> dict[str, Any]:
        """`choice.message`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        return message | {"content": self.text or None, "tool_calls": self.calls} if self.calls else message


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("token", "logprob", "bytes")}
