"""Checkpoints into what loads fast; run once by `streamrt fetch`, in a process of its own.

Knows file formats. Knows nothing of stages.
"""

from __future__ import annotations

import os
from pathlib import Path


def gguf_to_safetensors(source_dir: Path, target_dir: Path) -> None:
    """The one GGUF file in `source_dir` as a transformers checkpoint: safetensors, configuration, tokenizer, chat template.

    Weights are unpacked to float16, which keeps what a quantized file knew at half the size of float32; a weight that
    float16 can not hold makes it float32.
    Raises:
        ValueError: not exactly one GGUF file, or it does not fill the model.
    """
    files = sorted(source_dir.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{source_dir}: got {len(files)} GGUF files, expected one")
    name = files[0].name

    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_dir, gguf_file=name)
    model, info = AutoModelForCausalLM.from_pretrained(source_dir, gguf_file=name, dtype=torch.float32, output_loading_info=True)
    wrong = {key: sorted(names) for key, names in info.items() if names}
    if wrong:
        raise ValueError(f"{name} does not fill {type(model).__name__}: {wrong}")
    largest = max(float(weight.abs().max()) for weight in model.parameters())
    if largest <= torch.finfo(torch.float16).max:
        model.to(torch.float16)

    # What is saved is dense; nothing of it should say that it came from blocks.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    target_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target_dir)
    tokenizer.save_pretrained(target_dir)
