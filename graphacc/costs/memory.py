"""Predicting the memory of a step on one device from its StepGraph, without compiling it.

Counted is what a compiler stores: views share their base's memory, an element-wise operator whose users can all compute it
on the fly is never stored (its operands live longer instead; but XLA repeats for several users only what is cheap and reads one
tensor of its size), and an output that replaces an input is written in place. The order is the best of a few quick ones, since
the compiled program's is planned as well.
"""

import dataclasses
import itertools
import math
import operator

import torch
import torch.fx

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.graph import Phase, StepGraph
from graphacc.ops.chunked import body_of
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.problem import Buffer, Operator, Problem

_aten = torch.ops.aten

_VIEWS = of_kind(*LAYOUT_KINDS, OpKind.EXPAND, OpKind.ORDER) - {_aten.clone.default} | {operator.getitem, torch.ops._c10d_functional.wait_tensor.default}
"""Operators whose result shares, or can share, the memory of their first operand."""

_COMPUTED_ON_THE_FLY = frozenset(
    {
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.full.default,
        _aten.full_like.default,
        _aten.scalar_tensor.default,
        _aten.arange.start_step,
        _aten.arange.default,
        _aten.constant_pad_nd.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.embedding.default,
        _aten.gather.default,
        torch.ops.graphacc.random_uniform.default,
    }
)
_EXPENSIVE = frozenset(
    {
        _aten.exp.default,
        _aten.tanh.default,
        _aten.sigmoid.default,
        _aten.log.default,
        _aten.rsqrt.default,
        _aten.sqrt.default,
        _aten.div.Tensor,
        _aten.erf.default,
        _aten.pow.Tensor_Scalar,
    }
)
_REDUCTIONS = frozenset(
    {
        _aten.sum.dim_IntList,
        _aten.sum.default,
        _aten.mean.dim,
        _aten.mean.default,
        _aten.amax.default,
        _aten.amin.default,
    }
)

