"""What went wrong -> HTTP status and the OpenAI error body. One table; a test proves it complete.

    {"error": {"message": str, "type": str, "param": str | null, "code": str}}

The same body is the answer of a failed request, the last event of a failed stream and the `error` of a realtime event.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from streamrt import errors
from streamrt.errors import StreamrtError


class Unauthorized(StreamrtError):
    """No API key, or not the right one."""

    code = "invalid_api_key"


class Forbidden(StreamrtError):
    """A page of another origin asks, and `cors_origins` does not name it."""

    code = "origin_not_allowed"


class BodyTooLarge(StreamrtError):
    """More bytes than `max_body_bytes`."""

    code = "body_too_large"


class BodyTimeout(StreamrtError):
    """The body did not arrive within `body_timeout_s`."""

    code = "body_timeout"


class Refused(StreamrtError):
    """The HTTP layer itself said no: unknown URL, wrong method, malformed multipart, a file not made yet. `status` is its own."""

    code = "not_found"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = {404: "not_found", 405: "method_not_allowed", 409: "not_ready"}.get(status, "bad_request")


class Row(NamedTuple):
    """How one class of the tree is told to a client."""

    status: int
    type: str  # OpenAI's error types
    code: str = ""  # "" = the class's own
    retry_after_s: float = 0.0  # 0 = no Retry-After


TABLE: dict[type[StreamrtError], Row] = {
    # the caller's fault
    errors.BadRequest: Row(400, "invalid_request_error"),
    errors.UnknownVoice: Row(400, "invalid_request_error"),
    errors.TooLong: Row(400, "invalid_request_error"),
    errors.UnknownModel: Row(404, "invalid_request_error", "model_not_found"),
    errors.UnknownTask: Row(404, "invalid_request_error"),
    Unauthorized: Row(401, "authentication_error"),
    Forbidden: Row(403, "permission_error"),
    BodyTimeout: Row(408, "timeout_error"),
    BodyTooLarge: Row(413, "invalid_request_error"),
    Refused: Row(400, "invalid_request_error"),
    errors.Cancelled: Row(499, "request_cancelled"),
    # nobody's fault: later it works
    errors.Overloaded: Row(429, "rate_limit_error", retry_after_s=1.0),
    errors.Unavailable: Row(503, "server_error", retry_after_s=1.0),
    errors.NotRunning: Row(503, "server_error", retry_after_s=1.0),
    errors.Expired: Row(504, "timeout_error"),
    # ours
    errors.StageFailed: Row(500, "server_error"),
    errors.ConfigError: Row(500, "server_error"),
    errors.MissingWeights: Row(500, "server_error"),
    errors.AlreadyRunning: Row(500, "server_error"),
    StreamrtError: Row(500, "server_error"),
}


def row(error: StreamrtError) -> Row:
    """The row of the error's class, or of its nearest ancestor."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def status(error: StreamrtError) -> int:
    return error.status if isinstance(error, Refused) else row(error).status


def body(error: StreamrtError) -> dict[str, Any]:
    """The one error shape."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": {"message": message, "type": row(error).type, "param": error.param or None, "code": row(error).code or error.code}}


def response(error: StreamrtError) -> web.Response:
    """The whole answer of a request that failed before its first byte."""
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", row(error).retry_after_s)
    if retry_after_s:
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
    if status(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(body=msgspec.json.encode(body(error)), status=status(error), content_type="application/json", headers=headers)
