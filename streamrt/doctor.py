"""What this machine has: the facts behind most "it does not start"."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import msgspec

from streamrt import weights
from streamrt.errors import MissingWeights
from streamrt.registry import EXTRAS

GIB = 2**30


class Finding(msgspec.Struct):
    """One thing that was looked at."""

    name: str
    is_ok: bool
    found: str
    hint: str = ""
    is_optional: bool = False


def examine() -> list[Finding]:
    """Everything that is worth a look, the needed things first."""
    version = sys.version_info
    findings = [
        Finding("python", (3, 11) <= version[:2] <= (3, 13), platform.python_version(), "" if (3, 11) <= version[:2] <= (3, 13) else "use Python 3.11 to 3.13"),
        Finding("system", sys.platform == "linux", f"{platform.system()} {platform.release()} {platform.machine()}",
                "" if sys.platform == "linux" else "streamrt needs Linux (WSL2 will do)"),
        Finding("cores", True, str(len(os.sched_getaffinity(0)))),
        _shared_memory(),
        _open_files(),
    ]  # fmt: skip
    for extra in dict.fromkeys(EXTRAS.values()):
        modules = [module for module, brought_by in EXTRAS.items() if brought_by == extra]
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        found = ", ".join(f"{m} {_version(m)}" for m in modules if m not in missing)
        hint = f"pip install 'streamrt[{extra}]'" if missing else ""
        findings.append(Finding(f"[{extra}]", not missing, found or "not installed", hint, is_optional=True))
    held = sorted(name for name in weights.read_lock() if _is_here(f"weights:{name}"))
    findings.append(
        Finding("weights", bool(held), ", ".join(held) or "none", "" if held else "streamrt fetch pipeline.toml", is_optional=True)
    )
    return findings


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", False, "missing", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    small = free < GIB // 4
    return Finding(
        "/dev/shm",
        True,
        f"{free / GIB:.1f} GiB free",
        "small: rings fall back to memfd, which counts as the process's memory" if small else "",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= 1024
    return Finding("open files", enough, f"{soft} (at most {hard})", "" if enough else "ulimit -n 4096")


def _is_here(source: str) -> bool:
    try:
        weights.resolve(source)
    except MissingWeights:
        return False
    return True


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "?"
