"""What is cut into microbatches, and what the loop sees of their results: what the whole batch gives, or where that cannot be, a loop of PyTorch's that accumulates."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import check_both, compiled, relative_error

B, COUNT = 8, 2
STRATEGIES = ["microbatches=2", "pp=2,microbatches=2"]
CENTRES = torch.linspace(-1, 2, 64).view(8, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.table = torch.linspace(-1, 1, 64).view(8, 8)  # no buffer
        self.narrow = torch.linspace(0, 1, 24).view(3, 8)
        self.outside = [nn.Conv1d(1, 8, 3).requires_grad_(False)]

    def forward(self, x):
        return self.layers(x)


class Tables(Model):
    def forward(self, x):
        y = self.layers(x)
        return torch.cdist(y, self.table) + torch.cdist(y, self.narrow).sum(1, keepdim=True) + self.outside[0](y[:, None]).mean((1, 2))[:, None]


def run(cls, compile_it, loss_of, strategy="microbatches=2", seen=lambda out, y: [], batch=B, read_late=False, **options):
    """Losses, what the loop has seen, and the model; plain PyTorch accumulates over the halves of the batch."""
    torch.manual_seed(0)
    model = cls()
    if compile_it:
        model = compiled(model, strategy, devices=options.pop("devices", 2 if "pp" in strategy else 1), **options)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(batch, 6, generator=generator), torch.randint(8, (batch,), generator=generator)
        parts = 1 if compile_it else COUNT
        losses, results = [], []
        for xs, ys in zip(x.chunk(parts), y.chunk(parts)):
            out = model(xs)
            loss = loss_of(out, ys)
            results.append(out if compile_it else out.detach())
            (loss / parts).backward()
            losses.append(loss.detach())
        shown = [value if read_late else float(value) for value in seen(results[0], y)] if compile_it else seen(torch.cat(results), y)
        optimizer.step()
        optimizer.zero_grad()
        found.append([float(value) for value in (torch.stack(losses).mean(), *shown)])
    return found, model


def assert_equal(cls, loss_of, **options):
    expected, plain = run(cls, False, loss_of, **{key: value for key, value in options.items() if key in ("seen", "batch")})
    found, model = run(cls, True, loss_of, **options)
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(got, want) < 1e-4
    assert not model._graphacc_engine.by_pytorch.counts, model._graphacc_engine.by_pytorch.counts
    return model


def of_centres(out, y):
    return torch.cdist(out, CENTRES).amin(1).mean() + F.cross_entropy(out, y)


def of_weights(out, y):
    """The targets are cut, what has their size by accident is not."""
    targets = F.one_hot(y, 8).float()
    return (F.linear(out, CENTRES).pow(2).mean(1) + (out - targets).pow(2).sum(1)).mean() + F.conv1d(out[:, None], CENTRES[:, None, :3]).mean()


class Tokens(nn.Module):
    """A language model, some of whose positions count."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.scale = nn.Embedding(12, 8), nn.Linear(8, 12), nn.Parameter(torch.ones(()))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("weight", torch.linspace(0.5, 2, 12))

    def forward(self, x, padding=None):
        return self.head(self.layer(self.embedding(x), src_key_padding_mask=padding))


def ragged(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(12, (8, 6), generator=generator), torch.randint(12, (8, 6), generator=generator)
    padding = torch.arange(6) >= torch.randint(1, 7, (8, 1), generator=generator)
    return x, y.masked_fill(padding, -100), padding


WHOLE = {
    "ignored labels": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    "classes in dim 1": lambda m, x, y, p: F.cross_entropy(m(x).transpose(1, 2), y),
    "weights of classes": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), weight=m.weight),
    "smoothed labels": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "a sum": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum") / 20,
    "a masked mean": lambda m, x, y, p: (F.cross_entropy(m(x).flatten(0, 1), x.flatten(), reduction="none") * ~p.flatten()).sum() / (~p).sum(),
    "padding in the model": lambda m, x, y, p: F.cross_entropy(m(x, p).flatten(0, 1), y.flatten()),
    "means of examples": lambda m, x, y, p: (F.cross_entropy(m(x).transpose(1, 2), y, reduction="none").sum(1) / (~p).sum(1)).mean(),
    "the longest example": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum") / (~p).sum(1).max(),
    "a penalty of the weights": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten()) + 0.01 * sum(q.pow(2).sum() for q in m.parameters()),
    "a learned weight": lambda m, x, y, p: F.cross_entropy(m(x).flatten(0, 1), y.flatten()) / m.scale.pow(2) + m.scale.log(),
    "time before batch": lambda m, x, y, p: F.cross_entropy(m(x).transpose(0, 1).flatten(0, 1), y.t().flatten()),
    "halves": lambda m, x, y, p: F.cross_entropy(m(x[:4]).flatten(0, 1), y[:4].flatten()) + F.cross_entropy(m(x[4:]).flatten(0, 1), y[4:].flatten()),
}


