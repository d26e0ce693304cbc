"""Text and images as Qwen-VL reads them, without torchvision, which transformers' own `Qwen2VLProcessor` can not be made without.

Knows one tokenizer and one image processor. Knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

IMAGE_TOKEN = "<|image_pad|>"


class QwenVLProcessor(ProcessorMixin):
    """Called as diffusers' pipelines call `Qwen2VLProcessor`: text with a place for each image, and the images. Of the class above it, it
    has only the type, which diffusers checks.
    """

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> QwenVLProcessor:
        """Of a checkpoint's `processor` folder. Raises OSError when it is incomplete."""
        return cls(Qwen2VLImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def __call__(self, text: list[str], images: Any = None, *, padding: bool = True, return_tensors: str = "pt", **options: Any) -> Any:
        """input_ids and attention_mask (texts, tokens); with images pixel_values and image_grid_thw, in the order of their places."""
        seen: dict[str, Any] = {}
        if images is not None:
            seen = dict(self.image_processor(images=images, return_tensors=return_tensors))
            counts = iter((seen["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist())
            text = [IMAGE_TOKEN.join(_with_counts(line.split(IMAGE_TOKEN), counts)) for line in text]
        read = self.tokenizer(text, padding=padding, return_tensors=return_tensors, **options)
        return BatchFeature({**read, **seen})


def _with_counts(parts: list[str], counts: Any) -> list[str]:
    """`parts` so that joining them by the token gives as many of it as each image needs: one stands between two parts already."""
    return [*(part + IMAGE_TOKEN * (next(counts) - 1) for part in parts[:-1]), parts[-1]]
