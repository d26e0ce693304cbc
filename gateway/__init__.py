"""The gateway: HTTP, SSE and WebSocket in front of a pipeline. Knows protocols; knows nothing of rings, models or processes.

`serve` is what the gateway process runs; `build_app` is the same application without its sockets.
"""

from gateway.app import build_app, serve

__all__ = ["build_app", "serve"]
