"""`streamrt up` with a /dev/shm as containers have it: 64 MiB, empty or full. In a mount namespace of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = shutil.which("unshare")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        UNSHARE is None or bool(subprocess.run([UNSHARE, "-m", "true"], capture_output=True, check=False).returncode),
        reason="needs root and unshare -m: a /dev/shm of its own",
    ),
]

PIPELINE = '[pipeline]\nname = "small"\n[gateway]\nport = 0\n[[stage]]\nname = "echo"\nuse = "echo"\n[deploy.echo]\narena = "{arena}"\nmax_chunk = "1MiB"\n'

IN_A_NAMESPACE = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
if sys.argv[1] != "0":
    ballast = open("/dev/shm/ballast", "wb")
    os.posix_fallocate(ballast.fileno(), 0, int(sys.argv[1]) * 2**20)
up = subprocess.Popen([sys.executable, "-m", "streamrt", "up", sys.argv[2]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in up.stdout:
    print(line, end="", flush=True)
    if "http://" in line:
        from streamrt import Pipeline
        with Pipeline(name="small") as pipeline:
            print("answer:", pipeline.generate("hello " * 5000).text.count("hello"))
        used = os.statvfs("/dev/shm")
        print("used MiB:", (used.f_blocks - used.f_bavail) * used.f_frsize // 2**20)
        up.terminate()
print("status:", up.wait())
"""


def up_with(ballast_mib: int, arena: str, tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(PIPELINE.format(arena=arena))
    assert UNSHARE is not None
    done = subprocess.run(
        [UNSHARE, "-m", sys.executable, "-c", IN_A_NAMESPACE, str(ballast_mib), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_64_mib_that_could_not_hold_the_rings_are_gone_round(tmp_path: Path) -> None:
    said = up_with(0, "64MiB", tmp_path)
    assert "answer: 5000" in said
    assert "used MiB: 0" in said
    assert "status: 0" in said


def test_64_mib_that_can_hold_the_ring_of_a_stage_are_used(tmp_path: Path) -> None:
    said = up_with(0, "8MiB", tmp_path)
    assert "answer: 5000" in said
    [used] = re.findall(r"used MiB: (\d+)", said)
    assert 7 <= int(used) <= 8
    assert "status: 0" in said


def test_a_full_one_ends_the_start_with_how_much_is_missing_and_what_to_do(tmp_path: Path) -> None:
    said = up_with(60, "8MiB", tmp_path)
    assert "stage echo: /dev/shm: " in said
    assert "missing" in said
    assert "set a smaller arena in [deploy.echo]" in said
    assert "answer" not in said
    assert "status: 0" not in said
    assert "status: -7" not in said
