"""The command line, as a person and as a script use it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrt import Pipeline
from tests.pipelines import VOICE_SCRIPT, run_cli, up

ECHO = '[pipeline]\nname = "echo"\n[[stage]]\nname = "echo"\nuse = "echo"\n'


@pytest.fixture(autouse=True, scope="module")
def _own_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """These tests say "the only run that is up", so no other module's may be in the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMRT_RUN_ROOT", str(tmp_path_factory.mktemp("r")))
        patch.setenv("STREAMRT_LOG_ROOT", str(tmp_path_factory.mktemp("logs")))
        yield


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(ECHO)
    return path


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("voice") / "pipeline.toml"
    path.write_text(VOICE_SCRIPT)
    return path


def test_check_says_what_a_file_means_and_needs_no_torch(voice: Path) -> None:
    done = run_cli("check", str(voice))
    assert done.returncode == 0, done.stderr
    for said in ("vad", "asr", "llm", "tts", "respond", "speak", "transcribe", "listen"):
        assert said in done.stdout
    report = json.loads(run_cli("check", str(voice), "--json", "--set", "stage.llm.args.delay_ms=7").stdout)
    assert {stage["name"]: stage["args"] for stage in report["stages"]}["llm"]["delay_ms"] == 7


def test_check_refuses_what_is_wrong_with_one_clear_message(voice: Path) -> None:
    done = run_cli("check", str(voice), "--set", "stage.tts.args.herz=3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "herz" in done.stderr
    assert "Traceback" not in done.stderr
    missing = run_cli("check", "nowhere.toml")
    assert missing.returncode == 2
    assert "nowhere.toml" in missing.stderr


def test_a_dry_run_prints_the_plan_and_starts_nothing(voice: Path) -> None:
    done = run_cli("up", str(voice), "--dry-run")
    assert done.returncode == 0, done.stderr
    for name in ("vad#0", "asr#0", "llm#0", "tts#0", "gateway#0"):
        assert name in done.stdout
    plan = json.loads(run_cli("up", str(voice), "--dry-run", "--json", "--no-gateway", "--name", "other").stdout)
    assert plan["pipeline"] == "other"
    assert {process["name"] for process in plan["processes"]} == {"vad#0", "asr#0", "llm#0", "tts#0"}
    assert run_cli("ps").stdout == "nothing is up\n"


def test_nothing_is_up(echo: Path) -> None:
    assert json.loads(run_cli("ps", "--json").stdout) == []
    for words in (("down",), ("down", "echo"), ("logs",), ("logs", "nobody")):
        done = run_cli(*words)
        assert done.returncode == 1
        assert done.stderr.startswith("streamrt: ")
        assert "hint: " in done.stderr


def test_a_run_in_the_background_is_seen_read_and_ended(echo: Path) -> None:
    started = run_cli("up", str(echo), "--detach", "--set", "gateway.port=0")
    assert started.returncode == 0, started.stderr
    words = started.stdout.split()
    assert words[:3] == ["echo", "is", "ready"]
    assert words[-1].startswith("http://127.0.0.1:")
    try:
        (run,) = json.loads(run_cli("ps", "--json").stdout)
        assert (run["name"], run["gateways"]) == ("echo", [words[-1]])
        assert {row["name"]: row["state"] for row in run["replicas"]} == {"echo#0": "ready", "gateway#0": "ready"}
        shown = run_cli("ps").stdout
        assert "echo#0" in shown
        assert "ready" in shown
        assert "stage.ready" in run_cli("logs", "echo", "--process", "echo-0").stdout
        assert "orchestrator.log" in run_cli("logs", "-n", "1").stdout
    finally:
        ended = run_cli("down")
    assert (ended.returncode, ended.stdout) == (0, "echo is down\n")
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).iterdir()) == []
    assert "stage.ready" in run_cli("logs", "echo").stdout  # they stay until the next run of that name


def test_a_background_run_that_can_not_start_says_why(echo: Path) -> None:
    echo.write_text(ECHO.replace('use = "echo"', 'use = "testing.crash"\n[stage.args]\nin_load = true'))
    done = run_cli("up", str(echo), "--detach", "--no-gateway")
    assert done.returncode == 1
    assert "this stage was told to fail in load" in done.stderr
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).iterdir()) == []


@pytest.mark.slow
def test_down_does_not_wait_longer_than_it_is_told() -> None:
    stuck = '[pipeline]\nname = "stuck"\n[[stage]]\nname = "s"\nuse = "testing.slow"\n[run]\ndrain_s = 60\n'
    with up(stuck, gateway=False) as run, Pipeline(name=run.name) as pipeline:
        call = asyncio.run_coroutine_threadsafe(pipeline.client.submit("respond", timeout_s=None), pipeline._loop).result(20)  # never fed
        run.wait_for(lambda: run.rows()["s#0"]["info"]["running"] == 1)
        start = time.monotonic()
        done = run_cli("down", "stuck", "--within", "0.5")
        assert (done.returncode, done.stdout) == (0, "stuck is down\n")
        assert time.monotonic() - start < 30
        run.wait_for(lambda: call.is_over)


def test_logs_are_of_the_process_that_is_named(echo: Path) -> None:
    with up(ECHO, gateway=False):
        one = run_cli("logs", "--process", "echo-0", "-n", "3")
        assert "stage.ready" in one.stdout
        assert len(one.stdout.splitlines()) <= 3
        none = run_cli("logs", "--process", "llm-0")
        assert none.returncode == 1
        assert "no logs of llm-0" in none.stderr


def test_doctor_looks_at_this_machine() -> None:
    done = run_cli("doctor", "--json")
    findings = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"python", "system", "cores", "/dev/shm", "open files", "[torch]", "[voice]", "[media]", "weights"} <= set(findings)
    needed = [findings[name]["ok"] for name in ("python", "system", "cores", "/dev/shm", "open files")]
    assert done.returncode == (0 if all(needed) else 2)
    text = run_cli("doctor").stdout
    assert text.splitlines()[0].startswith("ok  python: 3.")


@pytest.mark.parametrize("words", [("up",), ("up", "x.toml", "--no-such-flag"), ("dwon",)])
def test_a_command_that_is_wrong_is_exit_code_two(words: tuple[str, ...]) -> None:
    done = run_cli(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
