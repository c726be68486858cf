"""The decision along one mesh axis: node by node, a placement for every value and the moves that this takes.

Every value of the unpartitioned graph has a home placement, and copies in other placements that are made when they are first needed
and kept. A node's rule is asked with the placements of its operands, answers with a `Plan`, and the call reads the operands in the
placements that the plan requires. No graph is written and no operator is run: the result, an `AxisPlan`, is data, of which
`write.py` makes the program of one rank.

Two things depend on the phase of the step. A parameter that is split (ZeRO-3) is whole for every forward or backward use but a cast.
What enters the update takes the layout of the optimizer's state for its shape, and a tensor that was gathered within the update stays
whole, so that Muon's iteration gathers once.

Along a model-parallel axis (`ModelParallel`) it is otherwise: a split parameter is used as it is placed, and a partial activation is
summed as late as moves and additions allow and then once, so that a block costs what Megatron-LM's does. What a token's experts give is
weighted and added before, and copies of a token that go to them are made behind its gather.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from graphacc.ops.facts import LAYOUT_KINDS, OpKind, draws, facts, of_kind
from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, Output, Phase, StepGraph
from graphacc.passes.edit import constant, description, only_user
from graphacc.passes.partition import routing
from graphacc.passes.partition.choose import choose, exchanges, plan_for_result
from graphacc.passes.partition.constants import is_zero
from graphacc.passes.partition.create import creation_plan
from graphacc.passes.partition.emit import Emitter
from graphacc.passes.partition.placement import REPLICATE, Order, Partial, Placement, Replicate, Shard, local_shape, size_bytes
from graphacc.passes.partition.plan import Action, AxisPlan, Move, Role
from graphacc.passes.partition.rules import READS_NODES, Call, Communicating, Dims, ExpertParallel, Operand, Plan, find_rule, replicate

aten = torch.ops.aten
DTYPE_CASTS = of_kind(OpKind.CAST)
_CASTS = of_kind(OpKind.CAST, OpKind.SAME, OpKind.ORDER)
_MOVES = of_kind(OpKind.PERMUTE, OpKind.RESHAPE)
_DEFERS = _CASTS | of_kind(*LAYOUT_KINDS) | {aten.neg.default, aten.add.Tensor, aten.sub.Tensor}
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_GROUPED = torch.ops.graphacc.grouped_mm.default
_PART = torch.ops.graphacc.shard.default
_CARRIES = of_kind(OpKind.CAST, OpKind.SAME, OpKind.PERMUTE, OpKind.RESHAPE, OpKind.SQUEEZE, OpKind.EXPAND)
"""Operators of one operand, whose elements are all that their result has."""
Presented = Callable[[torch.fx.Node, torch.fx.Node], Placement]  # operand, its user -> the placement in which the user's rule sees it
Layout = Callable[[tuple[int, ...]], Shard | None]  # the optimizer's layout for tensors of a shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """What differs along an axis that splits the model instead of the batch.

    Attributes:
        resolve: shape of a partial activation -> the split in which its sum is kept (sequence parallelism); None: replicated.
        gathers_sequences: products gather what `resolve` split, so that such gathers are meant.
    """

    resolve: Callable[[tuple[int, ...]], Shard | None]
    gathers_sequences: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class Decision:
    """What calls of one form do: the same operator with the same constants, on operands of the same shapes that are placed alike."""

    plan: Plan
    presented: tuple[Placement, ...]  # the operands' as the rule saw them
    placements: tuple[Placement, ...]  # in which the call reads them
    forced: tuple[str, ...]  # per operand: why it is moved, where that is no part of the strategy
    result: Placement  # of the first one


@dataclasses.dataclass(slots=True)
class LocalCall:
    """Writes the call of `node` on one rank, as its plan says."""

    node: torch.fx.Node
    operands: list[torch.fx.Node]
    plan: Plan

    def __call__(self, build: Emitter, *locals_: torch.fx.Node) -> Any:
        node, plan, left = self.node, self.plan, iter(locals_)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: next(left))
        if plan.sets:
            names = [schema.name for schema in node.target._schema.arguments]
            args = tuple(plan.sets.get(name, value) for name, value in zip(names, args))
            kwargs = {name: plan.sets.get(name, value) for name, value in kwargs.items()}
        if plan.emit is not None:
            return plan.emit(build, args, kwargs)
        return build.call(node.target, *args, **kwargs) if plan.sets else build.repeat(args, kwargs, self.operands, locals_)


def assign(
    step: StepGraph,
    axis: str,
    num_ranks: int,
    inputs: Mapping[str, Placement],
    outputs: Mapping[tuple[Kind, str], Placement],
    layout: Layout,
    model_parallel: ModelParallel | None = None,
    pins: Mapping[str, Placement] = MappingProxyType({}),
    experts: ExpertParallel | None = None,
    reduce_narrow: bool = False,
    adds_once: bool = False,
    sums_late: bool = False,
) -> AxisPlan:
    """Decide how `step` is carried out by the ranks of mesh axis `axis`.

    Args:
        step: global along `axis`; it may be local along others already. It is not changed.
        inputs: placeholder name -> placement; replicated where it is left out.
        outputs: (kind, target) -> placement; without an entry, a loss or a buffer is replicated, an output that replaces an
            input has its placement, and what the user holds stays as it is.
        layout: the split of the optimizer's state for a shape, None for replicated.
        model_parallel: given for an axis that splits the model instead of the batch.
        pins: node name -> the placement of its result.
        experts: given for an axis that spreads experts besides the batch; their weights are used as they are placed.
        adds_once: what is added to a partial sum and is replicated is added by the first rank: where no sum may be needed before the end.
        reduce_narrow: a gradient that is computed in 16 bits is summed over the ranks as such, and not as the 32 bits that it is cast to.
        sums_late: gradients among the inputs, and those that replace them, are every rank's own sum over several runs, with a dim of 1 in front.

    Raises:
        GraphError: an operator draws random numbers of its own.
    """
    return Assigner(step, axis, num_ranks, inputs, outputs, layout, model_parallel, pins, experts, reduce_narrow, adds_once, sums_late).run()


class Assigner:
    """One run of `assign`. Values of the program of one rank are named by the number of the `Action` that makes them."""

    def __init__(self, step, axis, num_ranks, inputs, outputs, layout, model_parallel, pins, experts=None, reduce_narrow=False, adds_once=False, sums_late=False):
        self.step, self.axis, self.num_ranks = step, axis, num_ranks
        self.inputs, self.outputs, self.layout = inputs, outputs, layout
        self.model, self.pins, self.experts, self.reduce_narrow, self.adds_once = model_parallel, pins, experts, reduce_narrow, adds_once
        self.late = {(item.kind, item.target) for item in step.inputs if sums_late and item.kind is Kind.GRAD}
        self.node: torch.fx.Node = None  # the one in work: what moves are made for
        self.home: dict[torch.fx.Node, Placement | tuple[Placement, ...]] = {}
        self.copies: dict[tuple[torch.fx.Node, Placement | None], int] = {}
        self.made: dict[torch.fx.Node, list[Placement]] = {}  # the placements in which a value exists; noted along model-parallel axes
        self.restores: dict[torch.fx.Node, tuple[Placement | None, ...]] = {}
        self.weights: set[torch.fx.Node] = set()
        self.rows: dict[torch.fx.Node, torch.dtype] = {}  # partial rows of experts, several of a token, and their partial sums over these -> dtype of the product
        self.kept: set[tuple] = set()  # shapes and placements of the inputs
        self.grads = {
            node: outputs[item.kind, item.target]
            for node, item in zip(step.results, step.outputs)
            if item.kind is Kind.GRAD and (item.kind, item.target) in outputs
        }
        self.terms = {node for node, item in zip(step.results, step.outputs) if item.num_terms}  # gradients that add up on every rank of an axis before this one
        self.kinds = {node: item.kind for node, item in zip(step.placeholders, step.inputs)}
        self.actions: list[Action] = []
        self.moves: list[Move] = []
        self.exchanged: set[torch.fx.Node] = set()  # ids of experts that ranks have told each other
        self.known: dict[tuple, Decision] = {}  # the layers of a model repeat
        self._inside: dict[tuple, list[tuple[str, int, Role | None]]] = {}  # the moves of operators that communicate by themselves

    def run(self) -> AxisPlan:
        step = self.step
        for node, item in zip(step.placeholders, step.inputs):
            self._place_input(node, item)
        self.kept = {(item.shape, self.home[node]) for node, item in zip(step.placeholders, step.inputs)}
        for node, item in zip(step.placeholders, step.inputs):
            if (item.kind, item.target) in self.late:
                self.node = node
                self._settle(node)
        for node in step.graph.nodes:
            if node.op == "call_function":
                self._place_node(node)
        outputs, results = self._place_outputs()
        return AxisPlan(
            axis=self.axis,
            num_ranks=self.num_ranks,
            placements={node.name: placement for node, placement in self.home.items()},
            moves=tuple(self.moves),
            sums_late=bool(self.late),
            inputs=tuple(self.home[node] for node in step.placeholders),
            outputs=outputs,
            actions=tuple(self.actions),
            results=results,
            homes={node.name: self.copies[node, home] for node, home in self.home.items() if (node, home) in self.copies},
        )

    # Inputs and outputs

    def _place_input(self, node: torch.fx.Node, item: Input) -> None:
        placement = self.inputs.get(item.name, REPLICATE)
        shape = local_shape(tuple(node.meta["val"].shape), placement, self.num_ranks)
        self.node = node
        if (item.kind, item.target) in self.late:
            own = self._act((), lambda build: build.placeholder(node, (1, *shape)))
            self._keep(node, placement, self._act((own,), lambda build, x: build.call(aten.squeeze.dim, x, 0), placement))
        else:
            self._keep(node, placement, self._act((), lambda build: build.placeholder(node, shape), placement))
        if item.kind is Kind.PARAM and isinstance(placement, Shard) and not (self.experts is not None and item.target in self.experts.weights):
            self.weights.add(node)

    def _place_outputs(self) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
        replaced = {(item.kind, item.target): self.home[node] for node, item in zip(self.step.placeholders, self.step.inputs)}
        outputs, results = [], []
        for node, item in zip(self.step.results, self.step.outputs):
            placement = self._output_placement(node, item, replaced)
            self.node, home = node, self.home[node]
            forced = ""
            if item.kind is Kind.USER and isinstance(home, Shard) and placement == REPLICATE:
                forced = "a result of the user's is split in blocks that a layout cannot name"
            result = self.value(node, placement, forced)
            if (item.kind, item.target) in self.late:
                result = self._act((result,), lambda build, x: build.call(aten.unsqueeze.default, x, 0))
            results.append(result)
            outputs.append(placement)
        return tuple(outputs), tuple(results)

    def _output_placement(self, node: torch.fx.Node, item: Output, replaced: dict) -> Placement:
        key = (item.kind, item.target)
        if key in self.outputs:
            return self.outputs[key]
        if key in replaced:
            return replaced[key]
        home = self.home[node]
        keep = item.kind is Kind.USER and isinstance(home, Shard) and home.order is None
        return home if keep else REPLICATE

    # Nodes

    def _place_node(self, node: torch.fx.Node) -> None:
        self.node = node
        if node.target is operator.getitem:
            self._place_item(node)
            return
        if self.model is not None and node.meta["phase"] is not Phase.UPDATE:
            self._resolve_operands(node)
        self._apply(node, *self._decide(node, self._presented))
        self._settle(node)
        self._note_rows_of_experts(node)
        if node.name in self.pins and isinstance(node.meta["val"], torch.Tensor):
            self.value(node, self.pins[node.name])
            self.home[node] = self.pins[node.name]
        kept = _CASTS if self.model is None else _CASTS | _MOVES
        if node.target in kept and node.args[0] in self.weights and not (self.model is None and self.home[node] == REPLICATE):
            self.weights.add(node)

    def _resolve_operands(self, node: torch.fx.Node) -> None:
        """Sum up partial operands, unless the node only moves or adds what is partial."""
        partial = [operand for operand in node.all_input_nodes if self._is_partial(operand)]
        if len(partial) == 1 and partial[0] in self.rows and facts(node.target).linear:
            return
        if node.target in _DEFERS and (node.target not in _SUMS or len(partial) == len(node.all_input_nodes) == 2):
            return
        for operand in partial:
            split = self.model.resolve(tuple(operand.meta["val"].shape)) if self.home[operand].op == "sum" else None
            to = REPLICATE if split is None else split
            self.value(operand, to)
            self.home[operand] = to

    def _note_rows_of_experts(self, node: torch.fx.Node) -> None:
        if self.model is None or not self._is_partial(node):
            return
        dtypes = [node.meta["val"].dtype] if node.target is _GROUPED else [self.rows[operand] for operand in node.all_input_nodes if operand in self.rows]
        if dtypes:
            self.rows[node] = dtypes[0]

    def _is_partial(self, operand: torch.fx.Node) -> bool:
        return isinstance(self.home[operand], Partial)

    def _place_item(self, node: torch.fx.Node) -> None:
        source, index = node.args
        if not isinstance(node.meta["val"], torch.Tensor):  # a gradient that was not asked for
            return
        placements = self.home[source]
        placement = placements[index] if isinstance(placements, tuple) else placements
        self._keep(node, placement, self._act((self.copies[source, None],), lambda build, value: build.item(value, index), placement))
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
        elif node.meta["phase"] is not Phase.UPDATE and enters_update(node):
            self.value(node, self._in_update(node, self.home[node]))
        elif self.model is None and self.home[node] == Partial("sum") and (gradient := self._gradient_of(node)) is not None:
            self._settle_before_user(node, gradient)

    def _gradient_of(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The gradient that a value of backward is, but for casts and for the sum of earlier microbatches; None if it is none."""
        while node.meta["phase"] is Phase.BACKWARD:
            if node in self.grads or enters_update(node):
                return node
            user = only_user(node)
            if user is None or not (user.target in DTYPE_CASTS or self._accumulates(user) or user in self.terms):
                return None
            node = user
        return None

    def _adds_up_late(self, node: torch.fx.Node) -> bool:
        """Whether a value is nothing but a gradient that adds up on every rank."""
        gradient = self._gradient_of(node) if self.late else None
        return gradient is not None and isinstance(self.grads.get(gradient), Partial)

    def _accumulates(self, node: torch.fx.Node) -> bool:
        """Whether a node adds a gradient to the sum of those before it."""
        given = [operand.args[0] if operand.target is aten.squeeze.dim else operand for operand in node.all_input_nodes]
        return (node in self.grads or only_user(node) in self.terms) and any(self.kinds.get(operand) is Kind.GRAD for operand in given)

    def _settle_before_user(self, node: torch.fx.Node, gradient: torch.fx.Node) -> None:
        """Sum up a gradient in front of its accumulation, and of a cast if that rounds the sum, or where messages of its dtype are asked for."""
        (user,) = node.users
        if _widens(node, user) and not self.reduce_narrow:
            return
        placement = self.grads.get(gradient) or self.layout(tuple(gradient.meta["val"].shape)) or REPLICATE
        self.value(node, placement)
        self.home[node] = placement

    def _call(self, node: torch.fx.Node, presented: Presented) -> Call:
        arguments, operands = {}, []
        fixed = self.model is not None and node.meta["phase"] is not Phase.UPDATE
        for name, value in _bound(node):
            arguments[name] = value
            for index, item in _tensors(value):
                value_ = item.meta["val"]
                held = self._held(item) if self.model is not None else frozenset()
                place = presented(item, node)
                operands.append(Operand(item, name, index, tuple(value_.shape), value_.dtype, place, held, fixed and item in self.weights))
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
        if operand in self.weights and (user.target not in _CASTS or _widens(operand, user)):
            return REPLICATE
        return REPLICATE if isinstance(home, Partial) and (operand, REPLICATE) in self.copies else home

    def _in_update(self, operand: torch.fx.Node, home: Placement) -> Placement:
        if self._enters_as(operand):
            layout = self.layout(tuple(operand.meta["val"].shape))
            if layout is not None:
                return layout
            if self.model is not None and (tuple(operand.meta["val"].shape), home) not in self.kept:
                return REPLICATE
        elif isinstance(home, Shard) and (operand, REPLICATE) in self.copies:
            return REPLICATE
        if isinstance(home, Partial) and (self._enters_as(operand) or (operand, REPLICATE) in self.copies):
            return REPLICATE
        return home

    def _enters_as(self, operand: torch.fx.Node) -> bool:
        """Whether the optimizer is given a value as it is, or a rank's part of it along other axes."""
        while operand.target is _PART and operand.meta["phase"] is Phase.UPDATE:
            (operand,) = operand.all_input_nodes
            operand = operand.all_input_nodes[0] if operand.target is aten.constant_pad_nd.default else operand
        return self.kinds.get(operand) in (Kind.PARAM, Kind.GRAD) if operand.op == "placeholder" else operand.meta["phase"] is not Phase.UPDATE

    def _decide(self, node: torch.fx.Node, presented: Presented) -> tuple[list[torch.fx.Node], "Decision"]:
        """The operands of a call, and what it does with them; calls of one form are decided once."""
        operands, form = self._form(node, presented)
        decision = None if form is None else self.known.get(form)
        if decision is None:
            call = self._call(node, presented)
            decision = self._decided(call, self._plan(call))
            if form is not None:
                self.known[form] = decision
        return operands, decision

    def _form(self, node: torch.fx.Node, presented: Presented) -> tuple[list[torch.fx.Node], tuple | None]:
        """The operands of a call, and what its rule depends on and no more; None for that if it may look at how operands are made."""
        operands: list[torch.fx.Node] = []
        places: list[Placement] = []
        key: list[Any] = [node.target, node.meta["phase"], len(node.args)]
        for value in (*node.args, *node.kwargs.items()):
            key.append(value if type(value) is int else self._key(value, node, presented, operands, places))
        hidden = node.target in READS_NODES or node.name in self.pins
        for placement in places:
            hidden = hidden or type(placement) is Partial
        return operands, None if hidden else tuple(key)

    def _key(self, value: Any, user: torch.fx.Node, presented: Presented, operands: list, places: list) -> Any:
        """A key of an argument; the operands in it and how they are placed are noted, too."""
        kind = type(value)
        if kind is not torch.fx.Node:
            if isinstance(value, (tuple, list)):
                return tuple([item if type(item) is int else self._key(item, user, presented, operands, places) for item in value])
            return constant(value)
        placement = presented(value, user)
        operands.append(value)
        places.append(placement)
        seen = description(value.meta["val"]), placement
        return seen if self.model is None else (*seen, self._held(value), user.meta["phase"] is not Phase.UPDATE and value in self.weights)

    def _plan(self, call: Call) -> Plan:
        """The plan of a call, by the operator's rule."""
        target = call.node.target
        if draws(target):
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
        rows = next((operand for operand in call.operands if operand.node in self.rows and isinstance(operand.placement, Partial)), None)
        if rows is not None and target in DTYPE_CASTS and call.node.meta["val"].dtype == self.rows[rows.node]:
            return Plan((rows.placement,), rows.placement)  # no narrower than the products, whose sums would be as narrow
        if self._adds_up_late(call.node) and (self._accumulates(call.node) or (target in DTYPE_CASTS and call.operands[0].placement == Partial("sum"))):
            own = Partial("sum")  # every rank rounds its own gradient, as one does that computes alone; what all have computed, the first one adds
            return Plan((own,) * len(call.operands), own)
        counts_sums = self.model is not None and call.phase is Phase.BACKWARD and rows is None
        pin = self.pins.get(call.node.name)
        pinned = plan_for_result(call, plan, pin) if isinstance(pin, Shard) else None
        return choose(call, plan, counts_sums=counts_sums, adds_once=self.adds_once) if pinned is None else pinned

    def _decided(self, call: Call, plan: Plan) -> "Decision":
        meant = plan.restore or (self.model is not None and self.model.gathers_sequences and call.phase is not Phase.UPDATE)
        presented = tuple([operand.placement for operand in call.operands])
        moves = [isinstance(before, Shard) and to not in (None, before) and not meant for before, to in zip(presented, plan.operands)]
        return Decision(
            plan=plan,
            presented=presented,
            placements=tuple([before if to is None else to for before, to in zip(presented, plan.operands)]),
            forced=tuple([(plan.reason or "operands are split along different dims") if forced else "" for forced in moves]),
            result=plan.results[0] if isinstance(plan.results, tuple) else plan.results,
        )

    def _apply(self, node: torch.fx.Node, operands: list[torch.fx.Node], decision: "Decision") -> None:
        """Move the operands as the plan requires, and keep the result as the node's home."""
        action = self._carry_out(node, operands, decision)
        if isinstance(node.meta["val"], (tuple, list)):
            self.home[node] = decision.plan.results
            self.copies[node, None] = action
            self.restores[node] = decision.plan.restore
        else:
            self._keep(node, decision.result, action)

    def _carry_out(self, node: torch.fx.Node, operands: list[torch.fx.Node], decision: "Decision") -> int:
        """The action of one call, behind those that move its operands."""
        plan = decision.plan
        values = [self.value(operand, to, forced) for operand, to, forced in zip(operands, decision.placements, decision.forced)]
        expected = None if isinstance(node.meta["val"], (tuple, list)) else decision.result
        write = LocalCall(node, operands, plan)
        if isinstance(plan.emit, Communicating):
            shapes = [(operand.meta["val"], placement) for operand, placement in zip(operands, decision.placements)]
            given = tuple((*local_shape(tuple(value.shape), placement, self.num_ranks), value.dtype) for value, placement in shapes)
            key = node.target, constants(node.args), constants(tuple(node.kwargs.items())), plan.operands, given, plan.emit.ids
            self._move_inside(given, write, key, plan.emit.ids, node)
        return self._act(values, write, expected, node)

    def _keep(self, node: torch.fx.Node, placement: Placement, action: int) -> None:
        self.home[node] = placement
        self.copies[node, placement] = action
        if self.model is not None:
            self.made.setdefault(node, []).append(placement)

    # Actions and moves

    def _act(self, inputs: Any, write: Callable[..., Any], expected: Placement | None = None, node: torch.fx.Node | None = None) -> int:
        self.actions.append(Action(node or self.node, tuple(inputs), write, expected))
        return len(self.actions) - 1

    def _move(
        self, node: torch.fx.Node, collective: str, source: Placement | None, target: Placement | None, size: int, forced: str = "", role: Role | None = None
    ) -> None:
        move = Move(
            value=node.name,
            axis=self.axis,
            collective=collective,
            source=source,
            target=target,
            size_bytes=size,
            role=role or self._role(node),
            phase=self.node.meta["phase"],
            layer=self.node.meta.get("module_path") or node.meta.get("module_path", ""),
            reader=self.node.name,
            forced=forced,
        )
        self.moves.append(move)

    def _role(self, node: torch.fx.Node) -> Role:
        kind = self.kinds.get(node)
        if node in self.weights or kind is Kind.PARAM:
            return Role.WEIGHT
        if node in self.grads or kind is Kind.GRAD or (kind is None and self._gradient_of(node) is not None):
            return Role.GRADIENT
        return Role.STATE if kind is Kind.STATE or node.meta["phase"] is Phase.UPDATE else Role.ACTIVATION

    def _move_inside(self, given: tuple, write: Callable[..., Any], key: tuple, ids: torch.fx.Node | None, node: torch.fx.Node, forced: str = "") -> None:
        """Note the moves of what communicates by itself: it is written into a graph of its own, once for operands of one form.

        Args:
            given: (*local shape, dtype) of every operand.
            ids: of experts, if rows travel to these; ranks tell each other the ids once.
        """
        if key not in self._inside:
            scratch = Emitter(self.axis, self.num_ranks)
            scratch.node = node
            write(scratch, *(scratch.operand(tuple(shape), dtype) for *shape, dtype in given))
            self._inside[key] = [(item.kind, item.size_bytes, item.role) for item in scratch.collectives]
        found = self._inside[key]
        if ids is not None and routing.spreads(self.experts, ids, self.num_ranks):
            found = found[ids in self.exchanged :]
            self.exchanged.add(ids)
        for kind, size, role in found:
            self._move(node, kind, None, None, size, forced, role if ids is None else Role.TOKENS)

    # Values in a placement

    def value(self, node: torch.fx.Node, to: Placement, forced: str = "") -> int:
        """The action that gives `node` placed as `to`; moved on first use."""
        if self._gathers_again(node, to):
            return self._gathered_again(node)
        if (node, to) not in self.copies:
            whole = (node, REPLICATE) in self.copies
            self.copies[node, to] = self._convert(node, REPLICATE if whole else self.home[node], to, forced)
            if self.model is not None:
                self.made.setdefault(node, []).append(to)
        return self.copies[node, to]

    def _gathers_again(self, node: torch.fx.Node, to: Placement) -> bool:
        """Backward reads a whole activation of the forward that is kept split (sequence parallelism)."""
        if self.model is None or to != REPLICATE or self.node.meta["phase"] is not Phase.BACKWARD:
            return False
        split = isinstance(self.home[node], Shard) and node not in self.weights
        return split and node.meta["phase"] is Phase.FORWARD and self.home[node] == self.model.resolve(tuple(node.meta["val"].shape))

    def _gathered_again(self, node: torch.fx.Node) -> int:
        """Gathered not before the gradient exists that it is used with; XLA would merge a plain second gather with the first."""
        key = (node, None)
        if key not in self.copies:
            home = self.home[node]
            gradients = [operand for operand in self.node.all_input_nodes if operand.meta["phase"] is Phase.BACKWARD]
            local = self.copies[node, home]
            if gradients:
                anchor = self.copies[gradients[0], self.home[gradients[0]]]
                local = self._act((local, anchor), lambda build, x, y: build.call(torch.ops.graphacc.after.default, x, y))
            self.copies[key] = self._all_gather(node, local, home, "")
        return self.copies[key]

    def _all_gather(self, node: torch.fx.Node, local: int, split: Shard, forced: str) -> int:
        shape = tuple(node.meta["val"].shape)
        self._move(node, "all_gather", split, REPLICATE, _padded_bytes(node, split), forced)
        return self._act((local,), lambda build, x: build.all_gather(x, split, shape))

    def _convert(self, node: torch.fx.Node, source: Placement, to: Placement, forced: str = "") -> int:
        new, size = self.copies[node, source], _padded_bytes(node, REPLICATE)
        match source, to:
            case Shard(order=Order()), _:
                return self._unsorted(node, source, to, forced)
            case Replicate(), Shard(order=Order()):
                made = self._local_part(node, to)
                return self._sorted(node, new, to) if made is None else made
            case _, Shard(order=Order()):
                self.value(node, REPLICATE, forced)
                return self._convert(node, REPLICATE, to)
            case Replicate(), Shard():
                made = self._local_part(node, to)
                if made is not None:
                    return made
                self._move(node, "shard", source, to, _padded_bytes(node, to))
                return self._act((new,), lambda build, x: build.shard(x, to))
            case Replicate(), Partial():
                return new if to.op != "sum" or is_zero(node) else self._act((new,), lambda build, x: build.on_first_rank(x))
            case Shard(), Replicate() if node.target is aten.permute.default and self._shares_gather(node):
                whole = self.value(node.args[0], REPLICATE, forced)
                return self._act((whole,), lambda build, x: build.call(aten.permute.default, x, node.args[1]))
            case Shard(), Replicate() if (smaller := self._smaller_source(node)) is not None:
                return self._repeated(node, smaller, forced)
            case Shard(), Replicate():
                return self._all_gather(node, new, source, forced)
            case Partial(), Replicate():
                self._move(node, "all_reduce", source, to, size, forced)
                return self._act((new,), lambda build, x: build.all_reduce(x, source.op))
            case Partial("sum"), Shard():
                self._move(node, "reduce_scatter", source, to, _padded_bytes(node, to), forced)
                return self._act((new,), lambda build, x: build.reduce_scatter(x, to))
            case Shard(), Shard() if exchanges(source, to):
                self._move(node, "all_to_all", source, to, size // self.num_ranks, forced)
                return self._act((new,), lambda build, x: build.all_to_all(x, source, to))
            case _:
                self.value(node, REPLICATE, forced)
                return self._convert(node, REPLICATE, to)

    def _smaller_source(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """A value of fewer bytes, with a split that is gathered, that expanding and casting have made `node` of: the copies of a token that go to its experts."""
        found, size = None, _padded_bytes(node, REPLICATE)
        while node.op == "call_function" and node.target in _CARRIES and node not in self.weights:
            node = node.all_input_nodes[0]
            home = self.home[node]
            if not (isinstance(home, Shard) and home.order is None) or node in self.weights or node.op != "call_function":
                break
            if _padded_bytes(node, REPLICATE) < size:
                found = node
        return found

    def _repeated(self, node: torch.fx.Node, source: torch.fx.Node, forced: str) -> int:
        """`node` whole, made again of the whole `source`."""
        way = []
        while node is not source:
            way.append(node)
            node = node.all_input_nodes[0]
        whole = self.value(source, REPLICATE, forced)
        for step in reversed(way):
            whole = self._act((whole,), lambda build, x, step=step: build.call(step.target, x, *step.args[1:], **step.kwargs))
        return whole

    def _unsorted(self, node: torch.fx.Node, source: Shard, to: Placement, forced: str) -> int:
        """Rows that the ranks have sorted, made whole in the tensor's order, then placed as `to`."""
        order, split = source.order, self.home[source.order.ids]
        if order.kind != "sorted" or not isinstance(split, Shard) or not split.plain:
            raise GraphError(
                f"partition along {self.axis}: {node.name!r} ({node.target}), read by {self.node.name!r} ({self.node.target}), is sorted in "
                f"the order in which ranks of another axis exchanged its rows, which this axis cannot undo: an operator between the routing to "
                f"experts and back does not treat every row by itself"
            )
        ids, dims = order.ids, order.ids.meta["val"].dim()

        def unsort(build: Emitter, rows: torch.fx.Node, local: torch.fx.Node, whole_ids: torch.fx.Node) -> torch.fx.Node:
            rows = routing.unsort(build, self.experts, ids, local, build.to_front(rows, source.dim))
            whole = build.all_gather(rows, split, (*ids.meta["val"].shape, *rows.meta["val"].shape[dims:]))
            return build.to_front(build.call(torch.ops.graphacc.sort_rows.default, whole, whole_ids), source.dim)

        inputs = self.copies[node, source], self.value(ids, split), self.value(ids, REPLICATE)
        places = (node, source), (ids, split), (ids, REPLICATE)
        self._note_rows(places, unsort, "unsorted", ids, node, forced)
        self.copies[node, REPLICATE] = self._act(inputs, unsort)
        return self.copies[node, REPLICATE] if to == REPLICATE else self._convert(node, REPLICATE, to)

    def _sorted(self, node: torch.fx.Node, whole: int, to: Shard) -> int:
        """The rank's part of a whole tensor whose dim `to.dim` is to be ordered as the ranks have sorted other rows."""
        ids, split = to.order.ids, self.home[to.order.ids]
        if to.order.kind != "sorted" or not isinstance(split, Shard):
            raise GraphError(f"partition along {self.axis}: {self.node.name!r} ({self.node.target}) mixes exchanged rows with others")

        def sort(build: Emitter, rows: torch.fx.Node, whole_ids: torch.fx.Node, local: torch.fx.Node) -> torch.fx.Node:
            rows = build.call(torch.ops.graphacc.unsort_rows.default, build.to_front(rows, to.dim), whole_ids)
            return build.to_front(routing.sort(build, self.experts, ids, local, build.shard(rows, split)), to.dim)

        inputs = whole, self.value(ids, REPLICATE), self.value(ids, split)
        places = (node, REPLICATE), (ids, REPLICATE), (ids, split)
        self._note_rows(places, sort, "sorted", ids, node, "")
        return self._act(inputs, sort)

    def _note_rows(self, places: tuple, write: Callable[..., Any], name: str, ids: torch.fx.Node, node: torch.fx.Node, forced: str) -> None:
        """Note the moves that bring rows from one order to another."""
        values = [of.meta["val"] for of, _ in places]
        given = tuple((*local_shape(tuple(x.shape), placement, self.num_ranks), x.dtype) for x, (_, placement) in zip(values, places))
        self._move_inside(given, write, (name, node.target, places[0][1], given, ids), ids, node, forced)

    def _shares_gather(self, node: torch.fx.Node) -> bool:
        """One gather serves a matrix and its transpose: in Muon's iteration, and for an activation's gradient.

        A forward activation that the backward reads transposed is gathered again, so that it is split in between.
        """
        if self.node.meta["phase"] is Phase.UPDATE:
            return True
        return self.model is not None and node.meta["phase"] is node.args[0].meta["phase"]

    def _local_part(self, node: torch.fx.Node, split: Shard) -> int | None:
        """One rank's part of a replicated value made afresh, where that is possible."""
        plan = creation_plan(node, split, lambda inner: self._call(inner, lambda operand, _: self._whole(operand)))
        if plan is None:
            return None
        call = self._call(node, lambda operand, _: self._whole(operand))
        before, self.node = self.node, node
        try:
            return self._carry_out(node, [operand.node for operand in call.operands], self._decided(call, plan))
        finally:
            self.node = before

    def _whole(self, node: torch.fx.Node) -> Placement:
        return REPLICATE if (node, REPLICATE) in self.copies else self.home[node]


def enters_update(node: torch.fx.Node) -> bool:
    """Whether the optimizer reads a value."""
    return any(user.meta.get("phase") is Phase.UPDATE for user in node.users)


def _widens(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether a cast makes elements of a value larger; what moves, moves before that."""
    return user.meta["val"].dtype.itemsize > node.meta["val"].dtype.itemsize


def _padded_bytes(node: torch.fx.Node, placement: Placement) -> int:
    """Bytes of the whole tensor, with the padding of its split dim."""
    value = node.meta["val"]
    shape = list(value.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] += placement.padding
    return size_bytes(tuple(shape), value.dtype)


_MISSING = object()


@functools.cache
def _arguments(target: torch._ops.OpOverload) -> tuple[tuple[str, Any], ...]:
    """Names of an operator's arguments, and their defaults."""
    return tuple((item.name, item.default_value if item.has_default_value() else _MISSING) for item in target._schema.arguments)


def _bound(node: torch.fx.Node) -> list[tuple[str, Any]]:
    """The schema's arguments with the node's values, in the order in which fx visits them; defaults last."""
    arguments = _arguments(node.target)
    given = [(name, value) for (name, _), value in zip(arguments, node.args)]
    given += node.kwargs.items()
    names = {name for name, _ in given}
    return given + [(name, default) for name, default in arguments if default is not _MISSING and name not in names]


def constants(value: Any) -> Any:
    """A key of the arguments that are no tensors."""
    if isinstance(value, (tuple, list)):
        return tuple([constants(item) for item in value])
    return "node" if type(value) is torch.fx.Node else constant(value)


def _tensors(value: Any) -> list[tuple[int | None, torch.fx.Node]]:
    """The nodes in an argument, with their positions if it is a list."""
    if isinstance(value, torch.fx.Node):
        return [(None, value)]
    if isinstance(value, (list, tuple)):
        return [(index, item) for index, item in enumerate(value) if isinstance(item, torch.fx.Node)]
    return []
