"""The parts of the autoregressive engine that need no model."""

from __future__ import annotations

import random

import pytest

from stages.ar.detokenizer import HALF, Detokenizer
from stages.ar.loading import cpu_flags, pick_dtype
from stages.ar.params import Sampling, parse
from streamrt import ConfigError


def from_bytes(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def spoken(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(from_bytes, stop)
    pieces = []
    for byte in text:
        pieces.append(detokenizer.push(byte))
        if detokenizer.is_stopped:
            break
    return [*pieces, detokenizer.finish()], detokenizer.is_stopped


def test_characters_are_never_split() -> None:
    text = "naïve 😀 日本語 👩‍🚀!"
    pieces, _ = spoken(text.encode())
    assert "".join(pieces) == text
    assert not any(HALF in piece for piece in pieces)


def test_broken_bytes_are_left_out_and_what_follows_is_said() -> None:
    pieces, _ = spoken(b"a\xf0\x9f b\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffc")
    assert "".join(pieces) == "a bc"
    assert "".join(spoken(b"end\xf0\x9f")[0]) == "end"


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_sure() -> None:
    pieces, is_stopped = spoken(b"one ##two ###three", ("###",))
    assert "".join(pieces) == "one ##two "
    assert is_stopped
    assert pieces[:7] == ["o", "n", "e", " ", "", "", "##t"]


def test_the_earliest_of_many_stop_strings_wins_and_an_unfinished_one_is_said() -> None:
    assert "".join(spoken(b"abcdef", ("ef", "cd"))[0]) == "ab"
    assert "".join(spoken(b"abcde", ("def",))[0]) == "abcde"


@pytest.mark.parametrize("seed", range(20))
def test_any_text_and_stop_strings_give_what_a_search_in_the_whole_text_gives(seed: int) -> None:
    dice = random.Random(seed)
    text = "".join(dice.choice("aaabé😀") for _ in range(60))
    stop = tuple("".join(dice.choice("aaabé😀") for _ in range(dice.randint(1, 4))) for _ in range(2))
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    pieces, is_stopped = spoken(text.encode(), stop)
    assert is_stopped == bool(ends)
    # A stop string may end later than another that began before it; the first to be whole wins.
    assert "".join(pieces) in {text[:at] for at in ends} if ends else "".join(pieces) == text


@pytest.mark.parametrize(
    ("asked", "device", "flags", "chosen"),
    [
        ("auto", "cpu", "avx2 fma", "float32"),
        ("auto", "cpu", "avx2 avx512_bf16", "bfloat16"),
        ("auto", "cpu", "amx_bf16", "bfloat16"),
        ("auto", "cuda:0", "", "bfloat16"),
        ("float16", "cpu", "", "float16"),
        ("int8", "cpu", "", "int8"),
    ],
)
def test_the_dtype_is_picked_by_what_the_processor_can(asked: str, device: str, flags: str, chosen: str) -> None:
    assert pick_dtype(asked, device, frozenset(flags.split())) == chosen


def test_float8_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        pick_dtype("float8", "cpu", frozenset())


def test_flags_are_read_from_cpuinfo() -> None:
    assert cpu_flags("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: other\n") == {"fpu", "avx2"}
    assert cpu_flags("nothing") == frozenset()


def test_a_request_overrides_the_defaults_and_max_tokens_is_capped() -> None:
    generation = parse({"temperature": 0.5, "max_tokens": 999, "stop": "x", "top_p": None}, Sampling(top_p=0.9, top_k=5), 100)
    assert generation.sampling == Sampling(0.5, 0.9, 5)
    assert (generation.max_tokens, generation.stop, generation.messages) == (100, ("x",), None)
