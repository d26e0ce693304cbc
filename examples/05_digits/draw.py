"""Asks the pipeline beside this file for digits and shows what comes, as text; several at a time share the denoiser's calls.

python examples/05_digits/draw.py "draw a 7" [--model FOLDER] [--n 3]
"""

import argparse
from pathlib import Path

import numpy as np

from streamrt import Pipeline

SHADES = np.array(list(" .:-=+*#%@"))


def as_text(image: np.ndarray) -> str:
    """(32, 32, 3) uint8 as 16 lines of 32 characters."""
    grey = image[::2, :, 0]
    return "\n".join("".join(row) for row in SHADES[grey.astype(int) * (len(SHADES) - 1) // 255])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("--model", type=Path)
parser.add_argument("--n", type=int, default=1)
parser.add_argument("--seed", type=int)
args = parser.parse_args()

overrides = [f'stage.draw.args.model="{args.model.absolute()}"'] if args.model else []
with Pipeline(Path(__file__).parent / "pipeline.toml", overrides=overrides) as pipeline:
    for chunk in pipeline.stream(args.prompt, task="image", n=args.n, seed=args.seed):
        if chunk.event == "progress" and chunk.meta["step"] == chunk.meta["steps"]:
            print(f"denoised in {chunk.meta['steps']} steps")
        elif chunk.modality == "image" and not chunk.is_last:
            print(as_text(chunk.tensors["image"]))
