"""Guards: the Python state that a capture of the model has read, checked at every call, as torch.compile's guards are.

While the model runs on fake tensors, reads of attributes of its modules, and of other objects that they lead to, are noted; so are the
global and closed-over values that the functions use which are read there. A change of one of them asks for another capture. Numbers that
keep changing, and tensors that modules hold besides their parameters and buffers, become inputs of the program instead. What the forward
itself writes to its modules is written after every call; other side effects cannot be part of a program.
"""

import collections
import contextlib
import enum
import functools
import inspect
import logging
import os
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from graphacc._compat.torch_ import in_this_thread, patched
from graphacc.capture.borrow import attributes_of
from graphacc.capture.diagnose import Passing
from graphacc.capture.numbers import Asked, Number, Values, is_of_call, value_of
from graphacc.capture.own_code import asks_for_types, globals_of, is_library_object, is_own_file, is_own_module, is_user_class, names_of, texts_of
from graphacc.capture.python_state import CONSUMED, CONTAINERS, MUTABLE, NAMESPACES, PLAIN, VIEWS, contents_of, copy_of, is_library_class, kept_by_cache, leaves_of, owner_of, refill, snapshot
from graphacc.capture.shown_types import Shown, ShownTypes
from graphacc.errors import CaptureError, NeverCaptured
from graphacc.loop import told, trees
from graphacc.loop.mixed import Mixin
from graphacc.loop.outside import ENVIRONMENT, SETTINGS, files_noted, prints_said
from graphacc.loop.places import MISSING, Answers, Attributes, Cells, Held, Itself, Place, Slots, Unchanged, kind_of, numbers_changed
from graphacc.loop.written import TABLES

log = logging.getLogger("graphacc")

_CACHED = functools._lru_cache_wrapper
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_REFLECTION = {"vars", "dir", "getattr", "__dict__"}
_EVERY_NAME = "*"
_REGISTER = {"register_hook", "register_full_backward_hook", "register_full_backward_pre_hook", "register_prehook"}
MAX_REWRITTEN = 8
"""Changes of a variable's tensor, each of which is another capture."""
MAX_STREAK = 16
"""Calls in a row, each with a new value of what is a constant of a program."""
MAX_CHANGES = 64
"""Tokens of which it is known what had changed."""
_DEPTH = 16  # of functions that call functions
_INSIDE = 3  # of what containers and objects lead to
_SPECIAL = {f"__{name}__" for name in ("call", "getitem", "getattr", "get", "len", "bool", "iter", "contains", "enter", "exit", "eq", "lt", "float", "int", "index")}
_SPECIAL |= {f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "matmul", "truediv", "pow")}


