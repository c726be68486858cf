"""From a StepGraph to a memory problem, to predict and to plan the memory of one device without compiling.

What becomes what:

- a call becomes an operator that creates one buffer per tensor it returns; views and `getitem` share their base's buffer;
- an input becomes a buffer that lives from the start to the end, since its owner keeps it;
- an output that replaces an input is written in place, into the input's buffer, after everything that reads the old value.
  Where a reader of the old value needs the new one first, and where one call would fill two inputs' places with one value, it
  keeps a buffer of its own. A call that is not element-wise and reads the old value itself needs that much workspace.

Shapes are those of `meta["val"]`: after the partitioning passes, one device's.
"""

import heapq
import math
import operator

import torch
import torch.fx

from graphacc.costs.memory import loop_bytes
from graphacc.graph import StepGraph
from graphacc.passes.memory.problem import Buffer, Operator, Problem

_SHARES_ITS_OPERAND = frozenset({torch.ops.aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default})

Place = tuple[torch.fx.Node, int]
"""Where a value is stored: the node that computes it, and which of its tensors it is."""


def problem_from_step(step: StepGraph) -> tuple[Problem, tuple[torch.fx.Node, ...]]:
    """The memory problem of a step on one device.

    Returns:
        The problem, and the node behind each of its operators.
    """
    places = _places(step)
    donated = _donated(step, places)
    calls = [node for node in step.graph.nodes if node.op == "call_function" and not is_view(node)]
    reads = {node: _read_places(node, places) for node in calls}
    order = _with_in_place_writes(calls, reads, donated)
    kept = {place for node in step.results for place in places[node]}
    numbers: dict[Place, int] = {}
    buffers: list[Buffer] = []
    for node in [*step.placeholders, *order]:
        for index, size in enumerate(_sizes(node)):
            if (node, index) not in donated:
                numbers[node, index] = len(buffers)
                is_input = node.op == "placeholder"
                name = node.name if index == 0 else f"{node.name}.{index}"
                buffers.append(Buffer(name=name, size=size, is_input=is_input, is_output=is_input or (node, index) in kept))
    operators = tuple(
        Operator(
            name=node.name,
            reads=tuple(sorted({numbers[donated.get(place, place)] for place in reads[node]})),
            writes=tuple(numbers[donated.get((node, i), (node, i))] for i in range(len(_sizes(node)))),
            workspace=_in_place_workspace(node, reads[node], donated) + loop_bytes(node),
        )
        for node in order
    )
    return Problem(operators=operators, buffers=tuple(buffers)), tuple(order)


def _sizes(node: torch.fx.Node) -> list[int]:
    """Bytes of each tensor that a node returns."""
    value = node.meta["val"]
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return [math.prod(item.shape) * item.dtype.itemsize if isinstance(item, torch.Tensor) else 0 for item in tensors]


def is_view(node: torch.fx.Node) -> bool:
    target = node.target
    if target is operator.getitem or target in _SHARES_ITS_OPERAND:
        return True
    return any(item.alias_info is not None for item in target._schema.returns)


def _places(step: StepGraph) -> dict[torch.fx.Node, tuple[Place, ...]]:
    """Node -> where each of its tensors is stored. A view of one tensor that returns several has the same place for each."""
    places: dict[torch.fx.Node, tuple[Place, ...]] = {}
    for node in step.graph.nodes:
        if node.op == "placeholder":
            places[node] = ((node, 0),)
        elif node.op == "call_function" and is_view(node):
            base = places[node.args[0]]
            if node.target is operator.getitem:
                places[node] = (base[node.args[1]],)
            else:
                places[node] = base[:1] * len(_sizes(node))
        elif node.op == "call_function":
            places[node] = tuple((node, i) for i in range(len(_sizes(node))))
    return places


def _read_places(node: torch.fx.Node, places: dict[torch.fx.Node, tuple[Place, ...]]) -> set[Place]:
    return {place for operand in node.all_input_nodes for place in places[operand]}


def _donated(step: StepGraph, places: dict[torch.fx.Node, tuple[Place, ...]]) -> dict[Place, Place]:
    """The place of a new value -> the input that it is written into."""
    donated: dict[Place, Place] = {}
    placeholders = step.placeholders
    for output, index in step.donations().items():
        (place,) = places[step.results[output]]
        target = (placeholders[index], 0)
        fits = place[0].op == "call_function" and _sizes(place[0])[place[1]] == _sizes(target[0])[0]
        if fits and place not in donated:
            donated[place] = target
    return donated


def _with_in_place_writes(
    calls: list[torch.fx.Node], reads: dict[torch.fx.Node, set[Place]], donated: dict[Place, Place]
) -> list[torch.fx.Node]:
    """The calls in an order in which no value is overwritten before it is read. Drops from `donated` what has no such order."""
    position = {node: i for i, node in enumerate(calls)}
    preds = {node: {place[0] for place in reads[node]} & position.keys() for node in calls}
    readers: dict[Place, list[torch.fx.Node]] = {}
    for node in calls:
        for place in reads[node]:
            readers.setdefault(place, []).append(node)
    moved = False  # some call has to wait for one that came later: positions say nothing of dependencies any more
    for place, target in list(donated.items()):
        writer = place[0]
        others = [node for node in readers.get(target, ()) if node is not writer]
        late = any(position[node] > position[writer] for node in others)
        if (moved or late) and any(_reaches(node, writer, preds) for node in others):
            del donated[place]
        else:
            preds[writer].update(others)
            moved = moved or late
    return _sorted(preds, position)


def _reaches(node: torch.fx.Node, wanted: torch.fx.Node, preds: dict[torch.fx.Node, set[torch.fx.Node]]) -> bool:
    """Whether `node` cannot run before `wanted`."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current is wanted:
            return True
        fresh = preds[current] - seen
        seen |= fresh
        stack.extend(fresh)
    return False


def _sorted(preds: dict[torch.fx.Node, set[torch.fx.Node]], position: dict[torch.fx.Node, int]) -> list[torch.fx.Node]:
    """A topological order that stays as close to `position` as it can."""
    waiting = {node: len(before) for node, before in preds.items()}
    users: dict[torch.fx.Node, list[torch.fx.Node]] = {node: [] for node in preds}
    for node, before in preds.items():
        for other in before:
            users[other].append(node)
    nodes = list(preds)
    ready = [position[node] for node in nodes if not waiting[node]]
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in users[node]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, position[user])
    return order


def _in_place_workspace(node: torch.fx.Node, reads: set[Place], donated: dict[Place, Place]) -> int:
    """Bytes of the old values that a call reads and overwrites, where it does so other than element by element."""
    if torch.Tag.pointwise in node.target.tags:
        return 0
    targets = {donated[node, i]: size for i, size in enumerate(_sizes(node)) if (node, i) in donated}
    return sum(size for target, size in targets.items() if target in reads)
