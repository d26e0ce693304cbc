"""The diffusion stage beside plain diffusers, on the same small DiT of random weights, in one run.

    python tests/perf/bench_diffusion.py [--requests 8] [--steps 20] [--rounds 5] [--json]

One request: the time of one image by the stage over that of `pipeline(...)`. Several at once: images per second by the stage over those of
plain calls one after the other. Rounds alternate between the two; medians are compared. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import cpu

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from stages.diffusion.pipeline import DiffusionPipeline  # noqa: E402 - found through the line above
from streamrt import Chunk, Context, Request, Stage  # noqa: E402


def build(folder: Path, layers: int, width: int, size: int) -> None:
    """A DiT of `layers` blocks of `width` channels on `size` x `size` latents, saved as a diffusers pipeline."""
    import diffusers
    import torch

    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=width // 32,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        sample_size=size,
        patch_size=2,
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=size)
    diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler()).save_pretrained(folder)


async def nothing() -> AsyncIterator[Chunk]:
    return
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=8, help="latents a side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="srt-") as folder, ThreadPoolExecutor(1) as compute:
        build(Path(folder), args.layers, args.width, args.size)
        options = DiffusionPipeline.Args(model=folder, max_running=args.requests, max_batch=2 * args.requests)
        stage = DiffusionPipeline.configured(options)(options, Context(stage="draw", threads=args.threads, resolve=Path, compute=compute))
        compute.submit(stage.load).result()
        report = asyncio.run(measure(stage, args, plain_caller(Path(folder), args.steps), compute))
        stage.close()
    command = "python tests/perf/bench_diffusion.py " + " ".join(sys.argv[1:])
    machine = f"{len(os.sched_getaffinity(0))} CPUs, {cpu()}, Python {platform.python_version()}, {args.threads} threads"
    if args.json:
        print(json.dumps({"machine": machine, "command": command.strip(), **report}))
        return
    print(
        f"machine   {machine}\ncommand   {command}\nmodel     DiT, {args.layers} layers of {args.width}, {args.steps} steps, n = {args.rounds}\n"
    )
    print(
        f"one image             plain {report['plain_one_ms']:8.1f} ms   stage {report['stage_one_ms']:8.1f} ms   {report['one_ratio']:.3f} x the time"
    )
    print(
        f"{args.requests} at once             plain {report['plain_per_s']:8.2f} /s   stage {report['stage_per_s']:8.2f} /s   "
        f"{report['many_ratio']:.2f} x the images"
    )


def plain_caller(folder: Path, steps: int) -> Callable[[int], Any]:
    """`seed -> image` by diffusers itself."""
    import diffusers
    import torch

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)

    def call(seed: int) -> Any:
        generator = torch.Generator("cpu").manual_seed(seed)
        return pipeline(class_labels=[seed], guidance_scale=4.0, generator=generator, num_inference_steps=steps, output_type="np")

    return call


async def measure(stage: Stage, args: argparse.Namespace, plain: Callable[[int], Any], compute: ThreadPoolExecutor) -> dict[str, float]:
    loop = asyncio.get_running_loop()

    async def one(seed: int, name: str) -> None:
        params = {"class_label": seed, "guidance_scale": 4.0, "seed": seed, "num_inference_steps": args.steps}
        async for _ in stage.process(Request(f"{name}-{seed}", "image", params), nothing()):
            pass

    async def timed(work: Any) -> float:
        began = time.perf_counter()
        await work
        return time.perf_counter() - began

    def all_plain() -> None:
        for seed in range(args.requests):
            plain(seed)

    times: dict[str, list[float]] = {"plain_one": [], "stage_one": [], "plain_many": [], "stage_many": []}
    for turn in range(-1, args.rounds):  # the first is the warm-up
        row = {
            "plain_one": await timed(loop.run_in_executor(compute, plain, 1)),
            "stage_one": await timed(one(1, f"one{turn}")),
            "plain_many": await timed(loop.run_in_executor(compute, all_plain)),
            "stage_many": await timed(asyncio.gather(*(one(seed, f"many{turn}") for seed in range(args.requests)))),
        }
        if turn >= 0:
            for name, value in row.items():
                times[name].append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "plain_one_ms": median["plain_one"] * 1e3,
        "stage_one_ms": median["stage_one"] * 1e3,
        "one_ratio": median["stage_one"] / median["plain_one"],
        "plain_per_s": args.requests / median["plain_many"],
        "stage_per_s": args.requests / median["stage_many"],
        "many_ratio": median["plain_many"] / median["stage_many"],
    }


if __name__ == "__main__":
    main()
