"""``optimizer.step()`` runs the compiled step: torch's own hooks, and the state that the optimizer seems to hold.

The pre-hook of ``step`` runs the program and hides the gradients, so torch's own update, which comes next, finds none
and does nothing. The optimizer's state lives on the devices; ``state_dict()`` brings it to the host first, and
``load_state_dict()`` makes the next step upload it again.
"""

import dataclasses
import typing
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphacc.errors import LoopError
from graphacc.loop.managed import handle_of

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

_hooks_installed = False


@dataclasses.dataclass
class Binding:
    """One optimizer of a compiled model."""

    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]  # of its parameters, in order of the groups
    dynamic: frozenset[str] = frozenset()  # numbers of the groups, besides lr, that were seen to change
    state_on_device: bool = False
    statics: dict[str, object] = dataclasses.field(default_factory=dict)

    def key(self) -> tuple:
        """Identity of the update that the optimizer does: its class, its parameters and its static settings."""
        return (id(self.optimizer), type(self.optimizer), self.names, self.dynamic, tuple(sorted((k, repr(v)) for k, v in self.settings().items())))

    def settings(self) -> dict[str, object]:
        """Every static setting of the groups, "<group>/<name>" -> value; tuples are spread out as "<name>.<i>"."""
        found = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for name in self.optimizer.defaults.keys() - {"lr"}:
                value = group[name]
                items = {f"{name}.{i}": v for i, v in enumerate(value)} if isinstance(value, (tuple, list)) else {name: value}
                found |= {f"{index}/{key}": v for key, v in items.items() if f"{index}/{key}" not in self.dynamic}
        return found

    def note_changes(self) -> list[str]:
        """Make every number that changed since the last call an input of the program; returns their names."""
        settings = self.settings()
        changed = [
            name for name, value in settings.items() if name in self.statics and value != self.statics[name] and isinstance(value, float)
        ]
        self.dynamic |= frozenset(changed)
        self.statics = self.settings()
        return changed


def install_hooks() -> None:
    """Register the global step hooks with torch, once per process."""
    global _hooks_installed
    if not _hooks_installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _hooks_installed = True


def parameter_names(engine: "Engine", optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of an optimizer's parameters, in order of its groups.

    Raises:
        LoopError: it holds a parameter that is none of the compiled model's.
    """
    names = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            handle = handle_of(parameter)
            if handle is None or handle.engine is not engine:
                raise LoopError(
                    f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that does not belong to the compiled model: "
                    "give each compiled model an optimizer of its own, made from its model.parameters()"
                )
            names.append(handle.name)
    return tuple(names)


def bind(engine: "Engine", optimizer: torch.optim.Optimizer) -> Binding:
    """Tie an optimizer to the compiled model whose parameters it holds; raises as `parameter_names`."""
    binding = Binding(optimizer, parameter_names(engine, optimizer))
    owner = weakref.ref(engine)

    def fetch_state(_optimizer):
        if (alive := owner()) is not None:
            alive.fetch_optimizer_state(binding)

    def forget_state(_optimizer):
        binding.state_on_device = False

    optimizer.register_state_dict_pre_hook(fetch_state)
    optimizer.register_load_state_dict_post_hook(forget_state)
    return binding


def _engine_of(optimizer: torch.optim.Optimizer) -> "Engine | None":
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (handle := handle_of(parameter)) is not None:
                return handle.engine
    return None


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    engine = _engine_of(optimizer)
    if engine is None:
        return
    if any(argument is not None for argument in [*args[1:], *kwargs.values()]):  # args[0] is the optimizer
        raise LoopError(
            f"{type(optimizer).__name__}.step(closure) cannot be compiled: the closure would run the model again inside the step; "
            "call backward() and then step() without a closure"
        )
    engine.step(optimizer)
    engine.hide_gradients = True


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    engine = _engine_of(optimizer)
    if engine is not None:
        engine.hide_gradients = False
