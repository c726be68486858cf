"""The tape: what the user's loop did with a model's results, as data that can be replayed inside a captured graph.

A tape begins with a call of the model. Each torch function on its promises adds a `Call`; ``loss.backward()`` splits it
in a forward part and a part on gradients, and ``optimizer.step()`` closes it. Tensors that come from outside (the
batch, labels) are its externals; they become inputs of the captured graph.
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import operator
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import mode_around, nothing_around, storage_users, watched_by_autograd
from graphacc.capture.borrow import TensorsNow
from graphacc.capture import FX, objects
from graphacc.capture.python_state import version_of
from graphacc.capture.randomness import streams_from
from graphacc.errors import CaptureError, LoopError
from graphacc.loop import told, trees
from graphacc.loop.arguments import check_apart
from graphacc.loop.bounds import Bound
from graphacc.loop.decisions import MAX_ANSWERS, Answering, Log, Read, Recorder, memory_of
from graphacc.loop.given_numbers import PER_VALUE, Given
from graphacc.loop.identity import Identity
from graphacc.graph import Kind
from graphacc.loop.managed import Handle, Versions, handle_of, same_bits, writes_by_name
from graphacc.loop.promise import NotRecorded, Promise, freed
from graphacc.loop.shared_memory import SharedMemory

if typing.TYPE_CHECKING:
    from graphacc.loop.buckets import Bucket
    from graphacc.loop.engine import Engine
    from graphacc.loop.model_call import ModelCall
    from graphacc.loop.regions import Region


MAX_QUESTIONED = 64
"""Calls, by the shapes of their arguments, whose answers are remembered."""


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
class View:
    """A tensor that shares the memory of one from outside the tape."""

    of: External
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the first one of the tensor from outside

    def made_of(self, tensor: Tensor) -> Tensor:
        """The same view of a tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclasses.dataclass(frozen=True)
