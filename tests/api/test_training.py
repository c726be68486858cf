"""What else users rely on: other optimizers, bf16, dropout, memory that falls with the ZeRO stage, state dicts."""

import copy

import pytest
import torch
import zoo
from selection import with_matrix
from tolerances import relative_error
from torch import nn
from training import adamw, batches_of, captured_once, check_parity, compiled, train

from graphacc.graph import Kind
from graphacc.optim import CPUAdam

OPTIMIZERS = {
    "cpu_adam": lambda p: CPUAdam([q for q in p if q.requires_grad], lr=1e-3, eps=1e-5),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, centered=False),
}


@pytest.mark.parametrize("strategy", with_matrix([None, "fsdp=4,zero=3", "fsdp=4,zero=1"], ["fsdp=4,zero=3"]), ids=lambda text: text or "one device")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.default_cases("cpu_adam-fsdp=4,zero=3", "adafactor-fsdp=4,zero=3")
def test_any_optimizer(name, strategy):
    check_parity("tied_mlp", strategy, lambda model: OPTIMIZERS[name](model.parameters()))


class Odd(nn.Module):
    """Dims that no device count divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3, bias=False)

    def forward(self, x, y):
        return zoo.Output(nn.functional.mse_loss(self.second(torch.tanh(self.first(x))), y), x)


ODD = [(make, zero) for make in ("muon", "adafactor", "adamw") for zero in (1, 2, 3)]


@pytest.mark.parametrize(("make", "zero"), with_matrix(ODD, [("muon", 1), ("muon", 3), ("adafactor", 2), ("adamw", 3)]))
@pytest.mark.default_cases("muon-1", "adamw-3")
def test_optimizers_that_are_not_element_wise_with_padded_parameters(make, zero):
    def optimizer(model):
        if make == "muon":
            return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
        return torch.optim.Adafactor(model.parameters(), lr=0.01) if make == "adafactor" else adamw(model)

    reference = Odd()
    model = compiled(copy.deepcopy(reference), f"fsdp=8,zero={zero}")
    batches = [{"x": torch.randn(8, 7), "y": torch.randn(8, 3)} for _ in range(4)]
    expected, losses = train(reference, batches, optimizer), train(model, batches, optimizer)
    tolerance = 5e-3 if make == "muon" else 1e-4  # torch's Muon orthogonalises in bf16, whose rounding error is 4e-3
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < tolerance
    for name, value in reference.state_dict().items():
        assert relative_error(model.state_dict()[name], value) < tolerance, name


BF16 = [(name, strategy) for name in ("gpt2", "resnet") for strategy in (None, "dp=2,fsdp=4")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(BF16, [("gpt2", "dp=2,fsdp=4"), ("resnet", None)]), ids=[f"{name}-{strategy or 'one device'}" for name, strategy in BF16])
@pytest.mark.default_cases("gpt2-dp=2,fsdp=4")
def test_bf16_computes_in_bf16_with_fp32_masters(name, strategy):
    reference, _ = zoo.MODELS[name]()
    model = compiled(copy.deepcopy(reference), strategy, precision="bf16")
    batches = batches_of(name)
    expected = train(reference, batches)
    with captured_once("parity", name):
        losses = train(model, batches)
    error = relative_error(torch.tensor(losses), torch.tensor(expected))
    assert 1e-7 < error < 2e-2
    assert all(p.dtype == torch.float32 for p in model.parameters())
    products = [n for n in model.programs[0].graph.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.convolution.default)]
    assert products and all(node.meta["val"].dtype == torch.bfloat16 for node in products)


def test_dropout_draws_other_masks_every_step_and_repeats_for_a_seed():
    def losses(seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        model = compiled(model, "dp=2", seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen = []
        for _ in range(3):
            loss = model(torch.ones(8, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    first = losses(1)
    assert len(set(first)) == 3 and losses(1) == first and losses(2) != first


def sharded_memory(strategy):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    model = compiled(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with captured_once("sharded memory"):
        model(torch.randn(8, 256)).pow(2).mean().backward()
        optimizer.step()
    return model


def test_memory_falls_as_the_zero_paper_says():
    """ZeRO (arXiv 1910.02054, figure 1), fp32 with Adam: parameters P, gradients P, optimizer state 2 P, over N devices."""
    parameters = 4 * 6 * (256 * 256 + 256)
    held, temporary, peak = {}, {}, {}
    for strategy in (None, "fsdp=8,zero=1", "fsdp=8,zero=2", "fsdp=8,zero=3"):
        model = sharded_memory(strategy)
        kinds = model.bytes_per_device()
        held[strategy] = (kinds[Kind.PARAM], kinds[Kind.STATE])
        memory = model.programs[0].program.memory
        temporary[strategy], peak[strategy] = memory.temp_bytes, memory.peak_bytes
        assert memory.argument_bytes >= sum(held[strategy])
    steps = 4  # Adam's count of steps, one for all parameters, stays whole
    assert held[None] == (parameters, 2 * parameters + steps)
    assert held["fsdp=8,zero=1"] == held["fsdp=8,zero=2"] == (parameters, 2 * parameters // 8 + steps)
    assert held["fsdp=8,zero=3"] == (parameters // 8, 2 * parameters // 8 + steps)
    assert peak["fsdp=8,zero=3"] < 0.5 * peak["fsdp=8,zero=2"] and peak["fsdp=8,zero=1"] < 0.75 * peak[None]
    assert temporary["fsdp=8,zero=3"] < parameters, "gathered parameters or gradients all live at once"


def test_gradient_accumulators_are_sharded_from_stage_two():
    held = {}
    for stage in (1, 2, 3):
        model = compiled(nn.Linear(64, 64, bias=False), f"fsdp=8,zero={stage},microbatches=2")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 64)).pow(2).mean().backward()
        optimizer.step()
        held[stage] = model.bytes_per_device()[Kind.GRAD]
    assert held[1] == 64 * 64 * 4 and held[2] == held[3] == held[1] // 8


@pytest.mark.matrix
def test_state_dict_round_trip_keeps_names_and_ties():
    reference, _ = zoo.MODELS["gpt2"]()
    model = compiled(copy.deepcopy(reference), "fsdp=8")
    with captured_once("parity", "gpt2"):
        train(model, batches_of("gpt2", 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == list(reference.state_dict())
    reference.load_state_dict(state)
    assert torch.equal(reference.lm_head.weight, reference.transformer.wte.weight)
    other = compiled(zoo.MODELS["gpt2"](8, 3)[0], "dp=2")
    with captured_once("parity", "gpt2"):
        train(other, batches_of("gpt2", 1))
    other.load_state_dict(state)
    expected, losses = train(reference, batches_of("gpt2", 2)), train(other, batches_of("gpt2", 2))
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5


def test_frozen_parameters_stay_and_cost_no_state():
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "fsdp=2")
    frozen, unused = model.frozen.weight.clone(), model.unused.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for batch in batches_of("tied_mlp", 2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.frozen.weight, frozen) and torch.equal(model.unused, unused)
    assert not any(target.startswith(("frozen", "unused")) for kind, target in model._graphacc_engine.programs.state.keys() if kind is Kind.STATE)


def test_evaluation_takes_any_batch_size_and_leaves_training_alone():
    model, batch = zoo.MODELS["resnet"]()
    reference = copy.deepcopy(model)
    model = compiled(model, "dp=2,fsdp=2")
    train(reference, batches_of("resnet", 2)), train(model, batches_of("resnet", 2))
    small = {name: value[:3] for name, value in batch.items()}
    for mode in (reference, model):
        mode.eval()
    with torch.no_grad():
        expected, got = reference(**small), model(**small)
    assert type(got) is type(expected)
    assert relative_error(got.logits, expected.logits) < 1e-4 and relative_error(got.loss, expected.loss) < 1e-4
