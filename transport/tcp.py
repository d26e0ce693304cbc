"""The connector between hosts: chunks over ZeroMQ TCP. The consumer binds one ROUTER; each producer connects a DEALER.

    producer (DEALER)                                         consumer (ROUTER)
    Hello(version, name, token)              ------------->   Accepted | Refused(reason)
    Data(number, header), payload            ------------->   on_chunk(lease)
    Cancel(request, epoch)                   ------------->   on_cancel
                                             <-------------   Released(numbers)      one message for all of a loop's turn
    Leave                                    ------------->   on_lost
                                             <-------------   Left                   all that was sent has come

Knows frames and credit. Knows nothing of routes or models.

Rules
- Nothing is decoded but msgspec structs, and nothing is heard before a Hello with the run's token.
- A connection is one producer's life: it is never joined again under the same routing id; a new `dial` makes a new one.
- Credit bounds what ZeroMQ queues, so its own high-water marks are off for chunks.
- Beyond loopback both ends need the run's CURVE keys.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from transport.chunk import ChunkHeader
from transport.connector import Connector, ConnectorOptions, ConnectorStats, Lease, Outlet
from transport.credit import Loan, Windows
from transport.errors import Broken, Closed, ProtocolError, TransportError, WouldBlock
from transport.memory import HeapLease, Inlet, gathered
from transport.payload import payload_bytes
from transport.zeromq import CurveKeys, LoopSocket

log = logging.getLogger(__name__)

VERSION = 1
DIAL_S = 5.0  # for the connection and the answer to our Hello
LINGER_S = 1.0  # for what is on its way when we close
_ENVELOPE_BYTES = 2**20  # room for a descriptor beside the largest payload


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who connects; the first message of a connection."""

    version: int
    name: str
    token: str


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data", gc=False):
    """A chunk; its payload is the next frame."""

    number: int  # counts the connection's chunks; names this one in Released
    header: ChunkHeader


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """A request is over, as in `Outlet.cancel`."""

    request_id: str
    epoch: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The producer closes; the last message of a connection. A TCP socket that is closed with something unread takes back what it sent,
    so the producer waits for Left."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The Hello was right: chunks may come."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The Hello was wrong; nothing else from this connection is heard."""

    reason: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Chunks whose credit comes back. An empty one asks nothing: it is how the consumer finds out whether a producer is still there."""

    numbers: list[int] = []


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Answer to Leave: everything before it has arrived."""


class TcpConnector(Connector):
    """ZeroMQ over TCP. Endpoint: "tcp://<host>:<port>"."""

    scheme = "tcp"

    def __init__(
        self, name: str, options: ConnectorOptions, host: str = "127.0.0.1", token: str = "", *, curve: CurveKeys | None = None
    ) -> None:
        """Not open yet.

        Args:
            name: what peers call this process.
            options: sizes and bounds; there is no arena, so credit alone bounds the memory.
            host: the address at which peers reach this host.
            token: the run's secret; a producer with another one is refused.
            curve: the run's keys; needed beyond loopback.
        """
        self.name = name
        self.options = options
        self.token = token
        self.curve = curve
        self.counters = ConnectorStats()
        self._host = host
        self._listener: Listener | None = None
        self._outlets: dict[str, TcpOutlet] = {}
        self._closed = False

    async def open(self, on_chunk: Callable[[Lease], None], on_lost: Callable[[str], None], on_cancel: Callable[[str, int], None]) -> str:
        """Raises OSError (no such address here), ValueError (beyond loopback without keys, or an address that peers can not dial)."""
        if self._closed:
            raise Closed(f"connector {self.name} was closed")
        if self._listener is None:
            listener = Listener(self, Inlet(on_chunk, on_lost, on_cancel, self.counters))
            try:
                listener.bind(self._host)
            except BaseException:
                await listener.close()
                raise
            self._listener = listener
        return self._listener.endpoint

    async def reserve(self) -> None:
        """Nothing: memory comes with each chunk."""

    async def dial(self, endpoint: str) -> TcpOutlet:
        """Raises ProtocolError (we were refused: token, version) and ValueError (no such endpoint, keys missing) as well."""
        if self._closed:
            raise Closed(f"connector {self.name} was closed")
        outlet = self._outlets.get(endpoint)
        if outlet is None or outlet.error is not None:
            if not endpoint.startswith("tcp://"):
                raise ValueError(f"got endpoint {endpoint!r}, expected one that begins with 'tcp://'")
            outlet = self._outlets[endpoint] = TcpOutlet(endpoint, self)
        await outlet.accepted()
        return outlet

    def stats(self) -> ConnectorStats:
        inbound = 0 if self._listener is None else self._listener.num_producers
        self.counters.peers = inbound + sum(outlet.error is None for outlet in self._outlets.values())
        return self.counters

    async def close(self) -> None:
        self._closed = True
        closing = [outlet.close() for outlet in self._outlets.values()]
        if self._listener is not None:
            closing.append(self._listener.close())
        await asyncio.gather(*closing)


class TcpOutlet(Outlet):
    """The producer's end of a connection. Made by `TcpConnector.dial`."""

    def __init__(self, endpoint: str, connector: TcpConnector) -> None:
        self.endpoint = endpoint
        self.error: TransportError | None = None  # why nothing can be sent any more
        self._counters = connector.counters
        self._windows = Windows(connector.options, connector.counters)
        self._on_their_way: dict[int, Loan] = {}
        self._next_number = 0
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # to our Hello
        self._parted: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the connection is of no more use
        options: dict[int, int | bytes] = {
            zmq.ROUTING_ID: secrets.token_hex(16).encode(),
            zmq.RECONNECT_IVL: -1,
            zmq.SNDHWM: 0,
            zmq.MAXMSGSIZE: _ENVELOPE_BYTES,
        }
        self._socket = LoopSocket(zmq.DEALER, self._receive, on_event=self._on_event, copy=False, options=options)
        try:
            self._socket.connect(endpoint, connector.curve)
            self._socket.send((_encode(Hello(VERSION, connector.name, connector.token)),))
        except WouldBlock:  # the connection has failed already
            self._end(Broken(f"{endpoint}: nobody listens there, or not to us"))
        except BaseException as error:
            self._end(Broken(str(error)))
            raise

    async def accepted(self) -> None:
        """Waits: for the consumer's answer, at most `DIAL_S`. Raises Broken, ProtocolError."""
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.shield(self._answer)  # others may wait for it as well
        except TimeoutError:
            self._end(Broken(f"{self.endpoint}: no answer within {DIAL_S:g} s"))
        if self.error is not None:
            raise _again(self.error)

    async def send(self, header: ChunkHeader, arrays: Sequence[np.ndarray] = ()) -> None:
        nbytes = payload_bytes(header.tensors, arrays)
        loan = await self._windows.take(header, nbytes)
        try:
            payload = await gathered(header.tensors, arrays, nbytes)
            loan.check()
            self._post(Data(self._next_number, header), payload)
        except BaseException:
            loan.give_back()
            raise
        self._on_their_way[self._next_number] = loan
        self._next_number += 1
        loan.sent()
        self._counters.chunks_sent += 1
        self._counters.bytes_sent += nbytes

    def cancel(self, request_id: str, epoch: int) -> None:
        if self.error is None and self._windows.cancel(request_id, epoch):
            try:
                self._post(Cancel(request_id, epoch))
            except Broken:  # nobody is left to tell
                pass

    def forget(self, request_id: str) -> None:
        self._windows.forget(request_id)

    async def close(self) -> None:
        """Waits: until the consumer has received what was sent, at most `LINGER_S`."""
        if self.error is None:
            connected = self._answer.done()
            self._end(Closed(f"the outlet to {self.endpoint} was closed"), parted=not connected)
            if connected:
                try:
                    self._post(Leave())
                except Broken:  # then there is nobody to wait for either
                    pass
        await asyncio.wait((self._parted,), timeout=LINGER_S)
        await self._socket.close()

    def _post(self, message: Data | Cancel | Leave, *payload: Any) -> None:
        try:
            self._socket.send((_encode(message), *payload))
        except WouldBlock:  # without a high-water mark that means: without a connection
            self._end(Broken(f"{self.endpoint}: the consumer is gone"))
            raise Broken(f"{self.endpoint}: the consumer is gone") from None

    def _receive(self, frames: list[zmq.Frame]) -> None:
        try:
            message = _to_producer.decode(frames[0].buffer)
        except msgspec.DecodeError as error:
            self._end(ProtocolError(f"{self.endpoint}: {error}"))
            return
        match message:
            case Released(numbers):
                for number in numbers:
                    loan = self._on_their_way.pop(number, None)
                    if loan is not None:
                        loan.give_back()
            case Accepted():
                if not self._answer.done():
                    self._answer.set_result(None)
            case Left():
                self._end(Closed(f"we left {self.endpoint}"))
            case Refused(reason):
                self._end(ProtocolError(f"{self.endpoint} refused us: {reason}"))

    def _on_event(self, event: zmq.Event, value: int) -> None:
        match event:
            case zmq.EVENT_CLOSED if not self._answer.done():
                self._end(Broken(f"{self.endpoint}: nobody listens there"))
            case zmq.EVENT_DISCONNECTED:
                # What the consumer said last is delivered first: a reason, when it refused us.
                self._socket.drain()
                self._end(Broken(f"{self.endpoint}: the consumer is gone"))

    def _end(self, error: TransportError, *, parted: bool = True) -> None:
        """Nothing can be sent any more, for the first reason given; when `parted`, nothing will be heard either. Idempotent."""
        if self.error is None:
            self.error = error
            self._windows.end(error)
            self._on_their_way.clear()
            if not self._answer.done():
                self._answer.set_result(None)
        if parted and not self._parted.done():
            self._parted.set_result(None)
            self._socket.shut()


