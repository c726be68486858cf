"""``optimizer.step()`` runs the compiled step: torch's own hooks, and the state that the optimizer seems to hold.

The pre-hook of ``step`` runs the program, and lets torch's own update work on a stand-in without parameters. Where the update cannot
be compiled, the gradients and the optimizer's state are brought to the host and torch's own update runs. The state lives on the devices;
whoever looks into ``optimizer.state`` finds it there, and what was changed in it is uploaded before the next step.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import operator
import sys
import typing
import weakref
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphacc._compat.torch_ import leave_out, storage_users
from graphacc.capture.optimizer import attributes_of, is_separable, kind_of_optimizer, kind_of_state
from graphacc.capture.python_state import snapshot
from graphacc.errors import CaptureError, LoopError
from graphacc.graph import Kind
from graphacc.loop import columns
from graphacc.loop.guards import OptimizerGuards
from graphacc.loop.identity import Identity
from graphacc.loop.managed import Handle, handle_of

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

_UNCHANGING = (int, float, str, type(None))
"""Types of settings that are what they are as long as they are the same objects."""

_NO_SETTINGS = {"lr": None, "params": None}
"""What a group has besides its settings."""

_hooks_installed = False


@dataclasses.dataclass(frozen=True)
class OtherState:
    """An optimizer's state besides tensors of its parameters."""

    parameters: dict[str, dict[str, object]]  # parameter -> key -> number, list or whatever its code keeps
    keys: dict[object, object]  # what is kept under a key that is no parameter
    kinds: dict[str, str]  # of the state of all parameters: see `kinds_of_state`


