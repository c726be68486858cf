"""Tensor parallelism: which parameters are split along `tp`, and the placements that the partition starts from.

The policy reads the graph, not the names of modules. A forward run on placements alone gives every weight of a product
its role: *column* (its outputs are split) where the input is whole, *row* (its inputs are split, the result is a partial sum)
where the input arrives split. So query, key, value and the way up in an MLP become columns, and the projections after
them rows, each pair at the cost of one sum forward and one backward (Shoeybi et al., "Megatron-LM", 2019, section 3).
Matrices of experts are columns and rows alike, all of them; every rank has all tokens that go to them then.
A table that is looked up with indices of the batch is split by rows, and with it the head that is tied to it; the
cross-entropy then works on split logits. A column whose outputs would have to be gathered, or that no row follows, stays
whole, and so does what the policy does not know; that is always right, and `TensorParallel.reasons` says why.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx

from graphacc.strategy.axes import TP
from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.errors import StrategyError
from graphacc.graph import Input, Kind, Phase, StepGraph
from graphacc.passes.experts import ATTACH_EXPERTS, find_experts
from graphacc.passes.partition.assign import Assigner, Decision, ModelParallel
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Shard, divides
from graphacc.passes.partition.report import source_line
from graphacc.passes.partition.rules import Call
from graphacc.passes.runner import Log

aten = torch.ops.aten
_GROUPED = torch.ops.graphacc.grouped_mm.default
_PRODUCTS = (aten.mm.default, aten.addmm.default, _GROUPED)
_VIEWS = of_kind(OpKind.RESHAPE)
_CHAIN = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.PERMUTE) | {torch.ops.graphacc.mark_sharding.default}
_MAX_TRIALS = 12
_HEAD_RATIO = 2  # a column that no row follows is split if it has this many times more outputs than inputs (a vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The splits of parameters along `tp`."""

    splits: dict[str, Shard]  # parameter -> split; the others are whole
    reasons: dict[str, str]  # parameter -> its role, or why it is whole


def find_tensor_parallel(step: StepGraph, num_ranks: int, pinned: Mapping[str, Placement]) -> TensorParallel:
    """Roles for the parameters of a graph with a forward part.

    Args:
        step: global along `tp`.
        pinned: parameter -> the placement that the user asked for.

    Raises:
        StrategyError: a number of attention heads (or another dim that a split one is viewed as) that `num_ranks` does not divide.
    """
    if find_experts(step):
        step = ATTACH_EXPERTS.run(step.copy(), Log())  # their products, and how rows come to them, in a form that the rules know
    refused: dict[str, str] = {}
    outers: dict[str, int] = {}
    known: dict[tuple, Decision] = {}  # one for all trials
    pinned = {**_marked_parameters(step, num_ranks, pinned), **pinned}
    check_heads(step, num_ranks)
    for _ in range(_MAX_TRIALS):
        trial = _Trial(step, num_ranks, pinned, refused, outers, known)
        trial.run()
        if trial.new_outers:  # what else failed may have failed because of it
            outers |= trial.new_outers
            continue
        if not trial.new_refusals:
            break
        refused |= trial.new_refusals
    splits = {name: split for name, split in trial.splits.items() if name not in trial.new_refusals}
    reasons = {name: f"whole: {reason}" for name, reason in refused.items()} | trial.reasons
    for item in step.inputs:
        if item.kind is Kind.PARAM and (request := trial.only_request(item)) is not None and item.target not in pinned:
            splits[item.target] = request
            reasons[item.target] = "goes with what it is added to"
    return TensorParallel(splits=splits, reasons=reasons)


def pinned_placements(annotations: Mapping[str, Iterable[str | None]], axis: str) -> dict[str, Placement]:
    """Parameter -> its placement along `axis`, of the annotated ones; an annotation without the axis keeps it whole."""
    dims = {name: [dim for dim, entry in enumerate(spec) if entry == axis] for name, spec in annotations.items()}
    return {name: Shard(found[0]) if found else REPLICATE for name, found in dims.items()}


