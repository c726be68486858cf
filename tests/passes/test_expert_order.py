"""Rows of experts are turned where they are smallest: which values a routing has, the choice of their order, and that nothing else changes."""

import random

import pytest
import torch
import zoo
from graphs import trace
from simulate import run_global
from zoo_steps import check, zoo_case

from graphacc.graph import Kind
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.experts import ATTACH_EXPERTS, ORDER_ROWS
from graphacc.passes.runner import run_passes

aten, ops = torch.ops.aten, torch.ops.graphacc
TURNS = (ops.sort_rows.default, ops.unsort_rows.default)
M, D, E = 16, 8, 4


def ids():
    return torch.randint(0, E, (M,), generator=torch.Generator().manual_seed(0))


def ordered(function, *tensors):
    """A step before and after the pass, with its inputs: `x`, ids, weights of experts and what else there is."""
    tensors = [torch.randn(M, D), ids(), torch.randn(E, D, D), *tensors]
    kinds = [(Kind.BATCH, "x"), (Kind.BATCH, "ids"), (Kind.PARAM, "w"), *((Kind.BATCH, f"other{i}") for i in range(len(tensors) - 3))]
    count = len(function(*tensors))
    step = trace(function, [(*kind, x) for kind, x in zip(kinds, tensors)], [(Kind.USER, str(i)) for i in range(count)])
    after, _ = run_passes(step.copy(), [ORDER_ROWS])
    for got, want in zip(run_global(after, tensors), run_global(step, tensors), strict=True):
        assert torch.equal(got, want)
    return step, after


