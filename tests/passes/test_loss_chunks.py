"""The head and its loss in chunks: the same losses, gradients and parameters, logits of one chunk at a time, and refusals that say why."""

import copy
import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo
from selection import with_matrix
from simulate import simulate
from tolerances import RELATIVE, relative_error
from torch import Tensor, nn
from training import assert_parity, batches_of, captured_once, compiled, plainly_trained, train
from zoo_steps import build, shared_case

from graphacc.costs.memory import released_bytes
from graphacc.costs.work import flops_by_dtype, kernels
from graphacc.errors import StrategyError
from graphacc.graph import CHUNKED as CHUNKED_MARK
from graphacc.graph import Kind, Output, StepGraph
from graphacc.ops.chunked import body_of
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.edit import Editor
from graphacc.passes.hlo.shardings import check_axes
from graphacc.passes.loss_chunks import ChunkReport, chunk_pass, mark_heads_pass
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import Log, run_passes
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

AFTER, CHUNKED = torch.ops.graphacc.after.default, torch.ops.graphacc.chunked.default
VOCAB, HIDDEN, BATCH, SEQ = 64, 8, 4, 12


# What the loss may be


def _labels(tokens: Tensor) -> Tensor:
    return F.pad(tokens, (0, 1), value=-100)[:, 1:]


def _plain(logits: Tensor, tokens: Tensor, **options) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), _labels(tokens).flatten(), **options)


def _z_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return _plain(logits, tokens) + 1e-2 * logits.logsumexp(-1).square().mean()


def _weighted(logits: Tensor, tokens: Tensor) -> Tensor:
    """Every token's loss with a weight of its own, as for padding or rewards."""
    rows = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    weights = (tokens % 3).float()
    return (rows * weights).sum() / weights.sum()


def _shifted(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _focal(logits: Tensor, tokens: Tensor) -> Tensor:
    """A weight that follows from the logits of its own row."""
    logp = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return -((1 - logp.exp()) ** 2 * logp).mean()


def _dense(logits: Tensor, tokens: Tensor) -> Tensor:
    """Labels with a probability for every entry of the vocabulary."""
    smooth = 0.9 * F.one_hot(tokens, VOCAB).float() + 0.1 / VOCAB
    return -(smooth * logits.log_softmax(-1)).sum(-1).mean()


def _capped(logits: Tensor, tokens: Tensor) -> Tensor:
    return _plain(3.0 * torch.tanh(logits / 3.0), tokens)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _plain,
    "sum": lambda logits, tokens: _plain(logits, tokens, reduction="sum"),
    "label smoothing": lambda logits, tokens: _plain(logits, tokens, label_smoothing=0.1),
    "weights of classes": lambda logits, tokens: _plain(logits, tokens, weight=torch.linspace(0.5, 1.5, VOCAB)),
    "z-loss": _z_loss,
    "soft-capping": _capped,
    "weights of tokens": _weighted,
    "shifted logits": _shifted,
    "focal": _focal,
    "dense labels": _dense,
}


class Model(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = _plain, tied: bool = False, bias: bool = True, returns_logits: bool = False):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss, self.returns_logits = loss, returns_logits

    def forward(self, tokens: Tensor) -> zoo.Output:
        logits = self.head(torch.tanh(self.layer(self.embedding(tokens))))
        return zoo.Output(self.loss(logits, tokens), logits if self.returns_logits else None)


