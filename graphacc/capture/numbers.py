"""Numbers that modules hold and that change, while code that reads them is captured: ``self.steps += 1``, a temperature that is lowered in every call.

Where such a number meets a tensor, it is an input of the program. What the code makes of it without tensors, Python computes again at every call. What it
decides by it (``if self.steps < 100``, ``min(1.0, self.steps / 100)``) is decided again, too: other outcomes ask for another program.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.capture.diagnose import Passing

MAX_DECISIONS = 16
"""Comparisons of numbers in one model; with more of them, numbers are constants."""

Values = Mapping[str, int | float]
"""The present numbers, by label."""


class NeedsNumber(Passing):
    """Code needs the value of a number: it has to be a constant of the program."""


class Asked:
    """What code has asked of numbers."""

    def __init__(self) -> None:
        self.needed: set[str] = set()  # labels of those whose values it has needed, in this run
        self.has_new = False  # whether it has decided what it had not before, in this run
        self._decisions: dict[tuple, tuple[frozenset[str], Callable[[Values], bool]]] = {}

    def refuse(self, labels: frozenset[str]) -> None:
        """Code needs the value of a number.

        Raises:
            NeedsNumber: always.
        """
        self.needed |= labels
        raise NeedsNumber(", ".join(sorted(labels)))

    def decide(self, key: tuple, labels: frozenset[str], function: Callable[[Values], bool]) -> None:
        """Code decides by a comparison."""
        if key not in self._decisions:
            if len(self._decisions) >= MAX_DECISIONS:
                self.refuse(labels)
            self._decisions[key] = labels, function
            self.has_new = True

    def outcomes(self, values: Values) -> tuple[bool | None, ...]:
        """Of all decisions, where the labels have `values`; None without a number, or where it cannot be computed."""
        found: list[bool | None] = []
        for labels, function in self._decisions.values():
            try:
                found.append(function(values) if labels <= values.keys() else None)
            except ArithmeticError:
                found.append(None)
        return tuple(found)


class Number:
    """Stands for a number in the code of a model, which may add, multiply, compare and store it; what else needs its value fails.

    Args:
        value: an int or a float; what it is while the code is captured.
        tensor: makes the tensor that stands for it in a program.
        of: computes it of the present values.
        key: equal for numbers that are computed in the same way.
        labels: of what it is computed of.
        asked: hears of decisions and refusals.
    """

    __slots__ = ("_asked", "_key", "_labels", "_of", "_tensor", "_value")

    def __init__(self, value: int | float, tensor: Callable[[], Tensor], of: Callable[[Values], int | float], key: object, labels: frozenset[str], asked: Asked):
        self._value, self._tensor, self._of, self._key, self._labels, self._asked = value, tensor, of, key, labels, asked

    @classmethod
    def held(cls, label: str, value: int | float, tensor: Tensor, asked: Asked) -> "Number":
        """The number that a module holds as the attribute `label`."""
        return cls(value_of(value), lambda: tensor, operator.itemgetter(label), label, frozenset({label}), asked)

    @property
    def __class__(self) -> type:
        return type(self._value)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*to_tensors(args), **to_tensors(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        _refuse(self)


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
            _refuse(leaf)


class _Term:
    """A function of numbers, of which at least one is a `Number`."""

    def __init__(self, function: Callable, operands: tuple):
        self._function, self._operands = function, operands
        self._numbers = [operand for operand in operands if type(operand) is Number]
        self.labels = frozenset().union(*(number._labels for number in self._numbers))
        self.key = function.__name__, *(each._key if type(each) is Number else (type(each), repr(each)) for each in operands)
        self.asked = self._numbers[0]._asked

    def with_each(self, of: Callable[[Number], Any]) -> Any:
        return self._function(*(of(each) if type(each) is Number else each for each in self._operands))

    @property
    def value(self) -> Any:
        return self.with_each(lambda number: number._value)

    def tensor(self) -> Tensor:
        return torch.as_tensor(self.with_each(lambda number: number._tensor()))

    def of(self, values: Values) -> Any:
        return self.with_each(lambda number: number._of(values))


def _arithmetic(function: Callable, reflected: bool = False) -> Callable:
    def compute(self: Number, *others: Any) -> Any:
        operands = (self, *others)[::-1] if reflected else (self, *others)
        if any(isinstance(other, Tensor) for other in others):
            return function(*to_tensors(operands))
        if not all(type(other) in (int, float, bool, Number) for other in others):
            _refuse(self)
        term = _Term(function, operands)
        if type(value := term.value) not in (int, float):
            _refuse(self)
        return Number(value, term.tensor, term.of, term.key, term.labels, term.asked)

    return compute


def _comparison(function: Callable) -> Callable:
    def compare(self: Number, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return function(*to_tensors((self, *others)))
        if not all(type(other) in (int, float, bool, Number) for other in others):
            return NotImplemented
        term = _Term(function, (self, *others))
        term.asked.decide(term.key, term.labels, term.of)
        return term.value

    return compare


def _refuse(self: Number, *args: Any) -> Any:
    self._asked.refuse(self._labels)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))
setattr(Number, "__bool__", _comparison(operator.truth))  # noqa: B010
for _name in ("int", "float", "index", "complex", "round", "trunc", "floor", "ceil", "divmod", "rdivmod", "hash", "str", "repr", "format"):
    setattr(Number, f"__{_name}__", _refuse)
for _name in ("and", "rand", "or", "ror", "xor", "rxor", "invert", "lshift", "rlshift", "rshift", "rrshift"):
    setattr(Number, f"__{_name}__", _refuse)
