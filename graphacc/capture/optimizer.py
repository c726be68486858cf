"""What a torch optimizer is made of, for capture: its members, its hyperparameters, its step and its initial state.

Nothing here changes the optimizer: a stand-in of the same class, with parameter groups, parameters and state of our own, runs its
code. An optimizer that cannot be traced itself may define ``functional_equivalent()``, which returns an
optimizer class that does the same to the same parameter groups and state (CPUAdam names torch.optim.Adam).
"""

import collections
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from graphacc._compat.random_state import kept_random_state
from graphacc._compat.torch_ import fake_mode
from graphacc.capture.borrow import distinct_parameters
from graphacc.capture.diagnose import explained
from graphacc.capture.python_state import CONSUMED, contents_of, leaves_of, refill, snapshot
from graphacc.errors import CaptureError

_PLAIN_PATH = {"foreach": False, "fused": False, "differentiable": False, "capturable": False}
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

ELEMENTWISE = (optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop)
"""Optimizers whose update of an element depends on that element alone, so that a block can be updated without the others."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A parameter that the optimizer updates."""

    name: str  # first name in the model
    parameter: Tensor
    group: int  # index of its parameter group


def members(model: nn.Module, optimizer: Optimizer, grads: Iterable[str]) -> list[Member]:
    """The optimizer's parameters that have a gradient, in its own order.

    Raises:
        CaptureError: the optimizer holds a parameter that is none of the model's.
    """
    names = {id(item.tensor): item.name for item in distinct_parameters(model)}
    wanted = set(grads)
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise CaptureError(
                    f"parameter {position} of group {index} of {type(optimizer).__name__}, of shape {list(parameter.shape)}, "
                    f"is no parameter "
                    f"of {type(model).__name__}: build the optimizer from model.parameters(), or make the module that owns it "
                    f"a submodule"
                )
            if name in wanted:
                found.append(Member(name, parameter, index))
    return found


def hyperparameters(optimizer: Optimizer, dynamic: Iterable[str] = ()) -> dict[str, float]:
    """The numbers that an update graph takes as HYPER inputs, with their values right now.

    Args:
        dynamic: further ones besides every group's learning rate, as ``"<group>/<name>"``, or
            ``"<group>/<name>.<index>"`` for an element of a tuple: ``"0/weight_decay"``, ``"0/betas.0"``.

    Raises:
        CaptureError: `dynamic` names no number of the optimizer.
    """
    names = {f"{index}/lr": None for index, group in enumerate(optimizer.param_groups) if "lr" in group}
    return {name: _number(optimizer, name) for name in [*names, *sorted(set(dynamic) - set(names))]}


def _number(optimizer: Optimizer, name: str) -> float:
    index, _, path = name.partition("/")
    key, _, position = path.partition(".")
    try:
        value = optimizer.param_groups[int(index)][key]
        return float(value[int(position)] if position else value)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CaptureError(
            f"{name!r} is no number of a parameter group of {type(optimizer).__name__}: write '<group>/<name>' or "
            f"'<group>/<name>.<index>'"
        ) from error


def with_numbers(group: dict, index: int, numbers: dict[str, object]) -> dict:
    """A copy of a parameter group in which `numbers` (as in `hyperparameters`) take the place of its own."""
    result = dict(group)
    for name, value in numbers.items():
        group_index, _, path = name.partition("/")
        key, _, position = path.partition(".")
        if int(group_index) != index:
            continue
        if position:
            items = list(result[key])
            items[int(position)] = value
            result[key] = tuple(items)
        else:
            result[key] = value
    return result


def _stepping_class(optimizer: Optimizer) -> type[Optimizer]:
    equivalent = getattr(optimizer, "functional_equivalent", None)
    return type(optimizer) if equivalent is None else equivalent()


def steps_like(optimizer: Optimizer, classes: Iterable[type[Optimizer]]) -> bool:
    """Whether an optimizer's step is that of one of these classes."""
    return inspect.unwrap(_stepping_class(optimizer).step) in {inspect.unwrap(known.step) for known in classes}


