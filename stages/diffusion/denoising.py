"""One request on its way through a pipeline, as the engine sees it: four methods, and two ways to have them for any pipeline.

    prepare -> (step_inputs -> step_outputs)* -> finish

`Stepwise` runs the pipeline's unmodified `__call__` in a greenlet: its denoiser and its VAE are stand-ins that switch back to the engine
with what they were called with, and return when the engine hands the result in. What lies before the first call is `prepare`, what lies
after the last one `finish`. `Whole` runs the same call in one piece. A model that deserves its own stepping implements `Denoising`.

Knows diffusers' pipelines. Knows nothing of other requests, batches or chunks.

Rules
- Weights are shared; everything that a call changes (scheduler, guider, the pipeline object itself) is the request's own copy.
- All greenlets of an engine run on its compute thread, under its `torch.no_grad()`: grad mode belongs to the thread.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import greenlet
import torch

from stages.diffusion.batch import Call
from stages.diffusion.cut import is_denoiser
from stages.diffusion.frames import Frames, telling
from stages.diffusion.params import GUIDER_SCALE


class Denoising(Protocol):
    """One image, video or sound in the making. Whatever its methods raise fails its request alone."""

    def prepare(self) -> None:
        """Encode what was asked, and make the first latents."""

    def step_inputs(self) -> Call | None:
        """The call that it waits for; None when it waits for `finish`."""

    def step_outputs(self, result: Any) -> None:
        """Hand in the result of that call; goes on to the next one."""

    def finish(self) -> Any:
        """Decode. The pipeline's output; `Frames` of it when there is more to decode, None when there is more to denoise."""

    def close(self) -> None:
        """Give everything back, at any point. Idempotent."""


# (steps done, steps in all, latents as the scheduler left them)
OnStep = Callable[[int, int, torch.Tensor], None]

# A pipeline's methods that encode what a request says. What they give depends on the request alone, not on its seeds.
ENCODING = ("encode_prompt", "encode_duration")

# A denoiser, timestep=a function that says where the request is -> what is called in its place, by this request alone
Twin = Callable[..., Any]


def denoiser_names(pipeline: Any) -> list[str]:
    """The components that are called once or more at each step."""
    return [name for name, part in pipeline.components.items() if is_denoiser(name) and part is not None]


