"""The runner of a CUDA device: fused layers, attention by Triton and by the backend chosen for prompts, decoding under graphs.

Knows how the parts of this folder go together, and what they ask of the device. What a pass means is `stages.ar.runner`'s.

Rules
- Every choice is made when the runner is, by what the device and the model can do; `describe` says which and why. What was asked for and can not be is an error.
- A pass never waits for the device: who wants the tokens does (`Result.likeliest`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stages.ar.attention import BACKENDS, Prefill, Step
from stages.ar.cuda import kernels
from stages.ar.cuda.attention import (
    CUDNN_FROM,
    GRANULE,
    Plan,
    attend,
    choose_prompt_backend,
    cudnn_refusal,
    has_flash_attn,
    plan_prompts,
)
from stages.ar.cuda.graphs import DecodeGraphs, Inputs, Outputs, buckets
from stages.ar.cuda.layers import Fusion, fuse, is_plain
from stages.ar.cuda.paged import split_count
from stages.ar.cuda.quantize import Kind, quantize
from stages.ar.kv import head_dim, kv_heads
from stages.ar.runner import Batch, Result, Runner, follow

BACKENDS["cuda"] = attend
QUANTIZED_TOLERANCE = 0.4  # of the logits' size: 8 bits of weight are 0.4% (int8) or 2.5% (float8) off in every product
CHECKED = 16  # rows of the passes before `prepare`, at most
HOST_BOUND_ROPE = {"dynamic", "longrope"}  # transformers looks at the positions on the host


class CudaRunner(Runner):
    """A model on a CUDA device."""

    runs_ahead = True

    def __init__(
        self,
        model: Any,
        *,
        attention: str = "auto",
        weights: Kind | None = None,
        has_graphs: bool = True,
        is_fused: bool = True,
        progress: Callable[[str], None] = lambda _: None,
        **parts: Any,
    ) -> None:
        """
        `attention`: "auto", or one of attention.BACKENDS, for prompts; `weights`: in 8 bits, None: as they are; `has_graphs` and `is_fused` off: to
        compare with; `parts`: see Runner.

        Raises:
            ConfigError: the model has something that this runner does not, or `attention` or `weights` can not be had here.
        """
        self._is_fused, self._has_graphs, self._progress, self._weights = is_fused, has_graphs, progress, weights
        self.fusion = Fusion()
        super().__init__(model, **parts)
        device = self.device
        heads, groups, dim = self.config.num_attention_heads // self.ranks, self._kv_heads, head_dim(self.config)
        capability = torch.cuda.get_device_capability(device)
        is_cudnn_likely = attention in ("auto", "cudnn") and capability[0] == 9 and self.dtype != torch.float32
        self.prompt_backend = choose_prompt_backend(
            attention,
            capability=capability,
            dtype=self.dtype,
            head_dim=dim,
            has_flash_attn=has_flash_attn(),
            cudnn_refusal=cudnn_refusal(heads, groups, dim, self.dtype, device) if is_cudnn_likely else "",
        )
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_context = getattr(self.config, "max_position_embeddings", 0) or 8192
        self._graphs: DecodeGraphs | None = None
        self._graph_refusal = "not captured yet"
        # Two turns: a pass is begun before the one before it is read.
        self._found = [torch.zeros(CHECKED, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._turn = 0
        self._likeliest = torch.zeros(CHECKED, dtype=torch.int64, device=device)

    @property
    def _kv_heads(self) -> int:
        """Of this rank."""
        return kv_heads(self.config) // self.ranks

    def exchange(self) -> None:
        if self._is_fused:
            self.fusion = fuse(self.inner)
        if self._weights is not None:
            quantize(self.inner, self._weights, torch.cuda.get_device_capability(self.device))
            self.tolerance = QUANTIZED_TOLERANCE

    def prepare(self, *, max_tokens: int, max_sequences: int, max_context: int) -> None:
        with torch.cuda.device(self.device):
            self._prepare(max_tokens, max_sequences, max_context)

    def _prepare(self, max_tokens: int, max_sequences: int, max_context: int) -> None:
        self._max_context = max_context
        self._likeliest = torch.zeros(max_sequences, dtype=torch.int64, device=self.device)
        self._found = [torch.zeros(max_sequences, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._progress("warming up prompts")
        longest = min(max_tokens, max_context)
        planned = range(CUDNN_FROM, longest + 1, GRANULE) if self.prompt_backend.name == "cudnn" else ()
        for tokens in {min(64, longest), longest, *planned}:
            self.forward(self._prompt_of_nothing(tokens))
        self._graph_refusal = graph_refusal(self.config) if self._has_graphs else "not asked for"
        if not self._graph_refusal:
            graphs = DecodeGraphs(position_dims=self.position_dims, max_blocks=-(-max_context // self.store.block_size), device=self.device)
            with torch.inference_mode():
                graphs.capture(buckets(max_sequences), self._decode_rows, self._progress)
            self._graphs = graphs

    def _prompt_of_nothing(self, tokens: int) -> Batch:
        """A prompt that is written to block 0."""
        zeros, none = torch.zeros(tokens, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        blocks = torch.zeros(-(-tokens // self.store.block_size), dtype=torch.int32)
        positions = zeros if self.position_dims == 1 else zeros.expand(self.position_dims, -1)
        prompt = Prefill(0, tokens, tokens, blocks)
        return Batch(zeros, positions, zeros, 0, none.view(0, 0), none, (prompt,), torch.tensor([tokens - 1]))

    def describe(self) -> dict[str, str]:
        graphs = self._graphs.sizes if self._graphs is not None else []
        ranks = {"ranks": f"{self.ranks}, joined by nccl"} if self.ranks > 1 else {}
        return {
            **ranks,
            "weights": self._weights or str(self.dtype).removeprefix("torch."),
            "attention": f"paged (triton) for decoding, {self.prompt_backend.name} for prompts ({self.prompt_backend.why})",
            "layers": str(self.fusion),
            "graphs": f"for {', '.join(map(str, graphs))} rows" if graphs else f"none: {self._graph_refusal}",
        }

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Result:
        """One pass, begun."""
        with torch.cuda.device(self.device):  # Triton launches on the thread's current one
            return self._begin(batch)

    def _begin(self, batch: Batch) -> Result:
        if self._graphs is not None and self._graphs.takes(batch):
            logits, hidden = self._graphs.replay(batch)
        else:
            logits, hidden = self._packed(batch)
            self._likeliest[: len(logits)] = logits.argmax(-1)
        self._turn = 1 - self._turn
        found = self._found[self._turn][: len(logits)]
        found.copy_(self._likeliest[: len(logits)], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def likeliest() -> list[int]:
            copied.synchronize()
            return found.tolist()

        return Result(logits, hidden, likeliest)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 1 and self._soft_cap is None and is_plain(self.head):
            return kernels.matvec(hidden, self.head.weight)
        return super().logits(hidden)

    def _packed(self, batch: Batch) -> Outputs:
        """A pass with prompts in it, kernel by kernel."""
        device = self.device

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        plan = Plan(
            self.prompt_backend.name,
            split_count(max(batch.decodes, 1), self._kv_heads, self._max_context, self._processors),
            plan_prompts(batch.prefills, self.store.block_size, device),
        )
        step = Step(self.store, put(batch.slots), batch.decodes, put(batch.block_tables), put(batch.context_lens), batch.prefills, plan)
        hidden = self.decode(self.embeddings(batch), put(batch.positions), step, **self.deepstack(batch))
        wanted = hidden.index_select(0, put(batch.wanted))
        return self.logits(wanted), wanted

    def _decode_rows(self, inputs: Inputs) -> Outputs:
        """What a graph holds: a token for every row, and the likeliest next one where the pass after finds it."""
        rows = len(inputs.tokens)
        tokens = follow(inputs.tokens.long(), inputs.following.long(), self._likeliest)
        plan = Plan(self.prompt_backend.name, split_count(rows, self._kv_heads, self._max_context, self._processors))
        step = Step(self.store, inputs.slots.long(), rows, inputs.block_tables, inputs.context_lens, (), plan)
        positions = inputs.positions.long()
        hidden = self.decode(self.embed(tokens), positions if self.position_dims > 1 else positions[0], step)
        logits = self.logits(hidden)
        self._likeliest[:rows] = logits.argmax(-1)
        return logits, hidden


def graph_refusal(config: Any) -> str:
    """Why a model with this config can not be captured, empty when it can: what its modules ask the device for in the middle of a pass."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in HOST_BOUND_ROPE:
        return f'rope of type "{rope}" looks at positions on the host'
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        return "experts are chosen on the host"
    return ""
