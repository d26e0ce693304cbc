"""The engine host, driven by an engine that counts."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from streamrt.engine import MAX_FAILED_STEPS, MAX_UNREAD_FEEDS, EngineCall, EngineHost, EngineStage, Output
from streamrt.errors import BadRequest, Cancelled, StageFailed, Unavailable
from streamrt.stage import Context, Request
from transport.chunk import Chunk, Place, text_chunk


class Counter:
    """Counts to `params` for each request, one number per request and step; fed text comes back in the end's meta."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.fed: dict[str, str] = {}
        self.paused: set[str] = set()
        self.has_paused = threading.Event()
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.on_step: Callable[[], None] = lambda: None
        self.waits_for_end = False
        self.ended: set[str] = set()
        self.closed = 0

    def submit(self, request: Request, params: Any) -> None:
        if params is None:
            raise BadRequest("count to what?")
        self.left[request.id] = params
        self.fed[request.id] = ""

    def feed(self, request_id: str, chunk: Chunk) -> None:
        self.threads.add(threading.get_ident())
        if chunk.text == "bad":
            raise BadRequest("bad chunk")
        self.fed[request_id] += chunk.text

    def end(self, request_id: str) -> None:
        self.ended.add(request_id)

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))
        for mine in (self.left, self.fed):
            mine.pop(request_id, None)
        self.paused.discard(request_id)
        self.ended.discard(request_id)

    def pause(self, request_id: str) -> None:
        self.calls.append(("pause", request_id))
        self.paused.add(request_id)
        self.has_paused.set()

    def resume(self, request_id: str) -> None:
        self.calls.append(("resume", request_id))
        self.paused.discard(request_id)

    def _runnable(self) -> list[str]:
        return [r for r in self.left if r not in self.paused and (not self.waits_for_end or r in self.ended)]

    def has_work(self) -> bool:
        return bool(self._runnable())

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        self.on_step()
        outputs = []
        for request_id in self._runnable():
            if self.left[request_id] == 0:
                outputs.append(Output(request_id, finished=True, meta={"fed": self.fed[request_id]}))
                self.left.pop(request_id)
                self.fed.pop(request_id)
                self.ended.discard(request_id)
            else:
                outputs.append(Output(request_id, text_chunk(str(self.left[request_id]))))
                self.left[request_id] -= 1
        return outputs

    def close(self) -> None:
        self.closed += 1


def ask(name: str) -> Request:
    return Request(name, "respond")


async def read(call: EngineCall) -> list[str]:
    return [output.chunk.text async for output in call if output.chunk is not None]


@pytest.fixture
def engine() -> Counter:
    return Counter()


@pytest.fixture
async def host(engine: Counter) -> AsyncIterator[EngineHost]:
    pool = ThreadPoolExecutor(1)
    host = EngineHost(engine, pool, high=4, low=1)
    yield host
    host.close()
    await asyncio.to_thread(pool.shutdown)
    assert engine.closed == 1


@contextmanager
def held(host: EngineHost) -> Iterator[None]:
    """The compute thread stands still meanwhile, so that what is posted inside arrives together."""
    go = threading.Event()
    host.post(lambda: go.wait(5))
    yield
    go.set()


async def settle(host: EngineHost) -> None:
    """Everything that was posted has been applied, and the engine is out of work."""
    loop, done, has_work = asyncio.get_running_loop(), asyncio.Event(), True
    while has_work:
        done.clear()
        host.post(loop.call_soon_threadsafe, done.set)
        await done.wait()
        has_work = host.engine.has_work()


async def test_requests_advance_side_by_side_on_one_thread(host: EngineHost, engine: Counter) -> None:
    with held(host):
        a, b = host.submit(ask("a"), 3), host.submit(ask("b"), 3)
    assert await asyncio.gather(read(a), read(b)) == [["3", "2", "1"]] * 2
    assert host.steps == 4  # of both together
    assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads


async def test_the_end_comes_once_and_carries_its_meta(host: EngineHost, engine: Counter) -> None:
    engine.waits_for_end = True
    call = host.submit(ask("a"), 1)
    await call.feed(text_chunk("x"))
    await call.feed(text_chunk("y"))
    call.end()
    outputs = [output async for output in call]
    assert [output.finished for output in outputs] == [False, True]
    assert outputs[-1].meta == {"fed": "xy"}
    assert [output async for output in call] == []


