"""multipart/form-data bodies: files and text fields, read with all their bounds.

Knows HTTP. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from aiohttp import BodyPartReader, web

from gateway.errors import BodyTimeout, BodyTooLarge
from gateway.state import CONFIG
from streamrt.errors import BadRequest

READ_BYTES = 256 * 1024
MAX_PARTS = 128
NAME = re.compile(
    r"([^\[\]]+)(?:\[([^\[\]]*)\])?"
)  # "prompt"; "image[]", one of a list; "input_reference[image_url]", a field of an object


class Form(NamedTuple):
    """What was sent. Text of a field is text still: `schema.convert_form` makes it what it should be."""

    fields: dict[str, Any]  # str, list[str] or dict[str, str]
    files: dict[str, list[bytes]]

    def file(self, name: str, hint: str) -> bytes:
        """The one file of that name. Raises BadRequest."""
        files = self.files.get(name, [])
        if len(files) != 1:
            raise BadRequest(f"{name}: missing" if not files else f"{name}: got {len(files)} files, expected one", hint=hint, param=name)
        return files[0]


async def read_form(request: web.Request, files: Collection[str]) -> Form:
    """The whole body; parts named in `files` are files. Raises BadRequest, BodyTooLarge, BodyTimeout."""
    config = request.app[CONFIG]
    if request.content_type != "multipart/form-data":
        raise BadRequest(f"the body: got {request.content_type}, expected multipart/form-data")
    too_large = BodyTooLarge(f"the body is larger than {config.max_body_bytes} bytes", hint="[gateway] max_body sets the limit")
    if (request.content_length or 0) > config.max_body_bytes:
        raise too_large
    form = Form({}, {})
    left, parts = config.max_body_bytes, 0
    try:
        async with asyncio.timeout(config.request_timeout_s):
            async for part in await request.multipart():
                parts += 1
                if parts > MAX_PARTS:
                    raise BadRequest(f"the body: got more than {MAX_PARTS} parts")
                name = NAME.fullmatch(part.name or "") if isinstance(part, BodyPartReader) else None
                if name is None or not isinstance(part, BodyPartReader):
                    raise BadRequest("the body: each part needs a name")
                data = bytearray()
                while chunk := await part.read_chunk(READ_BYTES):
                    data += chunk
                    left -= len(chunk)
                    if left < 0:
                        raise too_large
                _add(form, name[1], name[2], bytes(data), is_file=name[1] in files and not name[2])
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {config.request_timeout_s:g} s") from None
    except ValueError as error:  # aiohttp's word for a broken multipart body, and ours for one that is not UTF-8
        raise BadRequest(f"the body is not valid multipart/form-data: {error}") from None
    return form


def _add(form: Form, name: str, key: str | None, data: bytes, *, is_file: bool) -> None:
    """One part. `key`: None for "name", "" for "name[]", else the key of "name[key]"."""
    if is_file:
        if not data:
            raise BadRequest(f"{name}: it is empty", param=name)
        form.files.setdefault(name, []).append(data)
        return
    text = data.decode()
    if key is None:
        form.fields[name] = text
        return
    kind = dict if key else list
    value = form.fields.setdefault(name, kind())
    if not isinstance(value, kind):
        raise BadRequest(f"{name}: got it in two shapes", param=name)
    if isinstance(value, dict):
        value[key] = text
    else:
        value.append(text)
