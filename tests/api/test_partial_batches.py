"""An epoch whose last batch the devices do not divide trains as plain PyTorch does; the logger says once what it costs."""

import copy

import pytest
import torch
import zoo
from pipeline.pipelines import check_pipeline
from selection import with_matrix
from training import adamw, assert_parity, compiled, train

import graphacc


def epoch(name: str, sizes: tuple[int, ...]) -> list[dict]:
    return [zoo.batch(name, seed, size) for seed, size in enumerate(sizes)]


def check_epoch(name: str, strategy: str, sizes: tuple[int, ...], **options):
    reference, _ = zoo.MODELS[name]()
    model = compiled(copy.deepcopy(reference), strategy, **options)
    batches = epoch(name, sizes)
    assert_parity(reference, model, train(reference, batches), train(model, batches))


EPOCHS = [
    ("tied_mlp", "fsdp=8", (8, 4, 8, 1)),
    ("resnet", "dp=2,fsdp=4", (8, 8, 4)),
    ("gpt2", "fsdp=8,zero=2", (8, 4)),
    ("gpt2", "dp=2,fsdp=4,zero=1", (8, 6)),
    ("gpt2", "dp=2,fsdp=2,tp=2", (8, 3)),
    ("mixtral", "dp=2,ep=2", (4, 3)),
    ("mixtral", "dp=2,ep=2", (4, 2)),
]


@pytest.mark.parametrize(("name", "strategy", "sizes"), with_matrix(EPOCHS, [EPOCHS[0], EPOCHS[1], EPOCHS[4], EPOCHS[5]]))
@pytest.mark.default_cases("tied_mlp-fsdp=8-sizes0")
def test_an_epoch_with_a_partial_batch(name, strategy, sizes):
    check_epoch(name, strategy, sizes)


@pytest.mark.parametrize("strategy", ["fsdp=8,zero=1", "dp=2,fsdp=4"])
@pytest.mark.matrix
def test_accumulation_over_a_full_and_a_partial_batch(strategy):
    reference, _ = zoo.MODELS["resnet"]()
    model = compiled(copy.deepcopy(reference), strategy)

    def accumulate(model):
        optimizer, losses = adamw(model), []
        for position, batch in enumerate(epoch("resnet", (8, 4, 8, 3))):
            loss = model(**batch).loss / 2
            loss.backward()
            losses.append(loss.item())
            if position % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    assert_parity(reference, model, accumulate(reference), accumulate(model))


def test_a_partial_batch_in_a_pipeline():
    """Two microbatches of three rows, which two ranks do not divide."""
    check_pipeline(zoo.MODELS["gpt2"]()[0], epoch("gpt2", (8, 6)), "pp=2,dp=2,microbatches=2")


def test_microbatches_do_not_divide_the_partial_batch():
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "microbatches=2")
    with pytest.raises(graphacc.StrategyError, match="microbatches=2 does not divide the batch of 3"):
        train(model, epoch("tied_mlp", (4, 3)))


def test_the_logger_says_once_what_it_costs(caplog):
    check_epoch("tied_mlp", "dp=8", (8, 4, 8, 4))
    notes = [record.getMessage() for record in caplog.records if "is not split over" in record.getMessage()]
    assert len(notes) == 1
    assert "the batch of 4 rows" in notes[0] and "dp=8" in notes[0] and "about 8 times the time" in notes[0]


@pytest.mark.matrix
def test_the_batch_dim_of_the_user(caplog):
    """Rows in dim 1."""

    class SequenceFirst(zoo.LstmLanguageModel):
        def forward(self, input_ids, labels):
            return super().forward(input_ids.T, labels.T)

    reference = zoo.condition(SequenceFirst(), 1)
    dims = {"model.kwargs['input_ids']": 1, "model.kwargs['labels']": 1}
    model = compiled(copy.deepcopy(reference), "fsdp=4", batch_dims=dims)
    batches = [{name: value.T.contiguous() for name, value in batch.items()} for batch in epoch("lstm_lm", (8, 6))]
    assert_parity(reference, model, train(reference, batches), train(model, batches))
    assert "the batch of 6 rows" in caplog.text and "dim 1" in caplog.text


class Shifted(torch.nn.Module):
    """Rows in dim 1 of `x` [T, B, 4] and dim 0 of `y` [B], and a table [8, 4] whose size is the batch's by chance."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = torch.nn.GRU(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x, y, table):
        hidden = self.gru(x + table.mean(0))[0][-1]
        return zoo.Output(torch.nn.functional.mse_loss(self.head(hidden).squeeze(1), y), None)


@pytest.mark.parametrize("strategy", ["microbatches=2", "microbatches=2,dp=2"])
@pytest.mark.default_cases("microbatches=2,dp=2")
def test_microbatches_are_cut_along_the_batch_dims_of_the_user(strategy):
    reference = Shifted()
    dims = {"model.kwargs['x']": 1, "model.kwargs['table']": None}
    model = compiled(copy.deepcopy(reference), strategy, batch_dims=dims)
    batches = [{"x": torch.randn(8, 8, 4), "y": torch.randn(8), "table": torch.randn(8, 4)} for _ in range(3)]
    optimizer, expected = adamw(reference), []
    for batch in batches:
        parts = [{"x": x, "y": y, "table": batch["table"]} for x, y in zip(batch["x"].chunk(2, 1), batch["y"].chunk(2))]
        losses = [reference(**part).loss / 2 for part in parts]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses))
    assert_parity(reference, model, expected, train(model, batches, scheduled=False))


class SequenceFirstHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return torch.tanh(self.head(x))


def test_results_of_microbatches_are_joined_along_the_batch_dim():
    """[T, B, 2] is joined along dim 1, its mean over T [B, 2] along dim 0, and a number is the mean."""
    torch.manual_seed(0)
    reference, x = SequenceFirstHead(), torch.randn(3, 8, 4)
    model = compiled(copy.deepcopy(reference), "microbatches=4", batch_dims={"model.args[0]": 1})
    out = model(x)
    means, loss = out.mean(0), out.square().mean()
    loss.backward()
    expected = reference(x)
    expected.square().mean().backward()
    for got, want in ((out, expected), (means, expected.mean(0)), (loss, expected.square().mean()), (model.head.weight.grad, reference.head.weight.grad)):
        torch.testing.assert_close(got.detach() + 0, want.detach())
