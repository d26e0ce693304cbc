"""The gateway as a whole: the URL table, start and drain.

    middlewares: envelope (id, log line, error body) -> admission (origin, key, room) -> handler

Knows which handler serves which URL. `serve` is started by import string, "gateway:serve", in the gateway process.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from gateway import chat, completions, health, images, limits, sounds, speech, transcriptions, videos
from gateway.gate import Gate
from gateway.jobs import VideoJobs
from gateway.media import MediaPool
from gateway.openapi import Route
from gateway.realtime import realtime
from gateway.schema import ChatBody, CompletionBody, ImageBody, ImageEditForm, SoundBody, SpeechBody, TranscriptionForm, VideoBody
from gateway.state import CLIENT, CONFIG, GATE, JOBS, MEDIA, ROUTES, STORE
from gateway.store import Store
from streamrt.errors import ConfigError
from streamrt.log import get_logger

if TYPE_CHECKING:
    from streamrt import Client
    from streamrt.config import GatewayConfig

log = get_logger("gateway")

KEEPALIVE_S = 75.0  # an open connection that says nothing, its first request included
BACKLOG = 512
SSE = "text/event-stream"
SOUND = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm")
AUDIO = (*SOUND, SSE)
IMAGE = ("image/png", "image/jpeg", "image/webp")

TABLE = (
    Route("GET", "/", health.page, "The web page", answers=("text/html",), is_open=True),
    Route("GET", "/health", health.health, "Whether this process answers", is_open=True),
    Route("GET", "/ready", health.ready, "Whether each stage can work", is_open=True),
    Route("GET", "/metrics", health.metrics, "Prometheus metrics of all processes", answers=("text/plain",)),
    Route("GET", "/openapi.json", health.spec, "This document", is_open=True),
    Route("GET", "/v1/models", health.list_models, "The names that the pipeline answers to"),
    Route("GET", "/v1/models/{model}", health.get_model, "One of them"),
    Route("POST", "/v1/chat/completions", chat.completions, "Messages to text and speech", body=ChatBody, answers=("application/json", SSE)),
    Route("POST", "/v1/completions", completions.completions, "Prompts to the text that follows", body=CompletionBody, answers=("application/json", SSE)),
    Route("POST", "/v1/audio/speech", speech.speech, "Text to speech", body=SpeechBody, answers=AUDIO),
    Route("GET", "/v1/audio/voices", speech.list_voices, "The voices that speak"),
    Route("POST", "/v1/audio/transcriptions", transcriptions.transcriptions, "Speech to text", body=TranscriptionForm,
          files=("file",), answers=("application/json", "text/plain", "text/vtt", SSE)),
    Route("POST", "/v1/audio/generate", sounds.generate, "A description to sound or music", body=SoundBody, answers=SOUND),
    Route("POST", "/v1/images/generations", images.generations, "A prompt to images", body=ImageBody, answers=("application/json", SSE)),
    Route("POST", "/v1/images/edits", images.edits, "Images and a prompt to images", body=ImageEditForm, files=("image", "mask"),
          answers=("application/json", SSE)),
    Route("GET", "/v1/images/{image}", images.get_image, "An image that was answered as a URL", answers=IMAGE, is_open=True),
    Route("POST", "/v1/videos", videos.create, "A prompt to a video, as a job", body=VideoBody),
    Route("GET", "/v1/videos", videos.list_videos, "The video jobs"),
    Route("POST", "/v1/videos/sync", videos.sync, "A prompt to a video, in one answer", body=VideoBody, answers=("video/mp4",)),
    Route("GET", "/v1/videos/{video}", videos.get_video, "One video job"),
    Route("GET", "/v1/videos/{video}/content", videos.content, "Its file", answers=("video/mp4",)),
    Route("DELETE", "/v1/videos/{video}", videos.delete, "Stop and forget it"),
    Route("GET", "/v1/realtime", realtime, "A voice session (WebSocket)", answers=("websocket",)),
    Route("GET", "/api/pipeline", health.pipeline, "Stages, edges and replicas now"),
    Route("GET", "/api/pipeline/events", health.pipeline_events, "The same on each change", answers=(SSE,)),
)  # fmt: skip


def build_app(client: Client, config: GatewayConfig | None = None) -> web.Application:
    """The application over `client`, without sockets. `config` stands in for the pipeline's own.

    Raises ConfigError when an API key is asked for and not in the environment.
    """
    config = config or client.pipeline.gateway
    app = web.Application(
        middlewares=[limits.envelope, limits.admission(config, limits.api_key(config))],
        client_max_size=config.max_body_bytes,
    )
    app[CLIENT], app[CONFIG], app[ROUTES] = client, config, TABLE
    app[GATE], app[MEDIA] = Gate(config.max_requests), MediaPool()
    folder = client.member.run.state / "store"
    app[STORE] = Store(folder, max_items=config.max_stored, max_bytes=config.max_stored_bytes, ttl_s=config.stored_ttl_s)
    app[JOBS] = VideoJobs(client, app[STORE], app[MEDIA], app[GATE], config.job_timeout_s)
    for route in TABLE:
        app.router.add_route(route.method, route.path, route.handler)
    if health.WEB.is_dir():
        app.router.add_static("/static", health.WEB)
    app.on_response_prepare.append(limits.on_prepare)
    app.cleanup_ctx.append(_with_jobs)
    app.on_cleanup.append(_close_media)
    return app


async def _with_jobs(app: web.Application) -> AsyncIterator[None]:
    sweeping = asyncio.create_task(app[JOBS].sweep(), name="store.sweep")
    yield
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    await app[JOBS].close()


async def _close_media(app: web.Application) -> None:
    app[MEDIA].close()


async def serve(
    client: Client, replica: int, ready: Callable[[str], None], stop: asyncio.Event, config: GatewayConfig | None = None
) -> None:
    """Serve until `stop`, then drain within `[run] drain_s`.

    Calls `ready` with the address once it listens. Raises ConfigError for a host, port, key or certificate that can not be used.
    """
    config = config or client.pipeline.gateway
    limits.check_bind(config, limits.api_key(config))
    tls = tls_context(config)
    runner = web.AppRunner(
        build_app(client, config), handler_cancellation=True, keepalive_timeout=KEEPALIVE_S, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        http = runner.server
        assert http is not None
        listener = listen(config)
        address = address_of(listener, secure=tls is not None)
        factory = limits.bounded(http, config.max_connections)
        client.gauges["streamrt_http_connections"] = lambda: len(http.connections)
        server = await asyncio.get_running_loop().create_server(factory, sock=listener, ssl=tls, backlog=BACKLOG)
        try:
            log.info("gateway.listening", address=address, replica=replica)
            ready(address)
            await stop.wait()
        finally:
            server.close()
        await runner.app[GATE].close(client.pipeline.run.drain_s)
    finally:
        await runner.cleanup()


def listen(config: GatewayConfig) -> socket.socket:
    """A bound socket. Raises ConfigError when the address can not be had."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f'gateway.host: got "{config.host}", expected an address of this machine ({error.strerror})') from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.replicas > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # A client that stops reading is closed by the kernel too: it holds for answers that aiohttp writes in one piece.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.slow_client_s * 1000))
        listener.bind(where)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = "another program listens there; set [gateway] port, or 0 for a free one" if in_use else ""
        raise ConfigError(
            f"gateway.port: {config.host}:{config.port} can not be used: {error.strerror}", hint=hint, param="gateway.port"
        ) from None
    return listener


def address_of(listener: socket.socket, *, secure: bool) -> str:
    """Where a browser on this machine finds the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if secure else 'http'}://{host}:{port}"


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """The certificate, None for plain HTTP. Raises ConfigError for a file that can not be read."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls_cert, gateway.tls_key: {config.tls_cert} and {config.tls_key} can not be used: {error}",
            hint="give a certificate and its key as PEM files",
        ) from None
    return context
