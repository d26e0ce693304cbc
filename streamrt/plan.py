"""Pipeline + machine -> the processes of a run. `streamrt up --dry-run` prints it.

Knows configuration, the graph and what the machine has. Knows nothing of how a process is started or watched. Pure but for
`Machine.here`: the same file on the same machine gives the same plan.

Rules
- A placement that the machine can not satisfy is a ConfigError here, before anything is started.
- Processes are listed in start order; a level holds those that do not feed each other, and gateways come last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from streamrt.config import DeployConfig, PipelineConfig, Where, any_of, quote
from streamrt.pipeline import Graph
from streamrt.router import CLIENT, TaskRoute, task_routes
from streamrt.stage import Stage

GATEWAY_LOAD_TIMEOUT_S = 30.0
GATEWAY_HANG_TIMEOUT_S = 10.0

# What the numeric libraries read to know how many threads they may start.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Machine(msgspec.Struct, frozen=True):
    """What this machine has, for this process."""

    cores: tuple[int, ...]  # CPU numbers that we may run on
    memory_bytes: int
    shm_bytes: int  # free in /dev/shm
    devices: dict[str, int] = {}  # "cuda:0" -> memory in bytes

    @classmethod
    def here(cls) -> Machine:
        """The machine that we are on, within the limits of our container."""
        shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
        return cls(
            cores=tuple(sorted(os.sched_getaffinity(0))),
            memory_bytes=_memory_bytes(),
            shm_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
            devices=_gpus(),
        )

    def memory_of(self, device: str) -> int | None:
        """Bytes on `device`; None when there is no such device."""
        return self.memory_bytes if device == "cpu" else self.devices.get(device)


class Process(msgspec.Struct, frozen=True):
    """One OS process of the run."""

    name: str  # "llm#0"; of rank 1 "llm#0.1"
    kind: str  # "stage" | "gateway"
    stage: str  # "llm"; "gateway"
    replica: int
    level: int
    argv: tuple[str, ...]  # without the run's folder, which `command` adds
    env: dict[str, str]  # added to the orchestrator's own
    rank: int = 0  # in its replica; rank 0 is the actor, the others follow it
    ranks: int = 1
    threads: int = 1
    cores: tuple[int, ...] = ()  # pinned to these; () = any
    nice: int = 0
    device: str = "cpu"
    memory_bytes: int = 0
    connector: str = "shm"
    arena_bytes: int = 0
    max_requests: int = 0
    load_s: float = 1.0  # about how long it loads, alone on a core
    load_timeout_s: float = GATEWAY_LOAD_TIMEOUT_S
    hang_timeout_s: float = GATEWAY_HANG_TIMEOUT_S

    @property
    def leader(self) -> str:
        """Name of its replica, which is that of the replica's rank 0."""
        return f"{self.stage}#{self.replica}"

    def command(self, run_dir: Path | str) -> list[str]:
        """The command line in the run whose folder is `run_dir`."""
        return [*self.argv, "--run", str(run_dir)]


