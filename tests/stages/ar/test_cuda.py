"""The engine on a GPU: the same tokens as `generate()`, with graphs and without, fused and not; attention backends beside each other."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.ar.engine import Engine
from stages.ar.params import Sampling
from streamrt import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GREEDY = Sampling(0.0, 1.0, 0)


def tiny(kind: str, dtype: torch.dtype, **more):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}  # `generate()` would not choose an end before its time
    config = AutoConfig.for_model(kind, vocab_size=500, head_dim=64, max_position_embeddings=512, **ends, **{**sizes, **more})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False).cuda()
    for parameter in model.parameters():
        parameter.normal_(0, 0.1)
    return model


def engine_on(model, **parts) -> Engine:
    from stages.ar.cuda.runner import CudaRunner

    return Engine(CudaRunner(model, **parts), blocks=120, block_size=16, max_tokens=160, max_sequences=8, max_context=512)


def run(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Two more each step."""
    jobs = [engine.job(prompt, GREEDY) for prompt in prompts]
    waiting = list(jobs)
    while waiting or engine.has_work:
        for job in waiting[:2]:
            engine.add(job)
        waiting = waiting[2:]
        for advance in engine.step():
            if len(advance.job.tokens) == advance.job.prompt_length + new:
                engine.remove(advance.job)
    assert engine.pool.held == 0
    return [job.tokens[job.prompt_length :] for job in jobs]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    dice = random.Random(0)
    made = [[dice.randrange(500) for _ in range(dice.choice([1, 5, 30, 100, 300]))] for _ in range(14)]
    return [*made, made[3] + [7]]


@pytest.mark.parametrize(("is_fused", "has_graphs"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_greedy_tokens_in_float32_are_those_of_generate(kind, is_fused, has_graphs, prompts):
    model = tiny(kind, torch.float32, **({"sliding_window": 32} if kind == "gemma3_text" else {}))
    model.generation_config.eos_token_id = None  # all its 20 tokens are compared, and `min_new_tokens` would have it avoid this one
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    engine = engine_on(copy.deepcopy(model), is_fused=is_fused, has_graphs=has_graphs)
    assert ("3 layers" in engine.runner.describe()["layers"]) == (is_fused and kind != "gemma3_text")
    assert engine.runner.describe()["graphs"].startswith("none") != has_graphs
    got = run(engine, prompts, 20)
    # Sums in another order may turn a tie over: a token that differs must have been one.
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        if ours != theirs:
            at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            logits = model(input_ids=torch.tensor([prompt + theirs[:at]], device="cuda")).logits[0, -1]
            assert abs(float(logits[ours[at]] - logits[theirs[at]])) < 1e-3


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_prompt_backends_agree_with_plain_attention(backend):
    from stages.ar.attention import Prefill
    from stages.ar.cuda.attention import _attend_prompts, plan_prompts

    torch.manual_seed(0)
    for sizes in ([(2048, 2048)], [(100, 100), (30, 300), (1, 17)]):
        prefills, start = [], 0
        for queries, context in sizes:
            prefills.append(Prefill(start, start + queries, context, torch.zeros(-(-context // 16), dtype=torch.int32)))
            start += queries
        prompts = plan_prompts(prefills, 16, torch.device("cuda"))
        q = torch.randn(start, 8, 64, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(sum(prompts.key_lens), 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for window in (0, 50):
            got = _attend_prompts(q, k, v, prompts, 0.1, window, backend).float()
            want = _attend_prompts(q.float(), k.float(), v.float(), prompts, 0.1, window, "sdpa")
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("weights", ["int8", "float8"])
def test_weights_in_8_bits_are_close_for_one_row_and_for_more(weights):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torch.nn import functional as F

    from stages.ar.cuda.layers import _matvec, _product, fuse
    from stages.ar.cuda.quantize import quantize

    model = tiny("qwen3", torch.bfloat16)
    fuse(model)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    linear = model.model.layers[0].qkv_proj
    want = F.linear(x, linear.weight).float()
    quantize(model.model, weights, torch.cuda.get_device_capability())
    assert linear.weight.qdata.element_size() == 1
    for got in (_matvec(x[:1], linear).float(), _product(x, linear).float()[:1], linear(x).float()[:1]):
        assert float((got - want[:1]).norm() / want[:1].norm()) < 0.05


def test_what_can_not_run_is_refused():
    with pytest.raises(ConfigError, match="cudnn"):
        engine_on(tiny("qwen3", torch.float32), attention="cudnn")
