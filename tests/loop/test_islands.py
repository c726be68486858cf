"""Models part of which cannot be captured: PyTorch runs that part, the largest others run compiled, and all of it trains."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from training import assert_parity, check_both, compiled

from graphacc.capture.randomness import keyed_randomness
from graphacc.loop import guards


class Detector(nn.Module):
    """A set of boxes, which a greedy search over values matches to the targets (as DETR; its search is over a Hungarian's costs)."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.heads = nn.ModuleDict({"classes": nn.Linear(8, 4), "boxes": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))})

    def forward(self, x, labels, boxes):
        features = self.backbone(x).flatten(2).transpose(1, 2)
        hidden = self.decoder(self.queries.expand(x.shape[0], -1, -1), features)
        logits, found = self.heads["classes"](hidden), self.heads["boxes"](hidden).sigmoid()
        loss = 0.0
        for row in range(x.shape[0]):
            cost = torch.cdist(found[row], boxes[row], p=1) - logits[row].softmax(-1)[:, labels[row]]
            free, matched = list(range(5)), []
            for target in range(boxes.shape[1]):
                best = min(free, key=lambda query: cost[query, target].item())
                free.remove(best)
                matched.append(best)
            wanted = torch.full((5,), 3)
            wanted[matched] = labels[row]
            loss = loss + F.cross_entropy(logits[row], wanted) + (found[row][matched] - boxes[row]).abs().sum()
        return loss / x.shape[0]


def suppress(boxes, scores):
    """Non-maximum suppression: which boxes stay, best first."""
    kept = []
    for i in scores.argsort(descending=True).tolist():
        low, high = torch.maximum(boxes[i, :2], boxes[kept, :2]), torch.minimum(boxes[i, 2:], boxes[kept, 2:])
        overlap = (high - low).clamp(min=0).prod(-1)
        union = (boxes[i, 2:] - boxes[i, :2]).prod() + (boxes[kept, 2:] - boxes[kept, :2]).prod(-1) - overlap
        if not bool((overlap / union > 0.5).any()):
            kept.append(i)
    return kept[:3]


class TwoStage(nn.Module):
    """Proposals, suppression by their scores, and a head on the regions that are left (as Mask R-CNN)."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.proposals = Proposals()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, labels, boxes):
        features = self.backbone(x)
        pooled, scores = self.proposals(features)
        loss = F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, 0.5))
        return loss + F.cross_entropy(self.head(pooled), labels.flatten()[: pooled.shape[0]])


class Proposals(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 5, 1))

    def forward(self, features):
        out = self.inner(features).flatten(2).transpose(1, 2)
        pooled = []
        for row, values in enumerate(out):
            corner = values[:, 1:3].detach().abs()
            kept = suppress(torch.cat((corner, corner + values[:, 3:].detach().abs() + 0.1), 1), values[:, 0].detach())
            pooled += [features[row].flatten(1)[:, i] for i in kept][:1]
        return torch.stack(pooled), out[..., 0]


class Routed(nn.Module):
    """A router in the middle chooses rows by values of parameters; the embedding and the head are tied."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.router = Router()
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 20, bias=False))
        self.head[1].weight = self.embedding.weight

    def forward(self, x, *_):
        hidden = self.layers[1](self.router(self.layers[0](self.embedding(x))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, hidden):
        gate = self.gate(hidden).squeeze(-1)
        chosen = gate > 0
        out = hidden.clone()
        out[chosen] = out[chosen] + self.expert(hidden[chosen]) * gate[chosen].sigmoid().unsqueeze(-1)
        return out


def llava_with_pooling():
    """A vision-language model whose text goes on from the image tokens with the largest norms, a choice by value."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8, projection_dim=16
    )
    text = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    )
    return Pooled(transformers.CLIPVisionModel(vision), transformers.LlamaForCausalLM(text))


class Pooled(nn.Module):
    def __init__(self, vision, language):
        super().__init__()
        self.vision, self.language, self.projector = vision, language, nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x, ids, *_):
        tokens = self.projector(self.vision(x).last_hidden_state)
        kept = tokens.norm(dim=-1).mean(0)
        tokens = tokens[:, kept > kept.median()]
        words = self.language.get_input_embeddings()(ids)
        hidden = self.language.model(inputs_embeds=torch.cat((tokens, words), 1), use_cache=False).last_hidden_state
        return F.cross_entropy(self.language.lm_head(hidden[:, tokens.shape[1] :]).flatten(0, 1), ids.flatten())


def batch(make, step):
    g = torch.Generator().manual_seed(step)
    if make is Routed:
        return (torch.randint(20, (8, 6), generator=g),)
    if make is llava_with_pooling:
        return torch.randn(8, 3, 16, 16, generator=g), torch.randint(99, (8, 6), generator=g)
    return torch.randn(8, 3, 16, 16, generator=g), torch.randint(3, (8, 2), generator=g), torch.rand(8, 2, 4, generator=g)


def train(model, make, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(*batch(make, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(*batch(make, 9)).item())
    model.train()
    return [*losses, model(*batch(make, 10)).item()]


COMPILED = {
    Detector: ("the submodule backbone (Sequential)", "the submodule decoder (TransformerDecoderLayer)", "the submodule heads.boxes (Sequential)"),
    TwoStage: ("the submodule backbone (Sequential)", "the submodule proposals.inner (Sequential)", "the submodule head (Sequential)"),
    Routed: ("the submodule layers.0 (TransformerEncoderLayer)", "the submodule layers.1 (TransformerEncoderLayer)", "the submodule head (Sequential)"),
    llava_with_pooling: ("the submodule vision (CLIPVisionModel)", "the submodule projector (Sequential)"),
}


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
@pytest.mark.parametrize("make", list(COMPILED), ids=lambda make: make.__name__)
@pytest.mark.default_cases("TwoStage-fsdp=8")
def test_what_can_be_captured_is_compiled(make, strategy):
    torch.manual_seed(0)
    reference = make()
    for name, parameter in reference.named_parameters():
        if name.endswith(("k_proj.bias", "in_proj_bias")):
            nn.init.normal_(parameter)  # the keys' part gets no gradient but rounding noise
    model = compiled(copy.deepcopy(reference), strategy, memory_plan="xla")
    assert_parity(reference, model, train(reference, make), train(model, make), by_pytorch=True)
    text = model.explain()
    for name in COMPILED[make]:
        assert f"{name} runs compiled, as a function of PyTorch's autograd: 6 times forward, 4 times backward" in text, text
    by_pytorch = [line for line in text.splitlines() if "runs by PyTorch" in line]
    assert f"the model {type(model).__name__} runs by PyTorch" in by_pytorch[0]
    assert "test_islands.py" in by_pytorch[0]
    assert "(6 times, " in by_pytorch[0]
    assert "ms on the host each)" in by_pytorch[0]


class Changing(nn.Module):
    """A part gets another number of rows in every call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        hidden = self.first(x)
        count = 1 + int(hidden.detach().abs().sum() * 1000) % 29
        return self.second(hidden.repeat(4, 1)[:count]).pow(2).mean()


@pytest.mark.matrix
def test_shapes_that_depend_on_values_do_not_compile_for_ever():
    torch.manual_seed(0)
    reference = Changing()
    model = compiled(copy.deepcopy(reference), None)
    check_both(reference, model, lambda one, step: one(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))), steps=16, lr=1e-3, by_pytorch=True)
    assert len(model.programs) < 2 * 8 + 2 + 2
    assert "the submodule second (Sequential) runs by PyTorch, not compiled: its arguments had more than 8 different shapes" in model.explain()


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden if hidden.sum() > 0 else -hidden).pow(2).mean()


