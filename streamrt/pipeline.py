"""The graph of a pipeline: stages, edges between their ports, order.

Knows what each stage takes and gives, as its class declares it. Knows nothing of files, placement, requests or processes.
Pure: nodes in, a checked graph or a ConfigError out.

Rules
- Every input names a stage of this pipeline and one of its output ports; a stage never feeds itself, not even round a ring.
- An edge joins a port to a stage that takes that port's modality.
- Order is topological, and the file's where the edges leave it open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from streamrt.config import StageConfig, Where, any_of, did_you_mean, quote
from streamrt.errors import ConfigError
from streamrt.stage import Stage


class Node(msgspec.Struct, frozen=True):
    """One stage: what the file says of its inputs, and what its class declares."""

    name: str
    inputs: tuple[str, ...] = ()  # "stage" or "stage.port"
    takes: frozenset[str] = frozenset()  # modalities; empty = any
    gives: dict[str, str] = {}  # output port -> modality; the first is the default
    tasks: tuple[str, ...] = ()
    device_ports: tuple[str, ...] = ()  # those whose tensors stay in device memory

    @classmethod
    def of(cls, stage: StageConfig, kind: type[Stage]) -> Node:
        return cls(stage.name, stage.inputs, frozenset(kind.takes), dict(kind.gives), tuple(kind.tasks), tuple(sorted(kind.device_ports)))

    def port_of(self, modality: str) -> str | None:
        """The first port that gives `modality`."""
        return next((port for port, given in self.gives.items() if given == modality), None)


class Edge(msgspec.Struct, frozen=True):
    """Stage `source`'s output `port` feeds `target`. "client" stands on either end of the edges that `router.py` adds."""

    source: str
    port: str
    target: str
    modality: str

    @property
    def stream(self) -> str:
        """How `target` calls what arrives: "stage.port", or "client"."""
        return f"{self.source}.{self.port}" if self.port else self.source


class Graph:
    """A checked pipeline. Never changes after construction."""

    def __init__(self, nodes: Iterable[Node], file: str = "pipeline.toml") -> None:
        """Check and order `nodes`; `file` is how messages call their source. Raises ConfigError."""
        self._where = Where(file)
        self.nodes: dict[str, Node] = {}
        for node in nodes:
            if node.name in self.nodes:
                raise self._where.error(f"stage.{node.name}.name", f"{quote(node.name)} twice", "a name of its own for each stage")
            self.nodes[node.name] = node
        self.edges: tuple[Edge, ...] = tuple(edge for node in self.nodes.values() for edge in self._edges(node))
        self.order: tuple[str, ...] = self._sorted()

    def inputs_of(self, name: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == name)

    def outputs_of(self, name: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == name)

    def downstream(self, name: str) -> set[str]:
        """Every stage that something of `name` flows to, without `name`."""
        found: set[str] = set()
        for stage in self.order:
            if any(edge.source == name or edge.source in found for edge in self.inputs_of(stage)):
                found.add(stage)
        return found

    def levels(self) -> tuple[tuple[str, ...], ...]:
        """Stages by their longest way from an entry: those of one level do not feed each other."""
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = 1 + max((depth[edge.source] for edge in self.inputs_of(name)), default=-1)
        return tuple(tuple(name for name in self.order if depth[name] == level) for level in range(max(depth.values(), default=-1) + 1))

    def _edges(self, target: Node) -> list[Edge]:
        edges: list[Edge] = []
        for text in target.inputs:
            edge = self._edge(target, text)
            if edge in edges:
                raise self._wrong(target, f"{quote(text)} twice", "each input once")
            edges.append(edge)
        return edges

    def _edge(self, target: Node, text: str) -> Edge:
        """The edge that one entry of `inputs` means."""
        name, _, port = text.partition(".")
        if name == target.name:
            raise self._wrong(target, quote(text), "another stage: a stage can not feed itself")
        source = self.nodes.get(name)
        if source is None:
            others = [other for other in self.nodes if other != target.name]
            expected = f"the name of a stage: {any_of(others)}" if others else "no inputs: there is no other stage"
            raise self._wrong(target, quote(text), expected, hint=did_you_mean(name, others))
        ports = [f"{name}.{port}" for port in source.gives]
        if not ports:
            raise self._wrong(target, quote(text), f"a stage that gives something; {quote(name)} declares no output")
        if not port and len(ports) > 1:
            fits = [p for p, modality in source.gives.items() if modality in target.takes]
            hint = f"stage {quote(target.name)} takes what {quote(f'{name}.{fits[0]}')} gives" if len(fits) == 1 else ""
            raise self._wrong(target, quote(text), f"{any_of(ports)} (stage {quote(name)} has several ports)", hint=hint)
        port = port or next(iter(source.gives))
        if port not in source.gives:
            expected = f"{any_of(ports)} (what stage {quote(name)} gives)"
            raise self._wrong(target, quote(text), expected, hint=did_you_mean(text, ports))
        modality = source.gives[port]
        if target.takes and modality not in target.takes:
            raise self._wrong(
                target,
                f"{quote(text)}, which gives {modality}",
                f"{' or '.join(sorted(target.takes))} (what stage {quote(target.name)} takes)",
                hint=self._who_gives(target),
            )
        return Edge(name, port, target.name, modality)

    def _who_gives(self, target: Node) -> str:
        fits = [
            f"{name}.{port}" if len(node.gives) > 1 else name
            for name, node in self.nodes.items()
            for port, modality in node.gives.items()
            if name != target.name and modality in target.takes
        ]
        if fits:
            return f"that is what {any_of(fits).removeprefix('one of ')} gives"
        return "no stage here gives it: put one between them that turns the one into the other"

    def _sorted(self) -> tuple[str, ...]:
        """Kahn's algorithm, taking the first free stage in the order of the file."""
        order: list[str] = []
        waiting = {name: {edge.source for edge in self.inputs_of(name)} for name in self.nodes}
        while waiting:
            free = next((name for name, sources in waiting.items() if sources.isdisjoint(waiting)), None)
            if free is None:
                ring = _ring(waiting)
                raise self._wrong(
                    self.nodes[ring[0]],
                    f"a cycle: {' -> '.join([*ring, ring[0]])}",
                    "stages that flow one way",
                    hint=f"take one of these out of the inputs: {any_of(ring).removeprefix('one of ')}",
                )
            order.append(free)
            del waiting[free]
        return tuple(order)

    def _wrong(self, node: Node, got: str, expected: str, *, hint: str = "") -> ConfigError:
        return self._where.error(f"stage.{node.name}.inputs", got, expected, hint=hint)


def _ring(waiting: Mapping[str, set[str]]) -> list[str]:
    """One cycle among stages that all wait for each other, in the direction of flow, from its first in the file on."""
    path = [next(iter(waiting))]
    while True:
        source = next(name for name in sorted(waiting[path[-1]]) if name in waiting)
        if source in path:
            ring = path[path.index(source) :][::-1]
            first = next(ring.index(name) for name in waiting if name in ring)
            return ring[first:] + ring[:first]
        path.append(source)
