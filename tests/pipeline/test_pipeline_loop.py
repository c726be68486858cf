"""What a loop does besides training works in a pipeline: evaluation, accumulation, checkpoints, dropout, held results."""

import copy

import pytest
import torch
from pipelines import Blocks, accumulate, batches_of, compiled, data, train, with_layers
from tolerances import relative_error
from zoo import adamw

import graphacc
from graphacc.graph import Kind

STRATEGY = "pp=2,microbatches=4"


def test_batch_norm_and_evaluation_before_between_and_after_training():
    reference = Blocks()
    model = compiled(copy.deepcopy(reference), STRATEGY)
    batches = data(4)
    for part in (batches[:2], batches[2:]):
        for each in (reference, model):
            each.eval()
        with torch.no_grad():
            small = {name: value[:3] for name, value in batches[0].items()}
            got, want = model(**small), reference(**small)
        assert relative_error(got.logits, want.logits) < 1e-5 and relative_error(got.loss, want.loss) < 1e-5
        for each in (reference, model):
            each.train()
        expected, losses = accumulate(reference, part, adamw, 4), train(model, part, adamw)
        assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5
    for name, value in reference.state_dict().items():
        assert relative_error(model.state_dict()[name], value) < 1e-4, name
    assert model.blocks[0][1].num_batches_tracked == 16


@pytest.mark.matrix
def test_gpt2_on_two_stages():
    """Parameters lie with their state on one stage, the tied one has a replica, and only the residual stream crosses.

    Microbatches of 2 x 16 tokens, hidden size 32: activations forward, their gradients back, nothing of size [V, D].
    """
    model = compiled(with_layers("gpt2", 4), STRATEGY)
    train(model, batches_of("gpt2", 1), adamw)
    programs = model._graphacc_engine.programs
    stages = [set(mesh.devices.flat) for mesh in programs.meshes]
    lies_on = {key: stages.index(programs.state.find(*key)[0].sharding.device_set) for key in programs.state.keys()}
    homes = {target: stage for (kind, target), stage in lies_on.items() if kind is Kind.PARAM}
    assert [homes[f"transformer.h.{i}.mlp.c_fc.weight"] for i in range(4)] == [0, 0, 1, 1]
    assert all(stage == homes[target.rpartition("/")[0]] for (kind, target), stage in lies_on.items() if kind is Kind.STATE)
    assert {item.target for c in model.programs for item in c.graph.inputs if "@" in item.target} == {
        "transformer.wte.weight@1"
    }
    activation = 2 * 16 * 32 * 4
    grads = next(compiled for compiled in programs._by_key.values() if compiled.kind == "grad")
    assert grads.transfer_bytes == {(0, 1): activation, (1, 0): activation}


def test_accumulation_over_several_calls():
    reference = with_layers("tied_mlp", 2)
    model = compiled(copy.deepcopy(reference), "pp=2,microbatches=2")
    batches = batches_of("tied_mlp", 4)
    results = []
    for each in (reference, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for first in (0, 2):
            for batch in batches[first : first + 2]:
                (each(**batch).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in each.state_dict().items()})
    for name, value in results[0].items():
        assert relative_error(results[1][name], value) < 1e-4, name


