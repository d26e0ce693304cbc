"""Caches that skip some of a denoiser's work: diffusers' five, DBCache of cache-dit, and TeaCache.

A cache keeps what it has computed between the steps of one request, and decides once for a whole call. So a request with a cache gets a twin
of the denoiser for itself: the same weights, its own modules with the cache's hooks in them, one twin for each kind of call ("cond",
"uncond"). Requests can not mix, whatever their batches and cancels; the state goes with the twin. Cached calls are never merged.

Knows denoisers and caches. Knows nothing of requests.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from stages.diffusion.args import CacheName
from streamrt import ConfigError

# How much a request of quality "high" and of quality "fast" gives up. What the numbers mean is the cache's own: a threshold on the relative
# change between steps, or every how many steps is computed.
STRENGTH: dict[str, dict[str, float]] = {
    "first_block": {"high": 0.05, "fast": 0.15},
    "pab": {"high": 2, "fast": 3},
    "faster": {"high": 2, "fast": 3},
    "taylorseer": {"high": 2, "fast": 4},
    "mag": {"high": 0.03, "fast": 0.1},
    "teacache": {"high": 0.08, "fast": 0.2},
    "dbcache": {"high": 0.08, "fast": 0.2},
}


class Caches:
    """One cache, ready to be put on a pipeline's denoisers. Made at load; raises ConfigError there for what it can not do."""

    def __init__(self, name: CacheName, denoisers: dict[str, Any], *, mag_ratios: list[float] | None = None) -> None:
        self._name = name
        self._mag_ratios = mag_ratios
        if name == "mag" and not mag_ratios:
            raise ConfigError("cache: mag needs mag_ratios, which belong to a checkpoint", param="cache")
        for component, module in denoisers.items():
            try:
                self.twin(module, quality="fast", steps=8, timestep=lambda: 500)
            except (ValueError, TypeError, AttributeError, KeyError, ImportError, AssertionError) as error:  # the libraries' ways to say no
                kind = type(module).__name__
                raise ConfigError(f"cache: {name} can not be put on {component} ({kind}): {error}", param="cache") from error

    def twin(self, module: Any, *, quality: str, steps: int, timestep: Callable[[], int]) -> Any:
        """`module` with a cache of its own, for one request of `steps` steps; `timestep` says where that request is."""
        twin = shared_copy(module)
        strength = STRENGTH[self._name][quality]
        if self._name == "dbcache":
            import cache_dit

            config = cache_dit.DBCacheConfig(
                Fn_compute_blocks=1, Bn_compute_blocks=0, residual_diff_threshold=strength, max_warmup_steps=2, num_inference_steps=steps
            )
            cache_dit.enable_cache(twin, cache_config=config)
            return twin
        if self._name == "teacache":
            return TeaCached(twin, strength)
        _let_cache(twin)
        twin.enable_cache(self._config(twin, strength, steps, timestep))
        if not _is_hooked(twin):
            raise ValueError("it finds nothing there that it knows")
        return _InContext(twin)

    def _config(self, twin: Any, strength: float, steps: int, timestep: Callable[[], int]) -> Any:
        import diffusers

        match self._name:
            case "first_block":
                return diffusers.FirstBlockCacheConfig(threshold=strength)
            case "pab":
                return diffusers.PyramidAttentionBroadcastConfig(
                    spatial_attention_block_skip_range=int(strength),
                    cross_attention_block_skip_range=int(strength),
                    current_timestep_callback=timestep,
                )
            case "faster":
                return diffusers.FasterCacheConfig(
                    spatial_attention_block_skip_range=int(strength),
                    spatial_attention_timestep_skip_range=(-1, 901),
                    current_timestep_callback=timestep,
                    attention_weight_callback=lambda _: 0.5,
                    is_guidance_distilled=True,  # the conditional and the unconditional call each have a twin
                )
            case "taylorseer":
                return diffusers.TaylorSeerCacheConfig(
                    cache_interval=int(strength), disable_cache_before_step=2, taylor_factors_dtype=twin.dtype
                )
            case _:
                return diffusers.MagCacheConfig(threshold=strength, num_inference_steps=steps, mag_ratios=self._mag_ratios)


