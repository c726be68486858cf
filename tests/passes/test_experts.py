"""Routing to experts: recognised in any code that sorts ids, kept on the ranks along data axes, and exchanged along `ep`."""

import functools
import math

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers transformers::grouped_mm_fallback)
import zoo
from graphs import trace
from simulate import run_global, simulate
from tolerances import assert_close, relative_error
from torch import nn
from zoo_steps import build, check, partitioned, zoo_case

from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.experts import ATTACH_EXPERTS, ExpertReport, find_experts
from graphacc.passes.experts.find import PRODUCTS
from graphacc.passes.partition import assign, partition
from graphacc.passes.partition.assign import ModelParallel
from graphacc.passes.partition.placement import REPLICATE, Shard
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.rules import ExpertParallel
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.strategy import Strategy

aten, collective, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.graphacc
M, D, E = 16, 8, 4
ROWS = 8 * zoo.SEQ * 2  # of the zoo's models: a batch of 8, 2 experts per token


def ids(size=M, experts=E, seed=0):
    return torch.randint(0, experts, (size,), generator=torch.Generator().manual_seed(seed))


# Operators


def test_unsort_undoes_sort_and_offsets_end_each_expert():
    rows, routed = torch.randn(M, D), ids()
    ordered = ops.sort_rows(rows, routed)
    assert torch.equal(ops.unsort_rows(ordered, routed), rows)
    offsets, start = ops.expert_offsets(routed, E).tolist(), 0
    for expert, end in enumerate(offsets):
        assert torch.equal(ordered[start:end], rows[routed == expert])
        start = end
    assert start == M


def test_products_leave_rows_of_no_expert_at_zero():
    rows, weight, offsets = torch.randn(M, D), torch.randn(E, D, 3), torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    product = ops.grouped_mm(rows, weight, offsets)
    assert torch.equal(product[10:], torch.zeros(6, 3)) and torch.equal(product[3:7], rows[3:7] @ weight[2])
    grad = torch.randn(M, 3)
    gradient = ops.grouped_mm_weight_grad(rows, grad, offsets)
    assert torch.equal(gradient[1], torch.zeros(D, 3)) and torch.equal(gradient[3], rows[7:10].T @ grad[7:10])


def test_full_buckets_leave_rows_out():
    routed = torch.tensor([0, 1, 2, 0, 1, 3, 9])  # 9 has no bucket
    rows = torch.arange(1.0, 8.0)
    buckets = ops.bucket_rows(rows, routed, 2, 2, 3, -1)
    assert buckets.tolist() == [[1, 2, 4], [3, 6, -1]]
    assert ops.unbucket_rows(buckets, routed, 2).tolist() == [1, 2, 3, 4, 0, 6, 0]


# Recognition


@functools.cache
def zoo_values(name: str) -> tuple:
    """A model's case, inputs of its step, and what one device gives."""
    case = zoo_case(name)
    inputs = case.inputs(case.step)
    return case, inputs, run_global(case.step, inputs)


def attach(step):
    step, reports = run_passes(step, [DEAD_CODE, COMMON_SUBEXPRESSIONS, ATTACH_EXPERTS])
    return step, reports[-1].details


def targets(step):
    return [node.target for node in step.graph.nodes]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.default_cases("mixtral")
def test_models_of_transformers(name):
    """The loss and the outputs keep their bits."""
    case, inputs, expected = zoo_values(name)
    step, report = attach(case.step)
    for got, want, item in zip(run_global(step, inputs), expected, step.outputs, strict=True):
        same = torch.equal(got, want) if item.kind in (Kind.LOSS, Kind.USER) else relative_error(got, want) <= 1e-6
        assert same, f"{item.kind.value} {item.target}"
    assert isinstance(report, ExpertReport) and not report.missed
    assert [item.what for item in report.found] == [f"{ROWS} rows to 4 experts"] * 2
    left = {str(target) for target in targets(step)} & {"aten.sort.default", "transformers.grouped_mm_fallback.default"}
    assert not left and targets(step).count(ops.grouped_mm.default) == 2 * 4  # up and down, forward and backward
    assert len(find_experts(step)) == 4


