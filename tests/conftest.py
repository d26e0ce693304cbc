"""What holds for every test: its own run folder, and nothing left behind: no shared memory, no process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines import VOICE_SCRIPT, Running, children_of, up

# Before anything of ours is imported. Short, because sockets' addresses are.
_ROOT = tempfile.mkdtemp(prefix="srt-")
os.environ["STREAMRT_RUN_ROOT"] = f"{_ROOT}/run"
os.environ["STREAMRT_LOG_ROOT"] = f"{_ROOT}/log"
os.environ["STREAMRT_STATE_ROOT"] = f"{_ROOT}/state"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_sessionfinish() -> None:
    shutil.rmtree(_ROOT, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind() -> Iterator[None]:
    """A module leaves no file in /dev/shm and no child process; its fixtures have ended by now."""
    shm, children = _shm(), set(children_of(os.getpid()))
    yield
    left = _shm() - shm
    assert not left, f"left in /dev/shm: {left}"
    # A process that was ended a moment ago may still be on its way out.
    orphans = {pid for pid in set(children_of(os.getpid())) - children if not _is_zombie(pid)}
    assert not orphans, f"left running: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in orphans]}"


@pytest.fixture(scope="module")
def voice_script() -> Iterator[Running]:
    """A voice pipeline of scripted stages, with its gateway; one for a module."""
    with up(VOICE_SCRIPT) as run:
        yield run


def _shm() -> set[str]:
    """What is there; not what the CUDA driver and NCCL leave of a process that was killed while it shared device memory."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("cuda.shm.", "nccl-"))}


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
