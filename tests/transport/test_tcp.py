"""What the TCP connector adds to the promises of test_conformance.py: strangers, keys, and the end of connections."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from tests.transport.conftest import Inbox, PeerProcess, chunk
from transport import tcp
from transport.connector import ConnectorOptions
from transport.errors import Broken, ProtocolError
from transport.tcp import Data, Hello, TcpConnector
from transport.zeromq import CurveKeys

Make = Callable[..., TcpConnector]


@pytest.fixture
async def tcps() -> AsyncIterator[Make]:
    """`make(name, **arguments)` of TcpConnector; all are closed at the end."""
    made: list[TcpConnector] = []

    def make(name: str, options: ConnectorOptions | None = None, **arguments: object) -> TcpConnector:
        made.append(TcpConnector(name, options or ConnectorOptions(), **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for connector in made:
        await connector.close()


class Stranger:
    """A bare ZeroMQ socket that may say anything."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(endpoint)

    def say(self, *frames: object) -> None:
        self._socket.send_multipart([frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames])

    def leave(self) -> None:
        self._socket.close()
        self._context.term()


async def passes(outlet: tcp.TcpOutlet, inbox: Inbox) -> bool:
    """A chunk goes through."""
    await outlet.send(*chunk("probe", 0))
    async with asyncio.timeout(5):
        return (await inbox.take())[0].request_id == "probe"


# ---- strangers ------------------------------------------------------------------------------------------------------------


async def test_a_wrong_token_is_refused_and_says_so(tcps: Make, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = await inbox.open(tcps("consumer", token="right"))
    for token in ("wrong", ""):
        with pytest.raises(ProtocolError, match="refused us: wrong token"):
            await tcps("intruder", token=token).dial(endpoint)
    assert "tcp.refused peer='intruder' reason=wrong token" in caplog.text
    assert await passes(await tcps("producer", token="right").dial(endpoint), inbox)
    assert inbox.lost.empty()


async def test_nothing_is_heard_before_a_right_hello(tcps: Make, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = await inbox.open(tcps("consumer", token="right"))
    stranger = Stranger(endpoint)
    (header, _) = chunk("r", 0)
    stranger.say(Data(0, header), b"")
    stranger.say(tcp.Cancel("r", 0))
    stranger.say(Hello(tcp.VERSION + 1, "stranger", "right"))
    stranger.say(Data(0, header), b"")
    stranger.say(Hello(tcp.VERSION, "stranger", "right"))
    stranger.say(tcp.Leave())
    async with asyncio.timeout(5):
        assert await inbox.lost.get() == "stranger"
    stranger.leave()
    assert inbox.leases.empty()
    assert inbox.cancelled.empty()
    assert caplog.text.count("tcp.not_introduced") == 3
    assert "reason=version 2, expected 1" in caplog.text


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xc1",
        b"\x93\xa4data\x00",
        b"\x92\xa5hello\xff",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(["released", [1]]),
        b"\x93\xa6cancel\xa2\xff\xfe\x00",
    ],
    ids=["empty", "not msgpack", "cut short", "wrong type", "very deep", "other side's", "bad utf-8"],
)
async def test_garbage_is_dropped(tcps: Make, inbox: Inbox, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    endpoint = await inbox.open(tcps("consumer"))
    stranger = Stranger(endpoint)
    stranger.say(Hello(tcp.VERSION, "stranger", ""))
    stranger.say(said)
    stranger.say(said, said, said)
    stranger.say(tcp.Leave())
    async with asyncio.timeout(5):
        assert await inbox.lost.get() == "stranger"
    stranger.leave()
    assert await passes(await tcps("producer").dial(endpoint), inbox)
    assert caplog.text.count("tcp.undecodable peer='stranger'") == 2


async def test_a_header_that_lies_about_its_bytes_hurts_its_reader_only(tcps: Make, inbox: Inbox) -> None:
    endpoint = await inbox.open(tcps("consumer"))
    stranger = Stranger(endpoint)
    stranger.say(Hello(tcp.VERSION, "liar", ""))
    header, _ = chunk("r", 0, np.zeros(1000, np.float64))
    stranger.say(Data(0, header), bytes(7999))
    stranger.say(Data(1, header))
    for _ in range(2):
        lease = await inbox.leases.get()
        with pytest.raises(ValueError, match="buffer"):
            lease.arrays()
        lease.release()
    stranger.leave()
    assert await passes(await tcps("producer").dial(endpoint), inbox)


async def test_a_callback_that_raises_costs_its_chunk_only(tcps: Make, caplog: pytest.LogCaptureFixture) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    def on_chunk(lease: object) -> None:
        seen.put_nowait(lease.header.seq)  # type: ignore[attr-defined]
        raise RuntimeError("in the callback")

    endpoint = await tcps("consumer").open(on_chunk, lambda peer: None, lambda request_id, epoch: None)
    outlet = await tcps("producer", ConnectorOptions(window_chunks=1)).dial(endpoint)
    async with asyncio.timeout(5):
        for seq in range(3):
            await outlet.send(*chunk("r", seq, np.zeros(10)))
            assert await seen.get() == seq
    assert "in the callback" in caplog.text


# ---- keys -----------------------------------------------------------------------------------------------------------------


async def test_beyond_loopback_keys_are_needed_and_they_work(tcps: Make, inbox: Inbox) -> None:
    with pytest.raises(ValueError, match="got no CURVE keys"):
        await inbox.open(tcps("consumer", host="192.0.2.1"))
    with pytest.raises(ValueError, match="got no CURVE keys"):
        await tcps("producer").dial("tcp://192.0.2.1:5000")
    keys = CurveKeys.generate()
    endpoint = await inbox.open(tcps("consumer", curve=keys))
    assert await passes(await tcps("producer", curve=keys).dial(endpoint), inbox)
    for arguments in ({}, {"curve": CurveKeys.generate()}):
        with pytest.raises(Broken):
            await tcps("stranger", **arguments).dial(endpoint)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "host.example"])
