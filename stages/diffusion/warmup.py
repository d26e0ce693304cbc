"""What is drawn before the stage is ready, so that blocks are compiled, kernels chosen and graphs captured, or the start fails and says why.

Knows the engine as its host does. Raises ConfigError for whatever a request would have failed with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.params import Accepts
from streamrt import Chunk, ConfigError, Request, StreamrtError

STEPS = 2  # the first call of a shape is made as it is, the second captured
SHORT, LONG = "a cat", "a cat on a mat, and a dog beside it that looks at both of them"
# Alone, together, and together with text to pad: what compiled blocks tell apart.
TOGETHER = ((SHORT,), (SHORT, SHORT), (SHORT, LONG))


def warm_up(
    engine: DiffusionEngine,
    parse: Callable[[Request], Any],
    accepts: Accepts,
    task: str,
    sizes: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    """Draw at each of `sizes`. Blocks for seconds to minutes. Raises ConfigError."""
    for size in sizes:
        for prompts in TOGETHER if engine.scheduler.capacity > 1 else TOGETHER[:1]:
            progress(f"warming up: {len(prompts)} at once, size {size}")
            for number, prompt in enumerate(prompts):
                _ask(engine, parse, accepts, f"warm-up {number}", task, size, prompt)
            while engine.has_work():
                for output in engine.step():
                    if output.error is not None:
                        raise ConfigError(f"warmup_sizes: {size}: {output.error}", param="warmup_sizes") from output.error
    engine.calls = engine.rows = 0


def _ask(engine: DiffusionEngine, parse: Callable[[Request], Any], accepts: Accepts, name: str, task: str, size: str, prompt: str) -> None:
    params: dict[str, Any] = {"num_inference_steps": STEPS, "seed": 0}
    if size != "auto":
        params["size"] = size
    if accepts.by_class:
        params["class_label"] = 0
    elif "prompt" in accepts.names:
        params["prompt"] = prompt
    request = Request(name, task, params)
    try:
        engine.submit(request, parse(request))
        if accepts.needs_image:
            engine.feed(name, Chunk("image", {"image": np.full((256, 256, 3), 127, np.uint8)}))
        engine.end(name)
    except StreamrtError as error:
        raise ConfigError(f"warmup_sizes: {size}: {error}", param="warmup_sizes") from error
