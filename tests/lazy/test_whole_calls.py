"""Attention and shardings in a lazily captured step: our kernels in every layer, with heads and batch where they are."""

import copy
import logging
import pickle
import re

import lazy_models
import pytest
import torch
import torch.nn.functional as F
import zoo
from lazy_models import Attends
from torch import nn
from training import assert_parity, batches_of, compiled, train

import graphacc
from graphacc import P
from graphacc.kernels import products
from graphacc.lowering.rules import cpu_products

pytestmark = pytest.mark.lazy

OPTIONS = dict(capture="lazy", memory_plan="xla")
TP = {
    "attention.q.weight": P("tp", None),
    "attention.q.bias": P("tp"),
    "attention.out.weight": P(None, "tp"),
}


def kernels(model) -> dict[str, list[tuple[int, ...]]]:
    """Name of a kernel -> the shape on one device of the first result of each of its calls in the step program."""
    (program,) = model.programs
    calls = re.findall(r"= \(\w+\[([\d,]*)\].* custom-call\(.*custom_call_target=\"gacc_flash_(\w+)\"", program.program.hlo_text())
    found = {"forward": [], "backward": []}
    for shape, name in calls:
        found[name].append(tuple(map(int, shape.split(","))))
    return found


def check(make, strategy: str | None, annotations=None, steps: int = 2):
    """Train one of our own models both ways."""
    torch.manual_seed(0)
    reference = zoo.condition(make())
    model = copy.deepcopy(reference)
    batches = [lazy_models.sequences(seed) for seed in range(steps)]
    expected = train(reference, batches)
    model = compiled(model, strategy, annotations=annotations, **OPTIONS)
    assert_parity(reference, model, expected, train(model, batches))
    return model


@pytest.mark.parametrize(
    "options",
    [
        dict(mask="bool"),
        dict(mask="finite"),
        dict(bias=True),
        dict(own=True),
        dict(own=True, bias=True),
    ],
    ids=["bool mask", "mask of finite numbers", "learned bias", "segments and window", "all"],
)
@pytest.mark.parametrize("strategy", [None, "dp=2,tp=4"], ids=["one device", "eight"])
@pytest.mark.default_cases("one device-bool mask", "one device-all", "eight-segments and window")
def test_every_form_is_a_kernel(options, strategy):
    """With 2 key heads for 4 query heads: under tp=4 every device has a copy of the key head of its query head."""
    model = check(lambda: Attends(**options), strategy, TP if strategy else None)
    shape = (8, 4, zoo.SEQ, 8) if strategy is None else (4, 1, zoo.SEQ, 8)
    assert kernels(model) == {"forward": [shape], "backward": [shape]}


def test_heads_that_do_not_divide_are_computed_whole(caplog):
    with caplog.at_level(logging.WARNING, "graphacc"):
        model = check(lambda: Attends(heads=2), "dp=2,tp=4", TP, steps=1)
    assert kernels(model)["forward"] == [(4, 2, zoo.SEQ, 16)]
    assert "tp=4 does not divide its 2 query heads (and 2 key heads)" in caplog.text


def test_heads_are_whole_where_their_module_is():
    """Other modules' annotations do not split this attention, where its own weights are pinned whole."""
    model = check(Attends, "dp=2,tp=4", {"head.weight": P("tp", None), "attention.*": P()}, steps=1)
    assert kernels(model)["forward"] == [(4, 4, zoo.SEQ, 8)]


def dropped(capture: str, strategy: str | None, **options) -> list[float]:
    torch.manual_seed(0)
    annotations = TP if strategy and "tp" in strategy else None
    model = compiled(zoo.condition(Attends(**options)), strategy, capture=capture, seed=3, annotations=annotations, memory_plan="xla")
    losses = train(model, [lazy_models.sequences(seed) for seed in range(2)])
    assert len(kernels(model)["forward"]) == 1
    return losses


@pytest.mark.parametrize("own", [False, True], ids=["sdpa", "flash_attention"])
@pytest.mark.default_cases("sdpa")
def test_dropout_drops_the_same_everywhere(own):
    options = dict(own=own, dropout=0.4)
    expected = dropped("fx", None, **options)
    assert dropped("lazy", None, **options) == pytest.approx(expected, rel=1e-5)
    assert dropped("lazy", "dp=2,tp=4", **options) == pytest.approx(expected, rel=1e-5)
    assert dropped("lazy", None, own=own)[0] != pytest.approx(expected[0], rel=1e-5)


def test_bf16_runs_the_kernel_in_bf16(monkeypatch):
    """And no product by a custom call, whose operands XLA's partitioner would gather; the same gate takes all products of torch.fx's programs."""
    monkeypatch.setattr(products, "is_native", lambda dtype: True)
    monkeypatch.setattr(cpu_products, "LEAST_OPERATIONS", 0)
    batches = batches_of("llama", 2)
    model, _ = zoo.MODELS["llama"]()
    exact = train(copy.deepcopy(model), batches)
    model = compiled(model, "dp=2", precision="bf16", **OPTIONS)
    assert train(model, batches) == pytest.approx(exact, rel=2e-2)
    text = model.programs[0].program.hlo_text()
    assert len(re.findall(r"= \(bf16\[.*custom_call_target=\"gacc_flash_forward\"", text)) == zoo.LAYERS
    assert "gacc_product" not in text


class Marks(nn.Module):
    """Marks an activation."""

    def __init__(self, spec: P):
        super().__init__()
        self.first, self.second, self.spec = nn.Linear(zoo.HIDDEN, 96), nn.Linear(96, 4), spec

    def forward(self, x, labels):
        hidden = graphacc.mark_sharding(torch.relu(self.first(x)), self.spec)
        logits = self.second(hidden)
        return zoo.Output(F.cross_entropy(logits, labels), logits)


def test_mark_sharding_splits_an_activation():
    """No parameter is annotated: the product that makes the activation has a quarter of its columns on every device."""
    reference = zoo.condition(Marks(P(None, "tp")))
    model = copy.deepcopy(reference)
    batches = [lazy_models.vectors(seed) for seed in range(3)]
    expected = train(reference, batches)
    model = compiled(model, "dp=2,tp=4", **OPTIONS)
    assert_parity(reference, model, expected, train(model, batches))
    made = re.findall(r"= f32\[([\d,]*)\]\S* dot\(", model.programs[0].program.hlo_text())
    assert "4,24" in made and "4,96" not in made


def test_mark_sharding_that_does_not_divide():
    model = compiled(Marks(P("tp", None)), "tp=8", **OPTIONS)
    with pytest.raises(graphacc.StrategyError, match=r"mark_sharding at .*test_whole_calls.py.*tp=8 does not divide dim 0 of shape \[4, 96\]"):
        train(model, [lazy_models.vectors(0, batch_size=4)])


def test_specs_can_be_copied():
    spec = P(None, "tp")
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
