"""Tiny pipelines on a GPU: graphs beside plain calls, what the device alone can do, and what is left when a request ends early or is too big."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.acceleration import ATTENTION  # noqa: E402
from stages.diffusion.args import DiffusionArgs  # noqa: E402
from stages.diffusion.engine import Pace  # noqa: E402
from stages.diffusion.graphs import CaptureFailed  # noqa: E402
from stages.diffusion.pipeline import DiffusionPipeline  # noqa: E402
from streamrt import Chunk, ConfigError, Context, Request, StageFailed  # noqa: E402
from tests.stages.diffusion.bench import Bench  # noqa: E402
from tests.stages.diffusion.tiny import PIPELINES, build  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch, torchao and diffusers say to each other on a device.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# All but HunyuanVideo-1.5, whose transformer looks at its image embeddings on the host.
CAPTURED = [name for name in PIPELINES if name != "hunyuan"]


@pytest.fixture(autouse=True, scope="module")
def _no_compilers_left() -> Iterator[None]:
    yield
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, not in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


GRADIENT = Chunk("image", {"image": np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)})


def on_gpu(folder: Path, task: str = "image", **args: Any) -> Bench:
    return Bench(folder, task, device="cuda", **{"dtype": "float32", "warmup_sizes": [], **args})


def draw(bench: Bench, name: str, *seeds: int, steps: int = 4, **more: Any) -> dict[int, np.ndarray]:
    """One request for each seed, two more at each step; seed -> what came."""
    bench.made.clear()
    bench.outputs.clear()
    for number, seed in enumerate(seeds):
        params = {**PIPELINES[name].params, "seed": seed, "num_inference_steps": steps, **more}
        if "prompt" in params:
            params["prompt"] += " and a dog" * (seed % 3)
        bench.submit(f"r{seed}", params, [GRADIENT] if PIPELINES[name].takes_image else ())
        if number % 2:
            bench.step()
    bench.run()
    assert bench.failures() == []
    return dict(bench.made)


def graphs_of(bench: Bench) -> int:
    return len(bench.engine._graphs)


@pytest.mark.parametrize("name", CAPTURED)
def test_replayed_calls_give_what_plain_calls_give(name: str, folders) -> None:
    tiny = PIPELINES[name]
    bench = on_gpu(folders(name), tiny.task, cuda_graphs=True)
    for _ in range(2):  # the first of a shape is made as it is, the second captured
        made = draw(bench, name, 1, 2, 3, 4, 5, steps=6)
    assert graphs_of(bench) > 0
    for seed in (1, 2, 3, 4, 5):
        np.testing.assert_allclose(made[seed], bench.plain(seed), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["dit", "flux", "qwenimage"])
def test_a_graph_computes_what_its_module_computes_in_bfloat16(name: str, folders) -> None:
    plain = draw(on_gpu(folders(name), dtype="bfloat16"), name, 1, steps=6)
    captured = draw(on_gpu(folders(name), dtype="bfloat16", cuda_graphs=True), name, 1, steps=6)
    np.testing.assert_allclose(captured[1], plain[1], rtol=0, atol=1e-2)


def test_guided_requests_share_graphs_and_a_cancel_disturbs_nobody(folders) -> None:
    bench = on_gpu(folders("qwenimage"), cuda_graphs=True)
    alone = {seed: draw(bench, "qwenimage", seed, steps=5)[seed] for seed in (3, 6)}
    bench.made.clear()
    for name, seed in (("a", 3), ("gone", 9), ("b", 6)):
        bench.submit(name, {**PIPELINES["qwenimage"].params, "seed": seed, "num_inference_steps": 5})
        for _ in range(3):
            bench.step()
    bench.engine.cancel("gone")
    bench.run()
    for seed in alone:
        np.testing.assert_allclose(bench.made[seed], alone[seed], rtol=0, atol=2e-4)
    assert 9 not in bench.made


def test_the_graph_not_used_for_longest_goes_and_its_shape_is_captured_again(folders) -> None:
    bench = on_gpu(folders("flux"), cuda_graphs=True, max_cuda_graphs=2)
    sizes = [{"width": side, "height": 8} for side in (8, 16, 24, 8)]
    for size in sizes:
        made = draw(bench, "flux", 3, **size)
        assert graphs_of(bench) <= 2
        np.testing.assert_allclose(made[3], bench.plain(3), rtol=0, atol=2e-4)
    assert graphs_of(bench) == 2


def test_shapes_of_the_warm_up_are_captured_before_it_is_ready(folders) -> None:
    bench = on_gpu(folders("qwenimage"), cuda_graphs=True, warmup_sizes=["32x32", "64x32"])
    assert graphs_of(bench) >= 2
    assert (bench.engine.calls, bench.engine.requests) == (0, 0)
    with pytest.raises(ConfigError, match="warmup_sizes: 33x32: size: got 33, expected a multiple of"):
        on_gpu(folders("qwenimage"), cuda_graphs=True, warmup_sizes=["33x32"])


def test_compiled_blocks_under_graphs_draw_the_same(folders) -> None:
    bench = on_gpu(folders("qwenimage"), cuda_graphs=True, compile=True, warmup_sizes=["32x32"])
    made = draw(bench, "qwenimage", 1, 2, 3, steps=5)
    for seed in made:
        np.testing.assert_allclose(made[seed], bench.plain(seed), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "args",
    [
        {"cache": "first_block"},
        {"casting": "fp8"},
        {"offload": "model"},
        {"mode": "request"},
        {"quantize": {"transformer": "int8_dynamic"}},
    ],
    ids=lambda args: next(iter(args)),
)
def test_what_changes_under_a_graph_is_refused_at_start(args, folders) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs: can not be combined"):
        on_gpu(folders("flux"), cuda_graphs=True, **args)


@pytest.mark.parametrize("offload", ["model", "group"])
def test_offloaded_models_draw_the_same(offload: str, folders) -> None:
    bench = on_gpu(folders("flux"), offload=offload)
    made = draw(bench, "flux", 1, 2, 3)
    for seed in made:
        np.testing.assert_allclose(made[seed], bench.plain(seed), rtol=0, atol=2e-4)


@pytest.mark.parametrize("role", list(ATTENTION))
def test_an_attention_kernel_computes_attention_or_is_refused_at_start(role: str, folders) -> None:
    plain = draw(on_gpu(folders("flux"), dtype="bfloat16"), "flux", 1)[1]
    may_lack = () if role in ("native", "math", "cudnn", "efficient") else (ConfigError,)
    bench = None
    with contextlib.suppress(*may_lack):
        bench = on_gpu(folders("flux"), dtype="bfloat16", attention=role)
    if bench is not None:
        np.testing.assert_allclose(draw(bench, "flux", 1)[1], plain, rtol=0, atol=5e-2)


@pytest.mark.parametrize(
    ("how", "cuda_graphs"),
    [
        ("int8", False),
        ("int8", True),
        ("int8_dynamic", False),
        ("fp8", False),
        ("fp8", True),
        ("fp8_dynamic", False),
        ("fp8_dynamic", True),
    ],
)
def test_a_quantized_denoiser_draws_nearly_the_same(how: str, cuda_graphs: bool, folders) -> None:
    exact = draw(on_gpu(folders("dit"), dtype="bfloat16"), "dit", 1)[1]
    bench = on_gpu(folders("dit"), dtype="bfloat16", quantize={"transformer": how}, cuda_graphs=cuda_graphs)
    assert 0 < np.abs(draw(bench, "dit", 1)[1] - exact).mean() < 0.1


def test_weights_kept_in_float8_draw_nearly_the_same(folders) -> None:
    exact = draw(on_gpu(folders("dit"), dtype="bfloat16"), "dit", 1)[1]
    assert 0 < np.abs(draw(on_gpu(folders("dit"), dtype="bfloat16", casting="fp8"), "dit", 1)[1] - exact).mean() < 0.2


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_cancels_at_any_step_leave_memory_as_it_was(cuda_graphs: bool, folders) -> None:
    bench = on_gpu(folders("qwenimage"), cuda_graphs=cuda_graphs)
    draw(bench, "qwenimage", 0, 3, steps=6)

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = 0
    for number in range(80):
        bench.submit(f"c{number}", {**PIPELINES["qwenimage"].params, "seed": number, "num_inference_steps": 20})
        for _ in range(number % 7):
            bench.step()
        bench.engine.cancel(f"c{number}")
        bench.outputs.clear()
        if number == 15:
            before = held()
    assert held() <= before + 64 * 1024  # of events and the like
    assert bench.engine.requests == bench.engine.scheduler.running == 0


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_request_that_the_device_has_no_memory_for_fails_and_the_others_go_on(cuda_graphs: bool, folders) -> None:
    bench = on_gpu(folders("qwenimage"), cuda_graphs=cuda_graphs)
    draw(bench, "qwenimage", 1)
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (96 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        bench.outputs.clear()
        small = {**PIPELINES["qwenimage"].params, "num_inference_steps": 4}
        bench.submit("big", {**small, "width": 2048, "height": 2048, "seed": 2})
        bench.submit("small", {**small, "seed": 3})
        bench.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (failed,) = bench.failures()
    assert isinstance(failed, StageFailed)
    assert failed.message.startswith("out of memory: ")
    assert [output.request_id for output in bench.outputs if output.finished] == ["small"]
    np.testing.assert_allclose(bench.made[3], bench.plain(3), rtol=0, atol=2e-4)


def test_the_host_is_one_call_ahead_of_the_device_and_no_more() -> None:
    pace = Pace()
    torch.cuda._sleep(50_000_000)
    pace.called()
    first = pace._called
    assert not first.query()
    torch.cuda._sleep(50_000_000)
    pace.called()
    assert first.query()
    assert not pace._called.query()


async def test_the_stage_captures_and_replays_on_its_compute_thread(folders) -> None:
    options = DiffusionArgs(model=str(folders("qwenimage")), dtype="float32", cuda_graphs=True, warmup_sizes=("32x32",))

    async def nothing() -> AsyncIterator[Chunk]:
        return
        yield

    async def ask(stage: Any, seed: int) -> np.ndarray:
        params = {**PIPELINES["qwenimage"].params, "seed": seed, "num_inference_steps": 5}
        chunks = [chunk async for chunk in stage.process(Request(f"r{seed}", "image", params), nothing())]
        return next(chunk.tensors["image"] for chunk in chunks if chunk.modality == "image")

    with ThreadPoolExecutor(1) as compute:
        context = Context(stage="draw", device="cuda", resolve=Path, compute=compute)
        stage = DiffusionPipeline.configured(options)(options, context)
        compute.submit(stage.load).result()
        alone = [await ask(stage, seed) for seed in range(3)]
        together = await asyncio.gather(*(ask(stage, seed) for seed in range(3)))
        assert stage.state()["requests"] == 0
        stage.close()
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.astype(int), other.astype(int), atol=1)


def test_what_can_not_be_captured_is_said_and_fails_the_step(folders) -> None:
    """The last: a failed capture may spoil what its process does next on the device."""
    bench = on_gpu(folders("dit"), cuda_graphs=True)
    bench.pipeline.transformer.register_forward_pre_hook(lambda _, args: None if args[0].sum().item() > 0 else None)
    bench.submit("a", {**PIPELINES["dit"].params, "seed": 1, "num_inference_steps": 4})
    with pytest.raises(CaptureFailed, match="DiTTransformer2DModel can not be captured in a CUDA graph: "):
        bench.run()
