"""Counters, gauges and histograms with the unit in the name and bounded labels.

Every process counts for itself; a snapshot rides on each heartbeat to the orchestrator, and any gateway renders the sum of
all as Prometheus text. Knows nothing of HTTP or of who counts what.

Rule: a metric exists only when it stands in `METRICS`; `docs/metrics.md` lists the same table and a test compares them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Definition(msgspec.Struct, frozen=True):
    """What a metric is."""

    kind: str  # "counter" | "gauge" | "histogram"
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = SECONDS


METRICS: dict[str, Definition] = {
    "streamrt_requests_total": Definition("counter", ("stage", "task", "outcome"), "Requests that ended on a stage"),
    "streamrt_queue_wait_seconds": Definition("histogram", ("stage",), "From arrival at a replica to the start of work"),
    "streamrt_first_chunk_seconds": Definition("histogram", ("stage",), "From the start of work to the stage's first chunk (TTFT, TTFA)"),
    "streamrt_request_seconds": Definition("histogram", ("stage",), "From arrival at a replica to the end"),
    "streamrt_chunk_gap_seconds": Definition("histogram", ("stage",), "Between two chunks of one request (ITL)"),
    "streamrt_chunk_hop_seconds": Definition("histogram", ("stage",), "From a producer's send to the taker's loop"),
    "streamrt_chunks_total": Definition("counter", ("stage", "modality"), "Chunks that a stage sent"),
    "streamrt_running_requests": Definition("gauge", ("stage", "replica"), "Requests in work"),
    "streamrt_queued_requests": Definition("gauge", ("stage", "replica"), "Requests that wait at a replica"),
    "streamrt_loop_lag_seconds": Definition("gauge", ("stage", "replica"), "How late the event loop was at the last heartbeat"),
    "streamrt_ring_bytes_in_use": Definition("gauge", ("stage", "replica"), "Shared memory that is leased now"),
    "streamrt_ring_bytes_total": Definition("gauge", ("stage", "replica"), "Shared memory of the replica's ring"),
    "streamrt_credit_waits_total": Definition("counter", ("stage", "replica"), "Sends that waited for credit or a slot"),
    "streamrt_credit_wait_seconds_total": Definition("counter", ("stage", "replica"), "Time that sends waited for credit or a slot"),
    "streamrt_stale_chunks_total": Definition("counter", ("stage", "replica"), "Chunks of cancelled requests dropped unread"),
    "streamrt_hung_peers_total": Definition("counter", ("stage", "replica"), "Readers of its chunks that were given up because they hung"),
    "streamrt_quarantined_bytes": Definition("gauge", ("stage", "replica"), "Bytes that readers which hung may still read"),
    "streamrt_restarts_total": Definition("counter", ("process",), "Times that a process was restarted"),
    "streamrt_client_requests_total": Definition("counter", ("task", "outcome"), "Requests as their client saw them end"),
    "streamrt_client_request_seconds": Definition("histogram", ("task",), "From submit to the end, as the client saw it"),
    "streamrt_client_first_chunk_seconds": Definition(
        "histogram", ("task", "modality"), "From submit to the first chunk of a modality (TTFT, TTFA)"
    ),
    "streamrt_client_waiting_requests": Definition("gauge", ("process",), "Requests that wait for work credit in a client"),
    "streamrt_cancels_total": Definition("counter", ("cause",), "Requests cancelled, by cause"),
    "streamrt_http_requests_total": Definition("counter", ("route", "status"), "HTTP requests answered"),
    "streamrt_http_connections": Definition("gauge", ("process",), "Open HTTP and WebSocket connections"),
    "streamrt_realtime_sessions": Definition("gauge", ("process",), "Open realtime sessions"),
    "streamrt_turn_first_audio_seconds": Definition("histogram", (), "From the end of speech to the first audio sent (one spoken turn)"),
}


class Sample(msgspec.Struct, array_like=True):
    """One series of a snapshot."""

    name: str
    labels: tuple[str, ...]
    value: float  # counter, gauge; a histogram's sum
    buckets: list[int] = []  # histogram: count per bucket, the last is +Inf


class Metrics:
    """The series of one process. Written by that process's loop and compute threads (each update is one dict operation)."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[str, ...]], Sample] = {}

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._sample(name, labels, "counter").value += by

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        self._sample(name, labels, "gauge", "counter").value = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        sample = self._sample(name, labels, "histogram")
        buckets = METRICS[name].buckets
        if not sample.buckets:
            sample.buckets = [0] * (len(buckets) + 1)
        sample.value += value
        sample.buckets[bisect_left(buckets, value)] += 1

    def snapshot(self) -> list[Sample]:
        return list(self._series.values())

    def _sample(self, name: str, labels: tuple[str, ...], *kinds: str) -> Sample:
        sample = self._series.get((name, labels))
        if sample is None:
            definition = METRICS[name]
            if len(labels) != len(definition.labels) or definition.kind not in kinds:
                raise ValueError(f"{name} is a {definition.kind} with labels {definition.labels}, got {labels}")
            sample = self._series[name, labels] = Sample(name, labels, 0.0)
        return sample


def render(samples: Iterable[Sample]) -> bytes:
    """Prometheus text of the snapshots of many processes: counters and histograms of one series add up, gauges too."""
    merged: dict[tuple[str, tuple[str, ...]], Sample] = {}
    for sample in samples:
        if sample.name not in METRICS:
            continue  # a process of another version
        key = (sample.name, tuple(sample.labels))
        known = merged.get(key)
        if known is None:
            merged[key] = Sample(sample.name, key[1], sample.value, list(sample.buckets))
        else:
            known.value += sample.value
            known.buckets = [a + b for a, b in zip(known.buckets, sample.buckets, strict=True)]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(merged.values()))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def collect(self) -> Iterator[Metric]:
        for name, definition in METRICS.items():
            family: Any
            match definition.kind:
                case "counter":
                    family = CounterMetricFamily(name.removesuffix("_total"), definition.help, labels=definition.labels)
                case "gauge":
                    family = GaugeMetricFamily(name, definition.help, labels=definition.labels)
                case _:
                    family = HistogramMetricFamily(name, definition.help, labels=definition.labels)
            for sample in self._samples:
                if sample.name != name:
                    continue
                if definition.kind == "histogram":
                    family.add_metric(sample.labels, _cumulative(definition.buckets, sample.buckets), sample.value)
                else:
                    family.add_metric(sample.labels, sample.value)
            yield family


def _cumulative(edges: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    total = 0
    rows = []
    for edge, count in zip([*map(str, edges), "+Inf"], counts, strict=True):
        total += count
        rows.append((edge, float(total)))
    return rows
