"""A transformers decoder as one function: a packed batch in, logits and hidden states out; keys and values go into the store.

    Batch --> embeddings --> model's inner decoder (attention: `Step`) --> rows that are asked for --> head --> Result

Knows transformers' modules. Knows nothing of sequences, sampling or text.

Rules
- A `Batch` is tensors and integers, on the CPU: what one process is told is what another can run. All of a pass's effects are writes to the store.
- Works with transformers 5.17 to 5.24: the cache's keyword is looked up, positions are always given.
- A model whose own forward disagrees with this one is refused when the engine is made (`check`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stages.ar.attention import BACKENDS, NAME, Prefill, Step, register
from stages.ar.cpu_layers import PackedLinear, can_exchange, exchange, is_wide
from stages.ar.kv import KVStore, head_dim, kv_heads, text_config, unsupported
from streamrt import ConfigError


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's tokens of all sequences, packed: first `decodes` of as many sequences, then prompts' chunks. All on the CPU."""

    tokens: torch.Tensor  # (tokens,) int64; any id where an embedding stands
    positions: torch.Tensor  # (tokens,) int64, or (3, tokens) for models with three-dimensional positions
    slots: torch.Tensor  # (tokens,) int64: block * block_size + offset
    decodes: int
    block_tables: torch.Tensor  # (decodes, blocks) int32
    context_lens: torch.Tensor  # (decodes,) int32
    prefills: tuple[Prefill, ...]
    wanted: torch.Tensor  # (wanted,) int64: tokens of the batch whose logits are asked for
    embedded: torch.Tensor | None = None  # (embedded,) int64: tokens of the batch that are given as embeddings
    embeddings: torch.Tensor | None = None  # (embedded, hidden)
    deepstacked: torch.Tensor | None = None  # (deepstacked,) int64: tokens of the batch whose hidden states get `deepstack`, in order
    deepstack: torch.Tensor | None = None  # (deepstacked, layers, hidden): what is added behind each of the first layers
    # (decodes,) int64: rows of the pass before whose likeliest token is this one's token, -1 where `tokens` has it
    following: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """What a pass made, on the model's device, one row for each of `Batch.wanted`."""

    logits: torch.Tensor  # (wanted, vocabulary); may be overwritten by the pass after the next
    hidden: torch.Tensor  # (wanted, hidden), after the last norm; likewise
    likeliest: Callable[[], list[int]]  # the token of each row; waits for the device


