"""What is the shared-memory connector's own: the arena, jumbo areas, fairness, descriptors, bad peers and full file systems."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.transport.conftest import Inbox, PeerProcess, chunk, settle
from transport import channel
from transport.arena import ARENA_FILE
from transport.channel import Cancel, Data, File, FileComing, Hello, Refused, Welcome
from transport.connector import Connector, ConnectorOptions, Outlet
from transport.errors import Broken, Closed, ProtocolError, TooLarge
from transport.layout import Layout
from transport.memfile import MemFile, attach
from transport.outlet import send_to_all
from transport.shm import ShmConnector
from transport.window import Tombstones

MIB = 2**20


@pytest.fixture
def shm(connectors: Callable[..., Connector]) -> Callable[..., ShmConnector]:
    return lambda name, **options: connectors("shm", name, **options)  # type: ignore[return-value]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def filled(size: int, value: int) -> np.ndarray:
    return np.full(size, value, np.uint8)


# ---- the arena ------------------------------------------------------------------------------------------------------------


async def test_a_process_that_only_consumes_has_no_arena(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    await producer.dial(await inbox.open(consumer))
    assert consumer.stats().bytes_total == 0
    assert 0.9 * 8 * MIB < producer.stats().bytes_total <= 8 * MIB
    assert (consumer.stats().peers, producer.stats().peers) == (1, 1)


async def test_what_sending_needs_may_be_allocated_before_the_first_dial(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    await asyncio.gather(producer.reserve(), producer.reserve())
    reserved = producer.stats().bytes_total
    assert reserved > 0
    await producer.reserve()
    await producer.dial(await inbox.open(consumer))
    assert producer.stats().bytes_total == reserved
    await producer.close()
    with pytest.raises(Closed):
        await producer.reserve()


async def test_nothing_is_left_behind(shm: Callable[..., ShmConnector], tmp_path: Path) -> None:
    before, files = descriptors(), sorted(os.listdir("/dev/shm"))
    for _ in range(5):
        inbox = Inbox()
        consumer, producer = shm("consumer"), shm("producer")
        endpoint = await inbox.open(consumer)
        path = Path(endpoint.removeprefix("shm:"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        outlet = await producer.dial(endpoint)
        assert sorted(os.listdir("/dev/shm")) == files
        for seq, size in enumerate((10, 100_000, 9 * MIB)):
            await outlet.send(*chunk("r", seq, filled(size, 1)))
            await inbox.take()
        await producer.close()
        await consumer.close()
        assert not path.exists()
    assert descriptors() == before
    assert os.listdir(tmp_path) == []


async def test_the_directory_is_made_for_this_user_only(tmp_path: Path, inbox: Inbox) -> None:
    consumer = ShmConnector("consumer", tmp_path / "run", ConnectorOptions())
    await inbox.open(consumer)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    await consumer.close()


async def test_a_path_too_long_for_a_socket_address_works(tmp_path: Path, inbox: Inbox) -> None:
    directory = tmp_path / ("long" * 20) / ("longer" * 10)
    consumer, producer = (ShmConnector(name, directory, ConnectorOptions(arena_bytes=MIB)) for name in ("consumer", "producer"))
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, filled(100_000, 5)))
    assert (await inbox.take())[1][0].max() == 5
    await producer.close()
    await consumer.close()
    assert os.listdir(directory) == []


async def test_one_chunk_to_many_consumers_and_many_producers_to_one(shm: Callable[..., ShmConnector]) -> None:
    names = ("a", "b", "c")
    peers, inboxes = [shm(name) for name in names], [Inbox() for _ in names]
    endpoints = [await inbox.open(peer) for peer, inbox in zip(peers, inboxes, strict=True)]
    for sender, peer in enumerate(peers):
        for endpoint in endpoints:  # its own too
            await (await peer.dial(endpoint)).send(*chunk(f"from-{sender}", 0, filled(50_000, sender)))
    for inbox in inboxes:
        arrived = [await inbox.take() for _ in names]
        assert {(header.request_id, int(arrays[0].max())) for header, arrays in arrived} == {(f"from-{i}", i) for i in range(3)}


@pytest.mark.parametrize("size", [10, 50_000, 9 * MIB])
async def test_a_chunk_for_several_consumers_is_copied_once(shm: Callable[..., ShmConnector], size: int) -> None:
    producer, peers, inboxes = shm("producer"), [shm("a"), shm("b"), shm("c")], [Inbox(), Inbox(), Inbox()]
    outlets = [await producer.dial(await inbox.open(peer)) for peer, inbox in zip(peers, inboxes, strict=True)]
    await send_to_all(outlets, *chunk("r", 0, filled(size, 3)))
    assert producer.stats().slots_in_use == (size > 4096)
    leases = [await inbox.leases.get() for inbox in inboxes]
    assert [int(lease.arrays()[0][-1]) for lease in leases] == [3, 3, 3]
    for lease in leases[:2]:
        lease.release()
    await asyncio.sleep(0.05)
    assert producer.stats().slots_in_use == (size > 4096)
    leases[2].release()
    await settle(lambda: producer.stats().slots_in_use == 0)


async def test_a_consumer_gone_is_said_and_the_others_have_the_chunk(shm: Callable[..., ShmConnector]) -> None:
    producer, peers, inboxes = shm("producer", window_chunks=2), [shm("a"), shm("b")], [Inbox(), Inbox()]
    outlets = [await producer.dial(await inbox.open(peer)) for peer, inbox in zip(peers, inboxes, strict=True)]
    inbound = next(iter(peers[0]._inbounds))
    inbound._lane._sock.shutdown(socket.SHUT_RD)
    with pytest.raises(Broken):
        await send_to_all(outlets, *chunk("r", 0, filled(50_000, 3)))
    assert (await inboxes[1].take())[0].seq == 0
    await settle(lambda: producer.stats().slots_in_use == 0)
    assert outlets[1]._windows._windows == {}


async def test_a_cancel_ends_a_send_to_several_that_waits(shm: Callable[..., ShmConnector]) -> None:
    producer, peers, inboxes = shm("producer", window_chunks=1), [shm("a"), shm("b")], [Inbox(), Inbox()]
    outlets = [await producer.dial(await inbox.open(peer)) for peer, inbox in zip(peers, inboxes, strict=True)]
    await outlets[1].send(*chunk("r", 0, filled(50_000, 1)))
    waiting = asyncio.create_task(send_to_all(outlets, *chunk("r", 1, filled(50_000, 1))))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    outlets[1].cancel("r", 0)
    with pytest.raises(Closed):
        await waiting
    await outlets[0].send(*chunk("r", 1, filled(50_000, 1)))
    assert (await inboxes[0].take())[0].seq == 1


@pytest.mark.parametrize("size", [20_000, 300_000])
async def test_a_stalled_request_does_not_own_the_arena(shm: Callable[..., ShmConnector], inbox: Inbox, size: int) -> None:
    consumer, producer = shm("consumer"), shm("producer", arena_bytes=4 * MIB, window_chunks=10_000, window_bytes=2**40)
    outlet = await producer.dial(await inbox.open(consumer))

    async def stall() -> None:
        for seq in range(10_000):
            await outlet.send(*chunk("stalled", seq, filled(size, 1)))

    stalled = asyncio.create_task(stall())
    await settle(lambda: producer.stats().credit_waits > 0)
    held = [inbox.leases.get_nowait() for _ in range(inbox.leases.qsize())]
    for seq in range(50):
        async with asyncio.timeout(5):
            await outlet.send(*chunk("live", seq, filled(size, 2)))
            lease = await inbox.leases.get()
        while lease.header.request_id == "stalled":
            held.append(lease)
            lease = await inbox.leases.get()
        lease.release()
    assert not stalled.done()
    outlet.cancel("stalled", 0)
    with pytest.raises(Closed):
        await stalled
    for lease in held:
        lease.release()
    await settle(lambda: producer.stats().slots_in_use == 0)


async def test_a_send_cancelled_while_it_waits_for_a_slot_takes_none(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer", arena_bytes=MIB)
    outlet = await producer.dial(await inbox.open(consumer))
    leases = []

    async def send_too_many() -> None:
        for seq in range(1000):
            await outlet.send(*chunk("r", seq, filled(60_000, seq % 250)))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(send_too_many(), 0.1)
    while not inbox.leases.empty():
        leases.append(inbox.leases.get_nowait())
    assert producer.stats().slots_in_use == len(leases)
    for lease in leases:
        lease.release()
    await settle(lambda: producer.stats().slots_in_use == 0)


# ---- jumbo areas ----------------------------------------------------------------------------------------------------------


async def test_a_jumbo_area_is_used_again(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    arena_bytes = producer.stats().bytes_total
    for seq in range(6):
        await outlet.send(*chunk("r", seq, filled(9 * MIB, seq)))
        _, (array,) = await inbox.take()
        assert array.min() == array.max() == seq
        await settle(lambda: producer.stats().slots_in_use == 0)
    assert producer.stats().bytes_total < arena_bytes + 11 * MIB


async def test_jumbo_areas_stay_within_their_bound(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer", max_chunk_bytes=16 * MIB, window_bytes=2**40)
    outlet = await producer.dial(await inbox.open(consumer))
    most = 0
    for seq, mib in enumerate([9, 3, 16, 5, 12, 4, 16]):  # no two fit beside each other for long: the unused ones make room
        async with asyncio.timeout(10):
            await outlet.send(*chunk("r", seq, filled(mib * MIB, seq)))
        most = max(most, producer.stats().bytes_total)
        _, (array,) = await inbox.take()
        assert (array.nbytes, array.min(), array.max()) == (mib * MIB, seq, seq)
        await settle(lambda: producer.stats().slots_in_use == 0)
    assert most <= 25 * MIB


async def test_a_jumbo_send_waits_for_room_and_its_cancel_takes_none(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer", max_chunk_bytes=16 * MIB)
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("a", 0, filled(16 * MIB, 1)))
    lease = await inbox.leases.get()
    second = asyncio.create_task(outlet.send(*chunk("b", 0, filled(16 * MIB, 2))))
    third = asyncio.create_task(outlet.send(*chunk("c", 0, filled(16 * MIB, 3))))
    await outlet.send(*chunk("d", 0, filled(50_000, 4)))
    assert (await inbox.take())[0].request_id == "d"
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not third.done()
    lease.release()
    async with asyncio.timeout(10):
        await third
        assert (await inbox.take())[0].request_id == "c"


async def test_a_send_cancelled_in_the_middle_of_its_copy_leaves_no_trace(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer", arena_bytes=64 * MIB)
    outlet = await producer.dial(await inbox.open(consumer))
    for _ in range(5):
        sending = asyncio.create_task(outlet.send(*chunk("r", 0, filled(8 * MIB, 1))))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    sending = asyncio.create_task(outlet.send(*chunk("s", 0, filled(8 * MIB, 1))))
    await asyncio.sleep(0)
    outlet.cancel("s", 0)
    with pytest.raises(Closed):
        await sending
    await settle(lambda: producer.stats().slots_in_use == 0)
    assert inbox.leases.empty()


# ---- views and ends -------------------------------------------------------------------------------------------------------


async def test_views_stay_valid_memory_after_both_connectors_are_closed(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    views = []
    for seq, size in enumerate((10, 100_000, 9 * MIB)):
        await outlet.send(*chunk("r", seq, filled(size, seq)))
        views.append((await inbox.leases.get()).arrays()[0][1:])
    await producer.close()
    await consumer.close()
    del outlet, producer, consumer
    gc.collect()
    assert [int(view.sum()) for view in views] == [0, 99_999, 2 * (9 * MIB - 1)]


AT_EXIT = """
import asyncio, sys
from pathlib import Path
import tests.transport.conftest as far
from transport.connector import ConnectorOptions
from transport.shm import ShmConnector

