"""The partitioner: node by node from the unpartitioned graph to the local one.

Every value of the unpartitioned graph has a home placement, and copies in other placements that are made when they are
first needed and kept. A node's rule is asked with the placements of its operands, answers with a `Plan`, and the call
is written with the operands that the plan requires.

Two things depend on the part of the step. A parameter that is split (ZeRO-3) is whole for every forward or backward
use but a cast. What enters the update takes the layout of the optimizer's state for its shape, and a tensor that was
gathered within the update stays whole, so that Muon's iteration gathers once.

Along a model-parallel axis (`ModelParallel`) it is otherwise: a split parameter is used where it lies, and a partial
activation is summed as late as moves and additions allow and then once, so that a block costs what Megatron-LM's does.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, Output, Phase, Shard, StepGraph
from graphacc.passes.partition import routing
from graphacc.passes.partition.choose import choose, exchanges, plan_for_result
from graphacc.passes.partition.constants import is_zero
from graphacc.passes.partition.create import creation_plan
from graphacc.passes.partition.emit import Emitter
from graphacc.passes.partition.placement import REPLICATED, Order, Partial, Placement, Replicated, Split, local_shape, size_bytes
from graphacc.passes.partition.report import ForcedGather, PartitionReport, source_line
from graphacc.passes.partition.rules import Call, Dims, ExpertParallel, Operand, Plan, find_rule, replicate

aten = torch.ops.aten
_CASTS = (
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.graphacc.after.default,
    aten.alias.default,
    aten.detach.default,
)
_MOVES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default)
_DEFERS = (
    *_CASTS,
    *_MOVES,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.squeeze.dims,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.neg.default,
    aten.add.Tensor,
    aten.sub.Tensor,
)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
Layout = Callable[[tuple[int, ...]], Split | None]  # the optimizer's layout for tensors of a shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """What differs along an axis that splits the model instead of the batch.

    Attributes:
        resolve: shape of a partial activation -> the split in which its sum is kept (sequence parallelism); None: replicated.
        gathers_sequences: products gather what `resolve` split, so that such gathers are meant.
    """

    resolve: Callable[[tuple[int, ...]], Split | None]
    gathers_sequences: bool = False


def partition(
    step: StepGraph,
    axis: str,
    num_ranks: int,
    inputs: Mapping[str, Placement],
    outputs: Mapping[tuple[Kind, str], Placement],
    layout: Layout,
    model_parallel: ModelParallel | None = None,
    pins: Mapping[str, Placement] = MappingProxyType({}),
    experts: ExpertParallel | None = None,
) -> tuple[StepGraph, PartitionReport]:
    """Make `step` the program of one rank along mesh axis `axis`.

    Args:
        step: global along `axis`; it may be local along others already. It is not changed.
        inputs: placeholder name -> placement; replicated where it is left out.
        outputs: (kind, target) -> placement; without an entry, a loss or a buffer is replicated, an output that replaces an
            input has its placement, and what the user holds stays as it is.
        layout: the split of the optimizer's state for a shape, None for replicated.
        model_parallel: given for an axis that splits the model instead of the batch.
        pins: node name -> the placement of its result.
        experts: given for an axis that spreads experts besides the batch; split parameters are then used where they lie.

    Raises:
        GraphError: an operator draws random numbers of its own, or a plan and a node do not fit.
    """
    return Partitioner(step, axis, num_ranks, inputs, outputs, layout, model_parallel, pins, experts).run()


class Partitioner:
    """One run of `partition`."""

    def __init__(self, step, axis, num_ranks, inputs, outputs, layout, model_parallel, pins, experts=None):
        self.step, self.axis, self.num_ranks = step, axis, num_ranks
        self.inputs, self.outputs, self.layout = inputs, outputs, layout
        self.model, self.pins, self.experts = model_parallel, pins, experts
        self.build = Emitter(axis, num_ranks)
        self.home: dict[torch.fx.Node, Placement | tuple[Placement, ...]] = {}
        self.copies: dict[tuple[torch.fx.Node, Placement | None], Any] = {}
        self.made: dict[torch.fx.Node, list[Placement]] = {}  # the placements in which a value exists
        self.restores: dict[torch.fx.Node, tuple[Placement | None, ...]] = {}
        self.weights: set[torch.fx.Node] = set()
        self.kept: set[tuple] = set()  # shapes and placements of the inputs
        self.grads = {
            node: outputs[item.kind, item.target]
            for node, item in zip(step.results, step.outputs)
            if item.kind is Kind.GRAD and (item.kind, item.target) in outputs
        }
        self.kinds = {node: item.kind for node, item in zip(step.placeholders, step.inputs)}

    def run(self) -> tuple[StepGraph, PartitionReport]:
        for node, item in zip(self.step.placeholders, self.step.inputs):
            self._place_input(node, item)
        self.kept = {(item.shape, self.home[node]) for node, item in zip(self.step.placeholders, self.step.inputs)}
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self._place_node(node)
        outputs = self._place_outputs()
        inputs = tuple(self._signature(item, self.home[node]) for node, item in zip(self.step.placeholders, self.step.inputs))
        self.build.graph.lint()
        return StepGraph(self.build.graph, inputs, outputs, self.step.constants), self.build.report

    # Inputs and outputs

    def _place_input(self, node: torch.fx.Node, item: Input) -> None:
        placement = self.inputs.get(item.name, REPLICATED)
        shape = local_shape(tuple(node.meta["val"].shape), placement, self.num_ranks)
        self._keep(node, placement, self.build.placeholder(node, shape))
        if item.kind is Kind.PARAM and isinstance(placement, Split) and self.experts is None:
            self.weights.add(node)

    def _place_outputs(self) -> tuple[Output, ...]:
        replaced = {(item.kind, item.target): self.home[node] for node, item in zip(self.step.placeholders, self.step.inputs)}
        results, outputs = [], []
        for node, item in zip(self.step.results, self.step.outputs):
            placement = self._output_placement(node, item, replaced)
            self.build.node = node
            if (
                isinstance(home := self.home[node], Split)
                and placement == REPLICATED
                and home != placement
                and item.kind is Kind.USER
            ):
                self._report_forced(node, "a result of the user's is split in blocks that a layout cannot name")
            results.append(self.value(node, placement))
            outputs.append(self._signature(item, placement))
        self.build.graph.output(tuple(results))
        self.build.graph.output_node().meta["val"] = tuple(node.meta["val"] for node in results)
        return tuple(outputs)

    def _output_placement(self, node: torch.fx.Node, item: Output, replaced: dict) -> Placement:
        key = (item.kind, item.target)
        if key in self.outputs:
            return self.outputs[key]
        if key in replaced:
            return replaced[key]
        home = self.home[node]
        keep = item.kind is Kind.USER and isinstance(home, Split) and home.order is None
        return home if keep else REPLICATED

    def _signature(self, item: Any, placement: Placement) -> Any:
        if not isinstance(placement, Split):
            return item
        shard = Shard(axis=self.axis, size=self.num_ranks, dim=placement.dim, outer=placement.outer)
        return dataclasses.replace(item, shards=(*item.shards, shard))

    # Nodes

    def _place_node(self, node: torch.fx.Node) -> None:
        self.build.node = node
        if node.target is operator.getitem:
            self._place_item(node)
            return
        if self.model is not None and node.meta["phase"] is not Phase.UPDATE:
            self._resolve_operands(node)
        call = self._call(node, self._presented)
        self._write(call, self._plan(call))
        self._settle(node)
        if node.name in self.pins and isinstance(node.meta["val"], torch.Tensor):
            self.value(node, self.pins[node.name])
            self.home[node] = self.pins[node.name]
        kept = _CASTS if self.model is None else (*_CASTS, *_MOVES)
        if node.target in kept and node.args[0] in self.weights:
            self.weights.add(node)

    def _resolve_operands(self, node: torch.fx.Node) -> None:
        """Sum up partial operands, unless the node only moves or adds what is partial."""
        partial = [operand for operand in node.all_input_nodes if self._is_partial(operand)]
        if node.target in _DEFERS and (node.target not in _SUMS or len(partial) == len(node.all_input_nodes) == 2):
            return
        for operand in partial:
            split = self.model.resolve(tuple(operand.meta["val"].shape)) if self.home[operand].op == "sum" else None
            to = REPLICATED if split is None else split
            self.value(operand, to)
            self.home[operand] = to

    def _is_partial(self, operand: torch.fx.Node) -> bool:
        return isinstance(self.home[operand], Partial)

    def _place_item(self, node: torch.fx.Node) -> None:
        source, index = node.args
        if not isinstance(node.meta["val"], torch.Tensor):  # a gradient that was not asked for
            return
        placements, values = self.home[source], self.copies[source, None]
        placement = placements[index] if isinstance(placements, tuple) else placements
        new = values[index] if isinstance(values, list) else self.build.call(operator.getitem, values, index)
        self._keep(node, placement, new)
        restore = self.restores.get(source, ())
        if restore and restore[index] is not None:
            self.value(node, restore[index])
            self.home[node] = restore[index]
        self._settle(node)

    def _settle(self, node: torch.fx.Node) -> None:
        """Bring a gradient to its final placement as soon as it exists, so that the whole one dies at once."""
        if not isinstance(node.meta["val"], torch.Tensor):
            return
        if node in self.grads:
            self.value(node, self.grads[node])
        elif node.meta["phase"] is not Phase.UPDATE and any(user.meta.get("phase") is Phase.UPDATE for user in node.users):
            self.value(node, self._in_update(node, self.home[node]))

    def _call(self, node: torch.fx.Node, placement: Callable[[torch.fx.Node, torch.fx.Node], Placement]) -> Call:
        arguments, operands = {}, []
        for schema, value in _bound(node):
            arguments[schema.name] = value
            for index, item in _tensors(value):
                value_ = item.meta["val"]
                place = placement(item, node)
                held = self._held(item) if self.model is not None else frozenset()
                fixed = self.model is not None and item in self.weights and node.meta["phase"] is not Phase.UPDATE
                operands.append(Operand(item, schema.name, index, tuple(value_.shape), value_.dtype, place, held, fixed))
        results = node.meta["val"]
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        return Call(node, arguments, tuple(operands), results, self.num_ranks, self.experts)

    def _held(self, node: torch.fx.Node) -> frozenset[Placement]:
        return frozenset(self.made.get(node, ()))

    def _presented(self, operand: torch.fx.Node, user: torch.fx.Node) -> Placement:
        """The placement in which `user` sees an operand."""
        home = self.home[operand]
        if user.meta["phase"] is Phase.UPDATE:
            return self._in_update(operand, home)
        if self.model is not None:
            return home
        if operand in self.weights and user.target not in _CASTS:
            return REPLICATED
        return REPLICATED if isinstance(home, Partial) and (operand, REPLICATED) in self.copies else home

    def _in_update(self, operand: torch.fx.Node, home: Placement) -> Placement:
        enters = (
            self.kinds.get(operand) in (Kind.PARAM, Kind.GRAD)
            if operand.op == "placeholder"
            else operand.meta["phase"] is not Phase.UPDATE
        )
        if enters:
            layout = self.layout(tuple(operand.meta["val"].shape))
            if layout is not None:
                return layout
            if self.model is not None and (tuple(operand.meta["val"].shape), home) not in self.kept:
                return REPLICATED
        elif isinstance(home, Split) and (operand, REPLICATED) in self.copies:
            return REPLICATED
        if isinstance(home, Partial) and (enters or (operand, REPLICATED) in self.copies):
            return REPLICATED
        return home

    def _plan(self, call: Call) -> Plan:
        target = call.node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise GraphError(
                f"node {call.node.name!r} calls {target}, which draws from a generator of its own: ranks would draw the same, or "
                f"other numbers than one device does. Capture must turn it into graphacc::random_uniform or graphacc::random_bits"
            )
        found = find_rule(target)
        if found is None or not call.operands:
            return replicate(call, f"{target} has no partition rule")
        plan = found(call)
        if not isinstance(plan, Dims):
            return plan
        counts_sums = self.model is not None and call.phase is Phase.BACKWARD
        pin = self.pins.get(call.node.name)
        pinned = plan_for_result(call, plan, pin) if isinstance(pin, Split) else None
        return choose(call, plan, counts_sums=counts_sums) if pinned is None else pinned

    def _write(self, call: Call, plan: Plan) -> None:
        """Emit the local call and keep its result as the node's home."""
        for operand, required in zip(call.operands, plan.operands):
            meant = self.model is not None and self.model.gathers_sequences and call.node.meta["phase"] is not Phase.UPDATE
            if isinstance(operand.placement, Split) and required not in (None, operand.placement) and not (meant or plan.restore):
                self._report_forced(operand.node, plan.reason or "operands are split along different dims")
        new = self._emit(call, plan)
        if isinstance(call.node.meta["val"], (tuple, list)):
            self.home[call.node] = plan.results
            self.copies[call.node, None] = new
            self.restores[call.node] = plan.restore
        else:
            placement = plan.results[0] if isinstance(plan.results, tuple) else plan.results
            self._keep(call.node, placement, new)

    def _emit(self, call: Call, plan: Plan) -> Any:
        args, kwargs = self._local_arguments(call, plan)
        if plan.emit is not None:
            return plan.emit(self.build, args, kwargs)
        return self.build.call(call.node.target, *args, **kwargs) if plan.sets else self.build.repeat(args, kwargs)

    def _local_arguments(self, call: Call, plan: Plan) -> tuple[tuple, dict]:
        values = iter(
            [
                self.value(operand.node, operand.placement if required is None else required)
                for operand, required in zip(call.operands, plan.operands)
            ]
        )
        node = call.node
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: next(values))
        if plan.sets:
            names = [schema.name for schema in node.target._schema.arguments]
            args = tuple(plan.sets.get(name, value) for name, value in zip(names, args))
            kwargs = {name: plan.sets.get(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _report_forced(self, operand: torch.fx.Node, reason: str) -> None:
        node, value = self.build.node, operand.meta["val"]
        shape = tuple(value.shape)
        self.build.report.forced.append(
            ForcedGather(
                node=node.name,
                operator=str(node.target),
                shape=shape,
                size_bytes=size_bytes(shape, value.dtype),
                reason=reason,
                source=source_line(node.meta.get("stack_trace")),
            )
        )

    # Values in a placement

    def _keep(self, node: torch.fx.Node, placement: Placement, new: torch.fx.Node) -> None:
        expected = local_shape(tuple(node.meta["val"].shape), placement, self.num_ranks)
        got = new.meta["val"]
        if tuple(got.shape) != expected or got.dtype != node.meta["val"].dtype:
            raise GraphError(
                f"partition along {self.axis}: node {node.name!r} ({node.target}) became "
                f"{got.dtype}{list(got.shape)}, but as {placement} "
                f"of {node.meta['val'].dtype}{list(node.meta['val'].shape)} it must be {list(expected)}: its rule is wrong"
            )
        self.home[node] = placement
        self.copies[node, placement] = new
        self.made.setdefault(node, []).append(placement)

    def value(self, node: torch.fx.Node, to: Placement) -> torch.fx.Node:
        """The local node that holds `node` placed as `to`, made on first use."""
        if self._gathers_again(node, to):
            return self._gathered_again(node)
        if (node, to) not in self.copies:
            whole = (node, REPLICATED) in self.copies
            self.copies[node, to] = self._convert(node, REPLICATED if whole else self.home[node], to)
            self.made.setdefault(node, []).append(to)
        return self.copies[node, to]

    def _gathers_again(self, node: torch.fx.Node, to: Placement) -> bool:
        """Backward reads a whole activation of the forward that is kept split (sequence parallelism)."""
        if self.model is None or to != REPLICATED or self.build.node.meta["phase"] is not Phase.BACKWARD:
            return False
        split = isinstance(self.home[node], Split) and node not in self.weights
        return split and node.meta["phase"] is Phase.FORWARD and self.home[node] == self.model.resolve(tuple(node.meta["val"].shape))

    def _gathered_again(self, node: torch.fx.Node) -> torch.fx.Node:
        """Gathered not before the gradient exists that it is used with; XLA would merge a plain second gather with the first."""
        key = (node, None)
        if key not in self.copies:
            build, home = self.build, self.home[node]
            gradients = [operand for operand in build.node.all_input_nodes if operand.meta["phase"] is Phase.BACKWARD]
            local = self.copies[node, home]
            if gradients:
                local = build.call(torch.ops.graphacc.after.default, local, self.copies[gradients[0], self.home[gradients[0]]])
            self.copies[key] = build.all_gather(local, home, tuple(node.meta["val"].shape))
        return self.copies[key]

    def _convert(self, node: torch.fx.Node, source: Placement, to: Placement) -> torch.fx.Node:
        build, new = self.build, self.copies[node, source]
        shape = tuple(node.meta["val"].shape)
        match source, to:
            case Split(order=Order()), _:
                return self._unsorted(node, source, to)
            case Replicated(), Split(order=Order()):
                return self._local_part(node, to) or self._sorted(new, to)
            case _, Split(order=Order()):
                self.value(node, REPLICATED)
                return self._convert(node, REPLICATED, to)
            case Replicated(), Split():
                return self._local_part(node, to) or build.shard(new, to)
            case Replicated(), Partial():
                return new if to.op != "sum" or is_zero(node) else build.on_first_rank(new)
            case Split(), Replicated() if node.target is aten.permute.default and self._shares_gather(node):
                return build.call(aten.permute.default, self.value(node.args[0], REPLICATED), node.args[1])
            case Split(), Replicated():
                return build.all_gather(new, source, shape)
            case Partial(), Replicated():
                return build.all_reduce(new, source.op)
            case Partial("sum"), Split():
                return build.reduce_scatter(new, to)
            case Split(), Split() if exchanges(source, to):
                return build.all_to_all(new, source, to)
            case _:
                self.value(node, REPLICATED)
                return self._convert(node, REPLICATED, to)

    def _unsorted(self, node: torch.fx.Node, source: Split, to: Placement) -> torch.fx.Node:
        """Rows that the ranks have sorted, made whole in the tensor's order, then placed as `to`."""
        build, order, split = self.build, source.order, self.home[source.order.ids]
        if order.kind != "sorted" or not isinstance(split, Split) or not split.plain:
            raise GraphError(
                f"partition along {self.axis}: {node.name!r} ({node.target}), read by {build.node.name!r} ({build.node.target}), lies in "
                f"the order in which ranks of another axis exchanged its rows, which this axis cannot undo: an operator between the routing to "
                f"experts and back does not treat every row by itself"
            )
        rows = build.to_front(self.copies[node, source], source.dim)
        rows = routing.unsort(build, self.experts, order.ids, self.value(order.ids, split), rows)
        whole = build.all_gather(rows, split, (*order.ids.meta["val"].shape, *rows.meta["val"].shape[order.ids.meta["val"].dim() :]))
        whole = build.call(torch.ops.graphacc.sort_rows.default, whole, self.value(order.ids, REPLICATED))
        self.copies[node, REPLICATED] = build.to_front(whole, source.dim)
        return self.copies[node, REPLICATED] if to == REPLICATED else self._convert(node, REPLICATED, to)

    def _sorted(self, whole: torch.fx.Node, to: Split) -> torch.fx.Node:
        """The rank's part of a whole tensor whose dim `to.dim` is to lie as the ranks have sorted other rows."""
        build, ids, split = self.build, to.order.ids, self.home[to.order.ids]
        if to.order.kind != "sorted" or not isinstance(split, Split):
            raise GraphError(f"partition along {self.axis}: {build.node.name!r} ({build.node.target}) mixes exchanged rows with others")
        rows = build.call(torch.ops.graphacc.unsort_rows.default, build.to_front(whole, to.dim), self.value(ids, REPLICATED))
        rows = routing.sort(build, self.experts, ids, self.value(ids, split), build.shard(rows, split))
        return build.to_front(rows, to.dim)

    def _shares_gather(self, node: torch.fx.Node) -> bool:
        """One gather serves a matrix and its transpose: in Muon's iteration, and for an activation's gradient.

        A forward activation that the backward reads transposed is gathered again, so that it lies split in between.
        """
        if self.build.node.meta["phase"] is Phase.UPDATE:
            return True
        return self.model is not None and node.meta["phase"] is node.args[0].meta["phase"]

    def _local_part(self, node: torch.fx.Node, split: Split) -> torch.fx.Node | None:
        """One rank's part of a replicated value made afresh, where that is possible."""
        plan = creation_plan(node, split, lambda inner: self._call(inner, lambda operand, _: self._whole(operand)))
        if plan is None:
            return None
        call = self._call(node, lambda operand, _: self._whole(operand))
        before, self.build.node = self.build.node, node
        try:
            return self._emit(call, plan)
        finally:
            self.build.node = before

    def _whole(self, node: torch.fx.Node) -> Placement:
        return REPLICATED if (node, REPLICATED) in self.copies else self.home[node]


def _bound(node: torch.fx.Node) -> list[tuple[Any, Any]]:
    """The schema's arguments with the node's values, in the order in which fx visits them; defaults last."""
    schema = node.target._schema.arguments
    given = list(zip(schema, node.args)) + [(by_name, node.kwargs[by_name.name]) for by_name in _by_name(schema, node.kwargs)]
    names = {argument.name for argument, _ in given}
    return given + [
        (argument, argument.default_value) for argument in schema if argument.name not in names and argument.has_default_value()
    ]


def _by_name(schema: Any, kwargs: dict) -> list[Any]:
    arguments = {argument.name: argument for argument in schema}
    return [arguments[name] for name in kwargs]


def _tensors(value: Any) -> list[tuple[int | None, torch.fx.Node]]:
    """The nodes in an argument, with their positions if it is a list."""
    if isinstance(value, torch.fx.Node):
        return [(None, value)]
    if isinstance(value, (list, tuple)):
        return [(index, item) for index, item in enumerate(value) if isinstance(item, torch.fx.Node)]
    return []
