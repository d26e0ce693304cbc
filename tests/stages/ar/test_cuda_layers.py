"""Fused layers beside transformers' own, on the same weights: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before its interpreter was chosen: run this file by itself", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, triton's own too
pytest.importorskip("triton", reason="triton is not installed: the kernels were not run")

from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # noqa: E402

from stages.ar.attention import Prefill, Step  # noqa: E402
from stages.ar.cuda.attention import Plan, choose_prompt_backend, plan_prompts  # noqa: E402
from stages.ar.cuda.layers import fuse  # noqa: E402
from stages.ar.kv import KVStore  # noqa: E402
from streamrt import ConfigError  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 8

pytestmark = pytest.mark.slow


def tiny(kind: str):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=64, head_dim=16, max_position_embeddings=256, **sizes)
    config.sliding_window = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)  # norms and biases too: ones and zeros would hide that they are not applied
    return model.to(DEVICE)


def not_called(*args, **kwargs):
    raise AssertionError("a fused layer calls its own attention")


def memory_of(config, blocks: int) -> KVStore:
    return KVStore(
        layers=config.num_hidden_layers,
        blocks=blocks,
        block_size=BLOCK,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=DEVICE,
    )


def run(model, memory, tokens, positions, slots, rows=(), prefills=(), splits=1) -> torch.Tensor:
    """Logits of a packed step; rows: (block table, context length) of each that decodes."""
    tables = torch.tensor([table for table, _ in rows], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32, device=DEVICE)
    plan = Plan("sdpa", splits, plan_prompts(prefills, BLOCK, torch.device(DEVICE)))
    step = Step(memory, torch.tensor(slots, device=DEVICE), len(rows), tables, lengths, prefills, plan)
    ids, places = torch.tensor([tokens], device=DEVICE), torch.tensor([positions], device=DEVICE)
    return model(input_ids=ids, position_ids=places, use_cache=False, step=step).logits[0]


def prefill(start, end, context, blocks) -> Prefill:
    return Prefill(start, end, context, torch.tensor(blocks, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
def test_a_fused_model_gives_the_logits_of_the_one_it_was_made_from(kind):
    plain = tiny(kind)
    fused = copy.deepcopy(plain)
    fusion = fuse(fused)
    assert (fusion.layers, fusion.left) == (2, {})
    AttentionInterface.register("streamrt_test", not_called)  # of a name without a mask function no mask is made
    fused.set_attn_implementation("streamrt_test")
    first, second = list(range(3, 14)), list(range(20, 29))  # in blocks 1 and 2, and 4 and 5
    memory = memory_of(plain.config, 8)
    want = [plain(input_ids=torch.tensor([tokens], device=DEVICE)).logits[0] for tokens in (first, second)]

    # 1. two prompts, the first one in two chunks
    prefills = (prefill(0, 7, 7, [1]), prefill(7, 16, 9, [4, 5]))
    got = run(fused, memory, first[:7] + second, [*range(7), *range(9)], [*range(8, 15), *range(32, 41)], (), prefills)
    torch.testing.assert_close(got[:7], want[0][:7], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got[7:], want[1], atol=1e-3, rtol=1e-3)

    # 2. one decodes beside the other's second chunk
    prefills = (prefill(1, 5, 11, [1, 2]),)
    got = run(fused, memory, [33, *first[7:]], [9, *range(7, 11)], [41, *range(15, 19)], [([4, 5], 10)], prefills, splits=2)
    torch.testing.assert_close(got[1:], want[0][7:], atol=1e-3, rtol=1e-3)
    want_second = plain(input_ids=torch.tensor([[*second, 33]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(got[0], want_second, atol=1e-3, rtol=1e-3)

    # 3. one row alone, which takes another path through the products
    got = run(fused, memory, [44], [11], [19], [([1, 2], 12)])
    want_first = plain(input_ids=torch.tensor([[*first, 44]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(got[0], want_first, atol=1e-3, rtol=1e-3)


def test_layers_of_other_anatomy_are_left_and_named():
    config = AutoConfig.for_model("olmo2", vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    fusion = fuse(AutoModelForCausalLM.from_config(config))
    assert fusion.layers == 0
    assert fusion.left == {"Olmo2DecoderLayer": 2}


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "has_flash_attn", "cudnn_refusal", "chosen"),
    [
        ("auto", (9, 0), torch.bfloat16, False, "", "cudnn"),
        ("auto", (9, 0), torch.bfloat16, True, "", "flash_attn"),
        ("auto", (9, 0), torch.bfloat16, False, "no kernel", "flash"),
        ("auto", (8, 6), torch.float16, False, "", "flash"),
        ("auto", (7, 5), torch.float16, False, "", "sdpa"),
        ("auto", (9, 0), torch.float32, True, "", "sdpa"),
        ("flash", (9, 0), torch.bfloat16, False, "", "flash"),
    ],
)
def test_the_prompt_backend_follows_from_what_the_device_can_do(asked, capability, dtype, has_flash_attn, cudnn_refusal, chosen):
    backend = choose_prompt_backend(
        asked, capability=capability, dtype=dtype, head_dim=128, has_flash_attn=has_flash_attn, cudnn_refusal=cudnn_refusal
    )
    assert backend.name == chosen
    assert backend.why


@pytest.mark.parametrize("asked", ["flash_attn", "cudnn", "flash", "xformers"])
def test_a_backend_that_can_not_run_is_refused_by_name(asked):
    with pytest.raises(ConfigError, match=asked):
        choose_prompt_backend(asked, capability=(9, 0), dtype=torch.float32, head_dim=128, has_flash_attn=False, cudnn_refusal="")
