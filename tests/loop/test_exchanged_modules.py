"""The loop exchanges, adds or removes modules and parameters: a recorded call is that of the modules which it was made on, and programs are those of the present ones."""

import copy

import pytest
import torch
from selection import with_matrix
from torch import nn
from torch.nn import functional as F
from training import check_both, compiled

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 8
STEPS = 4


def network():
    torch.manual_seed(1)
    shared = nn.Tanh()
    return nn.Sequential(nn.Linear(8, 8), shared, nn.Linear(8, 8), shared)


def other_function(model):
    model[1] = nn.Softplus()


def other_layer(model):
    torch.manual_seed(2)
    model[2] = nn.Linear(8, 8)


def other_parameter(model):
    model[2].weight = nn.Parameter(model[2].weight.detach() * 0.5)


def function_behind_the_last(model):
    model.append(nn.Softplus())


def one_function_more(model):
    model.append(model[1])


def one_function_less(model):
    del model[3]


def one_layer_twice(model):
    model.append(model[0])


def two_change_places(model):
    model[0], model[2] = model[2], model[0]


def no_bias(model):
    model[2].bias = None


@pytest.mark.parametrize("exchange", [other_function, other_layer, other_parameter, function_behind_the_last, one_function_more, one_function_less, one_layer_twice, two_change_places, no_bias])
@pytest.mark.parametrize("step_of_it", [0, 1])
@pytest.mark.parametrize("between", with_matrix(["nothing", "a call", "a call without gradients"], ["nothing", "a call"]))
def test_between_call_and_backward(exchange, step_of_it, between):
    """In the first step the recorded call is compiled behind the exchange, in the second its program is known."""

    def loss_of(model, step):
        out = model(X)
        if step == step_of_it:
            exchange(model)
        if between == "a call":
            out = out + model(2 * X)
        if between == "a call without gradients":
            with torch.no_grad():
                factor = model(2 * X)
            out = out * factor
        return F.cross_entropy(out, Y)

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None), loss_of, STEPS, lr=0.1, by_pytorch=True)


@pytest.mark.parametrize("exchange", [function_behind_the_last, one_function_more, one_function_less, one_layer_twice])
def test_before_a_call(exchange):
    """The modules of the model are the same ones, in other places, and PyTorch runs no part of it."""

    def loss_of(model, step):
        if step == 2:
            exchange(model)
        return F.cross_entropy(model(X), Y)

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None), loss_of, STEPS, lr=0.1)


@pytest.mark.parametrize("requires_gradient", [True, False])
def test_for_the_time_of_a_call(requires_gradient):
    """As torchrl exchanges the parameters of its target networks, by the tables of modules, while the first call waits for its backward."""

    def loss_of(model, step):
        out, table = model(X), model[2]._parameters
        kept = dict(table)
        table.update({name: nn.Parameter(tensor.detach() * 0.9, requires_grad=requires_gradient) for name, tensor in kept.items()})
        other = model(X)
        table.update(kept)
        return F.cross_entropy(out, Y) + (out - other).square().mean()

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None), loss_of, STEPS, lr=0.1, by_pytorch=True)


def test_a_region_whose_backward_comes_later():
    """The backward of a call with an argument that requires a gradient has a program of its own, which is compiled behind the exchange."""

    def loss_of(model, step):
        x = X.clone().requires_grad_()
        out = model(x)
        if step == 1:
            other_function(model)
        return F.cross_entropy(out, Y)

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None), loss_of, STEPS, lr=0.1)


@pytest.mark.parametrize("exchange", [other_function, one_function_less])
def test_verified(exchange):
    """`verify=` runs the recorded call on the modules of its time, too: it compares, and finds nothing."""

    def loss_of(model, step):
        out = model(X)
        if step == 0:
            exchange(model)
        return F.cross_entropy(out, Y)

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None, verify=STEPS), loss_of, STEPS, lr=0.1)


@pytest.mark.lazy
def test_lazy():
    def loss_of(model, step):
        out = model(X)
        if step == 0:
            one_function_less(model)
        return F.cross_entropy(out, Y)

    reference = network()
    check_both(reference, compiled(copy.deepcopy(reference), None, capture="lazy"), loss_of, STEPS, lr=0.1)


class Counts(nn.Module):
    """Gives itself another buffer, and keeps a result, in every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(()))
        self.kept = None

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.detach().mean()
        hidden = self.linear(x)
        self.kept = hidden.square().mean()
        return hidden


def test_a_buffer_that_the_forward_exchanges_while_a_call_waits():
    """The model's code has exchanged it, and the loop nothing: calls that are run again go on from the present buffer."""

    def loss_of(model, step):
        model(X + step).sum().item()
        (F.cross_entropy(model(X + 2), Y) / 2).backward()
        model(X - step).sum().item()
        return F.cross_entropy(model(X + 1), Y) / 2

    reference = Counts()
    check_both(reference, compiled(copy.deepcopy(reference), None), loss_of, STEPS, lr=0.1, by_pytorch=True)


class Counting(nn.Module):
    """Gives itself a new buffer in every call, and keeps a result."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls * 0.5 + x.detach().mean()
        hidden = self.first(x).tanh()
        self.kept = hidden.pow(2).mean()
        return self.second(hidden)


@pytest.mark.parametrize("looks", [False, True])
def test_what_a_recording_did_to_buffers_is_not_done_again(looks):
    """PyTorch runs the first step's calls again at the second's step(), as the model keeps a result, amid an exchanged parameter that nothing has followed yet."""
    torch.manual_seed(0)
    plain, found = Counting(), []
    for model in (plain, compiled(copy.deepcopy(plain), None)):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            seen.append(model(torch.full((6, 4), 10.0**step)).sum().item())
            loss = model(torch.full((6, 4), 2.0**step)).square().mean()
            model.second.bias = nn.Parameter(torch.full((4,), 0.1 * step))
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
            if looks:
                seen.append(model.calls.item())
        found.append([*seen, model.calls.item()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