class Listener:
    """The consumer's end of all its connections."""

    def __init__(self, connector: TcpConnector, inlet: Inlet) -> None:
        self.endpoint = ""
        self._connector = connector
        self._inlet = inlet
        self._loop = asyncio.get_running_loop()
        self._producers: dict[bytes, Producer] = {}  # by routing id
        self._suspects: set[bytes] = set()  # their connection has ended; ZeroMQ may still hold messages of theirs
        self._dead: list[bytes] = []  # and now it can hold only what the next drain delivers
        options: dict[int, int | bytes] = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.SNDHWM: 0,
            zmq.MAXMSGSIZE: connector.options.max_chunk_bytes + _ENVELOPE_BYTES,
        }
        self._socket = LoopSocket(
            zmq.ROUTER, self._receive, on_event=self._on_event, on_drained=self._look_for_dead, copy=False, options=options
        )

    @property
    def num_producers(self) -> int:
        return len(self._producers)

    def bind(self, host: str) -> None:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if host != "localhost":
                raise ValueError(f"host: got {host!r}, expected an IP address of this machine") from None
            address = ipaddress.ip_address("127.0.0.1")
        if address.is_unspecified:
            raise ValueError(f"host: got {host}, expected the address at which peers reach this machine")
        self.endpoint = self._socket.bind(f"tcp://[{address}]:*" if address.version == 6 else f"tcp://{address}:*", self._connector.curve)

    def post(self, routing_id: bytes, message: Accepted | Refused | Released | Left) -> bool:
        """False when that producer is gone."""
        try:
            self._socket.send((routing_id, _encode(message)))
        except (Broken, Closed):
            return False
        return True

    async def close(self) -> None:
        self._inlet.close()
        self._producers.clear()
        # A producer learns of our end by the end of its connection. What it should still hear goes out first.
        await self._socket.close(LINGER_S)

    def _receive(self, frames: list[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        producer = self._producers.get(routing_id)
        try:
            message = _to_consumer.decode(frames[1].buffer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
            log.warning("tcp.undecodable peer=%r frames=%d error=%s", producer.name if producer else routing_id, len(frames), error)
            return
        match message:
            case Hello():
                self._greet(routing_id, message, frames[1])
            case Data(number, header) if producer is not None:
                self._arrive(producer, number, header, frames[2:])
            case Cancel(request_id, epoch) if producer is not None:
                self._inlet.cancel(request_id, epoch)
            case Leave() if producer is not None:
                self.post(routing_id, Left())
                self._lose(routing_id)
            case _:
                log.warning("tcp.not_introduced peer=%r message=%s", routing_id, type(message).__name__)

    def _greet(self, routing_id: bytes, hello: Hello, frame: zmq.Frame) -> None:
        if hello.version != VERSION:
            reason = f"version {hello.version}, expected {VERSION}"
        elif not hmac.compare_digest(hello.token.encode(), self._connector.token.encode()):
            reason = "wrong token"
        else:
            # The end of an earlier connection with the same descriptor must not be taken for the end of this one.
            self._socket.drain_events()
            self._producers[routing_id] = Producer(hello.name, int(frame.get(zmq.SRCFD)), routing_id, self)
            if not self.post(routing_id, Accepted()):
                self._suspect({routing_id})
            return
        log.warning("tcp.refused peer=%r reason=%s", hello.name, reason)
        self.post(routing_id, Refused(reason))

    def _arrive(self, producer: Producer, number: int, header: ChunkHeader, frames: list[zmq.Frame]) -> None:
        payload = _aligned(frames[0]) if frames else np.empty(0, np.uint8)
        self._inlet.arrive(HeapLease(header, producer.name, payload, lambda: producer.release(number)))

    # ---- the end of a producer

    def _on_event(self, event: zmq.Event, value: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._suspect({routing_id for routing_id, producer in self._producers.items() if producer.descriptor == value})

    def _suspect(self, routing_ids: set[bytes]) -> None:
        # The event is ahead of messages that ZeroMQ has yet to deliver. It ends the routing id when it has passed on the last one,
        # by commands that wake the socket; so we ask after each drain.
        if routing_ids:
            self._suspects |= routing_ids
            self._socket.drain_soon()

    def _look_for_dead(self) -> None:
        if not self._suspects and not self._dead:
            return
        dead, self._dead = self._dead, []
        for routing_id in dead:
            self._lose(routing_id)
        self._dead = [routing_id for routing_id in self._suspects if not self.post(routing_id, Released())]
        if self._dead:
            # Its last messages may have come between the drain and our question.
            self._suspects.difference_update(self._dead)
            self._socket.drain_soon()

    def _lose(self, routing_id: bytes) -> None:
        producer = self._producers.pop(routing_id, None)
        if producer is not None:
            self._suspects.discard(routing_id)
            self._inlet.lose(producer.name)


class Producer:
    """A producer that has introduced itself, and the chunks of it that are to be released."""

    def __init__(self, name: str, descriptor: int, routing_id: bytes, listener: Listener) -> None:
        self.name = name
        self.descriptor = descriptor  # of its connection, on this side
        self._routing_id = routing_id
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._released: list[int] = []

    def release(self, number: int) -> None:
        if not self._released:
            self._loop.call_soon(self._flush)
        self._released.append(number)

    def _flush(self) -> None:
        numbers, self._released = self._released, []
        self._listener.post(self._routing_id, Released(numbers))


def _aligned(frame: zmq.Frame) -> np.ndarray:
    payload = np.frombuffer(frame.buffer, np.uint8)
    return payload if payload.ctypes.data % 8 == 0 else payload.copy()


def _again(error: TransportError) -> TransportError:
    """A fresh one for each who raises it: tracebacks do not mix."""
    return type(error)(*error.args)


_encode = msgspec.msgpack.Encoder().encode
_to_consumer = msgspec.msgpack.Decoder(Hello | Data | Cancel | Leave)
_to_producer = msgspec.msgpack.Decoder(Accepted | Refused | Released | Left)
