"""Which layers of a model are called alike, so that one of them is traced for all.

The model runs once on fake tensors, without autograd's backward and without a trace, which takes a tenth of the time. What the calls of numbered modules
("transformer.h.3") do is logged: every torch function and every ATen operator with its constants, the forms of its tensors and where they come from (an argument,
a parameter of the layer, a value of the layer, something outside), and the nodes of autograd that lead from the results to the arguments. Layers are equal if
their logs are. A *run* is a chain of equal layers in which each gets what the one before it gives, and nothing else reads what a layer makes. An object that all of
them get may be written, by each in a place of its own (a cache of keys and values; `written_objects`).

What is not understood makes a layer unequal to all others: an argument whose parts are not known, a custom autograd.Function, an attribute that the call changes.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc._compat.torch_ import patched, watched_by_autograd
from graphacc.capture.borrow import Named
from graphacc.capture.written_objects import PLAIN, Holder, Path, Written, changed, state, step_between, write_as

NUM_TRACED = 4
"""Layers of a run that are traced: the first, two in the middle of which the second is copied, and the last."""

MIN_LAYERS = 6
"""Of a run. In a shorter one looking costs what copying saves."""

_NUMBER = re.compile(r"(?:^|\.)\d+$")
_MAX_CONSTANT = 64  # elements of a real tensor that is described by its values
_GENERATED = "GeneratedBackwardFor_"  # of operators of torch.library: what their backward does follows from their arguments
_READS_FORM = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "size", "dim", "numel", "stride", "is_floating_point"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Equal layers, each of which gets what the one before it gives."""

    paths: tuple[str, ...]  # of the modules, in the order of their calls
    handed: tuple[tuple[int, int], ...]  # (leaf of a layer's result, leaf of the next one's arguments that it is)
    written: tuple[Written, ...] = ()  # parts of the arguments that the last but one of the traced layers writes, holders before what they hold

    @property
    def traced(self) -> tuple[str, ...]:
        return (*self.paths[: NUM_TRACED - 1], self.paths[-1])

    @property
    def copied(self) -> tuple[str, ...]:
        """The layers that are not traced; the last but one of the traced layers stands for them."""
        return self.paths[NUM_TRACED - 1 : -1]


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of the numbered modules that have enough siblings of their class."""
    siblings: dict[tuple[str, type], list[str]] = {}
    modules = {path: module for path, module in model.named_modules() if _NUMBER.search(path)}
    for path, module in modules.items():
        siblings.setdefault((path.rpartition(".")[0], type(module)), []).append(path)
    return {path: modules[path] for found in siblings.values() if len(found) >= MIN_LAYERS for path in found}


class CallLog:
    """What a forward does in the calls of the candidates.

    Args:
        layers: path -> module, see `candidates`.
        stand_ins: the tensor that stands for a parameter or buffer -> the parameter or buffer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], stand_ins: Mapping[Tensor, Named]):
        self.layers = layers
        self.named = {id(tensor): item for tensor, item in stand_ins.items()}
        self.casts = {tensor.grad_fn: tensor for tensor in stand_ins if tensor.grad_fn is not None}  # node of autograd -> its result: in bf16 parameters are cast
        self.calls: list[_Call] = []
        self._open: list[_Call] = []
        self._reads: list[tuple[tuple[_Call, ...], tuple[int, ...]]] = []  # of every event: the calls that it is part of, and the tensors that it reads
        self._num_operators = 0
        self._alive: list[object] = []  # ids stay unique

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The forward runs inside, on fake tensors."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced_calls({module: self._logged(path, module) for path, module in self.layers.items()}))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the trace says them
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operators(self))
            yield

    def _logged(self, path: str, module: nn.Module) -> Callable:
        def logged(original, /, *args, **kwargs):
            with torch._C.DisableTorchFunction():
                call = _Call(path, module, self, args, kwargs)
            call.outside, call.start = tuple(self._open), self._num_operators
            self.calls.append(call)
            self._open.append(call)
            try:
                result = original(*args, **kwargs)
            finally:
                self._open.pop()
            call.end = self._num_operators
            with torch._C.DisableTorchFunction():
                call.finish(result)
            return result

        return logged

    def note(self, function: object, leaves: Sequence[object], results: Sequence[object], reads: bool = True) -> None:
        """A torch function or an operator was called; `reads`: it looks at more of a tensor than its form."""
        self._alive.append((function, leaves, results))
        for call in self._open:
            call.note(function, leaves, results)
        if reads:
            self._reads.append((tuple(self._open), tuple(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))))

    def note_operator(self, function: object, args: tuple, kwargs: dict) -> None:
        """An operator is about to be called."""
        self._num_operators += 1
        if watched_by_autograd() is not None:
            for call in self._open:
                call.is_pure = False  # what hooks on saved tensors do in backward is not logged
        schema = getattr(function, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in pytree.tree_leaves(written):
                    for call in self._open if isinstance(tensor, Tensor) else ():
                        call.note_write(tensor)

    def runs(self, results: Sequence[Tensor]) -> list[Run]:
        """The runs of the forward that gave these results, outer modules before inner ones."""
        self._reads.append(((), tuple(map(id, results))))
        chains: dict[tuple, list[list[_Call]]] = collections.defaultdict(list)
        times = collections.Counter(call.path for call in self.calls)
        for call in self.calls:
            found = chains[call.outside, call.path.rpartition(".")[0]]
            if found and times[call.path] == 1 and self._follows(found[-1], call):
                found[-1].append(call)
            else:
                found.append([call])
        long = [chain for found in chains.values() for chain in found if len(chain) >= MIN_LAYERS and times[chain[0].path] == 1]
        runs: list[Run] = []
        taken: set[_Call] = set()
        for chain in sorted(long, key=lambda chain: len(chain[0].outside)):
            if taken.isdisjoint(chain[0].outside) and self._is_closed(chain):
                model, following = chain[NUM_TRACED - 2 : NUM_TRACED]
                runs.append(Run(paths=tuple(call.path for call in chain), handed=_handed(chain[0], chain[1]), written=tuple(_written(model, following) or ())))
                taken.update(chain)
        return runs

    def _follows(self, chain: list["_Call"], call: "_Call") -> bool:
        before = chain[-1]
        if before.end != call.start or not (before.is_pure and call.is_pure):
            return False
        if before.key() != call.key():
            return False
        handed = _handed(before, call)
        if not handed or (len(chain) > 1 and handed != _handed(chain[-2], before)):
            return False
        written = _written(before, call)
        if written is None or (len(chain) > 1 and [each.step for each in written] != [each.step for each in _written(chain[-2], before) or ()]):
            return False
        taken = {place for _, place in handed}
        kept = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and i not in taken]
        return all(call.leaves[i] is before.leaves[i] for i in kept)

    def _is_closed(self, chain: list["_Call"]) -> bool:
        """Whether what the layers between the first and the last make is read by themselves alone, and by the next one what it gets; and nobody else has their parameters."""
        between = chain[1:-1]
        maker = {made: call for call in between for made in call.made}
        following = dict(itertools.pairwise(chain))
        given = {call: {id(leaf) for leaf in following[call].leaves if isinstance(leaf, Tensor)} for call in between}
        for inside, read in self._reads:
            for tensor in read:
                call = maker.get(tensor)
                if call is not None and call not in inside and not (following[call] in inside and tensor in given[call]):
                    return False
        paths = {call.path for call in between}
        for item in self.named.values():
            owners = {_owner(name, paths) for name in (item.name, *item.aliases)}
            if len(owners) > 1 or (owners != {None} and _has_hooks(item.tensor)):
                return False
        return True


