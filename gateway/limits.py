"""Who may come in, how many at a time, with how much, and for how long they may keep us waiting.

Knows HTTP. Knows nothing of tasks. What each bound is called in `pipeline.toml` stands in docs/http.md.

Rules
- Every refusal is one of `errors.py`, and costs the stages nothing.
- Origin: a browser page of another origin is refused unless `cors_origins` names it, WebSockets included; requests without an Origin
  (curl, SDKs) are not pages and pass.
- Each request has an id, on its response and on its one log line.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway import errors
from gateway.errors import BodyTimeout, BodyTooLarge, Forbidden, Refused, Unauthorized
from gateway.openapi import Handler
from gateway.state import CLIENT, CONFIG, GATE, ROUTES
from streamrt.errors import ConfigError, StreamrtError
from streamrt.log import get_logger

if TYPE_CHECKING:
    from streamrt.config import GatewayConfig

log = get_logger("gateway")

REQUEST_ID = web.RequestKey("request_id", str)
WS_KEY_PREFIX = "openai-insecure-api-key."  # browsers can not set headers on a WebSocket; they offer the key as a subprotocol
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
CORS_MAX_AGE_S = 600


# ---- middlewares, outermost first ------------------------------------------------------------------------------------------


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives each request its id, its one log line and its count, and turns what it raises into the one error body."""
    started = time.monotonic()
    request[REQUEST_ID] = _request_id(request.headers)
    status = 499  # until there is an answer: the client went away
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        route = path_of(request) or "unknown"  # of the URL table, so that the metric's labels are bounded
        ms = (time.monotonic() - started) * 1000
        log.info("request.done", id=request[REQUEST_ID], method=request.method, route=route, status=status, ms=ms)
        request.app[CLIENT].metrics.count("streamrt_http_requests_total", route, str(status))


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler returns, or the response for what it raises."""
    try:
        return await handler(request)
    except StreamrtError as error:
        return errors.response(error)
    except web.HTTPException as error:
        return errors.response(_from_http(error, request))
    except ConnectionError:  # the client went away while we wrote, or the answer broke off: nothing more may follow
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)
    except Exception:  # the server must outlive a fault in one handler; the client sees a 500 with the id to ask us about
        log.exception("request.fault", id=request[REQUEST_ID], path=request.path)
        return errors.response(StreamrtError(f"internal error; the log knows more under {request[REQUEST_ID]}"))


def admission(config: GatewayConfig, key: str) -> Middleware:
    """The middleware that checks origin, key and room, in this order. `key` "" asks for none."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and not is_allowed_origin(origin, request.host, config.cors_origins):
            raise Forbidden(f"pages of {origin} may not call this server", hint=f'set [gateway] cors_origins = ["{origin}"]')
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204)
        if (
            key
            and not is_open(request)
            and not any(hmac.compare_digest(given.encode(), key.encode()) for given in keys_of(request.headers))
        ):
            raise Unauthorized("the API key is missing or wrong", hint="send it as 'Authorization: Bearer KEY'")
        gate = request.app[GATE]
        if not is_counted(request):
            return await handler(request)
        with gate.enter():
            return await handler(request)

    return admit


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Headers that every response carries, and the list of open WebSockets."""
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    response.headers["X-Content-Type-Options"] = "nosniff"
    origin = request.headers.get("Origin")
    config = request.app[CONFIG]
    if config.cors_origins:
        response.headers["Vary"] = "Origin"
    if origin is not None and is_allowed_origin(origin, request.host, config.cors_origins):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = CORS_METHODS
            response.headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", "Authorization, Content-Type"
            )
            response.headers["Access-Control-Max-Age"] = str(CORS_MAX_AGE_S)
    gate = request.app[GATE]
    if gate.closed.is_set():
        response.headers["Connection"] = "close"
    if isinstance(response, web.WebSocketResponse):
        gate.check_open()
        gate.sockets = {ws for ws in gate.sockets if not ws.closed} | {response}


# ---- what they decide ------------------------------------------------------------------------------------------------------


def is_allowed_origin(origin: str, host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a page of `origin` may call a server that it knows as `host`."""
    return urlsplit(origin).netloc == host or origin in allowed or "*" in allowed


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """The API keys that a request shows."""
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    bearer = [value.strip()] if scheme.lower() == "bearer" else []
    offered = [protocol.strip() for protocol in headers.get("Sec-WebSocket-Protocol", "").split(",")]
    return bearer + [protocol.removeprefix(WS_KEY_PREFIX) for protocol in offered if protocol.startswith(WS_KEY_PREFIX)]


def path_of(request: web.Request) -> str:
    """The request's URL as the table writes it, "" when it is not in the table."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def is_open(request: web.Request) -> bool:
    """Whether the URL needs no key: liveness for probes, and the page, which asks its user for the key."""
    path = path_of(request)
    return path == "/static" or any(route.is_open and route.path == path for route in request.app[ROUTES])


def is_counted(request: web.Request) -> bool:
    """Whether the request takes one of `max_requests` places: WebSockets have their own bound, probes must always get through."""
    path = path_of(request)
    return any(route.body is not None and (route.method, route.path) == (request.method, path) for route in request.app[ROUTES])


def api_key(config: GatewayConfig, environ: Mapping[str, str] = os.environ) -> str:
    """The key that clients must show, "" for none. Raises ConfigError when it is asked for and not there."""
    if not config.api_key_env:
        return ""
    key = environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"gateway.api_key_env: got an environment without {config.api_key_env}, expected it to hold the API key",
            hint=f"export {config.api_key_env}=...",
        )
    return key


def check_bind(config: GatewayConfig, key: str) -> None:
    """Raise ConfigError for a host that others can reach when no key keeps them out."""
    if not key and not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f'gateway.host: got "{config.host}" without a key, expected a loopback host',
            hint="set [gateway] api_key_env, or insecure = true if everybody who reaches this port may use it",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- bounds on one request and one connection ----------------------------------------------------------------------------------


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises BodyTooLarge (by the application's `client_max_size`), BodyTimeout."""
    timeout_s = request.app[CONFIG].request_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s") from None


def bounded(server: web.Server, max_connections: int) -> Callable[[], asyncio.Protocol]:
    """A protocol factory that answers 503 to a connection beyond `max_connections`."""

    def connect() -> asyncio.Protocol:
        return server() if len(server.connections) < max_connections else _Full()

    return connect


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one, but no subclass
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        transport.close()


def _request_id(headers: Mapping[str, str]) -> str:
    """The caller's own, when it is one that may stand in a log."""
    given = headers.get("X-Request-Id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) else f"req_{secrets.token_hex(12)}"


def _from_http(error: web.HTTPException, request: web.Request) -> StreamrtError:
    """What aiohttp itself raised, in our words."""
    match error.status:
        case 413:
            limit = request.app[CONFIG].max_body_bytes
            return BodyTooLarge(f"the body is larger than {limit} bytes", hint="[gateway] max_body sets the limit")
        case 404:
            return Refused(404, f"there is no {request.path}")
        case 405:
            return Refused(405, f"{request.path} does not take {request.method}")
        case status:
            return Refused(status, error.reason)