def traceable_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class whose ``step`` is traced in the place of the optimizer's.

    Raises:
        CaptureError: a step of that kind cannot be part of a captured step.
    """
    found = _stepping_class(optimizer)
    if issubclass(found, torch.optim.SparseAdam):
        raise CaptureError(
            "SparseAdam works on sparse gradients, which a captured step does not have: use torch.optim.Adam, or Adagrad"
        )
    closure = _parameters(found.step).get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"{found.__name__}.step() needs a closure that evaluates the model again, several times per step, which a "
            f"captured step does "
            "not do: use an optimizer whose step() takes no closure, such as torch.optim.AdamW"
        )
    return found


@functools.cache
def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def kind_of_optimizer(optimizer: Optimizer) -> str:
    """What says whether one optimizer's state means the same to another: the class of torch.optim that it derives from, else its own; Adam with decoupled weight decay is AdamW."""
    if isinstance(getattr(type(optimizer), "state", None), property):  # a wrapper that shows another optimizer's
        inner = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
        if inner is not None:
            return kind_of_optimizer(inner)
    found = getattr(optimizer, "functional_equivalent", lambda: type(optimizer))()
    found = next((cls for cls in found.__mro__ if cls.__module__.startswith("torch.optim.") and cls is not Optimizer), found)
    decoupled = found is torch.optim.Adam and optimizer.defaults.get("decoupled_weight_decay")
    return "AdamW" if decoupled else found.__qualname__


