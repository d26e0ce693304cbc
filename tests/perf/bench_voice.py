"""A spoken turn, stage by stage: from the end of speech to the first audio, and the start of the pipeline.

    python tests/perf/bench_voice.py [--turns 10] [--json]

Starts the pipeline of examples/03_voice, has its own TTS say the question, says that to it again and again in real time, and
prints the median and the worst of each step, with the machine and the command. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from machine import cpu

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.pipelines import run_cli, start  # noqa: E402 - found through the line above

STEPS = {
    "stopped_ms": "turn detected (policy: the wait for silence)",
    "provisional_ms": "first words understood",
    "transcript_ms": "transcript",
    "first_text_ms": "first text of the reply",
    "first_audio_ms": "first audio made",
    "heard_ms": "first audio at the client",
    "work_ms": "first audio at the client, without the wait for silence",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--text", default="What is the capital of France?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="srt-") as folder:
        os.environ["STREAMRT_RUN_ROOT"] = f"{folder}/run"
        os.environ["STREAMRT_LOG_ROOT"] = f"{folder}/log"
        overrides = [word for override in args.overrides for word in ("--set", override)]
        began = time.monotonic()
        running = start(ROOT / "examples/03_voice/pipeline.toml", "--set", "gateway.port=0", *overrides)
        start_s = time.monotonic() - began
        try:
            question = Path(folder) / "question.wav"
            body = {"model": "tts-1", "voice": "alloy", "input": args.text, "response_format": "wav"}
            request = urllib.request.Request(
                f"{running.url}/v1/audio/speech", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            question.write_bytes(urllib.request.urlopen(request).read())
            reports = []
            for _ in range(args.turns):
                done = run_cli("talk", str(question), "--run", running.name, "--json")
                if done.returncode:
                    sys.exit(done.stderr)
                reports.append(json.loads(done.stdout))
        finally:
            running.down()
    rows = {}
    for report in reports:
        timings = report["timings"]
        timings["work_ms"] = timings["heard_ms"] - timings["stopped_ms"]
    for key in STEPS:
        values = sorted(report["timings"][key] for report in reports if report["timings"].get(key) is not None)
        if values:
            rows[key] = {
                "median": statistics.median(values),
                "p99": values[min(len(values) - 1, int(len(values) * 0.99))],
                "n": len(values),
            }
    machine = f"{len(os.sched_getaffinity(0))} CPUs, {cpu()}, Python {platform.python_version()}"
    command = f"python tests/perf/bench_voice.py --turns {args.turns}"
    if args.json:
        print(
            json.dumps({"machine": machine, "command": command, "start_s": start_s, "rows": rows, "transcript": reports[-1]["transcript"]})
        )
        return
    print(f"machine   {machine}\ncommand   {command}\nstart     {start_s:.1f} s from `streamrt up` to ready\n")
    print(f"question  {reports[-1]['transcript']}\nreply     {reports[-1]['reply']}\n")
    print(f"{'milliseconds after the end of speech':<58} {'n':>3} {'median':>8} {'p99':>8}")
    for key, row in rows.items():
        print(f"{STEPS[key]:<58} {row['n']:>3} {row['median']:>8.0f} {row['p99']:>8.0f}")


if __name__ == "__main__":
    main()
