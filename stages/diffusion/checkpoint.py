"""What the pipeline of a checkpoint is, of its files and of diffusers' source text: its task, what it can be asked, how it would be served.

Needs diffusers installed, and imports none of it: `streamrt check` reads this. What a pipeline takes is the signature of its `__call__`, so this
is true of every pipeline of the installed version.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from stages.diffusion.args import DiffusionArgs
from stages.diffusion.cut import components_of, is_denoiser, read_index, task_of, why_not
from streamrt import ConfigError


class Call(msgspec.Struct, frozen=True):
    """A pipeline's `__call__`: its parameters, and those of their defaults that are plain values."""

    names: frozenset[str]
    defaults: dict[str, Any]


def recognize(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """See `Stage.recognize`."""
    index = read_index(folder)
    kind = index.get("_class_name")
    if not isinstance(kind, str):
        raise ConfigError(f"{folder}: model_index.json names the pipeline {kind!r}, expected a class of diffusers")
    call = call_of(kind)
    if call is None:
        raise ConfigError(
            f"{folder}: {kind} is no pipeline of the diffusers that is installed here",
            hint="a newer version may have it; code that a checkpoint brings along is not run",
        )
    components = components_of(index)
    if missing := [name for name in components if not (folder / name).is_dir()]:
        raise ConfigError(f"{folder}: there is no folder for {', '.join(missing)}, which model_index.json names")
    task = task_of(call.names)
    args: dict[str, Any] = {"model": str(folder), "task": task}
    denoisers = {name: cls for name, (_, cls) in components.items() if is_denoiser(name)}
    if not denoisers:
        args["mode"] = "request"
    return args, _found(kind, call, msgspec.convert(args, DiffusionArgs), denoisers, why_not(index, task))


def _found(kind: str, call: Call, args: DiffusionArgs, denoisers: dict[str, str], why_whole: str) -> list[str]:
    starts = [what for name, what in (("prompt", "text"), ("class_labels", "a class"), ("image", "images")) if name in call.names]
    lines = [f"{kind}, a pipeline of diffusers: {args.task} from {' and '.join(starts) or 'noise'}"]
    if denoisers:
        named = ", ".join(f"{name} ({cls})" for name, cls in denoisers.items())
        lines.append(f"denoised by {named}: step by step, the steps of different requests together")
    else:
        lines.append("no component is known to be its denoiser: requests are served whole, one after the other")
    lines.append(f"stays one stage: {why_whole}" if why_whole else "can be cut in three stages: encoder, denoiser, decoder")
    steps = call.defaults.get("num_inference_steps")
    size = "x".join(str(call.defaults[name]) for name in ("width", "height") if isinstance(call.defaults.get(name), int))
    usual = [f"{steps} steps"] * isinstance(steps, int) + [f"{size} pixels"] * ("x" in size)
    if usual:
        lines.append(f"where a request says nothing: {', '.join(usual)}")
    most = [f"{args.max_steps} steps"]
    if "width" in call.names:
        most.append(f"sides of {args.max_side} and {args.max_pixels} pixels")
    if args.task == "video":
        most.append(f"{args.max_frames} frames")
    if args.task == "audio":
        most.append(f"{args.max_seconds:g} s")
    lines.append(f"at most: {', '.join(most)}, {args.max_images} of a request")
    return lines


@functools.cache
def call_of(kind: str) -> Call | None:
    """The `__call__` of diffusers' pipeline class `kind`, its own or an inherited one; None when there is none."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("a pipeline of diffusers needs diffusers, which is not installed", hint="pip install 'streamrt[diffusion]'")
    for file in sorted(Path(spec.submodule_search_locations[0], "pipelines").rglob("*.py")):
        text = file.read_bytes()
        if f"class {kind}(".encode() not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                return _own_call(node) or next(filter(None, (call_of(base.id) for base in node.bases if isinstance(base, ast.Name))), None)
    return None


def _own_call(node: ast.ClassDef) -> Call | None:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__call__":
            places = member.args.posonlyargs + member.args.args
            given = [*zip(places[len(places) - len(member.args.defaults) :], member.args.defaults, strict=True)]
            given += [(arg, default) for arg, default in zip(member.args.kwonlyargs, member.args.kw_defaults, strict=True) if default]
            defaults = {arg.arg: default.value for arg, default in given if isinstance(default, ast.Constant)}
            return Call(frozenset(arg.arg for arg in (*places[1:], *member.args.kwonlyargs)), defaults)
    return None
