"""Names of runs: one holder each, found while it lives, taken over when it was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from streamrt.errors import AlreadyRunning, ConfigError, NotRunning
from streamrt.rundir import MAX_PATH_BYTES, RunDir, RunFacts, list_runs, process_started
from transport.lanes import LaneServer
from transport.messages import Leave


@pytest.fixture(autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("STREAMRT_RUN_ROOT", str(path))
    return path


def facts_of(name: str, pid: int | None = None) -> RunFacts:
    pid = os.getpid() if pid is None else pid
    return RunFacts(name, "run-1", "secret", pid, process_started(pid), "ipc://control")


def started(name: str) -> RunDir:
    run = RunDir.create(name)
    run.publish(facts_of(name))
    return run


def test_a_run_is_found_by_its_name_or_as_the_only_one(root: Path) -> None:
    run = started("echo")
    assert RunDir.find("echo").facts == run.facts
    assert RunDir.find().name == "echo"
    assert RunDir.at(root / "echo").facts == run.facts
    run.remove()
    with pytest.raises(NotRunning, match='no pipeline "echo" is up'):
        RunDir.find("echo")
    with pytest.raises(NotRunning, match=r"no pipeline is up\nhint: streamrt up pipeline.toml"):
        RunDir.find()
    assert list(root.iterdir()) == []


def test_of_two_runs_one_must_be_named() -> None:
    runs = [started("one"), started("two")]
    with pytest.raises(NotRunning, match=r"several pipelines are up: one, two\nhint: name the one you mean"):
        RunDir.find()
    for run in runs:
        run.remove()


def test_a_name_is_held_by_one(root: Path) -> None:
    run = started("echo")
    with pytest.raises(AlreadyRunning, match=rf'pipeline "echo" is up already \(pid {os.getpid()}\)'):
        RunDir.create("echo")
    assert RunDir.find("echo").facts == run.facts  # the refused one has touched nothing
    run.remove()
    run.remove()
    started("echo").remove()


@pytest.mark.parametrize("next_name", ["echo", "another"])
def test_what_a_killed_run_left_is_no_run_and_goes_when_another_begins(root: Path, next_name: str) -> None:
    living = started("living")
    code = (
        "import os, signal\nfrom streamrt.rundir import *\n"
        "run = RunDir.create('echo')\n"
        "run.publish(RunFacts('echo', 'r', 't', os.getpid(), process_started(os.getpid()), 'c'))\n"
        "(run.path / 'x.sock').touch()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert (root / "echo" / "x.sock").exists()
    assert [run.name for run in list_runs()] == ["living"]
    run = started(next_name)
    assert not (root / "echo" / "x.sock").exists()
    assert {path.name for path in root.iterdir()} == {"living", "living.lock", next_name, f"{next_name}.lock"}
    run.remove()
    living.remove()


def test_a_process_that_has_taken_over_the_pid_is_not_the_run() -> None:
    run = RunDir.create("echo")
    facts = facts_of("echo")
    facts.started += 1
    run.publish(facts)
    assert list_runs() == []
    run.remove()


def test_facts_that_can_not_be_read_are_no_run(root: Path) -> None:
    run = started("echo")
    (run.path / "run.json").write_text('{"name": "ec')
    assert list_runs() == []
    with pytest.raises(NotRunning, match="no run.json there"):
        RunDir.at(run.path)
    run.remove()


def test_the_folder_and_the_token_are_for_this_user_alone(root: Path) -> None:
    run = started("echo")
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600
    run.remove()
    root.chmod(0o755)
    with pytest.raises(ConfigError, match="belongs to somebody else or is open to others"):
        RunDir.create("echo")


@pytest.mark.parametrize("name", ["", "a/b", "..%", "x" * 41, "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="pipeline.name: got"):
        RunDir.create(name)


def test_a_root_that_is_too_long_is_said_and_takes_no_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = root / ("x" * 60)
    monkeypatch.setenv("STREAMRT_RUN_ROOT", str(long))
    with pytest.raises(ConfigError, match=r"too long for a socket's address\nhint: set STREAMRT_RUN_ROOT"):
        RunDir.create("echo")
    assert list(long.iterdir()) == []


async def test_the_longest_names_are_short_enough_for_a_socket(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    name = "n" * 40
    monkeypatch.setenv("STREAMRT_RUN_ROOT", str(short / ("r" * (MAX_PATH_BYTES - len(str(short)) - len(name) - 2))))
    run = RunDir.create(name)
    assert len(str(run.path)) == MAX_PATH_BYTES
    sockets = [run.work_socket(f"{'s' * 40}#{replica}", f"{replica:016x}"[::-1]) for replica in range(12)]
    lanes = [await LaneServer.bind(f"ipc://{path}", Leave, lambda peer, message: None) for path in [*sockets, run.socket("control")]]
    assert len({lane.endpoint for lane in lanes}) == len(lanes)
    for lane in lanes:
        await lane.close()
    run.remove()
    shutil.rmtree(short)


def test_when_a_process_started_is_known_while_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert process_started(child.pid) >= process_started(os.getpid()) > 0
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet taken away
        assert process_started(child.pid) == 0
    assert process_started(child.pid) == 0
