"""transformers' Trainer with a compiled model: ``python -m graphacc.examples.trainer``.

`train` is what a script does; `compile` is added to it, and the import of Seq2SeqTrainer is another one. A tiny T5 learns to copy short sequences, with Adafactor, a last batch
that is smaller than the others, and an evaluation that generates.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def dataset(rows: int, length: int = 6) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(2, 32, (rows, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(compile: Compile, steps: int = 6, original: bool = False, **options) -> tuple[nn.Module, list[float]]:
    """Train for `steps` steps of 8 rows, of 20; returns the model and the losses.

    Args:
        original: take transformers' own Seq2SeqTrainer, whose NaN filter reads the loss before the optimizer's step.
        options: further arguments of Seq2SeqTrainingArguments.
    """
    from graphacc.integrations.transformers import Seq2SeqTrainer  # isort: skip  # in front of transformers
    import transformers
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = compile(T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)))
    with tempfile.TemporaryDirectory() as folder:
        defaults: dict[str, Any] = dict(
            optim="adafactor",
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            logging_steps=1,
            predict_with_generate=True,
            generation_max_length=8,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,  # where the loop's tensors are; GraphAcc has the devices
        )
        arguments = Seq2SeqTrainingArguments(folder, max_steps=steps, **defaults | options)
        trainer = (transformers.Seq2SeqTrainer if original else Seq2SeqTrainer)(model, arguments, train_dataset=dataset(20), eval_dataset=dataset(8))
        trainer.train()
        trainer.evaluate()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    run(train)
