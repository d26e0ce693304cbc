"""What the connectors in private memory add to the promises of test_conformance.py, and the credit under them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.transport.conftest import Inbox, chunk
from transport.chunk import ChunkHeader
from transport.connector import ConnectorOptions, ConnectorStats
from transport.credit import Windows
from transport.errors import Broken, Closed
from transport.memory import MemoryConnector


def header(request_id: str = "r", epoch: int = 0) -> ChunkHeader:
    return ChunkHeader(request_id, epoch, "s", "p", 0, "event")


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_big_send_that_is_cancelled_while_it_is_copied_is_never_seen(connectors, inbox: Inbox) -> None:
    producer, consumer = connectors("memory", "producer", window_chunks=1), connectors("memory", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    sending = asyncio.create_task(outlet.send(*chunk("r", 0, np.zeros(2**25, np.uint8))))
    await turns()
    sending.cancel()
    await asyncio.wait((sending,))
    assert producer.stats().slots_in_use == 0
    await outlet.send(*chunk("r", 0))
    assert (await inbox.take())[0].tensors == ()
    assert inbox.leases.empty()


async def test_a_request_that_ends_while_its_chunk_is_copied_is_closed(connectors, inbox: Inbox) -> None:
    producer, consumer = connectors("memory", "producer"), connectors("memory", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    sending = asyncio.create_task(outlet.send(*chunk("r", 0, np.zeros(2**25, np.uint8))))
    await turns()
    outlet.cancel("r", 0)
    with pytest.raises(Closed, match="r was cancelled"):
        await sending
    await turns()
    assert inbox.leases.empty()
    assert producer.stats().slots_in_use == 0


async def test_callbacks_run_after_the_call_that_caused_them(connectors, inbox: Inbox) -> None:
    producer, consumer = connectors("memory", "producer"), connectors("memory", "consumer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0))
    outlet.cancel("r", 0)
    assert inbox.leases.empty()
    assert inbox.cancelled.empty()
    await turns()
    assert inbox.leases.qsize() == inbox.cancelled.qsize() == 1


async def test_connectors_are_found_by_endpoint_only() -> None:
    one, two = MemoryConnector("same", ConnectorOptions()), MemoryConnector("same", ConnectorOptions())
    endpoints = [await Inbox().open(one), await Inbox().open(two)]
    assert endpoints[0] != endpoints[1]
    assert (await one.dial(endpoints[1])).endpoint == endpoints[1]
    with pytest.raises(Broken, match="memory:nowhere: nobody listens there"):
        await one.dial("memory:nowhere")
    await one.close()
    await two.close()


async def test_what_is_known_of_ended_requests_does_not_grow() -> None:
    stats = ConnectorStats()
    windows = Windows(ConnectorOptions(), stats)
    for i in range(5000):
        loan = await windows.take(header(f"r{i}"), 10)
        loan.sent()
        loan.give_back()
        loan.give_back()
        windows.cancel(f"r{i}", 0)
    assert len(windows._windows) == len(windows._loans) == stats.slots_in_use == stats.bytes_in_use == 0
    assert len(windows._over.epochs) <= 4096
    windows.forget("r4999")
    (await windows.take(header("r4999"), 0)).give_back()


async def test_a_later_epoch_ends_the_sends_of_the_earlier_one_and_has_its_own_window() -> None:
    windows = Windows(ConnectorOptions(window_chunks=1), ConnectorStats())
    old = await windows.take(header(), 1)
    old.sent()
    waiting = asyncio.create_task(windows.take(header(), 1))
    await turns()
    new = await windows.take(header(epoch=1), 1)
    with pytest.raises(Closed, match="in epoch 1 now"):
        await waiting
    with pytest.raises(Closed, match="in epoch 1, this chunk is of 0"):
        await windows.take(header(), 1)
    with pytest.raises(Closed, match="in epoch 1 now"):
        old.check()
    new.check()
    old.give_back()
    new.give_back()
    assert not windows._windows


async def test_the_end_of_a_channel_gives_every_loan_back_and_fails_who_waits() -> None:
    stats = ConnectorStats()
    windows = Windows(ConnectorOptions(window_chunks=1), stats)
    held = await windows.take(header(), 7)
    waiting = asyncio.create_task(windows.take(header(), 1))
    await turns()
    windows.end(Broken("gone"))
    windows.end(Closed("not the first reason"))
    with pytest.raises(Broken, match="gone"):
        await waiting
    with pytest.raises(Broken, match="gone"):
        await windows.take(header("other"), 1)
    held.give_back()
    assert stats.slots_in_use == stats.bytes_in_use == 0