@dataclasses.dataclass
class Binding:
    """One optimizer of a compiled model, which lives as long as the loop keeps it."""

    reference: weakref.ref[torch.optim.Optimizer]
    names: tuple[str, ...]  # of its parameters, in order of the groups
    by_torch: str | None = None  # why PyTorch runs its step; None: the step is compiled
    misfit: Handle | None = None  # a parameter that has got another form than its state: why PyTorch runs it
    by_fx: bool = False  # lazy tensors cannot follow its step, so torch.fx captures it, as a program of its own
    dynamic: frozenset[str] = frozenset()  # numbers of the groups, besides lr, that were seen to change
    state_on_device: bool = False
    statics: dict[str, object] = dataclasses.field(default_factory=dict)
    fetch: Callable[[], None] = lambda: None
    copies: dict[int, tuple[Tensor, Hashable]] = dataclasses.field(default_factory=dict)  # id -> fetched tensor, its `snapshot` then
    given_out: bool = False  # the loop may hold tensors of the state
    apart: set[tuple[int, Identity]] = dataclasses.field(default_factory=set)  # programs that are known for what they leave behind, see `Execution._expect_apart`
    alike: tuple[tuple, Identity] | None = None  # which parameters have equal numbers in their state, and what was looked at
    guards: OptimizerGuards | None = None  # what the code of its step reads, where it is not torch's own
    _known: tuple[list | None, Identity | None] = (None, None)  # `_setting_objects` and the key of them, when they were looked at last

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            LoopError: the loop has let it go, and asks for its state.
        """
        optimizer = self.reference()
        if optimizer is None:
            raise LoopError("this is the state of an optimizer that is gone: keep the optimizer, or its state_dict()")
        return optimizer

    def key(self) -> tuple:
        """Identity of the update that the optimizer does: its class, its parameters and its static settings, as `note_changes` found them before the step."""
        own = None if is_separable(self.optimizer) else id(self.optimizer)  # code of the user's may do other things by attributes that are no settings
        optimizer = self.optimizer
        sizes = tuple([len(group["params"]) for group in optimizer.param_groups])
        return (own, type(optimizer), self.names, sizes, self.dynamic, self._known[1], None if self.guards is None else self.guards.token()[0])

    @property
    def kind(self) -> str:
        """Optimizers of one kind understand each other's state."""
        return kind_of_optimizer(self.optimizer)

    def number_settings(self) -> list[str]:
        """The settings of torch's own optimizers that are numbers, which every version of the class has; none of another's."""
        defaults = self.optimizer.defaults if is_separable(self.optimizer) else {}
        return [name for name, value in defaults.items() if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Its step's code is run inside, on stand-ins.

        Raises:
            CaptureError: the code changed what is not its own, which has its values back.
        """
        if is_separable(self.optimizer):
            yield
            return
        if self.guards is None:
            self.guards = OptimizerGuards(self.optimizer)
        with self.guards.noting():
            yield

    def _settings_key(self) -> Identity:
        objects, (before, key) = self._setting_objects(), self._known
        if key is None or before is None or len(objects) != len(before) or not all(map(operator.is_, objects, before)):
            key = Identity(tuple(sorted((k, repr(v)) for k, v in self.settings().items())))
            self._known = objects if len(objects) > 1 and all(map(_is_unchanging, objects[1:])) else None, key
        return key

    def _setting_objects(self) -> list:
        """Names and values of the settings: where they are the very objects of an earlier step, and of types that do not change, no setting has changed."""
        found: list = [self.dynamic]
        for group in self.optimizer.param_groups if is_separable(self.optimizer) else ():
            found += group
            found += (group | _NO_SETTINGS).values()
        return found

    def settings(self) -> dict[str, object]:
        """Every static setting of the groups, "<group>/<name>" -> value; tuples are spread out as "<name>.<i>"."""
        optimizer, found = self.optimizer, {}
        separable = is_separable(optimizer)
        if not separable:
            found = {f"self.{name}": value for name, value in vars(optimizer).items() if isinstance(value, (bool, int, float, str))}
            for name, parameter in zip(self.names, (parameter for group in optimizer.param_groups for parameter in group["params"])):
                found |= {f"{key} of {name}": value for key, value in attributes_of(parameter).items()}
        for index, group in enumerate(optimizer.param_groups):
            for name in (optimizer.defaults.keys() & group.keys() if separable else group.keys() - {"params"}) - {"lr"}:
                value = group[name]
                items = {f"{name}.{i}": v for i, v in enumerate(value)} if isinstance(value, (tuple, list)) else {name: value}
                found |= {f"{index}/{key}": v for key, v in items.items() if f"{index}/{key}" not in self.dynamic}
        return found

    def note_changes(self) -> list[str]:
        """Make every number that changed since the last call an input of the program; returns their names."""
        before = self._known[1]
        if self.statics and self._settings_key() is before:
            return []
        settings = self.settings()
        changed = [
            name for name, value in settings.items() if name in self.statics and value != self.statics[name] and isinstance(value, float)
        ]
        self.dynamic |= frozenset(changed)
        self.statics = self.settings()
        self._settings_key()
        return changed


    # ---- the optimizer's state

    def adopt_state(self) -> None:
        """Notice what the loop did to ``optimizer.state``: a new dict, or changed values in it, replace the state on the devices."""
        state = self.optimizer.state
        if isinstance(getattr(type(self.optimizer), "state", None), property):
            return  # it shows the state of the optimizer that it holds
        if not isinstance(state, StateView) or state.binding is not self:
            self.optimizer.state = StateView(self, state)
            self.state_on_device, self.copies, self.given_out = False, {}, True
        elif self.state_on_device and self.copies:
            held = [value for values in dict.values(state) for value in values.values() if isinstance(value, Tensor)]
            known = [self.copies.get(id(value)) for value in held]
            if len(held) != len(self.copies) or any(copy is None or snapshot(copy[0]) != copy[1] for copy in known):
                self.state_on_device = False
            self.copies = {}

    def is_home(self) -> bool:
        """Whether ``optimizer.state`` has the newest state: it was fetched, and perhaps changed since, or the loop has replaced it."""
        fetched = bool(self.copies)
        self.adopt_state()
        return fetched or not self.state_on_device

    def hold(self, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        """Put fetched state where the loop looks for it."""
        numbers = {} if is_separable(self.optimizer) else {key: python_number(self.optimizer, key, x) for key, x in tensors.items()}
        view = self.optimizer.state
        entry = dict.setdefault(view, parameter, {})
        for key, fetched in tensors.items():
            if (number := numbers.get(key)) is not None:
                entry[key] = number
                continue
            held = entry.get(key)
            if isinstance(held, Tensor) and (held.shape, held.dtype) == (fetched.shape, fetched.dtype):
                with torch.no_grad():
                    held.copy_(fetched)  # PyTorch's optimizers write in place: who holds it sees that
            else:
                entry[key] = held = fetched
            self.copies[id(held)] = held, snapshot(held)
        self.given_out = True

    @property
    def is_held(self) -> bool:
        """Whether the loop holds a tensor of the state (a state_dict that is no copy), through which it can read and write."""
        if self.given_out:
            entries = list(dict.values(self.optimizer.state))  # a state_dict has the same dicts
            tensors = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
            alone = all(count <= _ALONE for held in (entries, tensors) for count in _references(held))
            self.given_out = not alone or any(storage_users(tensor) > 1 for tensor in tensors)
        return self.given_out


def _is_unchanging(setting: object) -> bool:
    return isinstance(setting, _UNCHANGING) or (type(setting) is tuple and all(isinstance(value, _UNCHANGING) for value in setting))


def _references(values: list) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_ALONE = _references([value for value in {"state": torch.empty(0)}.values()])[0] + 1
"""References to a value that nothing but the state holds: from the list, the loop over it, the call, and the state."""


def python_number(optimizer: torch.optim.Optimizer, key: str, value: Tensor) -> float | int | None:
    """Numbers are carried as float64 of no dims; None if the optimizer's own code has a tensor there."""
    kind = kind_of_state(optimizer, key)
    if value.dtype is not torch.float64 or value.dim() or (kind is not None and issubclass(kind, Tensor)):
        return None
    number = value.item()
    return int(number) if kind is not float and math.isfinite(number) and number == int(number) else number


class StateView(collections.defaultdict):
    """``optimizer.state``: brings the state from the devices when somebody looks."""

    def __init__(self, binding: Binding, content: dict):
        super().__init__(dict, content)
        self.binding = binding

    def __reduce__(self):
        self.binding.fetch()
        return collections.defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    def __copy__(self):
        return collections.defaultdict(dict, self)

    def __missing__(self, key):
        dict.__setitem__(self, key, {})
        return dict.__getitem__(self, key)


def _looking(name: str) -> Callable:
    method = getattr(collections.defaultdict, name)

    def look(self, *args, **kwargs):
        self.binding.fetch()
        return method(self, *args, **kwargs)

    look.__name__ = name
    return look


for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "keys", "values", "items",
              "get", "pop", "popitem", "setdefault", "update", "clear", "copy"):  # fmt: skip
    setattr(StateView, _name, _looking(_name))


