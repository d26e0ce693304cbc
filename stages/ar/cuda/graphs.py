"""Decoding as CUDA graphs: one for each size of batch, replayed with one copy to the device and one launch a step.

    Batch --fill--> pinned words --one copy--> static inputs --graph--> logits, hidden, likeliest tokens

Knows the layout of a decode step's inputs. Knows nothing of what is captured: it is given as a function.

Rules
- A batch of n rows runs in the smallest graph that has as many; rows too many see one token of block 0 and write there.
- The tokens of a step may be those that the step before it found likeliest, which are on the device only (`following`).
- All graphs share one memory pool, the largest is captured first; so what one gives is valid until another runs.
- Inputs are filled in turns of two: a step may be filled while the copy of the one before it has not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stages.ar.runner import Batch

ALIGNED = 4  # words: every input begins at a multiple of 16 bytes


def buckets(max_rows: int) -> list[int]:
    """Sizes of batches that get a graph: powers of two, and `max_rows`."""
    return [*(1 << n for n in range((max_rows - 1).bit_length())), max_rows]


@dataclass(frozen=True)
class Inputs:
    """A decode step's inputs on the device: views of one buffer."""

    tokens: torch.Tensor  # (rows,) int32
    following: torch.Tensor  # (rows,) int32, -1 where the token is the one in `tokens`
    slots: torch.Tensor  # (rows,) int32
    context_lens: torch.Tensor  # (rows,) int32
    positions: torch.Tensor  # (dims, rows) int32
    block_tables: torch.Tensor  # (rows, blocks) int32


class Words:
    """The inputs of one size of batch: a buffer on the device and two on the host."""

    def __init__(self, rows: int, position_dims: int, max_blocks: int, device: torch.device) -> None:
        self.rows = rows
        shapes = [(rows,), (rows,), (rows,), (rows,), (position_dims, rows), (rows, max_blocks)]
        starts, size = [], 0
        for shape in shapes:
            starts.append(size)
            size += -(-int(np.prod(shape)) // ALIGNED) * ALIGNED

        def views(buffer: torch.Tensor) -> Inputs:
            return Inputs(*(buffer[start : start + int(np.prod(s))].view(s) for start, s in zip(starts, shapes, strict=True)))

        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self.inputs = views(self._device)
        self._views = [{name: view.numpy() for name, view in vars(views(host)).items()} for host in self._hosts]
        self._turn = 0

    def fill(self, batch: Batch) -> None:
        """`batch` has decodes only, `rows` at most. Waits for nothing."""
        n, self._turn = batch.decodes, 1 - self._turn
        to = self._views[self._turn]
        to["tokens"][:n] = batch.tokens.numpy()
        to["following"][:] = -1
        if batch.following is not None:
            to["following"][:n] = batch.following.numpy()
        to["slots"][:n], to["slots"][n:] = batch.slots.numpy(), 0
        to["context_lens"][:n], to["context_lens"][n:] = batch.context_lens.numpy(), 1
        to["positions"][:, :n] = batch.positions.numpy()
        to["block_tables"][:n, : batch.block_tables.shape[1]], to["block_tables"][n:, 0] = batch.block_tables.numpy(), 0
        self._device.copy_(self._hosts[self._turn], non_blocking=True)


Outputs = tuple[torch.Tensor, torch.Tensor]  # logits (rows, vocabulary) and hidden states (rows, hidden)


class DecodeGraphs:
    """What `capture` has captured."""

    def __init__(self, *, position_dims: int, max_blocks: int, device: torch.device) -> None:
        self._shape = (position_dims, max_blocks, device)
        self._pool: tuple[int, int] | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Words, Outputs]] = {}

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def capture(self, sizes: list[int], run: Callable[[Inputs], Outputs], progress: Callable[[str], None]) -> None:
        """Capture `run` for each size. `run` computes with the inputs' tensors only, and copies nothing from the host. Blocks for seconds."""
        for rows in sorted(sizes, reverse=True):
            progress(f"capturing graphs: {rows} rows")
            words = Words(rows, *self._shape)
            words.inputs.context_lens.fill_(1)
            words.inputs.following.fill_(-1)
            # What happens once, compiling kernels and choosing algorithms, happens before; on another stream, as torch asks.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run(words.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may call the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run(words.inputs)
            self._pool = self._pool or graph.pool()
            self._graphs[rows] = graph, words, outputs

    def takes(self, batch: Batch) -> bool:
        """Whether `batch` can be replayed: decodes only, all of them plain tokens, all of them wanted, not too many."""
        is_plain = not batch.prefills and batch.embedded is None and batch.deepstacked is None
        return is_plain and len(batch.wanted) == batch.decodes <= max(self._graphs, default=0)

    def replay(self, batch: Batch) -> Outputs:
        """Logits and hidden states of `batch`'s rows. Waits for nothing."""
        rows = min(size for size in self._graphs if size >= batch.decodes)
        graph, words, (logits, hidden) = self._graphs[rows]
        words.fill(batch)
        graph.replay()
        return logits[: batch.decodes], hidden[: batch.decodes]
