"""Which sequences run in the next step, and how many of their tokens.

    add -> waiting --admit: a row, blocks, what is cached--> running --remove--> gone
              ^                                                |
              +------- preempted: its blocks are needed -------+

Pure: knows counts of tokens, blocks and rows; no torch, no clock, no requests' meaning.

Rules
- A step has at most `max_tokens` tokens: first those of sequences that need one (decoding), then prompts, a chunk of each.
- The order is that of arrival; one level of priority is worth AGING steps of it. So nobody waits for ever: who comes AGING steps later comes after.
- Blocks run out: who is held (paused, waiting for input) gives its blocks first, then who is last in the order. Its tokens are computed again
  later, as far as they are not cached. The first in the order always gets what it needs, so there is progress: the pool holds the longest sequence.
- Who can not be admitted is not overtaken.
- A sequence's first `computed` tokens have keys and values in its blocks, always.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from stages.ar.blocks import BlockPool, PrefixKeys
from streamrt import Overloaded, TooLong

AGING = 256  # steps


@dataclass(eq=False, kw_only=True)
class Sequence:
    """Tokens, and how far they are computed. `tokens` grows at its end only, by its owner; the rest is the scheduler's."""

    tokens: list[int]
    keys: PrefixKeys
    priority: int = 0  # lower runs sooner
    leader: Sequence | None = None  # has the same prompt: run after it, in its blocks
    is_held: bool = False  # does not run now; see Scheduler.hold
    computed: int = 0
    cached: int = 0  # of these, found when it was admitted first
    blocks: list[int] = field(default_factory=list)
    published: int = 0  # of its blocks
    row: int = -1  # while it runs
    order: tuple[int, int] = (0, 0)
    preemptions: int = 0

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


S = TypeVar("S", bound=Sequence)


class Span(NamedTuple, Generic[S]):
    """Tokens `start` to `end` of a sequence, to be computed in this step."""

    sequence: S
    start: int
    end: int


