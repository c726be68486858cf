"""bucket_lengths: batches of many lengths run few programs, with the losses, gradients and results of the unpadded batches in plain PyTorch.

Legend: B batch, T sequence, D features.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
import zoo
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error
from torch import nn
from training import assert_parity, compiled, train

import graphacc
from graphacc.errors import StrategyError
from graphacc.loop.buckets import AUTOMATIC
from graphacc.loop.engine import MAX_FORMS

B, D = 8, 8
BUCKETS = (8, 16, 24, 32)


def causal_batches(lengths, seed: int = 0) -> list[dict]:
    """Tokens, and labels of which some are ignored."""
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, 60, (B, length), generator=random) for length in lengths]
    return [dict(input_ids=x, labels=x.masked_fill(torch.rand(x.shape, generator=random) < 0.2, -100)) for x in ids]


def padded_batches(lengths) -> list[dict]:
    """The same with an attention mask, for an encoder: rows are shorter than the batch."""
    random = torch.Generator().manual_seed(1)
    batches = causal_batches(lengths)
    for batch in batches:
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = (torch.arange(length) < torch.randint(1, length + 1, (B, 1), generator=random)).long()
    return batches


def programs(model: nn.Module, kind: str = "step") -> list:
    return [item for item in graphacc.api.engine_of(model).programs.compiled if item.kind == kind]


def check(name: str, batches: list[dict], strategy: str | None = None, **options) -> nn.Module:
    """Train a zoo model with buckets and by plain PyTorch."""
    reference, _ = zoo.MODELS[name]()
    model = compiled(copy.deepcopy(reference), strategy, **{"bucket_lengths": BUCKETS, "memory_plan": "xla"} | options)
    losses, expected = train(model, batches), train(reference, batches)
    assert_parity(reference, model, expected, losses)
    assert all(abs(got - want) <= 1e-6 * abs(want) for got, want in zip(losses, expected)), (losses, expected)
    return model


def test_automatic_lengths(caplog):
    """A program for all lengths up to the next of the series, whose gaps are at most a quarter; without buckets the log names the remedy from the third program on."""
    assert all(a < b <= max(a + 8, a * 1.25) for a, b in itertools.pairwise(AUTOMATIC)) and AUTOMATIC[-1] > 1_000_000
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(16, D), nn.Linear(D, 4))
    batches = [torch.randint(16, (B, length)) for length in (18, 23, 20, 24, 33)]
    found = {}
    for name, options in (("plain", None), ("automatic", dict(bucket_lengths="auto")), ("none", {})):
        model = copy.deepcopy(reference)
        model = model if options is None else compiled(model, None, memory_plan="xla", **options)
        optimizer, found[name] = torch.optim.SGD(model.parameters(), lr=0.5), []
        caplog.clear()
        for ids in batches:
            loss = F.cross_entropy(model(ids).transpose(1, 2), ids % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name].append(loss.item())
        assert found[name] == pytest.approx(found["plain"], rel=1e-5)
        if options:
            assert len(programs(model)) == 2
    said = [record.message for record in caplog.records if "compiling another step program" in record.message]
    assert ['bucket_lengths="auto"' in text for text in said] == [False, True, True, True]


@pytest.mark.parametrize("buckets", [(16, 32), pytest.param(BUCKETS, marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_thirty_batches_of_thirty_lengths(buckets, caplog):
    lengths = (torch.randperm(30, generator=torch.Generator().manual_seed(0)) + 3).tolist()
    model = check("gpt2", causal_batches(lengths), bucket_lengths=buckets)
    assert len(programs(model)) == len(buckets) <= 6
    assert not [record for record in caplog.records if "bucket_lengths" in record.message]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("bert", None), ("gpt2", "fsdp=8"), ("llama", "tp=2"), *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("bert", "fsdp=8"), ("llama", "fsdp=2,tp=2"), ("bert", "tp=2"), ("llama", "dp=2")))],
)
@pytest.mark.default_cases("gpt2-fsdp=8")
def test_models_and_strategies(name, strategy):
    lengths = [13, 9, 16, 11]
    batches = padded_batches(lengths) if name == "bert" else causal_batches(lengths)
    model = check(name, batches, strategy)
    assert len(programs(model)) == 1


class Tagger(nn.Module):
    """Features of tokens, with dropout, mixed by attention over all of them."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed, self.mix, self.drop = nn.Embedding(20, D), nn.TransformerEncoderLayer(D, 2, 16, dropout, batch_first=True), nn.Dropout(dropout)
        self.out = nn.Linear(D, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.mix(self.embed(tokens))))


def sentences(lengths) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(2)
    return [(torch.randint(0, 20, (B, length), generator=random), torch.randint(0, 5, (B, length), generator=random)) for length in lengths]


