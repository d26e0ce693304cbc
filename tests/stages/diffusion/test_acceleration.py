"""Caches, quantization, adapters and the rest: each does what it says beside uncached requests, and each refuses at start what it can not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.caches import STRENGTH, shared_copy  # noqa: E402
from streamrt import BadRequest, ConfigError  # noqa: E402
from tests.stages.diffusion.bench import Bench  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::torchao"),
    pytest.mark.filterwarnings("ignore:::cache_dit"),
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::peft"),
]

CACHES = ("first_block", "pab", "faster", "taylorseer", "mag", "teacache", "dbcache")
RATIOS = [1.0, 1.02, 1.01, 1.0, 0.99, 0.99, 1.0, 1.0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(name, tmp_path_factory.mktemp(name)) for name in ("dit", "flux", "qwenimage")}


def run(bench: Bench, model: str, *requests: tuple[str, int, str], steps: int = 10, cancel: str = "") -> dict[int, np.ndarray]:
    """Requests (name, seed, quality), one arriving at every other step; seed -> what came."""
    bench.made.clear()
    for name, seed, quality in requests:
        bench.submit(name, {**PIPELINES[model].params, "seed": seed, "num_inference_steps": steps, "quality": quality})
        bench.step()
        bench.step()
    if cancel:
        bench.engine.cancel(cancel)
    bench.run()
    assert bench.failures() == []
    return dict(bench.made)


@pytest.mark.parametrize("model", ["dit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "qwenimage"))])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cached_request_is_the_same_alone_and_among_others_and_close_to_an_uncached_one(
    cache: str, model: str, folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache in ("first_block", "dbcache", "teacache"):  # random weights change more from step to step than trained ones
        monkeypatch.setitem(STRENGTH[cache], "fast", 10.0)
    bench = Bench(folders[model], "image", cache=cache, mag_ratios=RATIOS)
    alone = {seed: run(bench, model, ("a", seed, "fast"))[seed] for seed in (1, 2)}
    exact = run(bench, model, ("a", 1, "lossless"))[1]
    assert not np.array_equal(alone[1], exact)  # it does skip something
    assert np.abs(alone[1] - exact).mean() < 0.2
    together = run(bench, model, ("a", 1, "fast"), ("gone", 5, "fast"), ("b", 2, "fast"), ("c", 3, "lossless"), cancel="gone")
    for seed in (1, 2):
        np.testing.assert_array_equal(together[seed], alone[seed])
    np.testing.assert_allclose(together[3], bench.plain(3), rtol=0, atol=1e-5)


def test_high_is_closer_than_fast(folders) -> None:
    bench = Bench(folders["dit"], "image", cache="taylorseer")
    exact, high, fast = (run(bench, "dit", ("a", 1, quality), steps=12)[1] for quality in ("lossless", "high", "fast"))
    assert 0 < np.abs(high - exact).max() <= np.abs(fast - exact).max()


def test_a_twin_shares_its_weights(folders) -> None:
    module = Bench(folders["dit"], "image").pipeline.transformer
    twin = shared_copy(module)
    assert twin.transformer_blocks[0] is not module.transformer_blocks[0]
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in module.parameters()}


@pytest.mark.parametrize("how", ["int8", *(pytest.param(how, marks=pytest.mark.slow) for how in ("int8_dynamic", "fp8"))])
def test_a_quantized_denoiser_draws_nearly_the_same(how: str, folders) -> None:
    exact = run(Bench(folders["dit"], "image"), "dit", ("a", 1, "lossless"))[1]
    bench = Bench(folders["dit"], "image", quantize={"transformer": how, "vae": "none"})
    drawn = run(bench, "dit", ("a", 1, "lossless"), ("b", 2, "lossless"))[1]
    assert 0 < np.abs(drawn - exact).mean() < 0.1


def test_weights_kept_in_float8_take_less_room(folders) -> None:
    exact = run(Bench(folders["dit"], "image"), "dit", ("a", 1, "lossless"))[1]
    bench = Bench(folders["dit"], "image", casting="fp8")
    kept = {p.dtype for p in bench.pipeline.transformer.transformer_blocks[0].attn1.parameters()}
    assert torch.float8_e4m3fn in kept
    assert 0 < np.abs(run(bench, "dit", ("a", 1, "lossless"))[1] - exact).mean() < 0.2


def test_the_vae_works_in_slices_and_tiles(folders) -> None:
    bench = Bench(folders["dit"], "image", vae_slicing=True, vae_tiling=True)
    assert (bench.pipeline.vae.use_slicing, bench.pipeline.vae.use_tiling) == (True, True)
    np.testing.assert_allclose(run(bench, "dit", ("a", 1, "lossless"))[1], bench.plain(1), atol=1e-5)


def test_an_attention_kernel_is_set_for_this_model_alone(folders) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()
    bench = Bench(folders["flux"], "image", attention="math")
    assert _AttentionBackendRegistry.get_active_backend() == before
    np.testing.assert_allclose(run(bench, "flux", ("a", 1, "lossless"), steps=3)[1], bench.plain(1), atol=1e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"attention": "cudnn"}, r'attention: "cudnn" needs a GPU of capability 8\.0, this is a CPU'),
        ({"attention": "flash_3"}, r'attention: "flash_3" needs a GPU of capability 9\.0, this is a CPU'),
        ({"quantize": {"unet": "int8"}}, 'quantize: got "unet", FluxPipeline has text_encoder, text_encoder_2, transformer, vae'),
        ({"quantize": {"transformer": "fp8_dynamic"}}, 'quantize: transformer = "fp8_dynamic" needs a GPU of capability 8.9'),
        ({"quantize": {"transformer": "int8"}, "casting": "fp8"}, "casting: the denoiser is quantized already"),
        ({"offload": "model"}, 'offload: "model" moves models from a GPU to memory, and the stage runs on cpu'),
        ({"cuda_graphs": True}, "cuda_graphs: the stage runs on cpu"),
        ({"cache": "dbcache", "compile": True}, "cache: can not be combined"),
        ({"cache": "mag"}, "cache: mag needs mag_ratios"),
        ({"cache": "first_block", "mode": "request"}, 'cache: can not be combined with mode = "request"'),
        ({"quality": "fast"}, 'quality: "fast" needs a cache'),
        ({"loras": {"ink": Path("/nowhere/ink.safetensors")}}, "loras: ink: there is no file /nowhere/ink.safetensors"),
    ],
)
def test_what_can_not_be_done_is_refused_at_start(args, message: str, folders) -> None:
    with pytest.raises(ConfigError, match=message):
        Bench(folders["flux"], "image", **args)


def test_a_cache_that_finds_no_blocks_is_refused_at_start(tmp_path: Path) -> None:
    for cache in ("first_block", "teacache"):
        with pytest.raises(ConfigError, match=f"cache: {cache} can not be put on unet"):
            Bench(build("sdxl", tmp_path / cache), "image", cache=cache)


def test_a_pipeline_without_adapters_refuses_them_at_start(folders, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(ConfigError, match="loras: DiTPipeline takes none"):
        Bench(folders["dit"], "image", loras={"a": tmp_path / "a.safetensors"})


@pytest.fixture(scope="module")
def loras(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three random adapters of the tiny Flux."""
    import diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    made = {}
    for seed, name in enumerate(("ink", "oil", "wax")):
        torch.manual_seed(seed)
        pipeline = diffusers.FluxPipeline.from_pretrained(folders["flux"])
        pipeline.transformer.add_adapter(
            LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v", "proj_out"])
        )
        folder = tmp_path_factory.mktemp(name)
        diffusers.FluxPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer))
        made[name] = folder / "pytorch_lora_weights.safetensors"
    return made


