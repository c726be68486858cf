"""Which results of a recording PyTorch's backward() could still start from, after another backward() of the recording and after a step.

A first backward() frees what the nodes of autograd that it passes have saved; a later one fails where it comes to such a node, and where a saved tensor was changed in place.
Two results of one call that have no such node in common (an actor, and a critic on a detached trunk) can each have a backward(), also with a step between the two. The program of
the first one computes no second, and the step changes the parameters that one would be made of. So what the loop holds over a step, with a way back that stays open, becomes
ordinary results of autograd before it. All of this is read off the graph that autograd made of the fake tensors.
"""

import functools
import operator
import typing
import weakref
from collections.abc import Collection

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.errors import LoopError
from graphacc.loop.decisions import memory_of
from graphacc.loop.fallback import NOT_COMPILED
from graphacc.loop.tape import Param, Tape

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

MAX_UNUSED = 10
"""Steps over which results keep their way back without a backward() that takes it: after these they are taken as only looked at."""

_MAX_KNOWN = 256

_SERIAL = operator.attrgetter("serial")


class WaysBack:
    """Of the results of one model."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()  # recordings that have had a backward, or were run by PyTorch
        self._found: dict[tuple, tuple[bool | None, tuple]] = {}  # answers, and the fake tensors whose identities are in their keys
        self._unused: dict[tuple, tuple[float, list[Tensor]]] = {}  # the same: for how many steps they were kept in vain

    def follow(self, tape: Tape) -> None:
        """A recording has had its backward, or PyTorch has run it."""
        self._tapes.add(tape)

    def remains(self, tape: Tape, index: int) -> bool:
        """Whether a value of a recording that has had its backward still has a way back."""
        return tape.updates == self.engine.execution.updates and self.is_open(tape, index) is True

    def is_open(self, tape: Tape, index: int, updated: tuple[str, ...] = (), after: int | None = None) -> bool | None:
        """Whether a way back from a value is left open.

        Args:
            updated: names of parameters that are changed in place.
            after: the value from which there was a backward(); default: the loss of the recording, if it has had its backward.

        Returns:
            None where autograd's graph is not known: of a model that is captured by lazy tensors.
        """
        after = tape.loss if after is None and tape.backward_at is not None else after
        value, loss = tape.values[index], None if after is None else tape.values[after]
        key = id(value), id(loss), updated
        if key not in self._found:
            self._found[key] = self._find(value, loss, updated), (value, loss)
            _shorten(self._found)
        return self._found[key][0]

    def _find(self, value: Tensor, loss: Tensor | None, updated: Collection[str]) -> bool | None:
        nodes, leaves = _graph(value)
        if any(self.engine.fakes.owner(leaf) is None for leaf in leaves):
            return None
        freed = set() if loss is None else _graph(loss)[0]
        changed = {memory_of(self.engine.fake(Param(name))) for name in updated}
        for node in nodes:
            saved = _saved(node)
            is_freed = node in freed and saved != []
            is_changed = bool(changed) if saved is None else any(memory_of(tensor) in changed for tensor in saved)
            if is_freed or is_changed:
                return False
        return True

    def others_remain(self, tape: Tape, index: int) -> bool:
        """Whether a backward() from a value leaves open the way back from another one that the loop holds."""
        return any(self.is_open(tape, other, after=index) for other in self._differentiable(tape) if other != index)

    def keep(self, names: tuple[str, ...], optimizer: str) -> bool:
        """Before a step that updates parameters: make what the loop holds with a way back that it leaves open ordinary results of autograd.

        Returns:
            Whether any are alive, so that autograd has to see the update.
        """
        updates, now = self.engine.execution.updates, self.engine.tape
        if now is not None and now.backward_at is None and not now.closed:
            self._tapes.add(now)
        tapes, kept = sorted(self._tapes, key=_SERIAL), False
        for tape in tapes:
            if tape.is_eager or tape.updates != updates or tape.overwritten is not None:
                continue
            ways = {index: self.is_open(tape, index, names) for index in self._differentiable(tape)}
            if held := [index for index, is_open in ways.items() if is_open]:
                self._keep(tape, held, optimizer)
                kept = True
            if not tape.is_eager:
                tape.without_way_back |= {index for index, is_open in ways.items() if is_open is not False}
        if now is not None and now is self.engine.tape and not now.closed and now.backward_at is None and now.live():
            self._end(now)
            kept = True
        return any(self._differentiable(tape) for tape in (list(self._tapes) if kept else tapes) if tape.is_eager)

    def _end(self, tape: Tape) -> None:
        """An open recording ends, with what the loop holds of it computed by the parameters of before the step."""
        engine, held = self.engine, tape.live()
        try:
            if engine.writes_buffers(tape) or not all(tape.has_value(index) for index in held):
                engine.execution.run_forward(tape, held, keep_buffers=True)
        except NOT_COMPILED as error:
            engine.refuse(tape, error)
            engine.by_pytorch.run(tape, str(error))
        tape.closed, engine.tape = True, None

    def _differentiable(self, tape: Tape) -> list[int]:
        """Of the values that the loop holds; a view of a parameter is its memory, whatever has become of the recording."""
        return [index for index in tape.live() if tape.values[index].requires_grad and self.engine.fakes.owner(tape.values[index]) is None]

    def _keep(self, tape: Tape, held: list[int], optimizer: str) -> None:
        fakes = [tape.values[index] for index in held]
        key = tuple(map(id, fakes))
        count = self._unused.get(key, (0, fakes))[0]
        if count >= MAX_UNUSED or self.engine.programs.local_batch:
            return
        self._unused[key] = count + 1, fakes
        _shorten(self._unused)
        shapes = ", ".join(str(list(fake.shape)) for fake in fakes)
        try:
            self.engine.by_pytorch.run(
                tape, f"the loop holds results of shapes {shapes} over {optimizer}.step(), and could still call backward() on them: call it before the step, or detach() what is only looked at"
            )
        except LoopError:
            return  # a backward() says that it comes too late

        def use(gradient: Tensor) -> None:
            self._unused[key] = float("-inf"), fakes

        with torch._C.DisableTorchFunctionSubclass():
            for index in held:
                if (value := tape.value(index)).requires_grad:
                    value.register_hook(use)


def _shorten(table: dict) -> None:
    while len(table) > _MAX_KNOWN:
        table.pop(next(iter(table)))


def _graph(value: Tensor) -> tuple[set, list[Tensor]]:
    """The nodes of autograd's graph from which a tensor is computed, but for those that accumulate gradients, and the leaves."""
    nodes: set = set()
    leaves = [value] if value.grad_fn is None else []
    stack: list[typing.Any] = [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        else:
            nodes.add(node)
            stack.extend(following for following, _ in node.next_functions)
    return nodes, leaves


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def _saved(node: typing.Any) -> list[Tensor] | None:
    """The tensors that a node of autograd's graph keeps for its backward; None where it does not tell."""
    if node.name() == "CopySlices":  # it keeps the node of the function that wrote
        return None
    try:
        return [leaf for name in _names_of_saved(type(node)) for leaf in pytree.tree_leaves(getattr(node, name)) if isinstance(leaf, Tensor)]
    except RuntimeError:
        return None
