"""What the gateway says of itself and of the pipeline: liveness, readiness, metrics, models, the live picture, the spec.

Knows the replica table that the client holds. Asks no stage anything, so these answer while the stages are busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateway import models, openapi, sse, streaming
from gateway.errors import Refused
from gateway.state import CLIENT, CONFIG, GATE, ROUTES
from streamrt.errors import UnknownModel

if TYPE_CHECKING:
    from streamrt import Client

WEB = Path(__file__).parent / "web"
STARTED = int(time.time())
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def page(request: web.Request) -> web.FileResponse:
    """GET /"""
    index = WEB / "index.html"
    if not index.is_file():
        raise Refused(404, "the web page is not part of this installation")
    return web.FileResponse(index, headers={"Cache-Control": "no-cache"})


async def health(request: web.Request) -> web.Response:
    """GET /health: this process answers. It says nothing of the stages; /ready does."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when each stage has a ready replica, else 503."""
    stages = readiness(request.app[CLIENT])
    is_ready = all(stage["ready"] for stage in stages.values()) and not request.app[GATE].closed.is_set()
    return web.json_response({"ready": is_ready, "stages": stages}, status=200 if is_ready else 503)


def readiness(client: Client) -> dict[str, dict[str, Any]]:
    """Stage -> whether it has a ready replica, and the state of each."""
    stages: dict[str, dict[str, Any]] = {stage.name: {"ready": False, "replicas": {}} for stage in client.pipeline.stages}
    for replica in client.table.replicas:
        if replica.stage in stages:
            stages[replica.stage]["replicas"][replica.name] = replica.state
            stages[replica.stage]["ready"] |= replica.state == "ready"
    return stages


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: all processes of the run, in Prometheus text."""
    return web.Response(body=await request.app[CLIENT].metrics_text(), headers={"Content-Type": METRICS_TYPE})


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    return web.json_response({"object": "list", "data": list(catalogue(request.app[CLIENT]).values())})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}"""
    name = request.match_info["model"]
    model = catalogue(request.app[CLIENT]).get(name)
    if model is None:
        raise UnknownModel(f'the model "{name}" does not exist here', hint="GET /v1/models lists them", param="model")
    return web.json_response(model)


def catalogue(client: Client) -> dict[str, dict[str, Any]]:
    """Every name that the pipeline itself answers to, with the tasks that it may be asked for."""
    tasks: dict[str, list[str]] = {}
    for task in client.tasks():
        for name in models.own_names(client, task):
            tasks.setdefault(name, []).append(task)
    return {name: {"id": name, "object": "model", "created": STARTED, "owned_by": "streamrt", "tasks": of} for name, of in tasks.items()}


async def spec(request: web.Request) -> web.Response:
    """GET /openapi.json"""
    routes: tuple[openapi.Route, ...] = request.app[ROUTES]
    document = openapi.document(routes, _version(), needs_key=bool(request.app[CONFIG].api_key_env))
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


async def pipeline(request: web.Request) -> web.Response:
    """GET /api/pipeline: stages, edges and replicas as they are now."""
    return web.Response(body=msgspec.json.encode(picture(request.app[CLIENT])), content_type="application/json")


async def pipeline_events(request: web.Request) -> web.StreamResponse:
    """GET /api/pipeline/events: the same as an event stream, now and on each change of the replica table."""
    return await streaming.event_response(request, pictures(request.app[CLIENT], request.app[GATE].closed))


async def pictures(client: Client, closed: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """The picture, and again whenever it has changed, until `closed`."""
    last = b""
    ending = asyncio.ensure_future(closed.wait())
    try:
        while not closed.is_set():
            event = sse.data(picture(client))
            if event != last:
                yield event
                last = event
            changed = asyncio.ensure_future(client.table_changed())
            try:
                await asyncio.wait([changed, ending], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
    finally:
        ending.cancel()


def picture(client: Client) -> dict[str, Any]:
    """The pipeline for the page: stages in order, the edges between them, what each replica does."""
    config = client.pipeline
    replicas = [
        {
            "name": replica.name,
            "stage": replica.stage,
            "state": replica.state,
            "running": replica.info.get("running", 0),
            "queued": replica.info.get("queued", 0),
            "max_requests": replica.max_requests,
            "restarts": replica.restarts,
            "progress": replica.progress,
            "error": replica.error,
        }
        for replica in client.table.replicas
    ]
    return {
        "name": config.name,
        "stages": [
            {"name": stage.name, "use": stage.use, "model": client.describe(stage.name).get("model", "")} for stage in config.stages
        ],
        "edges": [{"from": edge.source, "port": edge.port, "to": edge.target, "modality": edge.modality} for edge in client.graph.edges],
        "tasks": {route.task: list(route.stages) for route in client.tasks().values()},
        "replicas": replicas,
        "gateways": list(client.table.gateways),
    }


def _version() -> str:
    try:
        return version("streamrt")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0"
