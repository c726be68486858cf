"""Tensor and sequence parallelism of lazily captured steps: roles are found in the HLO, and XLA follows them."""

import copy

import pytest
import torch
import zoo
from torch import nn
from training import assert_parity, batches_of, check_parity, compiled, train

import graphacc
from graphacc.capture import FX, Batch, capture_joint, capture_update
from graphacc.capture.lazy import LAZY
from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase
from graphacc.passes.hlo.operators import operators_of
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel
from graphacc.report import communication

pytestmark = pytest.mark.lazy

OPTIONS = dict(capture="lazy", memory_plan="xla")
ACTIVATION = 8 * zoo.SEQ * zoo.HIDDEN * 4  # bytes of [B, T, D] in fp32


def joint(model: nn.Module, batch: dict[str, torch.Tensor], backend):
    names = list(batch)
    leaves = Batch(leaves=tuple(batch.values()), paths=tuple(names))
    return capture_joint(model, lambda model, leaves: (model(**dict(zip(names, leaves))).loss, []), leaves, backend=backend)


def check_roles(model: nn.Module, batch: dict[str, torch.Tensor], tp: int) -> None:
    (captured,) = joint(model, batch, LAZY).captured
    expected = find_tensor_parallel(joint(model, batch, FX), tp, {}).splits
    assert expected and find_tensor_parallel(operators_of(captured).step, tp, {}).splits == expected


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "nn_transformer", "tied_mlp"])
@pytest.mark.default_cases("gpt2-2", "llama-4", "bert-2")
def test_roles_are_those_of_the_graph(name, tp):
    """From which product feeds which, through transposes, reshapes, slices and kernels; biases go with their products, GPT-2's query, key and value are parts of one weight."""
    model, _ = zoo.MODELS[name]()
    check_roles(model, zoo.batch(name, 0, 8), tp)


def test_roles_of_attention_that_is_written_out():
    """Its batched products split the heads."""
    config = zoo.transformers.LlamaConfig(**zoo._DECODER, attn_implementation="eager")
    check_roles(zoo.condition(zoo.transformers.LlamaForCausalLM(config)), zoo.batch("llama", 0, 8), 2)


@pytest.mark.parametrize(("name", "strategy"), [("llama", "tp=2"), ("gpt2", "fsdp=2,tp=2"), ("t5", "dp=2,tp=2,sequence_parallel=true"), ("clip", "tp=2"), ("lstm_lm", "tp=4")])
@pytest.mark.default_cases("gpt2-fsdp=2,tp=2")
def test_training_equals_plain_pytorch(name, strategy):
    check_parity(name, strategy, **OPTIONS)


def test_products_and_state_are_split():
    model = check_parity("llama", "tp=2", **OPTIONS)
    assert {item.kind for item in communication(model).collectives} == {"all-reduce"}
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1) * 4
    held = model.bytes_per_device()
    assert held[Kind.PARAM] == (whole - norms) // 2 + norms
    assert held[Kind.STATE] <= 2 * held[Kind.PARAM] + 4 * len(list(model.parameters()))
    decision = next(each for each in model.strategy.tensors if each.name == "model.layers.0.mlp.down_proj.weight")
    assert (decision.spec, decision.decided_by, decision.reason) == ("-, tp", "policy", "row")


def test_sequences_are_marked_in_the_hlo():
    model = check_parity("llama", "tp=2,sequence_parallel=true", **OPTIONS)
    (program,) = model.programs
    blocks = 2 * zoo.LAYERS + 1  # with the embedding, or the head
    assert [list(marks.values()) for marks in program.graph.marks.values() if marks] == [[",tp"] * 2 * blocks]
    gathered = [size for item in communication(model).select("all-gather", "tp").collectives for size in item.tensor_bytes]
    assert gathered.count(ACTIVATION) >= 2 * blocks


def test_annotations_are_pins_and_the_rest_is_found():
    model, _ = zoo.MODELS["llama"]()
    reference, batches = copy.deepcopy(model), batches_of("llama", 2)
    expected = train(reference, batches)
    P = graphacc.P
    model = compiled(model, "tp=2", annotations={"*.mlp.*": P(), "*.q_proj.weight": P(None, "tp")}, **OPTIONS)
    assert_parity(reference, model, expected, train(model, batches))
    specs = {each.name: (each.spec, each.decided_by) for each in model.strategy.tensors}
    assert specs["model.layers.0.mlp.up_proj.weight"] == ("-, -", "user")
    assert specs["model.layers.1.self_attn.q_proj.weight"] == ("-, tp", "user")
    assert specs["lm_head.weight"] == ("tp, -", "policy")


def test_heads_that_do_not_divide_are_an_error():
    config = zoo.transformers.LlamaConfig(**zoo._DECODER | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48, "head_dim": 8})
    model = compiled(zoo.condition(zoo.transformers.LlamaForCausalLM(config)), "tp=4", **OPTIONS)
    with pytest.raises(StrategyError, match="tp=4 does not divide the 6 attention heads .*: choose tp out of 1, 2, 3, 6"):
        train(model, batches_of("llama", 1))


def test_an_update_gives_no_roles():
    """Its operators are no forward, so that what an optimizer multiplies is no column."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    update = capture_update(model, torch.optim.AdamW(model.parameters()), [name for name, _ in model.named_parameters()], backend=LAZY)
    (captured,) = update.captured
    assert {node.meta["phase"] for node in operators_of(captured).step.graph.nodes if node.op == "call_function"} == {Phase.UPDATE}


def test_operations_that_are_not_known_want_their_operands_whole():
    """A sort between two products."""

    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            x = self.down(torch.sort(self.up(x), dim=-1).values)
            return zoo.Output(self.second(torch.tanh(self.first(x))).square().mean(), None)

    torch.manual_seed(0)
    model = Sorting()
    check_roles(model, {"x": torch.randn(8, 16)}, 2)
    reference, batches = copy.deepcopy(model), [{"x": torch.randn(8, 16)} for _ in range(3)]
    expected = train(reference, batches)
    model = compiled(model, "tp=2", **OPTIONS)
    assert_parity(reference, model, expected, train(model, batches))
    specs = {each.name: each.spec for each in model.strategy.tensors}
    assert (specs["up.weight"], specs["down.weight"], specs["first.weight"]) == ("-, -", "tp, -", "-, tp")
