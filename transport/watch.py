"""Whether a peer that is waited for still lives, though its socket is open: it may be stopped, or hang.

Knows time and three callables. Knows nothing of sockets, slots or credit.

Rules
- Only a peer that something waits for is watched, so an idle lane costs nothing.
- Any word of it counts. After half of `timeout_s` without one it is asked; when it has said nothing in the other half either, it hangs.
- A loop that itself did not run meanwhile (a stopped process, a long computation) begins anew: what the peer said may lie unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watch:
    """`is_waited_for()`: go on watching. `ask()`: have it say a word. `on_hung()`: called once, then nothing is watched any more."""

    def __init__(self, timeout_s: float, is_waited_for: Callable[[], bool], ask: Callable[[], None], on_hung: Callable[[], None]) -> None:
        self.heard = False  # the peer has said something; to be set by who hears it
        self._loop = asyncio.get_running_loop()
        self._half_s = timeout_s / 2
        self._is_waited_for = is_waited_for
        self._ask = ask
        self._on_hung = on_hung
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._asked = False

    def begin(self) -> None:
        """Something waits for the peer. Idempotent."""
        if self._timer is None:
            self.heard = self._asked = False
            self._arm()

    def end(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._half_s
        self._timer = self._loop.call_at(self._due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if not self._is_waited_for():
            return
        if self.heard or self._loop.time() > self._due + self._half_s / 2:
            self.heard = self._asked = False
        elif self._asked:
            self._on_hung()
            return
        else:
            self._asked = True
            self._ask()
        self._arm()
