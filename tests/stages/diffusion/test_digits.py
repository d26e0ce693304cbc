"""The example `05_digits` as a whole: trained, served, and read back by a classifier that has seen the same data."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from streamrt import AsyncPipeline  # noqa: E402
from tests.perf.bench_digits import VARIANTS, draw, read_right, reader  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples/05_digits"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What train.py makes."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    done = subprocess.run([sys.executable, str(EXAMPLE / "train.py"), str(folder)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder


async def drawn(model: Path) -> np.ndarray:
    """100 digits of the served model: ten requests at a time, ten images each."""
    options = [f'stage.draw.args.model="{model}"', "stage.draw.args.max_queued=100"]
    async with AsyncPipeline(EXAMPLE / "pipeline.toml", overrides=options) as pipeline:
        asked = [pipeline.generate(f"draw a {digit}", n=10, seed=1000 * digit, timeout_s=300) for digit in range(10)]
        results = await asyncio.gather(*asked)
    # Images of one request may end in any order; all of them show its digit.
    images = [chunk.tensors["image"] for result in results for chunk in result.chunks if chunk.modality == "image" and chunk.tensors]
    return np.stack(images)


async def test_at_least_95_of_100_served_digits_are_read_right(model: Path) -> None:
    images = await drawn(model)
    assert images.shape == (100, 32, 32, 3)
    assert read_right(images, reader()) >= 95


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.endswith(", high")])  # what passes "fast" passes "high"
@pytest.mark.filterwarnings("ignore:::torchao")
@pytest.mark.filterwarnings("ignore:::cache_dit")
@pytest.mark.filterwarnings("ignore:::torch")
def test_with_each_cache_and_quantization_at_least_nine_of_ten_are(name: str, model: Path) -> None:
    images, _ = draw(model, *VARIANTS[name], count=3)
    assert read_right(images, reader()) >= 27


def test_draw_prints_a_seven(model: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "draw.py"), "draw a 7", "--model", str(model), "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first == "denoised in 12 steps"
    shades = " .:-=+*#%@"
    grey = np.array([[shades.index(shade) for shade in row.ljust(32)] for row in rows]) * 255 // 9
    assert reader()(np.repeat(grey, 2, axis=0)[None, ..., None].astype(np.uint8)) == [7]
