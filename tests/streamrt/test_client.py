"""A client of a real run of scripted stages: every request ends once, at every point, and leaves nothing open."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from streamrt import (
    BadRequest,
    Call,
    Cancelled,
    Chunk,
    Client,
    Expired,
    Overloaded,
    StageFailed,
    Unavailable,
    UnknownTask,
    audio_chunk,
    event_chunk,
    text_chunk,
)
from streamrt.client import MAX_COPIED_BYTES
from tests.pipelines import Running, up
from transport.messages import Cancel, Table

# Text in; words and tones out. The reply is long enough to be interrupted anywhere.
SPEAKING = """
[pipeline]
name = "client"
[[stage]]
name = "llm"
use = "testing.llm"
[stage.args]
reply = "One two three, four five six, seven eight nine, ten eleven twelve. {text}"
delay_ms = 2
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[deploy.llm]
replicas = 2
max_requests = 8
[deploy.tts]
max_requests = 16
[run]
heartbeat_s = 0.2
"""

# Two at a time and two in line; two replicas of the listener, whose state lives in one of them.
NARROW = """
[pipeline]
name = "narrow"
[[stage]]
name = "slow"
use = "testing.slow"
[stage.args]
chunk_ms = 1
repeat = 400
[[stage]]
name = "vad"
use = "testing.vad"
[[stage]]
name = "camera"
use = "testing.video"
[deploy.slow]
max_requests = 2
[deploy.vad]
replicas = 2
[run]
max_queued_requests = 2
heartbeat_s = 0.2
"""


@pytest.fixture(scope="module")
def speaking() -> Iterator[Running]:
    with up(SPEAKING, gateway=False) as run:
        yield run


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    with up(NARROW, gateway=False) as run:
        yield run


@asynccontextmanager
async def joined(run: Running) -> AsyncIterator[Client]:
    client = await Client.connect(run.name)
    try:
        yield client
    finally:
        await client.close()


async def until(what: Callable[[], Any]) -> None:
    """Ask `what` until it is true: a Finished or a heartbeat changes it, and nothing tells of those."""
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.02)


async def everything_is_free(client: Client) -> None:
    """No replica runs or holds anything for anybody, as the client, the table and the metrics have it."""
    await until(lambda: not client._router.num_open and not client._router.num_waiting)
    await until(lambda: not any(row.info.get("running") or row.info.get("queued") for row in client.table.replicas))
    async with asyncio.timeout(30):
        while await held(client):
            await asyncio.sleep(0.1)
    assert not client._calls
    assert not client._waiting
    await until(lambda: not client._tasks)
    await until(lambda: all(connector.stats().slots_in_use == 0 for connector in client._connectors.values()))


async def held(client: Client) -> float:
    """Slots' bytes and requests, summed over all processes."""
    text = (await client.metrics_text()).decode()
    return sum(float(value) for value in re.findall(r"^streamrt_(?:ring_bytes_in_use|running_requests)\{.*\} (\S+)", text, re.MULTILINE))


async def test_a_stage_that_sends_has_its_memory_before_it_is_ready(speaking: Running) -> None:
    async with joined(speaking) as client:
        text = (await client.metrics_text()).decode()
        rings = re.findall(r'^streamrt_ring_bytes_total\{replica="(.)",stage="(.*)"\} (\S+)', text, re.MULTILINE)
        assert {(stage, replica) for replica, stage, size in rings if float(size) > 60e6} == {("llm", "0"), ("llm", "1"), ("tts", "0")}


