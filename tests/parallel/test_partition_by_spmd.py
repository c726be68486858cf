"""`Strategy.tp_by="spmd"`: XLA's SPMD partitioner follows the marks that the passes would carry out, with the same losses."""

import copy
import re
import warnings

import pytest
import torch
import zoo
from selection import with_matrix
from torch import nn
from training import assert_parity, batches_of, check_parity, compiled, train

import graphacc
from graphacc.errors import StrategyError
from graphacc.graph import Kind
from graphacc.report import communication

B, T, D = 8, zoo.SEQ, zoo.HIDDEN
ACTIVATION = B * T * D * 4  # bytes of [B, T, D] in fp32
TP, SEQUENCES, SHARDED = "tp=2,tp_by=spmd", "tp=2,sequence_parallel=true,tp_by=spmd", "dp=2,fsdp=2,tp=2,tp_by=spmd"
CASES = [(name, strategy) for name in ("gpt2", "llama", "t5", "qwen3_moe") for strategy in (TP, SEQUENCES, SHARDED)]
OTHERS = [("bert", "fsdp=2,tp=2,zero=2,tp_by=spmd"), ("vit", TP), ("nn_transformer", SEQUENCES), ("lstm_lm", TP), ("resnet", "dp=2,tp=2,tp_by=spmd"), ("llama", "tp=2,microbatches=2,tp_by=spmd")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, [("gpt2", SHARDED), ("llama", SEQUENCES)]))
def test_training_equals_plain_pytorch(trained, name, strategy):
    trained(name, strategy)


@pytest.mark.parametrize(("name", "strategy"), OTHERS)
@pytest.mark.matrix
def test_other_models(name, strategy):
    check_parity(name, strategy)


def calls_in(model: nn.Module) -> list[str]:
    """Targets of the custom calls of the step."""
    (program,) = model.programs
    return re.findall(r'custom_call_target="(\w+)"', program.program.hlo_text())


def test_products_and_heads_stay_on_their_devices(trained):
    """Llama's columns and rows need sums alone, as by the passes; each device's attention has its own heads, and no other kernel keeps XLA from splitting."""
    model = trained("llama", TP)
    found = communication(model)
    assert {item.kind for item in found.collectives} == {"all-reduce"}
    sums = [size for item in found.collectives for size in item.tensor_bytes if size >= ACTIVATION // 2]
    assert sums.count(ACTIVATION) >= 2 * 2 * zoo.LAYERS and max(sums) == ACTIVATION
    kernels = [call for call in calls_in(model) if call.startswith("gacc")]
    assert sorted(kernels) == ["gacc_flash_backward"] * zoo.LAYERS + ["gacc_flash_forward"] * zoo.LAYERS
    (program,) = model.programs
    heads = set(re.findall(r"= \(f32\[([\d,]*)\].* custom-call\(.*gacc_flash_forward", program.program.hlo_text()))
    assert heads == {f"{B},{zoo.HEADS // 2},{T},{D // zoo.HEADS}"}
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1) * 4
    assert model.bytes_per_device()[Kind.PARAM] == (whole - norms) // 2 + norms
    assert "model.layers.0.self_attn.q_proj.weight" in str(model.strategy) and "column" in str(model.strategy)
    assert model.strategy == graphacc.Strategy(tp=2, tp_by="spmd") == graphacc.Strategy.parse(str(model.strategy))


def test_sequences_are_marked_where_the_passes_split_them(trained):
    """What lies between blocks is split along the sequence, forward and backward: it is gathered in front of the columns."""
    model = trained("llama", SEQUENCES)
    blocks = 2 * zoo.LAYERS + 1  # with the embedding, or the head
    (program,) = model.programs
    marked = [call for call in program.graph.calls if call.operator == "graphacc.mark_sharding.default"]
    assert [call.arguments[1] for call in marked] == [",tp"] * 2 * blocks
    gathered = [size for item in communication(model).select("all-gather", "tp").collectives for size in item.tensor_bytes]
    assert gathered.count(ACTIVATION) >= 2 * blocks


def test_state_and_gradients_lie_where_zero_says(trained):
    """Gradients get the layout of the state that they update as soon as they are there: no sum over the data axes is as large as a whole weight."""
    model = trained("gpt2", SHARDED)
    held, parameters = model.bytes_per_device(), sum(p.numel() for p in model.parameters()) * 4
    assert held[Kind.PARAM] < 0.3 * parameters and held[Kind.STATE] < 0.6 * parameters


