"""Tensor and sequence parallelism: parity with plain PyTorch, Megatron-LM's communication, roles of parameters, errors."""

import copy

import pytest
import torch
import zoo
from selection import with_matrix
from torch import nn
from training import assert_parity, batches_of, captured_once, check_parity, compiled, train

import graphacc
from graphacc.errors import StrategyError
from graphacc.graph import Kind
from graphacc.report import communication

B, T, D = 8, zoo.SEQ, zoo.HIDDEN
ACTIVATION = B * T * D * 4  # bytes of [B, T, D] in fp32


STRATEGIES = ("tp=2", "tp=4", "tp=2,sequence_parallel=true")
CASES = [(name, strategy) for name in ("gpt2", "llama", "qwen3_moe", "t5") for strategy in STRATEGIES]
DEFAULT = [("gpt2", "tp=2,sequence_parallel=true"), ("llama", "tp=4"), ("t5", "tp=2")]
OTHERS = [("vit", "tp=2"), ("bert", "tp=2"), ("nn_transformer", "tp=2,sequence_parallel=true"), ("lstm_lm", "tp=2")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, DEFAULT))
@pytest.mark.default_cases("gpt2-tp=2,sequence_parallel=true")
def test_training_equals_plain_pytorch(trained, name, strategy):
    trained(name, strategy)


@pytest.mark.parametrize(("name", "strategy"), with_matrix(OTHERS, OTHERS[:1]))
@pytest.mark.matrix
def test_other_models(name, strategy):
    check_parity(name, strategy)


# What the compiled program communicates


