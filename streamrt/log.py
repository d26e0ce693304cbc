"""Logs are events with fields: `log.info("request.done", request=id, first_audio_ms=212)`. No prompts, no audio, no secrets.

One line an event on stderr; the orchestrator gathers the stages' lines into their log files. Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any


class EventLogger:
    """`logging` with the event's name as the message and the rest as fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """`error`, with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def _log(self, level: int, event: str, fields: dict[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            line = " ".join([event, *(f"{key}={_plain(value)}" for key, value in fields.items())])
            self._logger.log(level, "%s", line, exc_info=exc_info)


def get_logger(name: str) -> EventLogger:
    return EventLogger(name)


def configure(process: str, level: str = "INFO") -> None:
    """Send this process's events to stderr, each with the time and the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _plain(value: Any) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return repr(text) if " " in text or "\n" in text else text