class Plan(msgspec.Struct, frozen=True):
    """The processes of a run, in start order, and what they ask of the machine."""

    pipeline: str
    processes: tuple[Process, ...]
    memory: dict[str, int]  # device -> bytes that the stages ask for, rings included
    shm_bytes: int  # of all rings
    machine: Machine
    warnings: tuple[str, ...] = ()

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """Names of the processes, level by level."""
        last = max((process.level for process in self.processes), default=-1)
        return tuple(tuple(p.name for p in self.processes if p.level == level) for level in range(last + 1))

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def as_text(self) -> str:
        rows = [("level", "process", "device", "threads", "cores", "memory", "requests", "arrives by", "ring")]
        for p in self.processes:
            cores = ",".join(map(str, p.cores)) or "any"
            memory = size(p.memory_bytes) if p.memory_bytes else "-"
            queue = (str(p.max_requests or "-"), p.connector, size(p.arena_bytes)) if p.rank == 0 else ("-", "-", "-")
            rows.append((str(p.level), p.name, p.device, str(p.threads), cores, memory, *queue))
        lines = [f"{self.pipeline}: {len(self.processes)} processes", "", *table(rows), ""]
        for device, wanted in self.memory.items():
            lines.append(f"memory on {device}: {size(wanted)} of {size(self.machine.memory_of(device) or 0)}")
        lines.append(f"shared memory: {size(self.shm_bytes)} of {size(self.machine.shm_bytes)} in /dev/shm")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def make_plan(config: PipelineConfig, graph: Graph, classes: Mapping[str, type[Stage]], machine: Machine) -> Plan:
    """What to start for `config` on `machine`.

    Args:
        config: the pipeline.
        graph: the same, checked.
        classes: stage name -> its class.
        machine: where it is to run.

    Raises:
        ConfigError: a device, a core or the memory that the file asks for is not there; or a task has no one entry; or device memory
            goes where it can not be read.
    """
    check_device_ports(config, graph, task_routes(graph, config.tasks, config.file))  # who could not serve a request must not start
    processes: list[Process] = []
    levels = graph.levels()
    for level, names in enumerate(levels):
        for name in names:
            deploy = config.deployed(name)
            _check_placement(name, deploy, machine, Where(config.file))
            for replica in range(deploy.replicas):
                processes += [_stage_process(name, replica, rank, level, deploy, classes[name]) for rank in range(deploy.tp)]
    processes += [_gateway_process(replica, len(levels)) for replica in range(config.gateway.replicas)]
    memory = _memory_by_device(processes)
    _check_memory(memory, processes, machine, Where(config.file))
    shm_bytes = sum(process.arena_bytes for process in processes if process.connector == "shm")
    return Plan(config.name, tuple(processes), memory, shm_bytes, machine, tuple(_warnings(processes, shm_bytes, machine)))


def check_device_ports(config: PipelineConfig, graph: Graph, routes: Mapping[str, TaskRoute]) -> None:
    """What stays in device memory is read by stages on that GPU, over shared memory. Raises ConfigError."""
    where = Where(config.file)
    for route in routes.values():
        for edge in route.edges:
            if edge.target == CLIENT and edge.port in graph.nodes[edge.source].device_ports:
                raise where.error(
                    f"tasks.{route.task}",
                    f"{quote(edge.stream)}, which stays in device memory, as what the client gets",
                    "an output in host memory: a client has no GPU",
                    hint=f"put a stage after {quote(edge.source)} that gives {edge.modality} as arrays",
                )
    for edge in graph.edges:
        if edge.port not in graph.nodes[edge.source].device_ports:
            continue
        there, here = config.deployed(edge.source), config.deployed(edge.target)
        got = f"{quote(edge.stream)}, which stays in device memory"
        (lender, *_), (borrower, *_) = there.devices_of(0), here.devices_of(0)
        if lender == "cpu":
            raise where.error(f"deploy.{edge.source}.device", '"cpu"', f"a GPU: {got}")
        if borrower != lender:
            raise where.error(f"deploy.{edge.target}.device", quote(borrower), f"{quote(lender)}: it takes {got}")
        if here.connector != "shm":
            raise where.error(f"deploy.{edge.target}.connector", quote(here.connector), f'"shm": it takes {got}')


def _stage_process(name: str, replica: int, rank: int, level: int, deploy: DeployConfig, kind: type[Stage]) -> Process:
    rank_name, rank_words = (f".{rank}", ("--rank", str(rank))) if rank else ("", ())
    return Process(
        name=f"{name}#{replica}{rank_name}",
        kind="stage",
        stage=name,
        replica=replica,
        level=level,
        argv=(sys.executable, "-m", "streamrt.process", "stage", name, "--replica", str(replica), *rank_words),
        env={**dict.fromkeys(THREAD_VARIABLES, str(deploy.threads)), **deploy.env},
        rank=rank,
        ranks=deploy.tp,
        threads=deploy.threads,
        cores=deploy.cores_of(rank),
        nice=deploy.nice,
        device=deploy.devices_of(replica)[rank],
        memory_bytes=deploy.memory_bytes,
        connector=deploy.connector,
        arena_bytes=deploy.arena_bytes if rank == 0 else 0,
        max_requests=deploy.max_requests or kind.max_requests,
        load_s=kind.load_s,
        load_timeout_s=deploy.load_timeout_s,
        hang_timeout_s=deploy.hang_timeout_s,
    )


