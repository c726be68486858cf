"""Sums of products become one product where its operands are smaller, and stay what they are elsewhere."""

import pytest
import torch
from graphs import trace
from simulate import run_global
from tolerances import assert_close

from graphacc.graph import Kind, Phase
from graphacc.passes.join_products import JOIN_PRODUCTS
from graphacc.passes.runner import run_passes

aten = torch.ops.aten
STEPS, ROWS, OUT, IN = 4, 2, 16, 8  # time steps, rows of a step, and the shape of the weight


def _joined(function, rows: int = ROWS) -> tuple[int, int]:
    """Products and additions that are left of a function of STEPS gradients [rows, OUT] and as many inputs [rows, IN]."""
    tensors = [torch.randn(rows, OUT) for _ in range(STEPS)] + [torch.randn(rows, IN) for _ in range(STEPS)]

    def flat(*tensors):
        return (function(tensors[:STEPS], tensors[STEPS:]),)

    inputs = [(Kind.BATCH, str(i), x) for i, x in enumerate(tensors)]
    step = trace(flat, inputs, [(Kind.USER, "sum")], Phase.BACKWARD)
    (expected,) = run_global(step, tensors)
    step, _ = run_passes(step, [JOIN_PRODUCTS])
    assert_close(run_global(step, tensors)[0], expected)
    return tuple(sum(node.target is target for node in step.graph.nodes) for target in (aten.mm.default, aten.add.Tensor))


def _transposed(x):
    return aten.permute.default(x, [1, 0])


def _weight(g, x):
    """A weight's gradient, [OUT, IN]."""
    return aten.mm.default(_transposed(g), x)


def _sum(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize(
    "term",
    [
        _weight,
        lambda g, x: aten.mm.default(_transposed(x), g),
        lambda g, x: _transposed(aten.mm.default(_transposed(x), g)),
        lambda g, x: _transposed(_transposed(_weight(g, x))),
        lambda g, x: aten.mm.default(_transposed(g) * 2, x),
    ],
    ids=["plain", "the other way", "transposed", "twice transposed", "no transposed operand"],
)
def test_a_sum_of_products_is_one_product(term):
    assert _joined(lambda gs, xs: _sum([term(g, x) for g, x in zip(gs, xs)])) == (1, 0)


def test_other_terms_of_the_sum_stay():
    assert _joined(lambda gs, xs: _sum([_weight(gs[0], xs[0]), xs[1].sum().expand(OUT, IN), _weight(gs[1], xs[1])])) == (1, 1)


def test_a_term_that_is_there_twice_stays():
    """An orthogonal parametrization's backward adds a product to itself."""
    assert _joined(lambda gs, xs: _sum([term := gs[0].sum() * xs[0].sum().expand(OUT, IN), _weight(gs[1], xs[1]), term])) == (1, 2)
    assert _joined(lambda gs, xs: _sum([term := _weight(gs[0], xs[0]), term, _weight(gs[1], xs[1])]))[0] >= 1


def test_products_of_both_directions_are_joined_by_themselves():
    def function(gs, xs):
        ways = [_weight(g, x) for g, x in zip(gs, xs)], [_transposed(aten.mm.default(_transposed(x), g.sin())) for g, x in zip(gs, xs)]
        return _sum([term for pair in zip(*ways) for term in pair])

    assert _joined(function) == (2, 1)


def test_a_product_that_is_used_elsewhere_stays():
    def function(gs, xs):
        first = _weight(gs[0], xs[0])
        return _sum([first, *(_weight(g, x) for g, x in zip(gs[1:], xs[1:]))]) * first

    assert _joined(function) == (2, 1)


@pytest.mark.parametrize("rows, left", [(5, (1, 0)), (6, (STEPS, STEPS - 1))])
def test_operands_must_be_smaller_than_the_product(rows, left):
    """5 * (16 + 8) < 16 * 8 < 6 * (16 + 8)."""
    assert _joined(lambda gs, xs: _sum([_weight(g, x) for g, x in zip(gs, xs)]), rows) == left


@pytest.mark.matrix
def test_a_long_chain_is_joined():
    """Longer than Python's stack."""
    assert _joined(lambda gs, xs: _sum([_weight(gs[i % STEPS] + i, xs[i % STEPS]) for i in range(1200)])) == (1, 1200)
