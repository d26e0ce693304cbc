"""Event streams: their bytes, and their pace."""

import asyncio

from gateway import sse
from gateway.streaming import paced


def test_an_event_is_one_data_line_and_a_blank_line():
    assert sse.data({"text": "a\nb\u2028c"}) == 'data: {"text":"a\\nb\u2028c"}\n\n'.encode()


def test_a_keepalive_is_one_comment_line_that_dispatches_nothing():
    assert sse.KEEPALIVE.startswith(b":")
    assert sse.KEEPALIVE.count(b"\n") == 1


def test_proxies_are_told_neither_to_buffer_nor_to_compress():
    assert sse.HEADERS["X-Accel-Buffering"] == "no"
    assert "no-transform" in sse.HEADERS["Cache-Control"]


async def test_silence_is_filled_until_the_next_item_comes():
    gate = asyncio.Event()

    async def items():
        yield 1
        await gate.wait()
        yield 2

    seen = []
    async for item in paced(items(), 0.01):
        seen.append(item)
        if item is None:
            gate.set()
    assert seen[0] == 1
    assert seen[-1] == 2
    assert None in seen


async def test_a_reader_that_stops_early_closes_the_source():
    closed = asyncio.Event()

    async def items():
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.set()

    stream = paced(items(), 60)
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.wait([waiting], timeout=0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    await stream.aclose()
    assert closed.is_set()