_ORDERS = ("program order", "immediate updates", "eager free", "LPMF", "BFS")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes on one device."""

    argument_bytes: int  # parameters, buffers, optimizer state and batch
    temporary_bytes: int  # largest sum of values that live at once, arguments and outputs aside
    output_bytes: int  # outputs that replace no input

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def predict_memory(step: StepGraph) -> MemoryPrediction:
    """Predict the memory of one device for a step.

    Args:
        step: a graph whose shapes are those of one device (after the passes).
    """
    graph = compile_problem(_problem(step))
    donated = step.donations()
    return MemoryPrediction(
        argument_bytes=sum(_size_bytes(node) for node in step.placeholders),
        temporary_bytes=min(graph.peak(HEURISTICS[name](graph)) for name in _ORDERS),
        output_bytes=sum(_size_bytes(node) for i, node in enumerate(step.results) if i not in donated),
    )


def memory_profile(step: StepGraph) -> dict[torch.fx.Node, int]:
    """Calls whose results are stored -> bytes of temporaries while each runs, in the order of the program."""
    problem = _problem(step)
    graph = compile_problem(problem)
    nodes = {node.name: node for node in step.graph.nodes}
    stored = graph.profile(HEURISTICS["program order"](graph))
    return {nodes[item.name]: size for item, size in zip(problem.operators, stored, strict=True)}


def saved_for_backward(step: StepGraph) -> dict[torch.fx.Node, int]:
    """The calls of the forward whose stored results the backward reads -> bytes of these."""
    problem = _problem(step)
    nodes = {node.name: node for node in step.graph.nodes}
    made = {number: nodes[item.name] for item in problem.operators for number in item.writes}
    found: dict[int, None] = {}
    for item in problem.operators:
        if nodes[item.name].meta["phase"] is Phase.BACKWARD:
            found |= dict.fromkeys(number for number in item.reads if made[number].meta["phase"] is Phase.FORWARD)
    sizes: dict[torch.fx.Node, int] = {}
    for number in found:
        sizes[made[number]] = sizes.get(made[number], 0) + problem.buffers[number].size
    return sizes


def working_bytes(step: StepGraph) -> dict[torch.fx.Node, int]:
    """Calls whose results are stored -> bytes of temporaries while each runs, in the order of the program, without what the forward has left for the backward."""
    problem = _problem(step)
    graph = compile_problem(problem)
    nodes = {node.name: node for node in step.graph.nodes}
    phases = [nodes[item.name].meta["phase"] for item in problem.operators]
    made = {number: i for i, item in enumerate(problem.operators) for number in item.writes}
    last: dict[int, int] = {}
    for i, item in enumerate(problem.operators):
        last |= {number: i for number in item.reads if phases[i] is Phase.BACKWARD and phases[made[number]] is Phase.FORWARD}
    changes = [0] * (len(phases) + 1)
    for number, end in last.items():
        changes[made[number]] += problem.buffers[number].size
        changes[end + 1] -= problem.buffers[number].size
    held = itertools.accumulate(changes)
    stored = graph.profile(HEURISTICS["program order"](graph))
    return {nodes[item.name]: size - kept for item, size, kept in zip(problem.operators, stored, held)}


def _problem(step: StepGraph) -> Problem:
    """One operator for each call whose values are stored; it reads what it needs itself, and through values computed on the fly.

    Arguments and outputs have memory of their own, and are left out, or have no bytes.
    """
    buffers: list[Buffer] = []
    operators: list[Operator] = []
    made: dict[torch.fx.Node, range] = {}  # the buffers that a call creates
    places: dict[torch.fx.Node, frozenset[int]] = {}  # the buffers that are read where a node's value is used
    for node in step.graph.nodes:
        reads = frozenset().union(*(places[operand] for operand in node.all_input_nodes))
        base = node.args[0] if node.op == "call_function" and node.target in _VIEWS else None
        if node.op != "call_function":
            places[node] = frozenset()
        elif node.target is operator.getitem and base in made:
            places[node] = frozenset({made[base][node.args[1]]})
        elif base is not None:
            places[node] = places[base]
        elif computed_on_the_fly(node):
            places[node] = reads
        else:
            made[node] = range(len(buffers), len(buffers) + len(_sizes(node)))
            places[node] = frozenset(made[node])
            buffers += [Buffer(name=node.name, size=size) for size in _sizes(node)]
            operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=tuple(made[node]), workspace=loop_bytes(node)))
    for number in frozenset().union(*(places[node] for node in step.results)):
        buffers[number] = dataclasses.replace(buffers[number], size=0)
    return Problem(operators=tuple(operators), buffers=tuple(buffers))


def loop_bytes(node: torch.fx.Node) -> int:
    """What a loop over chunks stores besides its operands and results: the most of one chunk, its terms of the sums, and sums that are wider than the results."""
    body = body_of(node)
    if body is None:
        return 0
    step = StepGraph(body.graph, (), ())
    graph = compile_problem(_problem(step))
    inside = min(graph.peak(HEURISTICS[name](graph)) for name in _ORDERS)
    wider = sum(
        value.meta["val"].numel() * body.accumulates_in(i).itemsize for i, value in enumerate(body.values) if body.accumulates_in(i) is not value.meta["val"].dtype
    )
    return inside + sum(map(_size_bytes, body.values)) + wider


def computed_on_the_fly(node: torch.fx.Node) -> bool:
    """Whether a call's result is never stored, since all its users can compute it for themselves."""
    if node.op != "call_function" or not _is_fusible(node) or not node.users:
        return False
    if len(node.users) > 1 and not _may_be_repeated(node):
        return False
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in node.users)


def _may_be_repeated(node: torch.fx.Node) -> bool:
    """Whether each of several users computes the value for itself: XLA weighs the work, and the bytes that are read again."""
    size = _size_bytes(node)
    return node.target not in _EXPENSIVE and sum(_size_bytes(operand) >= size for operand in node.all_input_nodes) <= 1


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if target in _COMPUTED_ON_THE_FLY:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _sizes(node: torch.fx.Node) -> list[int]:
    """Bytes of each value that a node returns."""
    values = node.meta["val"]
    values = values if isinstance(values, (tuple, list)) else [values]
    return [math.prod(v.shape) * v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values]


def _size_bytes(node: torch.fx.Node) -> int:
    return sum(_sizes(node))
