"""`ar.causal_lm`: a conversation in, the reply's text out, by any causal language model of transformers.

The stage knows its arguments and what to load; the rest is `engine.py`'s. Imports no torch before `load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stages.ar.params import Generation, Sampling, parse
from streamrt import ConfigError, EngineStage, Request

if TYPE_CHECKING:
    from stages.ar.engine import CausalEngine


class CausalLMArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # weights:NAME, a folder with safetensors, a GGUF file, a hub id in the local cache, random:config.json
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # auto: bfloat16 where there is hardware for it, else float32
    attn: Literal["sdpa", "eager"] = "sdpa"
    max_tokens: Annotated[int, Meta(ge=1)] = 256  # of a reply: the default and the most
    max_context: Annotated[int, Meta(ge=16)] | None = None  # tokens of prompt and reply; the model's own limit, at most 8192, when left out
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0  # of requests that name none; 0 is greedy. So are the next three
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    instructions: str = ""  # the system message of requests that bring none; computed at load
    prefill_tokens: Annotated[int, Meta(ge=1)] = 64  # prompt tokens in one step: a cancel waits for one step
    prefix_cache_mb: Annotated[int, Meta(ge=0)] = 256  # for the beginnings of conversations; 0 turns it off


class CausalLM(EngineStage):
    """Text from a language model, as it comes."""

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)
    Args = CausalLMArgs
    models = ("model",)
    load_s = 12.0
    max_requests = 8
    args: CausalLMArgs

    def make_engine(self) -> CausalEngine:
        # 1. the model
        from stages.ar.loading import load

        args, context = self.args, self.context
        model, tokenizer, self._dtype = load(
            context.model_path(args.model),
            dtype=args.dtype,
            device=context.device,
            threads=context.threads,
            attention=args.attn,
            progress=context.progress,
        )
        # 2. the engine around it
        from stages.ar.engine import CausalEngine, Runner

        runner = Runner(model)
        limit = getattr(runner.config, "max_position_embeddings", None) or 8192
        if args.max_context is not None and args.max_context > limit:
            raise ConfigError(f"max_context: got {args.max_context}, the model was made for {limit}", param="max_context")
        engine = CausalEngine(
            runner,
            tokenizer,
            max_context=args.max_context or min(limit, 8192),
            prefill_tokens=args.prefill_tokens,
            prefix_bytes=args.prefix_cache_mb << 20,
            instructions=args.instructions,
        )
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
        return parse(request.params, defaults, args.max_tokens, args.instructions)

    def describe(self) -> dict[str, Any]:
        name = self.args.model.removeprefix("weights:")
        if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
            name = Path(name).name.removesuffix(".gguf")
        return {"model": name, "dtype": self._dtype}

    def state(self) -> dict[str, Any]:
        engine: CausalEngine = self.host.engine  # type: ignore[assignment]
        return {
            "running": engine.running,
            "tokens_per_s": round(engine.tokens_per_s, 1),
            "prefixes": len(engine.prefixes),
            "prefix_mb": engine.prefixes.nbytes >> 20,
        }
