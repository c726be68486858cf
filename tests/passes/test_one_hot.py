"""Sums of one-hots: the value itself, bit for bit, for every class inside and outside of the range."""

import pytest
import torch
from graphs import trace
from simulate import run_global
from zoo_steps import shared_case

from graphacc.graph import Kind, Phase
from graphacc.passes.one_hot import SUM_ONE_HOTS
from graphacc.passes.runner import run_passes

aten = torch.ops.aten
CLASSES = 5


def rewritten(function, *tensors) -> int:
    """How many sums are left of a function that has one; its result keeps its bits."""
    step = trace(function, [(Kind.BATCH, str(i), x) for i, x in enumerate(tensors)], [(Kind.USER, "sum")], Phase.BACKWARD)
    (expected,) = run_global(step, tensors)
    step, _ = run_passes(step, [SUM_ONE_HOTS])
    (got,) = run_global(step, tensors)
    assert got.shape == expected.shape and torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    return sum(node.target is aten.sum.dim_IntList for node in step.graph.nodes)


INDEX, MASK, VALUE = torch.tensor([[0], [4], [-100], [5], [2], [-1]]), torch.tensor([[True], [True], [True], [False], [False], [True]]), torch.tensor(-0.25)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("value", [-0.25, float("nan"), float("inf")])
def test_the_sum_is_the_value(keepdim, value):
    def masked(index, mask, value):
        row = aten.where.self(aten.bitwise_and.Tensor(aten.eq.Tensor(aten.arange.start_step(0, CLASSES), index), mask), value, aten.full.default([], 0.0))
        return (aten.sum.dim_IntList(row, [1], keepdim),)

    def plain(index, value):
        row = aten.where.self(aten.eq.Tensor(index, aten.arange.default(CLASSES)), value, aten.full.default([], 0.0))
        return (aten.sum.dim_IntList(row, [-1], keepdim),)

    assert rewritten(masked, INDEX, MASK, torch.tensor(value)) == 0
    assert rewritten(plain, INDEX, torch.tensor(value)) == 0
    assert rewritten(plain, INDEX, torch.full((6, 1), value)) == 0


@pytest.mark.parametrize(
    "row",
    [
        lambda index, value: aten.where.self(aten.eq.Tensor(aten.arange.default(CLASSES), index), value, aten.full.default([], 1.0)),
        lambda index, value: aten.where.self(aten.eq.Tensor(aten.arange.start_step(0, 2 * CLASSES, 2), index), value, aten.full.default([], 0.0)),
        lambda index, value: aten.where.self(aten.ge.Tensor(aten.arange.default(CLASSES), index), value, aten.full.default([], 0.0)),
        lambda index, value: aten.where.self(aten.eq.Tensor(aten.arange.default(CLASSES), index), aten.expand.default(value, [6, CLASSES]), aten.full.default([], 0.0)),
    ],
    ids=["another zero", "every second class", "not equal", "a value for each class"],
)
def test_other_sums_stay(row):
    assert rewritten(lambda index, value: (aten.sum.dim_IntList(row(index, value), [-1], True),), INDEX, VALUE) == 1


def test_a_sum_over_all_dims_stays():
    def row(index, value):
        return aten.where.self(aten.eq.Tensor(aten.arange.default(CLASSES), index), value, aten.full.default([], 0.0))

    assert rewritten(lambda index, value: (aten.sum.dim_IntList(row(index, value), None),), INDEX, VALUE) == 1
    assert rewritten(lambda index, value: (aten.sum.dim_IntList(row(index, value), [0, 1]),), INDEX, VALUE) == 1


def test_no_pass_over_the_classes_is_left_of_a_cross_entropy():
    """The zoo's GPT-2: the two sums over the vocabulary are those of the exponentials and of the one-hot."""
    case, _, _ = shared_case("gpt2")
    step, reports = run_passes(case.joint.copy(), [SUM_ONE_HOTS])
    assert reports[0].rewrites == 1
    given = case.inputs(case.joint)
    assert all(torch.equal(x, y) for x, y in zip(run_global(step, given), run_global(case.joint, given), strict=True))
