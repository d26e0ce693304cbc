"""What a client is told of tokens, with both kinds of tokenizers."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from stages.ar.logprobs import TokenTexts
from stages.ar.structured import Grammar, Grammars

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.sampler import Sampled  # noqa: E402 (it imports torch)

TEXT = "hello wörld 😀"


@pytest.fixture(params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A small one of each kind; both know "hello" and write the rest as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if request.param == "byte-level":
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=280, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        raw.train_from_iterator(["hello hello"], trainer)
    else:
        pieces = ["</s>", *(f"<0x{n:02X}>" for n in range(256)), "h", "e", "l", "o", "▁", "w", "he", "ll", "hell", "hello", "▁w"]
        merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w")]
        raw = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="</s>"))
        raw.normalizer = normalizers.Replace(" ", "▁")
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        raw.add_special_tokens(["</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    pieces = [texts.bytes_of(token) for token in tokenizer(TEXT).input_ids]
    assert b"".join(pieces).decode() == TEXT
    assert b"hello" in pieces
    assert texts.bytes_of(tokenizer.eos_token_id) == b"</s>"
    assert texts.bytes_of(100_000) == b""


def test_entries_have_text_bytes_and_the_likely_ones(tokenizer: Any) -> None:
    hello, byte = tokenizer("hello").input_ids[0], tokenizer("😀").input_ids[0]
    entries = TokenTexts(tokenizer).entries([Sampled(hello, -0.5, ((hello, -0.5), (byte, -2.0))), Sampled(byte), Sampled(byte, -3.0)])
    assert [entry["token"] for entry in entries] == ["hello", "\ufffd"]
    assert entries[0] == {
        "token": "hello", "id": hello, "logprob": -0.5, "bytes": list(b"hello"),
        "top": [
            {"token": "hello", "id": hello, "logprob": -0.5, "bytes": list(b"hello")},
            {"token": "\ufffd", "id": byte, "logprob": -2.0, "bytes": [0xF0]},
        ],
    }  # fmt: skip
    json.dumps(entries)


def test_grammars_hold_for_both_kinds(tokenizer: Any) -> None:
    matcher = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).start(Grammar("regex", TEXT))
    for token in [*tokenizer(TEXT).input_ids, tokenizer.eos_token_id]:
        assert matcher.mask()[token // 32] >> (token % 32) & 1
        matcher.push(token)
    assert not matcher.error
