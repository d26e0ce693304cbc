from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from stages.speech.asr import FasterWhisper, is_silent, only_silence_added
from streamrt import BadRequest, TooLong, audio_chunk, event_chunk, text_chunk
from tests.stages.harness import joined, loaded, request, run, sliced

SENTENCES = (Path(__file__).parents[1] / "data" / "sentences.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def asr():
    with loaded(FasterWhisper) as stage:
        yield stage


def text_of(chunks) -> str:
    return "".join(chunk.text for chunk in chunks if not chunk.meta.get("provisional"))


async def test_a_sentence_is_understood(asr, spoken_sentence):
    chunks = await run(asr, request("transcribe"), sliced(spoken_sentence, 960, lambda s: audio_chunk(s, 24_000)))
    assert text_of(chunks) == "What is the capital of France?"
    assert chunks[0].meta["language"] == "en"
    assert 0 <= chunks[0].meta["start_s"] < chunks[-1].meta["end_s"] <= len(spoken_sentence) / 24_000 + 0.5


async def test_words_carry_their_times(asr, spoken_sentence):
    chunks = await run(asr, request("transcribe", timestamps=True), [audio_chunk(spoken_sentence, 24_000)])
    words = [word for chunk in chunks for word in chunk.meta["words"]]
    assert [word["word"] for word in words] == ["What", "is", "the", "capital", "of", "France?"]
    assert all(type(word[edge]) is float for word in words for edge in ("start", "end"))
    assert [word["start"] for word in words] == sorted(word["start"] for word in words)


async def test_a_provisional_transcript_is_reused_when_only_silence_follows(asr, spoken_sentence, monkeypatch):
    calls = []
    short = asr._short
    monkeypatch.setattr(asr, "_short", lambda audio, options: calls.append(len(audio)) or short(audio, options))
    silence = audio_chunk(np.random.default_rng(0).normal(0, 1e-4, 12_000).astype(np.float32), 24_000)
    speech = audio_chunk(spoken_sentence, 24_000)
    ask = event_chunk("provisional")

    chunks = await run(asr, request("transcribe"), [speech, ask, silence, ask, silence])
    assert [(chunk.text, bool(chunk.meta.get("provisional"))) for chunk in chunks] == [
        ("What is the capital of France?", True),
        ("What is the capital of France?", True),
        ("What is the capital of France?", False),
    ]
    assert len(calls) == 1

    chunks = await run(asr, request("transcribe"), [speech, ask, silence, speech])
    assert len(calls) == 3
    assert text_of(chunks).lower().count("capital of france") == 2


@pytest.mark.parametrize("level", [0.0, 0.0005, 0.003, 0.02])
async def test_silence_and_hiss_have_no_words(asr, level):
    noise = np.random.default_rng(0).normal(0, 1, 3 * 16_000).astype(np.float32) * np.float32(level)
    assert text_of(await run(asr, request("transcribe"), [audio_chunk(noise, 16_000)])) == ""


async def test_no_audio_at_all_is_no_text(asr):
    assert await run(asr, request("transcribe"), []) == []
    provisional = await run(asr, request("transcribe"), [event_chunk("provisional")])
    assert [(chunk.text, chunk.meta["provisional"]) for chunk in provisional] == [("", True)]


async def test_a_short_window_gives_the_same_words_as_the_whole_one(asr, spoken_sentence):
    import soxr

    audio = soxr.resample(spoken_sentence, 24_000, 16_000)
    assert [s.text for s in asr._short(audio, {})] == [s.text for s in asr._long(audio, {})]


async def test_a_decoder_that_repeats_itself_is_run_over_the_whole_window(asr, spoken_sentence, monkeypatch):
    import stages.speech.asr as module

    monkeypatch.setattr(module, "MARGIN_FRAMES", 0)
    monkeypatch.setattr(module, "LEAST_FRAMES", 0)
    assert text_of(await run(asr, request("transcribe"), [audio_chunk(spoken_sentence, 24_000)])) == "What is the capital of France?"


@pytest.mark.slow
async def test_more_than_30_s_come_window_by_window(asr, spoken_sentence):
    pause = np.zeros(24_000, np.float32)
    audio = np.concatenate([spoken_sentence, pause] * 13)
    assert len(audio) > 33 * 24_000
    chunks = await run(asr, request("transcribe"), sliced(audio, 24_000, lambda s: audio_chunk(s, 24_000)))
    assert text_of(chunks).count("capital of France") == 13
    assert chunks[-1].meta["end_s"] == pytest.approx(len(audio) / 24_000 - 1, abs=1.5)


async def test_too_much_audio_is_refused_as_it_comes(asr):
    minute = audio_chunk(np.zeros(60 * 8_000, np.float32), 8_000)
    with pytest.raises(TooLong, match="more than 600 s"):
        await run(asr, request("transcribe"), [minute] * 11)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"language": "de"}, "hears English only"), ({"temperature": 3}, "temperature: got 3"), ({"language": "en"}, None)],
)
async def test_what_can_not_be_is_the_callers_mistake(asr, params, message):
    if message is None:
        assert await run(asr, request("transcribe", **params), []) == []
        return
    with pytest.raises(BadRequest, match=message):
        await run(asr, request("transcribe", **params), [])


def test_silence_is_a_matter_of_what_was_said_before():
    rng = np.random.default_rng(0)
    speech = rng.normal(0, 0.1, 16_000).astype(np.float32)
    quiet, murmur = (rng.normal(0, level, 3_000).astype(np.float32) for level in (0.003, 0.02))
    assert only_silence_added(np.concatenate([speech, quiet]), 16_000)
    assert not only_silence_added(np.concatenate([speech, murmur]), 16_000)
    assert only_silence_added(speech, 16_000)
    assert is_silent(quiet * 0.1)
    assert is_silent(speech[:1_000])
    assert not is_silent(speech)


# --- what the TTS says, the ASR understands


def normal(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9' ]", "", text.lower().replace("9", "nine").replace("20", "twenty")).split()


def word_errors(said: list[str], heard: list[str]) -> int:
    """Edit distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_sentences_spoken_are_read_back(asr, kokoro):
    rates = []
    for sentence in SENTENCES[:10]:
        audio = joined(await run(kokoro, request("speak"), [text_chunk(sentence)]))
        heard = text_of(await run(asr, request("transcribe"), [audio_chunk(audio, 24_000)]))
        said = normal(sentence)
        rates.append((word_errors(said, normal(heard)) / len(said), sentence, heard))
    assert sum(rate for rate, *_ in rates) / len(rates) <= 0.10, rates
