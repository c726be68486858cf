"""Places of Python state: names in a dict, an object, a class or a function, whether they still have the values that were read, and giving those back."""

import contextlib
import dataclasses
import itertools
import operator
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from graphacc.capture.python_state import CONTAINERS, MUTABLE, NAMESPACES, Same, contents_of, is_fixed, snapshot
from graphacc.errors import LoopError

MISSING = object()


class _Sorted(typing.NamedTuple):
    values: tuple
    """In the order of the names."""
    empty: list
    """Containers among them that are empty: most are a module's tables of hooks."""
    mutable: list[str]
    """Names of the others that can change in place."""


class Place:
    """Names in one dict (of a module, an object, or of global variables) whose values were read."""

    def __init__(self, owner: object, table: Mapping[str, object], label: str):
        self.owner = owner  # kept alive
        self.table = table
        self.label = label
        self.names: dict[str, Hashable] = {}  # name -> snapshot of its value when it was read last
        self.inputs: set[str] = set()  # names whose tensors are inputs of the program
        self._found: dict[str, object] = {}  # name -> value when it was read last; another one may be there by now
        self._sorted: _Sorted | None = None  # the same; None until it is asked for
        self._held: Held | None = None
        self._inside: dict[str, dict[Path, str]] = {}  # name of a container -> numbers in it that are inputs, and their labels

    def note(self, name: str, value: object) -> None:
        """Guard a name, which has `value` now (`MISSING`: none)."""
        if name not in self.names:
            self.names[name] = self.snapshot(name, value)
            self._found[name] = self.table.get(name, MISSING)
            self._sorted = self._held = None

    def drop(self, name: str) -> None:
        if self.names.pop(name, None) is not None:
            del self._found[name]
            self._sorted = self._held = None

    def take_as_input(self, name: str) -> None:
        """Whatever tensor the name has is an input of the program: another one is no change."""
        self.inputs.add(name)
        if name in self.names:
            self._found[name] = self.table.get(name, MISSING)
            self.names[name] = self.snapshot(name, self._found[name])
            self._sorted = self._held = None

    def take_number(self, name: str, path: "Path", label: str) -> None:
        """A number in the container that the name has is an input of the program."""
        self._inside.setdefault(name, {})[path] = label
        self.names[name] = self.snapshot(name, self.table.get(name, MISSING))

    def numbers_inside(self) -> Iterator[tuple[str, tuple[Any, Any] | None]]:
        """Label of every number in a container that is an input, and the dict or namespace that holds it now, with the name in it; None if it is gone."""
        for name, inside in self._inside.items():
            for path, label in inside.items():
                yield label, _at(self.table.get(name, MISSING), path)

    def give_up_number(self, label: str) -> None:
        """It is none any more."""
        for name, inside in self._inside.items():
            if label in inside.values():
                self._inside[name] = {path: other for path, other in inside.items() if other != label}
                self.names[name] = self.snapshot(name, self.table.get(name, MISSING))

    def snapshot(self, name: str, value: object) -> Hashable:
        if name in self.inputs and isinstance(value, Tensor):
            return "input"
        found = snapshot(value)
        for path in self._inside.get(name, ()):
            found = _without(found, path)
        return found

    def _sort(self) -> "_Sorted":
        if self._sorted is None:
            values = tuple(self._found.values())
            mutable = [(name, value) for name, value in zip(self.names, values) if isinstance(value, MUTABLE) and not is_fixed(value)]
            empty = {name for name, value in mutable if isinstance(value, CONTAINERS) and not value and self.names[name] == self.snapshot(name, value)}
            self._sorted = _Sorted(values, [value for name, value in mutable if name in empty], [name for name, _ in mutable if name not in empty])
        return self._sorted

    @property
    def held(self) -> "Held":
        """Its names as they were read last."""
        if self._held is None:
            values = self._sort().values
            self._held = Held(self, dict(self.names), values, tuple(contents_of(values)))
        return self._held

    def put(self, name: str, value: object) -> None:
        """Give a name another value, or none (`MISSING`)."""
        table = typing.cast("dict[str, object]", self.table)
        if isinstance(self.table, types.MappingProxyType):
            setattr(self.owner, name, value) if value is not MISSING else delattr(self.owner, name)
        elif value is MISSING:
            table.pop(name, None)
        else:
            table[name] = value

    def is_as_read(self, name: str) -> bool:
        """Whether a value that can change in place is equal to the one that was read."""
        return self.snapshot(name, self.table[name]) == self.names[name]

    def changes(self) -> list[tuple[str, Hashable, Hashable]]:
        """(name, snapshot then, snapshot now) of what is different; the guards are on the present values from now on."""
        self._found = {name: self.table.get(name, MISSING) for name in self.names}
        now = {name: self.snapshot(name, value) for name, value in self._found.items()}
        found = [(name, before, now[name]) for name, before in self.names.items() if now[name] != before]
        self.names = now
        self._sorted = self._held = None
        return found


