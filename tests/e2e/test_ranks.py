"""A replica of several processes: they start, serve, die and stop as one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrt import Pipeline, StageFailed, StreamrtError
from tests.e2e.test_up import in_background
from tests.pipelines import Running, run_cli, up

RANKED = """
[pipeline]
name = "ranked"
[[stage]]
name = "r"
use = "testing.ranked"
[stage.args]
word_ms = 100
[deploy.r]
tp = 2
hang_timeout_s = 1.5
[run]
heartbeat_s = 0.3
restart_delay_s = 0.05
"""

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4


@pytest.fixture(scope="module")
def ranked() -> Iterator[Running]:
    with up(RANKED, gateway=False) as run:
        yield run


def test_all_ranks_take_part_and_a_replica_is_one_row_with_all_its_pids(ranked: Running) -> None:
    pids = ranked.pids()
    assert set(pids) == {"r#0", "r#0.1"}
    with Pipeline(name=ranked.name) as pipeline:
        assert pipeline.generate("one two", timeout_s=20).text.split() == ["one/0/1", "two/0/1"]
    (row,) = ranked.rows().values()
    assert (row["name"], row["state"], row["pid"], row["rank_pids"]) == ("r#0", "ready", pids["r#0"], [pids["r#0.1"]])
    assert f"{pids['r#0']} {pids['r#0.1']}" in run_cli("ps").stdout
    assert "stage.follows stage=r rank=1" in run_cli("logs", ranked.name, "--process", "r-0.1").stdout


@pytest.mark.parametrize("victim", ["r#0.1", pytest.param("r#0", marks=pytest.mark.slow)])
def test_the_death_of_any_rank_fails_what_runs_and_starts_all_of_them_anew(ranked: Running, victim: str) -> None:
    with Pipeline(name=ranked.name) as pipeline:
        chunks = pipeline.stream(WORDS, timeout_s=60)
        next(chunks)
        before, restarts = ranked.pids(), ranked.rows()["r#0"]["restarts"]
        ranked.kill(victim)
        start = time.monotonic()
        with pytest.raises(StageFailed, match=r"stage r was lost|a rank is gone"):
            list(chunks)
        assert time.monotonic() - start < 2
        _wait_for_restart(ranked, before)
        assert pipeline.generate("again", timeout_s=20).text.strip() == "again/0/1"
        assert ranked.rows()["r#0"]["restarts"] == restarts + 1
        folder = Path(os.environ["STREAMRT_RUN_ROOT"]) / ranked.name
        assert len(list(folder.glob("ranks-*"))) == 1


@pytest.mark.slow
def test_a_rank_that_is_silent_is_the_replicas_hang(ranked: Running) -> None:
    before = ranked.pids()
    os.kill(before["r#0.1"], signal.SIGSTOP)
    _wait_for_restart(ranked, before)
    with Pipeline(name=ranked.name) as pipeline:
        assert pipeline.generate("well", timeout_s=20).text.strip() == "well/0/1"


@pytest.mark.slow
def test_a_drain_lets_the_ranks_finish_and_leaves_none() -> None:
    with up(RANKED, "--name", "drained", gateway=False) as run, Pipeline(name=run.name) as pipeline:
        pids = run.pids()
        answer = in_background(lambda: pipeline.generate("a b c d e f g h i j k l", timeout_s=20).text)
        run.wait_for(lambda: run.rows()["r#0"]["info"]["running"] == 1)
        run.process.send_signal(signal.SIGTERM)
        assert answer.result(10).split()[-1] == "l/0/1"
        assert run.process.wait(10) == 0
        assert [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()] == []
        assert "process.killed" not in run.process.stdout.read().decode()  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_orchestrators_death_takes_all_ranks_with_it() -> None:
    with up(RANKED, "--name", "orphaned", "--set", "deploy.r.tp=3", gateway=False) as run:
        pids = run.pids()
        assert len(pids) == 3
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        deadline = time.monotonic() + 4
        while any(_lives(pid) for pid in pids.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_does_not_load_ends_the_run_with_its_word(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(RANKED)
    done = run_cli("up", str(path), "--no-gateway", "--name", "unloaded", "--set", "stage.r.args.fails=1")
    assert done.returncode == 1
    assert "r#0: rank 1: stage r: RuntimeError: this rank was told to fail in load" in done.stderr
    assert "r-0.log, r-0.1.log" in done.stderr
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).glob("unloaded*")) == []


@pytest.mark.slow
def test_a_rank_that_dies_again_and_again_is_given_up_and_the_reason_is_said() -> None:
    with up(RANKED, "--name", "hopeless", "--set", "run.max_restarts=1", gateway=False) as run:
        for _ in range(2):
            run.wait_for(lambda: run.rows()["r#0"]["state"] == "ready")
            before = run.kill("r#0.1")
            run.wait_for(lambda before=before: run.pids().get("r#0.1", 0) != before)
        row = run.wait_for(lambda: run.rows()["r#0"] if run.rows()["r#0"]["state"] == "failed" else None)
        assert row["error"] == "rank 1 killed by SIGKILL; restarted 1 times within 60 s"
        assert run.pids() == {}
        with Pipeline(name=run.name) as pipeline, pytest.raises(StreamrtError):
            pipeline.generate("hi", timeout_s=5)


def _wait_for_restart(run: Running, before: dict[str, int]) -> None:
    """Every rank is another process than before, and the replica is ready."""

    def is_new() -> bool:
        now = run.pids()
        return set(now) == set(before) and not set(now.values()) & set(before.values())

    run.wait_for(is_new)
    run.wait_for(lambda: run.rows()["r#0"]["state"] == "ready")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
