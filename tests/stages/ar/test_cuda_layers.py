"""Fused layers beside transformers' own, on the same weights: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

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


def memory_of(config, blocks: int, *, kv_heads: int = 2, device: str = DEVICE) -> KVStore:
    return KVStore(
        layers=config.num_hidden_layers,
        blocks=blocks,
        block_size=BLOCK,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=device,
    )


def run(model, memory, tokens, positions, slots, rows=(), prefills=(), splits=1, device=DEVICE) -> torch.Tensor:
    """Logits of a packed step; rows: (block table, context length) of each that decodes."""
    tables = torch.tensor([table for table, _ in rows], dtype=torch.int32, device=device)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32, device=device)
    plan = Plan("sdpa", splits, plan_prompts(prefills, BLOCK, torch.device(device)))
    step = Step(memory, torch.tensor(slots, device=device), len(rows), tables, lengths, prefills, plan)
    ids, places = torch.tensor([tokens], device=device), torch.tensor([positions], device=device)
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


RANK = """
import sys
from pathlib import Path
from tests.stages.ar import test_cuda_layers
test_cuda_layers.be_rank(int(sys.argv[1]), Path(sys.argv[2]))
"""


def be_rank(rank: int, folder: Path) -> None:
    """One of two that share a model: what it says of a prompt, and of one row after it."""
    from stages.ar.loading import load
    from streamrt import Context

    device = f"cuda:{rank}" if DEVICE == "cuda" else "cpu"
    context = Context(stage="llm", rank=rank, ranks=2, rendezvous=folder, device=device)
    model, _, _ = load(folder / "model", dtype="float32", device=device, threads=1, progress=lambda _: None, ranked=context)
    with torch.inference_mode():
        fusion = fuse(model.model)
        assert (fusion.layers, fusion.left) == (2, {})
        assert model.model.layers[0].heads == 2
        AttentionInterface.register("streamrt_test", not_called)
        model.set_attn_implementation("streamrt_test")
        memory = memory_of(model.config, 8, kv_heads=1, device=device)
        tokens = list(range(3, 14))
        prompt = run(model, memory, tokens, [*range(11)], [*range(8, 19)], (), (prefill(0, 11, 11, [1, 2]),), device=device)
        row = run(model, memory, [44], [11], [19], [([1, 2], 12)], device=device)
    torch.save(torch.cat([prompt, row]).cpu(), folder / f"logits-{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_two_ranks_of_a_fused_model_give_its_logits(kind, tmp_path):
    from tests.stages.ar import families

    plain = tiny(kind)
    plain.save_pretrained(tmp_path / "model")
    families.tokenizer().save_pretrained(tmp_path / "model")
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], cwd=Path(__file__).parents[3]) for rank in range(2)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    want = plain(input_ids=torch.tensor([[*range(3, 14), 44]], device=DEVICE)).logits[0].cpu()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"logits-{rank}"), want, atol=1e-3, rtol=1e-3)


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
