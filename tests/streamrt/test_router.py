"""Task -> sub-graph -> replicas, credit and the waiting line."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrt.errors import BadRequest, ConfigError, Overloaded, Unavailable, UnknownTask
from streamrt.pipeline import Edge, Graph, Node
from streamrt.router import MAX_AFFINITIES, Router, TaskRoute, left_out, route_of, task_routes
from transport.messages import Replica, Table


def node(name: str, *inputs: str, gives: dict[str, str] | str = "text", tasks: str = "") -> Node:
    return Node(name, inputs, frozenset(), gives if isinstance(gives, dict) else {gives: gives}, tuple(tasks.split()))


VAD = node("vad", gives={"events": "event"}, tasks="listen")
ASR = node("asr", tasks="transcribe")
LLM = node("llm", tasks="respond")
TTS = node("tts", "llm", gives="audio", tasks="speak")
VOICE = Graph([VAD, ASR, LLM, TTS])
OMNI = Graph(
    [
        node("thinker", gives={"text": "text", "hidden": "hidden"}, tasks="respond"),
        node("talker", "thinker.hidden", gives="codes"),
        node("code2wav", "talker", gives="audio"),
    ]
)


# ---- sub-graphs ------------------------------------------------------------------------------------------------------------


def test_the_voice_pipeline_does_four_things():
    routes = task_routes(VOICE)
    assert {task: (route.stages, route.outputs) for task, route in routes.items()} == {
        "listen": (("vad",), {"event": "vad.events"}),
        "transcribe": (("asr",), {"text": "asr.text"}),
        "respond": (("llm", "tts"), {"text": "llm.text", "audio": "tts.audio"}),
        "speak": (("tts",), {"audio": "tts.audio"}),
    }


def test_a_route_says_what_arrives_where_and_what_goes_on():
    route = task_routes(VOICE)["respond"]
    assert route.sources("llm") == ("client",)
    assert route.sources("tts") == ("llm.text",)
    assert route.sources("client") == ("llm.text", "tts.audio")
    assert route.edges_from("llm") == (Edge("llm", "text", "tts", "text"), Edge("llm", "text", "client", "text"))


def test_an_entry_in_mid_graph_is_fed_by_the_client_in_place_of_its_inputs():
    route = task_routes(VOICE)["speak"]
    assert route.sources("tts") == ("client",)
    assert route.edges == (Edge("client", "", "tts", ""), Edge("tts", "audio", "client", "audio"))


def test_the_last_stage_that_gives_a_modality_gives_it_to_the_client():
    route = task_routes(Graph([node("echo", tasks="respond"), node("upper", "echo")]))["respond"]
    assert route.outputs == {"text": "upper.text"}
    assert route.stages == ("echo", "upper")


def test_what_stages_pass_on_among_themselves_stays_among_them():
    assert task_routes(OMNI)["respond"].outputs == {"text": "thinker.text", "audio": "code2wav.audio"}


def test_inner_modalities_go_to_the_client_where_no_stage_takes_them():
    graph = Graph([node("encoder", gives={"hidden": "hidden", "codes": "codes"}, tasks="audio"), node("post", "encoder.hidden")])
    assert task_routes(graph)["audio"].outputs == {"codes": "encoder.codes", "text": "post.text"}


@pytest.mark.parametrize(
    ("outputs", "stages"),
    [({"text"}, ("thinker",)), ({"audio"}, ("thinker", "talker", "code2wav")), (None, ("thinker", "talker", "code2wav"))],
)
def test_only_the_stages_that_the_wanted_outputs_need_take_part(outputs, stages):
    route = task_routes(OMNI)["respond"].narrowed(outputs)
    assert route.stages == stages
    assert set(route.outputs) == (outputs or {"text", "audio"})
    assert {edge.source for edge in route.edges} == {"client", *stages}
    assert route.sources("client") == tuple(route.outputs.values())


def test_an_output_that_the_task_does_not_give_is_the_callers_error():
    with pytest.raises(BadRequest, match='got "image", but respond gives text and audio'):
        task_routes(OMNI)["respond"].narrowed({"image"})
    with pytest.raises(BadRequest, match="got none"):
        task_routes(OMNI)["respond"].narrowed(())


def test_two_candidates_are_an_error_that_names_both_and_the_way_out():
    graph = Graph([node("small", tasks="respond"), node("large", tasks="respond")])
    with pytest.raises(ConfigError) as caught:
        task_routes(graph)
    assert str(caught.value) == (
        'pipeline.toml: tasks.respond: got nothing, expected one of "small", "large": each of these stages can respond\n'
        'hint: say which one in the file: [tasks] respond = "small"'
    )
    assert task_routes(graph, {"respond": "large"})["respond"].entry == "large"


def test_the_file_may_name_an_entry_that_declares_no_task():
    assert task_routes(Graph([node("mine")]), {"respond": "mine"})["respond"].outputs == {"text": "mine.text"}


def test_two_ends_of_one_modality_are_an_error():
    graph = Graph([node("llm", tasks="respond"), node("a", "llm", gives="audio"), node("b", "llm", gives="audio")])
    with pytest.raises(ConfigError, match='got audio from "a.audio" and "b.audio", expected one stage that ends it'):
        task_routes(graph)


def test_a_stage_that_the_entry_can_not_feed_alone_is_left_out_and_named():
    graph = Graph([node("llm", tasks="respond"), node("other"), node("join", "llm", "other"), node("after", "join", gives="audio")])
    assert task_routes(graph)["respond"].stages == ("llm",)
    assert left_out(graph, "llm") == {"join": ["other"], "after": ["join"]}


def test_an_unknown_task_says_what_there_is():
    with pytest.raises(UnknownTask) as caught:
        route_of(task_routes(VOICE), "speek")
    assert str(caught.value) == 'got task "speek", but this pipeline does listen, transcribe, respond, speak\nhint: did you mean "speak"?'


# ---- replicas ----------------------------------------------------------------------------------------------------------------


def row(name: str, state: str = "ready", incarnation: str = "i1") -> Replica:
    return Replica(name, name.partition("#")[0], incarnation, state)


def table(*rows: Replica | str) -> Table:
    return Table(1, tuple(row(r) if isinstance(r, str) else r for r in rows))


def make_router(windows: dict[str, int], max_queued: int = 4) -> Router:
    router = Router(max_queued)
    router.on_table(table(*windows))
    for name, window in windows.items():
        router.on_window(name, "i1", window)
    return router


ROUTES = task_routes(VOICE)
RESPOND, SPEAK, LISTEN = ROUTES["respond"], ROUTES["speak"], ROUTES["listen"]


def picked(assignment) -> dict[str, str] | None:
    return assignment and {stage: replica.name for stage, replica in assignment.replicas.items()}


def test_a_request_takes_credit_of_every_stage_at_once():
    router = make_router({"llm#0": 1, "tts#0": 1})
    assert picked(router.route("r1", RESPOND)) == {"llm": "llm#0", "tts": "tts#0"}
    assert router.route("r2", SPEAK) is None


def test_or_none_and_then_holds_nothing():
    router = make_router({"llm#0": 1, "tts#0": 1})
    router.route("r1", SPEAK)
    assert router.route("r2", RESPOND) is None
    router.on_cancel("r2")
    assert router.route("r3", RESPOND.narrowed({"text"})) is not None


def test_no_ready_replica_is_unavailable_at_once():
    router = make_router({"llm#0": 1})
    with pytest.raises(Unavailable, match="stage tts is not ready"):
        router.route("r1", RESPOND)
    assert not router.is_ready(RESPOND)
    assert router.is_ready(RESPOND.narrowed({"text"}))


def test_a_ready_replica_that_has_granted_nothing_yet_is_waited_for():
    router = Router()
    assert [replica.name for replica in router.on_table(table("tts#0")).joined] == ["tts#0"]
    assert router.route("r1", SPEAK) is None
    assert [a.request_id for a in router.on_window("tts#0", "i1", 2)] == ["r1"]


def test_the_line_is_bounded():
    router = make_router({"tts#0": 1}, max_queued=1)
    router.route("r1", SPEAK)
    router.route("r2", SPEAK)
    with pytest.raises(Overloaded, match="1 requests wait already") as caught:
        router.route("r3", SPEAK)
    assert caught.value.retry_after_s > 0
    assert router.num_waiting == 1


def test_waiting_is_first_come_first_served():
    router = make_router({"tts#0": 1})
    for name in ("r1", "r2", "r3"):
        router.route(name, SPEAK)
    assert [a.request_id for a in router.on_finished("tts#0", "r1")] == ["r2"]
    assert [a.request_id for a in router.on_finished("tts#0", "r2")] == ["r3"]


def test_who_waits_keeps_its_stages_from_those_behind_and_others_pass():
    router = make_router({"llm#0": 2, "tts#0": 1, "vad#0": 1})
    router.route("r1", SPEAK)
    assert router.route("r2", RESPOND) is None
    assert router.route("r3", RESPOND.narrowed({"text"})) is None
    assert picked(router.route("r4", LISTEN)) == {"vad": "vad#0"}
    assert [a.request_id for a in router.on_finished("tts#0", "r1")] == ["r2", "r3"]


def test_the_least_loaded_replica_is_picked_and_equals_take_turns():
    router = make_router({"tts#0": 2, "tts#1": 2, "tts#2": 4})
    picks = [picked(router.route(f"r{i}", SPEAK))["tts"] for i in range(8)]
    assert picks[:3] == ["tts#0", "tts#1", "tts#2"]
    assert {name: picks.count(name) for name in set(picks)} == {"tts#0": 2, "tts#1": 2, "tts#2": 4}


def test_credit_comes_back_with_finished_and_not_with_cancel():
    router = make_router({"tts#0": 1})
    router.route("r1", SPEAK)
    router.on_cancel("r1")
    assert router.route("r2", SPEAK) is None
    assert [a.request_id for a in router.on_finished("tts#0", "r1")] == ["r2"]


def test_a_smaller_window_takes_nothing_that_runs():
    router = make_router({"tts#0": 3})
    router.route("r1", SPEAK)
    router.route("r2", SPEAK)
    router.on_window("tts#0", "i1", 1)
    assert router.route("r3", SPEAK) is None
    assert router.on_finished("tts#0", "r1") == []
    assert [a.request_id for a in router.on_finished("tts#0", "r2")] == ["r3"]


def test_a_lost_incarnation_names_its_requests_and_gives_no_credit():
    router = make_router({"llm#0": 2, "tts#0": 2})
    router.route("r1", RESPOND)
    router.route("r2", SPEAK)
    change = router.on_table(table("llm#0", row("tts#0", "starting", "i2")))
    assert [(lost.assignment.request_id, lost.stage) for lost in change.lost] == [("r1", "tts"), ("r2", "tts")]
    assert [replica.incarnation for replica in change.gone] == ["i1"]
    assert router.num_open == 1  # r1 still holds its credit at llm#0
    change = router.on_table(table("llm#0", row("tts#0", "ready", "i2")))
    assert [replica.incarnation for replica in change.joined] == ["i2"]
    assert router.on_window("tts#0", "i1", 9) == []  # a window of the dead
    assert router.route("r3", SPEAK) is None


def test_what_a_replica_has_finished_is_not_lost_with_it():
    router = make_router({"llm#0": 2, "tts#0": 2})
    router.route("r1", RESPOND)
    router.on_finished("llm#0", "r1")
    assert router.on_table(table("tts#0")).lost == ()


def test_a_restart_between_two_tables_is_a_loss_and_a_join():
    router = make_router({"tts#0": 1})
    router.route("r1", SPEAK)
    change = router.on_table(table(row("tts#0", incarnation="i2")))
    assert ([lost.assignment.request_id for lost in change.lost], [replica.incarnation for replica in change.joined]) == (["r1"], ["i2"])


def test_a_draining_replica_keeps_what_it_has_and_gets_nothing_new():
    router = make_router({"tts#0": 2, "tts#1": 2})
    router.route("r1", SPEAK)
    assert router.on_table(table(row("tts#0", "draining"), "tts#1")).lost == ()
    assert [picked(router.route(f"r{i}", SPEAK))["tts"] for i in (2, 3)] == ["tts#1", "tts#1"]


def test_who_waits_for_a_stage_that_is_gone_is_told():
    router = make_router({"tts#0": 1})
    router.route("r1", SPEAK)
    router.route("r2", SPEAK)
    assert router.on_table(table(row("tts#0", "down"))).stranded == ("r2",)
    assert router.num_waiting == 0


def test_a_retry_is_another_epoch_of_the_same_request():
    router = make_router({"tts#0": 2})
    router.route("r1", SPEAK, epoch=0)
    router.on_finished("tts#0", "r1", 0)
    assert router.route("r1", SPEAK, epoch=1).epoch == 1
    router.on_finished("tts#0", "r1", 0)  # late, and of the first try
    assert router.num_open == 1


def test_one_id_is_one_request_until_all_its_replicas_have_finished():
    router = make_router({"llm#0": 4, "tts#0": 1})
    router.route("r1", RESPOND)
    router.route("r2", SPEAK)
    for name in ("r1", "r2"):
        with pytest.raises(BadRequest, match=f"request {name} is open already"):
            router.route(name, RESPOND)
    router.on_finished("tts#0", "r1")
    router.on_finished("llm#0", "r1")
    assert router.route("r1", RESPOND.narrowed({"text"})) is not None


def test_affinity_prefers_the_replica_it_knows():
    router = make_router({"tts#0": 2, "tts#1": 2})
    first = picked(router.route("r1", SPEAK, affinity="s"))
    assert picked(router.route("r2", SPEAK, affinity="s")) == first
    assert picked(router.route("r3", SPEAK, affinity="s")) != first  # full: another will do


def test_affinity_is_hard_for_listen():
    router = make_router({"vad#0": 1, "vad#1": 1})
    router.route("r1", LISTEN, affinity="s")
    assert router.route("r2", LISTEN, affinity="s") is None
    assert [picked(a) for a in router.on_finished("vad#0", "r1")] == [{"vad": "vad#0"}]


def test_affinity_to_a_lost_replica_is_over():
    router = make_router({"vad#0": 1, "vad#1": 1})
    router.route("r1", LISTEN, affinity="s")
    router.on_table(table("vad#1"))
    assert picked(router.route("r2", LISTEN, affinity="s")) == {"vad": "vad#1"}


def test_affinities_are_forgotten_oldest_first():
    router = make_router({"vad#0": MAX_AFFINITIES + 9})
    for i in range(MAX_AFFINITIES + 5):
        router.route(f"r{i}", LISTEN, affinity=f"s{i}")
    assert len(router._affinities) == MAX_AFFINITIES  # noqa: SLF001


class RouterAgainstModel(RuleBasedStateMachine):
    """Random events; what must hold after each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(max_queued=5)
        self.rows: dict[str, Replica] = {}
        self.windows: dict[str, int] = {}
        self.open: dict[str, dict[str, str]] = {}  # request -> replica name -> incarnation, Finished still to come
        self.waiting: deque[tuple[str, TaskRoute]] = deque()
        self.count = 0

    def admit(self, assignments) -> None:
        for assignment in assignments:
            if assignment is None:
                continue
            self.waiting = deque(w for w in self.waiting if w[0] != assignment.request_id)
            for replica in assignment.replicas.values():
                assert self.rows[replica.name].state == "ready"
                held = sum(names.get(replica.name) == replica.incarnation for names in self.open.values())
                assert held < self.windows[replica.name]
            assert set(assignment.replicas) == set(assignment.route.stages)
            self.open[assignment.request_id] = {r.name: r.incarnation for r in assignment.replicas.values()}

    @rule(
        name=st.sampled_from(["llm#0", "llm#1", "tts#0", "vad#0"]), state=st.sampled_from(["ready", "ready", "draining", "down", "reborn"])
    )
    def membership(self, name, state) -> None:
        self.count += 1
        old = self.rows.get(name)
        incarnation = f"i{self.count}" if old is None or old.state == "down" or state == "reborn" else old.incarnation
        if old is None and state == "draining":
            return
        self.rows[name] = row(name, "ready" if state == "reborn" else state, incarnation)
        change = self.router.on_table(table(*self.rows.values()))
        for lost in change.lost:
            assert any(r.incarnation == self.open[lost.assignment.request_id].get(r.name) for r in change.gone)
        for replica in change.gone:
            self.windows.pop(replica.name, None)
            for names in self.open.values():
                if names.get(replica.name) == replica.incarnation:
                    del names[replica.name]
        self.open = {request: names for request, names in self.open.items() if names}
        self.waiting = deque(w for w in self.waiting if w[0] not in change.stranded)
        self.admit(change.admitted)

    @rule(name=st.sampled_from(["llm#0", "llm#1", "tts#0", "vad#0"]), window=st.integers(1, 3))
    def window(self, name, window) -> None:
        if name in self.rows and self.router.knows(self.rows[name]):  # a replica answers who has introduced itself
            self.windows[name] = window
            self.admit(self.router.on_window(name, self.rows[name].incarnation, window))

    @rule(route=st.sampled_from([RESPOND, SPEAK, LISTEN]), affinity=st.sampled_from(["", "a", "b"]))
    def submit(self, route, affinity) -> None:
        self.count += 1
        request = f"r{self.count}"
        try:
            assignment = self.router.route(request, route, affinity=affinity)
        except (Overloaded, Unavailable):
            return
        if assignment is None:
            self.waiting.append((request, route))
        else:
            assert not any(set(route.stages) & set(other.stages) for _, other in self.waiting)
            self.admit([assignment])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        name = data.draw(st.sampled_from(sorted(self.open[request])))
        del self.open[request][name]
        if not self.open[request]:
            del self.open[request]
        self.admit(self.router.on_finished(name, request))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        request = data.draw(st.sampled_from(sorted(w[0] for w in self.waiting)))
        self.waiting = deque(w for w in self.waiting if w[0] != request)
        self.admit(self.router.on_cancel(request))

    @invariant()
    def counts_agree(self) -> None:
        assert self.router.num_open == len(self.open)
        assert self.router.num_waiting == len(self.waiting) <= 5

    @invariant()
    def nobody_waits_at_the_head_for_nothing(self) -> None:
        if not self.waiting:
            return
        _, route = self.waiting[0]
        if route.task != "listen":  # whose affinity may hold it
            free = [self.has_room(stage) for stage in route.stages]
            assert not all(free)

    def has_room(self, stage: str) -> bool:
        for name, replica in self.rows.items():
            held = sum(names.get(name) == replica.incarnation for names in self.open.values())
            if replica.stage == stage and replica.state == "ready" and held < self.windows.get(name, 0):
                return True
        return False


TestRouterAgainstModel = RouterAgainstModel.TestCase
TestRouterAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_route_crosses_a_process():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(RESPOND), type=TaskRoute) == RESPOND