@pytest.mark.parametrize("strategy", ["microbatches=4", "pp=2,microbatches=2", "fsdp=2,microbatches=2", "tp=2,microbatches=2"])
@pytest.mark.parametrize("loss_of", WHOLE.values(), ids=WHOLE)
@pytest.mark.default_cases("ignored labels-pp=2,microbatches=2", "a learned weight-microbatches=4", "halves-fsdp=2,microbatches=2")
def test_the_loss_is_that_of_the_whole_batch(loss_of, strategy, caplog):
    """Not the mean of the microbatches' losses, of which each has another number of labels that count."""
    torch.manual_seed(0)
    reference = Tokens()
    model = compiled(copy.deepcopy(reference), strategy, devices=1 if strategy.startswith("micro") else 2)
    check_both(reference, model, lambda one, step: loss_of(one, *ragged(step)), steps=3, lr=0.1)
    assert not any("stands for itself" in record.message for record in caplog.records)


class Asking(Tokens):
    """Asks for values of the batch, as models do that leave a mask out if it hides nothing."""

    def forward(self, x, padding=None):
        padding = padding if padding is not None and padding.any() else None
        return super().forward(x, padding) * (1 + int((x > 5).sum()) / 100)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["padding in the model", "examples against each other"])
@pytest.mark.default_cases("padding in the model-pp=2,microbatches=2", "examples against each other-microbatches=2")
def test_values_of_the_whole_batch_are_answered(name, strategy):
    """Where the microbatches give together what the batch gives; otherwise each would have asked for its own values."""
    is_whole = name in WHOLE
    loss_of = WHOLE[name] if is_whole else lambda m, x, y, p: F.cross_entropy(m(x)[:, 0] @ m(x)[:, -1].T, torch.arange(8))
    torch.manual_seed(0)
    reference = Asking()
    model = compiled(copy.deepcopy(reference), strategy, devices=2 if "pp" in strategy else 1)
    check_both(reference, model, lambda one, step: loss_of(one, *ragged(step)), steps=3, lr=0.1, by_pytorch=not is_whole)
    assert bool(model._graphacc_engine.by_pytorch.counts) == (not is_whole)
    assert is_whole or any("the code asks for values of the batch, of which microbatches=2 have a part each" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_dropout_of_microbatches_is_that_of_the_whole_batch():
    """Random numbers do not depend on how the batch is cut."""

    def losses(strategy, devices):
        torch.manual_seed(0)
        model = compiled(nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 8)), strategy, devices=devices, seed=3)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)), torch.arange(8)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    whole = losses(None, 1)
    assert losses("microbatches=4", 1) == pytest.approx(whole, rel=1e-5)
    assert losses("pp=2,dp=2,microbatches=2", 4) == pytest.approx(whole, rel=1e-5)


class Averaging(Model):
    """Keeps an average of its inputs, and takes its results from it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.average.mul_(0.9).add_(0.1 * x.mean(0))
        self.calls += 1
        return self.layers(x - self.average)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.default_cases("pp=2,microbatches=2")
def test_buffers_are_written_once_for_the_whole_batch(strategy):
    torch.manual_seed(0)
    reference = Averaging()
    model = compiled(copy.deepcopy(reference), strategy, devices=2 if "pp" in strategy else 1)
    check_both(reference, model, lambda one, step: F.cross_entropy(one(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))), torch.arange(8)), steps=3)
    assert model.calls == 3


@pytest.mark.parametrize("rows", [8, 6, 5])
@pytest.mark.default_cases("6")
def test_a_number_that_was_chosen_fits_the_dims_of_the_examples(rows):
    """The first dim is time, whose size says nothing."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):  # [T, B, 8], [B]
            return F.cross_entropy(self.linear(x).mean(0), y)

    torch.manual_seed(0)
    reference = Last()
    model = compiled(copy.deepcopy(reference), "microbatches=4", devices=1, batch_dims={"model.args[0]": 1, "model.args[1]": 0})
    model._graphacc_engine.programs.chose_microbatches = True
    check_both(reference, model, lambda one, step: one(torch.randn(6, rows, 8, generator=torch.Generator().manual_seed(step)), torch.arange(rows)), steps=2)
    (found,) = [joint.parts.count for joint in model._graphacc_engine.execution._joints.values() if joint.parts is not None] or [1]
    assert found == {8: 4, 6: 3, 5: 1}[rows]


