"""What `use = "..."` names: short names, entry points, import strings.

Knows how to find a stage class and how to check its arguments. Imports no class until asked, and no heavy library ever:
a stage's module imports without them.

Rules
- `use` is a short name from the table below, a name that an installed package registers as an entry point of the group
  `streamrt.stages`, or "package.module:Class"; a module may lie beside the pipeline file.
- The pipeline file's folder is searched last, so a file there never hides an installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from streamrt.config import PipelineConfig, StageConfig, Where, any_of, convert, did_you_mean, quote
from streamrt.errors import ConfigError
from streamrt.pipeline import Graph, Node
from streamrt.stage import Stage


class Entry(msgspec.Struct, frozen=True):
    """What a short name stands for."""

    target: str  # "module:Class"
    needs: tuple[str, ...] = ()  # modules that `load` imports; the extra that brings each is in EXTRAS


STAGES: dict[str, Entry] = {
    "echo": Entry("stages.echo:Echo"),
    "speech.vad.silero": Entry("stages.speech.vad:SileroVad", ("onnxruntime",)),
    "speech.asr.faster_whisper": Entry("stages.speech.asr:FasterWhisper", ("faster_whisper",)),
    "speech.tts.kokoro": Entry("stages.speech.tts:Kokoro", ("kokoro_onnx", "onnxruntime")),
    "ar.causal_lm": Entry("stages.ar.causal_lm:CausalLM", ("torch", "transformers")),
    "diffusion.pipeline": Entry("stages.diffusion.pipeline:DiffusionPipeline", ("torch", "transformers", "diffusers", "greenlet")),
    "testing.vad": Entry("stages.testing:EnergyVad"),
    "testing.asr": Entry("stages.testing:ScriptAsr"),
    "testing.llm": Entry("stages.testing:ScriptLlm"),
    "testing.tone": Entry("stages.testing:ToneTts"),
    "testing.image": Entry("stages.testing:ScriptImage"),
    "testing.video": Entry("stages.testing:ScriptVideo"),
    "testing.sound": Entry("stages.testing:ScriptSound"),
    "testing.ramp": Entry("stages.testing:Ramp"),
    "testing.slow": Entry("stages.testing:Slow"),
    "testing.crash": Entry("stages.testing:Crash"),
    "testing.hang": Entry("stages.testing:Hang"),
    "testing.ranked": Entry("stages.testing:Ranked"),
}

# Top-level module -> the extra of streamrt that installs it.
EXTRAS: dict[str, str] = {
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "accelerate": "torch",
    "gguf": "torch",
    "diffusers": "diffusion",
    "greenlet": "diffusion",
    "peft": "diffusion",
    "torchsde": "diffusion",
    "torchao": "speedups",
    "cache_dit": "speedups",
    "onnxruntime": "voice",
    "faster_whisper": "voice",
    "ctranslate2": "voice",
    "kokoro_onnx": "voice",
    "soxr": "voice",
    "av": "media",
    "soundfile": "media",
    "PIL": "media",
    "sphn": "media",
}

GROUP = "streamrt.stages"


def known_names() -> list[str]:
    """Every short name, the built-in ones first."""
    return [*STAGES, *(point.name for point in entry_points(group=GROUP) if point.name not in STAGES)]


def target_of(use: str) -> str:
    """The import string that `use` stands for. Raises ConfigError for an unknown short name."""
    if use in STAGES:
        return STAGES[use].target
    for point in entry_points(group=GROUP):
        if point.name == use:
            return point.value
    if ":" in use:
        return use
    names = known_names()
    hint = did_you_mean(use, names) or 'a class of your own is written "module:Class", in a file beside the pipeline file'
    raise ConfigError(f'got {quote(use)}, expected {any_of(names)}, or "module:Class"', hint=hint)


def load_class(use: str, folder: Path | str | None = None) -> type[Stage]:
    """The stage class that `use` names.

    Args:
        use: as in the pipeline file.
        folder: where else to look, after the installed packages; the pipeline file's own.

    Raises:
        ConfigError: no such name, module or class; a module that does not import; a class that is no Stage.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    target = target_of(use)
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            hint = f"there is no module {quote(error.name)}{f' in {folder} or' if folder else ''} among the installed packages"
            raise ConfigError(f"got {quote(use)}, expected a module that is there", hint=hint) from None
        raise missing_module(error, f"{quote(use)} can not be imported") from error
    except ValueError as error:  # "" or ".x" as a module name
        raise ConfigError(f'got {quote(use)}, expected "module:Class"') from error
    except Exception as error:  # the user's own module runs here; whatever it raises is theirs to read, with its traceback
        raise ConfigError(f"{quote(use)} can not be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, Stage) and found is not Stage:
        return found
    classes = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Stage) and value is not Stage]
    got = f"{quote(use)}, which is no Stage" if found is not None else quote(use)
    if classes:
        raise ConfigError(f"got {got}, expected {any_of(f'{module_name}:{name}' for name in classes)}")
    raise ConfigError(f"got {got}, expected a class in {module_name} that derives from streamrt.Stage")


def parse_args(kind: type[Stage], stage: StageConfig, file: Path | str = "pipeline.toml") -> Any:
    """`[stage.args]` as the class's `Args`; strict. Paths among them, also in a table, are made absolute, from the folder of `file`."""
    args = convert(stage.args, kind.Args, Where(str(file)), f"stage.{stage.name}.args")
    folder = Path(file).absolute().parent

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(inner) for key, inner in value.items()}
        return folder / value.expanduser() if isinstance(value, Path) else value

    return msgspec.structs.replace(args, **{f.name: absolute(getattr(args, f.name)) for f in msgspec.structs.fields(args)})


def load_graph(config: PipelineConfig) -> tuple[Graph, dict[str, type[Stage]]]:
    """Every class of the pipeline, its arguments checked, and the graph they make. Raises ConfigError."""
    kinds: dict[str, type[Stage]] = {}
    for stage in config.stages:
        try:
            kind = kinds[stage.name] = load_class(stage.use, config.folder)
        except ConfigError as error:
            key = f"stage.{stage.name}.use"
            raise ConfigError(f"{config.file}: {key}: {error.message}", hint=error.hint, param=key) from error.__cause__
        kinds[stage.name] = kind.configured(parse_args(kind, stage, config.file))
        if (tp := config.deployed(stage.name).tp) > 1 and not kind.supports_tp:
            raise Where(config.file).error(f"deploy.{stage.name}.tp", str(tp), f"1: {quote(stage.use)} runs in one process")
    return Graph((Node.of(stage, kinds[stage.name]) for stage in config.stages), config.file), kinds


def missing_module(error: ModuleNotFoundError, what: str) -> ConfigError:
    """An import that failed, in one line that names the extra which brings the module.

    Args:
        error: as Python raised it.
        what: what could not be done, e.g. 'stage "tts" can not load'.
    """
    name = (error.name or "").partition(".")[0]
    return ConfigError(f"{what}: {name or error} is not installed", hint=install_hint(name))


def install_hint(module: str) -> str:
    """How to get `module`."""
    return f"pip install 'streamrt[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"


def missing_modules(use: str) -> list[str]:
    """What a registered stage will import at `load` and is not installed; looks, and imports nothing."""
    needs = STAGES[use].needs if use in STAGES else ()
    return [name for name in needs if importlib.util.find_spec(name) is None]
