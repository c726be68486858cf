"""What a partition along one mesh axis decides, as data: the placement of every value, and every move between placements."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.fx

from graphacc.graph import Phase
from graphacc.passes.partition.placement import Placement


class Role(enum.Enum):
    """What a moved tensor is to the training step."""

    WEIGHT = "weight"  # a parameter, or a view or cast of one
    GRADIENT = "gradient"  # of a parameter
    ACTIVATION = "activation"  # or its gradient
    STATE = "optimizer state"  # and what the optimizer computes from it
    TOKENS = "tokens"  # rows on their way to experts and back
    KEYS = "keys"  # and values, and their gradients, on their way around a ring while attention to others is computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """One change of placement; bytes travel in all of them but `shard` and `create`."""

    value: str  # name of the node, in the graph that was partitioned
    axis: str
    collective: str  # "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"; "shard" cuts a block out of a whole tensor
    source: Placement | None  # None: inside of an operator that communicates by itself
    target: Placement | None
    size_bytes: int  # of the whole tensor: gathered, reduced, or before it is scattered; of one rank's part for an all-to-all
    role: Role
    phase: Phase
    layer: str  # path of the module that reads it
    reader: str  # name of the node that it is made for
    tensors: int = 1  # joined in one message
    bits: int | None = None  # of an element, where it travels quantised; None: as it is
    forced: str = ""  # why an operator could not take the tensor as it was, where that is no part of the strategy

    @property
    def travels(self) -> bool:
        return self.collective != "shard"


class Action(NamedTuple):
    """One step of writing the program of one rank."""

    node: torch.fx.Node  # of the graph that is partitioned: gives name, phase, module and source line
    inputs: tuple[int, ...]  # the actions whose values it reads
    write: Callable[..., Any]  # (emitter, *values) -> the new node, or a list of nodes for a tuple of results
    expected: Placement | None = None  # of the result, which is then the local form of `node`


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisPlan:
    """The whole decision along one axis. `write` makes the program of one rank of it."""

    axis: str
    num_ranks: int
    placements: dict[str, Placement | tuple[Placement, ...]]  # node -> where its value is placed at home
    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()
    sums_late: bool = False  # gradients that add up over several runs lie as every rank's own sum, in a dim in front
    inputs: tuple[Placement, ...]  # per input of the step
    outputs: tuple[Placement, ...]
    actions: tuple[Action, ...] = dataclasses.field(repr=False)
    results: tuple[int, ...] = dataclasses.field(repr=False)  # the action that makes each output
    homes: dict[str, int] = dataclasses.field(repr=False)  # node -> the action that makes it as it is placed at home

    def count(self, collective: str) -> int:
        return sum(move.collective == collective for move in self.moves)
