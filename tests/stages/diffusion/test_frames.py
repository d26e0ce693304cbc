"""Frames leave while the VAE decodes, and are those that it gives in the end; the first mp4 fragment is there before the last ones are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
diffusers = pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.frames import comes_in_parts, telling  # noqa: E402
from streamrt import Chunk  # noqa: E402
from tests.stages.diffusion.bench import Bench  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # what the libraries do to each other


def wan(**more: Any) -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True], **more
    )


def cogvideox() -> Any:
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    return diffusers.AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, block_out_channels=(8,) * 4, latent_channels=16, layers_per_block=1, norm_num_groups=2, **blocks
    )


MODELS = {
    "wan": (wan, 5),
    "wan in patches": (lambda: wan(patch_size=2, in_channels=12, out_channels=12), 5),
    "cogvideox": (cogvideox, 2),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_parts_of_a_decoding_are_the_whole_of_it(name: str) -> None:
    make, parts = MODELS[name]
    torch.manual_seed(0)
    vae = make().eval()
    latents = torch.randn(1, 16, 5, 2, 2)
    told: list[torch.Tensor] = []
    whole = telling(vae, told.append).decode(latents).sample
    assert len(told) == parts
    torch.testing.assert_close(whole, vae.decode(latents).sample, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(told, 2).clamp(-1, 1), whole.clamp(-1, 1), rtol=0, atol=1e-6)


def frames_of(bench: Bench, name: str) -> list[tuple[int, np.ndarray]]:
    chunks = [output.chunk for output in bench.outputs if output.request_id == name and output.chunk is not None]
    return [(chunk.meta["frame"], chunk.tensors["frames"]) for chunk in chunks if chunk.modality == "video"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "wan_i2v"])
def test_a_videos_frames_and_its_first_fragment_leave_before_the_last_are_decoded(name: str, tmp_path: Path) -> None:
    from gateway.pixels import VideoEncoder
    from tests.gateway.pictures import picture

    bench = Bench(build(name, tmp_path), "video", fps=4)
    decoded: list[int] = []
    bench.pipeline.vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
    params = {**PIPELINES[name].params, "num_frames": 17, "num_inference_steps": 2}
    images = [Chunk("image", {"file": np.frombuffer(picture(16, 16), np.uint8)})] if PIPELINES[name].takes_image else []
    bench.submit("gone", {**params, "seed": 1}, images)
    bench.submit("stays", {**params, "seed": 2}, images)
    while not frames_of(bench, "gone"):
        bench.step()
    assert len(decoded) == 1
    bench.engine.cancel("gone")  # in the middle of its decoding
    encoder, seen, data = VideoEncoder(16, 16, 4.0), 0, b""
    decoded.clear()
    first_fragment_after = 0
    while bench.engine.has_work():
        bench.step()
        new = frames_of(bench, "stays")[seen:]
        seen += len(new)
        data += b"".join(encoder.encode(frames) for _, frames in new)
        if b"moof" in data and not first_fragment_after:
            first_fragment_after = len(decoded)
    assert (bench.failures(), len(decoded)) == ([], 5)
    assert 0 < first_fragment_after < 5
    assert [first for first, _ in frames_of(bench, "stays")] == [0, 1, 5, 9, 13]
    np.testing.assert_allclose(np.concatenate(bench.parts[2]).ravel(), bench.plain(2), rtol=0, atol=1e-5)
    np.testing.assert_allclose(bench.made[2], bench.plain(2), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_where_the_vae_decodes_in_one_pass_frames_leave_at_once(tmp_path: Path) -> None:
    bench = Bench(build("ltx", tmp_path), "video")
    assert not comes_in_parts(bench.pipeline)
    bench.submit("a", {**PIPELINES["ltx"].params, "num_inference_steps": 2})
    bench.run()
    assert [(first, len(frames)) for first, frames in frames_of(bench, "a")] == [(0, 9)]


def test_in_tiles_no_frame_is_complete_before_the_end() -> None:
    vae = wan()
    pipeline = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=None, transformer=None)
    assert comes_in_parts(pipeline)
    vae.enable_tiling()
    assert not comes_in_parts(pipeline)
