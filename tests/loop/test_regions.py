"""Gradients that flow on from a compiled model, or into it: through plain modules, other compiled models, and the input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from selection import with_matrix
from tolerances import relative_error
from torch import nn
from training import compiled

import graphacc
from graphacc.capture.randomness import keyed_randomness
from graphacc.lowering import registry

STEPS = 4
bce = F.binary_cross_entropy_with_logits


def generator():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def discriminator():
    return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def noise(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def plain(*modules):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [make() for make in modules]


def gan(g, d):
    optimizer_g, optimizer_d = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
    for step in range(STEPS):
        fake = g(noise(step, 8, 4))
        loss_d = bce(d(noise(-step - 1, 8, 6)), torch.ones(8, 1)) + bce(d(fake.detach()), torch.zeros(8, 1))
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        loss_g = bce(d(fake), torch.ones(8, 1))
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        yield from (loss_d.item(), loss_g.item())


def frozen_discriminator(g, d):
    optimizer = torch.optim.AdamW(g.parameters(), lr=0.01)
    d.requires_grad_(False)
    d.eval()
    for step in range(STEPS):
        loss = bce(d(g(noise(step, 8, 4))), torch.ones(8, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    d.requires_grad_(True)


def plain_modules_around(g, d):
    front, back = plain(lambda: nn.Linear(4, 4), lambda: nn.Linear(6, 2))
    optimizer = torch.optim.SGD([*front.parameters(), *back.parameters()], lr=0.1, momentum=0.9)
    own = torch.optim.AdamW(g.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = back(g(torch.tanh(front(noise(step, 8, 4))))).pow(2).mean()
        optimizer.zero_grad()
        own.zero_grad()
        loss.backward()
        optimizer.step()
        own.step()
        yield from (loss.item(), front.weight.grad.sum().item())


def one_optimizer_for_all(g, d):
    (back,) = plain(lambda: nn.Linear(6, 2))
    optimizer = torch.optim.SGD([*g.parameters(), *back.parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = back(g(noise(step, 8, 4))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*g.parameters(), *back.parameters()], 0.5)
        optimizer.step()
        yield loss.item()


def gradient_of_the_input(g, d):
    optimizer = torch.optim.Adam(d.parameters(), lr=0.01)
    for step in range(STEPS):
        x = noise(step, 8, 6).requires_grad_()
        loss = d(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield from (loss.item(), x.grad.abs().sum().item())


def gradient_penalty(g, d):
    optimizer = torch.optim.Adam(d.parameters(), lr=0.01)
    for step in range(STEPS):
        x = noise(step, 8, 6).requires_grad_()
        out = d(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def penalty_through_batch_norm(g, d):
    """DRAGAN's, whose discriminator has BatchNorm; and a parameter that the loop reads itself."""
    optimizer = torch.optim.SGD(g.parameters(), lr=0.05)
    for step in range(STEPS):
        first = g(noise(-step - 1, 8, 4)).pow(2).mean()
        x = noise(step, 8, 4).requires_grad_()
        result = g(x).sum(1) + F.linear(x, g[0].weight).tanh().sum(1)
        (slope,) = torch.autograd.grad(result, x, torch.ones(8), create_graph=True, retain_graph=True)
        loss = (slope.norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield from (first.item(), loss.item())


def adversarial_example(g, d):
    optimizer = torch.optim.SGD(d.parameters(), lr=0.1)
    for step in range(STEPS):
        x = noise(step, 8, 6).requires_grad_()
        (slope,) = torch.autograd.grad(d(x).mean(), x)
        loss = d(x.detach() + 0.1 * slope.sign()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def twice_backward(g, d):
    optimizer = torch.optim.SGD(d.parameters(), lr=0.1)
    for step in range(STEPS):
        x = noise(step, 8, 6).requires_grad_()
        out = d(x)
        out.mean().backward(retain_graph=True)
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield from (out.sum().item(), x.grad.sum().item())


def accumulated_with_recorded(g, d):
    optimizer = torch.optim.Adam(d.parameters(), lr=0.01)
    for step in range(STEPS):
        x = noise(step, 8, 6)
        d(x).mean().backward()
        d((x * 2).requires_grad_()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield sum(p.sum().item() for p in d.parameters())


def triple(parameter):
    parameter.grad.mul_(3.0)


def hooks_on_parameters(g, d):
    if not hasattr(d, "hooked"):
        d.hooked = True
        d[0].weight.register_hook(lambda grad: grad * 0.5)
        d[0].bias.register_post_accumulate_grad_hook(triple)
    yield from gradient_of_the_input(g, d)


def under_autocast(g, d):
    optimizer = torch.optim.SGD(d.parameters(), lr=0.1)
    for step in range(STEPS):
        x = noise(step, 8, 6).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = d(x)
        loss = out.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(out.dtype is torch.bfloat16)


LOOPS = [
    gan, frozen_discriminator, plain_modules_around, one_optimizer_for_all, gradient_of_the_input, gradient_penalty, adversarial_example, twice_backward,
    accumulated_with_recorded, hooks_on_parameters, under_autocast, penalty_through_batch_norm,
]  # fmt: skip


CASES = [(loop, strategy) for loop in LOOPS for strategy in (None, "fsdp=8")]
DEFAULT = [case for case in CASES if case[1] is None or case[0] in (gan, gradient_penalty, accumulated_with_recorded)]


@pytest.mark.parametrize(("loop", "strategy"), with_matrix(CASES, DEFAULT), ids=[f"{loop.__name__}-{strategy or 'one device'}" for loop, strategy in CASES])
@pytest.mark.default_cases("gan-one device", "penalty_through_batch_norm-one device", "one_optimizer_for_all-one device", "adversarial_example-one device", "hooks_on_parameters-one device")
def test_gradients_flow_as_in_pytorch(loop, strategy):
    torch.manual_seed(0)
    references = generator(), discriminator()
    models = [compiled(copy.deepcopy(model), strategy, memory_plan="xla") for model in references]
    expected, got = list(loop(*references)), list(loop(*models))
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
    tolerance = 1e-2 if loop is under_autocast else 1e-4
    for reference, model in zip(references, models):
        state = model.state_dict()
        for name, value in reference.state_dict().items():
            assert relative_error(state[name], value) <= tolerance, name
    used = [use for model in models for use in model._graphacc_engine.regions.values()]
    assert sum(use.backwards for use in used) >= {gradient_penalty: 1, penalty_through_batch_norm: 0}.get(loop, STEPS)
    assert "runs compiled, as a function of PyTorch's autograd" in "".join(model.explain() for model in models)


IN_BF16 = [gan, frozen_discriminator, plain_modules_around, one_optimizer_for_all, gradient_of_the_input, accumulated_with_recorded, twice_backward, hooks_on_parameters]


@pytest.mark.parametrize("loop", with_matrix(IN_BF16, [plain_modules_around, gan]), ids=lambda loop: loop.__name__)
def test_gradients_flow_in_bf16(loop):
    """Backward programs are captured inside PyTorch's backward, where gradients are off: the parameters' way to bf16 has to be recorded all the same."""
    torch.manual_seed(0)
    references = generator(), discriminator()
    models = [compiled(copy.deepcopy(model), None, memory_plan="xla", precision="bf16", verify=2 * STEPS) for model in references]
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in references]
    expected, got = list(loop(*references)), list(loop(*models))
    assert got == pytest.approx(expected, rel=0.03, abs=0.03)
    for reference, model, start in zip(references, models, before):
        state = model.state_dict()
        moved, wanted = (torch.cat([(now[name] - value).double().flatten() for name, value in start.items()]) for now in (state, reference.state_dict()))
        assert (moved - wanted).norm() <= 0.3 * wanted.norm()
        assert [name for name, value in start.items() if torch.equal(state[name], value)] == [name for name, value in start.items() if torch.equal(reference.state_dict()[name], value)]


class Noisy(nn.Module):
    """Dropout, and a buffer that the forward both reads and changes."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        hidden = self.drop(torch.tanh(self.first(x))) * self.level.clone()
        if self.training:
            self.level.mul_(0.8)
        return self.second(self.drop(hidden))


def test_backward_sees_the_random_numbers_and_buffers_of_forward():
    torch.manual_seed(0)
    reference = Noisy()
    model = compiled(copy.deepcopy(reference), None, seed=7)
    for step in range(3):
        found = []
        for one in (reference, model):
            x = noise(step, 8, 4).requires_grad_()
            if one is reference:
                with keyed_randomness(7, step + 1):
                    loss = one(x).pow(2).mean()
            else:
                loss = one(x).pow(2).mean()
            one.zero_grad()
            loss.backward()
            found.append([loss.item(), x.grad, *(p.grad for p in one.parameters()), one.level.clone()])
        for got, want in zip(found[1], found[0]):
            torch.testing.assert_close(got, want)
    assert not model._graphacc_engine.by_pytorch.counts


class TwoResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return hidden, self.second(hidden), self.third(x)


def test_a_hook_on_a_result_that_others_depend_on_is_refused_and_others_are_exact():
    torch.manual_seed(0)
    reference = TwoResults()
    model = compiled(copy.deepcopy(reference), None)
    for one in (reference, model):
        x = noise(0, 8, 4).requires_grad_()
        hidden, out, side = one(x)
        out.retain_grad()
        side.register_hook(lambda grad: grad * 2)
        (out.pow(2).sum() + side.pow(2).sum() + hidden.sum()).backward()
        one.seen = [x.grad, out.grad, *(p.grad for p in one.parameters())]
    for got, want in zip(model.seen, reference.seen):
        torch.testing.assert_close(got, want)
    hidden, out, side = model(noise(0, 8, 4).requires_grad_())
    with pytest.raises(graphacc.LoopError, match="of which another result is computed"):
        hidden.retain_grad()
    with pytest.raises(graphacc.LoopError, match="of which another result is computed"):
        torch.autograd.grad(out.sum(), hidden)


def test_a_parameter_that_changed_before_backward_is_an_error():
    torch.manual_seed(0)
    model = compiled(discriminator(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = model(noise(0, 8, 6).requires_grad_()).mean()
    model(noise(1, 8, 6)).mean().backward()
    optimizer.step()
    with pytest.raises(graphacc.LoopError, match="an optimizer's step has changed since"):
        late.backward()


def test_recordings_that_alternate_are_recognised():
    torch.manual_seed(0)
    models = compiled(generator(), None), compiled(discriminator(), None)
    engine = models[1]._graphacc_engine
    inferred = []
    infer = engine._infer_model
    engine._infer_model = lambda *args: inferred.append(args[0]) or infer(*args)
    list(gan(*models))
    assert len(inferred) == 3  # on real and on generated rows, once each, and with a gradient to the rows


@pytest.mark.lazy
def test_an_operator_without_a_rule_is_left_to_pytorch(monkeypatch):
    """Lazy tensors, which follow operators without a rule, do not record the backward of a part."""
    monkeypatch.delitem(registry._rules, "aten.leaky_relu.default")
    monkeypatch.delitem(registry._rules, "aten.leaky_relu_backward.default")

    def train(model):
        (head,) = plain(lambda: nn.Linear(1, 1))
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for step in range(STEPS):
            loss = head(model(noise(step, 8, 6))).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    (reference,), (model,) = plain(discriminator), plain(discriminator)
    model = compiled(model, None)
    assert list(train(model)) == pytest.approx(list(train(reference)), abs=1e-5)
    assert any("leaky_relu" in text for text in model._graphacc_engine.by_pytorch.counts)


def uncertainty(m, w, x, y):
    a, b = m(x), m(y)
    return (torch.exp(-w[0]) * a.square().mean() + torch.exp(-w[1]) * b.square().mean() + w.sum()) + 0.01 * a.mean()


def contrastive(m, w, x, y):
    a, b = (F.normalize(m(z), dim=1) for z in (x, y))
    scores = a @ b.T * w[0].exp()
    return F.cross_entropy(scores, torch.arange(len(x))) + F.cross_entropy(scores.T, torch.arange(len(x)))


def statistics_between(m, w, x, y):
    """What the loop reads between the calls stays there."""
    a = m(x)
    between = a.mean() + m[1].running_mean.sum()
    return between + (m(y) * w[0].exp()).square().mean()


def written_between(m, w, x, y):
    a = m(x)
    total = a.mean()
    a.mul_(2.0)
    return total + ((m(y) - a) * w[0].exp()).square().mean()


def fed_again(m, w, x, y):
    """The second call reads what the loop made of the first one's result."""
    a = m(x)
    b = m(F.pad(a, (0, 2)) + y)
    return (a * w[0].exp() + b * w[1].exp()).square().mean()


@pytest.mark.parametrize("strategy", [None, "dp=2"])
@pytest.mark.parametrize(("loss", "part"), [(uncertainty, True), (contrastive, True), (statistics_between, True), (written_between, False), (fed_again, False)], ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.default_cases("contrastive--dp=2", "written_between--None", "fed_again--None")
def test_several_calls_and_a_parameter_of_the_loop(loss, part, strategy):
    """A temperature or weights of losses that the loop holds: the calls are one compiled function of autograd, unless what stands between them cannot stand behind them."""
    reference = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    found = []
    for model in (copy.deepcopy(reference), compiled(copy.deepcopy(reference), strategy)):
        w = nn.Parameter(torch.zeros(2))
        optimizer, losses = torch.optim.Adam([*model.parameters(), w], lr=0.01, eps=1e-5), []
        for step in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, w, noise(step, 8, 6), noise(step + 9, 8, 6))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        found.append([torch.tensor(losses), w.detach(), *(each.detach().float() for each in model.state_dict().values())])
    for name, expected, got in zip(("losses", "w", *reference.state_dict()), *found, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert ("runs compiled, as a function of PyTorch's autograd" in model.explain()) == part


@pytest.mark.parametrize("capture", ["fx", pytest.param("lazy", marks=pytest.mark.lazy)])
def test_what_the_loop_does_behind_backward_reads_results_as_promised_in_bf16(capture):
    """The program gives logits in bf16, of which the loop was promised fp32: code in front of step() reads them so."""

    def train(model):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            logits = model(noise(step, 8, 6))
            logits.pow(2).mean().backward()
            scale = 1 + logits.detach().abs().mean()
            for parameter in model.parameters():
                parameter.grad.div_(scale)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(scale.item())
        return seen

    torch.manual_seed(0)
    reference = discriminator()
    model = compiled(copy.deepcopy(reference), None, memory_plan="xla", precision="bf16", verify=3, capture=capture)
    assert train(model) == pytest.approx(train(reference), rel=0.02)


def test_a_gradient_that_cancels_is_verified_by_what_rounding_does_to_it():
    """The gradients of the results add up to zero, so that of the bias is rounding alone, PyTorch's as ours."""
    torch.manual_seed(0)
    model, back = compiled(nn.Linear(6, 8), None, memory_plan="xla", verify=8), nn.Linear(8, 3)
    for step in range(8):
        result = model(noise(step, 32, 6))
        logits = back(result - result.mean(0))
        (logits - noise(-step - 1, 32, 3)).pow(2).mean().backward()
    assert model.bias.grad.abs().max() < 1e-6