class Distilled(nn.Module):
    """A frozen teacher's logits are as large as the student's."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Model(), Model().requires_grad_(False)

    def forward(self, tokens: Tensor) -> zoo.Output:
        student, teacher = (m.head(torch.tanh(m.layer(m.embedding(tokens)))) for m in (self.student, self.teacher))
        return zoo.Output(F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True), None)


class TwoHeads(Model):
    """A second head predicts the token after the next one."""

    def __init__(self):
        super().__init__()
        self.further = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> zoo.Output:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return zoo.Output(_plain(self.head(hidden), tokens) + _plain(self.further(hidden), _labels(tokens).clamp(min=0)), None)


def tokens_of(seed: int = 0, batch: int = BATCH) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(seed))}


def passed(step: StepGraph, strategy: str) -> tuple[StepGraph, list[ChunkReport]]:
    local, reports = run_passes(step.copy(), build_pipeline(step, Strategy.parse(strategy), batch_dims=default_batch_dims(step)))
    return local, [report.details for report in reports if isinstance(report.details, ChunkReport)]


def calls(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node in step.graph.nodes if node.target is CHUNKED]


def notes(step: StepGraph, strategy: str) -> str:
    return "\n".join(note for report in passed(step, strategy)[1] for note in report.notes)


def without_results(step: StepGraph) -> StepGraph:
    """The step of a loop that keeps the loss alone."""
    step = step.copy()
    kept = [i for i, item in enumerate(step.outputs) if item.kind is not Kind.USER]
    step.graph.output_node().args = (tuple(step.results[i] for i in kept),)
    step.outputs = tuple(step.outputs[i] for i in kept)
    step.graph.eliminate_dead_code()
    return step


def check_graphs(step: StepGraph, inputs: list[Tensor], strategy: str, chunks: int, count: int = 1) -> StepGraph:
    """The program with chunks gives what the one without gives, on plain PyTorch."""
    mesh = Strategy.parse(strategy).mesh
    plain, (local, reports) = passed(step, strategy)[0], passed(step, f"{strategy},loss_chunks={chunks}")
    assert not [note for report in reports for note in report.notes], reports
    assert len(calls(local)) == count
    for x, y, item in zip(simulate(local, mesh, inputs), simulate(plain, mesh, inputs), local.outputs, strict=True):
        assert relative_error(x, y) <= RELATIVE[torch.float32], f"{item.kind.value} {item.target}: {relative_error(x, y)}"
    return local


@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_that_is_computed_row_by_row(loss):
    case = build(Model(LOSSES[loss]), tokens_of())
    local = check_graphs(case.step, case.inputs(case.step), "", 4)
    (call,) = calls(local)
    body = body_of(call)
    assert body.chunks == 4
    wide = [node for node in local.graph.nodes if node.op == "call_function" and isinstance(x := node.meta["val"], Tensor) and x.numel() >= BATCH * (SEQ - 1) * VOCAB]
    assert all(node.target is torch.ops.aten.expand.default for node in wide), f"{wide} are as large as the logits"


HEADS = {"tied": lambda: Model(tied=True, bias=False), "without a bias": lambda: Model(bias=False), "distilled": Distilled}


@pytest.mark.parametrize("head", HEADS)
def test_heads(head):
    case = build(HEADS[head](), tokens_of())
    check_graphs(case.step, case.inputs(case.step), "", 4)


def test_two_heads_are_two_loops():
    case = build(TwoHeads(), tokens_of())
    check_graphs(case.step, case.inputs(case.step), "", 4, count=2)


STRATEGIES = ["", "fsdp=8", "dp=2,fsdp=4", "fsdp=2,zero=1", "cp=2,fsdp=4", "fsdp=2,remat=blocks", "fsdp=2,quantized_weights=True,quant_min_size=64"]
GRAPHS = [*((name, strategy) for name in ("gpt2", "llama", "bert", "mixtral", "t5") for strategy in STRATEGIES), ("mixtral", "ep=2")]
DEFAULT = [("gpt2", "cp=2,fsdp=4"), ("gpt2", "fsdp=2,remat=blocks"), ("bert", "fsdp=2,zero=1")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(GRAPHS, DEFAULT))
def test_models_under_strategies(name, strategy):
    case, _, _ = shared_case(name)
    step = without_results(case.step)
    check_graphs(step, case.inputs(step), strategy, 2)


def test_the_heads_weight_is_gathered_once_for_both_directions():
    """By the blocks' weights, which backward gathers again, the others are known."""
    step = without_results(shared_case("llama")[0].step)
    gathered = []
    for strategy in ("fsdp=2,bucket_mb=0", "fsdp=2,bucket_mb=0,loss_chunks=2"):
        local = passed(step, strategy)[0]
        gathered.append(sorted(node.meta["move"].size_bytes for node in local.graph.nodes if "move" in node.meta and node.meta["move"].collective == "all_gather"))
    head = zoo.VOCAB * zoo.HIDDEN * 4
    assert len(gathered[0]) == len(gathered[1]) + 1 and gathered[0].count(head) == gathered[1].count(head) + 1


