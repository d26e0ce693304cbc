"""What each cache and each quantization costs in quality and gains in time, on the model of examples/05_digits.

    python tests/perf/bench_digits.py FOLDER [--device cuda] [--only NAME ...] [--count 10] [--picture digits.png] [--json]

For each: COUNT of each digit, one after the other; how many of them a classifier reads right that has learned from the same data, the mean difference
to the images without it (of 255), and milliseconds per image. FOLDER is what examples/05_digits/train.py has made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from stages.diffusion.args import DiffusionArgs  # noqa: E402 - found through the line above
from stages.diffusion.pipeline import DiffusionPipeline  # noqa: E402
from streamrt import Context, Request  # noqa: E402

STEPS = 20
# Name -> arguments of the stage, quality of the requests. The ratios were taken on this model with calibrate=True.
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "lossless"),
    **{
        f"{cache}, {quality}": ({"cache": cache, **({"mag_ratios": [1.0] * STEPS} if cache == "mag" else {})}, quality)
        for cache in ("first_block", "pab", "faster", "taylorseer", "mag", "teacache", "dbcache")
        for quality in ("high", "fast")
    },
    **{how: ({"quantize": {"transformer": how}}, "lossless") for how in ("int8", "int8_dynamic", "fp8")},
    "casting to fp8": ({"casting": "fp8"}, "lossless"),
}
ON_A_GPU: dict[str, tuple[dict[str, Any], str]] = {
    "fp8_dynamic": ({"quantize": {"transformer": "fp8_dynamic"}}, "lossless"),
    "cuda_graphs": ({"cuda_graphs": True}, "lossless"),
    **{
        f"{how}, cuda_graphs": ({"quantize": {"transformer": how}, "cuda_graphs": True}, "lossless")
        for how in ("int8", "fp8", "fp8_dynamic")
    },
}


def draw(folder: Path, args: dict[str, Any], quality: str, count: int = 10, device: str = "cpu") -> tuple[np.ndarray, float]:
    """(10 * count, 32, 32, 3) uint8, `count` of each digit in order, and seconds per image."""
    options = DiffusionArgs(model=str(folder), steps=STEPS, guidance_scale=2.0, **args)
    stage: Any = DiffusionPipeline.configured(options)(options, Context(stage="draw", device=device, resolve=Path))
    engine = stage.make_engine()
    images, times = [], []
    for number in range(-1, 10 * count):  # the first is the warm-up
        request = Request(str(number), "image", {"class_label": max(number, 0) // count, "seed": max(number, 0), "quality": quality})
        began = time.perf_counter()
        engine.submit(request, stage.parse(request))
        engine.end(request.id)
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        times.append(time.perf_counter() - began)
        (image,) = [output.chunk for output in outputs if output.chunk is not None and output.chunk.modality == "image"]
        images.append(image.tensors["image"])
    return np.stack(images[1:]), statistics.median(times[1:])


def reader() -> Any:
    """A classifier of (n, 32, 32, 3) uint8 that has learned scikit-learn's digits."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    data = load_digits()
    classifier = SVC(gamma=0.001, C=10).fit(data.data, data.target)

    def read(images: np.ndarray) -> np.ndarray:
        small = images[..., 0].reshape(len(images), 8, 4, 8, 4).mean((2, 4))
        return classifier.predict(small.reshape(len(images), 64) / 255 * 16)

    return read


def read_right(images: np.ndarray, read: Any) -> int:
    """How many digits, as many of each, in order, are read as what they are."""
    return int((read(images) == np.repeat(np.arange(10), len(images) // 10)).sum())


def save_sheet(images: np.ndarray, file: Path) -> None:
    """Five of each digit, one digit a column, in 16 greys."""
    grid = images[..., 0].reshape(10, 10, 32, 32)[:, :5]  # (digit, number, height, width)
    sheet = grid.transpose(1, 2, 0, 3).reshape(5 * 32, 10 * 32)
    Image.fromarray(sheet).quantize(16).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: with what only a GPU can do besides")
    parser.add_argument("--only", nargs="*", help="besides the first, which the others are compared to")
    parser.add_argument("--count", type=int, default=10, help="of each digit")
    parser.add_argument("--picture", type=Path, help="write some images of the first variant here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    read = reader()
    rows: dict[str, dict[str, float]] = {}
    exact: np.ndarray | None = None
    variants = VARIANTS if args.device == "cpu" else VARIANTS | ON_A_GPU
    for name, (options, quality) in variants.items():
        if exact is not None and args.only is not None and name not in args.only:
            continue
        images, seconds = draw(args.folder, options, quality, args.count, args.device)
        if exact is None:
            exact = images
            if args.picture:
                save_sheet(images, args.picture)
        difference = float(np.abs(images.astype(int) - exact).mean())
        rows[name] = {"right": read_right(images, read), "difference": round(difference, 2), "ms": round(seconds * 1e3, 1)}
        if not args.json:
            print(
                f"{name:<22} {rows[name]['right']:>3} of {len(images)} right   differs by {difference:6.2f}   {seconds * 1e3:7.1f} ms per image",
                flush=True,
            )
    if args.json:
        print(json.dumps({"command": " ".join(["python", *sys.argv]), "steps": STEPS, "rows": rows}))


if __name__ == "__main__":
    main()
