"""TRL's SFT and DPO with a compiled model: ``python -m graphacc.examples.trl``."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphacc.examples import run, tiny_llama

Compile = Callable[[nn.Module], nn.Module]


def tokenizer():
    """One token per letter, without files from anywhere."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
    raw = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def train(compile: Compile, method: str = "sft", steps: int = 3) -> tuple[nn.Module, list[float]]:
    """Train for `steps` steps of 8 rows; returns the model and the losses.

    Args:
        method: "sft", or "dpo" with a reference model that is not compiled.
    """
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.manual_seed(0)
    model = compile(tiny_llama())
    words = [f"{'abcdefgh'[i % 8]} is {'ijklmnop'[i * 3 % 8]}" for i in range(8 * steps)]
    common: dict[str, Any] = dict(
        max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, logging_nan_inf_filter=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if method == "sft":
            rows = Dataset.from_dict({"text": words})
            trainer = SFTTrainer(model, SFTConfig(folder, **common), train_dataset=rows, processing_class=tokenizer())
        else:
            rows = Dataset.from_dict({"prompt": [word[:2] for word in words], "chosen": [word[2:] for word in words], "rejected": [word[:1:-1] for word in words]})
            trainer = DPOTrainer(model, ref_model=tiny_llama(), args=DPOConfig(folder, **common), train_dataset=rows, processing_class=tokenizer())
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    run(train)
