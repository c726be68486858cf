"""A plan beside what XLA makes of it: its strategy is compiled for devices that need not be here, and memory and collectives are read back."""

import collections
import dataclasses

from graphacc.errors import StrategyError
from graphacc.hlo import HloStep
from graphacc.loop.by_spmd import spmd_step
from graphacc.report.communication import read_collectives
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.runtime.absent import absent_mesh
from graphacc.search import Plan, Search
from graphacc.strategy import Strategy

_OF_MOVES = {"all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "permute": "collective-permute"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """What was predicted, and what the compiled program has, on one device."""

    argument_bytes: tuple[int, int]  # parameters, optimizer state, buffers and batch: predicted, compiled
    temporary_bytes: tuple[int, int]  # with results that replace no input
    collective_bytes: dict[str, tuple[int, int]]  # kind of HLO -> bytes of whole tensors: planned, compiled
    compile_seconds: float

    @property
    def peak_bytes(self) -> tuple[int, int]:
        (predicted_arguments, arguments), (predicted_temporaries, temporaries) = self.argument_bytes, self.temporary_bytes
        return predicted_arguments + predicted_temporaries, arguments + temporaries

    def __str__(self) -> str:
        rows = [("MB of one device", "predicted", "XLA", "ratio")]
        parts = {"memory": self.peak_bytes, "  arguments": self.argument_bytes, "  temporaries and results": self.temporary_bytes}
        parts |= {f"{kind} (whole tensors)": sizes for kind, sizes in sorted(self.collective_bytes.items())}
        for name, (predicted, found) in parts.items():
            rows.append((name, f"{predicted / 1e6:.3f}", f"{found / 1e6:.3f}", f"{predicted / found:.3f}" if found else ("" if not predicted else "XLA has none")))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.1f} s"])


def _by_spmd(search: Search, strategy: Strategy) -> HloStep:
    step, splits = search.step_of(strategy).copy(), search.splits_of(strategy)
    assert splits is not None, f"{strategy} has no tp"
    return spmd_step(step, strategy, splits=splits, batch_dims=search.dims_of(step))[0]


def check_plan(search: Search, plan: Plan) -> PlanCheck:
    """Compile the whole step under a plan's strategy: for its hardware if XLA can without it (H100 and H200), or for virtual CPU devices.

    Raises:
        StrategyError: there is no description of the chip, its plugin is not installed, or its steps are several programs.
        LoweringError: an operator cannot be lowered.
    """
    strategy, hardware = plan.strategy, plan.hardware
    if strategy.microbatches > 1 or strategy.offload is not None:
        raise StrategyError(f"{strategy}: a step of several programs is not checked; leave microbatches and offload out")
    if hardware.chip.name.lower() == "cpu":
        mesh = make_mesh(strategy, select_devices(strategy.num_devices))
    else:
        mesh = absent_mesh(strategy, hardware.chip.name, hardware.levels[0].size if hardware.levels else strategy.num_devices)
    step = search.program_of(strategy)
    program = Program.build(_by_spmd(search, strategy) if strategy.tp_by == "spmd" else step, mesh, cache_dir=None, memory_plan="xla")
    memory, estimate = program.memory, plan.estimate
    planned, compiled = collections.Counter(), collections.Counter()
    for node in step.graph.nodes:
        move = node.meta.get("move")
        if move is not None and move.travels:
            planned[_OF_MOVES[move.collective]] += move.size_bytes
    for item in read_collectives(program.hlo_text(), mesh):
        compiled[item.kind] += item.size_bytes
    arguments = estimate.parameter_bytes + estimate.state_bytes + estimate.other_bytes
    return PlanCheck(
        argument_bytes=(arguments, memory.argument_bytes),
        temporary_bytes=(estimate.temporary_bytes, memory.temp_bytes + memory.output_bytes - memory.alias_bytes),
        collective_bytes={kind: (planned[kind], compiled[kind]) for kind in sorted({*planned, *compiled})},
        compile_seconds=program.compile_seconds,
    )
