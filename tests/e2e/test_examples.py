"""Every example runs. `03_voice` and `04_openai_client` are run by test_voice.py, which has their pipeline up; `05_digits` by
tests/stages/diffusion/test_digits.py, which trains it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.pipelines import run_cli, up

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_has_a_readme_and_a_test() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders == {"01_echo", "02_own_stage", "03_voice", "04_openai_client", "05_digits"}
    for folder in folders:
        assert (EXAMPLES / folder / "README.md").is_file()
        assert folder in (EXAMPLES / "README.md").read_text()


def test_01_echo_streams_what_it_is_told() -> None:
    with up(EXAMPLES / "01_echo/pipeline.toml") as run:
        body = {"model": "echo", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        request = urllib.request.Request(f"{run.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        lines = urllib.request.urlopen(request, timeout=30).read().decode().splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert any('"content":"hello"' in line for line in lines)


def test_02_a_stage_of_ones_own_runs_from_python() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "02_own_stage/main.py")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "HELLO FROM A STAGE OF MY OWN!\n", done.stderr
    code = [line for line in (EXAMPLES / "02_own_stage/shout.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 20


@pytest.mark.parametrize("name", ["01_echo", "02_own_stage", "03_voice", "05_digits"])
def test_every_pipeline_of_the_examples_checks(name: str) -> None:
    done = run_cli("check", str(EXAMPLES / name / "pipeline.toml"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"]
