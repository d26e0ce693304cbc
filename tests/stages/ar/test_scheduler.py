"""The scheduler on counts alone: invariants under any order of events, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stages.ar.blocks import BlockPool, PrefixKeys
from stages.ar.scheduler import AGING, Scheduler, Sequence, Span
from streamrt import Overloaded, TooLong


def make(blocks: int = 17, *, caches: bool = True, **options: int) -> Scheduler[Sequence]:
    sizes = {"max_tokens": 8, "max_sequences": 3, "max_context": 64, "max_waiting": 6, **options}
    return Scheduler(BlockPool(blocks, 4, caches=caches), **sizes)


def sequence(length: int, first: int = 1, **fields: object) -> Sequence:
    return Sequence(tokens=[first] * length, keys=PrefixKeys(b"", 4), **fields)  # type: ignore[arg-type]


def step(scheduler: Scheduler[Sequence], *, limit: int = 10**9) -> list[Span[Sequence]]:
    """One step, as the engine does it: a token more for those who are at their end."""
    spans = scheduler.schedule()
    scheduler.advance(spans)
    for item, _, end in spans:
        if end == len(item.tokens):
            item.tokens.append(7)
            if len(item.tokens) >= limit:
                scheduler.remove(item)
    return spans


class Machine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(17, 40), caches=st.booleans(), max_tokens=st.integers(3, 20))
    def begin(self, blocks: int, caches: bool, max_tokens: int) -> None:
        self.scheduler = make(blocks, caches=caches, max_tokens=max_tokens)
        self.all: list[Sequence] = []

    @rule(length=st.integers(1, 50), first=st.integers(1, 2), priority=st.integers(-2, 2), follows=st.booleans())
    def add(self, length: int, first: int, priority: int, follows: bool) -> None:
        leader = self.all[-1] if follows and self.all else None
        new = sequence(length, first, priority=priority)
        if leader is not None:
            new = Sequence(tokens=list(leader.tokens), keys=PrefixKeys(b"", 4), leader=leader)
        try:
            self.scheduler.add(new)
            self.all.append(new)
        except Overloaded:
            assert len(self.scheduler.waiting) >= 6

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.all))
        self.scheduler.remove(gone)
        self.all.remove(gone)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), is_held=st.booleans())
    def hold(self, data: st.DataObject, is_held: bool) -> None:
        self.scheduler.hold(data.draw(st.sampled_from(self.all)), is_held=is_held)

    @rule()
    def run(self) -> None:
        scheduler = self.scheduler
        spans = scheduler.schedule()
        assert bool(spans) or not any(not s.is_held for s in scheduler.running)
        assert sum(end - start for _, start, end in spans) <= scheduler.max_tokens
        lengths = [end - start for _, start, end in spans]
        assert lengths == sorted(lengths, key=lambda n: n > 1), "who needs one token comes first"
        for item, start, end in spans:
            assert item in scheduler.running
            assert not item.is_held
            assert start == item.computed < end <= len(item.tokens)
            assert len(item.blocks) * 4 >= end
        scheduler.advance(spans)
        for item, _, end in spans:
            if end == len(item.tokens):
                item.tokens.append(7)
                if len(item.tokens) >= 64:
                    scheduler.remove(item)
                    self.all.remove(item)

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert {id(s) for s in scheduler.running} | {id(s) for s in scheduler.waiting} == {id(s) for s in self.all}
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.all)
        assert len({s.row for s in scheduler.running}) == len(scheduler.running) <= 3
        assert scheduler.pool.held == len({b for s in scheduler.running for b in s.blocks})
        for s in scheduler.running:
            assert scheduler.block_tables[s.row, : len(s.blocks)].tolist() == s.blocks
        assert not any(s.blocks or s.computed for s in scheduler.waiting)
        for line in (scheduler.running, scheduler.waiting):
            assert [s.order for s in line] == sorted(s.order for s in line)

    def teardown(self) -> None:
        """Let everybody go: all come to their end in a bounded number of steps, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        for s in self.all:
            self.scheduler.hold(s, is_held=False)
        for _ in range(4000):
            if not self.scheduler.has_work:
                break
            step(self.scheduler, limit=64)
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.scheduler.pool.held == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_decoding_goes_on_while_a_long_prompt_comes_in_chunks() -> None:
    scheduler = make()
    short, long = sequence(2), sequence(30, 2)
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    spans = [step(scheduler) for _ in range(5)]
    assert [[(s.sequence is short, s.end - s.start) for s in line] for line in spans] == [
        *[[(True, 1), (False, 7)]] * 4,
        [(True, 1), (False, 2)],
    ]


