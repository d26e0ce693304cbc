"""The gateway over real sockets and real stages: what every route shares."""

import asyncio
import io
import json
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from gateway.app import TABLE
from streamrt import Client
from streamrt.errors import ConfigError

ASK = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


async def test_health_and_readiness(http):
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    async with http.get("/ready") as response:
        body = await response.json()
        assert (response.status, body["ready"]) == (200, True)
        assert body["stages"]["llm"] == {"ready": True, "replicas": {"llm#0": "ready"}}


async def test_metrics_of_all_processes_are_rendered(http):
    await (await http.post(CHAT, json=ASK)).read()
    async with http.get("/metrics") as response:
        text = await response.text()
    assert response.headers["Content-Type"].startswith("text/plain")
    assert 'streamrt_http_requests_total{route="/v1/chat/completions",status="200"}' in text


async def test_models_are_the_names_that_the_pipeline_answers_to(http):
    async with http.get("/v1/models") as response:
        models = {model["id"]: model for model in (await response.json())["data"]}
    assert {"llm", "tts", "asr", "tone"} <= set(models)
    assert models["tts"]["tasks"] == ["respond", "speak"]
    async with http.get("/v1/models/llm") as response:
        assert (await response.json())["id"] == "llm"
    async with http.get("/v1/models/gpt-9") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_the_spec_lists_every_route_and_its_body(http):
    async with http.get("/openapi.json") as response:
        spec = await response.json()
    assert {(route.method.lower(), route.path) for route in TABLE} == {(m, path) for path, ms in spec["paths"].items() for m in ms}
    assert "messages" in spec["components"]["schemas"]["ChatBody"]["required"]


async def test_the_picture_names_stages_edges_and_replicas(http):
    async with http.get("/api/pipeline") as response:
        picture = await response.json()
    assert [stage["name"] for stage in picture["stages"]] == ["asr", "llm", "tts"]
    assert picture["edges"] == [{"from": "llm", "port": "text", "to": "tts", "modality": "text"}]
    assert {replica["state"] for replica in picture["replicas"]} == {"ready"}


async def test_the_picture_is_streamed_again_when_something_runs(http, pipeline):
    client = await Client.connect(pipeline.client.member.run)
    call = None
    try:
        async with asyncio.timeout(20), http.get("/api/pipeline/events") as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    running = {replica["name"]: replica["running"] for replica in json.loads(line[6:])["replicas"]}
                    call = call or await client.submit("respond", outputs={"text"})  # it waits for its input
                    if running["llm#0"] == 1:
                        break
    finally:
        call.cancel()
        await client.close()


async def test_unknown_urls_and_methods_get_the_one_error_body(http):
    for method, path, status, code in (("GET", "/v1/nothing", 404, "not_found"), ("GET", CHAT, 405, "method_not_allowed")):
        async with http.request(method, path) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_every_response_has_a_request_id_and_keeps_the_callers(http):
    async with http.get("/health") as response:
        assert response.headers["X-Request-Id"].startswith("req_")
    async with http.get("/v1/nothing", headers={"X-Request-Id": "my-id.1"}) as response:
        assert response.headers["X-Request-Id"] == "my-id.1"
    async with http.get("/health", headers={"X-Request-Id": "no spaces"}) as response:
        assert response.headers["X-Request-Id"].startswith("req_")


async def test_without_the_key_only_probes_and_the_page_answer(serving, monkeypatch):
    monkeypatch.setenv("GATEWAY_TEST_KEY", "s3cret")
    async with serving(api_key_env="GATEWAY_TEST_KEY") as session:
        for path in ("/health", "/ready", "/openapi.json"):
            async with session.get(path) as response:
                assert response.status == 200
        for path, key in (("/v1/models", ""), ("/metrics", ""), ("/api/pipeline", "Bearer wrong"), ("/v1/realtime", "")):
            async with session.get(path, headers={"Authorization": key} if key else {}) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with session.get("/v1/models", headers={"Authorization": "Bearer s3cret"}) as response:
            assert response.status == 200


