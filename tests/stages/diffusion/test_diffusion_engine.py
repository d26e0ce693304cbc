"""The engine on a tiny DiT and a tiny Flux: turns, ends, cancels, failures. What a step makes is looked at step by step."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra streamrt[diffusion]")
pytest.importorskip("diffusers", reason="needs the extra streamrt[diffusion]")

from stages.diffusion.pipeline import DiffusionPipeline  # noqa: E402
from streamrt import BadRequest, Chunk, ConfigError, Output, Overloaded, StageFailed, text_chunk  # noqa: E402
from tests.stages.diffusion.bench import Bench  # noqa: E402
from tests.stages.diffusion.tiny import build  # noqa: E402

SEVEN = {"class_label": 7, "num_inference_steps": 4, "guidance_scale": 3.0, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("dit", tmp_path_factory.mktemp("dit"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Bench:
    return Bench(folder, "image", max_running=4)


@pytest.fixture
def bench(loaded: Bench) -> Bench:
    loaded.outputs.clear()
    yield loaded
    loaded.engine.close()
    assert (loaded.engine.requests, loaded.engine.scheduler.running, loaded.engine.scheduler.queued) == (0, 0, 0)


def of(bench: Bench, name: str, modality: str | None = None) -> list[Chunk]:
    chunks = [output.chunk for output in bench.outputs if output.request_id == name and output.chunk is not None]
    return [chunk for chunk in chunks if modality in (None, chunk.modality)]


def image(bench: Bench, name: str) -> np.ndarray:
    (chunk,) = [chunk for chunk in of(bench, name, "image") if not chunk.meta.get("preview")]
    return chunk.tensors["image"]


def end(bench: Bench, name: str) -> Output:
    (last,) = [output for output in bench.outputs if output.request_id == name and output.is_end]
    return last


def test_a_request_gives_progress_for_every_step_its_image_and_its_end(bench: Bench) -> None:
    bench.submit("a", SEVEN)
    bench.run()
    assert [chunk.meta for chunk in of(bench, "a", "event")] == [
        {"event": "progress", "step": step, "steps": 4, "index": 0} for step in (1, 2, 3, 4)
    ]
    (picture,) = of(bench, "a", "image")
    assert (picture.port, picture.tensors["image"].shape, picture.tensors["image"].dtype) == ("image", (8, 8, 3), np.uint8)
    assert picture.meta == {"index": 0, "seed": 1}
    meta = end(bench, "a").meta
    assert (meta["seed"], meta["steps"], meta["batch"]) == (1, 4, 2.0)
    assert set(meta["timings"]) == {"queue_ms", "prepare_ms", "denoise_ms", "decode_ms"}
    assert bench.outputs[-1].finished


def test_the_same_seed_gives_the_same_image_alone_and_among_others(bench: Bench) -> None:
    bench.submit("alone", SEVEN)
    bench.run()
    for number in range(4):
        bench.submit(f"r{number}", {**SEVEN, "seed": number, "class_label": number if number != 1 else 7})
        bench.step()
    bench.run()
    assert np.array_equal(image(bench, "alone"), image(bench, "r1"))
    assert not np.array_equal(image(bench, "alone"), image(bench, "r2"))


def test_n_images_are_those_of_n_requests_with_the_following_seeds(bench: Bench) -> None:
    bench.submit("three", {**SEVEN, "n": 3})
    for seed in (1, 2, 3):
        bench.submit(f"s{seed}", {**SEVEN, "seed": seed})
    bench.run()
    pictures = {chunk.meta["index"]: chunk.tensors["image"] for chunk in of(bench, "three", "image")}
    assert sorted(pictures) == [0, 1, 2]
    for index, picture in pictures.items():
        assert np.array_equal(picture, image(bench, f"s{index + 1}"))
    assert {chunk.meta["index"] for chunk in of(bench, "three", "event")} == {0, 1, 2}


@pytest.mark.parametrize("mode", ["step", "request"])
def test_the_prompt_of_n_images_is_encoded_once(tmp_path: Path, mode: str) -> None:
    bench = Bench(build("flux", tmp_path), "image", mode=mode)
    encoded: list[int] = []
    bench.pipeline.text_encoder_2.register_forward_hook(lambda *_: encoded.append(1))
    params = {"prompt": "a cat", "width": 8, "height": 8, "num_inference_steps": 2, "guidance_scale": 3.5}
    bench.submit("three", {**params, "seed": 1, "n": 3})
    bench.run()
    assert len(encoded) == 1
    made = dict(bench.made)
    for seed in (1, 2, 3):
        bench.submit(f"s{seed}", {**params, "seed": seed})
        bench.run()
        np.testing.assert_allclose(made[seed], bench.made[seed], rtol=0, atol=1e-6)
    assert len(encoded) == 4
    assert not np.array_equal(made[1], made[2])


def test_requests_share_denoiser_calls(bench: Bench) -> None:
    before = bench.engine.calls
    for number in range(4):
        bench.submit(f"r{number}", {**SEVEN, "seed": number})
    bench.run()
    assert bench.engine.calls - before == 4  # of 4 requests with 4 steps each


@pytest.mark.parametrize("steps_before", range(7))
def test_a_cancel_at_any_point_disturbs_nobody_and_frees_its_place_within_a_step(bench: Bench, steps_before: int) -> None:
    bench.submit("gone", {**SEVEN, "seed": 9, "n": 2})
    bench.submit("stays", SEVEN)
    for _ in range(steps_before):
        bench.step()
    bench.engine.cancel("gone")
    assert bench.engine.requests == 1
    assert all(name[0] == "stays" for name in bench.engine.scheduler._running)
    bench.run()
    assert not any(output.request_id == "gone" and output.is_end for output in bench.outputs)
    assert end(bench, "stays").finished
    if "alone" not in bench.made:
        bench.made["alone"] = bench.plain(1)
    np.testing.assert_allclose(bench.made[1], bench.made["alone"], atol=1e-5)


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects() if type(thing) is torch.Tensor)


@pytest.mark.slow
def test_two_hundred_cancels_leave_nothing(bench: Bench) -> None:
    def cancel_some(count: int) -> None:
        for number in range(count):
            name = f"c{number}"
            bench.submit(name, {**SEVEN, "n": 1 + number % 2, "previews": 2})
            for _ in range(number % 4):
                bench.step()
            bench.engine.cancel(name)
            bench.outputs.clear()
        bench._jobs.clear()
        bench.made.clear()

    cancel_some(10)
    before = tensors_alive()
    cancel_some(200)
    assert tensors_alive() == before
    assert bench.engine._pieces == {}
    assert not bench.engine.has_work()


class Fails:
    """A denoiser in front of the real one that raises for some calls."""

    def __init__(self, real: Any, when: Any, error: Exception) -> None:
        self.real, self.when, self.error = real, when, error
        self.calls: list[int] = []

    def __call__(self, hidden_states: Any, **kwargs: Any) -> Any:
        self.calls.append(len(hidden_states))
        if self.when(hidden_states, kwargs):
            raise self.error
        return self.real(hidden_states, **kwargs)


@pytest.fixture
def failing(bench: Bench):
    """Put a failing denoiser into the pipeline; what `forward` was is put back."""
    forward = bench.pipeline.transformer.forward

    def install(when: Any, error: Exception) -> Fails:
        bench.pipeline.transformer.forward = Fails(forward, when, error)
        return bench.pipeline.transformer.forward

    yield install
    bench.pipeline.transformer.forward = forward


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_ends_the_request_that_needs_too_much_and_the_others_go_on(bench: Bench, failing, error) -> None:
    failing(lambda _, kwargs: bool((kwargs["class_labels"] == 3).any()), error)
    bench.submit("big", {**SEVEN, "class_label": 3})
    bench.submit("small", SEVEN)
    bench.run()
    failed = end(bench, "big").error
    assert isinstance(failed, StageFailed)
    assert failed.message.startswith("out of memory: ")
    assert end(bench, "small").finished


def test_an_image_that_no_memory_can_hold_fails_alone(tmp_path: Path) -> None:
    bench = Bench(build("flux", tmp_path), "image", max_side=2**23, max_pixels=2**46)
    params = {"prompt": "a cat", "num_inference_steps": 2, "seed": 1}
    bench.submit("small", {**params, "width": 8, "height": 8})
    bench.submit("huge", {**params, "width": 2**23, "height": 2**23})  # more than a process can address
    bench.run()
    failed = end(bench, "huge").error
    assert isinstance(failed, StageFailed)
    assert failed.message.startswith("out of memory: ")
    assert end(bench, "small").finished
    assert bench.engine.requests == 0


def test_out_of_memory_at_the_decoding_fails_that_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = bench.pipeline.vae.decode, []

    def decode_some(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(*args, **kwargs)

    monkeypatch.setattr(bench.pipeline.vae, "decode", decode_some)
    bench.submit("first", {**SEVEN, "n": 2})
    bench.submit("second", SEVEN)
    bench.run()
    assert end(bench, "first").error.message.startswith("out of memory: ")
    assert end(bench, "second").finished


def test_a_batch_that_is_too_big_is_done_one_by_one(bench: Bench, failing) -> None:
    fails = failing(lambda hidden_states, _: len(hidden_states) > 2, torch.OutOfMemoryError("CUDA out of memory"))
    for number in range(3):
        bench.submit(f"r{number}", {**SEVEN, "seed": number})
    bench.run()
    assert bench.failures() == []
    assert fails.calls[:4] == [6, 2, 2, 2]


def test_a_failing_call_ends_its_request_and_all_pieces_of_it_alone(bench: Bench, failing) -> None:
    failing(lambda _, kwargs: bool((kwargs["class_labels"] == 3).any()), ArithmeticError("no such number"))
    bench.submit("bad", {**SEVEN, "class_label": 3, "n": 2})
    bench.submit("good", SEVEN)
    bench.run()
    assert end(bench, "bad").error.message == "DiTPipeline: ArithmeticError: no such number"
    assert end(bench, "good").finished


def test_a_lost_device_fails_the_step(bench: Bench, failing) -> None:
    failing(lambda *_: True, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    bench.submit("a", SEVEN)
    bench.step()
    with pytest.raises(torch.AcceleratorError):
        bench.step()


def test_a_paused_request_is_skipped_and_then_goes_on(bench: Bench) -> None:
    bench.submit("a", SEVEN)
    bench.step()
    bench.engine.pause("a")
    assert not bench.engine.has_work()
    bench.engine.resume("a")
    bench.run()
    assert end(bench, "a").finished


def test_short_steps_are_made_together_for_a_slice(bench: Bench) -> None:
    bench.engine._slice_s = 60.0
    bench.submit("a", SEVEN)
    bench.step()
    assert of(bench, "a") == []
    bench.step()
    assert len(of(bench, "a", "event")) == 4
    bench.step()
    bench.engine._slice_s = 0.0
    assert end(bench, "a").finished


def test_a_queue_that_is_full_refuses_whole_requests(bench: Bench) -> None:
    for number in range(8):
        bench.submit(f"r{number}", {**SEVEN, "n": 8})
    with pytest.raises(Overloaded):
        bench.submit("more", {**SEVEN, "n": 2})
    assert bench.engine.requests == 8


def test_previews_are_small_images_on_the_way(bench: Bench) -> None:
    bench.submit("a", {**SEVEN, "num_inference_steps": 6, "previews": 2})
    bench.run()
    previews = [chunk for chunk in of(bench, "a", "image") if chunk.meta.get("preview")]
    assert [chunk.meta["step"] for chunk in previews] == [2, 4]
    for chunk in previews:
        assert (chunk.tensors["image"].shape, chunk.tensors["image"].dtype) == ((8, 8, 3), np.uint8)
        assert np.ptp(chunk.tensors["image"]) > 0
    assert image(bench, "a").shape == (8, 8, 3)


def test_an_image_for_a_model_that_takes_none_is_refused(bench: Bench) -> None:
    with pytest.raises(BadRequest, match="image: this model takes none"):
        bench.submit("a", SEVEN, [Chunk("image", {"image": np.zeros((8, 8, 3), np.uint8)})])
    bench.engine.cancel("a")


def png(size: tuple[int, int] = (8, 8)) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "image: got nothing"),
        ({"image": np.zeros((8, 8), np.uint8)}, r"image: got uint8 \(8, 8\), expected uint8"),
        ({"image": np.zeros((8, 8, 3), np.float32)}, "image: got float32"),
        ({"image": np.zeros((0, 8, 3), np.uint8)}, "image: got uint8"),
        ({"image": np.zeros((5000, 5000, 1), np.uint8)}, "image: got 5000x5000, expected at most"),
        ({"file": np.frombuffer(b"not an image", np.uint8)}, "image: it can not be read"),
        ({"file": np.frombuffer(png()[:45], np.uint8)}, "image: it can not be read"),
        ({"file": np.frombuffer(png((5000, 5000)), np.uint8)}, "image: got 5000x5000, expected at most"),
    ],
)
def test_a_broken_input_image_is_refused_when_it_comes(bench: Bench, tensors, message) -> None:
    with pytest.raises(BadRequest, match=message):
        bench.submit("a", SEVEN, [Chunk("image", tensors)])
    bench.engine.cancel("a")


def test_in_one_piece_a_request_gives_the_same_image_one_after_the_other(folder: Path) -> None:
    bench = Bench(folder, "image", mode="request")
    bench.submit("a", SEVEN)
    bench.submit("b", {**SEVEN, "seed": 2})
    bench.step()
    bench.step()
    assert end(bench, "a").finished
    assert len(of(bench, "a", "event")) == 4
    bench.run()
    np.testing.assert_allclose(bench.made[2], bench.plain(2), atol=1e-6)


def test_a_task_that_the_pipeline_does_not_do_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match='task: got "video", but DiTPipeline makes image') as caught:
        Bench(folder, "video")
    assert caught.value.hint == 'set task = "image"'


def test_a_folder_without_a_pipeline_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model_index.json"):
        Bench(tmp_path, "image")


def test_a_checkpoint_with_a_piece_missing_is_refused_at_start(tmp_path: Path) -> None:
    folder = build("dit", tmp_path)
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ConfigError, match="not a pipeline that diffusers can load"):
        Bench(folder, "image")


def test_the_prompt_may_come_as_text_and_what_the_pipeline_refuses_is_the_callers_fault(tmp_path: Path) -> None:
    bench = Bench(build("flux", tmp_path), "image")
    params = {"width": 8, "height": 8, "num_inference_steps": 2, "seed": 3}
    request, job = bench.request("said", params)
    bench.engine.submit(request, job)
    bench.engine.feed("said", text_chunk("a photo "))
    bench.engine.feed("said", text_chunk("of a cat"))
    bench.engine.end("said")
    bench.submit("written", {**params, "prompt": "a photo of a cat"})
    bench.run()
    assert np.array_equal(image(bench, "said"), image(bench, "written"))
    with pytest.raises(BadRequest, match="prompt: there is none"):
        bench.submit("silent", params)
    bench.engine.cancel("silent")
    with pytest.raises(BadRequest, match="width: got 9, expected a multiple of 2"):
        bench.submit("odd", {**params, "prompt": "x", "width": 9})
    assert DiffusionPipeline.configured(bench.stage.args).tasks == ("image",)
