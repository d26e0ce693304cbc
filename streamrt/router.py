"""Who serves a request: task -> sub-graph -> one replica of each stage.

`task_routes` finds what a pipeline can do and the way through it for each task. `Router` then picks replicas, holds the work
credit that each has granted, and lets requests wait their turn.

Knows the graph, the replica table and credit. Knows nothing of sockets, chunks or clocks. Pure: events in, decisions out.
Lives in the client, one a process; nobody else decides a route.

Rules
- A request gets a replica with credit of every stage on its route at once, or none and waits.
- Waiting is in order among the requests that want a stage in common; others pass.
- Credit comes back with `Finished` alone, also after a cancel; what a lost incarnation held is gone with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

import msgspec

from streamrt.config import Where, any_of, did_you_mean, quote
from streamrt.errors import BadRequest, Overloaded, Unavailable, UnknownTask
from streamrt.pipeline import Edge, Graph
from transport.messages import Replica, Table

CLIENT = "client"  # stands for the client at the ends of a route

# What stages pass on between themselves; it goes to the client only where no stage takes it.
INTERNAL = frozenset({"tokens", "codes", "hidden", "latents", "kv"})

# Tasks whose state lives in a replica: the same affinity means the same replica as long as that lives.
HARD_AFFINITY = frozenset({"listen", "duplex"})

MAX_AFFINITIES = 4096  # remembered (affinity, stage) pairs; the oldest are forgotten


# ---- task -> sub-graph ---------------------------------------------------------------------------------------------------------


class TaskRoute(msgspec.Struct, frozen=True):
    """The way of one task through a pipeline."""

    task: str
    entry: str  # the stage that the client feeds, in place of its inputs
    stages: tuple[str, ...]  # topological, the entry first
    outputs: dict[str, str]  # modality -> "stage.port" that goes to the client
    edges: tuple[Edge, ...]  # client -> entry, stage -> stage, stage -> client

    def sources(self, stage: str) -> tuple[str, ...]:
        """The streams that arrive at `stage`: "stage.port", or "client"."""
        return tuple(edge.stream for edge in self.edges if edge.target == stage)

    def edges_from(self, stage: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == stage)

    def narrowed(self, outputs: Collection[str] | None) -> TaskRoute:
        """The part of the way that `outputs` (modalities) need; None = all of it. Raises BadRequest."""
        if outputs is None:
            return self
        for modality in outputs:
            if modality not in self.outputs:
                gives = " and ".join(self.outputs) or "nothing"
                raise BadRequest(f"outputs: got {quote(modality)}, but {self.task} gives {gives} in this pipeline", param="modalities")
        if not outputs:
            raise BadRequest(f"outputs: got none, expected {any_of(self.outputs)}", param="modalities")
        exits = {self.outputs[modality] for modality in outputs}
        needed = {self.entry, *(stream.partition(".")[0] for stream in exits)}
        for stage in reversed(self.stages):
            if any(edge.target in needed for edge in self.edges_from(stage)):
                needed.add(stage)
        return TaskRoute(
            self.task,
            self.entry,
            tuple(stage for stage in self.stages if stage in needed),
            {modality: stream for modality, stream in self.outputs.items() if modality in outputs},
            tuple(e for e in self.edges if (e.stream in exits if e.target == CLIENT else e.target in needed)),
        )


def task_routes(graph: Graph, tasks: Mapping[str, str] | None = None, file: str = "pipeline.toml") -> dict[str, TaskRoute]:
    """What a pipeline can do.

    Args:
        graph: the pipeline.
        tasks: `[tasks]`: the entry of a task, where the file says so.
        file: how messages call the pipeline file.

    Raises:
        ConfigError: two stages could be the entry of a task, or could give the same output.
    """
    named = tasks or {}
    declared = dict.fromkeys(task for name in graph.order for task in graph.nodes[name].tasks)
    return {task: _task_route(graph, task, _entry(graph, task, named, file), file) for task in dict.fromkeys([*declared, *named])}


def left_out(graph: Graph, entry: str) -> dict[str, list[str]]:
    """Stages downstream of `entry` that it can not feed alone -> the inputs that nobody would fill."""
    reached = _reached(graph, entry)
    return {
        name: [edge.source for edge in graph.inputs_of(name) if edge.source not in reached]
        for name in graph.order
        if name in graph.downstream(entry) and name not in reached
    }


def _entry(graph: Graph, task: str, named: Mapping[str, str], file: str) -> str:
    if task in named:
        return named[task]
    candidates = [name for name in graph.order if task in graph.nodes[name].tasks]
    if len(candidates) > 1:
        raise Where(file).error(
            f"tasks.{task}",
            "nothing",
            f"{any_of(candidates)}: each of these stages can {task}",
            hint=f"say which one in the file: [tasks] {task} = {quote(candidates[0])}",
        )
    return candidates[0]


def _reached(graph: Graph, entry: str) -> set[str]:
    """The entry, and each stage all of whose inputs are reached."""
    reached = {entry}
    for name in graph.order:
        inputs = graph.inputs_of(name)
        if inputs and all(edge.source in reached for edge in inputs):
            reached.add(name)
    return reached


def _task_route(graph: Graph, task: str, entry: str, file: str) -> TaskRoute:
    reached = _reached(graph, entry)
    stages = tuple(name for name in graph.order if name in reached)
    between = tuple(edge for edge in graph.edges if edge.source in reached and edge.target in reached and edge.target != entry)
    exits: dict[str, Edge] = {}
    for modality in dict.fromkeys(modality for name in stages for modality in graph.nodes[name].gives.values()):
        givers = [name for name in stages if graph.nodes[name].port_of(modality) is not None]
        last = [name for name in givers if not graph.downstream(name) & set(givers)]
        ends = [Edge(name, graph.nodes[name].port_of(modality) or "", CLIENT, modality) for name in last]
        if modality in INTERNAL:
            ends = [end for end in ends if not any(edge.source == end.source and edge.port == end.port for edge in between)]
        if len(ends) > 1:
            streams = [end.stream for end in ends]
            hint = "join them in one stage, or serve them as two pipelines"
            raise Where(file).error(
                f"tasks.{task}", f"{modality} from {' and '.join(map(quote, streams))}", "one stage that ends it", hint=hint
            )
        if ends:
            exits[modality] = ends[0]
    edges = (Edge(CLIENT, "", entry, ""), *between, *exits.values())
    return TaskRoute(task, entry, stages, {modality: edge.stream for modality, edge in exits.items()}, edges)


def route_of(routes: Mapping[str, TaskRoute], task: str) -> TaskRoute:
    """The route of `task`. Raises UnknownTask."""
    if task not in routes:
        hint = did_you_mean(task, routes)
        raise UnknownTask(f"got task {quote(task)}, but this pipeline does {', '.join(routes) or 'nothing'}", hint=hint, param="task")
    return routes[task]


# ---- sub-graph -> replicas -------------------------------------------------------------------------------------------------------


class Assignment(msgspec.Struct, frozen=True):
    """A request and the replicas that serve it."""

    request_id: str
    epoch: int
    route: TaskRoute
    replicas: dict[str, Replica]  # stage -> row of the table, as it was when it was picked


class Lost(msgspec.Struct, frozen=True):
    """A request that ran on a replica which is gone."""

    assignment: Assignment
    stage: str


class TableChange(msgspec.Struct, frozen=True):
    """What a new table means for the client."""

    joined: tuple[Replica, ...] = ()  # new and ready: introduce yourself to these
    gone: tuple[Replica, ...] = ()  # close what leads to these
    lost: tuple[Lost, ...] = ()  # fail or retry these
    stranded: tuple[str, ...] = ()  # ids that waited for a stage which has no replica left
    admitted: tuple[Assignment, ...] = ()  # these waited and may go now


class _Seat:
    """One incarnation of a replica, as this client sees it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.window = 0  # requests that it lets us have open; 0 until it has answered our Join
        self.open: set[tuple[str, int]] = set()

    @property
    def has_credit(self) -> bool:
        return self.replica.state == "ready" and len(self.open) < self.window

    @property
    def load(self) -> float:
        return len(self.open) / self.window if self.window else 1.0


