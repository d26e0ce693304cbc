"""The lanes: typed ZeroMQ queues on which work and control travel. Chunks do not; they have connectors.

A `LaneServer` is a ROUTER that many peers connect to; a `LaneClient` is a DEALER with a name. Each side says which messages it
accepts (a union of `messages.py`) and gets them decoded, in order per peer, on the loop.

Knows messages as typed structs and peers by name. Knows nothing of what they mean.

Rules
- `send` never waits: there is room, or it raises.
- What can not be decoded is logged and dropped; a peer can not end a lane.
- A client that starts anew under its old name takes the name over; a server that starts anew under its old endpoint is found again, and
  gets what its clients have queued meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from transport.errors import Broken, TooLarge
from transport.zeromq import RECONNECT_MAX_MS, RECONNECT_MS, CurveKeys, LoopSocket

__all__ = ["MAX_MESSAGE_BYTES", "CurveKeys", "LaneClient", "LaneServer"]

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20


class LaneServer:
    """The end that many clients connect to. Made by `bind`, ended by `close`."""

    endpoint: str  # the real one, port filled in

    def __init__(self, accepts: Any, on_message: Callable[[str, Any], None], high_water: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._on_message = on_message
        self._socket = LoopSocket(
            zmq.ROUTER, self._receive, options=_limits(high_water) | {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1}
        )

    @classmethod
    async def bind(
        cls,
        endpoint: str,
        accepts: Any,
        on_message: Callable[[str, Any], None],
        *,
        high_water: int = 1000,
        curve: CurveKeys | None = None,
    ) -> LaneServer:
        """Listen on `endpoint` ("ipc:///run/x.sock", "tcp://127.0.0.1:*"); `on_message(peer, message)` for each `accepts` that comes.

        `high_water` bounds the messages queued for one peer.
        Raises: OSError (in use by a living server, no such folder), ValueError (beyond loopback without keys).
        """
        lane = cls(accepts, on_message, high_water)
        try:
            lane.endpoint = lane._socket.bind(endpoint, curve)
        except BaseException:
            await lane.close(linger_s=0)
            raise
        return lane

    def send(self, peer: str, message: Any) -> None:
        """Queue `message` for `peer`; never waits. Raises Broken (unknown or gone), WouldBlock (its queue is full), TooLarge, Closed."""
        data = _encode(message)
        try:
            self._socket.send((peer.encode(errors="surrogateescape"), data))
        except Broken:
            raise Broken(f"{self.endpoint}: no peer {peer!r} is connected") from None

    async def close(self, *, linger_s: float = 1.0) -> None:
        """Send what is queued, at most `linger_s` long, and take the ipc file away. Idempotent."""
        await self._socket.close(linger_s)

    def _receive(self, frames: list[bytes]) -> None:
        peer = frames[0].decode(errors="surrogateescape")
        message = _decode(self._decoder, frames[1:], peer)
        if message is not None:
            self._on_message(peer, message)


class LaneClient:
    """The end with a name, by which the server calls it. Made by `connect`, ended by `close`."""

    endpoint: str

    def __init__(self, name: str, accepts: Any, on_message: Callable[[Any], None], high_water: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._on_message = on_message
        options: dict[int, int | bytes] = {
            zmq.ROUTING_ID: name.encode(),
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
        }
        self._socket = LoopSocket(zmq.DEALER, self._receive, options=_limits(high_water) | options)

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        name: str,
        accepts: Any,
        on_message: Callable[[Any], None],
        *,
        high_water: int = 1000,
        curve: CurveKeys | None = None,
    ) -> LaneClient:
        """Join the server at `endpoint`, which may start later, as `name` (1 to 255 bytes); `on_message(message)` for each `accepts`.

        Raises: ValueError (a name or an endpoint that can not be, or beyond loopback without keys).
        """
        if not 1 <= len(name.encode()) <= 255 or name[0] == "\0":
            raise ValueError(f"lane name: got {name!r}, expected 1 to 255 bytes, the first not zero")
        lane = cls(name, accepts, on_message, high_water)
        try:
            lane._socket.connect(endpoint, curve)
        except BaseException:
            await lane.close(linger_s=0)
            raise
        lane.endpoint = endpoint
        return lane

    def send(self, message: Any) -> None:
        """Queue `message` for the server, also while it is away; never waits. Raises WouldBlock (full), TooLarge, Closed."""
        self._socket.send((_encode(message),))

    async def close(self, *, linger_s: float = 1.0) -> None:
        """Send what is queued, at most `linger_s` long. Idempotent."""
        await self._socket.close(linger_s)

    def _receive(self, frames: list[bytes]) -> None:
        message = _decode(self._decoder, frames, self.endpoint)
        if message is not None:
            self._on_message(message)


_encoder = msgspec.msgpack.Encoder()


def _encode(message: Any) -> bytes:
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"{type(message).__name__}: {len(data)} bytes, a lane carries {MAX_MESSAGE_BYTES}")
    return data


def _decode(decoder: msgspec.msgpack.Decoder[Any], frames: list[bytes], peer: str) -> Any:
    """The message, or None when it is none (logged)."""
    if len(frames) != 1:
        log.warning("lane.undecodable peer=%r frames=%d", peer, len(frames))
        return None
    try:
        return decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("lane.undecodable peer=%r bytes=%d error=%s", peer, len(frames[0]), error)
        return None


def _limits(high_water: int) -> dict[int, int | bytes]:
    return {zmq.SNDHWM: high_water, zmq.RCVHWM: high_water, zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES}