def test_sums_in_16_bits_are_added_up_in_32_and_rounded_once():
    step = without_results(build(*zoo.MODELS["llama"](), precision="bf16").step)
    (call,) = calls(passed(step, "fsdp=2,precision=bf16,loss_chunks=4")[0])
    body = body_of(call)
    sums = [(value.meta["val"].dtype, body.accumulates_in(i)) for i, value in enumerate(body.values) if body.results[i] == "sum"]
    assert sums == [(torch.float32, torch.float32)]  # the weight's gradient, cast in the loop
    narrow = passed(step, "fsdp=2,precision=bf16,reduce_dtype=bf16,loss_chunks=4")[0]
    body = body_of(*calls(narrow))
    sums = [(value.meta["val"].dtype, body.accumulates_in(i)) for i, value in enumerate(body.values) if body.results[i] == "sum"]
    assert sums == [(torch.bfloat16, torch.float32)]  # what ranks scatter as it is


def test_numbers_of_chunks_that_do_not_divide():
    """48 tokens: the next larger number that divides them, or their batch or length."""
    step = build(Model(), tokens_of()).step
    found = {asked: body_of(*calls(passed(step, f"loss_chunks={asked}")[0])).chunks for asked in (2, 3, 5, 7, 12)}
    assert found == {2: 2, 3: 3, 5: 6, 7: 12, 12: 12}


# Compiled


TRAINED = [
    ("gpt2", "loss_chunks=4"), ("gpt2", "fsdp=8,loss_chunks=4"), ("llama", "dp=2,fsdp=4,loss_chunks=2"), ("llama", "cp=2,fsdp=4,loss_chunks=2"),
    ("bert", "fsdp=8,loss_chunks=4,remat=blocks"), ("bert", "loss_chunks=8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy"), with_matrix(TRAINED, [TRAINED[2]]))
def test_training_equals_plain_pytorch(name, strategy):
    original, reference, expected = plainly_trained(name)
    model = compiled(copy.deepcopy(original), strategy)
    with captured_once("parity", name):
        losses = train(model, batches_of(name))
    assert_parity(reference, model, expected, losses)
    assert all(len(calls(program.graph)) == 1 for program in model.programs) and "computed chunk by chunk: " in model.explain()


