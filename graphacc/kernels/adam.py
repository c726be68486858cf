"""The Python face of the host Adam kernels: ctypes structures as in `csrc/include/gacc.h`, and checked calls.

Callers vouch for the arrays: dense, on the host, of the stated length, alive during the call. ``graphacc.optim.CPUAdam``
is the caller that checks tensors.
"""

import ctypes
from collections.abc import Sequence

import torch

from graphacc.kernels import library

DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2}
"""What a gradient (not None) or a copy may be, and its number in the C ABI."""


class AdamGroup(ctypes.Structure):
    """The hyperparameters of one parameter group, as torch.optim.AdamW names them."""

    _fields_ = [
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("decoupled", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
    ]


class AdamTensor(ctypes.Structure):
    """The addresses of one parameter, its state, its gradient and (or None) the copy that receives its new values."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("max_exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("copy_dtype", ctypes.c_int32),
    ]


def adam_step(tensors: Sequence[AdamTensor], groups: Sequence[AdamGroup], *, threads: int, isa: str | None = None) -> None:
    """Update all tensors once, in one parallel pass over memory. The result does not depend on `threads` or `isa`.

    Args:
        tensors: parameters, with state; all are checked before any is written.
        groups: hyperparameters, which ``AdamTensor.group`` indexes.
        threads: at most this many threads work, the caller among them.
        isa: one of ``library.available_isas()``; the default is ``library.default_isa()``.

    Raises:
        ValueError: a null array, an unknown dtype, a step below 1, a beta outside [0, 1), threads outside [1, 1024].
    """
    tensor_array = (AdamTensor * len(tensors))(*tensors)
    group_array = (AdamGroup * len(groups))(*groups)
    counts = ctypes.c_int64(len(tensors)), ctypes.c_int64(len(groups))
    library.call("gacc_adam_step", tensor_array, counts[0], group_array, counts[1], _isa_number(isa), ctypes.c_int32(threads))


def traffic_probe(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    threads: int,
    isa: str | None = None,
) -> None:
    """For benchmarks: move what an fp32 Adam step moves (28 bytes per element), adding `grad` to the other three."""
    tensors = (param, exp_avg, exp_avg_sq, grad)
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != param.numel():
            raise ValueError("traffic_probe needs four contiguous float32 tensors of equal size")
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    numel = ctypes.c_int64(param.numel())
    library.call("gacc_traffic_probe", *pointers, numel, _isa_number(isa), ctypes.c_int32(threads))


def huge_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and strides of a host tensor, in huge pages where the system gives them."""
    result = torch.empty_like(tensor, memory_format=torch.preserve_format)
    size_bytes = result.numel() * result.element_size()
    library.call("gacc_advise_huge_pages", ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(size_bytes))
    return result.zero_()


def _isa_number(isa: str | None) -> ctypes.c_int32:
    available = library.available_isas()
    name = library.default_isa() if isa is None else isa
    if name not in available:
        raise ValueError(f"isa={name!r} is not available here; choose one of {list(available)}")
    return ctypes.c_int32(available[name])
