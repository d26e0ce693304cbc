"""A folder with a checkpoint -> the pipeline of one stage that serves it: `streamrt up FOLDER`, `streamrt check FOLDER`.

Knows by which file a kind of checkpoint is known, and the stage for it. What the checkpoint is, and which arguments it wants, the stage's
own class says (`Stage.recognize`). Reads files; needs no heavy library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrt.config import PipelineConfig, PipelineInfo, StageConfig, load_pipeline, parse_pipeline, to_toml
from streamrt.errors import ConfigError
from streamrt.registry import load_class

PIPELINE = "pipeline.toml"
# A file in the folder -> `use` of the stage that serves such a checkpoint. The first that is there counts.
KINDS = {"model_index.json": "diffusion.pipeline", "config.json": "ar.causal_lm"}


class Source(msgspec.Struct, frozen=True):
    """A pipeline, and what was found out about the checkpoint that it was made for: nothing when it was read from a file."""

    config: PipelineConfig
    found: tuple[str, ...] = ()  # lines


def open_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """The pipeline in `path`: a pipeline file, a folder with one, or a folder with a checkpoint. Raises ConfigError."""
    if not path.is_dir():
        return Source(load_pipeline(path, overrides))
    if (path / PIPELINE).is_file():
        return Source(load_pipeline(path / PIPELINE, overrides))
    made, found = pipeline_of(path)
    return Source(parse_pipeline(to_toml(made), path, overrides), tuple(found))


def pipeline_of(folder: Path) -> tuple[PipelineConfig, list[str]]:
    """The pipeline for the checkpoint in `folder`, and what it is. Raises ConfigError when nothing here can serve it."""
    use = next((use for file, use in KINDS.items() if (folder / file).is_file()), None)
    if use is None:
        expected = f"expected {PIPELINE}, or a checkpoint: {' or '.join(KINDS)}"
        raise ConfigError(f"{folder}: {expected}", hint="give the folder that holds this file, or a pipeline file")
    folder = folder.absolute()
    args, found = load_class(use).recognize(folder)
    return PipelineConfig(PipelineInfo(name_of(folder)), (StageConfig("model", use, args=args),)), found


def name_of(folder: Path) -> str:
    """A run's name, made of the folder's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:40]
    return name or "model"
