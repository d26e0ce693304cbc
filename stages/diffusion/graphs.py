"""CUDA graphs of denoiser calls: one launch from the host where a call had thousands, which is what small images wait for.

    call --key--> seen for the first time: made as it is
                  for the second: captured, then replayed
                  later: replayed

Knows modules, tensors and graphs. Knows nothing of requests.

Rules
- A key is everything the host decides by: the module, each tensor's shape, dtype and device, and the value of every other argument. What a
  graph reads besides its own inputs stays where it is: weights, and what it keeps itself (`KEPT`).
- Graphs share one pool of memory. They never run at once, and what one gives is copied out before the next runs.
- At most `max_graphs`; the one not used for longest goes first, and all of them when memory runs out.
- A call that can not be captured is an error, and not of its request alone: the allocator may be left in the middle.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from streamrt import StageFailed

log = logging.getLogger(__name__)

MAX_SEEN = 64  # keys that came once and may come again
TEXT_MULTIPLE = 64  # tokens: text that is padded anyway is padded to this, so that few shapes come up


def _text_and_mask(states: torch.Tensor, mask: torch.Tensor | None) -> tuple[int, None, torch.Tensor | None]:
    """QwenImage's `compute_text_seq_len_from_mask` without the lengths that it takes to the device, and that nobody reads."""
    return states.shape[1], None, mask if mask is None else mask.to(torch.bool)


# Module class -> its part that gives the same for every call of a key, out of a cache that may forget. A graph keeps the tensors.
KEPT: dict[str, str] = {"QwenImageTransformer2DModel": "pos_embed"}
# Module class -> functions of its file that copy from the host, and what does the same without, while a graph is captured.
STEADY: dict[str, dict[str, Callable[..., Any]]] = {"QwenImageTransformer2DModel": {"compute_text_seq_len_from_mask": _text_and_mask}}


class CaptureFailed(StageFailed):
    """A module does on the host, in the middle of its call, what no graph can hold."""


class DenoiserGraphs:
    """Owned by one engine, called on its compute thread under `torch.no_grad()`."""

    def __init__(self, device: str, max_graphs: int) -> None:
        self._device = torch.device(device)
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()  # the one not used for longest first
        self._seen: OrderedDict[Hashable, Any] = OrderedDict()  # key -> what its call kept
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)

    def __len__(self) -> int:
        return len(self._graphs)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `module(*args, **kwargs)` gives.

        Raises:
            CaptureFailed: it can not be captured.
        """
        leaves, layout = tree_flatten((args, kwargs))
        key = id(module), str(layout), tuple(map(_signature, leaves))
        with torch.cuda.device(self._device):
            if key in self._graphs:
                self._graphs.move_to_end(key)
                return self._graphs[key].replay(leaves)
            if key not in self._seen:
                with _watched(module) as kept:
                    result = module(*args, **kwargs)
                self._seen[key] = kept
                if len(self._seen) > MAX_SEEN:
                    self._seen.popitem(last=False)
                return result
            self._make_room()
            inputs = [leaf.to(self._device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            given_args, given_kwargs = tree_unflatten(inputs, layout)
            began = time.perf_counter()
            with _steady(module, self._seen[key]):
                graph = _Graph(lambda: module(*given_args, **given_kwargs), inputs, self._pool, self._stream, type(module).__name__)
            graph.keeps = self._seen.pop(key), module
            self._graphs[key] = graph
            log.info("diffusion.captured: %s, graph %d, in %.0f ms", type(module).__name__, len(self), (time.perf_counter() - began) * 1e3)
            return graph.replay(leaves)

    def clear(self) -> None:
        """Give all memory back. Shapes that come again are captured again."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._seen.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _make_room(self) -> None:
        while len(self._graphs) >= self._max_graphs:
            torch.cuda.synchronize(self._device)
            self._graphs.popitem(last=False)


class _Graph:
    """One captured call and the tensors that it reads and writes."""

    def __init__(self, call: Callable[[], Any], inputs: list[Any], pool: Any, stream: torch.cuda.Stream, name: str) -> None:
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        self.keeps: Any = None
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._output = call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the module does; it is told, and fails the step
            cause = error.__context__ or error  # the end of a failed capture raises once more
            where = traceback.extract_tb(cause.__traceback__)[-1]
            why = f"{Path(where.filename).name}:{where.lineno}: {where.line}: {str(cause).partition(chr(10))[0]}"
            raise CaptureFailed(f"{name} can not be captured in a CUDA graph: {why}") from error

    def replay(self, leaves: list[Any]) -> Any:
        for own, given in zip(self._inputs, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)
        self._graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, self._output)


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


@contextlib.contextmanager
def _watched(module: Any) -> Iterator[list[Any]]:
    """What `module`'s kept part gives meanwhile, as the one element of a list."""
    gave: list[Any] = []
    name = KEPT.get(type(module).__name__)
    hook = getattr(module, name).register_forward_hook(lambda _, __, output: gave.append(output)) if name else None
    try:
        yield gave
    finally:
        if hook is not None:
            hook.remove()


@contextlib.contextmanager
def _steady(module: Any, gave: list[Any]) -> Iterator[None]:
    """`module` does nothing on the host meanwhile that a graph can not hold; its kept part gives again what it gave."""
    name = type(module).__name__
    with contextlib.ExitStack() as undo:
        for function, instead in STEADY.get(name, {}).items():
            file = sys.modules[type(module).__module__]
            undo.callback(setattr, file, function, getattr(file, function))
            setattr(file, function, instead)
        if gave:
            part = getattr(module, KEPT[name])
            undo.callback(delattr, part, "forward")  # the class's is there again
            part.forward = lambda *_, **__: gave[0]
        yield
