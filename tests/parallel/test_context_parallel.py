"""Context parallelism, by all-to-all of heads (Ulysses) and around the ring: parity, communication, errors."""

import copy

import pytest
import torch
import zoo
from selection import with_matrix
from training import assert_parity, batches_of, captured_once, check_parity, compiled, train

import graphacc
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.graph import Phase
from graphacc.report import communication
from graphacc.search.model import search_of
from graphacc.strategy.spec import Strategy

TOKENS = 8 * zoo.SEQ
HEADS = TOKENS * zoo.HIDDEN * 4 // 2  # bytes of a rank's part of [B, H, T, D] in fp32, cp=2


CASES = [(name, context) for name in ("gpt2", "llama", "qwen3_moe", "t5") for context in ("ulysses", "ring")]


@pytest.mark.parametrize(("name", "context"), with_matrix(CASES, [("gpt2", "ulysses"), ("t5", "ring")]))
@pytest.mark.default_cases("gpt2-ulysses")
def test_training_equals_plain_pytorch(trained, name, context):
    """Every attention goes its way: T5's with its learned bias, and across encoder and decoder, also goes around the ring."""
    model = trained(name, f"cp=2,context={context}")
    taken = {"ulysses": "all-to-all", "ring": "collective-permute"}
    assert [kind for kind in taken.values() if communication(model).select(kind, "cp").count] == [taken[context]]


OTHERS = ("cp=4,context=ring", "fsdp=2,cp=2,context=ring", "cp=2,tp=2,sequence_parallel=true")


@pytest.mark.parametrize("strategy", with_matrix(OTHERS, ["cp=4,context=ring", "cp=2,tp=2,sequence_parallel=true"]))
@pytest.mark.default_cases("cp=2,tp=2,sequence_parallel=true")
def test_more_ranks_and_other_axes(strategy):
    check_parity("llama", strategy)


@pytest.mark.matrix
def test_bidirectional_attention_with_padding_goes_around_the_ring():
    """BERT: the segments that stand for its padding travel with the keys."""
    model = check_parity("bert", "cp=2,context=ring")
    assert communication(model).select("all-to-all").count == 0
    assert communication(model).select("collective-permute", "cp").count > 0


def test_ulysses_exchanges_four_times_per_layer_and_direction(trained):
    """Jacobs et al., section 3: query, key, value and output; nothing of the activations' size is gathered or summed."""
    model = trained("gpt2", "cp=2,context=ulysses")
    exchanged = [size for item in communication(model).select("all-to-all", "cp").collectives for size in item.tensor_bytes]
    assert exchanged == [HEADS] * 8 * zoo.LAYERS
    weights = max(parameter.numel() for parameter in model.parameters()) * 4
    assert all(size <= TOKENS * 8 for item in communication(model).select("all-gather").collectives for size in item.tensor_bytes)
    assert all(size <= weights for item in communication(model).select("all-reduce").collectives for size in item.tensor_bytes)


@pytest.mark.matrix
def test_the_ring_sends_only_to_neighbours(trained):
    """Liu et al., section 3: keys and values travel n - 1 times in each direction, and their gradients n times.

    Dealing out or collecting a tensor sends half of it (of two ranks, each keeps its first chunk): query, key, value and output
    forward; the output and its gradient, and the gradients of query, key and value backward. What the forward dealt is kept for the
    backward, what it turned is not; the log-sum-exps of the blocks stay where they are.
    """
    model = trained("gpt2", "cp=2,context=ring")
    found = communication(model)
    assert found.select("all-to-all").count == 0
    assert all(size <= TOKENS * 8 for item in found.select("all-gather").collectives for size in item.tensor_bytes)
    per_layer = found.select("collective-permute", "cp").size_bytes / zoo.LAYERS / HEADS
    assert per_layer == pytest.approx(4 / 2 + 2 + 2 / 2 + 2 + 3 / 2 + 4)


def planned(strategy: str, length: int, key_heads: int = 4):
    """The program that the passes make of a small Llama."""
    with torch.device("meta"):
        model = zoo.transformers.LlamaForCausalLM(zoo.transformers.LlamaConfig(**zoo._DECODER | {"num_key_value_heads": key_heads, "max_position_embeddings": length}))
    ids, found = torch.zeros(1, length, dtype=torch.long), Strategy.parse(strategy)
    search = search_of(model, {"input_ids": ids, "labels": ids}, None, Hardware.parse(f"cpu:{found.num_devices}"))
    return search.program_of(found)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_what_travels_around_the_ring_together_is_one_message(key_heads):
    """Queries, keys and values are dealt out in two messages, also where they differ in their heads, the output is collected in two; keys and values turn in one, and so do their gradients."""
    step = planned("cp=8,context=ring", 64, key_heads)
    sent = [node.meta["phase"] for node in step.graph.nodes if node.target is torch.ops.graphacc.permute_ranks.default]
    assert sent.count(Phase.FORWARD) == zoo.LAYERS * (2 + 7 + 2)
    assert sent.count(Phase.BACKWARD) == zoo.LAYERS * (2 + 7 + 8 + 2)


