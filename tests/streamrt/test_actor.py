"""One real actor between a client's work lane and in-process connectors: whatever happens, one Finished and nothing kept."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrt import Chunk, Context, Request, Stage, StageFailed, end_chunk, text_chunk
from streamrt import actor as actor_module
from streamrt.actor import Actor
from streamrt.metrics import Metrics
from streamrt.trace import Tracer
from transport.chunk import ChunkHeader, Place, describe
from transport.connector import ConnectorOptions, Lease, Outlet
from transport.lanes import LaneClient, LaneServer
from transport.memory import MemoryConnector
from transport.messages import Cancel, Edge, Finished, Join, Leave, ToClient, ToReplica, Window, Work

OPTIONS = ConnectorOptions(window_chunks=4)


@pytest.fixture(autouse=True)
def _keep_no_tracebacks() -> Iterator[None]:
    """pytest keeps log records, these keep tracebacks, and these the chunks that a stage had in hand."""
    logging.getLogger("streamrt.actor").disabled = True
    yield
    logging.getLogger("streamrt.actor").disabled = False


class Echo(Stage):
    """Passes text on and notes how each of its requests ended."""

    gives = {"text": "text", "other": "text"}

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        self.seen: list[str] = []
        self.ended: list[str] = []

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        try:
            async for chunk in chunks:
                self.seen.append(chunk.text)
                if chunk.text == "raise":
                    raise ValueError("told to")
                if chunk.text == "fail":
                    raise StageFailed("told to fail")
                if chunk.text == "timeout":
                    raise TimeoutError("of its own")
                if chunk.text == "cancel itself":
                    raise asyncio.CancelledError
                if chunk.text == "stop":
                    return
                yield text_chunk(chunk.text, port=chunk.meta.get("to", ""))
            yield end_chunk(reason="read all")
        finally:
            await asyncio.sleep(0)  # a clean-up may wait; it is over before Finished is said
            self.ended.append(request.id)


class Plain(Stage):
    """The same as a plain generator, on a thread of its own."""

    gives = {"text": "text"}

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        self.threads: set[str] = set()
        self.ended: list[str] = []
        self.may_go = threading.Event()

    def process(self, request: Request, chunks: Iterator[Chunk]) -> Iterator[Chunk]:  # type: ignore[override]
        try:
            for chunk in chunks:
                self.threads.add(threading.current_thread().name)
                if chunk.text == "raise":
                    raise ValueError("told to")
                yield text_chunk(chunk.text)
                if chunk.text == "block":
                    self.may_go.wait(20)
        finally:
            self.ended.append(request.id)


class Joined(Stage):
    """Reads two streams to their ends."""

    gives = {"text": "text"}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        yield text_chunk(",".join(sorted([f"{chunk.stage}={chunk.text}" async for chunk in chunks])))


class NoGenerator(Stage):
    gives = {"text": "text"}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> None:  # type: ignore[override]
        return None


class Peer:
    """A process beside the actor: takes chunks, sends chunks."""

    def __init__(self, name: str, changed: asyncio.Event) -> None:
        self.connector = MemoryConnector(name, OPTIONS)
        self.held: list[Lease] = []  # taken and not yet read
        self.got: list[tuple[str, str, int, Place, str, dict[str, Any]]] = []  # request, port, seq, place, text, meta
        self.cancelled: list[tuple[str, int]] = []
        self.holds = False
        self.changed = changed
        self.endpoint = ""

    async def open(self) -> Peer:
        self.endpoint = await self.connector.open(self._on_chunk, lambda peer: None, self._on_cancel)
        return self

    def _on_cancel(self, request_id: str, epoch: int) -> None:
        self.cancelled.append((request_id, epoch))
        self.changed.set()

    def _on_chunk(self, lease: Lease) -> None:
        self.held.append(lease)
        self.changed.set()
        if not self.holds:
            self.read_all()

    def read_all(self) -> None:
        held, self.held = self.held, []
        for lease in held:
            header = lease.header
            text = bytes(lease.arrays()[0]).decode() if header.tensors else ""
            self.got.append((header.request_id, header.port, header.seq, Place(header.place), text, header.meta))
            lease.release()

    def texts(self, request_id: str = "r1", port: str = "text") -> list[str]:
        return [text for r, p, _, place, text, _ in self.got if (r, p, place) == (request_id, port, Place.PARTIAL)]

    def ends(self, request_id: str = "r1") -> list[str]:
        return [port for r, port, _, place, _, _ in self.got if r == request_id and place != Place.PARTIAL]


class Bench:
    """An actor, a client of it and the client's data path."""

    def __init__(self, actor: Actor, connector: MemoryConnector, client: Peer, lane: LaneServer, work: LaneClient, entry: Outlet) -> None:
        self.actor = actor
        self.connector = connector
        self.client = client
        self.lane = lane
        self.work = work
        self.entry = entry
        self.finished: list[Finished] = []
        self.windows: list[int] = []
        self.changed = client.changed
        self.seqs: dict[tuple[str, str], int] = {}

    async def peer(self, name: str) -> Peer:
        return await Peer(name, self.changed).open()

    def on_message(self, message: Finished | Window) -> None:
        if isinstance(message, Finished):
            self.finished.append(message)
        else:
            self.windows.append(message.max_requests)
        self.changed.set()

    def ask(
        self,
        request_id: str = "r1",
        *,
        sources: Sequence[str] = ("client",),
        edges: Sequence[Edge] | None = None,
        time_left_s: float | None = None,
    ) -> None:
        chosen = (Edge("client", self.client.endpoint, "text"),) if edges is None else tuple(edges)
        self.work.send(Work(request_id, 0, "respond", tuple(sources), chosen, time_left_s))

    async def feed(
        self, *texts: str, request_id: str = "r1", end: bool = True, outlet: Outlet | None = None, stage: str = "client", **meta: Any
    ) -> None:
        for text in texts:
            await self._send(text_chunk(text, **meta), Place.PARTIAL, request_id, outlet or self.entry, stage)
        if end:
            await self._send(Chunk("event"), Place.EMPTY_FINAL, request_id, outlet or self.entry, stage)

    async def send_failed(self, outlet: Outlet, stage: str) -> None:
        await self._send(Chunk("event", meta={"error": "it broke"}), Place.FAILED, "r1", outlet, stage)

    async def _send(self, chunk: Chunk, place: Place, request_id: str, outlet: Outlet, stage: str) -> None:
        seq = self.seqs.get((request_id, stage), 0)
        self.seqs[request_id, stage] = seq + 1
        specs, arrays, _ = describe(chunk.tensors)
        port = "" if stage == "client" else "text"
        await outlet.send(ChunkHeader(request_id, 0, stage, port, seq, chunk.modality, int(place), specs, meta=chunk.meta), arrays)

    async def until(self, what: Any) -> None:
        """Wait for a message or a chunk that makes `what()` true."""
        async with asyncio.timeout(20):
            while not what():
                self.changed.clear()
                await self.changed.wait()

    async def outcome(self, request_id: str = "r1") -> Finished:
        await self.until(lambda: any(f.request_id == request_id for f in self.finished))
        (one,) = (f for f in self.finished if f.request_id == request_id)
        return one

    async def is_empty(self) -> None:
        """Nothing of any request is kept: not by the actor, not on the data path."""
        for _ in range(10):  # callbacks that are due
            await asyncio.sleep(0)
        assert (self.actor.admission.running, self.actor.admission.queued) == (0, 0)
        assert not self.actor._requests
        assert not self.actor._early
        assert not self.actor._tasks
        assert self.client.connector.stats().slots_in_use == 0
        assert self.connector.stats().slots_in_use == 0


