"""/v1/images on real processes with a scripted painter, through the official client where it has the call."""

import asyncio
import base64
import io
import json

import aiohttp
import numpy as np
import openai
import pytest
from PIL import Image

from tests.gateway.pictures import claimed, picture, pixels

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


async def test_images_come_in_order_of_their_seeds(openai_studio):
    answer = await openai_studio.images.generate(
        model="gpt-image-1", prompt="a cat", n=3, size="64x32", extra_body={"seed": 100, "num_inference_steps": 2}
    )
    assert [pixels(base64.b64decode(image.b64_json))[0, 0].tolist() for image in answer.data] == [[s, 128, 64] for s in (100, 101, 102)]
    assert (answer.size, answer.output_format, answer.background) == ("64x32", "png", "opaque")
    assert [image.seed for image in answer.data] == [100, 101, 102]


@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
async def test_every_format_is_what_it_says(openai_studio, image_format):
    answer = await openai_studio.images.generate(prompt="a cat", output_format=image_format, output_compression=80)
    image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert (image.format, image.size, answer.output_format) == (image_format.upper(), (64, 48), image_format)


async def test_an_image_as_a_url_can_be_fetched_by_who_knows_it(openai_studio, studio_http):
    answer = await openai_studio.images.generate(prompt="a cat", response_format="url", output_format="webp", n=2)
    first, second = (image.url for image in answer.data)
    assert first != second
    async with studio_http.get(first) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "image/webp")
        assert pixels(await response.read()).shape == (48, 64, 3)
    for name in ("img_" + "0" * 32, "..", "img_..%2f..%2fitem.json"):
        async with studio_http.get(f"/v1/images/{name}") as response:
            assert response.status == 404


async def test_a_stream_is_partial_images_and_one_that_is_completed(openai_studio):
    stream = await openai_studio.images.generate(
        prompt="a cat", stream=True, partial_images=2, size="64x64", output_format="jpeg", extra_body={"num_inference_steps": 6}
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:-1]] == [0, 1]
    assert pixels(base64.b64decode(events[0].b64_json)).shape == (8, 8, 3)
    last = events[-1]
    assert (last.size, last.output_format, last.quality, last.usage.total_tokens) == ("64x64", "jpeg", "auto", 0)
    assert pixels(base64.b64decode(last.b64_json)).shape == (64, 64, 3)


async def test_an_edit_repaints_what_is_transparent_in_the_mask(openai_studio):
    mask = Image.new("RGBA", (32, 16), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 16, 16))
    file = io.BytesIO()
    mask.save(file, "PNG")
    answer = await openai_studio.images.edit(
        image=("a.png", picture()), mask=("m.png", file.getvalue()), prompt="a hat", n=1, extra_body={"seed": 9}
    )
    made = pixels(base64.b64decode(answer.data[0].b64_json))
    assert (made[:, :16] == (9, 128, 64)).all()
    assert (made[:, 16:] == (10, 20, 30)).all()


async def test_an_edit_of_several_images_streams(openai_studio):
    stream = await openai_studio.images.edit(
        image=[("a.png", picture()), ("b.webp", picture(image_format="WEBP"))], prompt="both", stream=True, partial_images=1
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


async def test_a_photo_is_seen_upright(openai_studio):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    photo = picture(32, 16, image_format="JPEG", exif=exif)
    answer = await openai_studio.images.edit(image=("a.jpg", photo), prompt="a hat")
    assert answer.size == "16x32"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"size": "9999999x64"}, 400, "size"),
        ({"size": "2048x8"}, 400, "size"),
        ({"size": "1024x1024"}, 400, "size"),
        ({"size": "60x60"}, 400, "size"),
        ({"size": "0x64"}, 400, "size"),
        ({"size": "big"}, 400, "size"),
        ({"n": 0}, 400, "n"),
        ({"n": 5}, 400, "n"),
        ({"n": 10**30}, 400, "n"),
        ({"num_inference_steps": 101}, 400, "num_inference_steps"),
        ({"guidance_scale": -1}, 400, "guidance_scale"),
        ({"seed": -1}, 400, "seed"),
        ({"prompt": " "}, 400, "prompt"),
        ({"prompt": "x" * 32_001}, 400, "prompt"),
        ({"negative_prompt": "x" * 32_001}, 400, "negative_prompt"),
        ({"background": "transparent"}, 400, "background"),
        ({"output_format": "gif"}, 400, "output_format"),
        ({"output_compression": 101}, 400, "output_compression"),
        ({"partial_images": 4, "stream": True}, 400, "partial_images"),
        ({"partial_images": 1}, 400, "partial_images"),
        ({"response_format": "url", "stream": True}, 400, "response_format"),
        ({"style": "vivid"}, 400, "style"),
        ({"model": "flux"}, 404, "model"),
    ],
    ids=str,
)
async def test_what_can_not_be_drawn_is_refused_before_any_work(studio_http, body, status, param):
    async with studio_http.post(GENERATIONS, json={"prompt": "a cat", **body}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["type"]) == (status, param, "invalid_request_error")


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({}, "image"),
        ({"image": b""}, "image"),
        ({"image": b"no image at all"}, "image"),
        ({"image": picture()[:60]}, "image"),
        ({"image": picture(image_format="GIF", mode="L", colour=1)}, "image"),
        ({"image": claimed(60_000, 60_000)}, "image"),
        ({"image": picture(1024, 1024)}, "image"),
        ({"image": picture(), "mask": picture(16, 16)}, "mask"),
        ({"image": picture(), "mask": b"broken"}, "mask"),
    ],
    ids=range(9),
)
async def test_a_broken_upload_is_a_400_that_names_it(studio_http, files, param):
    form = aiohttp.FormData({"prompt": "a hat"}, default_to_multipart=True)
    for name, data in files.items():
        form.add_field(name, data, filename=f"{name}.png")
    async with studio_http.post(EDITS, data=form) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)


async def test_a_form_of_very_many_parts_is_a_400(studio_http):
    form = aiohttp.FormData([("prompt", "a hat")] * 129, default_to_multipart=True)
    async with studio_http.post(EDITS, data=form) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "the body: got more than 128 parts")


async def test_an_upload_over_the_limit_is_a_413(openai_studio):
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    with pytest.raises(openai.APIStatusError) as refused:
        await openai_studio.images.edit(image=("a.png", file.getvalue()), prompt="a hat")
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


async def test_a_stage_that_fails_is_a_500_or_the_last_event(studio_http):
    async with studio_http.post(GENERATIONS, json={"prompt": "fail at 2"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (500, "stage_failed")
    async with studio_http.post(GENERATIONS, json={"prompt": "fail at 3", "stream": True, "partial_images": 3}) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert [event.get("type", "") for event in events[:-1]] == ["image_generation.partial_image"] * 2
    assert events[-1]["error"]["code"] == "stage_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_work(studio_http, work_of, stream):
    body = {"prompt": "20 ms", "num_inference_steps": 100, "n": 4, "stream": stream, "partial_images": 3 * stream}
    asking = asyncio.create_task(studio_http.post(GENERATIONS, json=body))
    await work_of("painter", running=1)
    if stream:
        (await asking).close()
    asking.cancel()
    async with asyncio.timeout(2):  # the work would take 8 s
        await work_of("painter", running=0)


async def test_images_at_once_do_not_meet(openai_studio):
    async def colour(seed):
        answer = await openai_studio.images.generate(prompt="a cat", extra_body={"seed": seed})
        return pixels(base64.b64decode(answer.data[0].b64_json))[0, 0, 0]

    seeds = range(20, 32)
    assert await asyncio.gather(*map(colour, seeds)) == list(seeds)
