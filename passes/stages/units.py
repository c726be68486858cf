"""Where a model can be cut: units of the forward part between narrow cuts, with their work and what crosses.

The forward calls stand in the order of the program. A cut before the i-th call sends every value that is made before it and
read behind it. Between two calls that do real work (matrix products, convolutions, embeddings) the narrowest place is a
candidate, and a candidate that is not wider than its neighbours (by more than `SLACK`) is a cut between units: in a
transformer, the places where the residual stream alone crosses. Units whose modules are children of one numbered block
("h.3") belong together, and are separated only where that balances much better.
"""

import dataclasses
import functools
import itertools
import re

import torch
import torch.fx

from graphacc.costs.work import node_work
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.passes.stages.values import VIEWS, free_values, is_item, readers, size_bytes

aten = torch.ops.aten

FLOPS_PER_BYTE = 10.0
"""What reading or writing a byte of memory costs, in floating-point operations."""

SLACK = 1.25
"""How much wider than its neighbours a cut may be: small values, such as router logits, accumulate on the way to the loss."""

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
_EMBEDDING = aten.embedding.default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive forward calls that stay together."""

    nodes: tuple[torch.fx.Node, ...]
    cost: float  # in floating-point operations
    crossing_bytes: float  # what the cut before it sends
    block: str  # the numbered module of its last call, "" outside of any
    parameters: dict[str, int]  # target -> bytes, of the parameters that it reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward part in the order of the program, and what crosses before each of its calls."""

    nodes: tuple[torch.fx.Node, ...]
    crossing_bytes: tuple[float, ...]
    parameters: dict[torch.fx.Node, dict[str, int]]  # call -> target -> bytes of the parameters that it reads


def forward_part(step: StepGraph) -> Forward:
    """The forward calls that are not free."""
    free = free_values(step)
    nodes = [n for n in step.graph.nodes if n.op == "call_function" and n.meta["phase"] is Phase.FORWARD and n not in free]
    place = {node: i for i, node in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 2)
    unbroken = [False] * (len(nodes) + 1)  # inside of a call with several results

    def lives(size: float, first: int, last: int) -> None:
        """A value crosses every cut behind `first` up to the one before `last`."""
        change[first + 1] += size
        change[last + 1] -= size

    for node in nodes:
        last = max((place[user] for user in node.users if user in place), default=place[node])
        if isinstance(node.meta["val"], torch.Tensor):
            lives(size_bytes(node), place[node], last)
        else:
            unbroken[place[node] + 1 : last + 1] = [True] * (last - place[node])
    parameters: dict[torch.fx.Node, dict[str, int]] = {node: {} for node in nodes}
    for node, item in zip(step.placeholders, step.inputs):
        used = sorted(place[reader] for reader in readers(node, free) if reader in place)
        for i in used if item.kind is Kind.PARAM else ():
            parameters[nodes[i]][item.target] = int(size_bytes(node))
    crossing, total = [], 0.0
    for i in range(len(nodes)):
        total += change[i]
        crossing.append(float("inf") if unbroken[i] else total)
    return Forward(nodes=tuple(nodes), crossing_bytes=tuple(crossing), parameters=parameters)


def cuts(forward: Forward) -> list[int]:
    """Places, each before the call of that index, where units may be separated."""
    working = [i for i, node in enumerate(forward.nodes) if _works(node, forward)]
    candidates = [narrowest(forward, left + 1, right) for left, right in itertools.pairwise(working)]
    widths = [forward.crossing_bytes[i] for i in candidates]
    return [
        i
        for k, i in enumerate(candidates)
        if widths[k] <= SLACK * min(widths[max(k - 1, 0)], widths[min(k + 1, len(widths) - 1)]) and widths[k] < float("inf")
    ]


def narrowest(forward: Forward, first: int, last: int) -> int:
    """The place out of first ... last, both included, where least crosses; of several a block's edge, then the last one."""
    nodes = forward.nodes

    def key(i: int) -> tuple:
        return forward.crossing_bytes[i], block_of(nodes[i - 1]) == block_of(nodes[i]), -i

    return min(range(first, last + 1), key=key)


def units(forward: Forward, places: list[int]) -> list[Unit]:
    """The units between the given places."""
    edges = [0, *places, len(forward.nodes)]
    return [_unit(forward, first, last) for first, last in itertools.pairwise(edges)]


def _unit(forward: Forward, first: int, last: int) -> Unit:
    nodes = forward.nodes[first:last]
    parameters: dict[str, int] = {}
    for node in nodes:
        parameters |= forward.parameters[node]
    return Unit(
        nodes=nodes,
        cost=sum(work(node) for node in nodes),
        crossing_bytes=forward.crossing_bytes[first],
        block=block_of(nodes[-1]),
        parameters=parameters,
    )


def block_of(node: torch.fx.Node) -> str:
    """The outermost numbered module that a call belongs to.

    Examples: "transformer.h.3.attn" lies in "transformer.h.3", and "lm_head" in none, "".
    """
    return _block_of_path(node.meta.get("module_path") or "")


@functools.lru_cache(maxsize=1 << 14)
def _block_of_path(path: str) -> str:
    found = _BLOCK.match(path)
    return found.group(0) if found else ""


def work(node: torch.fx.Node) -> float:
    """The cost of a call in floating-point operations; results that are stored count `FLOPS_PER_BYTE` for every byte.

    Views cost nothing, and an element-wise operator, which compilers fuse, one operation per element.
    """
    value = node.meta["val"]
    if is_item(node) or node.target in VIEWS:
        return 0.0
    results = [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return float(sum(v.numel() for v in results))
    return node_work(node).flops + FLOPS_PER_BYTE * sum(v.numel() * v.dtype.itemsize for v in results)


def _works(node: torch.fx.Node, forward: Forward) -> bool:
    return bool(node_work(node).flops) or (node.target is _EMBEDDING and bool(forward.parameters[node]))