async def test_a_request_gives_all_its_outputs_and_says_where_the_time_went(speaking: Running) -> None:
    async with joined(speaking) as client:
        call = await client.submit("respond", inputs=[text_chunk("Hello")])
        chunks = [chunk async for chunk in call]
        assert "".join(chunk.text for chunk in chunks if chunk.modality == "text").endswith("ten eleven twelve. Hello")
        assert sum(len(chunk.samples) for chunk in chunks if chunk.modality == "audio") > 24_000
        assert sorted((chunk.stage, chunk.port) for chunk in chunks if chunk.is_last) == [("llm", "text"), ("tts", "audio")]
        assert set(call.timings) == {"llm", "tts"}
        assert call.timings["llm"]["first_chunk_ms"] <= call.timings["llm"]["total_ms"]
        assert [chunk async for chunk in call] == []  # over is over
        call.cancel()
        assert call.error is None
        await everything_is_free(client)


async def test_what_a_client_gets_is_its_own(speaking: Running) -> None:
    async with joined(speaking) as client:
        call = await client.submit("respond", inputs=[text_chunk("Hello")], outputs={"audio"})
        sounds = [chunk.samples async for chunk in call if chunk.modality == "audio" and not chunk.is_last]
        assert all(samples.flags.owndata and samples.flags.writeable for samples in sounds)


async def test_outputs_narrow_the_way(speaking: Running) -> None:
    async with joined(speaking) as client:
        call = await client.submit("respond", inputs=[text_chunk("Hello")], outputs={"text"})
        assert {chunk.stage for chunk in [chunk async for chunk in call]} == {"llm"}
        assert set(call.timings) == {"llm"}
        with pytest.raises(BadRequest, match='got "image"'):
            await client.submit("respond", inputs=[text_chunk("Hello")], outputs={"image"})
        with pytest.raises(UnknownTask, match='got task "respnod"'):
            await client.submit("respnod")
        assert client.describe("tts")["sample_rate_hz"] == 24_000
        assert client.describe("nobody") == {}


async def test_input_may_be_fed_as_it_comes(speaking: Running) -> None:
    async with joined(speaking) as client:
        call = await client.submit("speak")
        await call.feed(text_chunk("First clause, "))
        first = await anext(aiter(call))
        assert first.meta["text"] == "First clause, "
        await call.feed(text_chunk("second clause."))
        await call.end()
        clauses = [chunk.meta["text"] async for chunk in call if chunk.meta.get("text")]
        assert clauses == ["second clause."]
        with pytest.raises(BadRequest, match="its input has ended"):
            await call.feed(text_chunk("more"))
        await everything_is_free(client)