async def test_a_host_that_peers_can_not_dial_is_refused(tcps: Make, inbox: Inbox, host: str) -> None:
    with pytest.raises(ValueError, match="host: got"):
        await inbox.open(tcps("consumer", host=host, curve=CurveKeys.generate()))


async def test_ipv6_loopback_works(tcps: Make, inbox: Inbox) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    endpoint = await inbox.open(tcps("consumer", host="::1"))
    assert endpoint.startswith("tcp://[::1]:")
    assert await passes(await tcps("producer").dial(endpoint), inbox)


# ---- ends -----------------------------------------------------------------------------------------------------------------


async def test_everything_sent_arrives_before_its_producer_is_lost(tcps: Make, inbox: Inbox) -> None:
    endpoint = await inbox.open(tcps("consumer"))
    for round_ in range(20):
        producer = tcps(f"producer-{round_}", ConnectorOptions(window_chunks=300))
        outlet = await producer.dial(endpoint)
        for seq in range(200):
            await outlet.send(*chunk("r", seq, np.zeros(5000, np.uint8)))
        await producer.close()
        async with asyncio.timeout(5):
            assert await inbox.lost.get() == f"producer-{round_}"
        assert [inbox.leases.get_nowait().header.seq for _ in range(200)] == list(range(200))
        assert inbox.leases.empty()


async def test_what_was_sent_survives_a_close_while_releases_come_in(tcps: Make, inbox: Inbox) -> None:
    endpoint = await inbox.open(tcps("consumer"))

    async def take_all() -> list[int]:
        return [(await inbox.take())[0].seq for _ in range(40)]

    for round_ in range(20):
        producer = tcps(f"producer-{round_}")
        outlet = await producer.dial(endpoint)
        taking = asyncio.create_task(take_all())
        await _send_many(outlet, 40)
        await producer.close()
        async with asyncio.timeout(5):
            assert await taking == list(range(40))
            assert await inbox.lost.get() == f"producer-{round_}"


async def test_connections_that_come_and_go_are_not_taken_for_one_another(tcps: Make, inbox: Inbox) -> None:
    consumer = tcps("consumer")
    endpoint = await inbox.open(consumer)
    staying = await tcps("staying").dial(endpoint)
    port = int(endpoint.rpartition(":")[2])
    for round_ in range(20):  # file descriptors are used again at once
        socket.create_connection(("127.0.0.1", port)).close()
        stranger = Stranger(endpoint)
        stranger.say(b"garbage")
        stranger.leave()
        producer = tcps(f"producer-{round_}")
        assert await passes(await producer.dial(endpoint), inbox)
        await producer.close()
    async with asyncio.timeout(5):
        assert [await inbox.lost.get() for _ in range(20)] == [f"producer-{round_}" for round_ in range(20)]
    assert await passes(staying, inbox)
    assert consumer.stats().peers == 1
    assert inbox.lost.empty()


