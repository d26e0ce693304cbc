"""Who runs in the next step. Tables of what is there -> who goes, and a property test that nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.diffusion.scheduler import AGING, MAX_PASSED, StepScheduler
from streamrt import Overloaded


def running(*names: str, capacity: int = 8, max_rows: int = 8, **priority: int) -> StepScheduler:
    """A scheduler in which `names` run; the first letter of a name is its key."""
    scheduler = StepScheduler(capacity, 64, max_rows)
    for name in names:
        scheduler.add(name, name[0], priority.get(name, 0))
    while (name := scheduler.admit()) is not None:
        scheduler.wait(name, name[0], 1)
    return scheduler


def test_calls_of_one_key_are_made_together() -> None:
    assert running("a1", "a2", "a3").batch() == ["a1", "a2", "a3"]


def test_an_incompatible_request_does_not_hold_back_later_compatible_ones() -> None:
    scheduler = running("a1", "b1", "a2")
    assert scheduler.batch() == ["a1", "a2"]
    assert scheduler.batch() == ["b1"]


def test_keys_take_turns() -> None:
    scheduler = running("a1", "a2", "b1")
    order = []
    for _ in range(6):
        batch = scheduler.batch()
        order.append("".join(batch))
        for name in batch:
            scheduler.wait(name, name[0], 1)
    assert order == ["a1a2", "b1"] * 3


def test_a_batch_holds_at_most_max_rows() -> None:
    scheduler = running("a1", "a2", "a3", max_rows=2)
    assert scheduler.batch() == ["a1", "a2"]
    assert scheduler.batch() == ["a3"]


def test_a_call_of_more_rows_than_a_batch_may_hold_runs_alone() -> None:
    scheduler = running("a1", max_rows=2)
    scheduler.wait("a1", "a", 4)
    assert scheduler.batch() == ["a1"]


def test_who_runs_is_not_picked_again_before_its_next_call() -> None:
    scheduler = running("a1")
    assert scheduler.batch() == ["a1"]
    assert scheduler.batch() == []
    assert not scheduler.has_work()


def test_a_paused_request_is_skipped_until_it_is_resumed() -> None:
    scheduler = running("a1", "a2")
    scheduler.pause("a1", True)
    assert scheduler.batch() == ["a2"]
    assert not scheduler.has_work()
    scheduler.pause("a1", False)
    assert scheduler.batch() == ["a1"]


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    scheduler = running("a1", "b1", b1=1)
    seen = []
    for _ in range(AGING + 2):
        (name,) = scheduler.batch()
        seen.append(name)
        scheduler.wait(name, name[0], 1)
    assert seen[:AGING] == ["b1"] * AGING
    assert "a1" in seen


def test_no_more_than_capacity_run_and_no_more_than_max_queued_wait() -> None:
    scheduler = StepScheduler(2, 3, 8)
    for name in "abc":
        scheduler.add(name, "k")
    assert [scheduler.admit(), scheduler.admit(), scheduler.admit()] == ["a", "b", None]
    scheduler.add("d", "k")
    scheduler.add("e", "k")
    with pytest.raises(Overloaded, match="3 requests wait already"):
        scheduler.add("f", "k")
    scheduler.remove("a")
    assert scheduler.admit() == "c"


def test_who_can_share_calls_is_admitted_before_who_can_not_until_that_one_has_waited_enough() -> None:
    scheduler = StepScheduler(2, 64, 8)
    scheduler.add("a0", "a")
    scheduler.add("a1", "a")
    assert [scheduler.admit(), scheduler.admit()] == ["a0", "a1"]
    scheduler.add("b", "b")
    for number in range(2, MAX_PASSED + 4):
        scheduler.add(f"a{number}", "a")
    admitted = []
    for number in range(MAX_PASSED + 1):
        scheduler.remove(f"a{number + 1}")
        admitted.append(scheduler.admit())
    assert admitted == [*(f"a{number}" for number in range(2, MAX_PASSED + 2)), "b"]


def test_a_removed_request_frees_its_place_queued_or_running() -> None:
    scheduler = running("a1", "a2", "a3", capacity=2)
    scheduler.remove("a3")
    assert scheduler.queued == 0
    scheduler.remove("a1")
    scheduler.remove("nobody")
    assert scheduler.running == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 6)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_everybody_ends_and_every_batch_is_of_one_key(requests, capacity, max_rows) -> None:
    scheduler = StepScheduler(capacity, 64, max_rows)
    left = {}
    for number, (key, priority, steps) in enumerate(requests):
        left[number] = (key, steps)
        scheduler.add(number, key, priority)
    for _ in range(sum(steps for _, _, steps in requests)):
        while (name := scheduler.admit()) is not None:
            scheduler.wait(name, left[name][0], 1)
        assert scheduler.running <= capacity
        batch = scheduler.batch()
        assert len(batch) <= max_rows
        assert len({left[name][0] for name in batch}) <= 1
        for name in batch:
            key, steps = left.pop(name)
            if steps == 1:
                scheduler.remove(name)
            else:
                left[name] = (key, steps - 1)
                scheduler.wait(name, key, 1)
    assert left == {}
    assert not scheduler.has_work()