class Runner:
    """One model and the store that it writes to."""

    runs_ahead = False  # whether a pass is worth beginning before the one before it is looked at: where the device works on its own

    def __init__(self, model: Any, *, inner: Any = None, head: Any = None, row_layers: tuple[int, ...] = ()) -> None:
        """
        Args:
            model: loaded, on its device.
            inner: its decoder, where that is not `get_decoder()`.
            head: hidden states to logits, where that is not `get_output_embeddings()`.
            row_layers: whose hidden states are kept with the tokens: 0 is the embeddings, n what layer n - 1 gives (features are added later).
        Raises:
            ConfigError: the model has something that this runner does not.
        """
        self.model = model
        self.inner = inner if inner is not None else model.get_decoder()
        self.head = head if head is not None else model.get_output_embeddings()
        self.config = text_config(self.inner)
        self.device: torch.device = self.inner.device
        self.dtype: torch.dtype = self.inner.dtype
        self.ranks: int = getattr(model, "tp_size", None) or 1  # that share the model, and so its heads
        self.row_layers = row_layers
        self.embed = self.inner.get_input_embeddings()
        self.store: KVStore
        rope = getattr(self.config, "rope_parameters", None) or {}
        self.position_dims = 3 if rope.get("mrope_section") else 1
        if what := unsupported(self.config):
            raise ConfigError(f"model: {type(self.inner).__name__} has {what}, which the engine does not run", param="model")
        if self.device.type not in BACKENDS:
            raise ConfigError(f"model: on {self.device.type}, attention runs on {', '.join(BACKENDS)}", param="device")
        names = inspect.signature(type(self.inner).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.24
        self.deepstack_layers = _deepstack_layers(model) if "deepstack_visual_embeds" in names else 0  # that take features, the first ones
        self._soft_cap = getattr(self.config, "final_logit_softcapping", None)
        self._layers = "the model's own"
        self._step: Step | None = None
        self._likeliest = torch.zeros(0, dtype=torch.int64)  # of the last pass
        self.tolerance = 1e-3 if self.dtype == torch.float32 else 0.1  # of `check`, relative to the largest logit
        self._reference = self._own_logits(is_whole=inner is None and head is None)
        self.exchange()
        for layer in row_layers:
            self._keep_rows(layer)
        register()
        self.inner.set_attn_implementation(NAME)

    def exchange(self) -> None:
        """Put other modules in the place of the model's that do the same. Before anything is hooked to them; `check` compares afterwards."""
        if self.ranks > 1 or self.dtype != torch.float32 or not can_exchange():  # a share of a layer works through its hooks
            return
        self._layers = "norms and gated layers fused, wide ones packed for oneDNN"
        exchange(self.inner)
        if is_wide(self.head):
            self.head = PackedLinear(self.head, is_tied=self.head.weight is getattr(self.embed, "weight", None))

    def prepare(self, *, max_tokens: int, max_sequences: int, max_context: int) -> None:
        """Whatever the first steps would wait for; see Engine for what they hold. Once, after `check`."""

    def describe(self) -> dict[str, str]:
        """What was chosen by what the device can do, in words."""
        return {"layers": self._layers}

    def allocate(self, blocks: int, block_size: int) -> None:
        """Make the store. Once, before the first pass."""
        self.store = KVStore(
            layers=self.config.num_hidden_layers,
            blocks=blocks,
            block_size=block_size,
            kv_heads=kv_heads(self.config) // self.ranks,
            head_dim=head_dim(self.config),
            dtype=self.dtype,
            device=self.device,
            row_layers=self.row_layers,
            hidden_size=self.config.hidden_size,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Result:
        """One pass. Its tokens' keys, values and rows are in the store afterwards."""
        device = self.device
        step = Step(
            self.store,
            batch.slots.to(device),
            batch.decodes,
            batch.block_tables.to(device),
            batch.context_lens.to(device),
            batch.prefills,
        )
        hidden = self.decode(self.embeddings(batch), batch.positions.to(device), step, **self.deepstack(batch))
        wanted = hidden if len(batch.wanted) == len(hidden) else hidden.index_select(0, batch.wanted.to(device))
        logits = self.logits(wanted)
        if self.runs_ahead:
            self._likeliest = logits.argmax(-1)
        return Result(logits, wanted, lambda: logits.argmax(-1).tolist())

    def embeddings(self, batch: Batch) -> torch.Tensor:
        """(tokens, hidden)"""
        tokens = batch.tokens.to(self.device, non_blocking=True)
        if batch.following is not None:
            rows = batch.following.to(self.device, non_blocking=True)
            tokens[: batch.decodes] = follow(tokens[: batch.decodes], rows, self._likeliest)
        embeddings: torch.Tensor = self.embed(tokens)
        if batch.embedded is not None and batch.embeddings is not None:
            embeddings.index_copy_(0, batch.embedded.to(self.device), batch.embeddings.to(self.device, embeddings.dtype))
        return embeddings

    def deepstack(self, batch: Batch) -> dict[str, Any]:
        """What the decoder is told of features that its first layers get."""
        if batch.deepstacked is None or batch.deepstack is None:
            return {}
        mask = torch.zeros(1, len(batch.tokens), dtype=torch.bool)
        mask[0, batch.deepstacked] = True
        features = batch.deepstack.to(self.device, self.dtype)
        return {"visual_pos_masks": mask.to(self.device), "deepstack_visual_embeds": list(features.unbind(1))}

    def decode(self, embeddings: torch.Tensor, positions: torch.Tensor, step: Step, **more: Any) -> torch.Tensor:
        """The decoder's pass: (tokens, hidden) to (tokens, hidden). No work on the host that depends on the step, but for attention's plan."""
        self._step = step
        out = self.inner(
            inputs_embeds=embeddings[None],
            position_ids=positions.view(self.position_dims, 1, -1) if self.position_dims > 1 else positions[None],
            use_cache=True,
            step=step,
            **{self._cache_name: step},
            **more,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden), after the last norm, to (rows, vocabulary)."""
        logits: torch.Tensor = self.head(hidden)
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    def end_tokens(self, *others: int | None) -> frozenset[int]:
        """Tokens after which the model has nothing more to say, `others` among them."""
        generation = getattr(self.model, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        return frozenset({*(ends if isinstance(ends, list) else [ends]), *others} - {None})

    def check(self) -> None:
        """Compare with the model's own forward, on a few tokens, in block 1. After `allocate`, before anything else is stored.

        Raises:
            ConfigError: they disagree, so the model does something that this runner knows nothing of.
        """
        expected = self._reference
        count = len(expected)
        blocks = torch.arange(1, 1 + -(-count // self.store.block_size), dtype=torch.int32)
        none = torch.zeros(0, dtype=torch.int32)
        at = torch.arange(count)
        positions = at if self.position_dims == 1 else at.expand(self.position_dims, -1)
        batch = Batch(at + 1, positions, at + self.store.block_size, 0, none.view(0, 0), none, (Prefill(0, count, count, blocks),), at)
        difference = (self.forward(batch).logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not difference <= self.tolerance:
            raise ConfigError(
                f"model: the engine's logits differ from {type(self.model).__name__}'s own by {difference:.1e} of their size",
                hint="this model does something that stages/ar/runner.py does not know",
                param="model",
            )

    @torch.inference_mode()
    def _own_logits(self, *, is_whole: bool) -> torch.Tensor:
        """What the untouched modules say of four tokens."""
        ids = torch.arange(1, 5, device=self.device)[None]
        if is_whole:
            return self.model(input_ids=ids, use_cache=False).logits[0].float()
        return self.head(self.inner(inputs_embeds=self.embed(ids), use_cache=False).last_hidden_state)[0].float()

    def _keep_rows(self, layer: int) -> None:
        if not 0 <= layer < len(self.inner.layers):
            raise ConfigError(f"row_layers: got {layer}, the model has 0 to {len(self.inner.layers) - 1}", param="row_layers")

        def keep(hidden: torch.Tensor) -> None:
            if self._step is not None:
                self._step.store.rows[layer].flatten(0, 1).index_copy_(0, self._step.slots, hidden[0])

        if layer == 0:
            self.inner.layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
        else:  # not what goes into the next one, which may have features added
            self.inner.layers[layer - 1].register_forward_hook(lambda _, args, out: keep(out[0] if isinstance(out, tuple) else out))


def _deepstack_layers(model: Any) -> int:
    """How many features of each of its tokens an image has beside its embeddings."""
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def follow(tokens: torch.Tensor, rows: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """(n,): `tokens`, but where `rows` is not -1 what `likeliest` has in that row. Waits for nothing."""
    return torch.where(rows >= 0, likeliest[rows.clamp(min=0)], tokens)
