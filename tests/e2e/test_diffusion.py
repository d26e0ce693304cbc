"""Real pipelines of diffusers, tiny and of random weights, behind the gateway: images, a video with sound and a sound as clients see them."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import openai
import pytest
from openai._legacy_response import HttpxBinaryResponseContent
from PIL import Image

pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from streamrt import Pipeline  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"),
]

STAGE = """
[[stage]]
name = "{name}"
use = "diffusion.pipeline"
[stage.args]
model = "{folder}"
task = "{task}"
max_steps = 30
max_side = 512
"""
MADE = {"painter": "dit", "camera": "ltx2", "synth": "stableaudio"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("tiny")
    text = '[pipeline]\nname = "tiny-diffusion"\n[gateway]\nport = 0\n[run]\nheartbeat_s = 0.2\n'
    for name, kind in MADE.items():
        text += STAGE.format(name=name, folder=build(kind, folder / kind), task=PIPELINES[kind].task)
        text += 'cache = "taylorseer"\n' if name == "painter" else ""
    (folder / "pipeline.toml").write_text(text)
    with Pipeline(folder / "pipeline.toml", gateway=True) as pipeline:
        yield pipeline


@pytest.fixture
def client(running: Pipeline) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(name: str, **more: Any) -> dict[str, Any]:
    """What the tiny pipeline of that stage is asked in its own tests, as extensions of the body."""
    params = {"num_inference_steps": 3, **PIPELINES[MADE[name]].params, **more}
    params.pop("prompt", None)
    if "width" in params:
        params["size"] = f"{params.pop('width')}x{params.pop('height')}"
    return params


def pixels(b64: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB"))


def test_an_image_of_one_seed_is_the_same_alone_and_among_others(client: openai.OpenAI) -> None:
    params = asked("painter", seed=5)
    alone = client.images.generate(prompt="", extra_body=params)
    among = client.images.generate(prompt="", n=3, extra_body={**params, "seed": 3})
    assert (pixels(alone.data[0].b64_json) == pixels(among.data[2].b64_json)).all()
    assert [image.seed for image in among.data] == [3, 4, 5]  # type: ignore[attr-defined]


def test_a_streamed_image_has_partial_images(client: openai.OpenAI) -> None:
    params = asked("painter", num_inference_steps=8)
    events = list(client.images.generate(prompt="", stream=True, partial_images=2, extra_body=params))
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]


def test_a_quality_decides_whether_a_cache_is_used(client: openai.OpenAI) -> None:
    params = asked("painter", seed=5, num_inference_steps=8)
    drawn = {
        quality: pixels(client.images.generate(prompt="", quality=quality, extra_body=params).data[0].b64_json)  # type: ignore[arg-type]
        for quality in ("auto", "hd", "high", "low")
    }
    assert (drawn["auto"] == drawn["hd"]).all()
    assert (drawn["low"] != drawn["hd"]).any()
    assert np.abs(drawn["high"].astype(int) - drawn["hd"]).mean() <= np.abs(drawn["low"].astype(int) - drawn["hd"]).mean()


def test_what_the_model_can_not_do_is_a_400(client: openai.OpenAI) -> None:
    for refused, param in (
        ({"num_inference_steps": 31}, "num_inference_steps"),
        ({"negative_prompt": "ugly"}, "negative_prompt"),
        ({"class_label": 99}, "class_label"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.images.generate(prompt="", extra_body=asked("painter", **refused))
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError) as error:
        client.images.generate(prompt="", size="1024x1024", extra_body=asked("painter"))
    assert error.value.param == "size"


def test_a_video_job_has_pictures_and_sound(client: openai.OpenAI) -> None:
    job = client.videos.create(prompt="a cat", extra_body=asked("camera"))
    job = client.videos.poll(job.id, poll_interval_ms=200)
    assert (job.status, job.error) == ("completed", None)
    data = client.videos.download_content(job.id).content
    with av.open(io.BytesIO(data)) as container:
        assert [stream.type for stream in container.streams] == ["video", "audio"]
        assert container.streams.audio[0].codec_context.channels == 2
        assert sum(1 for _ in container.decode(video=0)) == PIPELINES["ltx2"].params["num_frames"]


def test_deleting_a_video_stops_the_model_within_a_step(client: openai.OpenAI, running: Pipeline) -> None:
    job = client.videos.create(prompt="a cat", extra_body=asked("camera", num_inference_steps=30))
    while client.videos.retrieve(job.id).progress < 10:
        time.sleep(0.05)
    client.videos.delete(job.id)
    started = time.monotonic()
    again = client.videos.create(prompt="a dog", extra_body=asked("camera", num_inference_steps=1))
    again = client.videos.poll(again.id, poll_interval_ms=50)
    assert again.status == "completed"
    assert time.monotonic() - started < 20


def test_a_sound_is_a_stereo_file(client: openai.OpenAI) -> None:
    body = {"input": "a bell", **asked("synth")}
    body["audio_length"] = body.pop("seconds")
    made = client.post("/audio/generate", body=body, cast_to=HttpxBinaryResponseContent)
    with av.open(io.BytesIO(made.content)) as container:
        assert container.streams.audio[0].codec_context.channels == 2
        assert sum(frame.samples for frame in container.decode(audio=0)) == 4  # the longest that this tiny model makes
