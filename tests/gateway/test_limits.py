"""Who may come in. Pure decisions; the same over a socket is in test_app.py."""

import asyncio
import socket

import msgspec
import pytest

from gateway import limits
from gateway.app import address_of, listen, tls_context
from gateway.gate import Gate
from streamrt.config import GatewayConfig
from streamrt.errors import ConfigError, Overloaded, Unavailable


@pytest.mark.parametrize(
    ("origin", "allowed", "verdict"),
    [
        ("http://localhost:8000", (), True),
        ("https://localhost:8000", (), True),
        ("http://localhost:3000", (), False),
        ("https://evil.example", (), False),
        ("null", (), False),
        ("https://app.example", ("https://app.example",), True),
        ("http://app.example", ("https://app.example",), False),
        ("https://anything.example", ("*",), True),
    ],
)
def test_pages_of_other_origins_are_refused_unless_named(origin, allowed, verdict):
    assert limits.is_allowed_origin(origin, "localhost:8000", allowed) is verdict


def test_a_key_comes_in_a_header_or_as_a_subprotocol():
    assert limits.keys_of({"Authorization": "Bearer abc"}) == ["abc"]
    assert limits.keys_of({"Authorization": "bearer  abc "}) == ["abc"]
    assert limits.keys_of({"Authorization": "Basic abc"}) == []
    assert limits.keys_of({"Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.abc"}) == ["abc"]
    assert limits.keys_of({}) == []


def test_a_key_that_is_asked_for_and_not_there_stops_the_start():
    config = GatewayConfig(api_key_env="MY_KEY")
    assert limits.api_key(config, {"MY_KEY": " k "}) == "k"
    with pytest.raises(ConfigError, match="MY_KEY"):
        limits.api_key(config, {"MY_KEY": ""})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    limits.check_bind(GatewayConfig(host=host), "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "my-machine"])
def test_a_bind_beyond_loopback_needs_a_key_or_a_word(host):
    with pytest.raises(ConfigError, match="without a key") as caught:
        limits.check_bind(GatewayConfig(host=host), "")
    assert "insecure = true" in caught.value.hint
    limits.check_bind(GatewayConfig(host=host), "key")
    limits.check_bind(GatewayConfig(host=host, insecure=True), "")


async def test_a_full_gate_refuses_and_a_closed_one_drains():
    gate = Gate(max_requests=1)
    with gate.enter():
        with pytest.raises(Overloaded), gate.enter():
            pass
        closing = asyncio.ensure_future(gate.close(within_s=5))
        await asyncio.wait([closing], timeout=0.01)
        assert not closing.done()
        with pytest.raises(Unavailable), gate.enter():
            pass
    await closing


async def test_a_drain_has_a_bound():
    gate = Gate(max_requests=1)
    with gate.enter():
        await gate.close(within_s=0.01)


def test_a_port_in_use_is_named():
    with listen(GatewayConfig(port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        assert address_of(first, secure=False) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} can not be used: Address already in use"):
            listen(GatewayConfig(port=port))


def test_the_kernel_closes_a_client_that_does_not_read_one_big_answer():
    with listen(GatewayConfig(port=0, slow_client_s=2.5)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500


def test_gateway_replicas_share_a_port():
    config = GatewayConfig(port=0, replicas=2)
    with listen(config) as first, listen(msgspec.structs.replace(config, port=first.getsockname()[1])) as second:
        assert first.getsockname() == second.getsockname()


def test_a_certificate_that_can_not_be_read_is_named(tmp_path):
    assert tls_context(GatewayConfig()) is None
    with pytest.raises(ConfigError, match="tls_cert"):
        tls_context(GatewayConfig(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem")))