def test_checkpoints_load_under_other_strategies(tmp_path):
    reference = Blocks()
    batches = data(3)
    straight = copy.deepcopy(reference)
    expected = accumulate(straight, batches, adamw, 4)
    model = compiled(copy.deepcopy(reference), "pp=2,fsdp=2,microbatches=4")
    optimizer = adamw(model)
    first = model(**batches[0]).loss
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    graphacc.save_checkpoint(tmp_path / "saved", model, optimizer)
    for strategy in ("pp=4,microbatches=4,schedule=zb-h1", "fsdp=2,microbatches=4"):
        other = compiled(Blocks(), strategy)
        optimizer = adamw(other)
        graphacc.load_checkpoint(tmp_path / "saved", other, optimizer)
        losses = [first.item()]
        for batch in batches[1:]:
            loss = other(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5, strategy
        for name, value in straight.state_dict().items():
            assert relative_error(other.state_dict()[name], value) < 1e-4, (strategy, name)


@pytest.mark.matrix
def test_dropout_draws_per_microbatch_and_repeats_for_a_seed():
    def losses(strategy, seed):
        torch.manual_seed(0)
        model = compiled(Blocks(dropout=0.5), strategy, seed=seed)
        return train(model, data(1) * 3, lambda each: torch.optim.SGD(each.parameters(), lr=0.0))

    first = losses(STRATEGY, 1)
    assert len(set(first)) == 3
    assert losses(STRATEGY, 1) == first
    assert losses("microbatches=4", 1) == pytest.approx(first, rel=1e-5), "the masks do not depend on the stages"


def test_a_frozen_first_stage_has_no_backward():
    reference = Blocks()
    reference.blocks[:2].requires_grad_(False)
    pins = graphacc.Strategy(pp=2, microbatches=4, stages={"blocks.[01]": 0, "blocks.[23]": 1})
    model = compiled(copy.deepcopy(reference), pins)
    batches = data(3)
    expected, losses = accumulate(reference, batches, adamw, 4), train(model, batches, adamw)
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5
    for name, value in reference.state_dict().items():
        assert relative_error(model.state_dict()[name], value) < 1e-4, name
    assert [c.kind for c in model.programs if c.kind.startswith("grad")] == ["grad F0", "grad F1", "grad B1"]


def test_results_that_the_loop_holds_are_those_of_the_whole_batch():
    reference = with_layers("gpt2", 2)
    model = compiled(copy.deepcopy(reference), STRATEGY)
    batch = batches_of("gpt2", 1)[0]
    optimizer = adamw(model)
    out = model(**batch)
    right = (out.logits.argmax(-1) == batch["labels"]).float().mean()
    wrong = (out.logits.argmax(-1) != batch["labels"]).sum()
    by_place = (out.logits.argmax(-1) != batch["labels"]).sum(0)
    out.loss.backward()
    optimizer.step()
    logits = reference(**batch).logits
    assert relative_error(out.logits, logits) < 1e-5
    assert right.item() == pytest.approx((logits.argmax(-1) == batch["labels"]).float().mean().item())
    assert wrong.item() == (logits.argmax(-1) != batch["labels"]).sum().item()
    assert by_place.tolist() == (logits.argmax(-1) != batch["labels"]).sum(0).tolist()


def test_results_that_cannot_be_put_together_are_refused():
    """Batch normalisation: every microbatch stands for itself."""
    model = compiled(Blocks(), STRATEGY)
    batch = data(1)[0]
    out = model(**batch)
    by_place = (out.logits > 0).sum(0)
    out.loss.backward()
    with pytest.raises(graphacc.LoopError, match=r"torch.int64 of shape \[\d+\] .* microbatches=4 parts"):
        by_place.tolist()


def test_gradients_that_the_loop_reads():
    reference = with_layers("gpt2", 2)
    model = compiled(copy.deepcopy(reference), STRATEGY)
    batch = batches_of("gpt2", 1)[0]
    reference(**batch).loss.backward()
    model(**batch).loss.backward()
    for name, parameter in reference.named_parameters():
        assert relative_error(model.get_parameter(name).grad, parameter.grad) < 1e-5, name


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "pp=8,microbatches=8",
            r"pp=8 cuts the model into 8 parts, but it has only 5 blocks .*blocks.0.*set pp x chunks to at most 5",
        ),
        ("pp=4,microbatches=2", "pp=4 needs at least as many microbatches as stages"),
        ("pp=2,microbatches=3", "microbatches=3 does not divide the batch of 16"),
        ("pp=2,microbatches=2,stages=layers.*:0", r"stages pins 'layers.\*', which matches no module .*choose out of blocks.0"),
        (
            "pp=2,microbatches=2,stages=blocks.0:1;blocks.3:0",
            "pins module 'blocks.0.2' to 1 and 'blocks.3.0', which runs after it, to 0",
        ),
        ("pp=2,microbatches=2,stages=blocks.0:2", "pins 'blocks.0' to 2, but pp=2 has the numbers 0 to 1"),
        ("pp=2,microbatches=2,stages=blocks.*:0;head:0", "leaves no way to give each of the 2 chunks a part"),
        ("pp=2,microbatches=2,schedule=fast", "schedule='fast' is unknown: choose one of gpipe"),
        ("schedule=gpipe", "are for a pipeline, which pp=1 does not make"),
    ],
)
@pytest.mark.default_cases("pp=8,microbatches=8-pp=8 cuts the model into 8 parts, but it has only 5 blocks .*blocks.0.*set pp x chunks to at most 5", "pp=2,microbatches=2,stages=blocks.0:1;blocks.3:0-pins module 'blocks.0.2' to 1 and 'blocks.3.0', which runs after it, to 0", "schedule=gpipe-are for a pipeline, which pp=1 does not make")
def test_bad_input(strategy, message):
    with pytest.raises(graphacc.StrategyError, match=message):
        train(compiled(Blocks(), strategy), data(1), adamw)