def shared_copy(module: Any) -> Any:
    """A copy of the modules around the same parameters and buffers."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


class _InContext:
    """A module under diffusers' hooks, which want to be told whose call it is: there is only one caller here."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._module.cache_context("own"):
            return self._module(*args, **kwargs)


class TeaCached:
    """TeaCache (Liu et al., 2024): when what enters the first block, modulated by the timestep, has changed little since the blocks last ran,
    all blocks are skipped and add what they added then.

    The change is summed over skipped steps, relative and in L1. The paper fits a polynomial to it for each model; here it is taken as it is.
    """

    WARM_STEPS = 2  # computed at the start, whatever the change

    def __init__(self, twin: Any, threshold: float) -> None:
        self._twin = twin
        self._threshold = threshold
        blocks = [block for name in ("transformer_blocks", "blocks", "single_transformer_blocks") for block in getattr(twin, name, [])]
        if not blocks:
            raise ValueError("it has no transformer blocks")
        if len({type(block) for block in blocks}) > 1:
            raise ValueError("its blocks are of several kinds")
        first = blocks[0]
        if not hasattr(first, "norm1"):
            raise ValueError(f"its blocks ({type(first).__name__}) begin with no norm1")
        parameters = list(inspect.signature(type(first).forward).parameters)[1:]
        if parameters[0] != "hidden_states" or type(first).__name__ != "BasicTransformerBlock":
            raise ValueError(f"its blocks ({type(first).__name__}) give more than hidden states")
        self._steps = 0
        self._change = 0.0
        self._seen: torch.Tensor | None = None  # the modulated input of the last step
        self._added: torch.Tensor | None = None  # by the blocks, when they last ran
        self._entered: torch.Tensor | None = None
        self._skips = False
        first.forward = self._first(first, first.forward)
        for block in blocks[1:-1]:
            block.forward = self._between(block.forward)
        blocks[-1].forward = self._last(blocks[-1].forward) if len(blocks) > 1 else blocks[-1].forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._twin(*args, **kwargs)

    def _first(self, block: Any, forward: Any) -> Any:
        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            modulated = _modulated(block, hidden_states, kwargs)
            self._skips = self._decide(modulated)
            self._seen = modulated
            self._entered = hidden_states
            return hidden_states if self._skips else forward(hidden_states, *args, **kwargs)

        return run

    def _between(self, forward: Any) -> Any:
        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden_states if self._skips else forward(hidden_states, *args, **kwargs)

        return run

    def _last(self, forward: Any) -> Any:
        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._skips:
                assert self._added is not None
                return hidden_states + self._added
            result = forward(hidden_states, *args, **kwargs)
            self._added = result - self._entered
            return result

        return run

    def _decide(self, modulated: torch.Tensor) -> bool:
        """Whether this step's blocks are skipped."""
        self._steps += 1
        if self._seen is None or self._added is None or self._steps <= self.WARM_STEPS:
            return False
        self._change += ((modulated - self._seen).abs().mean() / self._seen.abs().mean()).item()
        if self._change < self._threshold:
            return True
        self._change = 0.0
        return False


def _modulated(block: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """What the block's first norm makes of its input at this timestep."""
    if block.norm_type == "ada_norm_zero":
        return block.norm1(hidden_states, kwargs.get("timestep"), kwargs.get("class_labels"), hidden_dtype=hidden_states.dtype)[0]
    return block.norm1(hidden_states)


def _let_cache(module: Any) -> None:
    """Give `module` diffusers' methods for caches, which some of its models (DiT, UNets) lack while their blocks are known."""
    from diffusers.models.cache_utils import CacheMixin

    if not isinstance(module, CacheMixin):
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind, CacheMixin), {})


def _is_hooked(module: Any) -> bool:
    """Whether a part of `module` carries one of diffusers' hooks."""
    return any(getattr(getattr(part, "_diffusers_hook", None), "hooks", None) for part in module.modules() if part is not module)
