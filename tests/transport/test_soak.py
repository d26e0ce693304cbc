"""Half a minute of the soak; `python tests/perf/soak_hop.py` goes on for longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "perf" / "soak_hop.py"


@pytest.mark.slow
def test_sixteen_streams_with_stalls_and_cancels_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--seconds", "30", "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["failed"] == []