async def test_an_engine_without_work_takes_no_turns(host: EngineHost) -> None:
    await read(host.submit(ask("a"), 2))
    await settle(host)
    steps = host.steps
    await settle(host)
    assert host.steps == steps


async def test_a_request_that_is_not_read_is_paused_and_the_others_go_on(host: EngineHost, engine: Counter) -> None:
    slow = host.submit(ask("slow"), 10)
    assert len(await read(host.submit(ask("fast"), 20))) == 20
    await settle(host)
    assert engine.left["slow"] == 6 and engine.paused == {"slow"}  # high = 4
    assert await read(slow) == [str(n) for n in range(10, 0, -1)]
    assert ("resume", "slow") in engine.calls


async def test_a_step_never_waits_for_a_blocked_loop(host: EngineHost, engine: Counter) -> None:
    call = host.submit(ask("a"), 100)
    assert engine.has_paused.wait(5)  # blocks the loop on purpose: nothing is delivered meanwhile
    assert engine.left["a"] == 96
    assert len(await read(call)) == 100


async def test_cancel_in_mid_step_ends_the_reader_and_nothing_follows(host: EngineHost, engine: Counter) -> None:
    in_step, go = threading.Event(), threading.Event()

    def stand() -> None:
        in_step.set()
        assert go.wait(5)

    engine.on_step = stand
    call = host.submit(ask("a"), 100)
    await asyncio.to_thread(in_step.wait, 5)
    call.cancel()
    assert [output async for output in call] == []  # though the step still runs
    go.set()
    await settle(host)
    assert engine.calls == [("cancel", "a")] and host.running == 0
    call.cancel()
    await settle(host)
    assert engine.calls == [("cancel", "a")]


async def test_what_submit_or_feed_raises_fails_that_request_alone(host: EngineHost, engine: Counter) -> None:
    engine.waits_for_end = True
    good, bad, none = host.submit(ask("good"), 1), host.submit(ask("bad"), 1), host.submit(ask("none"))
    await bad.feed(text_chunk("bad"))
    with pytest.raises(BadRequest, match="bad chunk"):
        await read(bad)
    with pytest.raises(BadRequest, match="to what"):
        await read(none)
    good.end()
    assert await read(good) == ["1"]
    await bad.feed(text_chunk("dropped"))
    assert host.running == 0


async def test_feeding_waits_when_the_compute_thread_is_behind(host: EngineHost, engine: Counter) -> None:
    engine.waits_for_end = True
    call = host.submit(ask("a"), 0)
    with held(host):
        for _ in range(MAX_UNREAD_FEEDS):
            await call.feed(text_chunk("."))
        late = asyncio.create_task(call.feed(text_chunk("!")))
        await asyncio.sleep(0)
        assert not late.done()
    await late
    call.end()
    assert [output.meta["fed"] async for output in call] == ["." * MAX_UNREAD_FEEDS + "!"]


async def test_a_step_that_raises_fails_all_requests_and_the_next_ones_work(host: EngineHost, engine: Counter) -> None:
    def explode() -> None:
        engine.on_step = lambda: None
        raise ZeroDivisionError("boom")

    engine.on_step = explode
    with held(host):
        calls = [host.submit(ask(name), 3) for name in "ab"]
    for call in calls:
        with pytest.raises(StageFailed, match="boom"):
            await read(call)
    assert engine.left == {}
    assert await read(host.submit(ask("c"), 1)) == ["1"]


async def test_an_engine_that_keeps_failing_is_given_up(engine: Counter) -> None:
    said: list[str] = []
    host = EngineHost(engine, on_broken=said.append)

    def explode() -> None:
        raise ZeroDivisionError("boom")

    engine.on_step = explode
    for n in range(MAX_FAILED_STEPS):
        with pytest.raises(StageFailed):
            await read(host.submit(ask(str(n)), 1))
    with pytest.raises(Unavailable, match="boom"):
        await read(host.submit(ask("last"), 1))
    assert len(said) == 1
    host.close()


