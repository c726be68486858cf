"""The stitched step graph against the eager loop: three AdamW steps with a schedule, for every model of the zoo."""

import copy

import pytest
import torch
import zoo
from capturing import Session
from selection import with_matrix
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error

from graphacc.graph import Kind


@pytest.mark.parametrize("name", with_matrix(zoo.MODELS, ["gpt2", "resnet", "mixtral", "lstm_lm", "tied_mlp"]))
@pytest.mark.default_cases("gpt2", "tied_mlp")
def test_three_steps_equal_eager(name):
    model, kwargs = zoo.MODELS[name]()
    reference = copy.deepcopy(model)
    eager = zoo.adamw(reference)
    captured = zoo.adamw(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1.0 - 0.25 * i) for o in (eager, captured)]
    session = Session(model, captured, kwargs)
    for i in range(3):
        batch = zoo.batch(name, seed=i)
        loss = reference(**batch).loss
        eager.zero_grad()
        loss.backward()
        eager.step()
        assert relative_error(session.run(batch), loss) < LOSS
        for schedule in schedules:
            schedule.step() if schedule is schedules[0] else _advance(schedule)
    for target, parameter in reference.named_parameters():
        assert relative_error(session.values[Kind.PARAM, target], parameter) < PARAMETERS_AFTER_STEPS, target
    for target, buffer in reference.named_buffers():
        assert relative_error(session.values[Kind.BUFFER, target], buffer) < PARAMETERS_AFTER_STEPS, target


def _advance(schedule):
    """The captured optimizer's own step() never runs, which the schedule would warn of."""
    schedule.optimizer._opt_called = True
    schedule.step()


def test_parameters_without_gradient_are_no_outputs():
    model, kwargs = zoo.MODELS["tied_mlp"]()
    session = Session(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), kwargs)
    inputs = {item.target: item for item in session.step.inputs if item.kind is Kind.PARAM}
    assert set(inputs) == {name for name, _ in model.named_parameters()}
    assert inputs["embedding.weight"].aliases == ("head.weight",)
    trained = {target for target, item in inputs.items() if item.trainable}
    assert trained == {"embedding.weight", "hidden.weight", "hidden.bias"}
    assert {out.target for out in session.step.outputs if out.kind is Kind.PARAM} == trained
    assert not any(out.kind is Kind.GRAD for out in session.step.outputs)
