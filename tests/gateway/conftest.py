"""One real pipeline of scripted stages for all tests of the gateway, and gateways over it with whatever limits a test needs."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import openai
import pytest
import uvloop

import gateway
from streamrt import Client, Pipeline
from streamrt.config import GatewayConfig

PIPELINE = """
[pipeline]
name = "gateway-tests"

[gateway]
port = 0

[[stage]]
name = "asr"
use = "testing.asr"
[stage.args]
text = " I heard {samples} samples."

[[stage]]
name = "llm"
use = "testing.llm"
[stage.args.replies]
capital = "The capital of France is Paris. It is a large city."
unicode = "你好🌍é"
pick = "Choice {choice} of some."
weather = '''Let me see. <tool_call>
{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "time", "arguments": {}}
</tool_call>'''

[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[stage.args]
ms_per_char = 10
"""

STUDIO = """
[pipeline]
name = "studio-tests"

[gateway]
port = 0
max_body = "2MiB"

[run]
heartbeat_s = 0.1
restart_delay_s = 0.05

[[stage]]
name = "painter"
use = "testing.image"

[[stage]]
name = "camera"
use = "testing.video"

[[stage]]
name = "synth"
use = "testing.sound"
"""

CRASHING = """
[pipeline]
name = "gateway-crash-tests"

[gateway]
port = 0
keepalive_s = 0.1

[run]
restart_delay_s = 0.05

[[stage]]
name = "slow"
use = "testing.slow"
[stage.args]
chunk_ms = 30
repeat = 200

[[stage]]
name = "crash"
use = "testing.crash"
inputs = ["slow"]

[tasks]
respond = "slow"
"""


def pytest_asyncio_loop_factories(config, item):
    """The loop that the gateway process runs on; its transports differ from asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory):
    """Runs of these tests meet no other run of this user."""
    root = tmp_path_factory.mktemp("run")
    root.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMRT_RUN_ROOT", str(root))
        patch.setenv("STREAMRT_LOG_ROOT", str(tmp_path_factory.mktemp("logs")))
        patch.setenv("STREAMRT_STATE_ROOT", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def pipeline(run_folders, tmp_path_factory):
    """The voice pipeline of scripted stages, with its gateway."""
    path = tmp_path_factory.mktemp("voice") / "pipeline.toml"
    path.write_text(PIPELINE)
    with Pipeline(path, gateway=True) as running:
        yield running


@pytest.fixture(scope="session")
def studio(run_folders, tmp_path_factory):
    """Scripted stages that make images, videos and sounds, with their gateway."""
    path = tmp_path_factory.mktemp("studio") / "pipeline.toml"
    path.write_text(STUDIO)
    with Pipeline(path, gateway=True) as running:
        yield running


@pytest.fixture
async def studio_http(studio):
    """A session whose URLs are relative to the studio's gateway."""
    async with aiohttp.ClientSession(studio.url) as session:
        yield session


@pytest.fixture
def work_of(studio_http):
    """`await work_of("painter", running=1)` returns once the stage has so many requests."""

    async def wait(stage, *, running):
        async with studio_http.get("/api/pipeline/events") as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    replicas = [replica for replica in json.loads(line[6:])["replicas"] if replica["stage"] == stage]
                    if replicas and replicas[0]["running"] == running:
                        return

    return wait


@pytest.fixture
async def openai_studio(studio):
    """The official client, at the studio."""
    async with openai.AsyncOpenAI(base_url=f"{studio.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def crashing(run_folders, tmp_path):
    """A pipeline whose stage fails when it is told to."""
    path = tmp_path / "pipeline.toml"
    path.write_text(CRASHING)
    with Pipeline(path, gateway=True) as running:
        yield running


@pytest.fixture
async def http(pipeline):
    """A session whose URLs are relative to the gateway."""
    async with aiohttp.ClientSession(pipeline.url) as session:
        yield session


@pytest.fixture
def serving(pipeline):
    """`async with serving(max_requests=1) as session`: a gateway of the test's own over the same stages."""
    return gateways_over(pipeline)


@pytest.fixture
def studio_serving(studio):
    """The same over the studio's stages."""
    return gateways_over(studio)


def gateways_over(pipeline):
    @asynccontextmanager
    async def serve(**settings):
        config = msgspec.structs.replace(GatewayConfig(port=0), **settings)
        client = await Client.connect(pipeline.client.member.run)
        stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
        running = asyncio.create_task(gateway.serve(client, 0, address.set_result, stop, config))
        try:
            await asyncio.wait([running, address], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running  # it could not start, and says why
            async with aiohttp.ClientSession(await address) as session:
                session.stop = stop
                session.serving = running
                yield session
        finally:
            stop.set()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()

    return serve
