"""What the handlers of one gateway share: `request.app[CLIENT]` and the rest.

Written once, by `build_app`; only read afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from gateway.gate import Gate
    from gateway.jobs import VideoJobs
    from gateway.media import MediaPool
    from gateway.openapi import Route
    from gateway.store import Store
    from streamrt import Client
    from streamrt.config import GatewayConfig

CLIENT: web.AppKey[Client] = web.AppKey("client")  # the one member of the pipeline that submits requests
CONFIG: web.AppKey[GatewayConfig] = web.AppKey("config")  # [gateway] of pipeline.toml
GATE: web.AppKey[Gate] = web.AppKey("gate")  # what is open now: requests, WebSockets; closed on shutdown
JOBS: web.AppKey[VideoJobs] = web.AppKey("jobs")  # the video jobs that run in this process
MEDIA: web.AppKey[MediaPool] = web.AppKey("media")  # the threads that encode and decode
ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("routes")  # the URL table, for /openapi.json
STORE: web.AppKey[Store] = web.AppKey("store")  # what outlives a connection; shared with the run's other gateways
