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
    mode: tuple  # every module and whether it trains, and of every parameter requires_grad and hooks
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
            args, kwargs = as_numbers(args, kwargs, engine.guards.asked)
            given = engine.guards.given(written.before | inputs, (*written.tensors, *written.others, *written.numbers), written.values)
            with engine.direct_calls(), engine.guards.caches_kept(), engine.guards.as_held(written.held), given, self._constants():
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


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
