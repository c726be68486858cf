"""Numbers that modules hold and that change, while code that reads them is captured: ``self.steps += 1``, a temperature that is lowered in every call.

Where such a number meets a tensor, it is an input of the program. What the code makes of it without tensors, Python computes again at every call.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.capture.diagnose import Passing

Values = Mapping[str, int | float]
"""The present numbers, by label."""


class NeedsNumber(Passing):
    """Code needs the value of a number: it has to be a constant of the program."""


class Number:
    """Stands for a number in the code of a model, which may add, multiply and store it; whatever needs its value fails.

    Args:
        value: an int or a float; what it is while the code is captured.
        tensor: makes the tensor that stands for it in a program.
        of: computes it of the present values.
        refuse: raises NeedsNumber.
    """

    __slots__ = ("_of", "_refuse", "_tensor", "_value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: int | float, tensor: Callable[[], Tensor], of: Callable[[Values], int | float], refuse: Callable[[], Any]):
        self._value, self._tensor, self._of, self._refuse = value, tensor, of, refuse

    @property
    def __class__(self) -> type:
        return type(self._value)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*to_tensors(args), **to_tensors(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        self._refuse()


def value_of(number: int | float) -> int | float:
    """What a number, of either kind, is while the code is captured."""
    return number._value if type(number) is Number else number


def function_of(number: Number) -> Callable[[Values], int | float]:
    """Computes a number of the present values."""
    return number._of


def to_tensors(tree: Any) -> Any:
    """Numbers in a tree as tensors."""
    return pytree.tree_map(lambda leaf: leaf._tensor() if type(leaf) is Number else leaf, tree)


def refuse_in(tree: object) -> None:
    """Refuse numbers in a tree, where nobody would compute them again.

    Raises:
        NeedsNumber: it holds one.
    """
    for leaf in pytree.tree_leaves(tree):
        if type(leaf) is Number:
            leaf._refuse()


def _arithmetic(function: Callable, reflected: bool = False) -> Callable:
    def compute(self: Number, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            operands = (self._tensor(), *others)
            return function(*operands[::-1] if reflected else operands)
        if not all(type(other) in (int, float, bool, Number) for other in others):
            self._refuse()

        def apply(to: Callable[[Any], Any]) -> Any:
            operands = [to(each) if type(each) is Number else each for each in (self, *others)]
            return function(*operands[::-1] if reflected else operands)

        value = apply(lambda each: each._value)
        if type(value) not in (int, float):
            self._refuse()
        return Number(
            value,
            lambda: torch.as_tensor(apply(lambda each: each._tensor())),
            lambda values: apply(lambda each: each._of(values)),
            lambda: [each._refuse() for each in (self, *others) if type(each) is Number],
        )

    return compute


def _refuse(self: Number, *args: Any) -> Any:
    self._refuse()


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("bool", "int", "float", "index", "complex", "round", "trunc", "floor", "ceil", "divmod", "rdivmod"):
    setattr(Number, f"__{_name}__", _refuse)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "str", "repr", "format", "and", "rand", "or", "ror", "xor", "rxor", "invert", "lshift", "rlshift", "rshift", "rrshift"):
    setattr(Number, f"__{_name}__", _refuse)
