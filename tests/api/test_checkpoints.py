"""Checkpoints continue exactly, under any strategy and device count."""

import collections
import copy
import math
import pathlib
import threading

import pytest
import torch
import zoo
from selection import with_matrix
from tolerances import relative_error
from training import adamw, batches_of, captured_once, compiled

import graphacc
from graphacc.runtime import checkpoint_files

EARLIER = pathlib.Path(__file__).parent / "checkpoint_of_0_1"
"""Written by commit ea58666: two steps of AdamW on a Linear(3, 5) that was made under seed 0, with `fsdp=2`."""


def run(model, optimizer, batches) -> list[float]:
    losses = []
    dropout = sum(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    with captured_once("checkpoints", type(model), dropout, str(optimizer)):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("before", "after"),
    with_matrix(
        [("fsdp=4", None), ("fsdp=4", "fsdp=8,zero=3"), ("fsdp=4", "dp=2,fsdp=2,zero=1"), ("fsdp=4", "fsdp=2,cp=4"), ("fsdp=2,cp=2", "fsdp=8"), ("cp=2,zero=3", "fsdp=3,cp=2,zero=1")],
        [("fsdp=4", None), ("fsdp=4", "dp=2,fsdp=2,zero=1"), ("fsdp=2,cp=2", "fsdp=8")],
    ),
    ids=lambda text: text or "one device",
)
@pytest.mark.default_cases("fsdp=4-one device")
def test_training_continues_under_another_strategy(before, after, tmp_path):
    check_continued("gpt2", before, after, tmp_path)


@pytest.mark.parametrize(("before", "after"), [("ep=4,zero=3", "fsdp=2,ep=2,zero=1"), ("fsdp=2,cp=2,ep=2", "ep=2,zero=3"), ("ep=2", "fsdp=4,ep=2"), ("fsdp=2,ep=2", None)])
@pytest.mark.matrix
def test_training_of_a_mixture_continues_under_another_strategy(before, after, tmp_path):
    check_continued("mixtral", before, after, tmp_path)


