"""The lanes, over real sockets and, where an end must die, between real processes."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time

import msgspec
import pytest
import zmq

from transport.errors import Broken, Closed, TooLarge, WouldBlock
from transport.lanes import MAX_MESSAGE_BYTES, CurveKeys, LaneClient, LaneServer
from transport.messages import Cancel, Finished, Join, ToClient, ToReplica, Window


class Inbox:
    """What a lane has delivered, and a way to wait for the next one."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def __call__(self, *message):
        self.queue.put_nowait(message if len(message) > 1 else message[0])

    async def get(self, n=None):
        async with asyncio.timeout(5):
            return await self.queue.get() if n is None else [await self.queue.get() for _ in range(n)]


@pytest.fixture
async def lanes():
    """`server(endpoint)` and `client(endpoint, name)` make lanes with an `.inbox`; all are closed at the end."""
    made = []

    class Make:
        async def server(self, endpoint, **options):
            inbox = Inbox()
            lane = await LaneServer.bind(endpoint, ToReplica, inbox, **options)
            lane.inbox = inbox
            made.append(lane)
            return lane

        async def client(self, endpoint, name="c", **options):
            inbox = Inbox()
            lane = await LaneClient.connect(endpoint, name, ToClient, inbox, **options)
            lane.inbox = inbox
            made.append(lane)
            return lane

    yield Make()
    for lane in made:
        await lane.close(linger_s=0)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request, tmp_path):
    return f"ipc://{tmp_path}/lane.sock" if request.param == "ipc" else "tcp://127.0.0.1:*"


async def greet(client, server):
    """Let the server know the client."""
    client.send(Join("hello"))
    return await server.inbox.get()


async def test_messages_go_both_ways_by_name(lanes, endpoint):
    server = await lanes.server(endpoint)
    client = await lanes.client(server.endpoint, "client-1")
    assert await greet(client, server) == ("client-1", Join("hello"))
    server.send("client-1", Window(3, "i1"))
    assert await client.inbox.get() == Window(3, "i1")


