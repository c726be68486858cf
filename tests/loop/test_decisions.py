"""Code that asks for values of the batch is compiled: the answer is a guard, and another answer is another program."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from training import assert_parity, check_both, compiled

from graphacc.capture.functions import ctc_loss
from graphacc.loop.decisions import MAX_ANSWERS

CLASSES = 5


class Checked(nn.Module):
    """Raises for labels that are too large, and takes another branch for large inputs."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)
        self.register_buffer("limit", torch.tensor(CLASSES))

    def forward(self, x, y):
        if y.max() >= CLASSES:
            raise ValueError("a label is too large")
        torch._check(bool((x < self.limit).all()))
        hidden = self.embedding(x)
        if x.float().mean() > 2:
            hidden = hidden * 2
        return F.cross_entropy(self.head(hidden), y)


class MessagePassing(nn.Module):
    """Two rounds of sums over edges; the number of nodes is asked of the edges, and the loss is that of masked nodes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def propagate(self, x, edges):
        num_nodes = int(edges.max()) + 1
        return x.new_zeros(num_nodes, x.shape[1]).index_add(0, edges[1], x[edges[0]])

    def forward(self, x, edges, y, mask):
        out = self.second(self.propagate(torch.relu(self.propagate(self.first(x), edges)), edges))
        return F.cross_entropy(out[mask], y[mask])


class Rows(nn.Module):
    """Computes the rows of a mask by one layer and the others by another, as models of several modalities and loops over experts do, and writes them back by `write`."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.third, self.write = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), write

    def forward(self, x, ids):
        return F.mse_loss(self.write(self, self.first(x).clone(), ids == 3), x)


def assign(model, hidden, mask):
    hidden[mask] = model.second(hidden[mask]).tanh()
    hidden[~mask] += model.third(hidden[~mask])
    return hidden


def assign_to_a_part(model, hidden, mask):
    hidden[mask, :2] = model.second(hidden[mask])[:, 2:]
    return hidden


def assign_along_another_dim(model, hidden, mask):
    columns = mask.any(0)
    hidden[:, columns] = model.second(hidden[:, columns])
    return hidden


def accumulate(model, hidden, mask):
    return hidden.index_put((mask,), model.second(hidden[mask]), accumulate=True)


def assign_one_by_a_mask_of_bytes(model, hidden, mask):
    hidden[mask.to(torch.uint8)] = torch.ones(1, 4)
    return hidden


def assign_one_to_all(model, hidden, mask):
    hidden[mask] = model.second.bias
    return hidden


class Speech(nn.Module):
    """Gives log probabilities and their lengths, which the loop passes to ctc_loss."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Linear(8, CLASSES)

    def forward(self, x, lengths):
        hidden = torch.tanh(self.inner(x)).permute(2, 0, 1)
        return self.head(hidden).log_softmax(-1), (lengths + 1) // 2


class Written(nn.Module):
    """Asks for a value of a mask that it has written into, and reads a flag in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("doubled", torch.tensor(False))

    def forward(self, x, lengths):
        mask = torch.zeros(x.shape[0], 6)
        view = mask[1:]
        view[0] = 1.0
        mask[torch.arange(x.shape[0]), lengths] = 1.0
        count = int(mask.sum())
        out = self.linear(x * mask) / count
        return out.pow(2).mean() * (2.0 if self.doubled else 1.0)


def random_batch(name, step):
    g = torch.Generator().manual_seed(step)
    if name == "checked":
        return torch.randint(CLASSES, (8,), generator=g), torch.randint(CLASSES, (8,), generator=g)
    if name == "graph":
        edges = torch.randint(16, (2, 40), generator=g)
        edges[0, 0] = 15
        return torch.randn(16, 4, generator=g), edges, torch.randint(3, (16,), generator=g), torch.randperm(16, generator=g) < 8
    if name == "rows":
        return torch.randn(8, 3, 4, generator=g), torch.randint(2, 5, (8, 3), generator=g) if step else torch.zeros(8, 3)  # at first no row is written
    if name == "written":
        return torch.randn(8, 6, generator=g), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    lengths = torch.randint(14, 20, (8,), generator=g)
    return torch.randn(8, 4, 20, generator=g), lengths


def by_call(model, name, step):
    return model(*random_batch(name, step))


def by_ctc(model, name, step):
    g = torch.Generator().manual_seed(100 + step)
    log_probs, lengths = model(*random_batch(name, step))
    targets, target_lengths = torch.randint(1, CLASSES, (8, 4), generator=g), torch.randint(1, 4, (8,), generator=g)
    return F.ctc_loss(log_probs, targets, lengths, target_lengths)


