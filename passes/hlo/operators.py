"""Captured HLO as a graph of operators, for decisions only: which parameters are split along `tp`, and where sequences are.

The graph has the shapes of the HLO and computes nothing: constants and random numbers are tensors of ones, functions of one element are ``tanh``. An operation that has no operator here is
`OPAQUE`, which wants its operands whole. So what decides about a StepGraph (`graphacc.passes.partition.tensor_parallel`) decides about HLO.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from graphacc._compat.jax_ import WHOLE_CALL, HloOperation
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.hlo import DTYPES, Captured, Draw, Operand, WholeCall

aten = torch.ops.aten
_POINTWISE = {
    "add": aten.add.Tensor, "subtract": aten.sub.Tensor, "multiply": aten.mul.Tensor, "divide": aten.div.Tensor, "maximum": aten.maximum.default, "minimum": aten.minimum.default,
    "power": aten.pow.Tensor_Tensor, "remainder": aten.fmod.Tensor, "compare": aten.lt.Tensor, "and": aten.logical_and.default, "or": aten.logical_or.default, "xor": aten.logical_xor.default,
    "atan2": aten.atan2.default, "select": aten.where.self, "negate": aten.neg.default, "clamp": aten.clamp.Tensor,
}  # fmt: skip
_OF_ONE = (
    "abs cbrt ceil cosine erf exponential exponential_minus_one floor is_finite log log_plus_one logistic not round_nearest_afz round_nearest_even rsqrt sign sine sqrt tan tanh"
).split()
_SOURCES = ("constant", "iota", "create_token")

torch.library.define("graphacc::hlo_operation", "(Tensor[] operands, str name) -> Tensor[]")
OPAQUE = torch.ops.graphacc.hlo_operation.default
"""An operation of which nothing is known; its name is only shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operators:
    """A captured module in operators."""

    step: StepGraph
    values: dict[str, int]  # node -> the number of the value that it stands for, of the nodes that stand for one


def operators_of(captured: Captured) -> Operators:
    """The operators of a captured module with its inputs; results are left out, as nothing runs it."""
    return _Writer(captured).written()


