"""The autoregressive engine beside transformers' own ways to generate, in one run on one thread: throughput as ratios.

    python tests/perf/bench_ar.py [--pairs 5] [--models 30m,smollm2] [--arms "engine,generate x8"] [--new 96] [--every 2] [--json]
    python tests/perf/bench_ar.py --models 30m --arms companions,aborts

engine        stages.ar: 8 requests, one arrives with every second step (--every 1: with each)
generate x8   `generate` of all 8 as one batch that begins at once
generate x1   `generate` of one after the other
continuous    transformers' continuous batching of all 8 at once, without shared blocks
companions    the engine's 8, and 8 more rows in each pass: requests of one token, which stay to the end
aborts        the same rows, but these 8 are aborted after each pass, and 8 others come. So `aborts / companions` is what aborts cost those who stay
              (both only when they are asked for)
http          `streamrt up` with the engine on one thread, 8 chat requests that stream over HTTP, each when the one before has begun to
              speak (SmolLM2 only, and only when it is asked for)

Greedy, float32, the same prompts in all arms, new ones in each round, so that no cache helps; the arms of a round are shuffled. The median of
the rounds' ratios counts. `join`: steps from a request's arrival to its first token. `prefix`: first token of a 512-token prompt, cold / warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from machine import cpu

from stages.ar.engine import Engine, Job
from stages.ar.params import Sampling
from stages.ar.runner import Runner

REQUESTS, PROMPT, COMPANIONS = 8, 64, 8
ARMS = ("engine", "generate x8", "generate x1", "continuous")
ENGINE_ARMS = ("engine", "companions", "aborts")
# ratio -> arms above, below; pass, stretch
TARGETS = {
    "engine / generate x8": ("engine", "generate x8", 1.0, 1.1),
    "engine / generate x1": ("engine", "generate x1", 3.0, 4.0),
    "engine / continuous": ("engine", "continuous", 1.1, 1.3),
    "http / engine": ("http", "engine", 0.9, 0.95),
    "aborts / companions": ("aborts", "companions", 0.95, 1.0),
}


def model_30m() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def model_smollm2() -> Any:
    from transformers import AutoModelForCausalLM

    from streamrt import weights

    return AutoModelForCausalLM.from_pretrained(weights.fetch("weights:smollm2-135m-instruct"), dtype=torch.float32).eval()


Arm = Callable[[list[list[int]]], None]
MODELS: dict[str, Callable[[], Any]] = {"30m": model_30m, "smollm2": model_smollm2}


class Bench:
    """One model in all arms. The engine has its own copy, as it changes how attention is done."""

    def __init__(self, name: str, new: int, every: int) -> None:
        self.new, self.every = new, every
        self.plain = MODELS[name]()
        self.plain.generation_config.eos_token_id = None
        self.engine = Engine(
            Runner(MODELS[name]()), blocks=1025, block_size=4, max_tokens=128, max_sequences=16, max_context=1024, max_waiting=64
        )
        self.joins: list[int] = []
        self.aborts = 0

    def arm_engine(self, prompts: list[list[int]]) -> None:
        self._serve(prompts, 0, is_aborted=False)

    def arm_companions(self, prompts: list[list[int]]) -> None:
        self._serve(prompts, COMPANIONS, is_aborted=False)

    def arm_aborts(self, prompts: list[list[int]]) -> None:
        self._serve(prompts, COMPANIONS, is_aborted=True)

    def _serve(self, prompts: list[list[int]], companions: int, *, is_aborted: bool) -> None:
        engine, waiting = self.engine, list(prompts)
        step, left = 0, len(prompts)
        arrived: dict[Job, int] = {}
        beside: list[Job] = []
        while left:
            if is_aborted:
                self.aborts += len(beside)
                self._remove(beside)
            while len(beside) < companions:
                beside.append(engine.job([100 + step], Sampling()))
                engine.add(beside[-1])
            if waiting and step % self.every == 0:
                job = engine.job(waiting.pop(0), Sampling())
                engine.add(job)
                arrived[job] = step
            for advance in engine.step():
                if advance.job not in arrived:
                    continue
                made = len(advance.job.tokens) - PROMPT
                if made == 1:
                    self.joins.append(step - arrived[advance.job] + 1)
                if made == self.new:
                    engine.remove(advance.job)
                    left -= 1
            step += 1
        self._remove(beside)

    def _remove(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.engine.remove(job)
        jobs.clear()

    def arm_generate_x8(self, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        self.plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.new, min_new_tokens=self.new)

    def arm_generate_x1(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.arm_generate_x8([prompt])

    def arms(self) -> dict[str, Arm]:
        return {
            "engine": self.arm_engine,
            "companions": self.arm_companions,
            "aborts": self.arm_aborts,
            "generate x8": self.arm_generate_x8,
            "generate x1": self.arm_generate_x1,
            "continuous": self.arm_continuous,
        }

    def arm_continuous(self, prompts: list[list[int]]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.plain.set_attn_implementation("sdpa")
        done = self.plain.generate_batch(
            prompts,
            GenerationConfig(do_sample=False, max_new_tokens=self.new, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(num_blocks=64, page_size=32, max_batch_tokens=512, allow_block_sharing=False),
        )
        assert all(len(out.generated_tokens) == self.new for out in done.values())

    def first_token_s(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        job = self.engine.job(prompt, Sampling())
        self.engine.add(job)
        while not self.engine.step():
            pass
        took = time.perf_counter() - began
        self.engine.remove(job)
        return took


def rate(arm: Arm, prompts: list[list[int]], new: int) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    arm(prompts)
    return len(prompts) * new / (time.perf_counter() - began)


def measure(name: str, options: argparse.Namespace, chosen: list[str], http: Http | None) -> dict[str, Any]:
    pairs, new = options.pairs, options.new
    bench, dice = Bench(name, new, options.every), random.Random(0)

    def prompts(length: int = PROMPT, count: int = REQUESTS) -> list[list[int]]:
        return [[dice.randrange(100, 8000) for _ in range(length)] for _ in range(count)]

    arms = {arm: run for arm, run in bench.arms().items() if arm in chosen}
    if http is not None:
        arms["http"] = http.arm
    for arm in arms.values():  # the first pass is slow
        arm(prompts(count=1))
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    bench.joins.clear()
    bench.aborts = 0
    for _ in range(pairs):
        order = list(arms)
        dice.shuffle(order)
        same = prompts()
        for arm in order:
            if arm in ENGINE_ARMS:
                bench.engine.pool.invalidate()
            # One after the other, the first two of them are as fast as all.
            rates[arm].append(rate(arms[arm], same[:2] if arm == "generate x1" else same, new))
    cold, warm = [], []
    for _ in range(pairs):
        (beginning,) = prompts(500, 1)
        cold.append(bench.first_token_s(beginning + prompts(12, 1)[0]))
        warm.append(bench.first_token_s(beginning + prompts(12, 1)[0]))
    return {
        "tokens_per_s": {arm: statistics.median(values) for arm, values in rates.items()},
        "n": pairs,
        "ratios": {
            ratio: statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))
            for ratio, (above, below, _, _) in TARGETS.items()
            if above in rates and below in rates
        },
        "join_steps": max(bench.joins, default=0),
        "aborts": bench.aborts,
        "prefix": {
            "cold_ms": statistics.median(cold) * 1000,
            "warm_ms": statistics.median(warm) * 1000,
            "ratio": statistics.median(c / w for c, w in zip(cold, warm, strict=True)),
        },
    }


class Http:
    """A pipeline of SmolLM2 alone, and its clients."""

    def __init__(self, folder: str, new: int) -> None:
        self.new = new
        from tests.pipelines import start

        os.environ["STREAMRT_RUN_ROOT"], os.environ["STREAMRT_LOG_ROOT"] = f"{folder}/run", f"{folder}/log"
        path = Path(folder) / "pipeline.toml"
        path.write_text(
            '[pipeline]\nname = "bench-ar"\n[gateway]\nport = 0\n[[stage]]\nname = "llm"\nuse = "ar.causal_lm"\n[stage.args]\n'
            f'model = "weights:smollm2-135m-instruct"\ndtype = "float32"\nmax_tokens = {new}\nprefix_cache = false\n[deploy.llm]\nthreads = 1\n'
        )
        self.running = start(path)

    def arm(self, prompts: list[list[int]]) -> None:
        asyncio.run(self._all(prompts))

    async def _all(self, prompts: list[list[int]]) -> None:
        import aiohttp

        turns = [asyncio.Event() for _ in range(len(prompts) + 1)]
        turns[0].set()
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._one(session, prompt, *turns[n : n + 2]) for n, prompt in enumerate(prompts)))

    async def _one(self, session: Any, prompt: list[int], turn: asyncio.Event, following: asyncio.Event) -> None:
        await turn.wait()
        # Text of about as many tokens, whose reply goes on to the end.
        text = f"Count slowly from {prompt[0]} to {prompt[0] + 500}, one number after the other, all of them."
        body = {"model": "bench-ar", "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": self.new,
                "temperature": 0, "stream_options": {"include_usage": True}, "ignore_eos": True}  # fmt: skip
        made = 0
        async with session.post(f"{self.running.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    following.set()
                    usage = json.loads(line[6:]).get("usage")
                    made = usage["completion_tokens"] if usage else made
        if made != self.new:
            raise RuntimeError(f"a reply has {made} tokens, expected {self.new}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--arms", default=",".join(ARMS), help='and "companions", "aborts"; "http" too, for SmolLM2')
    parser.add_argument("--new", type=int, default=96, help="tokens of each reply")
    parser.add_argument("--every", type=int, default=2, help="steps from one arrival to the next")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.models.split(",")
    results = {}
    with tempfile.TemporaryDirectory(prefix="srt-") as folder:
        chosen = options.arms.split(",")
        http = Http(folder, options.new) if "http" in chosen else None
        try:
            for name in names:
                results[name] = measure(name, options, chosen, http if name == "smollm2" else None)
        finally:
            if http is not None:
                http.running.down()
    about = {
        "machine": f"{len(os.sched_getaffinity(0))} CPUs, {cpu()}, Python {platform.python_version()}, torch {torch.__version__}",
        "command": "python " + shlex.join(["tests/perf/bench_ar.py", *sys.argv[1:]]),
        "load": f"{REQUESTS} requests, {PROMPT} tokens in, {options.new} out, greedy, float32, 1 thread",
    }
    if options.json:
        print(json.dumps({**about, "models": results}))
        return
    for key, value in about.items():
        print(f"{key:<9} {value}")
    for name, result in results.items():
        print(f"\n{name}, median of {result['n']} rounds")
        for arm, value in result["tokens_per_s"].items():
            print(f"  {arm:<24} {value:8.1f} tokens/s")
        for ratio, value in result["ratios"].items():
            _, _, least, stretch = TARGETS[ratio]
            print(f"  {ratio:<24} {value:8.2f}   pass {least}, stretch {stretch}")
        if result["aborts"]:
            print(f"  {'aborts':<24} {result['aborts']:8d}")
        prefix = result["prefix"]
        print(f"  {'join':<24} {result['join_steps']:8d} steps at most   pass 2")
        print(f"  {'prefix':<24} {prefix['ratio']:8.1f}   {prefix['cold_ms']:.0f} / {prefix['warm_ms']:.0f} ms   pass 5")


if __name__ == "__main__":
    main()