@asynccontextmanager
async def bench(tmp_path: Path, kind: type[Stage] = Echo, *, max_requests: int = 2) -> AsyncIterator[Any]:
    connector = MemoryConnector("s#0/1", OPTIONS)
    client = await Peer("client/1", asyncio.Event()).open()
    stage = kind(None, Context(stage="s"))
    actor = Actor(stage, name="s", replica="s#0", incarnation="1", max_requests=max_requests, connectors={"memory": connector},
                  metrics=Metrics(), tracer=Tracer(None, "s"))  # fmt: skip
    endpoint = await connector.open(actor.on_chunk, actor.on_peer_lost, actor.on_cancel_in_lane)
    lane = await LaneServer.bind(f"ipc://{tmp_path}/w.sock", ToReplica, actor.on_work_message)
    actor.serve(lane)
    held: list[Bench] = []
    work = await LaneClient.connect(lane.endpoint, "client/1", ToClient, lambda message: held[0].on_message(message))
    it = Bench(actor, connector, client, lane, work, await client.connector.dial(endpoint))
    held.append(it)
    work.send(Join("client/1"))
    await it.until(lambda: it.windows)
    try:
        yield it
    finally:
        await actor.close()
        await work.close(linger_s=0)
        await lane.close(linger_s=0)
        await client.connector.close()
        await connector.close()