class _Waiting(msgspec.Struct, frozen=True):
    request_id: str
    epoch: int
    route: TaskRoute
    affinity: str


class Router:
    """Replicas, credit and the waiting line of one client. The client feeds it every event and does what it answers."""

    def __init__(self, max_queued: int = 64) -> None:
        self.max_queued = max_queued  # requests that may wait at a time; one more is Overloaded
        self._seats: dict[str, _Seat] = {}  # replica name -> its incarnation of now
        self._open: dict[tuple[str, int], tuple[Assignment, set[str]]] = {}  # -> replicas that have not said Finished
        self._queue: OrderedDict[tuple[str, int], _Waiting] = OrderedDict()
        self._affinities: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()  # (affinity, stage) -> (name, incarnation)
        self._turn: dict[str, int] = {}  # stage -> picks so far, for round robin among the equally loaded

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def knows(self, replica: Replica) -> bool:
        """Whether the newest table still has this incarnation."""
        seat = self._seats.get(replica.name)
        return seat is not None and seat.replica.incarnation == replica.incarnation

    def is_ready(self, route: TaskRoute) -> bool:
        """Whether each stage on the way has a ready replica."""
        return not self._missing(route)

    def route(self, request_id: str, route: TaskRoute, *, epoch: int = 0, affinity: str = "") -> Assignment | None:
        """A replica of each stage, their credit taken; or None, and the request waits until an event admits it.

        Raises:
            BadRequest: a request of that id is open or waits already.
            Unavailable: a stage on the way has no ready replica.
            Overloaded: it would have to wait, and the line is full.
        """
        key = (request_id, epoch)
        if key in self._open or key in self._queue:
            raise BadRequest(f"request {request_id} is open already", hint="give each request an id of its own", param="request_id")
        missing = self._missing(route)
        if missing:
            raise Unavailable(f"stage {missing[0]} is not ready", hint="see /ready, or `streamrt ps`")
        self._queue[key] = _Waiting(request_id, epoch, route, affinity)
        # Whoever waits already could not go before this call either, so the newcomer alone can be the answer.
        admitted = self._admit()
        if admitted:
            return admitted[0]
        if len(self._queue) > self.max_queued:
            del self._queue[key]
            raise Overloaded(f"{self.max_queued} requests wait already", hint="try again later")
        return None

    def on_window(self, name: str, incarnation: str, max_requests: int) -> list[Assignment]:
        """A replica says how many requests it lets us have open."""
        seat = self._seats.get(name)
        if seat is None or seat.replica.incarnation != incarnation:
            return []
        seat.window = max_requests
        return self._admit()

    def on_hang_up(self, name: str, incarnation: str) -> None:
        """A replica's channel has ended: its process is going, though the table does not say so yet. Nothing more is given to it."""
        seat = self._seats.get(name)
        if seat is not None and seat.replica.incarnation == incarnation:
            seat.window = 0

    def on_finished(self, name: str, request_id: str, epoch: int = 0) -> list[Assignment]:
        """A request has ended on one replica: its credit is back."""
        self._free(name, (request_id, epoch))
        return self._admit()

    def on_cancel(self, request_id: str, epoch: int = 0) -> list[Assignment]:
        """The client has given up on a request. What ran keeps its credit until each replica has said Finished."""
        self._queue.pop((request_id, epoch), None)
        return self._admit()

    def on_table(self, table: Table) -> TableChange:
        """The membership has changed."""
        alive = {row.name: row for row in table.replicas if row.state in ("ready", "draining")}
        gone: list[Replica] = []
        lost: list[Lost] = []
        for name, seat in list(self._seats.items()):
            row = alive.get(name)
            if row is not None and row.incarnation == seat.replica.incarnation:
                seat.replica = row
                continue
            del self._seats[name]
            gone.append(seat.replica)
            for key in sorted(seat.open):
                assignment, unfinished = self._open[key]
                lost.append(Lost(assignment, seat.replica.stage))
                unfinished.discard(name)
                if not unfinished:
                    del self._open[key]
        joined = [row for name, row in alive.items() if name not in self._seats and row.state == "ready"]
        self._seats.update({row.name: _Seat(row) for row in joined})
        stranded = [waiting for waiting in self._queue.values() if self._missing(waiting.route)]
        for waiting in stranded:
            del self._queue[waiting.request_id, waiting.epoch]
        return TableChange(tuple(joined), tuple(gone), tuple(lost), tuple(w.request_id for w in stranded), tuple(self._admit()))

    def _missing(self, route: TaskRoute) -> list[str]:
        ready = {seat.replica.stage for seat in self._seats.values() if seat.replica.state == "ready"}
        return [stage for stage in route.stages if stage not in ready]

    def _admit(self) -> list[Assignment]:
        """Every waiting request that can go now, in order; who can not go keeps its stages for itself."""
        admitted: list[Assignment] = []
        claimed: set[str] = set()
        for key, waiting in list(self._queue.items()):
            picks = None if claimed.intersection(waiting.route.stages) else self._pick(waiting)
            if picks is None:
                claimed.update(waiting.route.stages)
                continue
            del self._queue[key]
            admitted.append(self._take(waiting, picks))
        return admitted

    def _pick(self, waiting: _Waiting) -> dict[str, _Seat] | None:
        picks: dict[str, _Seat] = {}
        for stage in waiting.route.stages:
            seats = [seat for seat in self._seats.values() if seat.replica.stage == stage]
            known = self._affinities.get((waiting.affinity, stage)) if waiting.affinity else None
            favourite = [seat for seat in seats if (seat.replica.name, seat.replica.incarnation) == known and seat.replica.state == "ready"]
            if favourite and (waiting.route.task in HARD_AFFINITY or favourite[0].has_credit):
                seats = favourite
            free = [seat for seat in seats if seat.has_credit]
            if not free:
                return None
            turn = self._turn.get(stage, 0)
            picks[stage] = min(free, key=lambda seat: (seat.load, (seats.index(seat) - turn) % len(seats)))
        return picks

    def _take(self, waiting: _Waiting, picks: dict[str, _Seat]) -> Assignment:
        key = (waiting.request_id, waiting.epoch)
        for stage, seat in picks.items():
            seat.open.add(key)
            names = [s.replica.name for s in self._seats.values() if s.replica.stage == stage]
            self._turn[stage] = names.index(seat.replica.name) + 1
            if waiting.affinity:
                self._affinities[waiting.affinity, stage] = (seat.replica.name, seat.replica.incarnation)
                self._affinities.move_to_end((waiting.affinity, stage))
        while len(self._affinities) > MAX_AFFINITIES:
            self._affinities.popitem(last=False)
        assignment = Assignment(waiting.request_id, waiting.epoch, waiting.route, {stage: seat.replica for stage, seat in picks.items()})
        self._open[key] = (assignment, {seat.replica.name for seat in picks.values()})
        return assignment

    def _free(self, name: str, key: tuple[str, int]) -> None:
        seat = self._seats.get(name)
        if seat is None or key not in seat.open:
            return
        seat.open.discard(key)
        _, unfinished = self._open[key]
        unfinished.discard(name)
        if not unfinished:
            del self._open[key]
