from __future__ import annotations

import asyncio

import numpy as np
import pytest

from stages.speech.tts import FADE, RATE_HZ, SLICE, STOCK_VOICES, Kokoro, pause_after, trimmed
from streamrt import BadRequest, TooLong, UnknownVoice, text_chunk
from tests.stages.harness import joined, request, run

TEXT = "Hello there. It costs $5."


@pytest.fixture(scope="module")
def speech(kokoro):
    return asyncio.run(run(kokoro, request("speak"), [text_chunk(TEXT)]))


async def test_speech_is_mono_in_slices_and_says_what_it_speaks(kokoro, speech):
    assert {(chunk.modality, chunk.sample_rate_hz) for chunk in speech} == {("audio", RATE_HZ)}
    assert all(0 < len(chunk.samples) <= SLICE for chunk in speech)
    spans = [(chunk.meta["text"], chunk.meta["text_start"], chunk.meta["text_end"]) for chunk in speech if chunk.meta]
    assert spans == [("Hello there.", 0, 12), ("It costs $5.", 13, 25)]
    assert speech[0].meta
    assert 1.5 < len(joined(speech)) / RATE_HZ < 4
    assert 0.05 < float(np.abs(joined(speech)).max()) <= 1


async def test_joins_do_not_click_and_nothing_is_cut_off(kokoro, speech):
    audio = joined(speech)
    first, second = (kokoro.sound(words, kokoro.args.voice, 1.0, "en-us") for words in ("Hello there.", "It costs five dollars."))
    pause = np.zeros(int(pause_after("Hello there.") * RATE_HZ), np.float32)
    np.testing.assert_array_equal(audio, np.concatenate([first, pause, second]))
    for edge in (first[:1], first[-1:], second[:1], second[-1:]):
        assert edge == 0


async def test_pieces_of_text_give_the_same_samples(kokoro, speech):
    pieces = [text_chunk(TEXT[start : start + 4]) for start in range(0, len(TEXT), 4)]
    np.testing.assert_array_equal(joined(await run(kokoro, request("speak"), pieces)), joined(speech))


async def test_speech_begins_before_the_text_ends(kokoro):
    has_begun = asyncio.Event()

    async def text():
        yield text_chunk("Of course, my friend. ")
        await has_begun.wait()
        yield text_chunk("Bye.")

    said = []
    async for chunk in kokoro.process(request("speak"), text()):
        has_begun.set()
        said += [chunk.meta["text"]] if chunk.meta else []
    assert said == ["Of course,", "my friend.", "Bye."]


async def test_leaving_early_ends_the_reading(kokoro):
    is_closed = asyncio.Event()

    async def text():
        try:
            yield text_chunk("Yes. ")
            yield text_chunk("No. ")
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    speech = kokoro.process(request("speak"), text())
    await anext(speech)
    await speech.aclose()
    assert is_closed.is_set()


@pytest.mark.parametrize("text", ["", " \n", "😀👍", "***", "```\ncode\n```", "\x00\x07"])
async def test_nothing_to_say_is_no_audio(kokoro, text):
    assert await run(kokoro, request("speak"), [text_chunk(text)]) == []


async def test_voices(kokoro):
    facts = kokoro.describe()
    assert facts["default_voice"] in facts["voices"]
    assert facts["sample_rate_hz"] == RATE_HZ
    text = [text_chunk("Yes.")]
    stock, default, other = [
        joined(await run(kokoro, request("speak", voice=voice), text))
        for voice in (sorted(STOCK_VOICES)[0], facts["default_voice"], "jf_alpha")
    ]
    np.testing.assert_array_equal(stock, default)
    assert len(other) != len(default) or not np.array_equal(other, default)
    with pytest.raises(UnknownVoice, match='got "nobody", expected one of jf_alpha'):
        await run(kokoro, request("speak", voice="nobody"), text)


async def test_speed_is_clipped_to_what_sounds_well(kokoro):
    text = [text_chunk("Yes, it is.")]
    slow, fastest, beyond = [len(joined(await run(kokoro, request("speak", speed=speed), text))) for speed in (0.8, 2.0, 4.0)]
    assert slow > 1.5 * fastest
    assert fastest == beyond


@pytest.mark.parametrize(
    ("params", "message"),
    [({"speed": 9}, "got 9, expected 0.25 to 4"), ({"speed": "fast"}, "got 'fast'"), ({"language": "klingonese"}, 'got "klingonese"')],
)
async def test_what_can_not_be_is_the_callers_mistake(kokoro, params, message):
    with pytest.raises(BadRequest, match=message):
        await run(kokoro, request("speak", **params), [text_chunk("Hi.")])


async def test_too_much_text_is_refused_before_it_is_kept(kokoro):
    with pytest.raises(TooLong, match="more than 100000 characters"):
        await run(kokoro, request("speak"), [text_chunk("😀" * 60_000)] * 2)


def test_a_clause_of_more_than_510_phonemes_is_spoken_in_batches(kokoro, monkeypatch):
    batches = []
    monkeypatch.setattr(kokoro._kokoro, "_create_batch", lambda *args: batches.append(len(args[0])) or (np.ones(2_400, np.float32), None))
    assert len(kokoro.sound("nine " * 150, "jf_alpha", 1.0, "en-us")) > 0
    assert len(batches) > 1
    assert max(batches) <= 510


def test_trimming_keeps_the_sound_and_ends_in_silence():
    rng = np.random.default_rng(0)
    sound = np.concatenate([np.zeros(6_000), rng.normal(0, 0.2, 9_600), np.zeros(12_000)]).astype(np.float32)
    out = trimmed(sound)
    assert 9_600 <= len(out) <= 9_600 + 24 * 120
    assert out[0] == out[-1] == 0
    assert float(np.abs(np.diff(out[: FADE // 4])).max()) < 0.1
    assert len(trimmed(np.zeros(24_000, np.float32))) == 0
    assert len(trimmed(np.zeros(10, np.float32))) == 0


def test_arguments_that_do_not_fit_the_model_are_named(kokoro):
    from streamrt import ConfigError

    broken = Kokoro(Kokoro.Args(voice="nobody"), kokoro.context)
    with pytest.raises(ConfigError, match='voice: got "nobody"'):
        broken.load()
