"""Rules of routing to experts (see `routing`).

Legend: k and n features of the products.
"""

import torch

from graphacc.passes.partition import routing
from graphacc.passes.partition.placement import REPLICATE, Partial, Shard
from graphacc.passes.partition.rules import Call, Communicating, Dims, Emit, Labels, Operand, Plan, replicate, rule, split_of

ops = torch.ops.graphacc
_PADDED = "padding would be sorted and counted with the rows"


def _features(call: Call, name: str, before: int, after: int) -> Dims:
    """Ids that every rank has whole: the dims behind the rows may be split."""
    rest = list(range(before, len(call.shape(name))))
    return Dims({name: [*[None] * before, *rest]}, [[*[None] * after, *rest]], linear=(name,), moves=True)


def _ids(call: Call) -> Operand:
    ids = call.operand("ids")
    assert ids is not None
    return ids


@rule("graphacc.sort_rows.default", reads_nodes=True)
def _sort_rows(call: Call) -> Dims | Plan:
    ids, split = _ids(call), split_of(call, "ids")
    if split is not None and split.padding:
        return replicate(call, _PADDED)
    if split is None:
        return _features(call, "rows", len(ids.shape), 1)
    return Plan((split, split), routing.sorted_split(ids.node, call.num_ranks, call.experts), emit=_routed(call, routing.sort))


@rule("graphacc.unsort_rows.default", reads_nodes=True)
def _unsort_rows(call: Call) -> Dims | Plan:
    ids, split = _ids(call), split_of(call, "ids")
    if split is not None and split.padding:
        return replicate(call, _PADDED)
    if split is None:
        return _features(call, "rows", 1, len(ids.shape))
    lies = routing.sorted_split(ids.node, call.num_ranks, call.experts)
    return Plan((lies, split), split, emit=_routed(call, routing.unsort))


def _routed(call: Call, function) -> Emit:
    def emit(build, args, kwargs):
        rows, local = args
        return function(build, call.experts, _ids(call).node, local, rows)

    return Communicating(emit, _ids(call).node)


@rule("graphacc.expert_offsets.default", reads_nodes=True)
def _expert_offsets(call: Call) -> Plan:
    """Every rank counts its own rows; the counts, and with them their running sums, add up."""
    split = split_of(call, "ids")
    if split is None or split.padding:
        return replicate(call, "" if split is None else _PADDED)
    return Plan((split,), Partial("sum"))


@rule("graphacc.grouped_mm.default", reads_nodes=True)
def _grouped_mm(call: Call) -> Dims | Plan:
    """Sorted rows, with the offsets of the same ids, stay where they are."""
    lies = _sorted(call, "rows")
    if lies is None:
        return _product(call, {"rows": [None, "k"], "weight": [None, "k", "n"]}, [None, "n"], reduce={"k": "sum"})
    emit = _own_experts(call, lies)
    return Plan((lies, REPLICATE, Partial("sum")), lies) if emit is None else Plan((lies, Shard(0), None), lies, emit=emit)


@rule("graphacc.grouped_mm_weight_grad.default", reads_nodes=True)
def _grouped_mm_weight_grad(call: Call) -> Dims | Plan:
    lies = _sorted(call, "rows", "grad")
    if lies is None:
        return _product(call, {"rows": [None, "k"], "grad": [None, "n"]}, [None, "k", "n"])
    emit = _own_experts(call, lies)
    return Plan((lies, lies, Partial("sum")), Partial("sum")) if emit is None else Plan((lies, lies, None), Shard(0), emit=emit)


def _product(call: Call, operands: dict[str, Labels], result: Labels, **facts) -> Dims:
    return Dims(operands, [result], linear=tuple(operands), matmul=True, **facts)


def _sorted(call: Call, *names: str) -> Shard | None:
    """The split of rows that the ranks have sorted by the ids which the offsets count."""
    offsets = call.operand("offsets")
    assert offsets is not None
    for name in names:
        split = split_of(call, name)
        if split is None or split.dim or split.order is None or split.order.kind != "sorted":
            continue
        if offsets.node.target is ops.expert_offsets.default and offsets.node.args[0] is split.order.ids:
            return split
    return None


def _own_experts(call: Call, lies: Shard) -> Emit | None:
    """The product of the rank's own experts, where experts are spread."""
    assert lies.order is not None
    ids = lies.order.ids
    if not routing.spreads(call.experts, ids, call.num_ranks):
        return None
    return lambda build, args, kwargs: build.call(call.node.target, *args[:2], build.exchanges[ids].offsets)


@rule("graphacc.bucket_rows.default", reads_nodes=True)
def _bucket_rows(call: Call) -> Dims | Plan:
    """Buckets for the exchange over another axis: every rank fills its own part of each."""
    ids, split = _ids(call), split_of(call, "ids")
    if split is None:
        dims = _features(call, "rows", 1, 2)
        return dims if call["fill"] == 0 else Dims(dims.operands, dims.results)
    if not split.plain or call["capacity"] % call.num_ranks:
        return replicate(call, "the capacity of the buckets does not divide")
    return Plan((split, split), routing.sent_split(ids.node), {"capacity": call["capacity"] // call.num_ranks})


@rule("graphacc.unbucket_rows.default", reads_nodes=True)
def _unbucket_rows(call: Call) -> Dims | Plan:
    ids, split = _ids(call), split_of(call, "ids")
    if split is None:
        return _features(call, "buckets", 2, 1)
    if not split.plain or call.shape("buckets")[1] % call.num_ranks:
        return replicate(call, "the capacity of the buckets does not divide")
    return Plan((routing.sent_split(ids.node), split), split)