def test_who_comes_late_joins_in_the_next_step() -> None:
    scheduler = make()
    scheduler.add(sequence(4))
    for _ in range(3):
        step(scheduler)
    late = sequence(5, 2)
    scheduler.add(late)
    assert [s.sequence for s in step(scheduler)][1:] == [late]
    assert late.missing == 1


def test_when_blocks_run_out_the_last_gives_way_and_comes_back() -> None:
    scheduler = make(17, max_tokens=64)
    first, last = sequence(30), sequence(28, 2)
    scheduler.add(first)
    scheduler.add(last)
    while not last.preemptions:
        step(scheduler)
    assert scheduler.running == [first]
    assert last.tokens[28:]
    while first in scheduler.running:
        step(scheduler, limit=60)
    step(scheduler)
    assert scheduler.running == [last]


def test_who_is_held_gives_way_first() -> None:
    scheduler = make(17, max_tokens=64)
    held, other = sequence(30), sequence(28, 2)
    for s in (held, other):
        scheduler.add(s)
    step(scheduler)
    scheduler.hold(held, is_held=True)
    for _ in range(12):
        step(scheduler)
    assert scheduler.running == [other]
    assert held in scheduler.waiting
    assert len(other.tokens) == 41


def test_a_row_of_one_who_is_held_goes_to_one_who_waits() -> None:
    scheduler = make(max_sequences=1, max_tokens=8)
    held, other = sequence(4), sequence(4, 2)
    scheduler.add(held)
    step(scheduler)
    scheduler.add(other)
    scheduler.hold(held, is_held=True)
    step(scheduler)
    step(scheduler)
    assert scheduler.running == [other]


def test_priority_goes_first_but_not_for_ever() -> None:
    scheduler = make(max_sequences=1, max_tokens=8, max_waiting=10_000)
    running, low = sequence(2), sequence(2, priority=1)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(low)
    urgent = sequence(2, priority=0)
    scheduler.add(urgent)
    assert scheduler.waiting == [urgent, low]
    steps = 0
    while low in scheduler.waiting:  # somebody more urgent arrives in every step
        scheduler.add(sequence(2))
        step(scheduler, limit=4)
        steps += 1
        assert steps <= 4 * AGING
    assert steps > AGING / 2


def test_who_waits_is_not_overtaken_by_a_smaller_one() -> None:
    scheduler = make(17, max_tokens=64)
    big, small = sequence(60, 2), sequence(1, 3)
    scheduler.add(sequence(30))
    step(scheduler)
    scheduler.add(big)
    scheduler.add(small)
    step(scheduler)
    assert scheduler.waiting == [big, small]


def test_followers_use_their_leaders_blocks_without_a_cache() -> None:
    scheduler = make(33, caches=False, max_tokens=64)
    leader = sequence(22)
    followers = [sequence(22, leader=leader) for _ in range(2)]
    for s in (leader, *followers):
        scheduler.add(s)
    assert [s.sequence for s in step(scheduler)] == [leader]
    spans = step(scheduler)
    assert [s.end - s.start for s in spans] == [1, 2, 2]
    assert followers[0].blocks[:5] == followers[1].blocks[:5] == leader.blocks[:5]
    assert scheduler.pool.held == 6 + 2


def test_too_long_and_too_many_are_refused_and_change_nothing() -> None:
    scheduler = make()
    with pytest.raises(TooLong, match="64 tokens, expected fewer than 64"):
        scheduler.add(sequence(64))
    for n in range(6):
        scheduler.add(sequence(1, n))
    with pytest.raises(Overloaded, match="6 sequences wait"):
        scheduler.add(sequence(1))
    step(scheduler)
    scheduler.add(sequence(1))


def test_sizes_that_can_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least max_sequences"):
        make(max_tokens=2)
    with pytest.raises(ValueError, match="more than 15 blocks"):
        make(16)