class Guards:
    """What captures of one model have read.

    What a plain attribute of an object was changed to is kept, where `settles`: the next capture begins with it.

    Args:
        model: its modules' classes are looked into while `noting`, and are as they were before at other times.
    """

    settles = has_inputs = True
    refusal = "the forward, or a hook in it, changes {}, which a compiled program does not do again in every step: return what is to be kept, or register it as a buffer"

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors: dict[str, None] = {}  # "<module>.<attribute>" of tensors that are inputs of the model's program
        self.numbers: dict[str, type] = {}  # the same of numbers, and whether they are ints or floats
        self.asked = Asked(torch.float64 if any(p.dtype is torch.float64 for p in model.parameters()) else torch.float32)
        self.too_many: str | None = None  # why the model is left to PyTorch: a number with ever new values
        self._values_of: collections.defaultdict[str, set[Hashable]] = collections.defaultdict(set)  # label of a number that is a constant -> its different values
        self._streaks: dict[str, tuple[int, int]] = {}  # label -> when its value changed last, and how often in a row of calls
        self._num_checks = 0
        self._different: collections.defaultdict[str, set[Hashable]] = collections.defaultdict(set)  # label -> some of its different values
        self.types = ShownTypes()
        self.asks_for_types = False  # whether code that was followed asks for the type of something, which a number would not have
        self.fixed: set[str] = set()  # numbers that cannot be inputs, since Python's own code needs their values
        self._labels: dict[str, tuple[object, str]] = {}  # label -> the module, another object or the variables of a file, and the name in it
        self._inside: set[str] = set()  # labels of numbers in containers
        self._numbers_at: dict[tuple[int, str], str] = {}  # (id of that, name) -> label, of numbers
        self._places: dict[tuple[int, object], Place] = {}
        self._unchanged = Unchanged()
        self._functions: set[types.CodeType] = set()
        self._keys: dict[tuple, int] = {}
        self.changes: dict[int, list[str]] = {}  # token -> what had changed when it was given last
        self._token = 0
        self._watch: Callable = lambda owner: None
        self._files: list[str] = []  # that the code which was run has read
        self._outside: dict[int, tuple[nn.Module, str]] = {}  # modules that the forward reaches and that are no part of the model, and their names
        self._outside_before: dict[int, tuple[nn.Module, dict]] = {}  # the attributes of those that were met in this run, before
        self._words: set[str] = set()  # names and texts in the code that was followed, in this run,
        self.words: set[str] = set()  # and ever
        self.asked_of_tensors = told.AskedOfTensors()
        self._arguments: dict[object, list] = {}  # code -> functions that the loop has passed
        self._settled = 0  # plain attributes of objects that captures have changed
        self._rounds = 0  # of captures in a row that did
        everywhere = self._place(None, vars(torch.nn.modules.module), "torch.nn.modules.module")
        for name in [name for name in vars(torch.nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]:
            everywhere.note(name, vars(torch.nn.modules.module)[name])
        self._noted: list[tuple[Place | str, str, object, tuple]] = []  # (place, name, value, its containers and their copies), in this run
        self._caches: dict[int, tuple[Any, int]] = {}  # functions that keep their results, and how often they had none
        self.runs_backward = False  # whether code that was followed has a part that a backward runs
        self._differentiated: set[type] = set()  # subclasses of torch.autograd.Function that were followed
        self._methods: set[tuple[type, types.CodeType]] = set()  # of classes, that were followed
        self._touched: set[int] = set()  # ids of modules outside of the model that the code has found in this run
        self._newest: nn.Module | None = None  # of which the last run has found a tensor
        self._dicts: dict[int, tuple[dict, tuple, str]] = {}  # dicts of objects that were read as a whole, the names in them before, and whose they are
        self._attributes: dict[int, tuple[types.FunctionType | types.ModuleType, frozenset[str]]] = {}  # functions and files that were followed, and the names of their attributes before
        self._constants: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # tensors in variables, by their ids
        self._class_names: dict[type, set[str]] = {}  # of classes, that are guarded
        self._reached: dict[int, object] = {}  # objects of the user's that the code has found, in this run
        self._made: dict[int, object] = {}  # and those that it has made
        self._in_backward = False
        self._set_in_backward: list[str] = []  # attributes of modules
        self._rewritten: collections.Counter[str] = collections.Counter()  # how often a value was seen to change
        self._settling: dict[tuple[int, str], tuple[Place, str, object]] = {}  # (id of a place, name) -> (place, name, value) before these captures

    # ---- checking

    def token(self) -> tuple[int, list[str]]:
        """A number that is equal where all that was read is, and what changed since the last time."""
        self._num_checks += 1
        if self._inside:
            self._follow_containers()
        for label in [label for label, kind in self.numbers.items() if type(self._value(label)) is not kind]:
            self.fix(label)
        if self._unchanged(self._places.values()):
            return self._token, []
        changed = [(place, change) for place in list(self._places.values()) for change in place.changes()]
        if not changed:
            return self._token, []
        for place, (name, before, after) in changed:
            self._rewritten[f"{place.label}.{name}"] += 1
            kind = kind_of(after)
            if self.has_inputs and place.table is _table_of(place.owner) and kind is not None and kind is kind_of(before):
                label = self._label_of(place, name)
                if self._takes_number(label, place.owner, name, after):
                    place.drop(name)
            elif self.has_inputs and (numbers := numbers_changed(place.table.get(name), before, after)):
                for path, container, key in numbers:
                    label = self._numbers_at.get((id(container), key)) or self._label_inside(container, key, f"{place.label}.{name}")
                    if self._takes_number(label, container, key, after):
                        place.take_number(name, path, label)
            else:
                self._note_streak(f"{place.label}.{name}", after)
        key = (*self.numbers, None, *((id(place), *place.names.items()) for place in self._places.values()))
        self._token = self._keys.setdefault(key, len(self._keys) + 1)
        said = self.changes[self._token] = [f"{place.label}.{name}: {_text(before)} -> {_text(after)}" for place, (name, before, after) in changed]
        if len(self.changes) > MAX_CHANGES:
            self.changes.pop(next(iter(self.changes)))
        return self._token, said

    def _follow_containers(self) -> None:
        """The loop may put another dict into the place of one in which numbers are inputs (``self.config = {**self.config, "beta": 0.2}``)."""
        found: dict[str, list[tuple[Any, Any] | None]] = {}
        for place in self._places.values():
            for label, held in place.numbers_inside():
                found.setdefault(label, []).append(held)
        for label, places in found.items():
            if label not in self.numbers:
                continue
            owner, name = self._labels[label]
            first = places[0]
            if first is None or any(held is None or held[0] is not first[0] or held[1] != first[1] for held in places):
                self.fix(label)
            elif first[0] is not owner or first[1] != name:
                del self._numbers_at[id(owner), name]
                self._labels[label] = first
                self._numbers_at[id(first[0]), first[1]] = label

    def _takes_number(self, label: str, owner: object, name: str, found: Hashable) -> bool:
        """Whether a number that has changed becomes an input; if not, what `found` is the snapshot of is a constant."""
        if label in self.fixed or self.asks_for_types:
            self._values_of[label].add(found)
            self._note_streak(label, found)
            return False
        value = _table_of(owner)[name]
        self.numbers[label] = int if isinstance(value, int) else float
        self._numbers_at[id(owner), name] = label
        return True

    def _label_inside(self, container: object, name: str, label: str) -> str:
        """Of a number in a dict or a namespace."""
        label = f"{label}[{name!r}]"
        while self._labels.setdefault(label, (container, name))[0] is not container:
            label += "'"
        self._inside.add(label)
        return label

    def _note_streak(self, label: str, value: Hashable) -> None:
        """What is a constant of programs has another value; if it has a new one at every call, the model is left to PyTorch."""
        last, length = self._streaks.get(label, (0, 0))
        length = length + 1 if self._num_checks - last <= 2 else 1
        self._streaks[label] = self._num_checks, length
        different = self._different[label]
        if len(different) <= MAX_STREAK:
            different.add(value)
        if self.has_inputs and length > MAX_STREAK and len(different) > MAX_STREAK:
            self.too_many = (
                f"the forward reads {label}, which has another value at every call, and each needs a program of its own ({MAX_STREAK} were compiled): pass it as a tensor, or, "
                "if it is a number, keep it in an attribute of a module or of an object of a class of your own"
            )

    def fix(self, label: str) -> None:
        """A number cannot be an input: every value of it needs a program of its own."""
        owner, name = self._labels[label]
        table = _table_of(owner)
        self.numbers.pop(label)
        self._numbers_at.pop((id(owner), name))
        self.fixed.add(label)
        for place in self._places.values():
            place.give_up_number(label)
        if label not in self._inside:
            self._place(owner, table, label.rpartition(".")[0]).note(name, table.get(name, MISSING))

    def _label_of(self, place: Place, name: str) -> str:
        """Of a name in a place; two objects of one class have different ones."""
        label = f"{place.label}.{name}"
        if self._labels.setdefault(label, (place.owner, name))[0] is not place.owner:
            label = f"{place.label} {1 + list(self._places.values()).index(place)}.{name}"
            self._labels[label] = place.owner, name
        return label

    def inputs(self) -> dict[str, Tensor]:
        """The present values of what became an input."""
        found = {label: self._value(label) for label in self.tensors}
        found = {label: value for label, value in found.items() if isinstance(value, Tensor)}
        return found | self.as_tensors(self.values())

    def as_tensors(self, numbers: Values) -> dict[str, Tensor]:
        """Numbers as inputs of a program."""
        return {label: self.asked.as_tensor(value) for label, value in numbers.items()}

    def values(self) -> dict[str, int | float]:
        """The present numbers that are inputs."""
        return {label: typing.cast(float, self._value(label)) for label in self.numbers}

    def check_not_too_many(self, written: Iterable[str]) -> None:
        """None of the attributes that a forward writes is a number that it needs, with another value in every call.

        Raises:
            CaptureError: one is; from then on `too_many` says so.
        """
        for label in written:
            if len(self._values_of.get(label, ())) > MAX_REWRITTEN:
                self.too_many = (
                    f"the forward changes the number {label} in every call, and needs its value, so that each would need a program of its own "
                    f"({MAX_REWRITTEN} were compiled): use it in arithmetic and comparisons alone, or make it a buffer"
                )
                raise CaptureError(self.too_many)

    def _value(self, label: str) -> object:
        owner, name = self._labels[label]
        return _attribute(owner, name) if isinstance(owner, nn.Module) else _table_of(owner).get(name, MISSING)

    @contextlib.contextmanager
    def given(self, values: Mapping[str, object], written: tuple[str, ...] = (), numbers: Values = types.MappingProxyType({})) -> Iterator[dict[str, object]]:
        """The modules hold `values` inside, which is yielded, but for those that are of a call alone; these attributes, and those named in `written`, are as before afterwards.

        A tensor in the place of a number is a `Number` there.

        Args:
            numbers: what the numbers were when the code was first captured; without them they are what they are now.
        """
        own = {label: value for label, value in values.items() if not is_of_call(label)}
        before = self.present((*own, *written))
        try:
            with self.asked.given({label: value for label, value in values.items() if isinstance(value, Tensor)}):
                placed = {label: self._as_number(label, numbers.get(label, before[label]), value) for label, value in own.items()}
                self.write(placed)
                yield placed
        finally:
            self.write(before)

    def _as_number(self, label: str, present: object, value: object) -> object:
        is_number = isinstance(value, Tensor) and isinstance(present, (int, float)) and type(present) is not bool
        return Number.held(label, typing.cast(float, present), self.asked) if is_number else value

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is among the values that are guarded: another one, or a write into it, asks for another capture."""
        return any(leaf is tensor for place in self._places.values() for leaf in leaves_of(place.held.values))

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or was, in a variable that the code reads."""
        return self._constants.get(id(tensor)) is tensor

    def holds(self, container: object) -> bool:
        """Whether a container is among the values that were read, or in one of them."""
        return any(container is held for place in self._places.values() for held, _ in place.held.contents)

    def held(self) -> tuple[Held, ...]:
        """All that was read, as it is now, for `as_held`."""
        return tuple(place.held for place in self._places.values())

    @contextlib.contextmanager
    def as_held(self, held: tuple[Held, ...]) -> Iterator[None]:
        """What was read is inside as it was when `held` was taken; the loop may have changed it since.

        Raises:
            LoopError: see `Held.differences`.
        """
        with contextlib.ExitStack() as stack:
            with torch._C.DisableTorchFunctionSubclass():  # a module may hold a promise
                for container, content in (pair for each in held for pair in each.contents):
                    if snapshot(copy_of(container)) != snapshot(content):  # without the container's own class
                        stack.callback(refill, container, copy_of(container))
                        refill(container, content)
                now = [difference for each in held for difference in each.differences()]
            for place, name, value, present in now:
                stack.callback(place.put, name, present)
                place.put(name, value)
            yield

    def write(self, values: Mapping[str, object]) -> None:
        """Set attributes of modules, by label."""
        for label, value in values.items():
            owner, name = self._find(label)
            if value is MISSING:
                _table_of(owner).pop(name, None)
            else:
                _table_of(owner)[name] = value

    def read(self, labels: tuple[str, ...]) -> dict[str, Tensor]:
        """The present values of attributes of modules."""
        return {label: typing.cast(Tensor, _table_of(owner)[name]) for label in labels for owner, name in [self._find(label)]}

    def present(self, labels: Iterable[str]) -> dict[str, object]:
        """What attributes hold now, `MISSING` where there is none."""
        return {label: _table_of(owner).get(name, MISSING) for label in labels for owner, name in [self._find(label)]}

    def _find(self, label: str) -> tuple[object, str]:
        if label not in self._labels:
            path, _, name = label.rpartition(".")
            self._labels[label] = self.model.get_submodule(path.partition(".")[2]), name
        return self._labels[label]

    # ---- noting

    @contextlib.contextmanager
    def noting(self, arguments: object = ()) -> Iterator[None]:
        """Note what is read inside.

        Args:
            arguments: a tree; the code inside is given the functions in it.

        Raises:
            CaptureError: the code inside changed Python state other than attributes of the model's modules, which is restored.
        """
        paths = {id(module): f"model.{path}" if path else "model" for path, module in self.model.named_modules()}
        copied = {id(vars(module).get("_parameters")): paths[id(module)] for module in self.model.modules()}  # a shallow copy of a module has its tables
        copied.pop(id(None), None)
        self._noted = []
        self._words.clear()
        self._outside_before.clear()
        self._reached.clear()
        self._made.clear()
        self._dicts.clear()
        self._attributes.clear()
        self._touched.clear()
        environment = dict(os.environ)
        with torch._C.DisableTorchFunctionSubclass():
            described = [(name, tensor) for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()) if attributes_of(tensor)]
        self._functions.clear()
        self._differentiated.clear()
        self._methods.clear()
        self._class_names.clear()
        with contextlib.ExitStack() as stack:
            self._watch_class(stack, nn.Module, paths, copied)
            everywhere = vars(torch.nn.modules.module)
            tables = [table for module in self.model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
            stack.enter_context(self._observers_noted([*tables, everywhere["_global_forward_hooks"], everywhere["_global_forward_pre_hooks"]]))
            stack.enter_context(self.caches_kept())
            stack.enter_context(self.types)
            if self.has_inputs:  # an optimizer's code reads gradients, and what the loop gives its parameters is looked at elsewhere
                stack.enter_context(told.parameters_asked(self._note_absent_of_tensors))
            stack.enter_context(prints_said())
            stack.enter_context(files_noted(self._files.append))
            settled, finished, classes = self._settled, False, _Classes(self.model)
            for leaf in trees.leaves(arguments):
                if callable(leaf) and not isinstance(leaf, (Tensor, nn.Module, type)):
                    self._note_argument(leaf)
            try:
                yield
                finished, self._newest = True, None
            finally:
                if not self._words <= self.words:
                    self.words |= self._words
                    self.asked_of_tensors = told.AskedOfTensors.of(self.words)
                for label, tensor in described:
                    for name in attributes_of(tensor).keys() & self._words:
                        self._note(tensor, vars(tensor), f"model.{label}", name, vars(tensor)[name])
                changed = classes.changes() + self._changes_elsewhere() + self._changed_names(environment)
                if not finished or changed:
                    self._put_back()
        if self._settled > settled and not changed:
            self._rounds += 1
            if self._rounds < 4:
                raise NewInput("the forward changed an object")
            changed = list(dict.fromkeys(f"{place.label}.{name}, in every call" for place, name, _ in self._settling.values()))
            self._put_back()
        self._settling.clear()
        self._rounds = 0
        if changed:
            raise CaptureError(self.refusal.format(", ".join(changed)))

    def _changed_names(self, environment: Mapping[str, str]) -> list[str]:
        """Names that the code has added or taken away where it does not write an attribute: in the dict of an object, of a function, and in the environment, which is restored."""
        changed = [f"the names in the dict of {label}" for table, names, label in self._dicts.values() if tuple(table) != names]
        for owner, before in self._attributes.values():  # other values of the old ones are noticed as those of variables are
            new = [name for name, value in vars(owner).items() if name not in before and value is not Shown]
            if new := [name for name in new if not name.startswith("__") and not isinstance(vars(owner)[name], types.ModuleType)]:  # nor what a warning or an import leaves
                for name in new:
                    delattr(owner, name)
                changed.append(f"{owner.__name__}.{new[0]}, which is new")
        if written := [name for name in {**os.environ, **environment} if name in self._words and os.environ.get(name) != environment.get(name)]:  # libraries set some when they are loaded
            for name in written:
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]
            changed.append(f"os.environ[{written[0]!r}]")
        return changed

    def _put_back(self) -> None:
        """Plain attributes that these captures have changed are as before the first of them."""
        for place, name, value in self._settling.values():
            place.put(name, value)
            place.changes()
        self._settling.clear()

    @contextlib.contextmanager
    def noting_backward(self, tensors: Iterable[Tensor], functions: Iterable[type]) -> Iterator[None]:
        """Note what code reads that a backward inside runs: hooks, and what `functions`, subclasses of torch.autograd.Function, do.

        Raises:
            CaptureError: the code inside changed Python state, which is restored, or reads a tensor that is no input.
        """
        everywhere = vars(torch.nn.modules.module)
        with torch._C.DisableTorchFunctionSubclass():  # a look at a parameter brings its value from the devices
            tables = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
        tables += [table for module in self.model.modules() for table in (module._backward_hooks, module._backward_pre_hooks) if table]
        tables += [everywhere[f"_global_backward_{kind}"] for kind in ("hooks", "pre_hooks") if everywhere[f"_global_backward_{kind}"]]
        own = [function for function in functions if is_user_class(function)]
        if not tables and not own and not self.runs_backward:
            yield
            return
        self.settles, self._in_backward = False, True
        try:
            with self.noting():
                for function in own:
                    self._note_differentiated(function)
                with self._observers_noted(tables), patched(nn.Module, __setattr__=in_this_thread(self._noting_write(nn.Module.__setattr__), nn.Module.__setattr__)):
                    yield
        finally:
            del self.settles
            self._in_backward = False

    def _noting_write(self, original: Callable) -> Callable:
        """Attributes of modules that a backward sets are no results of a program, as those are that the forward sets."""

        own = {id(module) for module in self.model.modules()}  # fx sets constants on a module of its own

        def write(module: nn.Module, name: str, value: object) -> None:
            frame = sys._getframe(1) if id(module) in own or is_user_class(type(module)) else None
            while frame is not None and frame.f_code.co_name != "_engine_run_backward":
                frame = frame.f_back
            if frame is not None:
                self._set_in_backward.append(f"{type(module).__name__}.{name}")
            original(module, name, value)

        return write

    @contextlib.contextmanager
    def caches_kept(self) -> Iterator[None]:
        """Functions under ``functools.lru_cache`` do not keep fake tensors that they make inside; plain results they keep, as they do without a capture."""
        try:
            yield
        finally:
            for key, (function, misses) in self._caches.items():
                if function.cache_info().misses != misses:
                    arguments, results = kept_by_cache(function)
                    if any(isinstance(leaf, (Tensor, Number)) for leaf in leaves_of(arguments)) or not all(isinstance(leaf, PLAIN) and type(leaf) is not Number for leaf in leaves_of(results)):
                        function.cache_clear()
                    self._caches[key] = function, function.cache_info().misses

    def _watch_class(self, stack: contextlib.ExitStack, cls: type, paths: Mapping[int, str], copied: Mapping[int, str]) -> None:
        original: Callable = cls.__getattribute__
        thread, current = threading.get_ident(), threading.get_ident
        watched: set[type] = {cls}
        opaque: set[type] = set()  # those that read their attributes by code of their own

        def look(owner: object, name: str) -> object:
            if current() != thread:  # which runs code of its own
                return original(owner, name)
            label = paths.get(id(owner))
            if label is None and issubclass(type(owner), nn.Module):
                label = copied.get(id((getattr_plain(owner) or {}).get("_parameters")))
            try:
                value = original(owner, name)
            except AttributeError:
                self._note_outside_tensor(owner, name, label)
                self._note_absent(owner, name, label)
                raise
            outside = typing.cast(nn.Module, owner) if label is None and issubclass(type(owner), nn.Module) else None  # isinstance would ask the owner for its class
            if outside is not None and (type(owner) is nn.Module or issubclass(type(owner), (Mixin, torch.fx.GraphModule))):
                return value  # another model, which has guards of its own, or one that is being captured
            if label is None:
                label = type(owner).__name__ if outside is None else self._label_outside(outside)
                self._note_kind(owner)
            if name == "__dict__" and is_own_file(sys._getframe(1).f_code.co_filename):
                self._note_dict(owner, value, label, watch)
            if (name in TABLES and (outside is None or name != "training")) or (name.startswith("__") and name.endswith("__")):
                return value
            return self._note_attribute(owner, name, value, label, watch)

        def watch(owner: object) -> None:
            found = type(owner)
            if isinstance(owner, (nn.Module, Tensor)) or not is_user_class(found):
                return
            if found not in watched:
                watched.add(found)
                if any("__getattribute__" in vars(base) for base in found.__mro__ if not is_library_class(base) and base not in watched - {found}):
                    opaque.add(found)
                self._watch_class(stack, found, paths, copied)
                for base in filter(is_user_class, found.__mro__):  # code that Python calls without reading an attribute
                    for special in _SPECIAL & vars(base).keys():
                        self._follow(vars(base)[special], _DEPTH, watch)
            if id(owner) not in self._made:
                self._reached[id(owner)] = owner
            self._note_kind(owner)
            if found in opaque and (table := getattr_plain(owner)) is not None:
                self._note_dict(owner, table, found.__name__, watch)

        def write(owner: object, name: str, value: object) -> None:
            if current() == thread:
                self._note_write(owner, name, value)
            original_write(owner, name, value)

        self._watch = watch
        original_write: Callable = cls.__setattr__
        stack.enter_context(patched(cls, __getattribute__=look, **({} if cls is nn.Module else {"__setattr__": write})))

    def _note_write(self, owner: object, name: str, value: object) -> None:
        """Code sets an attribute of an object of the user's, which need not have read it; those that it has made itself are its own."""
        if id(owner) not in self._reached:
            self._made[id(owner)] = owner
            return
        found = next((vars(base)[name] for base in type(owner).__mro__ if name in vars(base)), None)
        table = Slots(owner) if isinstance(found, types.MemberDescriptorType) else getattr_plain(owner)
        if table is None or isinstance(found, property) or (id(owner), name) in self._numbers_at:  # see `check_outside_kept`
            return
        place, before = self._place(owner, table, type(owner).__name__), table.get(name, MISSING)
        if before is MISSING and id(table) in self._dicts:
            held, names, label = self._dicts[id(table)]
            self._dicts[id(table)] = held, (*names, name), label
        if isinstance(value, PLAIN):  # it may stay, and is guarded
            place.note(name, before)
        self._noted.append((place, name, before, ()))

    def _note_outside_tensor(self, owner: object, name: str, label: str | None) -> None:
        """A parameter or buffer of a module outside of the model is an input."""
        table = getattr_plain(owner)
        if label is not None or table is None or not issubclass(type(owner), nn.Module) or issubclass(type(owner), (Mixin, torch.fx.GraphModule)):
            return
        module = typing.cast(nn.Module, owner)
        if isinstance(found := _attribute(module, name), Tensor):
            label = self._label_outside(module)
            if isinstance(found, FakeTensor) and f"{label}.{name}" not in self.tensors:
                raise _made_here(module)
            if isinstance(module, nn.RNNBase):  # it keeps its weights in a list, too
                raise CaptureError(f"the forward calls a {type(module).__name__} that is no part of the model, whose weights are no inputs: make it a submodule")
            self._take_as_input(module, label, name)

    def _take_as_input(self, module: nn.Module, label: str, name: str) -> None:
        """A tensor that a module has under a name is an input of the program.

        Raises:
            NewInput: it was none until now.
        """
        key = f"{label}.{name}"
        if key not in self.tensors:
            self.tensors[key] = None
            self._labels[key] = module, name
            if self._in_backward:
                raise CaptureError(f"the backward reads the tensor {key}, which the forward does not read: register it as a buffer, or save it for backward")
            newest, self._newest = self._newest, module if id(module) in self._outside else None
            if newest is not None and id(newest) not in self._touched:
                raise _made_here(newest)
            raise NewInput(key)

    def _label_outside(self, module: nn.Module) -> str:
        """A name of its own for a module outside of the model, whose attributes may be inputs, too."""
        self._outside_before.setdefault(id(module), (module, dict(getattr_plain(module) or {})))  # one that is made here has none yet
        self._touched.add(id(module))
        if id(module) not in self._outside:
            number = sum(type(other) is type(module) for other, _ in self._outside.values())
            self._outside[id(module)] = module, type(module).__name__ + (f" {number + 1}" if number else "")
        return self._outside[id(module)][1]

    def check_outside_kept(self, values: Mapping[str, object]) -> None:
        """The attributes of modules outside of the model, and of other objects, still have the values that they were given.

        Raises:
            CaptureError: one was written.
        """
        for label, value in values.items():
            owner, name = self._find(label)
            if (id(owner) in self._outside or not isinstance(owner, nn.Module)) and _table_of(owner).get(name) is not value:
                raise CaptureError(self.refusal.format(label))

    def _note_kind(self, owner: object) -> None:
        """Guard an object's class; the loop may give it another one."""
        self._place(owner, Attributes(owner), type(owner).__name__).note("__class__", type(owner))

    def _note_dict(self, owner: object, table: dict[str, object], label: str, watch: Callable) -> None:
        """Guard all that an object's dict holds, and the names in it: it was read as a whole."""
        for name, held in list(table.items()):
            hidden = name in TABLES or (name.startswith("_") and isinstance(owner, nn.Module))
            if not hidden and not isinstance(held, CONSUMED):
                self._note_attribute(owner, name, held, label, watch)
        names = Answers(names=lambda: tuple(table))
        self._place(owner, names, label).note("names", names.get("names"))
        if id(owner) not in self._made:
            self._dicts.setdefault(id(table), (table, tuple(table), label))

    def _note_absent(self, owner: object, name: str, label: str | None) -> None:
        """``hasattr`` and ``getattr`` with a default find no attribute; the parameters and parts of a module are found elsewhere."""
        table = getattr_plain(owner)
        if table is None or (name.startswith("__") and name.endswith("__")):
            return
        if isinstance(owner, nn.Module) and (label is None or any(name in table.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))):
            return
        self._place(owner, table, label or type(owner).__name__).note(name, MISSING)

    def _note_absent_of_tensors(self, name: str) -> None:
        """No parameter or buffer has an attribute that the code asks for; the loop may give them some."""
        model = self.model

        def having() -> tuple[str, ...]:
            with torch._C.DisableTorchFunctionSubclass():
                return tuple(label for label, tensor in (*model.named_parameters(), *model.named_buffers()) if name in vars(tensor))

        tensors = self._place(self, Answers(), "the model's tensors")
        typing.cast("Answers", tensors.table).add(name, having)
        tensors.note(name, tensors.table.get(name))

    def _note_attribute(self, owner: object, name: str, value: object, label: str, watch: Callable) -> object:
        table = getattr_plain(owner)
        if table is not None and name not in table:
            place = self._place(owner, table, label)
            place.note(name, MISSING)  # an attribute of the object would hide that of its class
            if isinstance(value, PLAIN) and not isinstance(value, type):
                self._noted.append((place, name, MISSING, ()))
        if isinstance(value, types.MethodType) and (table is None or name not in table):
            self._note_function(value.__func__, _DEPTH, watch)
            self._note_class(type(owner), {name} | names_of(getattr(value.__func__, "__code__", None)))
            return value
        if table is None or name not in table:
            cls = next((base for base in type(owner).__mro__ if name in vars(base)), None)
            if cls is None and table is not None and not isinstance(owner, nn.Module):  # the class has code that finds it, perhaps under another name
                for inside in [inside for inside, held in table.items() if held is value]:
                    self._note(owner, table, label, inside, value)
            if cls is None or not is_user_class(cls):
                return value
            found = vars(cls)[name]
            self._note(cls, vars(cls), cls.__name__, name, found)
            if isinstance(found, types.MemberDescriptorType):
                self._note(owner, Slots(owner), label, name, value)
                self._follow(value, _DEPTH, watch)
            elif isinstance(found, property):
                self._follow(found.fget, _DEPTH, watch)
            elif hasattr(type(found), "__get__") and is_user_class(type(found)):
                watch(found)
                self._note_dict(found, getattr_plain(found) or {}, type(found).__name__, watch)  # it was asked before it was watched
                self._follow(type(found).__get__, _DEPTH, watch)
            return value
        if isinstance(owner, nn.Module) and isinstance(value, Tensor):
            if f"{label}.{name}" not in self.tensors:
                self._place(owner, table, label).take_as_input(name)
            self._take_as_input(owner, label, name)
            return value
        if isinstance(owner, nn.RNNBase) and isinstance(value, list):
            return value  # its lists of its weights
        self._note(owner, table, label, name, value)
        self._follow(value, _DEPTH, watch)
        return value

    def _note(self, owner: object, table: Mapping[str, object], label: str, name: str, value: object) -> None:
        if (number := self._numbers_at.get((id(owner), name))) is not None and table is _table_of(owner):
            if self._in_backward and type(value) is not Number:
                raise CaptureError(f"the backward reads the number {number}, which changes from step to step: keep it in a buffer, or in a tensor that is saved for backward")
            return
        _check_not_consumed(value, f"{label}.{name}")
        if self._rewritten[f"{label}.{name}"] > MAX_REWRITTEN and any(isinstance(leaf, Tensor) for leaf in leaves_of([value])):
            raise CaptureError(
                f"the forward reads {label}.{name}, a tensor, or a container of some, that the loop changes again and again, which a compiled program would hold as a constant: "
                "pass it to the model, or register it as a buffer"
            )
        place = self._place(owner, table, label)
        place.note(name, value)
        self._constants.update((id(leaf), leaf) for leaf in leaves_of([value]) if isinstance(leaf, Tensor))
        if isinstance(value, enum.Enum) and is_user_class(type(value)):
            for inside in [inside for inside in vars(value) if not inside.startswith("_")]:
                self._place(value, vars(value), str(value)).note(inside, vars(value)[inside])
        hooks = isinstance(owner, nn.Module) and name.endswith("_hooks")  # a forward may install hooks: `num_hooks`
        contents = tuple((container, _without_numbers(content)) for container, content in contents_of(typing.cast(Any, value).values() if hooks else [value]))
        self._noted.append((place, name, value, contents))

    def _place(self, owner: object, table: Mapping[str, object], label: str) -> Place:
        key = id(owner), label if owner is None else type(table)  # a function has its variables and its code, an object its slots
        if key not in self._places:
            self._places[key] = Place(owner, table, label)
        return self._places[key]

    def _follow(self, value: object, depth: int, watch: Callable) -> None:
        """Look into what a value leads to: the code of functions, the elements of containers, other objects."""
        if depth == 0 or isinstance(value, (*PLAIN, Tensor, nn.Module)):
            return
        if isinstance(value, weakref.ref):
            value = value()
        if isinstance(value, functools.partial):
            self._follow((*value.args, *value.keywords.values()), depth, watch)
            value = value.func
        if isinstance(value, types.MethodType):
            self._follow(value.__self__, depth - 1, watch)
            value = value.__func__
        if (owner := owner_of(value)) is not value:  # a method of C: a dict's `get`, an object's `__getattribute__`
            self._follow(owner, depth - 1, watch)
            if is_user_class(type(owner)) and (table := getattr_plain(owner)) is not None:
                self._note_dict(owner, table, type(owner).__name__, watch)
        elif isinstance(value, (types.FunctionType, _CACHED)):
            self._note_function(value, depth, watch)
        elif isinstance(value, (*CONTAINERS, *NAMESPACES)):
            inside = vars(value) if isinstance(value, NAMESPACES) else value
            for item in inside.values() if isinstance(inside, dict) else inside:
                self._follow(item, min(depth - 1, _INSIDE), watch)
        elif isinstance(value, types.ModuleType):
            self._note_settings(value)
        else:
            watch(value)

    def _note_function(self, function: types.FunctionType, depth: int, watch: Callable) -> None:
        """Guard the global and closed-over values that a function of the user uses, and its defaults."""
        if isinstance(function, _CACHED):
            self._caches.setdefault(id(function), (function, function.cache_info().misses))
        if isinstance(table := getattr(function, "registry", None), types.MappingProxyType):  # of functools.singledispatch
            self._note(function, Attributes(function), function.__name__, "registry", table)
            self._follow(list(table.values()), depth, watch)
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None or not is_own_file(code.co_filename):
            return
        self._attributes.setdefault(id(function), (function, frozenset(vars(function))))
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._note(function, Attributes(function), code.co_name, name, getattr(function, name))
        self._follow([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], depth - 1, watch)
        self._words |= texts_of(code)
        hidden = self.types.hide(function.__globals__)
        names, used = names_of(code), globals_of(code)
        absent, used = used - function.__globals__.keys(), used & function.__globals__.keys()
        if "globals" in absent:
            used |= {name for name, value in function.__globals__.items() if isinstance(value, PLAIN)}
        variables = self._place(function.__globals__, function.__globals__, function.__module__)
        for name in absent:  # a variable of that name would hide the built-in one
            variables.note(name, MISSING)
        if "type" in absent and asks_for_types(code):
            self.asks_for_types = hidden = True
        if hidden:
            self.types.add(function.__globals__)
        if not names.isdisjoint(("environ", "getenv")):
            for name in filter(str.isidentifier, texts_of(code)):
                ENVIRONMENT.add(name, functools.partial(os.environ.get, name))
                self._place(None, ENVIRONMENT, "os.environ").note(name, ENVIRONMENT.get(name))
        self.runs_backward |= not names.isdisjoint(_REGISTER)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):
                self._note_variable(function, Cells(function), code.co_name, name, cell.cell_contents, depth, watch, names)
        for name in used:
            self._note_class(function.__globals__[name], names)
        if code in self._functions:
            return
        self._functions.add(code)
        try:
            for name in used:
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType):
                    self._note_module(value, names, depth, watch)
                else:
                    self._note_variable(function.__globals__, function.__globals__, function.__module__, name, value, depth, watch, names)
        except CaptureError:
            self._functions.discard(code)  # it is refused again in the next capture
            raise

    def _note_argument(self, value: Any) -> None:
        """Guard what a function that the loop passes reads, and note what it changes."""
        code = getattr(getattr(value, "__func__", value), "__code__", type(value))
        known = self._arguments.setdefault(code, [])
        if not any(value is other or (type(value) is type(other) and value == other) for other in known):
            known.append(value)
        if len(known) > MAX_REWRITTEN:
            raise CaptureError(
                f"the loop passes another function {getattr(value, '__name__', type(value).__name__)!r} at every call, each of which would need a program of its own: make it once, "
                "or pass what changes as a tensor"
            )
        self._note(value, Itself({"itself": value}), f"the argument {getattr(value, '__name__', type(value).__name__)}", "itself", value)
        self._follow(value, _DEPTH, self._watch)

    def _note_class(self, cls: object, names: set[str]) -> None:
        """Guard the attributes of a class, or of a function, of the user that code may read from it."""
        if isinstance(cls, types.FunctionType) and vars(cls) and is_own_file(cls.__code__.co_filename):
            for name in vars(cls) if names & _REFLECTION else names & vars(cls).keys():
                self._note(cls, vars(cls), cls.__name__, name, vars(cls)[name])
        if not isinstance(cls, type):
            return
        if is_user_class(cls) and cls not in self._class_names:
            self._note(cls, Attributes(cls), cls.__name__, "__bases__", cls.__bases__)
        known = self._class_names.setdefault(cls, {"__getattribute__"})  # which is exchanged while reads are noted
        if names & _REFLECTION and is_user_class(cls) and _EVERY_NAME not in known:
            known.add(_EVERY_NAME)
            names = names | {name for base in cls.__mro__ if is_user_class(base) for name in vars(base) if not name.startswith("__")}
        if issubclass(cls, torch.autograd.Function) and is_user_class(cls):
            self._note_differentiated(cls)
        classes = [base for base in (*cls.__mro__, *inspect.getmro(type(cls))) if is_user_class(base)]
        for name in names - known if classes else ():
            found = [base for base in classes if name in vars(base)]
            for base in found:
                self._note(base, vars(base), base.__name__, name, vars(base)[name])
            if found and name not in vars(cls):  # the class itself may get one
                self._note(cls, vars(cls), cls.__name__, name, MISSING)
            known.update([name] if found else [])
            for base in found:
                self._note_method(cls, vars(base)[name])

    def _note_method(self, cls: type, method: object) -> None:
        """Guard what a method that is called on the class itself reads."""
        function = method.fget if isinstance(method, property) else method.func if isinstance(method, functools.partialmethod) else method
        function = inspect.unwrap(function.__func__) if isinstance(function, (staticmethod, classmethod)) else function
        if isinstance(function, types.FunctionType) and (cls, function.__code__) not in self._methods:
            self._methods.add((cls, function.__code__))
            self._note_function(function, _DEPTH, self._watch)
            self._note_class(cls, names_of(function.__code__))

    def _note_differentiated(self, function: type) -> None:
        """Guard what the code of a subclass of torch.autograd.Function reads."""
        if function in self._differentiated:
            return
        self._differentiated.add(function)
        self.runs_backward = True
        for base in filter(is_user_class, function.__mro__):
            for method in vars(base).values():
                code = inspect.unwrap(method.__func__) if isinstance(method, (staticmethod, classmethod)) else method
                if isinstance(code, types.FunctionType):
                    self._note_function(code, _DEPTH, self._watch)
                    self._note_class(function, names_of(code.__code__))

    def _note_variable(self, owner: object, table: Mapping, label: str, name: str, value: object, depth: int, watch: Callable, names: set[str]) -> None:
        self._note_class(value, names)
        if isinstance(value, Tensor):
            if type(value) is Tensor:
                self._note(owner, table, str(label), name, value)
        elif isinstance(value, (*PLAIN, *MUTABLE, *CONSUMED)) and not isinstance(value, type):
            self._note(owner, table, str(label), name, value)
            self._follow(value, depth - 1, watch)
        else:
            if not isinstance(value, type):
                self._note(owner, table, str(label), name, value)
            self._follow(value, depth - 1, watch)

    def _note_module(self, module: types.ModuleType, names: set[str], depth: int, watch: Callable) -> None:
        if is_own_module(module):
            self._attributes.setdefault(id(module), (module, frozenset(vars(module))))
            for name in names & vars(module).keys():
                self._note_variable(vars(module), vars(module), module.__name__, name, vars(module)[name], depth, watch, names)
        elif depth:
            self._note_library(module, names, min(depth, _INSIDE))

    def _note_library(self, module: types.ModuleType, names: set[str], depth: int) -> None:
        """Guard the functions and classes of an installed library that code uses, which the loop may exchange, and settings that it reads."""
        place = self._place(vars(module), vars(module), module.__name__)
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                if depth and value.__name__.startswith(f"{module.__name__}."):
                    self._note_library(value, names, depth - 1)
            elif isinstance(value, _CODE) and not (getattr(value, "__module__", None) or "").startswith("graphacc"):  # nor what stands in for it while a model is captured
                place.note(name, value)
        if type(module) is not types.ModuleType:  # torch.backends.cudnn
            for name in names & vars(type(module)).keys():
                if isinstance(value := getattr(module, name, None), PLAIN):
                    self._place(module, Attributes(module), module.__name__).note(name, value)
        if module is torch:
            for name in names & SETTINGS.known:
                self._place(None, SETTINGS, "torch").note(name, SETTINGS.get(name))

    def _note_settings(self, module: types.ModuleType) -> None:
        """Guard the plain variables of a module of the user that is passed around, such as a file of settings."""
        if is_own_module(module):
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and isinstance(value, (*PLAIN, *CONTAINERS)) and not isinstance(value, type):
                    self._note(vars(module), vars(module), module.__name__, name, value)

    @contextlib.contextmanager
    def _observers_noted(self, tables: Iterable[dict]) -> Iterator[None]:
        """Note hooks of the user's own that return None: they only observe, which a program cannot do for them."""
        replaced = []
        for hooks in tables:
            for key, hook in hooks.items():
                code = _code_of(hook)
                if code is not None and is_own_file(code.co_filename):
                    replaced.append((hooks, key, hook, code))
        for hooks, key, hook, code in replaced:
            if isinstance(hook, functools.partial):
                self._note(hook, Itself({"itself": hook}), f"the hook {code.co_name}", "itself", hook)
            self._follow(hook, _DEPTH, self._watch)
            hooks[key] = self._noted_hook(hook, code)
        try:
            yield
        finally:
            for hooks, key, hook, _ in replaced:
                if key in hooks:
                    hooks[key] = hook

    def _noted_hook(self, hook: Callable, code: types.CodeType) -> Callable:
        @functools.wraps(hook)
        def run(*args, **kwargs):
            result = hook(*args, **kwargs)
            if result is None:
                self._noted.append((f"the hook {code.co_name} in {code.co_filename}, line {code.co_firstlineno},", "", None, ()))
            return result

        return run

    def num_hooks(self) -> int:
        """How many hooks the modules have; some models install theirs in their first forward."""
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self.model.modules())

    def _changes_elsewhere(self) -> list[str]:
        """What the code that was run changed outside of the modules' attributes.

        A plain attribute of an object, such as a config's, keeps its new value: the next capture, which follows, starts from it. All else is restored.
        """
        changed, self._set_in_backward = self._set_in_backward, []
        changed += [f"something outside of the model (the file {file} is read)" for file in self._files]
        self._files.clear()
        changed += self._changes_outside()
        own, settling = {id(module) for module in self.model.modules()}, {}
        for place, name, value, contents in reversed(self._noted):  # the oldest copies are those from before
            if isinstance(place, str):
                changed.append(f"something outside of the model ({place} returns None)")
                continue
            if self.settles and is_library_object(place.owner):
                place.changes()  # such as a config that notes what it found out: its present values count
                continue
            now = place.table.get(name, MISSING)
            written = [(container, copy) for container, copy in contents if snapshot(copy) != snapshot(copy_of(container))]
            for container, copy in written:
                refill(container, copy)
            if written:
                changed.append(f"{place.label}.{name}")
            elif now is value and isinstance(value, VIEWS) and place.snapshot(name, value) != place.names.get(name):
                place.changes()
                changed.append(f"{place.label}.{name}")
            elif now is not value and id(place.owner) not in own and snapshot(now) != snapshot(value):
                if self.settles and isinstance(now, PLAIN) and type(now) is not Number and place.table is getattr_plain(place.owner):
                    self._settled += 1
                    settling[id(place), name] = place, name, value
                    place.changes()
                    continue
                place.put(name, value)
                changed.append(f"{place.label}.{name}")
        self._noted = []
        self._settling = settling | self._settling
        return list(dict.fromkeys(changed))


    def _changes_outside(self) -> list[str]:
        """Attributes of modules outside of the model, other than plain values, that the code has set; they are restored."""
        changed = []
        for module, before in self._outside_before.values():
            if "_modules" not in before:  # the code has made it
                continue
            table, path = vars(module), self._label_outside(module)
            for name in before.keys() | table.keys():
                value, now = before.get(name, MISSING), table.get(name, MISSING)
                if now is value or isinstance(now, PLAIN) or f"{path}.{name}" in self.tensors:
                    continue
                changed.append(f"{path}.{name}")
                if value is MISSING:
                    del table[name]
                else:
                    table[name] = value
        return sorted(changed)


