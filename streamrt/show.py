"""What a person sees in the terminal: the live lines of `up`, the table of `ps`, the bar of `fetch`.

Plain lines where the output is not a terminal. Knows rows and texts; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table as Grid

from streamrt import weights
from streamrt.config import PipelineConfig
from transport.messages import Table

STYLES = {
    "ready": "green",
    "waiting": "dim",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "down": "red",
    "failed": "red",
}


class Display:
    """One line per process while a pipeline loads, then its addresses. Base: shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def change(self, table: Table) -> None:
        """The membership has changed."""

    def ready(self, addresses: Sequence[str]) -> None:
        """Everything is up."""


class PlainDisplay(Display):
    """A line per change of state: for logs and pipes."""

    def __init__(self, config: PipelineConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._said: dict[str, str] = {}
        self._start = time.monotonic()

    def change(self, table: Table) -> None:
        for row in table.replicas:
            text = f"{row.state}{': ' + row.error if row.error else ''}"
            if self._said.get(row.name) != text:
                self._said[row.name] = text
                self._print(f"{row.name:<12} {text}")

    def ready(self, addresses: Sequence[str]) -> None:
        self._print(f"{self._config.name} is ready after {time.monotonic() - self._start:.1f} s")
        for address in addresses:
            self._print(f"  open {address}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(PlainDisplay):
    """The same, redrawn in place."""

    def __init__(self, config: PipelineConfig, console: Console) -> None:
        super().__init__(config, console)
        self._live = Live(Grid.grid(), console=console, auto_refresh=False)
        self._since: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def change(self, table: Table) -> None:
        now = time.monotonic()
        grid = Grid.grid(padding=(0, 2))
        for row in table.replicas:
            state, since = self._since.get(row.name, ("", now))
            if state != row.state:
                since = now
                self._since[row.name] = (row.state, now)
            took = since - self._start if row.state == "ready" else now - self._start
            note = row.error or (row.progress if row.state == "loading" else "")
            grid.add_row(row.name, f"[{STYLES.get(row.state, 'white')}]{row.state}[/]", f"{took:.1f} s", note)
        self._live.update(grid, refresh=True)

    def ready(self, addresses: Sequence[str]) -> None:
        self._live.stop()
        super().ready(addresses)
        self._print("  stop with Ctrl-C")


def make_display(config: PipelineConfig, *, quiet: bool) -> Display:
    """What suits where the output goes."""
    if quiet:
        return Display()
    console = Console()
    return LiveDisplay(config, console) if console.is_terminal else PlainDisplay(config, console)


def print_runs(rows: Sequence[dict[str, Any]]) -> None:
    """The runs that are up, as `ps` shows them."""
    console = Console()
    for run in rows:
        console.print(
            f"{run['name']}  pid {run['pid']}  {' '.join(run['gateways'])}  {run.get('error', '')}", markup=False, highlight=False
        )
        grid = Grid(box=None, pad_edge=True, show_edge=False)
        for title in ("process", "state", "pid", "running", "queued", "max", "restarts", ""):
            grid.add_column(title)
        for row in run["replicas"]:
            info = row["info"]
            pids = " ".join(map(str, [row["pid"], *row["rank_pids"]]))
            grid.add_row(row["name"], f"[{STYLES.get(row['state'], 'white')}]{row['state']}[/]", pids, str(info.get("running", "")),
                         str(info.get("queued", "")), str(info.get("max_requests", "")), str(row["restarts"]), row["error"])  # fmt: skip
        console.print(grid)


def fetch_with_progress(sources: Sequence[str], folder: Path) -> None:
    """`weights.fetch_all` behind a progress bar; what is there already is said and skipped."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(step: weights.Progress) -> None:
            if step.source not in tasks:
                tasks[step.source] = bar.add_task(step.source, total=step.total_bytes or None)
            bar.update(
                tasks[step.source], description=f"{step.source} {step.what}", completed=step.done_bytes, total=step.total_bytes or None
            )

        weights.fetch_all(sources, progress, base_dir=folder)
    for source in sources:
        console.print(f"{source}: {weights.resolve(source, folder)}", markup=False, highlight=False, soft_wrap=True)
