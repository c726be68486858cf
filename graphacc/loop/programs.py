"""The compiled programs of one model: built on demand from StepGraphs, kept by what makes them differ, run on one state."""

import collections
import dataclasses
import functools
import logging
import math
import operator
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import Tensor

from graphacc.strategy.axes import CP, EP, FSDP, PP, TP, ZERO_AXES
from graphacc import collector
from graphacc._compat.random_state import kept_random_state
from graphacc.costs.work import flops_by_dtype
from graphacc.graph import Input, Kind, MeshShard, Output, Phase, StepGraph, local_shape
from graphacc.hlo import HloStep
from graphacc.loop.build import Step
from graphacc.loop.by_spmd import spmd_step
from graphacc.loop.description import describe, label
from graphacc.loop.identity import Identity
from graphacc.loop.model_call import RecordedCode
from graphacc.loop.offload import Offload
from graphacc.passes.experts import check_pins, find_experts
from graphacc.passes.hlo.marks import annotations_of, hlo_marks
from graphacc.passes.hlo.operators import operators_of
from graphacc.passes.hlo.shardings import check_axes, with_layouts
from graphacc.passes.partition import PartitionReport
from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.report import forced_notes, without_graphs
from graphacc.passes.partition.zero import split_before
from graphacc.passes.partition.tensor_parallel import TensorParallel, find_tensor_parallel, pinned_placements
from graphacc.passes.batch import default_batch_dims, is_argument, unsplit_note
from graphacc.passes.loss_chunks import ChunkReport
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import PassReport, run_passes
from graphacc.passes.stages import owner_of
from graphacc.passes.stream import sent_gradients
from graphacc.runtime import Program, TrainState, look_ahead, make_mesh, progress, ranges, select_devices, to_device, to_torch
from graphacc.runtime.agreement import digest
from graphacc.runtime.distributed import agree, meet, note, process_count
from graphacc.runtime.exchange import Uploader, from_blocks, from_parts, to_codes
from graphacc.runtime.host_array import HostArray
from graphacc.runtime.layout import Index, Item, summed
from graphacc.runtime.state import Slots, relayout
from graphacc.runtime.transfer import zeros_on
from graphacc.strategy import Strategy
from graphacc.strategy.annotations import P
from graphacc.strategy.in_force import TensorDecision

log = logging.getLogger("graphacc")

STATE_KINDS = (Kind.PARAM, Kind.BUFFER, Kind.STATE, Kind.GRAD)
"""Kinds of values that stay on the devices between programs."""


GRAD_TO_HOST = "grad to host"
"""Kind of a program of forward and backward whose gradients leave for the host as they are made, instead of being kept on the devices."""


MAX_SHOWN = 3
"""Tensors whose shapes a message shows."""


