"""Operations and bytes of calls, against torch's own counter, and against attention that is written out."""

import dataclasses

import pytest
import torch
import zoo
from graphs import trace
from selection import with_matrix
from torch.utils.flop_counter import FlopCounterMode
from zoo_steps import build, partitioned

from graphacc.costs import Work, kernels, node_work
from graphacc.costs.hardware import PRESETS
from graphacc.costs.seconds import work_seconds
from graphacc.costs.work import _OWN
from graphacc.graph import Kind, StepGraph
from graphacc.ops import attention
from graphacc.ops.flash_attention import allowed, written_out
from graphacc.passes.attention import ATTACH_ATTENTION
from graphacc.passes.hlo.operators import OPAQUE
from graphacc.passes.runner import run_passes

ops = torch.ops.graphacc


def counted(function, *args) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


def found(step: StepGraph, target) -> list[Work]:
    return [node_work(node) for node in step.graph.nodes if node.target is target]


def traced(function, **tensors) -> StepGraph:
    return trace(lambda *args: (function(*args),), [(Kind.BATCH, name, x) for name, x in tensors.items()], [(Kind.USER, "out")])


@pytest.mark.parametrize("name", with_matrix(["gpt2", "resnet", "t5", "bert", "vit", "clip"], ["gpt2", "resnet"]))
def test_a_model_has_the_operations_that_torch_counts(name):
    """Torch's attention on the CPU is not in its registry: it is written out here. Its backward keeps p, where ours computes q kᵀ again."""
    model, batch = zoo.MODELS[name]()
    step = build(model, batch).joint
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = counted(lambda: model(**batch).loss.backward())
    again = 0
    for node in step.graph.nodes:
        if node.target in (ops.sdpa_backward.default, ops.flash_attention_backward.default):
            q, k = node.args[1].meta["val"], node.args[2].meta["val"]
            again += 2 * q.numel() * k.shape[-2]
    assert sum(node_work(node).flops for node in step.graph.nodes) == want + again


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (3, 0), (3, 2), (0, 0), (-1, 20)])
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (6, 10), (10, 6)])
def test_attached_attention_has_the_operations_of_its_scores(queries, keys, left, right):
    """Forward and backward, against the products of the formula with all scores, times the share that the band leaves."""
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 12)
    options = (left, right, 0.3, 0, 0.0, 0, [])
    step = traced(lambda q, k, v: ops.flash_attention(q, k, v, *[None] * 5, *options)[0], q=q, k=k, v=v)
    (forward,) = found(step, ops.flash_attention.default)
    seen = allowed(queries, keys, None, None, left, right, "cpu").sum().item() / (queries * keys)
    whole = counted(written_out, q, k, v, *[None] * 5, *options)
    assert forward.flops == pytest.approx(whole * seen, rel=1e-12)
    out, lse = written_out(q, k, v, *[None] * 5, *options)
    step = traced(
        lambda grad, q, k, v, out, lse: ops.flash_attention_backward(grad, q, k, v, *[None] * 5, out, lse, *options, False)[0],
        grad=out, q=q, k=k, v=v, out=out, lse=lse,
    )  # fmt: skip
    (backward,) = found(step, ops.flash_attention_backward.default)
    sdpa = attention.sdpa_backward._init_fn  # the function that the operator was made of
    whole = counted(sdpa, out, q, k, v, None, None, out, lse, False, 0.3)
    assert backward.flops == pytest.approx(whole * seen, rel=1e-12)
    assert backward.written_bytes == 4 * (q.numel() + k.numel() + v.numel())


@pytest.mark.parametrize(("queries", "padding"), [(4, 16.0), (64, 1.0), (100, 1.0)])
def test_few_queries_take_as_long_as_a_tile(queries, padding):
    """And have no more operations for it: what MFU counts."""
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 100, 8), torch.randn(2, 2, 100, 8)
    step = traced(lambda q, k, v: ops.flash_attention(q, k, v, *[None] * 5, -1, -1, 0.3, 0, 0.0, 0, [])[0], q=q, k=k, v=v)
    (work,) = found(step, ops.flash_attention.default)
    assert work.padding == padding and work.flops == 2 * 2 * 4 * queries * 100 * 16
    chip = PRESETS["H100"].chip
    (seconds,), (full,) = work_seconds([work], chip), work_seconds([dataclasses.replace(work, flops=work.flops * padding, padding=1.0)], chip)
    assert seconds == full


