"""Collectives and place-dependent operators under shard_map on eight virtual devices.

Every device holds one row of X; a group of several axes is numbered outermost first.
"""

import jax
import numpy as np
import pytest
import torch
import torch.distributed  # registers the functional collectives
from helpers_lowering import step_graph, to_array, to_tensor
from jax.sharding import PartitionSpec as P

import graphacc.lowering
import graphacc.ops  # registers the operators
from graphacc._compat.jax_ import x64

c10d = torch.ops._c10d_functional
X = torch.arange(8 * 16, dtype=torch.float32).reshape(8, 16) % 23 - 7
SUM_GROUPS = {"dp": [[0, 4], [1, 5], [2, 6], [3, 7]], "fsdp": [[0, 1, 2, 3], [4, 5, 6, 7]], "dp+fsdp": [list(range(8))]}
PARTS = {"fsdp/2": [[0, 1], [2, 3], [4, 5], [6, 7]], "fsdp%2": [[0, 2], [1, 3], [4, 6], [5, 7]], "dp+fsdp/4": [[0, 1, 2, 3], [4, 5, 6, 7]]}
GROUPS = SUM_GROUPS | PARTS
"""Gathers, exchanges and cuts also know parts of an axis."""


def _run(function, x, *, check_vma=False):
    """`function` on every device's row, on a mesh dp=2 × fsdp=4; the rows of results stacked in device order."""
    step = step_graph(function, x[0], inside_mode=True)
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with x64():
        lowered = graphacc.lowering.lower(step)
        spec = P(("dp", "fsdp"))
        rows = jax.shard_map(lambda a: lowered(a[0])[0][None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return to_tensor(jax.jit(rows)(to_array(x)))


def _expected(group, per_group):
    """Rows of a result: `per_group(rows of the group, place in it)` for each device."""
    result = [None] * 8
    for members in GROUPS[group]:
        for place, device in enumerate(members):
            result[device] = per_group(members, place)
    return torch.stack(result)


REDUCTIONS = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0),
}


@pytest.mark.parametrize("group", SUM_GROUPS)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.default_cases("sum-dp", "avg-fsdp", "max-dp+fsdp", "product-dp")
def test_all_reduce_and_reduce_scatter(group, op):
    size = len(GROUPS[group][0])
    x = X.sign() + X % 2  # small values: products stay exact
    whole = _expected(group, lambda members, _: REDUCTIONS[op](x[members]))
    assert torch.equal(_run(lambda x: c10d.wait_tensor(c10d.all_reduce(x, op, group)), x), whole)
    block = 16 // size
    cut = _expected(group, lambda members, place: REDUCTIONS[op](x[members])[place * block : (place + 1) * block])
    assert torch.equal(_run(lambda x: c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, size, group)), x), cut)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_reduce_of_bool_and_integers(op):
    x = X.long() * 2**33
    assert torch.equal(
        _run(lambda x: c10d.all_reduce(x, op, "fsdp"), x), _expected("fsdp", lambda m, _: REDUCTIONS[op](x[m]).long())
    )
    flags = X > 3
    expected = _expected("fsdp", lambda m, _: flags[m].all(0) if op == "min" else flags[m].any(0))
    assert torch.equal(_run(lambda x: c10d.all_reduce(x, op, "fsdp"), flags), expected)


@pytest.mark.parametrize("group", GROUPS)
def test_all_gather(group):
    size = len(GROUPS[group][0])
    got = _run(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, group)), X)
    assert torch.equal(got, _expected(group, lambda members, _: X[members].reshape(-1)))
    rows = _run(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x.view(0, 3), size, group)), X[:, :0])
    assert rows.numel() == 0 and rows.shape[-1] == 3


@pytest.mark.parametrize("group", GROUPS)
def test_all_to_all(group):
    size = len(GROUPS[group][0])
    splits = [16 // size] * size
    got = _run(lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, splits, splits, group)), X)
    expected = _expected(group, lambda members, place: X[members].reshape(size, size, -1)[:, place].reshape(-1))
    assert torch.equal(got, expected)


def test_coalesced_collectives():
    def both(x):
        reduced = c10d.all_reduce_coalesced([x, x * 2], "sum", "dp")
        gathered = c10d.all_gather_into_tensor_coalesced([x], 2, "dp")
        scattered = c10d.reduce_scatter_tensor_coalesced([x], "sum", 2, "dp")
        return torch.cat([*map(c10d.wait_tensor, (*reduced, *gathered, *scattered))])

    total = lambda members: X[members].sum(0)  # noqa: E731
    expected = _expected(
        "dp", lambda m, place: torch.cat([total(m), 2 * total(m), X[m].reshape(-1), total(m)[place * 8 : place * 8 + 8]])
    )
    assert torch.equal(_run(both, X), expected)


def test_broadcast():
    assert torch.equal(_run(lambda x: c10d.broadcast(x, 2, "fsdp"), X), _expected("fsdp", lambda members, _: X[members[2]]))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.default_cases("dp", "fsdp/2")
def test_axis_index_and_shard(group):
    size = len(GROUPS[group][0])
    places = _run(lambda x: torch.ops.graphacc.axis_index(size, group) + x.long() * 0, X[:, :1])
    assert torch.equal(places, _expected(group, lambda _, place: torch.tensor([place])))
    for outer in (1, 2):
        got = _run(lambda x: torch.ops.graphacc.shard(x, 0, outer, size, group), X)
        blocks = lambda device, place: X[device].reshape(outer, size, -1)[:, place].reshape(-1)  # noqa: E731
        assert torch.equal(got, _expected(group, lambda members, place: blocks(members[place], place)))


@pytest.mark.parametrize("group", PARTS)
def test_a_sum_over_a_part_of_an_axis_is_refused(group):
    with pytest.raises(Exception, match="part of its axis's ranks"):
        _run(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", group)), X)


def test_a_sum_is_known_to_be_equal_everywhere():
    """With check_vma, JAX itself proves that a result may leave the shard_map as replicated."""
    step = step_graph(lambda x: c10d.wait_tensor(c10d.all_reduce(x.sum(), "sum", "dp+fsdp")) * 2, X[0])
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with x64():
        lowered = graphacc.lowering.lower(step)
        total = jax.jit(jax.shard_map(lambda a: lowered(a[0])[0], mesh=mesh, in_specs=P(("dp", "fsdp")), out_specs=P()))(
            to_array(X)
        )
    assert np.asarray(total) == 2 * X.sum().item()


def test_unequal_splits_are_refused():
    with pytest.raises(graphacc.lowering.interpret.LoweringError, match="unequal splits"):
        _run(lambda x: c10d.all_to_all_single(x, [10, 6], [10, 6], "dp"), X)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(graphacc.lowering.interpret.LoweringError, match="'median' has no lowering"):
        _run(lambda x: c10d.all_reduce(x, "median", "dp"), X)


@pytest.mark.parametrize("group", SUM_GROUPS)
@pytest.mark.parametrize("op", ("max", "min"))
def test_a_nan_of_one_device_wins(group, op):
    x = X.clone()
    x[3, 5], x[6, :4] = torch.nan, torch.nan
    whole = _expected(group, lambda members, _: REDUCTIONS[op](x[members]))
    got = _run(lambda x: c10d.wait_tensor(c10d.all_reduce(x, op, group)), x)
    assert torch.allclose(got, whole, rtol=0, atol=0, equal_nan=True)
