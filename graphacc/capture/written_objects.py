"""What a call writes into the objects that it is given, such as a cache of keys and values, to which every layer of a model adds its own.

The state of an object is described part by part, each under its path of attributes, keys and indices: ``("layers", 3, "keys")``.
"""

import dataclasses
import enum
import typing
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

PLAIN = (int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)
"""Types of values that are equal where they compare equal; of other numbers the text tells (0.0 is not -0.0, NaN is itself)."""

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A part that has parts: an object, a list or a dict."""

    kind: type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A part that a call writes, and where the next layer's call writes its own."""

    argument: int  # leaf of the call's arguments
    path: Path
    step: tuple[int, ...]  # what the next layer's path has more, of every index in it

    def later(self, number: int) -> Path:
        """The path of the layer that is `number` layers further."""
        steps = iter(self.step)
        return tuple(key if isinstance(key, str) else key + number * next(steps) for key in self.path)


def state(value: object) -> dict[Path, object] | None:
    """Path -> part, holders before what they hold: a `Holder`, or the part itself. None: it has parts that are not understood."""
    try:
        return dict(_parts(value, (), set()))
    except _NotUnderstood:
        return None


def changed(before: Mapping[Path, object], after: Mapping[Path, object]) -> list[Path] | None:
    """The parts that are new or others; None: some are gone."""
    if not before.keys() <= after.keys():
        return None
    return [path for path, part in after.items() if path not in before or not _is_same(before[path], part)]


def step_between(path: Path, following: Path) -> tuple[int, ...] | None:
    """The differences of two paths' indices; None: they differ otherwise."""
    if len(path) != len(following) or any(a != b and not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(path, following)):
        return None
    return tuple(b - a for a, b in zip(path, following) if isinstance(a, int) and isinstance(b, int))


def write_as(value: object, written: Written, number: int) -> None:
    """Write into an object what the layer that is `number` layers further writes, as the layer of `written` has written it.

    Raises:
        LookupError: the object has no such parts.
    """
    *holders, last = typing.cast("tuple[typing.Any, ...]", written.later(number))
    target: typing.Any = value
    for key in holders:
        target = _part(target, key)
    part: typing.Any = value
    for key in written.path:
        part = _part(part, key)
    if isinstance(part, (list, dict)):
        part = type(part)()
    elif _is_object(part):
        part = object.__new__(type(part))  # its attributes are written next
    if isinstance(target, list) and last == len(target):
        target.append(part)
    elif isinstance(target, (list, dict)):
        target[last] = part
    else:
        vars(target)[last] = part


class _NotUnderstood(Exception):
    pass


def _parts(value: typing.Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, object]]:
    if isinstance(value, (Tensor, type, float, complex, *PLAIN)):
        yield path, value
        return
    if id(value) in seen:
        raise _NotUnderstood  # one object in two places
    seen.add(id(value))
    if type(value) is list:
        items = enumerate(value)
    elif type(value) is dict and all(type(key) in (str, int) for key in value):
        items = value.items()
    elif _is_object(value):
        items = vars(value).items()
    else:
        raise _NotUnderstood
    yield path, Holder(type(value))
    for key, part in items:
        yield from _parts(part, (*path, key), seen)


def _part(holder: typing.Any, key: typing.Any) -> object:
    return holder[key] if isinstance(holder, (list, dict)) else vars(holder)[key]


def _is_object(value: object) -> bool:
    """Whether a value is what its attributes are."""
    if isinstance(value, (Tensor, nn.Module, type, float, complex, *PLAIN)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    classes = type(value).__mro__
    return all(vars(cls).get("__slots__", ()) == () for cls in classes) and type(value).__new__ is object.__new__ and not hasattr(value, "__next__")


def _is_same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return one is other or (isinstance(one, (Holder, *PLAIN)) and one == other)