async def test_a_feed_that_is_given_up_leaves_no_gap(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("respond")  # each chunk comes out 400 times, a millisecond apart: it reads slowly
        fed = 0
        async with asyncio.timeout(30):
            while True:
                try:
                    async with asyncio.timeout(0.05):
                        await call.feed(text_chunk(f"{fed}"))
                        fed += 1
                except TimeoutError:
                    break
        seen: set[str] = set()
        reading = aiter(call)
        async with asyncio.timeout(60):
            while "1" not in seen:
                seen.add((await anext(reading)).text)
        await call.feed(text_chunk("after"))
        call.cancel()
        assert seen == {"0", "1"}
        await everything_is_free(client)


async def test_a_cancel_ends_it_at_once_and_only_once(speaking: Running) -> None:
    async with joined(speaking) as client:
        call = await client.submit("respond", inputs=[text_chunk("Hello")])
        async for _ in call:
            break
        call.cancel("turn_detected")
        call.cancel("client")
        for _ in range(2):
            with pytest.raises(Cancelled, match="turn_detected") as raised:
                await anext(aiter(call))
            assert raised.value.cause == "turn_detected"
        with pytest.raises(Cancelled):
            await call.feed(text_chunk("late"))
        await everything_is_free(client)


async def test_a_hundred_cancels_at_random_points_leave_nothing_open(speaking: Running) -> None:
    await cancel_at_random_points(speaking, 100)


@pytest.mark.slow
async def test_a_thousand_cancels_at_random_points_leave_nothing_open(speaking: Running) -> None:
    await cancel_at_random_points(speaking, 1000)


async def cancel_at_random_points(run: Running, count: int) -> None:
    chance = random.Random(7)
    async with joined(run) as client:

        async def one(number: int) -> str:
            kind = chance.choice(["before it starts", "at once", "after some chunks", "by leaving"])
            asking = client.submit("respond", inputs=[text_chunk(f"Number {number}.")])
            if kind == "before it starts":
                task = asyncio.create_task(asking)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                task.cancel()
                done = (await asyncio.gather(task, return_exceptions=True))[0]
                if isinstance(done, Call):
                    done.cancel()
                return kind
            call = await asking
            left = 0 if kind == "at once" else chance.randrange(40)
            try:
                async for _ in call:
                    left -= 1
                    if left < 0:
                        if kind == "by leaving":
                            break
                        call.cancel()
            except Cancelled:
                pass
            call.cancel()
            return kind

        in_line = iter(range(count))

        async def worker() -> list[str]:
            return [await one(number) for number in in_line]

        async with asyncio.timeout(100):
            kinds = await asyncio.gather(*(worker() for _ in range(12)))
        assert sum(map(len, kinds)) == count
        await everything_is_free(client)
        assert "Number 0" in await (await client.submit("respond", inputs=[text_chunk("Number 0")])).text()


async def test_a_deadline_expires_it_whoever_is_slow(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("respond", inputs=[text_chunk("x")] * 20, timeout_s=0.3)
        with pytest.raises(Expired):
            async for _ in call:
                pass
        idle = await client.submit("respond", timeout_s=0.1)  # never fed
        with pytest.raises(Expired):
            await idle.text()
        await everything_is_free(client)


async def test_what_waits_goes_in_order_expires_or_is_too_much(narrow: Running) -> None:
    async with joined(narrow) as client:
        running = [await client.submit("respond", timeout_s=None) for _ in range(2)]
        third = asyncio.create_task(client.submit("respond"))
        hurried = asyncio.create_task(client.submit("respond", timeout_s=0.05))
        with pytest.raises(Expired, match="no replica became free before its deadline"):
            await hurried
        fourth = asyncio.create_task(client.submit("respond"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests wait already") as overloaded:
            await client.submit("respond")
        assert overloaded.value.retry_after_s > 0
        running[0].cancel()
        (await third).cancel()
        fourth.cancel()
        running[1].cancel()
        assert isinstance((await asyncio.gather(fourth, return_exceptions=True))[0], asyncio.CancelledError | Call)
        await everything_is_free(client)


async def test_affinity_insists_where_the_state_lives_in_a_replica(narrow: Running) -> None:
    async with joined(narrow) as client:
        calls = [await client.submit("listen", timeout_s=None, affinity=f"session-{n % 2}") for n in range(6)]
        served = [call._assignment.replicas["vad"].name for call in calls]
        assert served[0::2] == [served[0]] * 3
        assert served[1::2] == [served[1]] * 3
        assert served[0] != served[1]
        for call in calls:
            call.cancel()
        await everything_is_free(client)


async def test_a_listener_lives_without_a_deadline_and_hears_in_order(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("listen", timeout_s=None)
        loud, quiet = np.full(16_000, 0.5, np.float32), np.zeros(16_000, np.float32)
        await call.feed(event_chunk("configure", silence_duration_ms=200))
        await call.feed(audio_chunk(loud, 16_000))
        await call.feed(audio_chunk(quiet, 16_000))
        await call.end()
        events = [(chunk.event, chunk.meta["at_samples"]) async for chunk in call if not chunk.is_last]
        assert events == [("speech_started", 0), ("speech_paused", 16_000), ("speech_stopped", 16_000)]
        await everything_is_free(client)


async def test_two_clients_share_a_stage(narrow: Running) -> None:
    async with joined(narrow) as one, joined(narrow) as two:
        calls = []
        async with asyncio.timeout(30):
            for client in (one, two):
                calls.append(await client.submit("respond", inputs=[text_chunk("x")], timeout_s=None))
            assert [await anext(aiter(call)) for call in calls]
        one_more = asyncio.create_task(one.submit("respond", inputs=[text_chunk("y")]))
        await two.close()  # its credit goes to who is left
        with pytest.raises(Cancelled):
            await calls[1].text()
        (await one_more).cancel()
        calls[0].cancel()
        await everything_is_free(one)


async def test_a_slow_reader_holds_back_its_own_request_only(narrow: Running) -> None:
    async with joined(narrow) as client:
        slow = await client.submit("respond", inputs=[text_chunk("s")] * 3)  # 1200 chunks; 256 are held here, then 32 on the way
        quick = await client.submit("respond", inputs=[text_chunk("q")])
        assert await quick.text() == "q" * 400
        await until(lambda: len(slow._ready) > 256)
        assert len(slow._ready) <= 256 + 32
        assert await slow.text() == "s" * 1200
        await everything_is_free(client)


async def test_a_slow_reader_of_big_chunks_holds_few_of_them(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("video", {"size": "512x512", "num_frames": 240}, [], outputs={"video"})  # 180 MiB, 3 MiB a chunk
        await until(lambda: call._ready and not isinstance(call._ready[-1], Chunk))
        assert sum(chunk.tensors["frames"].nbytes for chunk in call._ready if isinstance(chunk, Chunk)) < MAX_COPIED_BYTES + (4 << 20)
        firsts = [chunk.meta["frame"] async for chunk in call if chunk.tensors]
    assert firsts == list(range(0, 240, 4))


async def test_an_id_that_is_open_already_is_refused(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("respond", request_id="mine")
        with pytest.raises(BadRequest, match="request mine is open already"):
            await client.submit("respond", request_id="mine")
        call.cancel()
        await everything_is_free(client)


@pytest.mark.parametrize("params", [{"x": object()}, {"x": 2**70}, {"x": "\ud800"}], ids=["type", "range", "half a character"])
async def test_params_that_can_not_be_sent_are_a_bad_request(narrow: Running, params: dict[str, Any]) -> None:
    async with joined(narrow) as client:
        with pytest.raises(BadRequest, match="params: they can not be sent"):
            await client.submit("respond", params, [text_chunk("x")])
        await everything_is_free(client)


async def test_input_that_can_not_be_sent_ends_the_request(narrow: Running) -> None:
    async with joined(narrow) as client:
        call = await client.submit("respond", inputs=[text_chunk("x", of=object())])
        with pytest.raises(BadRequest, match="its input can not be sent"):
            await call.text()
        await everything_is_free(client)


async def test_closing_ends_what_is_open_and_what_waits(narrow: Running) -> None:
    client = await Client.connect(narrow.name)
    open_calls = [await client.submit("respond", timeout_s=None) for _ in range(2)]
    waiting = asyncio.create_task(client.submit("respond", timeout_s=None))
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    for call in open_calls:
        with pytest.raises(Cancelled):
            await call.text()
    with pytest.raises(Unavailable, match="this client is closed"):
        await waiting
    with pytest.raises(Unavailable, match="this client is closed"):
        await client.submit("respond")
    async with joined(narrow) as other:
        await everything_is_free(other)


OWN = """
from streamrt import Stage, text_chunk

class First(Stage):
    gives = {"text": "text"}
    tasks = ("respond",)
    kept = []

    async def process(self, request, chunks):
        async for chunk in chunks:
            self.kept.append(chunk.tensors["text"])
            if len(self.kept) == 32:
                yield text_chunk("enough")
                return
"""


async def test_a_feed_that_waits_returns_when_the_stages_want_no_more(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "pipeline.toml"
    path.write_text('[pipeline]\nname = "own"\n[[stage]]\nname = "first"\nuse = "own:First"\n')
    with up(path, gateway=False) as run:
        async with joined(run) as client:
            call = await client.submit("respond", timeout_s=None)
            kept = text_chunk("x" * 8192)  # 32 of them, which the stage keeps, are all that one request may have out

            async def feed() -> None:
                for _ in range(40):
                    await call.feed(kept)
                await call.end()

            async with asyncio.timeout(30):
                _, text = await asyncio.gather(feed(), call.text())
            assert text == "enough"
            await until(lambda: not client._router.num_open)


async def test_a_request_that_one_stage_gives_up_ends_on_all(speaking: Running) -> None:
    async with joined(speaking) as client:
        await (await client.submit("respond", inputs=[text_chunk("Hello")])).text()  # every lane is up
        client._send(client._lanes["tts#0"], Cancel("mine", 0))
        call = await client.submit("respond", inputs=[text_chunk("Hello")], request_id="mine", timeout_s=None)
        with pytest.raises(Unavailable, match="gave up"):
            await call.text()
        await everything_is_free(client)


async def test_a_lost_stage_is_tried_again_or_said_and_a_cancel_ends_that_too() -> None:
    with up(NARROW.replace('name = "narrow"', 'name = "again"').replace("chunk_ms = 1", "chunk_ms = 60000"), gateway=False) as run:
        async with joined(run) as client:
            for is_cancelled in (True, False):
                call = await client.submit("respond", inputs=[text_chunk("x")], timeout_s=None)
                fed = await client.submit("respond", timeout_s=None)
                await fed.feed(text_chunk("x"))
                await until(lambda: client.table.replicas[0].info.get("running") == 2)
                run.kill("slow#0")
                await until(lambda call=call: call._retries == 1)
                if is_cancelled:
                    call.cancel()
                with pytest.raises((Cancelled, Unavailable) if is_cancelled else Unavailable):  # the cancel may come too late
                    await call.text()
                with pytest.raises(StageFailed, match="stage slow was lost"):
                    await fed.text()
                await until(lambda: client.is_ready("respond") and not client._router.num_open)
                assert not client._calls
                assert not client._waiting
                await until(lambda: not client._tasks)


@pytest.mark.slow
async def test_losing_a_stage_that_has_done_its_part_does_not_matter() -> None:
    slow_voice = SPEAKING.replace('name = "client"', 'name = "part"').replace(
        'inputs = ["llm"]', 'inputs = ["llm"]\n[stage.args]\npace = 0.5'
    )
    with up(slow_voice, gateway=False) as run:
        async with joined(run) as client:
            call = await client.submit("respond", inputs=[text_chunk("Hello")])
            reading = aiter(call)
            async for chunk in reading:
                if chunk.is_last:
                    break
            assert chunk.stage == "llm"
            await until(lambda: "llm" in call.timings)
            run.kill(call._assignment.replicas["llm"].name)
            assert [chunk.modality async for chunk in reading].count("audio") > 10
            assert call.error is None


async def test_a_client_that_leaves_while_a_stage_is_lost_leaves_no_socket_open(speaking: Running) -> None:
    others = _open_zmq_sockets()
    client = await Client.connect(speaking.name)
    await (await client.submit("respond", inputs=[text_chunk("x")], outputs={"text"})).text()
    ours = _open_zmq_sockets() - others
    client.member.on_table(Table(client.table.version + 1, ()))
    await client.close()
    assert ours
    assert not ours & _open_zmq_sockets()


async def test_losing_the_run_ends_everything() -> None:
    with up(NARROW.replace('name = "narrow"', 'name = "lost"'), gateway=False) as run:
        client = await Client.connect(run.name)
        called = [
            await client.submit("respond", timeout_s=None),
            await client.submit("respond", inputs=[text_chunk("x")] * 9, timeout_s=None),
        ]
        waiting = asyncio.create_task(client.submit("respond", timeout_s=None))
        await anext(aiter(called[1]))
        run.process.kill()
        async with asyncio.timeout(10):
            for call in called:
                with pytest.raises((Unavailable, StageFailed)):
                    await call.text()
            with pytest.raises(Unavailable):
                await waiting
            with pytest.raises(Unavailable):
                await client.submit("respond", timeout_s=None)
        await client.close()


def _open_zmq_sockets() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), zmq.Socket) and not thing.closed}
