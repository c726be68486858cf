"""Loops with recurrent layers and packed sequences: PyTorch's losses and parameters, one program for all lengths."""

import copy

import pytest
import torch
from selection import with_matrix
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import graphacc

STEPS, BATCH, WIDTH = 6, 4, 5


class Recurrent(nn.Module):
    def __init__(self, kind, how, **options):
        super().__init__()
        self.layer, self.how = kind(WIDTH, 8, batch_first=True, **options), how
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x, lengths):
        out = self.how(self.layer, x, lengths)
        return self.head(out)


def last_state(layer, x, lengths):
    state = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
    state = state[0] if isinstance(state, tuple) else state
    return torch.cat((state[-2], state[-1]), 1) if layer.bidirectional else state[-1]


def padded(layer, x, lengths):
    out = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    values, found = pad_packed_sequence(out, batch_first=True, padding_value=0.5)
    return values * found[:, None, None]


def in_descending_order(layer, x, lengths):
    lengths, order = lengths.sort(descending=True)
    return pad_packed_sequence(layer(pack_padded_sequence(x[order], lengths, batch_first=True))[0], batch_first=True)[0]


def to_a_length(layer, x, lengths):
    out = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    return pad_packed_sequence(out, batch_first=True, total_length=STEPS + 2)[0]


def time_first(layer, x, lengths):
    out = layer(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False))[0]
    return pad_packed_sequence(out)[0]


def of_parts(layer, x, lengths):
    packed = layer(pack_sequence([x[0], x[1, :4], x[2, :1]]))[0]
    return torch.stack([part.mean(0) for part in unpack_sequence(packed)])


def of_a_mask(layer, x, lengths):
    return padded(layer, x, (x[..., 0] != 0).sum(1).clamp(min=1))


def one_sample(layer, x, lengths):
    return layer(x[0])[0]


def from_a_state(layer, x, lengths):
    state = torch.ones(layer.num_layers * (1 + layer.bidirectional), len(x), 8)
    return layer(x, (state, state) if isinstance(layer, nn.LSTM) else state)[0]


def rows(layer, x, lengths):
    return layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0].data


def rows_written(layer, x, lengths):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    packed = PackedSequence(packed.data * 2, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return pad_packed_sequence(layer(packed)[0], batch_first=True)[0]


def packed_outside(layer, x, lengths):
    return pad_packed_sequence(layer(x)[0], batch_first=True)[0]


def trained(model, batches):
    optimizer, losses = torch.optim.Adam(model.parameters(), eps=1e-5), []
    for batch in batches:
        loss = model(*batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(model, batches, **options):
    """The compiled model, trained as PyTorch trains it."""
    reference = copy.deepcopy(model)
    model = graphacc.compile(model, **{"devices": 1, "cache_dir": None, "fast_compile": True} | options)
    assert trained(model, batches) == pytest.approx(trained(reference, batches), rel=2e-5)
    for (name, got), expected in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=1e-4, msg=name)
    return model


def batches(count=4, longest=STEPS, as_list=False):
    """Batches whose longest sequence has all steps, or one fewer."""
    generator, found = torch.Generator().manual_seed(3), []
    for i in range(count):
        lengths = torch.randint(1, longest + 1, (BATCH,), generator=generator)
        lengths[i % BATCH] = longest
        x = torch.randn(BATCH, STEPS, WIDTH, generator=generator)
        x[..., 0] = torch.where(torch.arange(STEPS) < lengths[:, None], x[..., 0], 0.0)
        found.append((x, lengths.tolist() if as_list else lengths))
    return found


def num_programs(model) -> int:
    return str(model.explain()).count("\nstep ")


COMPILED = [last_state, padded, in_descending_order, to_a_length, time_first, of_parts, of_a_mask, one_sample, from_a_state]


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize(("kind", "options"), [(nn.LSTM, {}), (nn.GRU, dict(num_layers=2, bidirectional=True)), (nn.RNN, dict(nonlinearity="relu", bias=False))], ids=["lstm", "gru", "rnn"])
@pytest.mark.default_cases("lstm-padded", "gru-padded", "lstm-of_parts", "rnn-in_descending_order", "lstm-from_a_state")
def test_a_program_for_all_lengths(kind, options, how):
    model = compare(Recurrent(kind, how, **options), batches())
    assert not model._graphacc_engine.by_pytorch.counts and num_programs(model) == 1


@pytest.mark.parametrize("as_list", with_matrix([False, True], [True]))
def test_lengths_below_the_inputs(as_list):
    """Where the states of all steps are padded again, how many they are follows from the longest sequence, and a program has one number; the last state needs none."""
    found = [batch for longest in (6, 5, 6, 5) for batch in batches(2, longest, as_list)]
    model = compare(Recurrent(nn.GRU, last_state), found)
    assert num_programs(model) == (2 if as_list else 1)  # the first list of numbers is taken for constants
    model = compare(Recurrent(nn.GRU, padded), found)
    assert num_programs(model) == (3 if as_list else 2) and not model._graphacc_engine.by_pytorch.counts


@pytest.mark.parametrize("strategy", ["fsdp=8,zero=3", "dp=2,tp=2", "precision=bf16"])
def test_strategies(strategy):
    options = dict(strategy=strategy, devices={"fsdp=8,zero=3": 8, "dp=2,tp=2": 4}.get(strategy, 1))
    model = Recurrent(nn.GRU, padded, num_layers=2)
    found = [(torch.cat((x, x)), torch.cat((lengths, lengths))) for x, lengths in batches(3)]
    if strategy == "precision=bf16":
        losses = trained(copy.deepcopy(model), found)
        model = graphacc.compile(model, cache_dir=None, fast_compile=True, **options)
        assert trained(model, found) == pytest.approx(losses, rel=0.03)
    else:
        model = compare(model, found, **options)
    assert not model._graphacc_engine.by_pytorch.counts


@pytest.mark.parametrize(("how", "why"), [(rows, "rows of a packed sequence"), (rows_written, "rows of a packed sequence"), (packed_outside, "packed outside of the model")])
def test_what_sees_the_rows_is_run_by_pytorch(how, why):
    found = batches(3)
    if how is packed_outside:
        found = [(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), lengths) for x, lengths in found]
    model = compare(Recurrent(nn.LSTM, how), found)
    (reason,) = model._graphacc_engine.by_pytorch.counts
    assert why in reason


