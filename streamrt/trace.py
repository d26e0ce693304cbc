"""Where the time of a request goes: one event per hop, in one file that Perfetto and chrome://tracing open.

The file is a JSON array in Chrome's trace event format. Every process of the run appends whole lines to it (O_APPEND keeps
them apart), so nobody gathers them; the format allows the closing bracket to be missing. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Tracer:
    """Appends events of one process; `Tracer(None, ...)` writes nothing and costs one test."""

    def __init__(self, path: Path | None, process: str) -> None:
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        if self._fd >= 0:
            self._write({"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": process}})

    @staticmethod
    def begin(path: Path) -> None:
        """Start the file anew; by the orchestrator, before any process appends to it."""
        path.write_text("[\n")

    @property
    def is_on(self) -> bool:
        return self._fd >= 0

    def span(self, name: str, request_id: str, start_ns: int, end_ns: int, **fields: Any) -> None:
        """Something of `request_id` that took from `start_ns` to `end_ns`."""
        if self._fd >= 0:
            duration = (end_ns - start_ns) / 1000
            self._write({"ph": "X", "name": name, "cat": "request", "pid": self._pid, "tid": _lane(request_id), "ts": start_ns / 1000,
                         "dur": duration, "args": {"request": request_id, **fields}})  # fmt: skip

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, event: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(event, separators=(",", ":")).encode() + b",\n")


def _lane(request_id: str) -> int:
    """One row per request in the viewer: a small stable number."""
    number = 0
    for byte in request_id.encode():
        number = (number * 31 + byte) % 1_000_003
    return number
