"""A training step of a denoising U-Net of diffusers: ``python -m graphacc.examples.diffusers``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def train(compile: Compile, steps: int = 3) -> tuple[nn.Module, list[float]]:
    """Predict the noise in random images; returns the model and the losses."""
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    blocks: dict[str, Any] = dict(down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",), block_out_channels=(16,), layers_per_block=1)
    unet = UNet2DModel(sample_size=8, norm_num_groups=8, attention_head_dim=8, **blocks)
    model, noising = compile(unet), DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        clean, noise = torch.randn(2, 8, 3, 8, 8, generator=generator)
        times = torch.randint(100, (8,), generator=generator)
        loss = F.mse_loss(model(noising.add_noise(clean, noise, times), times).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


if __name__ == "__main__":
    run(train)
