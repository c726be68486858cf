"""Models outside of the zoo, each for something that the zoo's do not have, trained as plain PyTorch trains them."""

import copy
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from selection import with_matrix
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_parity, compiled
from zoo import HEADS, HIDDEN, LAYERS, VOCAB

STEPS, BATCH = 3, 8


def gemma2() -> nn.Module:
    """Soft-capped scores and logits; layers with a sliding window beside layers without."""
    config = transformers.Gemma2Config(**zoo._DECODER, head_dim=8, sliding_window=6, query_pre_attn_scalar=8)
    return transformers.Gemma2ForCausalLM(config)


def bloom() -> nn.Module:
    """ALiBi; every layer checkpointed."""
    config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        use_cache=False,
    )  # fmt: skip
    model = transformers.BloomForCausalLM(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that most scripts use
        model.gradient_checkpointing_enable()
    return model


def deberta() -> nn.Module:
    """Attention with gathered relative positions."""
    config = transformers.DebertaV2Config(
        **zoo._ENCODER, vocab_size=VOCAB, relative_attention=True, position_buckets=8, max_relative_positions=16,
        share_att_key=True, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip
    return transformers.DebertaV2ForMaskedLM(config)


def mamba() -> nn.Module:
    """A selective scan, written as a loop over time."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, state_size=4, time_step_rank=4, use_cache=False
    )
    return transformers.MambaForCausalLM(config)


class SequenceFirst(nn.Module):
    """nn.Transformer and nn.GRU in their default layout [T, B, E]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about inference
            self.transformer = nn.Transformer(HIDDEN, HEADS, 1, 1, 2 * HIDDEN, dropout=0.0)
        self.gru = nn.GRU(HIDDEN, HIDDEN, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, VOCAB)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[0])
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=causal, src_key_padding_mask=padding)
        return self.head(self.gru(hidden)[0])


class UNet(nn.Module):
    """GroupNorm, strided and transposed convolutions, interpolation, a skip connection."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.deep, self.deep_norm = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.down(x)))
        deep = F.silu(self.deep_norm(self.deep(skip)))
        deep = F.interpolate(F.avg_pool2d(deep, 2), scale_factor=2, mode="bilinear")
        return self.out(torch.cat([skip, self.up(deep)], 1))


class Recommender(nn.Module):
    """Bags of embeddings of both forms, and products of all pairs."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode=mode, padding_idx=2) for mode in ("sum", "mean", "max"))
        self.ragged = nn.EmbeddingBag(20, 8)
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(8 + 10, 1)

    def forward(self, dense: Tensor, ids: Tensor, ragged: Tensor, starts: Tensor) -> Tensor:
        columns = [bag(ids[:, i]) for i, bag in enumerate(self.bags)]
        vectors = torch.stack([self.dense(dense), *columns, self.ragged(ragged, starts)], 1)
        i, j = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([vectors[:, 0], (vectors @ vectors.transpose(1, 2))[:, i, j]], 1)).flatten()


class Parametrized(nn.Module):
    """Weight norm, spectral norm (a power iteration in buffers), an orthogonal map; both forms of checkpoint."""

    def __init__(self):
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.first = parametrizations.weight_norm(nn.Linear(48, 16))
        self.second = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.third = parametrizations.orthogonal(nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(checkpoint(self.first, x, use_reentrant=False))
        return self.head(torch.relu(checkpoint(self.third, torch.relu(self.second(x)), use_reentrant=True)))


def causal(generator: torch.Generator) -> dict:
    tokens, real = zoo._padded(generator, BATCH)
    return dict(input_ids=tokens, attention_mask=real.long(), labels=tokens.masked_fill(~real, zoo.IGNORED))


def short(generator: torch.Generator) -> dict:
    tokens = zoo._tokens(generator, BATCH, 6)
    return dict(input_ids=tokens, labels=tokens)


def masked(generator: torch.Generator) -> dict:
    return zoo._masked_batch(generator, BATCH)


def sequences(generator: torch.Generator) -> dict:
    (source, real), (target, _) = zoo._padded(generator, BATCH, 6), zoo._padded(generator, BATCH, 6)
    return dict(source=source.T.contiguous(), target=target.T.contiguous(), padding=~real)


def images(generator: torch.Generator) -> dict:
    return dict(x=torch.randn(BATCH, 3, 16, 16, generator=generator))


def clicks(generator: torch.Generator) -> dict:
    return dict(
        dense=torch.randn(BATCH, 4, generator=generator),
        ids=torch.randint(20, (BATCH, 3, 5), generator=generator),
        ragged=torch.randint(20, (5 * BATCH,), generator=generator),
        starts=torch.tensor([0, 2, 2, 9, 14, 20, 21, 40]),
    )


def vectors(generator: torch.Generator) -> dict:
    return dict(x=torch.randn(BATCH, 48, generator=generator))


def inside(model: nn.Module, batch: dict) -> Tensor:
    return model(**batch).loss


def next_token(model: nn.Module, batch: dict) -> Tensor:
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["target"].flatten())


def same_image(model: nn.Module, batch: dict) -> Tensor:
    return F.mse_loss(model(**batch), batch["x"])


def clicked(model: nn.Module, batch: dict) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(**batch), (batch["dense"][:, 0] > 0).float())


def largest(model: nn.Module, batch: dict) -> Tensor:
    return F.cross_entropy(model(**batch), batch["x"][:, :4].argmax(-1))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict]
    loss: Callable[[nn.Module, dict], Tensor] = inside
    options: dict = {}


