"""Image and video models of real shapes on one GPU: seconds an image, steps a second, memory; the stage's engine beside plain diffusers in one run.

    python tests/perf/bench_diffusion_gpu.py [--only MODEL[:SECTION] ...] [--steps 10] [--json FILE]

Models: qwenimage (20 B), flux (12 B), wan (1.3 B). Random bfloat16 weights, made on the device; nothing is downloaded. Text encoders are left
out: a prompt "SEED TOKENS" stands for so many random embeddings; the rest of each pipeline runs, its VAE too. Plain diffusers is called for one
image after the other. A step's time is that of `--steps` steps less that of 2, so that preparing and decoding do not count; an image's time is
all of it. "ours": `diffusion.pipeline`'s engine with the arguments that the line names. docs/performance.md has the figures.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import diffusers
import msgspec
import torch
from bench_ar_gpu import report, section

from stages.diffusion.apart import call_arguments
from stages.diffusion.engine import DiffusionEngine, Inputs
from stages.diffusion.pipeline import DiffusionPipeline
from streamrt import Context, Request

DTYPE = torch.bfloat16


class Model(NamedTuple):
    make: Callable[[], Any]
    task: str
    shapes: list[dict[str, Any]]  # of requests, the first one's for everything
    tokens: int  # of a prompt
    counts: tuple[int, ...] = (1, 4, 8)  # at once, of the first shape


# -- pipelines of random weights


def on_device(make: Callable[[], Any]) -> Any:
    """A module of random weights. Its buffers are as its code makes them."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        module = make()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, dtype=DTYPE, device="cuda").normal_(0, 0.02)
            if parameter.dim() == 1 and name == "weight" or name == "gamma":
                made.fill_(1)  # of a norm
            setattr(owner, name, torch.nn.Parameter(made, requires_grad=False))
    module = module.to("cuda")
    return module.eval()


@functools.cache
def embeddings(prompt: str, width: int) -> torch.Tensor:
    """(1, tokens, width) of a prompt "SEED TOKENS"."""
    seed, tokens = map(int, prompt.split())
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed)).to("cuda", DTYPE)


def finished(pipeline: Any, encode: Callable[..., Any]) -> Any:
    """`pipeline` with `encode` for its encoders, and a VAE that keeps the latents it decoded last: what is compared."""
    object.__setattr__(pipeline, "encode_prompt", encode)
    decode = pipeline.vae.decode

    def kept(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pipeline.vae.latents = latents.detach().float()
        return decode(latents, *args, **kwargs)

    object.__setattr__(pipeline.vae, "decode", kept)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def qwenimage() -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, time_shift_type="exponential"
    )
    pipeline = diffusers.QwenImagePipeline(
        scheduler=scheduler,
        vae=on_device(diffusers.AutoencoderKLQwenImage),
        text_encoder=None,
        tokenizer=None,
        transformer=on_device(diffusers.QwenImageTransformer2DModel),
    )
    return finished(pipeline, lambda prompt, **_: (embeddings(prompt, 3584), None))


def flux() -> Any:
    vae = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "use_quant_conv": False}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4, "use_post_quant_conv": False}
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=on_device(lambda: diffusers.AutoencoderKL(**vae, **blocks, scaling_factor=0.3611, shift_factor=0.1159)),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=on_device(lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True)),
    )

    def encode(prompt: str, **_: Any) -> Any:
        found = embeddings(prompt, 4096)
        return found, found[:, 0, :768], torch.zeros(found.shape[1], 3, device="cuda", dtype=DTYPE)

    return finished(pipeline, encode)


def wan() -> Any:
    pipeline = diffusers.WanPipeline(
        scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=on_device(diffusers.AutoencoderKLWan),
        text_encoder=None,
        tokenizer=None,
        transformer=on_device(
            lambda: diffusers.WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30)
        ),
    )

    def encode(prompt: str, negative_prompt: str | None = None, **_: Any) -> Any:
        return embeddings(prompt, 4096), embeddings(negative_prompt or "0 512", 4096)

    return finished(pipeline, encode)


MODELS = {
    "qwenimage": Model(qwenimage, "image", [{"width": 512, "height": 512}, {"width": 1024, "height": 1024}], 64),
    "flux": Model(flux, "image", [{"width": 512, "height": 512}, {"width": 1024, "height": 1024}], 512),
    "wan": Model(wan, "video", [{"width": 832, "height": 480, "num_frames": 17, "guidance_scale": 5.0}], 512),
}


# -- both sides


class Ours:
    """The stage's engine around a pipeline, driven as its host drives it."""

    def __init__(self, model: Model, pipeline: Any, **args: Any) -> None:
        options = msgspec.convert({"model": "random", "task": model.task, **args}, DiffusionPipeline.Args)
        self.stage = DiffusionPipeline.configured(options)(options, Context(stage="draw", device="cuda", resolve=Path))
        self.engine: DiffusionEngine = self.stage.engine_of(pipeline)  # type: ignore[attr-defined]
        self.model = model

    def run(self, requests: list[dict[str, Any]]) -> float:
        """Seconds of these at once."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number, params in enumerate(requests):
            request = Request(f"r{number}", self.model.task, params)
            self.engine.submit(request, self.stage.parse(request))  # type: ignore[attr-defined]
            self.engine.end(request.id)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
        return time.perf_counter() - began

    def plain(self, pipeline: Any, requests: list[dict[str, Any]]) -> float:
        """Seconds of these, called one after the other by diffusers itself."""
        jobs = [self.stage.parse(Request("plain", self.model.task, params)) for params in requests]  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            for job in jobs:
                pipeline(**call_arguments(self.stage.accepts, job, job.seeds[0], Inputs()))  # type: ignore[attr-defined]
        return time.perf_counter() - began


def asks(model: Model, shape: dict[str, Any], count: int, steps: int, *, mixed: bool = False, **more: Any) -> list[dict[str, Any]]:
    tokens = [model.tokens + (13 * n if mixed else 0) for n in range(count)]
    return [{**shape, "prompt": f"{n} {tokens[n]}", "seed": n, "num_inference_steps": steps, **more} for n in range(count)]


def size(shape: dict[str, Any]) -> str:
    return f"{shape['width']}x{shape['height']}" + (f"x{shape['num_frames']}" if "num_frames" in shape else "")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


class Side:
    """Figures of one side, by shape and count."""

    def __init__(self, name: str, model: Model, steps: int) -> None:
        self.name, self.model, self.steps = name, model, steps
        self.step_ms: dict[tuple[str, int], float] = {}

    def add(self, shape: dict[str, Any], count: int, run: Callable[[int], float], *, label: str = "") -> None:
        """`run(steps)`: seconds. `count` images at a time."""
        run(2)
        short, long = (min(run(steps) for _ in range(2)) for steps in (2, self.steps))
        step = (long - short) / (self.steps - 2)
        self.step_ms[size(shape) + label, count] = step * 1e3
        name = f"{self.name}: {size(shape)}{label}, {count} at once"
        report.add(name, f"{step * 1e3:8.1f} ms a step, {count / step:6.2f} steps/s, {long / count:6.3f} s an image of {self.steps} steps")

    def beside(self, plain: Side) -> None:
        for (shape, count), step in self.step_ms.items():
            base = plain.step_ms.get((shape, 1)) or plain.step_ms.get((shape.partition(",")[0], 1))
            if base:
                report.add(f"{self.name}: {shape}, {count} at once, x plain calls one after another", round(base * count / step, 2))

    def memory(self) -> None:
        report.add(f"{self.name}: peak memory, GB", round(torch.cuda.max_memory_reserved() / 1e9, 1))
        torch.cuda.reset_peak_memory_stats()


# -- sections


def bench(name: str, steps: int, chosen: Callable[[str], bool]) -> None:
    model = MODELS[name]
    began = time.perf_counter()
    pipeline = model.make()
    weights = sum(p.nbytes for part in pipeline.components.values() if isinstance(part, torch.nn.Module) for p in part.parameters())
    report.add(f"{name}: weights, GB", round(weights / 1e9, 1))
    report.add(f"{name}: made in, s", round(time.perf_counter() - began, 1))
    torch.cuda.reset_peak_memory_stats()
    first = model.shapes[0]

    eager = Ours(model, pipeline)
    plain = Side(f"{name}: plain diffusers", model, steps)
    eager.plain(pipeline, asks(model, first, 1, steps))
    expected = pipeline.vae.latents
    for shape in model.shapes:
        plain.add(shape, 1, lambda n, s=shape: eager.plain(pipeline, asks(model, s, 1, n)))
    guidance = {"negative_prompt": f"99 {model.tokens}", "true_cfg_scale": 4.0}
    if chosen("guided") and name == "qwenimage":
        plain.add(first, 1, lambda n: eager.plain(pipeline, asks(model, first, 1, n, **guidance)), label=", guided")
    took = eager.plain(pipeline, asks(model, first, 4, steps))
    report.add(f"{plain.name}: {size(first)}, 4 one after another", f"{took / 4:.3f} s an image of {steps} steps")
    plain.memory()

    def arm(part: str, large: tuple[int, ...] = (), counts: tuple[int, ...] = (), **args: Any) -> None:
        """`counts`: how many at once, where not the model's; `large`: of the second shape."""
        if not chosen(part):
            return
        named = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items()) or "as it is"
        with section(f"{name}: {part}"):
            ours = Ours(model, pipeline, **args) if args else eager
            side = Side(f"{name}: ours, {named}", model, steps)
            began = time.perf_counter()
            ours.run(asks(model, first, 1, steps))
            report.add(f"{side.name}: first request, s", round(time.perf_counter() - began, 1))
            report.add(f"{side.name}: relative error of latents beside plain diffusers", f"{error(pipeline.vae.latents, expected):.2e}")
            more, label = (guidance, ", guided") if part == "guided" else ({}, "")
            for count in counts or model.counts:
                side.add(first, count, lambda n, c=count: ours.run(asks(model, first, c, n, **more)), label=label)
            if name == "qwenimage" and part in ("graphs", "compiled"):
                side.add(first, 8, lambda n: ours.run(asks(model, first, 8, n, mixed=True)), label=", texts of different lengths")
            for count in large if len(model.shapes) > 1 else ():
                side.add(model.shapes[1], count, lambda n, c=count: ours.run(asks(model, model.shapes[1], c, n)))
            side.beside(plain)
            side.memory()
            if args:
                ours.engine.close()
        torch.cuda.empty_cache()

    arm("eager", (1,))
    if chosen("caches"):
        with section(f"{name}: caches"):
            caches(name, model, pipeline, model.shapes[-1], max(steps, 16))
        torch.cuda.empty_cache()
    arm("graphs", (1,), cuda_graphs=True)
    arm("compiled", (1, 4), cuda_graphs=True, compile=True)
    if name == "qwenimage":
        arm("guided", counts=(1, 8), cuda_graphs=True, compile=True)
    arm("cudnn", (1,), (1,), cuda_graphs=True, compile=True, attention="cudnn")