class Scheduler(Generic[S]):
    """All sequences of one engine."""

    def __init__(self, pool: BlockPool, *, max_tokens: int, max_sequences: int, max_context: int, max_waiting: int) -> None:
        """
        Args:
            pool: nobody else allocates from it.
            max_tokens: in one step, of all sequences together; at least `max_sequences`.
            max_sequences: that run at a time.
            max_context: tokens of the longest sequence; the pool holds at least one of these.
            max_waiting: sequences; more are refused.
        """
        if max_tokens < max_sequences:
            raise ValueError(f"max_tokens: got {max_tokens}, expected at least max_sequences, {max_sequences}")
        if -(-max_context // pool.block_size) >= pool.blocks:
            raise ValueError(f"max_context: got {max_context}, more than {pool.blocks - 1} blocks of {pool.block_size} tokens hold")
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.max_waiting = max_waiting
        self.waiting: list[S] = []  # both in order
        self.running: list[S] = []
        self.preemptions = 0
        # (rows, blocks of the longest sequence): what a running sequence's row says is its `blocks`
        self.block_tables = np.zeros((max_sequences, -(-max_context // pool.block_size)), np.int32)
        self._rows = list(range(max_sequences - 1, -1, -1))
        self._steps = 0
        self._serial = 0

    # -- commands

    def add(self, sequence: S) -> None:
        """
        Raises:
            TooLong: more tokens than a context has.
            Overloaded: too many wait.
        """
        if len(sequence.tokens) >= self.max_context:
            raise TooLong(f"the prompt has {len(sequence.tokens)} tokens, expected fewer than {self.max_context}")
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} sequences wait for their turn")
        self._serial += 1
        sequence.order = (self._steps + sequence.priority * AGING, self._serial)
        self._wait(sequence)

    def remove(self, sequence: S) -> None:
        """Forget it; what it computed stays cached. Of one that is gone: nothing."""
        if sequence in self.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def hold(self, sequence: S, *, is_held: bool) -> None:
        """It does not run until it is let go again. It keeps what it has while nobody needs it."""
        sequence.is_held = is_held

    @property
    def has_work(self) -> bool:
        return any(not s.is_held for s in self.running) or any(not s.is_held for s in self.waiting)

    # -- a step

    def schedule(self) -> list[Span[S]]:
        """The next step's spans, those of one token first. `advance` says that they have been computed."""
        self._steps += 1
        plan: dict[S, Span[S]] = {}
        budget = self.max_tokens
        # 1. who runs: one token each, then prompts
        preemptions = self.preemptions
        for is_decoding in (True, False):
            for sequence in list(self.running):
                if sequence.is_held or sequence.row < 0 or (sequence.missing == 1) != is_decoding or not sequence.missing:
                    continue
                count = min(sequence.missing, budget)
                if count == 0:
                    break
                if self._has_room(sequence, sequence.computed + count, plan):
                    plan[sequence] = Span(sequence, sequence.computed, sequence.computed + count)
                    budget -= count
                if preemptions != self.preemptions:  # who was in the plan may not be any more
                    budget = self.max_tokens - sum(span.end - span.start for span in plan.values())
        # 2. who waits, unless blocks have just run out
        if preemptions == self.preemptions:
            self._admit(plan, budget)
        return sorted(plan.values(), key=lambda span: span.end - span.start > 1)

    def advance(self, spans: list[Span[S]]) -> None:
        """They have been computed: what is whole can be found by others."""
        for sequence, _, end in spans:
            sequence.computed = end
            if self.pool.caches and end // self.pool.block_size > sequence.published:
                keys = sequence.keys.upto(sequence.tokens, end)
                for n in range(sequence.published, len(keys)):
                    self.pool.publish(sequence.blocks[n], keys[n])
                sequence.published = max(sequence.published, len(keys))

    def _admit(self, plan: dict[S, Span[S]], budget: int) -> None:
        for sequence in list(self.waiting):
            if budget == 0:
                break
            if sequence.is_held or self._follows(sequence):
                continue
            if not self._rows and not self._preempt_held():
                break
            # 1. what is there already: the last token is always computed, for its logits
            size = self.pool.block_size
            reusable = (len(sequence.tokens) - 1) // size
            keys = sequence.keys.upto(sequence.tokens, reusable * size) if self.pool.caches else []
            found = self.pool.match(keys)
            if sequence.leader is not None and sequence.leader.computed // size > len(found):
                found = sequence.leader.blocks[: min(reusable, sequence.leader.computed // size)]
            self.pool.share(found)
            # 2. blocks for all its tokens, and one more for everybody who runs
            needed = self._blocks_for(len(sequence.tokens)) - len(found)
            if needed + len(self.running) > self.pool.available and (self.running or needed > self.pool.available):
                self.pool.release(found)
                self._preempt_held()  # if there is one, its blocks are there in the next step
                break
            # 3. it runs
            if sequence.preemptions == 0:
                sequence.cached = len(found) * size
            self.pool.stats.hits += len(found)
            self.pool.stats.misses += len(keys) - min(len(found), len(keys))
            sequence.leader = None
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.order)
            sequence.row = self._rows.pop()
            sequence.computed, sequence.published = len(found) * size, len(found)
            sequence.blocks = []
            self._extend(sequence, found)
            self._extend(sequence, self.pool.allocate(needed, found[-1] if found else 0))
            count = min(sequence.missing, budget)
            plan[sequence] = Span(sequence, sequence.computed, sequence.computed + count)
            budget -= count

    def _follows(self, sequence: S) -> bool:
        """Whether it waits for its leader, which is still at the prompt."""
        leader = sequence.leader
        if leader is None or leader.is_held or leader.computed >= len(sequence.tokens):
            return False
        return leader.row >= 0 or leader in self.waiting

    def _has_room(self, sequence: S, length: int, plan: dict[S, Span[S]]) -> bool:
        """Whether its blocks hold `length` tokens now; others are preempted for it, or it is for them."""
        needed = self._blocks_for(length) - len(sequence.blocks)
        if needed <= 0:
            return True
        while needed > self.pool.available:
            victim = self._victim()
            plan.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._extend(sequence, self.pool.allocate(needed, sequence.blocks[-1] if sequence.blocks else 0))
        return True

    def _victim(self) -> S:
        return next((s for s in reversed(self.running) if s.is_held), self.running[-1])

    def _preempt_held(self) -> bool:
        held = next((s for s in reversed(self.running) if s.is_held), None)
        if held is not None:
            self._preempt(held)
        return held is not None

    def _preempt(self, sequence: S) -> None:
        self._stop(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._wait(sequence)

    def _stop(self, sequence: S) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._rows.append(sequence.row)
        sequence.blocks, sequence.computed, sequence.published, sequence.row = [], 0, 0, -1

    def _wait(self, sequence: S) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def _extend(self, sequence: S, blocks: list[int]) -> None:
        start = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        self.block_tables[sequence.row, start : len(sequence.blocks)] = blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)