class OptimizerGuards(Guards):
    """What captures of one optimizer's step have read besides its own attributes: global and closed-over values, and other objects."""

    settles = has_inputs = False
    refusal = "the optimizer's step changes {}, which a compiled program does not do again in every step: keep it in self.state[parameter]"

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(nn.Module())
        self.optimizer = optimizer

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        with super().noting():
            for base in filter(is_user_class, type(self.optimizer).__mro__):
                for function in vars(base).values():
                    if isinstance(function, types.FunctionType):
                        self._note_function(function, _DEPTH, self._watch)
                        self._note_class(type(self.optimizer), names_of(inspect.unwrap(function).__code__))
            for values in (vars(self.optimizer), *self.optimizer.param_groups):
                self._follow([value for name, value in values.items() if name not in ("params", "param_groups", "state")], _DEPTH, self._watch)
            yield


class _Classes:
    """The attributes of the user's classes that a model is made of."""

    def __init__(self, model: nn.Module):
        classes = {base: None for module in model.modules() for base in type(module).__mro__ if is_user_class(base)}
        self._before = [(cls, dict(vars(cls))) for cls in classes]

    def changes(self) -> list[str]:
        """What code has set or deleted since; it is restored."""
        changed = []
        for cls, before in self._before:
            now = dict(vars(cls))
            for name in (before.keys() | now.keys()) - {"__getattribute__", "__setattr__"}:
                value = before.get(name, MISSING)
                if now.get(name, MISSING) is value or name.startswith("__"):
                    continue
                changed.append(f"{cls.__name__}.{name}")
                delattr(cls, name) if value is MISSING else setattr(cls, name, value)
        return changed


