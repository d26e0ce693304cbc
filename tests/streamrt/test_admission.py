"""How many requests an actor holds, whose, and in what order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrt.admission import Admission, Admit, Queue, Refuse, split


def test_one_client_may_use_everything():
    assert Admission(4).join("gateway") == {"gateway": 4}


def test_windows_are_shared_as_clients_come_and_go():
    admission = Admission(5)
    admission.join("a")
    assert admission.join("b") == {"a": 3, "b": 2}
    assert admission.join("b") == {"b": 2}  # again: it is told, nobody else is
    assert admission.leave("a") == {"b": 5}
    assert admission.leave("a") == {}
    assert admission.clients == {"b"}


def test_each_client_has_at_least_one():
    admission = Admission(2)
    for name in "abc":
        admission.join(name)
    assert admission.windows == {"a": 1, "b": 1, "c": 1}


def test_overshoot_waits_in_order_and_is_bounded():
    admission = Admission(1, max_queued=2)
    admission.join("a")
    assert [admission.offer("a", f"r{i}") for i in range(4)] == [Admit(), Queue(), Queue(), Refuse("the queue is full")]
    assert (admission.running, admission.queued) == (1, 2)
    assert admission.done("r0") == ("r1", 0)
    assert admission.done("r1") == ("r2", 0)
    assert admission.done("r2") is None
    assert (admission.running, admission.queued) == (0, 0)


def test_what_leaves_the_queue_unserved_frees_no_place():
    admission = Admission(1)
    for name in ("r0", "r1", "r2"):
        admission.offer("a", name)
    assert admission.done("r1") is None
    assert admission.done("r0") == ("r2", 0)


def test_cancelled_before_it_came_is_refused_when_it_comes():
    admission = Admission(1)
    admission.bury("r1", 0)
    assert admission.is_dead("r1", 0)
    assert admission.offer("a", "r1", 0) == Refuse("cancelled")
    assert admission.offer("a", "r1", 1) == Admit()  # a retry is another epoch


def test_what_has_ended_stays_known_for_a_while():
    admission = Admission(1, max_buried=2)
    for name in ("r0", "r1", "r2"):
        admission.offer("a", name)
        admission.done(name)
    assert [admission.is_dead(name) for name in ("r0", "r1", "r2")] == [False, True, True]


def test_the_same_request_twice_is_refused():
    admission = Admission(2)
    admission.offer("a", "r0")
    assert admission.offer("a", "r0") == Refuse("duplicate")


def test_an_idle_clients_window_goes_to_one_that_has_used_up_its_own():
    admission = Admission(4)
    admission.join("busy")
    admission.join("idle")
    admission.offer("busy", "r0")
    assert admission.rebalance() == {}
    admission.offer("busy", "r1")
    assert admission.rebalance() == {"busy": 3, "idle": 1}
    admission.offer("idle", "r2")
    assert admission.rebalance() == {"busy": 2, "idle": 2}


def test_at_least_one_request_must_be_held():
    with pytest.raises(ValueError, match="expected at least 1"):
        Admission(0)


@given(st.integers(1, 20), st.dictionaries(st.text(max_size=3), st.booleans(), min_size=1, max_size=6))
def test_windows_add_up_to_what_the_replica_holds(max_requests, active):
    windows = split(max_requests, active)
    assert windows.keys() == active.keys()
    assert min(windows.values()) >= 1
    assert sum(windows.values()) == max(max_requests, len(active))
    sharers = [windows[client] for client in active if active[client]]
    assert not sharers or max(sharers) - min(sharers) <= 1


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["offer", "done", "bury"]), st.integers(0, 8)), max_size=40),
)
def test_it_behaves_like_a_list_and_a_queue(max_requests, max_queued, events):
    admission = Admission(max_requests, max_queued=max_queued)
    running: list[int] = []
    queued: deque[int] = deque()
    dead: set[int] = set()
    for event, number in events:
        name = str(number)
        if event == "bury":
            if number not in running and number not in queued:
                admission.bury(name)
                dead.add(number)
        elif event == "done":
            following = None
            if number in running:
                running.remove(number)
                if queued:
                    running.append(queued.popleft())
                    following = (str(running[-1]), 0)
            elif number in queued:
                queued.remove(number)
            assert admission.done(name) == following
            dead.add(number)
        elif number in running or number in queued:
            assert admission.offer("a", name) == Refuse("duplicate")
        elif number in dead:
            assert admission.offer("a", name) == Refuse("cancelled")
        elif len(running) < max_requests:
            assert admission.offer("a", name) == Admit()
            running.append(number)
        elif len(queued) < max_queued:
            assert admission.offer("a", name) == Queue()
            queued.append(number)
        else:
            assert admission.offer("a", name) == Refuse("the queue is full")
        assert (admission.running, admission.queued) == (len(running), len(queued))
        assert all(admission.is_dead(str(n)) for n in dead)
