"""The block pool against a plain model of it, and the keys that name blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stages.ar.blocks import BlockPool, Content, FreeRuns, OutOfBlocks, PrefixKeys


def keys(tokens: list[int], *, root: bytes = b"", contents: tuple[Content, ...] = ()) -> list[bytes]:
    return PrefixKeys(root, 4, contents).upto(tokens, len(tokens))


class Pool(RuleBasedStateMachine):
    """Holders take, share, publish and give back; nothing is lost and nothing is given twice."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(17, 4)
        self.held: list[list[int]] = []
        self.names = 0

    @rule(target=holdings, count=st.integers(0, 8), after=st.integers(0, 16))
    def allocate(self, count: int, after: int) -> list[int]:
        available = self.pool.available
        try:
            blocks = self.pool.allocate(count, after)
        except OutOfBlocks:
            assert count > available
            assert self.pool.available == available
            blocks = []
        assert 0 not in blocks
        assert not {b for other in self.held for b in other} & set(blocks)
        self.held.append(blocks)
        return blocks

    @rule(blocks=holdings)
    def publish(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.publish(block, b"%d" % self.names)
            self.names += 1

    @rule(target=holdings, name=st.integers(0, 40))
    def find(self, name: int) -> list[int]:
        found = self.pool.match([b"%d" % name])
        self.pool.share(found)
        self.held.append(found)
        return found

    @rule(blocks=consumes(holdings))
    def release(self, blocks: list[int]) -> None:
        self.held.remove(blocks)
        self.pool.release(blocks)

    @rule()
    def invalidate(self) -> None:
        self.pool.invalidate()
        assert self.pool.cached == 0

    @invariant()
    def every_block_is_somewhere(self) -> None:
        assert self.pool.held == len({b for blocks in self.held for b in blocks})

    @invariant()
    def held_blocks_are_not_available(self) -> None:
        assert 0 <= self.pool.available == 16 - self.pool.held


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_recently_released_is_evicted_first_and_an_end_before_its_beginning() -> None:
    pool = BlockPool(9, 4)
    for name in (b"a", b"b"):
        blocks = pool.allocate(4)
        for n, block in enumerate(blocks):
            pool.publish(block, name + b"%d" % n)
        pool.release(blocks)
    assert pool.available == 8
    taken = pool.allocate(1)
    assert pool.stats.evictions == 8, "all of them at once, so that neighbours are free"
    pool.release(taken)
    small = BlockPool(5, 4)
    blocks = small.allocate(4)
    for n, block in enumerate(blocks):
        small.publish(block, b"%d" % n)
    small.release(blocks)
    small._evict()
    assert small.match([b"0", b"1", b"2", b"3"]) == blocks[:3]


def test_a_pool_that_does_not_cache_finds_nothing() -> None:
    pool = BlockPool(9, 4, caches=False)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert pool.match([b"a"]) == []


def test_what_two_computed_at_the_same_time_is_found_once() -> None:
    pool = BlockPool(9, 4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], b"a")
    pool.publish(second[0], b"a")
    pool.release(second)
    assert pool.match([b"a"]) == first
    pool.release(first)
    assert pool.available == 8


def test_after_invalidation_holders_keep_their_blocks_and_nobody_finds_them() -> None:
    pool = BlockPool(9, 4)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.invalidate()
    assert pool.match([b"a"]) == []
    assert pool.held == 2
    pool.release(blocks)
    assert pool.available == 8


def test_a_sequence_grows_beside_itself_while_another_grows_too() -> None:
    pool = BlockPool(65, 4)
    one, two = pool.allocate(3), pool.allocate(3)
    for _ in range(10):
        one += pool.allocate(1, one[-1])
        two += pool.allocate(1, two[-1])
    assert one == list(range(one[0], one[0] + 13))
    assert two == list(range(two[0], two[0] + 13))


@pytest.mark.parametrize("order", [[3, 1, 2], [1, 3, 2], [2, 1, 3], [1, 2, 3]])
def test_free_neighbours_become_one_run(order: list[int]) -> None:
    runs = FreeRuns(0, 0)
    for block in order:
        runs.add(block)
    assert len(runs) == 3
    assert all(block in runs for block in order)
    assert 4 not in runs
    assert runs.take(3, 0) == [1, 2, 3]


class TestKeys:
    def test_only_whole_blocks_have_one_and_it_depends_on_all_before(self) -> None:
        assert len(keys(list(range(11)))) == 2
        assert keys([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys([0, 2, 3, 4, 5, 6, 7, 8])[1]
        assert keys([1, 2, 3, 4, 5, 6, 7, 8])[0] == keys([1, 2, 3, 4, 0, 0, 0, 0])[0]

    def test_they_grow_with_the_tokens_and_stay(self) -> None:
        tokens = list(range(12))
        growing = PrefixKeys(b"", 4)
        assert growing.upto(tokens[:5], 5) == keys(tokens)[:1]
        assert growing.upto(tokens, 12) == keys(tokens)
        assert growing.upto(tokens, 8) == keys(tokens)[:2]

    def test_another_revision_has_others(self) -> None:
        assert set(keys(list(range(8)))).isdisjoint(keys(list(range(8)), root=b"adapter"))

    def test_the_same_placeholders_for_another_image_have_others(self) -> None:
        tokens = [9] * 16
        cat, dog = (keys(tokens, contents=(Content(4, 12, digest),)) for digest in (b"cat", b"dog"))
        assert cat[0] == dog[0]
        assert cat[1] != dog[1]
        assert cat[3] != dog[3]
        assert cat == keys(tokens, contents=(Content(4, 12, b"cat"),))
        moved = keys(tokens, contents=(Content(3, 11, b"cat"),))
        assert moved[1] != cat[1]

    def test_from_unknown_content_on_there_are_none(self) -> None:
        assert len(keys([1] * 16, contents=(Content(9, 10, None),))) == 2
        growing = PrefixKeys(b"", 4)
        growing.stop_at(6)
        assert len(growing.upto([1] * 16, 16)) == 1