@contextlib.contextmanager
def replaced_calls(calls: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Calls of these modules, with their hooks, become `calls[module](call, *args, **kwargs)`, where `call` does what they did."""
    original = nn.Module.__call__

    def call(module: nn.Module, /, *args, **kwargs):
        instead = calls.get(module)
        return original(module, *args, **kwargs) if instead is None else instead(functools.partial(original, module), *args, **kwargs)

    with patched(nn.Module, __call__=call):  # an attribute of the module would be seen by its guards
        yield


@contextlib.contextmanager
def handing_on(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """Layers that are not traced give what they get; their other results, and what they write into their arguments, which nobody reads, are those of the layer that
    stands for them.

    To be entered inside of the traced function: a trace has calls of modules of its own.
    """
    calls: dict[nn.Module, Callable] = {}
    for run in runs:
        seen: list[tuple[list, pytree.TreeSpec]] = []
        calls[model.get_submodule(run.traced[NUM_TRACED - 2])] = functools.partial(_seen_call, seen)
        calls.update((model.get_submodule(path), functools.partial(_passed_call, seen, run, number)) for number, path in enumerate(run.copied, 1))
    with replaced_calls(calls) if calls else contextlib.nullcontext():
        yield


def _seen_call(seen: list, original: Callable, /, *args, **kwargs):
    result = original(*args, **kwargs)
    seen.append(pytree.tree_flatten(result))
    return result


def _passed_call(seen: list, run: Run, number: int, original: Callable, /, *args, **kwargs):
    given, (leaves, spec) = pytree.tree_leaves((args, kwargs)), seen[0]
    leaves = list(leaves)
    for result, argument in run.handed:
        leaves[result] = given[argument]
    for written in run.written:
        write_as(given[written.argument], written, number)
    return pytree.tree_unflatten(leaves, spec)


class _Call:
    """A call of a candidate."""

    outside: "tuple[_Call, ...]"
    """The calls of candidates that it is part of."""
    start: int
    """Operators of the whole forward before it."""
    end: int

    def __init__(self, path: str, module: nn.Module, log: CallLog, args: tuple, kwargs: dict):
        self.path, self.module, self.log = path, module, log
        self.is_pure = True  # nothing was seen that the log does not describe
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self._places: dict[int, int] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self._places.setdefault(id(leaf), place)
        self.made: dict[int, int] = {}  # id of a tensor of its own -> number
        self._events: list[tuple] = []
        objects = ((place, state(leaf)) for place, leaf in enumerate(self.leaves) if not isinstance(leaf, (Tensor, float, complex, *PLAIN)))
        self._objects = {place: found for place, found in objects if found is not None}
        self._arguments = tuple(self._argument(place) for place in range(len(self.leaves)))
        self.written: list[tuple[int, Path, tuple]] = []  # leaf of the arguments, path in it, and what is written there
        self._attributes = _attributes(module)
        self.results: tuple[tuple, ...] = ()
        self._shape: tuple = ()
        self._tensors = self._own_tensors()

    def _argument(self, place: int) -> tuple:
        leaf = self.leaves[place]
        if place in self._objects:
            return "object", id(leaf)
        return _form(leaf)[:-1] if isinstance(leaf, Tensor) else self._plain(leaf)

    def _own_tensors(self) -> tuple:
        prefix = self.path + "."
        own = ((name.removeprefix(prefix), item.tensor) for item in self.log.named.values() for name in (item.name, *item.aliases) if name.startswith(prefix))
        return tuple((name, isinstance(tensor, nn.Parameter), *_form(tensor)) for name, tensor in own)

    def key(self) -> tuple:
        """Equal where another layer's call does the same."""
        modes = tuple((type(module), module.training) for module in self.module.modules())
        return modes, self.spec, self._arguments, self._tensors, self._shape, self.results, self._events

    def note(self, function: object, leaves: Sequence[object], results: Sequence[object]) -> None:
        read = tuple(self._described(leaf) for leaf in leaves)
        for result in results:
            if isinstance(result, Tensor) and id(result) not in self._places and id(result) not in self.log.named:
                self.made.setdefault(id(result), len(self.made))
        made = tuple((self._described(result), _form(result)) if isinstance(result, Tensor) else self._plain(result) for result in results)
        self._events.append((function, read, made))

    def note_write(self, tensor: Tensor) -> None:
        if self._described(tensor)[0] not in ("value", "own"):
            self.is_pure = False  # others see it

    def finish(self, result: object) -> None:
        leaves, spec = pytree.tree_flatten(result)
        self.results = tuple(self._described(leaf) for leaf in leaves)
        self.result_leaves = leaves
        self._shape = spec, self._nodes_of_autograd([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._note_written()
        if _attributes(self.module) != self._attributes:
            self.is_pure = False

    def _note_written(self) -> None:
        """What the call has written into its arguments."""
        for place, before in self._objects.items():
            after = state(self.leaves[place])
            paths = None if after is None else changed(before, after)
            if after is None or paths is None:
                self.is_pure = False
                return
            for path in paths:
                part = after[path]
                self.written.append((place, path, (part,) if isinstance(part, (Holder, type)) else self._described(part)))

    def _described(self, leaf: object) -> tuple:
        if not isinstance(leaf, Tensor):
            return self._plain(leaf)
        if id(leaf) in self.made:
            return "value", self.made[id(leaf)]
        if id(leaf) in self._places:
            return "argument", self._places[id(leaf)]
        item = self.log.named.get(id(leaf))
        if item is not None and item.name.startswith(self.path + "."):
            return "own", item.name.removeprefix(self.path + ".")
        if item is None and not isinstance(leaf, FakeTensor) and leaf.numel() <= _MAX_CONSTANT and leaf.device.type == "cpu":
            return "constant", *_form(leaf), repr(leaf.tolist())
        return "outside", id(leaf)

    def _plain(self, leaf: object) -> tuple:
        if isinstance(leaf, (float, complex)):
            return type(leaf), repr(leaf)  # 0.0 is not -0.0, and NaN is itself
        if isinstance(leaf, PLAIN):
            return type(leaf), leaf
        self.is_pure = False
        return "object", id(leaf)

    def _nodes_of_autograd(self, results: Sequence[Tensor]) -> tuple:
        """The nodes between the results and the arguments: of each its name, and where its edges lead."""
        ends = {leaf.grad_fn: place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        numbers: dict[object, int] = {}
        nodes: list[tuple] = []

        def end_of(node) -> tuple | None:
            if node is None:
                return (None,)
            if node in ends:
                return "argument", ends[node]
            if node in self.log.casts:
                return self._described(self.log.casts[node])
            if hasattr(node, "variable"):
                return self._described(node.variable)
            return None

        waiting: list[typing.Any] = [result.grad_fn for result in results]
        starts = tuple(None if node is None else end_of(node) or node.name() for node in waiting)
        while waiting:
            node = waiting.pop()
            if end_of(node) is not None or node in numbers:
                continue
            numbers[node] = len(numbers)
            if not node.name().startswith(_GENERATED) and isinstance(node, torch.autograd.function.BackwardCFunction):
                self.is_pure = False  # what its backward does is not logged
            nodes.append((node, [(following, place) for following, place in node.next_functions]))
            waiting += [following for following, _ in node.next_functions]
        self.log._alive.append(numbers)
        edges = tuple((node.name(), tuple((end_of(to) or numbers[to], place) for to, place in following)) for node, following in nodes)
        return starts, edges


class _Functions(TorchFunctionMode):
    def __init__(self, log: CallLog):
        super().__init__()
        self._log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        leaves = pytree.tree_leaves((args, kwargs or {})) if name not in _READS_FORM else list(args[:1])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = pytree.tree_leaves(result)
        if name == "register_hook":
            results = [object()]  # unlike any other
        self._log.note(_identity(func), tensors, results, reads=name not in _READS_FORM)
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, log: CallLog):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # PyTorch asks twice for each operator
        kwargs = kwargs or {}
        self._log.note_operator(func, args, kwargs)
        result = func(*args, **kwargs)
        self._log.note(func, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(result))
        return result


def _identity(func: object) -> object:
    """Getters of attributes are bound anew at each use."""
    owner = getattr(func, "__self__", None)
    return (owner, getattr(func, "__name__", "")) if owner is not None and not isinstance(owner, type(torch)) else func


def _form(tensor: Tensor) -> tuple:
    function = None if tensor.grad_fn is None else tensor.grad_fn.name()
    return tuple(tensor.shape), tensor.dtype, tensor.stride() if tensor.layout == torch.strided else tensor.layout, tensor.requires_grad, function


def _handed(before: _Call, after: _Call) -> tuple[tuple[int, int], ...]:
    """(leaf of the result of `before`, leaf of the arguments of `after`) that are the same tensor, made by `before`."""
    places = {id(leaf): place for place, leaf in reversed(list(enumerate(after.leaves))) if isinstance(leaf, Tensor)}
    made = [(i, leaf) for i, leaf in enumerate(before.result_leaves) if before.results[i][0] == "value"]
    return tuple((i, places[id(leaf)]) for i, leaf in made if id(leaf) in places)


def _written(before: _Call, after: _Call) -> list[Written] | None:
    """What `before` writes into its arguments, and how `after` does; None: they write otherwise."""
    found: list[Written] = []
    for (place, path, value), (following_place, following_path, following_value) in itertools.zip_longest(before.written, after.written, fillvalue=(None, (), None)):
        step = step_between(path, following_path)
        if step is None or (place, value) != (following_place, following_value):
            return None
        found.append(Written(argument=typing.cast("int", place), path=path, step=step))
    return found


def _attributes(module: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(value)) for part in module.modules() for name, value in vars(part).items()]


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def _owner(name: str, paths: set[str]) -> str | None:
    """The module among `paths` whose parameter this is."""
    while name:
        name = name.rpartition(".")[0]
        if name in paths:
            return name
    return None
