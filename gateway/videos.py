"""/v1/videos: prompt, and perhaps a first image -> video, through the `video` task; as a job, or in one answer at /v1/videos/sync.

Source: https://platform.openai.com/docs/api-reference/videos
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web

from gateway import film, generation, jobs, models, pixels, schema, streaming
from gateway.errors import Refused
from gateway.film import Film
from gateway.forms import Form, read_form
from gateway.jobs import Ask
from gateway.limits import read_body
from gateway.schema import VideoBody
from gateway.state import CLIENT, CONFIG, JOBS, MEDIA, STORE
from streamrt.errors import BadRequest

if TYPE_CHECKING:
    from gateway.store import Item

POLL_AFTER_MS = "500"  # how long the SDK's poll waits between two looks
FILE = "input_reference"


class ListQuery(msgspec.Struct):
    """What GET /v1/videos may be asked."""

    after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


async def create(request: web.Request) -> web.Response:
    """POST /v1/videos"""
    item = await request.app[JOBS].create(await _read(request))
    return _job(item)


async def sync(request: web.Request) -> web.StreamResponse:
    """POST /v1/videos/sync: the file itself, as it is made."""
    ask = await _read(request)
    call = await request.app[CLIENT].submit(
        "video", ask.params, ask.inputs, outputs=ask.outputs, timeout_s=request.app[CONFIG].job_timeout_s
    )
    return await streaming.byte_response(request, _file(Film(call, request.app[MEDIA], ask.audio_hz)), pixels.VIDEO_TYPE)


async def list_videos(request: web.Request) -> web.Response:
    """GET /v1/videos"""
    query = schema.convert_form(dict(request.query), ListQuery)
    items = [item for item in await request.app[MEDIA].run(request.app[STORE].items) if item.id.startswith(jobs.KIND)]
    if query.order == "desc":
        items.reverse()
    if query.after:
        names = [item.id for item in items]
        if query.after not in names:
            raise BadRequest(f'after: there is no video "{query.after[:80]}"', param="after")
        items = items[names.index(query.after) + 1 :]
    page = items[: query.limit]
    data = [jobs.told(item) for item in page]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return web.json_response({"object": "list", "data": data, **ends, "has_more": len(items) > len(page)})


async def get_video(request: web.Request) -> web.Response:
    """GET /v1/videos/{video}"""
    return _job(await _item(request))


async def content(request: web.Request) -> web.StreamResponse:
    """GET /v1/videos/{video}/content"""
    item = await _item(request)
    if (variant := request.query.get("variant", "video")) != "video":
        raise BadRequest(f'variant: got "{variant[:80]}", expected "video"', param="variant")
    if (status := jobs.told(item)["status"]) != "completed":
        raise Refused(409, f"the video is {status}, not completed")
    headers = {"Content-Type": item.content_type, "Content-Disposition": f'attachment; filename="{item.id}.mp4"'}
    return web.FileResponse(request.app[STORE].content(item), headers=headers)


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/videos/{video}: its work stops within one step."""
    item = await _item(request)
    await request.app[JOBS].delete(item)
    return web.json_response({"id": item.id, "object": "video.deleted", "deleted": True})


def _job(item: Item) -> web.Response:
    return web.json_response(jobs.told(item), headers={"openai-poll-after-ms": POLL_AFTER_MS})


async def _item(request: web.Request) -> Item:
    name = request.match_info["video"]
    item: Item | None = await request.app[MEDIA].run(request.app[STORE].get, name)
    if item is None or not item.id.startswith(jobs.KIND):
        raise Refused(404, f'there is no video "{name[:80]}", or no more')
    return item


async def _file(made: Film) -> AsyncGenerator[bytes, None]:
    """The pieces of a film, without its news: the status waits for the first."""
    async with aclosing(made.pieces()) as pieces:
        async for piece in pieces:
            if piece:
                yield piece


async def _read(request: web.Request) -> Ask:
    """The body, checked before any stage hears of it. Raises what a body can be wrong in."""
    client, pool = request.app[CLIENT], request.app[MEDIA]
    form = Form({}, {})
    if request.content_type == "multipart/form-data":
        form = await read_form(request, files=(FILE,))
        body = schema.convert_form(form.fields, VideoBody)
    else:
        body = schema.decode(await read_body(request), VideoBody, strict=False)
    model = models.check_model(client, "video", body.model or "")
    if body.seconds is not None and body.num_frames is not None:
        raise BadRequest("num_frames: got seconds beside it, expected one or the other", param="num_frames")
    facts = generation.facts_of(client, "video")
    params = generation.params_of(body, body.prompt, facts, size=body.size, seconds=body.seconds, num_frames=body.num_frames, fps=body.fps)
    file = _reference(form, body)
    generation.check_takes_image(facts, file is not None, FILE)
    inputs = []
    if file is not None:
        max_pixels = facts.get("max_pixels", pixels.MAX_PIXELS)
        upload = await pool.run(lambda: pixels.read_image(file, max_pixels=max_pixels, param=FILE))
        inputs.append(generation.image_chunk(upload.file, "image"))
    outputs, audio_hz = film.outputs_of(client.tasks()["video"].outputs, facts)
    return Ask(model, params, inputs, outputs, audio_hz)


def _reference(form: Form, body: VideoBody) -> bytes | None:
    """The image to start from: a file of the form, or a data: URL."""
    if FILE in form.files:
        return form.file(FILE, "send one")
    if body.input_reference is None:
        return None
    head, comma, data = body.input_reference.image_url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise BadRequest(f"{FILE}.image_url: expected a data: URL in base64; nothing is fetched", param=f"{FILE}.image_url")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"{FILE}.image_url: got no base64 ({error})", param=f"{FILE}.image_url") from None
