"""One attribute of all parameters at once: what every step asks each of hundreds, gathered in C instead of by lines of Python for each.

Torch's own attributes of a parameter (``requires_grad``, ``grad``) are asked for without `Managed.__torch_function__`: under `DisableTorchFunctionSubclass`.
"""

import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

if typing.TYPE_CHECKING:
    from graphacc.loop.managed import Handle

_tensors = operator.attrgetter("tensor")
_grads = typing.cast("Callable[[Tensor], Tensor | None]", typing.cast(typing.Any, Tensor.grad).__get__)
_forms = operator.attrgetter("shape", "dtype", "requires_grad")
_flags = operator.attrgetter("requires_grad")
_counts = operator.attrgetter("tensor._version", "_refreshes", "writes")

Form = tuple[torch.Size, torch.dtype, bool]
"""Shape, dtype, and whether it requires a gradient."""


def are(values: Iterable, one: object) -> bool:
    """Whether all of them are one object."""
    return all(map(operator.is_, values, itertools.repeat(one)))


def same(one: Sequence, other: Sequence) -> bool:
    """Whether two sequences are of the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def host_grads(handles: "Iterable[Handle]") -> list[Tensor | None]:
    """`Handle.host_grad` of each."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_grads, map(_tensors, handles)))


def forms(handles: "Iterable[Handle]") -> list[Form]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_forms, map(_tensors, handles)))


def counts(handles: "Iterable[Handle]") -> list[tuple[int, int, int]]:
    """The parts of `Handle.version` of each: steps of the tensor's counter, those of them that were ours, and writes that it does not count."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_counts, handles))


def grad_modes(handles: "Iterable[Handle]") -> tuple:
    """Whether each requires a gradient; with its hooks, where it has some."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = list(map(_tensors, handles))
        if not any(map(operator.attrgetter("_backward_hooks"), tensors)) and not any(map(operator.attrgetter("_post_accumulate_grad_hooks"), tensors)):
            return tuple(map(_flags, tensors))
        return tuple(map(_grad_mode, tensors))


def _grad_mode(tensor: Tensor) -> object:
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return (tensor.requires_grad, *(tuple((held or {}).values()) for held in hooks)) if any(hooks) else tensor.requires_grad


def handles_of(tensors: Iterable[object]) -> "list[Handle | None]":
    """`handle_of` each, quickly: of tensors that are known to be managed, or were."""
    return list(map(getattr, tensors, itertools.repeat("_graphacc_handle"), itertools.repeat(None)))
