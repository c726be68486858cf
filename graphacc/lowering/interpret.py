"""From a StepGraph to a JAX function: check that every operator has a rule, then run the rules in the graph's order."""

import collections
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.fx

from graphacc._compat.jax_ import x64
from graphacc.errors import LoweringError
from graphacc.graph import StepGraph
from graphacc.lowering import row_sums
from graphacc.lowering.dtypes import from_torch, to_jax, to_torch
from graphacc.lowering.fence import REREADING, read_often
from graphacc.lowering.partitioned import is_partitioned
from graphacc.lowering.registry import Context, find, reason
from graphacc.lowering.settled import compared_with_themselves, settled
from graphacc.ops.chunked import body_of

Run = Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any]
"""(a call, the values of the nodes before it) -> its value."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """An operator of a graph that has no lowering rule."""

    op: str  # name of the overload
    count: int  # number of nodes that call it
    source: str  # the user's source line of the first of them; "" where it is unknown
    reason: str  # why it cannot have one; "" where a rule could be registered


def missing(step: StepGraph) -> list[Missing]:
    """The operators of the graph that have no rule, in the order of their first call."""
    return _missing(step.graph)


def _missing(graph: torch.fx.Graph) -> list[Missing]:
    nodes: dict[str, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        body = body_of(node)
        for target in body.targets if body is not None else [node.target] if _is_operator(node) else []:
            if find(target) is None:
                nodes[str(target)].append(node)
    return [Missing(op, len(calls), source_line(calls[0]), reason(op)) for op, calls in nodes.items()]


def check(step: StepGraph) -> None:
    """Raise unless every operator of the graph has a rule.

    Raises:
        LoweringError: lists all operators without one, how often and where the user's code calls them.
    """
    check_rules(step.graph)


def check_rules(graph: torch.fx.Graph) -> None:
    """`check` on a bare graph."""
    found = _missing(graph)
    if not found:
        return
    lines = [f"{len(found)} operator{'s' * (len(found) > 1)} of this graph cannot be lowered to XLA:"]
    for item in found:
        lines.append(f"  {item.op} ({item.count}×), first called at {item.source or 'an unknown line'}")
        if item.reason:
            lines.append(f"    {item.reason}")
    lines.append(
        "Register a rule for an operator with @graphacc.lowering.register(torch.ops.<namespace>.<name>.<overload>) "
        "(see its docstring), "
        "write it as a composite of ATen operators, or leave it out of the model."
    )
    raise LoweringError("\n".join(lines))


def lower(step: StepGraph) -> Callable[..., tuple[jax.Array, ...]]:
    """The graph as a pure function over jax arrays, one per input, that returns a tuple of one array per output.

    The function may be traced by ``jax.jit``; collectives in the graph need it inside a ``jax.shard_map`` over the axes that they
    name. Call it under ``graphacc._compat.jax_.x64()``, or 64-bit arguments arrive truncated.

    Raises:
        LoweringError: at once, for operators without a rule; when the function is traced, for an argument or a
            lowered node whose shape or dtype is not that of its fake value.
    """
    check(step)
    graph, names = step.graph, [item.name for item in step.inputs]

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if len(arrays) != len(names):
            raise LoweringError(f"the graph takes {len(names)} inputs ({', '.join(names)}), got {len(arrays)}")
        with x64():
            return tuple(run_graph(graph, arrays))

    return run


def run_graph(graph: torch.fx.Graph, arrays: Sequence[jax.Array], run: Run | None = None) -> object:
    """Run the rules of a graph's nodes on arrays for its placeholders; the result has the structure of its output.

    Args:
        run: gives the value of a call in the place of `run_node`.
    """
    sums, run = {} if is_partitioned() else row_sums.find(graph), run or run_node
    last_use, compared = _last_uses(graph, sums), compared_with_themselves(graph)
    inputs = iter(arrays)
    env: dict[torch.fx.Node, object] = {}
    fenced: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
            _check_value(node, node.meta.get("val"), env[node])
        elif node.op == "get_attr":
            env[node] = jnp.asarray(from_torch(getattr(graph.owning_module, node.target)))
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], env.__getitem__)
        elif node in sums:
            if node not in env:
                env |= sums[node].run(node, env)
        else:
            if str(node.target) in REREADING:
                _fence_operands(node, env, fenced)
            value = run(node, env)
            env[node] = settled(value) if node in compared else value
        for dead in last_use.get(node, ()):
            del env[dead]
    raise AssertionError("a torch.fx graph ends in an output node")


def _fence_operands(node: torch.fx.Node, env: dict, fenced: set[torch.fx.Node]) -> None:
    """Have the computed operands of a node in memory; their later readers read them there, too."""
    for operand in node.all_input_nodes:
        if operand.op == "call_function" and operand not in fenced and isinstance(operand.meta.get("val"), torch.Tensor):
            env[operand] = read_often(env[operand])
            fenced.add(operand)


def _last_uses(graph: torch.fx.Graph, sums: Mapping[torch.fx.Node, row_sums.RowSums]) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Node -> the values that nobody reads after it."""
    seen, last = set(), collections.defaultdict(list)
    for node in reversed(graph.nodes):
        reads = sums[node].reads(node) if node in sums else ()
        for used in (*reads, *node.all_input_nodes, node):
            if used not in seen:
                seen.add(used)
                last[node].append(used)
    return last


def run_node(node: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> object:
    """The value of a call, by its rule, from those of the nodes that it reads."""
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    val = node.meta.get("val")  # an operator without a result has none
    rule = find(node.target)
    assert rule is not None, f"{node.target} passed the check without a rule"
    try:
        with jax.named_scope(node.meta.get("module_path") or node.name):
            result = rule(Context(node, val), *args, **kwargs)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(f"{_label(node)}: its lowering rule failed with {type(error).__name__}: {error}") from error
    _check_value(node, val, result)
    return result


def _check_value(node: torch.fx.Node, val: object, result: object) -> None:
    if isinstance(val, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(val):
            raise LoweringError(f"{_label(node)}: the graph says {len(val)} results, its rule gave {result!r}")
        for expected, got in zip(val, result):
            _check_value(node, expected, got)
    elif isinstance(val, torch.Tensor):
        got = f"{to_torch(result.dtype)}{list(result.shape)}" if hasattr(result, "dtype") else repr(result)
        if not hasattr(result, "dtype") or tuple(result.shape) != tuple(val.shape) or result.dtype != to_jax(val.dtype):
            raise LoweringError(f"{_label(node)}: the graph says {val.dtype}{list(val.shape)}, got {got}")


def _label(node: torch.fx.Node) -> str:
    what = f"input {node.name!r}" if node.op == "placeholder" else f"node {node.name!r} ({node.target})"
    source = source_line(node)
    return f"{what} from {source}" if source else what


def source_line(node: torch.fx.Node) -> str:
    """The innermost line of the user's code that made this node, as torch recorded it; "" where it recorded none."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return lines[-1] if lines else ""
    return ": ".join(lines[files[-1] : files[-1] + 2])


def _is_operator(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem
