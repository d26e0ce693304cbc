"""An 8B language model on one GPU: milliseconds a token, tokens a second, time to the first token; ours beside plain transformers.

    python tests/perf/bench_ar_gpu.py [--json FILE] [--small] [--weights int8|float8] [--bare-graph] [--only SECTION ...] [--skip SECTION ...]

Random bfloat16 weights of Qwen3-8B's shape, made on the device; greedy; nothing is downloaded. Figures are medians. Every section stands
alone: one that fails prints its traceback and the others go on. docs/performance.md has the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

BLOCK = 16
MAX_CONTEXT = 4096
SHAPE = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_8B = {**SHAPE, "intermediate_size": 12288, "vocab_size": 151936}
SMALL = {**SHAPE, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 3072, "vocab_size": 32768}
BATCHES = (1, 8, 64)


class Report:
    """Figures by name, printed as they come."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.figures: dict[str, Any] = {}

    def add(self, name: str, value: Any, unit: str = "") -> None:
        self.figures[name] = value
        shown = f"{value:,.3f}" if isinstance(value, float) else value
        print(f"[{time.perf_counter() - self.began:6.1f} s] {name:56} {shown} {unit}", flush=True)


report = Report()


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """The benchmark outlives a section that fails: machines' time is scarce, and the others' figures still count."""
    began = time.perf_counter()
    try:
        yield
    except Exception:  # noqa: BLE001  as said above; the traceback is printed
        report.add(f"FAILED {name}", traceback.format_exc(limit=-6))
    finally:
        report.add(f"seconds: {name}", round(time.perf_counter() - began, 2), "s")


def milliseconds(run: Callable[[], Any], times: int, warm: int = 2) -> float:
    """Median time of one `run`, by the wall, the device's work included."""
    for _ in range(warm):
        run()
    took = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def device_ms(run: Callable[[], Any], times: int) -> float:
    """Time of one `run` on the device when many are queued."""
    run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def graph_ms(run: Callable[[], Any], times: int = 5) -> float:
    """Time of one `run` as a graph on the device; of many kernels, so that what a launch costs the host does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return device_ms(graph.replay, times)


def make_model(shape: dict[str, int]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", max_position_embeddings=40960, tie_word_embeddings=False, **shape)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 30000, (count,), generator=generator).tolist()


# -- plain transformers


@torch.inference_mode()
def plain_reference(model: Any) -> torch.Tensor:
    """(200, vocabulary) logits of a prompt in float32, to compare with; what plain bfloat16 is off is reported."""
    ids = torch.tensor([tokens(200, 1)], device="cuda")
    got = model(input_ids=ids, use_cache=False).logits[0].float()
    exact: torch.Tensor = copy.deepcopy(model).float()(input_ids=ids, use_cache=False).logits[0]
    report.add("correct: plain bfloat16 beside float32, relative error", float((got[184:] - exact[184:]).norm() / exact[184:].norm()))
    return exact


@torch.inference_mode()
def plain(model: Any) -> None:
    ids = torch.tensor([tokens(1024, 2)], device="cuda")
    report.add("plain: forward of 1,024 tokens", milliseconds(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), 3, 1), "ms")
    for rows in BATCHES:
        prompt = torch.tensor([tokens(32, n) for n in range(rows)], device="cuda")
        mask = torch.ones_like(prompt)

        def generate(new: int) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            model.generate(prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)  # noqa: B023
            torch.cuda.synchronize()
            return (time.perf_counter() - began) * 1e3

        generate(2)
        step = (generate(9) - generate(1)) / 8
        report.add(f"plain: generate(), batch {rows}", step, "ms a step")
        report.add(f"plain: generate(), batch {rows}, tokens/s", rows * 1e3 / step)


@torch.inference_mode()
def bare_graph(model: Any) -> None:
    """The same modules under one CUDA graph, with transformers' static cache of 512 tokens."""
    import inspect

    from transformers import StaticCache

    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache = StaticCache(config=model.config, max_cache_len=512)
    ids = torch.tensor([[5]], device="cuda")
    position = torch.tensor([[100]], device="cuda")

    def run() -> torch.Tensor:
        return model(input_ids=ids, position_ids=position, use_cache=True, **{name: cache}).logits

    for _ in range(2):
        run()
    report.add("bare graph: batch 1", graph_ms(run), "ms a token")


# -- ours


def make_engine(model: Any, weights: Any) -> Any:
    from stages.ar.cuda.runner import CudaRunner
    from stages.ar.engine import Engine

    began = time.perf_counter()
    runner = CudaRunner(model, weights=weights, progress=lambda text: print(f"    {text}", flush=True))
    blocks = 64 * 1024 // BLOCK + 1
    engine = Engine(runner, blocks=blocks, block_size=BLOCK, max_tokens=2048, max_sequences=64, max_context=MAX_CONTEXT, revision=b"bench")
    report.add("ours: engine made, graphs captured", time.perf_counter() - began, "s")
    for name, value in runner.describe().items():
        report.add(f"ours: {name}", value)
    return engine


def drive(engine: Any, prompts: list[list[int]], new: int) -> tuple[list[list[float]], list[list[int]], float]:
    """All prompts at once, `new` tokens each: when each token came, in seconds since the start, the tokens, and the whole time."""
    from stages.ar.params import Sampling

    jobs = [engine.job(prompt, Sampling(0.0, 1.0, 0)) for prompt in prompts]
    came: dict[Any, list[float]] = {job: [] for job in jobs}
    torch.cuda.synchronize()
    began = time.perf_counter()
    for job in jobs:
        engine.add(job)
    while engine.has_work:
        for advance in engine.step():
            times = came[advance.job]
            times.append(time.perf_counter() - began)
            if len(times) == new:
                engine.remove(advance.job)
    took = time.perf_counter() - began
    return list(came.values()), [job.tokens[job.prompt_length :] for job in jobs], took


def step_ms(times: list[list[float]]) -> float:
    """Median time between two tokens of a sequence, the first ones left out."""
    gaps = [b - a for came in times for a, b in zip(came[4:], came[5:], strict=False)]
    return statistics.median(gaps) * 1e3


def ours_correct(engine: Any, expected: torch.Tensor) -> None:
    """The engine's logits beside plain transformers' in float32, of a prompt in one pass, and token by token under graphs of 1 and of more rows."""
    from stages.ar.attention import Prefill
    from stages.ar.runner import Batch

    ids = tokens(200, 1)
    store = engine.runner.store
    none = torch.zeros(0, dtype=torch.int32)

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got.float() - want).norm() / want.norm())

    def prefill(first: int, upto: int, start: int = 0) -> torch.Tensor:
        blocks = torch.arange(first, first + -(-len(ids) // BLOCK), dtype=torch.int32)
        at = torch.arange(start, upto)
        batch = Batch(
            torch.tensor(ids[start:upto]), at, first * BLOCK + at, 0, none.view(0, 0), none, (Prefill(0, upto - start, upto, blocks),),
            torch.arange(max(0, upto - start - 16), upto - start),
        )  # fmt: skip
        return engine.runner.forward(batch).logits.clone()

    report.add("correct: prompt of 200, relative error", error(prefill(1, 200), expected[184:200]))
    prefill(1, 100)
    report.add("correct: its second chunk, relative error", error(prefill(1, 200, 100), expected[184:200]))
    for rows in (1, 3, 64):
        firsts = [1 + 16 * n for n in range(rows)]
        for first in firsts:
            for keys in (*store.keys, *store.values):
                keys[first : first + 16].zero_()
            prefill(first, 190)
        worst = 0.0
        for at in range(190, 196):
            tables = torch.tensor([list(range(first, first + 13)) for first in firsts], dtype=torch.int32)
            batch = Batch(
                torch.tensor([ids[at]] * rows), torch.tensor([at] * rows), torch.tensor([first * BLOCK + at for first in firsts]), rows,
                tables, torch.tensor([at + 1] * rows, dtype=torch.int32), (), torch.arange(rows),
            )  # fmt: skip
            got = engine.runner.forward(batch).logits
            worst = max(worst, *(error(row, expected[at]) for row in got))
        report.add(f"correct: decoding {rows} rows, worst relative error", worst)


def ours_latency(engine: Any) -> None:
    for rows in BATCHES:
        times, _, _ = drive(engine, [tokens(128, 10 * n + rows) for n in range(rows)], 96)
        report.add(f"ours: engine, batch {rows}", step_ms(times), "ms a step")
    for rows in BATCHES:
        graph = engine.runner._graphs._graphs[rows][0]
        report.add(f"ours: graph alone, batch {rows}, short contexts", device_ms(graph.replay, 20), "ms a step")


def ours_first_token(engine: Any) -> None:
    took = []
    for n in range(7):
        times, _, _ = drive(engine, [tokens(1024, 100 + n)], 2)
        took.append(times[0][0] * 1e3)
    report.add("ours: first token of a 1,024-token prompt", statistics.median(took[2:]), "ms")
    report.add("ours: first token of a 1,024-token prompt, all", [round(t, 1) for t in took], "ms")
    times, _, _ = drive(engine, [tokens(1024, 106)], 2)
    report.add("ours: the same again, from the prefix cache", times[0][0] * 1e3, "ms")


def ours_throughput(engine: Any) -> None:
    for prompt, new in ((32, 128), (128, 256)):
        prompts = [tokens(prompt, 1000 * prompt + n) for n in range(64)]
        times, _, took = drive(engine, prompts, new)
        name = f"ours: 64 requests at once, {prompt} tokens in, {new} out"
        report.add(f"{name}, tokens/s", 64 * new / took)
        report.add(f"{name}, ms a step", step_ms(times), "ms")
    engine.runner.runs_ahead = False
    prompts = [tokens(32, 5000 + n) for n in range(64)]
    _, _, took = drive(engine, prompts, 128)
    report.add("ours: 64 requests, 32 in, 128 out, not ahead, tokens/s", 64 * 128 / took)
    times, _, _ = drive(engine, [tokens(128, 7)], 64)
    report.add("ours: engine, batch 1, not ahead", step_ms(times), "ms a step")
    engine.runner.runs_ahead = True


def host_cost(engine: Any) -> None:
    """What the engine itself costs on the host: a step of 64 without the device's part."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    prompts = [tokens(32, 9000 + n) for n in range(64)]
    profile.enable()
    drive(engine, prompts, 40)
    profile.disable()
    stats = pstats.Stats(profile)
    rows = sorted(((tottime, calls, name) for name, (_, calls, tottime, _, _) in stats.stats.items()), reverse=True)[:14]  # type: ignore[attr-defined]
    for tottime, calls, (file, _, function) in rows:
        print(f"    {tottime * 1e3:8.1f} ms {calls:7} {Path(file).name}:{function}", flush=True)


def kernels_of_a_step(engine: Any) -> None:
    """Where a step's time on the device goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    def show(name: str, run: Callable[[], Any], times: int) -> None:
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(times):
                run()
            torch.cuda.synchronize()
        print(f"  {name}", flush=True)
        events = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        for event in events:
            total, count = event.self_device_time_total / times, event.count / times
            print(f"    {total:9.1f} us {count:6.1f} x {total / max(count, 1e-9):8.2f} us  {event.key[:110]}", flush=True)

    for rows in (1, 64):
        drive(engine, [tokens(256, 77 + n) for n in range(rows)], 4)  # leaves its inputs in the graph
        show(f"decoding, {rows} rows", engine.runner._graphs._graphs[rows][0].replay, 3)
    n = iter(range(100))
    show("a prompt of 1,024", lambda: drive(engine, [tokens(1024, 300 + next(n))], 1), 1)


@torch.inference_mode()
def products(engine: Any) -> None:
    """How fast each product reads its weights: cuBLAS, and ours with several launches. A graph over all layers, so nothing stays in the L2."""
    import torch.nn.functional as F

    from stages.ar.cuda import kernels

    layers = engine.runner.inner.layers
    for name, glu in (("qkv_proj", False), ("o_proj", False), ("gate_up_proj", True), ("down_proj", False)):
        weights = [getattr(layer, name).weight for layer in layers]
        n, k = weights[0].shape
        nbytes = sum(w.nbytes for w in weights)
        for rows in BATCHES:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            ms = graph_ms(lambda: [F.linear(x, w) for w in weights])  # noqa: B023
            report.add(f"product: {name}, {rows} rows, cuBLAS", nbytes / ms / 1e9, "TB/s")
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        norm = (torch.ones(k, device="cuda", dtype=torch.bfloat16), 1e-6)
        found = {}
        for launch in ((1, 2048, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (8, 512, 4), (2, 2048, 8)):
            ms = graph_ms(lambda: [kernels.matvec(x, w, norm=norm, glu=glu, launch=launch) for w in weights])  # noqa: B023
            found[str(launch)] = round(nbytes / ms / 1e9, 3)
        report.add(f"product: {name}, ours by launch", found, "TB/s")
    head = engine.runner.head.weight
    x = torch.randn(1, head.shape[1], device="cuda", dtype=torch.bfloat16)
    report.add("product: head, 1 row, cuBLAS", head.nbytes / graph_ms(lambda: [F.linear(x, head) for _ in range(4)]) * 4 / 1e9, "TB/s")
    found = {}
    for launch in ((4, 1024, 4), (8, 512, 4), (8, 1024, 4)):
        ms = graph_ms(lambda: [kernels.matvec(x, head, launch=launch) for _ in range(4)])  # noqa: B023
        found[str(launch)] = round(head.nbytes * 4 / ms / 1e9, 3)
    report.add("product: head, ours by launch", found, "TB/s")


@torch.inference_mode()
def attention(engine: Any) -> None:
    """The paged kernel over contexts of one length, by its launch; every layer's memory in turn."""
    from stages.ar.cuda import paged

    store = engine.runner.store
    heads, dim, kv_heads = engine.runner.config.num_attention_heads, engine.runner.config.head_dim, store.keys[0].shape[2]
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def measure(rows: int, context: int, tile: int, splits: int, warps: int, stages: int) -> float:
        """Microseconds a layer."""
        count = -(-context // BLOCK)
        tables = (torch.randperm(rows * count) + 1).to(torch.int32).view(rows, count).cuda()
        lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        launch = {"num_warps": warps, "num_stages": stages}

        def run() -> None:
            for keys, values in zip(store.keys, store.values, strict=True):
                paged.paged_decode_attention(q, keys, values, tables, lens, scale=0.1, splits=splits, launch=launch)

        usual, paged.TILE = paged.TILE, tile
        try:
            return graph_ms(run, 3) * 1e3 / len(store.keys)
        finally:
            paged.TILE = usual

    for rows, context in ((1, 512), (1, 4000), (64, 512)):
        splits = paged.split_count(rows, kv_heads, MAX_CONTEXT, processors)
        nbytes = 2 * rows * context * kv_heads * dim * 2
        variants = [
            (64, splits, 4, 3),
            (32, splits, 4, 3),
            (128, splits, 4, 2),
            (64, splits, 8, 3),
            (64, 2 * splits, 4, 3),
            (32, splits, 2, 4),
        ]
        found = {variant: round(measure(rows, context, *variant), 2) for variant in variants}
        report.add(f"attention: {rows} rows of {context}", found[variants[0]], f"us a layer, {nbytes / found[variants[0]] / 1e6:.2f} TB/s")
        report.add(f"attention: {rows} rows of {context}, by (tile, splits, warps, stages)", {str(k): v for k, v in found.items()}, "us")


@torch.inference_mode()
def prompt_attention(engine: Any) -> None:
    """Backends for prompts, fresh shapes and known ones."""
    from stages.ar.cuda import attention as module

    for size in (512, 1024, 4096):
        q, k, v = (torch.randn(size, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
        starts = torch.tensor([0, size], dtype=torch.int32, device="cuda")
        prompts = module.Prompts([size], [size], starts, starts, torch.zeros(0))
        for backend in ("cudnn", "flash", "sdpa"):
            with section(f"prompt attention {backend} {size}"):
                torch.cuda.synchronize()
                began = time.perf_counter()
                got = module._attend_prompts(q, k, v, prompts, 0.1, 0, backend)
                torch.cuda.synchronize()
                first = (time.perf_counter() - began) * 1e3
                known = device_ms(lambda: module._attend_prompts(q, k, v, prompts, 0.1, 0, backend), 10)  # noqa: B023
                want = module._sdpa(q, k, v, prompts, 0.1, 0).float()
                error = float((got.float() - want).norm() / want.norm())
                report.add(f"prompt attention: {backend}, {size}", f"first {first:.1f} ms, then {known:.3f} ms, relative error {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go as JSON")
    parser.add_argument("--small", action="store_true", help="a small model: to see that everything runs")
    parser.add_argument("--weights", choices=["int8", "float8"], help="in 8 bits")
    parser.add_argument(
        "--bare-graph", action="store_true", help="the plain modules under a graph, too; a failed capture spoils what follows"
    )
    parser.add_argument("--only", nargs="*", default=[], help="sections to run")
    parser.add_argument("--skip", nargs="*", default=[], help="sections to leave out")
    args = parser.parse_args()

    def chosen(name: str) -> bool:
        return name not in args.skip and (not args.only or name in args.only)

    import transformers
    import triton

    report.add("versions", f"torch {torch.__version__}, transformers {transformers.__version__}, triton {triton.__version__}")
    report.add("device", torch.cuda.get_device_name())
    model = make_model(SMALL if args.small else QWEN3_8B)
    torch.cuda.synchronize()
    report.add("weights", sum(p.nbytes for p in model.parameters()) / 1e9, "GB")
    expected = plain_reference(model)
    if chosen("plain"):
        with section("plain"):
            plain(model)
    if args.bare_graph:
        with section("bare_graph"):
            bare_graph(model)
    torch.cuda.reset_peak_memory_stats()
    engine = None
    with section("engine"):
        torch.cuda.empty_cache()
        engine = make_engine(model, args.weights)
    if engine is not None:
        parts: dict[str, Callable[[], None]] = {
            "correct": lambda: ours_correct(engine, expected),
            "latency": lambda: ours_latency(engine),
            "first_token": lambda: ours_first_token(engine),
            "throughput": lambda: ours_throughput(engine),
            "kernels": lambda: kernels_of_a_step(engine),
            "host": lambda: host_cost(engine),
            "prompt_attention": lambda: prompt_attention(engine),
            "attention": lambda: attention(engine),
            "products": lambda: products(engine),
        }
        for name, part in parts.items():
            if chosen(name):
                with section(name):
                    part()
            if name == "throughput":
                report.add("peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    if args.json:
        args.json.write_text(json.dumps(report.figures, indent=1, default=str))


if __name__ == "__main__":
    main()