async def test_a_burst_into_a_busy_loop_arrives_whole_without_further_traffic(lanes, endpoint):
    server = await lanes.server(endpoint)
    code = (
        "import sys, zmq, msgspec\n"
        "from transport.messages import Cancel\n"
        "s = zmq.Context().socket(zmq.DEALER); s.connect(sys.argv[1])\n"
        "for i in range(100): s.send(msgspec.msgpack.encode(Cancel(str(i), 0)))\n"
        "print('sent', flush=True); sys.stdin.readline(); s.close(0)"
    )
    burst = subprocess.Popen([sys.executable, "-c", code, server.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with burst:
        assert burst.stdout.readline() == "sent\n"  # blocks the loop: it is busy while the burst comes in
        time.sleep(0.2)
        got = await server.inbox.get(100)
        burst.stdin.write("\n")
    assert [message.request_id for _, message in got] == [str(i) for i in range(100)]


async def test_a_send_does_not_swallow_the_edge_of_a_message_that_came_in(lanes, endpoint):
    server = await lanes.server(endpoint)
    client = await lanes.client(server.endpoint)
    await greet(client, server)
    for i in range(200):  # each side sends as the other's message lands
        server.send("c", Window(i + 1, ""))
        client.send(Cancel(str(i), 0))
        assert (await client.inbox.get()).max_requests == i + 1
        assert (await server.inbox.get())[1].request_id == str(i)


async def test_a_flood_leaves_turns_of_the_loop_to_others(lanes, endpoint):
    server = await lanes.server(endpoint, high_water=5000)
    client = await lanes.client(server.endpoint, high_water=5000)
    await greet(client, server)
    loop, seen_at_turn = asyncio.get_running_loop(), []
    for i in range(1000):
        client.send(Cancel(str(i), 0))
    client.send(Join("last"))
    time.sleep(0.1)

    def turn():
        seen_at_turn.append(server.inbox.queue.qsize())
        if len(seen_at_turn) < 200:
            loop.call_soon(turn)

    turn()
    await server.inbox.get(1001)
    assert max(b - a for a, b in zip(seen_at_turn, seen_at_turn[1:], strict=False)) <= 128  # 64, by the reader and by call_soon


async def test_a_restarted_client_of_the_same_name_takes_over(lanes, endpoint):
    server = await lanes.server(endpoint)
    old = await lanes.client(server.endpoint, "same")
    await greet(old, server)
    new = await lanes.client(server.endpoint, "same")
    await greet(new, server)
    server.send("same", Window(1, "for the new one"))
    assert (await new.inbox.get()).incarnation == "for the new one"
    assert old.inbox.queue.empty()


async def test_a_restarted_server_is_found_again(lanes, endpoint):
    first = await lanes.server(endpoint)
    client = await lanes.client(first.endpoint)
    await greet(client, first)
    await first.close()
    client.send(Join("while away"))
    second = await lanes.server(first.endpoint)
    assert (await second.inbox.get())[1].client_id == "while away"
    second.send("c", Window(1, "i2"))
    assert await client.inbox.get() == Window(1, "i2")


async def test_a_client_may_connect_before_its_server_is_there(lanes, tmp_path):
    client = await lanes.client(f"ipc://{tmp_path}/later.sock")
    client.send(Join("early"))
    server = await lanes.server(f"ipc://{tmp_path}/later.sock")
    assert (await server.inbox.get())[1].client_id == "early"


GARBAGE = {
    "not msgpack": b"\xc1garbage",
    "empty": b"",
    "cut short": msgspec.msgpack.encode(Join("x"))[:-1],
    "unknown tag": msgspec.msgpack.encode({"type": "no_such_message"}),
    "other side's message": msgspec.msgpack.encode(Finished("r", 0, "completed")),
    "wrong type": msgspec.msgpack.encode({"type": "join", "client_id": 7}),
    "bad utf-8": b"\x82\xa4type\xa4join\xa9client_id\xa2\xff\xfe",
    "very deep": b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 200_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_logged_with_its_sender_and_dropped(lanes, endpoint, caplog, data):
    server = await lanes.server(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as vandal:
        vandal.linger = 0
        vandal.routing_id = b"vandal"
        vandal.connect(server.endpoint)
        vandal.send(data)
        vandal.send_multipart([data, data])
        vandal.send(msgspec.msgpack.encode(Join("still here")))
        assert await server.inbox.get() == ("vandal", Join("still here"))
    assert [record.message.startswith("lane.undecodable peer='vandal'") for record in caplog.records] == [True, True]


async def test_a_message_over_the_limit_costs_its_sender_the_connection_only(lanes, endpoint):
    server = await lanes.server(endpoint)
    client = await lanes.client(server.endpoint)
    with pytest.raises(TooLarge):
        client.send(Join("x" * MAX_MESSAGE_BYTES))
    with zmq.Context() as context, context.socket(zmq.DEALER) as vandal:
        vandal.linger = 0
        vandal.connect(server.endpoint)
        vandal.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert await greet(client, server) == ("c", Join("hello"))


async def test_a_callback_that_raises_does_not_end_the_lane(lanes, tmp_path, caplog):
    seen = asyncio.Queue()

    def on_message(peer, message):
        seen.put_nowait(message)
        raise RuntimeError("callback")

    server = await LaneServer.bind(f"ipc://{tmp_path}/x.sock", ToReplica, on_message)
    client = await lanes.client(server.endpoint)
    client.send(Join("a"))
    client.send(Join("b"))
    async with asyncio.timeout(5):
        assert [(await seen.get()).client_id, (await seen.get()).client_id] == ["a", "b"]
    assert "callback" in caplog.text
    await server.close()


async def test_an_unknown_peer_is_broken(lanes, endpoint):
    server = await lanes.server(endpoint)
    with pytest.raises(Broken, match="no peer 'nobody'"):
        server.send("nobody", Window(1, ""))


async def test_a_killed_peer_becomes_broken(lanes, endpoint):
    server = await lanes.server(endpoint)
    code = (
        "import sys, zmq, msgspec, signal\n"
        "from transport.messages import Join\n"
        "s = zmq.Context().socket(zmq.DEALER); s.routing_id = b'doomed'; s.connect(sys.argv[1])\n"
        "s.send(msgspec.msgpack.encode(Join('x'))); signal.pause()"
    )
    peer = subprocess.Popen([sys.executable, "-c", code, server.endpoint])
    assert (await server.inbox.get())[0] == "doomed"
    peer.kill()
    peer.wait()

    async def send_until_it_fails():
        while True:
            server.send("doomed", Window(1, ""))
            await asyncio.sleep(0)

    async with asyncio.timeout(2):
        with pytest.raises(Broken):
            await send_until_it_fails()


async def test_a_full_queue_would_block_and_nothing_waits(lanes, endpoint):
    server = await lanes.server(endpoint, high_water=10)
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.routing_id = b"deaf"
        deaf.connect(server.endpoint)
        deaf.send(msgspec.msgpack.encode(Join("x")))
        await server.inbox.get()
        assert sends_before_it_would_block(lambda: server.send("deaf", Window(1, "x" * 100_000))) < 1000
    absent = await lanes.client("ipc:///nowhere.sock", high_water=10)
    assert sends_before_it_would_block(lambda: absent.send(Join("x"))) == 10


def sends_before_it_would_block(send):
    for n in range(1000):
        try:
            send()
        except WouldBlock:
            return n
    return 1000


async def test_close_sends_what_is_queued_and_takes_the_socket_file_away(lanes, tmp_path):
    path = tmp_path / "lane.sock"
    server = await lanes.server(f"ipc://{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    client = await lanes.client(server.endpoint)
    for i in range(500):
        client.send(Cancel(str(i), 0))
    await client.close()
    assert len(await server.inbox.get(500)) == 500
    await server.close()
    await server.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Closed):
        client.send(Join("x"))


async def test_close_with_an_unreachable_peer_ends_within_the_linger(lanes):
    client = await lanes.client("tcp://127.0.0.1:9")
    client.send(Join("x"))
    start = time.monotonic()
    await client.close(linger_s=0.3)
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize("end", ["await lane.close()", "pass"], ids=["closed", "not closed"])
def test_a_process_with_an_unreachable_peer_exits_within_two_seconds(end):
    code = f"""
import asyncio, time
from transport.lanes import LaneClient
from transport.messages import Join, ToClient
async def main():
    lane = await LaneClient.connect("tcp://127.0.0.1:9", "c", ToClient, print)
    lane.send(Join("x"))
    {end}
asyncio.run(main())
print(time.monotonic())
"""
    exited = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    assert (exited.returncode, exited.stderr) == (0, "")
    assert time.monotonic() - float(exited.stdout) < 2  # nothing holds the interpreter's exit up


async def test_a_living_server_keeps_its_endpoint_and_a_dead_ones_file_is_reused(lanes, tmp_path):
    server = await lanes.server(f"ipc://{tmp_path}/lane.sock")
    with pytest.raises(OSError, match="listens there already"):
        await lanes.server(server.endpoint)
    client = await lanes.client(server.endpoint)
    await greet(client, server)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/stale.sock")
    await lanes.server(f"ipc://{tmp_path}/stale.sock")


async def test_endpoints_that_can_not_be_are_named(lanes, tmp_path):
    with pytest.raises(OSError, match="no-such-folder"):
        await lanes.server(f"ipc://{tmp_path}/no-such-folder/x.sock")
    with pytest.raises(OSError, match="x{200}"):
        await lanes.server(f"ipc://{tmp_path}/{'x' * 200}.sock")
    with pytest.raises(ValueError, match="lane name"):
        await lanes.client("tcp://127.0.0.1:9", "")
    with pytest.raises(ValueError, match="gopher"):
        await lanes.client("gopher://x")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5000", "tcp://[::]:*", "tcp://host.example:1"])
async def test_tcp_beyond_loopback_needs_keys(lanes, address):
    with pytest.raises(ValueError, match="got no CURVE keys"):
        await lanes.server(address)
    with pytest.raises(ValueError, match="got no CURVE keys"):
        await lanes.client(address.replace("*", "1"))


async def test_curve_admits_only_who_has_the_keys(lanes):
    keys = CurveKeys.generate()
    server = await lanes.server("tcp://0.0.0.0:*", curve=keys)
    reachable = server.endpoint.replace("0.0.0.0", "127.0.0.1")
    stranger = await lanes.client(reachable, "stranger", curve=CurveKeys.generate())
    plain = await lanes.client(reachable, "plain")
    for intruder in (stranger, plain):
        intruder.send(Join("let me in"))
    member = await lanes.client(reachable, "member", curve=keys)
    assert await greet(member, server) == ("member", Join("hello"))
    assert server.inbox.queue.empty()


async def test_idle_lanes_cost_no_cpu(lanes, endpoint):
    server = await lanes.server(endpoint)
    client = await lanes.client(server.endpoint)
    await greet(client, server)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1)  # the time that is measured
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.01


async def test_lanes_leave_no_file_descriptor_behind(lanes, endpoint):
    async def once():
        server = await lanes.server(endpoint)
        client = await lanes.client(server.endpoint)
        await greet(client, server)
        await client.close()
        await server.close()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await once()
    assert len(os.listdir("/proc/self/fd")) < before + 10  # the last of them close in ZeroMQ's own threads