SECOND_DIM = {"model.kwargs['source']": 1, "model.kwargs['target']": 1}

CASES = {
    "gemma2": Case(gemma2, causal),
    "bloom": Case(bloom, causal),
    "deberta": Case(deberta, masked),
    "mamba": Case(mamba, short),
    "sequence_first": Case(SequenceFirst, sequences, next_token, dict(batch_dims=SECOND_DIM)),
    "unet": Case(UNet, images, same_image),
    "recommender": Case(Recommender, clicks, clicked),
    "parametrized": Case(Parametrized, vectors, largest),
}


def run(model: nn.Module, batches: list[dict], loss: Callable[[nn.Module, dict], Tensor]) -> list[float]:
    optimizer = zoo.adamw(model)
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value)
    return [value.item() for value in losses]


def batches_of(case: Case) -> list[dict]:
    return [case.batch(torch.Generator().manual_seed(seed)) for seed in range(STEPS)]


@pytest.mark.parametrize("name", with_matrix(CASES, ["mamba", "recommender", "sequence_first", "parametrized"]))
@pytest.mark.default_cases("parametrized")
def test_sharded_training_gives_what_plain_pytorch_gives(name):
    case = CASES[name]
    torch.manual_seed(0)
    reference = zoo.condition(case.make()).train()
    model = copy.deepcopy(reference)
    expected = run(reference, batches_of(case), case.loss)
    model = compiled(model, "dp=2,fsdp=2,zero=3", **case.options)
    assert_parity(reference, model, expected, run(model, batches_of(case), case.loss))


class Variational(nn.Module):
    """An autoencoder that draws with torch.randn_like and mixes its samples in a random order."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(48, 16), nn.Linear(8, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(code + 0.1 * code[torch.randperm(len(code))]), mean, log_var


def evidence(model: nn.Module, batch: dict) -> Tensor:
    decoded, mean, log_var = model(**batch)
    return F.mse_loss(decoded, batch["x"]) - 0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()


def test_drawn_numbers_are_the_same_on_any_number_of_devices():
    case = Case(Variational, vectors, evidence)
    torch.manual_seed(0)
    reference = zoo.condition(case.make())
    one, four = (compiled(copy.deepcopy(reference), strategy, seed=3) for strategy in (None, "dp=2,fsdp=2"))
    expected = run(one, batches_of(case), case.loss)
    assert_parity(one, four, expected, run(four, batches_of(case), case.loss))
    other = run(compiled(copy.deepcopy(reference), None, seed=4), batches_of(case), case.loss)
    assert all(a != b for a, b in zip(other, expected))


MASK = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1]).bool()


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out[MASK].sum(),
        lambda out: out.masked_select(MASK[:, None]).sum(),
        lambda out: out.mean() + out[MASK].sum(),  # must not lose a part of the gradient in silence
        lambda out: out[out.argmax(-1) == 1].sum() + out.mean(),
    ],
)
@pytest.mark.default_cases("<lambda>0", "<lambda>3")
def test_a_loss_of_values_with_a_data_dependent_shape(request, loss):
    """A mask that the loop made is known when the step is captured; one made of the model's results is not, and PyTorch runs the loss."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 3)
    model = compiled(copy.deepcopy(reference), None)
    for module in (reference, model):
        loss(module(torch.ones(8, 4))).backward()
        zoo.adamw(module).step()
    assert torch.allclose(model.state_dict()["weight"], reference.weight, atol=1e-5)
    of_results = request.node.callspec.indices["loss"] == 3
    assert [program.kind for program in model.programs] == (["forward", "backward", "update"] if of_results else ["step"])
    assert ("PyTorch's autograd" in model.explain()) == of_results


def test_metrics_may_have_data_dependent_shapes():
    torch.manual_seed(0)
    reference = nn.Linear(4, 3)
    model, x = compiled(copy.deepcopy(reference), None), torch.randn(8, 4)
    for module in (reference, model):
        out = module(x)
        metric = out[MASK].mean()
        F.cross_entropy(out, torch.zeros(8, dtype=torch.long)).backward()
        zoo.adamw(module).step()
        if module is reference:
            expected = metric.item()
    assert abs(metric.item() - expected) < 1e-5
    assert torch.allclose(model.state_dict()["weight"], reference.weight, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module, use_reentrant: bool):
        super().__init__()
        self.part, self.head, self.use_reentrant = part, nn.Linear(4, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=self.use_reentrant))


def one_step(model: nn.Module) -> dict[str, Tensor]:
    """The parameters after a step whose input requires no gradient."""
    x = torch.linspace(-1, 1, 32).reshape(8, 4).cos()
    F.cross_entropy(model(x), torch.arange(8) % 3).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return dict(model.named_parameters())


def test_reentrant_checkpoint_without_a_gradient_gives_none_as_in_torch():
    torch.manual_seed(0)
    reference = Checkpointed(nn.Linear(4, 4), use_reentrant=True)
    model = compiled(copy.deepcopy(reference), None)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        expected, got = one_step(reference), one_step(model)
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-6), name


@pytest.mark.parametrize("norm", ["batch", "spectral"])
def test_a_checkpointed_part_that_writes_buffers_warns(norm):
    part = nn.BatchNorm1d(4) if norm == "batch" else nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="writes buffer.*twice per step"):
        one_step(compiled(Checkpointed(part, use_reentrant=False), None))