def guided(pipeline: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A pipeline whose guider has the scale that `arguments` name, and the arguments of its call."""
    if GUIDER_SCALE not in arguments:
        return pipeline, arguments
    own, guider = copy.copy(pipeline), copy.deepcopy(pipeline.guider)
    guider.guidance_scale = arguments[GUIDER_SCALE]
    object.__setattr__(own, "guider", guider)
    return own, {name: value for name, value in arguments.items() if name != GUIDER_SCALE}


class Encodings:
    """What a pipeline's encoders gave for one request: its first image asks them, the next ones get the same."""

    def __init__(self) -> None:
        self._given: dict[str, list[Any]] = {}

    def share(self, own: Any) -> None:
        """Have `own`, the pipeline's copy for one image, ask here first."""
        for name in ENCODING:
            if hasattr(own, name):
                object.__setattr__(own, name, self._shared(getattr(own, name), self._given.setdefault(name, [])))

    def _shared(self, method: Callable[..., Any], given: list[Any]) -> Callable[..., Any]:
        calls = itertools.count()  # of this image; a pipeline calls it in the same order for each

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            place = next(calls)
            if place == len(given):
                given.append(method(*args, **kwargs))
            return copy.deepcopy(given[place])  # a pipeline may change in place what it got

        return call


class Whole:
    """`Denoising` in one piece: all of the pipeline's call is its `finish`."""

    def __init__(self, pipeline: Any, arguments: dict[str, Any], on_step: OnStep, *, encodings: Encodings | None = None) -> None:
        self._pipeline = own_copy(pipeline, on_step)
        if encodings is not None:
            encodings.share(self._pipeline)
        self._arguments = arguments

    def prepare(self) -> None:
        pass

    def step_inputs(self) -> Call | None:
        return None

    def step_outputs(self, result: Any) -> None:
        raise AssertionError("there are no steps")

    def finish(self) -> Any:
        return self._pipeline(**self._arguments)

    def close(self) -> None:
        pass


class Stepwise:
    """`Denoising` of any pipeline, denoiser call by denoiser call."""

    def __init__(
        self,
        pipeline: Any,
        arguments: dict[str, Any],
        on_step: OnStep,
        twin: Twin | None = None,
        *,
        encodings: Encodings | None = None,
        in_parts: bool = False,
    ) -> None:
        """`twin` makes the denoisers that are called in place of the pipeline's: one for each of them and each of its cache contexts.
        `in_parts`: `finish` gives `Frames` as they are decoded; see `frames.comes_in_parts`.
        """
        own = own_copy(pipeline, on_step)
        if encodings is not None:
            encodings.share(own)
        schedule = own.scheduler

        def timestep() -> int:
            return int(schedule.timesteps[min(schedule.steps_done, len(schedule.timesteps) - 1)])

        for name in denoiser_names(pipeline):
            real = getattr(pipeline, name)
            object.__setattr__(own, name, _Denoiser(real, partial(twin, real, timestep=timestep) if twin else partial(_same, real)))
        self.decoder: _Decoder | None = None
        if getattr(pipeline, "vae", None) is not None:
            self.decoder = _Decoder(pipeline.vae, pipeline.video_processor if in_parts else None)
            object.__setattr__(own, "vae", self.decoder)
        self._greenlet = greenlet.greenlet(lambda: own(**arguments))
        self._waits: Call | None = None
        self._output: Any = None

    def prepare(self) -> None:
        self._switch()

    def step_inputs(self) -> Call | None:
        return self._waits

    def step_outputs(self, result: Any) -> None:
        self._switch(result)

    def finish(self) -> Any:
        if not self._greenlet.dead:  # a pipeline without a VAE ended with its last step
            self._switch()
        return self._output

    def close(self) -> None:
        self._waits = None
        # A dead greenlet ignores it. One of another thread, which has ended, can not be switched to; its frames go with it.
        with contextlib.suppress(greenlet.error):
            self._greenlet.throw()

    def _switch(self, *values: Any) -> None:
        """Run the pipeline until its next call, or its end."""
        came = self._greenlet.switch(*values)
        self._waits = came if isinstance(came, Call) else None  # None: what comes next is the decoder
        self._output = came if self._greenlet.dead or isinstance(came, Frames) else None


def own_copy(pipeline: Any, on_step: OnStep) -> Any:
    """`pipeline` for one request: the same models, and copies of what a call changes."""
    own = copy.copy(pipeline)
    for name, part in pipeline.components.items():
        if part is not None and _is_stateful(part):
            object.__setattr__(own, name, copy.deepcopy(part))
    own.set_progress_bar_config(disable=True)
    # It would reset the hooks of all requests, which share the models.
    object.__setattr__(own, "maybe_free_model_hooks", lambda: None)
    _report_steps(own.scheduler, on_step)
    return own


def _is_stateful(part: Any) -> bool:
    """Schedulers and guiders: configured objects that are no models."""
    return hasattr(part, "register_to_config") and not isinstance(part, torch.nn.Module) and not hasattr(part, "preprocess")


def _report_steps(scheduler: Any, on_step: OnStep) -> None:
    """Have `on_step` called after each step of this scheduler, which is one request's own."""
    kind: Any = type(scheduler)
    scheduler.__class__ = _reporting(kind)
    scheduler.on_step = on_step
    scheduler.steps_done = 0


@functools.cache
def _reporting(kind: Any) -> Any:
    """A scheduler class that reports its steps. Looks like `kind`: pipelines read the parameters of `step`, and copy schedulers."""

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.step(self, *args, **kwargs)
        self.steps_done += 1
        self.on_step(self.steps_done, len(self.timesteps), result[0])
        return result

    def twin(self: Any, memo: dict[int, Any]) -> Any:
        """What a pipeline copies is for something else (the sound beside a video) and reports nothing."""
        made = kind.__new__(kind)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in ("on_step", "steps_done")}, memo))
        return made

    return type(kind.__name__, (kind,), {"step": step, "__deepcopy__": twin})


class _StandIn:
    """Looks like the module it stands for, to `isinstance` too: pipelines ask modules for their config, dtype and device."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _same(module: Any) -> Any:
    return module


class _Denoiser(_StandIn):
    """Calling it asks the engine for the result."""

    def __init__(self, real: Any, make: Callable[[], Any]) -> None:
        super().__init__(real)
        self._make = make  # what is called, for one cache context
        self._made: dict[str, Any] = {}
        self._context = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._context not in self._made:
            self._made[self._context] = self._make()
        return _ask(Call(self._made[self._context], args, kwargs))

    @contextlib.contextmanager
    def cache_context(self, name: str, **where: Any) -> Iterator[None]:
        self._context = name
        try:
            yield
        finally:
            self._context = ""


class _Decoder(_StandIn):
    """Decoding starts when the engine says so; in parts, it goes on when the engine says so."""

    def __init__(self, real: Any, processor: Any) -> None:
        super().__init__(real)
        self._processor = processor  # the pipeline's, which makes frames of what is decoded; None: not in parts
        self.asked: tuple[Any, ...] = ()  # what it is to decode

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        self.asked = args
        _ask(None)
        vae = self._real if self._processor is None else telling(self._real, self._tell)
        return vae.decode(*args, **kwargs)

    def _tell(self, part: torch.Tensor) -> None:
        _ask(Frames(self._processor.postprocess_video(part, output_type="np")[0]))


def _ask(what: Call | Frames | None) -> Any:
    parent = greenlet.getcurrent().parent
    assert parent is not None
    return parent.switch(what)
