"""A conversation to the tokens of a prompt: the model's own chat template, and what goes when it is too long.

Knows tokenizers. Knows nothing of torch or of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrt import BadRequest, TooLong

LONGEST_TOKEN = 32  # characters, on average over a text; a longer one is not tokenized to find out that it does not fit


class Prompter:
    """Renders and tokenizes for one model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def build(
        self, messages: list[dict[str, Any]], room: int, *, tools: list[dict[str, Any]] | None = None, may_truncate: bool = True
    ) -> tuple[list[int], int]:
        """Tokens of the prompt, at most `room`, and how many messages were dropped to get there.

        The system message and the last turn always stay; the oldest turns go first.
        Raises:
            TooLong: it does not fit.
            BadRequest: the chat template refuses it.
        """
        head = [m for m in messages[:1] if m["role"] in ("system", "developer")]
        turns = messages[len(head) :]
        if not turns:
            raise BadRequest("messages: expected a message that is not the system's", param="messages")
        kept = self._newest_that_may_fit(turns, room)
        if len(kept) < len(turns) and not may_truncate:
            kept = []
        while kept:
            ids = self._render(head + kept, tools) if self._may_fit(head, room) else None
            if ids is not None and len(ids) <= room:
                return ids, len(turns) - len(kept)
            kept = _without_oldest(kept) if may_truncate else []
        what = "even its last message" if may_truncate else "the conversation"
        raise TooLong(f"messages: {what} does not fit into {room} tokens", param="messages")

    def plain(self, prompt: str | Sequence[int], room: int) -> list[int]:
        """Tokens of a prompt that goes to the model as it is. Raises TooLong; BadRequest when there are none."""
        is_sure = isinstance(prompt, str) and len(prompt) > self.max_chars(room)
        tokens = [] if is_sure else self._encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        if is_sure or len(tokens) > room:
            raise TooLong(f"prompt: does not fit into {room} tokens", param="prompt")
        if not tokens:
            raise BadRequest("prompt: it is empty, and this model needs a token to begin with", param="prompt")
        return tokens

    def _newest_that_may_fit(self, turns: list[dict[str, Any]], room: int) -> list[dict[str, Any]]:
        """The end of `turns` whose bare text has at most `room` tokens: what is dropped for sure is never rendered."""
        kept: list[dict[str, Any]] = []
        for turn in reversed(turns):
            if not self._may_fit([turn], room):
                break
            room -= len(self._encode(turn["content"]))
            if room < 0:
                break
            kept.insert(0, turn)
        return kept

    @staticmethod
    def max_chars(room: int) -> int:
        """Text longer than this does not fit into `room` tokens for sure."""
        return room * LONGEST_TOKEN

    def _may_fit(self, messages: list[dict[str, Any]], room: int) -> bool:
        return sum(len(m["content"]) for m in messages) <= self.max_chars(room)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        if self.tokenizer.chat_template is None:  # a base model: it goes on with the text
            return self._encode("\n".join(m["content"] for m in messages), special=True)
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise BadRequest(f"messages: the model's chat template refuses them: {error}", param="messages") from error
        return self._encode(text)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)


def _without_oldest(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the oldest message, and then from the next user message on: a conversation does not begin with a reply."""
    rest = turns[1:]
    return next((rest[n:] for n, turn in enumerate(rest) if turn["role"] == "user"), rest)