def check_continued(name: str, before: str, after: str | None, folder: pathlib.Path) -> None:
    """Two steps, a checkpoint, two further steps, against four steps of PyTorch."""
    start, _ = zoo.MODELS[name]()
    batches = batches_of(name, 4)
    whole = copy.deepcopy(start)
    expected = run(whole, adamw(whole), batches)

    first = compiled(copy.deepcopy(start), before, seed=3)
    optimizer = adamw(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(folder / "c", first, optimizer, extra={"epoch": 1})

    second = compiled(zoo.MODELS[name](8, 9)[0], after)
    optimizer = adamw(second)
    assert graphacc.load_checkpoint(folder / "c", second, optimizer) == {"epoch": 1}
    assert (second.get_output_embeddings().weight is second.get_input_embeddings().weight) == (start.lm_head.weight is start.get_input_embeddings().weight)
    losses += run(second, optimizer, batches[2:])
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5


@pytest.mark.matrix
def test_the_same_strategy_continues_bit_for_bit_with_dropout(tmp_path):
    def build():
        torch.manual_seed(0)
        model = zoo.MODELS["gpt2"]()[0]
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return compiled(model, "fsdp=2")

    batches = batches_of("gpt2", 4)
    whole = build()
    expected = run(whole, adamw(whole), batches)
    first = build()
    optimizer = adamw(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", first, optimizer)
    second = build()
    optimizer = adamw(second)
    graphacc.load_checkpoint(tmp_path / "c", second, optimizer)
    assert losses + run(second, optimizer, batches[2:]) == expected


def test_saving_before_the_first_step(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], None)
    graphacc.save_checkpoint(tmp_path / "c", model, adamw(model))
    other = compiled(zoo.MODELS["tied_mlp"](8, 5)[0], "fsdp=2")
    graphacc.load_checkpoint(tmp_path / "c", other, adamw(other))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_loading_into_a_model_that_has_trained(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "fsdp=2")
    optimizer = adamw(model)
    batches = batches_of("tied_mlp", 4)
    run(model, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = run(model, optimizer, batches[2:])
    graphacc.load_checkpoint(tmp_path / "c", model, optimizer)
    assert run(model, optimizer, batches[2:]) == expected


def _two_groups(model, order=(0, 1)) -> torch.optim.SGD:
    """Biases and norms without weight decay and with another momentum, in either order."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [dict(params=decayed, lr=0.1, weight_decay=0.1), dict(params=others, lr=0.02, weight_decay=0.0)]
    return torch.optim.SGD([groups[i] for i in order], lr=1.0, momentum=0.9)


def test_groups_that_change_places_keep_their_settings(tmp_path):
    start, _ = zoo.MODELS["tied_mlp"]()
    batches = batches_of("tied_mlp", 4)
    whole = compiled(copy.deepcopy(start), None)
    expected = run(whole, _two_groups(whole), batches)
    first = compiled(copy.deepcopy(start), None)
    optimizer = _two_groups(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", first, optimizer)

    second = compiled(zoo.MODELS["tied_mlp"](8, 9)[0], None)
    optimizer = _two_groups(second, order=(1, 0))
    graphacc.load_checkpoint(tmp_path / "c", second, optimizer)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.0), (0.1, 0.1)]
    losses += run(second, optimizer, batches[2:])
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5


def test_parameters_that_are_grouped_otherwise(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], None)
    optimizer = _two_groups(model)
    run(model, optimizer, batches_of("tied_mlp", 1))
    graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    other = torch.optim.SGD([dict(params=trained[:1]), dict(params=trained[1:])], lr=1.0, momentum=0.9)
    with pytest.raises(graphacc.CheckpointError, match=r"holds just the parameters of group 0 of this one \(unused\): make the groups as"):
        graphacc.load_checkpoint(tmp_path / "c", model, other)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    release, original = threading.Event(), checkpoint_files.flush
    monkeypatch.setattr(checkpoint_files, "flush", lambda file: (release.wait(60), original(file)))
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "fsdp=2")
    optimizer = adamw(model)
    batches = batches_of("tied_mlp", 4)
    run(model, optimizer, batches[:2])
    saving = graphacc.save_checkpoint(tmp_path / "c", model, optimizer, asynchronous=True, staging_mb=0.01)
    expected = run(model, optimizer, batches[2:])
    assert not saving.done
    release.set()
    other = compiled(zoo.MODELS["tied_mlp"](8, 5)[0], None)
    optimizer = adamw(other)
    graphacc.load_checkpoint(tmp_path / "c", other, optimizer)
    assert saving.done
    assert relative_error(torch.tensor(run(other, optimizer, batches[2:])), torch.tensor(expected)) < 1e-5


def test_a_checkpoint_of_an_earlier_version_loads():
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 5)
    model = compiled(copy.deepcopy(plain), "fsdp=4")
    model.weight.data.zero_()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(2):
        plain(torch.ones(4, 3)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert graphacc.load_checkpoint(EARLIER, model, optimizers[1]) == {"epoch": 2}
    for one, optimizer in zip((plain, model), optimizers):
        one(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    assert relative_error(model.weight, plain.weight) < 1e-5
    assert relative_error(optimizers[1].state[model.bias]["exp_avg_sq"], optimizers[0].state[plain.bias]["exp_avg_sq"]) < 1e-5


# ---- what state_dict() holds besides tensors


class Scaled(torch.nn.Module):
    def __init__(self, state=1.0):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state, float(self.linear.bias.detach().sum())

    def forward(self, x):
        return self.linear(x)


STATES = [
    {"scale": torch.tensor([1.5, math.nan], dtype=torch.bfloat16), 3: (1, 2.5, [None, True, "text"]), (1, "a"): collections.OrderedDict(inf=math.inf, empty={})},
    torch.arange(6).reshape(2, 3).t(),
    None,
]


@pytest.mark.parametrize("state", STATES, ids=["nested", "tensor", "None"])
def test_extra_state_of_modules(state, tmp_path):
    model = compiled(torch.nn.Sequential(Scaled(state), torch.nn.Linear(4, 4)), "fsdp=2")
    graphacc.save_checkpoint(tmp_path, model)
    other = compiled(torch.nn.Sequential(Scaled(), torch.nn.Linear(4, 4)), None)
    graphacc.load_checkpoint(tmp_path, other)
    found, bias = other[0].state
    assert bias == pytest.approx(float(model[0].linear.bias.detach().sum()))  # as with load_state_dict, the module has its parameters by then
    assert repr(found) == repr(state)


def test_extra_state_that_no_checkpoint_can_hold(tmp_path):
    model = compiled(torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled()), None)
    graphacc.save_checkpoint(tmp_path, model, extra={"version": 1})
    for state, what in [({"a": [object()]}, r"a object at \['a'\]\[0\]"), (torch.eye(3).to_sparse(), "a tensor of torch.sparse_coo"), (torch.ones(2, dtype=torch.complex128), "complex128")]:
        model[1].state = state
        with pytest.raises(graphacc.CheckpointError, match=rf"(?s)extra state of the module '1' \(Scaled.get_extra_state\(\)\) holds .*{what}.*torch.save"):
            graphacc.save_checkpoint(tmp_path, model, extra={"version": 2})
    model[1].state = 2.0
    assert graphacc.load_checkpoint(tmp_path, model) == {"version": 1} and model[1].state[0] == 1.0


def test_extra_state_of_another_model(tmp_path):
    for name, (saved, wanted), message in [("a", (torch.nn.Identity(), Scaled(5.0)), "missing: the extra state of 1 "), ("b", (Scaled(5.0), torch.nn.Identity()), "unexpected: the extra state of 1")]:
        first = torch.nn.Linear(8, 8)
        graphacc.save_checkpoint(tmp_path / name, compiled(torch.nn.Sequential(first, saved), None))
        other = compiled(torch.nn.Sequential(torch.nn.Linear(8, 8), wanted), None)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(graphacc.CheckpointError, match=message):
            graphacc.load_checkpoint(tmp_path / name, other)
        assert torch.equal(other.state_dict()["0.weight"], before["0.weight"]) and getattr(wanted, "state", 5.0) == 5.0


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_extra_state():
    class Linear(torch.nn.Linear):
        def set_extra_state(self, state):
            raise AssertionError

    model = compiled(Linear(3, 5), None)
    assert graphacc.load_checkpoint(EARLIER, model) == {"epoch": 2}


# ---- optimizers


def _steps(model, optimizer, count: int = 1) -> list[float]:
    losses = []
    for _ in range(count):
        loss = (model(torch.linspace(-1, 1, 32).view(4, 8)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.5),
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2]),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("name", with_matrix(OPTIMIZERS, ["Adagrad", "LBFGS"]))
@pytest.mark.parametrize("by", ["checkpoint", "state_dict"])
@pytest.mark.default_cases("checkpoint-Adagrad", "checkpoint-LBFGS")
def test_an_optimizer_goes_on_in_new_objects(name, by, tmp_path):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    train = _evaluated_again if name == "LBFGS" else _steps
    start = torch.nn.Linear(8, 4)
    model = compiled(copy.deepcopy(start), None)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    other = compiled(copy.deepcopy(start), None)
    new = OPTIMIZERS[name](other.parameters())
    if by == "checkpoint":
        graphacc.save_checkpoint(tmp_path, model, optimizer)
        graphacc.load_checkpoint(tmp_path, other, new)
    else:
        other.load_state_dict(model.state_dict())
        new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, new, 2) == pytest.approx(train(model, optimizer, 2), rel=1e-6)


def _evaluated_again(model, optimizer, count: int) -> list[float]:
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.linspace(-1, 1, 32).view(4, 8)) - 1).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(count)]


def _settings(optimizer) -> list[dict]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def test_a_checkpoint_of_another_optimizer(tmp_path):
    model = compiled(torch.nn.Linear(8, 4), None)
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(model, optimizer)
    graphacc.save_checkpoint(tmp_path, model, optimizer)
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        other = compiled(torch.nn.Linear(8, 4), None)
        new, weight = make(other.parameters(), lr=0.5), other.weight.detach().clone()
        before = _settings(new)
        with pytest.raises(graphacc.CheckpointError, match=f"different: the optimizer is AdamW in the checkpoint, {make.__name__} here"):
            graphacc.load_checkpoint(tmp_path, other, new)
        assert torch.equal(other.weight, weight) and _settings(new) == before
        _steps(other, new)
    other = compiled(torch.nn.Linear(8, 4), None)
    same = type("MyAdamW", (torch.optim.AdamW,), {})(other.parameters())
    graphacc.load_checkpoint(tmp_path, other, same)
    assert _steps(other, same) == pytest.approx(_steps(model, optimizer), rel=1e-6)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Rprop])
def test_a_checkpoint_of_an_earlier_version_and_another_optimizer(make):
    model = compiled(torch.nn.Linear(3, 5), None)
    optimizer, weight = make(model.parameters()), model.weight.detach().clone()
    before = _settings(optimizer)
    with pytest.raises(graphacc.CheckpointError, match=f"missing: .*, a setting of {make.__name__}"):
        graphacc.load_checkpoint(EARLIER, model, optimizer)
    assert torch.equal(model.weight, weight) and _settings(optimizer) == before


def test_settings_that_are_tensors_or_infinite(tmp_path):
    def make(model, lr):
        return torch.optim.Adam([{"params": [model.weight], "lr": lr, "limit": math.inf, "names": ("a", ["b"])}, {"params": [model.bias]}], lr=0.1)

    model = compiled(torch.nn.Linear(8, 4), None)
    optimizer = make(model, torch.tensor(0.01))
    _steps(model, optimizer)
    graphacc.save_checkpoint(tmp_path, model, optimizer)
    expected = _settings(optimizer)
    for lr in (torch.tensor(0.5), 0.5):  # as after PyTorch's load_state_dict, it is what was saved
        other = compiled(torch.nn.Linear(8, 4), None)
        new = make(other, lr)
        graphacc.load_checkpoint(tmp_path, other, new)
        assert repr(_settings(new)) == repr(expected)
        new.param_groups[0]["lr"].mul_(0.5)
        _steps(other, new)
    older = torch.optim.AdamW((third := compiled(torch.nn.Linear(3, 5), None)).parameters(), lr=torch.tensor(0.5))
    graphacc.load_checkpoint(EARLIER, third, older)  # holds a number
    assert repr(older.param_groups[0]["lr"]) == "tensor(0.1000)"


@pytest.mark.parametrize("strategy", with_matrix([None, "fsdp=2", "fsdp=2,offload=optimizer"], ["fsdp=2"]), ids=lambda text: text or "one device")
@pytest.mark.default_cases("False-fsdp=2")
@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_stay_as_with_load_state_dict(strategy, accumulated, tmp_path):
    start = torch.nn.Linear(8, 4)
    found = []
    for plain in (True, False):
        model = copy.deepcopy(start) if plain else compiled(copy.deepcopy(start), strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        _steps(model, optimizer)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if not plain:
            graphacc.save_checkpoint(tmp_path, model, optimizer)
        _steps(model, optimizer)
        losses = []
        for number in range(1 + accumulated):
            losses.append((model(torch.full((4, 8), 0.5 + number)) - 1).square().mean())
            losses[-1].backward()
        if plain:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        else:
            graphacc.load_checkpoint(tmp_path, model, optimizer)
        optimizer.step()
        found.append(torch.cat([torch.tensor([loss.item() for loss in losses]), model.weight.detach().flatten()]))
    assert relative_error(found[1], found[0]) < 1e-5