def sizes(model: nn.Module, kind: str, axis: str = "tp") -> list[int]:
    """Bytes of the tensors of at least half an activation in collectives of a kind (XLA combines some into one)."""
    found = [size for item in communication(model).select(kind, axis).collectives for size in item.tensor_bytes]
    return [size for size in found if size >= ACTIVATION // 2]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.default_cases("gpt2")
def test_two_all_reduces_per_layer_and_direction(trained, name):
    """Megatron-LM, section 3: two forward and two backward per layer, one for the vocabulary in each direction; no gather."""
    model = trained(name, "tp=2")
    assert sizes(model, "all-reduce") == [ACTIVATION] * 2 * (2 * zoo.LAYERS + 1)
    assert sizes(model, "all-gather") == sizes(model, "reduce-scatter") == sizes(model, "all-to-all") == []
    every = [size for item in communication(model).select("all-reduce", "tp").collectives for size in item.tensor_bytes]
    assert sorted(size for size in every if size < ACTIVATION // 2) == [B * T * 4] * 3  # the cross-entropy's maximum, sum and logit


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.default_cases("gpt2")
def test_sequence_parallelism_gathers_and_scatters_instead(trained, name):
    """Korthikanti et al., section 4.2: the sums become pairs of a gather and a scatter; the backward gathers the inputs of the
    columns once more, as they are kept split."""
    model = trained(name, "tp=2,sequence_parallel=true")
    blocks = 2 * zoo.LAYERS + 1  # with the embedding, or the head
    assert sizes(model, "reduce-scatter") == [ACTIVATION] * 2 * blocks
    assert sizes(model, "all-gather") == [ACTIVATION] * 3 * blocks
    assert sizes(model, "all-reduce") == []


@pytest.mark.matrix
def test_logits_are_never_gathered():
    """Also where the loop looks at the loss only: with a large vocabulary no collective is as large as the logits."""
    config = zoo.transformers.LlamaConfig(**{**zoo._DECODER, "vocab_size": 1024})
    model = zoo.condition(zoo.transformers.LlamaForCausalLM(config))
    reference = copy.deepcopy(model)
    batches = batches_of("llama", 2)
    expected = train(reference, batches)
    model = compiled(model, "tp=2,sequence_parallel=true")
    assert_parity(reference, model, expected, train(model, batches))
    logits = B * T * 1024 * 4
    assert max(item.size_bytes for item in communication(model).collectives) <= 1024 * D * 4 < logits / 2


def test_parameters_and_state_lie_split(trained):
    model = trained("llama", "tp=2")
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1) * 4
    held = model.bytes_per_device()
    assert held[Kind.PARAM] == (whole - norms) // 2 + norms
    assert held[Kind.STATE] == 2 * held[Kind.PARAM] + 4  # two moments, and one count for all


# Roles


def spec_of(model: nn.Module, name: str):
    return next(tensor for tensor in model.strategy.tensors if tensor.name == name)


def test_roles_come_from_the_graph_not_from_names():
    """Modules called a, b, c: the policy finds columns and rows by what feeds what."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 64, bias=False)
            self.b = nn.Parameter(torch.randn(64, 16) / 8)
            self.c = nn.Linear(16, 16)

        def forward(self, x):
            return zoo.Output((self.c(torch.relu(self.a(x)) @ self.b).tanh() ** 2).mean(), None)

    model = zoo.condition(Odd())
    reference = copy.deepcopy(model)
    batches = [dict(x=torch.randn(8, 16)) for _ in range(3)]
    expected = train(reference, batches)
    model = compiled(model, "tp=2")
    assert_parity(reference, model, expected, train(model, batches))
    assert spec_of(model, "a.weight").spec == "tp, -" and spec_of(model, "b").spec == "tp, -"
    assert spec_of(model, "c.weight").spec == "-, -" and "no row-parallel product" in spec_of(model, "c.weight").reason


@pytest.mark.matrix
def test_a_fused_projection_is_split_by_heads():
    """GPT-2's query-key-value weight: its three parts are split each, and state_dict and checkpoints keep its own order."""
    model = check_parity("gpt2", "fsdp=2,tp=2")
    decision = spec_of(model, "transformer.h.0.attn.c_attn.weight")
    assert (decision.spec, decision.decided_by) == ("fsdp, tp", "policy, default")
    assert "transformer.h.0.attn.c_attn.weight" in str(model.strategy)
    assert model.strategy == graphacc.Strategy(fsdp=2, tp=2) == graphacc.Strategy.parse(str(model.strategy))


def test_grouped_heads_with_fewer_key_heads_than_ranks(trained):
    """tp=4 with two key/value heads: the query heads are split, and every rank takes the key head of its own."""
    model = trained("llama", "tp=4")
    assert spec_of(model, "model.layers.0.self_attn.q_proj.weight").spec == "tp, -"
    assert spec_of(model, "model.layers.0.self_attn.k_proj.weight").spec == "-, -"
    assert sizes(model, "all-gather") == []


# Annotations


def run_annotated(annotations, strategy="tp=2", name="llama"):
    model, _ = zoo.MODELS[name]()
    reference = copy.deepcopy(model)
    batches = batches_of(name, 2)
    expected = train(reference, batches)
    model = compiled(model, strategy, annotations=annotations)
    assert_parity(reference, model, expected, train(model, batches))
    return model


def test_annotations_are_pins():
    """Against the policy: the query projection is split by its inputs, the MLP is whole."""
    P = graphacc.P
    model = run_annotated({"*.q_proj.weight": P(None, "tp"), "*.mlp.*": P()})
    assert spec_of(model, "model.layers.1.self_attn.q_proj.weight").spec == "-, tp"
    assert spec_of(model, "model.layers.1.self_attn.q_proj.weight").decided_by == "user"
    assert spec_of(model, "model.layers.0.mlp.up_proj.weight").spec == "-, -"
    assert spec_of(model, "lm_head.weight").decided_by == "policy"


def test_mark_sharding_on_parameters_and_activations():
    class Marked(zoo.TiedMlp):
        def forward(self, input_ids, labels):
            hidden = torch.tanh(self.frozen(self.embedding(input_ids)))
            hidden = graphacc.mark_sharding(self.hidden(hidden), graphacc.P(None, "tp", None))
            logits = self.head(zoo.ScaledSquare.apply(hidden))
            return zoo.Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=zoo.IGNORED), logits)

    torch.manual_seed(0)
    model = zoo.condition(Marked())
    reference = copy.deepcopy(model)
    batches = batches_of("tied_mlp", 2)
    expected = train(reference, batches)
    assert graphacc.mark_sharding(model.frozen.weight, graphacc.P(None, "tp")) is model.frozen.weight
    model = compiled(model, "tp=2")
    assert_parity(reference, model, expected, train(model, batches))
    assert spec_of(model, "frozen.weight").spec == "-, tp" and spec_of(model, "frozen.weight").decided_by == "user"


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"*.q_prj.weight": ("tp", None)}, "'*.q_prj.weight' matches no parameter; near are"),
        ({"*.q_proj.weight": ("tp", "tp")}, "uses an axis twice"),
        ({"*.q_proj.weight": ("xp", None)}, "'xp' is no mesh axis"),
        ({"*.q_proj.weight": ("fsdp", None)}, "'fsdp' cannot be annotated"),
        ({"*.q_proj.weight": "tp"}, "is no sharding"),
        ({"model.norm.weight": (None, "tp")}, "has 2 entries"),
        ({"*.q_proj.weight": ("tp", None), "*.layers.0.*.weight": (None, "tp")}, "is pinned to P('tp') by '*.q_proj.weight' and P(None, 'tp') by '*.layers.0.*.weight': keep one"),
    ],
)
def test_annotations_that_cannot_be_followed(annotations, message):
    model, _ = zoo.MODELS["llama"]()
    with pytest.raises(StrategyError) as error:
        compiled(model, "tp=2", annotations=annotations)
    assert message in str(error.value)