class Unchanged:
    """Whether the values of all names of many places are those that were read: a few calls in C for hundreds of modules."""

    def __init__(self) -> None:
        self._sorted: Sequence[_Sorted | None] = []  # of the places that were looked at last
        self._getters: list[Callable] = []
        self._names: list[str] = []
        self._values: list[object] = []
        self._empty: list[object] = []
        self._mutable: list[tuple[Place, str]] = []

    def __call__(self, places: Collection[Place]) -> bool:
        now = list(map(_SORTED, places))
        if len(now) != len(self._sorted) or None in now or not all(map(operator.is_, now, self._sorted)):
            self._look_at(places)
        if not all(map(operator.is_, map(_call, self._getters, self._names, itertools.repeat(MISSING)), self._values)):
            return False
        return not any(self._empty) and all(place.is_as_read(name) for place, name in self._mutable)

    def _look_at(self, places: Collection[Place]) -> None:
        self._sorted = found = [place._sort() for place in places]
        self._getters = [place.table.get for place in places for _ in place.names]
        self._names = [name for place in places for name in place.names]
        self._values = [value for each in found for value in each.values]
        self._empty = [container for each in found for container in each.empty]
        self._mutable = [(place, name) for place, each in zip(places, found, strict=True) for name in each.mutable]


_SORTED = operator.attrgetter("_sorted")

_call = typing.cast("Callable[..., object]", operator.call)


Path = tuple[int, ...]
"""Numbers of the items that lead from a container into those in it."""


def _at(value: Any, path: Path) -> tuple[Any, Any] | None:
    """The dict or namespace, and the name in it, to which a path leads."""
    for depth, place in enumerate(path):
        inner = vars(value) if isinstance(value, NAMESPACES) else value
        if not isinstance(inner, CONTAINERS) or place >= len(inner):
            return None
        if depth == len(path) - 1:
            return (value, list(inner)[place]) if isinstance(inner, dict) else None
        value = list(inner.values() if isinstance(inner, dict) else inner)[place]
    return None


def _without(found: Hashable, path: Path) -> Hashable:
    """The snapshot of a container without a number in it, if it has one there."""
    if not path:
        return "input" if kind_of(found) is not None or isinstance(found, Same) else found
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], tuple) and path[0] < len(found[2])):
        return found
    items = list(found[2])
    key, item = items[path[0]]
    items[path[0]] = key, _without(item, path[1:])
    return found[0], found[1], tuple(items)


def numbers_changed(value: object, before: Hashable, after: Hashable) -> list[tuple[Path, Any, Any]] | None:
    """What is different in a container, where that is numbers in dicts and namespaces alone.

    Args:
        before, after: two snapshots of it.

    Returns:
        Path, the dict or namespace, and the name in it, of each; None if something else is different.
    """
    if before == after:
        return []
    if not (isinstance(value, (*CONTAINERS, *NAMESPACES)) and isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after) == 3 and before[:2] == after[:2]):
        return None
    is_named = type(value) in (dict, *NAMESPACES)
    inner: Any = vars(value) if isinstance(value, NAMESPACES) else value
    children = list(inner.items()) if isinstance(inner, dict) else [(None, child) for child in inner]
    found = []
    for place, ((name, child), (key, item), (key_now, item_now)) in enumerate(zip(children, before[2], after[2], strict=True)):
        if key != key_now:
            return None
        if is_named and item != item_now and kind_of(item) is not None and kind_of(item) is kind_of(item_now):
            found.append(((place,), value, name))
        elif (inside := numbers_changed(child, item, item_now)) is None:
            return None
        else:
            found += [((place, *path), container, inner_name) for path, container, inner_name in inside]
    return found