class Memo(nn.Module):
    """It keeps a tensor of this forward in a dict, as gpytorch's caches do, and its code follows values."""

    def __init__(self):
        super().__init__()
        self.linear, self.memo = nn.Linear(4, 2), {}

    def forward(self, x):
        self.memo = {}
        self.memo["product"] = self.linear.weight @ self.linear.weight.T
        y = self.linear(x)
        if torch.equal(y, y[0].expand_as(y)):
            y = y + 1
        return (y @ self.memo["product"]).square().sum()


def test_values_that_are_others_in_every_call_do_not_compile_parts_for_ever(monkeypatch):
    monkeypatch.setattr(guards, "MAX_STREAK", 3)
    reference = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), Memo())
    model = compiled(copy.deepcopy(reference), None)
    check_both(reference, model, lambda one, step: one(torch.full((4, 3), 0.1 * step)), steps=8, by_pytorch=True)
    assert [program.kind for program in model.programs].count("backward") <= 4
    assert "the submodule 0 (Sequential) runs by PyTorch, not compiled: the forward reads model.1.memo" in model.explain()


def test_dropout_of_compiled_parts_is_drawn_from_the_key_and_the_same_in_backward():
    torch.manual_seed(0)
    reference = Dropped()
    model = compiled(copy.deepcopy(reference), None, seed=3)
    x = torch.randn(8, 4)
    loss = model(x)
    loss.backward()
    counter = model._graphacc_engine.keys.counter
    for number, part in ((counter - 1, reference.first), (counter, reference.second)):
        mode = keyed_randomness(3, number)
        part.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
        part.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None))
    expected = reference(x)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for got, want in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got.grad, want.grad)


