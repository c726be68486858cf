"""Python state that changes between a call of the model and its backward: the call computes with what it read."""

import copy

import pytest
import torch
from torch import nn
from training import assert_parity, check_both, compiled

import graphacc


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.count, self.factor, self.factors = 1, 1.0, [1.0]
        self.table = {"signs": [1.0], "names": {"one"}}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        out = self.linear(x) * self.factor * self.factors[0] * self.table["signs"][-1] * len(self.table["names"])
        return out if self.count % 2 else -2 * out


def count(model):
    model.count += 1


def raise_factor(model):
    model.factor += 1.0


def replace_list(model):
    model.factors = [model.factors[0] + 1.0]


def change_in_place(model):
    model.factors[0] += 1.0


def change_nested_in_place(model):
    model.table["signs"].append(-1.5 * model.table["signs"][-1])
    model.table["names"].add(str(len(model.table["names"])))


def several(model):
    model.factor = model.factor * 2
    model.eval()
    model.train()


@pytest.mark.parametrize("with_gradient_of_input", [False, True])
@pytest.mark.parametrize("change", [count, raise_factor, replace_list, change_in_place, change_nested_in_place, several], ids=lambda change: change.__name__)
@pytest.mark.default_cases("count-False", "replace_list-False", "change_nested_in_place-False")
def test_a_change_after_the_call_is_for_the_next_call(change, with_gradient_of_input):
    torch.manual_seed(0)
    reference = Scaled()
    model = compiled(copy.deepcopy(reference), None)

    def loss_of(one, step):
        loss = one(torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).requires_grad_(with_gradient_of_input)).pow(2).mean()
        change(one)
        return loss

    check_both(reference, model, loss_of, steps=4)


def test_a_tensor_that_is_changed_in_place_after_the_call_is_refused():
    model = compiled(Scaled(), None)
    held = torch.ones(())
    model.table["names"].add(held)
    loss = model(torch.ones(4, 4)).pow(2).mean()
    held.mul_(3.0)
    with pytest.raises(graphacc.LoopError, match=r"model\.table, which the model's forward reads, was changed in place"):
        loss.backward()


class Kept(nn.Module):
    """A part that is captured beside one whose hook keeps results."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_list_that_an_observing_hook_fills_between_the_call_and_the_backward():
    def train(model, steps=3):
        kept, losses = [], []
        model.second.register_forward_hook(lambda module, args, out: kept.append(out.detach().mean().item()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x).pow(2).mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses + kept

    torch.manual_seed(0)
    reference = Kept()
    model = compiled(copy.deepcopy(reference), None)
    assert_parity(reference, model, train(reference), train(model), by_pytorch=True)


class FrozenConfig(dict):
    """A dict that forbids writing, as diffusers' configs do."""

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("frozen")

    update = clear = pop = __setitem__ = __delitem__ = _refuse


def test_a_config_that_forbids_writing_is_read():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.config = nn.Linear(4, 4), FrozenConfig(scale=2.0, names=["a"])

        def forward(self, x):
            return self.layer(x) * self.config["scale"] * len(self.config["names"])

    def train(model):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            loss = model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            losses.append(loss.item())
            if step == 1:
                model.config["names"].append("b")  # after the call, whose backward reads what it has seen
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    reference = Model()
    model = Model()
    model.load_state_dict(reference.state_dict())
    model = compiled(model, None)
    assert_parity(reference, model, train(reference), train(model))


def test_an_attribute_that_is_none_at_first_and_a_new_tensor_after_every_call():
    """As Qwen2.5-VL's `rope_deltas`: a program for the first call, and one for all others."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), None

        def forward(self, x):
            if self.last is None:
                self.last = x.mean(0)
            out = self.layer(x) + self.last
            self.last = x.mean(0)
            return out

    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    model = compiled(model, None)
    check_both(reference, model, lambda one, step: one(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean(), steps=6, lr=0.1)
    assert len(model.programs) == 2


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mirrored = nn.Conv2d(1, 2, 3, padding=2), nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
        self.pool, self.norm = nn.AdaptiveAvgPool2d(2), nn.LayerNorm((2, 2, 2))

    def forward(self, x):
        return self.norm(self.pool(self.mirrored(self.conv(x)))).flatten(1)[:, 1:5]


def dilate(model):
    model.conv.dilation = (2, 2)


def stride(model):
    model.conv.stride = (2, 1)


def mirror_more(model):
    model.mirrored._reversed_padding_repeated_twice = [2, 2, 1, 1]


def pool_to_another_size(model):
    model.pool.output_size = (4, 2)
    model.norm.normalized_shape = (4, 2)
    model.norm.weight = model.norm.bias = None


def test_sizes_of_torchs_own_modules_change():
    """Tuples and lists, which torch's modules keep under names of their own."""

    def losses(model):
        optimizer, x, found = torch.optim.SGD([*model.conv.parameters()], lr=0.1), torch.linspace(-1, 1, 128).sin().view(2, 1, 8, 8), []
        for change in (None, dilate, stride, mirror_more, pool_to_another_size):
            if change is not None:
                change(model)
            for _ in range(2):
                loss = (model(x) - 0.5).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    torch.manual_seed(0)
    reference = Image()
    model = compiled(copy.deepcopy(reference), None)
    assert losses(model) == pytest.approx(losses(reference), rel=1e-4)
    assert not model._graphacc_engine.by_pytorch.counts


class Appending(nn.Module):
    """As opacus keeps the inputs of a layer: a forward hook adds to a list on the layer, and the loop empties it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.linear.kept = []
        self.linear.register_forward_hook(lambda layer, given, result: layer.kept.append(given[0].detach()))

    def forward(self, x):
        return self.linear(x)


def test_a_list_on_a_module_of_torch_is_filled_in_the_forward():
    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            loss = model(torch.full((2, 4), 0.5 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), *(kept.sum().item() for kept in model.linear.kept)]
            model.linear.kept.clear()
        return found

    torch.manual_seed(0)
    reference = Appending()
    assert losses(compiled(copy.deepcopy(reference), None, capture="auto")) == pytest.approx(losses(reference), rel=1e-5)
