"""How the ranks of one mesh axis hold a tensor of the unpartitioned graph.

`Shard` is the placement inside a graph; `graphacc.graph.MeshShard` is the layout of one of its inputs or outputs, which
knows neither `outer` nor padding sizes.
"""

import dataclasses
import math

import torch
import torch.fx


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Order:
    """An order of the elements of a split dim that is not the tensor's: that of the ranks' own sorts (see `routing`)."""

    kind: str  # "sorted", "sent" or "received"
    ids: torch.fx.Node  # of the unpartitioned graph: what the rows were sorted or exchanged by


@dataclasses.dataclass(frozen=True)
class Shard:
    """Dim `dim`, read as [outer, ranks, rest], is split over the ranks: a rank holds [outer, 1, rest], flattened.

    ``outer`` > 1 arises where [T, B, C] with B split is flattened to [T * B, C]: T is then the outer part.
    """

    dim: int
    outer: int = 1
    padding: int = 0  # elements behind the end of the dim that make it divide; only with `outer` 1
    order: Order | None = dataclasses.field(default=None, repr=False)  # None: the ranks' blocks are those of the tensor

    def __hash__(self) -> int:  # quick: placements are in most keys of the planner
        return self.dim + 1

    def along(self, dim: int) -> "Shard":
        """The same split of another dim."""
        return self if dim == self.dim else Shard(dim, self.outer, self.padding, self.order)

    @property
    def plain(self) -> bool:
        """The ranks' blocks are the tensor, in its order and without padding."""
        return not self.padding and self.order is None


@dataclasses.dataclass(frozen=True)
class Partial:
    """The tensor is the element-wise `op` ("sum", "max" or "min") over what the ranks hold."""

    op: str = "sum"


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()


def local_shape(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """The shape that one rank holds of a tensor of `shape`."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    local = list(shape)
    padded = local[placement.dim] + placement.padding
    assert padded % (placement.outer * num_ranks) == 0, f"{placement} does not divide {tuple(shape)} over {num_ranks} ranks"
    local[placement.dim] = padded // num_ranks
    return tuple(local)


def divides(shape: tuple[int, ...], split: Shard, num_ranks: int) -> bool:
    size = shape[split.dim] + split.padding
    return size > 0 and size % (split.outer * num_ranks) == 0


def view_split(shape: tuple[int, ...], split: Shard, new_shape: tuple[int, ...], num_ranks: int) -> Shard | None:
    """Where a split lies after a row-major reshape, or None if no single dim of `new_shape` holds it.

    In row-major order a split tensor reads as [leading, ranks, trailing] with
    ``leading = prod(shape[:dim]) * outer``. A dim of the new shape holds the same split if `leading` ends inside it and
    the ranks fit behind: at most one dim does.

    Examples:
        >>> view_split((7, 4, 3), Shard(1), (28, 3), 2)     # [T, B, C] -> [T * B, C]
        Shard(dim=0, outer=7, padding=0)
        >>> view_split((28, 3), Shard(0, 7), (7, 2, 2, 3), 2)
        Shard(dim=1, outer=1, padding=0)
    """
    if split.order is not None and split.dim < len(new_shape) and shape[: split.dim + 1] == tuple(new_shape)[: split.dim + 1]:
        return split
    if split.order is not None:
        return None
    if split.padding:  # only a dim that stays as it is keeps its padding
        before, size = math.prod(shape[: split.dim]), shape[split.dim]
        kept = [dim for dim, other in enumerate(new_shape) if other == size and math.prod(new_shape[:dim]) == before]
        return Shard(kept[0], padding=split.padding) if kept else None
    leading = math.prod(shape[: split.dim]) * split.outer
    prefix = 1
    for dim, size in enumerate(new_shape):
        outer, rest = divmod(leading, prefix)
        if rest == 0 and size and size % (outer * num_ranks) == 0:
            return Shard(dim, outer)
        prefix *= size
        if not prefix or prefix > leading:
            return None
    return None


def size_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
