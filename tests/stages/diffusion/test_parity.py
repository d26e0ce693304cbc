"""Every pipeline: requests that arrive at different steps, with seeds and step counts of their own, give what plain diffusers calls give."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
diffusers = pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.denoising import Denoising, OnStep  # noqa: E402
from stages.diffusion.engine import Inputs  # noqa: E402
from stages.diffusion.loading import extra_components  # noqa: E402
from stages.diffusion.params import Job  # noqa: E402
from stages.diffusion.pipeline import DiffusionPipeline, call_arguments  # noqa: E402
from streamrt import Chunk, Context, Output, Request  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

FAST = ("dit", "flux", "qwenimage")
ALL = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in PIPELINES]
TOLERANCE = 1e-5

pytestmark = [  # what the libraries do to each other
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
]


class Bench:
    """A stage's engine driven step by step, and the same pipeline loaded once more, to be called plainly."""

    def __init__(self, folder: Path, task: str, **args: Any) -> None:
        options = msgspec.convert({"model": str(folder), "task": task, **args}, DiffusionPipeline.Args)
        self.stage = DiffusionPipeline.configured(options)(options, Context(stage="draw", resolve=Path))
        self.engine = self.stage.make_engine()
        self.outputs: list[Output] = []
        self.made: dict[int, np.ndarray] = {}  # seed -> what the pipeline gave, as floats
        self._jobs: dict[int, tuple[Job, Inputs]] = {}
        self._make, self.engine._make = self.engine._make, self._record

    def _record(self, job: Job, seed: int, inputs: Inputs, on_step: OnStep) -> Denoising:
        denoising = self._make(job, seed, inputs, on_step)
        finish = denoising.finish
        self._jobs[seed] = job, inputs

        def recorded() -> Any:
            result = finish()
            self.made[seed] = array_of(result)
            return result

        denoising.finish = recorded
        return denoising

    def submit(self, name: str, params: dict[str, Any], images: Iterable[Chunk] = ()) -> None:
        request = Request(name, self.stage.tasks[0], params)
        self.engine.submit(request, self.stage.parse(request))
        for image in images:
            self.engine.feed(name, image)
        self.engine.end(name)

    def step(self) -> None:
        self.outputs += self.engine.step()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def plain(self, seed: int) -> np.ndarray:
        """What diffusers gives for the request that had `seed`, called by itself."""
        pipeline = diffusers.DiffusionPipeline.from_pretrained(self.stage.args.model, **extra_components(Path(self.stage.args.model)))
        pipeline.set_progress_bar_config(disable=True)
        return array_of(pipeline(**call_arguments(self.stage.accepts, self._jobs[seed][0], seed, self._jobs[seed][1])))

    def failures(self) -> list[Exception]:
        return [output.error for output in self.outputs if output.error is not None]


def array_of(result: Any) -> np.ndarray:
    parts = [
        np.asarray(result[name]).astype(np.float64).ravel()
        for name in ("images", "frames", "audio", "audios")
        if result.get(name) is not None
    ]
    return np.concatenate(parts)


@pytest.fixture
def image() -> Chunk:
    gradient = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    return Chunk("image", {"image": gradient})


@pytest.mark.parametrize("name", ALL)
def test_requests_of_all_steps_at_once_give_what_plain_calls_give(name: str, tmp_path: Path, image: Chunk) -> None:
    tiny = PIPELINES[name]
    bench = Bench(build(name, tmp_path), tiny.task)
    arrivals = {0: [("a", 11, 6), ("gone", 99, 6)], 3: [("b", 12, 4)], 5: [("c", 13, 5)], 9: [("d", 14, 3)]}
    turn = 0
    while turn <= max(arrivals) or bench.engine.has_work():
        for request, seed, steps in arrivals.get(turn, ()):
            params = {**tiny.params, "seed": seed, "num_inference_steps": steps}
            if "prompt" in params:  # of different lengths
                params["prompt"] += " and a dog" * (seed % 3)
            bench.submit(request, params, [image] if tiny.takes_image else ())
        if turn == 8:
            bench.engine.cancel("gone")
        bench.step()
        turn += 1

    assert bench.failures() == []
    assert {output.request_id for output in bench.outputs if output.finished} == {"a", "b", "c", "d"}
    assert bench.engine.rows > bench.engine.calls  # some were made together
    for seed in (11, 12, 13, 14):
        plain = bench.plain(seed)
        assert np.ptp(plain) > 1e-3  # a picture, not a constant
        np.testing.assert_allclose(bench.made[seed], plain, rtol=0, atol=TOLERANCE)
    assert bench.engine.requests == bench.engine.scheduler.running == 0
