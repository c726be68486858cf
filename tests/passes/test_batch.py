"""Batches that the data axes do not divide: split as far as they do, whole along the other axes, and exact."""

import functools

import pytest
import torch
import zoo
from selection import with_matrix
from simulate import run_global, simulate
from test_partition import Odd
from torch import nn
from zoo_steps import build, check, partitioned

from graphacc.graph import Kind
from graphacc.passes.batch import default_batch_dims, split_axes, unsplit_note
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.strategy import Strategy


@functools.cache
def _case(name: str, rows: int):
    model, _ = zoo.MODELS[name]()
    return build(model, zoo.batch(name, 0, rows))


CASES = [
    ("gpt2", 4, "fsdp=8"),
    ("gpt2", 4, "dp=2,fsdp=4"),
    ("gpt2", 6, "dp=2,fsdp=4,zero=1"),
    ("gpt2", 6, "fsdp=4,zero=2,dp=2"),
    ("gpt2", 3, "fsdp=2,tp=2"),
    ("gpt2", 3, "dp=2,tp=2,sequence_parallel=True"),
    ("gpt2", 3, "dp=2,cp=2"),
    ("gpt2", 3, "fsdp=2,cp=2,context=ring"),
    ("mixtral", 3, "ep=2"),
    ("mixtral", 6, "ep=2,dp=4"),
    ("mixtral", 5, "fsdp=2,ep=2,tp=2"),
    ("resnet", 4, "fsdp=8,zero=3"),
    ("resnet", 6, "dp=2,fsdp=4"),
    ("t5", 1, "dp=2,fsdp=2"),
]
DEFAULT = [CASES[i] for i in (2, 4, 7, 10, 12)]
"""Every axis and stage, attention, experts and batch norm."""


@pytest.mark.parametrize(("name", "rows", "strategy"), with_matrix(CASES, DEFAULT))
@pytest.mark.default_cases("gpt2-6-dp=2,fsdp=4,zero=1", "gpt2-3-fsdp=2,cp=2,context=ring")
def test_steps_on_batches_that_do_not_divide(name, rows, strategy):
    step = _case(name, rows).step
    inputs = _case(name, rows).inputs(step)
    check(step, strategy, inputs, run_global(step, inputs))


@pytest.mark.parametrize("strategy", ["fsdp=8", "dp=2,fsdp=4,zero=1", "dp=4"])
@pytest.mark.default_cases("fsdp=8", "dp=2,fsdp=4,zero=1")
def test_batch_norm_dropout_and_ignored_labels(strategy):
    labels = torch.tensor([0, -100, 3, 6, -100, 2])
    case = build(Odd(), {"x": torch.randn(6, 5), "labels": labels})
    inputs = case.inputs(case.step)
    check(case.step, strategy, inputs, run_global(case.step, inputs))


@pytest.mark.parametrize("strategy", ["fsdp=4,zero=2", "dp=2,fsdp=4", "fsdp=8,zero=1"])
@pytest.mark.default_cases("fsdp=8,zero=1")
def test_accumulated_gradients_have_the_layout_of_full_batches(strategy):
    """A full and a partial batch are accumulated into the same arrays."""
    layouts = []
    for rows in (8, 6):
        step, _ = partitioned(_case("gpt2", rows).joint, strategy)
        layouts.append({item.target: item.shards for item in step.outputs if item.kind is Kind.GRAD})
    assert layouts[0] == layouts[1]


class Pairs(nn.Module):
    """A loss of two inputs with numbers of rows of their own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, y):
        return zoo.Output(self.layer(x).sum() + self.layer(y).pow(2).sum(), None)


@pytest.mark.parametrize(
    ("rows", "strategy", "axes"),
    [
        (16, "dp=2,fsdp=4", ("fsdp", "dp")),
        (4, "dp=2,fsdp=4", ("fsdp",)),
        (6, "dp=2,fsdp=4", ("dp",)),
        (6, "dp=2,fsdp=3,ep=2", ("ep", "fsdp")),
        (20, "fsdp=8", ()),
        (1, "dp=2,fsdp=4", ()),
    ],
)
@pytest.mark.default_cases("16-dp=2,fsdp=4-axes0", "6-dp=2,fsdp=3,ep=2-axes3")
def test_a_batch_is_split_along_the_axes_with_the_largest_product(rows, strategy, axes):
    step = _case("gpt2", rows).joint
    found = split_axes(step, Strategy.parse(strategy), default_batch_dims(step))
    assert set(found.values()) == {axes}


def test_an_input_of_another_size_is_split_along_the_axes_that_divide_it_too():
    case = build(Pairs(), {"x": torch.randn(8, 2), "y": torch.randn(6, 2)})
    strategy, dims = Strategy(dp=2, fsdp=4), {"x": 0, "y": 0}
    assert split_axes(case.joint, strategy, dims) == {"x": ("fsdp", "dp"), "y": ("dp",)}
    inputs = case.inputs(case.step)
    result, _ = run_passes(case.step, build_pipeline(case.step, strategy, batch_dims=dims))
    for got, want in zip(simulate(result, strategy.mesh, inputs), run_global(case.step, inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_the_note_says_what_it_costs():
    step = _case("gpt2", 6).joint
    dims = default_batch_dims(step)
    assert unsplit_note(step, Strategy(dp=2), dims) is None
    note = unsplit_note(step, Strategy(dp=2, fsdp=4), dims)
    assert note.startswith("the batch of 6 rows ('input_ids', dim 0) is not split over fsdp=4")
    assert "about 4 times the time" in note and "a multiple of 8 rows" in note