def install_hooks() -> None:
    """Register the global step hooks with torch, once per process."""
    global _hooks_installed
    if not _hooks_installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _hooks_installed = True


class Members(typing.NamedTuple):
    """The parameters of an optimizer in order of its groups, as they were looked at last."""

    parameters: list[Tensor]
    handles: list[Handle | None]  # None: of no compiled model
    engines: "list[Engine]"  # of those models

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Members":
        parameters = list(itertools.chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
        known = _members.get(optimizer)
        if known is not None and columns.same((*parameters, *columns.handles_of(parameters)), (*known.parameters, *known.handles)):
            return known
        handles = [handle_of(parameter) for parameter in parameters]
        found = cls(parameters, handles, list(dict.fromkeys(handle.engine for handle in handles if handle is not None)))
        _members[optimizer] = found
        return found


_PARAMS, _NAME = operator.itemgetter("params"), operator.attrgetter("name")

_members: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Members]" = weakref.WeakKeyDictionary()


def parameter_names(engine: "Engine", optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], int]:
    """The names of an optimizer's parameters in order of its groups, and how many of them are none of the compiled model's."""
    members = Members.of(optimizer)
    own = members.handles if None not in members.handles and members.engines == [engine] else [handle for handle in members.handles if handle is not None and handle.engine is engine]
    return tuple(map(_NAME, own)), len(members.handles) - len(own)


def bind(engine: "Engine", optimizer: torch.optim.Optimizer) -> Binding:
    """Tie an optimizer to the compiled model whose parameters it holds."""
    binding = Binding(weakref.ref(optimizer), parameter_names(engine, optimizer)[0])
    owner = weakref.ref(engine)

    def fetch(*_):
        if (alive := owner()) is not None and not alive.capturing and not binding.copies:
            alive.fetch_optimizer_state(binding)  # asks for the optimizer

    def forget_state(_optimizer):
        binding.state_on_device, binding.given_out = False, True

    binding.fetch = fetch
    if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # not in wrappers that leave Optimizer.__init__ out, whose steps PyTorch runs
        optimizer.register_state_dict_pre_hook(fetch)
        optimizer.register_load_state_dict_post_hook(forget_state)
    return binding


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Torch calls this among the pre-hooks of all optimizers, before the optimizer's own; they may change gradients, and look at its state: `_run_step` follows the last of them."""
    own = optimizer._optimizer_step_pre_hooks
    own.pop(_LAST, None)
    if Members.of(optimizer).engines:
        own[_LAST] = _run_step


