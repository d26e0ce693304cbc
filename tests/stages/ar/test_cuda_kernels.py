"""The Triton kernels against plain torch: on a GPU where there is one, in Triton's interpreter on the CPU where there is not."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before its interpreter was chosen: run this file by itself", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, triton's own too
pytest.importorskip("triton", reason="triton is not installed: the kernels were not run")

from stages.ar.cuda import kernels, paged  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TOLERANCE = 2e-2 if torch.cuda.is_available() else 1e-4

pytestmark = pytest.mark.slow


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 16, 16), (3, 3, 24, 8), (8, 1, 32, 32)])
def test_paged_decode_attention_is_what_plain_attention_over_each_context_gives(splits, window, heads, kv_heads, head_dim, block_size):
    torch.manual_seed(0)
    lengths = [1, 17, 64, 130, 257]
    blocks = sum(-(-n // block_size) for n in lengths) + 1
    keys, values = random(blocks, block_size, kv_heads, head_dim), random(blocks, block_size, kv_heads, head_dim)
    order = (torch.randperm(blocks - 1) + 1).tolist()
    tables = torch.zeros(len(lengths), 40, dtype=torch.int32)
    for row, n in enumerate(lengths):
        for at in range(-(-n // block_size)):
            tables[row, at] = order.pop()
    q = random(len(lengths), heads, head_dim)

    got = paged.paged_decode_attention(
        q, keys, values, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), scale=0.3, splits=splits, window=window
    )

    for row, n in enumerate(lengths):
        k = keys[tables[row].long()].flatten(0, 1)[:n][-window:].transpose(0, 1)
        v = values[tables[row].long()].flatten(0, 1)[:n][-window:].transpose(0, 1)
        want = F.scaled_dot_product_attention(q[row][:, None], k, v, scale=0.3, enable_gqa=True)[:, 0]
        torch.testing.assert_close(got[row], want, atol=TOLERANCE, rtol=TOLERANCE)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("width", [24, 640])
def test_rms_norm_with_and_without_the_residual_added_before(width):
    torch.manual_seed(0)
    x, delta, weight = random(3, width), random(3, width), random(width)
    close(kernels.rms_norm(x, weight, 1e-5), norm(x, weight))
    total, out = kernels.add_rms_norm(x, delta, weight, 1e-5)
    close(total, x + delta)
    close(out, norm(x.float() + delta.float(), weight))


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 24), (16, 8, 32)])
def test_rope_and_store_rotates_and_writes_each_token_into_its_slot(has_norms, heads, kv_heads, head_dim):
    torch.manual_seed(0)
    tokens, block_size = 5, 4
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(tokens, head_dim // 2, device=DEVICE).repeat(1, 2) * 6
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    q_weight, k_weight = random(head_dim), random(head_dim)
    slots = torch.tensor([9, 3, 14, 4, 5], device=DEVICE)
    key_cache = torch.zeros(4, block_size, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    value_cache = torch.zeros_like(key_cache)

    norms = (q_weight, k_weight, 1e-5) if has_norms else None
    q = kernels.rope_and_store(qkv, norms, cos, sin, slots, key_cache, value_cache, heads=heads)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = norm(x, weight) if has_norms else x.float()
        first, second = x.chunk(2, -1)
        return x * cos.float()[:, None] + torch.cat([-second, first], -1) * sin.float()[:, None]

    want_q, want_k, want_v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    close(q, rotated(want_q, q_weight))
    close(key_cache.flatten(0, 1)[slots], rotated(want_k, k_weight))
    close(value_cache.flatten(0, 1)[slots], want_v)
    assert key_cache.flatten(0, 1).any(-1).any(-1).sum() == tokens  # and nothing else was written


def test_swiglu():
    gate_up = random(3, 2 * 1500)
    gate, up = gate_up.float().chunk(2, -1)
    close(kernels.swiglu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("launch", [(4, 64, 4), (2, 1024, 4)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_matvec_with_the_norm_before_it_and_the_residual_or_swiglu_after_it(launch, is_int8):
    torch.manual_seed(0)
    n, k = 30, 200
    x, residual, norm_weight = random(1, k), random(1, n), random(k)
    weight = random(n, k)
    scales = None
    plain = weight.float()
    if is_int8:
        scales = weight.abs().amax(1) / 127
        weight = (weight / scales[:, None]).round().to(torch.int8)
        plain = weight.float() * scales.float()[:, None]
    plain = plain / k**0.5
    scales = scales / k**0.5 if is_int8 else None
    weight = weight if is_int8 else weight / k**0.5

    close(kernels.matvec(x, weight, scales=scales, launch=launch), x.float() @ plain.T)
    close(kernels.matvec(x, weight, scales=scales, residual=residual, launch=launch), residual.float() + x.float() @ plain.T)
    gate, up = (norm(x, norm_weight) @ plain.T).chunk(2, -1)
    got = kernels.matvec(x, weight, scales=scales, norm=(norm_weight, 1e-5), glu=True, launch=launch)
    close(got, F.silu(gate) * up)


@pytest.mark.parametrize(("rows", "n", "k"), [(2, 40, 200), (17, 70, 130)])
def test_few_rows_times_a_weight_in_8_bits(rows, n, k):
    torch.manual_seed(0)
    x, weight = random(rows, k), random(n, k) / k**0.5
    scales = weight.float().abs().amax(1) / 127
    quantized = (weight.float() / scales[:, None]).round().to(torch.int8)
    close(kernels.few_rows(x, quantized, scales), x.float() @ (quantized.float() * scales[:, None]).T)
