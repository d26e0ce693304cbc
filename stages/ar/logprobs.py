"""Sampled tokens as what a client is told of them: text, bytes, log probability, and the tokens that were likely, too.

Knows the tokenizers of transformers and how they write bytes. Knows nothing of torch or of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.ar.sampler import Sampled

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that no token covers


class TokenTexts:
    """One tokenizer's tokens as text and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        """A fast tokenizer of transformers; its added tokens stay as they are."""
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder  # None: pieces are text
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def entries(self, sampled: Iterable[Sampled]) -> list[dict[str, Any]]:
        """One entry a token that was asked for its log probability.

        Returns: {"token": text, "id": int, "logprob": float, "bytes": [int], "top": [{"token", "id", "logprob", "bytes"}]}; the text of
            a token that is part of a character has U+FFFD for it, its bytes do not.
        """
        return [
            {**self._entry(one.token, one.logprob), "top": [self._entry(token, logprob) for token, logprob in one.top]}
            for one in sampled
            if one.logprob is not None
        ]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; none where the model's vocabulary is larger than the tokenizer's."""
        if token in self._added:
            return str(self._added[token]).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(BYTES[letter] for letter in piece)
        if byte := BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return str(piece).replace("▁", " ").encode()

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token)
        return {"token": data.decode(errors="replace"), "id": token, "logprob": logprob, "bytes": list(data)}


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one letter: printable ones as themselves, the others as those from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_letters()
