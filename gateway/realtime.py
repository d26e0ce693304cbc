"""WS /v1/realtime: OpenAI's Realtime protocol over a `Conversation`.

    socket -> `_read`: frame -> realtime_schema -> a command of the session
    socket <- `_write`: realtime_events <- what the session says, in order, by one task

Knows WebSockets. Decides nothing: `streamrt/session.py` does.

Rules
- A frame that is wrong gets an `error` event with the client's `event_id`, and the session goes on.
- The client's commands are answered in their order; while it does not read what we send, we do not read what it sends.
- Every send has a deadline, `[gateway] slow_client_s`; a client that does not read is cut off.
- A connection that ends, however it ends, ends its calls.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from gateway import realtime_schema as schema
from gateway.limits import REQUEST_ID
from gateway.pcm import RATES_HZ, WireDecoder
from gateway.realtime_events import Frames, error_frame
from gateway.state import CLIENT, CONFIG, GATE, MEDIA
from streamrt.conversation import Conversation, default_settings, usable_voice
from streamrt.errors import Overloaded, UnknownTask
from streamrt.log import get_logger
from streamrt.session import Refused, Wish, random_id

if TYPE_CHECKING:
    from gateway.realtime_events import Frame
    from streamrt import Client
    from streamrt.session import Action, Settings

log = get_logger("gateway.realtime")

MAX_FRAME_BYTES = 21 * 1024 * 1024  # 15 MiB of audio as base64, and the rest of the event
HEARTBEAT_S = 20.0
OFF_LOOP_CHARS = 256 * 1024  # base64 beyond which decoding goes to a thread
PROTOCOL = "realtime"
TIMINGS = "streamrt"  # ?streamrt=1 asks for `streamrt.turn_timings`, which strict clients do not know


async def realtime(request: web.Request) -> web.StreamResponse:
    """GET /v1/realtime, upgraded"""
    client, config = request.app[CLIENT], request.app[CONFIG]
    if not {"respond", "transcribe"} & client.tasks().keys():
        raise UnknownTask('this pipeline has no stage for "respond" or "transcribe", so there is nothing to talk to')
    gate = request.app[GATE]
    gate.check_open()
    if sum(not ws.closed for ws in gate.sockets) >= config.max_sessions:
        raise Overloaded(f"{config.max_sessions} realtime sessions are open, the most that this server takes", retry_after_s=5.0)
    ws = web.WebSocketResponse(protocols=(PROTOCOL,), compress=False, heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES)
    await ws.prepare(request)
    started_s = time.monotonic()
    _count_sessions(client, gate.sockets)
    try:
        async with Conversation(client) as conversation:
            await _Link(request, ws, conversation).run()
    except* Exception:  # a fault of ours in one session: the process and the other sessions go on
        log.exception("session.fault", id=request[REQUEST_ID])
        await ws.close(code=WSCloseCode.INTERNAL_ERROR, message=b"internal error")
    finally:
        gate.sockets.discard(ws)
        _count_sessions(client, gate.sockets)
        log.info("session.done", id=request[REQUEST_ID], s=time.monotonic() - started_s, code=ws.close_code)
    return ws


def _count_sessions(client: Client, sockets: set[web.WebSocketResponse]) -> None:
    client.metrics.set("streamrt_realtime_sessions", client.member.name, value=sum(not ws.closed for ws in sockets))


class _Link:
    """One socket and its conversation."""

    def __init__(self, request: web.Request, ws: web.WebSocketResponse, conversation: Conversation) -> None:
        self._request = request
        self._ws = ws
        self._talk = conversation
        self._client = request.app[CLIENT]
        self._send_s = request.app[CONFIG].slow_client_s
        self._defaults = default_settings(self._client)
        self._decoder = WireDecoder("audio/pcm")
        kind = "transcription" if request.query.get("intent") == "transcription" else "realtime"
        self._shown = session_object(self._client, conversation.id, self._defaults, kind)
        body = schema.convert(self._shown, schema.SessionBody, "session")
        conversation.do(conversation.session.update(schema.settings_of(body, self._defaults, self._defaults.voice)))
        self._shown = shown_as_used(self._client, self._shown, conversation.session.settings)
        self._frames = Frames(self._shown["audio"]["output"]["format"], tells_timings=request.query.get(TIMINGS) == "1")

    async def run(self) -> None:
        """Until either side ends it."""
        self._talk.say({"type": "session.created", "session": self._shown})
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(), name="realtime write")
            await self._read()
            writer.cancel()

    async def _write(self) -> None:
        """Send what there is to say. When there will be no more, or nobody reads, close."""
        try:
            async for event in self._talk:
                for frame in self._frames.of(event):
                    async with asyncio.timeout(self._send_s):
                        await self._ws.send_str(msgspec.json.encode(frame).decode())
            await self._ws.close(message=self._talk.closed.encode())
        except TimeoutError:
            log.warning("client.slow", id=self._request[REQUEST_ID])
            if self._request.transport is not None:
                self._request.transport.abort()
        except ConnectionError:
            pass  # it has gone; the reader sees it too

    async def _read(self) -> None:
        async for message in self._ws:
            await self._talk.room()
            if message.type == WSMsgType.TEXT:
                await self._on_frame(message.data)
            elif message.type == WSMsgType.BINARY:
                self._talk.say(error_frame(Refused("invalid_json", "Binary frames are not understood: an event is JSON in a text frame.")))

    async def _on_frame(self, frame: str) -> None:
        event_id = None
        try:
            event_id, event = schema.parse(frame)
            self._talk.session.touch(time.monotonic())
            await self._on_event(event)
        except schema.BadFrame as bad:
            self._talk.say(error_frame(bad.refused, bad.event_id))
        except Refused as refused:
            self._talk.say(error_frame(refused, event_id))

    async def _on_event(self, event: schema.ClientEvent) -> None:
        talk, session = self._talk, self._talk.session
        match event:
            case schema.Append(audio=audio):
                await talk.append(self._decoder.feed(await self._bytes(audio, "audio")))
            case schema.Commit():
                self._decoder.reset()
                talk.do(session.commit())
            case schema.Clear():
                self._decoder.reset()
                talk.do(session.clear())
            case schema.SessionUpdate(session=update):
                self._update(update)
            case schema.ItemCreate(item=item, previous_item_id=previous_id):
                talk.do(await self._create_item(item, previous_id))
            case schema.ItemRetrieve(item_id=item_id):
                talk.do(session.retrieve_item(item_id))
            case schema.ItemDelete(item_id=item_id):
                talk.do(session.delete_item(item_id))
            case schema.ItemTruncate(item_id=item_id, audio_end_ms=audio_end_ms, content_index=content_index):
                talk.do(session.truncate_item(item_id, audio_end_ms, content_index))
            case schema.ResponseCreate(response=response):
                talk.do(session.create_response(self._wish(response or {})))
            case schema.ResponseCancel(response_id=response_id):
                talk.do(session.cancel_response(response_id or ""))
            case schema.OutputClear():
                if session.active_response:
                    talk.do(session.cancel_response())

    def _update(self, update: dict[str, Any]) -> None:
        shown, body = schema.merged(self._shown, update, self._defaults)
        voice = usable_voice(self._client, schema.voice_name(body.audio.output.voice))
        name = body.audio.input.format.type
        session = self._talk.session
        self._talk.do(session.update(schema.settings_of(body, self._defaults, voice), rate_hz=RATES_HZ[name]))
        if name != self._decoder.name:
            self._decoder = WireDecoder(name)
        self._shown = shown_as_used(self._client, shown, session.settings)
        self._frames.audio_format = self._shown["audio"]["output"]["format"]
        self._talk.say({"type": "session.updated", "session": self._shown})

    async def _create_item(self, raw: dict[str, Any], previous_id: str | None) -> list[Action]:
        item, audio = schema.item_of(schema.convert(raw, schema.ItemBody, "item"), random_id("item"), "item")
        samples = None
        if audio is not None:
            samples = WireDecoder(self._decoder.name).feed(await self._bytes(audio, "item.content"))
            if len(samples) > self._talk.session.limits.buffer_s * self._decoder.rate_hz:
                raise Refused(
                    "invalid_value", f"An item holds at most {self._talk.session.limits.buffer_s:g} s of audio.", param="item.content"
                )
        return self._talk.session.create_item(item, previous_id, samples)

    def _wish(self, raw: dict[str, Any]) -> Wish:
        body = schema.convert(raw, schema.ResponseBody, "response")
        output = (body.audio and body.audio.output) or schema.ResponseOutputBody()
        if output.format is not None and output.format.type != self._frames.audio_format["type"]:
            where = "response.audio.output.format"
            raise Refused("invalid_value", "The audio format is the session's; change it by session.update.", param=where)
        if body.metadata is not None and len(body.metadata) > 16:
            raise Refused(
                "invalid_value", f"`response.metadata` has {len(body.metadata)} pairs, expected at most 16.", param="response.metadata"
            )
        modalities = body.output_modalities or body.modalities
        voice = schema.voice_name(output.voice or body.voice)
        entries: list[Any] = []
        for index, entry in enumerate(body.input or ()):
            where = f"response.input[{index}]"
            item_body = schema.convert(entry, schema.ItemBody, where)
            if item_body.type == "item_reference":
                entries.append(item_body.id or "")
                continue
            item, audio = schema.item_of(item_body, random_id("item"), where)
            if audio is not None:
                raise Refused("invalid_value", "Audio is given by conversation.item.create; refer to that item here.", param=where)
            entries.append(item)
        return Wish(
            instructions=body.instructions,
            modality=None if modalities is None else "audio" if "audio" in modalities else "text",
            voice=usable_voice(self._client, voice) if voice else None,
            max_tokens=body.max_output_tokens if isinstance(body.max_output_tokens, int) else None,
            tools=None if body.tools is None else tuple(body.tools),
            tool_choice=body.tool_choice,
            in_conversation=body.conversation != "none",
            metadata=body.metadata,
            input=None if body.input is None else tuple(entries),
        )

    async def _bytes(self, audio: str, param: str) -> bytes:
        if len(audio) < OFF_LOOP_CHARS:
            return schema.audio_bytes(audio, param)
        return await self._request.app[MEDIA].run(schema.audio_bytes, audio, param)


def session_object(client: Client, session_id: str, settings: Settings, kind: str) -> Frame:
    """The session as it is when nobody has changed it."""
    pcm = {"type": "audio/pcm", "rate": 24000}
    detection = settings.turn_detection
    return {
        "type": kind,
        "object": "realtime.session",
        "id": session_id,
        "model": client.pipeline.name,
        "expires_at": int(time.time() + client.pipeline.session.max_session_s),
        "output_modalities": [settings.modality],
        "instructions": settings.instructions,
        "audio": {
            "input": {
                "format": dict(pcm),
                "transcription": {"model": _hearing_model(client)},
                "noise_reduction": None,
                "turn_detection": None if detection is None else schema.server_vad(detection),
            },
            "output": {"format": dict(pcm), "voice": settings.voice, "speed": settings.speed},
        },
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
        "include": None,
    }


def shown_as_used(client: Client, shown: Frame, settings: Settings) -> Frame:
    """`shown`, with what the pipeline uses in place of what was asked."""
    audio = shown["audio"]
    heard = dict(audio["input"])
    if heard.get("transcription") is not None:
        heard["transcription"] = {**heard["transcription"], "model": _hearing_model(client)}
    if settings.turn_detection is None:
        heard["turn_detection"] = None
    spoken = {**audio["output"], "voice": settings.voice, "speed": settings.speed}
    return {
        **shown,
        "output_modalities": [settings.modality],
        "instructions": settings.instructions,
        "tools": list(settings.tools),
        "tool_choice": settings.tool_choice,
        "max_output_tokens": shown.get("max_output_tokens") or "inf",
        "audio": {"input": heard, "output": spoken},
    }


def _hearing_model(client: Client) -> str:
    route = client.tasks().get("transcribe")
    return "" if route is None else str(client.describe(route.entry).get("model", route.entry))
