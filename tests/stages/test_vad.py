from __future__ import annotations

import numpy as np
import pytest

from stages.speech.vad import SileroVad, TurnDetector, TurnSettings
from streamrt import BadRequest, audio_chunk, event_chunk
from tests.stages.harness import loaded, request, run, sliced

# One character a window of 32 ms: S speech, s between the thresholds, . silence
LEVEL = {"S": 0.9, "s": 0.42, ".": 0.05}


@pytest.mark.parametrize(
    ("windows", "events"),
    [
        ("........", []),
        ("S..S..S.", []),  # clicks
        ("..SS", ["started 2"]),
        ("..S.SS", ["started 4"]),
        ("SSss..", ["started 0"]),  # going on at a lower level is no silence
        ("SS...", ["started 0", "paused 2"]),
        ("SS...S", ["started 0", "paused 2", "resumed 5"]),
        ("SS...s..", ["started 0", "paused 2", "stopped 2"]),  # but in a silence it is no speech
        ("SS..S...", ["started 0", "paused 5"]),
        ("SS......", ["started 0", "paused 2", "stopped 2"]),  # 6 windows are over 180 ms
        ("SS......SS......", ["started 0", "paused 2", "stopped 2", "started 8", "paused 10", "stopped 10"]),
    ],
)
def test_turn_events(windows, events):
    detector = TurnDetector(TurnSettings(silence_duration_ms=180))
    found = [event for number, level in enumerate(windows) for event in detector.push(number, LEVEL[level])]
    assert [f"{name.removeprefix('speech_')} {window}" for name, window in found] == events


def test_speech_that_the_stream_cuts_off_is_stopped():
    detector = TurnDetector(TurnSettings())
    for number in range(4):
        detector.push(number, 0.9)
    assert detector.finish(4) == [("speech_stopped", 4)]
    assert detector.finish(4) == []


@pytest.fixture(scope="module")
def vad():
    with loaded(SileroVad) as stage:
        yield stage


@pytest.fixture(scope="module")
def speech(spoken_sentence):
    """One second of silence, a sentence, one second of silence; 24 kHz."""
    silence = np.zeros(24_000, np.float32)
    return np.concatenate([silence, spoken_sentence, silence])


def told(chunks):
    return [(chunk.event, chunk.meta["at_samples"], chunk.meta["rate_hz"]) for chunk in chunks]


async def test_a_sentence_is_heard_where_it_is(vad, speech):
    events = told(await run(vad, request("listen"), sliced(speech, 480, lambda s: audio_chunk(s, 24_000))))
    assert [events[0][0], events[-1][0]] == ["speech_started", "speech_stopped"]
    assert [name for name, *_ in events].count("speech_started") == 1
    assert events[0][1] == pytest.approx(24_000, abs=3_000)
    assert events[-1][1] == pytest.approx(len(speech) - 24_000, abs=4_800)
    assert {rate_hz for *_, rate_hz in events} == {24_000}


@pytest.mark.parametrize("size", [1_000, 4_801, 10**6])
async def test_chunk_sizes_do_not_matter(vad, speech, size):
    small = await run(vad, request("listen"), sliced(speech, 480, lambda s: audio_chunk(s, 24_000)))
    other = await run(vad, request("listen"), sliced(speech, size, lambda s: audio_chunk(s, 24_000)))
    assert told(other) == told(small)


async def test_silence_and_noise_are_no_speech(vad):
    noise = np.random.default_rng(0).normal(0, 0.05, 32_000).astype(np.float32)
    assert await run(vad, request("listen"), [audio_chunk(np.zeros(16_000, np.float32), 16_000), audio_chunk(noise, 16_000)]) == []


async def test_events_take_effect_at_their_place_in_the_audio(vad, speech):
    def audio():
        return audio_chunk(speech, 24_000)

    deaf = [event_chunk("configure", enabled=False), audio(), event_chunk("configure", enabled=True), audio()]
    events = told(await run(vad, request("listen"), deaf))
    assert [name for name, *_ in events].count("speech_started") == 1
    assert events[0][1] == pytest.approx(len(speech) + 24_000, abs=3_000)  # offsets count what was not listened to

    middle = 24_000 + (len(speech) - 48_000) // 2
    for name in ("clear", "commit"):
        chunks = [audio_chunk(speech[:middle], 24_000), event_chunk(name), audio_chunk(speech[middle:], 24_000)]
        starts = [at for event, at, _ in told(await run(vad, request("listen"), chunks)) if event == "speech_started"]
        assert starts[0] < middle <= starts[1]


async def test_silence_duration_is_the_callers(vad, speech):
    def stop_is_told_by(silence_ms, **params):
        until = len(speech) - 24_000 + 24 * silence_ms
        return run(vad, request("listen", **params), [audio_chunk(speech[:until], 24_000), event_chunk("clear")])

    assert "speech_stopped" in [c.event for c in await stop_is_told_by(450, silence_duration_ms=200)]
    assert "speech_stopped" not in [c.event for c in await stop_is_told_by(450, silence_duration_ms=900)]


async def test_sessions_do_not_hear_each_other(vad, speech):
    alone = told(await run(vad, request("listen"), sliced(speech, 2_400, lambda s: audio_chunk(s, 24_000))))
    ears = [vad.process(request("listen"), _each(speech, start)) for start in (0, 1, 2)]
    mixed: list[list] = [[], [], []]
    for index, ear in enumerate(ears):
        async for chunk in ear:
            mixed[index].append(chunk)
            break
    for index, ear in enumerate(ears):
        async for chunk in ear:
            mixed[index].append(chunk)
    assert [told(events) for events in mixed] == [alone] * 3


async def _each(speech, _):
    for chunk in sliced(speech, 2_400, lambda s: audio_chunk(s, 24_000)):
        yield chunk


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([event_chunk("configure", threshold=2)], "turn detection: Expected `float` <= 1"),
        ([event_chunk("dance")], 'got the event "dance"'),
        ([audio_chunk(np.zeros(10), 16_000), audio_chunk(np.zeros(10), 24_000)], "got 24000 in a stream of 16000 Hz"),
        ([audio_chunk(np.zeros(10), 0)], "got 0, expected 4000"),
    ],
)
async def test_what_makes_no_sense_is_the_callers_mistake(vad, chunks, message):
    with pytest.raises(BadRequest, match=message):
        await run(vad, request("listen"), chunks)