def test_the_ring_keeps_no_other_ranks_keys_for_the_backward():
    """What a rank keeps from the forward is its part of the sequence, as where heads are exchanged, and the log-sum-exp of each block."""
    saved = {}
    for context in ("ulysses", "ring"):
        step = planned(f"cp=4,context={context}", 512)
        crossing = [node for node in step.graph.nodes if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD and any(user.meta.get("phase") is Phase.BACKWARD for user in node.users)]
        tensors = [node.meta["val"] for node in crossing if isinstance(node.meta["val"], torch.Tensor)]
        saved[context] = sum(x.numel() * x.dtype.itemsize for x in tensors)
    blocks = zoo.LAYERS * zoo.HEADS * 512 * 4
    assert saved["ring"] <= 1.05 * saved["ulysses"] + blocks, saved


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.default_cases("ring")
def test_dropout_in_attention(context):
    config = zoo.transformers.GPT2Config(
        vocab_size=zoo.VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0
    )  # 0.1 everywhere
    torch.manual_seed(0)
    model = zoo.transformers.GPT2LMHeadModel(config).train()
    other, batches = copy.deepcopy(model), batches_of("gpt2", 3)
    runs = []
    for net, strategy in ((model, None), (other, f"cp=4,context={context}")):
        with captured_once("context dropout"):
            runs.append(train(compiled(net, strategy, seed=7), batches))
    assert runs[1] == pytest.approx(runs[0], abs=2e-5)


@pytest.mark.matrix
def test_a_window_takes_the_exchange_of_heads(caplog):
    """A sliding window says something about positions that a block of the ring does not know; a warning says so for every layer."""
    config = zoo.transformers.MistralConfig(**zoo._DECODER, sliding_window=5, attn_implementation="sdpa")
    model = zoo.condition(zoo.transformers.MistralForCausalLM(config))
    reference, batches = copy.deepcopy(model), batches_of("llama", 2)
    expected = train(reference, batches)
    model = compiled(model, "cp=2,context=ring")
    assert_parity(reference, model, expected, train(model, batches))
    assert communication(model).select("all-to-all", "cp").count > 0
    said = [record.getMessage() for record in caplog.records if "instead of going around the ring: a window" in record.getMessage()]
    assert len(said) == zoo.LAYERS and all(record.levelname == "WARNING" for record in caplog.records if "ring" in record.getMessage())


def test_a_sequence_that_does_not_divide():
    model, _ = zoo.MODELS["gpt2"]()
    model = compiled(model, "cp=3")
    with pytest.raises(StrategyError, match="cp=3 splits the sequence of the batch, but no batch input has a sequence that 3 divides"):
        train(model, batches_of("gpt2", 1))


def cut(batches: list[dict], length: int) -> list[dict]:
    return [{name: value[:, :length] for name, value in batch.items()} for batch in batches]


def test_an_evaluation_whose_sequence_does_not_divide(caplog):
    """Nobody can choose the length of every text that is evaluated; what trains is split as asked, or refused."""
    model, _ = zoo.MODELS["gpt2"]()
    odd = cut(batches_of("gpt2", 1), 5)[0]
    model = compiled(model, "cp=2")
    train(model, batches_of("gpt2", 1))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.allclose(model(**odd).loss, reference(**odd).loss, atol=1e-6)
    assert [program.kind for program in model.programs] == ["step", "forward"]
    said = [record.getMessage() for record in caplog.records if "every device of cp computes whole sequences: cp=2 splits" in record.getMessage()]
    assert len(said) == 1
    with pytest.raises(StrategyError, match="no batch input has a sequence that 2 divides"):
        train(model, [odd])


@pytest.mark.matrix
def test_a_searched_strategy_refuses_no_length():
    """cp=2 is all that the pins leave to the search, which sees an even length only."""
    model, _ = zoo.MODELS["gpt2"]()
    first, *others = batches_of("gpt2", 3)
    batches = [first, *cut(others, 5)]
    reference = copy.deepcopy(model)
    expected = train(reference, batches)
    model = compiled(model, "auto,dp=1,fsdp=1,tp=1,ep=1", devices=2)
    assert_parity(reference, model, expected, train(model, batches))
    assert model.strategy.cp == 2
    assert len(model.programs) == 2


def test_ring_and_sequence_parallelism_exclude_each_other():
    with pytest.raises(StrategyError, match="context='ring' needs contiguous blocks"):
        graphacc.Strategy(tp=2, cp=2, sequence_parallel=True, context="ring")
    with pytest.raises(StrategyError, match="context='star' is unknown: choose one of ulysses, ring"):
        graphacc.Strategy(cp=2, context="star")
