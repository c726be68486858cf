"""Decisions on values of the batch: what Python code asks of tensors that follow from the batch alone is answered from the batch.

While code runs on fake tensors, `Recorder` logs the operators whose arguments come from the batch (or from buffers, or are constants). Where code
needs a value of such a tensor (``if labels.max() >= n``, ``int(lengths.max())``), or an operator whose result's shape depends on one
(``x[mask]``), PyTorch computes it from the real batch with the logged operators. The answer becomes a guard: at the next call the
same operators give the answer for that batch, and another answer asks for another recording and another program. A tensor whose
shape depends on values becomes an input of the program. What depends on parameters or random numbers is not answered.
"""

import contextlib
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc._compat.torch_ import without_modes
from graphacc.capture.source import calling_line
from graphacc.errors import CaptureError
from graphacc.loop.bounds import Bound, Range, indices_of, moves_elements

if typing.TYPE_CHECKING:
    from graphacc.loop.tape import External, Param

aten = torch.ops.aten

MAX_ANSWERS = 8
"""Different answers to the questions of one call that get a program; a call with another answer is run by PyTorch."""

_DYNAMIC = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
            aten.bincount.default, aten.repeat_interleave.Tensor}  # fmt: skip
"""Operators whose result's shape depends on values. `aten.index.Tensor` with a mask is written with `nonzero` (`_Masks`)."""

_slots = itertools.count()


@dataclasses.dataclass(frozen=True)
class Slot:
    """A value that a logged operator gave."""

    number: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Operation:
    """One logged operator; tensors among its leaves are a `Slot`, an `External`, a `Param`, or constants."""

    function: torch._ops.OpOverload
    leaves: tuple
    spec: pytree.TreeSpec
    results: tuple[Slot, ...]  # its tensors, in pytree order
    written: frozenset[int]  # memory that it writes, as an identity

    def run(self, env: dict[Slot, Tensor], resolve: Callable[[object], object]) -> object:
        """Let PyTorch run it on real tensors."""
        args, kwargs = pytree.tree_unflatten([env[leaf] if isinstance(leaf, Slot) else resolve(leaf) for leaf in self.leaves], self.spec)
        result = self.function(*args, **kwargs)
        env.update(zip(self.results, (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))))
        return result


@dataclasses.dataclass(frozen=True)
class Read:
    """One question that code asked, and how it is answered from the batch."""

    operations: tuple[Operation, ...]  # in order; the last one gives the answer
    answer: object  # that it got: a number, or () where the result is tensors
    inputs: "tuple[External, ...]"  # the tensors, as inputs of the program
    spec: pytree.TreeSpec  # of the result

    @property
    def function(self) -> torch._ops.OpOverload:
        return self.operations[-1].function

    @property
    def key(self) -> tuple:
        return str(self.function), repr(self.answer), self.inputs


class Answering:
    """Answers reads from one batch; operators that several of them need run once."""

    def __init__(self, resolve: Callable[[object], object]):
        self._resolve = resolve
        self._env: dict[Slot, Tensor] = {}

    def result(self, operations: Sequence[Operation]) -> object:
        """What the last operator gives."""
        with self._running(operations[:-1]) as env:
            return operations[-1].run(env, self._resolve)

    def value(self, operations: Sequence[Operation], place: object) -> Tensor:
        """A tensor: a result of these operators, or one that they start from."""
        with self._running(operations) as env:
            return env[place] if isinstance(place, Slot) else typing.cast(Tensor, self._resolve(place))

    @contextlib.contextmanager
    def _running(self, operations: Sequence[Operation]) -> Iterator[dict[Slot, Tensor]]:
        """The values of operators, inside of which PyTorch runs."""
        env = {} if any(operation.written for operation in operations) else self._env
        with without_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for operation in operations:
                if not all(slot in env for slot in operation.results):
                    operation.run(env, self._resolve)
            yield env


