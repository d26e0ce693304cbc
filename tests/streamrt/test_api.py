"""A pipeline as an object: started or joined, asked and streamed, for asyncio and for plain Python."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrt import AsyncPipeline, BadRequest, NotRunning, Pipeline, StageFailed, Unavailable, text_chunk
from tests.pipelines import VOICE_SCRIPT, Running, children_of, up

ECHO = '[pipeline]\nname = "echo"\n[[stage]]\nname = "echo"\nuse = "testing.slow"\n[stage.args]\nchunk_ms = 1\n'


@pytest.fixture(autouse=True, scope="module")
def _own_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """These tests say "the only run that is up", so no other module's may be in the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMRT_RUN_ROOT", str(tmp_path_factory.mktemp("r")))
        patch.setenv("STREAMRT_LOG_ROOT", str(tmp_path_factory.mktemp("logs")))
        yield


@pytest.fixture(scope="module")
def run(_own_root: None) -> Iterator[Running]:
    with up(VOICE_SCRIPT, "--set", "stage.llm.args.delay_ms=5", gateway=False) as running:
        yield running


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(ECHO)
    return path


def test_plain_python_asks_and_streams(run: Running) -> None:
    with Pipeline(name=run.name) as pipeline:
        result = pipeline.generate("What is the capital of France?")
        assert result.text == "The capital of France is Paris. It lies on the Seine, and it is old."
        assert (result.sample_rate_hz, result.audio.dtype) == (24_000, np.float32)
        assert len(result.audio) > 24_000
        assert result.meta["finish_reason"] == "stop"
        assert set(result.timings) == {"llm", "tts"}
        words = [chunk.text for chunk in pipeline.stream("Hello", outputs={"text"}) if chunk.text]
        assert words[:3] == ["The ", "capital ", "of "]
        assert pipeline.url == ""


async def test_asyncio_asks_and_streams(run: Running) -> None:
    async with AsyncPipeline(name="") as pipeline:  # the only one that is up
        assert pipeline.client.pipeline.name == run.name
        one, two = await asyncio.gather(
            pipeline.generate("a", max_tokens=2, outputs={"text"}), pipeline.generate("b", max_tokens=3, outputs={"text"})
        )
        assert (one.text, two.text) == ("The capital ", "The capital of ")
        assert one.meta == {"finish_reason": "length", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        assert one.audio.size == 0
        assert [chunk.text async for chunk in pipeline.stream("c", max_tokens=1, outputs={"text"})] == ["The ", ""]


@pytest.mark.parametrize(
    ("prompt", "more", "text"),
    [
        ("Hi", {"task": "respond"}, "The capital"),
        ([{"role": "user", "content": "Hi"}], {}, "The capital"),
        ([text_chunk("H"), text_chunk("i")], {}, "The capital"),
        ((np.zeros(40_000, np.float32), 16_000), {}, "What is the capital of France?"),
    ],
    ids=["text", "messages", "chunks", "audio"],
)
def test_a_prompt_may_be_many_things(run: Running, prompt: Any, more: dict[str, Any], text: str) -> None:
    with Pipeline(name=run.name) as pipeline:
        assert pipeline.generate(prompt, **more).text.startswith(text)


def test_a_prompt_that_is_nothing_of_these_is_said(run: Running) -> None:
    with Pipeline(name=run.name) as pipeline:
        with pytest.raises(BadRequest, match="prompt: got int, expected text"):
            pipeline.generate(7)


def test_leaving_a_stream_early_cancels_its_request(run: Running) -> None:
    with Pipeline(name=run.name) as pipeline:
        chunks = pipeline.stream("Hello")
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        run.wait_for(lambda: not pipeline.client.state()["open"])
        kept = pipeline.stream("Hello")
        next(kept)
    del kept  # it ends after its pipeline, and quietly
    gc.collect()


async def test_a_generate_that_is_given_up_is_cancelled(run: Running) -> None:
    async with AsyncPipeline(name=run.name) as pipeline:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pipeline.generate("Hello", timeout_s=None)
        assert pipeline.client.state() == {"open": 0, "waiting": 0}


def test_what_was_started_ends_with_the_block(toml: Path) -> None:
    before = set(children_of(os.getpid()))
    pipeline = Pipeline(toml, overrides=["stage.echo.args.repeat=2"])
    for _ in range(2):  # it may be opened again
        with pipeline:
            assert pipeline.generate("hi").text == "hihi"
        assert set(children_of(os.getpid())) == before
    assert list(Path(os.environ["STREAMRT_RUN_ROOT"]).glob("api-*")) == []


def test_a_file_that_can_not_start_says_why(toml: Path) -> None:
    before = set(children_of(os.getpid()))
    with pytest.raises(Unavailable, match="got unknown key"):
        with Pipeline(toml, overrides=["stage.echo.args.repaet=2"]):
            pass
    toml.write_text(ECHO.replace("testing.slow", "testing.crash").replace("chunk_ms = 1", "in_load = true"))
    with pytest.raises(Unavailable, match="this stage was told to fail in load"):
        with Pipeline(toml):
            pass
    assert set(children_of(os.getpid())) == before


async def test_a_start_that_is_given_up_leaves_no_process(toml: Path) -> None:
    before = set(children_of(os.getpid()))
    toml.write_text(ECHO + "load_s = 30\n")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), AsyncPipeline(toml):
            pass
    assert set(children_of(os.getpid())) == before


def test_outside_of_its_block_a_pipeline_says_so(run: Running) -> None:
    pipeline = Pipeline(name=run.name)
    with pytest.raises(RuntimeError, match="not open; use it in a `with` block"):
        pipeline.generate("Hello")
    with pipeline:
        with pytest.raises(RuntimeError, match="open already"), pipeline:
            pass
        stream = pipeline.stream("Hello")
        next(stream)
    for misuse in (lambda: pipeline.generate("Hello"), lambda: next(stream), lambda: pipeline.client):
        with pytest.raises(RuntimeError, match="not open"):
            misuse()


def test_a_path_or_a_name_is_needed_and_must_be_up() -> None:
    for kind in (Pipeline, AsyncPipeline):
        with pytest.raises(ValueError, match="give either the path"):
            kind()
        with pytest.raises(ValueError, match="give either the path"):
            kind("p.toml", name="x")
    with pytest.raises(NotRunning, match='no pipeline "nobody" is up'), Pipeline(name="nobody"):
        pass


def test_errors_of_a_stage_come_through(tmp_path: Path) -> None:
    crash = '[pipeline]\nname = "crash"\n[[stage]]\nname = "c"\nuse = "testing.crash"\n'
    with up(crash, gateway=False) as run, Pipeline(name=run.name) as pipeline:
        for _ in range(2):
            with pytest.raises(StageFailed, match="RuntimeError: this stage was told to raise"):
                pipeline.generate("raise")
        with pytest.raises(StageFailed):
            list(pipeline.stream("raise"))
        assert pipeline.generate("well").text == "well"
