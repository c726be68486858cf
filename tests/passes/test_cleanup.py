"""Clean-up passes: exact bit for bit, and careful about what only looks equal."""

import torch
from graphs import trace
from simulate import run_global
from zoo_steps import build, zoo_case

from graphacc.graph import Kind
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.runner import run_passes

aten, ops = torch.ops.aten, torch.ops.graphacc
PASSES = [DEAD_CODE, COMMON_SUBEXPRESSIONS]


def _cleaned(function, *tensors):
    step = trace(
        function,
        [(Kind.BATCH, str(i), x) for i, x in enumerate(tensors)],
        [(Kind.USER, str(i)) for i in range(len(function(*tensors)))],
    )
    expected = run_global(step, list(tensors))
    step, reports = run_passes(step, PASSES)
    for x, y in zip(run_global(step, list(tensors)), expected):
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    return step, [report.rewrites for report in reports]


def _count(step, target):
    return sum(node.target is target for node in step.graph.nodes)


def test_equal_calls_are_merged():
    step, rewrites = _cleaned(lambda x: ((x + 1) * 2 + (x + 1) * 2,), torch.randn(3))
    assert rewrites == [0, 2] and _count(step, aten.mul.Tensor) == 1


def test_dead_calls_are_removed_with_what_they_read():
    def function(x):
        (x.exp() + 1).sum()
        return (x * 2,)

    _, rewrites = _cleaned(function, torch.randn(3))
    assert rewrites == [3, 0]


def test_arguments_that_compare_equal_but_differ_are_kept_apart():
    step, _ = _cleaned(lambda x: (x + 1, x + 1.0, x * 0.0, x * -0.0), torch.arange(3))
    assert _count(step, aten.add.Tensor) == 2 and _count(step, aten.mul.Tensor) == 2


def test_after_keeps_equal_computations_apart():
    step, _ = _cleaned(lambda x, y: (x.exp() + ops.after(x, y).exp(),), torch.randn(3), torch.randn(2))
    assert _count(step, aten.exp.default) == 2


def test_random_streams_are_kept_apart():
    def function(key):
        return tuple(ops.random_uniform(key, stream, [4], [4], None) for stream in (0, 0, 1))

    step, _ = _cleaned(function, torch.tensor([1, 2]))
    assert _count(step, ops.random_uniform.default) == 2


def test_hidden_generators_are_left_alone():
    step = trace(
        lambda x: (torch.rand_like(x), torch.rand_like(x)),
        [(Kind.BATCH, "x", torch.ones(3))],
        [(Kind.USER, "0"), (Kind.USER, "1")],
    )
    step, _ = run_passes(step, PASSES)
    assert _count(step, aten.rand_like.default) == 2


class Dropped(torch.nn.Module):
    """Dropout twice on the same values: two streams."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x):
        h = self.inner(x)
        total = torch.nn.functional.dropout(h, 0.4) * torch.nn.functional.dropout(h, 0.4)
        return type("Output", (), {"loss": (total * total).mean()})


def test_whole_steps_stay_the_same_bit_for_bit():
    for case in (zoo_case("gpt2"), zoo_case("resnet"), build(Dropped(), {"x": torch.randn(8, 6)})):
        step = case.step
        inputs = case.inputs(step)
        expected = run_global(step, inputs)
        step, reports = run_passes(step, PASSES)
        assert sum(report.rewrites for report in reports) > 0
        for x, y, item in zip(run_global(step, inputs), expected, step.outputs):
            assert torch.equal(x, y), f"{item.kind.value} {item.target}"
