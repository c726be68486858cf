"""What a partition did: collectives with their bytes, and the tensors that had to be gathered because of an operator."""

import collections
import dataclasses

import torch.fx

from graphacc.passes.partition.plan import AxisPlan, Move, Role
from graphacc.passes.runner import PassReport


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program of one rank."""

    kind: str  # "all_gather", "all_reduce", "reduce_scatter", "all_to_all" or "permute"
    node: torch.fx.Node
    size_bytes: int  # of the whole tensor: gathered, reduced, or before it is scattered; of one rank's part for an all-to-all
    role: Role | None = None  # where the operator that it is a part of says it

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


def forced_notes(report: PartitionReport) -> list[str]:
    """A line for the user for each line of theirs whose operator forces tensors to be gathered."""
    found: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for item in report.forced:
        found[item.source, item.operator, item.reason].append(item.size_bytes)
    return [
        f"{operator}{f' at {source}' if source else ''} gathers {_count(sizes)} over {report.axis}={report.num_ranks}, {sum(sizes) / 1e6:.3g} MB "
        f"in all, in every step: {reason}"
        for (source, operator, reason), sizes in found.items()
    ]


def without_graphs(report: PassReport) -> PassReport:
    """The report of a pass, to be kept: it says the same, and refers to no graph."""
    if not isinstance(report.details, PartitionReport):
        return report
    plan = dataclasses.replace(report.details.plan, actions=(), results=(), homes={})
    return dataclasses.replace(report, details=dataclasses.replace(report.details, plan=plan, collectives=[], homes={}))


def _count(sizes: list[int]) -> str:
    return "a tensor" if len(sizes) == 1 else f"{len(sizes)} tensors"


def source_line(stack_trace: str | None) -> str:
    """The last user line of a recorded stack, as file:line."""
    for line in reversed((stack_trace or "").splitlines()):
        if line.strip().startswith("File "):
            parts = line.strip().split(", ")
            return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].removeprefix('line ')}"
    return ""
