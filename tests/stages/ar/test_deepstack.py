"""Features of images that go into a thinker's first layers: the tokens of `generate`, in chunks, out of the cache, after preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.blocks import Content  # noqa: E402
from stages.ar.engine import Engine, Job  # noqa: E402
from stages.ar.params import Sampling  # noqa: E402
from stages.ar.runner import Runner  # noqa: E402
from tests.stages.ar import families  # noqa: E402

IMAGE, START, END = 2, 7, 8  # tokens
ROWS, COLUMNS = 2, 3  # of an image's tokens; each is four patches
NEW = 20


def save_vl(folder: Path) -> None:
    """Qwen3-VL: dense layers where Qwen3-Omni has experts."""
    thinker = families.omni_config().thinker_config.to_dict()
    text = {k: v for k, v in families.SMALL.items() if k not in ("eos_token_id", "bos_token_id")}
    config = transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": dict(families.ROPE_3D)},
        vision_config={k: v for k, v in thinker["vision_config"].items() if k != "model_type"},
        image_token_id=IMAGE, video_token_id=3, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)


class Family(NamedTuple):
    model: Any  # transformers' own, for reference
    runner: Runner
    features: Any  # (pixels, grid) -> embeddings and features


@pytest.fixture(scope="module", params=["thinker", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "thinker":
        families.save("thinker", folder)
        model, same = (families.read("thinker", folder) for _ in range(2))
    else:
        save_vl(folder)
        model, same = (transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder).eval().requires_grad_(False) for _ in range(2))
    return Family(model, Runner(same, row_layers=(0, 1, 2)), model.get_image_features)


class Prompt:
    """Text with images in it."""

    def __init__(self, family: Family, *parts: tuple[int, int] | int) -> None:
        """`parts`: (length, seed) of text, or an image's seed."""
        self.tokens: list[int] = []
        self.pixels: list[Any] = []
        self.embeddings: list[tuple[int, Any]] = []
        self.features: list[tuple[int, Any]] = []
        self.contents: list[Content] = []
        positions, at = [], 0
        for part in parts:
            if isinstance(part, tuple):
                dice = random.Random(part[1])
                text = [dice.randrange(20, 140) for _ in range(part[0])]
                positions.append((torch.arange(len(text)) + at).expand(3, -1))
                self.tokens += text
            else:
                positions += [torch.full((3, 1), at), self._image(family, part) + at + 1]
            at = int(positions[-1].max()) + 1
            if not isinstance(part, tuple):
                self.tokens.append(END)
                positions.append(torch.full((3, 1), at))
                at += 1
        self.positions = torch.cat(positions, 1)

    def _image(self, family: Family, seed: int) -> Any:
        pixels = torch.randn(4 * ROWS * COLUMNS, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            seen = family.features(pixels, torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]]), return_dict=True)
        self.tokens.append(START)
        start, count = len(self.tokens), ROWS * COLUMNS
        self.tokens += [IMAGE] * count
        self.pixels.append(pixels)
        self.embeddings.append((start, seen.pooler_output[0]))
        layers = [one if torch.is_tensor(one) else one[0] for one in seen.deepstack_features]  # by image, from transformers 5.24 on
        self.features.append((start, torch.stack(layers, 1)))
        self.contents.append(Content(start, start + count, b"image %d" % seed))
        return torch.stack(torch.meshgrid(torch.zeros(1).long(), torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")).flatten(1)

    def job(self, engine: Engine, **changes: Any) -> Job:
        given = {"embeddings": self.embeddings, "deepstack": self.features, "contents": self.contents, "positions": self.positions}
        return engine.job(self.tokens, Sampling(), **{**given, **changes})

    @torch.inference_mode()
    def generated(self, family: Family) -> list[int]:
        ids = torch.tensor([self.tokens])
        more: dict[str, Any] = {}
        if self.pixels:
            grid = torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]] * len(self.pixels))
            more = {"pixel_values": torch.cat(self.pixels), "image_grid_thw": grid}
            if "VL" in type(family.model).__name__:
                more["mm_token_type_ids"] = (ids == IMAGE).int()
        out = family.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **more
        )
        return out[0, len(self.tokens) :].tolist()


