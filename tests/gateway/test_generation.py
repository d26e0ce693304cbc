"""What may be asked of stages, by what they say of themselves. Pure; the same over a socket is in test_images.py and test_videos.py."""

import pytest

from gateway.generation import check, check_takes_image, quality_of, together
from streamrt.errors import BadRequest


@pytest.mark.parametrize(
    ("asked", "known", "given"),
    [
        (None, ["lossless"], None),
        ("auto", ["lossless", "fast"], None),
        ("low", ["lossless", "fast"], "fast"),
        ("low", ["lossless"], "lossless"),
        ("fast", ["lossless", "high"], "high"),
        ("medium", ["lossless", "fast"], "lossless"),
        ("standard", ["lossless", "high"], "high"),
        ("high", ["lossless", "high", "fast"], "high"),
        ("high", ["lossless", "fast"], "lossless"),
        ("hd", ["lossless", "high"], "lossless"),
        ("max", [], "lossless"),
    ],
)
def test_a_quality_is_a_floor(asked, known, given):
    assert quality_of(asked, known) == given


def test_stages_on_one_way_speak_together():
    encoder = {"max_steps": 100, "qualities": ["lossless"], "pipeline": "Flux", "needs_image": False}
    denoiser = {"max_steps": 20, "qualities": ["lossless", "fast"], "pipeline": "Other", "fps": 8.0}
    assert together([encoder, {}, denoiser]) == {
        "max_steps": 20,
        "qualities": ["lossless", "fast"],
        "pipeline": "Flux",
        "needs_image": False,
        "fps": 8.0,
    }


@pytest.mark.parametrize(
    ("params", "facts", "param"),
    [
        ({"seconds": 11}, {"max_frames": 80, "fps": 8.0, "max_seconds": 300}, "seconds"),
        ({"seconds": 11, "fps": 4.0}, {"max_frames": 40, "fps": 1.0, "max_seconds": 300}, "seconds"),
        ({"seconds": 11}, {"max_frames": 80, "max_seconds": 10}, "seconds"),
        ({"size": "65x64"}, {"size_multiple": 16}, "size"),
        ({"size": "64x64"}, {"max_pixels": 4095}, "size"),
        ({"size": "64x64x64"}, {}, "size"),
        ({"n": 2}, {"max_images": 1}, "n"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(params, facts, param):
    with pytest.raises(BadRequest) as refused:
        check({"prompt": "a", **params}, facts)
    assert refused.value.param == param


def test_what_a_stage_does_not_say_is_left_to_it():
    check({"prompt": "a", "size": "9000x9000", "n": 99, "seconds": 1e6, "num_inference_steps": 10**6}, {})
    check({"prompt": "", "class_label": 3}, {})


def test_an_image_is_given_where_it_is_needed():
    check_takes_image({"needs_image": True, "accepts": ["image"]}, True, "image")
    check_takes_image({}, True, "image")
    for facts, given in (({"needs_image": True}, False), ({"accepts": ["prompt"]}, True)):
        with pytest.raises(BadRequest):
            check_takes_image(facts, given, "image")
