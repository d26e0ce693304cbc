"""Real pipelines for tests: `streamrt up` in processes of its own, on a free port, under a folder that the test run owns.

with up(VOICE_SCRIPT) as run:
    run.url, run.name, run.pids(), run.kill("llm#0"), run.rows()
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 60.0
STOP_S = 30.0

# A whole voice agent of scripted stages: turns, transcripts, text and tones, all of them known.
VOICE_SCRIPT = """
[pipeline]
name = "voice-script"

[[stage]]
name = "vad"
use = "testing.vad"

[[stage]]
name = "asr"
use = "testing.asr"

[[stage]]
name = "llm"
use = "testing.llm"
[stage.args]
reply = "The capital of France is Paris. It lies on the Seine, and it is old."

[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
"""


class Running:
    """A pipeline that is up."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, url: str, output: str) -> None:
        self.process = process
        self.name = name
        self.url = url  # of the gateway, "" when there is none
        self.took_s = 0.0  # from start to ready, where a test has measured it
        self.output = output  # what `up` printed until it was ready

    @property
    def facts(self) -> dict[str, Any]:
        path = Path(os.environ["STREAMRT_RUN_ROOT"]) / self.name / "run.json"
        return dict(json.loads(path.read_text()))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Process name -> row of the replica table, as `streamrt ps --json` shows it."""
        done = subprocess.run([sys.executable, "-m", "streamrt", "ps", "--json"], capture_output=True, text=True, timeout=20, check=True)
        run = next(run for run in json.loads(done.stdout) if run["name"] == self.name)
        return {row["name"]: row for row in run["replicas"]}

    def pids(self) -> dict[str, int]:
        """Process name -> pid, of what lives now; from the kernel, not from the runtime."""
        found = {}
        for pid in children_of(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "streamrt.process" in words:
                rank = f".{words[words.index('--rank') + 1]}" if "--rank" in words else ""
                found[f"{words[words.index('streamrt.process') + 2]}#{words[words.index('--replica') + 1]}{rank}"] = pid
        return found

    def kill(self, name: str) -> int:
        """SIGKILL one process; its pid."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for(self, what: Callable[[], Any], within_s: float = 20.0) -> Any:
        """Ask `what` until it is true (starting over costs a process, so it is asked a few times a second)."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                answer = what()
            except (StopIteration, subprocess.CalledProcessError, OSError):
                answer = None
            if answer:
                return answer
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s} s; the logs:\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        folder = Path(os.environ["STREAMRT_LOG_ROOT"]) / self.name
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("*.log")))

    def down(self) -> None:
        """As `streamrt down` does; every process is gone afterwards."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def up(pipeline: str | Path, *options: str, env: dict[str, str] | None = None, gateway: bool = True) -> Iterator[Running]:
    """Start a pipeline (TOML text, or a path), wait until it is ready, end it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.toml"
        if isinstance(pipeline, Path):
            path = pipeline
        else:
            path.write_text(pipeline)
        running = start(path, *(["--set", "gateway.port=0"] if gateway else ["--no-gateway"]), *options, env=env)
        try:
            yield running
        finally:
            running.down()


def start(path: Path, *options: str, env: dict[str, str] | None = None) -> Running:
    """`streamrt up path`, and wait for its word. Raises AssertionError with what it printed when it ends instead."""
    command = [sys.executable, "-m", "streamrt", "up", str(path), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
    )
    running = Running(process, "", "", "")
    try:
        running.output = _read_until_ready(process)
    except BaseException:
        running.down()
        raise
    running.name = running.output.rpartition(" is ready after")[0].rpartition("\n")[2]
    running.url = next(iter(running.facts["gateways"]), "")
    return running


def _read_until_ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    output = b""
    while b" is ready after" not in output:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"not ready in time:\n{output.decode()}")
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            raise AssertionError(f"ended with {process.wait()}:\n{output.decode()}")
        output += piece
    return output.decode()


def children_of(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except FileNotFoundError:
            pass  # that thread has just ended
    return found


def run_cli(*words: str, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One `streamrt` command to its end."""
    command: Sequence[str] = [sys.executable, "-m", "streamrt", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
    )
