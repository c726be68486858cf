"""One part of a batch's step: what the parts give together is what the step gives, for every model of the zoo whose parts do not need each other."""

import pytest
import torch
import zoo
from selection import with_matrix
from simulate import run_global
from tolerances import relative_error
from torch import nn
from zoo_steps import build, shared_case

from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.microbatches import NUMBER, Inseparable, Microbatches, in_microbatches, joined

APART = {
    "mixtral": "aten.mul.Tensor",  # how evenly tokens go to experts
    "qwen3_moe": "aten.mul.Tensor",
    "resnet": "aten.sub.Tensor",  # statistics of BatchNorm
    "clip": "aten.mm.default",  # every text with every image
}


def together(parts: Microbatches, step: StepGraph, values: dict[tuple[Kind, str], torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of `step`, of what its parts give."""
    given = []
    for number in range(parts.count):
        env = {**values, (Kind.BATCH, NUMBER): torch.tensor(number)}
        env |= {(Kind.BATCH, target): values[Kind.BATCH, source] for target, source in parts.whole.items()}
        env |= {(Kind.BATCH, target): values[Kind.BATCH, target].chunk(parts.count, split.dim)[number] for target, split in parts.splits.items()}
        given.append(run_global(parts.step, [env[item.kind, item.target].to(item.dtype) for item in parts.step.inputs]))
    how = [parts.results.get(item.target, "sum") if item.kind is Kind.USER else "sum" for item in step.outputs]
    return [joined(values, one) for values, one in zip(zip(*given, strict=True), how, strict=True)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", with_matrix([name for name in zoo.MODELS if name not in APART], ["gpt2", "t5", "tied_mlp"]))
@pytest.mark.default_cases("gpt2-4", "tied_mlp-2")
def test_the_parts_give_what_the_batch_gives(name, count):
    case, _, _ = shared_case(name)
    parts = in_microbatches(case.joint, count, default_batch_dims(case.joint))
    assert not parts.repeated
    assert parts.step.graph is not case.joint.graph
    for item, got, want in zip(case.joint.outputs, together(parts, case.joint, case.values), run_global(case.joint, case.inputs(case.joint)), strict=True):
        assert relative_error(got, want) < 1e-5 or (got - want).abs().max() < 1e-7, (item.kind, item.target)  # a key's bias has rounding for a gradient


@pytest.mark.parametrize("name", with_matrix(APART, ["mixtral"]))
def test_what_needs_the_whole_batch_says_where(name):
    joint = shared_case(name)[0].joint
    with pytest.raises(Inseparable, match=APART[name]) as found:
        in_microbatches(joint, 2, default_batch_dims(joint))
    assert f"modeling_{name}.py:" in str(found.value)


class Result:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Small(nn.Module):
    """Gives one more result, whose kind is of interest."""

    def __init__(self, more):
        super().__init__()
        self.embedding, self.linear, self.dropout, self.more = nn.Embedding(7, 6), nn.Linear(6, 5), nn.Dropout(0.5), more

    def forward(self, x, y):
        out = self.dropout(self.linear(self.embedding(x)))
        return Result(nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()), self.more(out, y))


RESULTS = {
    "split, and flattened behind another dim": lambda out, y: out.transpose(0, 1).flatten(0, 1),
    "a sum": lambda out, y: out.sum((0, 1)),
    "a maximum": lambda out, y: out.amax((0, 1)),
    "a minimum of whole numbers": lambda out, y: out.argmax(-1).amin(0),
    "of the batch alone": lambda out, y: (y != -100).sum(),
    "the same for all": lambda out, y: torch.arange(5.0),
}


@pytest.mark.parametrize("more", RESULTS.values(), ids=RESULTS)
def test_results_are_put_together(more):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(7, (8, 3), generator=generator), torch.randint(5, (8, 3), generator=generator)
    case = build(Small(more), {"x": x, "y": y.masked_fill(torch.rand(8, 3, generator=generator) < 0.6, -100)})
    parts = in_microbatches(case.joint, 4, default_batch_dims(case.joint))
    for item, got, want in zip(case.joint.outputs, together(parts, case.joint, case.values), run_global(case.joint, case.inputs(case.joint)), strict=True):
        assert got.dtype == want.dtype and relative_error(got, want) < 1e-5, (item.kind, item.target)
