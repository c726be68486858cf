"""What partitioning must get right besides operators: ZeRO layouts, padding, optimizers, randomness, batches, errors."""

import types

import pytest
import torch
import torch.nn.functional as F
from graphs import trace
from simulate import run_global
from torch import nn
from zoo_steps import build, check, partitioned, zoo_case

from graphacc.errors import GraphError, StrategyError
from graphacc.graph import Kind, Phase
from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.zero import state_split
from graphacc.passes.pipeline import build_pipeline
from graphacc.strategy import Strategy

collective, ops, aten = torch.ops._c10d_functional, torch.ops.graphacc, torch.ops.aten


class Odd(nn.Module):
    """Dims that two, three and four ranks do not divide, batch statistics, dropout and token-weighted loss."""

    def __init__(self, classes: int = 7):
        super().__init__()
        self.first = nn.Linear(5, 9, bias=False)  # its gradient would be rounding noise before a norm
        self.norm = nn.BatchNorm1d(9)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.last = nn.Linear(9, classes, bias=False)

    def forward(self, x, labels):
        hidden = F.dropout(self.norm(self.first(x)).relu(), 0.3) * self.scale
        logits = self.last(hidden)
        return types.SimpleNamespace(loss=F.cross_entropy(logits, labels, ignore_index=-100), logits=logits)


def _odd(make_optimizer, **options):
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (12,))
    labels[[0, 1, 5]] = -100  # ranks hold different numbers of labels
    return build(Odd(), {"x": torch.randn(12, 5), "labels": labels}, make_optimizer, **options)


