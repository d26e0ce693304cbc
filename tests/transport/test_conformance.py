"""What every connector promises (transport/connector.py), whatever carries the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.transport.conftest import Inbox, PeerProcess, chunk, settle
from transport.chunk import CARRIED_DTYPES
from transport.connector import Connector
from transport.errors import Broken, Closed, TooLarge
from transport.schemes import SCHEMES

Factory = Callable[..., Connector]


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connector_factory(scheme: str, connectors: Factory) -> Factory:
    """`make(name, **options)` of the scheme under test."""
    return lambda name, **options: connectors(scheme, name, **options)


@pytest.fixture(params=["shm", "tcp"])
def between_processes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def turns(count: int = 20) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---- bytes ----------------------------------------------------------------------------------------------------------------


async def test_chunks_of_a_request_arrive_in_order(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    sizes = [10, 20_000, 0, 300_000, 5_000]

    async def send_all() -> None:
        for seq in range(100):
            await outlet.send(*chunk("r", seq, np.full(sizes[seq % len(sizes)], seq, np.uint8)))

    sending = asyncio.create_task(send_all())
    for seq in range(100):
        header, arrays = await inbox.take()
        assert (header.seq, header.request_id) == (seq, "r")
        assert np.array_equal(arrays[0], np.full(sizes[seq % len(sizes)], seq, np.uint8))
    await sending


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 5), (1, 40_000)], ids=str)
async def test_every_dtype_and_shape_arrives_as_it_was(connector_factory: Factory, inbox: Inbox, shape: tuple[int, ...]) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    names = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
    names += ["float16", "float32", "float64", "complex64", "complex128"]
    dtypes = [np.dtype(name) for name in names]
    dtypes += [np.dtype(carrier, metadata={"carries": name}) for name, carrier in CARRIED_DTYPES.items() if name != "utf8"]
    for seq, dtype in enumerate(dtypes):
        sent = np.arange(int(np.prod(shape)), dtype=np.uint8).astype(dtype).reshape(shape)
        await outlet.send(*chunk("r", seq, sent))
        header, (got,) = await inbox.take()
        assert (got.dtype, got.shape) == (sent.dtype, shape)
        assert np.array_equal(got, sent)
        assert header.tensors[0].dtype == (dtype.metadata or {}).get("carries", dtype.name)


async def test_several_tensors_and_none_arrive_in_one_chunk(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    small = [np.arange(3, dtype=np.float32), np.zeros((0, 4), np.int64), np.arange(5, dtype=np.uint8)]
    large = [np.arange(30_000, dtype=np.float32), np.zeros((0, 4), np.int64), np.arange(50_000, dtype=np.int16).reshape(2, -1)]
    for seq, arrays in enumerate(([], small, large)):
        await outlet.send(*chunk("r", seq, *arrays))
        _, got = await inbox.take()
        assert len(got) == len(arrays)
        assert all(np.array_equal(a, b) for a, b in zip(got, arrays, strict=True))


async def test_what_the_producer_does_to_its_array_after_send_is_not_seen(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    for seq, size in enumerate((10, 100_000, 5_000_000)):
        array = np.ones(size, np.uint8)
        await outlet.send(*chunk("r", seq, array))
        array[:] = 2
        _, (got,) = await inbox.take()
        assert got.min() == got.max() == 1


async def test_arrived_arrays_are_read_only(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    for seq, size in enumerate((10, 100_000)):
        await outlet.send(*chunk("r", seq, np.ones(size, np.uint8)))
        lease = await inbox.leases.get()
        with pytest.raises(ValueError, match="read-only"):
            lease.arrays()[0][0] = 1
        lease.release()


async def test_a_header_that_does_not_describe_its_arrays_is_refused(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    header, _ = chunk("r", 0, np.zeros(10, np.uint8))
    for arrays in ([], [np.zeros(11, np.uint8)], [np.zeros(10, np.uint8)] * 2):
        with pytest.raises(ValueError, match="header"):
            await outlet.send(header, arrays)
    await outlet.send(header, [np.zeros(10, np.uint8)])
    assert (await inbox.take())[0] == header


async def test_two_thousand_chunks_of_eight_requests_arrive_intact(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    dice = random.Random(7)
    noise = np.random.default_rng(7).integers(0, 256, 200_000, dtype=np.uint8)
    plans = {f"r{i}": [(dice.randrange(100_000), int(10 ** dice.uniform(0, 5))) for _ in range(250)] for i in range(8)}

    async def produce(request_id: str) -> None:
        for seq, (start, size) in enumerate(plans[request_id]):
            await outlet.send(*chunk(request_id, seq, noise[start : start + size]))

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for request_id in plans:
            tasks.create_task(produce(request_id))
        arrived: dict[str, int] = defaultdict(int)
        held: list[object] = []
        for _ in range(2000):
            lease = await inbox.leases.get()
            start, size = plans[lease.header.request_id][lease.header.seq]
            assert lease.header.seq == arrived[lease.header.request_id]
            assert np.array_equal(lease.arrays()[0], noise[start : start + size])
            arrived[lease.header.request_id] += 1
            held.append(lease)
            if len(held) > 6:  # released late and out of order
                held.pop(dice.randrange(len(held))).release()
    for lease in held:
        lease.release()
    assert producer.stats().chunks_sent == consumer.stats().chunks_received == 2000
    assert producer.stats().bytes_sent == consumer.stats().bytes_received
    del held, lease
    await settle(lambda: producer.stats().slots_in_use == producer.stats().bytes_in_use == 0)


# ---- credit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 50_000])
async def test_a_full_window_stops_its_own_request_only(connector_factory: Factory, inbox: Inbox, size: int) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=2)
    outlet = await producer.dial(await inbox.open(consumer))
    array = np.zeros(size, np.uint8)
    await outlet.send(*chunk("slow", 0, array))
    await outlet.send(*chunk("slow", 1, array))
    third = asyncio.create_task(outlet.send(*chunk("slow", 2, array)))
    slow = [await inbox.leases.get() for _ in range(2)]
    for seq in range(10):
        await outlet.send(*chunk("fast", seq, array))
        assert (await inbox.take())[0].request_id == "fast"
    assert not third.done()
    slow[0].release()
    async with asyncio.timeout(5):
        await third
    assert (await inbox.take())[0].seq == 2
    assert producer.stats().credit_waits >= 1
    assert producer.stats().credit_wait_ns > 0


async def test_bytes_are_bounded_too_and_a_chunk_larger_than_the_window_goes_alone(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_bytes=100_000)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, np.zeros(300_000, np.uint8)))
    small = asyncio.create_task(outlet.send(*chunk("r", 1, np.zeros(10, np.uint8))))
    big = await inbox.leases.get()
    await turns()
    assert not small.done()
    big.release()
    async with asyncio.timeout(5):
        await small
    assert (await inbox.take())[0].seq == 1


async def test_sends_that_wait_keep_their_order(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    sends = []
    for seq, size in enumerate([10, 2_000_000, 10, 6_000_000, 10, 50_000]):
        sends.append(asyncio.create_task(outlet.send(*chunk("r", seq, np.zeros(size, np.uint8)))))
        await turns(1)
    async with asyncio.timeout(5):
        assert [(await inbox.take())[0].seq for _ in range(6)] == list(range(6))
        await asyncio.gather(*sends)


async def test_a_send_that_is_cancelled_while_it_waits_leaves_no_trace(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await outlet.send(*chunk("r", 1, np.zeros(50_000, np.uint8)))
    waiting = asyncio.create_task(outlet.send(*chunk("r", 1)))
    assert (await inbox.take())[0].seq == 0
    await waiting
    assert (await inbox.take())[0].seq == 1
    assert inbox.leases.empty()


async def test_credit_comes_back_when_the_last_view_dies(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    sent = np.arange(100_000, dtype=np.int32)
    await outlet.send(*chunk("r", 0, sent))
    lease = await inbox.leases.get()
    view = lease.arrays()[0][10:20]
    lease.release()
    lease.release()
    waiting = asyncio.create_task(outlet.send(*chunk("r", 1, np.zeros(100_000, np.int32))))
    del lease
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert np.array_equal(view, sent[10:20])
    threading.Thread(target=lambda owner: owner.clear(), args=([view],)).start()
    del view
    async with asyncio.timeout(5):
        await waiting
    assert (await inbox.take())[0].seq == 1


async def test_a_lease_that_is_dropped_unreleased_is_released(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    for seq, size in enumerate([10, 100_000, 10]):
        async with asyncio.timeout(5):
            await outlet.send(*chunk("r", seq, np.zeros(size, np.uint8)))
            lease = await inbox.leases.get()
        lease.arrays()
        del lease


async def test_arrays_of_a_released_lease_are_refused(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, np.zeros(100_000, np.uint8)))
    lease = await inbox.leases.get()
    lease.release()
    with pytest.raises(Closed):
        lease.arrays()


async def test_too_large_is_said_at_once(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", max_chunk_bytes=2**20)
    outlet = await producer.dial(await inbox.open(consumer))
    with pytest.raises(TooLarge, match="max_chunk_bytes"):
        await outlet.send(*chunk("r", 0, np.zeros(2**20 + 1, np.uint8)))
    await outlet.send(*chunk("r", 0, np.zeros(2**20, np.uint8)))
    assert (await inbox.take())[0].seq == 0


# ---- cancel ---------------------------------------------------------------------------------------------------------------


async def test_cancel_frees_waiting_senders_and_is_heard_once(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, np.zeros(50_000, np.uint8)))
    lease = await inbox.leases.get()
    waiting = [asyncio.create_task(outlet.send(*chunk("r", seq, np.zeros(50_000, np.uint8)))) for seq in (1, 2)]
    await turns()
    outlet.cancel("r", 0)
    outlet.cancel("r", 0)
    for task in waiting:
        with pytest.raises(Closed):
            await task
    with pytest.raises(Closed):
        await outlet.send(*chunk("r", 3))
    assert await inbox.cancelled.get() == ("r", 0)
    assert lease.arrays()[0].nbytes == 50_000  # what was delivered belongs to the consumer
    lease.release()
    await outlet.send(*chunk("other", 0))
    assert (await inbox.take())[0].request_id == "other"
    assert inbox.cancelled.empty()
    assert inbox.leases.empty()


async def test_an_unknown_request_can_be_cancelled_and_forgotten(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    outlet.forget("r")
    outlet.cancel("r", 2)
    outlet.forget("r")
    assert await inbox.cancelled.get() == ("r", 2)


async def test_a_newer_epoch_lives_on_after_a_cancel(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, epoch=0))
    outlet.cancel("r", 0)
    await outlet.send(*chunk("r", 0, epoch=1))
    assert [(await inbox.take())[0].epoch for _ in range(2)] == [0, 1]
    with pytest.raises(Closed):
        await outlet.send(*chunk("r", 1, epoch=0))


async def test_chunks_of_a_cancelled_request_are_released_unread(connector_factory: Factory, inbox: Inbox) -> None:
    consumer = connector_factory("consumer")
    first, second = connector_factory("first"), connector_factory("second", window_chunks=2)
    endpoint = await inbox.open(consumer)
    outlets = [await first.dial(endpoint), await second.dial(endpoint)]
    outlets[0].cancel("r", 0)
    await inbox.cancelled.get()
    async with asyncio.timeout(5):
        for seq in range(6):
            await outlets[1].send(*chunk("r", seq, np.zeros(50_000, np.uint8)))
    await settle(lambda: consumer.stats().dropped_stale == 6)
    await outlets[1].send(*chunk("other", 0))
    assert (await inbox.take())[0].request_id == "other"
    assert consumer.stats().chunks_received == 1


# ---- ends -----------------------------------------------------------------------------------------------------------------


async def test_dialing_twice_gives_the_same_outlet_and_after_close_a_new_one(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    endpoint = await inbox.open(consumer)
    outlet, same = await asyncio.gather(producer.dial(endpoint), producer.dial(endpoint))
    assert outlet is same
    assert outlet.endpoint == endpoint
    await outlet.send(*chunk("r", 0, np.full(100_000, 7, np.uint8)))
    await outlet.close()
    await outlet.close()
    with pytest.raises(Closed):
        await outlet.send(*chunk("r", 1))
    again = await producer.dial(endpoint)
    assert again is not outlet
    await again.send(*chunk("r", 1, np.full(100_000, 8, np.uint8)))
    arrived = [await inbox.take() for _ in range(2)]
    assert [int(arrays[0].max()) for _, arrays in arrived] == [7, 8]
    assert await inbox.lost.get() == "producer"


async def test_what_was_sent_stays_readable_after_the_outlet_is_closed(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, np.full(100_000, 7, np.uint8)))
    await outlet.close()
    lease = await inbox.leases.get()
    assert lease.peer == "producer"
    await inbox.lost.get()
    other = await producer.dial(outlet.endpoint)
    await other.send(*chunk("s", 0, np.full(100_000, 8, np.uint8)))
    assert lease.arrays()[0].max() == 7
    lease.release()


async def test_nobody_there_is_broken(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer")
    endpoint = await inbox.open(consumer)
    await consumer.close()
    await consumer.close()
    with pytest.raises(Broken):
        async with asyncio.timeout(10):
            await producer.dial(endpoint)


async def test_a_consumer_that_closes_breaks_the_sends_that_wait(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, np.full(100_000, 7, np.uint8)))
    lease = await inbox.leases.get()
    array = lease.arrays()[0]
    waiting = asyncio.create_task(outlet.send(*chunk("r", 1)))
    await turns()
    await consumer.close()
    with pytest.raises(Broken):
        await waiting
    with pytest.raises(Broken):
        await outlet.send(*chunk("s", 0))
    assert array.nbytes == 100_000
    assert int(array[-1]) == 7
    lease.release()


async def test_a_producer_that_closes_is_lost(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0))
    waiting = asyncio.create_task(outlet.send(*chunk("r", 1)))
    assert (await inbox.leases.get()).header.seq == 0
    await producer.close()
    with contextlib.suppress(Closed):  # the lease above died at once: it may just have gone
        await waiting
    async with asyncio.timeout(5):
        assert await inbox.lost.get() == "producer"
    with pytest.raises(Closed):
        await producer.dial(outlet.endpoint)


async def test_a_burst_into_a_busy_loop_is_delivered(connector_factory: Factory, inbox: Inbox) -> None:
    consumer, producer = connector_factory("consumer"), connector_factory("producer", window_chunks=1000)
    outlet = await producer.dial(await inbox.open(consumer))
    for seq in range(500):  # no turn of the loop in between, unless the connector needs one
        await outlet.send(*chunk("r", seq))
    async with asyncio.timeout(5):
        assert [(await inbox.take())[0].seq for _ in range(500)] == list(range(500))


# ---- death ----------------------------------------------------------------------------------------------------------------


async def test_a_killed_consumer_breaks_the_sends_that_wait(
    between_processes: str, connectors: Factory, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    producer = connectors(between_processes, "producer", window_chunks=2)
    peer = peer_process("hold", between_processes, str(tmp_path))
    outlet = await producer.dial(await peer.line())
    array = np.zeros(100_000, np.uint8)
    for seq in range(2):
        await outlet.send(*chunk("r", seq, array))
    waiting = asyncio.create_task(outlet.send(*chunk("r", 2, array)))
    await turns()
    peer.signal(signal.SIGKILL)
    with pytest.raises(Broken):
        async with asyncio.timeout(2):
            await waiting
    with pytest.raises(Broken):
        await outlet.send(*chunk("s", 0))
    assert producer.stats().slots_in_use == producer.stats().bytes_in_use == 0


async def test_a_killed_producer_is_lost_and_what_it_sent_stays(
    between_processes: str, connectors: Factory, inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    consumer = connectors(between_processes, "consumer")
    peer = peer_process("produce", between_processes, str(tmp_path), await inbox.open(consumer))
    assert await peer.line() == "sent"
    leases = [await inbox.leases.get() for _ in range(4)]
    early = leases[0].arrays()[0]
    peer.signal(signal.SIGKILL)
    async with asyncio.timeout(2):
        assert await inbox.lost.get() == "peer-produce"
    assert early.min() == early.max() == 0
    for seq, lease in enumerate(leases):
        assert np.array_equal(lease.arrays()[0], np.full(100_000, seq, np.uint8))
        lease.release()
    assert inbox.lost.empty()


async def test_chunks_survive_a_trip_through_another_process(
    between_processes: str, connectors: Factory, inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    mine = connectors(between_processes, "mine")
    peer = peer_process("echo", between_processes, str(tmp_path), await inbox.open(mine))
    outlet = await mine.dial(await peer.line())
    noise = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)
    dice = random.Random(3)
    cuts = [sorted(dice.sample(range(len(noise) if i % 10 == 0 else 30_000), 2)) for i in range(200)]

    async def send_all() -> None:
        for seq, (start, end) in enumerate(cuts):
            await outlet.send(*chunk("r", seq, noise[start:end]))

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all())
        for seq, (start, end) in enumerate(cuts):
            header, (got,) = await inbox.take()
            assert header.seq == seq
            assert np.array_equal(got, noise[start:end])