def test_hooks_of_parts_run():
    torch.manual_seed(0)
    reference = Dropped()
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = compiled(copy.deepcopy(reference), None)
    seen = []
    for one in (reference, model):
        found = []
        one.first.register_forward_hook(lambda module, args, out, found=found: found.append(out.detach().sum().item()))
        one.second.register_forward_hook(lambda module, args, out: out * 2)
        one.second[0].register_full_backward_hook(lambda module, given, grads, found=found: found.append(grads[0].sum().item()))
        for step in range(3):
            loss = one(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            found.append(loss.item())
        seen.append(found + [p.grad.sum().item() for p in one.parameters()])
    assert seen[1] == pytest.approx(seen[0], rel=1e-4, abs=1e-5)


class ReadsItsGradient(torch.autograd.Function):
    """Its backward cannot be captured: it decides by a value."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 if grad.sum().item() > 1e6 else 1.5)


class Parts(nn.Module):
    """Three compiled parts with code between them that follows values; one weight is in all of them, and each gets what two earlier ones give."""

    def __init__(self, act):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.act = act
        for part in self.parts:
            part[2].weight = self.parts[0][0].weight

    def forward(self, x):
        earlier, x = x, self.parts[0](x)
        for part in self.parts[1:]:
            earlier, x = x, self.inner(part, x if x.sum() > 0 else -x, earlier)
        return x

    def inner(self, part, x, earlier):
        return part(self.act(x) + earlier.tanh())


class Join(nn.Module):
    """Two inputs, of which one is computed from the other outside."""

    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x, earlier):
        return self.act(self.linear(x).tanh_() + self.linear(earlier))


class Joined(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), Join(act), Join(act)
        self.third.linear = self.second.linear

    def forward(self, x):
        x = self.first(x)
        for join in (self.second, self.third):
            x = join(x if x.sum() > 0 else -x, x.sin())
        return x


@pytest.mark.parametrize("make", [Parts, Joined])
def test_gradients_of_a_part_that_pytorch_computes_stop_at_its_inputs(make):
    """Earlier parts have the same weights; what they give is counted once, and their own backward runs once."""
    torch.manual_seed(0)
    reference = make(ReadsItsGradient.apply).double()
    check_islands(reference, lambda model, x: model(x).pow(2).mean())


@pytest.mark.parametrize("make", [Parts, Joined])
def test_gradients_of_parts_that_are_differentiated_again(make):
    torch.manual_seed(0)
    reference = make(torch.sin).double()

    def penalty(model, x):
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.pow(2).mean() + slope.pow(2).mean()

    check_islands(reference, penalty)


def check_islands(reference, loss_of):
    model = compiled(copy.deepcopy(reference), None)
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=0.1), []
        for step in range(4):  # what fails is found out in the first ones
            loss = loss_of(one, torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-8, atol=1e-10)
