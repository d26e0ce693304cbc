"""Traces: one file of a whole run, one event per hop, in the format that Perfetto reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamrt import AsyncPipeline
from streamrt.trace import Tracer
from tests.pipelines import up

SPEAKING = """
[pipeline]
name = "traced"
[[stage]]
name = "llm"
use = "testing.llm"
[stage.args]
reply = "One, two."
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    """The file as a viewer reads it: an array whose closing bracket may be missing."""
    return list(json.loads(path.read_text().rstrip().rstrip(",") + "]"))


def test_off_costs_nothing_and_writes_nothing() -> None:
    tracer = Tracer(None, "llm#0")
    tracer.span("llm", "r1", 0, 1)
    tracer.close()
    assert not tracer.is_on


def test_processes_append_whole_events_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("of the last run")
    Tracer.begin(path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom streamrt.trace import Tracer\n"
        "tracer = Tracer(Path(sys.argv[1]), sys.argv[2])\n"
        "for n in range(200): tracer.span('x' * 200, 'r', n, n + 1, n=n)\n"
        "tracer.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), f"p{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    events = events_of(path)
    assert sorted(event["args"]["name"] for event in events if event["ph"] == "M") == ["p0", "p1", "p2"]
    assert sorted(event["args"]["n"] for event in events if event["ph"] == "X") == sorted([*range(200)] * 3)


async def test_a_traced_run_tells_every_hop_of_every_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with up(SPEAKING, "--trace", str(path), gateway=False) as run:
        async with AsyncPipeline(name=run.name) as pipeline:
            chunks = [(await pipeline.generate("Hello")).chunks for _ in range(2)]
    events = events_of(path)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"llm#0", "tts#0"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 and event["cat"] == "request" for event in spans)
    assert len({event["tid"] for event in spans}) == 2  # a row for each request
    for request in {event["args"]["request"] for event in spans}:
        mine = [event for event in spans if event["args"]["request"] == request]
        assert {event["name"] for event in mine} == {"llm", "tts", "send text", "send audio", "send event"}
        (whole,) = (event for event in mine if event["name"] == "llm")
        assert whole["args"]["outcome"] == "completed"
        sends = [event for event in mine if event["args"].get("stage") == "llm"]
        assert [event["args"]["seq"] for event in sends] == [0, 1, 2]
        assert all(whole["ts"] <= event["ts"] <= whole["ts"] + whole["dur"] for event in sends)
    sent = sum(event["name"].startswith("send") for event in spans)
    assert sent == sum(map(len, chunks))
