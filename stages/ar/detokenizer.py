"""Token ids to text as they come: never half a character, never a part of a stop string.

Pure: knows a `decode` function, nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what `decode` makes of the first bytes of a character
MAX_HALF_TOKENS = 8  # no character is longer; what is still half by then is broken


class Detokenizer:
    """The text of one request. `push` gives what can be said for sure; `is_stopped` after a stop string, which is not said."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        # Text is decoded from `_start`, so that each token is seen beside the one before it; up to `_read` it has been taken.
        self._start = 0
        self._read = 0
        self._held = ""  # taken, but may be the beginning of a stop string
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(token)
        return self._release(self._take(is_last=False))

    def finish(self) -> str:
        """What is left when no token follows."""
        text = self._release(self._take(is_last=True))
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        is_half = now.endswith(HALF) and not is_last and len(self._ids) - self._read < MAX_HALF_TOKENS
        if is_half or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :].replace(HALF, "")

    def _release(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
