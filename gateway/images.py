"""POST /v1/images/generations and /v1/images/edits: prompt and images -> images, through the `image` task; GET /v1/images/{image}.

Source: https://platform.openai.com/docs/api-reference/images and /images-streaming
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from aiohttp import web

from gateway import generation, models, pixels, schema, sse, streaming
from gateway.errors import Refused
from gateway.forms import Form, read_form
from gateway.limits import read_body
from gateway.schema import ImageBody, ImageEditForm
from gateway.state import CLIENT, CONFIG, MEDIA, STORE
from streamrt.errors import BadRequest, StageFailed

if TYPE_CHECKING:
    from gateway.media import MediaPool
    from gateway.store import Store
    from streamrt import Call, Chunk

# The stages count no tokens.
USAGE = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}, "output_tokens": 0, "total_tokens": 0}


async def generations(request: web.Request) -> web.StreamResponse:
    """POST /v1/images/generations"""
    body = schema.decode(await read_body(request), ImageBody)
    return await _answer(request, body, None, "image_generation")


async def edits(request: web.Request) -> web.StreamResponse:
    """POST /v1/images/edits"""
    form = await read_form(request, files=("image", "mask"))
    return await _answer(request, schema.convert_form(form.fields, ImageEditForm), form, "image_edit")


async def get_image(request: web.Request) -> web.StreamResponse:
    """GET /v1/images/{image}: an image that was answered as a URL. Its name is 128 random bits, so it needs no key."""
    store, pool = request.app[STORE], request.app[MEDIA]
    item = await pool.run(store.get, request.match_info["image"])
    if item is None or not item.id.startswith("img_"):
        raise Refused(404, "there is no such image, or no more")
    return web.FileResponse(store.content(item), headers={"Content-Type": item.content_type, "Cache-Control": "private, immutable"})


async def _answer(request: web.Request, body: ImageBody, form: Form | None, event: str) -> web.StreamResponse:
    client, config, pool = request.app[CLIENT], request.app[CONFIG], request.app[MEDIA]
    # 1. What is wrong with it, before any stage hears of it.
    models.check_model(client, "image", body.model or "")
    if body.stream and body.response_format == "url":
        raise BadRequest('response_format: got "url" with stream, expected "b64_json"', param="response_format")
    if body.partial_images and not body.stream:
        raise BadRequest("partial_images: they come with stream only", hint='"stream": true', param="partial_images")
    facts = generation.facts_of(client, "image")
    params = generation.params_of(
        body, body.prompt, facts, n=body.n, size=body.size, previews=body.partial_images, strength=getattr(body, "strength", None)
    )
    generation.check_takes_image(facts, form is not None, "image")
    inputs = [] if form is None else await read_inputs(form, facts.get("max_pixels", pixels.MAX_PIXELS), pool)
    # 2. Ask.
    call = await client.submit("image", params, inputs, outputs={"image"}, timeout_s=config.request_timeout_s)
    # 3. Answer.
    if body.stream:
        return await streaming.event_response(request, image_events(call, body, event, pool))
    images = await drawn(call, body, pool)
    answer: dict[str, Any] = {"created": int(time.time()), "data": [{"seed": image.seed} for image in images], "background": "opaque"}
    for image, datum in zip(images, answer["data"], strict=True):
        if body.response_format == "url":
            item_id = await pool.run(_keep, request.app[STORE], image.file, pixels.IMAGE_TYPES[format_of(body)])
            datum["url"] = f"{request.scheme}://{request.host}/v1/images/{item_id}"
        else:
            datum["b64_json"] = await pool.run(_base64, image.file)
    answer |= {"output_format": format_of(body), "size": images[0].size, "usage": USAGE}
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


class Image:
    """One image, encoded."""

    def __init__(self, chunk: Chunk, file: bytes) -> None:
        height, width = chunk.tensors["image"].shape[:2]
        self.size = f"{width}x{height}"
        self.seed = chunk.meta.get("seed")
        self.index = int(chunk.meta.get("index", 0))
        self.is_preview = bool(chunk.meta.get("preview"))
        self.file = file


async def read_inputs(form: Form, max_pixels: int, pool: MediaPool) -> list[Chunk]:
    """The images of a form, checked, and the mask. Raises BadRequest."""
    files = form.files.get("image", [])
    if not files:
        raise BadRequest("image: missing", hint="send it as the form field 'image'", param="image")
    uploads = [await pool.run(lambda file=file: pixels.read_image(file, max_pixels=max_pixels, param="image")) for file in files]
    chunks = [generation.image_chunk(upload.file, "image") for upload in uploads]
    if "mask" in form.files:
        mask, first = form.file("mask", "send one"), uploads[0]
        size = {"width": first.width, "height": first.height}
        chunks.append(
            generation.image_chunk(await pool.run(lambda: pixels.read_mask(mask, **size, max_pixels=max_pixels, param="mask")), "mask")
        )
    return chunks


async def images_of(call: Call, body: ImageBody, pool: MediaPool) -> AsyncGenerator[Image, None]:
    """Previews and images as they come, encoded. Raises StageFailed when none comes."""
    count = 0
    async with aclosing(streaming.chunks_of(call)) as chunks:
        async for chunk in chunks:
            if "image" in chunk.tensors:
                array: np.ndarray = chunk.tensors["image"]
                compression = 100 if body.output_compression is None else body.output_compression
                image = Image(chunk, await pool.run(pixels.encode_image, array, format_of(body), compression))
                count += not image.is_preview
                yield image
    if not count:
        raise StageFailed("the stage gave no image")


async def drawn(call: Call, body: ImageBody, pool: MediaPool) -> list[Image]:
    """The images, in order of their index."""
    async with aclosing(images_of(call, body, pool)) as images:
        return sorted([image async for image in images if not image.is_preview], key=lambda image: image.index)


async def image_events(call: Call, body: ImageBody, event: str, pool: MediaPool) -> AsyncGenerator[bytes, None]:
    """`<event>.partial_image` events, and one `<event>.completed` for each image."""
    partials = 0
    async with aclosing(images_of(call, body, pool)) as images:
        async for image in images:
            told = {
                "type": f"{event}.partial_image" if image.is_preview else f"{event}.completed",
                "b64_json": await pool.run(_base64, image.file),
                "created_at": int(time.time()),
                "size": image.size,
                "quality": body.quality or "auto",
                "background": "opaque",
                "output_format": format_of(body),
            }
            if image.is_preview:
                told["partial_image_index"] = partials
                partials += 1
            else:
                told |= {"usage": USAGE, "seed": image.seed}
            yield sse.data(told)


def format_of(body: ImageBody) -> str:
    return body.output_format or "png"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _keep(store: Store, data: bytes, content_type: str) -> str:
    """Store an image; its name."""
    item = store.create("img", {}, content_type)
    store.append(item, data)
    store.finish(item)
    return item.id
