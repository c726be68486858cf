"""The one table of tolerances: how far a compiled step may be from PyTorch's, per dtype of the computation."""

import torch
from torch import Tensor

STEP = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.complex64: 2e-5, torch.complex128: 1e-9}
"""Largest error of a tensor after one step, relative to its largest change in that step (of what has no value before: to its largest value)."""

ROUNDING = 8.0
"""Besides, this many units in the last place of the tensor's largest value."""

NOISE = 8.0
"""Where that is exceeded: accepted up to this many times what a change of the inputs by one unit in the last place does to PyTorch's own values."""


def coarsest(dtypes: "list[torch.dtype]") -> torch.dtype:
    """The dtype with the largest tolerance."""
    return max(dtypes, key=lambda dtype: STEP.get(dtype, 0.0))


def widened(tensor: Tensor) -> Tensor:
    """In the dtype in which differences are taken."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest(tensor: Tensor) -> float:
    """The largest finite absolute value; 0 of an empty tensor."""
    finite = tensor[torch.isfinite(tensor)] if tensor.dim() else tensor[None][torch.isfinite(tensor)[None]]
    return finite.abs().max().item() if finite.numel() else 0.0