def test_what_the_model_checkpoints_is_computed_again():
    temporaries = {}
    for blocks in (False, True):
        model = zoo.condition(zoo.transformers.LlamaForCausalLM(zoo.transformers.LlamaConfig(**zoo._DECODER | {"intermediate_size": 512})))
        if blocks:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name that most scripts use
                model.gradient_checkpointing_enable()
            model.train()
        reference, batches = copy.deepcopy(model), batches_of("llama", 2)
        expected = train(reference, batches)
        model = compiled(model, "dp=2,tp=2,tp_by=spmd", memory_plan="xla")
        assert_parity(reference, model, expected, train(model, batches))
        (program,) = model.programs
        temporaries[blocks] = program.program.memory.temp_bytes
    assert temporaries[True] < 0.8 * temporaries[False]


class Odd(nn.Module):
    """A vocabulary of 97, which two ranks do not divide, dropout, and a mark in the forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 97)

    def forward(self, x):
        hidden = graphacc.mark_sharding(torch.relu(self.up(self.embedding(x))), graphacc.P(None, None, "tp"))
        return self.head(nn.functional.dropout(self.down(hidden), 0.1, self.training))


@pytest.mark.parametrize("strategy", ["dp=2,tp=2,tp_by=spmd", "fsdp=2,tp=2,sequence_parallel=true,tp_by=spmd"])
@pytest.mark.default_cases("dp=2,tp=2,tp_by=spmd")
def test_a_loop_with_clipping_accumulation_evaluation_and_a_pin(strategy):
    """Against the passes, which draw the same dropout: gradients of two backwards, clipped, and a value read between steps."""
    torch.manual_seed(0)
    x = torch.randint(97, (3, 8, 16))
    base = Odd()

    def run(strategy):
        model = compiled(copy.deepcopy(base), strategy, annotations={"down.weight": graphacc.P()}, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for batch in x:
            for part in batch.split(4):
                loss = nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2
                loss.backward()
                seen.append(loss.item())
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen.append(model(batch).square().mean().item())
            model.train()
        return model, seen

    expected, want = run("dp=2")
    model, got = run(strategy)
    assert got == pytest.approx(want, rel=1e-5)
    decision = next(each for each in model.strategy.tensors if each.name == "down.weight")
    assert "tp" not in decision.spec and decision.decided_by.startswith("user")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_regions_of_autograd_and_random_numbers():
    """A plain module in front, whose output takes a gradient, makes the model a function of autograd; dropout draws from the loop's seed, and a buffer changes."""

    def run(strategy):
        torch.manual_seed(0)
        front, model = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 16), nn.BatchNorm1d(16))
        model = compiled(model, strategy)
        optimizers, seen = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (front, model)], []
        for _ in range(3):
            loss = (model(front(torch.randn(8, 16))) * torch.arange(16.0)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        assert not model._graphacc_engine.by_pytorch.counts
        return [*seen, *front.weight.flatten().tolist(), *model.state_dict()["3.running_mean"].tolist()]

    assert run("dp=2,tp=2,tp_by=spmd") == pytest.approx(run("dp=2,tp=2"), rel=1e-4, abs=1e-5)  # of weights up to 0.25


def test_a_search_follows_the_pin():
    model = check_parity("llama", "auto,tp_by=spmd", devices=4)
    assert (model.strategy.tp_by, model.strategy.tp > 1, model.strategy.cp) == ("spmd", True, 1)
    assert "tp_by='spmd'" in model.strategy.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,tp_by=spmd", "the tp axis, which has size 1"),
        ("tp=2,tp_by=xla", "choose one of passes, spmd"),
        ("tp=2,pp=2,microbatches=2,tp_by=spmd", "and pp needs the program of one device"),
        ("fsdp=2,tp=2,bucket_mb=3,hpz=1,quantized_weights=true,tp_by=spmd", "bucket_mb, quantized_weights need the program"),
        ("tp=2,remat=auto,memory_gb=1,tp_by=spmd", "remat='auto' needs the program"),
    ],
)
def test_strategies_that_xla_cannot_follow(text, message):
    with pytest.raises(StrategyError) as error:
        graphacc.Strategy.parse(text)
    assert message in str(error.value)
