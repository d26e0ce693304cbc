"""Trains a small class-conditional DiT on scikit-learn's handwritten digits, on the CPU, and saves it as a diffusers pipeline.

    python examples/05_digits/train.py [FOLDER]

The digits are 8x8, so they are their own latents; the decoder of the VAE learns to draw them four times as large. The transformer learns to
turn noise into a digit of the class that it is told (v-prediction on a zero-SNR schedule), and, told nothing, into any digit.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

HERE = Path(__file__).parent


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 1, 8, 8) in [-1, 1] and their classes (n,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return images, torch.tensor(data.target)


def train_decoder(images: torch.Tensor, steps: int) -> diffusers.AutoencoderKL:
    """A VAE whose decoder draws (n, 1, 8, 8) as (n, 1, 32, 32), smoothly."""
    vae = diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=1, block_out_channels=(8, 8, 8), norm_num_groups=4, layers_per_block=1, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, scaling_factor=1.0,
        mid_block_add_attention=False,
    )  # fmt: skip
    optimizer = torch.optim.Adam(vae.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = images[torch.randint(len(images), (24,))]
        target = functional.interpolate(batch, scale_factor=4, mode="bicubic").clamp(-1, 1)
        loss = functional.mse_loss(vae.decode(batch).sample, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"decoder: mean squared error {loss.item():.4f}")
    return vae


def train_transformer(images: torch.Tensor, classes: torch.Tensor, steps: int, scheduler: diffusers.DDIMScheduler):
    """The DiT: its weights averaged over the last steps."""
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, out_channels=1, num_layers=4, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000,
    )  # fmt: skip
    average = copy.deepcopy(transformer)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    transformer.train()
    losses = []
    for step in range(steps):
        chosen = torch.randint(len(images), (64,))
        clean, noise = images[chosen], torch.randn(64, 1, 8, 8)
        times = torch.randint(scheduler.config.num_train_timesteps, (64,))
        noisy, target = scheduler.add_noise(clean, noise, times), scheduler.get_velocity(clean, noise, times)
        # The class is left out of one in ten by the model itself: that is what guidance compares with.
        loss = functional.mse_loss(transformer(noisy, timestep=times, class_labels=classes[chosen]).sample, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        with torch.no_grad():
            keep = min(0.995, step / (step + 10))
            for mine, theirs in zip(average.parameters(), transformer.parameters(), strict=True):
                mine.lerp_(theirs, 1 - keep)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5} of {steps}: loss {np.mean(losses[-100:]):.4f}")
    return average.eval()


def train(folder: Path, steps: int, decoder_steps: int) -> None:
    torch.manual_seed(0)
    images, classes = digits()
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=True,
    )
    transformer = train_transformer(images, classes, steps, scheduler)
    vae = train_decoder(images, decoder_steps).eval()
    diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=scheduler).save_pretrained(folder)
    # The names of the classes; DiTPipeline reads them from here, and does not write them.
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": {str(digit): str(digit) for digit in range(10)}}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "model")
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--decoder-steps", type=int, default=200)
    args = parser.parse_args()
    began = time.monotonic()
    train(args.folder, args.steps, args.decoder_steps)
    print(f"trained and saved in {args.folder} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