class Call:
    """One recorded function call; tensors among its leaves are `Ref`, `External` or `Param`."""

    function: Callable  # a torch function, or the model
    asked: Callable  # the same; of the model without what it was answered
    leaves: tuple  # flattened (args, kwargs)
    spec: pytree.TreeSpec
    results: tuple[int, ...]  # value index of every tensor in the result that the call makes, in pytree order
    result_leaves: tuple  # the flattened result: a Ref for a tensor that it makes, an External, View or Param for one that it gives back, other objects themselves
    result_spec: pytree.TreeSpec
    grad_enabled: bool  # recorded outside of torch.no_grad()
    autocast: torch.dtype | None  # the dtype of the torch.autocast around it
    writes: tuple[int, ...] = ()  # values that it writes into
    replaces: int | None = None  # the leaf, a number of an earlier step, that it adds to: from now on that is the result
    reads: tuple[Read, ...] = ()  # values of the batch that its code asked for
    log: Log | None = None  # what later calls need to know to ask for values
    bounds: tuple[Bound, ...] = ()  # of indices in the batch, to be checked in every call
    ranges: frozenset[tuple[int, ...]] = frozenset()  # of the indices of every operator that has some: the ends
    operators: tuple = ()  # what it ran on fake tensors, and with which numbers, where lengths are bucketed
    unused: frozenset[int] = frozenset()  # tensors from outside that require a gradient, and get none from any result
    draws: bool = False  # random numbers
    repeats: int | None = None  # number of the earlier call whose random numbers it draws again: the loop has set torch's generator back

    @property
    def externals(self) -> list[int]:
        """The tensors from outside that it reads."""
        derived = (external for read in self.reads for external in read.inputs)
        return [leaf.index for leaf in (*self.leaves, *derived) if isinstance(leaf, External)]

    @property
    def answers(self) -> tuple:
        """What its code was answered, as part of what identifies it."""
        return tuple(read.key for read in self.reads)

    @functools.cached_property
    def identity(self) -> Identity:
        """What it does."""
        return Identity((self.function, _hashable(self.leaves), self.spec, self.results, self.grad_enabled, self.autocast, self.answers, self.repeats))

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether it is known by its function, its plain arguments and the values of the recording among them: it reads nothing else, and does nothing but make its results, or write into such values."""
        does_more = self.replaces is not None or self.reads or self.bounds or self.draws or hasattr(self.function, "engine")
        return not does_more and all(isinstance(leaf, (Ref, *_CONSTANT)) for leaf in self.leaves) and bool(self.results) and all(isinstance(leaf, Ref) for leaf in self.result_leaves)


class Tape:
    """A recording of one part of the user's loop: forward calls, at most one backward, and gradient code."""

    def __init__(self, engine: "Engine", key: tuple[int, int]):
        self.engine = engine
        self.serial = next(_serials)
        self.seed, self.counter = key  # of the random numbers, in every program made from this tape
        self.calls: list[Call] = []
        self.values: list[Tensor] = []  # fake tensors
        self.promises: dict[int, weakref.ref] = {}
        self.applied: dict[int, tuple[int | None, ...]] = {}  # value made in a torch.autograd.Function's forward -> values of its results
        self.applied_frame: object = None  # of the last such function, by which its forward's further operators are known,
        self.applied_results: tuple[int | None, ...] = ()  # and its results
        self.externals: list[Tensor] = []  # of the whole batch's shape; stand-ins where the loop gave this process's part
        self.sources: list[Tensor] = []  # what the loop gave
        self.external_paths: list[str] = []
        self.rows: dict[int, int] = {}  # size of the first dim of what a flat tensor from outside is a view of, where there are microbatches
        self.loose: set[int] = set()  # tensors from outside that are no arguments of the model
        self.external_versions: list[int] = []  # version counters when they were recorded
        self.copies: dict[int, Tensor] = {}  # of tensors from outside, by their numbers: the loop may write into them before a program reads them
        self.versions: Versions | None = None  # of parameters and buffers when the tape began
        self.grad_modes = engine.grad_modes
        self._structure = engine.structure  # of the model, when the tape began
        self.frozen: frozenset[str] = frozenset()  # parameters that take no gradient at its backward, if the loop has set that of any since it began
        self.backward_at: int | None = None  # number of calls before backward
        self.loss: int | None = None  # value index of the loss
        self.grad_values: dict[str, int] = {}  # parameter name -> value index of the gradient that backward gave
        self.grad_bindings: dict[str, int] = {}  # parameter name -> value index of its .grad now
        self.numbers: dict[int, tuple[list[Call], set[int]]] = {}  # value indices of numbers that are computed of outputs, see `graphacc.loop.microbatches`
        self.outputs: list[int] = []  # value indices, other than the loss, that the loop held at backward
        self.has_run = False  # a program gave the loss, the outputs and the gradients
        self.closed = False
        self.overwritten: str | None = None  # the parameter whose value was written before a backward
        self.lost: str | None = None  # a parameter or buffer that was written before a program of this recording ran, and whose value from before another program has replaced on the devices
        self.without_way_back: set[int] = set()  # values of before a step through which PyTorch could go back, and the programs cannot
        self.is_eager = False  # its values are ordinary results of PyTorch's autograd
        self.bucket: Bucket | None = None  # whose programs run it, padded
        self.region: Region | None = None  # that gave them, if it was not PyTorch
        self.takes_gradients = False  # tensors from outside may require a gradient, for it becomes a region at once
        self.differentiable: set[int] = set()  # externals that do
        self.drawn_at: list[tuple[int, bytes]] = []  # calls that draw random numbers, and where torch's generator stood
        self.num_reads = 0  # of values before backward that took a program
        self.updates = engine.execution.updates  # of parameters, when the tape began
        self.forget_values()
        self._views: dict[int, tuple[Handle, Tensor]] = {}  # values that are views of a parameter's or buffer's memory, as the loop has it when they are made
        self._forward_key: tuple[tuple[list, list], tuple] | None = None  # of these calls and externals, after backward
        self._followed: Template | None = None  # a finished recording that begins with the calls of this one, on tensors of the same forms

    @property
    def parameter_versions(self) -> dict[str, int]:
        """Version counters of the host copies when the tape began."""
        return {} if self.versions is None else self.versions.by_name

    def forget_values(self) -> None:
        """No value has been computed."""
        self._concrete: dict[int, Tensor | Callable[[], Tensor]] = {}
        self._members: dict[int, list[int]] | None = None  # memory of the fake tensors -> which of those
        self._shared = SharedMemory()
        self._given_out: dict[int, Tensor] = {}  # values from before backward whose memory the loop has (NumPy, DLPack), as they were then

    def as_recorded(self) -> contextlib.AbstractContextManager[None]:
        """The model's code runs on the modules of the recorded calls inside; on their tensors, too, unless the engine has followed the loop, or the model's code, to others."""
        return self._structure.restored(tensors=self._structure is self.engine.structure)

    # ---- recording

    def record(self, function: Callable, args: tuple, kwargs: dict, flattened: tuple[list, pytree.TreeSpec] | None = None):
        """Add a call, unless it neither makes nor changes a tensor; returns its result with promises for tensors.

        Args:
            flattened: `trees.flatten` of the arguments, where the caller knows it.

        Raises:
            NotRecorded: the call cannot be part of the recording, which is as it was before.
        """
        if not nothing_around() and (watched := watched_by_autograd() or mode_around()):
            raise NotRecorded(watched)
        counts = len(self.externals), len(self.values)
        given, spec = trees.flatten((args, kwargs)) if flattened is None else flattened
        varying = self._varying(function, given, spec)
        leaves = given
        if varying:
            leaves = [torch.tensor(leaf, dtype=_number_dtype(given) if isinstance(leaf, float) else torch.int64) if i in varying else leaf for i, leaf in enumerate(given)]
        try:
            refs = tuple([leaf if type(leaf) in _PLAIN else self._to_ref(leaf, function, spec, place) for place, leaf in enumerate(leaves)])
            remembered = self._remembered(function, refs, spec, leaves)
            if remembered is None and (variant := self._variant(function, refs, spec)) is not None:
                call = variant
            else:
                call = self._infer(function, refs, spec, leaves, varying) if remembered is None else remembered
            if varying and remembered is None:
                self._check_like(call, function)
            if isinstance(call, Call) and call.bounds:
                self._check_bounds(call.bounds)
            if self.engine.is_model(function):
                told.check_given(given, self.engine.guards)
                if self.engine.fallback.backend is not FX:
                    told.check_gradients(self.engine.handles.values(), self.engine.guards)
                if isinstance(call, Call) and typing.cast("ModelCall", call.function).written.fills:
                    check_apart(args, self.engine.guards.holds)
        except BaseException as error:
            self._forget(*counts)
            if self.engine.programs.local_batch and isinstance(error, NotRecorded) and (place := (len(self.calls), function)) not in self.engine.parts_given:
                self.engine.parts_given.add(place)  # what has the batch's size is this process's part of it
                return self.record(function, args, kwargs)
            if varying and isinstance(error, (NotRecorded, CaptureError)):  # they are needed as numbers of Python
                self.engine.fixed_numbers |= {(len(self.calls), function, i) for i in varying}
                return self.record(function, *pytree.tree_unflatten(given, spec))
            raise
        if isinstance(call, _Plain):
            self._forget(*counts)
            self._note_described(function, leaves, call.result)
            return call.result
        if call.draws and self.backward_at is None:
            call = self._note_draws(call)
        if call.replaces is not None and not isinstance(leaves[call.replaces], Promise):
            self._take_over(leaves[call.replaces], counts)
        self.calls.append(call)
        for index in call.results:
            self._note_view(index)
        self._forget_overwritten(call)
        if call.replaces is not None:
            leaves[call.replaces].bind(self, call.results[0])
        return trees.unflatten([self._given_back(leaf) for leaf in call.result_leaves], call.result_spec)

    def _note_draws(self, call: Call) -> Call:
        """The call, with the earlier one that it repeats; torch's generator moves on, as it would by the call."""
        keys, repeats = self.engine.keys, self.repeated()
        state = keys.state() if self.drawn_at else keys.first()
        if state is None:
            return call
        self.drawn_at.append((len(self.calls), state))
        keys.draw()
        return call if call.repeats == repeats else dataclasses.replace(call, repeats=repeats)

    def repeated(self) -> int | None:
        """The number of an earlier call that draws, and where torch's generator stood as it does now."""
        state = self.engine.keys.state() if self.drawn_at else None
        return next((number for number, before in self.drawn_at if before == state), None)

    def _take_over(self, total: Tensor, counts: tuple[int, int]) -> None:
        """A plain tensor becomes a promise, and what it was stays an input of the program.

        Raises:
            NotRecorded: something else holds it.
        """
        try:
            before = Promise.take_over(total)
        except RuntimeError as error:
            self._forget(*counts)
            raise NotRecorded(f"it writes into a tensor that is held elsewhere: {error}") from error
        for held in (self.sources, self.externals):
            held[:] = [before if tensor is total else tensor for tensor in held]

    def _given_back(self, leaf: object) -> object:
        """What the loop gets for a leaf of a result."""
        if isinstance(leaf, Ref):
            return self.promise(leaf.index)
        if isinstance(leaf, External):
            return self.sources[leaf.index]
        if isinstance(leaf, View):
            return leaf.made_of(self.sources[leaf.of.index])
        return self.engine.handles[leaf.name].tensor if isinstance(leaf, Param) else leaf

    def _varying(self, function: Callable, leaves: Sequence, spec: pytree.TreeSpec) -> set[int]:
        """The numbers among the arguments that are not what they were at this place of the last recording, or of an earlier one."""
        template, place, engine = self.engine.template, len(self.calls), self.engine
        kinds = () if engine.is_model(function) else (int, float, numpy.float64) if function in _ARITHMETIC else (float, numpy.float64)  # for the model see `GivenNumbers`
        found = {i for i, leaf in enumerate(leaves) if type(leaf) in kinds}
        if not found or engine.programs.strategy.precision != "fp32":
            return set()
        if template is not None and place < len(template.calls):
            before = template.calls[place]
            if _same_code(before.function, function) and before.spec == spec:
                changed = [i for i in found if type(before.leaves[i]) is type(leaves[i]) and before.leaves[i] != leaves[i]]
                engine.varying_numbers |= {(place, function, i) for i in changed if not self._is_length(before.leaves[i], leaves[i])}
        varying = {key: i for i in found if (key := (place, function, i)) in engine.varying_numbers}
        for key in varying.keys() & engine.fixed_numbers:
            if engine.number_streaks.note(key, leaves[varying[key]]) and engine.options.capture == "auto":
                raise NotRecorded(PER_VALUE.format(f"among the arguments of {_name(function)}"))
        return {i for key, i in varying.items() if key not in engine.fixed_numbers}

    def _is_length(self, before: object, now: object) -> bool:
        """Whether a number follows the length of the batch, as ``len(x) * x.shape[1]`` does: where lengths are bucketed, a bucket's program has it."""
        template = self.engine.template
        if self.engine.buckets is None or template is None or not (isinstance(before, int) and isinstance(now, int)):
            return False
        shapes = zip(template.sources, self.sources)
        return any(one != other and before * other == now * one for old, new in shapes if old.dim() == new.dim() for one, other in zip(old.shape, new.shape))

    def _check_like(self, call: "Call | _Plain", function: Callable) -> None:
        """A number that became an input must not change the results' shapes and dtypes."""
        before = self.engine.template.calls[len(self.calls)] if len(self.calls) < len(self.engine.template.calls) else None
        if before is None or not _same_code(before.function, function):
            return
        now = [(self.values[i].shape, self.values[i].dtype) for i in getattr(call, "results", ())]
        if now != [(self.engine.template.values[i].shape, self.engine.template.values[i].dtype) for i in before.results]:
            raise NotRecorded("a number that changes has another dtype as an input")

    def _forget(self, num_externals: int, num_values: int) -> None:
        """Take back what a call that is not recorded had added."""
        del self.values[num_values:]
        for held in (self.externals, self.sources, self.external_paths, self.external_versions):
            del held[num_externals:]
        self.copies = {index: copied for index, copied in self.copies.items() if index < num_externals}
        self.loose = {index for index in self.loose if index < num_externals}
        self.rows = {index: rows for index, rows in self.rows.items() if index < num_externals}
        self.differentiable -= {index for index in self.differentiable if index >= num_externals}

    def _forget_overwritten(self, call: Call) -> None:
        """Values that were read before the call wrote into their memory have to be computed again."""
        self._members = None
        if not call.writes:
            return
        memory = {memory_of(self.values[index]) for index in call.writes}
        for index in [i for i in self._concrete if memory_of(self.values[i]) in memory]:
            del self._concrete[index]
        for overwritten in memory:
            self._shared.forget(overwritten)

    def promise(self, index: int) -> Promise:
        """The promise of a value: the living one if the loop holds it, else a new one."""
        existing = self.promises.get(index)
        alive = existing() if existing is not None else None
        return Promise(self, index) if alive is None else alive

    def add_value(self, fake: Tensor) -> int:
        self.values.append(fake)
        return len(self.values) - 1

    def _to_ref(self, leaf, function: Callable, spec: pytree.TreeSpec, place: int):
        """What a leaf of a call's arguments is to the recording.

        Args:
            spec, place: the leaf's number in the tree of the arguments.
        """
        if isinstance(leaf, Promise):
            if leaf.tape is self:
                return Ref(leaf.index)
            leaf = leaf.tape.value(leaf.index)
        if not isinstance(leaf, Tensor):
            if not (_is_static(leaf) or callable(leaf)):
                raise NotRecorded(f"{self._path(function, spec, place)} is a {type(leaf).__name__}, which a compiled program cannot see into")
            return leaf
        if (handle := handle_of(leaf)) is not None:
            if handle.engine is self.engine:
                return Param(handle.name)
            leaf = handle.engine.host_tensor(handle)
        path = self._path(function, spec, place)
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise NotRecorded(f"{path} is a {'nested' if leaf.is_nested else str(leaf.layout).removeprefix('torch.')} tensor")
        wanted = leaf.requires_grad and torch.is_grad_enabled() and self.backward_at is None
        if wanted and (not self.takes_gradients or handle is not None):
            raise NotRecorded(f"{path}, of shape {list(leaf.shape)}, requires a gradient but is no parameter of the compiled model")
        is_argument = self.engine.is_model(function) and trees.paths(spec)[place][1].idx > 0  # of (inputs, args, kwargs)
        for index, known in enumerate(self.sources):
            if known is leaf and self._is_as_it_was(index):
                if is_argument:
                    self.loose.discard(index)
                return External(index)
        path = f"{len(self.calls)}.{path}" if self.calls else path
        path = path if path not in self.external_paths else f"{path}#{len(self.sources)}"
        self.sources.append(leaf)
        self.external_paths.append(path)
        tries_whole = not self.engine.is_model(function) and (len(self.calls), function) not in self.engine.parts_given and leaf.dim() > 0 and leaf.shape[0] > 1
        if self.engine.programs.local_batch and self.backward_at is None and not (tries_whole and path not in self.engine.programs.batch_dims):
            self.externals.append(self.engine.programs.stand_in(path, leaf, dict(zip(self.external_paths, self.sources, strict=True))))
        else:
            self.externals.append(leaf)
        self.external_versions.append(version_of(leaf))
        if self.engine.programs.strategy.microbatches > 1 and (rows := _rows_before_flattening(leaf)) is not None:
            self.rows[len(self.externals) - 1] = rows
        elif not is_argument:
            self.loose.add(len(self.externals) - 1)
        if wanted:
            self.differentiable.add(len(self.externals) - 1)
        else:
            self.copies[len(self.externals) - 1] = leaf.detach().clone()
        return External(len(self.externals) - 1)

    def _path(self, function: Callable, spec: pytree.TreeSpec, place: int) -> str:
        """What an argument is called in messages and in ``batch_dims``, such as ``model.kwargs['labels']``."""
        path = trees.paths(spec)[place]
        if not self.engine.is_model(function):
            return f"{_name(function)}.{('args', 'kwargs')[path[0].idx]}{pytree.keystr(path[1:])}"
        part = path[1].idx  # of (inputs, args, kwargs)
        return path[2].key if part == 0 else f"model.{('args', 'kwargs')[part - 1]}{pytree.keystr(path[2:])}"

    def _remembered(self, function: Callable, refs: tuple, spec: pytree.TreeSpec, given: Sequence) -> Call | None:
        """The call at this place of a recent tape, if all calls so far, and this one, were the same there."""
        self._followed = None
        for template in self.engine.recent:
            if (call := self._remembered_from(template, function, refs, spec, given)) is not None:
                self.values.extend(template.values[len(self.values) : max(call.results, default=-1) + 1])
                self._followed = template
                return call
        return None

    def follow(self, function: Callable, leaves: Sequence, spec: pytree.TreeSpec):
        """Add a call that is the next one of the recording that this one follows; None, and nothing is added, where `record` has to look at it.

        Code on the gradients of every parameter makes most of a loop's calls: clipping three for each.
        """
        if function in DESCRIBES:
            return self._described(function, leaves)
        template, place = self._followed, len(self.calls)
        if template is None or place >= len(template.calls) or self.calls[-1] is not template.calls[place - 1]:
            return None
        if self.applied or self.engine.fixed_numbers:  # whose values are counted
            return None
        call = template.calls[place]
        if call.asked is not function or call.spec is not spec or not call.is_simple or call.grad_enabled is not torch.is_grad_enabled() or call.autocast is not autocast_dtype():
            return None
        for leaf, known in zip(leaves, call.leaves):
            if type(known) is Ref:
                if type(leaf) is not Promise or leaf.tape is not self or leaf.index != known.index:
                    return None
                if not call.grad_enabled and self.values[known.index].requires_grad:
                    return None  # it may belong to the forward of a torch.autograd.Function
            elif leaf is not known and (type(leaf) is not type(known) or leaf != known):
                return None
        if not template.views.isdisjoint(call.results) or not nothing_around():
            return None
        self.values.extend(template.values[len(self.values) : max(call.results) + 1])
        self.calls.append(call)
        self._forget_overwritten(call)
        if call.result_spec.num_nodes == 1:
            return self.promise(call.results[0])
        return trees.unflatten([self.promise(leaf.index) for leaf in call.result_leaves], call.result_spec)

    @property
    def goes_on(self) -> bool:
        """Whether the loop can add calls, and is not the model's code."""
        return not self.closed and not self.engine.capturing

    def _described(self, function: Callable, leaves: Sequence):
        """What a function says of a value's form, if it has been asked before."""
        value = self.values[leaves[0].index]
        return self.engine.described.get(_form_asked_for(function, value, leaves)) if value.layout is torch.strided and nothing_around() else None

    def _note_described(self, function: Callable, leaves: Sequence, result: object) -> None:
        if function not in DESCRIBES or not isinstance(leaves[0], Promise) or leaves[0].tape is not self:
            return
        value, described = self.values[leaves[0].index], self.engine.described
        if value.layout is torch.strided:
            if len(described) >= MAX_DESCRIBED:
                described.clear()
            described[_form_asked_for(function, value, leaves)] = result

    def _remembered_from(self, template: "Template", function: Callable, refs: tuple, spec: pytree.TreeSpec, given: Sequence) -> Call | None:
        place = len(self.calls)
        if place >= len(template.calls) or self.differentiable != template.differentiable or not self._follows(template):
            return None
        call = template.calls[place]
        if (call.grad_enabled, call.autocast) != (torch.is_grad_enabled(), autocast_dtype()) or call.spec != spec or not _same_leaves(call.leaves, refs) or call.asked != function:
            return None
        same = all(self.external_key(ref.index) == template.external_key(ref.index) for ref in refs if isinstance(ref, External))
        if not same or (call.replaces is not None and not _is_total(given[call.replaces], self)):
            return None
        if call.draws and self.backward_at is None and call.repeats != self.repeated():
            return None
        return call if self._answered_again(call.reads, template.external_key) else None

    def _answered_again(self, reads: Sequence[Read], key_of: Callable[[int], tuple]) -> bool:
        """Whether this batch gives the same answers; tensors among them are added to the externals.

        Args:
            key_of: the shape and dtype of an external of the recording that asked.
        """
        if not reads:
            return True
        count, answering = len(self.externals), Answering(self._real)
        for read in reads:
            found = answering.result(read.operations)
            if not read.inputs:
                same = repr(found) == repr(read.answer)
            else:
                same = True
                for external, tensor in zip(read.inputs, pytree.tree_leaves(found), strict=True):
                    same = self.add_derived(tensor) == external and self.external_key(external.index) == key_of(external.index) and same
            if not same:
                self._forget(count, len(self.values))
                return False
        return True

    def add_derived(self, tensor: Tensor) -> External:
        """A tensor that was computed from the batch, whose shape depends on values, as a tensor from outside."""
        index = len(self.externals)
        for held in (self.sources, self.externals):
            held.append(tensor)
        self.external_versions.append(version_of(tensor))
        self.external_paths.append(f"derived from the batch #{index}")
        return External(index)

    def _check_bounds(self, bounds: Sequence[Bound]) -> None:
        """Check indices in the batch.

        Raises:
            BatchIndexError: one is out of range.
            BatchValueError: an integer is divided by 0, or a mask has more true elements than there are values.
        """
        answering = Answering(self._real)
        for bound in bounds:
            value = None if bound.source is None else bound.range.violation(self.sources[bound.source.index])
            if (bound.source is None or value is not None) and not self.engine.programs.local_batch:  # operators were noted with the shapes of the whole batch
                value = bound.range.violation(answering.value(bound.operations, bound.index))
            if value is not None:
                raise bound.error(value)

    def _real(self, place: object) -> object:
        """The real tensor of an External or a Param; other values as they are."""
        if isinstance(place, External):
            return self.externals[place.index].detach()
        return self.engine.buffer_now(place.name, self) if isinstance(place, Param) else place

    def _variant(self, function: Callable, refs: tuple, spec: pytree.TreeSpec) -> Call | None:
        """An earlier recording of this first call of a tape whose code gets the same answers from this batch.

        Raises:
            NotRecorded: with these answers it cannot be recorded, or there were too many different answers.
        """
        known = self.engine.variants.get(self._variants_key(function, refs, spec), ())
        for variant in known:
            if self._answered_again(variant.reads, variant.shapes.__getitem__):
                if variant.call is None:
                    raise NotRecorded(variant.why)
                self.values.extend(variant.values)
                return variant.call
        if len(known) >= MAX_ANSWERS:
            asked = next(read.function for variant in known for read in variant.reads)
            raise NotRecorded(
                f"its code depends on values of the batch ({asked}), which were different in more than {MAX_ANSWERS} calls: ask for less "
                "(`labels.max() >= n` instead of `labels.max().item()`), or make lengths multiples of a number"
            )
        return None

    def _variants_key(self, function: Callable, refs: tuple, spec: pytree.TreeSpec) -> tuple:
        shapes = tuple(self.external_key(ref.index) for ref in refs if isinstance(ref, External))
        modes = torch.is_grad_enabled(), autocast_dtype(), tuple(sorted(self.differentiable))
        return function, _hashable(refs), spec, shapes, modes, len(self.calls), len(self.values)

    def _keep_variant(self, key: tuple, reads: Sequence[Read], call: Call | None, why: str = "") -> None:
        if not reads or any(isinstance(leaf, Ref) for leaf in key[1]):
            return
        shapes = {external.index: self.external_key(external.index) for read in reads for external in read.inputs}
        values = tuple(self.values[key[-1] :])
        variants = self.engine.variants
        variants.setdefault(key, []).append(Variant(tuple(reads), shapes, call, values, why))
        while len(variants) > MAX_QUESTIONED:
            variants.pop(next(iter(variants)))

    def as_template(self) -> "Template":
        """What later recordings compare themselves with."""
        keys = [self.external_key(index) for index in range(len(self.externals))]
        return Template(
            self.calls, self.values, keys, self.backward_at, tuple(self.grad_values), frozenset(self.differentiable), frozenset(self._views), self.forward_key, self.gradient_key
        )

    def is_another(self, template: "Template") -> bool:
        """Whether it is finished, and a template of it would be of the same calls as this one."""
        if len(self.calls) != len(template.calls) or len(self.externals) != len(template.keys) or not all(map(operator.is_, self.calls, template.calls)):
            return False
        same = (self.backward_at, tuple(self.grad_values), self.differentiable) == (template.backward_at, template.gradients, template.differentiable)
        return same and all(map(operator.eq, map(self.external_key, range(len(template.keys))), template.keys))

    def _follows(self, template: "Template") -> bool:
        if self.backward_at is not None and (self.backward_at, tuple(self.grad_values)) != (template.backward_at, template.gradients):
            return False
        return not self.calls or self.calls[-1] is template.calls[len(self.calls) - 1]

    def whole_external(self, index: int) -> Tensor:
        """A tensor that the loop gave, for code that PyTorch runs.

        Raises:
            LoopError: programs have only this process's part of it.
        """
        if self.externals[index] is not self.sources[index]:
            raise LoopError(
                f"{self.external_paths[index]} is this process's part of the batch, and code on gradients that is run outside of the step "
                'reads it: use batch="global", or leave the gradients unread until optimizer.step()'
            )
        return self.external(index)

    def external(self, index: int) -> Tensor:
        """A tensor from outside as it was when it was recorded.

        Raises:
            LoopError: it was written in place since, and there is no copy.
        """
        tensor = self.sources[index]
        if self._is_as_it_was(index) and (index in self.copies or version_of(tensor) == self.external_versions[index]):
            return tensor
        if index not in self.copies:
            raise LoopError(
                f"{self.external_paths[index]}, which requires a gradient, was written in place between its use and optimizer.step(), where the compiled step "
                "reads it: fill the next batch into it after the step, or pass a copy (.clone())"
            )
        return self.copies[index]

    def given(self, index: int) -> Tensor:
        """The values of a tensor from outside when it was recorded, to be read alone: the loop's own is left as it is (``.numpy()`` forbids ``resize_``)."""
        return self.copies[index] if index in self.copies else self.external(index)

    def _is_as_it_was(self, index: int) -> bool:
        """Whether a tensor from outside still has the values of its copy; True where there is none."""
        copied = self.copies.get(index)
        if copied is None:
            return True
        tensor = self.sources[index]
        is_counted = tensor.untyped_storage().resizable()  # nobody counts the writes into NumPy's memory
        return version_of(tensor) == self.external_versions[index] and (is_counted or torch.equal(tensor, copied))

    def external_key(self, index: int) -> tuple:
        tensor = self.externals[index]
        return tuple(tensor.shape), tensor.dtype, *((self.rows[index],) if index in self.rows else ())

    def _infer(self, function: Callable, refs: tuple, spec: pytree.TreeSpec, given: Sequence, varying: Collection[int]) -> "Call | _Plain":
        """Run the call on fake tensors."""
        fakes = [self.engine.fake(self._resolve(ref)) if isinstance(ref, (Ref, External, Param)) else ref for ref in refs]
        for fake, ref in zip(fakes, refs):
            if isinstance(ref, External) and ref.index in self.differentiable:
                fake.requires_grad_()
        versions = [version_of(fake) if isinstance(fake, Tensor) else None for fake in fakes]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        recorder = self._recorder([(fake, ref) for i, (fake, ref) in enumerate(zip(fakes, refs)) if isinstance(ref, External) and i not in varying])
        variants = self._variants_key(function, refs, spec)
        try:
            result = self.engine.run_fake(function, args, kwargs, recorder)
        except (NotRecorded, CaptureError) as error:
            if recorder is None or not recorder.reads:
                raise
            self._keep_variant(variants, recorder.reads, None, str(error))  # with other answers it may go another way
            raise NotRecorded(str(error)) from error
        if recorder is not None:
            self._check_bounds([bound for bound in recorder.bounds if not bound.every_call])
        if self.engine.is_model(function):
            told.check_returned(result[0], self.engine.guards)
        leaves, result_spec = objects.flatten(result)
        fills = result[2] if self.engine.is_model(function) else ()
        if self.engine.is_model(function) and any(isinstance(leaf, Iterator) for leaf in leaves):
            raise CaptureError(
                "the model returns an iterator (a generator, map or zip), whose code runs only when the loop reads it: return a list or a tuple of what it gives"
            )
        if self.engine.is_model(function) and (computes := [leaf for leaf in leaves if isinstance(leaf, _COMPUTES) or (callable(leaf) and not _is_static(leaf))]):
            raise CaptureError(f"the model returns a {type(computes[0]).__name__}, which computes with tensors when the loop calls it: return those, and make it of them in the loop")
        written = [i for i, fake in enumerate(fakes) if isinstance(fake, Tensor) and version_of(fake) != versions[i]]
        if not written and leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):
            if all(leaf is not None and _is_static(leaf) for leaf in leaves):
                return _Plain(result)
        if not self.engine.is_model(function):
            makes = written or any(isinstance(leaf, Tensor) for leaf in leaves)
            if not makes or not all(isinstance(leaf, Tensor) or _is_static(leaf) for leaf in leaves):
                raise NotRecorded("it is called for what it does, not for a tensor that it returns")
            if torch.is_inference_mode_enabled() and writes_by_name(function):
                raise NotRecorded("it writes under torch.inference_mode")
        replaces = self._check_writes(refs, given, fakes, written, leaves)
        by_id = {id(fake): i for i, fake in enumerate(self.values)}
        outside = self._outside(function, [(fake, ref) for i, (fake, ref) in enumerate(zip(fakes, refs)) if i not in varying and i != replaces])
        result_leaves, indices = [], []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in by_id and (place := _place(leaf, outside)) is not None:
                leaf = place
            elif isinstance(leaf, Tensor):
                index = by_id[id(leaf)] if id(leaf) in by_id else self.add_value(leaf)
                by_id[id(leaf)] = index
                indices.append(index)
                leaf = Ref(index)
            elif not _is_static(leaf):
                if any(leaf is given for given in pytree.tree_leaves(fills)):
                    raise NotRecorded(f"its code puts a {type(leaf).__name__} into a list or a dict that it is given")
                leaf = Opaque(type(leaf).__name__)
            result_leaves.append(leaf)
        if self.engine.is_model(function) and (hidden := [leaf for leaf in result_leaves if isinstance(leaf, Opaque)]) and not any(isinstance(leaf, (Ref, External, Param, View)) for leaf in result_leaves):
            raise NotRecorded(f"all that it returns is in a {hidden[0].kind}, which a program cannot return: return a tuple, a dict or a dataclass")
        reads, bounds = ((), ()) if recorder is None else (tuple(recorder.reads), _distinct(recorder.bounds))
        call = Call(
            function=self.engine.answered(function, tuple(read.key for read in reads)),
            asked=function,
            leaves=refs,
            spec=spec,
            results=tuple(indices),
            result_leaves=tuple(result_leaves),
            result_spec=result_spec,
            grad_enabled=torch.is_grad_enabled(),
            autocast=autocast_dtype(),
            writes=tuple(refs[i].index for i in written if isinstance(refs[i], Ref)),
            replaces=replaces,
            reads=reads,
            log=None if recorder is None else recorder.kept_log(self.values[index] for index in indices),
            bounds=bounds,
            ranges=frozenset() if recorder is None else frozenset(recorder.ranges),
            operators=() if recorder is None else tuple(recorder.operators),
            unused=self._unused(fakes, refs, leaves),
            draws=self.engine.fakes.drew,
        )
        self._keep_variant(variants, reads, call)
        return call

    def _outside(self, function: Callable, given: list[tuple]) -> "list[tuple[Tensor, External | Param]]":
        """The fake tensors of what a call may give back: its arguments, and the parameters and buffers of the model."""
        arguments = [(fake, ref) for fake, ref in given if isinstance(ref, External) and self.externals[ref.index] is self.sources[ref.index]]
        if not self.engine.is_model(function):
            return [*arguments, *((fake, ref) for fake, ref in given if isinstance(ref, Param))]
        return [*arguments, *((self.engine.fake(Param(name)), Param(name)) for name in self.engine.handles)]

    def _unused(self, fakes: Sequence, refs: tuple, results: Sequence) -> frozenset[int]:
        differentiable = {id(fake): ref.index for fake, ref in zip(fakes, refs) if isinstance(ref, External) and ref.index in self.differentiable}
        if not differentiable:
            return frozenset()
        reached = {id(leaf) for leaf in reached_leaves(result for result in results if isinstance(result, Tensor))}
        return frozenset(index for fake, index in differentiable.items() if fake not in reached)

    @property
    def inputs(self) -> list[int]:
        """The tensors from outside to which a gradient flows from the forward part."""
        return sorted(i for i in self.differentiable if any(i in call.externals and i not in call.unused for call in self.forward_calls))

    def _recorder(self, leaves: list) -> Recorder | None:
        """What notes bounds of indices in the batch, and answers reads of it unless the batch that a program gets is not the one that the loop gave."""
        engine = self.engine
        if engine.fallback.backend is not FX:
            return None
        buffers = [] if any(engine.is_model(call.function) for call in self.calls) else engine.fakes.of_buffers()

        def add_input(tensor: Tensor) -> tuple[External, Tensor]:
            external = self.add_derived(tensor)
            return external, engine.fake(tensor)

        logs = [call.log for call in self.calls if call.log is not None]
        answering = Answering(self._real) if engine.answers_reads else None
        return Recorder([*leaves, *((fake, Param(name)) for name, fake in buffers)], logs, answering, add_input, engine.buckets is not None)

    def _check_writes(
        self, refs: tuple, given: Sequence, fakes: Sequence, written: Sequence[int], results: Sequence
    ) -> int | None:
        """The leaf that the result replaces, if any.

        Raises:
            NotRecorded: the call writes into memory that is not the recording's own.
            LoopError: it writes into a parameter, through a view that is a value of the recording.
        """
        after = self.backward_at is not None
        for i in written:
            if isinstance(refs[i], Ref) and (handle := self.engine.fakes.owner(fakes[i])) is not None:
                raise LoopError(
                    f"a view of {handle.name!r} that was made between a call of the model and its backward() is written in place, which the recording does not follow into the "
                    "parameter: write into the parameter itself under torch.no_grad(), before the call or after the step"
                )
        outside = [i for i in written if not isinstance(refs[i], Ref) or (after and self._is_forward(refs[i].index))]
        if not outside:
            return None
        index = outside[0]
        if len(outside) == 1 and _is_total(given[index], self) and results and results[0] is fakes[index] and not results[0].requires_grad:
            return index
        raise NotRecorded(f"it writes into a tensor of shape {list(fakes[index].shape)} that is not part of the recording")

    def _is_forward(self, index: int) -> bool:
        """Whether a value was made before backward, or is a view of one that was."""
        memory = memory_of(self.values[index])
        return any(memory_of(self.values[i]) == memory for call in self.forward_calls for i in call.results)

    def _resolve(self, ref: "Ref | External | Param") -> "Tensor | Param":
        if isinstance(ref, Ref):
            return self.values[ref.index]
        return self.externals[ref.index] if isinstance(ref, External) else ref

    # ---- backward and values

    def backward(self, loss: Promise, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """Record ``loss.backward()``.

        Raises:
            NotRecorded: it is not the one plain backward that a recording may have.
        """
        fake = self.values[loss.index]
        if not fake.requires_grad:
            raise LoopError("backward(): the loss does not depend on any parameter that requires grad")
        if fake.numel() != 1 and gradient is None:
            raise LoopError(f"backward() needs a scalar loss, got shape {list(fake.shape)}: reduce it with .mean() or .sum() first")
        if self.backward_at is not None and (loss.index == self.loss or self.engine.ways_back.is_open(self, loss.index) is False):
            raise freed()
        if self.backward_at is not None:
            raise NotRecorded("it is the second backward() of one recording")
        if gradient is not None or create_graph or retain_graph or inputs is not None:
            raise NotRecorded("it has arguments (gradient, retain_graph, create_graph or inputs)")
        self.check_given_out()
        self.loss = loss.index
        self.backward_at, self._followed = len(self.calls), None
        if self.grad_modes != self.engine.grad_modes:
            self.frozen = frozenset(handle.name for handle in self.engine.handles.values() if handle.kind is Kind.PARAM and not handle.trains)
        self.engine.gradients.backward(self)

    def give_out(self, index: int) -> None:
        """The loop gets access to the memory of a value which programs compute again."""
        if not self.closed and not self.is_eager and self.backward_at is None:
            self._given_out[index] = self.value(index).clone()

    def check_given_out(self) -> None:
        """Before what follows from the values is computed.

        Raises:
            LoopError: the loop has written into one, where the recording does not see it.
        """
        for index, before in self._given_out.items():
            if isinstance(now := self._concrete.get(index), Tensor) and not same_bits(now, before):
                raise LoopError(
                    f"a result of the model, of shape {list(before.shape)}, was written through NumPy or DLPack before backward(), and the compiled step computes it again: "
                    "write into a copy (result.detach().clone().numpy()), or into the tensor by a torch function"
                )
        self._given_out.clear()

    def live(self) -> list[int]:
        """Value indices, other than the loss, whose promises the user's loop still holds."""
        alive = map(operator.is_not, map(operator.call, self.promises.values()), itertools.repeat(None))
        return sorted({*itertools.compress(self.promises, alive)} - {self.loss})

    def fulfil(self, index: int, value: "Tensor | Callable[[], Tensor]") -> None:
        """Give a value its tensor, or a function that fetches it when somebody reads it."""
        self._concrete[index] = value
        self._members = None

    def let_go_of_gradients(self) -> None:
        """Forget the gradients, and what was computed from them, that the loop does not hold: their memory is then the loop's alone."""
        alive = {*self.live(), self.loss}
        for index in {*self.grad_values.values(), *(i for call in self.gradient_calls for i in call.results)} - alive:
            self._concrete.pop(index, None)
        self._members = None

    def value(self, index: int) -> Tensor:
        """The tensor of a value; runs what is needed."""
        if (alias := self._view_of_parameter(index)) is not None:
            return alias
        if torch.is_inference_mode_enabled() and not isinstance(self._concrete.get(index), Tensor) and not self.values[index].is_inference():
            with torch.inference_mode(False):  # where a value is read first says nothing of what it is
                return self.value(index)
        if index not in self._concrete:
            self.engine.materialize(self, index)
        value = self._concrete[index]
        if not isinstance(value, Tensor):
            fake, fetch = self.values[index], value
            value = self._concrete[index] = self._shared.put(fake, lambda: fetch().to(fake.dtype), self._sharing(index))  # as it was promised: under precision="bf16" programs give another
        return value

    def number(self, index: int) -> float:
        """A value of no dims, which does not become the loop's tensor by that."""
        read = getattr(self._concrete.get(index), "number", None)  # of what fetches it
        found = None if read is None else read()
        return self.value(index).item() if found is None else found

    def _sharing(self, index: int) -> "Iterator[tuple[Tensor, object]]":
        """The values that programs gave, or will give, and that share memory with one: each with its tensor, or what fetches it."""
        if self._members is None:
            self._members = {}
            for i in self._concrete:
                self._members.setdefault(memory_of(self.values[i]), []).append(i)
        for i in self._members[memory_of(self.values[index])]:
            if i != index:
                yield self.values[i], self._concrete[i]

    def _note_view(self, index: int) -> None:
        """Keep the memory that a value shares with a parameter: another one may take its place (``p.data = ...``)."""
        fake = self.values[index]
        if (handle := self.engine.fakes.owner(fake)) is not None and not handle.frees_host:
            self._views[index] = handle, handle.host_value().as_strided(fake.size(), fake.stride(), fake.storage_offset())

    def _view_of_parameter(self, index: int) -> Tensor | None:
        """What a value is that is a view of a parameter: the parameter's memory, which changes with it, and in autograd's graph if that is where the value is used."""
        if index not in self._views or (self.is_eager and self.region is None):
            return None
        handle, view = self._views[index]
        handle.refresh()
        handle.viewed = True
        fake, own = self.values[index], handle.tensor
        if fake.requires_grad and torch.is_grad_enabled() and (self.closed or self.region is not None):
            handle.differentiated = True
            with torch._C.DisableTorchFunctionSubclass():
                if memory_of(own) == memory_of(view):
                    return own.as_strided(fake.size(), fake.stride(), fake.storage_offset())
        return view

    def has_value(self, index: int) -> bool:
        return index in self._concrete

    def was_read(self, index: int) -> bool:
        """Whether a value is a tensor already."""
        return isinstance(self._concrete.get(index), Tensor)

    def is_ready(self, index: int) -> bool:
        """Whether a value that was computed, or is being computed, can be read without waiting for a device."""
        value = self._concrete[index]
        asked = getattr(value, "is_ready", None)  # of what fetches it
        return isinstance(value, Tensor) or (asked is not None and asked())

    # ---- replay and identity

    def replay(
        self, calls: Sequence[Call], env: dict[int, Tensor], externals: Mapping[int, Tensor], named: Mapping[str, Tensor] | TensorsNow
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

        streams: list[int] = []  # the first one of random numbers of every call
        for call in tuple(calls):
            leaves = [resolve(leaf) for leaf in call.leaves]
            if call.replaces is not None:
                leaves[call.replaces] = leaves[call.replaces].clone()  # a replay must not add to it again
            args, kwargs = pytree.tree_unflatten(leaves, call.spec)
            answers = self.engine.answers(call.reads, {External(index): tensor for index, tensor in externals.items()})
            drawn = streams_from(None if call.repeats is None else streams[call.repeats])
            with torch.set_grad_enabled(call.grad_enabled and torch.is_grad_enabled()), self.engine.autocast(call.autocast), answers, drawn as first:
                result = call.function(*args, **kwargs)
            streams.append(first)
            tensors = [leaf for leaf in objects.flatten(result)[0] if isinstance(leaf, Tensor)]
            places = [leaf for leaf in call.result_leaves if isinstance(leaf, (Ref, External, View, Param))]
            if len(tensors) != len(places):
                raise CaptureError(
                    f"{_name(call.function)} gives {len(tensors)} tensors of a part of the batch, and {len(places)} of all of it, of which the loop took each by itself (a loop over the rows "
                    "of a result): compute with all rows at once, or leave microbatches out"
                )
            env.update((place.index, tensor) for place, tensor in zip(places, tensors) if isinstance(place, Ref))

    def reads(self, call: Call) -> set[int]:
        """The values that a call reads."""
        return {leaf.index for leaf in call.leaves if isinstance(leaf, Ref)}

    @property
    def forward_calls(self) -> list[Call]:
        return self.calls[: self.backward_at]

    @property
    def gradient_calls(self) -> list[Call]:
        return [] if self.backward_at is None else self.calls[self.backward_at :]

    def key(self, calls: list[Call]) -> tuple:
        """Hashable identity of recorded calls: the code, and the shapes and dtypes of the externals that it uses."""
        used = sorted({index for call in calls for index in call.externals})
        return (
            Identity(tuple([call.identity for call in calls])),
            tuple((index, *self.external_key(index)) for index in used),
        )

    @property
    def forward_key(self) -> tuple:
        """`key` of the forward calls; that of a finished recording of the same calls, if there is one."""
        if self.backward_at is None:
            return self._find_forward_key()
        held = (self.calls, self.externals)  # a copy for other lengths, or of some calls, has others
        if self._forward_key is None or not all(map(operator.is_, self._forward_key[0], held)):
            self._forward_key = held, self._find_forward_key()
        return self._forward_key[1]

    def _find_forward_key(self) -> tuple:
        calls = self.forward_calls
        for template in self.engine.recent:
            known = template.calls[: template.backward_at]
            if len(known) == len(calls) and all(map(operator.is_, known, calls)) and self._gets_like(template):
                return template.forward_key
        return self.key(calls)

    @property
    def gradient_key(self) -> tuple:
        """`key` of the code on gradients, and the forms of the values from before the backward that it reads."""
        calls = self.gradient_calls
        if not calls:
            return ()
        for template in self.engine.recent:
            if self.is_another(template):
                return template.gradient_key
        made = {*self.grad_values.values(), *(index for call in calls for index in call.results)}
        read = sorted({leaf.index for call in calls for leaf in call.leaves if isinstance(leaf, Ref)} - made)
        return self.key(calls), tuple((index, tuple(self.values[index].shape), self.values[index].dtype) for index in read)

    def _gets_like(self, template: "Template") -> bool:
        """Whether the tensors from outside that the forward calls use have the shapes and dtypes of a finished recording's."""
        if list(map(self.external_key, range(len(self.externals)))) == template.keys:
            return True
        return all(self.external_key(index) == template.external_key(index) for call in self.forward_calls for index in call.externals)


@dataclasses.dataclass(frozen=True)
class Template:
    """A finished recording, without its tensors."""

    calls: list[Call]
    values: list[Tensor]  # fake tensors
    keys: list[tuple]  # shape and dtype of every external
    backward_at: int | None
    gradients: tuple[str, ...]  # parameters that its backward gave gradients, which are the values after those of the forward calls
    differentiable: frozenset[int]
    views: frozenset[int]  # values that are views of parameters or buffers
    forward_key: tuple  # of its forward calls, see `Tape.key`
    gradient_key: tuple  # see `Tape.gradient_key`

    def external_key(self, index: int) -> tuple:
        return self.keys[index]

    def is_like(self, other: "Template") -> bool:
        """Whether it is of the same calls."""
        same = len(self.calls) == len(other.calls) and all(map(operator.is_, self.calls, other.calls))
        return same and (self.backward_at, self.gradients, self.keys) == (other.backward_at, other.gradients, other.keys)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A recording of a call, or why there is none, for the answers that its code got."""

    reads: tuple[Read, ...]
    shapes: Mapping[int, tuple]  # external -> shape and dtype, of tensors among the answers
    call: Call | None
    values: tuple[Tensor, ...]  # fake tensors that the call added
    why: str


@dataclasses.dataclass(frozen=True)
class _Plain:
    """The result of a function that is no tensor (a size, a dtype)."""

    result: object


DESCRIBES = frozenset({Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.__len__, Tensor.is_floating_point})
DESCRIBES |= {typing.cast(typing.Any, getattr(Tensor, name)).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes")}
"""Functions whose results follow from the form of a tensor: its shape, strides and dtype."""

MAX_DESCRIBED = 1024
"""Results of these that are remembered."""


def _form_asked_for(function: Callable, value: Tensor, leaves: Sequence) -> tuple:
    return function, value.shape, value.stride(), value.dtype, *leaves[1:]


_ARITHMETIC = {getattr(Tensor, f"__{side}{name}__") for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow")}
_ARITHMETIC |= {getattr(owner, name) for owner in (torch, Tensor) for name in ("add", "sub", "mul", "div", "pow", "true_divide")}
"""Functions among whose arguments an int is a number, and no size or index."""

_serials = itertools.count()


def autocast_dtype() -> torch.dtype | None:
    """The dtype of the torch.autocast around the caller, which scripts write for CUDA or for the CPU; None outside of one."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _place(result: Tensor, outside: "Sequence[tuple[Tensor, External | Param]]") -> "External | View | Param | None":
    """What a call gave back, if its result is none that it made."""
    for fake, place in outside:
        if result is fake:
            return place
    shown = (result.layout, result.is_conj(), result.is_neg()) == (torch.strided, False, False)
    for fake, place in outside:
        if shown and isinstance(place, External) and not result.requires_grad and result.dtype is fake.dtype and memory_of(result) == memory_of(fake):
            return View(place, tuple(result.shape), result.stride(), int(result.storage_offset() - fake.storage_offset()))
    return None


def reached_leaves(results: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of autograd's graph from which tensors are computed, or which they are."""
    found = []
    stack: list[typing.Any] = []
    for result in results:
        if result.grad_fn is None:
            found.append(result)
        else:
            stack.append(result.grad_fn)
    seen: set[object] = set()
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if (variable := getattr(function, "variable", None)) is not None:
            found.append(variable)
        stack.extend(following for following, _ in function.next_functions)
    return found


def _number_dtype(leaves: Sequence) -> torch.dtype:
    """The dtype in which a number takes part in arithmetic with these."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.float64 if any(isinstance(leaf, Tensor) and leaf.dtype is torch.float64 for leaf in leaves) else torch.float32


def _distinct(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """Those to be checked in every call, each index once."""
    return tuple({(bound.index, bound.range): bound for bound in reversed(bounds) if bound.every_call}.values())[::-1]


def _same_code(one: Callable, other: Callable) -> bool:
    return one == other or (type(one) is type(other) and hasattr(one, "engine"))


def _is_total(value: object, tape: Tape) -> bool:
    """Whether a value is a number whose memory nothing else has, as ``total`` in ``total += loss.detach()``: of an earlier step, or a tensor that the loop made."""
    if isinstance(value, Promise):
        return value.tape is not tape and value.dim() == 0 and storage_users(value.tape.value(value.index)) == 1
    if type(value) is not Tensor or value.dim() != 0 or value.requires_grad or value.device.type != "cpu" or value.is_inference():
        return False
    storage = value.untyped_storage()
    if not storage.resizable() or storage.is_shared():  # an array of NumPy's or another process has the memory
        return False
    del storage
    return storage_users(value) == 1


def _rows_before_flattening(tensor: Tensor) -> int | None:
    """The size of the first dim of what a tensor is a view of, if it has all the elements in the same order, with that dim and those behind it in one."""
    with torch._C.DisableTorchFunctionSubclass():
        whole = tensor._base
        if whole is None or tensor.dim() == 0 or whole.dim() <= tensor.dim() or not (tensor.is_contiguous() and whole.is_contiguous()):
            return None
        same = tensor.numel() == whole.numel() and tensor.storage_offset() == whole.storage_offset() and tensor.dtype is whole.dtype
        return whole.shape[0] if same and whole.shape[0] and tensor.shape[0] > whole.shape[0] and tensor.shape[0] % whole.shape[0] == 0 else None


def _name(function: Callable) -> str:
    return getattr(function, "__name__", "model")


def _same_leaves(one: tuple, other: tuple) -> bool:
    """Whether the arguments of two calls are equal, and of the same types: 1 is neither 1.0 nor True."""
    return list(map(type, one)) == list(map(type, other)) and one == other


_STATIC = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, slice, type, Given)
"""Types of arguments and results that are part of a program's identity."""


_CONSTANT = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Those that never change, and compare by their values."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
"""Most of those."""


def _is_static(leaf: object) -> bool:
    return isinstance(leaf, _STATIC) or leaf is Ellipsis


_COMPUTES = (torch.distributions.Distribution, torch.distributions.Transform)
"""Results of a model that the loop calls and asks for their class."""


class Opaque:
    """Stands for a result of the model that is neither a tensor nor a plain value, such as a cache object."""

    def __init__(self, kind: str):
        object.__setattr__(self, "_kind", kind)

    @property
    def kind(self) -> str:
        return object.__getattribute__(self, "_kind")

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str):
        raise LoopError(
            f"a compiled model does not return its {self._kind} (asked for .{name}): only tensors in containers, dataclasses and plain objects of "
            "your own come out of a program; call an uncompiled copy, copy.deepcopy(model), to get one"
        )

    def __repr__(self) -> str:
        return f"<{self._kind} of a compiled call>"


def _asked(name: str) -> Callable:
    """A method that Python looks up in the class, such as what ``for`` calls."""
    return lambda opaque, *_: opaque.__getattr__(name)


for _name_of_method in ("__iter__", "__len__", "__contains__", "__getitem__", "__setitem__", "__delitem__"):
    setattr(Opaque, _name_of_method, _asked(_name_of_method))


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
