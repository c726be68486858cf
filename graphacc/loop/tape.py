"""The tape: what the user's loop did with a model's results, as data that can be replayed inside a captured graph.

A tape begins with a call of the model. Each torch function on its promises adds a `Call`; ``loss.backward()`` splits it
in a forward part and a part on gradients, and ``optimizer.step()`` closes it. Tensors that come from outside (the
batch, labels) are its externals; they become inputs of the captured graph.
"""

import dataclasses
import enum
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.errors import LoopError
from graphacc.loop.managed import handle_of
from graphacc.loop.promise import Promise

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value of the tape."""

    index: int


@dataclasses.dataclass(frozen=True)
class External:
    """A tensor from outside the tape."""

    index: int


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter or buffer of the model, used outside of the model's own call."""

    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """One recorded function call; tensors among its leaves are `Ref`, `External` or `Param`."""

    function: Callable  # a torch function, or the model
    leaves: tuple  # flattened (args, kwargs)
    spec: pytree.TreeSpec
    results: tuple[int, ...]  # value index of every tensor in the result, in pytree order
    result_leaves: tuple  # the flattened result: a Ref for a tensor, the object itself otherwise
    result_spec: pytree.TreeSpec
    grad_enabled: bool  # recorded outside of torch.no_grad()


class Tape:
    """A recording of one part of the user's loop: forward calls, at most one backward, and gradient code."""

    def __init__(self, engine: "Engine", counter: int):
        self.engine = engine
        self.counter = counter  # of the random key that every program made from this tape uses
        self.calls: list[Call] = []
        self.values: list[Tensor] = []  # fake tensors
        self.promises: dict[int, weakref.ref] = {}
        self.externals: list[Tensor] = []  # of the whole batch's shape; stand-ins where the loop gave this process's part
        self.sources: list[Tensor] = []  # what the loop gave
        self.external_paths: list[str] = []
        self.external_versions: list[int] = []  # version counters when they were recorded
        self.parameter_versions: dict[str, int] = {}  # version counters of the host copies when the tape began
        self.backward_at: int | None = None  # number of calls before backward
        self.loss: int | None = None  # value index of the loss
        self.grad_values: dict[str, int] = {}  # parameter name -> value index of the gradient that backward gave
        self.grad_bindings: dict[str, int] = {}  # parameter name -> value index of its .grad now
        self.outputs: list[int] = []  # value indices, other than the loss, that the loop held at backward
        self.has_run = False  # a program gave the loss, the outputs and the gradients
        self.closed = False
        self._concrete: dict[int, Tensor | Callable[[], Tensor]] = {}

    # ---- recording

    def record(self, function: Callable, args: tuple, kwargs: dict):
        """Add a call, unless it neither makes nor changes a tensor; returns its result with promises for tensors."""
        _refuse_autocast(function)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        refs = tuple(self._to_ref(leaf, function, args, kwargs) for leaf in leaves)
        remembered = self._remembered(function, refs, spec)
        if remembered is None:
            call = self._infer(function, refs, spec)
            if isinstance(call, _Plain):
                return call.result
        else:
            call = remembered
            self.values.extend(self.engine.template.values[len(self.values) : max(call.results, default=-1) + 1])
        self.calls.append(call)
        results = [self.promise(leaf.index) if isinstance(leaf, Ref) else leaf for leaf in call.result_leaves]
        return pytree.tree_unflatten(results, call.result_spec)

    def promise(self, index: int) -> Promise:
        """The promise of a value: the living one if the loop holds it, else a new one."""
        existing = self.promises.get(index)
        alive = existing() if existing is not None else None
        return Promise(self, index) if alive is None else alive

    def add_value(self, fake: Tensor) -> int:
        self.values.append(fake)
        return len(self.values) - 1

    def _to_ref(self, leaf, function: Callable, args: tuple, kwargs: dict):
        if isinstance(leaf, Promise):
            if leaf.tape is self:
                return Ref(leaf.index)
            leaf = leaf.tape.value(leaf.index)
        if not isinstance(leaf, Tensor):
            return _static(leaf, function, args, kwargs)
        if (handle := handle_of(leaf)) is not None:
            if handle.engine is not self.engine:
                raise LoopError(f"parameter {handle.name!r} belongs to another compiled model: compile one module that holds both")
            return Param(handle.name)
        path = f"{_name(function)}.{_path_of(leaf, args, kwargs)}"
        if leaf.requires_grad and torch.is_grad_enabled() and self.backward_at is None:
            raise LoopError(
                f"{path}: a tensor of shape {list(leaf.shape)} requires grad but belongs to no compiled module, so its gradient "
                "would be lost: compile one module that holds it, or detach() it. If it was computed from the model with a shape that "
                "depends on values, such as x[mask], keep the shape fixed: ignore_index, torch.where(mask, x, 0), or x * mask"
            )
        for index, known in enumerate(self.sources):
            if known is leaf:
                return External(index)
        path = f"{len(self.calls)}.{path}" if self.calls else path
        self.sources.append(leaf)
        self.externals.append(self.engine.programs.stand_in(path, leaf) if self.backward_at is None else leaf)
        self.external_versions.append(leaf._version)
        self.external_paths.append(path)
        return External(len(self.externals) - 1)

    def _remembered(self, function: Callable, refs: tuple, spec: pytree.TreeSpec) -> Call | None:
        """The call at this place of the last tape, if all calls so far, and this one, were the same there."""
        template = self.engine.template
        place = len(self.calls)
        if template is None or template is self or place >= len(template.calls) or not self._follows(template):
            return None
        call = template.calls[place]
        if call.grad_enabled != torch.is_grad_enabled() or call.function != function or call.spec != spec or _hashable(call.leaves) != _hashable(refs):
            return None
        same = all(
            self.external_key(ref.index) == template.external_key(ref.index) for ref in refs if isinstance(ref, External)
        )
        return call if same else None

    def _follows(self, template: "Tape") -> bool:
        if self.backward_at is not None and self.backward_at != template.backward_at:
            return False
        return not self.calls or self.calls[-1] is template.calls[len(self.calls) - 1]

    def external(self, index: int) -> Tensor:
        """A tensor from outside as the loop gave it, which must still be what it was when it was recorded.

        Raises:
            LoopError: it was written in place since.
        """
        tensor = self.sources[index]
        if tensor._version != self.external_versions[index]:
            raise LoopError(
                f"{self.external_paths[index]} was written in place between its use and optimizer.step(), where the compiled step reads it: "
                "fill the next batch into it after the step, or pass a copy (.clone())"
            )
        return tensor

    def external_key(self, index: int) -> tuple:
        tensor = self.externals[index]
        return tuple(tensor.shape), tensor.dtype

    def _infer(self, function: Callable, refs: tuple, spec: pytree.TreeSpec) -> "Call | _Plain":
        """Run the call on fake tensors."""
        fakes = [self.engine.fake(self._resolve(ref)) if isinstance(ref, (Ref, External, Param)) else ref for ref in refs]
        versions = [fake._version for fake in fakes if isinstance(fake, Tensor)]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        result = self.engine.run_fake(function, args, kwargs)
        leaves, result_spec = pytree.tree_flatten(result)
        mutated = versions != [fake._version for fake in fakes if isinstance(fake, Tensor)]
        if not mutated and not any(isinstance(leaf, Tensor) for leaf in leaves):
            return _Plain(result)
        by_id = {id(fake): i for i, fake in enumerate(self.values)}
        result_leaves, indices = [], []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                index = by_id[id(leaf)] if id(leaf) in by_id else self.add_value(leaf)
                by_id[id(leaf)] = index
                indices.append(index)
                leaf = Ref(index)
            elif not isinstance(leaf, _STATIC):
                leaf = Opaque(type(leaf).__name__)
            result_leaves.append(leaf)
        return Call(function, refs, spec, tuple(indices), tuple(result_leaves), result_spec, torch.is_grad_enabled())

    def _resolve(self, ref: "Ref | External | Param") -> "Tensor | Param":
        if isinstance(ref, Ref):
            return self.values[ref.index]
        return self.externals[ref.index] if isinstance(ref, External) else ref

    # ---- backward and values

    def backward(self, loss: Promise, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """Record ``loss.backward()``."""
        fake = self.values[loss.index]
        if self.backward_at is not None:
            raise LoopError(
                "backward() was called twice on the results of one model call; add the losses and call backward() once, or call the model again"
            )
        if fake.numel() != 1 or gradient is not None:
            raise LoopError(f"backward() needs a scalar loss, got shape {list(fake.shape)}: reduce it with .mean() or .sum() first")
        if not fake.requires_grad:
            raise LoopError("backward(): the loss does not depend on any parameter that requires grad")
        if create_graph or retain_graph or inputs is not None:
            raise LoopError(
                "backward(create_graph=, retain_graph= or inputs=) cannot be recorded: higher-order gradients and a second backward are not "
                "supported by the compiled loop; call plain loss.backward()"
            )
        self.loss = loss.index
        self.backward_at = len(self.calls)
        self.engine.backward(self)

    def live(self) -> list[int]:
        """Value indices, other than the loss, whose promises the user's loop still holds."""
        return sorted(i for i, ref in self.promises.items() if ref() is not None and i != self.loss)

    def fulfil(self, index: int, value: "Tensor | Callable[[], Tensor]") -> None:
        """Give a value its tensor, or a function that fetches it when somebody reads it."""
        self._concrete[index] = value

    def value(self, index: int) -> Tensor:
        """The tensor of a value; runs what is needed."""
        if index not in self._concrete:
            self.engine.materialize(self, index)
        value = self._concrete[index]
        if not isinstance(value, Tensor):
            value = self._concrete[index] = value()
        return value

    def has_value(self, index: int) -> bool:
        return index in self._concrete

    # ---- replay and identity

    def replay(
        self, calls: Sequence[Call], env: dict[int, Tensor], externals: Mapping[int, Tensor], named: Mapping[str, Tensor]
    ) -> None:
        """Run recorded calls on tensors, real or traced.

        Args:
            env: value index -> tensor; receives the results.
            externals: external index -> tensor.
            named: name of a parameter or buffer -> tensor.
        """

        def resolve(leaf):
            if isinstance(leaf, Ref):
                return env[leaf.index]
            if isinstance(leaf, External):
                return externals[leaf.index]
            return named[leaf.name] if isinstance(leaf, Param) else leaf

        for call in calls:
            args, kwargs = pytree.tree_unflatten([resolve(leaf) for leaf in call.leaves], call.spec)
            with torch.set_grad_enabled(call.grad_enabled and torch.is_grad_enabled()):
                result = call.function(*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            assert len(tensors) == len(call.results), f"replaying {_name(call.function)} gave {len(tensors)} tensors, {len(call.results)} were recorded"
            env.update(zip(call.results, tensors))

    @property
    def forward_calls(self) -> list[Call]:
        return self.calls[: self.backward_at]

    @property
    def gradient_calls(self) -> list[Call]:
        return [] if self.backward_at is None else self.calls[self.backward_at :]

    def key(self, calls: list[Call]) -> tuple:
        """Hashable identity of recorded calls, with the shapes and dtypes of the externals that they use."""
        used = sorted({leaf.index for call in calls for leaf in call.leaves if isinstance(leaf, External)})
        return (
            tuple((call.function, _hashable(call.leaves), call.spec, call.results, call.grad_enabled) for call in calls),
            tuple((index, *self.external_key(index)) for index in used),
        )


@dataclasses.dataclass(frozen=True)
class _Plain:
    """The result of a function that is no tensor (a size, a dtype)."""

    result: object


def _refuse_autocast(function: Callable) -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise LoopError(
            f"{_name(function)} runs under torch.autocast, which a compiled step does not see: leave autocast out, and give "
            'graphacc.compile precision="bf16" to compute in bf16 with fp32 parameters'
        )


def _name(function: Callable) -> str:
    return getattr(function, "__name__", "model")


def _path_of(value: object, args: tuple, kwargs: dict) -> str:
    """Where a value stands among the arguments of a call, such as ``args[0]`` or ``kwargs['labels']``."""
    for top, tree in (("args", args), ("kwargs", kwargs)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if leaf is value:
                return top + pytree.keystr(path)
    raise AssertionError("the value is not among the arguments")


_STATIC = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, slice, type)
"""Types of arguments and results that are part of a program's identity."""


def _static(leaf, function: Callable, args: tuple, kwargs: dict):
    if isinstance(leaf, _STATIC) or leaf is Ellipsis or callable(leaf):
        return leaf
    raise LoopError(
        f"{_name(function)}.{_path_of(leaf, args, kwargs)} is a {type(leaf).__name__}, whose tensors, if it has any, a compiled program cannot see: "
        "pass tensors in tuples, lists or dicts; to generate text with a cache, use an uncompiled copy, copy.deepcopy(model)"
    )


class Opaque:
    """Stands for a result of the model that is neither a tensor nor a plain value, such as a cache object."""

    def __init__(self, kind: str):
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str):
        raise LoopError(
            f"a compiled model does not return its {self._kind} (asked for .{name}): only tensors in tuples, lists, dicts and registered "
            "dataclasses come out of a program; call an uncompiled copy, copy.deepcopy(model), to get one"
        )

    def __repr__(self) -> str:
        return f"<{self._kind} of a compiled call>"


def _hashable(leaves: tuple) -> tuple:
    """Leaves as a dict key: an unhashable static argument is identified by its type and repr."""
    out = []
    for leaf in leaves:
        try:
            hash(leaf)
            out.append((type(leaf), leaf))
        except TypeError:
            out.append((type(leaf), repr(leaf)))
    return tuple(out)