async def main(close):
    inbox = far.Inbox()
    producer, consumer = (ShmConnector(name, Path(sys.argv[1]), ConnectorOptions(arena_bytes=2**20)) for name in ("a", "b"))
    outlet = await producer.dial(await inbox.open(consumer))
    for seq in range(4):
        await outlet.send(*far.chunk("r", seq, far.np.full(50_000, seq, far.np.uint8)))
    leases = [await inbox.leases.get() for _ in range(4)]
    views = [lease.arrays()[0][1:] for lease in leases[:2]]
    if close:
        await producer.close()
        await consumer.close()
    return leases, views, producer, consumer

held = asyncio.run(main(sys.argv[2] == "close"))
print(held[1][1].sum())
"""


@pytest.mark.parametrize("close", ["close", "just exit"])
def test_a_process_may_end_with_leases_and_views(tmp_path: Path, close: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path), close], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "49999\n", "")


async def test_a_lease_unopened_when_its_connector_closes_says_so(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, filled(100_000, 1)))
    lease = await inbox.leases.get()
    await consumer.close()
    with pytest.raises(Closed):
        lease.arrays()
    lease.release()


async def test_a_slot_that_was_given_to_another_chunk_is_not_read(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    await outlet.send(*chunk("r", 0, filled(100_000, 1)))
    late = await inbox.leases.get()
    outlet.hang_up(Broken("taken for dead"))
    again = await producer.dial(outlet.endpoint)
    await again.send(*chunk("r", 1, filled(100_000, 2)))
    assert (await inbox.take())[0].seq == 1
    with pytest.raises(Broken, match="another chunk"):
        late.arrays()


async def test_a_stopped_consumer_gets_everything_when_it_goes_on(
    shm: Callable[..., ShmConnector], inbox: Inbox, peer_process: Callable[..., PeerProcess], tmp_path: Path
) -> None:
    mine = shm("mine", window_chunks=100)
    peer = peer_process("echo", "shm", str(tmp_path), await inbox.open(mine))
    outlet = await mine.dial(await peer.line())
    for seq in range(5):
        await outlet.send(*chunk("warm", seq))
        await inbox.take()
    peer.signal(signal.SIGSTOP)
    for i in range(80):  # more than any socket buffer holds
        for seq in range(50):
            await outlet.send(*chunk(f"r{i}", seq, filled(4000, seq)))
    peer.signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        for _ in range(4000):
            await inbox.take()


# ---- peers that do not behave ---------------------------------------------------------------------------------------------


def raw_dial(endpoint: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(endpoint.removeprefix("shm:"))
    return sock


async def raw_accept(producer: ShmConnector, directory: Path) -> tuple[asyncio.Task[Outlet], socket.socket]:
    """A dial of `producer` that has said Hello, and the socket on which it waits for the answer."""
    path = directory / "raw.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        dialing = asyncio.create_task(producer.dial(f"shm:{path}"))
        sock, _ = await asyncio.to_thread(listener.accept)
    await asyncio.to_thread(sock.recv, 1000)
    return dialing, sock


CLASSES = ((4096, 2),)
HEADER = chunk("r", 0)[0]


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff",
        msgspec.msgpack.encode([99, 1]),
        channel.encode(Welcome(1, "x")),
        channel.encode(Data(0, HEADER, channel.INLINE, 0, 0, 0)),
        channel.encode(Cancel("r", 0)),
        channel.encode(FileComing()),
        channel.encode(File(1, CLASSES)),
        channel.encode(Hello(channel.VERSION, "no descriptor", CLASSES)),
    ],
    ids=["garbage", "unknown", "wrong direction", "chunk first", "cancel first", "announcement first", "file first", "no descriptor"],
)
async def test_nonsense_ends_its_own_lane_only(shm: Callable[..., ShmConnector], inbox: Inbox, message: bytes) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    endpoint = await inbox.open(consumer)
    outlet = await producer.dial(endpoint)
    with raw_dial(endpoint) as sock:
        sock.send(message)
        answer = await asyncio.to_thread(sock.recv, 1000)
        assert answer == b"" or isinstance(channel.to_producer.decode(answer), Refused)
    await outlet.send(*chunk("r", 0))
    assert (await inbox.take())[0].seq == 0
    assert inbox.lost.empty()


async def test_a_descriptor_may_come_later_than_its_announcement(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    endpoint = await inbox.open(shm("consumer"))
    file = MemFile(Layout(CLASSES).total_bytes)
    with raw_dial(endpoint) as sock:
        socket.send_fds(sock, [channel.encode(Hello(channel.VERSION, "raw", CLASSES))], [file.fd])
        assert isinstance(channel.to_producer.decode(await asyncio.to_thread(sock.recv, 1000)), Welcome)
        for number in range(3):
            for _ in range(20):  # many messages at once make the lane look for more
                sock.send(channel.encode(Data(0, HEADER, channel.INLINE, 0, 0, 0)))
            sock.send(channel.encode(FileComing()))
            await settle(lambda: inbox.leases.qsize() >= 20)
            await asyncio.sleep(0.01)
            socket.send_fds(sock, [channel.encode(File(number + 1, CLASSES))], [file.fd])
            while not inbox.leases.empty():
                inbox.leases.get_nowait().release()
        sock.send(channel.encode(Data(0, HEADER, channel.INLINE, 0, 0, 0)))
        (await inbox.leases.get()).release()
    file.close()


async def test_a_chunk_can_not_say_who_lends_it(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    """What makes a message a lease lies behind its fields, out of the producer's reach."""
    endpoint = await inbox.open(shm("consumer"))
    file = MemFile(Layout(CLASSES).total_bytes)
    with raw_dial(endpoint) as sock:
        socket.send_fds(sock, [channel.encode(Hello(channel.VERSION, "raw", CLASSES))], [file.fd])
        assert isinstance(channel.to_producer.decode(await asyncio.to_thread(sock.recv, 1000)), Welcome)
        sock.send(msgspec.msgpack.encode([1, 0, HEADER, channel.INLINE, 0, 0, 0, b"", "a borrower"]))
        assert await inbox.lost.get() == "raw"
    assert inbox.leases.empty()
    file.close()


