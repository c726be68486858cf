"""Numbers that a model is given, or that its modules hold, and that change, while code that reads them is captured: ``self.steps += 1``, ``model(x, step)``.

What the code makes of such a number without tensors, Python computes again at every call. Where the result meets a tensor, it is an input of the program. What
the code decides by it (``if self.steps < 100``, ``min(1.0, self.steps / 100)``) is decided again, too: other outcomes ask for another program.
"""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import patched
from graphacc.capture.diagnose import Passing
from graphacc.errors import CaptureError

MAX_DECISIONS = 16
"""Comparisons of numbers in one model; with more of them, numbers are constants."""
MAX_COMPUTED = 128
"""Numbers that are computed of others, in one model, and meet tensors; with more of them, they are constants."""

Values = Mapping[str, int | float]
"""The present numbers, by label."""


class NeedsNumber(Passing):
    """Code needs the value of a number: it has to be a constant of the program."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """Of the present numbers."""

    labels: frozenset[str]  # of those that it reads
    of: Callable[[Values], Any]

    def __call__(self, values: Values) -> Any:
        """None without a number, or where it cannot be computed."""
        try:
            return self.of(values) if self.labels <= values.keys() else None
        except (ArithmeticError, ValueError):
            return None


class Asked:
    """What code has asked of numbers.

    Args:
        dtype: of floats that are inputs of a program.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.needed: set[str] = set()  # labels of those whose values it has needed, in this run
        self.has_new = False  # whether it has decided, or computed, what it had not before, in this run
        self.dtype = dtype
        self._decisions: dict[tuple, _Function] = {}
        self._computed: dict[object, tuple[str, _Function]] = {}
        self._tensors: Mapping[str, Tensor] = {}

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
            self._decisions[key] = _Function(labels, function)
            self.has_new = True

    def outcomes(self, values: Values) -> tuple[bool | None, ...]:
        """Of all decisions, where the labels have `values`; None without a number, or where it cannot be computed."""
        return tuple(function(values) for function in self._decisions.values())

    def computed(self, values: Values) -> dict[str, int | float]:
        """The numbers that are inputs because they are computed of those in `values`, by label."""
        found = {label: function(values) for label, function in self._computed.values()}
        return {label: value for label, value in found.items() if type(value) in (int, float)}

    def as_tensor(self, value: int | float) -> Tensor:
        """A number as an input of a program."""
        return torch.tensor(value, dtype=self.dtype if isinstance(value, float) else torch.int64)

    @contextlib.contextmanager
    def given(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, these stand for the numbers with these labels; numbers may be arguments of what makes tensors, and of functions of `math`."""
        before, self._tensors = self._tensors, tensors
        try:
            with patched(torch, **_MAKE_TENSORS), patched(math, **_MATH):
                yield
        finally:
            self._tensors = before

    def tensor(self, number: "Number") -> Tensor:
        """What stands for a number in a program."""
        label = number._key
        if not isinstance(label, str):
            if label not in self._computed:
                if len(self._computed) >= MAX_COMPUTED:
                    self.refuse(number._labels)
                self._computed[label] = f"{_COMPUTED}{len(self._computed)}", _Function(number._labels, number._of)
            label = self._computed[label][0]
        if label in number._tensors:
            return number._tensors[label]
        if number._tensors is not self._tensors:  # a backward reads it, by a hook or an autograd.Function
            held = [number._tensors.get(each) for each in number._labels]
            if not all(type(tensor) is Tensor for tensor in held):
                raise CaptureError(f"the backward computes with a number that changes ({', '.join(sorted(number._labels))}): pass it as a tensor, or compute with it in the forward")
            return self.as_tensor(number._of({each: tensor.item() for each, tensor in zip(number._labels, held) if tensor is not None}))
        self.has_new = True
        return torch.scalar_tensor(number._value, dtype=self.as_tensor(number._value).dtype)  # this run is not the last one


ARGUMENT, _COMPUTED = "argument ", "computed "
"""How the labels begin of numbers that are no attributes."""


def is_of_call(label: str) -> bool:
    """Whether a label is that of an argument, or of what is computed in a call."""
    return label.startswith((ARGUMENT, _COMPUTED))


class Number:
    """Stands for a number in the code of a model, which may add, multiply, compare and store it; what else needs its value fails.

    Args:
        value: an int or a float; what it is while the code is captured.
        of: computes it of the present values.
        key: equal for numbers that are computed in the same way; the label of one that is not computed.
        labels: of what it is computed of.
        asked: hears of decisions and refusals.
    """

    __slots__ = ("_asked", "_key", "_labels", "_of", "_tensors", "_value")

    def __init__(self, value: int | float, of: Callable[[Values], int | float], key: object, labels: frozenset[str], asked: Asked):
        self._value, self._of, self._key, self._labels, self._asked = value, of, key, labels, asked
        self._tensors = asked._tensors  # of the run in which it is made, for a backward behind it

    @classmethod
    def held(cls, label: str, value: int | float, asked: Asked) -> "Number":
        """The number that a module holds as the attribute `label`, or that is an argument of that name."""
        return cls(value_of(value), operator.itemgetter(label), label, frozenset({label}), asked)

    @property
    def __class__(self) -> type:
        return type(self._value)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or _promotes_otherwise(tensors, next(leaf for leaf in leaves if type(leaf) is Number)._asked):
            refuse_in(leaves)  # without a tensor it is a size (`torch.arange(n)`)
        halves = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _HALVES}
        if not halves:
            return func(*to_tensors(args), **to_tensors(kwargs or {}))
        if len(halves) > 1 or kwargs or func not in _ROUNDED_ONCE:  # a tensor without dims would be rounded before the operation
            refuse_in(leaves)
        args = pytree.tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype in _HALVES else leaf, args)
        return func(*to_tensors(args)).to(halves.pop())

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or function not in _UFUNCS:
            _refuse(self)
        return _computed(function, args)

    def __getattr__(self, name: str) -> Any:
        _refuse(self)


_HALVES = (torch.bfloat16, torch.float16)
_ROUNDED_ONCE = {getattr(Tensor, f"__{side}{name}__") for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow")}
_ROUNDED_ONCE |= {getattr(owner, name) for owner in (torch, Tensor) for name in ("add", "sub", "mul", "div", "pow", "true_divide")}
_ROUNDED_ONCE |= {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow}  # where a tensor leaves it to the number
_UFUNCS = {getattr(numpy, name) for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "square", "sin", "cos", "tan", "tanh", "abs", "power")}
_UFUNCS |= {getattr(numpy, name) for name in ("add", "subtract", "multiply", "divide", "floor_divide", "mod", "maximum", "minimum", "negative")}


def value_of(number: int | float) -> int | float:
    """What a number, of either kind, is while the code is captured."""
    return number._value if type(number) is Number else number


def label_of(number: Number) -> str | None:
    """The label of a number that is not computed."""
    return number._key if isinstance(number._key, str) else None


def function_of(number: Number) -> Callable[[Values], int | float]:
    """Computes a number of the present values."""
    return number._of


def to_tensors(tree: Any) -> Any:
    """Numbers in a tree as tensors."""
    return pytree.tree_map(lambda leaf: leaf._asked.tensor(leaf) if type(leaf) is Number else leaf, tree)


def refuse_in(tree: object) -> None:
    """Refuse numbers in a tree, where nobody would compute them again.

    Raises:
        NeedsNumber: it holds one.
    """
    for leaf in pytree.tree_leaves(tree):
        if type(leaf) is Number:
            _refuse(leaf)


def _promotes_otherwise(tensors: list[Tensor], asked: Asked) -> bool:
    """Whether a tensor without dims in the place of a number gives an operation on `tensors` another dtype, or less precision."""
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    if asked.dtype is not torch.float64 and not floating.isdisjoint((torch.float64, torch.complex128)):
        return True
    if asked.dtype is not torch.get_default_dtype() and not (asked.dtype is torch.float64 and torch.float64 in floating):
        return True
    return any(tensor.dim() == 0 and tensor.dtype not in (torch.int64, torch.bool, asked.dtype, *_HALVES) for tensor in tensors)


class _Term:
    """A function of numbers, of which at least one is a `Number`."""

    def __init__(self, function: Callable, operands: tuple):
        self._function, self._operands = function, operands
        self._numbers = [operand for operand in operands if type(operand) is Number]
        self.labels = frozenset().union(*(number._labels for number in self._numbers))
        self.key = function, *(each._key if type(each) is Number else (type(each), repr(each)) for each in operands)
        self.asked = self._numbers[0]._asked

    def with_each(self, of: Callable[[Number], Any]) -> Any:
        return self._function(*(of(each) if type(each) is Number else each for each in self._operands))

    @property
    def value(self) -> Any:
        return self.with_each(lambda number: number._value)

    def of(self, values: Values) -> Any:
        found = self.with_each(lambda number: number._of(values))
        return found.item() if isinstance(found, numpy.generic) else found


def _computed(function: Callable, operands: tuple) -> Any:
    """A number that is computed of others."""
    numbers = [operand for operand in operands if type(operand) is Number]
    if not all(type(other) in (int, float, bool, Number) for other in operands):
        _refuse(numbers[0])
    term = _Term(function, operands)
    value = term.value
    if type(value := value.item() if isinstance(value, numpy.generic) else value) not in (int, float):
        _refuse(numbers[0])
    made = Number(value, term.of, term.key, term.labels, term.asked)
    made._tensors = numbers[0]._tensors
    return made


def _arithmetic(function: Callable, reflected: bool = False) -> Callable:
    def compute(self: Number, *others: Any) -> Any:
        operands = (self, *others)[::-1] if reflected else (self, *others)
        if any(isinstance(other, Tensor) for other in others):
            return Number.__torch_function__(function, (), operands)
        return _computed(function, operands)

    return compute


def _comparison(function: Callable) -> Callable:
    def compare(self: Number, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return Number.__torch_function__(function, (), (self, *others))
        if not all(type(other) in (int, float, bool, Number) for other in others):
            return NotImplemented
        term = _Term(function, (self, *others))
        term.asked.decide(term.key, term.labels, term.of)
        return term.value

    return compare


def _of_math(function: Callable) -> Callable:
    """A function of `math` that takes a `Number`, too."""

    def compute(*args: Any) -> Any:
        return _computed(function, args) if any(type(arg) is Number for arg in args) else function(*args)

    return compute


def _making(function: Callable, *, fills: bool) -> Callable:
    """A function of torch that makes a tensor of numbers.

    Args:
        fills: it takes one number, behind a shape or a tensor.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        numbers = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Number]
        if not numbers:
            return function(*args, **kwargs)
        if len(args) != 1 + fills:
            _refuse(numbers[0])
        refuse_in((args[:-1], kwargs))
        *shape, content = args
        leaves, spec = pytree.tree_flatten(content)
        made = function(*shape, pytree.tree_unflatten([value_of(leaf) for leaf in leaves], spec), **kwargs)  # for its dtype
        if made.dtype is torch.float64 is not numbers[0]._asked.dtype:
            _refuse(numbers[0])
        with torch.no_grad():
            stacked = torch.stack([torch.as_tensor(leaf).to(made.dtype) for leaf in to_tensors(leaves)])
        found = stacked[0].expand(made.shape).clone() if fills else stacked.reshape(made.shape)
        return found.requires_grad_() if made.requires_grad else found

    return make


def _refuse(self: Number, *args: Any) -> Any:
    self._asked.refuse(self._labels)


_MATH = {name: _of_math(getattr(math, name)) for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "tanh", "pow", "fabs", "floor", "ceil")}
_MAKE_TENSORS = {name: _making(getattr(torch, name), fills=name.startswith("full")) for name in ("tensor", "as_tensor", "full", "full_like")}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))
setattr(Number, "__bool__", _comparison(operator.truth))  # noqa: B010
for _name, _function in (("round", round), ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)):
    setattr(Number, f"__{_name}__", _arithmetic(_function))
for _name in ("int", "float", "index", "complex", "divmod", "rdivmod", "hash", "str", "repr", "format"):
    setattr(Number, f"__{_name}__", _refuse)
for _name in ("and", "rand", "or", "ror", "xor", "rxor", "invert", "lshift", "rlshift", "rshift", "rrshift"):
    setattr(Number, f"__{_name}__", _refuse)
