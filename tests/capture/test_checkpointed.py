"""torch.utils.checkpoint in the user's model: what it marks, and that its regions are computed again whatever the strategy says."""

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint as checkpoints
import zoo
from simulate import run_global
from torch import nn
from zoo_steps import build

from graphacc.costs.memory import saved_for_backward
from graphacc.graph import CHECKPOINT, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.strategy import Strategy

aten = torch.ops.aten


class Blocks(nn.Module):
    """Three blocks with dropout, of which each may be checkpointed."""

    def __init__(self, how: str = "none"):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.25), nn.Linear(32, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        x = self.head.weight.sum() * 0 + x  # the reentrant form wants an argument with a gradient
        for block in self.blocks:
            x = x + self.run(block, x)
        logits = self.head(x)
        return zoo.Output(nn.functional.cross_entropy(logits, y), logits)

    def run(self, block, x):
        match self.how:
            case "none":
                return block(x)
            case "reentrant" | "plain":
                return checkpoints.checkpoint(block, x, use_reentrant=self.how == "reentrant")
            case "nested":
                return checkpoints.checkpoint(lambda v: checkpoints.checkpoint(block, v, use_reentrant=False), x, use_reentrant=False)
            case "products":
                context = functools.partial(checkpoints.create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])
            case "policy":
                context = functools.partial(checkpoints.create_selective_checkpoint_contexts, _keeps_all)
        return checkpoints.checkpoint(block, x, use_reentrant=False, context_fn=context)


def _keeps_all(ctx, operator, *args, **kwargs):
    return checkpoints.CheckpointPolicy.PREFER_SAVE


@functools.cache
def case_of(how: str):
    generator = torch.Generator().manual_seed(1)
    return build(Blocks(how), {"x": torch.randn(16, 8, generator=generator), "y": torch.randint(4, (16,), generator=generator)})


def passed(step: StepGraph, strategy: str = "") -> StepGraph:
    return run_passes(step.copy(), build_pipeline(step, Strategy.parse(strategy), batch_dims=default_batch_dims(step)))[0]


def saved(step: StepGraph, strategy: str = "") -> int:
    return sum(saved_for_backward(passed(step, strategy)).values())


@pytest.mark.parametrize("how", ["reentrant", "plain", "nested", "products", "policy"])
@pytest.mark.default_cases("reentrant", "products")
def test_the_same_bits_come_out(how):
    plain, case = case_of("none"), case_of(how)
    inputs = case.inputs(case.step)
    expected = run_global(plain.step, plain.inputs(plain.step))
    assert all(torch.equal(x, y) for x, y in zip(run_global(passed(case.step), inputs), expected, strict=True))


def test_calls_are_marked_by_the_outermost_function():
    for how in ("reentrant", "plain", "nested"):
        marks = {node.meta[CHECKPOINT].region for node in case_of(how).joint.graph.nodes if CHECKPOINT in node.meta}
        assert marks == {"checkpoint 0", "checkpoint 1", "checkpoint 2"}, how
    assert not any(CHECKPOINT in node.meta for node in case_of("none").joint.graph.nodes)


def test_what_is_kept_follows_the_model():
    kept = {how: saved(case_of(how).step) for how in ("none", "reentrant", "plain", "nested", "products", "policy")}
    assert kept["reentrant"] == kept["plain"] == kept["nested"] < 0.5 * kept["none"]
    assert kept["plain"] < kept["products"] < kept["none"]
    assert kept["policy"] == kept["none"]


def test_regions_of_the_model_come_before_those_of_the_strategy():
    """A block whose policy keeps all stays as it is; one without a word of the user's follows the strategy."""
    assert saved(case_of("none").step, "remat=blocks") == saved(case_of("plain").step)
    assert saved(case_of("policy").step, "remat=blocks") == saved(case_of("none").step)


@pytest.mark.matrix
def test_gradient_checkpointing_of_transformers():
    plain, batch = zoo.MODELS["gpt2"]()
    model, _ = zoo.MODELS["gpt2"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 renames it
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain, case = build(plain, batch), build(model, batch)
    inputs = case.inputs(case.step)
    assert saved(case.step) <= 1.05 * saved(plain.step, "remat=blocks")
    expected = run_global(passed(plain.step), inputs)
    assert all(torch.equal(x, y) for x, y in zip(run_global(passed(case.step), inputs), expected, strict=True))