def test_all_problems_of_annotations_are_reported_together():
    model, _ = zoo.MODELS["gpt2"]()
    with pytest.raises(StrategyError) as error:
        compiled(model, "tp=2", annotations={"nothing": ("tp",), "*wte*": ("tp", "tp"), "lm_head.weight": (None, None, "tp")})
    assert all(text in str(error.value) for text in ("'nothing' matches no", "twice", "has 3 entries"))


def test_marks_that_cannot_be_followed():
    model, _ = zoo.MODELS["llama"]()
    graphacc.mark_sharding(model.model.layers[0].self_attn.q_proj.weight, graphacc.P(None, "tp"))
    with pytest.raises(StrategyError) as error:
        compiled(model, "tp=2", annotations={"*.0.self_attn.q_proj.weight": graphacc.P("tp")})
    assert "P('tp') by '*.0.self_attn.q_proj.weight' and P(None, 'tp') by mark_sharding on 'model.layers.0.self_attn.q_proj.weight'" in str(error.value)

    class Odd(nn.Linear):
        def forward(self, x):
            return zoo.Output((graphacc.mark_sharding(super().forward(x), graphacc.P(None, "tp")) ** 2).mean(), None)

    model = compiled(Odd(4, 5), "tp=2")
    with pytest.raises(StrategyError, match=r"mark_sharding at .*test_tensor_parallel.py:\d+: tp=2 does not divide dim 1 of shape \[8, 5\]"):
        train(model, [dict(x=torch.randn(8, 4))])


# Errors and randomness


def test_heads_that_do_not_divide():
    model, _ = zoo.MODELS["gpt2"]()  # four heads
    model = compiled(model, "tp=8")
    with pytest.raises(StrategyError, match=r"tp=8 does not divide the 4 attention heads at .*: choose tp out of 1, 2, 4"):
        train(model, batches_of("gpt2", 1))


def test_sequence_parallelism_needs_tp():
    with pytest.raises(StrategyError, match="sequence_parallel splits activations over the tp axis, which has size 1: set tp"):
        graphacc.Strategy(sequence_parallel=True)


@pytest.mark.parametrize("strategy", with_matrix(["tp=2", "fsdp=2,tp=2", "tp=2,sequence_parallel=true", "dp=2,cp=2"], ["fsdp=2,tp=2"]))
def test_dropout_draws_what_one_device_draws(strategy):
    """The numbers depend on the place in the global tensor: equal where an activation is replicated, different along data axes."""
    config = zoo.transformers.GPT2Config(
        vocab_size=zoo.VOCAB, n_embd=D, n_layer=1, n_head=4, n_positions=2 * T, use_cache=False, bos_token_id=0, eos_token_id=0
    )  # dropout 0.1 everywhere, in attention too
    torch.manual_seed(0)
    model = zoo.transformers.GPT2LMHeadModel(config).train()
    other, again = copy.deepcopy(model), copy.deepcopy(model)
    batches = batches_of("gpt2", 3)
    runs = []
    for net, how in ((model, None), (other, strategy)):
        with captured_once("dropout"):
            runs.append(train(compiled(net, how, seed=7), batches))
    assert runs[1] == pytest.approx(runs[0], abs=2e-5)
    with captured_once("dropout"):
        assert train(compiled(again, strategy, seed=7), batches) == runs[1]