class NewInput(Passing):
    """A tensor that a module holds was read: it has to be an input of the program."""


def _code_of(hook: Any) -> types.CodeType | None:
    """The code that a hook runs, also of a partial function and of an object that is called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)


def _attribute(module: nn.Module, name: str) -> object:
    """What a module has under a name: an attribute, a parameter or a buffer."""
    table = getattr_plain(module) or {}
    return next((table[kind][name] for kind in ("_parameters", "_buffers") if name in table.get(kind, ())), None) if name not in table else table[name]


def getattr_plain(owner: object) -> dict | None:
    """The dict of an object's attributes."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _table_of(owner: object) -> dict[str, object]:
    """The attributes of a module or of another object; the variables of a file are such a dict themselves."""
    return owner if type(owner) is dict else getattr_plain(owner) or {}


def _without_numbers(content: Any) -> Any:
    """What a container holds where no code is captured."""
    return {key: value_of(value) for key, value in content.items()} if type(content) is dict else content


def _check_not_consumed(value: object, label: str) -> None:
    """Refuse to read what gives something else every time, before the code that runs on fake tensors does."""
    for leaf in leaves_of([value]):
        if isinstance(leaf, CONSUMED):
            raise CaptureError(
                f"what is to be compiled reads {label}, a {type(leaf).__name__}, which gives something else at every call, where a compiled program would repeat what it gave "
                "first: draw with torch's default generator, or outside of the model and pass the result in"
            )


def _made_here(module: nn.Module) -> NeverCaptured:
    return NeverCaptured(f"the forward makes a {type(module).__name__}, or a copy of one, in every run: make modules in __init__, and register them")


def _text(found: Hashable) -> str:
    if found is MISSING:
        return "nothing"
    return str(found[1]) if isinstance(found, tuple) and len(found) == 2 else "another value"
