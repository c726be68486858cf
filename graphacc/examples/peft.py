"""LoRA by peft, compiled: ``python -m graphacc.examples.peft``. Wrap the model first, and compile it last."""

from collections.abc import Callable

import torch
from torch import nn

from graphacc.examples import run, tiny_llama, tokens

Compile = Callable[[nn.Module], nn.Module]


def train(compile: Compile, steps: int = 4) -> tuple[nn.Module, list[float]]:
    """Train the adapters alone; returns the model and the losses."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    model = compile(adapted)
    optimizer = torch.optim.AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-2)
    losses = []
    for batch in tokens(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


if __name__ == "__main__":
    run(train)