class _Writer:
    """Goes through the operations in their order."""

    def __init__(self, captured: Captured):
        self.captured = captured
        self.operations: list[HloOperation] = captured.module.operations
        self.graph = torch.fx.Graph()
        self.nodes: dict[int, torch.fx.Node] = {}  # by number of the value
        self.values: dict[str, int] = {}
        self.forward = _before_results(self.operations, captured)
        self.phase = Phase.FORWARD

    def written(self) -> Operators:
        items = []
        for number, feed in enumerate(self.captured.feeds):
            if not isinstance(feed, Draw):
                item = self.captured.inputs[feed]
                node = self.nodes[number] = self.graph.placeholder(f"input_{number}")
                self._describe(node, torch.empty(item.shape, dtype=item.dtype, device="meta"))
                items.append(dataclasses.replace(item, name=node.name))
        for number, feed in enumerate(self.captured.feeds):
            if isinstance(feed, Draw):
                self.nodes[number] = self._ones(feed.size, torch.float32)
        for place, operation in enumerate(self.operations[:-1]):
            self.phase = Phase.UPDATE if Kind.PARAM in self.captured.results else Phase.FORWARD if place in self.forward else Phase.BACKWARD
            for number, node in zip(operation.results, self._write(operation), strict=True):
                self.nodes[number] = node
                self.values.setdefault(node.name, number)
        self.graph.output(())
        return Operators(step=StepGraph(self.graph, tuple(items), (), {}), values=self.values)

    def _add(self, target: Callable, args: Any, value: Any, kwargs: Any = None) -> torch.fx.Node:
        return self._describe(self.graph.call_function(target, args, kwargs), value)

    def _describe(self, node: torch.fx.Node, value: Any) -> torch.fx.Node:
        node.meta = {"val": value, "phase": self.phase, "module_path": "", "stack_trace": ""}
        return node

    def _call(self, target: Callable, args: tuple, shape: Sequence[int], dtype: torch.dtype) -> torch.fx.Node:
        return self._add(target, args, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def _ones(self, shape: Sequence[int], dtype: torch.dtype) -> torch.fx.Node:
        return self._call(aten.full.default, (list(shape), 1), shape, dtype)

    def _write(self, operation: HloOperation) -> list[torch.fx.Node]:
        operands = [self.nodes[number] for number in operation.operands]
        if operation.name == "custom_call" and operation.told.get("call_target_name") == WHOLE_CALL:
            return [self._whole_call(self.captured.calls[int(str(operation.told["backend_config"]))], operands)]
        if operation.name == "get_tuple_element":
            (source,), index = operands, operation.told["index"]
            return [self._add(operator.getitem, (source, index), source.meta["val"][index])]
        if len(operation.types) != 1 or operation.types[0] is None or operation.types[0][1] not in DTYPES:
            return self._opaque(operation, operands)
        shape, kind = operation.types[0]
        node = self._operator(operation, operands, shape, DTYPES[kind])
        return self._opaque(operation, operands) if node is None else [node]

    def _operator(self, operation: HloOperation, operands: list[torch.fx.Node], shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node | None:
        name, told = operation.name, operation.told
        if name in _SOURCES:
            return self._ones(shape, dtype)
        if name in _POINTWISE:
            read = [_unbroadcast(node, shape) for node in operands]
            scaled = [node for node in read if node.target is not aten.full.default]
            if name == "multiply" and len(scaled) == 1 and tuple(scaled[0].meta["val"].shape) == shape:
                return scaled[0]  # by a constant, such as a bias by 1, which changes no decision
            return self._call(_POINTWISE[name], tuple(read), shape, dtype)
        if name in _OF_ONE:
            return self._call(aten.tanh.default, (operands[0],), shape, dtype)
        if name == "convert":
            return self._call(aten._to_copy.default, (operands[0],), shape, dtype)
        if name == "reshape":
            return self._call(aten.view.default, (operands[0], list(shape)), shape, dtype)
        if name == "transpose":
            return self._call(aten.permute.default, (operands[0], told["permutation"]), shape, dtype)
        if name == "broadcast_in_dim":
            return self._broadcast(operands[0], told["broadcast_dimensions"], shape, dtype)
        if name in ("dot", "dot_general"):
            return self._product(operands[0], operands[1], told, shape, dtype)
        if name == "concatenate":
            return self._call(aten.cat.default, (operands, told["dimension"]), shape, dtype)
        if name == "slice":
            return self._slice(operands[0], told, dtype)
        if name == "pad" and not any(told["interior_padding"]):
            pairs = [size for low_high in zip(reversed(told["edge_padding_low"]), reversed(told["edge_padding_high"])) for size in low_high]
            return self._call(aten.constant_pad_nd.default, (operands[0], pairs, 0), shape, dtype)
        if name == "reduce" and len(operands) == 2 and told["reduces_by"] in (["add", "return"], ["maximum", "return"]):
            reduction = aten.sum.dim_IntList if told["reduces_by"][0] == "add" else aten.amax.default
            return self._call(reduction, (operands[0], told["dimensions"]), shape, dtype) if told["dimensions"] else operands[0]
        if name == "gather":
            return self._lookup(operands, told, shape, dtype)
        return None

    def _broadcast(self, x: torch.fx.Node, dims: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node:
        sizes = [1] * len(shape)
        for size, dim in zip(x.meta["val"].shape, dims):
            sizes[dim] = size
        if tuple(sizes) != tuple(x.meta["val"].shape):
            x = self._call(aten.view.default, (x, sizes), sizes, dtype)
        return x if tuple(sizes) == shape else self._call(aten.expand.default, (x, list(shape)), shape, dtype)

    def _product(self, a: torch.fx.Node, b: torch.fx.Node, told: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node:
        """A product of matrices, or of equally many: dims of a kind are taken together."""
        sides, dims = (a, b), []
        for side, x, summed in zip(("lhs", "rhs"), sides, ([a.meta["val"].dim() - 1], [0])):
            batch, summed = told.get(f"{side}_batching_dimensions") or [], told.get(f"{side}_contracting_dimensions", summed)
            dims.append((batch, [dim for dim in range(x.meta["val"].dim()) if dim not in (*batch, *summed)], summed))
        (batch, rows, summed), (_, columns, _) = dims
        sizes = [[math.prod(x.meta["val"].shape[dim] for dim in part) for part in parts] for x, parts in zip(sides, dims)]
        left = self._arranged(a, [*batch, *rows, *summed], sizes[0] if batch else sizes[0][1:])
        right = self._arranged(b, [*dims[1][0], *dims[1][2], *columns], [sizes[1][0], sizes[1][2], sizes[1][1]] if batch else [sizes[1][2], sizes[1][1]])
        result = ([sizes[0][0]] if batch else []) + [sizes[0][1], sizes[1][1]]
        product = self._call(aten.bmm.default if batch else aten.mm.default, (left, right), result, dtype)
        return product if tuple(result) == shape else self._call(aten.view.default, (product, list(shape)), shape, dtype)

    def _arranged(self, x: torch.fx.Node, dims: list[int], shape: list[int]) -> torch.fx.Node:
        """Dims in another order, and then in another shape."""
        value = x.meta["val"]
        if dims != list(range(value.dim())):
            x = self._call(aten.permute.default, (x, dims), [value.shape[dim] for dim in dims], value.dtype)
        return x if list(x.meta["val"].shape) == shape else self._call(aten.view.default, (x, shape), shape, value.dtype)

    def _slice(self, x: torch.fx.Node, told: dict[str, Any], dtype: torch.dtype) -> torch.fx.Node:
        shape = list(x.meta["val"].shape)
        for dim, (start, stop, step) in enumerate(zip(told["start_indices"], told["limit_indices"], told["strides"])):
            if (start, stop, step) != (0, shape[dim], 1):
                shape[dim] = -(-(stop - start) // step)
                x = self._call(aten.slice.Tensor, (x, dim, start, stop, step), shape, dtype)
        return x

    def _lookup(self, operands: list[torch.fx.Node], told: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node | None:
        """Rows of a table, [N, D] by [M] -> [M, D]; None for other gathers."""
        table, indices = (node.meta["val"] for node in operands)
        rows = told["offset_dims"] == [1] and told["collapsed_slice_dims"] == [0] and told["start_index_map"] == [0] and told["slice_sizes"] == [1, *table.shape[1:]]
        if not rows or table.dim() != 2 or indices.dim() != 1:
            return None
        return self._call(aten.embedding.default, tuple(operands), shape, dtype)

    def _whole_call(self, call: WholeCall, operands: list[torch.fx.Node]) -> torch.fx.Node:
        given = iter(operands)
        args, kwargs = pytree.tree_map_only(Operand, lambda _: next(given), (call.arguments, dict(call.keywords)))
        target: Any = torch.ops
        for part in call.operator.split("."):
            target = getattr(target, part)
        values = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in call.results]
        node = self._add(target, args, values[0] if len(values) == 1 else tuple(values), kwargs)
        node.meta |= {"module_path": call.module_path, "stack_trace": call.stack_trace}
        return node

    def _opaque(self, operation: HloOperation, operands: list[torch.fx.Node]) -> list[torch.fx.Node]:
        values = [torch.empty(kind[0], dtype=DTYPES.get(kind[1], torch.float32), device="meta") if kind is not None else None for kind in operation.types]
        node = self._add(OPAQUE, (operands, operation.name), tuple(values))
        return [self._add(operator.getitem, (node, place), value) for place, value in enumerate(values)]


def _unbroadcast(node: torch.fx.Node, shape: tuple[int, ...]) -> torch.fx.Node:
    """What an operand was made of, where the operator itself broadcasts that to the same: a bias, which then is its own operand."""
    best = node
    while node.target in (aten.expand.default, aten.view.default):
        (before,) = node.all_input_nodes
        if node.target is aten.view.default and _stripped(before.meta["val"].shape) != _stripped(node.meta["val"].shape):
            break
        node = before
        best = node if node.meta["val"].dim() <= len(shape) else best
    return best


def _stripped(shape: Sequence[int]) -> Sequence[int]:
    """A shape without the dims of size 1 in front."""
    return next((shape[dim:] for dim, size in enumerate(shape) if size != 1), ())


def _before_results(operations: Sequence[HloOperation], captured: Captured) -> set[int]:
    """Places of the operations of the forward: those that lead to the loss, to what the loop gets, and to buffers."""
    made = {number: place for place, operation in enumerate(operations) for number in operation.results}
    last = operations[-1].operands
    work = [made[number] for number, kind in zip(last, captured.results, strict=True) if kind in (Kind.LOSS, Kind.USER, Kind.BUFFER) and number in made]
    found: set[int] = set()
    while work:
        place = work.pop()
        if place not in found:
            found.add(place)
            work += [made[number] for number in operations[place].operands if number in made]
    return found