@dataclasses.dataclass
class Log:
    """What one recorded call did with tensors that follow from the batch."""

    operations: list[Operation] = dataclasses.field(default_factory=list)
    places: dict[int, object] = dataclasses.field(default_factory=dict)  # id of a fake tensor -> Slot, External or Param
    tainted: set[int] = dataclasses.field(default_factory=set)  # memory that no longer holds what the log says
    memory: dict[Slot, int] = dataclasses.field(default_factory=dict)
    alive: list[Tensor] = dataclasses.field(default_factory=list)  # so that ids and memory stay theirs


class _WithMasks(TorchDispatchMode):
    """A dispatch mode under which `Masks` is on, too."""

    def __init__(self, masks: "Masks"):
        super().__init__()
        self._masks = masks

    def __enter__(self):
        self._masks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._masks.__exit__(*error)


class Recorder(_WithMasks):
    """Logs what follows from the batch, answers reads of it, and notes the bounds of indices.

    Args:
        leaves: (fake tensor, its External or Param) that code inside starts from.
        earlier: logs of the calls before, whose results code inside may read.
        answering: gives the answers; None where there are none.
        add_input: (a tensor whose shape depends on values) -> (External, fake tensor).
        notes_operators: `operators` gets every operator that runs, its arguments that are no tensors, and the sizes of its results.
    """

    def __init__(
        self,
        leaves: "Iterable[tuple[Tensor, External | Param]]",
        earlier: Sequence[Log],
        answering: Answering | None,
        add_input: Callable,
        notes_operators: bool = False,
    ):
        super().__init__(Masks(can_ask=answering is not None, note_one_hot=self._note_one_hot))
        self.log = Log()
        self.reads: list[Read] = []
        self.bounds: list[Bound] = []
        self.ranges: set[tuple[int, ...]] = set()  # of the indices of every operator that has some: the ends
        self.operators: list = []
        self._notes_operators = notes_operators
        self._earlier = earlier
        self._answering = answering
        self._add_input = add_input
        self._places: dict[int, object] = {}
        self._tainted: set[int] = set()
        for log in earlier:
            self._places |= log.places
            self._tainted |= log.tainted
        self._sources: set[int] = set()  # memory of the leaves
        for fake, place in leaves:
            self._places[id(fake)] = place
            self._sources.add(memory_of(fake))
            self.log.alive.append(fake)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [self._place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        follows = torch.Tag.nondeterministic_seeded not in func.tags and not any(place is None for place, leaf in zip(places, leaves) if leaf is not None)
        overwritten = [leaf for leaf in written_by(func, args, kwargs) if isinstance(leaf, FakeTensor)]
        written = frozenset(map(memory_of, overwritten))
        if follows and self._answering is not None and decides(func, args, kwargs):
            return self._answer(self._answering, func, places, spec)
        found = list(indices_of(func, args, kwargs))
        if found:
            self.ranges.add(tuple(allowed.high for _, allowed in found))
        for index, allowed in found:
            self._note_bound(func._schema.name.removeprefix("aten::"), index, allowed)
        result = func(*args, **kwargs)
        if self._notes_operators and func.namespace != "prim" and func is not aten.clone.default:  # questions for attributes; a copy, where strides ask for one
            self.operators.append(aten.view.default if func is aten._unsafe_view.default else func)
            self.operators += [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
            self.operators += [size for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) for size in leaf.shape]
        if follows and not written & self._sources:
            self._note(func, places, spec, result, written)
        elif written:
            self._tainted |= written
            self.log.tainted |= written
            self.log.alive += overwritten
        return result

    def _place(self, tensor: Tensor) -> object:
        """Where a tensor comes from; None if it does not follow from the batch."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        return None if memory_of(tensor) in self._tainted else self._places.get(id(tensor))

    def _note(self, func, places: Sequence, spec: pytree.TreeSpec, result: object, written: frozenset[int]) -> Operation | None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors:
            return None
        slots = tuple(Slot(next(_slots), tensor.dtype) for tensor in tensors)
        for tensor, slot in zip(tensors, slots):
            self._places[id(tensor)] = self.log.places[id(tensor)] = slot
            self.log.memory[slot] = memory_of(tensor)
            self.log.alive.append(tensor)
        self.log.operations.append(Operation(func, tuple(places), spec, slots, written))
        return self.log.operations[-1]

    def _note_one_hot(self, tensor: Tensor, num_classes: int = -1) -> None:
        if num_classes > 0:
            self._note_bound("one_hot", tensor, Range(0, num_classes))

    def _note_bound(self, function: str, index: Tensor, allowed: Range) -> None:
        place = self._place(index)
        if not isinstance(index, FakeTensor) or place is None:
            return
        operations = tuple(self._needed([place] if isinstance(place, Slot) else []))
        sources = [place, *(leaf for operation in operations for leaf in operation.leaves)]
        names = {type(source).__name__ for source in sources}
        cheap = not any(slot.dtype.is_floating_point for operation in operations for slot in operation.results)
        every_call = cheap and "External" in names and "Param" not in names
        source = sources[1 if operations else 0] if all(moves_elements(operation, allowed) for operation in operations) else None
        self.bounds.append(Bound(operations, place, allowed, function, calling_line(), every_call, source if every_call else None))

    def _answer(self, answering: Answering, func, places: Sequence, spec: pytree.TreeSpec) -> object:
        needed = self._needed([place for place in places if isinstance(place, Slot)])
        question = Operation(func, tuple(places), spec, (), frozenset())
        found = answering.result([*needed, question])
        leaves, result_spec = pytree.tree_flatten(found)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            self.reads.append(Read((*needed, question), found, (), result_spec))
            return found
        with without_modes():
            added = [self._add_input(leaf) for leaf in leaves]
        result = pytree.tree_unflatten([fake for _, fake in added], result_spec)
        for external, fake in added:
            self._places[id(fake)] = self.log.places[id(fake)] = external
            self._sources.add(memory_of(fake))
            self.log.alive.append(fake)
        self.reads.append(Read((*needed, question), (), tuple(external for external, _ in added), result_spec))
        return result

    def _needed(self, slots: Iterable[Slot]) -> list[Operation]:
        """The logged operators that values depend on, in order: those that made them, or wrote into their memory."""
        memory = {slot: place for log in (*self._earlier, self.log) for slot, place in log.memory.items()}
        wanted, found = set(slots), []
        held = {memory[slot] for slot in wanted}
        for operation in reversed([operation for log in (*self._earlier, self.log) for operation in log.operations]):
            if wanted.isdisjoint(operation.results) and held.isdisjoint(operation.written):
                continue
            found.append(operation)
            more = {leaf for leaf in operation.leaves if isinstance(leaf, Slot)}
            wanted |= more
            held |= {memory[slot] for slot in more}
        return found[::-1]

    def kept_log(self, results: Iterable[Tensor]) -> Log | None:
        """The log, if a later call can depend on it."""
        matters = self.log.tainted or any(operation.written for operation in self.log.operations) or any(id(result) in self.log.places for result in results)
        return self.log if matters else None


class Answers(_WithMasks):
    """Gives code that is captured the answers that it got when it was recorded, in the same order.

    Args:
        inputs: External -> its traced tensor.
    """

    def __init__(self, reads: Sequence[Read], inputs: "Mapping[External, Tensor]"):
        super().__init__(Masks())
        self._left = list(reads)
        self._inputs = inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not decides(func, args, kwargs):
            return func(*args, **kwargs)
        if not self._left or self._left[0].function is not func:
            raise CaptureError(f"the code asked for values of tensors ({func}) in another order than when it was recorded: its control flow is not fixed")
        read = self._left.pop(0)
        if not read.inputs:
            return read.answer
        return pytree.tree_unflatten([self._inputs[external] for external in read.inputs], read.spec)


_WRITES_ROWS = {Tensor.__setitem__, Tensor.index_put_, Tensor.index_put, torch.index_put, torch.index_put_}


class Masks(TorchFunctionMode):
    """Turns functions that take values out of tensors unseen into such that ask for them.

    What a mask selects is selected by the indices of its true elements, in forward and backward: only their number depends on values.

    Args:
        can_ask: whether such questions are answered.
        note_one_hot: is given the arguments of `one_hot`, which is a comparison when it comes to the operators.
    """

    def __init__(self, can_ask: bool = True, note_one_hot: Callable = lambda tensor, num_classes=-1: None):
        super().__init__()
        self._can_ask = can_ask
        self._note_one_hot = note_one_hot

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.one_hot:
            self._note_one_hot(*args, **kwargs)
        if not self._can_ask:
            return func(*args, **kwargs)
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            numbers = pytree.tree_map_only(Tensor, lambda element: element.item() if element.dim() == 0 else element.tolist(), args[0])
            return func(numbers, *args[1:], **kwargs)
        if func in (Tensor.masked_select, torch.masked_select) and len(args) == 2 and not kwargs:
            x, mask = torch.broadcast_tensors(*args)
            return self._selected(x, (mask,))
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_mask(item) for item in index):
                return self._selected(args[0], index)
        if func in _WRITES_ROWS and len(args) >= 3:
            x, index, values, *others = args
            index = tuple(index) if isinstance(index, (tuple, list)) else (index,)
            if any(_is_mask(item) for item in index) and isinstance(values, Tensor) and _has_rows(x, index, values):
                index = self._true_elements(index)
                _check_rows(x, index, values)
                return func(x, index, values, *others, **kwargs)
        return func(*args, **kwargs)

    def _selected(self, x: Tensor, index: tuple) -> Tensor:
        return x[self._true_elements(index)]

    def _true_elements(self, index: tuple) -> tuple:
        """The index with the indices of its masks' true elements."""
        return tuple(part for item in index for part in (torch.nonzero(item).unbind(1) if _is_mask(item) else (item,)))


def _has_rows(x: Tensor, index: tuple, values: Tensor) -> bool:
    """Whether the values are one for each true element of a mask, not one for all of them: the backward takes them out of the gradient."""
    taken = sum(item.dim() if _is_mask(item) else 1 for item in index if item is not None and item is not Ellipsis)
    return any(size != 1 for size in values.shape[: max(0, values.dim() - (x.dim() - taken))])


def _check_rows(x: Tensor, index: tuple, values: Tensor) -> None:
    """Raise as PyTorch does where the values are of another number than the index selects: what is captured writes at indices unseen.

    Raises:
        RuntimeError: the values do not broadcast to the selected shape.
    """
    with without_modes(), torch._C.DisableTorchFunctionSubclass():
        placed = tuple(torch.empty(item.shape, dtype=torch.int64, device="meta") if isinstance(item, Tensor) else item for item in index)
        selected = torch.empty(x.shape, device="meta")[placed].shape
    given = tuple(values.shape)
    while len(given) > len(selected) and given[0] == 1:
        given = given[1:]
    if len(given) > len(selected) or any(size not in (1, wanted) for size, wanted in zip(given[::-1], selected[::-1])):
        raise RuntimeError(f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape {list(selected)}")


def _is_mask(item: object) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0


def decides(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether Python code, or the shape of a result, depends on the values of the arguments."""
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func in _DYNAMIC or torch.Tag.data_dependent_output in func.tags


def written_by(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list:
    """The arguments of an operator that it writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args)} | kwargs
    named = [given[argument.name] for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given]
    return pytree.tree_leaves(named)


def memory_of(fake: Tensor) -> int:
    """What tells the memory of fake tensors apart, as long as they are alive; views have that of their base."""
    with torch._C.DisableTorchFunctionSubclass():
        return fake.untyped_storage()._cdata
