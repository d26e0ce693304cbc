"""Tiny pipelines of random weights, built of diffusers' own classes, saved, and reloaded by the stage's own loading code.

`PIPELINES` holds what makes each, and what a request asks of it. Nothing here is a stand-in: only the sizes are small.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.diffusion.processor import QwenVLProcessor


class Tiny(NamedTuple):
    make: Callable[[], Any]
    task: str
    params: dict[str, Any]  # of a request
    takes_image: bool = False


def save(pipeline: Any, folder: Path) -> Path:
    pipeline.save_pretrained(folder)
    labels = getattr(pipeline, "labels", None)
    index = json.loads((folder / "model_index.json").read_text())
    if labels:  # DiTPipeline keeps them, and does not write them
        index["id2label"] = {str(number): name for name, number in labels.items()}
    if isinstance(getattr(pipeline, "processor", None), QwenVLProcessor):  # as published checkpoints have it
        pipeline.processor.save_pretrained(folder / "processor")
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


# ---- text ------------------------------------------------------------------------------------------------------------------


def byte_tokenizer(specials: list[str], vocab_size: int = 384) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world a photo of a cat the quick brown fox"], trainer)
    return tokenizer


QWEN_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer() -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(QWEN_TOKENS),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=QWEN_TOKENS,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def clip_tokenizer() -> Any:
    characters = [chr(code) for code in range(33, 127)]
    names = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={name: place for place, name in enumerate(names)}, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    letters = [chr(code) for code in range(97, 123)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in letters] + [(f"▁{letter}", -2.5) for letter in letters]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)


def t5(width: int = 32) -> Any:
    config = transformers.T5Config(
        vocab_size=384, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu", pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5EncoderModel(config).eval()


def clip(*, projects: bool = False, width: int = 32) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=200, hidden_size=width, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, projection_dim=width,
        max_position_embeddings=77, bos_token_id=188, eos_token_id=189, pad_token_id=189, hidden_act="gelu",
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel)(config).eval()


def qwen_vl(width: int = 16) -> Any:
    text = {
        "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}, "vocab_size": 400,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": width, "intermediate_size": width, "num_heads": 2, "out_hidden_size": width, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=6, video_token_id=7, vision_start_token_id=3, vision_end_token_id=4,
        vision_token_id=5,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3(width: int = 32) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=400, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.Qwen3Model(config).eval()


# ---- images ----------------------------------------------------------------------------------------------------------------


def flow_match() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def kl_vae(channels: int, **more: Any) -> Any:
    return diffusers.AutoencoderKL(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(4,), layers_per_block=1, latent_channels=channels, norm_num_groups=1,
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035, **more,
    )  # fmt: skip


def dit() -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000,
    )  # fmt: skip
    vae = kl_vae(4)
    labels = {number: str(number) for number in range(10)}
    return diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler(), id2label=labels)


def _qwen_parts(base_dim: int = 24, dim_mult: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    return {
        "transformer": diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=base_dim, z_dim=4, dim_mult=list(dim_mult), num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
            temperal_downsample=[False] * (len(dim_mult) - 2) + [True],
        ),
        "scheduler": flow_match(),
        "text_encoder": qwen_vl(),
        "tokenizer": qwen_tokenizer(),
    }  # fmt: skip


def qwenimage() -> Any:
    return diffusers.QwenImagePipeline(**_qwen_parts())


def qwenimage_edit() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    # The pipeline scales its input to a million pixels, so the VAE makes few latents of them.
    return diffusers.QwenImageEditPipeline(**_qwen_parts(4, (1,) * 6), processor=QwenVLProcessor(images, qwen_tokenizer()))


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, vae=kl_vae(1), scheduler=flow_match(), text_encoder=clip(), text_encoder_2=t5(), tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
    )  # fmt: skip


def flux2() -> Any:
    config = transformers.MistralConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=30, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    )  # fmt: skip
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
        timestep_guidance_channels=256, axes_dims_rope=[4, 4, 4, 4],
    )  # fmt: skip
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=32, in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return diffusers.Flux2Pipeline(
        transformer=transformer, vae=vae, scheduler=flow_match(), text_encoder=transformers.MistralModel(config).eval(),
        tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32,
        joint_attention_dim=64, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=kl_vae(4), scheduler=flow_match(), text_encoder=clip(projects=True), text_encoder_2=clip(projects=True),
        text_encoder_3=t5(64), tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


def sdxl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=80, cross_attention_dim=64, norm_num_groups=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, steps_offset=1, beta_schedule="scaled_linear")
    return diffusers.StableDiffusionXLPipeline(
        unet=unet, vae=vae, scheduler=scheduler, text_encoder=clip(), text_encoder_2=clip(projects=True), tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
    )  # fmt: skip


def zimage() -> Any:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        norm_eps=1e-5, qk_norm=True, cap_feat_dim=32, rope_theta=256.0, t_scale=1000.0, axes_dims=[8, 4, 4], axes_lens=[512, 64, 64],
    )  # fmt: skip
    with torch.no_grad():  # left uninitialized by the class
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    vae = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[32, 32], layers_per_block=1, latent_channels=16, norm_num_groups=32, sample_size=32, scaling_factor=0.3611,
        shift_factor=0.1159,
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        transformer=transformer, vae=vae, scheduler=flow_match(), text_encoder=qwen3(), tokenizer=qwen_tokenizer()
    )


# ---- video and sound -------------------------------------------------------------------------------------------------------


def _wan_parts(channels: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "transformer": diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=16, text_dim=32,
            freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, **more,
        ),
        "vae": diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        "scheduler": diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
    }  # fmt: skip


def wan() -> Any:
    return diffusers.WanPipeline(**_wan_parts())


def wan_i2v() -> Any:
    return diffusers.WanImageToVideoPipeline(**_wan_parts(36))


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=1, caption_channels=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), patch_size=1,
    )  # fmt: skip
    return diffusers.LTXPipeline(transformer=transformer, vae=vae, scheduler=flow_match(), text_encoder=t5(), tokenizer=t5_tokenizer())


def ltx2() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    text = {
        "vocab_size": 400, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 14, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=6, boi_token_index=3, eoi_token_index=4
    )
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=2,
        caption_channels=16, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=4, video_connector_attention_head_dim=4,
        video_connector_num_layers=1, video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=4, audio_connector_num_layers=1, audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), down_block_types=("LTX2VideoDownBlock3D",), decoder_block_out_channels=(8,),
        layers_per_block=(1,), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_type=("spatiotemporal",), upsample_residual=(False,),
        upsample_factor=(1,), patch_size=1, decoder_causal=False,
    )  # fmt: skip
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
    )
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=32, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2], resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
    )  # fmt: skip
    return diffusers.LTX2Pipeline(
        transformer=transformer, vae=vae, audio_vae=audio_vae, scheduler=flow_match(), connectors=connectors, vocoder=vocoder,
        text_encoder=transformers.Gemma3ForConditionalGeneration(config).eval(), tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def hunyuan() -> Any:
    text = transformers.Qwen2_5_VLTextConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=2048,
    )  # fmt: skip
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2, num_refiner_layers=1, mlp_ratio=2.0,
        text_embed_dim=16, text_embed_2_dim=32, image_embed_dim=12, rope_axes_dim=(2, 2, 4), target_size=16, task_type="t2v",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16, 16), layers_per_block=1, spatial_compression_ratio=4, temporal_compression_ratio=4
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(text).eval(), tokenizer=qwen_tokenizer(), transformer=transformer, vae=vae,
        scheduler=flow_match(), text_encoder_2=t5(), tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    )  # fmt: skip


def stableaudio() -> Any:
    from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel

    transformer = diffusers.StableAudioDiTModel(
        sample_size=4, in_channels=3, num_layers=2, attention_head_dim=4, num_key_value_attention_heads=2, out_channels=3,
        cross_attention_dim=4, time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=3, audio_channels=2,
        channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    scheduler = diffusers.CosineDPMSolverMultistepScheduler(
        solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
    )
    projection = StableAudioProjectionModel(text_encoder_dim=4, conditioning_dim=4, min_value=0, max_value=32)
    return diffusers.StableAudioPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=t5(4), tokenizer=t5_tokenizer(), projection_model=projection
    )


SMALL = {"prompt": "a photo of a cat", "width": 32, "height": 32}
CLIP = {"prompt": "a cat walks", "negative_prompt": "bad", "width": 16, "height": 16, "num_frames": 9, "guidance_scale": 5.0}

PIPELINES: dict[str, Tiny] = {
    "dit": Tiny(dit, "image", {"class_label": 7, "guidance_scale": 3.0}),
    "qwenimage": Tiny(qwenimage, "image", {**SMALL, "negative_prompt": "bad", "true_cfg_scale": 2.0}),
    "flux": Tiny(flux, "image", {**SMALL, "width": 8, "height": 8, "guidance_scale": 3.5}),
    "sd3": Tiny(sd3, "image", {**SMALL, "guidance_scale": 5.0}),
    "sdxl": Tiny(sdxl, "image", {**SMALL, "negative_prompt": "bad", "guidance_scale": 4.0}),
    "zimage": Tiny(zimage, "image", {**SMALL, "negative_prompt": "bad", "guidance_scale": 3.0}),
    "qwenimage_edit": Tiny(
        qwenimage_edit, "image", {**SMALL, "width": 64, "height": 64, "negative_prompt": "bad", "true_cfg_scale": 2.0}, takes_image=True
    ),
    "flux2": Tiny(flux2, "image", {**SMALL, "guidance_scale": 4.0}),
    "wan": Tiny(wan, "video", CLIP),
    "wan_i2v": Tiny(wan_i2v, "video", CLIP, takes_image=True),
    "ltx": Tiny(ltx, "video", {**CLIP, "width": 32, "height": 32}),
    "ltx2": Tiny(ltx2, "video", {**CLIP, "width": 32, "height": 32, "num_frames": 5}),
    "hunyuan": Tiny(hunyuan, "video", {**CLIP, "num_frames": 5}),
    "stableaudio": Tiny(stableaudio, "audio", {"prompt": "rain", "negative_prompt": "noise", "seconds": 1.0, "guidance_scale": 3.0}),
}


def build(name: str, folder: Path) -> Path:
    """The tiny pipeline `name`, saved in `folder`."""
    torch.manual_seed(0)
    return save(PIPELINES[name].make(), folder)
