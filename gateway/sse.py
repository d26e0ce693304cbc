"""Server-sent events as bytes. Pure.

Rules
- OpenAI paths carry `data:` lines and comments, nothing else: `id:`, `retry:`, `event:` without data or an empty `data:`
  make openai-python raise JSONDecodeError (openai/openai-python#2722).
- A keepalive is one comment line and no blank line, which would dispatch an empty event in that reader.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from typing import Any

import msgspec

# Proxies must neither buffer nor compress: an event that waits in nginx is late by seconds.
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
KEEPALIVE = b": keepalive\n"
DONE = b"data: [DONE]\n\n"


def data(event: Any) -> bytes:
    """One event. JSON never holds a raw line break, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
