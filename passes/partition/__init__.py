"""The partitioner: makes a StepGraph the program of one rank along one mesh axis, with explicit collectives.

`assign` decides (an `AxisPlan`, plain data), `write` makes the program of it, and `partition` does both.
"""

from graphacc.graph import StepGraph
from graphacc.passes.partition import rules_batched, rules_experts, rules_flash, rules_index, rules_matmul, rules_move, rules_nn, rules_pointwise, rules_reduce  # noqa: F401  (registers the rules)
from graphacc.passes.partition.assign import assign
from graphacc.passes.partition.plan import AxisPlan, Move, Role
from graphacc.passes.partition.report import ForcedGather, PartitionReport
from graphacc.passes.partition.write import write

__all__ = ["AxisPlan", "ForcedGather", "Move", "PartitionReport", "Role", "assign", "partition", "write"]


def partition(step: StepGraph, *args, **kwargs) -> tuple[StepGraph, PartitionReport]:
    """`assign` and `write`: the program of one rank, and what was decided. Takes the arguments of `assign`."""
    return write(step, assign(step, *args, **kwargs))