def test_every_reason_is_said(caplog):
    """Once each: a loop may have several losses that have to see all examples."""
    torch.manual_seed(0)
    model = compiled(Model(), "microbatches=2", devices=1)
    for step in range(6):
        loss = model(torch.randn(8, 6)).pow(2).mean()
        (loss.exp(), loss.sqrt(), loss)[step % 3].backward()
        model.zero_grad()
    said = [record.message for record in caplog.records if "stands for itself" in record.message]
    assert len(said) == 2 and "aten.exp.default needs" in said[0] and "aten.sqrt.default needs" in said[1]


def test_work_that_every_microbatch_repeats_is_said(caplog):
    class Pairs(Model):
        def forward(self, x):
            return self.layers(x[:4]) - self.layers(x[4:])

    torch.manual_seed(0)
    reference = Pairs()
    model = compiled(copy.deepcopy(reference), "microbatches=2", devices=1)
    check_both(reference, model, lambda one, step: F.cross_entropy(one(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))), torch.arange(4)), steps=2)
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING and "every microbatch computes" in record.message]
    assert "for the whole batch" in said and "test_microbatches.py" in said




@pytest.mark.parametrize("strategy, loss_of, batch", [("microbatches=2", of_centres, 8), ("pp=2,microbatches=2", of_weights, 8), ("microbatches=2", of_weights, 12)])
def test_tensors_of_the_batchs_size_that_are_no_batch(strategy, loss_of, batch):
    """Silent until now: prototypes, frozen weights and attributes were cut where their first dim was that of the batch."""
    assert_equal(Model, loss_of, strategy=strategy, batch=batch)


@pytest.mark.parametrize("strategy, batch", [("microbatches=2", 8), ("pp=2,microbatches=2", 12)])
def test_tables_of_the_model_are_whole(strategy, batch):
    assert_equal(Tables, lambda out, y: F.cross_entropy(out, y), strategy=strategy, batch=batch)


