"""What a request may ask for, without torch: what is wrong is said by name, before any work."""

from __future__ import annotations

import pytest

from stages.diffusion.params import Accepts, Limits, parse
from streamrt import BadRequest, TooLong

DRAWS = Accepts(
    "DrawPipeline",
    frozenset({"prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale", "image"}),
    steps=20,
    size_multiple=16,
    loras=frozenset({"ink", "oil"}),
)
FILMS = Accepts("FilmPipeline", frozenset({"prompt", "num_frames", "width", "height"}), frames_per_s=16, frame_multiple=4)
FILMS_AT_A_RATE = Accepts("FilmPipeline", FILMS.names | {"frame_rate"}, frames_per_s=24, frame_multiple=8)
SOUNDS = Accepts("SoundPipeline", frozenset({"prompt", "audio_end_in_s", "num_inference_steps"}))
DIGITS = Accepts("DiTPipeline", frozenset({"class_labels", "num_inference_steps"}), labels={"7": 7, "zero": 0, "10": 10})
LIMITS = Limits(max_steps=50, max_side=2048, max_pixels=1024 * 1024, max_frames=81, max_seconds=30, max_images=4)


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"size": "big"}, "size", 'size: got "big", expected "WIDTHxHEIGHT" in pixels, or "auto"'),
        ({"size": "0x16"}, "size", "size: got 0, expected a multiple of 16"),
        ({"size": "100x160"}, "size", "size: got 100, expected a multiple of 16"),
        ({"size": "999999x16"}, "size", "size: got 999999, expected at most 2048"),
        ({"width": 2048, "height": 1024}, "size", "size: got 2048x1024, expected at most 1048576 pixels"),
        ({"width": 64, "size": "64x64"}, "size", "size: got width or height beside it, expected one or the other"),
        ({"width": -1}, "width", "width: expected `int` >= 1"),
        ({"num_inference_steps": 51}, "num_inference_steps", "num_inference_steps: got 51, expected at most 50"),
        ({"num_inference_steps": "many"}, "num_inference_steps", "num_inference_steps: expected `int | null`, got `str`"),
        ({"n": 5}, "n", "n: got 5, expected at most 4"),
        ({"seed": -1}, "seed", "seed: expected `int` >= 0"),
        ({"seed": 2**64}, "seed", "seed: expected `int` <= 9223372036854775807"),
        ({"guidance_scale": 1e9}, "guidance_scale", "guidance_scale: expected `float` <= 100.0"),
        ({"num_frames": 9}, "num_frames", "num_frames: DrawPipeline has nothing like it"),
        ({"seconds": 2}, "seconds", "seconds: DrawPipeline has nothing like it"),
        ({"lora": "wax"}, "lora", 'lora: got "wax", this stage has ink, oil'),
        ({"lora": [{"name": "ink"}, {"name": "ink"}]}, "lora", "lora: got one twice"),
        ({"quality": "fast"}, "quality", 'quality: got "fast", this stage has lossless'),
        ({"priority": 11}, "priority", "priority: expected `int` <= 10"),
    ],
)
def test_what_can_not_be_done_is_told_by_name(params, param, message) -> None:
    with pytest.raises(BadRequest) as caught:
        parse("image", {"prompt": "a cat", **params}, LIMITS, DRAWS)
    assert (caught.value.param, caught.value.message) == (param, message)


def test_a_prompt_beyond_the_limit_is_too_long() -> None:
    with pytest.raises(TooLong):
        parse("image", {"prompt": "x" * 32_001}, LIMITS, DRAWS)


def test_a_request_becomes_the_pipelines_own_arguments() -> None:
    job = parse("image", {"prompt": "a cat", "size": "512x256", "guidance_scale": 3, "seed": 5, "n": 3, "lora": "ink"}, LIMITS, DRAWS)
    assert job.arguments == {"width": 512, "height": 256, "guidance_scale": 3.0}
    assert job.seeds == (5, 6, 7)
    assert job.steps == 20
    assert job.lora == (("ink", 1.0),)


