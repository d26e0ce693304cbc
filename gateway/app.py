"""The gateway as a whole: the URL table, start and drain.

    middlewares: envelope (id, log line, error body) -> admission (origin, key, room) -> handler

Knows which handler serves which URL. `serve` is started by import string, "gateway:serve", in the gateway process.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from gateway import chat, completions, health, limits, speech, transcriptions
from gateway.gate import Gate
from gateway.media import MediaPool
from gateway.openapi import Route
from gateway.realtime import realtime
from gateway.schema import ChatBody, CompletionBody, SpeechBody, TranscriptionForm
from gateway.state import CLIENT, CONFIG, GATE, MEDIA, ROUTES
from streamrt.errors import ConfigError
from streamrt.log import get_logger

if TYPE_CHECKING:
    from streamrt import Client
    from streamrt.config import GatewayConfig

log = get_logger("gateway")

KEEPALIVE_S = 75.0  # an open connection that says nothing, its first request included
BACKLOG = 512
SSE = "text/event-stream"
AUDIO = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm", SSE)

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
    Route("POST", "/v1/audio/transcriptions", transcriptions.transcriptions, "Speech to text", body=TranscriptionForm, form=True,
          answers=("application/json", "text/plain", "text/vtt", SSE)),
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
    for route in TABLE:
        app.router.add_route(route.method, route.path, route.handler)
    if health.WEB.is_dir():
        app.router.add_static("/static", health.WEB)
    app.on_response_prepare.append(limits.on_prepare)
    app.on_cleanup.append(_close_media)
    return app


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
