"""Calls of the model's code that are recorded as others.

- ``x.cpu()`` and ``x.to("cpu")`` keep the tensor: the step has one device, whatever its name.
- ``F.dropout`` becomes ``torch.native_dropout``, as in the FX capture, which gives it the same random numbers.
- Products of batches with several batch dims, such as [B, H, T, D] with [B, H, D, S], become ``torch.einsum``. ``torch.matmul``
  merges the batch dims before its operator is recorded; XLA's partitioner cannot follow that where two of them are split (the batch over
  dp, the heads over tp) and gathers the tensors. ``torch.einsum`` is recorded as one HLO product with several batch dims.
- ``torch.inverse`` becomes ``torch.linalg.inv``: torch_xla's own checks nothing.
- ``torch.einsum`` of complex tensors becomes the products of matrices that torch makes of it: torch_xla's own conjugates nothing in backward.

What the model does under ``torch.autocast`` for the CPU or CUDA is refused.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphacc.capture.diagnose import AutocastIgnored
from graphacc.capture.lazy.xla import DEVICE
from graphacc.errors import CaptureError

_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})
_EINSUMS = frozenset({torch.einsum, torch.ops.aten.einsum, torch.ops.aten.einsum.default})
_BATCH_DIMS = "abcdefgh"
_INVERSES = frozenset({torch.inverse, Tensor.inverse})
_STRIDED = frozenset({torch.as_strided, Tensor.as_strided, Tensor.as_strided_, torch.as_strided_scatter})
_NO_STRIDES = (
    "as_strided depends on how a tensor lies in memory, which lazy tensors do not know (all are contiguous to them): write the view with "
    'unfold, slices, expand or index_select, or choose capture="fx"'
)
_ADDRESSES = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage})
_NO_ADDRESS = "the code asks where a tensor lies in memory (data_ptr, storage), which lazy tensors do not know: compare tensors with `is`, or by their values"


class Rewrites(TorchFunctionMode):
    """Records some calls as others."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _check_autocast()
        if func is Tensor.cpu and _is_lazy(args[0]):
            return args[0]
        if func is Tensor.to and _is_lazy(args[0]):
            args, kwargs = _kept(args[0], args), {name: _kept(args[0], value) for name, value in kwargs.items()}
        if func is F.dropout and _drops(*args, **kwargs):
            return _dropout(*args, **kwargs)
        if func in _INVERSES:
            func = torch.linalg.inv
        refused = _NO_STRIDES if func in _STRIDED else _NO_ADDRESS if func in _ADDRESSES else None
        if refused is not None and _is_lazy(args[0]):
            raise CaptureError(refused)
        if func in _PRODUCTS and not kwargs and _has_batch_dims(*args):
            batch = _BATCH_DIMS[: args[0].dim() - 2]
            return torch.einsum(f"{batch}xy,{batch}yz->{batch}xz", *args)
        if func in _EINSUMS and any(map(_is_complex, pytree.tree_leaves(args))):
            return _by_matrices(args)
        return func(*args, **kwargs)


def _check_autocast() -> None:
    if device := next((device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)), None):
        raise AutocastIgnored(f"torch.autocast({device!r})")


def _drops(input: object, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return _is_lazy(input) and training and not inplace and 0.0 < p < 1.0


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0]


def _is_lazy(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == DEVICE


def _is_complex(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_complex()


def _kept(x: Tensor, argument: object) -> object:
    """An argument of ``x.to``, with x's own device in the place of another."""
    if isinstance(argument, tuple):
        return tuple(_kept(x, each) for each in argument)
    return x.device if argument == "cpu" or isinstance(argument, torch.device) else argument


def _has_batch_dims(x: object, y: object) -> bool:
    """Whether both are lazy tensors of one real dtype with the same two or more batch dims."""
    if not (_is_lazy(x) and _is_lazy(y)) or not 4 <= x.dim() <= len(_BATCH_DIMS) + 2:
        return False
    return x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2] and x.dtype == y.dtype and not _is_complex(x)


def _by_matrices(arguments: object) -> Tensor:
    """What torch itself makes of ``torch.einsum`` where a device has no form of its own."""
    equation, *operands = pytree.tree_leaves(arguments)  # one by one or as a list
    with torch._C.DisableTorchFunction():  # a mode would call the operator itself
        return torch.ops.aten.einsum.default.decompose(equation, operands)