class Loss:
    def __init__(self, loss):
        self.loss, self.logits = loss, None


class Plain(nn.Module):
    """A mixture of experts as one writes it by hand, in the ways in which rows are found and put back."""

    def __init__(self, way: str, top: int = 3, experts: int = E):
        super().__init__()
        self.way, self.top, self.experts = way, top, experts
        self.gate = nn.Linear(D, experts, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(experts, D, D)), nn.Parameter(torch.randn(experts, D, D))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.top, dim=-1)
        routed = chosen.flatten()
        found, order = torch.sort(routed, stable=True)
        ends = torch.histc((routed if self.way == "put" else found).float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        rows = x.repeat_interleave(self.top, 0)[order] if self.way == "put" else x[order // self.top]
        rows = self.product(torch.relu(self.product(rows, self.up, ends)), self.down, ends)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        return Loss(self.put_back(rows, order, x).square().mean())

    def product(self, rows, weight, ends):
        if self.way == "native":  # torch's own takes bf16
            return torch._grouped_mm(rows.bfloat16(), weight.bfloat16(), offs=ends).float()
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=ends)

    def put_back(self, rows, order, x):
        if self.way == "add":
            return torch.zeros_like(x).index_add(0, order // self.top, rows)
        if self.way == "argsort":
            rows = rows[order.argsort()]
        elif self.way in ("put", "native"):
            rows = torch.zeros_like(rows).index_put((order,), rows)
        elif self.way == "unknown":
            rows = rows[order.argsort()] + order.unsqueeze(-1)
        return rows.view(-1, self.top, D).sum(1)


def plain_case(way: str, **options):
    torch.manual_seed(1)
    return build(Plain(way, **options), {"x": torch.randn(8, D)})


@pytest.mark.parametrize(("way", "top"), [("add", 3), ("argsort", 2), ("put", 3), ("add", 1), ("native", 2)])
@pytest.mark.default_cases("add-3", "add-1")
def test_code_written_by_hand(way, top):
    case = plain_case(way, top=top)
    inputs = case.inputs(case.joint)
    expected = run_global(case.joint, inputs)
    step, report = attach(case.joint)
    assert [item.what for item in report.found] == [f"{8 * top} rows to 4 experts"] and not report.missed
    assert targets(step).count(ops.grouped_mm.default) == 3 and not {str(target) for target in targets(step)} & set(PRODUCTS)
    assert not {aten.sort.stable, aten.sort.default} & set(targets(step))
    for got, want in zip(run_global(step, inputs), expected, strict=True):
        assert relative_error(got, want) <= (1e-2 if way == "native" else 1e-6)
    for strategy in ("dp=2", "fsdp=4", "ep=2,fsdp=2"):
        case = plain_case(way, top=top)
        inputs, tolerance = case.inputs(case.step), 3e-2 if way == "native" else 1e-4
        for report in check(case.step, strategy, inputs, run_global(case.step, inputs), tolerance=tolerance):
            assert not report.forced, report


@pytest.mark.matrix
def test_what_is_not_known_is_left_and_right():
    case = plain_case("unknown")
    step, report = attach(case.joint)
    assert [item.attached for item in report.found] == [False] * len(report.found) and len(report.found) > 1
    assert "uses its order in a way that is not known" in report.missed[0].what
    assert ops.sort_rows.default not in targets(step)
    case = plain_case("unknown")
    inputs = case.inputs(case.step)
    check(case.step, "dp=2", inputs, run_global(case.step, inputs), tolerance=1e-4)
    with pytest.raises(StrategyError, match="how it routes rows to them is not known"):
        partitioned(plain_case("unknown").joint, "ep=2")


def test_a_sort_that_routes_nothing_is_left():
    def function(x, y):
        order = x.sort()[1]
        return (y[order],)

    step = trace(function, [(Kind.BATCH, "x", ids()), (Kind.BATCH, "y", torch.randn(M, D))], [(Kind.USER, "0")])
    step, report = attach(step)
    assert report is None and aten.sort.default in targets(step)


# Data axes


def products(step, phase=Phase.FORWARD):
    return [node for node in step.graph.nodes if node.target is ops.grouped_mm.default and node.meta["phase"] is phase]


def num_rows(node) -> int:
    return node.args[0].meta["val"].shape[0]


def flops(step) -> int:
    """Of the experts' products, as if every row belonged to an expert."""
    found = [node for node in step.graph.nodes if node.target in (ops.grouped_mm.default, ops.grouped_mm_weight_grad.default)]
    return sum(2 * num_rows(node) * node.args[0].meta["val"].shape[1] * node.meta["val"].shape[-1] for node in found)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"), [("mixtral", "dp=2", 2), ("qwen3_moe", "fsdp=4", 4), ("mixtral", "dp=2,fsdp=2,zero=2", 4)]
)
def test_experts_are_not_replicated_along_data_axes(name, strategy, ranks):
    case = zoo_values(name)[0]
    whole = flops(attach(case.step)[0])
    step, reports = partitioned(case.step, strategy)
    assert whole and flops(step) * ranks == whole
    assert {num_rows(node) for node in products(step)} == {ROWS // ranks}
    assert not any(report.forced for report in reports)
    gathered = [item for report in reports for item in report.collectives if item.kind == "all_gather"]
    params = {item.target for item in step.inputs if item.kind is Kind.PARAM}
    assert len(gathered) <= 2 * len(params), "parameters alone are gathered"


def _mixed(x, w, chosen, y):
    """Between the routing there and back: an operator along the rows, whole rows read outside, and rows of another order."""
    rows = ops.grouped_mm(ops.sort_rows(x, chosen), w, ops.expert_offsets(chosen, E))
    rows = rows.cumsum(0) + y
    return ops.unsort_rows(rows, chosen), rows.mean(0), rows.sum(0), ops.expert_offsets(chosen, E)


@pytest.mark.parametrize("experts", [None, ExpertParallel()], ids=["data", "ep"])
def test_operators_that_see_the_order_get_that_of_one_device(experts):
    tensors = [torch.randn(M, D), torch.randn(E, D, D), ids(), torch.randn(M, D)]
    kinds = [Kind.BATCH, Kind.PARAM, Kind.BATCH, Kind.BATCH]
    step = trace(_mixed, [(kind, name, x) for kind, name, x in zip(kinds, "xwcy", tensors)], [(Kind.USER, str(i)) for i in range(4)])
    expected = run_global(step, tensors)
    placed = {item.name: Shard(0) for item in step.inputs if item.kind is Kind.BATCH or experts}
    step, report = partition(step, "ep", 2, placed, {}, lambda shape: None, experts=experts)
    assert any("cumsum" in item.operator for item in report.forced)
    for got, want in zip(simulate(step, {"ep": 2}, tensors), expected, strict=True):
        assert_close(got, want)


# Expert parallelism


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mixtral", "ep=2"),
        ("mixtral", "ep=2,fsdp=2"),
        ("mixtral", "cp=2,tp=2,ep=2"),
        ("qwen3_moe", "ep=4"),
        ("qwen3_moe", "ep=2,dp=2,fsdp=2,zero=1"),
    ],
)
@pytest.mark.default_cases("mixtral-ep=2", "qwen3_moe-ep=4")
def test_expert_parallel(name, strategy):
    case, inputs, expected = zoo_values(name)
    reports = check(case.step, strategy, inputs, expected, tolerance=1e-4)
    (report,) = [report for report in reports if report.axis == "ep"]
    cp = Strategy.parse(strategy).cp
    assert_exchanges(report, ROWS * zoo.HIDDEN * 4 // cp)
    gathered = {move.role for move in report.plan.moves if move.collective == "all_gather"}
    assert not report.forced and gathered <= {Role.WEIGHT, Role.STATE} and bool(gathered) == (Strategy.parse(strategy).zero_stage > 0)


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2,sequence_parallel=True", "tp=2,ep=2", "tp=2,sequence_parallel=True,ep=2,fsdp=2"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.default_cases("mixtral-tp=2", "qwen3_moe-tp=2,sequence_parallel=True", "mixtral-tp=2,sequence_parallel=True,ep=2,fsdp=2")
def test_experts_are_columns_and_rows_along_tp(name, strategy):
    """As one MLP is, of every expert: its activations are summed once forward and once backward, whatever the number of a token's experts."""
    case, inputs, expected = zoo_values(name)
    reports = check(case.step, strategy, inputs, expected, tolerance=1e-4)
    (report,) = [report for report in reports if report.axis == "tp"]
    assert not report.forced
    step, _ = partitioned(case.step, strategy)
    experts = find_experts(attach(case.step)[0])
    for item in step.inputs:
        if item.target in experts:
            assert [shard.dim for shard in item.shards if shard.axis == "tp"] == [1 if "up" in item.target else 2], item.target
    activations = 8 * zoo.SEQ * zoo.HIDDEN * 4  # of one token each, not of ROWS
    sums = [item for item in report.collectives if item.kind in ("all_reduce", "reduce_scatter") and item.phase != "update"]
    assert max(item.size_bytes for item in sums) == activations
    assert sum(item.size_bytes == activations for item in sums) == 4 * zoo.LAYERS + 2, "attention and experts, forward and backward; lookups, and the head's input"
    gathers = [item.size_bytes for item in report.collectives if item.kind == "all_gather"]
    assert bool(gathers) == ("sequence" in strategy) and max(gathers, default=0) <= activations


@pytest.mark.parametrize(("experts", "collective"), [(2, "all_reduce"), (D, "all_gather")])
def test_a_router_is_not_gathered_for_its_gradient(experts, collective):
    """Each rank makes that of its own tokens, and the sum of these is far smaller than the tokens; that of other weights is made whole at once."""
    x, grad = torch.randn(32 * D, D), torch.randn(32 * D, experts)
    step = trace(lambda x, grad: x.t() @ grad, [(Kind.BATCH, "x", x), (Kind.BATCH, "grad", grad)], [(Kind.GRAD, "w")])
    for node in step.graph.nodes:
        node.meta["phase"] = Phase.BACKWARD
    placed, model = {item.name: Shard(0) for item in step.inputs}, ModelParallel(resolve=lambda shape: None, gathers_sequences=True)
    plan = assign(step, "tp", 2, placed, {(Kind.GRAD, "w"): REPLICATE}, lambda shape: None, model)
    assert {move.collective for move in plan.moves} == {collective}
    step, _ = partition(step, "tp", 2, placed, {(Kind.GRAD, "w"): REPLICATE}, lambda shape: None, model)
    assert_close(simulate(step, {"tp": 2}, [x, grad])[0], x.t() @ grad)


def assert_exchanges(report, rows_bytes: int) -> None:
    """Per layer: rows there and back in each direction of the step, and ids once."""
    exchanges = [item for item in report.collectives if item.kind == "all_to_all"]
    forward, backward = (
        sorted((item.size_bytes for item in exchanges if item.phase == phase), reverse=True) for phase in ("forward", "backward")
    )
    assert forward[:4] == backward[:4] == [rows_bytes] * 4, "two exchanges of rows per layer forward, two backward"
    assert (len(forward), len(backward)) == (6, 4) and max(forward[4:]) * 8 <= rows_bytes


def test_experts_and_their_state_lie_on_one_rank_each():
    case = zoo_values("mixtral")[0]
    step, _ = partitioned(case.step, "ep=2")
    experts = find_experts(step)
    for item in (*step.inputs, *step.outputs):
        if item.kind in (Kind.PARAM, Kind.GRAD, Kind.STATE) and item.shape:
            owner = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
            assert [(shard.axis, shard.dim) for shard in item.shards] == ([("ep", 0)] if owner in experts else []), item.target
    assert flops(step) == flops(attach(case.step)[0]), "buffers have room for every row of every rank"


def test_a_batch_that_every_rank_has_whole():
    """Rows are not exchanged then; the experts' weights are gathered, and reported."""
    case = plain_case("argsort", top=2)
    inputs = case.inputs(case.step)
    expected = run_global(case.step, inputs)
    step, reports = run_passes(case.step, build_pipeline(case.step, Strategy(ep=2), batch_dims={"x": None}))
    (report,) = [item.details for item in reports if item.name == "partition-ep"]
    assert report.count("all_to_all") == 0 and {item.operator for item in report.forced} == {"graphacc.grouped_mm.default"}
    for got, want in zip(simulate(step, {"ep": 2}, inputs), expected, strict=True):
        assert relative_error(got, want) <= 1e-4


def _doubled(x, chosen):
    return ops.unsort_rows(ops.sort_rows(x, chosen) * 2, chosen), ops.expert_offsets(chosen, E)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 2.0, None])
