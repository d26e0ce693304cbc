"""What makes a loaded pipeline smaller or faster: attention kernels, quantization, casting, tiling, offload, compiled blocks.

Each is off by default. What can not be done on this device or with this pipeline is a ConfigError at start, never another kernel than asked.

Knows pipelines and devices. Knows nothing of requests.
"""

from __future__ import annotations

import shutil
from typing import Any

import torch

from stages.diffusion.args import DiffusionArgs
from stages.diffusion.rotary import make_real
from streamrt import ConfigError

# Role -> (diffusers' name, least CUDA capability; None: the CPU has it, too).
ATTENTION: dict[str, tuple[str, tuple[int, int] | None]] = {
    "native": ("native", None),
    "math": ("_native_math", None),
    "flex": ("flex", None),
    "cudnn": ("_native_cudnn", (8, 0)),
    "efficient": ("_native_efficient", (5, 0)),
    "flash": ("flash", (8, 0)),
    "flash_3": ("_flash_3", (9, 0)),
    "flash_4": ("flash_4_hub", (10, 0)),
    "sage": ("sage", (8, 0)),
    "xformers": ("xformers", (7, 0)),
}


def accelerate(pipeline: Any, denoisers: list[str], asked: DiffusionArgs, device: str) -> None:
    """Do to `pipeline` what is asked, in place. Raises ConfigError."""
    _check(pipeline, denoisers, asked, device)
    for component, how in asked.quantize.items():
        if how != "none":
            _quantize(getattr(pipeline, component), how)
    for name in denoisers:
        module = getattr(pipeline, name)
        if asked.attention != "auto":
            _set_attention(module, asked.attention)
        if asked.casting == "fp8":
            module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=module.dtype)
        if asked.compile:
            make_real(module)
            # One compilation for all sizes and rows; more graph breaks or recompilations than allowed are an error, not eager code.
            module.compile_repeated_blocks(fullgraph=True, dynamic=True)
    if asked.vae_tiling:
        pipeline.vae.enable_tiling()
    if asked.vae_slicing:
        pipeline.vae.enable_slicing()
    if asked.offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif asked.offload == "group":
        pipeline.enable_group_offload(onload_device=torch.device(device), offload_type="leaf_level", use_stream=True)


def _check(pipeline: Any, denoisers: list[str], asked: DiffusionArgs, device: str) -> None:
    capability = torch.cuda.get_device_capability(device) if device.startswith("cuda") else None
    kind = type(pipeline).__name__
    if asked.attention != "auto":
        least = ATTENTION[asked.attention][1]
        if least is not None and (capability is None or capability < least):
            has = "a CPU" if capability is None else f"a GPU of capability {capability[0]}.{capability[1]}"
            raise ConfigError(
                f'attention: "{asked.attention}" needs a GPU of capability {least[0]}.{least[1]}, this is {has}', param="attention"
            )
    modules = {name for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for component, how in asked.quantize.items():
        if component not in modules:
            raise ConfigError(f'quantize: got "{component}", {kind} has {", ".join(sorted(modules))}', param="quantize")
        if how == "fp8_dynamic" and (capability is None or capability < (8, 9)):
            raise ConfigError(f'quantize: {component} = "fp8_dynamic" needs a GPU of capability 8.9', param="quantize")
    if asked.casting != "none" and any(asked.quantize.get(name, "none") != "none" for name in denoisers):
        raise ConfigError("casting: the denoiser is quantized already; ask for one of the two", param="casting")
    for option, method in (("vae_tiling", "enable_tiling"), ("vae_slicing", "enable_slicing")):
        if getattr(asked, option) and not hasattr(getattr(pipeline, "vae", None), method):
            raise ConfigError(f"{option}: the VAE of {kind} can not do it", param=option)
    if asked.offload != "none":
        if capability is None:
            raise ConfigError(
                f'offload: "{asked.offload}" moves models from a GPU to memory, and the stage runs on {device}', param="offload"
            )
        if asked.quantize or asked.casting != "none" or asked.compile:
            raise ConfigError("offload: can not be combined with quantize, casting or compile", param="offload")
    if asked.cuda_graphs:
        if capability is None:
            raise ConfigError(f"cuda_graphs: the stage runs on {device}", param="cuda_graphs")
        if asked.offload != "none" or asked.casting != "none" or asked.loras or asked.cache != "none" or asked.mode == "request":
            raise ConfigError(
                'cuda_graphs: can not be combined with offload, casting, loras, a cache or mode = "request": they change what a graph reads',
                param="cuda_graphs",
            )
        if "int8_dynamic" in asked.quantize.values():
            raise ConfigError(
                'cuda_graphs: can not be combined with quantize = "int8_dynamic": torchao looks at values', param="cuda_graphs"
            )
    if asked.compile:
        if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            raise ConfigError("compile: needs a C++ compiler on the CPU", param="compile")
        for name in denoisers:
            if not getattr(getattr(pipeline, name), "_repeated_blocks", None):
                raise ConfigError(f"compile: {name} ({type(getattr(pipeline, name)).__name__}) names no repeated blocks", param="compile")


def _set_attention(module: Any, role: str) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before, _ = _AttentionBackendRegistry.get_active_backend()
    try:
        module.set_attention_backend(ATTENTION[role][0])
    except (ValueError, RuntimeError, ImportError, NotImplementedError, AttributeError) as error:  # how diffusers says that a package lacks
        raise ConfigError(f'attention: "{role}" can not be had here: {error}', param="attention") from error
    finally:
        _AttentionBackendRegistry.set_active_backend(before)  # it would stay the default of every other model in the process


def _quantize(module: Any, how: str) -> None:
    from torchao import quantization

    config = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8WeightOnlyConfig,
        "fp8_dynamic": quantization.Float8DynamicActivationFloat8WeightConfig,
    }[how]()
    quantization.quantize_(module, config)