LOOPS = [(Model(LOSSES[loss]), "loss_chunks=4") for loss in LOSSES] + [(Distilled(), "loss_chunks=3"), (Model(tied=True), "fsdp=4,loss_chunks=2"), (TwoHeads(), "loss_chunks=4")]
NAMES = [*LOSSES, "distilled", "tied", "two heads"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.default_cases("label smoothing", "z-loss", "dense labels", "tied")
def test_losses_train_as_in_plain_pytorch(name):
    original, strategy = LOOPS[NAMES.index(name)]
    reference, model = copy.deepcopy(original), compiled(copy.deepcopy(original), strategy)
    batches = [tokens_of(seed) for seed in range(3)]
    assert_parity(reference, model, train(reference, batches), train(model, batches))
    assert calls(model.programs[0].graph)


@pytest.mark.parametrize("strategy", ["microbatches=2", "pp=2,microbatches=2", "pp=2,microbatches=2,schedule=zb-h1", "fsdp=2,zero=1,microbatches=2"])
@pytest.mark.default_cases("pp=2,microbatches=2")
def test_microbatches_and_the_last_stage_of_a_pipeline(strategy):
    reference, _ = zoo.MODELS["gpt2"]()
    model = compiled(copy.deepcopy(reference), f"{strategy},loss_chunks=2", memory_plan="xla")
    batches = batches_of("gpt2", 2)
    assert_parity(reference, model, train(reference, batches, scheduled=False), train(model, batches, scheduled=False))
    found = [program for program in model.programs if calls(program.graph)]
    assert len(found) == 1 and (not strategy.startswith("pp") or found[0].kind == "grad B1")


@pytest.mark.matrix
def test_bf16_trains_as_without_chunks():
    batches, losses = batches_of("gpt2", 3), []
    for strategy in ("precision=bf16", "precision=bf16,loss_chunks=4"):
        model = compiled(zoo.MODELS["gpt2"]()[0], strategy)
        with captured_once("bf16"):
            losses.append(torch.tensor(train(model, batches)))
    assert relative_error(losses[1], losses[0]) < 1e-3


def test_a_loop_that_holds_the_logits_is_told_once(caplog):
    original, _, expected = plainly_trained("gpt2")
    model = compiled(copy.deepcopy(original), "loss_chunks=4")
    optimizer = zoo.adamw(model)
    with caplog.at_level(logging.WARNING, "graphacc"):
        for batch in batches_of("gpt2", 2):
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [record.message for record in caplog.records if "loss_chunks" in record.message]
    assert len(said) == 1 and "keep the loss alone" in said[0] and "modeling_gpt2.py" in said[0]
    assert abs(output.loss.item() - expected[1]) < 1e-2 and not calls(model.programs[0].graph)


# Memory


def large_vocabulary() -> StepGraph:
    """GPT-2 whose logits are most of what its step stores: 8192 of them for each of 512 tokens."""
    config = zoo.transformers.GPT2Config(
        vocab_size=8192, n_embd=32, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(8192, (8, 64))
    return without_results(build(zoo.transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}).step)


def test_only_one_chunks_logits_are_in_memory():
    """If chunks ran side by side, or all logits were stored, more of them would not need less."""
    step, measured, predicted, flops = large_vocabulary(), [], [], []
    for chunks in (1, 2, 4):
        local, _ = passed(step, f"loss_chunks={chunks}")
        mesh = make_mesh(Strategy(), select_devices(1))
        measured.append(Program.build(local, mesh, cache_dir=None, memory_plan="xla", fast_compile=True).memory.temp_bytes)
        predicted.append(released_bytes(local))
        flops += [sum(flops_by_dtype(local).values()), sum(work.flops for work in kernels(local).values())]
    logits = 512 * 8192 * 4
    assert measured[2] < 0.6 * measured[0] and measured[0] - measured[1] > 0.35 * logits and measured[1] - measured[2] > 0.2 * logits, measured
    assert predicted[2] < 0.6 * predicted[0] and predicted[0] > predicted[1] > predicted[2], predicted
    errors = [x / y for x, y in zip(predicted, measured, strict=True)]
    assert all(0.97 < error < 1.03 for error in errors), errors
    assert len(set(flops)) == 1, flops


# Refusals


def _of_all_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """The gradient of every token depends on the losses of all."""
    return _plain(logits, tokens).square()


REFUSED = {
    "the loop holds the logits": (lambda: Model(returns_logits=True), "", "the loop still holds its logits when the step runs"),
    "a loss of all tokens": (lambda: Model(_of_all_tokens), "", r"needs what aten.div.Tensor at .* gives \[\] for all tokens, so that no chunk could be finished before the others"),
    "a normalisation over tokens": (lambda: Model(lambda logits, tokens: _plain(logits - logits.mean((0, 1)), tokens)), "", "for all tokens"),
    "one sequence whose logits are shifted": (lambda: Model(_shifted), "fsdp=4", "aten.slice.Tensor at .* for all tokens, .* shift the labels instead of the logits"),
    "a vocabulary over ranks": (lambda: Model(), "tp=2", "ranks communicate between the logits and their gradient"),
}


class Headless(nn.Module):
    """What follows the last product has no more elements than its operand."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: Tensor) -> zoo.Output:
        return zoo.Output(self.layer(self.embedding(tokens)).square().mean(), None)


class WithoutWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(VOCAB))

    def forward(self, tokens: Tensor) -> zoo.Output:
        return zoo.Output((self.scale[tokens] ** 2).mean(), None)


REFUSED["no head"] = (WithoutWeights, "", "no product of a weight gives logits")
REFUSED["small logits"] = (Headless, "", "hardly larger than what it reads")


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_is_said_with_the_line(why):
    make, strategy, said = REFUSED[why]
    step = build(make(), tokens_of()).step
    local, reports = passed(step, f"{strategy},loss_chunks=4".strip(","))
    (note,) = [note for report in reports for note in report.notes]
    assert not calls(local) and note.startswith("loss_chunks=4")
    assert why == "no head" or f"{__file__}:" in note
    assert re.search(said, note), note


def test_strategy():
    assert Strategy.parse("fsdp=8,loss_chunks=8") == Strategy(fsdp=8, loss_chunks=8)
    assert str(Strategy(loss_chunks=8)) == "loss_chunks=8" and str(Strategy(loss_chunks=1)) == ""
    with pytest.raises(StrategyError, match="loss_chunks=0 must be a whole number of at least 1"):
        Strategy(loss_chunks=0)
    with pytest.raises(StrategyError, match='capture by lazy tensors does not give: leave it out, or use capture="fx"'):
        check_axes(Strategy(loss_chunks=2))


def test_nothing_is_done_where_there_is_no_backward():
    step = build(Model(), tokens_of()).update
    assert not {"mark-head", "loss-chunks"} & {item.name for item in build_pipeline(step, Strategy(loss_chunks=2), batch_dims=default_batch_dims(step))}


def test_fewer_chunks_than_asked_for_are_said():
    """Shifted logits leave the batch to be divided, of four sequences."""
    step = build(Model(_shifted), tokens_of()).step
    local, reports = passed(step, "loss_chunks=8")
    (note,) = [note for report in reports for note in report.notes]
    assert body_of(*calls(local)).chunks == 4 and "is computed in 4 chunks" in note


def test_what_is_ordered_behind_logits_is_ordered_behind_the_loop():
    """As a gather of a weight is behind a gradient: the loop has no value inside that it could wait for."""
    case = build(Model(), tokens_of())
    step = case.joint.copy()
    mark_heads_pass(4).run(step, Log())
    (product,) = [node for node in step.graph.nodes if type(node.meta.get(CHUNKED_MARK)) is int]
    (biased,) = product.users
    parameters = {item.target: node for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    biased.replace_input_with(parameters["head.bias"], Editor(step.graph, biased)(AFTER, parameters["head.bias"], product))  # read by the loop
    late = Editor(step.graph, biased.next)(AFTER, parameters["layer.bias"], product)  # read by nothing in it
    outputs = list(step.results)
    outputs[1:1] = [late]
    step.graph.output_node().args = (tuple(outputs),)
    step.outputs = (step.outputs[0], Output(kind=Kind.USER, target="0", shape=(HIDDEN,), dtype=torch.float32), *step.outputs[1:])
    step = chunk_pass(4).run(step, Log())
    step.verify()
    (call,) = calls(step)
    behind = [node.all_input_nodes[1] for node in step.graph.nodes if node.target is AFTER]
    assert len(behind) == 2 and sum(node in call.users for node in behind) == 1, behind