class GivesPacked(nn.Module):
    """Returns a packed sequence, or its rows."""

    def __init__(self, rows):
        super().__init__()
        self.layer, self.rows = nn.GRU(WIDTH, 3, batch_first=True), rows

    def forward(self, x, lengths):
        packed = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
        return packed.data if self.rows == "data" else packed


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.GRU(WIDTH, 3, batch_first=True), None

    def forward(self, x, lengths):
        self.kept = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0].data
        return x.mean()


LOOPS = {
    "packed result": (lambda: GivesPacked("packed"), lambda m, x, n: m(x, n).data.square().mean()),
    "its rows": (lambda: GivesPacked("data"), lambda m, x, n: m(x, n).square().mean()),
    "padded by the loop": (lambda: GivesPacked("packed"), lambda m, x, n: pad_packed_sequence(m(x, n), batch_first=True, padding_value=1.0)[0].square().mean()),
    "kept in the model": (Keeps, lambda m, x, n: m(x, n) + m.kept.square().mean()),
    "packed by the loop": (lambda: nn.Linear(WIDTH, 3), lambda m, x, n: pack_padded_sequence(m(x), n, batch_first=True, enforce_sorted=False).data.square().mean()),
    "captions": (
        lambda: nn.Linear(WIDTH, 3),
        lambda m, x, n: nn.functional.cross_entropy(*(pack_padded_sequence(z, n, batch_first=True, enforce_sorted=False)[0] for z in (m(x), x.argmax(-1) % 3))),
    ),
    "a layer of the loop": (lambda: nn.Linear(WIDTH, 8), lambda m, x, n: LAYER(pack_padded_sequence(m(x), n, batch_first=True, enforce_sorted=False))[1].square().mean()),
}
LAYER = nn.GRU(8, 4, batch_first=True).requires_grad_(False)


@pytest.mark.parametrize("name", LOOPS)
def test_rows_that_the_loop_gets_are_those_of_the_lengths(name):
    make, loss = LOOPS[name]
    torch.manual_seed(0)
    reference, found = make(), []
    for model in (copy.deepcopy(reference), graphacc.compile(copy.deepcopy(reference), devices=1, cache_dir=None, fast_compile=True)):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, lengths in batches(3):
            value = loss(model, x, lengths)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        found.append([torch.tensor(losses), *(p.detach() for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6)


def test_gradients_of_gradients_are_run_by_pytorch():
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(WIDTH, 8, batch_first=True)

        def forward(self, x):
            x = x.detach().requires_grad_()
            out = self.layer(x)[0]
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.mean() + gradient.square().sum()

    model = compare(Penalised(), [(x,) for x, _ in batches(2)])
    assert model._graphacc_engine.by_pytorch.counts


@pytest.mark.parametrize("lengths", [[3, 4, 2, 1], [6, 4, 2, 0], [6, 4, 2], [7, 4, 2, 1]], ids=str)
def test_lengths_that_cannot_be(lengths):
    model = graphacc.compile(Recurrent(nn.GRU, lambda layer, *given: pad_packed_sequence(layer(pack_padded_sequence(*given, batch_first=True))[0])[0]), devices=1, cache_dir=None, fast_compile=True)
    x = torch.randn(BATCH, STEPS, WIDTH)
    for given in ([6, 4, 4, 2], lengths):
        with pytest.raises(RuntimeError) if given is lengths else pytest.MonkeyPatch.context():
            model(x, torch.tensor(given)).sum().backward()