def test_every_operator_of_ours_is_counted_or_known_to_have_no_products():
    without = """after axis_index barrier bucket_rows ctc_backward ctc_forward dequantize_blocks dequantize_sum expert_offsets hlo_operation mark_sharding
        permute_ranks quantize_blocks random_bits random_bits_at random_uniform random_uniform_at send_to_host shard sort_rows unbucket_rows unsort_rows wait_for""".split()
    # `chunked` has the operations of its body, for all chunks: tests/passes/test_loss_chunks.py
    names = {name.removeprefix("graphacc::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("graphacc::")}
    assert OPAQUE.namespace == "graphacc"  # an operator of captured HLO, which nothing else here registers
    assert names == {"chunked", *without, *(str(target).split(".")[1] for target in _OWN if target.namespace == "graphacc")}


def test_products_of_experts():
    rows, weight = torch.randn(24, 8), torch.randn(4, 8, 6)
    offsets = torch.tensor([6, 12, 18, 24], dtype=torch.int32)
    (forward,) = found(traced(ops.grouped_mm, rows=rows, weight=weight, offsets=offsets), ops.grouped_mm.default)
    assert forward == Work(flops=2 * 24 * 8 * 6, dims=(6, 8, 6), read_bytes=4 * (24 * 8 + 4 * 8 * 6 + 4), written_bytes=4 * 24 * 6)
    (backward,) = found(
        traced(ops.grouped_mm_weight_grad, rows=rows, grad=torch.randn(24, 6), offsets=offsets), ops.grouped_mm_weight_grad.default
    )
    assert (backward.flops, backward.dims) == (2 * 24 * 8 * 6, (8, 6, 6))


def test_products_of_recurrent_layers():
    """A GRU's step multiplies the state [B, H] by [3 H, H]; its backward the gradient by the same."""
    gates, hidden, weight = torch.randn(5, 2, 12), torch.randn(2, 4), torch.randn(12, 4)
    (forward,) = found(traced(lambda gates, hidden, weight: ops.recurrence("gru", gates, hidden, None, weight, None, None)[0], gates=gates, hidden=hidden, weight=weight), ops.recurrence.default)
    assert (forward.flops, forward.dims) == (2 * 5 * 2 * 12 * 4, (2, 4, 12))
    outputs, last, cells, kept = ops.recurrence("gru", gates, hidden, None, weight, None, None)
    tensors = dict(grad=outputs, last=last, hidden=hidden, weight=weight, outputs=outputs, cells=cells, kept=kept)
    step = traced(lambda grad, last, hidden, *rest: ops.recurrence_backward("gru", grad, last, hidden, None, *rest, None)[0], **tensors)
    (backward,) = found(step, ops.recurrence_backward.default)
    assert (backward.flops, backward.dims) == (2 * 5 * 2 * 12 * 4, (2, 12, 4))


def test_dims_of_products():
    a, b = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(8, 10, dtype=torch.bfloat16)
    (work,) = found(traced(torch.mm, a=a, b=b), torch.ops.aten.mm.default)
    assert work == Work(flops=960, dims=(6, 8, 10), dtype="bf16", read_bytes=2 * (48 + 80), written_bytes=120)
    image, weight = torch.randn(2, 6, 9, 9), torch.randn(12, 3, 3, 3)
    (work,) = found(
        traced(lambda x, w: torch.ops.aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2), x=image, w=weight),
        torch.ops.aten.convolution.default,
    )
    assert work.dims == (2 * 7 * 7, 27, 6)
    assert work.flops == counted(torch.nn.functional.conv2d, image, weight, None, 1, 0, 1, 2)


def test_bytes_are_those_of_the_memory_that_is_read():
    """Views are free, what is expanded is read once, and a table only where it is looked up."""
    table, ids, x = torch.randn(100, 4), torch.tensor([3, 5]), torch.randn(1, 8)
    step = traced(lambda table, ids: torch.ops.aten.embedding(table, ids).view(8).contiguous(), table=table, ids=ids)
    assert [node_work(node).size_bytes for node in step.graph.nodes if node_work(node).size_bytes] == [2 * 4 * 4 + 16 + 2 * 4 * 4]
    (work,) = found(traced(lambda x: torch.neg(x.expand(6, 8)), x=x), torch.ops.aten.neg.default)
    assert (work.read_bytes, work.written_bytes) == (4 * 8, 4 * 48)


@pytest.mark.parametrize("operator", [ops.after, ops.wait_for])
def test_what_waits_reads_nothing_of_what_it_waits_for(operator):
    x, other = torch.randn(4, 8), torch.randn(100, 100)
    step = traced(lambda x, other: torch.sum(operator(x, other @ other), dim=0), x=x, other=other)
    assert {node.target: work.size_bytes for node, work in kernels(step).items()} == {
        torch.ops.aten.mm.default: 4 * 2 * 100 * 100,  # an operand that is read twice is counted once
        torch.ops.aten.sum.dim_IntList: 4 * (4 * 8 + 8),
    }


def test_kernels_join_what_is_fused():
    """A product reads memory, so tanh is stored; x + 1 is not."""
    x, weight = torch.randn(16, 8), torch.randn(8, 4)
    step = traced(lambda x, w: (torch.tanh(x + 1) @ w) * 2, x=x, w=weight)
    assert {node.name: (work.flops, work.read_bytes, work.written_bytes) for node, work in kernels(step).items()} == {
        "tanh": (0, 4 * 128, 4 * 128),
        "mm": (2 * 16 * 8 * 4, 4 * (128 + 32), 4 * 64),
        "mul": (0, 4 * 64, 4 * 64),
    }


def test_collectives_have_no_work_of_their_own():
    step, _ = partitioned(build(*zoo.MODELS["gpt2"]()).joint, "tp=2")
    sums = [node for node in step.graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
    assert sums and all(node_work(node) == Work() for node in sums) and not set(sums) & set(kernels(step))


def test_causal_attention_of_a_model_is_half():
    """After attention is attached, T (T + 1) / 2 of T² scores are computed, in every layer, forward and backward."""
    step = build(*zoo.MODELS["gpt2"]()).joint
    attached, _ = run_passes(step.copy(), [ATTACH_ATTENTION])
    for before, after in ((ops.sdpa, ops.flash_attention), (ops.sdpa_backward, ops.flash_attention_backward)):
        want = [work.flops * (zoo.SEQ + 1) / (2 * zoo.SEQ) for work in found(step, before.default)]
        assert want and [work.flops for work in found(attached, after.default)] == pytest.approx(want)
        assert all(work.attends for work in found(attached, after.default))
