"""`streamrt up` on real processes: it starts, it survives, it leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from streamrt import AsyncPipeline, Pipeline, StageFailed, StreamrtError
from tests.pipelines import Running, children_of, run_cli, up

T = TypeVar("T")

ECHO = '[pipeline]\nname = "echo"\n[[stage]]\nname = "echo"\nuse = "echo"\n'


def post(url: str, body: dict[str, Any], timeout_s: float = 30.0) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout_s)


def chat(run: Running, text: str = "hi", **more: Any) -> dict[str, Any]:
    with post(f"{run.url}/v1/chat/completions", {"model": run.name, "messages": [{"role": "user", "content": text}], **more}) as answer:
        return dict(json.load(answer))


def test_a_pipeline_answers_and_leaves_nothing() -> None:
    with up(ECHO) as run:
        assert chat(run, "hello")["choices"][0]["message"]["content"] == "hello"
        root = Path(os.environ["STREAMRT_RUN_ROOT"])
        assert {path.name for path in root.iterdir()} == {"echo", "echo.lock"}
        pids = [run.process.pid, *run.pids().values()]
    assert list(root.iterdir()) == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.slow
def test_a_second_up_of_one_name_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(ECHO)
    with up(path, gateway=False) as run:
        second = run_cli("up", str(path), "--no-gateway")
        assert second.returncode == 1
        assert f'pipeline "echo" is up already (pid {run.process.pid})' in second.stderr
        other = run_cli("up", str(path), "--no-gateway", "--name", "other", "--detach")
        assert other.returncode == 0, other.stderr
        names = {row["name"] for row in json.loads(run_cli("ps", "--json").stdout)}
        assert names == {"echo", "other"}
        assert run_cli("down", "other").stdout.strip() == "other is down"


def test_a_killed_stage_fails_what_it_served_and_comes_back() -> None:
    with up(SLOW_LLM, gateway=False) as run, Pipeline(name=run.name) as pipeline:
        for stage in ("llm#0", "tts#0"):
            chunks = pipeline.stream("hi", timeout_s=60)
            next(chunks)
            killed = run.kill(stage)
            start = time.monotonic()
            with pytest.raises(StageFailed, match=stage.partition("#")[0]):
                list(chunks)
            assert time.monotonic() - start < 2
            run.wait_for(
                lambda stage=stage, killed=killed: run.pids().get(stage, killed) != killed and run.rows()[stage]["state"] == "ready"
            )
            assert "word" in pipeline.generate("hi", max_tokens=2, timeout_s=20).text
            assert run.rows()[stage]["restarts"] == 1


def test_a_killed_gateway_comes_back_and_its_requests_are_cancelled() -> None:
    with up(SLOW_LLM) as run:
        body = {"model": run.name, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        with post(f"{run.url}/v1/chat/completions", body) as stream:
            stream.read(200)
            killed = run.kill("gateway#0")
            start = time.monotonic()
            with pytest.raises((OSError, urllib.error.URLError, ValueError, Exception)):
                while stream.read(1000):
                    pass
                raise EOFError("the stream ended")
            assert time.monotonic() - start < 2
        run.wait_for(lambda: run.rows()["llm#0"]["info"]["running"] == 0)
        run.wait_for(lambda: run.pids().get("gateway#0", killed) != killed and run.facts["gateways"])
        url = run.wait_for(lambda: _answers(run))
        assert url


def test_a_killed_orchestrator_takes_everything_with_it() -> None:
    with up(SLOW_LLM) as run:
        pids = run.pids()
        body = {"model": run.name, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        with post(f"{run.url}/v1/chat/completions", body) as stream:
            stream.read(200)
            os.kill(run.process.pid, signal.SIGKILL)
            start = time.monotonic()
            rest = _read_to_the_end(stream)
            assert time.monotonic() - start < 2
            assert b"[DONE]" not in rest
        deadline = time.monotonic() + 4
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids.values()):
            assert time.monotonic() < deadline, {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}
            time.sleep(0.05)
    # What a killed run leaves is a folder without an owner; the next run of that name takes it over.
    with up(SLOW_LLM, gateway=False):
        pass
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).iterdir()) == []


def test_a_program_that_is_killed_takes_its_pipeline_with_it(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(ECHO)
    program = "import sys, time\nfrom streamrt import Pipeline\nwith Pipeline('p.toml') as p:\n    print(p.generate('hi').text, flush=True)\n    time.sleep(60)\n"
    process = subprocess.Popen([os.sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)  # type: ignore[attr-defined]
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "hi\n"
        (orchestrator,) = children_of(process.pid)
        pids = [orchestrator, *children_of(orchestrator)]
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hanging_stage_is_killed_and_comes_back() -> None:
    hang = '[pipeline]\nname = "hang"\n[[stage]]\nname = "h"\nuse = "testing.hang"\n[deploy.h]\nhang_timeout_s = 1.5\n[run]\nheartbeat_s = 0.3\n'
    with up(hang, gateway=False) as run, Pipeline(name="hang") as pipeline:
        with pytest.raises(StreamrtError):
            pipeline.generate("hang", timeout_s=20)
        run.wait_for(lambda: run.rows()["h#0"]["state"] == "ready" and run.rows()["h#0"]["restarts"] == 1)
        assert pipeline.generate("well", timeout_s=20).text == "well"


def test_sigterm_lets_what_runs_finish_and_admits_nothing_more() -> None:
    slow = '[pipeline]\nname = "drain"\n[[stage]]\nname = "s"\nuse = "testing.slow"\n[stage.args]\nchunk_ms = 4000\n'
    with up(slow, gateway=False) as run, Pipeline(name="drain") as pipeline:
        answer = in_background(lambda: pipeline.generate("one").text)
        run.wait_for(lambda: run.rows()["s#0"]["info"]["running"] == 1)
        run.process.send_signal(signal.SIGTERM)
        assert answer.result(10) == "one"
        assert run.process.wait(10) == 0


@pytest.mark.slow
def test_the_second_sigterm_does_not_wait() -> None:
    slow = '[pipeline]\nname = "twice"\n[[stage]]\nname = "s"\nuse = "testing.slow"\n[stage.args]\nchunk_ms = 60000\n[run]\ndrain_s = 60\n'
    with up(slow, gateway=False) as run, Pipeline(name="twice") as pipeline:
        answer = in_background(lambda: pipeline.generate("one").text)
        run.wait_for(lambda: run.rows()["s#0"]["info"]["running"] == 1)
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda: run.rows()["s#0"]["state"] == "draining")
        start = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(10)
        assert time.monotonic() - start < 4
        with pytest.raises(StreamrtError):
            answer.result(10)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[pipeline]\nname = "x"\n[[stage]]\nname = "s"\nuse = "testing.crash"\n[stage.args]\nin_load = true\n', "stage s: RuntimeError: this stage was told to fail in load"),
        ('[pipeline]\nname = "x"\n[[stage]]\nname = "s"\nuse = "ecko"\n', 'stage.s.use: got "ecko"'),
        ('[pipeline]\nname = "x"\n[[stage]]\nname = "s"\nuse = "echo"\ninput = ["a"]\n', 'stage.s.input: got unknown key "input"'),
        ('[pipeline]\nname = "x"\n[[stage]]\nname = "s"\nuse = "testing.slow"\n[stage.args]\nload_s = 30\n[deploy.s]\nload_timeout_s = 1\n', "not ready within 1 s"),
        ('[pipeline]\nname = "x"\n[[stage]]\nname = "s"\nuse = "ar.causal_lm"\n[stage.args]\nmodel = "./nothing"\n', "there is no"),
    ],
    ids=["load raises", "unknown stage", "unknown key", "load hangs", "missing weights"],
)  # fmt: skip
def test_what_can_not_start_says_why_and_leaves_nothing(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(toml)
    done = run_cli("up", str(path), "--no-gateway")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).iterdir()) == []


def test_missing_weights_are_said_before_anything_starts_with_the_line_that_brings_them(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[pipeline]\nname = "x"\n[[stage]]\nname = "vad"\nuse = "speech.vad.silero"\n')
    done = run_cli("up", str(path), "--no-gateway", env={"STREAMRT_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 2
    assert "weights:silero-vad" in done.stderr
    assert f"hint: streamrt fetch {path}" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(ECHO)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_cli("up", str(path), "--set", f"gateway.port={port}")
    assert done.returncode == 2
    assert f"127.0.0.1:{port} can not be used" in done.stderr


async def test_a_stage_that_raises_fails_that_request_alone() -> None:
    crash = '[pipeline]\nname = "crash"\n[[stage]]\nname = "c"\nuse = "testing.crash"\n'
    with up(crash, gateway=False) as run:
        async with AsyncPipeline(name=run.name) as pipeline:
            with pytest.raises(StageFailed, match="RuntimeError: this stage was told to raise"):
                await pipeline.generate("raise")
            assert (await pipeline.generate("well")).text == "well"
            with pytest.raises(StreamrtError):
                await pipeline.generate("die")
            await asyncio.to_thread(run.wait_for, lambda: run.rows()["c#0"]["state"] == "ready")
            assert (await pipeline.generate("again")).text == "again"


async def test_a_request_that_has_sent_nothing_is_retried_on_another_replica() -> None:
    slow = (
        '[pipeline]\nname = "retry"\n[[stage]]\nname = "s"\nuse = "testing.slow"\n[stage.args]\nchunk_ms = 3000\n[deploy.s]\nreplicas = 2\n'
    )
    with up(slow, gateway=False) as run:
        async with AsyncPipeline(name=run.name) as pipeline:
            call = await pipeline.submit("respond", "again")
            assert call._assignment is not None
            run.kill(call._assignment.replicas["s"].name)
            assert await call.text() == "again"


SLOW_LLM = """
[pipeline]
name = "slow-llm"
[[stage]]
name = "llm"
use = "testing.llm"
[stage.args]
reply = "word word word. word word word, word word word word. word word word word word word word word word word word word word word."
delay_ms = 150
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
"""


def in_background(work: Callable[[], T]) -> Future[T]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def _answers(run: Running) -> bool:
    """Whether a gateway of this run answers a chat, wherever it listens now."""
    url = run.facts["gateways"][-1]
    body = {"model": run.name, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    with post(f"{url}/v1/chat/completions", body, 5) as answer:
        return bool(json.load(answer)["choices"])


def _read_to_the_end(stream: Any) -> bytes:
    data = b""
    try:
        while piece := stream.read1(65536):
            data += piece
    except (OSError, ValueError, EOFError) as error:
        data += repr(error).encode()
    except Exception as error:  # http.client's own errors
        data += repr(error).encode()
    return data


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
