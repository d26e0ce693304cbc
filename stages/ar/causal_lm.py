"""`ar.causal_lm`: a conversation in, the reply's text out, by any causal language model of transformers.

The stage knows its arguments, what to load and how much memory to ask for; the rest is `text_engine.py`'s and `engine.py`'s.
Imports no torch before `load`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from stages.ar.params import HONOURED, Generation, Sampling, parse
from streamrt import ConfigError, EngineStage, Request

if TYPE_CHECKING:
    from stages.ar.ranks import Leading
    from stages.ar.runner import Runner
    from stages.ar.text_engine import TextEngine


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")  # any of these files


class CausalLMArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # weights:NAME, a folder with safetensors, a GGUF file, a hub id in the local cache, random:config.json
    # auto: bfloat16 where there is hardware for it, else float32
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8"] = "auto"
    max_tokens: Annotated[int, Meta(ge=1)] = 256  # of a reply: the default and the most
    max_context: Annotated[int, Meta(ge=16)] | None = None  # tokens of prompt and reply; the model's own limit, at most 8192, when left out
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0  # of requests that name none; 0 is greedy. So are the next three
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    instructions: str = ""  # the system message of requests that bring none; computed at load
    # What is left out of the next ones depends on the device, see `sizes`.
    kv_cache_mb: Annotated[int, Meta(ge=1)] | None = None  # keys and values of all requests
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None  # tokens
    prefix_cache: bool = True  # prompts that begin alike are computed once
    max_batch_tokens: Annotated[int, Meta(ge=1)] | None = None  # in one step, and a cancel waits for one
    max_sequences: Annotated[int, Meta(ge=1)] | None = None  # that run at a time
    max_waiting: Annotated[int, Meta(ge=1)] = 256  # sequences that wait for their turn; more are refused
    prompt_attention: Literal["auto", "flash_attn", "cudnn", "flash", "sdpa"] = "auto"  # on a GPU; auto: the fastest that can run there
    cuda_graphs: bool = True  # decode under CUDA graphs where the model can be captured


class CausalLM(EngineStage):
    """Text from a language model, as it comes."""

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)
    Args = CausalLMArgs
    models = ("model",)
    load_s = 12.0
    max_requests = 8
    supports_tp = True
    args: CausalLMArgs
    _leading: Leading | None = None  # on rank 0 of several

    @classmethod
    def recognize(cls, folder: Path) -> tuple[dict[str, Any], list[str]]:
        config = json.loads((folder / "config.json").read_text())
        kinds = [str(kind) for kind in config.get("architectures") or ()]
        kind = next((kind for kind in kinds if kind.endswith("ForCausalLM")), None)
        if kind is None:
            got = ", ".join(kinds) or "no architecture"
            raise ConfigError(
                f"{folder}: config.json names {got}, and no stage serves that by itself",
                hint="served are causal language models (...ForCausalLM) and pipelines of diffusers; for others write a pipeline file",
            )
        if not any((folder / name).is_file() for name in TOKENIZERS):
            raise ConfigError(f"{folder}: there is no tokenizer beside config.json: expected one of {', '.join(TOKENIZERS)}")
        length = config.get("max_position_embeddings")
        return {"model": str(folder)}, [
            f"{kind}, a causal language model of transformers: text to text",
            *([f"made for {length} tokens of prompt and reply together"] if length else []),
        ]

    def load(self) -> None:
        if self.context.rank == 0:
            super().load()
        else:
            self._runner, _ = self._read_model()

    def follow(self) -> None:
        from stages.ar.ranks import follow

        follow(self._runner)

    def close(self) -> None:
        super().close()
        if self._leading is not None:
            self._leading.close()

    def _read_model(self) -> tuple[Runner, Any]:
        """The model, or this rank's share of it, and the tokenizer."""
        from stages.ar.loading import load

        args, context = self.args, self.context
        model, tokenizer, self._dtype = load(
            context.model_path(args.model),
            dtype=args.dtype,
            device=context.device,
            threads=context.threads,
            progress=context.progress,
            ranked=context if context.ranks > 1 else None,
        )
        if context.device == "cpu":
            from stages.ar.runner import Runner

            return Runner(model), tokenizer
        from stages.ar.cuda.runner import CudaRunner

        weights: Any = self._dtype if self._dtype in ("int8", "float8") else None
        runner = CudaRunner(model, attention=args.prompt_attention, weights=weights, has_graphs=args.cuda_graphs, progress=context.progress)
        return runner, tokenizer

    def make_engine(self) -> TextEngine:
        # 1. the model
        args, context = self.args, self.context
        runner, tokenizer = self._read_model()
        model = runner
        if context.ranks > 1:
            from stages.ar.ranks import Leading

            self._leading = Leading(runner, context.broken)
            runner = cast("Runner", self._leading)
        # 2. the engine around it
        from stages.ar.engine import Engine
        from stages.ar.text_engine import TextEngine

        core = Engine(runner, caches=args.prefix_cache, **sizes(args, runner))
        self._choices = model.describe()
        engine = TextEngine(core, tokenizer, instructions=args.instructions)
        self._grammars, self._vocabulary = engine.grammars, engine.vocabulary
        # 3. one reply: the first pass is slow, and the instructions' keys and values stay
        context.progress("warming up")
        request = Request("warm-up", "respond", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3})
        engine.submit(request, self.parse(request))
        while engine.has_work():
            engine.step()
        return engine

    def parse(self, request: Request) -> Generation:
        args = self.args
        defaults = Sampling(args.temperature, args.top_p, args.top_k, repetition_penalty=args.repetition_penalty)
        return parse(request.params, defaults, args.max_tokens, args.instructions, vocabulary=self._vocabulary)

    async def prepare(self, request: Request) -> Generation:
        generation = self.parse(request)
        if generation.grammar is not None:
            await asyncio.to_thread(self._grammars.start, generation.grammar)  # compiled there; the engine finds it
        return generation

    def describe(self) -> dict[str, Any]:
        name = self.args.model.removeprefix("weights:")
        if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
            name = Path(name).name.removesuffix(".gguf")
        return {"model": name, "dtype": self._dtype, "parameters": list(HONOURED), **self._choices}

    def state(self) -> dict[str, Any]:
        engine: TextEngine = self.host.engine  # type: ignore[assignment]
        pool = engine.engine.pool
        return {
            "running": engine.running,
            "waiting": len(engine.engine.scheduler.waiting),
            "tokens_per_s": round(engine.tokens_per_s, 1),
            "kv_blocks": pool.blocks - 1,
            "kv_blocks_held": pool.held,
            "kv_blocks_cached": pool.cached,
            "cache_hits": pool.stats.hits,
            "cache_misses": pool.stats.misses,
            "cache_evictions": pool.stats.evictions,
            "preemptions": engine.engine.scheduler.preemptions,
        }


