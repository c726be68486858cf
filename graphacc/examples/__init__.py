"""Programs to run: ``python -m graphacc.examples.NAME``. All but `train_gpt` need the extra `ecosystem`.

Each has a function ``train(compile)``, a script in which `compile` is the one thing that is added: `graphacc.compile` with its options, or nothing.
"""

import os
from collections.abc import Callable
from typing import Any


def run(train: Callable) -> None:
    """Train a compiled model on eight devices, and print its programs and losses."""
    import graphacc

    os.environ.setdefault("USE_TORCH_XLA", "0")  # transformers and accelerate would otherwise move to torch_xla's runtime where it is installed
    model, losses = train(lambda model: graphacc.compile(model, strategy="fsdp=8"))
    print(model.explain())
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps")


def tiny_llama():
    """A Llama of two layers with random weights, for 32 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False))


def tokens(batches: int, rows: int = 8, length: int = 12) -> list:
    """Random batches, int64 [rows, length]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 32, (rows, length), generator=generator) for _ in range(batches)]
