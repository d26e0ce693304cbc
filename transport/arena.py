"""The shared memory of one producing process: the ring, the jumbo areas beside it, and the line of sends that wait for a slot.

Knows sizes, holders and waiting; knows nothing of sockets, credit or headers.

Rules
- A payload larger than the largest slot gets a jumbo area: a ring of one slot in a file of its own, kept and used again. All jumbo
  areas together stay within `max_chunk_bytes` (rounded up); unused ones are given back when another size is needed.
- Sends wait in one line, first come, first served; one that can not be served now lets the others pass.
- What a request may hold is the ring's rule (see ring.py). For jumbo areas it is: as much as is unused, or one area.
- Files are made on a thread: touching fresh memory costs about 0.6 ms per MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from transport.errors import Closed, NoSpace, TooLarge, WouldBlock
from transport.layout import arena_layout, jumbo_layout
from transport.memfile import MemFile
from transport.ring import Loan, Ring

ARENA_FILE = 0  # the number of the arena in messages; jumbo areas count from 1


class _Waiting:
    """A send in line."""

    __slots__ = ("future", "holder", "nbytes")

    def __init__(self, nbytes: int, holder: Hashable, future: asyncio.Future[Loan]) -> None:
        self.nbytes = nbytes
        self.holder = holder
        self.future = future


class Arena:
    """Where payloads lie until they are released."""

    def __init__(
        self,
        file: MemFile,
        arena_bytes: int,
        max_chunk_bytes: int,
        threads: ThreadPoolExecutor,
        on_drop: Callable[[int], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Use `Arena.create`.

        `on_drop(number)`: that jumbo area is no more; tell those who have mapped it. `on_wait()`: a send waits for a slot.
        """
        self.files: dict[int, MemFile] = {ARENA_FILE: file}
        self.ring = Ring(arena_layout(arena_bytes), file.memory, ARENA_FILE)
        self._on_drop = on_drop
        self._on_wait = on_wait
        self._jumbos: dict[int, Ring] = {}  # by number, the one used last at the end
        self._max_jumbo_bytes = jumbo_layout(max_chunk_bytes).max_payload_bytes
        self._budget_bytes = arena_bytes + self._max_jumbo_bytes
        self._jumbo_bytes = 0  # allocated, those in the making included
        self._next_file = ARENA_FILE + 1
        self.line: list[_Waiting] = []  # to be looked at only
        self._growing: asyncio.Task[None] | None = None
        self._threads = threads

    @classmethod
    async def create(
        cls,
        arena_bytes: int,
        max_chunk_bytes: int,
        threads: ThreadPoolExecutor,
        *,
        on_drop: Callable[[int], None],
        on_wait: Callable[[], None],
    ) -> Arena:
        """Allocate, touch and map the arena. Raises NoSpace."""
        budget_bytes = arena_bytes + jumbo_layout(max_chunk_bytes).max_payload_bytes
        file = await _make_file(threads, arena_layout(arena_bytes).total_bytes, budget_bytes)
        return cls(file, arena_bytes, max_chunk_bytes, threads, on_drop, on_wait)

    @property
    def slots_in_use(self) -> int:
        return self.ring.slots_in_use + sum(ring.slots_in_use for ring in self._jumbos.values())

    @property
    def bytes_in_use(self) -> int:
        return self.ring.bytes_in_use + self._jumbo_bytes_in_use

    @property
    def bytes_total(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def try_loan(self, nbytes: int, holder: Hashable) -> Loan | None:
        """A slot for `nbytes`, or None when there is none to spare now or others are in line for one."""
        return None if self.line else self._find(nbytes, holder)

    def line_up(self, nbytes: int, holder: Hashable) -> asyncio.Future[Loan]:
        """A place in line. The taker owns the loan that it yields; `leave` gives the place, or an unwanted loan, back."""
        waiting = _Waiting(nbytes, holder, asyncio.get_running_loop().create_future())
        self.line.append(waiting)
        self._serve()
        if self.line:
            self._on_wait()
        return waiting.future

    def leave(self, future: asyncio.Future[Loan]) -> None:
        """The send that stood in line is given up."""
        self.line = [waiting for waiting in self.line if waiting.future is not future]
        if future.done() and not future.cancelled() and future.exception() is None:
            self.abort(future.result())

    def abort(self, loan: Loan) -> None:
        """Give a loan back that nobody will see."""
        loan.ring.abort(loan)
        self._serve()

    def drop(self, consumer: Hashable) -> None:
        """`consumer` is gone: what it had borrowed comes back."""
        for ring in (self.ring, *self._jumbos.values()):
            ring.drop(consumer)
        self._serve()

    def released(self) -> None:
        """Slots were released on their rings: serve the line."""
        if self.line:
            self._serve()

    def close(self) -> None:
        """Those in line raise Closed; the memory goes when its last view does. Idempotent."""
        line, self.line = self.line, []
        for waiting in line:
            if not waiting.future.done():
                waiting.future.set_exception(Closed("the connector was closed"))
        if self._growing is not None:
            self._growing.cancel()
        for ring in (self.ring, *self._jumbos.values()):
            ring.close()
        for file in self.files.values():
            file.close()

    @property
    def _jumbo_bytes_in_use(self) -> int:
        return sum(ring.bytes_in_use for ring in self._jumbos.values())

    def _find(self, nbytes: int, holder: Hashable) -> Loan | None:
        if nbytes > self.ring.layout.max_payload_bytes:
            return self._find_jumbo(nbytes, holder)
        try:
            return self.ring.loan(nbytes, holder)
        except WouldBlock:
            return None

    def _find_jumbo(self, nbytes: int, holder: Hashable) -> Loan | None:
        if nbytes > self._max_jumbo_bytes:
            raise TooLarge(f"{nbytes} bytes, and jumbo areas end at {self._max_jumbo_bytes}")
        if not self._may_hold_jumbo(nbytes, holder):
            return None
        fitting = [ring for ring in reversed(self._jumbos.values()) if ring.idle and ring.layout.max_payload_bytes >= nbytes]
        if not fitting:
            return None
        ring = min(fitting, key=lambda ring: ring.layout.max_payload_bytes)
        self._jumbos[ring.file] = self._jumbos.pop(ring.file)
        return ring.loan(nbytes, holder)

    def _may_hold_jumbo(self, nbytes: int, holder: Hashable) -> bool:
        mine = sum(ring.bytes_in_use for ring in self._jumbos.values() if ring.holds(holder))
        return not mine or mine + nbytes <= self._max_jumbo_bytes - self._jumbo_bytes_in_use

    def _serve(self) -> None:
        """Give slots to those in line who can have one."""
        if not self.line:
            return
        still: list[_Waiting] = []
        for waiting in self.line:
            if waiting.future.done():
                continue
            loan = self._find(waiting.nbytes, waiting.holder)
            if loan is not None:
                waiting.future.set_result(loan)
            else:
                still.append(waiting)
        self.line = still
        if self._growing is None:
            for waiting in still:
                if waiting.nbytes > self.ring.layout.max_payload_bytes and self._make_room(waiting):
                    self._growing = asyncio.get_running_loop().create_task(self._grow(waiting))
                    return

    def _make_room(self, waiting: _Waiting) -> bool:
        """Whether a jumbo area for `waiting` may be made; drops unused ones, the one used longest ago first, until it may."""
        nbytes = jumbo_layout(waiting.nbytes).max_payload_bytes
        if not self._may_hold_jumbo(waiting.nbytes, waiting.holder) or self._jumbo_bytes_in_use + nbytes > self._max_jumbo_bytes:
            return False
        for ring in list(self._jumbos.values()):
            if self._jumbo_bytes + nbytes <= self._max_jumbo_bytes:
                break
            if ring.idle:
                self._jumbo_bytes -= ring.layout.max_payload_bytes
                del self._jumbos[ring.file]
                self.files.pop(ring.file).close()
                self._on_drop(ring.file)
        return True

    async def _grow(self, waiting: _Waiting) -> None:
        layout = jumbo_layout(waiting.nbytes)
        number, self._next_file = self._next_file, self._next_file + 1
        self._jumbo_bytes += layout.max_payload_bytes
        failure: NoSpace | None = None
        try:
            file = await _make_file(self._threads, layout.total_bytes, self._budget_bytes)
        except NoSpace as error:
            self._jumbo_bytes -= layout.max_payload_bytes
            failure = error
        else:
            self.files[number] = file
            self._jumbos[number] = Ring(layout, file.memory, number)
        self._growing = None
        if failure is not None and not waiting.future.done():
            waiting.future.set_exception(failure)
        self._serve()


async def _make_file(threads: ThreadPoolExecutor, nbytes: int, budget_bytes: int) -> MemFile:
    making = asyncio.get_running_loop().run_in_executor(threads, MemFile, nbytes, budget_bytes)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_unwanted)  # the thread goes on
        raise


def _close_unwanted(made: asyncio.Future[MemFile]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
