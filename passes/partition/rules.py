"""The registry of partition rules, and what a rule is given and gives.

A rule says how an operator behaves when its operands are spread over the ranks of one mesh axis. Most rules return
`Dims`: labels for the dims of operands and results, like an einsum. A label that stands in an operand may be split
over the ranks; a result without it is then a reduction over the ranks. The few others return a `Plan`.

    @rule("aten.mm.default")
    def _mm(call):
        return Dims({"self": "mk", "mat2": "kn"}, ["mn"], reduce={"k": "sum"}, linear=("self", "mat2"))

An operator without a rule gets replicated operands, which is always right.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx

import graphacc.ops  # noqa: F401  (rules name its operators)
from graphacc.graph import Phase
from graphacc.ops.facts import is_pointwise
from graphacc.passes.partition.placement import REPLICATE, Placement, Replicate, Shard, local_shape

Label = Hashable
Labels = Sequence[Label | None]  # one per dim; None: this dim is never split
Emit = Callable[..., Any]  # (emitter, args, kwargs), localized -> the node, or a list of nodes for a tuple of results


@dataclasses.dataclass(frozen=True)
class Communicating:
    """An `Emit` that writes collectives of its own."""

    write: Emit
    ids: torch.fx.Node | None = None  # of experts, where it sends rows to these

    def __call__(self, build: Any, args: tuple, kwargs: dict) -> Any:
        return self.write(build, args, kwargs)


@dataclasses.dataclass(slots=True)
class Operand:
    """One tensor argument of a call."""

    node: torch.fx.Node  # of the unpartitioned graph
    name: str  # the schema's name of the argument
    index: int | None  # position, where the argument is a list
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    placement: Placement
    held: frozenset[Placement] = frozenset()  # placements in which it exists already
    fixed: bool = False  # a split parameter that is used where it lies


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """What differs along an axis that spreads experts besides the batch."""

    weights: frozenset[str] = frozenset()  # parameters that hold one matrix per expert, and are used as they are placed
    updated: frozenset[torch.fx.Node] = frozenset()  # what the step gives in the place of these
    capacity_factor: float | None = None  # rows that a rank sends to another, as a multiple of their mean; None: all of them fit
    multiple: int = 1  # number of ranks of the data axes that are partitioned afterwards

    def capacity(self, num_rows: int, num_ranks: int) -> int:
        """How many of its `num_rows` rows a rank can send to each rank."""
        if self.capacity_factor is None:
            return num_rows
        wanted = math.ceil(self.capacity_factor * num_rows / num_ranks)
        return min(num_rows, -(-wanted // self.multiple) * self.multiple)


@dataclasses.dataclass(slots=True)
class Call:
    """A node of the unpartitioned graph with the placements of its operands."""

    node: torch.fx.Node
    arguments: dict[str, Any]  # by the schema's names, defaults included
    operands: tuple[Operand, ...]
    results: tuple[torch.Tensor | None, ...]  # fake values with global shapes
    num_ranks: int
    experts: ExpertParallel | None = None  # given where the axis spreads experts

    @property
    def phase(self) -> Phase:
        return self.node.meta["phase"]

    def operand(self, name: str) -> Operand | None:
        return next((operand for operand in self.operands if operand.name == name), None)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, name: str) -> tuple[int, ...]:
        operand = self.operand(name)
        assert operand is not None, f"{self.node.target} has no tensor argument {name!r}"
        return operand.shape

    def dim(self, name: str, dim: int) -> int:
        """`dim` of tensor argument `name`, non-negative."""
        return dim % max(len(self.shape(name)), 1)

    def local(self, shape: Sequence[int], placement: Placement) -> list[int]:
        return list(local_shape(tuple(shape), placement, self.num_ranks))


@dataclasses.dataclass(frozen=True)
class Dims:
    """How the dims of operands and results belong together.

    Attributes:
        operands: argument name -> labels of its dims (a list of labels for an argument that is a list of tensors).
            Arguments left out are never split.
        results: labels of every result.
        reduce: label -> "sum", "max" or "min": results without this label are that reduction over it. With None, the
            `emit` of the label reduces over the ranks itself.
        linear: arguments in each of which the operator is linear by itself.
        joint: arguments in which the operator is linear taken together.
        moves: it only moves elements, so that partial maxima and minima pass like partial sums.
        pads: it works element by element, so that padding passes through.
        padded: labels along which padding may stand otherwise: what stands there stays there, or is masked before a reduction.
        looks_up: labels of reductions that read single elements, so that padding does not count.
        once: arguments that count once in a reduction over the ranks (the tensor that is added to).
        size: argument that repeats the shape of the first result.
        emit: label -> how to write the local call if this label is split.
        matmul: expensive operator that is better fed whole matrices in the optimizer.
        offers: labels that may be split although no operand is split so, and where each result goes then: attention over a split
            sequence works on split heads, and gives its result back along the sequence.
    """

    operands: dict[str, Any]
    results: Sequence[Labels]
    reduce: dict[Label, str | None] = dataclasses.field(default_factory=dict)
    linear: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    moves: bool = False
    pads: bool = False
    padded: frozenset[Label] = frozenset()
    looks_up: frozenset[Label] = frozenset()
    once: tuple[str, ...] = ()
    size: str | None = None
    emit: dict[Label, Emit] = dataclasses.field(default_factory=dict)
    matmul: bool = False
    offers: dict[Label, tuple[Placement | None, ...]] = dataclasses.field(default_factory=dict)

    def labels(self, operand: Operand) -> Labels:
        labels = self.operands.get(operand.name, ())
        if operand.index is not None and labels:
            labels = labels[operand.index]
        return labels or (None,) * len(operand.shape)


@dataclasses.dataclass(slots=True)
class Plan:
    """How one call is carried out locally."""

    operands: tuple[Placement | None, ...]  # required, one per operand; None: any placement will do
    results: Placement | tuple[Placement, ...]  # one for all results, or one each
    sets: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments that change, by name
    emit: Emit | None = None  # writes the local call; None: the same operator
    reason: str = ""  # why operands are gathered, if they are
    restore: tuple[Placement | None, ...] = ()  # where the results are brought at once; None: they stay


Rule = Callable[[Call], Dims | Plan]
RULES: dict[torch._ops.OpOverload, Rule] = {}
READS_NODES: set[torch._ops.OpOverload] = set()
"""Operators whose rules look at how operands are made or at the node itself, not only at constants, shapes, dtypes and placements."""


ABSENT: set[str] = set()
"""Operators with a rule that this version of torch does not have."""


def operator(name: str) -> torch._ops.OpOverload | None:
    """``"aten.add.Tensor"`` -> the overload; None where this version of torch has none."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


def rule(names: str, *, reads_nodes: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the operators `names`, separated by blanks; for `reads_nodes` see `READS_NODES`."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            target = operator(name)
            if target is None:
                ABSENT.add(name)
                continue
            assert target not in RULES, f"{name} has two partition rules"
            RULES[target] = function
            if reads_nodes:
                READS_NODES.add(target)
        return function

    return register


def find_rule(target: torch._ops.OpOverload) -> Rule | None:
    """The rule of an operator; operators that torch tags as pointwise share one."""
    found = RULES.get(target)
    return RULES[torch.ops.aten.add.Tensor] if found is None and is_pointwise(target) else found


def replicate(call: Call, reason: str) -> Plan:
    """Replicate operands and results: right for every operator."""
    return Plan((REPLICATE,) * len(call.operands), REPLICATE, reason=reason)


def is_replicated(call: Call) -> bool:
    return all(isinstance(operand.placement, Replicate) for operand in call.operands)


def split_of(call: Call, name: str) -> Shard | None:
    """The split of an argument, if it has one."""
    operand = call.operand(name)
    return operand.placement if operand is not None and isinstance(operand.placement, Shard) else None
