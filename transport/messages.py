"""Every message that crosses a process on the ZeroMQ lanes, grouped by receiver. Tagged msgspec unions; no behaviour.

Work lane: ROUTER at each replica, DEALER at each client. Control lane: ROUTER at the orchestrator, DEALER at everyone else.
Chunks travel on connectors (`connector.py`), never here.
"""

from __future__ import annotations

from typing import Any

import msgspec

WIRE_VERSION = 1


# ---- work lane, to a replica --------------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A client introduces itself; the replica answers with `Window`."""

    client_id: str
    version: int = WIRE_VERSION


class Edge(msgspec.Struct, frozen=True):
    """One place to which a stage sends the chunks of a request."""

    to: str  # stage name, or "client"
    endpoint: str  # where that peer listens
    port: str = ""  # which output port; "" = the only one


class Work(msgspec.Struct, frozen=True, tag="work"):
    """One request for one replica."""

    request_id: str
    epoch: int
    task: str
    sources: tuple[str, ...]  # "stage.port" or "client": the streams that will arrive, each with its own last chunk
    edges: tuple[Edge, ...]
    time_left_s: float | None = None  # None: no deadline (listen, duplex)
    params: dict[str, Any] = {}  # task parameters: messages, voice, language, max_tokens ...; see streamrt/stage.py


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request at any point; idempotent, also for a request that never arrived (tombstone)."""

    request_id: str
    epoch: int
    cause: str = "client"


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The client goes away: everything of it is cancelled."""


ToReplica = Join | Work | Cancel | Leave


# ---- work lane, to a client -----------------------------------------------------------------------------------------------


class Window(msgspec.Struct, frozen=True, tag="window"):
    """Absolute work credit: this client may have `max_requests` requests open on this replica (at least 1)."""

    max_requests: int
    incarnation: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request has ended on this replica, always exactly once per Work; gives its work credit back."""

    request_id: str
    epoch: int
    outcome: str  # "completed" | "cancelled" | "failed" | "expired" | "refused"
    error_code: str = ""  # code of the error class, see streamrt/errors.py
    error: str = ""
    error_param: str = ""  # the field of the request that is wrong
    timings: dict[str, float] = {}  # milliseconds: queue_wait_ms, first_chunk_ms, total_ms


ToClient = Window | Finished


# ---- control lane, to the orchestrator ------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A process has started and can be spoken to. Stages, gateways and outside clients send this first."""

    name: str  # "llm#0", "gateway#0", "client-3f2a"
    kind: str  # "stage" | "gateway" | "client"
    incarnation: str
    pid: int
    token: str
    version: int = WIRE_VERSION


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What a loading stage is doing, for the live display."""

    name: str
    incarnation: str
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded and warm; may be given work. A stage says where it is reached, a gateway where it listens."""

    name: str
    incarnation: str
    address: str = ""  # gateways: http://host:port
    work_endpoint: str = ""  # stages
    connectors: dict[str, str] = {}  # stages: scheme -> endpoint
    max_requests: int = 1  # stages
    describe: dict[str, Any] = {}  # stages: Stage.describe()


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """`load` raised: the message that the user sees."""

    name: str
    incarnation: str
    error: str
    hint: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Each second from ready on: alive, how late the loop is, and the metrics snapshot (see streamrt/metrics.py)."""

    name: str
    incarnation: str
    loop_lag_ms: float
    state: dict[str, Any] = {}  # running, queued, max_requests, kv use ...: for `ps`, /ready and the page
    metrics: list[Any] = []


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answer to Drain: nothing runs here any more."""

    name: str
    incarnation: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask for the table and the metrics of all processes once."""

    query_id: str
    what: str  # "metrics"
    token: str


ToOrchestrator = Register | Progress | Ready | LoadFailed | Heartbeat | Drained | Query


# ---- control lane, from the orchestrator -----------------------------------------------------------------------------------


class Replica(msgspec.Struct, frozen=True):
    """A row of the replica table."""

    name: str  # "llm#0"
    stage: str
    incarnation: str
    state: str  # "waiting" | "starting" | "loading" | "ready" | "draining" | "down" | "failed"
    pid: int = 0
    rank_pids: tuple[int, ...] = ()  # of its ranks 1, 2 ...
    work_endpoint: str = ""
    connectors: dict[str, str] = {}
    max_requests: int = 1
    error: str = ""
    progress: str = ""
    restarts: int = 0
    describe: dict[str, Any] = {}  # Stage.describe(), fixed from ready on
    info: dict[str, Any] = {}  # last heartbeat's `state`


class Table(msgspec.Struct, frozen=True, tag="table"):
    """The membership, whole and versioned; a later version replaces an earlier one."""

    version: int
    replicas: tuple[Replica, ...]
    gateways: tuple[str, ...] = ()  # addresses
    clients: tuple[str, ...] = ()  # "name/incarnation" of the registered clients; a replica cancels the requests of one that is gone


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Register: what the pipeline is."""

    pipeline: str  # the effective pipeline.toml, as JSON of streamrt.config.PipelineConfig
    graph: str  # what its stages declare, as JSON of streamrt.pipeline.Node; nobody else need import their classes
    run_id: str
    heartbeat_s: float = 1.0


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Admit nothing more, finish or expire what runs within `within_s`, answer Drained."""

    within_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close and exit."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to Query."""

    query_id: str
    data: Any


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Wrong token, version or name."""

    reason: str


FromOrchestrator = Welcome | Table | Drain | Stop | Answer | Rejected
