"""Tiny random models of each family that the engine runs, made, saved, and read back through the engine's own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.ar.engine import Engine
from stages.ar.loading import load, load_part
from stages.ar.runner import Runner

VOCABULARY = 160
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True}
ROPE_3D = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True, "interleaved": True}

TEXT = ("llama", "smollm", "qwen3", "qwen3_moe", "gemma3", "mistral")
OMNI = ("thinker", "talker")
FAMILIES = (*TEXT, *OMNI)


def save(family: str, folder: Path) -> None:
    """A checkpoint of `family` with random weights and a tokenizer of one token per word."""
    import transformers as tf

    torch.set_num_threads(1)
    torch.manual_seed(7)
    if family in OMNI:
        model = tf.Qwen3OmniMoeForConditionalGeneration(omni_config())
        for weight in model.parameters():  # transformers leaves some of these as the memory was
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(folder)
    else:
        make = {
            "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
            "smollm": lambda: tf.LlamaForCausalLM(
                tf.LlamaConfig(
                    **{**SMALL, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
                    tie_word_embeddings=True,
                )
            ),
            "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL)),
            "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **MOE)),
            # Windows shorter than the tests' contexts, and layers with and without one.
            "gemma3": lambda: tf.Gemma3ForCausalLM(
                tf.Gemma3TextConfig(
                    **SMALL,
                    sliding_window=16,
                    query_pre_attn_scalar=16,
                    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                )
            ),
            "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SMALL, sliding_window=16)),
        }[family]
        make().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw)


def omni_config() -> Any:
    import transformers as tf

    small = {k: v for k, v in SMALL.items() if k not in ("eos_token_id", "bos_token_id", "vocab_size")}
    moe = {k: v for k, v in MOE.items() if k != "norm_topk_prob"}
    tokens = {"audio_token_id": 1, "image_token_id": 2, "video_token_id": 3, "audio_start_token_id": 4, "vision_start_token_id": 7}
    thinker = {
        **tokens, "audio_end_token_id": 5, "user_token_id": 6, "vision_end_token_id": 8, "position_id_per_seconds": 13,
        "initializer_range": 0.2,
        "audio_config": {
            "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 128,
            "downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 100, "output_dim": 64,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256,
        },
        "text_config": {**small, **moe, "vocab_size": VOCABULARY, "rope_parameters": dict(ROPE_3D)},
    }  # fmt: skip
    talker = {
        **tokens, "num_code_groups": 4, "spatial_merge_size": 2, "thinker_hidden_size": 64, "accept_hidden_layer": 2,
        "initializer_range": 0.2,
        "codec_eos_token_id": 150, "codec_nothink_id": 151, "codec_think_bos_id": 152, "codec_think_eos_id": 153, "codec_pad_id": 154,
        "codec_bos_id": 155, "speaker_id": {"ethan": 156},
        "text_config": {
            **small, **moe, "vocab_size": VOCABULARY, "shared_expert_intermediate_size": 32, "rope_parameters": dict(ROPE_3D),
        },
        "code_predictor_config": {
            **small, "num_hidden_layers": 2, "vocab_size": 64, "num_code_groups": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    }  # fmt: skip
    code2wav = {
        "codebook_size": 64, "num_quantizers": 4, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64, "sliding_window": 16, "decoder_dim": 64, "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2], "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    return tf.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=talker, code2wav_config=code2wav, enable_audio_output=True,
        im_start_token_id=10, im_end_token_id=11, tts_pad_token_id=12, tts_bos_token_id=13, tts_eos_token_id=14, system_token_id=15,
        user_token_id=6, assistant_token_id=16,
    )  # fmt: skip


def read(family: str, folder: Path) -> Any:
    """The model, by the engine's loading, in float32."""
    if family in OMNI:
        return load_part(folder, family, dtype="float32", device="cpu")
    model, _, _ = load(folder, dtype="float32", device="cpu", threads=1, progress=lambda _: None)
    return model


def runner(family: str, folder: Path, **options: Any) -> Runner:
    model = read(family, folder)
    if family == "talker":
        return Runner(model, inner=model.model, head=model.codec_head, **options)
    return Runner(model, **options)


def engine(runner: Runner, **options: Any) -> Engine:
    """Small: 24 tokens a step, blocks of 4."""
    sizes = {"blocks": 129, "block_size": 4, "max_tokens": 24, "max_sequences": 8, "max_context": 256, "max_waiting": 64}
    return Engine(runner, **{**sizes, **options})
