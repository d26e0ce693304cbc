"""Where a run keeps its sockets, its facts and its logs; how other commands find it.

    $STREAMRT_RUN_ROOT (else $XDG_RUNTIME_DIR/streamrt, else /tmp/streamrt-<uid>)      0700
    +-- <name>.lock          held (flock) by the orchestrator for as long as the run lives
    +-- <name>/              sockets, run.json, where ranks find each other; removed when the run ends
    $STREAMRT_LOG_ROOT (else ~/.local/state/streamrt/logs)
    +-- <name>/<process>.log  kept until the next run of that name
    $STREAMRT_STATE_ROOT (else ~/.local/state/streamrt/state)
    +-- <name>/              what outlives the run's processes; kept from one run of that name to the next

Rules
- The lock says who owns a name: two runs can not hold one. Readers look at run.json and whether its process still lives; they never
  touch the lock. The folder that a killed run left is removed by the next run of that name.
- Paths stay under the 107 bytes of a unix socket's address: too long a root is a ConfigError before anything starts, and what a file is
  named after is cut to what then fits.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

from streamrt.errors import AlreadyRunning, ConfigError, NotRunning

MAX_PATH_BYTES = 70  # of a run's folder; 36 are left for a socket's name


class RunFacts(msgspec.Struct):
    """What `run.json` says of a run that is up."""

    name: str
    run_id: str
    token: str  # who knows it may join; the folder is 0700
    pid: int
    started: int  # the process's start time in clock ticks since boot: a recycled pid is not the same run
    control: str  # the orchestrator's control endpoint
    pipeline_path: str = ""
    gateways: list[str] = []


class RunDir:
    """The folder of one run. Created by its orchestrator, read by everybody else of the same user."""

    def __init__(self, name: str, path: Path, facts: RunFacts | None = None, lock_fd: int = -1) -> None:
        self.name = name
        self.path = path
        self.facts = facts
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, name: str) -> RunDir:
        """Take the name. Raises AlreadyRunning (with the pid) when another run holds it."""
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,40}", name):
            raise ConfigError(f"pipeline.name: got {name!r}, expected 1 to 40 of letters, digits, '.', '_', '-'")
        root = _root()
        path = root / name
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(f"run folder: {path} is too long for a socket's address", hint="set STREAMRT_RUN_ROOT to a short path")
        lock_fd = _take_lock(root / f"{name}.lock")
        if lock_fd < 0:
            facts = _read_facts(root / name)
            pid = f" (pid {facts.pid})" if facts else ""
            raise AlreadyRunning(
                f'pipeline "{name}" is up already{pid}', hint=f"streamrt down {name}, or give this one another [pipeline] name"
            )
        shutil.rmtree(path, ignore_errors=True)  # what a killed run of this name left
        _sweep(root)
        path.mkdir(mode=0o700)
        return cls(name, path, lock_fd=lock_fd)

    @classmethod
    def find(cls, name: str | None = None) -> RunDir:
        """A run that is up: by name, or the only one. Raises NotRunning."""
        runs = list_runs()
        if name is None:
            if len(runs) == 1:
                return runs[0]
            names = ", ".join(run.name for run in runs)
            raise NotRunning("no pipeline is up" if not runs else f"several pipelines are up: {names}",
                             hint="streamrt up pipeline.toml" if not runs else "name the one you mean")  # fmt: skip
        for run in runs:
            if run.name == name:
                return run
        raise NotRunning(f'no pipeline "{name}" is up', hint="streamrt ps shows what is up")

    @classmethod
    def at(cls, path: Path) -> RunDir:
        """The run whose folder is `path`."""
        facts = _read_facts(path)
        if facts is None:
            raise NotRunning(f"{path}: no run.json there")
        return cls(facts.name, path, facts)

    def publish(self, facts: RunFacts) -> None:
        """Say what the run is, atomically; from now on `find` sees it."""
        self.facts = facts
        draft = self.path / "run.json.new"
        draft.write_bytes(msgspec.json.encode(facts))
        draft.chmod(0o600)
        draft.rename(self.path / "run.json")

    def socket(self, name: str) -> Path:
        return self.path / f"{name.replace('#', '-')}.sock"

    def work_socket(self, member: str, incarnation: str) -> Path:
        """Where a replica gets its work. The incarnation makes it unique; of the member's name, there is what fits."""
        return self.socket(f"work-{member[:17]}-{incarnation[:8]}")

    @property
    def logs(self) -> Path:
        return log_dir(self.name)

    def new_rendezvous(self, replica: str) -> Path:
        """A fresh folder for the ranks of a replica to find each other in; that of its last start goes."""
        prefix = f"ranks-{replica.replace('#', '-')}-"
        for path in self.path.glob(f"{prefix}*"):
            shutil.rmtree(path)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.path))

    @property
    def state(self) -> Path:
        """Where its processes keep what outlives them. Not made before somebody keeps something."""
        configured = os.environ.get("STREAMRT_STATE_ROOT")
        root = Path(configured) if configured else Path.home() / ".local/state/streamrt/state"
        return root / self.name

    def remove(self) -> None:
        """Give the name back; everything but the logs goes. Idempotent."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.with_name(f"{self.name}.lock").unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def list_runs() -> list[RunDir]:
    """The runs of this user that are up."""
    root = _root()
    runs = []
    for lock in sorted(root.glob("*.lock")):
        path = root / lock.stem
        facts = _read_facts(path)
        if facts is not None and process_started(facts.pid) == facts.started:
            runs.append(RunDir(facts.name, path, facts))
    return runs


def log_dir(name: str) -> Path:
    configured = os.environ.get("STREAMRT_LOG_ROOT")
    root = Path(configured) if configured else Path.home() / ".local/state/streamrt/logs"
    return root / name


def new_token() -> str:
    return secrets.token_hex(16)


def _sweep(root: Path) -> None:
    """Remove what killed runs have left: a run that lives holds its lock."""
    for lock in root.glob("*.lock"):
        lock_fd = _take_lock(lock)
        if lock_fd >= 0:
            RunDir(lock.stem, root / lock.stem, lock_fd=lock_fd).remove()


def _take_lock(path: Path) -> int:
    """The descriptor that holds the lock; -1 when somebody else does."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return -1
        except FileNotFoundError:
            pass
        os.close(fd)  # whoever held it has just removed it: this one is no longer the file of that name


def _root() -> Path:
    configured = os.environ.get("STREAMRT_RUN_ROOT")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if configured:
        root = Path(configured)
    elif runtime and os.access(runtime, os.W_OK):
        root = Path(runtime) / "streamrt"
    else:
        root = Path(tempfile.gettempdir()) / f"streamrt-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"run folder: {root} belongs to somebody else or is open to others",
            hint="set STREAMRT_RUN_ROOT to a folder of your own, mode 0700",
        )
    return root


def _read_facts(path: Path) -> RunFacts | None:
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=RunFacts)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def process_started(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 when there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