def by_concatenated_ctc(model, name, step):
    g = torch.Generator().manual_seed(200 + step)
    log_probs, lengths = model(*random_batch(name, step))
    target_lengths = torch.tensor([3, 1, 2, 3, 2, 2, 1, 3])
    return F.ctc_loss(log_probs, torch.randint(1, CLASSES, (17,), generator=g), lengths, target_lengths, zero_infinity=True)


def train(model, loss_of, name, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        loss = loss_of(model, name, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(make, loss_of, name, strategy=None, **options):
    torch.manual_seed(0)
    reference = make()
    model = compiled(copy.deepcopy(reference), strategy)
    assert_parity(reference, model, train(reference, loss_of, name, **options), train(model, loss_of, name, **options))
    return model


CASES = [(Checked, by_call, "checked"), (MessagePassing, by_call, "graph"), (Written, by_call, "written"), (Speech, by_ctc, "speech"), (Speech, by_concatenated_ctc, "speech")]


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
@pytest.mark.parametrize(("make", "loss_of", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.default_cases("Checked-by_call-checked-None", "Written-by_call-written-None", "Speech-by_concatenated_ctc-speech-None")
def test_values_of_the_batch_are_answered(make, loss_of, name, strategy):
    check(make, loss_of, name, strategy)


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
@pytest.mark.parametrize("write", [assign, assign_to_a_part, assign_along_another_dim, accumulate, assign_one_to_all, assign_one_by_a_mask_of_bytes], ids=lambda write: write.__name__)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.default_cases("assign-None", "assign_one_by_a_mask_of_bytes-None")
def test_rows_of_a_mask_are_computed_and_written_back(write, strategy):
    check(lambda: Rows(write), by_call, "rows", strategy)


class ConstantRows(nn.Module):
    """Writes as many constant rows as a batch brings into the places of a mask."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x, ids, rows):
        hidden = self.first(x).clone()
        hidden[ids == 3] = rows
        return F.mse_loss(hidden, x)


@pytest.mark.parametrize("capture", ["auto", "fx"])
@pytest.mark.parametrize("wrong", [0, 2, 5])
@pytest.mark.default_cases("2-auto", "0-fx")
def test_constant_rows_of_another_number_than_a_mask_has_are_an_error_at_the_call(wrong, capture):
    torch.manual_seed(0)
    reference = ConstantRows()
    model = compiled(copy.deepcopy(reference), None, capture=capture)
    x, ids = torch.randn(8, 4), torch.tensor([3, 0, 3, 1, 3, 3, 2, 0])
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        found = []
        for number in (4, wrong, 1, 4):
            optimizer.zero_grad()
            if number == wrong:
                with pytest.raises(RuntimeError, match="shape mismatch"):
                    one(x, ids, torch.ones(number, 4))
                continue
            loss = one(x, ids, torch.ones(number, 4))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert_parity(reference, model, *losses, by_pytorch=True)
    assert sum(model._graphacc_engine.by_pytorch.counts.values()) == 1


def test_another_answer_is_another_program_and_an_earlier_one_is_found_again():
    model = check(Checked, by_call, "checked", steps=8)
    means = [random_batch("checked", step)[0].float().mean() > 2 for step in range(8)]
    assert any(means)
    assert not all(means)
    assert [program.kind for program in model.programs] == ["step", "step"]


def test_a_check_that_fails_raises_and_the_next_batch_is_compiled():
    model = check(Checked, by_call, "checked")
    with pytest.raises(ValueError, match="too large"):
        model(torch.zeros(8, dtype=torch.int64), torch.full((8,), CLASSES))
    before = dict(model._graphacc_engine.by_pytorch.counts)
    assert len(before) == 1
    assert train(model, by_call, "checked", steps=2)
    assert model._graphacc_engine.by_pytorch.counts == before


def test_a_flag_in_a_buffer_is_a_guard():
    torch.manual_seed(0)
    reference = Written()
    model = compiled(copy.deepcopy(reference), None)
    losses = []
    for one in (reference, model):
        found = train(one, by_call, "written", steps=2)
        one.doubled.fill_(True)
        losses.append(found + train(one, by_call, "written", steps=2))
    assert_parity(reference, model, *losses)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, lengths):
        return self.linear(x[:, :, 0]).pow(2).mean() * x.mean().item()


class FollowsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, lengths):
        out = self.linear(x[:, :, 0])
        return out.pow(2).mean() if out.sum() > 0 else out.abs().mean()


def test_a_number_that_keeps_changing_is_run_by_pytorch_after_a_few():
    torch.manual_seed(0)
    reference = Mean()
    model = compiled(copy.deepcopy(reference), None)
    steps = MAX_ANSWERS + 3
    assert_parity(reference, model, train(reference, by_call, "speech", steps), train(model, by_call, "speech", steps), by_pytorch=True)
    assert sum(program.kind == "step" for program in model.programs) == MAX_ANSWERS
    assert [count for text, count in model._graphacc_engine.by_pytorch.counts.items() if "depends on values of the batch" in text] == [3]


def test_memory_of_what_was_overwritten_is_not_mistaken_for_later_memory():
    """Temporaries that follow parameters are written in place and dropped; masks made afterwards follow from the batch, wherever they are in memory."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(20):
                self.layer.weight.detach().sum(0).fill_(1.0)
                x = x[x[:, 0] > -9.0]
            return self.layer(x).square().mean()

    batch = torch.randn(8, 4)
    reference = Model()
    model = compiled(copy.deepcopy(reference), None)
    check_both(reference, model, lambda one, step: one(batch), steps=2)


def test_what_follows_parameters_is_not_answered():
    torch.manual_seed(0)
    reference = FollowsParameters()
    model = compiled(copy.deepcopy(reference), None)
    assert_parity(reference, model, train(reference, by_call, "speech"), train(model, by_call, "speech"), by_pytorch=True)
    assert any("FollowsParameters runs by PyTorch" in text for text in model._graphacc_engine.by_pytorch.counts)


@pytest.mark.parametrize("seed", range(60))
def test_ctc_loss_is_that_of_torch(seed):
    g = torch.Generator().manual_seed(seed)
    time, rows, classes, width = (int(torch.randint(low, high, (1,), generator=g)) for low, high in ((1, 9), (1, 5), (2, 5), (1, 5)))
    lengths, target_lengths = torch.randint(1, time + 1, (rows,), generator=g), torch.randint(0, width + 1, (rows,), generator=g)
    blank = int(torch.randint(classes, (1,), generator=g))
    targets = torch.randint(classes - 1, (rows, width), generator=g)
    targets = torch.where(targets >= blank, targets + 1, targets)
    if seed % 5 == 0:
        targets = torch.cat([targets[row, : target_lengths[row]] for row in range(rows)])
    logits = torch.randn(time, rows, classes, generator=g, dtype=torch.float64)
    found = []
    for function in (F.ctc_loss, ctc_loss):
        x = logits.clone().requires_grad_()
        loss = function(x.log_softmax(-1), targets, lengths, target_lengths, blank, ("mean", "sum", "none")[seed % 3], zero_infinity=seed % 2 == 0)
        loss.sum().backward()
        found.append((loss.detach(), x.grad))
    torch.testing.assert_close(found[1][0], found[0][0])
    if torch.isfinite(found[0][0]).all():
        torch.testing.assert_close(found[1][1], found[0][1])
    else:
        assert torch.isfinite(found[1][1]).all() == torch.isfinite(found[0][1]).all()


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, projection_dim=16
    )
    text = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=98))


def llava_batch(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 98, (8, 20), generator=g)
    ids[:, 2:6] = 98
    return {"input_ids": ids, "pixel_values": torch.randn(8, 3, 16, 16, generator=g), "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == 98, -100)}


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_stride=(5, 4),
        conv_kernel=(5, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        ctc_zero_infinity=True,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def wav2vec2_batch(step):
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(1, 12, (8, 4), generator=g)
    labels[step % 8, 3:] = -100
    kept = torch.arange(400) < torch.tensor([400] * 4 + [300] * 4)[:, None]
    return {"input_values": torch.randn(8, 400, generator=g), "labels": labels, "attention_mask": kept.long()}


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
@pytest.mark.parametrize(("make", "batch"), [(llava, llava_batch), (wav2vec2, wav2vec2_batch)], ids=["llava", "wav2vec2-ctc"])
@pytest.mark.default_cases("wav2vec2-ctc-None")
def test_checks_of_transformers_models(make, batch, strategy):
    torch.manual_seed(0)
    reference = make()
    for name, parameter in reference.named_parameters():
        if name.endswith("k_proj.bias"):
            nn.init.normal_(parameter)  # its gradient is rounding noise, which would be all that a bias of zeros has after the steps
    model = compiled(copy.deepcopy(reference), strategy, memory_plan="xla")
    check_both(reference, model, lambda one, step: one(**batch(step)).loss, steps=3)