def test_a_guidance_scale_reaches_the_component_that_guides_where_the_call_takes_none() -> None:
    job = parse("video", {"guidance_scale": 4}, LIMITS, Accepts("FilmPipeline", FILMS.names | {"guider.guidance_scale"}))
    assert job.arguments == {"guider.guidance_scale": 4.0}
    with pytest.raises(BadRequest, match="guidance_scale: FilmPipeline has nothing like it"):
        parse("video", {"guidance_scale": 4}, LIMITS, FILMS)


def test_a_seed_that_is_not_given_is_drawn() -> None:
    assert parse("image", {}, LIMITS, DRAWS).seeds != parse("image", {}, LIMITS, DRAWS).seeds


def test_the_stages_defaults_fill_in_what_a_request_leaves_out() -> None:
    limits = Limits(steps=4, width=128, height=64, guidance_scale=0.0)
    assert parse("image", {}, limits, DRAWS).arguments == {"num_inference_steps": 4, "width": 128, "height": 64, "guidance_scale": 0.0}
    assert parse("image", {"width": 256, "height": 32, "num_inference_steps": 9}, limits, DRAWS).arguments["width"] == 256


@pytest.mark.parametrize(
    ("accepts", "params", "frames"),
    [(FILMS, {"seconds": 2}, 33), (FILMS, {"seconds": 1, "fps": 8}, 9), (FILMS_AT_A_RATE, {"seconds": 1}, 25)],
)
def test_seconds_of_video_become_frames_that_the_model_can_make(accepts, params, frames) -> None:
    assert parse("video", params, LIMITS, accepts).arguments["num_frames"] == frames


def test_too_long_a_video_is_refused_in_frames_and_in_seconds() -> None:
    for params in ({"num_frames": 85}, {"seconds": 60}):
        with pytest.raises(BadRequest, match="expected at most 81"):
            parse("video", params, LIMITS, FILMS)


def test_the_frame_rate_reaches_a_pipeline_that_has_one_and_the_chunks_of_one_that_has_none() -> None:
    assert parse("video", {"fps": 12}, LIMITS, FILMS_AT_A_RATE).arguments == {"frame_rate": 12.0}
    job = parse("video", {"fps": 12}, LIMITS, FILMS)
    assert (job.arguments, job.fps) == ({}, 12.0)


def test_previews_are_of_images_alone() -> None:
    assert parse("image", {"previews": 3}, LIMITS, DRAWS).previews == 3
    with pytest.raises(BadRequest, match="previews: there are none of video"):
        parse("video", {"previews": 3}, LIMITS, FILMS)


def test_seconds_of_sound_are_bounded() -> None:
    assert parse("audio", {"seconds": 3}, LIMITS, SOUNDS).arguments == {"audio_end_in_s": 3.0}
    with pytest.raises(BadRequest, match="seconds: got 31, expected at most 30"):
        parse("audio", {"seconds": 31}, LIMITS, SOUNDS)


@pytest.mark.parametrize("params", [{"class_label": 7}, {"class_label": "7"}, {"prompt": "draw a 7"}, {"prompt": "7!"}])
def test_a_class_is_named_by_number_by_name_or_in_the_prompt(params) -> None:
    assert parse("image", params, LIMITS, DIGITS).arguments["class_labels"] == [7]


@pytest.mark.parametrize(
    "params", [{"prompt": ""}, {"prompt": "draw a 77"}, {"prompt": "7 or 10"}, {"class_label": 3}, {"class_label": "seven"}]
)
def test_a_class_that_is_not_clear_is_refused(params) -> None:
    with pytest.raises(BadRequest):
        parse("image", params, LIMITS, DIGITS)


def test_likeness_is_of_what_decides_the_shape() -> None:
    same = [parse("image", {"size": "64x64", "seed": seed, "prompt": str(seed)}, LIMITS, DRAWS).likeness for seed in (1, 2)]
    other = parse("image", {"size": "64x32"}, LIMITS, DRAWS).likeness
    assert same[0] == same[1] != other