def test_requests_with_different_adapters_run_side_by_side_and_the_least_used_adapter_goes(folders, loras) -> None:
    bench = Bench(folders["flux"], "image", loras=loras, max_loras=2)
    params = {**PIPELINES["flux"].params, "num_inference_steps": 3, "seed": 4}
    wanted = {"none": None, "ink": "ink", "half": [{"name": "ink", "scale": 0.5}], "both": [{"name": "ink"}, {"name": "oil"}], "wax": "wax"}
    pictures = {}
    for name, lora in wanted.items():
        bench.submit(name, {**params, "lora": lora})
        bench.run()
        pictures[name] = bench.made[4]
    assert bench.failures() == []
    assert list(bench.engine._use_adapters.__self__._loaded) == ["oil", "wax"]
    for name in pictures:
        assert [other for other in pictures if np.abs(pictures[name] - pictures[other]).max() < 1e-4] == [name]
    for number, (name, lora) in enumerate(wanted.items()):  # all at once
        bench.submit(f"again {name}", {**params, "seed": 4, "lora": lora})
        if number % 2:
            bench.step()
    bench.outputs.clear()
    bench.run()
    assert bench.failures() == []
    ended = [output.request_id for output in bench.outputs if output.finished]
    assert sorted(ended) == sorted(f"again {name}" for name in wanted)
    again = {
        output.request_id: output.chunk.tensors["image"] for output in bench.outputs if output.chunk and output.chunk.modality == "image"
    }
    for name in wanted:
        expected = np.round(pictures[name].reshape(8, 8, 3) * 255)
        np.testing.assert_allclose(again[f"again {name}"], expected, atol=1)
    with pytest.raises(BadRequest, match='lora: got "gold", this stage has ink, oil, wax'):
        bench.submit("gold", {**params, "lora": "gold"})