def caches(name: str, model: Model, pipeline: Any, shape: dict[str, Any], steps: int) -> None:
    """One request alone with each cache: time beside no cache, and what it changes."""
    plain = Ours(model, pipeline)
    ask = asks(model, shape, 1, steps)
    base, exact = min(plain.run(ask) for _ in range(3)), pipeline.vae.latents
    report.add(f"{name}: no cache, {size(shape)}, s an image of {steps} steps", round(base, 3))
    for cache in ("first_block", "teacache", "taylorseer", "pab", "faster", "mag", "dbcache"):
        with section(f"{name}: cache {cache}"):
            more = {"mag_ratios": [1.0] * steps} if cache == "mag" else {}
            ours = Ours(model, pipeline, cache=cache, **more)
            ours.run([{**asks(model, shape, 1, 2)[0], "quality": "fast"}])
            for quality in ("high", "fast"):
                took = ours.run([{**ask[0], "quality": quality}])
                text = f"{base / took:5.2f} x as fast, relative error of latents {error(pipeline.vae.latents, exact):.4f}"
                report.add(f"{name}: cache {cache}, {quality}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="MODEL, or MODEL:SECTION: eager, caches, graphs, compiled, guided, cudnn")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    args = parser.parse_args()
    wanted = [only.partition(":")[::2] for only in args.only]
    report.add("versions", f"torch {torch.__version__}, diffusers {diffusers.__version__}")
    report.add("device", torch.cuda.get_device_name())
    diffusers.utils.logging.set_verbosity_error()
    for name in MODELS:
        sections = {part for model, part in wanted if model == name}
        if sections or not wanted:
            with section(name):
                bench(name, args.steps, lambda part, of=sections: not of or "" in of or part in of)
            embeddings.cache_clear()
            gc.collect()
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(json.dumps(report.figures, indent=1, default=str))


if __name__ == "__main__":
    main()
