"""Training loops of many forms, each run on a plain model and on a compiled one: same numbers, whatever the loop does."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from selection import with_matrix
from tolerances import relative_error
from torch import nn
from training import compiled

import graphacc
from graphacc.loop.engine import MAX_FORMS
from graphacc.loop.losses import MAX_BEHIND
from graphacc.loop.promise import Promise

INPUTS, CLASSES, BATCH = 12, 5, 8


class Net(nn.Module):
    """A small classifier with BatchNorm; the loss is computed outside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 16, bias=False)  # BatchNorm cancels a bias: its gradient would be rounding noise
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def data(steps: int = 4, batch: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch, INPUTS, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)) for _ in range(steps)
    ]


def plain_loop(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def read_before_backward(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for x, y in data():
        out = model(x)
        loss = F.cross_entropy(out, y)
        seen += [loss.item(), (out.argmax(-1) == y).float().mean().item()]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def outputs_read_after_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x, y in data():
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), out.sum().item(), out.softmax(-1)[0].tolist()]
    return seen


def clipped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [norm.item() for norm in norms]


def clipped_and_read_at_once(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def accumulated(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, (x, y) in enumerate(data(6)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        losses.append(loss)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def accumulated_and_clipped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for i, (x, y) in enumerate(data(4)):
        (F.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
    return [norm.item() for norm in norms]


def gradients_read(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        seen += [model.first.weight.grad.abs().sum().item(), model.second.bias.grad[0].item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def gradients_changed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            model.first.weight.grad.mul_(0.5)
            model.second.weight.grad = model.second.weight.grad.clamp(-0.01, 0.01)
            model.second.bias.grad = None
            for p in model.norm.parameters():
                p.grad.add_(p, alpha=0.1).mul_(loss.detach().clamp(max=1.5))
        optimizer.step()
        optimizer.zero_grad()
    return []


def values_made_after_backward(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x, y in data():
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        confidence = out.detach().softmax(-1).amax(-1).mean()
        norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
        kept = model.second.bias.grad
        optimizer.step()
        seen += [confidence.item(), norm.item(), kept.tolist()]
        del kept
        optimizer.zero_grad()
    return seen


def no_grad_inside_the_loss(model):
    """What is computed under no_grad is a constant of the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data():
        out = model(x)
        with torch.no_grad():
            weights = 1 - out.softmax(-1).gather(1, y[:, None]).squeeze(1)
        loss = (weights * F.cross_entropy(out, y, reduction="none")).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mode_changed_before_backward(model):
    """The call's own mode counts, not the one at backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data():
        model.train()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def group_added_midway(model):
    optimizer = torch.optim.AdamW(model.second.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            optimizer.add_param_group({"params": model.first.parameters(), "lr": 1e-3})
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    return []


def two_optimizers(model):
    matrices = torch.optim.SGD([model.first.weight, model.second.weight], lr=0.1, momentum=0.9)
    rest = torch.optim.AdamW([model.second.bias, *model.norm.parameters()], lr=1e-2)
    losses = []
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        matrices.step()
        rest.step()
        matrices.zero_grad()
        rest.zero_grad()
        losses.append(loss)
    return [loss.item() for loss in losses]


def zeroed_in_place(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data():
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def penalty_on_parameters(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data():
        loss = F.cross_entropy(model(x), y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def model_called_twice(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data():
        a, b = model(x), model(x + 1)
        loss = F.mse_loss(a, b.detach()) + F.cross_entropy(b, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluated_between(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for x, y in data():
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            out = model(x[:3])
            seen += [F.cross_entropy(out, y[:3]).item(), out[0].tolist()]
    return seen


def parameters_written_between(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.first.weight.mul_(0.9)
            model.second.weight.data.add_(0.01)
        model.load_state_dict({name: value + 0.001 if value.is_floating_point() else value for name, value in model.state_dict().items()})
        losses.append(loss.item())
    return losses


def scheduled(model):
    optimizer = torch.optim.SGD(
        [{"params": model.first.parameters(), "lr": 0.1}, {"params": [*model.norm.parameters(), *model.second.parameters()]}],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.01,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=4)
    losses = []
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen_midway(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(data()):
        if i == 2:
            model.first.requires_grad_(False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def forward_without_backward(model):
    """A training-mode forward updates BatchNorm's statistics, with or without gradients."""
    with torch.no_grad():
        out = [model(x).sum().item() for x, _ in data()]
    for x, _ in data(2):
        model(x)
    return [*out, *plain_loop(model)]


LOOPS = [
    plain_loop,
    read_before_backward,
    outputs_read_after_step,
    clipped,
    clipped_and_read_at_once,
    accumulated,
    accumulated_and_clipped,
    gradients_read,
    gradients_changed,
    group_added_midway,
    no_grad_inside_the_loss,
    mode_changed_before_backward,
    values_made_after_backward,
    two_optimizers,
    zeroed_in_place,
    penalty_on_parameters,
    model_called_twice,
    evaluated_between,
    parameters_written_between,
    scheduled,
    frozen_midway,
    forward_without_backward,
]


def flatten(values) -> torch.Tensor:
    flat = []
    for value in values:
        flat += value if isinstance(value, list) else [value]
    return torch.tensor(flat, dtype=torch.float64)


@pytest.mark.parametrize("strategy", with_matrix([None, "dp=2,fsdp=2"], ["dp=2,fsdp=2"]), ids=lambda text: text or "one device")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.default_cases("plain_loop-dp=2,fsdp=2", "clipped_and_read_at_once-dp=2,fsdp=2", "gradients_changed-dp=2,fsdp=2", "values_made_after_backward-dp=2,fsdp=2", "model_called_twice-dp=2,fsdp=2", "frozen_midway-dp=2,fsdp=2")
def test_loop_gives_what_plain_pytorch_gives(loop, strategy):
    reference = Net()
    model = compiled(copy.deepcopy(reference), strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        expected, got = flatten(loop(reference)), flatten(loop(model))
    assert relative_error(got, expected) < 1e-5
    state, wanted = model.state_dict(), reference.state_dict()
    for name, value in wanted.items():
        assert relative_error(state[name], value) < 1e-4, name


def test_one_program_for_a_plain_loop():
    model = compiled(Net(), None)
    plain_loop(model)
    assert [compiled.kind for compiled in model.programs] == ["step"]


def test_a_new_shape_compiles_once_and_says_why(caplog):
    model = compiled(Net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in (8, 8, 4, 8, 4):
        for x, y in data(1, size):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    changed = "other batch shapes: model.args[0] 8x12 -> 4x12, 1.cross_entropy.args[1] 8 -> 4"
    assert [compiled.reason for compiled in model.programs] == ["first step", changed]
    assert "batch shapes" in model.explain()
    (record,) = caplog.records
    assert re.fullmatch(re.escape(f"graphacc: compiling another step program: {changed} (1 so far took ") + r"\d+\.\d s\)", record.getMessage())


def test_calls_without_gradients_of_ever_new_shapes_run_by_pytorch(caplog):
    plain = nn.Linear(4, 3)
    model = compiled(copy.deepcopy(plain), None)
    for one in (plain, model):
        F.mse_loss(one(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    caplog.clear()
    with torch.no_grad():
        for size in (*range(1, MAX_FORMS + 4), 1):
            x = torch.linspace(-1, 1, 4 * size).view(size, 4)
            assert torch.allclose(model(x), plain(x), atol=1e-6)
    assert [c.kind for c in model.programs].count("forward") == MAX_FORMS
    said = [record.getMessage() for record in caplog.records if "runs by PyTorch" in record.getMessage()]
    assert len(said) == 1 and f"more than {MAX_FORMS} different shapes" in said[0]
    assert "(3 times, " in model.explain()


def test_generate_runs_by_pytorch_on_current_parameters():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    plain = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM"))
    model, x = compiled(copy.deepcopy(plain), "fsdp=2"), torch.arange(8)[None].repeat(2, 1)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(3):
            one(input_ids=x, labels=x).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {one: one.eval().generate(x, max_new_tokens=20, do_sample=False, pad_token_id=0) for one in (plain, model)}
    assert torch.equal(found[plain], found[model])
    assert [c.kind for c in model.programs] == ["step"]
    plain.train(), model.train()
    loss = model(input_ids=x, labels=x).loss
    assert abs(loss.item() - plain(input_ids=x, labels=x).loss.item()) < 1e-5


def test_learning_rate_changes_do_not_recompile():
    model = compiled(Net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for x, y in data(5):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert len(model.programs) == 1


@pytest.mark.parametrize("strategy", [None, "fsdp=4"], ids=lambda text: text or "one device")
def test_microbatches_are_an_accumulating_loop(strategy):
    class NoNorm(Net):
        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    reference = NoNorm()
    text = "microbatches=2" + (f",{strategy}" if strategy else "")
    model = compiled(copy.deepcopy(reference), text)
    expected, got = plain_loop(reference), plain_loop(model)
    assert relative_error(torch.tensor(got), torch.tensor(expected)) < 1e-5
    assert [compiled.kind for compiled in model.programs] == ["grad", "update"]


def test_max_grad_norm_equals_clipping_in_the_loop():
    reference = Net()
    model = compiled(copy.deepcopy(reference), None, max_grad_norm=0.1)
    clipped(reference)
    plain_loop(model)
    for name, value in reference.state_dict().items():
        assert relative_error(model.state_dict()[name], value) < 1e-4, name


@pytest.mark.parametrize("strategy", [None, "fsdp=2", "dp=2"], ids=lambda text: text or "one device")
@pytest.mark.default_cases("one device")
def test_constants_of_a_forward_belong_to_its_program(strategy):
    """Tensors made in the forward are lifted under the same names in training and evaluation, with other values."""

    class Weighted(Net):
        def forward(self, x):
            weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0] if self.training else [5.0, 4.0, 3.0, 2.0, 1.0])
            return self.second(torch.relu(self.norm(self.first(x)))) * weights

    reference = Weighted()
    model = compiled(copy.deepcopy(reference), strategy)
    assert relative_error(flatten(evaluated_between(model)), flatten(evaluated_between(reference))) < 1e-5


def test_train_step_is_the_loop():
    reference = Net()
    model = copy.deepcopy(reference)
    expected = plain_loop(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = graphacc.train_step(model, optimizer, lambda m, x, y: F.cross_entropy(m(x), y), devices=1, cache_dir=None)
    losses = [step(x, y) for x, y in data()]
    assert all(isinstance(loss, Promise) for loss in losses), "the step waited for its loss"
    assert relative_error(torch.tensor([loss.item() for loss in losses]), torch.tensor(expected)) < 1e-5


def test_optimizer_state_dict_is_torchs():
    reference = Net()
    model = compiled(copy.deepcopy(reference), "fsdp=2")
    optimizers = []
    for module in (reference, model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for x, y in data(3):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    want, got = optimizers[0].state_dict(), optimizers[1].state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for index, state in want["state"].items():
        assert got["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert relative_error(got["state"][index][name], value) < 1e-4, (index, name)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    other.load_state_dict(got)


def test_optimizer_state_can_be_loaded():
    reference = Net()
    first = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for x, y in data(2):
        F.cross_entropy(reference(x), y).backward()
        first.step()
        first.zero_grad()
    model = compiled(copy.deepcopy(reference), "fsdp=2")
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares the tensors otherwise
    for module, optimizer in ((reference, first), (model, second)):
        for x, y in data(2):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        assert relative_error(model.state_dict()[name], value) < 1e-4, name


def test_a_copy_is_an_ordinary_model():
    model = compiled(Net(), None)
    plain_loop(model)
    copied = copy.deepcopy(model)
    assert type(copied) is Net and type(copied.first.weight) is nn.Parameter
    for name, value in model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value)


@pytest.mark.matrix
def test_dropout_is_the_same_on_any_number_of_devices():
    class Dropped(Net):
        def forward(self, x):
            return self.second(F.dropout(torch.relu(self.first(x)), 0.5, self.training))

    reference = Dropped()
    losses = []
    for strategy in (None, "dp=4", "fsdp=2,zero=3", "dp=2,fsdp=4"):
        losses.append(plain_loop(compiled(copy.deepcopy(reference), strategy, seed=7)))
    for other in losses[1:]:
        assert relative_error(torch.tensor(other), torch.tensor(losses[0])) < 1e-5
    assert plain_loop(compiled(copy.deepcopy(reference), None, seed=8)) != losses[0]


# ---- what cannot be done is refused with the remedy


def run_once(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_gradients_cannot_be_read_after_the_step():
    model = compiled(Net(), None)
    run_once(model, torch.optim.SGD(model.parameters(), lr=0.1), *data(1)[0])
    with pytest.raises(graphacc.LoopError, match=r"first.weight.grad was read after optimizer.step"):
        model.first.weight.grad.norm()


def test_backward_without_zero_grad_is_refused():
    model = compiled(Net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_once(model, optimizer, *data(1)[0])
    with pytest.raises(graphacc.LoopError, match="zero_grad"):
        run_once(model, optimizer, *data(1)[0])


def test_a_batch_written_before_the_step():
    reference = Net()
    model = compiled(copy.deepcopy(reference), None)
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        ((x, y),) = data(1)
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        x.zero_()
        optimizer.step()
    for got, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got.detach(), expected.detach())


def test_a_parameter_written_before_backward_is_refused():
    """PyTorch computes with the new value in part, or raises."""
    model = compiled(Net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), = data(1)
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        model.first.weight.clamp_(-0.1, 0.1)
    with pytest.raises(graphacc.LoopError, match="'first.weight' was written between"):
        loss.backward()
        optimizer.step()


def test_compiling_twice_is_refused():
    model = compiled(Net(), None)
    with pytest.raises(graphacc.GraphAccError, match="compiled already"):
        graphacc.compile(model)
    with pytest.raises(graphacc.LoopError, match="outermost"):
        graphacc.compile(nn.Sequential(model))


def test_nan_loss_warns_with_the_step_or_stops():
    model = compiled(Net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(1)[0]
    run_once(model, optimizer, x, y)
    optimizer.zero_grad()
    run_once(model, optimizer, x * float("nan"), y)
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="loss of step 2 is nan"):
        for _ in range(MAX_BEHIND):
            run_once(model, optimizer, x, y)
            optimizer.zero_grad()
    for _ in range(MAX_BEHIND):  # said once: the parameters are NaN, and so are all losses that follow
        run_once(model, optimizer, x, y)
        optimizer.zero_grad()
    model = compiled(Net(), None, nan_loss="stop")
    with pytest.raises(graphacc.NonFiniteLossError, match="loss of step 1 is nan"):
        run_once(model, torch.optim.SGD(model.parameters(), lr=0.1), x * float("nan"), y)