def sizes(args: CausalLMArgs, runner: Runner) -> dict[str, Any]:
    """How much memory the engine has, in its words.

    Raises:
        ConfigError: the model was not made for so long a context, or the memory does not hold one.
    """
    import torch

    from stages.ar.kv import token_bytes

    is_cpu = runner.device.type == "cpu"
    block_size = args.block_size or (4 if is_cpu else 16)
    max_sequences = args.max_sequences or (16 if is_cpu else 64)
    limit = getattr(runner.config, "max_position_embeddings", None) or 8192
    if args.max_context is not None and args.max_context > limit:
        raise ConfigError(f"max_context: got {args.max_context}, the model was made for {limit}", param="max_context")
    max_context = args.max_context or min(limit, 8192)
    per_block = block_size * token_bytes(runner.config, runner.dtype, runner.row_layers, runner.ranks)
    least = (-(-max_context // block_size) + 2) * per_block
    if args.kv_cache_mb is not None:
        nbytes = args.kv_cache_mb << 20
    else:
        nbytes = max(1 << 30, least) if is_cpu else torch.cuda.mem_get_info(runner.device)[0] // 2
    room = (nbytes // per_block - 1) * block_size
    if room < max_context:
        raise ConfigError(
            f"kv_cache_mb: {nbytes >> 20} MB hold {max(room, 0)} tokens, expected at least max_context, {max_context}",
            hint=f"set kv_cache_mb = {(least >> 20) + 1}, or a shorter max_context",
            param="kv_cache_mb",
        )
    most = min(room // block_size, max_sequences * (-(-max_context // block_size)) * 2)  # more would never be used
    return {
        "blocks": most + 1,
        "block_size": block_size,
        "max_tokens": max(args.max_batch_tokens or (128 if is_cpu else 2048), max_sequences),
        "max_sequences": max_sequences,
        "max_context": max_context,
        "max_waiting": args.max_waiting,
    }
