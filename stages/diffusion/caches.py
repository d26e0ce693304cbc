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


# What TaylorSeer predicts in a BasicTransformerBlock, whose parts it does not know by name.
_BASIC_PARTS = [r"transformer_blocks\.\d+\.(attn1|ff)"]


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
            except (
                ValueError,
                TypeError,
                AttributeError,
                LookupError,
                ImportError,
                AssertionError,
            ) as error:  # the libraries' ways to say no
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
                    spatial_attention_timestep_skip_range=(-1, timestep()),  # all but the first: there is nothing to reuse yet
                    current_timestep_callback=timestep,
                    attention_weight_callback=lambda _: 0.5,
                    is_guidance_distilled=True,  # the conditional and the unconditional call each have a twin
                )
            case "taylorseer":
                return diffusers.TaylorSeerCacheConfig(
                    cache_interval=int(strength),
                    disable_cache_before_step=2,
                    taylor_factors_dtype=twin.dtype,
                    cache_identifiers=_BASIC_PARTS if _is_basic(twin) else None,
                )
            case _:
                return diffusers.MagCacheConfig(threshold=strength, num_inference_steps=steps, mag_ratios=self._mag_ratios)


def shared_copy(module: Any) -> Any:
    """A copy of the modules around the same parameters and buffers. What `copy.deepcopy` gives, which takes three times as long: each request waits for it."""
    parts = list(module.modules())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo |= {id(part): object.__new__(type(part)) for part in parts}
    for part in parts:
        memo[id(part)].__dict__.update({name: _own(value, memo) for name, value in vars(part).items()})
    return memo[id(module)]


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """One attribute of a module, as a copy of the module has it."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, dict) and not isinstance(value, torch.nn.Module):
        if not value:  # most of a module's hooks
            return type(value)()
        if all(id(inner) in memo or inner is None for inner in value.values()):  # its parameters, buffers and modules
            return type(value)({name: memo.get(id(inner)) for name, inner in value.items()})
    return copy.deepcopy(value, memo)


class _InContext:
    """A module under diffusers' hooks, which want to be told whose call it is: there is only one caller here."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._module.cache_context("own"):
            return self._module(*args, **kwargs)


# Block class -> what its first norm makes of its input at this timestep; `given` are the arguments of its call by name.
MODULATED: dict[str, Callable[[Any, dict[str, Any]], torch.Tensor]] = {
    "BasicTransformerBlock": lambda block, given: block.norm1(
        given["hidden_states"], given["timestep"], given["class_labels"], hidden_dtype=given["hidden_states"].dtype
    )[0],
    "FluxTransformerBlock": lambda block, given: block.norm1(given["hidden_states"], emb=given["temb"])[0],
    "JointTransformerBlock": lambda block, given: block.norm1(given["hidden_states"], emb=given["temb"])[0],
    "QwenImageTransformerBlock": lambda block, given: _scaled(
        block.img_norm1(given["hidden_states"]), *block.img_mod(given["temb"])[:, None].chunk(6, dim=-1)[:2]
    ),
    "WanTransformerBlock": lambda block, given: _scaled(
        block.norm1(given["hidden_states"].float()), *(block.scale_shift_table + given["temb"].float()).chunk(6, dim=1)[:2]
    ),
}


def _scaled(normed: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return normed * (1 + scale) + shift


class TeaCached:
    """TeaCache (Liu et al., 2024): when what enters the first block, modulated by the timestep, has changed little since the blocks last ran,
    all blocks are skipped and add what they added then.

    The change is summed over skipped steps, relative and in L1. The paper fits a polynomial to it for each model; here it is taken as it is.
    """

    WARM_STEPS = 2  # computed at the start, whatever the change

    def __init__(self, twin: Any, threshold: float) -> None:
        names = ("transformer_blocks", "blocks", "single_transformer_blocks")
        blocks = [block for name in names for block in getattr(twin, name, None) or []]
        kind = type(blocks[0]).__name__ if blocks else "none"
        if kind not in MODULATED or (kind == "BasicTransformerBlock" and blocks[0].norm_type != "ada_norm_zero"):
            raise ValueError(f"its first block is {kind}, expected one of {', '.join(MODULATED)}")
        self._twin = twin
        self._threshold = threshold
        self._steps = 0
        self._change = 0.0
        self._seen: torch.Tensor | None = None  # the modulated input of the last step
        self._entered: torch.Tensor | None = None  # this step's hidden states, before the blocks
        self._added: torch.Tensor | None = None  # to them by the blocks, when they last ran
        self._skips = False
        for place, block in enumerate(blocks):
            block.forward = self._wrapped(block, block.forward, is_first=place == 0, is_last=place == len(blocks) - 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._twin(*args, **kwargs)

    def _wrapped(self, block: Any, forward: Callable[..., Any], *, is_first: bool, is_last: bool) -> Callable[..., Any]:
        from diffusers.hooks._helpers import TransformerBlockRegistry

        known = TransformerBlockRegistry.get(type(block))
        place, text_place = known.return_hidden_states_index, known.return_encoder_hidden_states_index
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            hidden_states = bound.arguments["hidden_states"]
            if is_first:
                self._begin(MODULATED[type(block).__name__](block, bound.arguments), hidden_states)
            if not self._skips:
                result = forward(*args, **kwargs)
                if is_last:
                    self._added = (result[place] if isinstance(result, tuple) else result) - self._entered
                return result
            if is_last:
                assert self._added is not None
                hidden_states = hidden_states + self._added
            if text_place is None:
                return hidden_states
            given = {place: hidden_states, text_place: bound.arguments["encoder_hidden_states"]}
            return given[0], given[1]

        return run

    def _begin(self, modulated: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Decide whether this step's blocks are skipped."""
        self._steps += 1
        self._skips = False
        if self._seen is not None and self._added is not None and self._steps > self.WARM_STEPS:
            self._change += ((modulated - self._seen).abs().mean() / self._seen.abs().mean()).item()
            self._skips = self._change < self._threshold
        if not self._skips:
            self._change = 0.0
        self._seen, self._entered = modulated, hidden_states


def _is_basic(module: Any) -> bool:
    return any(type(block).__name__ == "BasicTransformerBlock" for block in getattr(module, "transformer_blocks", ()))


def _let_cache(module: Any) -> None:
    """Give `module` diffusers' methods for caches, which some of its models (DiT, UNets) lack while their blocks are known."""
    from diffusers.models.cache_utils import CacheMixin

    if not isinstance(module, CacheMixin):
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind, CacheMixin), {})


def _is_hooked(module: Any) -> bool:
    """Whether a part of `module` carries one of diffusers' hooks."""
    return any(getattr(getattr(part, "_diffusers_hook", None), "hooks", None) for part in module.modules() if part is not module)