def kind_of(found: Hashable) -> type | None:
    """Whether a snapshot is that of an int or of a float; None if of neither."""
    return found[0] if isinstance(found, tuple) and found and found[0] in (int, float) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """What the names of a place had when a call read them."""

    place: Place
    snapshots: dict[str, Hashable]
    values: tuple
    contents: tuple  # (container, copy) of what can be put back among the values, and in them

    def differences(self) -> list[tuple[Place, str, object, object]]:
        """(place, name, value then, value now) of what is not as it was.

        Raises:
            LoopError: a tensor, or what a container holds deep inside, was changed in place since, or what cannot be put back.
        """
        found = []
        for (name, before), value in zip(self.snapshots.items(), self.values):
            present = self.place.table.get(name, MISSING)
            if present is value and not isinstance(value, MUTABLE):
                continue
            if before not in (snapshot(value), self.place.snapshot(name, value)):
                raise LoopError(
                    f"{self.place.label}.{name}, which the model's forward reads, was changed in place between a call of the model and its backward(), and the "
                    "recorded call is compiled only then: change it before the call or after the step"
                )
            if before not in (snapshot(present), self.place.snapshot(name, present)):
                if isinstance(self.place.table, Answers):
                    raise LoopError(
                        f"{self.place.label}.{name}, which the model's forward reads, changed between a call of the model and its backward(), and the recorded call is "
                        "compiled only then: change it before the call or after the step"
                    )
                found.append((self.place, name, value, present))
        return found


class _Found(dict):
    """A dict whose values are looked up elsewhere, by `__getitem__`."""

    def __contains__(self, name: object) -> bool:
        return self.get(typing.cast("str", name), MISSING) is not MISSING

    def get(self, name: str, default: object = None) -> object:
        try:
            return self[name]
        except KeyError:
            return default


class Cells(_Found):
    """The variables that a function has from around it, as a dict."""

    def __init__(self, function: types.FunctionType):
        super().__init__()
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def __getitem__(self, name: str) -> object:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        self._cells[name].cell_contents = value


class Slots(_Found):
    """The attributes of an object that has slots, as a dict."""

    def __init__(self, owner: object):
        super().__init__()
        self._owner = owner

    def __getitem__(self, name: str) -> object:
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: object) -> None:
        object.__setattr__(self._owner, name, value)

    def pop(self, name: str, default: object = None) -> object:
        found = self.get(name, default)
        with contextlib.suppress(AttributeError):
            object.__delattr__(self._owner, name)
        return found


class Attributes(dict):
    """What Python itself keeps of an object, as a dict: its class, a function's code and defaults, the bases of a class."""

    def __init__(self, owner: object):
        super().__init__()
        self._owner = owner

    def get(self, name: str, default: object = None) -> object:
        return type(self._owner) if name == "__class__" else getattr(self._owner, name, default)

    def __getitem__(self, name: str) -> object:
        return self.get(name)

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self._owner, name, value)


class Itself(dict):
    """An object that is nobody's attribute, under a name of its own."""


class Answers(dict):
    """What functions without arguments answer, as a dict: an answer that equals the last one is that object. None of them can be set."""

    def __init__(self, **questions: Callable[[], object]):
        super().__init__()
        self.known = questions.keys()
        self._questions = questions
        self._last: dict[str, object] = {}

    def add(self, name: str, question: Callable[[], object]) -> None:
        self._questions.setdefault(name, question)

    def get(self, name: str, default: object = None) -> object:
        answer = self._questions[name]()
        last = self._last.get(name, MISSING)
        if type(answer) is type(last) and answer == last:
            return last
        self._last[name] = answer
        return answer

    def __getitem__(self, name: str) -> object:
        return self.get(name)