def stand_in(optimizer: Optimizer, groups: list[dict], state: dict[Tensor, dict]) -> Optimizer:
    """An optimizer of the traceable class with other groups and state; hooks and patched methods are left behind."""
    double = object.__new__(traceable_class(optimizer))
    vars(double).update({name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")})
    vars(double).update({name: collections.OrderedDict() for name in _HOOKS})
    double.param_groups = groups
    double.state = collections.defaultdict(dict, state) if is_separable(optimizer) else _OwnEntries(dict, state)
    return double


class _OwnEntries(collections.defaultdict):
    """The state of an optimizer's stand-in, which has some of the parameters: an entry can be looked up, and the whole cannot be looked through."""

    def _whole(self, *args, **kwargs):
        raise CaptureError("the optimizer's step looks through the whole of self.state, of which a captured step makes the entries one by one: read self.state[parameter] alone")

    __len__ = __iter__ = __bool__ = keys = values = items = _whole


def plain(group: dict, *, capturable: bool = False) -> dict:
    """A copy of a group that takes the single-tensor path; the mathematics of the fused and foreach paths is the same."""
    flags = _PLAIN_PATH | {"capturable": capturable}
    return {**group, **{name: value for name, value in flags.items() if name in group}}


def check_python_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps tensors, or what is used up, elsewhere than in the state of its parameters.

    Raises:
        CaptureError: names where.
    """
    if is_separable(optimizer):
        return
    name = type(optimizer).__name__
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if others := [key for key in dict.keys(optimizer.state) if id(key) not in parameters]:
        raise CaptureError(f"{name} keeps state under {others[0]!r}, which is none of its parameters: a captured step keeps state of parameters alone")
    for place, value in _python_values(optimizer).items():
        for leaf in leaves_of([value]):
            if isinstance(leaf, CONSUMED):
                raise CaptureError(f"{name} has a {type(leaf).__name__}, {place}, which gives something else in every step, where a captured step would repeat what it gave first")
            if (isinstance(leaf, Tensor) and not place.endswith("['lr']")) or (type(leaf) is int and leaf in parameters):
                raise CaptureError(f"{name} keeps a tensor, or a parameter or its id, in {place}: a captured step runs on stand-ins, and keeps tensors in self.state[parameter] alone")


def _python_values(optimizer: Optimizer) -> dict[str, object]:
    """What the code of a step can read and write besides parameters and their state, by where it is."""
    found = {f"self.{name}": value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "step", "zero_grad", *_HOOKS)}
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"self.param_groups[{index}][{name!r}]": value for name, value in group.items() if name != "params"}
        for number, parameter in enumerate(group["params"]):
            found |= {f"{name} of parameter {number} of group {index}": value for name, value in attributes_of(parameter).items()}
    return found


def attributes_of(parameter: Tensor) -> dict[str, object]:
    """The attributes that the user's code has given to a parameter."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_graphacc")}


def run_step(double: Optimizer) -> None:
    """The step of an optimizer's class, as `_own_step` runs it.

    Raises:
        CaptureError: it writes what is not in the state of its parameters, and has what it was before.
    """
    if is_separable(double):
        _own_step(double)
        return
    parameters = {id(parameter): parameter.grad for group in double.param_groups for parameter in group["params"]}
    values = _python_values(double)
    before = {place: snapshot(value) for place, value in values.items()}
    contents = list(contents_of(values.values()))
    try:
        returned = _own_step(double)
        after = _python_values(double)
        changed = [place for place in before.keys() | after.keys() if place not in after or before.get(place) != snapshot(after[place])]
        changed += [f"self.state[{key!r}]" for key in dict.keys(double.state) if id(key) not in parameters]
        replaced = any(parameter.grad is not parameters[id(parameter)] for group in double.param_groups for parameter in group["params"])
    finally:
        for container, content in contents:
            refill(container, content)
    if replaced or returned is not None:
        what = f"returns a {type(returned).__name__}" if returned is not None else "replaces the gradient of a parameter"
        raise CaptureError(f"{type(double).__name__}.step() {what}, which a captured step does not do")
    if changed:
        raise CaptureError(
            f"{type(double).__name__}.step() changes {', '.join(sorted(changed))}, which the captured step would hold at its present value: keep what changes in "
            "self.state[parameter]"
        )


def _own_step(double: Optimizer) -> object:
    """The class's own ``step``, without the profiler's wrapper and its hooks."""
    step = type(double).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    with torch.no_grad():
        return step(double)


def init_optimizer_state(model: nn.Module, optimizer: Optimizer, grads: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The state that the optimizer's first step would start from: what exists already, else what it would create; made parameter by parameter.

    What it draws at random is drawn from PyTorch's generator, as in its own first step. Numbers in the state become float64 0-d
    tensors. A tensor whose first value is the first gradient itself (SGD's momentum buffer with dampening) starts as the NaN that
    `is_absent` knows, which an update graph takes for "not yet there".

    Args:
        grads: names of the parameters that have a gradient.

    Yields:
        Parameter name, and key -> tensor; what existed is given by reference.

    Raises:
        CaptureError: the state holds what is neither a tensor nor a number, or the optimizer is not supported.
    """
    found = members(model, optimizer, grads)
    absent = {member.name: member for member in found if not optimizer.state.get(member.parameter)}
    with kept_random_state():
        lazy = lazy_keys(optimizer, list(absent.values()))
    drawn_before = torch.get_rng_state()
    try:
        for member in found:
            if member.name not in absent:
                yield member.name, _tensors(optimizer, optimizer.state[member.parameter])
                continue
            created = _created_state(optimizer, member, member.parameter)
            yield member.name, created | {key: _absent_like(created[key]) for key in lazy.get(member.name, ())}
    except CaptureError:
        torch.set_rng_state(drawn_before)  # PyTorch's own step draws them
        raise


_ABSENT = {
    torch.float64: (torch.int64, 0x7FF8_0000_4741_4343),
    torch.float32: (torch.int32, 0x7FC0_4743),
    torch.bfloat16: (torch.int16, 0x7FEB),
    torch.float16: (torch.int16, 0x7EEB),
}
"""Dtype -> the bits of a NaN that no arithmetic makes, as integers of this dtype: it stands for state that is not yet there."""


def _absent_like(tensor: Tensor) -> Tensor:
    marked = torch.empty_like(tensor)
    plain = torch.view_as_real(marked) if marked.is_complex() else marked
    integers, bits = _ABSENT[plain.dtype]
    plain.view(integers).fill_(bits)
    return marked


def is_absent(state: Tensor) -> Tensor:
    """Which elements stand for state that is not yet there; a NaN that training has made is none of them."""
    if state.is_complex():
        return is_absent(torch.view_as_real(state)[..., 0])
    if state.dtype not in _ABSENT:
        return torch.zeros_like(state, dtype=torch.bool)
    integers, bits = _ABSENT[state.dtype]
    return state.view(integers) == bits


def state_layouts(optimizer: Optimizer, found: Sequence[Member]) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> its `state_layout`. What does not exist yet is asked of the optimizer once for each group and form of a parameter, which is all that it is told."""
    known: dict[tuple, dict[str, Tensor]] = {}
    layouts: dict[str, dict[str, Tensor]] = {}
    for member in found:
        parameter = member.parameter
        form = member.group, tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.requires_grad, snapshot(attributes_of(parameter))
        if optimizer.state.get(parameter):
            layouts[member.name] = state_layout(optimizer, member)
        else:
            if form not in known:
                known[form] = state_layout(optimizer, member)
            layouts[member.name] = known[form]
    return layouts


def state_layout(optimizer: Optimizer, member: Member) -> dict[str, Tensor]:
    """Tensors with the shapes and dtypes of `init_optimizer_state`, without data where the optimizer allows."""
    if optimizer.state.get(member.parameter):
        return _tensors(optimizer, optimizer.state[member.parameter])
    if _prepares_group(traceable_class(optimizer)):
        with fake_mode():
            return _created_state(optimizer, member, torch.empty_like(member.parameter, device="cpu"))
    return _created_state(optimizer, member, torch.zeros_like(member.parameter, device="cpu"))  # its own memory may be on the devices alone


def lazy_keys(optimizer: Optimizer, found: Sequence[Member]) -> dict[str, list[str]]:
    """Parameter name -> keys of state that a first step makes out of the gradient, where zeros cannot stand for them.

    Decided on a toy parameter for each group, number of dims and attributes; names without such keys are left out.
    """
    if _prepares_group(traceable_class(optimizer)):
        return {}
    decided: dict[tuple, list[str]] = {}
    keys: dict[str, list[str]] = {}
    for member in found:
        kind = member.group, member.parameter.dim(), snapshot(attributes_of(member.parameter))
        if kind not in decided:
            with explained(f"the optimizer {type(optimizer).__name__}"):
                decided[kind] = _lazy_keys_of_toy(optimizer, member)
        if decided[kind]:
            keys[member.name] = decided[kind]
    return keys


def _lazy_keys_of_toy(optimizer: Optimizer, member: Member) -> list[str]:
    """Empty where a first step is the same as a step from the state that is made for it."""
    toy = torch.ones([2] * member.parameter.dim())
    grad = torch.arange(1.0, toy.numel() + 1).reshape(toy.shape)
    first_step = _eager_step(optimizer, member, toy, grad, {})
    made = _eager_step(optimizer, member, toy, torch.zeros_like(toy), {}).first
    other_first = [key for key, value in made.items() if isinstance(value, Tensor) and not torch.equal(value, first_step.first[key])]
    if _equal_steps(first_step, _eager_step(optimizer, member, toy, grad, _copies(made))):
        return []
    keys = other_first or [key for key, value in made.items() if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_floating_point())][:1]
    if not keys:
        raise CaptureError(f"the first step of {type(optimizer).__name__} differs from the later ones, and no number in its state can tell them apart")
    return keys


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a step has made of one parameter."""

    value: Tensor
    first: dict  # the first value of every key of its state
    state: dict


def _copies(state: Mapping[str, object]) -> dict:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _equal_steps(one: _Step, other: _Step) -> bool:
    pairs = [(one.value, other.value), *((value, other.state.get(key)) for key, value in one.state.items())]
    kinds = one.state.keys() == other.state.keys() and all(isinstance(a, Tensor) == isinstance(b, Tensor) for a, b in pairs)
    return kinds and all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _created_state(optimizer: Optimizer, member: Member, parameter: Tensor) -> dict[str, Tensor]:
    if _prepares_group(traceable_class(optimizer)):
        state = _prepared(optimizer, member.group, torch.empty_like(parameter).detach())  # they look at shape and dtype alone
    else:
        with explained(f"the optimizer {type(optimizer).__name__}"):
            state = _eager_step(optimizer, member, parameter.detach(), torch.zeros_like(parameter), {}).first
    return _tensors(optimizer, state)


def _prepares_group(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class creates all state in ``_init_group``, as torch's own do but SGD."""
    return hasattr(optimizer_class, "_init_group") and _is_torchs_own(optimizer_class) and not issubclass(optimizer_class, torch.optim.SGD)


def is_separable(optimizer: Optimizer) -> bool:
    """Whether every parameter is updated by itself, as torch's own optimizers do on their single-tensor path."""
    return _is_torchs_own(getattr(optimizer, "functional_equivalent", lambda: type(optimizer))())


@functools.cache
def _is_torchs_own(cls: type[Optimizer]) -> bool:
    return inspect.unwrap(cls.step).__module__.startswith("torch.optim.")


def _prepared(optimizer: Optimizer, index: int, parameter: Tensor) -> dict:
    parameter.grad = torch.zeros_like(parameter)
    group = plain(optimizer.param_groups[index]) | {"params": [parameter]}
    double = stand_in(optimizer, [group], {})
    lists = [[] for _ in list(_parameters(type(double)._init_group))[2:]]
    with torch.no_grad():
        double._init_group(group, *lists)
    return dict(double.state[parameter])


class _FirstValues(dict):
    """A state dict that remembers a copy of the first value of every key."""

    def __init__(self, content: dict):
        super().__init__(content)
        self.first: dict = {}

    def __setitem__(self, key, value):
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args, **kwargs):
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _eager_step(optimizer: Optimizer, member: Member, value: Tensor, grad: Tensor, state: dict) -> _Step:
    """One real step on a copy of `value`, as if it were the member's."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = grad
    vars(parameter).update(attributes_of(member.parameter))
    recorded = _FirstValues(state)
    group = plain(optimizer.param_groups[member.group]) | {"params": [parameter]}
    double = stand_in(optimizer, [group], {parameter: recorded})
    run_step(double)
    return _Step(parameter.detach(), recorded.first, double.state[parameter])


_kinds: weakref.WeakKeyDictionary[Optimizer, dict[str, type]] = weakref.WeakKeyDictionary()


def kind_of_state(optimizer: Optimizer, key: str) -> type | None:
    """The type of what the optimizer keeps under a name, where a capture has seen it."""
    return _kinds.get(optimizer, {}).get(key)


def kinds_of_state(optimizer: Optimizer) -> dict[str, str]:
    """`kind_of_state` of everything that a capture has seen, as JSON can hold it: "int", "float" or "tensor"."""
    return {key: "tensor" if issubclass(kind, Tensor) else "float" if issubclass(kind, float) else "int" for key, kind in _kinds.get(optimizer, {}).items()}


def note_kinds_of_state(optimizer: Optimizer, kinds: Mapping[str, str]) -> None:
    """`kind_of_state` as another optimizer of the class has seen it, whose state this one takes over."""
    types = {"int": int, "float": float, "tensor": Tensor}
    _kinds.setdefault(optimizer, {}).update({key: types[kind] for key, kind in kinds.items()})


def _tensors(optimizer: Optimizer, state: dict) -> dict[str, Tensor]:
    """State values as tensors; None entries are dropped, as an optimizer treats them like absent ones."""
    _kinds.setdefault(optimizer, {}).update({key: type(value) for key, value in state.items() if value is not None})
    return {key: _as_tensor(optimizer, key, value) for key, value in state.items() if value is not None}


def _as_tensor(optimizer: Optimizer, key: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    raise CaptureError(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} as state {key!r}: a captured step holds tensors and "
        f"numbers as state"
    )
