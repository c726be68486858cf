"""A plan beside what XLA makes of it: its strategy is compiled for devices that need not be here, and memory and collectives are read back.

A step of several programs (microbatches, stages of a pipeline, an update by the host) is compiled program by program, and played: what stays on a device between
programs, what microbatches in flight hold, and the program that runs are counted together.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from graphacc.graph import Input, Kind, Output, StepGraph, local_shape
from graphacc.hlo import HloStep
from graphacc.loop.by_spmd import spmd_step
from graphacc.loop.programs import STATE_KINDS
from graphacc.passes.stages import Segment
from graphacc.report.communication import read_collectives
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.runtime.absent import absent_mesh
from graphacc.search import Plan, Search
from graphacc.search.cost import RETURNED
from graphacc.strategy import Strategy
from graphacc.strategy.schedules import build_schedule, dispatch_order

_UPDATE = "update"
_OF_MOVES = {"all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "permute": "collective-permute"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """What was predicted, and what the compiled programs have, on the device that needs most."""

    argument_bytes: tuple[int, int]  # parameters, optimizer state, gradients between programs, buffers, batch, and what the loop gets: predicted, compiled
    temporary_bytes: tuple[int, int]  # with other results that replace no input, and what microbatches in flight hold
    collective_bytes: dict[str, tuple[int, int]]  # kind of HLO -> bytes of whole tensors of a step: planned, compiled
    compile_seconds: float
    fullest: str = ""  # the program at whose run memory is fullest; "" where there is one program

    @property
    def peak_bytes(self) -> tuple[int, int]:
        (predicted_arguments, arguments), (predicted_temporaries, temporaries) = self.argument_bytes, self.temporary_bytes
        return predicted_arguments + predicted_temporaries, arguments + temporaries

    def __str__(self) -> str:
        rows = [("MB of one device", "predicted", "XLA", "ratio")]
        parts = {"memory": self.peak_bytes, "  arguments and results": self.argument_bytes, "  temporaries": self.temporary_bytes}
        parts |= {f"{kind} (whole tensors)": sizes for kind, sizes in sorted(self.collective_bytes.items())}
        for name, (predicted, found) in parts.items():
            rows.append((name, f"{predicted / 1e6:.3f}", f"{found / 1e6:.3f}", f"{predicted / found:.3f}" if found else ("" if not predicted else "XLA has none")))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.1f} s" + f"; fullest in {self.fullest}" * bool(self.fullest)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """A program of a step."""

    name: str
    step: StepGraph | HloStep  # of one device
    stage: int = 0
    runs: int = 1  # in a step
    updates: bool = False  # a part of the update, which is a graph of its own: its values have names that those of the gradients may have, too


def check_plan(search: Search, plan: Plan) -> PlanCheck:
    """Compile a whole step under a plan's strategy: for its hardware if XLA can without it (H100 and H200), or for virtual CPU devices.

    Raises:
        StrategyError: there is no description of the chip, or its plugin is not installed.
        LoweringError: an operator cannot be lowered.
    """
    strategy, estimate = plan.strategy, plan.estimate
    graphs = _graphs(search, strategy)
    parts = graphs if strategy.tp_by != "spmd" else [_Part(part.name, _by_spmd(search, strategy, part.name), part.stage, part.runs) for part in graphs]
    mesh = _mesh(plan)
    programs = {part: Program.build(part.step, mesh, cache_dir=None, memory_plan="xla") for part in parts}
    planned, compiled = collections.Counter(), collections.Counter()
    for part in graphs:
        assert isinstance(part.step, StepGraph)
        for node in part.step.graph.nodes:
            move = node.meta.get("move")
            if move is not None and move.travels:
                planned[_OF_MOVES[move.collective]] += part.runs * move.size_bytes
    for part, program in programs.items():
        for item in read_collectives(program.hlo_text(), mesh):
            compiled[item.kind] += part.runs * item.size_bytes
    order = _order(parts, strategy)
    arguments, temporaries, fullest = max((_memory(stage, programs, order, strategy.microbatches) for stage in range(strategy.pp)), key=lambda found: found[0] + found[1])
    return PlanCheck(
        argument_bytes=(estimate.parameter_bytes + estimate.state_bytes + estimate.other_bytes, arguments),
        temporary_bytes=(estimate.temporary_bytes, temporaries),
        collective_bytes={kind: (planned[kind], compiled[kind]) for kind in sorted({*planned, *compiled})},
        compile_seconds=sum(program.compile_seconds for program in programs.values()),
        fullest=fullest if len(programs) > 1 else "",
    )


def _mesh(plan: Plan) -> Mesh:
    """The devices of a stage, all of which are alike."""
    within, hardware = plan.strategy.within_stage, plan.hardware
    if hardware.chip.name.lower() == "cpu":
        return make_mesh(within, select_devices(within.num_devices))
    return absent_mesh(within, hardware.chip.name, hardware.levels[0].size if hardware.levels else within.num_devices)


# ---- the programs


def _graphs(search: Search, strategy: Strategy) -> list[_Part]:
    """The programs of a step, in an order in which they may run, as the loop makes them."""
    count = strategy.microbatches
    if count == 1 and strategy.offload is None:
        return [_Part("step", search.program_of(strategy))]
    update = None if strategy.offload is not None else search.update
    if strategy.pp == 1:
        parts = [_Part("forward and backward", search.program_of(strategy), runs=count)]
        return parts if update is None else [*parts, _Part(_UPDATE, search.local(update, strategy))]
    parts = [_part(segment, count) for segment in search.segments_of(strategy)]
    if update is None:
        return parts
    return [*parts, *(_part(segment, 1, updates=True) for segment in search.update_segments_of(strategy, _homes(parts)))]


def _part(segment: Segment, runs: int, *, updates: bool = False) -> _Part:
    return _Part(str(segment.place), segment.step, segment.place.stage, runs, updates)


def _homes(parts: Sequence[_Part]) -> dict[str, int]:
    """Parameter -> its stage: that of the program that gives its gradient, else the first that reads it."""
    gives = {item.target: part.stage for part in parts for item in part.step.outputs if item.kind is Kind.GRAD}
    reads: dict[str, int] = {}
    for part in parts:
        for item in part.step.inputs:
            if item.kind is Kind.PARAM:
                reads.setdefault(item.target, part.stage)
    return reads | gives


def _by_spmd(search: Search, strategy: Strategy, name: str) -> HloStep:
    captured, splits = search.update if name == _UPDATE else search.step_of(strategy), search.splits_of(strategy)
    assert captured is not None and splits is not None, f"{strategy} has no tp"
    return spmd_step(captured.copy(), strategy, splits=splits, batch_dims=search.dims_of(captured))[0]


# ---- their memory


def _order(parts: Sequence[_Part], strategy: Strategy) -> list[tuple[_Part, int]]:
    """Every run of a step: the program and the microbatch."""
    if strategy.pp == 1:
        return [(part, number) for part in parts for number in range(part.runs)]
    named = {part.name: part for part in parts}
    actions = dispatch_order(build_schedule(strategy.schedule, strategy.pp, strategy.microbatches, strategy.chunks))
    runs = [(named[name], action.microbatch) for action in actions if (name := f"{action.part.value}{action.chunk}") in named]
    return [*runs, *((part, 0) for part in parts if part.updates)]


def _memory(stage: int, programs: dict[_Part, Program], order: Sequence[tuple[_Part, int]], microbatches: int) -> tuple[int, int, str]:
    """(bytes that stay on a device of the stage, results of all runs included; bytes beside them where both together are most; in which program)."""
    stays: dict[tuple[Kind, str], int] = {}
    for part in programs:
        for item in part.step.inputs if part.stage == stage else ():
            if item.kind in STATE_KINDS or item.kind is Kind.BATCH:
                stays[item.kind, item.target] = _device_bytes(item) * (microbatches if item.kind is Kind.BATCH and part.runs > 1 else 1)
    results = {part: part.runs * sum(_device_bytes(item) for item in part.step.outputs if item.kind in RETURNED) for part in programs if part.stage == stage}
    readers = collections.Counter((part.updates, item.target, part.stage) for part in programs for item in part.step.inputs if item.kind is Kind.CROSS)
    live: dict[tuple[bool, str, int], tuple[int, int]] = {}  # value and microbatch -> bytes, and how many programs are to read it
    found = []
    for part, number in order:
        if part.stage == stage:
            memory = programs[part].memory
            others = sum(stays.values()) + sum(results.values()) - sum(_device_bytes(item) for item in part.step.inputs if (item.kind, item.target) in stays)
            crossing = {(part.updates, item.target, number): _device_bytes(item) for item in part.step.inputs if item.kind is Kind.CROSS}
            held = sum(size for size, _ in live.values())
            arguments = memory.argument_bytes - sum(crossing.values()) + others
            fresh = memory.output_bytes - memory.alias_bytes - results[part] // part.runs
            found.append((arguments, held + memory.temp_bytes + fresh, part.name))
            for key in crossing:
                size, unread = live.pop(key)
                if unread > 1:
                    live[key] = size, unread - 1
        for item in part.step.outputs:
            if item.kind is Kind.CROSS and (unread := readers[part.updates, item.target, stage]):
                live[part.updates, item.target, number] = _device_bytes(item), unread
    assert not live, f"values that nobody reads: {sorted(live)[:5]}"
    return max(found, key=lambda at: at[0] + at[1])


def _device_bytes(item: Input | Output) -> int:
    """Of a device's part."""
    return math.prod(local_shape(item.shape, item.shards)) * item.dtype.itemsize
