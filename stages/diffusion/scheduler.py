"""Who runs in the next step: admission of requests, and which denoiser calls are made together.

    queued --admit--> running: waiting for its call of some key --batch--> running: with its next call ... --finish--> gone

Knows ids, keys, rows, priorities and turns. Knows nothing of tensors, requests' content or clocks. Pure.

Rules
- At most `capacity` requests run (hold latents); at most `max_queued` wait for that, one more is Overloaded.
- Calls of one key are made together, up to `max_rows` rows. A key that nobody else has runs alone and holds back nobody.
- Turns are counted in steps. What has waited longest is served first among equals, so keys take turns; every `AGING` steps of
  waiting count as one more point of priority, so nothing starves.
- Among queued requests of one priority those that can share calls with a running one go first, until one has been passed over
  `MAX_PASSED` times.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from streamrt import Overloaded

AGING = 32  # steps of waiting that are worth one point of priority
MAX_PASSED = 8  # times that a queued request lets others by


@dataclass
class _Queued:
    likeness: Hashable
    priority: int
    passed: int = 0


@dataclass
class _Running:
    likeness: Hashable
    priority: int
    since: int  # the step from which on it waits
    key: Hashable = None  # of the call that it waits for; None: it waits for nothing that a batch could do
    rows: int = 1
    is_paused: bool = False


class StepScheduler:
    """Owned and called by one engine."""

    def __init__(self, capacity: int, max_queued: int, max_rows: int) -> None:
        self.capacity = capacity
        self.max_queued = max_queued
        self.max_rows = max_rows
        self._queued: dict[Hashable, _Queued] = {}  # in order of arrival
        self._running: dict[Hashable, _Running] = {}
        self._step = 0

    @property
    def queued(self) -> int:
        return len(self._queued)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, name: Hashable, likeness: Hashable, priority: int = 0) -> None:
        """Put a request at the end of the queue. Raises Overloaded."""
        if len(self._queued) >= self.max_queued:
            raise Overloaded(f"{len(self._queued)} requests wait already")
        self._queued[name] = _Queued(likeness, priority)

    def admit(self) -> Hashable | None:
        """The queued request that starts now and runs from here on; None when there is no room, or nobody waits."""
        if not self._queued or len(self._running) >= self.capacity:
            return None
        alike = {running.likeness for running in self._running.values()}
        first, *_ = self._queued
        best = first
        if self._queued[first].passed < MAX_PASSED:
            best = max(self._queued, key=lambda name: (self._queued[name].priority, self._queued[name].likeness in alike))
        for name in self._queued:
            if name == best:
                break
            self._queued[name].passed += 1
        queued = self._queued.pop(best)
        self._running[best] = _Running(queued.likeness, queued.priority, self._step)
        return best

    def wait(self, name: Hashable, key: Hashable, rows: int) -> None:
        """A running request has its next call, of `rows` rows, ready."""
        running = self._running[name]
        running.key, running.rows, running.since = key, rows, self._step

    def pause(self, name: Hashable, is_paused: bool) -> None:
        if name in self._running:
            self._running[name].is_paused = is_paused

    def remove(self, name: Hashable) -> None:
        """Forget it, queued or running. Unknown names are no error."""
        self._queued.pop(name, None)
        self._running.pop(name, None)

    def has_work(self) -> bool:
        return bool(self._queued) and len(self._running) < self.capacity or any(map(_is_ready, self._running.values()))

    def batch(self) -> list[Hashable]:
        """The requests whose calls are made together now; [] when none is ready. Each is served once and then asked for its next call."""
        ready = {name: running for name, running in self._running.items() if _is_ready(running)}
        if not ready:
            return []
        order = sorted(ready, key=lambda name: (-self._urgency(ready[name]), ready[name].since))
        lead = ready[order[0]]
        chosen: list[Hashable] = []
        rows = 0
        for name in order:
            if ready[name].key == lead.key and (not chosen or rows + ready[name].rows <= self.max_rows):
                chosen.append(name)
                rows += ready[name].rows
        self._step += 1
        for name in chosen:
            ready[name].key = None
        return chosen

    def _urgency(self, running: _Running) -> int:
        return running.priority + (self._step - running.since) // AGING


def _is_ready(running: _Running) -> bool:
    return running.key is not None and not running.is_paused
