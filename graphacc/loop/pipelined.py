"""The programs of a model whose strategy has pipeline stages: every graph is cut into segments, which a schedule drives.

Gradients run over all microbatches by the strategy's schedule; what has no backward, and updates, run once, segment after
segment. Every parameter lives with its optimizer state on one stage, its home. In a run of several processes each compiles
the programs of its own stages.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import torch
from jax.sharding import Mesh
from torch import Tensor

from graphacc.costs.work import flops_by_dtype
from graphacc.errors import StrategyError
from graphacc.graph import Input, Kind, Output, StepGraph
from graphacc.hlo import HloStep
from graphacc.loop.programs import STATE_KINDS, Compiled, Interface, Programs
from graphacc.passes.stages import MARK, Segment, cut, marked_places, owner_of, update_places
from graphacc.runtime import progress, ranges, to_torch
from graphacc.runtime.devices import select_devices, stage_meshes
from graphacc.runtime.distributed import process_count
from graphacc.runtime.exchange import SMALL_BYTES
from graphacc.runtime.pipeline import Recorder, Span, StageProgram, Task, add_on, run_tasks
from graphacc.runtime.transfer import send_to_all
from graphacc.strategy.axes import SPMD_AXES
from graphacc.strategy.in_force import TensorDecision
from graphacc.strategy.schedules import Schedule, build_schedule, dispatch_order, one_after_the_other
from graphacc.strategy.spec import Strategy

RECORDED_RUNS = 3
"""The first runs of every graph of gradients, whose times are noted: the first ones are slow, the last one is kept."""

Feeds = Mapping[tuple[Kind, str], object]
Fetched = dict[tuple[Kind, str], Callable[[], Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pipelined(Interface):
    """The programs of one graph, one per segment."""

    kind: str  # "grad", "update" or "forward"
    reason: str  # why it was compiled
    graph: StepGraph  # before it was cut: local along the mesh axes of a stage
    parts: tuple[Compiled, ...]  # one per segment, in order
    programs: tuple[StageProgram, ...]  # the same
    flops: Mapping[str, float]  # dtype -> operations of products in the captured graph, of one microbatch and all devices together

    @property
    def draws(self) -> bool:
        """Whether one of them draws random numbers."""
        return any(part.draws for part in self.parts)

    @property
    def transfer_bytes(self) -> dict[tuple[int, int], int]:
        """(from stage, to stage) -> bytes that all devices together send for one microbatch."""
        sent: dict[tuple[int, int], int] = collections.defaultdict(int)
        makers = {item.target: (p.stage, item) for p in self.programs for item in p.program.outputs if item.kind is Kind.CROSS}
        reads = {(item.target, p.stage) for p in self.programs for item in p.program.inputs if item.kind is Kind.CROSS}
        for target, stage in reads:
            source, item = makers[target]
            if source != stage:
                sent[source, stage] += math.prod(item.shape) * item.dtype.itemsize
        return dict(sent)

    def stage_of(self, kind: Kind, target: str) -> int:
        """The stage that replaces a value, else the first one that reads it; the first of all for what none reads."""
        reads = [p for p in self.programs if any((item.kind, item.target) == (kind, target) for item in p.program.inputs)]
        writes = [p for p in reads if any((item.kind, item.target) == (kind, target) for item in p.program.outputs)]
        return (writes or reads or self.programs)[0].stage


class PipelinePrograms(Programs):
    """The programs of one model on one mesh per pipeline stage."""

    def adopt(self, strategy: Strategy) -> None:
        if strategy.offload is not None and process_count() > 1:
            raise StrategyError(
                f"{strategy}: offload under a pipeline keeps the state of all stages in one process, and there are {process_count()}: leave offload or pp out"
            )
        super().adopt(strategy)
        self.meshes = stage_meshes(strategy, select_devices(self.num_devices))
        self.schedule: Schedule = build_schedule(strategy.schedule, strategy.pp, strategy.microbatches, strategy.chunks)
        self.homes: dict[str, int] = {}  # parameter, gradient or optimizer state -> stage
        self.spans: list[Span] = []  # when the tasks of the last recorded run of gradients ran
        self._runs: dict[Pipelined, int] = {}
        self._order = dispatch_order(self.schedule)

    @property
    def runs_whole_steps(self) -> bool:
        return False

    def run(self, compiled: Pipelined, feeds: Feeds) -> Fetched:
        return self._run(compiled, [Task(program=program, microbatch=0) for program in compiled.programs], [feeds])[0]

    def run_microbatches(self, compiled: Pipelined, feeds: Sequence[Feeds]) -> list[Fetched]:
        by_name = {(program.part, program.index): program for program in compiled.programs}
        is_planned = len(feeds) == self.schedule.num_microbatches
        order = self._order if is_planned else one_after_the_other(self.schedule, len(feeds))
        known = ((by_name.get((action.part.value, action.chunk)), action) for action in order)
        tasks = [Task(program=program, microbatch=action.microbatch) for program, action in known if program is not None]
        self._prepare_replicas(compiled)
        runs = self._runs[compiled] = self._runs.get(compiled, 0) + 1
        recorder = Recorder(self.strategy.pp) if is_planned and runs <= RECORDED_RUNS and process_count() == 1 else None
        try:
            fetched = self._run(compiled, tasks, feeds, recorder)
        finally:
            if recorder is not None:
                recorder.stop()
        self._merge_replicas(compiled)
        if recorder is not None:
            self.spans = recorder.spans()
        return fetched

    def _run(
        self, compiled: Pipelined, tasks: Sequence[Task], feeds: Sequence[Feeds], recorder: Recorder | None = None
    ) -> list[Fetched]:
        parts = dict(zip(map(id, compiled.programs), compiled.parts))
        fetched: list[Fetched] = [{} for _ in feeds]
        results: list[tuple[int, Output, jax.Array, Mesh]] = []
        uploaded: dict[tuple, jax.Array] = {}

        def feed(program: StageProgram, item: Input, microbatch: int) -> jax.Array:
            constants = parts[id(program)].constants
            if item.target in constants:
                return constants[item.target]
            if item.kind in STATE_KINDS:
                return self.state.get(self._kept(item), self.meshes[program.stage])
            key = (item.kind, item.target, microbatch, program.stage, item.shards)
            if key not in uploaded:
                uploaded[key] = self._feed(item, feeds[microbatch][item.kind, item.target], self.meshes[program.stage])
            return uploaded[key]

        def keep(program: StageProgram, item: Output, microbatch: int, array: jax.Array) -> None:
            if item.kind in STATE_KINDS:
                self.state.set(item, array, self.meshes[program.stage])
            else:
                results.append((microbatch, item, array, self.meshes[program.stage]))

        run_tasks(tasks, self.meshes, feed, keep, recorder)
        for microbatch, item, array, mesh in results:
            fetched[microbatch][item.kind, item.target] = self._fetcher(array, item, mesh)
        return fetched

    def _fetcher(self, array: jax.Array, item: Output, mesh: Mesh) -> Callable[[], Tensor]:
        """Small results go to all processes at once, so that each may read them or not; a large one when all read it."""
        if process_count() > 1 and array.is_fully_replicated and array.nbytes <= SMALL_BYTES:
            array = send_to_all(array, mesh, self.meshes)
        return lambda: to_torch(array, item)

    def _kept(self, item: Input) -> Input:
        """The item under which the state keeps a value: a replica of a parameter is the parameter."""
        return dataclasses.replace(item, target=owner_of(item.target)) if item.kind is Kind.PARAM else item

    def layout_of(self, kind: Kind, target: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Input, Mesh]:
        return self._first_layout(kind, target, shape, dtype), self.mesh

    def holds_for(self, item: Input) -> bool:
        """And on the mesh of a stage: what was uploaded before there were stages lies on all devices."""
        return super().holds_for(item) and self.state.mesh_of(item.kind, item.target) != self.mesh

    def put(self, compiled: Pipelined, kind: Kind, target: str, value: Tensor) -> None:
        item = next(item for item in compiled.graph.inputs if (item.kind, item.target) == (kind, target))
        mesh = self.meshes[compiled.stage_of(kind, target)]
        self._note_written(kind, target)
        with ranges.named("graphacc.upload"):
            self._upload(item, value.to(item.dtype), mesh)

    def put_zeros(self, compiled: Pipelined, kind: Kind, targets: Sequence[str]) -> None:
        by_stage: dict[int, list[str]] = collections.defaultdict(list)
        for target in targets:
            by_stage[compiled.stage_of(kind, target)].append(target)
        items = {(item.kind, item.target): item for item in compiled.graph.inputs}
        for stage, mine in by_stage.items():
            self._set_zeros([items[kind, target] for target in mine], self.meshes[stage])

    # ---- replicas of parameters that several stages use

    def _replica_gradients(self, compiled: Pipelined) -> list[Output]:
        return [item for item in compiled.graph.outputs if item.kind is Kind.GRAD and MARK in item.target]

    def _prepare_replicas(self, compiled: Pipelined) -> None:
        for item in self._replica_gradients(compiled):
            mesh = self.meshes[compiled.stage_of(Kind.GRAD, item.target)]
            self._set_zeros([item], mesh)

    def _merge_replicas(self, compiled: Pipelined) -> None:
        """Add the replicas' gradients to their owners'."""
        for item in self._replica_gradients(compiled):
            owner = owner_of(item.target)
            total, owned = self.state.find(Kind.GRAD, owner)
            part, _ = self.state.find(Kind.GRAD, item.target)
            mesh = self.meshes[compiled.stage_of(Kind.GRAD, owner)]
            source = self.meshes[compiled.stage_of(Kind.GRAD, item.target)]
            self.state.set(owned, add_on(mesh, owned, total, part, source), mesh)
            self.state.discard(Kind.GRAD, item.target)

    def _decision(self, item: Input) -> TensorDecision:
        decision = super()._decision(item)
        where = f"stage {self.homes[item.target]}" if item.target in self.homes else ""
        return dataclasses.replace(decision, reason="; ".join(filter(None, (decision.reason, where))))

    # ---- compiling

    def _compile(self, kind: str, reason: str, capture: Callable[[], StepGraph]) -> Pipelined:
        with progress.activity("capture") as captured:
            graph = capture()
        if isinstance(graph, HloStep):
            raise StrategyError(
                f"pp={self.strategy.pp} cuts a graph of operators, but this model was captured by lazy tensors, which give HLO "
                "alone: use dp, fsdp or tp, or change what FX cannot trace (capture='fx' names the line)"
            )
        flops = flops_by_dtype(graph)
        with progress.activity("passes") as passed:
            graph, reports = self._passed(graph, self._dims(kind, graph), homes=self.homes)
            segments = self._cut(kind, graph)
        seconds = captured.seconds, passed.seconds
        parts = []
        for segment in segments:
            spent = (0.0, 0.0) if parts else (*seconds, reports)
            parts.append(self._build(f"{kind} {segment.place}", reason, segment.step, self.meshes[segment.place.stage], *spent))
        programs = [
            StageProgram(part=s.place.part, index=s.place.index, stage=s.place.stage, program=part.program)
            for s, part in zip(segments, parts)
        ]
        result = Pipelined(kind=kind, reason=reason, graph=graph, parts=tuple(parts), programs=tuple(programs), flops=flops)
        for item in graph.inputs:
            if item.kind in (Kind.PARAM, Kind.GRAD, Kind.STATE):
                self.homes.setdefault(item.target, result.stage_of(item.kind, item.target))
        return result

    def _cut(self, kind: str, graph: StepGraph) -> list[Segment]:
        axes = {axis: size for axis, size in self.meshes[0].shape.items() if axis in SPMD_AXES and size > 1}
        if kind in ("update", "gradients"):
            _copy_inputs_that_are_results(graph)
            names = [item.target for item in graph.inputs if item.kind in (Kind.PARAM, Kind.GRAD)]
            return cut(graph, update_places(graph, {name: self.homes.get(name, 0) for name in names}), axes)
        strategy = self.strategy
        places = marked_places(graph, strategy.pp, strategy.pp * strategy.chunks, self.schedule.splits_backward)
        return cut(graph, places, axes)


def _copy_inputs_that_are_results(graph: StepGraph) -> None:
    """What the loop gets of an update and is an input of it as it is (``loss.detach()``) is a copy, which a stage can make."""
    results, inputs = list(graph.results), set(graph.placeholders)
    with graph.graph.inserting_before(graph.graph.output_node()):
        for position, (result, item) in enumerate(zip(results, graph.outputs)):
            if result in inputs and item.kind is Kind.USER:
                results[position] = graph.graph.call_function(torch.ops.aten.clone.default, (result,))
                results[position].meta = dict(result.meta)
    graph.graph.output_node().args = (tuple(results),)


def class_of(strategy: Strategy) -> type[Programs]:
    return Programs if strategy.pp == 1 else PipelinePrograms


def adopted(programs: Programs, strategy: Strategy) -> Programs:
    """The programs of the same model under another strategy, which begin anew: the same object, or one of the class that the strategy needs."""
    made = class_of(strategy)
    if type(programs) is not made:
        other = made.__new__(made)
        other.__dict__.update(programs.__dict__)  # also what the engine has set
        programs = other
    programs.adopt(strategy)
    return programs