async def test_a_restarted_consumer_is_dialed_anew(tcps: Make, inbox: Inbox) -> None:
    first, producer = tcps("consumer"), tcps("producer")
    outlet = await producer.dial(await inbox.open(first))
    await first.close()
    with pytest.raises(Broken):
        await _send_many(outlet, 1000)
    with pytest.raises(Broken, match="nobody listens there"):
        await producer.dial(outlet.endpoint)
    again = await producer.dial(await inbox.open(tcps("consumer")))
    assert await passes(again, inbox)


async def test_a_listener_that_never_answers_is_broken(tcps: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(Broken, match="no answer within 0.1 s"):
            await tcps("producer").dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}")


async def test_a_stopped_consumer_holds_up_no_other_and_goes_on_when_it_wakes(
    tcps: Make, inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    producer = tcps("producer", token="t")
    endpoint = await inbox.open(producer)
    peer = peer_process("echo", "tcp", str(tmp_path), endpoint)
    outlet = await producer.dial(await peer.line())
    peer.signal(signal.SIGSTOP)
    stopped = asyncio.create_task(_send_many(outlet, 100))
    itself = await producer.dial(endpoint)
    assert await passes(itself, inbox)
    assert not stopped.done()
    peer.signal(signal.SIGCONT)
    async with asyncio.timeout(20):
        assert [(await inbox.take())[0].seq for _ in range(100)] == list(range(100))
        await stopped


async def _send_many(outlet: tcp.TcpOutlet, n: int) -> None:
    for seq in range(n):
        await outlet.send(*chunk("many", seq, np.zeros(100_000, np.uint8)))


async def test_a_killed_peer_is_noticed_within_a_tenth_of_a_second(
    tcps: Make, inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    consumer = tcps("consumer", token="t")
    endpoint = await inbox.open(consumer)
    took = []
    for _ in range(3):
        peer = peer_process("produce", "tcp", str(tmp_path), endpoint)
        assert await peer.line() == "sent"
        start = time.monotonic()
        peer.signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            assert await inbox.lost.get() == "peer-produce"
        took.append(time.monotonic() - start)
    assert min(took) < 0.1  # the best of three: the machine may be busy


async def test_arrays_are_aligned_for_their_type(tcps: Make, inbox: Inbox) -> None:
    outlet = await tcps("producer").dial(await inbox.open(tcps("consumer")))
    for seq, size in enumerate([1, 3, 100, 1500, 9000, 100_000]):
        await outlet.send(*chunk("r", seq, np.zeros(size, np.float64), np.zeros(size, np.int32)))
        lease = await inbox.leases.get()
        assert all(array.flags.aligned for array in lease.arrays())
        lease.release()


async def test_idle_connections_cost_no_cpu(tcps: Make, inbox: Inbox) -> None:
    outlet = await tcps("producer").dial(await inbox.open(tcps("consumer")))
    assert await passes(outlet, inbox)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1.5)  # the time that is measured; a heartbeat is in it
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.015


async def test_connectors_leave_no_file_descriptor_behind(tcps: Make) -> None:
    async def once() -> None:
        inbox, consumer, producer = Inbox(), tcps("consumer"), tcps("producer")
        assert await passes(await producer.dial(await inbox.open(consumer)), inbox)
        await producer.close()
        await consumer.close()
        with pytest.raises(Broken):
            await tcps("late").dial(f"tcp://127.0.0.1:{_unused_port()}")

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await once()
    assert len(os.listdir("/proc/self/fd")) < before + 10  # the last of them close in ZeroMQ's own threads


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_process_that_closes_nothing_exits_at_once() -> None:
    code = """
import asyncio, time
import numpy as np
from transport.chunk import ChunkHeader, describe
from transport.connector import ConnectorOptions
from transport.tcp import TcpConnector
async def main():
    consumer, producer = TcpConnector("c", ConnectorOptions()), TcpConnector("p", ConnectorOptions())
    outlet = await producer.dial(await consumer.open(lambda lease: None, lambda peer: None, lambda request_id, epoch: None))
    specs, arrays, _ = describe({"t": np.zeros(2**20)})  # still being sent when the interpreter ends
    for seq in range(3):
        await outlet.send(ChunkHeader("r", 0, "s", "p", seq, "latents", tensors=specs), arrays)
asyncio.run(main())
print(time.monotonic())
"""
    exited = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (exited.returncode, exited.stderr) == (0, "")
    assert time.monotonic() - float(exited.stdout) < 2
