"""Routing to experts as XLA runs it, against the operators' CPU implementations."""

import pytest
import torch
from helpers_lowering import check_lowering, run_lowered, step_graph

ops = torch.ops.graphacc
IDS = torch.tensor([2, 0, 3, 1, 0, 2, 7, 0, 1, 3, -1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_sorted_and_put_back(dtype):
    rows = torch.arange(12 * 3).view(12, 3).to(dtype)
    check_lowering(ops.sort_rows, rows, IDS, tolerance=0)
    check_lowering(ops.unsort_rows, rows, IDS, tolerance=0)
    check_lowering(ops.sort_rows, rows.view(4, 3, 3), IDS.view(4, 3), tolerance=0)
    check_lowering(ops.unsort_rows, rows, IDS.view(4, 3), tolerance=0)
    check_lowering(lambda ids: ops.expert_offsets(ids, 4), IDS.to(torch.int32), tolerance=0)


@pytest.mark.parametrize("capacity", [1, 2, 12])
@pytest.mark.default_cases("12")
def test_buckets(capacity):
    rows = torch.randn(12, 3)
    for per_bucket, num_buckets in ((2, 2), (1, 4), (4, 1)):
        fill = lambda x, ids: ops.bucket_rows(x, ids, per_bucket, num_buckets, capacity, 5)  # noqa: E731
        check_lowering(fill, rows, IDS, tolerance=0)
        check_lowering(fill, IDS, IDS, tolerance=0)
        buckets = torch.randn(num_buckets, capacity, 3)
        check_lowering(lambda x, ids: ops.unbucket_rows(x, ids, per_bucket), buckets, IDS, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype):
    rows, weight, grad = torch.randn(12, 5).to(dtype), torch.randn(4, 5, 6).to(dtype), torch.randn(12, 6).to(dtype)
    offsets = torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    check_lowering(ops.grouped_mm, rows, weight, offsets)
    check_lowering(ops.grouped_mm_weight_grad, rows, grad, offsets)


def test_what_stands_in_rows_of_no_expert_has_no_effect():
    """Free places of a bucket go through the operators between the products, which may make anything of them."""
    rows, weight, grad = torch.randn(12, 5), torch.randn(4, 5, 6), torch.randn(12, 6)
    offsets = torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    broken_rows, broken_grad = rows.clone(), grad.clone()
    broken_rows[9:], broken_grad[9:] = float("nan"), float("inf")

    def both(rows, weight, grad, offsets):
        return ops.grouped_mm(rows, weight, offsets), ops.grouped_mm_weight_grad(rows, grad, offsets)

    step = step_graph(both, rows, weight, grad, offsets)
    expected = run_lowered(step, rows, weight, grad, offsets, jit=True)
    for got, want in zip(run_lowered(step, broken_rows, weight, broken_grad, offsets, jit=True), expected, strict=True):
        assert torch.equal(got, want)