def test_capacity(factor):
    """Every rank sends its first rows for each rank, up to the capacity; the others give zero."""
    x, chosen = torch.randn(M, D), ids(seed=3)
    step = trace(_doubled, [(Kind.BATCH, "x", x), (Kind.BATCH, "c", chosen)], [(Kind.USER, "0"), (Kind.USER, "1")])
    placed = {item.name: Shard(0) for item in step.inputs}
    plan = ExpertParallel(capacity_factor=factor, multiple=2)
    step, _ = partition(step, "ep", 2, placed, {}, lambda shape: None, experts=plan)
    got, _ = simulate(step, {"ep": 2}, [x, chosen])
    local = M // 2
    capacity = local if factor is None else min(local, 2 * math.ceil(factor * local / 2 / 2))
    assert plan.capacity(local, 2) == capacity
    kept = torch.zeros(M, dtype=torch.bool)
    for rank in range(2):
        for target in range(2):
            mine = [i for i in range(rank * local, (rank + 1) * local) if chosen[i] // 2 == target]
            kept[mine[:capacity]] = True
    assert torch.equal(got, torch.where(kept[:, None], 2 * x, 0.0))
    assert bool(kept.all()) == (factor not in (0.5, 1.0))


def test_dropping_is_reported_and_makes_buffers_smaller():
    case, inputs, expected = zoo_values("mixtral")
    step, (report, _) = partitioned(case.step, "ep=2,fsdp=2,capacity_factor=1.25")
    assert len(report.notes) == 2 and "at most 80 of their 128 rows (capacity_factor=1.25)" in report.notes[0]
    assert {num_rows(node) for node in products(step)} == {2 * 80 // 2}
    loss = [item.kind for item in step.outputs].index(Kind.LOSS)
    got = simulate(step, {"ep": 2, "fsdp": 2}, inputs)
    assert 0 < abs(got[loss] - expected[loss]) < 0.2 * expected[loss]


# Errors


def test_experts_that_do_not_divide():
    with pytest.raises(StrategyError, match=r"ep=2 does not divide the 3 experts of '(up|down)' \[3, 8, 8\]: choose ep out of 1, 3"):
        partitioned(plain_case("add", top=2, experts=3).joint, "ep=2")


def test_a_model_without_experts():
    step = zoo_case("gpt2").joint
    with pytest.raises(StrategyError, match="ep=2 spreads experts over devices, but no grouped product .* leave ep=1"):
        build_pipeline(step, Strategy(ep=2), batch_dims=default_batch_dims(step))


def test_capacity_factors():
    assert Strategy.parse("ep=2,capacity_factor=1.25").capacity_factor == 1.25
    assert str(Strategy(ep=2, capacity_factor=1.5)) == "ep=2,capacity_factor=1.5"
    with pytest.raises(StrategyError, match="capacity_factor=0 must be a number above 0"):
        Strategy(ep=2, capacity_factor=0)
    with pytest.raises(StrategyError, match="over the ep axis, which has size 1: set ep"):
        Strategy(capacity_factor=1.5)
    with pytest.raises(StrategyError, match="needs a number"):
        Strategy.parse("ep=2,capacity_factor=some")
