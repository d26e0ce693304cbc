"""Checkpoints as they are found: GGUF files, parts of an omni model; what does not fill the model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

from stages.ar.loading import load, load_part  # noqa: E402
from stages.ar.params import Sampling  # noqa: E402
from stages.ar.runner import Runner  # noqa: E402
from streamrt import ConfigError  # noqa: E402
from tests.stages.ar import families  # noqa: E402
from tests.stages.test_causal_lm import tiny_tokenizer  # noqa: E402

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """A Qwen2 of float32 in one file, as llama.cpp's converter names things."""
    gguf = pytest.importorskip("gguf", reason="needs the extra streamrt[torch]")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, *rest, kind = name.split(".")
            name = f"blk.{layer}.{NAMES['.'.join(rest)]}.{kind}"
        else:
            name = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_says_what_its_model_says(tmp_path: Path) -> None:
    import transformers as tf

    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    original = tf.Qwen2ForCausalLM(tf.Qwen2Config(**{**families.SMALL, "vocab_size": len(tokenizer)})).eval()
    write_gguf(tmp_path / "tiny.gguf", original, tokenizer)
    model, read, _ = load(tmp_path / "tiny.gguf", dtype="float32", device="cpu", threads=1, progress=lambda _: None)
    prompt = read("hello world").input_ids
    assert prompt == tokenizer("hello world").input_ids
    engine = families.engine(Runner(model))
    job = engine.job(prompt, Sampling())
    engine.add(job)
    for _ in range(8):
        engine.step()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = original.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert job.tokens == expected[0].tolist()


def test_a_part_with_a_gap_is_refused_and_the_others_weights_are_not_missed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    families.save("thinker", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if not name.startswith("thinker.")}, file, {"format": "pt"})
    load_part(tmp_path, "talker", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=r"missing keys: lm_head\.weight, .* and \d+ more"):
        load_part(tmp_path, "thinker", dtype="float32", device="cpu")
    gone = next(name for name in weights if name.startswith("talker.model.layers.1.mlp.experts."))
    save_file({name: tensor for name, tensor in weights.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(ConfigError):
        load_part(tmp_path, "talker", dtype="float32", device="cpu")


def test_a_folder_without_such_a_part_is_refused(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    with pytest.raises(ConfigError, match="no talker that transformers can load"):
        load_part(tmp_path, "talker", dtype="float32", device="cpu")
