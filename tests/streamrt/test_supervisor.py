"""The restart policy: events and times in, actions out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrt.config import RunConfig
from streamrt.supervisor import STOP_S, Drain, GiveUp, Kill, Start, Stop, Supervisor, Watched

S = 1_000_000_000
POLICY = RunConfig(drain_s=10, max_restarts=3, restart_window_s=60, restart_delay_s=0.5, restart_delay_max_s=1.5)


def started(*names: str, levels: tuple[int, ...] = (), is_ready: bool = True) -> Supervisor:
    """A supervisor whose processes were started, and are ready, at 0."""
    watched = [
        Watched(name, level, load_timeout_s=30, hang_timeout_s=10) for name, level in zip(names, levels or (0,) * len(names), strict=True)
    ]
    supervisor = Supervisor(watched, POLICY)
    assert sorted(a.name for a in supervisor.start(0)) == sorted(names)
    for name in names if is_ready else ():
        supervisor.on_registered(name)
        supervisor.on_ready(name, 0)
    return supervisor


def state(supervisor: Supervisor, name: str = "llm#0") -> str:
    return supervisor.children[name].state


def test_start_is_in_the_order_of_levels():
    supervisor = Supervisor([Watched("gateway#0", 1), Watched("llm#0", 0)], POLICY)
    assert supervisor.start(0) == [Start("llm#0"), Start("gateway#0")]


def test_a_process_registers_loads_and_is_ready():
    supervisor = started("llm#0", is_ready=False)
    assert state(supervisor) == "starting"
    supervisor.on_registered("llm#0")
    assert state(supervisor) == "loading"
    supervisor.on_ready("llm#0", 5 * S)
    assert state(supervisor) == "ready"
    assert supervisor.is_ready


def test_load_failed_at_the_first_start_is_given_up_at_once_with_its_error():
    supervisor = started("llm#0", is_ready=False)
    supervisor.on_registered("llm#0")
    assert supervisor.on_load_failed("llm#0", "no such model", "streamrt fetch") == [
        GiveUp("llm#0", "no such model", "streamrt fetch", is_fatal=True)
    ]
    assert supervisor.on_exited("llm#0", 1, S) == []
    assert state(supervisor) == "failed"
    assert supervisor.next_ns is None


@pytest.mark.parametrize(("status", "words"), [(-9, "killed by SIGKILL while loading"), (3, "exited with status 3 while loading")])
def test_death_while_loading_for_the_first_time_is_given_up_at_once(status, words):
    supervisor = started("llm#0", is_ready=False)
    supervisor.on_registered("llm#0")
    assert supervisor.on_exited("llm#0", status, S) == [GiveUp("llm#0", words, is_fatal=True)]


def test_kill_from_starting():
    supervisor = started("llm#0", is_ready=False)
    assert supervisor.on_exited("llm#0", -11, S) == [GiveUp("llm#0", "killed by SIGSEGV while starting", is_fatal=True)]


def test_a_first_load_that_takes_too_long_is_killed_and_given_up():
    supervisor = started("llm#0", is_ready=False)
    supervisor.on_registered("llm#0")
    assert supervisor.next_ns == 30 * S
    assert supervisor.tick(30 * S - 1) == []
    assert supervisor.tick(30 * S) == [
        Kill("llm#0", "not ready within 30 s"),
        GiveUp("llm#0", "not ready within 30 s", "raise load_timeout_s in [deploy.llm]", is_fatal=True),
    ]
    assert supervisor.on_exited("llm#0", -9, 31 * S) == []


def test_what_had_been_ready_is_restarted_after_a_delay():
    supervisor = started("llm#0", "tts#0")
    assert supervisor.on_exited("llm#0", -9, 100 * S) == []
    assert state(supervisor) == "down"
    assert supervisor.children["llm#0"].error == "killed by SIGKILL"
    assert state(supervisor, "tts#0") == "ready"  # one for one
    supervisor.on_heartbeat("tts#0", 100 * S)
    assert supervisor.next_ns == 100 * S + S // 2
    assert supervisor.tick(100 * S + S // 2) == [Start("llm#0")]
    assert supervisor.children["llm#0"].restarts == 1


def test_the_delay_doubles_up_to_its_limit_and_then_it_is_given_up():
    supervisor = started("llm#0")
    now, delays = 0, []
    for _ in range(POLICY.max_restarts):
        assert supervisor.on_exited("llm#0", 1, now) == []
        delays.append((supervisor.next_ns - now) / S)
        now = supervisor.next_ns
        assert supervisor.tick(now) == [Start("llm#0")]
        supervisor.on_ready("llm#0", now)
    assert delays == [0.5, 1.0, 1.5]
    assert supervisor.on_exited("llm#0", 1, now) == [GiveUp("llm#0", "exited with status 1; restarted 3 times within 60 s", is_fatal=False)]
    assert state(supervisor) == "failed"
    assert supervisor.tick(now + 3600 * S) == []


def test_restarts_outside_the_window_are_forgiven():
    supervisor = started("llm#0")
    now = 0
    for _ in range(3 * POLICY.max_restarts):
        assert supervisor.on_exited("llm#0", 1, now) == []
        assert supervisor.next_ns == now + S // 2
        assert supervisor.tick(supervisor.next_ns) == [Start("llm#0")]
        supervisor.on_ready("llm#0", now)
        now += 61 * S


def test_load_that_fails_after_having_been_ready_backs_off():
    supervisor = started("llm#0")
    supervisor.on_exited("llm#0", -9, 0)
    supervisor.tick(S // 2)
    supervisor.on_registered("llm#0")
    assert supervisor.on_load_failed("llm#0", "out of memory") == []
    assert supervisor.on_exited("llm#0", 3, S) == []
    assert supervisor.children["llm#0"].error == "out of memory"
    assert supervisor.next_ns == S + S


def test_a_reload_that_takes_too_long_is_killed_and_tried_again():
    supervisor = started("llm#0")
    supervisor.on_exited("llm#0", -9, 0)
    supervisor.tick(S // 2)
    assert supervisor.tick(31 * S) == [Kill("llm#0", "not ready within 30 s")]
    assert supervisor.tick(40 * S) == []
    supervisor.on_exited("llm#0", -9, 40 * S)
    assert supervisor.tick(41 * S) == [Start("llm#0")]


def test_missed_heartbeats_count_from_ready_on_and_kill_once():
    supervisor = started("llm#0")
    supervisor.on_heartbeat("llm#0", 5 * S)
    assert supervisor.tick(14 * S) == []
    assert supervisor.tick(15 * S) == [Kill("llm#0", "no heartbeat for 10 s")]
    supervisor.on_heartbeat("llm#0", 15 * S)  # too late
    assert supervisor.next_ns is None
    supervisor.on_exited("llm#0", -9, 16 * S)
    assert supervisor.children["llm#0"].error == "no heartbeat for 10 s"
    assert supervisor.tick(17 * S) == [Start("llm#0")]


def test_a_late_word_from_the_dead_changes_nothing():
    supervisor = started("llm#0")
    supervisor.on_exited("llm#0", -9, 0)
    supervisor.on_ready("llm#0", 0)
    supervisor.on_heartbeat("llm#0", 0)
    assert supervisor.on_load_failed("llm#0", "x") == []
    assert supervisor.on_drained("llm#0", 0) == []
    assert state(supervisor) == "down"


def test_stopping_goes_from_the_last_level_to_the_first():
    supervisor = started("gateway#0", "tts#0", "llm#0", "llm#1", levels=(2, 1, 0, 0))
    assert supervisor.stop(0) == [Drain("gateway#0", 10.0)]
    assert supervisor.on_drained("gateway#0", S) == [Stop("gateway#0")]
    assert supervisor.on_exited("gateway#0", 0, 2 * S) == [Drain("tts#0", 8.0)]
    assert supervisor.on_drained("tts#0", 2 * S) == [Stop("tts#0")]
    assert supervisor.on_exited("tts#0", 0, 3 * S) == [Drain("llm#0", 7.0), Drain("llm#1", 7.0)]
    assert supervisor.on_drained("llm#1", 3 * S) == [Stop("llm#1")]
    assert supervisor.on_exited("llm#1", 0, 3 * S) == []
    assert supervisor.on_drained("llm#0", 4 * S) == [Stop("llm#0")]
    assert not supervisor.is_stopped
    assert supervisor.on_exited("llm#0", 0, 4 * S) == []
    assert supervisor.is_stopped


def test_past_the_drain_what_is_left_is_stopped_and_then_killed():
    supervisor = started("gateway#0", "llm#0", levels=(1, 0))
    supervisor.stop(0)
    assert supervisor.next_ns == 10 * S
    assert supervisor.tick(10 * S) == [Stop("gateway#0"), Stop("llm#0")]
    assert supervisor.on_drained("gateway#0", 10 * S) == []
    assert supervisor.on_exited("gateway#0", 0, 11 * S) == []
    assert supervisor.tick(10 * S + int(STOP_S * S)) == [Kill("llm#0", "did not stop in time")]
    assert supervisor.next_ns is None


def test_a_process_that_does_not_exit_when_told_is_killed_before_the_drain_is_over():
    supervisor = started("llm#0")
    supervisor.stop(0)
    supervisor.on_drained("llm#0", S)
    assert supervisor.next_ns == S + int(STOP_S * S)
    assert supervisor.tick(supervisor.next_ns) == [Kill("llm#0", "did not stop in time")]


def test_stop_without_draining():
    supervisor = started("gateway#0", "llm#0", levels=(1, 0))
    assert supervisor.stop(0, drain_s=0) == [Stop("gateway#0"), Stop("llm#0")]


def test_stopped_twice_kills_all():
    supervisor = started("gateway#0", "llm#0", levels=(1, 0))
    supervisor.stop(0)
    assert supervisor.stop(S) == [Kill("gateway#0", "stopped twice"), Kill("llm#0", "stopped twice")]
    assert supervisor.stop(S) == []


def test_the_error_of_a_failed_load_outlives_the_stop_that_follows():
    supervisor = started("llm#0", is_ready=False)
    supervisor.on_load_failed("llm#0", "no such model")
    assert supervisor.stop(0, drain_s=0) == [Kill("llm#0", "stopped before it was ready")]
    supervisor.on_exited("llm#0", -9, 0)
    assert (state(supervisor), supervisor.children["llm#0"].error) == ("failed", "no such model")


def test_what_has_not_loaded_is_killed_when_its_turn_to_stop_comes():
    supervisor = started("gateway#0", "llm#0", levels=(1, 0), is_ready=False)
    supervisor.on_ready("gateway#0", 0)
    assert supervisor.stop(0) == [Drain("gateway#0", 10.0)]
    supervisor.on_drained("gateway#0", 0)
    assert supervisor.on_exited("gateway#0", 0, S) == [Kill("llm#0", "stopped before it was ready")]


def test_nothing_is_restarted_while_stopping():
    supervisor = started("llm#0", "tts#0")
    supervisor.on_exited("llm#0", -9, 0)
    supervisor.stop(0)
    supervisor.on_drained("tts#0", 0)
    assert supervisor.on_exited("tts#0", 0, 0) == []
    assert supervisor.is_stopped
    assert supervisor.tick(5 * S) == []


def test_a_stop_before_anything_lives_is_done_at_once():
    supervisor = Supervisor([Watched("llm#0")], POLICY)
    assert supervisor.stop(0) == []
    assert supervisor.is_stopped


# ---- ranks -------------------------------------------------------------------------------------------------------------------


def ranked(ranks: int = 3, *, is_ready: bool = True) -> Supervisor:
    supervisor = Supervisor([Watched("llm#0", load_timeout_s=30, hang_timeout_s=10, ranks=ranks)], POLICY)
    assert supervisor.start(0) == [Start("llm#0")]
    for rank in range(ranks) if is_ready else ():
        supervisor.on_registered("llm#0")
        supervisor.on_ready("llm#0", 0, rank)
    return supervisor


def test_a_replica_is_ready_when_all_of_its_ranks_are():
    supervisor = ranked(is_ready=False)
    for rank in (2, 0):
        supervisor.on_registered("llm#0")
        supervisor.on_ready("llm#0", S, rank)
        assert state(supervisor) == "loading"
    supervisor.on_ready("llm#0", 2 * S, 1)
    assert state(supervisor) == "ready"
    assert supervisor.next_ns == 12 * S


def test_the_death_of_any_rank_kills_the_others_and_the_last_one_gone_is_down():
    supervisor = ranked()
    assert supervisor.on_exited("llm#0", -9, S, 1) == [Kill("llm#0", "rank 1 killed by SIGKILL")]
    assert state(supervisor) == "down"  # to whoever routes
    supervisor.on_heartbeat("llm#0", S, 0)
    assert supervisor.on_exited("llm#0", -9, S, 0) == []
    assert supervisor.next_ns is None
    assert supervisor.on_exited("llm#0", -9, 2 * S, 2) == []
    assert (state(supervisor), supervisor.children["llm#0"].error) == ("down", "rank 1 killed by SIGKILL")
    assert supervisor.tick(supervisor.next_ns) == [Start("llm#0")]
    assert supervisor.children["llm#0"].restarts == 1


def test_a_rank_that_dies_while_loading_for_the_first_time_is_given_up_once_all_are_gone():
    supervisor = ranked(2, is_ready=False)
    assert supervisor.on_exited("llm#0", -9, S, 1) == [Kill("llm#0", "rank 1 killed by SIGKILL while starting")]
    assert supervisor.on_exited("llm#0", -9, S, 0) == [GiveUp("llm#0", "rank 1 killed by SIGKILL while starting", is_fatal=True)]


def test_the_silence_of_one_rank_is_a_hang_whatever_the_others_say():
    supervisor = ranked()
    for second in range(1, 10):
        supervisor.on_heartbeat("llm#0", second * S, 0)
        supervisor.on_heartbeat("llm#0", second * S, 2)
    assert supervisor.tick(10 * S) == [Kill("llm#0", "no heartbeat of rank 1 for 10 s")]


def test_ranks_that_were_told_to_stop_end_in_their_own_order_and_within_the_bound():
    supervisor = ranked()
    assert supervisor.stop(0) == [Drain("llm#0", 10.0)]
    assert supervisor.on_drained("llm#0", S) == [Stop("llm#0")]
    assert supervisor.on_exited("llm#0", 0, S, 1) == []
    assert supervisor.on_exited("llm#0", 0, S, 0) == []
    assert supervisor.tick(S + int(STOP_S * S)) == [Kill("llm#0", "did not stop in time")]
    assert supervisor.on_exited("llm#0", -9, 5 * S, 2) == []
    assert supervisor.is_stopped


def test_a_rank_that_dies_while_the_others_drain_ends_the_drain():
    supervisor = ranked()
    supervisor.stop(0)
    assert supervisor.on_exited("llm#0", -9, S, 1) == [Kill("llm#0", "rank 1 killed by SIGKILL")]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_ranks_are_never_started_beside_an_older_one_and_a_death_is_answered(data):
    supervisor = Supervisor([Watched("a#0", ranks=3), Watched("b#0")], POLICY)
    alive: dict[str, set[int]] = {"a#0": set(), "b#0": set()}
    killed: set[str] = set()
    now = 0

    def act(actions):
        for action in actions:
            match action:
                case Start(name=name):
                    assert not alive[name]
                    alive[name] = set(range(supervisor.children[name].watched.ranks))
                    killed.discard(name)
                case Kill(name=name):
                    killed.add(name)

    act(supervisor.start(now))
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.integers(0, 3 * S))
        name = data.draw(st.sampled_from(["a#0", "b#0"]))
        rank = data.draw(st.sampled_from(sorted(alive[name]) or [0]))
        match data.draw(st.sampled_from(["register", "ready", "beat", "fail", "exit", "drained", "tick", "stop"])):
            case "register":
                act(supervisor.on_registered(name))
            case "ready":
                act(supervisor.on_ready(name, now, rank))
            case "beat":
                act(supervisor.on_heartbeat(name, now, rank))
            case "fail" if alive[name]:
                act(supervisor.on_load_failed(name, "no"))
            case "exit" if alive[name]:
                alive[name].discard(rank)
                act(supervisor.on_exited(name, -9, now, rank))
                assert not alive[name] or name in killed or supervisor.children[name].is_told
            case "drained":
                act(supervisor.on_drained(name, now))
            case "tick":
                act(supervisor.tick(now))
            case "stop" if supervisor.is_stopping or data.draw(st.booleans()):
                act(supervisor.stop(now))
        assert supervisor.children["a#0"].alive == alive["a#0"]
    # Whatever has happened: stopping comes to its end within the bound, once what was killed is gone.
    act(supervisor.stop(now, 0))
    for _ in range(100):
        for name in killed:
            for rank in sorted(alive[name]):
                alive[name].discard(rank)
                act(supervisor.on_exited(name, -9, now, rank))
        if supervisor.is_stopped:
            break
        now = supervisor.next_ns
        act(supervisor.tick(now))
    assert supervisor.is_stopped


def test_what_loads_longest_starts_first_and_the_others_as_places_get_free():
    watched = [Watched("vad#0", load_s=1), Watched("llm#0", load_s=12), Watched("asr#0", load_s=3), Watched("gateway#0", 1, load_s=1)]
    supervisor = Supervisor(watched, POLICY, max_loading=2)
    assert supervisor.start(0) == [Start("llm#0"), Start("asr#0")]
    assert state(supervisor, "vad#0") == "waiting"
    assert supervisor.on_ready("asr#0", 1 * S) == [Start("vad#0")]
    assert supervisor.on_ready("vad#0", 2 * S) == [Start("gateway#0")]
    assert supervisor.on_ready("gateway#0", 3 * S) == []
    assert not supervisor.is_ready
    assert supervisor.on_ready("llm#0", 4 * S) == []
    assert supervisor.is_ready


def test_who_waits_for_a_place_is_not_started_once_we_stop():
    supervisor = Supervisor([Watched("a#0"), Watched("b#0")], POLICY, max_loading=1)
    (first,) = supervisor.start(0)
    supervisor.stop(1 * S, 0)
    assert supervisor.on_exited(first.name, -9, 2 * S) == []
    assert supervisor.is_stopped
