"""When a process is started, restarted, killed or given up. One-for-one: neighbours are left alone.

Knows names, states and times. Knows nothing of processes, sockets or requests. Pure: the orchestrator feeds it every event
with the time, carries out the actions it answers, and calls `tick` at `next_ns`, its only timer.

    starting --registered--> loading --ready--> ready --drain--> draining
        |                       |                 |                 |
        +--------- exited ------+-----------------+-----------------+--> down --(back-off)--> starting
                                                                          |
                                                          given up -----> failed

Rules
- What fails before it was ever ready is given up at once, with its error: a pipeline that can not start says so and ends.
- What had been ready is restarted after a delay that doubles with each restart inside `restart_window_s`; more than
  `max_restarts` of them inside it, and it is given up while the others go on.
- At the start no process is added once `max_loading` load side by side (ranks start together, whatever their number), and those that
  take longest are first: loading is work for a core, and the longest one decides when the pipeline is ready.
- Until ready, only death and `load_timeout_s` count; from ready on, only death and missed heartbeats.
- A replica of several ranks is one child. It is ready when all of them are, and silent when one of them is. The death of any is its
  death: the others are killed, and when the last is gone it is down. Once told to stop, its ranks end in their own order.
- Stopping goes from the last level to the first, each level once the later one is gone: drain, stop, and kill past the bound.

Source: restart intensity and one_for_one are OTP's.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable

import msgspec

from streamrt.config import RunConfig

STOP_S = 3.0  # from Stop, or from the end of the drain, until Kill

STATES = ("waiting", "starting", "loading", "ready", "draining", "down", "failed")


class Start(msgspec.Struct, frozen=True):
    """Spawn this process; all of its ranks."""

    name: str


class Drain(msgspec.Struct, frozen=True):
    """Ask it to admit nothing more and to answer Drained."""

    name: str
    within_s: float


class Stop(msgspec.Struct, frozen=True):
    """Ask it to exit."""

    name: str


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL, to whatever lives of it."""

    name: str
    reason: str


class GiveUp(msgspec.Struct, frozen=True):
    """It will not be started again."""

    name: str
    error: str
    hint: str = ""
    is_fatal: bool = False  # it was never ready: the pipeline can not be started


Action = Start | Drain | Stop | Kill | GiveUp


class Watched(msgspec.Struct, frozen=True):
    """What the plan says of a process, or of a replica of several, that is to be kept alive."""

    name: str
    level: int = 0  # stopped in descending order
    load_s: float = 1.0  # about how long it loads, alone on a core
    load_timeout_s: float = 120.0
    hang_timeout_s: float = 10.0
    ranks: int = 1  # processes that live and die together


