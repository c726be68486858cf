"""What a forward may ask of a tensor besides its values, for which a program has another answer; such calls are left to PyTorch."""

import contextlib
import dataclasses
import sys
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from graphacc._compat.torch_ import patched
from graphacc.capture.borrow import attributes_of
from graphacc.capture.source import is_user_file
from graphacc.capture.own_code import is_own_file
from graphacc.capture.python_state import version_of
from graphacc.errors import LoopError, NeverCaptured
from graphacc.loop.managed import Handle, handle_of
from graphacc.loop.promise import NotRecorded, Promise

if typing.TYPE_CHECKING:
    from graphacc.loop.guards import Guards

_STRIDES = frozenset({"is_contiguous", "stride"})
_MEMORY = frozenset({"as_strided", "data_ptr", "storage_offset", "untyped_storage"})
"""Methods that tell of the memory around a tensor; in a program each has memory of its own, and is contiguous."""
_TOLD: dict[str, Callable[[Tensor], bool]] = {
    **dict.fromkeys(("grad_fn", "is_leaf", "requires_grad"), lambda tensor: tensor.requires_grad),
    "_base": lambda tensor: tensor._is_view(),
    "grad": lambda tensor: tensor.is_leaf and tensor.grad is not None,
    "is_inference": lambda tensor: tensor.is_inference(),
    "is_shared": lambda tensor: tensor.is_shared(),
    "Parameter": lambda tensor: isinstance(tensor, nn.Parameter),
    "_version": lambda tensor: version_of(tensor) > 0,
}
"""Other names -> whether a tensor that the loop gives has another answer than a program's."""
_PLAIN_INSIDE = ("torchvision.", "monai.", "fastai.", "tensordict.")
"""Libraries with subclasses of Tensor whose operators are those of tensors; what they carry besides is for the loop."""


@dataclasses.dataclass(frozen=True)
class AskedOfTensors:
    """The words of the user's code that ask something of tensors.

    Args:
        words: all names and texts in the code.
    """

    strides: Set[str] = frozenset()
    memory: Set[str] = frozenset()
    others: Set[str] = frozenset()

    @classmethod
    def of(cls, words: set[str]) -> "AskedOfTensors":
        return cls(words & (_STRIDES | _MEMORY), words & _MEMORY, words & set(_TOLD))


@contextlib.contextmanager
def parameters_asked(absent: Callable[[str], None]) -> Iterator[None]:
    """What the user's code asks of the tensors that stand for parameters and buffers is seen; of lazy ones their gradients are not, see `check_gradients`.

    Args:
        absent: is called with the name of an attribute that a tensor does not have.

    Raises:
        NeverCaptured: it asks for the gradient of a parameter.
    """
    gradient, thread = typing.cast(typing.Any, Tensor.grad), threading.get_ident()

    def attribute(tensor: Tensor, name: str) -> object:
        if not name.startswith("__") and threading.get_ident() == thread and is_own_file(sys._getframe(1).f_code.co_filename):
            absent(name)
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")

    def grad(tensor: Tensor) -> Tensor | None:
        if "_is_param" in vars(tensor) and is_user_file(sys._getframe(1).f_code.co_filename):
            raise NeverCaptured("the forward reads .grad of a parameter, which a program has only when its backward has run: read it in the loop, and pass in what follows from it")
        return gradient.__get__(tensor)

    with patched(Tensor, __getattr__=attribute), patched(FakeTensor, grad=property(grad, gradient.__set__, gradient.__delete__)):
        yield


def check_given(leaves: Sequence, guards: "Guards") -> None:
    """What the loop gives is seen by its values alone.

    Raises:
        NotRecorded: the code may ask a tensor for something else: an attribute that the loop has given it, its layout in memory, which is no usual one, what autograd keeps
            of it, its class, or whether it is one that the code holds itself; or the code may ask for inference mode, which is on.
        LoopError: a tensor has operators of its own.
    """
    if "is_inference_mode_enabled" in guards.words and torch.is_inference_mode_enabled():
        raise NotRecorded("its code may ask for torch.is_inference_mode_enabled(), and programs do not run in that mode")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not isinstance(leaf, Promise) and handle_of(leaf) is None:
            if type(leaf) is not Tensor:
                _check_class(leaf)
            if guards.is_constant(leaf):
                raise NotRecorded(f"a tensor that the loop gives, of shape {list(leaf.shape)}, is one that the model's code has in a variable, and it may ask whether it is")
            if vars(leaf) and (names := attributes_of(leaf).keys() & guards.words):
                raise NotRecorded(f"a tensor that the loop gives has an attribute {min(names)!r}, which the model's code may read")
            asked = guards.asked_of_tensors
            if names := [word for word in asked.others if _TOLD[word](leaf)]:
                raise NotRecorded(f"its code may ask for {min(names)} of a tensor that the loop gives, of shape {list(leaf.shape)}, for which a program has another answer")
            if asked.strides and (not leaf.is_contiguous() or (asked.memory and leaf.untyped_storage().nbytes() != leaf.numel() * leaf.itemsize)):
                raise NotRecorded(f"its code may ask for {min(asked.strides)}() of a tensor of shape {list(leaf.shape)}, which has strides {leaf.stride()} from {leaf.storage_offset()} on")


def _check_class(tensor: Tensor) -> None:
    kind = type(tensor)
    if issubclass(kind, nn.Parameter) or kind.__module__.startswith(_PLAIN_INSIDE):
        return
    if any("__torch_function__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(Tensor)]):
        raise LoopError(
            f"a tensor that the loop gives, of shape {list(tensor.shape)}, is a {kind.__name__}, whose __torch_function__ the model's parameters do not reach: pass its "
            ".as_subclass(torch.Tensor)"
        )
    raise NotRecorded(f"a tensor that the loop gives is a {kind.__name__}, which a program does not have: pass its .as_subclass(torch.Tensor)")


def check_gradients(handles: Iterable[Handle], guards: "Guards") -> None:
    """Code that lazy tensors follow finds no gradients of parameters.

    Raises:
        NotRecorded: there are some, and it may ask for them.
    """
    if "grad" in guards.words and (names := [handle.name for handle in handles if handle.has_grad]):
        raise NotRecorded(f"its code may ask for .grad, which {names[0]} has, and a program has only when its backward has run")


def check_returned(result: object, guards: "Guards") -> None:
    """What the model returns is made by the call, for a program makes it anew.

    Raises:
        NotRecorded: it has a list, a dict or a tensor in it that the model's code keeps, into which the loop may write.
    """
    inside = [result]
    while inside:
        found = inside.pop()
        if isinstance(found, Tensor):
            if guards.is_constant(found):
                raise NotRecorded(f"it returns a tensor of shape {list(found.shape)} that its code has in a variable: return a .clone() of it")
        elif isinstance(found, (list, tuple, dict)):
            if guards.holds(found):
                raise NotRecorded(f"it returns a {type(found).__name__} that its code has in a variable: return a copy of it")
            inside += found.values() if isinstance(found, dict) else found
