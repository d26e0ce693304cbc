"""Attention of one new token per sequence over paged keys and values, as Triton kernels.

    q (rows, heads, head_dim)  +  block tables, lengths  ->  out (rows, heads, head_dim)

Knows blocks and heads. Knows nothing of models, requests or graphs.

Rules
- The grid depends on the number of rows only, never on how long they are: one captured launch serves every step.
- A context is cut into `splits` pieces, each of them read by one program for all query heads that share its keys; a second
  kernel joins the pieces. Otherwise one long sequence would keep 8 of 132 processors busy.
- Nothing that lies beyond a sequence's length or before its window is read.

Source: flash decoding (Dao et al., 2023) for the split; online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 64  # keys that a program reads at once
MAX_SPLITS = 32
LONG_CONTEXT = 4096  # a model that can hold so many tokens gets a split for each of them, however many rows there are


def split_count(rows: int, kv_heads: int, max_context: int, processors: int) -> int:
    """Pieces to cut each context into, a power of two: enough programs for two a processor, none shorter than a tile."""
    wanted = max(2 * processors // (rows * kv_heads), min(max_context // LONG_CONTEXT, 8), 1)
    possible = max(min(max_context // TILE, MAX_SPLITS), 1)
    return 1 << (min(wanted, possible).bit_length() - 1)


@triton.jit(do_not_specialize=["q_stride", "table_stride"])
def _attend_split(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    part_ptr,
    weight_ptr,
    scale,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    piece = tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE_) * TILE_
    first = begin + split * piece
    last = tl.minimum(first + piece, length)

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    is_head = group < GROUP
    is_dim = dim < HEAD_DIM
    q = tl.load(
        q_ptr + row.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0
    )
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for at in range(first, last, TILE_):
        token = at + tl.arange(0, TILE_)
        is_token = token < last
        block = tl.load(table_ptr + row * table_stride + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        at_keys = place[:, None] + dim[None, :]
        is_key = is_token[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + at_keys, mask=is_key, other=0.0)
        v = tl.load(v_ptr + at_keys, mask=is_key, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # of base-2 logarithms
        score = tl.where(is_token[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top

    is_out = is_head[:, None] & is_dim[None, :]
    at_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    if SPLITS == 1:
        tl.store(out_ptr + at_head[:, None] * HEAD_DIM + dim[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        # An empty piece says so by its weight; what it would have written is never read.
        at_part = at_head * SPLITS + split
        if first < last:
            tl.store(part_ptr + at_part[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=is_out)
            tl.store(weight_ptr + at_part, top + tl.log2(total), mask=is_head)
        else:
            tl.store(weight_ptr + at_part, top, mask=is_head)  # minus infinity


@triton.jit
def _join_splits(out_ptr, part_ptr, weight_ptr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr):
    at_head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    weight = tl.load(weight_ptr + at_head * SPLITS + split)
    share = tl.exp2(weight - tl.max(weight, 0))
    is_part = (weight > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(part_ptr + (at_head * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :], mask=is_part, other=0.0)
    out = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out_ptr + at_head * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    splits: int,
    window: int = 0,
    launch: dict[str, Any] | None = None,
) -> torch.Tensor:
    """(rows, heads, head_dim) of `q` attended over each row's context.

    q: (rows, heads, head_dim), the last two dimensions contiguous; one token a row, the last of its context.
    keys, values: (blocks, block_size, kv_heads, head_dim), contiguous.
    block_tables: (rows, max_blocks) int32; context_lens: (rows,) int32, at least 1, the new token counted.
    scale: what scores are multiplied with; splits: a power of two, see `split_count`; window: how many of the last tokens are seen, 0 for all.
    launch: `num_warps` and `num_stages`, where the defaults are not to be used.
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    parts = torch.empty((rows, heads, splits, head_dim) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    weights = torch.empty((rows, heads, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    dim_pad = max(triton.next_power_of_2(head_dim), 16)
    _attend_split[(rows, kv_heads, splits)](
        q,
        keys,
        values,
        block_tables,
        context_lens,
        out,
        parts,
        weights,
        scale * 1.4426950408889634,  # log2(e)
        q.stride(0),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(triton.next_power_of_2(group), 16),  # a matrix instruction's smallest side
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE_=TILE,
        SPLITS=splits,
        WINDOW=window,
        **(launch or {"num_warps": 4, "num_stages": 3}),
    )
    if splits > 1:
        _join_splits[(rows * heads,)](out, parts, weights, HEAD_DIM=head_dim, DIM_PAD=dim_pad, SPLITS=splits, num_warps=4)
    return out