async def test_a_page_of_another_origin_is_refused_and_a_named_one_may_read(serving):
    async with serving(cors_origins=("https://app.example",)) as session:
        async with session.get("/v1/models", headers={"Origin": "https://evil.example"}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
        preflight = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        async with session.options(CHAT, headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
        async with session.post(CHAT, json=ASK, headers={"Origin": "https://app.example"}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, "https://app.example")


async def test_a_body_over_the_limit_is_refused(serving):
    async with serving(max_body="64KiB") as session:
        async with session.post(CHAT, data=b"x" * 100_000) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
        async with session.post("/v1/audio/transcriptions", data={"file": io.BytesIO(b"x" * 100_000)}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
        async with session.post(CHAT, json=ASK) as response:
            assert response.status == 200


async def test_requests_beyond_the_bound_are_told_to_come_back(serving):
    async with serving(max_requests=1) as session:
        async with session.post(CHAT, data=slow_body()) as first:
            pass
        assert first.status == 400
        entered = asyncio.Event()
        held = asyncio.ensure_future(session.post(CHAT, data=held_body(entered)))
        await entered.wait()
        async with asyncio.timeout(10):
            while True:  # the held request is admitted when its headers are read, a moment after they are sent
                async with session.post(CHAT, json=ASK) as response:
                    if response.status == 429:
                        break
        assert response.headers["Retry-After"] == "1"
        async with session.get("/health") as response:
            assert response.status == 200
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def slow_body():
    yield b"{"


async def held_body(entered):
    yield b"{"
    entered.set()
    await asyncio.Event().wait()


async def test_a_body_that_does_not_come_has_a_deadline(serving):
    async with serving(request_timeout_s=0.2) as session, asyncio.timeout(10):
        async with session.post(CHAT, data=held_body(asyncio.Event())) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (408, "body_timeout")


async def test_connections_beyond_the_bound_get_503(serving):
    async with serving(max_connections=1) as session:
        async with session.get("/health") as response:
            await response.read()
        url = urlsplit(str(session._base_url))
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        async with asyncio.timeout(5):
            assert b"503" in (await reader.read()).split(b"\r\n")[0]
        writer.close()


async def test_a_client_that_does_not_read_is_closed_and_its_work_ends(serving):
    async with serving(slow_client_s=0.3) as session:
        url = urlsplit(str(session._base_url))
        body = json.dumps({"input": "a long text. " * 300, "response_format": "wav", "stream_format": "sse"}).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, (url.hostname, url.port))
            head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await loop.sock_sendall(raw, head + body)
            async with asyncio.timeout(20):
                while True:  # the server's end of the connection goes while ours has read nothing
                    async with session.get("/metrics") as response:
                        text = await response.text()
                    if 'streamrt_http_requests_total{route="/v1/audio/speech",status="499"}' in text:
                        break
        assert 'streamrt_cancels_total{cause="disconnect"}' in text


async def test_shutdown_finishes_what_runs_and_takes_nothing_new(serving):
    async with serving() as session:
        entered = asyncio.Event()
        release = asyncio.Event()

        async def body():
            yield json.dumps(ASK)[:-1].encode()
            entered.set()
            await release.wait()
            yield b"}"

        running = asyncio.ensure_future(session.post(CHAT, data=body()))
        await entered.wait()
        async with session.get("/health"):
            pass  # a round trip later the held request is admitted
        session.stop.set()
        async with asyncio.timeout(5):
            while await connects(session):
                pass  # until the listener is closed
        release.set()
        response = await running
        assert response.status == 200
        await session.serving


async def connects(session):
    try:
        async with aiohttp.ClientSession() as other, other.get(session._base_url.with_path("/health")):
            return True
    except aiohttp.ClientConnectionError:
        return False


async def test_shutdown_tells_websockets_to_go(serving):
    async with serving() as session, session.ws_connect("/v1/realtime") as ws:
        assert (await ws.receive_json())["type"] == "session.created"
        session.stop.set()
        async with asyncio.timeout(5):
            while not ws.closed:
                await ws.receive()
        assert ws.close_code == aiohttp.WSCloseCode.GOING_AWAY
        await session.serving


async def test_a_gateway_that_others_can_reach_needs_a_key(serving):
    with pytest.raises(ConfigError, match="without a key"):
        async with serving(host="0.0.0.0"):
            pass


def certificate(folder):
    """A self-signed certificate for localhost, as two PEM files."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    signed = (
        builder.not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return str(folder / "cert.pem"), str(folder / "key.pem")


async def test_tls(serving, tmp_path):
    cert, key = certificate(tmp_path)
    async with serving(tls_cert=cert, tls_key=key) as session:
        assert session._base_url.scheme == "https"
        async with session.get("/health", ssl=False) as response:
            assert response.status == 200