def run(engine: Engine, *jobs: Job) -> list[list[int]]:
    """Two more each step, each to its last token."""
    waiting = list(jobs)
    while waiting or engine.has_work:
        for job in waiting[:2]:
            engine.add(job)
        waiting = waiting[2:]
        for advance in engine.step():
            if len(advance.job.tokens) == advance.job.prompt_length + NEW:
                engine.remove(advance.job)
    assert engine.pool.held == 0
    return [job.tokens[job.prompt_length :] for job in jobs]


def test_images_say_what_generate_says_in_chunks_from_the_cache_and_after_preemption(family: Family) -> None:
    engine = families.engine(family.runner, blocks=25, max_context=96, max_tokens=10)
    prompts = [
        Prompt(family, (3, 1), 1, (5, 2)),
        Prompt(family, 4, (6, 7)),
        Prompt(family, (12, 6)),
        Prompt(family, 5, (5, 5)),
        Prompt(family, (14, 3), 2, (9, 4), 3, (2, 5)),
        Prompt(family, (14, 3), 2, (9, 4), 5, (4, 8)),  # begins like the one before
        Prompt(family, (1, 9), 1, (40, 10)),
    ]
    jobs = [prompt.job(engine) for prompt in prompts]
    expected = [prompt.generated(family) for prompt in prompts]
    assert run(engine, *jobs) == expected
    assert engine.scheduler.preemptions > 0
    again = [prompt.job(engine, **plain) for prompt in prompts for plain in ({"deepstack": (), "contents": ()},)]
    assert [a != b for a, b in zip(run(engine, *again), expected, strict=True)] == [True, True, False, True, True, True, True], (
        "features count"
    )


def test_what_is_cached_of_an_image_is_found_by_its_content(family: Family) -> None:
    engine = families.engine(family.runner)
    prompt = Prompt(family, (10, 1), 1, (7, 2))
    other = Prompt(family, (10, 1), 2, (7, 2))
    expected = prompt.generated(family)
    first, again = prompt.job(engine), prompt.job(engine)
    assert run(engine, first) == run(engine, again) == [expected]
    assert (first.cached, again.cached) == (0, 24)
    unlike, unnamed = other.job(engine), prompt.job(engine, contents=())
    assert run(engine, unlike) == [other.generated(family)]
    assert unlike.cached == 8, "what comes before the image"
    assert run(engine, unnamed) == [expected]
    assert unnamed.cached == 8


def test_tokens_of_an_image_one_at_a_time_among_those_that_decode(family: Family) -> None:
    engine = families.engine(family.runner, max_tokens=8)
    prompt = Prompt(family, (4, 1), 1, (3, 2))
    others = [Prompt(family, (1, n)).job(engine) for n in range(7)]
    for other in others:
        engine.add(other)
    engine.step()
    job = prompt.job(engine)
    engine.add(job)
    for _ in range(job.prompt_length + NEW - 1):
        engine.step()
    assert job.tokens[job.prompt_length :] == prompt.generated(family)
    for gone in (job, *others):
        engine.remove(gone)


def test_hidden_states_are_those_of_the_layers_without_what_is_added_behind_them(family: Family) -> None:
    engine = families.engine(family.runner)
    prompt = Prompt(family, (3, 1), 1, (5, 2))
    job = prompt.job(engine)
    engine.add(job)
    engine.step()
    rows = [engine.rows(job, layer, 0, job.prompt_length) for layer in (0, 1, 2)]
    engine.remove(job)
    more = {"mm_token_type_ids": (torch.tensor([prompt.tokens]) == IMAGE).int()} if "VL" in type(family.model).__name__ else {}
    with torch.inference_mode():
        out = family.model(
            input_ids=torch.tensor([prompt.tokens]),
            attention_mask=torch.ones(1, len(prompt.tokens), dtype=torch.int64),
            pixel_values=prompt.pixels[0],
            image_grid_thw=torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]]),
            output_hidden_states=True,
            **more,
        )
    for ours, theirs in zip(rows, out.hidden_states, strict=False):
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=1e-4)


def test_features_that_the_model_does_not_take_are_refused(family: Family) -> None:
    engine = families.engine(family.runner)
    with pytest.raises(ValueError, match=r"deepstack: the shape \(6, 1, 64\), expected \(n, 2, 64\)"):
        engine.job([IMAGE] * 6, Sampling(), deepstack=[(0, torch.zeros(6, 1, 64))])
