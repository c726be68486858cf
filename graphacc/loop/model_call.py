"""A call of the model, as a function on a recording."""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from graphacc.capture.borrow import TensorsNow
from graphacc.errors import LoopError
from graphacc.loop.given_numbers import as_numbers, given_back
from graphacc.loop.structure import code_of
from graphacc.loop.written import Written

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """The model as a recorded function; equal where the same code would run."""

    engine: "Engine" = dataclasses.field(compare=False, repr=False)
    mode: tuple  # every module and whether it trains, of every parameter requires_grad and hooks, the modules' code, and `Structure.places`
    state: int  # of the Python state that earlier captures have read
    inputs: tuple[str, ...]  # attributes of modules that are inputs: tensors, and numbers that change
    decided: tuple[bool | None, ...] = ()  # by comparisons of numbers that are inputs, arguments among them
    answers: tuple = ()  # that its code got to questions for values of the batch
    path: str = ""  # of the submodule that is called; the model itself
    form: int = 0  # `Engine.form`
    written: Written = dataclasses.field(default=Written(), compare=False, repr=False)  # by a call with certain arguments

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mode, self.state, self.inputs, self.decided, self.answers, self.path, self.form))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, inputs: dict[str, Tensor], args: tuple, kwargs: dict):
        """Call the model in the mode in which the loop called it, which may be another by now.

        Returns:
            What it returns, the tensors that it left in attributes of its modules, and the arguments, if it has changed lists or dicts among them.
        """
        engine = self.engine
        modules = [module for module, _ in self.mode[0]]
        if code_of(modules) != self.mode[2]:
            raise LoopError(
                "the class of a module, or the forward of one, was exchanged between a call of the model and its backward(), and the recorded call is compiled only then: "
                "exchange it before the call or after the step"
            )
        now = [module.training for module in modules]
        try:
            _set_training(modules, [training for _, training in self.mode[0]])
            written = self.written
            given = engine.guards.given(written.before | inputs, (*written.tensors, *written.others, *written.numbers), written.values)
            with engine.direct_calls(), engine.guards.caches_kept(), engine.guards.as_held(written.held), given, self._constants(), engine.guards.types:
                args, kwargs = as_numbers(args, kwargs, engine.guards.asked)
                result = engine.model.get_submodule(self.path)(*args, **kwargs)
                return result, engine.guards.read(written.tensors), given_back((args, kwargs)) if written.fills else ()
        finally:
            _set_training(modules, now)

    @contextlib.contextmanager
    def _constants(self) -> Iterator[None]:
        """Parameters that took no gradient when the loop called the model, and take one by now, are constants inside."""
        now, places, flags = TensorsNow(self.engine.model), [], self.mode[1]
        handles = list(self.engine.handles.values())
        for handle, flag in zip(handles, flags) if len(handles) == len(flags) else ():
            tensor = now.get(handle.name)
            if tensor is not None and tensor.requires_grad and not (flag[0] if isinstance(flag, tuple) else flag):
                constant = tensor.detach()
                tables = (module._parameters for module in self.engine.model.modules())
                places += [(table, name, tensor, constant) for table in tables for name, held in table.items() if held is tensor]
        for table, name, _, constant in places:
            table[name] = typing.cast(nn.Parameter, constant)
        try:
            yield
        finally:
            for table, name, tensor, constant in places:
                if table.get(name) is constant:
                    table[name] = typing.cast(nn.Parameter, tensor)


class RecordedCode(tuple):
    """What tells the code of programs apart: (its `Identity`, ...)."""

    def differences(self, before: object) -> list[str]:
        """What is not as it was in the calls of the model, in words."""
        calls, others = _calls(self), _calls(before)
        models, earlier = ([call[0] for call in recorded if isinstance(call[0], ModelCall)] for recorded in (calls, others))
        if not calls or not others or calls == others:
            return []
        if len(models) != len(earlier):
            return ["other calls of the model"]
        found: dict[str, None] = {}
        for call, other in zip(models, earlier):
            found |= dict.fromkeys(_differences(call, other))
        for (function, leaves, *_), (before_it, earlier_leaves, *_) in zip(calls, others):
            if isinstance(function, ModelCall) == isinstance(before_it, ModelCall) and len(leaves) == len(earlier_leaves):
                name = getattr(function, "__name__", "the model")
                constants = [(old, new) for (_, old), (_, new) in zip(earlier_leaves, leaves) if old != new and isinstance(new, _SHOWN) and isinstance(old, _SHOWN)]
                found |= dict.fromkeys(f"an argument of {name}: {old!r} -> {new!r}" for old, new in constants)
        return list(found) or ["other functions of the loop, or other arguments"]


_SHOWN = (int, float, str, type(None))


def _calls(code: object) -> list[tuple]:
    recorded = getattr(code[0], "value", ()) if isinstance(code, RecordedCode) else ()
    return [call for call in recorded if isinstance(call, tuple) and len(call) > 2 and callable(call[0])]


def _differences(call: "ModelCall", before: "ModelCall") -> Iterator[str]:
    trains, trained = (dict(each.mode[0]) for each in (call, before))
    if switched := [module for module in trains if module in trained and trains[module] != trained[module]]:
        yield f"{'train' if trains[switched[0]] else 'eval'}() of {len(switched)} module(s)"
    if call.mode[1] != before.mode[1]:
        yield "requires_grad or hooks of parameters"
    if trains.keys() != trained.keys() or call.mode[2:] != before.mode[2:]:
        yield "the modules, their classes, or what they hold"
    if call.state != before.state:
        yield from call.engine.guards.changes.get(call.state) or ["Python state that the model reads"]
    if new := [label for label in call.inputs if label not in before.inputs]:
        yield f"{', '.join(new)} became an input"
    elif call.decided != before.decided:
        yield "a decision by a number"
    if call.answers != before.answers:
        yield "answers that its code gets about the batch"


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