async def test_what_runs_fails_when_the_stage_is_broken(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(lambda: it.client.texts() == ["a"])
        await it.actor.close("the device is lost")
        finished = await it.outcome()
        assert (finished.outcome, finished.error_code, finished.error) == ("failed", "stage_failed", "stage s: the device is lost")
        await it.is_empty()


async def test_a_request_streams_and_ends_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", "b")
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("completed", "")
        assert set(finished.timings) == {"total_ms", "queue_wait_ms", "first_chunk_ms"}
        await it.until(it.client.ends)
        assert [(seq, place, text) for _, _, seq, place, text, _ in it.client.got] == [
            (0, Place.PARTIAL, "a"), (1, Place.PARTIAL, "b"), (2, Place.EMPTY_FINAL, "")]  # fmt: skip
        assert it.client.got[-1][5] == {"reason": "read all"}
        await it.is_empty()


async def test_every_edge_ends_once_and_gets_its_own_port(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        second = await it.peer("next/1")
        it.ask(
            edges=[
                Edge("client", it.client.endpoint, "text"),
                Edge("next", second.endpoint, "text"),
                Edge("client", it.client.endpoint, "other"),
            ]
        )
        await it.feed("a", end=False)
        await it.feed("b", to="other")
        assert (await it.outcome()).outcome == "completed"
        await it.until(lambda: len(it.client.ends()) == 2)
        assert (it.client.texts(), it.client.texts(port="other")) == (["a"], ["b"])
        assert sorted(it.client.ends()) == ["other", "text"]
        assert (second.texts(), second.ends()) == (["a"], ["text"])
        await it.is_empty()
        await second.connector.close()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("raise", "stage_failed", "stage s: ValueError: told to"),
        ("fail", "stage_failed", "told to fail"),
        ("timeout", "stage_failed", "stage s: TimeoutError: of its own"),
        ("cancel itself", "stage_failed", "stage s: it cancelled itself"),
    ],
)
async def test_what_a_stage_raises_fails_that_request_alone(tmp_path: Path, text: str, code: str, message: str) -> None:
    async with bench(tmp_path) as it:
        it.ask("r1")
        it.ask("r2")
        await it.feed("a", text, request_id="r1")
        finished = await it.outcome("r1")
        assert (finished.outcome, finished.error_code, finished.error) == ("failed", code, message)
        await it.feed("b", request_id="r2")
        assert (await it.outcome("r2")).outcome == "completed"
        await it.until(lambda: it.client.ends("r2"))
        assert it.client.ends("r1") == []
        assert it.client.cancelled == [("r1", 0)]
        assert it.actor.stage.ended == ["r1", "r2"]
        await it.is_empty()


