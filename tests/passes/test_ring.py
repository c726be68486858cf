"""Ring attention on simulated ranks equals the kernel on one device, forward and backward, for every kind of mask it takes."""

import pytest
import torch
from graphs import trace
from simulate import run_global, simulate

from graphacc.graph import Kind
from graphacc.ops.flash_attention import EmptyRows
from graphacc.passes.partition import partition
from graphacc.passes.partition.placement import REPLICATE, Shard
from graphacc.passes.partition.ring import hindrances

ops = torch.ops.graphacc
B, H, G, T, D = 2, 4, 2, 24, 8


def random(*shape, scale=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def attention(queries=T, keys=T, scale=1.0, **tensors) -> dict[str, torch.Tensor]:
    found = {"grad": random(B, H, queries, D), "q": random(B, H, queries, D, scale=scale, seed=1)}
    found |= {"k": random(B, G, keys, D, seed=2), "v": random(B, G, keys, D, seed=3)}
    return found | {name: x for name, x in tensors.items() if x is not None}


def check(tensors: dict[str, torch.Tensor], ranks: int, *, right=-1, empty_rows=EmptyRows.ZEROS, dropout=0.0, outer=1, bias_split=REPLICATE) -> None:
    names = list(tensors)
    size = [B, H, tensors["q"].shape[2], tensors["k"].shape[2]] if dropout else []
    options = (-1, right, D**-0.5, int(empty_rows), dropout, 7, size)

    def function(*given):
        values = dict(zip(names, given))
        inputs = [values.get(name) for name in ("q", "k", "v", "bias", "q_segments", "kv_segments", "key")]
        out, lse = ops.flash_attention(*inputs, None, *options)
        bias_grad = values.get("bias") is not None
        grads = ops.flash_attention_backward(values["grad"], *inputs, None, out, lse, *options, bias_grad)
        return out, lse, *grads[: 4 if bias_grad else 3]

    inputs = list(tensors.values())
    expected = function(*inputs)
    step = trace(function, [(Kind.BATCH, name, x) for name, x in tensors.items()], [(Kind.USER, str(i)) for i in range(len(expected))])
    for node in step.graph.nodes:
        node.meta["context"] = "ring"
    split = {"grad": Shard(2, outer), "q": Shard(2, outer), "k": Shard(2, outer), "v": Shard(2, outer), "bias": bias_split}
    places = {item.name: split.get(item.target, REPLICATE) for item in step.inputs}
    result, report = partition(step, "cp", ranks, places, {}, lambda shape: None)
    assert any(item.kind == "permute" for item in report.collectives), report
    for name, got, want in zip(("out", "lse", "q", "k", "v", "bias"), simulate(result, {"cp": ranks}, inputs), run_global(step, inputs)):
        atol = 2e-5 * max(1.0, float(want[want.isfinite()].abs().max()))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=atol, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_a_bias_of_keys_that_arrives_split_along_them(right):
    """A padding mask is made out of the batch, which is split along its tokens."""
    check(attention(bias=random(B, 1, 1, T, seed=4)), 2, right=right, bias_split=Shard(3))


BIASES = {"full": (1, H, T, T), "matrix": (T, T), "alibi": (H, 1, T), "column": (B, 1, T, 1), "number": (1, H, 1, 1)}


@pytest.mark.parametrize("ranks, right", [(3, -1), (2, 0), (3, 0)], ids=["full", "causal", "causal-3"])
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_bias(shape, right, ranks):
    check(attention(bias=random(*shape, seed=4)), ranks, right=right)


@pytest.mark.parametrize("shape", [None, (1, H, 6, 6), (H, 1, 6), (B, 1, 6, 1), (1, H, 1, 1)])
def test_halves_of_one_place(shape):
    """Under a causal mask a rank has two halves: of six places and three ranks, one place each."""
    check(attention(queries=6, keys=6, bias=None if shape is None else random(*shape, seed=4)), 3, right=0)


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_dropout_with_a_bias(right):
    key = torch.tensor([3, 5], dtype=torch.int64)
    check(attention(bias=random(1, H, T, T, seed=4), key=key), 2, right=right, dropout=0.3)


@pytest.mark.parametrize("empty_rows", list(EmptyRows))
@pytest.mark.parametrize("shape", [None, (1, H, T, T)])
def test_queries_without_keys(empty_rows, shape):
    """Padding: a query in no segment of the keys; and keys of a segment that lie in one block only."""
    queries = torch.tensor([[0] * 4 + [1] * 16 + [9] * 4, [2] * 10 + [9] + [3] * 13], dtype=torch.int32)
    keys = torch.tensor([[0] * 4 + [1] * 20, [2] * 10 + [3] * 14], dtype=torch.int32)
    bias = None if shape is None else random(*shape, seed=4)
    check(attention(bias=bias, q_segments=queries, kv_segments=keys), 3, empty_rows=empty_rows)


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_rows_that_a_bias_hides(right):
    bias = torch.zeros(1, 1, T, T)
    bias[..., 5, :] = -torch.inf
    bias[..., 7, :9] = -torch.inf
    check(attention(bias=bias), 2, right=right)


@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_large_logits(right):
    """Where the log-sum-exp is large, each block's probabilities add up to its share."""
    check(attention(scale=1e4), 2, right=right)


def test_lengths_that_differ_and_interleaved_blocks():
    check(attention(keys=36, bias=random(1, H, T, 36, seed=4)), 3)
    check(attention(bias=random(B, H, T, T, seed=4)), 3, outer=4)


def test_segments_under_a_causal_mask():
    ids = torch.tensor([[0] * 5 + [1] * 19, [2] * 11 + [3] * 13], dtype=torch.int32)
    check(attention(q_segments=ids, kv_segments=ids), 3, right=0)


LOWEST = torch.finfo(torch.float32).min
MASKED = {
    "learned": (Kind.PARAM, (2 * T,), lambda bias, hidden: bias[torch.arange(T)[:, None] - torch.arange(T) + T], ""),
    "infinite": (Kind.PARAM, (T, T), lambda bias, hidden: bias + torch.where(hidden, -torch.inf, 0.0), ""),
    "lowest": (Kind.PARAM, (T, T), lambda bias, hidden: bias + torch.where(hidden, LOWEST, 0.0), "the number -3.40282e+38"),
    "filled": (Kind.PARAM, (T, T), lambda bias, hidden: bias.masked_fill(hidden, -1e9), "the number -1e+09"),
    "given": (Kind.BATCH, (T, T), lambda bias, hidden: bias * 1.0, "batch 'bias'"),
}


@pytest.mark.parametrize("kind, shape, make, reason", MASKED.values(), ids=MASKED)
def test_a_bias_that_may_hide_positions_by_finite_numbers_does_not_go_around(kind, shape, make, reason):
    def function(grad, q, k, v, bias, hidden):
        return (ops.flash_attention(q, k, v, make(bias, hidden), None, None, None, None, -1, -1, 1.0, 0, 0.0, 0, [])[0],)

    tensors = attention(bias=random(*shape), hidden=torch.ones(T, T, dtype=torch.bool).triu(1))
    inputs = [(kind if name == "bias" else Kind.BATCH, name, x) for name, x in tensors.items()]
    found = list(hindrances(trace(function, inputs, [(Kind.USER, "0")]), 2).values())
    assert len(found) == bool(reason) and all(f"its bias is made of {reason}" in text for text in found)
