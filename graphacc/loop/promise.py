"""Promises: tensors that stand for values which a compiled program has yet to compute.

A torch function on a promise is recorded on its tape and gives new promises, with shapes and dtypes from fake tensors.
A function that needs the value itself (``item``, ``print``, ``bool``) makes the engine run what is needed.
"""

import typing
import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from graphacc.errors import LoopError
from graphacc.loop import managed

if typing.TYPE_CHECKING:
    from graphacc.loop.tape import Tape

_READS_VALUE = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__repr__,
        Tensor.__format__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__bool__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.__reduce_ex__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.untyped_storage,
        Tensor.data_ptr,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)


class Promise(Tensor):
    """A tensor whose value a tape holds, or will hold once a program has run."""

    tape: "Tape"
    index: int

    @staticmethod
    def __new__(cls, tape: "Tape", index: int):
        fake = tape.values[index]
        self = Tensor._make_wrapper_subclass(cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device)
        self.tape = tape
        self.index = index
        tape.promises[index] = weakref.ref(self)
        return self

    def __init__(self, tape: "Tape", index: int):
        super().__init__()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return run_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _to_values(args, kwargs or {})
        return func(*args, **kwargs)


def run_function(func, args: tuple, kwargs: dict):
    """Run a torch function some of whose arguments are promises or managed tensors: record it, or run it on values."""
    leaves = pytree.tree_leaves((args, kwargs))
    tape = open_tape(leaves)
    if tape is None:
        return _run_on_values(func, args, kwargs)
    if func is Tensor.backward:
        return tape.backward(*args, **kwargs)
    if func in _READS_VALUE:
        return _run_on_values(func, args, kwargs)
    try:
        return tape.record(func, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        result = _run_on_values(func, args, kwargs)
        if not (torch.is_grad_enabled() and any(map(_takes_gradient, leaves))):
            return result
        return pytree.tree_map_only(Tensor, lambda value: _without_way_back(value, getattr(func, "__name__", "a function")), result)


def _takes_gradient(leaf) -> bool:
    if isinstance(leaf, Promise):
        return not leaf.tape.closed and leaf.tape.values[leaf.index].requires_grad
    return managed.handle_of(leaf) is not None and leaf.requires_grad


def _without_way_back(value: Tensor, function: str) -> Tensor:
    """The same values, for logging; a loss that is made of them is an error, since its gradient would be lost."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return _NoWayBack.apply(value.detach().requires_grad_(), function)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, function: str) -> Tensor:
        ctx.function = function
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise LoopError(
            f"backward(): the loss was computed with {ctx.function}, whose result or its shape depends on the values of a tensor (x[mask], nonzero, "
            "lengths), so it is no part of a compiled step. Keep every shape fixed: cross_entropy's ignore_index, "
            "torch.where(mask, x, 0), or a sum over x * mask divided by mask.sum()"
        )


def open_tape(leaves: list) -> "Tape | None":
    """The tape that a function on these leaves is to be recorded on, if there is one."""
    tapes = {id(leaf.tape): leaf.tape for leaf in leaves if isinstance(leaf, Promise) and not leaf.tape.closed}
    if len(tapes) > 1:
        raise LoopError(
            "an operation mixes results of two model calls that were recorded separately (a backward ran in between): "
            "read one of them first (.item() or .detach().clone().numpy()), or combine the losses before backward()"
        )
    if tapes:
        return next(iter(tapes.values()))
    if not torch.is_grad_enabled():
        return None
    for leaf in leaves:
        handle = managed.handle_of(leaf)
        if handle is not None and handle.engine.records_parameters():
            return handle.engine.tape
    return None


def _run_on_values(func, args: tuple, kwargs: dict):
    managed.prepare(func, args, kwargs)
    args, kwargs = managed.plain_while_capturing(func, *_to_values(args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _to_values(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return pytree.tree_map_only(Promise, lambda promise: promise.tape.value(promise.index), (args, kwargs))
