"""Every pipeline: requests that arrive at different steps, with seeds and step counts of their own, give what plain diffusers calls give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from streamrt import Chunk  # noqa: E402
from tests.stages.diffusion.bench import Bench  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

FAST = ("dit", "flux", "qwenimage")
ALL = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in PIPELINES]
TOLERANCE = 1e-5

pytestmark = [  # what the libraries do to each other
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
]


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