async def test_a_hello_of_another_version_is_refused(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    endpoint = await inbox.open(shm("consumer"))
    file = MemFile(Layout(CLASSES).total_bytes)
    with raw_dial(endpoint) as sock:
        socket.send_fds(sock, [channel.encode(Hello(channel.VERSION + 1, "newer", CLASSES))], [file.fd])
        refused = channel.to_producer.decode(await asyncio.to_thread(sock.recv, 1000))
        assert f"version {channel.VERSION + 1}" in refused.reason
    file.close()


async def test_a_refused_dial_says_why(shm: Callable[..., ShmConnector], tmp_path: Path) -> None:
    dialing, sock = await raw_accept(shm("producer"), tmp_path)
    with sock:
        sock.send(channel.encode(Refused("this process speaks version 7")))
        with pytest.raises(ProtocolError, match="version 7"):
            await dialing


async def test_a_consumer_that_hangs_up_before_it_answers_is_broken(shm: Callable[..., ShmConnector], tmp_path: Path) -> None:
    dialing, sock = await raw_accept(shm("producer"), tmp_path)
    sock.close()
    with pytest.raises(Broken, match="before it answered"):
        await dialing


async def test_memory_shorter_than_was_said_is_refused(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    endpoint = await inbox.open(shm("consumer"))
    file = MemFile(4096)
    with raw_dial(endpoint) as sock:
        socket.send_fds(sock, [channel.encode(Hello(channel.VERSION, "liar", ((2**30, 100),)))], [file.fd])
        assert b"its writer said" in await asyncio.to_thread(sock.recv, 1000)
    file.close()


async def test_a_release_of_a_chunk_that_was_not_sent_breaks_the_outlet(shm: Callable[..., ShmConnector], tmp_path: Path) -> None:
    producer = shm("producer")
    dialing, sock = await raw_accept(producer, tmp_path)
    with sock:
        sock.send(channel.encode(Welcome(channel.VERSION, "raw")))
        outlet = await dialing
        await outlet.send(*chunk("r", 0, filled(50_000, 1)))
        sock.send(channel.encode(channel.Release([5])))
        await settle(lambda: producer.stats().slots_in_use == 0)
        with pytest.raises(Broken, match="chunk 5"):
            await outlet.send(*chunk("r", 1))


async def test_a_header_too_big_for_the_lane_is_too_large(shm: Callable[..., ShmConnector], inbox: Inbox) -> None:
    consumer, producer = shm("consumer"), shm("producer")
    outlet = await producer.dial(await inbox.open(consumer))
    for size in (0, 50_000):
        header, arrays = chunk("r", 0, filled(size, 1))
        with pytest.raises(TooLarge, match="meta"):
            await outlet.send(msgspec.structs.replace(header, meta={"big": "x" * 200_000}), arrays)
    assert producer.stats().slots_in_use == 0
    await outlet.send(*chunk("r", 0))
    assert (await inbox.take())[0].seq == 0


async def test_an_endpoint_of_another_scheme_is_refused(shm: Callable[..., ShmConnector]) -> None:
    with pytest.raises(ValueError, match="shm:"):
        await shm("producer").dial("tcp://127.0.0.1:1")


def test_tombstones_are_bounded() -> None:
    tombstones = Tombstones(limit=2)
    assert [tombstones.add(request_id, 0) for request_id in ("a", "b", "a", "c")] == [True, True, False, True]
    assert [tombstones.covers(request_id, 0) for request_id in ("a", "b", "c")] == [False, True, True]
    assert not tombstones.covers("c", 1)


# ---- memory ---------------------------------------------------------------------------------------------------------------


def test_readers_can_not_write() -> None:
    file = MemFile(8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.fd, b"x", 0)
    file.memory[0] = 7
    seen = attach(file.fd, 8192)
    assert seen.readonly
    assert seen[0] == 7
    file.close()
    assert seen[0] == 7


IN_A_NAMESPACE = """
import asyncio, os, subprocess, sys
from pathlib import Path
from transport.arena import ARENA_FILE
from transport.connector import ConnectorOptions
from transport.errors import NoSpace
from transport.shm import ShmConnector
import tests.transport.conftest as far

def tmpfs(size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)

def kind(connector):
    return os.readlink(f"/proc/self/fd/{connector._arena.files[ARENA_FILE].fd}")

async def main():
    consumer = ShmConnector("consumer", Path(sys.argv[1]), ConnectorOptions())
    inbox = far.Inbox()
    endpoint = await inbox.open(consumer)

    tmpfs("64m")
    with open("/dev/shm/ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, 60 * 2**20)
    full = ShmConnector("full", Path(sys.argv[1]), ConnectorOptions(arena_bytes=8 * 2**20, max_chunk_bytes=16 * 2**20))
    try:
        await full.dial(endpoint)
    except NoSpace as error:
        print("no space:", str(error).replace(chr(10), " "))
    os.unlink("/dev/shm/ballast")
    outlet = await full.dial(endpoint)  # there is room now
    print("file:", kind(full))
    with open("/dev/shm/ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, os.statvfs("/dev/shm").f_bavail * 4096)
    await outlet.send(*far.chunk("r", 0, far.np.ones(100_000, far.np.uint8)))  # what runs goes on
    print("sum:", (await inbox.take())[1][0].sum())
    try:
        await outlet.send(*far.chunk("r", 1, far.np.ones(9 * 2**20, far.np.uint8)))
    except NoSpace:
        print("no space for a jumbo area")
    await outlet.send(*far.chunk("r", 1, far.np.ones(50_000, far.np.uint8)))
    print("sum:", (await inbox.take())[1][0].sum())
    await full.close()
    os.unlink("/dev/shm/ballast")
    small = ShmConnector("small", Path(sys.argv[1]), ConnectorOptions(arena_bytes=64 * 2**20))
    outlet = await small.dial(endpoint)
    print("file:", kind(small))
    file = small._arena.files[ARENA_FILE]
    for attempt in (lambda: os.ftruncate(file.fd, 0), lambda: os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_TRUNC)):
        try:
            attempt()
        except OSError as error:
            print("refused:", error.strerror)
    await outlet.send(*far.chunk("r", 2, far.np.ones(9 * 2**20, far.np.uint8)))
    print("sum:", (await inbox.take())[1][0].sum())
    await small.close()
    await consumer.close()

asyncio.run(main())
"""


def test_a_full_file_system_is_no_space_and_a_small_one_is_gone_round(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and unshare -m: a /dev/shm of its own")
    done = subprocess.run(
        [unshare, "-m", sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no space: /dev/shm: ")
    assert "missing" in lines[0]
    assert "arena_bytes" in lines[0]
    assert lines[1].startswith("file: /dev/shm/")
    assert lines[2:5] == ["sum: 100000", "no space for a jumbo area", "sum: 50000"]
    assert lines[5].startswith("file: /memfd:streamrt")
    assert all(line.startswith("refused: ") for line in lines[6:8])
    assert lines[8] == f"sum: {9 * MIB}"
    assert ARENA_FILE == 0
