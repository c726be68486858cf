"""What a partition did: collectives with their bytes, and the tensors that had to be gathered because of an operator."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedGather:
    """A tensor that was split and had to be brought together (or split anew) for one operator."""

    node: str  # the operator's node
    operator: str
    shape: tuple[int, ...]  # of the tensor before this partition
    size_bytes: int
    reason: str
    source: str  # the user's source line, "" if unknown

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.operator} ({self.node}) gathers {list(self.shape)}, {self.size_bytes} bytes: {self.reason}{where}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that the partition wrote."""

    kind: str  # "all_gather", "all_reduce", "reduce_scatter" or "all_to_all"
    node: str
    size_bytes: int  # of the whole tensor: gathered, reduced, or before it is scattered; of one rank's part for an all-to-all
    phase: str


@dataclasses.dataclass(kw_only=True)
class PartitionReport:
    """The record of one partition along one axis."""

    axis: str
    num_ranks: int
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    forced: list[ForcedGather] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # what the partition changes besides the order of sums

    def count(self, kind: str) -> int:
        return sum(item.kind == kind for item in self.collectives)

    def size_bytes(self, kind: str) -> int:
        return sum(item.size_bytes for item in self.collectives if item.kind == kind)

    def __str__(self) -> str:
        kinds = sorted({item.kind for item in self.collectives})
        lines = [f"{self.axis} over {self.num_ranks} ranks:"]
        lines += [f"  {kind}: {self.count(kind)}, {self.size_bytes(kind)} bytes" for kind in kinds]
        return "\n".join(lines + [f"  {item}" for item in [*self.notes, *self.forced]])


def source_line(stack_trace: str | None) -> str:
    """The last user line of a recorded stack, as file:line."""
    for line in reversed((stack_trace or "").splitlines()):
        if line.strip().startswith("File "):
            parts = line.strip().split(", ")
            return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].removeprefix('line ')}"
    return ""