def _gateway_process(replica: int, level: int) -> Process:
    return Process(
        name=f"gateway#{replica}",
        kind="gateway",
        stage="gateway",
        replica=replica,
        level=level,
        argv=(sys.executable, "-m", "streamrt.process", "gateway", "gateway", "--replica", str(replica)),
        env=dict.fromkeys(THREAD_VARIABLES, "1"),
        arena_bytes=DeployConfig().arena_bytes,
    )


def _check_placement(name: str, deploy: DeployConfig, machine: Machine, where: Where) -> None:
    for device in (device for replica in range(deploy.replicas) for device in deploy.devices_of(replica)):
        if machine.memory_of(device) is None:
            have = any_of(["cpu", *machine.devices])
            hint = "" if machine.devices else "nvidia-smi finds no GPU on this machine"
            rank = f" for its {deploy.tp} ranks" if deploy.tp > 1 else ""
            got = quote(deploy.device) if deploy.device == "cuda" else quote(device)
            raise where.error(f"deploy.{name}.device", f"{got}{rank}", f"{have} (what this machine has)", hint=hint)
    absent = [core for core in deploy.cores if core not in machine.cores]
    if absent:
        cores = ", ".join(map(str, machine.cores))
        raise where.error(f"deploy.{name}.cores", f"core {absent[0]}", f"cores that we may run on: {cores}")


def _memory_by_device(processes: list[Process]) -> dict[str, int]:
    memory: dict[str, int] = {"cpu": 0}
    for process in processes:
        memory[process.device] = memory.get(process.device, 0) + process.memory_bytes
        memory["cpu"] += process.arena_bytes
    return memory


def _check_memory(memory: Mapping[str, int], processes: list[Process], machine: Machine, where: Where) -> None:
    for device, wanted in memory.items():
        there = machine.memory_of(device) or 0
        if wanted > there:
            parts = [f"{p.name} {size(p.memory_bytes)}" for p in processes if p.device == device and p.memory_bytes]
            rings = sum(process.arena_bytes for process in processes)
            if device == "cpu":
                parts.append(f"rings {size(rings)}")
            raise where.error(
                "deploy",
                f"{size(wanted)} of memory on {device} ({', '.join(parts)})",
                f"at most {size(there)}, which is what {device} has",
                hint="lower memory, arena or replicas in [deploy], or place a stage on another device",
            )


def _warnings(processes: list[Process], shm_bytes: int, machine: Machine) -> list[str]:
    warnings = []
    for process in processes:
        if process.replica == process.rank == 0 and process.threads > len(process.cores or machine.cores):
            room = len(process.cores or machine.cores)
            warnings.append(f"{process.stage} has {process.threads} threads for {room} cores: they will wait for each other")
    if shm_bytes > machine.shm_bytes:
        warnings.append(f"/dev/shm has {size(machine.shm_bytes)} free for {size(shm_bytes)} of rings: those beyond it use memfd")
    return warnings


def size(count: int) -> str:
    """Bytes for people: "512MiB", "1.5GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{round(count / 2**power, 1):g}{unit}"
    return f"{count}B"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _gpus() -> dict[str, int]:
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(",") for line in answer.stdout.splitlines() if line.count(",") == 1]
    return {
        f"cuda:{index.strip()}": int(float(mebibytes)) * 2**20 for index, mebibytes in rows if mebibytes.strip().replace(".", "").isdigit()
    }
