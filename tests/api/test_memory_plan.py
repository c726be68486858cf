"""Models whose steps are large enough to be planned train as plain PyTorch does, and with the bits of XLA's plan."""

import copy

import pytest
import torch
import zoo
from selection import with_matrix
from training import assert_parity, batches_of, compiled, train

STEPS = 3


CASES = [("gpt2", "fsdp=8", 256), ("qwen3_moe", "fsdp=2", 128)]  # the second one at its bound by a schedule of XLA's


@pytest.mark.parametrize("name, strategy, batch_size", with_matrix(CASES, CASES[:1]))
@pytest.mark.matrix
def test_planned_steps_train_as_torch_does(name, strategy, batch_size):
    reference, _ = zoo.MODELS[name]()
    planned, plain = copy.deepcopy(reference), copy.deepcopy(reference)
    batches = batches_of(name, STEPS, batch_size)
    expected = train(reference, batches)
    planned, plain = compiled(planned, strategy), compiled(plain, strategy, memory_plan="xla")
    losses = train(planned, batches)
    assert_parity(reference, planned, expected, losses)
    assert train(plain, batches) == losses
    state = plain.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in planned.state_dict().items())
    plan = planned.programs[0].program.plan
    assert plan.changed or (name != "gpt2" and plan.temporary_after <= 1.01 * plan.lower_bound), plan.reason
    assert planned.memory().temporary_bytes == plan.temporary_after < plain.memory().temporary_bytes
