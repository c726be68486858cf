"""Rules of FlashAttention: batch and heads may be split, and every rank runs the kernel on its own part.

Legend: b batch, h heads. A bias that broadcasts over a split dim is whole on every rank, and its gradient a partial sum.
"""

import torch

from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.ring import ring_plan
from graphacc.passes.partition.rules import Call, Dims, Labels, Plan, replicate, rule
from graphacc.passes.partition.rules_matmul import heads_label, sequence_offers, share_heads

_ADD = torch.ops.aten.add.Tensor
_ROWS = {"b": 0, "h": 1}  # label -> dim of the scores [B, H, T, S]


@rule("graphacc.flash_attention.default", reads_nodes=True)
def _flash(call: Call) -> Dims | Plan:
    return _attention(call, {"q": 4, "k": 4, "v": 4}, [4, 3])


@rule("graphacc.flash_attention_backward.default", reads_nodes=True)
def _flash_backward(call: Call) -> Dims | Plan:
    return _attention(call, {"grad": 4, "q": 4, "k": 4, "v": 4, "out": 4, "lse": 3}, [4, 4, 4])


def _attention(call: Call, operands: dict[str, int], results: list[int]) -> Dims | Plan:
    if call.node.meta.get("context") == "ring" and (plan := ring_plan(call)) is not None:
        return plan
    splits = [operand.placement for operand in call.operands if isinstance(operand.placement, Shard)]
    if call["dropout"] and any(split.outer > 1 for split in splits if split.dim < 2):
        return replicate(call, "the index of dropout's random numbers needs contiguous blocks")
    heads, shares = heads_label(call)
    of_keys = None if shares else heads
    labels: dict[str, Labels] = {name: _labels(rank, of_keys if name in ("k", "v") else heads) for name, rank in operands.items()}
    labels |= {"q_segments": ["b", None], "kv_segments": ["b", None], "bias": _bias(call, heads)}
    found = [_labels(rank, of_keys if len(results) == 3 and i else heads) for i, rank in enumerate(results)]
    if "bias_grad" in call.arguments:
        found.append(labels["bias"] if call["bias_grad"] else [None])
    texts = ["bhte", "bht"] if len(results) == 2 else ["bhtd", "bhsd", "bhse"]
    offers = sequence_offers(call, [*texts, *[""] * (len(found) - len(texts))]) if heads == "h" else {}
    return Dims(labels, found, reduce={label: "sum" for label in _ROWS}, emit=_emits(call, shares), offers=offers)


def _labels(rank: int, heads: str | None) -> Labels:
    return ["b", heads, *[None] * (rank - 2)]


def _bias(call: Call, heads: str | None) -> Labels:
    operand = call.operand("bias")
    if operand is None:
        return []
    found = _labels(4, heads)[4 - len(operand.shape) :]
    return [None if size == 1 else label for size, label in zip(operand.shape, found)]


def _emits(call: Call, shares: bool) -> dict:
    """With dropout, the local call starts at the rank's place in the global scores."""
    if not call["dropout"]:
        return {"h": share_heads(call)} if shares else {}
    names = [argument.name for argument in call.node.target._schema.arguments]
    at, query = names.index("start"), names.index("q")

    def start_along(dim: int):
        def prepare(build, args):
            offset = build.offset(4, dim, args[query].meta["val"].shape[dim])
            start = offset if args[at] is None else build.call(_ADD, args[at], offset)
            return (*args[:at], start, *args[at + 1 :])

        return prepare

    def emit_along(dim: int):
        return lambda build, args, kwargs: build.call(call.node.target, *start_along(dim)(build, args), **kwargs)

    emits = {label: emit_along(dim) for label, dim in _ROWS.items()}
    return emits | {"h": share_heads(call, start_along(_ROWS["h"]))} if shares else emits
