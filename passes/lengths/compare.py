"""What in a graph depends on a length: found by comparing captures of the same code at two lengths.

Captures that differ by one in one length alone must have the same operators in the same order. A number that differs between them must be
``factor * length + constant`` with a small constant, and a size ``factor * (length + offset)``; whatever else differs is refused, with the user's line.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphacc.errors import GraphAccError
from graphacc.graph import StepGraph

_NUMERATORS = (1, 2)
"""Of numbers that are divided by a length: the gradients of a mean and of a mean square."""

MAX_OFFSET = 8
"""The largest distance of a number from a multiple of a length, in such multiples; a product of two lengths looks like one that is about half of the length away."""


class LengthRefused(GraphAccError):
    """A graph of one length cannot stand for other lengths; says why, and where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affine:
    """The number ``factor * length + constant``, or a numerator over it."""

    symbol: int  # number of the length
    factor: int
    constant: int
    numerator: int | None = None

    def at(self, lengths: Sequence[int]) -> float:
        found = self.factor * lengths[self.symbol] + self.constant
        return found if self.numerator is None else self.numerator / found


def affine(value: object, others: Sequence[object], lengths: Sequence[int]) -> Affine | None:
    """How a number depends on the lengths; None where it does not.

    Args:
        value: at `lengths`.
        others: at the same lengths but for one each, which is one less.

    Raises:
        ValueError: in another way than `Affine`.
    """
    changed = [symbol for symbol, other in enumerate(others) if type(other) is not type(value) or repr(other) != repr(value)]
    if not changed:
        return None
    symbol, length = changed[0], lengths[changed[0]]
    shown = f"{value!r} here, {others[symbol]!r} where the length is {length - 1} instead of {length}"
    if len(changed) > 1:
        raise ValueError(f"{shown}, and it depends on another length, too")
    for numerator in (None, *_NUMERATORS):
        now, before = _whole(value, numerator), _whole(others[symbol], numerator)
        if now is None or before is None:
            continue
        factor = now - before
        constant = now - factor * length
        if factor >= 1 and abs(constant) <= factor * min(MAX_OFFSET, length // 4):
            return Affine(symbol=symbol, factor=factor, constant=constant, numerator=numerator)
    raise ValueError(shown)


def _whole(value: object, numerator: int | None) -> int | None:
    """The whole number that a number is, or that a numerator is divided by in it."""
    if type(value) not in (int, float) or not value:
        return None
    number = float(typing.cast(float, value))
    if numerator is None:
        return int(number) if number.is_integer() else None
    below = numerator / number
    return round(below) if type(value) is float and math.isfinite(below) and round(below) and numerator / round(below) == number else None


@dataclasses.dataclass(frozen=True)
class Varying:
    """What depends on lengths in one node."""

    shapes: tuple[tuple[Affine | None, ...], ...]  # of each tensor that it gives, by dim
    numbers: dict[int, Affine | str]  # place among the flattened (args, kwargs) -> the number there, or in which other way it depends


def varying(step: StepGraph, others: Sequence[StepGraph], lengths: Sequence[int]) -> dict[fx.Node, Varying]:
    """What depends on lengths in every node but the output.

    Args:
        step: captured at `lengths`.
        others: captures at the same lengths but for one each, which is one less.

    Raises:
        LengthRefused: the captures differ in more than numbers that grow with a length.
    """
    found, nodes = {}, list(step.graph.nodes)
    rows = [list(other.graph.nodes) for other in others]
    for other, symbol in zip(rows, range(len(rows))):
        if [(node.op, _name(node)) for node in other] != [(node.op, _name(node)) for node in nodes]:
            at = next((node for node, twin in zip(nodes, other) if (node.op, _name(node)) != (twin.op, _name(twin))), None)
            raise LengthRefused(
                f"its operators depend on the length: {len(nodes)} at {lengths[symbol]}, {len(other)} at {lengths[symbol] - 1}" + ("" if at is None else where(at))
            )
    places = [{node: i for i, node in enumerate(row)} for row in (nodes, *rows)]
    for i, node in enumerate(nodes):
        twins = [row[i] for row in rows]
        if node.op == "output":
            continue
        try:
            shapes = tuple(_shape(value, [_tensors(twin)[k] for twin in twins], lengths) for k, value in enumerate(_tensors(node)))
            numbers = dict(_numbers(node, twins, places, lengths))
        except ValueError as error:
            raise LengthRefused(f"{node.target}: {error}{where(node)}") from error
        found[node] = Varying(shapes, numbers)
    for target, value in step.constants.items():
        twins = [other.constants.get(target) for other in others]
        if any(twin is None or twin.shape != value.shape or not torch.equal(twin, value) for twin in twins):
            raise LengthRefused(f"the forward makes a tensor of shape {list(value.shape)} out of Python values that depend on the length: make it by torch.arange, or give it in the batch")
    return found


def _name(node: fx.Node) -> str:
    return "" if node.op in ("placeholder", "output") else str(node.target)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]


def _shape(value: torch.Tensor, twins: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[Affine | None, ...]:
    if any(twin.dim() != value.dim() or twin.dtype != value.dtype for twin in twins):
        raise ValueError("its result has another form")
    sizes = tuple(affine(size, [twin.shape[dim] for twin in twins], lengths) for dim, size in enumerate(value.shape))
    if any(size is not None and (size.constant % size.factor or size.numerator) for size in sizes):
        raise ValueError(f"its result of shape {list(value.shape)} is no multiple of a sequence")
    return sizes


def _numbers(node: fx.Node, twins: Sequence[fx.Node], places: Sequence[dict[fx.Node, int]], lengths: Sequence[int]) -> Iterator[tuple[int, Affine | str]]:
    flat = [_leaves(item, places[k]) for k, item in enumerate((node, *twins))]
    if any(len(leaves) != len(flat[0]) for leaves in flat):
        raise ValueError("its arguments have another form")
    for place, (leaf, *others) in enumerate(zip(*flat)):
        try:
            found = affine(leaf, others, lengths)
        except ValueError as error:
            found = str(error)
        if found is not None:
            yield place, found


def _leaves(node: fx.Node, places: dict[fx.Node, int]) -> list:
    """Flattened arguments; nodes by their place in the graph."""
    return [("node", places[leaf]) if isinstance(leaf, fx.Node) else leaf for leaf in pytree.tree_leaves((node.args, node.kwargs))]


def where(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    return "".join(f"\n  {line}" for line in lines[-2:])
