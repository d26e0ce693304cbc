"""The diffusion engine: many requests, one module call per step, made for all requests whose next call is alike.

    queued -> prepare (one request) -> denoise (a batch) ... -> finish (one request) -> chunks

Knows requests and when each gets its turn. What a request computes is `denoising.py`'s, who runs is `scheduler.py`'s, how calls become
one is `batch.py`'s, how a call is launched `graphs.py`'s, what becomes of the result `output.py`'s. Threads and queues are the host's.

Rules
- A step is one of: the preparation of one image, one call of one module, the decoding of one image, or of some frames where the VAE
  decodes in parts; or several calls that begin within `slice_s`, because telling the loop costs as much as a small call. A cancel never
  waits longer than that.
- A request for n images is n pieces of work, each with its own seed; they run as n requests would, but for the prompt, which is encoded once.
- What a call raises fails the requests in it; when there are several, each is tried alone first. A lost device fails the step.
- The host is at most one call ahead of the device, so a cancel leaves no more than that behind, and progress is of work that is done.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from stages.diffusion.batch import Call, Digests, Merged, key
from stages.diffusion.denoising import Denoising, Encodings, OnStep
from stages.diffusion.frames import Frames
from stages.diffusion.graphs import TEXT_MULTIPLE, CaptureFailed, DenoiserGraphs
from stages.diffusion.lora import Wanted
from stages.diffusion.output import Given, chunks_of, image_of, preview_chunk
from stages.diffusion.params import MAX_PROMPT_CHARS, Job
from stages.diffusion.scheduler import StepScheduler
from streamrt import BadRequest, Chunk, Output, Overloaded, Request, StageFailed, StreamrtError, TooLong, event_chunk

log = logging.getLogger(__name__)

MAX_INPUT_IMAGES = 16

# job, seed, input images by role -> what makes it
Make = Callable[[Job, int, "Inputs", OnStep], Denoising]


class Inputs:
    """What a request was fed."""

    def __init__(self) -> None:
        self.text = ""
        self.images: dict[str, list[Any]] = {}  # role -> PIL images
        self.encoded: Chunk | None = None  # of an encoder stage
        self.encodings = Encodings()  # of the pipeline's own encoders

    @property
    def count(self) -> int:
        return sum(map(len, self.images.values()))


class Piece:
    """One image, video or sound of a request."""

    def __init__(self, request: Asked, index: int) -> None:
        self.request = request
        self.index = index
        self.name = (request.id, index)
        self.denoising: Denoising | None = None  # from its preparation on
        self.digests = Digests()
        self.call: Call | None = None
        self.frames = 0  # that have left


class Asked:
    """One request on its way."""

    def __init__(self, request: Request, job: Job) -> None:
        self.id = request.id
        self.job = job
        self.inputs = Inputs()
        self.pieces: list[Piece] = []  # from the end of its input on, those that are not done
        self.is_paused = False
        self.outputs: list[Output] = []  # of the step that runs
        self.began = time.perf_counter()
        self.spent_ms = {"queue_ms": 0.0, "prepare_ms": 0.0, "denoise_ms": 0.0, "decode_ms": 0.0}
        self.calls = 0
        self.rows = 0  # of all its calls' batches, with those of others in them

    def say(self, chunk: Chunk) -> None:
        self.outputs.append(Output(self.id, chunk))


class DiffusionEngine:
    """Implements `streamrt.Engine`; `params` of `submit` is a `Job`."""

    def __init__(
        self,
        make: Make,
        use_adapters: Callable[[Wanted], None],
        given: Given,
        scheduler: StepScheduler,
        *,
        max_input_pixels: int,
        slice_s: float = 0.0,
        graphs: DenoiserGraphs | None = None,
    ) -> None:
        """
        Args:
            make: starts one piece of a request.
            use_adapters: called with a job's LoRAs before anything is computed for it.
            given: what the pipeline's output is made of.
            scheduler: whose turn it is.
            max_input_pixels: of one input image.
            slice_s: a step begins no more calls after so long.
            graphs: through which denoisers are called; None: they are called as they are.
        """
        self.scheduler = scheduler
        self.calls = 0
        self.rows = 0
        self._make = make
        self._use_adapters = use_adapters
        self._given = given
        self._max_input_pixels = max_input_pixels
        self._slice_s = slice_s
        self._graphs = graphs
        self._pace = Pace()
        self._asked: dict[str, Asked] = {}
        self._pieces: dict[Any, Piece] = {}
        self._finishing: deque[Piece] = deque()

    # -- commands

    def submit(self, request: Request, params: Job) -> None:
        if self.scheduler.queued + len(params.seeds) > self.scheduler.max_queued:
            raise Overloaded(f"{self.scheduler.queued} images wait already")
        self._asked[request.id] = Asked(request, params)

    def feed(self, request_id: str, chunk: Chunk) -> None:
        asked = self._asked[request_id]
        if chunk.modality == "text" and asked.job.prompt is None:
            asked.inputs.text += chunk.text
            if len(asked.inputs.text) > MAX_PROMPT_CHARS:
                raise TooLong(f"prompt: longer than {MAX_PROMPT_CHARS} characters", param="prompt")
        elif chunk.modality == "hidden":
            asked.inputs.encoded = chunk.copy()  # small, and not to be kept in the encoder's memory
        elif chunk.modality == "image":
            if asked.inputs.count >= MAX_INPUT_IMAGES:
                raise BadRequest(f"image: more than {MAX_INPUT_IMAGES} in one request", param="image")
            role = str(chunk.meta.get("role", "image"))
            asked.inputs.images.setdefault(role, []).append(image_of(chunk, self._max_input_pixels))

    def end(self, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is None or asked.pieces:
            return
        job = asked.job
        if job.needs_prompt and asked.inputs.encoded is None and not (job.prompt or asked.inputs.text).strip():
            raise BadRequest("prompt: there is none", param="prompt")
        if asked.inputs.images and not job.takes_image:
            raise BadRequest("image: this model takes none", param="image")
        if job.needs_image and not asked.inputs.images:
            raise BadRequest("image: this model needs one to start from", param="image")
        for index in range(len(job.seeds)):
            piece = Piece(asked, index)
            self.scheduler.add(piece.name, job.likeness, job.priority)
            self.scheduler.pause(piece.name, asked.is_paused)
            asked.pieces.append(piece)
            self._pieces[piece.name] = piece

    def cancel(self, request_id: str) -> None:
        if asked := self._asked.pop(request_id, None):
            for piece in list(asked.pieces):
                self._drop(piece)

    def pause(self, request_id: str) -> None:
        self._set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        self._set_paused(request_id, False)

    def close(self) -> None:
        for request_id in list(self._asked):
            self.cancel(request_id)
        if self._graphs is not None:
            self._graphs.clear()

    def _set_paused(self, request_id: str, is_paused: bool) -> None:
        if asked := self._asked.get(request_id):
            asked.is_paused = is_paused
            for piece in asked.pieces:
                self.scheduler.pause(piece.name, is_paused)

    # -- work

    @property
    def requests(self) -> int:
        return len(self._asked)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or any(not piece.request.is_paused for piece in self._finishing)

    def step(self) -> list[Output]:
        """Finish one piece, or prepare one, or make calls for batches while the slice lasts."""
        until = time.perf_counter() + self._slice_s
        pieces: list[Piece] = []
        with torch.no_grad():
            while True:
                begun_or_ended = self._finish_one() or self._prepare_one()
                pieces += begun_or_ended or self._denoise()
                if begun_or_ended or time.perf_counter() >= until or not self.has_work():
                    break
        outputs: list[Output] = []
        for asked in dict.fromkeys(piece.request for piece in pieces):
            outputs += asked.outputs
            asked.outputs = []
        return outputs

    def _finish_one(self) -> list[Piece]:
        piece = next((piece for piece in self._finishing if not piece.request.is_paused), None)
        if piece is None:
            return []
        asked = piece.request
        assert piece.denoising is not None
        began = time.perf_counter()
        try:
            self._use_adapters(asked.job.lora)
            made = piece.denoising.finish()
            if made is None:
                self._finishing.remove(piece)
                self._look(piece)
            else:
                for chunk in chunks_of(made, self._given, asked.job, piece.index, first=piece.frames):
                    asked.say(chunk)
            if isinstance(made, Frames):
                piece.frames += len(made.array)
        except Exception as error:  # noqa: BLE001 - one request's end must not be the others'; `_fail` logs it
            self._fail(piece, error)
            return [piece]
        asked.spent_ms["decode_ms"] += (time.perf_counter() - began) * 1e3
        if made is None or isinstance(made, Frames):
            return [piece]
        self._drop(piece)
        if not asked.pieces:
            del self._asked[asked.id]
            asked.outputs.append(Output(asked.id, finished=True, meta=self._final(asked)))
        return [piece]

    def _prepare_one(self) -> list[Piece]:
        name = self.scheduler.admit()
        if name is None:
            return []
        piece = self._pieces[name]
        asked = piece.request
        began = time.perf_counter()
        asked.spent_ms["queue_ms"] = max(asked.spent_ms["queue_ms"], (began - asked.began) * 1e3)

        def on_step(step: int, steps: int, latents: torch.Tensor) -> None:
            asked.say(event_chunk("progress", port="progress", step=step, steps=steps, index=piece.index))
            if asked.job.previews and _is_preview(step, steps, asked.job.previews):
                asked.say(preview_chunk(latents, self._given, asked.job, piece.index, step))

        try:
            self._use_adapters(asked.job.lora)
            piece.denoising = self._make(asked.job, asked.job.seeds[piece.index], asked.inputs, on_step)
            piece.denoising.prepare()
            self._look(piece)
        except ValueError as error:  # how pipelines say that they can not do what they are asked
            self._fail(piece, BadRequest(f"{self._given.pipeline}: {error}"))
        except Exception as error:  # noqa: BLE001 - one request's input must not end the others; `_fail` logs it
            self._fail(piece, error)
        asked.spent_ms["prepare_ms"] += (time.perf_counter() - began) * 1e3
        return [piece]

    def _denoise(self) -> list[Piece]:
        pieces = [self._pieces[name] for name in self.scheduler.batch()]
        if not pieces:
            return []
        began = time.perf_counter()
        try:
            results: list[Any] = self._call(pieces)
        except Exception as error:  # noqa: BLE001 - the requests of a batch must not end the others, nor each other; `_fail` logs it
            if len(pieces) == 1 or _is_device_lost(error):
                self._fail(pieces[0], error)
                return pieces
            log.warning("diffusion.batch_failed: %d calls are made one by one: %r", len(pieces), error)
            del error
            self._free_memory()
            results = [self._call_alone(piece) for piece in pieces]
        spent_ms = (time.perf_counter() - began) * 1e3
        rows = sum(piece.call.rows for piece in pieces if piece.call is not None)
        for piece, result in zip(pieces, results, strict=True):
            if piece.denoising is None:  # its request ended with another of its pieces, just now
                continue
            if isinstance(result, Exception):
                self._fail(piece, result)
                continue
            asked = piece.request
            asked.spent_ms["denoise_ms"] += spent_ms
            asked.calls += 1
            asked.rows += rows
            try:
                piece.denoising.step_outputs(result)
                self._look(piece)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(piece, error)
        return pieces

    def _call(self, pieces: list[Piece]) -> list[Any]:
        """One call of a module for all of `pieces`, which want the same adapters."""
        self._use_adapters(pieces[0].request.job.lora)
        calls = [piece.call for piece in pieces if piece.call is not None]
        merged = Merged(calls, text_multiple=TEXT_MULTIPLE if self._graphs is not None else 1)
        self.calls += 1
        self.rows += sum(call.rows for call in calls)
        if self._graphs is not None:
            result = self._graphs.call(calls[0].module, merged.args, merged.kwargs)
        else:
            result = calls[0].module(*merged.args, **merged.kwargs)
        self._pace.called()
        return merged.split(result)

    def _call_alone(self, piece: Piece) -> Any:
        """The result of its call, or what it raised."""
        try:
            return self._call([piece])[0]
        except Exception as error:  # noqa: BLE001 - given to the caller, who fails the request with it
            return error

    def _look(self, piece: Piece) -> None:
        """What does it wait for now?"""
        assert piece.denoising is not None
        piece.call = piece.denoising.step_inputs()
        if piece.call is None:
            self._finishing.append(piece)
        else:
            self.scheduler.wait(piece.name, (piece.request.job.lora, key(piece.call, piece.digests)), piece.call.rows)

    # -- ends

    def _fail(self, piece: Piece, error: Exception) -> None:
        """End the request of `piece` with `error`. Raises it when it means that nothing will work any more."""
        asked = piece.request
        told: Exception = error
        if _is_device_lost(error):
            raise error
        if _is_out_of_memory(error):
            told = StageFailed("out of memory: ask for a smaller size, or fewer frames")
        elif not isinstance(error, StreamrtError):
            log.error("diffusion.request_failed", exc_info=error)
            told = StageFailed(f"{self._given.pipeline}: {type(error).__name__}: {error}")
        if asked.id in self._asked:
            self.cancel(asked.id)
            asked.outputs.append(Output(asked.id, error=told.with_traceback(None)))
        if _is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold the tensors
            self._free_memory()

    def _drop(self, piece: Piece) -> None:
        """Give back all that it holds."""
        self.scheduler.remove(piece.name)
        self._pieces.pop(piece.name, None)
        if piece in self._finishing:
            self._finishing.remove(piece)
        piece.request.pieces.remove(piece)
        piece.call = None
        if piece.denoising is not None:
            piece.denoising.close()
            piece.denoising = None

    def _free_memory(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _final(self, asked: Asked) -> dict[str, Any]:
        return {
            "seed": asked.job.seeds[0],
            "steps": asked.job.steps,
            "batch": round(asked.rows / max(asked.calls, 1), 2),
            "timings": {name: round(value, 3) for name, value in asked.spent_ms.items()},
        }


class Pace:
    """Lets the host run at most one call ahead of the device."""

    def __init__(self) -> None:
        self._called: torch.cuda.Event | None = None  # the device has made the last call

    def called(self) -> None:
        """A call was begun. Waits: until the device has made the one before."""
        if not torch.cuda.is_initialized():
            return
        before, self._called = self._called, torch.cuda.Event()
        self._called.record()
        if before is not None:
            before.synchronize()


def _is_preview(step: int, steps: int, previews: int) -> bool:
    """Whether one of `previews` partial images, spread evenly before the last step, is due after `step`."""
    return any(step == round(steps * number / (previews + 1)) for number in range(1, previews + 1)) and step < steps


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _is_device_lost(error: Exception) -> bool:
    """A CUDA error that every later call will raise again, or what leaves the allocator in the middle of a capture."""
    return isinstance(error, (torch.AcceleratorError, CaptureFailed)) and not isinstance(error, torch.OutOfMemoryError)
