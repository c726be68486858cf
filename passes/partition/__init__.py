"""The partitioner: makes a StepGraph the program of one rank along one mesh axis, with explicit collectives."""

from graphacc.passes.partition import rules_experts, rules_flash, rules_index, rules_matmul, rules_move, rules_nn, rules_pointwise, rules_reduce  # noqa: F401  (registers the rules)
from graphacc.passes.partition.driver import partition
from graphacc.passes.partition.report import ForcedGather, PartitionReport

__all__ = ["ForcedGather", "PartitionReport", "partition"]
