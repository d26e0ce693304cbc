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

from stages.ar.cuda.attention import Prompts, Step, choose_prompt_backend  # noqa: E402
from stages.ar.cuda.layers import fuse  # noqa: E402
from streamrt import ConfigError  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 8

pytestmark = pytest.mark.slow


class Memory:
    """Keys and values of every layer, as the engine has them."""

    def __init__(self, config, blocks: int) -> None:
        shape = (config.num_hidden_layers, blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)


def tiny(kind: str):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=64, head_dim=16, max_position_embeddings=256, **sizes)
    config.sliding_window = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)  # norms and biases too: ones and zeros would hide that they are not applied
    return model.to(DEVICE)


def run(model, memory, tokens, positions, step) -> torch.Tensor:
    ids, places = torch.tensor([tokens], device=DEVICE), torch.tensor([positions], device=DEVICE)
    return model(input_ids=ids, position_ids=places, use_cache=False, kv=memory, step=step).logits[0]


def not_called(*args, **kwargs):
    raise AssertionError("a fused layer calls its own attention")


def prompts(query_lens, key_lens, places=None) -> Prompts:
    def starts(lengths):
        return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    return Prompts(starts(query_lens), starts(key_lens), query_lens, key_lens, places)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
def test_a_fused_model_gives_the_logits_of_the_one_it_was_made_from(kind):
    plain = tiny(kind)
    fused = copy.deepcopy(plain)
    fusion = fuse(fused, "sdpa")
    assert (fusion.layers, fusion.left) == (2, {})
    AttentionInterface.register("streamrt_test", not_called)  # of a name without a mask function no mask is made
    fused.set_attn_implementation("streamrt_test")
    first, second = list(range(3, 14)), list(range(20, 29))
    memory = Memory(plain.config, 8)
    none = torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([*range(8, 19), *range(32, 41)], device=DEVICE)  # blocks 1, 2 and 4, 5
    want = [plain(input_ids=torch.tensor([tokens], device=DEVICE)).logits[0] for tokens in (first, second)]

    # 1. two prompts, the first one in two chunks
    lens = [7, 9]
    step = Step(torch.cat([slots[:7], slots[11:]]), 0, none, none[:, 0], 1, prompts(lens, lens))
    got = run(fused, memory, first[:7] + second, [*range(7), *range(9)], step)
    torch.testing.assert_close(got[:7], want[0][:7], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got[7:], want[1], atol=1e-3, rtol=1e-3)

    # 2. one decodes beside the other's second chunk
    tables = torch.tensor([[4, 5, 0, 0], [1, 2, 0, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([10, 12], dtype=torch.int32, device=DEVICE)
    step = Step(torch.cat([torch.tensor([41], device=DEVICE), slots[7:11]]), 1, tables[:1], lengths[:1], 2, prompts([4], [11], slots[:11]))
    got = run(fused, memory, [33, *first[7:]], [9, *range(7, 11)], step)
    torch.testing.assert_close(got[1:], want[0][7:], atol=1e-3, rtol=1e-3)
    want_second = plain(input_ids=torch.tensor([[*second, 33]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(got[0], want_second, atol=1e-3, rtol=1e-3)

    # 3. one row alone, which takes another path through the products
    step = Step(torch.tensor([19], device=DEVICE), 1, tables[1:], lengths[1:], 1)
    got = run(fused, memory, [44], [11], step)
    want_first = plain(input_ids=torch.tensor([[*first, 44]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(got[0], want_first, atol=1e-3, rtol=1e-3)


def test_layers_of_other_anatomy_are_left_and_named():
    config = AutoConfig.for_model("olmo2", vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    fusion = fuse(AutoModelForCausalLM.from_config(config), "sdpa")
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