class Child:
    """A watched process as it is now. Written by the supervisor alone."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.name = watched.name
        self.state = "waiting"  # for its turn to load
        self.alive: set[int] = set()  # ranks of which there is an OS process, whatever the state
        self.heard_ns: dict[int, int] = {}  # rank -> its Ready or last heartbeat
        self.error = ""  # why it is down, failed or being killed
        self.hint = ""
        self.restarts = 0  # in all
        self.was_ready = False  # at any time in this run
        self.due_ns: int | None = None  # of the next thing that happens if nothing else does; its meaning follows from the state
        self.recent_ns: deque[int] = deque()  # restarts inside the window
        self.is_told = False  # a Stop is out
        self.is_doomed = False  # a Kill is out

    @property
    def is_alive(self) -> bool:
        return bool(self.alive)


class Supervisor:
    """The policy of one run. Owned by the orchestrator."""

    def __init__(self, watched: Iterable[Watched], policy: RunConfig | None = None, *, max_loading: int = 1000) -> None:
        self.policy = policy or RunConfig()
        self.children: dict[str, Child] = {w.name: Child(w) for w in watched}
        self.max_loading = max_loading
        self.is_stopping = False
        self._line: list[Child] = []  # not started yet, the first to start last
        self._drain_until_ns: int | None = None
        self._kill_at_ns: int | None = None

    @property
    def is_ready(self) -> bool:
        """Every process is ready."""
        return all(child.state == "ready" for child in self.children.values())

    @property
    def is_stopped(self) -> bool:
        """We were asked to stop, and no process is left."""
        return self.is_stopping and not any(child.is_alive for child in self.children.values())

    @property
    def next_ns(self) -> int | None:
        """When to call `tick` next, unless an event comes first; None = not at all."""
        times = [self._drain_until_ns, self._kill_at_ns, *(child.due_ns for child in self.children.values())]
        return min((time for time in times if time is not None), default=None)

    def start(self, now_ns: int) -> list[Action]:
        """Begin: as many processes as may load side by side; the others follow as those get ready."""
        self._line = sorted(self.children.values(), key=lambda child: (child.watched.load_s, -child.watched.level))
        return self._start_next(now_ns)

    def on_registered(self, name: str) -> list[Action]:
        """It can be spoken to."""
        child = self.children[name]
        if child.state == "starting":
            child.state = "loading"
        return []

    def on_ready(self, name: str, now_ns: int, rank: int = 0) -> list[Action]:
        """Loaded and warm."""
        child = self.children[name]
        if child.state in ("starting", "loading") and not child.is_doomed:
            child.heard_ns[rank] = now_ns
            if len(child.heard_ns) == child.watched.ranks:
                child.state = "ready"
                child.was_ready = True
                child.error = child.hint = ""
                child.heard_ns = dict.fromkeys(child.heard_ns, now_ns)  # nobody is watched before all are ready
                child.due_ns = now_ns + _ns(child.watched.hang_timeout_s)
        return self._start_next(now_ns)

    def on_heartbeat(self, name: str, now_ns: int, rank: int = 0) -> list[Action]:
        child = self.children[name]
        if child.state == "ready" and not child.is_doomed:
            child.heard_ns[rank] = now_ns
            child.due_ns = min(child.heard_ns.values()) + _ns(child.watched.hang_timeout_s)
        return []

    def on_load_failed(self, name: str, error: str, hint: str = "") -> list[Action]:
        """`load` raised. The process exits by itself; until then the load timeout stands."""
        child = self.children[name]
        if child.state not in ("starting", "loading"):
            return []
        child.error, child.hint = error, hint
        return [] if child.was_ready or self.is_stopping else self._give_up(child, is_fatal=True)

    def on_exited(self, name: str, status: int, now_ns: int, rank: int = 0) -> list[Action]:
        """The OS process is gone. `status`: as from waitpid; negative for a signal."""
        child = self.children[name]
        state = child.state
        child.alive.discard(rank)
        if child.is_alive:
            if child.is_told:
                return []
            if state != "failed":
                child.state = "down"  # nobody is to route to it while the others go
            return _kill(child, f"rank {rank} {_exit_words(status, state)}")
        child.is_told = child.is_doomed = False
        child.due_ns = None
        if state != "failed":
            child.state = "down"
        if self.is_stopping:
            return self._stop_level(now_ns)
        if state == "failed":
            return []
        child.error = child.error or _exit_words(status, state)
        if not child.was_ready:
            return self._give_up(child, is_fatal=True)
        return self._back_off(child, now_ns) + self._start_next(now_ns)

    def on_drained(self, name: str, now_ns: int) -> list[Action]:
        """Nothing runs there any more."""
        child = self.children[name]
        return self._ask_to_stop(child, now_ns) if child.state == "draining" else []

    def stop(self, now_ns: int, drain_s: float | None = None) -> list[Action]:
        """Asked to stop; asked again, everything is killed. `drain_s` in place of the policy's; 0 = do not drain."""
        if self.is_stopping:
            return [action for child in self.children.values() for action in _kill(child, "stopped twice")]
        self.is_stopping = True
        self._drain_until_ns = now_ns + _ns(self.policy.drain_s if drain_s is None else drain_s)
        self._kill_at_ns = self._drain_until_ns + _ns(STOP_S)
        for child in self.children.values():
            child.due_ns = None
        return self.tick(now_ns) or self._stop_level(now_ns)

    def tick(self, now_ns: int) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        if _is_due(self._kill_at_ns, now_ns):
            self._kill_at_ns = self._drain_until_ns = None
            return [action for child in self.children.values() for action in _kill(child, "did not stop in time")]
        if _is_due(self._drain_until_ns, now_ns):
            self._drain_until_ns = None
            for child in self._from_last():
                actions += self._ask_to_stop(child, now_ns)
        for child in self.children.values():
            if _is_due(child.due_ns, now_ns):
                actions += self._overdue(child, now_ns)
        return actions

    def _overdue(self, child: Child, now_ns: int) -> list[Action]:
        """What `child.due_ns` stood for has come."""
        child.due_ns = None
        if self.is_stopping:
            return _kill(child, "did not stop in time")
        if child.state == "down":
            child.restarts += 1
            return self._start(child, now_ns)
        if child.state == "ready":
            silent = min(child.heard_ns, key=lambda rank: child.heard_ns[rank])
            of_rank = f" of rank {silent}" if child.watched.ranks > 1 else ""
            return _kill(child, f"no heartbeat{of_rank} for {child.watched.hang_timeout_s:g} s")
        actions = _kill(child, f"not ready within {child.watched.load_timeout_s:g} s")
        if not child.was_ready:
            stage = child.name.partition("#")[0]
            child.hint = f"raise load_timeout_s in [deploy.{stage}]" if stage != "gateway" else ""
            actions += self._give_up(child, is_fatal=True)
        return actions

    def _start_next(self, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        while self._line and not self.is_stopping and self._num_loading < self.max_loading:
            actions += self._start(self._line.pop(), now_ns)
        return actions

    @property
    def _num_loading(self) -> int:
        return sum(child.watched.ranks for child in self.children.values() if child.state in ("starting", "loading"))

    def _start(self, child: Child, now_ns: int) -> list[Action]:
        child.state = "starting"
        child.alive = set(range(child.watched.ranks))
        child.heard_ns = {}
        child.error = child.hint = ""
        child.due_ns = now_ns + _ns(child.watched.load_timeout_s)
        return [Start(child.name)]

    def _back_off(self, child: Child, now_ns: int) -> list[Action]:
        recent, policy = child.recent_ns, self.policy
        while recent and recent[0] <= now_ns - _ns(policy.restart_window_s):
            recent.popleft()
        if len(recent) >= policy.max_restarts:
            child.error = f"{child.error}; restarted {len(recent)} times within {policy.restart_window_s:g} s"
            return self._give_up(child, is_fatal=False)
        child.due_ns = now_ns + _ns(min(policy.restart_delay_max_s, policy.restart_delay_s * 2 ** len(recent)))
        recent.append(now_ns)
        return []

    def _give_up(self, child: Child, *, is_fatal: bool) -> list[Action]:
        child.state = "failed"
        child.due_ns = None
        return [GiveUp(child.name, child.error, child.hint, is_fatal)]

    def _from_last(self) -> list[Child]:
        """Living children, the last level first."""
        return sorted((c for c in self.children.values() if c.is_alive), key=lambda child: -child.watched.level)

    def _stop_level(self, now_ns: int) -> list[Action]:
        """Go on stopping: the last level that still lives, unless it has been told already."""
        alive = self._from_last()
        actions: list[Action] = []
        for child in alive:
            if child.watched.level != alive[0].watched.level or child.state == "draining":
                continue
            if child.state == "ready" and self._drain_until_ns is not None:
                child.state = "draining"
                actions.append(Drain(child.name, (self._drain_until_ns - now_ns) / 1e9))
            else:
                actions += self._ask_to_stop(child, now_ns)
        return actions

    def _ask_to_stop(self, child: Child, now_ns: int) -> list[Action]:
        """Stop what can be spoken to and has something to close; there is nothing to close in what has not loaded."""
        if child.state not in ("ready", "draining"):
            return _kill(child, "stopped before it was ready")
        if child.is_told:
            return []
        child.state = "draining"
        child.is_told = True
        child.due_ns = now_ns + _ns(STOP_S)
        return [Stop(child.name)]


def _kill(child: Child, reason: str) -> list[Action]:
    child.due_ns = None
    if child.is_doomed or not child.is_alive:
        return []
    child.is_doomed = True
    child.error = child.error or reason
    return [Kill(child.name, reason)]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _is_due(time_ns: int | None, now_ns: int) -> bool:
    return time_ns is not None and time_ns <= now_ns


def _exit_words(status: int, state: str) -> str:
    when = f" while {state}" if state in ("starting", "loading") else ""
    if status >= 0:
        return f"exited with status {status}{when}"
    try:
        return f"killed by {signal.Signals(-status).name}{when}"
    except ValueError:
        return f"killed by signal {-status}{when}"