def test_two_rows_are_cut_as_rows():
    """One row fits everything, by broadcasting."""
    assert_equal(Model, lambda out, y: (out - F.one_hot(y, 8)).pow(2).mean(), batch=2)


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(12, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x):
        return self.layers(self.embedding(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flat_labels_that_are_views(strategy):
    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            x = torch.arange(32).view(4, 8).add(step) % 12
            loss = F.cross_entropy(model(x[:, :]).flatten(0, 1), (x + 1).remainder(12).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    model = Sequences()
    plain, model = losses(model), compiled(Sequences(), strategy, devices=2 if "pp" in strategy else 1)
    torch.manual_seed(0)
    model.load_state_dict(Sequences().state_dict())
    assert losses(model) == pytest.approx(plain, rel=1e-5)
    assert not model._graphacc_engine.by_pytorch.counts


def next_words(model, x):
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def of_a_flat_result(model, x):
    """The labels are a copy, of which nobody knows in which order its rows are: every microbatch has all of them."""
    return F.cross_entropy(model(x), x[:, 1:].flatten())


class Flat(Sequences):
    def forward(self, x):
        return super().forward(x)[:, :-1].reshape(-1, 12)


@pytest.mark.parametrize("cls, loss_of", [(Sequences, next_words), (Flat, of_a_flat_result)])
def test_flat_labels_that_are_copies(cls, loss_of, caplog):
    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            loss = loss_of(model, torch.arange(36).view(4, 9).mul(step + 3) % 12)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain = losses(cls())
    torch.manual_seed(0)
    model = compiled(cls(), "microbatches=2", devices=1)
    assert losses(model) == pytest.approx(plain, rel=1e-5)
    assert not model._graphacc_engine.by_pytorch.counts
    assert not caplog.records


def test_weights_of_classes_beside_labels(recwarn):
    """There are as many classes as examples: the labels are cut, the weights are not."""
    weight = torch.linspace(0.5, 2, 8)
    assert_equal(Model, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 8).float(), weight=None, pos_weight=weight) + F.mse_loss(out, F.one_hot(y, 8).float()))
    assert not [warning for warning in recwarn if "target size" in str(warning.message)]


def test_a_loop_over_rows_is_pytorchs():
    torch.manual_seed(0)
    model = compiled(Model(), "microbatches=2", devices=1)
    sum(row.pow(2).mean() for row in model(torch.ones(4, 6))).backward()
    assert any("a loop over the rows" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_batch_dims_hold_where_the_loop_writes_into_the_batch():
    """A copy is what the program reads; it was cut along dim 0."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):  # [T, B, 8]
            return self.linear(x).mean((0, 2)).cumsum(0).mean() + self.linear(x).amax((0, 2)).pow(2).mean()

    torch.manual_seed(0)
    model = compiled(Last(), "microbatches=2", devices=1, batch_dims={"model.args[0]": 1})
    x = torch.randn(4, 4, 8)
    with torch.no_grad():
        halves = [model(half.contiguous()).item() for half in x.chunk(2, 1)]
    loss = model(x)
    x.zero_()
    loss.backward()
    assert loss.item() == pytest.approx(sum(halves) / 2, rel=1e-5)


def seen_numbers(out, y):
    right = (out.argmax(1) == y)
    return [right.sum(), right.float().sum(), right.float().mean(), out.max(), out.std(), out.norm() / 2, F.cross_entropy(out, y), F.mse_loss(out, CENTRES[0].expand(len(y), 8), reduction="sum")]


@pytest.mark.parametrize("strategy, read_late", [("microbatches=2", False), ("pp=2,microbatches=2", True)])
def test_numbers_that_the_loop_takes_of_results(strategy, read_late):
    """Sums and maxima were means of the microbatches' ones."""
    assert_equal(Model, F.cross_entropy, strategy=strategy, seen=seen_numbers, read_late=read_late)


def first_batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, 6, generator=generator), torch.randint(8, (B,), generator=generator)


def test_a_loss_over_pairs_of_examples_is_pytorchs_and_says_why(caplog):
    def contrastive(out, y):
        out = F.normalize(out, dim=1)
        return -((y[:, None] == y[None]).float() * (out @ out.T).log_softmax(1)).mean()

    torch.manual_seed(0)
    model = Model()
    found, _ = run(Model, True, contrastive)
    assert found[0][0] == pytest.approx(contrastive(model(first_batch()[0]), first_batch()[1]).item(), rel=1e-5)
    assert "sets its examples in relation to each other" in caplog.text


class Normalised(Model):
    """Its statistics are those of a microbatch, as in a loop that accumulates."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x):
        return self.norm(self.layers(x))


def test_microbatches_that_stand_for_themselves_are_said(caplog):
    with caplog.at_level(logging.WARNING, "graphacc"):
        run(Model, True, lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y))
        assert not any("stands for itself" in record.message for record in caplog.records)
        assert_equal(Normalised, lambda out, y: F.cross_entropy(out, y) * 0.5 + 0.1 * out.pow(2).mean())
        (said,) = [record.message for record in caplog.records if "stands for itself" in record.message]
        assert "depends on parameters, at " in said and "test_microbatches.py" in said and "not seen to be a mean" not in said
        run(Normalised, True, lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y))
        assert sum("not seen to be a mean" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_detached_after_backward(strategy):
    """Under a pipeline they were lost."""
    torch.manual_seed(0)
    model = compiled(Model(), strategy, devices=2 if "pp" in strategy else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(torch.ones(4, 6))
    loss = out.pow(2).mean()
    loss.backward()
    kept, result = loss.detach(), out.detach()
    optimizer.step()
    assert kept.item() == pytest.approx(loss.item()) and kept.item() == pytest.approx(result.pow(2).mean().item())


class Bag(nn.Module):
    """Words of all texts, and where each text begins."""

    def __init__(self):
        super().__init__()
        self.words, self.linear = nn.EmbeddingBag(12, 8), nn.Linear(8, 4)

    def forward(self, words, offsets):
        return self.linear(self.words(words, offsets))


def by_rows(model, x, step):
    return -model(x).log_softmax(-1)[torch.arange(len(x)), torch.arange(len(x)) % 8].mean()


def against_each_other(model, x, step):
    out = model(x)
    return F.cross_entropy(out @ out.T, torch.arange(len(x)))


def shuffled(model, x, step):
    out = model(x)
    return (out - out[torch.arange(len(x)).roll(3)]).pow(2).mean()


def bags(model, x, step):
    return F.cross_entropy(model(torch.arange(24) % 12, torch.tensor([0, 4, 9, 15])), torch.tensor([0, 3, 1, 2]))


@pytest.mark.parametrize("cls, loss_of, batch", [(Model, by_rows, 16), (Model, against_each_other, 8), (Model, shuffled, 8), (Bag, bags, 8)])
def test_numbers_of_rows_are_those_of_the_whole_batch(cls, loss_of, batch):
    """A part of the batch has not all the rows that indices name, and XLA takes another row: PyTorch runs such a step."""
    torch.manual_seed(0)
    plain = cls()
    torch.manual_seed(0)
    model = compiled(cls(), "microbatches=2", devices=1)
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        found = []
        for step in range(3):
            loss = loss_of(one, torch.randn(batch, 6, generator=torch.Generator().manual_seed(step)), step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert any("rows of the whole batch" in why or "batch_dims" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_rows_that_the_forward_counts_are_compiled():
    class Counting(Model):
        def forward(self, x, y):
            return -self.layers(x).log_softmax(-1)[torch.arange(len(x)), y].mean()

    torch.manual_seed(0)
    model, y = compiled(Counting(), "microbatches=2", devices=1), torch.arange(8) % 8
    x = torch.randn(8, 6)
    with torch.no_grad():
        expected = model(x, y).item()
    loss = model(x, y)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5) and not model._graphacc_engine.by_pytorch.counts