@pytest.mark.matrix
def test_the_loops_own_functions_and_results():
    """The loss is the loop's, and so are sizes; results have the batch's length; gradients accumulate."""
    torch.manual_seed(0)
    reference = Tagger()
    model = compiled(copy.deepcopy(reference), None, bucket_lengths=(16,))
    found = []
    for one in (reference, model):
        optimizer, values = torch.optim.SGD(one.parameters(), lr=0.1), []
        for count, (tokens, labels) in enumerate(sentences([9, 16, 12, 5, 10, 11])):
            scores = one(tokens)
            assert scores.shape == (B, tokens.shape[1], 5)
            loss = F.cross_entropy(scores.view(B * tokens.shape[1], 5), labels.view(-1)) + F.mse_loss(scores[:, 1:], scores[:, :-1].detach())
            hits = (scores.argmax(-1) == labels).sum(1)
            loss = loss + scores.sum() / (B * tokens.shape[1])
            loss.backward()
            if count % 2:
                optimizer.step()
                optimizer.zero_grad()
            values += [loss.detach(), scores.detach(), hits]
        with torch.no_grad():
            values += [one(tokens) for tokens, _ in sentences([7, 8])]
        found.append([value.clone() for value in values])
    for got, want in zip(found[1], found[0], strict=True):
        assert got.shape == want.shape
        assert relative_error(got.float(), want.float()) <= LOSS
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_error(got, want) <= PARAMETERS_AFTER_STEPS
    assert {kind: len(programs(model, kind)) for kind in ("step", "grad", "forward")} == {"step": 0, "grad": 1, "forward": 1}
    assert not graphacc.api.engine_of(model).by_pytorch.counts


def test_evaluation_of_many_lengths_stays_compiled():
    """More lengths than there may be shapes of calls without gradients; they share the bucket's one program."""
    torch.manual_seed(0)
    reference = Tagger().eval()
    model = compiled(copy.deepcopy(reference), None, bucket_lengths=(16,))
    with torch.no_grad():
        for tokens, _ in sentences(range(4, 4 + MAX_FORMS + 2)):
            assert relative_error(model(tokens), reference(tokens)) <= LOSS
    assert len(programs(model, "forward")) == 1
    assert not graphacc.api.engine_of(model).by_pytorch.counts


@pytest.mark.matrix
def test_dropout_draws_the_numbers_of_the_unpadded_batch():
    """`verify` lets PyTorch draw, at the batch's own shape, and compares."""
    torch.manual_seed(0)
    model = compiled(Tagger(dropout=0.3), None, bucket_lengths=(16,), verify=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens, labels in sentences([9, 16, 12]):
        F.cross_entropy(model(tokens).transpose(1, 2), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(programs(model)) == 1
    assert graphacc.api.engine_of(model).verifier.report.steps == 3


class Branching(Tagger):
    """Does something else with long sequences."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (2.0 if tokens.shape[1] > 12 else 1.0)


class Recurrent(Tagger):
    """Goes through the sequence by a loop."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state, states = self.embed(tokens[:, 0]), []
        for place in range(tokens.shape[1]):
            state = torch.tanh(state + self.embed(tokens[:, place]))
            states.append(state)
        return self.out(torch.stack(states, 1))


class Sorting(Tagger):
    """What it does along the sequence reads padding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens).sort(1).values)


@pytest.mark.parametrize(
    ("kind", "count", "why"),
    [
        (Branching, 2, "does something else at length"),
        (Recurrent, 3, "its operators depend on the length"),
        (Sorting, 3, "it goes along the sequence"),
        (Tagger, 2, "longer than the largest bucket, 16"),
    ],
)
@pytest.mark.default_cases("Branching-2-does something else at length")
def test_what_cannot_be_padded_is_compiled_for_its_own_length(kind, count, why, caplog):
    torch.manual_seed(0)
    reference = kind()
    model = compiled(copy.deepcopy(reference), None, bucket_lengths=(16,))
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=0.1), []
        for tokens, labels in sentences([14, 9, 17 if kind is Tagger else 13]):
            loss = F.cross_entropy(one(tokens).transpose(1, 2), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert_parity(reference, model, *losses)
    assert len(programs(model)) == count
    assert any("bucket_lengths" in record.message and why in record.message for record in caplog.records), caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_lengths": (32, 16)}, "ascending"),
        ({"bucket_lengths": ()}, "ascending"),
        ({"bucket_lengths": (16,), "strategy": "cp=2"}, "cp=2"),
        ({"bucket_lengths": (16,), "strategy": "pp=2,microbatches=2"}, "pp=2"),
        ({"bucket_lengths": (16,), "batch": "local"}, 'batch="local"'),
        ({"bucket_lengths": (16,), "strategy": "auto,tp=2"}, "auto,tp=2"),
        ({"length_dims": {"model.args[0]": 1}}, "give bucket_lengths"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(StrategyError, match=message):
        graphacc.compile(Tagger(), **options)


@pytest.mark.matrix
def test_two_lengths():
    """An encoder's and a decoder's, equal by chance in one batch."""
    random = torch.Generator().manual_seed(3)
    batches = []
    for source, target in ((13, 9), (11, 14), (15, 15)):
        mask = torch.arange(source) < torch.randint(1, source + 1, (B, 1), generator=random)
        tokens = (torch.randint(2, 60, (B, length), generator=random) for length in (source, target))
        batches.append(dict(input_ids=next(tokens), labels=next(tokens), attention_mask=mask.long()))
    model = check("t5", batches, bucket_lengths=(16,))
    assert len(programs(model)) == 1


def test_a_length_that_is_another_dim():
    """[T, B] tokens: the model is told which dim is the length."""

    class Turned(Tagger):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens.t())

    torch.manual_seed(0)
    reference = Turned()
    model = compiled(copy.deepcopy(reference), None, bucket_lengths=(16,), length_dims={"model.args[0]": 0})
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=0.1), []
        for tokens, _ in sentences([9, 12]):
            loss = one(tokens.t().contiguous()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert_parity(reference, model, *losses)
    assert len(programs(model)) == 1
