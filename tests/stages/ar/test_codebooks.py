"""Frames of several codebooks: the talker with its code predictor inside of each step, text that comes while it speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.codebooks import CodePredictor, Frames  # noqa: E402
from stages.ar.engine import Engine, Job  # noqa: E402
from stages.ar.params import Sampling  # noqa: E402
from stages.ar.sampler import Row  # noqa: E402
from tests.stages.ar import families  # noqa: E402

FRAMES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    families.save("talker", folder)
    return folder


@torch.inference_mode()
def spoken(talker: Any, prompt: Any, texts: Any, filler: Any) -> list[list[int]]:
    """The frames, one request at a time: the talker over all of its inputs again, the code predictor by its own `generate`."""
    inputs, frames = prompt[None], []
    for n in range(FRAMES):
        hidden = talker.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, -1:]
        first = talker.codec_head(hidden[:, -1]).argmax(-1, keepdim=True)
        embedding = talker.get_input_embeddings()(first)
        codes = talker.code_predictor.generate(
            inputs_embeds=torch.cat([hidden, embedding], 1), max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
        frames.append([int(first), *codes[0].tolist()])
        total = embedding + sum(embed(codes[:, g : g + 1]) for g, embed in enumerate(talker.code_predictor.model.codec_embedding))
        text = texts[n] if n < len(texts) else filler
        inputs = torch.cat([inputs, total + text], 1)
    return frames


def test_frames_of_many_requests_equal_those_of_one_whenever_their_text_comes(folder: Path) -> None:
    runner = families.runner("talker", folder)
    engine: Engine = families.engine(runner, blocks=30, max_context=100, max_tokens=16)
    hook = CodePredictor(runner.model)
    talker = families.read("talker", folder)
    torch.manual_seed(0)
    prompts = [torch.randn(length, 64) for length in (5, 19, 33)]
    texts = [torch.randn(count, 64) for count in (3, 0, 9)]
    filler = torch.randn(64)
    jobs: list[Job] = []
    for prompt in prompts:
        state = Frames(Row(Sampling(), [], device=runner.device))
        jobs.append(engine.job([0] * len(prompt), Sampling(), embeddings=[(0, prompt)], hook=hook, state=state))
        engine.add(jobs[-1])
    frames: dict[Job, list[list[int]]] = {job: [] for job in jobs}
    step = 0
    while any(len(line) < FRAMES for line in frames.values()):
        if step == 0:
            hook.end(engine, jobs[1], filler)
        for n, every in ((0, 1), (2, 4)):  # one text embedding in each step, or in every fourth
            if step % every == 0:
                at = step // every
                if at < len(texts[n]):
                    hook.feed(engine, jobs[n], texts[n][at])
                elif at == len(texts[n]):
                    hook.end(engine, jobs[n], filler)
        for advance in engine.step():
            frames[advance.job].append(advance.made.tolist())
            if len(frames[advance.job]) == FRAMES:
                engine.remove(advance.job)
        step += 1
        assert step < 200
    assert engine.pool.held == 0
    for job, prompt, lines in zip(jobs, prompts, texts, strict=True):
        assert frames[job] == spoken(talker, prompt, lines, filler)


def test_the_end_code_has_no_frame(folder: Path) -> None:
    runner = families.runner("talker", folder)
    engine = families.engine(runner)
    free = engine.job([20, 21, 22], Sampling())
    engine.add(free)
    engine.step()
    engine.remove(free)
    state = Frames(Row(Sampling(), [], device=runner.device))
    job = engine.job([20, 21, 22], Sampling(), hook=CodePredictor(runner.model), state=state, ends=(free.tokens[3],))
    engine.add(job)
    (advance,) = engine.step()
    assert advance.sampled.token in job.ends
    assert advance.made is None
    assert not job.is_waiting
    engine.remove(job)