async def test_a_port_that_the_stage_does_not_have_is_an_error(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", to="txt")
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("failed", "stage s: got a chunk for port \"txt\", expected one of ['other', 'text']")
        await it.is_empty()


async def test_a_process_that_is_no_generator_is_said(tmp_path: Path) -> None:
    async with bench(tmp_path, NoGenerator) as it:
        it.ask()
        assert "process must be a generator" in (await it.outcome()).error
        await it.feed()
        await it.is_empty()


async def test_a_stage_that_stops_reading_early_has_completed(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("stop", end=False)
        assert (await it.outcome()).outcome == "completed"
        await it.feed(*["many", "more", "than", "the", "window", "holds"])
        await it.is_empty()


async def test_a_cancel_while_it_runs_ends_it_and_what_follows_is_dropped(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(it.client.texts)
        it.work.send(Cancel("r1", 0, "turn_detected"))
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("cancelled", "stage s: cancelled (turn_detected)")
        assert it.actor.stage.ended == ["r1"]
        assert it.client.cancelled == [("r1", 0)]
        await it.feed("late")
        await it.is_empty()


async def test_a_cancel_right_behind_its_work_ends_it_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        for n in range(20):  # both arrive in one turn of the loop
            it.ask(f"r{n}")
            it.work.send(Cancel(f"r{n}", 0))
        it.ask("last")
        await it.feed("a", request_id="last")
        await it.outcome("last")
        assert sorted(f.request_id for f in it.finished) == sorted(["last", *(f"r{n}" for n in range(20))])
        await it.is_empty()


async def test_a_cancel_of_what_is_queued_ends_it_and_the_line_moves_on(tmp_path: Path) -> None:
    async with bench(tmp_path, max_requests=1) as it:
        for name in ("r1", "r2", "r3"):
            it.ask(name)
        await it.feed("two", request_id="r2", end=False)
        it.work.send(Cancel("r2", 0))
        assert (await it.outcome("r2")).outcome == "cancelled"
        await it.feed("three", request_id="r3")
        await it.feed("one", request_id="r1")
        assert [(await it.outcome(name)).outcome for name in ("r1", "r3")] == ["completed", "completed"]
        await it.until(lambda: it.client.ends("r3"))
        assert (it.client.texts("r3"), it.client.texts("r2")) == (["three"], [])
        await it.is_empty()


async def test_a_cancel_that_comes_first_kills_what_follows(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.work.send(Cancel("r1", 0))
        it.ask()
        assert (await it.outcome()).outcome == "cancelled"
        await it.feed("a")
        assert it.actor.stage.seen == []
        await it.is_empty()


async def test_chunks_that_come_before_their_work_wait_for_it_in_order(tmp_path: Path) -> None:
    async with bench(tmp_path, max_requests=1) as it:
        await it.feed("a", "b", request_id="r1", end=False)
        await it.feed("x", request_id="r2", end=False)
        it.ask("r1")
        it.ask("r2")  # queued, its first chunk here already
        await it.until(lambda: it.client.texts("r1"))
        await it.feed("y", request_id="r2")
        await it.feed("c", request_id="r1")
        assert [(await it.outcome(name)).outcome for name in ("r1", "r2")] == ["completed", "completed"]
        await it.until(lambda: it.client.ends("r2"))
        assert (it.client.texts("r1"), it.client.texts("r2")) == (["a", "b", "c"], ["x", "y"])
        await it.is_empty()


async def test_chunks_whose_work_never_comes_are_given_back_and_a_late_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "EARLY_CHUNK_S", 0.01)
    async with bench(tmp_path) as it:
        await it.feed("a", "b", "c", end=False)
        async with asyncio.timeout(20):
            await it.feed("d", "e")  # beyond the window: waits until the first are given back
        it.ask()
        assert (await it.outcome()).outcome == "cancelled"
        await it.is_empty()


async def test_a_deadline_expires_what_runs_and_what_is_queued(tmp_path: Path) -> None:
    async with bench(tmp_path, max_requests=1) as it:
        it.ask("r1", time_left_s=0.05)
        it.ask("r2", time_left_s=0.02)
        finished = [await it.outcome(name) for name in ("r2", "r1")]
        assert [(f.outcome, f.error_code) for f in finished] == [("expired", "expired")] * 2
        assert it.actor.stage.ended == ["r1"]
        await it.is_empty()


async def test_a_plain_generator_runs_on_a_thread_and_streams(tmp_path: Path) -> None:
    async with bench(tmp_path, Plain) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(lambda: it.client.texts() == ["a"])
        await it.feed("b")
        assert (await it.outcome()).outcome == "completed"
        await it.until(it.client.ends)
        assert it.client.texts() == ["a", "b"]
        assert all(name.startswith("process") for name in it.actor.stage.threads)
        assert it.actor.stage.ended == ["r1"]
        await it.is_empty()


async def test_a_plain_generator_that_raises_fails_its_request(tmp_path: Path) -> None:
    async with bench(tmp_path, Plain) as it:
        it.ask()
        await it.feed("raise")
        assert (await it.outcome()).error == "stage s: ValueError: told to"
        await it.is_empty()


@pytest.mark.parametrize("where", ["waits for input", "runs", "waits for credit"])
async def test_a_cancelled_plain_generator_is_closed_before_finished_is_said(tmp_path: Path, where: str) -> None:
    async with bench(tmp_path, Plain) as it:
        stage = it.actor.stage
        it.ask()
        if where == "waits for credit":
            it.client.holds = True
            await it.feed("a", "b", "c", "d", end=False)
            await it.until(lambda: len(it.client.held) == 4)
            await it.feed("e", end=False)
        else:
            await it.feed("block" if where == "runs" else "a", end=False)
            await it.until(it.client.texts)
        it.work.send(Cancel("r1", 0))
        if where == "runs":
            await it.until(lambda: it.client.cancelled)  # the actor has heard of it
            stage.may_go.set()
        assert (await it.outcome()).outcome == "cancelled"
        assert stage.ended == ["r1"]
        it.client.holds = False
        it.client.read_all()
        await it.is_empty()


async def test_fan_in_reads_both_streams_to_their_ends(tmp_path: Path) -> None:
    async with bench(tmp_path, Joined) as it:
        endpoint = it.entry.endpoint
        peers = {name: await it.peer(f"{name}/1") for name in ("left", "right")}
        outlets = {name: await peer.connector.dial(endpoint) for name, peer in peers.items()}
        it.ask(sources=("left.text", "right.text"))
        await it.feed("1", outlet=outlets["left"], stage="left")
        await it.feed("2", outlet=outlets["right"], stage="right", end=False)
        assert it.client.got == []
        await it.feed("3", outlet=outlets["right"], stage="right")
        assert (await it.outcome()).outcome == "completed"
        await it.until(it.client.ends)
        assert it.client.texts() == ["left=1,right=2,right=3"]
        await it.is_empty()
        for peer in peers.values():
            await peer.connector.close()


async def test_an_input_that_failed_fails_the_request_with_its_reason(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        before = await it.peer("asr#0/1")
        outlet = await before.connector.dial(it.entry.endpoint)
        it.ask(sources=("asr.text",))
        await it.feed("a", outlet=outlet, stage="asr", end=False)
        await it.send_failed(outlet, "asr")
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("failed", "asr.text: it broke")
        await it.is_empty()
        await before.connector.close()


async def test_a_lost_producer_fails_what_it_fed_after_what_it_has_sent(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        before = await it.peer("asr#0/1")
        outlet = await before.connector.dial(it.entry.endpoint)
        it.ask(sources=("asr.text",))
        await it.feed("a", outlet=outlet, stage="asr", end=False)
        await it.until(it.client.texts)
        await it.feed("b", outlet=outlet, stage="asr", end=False)
        await before.connector.close()
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("failed", "asr#0/1 is gone")
        assert it.actor.stage.seen == ["a", "b"]
        await it.is_empty()


async def test_a_producer_that_cancels_in_lane_ends_what_it_fed(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        before = await it.peer("asr#0/1")
        outlet = await before.connector.dial(it.entry.endpoint)
        await it.feed("early", request_id="r2", outlet=outlet, stage="asr", end=False)
        outlet.cancel("r2", 0)
        it.ask(sources=("asr.text",))
        await it.feed("a", outlet=outlet, stage="asr", end=False)
        await it.until(it.client.texts)
        outlet.cancel("r1", 0)
        assert (await it.outcome()).outcome == "cancelled"
        await it.is_empty()
        assert before.connector.stats().slots_in_use == 0
        await before.connector.close()


async def test_a_lost_consumer_fails_the_request(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        after = await it.peer("tts#0/1")
        it.ask(edges=[Edge("tts", after.endpoint, "text")])
        await it.feed("a", end=False)
        await it.until(lambda: after.got)
        await after.connector.close()
        await it.feed("b")
        finished = await it.outcome()
        assert finished.outcome == "failed"
        assert "the next process is gone" in finished.error
        await it.is_empty()


async def test_a_slow_consumer_holds_back_its_own_request_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        slow = await it.peer("slow/1")
        slow.holds = True
        it.ask("r1", edges=[Edge("slow", slow.endpoint, "text")])
        it.ask("r2")
        feeding = asyncio.create_task(it.feed(*map(str, range(12)), request_id="r1"))
        await it.feed(*map(str, range(12)), request_id="r2")
        assert (await it.outcome("r2")).outcome == "completed"
        assert len(slow.held) == OPTIONS.window_chunks
        assert not feeding.done()
        slow.holds = False
        slow.read_all()
        assert (await it.outcome("r1")).outcome == "completed"
        await feeding
        assert slow.texts("r1") == [str(n) for n in range(12)]
        await it.is_empty()
        await slow.connector.close()


async def test_a_chunk_that_a_stage_keeps_holds_its_slot_until_it_is_dropped(tmp_path: Path) -> None:
    class Keeper(Echo):
        kept: list[np.ndarray] = []

        async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            async for chunk in chunks:
                self.kept.append(chunk.tensors["text"])
            yield text_chunk("done")

    async with bench(tmp_path, Keeper) as it:
        it.ask()
        await it.feed("a", "b")
        assert (await it.outcome()).outcome == "completed"
        assert it.client.connector.stats().slots_in_use == 2
        Keeper.kept.clear()
        await it.is_empty()


@pytest.mark.parametrize("how", ["leaves", "is gone"])
async def test_a_client_that_goes_away_frees_everything_of_it(tmp_path: Path, how: str) -> None:
    async with bench(tmp_path, max_requests=2) as it:
        other: list[Any] = []
        second = await LaneClient.connect(it.lane.endpoint, "client/2", ToClient, other.append)
        second.send(Join("client/2"))
        await it.until(lambda: it.windows[-1] == 1)
        it.actor.on_clients(frozenset({"client/1", "client/2"}))
        for n in range(4):
            it.ask(f"r{n}")
        await it.feed("a", request_id="r0", end=False)
        await it.until(lambda: it.client.texts("r0"))
        if how == "leaves":
            it.work.send(Leave())
        else:
            it.actor.on_clients(frozenset({"client/2"}))
        await it.until(lambda: len(it.finished) == 4)
        assert {f.outcome for f in it.finished} == {"cancelled"}
        assert it.actor.admission.windows == {"client/2": 2}
        await it.is_empty()
        await second.close(linger_s=0)


async def test_a_table_older_than_a_client_does_not_end_its_requests(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(it.client.texts)
        it.actor.on_clients(frozenset())  # it was published before this client joined
        await it.feed("b")
        assert (await it.outcome()).outcome == "completed"
        assert it.actor.admission.windows == {"client/1": 2}


async def test_a_draining_replica_finishes_what_it_holds_and_refuses_more(tmp_path: Path) -> None:
    async with bench(tmp_path, max_requests=1) as it:
        it.ask("r1")
        it.ask("r2")
        await it.feed("a", request_id="r1", end=False)
        await it.until(lambda: it.client.texts("r1"))
        draining = asyncio.create_task(it.actor.drain(20))
        await asyncio.sleep(0)
        it.ask("r3")
        assert (await it.outcome("r3")).outcome == "refused"
        await it.feed(request_id="r1")
        await it.feed("b", request_id="r2")
        await draining
        assert [(await it.outcome(name)).outcome for name in ("r1", "r2")] == ["completed", "completed"]


async def test_a_drain_ends_what_does_not_end_in_time(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(it.client.texts)
        await it.actor.drain(0.01)
        finished = await it.outcome()
        assert (finished.outcome, finished.error) == ("cancelled", "stage s: cancelled (drain)")
        await it.is_empty()


async def test_a_work_of_a_known_id_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.ask()
        await it.feed("a", end=False)
        await it.until(it.client.texts)
        it.ask()
        assert (await it.outcome()).outcome == "refused"
        await it.feed("b")
        await it.until(lambda: len(it.finished) == 2)
        assert it.finished[1].outcome == "completed"
        await it.is_empty()


async def test_a_state_that_raises_does_not_stop_the_heartbeat(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.actor.stage.state = lambda: {"kv": 1 / 0}
        assert it.actor.state() == {"running": 0, "queued": 0, "max_requests": 2}
        it.actor.stage.state = lambda: {"kv": 0.5}
        assert it.actor.state()["kv"] == 0.5