def turned(step) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """What each change of order moves."""
    return [(node.target._opname, node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in step.graph.nodes if node.target in TURNS]


def moved(step) -> int:
    """Bytes of all changes of order."""
    return sum(node.meta["val"].nbytes for node in step.graph.nodes if node.target in TURNS)


def product(x, ids, w):
    return ops.grouped_mm(ops.sort_rows(x, ids), w, ops.expert_offsets(ids, E))


def test_weights_of_the_router_meet_rows_in_the_order_of_tokens():
    def function(x, ids, w, weights):
        rows = product(x, ids, w) * ops.sort_rows(weights.double(), ids).unsqueeze(-1)
        return (ops.unsort_rows(rows, ids).view(M // 2, 2, D).sum(1),)

    before, after = ordered(function, torch.rand(M))
    rows = torch.float32, (M, D)
    assert turned(before) == [("sort_rows", *rows), ("sort_rows", torch.float64, (M,)), ("unsort_rows", torch.float64, (M, D))]
    assert turned(after) == [("sort_rows", *rows), ("unsort_rows", *rows)]


def test_what_is_narrow_in_the_middle_is_turned_there():
    """Of several operators the cut goes through the narrowest value, wherever it is."""

    def function(x, ids, w, weights):
        rows = product(x, ids, w).double().exp()
        part = rows.float()[:, :2].sum(1, keepdim=True)
        return (ops.unsort_rows((part.double() * 2).expand(M, D).contiguous(), ids),)

    _, after = ordered(function, torch.rand(M))
    assert turned(after)[-1] == ("unsort_rows", torch.float32, (M, 1))


def test_between_two_products_nothing_is_turned():
    def function(x, ids, w):
        rows = product(x, ids, w).double()
        rows = ops.grouped_mm(rows.relu().float(), w, ops.expert_offsets(ids, E))
        return (ops.unsort_rows(rows, ids),)

    before, after = ordered(function)
    assert turned(after) == turned(before) and [node.target for node in after.graph.nodes] == [node.target for node in before.graph.nodes]


def test_a_value_that_both_orders_need_is_turned_once():
    def function(x, ids, w, grad):
        rows = product(x, ids, w)
        grad = ops.sort_rows(grad.double(), ids)
        kept = ops.unsort_rows(rows.double() * 2, ids)
        return kept, ops.unsort_rows((grad * rows).sum(1), ids), ops.grouped_mm_weight_grad(rows, (grad * 2).float(), ops.expert_offsets(ids, E))

    _, after = ordered(function, torch.randn(M, D))
    assert turned(after) == [("sort_rows", torch.float32, (M, D)), ("unsort_rows", torch.float32, (M, D)), ("sort_rows", torch.float32, (M, D))]


def test_two_routings_of_the_same_tokens():
    """What one of them puts in another order is not what the other one takes it for."""

    def function(x, ids, w, weights, others):
        weights = weights.double().unsqueeze(1)
        first = product(x, ids, w) * ops.sort_rows(weights, ids)
        tokens = ops.unsort_rows(first, ids)
        second = product(tokens.float(), others, w) * ops.sort_rows(weights, others)
        both = ops.sort_rows(ops.unsort_rows(second, others) * tokens, ids)
        return ops.unsort_rows(both * first, ids), ops.unsort_rows(second * ops.sort_rows(tokens, others), others), both.sum(0)

    before, after = ordered(function, torch.rand(M), torch.randint(0, E, (M,), generator=torch.Generator().manual_seed(1)))
    assert len(turned(after)) < len(turned(before))


def test_a_bias_is_looked_up_by_the_ids_in_either_order():
    def function(x, ids, w, bias, weights):
        rows = product(x, ids, w) + bias[ops.sort_rows(ids, ids)]
        return (ops.unsort_rows(rows * ops.sort_rows(weights, ids).unsqueeze(1), ids),)

    _, after = ordered(function, torch.randn(E, D), torch.rand(M))
    assert [name for name, _, _ in turned(after)] == ["sort_rows", "unsort_rows"]


OTHERS = {
    "a sum over rows so far": lambda rows, other: rows.cumsum(0),
    "rows of another order": lambda rows, other: rows + other,
    "the mean of all rows": lambda rows, other: rows - rows.mean(0),
    "rows as a matrix": lambda rows, other: rows @ rows.t() @ rows,
    "rows along another dim": lambda rows, other: rows[:, 0].double() + torch.ones(M, M, dtype=torch.float64),
    "rows repeated along a new dim": lambda rows, other: rows[:, 0].expand(M, M).contiguous(),
    "some of the rows": lambda rows, other: torch.cat([rows[:4], rows[4:]]),
    "rows beside others": lambda rows, other: torch.cat([rows, other]),
    "a softmax over rows": lambda rows, other: rows.softmax(0),
    "rows turned over": lambda rows, other: rows.flip(0),
    "another table": lambda rows, other: other[rows.abs().long().clamp(max=3)[:, 0]],
    "rows as the table": lambda rows, other: rows[(other.abs().long() % M)[:, 0]],
    "a transposition and back": lambda rows, other: (rows.t().contiguous() * 2).t().contiguous(),
    "all elements in a row": lambda rows, other: rows.view(-1).cumsum(0).view(M, D),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_sees_more_than_a_row_stays_in_its_order(name):
    """Beside operators that could be done in the order of tokens, where they would cost less: the results are those of before (`ordered`)."""

    def function(x, ids, w, other, weights):
        rows = OTHERS[name](product(x, ids, w), other)
        if rows.shape[0] != M:
            rows = rows[:M]
        rows = rows.double() * (ops.sort_rows(weights, ids).unsqueeze(-1) if rows.dim() == 2 else 1.0)
        return ops.unsort_rows(rows, ids), rows.sum(0)

    before, _ = ordered(function, torch.randn(M, D), torch.rand(M))
    assert turned(before)


def test_rows_that_do_not_lie_densely():
    """Views that need dense rows get them, in whichever order they are."""

    def function(x, ids, w, weights):
        rows = (product(x, ids, w) * ops.sort_rows(weights, ids).unsqueeze(1)).double()[:, ::2]
        back = ops.unsort_rows(rows, ids)
        return back.view(M // 2, D), ops.unsort_rows(rows[:, :1] + 1, ids).view(-1)

    before, after = ordered(function, torch.rand(M))
    assert moved(after) < moved(before) and aten.clone.default in {node.target for node in after.graph.nodes}


def test_a_transposed_operand_is_left():
    def function(x, ids, w, other):
        rows = product(x, ids, w) * ops.sort_rows(other.t(), ids)
        return (ops.unsort_rows(rows.double(), ids),)

    before, after = ordered(function, torch.randn(D, M))
    assert ("sort_rows", torch.float32, (M, D)) in turned(after) and moved(after) <= moved(before)


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_of_two_routings(seed):
    """Rows in three orders, of tokens and of two routings, and operators of every kind between them and within each."""
    rng = random.Random(seed)
    steps = [(rng.choice("unary binary binary column column turn turn turn product reads".split()), *(rng.randrange(1 << 20) for _ in range(4))) for _ in range(24)]
    unary = [torch.relu, lambda x: x.double(), lambda x: x.float(), lambda x: x.float().cumsum(0), lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), lambda x: x - x.mean(1, keepdim=True), lambda x: x.view(M, 2, D // 2).sum(1).repeat(1, 2)]

    def function(x, ids, w, others, column, bias):
        routed = [None, ids, others]
        pools = [[x, x * 2], [ops.sort_rows(x, ids)], [ops.sort_rows(x, others)]]
        results = []
        for kind, a, b, c, d in steps:
            order = a % 3
            pool = pools[order]
            value, other = pool[b % len(pool)], pool[c % len(pool)]
            if kind == "unary":
                pool.append(unary[d % len(unary)](value))
            elif kind == "binary":
                pool.append(value * other if d % 2 else value + other)
            elif kind == "column":
                factor = column if not order else ops.sort_rows(column, routed[order])
                pool.append(value * factor.unsqueeze(1) + (bias[routed[order or 1]] if not order else bias[ops.sort_rows(routed[order], routed[order])]))
            elif kind == "turn" and order:
                pools[0].append(ops.unsort_rows(value, routed[order]))
            elif kind == "turn":
                pools[1 + d % 2].append(ops.sort_rows(value, routed[1 + d % 2]))
            elif kind == "product" and order:
                pool.append(ops.grouped_mm(value.float(), w, ops.expert_offsets(routed[order], E)))
            elif kind == "reads":
                results.append(value.sum(0))
        return (*results, *(pool[-1] for pool in pools), *(ops.unsort_rows(pools[i][-1], routed[i]) for i in (1, 2)))

    others = torch.randint(0, E, (M,), generator=torch.Generator().manual_seed(1))
    before, after = ordered(function, others, torch.rand(M), torch.randn(E, D))
    assert 0 < moved(after) <= moved(before)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.default_cases("mixtral")
def test_models_of_transformers(name):
    """In bf16: of every layer's rows four changes of order are left, none of them in fp32, and all results keep their bits."""
    case = zoo_case(name, precision="bf16")
    before, _ = run_passes(case.step.copy(), [DEAD_CODE, COMMON_SUBEXPRESSIONS, ATTACH_EXPERTS])
    after, _ = run_passes(before.copy(), [ORDER_ROWS, DEAD_CODE, COMMON_SUBEXPRESSIONS])
    inputs = case.inputs(case.step)
    for got, want, item in zip(run_global(after, inputs), run_global(before, inputs), before.outputs, strict=True):
        assert torch.equal(got, want), f"{item.kind.value} {item.target}"
    rows = 8 * zoo.SEQ * 2, zoo.HIDDEN
    assert turned(after) == [(kind, torch.bfloat16, rows) for kind in ("sort_rows", "unsort_rows") * (2 * zoo.LAYERS)]
    assert len(turned(before)) == 6 * zoo.LAYERS


@pytest.mark.parametrize("strategy", ["ep=2", "ep=2,fsdp=2", "ep=2,tp=2", "cp=2,ep=2", "ep=2,tp=2,sequence_parallel=True", "ep=2,remat=blocks"])
@pytest.mark.default_cases("ep=2,fsdp=2", "cp=2,ep=2")
def test_ranks_exchange_narrow_rows(strategy):
    """Under sequence parallelism tokens are gathered before they are copied for their experts, and their order stays."""
    case = zoo_case("mixtral", precision="bf16")
    inputs = case.inputs(case.step)
    reports = check(case.step, strategy, inputs, run_global(case.step, inputs), tolerance=3e-2)
    (report,) = [report for report in reports if report.axis == "ep"]
    sizes = [item.size_bytes for item in report.collectives if item.kind == "all_to_all"]
    rows = 8 * zoo.SEQ * 2 * zoo.HIDDEN * 2 // (2 if "cp" in strategy else 1)
    assert max(sizes) == (2 * rows if "sequence" in strategy else rows)
    if "sequence" not in strategy and "remat" not in strategy:
        assert sizes.count(rows) == 4 * zoo.LAYERS
