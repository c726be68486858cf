"""ZeRO-3's second gather: every weight that backward reads has one, but a large head, which stays whole between forward and backward."""

import functools

import pytest
import torch
from gpt2_steps import bert, captured, gpt2, llama, spread
from simulate import run_global, simulate

from graphacc.costs.hardware import Hardware
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.passes import pipeline
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.regather import head_of
from graphacc.search import Search
from graphacc.search import cost as search_cost
from graphacc.strategy import Strategy

LENGTH, VOCABULARY, WIDTH = 16, 1024, 128
BYTES = 4 * VOCABULARY * WIDTH  # of a head, by far the largest weight
MAKE = {"tied": gpt2, "its own": llama, "with a bias": bert}
HEAD = {"tied": "transformer.wte.weight", "its own": "lm_head.weight", "with a bias": "bert.embeddings.word_embeddings.weight"}


@functools.cache
def step(kind: str, precision: str = "fp32") -> StepGraph:
    return captured(MAKE[kind](layers=2, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY), LENGTH, precision)


@pytest.fixture
def small_heads(monkeypatch):
    """Heads of this size count as large."""
    for module in (pipeline, search_cost):
        monkeypatch.setattr(module, "MAX_BYTES", BYTES // 4)


def gathers(program: StepGraph) -> dict[str, list[Phase]]:
    """Of the head and of an MLP's matrix, the phases of their gathers, each of which is a message of its own."""
    large = [node for node in program.graph.nodes if "move" in node.meta and node.meta["move"].collective == "all_gather" and node.meta["move"].role is Role.WEIGHT]
    found = {size: [node.meta["phase"] for node in large if node.meta["val"].numel() == size] for size in (VOCABULARY * WIDTH, 4 * WIDTH * WIDTH)}
    return {"head": found[VOCABULARY * WIDTH], "mlp": found[4 * WIDTH * WIDTH]}


@pytest.mark.parametrize("kind", HEAD)
def test_what_is_a_head(kind):
    assert head_of(step(kind), BYTES) == HEAD[kind]
    assert head_of(step(kind), BYTES + 1) is None
    assert head_of(step(kind, "bf16"), BYTES / 2) == HEAD[kind] and head_of(step(kind, "bf16"), BYTES / 2 + 1) is None


def test_what_is_no_head():
    """A weight as large is read behind it in the forward, or the backward begins with another one."""

    def made(function) -> StepGraph:
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

            def forward(self, input_ids, labels):
                return type("Output", (), {"loss": function(self, input_ids.float()[:, :8]) + labels.sum() * 0.0})

        return captured(Model(), LENGTH)

    assert head_of(made(lambda model, x: model.b(torch.relu(model.a(x))).square().sum()), 0) == "b.weight"
    assert head_of(made(lambda model, x: model.b(torch.relu(model.a(x))).square().sum() + 2 * model.a.weight.sum()), 0) is None
    assert head_of(made(lambda model, x: torch.relu(model.a(x)).square().sum()), 0) is None  # backward reads no weight: there is nothing before the first layer


@pytest.mark.parametrize("kind", HEAD)
@pytest.mark.parametrize("strategy", ["fsdp=4", "cp=2,fsdp=2,zero=3", "tp=2,fsdp=2"])
@pytest.mark.default_cases("fsdp=4-tied", "fsdp=4-its own", "tp=2,fsdp=2-its own")
def test_a_head_is_gathered_once(small_heads, kind, strategy):
    """Other weights twice; parameters, state and loss are those of one device."""
    chosen, original = Strategy.parse(strategy), step(kind)
    ranks = {axis: size for axis, size in chosen.mesh.items() if size > 1}
    program = spread(original, f"{strategy},bucket_mb=0.01")
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(VOCABULARY, item.shape, generator=generator) if item.kind is Kind.BATCH else (0.1 * torch.rand(item.shape, generator=generator)).to(item.dtype)
        for item in original.inputs
    ]
    for got, want in zip(simulate(program, ranks, inputs), run_global(original, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if strategy == "fsdp=4":
        found = gathers(program)
        assert found["head"] == [Phase.FORWARD] * (2 if kind == "its own" else 1)  # that of the table of the embedding, which is as large
        assert Phase.BACKWARD in found["mlp"]


def test_a_head_that_shares_a_bucket_is_gathered_again(small_heads):
    """What is gathered with it would stay, too."""
    program = spread(step("tied"), f"fsdp=4,bucket_mb={2 * BYTES / 1e6}")
    assert {node.meta["phase"] for node in program.graph.nodes if "move" in node.meta and node.meta["move"].role is Role.WEIGHT and node.meta["move"].size_bytes >= BYTES} == {Phase.FORWARD, Phase.BACKWARD}
    search = Search(step("tied"), None, Hardware.parse("8xH100"))
    sizes = {}
    for megabytes in (0.01, 2 * BYTES / 1e6):
        strategy = Strategy(fsdp=8, bucket_mb=megabytes)
        moved = search.profile_of(strategy).composed(strategy, search.hardware).moved
        sizes[megabytes] = sum(item.size_bytes for item in moved if item.kind == "all_gather" and item.phase is Phase.BACKWARD)
    assert sizes[2 * BYTES / 1e6] - sizes[0.01] == BYTES


def test_a_pipeline_gathers_its_head_again(small_heads):
    """Between its programs nothing stays gathered."""
    alone, staged = (gathers(spread(step("tied"), f"fsdp=2,pp={pp},microbatches={pp},zero=3,bucket_mb=0.01"))["head"] for pp in (1, 2))
    assert alone == [Phase.FORWARD] and staged == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]  # a table in the first stage, a head in the last


@pytest.mark.parametrize("kind", ["tied", "its own"])
def test_the_search_knows(small_heads, kind):
    """Gathers of an estimate, and of the real passes."""
    search = Search(step(kind), None, Hardware.parse("8xH100"))
    for strategy in (Strategy(fsdp=8), Strategy(fsdp=4, tp=2), Strategy(fsdp=4, cp=2)):
        exact = search_cost.cost_of(search.program_of(strategy), search.hardware)
        size = {phase: sum(item.size_bytes for item in exact.moved if item.kind == "all_gather" and item.role is Role.WEIGHT and item.phase is phase) for phase in Phase}
        profile = search.profile_of(strategy)
        found = {phase: sum(item.size_bytes for item in profile.composed(strategy, search.hardware).moved if item.kind == "all_gather" and item.role is Role.WEIGHT and item.phase is phase) for phase in Phase}
        assert {phase: found[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)} == pytest.approx({phase: size[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}, rel=0.02), strategy
        assert size[Phase.BACKWARD] < size[Phase.FORWARD] - 0.9 * BYTES / strategy.tp