MAX_PROGRAMS = 128
"""Of one model; the one that was not used for longest is let go, and compiled again if it is wanted."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Outputs of a program that become state."""

    places: list[int]
    slots: Slots

    def of(self, results: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self._take(results)

    @functools.cached_property
    def _take(self) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
        return operator.itemgetter(*self.places) if len(self.places) > 1 else lambda results: [results[place] for place in self.places]


class Lacking:
    """The inputs of a program whose values the devices do not have, found again at once as long as they have the same ones."""

    def __init__(self, items: Sequence[Input]):
        self._items, self._keys = items, [(item.kind, item.target) for item in items]
        self._known: tuple[list[Item | None], list[Input]] | None = None  # the layouts at the last look, and what was lacking

    def under(self, programs: "Programs") -> list[Input]:
        """Those for which `Programs.holds_for` says no."""
        layouts = programs.state.layouts(self._keys)
        if self._known is None or not all(map(operator.is_, self._known[0], layouts)):
            self._known = layouts, [item for item in self._items if not programs.holds_for(item)]
        return self._known[1]


class Interface:
    """What a program reads and gives, of which every step goes through hundreds."""

    graph: Step

    @functools.cached_property
    def model_inputs(self) -> list[Input]:
        """The parameters and buffers that it reads."""
        return [item for item in self.graph.inputs if item.kind in (Kind.PARAM, Kind.BUFFER)]

    @functools.cached_property
    def model_targets(self) -> list[str]:
        """Their names."""
        return [item.target for item in self.model_inputs]

    @functools.cached_property
    def state_inputs(self) -> list[Input]:
        """What it reads of the optimizer's state."""
        return [item for item in self.graph.inputs if item.kind is Kind.STATE]

    @functools.cached_property
    def state_keys(self) -> list[tuple[Kind, str]]:
        """Under what the state keeps that."""
        return [(item.kind, item.target) for item in self.state_inputs]

    @functools.cached_property
    def values_read(self) -> list[Input]:
        """What it reads of the results of earlier programs."""
        return [item for item in self.graph.inputs if item.kind in (Kind.LOSS, Kind.USER)]

    @functools.cached_property
    def looked_at(self) -> "Lacking":
        """Which of the model's inputs were to be uploaded when that was looked at last."""
        return Lacking(self.model_inputs)

    @functools.cached_property
    def buffers_read(self) -> frozenset[str]:
        """The buffers that it computes with, or may compute with."""
        unread = _unread(self.graph) or frozenset()
        return frozenset(item.target for item in self.graph.inputs if item.kind is Kind.BUFFER and item.name not in unread)

    @functools.cached_property
    def written(self) -> list[str]:
        """The parameters and buffers that it gives anew."""
        return [item.target for item in self.graph.outputs if item.kind in (Kind.PARAM, Kind.BUFFER)]

    @functools.cached_property
    def updates(self) -> bool:
        """Whether it gives parameters."""
        return any(item.kind is Kind.PARAM for item in self.graph.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Interface):
    """One program and how it came about."""

    kind: str  # "step", "grad", GRAD_TO_HOST, "update" or "forward"
    reason: str  # why it was compiled
    graph: Step  # as it was lowered: local along the data axes, or HLO
    program: Program
    constants: dict[str, jax.Array]  # target -> tensor that the trace lifted; its own, for names repeat between programs
    numbers: dict[str, tuple[object, jax.Array]] = dataclasses.field(default_factory=dict)  # target -> a number of the optimizer at the last run, and its array
    uploaders: dict[str, Uploader] = dataclasses.field(default_factory=dict)  # name of an input -> what uploads it
    capture_seconds: float
    pass_seconds: float
    compile_seconds: float
    passes: tuple[PassReport, ...] = ()  # what each pass did to the graph
    flops: Mapping[str, float] | None = None  # dtype -> operations of products in the captured graph, of all devices together; None: it was HLO

    @functools.cached_property
    def inputs(self) -> dict[tuple[Kind, str], Input]:
        return {(item.kind, item.target): item for item in self.graph.inputs}

    @functools.cached_property
    def read(self) -> Slots:
        """The inputs that are state."""
        return Slots(item for item in self.graph.inputs if self._is_state(item))

    @functools.cached_property
    def fed(self) -> list[tuple[int, Input]]:
        """The other ones, each with its place."""
        return [(place, item) for place, item in enumerate(self.graph.inputs) if not self._is_state(item)]

    def slots_of(self, kind: Kind, targets: tuple[str, ...]) -> Slots:
        """Some of the inputs that are state; in an ordinary loop the same ones in every step."""
        known = self._slots.get(kind)
        if known is None or known[0] != targets:
            known = self._slots[kind] = targets, Slots(self.inputs[kind, target] for target in targets)
        return known[1]

    @functools.cached_property
    def _slots(self) -> dict[Kind, tuple[tuple[str, ...], Slots]]:
        return {}

    def _is_state(self, item: Input) -> bool:
        return item.kind in STATE_KINDS and item.target not in self.constants

    def given(self, keep_gradients: bool) -> "tuple[Kept, list[tuple[int, Output]]]":
        """The outputs that become state, and the other ones, each with its place."""
        if keep_gradients not in self._given:
            places = [place for place, item in enumerate(self.graph.outputs) if item.kind in STATE_KINDS and (keep_gradients or item.kind is not Kind.GRAD)]
            kept = set(places)
            others = [(place, item) for place, item in enumerate(self.graph.outputs) if place not in kept]
            self._given[keep_gradients] = Kept(places, Slots(self.graph.outputs[place] for place in places)), others
        return self._given[keep_gradients]

    @functools.cached_property
    def _given(self) -> "dict[bool, tuple[Kept, list[tuple[int, Output]]]]":
        return {}

    @functools.cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers; False where the graph does not tell."""
        unread = _unread(self.graph)
        return unread is not None and any(item.kind is Kind.KEY and item.name not in unread for item in self.graph.inputs)

    @functools.cached_property
    def sent_gradients(self) -> tuple[Output, ...]:
        """The gradients that leave for the host while it runs, by slot."""
        return () if isinstance(self.graph, HloStep) else sent_gradients(self.graph)

    @property
    def num_operators(self) -> int:
        """Nodes of the graph, or instructions of the captured HLO."""
        return self.graph.num_operators if isinstance(self.graph, HloStep) else len(self.graph.graph.nodes)

    @property
    def parts(self) -> "tuple[Compiled, ...]":
        """The programs that run: this one. Of a pipeline there are several."""
        return (self,)


class BatchForms(tuple):
    """Shape and dtype of the tensors of a batch, by place; equal to another whatever the names are."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, forms: tuple, names: tuple[str, ...]) -> "BatchForms":
        made = cls(forms)
        made.names = names
        return made

    def differences(self, before: object) -> list[str]:
        """"<tensor> <shape before> -> <shape now>" of the first tensors that differ, where both are of the same places."""
        if not isinstance(before, BatchForms) or len(before) != len(self):
            return []
        found = [f"{name} {_form(old)} -> {_form(new)}" for name, old, new in zip(self.names, before, self) if old != new]
        return found[:MAX_SHOWN] + [f"and {len(found) - MAX_SHOWN} more"] * (len(found) > MAX_SHOWN)

    def has_other_lengths(self, before: object) -> bool:
        """Whether a tensor has another size than before in a dim that is not the first."""
        if not isinstance(before, BatchForms) or len(before) != len(self):
            return False
        pairs = [(_shape(old), _shape(new)) for old, new in zip(before, self)]
        return any(len(old) == len(new) and old[1:] != new[1:] for old, new in pairs)


def _shape(key: tuple) -> tuple:
    return next((part for part in key[1:] if isinstance(part, tuple)), ())


def _form(key: tuple) -> str:
    """Of an external's key: (place, shape, dtype, ...)."""
    return "x".join(map(str, _shape(key))) or "a number"


class Programs:
    """The programs of one model on one mesh, and the state that they share."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        num_devices: int,
        batch_dims: Mapping[str, int | None],
        annotations: Mapping[str, P],
        cache_dir: str | None,
        fast_compile: bool,
        memory_plan: str,
        plan_seconds: float,
        local_batch: bool = False,
        seed: int,
    ):
        self.strategy, self.num_devices = strategy, num_devices
        self.batch_dims = dict(batch_dims)
        self.seed = seed  # as chosen; processes with different ones would draw, and have initialised, different numbers
        self.local_batch = local_batch  # every process gives its own part of the batch
        self.cache_dir = cache_dir
        self.fast_compile = fast_compile
        self.memory_plan = memory_plan
        self.plan_seconds = plan_seconds
        self.annotations = annotations
        self.can_pad = False  # whether lengths that differ could be padded, and are not; the engine knows
        self.without: frozenset[str] = frozenset()  # names of optional passes that are left out
        self.chose_microbatches = False  # a search did, which promises what the whole batch gives
        self.cp_is_asked = True  # by the user, who is told about batches that it does not divide; otherwise a search chose it, and they run
        self.frozen: Callable[[], frozenset[str]] = frozenset  # parameters that nothing trains; the engine knows
        self.build_seconds = 0.0  # that capturing and compiling took
        self.ahead = None  # loads, beside the first capture, what an earlier run has used
        self.num_let_go = 0  # programs that were dropped for newer ones
        self.adopt(strategy)
        self._notes: set[str] = set()  # what has been logged already
        self._labels: dict[Hashable, str] = {}  # of the programs that several processes run
        self._agreements: dict[Hashable, int] = {}  # on a program that is being compiled

    def adopt(self, strategy: Strategy) -> None:
        """Begin anew under a strategy: without programs, and with nothing on the devices."""
        self.strategy = strategy
        self.splits = TensorParallel(splits={}, reasons={})
        self.experts: frozenset[str] = frozenset()
        with kept_random_state():  # JAX's devices are made here
            self.mesh = make_mesh(strategy, select_devices(self.num_devices))
        before: TrainState | None = getattr(self, "state", None)
        self.state = TrainState(self.mesh)
        if before is not None:
            self._move_from(before)
        self.offload = None if strategy.offload is None else Offload(delay=strategy.delay, delay_after=strategy.delay_after)
        self.compiled: list[Compiled] = []
        self._by_key: collections.OrderedDict[Identity, Compiled] = collections.OrderedDict()
        self._newest: Compiled | None = None  # the last one that ran
        self._aspects: dict[str, dict[str, Hashable]] = {}
        self._built: dict[str, list[float]] = collections.defaultdict(list)  # kind -> seconds that each of its programs took

    def _move_from(self, before: TrainState) -> None:
        """Take over the parameters and buffers of another strategy; the rest is on the host, see `Engine.bring_home`."""
        before.discard(Kind.STATE, *(target for kind, target in before.keys() if kind is Kind.STATE))
        for kind, target in before.keys():
            array, old = before.find(kind, target)
            if kind in (Kind.PARAM, Kind.BUFFER) and before.codes_of(kind, target) is None:
                item = self._first_layout(kind, target, old.shape, old.dtype)
                self.state.set(item, relayout(array, old, item, self.mesh))
            before.discard(kind, target)

    def look_ahead(self, looks: object) -> None:
        """A step is about to be captured that looks like this.

        Args:
            looks: told apart by its `repr`.
        """
        settings = self.strategy, dict(self.annotations), self.fast_compile, self.memory_plan, self.plan_seconds
        self.ahead = look_ahead(self.cache_dir, (looks, settings), self.mesh)

    @property
    def runs_whole_steps(self) -> bool:
        """Whether forward, backward and update can be one program."""
        return self.strategy.microbatches == 1 and self.offload is None

    def get(self, kind: str, aspects: Mapping[str, Hashable], capture: Callable[[], Step]) -> Compiled:
        """The program of `kind` for these aspects of the loop; compiled if it is new."""
        key = Identity((kind, tuple(aspects.items())))
        if (known := self._by_key.get(key)) is not None and known is self._newest and not self._labels:
            return known  # an ordinary loop runs one program
        if known is None:
            reason = self._reason(kind, dict(aspects))
            before = self._built[kind]
            if before:
                log.warning("graphacc: compiling another %s program: %s (%d so far took %.1f s)%s", kind, reason, len(before), sum(before), self._advice(kind, aspects))
            with collector.paused(), kept_random_state(), progress.building(f"the {kind} program") as built:
                self._by_key[key] = self._compile(kind, reason, lambda: self._agreed(kind, key, capture()))
            self.build_seconds += built.seconds
            self._built[kind].append(built.seconds)
            self._aspects[kind] = dict(aspects)
            self.compiled.extend(self._by_key[key].parts)
            if len(self._by_key) > MAX_PROGRAMS:
                self._let_go(next(iter(self._by_key)))
        self._newest = self._by_key[key]
        self._by_key.move_to_end(key)  # the first one is the one that was not used for longest
        if key in self._labels:
            note(f"runs {self._labels[key]}")
        if key in self._agreements:
            meet(self._agreements.pop(key))
        return self._by_key[key]

    def also(self, kind: str, aspects: Mapping[str, Hashable], others: Mapping[str, Hashable]) -> None:
        """The program for some aspects is that for others, too."""
        key, other = (Identity((kind, tuple(each.items()))) for each in (aspects, others))
        self._by_key.setdefault(other, self._by_key[key])
        if key in self._labels:
            self._labels.setdefault(other, self._labels[key])

    def _let_go(self, key: Identity) -> None:
        gone = {id(part) for part in self._by_key.pop(key).parts}
        for other in [other for other, compiled in self._by_key.items() if not gone.isdisjoint(map(id, compiled.parts))]:
            del self._by_key[other]
        self.compiled = [compiled for compiled in self.compiled if id(compiled) not in gone]
        self.num_let_go += 1

    def _agreed(self, kind: str, key: Identity, graph: Step) -> Step:
        """A graph that all processes are about to compile; raises DistributedError where they differ."""
        count = process_count()
        if count > 1:
            settings = {
                "strategy": self.strategy,
                "seed": self.seed,
                "devices": math.prod(self.mesh.shape.values()),
                "batch=": "local" if self.local_batch else "global",
                "batch_dims": dict(sorted(self.batch_dims.items())),
                "annotations": dict(sorted(self.annotations.items())),
                "fast_compile": self.fast_compile,
            }
            dims = default_batch_dims(graph) | self.batch_dims if self.local_batch else {}
            description = describe(kind, graph, settings, {name: (dim, count) for name, dim in dims.items() if dim is not None})
            self._labels[key] = label(description, digest(description))
            self._agreements[key] = agree(self._labels[key], description)
        return graph

    def run(
        self, compiled: Compiled, feeds: Mapping[tuple[Kind, str], object], *, keep_gradients: bool = True
    ) -> dict[tuple[Kind, str], Callable[[], Tensor]]:
        """Run a program on the state and on `feeds` (the inputs that are no state: a tensor or a number each).

        Args:
            keep_gradients: gradients become state; without, they are returned.

        Returns:
            For each output that is no state, a function that fetches the value to the host.
        """
        arguments = self.state.get_all(compiled.read)
        for place, item in compiled.fed:
            arguments.insert(place, self._argument(compiled, item, feeds))
        results = compiled.program(*arguments)
        kept, fetched = compiled.given(keep_gradients)
        self.state.set_results(kept.slots, kept.of(results))
        return {(item.kind, item.target): _Result(results[place], item) for place, item in fetched}

    def run_microbatches(
        self, compiled: Compiled, feeds: Sequence[Mapping[tuple[Kind, str], object]]
    ) -> list[dict[tuple[Kind, str], Callable[[], Tensor]]]:
        """`run` for the feeds of every microbatch, in order."""
        return [self.run(compiled, each) for each in feeds]

    def _argument(self, compiled: Compiled, item: Input, feeds: Mapping[tuple[Kind, str], object]) -> jax.Array:
        if item.target in compiled.constants:
            return compiled.constants[item.target]
        value = feeds[item.kind, item.target]
        if item.kind is not Kind.HYPER:
            return self._feed(item, value, uploaders=compiled.uploaders)
        known = compiled.numbers.get(item.target)
        if known is None or (type(known[0]), repr(known[0])) != (type(value), repr(value)):  # NaN equals itself, 0.0 is not -0.0
            known = compiled.numbers[item.target] = value, self._feed(item, value, uploaders=compiled.uploaders)
        return known[1]

    def stand_in(self, path: str, tensor: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """A tensor of the whole batch's shape for one that the loop gives: itself, unless it is this process's part of the batch.

        Args:
            given: the tensors of the step so far, by path, in order; the first with a dim tells this process's batch size.
        """
        dim = self.batch_dims.get(path, 0)
        if not self.local_batch or process_count() == 1 or dim is None or dim >= tensor.dim():
            return tensor
        if not is_argument(path) and path not in self.batch_dims:
            return tensor  # a tensor that a module holds: whole in every process
        given = {name: leaf for name, leaf in given.items() if is_argument(name) or name in self.batch_dims}
        sizes = (leaf.shape[at] for name, leaf in given.items() if (at := self.batch_dims.get(name, 0)) is not None and at < leaf.dim())
        if path not in self.batch_dims and tensor.shape[dim] != next(sizes, tensor.shape[dim]):
            return tensor  # such as the weights of classes: whole in every process
        shape = list(tensor.shape)
        shape[dim] *= process_count()
        return torch.zeros(shape, dtype=tensor.dtype)

    def put(self, compiled: Compiled, kind: Kind, target: str, value: Tensor) -> None:
        """Upload a value in the layout that a program wants it in."""
        item = compiled.inputs[kind, target]
        self._note_written(kind, target)
        with ranges.named("graphacc.upload"):
            value = to_codes(value, item.codes) if item.codes is not None else value.to(item.dtype)
            self._upload(item, value, self.mesh)
        if kind is Kind.STATE and not item.shape:
            self.state.note_number(target, number_bits(value))

    def _upload(self, item: Input, value: Tensor, mesh: Mesh) -> None:
        whole = summed(item)
        array = to_device(value, whole, mesh)
        self.state.set(item, array if whole is item else relayout(array, whole, item, mesh), mesh)

    def put_zeros(self, compiled: Compiled, kind: Kind, targets: Sequence[str]) -> None:
        """`put` zeros, which are made on the devices."""
        if targets:
            slots = compiled.slots_of(kind, tuple(targets))
            self.state.set_results(slots, zeros_on(self.mesh, *slots.items))

    def _set_zeros(self, items: Sequence[Item], mesh: Mesh) -> None:
        for item, array in zip(items, zeros_on(mesh, *items) if items else (), strict=True):
            self.state.set(item, array, mesh)

    def load(self, kind: Kind, target: str, value: Tensor) -> None:
        """Upload a parameter or buffer before a program wants it: the first one that does moves it into its layout."""
        item = self._first_layout(kind, target, tuple(value.shape), value.dtype)
        self._note_written(kind, target)
        with ranges.named("graphacc.upload"):
            self.state.set(item, to_device(value, item, self.mesh))

    def load_blocks(self, kind: Kind, target: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[Index], np.ndarray]) -> None:
        """The same with a value that is read block by block: what the devices of this process hold."""
        item, mesh = self.layout_of(kind, target, shape, dtype)
        self._note_written(kind, target)
        with ranges.named("graphacc.upload"):
            self.state.set(item, from_blocks(read, item, mesh), mesh)
        if kind is Kind.STATE and not shape:
            self.state.note_number(target, (dtype, np.asarray(read(())).tobytes()))

    def layout_of(self, kind: Kind, target: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Input, Mesh]:
        """The layout in which a value is to be uploaded: the one that it has, or the one that programs are likely to want."""
        if self.state.holds(kind, target) and self.state.codes_of(kind, target) is None:
            known = self.state.find(kind, target)[1]
            if (known.shape, known.dtype) == (shape, dtype):
                return Input(name="", kind=kind, target=target, shape=shape, dtype=dtype, shards=known.shards), self.state.mesh_of(kind, target)
        return self._first_layout(kind, target, shape, dtype), self.mesh

    def _first_layout(self, kind: Kind, target: str, shape: tuple[int, ...], dtype: torch.dtype) -> Input:
        """Sharded along the axes along which programs may shard it."""
        shards: list[MeshShard] = []
        fsdp, ep = self.strategy.fsdp, self.strategy.ep
        has_experts = ep > 1 and len(shape) > 2  # one matrix for each, in all likelihood
        behind = {CP: fsdp, EP: 1} if has_experts else {CP: ep * fsdp, EP: fsdp}
        for axis in (TP, PP, CP, EP, FSDP):
            size, local = self.mesh.shape.get(axis, 1), local_shape(shape, shards)
            split = split_before(local, size, behind.get(axis, 1), kept=int(has_experts and axis == CP)) if size > 1 and self._is_split(kind, axis) else None
            if split is not None and (axis in (CP, FSDP) or not split.padding):
                shards.append(MeshShard(axis=axis, size=size, dim=split.dim))
        return Input(name="", kind=kind, target=target, shape=shape, dtype=dtype, shards=tuple(shards))

    def _is_split(self, kind: Kind, axis: str) -> bool:
        stage = {Kind.PARAM: 3, Kind.STATE: 1}.get(kind)
        return stage is not None and (axis not in (CP, FSDP) or self.strategy.zero_stage >= stage)

    def _note_written(self, kind: Kind, target: str) -> None:
        if kind is Kind.PARAM and self.offload is not None:
            self.offload.forget(target)

    def drain(self, *, publish: bool = True) -> None:
        """Finish the updates that the host does beside a program; without `publish` programs go on with the parameters from before them."""
        if self.offload is not None:
            if publish:
                self.offload.drain(self)
            else:
                self.offload.finish()

    def holds(self, kind: Kind, target: str) -> bool:
        """Whether there is a value that a program left, as it is: on the devices, or as an exact one on the host."""
        if kind is Kind.PARAM and self.offload is not None:
            return self.offload.find(kind, target) is not None
        return self.state.holds(kind, target) and self.state.codes_of(kind, target) is None

    def holds_for(self, item: Input) -> bool:
        """Whether the devices have an input's value as it is, or in the codes that the program reads."""
        return self.state.holds(item.kind, item.target) and self.state.codes_of(item.kind, item.target) == item.codes

    def fetch(self, kind: Kind, target: str) -> Tensor:
        """A value of the state as a global tensor on the host."""
        array, item = self.exact(kind, target)
        if isinstance(array, HostArray):
            return array.to_torch()
        whole = summed(item)
        return to_torch(array if whole is item else relayout(array, item, whole, self.state.mesh_of(kind, target)), whole)

    def exact(self, kind: Kind, target: str) -> tuple[jax.Array | HostArray, Item]:
        """A value of the state where it is exact, and its layout."""
        found = None if self.offload is None else self.offload.find(kind, target)
        return self.state.find(kind, target) if found is None else found

    @property
    def keeps_state(self) -> bool:
        """Whether an optimizer's state can be put on the devices before there is a program that wants it."""
        return self.offload is None and self.strategy.pp == 1

    def state_targets(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The targets of the optimizer's state of parameters, by parameter."""
        found: dict[str, list[str]] = {name: [] for name in names}
        if self.offload is not None:
            return {name: self.offload.state_targets(name) for name in found}
        for kind, target in self.state.keys():
            if kind is Kind.STATE and (owner := target.rpartition("/")[0]) in found:
                found[owner].append(target)
        return found

    def discard_state(self, names: Iterable[str], *, but: Collection[str] = ()) -> None:
        """Forget the optimizer's state of parameters on the devices, except for the targets `but`."""
        targets = (target for held in self.state_targets(names).values() for target in held)
        self.state.discard(Kind.STATE, *(target for target in targets if target not in but))

    def optimizer_state(self, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The parameters that have optimizer state, with that state on the host, one parameter after the other."""
        for name, targets in self.state_targets(names).items():
            if targets:
                yield name, {target.rpartition("/")[2]: self.fetch(Kind.STATE, target) for target in targets}

    def _feed(self, item: Input, value: object, mesh: Mesh | None = None, uploaders: "dict[str, Uploader] | None" = None) -> jax.Array:
        """
        Args:
            uploaders: by the names of a program's inputs; the item's is added.
        """
        with ranges.named("graphacc.upload"):
            if self.local_batch and isinstance(value, Tensor) and tuple(value.shape) != item.shape:
                return from_parts(value, item, mesh or self.mesh)
            upload = None if uploaders is None else uploaders.get(item.name)
            if upload is None:
                upload = Uploader(item, mesh or self.mesh)
                if uploaders is not None:
                    uploaders[item.name] = upload
            return upload(value if isinstance(value, Tensor) else torch.tensor(value, dtype=item.dtype))

    def _compile(self, kind: str, reason: str, capture: Callable[[], Step]) -> Compiled:
        with progress.activity("capture") as captured:
            graph = capture()
        flops = None if isinstance(graph, HloStep) else flops_by_dtype(graph)
        with progress.activity("passes") as passed:
            graph, reports = self._spread(graph, self._dims(kind, graph), streams=kind == GRAD_TO_HOST, whole_sequences=self.whole_sequences(kind))
        compiled = self._build(kind, reason, graph, self.mesh, captured.seconds, passed.seconds, reports)
        return dataclasses.replace(compiled, flops=flops)

    def _laid_out(self, step: HloStep, dims: Mapping[str, int | None]) -> HloStep:
        """HLO with layouts and marks: those of the annotations, and along `tp` those that are found in it."""
        annotations = dict(self.annotations)
        if self.strategy.tp > 1:
            operators = {captured: operators_of(captured) for captured in step.captured}
            for each in operators.values():
                self.splits_of(each.step)
            annotations = annotations_of(self.splits.splits) | annotations
            marks = {captured: hlo_marks(each, self.strategy, splits=self.splits.splits, batch_dims=dims) for captured, each in operators.items()}
            step = dataclasses.replace(step, marks=marks)
        return with_layouts(step, self.strategy, batch_dims=dims, annotations=annotations)

    def whole_sequences(self, kind: str) -> bool:
        """Whether a program of this kind runs for sequences that `cp` does not divide: an evaluation does, and all under a strategy that was searched."""
        return kind == "forward" or not self.cp_is_asked

    def _spread(self, graph: Step, dims: Mapping[str, int | None], *, streams: bool, whole_sequences: bool) -> tuple[Step, tuple[PassReport, ...]]:
        """The program of the mesh: a graph of one device's operators, or HLO with the layouts of its inputs and outputs."""
        if isinstance(graph, HloStep):
            check_axes(self.strategy)
            return self._laid_out(graph, dims), ()
        if self.strategy.tp_by == "spmd":
            marked, reports = spmd_step(graph, self.strategy, splits=self.splits_of(graph), batch_dims=dims, without=self.without)
            return marked, tuple(without_graphs(report) for report in reports)
        return self._passed(graph, dims, streams=streams, whole_sequences=whole_sequences)

    def _passed(
        self, graph: StepGraph, dims: Mapping[str, int | None], *, streams: bool = False, whole_sequences: bool = False, **places: Mapping[str, int]
    ) -> tuple[StepGraph, tuple[PassReport, ...]]:
        """The graph after all passes, and their reports; what the user should know is logged, once."""
        passes = build_pipeline(
            graph,
            self.strategy,
            batch_dims=dims,
            splits=self.splits_of(graph),
            experts=self.experts_of(graph),
            frozen=self.frozen(),
            streams=streams,
            whole_sequences=whole_sequences,
            **places,
        )
        graph, reports = run_passes(graph, [item for item in passes if item.name not in self.without])
        partitions = [report.details for report in reports if isinstance(report.details, PartitionReport)]
        refusals = [text for report in reports if isinstance(report.details, ChunkReport) for text in report.details.notes]
        for text in [*refusals, *(text for report in partitions for text in (*report.notes, *forced_notes(report)))]:
            if text not in self._notes:
                self._notes.add(text)
                log.warning("graphacc: %s", text)
        return graph, tuple(without_graphs(report) for report in reports)

    def splits_of(self, graph: StepGraph) -> dict[str, Shard]:
        """The splits along `tp`: those that were decided with earlier programs, and those of the parameters that are new here."""
        if self.strategy.tp > 1 and any(node.meta["phase"] is Phase.FORWARD for node in graph.graph.nodes if node.op == "call_function"):
            found = find_tensor_parallel(graph, self.strategy.tp, pinned_placements(self.annotations, TP))
            self.splits = TensorParallel(
                splits=found.splits | self.splits.splits,
                reasons=found.reasons | self.splits.reasons,
            )
        return self.splits.splits

    def experts_of(self, graph: StepGraph) -> frozenset[str]:
        """The parameters that `ep` splits: those found in earlier programs and in this one."""
        if self.strategy.ep > 1:
            self.experts |= find_experts(graph)
            if self.experts:
                check_pins(self.annotations, self.experts)
        return self.experts

    def decisions(self) -> tuple[TensorDecision, ...]:
        """How every parameter of the last program lies on the mesh, and who decided it."""
        inputs = (item for compiled in self.compiled for item in compiled.graph.inputs if item.kind is Kind.PARAM)
        items = {item.target: item for item in inputs if owner_of(item.target) == item.target}
        return tuple(self._decision(items[name]) for name in items)

    def _decision(self, item: Input) -> TensorDecision:
        axes = ["+".join(shard.axis for shard in item.shards if shard.dim == dim) or "-" for dim in range(len(item.shape))]
        reason = self.splits.reasons.get(item.target, "")
        if item.target in self.experts:
            reason = "; ".join(filter(None, (reason, "one matrix per expert")))
        pinned = item.target in self.annotations or self.splits.reasons.get(item.target) == "annotation"
        who = ["user" if pinned else "policy"] if self.strategy.tp > 1 or item.target in self.experts else []
        if any(shard.axis in ZERO_AXES and not (shard.axis == EP and item.target in self.experts) for shard in item.shards):
            who.append("default" if self.strategy.zero is None else "user")
            reason = "; ".join(filter(None, (reason, f"ZeRO-{self.strategy.zero_stage}")))
        return TensorDecision(
            name=item.target, shape=item.shape, spec=", ".join(axes) or "-", decided_by=", ".join(dict.fromkeys(who)) or "default", reason=reason
        )

    def _build(
        self,
        kind: str,
        reason: str,
        graph: StepGraph,
        mesh: Mesh,
        capture_seconds: float = 0.0,
        pass_seconds: float = 0.0,
        reports: tuple[PassReport, ...] = (),
    ) -> Compiled:
        """Compile the graph of one device for a mesh."""
        with progress.activity("compile") as compiled:
            program = Program.build(
                graph,
                mesh,
                name=kind,
                cache_dir=self.cache_dir,
                fast_compile=self.fast_compile,
                memory_plan=self.memory_plan,
                plan_seconds=self.plan_seconds,
                ahead=self.ahead,
            )
            constants = {item.target: to_device(graph.constants[item.target], item, mesh) for item in graph.inputs if item.target in graph.constants}
            constants |= {item.target: self._feed(item, [0, 0], mesh) for item in _unread_keys(graph)}
        return Compiled(
            kind=kind,
            reason=reason,
            graph=graph,
            program=program,
            constants=constants,
            capture_seconds=capture_seconds,
            pass_seconds=pass_seconds,
            compile_seconds=compiled.seconds,
            passes=reports,
        )

    def _dims(self, kind: str, graph: Step) -> dict[str, int | None]:
        """Batch input -> the dim that is split over the data axes that divide it; that some do not is logged once."""
        dims = default_batch_dims(graph)
        dims |= {target: dim for target, dim in self.batch_dims.items() if target in dims}
        note = unsplit_note(graph, self.strategy, dims)
        if kind != "forward" and note is not None and note not in self._notes:
            self._notes.add(note)
            log.warning("graphacc: %s", note)
        return dims

    def _advice(self, kind: str, aspects: Mapping[str, Hashable]) -> str:
        """What to do about lengths that differ, from the third one on."""
        before = self._aspects[kind]
        if not self.can_pad or len(self._built[kind]) < 2:
            return ""
        other = any(isinstance(value, BatchForms) and value.has_other_lengths(before.get(name)) for name, value in aspects.items())
        return '; compile(model, bucket_lengths="auto") has one program for several lengths' if other else ""

    def _reason(self, kind: str, aspects: dict[str, Hashable]) -> str:
        """What is new against the last program of this kind."""
        before = self._aspects.get(kind)
        if before is None:
            return f"first {kind}"
        changed = [name for name, value in aspects.items() if before.get(name) != value]
        found = [text for name in changed if isinstance(value := aspects[name], (BatchForms, RecordedCode)) for text in value.differences(before.get(name))]
        shown = found[:MAX_SHOWN] + [f"and {len(found) - MAX_SHOWN} more"] * (len(found) > MAX_SHOWN)
        return "other " + ", ".join(changed) + (f": {', '.join(shown)}" if shown else "")


def number_bits(value: Tensor) -> tuple[torch.dtype, bytes]:
    """What is equal for tensors of no dims with equal values; a NaN is like itself."""
    return value.dtype, value.detach().reshape(1).view(torch.uint8).numpy().tobytes()


def _unread_keys(graph: Step) -> list[Input]:
    """The random key, if the program draws nothing: it need not be uploaded in every step."""
    unread = _unread(graph)
    return [item for item in graph.inputs if item.kind is Kind.KEY and unread is not None and item.name in unread]


def _unread(graph: Step) -> frozenset[str] | None:
    """The names of inputs that nothing reads; None where the graph does not tell."""
    return graph.unread if isinstance(graph, HloStep) else frozenset(node.name for node in graph.placeholders if not node.users)


@dataclasses.dataclass(frozen=True)
class _Result:
    """A result of a program, which is fetched to the host when it is called."""

    array: typing.Any  # a jax.Array
    item: Output

    def __call__(self) -> Tensor:
        return to_torch(self.array, self.item)

    def is_ready(self) -> bool:
        return self.array.is_ready()

    def number(self) -> float | None:
        """A result of no dims; None where other processes hold a part of it."""
        return float(np.asarray(self.array)) if self.array.is_fully_replicated and self.array.is_fully_addressable else None