def _matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "muon": lambda model: torch.optim.Muon(_matrices(model), lr=1e-2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.default_cases("adamw", "muon")
def test_optimizers_on_padded_parameters(name):
    """Also those that are not element-wise: Adafactor's means over rows, Muon's matrix iteration."""
    case = _odd(OPTIMIZERS[name])
    inputs = case.inputs(case.step)
    expected = run_global(case.step, inputs)
    for strategy in ("fsdp=4,zero=3", "fsdp=3,zero=1", "dp=2,fsdp=2,zero=3", "dp=4"):
        check(case.step, strategy, inputs, expected, tolerance=1e-4)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_on_parameters_that_divide(name):
    model = types.SimpleNamespace(loss=None)

    class Even(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 12)

        def forward(self, x):
            model.loss = self.last(self.first(x).tanh()).square().mean()
            return model

    torch.manual_seed(0)
    case = build(Even(), {"x": torch.randn(8, 8)}, OPTIMIZERS[name])
    inputs = case.inputs(case.step)
    expected = run_global(case.step, inputs)
    for strategy in ("fsdp=4,zero=3", "fsdp=2,zero=2"):
        (report,) = check(case.step, strategy, inputs, expected, tolerance=1e-4)
        whole = [item for item in report.collectives if item.phase == "update" and item.kind == "all_gather"]
        if name == "muon" and strategy == "fsdp=4,zero=3":
            assert len(whole) == 2  # each matrix once, not once per iteration


def test_clipping_by_the_global_norm():
    case = zoo_case("gpt2", transform=_clipped)
    inputs = case.inputs(case.step)
    expected = run_global(case.step, inputs)
    (report,) = check(case.step, "fsdp=4,zero=3", inputs, expected)
    update = [item for item in report.collectives if item.phase == "update"]
    assert sum(item.size_bytes for item in update) < 2000, "the norm needs scalars only"


def _clipped(grads, extras):
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    return {name: g * (0.01 / (norm + 1e-6)).clamp(max=1.0) for name, g in grads.items()}


def test_dropout_is_drawn_for_the_local_samples_only():
    case = _odd(OPTIMIZERS["sgd"])
    step, _ = partitioned(case.step, "dp=2,fsdp=3,zero=3")
    drawn = [node for node in step.graph.nodes if node.target is ops.random_uniform.default]
    assert [tuple(node.meta["val"].shape) for node in drawn] == [(2, 9)]
    assert drawn[0].args[3] == [12, 9]


def test_bf16():
    case = zoo_case("gpt2", precision="bf16")
    inputs = case.inputs(case.step)
    (report,) = check(case.step, "fsdp=4,zero=3", inputs, run_global(case.step, inputs), tolerance=3e-2)
    gathered = report.size_bytes("all_gather")
    assert gathered <= 2 * 118272 / 2 * 1.05, "parameters are cast before they are gathered"


# ZeRO layouts


@pytest.mark.parametrize(
    ("shape", "ranks", "split"),
    [
        ((8, 3), 4, Shard(0)),
        ((50257, 768), 8, Shard(1)),
        ((7, 12, 24), 4, Shard(2)),
        ((3,), 2, Shard(0, padding=1)),
        ((5, 9), 4, Shard(0, padding=3)),
        ((9, 5), 4, Shard(0, padding=3)),
        ((), 2, None),
        ((0, 4), 2, None),
    ],
)
def test_layout_of_a_parameter(shape, ranks, split):
    if shape == (5, 9):
        split = Shard(1, padding=3)  # 3 of 9 is less waste than 3 of 5
    assert state_split(shape, ranks) == split


def _sources(node, placeholders):
    """The placeholder that a gather's input is made of by casts."""
    while node not in placeholders:
        node = node.args[0]
    return node


def test_zero_3_gathers_again_for_backward_and_frees_in_between():
    case = zoo_case("gpt2")
    step, _ = partitioned(case.step, "fsdp=4,zero=3,bucket_mb=0")
    params = {node: item for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    assert all(item.shards for item in params.values())
    gathers: dict = {}
    for node in step.graph.nodes:
        if node.target is collective.all_gather_into_tensor.default:
            gathers.setdefault(_sources(node.args[0], params), []).append(node)
    for param, item in params.items():
        phases = [node.meta["phase"] for node in gathers[param]]
        assert phases in ([Phase.FORWARD], [Phase.FORWARD, Phase.BACKWARD]), item.target
        if len(item.shape) == 2 and "wpe" not in item.target:
            assert len(phases) == 2, item.target
        for node in gathers[param]:
            readers = {reader.meta["phase"] for reader in _readers_through_views(node)}
            assert readers == {node.meta["phase"]}, f"{item.target}: gathered in {node.meta['phase']}, read in {readers}"
        for node in gathers[param][1:]:
            after = node.args[0]
            assert after.target is ops.after.default and after.args[1].meta["phase"] is Phase.BACKWARD


def _readers_through_views(node):
    views = (collective.wait_tensor.default, aten.view.default, aten.permute.default, aten.clone.default, aten.slice.Tensor)
    for user in node.users:
        if user.target in views:
            yield from _readers_through_views(user)
        else:
            yield user


def test_gradients_are_scattered_where_they_arise():
    case = zoo_case("gpt2")
    step, _ = partitioned(case.step, "fsdp=4,zero=3")
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    first_update = min(order[node] for node in order if node.op == "call_function" and node.meta["phase"] is Phase.UPDATE)
    scatters = [node for node in order if node.target is collective.reduce_scatter_tensor.default]
    assert scatters and all(order[node] < first_update and node.meta["phase"] is Phase.BACKWARD for node in scatters)


# Outputs, batches, errors


def _linear(x, w):
    return (x @ w).square().mean(), x @ w, (x @ w).sum(0)


def _linear_step(rows=8):
    tensors = [(Kind.BATCH, "x", torch.randn(rows, 4)), (Kind.PARAM, "w", torch.randn(4, 3))]
    return trace(_linear, tensors, [(Kind.LOSS, "loss"), (Kind.USER, "0"), (Kind.USER, "1")])


def test_what_the_user_holds_stays_split_where_a_layout_can_say_so():
    step, _ = partitioned(_linear_step(), "dp=2,fsdp=2,zero=1")
    loss, logits, sums = step.outputs
    assert [(shard.axis, shard.dim) for shard in logits.shards] == [("fsdp", 0), ("dp", 0)]
    assert loss.shards == () and sums.shards == ()


def test_any_choice_of_batch_dims_gives_the_same():
    from simulate import simulate

    from graphacc.passes.runner import run_passes

    x, w = torch.randn(8, 4), torch.randn(4, 3)
    expected = run_global(_linear_step(), [x, w])
    for dim in (None, 0, 1):
        step = _linear_step()
        step, _ = run_passes(step, build_pipeline(step, Strategy(fsdp=2), batch_dims={"x": dim}))
        for got, want in zip(simulate(step, {"fsdp": 2}, [x, w]), expected):
            torch.testing.assert_close(got, want)


def test_batch_dims_that_do_not_fit():
    step = _linear_step(rows=6)
    with pytest.raises(StrategyError, match="batch_dims names .*'y'.*, the batch has .*'x'"):
        build_pipeline(step, Strategy(dp=2), batch_dims={"y": 0})
    with pytest.raises(StrategyError, match="is 2, but that tensor has shape"):
        build_pipeline(step, Strategy(dp=2), batch_dims={"x": 2})


def test_operators_with_a_generator_of_their_own_are_refused():
    step = trace(lambda x: (x * torch.rand_like(x),), [(Kind.BATCH, "x", torch.ones(4))], [(Kind.USER, "0")])
    with pytest.raises(GraphError, match="rand_like.default, which draws from a generator of its own"):
        partitioned(step, "dp=2")


def test_an_operator_without_a_rule_is_gathered_and_reported():
    step = trace(
        lambda x: (torch.nn.functional.pdist(x), x * 2), [(Kind.BATCH, "x", torch.randn(4, 3))], [(Kind.USER, "0"), (Kind.USER, "1")]
    )
    x = torch.randn(4, 3)
    (report,) = check(step, "dp=2", [x], run_global(step, [x]))
    (forced,) = report.forced
    assert forced.operator == "aten._pdist_forward.default" and forced.shape == (4, 3) and forced.size_bytes == 48
    assert "has no partition rule" in str(forced)


def test_sort_along_the_batch_is_gathered_and_exact():
    step = trace(lambda x: (x.sort(0)[0].cumsum(0),), [(Kind.BATCH, "x", torch.randn(8))], [(Kind.USER, "0")])
    x = torch.randn(8)
    (report,) = check(step, "fsdp=2,zero=1", [x], run_global(step, [x]))
    assert [item.operator for item in report.forced] == ["aten.sort.default"]


def test_lookup_by_sample_number_stays_local():
    """x[arange(B), positions]: every sample reads its own row."""

    def function(x, positions):
        return (x[torch.arange(8), positions],)

    tensors = [torch.randn(8, 5, 3), torch.randint(0, 5, (8,))]
    step = trace(function, [(Kind.BATCH, "x", tensors[0]), (Kind.BATCH, "p", tensors[1])], [(Kind.USER, "0")])
    reports = check(step, "dp=2,fsdp=2,zero=1", tensors, run_global(step, tensors))
    assert all(not report.collectives for report in reports)
