"""A checkpoint on this machine to a model that is ready to run: dtype by capability, nothing missing, nothing downloaded.

Knows transformers. Knows nothing of requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.lean import lean_imports
from streamrt import ConfigError, Context

CPU_INFO = Path("/proc/cpuinfo")


def cpu_flags(cpu_info: str) -> frozenset[str]:
    """What the processor says it can do, of the text of /proc/cpuinfo."""
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def pick_dtype(asked: str, device: str, flags: frozenset[str]) -> str:
    """The dtype that `asked` stands for on `device`: "auto" is bfloat16 where there is hardware for it, and float32 elsewhere."""
    if asked == "float8" and device == "cpu":
        raise ConfigError('dtype: got "float8" on cpu, which is for GPUs', hint='dtype = "int8" is for both', param="dtype")
    if asked != "auto":
        return asked
    return "bfloat16" if device != "cpu" or flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def load(
    source: Any, *, dtype: str, device: str, threads: int, progress: Callable[[str], None], ranked: Context | None = None
) -> tuple[Any, Any, str]:
    """Model, tokenizer and the dtype that was chosen. `source`: a checkpoint's folder, a GGUF file, or what `random:` resolves to.

    With several ranks, of which `ranked` is one, the model has its share of each layer's weights. Blocks for seconds.
    Raises:
        ConfigError: it is no causal language model, or weights are missing or left over.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # OpenMP threads that spin at every barrier starve each other as soon as another process wants the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress("importing torch")
    import torch

    torch.set_num_threads(threads)
    ranks = 1
    if ranked is not None:
        from stages.ar.ranks import join

        ranks = ranked.ranks
        progress("waiting for the other ranks")
        join(ranked)
    progress("importing transformers")
    with lean_imports():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_utils  # noqa: F401 (the names alone import little)
    from transformers.utils import logging

    logging.disable_progress_bar()
    flags = cpu_flags(CPU_INFO.read_text())
    chosen = pick_dtype(dtype, device, flags)
    is_8bit = chosen in ("int8", "float8")  # of which only the weights are, and they are quantized after loading
    tensor_type = getattr(torch, chosen) if not is_8bit else torch.float32 if device == "cpu" else torch.bfloat16

    path = Path(getattr(source, "path", source))
    is_random = getattr(source, "kind", "") == "random"
    folder, gguf = (path.parent, {"gguf_file": path.name} if path.suffix == ".gguf" else {}) if path.is_file() else (path, {})
    if ranks > 1 and (is_8bit or gguf):
        what = "a GGUF file" if gguf else f"dtype {chosen}"
        raise ConfigError(f"tp: got {ranks}, expected 1 with {what}", hint="a folder with safetensors can be shared out", param="tp")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
        progress(f"reading weights as {chosen}")
        shares = _shares(AutoConfig.from_pretrained(path), ranks) if ranks > 1 else {}
        if is_random:
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=tensor_type)
            if shares:
                model = _share_out(model, **shares)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=tensor_type, output_loading_info=True, **gguf, **shares)
            refuse_gaps(path, info)
    except (OSError, ValueError, RuntimeError, KeyError) as error:  # how transformers says that a folder is no such model
        raise ConfigError(f"{path}: not a causal language model that transformers can load: {error}", param="model") from error
    model.eval().requires_grad_(False)
    if chosen == "int8" and device == "cpu":
        progress("quantizing to int8")
        from stages.ar.int8 import quantize

        quantize(model, has_vnni=bool(flags & {"avx512_vnni", "avx_vnni"}))
    elif device != "cpu" and ranks == 1:
        model.to(device)
    elif device != "cpu":
        _move_rest(model, device)
    return model, tokenizer, chosen


# Parts of an omni checkpoint: class, attribute of the config that describes it.
PARTS = {
    "thinker": ("Qwen3OmniMoeThinkerForConditionalGeneration", "thinker_config"),
    "talker": ("Qwen3OmniMoeTalkerForConditionalGeneration", "talker_config"),
}


def load_part(path: Path, part: str, *, dtype: str, device: str) -> Any:
    """One of `PARTS` out of a Qwen3-Omni checkpoint's folder; the others' weights are not read.

    Raises:
        ConfigError: it is no such checkpoint, or weights are missing.
    """
    import torch
    import transformers
    from transformers import conversion_mapping

    # The talker's config does not say its type, so its experts would stay as they were made: random.
    experts = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_omni_moe")
    conversion_mapping.register_checkpoint_conversion_mapping("qwen3_omni_moe_talker_text", experts, overwrite=True)
    name, attribute = PARTS[part]
    try:
        config = getattr(transformers.AutoConfig.from_pretrained(path), attribute)
        model, info = getattr(transformers, name).from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:  # how transformers says that it is no such checkpoint
        raise ConfigError(f"{path}: no {part} that transformers can load: {error}", param="model") from error
    refuse_gaps(path, {kind: names for kind, names in info.items() if kind != "unexpected_keys"})  # the other parts' are left over
    return model.eval().requires_grad_(False).to(device)


def _shares(config: Any, ranks: int) -> dict[str, Any]:
    """What `from_pretrained` is told to read one rank's share. Raises ConfigError."""
    from transformers.distributed import DistributedConfig

    from stages.ar.ranks import check_shares

    check_shares(config.get_text_config(decoder=True), ranks)
    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}


def _share_out(model: Any, distributed_config: Any) -> Any:
    """A whole model, the same on each rank, to this rank's share of it."""
    import torch

    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embed.weight:  # shared out one by one, so they have to be two
        head.weight = torch.nn.Parameter(embed.weight.detach())
    kind = type(model)
    distributed_config, _, mesh = kind.prepare_distribute_model(distributed_config)
    return kind.maybe_distribute_model(model, distributed_config, mesh)


def _move_rest(model: Any, device: str) -> None:
    """What is not shared out to where the shares are. (`Module.to` would make new parameters of the shares.)"""
    for tensor in (*model.parameters(), *model.buffers()):
        if not hasattr(tensor, "device_mesh"):
            tensor.data = tensor.data.to(device)


def refuse_gaps(path: Path, info: dict[str, Any]) -> None:
    """Raise ConfigError unless the checkpoint filled the model exactly."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(str(name) for name in info.get(kind) or ()):
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigError(
                f"{path}: {kind.replace('_', ' ')}: {listed}", hint="the checkpoint does not belong to its config.json", param="model"
            )
