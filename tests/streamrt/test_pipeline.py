"""The graph: edges between ports, order, and what can not be a pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrt.errors import ConfigError
from streamrt.pipeline import Edge, Graph, Node


def node(name: str, *inputs: str, takes: str = "", gives: str = "text") -> Node:
    """`gives` is "port:modality port:modality", or a modality that is its own port."""
    ports = {part.partition(":")[0]: part.rpartition(":")[2] for part in gives.split()}
    return Node(name, inputs, frozenset(takes.split()), ports)


THINKER = node("thinker", gives="text hidden")
TALKER = node("talker", "thinker.hidden", takes="hidden", gives="codes")
VOCODER = node("vocoder", "talker", takes="codes latents", gives="audio")


def error_of(*nodes: Node) -> str:
    with pytest.raises(ConfigError) as caught:
        Graph(nodes)
    return str(caught.value)


def test_inputs_become_edges_between_ports():
    graph = Graph([THINKER, TALKER, VOCODER])
    assert graph.edges == (Edge("thinker", "hidden", "talker", "hidden"), Edge("talker", "codes", "vocoder", "codes"))
    assert [edge.stream for edge in graph.edges] == ["thinker.hidden", "talker.codes"]


def test_order_is_topological_and_else_the_order_of_the_file():
    graph = Graph([VOCODER, node("vad", gives="event"), TALKER, THINKER])
    assert graph.order == ("vad", "thinker", "talker", "vocoder")


def test_a_level_holds_stages_that_do_not_feed_each_other():
    graph = Graph([node("a"), node("b"), node("c", "a"), node("d", "a", "c")])
    assert graph.levels() == (("a", "b"), ("c",), ("d",))


def test_downstream_is_everything_that_something_flows_to():
    graph = Graph([node("a"), node("b", "a"), node("c", "b"), node("d"), node("e", "d", "c")])
    assert graph.downstream("b") == {"c", "e"}
    assert graph.downstream("e") == set()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node("llm"), node("tts", "lm")],
            'pipeline.toml: stage.tts.inputs: got "lm", expected the name of a stage: "llm"\nhint: did you mean "llm"?',
        ),
        ([node("llm", "llm")], 'pipeline.toml: stage.llm.inputs: got "llm", expected another stage: a stage can not feed itself'),
        ([node("llm", "x")], 'pipeline.toml: stage.llm.inputs: got "x", expected no inputs: there is no other stage'),
        ([node("a"), node("a")], 'pipeline.toml: stage.a.name: got "a" twice, expected a name of its own for each stage'),
        ([node("a"), node("b", "a", "a")], 'pipeline.toml: stage.b.inputs: got "a" twice, expected each input once'),
        ([node("a"), node("b", "a", "a.text")], 'pipeline.toml: stage.b.inputs: got "a.text" twice, expected each input once'),
        (
            [THINKER, node("talker", "thinker", takes="hidden", gives="codes")],
            'pipeline.toml: stage.talker.inputs: got "thinker", expected one of "thinker.text", "thinker.hidden" '
            '(stage "thinker" has several ports)\nhint: stage "talker" takes what "thinker.hidden" gives',
        ),
        (
            [THINKER, node("talker", "thinker.hiden", takes="hidden")],
            'pipeline.toml: stage.talker.inputs: got "thinker.hiden", expected one of "thinker.text", "thinker.hidden" '
            '(what stage "thinker" gives)\nhint: did you mean "thinker.hidden"?',
        ),
        (
            [THINKER, TALKER, node("vad", gives="event"), node("vocoder", "vad", takes="codes latents")],
            'pipeline.toml: stage.vocoder.inputs: got "vad", which gives event, expected codes or latents (what stage "vocoder" takes)\n'
            'hint: that is what "talker" gives',
        ),
        (
            [node("vad", gives="event"), node("tts", "vad", takes="text", gives="audio")],
            'pipeline.toml: stage.tts.inputs: got "vad", which gives event, expected text (what stage "tts" takes)\n'
            "hint: no stage here gives it: put one between them that turns the one into the other",
        ),
        (
            [node("sink", gives=""), node("b", "sink")],
            'pipeline.toml: stage.b.inputs: got "sink", expected a stage that gives something; "sink" declares no output',
        ),
        (
            [node("in"), node("a", "in", "c"), node("b", "a"), node("c", "b"), node("out", "c")],
            "pipeline.toml: stage.a.inputs: got a cycle: a -> b -> c -> a, expected stages that flow one way\n"
            'hint: take one of these out of the inputs: "a", "b", "c"',
        ),
    ],
)
def test_an_impossible_graph_says_why(nodes, message):
    assert error_of(*nodes) == message


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_acyclic_graph_is_ordered_and_every_cycle_is_found(data):
    names = [f"s{i}" for i in range(data.draw(st.integers(1, 6)))]
    wanted = {name: data.draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) for name in names}
    nodes = [node(name, *(source for source in wanted[name] if source != name)) for name in names]
    try:
        graph = Graph(nodes)
    except ConfigError as error:
        ring = error.message.partition("a cycle: ")[2].partition(",")[0].split(" -> ")
        assert ring[0] == ring[-1]
        assert len(ring) > 2
        assert all(source in wanted[target] for source, target in zip(ring, ring[1:], strict=False))
    else:
        assert sorted(graph.order) == names
        assert all(graph.order.index(edge.source) < graph.order.index(edge.target) for edge in graph.edges)
