"""What a pipeline file means: `streamrt check`. Starts nothing, and needs no torch.

Knows configuration, graph, routes and plan, and says what they say. What makes the file wrong is a ConfigError; what may be
meant so, or is only missing on this machine, is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrt import weights
from streamrt.config import PipelineConfig, quote
from streamrt.errors import ConfigError
from streamrt.pipeline import Graph
from streamrt.plan import Machine, check_device_ports, make_plan, size, table
from streamrt.registry import install_hint, load_graph, missing_modules, parse_args, target_of
from streamrt.router import CLIENT, TaskRoute, left_out, task_routes
from streamrt.stage import Stage

# Gateway route -> the tasks that it needs. The page and health, metrics and models are always there.
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "POST /v1/chat/completions": ("respond",),
    "POST /v1/audio/speech": ("speak",),
    "POST /v1/audio/transcriptions": ("transcribe",),
    "WS /v1/realtime": ("listen", "transcribe", "respond"),
    "POST /v1/images/generations": ("image",),
    "POST /v1/images/edits": ("image",),
    "POST /v1/videos": ("video",),
    "POST /v1/audio/generate": ("audio",),
}


class StageReport(msgspec.Struct, frozen=True):
    """One stage, as the file and its class have it."""

    name: str
    use: str
    target: str  # import string
    inputs: tuple[str, ...]
    takes: tuple[str, ...]  # () = anything
    gives: dict[str, str]
    replicas: int
    tp: int  # processes of each replica
    memory_bytes: int  # of one process
    args: dict[str, Any]  # as the file and the overrides have them


class TaskReport(msgspec.Struct, frozen=True):
    """One task and its way through the pipeline."""

    task: str
    entry: str
    stages: tuple[str, ...]
    outputs: dict[str, str]


class CheckReport(msgspec.Struct, frozen=True):
    """What `streamrt check` prints."""

    pipeline: str
    file: str
    stages: tuple[StageReport, ...]
    edges: tuple[str, ...]  # "llm.text -> tts"
    tasks: tuple[TaskReport, ...]
    endpoints: tuple[str, ...]
    memory: dict[str, int]  # device -> bytes; {} when this machine can not run it
    warnings: tuple[str, ...]
    found: tuple[str, ...] = ()  # what the checkpoint is that the pipeline was made for

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def as_text(self) -> str:
        rows = [("stage", "use", "inputs", "takes", "gives", "replicas")]
        for s in self.stages:
            gives = ", ".join(port if port == modality else f"{port} ({modality})" for port, modality in s.gives.items())
            rows.append(
                (
                    s.name,
                    s.use,
                    ", ".join(s.inputs) or "-",
                    ", ".join(s.takes) or "any",
                    gives or "-",
                    f"{s.replicas}{f' (tp {s.tp})' if s.tp > 1 else ''}",
                )
            )
        tasks = [("task", "way", "to the client")]
        for t in self.tasks:
            outputs = ", ".join(f"{modality} from {stream.partition('.')[0]}" for modality, stream in t.outputs.items())
            tasks.append((t.task, " -> ".join(t.stages), outputs or "nothing"))
        lines = [
            f"{self.pipeline} ({self.file})",
            *(f"  {line}" for line in self.found),
            "",
            *table(rows),
            "",
            *(table(tasks) if self.tasks else ["no tasks"]),
        ]
        if self.endpoints:
            lines += ["", "endpoints", *(f"  {endpoint}" for endpoint in self.endpoints)]
        if self.memory:
            lines += ["", *(f"memory on {device}: {size(count)}" for device, count in self.memory.items())]
        if self.warnings:
            lines += ["", *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(lines)


def check(config: PipelineConfig, machine: Machine | None = None, *, found: Sequence[str] = ()) -> CheckReport:
    """Everything that can be known of a pipeline without starting it.

    Args:
        config: the pipeline.
        machine: where it would run; None = here.
        found: lines of what the checkpoint is that it was made for.

    Raises:
        ConfigError: the pipeline can not work on any machine.
    """
    graph, classes = load_graph(config)
    routes = task_routes(graph, config.tasks, config.file)
    check_device_ports(config, graph, routes)
    warnings = [*_missing(config, classes), *_unserved(graph, routes)]
    memory: dict[str, int] = {}
    try:
        plan = make_plan(config, graph, classes, machine or Machine.here())
        memory = plan.memory
        warnings += plan.warnings
    except ConfigError as error:  # the file is right; only this machine is not the one for it
        warnings.append(f"this machine can not run it: {error.message}")
    return CheckReport(
        pipeline=config.name,
        file=config.file,
        stages=tuple(_stage(config, name, graph, classes[name]) for name in graph.order),
        edges=tuple(f"{edge.stream} -> {edge.target}" for edge in graph.edges),
        tasks=tuple(TaskReport(route.task, route.entry, route.stages, route.outputs) for route in routes.values()),
        endpoints=tuple(url for url, needs in ENDPOINTS.items() if config.gateway.replicas and all(task in routes for task in needs)),
        memory=memory,
        warnings=tuple(warnings),
        found=tuple(found),
    )


def _stage(config: PipelineConfig, name: str, graph: Graph, kind: type[Stage]) -> StageReport:
    stage, deploy = config.stage_named(name), config.deployed(name)
    gives = graph.nodes[name].gives
    return StageReport(
        name,
        stage.use,
        target_of(stage.use),
        stage.inputs,
        tuple(sorted(kind.takes)),
        gives,
        deploy.replicas,
        deploy.tp,
        deploy.memory_bytes,
        stage.args,
    )


def _missing(config: PipelineConfig, classes: dict[str, type[Stage]]) -> list[str]:
    """Packages and model files that `up` will need and that are not here."""
    warnings = []
    for stage in config.stages:
        for module in missing_modules(stage.use):
            warnings.append(f"stage {quote(stage.name)} needs {module}, which is not installed: {install_hint(module)}")
        args = parse_args(classes[stage.name], stage, config.file)
        for source in filter(None, (getattr(args, field) for field in classes[stage.name].models)):
            try:
                model = weights.resolve(source, config.folder, fetch_line=f"streamrt fetch {config.file}")
                remarks = classes[stage.name].remarks(args, model if isinstance(model, Path) else None)
                warnings += [f"stage {quote(stage.name)}: {remark}" for remark in remarks]
            except ConfigError as error:
                hint = f": {error.hint}" if error.hint else ""
                warnings.append(f"stage {quote(stage.name)}: {error.message}{hint}")
    return warnings


def _unserved(graph: Graph, routes: dict[str, TaskRoute]) -> list[str]:
    """Stages that requests do not reach, or not by every way that the picture suggests."""
    warnings = []
    for route in routes.values():
        for name, inputs in left_out(graph, route.entry).items():
            others = " and ".join(map(quote, inputs))
            warnings.append(f"{route.task} does not reach stage {quote(name)}, which also needs {others}")
        if not any(edge.target == CLIENT for edge in route.edges):
            warnings.append(f"{route.task} gives nothing to the client")
    served = {stage for route in routes.values() for stage in route.stages}
    for name in graph.order:
        if name not in served:
            warnings.append(f"stage {quote(name)} is on the way of no task; [tasks] can name it as an entry")
    return warnings