def _marked_parameters(step: StepGraph, num_ranks: int, pinned: Mapping[str, Placement]) -> dict[str, Placement]:
    """Parameters that the model's code hands to `graphacc.mark_sharding` itself."""
    items = {node: item.target for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    placements = _marked(step, TP, num_ranks)
    found: dict[str, Placement] = {}
    for node in step.graph.nodes:
        if node.name in placements and node.args[0] in items:
            name, placement = items[node.args[0]], placements[node.name]
            if pinned.get(name, found.get(name, placement)) != placement:
                where = source_line(node.meta.get("stack_trace"))
                raise StrategyError(f"{name!r} is marked as {placement} at {where}, and pinned to another sharding elsewhere: keep one")
            found[name] = placement
    return found


class _Trial(Assigner):
    """A forward run on placements alone."""

    def __init__(self, step, num_ranks, pinned, refused, outers, known):
        super().__init__(step, TP, num_ranks, {}, {}, lambda shape: None, ModelParallel(resolve=lambda shape: None), {})
        self.refused, self.outers, self.known = refused, outers, known
        self.pinned = pinned
        self.params = {node: item for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
        self.splits = {name: Shard(split.dim, outers.get(name, 1)) for name, split in pinned.items() if isinstance(split, Shard)}
        self.reasons: dict[str, str] = {name: "annotation" for name in pinned}
        self.new_refusals: dict[str, str] = {}
        self.new_outers: dict[str, int] = {}
        self.origins: dict[torch.fx.Node, frozenset[str]] = {}  # the columns that a split activation comes from
        self.columns: dict[str, tuple[int, int]] = {}  # parameter -> inputs and outputs
        self.paired: set[str] = set()  # columns that a row follows
        self.reduced: set[str] = set()  # columns whose outputs are summed by another operator
        self.requests: dict[torch.fx.Node, set[Placement]] = {}
        self.from_batch: set[torch.fx.Node] = set()

    def run(self) -> None:
        for node, item in zip(self.step.placeholders, self.step.inputs):
            self._place_input(node, item)
        for node in self.step.graph.nodes:
            if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD:
                if any(operand in self.from_batch for operand in node.all_input_nodes):
                    self.from_batch.add(node)
                self._give_role(node)
                self._place_node(node)
        for name, (inputs, outputs) in self.columns.items():
            if name not in self.paired and name in self.splits and outputs < _HEAD_RATIO * inputs:
                self._refuse(name, "no row-parallel product follows it")

    def only_request(self, item: Input) -> Shard | None:
        """The split in which every use wants a parameter that is whole so far."""
        node = next(node for node, other in self.params.items() if other is item)
        wanted = self.requests.get(node, set())
        if item.target in self.splits or item.target in self.refused or len(wanted) != 1:
            return None
        (placement,) = wanted
        return placement if isinstance(placement, Shard) and placement.plain else None

    # Roles

    def _give_role(self, node: torch.fx.Node) -> None:
        if node.target is aten.embedding.default:
            self._give_table_role(node)
        elif node.target is _GROUPED:
            x, weight = node.all_input_nodes[:2]
            self._give_factor_role(node, weight=weight, x=x, contracted=(1, 1))
        elif node.target in _PRODUCTS:
            factors = facts(node.target).factors
            assert factors is not None, f"the positions of the factors of {node.target} are not known"
            first, second = factors
            self._give_factor_role(node, weight=node.args[second], x=node.args[first], contracted=(0, 1))
            self._give_factor_role(node, weight=node.args[first], x=node.args[second], contracted=(1, 0))

    def _give_table_role(self, node: torch.fx.Node) -> None:
        weight, indices = node.args[:2]
        item = self._free_parameter(weight)
        if item is None or weight not in self.params or indices not in self.from_batch or item.shape[0] <= item.shape[1]:
            return
        self._assign(weight, Shard(0, padding=-item.shape[0] % self.num_ranks), "vocabulary: rows")

    def _give_factor_role(self, node: torch.fx.Node, weight: torch.fx.Node, x: torch.fx.Node, contracted: tuple[int, int]) -> None:
        """Make a parameter a column or a row; `contracted` are the dims of weight and x over which the product sums. Of experts' matrices [E, K, N] all are split alike."""
        item, of_weight, of_x = self._free_parameter(weight), *contracted
        if item is None or self._root(x) is not None:
            return
        if self._is_partial(x):
            self.home[x] = REPLICATE
        home = self.home[x]
        arrives = isinstance(home, Shard) and home.dim == of_x
        if arrives and self.origins.get(x, frozenset()) & self.reduced:
            for name in self.origins[x] & self.reduced:
                self._refuse(name, "its outputs are summed before the next product")
            self.home[x], arrives = REPLICATE, False
        shape = weight.meta["val"].shape
        of_outputs = 2 * len(shape) - 3 - of_weight  # the other one of the last two dims
        outputs = shape[of_outputs]
        padding = -outputs % self.num_ranks if len(shape) == 2 and outputs >= _HEAD_RATIO * shape[of_weight] else 0  # of a vocabulary
        wanted = Shard(of_weight, home.outer) if arrives else Shard(of_outputs, self.outers.get(item.target, 1), padding)
        split = self._pull(weight, wanted)
        if split is None or not divides(item.shape, split, self.num_ranks):
            self._refuse(item.target, f"its shape {list(item.shape)} does not divide over {self.num_ranks} ranks")
            return
        if not arrives:
            self.columns[item.target] = (shape[of_weight], outputs)
        self._assign(self._root(weight), split, "row" if arrives else "column")

    def _free_parameter(self, weight: torch.fx.Node) -> Input | None:
        root = self._root(weight)
        item = self.params.get(root) if root is not None else None
        taken = item is None or item.target in self.splits or item.target in self.refused or item.target in self.pinned
        return None if taken or item.target in self.new_refusals else item

    def _root(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The parameter that a value is a view or a cast of."""
        source = _behind_views(node)
        return source if source in self.params else None

    def _pull(self, node: torch.fx.Node, wanted: Shard) -> Shard | None:
        """The split of the parameter behind `node` that gives `node` the split `wanted`."""
        chain = []
        while node not in self.params:
            chain.append(node)
            node = node.args[0]
        for dim in range(len(self.params[node].shape)):
            placement: Placement = Shard(dim, wanted.outer, wanted.padding)
            if not divides(self.params[node].shape, placement, self.num_ranks):
                continue
            for step in reversed(chain):
                placement = self._push(step, placement)
            if placement == wanted:
                return Shard(dim, wanted.outer, wanted.padding)
        return None

    def _push(self, node: torch.fx.Node, placement: Placement) -> Placement:
        return self._decide(node, lambda operand, user: placement)[1].result

    def _assign(self, root: torch.fx.Node, split: Shard, reason: str) -> None:
        name = self.params[root].target
        self.splits[name], self.reasons[name] = split, reason
        self._set(root, split, frozenset([name]) if reason == "column" else frozenset())

    def _set(self, node: torch.fx.Node, placement: Placement, origins: frozenset[str]) -> None:
        """Place a parameter, and what views and casts made of it so far."""
        self._note(node, placement, origins)
        for user in node.users:
            if user in self.home and user.target in _CHAIN:
                self._set(user, self._push(user, placement), origins)

    def _note(self, node: torch.fx.Node, placement: Placement, origins: frozenset[str]) -> None:
        self.home[node], self.origins[node] = placement, origins
        self.made[node] = [placement]
        if isinstance(placement, Shard):
            self.weights.add(node)

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self.pinned:
            self.new_refusals.setdefault(name, reason)

    # The run on placements: what `Assigner` would move is only noted

    def _place_input(self, node: torch.fx.Node, item: Input) -> None:
        placement = self.splits.get(item.target, REPLICATE) if item.kind is Kind.PARAM else REPLICATE
        self._note(node, placement, frozenset([item.target]) if isinstance(placement, Shard) else frozenset())
        if item.kind is Kind.BATCH:
            self.from_batch.add(node)

    def _place_item(self, node: torch.fx.Node) -> None:
        source, index = node.args
        placements = self.home[source]
        self.home[node] = placements[index] if isinstance(placements, tuple) else placements
        self.origins[node] = self.origins.get(source, frozenset())

    def _settle(self, node: torch.fx.Node) -> None:
        """Gradients are not run."""

    def value(self, node: torch.fx.Node, to: Placement, forced: str = "") -> None:
        self.made.setdefault(node, []).append(to)
        if node in self.params:
            self.requests.setdefault(node, set()).add(to)

    def _apply(self, node: torch.fx.Node, operands: list[torch.fx.Node], decision: Decision) -> None:
        plan, origins = decision.plan, set()
        for operand, presented, required in zip(operands, decision.presented, plan.operands):
            mine = self.origins.get(operand, frozenset())
            if required is not None and node.target not in _CHAIN:
                self.value(operand, required)
            if isinstance(presented, Shard) and required not in (None, presented):
                self._fail(self._call(node, self._presented), presented, mine, plan.reason)
            elif isinstance(presented, Shard):
                origins |= mine
        self.home[node] = plan.results if isinstance(node.meta["val"], (tuple, list)) else decision.result
        if isinstance(self.home[node], Partial) and origins:
            (self.paired if node.target in _PRODUCTS else self.reduced).update(origins)
        self.origins[node] = frozenset(origins)

    def _fail(self, call: Call, split: Shard, origins: frozenset[str], reason: str) -> None:
        """A split activation would have to be gathered: try interleaved blocks for its columns, or keep them whole."""
        node = call.node
        self._check_heads(call, split, origins)
        interleaved = _interleaving(call, split) if split.outer == 1 else None
        for name in origins:
            if interleaved is not None and name not in self.outers:
                self.new_outers[name] = interleaved
            else:
                self._refuse(name, f"{node.target} at {source_line(node.meta.get('stack_trace')) or node.name} needs its outputs whole")

    def _check_heads(self, call: Call, split: Shard, origins: frozenset[str]) -> None:
        """Raise if features are viewed as [heads, head size] and the heads do not divide."""
        if call.node.target not in _VIEWS or not origins or split.outer > 1:
            return
        before, after = call.operands[0].shape, tuple(call.results[0].shape)
        dim = split.dim
        if after[:dim] != before[:dim] or len(after) != len(before) + 1 or after[dim] * after[dim + 1] != before[dim]:
            return
        heads = after[dim]
        if heads % self.num_ranks and self.num_ranks % heads and heads != 3:  # three are query, key and value
            raise StrategyError(_uneven_heads(call.node, heads, self.num_ranks))


def check_heads(step: StepGraph, num_ranks: int) -> None:
    """Raise StrategyError if there is attention whose query heads `num_ranks` does not divide."""
    for node in step.graph.nodes:
        if node.target is torch.ops.graphacc.sdpa.default and node.args[0].meta["val"].shape[1] % num_ranks:
            raise StrategyError(_uneven_heads(node, node.args[0].meta["val"].shape[1], num_ranks))


def _behind_views(node: Any) -> Any:
    """The node that a value is a view or a cast of."""
    while node.target in _CHAIN:
        node = node.args[0]
    return node


def _uneven_heads(node: torch.fx.Node, heads: int, num_ranks: int) -> str:
    where = source_line(node.meta.get("stack_trace")) or node.meta.get("module_path") or node.name
    fits = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
    return f"tp={num_ranks} does not divide the {heads} attention heads at {where}: choose tp out of {fits}"


def _interleaving(call: Call, split: Shard) -> int | None:
    """The number of equal parts that an operator cuts the split dim into."""
    size = call.operands[0].shape[split.dim]
    if call.node.target is aten.slice.Tensor:
        part = call.results[0].shape[split.dim]
        return size // part if part and size % part == 0 and part < size else None
    if call.node.target in (aten.split.Tensor, aten.split_with_sizes.default):
        parts = {value.shape[split.dim] for value in call.results}
        return len(call.results) if len(parts) == 1 else None
    if call.node.target in _VIEWS:
        shape = tuple(call.results[0].shape)
        if shape[: split.dim] == call.operands[0].shape[: split.dim] and len(shape) > split.dim and 1 < shape[split.dim] < size:
            return shape[split.dim]
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """The placements that the partition along `tp` starts from."""

    inputs: dict[str, Placement]
    outputs: dict[tuple[Kind, str], Placement]
    pins: dict[str, Placement]
    model_parallel: ModelParallel


def tensor_parallel_layouts(
    step: StepGraph,
    splits: Mapping[str, Shard],
    resolve: Callable[[tuple[int, ...]], Shard | None],
    *,
    num_ranks: int,
    sequence_parallel: bool,
) -> Layouts:
    """Parameters, their gradients and optimizer state lie alike."""
    shapes = {item.target: item.shape for item in step.inputs if item.kind is Kind.PARAM}

    def split_of(item) -> Shard | None:
        owner = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
        same = item.kind is not Kind.STATE or item.shape == shapes.get(owner)
        return splits.get(owner) if item.kind in (Kind.PARAM, Kind.GRAD, Kind.STATE) and same else None

    return Layouts(
        inputs={item.name: split for item in step.inputs if (split := split_of(item)) is not None},
        outputs={(item.kind, item.target): split_of(item) or REPLICATE for item in step.outputs if item.kind is Kind.GRAD},
        pins=_table_gradients(step, splits) | _whole_ids(step, splits) | _marked(step, TP, num_ranks),
        model_parallel=ModelParallel(resolve=resolve, gathers_sequences=sequence_parallel),
    )


def _table_gradients(step: StepGraph, splits: Mapping[str, Shard]) -> dict[str, Placement]:
    """The gradients of split tables are made split: nodes that scatter by the indices of a lookup in such a table."""
    items = {node: item for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    lookups = {}
    for node in step.graph.nodes:
        if node.target is aten.embedding.default:
            weight = _behind_views(node.args[0])
            split = splits.get(items[weight].target) if weight in items else None
            if split is not None and split.dim == 0:
                lookups[node.args[1], items[weight].shape[0]] = split
    scatter = aten.embedding_dense_backward.default
    return {
        node.name: lookups[node.args[1], node.args[2]]
        for node in step.graph.nodes
        if node.target is scatter and (node.args[1], node.args[2]) in lookups
    }


def _whole_ids(step: StepGraph, splits: Mapping[str, Shard]) -> dict[str, Placement]:
    """Every rank has the ids of all rows that go to experts whose matrices are split, and so the rows: under sequence parallelism it would sort its own ones, and gather the matrices."""
    items = {node: item.target for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    found: dict[str, Placement] = {}
    for node in step.graph.nodes:
        if node.target is not _GROUPED:
            continue
        weight, offsets = map(_behind_views, node.args[1:3])
        if items.get(weight) in splits and offsets.target is torch.ops.graphacc.expert_offsets.default:
            found[offsets.args[0].name] = REPLICATE
    return found


def _marked(step: StepGraph, axis: str, num_ranks: int) -> dict[str, Placement]:
    """The placements that the model's code asks for with `graphacc.mark_sharding`.

    Raises:
        StrategyError: `num_ranks` does not divide the dim that is to be split.
    """
    nodes = {node.name: node for node in step.graph.nodes if node.target is torch.ops.graphacc.mark_sharding.default}
    placements = pinned_placements({name: node.args[1].split(",") for name, node in nodes.items()}, axis)
    for name, placement in placements.items():
        shape = tuple(nodes[name].meta["val"].shape)
        if isinstance(placement, Shard) and not divides(shape, placement, num_ranks):
            where = source_line(nodes[name].meta.get("stack_trace")) or nodes[name].meta.get("module_path")
            raise StrategyError(
                f"mark_sharding at {where}: {axis}={num_ranks} does not divide dim {placement.dim} of shape {list(shape)}: "
                f"split another dim, or choose {axis} out of the divisors of {shape[placement.dim]}"
            )
    return placements


def sequence_split(batch_size: int, num_ranks: int) -> Callable[[tuple[int, ...]], Shard | None]:
    """Where a partial activation is split under sequence parallelism (Korthikanti et al., 2022): its tokens.

    [B, T, ...] is split along T, and [B * T, D], its flattened form, along the same tokens.
    """

    def resolve(shape: tuple[int, ...]) -> Shard | None:
        if len(shape) >= 3 and shape[0] == batch_size and shape[-1] > 1:
            split = Shard(1)
        elif len(shape) == 2 and shape[0] % batch_size == 0 and shape[0] > batch_size and shape[1] > 1:
            split = Shard(0, batch_size)
        else:
            return None
        return split if math.prod(shape) and divides(shape, split, num_ranks) else None

    return resolve
