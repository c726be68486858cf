"""What a partition did: collectives with their bytes, and the tensors that had to be gathered because of an operator."""

import collections
import dataclasses

import torch.fx

from graphacc.passes.partition.plan import AxisPlan, Move


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program of one rank."""

    kind: str  # "all_gather", "all_reduce", "reduce_scatter", "all_to_all" or "permute"
    node: torch.fx.Node
    size_bytes: int  # of the whole tensor: gathered, reduced, or before it is scattered; of one rank's part for an all-to-all

    @property
    def phase(self) -> str:
        return self.node.meta["phase"].value


@dataclasses.dataclass(frozen=True)
class ForcedGather:
    """A tensor that was split and had to be gathered (or split anew) for one operator."""

    move: Move
    operator: str
    shape: tuple[int, ...]  # of the tensor before this partition
    source: str  # the user's source line, "" if unknown

    @property
    def node(self) -> str:
        return self.move.reader

    @property
    def size_bytes(self) -> int:
        return self.move.size_bytes

    @property
    def reason(self) -> str:
        return self.move.forced

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.operator} ({self.node}) gathers {list(self.shape)}, {self.size_bytes} bytes: {self.reason}{where}"


@dataclasses.dataclass(kw_only=True)
class PartitionReport:
    """The record of one partition along one axis."""

    plan: AxisPlan
    collectives: list[Collective]
    forced: list[ForcedGather]
    notes: list[str] = dataclasses.field(default_factory=list)  # what the partition changes besides the order of sums
    homes: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)  # node before -> the node that has it, as it is placed at home

    @property
    def axis(self) -> str:
        return self.plan.axis

    @property
    def num_ranks(self) -> int:
        return self.plan.num_ranks

    def count(self, kind: str) -> int:
        return sum(item.kind == kind for item in self.collectives)

    def size_bytes(self, kind: str) -> int:
        return sum(item.size_bytes for item in self.collectives if item.kind == kind)

    def __str__(self) -> str:
        found = collections.Counter((move.collective, move.role, move.phase) for move in self.plan.moves if move.travels)
        sizes: collections.Counter = collections.Counter()
        for move in self.plan.moves:
            sizes[move.collective, move.role, move.phase] += move.size_bytes
        lines = [f"{self.axis} over {self.num_ranks} ranks:"]
        lines += [
            f"  {collective} of {role.value} in {phase.value}: {count}, {sizes[collective, role, phase]} bytes"
            for (collective, role, phase), count in sorted(found.items(), key=lambda item: (item[0][2].value, item[0][0], item[0][1].value))
        ]
        return "\n".join(lines + [f"  {item}" for item in [*self.notes, *self.forced]])


def source_line(stack_trace: str | None) -> str:
    """The last user line of a recorded stack, as file:line."""
    for line in reversed((stack_trace or "").splitlines()):
        if line.strip().startswith("File "):
            parts = line.strip().split(", ")
            return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].removeprefix('line ')}"
    return ""
