"""How many requests an actor holds, whose, and in what order.

Knows ids, clients and counts. Knows nothing of stages, sockets or clocks: deadlines are the actor's, which says `done` when
one has passed. Pure: the actor feeds it every arrival and every end, and does what it answers.

Rules
- `max_requests` run at a time. Windows are absolute and add up to it, except that each client has at least 1 and may still
  use a window that has since been made smaller: such overshoot waits in a bounded queue, first come, first served.
- Windows are equal whenever a client comes or goes. Between, they move only when the new owner needs it: from clients that
  have nothing open to one that has used all of its own.
- A request that has ended, or that was cancelled before it came, is buried: it stays known for a while, so that what is
  still on its way to it is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

Key = tuple[str, int]  # request id, epoch


class Admit(msgspec.Struct, frozen=True):
    """Run it now."""


class Queue(msgspec.Struct, frozen=True):
    """It waits here; `done` of another will name it."""


class Refuse(msgspec.Struct, frozen=True):
    """Answer Finished at once."""

    reason: str  # "cancelled" before it came | "duplicate" | "the queue is full"


class Admission:
    """The requests of one replica. Owned by its actor."""

    def __init__(self, max_requests: int, *, max_queued: int = 64, max_buried: int = 4096) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests: got {max_requests}, expected at least 1")
        self.max_requests = max_requests
        self.max_queued = max_queued
        self.max_buried = max_buried
        self._windows: dict[str, int] = {}  # client -> as it was last told
        self._running: dict[Key, str] = {}  # -> client
        self._queued: OrderedDict[Key, str] = OrderedDict()  # -> client
        self._buried: OrderedDict[Key, None] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queued)

    @property
    def clients(self) -> set[str]:
        return set(self._windows)

    @property
    def windows(self) -> dict[str, int]:
        return dict(self._windows)

    def join(self, client: str) -> dict[str, int]:
        """A client has come, or comes again. Returns the windows to send: its own, and those that it changes."""
        self._windows.setdefault(client, 0)
        changed = self._divide()
        return changed | {client: self._windows[client]}

    def leave(self, client: str) -> dict[str, int]:
        """A client has gone; its requests are the actor's to end. Returns the windows that this changes."""
        if self._windows.pop(client, None) is None:
            return {}
        return self._divide()

    def offer(self, client: str, request_id: str, epoch: int = 0) -> Admit | Queue | Refuse:
        """A request has come."""
        key = (request_id, epoch)
        if key in self._running or key in self._queued:
            return Refuse("duplicate")
        if key in self._buried:
            return Refuse("cancelled")
        if len(self._running) < self.max_requests:
            self._running[key] = client
            return Admit()
        if len(self._queued) >= self.max_queued:
            return Refuse("the queue is full")
        self._queued[key] = client
        return Queue()

    def done(self, request_id: str, epoch: int = 0) -> Key | None:
        """A request has ended, whether it ran or waited. Returns the one that runs in its place, if any."""
        key = (request_id, epoch)
        self.bury(request_id, epoch)
        self._queued.pop(key, None)
        if self._running.pop(key, None) is None or not self._queued:
            return None
        following, client = self._queued.popitem(last=False)
        self._running[following] = client
        return following

    def bury(self, request_id: str, epoch: int = 0) -> None:
        """Whatever comes for this request from now on is dead."""
        key = (request_id, epoch)
        self._buried[key] = None
        self._buried.move_to_end(key)
        while len(self._buried) > self.max_buried:
            self._buried.popitem(last=False)

    def is_dead(self, request_id: str, epoch: int = 0) -> bool:
        return (request_id, epoch) in self._buried

    def rebalance(self) -> dict[str, int]:
        """Give what idle clients do not use to those that have used up theirs. Returns the windows that this changes.

        To be called after `offer`; empty unless a client is at its limit while another has nothing open.
        """
        open_now = self._open_by_client()
        if not any(open_now[client] >= window for client, window in self._windows.items()):
            return {}
        return self._apply(split(self.max_requests, {client: count > 0 for client, count in open_now.items()}))

    def _divide(self) -> dict[str, int]:
        """Equal windows for all who are here."""
        return self._apply(split(self.max_requests, dict.fromkeys(self._windows, True)))

    def _apply(self, windows: Mapping[str, int]) -> dict[str, int]:
        changed = {client: window for client, window in windows.items() if window != self._windows[client]}
        self._windows.update(changed)
        return changed

    def _open_by_client(self) -> dict[str, int]:
        count = dict.fromkeys(self._windows, 0)
        for client in (*self._running.values(), *self._queued.values()):
            if client in count:
                count[client] += 1
        return count


def split(max_requests: int, active: Mapping[str, bool]) -> dict[str, int]:
    """Absolute windows: 1 for each client, and the rest in equal parts for the active ones (for all, when none is)."""
    sharers = [client for client, is_active in active.items() if is_active] or list(active)
    rest = max(0, max_requests - (len(active) - len(sharers)))
    windows = dict.fromkeys(active, 1)
    for index, client in enumerate(sharers):
        windows[client] = max(1, rest // len(sharers) + (index < rest % len(sharers)))
    return windows
