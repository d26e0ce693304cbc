"""LoRA adapters of a pipeline: named in the pipeline file, loaded when a request first asks, the least used ones dropped.

Knows one pipeline and its adapters. Knows nothing of requests, only which adapters a call wants.

Rules
- A call's adapters are set before it; calls that want different ones are never merged.
- At most `room` adapters are in memory, and at least as many as one request names.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrt import ConfigError, StageFailed

Wanted = tuple[tuple[str, float], ...]  # (name, scale)


class Adapters:
    """Created at load, used by the engine before each piece of work. Raises ConfigError for a pipeline or file that can not be."""

    def __init__(self, pipeline: Any, files: Mapping[str, Path], room: int) -> None:
        self._pipeline = pipeline
        self._files = files
        self._room = room
        self._loaded: OrderedDict[str, None] = OrderedDict()  # the least used first
        self._active: Wanted = ()
        if not files:
            return
        if not hasattr(pipeline, "load_lora_weights") or "adapter_name" not in inspect.signature(pipeline.load_lora_weights).parameters:
            raise ConfigError(f"loras: {type(pipeline).__name__} takes none", param="loras")
        for name, file in files.items():
            if not file.is_file():
                raise ConfigError(f"loras: {name}: there is no file {file}", param="loras")

    def use(self, wanted: Wanted) -> None:
        """Have exactly these adapters in effect. Raises StageFailed when one does not load."""
        if wanted == self._active:
            return
        for name, _ in wanted:
            self._load(name, keep={other for other, _ in wanted})
        if wanted:
            self._pipeline.enable_lora()
            self._pipeline.set_adapters([name for name, _ in wanted], [scale for _, scale in wanted])
        else:
            self._pipeline.disable_lora()
        self._active = wanted

    def _load(self, name: str, keep: set[str]) -> None:
        if name not in self._loaded:
            for old in [old for old in self._loaded if old not in keep][: max(0, len(self._loaded) + 1 - self._room)]:
                self._pipeline.delete_adapters(old)
                del self._loaded[old]
            file = self._files[name]
            try:
                self._pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True)
            except (OSError, ValueError, RuntimeError, KeyError) as error:  # not an adapter, or not of this model
                self._active = ((name, float("nan")),)  # unlike anything wanted: it is set anew next time
                raise StageFailed(f"lora {name}: {file} does not load: {error}") from error
            self._loaded[name] = None
        self._loaded.move_to_end(name)
