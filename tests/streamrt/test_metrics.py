"""Counters of many processes, as one Prometheus text."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamrt.metrics import METRICS, SECONDS, Metrics, Sample, render


def values(text: bytes) -> dict[str, float]:
    """ "name{label=value}" -> value."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_the_same_series_of_many_processes_add_up() -> None:
    processes = [Metrics(), Metrics()]
    for number, metrics in enumerate(processes):
        metrics.count("streamrt_requests_total", "llm", "respond", "completed", by=number + 1)
        metrics.set("streamrt_running_requests", "llm", "0", value=2)
        metrics.observe("streamrt_queue_wait_seconds", "llm", value=0.02)
        metrics.observe("streamrt_queue_wait_seconds", "llm", value=99.0)
    processes[1].count("streamrt_requests_total", "llm", "respond", "failed")
    got = values(render([sample for metrics in processes for sample in metrics.snapshot()]))
    assert got["streamrt_requests_total{outcome=completed,stage=llm,task=respond}"] == 3
    assert got["streamrt_requests_total{outcome=failed,stage=llm,task=respond}"] == 1
    assert got["streamrt_running_requests{replica=0,stage=llm}"] == 4
    assert got["streamrt_queue_wait_seconds_count{stage=llm}"] == 4
    assert got["streamrt_queue_wait_seconds_sum{stage=llm}"] == pytest.approx(198.04)
    buckets = {edge: got[f"streamrt_queue_wait_seconds_bucket{{le={edge},stage=llm}}"] for edge in (*map(str, SECONDS), "+Inf")}
    assert (buckets["0.01"], buckets["0.025"], buckets["30.0"], buckets["+Inf"]) == (0, 2, 2, 4)


def test_a_value_on_the_edge_of_a_bucket_is_in_it() -> None:
    metrics = Metrics()
    metrics.observe("streamrt_turn_first_audio_seconds", value=0.25)
    assert values(render(metrics.snapshot()))["streamrt_turn_first_audio_seconds_bucket{le=0.25}"] == 1


def test_rendering_changes_no_series() -> None:
    metrics = Metrics()
    metrics.observe("streamrt_queue_wait_seconds", "llm", value=0.02)
    snapshot = metrics.snapshot()
    assert render([*snapshot, *snapshot]) == render([*snapshot, *snapshot])
    assert snapshot[0].buckets.count(1) == 1


def test_a_snapshot_survives_the_wire() -> None:
    metrics = Metrics()
    metrics.observe("streamrt_request_seconds", "llm", value=0.3)
    metrics.count("streamrt_cancels_total", "client")
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(metrics.snapshot()))
    assert render([msgspec.convert(row, Sample) for row in rows]) == render(metrics.snapshot())


def test_series_of_another_version_are_left_out() -> None:
    assert values(render([Sample("streamrt_of_tomorrow_total", ("x",), 1.0)])) == {}


@pytest.mark.parametrize(
    "mistake",
    [
        lambda m: m.count("streamrt_requests_total", "llm"),
        lambda m: m.count("streamrt_running_requests", "llm", "0"),
        lambda m: m.observe("streamrt_requests_total", "llm", "respond", "failed", value=1.0),
        lambda m: m.set("streamrt_queue_wait_seconds", "llm", value=1.0),
        lambda m: m.set("streamrt_running_requests", value=1.0),
    ],
    ids=["too few labels", "count a gauge", "observe a counter", "set a histogram", "no labels"],
)
def test_a_mistake_is_an_error_where_it_is_made(mistake: object) -> None:
    with pytest.raises(ValueError, match="with labels"):
        mistake(Metrics())  # type: ignore[operator]


def test_a_metric_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        Metrics().count("streamrt_surprises_total")


def test_every_name_says_its_unit_or_what_it_counts() -> None:
    for name, definition in METRICS.items():
        assert name.startswith("streamrt_")
        assert name.endswith("_total") == (definition.kind == "counter") or name == "streamrt_ring_bytes_total"
        assert definition.kind != "histogram" or name.endswith("_seconds")
