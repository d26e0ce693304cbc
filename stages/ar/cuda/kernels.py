"""Triton kernels for what lies between attention and the large matrix products: norms, rotary embedding, SwiGLU, matrix times vector.

    rms_norm           x -> norm(x)
    add_rms_norm       x, delta -> x + delta, norm(x + delta)
    rope_and_store     q, k, v side by side -> rotated q; rotated k and v into the paged cache
    swiglu             gate, up side by side -> silu(gate) * up
    matvec             one row times a weight, with the norm before it and the residual or SwiGLU after it
    few_rows           a few rows times a weight in 8 bits

Knows tensors. Knows nothing of models; `layers.py` puts these into one.

Rules
- Sums are float32; a result is rounded to the model's dtype once, at the end.
- Nothing waits for the device and no shape depends on a tensor's contents, so every function can be captured in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, eps, WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PAD)
    mask = column < WIDTH
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row + column, x.to(sum_ptr.dtype.element_ty), mask=mask)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    tl.store(out_ptr + row + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` (..., width), contiguous, normed over its last dimension and multiplied with `weight` (width,)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm[(x.numel() // width,)](
        x, x, weight, x, out, eps, WIDTH=width, PAD=triton.next_power_of_2(width), ADD=False, num_warps=_norm_warps(width)
    )
    return out


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta`, and that normed; both (..., width), contiguous."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm[(x.numel() // width,)](
        x, delta, weight, total, out, eps, WIDTH=width, PAD=triton.next_power_of_2(width), ADD=True, num_warps=_norm_warps(width)
    )
    return total, out


def _norm_warps(width: int) -> int:
    return 8 if width > 2048 else 4 if width > 512 else 1


@triton.jit
def _rope_and_store(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * AT_ONCE  # heads of q, then of k, then of v; a program's are all of one kind
    head = first + tl.arange(0, AT_ONCE)
    dim = tl.arange(0, DIM_PAD)
    mask = (head >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
    row = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    x = tl.load(row + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    slot = tl.load(slot_ptr + token).to(tl.int64) * (KV_HEADS * HEAD_DIM)
    if first >= HEADS + KV_HEADS:
        at = (head - HEADS - KV_HEADS)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(value_cache_ptr + slot + at, x, mask=mask)
    else:
        # A pair of dimensions half a head apart is rotated; each program reads both and writes one.
        other = tl.where(dim < HEAD_DIM // 2, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
        pair = tl.load(row + head[:, None] * HEAD_DIM + other[None, :], mask=mask, other=0.0).to(tl.float32)
        own = x.to(tl.float32)
        if NORM:
            weight_ptr = q_weight_ptr
            if first >= HEADS:
                weight_ptr = k_weight_ptr
            rstd = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
            is_dim = dim < HEAD_DIM
            own = own * rstd * tl.load(weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            pair = pair * rstd * tl.load(weight_ptr + other, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        cos = tl.load(cos_ptr + token * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        turned = (own * cos + pair * tl.where(dim < HEAD_DIM // 2, -sin, sin)).to(q_ptr.dtype.element_ty)
        if first < HEADS:
            tl.store(q_ptr + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :], turned, mask=mask)
        else:
            at = (head - HEADS)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(key_cache_ptr + slot + at, turned, mask=mask)


def rope_and_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    heads: int,
) -> torch.Tensor:
    """Queries (tokens, heads, head_dim), normed and rotated; keys, likewise, and values go into the cache.

    qkv: (tokens, (heads + 2 kv_heads) * head_dim), contiguous; norms: weights (head_dim,) of q and k, and eps, for models that norm each head.
    cos, sin: (tokens, head_dim), contiguous, the halves alike; slots: (tokens,), the place of each token, block * block_size + offset.
    key_cache, value_cache: (blocks, block_size, kv_heads, head_dim), contiguous.
    """
    tokens = qkv.shape[0]
    kv_heads, head_dim = key_cache.shape[-2:]
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    at_once = _heads_at_once(heads, kv_heads)
    q_weight, k_weight, eps = norms or (qkv, qkv, 0.0)
    _rope_and_store[(tokens, (heads + 2 * kv_heads) // at_once)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        slots,
        q,
        key_cache,
        value_cache,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        AT_ONCE=at_once,
        NORM=norms is not None,
        num_warps=4 if at_once * head_dim >= 512 else 1,
    )
    return q


def _heads_at_once(heads: int, kv_heads: int) -> int:
    """The most heads, a power of two up to 8, that divide both kinds."""
    return next(n for n in (8, 4, 2, 1) if heads % n == 0 and kv_heads % n == 0)


@triton.jit
def _swiglu(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `gate_up` (rows, 2 * width), contiguous; (rows, width)."""
    rows, double = gate_up.shape
    out = torch.empty((rows, double // 2), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _swiglu[(rows, triton.cdiv(double // 2, block))](gate_up, out, WIDTH=double // 2, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _widened(w):
    """A weight in float32, where it is exact. Integers by their bits: a processor converts 16 of them a cycle, and does 64 of these."""
    if w.dtype == tl.int8:
        # 2**23 + n has n in its last bits; n is w + 128, which is w with its sign turned over.
        bits = (w.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    return w.to(tl.float32)


@triton.jit
def _matvec(
    x_ptr,
    weight_ptr,
    scale_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GLU: tl.constexpr,
    SCALED: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = n < N
    at = n.to(tl.int64) * K
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for k0 in range(0, K, COLUMNS):
        k = k0 + tl.arange(0, COLUMNS)
        mask = k < K
        # Weights first, and never wanted again: they are what the time goes to.
        w = tl.load(weight_ptr + at[:, None] + k[None, :], mask=is_row[:, None] & mask[None, :], other=0.0, eviction_policy="evict_first")
        if GLU:
            w_up = tl.load(
                weight_ptr + (at[:, None] + N * K) + k[None, :],
                mask=is_row[:, None] & mask[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
        x = tl.load(x_ptr + k, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=mask, other=0.0).to(tl.float32)
        acc += _widened(w) * x[None, :]
        if GLU:
            acc_up += _widened(w_up) * x[None, :]
    y = tl.sum(acc, 1)
    rstd = 1.0
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= rstd
    if SCALED:
        y *= tl.load(scale_ptr + n, mask=is_row, other=0.0).to(tl.float32)
    if GLU:
        up = tl.sum(acc_up, 1) * rstd
        if SCALED:
            up *= tl.load(scale_ptr + N + n, mask=is_row, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=is_row)


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    glu: bool = False,
    launch: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """`x` (1, k) times `weight` (n, k) transposed: (1, n), or (1, n / 2) with `glu`, whose weight holds the gate's rows before the up projection's.

    norm: weight (k,) and eps of the RMS norm that `x` goes through before; residual: (1, n), added at the end.
    scales: (n,) of a weight that is stored as int8 or float8, one for each row.
    launch: rows a program computes, columns it reads at once, warps; see `matvec_launch`.
    """
    n, k = weight.shape
    n = n // 2 if glu else n
    rows, columns, warps = launch or matvec_launch(n, k, glu, weight.element_size())
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    _matvec[(triton.cdiv(n, rows),)](
        x,
        weight,
        scales if scales is not None else x,
        norm[0] if norm else x,
        residual if residual is not None else x,
        out,
        norm[1] if norm else 0.0,
        N=n,
        K=k,
        ROWS=rows,
        COLUMNS=columns,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GLU=glu,
        SCALED=scales is not None,
        num_warps=warps,
    )
    return out


def matvec_launch(n: int, k: int, glu: bool, itemsize: int) -> tuple[int, int, int]:
    """Rows a program, columns at once, warps: what read weights fastest on an H200, at the shapes of an 8B model (bench_ar_gpu, "product").

    Few outputs need wide loads to keep all processors busy; long rows and very many outputs like smaller tiles, of which more are in flight.
    A tile is as many bytes in 8 bits as in 16.
    """
    wider = 2 // min(itemsize, 2)
    if glu:
        return 4, 1024 * wider, 4
    if n > 32768:
        return 8, 512 * wider, 4
    if k > 8192:
        return 4, 512 * wider, 4
    return 2, 2048 * wider, 8


@triton.jit(do_not_specialize=["m"])
def _few_rows(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output, is_row = n < N, row < m
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k0 in range(0, K, COLUMNS):
        k = k0 + tl.arange(0, COLUMNS)
        mask = k < K
        w = tl.load(weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=is_output[:, None] & mask[None, :], other=0.0)
        x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=is_row[:, None] & mask[None, :], other=0.0)
        acc += tl.dot(x, tl.trans(_widened(w).to(x.dtype)), input_precision="ieee")  # 8 bits fit into bfloat16
    acc *= tl.load(scale_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


FEW = 64  # rows; more are bound by arithmetic, not by the reading of weights


def few_rows(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x` (m, k), contiguous, m at most FEW, times an int8 or float8 `weight` (n, k) transposed: (m, n). scales: (n,)."""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    outputs = 32 if n <= 8192 else 64
    _few_rows[(triton.cdiv(n, outputs),)](
        x,
        weight,
        scales,
        out,
        m,
        N=n,
        K=k,
        ROWS=max(triton.next_power_of_2(m), 16),  # a matrix instruction's smallest side
        OUTPUTS=outputs,
        COLUMNS=128,
        num_warps=4,
        num_stages=4,
    )
    return out
