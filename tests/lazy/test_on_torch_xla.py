"""A model with control flow on values of the batch, run by torch_xla's own runtime because the user says so."""

import copy

import lazy_models
import pytest
import torch
import zoo
from lazy_models import ReadsBatch
from tolerances import assert_close
from training import assert_parity, batches_of, train

import graphacc

pytestmark = pytest.mark.lazy

BATCHES = [lazy_models.vectors(seed) for seed in range(4)]


def branches(model: torch.nn.Module) -> set[bool]:
    with torch.no_grad():
        return {bool(model.linear(batch["x"]).mean() > 0) for batch in BATCHES}


def test_control_flow_on_the_batch():
    reference = zoo.condition(ReadsBatch())
    assert branches(reference) == {True, False}, "both sides of the `if` are taken"
    model = copy.deepcopy(reference)
    expected = train(reference, BATCHES)
    assert graphacc.compile(model, capture="torch_xla") is model
    assert model.linear.weight.device.type == "xla"
    assert_parity(reference, model, expected, train(model, BATCHES))
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    assert "torch_xla" in model.explain()
    host = copy.deepcopy(model)
    assert type(host) is ReadsBatch and host.linear.weight.device.type == "cpu"
    assert_close(host(**BATCHES[0]).loss, reference(**BATCHES[0]).loss)
    model.load_state_dict(ReadsBatch().state_dict())


def test_ties_and_earlier_optimizers_survive():
    reference, _ = zoo.MODELS["tied_mlp"]()
    model, batches = copy.deepcopy(reference), batches_of("tied_mlp", 3)
    tied = [name for name, _ in model.named_parameters()]
    optimizer = zoo.adamw(model)
    step = graphacc.train_step(graphacc.compile(model, capture="torch_xla"), optimizer)
    assert [name for name, _ in model.named_parameters()] == tied
    losses = [step(**batch).item() for batch in batches]
    assert_parity(reference, model, train(reference, batches, scheduled=False), losses)


def test_the_refusal_names_this_way():
    model = graphacc.compile(ReadsBatch(), capture="lazy", devices=1)
    with pytest.raises(graphacc.CaptureError, match="logits.mean") as caught:
        train(model, BATCHES[:1])
    instead = graphacc.compile(ReadsBatch(), capture="torch_xla")
    train(instead, BATCHES[:2])  # while `caught` still holds what was recorded of placeholders, which must not be run
    assert any('capture="torch_xla" runs code that follows values' in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(strategy="dp=2", devices=2), "one device of one process, and cannot follow dp=2"),
        (dict(precision="bf16"), "cannot follow precision=bf16"),
        (dict(max_grad_norm=1.0), r"max_grad_norm=1.0: capture='torch_xla' compiles no step"),
    ],
    ids=["devices", "precision", "clipping"],
)
def test_what_it_cannot_follow_is_refused(options, message):
    model = ReadsBatch()
    with pytest.raises(graphacc.StrategyError, match=message):
        graphacc.compile(model, capture="torch_xla", **options)
    assert type(model) is ReadsBatch and model.linear.weight.device.type == "cpu"


def test_what_needs_an_engine_says_so(tmp_path):
    model = graphacc.compile(ReadsBatch(), capture="torch_xla")
    with pytest.raises(graphacc.LoopError, match="save and load it with torch.save"):
        graphacc.save_checkpoint(tmp_path / "saved", model)
    with pytest.raises(graphacc.GraphAccError, match="compiled already"):
        graphacc.compile(model)


def test_a_saved_model_is_the_users_own(tmp_path):
    model = graphacc.compile(ReadsBatch(), capture="torch_xla")
    torch.save(model, tmp_path / "model.pt")
    assert b"graphacc" not in (tmp_path / "model.pt").read_bytes()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded) is ReadsBatch and model.__class__ is ReadsBatch
    assert torch.equal(loaded.linear.weight, model.state_dict()["linear.weight"])
