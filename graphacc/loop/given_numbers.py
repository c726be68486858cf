"""Numbers among the arguments of recorded calls that change from call to call: ``model(x, step)``, ``model(x, beta=0.1 * epoch)``.

In a call of the model each is a `Given`, and its value is an input of the program, as that of a number which a module holds (`graphacc.capture.numbers`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from graphacc.capture.numbers import ARGUMENT, Asked, Number, label_of
from graphacc.loop import trees

MAX_VALUES = 16
"""Calls in a row, each with a new value of an argument that is a constant of a program, and tensors of the same shapes."""
MAX_NUMBERS = 64
"""Numbers among the arguments of one call; where there are more, they are constants."""
PER_VALUE = (
    "the number {} has another value at every call, the code needs the value itself, and each would need a program of its own "
    f"({MAX_VALUES} were compiled): use it in arithmetic and comparisons alone, or pass it as a tensor"
)

Where = tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Given:
    """Stands for a number in the arguments of a recorded call."""

    label: str
    value: int | float = dataclasses.field(compare=False)  # when it was recorded


class Streaks:
    """Numbers that are constants of programs, and have a new value at every call."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Hashable, Hashable], set[Hashable], int]] = {}  # of a number: what its call had last, its values, and how many calls in a row had another one

    def note(self, key: Hashable, value: Hashable, form: Hashable = None) -> bool:
        """Whether too many calls in a row, up to this one, have had another value, and nothing else that asks for a program.

        Args:
            form: of what the call has besides.
        """
        last, values, length = self._known.get(key, ((value, form), set(), 0))
        length = length + 1 if last[0] != value and last[1] == form else 0
        if len(values) <= MAX_VALUES:
            values.add(value)
        self._known[key] = (value, form), values, length
        return length > MAX_VALUES and len(values) > MAX_VALUES


class GivenNumbers:
    """What the loop gives to one model and its submodules.

    Args:
        asked: hears what code asks of the numbers.
    """

    def __init__(self, asked: Asked):
        self.labels: set[str] = set()  # of those that are, or were, inputs
        self._asked = asked
        self._last: dict[str, dict[Where, int | float]] = {}  # path of the called module -> each of its numbers in the last call that had one there
        self._inputs: dict[tuple[str, Where], str] = {}
        self._fixed: set[str] = set()  # labels of numbers that Python's own code needs
        self._streaks = Streaks()
        self.too_many: dict[tuple[str, bool], str] = {}  # (path, whether with gradients) -> why such calls are left to PyTorch

    def note(self, path: str, args: tuple, kwargs: dict) -> dict[str, int | float]:
        """Compare a call with the last one of the same module.

        Returns:
            The numbers that are inputs, by label.
        """
        if _LOOKED_INTO.isdisjoint(map(type, args)) and _LOOKED_INTO.isdisjoint(map(type, kwargs.values())):
            return {}
        present = dict(itertools.islice(_numbers((args, kwargs), ()), MAX_NUMBERS + 1))
        if not present:
            return {}
        called = path, torch.is_grad_enabled()
        if len(present) > MAX_NUMBERS:  # such as lists of words
            if self._streaks.note(called, tuple(value for _, value in _numbers((args, kwargs), ())), _form(args, kwargs)):
                self.too_many[called] = PER_VALUE.format("of the arguments (one of many)")
            return {}
        last = self._last.setdefault(path, {})
        changed = [where for where, value in present.items() if type(before := last.get(where)) is type(value) and before != value]
        if len(last) > 4 * MAX_NUMBERS:  # such as those of a dict that has other names in every call
            last.clear()
        last.update(present)
        for where in changed:
            if (label := _label(path, where)) not in self._fixed:
                self._inputs[path, where] = label
                self.labels.add(label)
        if not self._fixed.isdisjoint(labels := {_label(path, where): value for where, value in present.items()}):
            form = _form(args, kwargs)
            if many := [label for label in self._fixed & labels.keys() if self._streaks.note((*called, label), labels[label], form)]:
                self.too_many[called] = PER_VALUE.format(min(many))
        return {label: value for where, value in present.items() if (label := self._inputs.get((path, where))) is not None}

    def fix(self, labels: Iterable[str]) -> None:
        """These numbers cannot be inputs: every value of them needs a program of its own."""
        self._fixed |= set(labels)
        self._inputs = {key: label for key, label in self._inputs.items() if label not in self._fixed}

    def lift(self, path: str, args: tuple, kwargs: dict) -> tuple[tuple[tuple, dict], dict[str, int | float]]:
        """The arguments with a `Given` for each number that is an input, and those numbers by label."""
        values: dict[str, int | float] = {}
        if not any(known == path for known, _ in self._inputs) or sum(1 for _ in itertools.islice(_numbers((args, kwargs), ()), MAX_NUMBERS + 1)) > MAX_NUMBERS:
            return (args, kwargs), values

        def found(where: Where, value: int | float) -> object:
            label = self._inputs.get((path, where))
            if label is None:
                return value
            values[label] = value
            return Given(label, value)

        return _mapped((args, kwargs), (), found), values


def as_numbers(args: tuple, kwargs: dict, asked: Asked) -> tuple[tuple, dict]:
    """What the code of the model is given: a `Number` for every `Given`."""
    return trees.map_only(Given, lambda given: Number.held(given.label, given.value, asked), (args, kwargs))


def given_back(tree: Any, values: Mapping[str, int | float] | None = None) -> Any:
    """Arguments as the model's code has left them: a `Given`, or its value, for every `Number` that is an argument itself."""

    def back(number: Number) -> object:
        label = label_of(number)
        if label is None or not label.startswith(ARGUMENT):
            return number
        return Given(label, number._value)

    tree = trees.map_only(Number, back, tree)
    return tree if values is None else trees.map_only(Given, lambda given: values[given.label], tree)


def _label(path: str, where: Where) -> str:
    """The argument number 1 is "argument 1", that of the name beta in a dict that is the argument `config` is "argument config['beta']"."""
    shown = f"{ARGUMENT}{where[1]}" + "".join(f"[{part!r}]" for part in where[2:])
    return f"{shown} of {path}" if path else shown


def _form(args: tuple, kwargs: dict) -> Hashable:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _numbers(node: object, where: Where) -> Iterator[tuple[Where, int | float]]:
    """The ints and floats in tuples, lists and dicts."""
    kind = type(node)
    if kind is tuple or kind is list:
        for index, child in enumerate(node):  # type: ignore[arg-type, var-annotated]
            if type(child) in _LOOKED_INTO:
                yield from _numbers(child, (*where, index))
    elif kind is dict:
        for key, child in node.items():  # type: ignore[attr-defined]
            if type(child) in _LOOKED_INTO:
                yield from _numbers(child, (*where, key))
    elif kind in _NUMBERS:
        yield where, node  # type: ignore[misc]


_NUMBERS = {int, float, numpy.float64}
_LOOKED_INTO = {tuple, list, dict, *_NUMBERS}


def _mapped(node: Any, where: Where, function: Callable[[Where, int | float], object]) -> Any:
    kind = type(node)
    if kind is tuple or kind is list:
        return kind(_mapped(child, (*where, index), function) for index, child in enumerate(node))
    if kind is dict:
        return {key: _mapped(child, (*where, key), function) for key, child in node.items()}
    return function(where, node) if kind in _NUMBERS else node