_LAST = -1  # torch counts its own keys up from 0


def _run_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    engines = Members.of(optimizer).engines
    if not engines:
        return None
    closure, plain = _closure_of(optimizer, args, kwargs)
    inside = [engine for engine in engines if engine.capturing]
    if any(_is_being_captured(engine) for engine in inside):
        raise CaptureError(f"the model's forward calls {type(optimizer).__name__}.step(), which changes the model while its call is captured")
    wrapped = next(iter(inner_optimizers(optimizer)), None)
    nested = any(engine.runs_within(optimizer) for engine in engines)
    if len(engines) > 1 or inside or nested or wrapped or not plain:
        for engine in engines:
            binding = engine.binding_of(optimizer)
            why = "it holds parameters of several compiled models" if plain else "it evaluates a closure, or takes other arguments"
            why = "the step of another optimizer calls it" if nested else f"it steps another optimizer, its attribute {wrapped!r}" if wrapped else why
            why = "the model's own code calls it" if inside else why
            binding.by_torch = binding.by_torch or why
            if engine.options.max_grad_norm is not None:
                raise LoopError(
                    f"max_grad_norm={engine.options.max_grad_norm} cannot be applied to {type(optimizer).__name__}.step(): {why}; "
                    "leave it out, and clip with torch.nn.utils.clip_grad_norm_ after backward()"
                )
            engine.prepare_torch_step(binding)
        return None
    result = None
    if closure is not None:
        with torch.enable_grad():
            result = closure()
    if not engines[0].step(optimizer):
        return ((args[0],), {}) if closure is None else ((args[0], lambda: result), {})
    if leave_out(optimizer, result):
        return None
    idle = _idle(optimizer)
    return ((idle,), {}) if closure is None else ((idle, lambda: result), {})


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that another one holds, whose step calls theirs (Lookahead, SAM and the like), by the attribute that holds them."""
    values = vars(optimizer).values()
    listed = itertools.chain.from_iterable(itertools.compress(values, map(isinstance, values, itertools.repeat((list, tuple)))))
    if not any(map(isinstance, itertools.chain(values, listed), itertools.repeat(torch.optim.Optimizer))):
        return {}
    held = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in vars(optimizer).items()}
    return {name: inner for name, values in held.items() for inner in values if isinstance(inner, torch.optim.Optimizer)}


def _is_being_captured(engine: "Engine") -> bool:
    """Whether the model's modules hold stand-ins of its parameters now."""
    held = dict(engine.model.named_parameters(remove_duplicate=False))
    return any(held.get(name) is not handle.tensor for name, handle in engine.handles.items() if handle.kind is Kind.PARAM)


def _closure_of(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[Callable | None, bool]:
    """The closure that a step was given, and whether the step is known to evaluate it once, first, and to take nothing else."""
    if len(args) == 1 and not kwargs:
        return None, True
    rest = {name: value for name, value in kwargs.items() if name != "closure" and value is not None}
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None and not rest and all(argument is None for argument in args[2:]):
        return None, True
    evaluates_once = is_separable(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)
    return closure, evaluates_once and not rest and len(args) <= 2 and callable(closure)


def _idle(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer without parameters, for a step whose work is done."""
    idle = object.__new__(type(optimizer))
    vars(idle).update(vars(optimizer))
    idle.param_groups = [] if is_separable(optimizer) else [{**group, "params": []} for group in optimizer.param_groups]
    idle.state = collections.defaultdict(dict)
    return idle


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    optimizer._optimizer_step_pre_hooks.pop(_LAST, None)
    for engine in _members[optimizer].engines if optimizer in _members else ():
        engine.torch_steps.discard(id(optimizer))
        engine.verifier.end_of_step()
        for observer in list(engine.execution.observers):
            observer.stepped()