async def test_close_ends_every_call_and_refuses_new_ones(engine: Counter) -> None:
    engine.waits_for_end = True
    host = EngineHost(engine)
    calls = [host.submit(ask(name), 3) for name in "ab"]
    host.close()
    host.close()
    for call in calls:
        with pytest.raises(Unavailable):
            await read(call)
    with pytest.raises(Unavailable):
        host.submit(ask("c"), 1)
    assert engine.closed == 1


async def test_close_works_on_the_compute_thread_and_after_the_pool_is_gone(engine: Counter) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = EngineHost(engine, pool)
        call = host.submit(ask("a"), 10_000_000)
        await asyncio.get_running_loop().run_in_executor(pool, host.close)
        with pytest.raises(Unavailable):
            await read(call)
    other = EngineHost(Counter(), pool)
    other.close()
    assert other.engine.closed == 1


async def test_a_retry_takes_the_place_of_its_first_try(host: EngineHost, engine: Counter) -> None:
    engine.waits_for_end = True
    first = host.submit(ask("a"), 1)
    second = host.submit(ask("a"), 2)
    with pytest.raises(Cancelled):
        await read(first)
    second.end()
    assert await read(second) == ["2", "1"]


async def test_a_thousand_cancels_at_random_points_leave_nothing(host: EngineHost, engine: Counter) -> None:
    dice = random.Random(7)

    async def one(n: int) -> None:
        call = host.submit(ask(str(n)), dice.randrange(12))
        stop_after = dice.randrange(8)
        if dice.random() < 0.3:
            await call.feed(text_chunk("x"))
        if stop_after:
            async for _ in call:
                stop_after -= 1
                if stop_after == 0:
                    break
        call.cancel()

    for start in range(0, 1000, 50):
        await asyncio.gather(*(one(n) for n in range(start, start + 50)))
    await settle(host)
    assert (engine.left, engine.fed, engine.paused, host.running) == ({}, {}, set(), 0)
    assert await read(host.submit(ask("after"), 2)) == ["2", "1"]


class CounterStage(EngineStage):
    def make_engine(self) -> Counter:
        return Counter()

    def parse(self, request: Request) -> int:
        return request.param("to", 3)


@pytest.fixture
async def stage() -> AsyncIterator[CounterStage]:
    stage = CounterStage(None, Context(stage="count"))
    await asyncio.to_thread(stage.load)
    yield stage
    stage.close()


async def stream(*texts: str) -> AsyncIterator[Chunk]:
    for text in texts:
        yield text_chunk(text)


async def test_an_engine_stage_feeds_its_input_and_ends_with_the_meta(stage: CounterStage) -> None:
    stage.host.engine.waits_for_end = True
    chunks = [chunk async for chunk in stage.process(ask("a"), stream("x", "y"))]
    assert [chunk.text for chunk in chunks] == ["3", "2", "1", ""]
    assert chunks[-1].place == Place.EMPTY_FINAL and chunks[-1].meta == {"fed": "xy"}


async def test_an_engine_stage_that_is_cancelled_cancels_in_the_engine_and_lets_its_input_go(stage: CounterStage) -> None:
    input_gone = asyncio.Event()

    async def endless() -> AsyncIterator[Chunk]:
        try:
            await asyncio.Event().wait()
            yield text_chunk("never")
        finally:
            input_gone.set()

    async def run() -> None:
        async for chunk in stage.process(Request("a", "respond", {"to": 10**9}), endless()):
            started.set_result(chunk.text)
            await asyncio.Event().wait()

    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run())
    await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(input_gone.wait(), 5)
    await settle(stage.host)
    assert stage.host.running == 0


async def test_input_that_fails_fails_the_request(stage: CounterStage) -> None:
    async def broken() -> AsyncIterator[Chunk]:
        yield text_chunk("x")
        raise StageFailed("upstream is gone")

    stage.host.engine.waits_for_end = True
    with pytest.raises(StageFailed, match="upstream"):
        async for _ in stage.process(ask("a"), broken()):
            pass
    await settle(stage.host)
    assert stage.host.running == 0
