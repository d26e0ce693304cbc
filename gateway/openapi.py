"""The URL table's row, and /openapi.json made from the table. Pure.

Source: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gateway.errors import TABLE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """One URL. `body`, `files` and `answers` say what goes in and out, for the spec."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    files: tuple[str, ...] = ()  # the body is multipart/form-data with these files; the first is needed
    answers: tuple[str, ...] = ("application/json",)
    is_open: bool = False  # needs no API key


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": sorted({row.type for row in TABLE.values()})},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def document(routes: Sequence[Route], version: str, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `routes`."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "streamrt", "version": version},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR_SCHEMA}},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(route: Route, schema_of: dict[type[msgspec.Struct], dict[str, Any]], needs_key: bool) -> dict[str, Any]:
    upgrade = route.answers == ("websocket",)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "101" if upgrade else "200": {"description": "OK"}
            if upgrade
            else {"description": "OK", "content": {kind: {} for kind in route.answers}},
            "default": {"description": "Error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}},
        },
    }
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if route.body is not None and route.files:
        binary = {"type": "string", "format": "binary"}
        file = {"type": "object", "required": [route.files[0]], "properties": dict.fromkeys(route.files, binary)}
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": {"allOf": [schema_of[route.body], file]}}},
        }
    elif route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[route.body]}}}
    if needs_key and not route.is_open:
        operation["security"] = [{"key": []}]
    return operation
