"""What a client sees when a stage fails, before the first byte and after it."""

import asyncio
import json
import os
import signal

import aiohttp

CHAT = "/v1/chat/completions"


def asked(content, **more):
    return {"messages": [{"role": "user", "content": content}], **more}


async def until_ready(session):
    async with asyncio.timeout(20):
        while True:
            async with session.get("/ready") as response:
                if response.status == 200:
                    return


async def test_failures(crashing):
    """One pipeline for all: a start of processes costs seconds."""
    async with aiohttp.ClientSession(crashing.url) as session:
        await fails_before_the_first_byte(session)
        await comes_as_it_is_made(session)
        await says_that_it_is_broken(session)
        await serves_again(session, 1)
        await dies_in_mid_stream(session, crashing)
        await serves_again(session, 2)
        await is_left_by_its_client(session)


async def fails_before_the_first_byte(session):
    for stream in (False, True):
        async with session.post(CHAT, json=asked("raise", stream=stream)) as response:
            error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (500, "server_error", "stage_failed")


async def comes_as_it_is_made(session):
    """The stage says a word each 30 ms; a burst at the end would be over at once."""
    loop = asyncio.get_running_loop()
    began, times = loop.time(), []
    async with session.post(CHAT, json=asked("hello ", stream=True)) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                times.append(loop.time() - began)
                if len(times) == 20:
                    break
    assert times[0] < 1
    assert times[-1] - times[0] > 0.3


async def says_that_it_is_broken(session):
    """It would wait for ever; its process leaves, and another comes."""
    async with session.post(CHAT, json=asked("break")) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["message"]) == (500, "stage_failed", "stage crash: this stage was told to break")


async def dies_in_mid_stream(session, crashing):
    pid = next(replica.pid for replica in crashing.client.table.replicas if replica.stage == "crash")
    events = []
    async with session.post(CHAT, json=asked("hello ", stream=True)) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: "):
                events.append(line[6:])
                if len(events) == 3:
                    os.kill(pid, signal.SIGKILL)
                    deadline = asyncio.get_running_loop().time() + 2
    assert asyncio.get_running_loop().time() < deadline
    assert b"[DONE]" not in b"".join(events)
    assert json.loads(events[-1])["error"]["type"] == "server_error"


async def serves_again(session, restarts):
    async with asyncio.timeout(10), session.get("/api/pipeline/events") as response:
        async for line in response.content:  # once it was started again; until it is known to be gone it still counts as ready
            if line.startswith(b"data: ") and any(
                (r["stage"], r["state"], r["restarts"]) == ("crash", "ready", restarts) for r in json.loads(line[6:])["replicas"]
            ):
                break
    async with session.post(CHAT, json=asked("hello ", stream=True)) as response:
        assert response.status == 200


async def is_left_by_its_client(session):
    """The stream above was left in its middle: its request is cancelled, and the stages are idle again."""
    async with asyncio.timeout(10), session.get("/api/pipeline/events") as response:
        async for line in response.content:
            if line.startswith(b"data: ") and not any(replica["running"] for replica in json.loads(line[6:])["replicas"]):
                break
    async with session.get("/metrics") as response:
        assert 'streamrt_cancels_total{cause="disconnect"}' in await response.text()
