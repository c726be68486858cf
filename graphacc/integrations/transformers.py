"""transformers' Trainer with one program for each step, and on the CPU also where torch_xla is installed.

``from graphacc.integrations.transformers import Trainer`` takes the place of ``from transformers import Trainer``, in front of every other import of
transformers and accelerate: they read the variable USE_TORCH_XLA when they are imported, and would train on torch_xla's devices. It is "0" while this module
imports them, unless it is set already; afterwards the environment is as it was.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def _without_torch_xla() -> Iterator[None]:
    known = "USE_TORCH_XLA" in os.environ
    os.environ.setdefault("USE_TORCH_XLA", "0")
    try:
        yield
    finally:
        if not known:
            del os.environ["USE_TORCH_XLA"]


with _without_torch_xla():
    import accelerate.utils  # type: ignore[import-not-found]  # of the extra `ecosystem`
    import transformers.utils.import_utils

if accelerate.utils.is_torch_xla_available() or transformers.utils.import_utils.is_torch_xla_available():
    raise ImportError(
        "transformers or accelerate was imported before graphacc.integrations.transformers, or with USE_TORCH_XLA=1, so that Trainer and Accelerator train on "
        "torch_xla's devices: import graphacc.integrations.transformers first, set USE_TORCH_XLA=0, or uninstall torch_xla"
    )


class DeferredNanFilter:
    """In front of a class of Trainer: its ``logging_nan_inf_filter`` without reading the loss before the optimizer's step.

    Trainer's own filter (``Trainer._inner_training_loop``) asks whether the loss is finite, so that a compiled step becomes two programs. This one computes what that one
    logs, within the step's program: in the place of a loss that is not finite, the mean of those since the last log. ``class DPOTrainer(DeferredNanFilter, trl.DPOTrainer): pass``.
    """

    args: Any
    state: Any
    _defers = False

    def train(self, *args, **kwargs):
        """As Trainer's."""
        self._defers, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._defers, self.args.logging_nan_inf_filter = False, self._defers

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        """As Trainer's; a number, what is to be added to the sum of losses that is logged."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self._defers:
            return loss
        total, last = self._tr_loss, self._globalstep_last_logged  # type: ignore[attr-defined]
        steps = torch.tensor(1.0 + self.state.global_step - last, device=total.device)  # a tensor: a number would be another program for each value
        return torch.where(torch.isfinite(loss), loss, total / steps)


class Trainer(DeferredNanFilter, transformers.Trainer):
    """transformers.Trainer, with the filter above."""


class Seq2SeqTrainer(DeferredNanFilter, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, with the filter above."""
