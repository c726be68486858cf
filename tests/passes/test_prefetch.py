"""Prefetch: how many buckets of weights are there at a time, under the schedule that gathers as early as it can, and as compiled for CPU.

    prefetch = 1     gather      0  1     2     3                  bucket k + 1 is on its way while k is read; k + 2 waits for
                     read           0     1     2     3            the last reader of k
"""

import functools

import pytest
import torch
import transformers
from gpt2_steps import BATCH, buckets_at_once, captured, gpt2, llama, spread
from simulate import simulate

from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.passes.communication.prefetch import readers, sequences
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

LENGTH, VOCABULARY, WIDTH = 16, 512, 192
BUCKET_MB = 1.5
EMBEDDING_BYTES = 4 * VOCABULARY * WIDTH  # of GPT-2's, which is tied; less than those of any bucket here


@functools.cache
def step(name: str = "gpt2") -> StepGraph:
    if name == "gpt2":
        return captured(gpt2(layers=4, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY), LENGTH)
    return captured(llama(layers=4, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY, factor=2), LENGTH)


def is_embedding(gather: torch.fx.Node) -> bool:
    """The tied embedding is read by the first operator and the last."""
    return "wte" in gather.meta["move"].value or "embed" in gather.meta["move"].value


def greedy_order(program: StepGraph) -> list[torch.fx.Node]:
    """The schedule that starts every gather as soon as what it waits for is there."""
    given = set(program.placeholders)
    for node in program.graph.nodes:
        read = node.all_input_nodes[:1] if node.target is torch.ops.graphacc.after.default else node.all_input_nodes
        if node.op == "call_function" and given.issuperset(read):
            given.add(node)
    left = {node: len(node.all_input_nodes) for node in program.graph.nodes}
    early = [node for node, count in left.items() if not count]
    late: list[torch.fx.Node] = []
    order = []
    while early or late:
        node = early.pop() if early else late.pop(0)
        order.append(node)
        for user in node.users:
            left[user] -= 1
            if not left[user]:
                (early if user in given else late).append(user)
    return order


def most_gathered(program: StepGraph) -> dict[str, int]:
    """Phase -> the most buckets of weights that are there at one time."""
    place = {node: i for i, node in enumerate(greedy_order(program))}
    found = {}
    for gathers in sequences(program):
        spans = [(place[gather], max(place[node] for node in readers(gather))) for gather in gathers if not is_embedding(gather)]
        found[gathers[0].meta["phase"].value] = max(sum(first <= at <= last for first, last in spans) for at, _ in spans)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=2,cp=2", "cp=4,zero=3"])
@pytest.mark.default_cases("fsdp=4-1-gpt2", "fsdp=2,cp=2-1-gpt2")
def test_no_schedule_gathers_more(name, prefetch, strategy):
    program = spread(step(name), f"{strategy},bucket_mb={BUCKET_MB},prefetch={prefetch}")
    assert most_gathered(program) == {"forward": prefetch + 1, "backward": prefetch + 1}


def test_without_a_bound_everything_is_gathered_at_once():
    """What the bound is for; and that the schedule above is greedy."""
    program = spread(step(), f"fsdp=4,bucket_mb={BUCKET_MB},prefetch=100")
    (forward, backward) = ([gather for gather in gathers if not is_embedding(gather)] for gathers in sequences(program))
    assert most_gathered(program) == {"forward": len(forward), "backward": len(backward)}
    assert len(forward) >= 6


def test_values_keep_their_bits():
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(VOCABULARY, item.shape, generator=generator) if item.kind is Kind.BATCH else torch.rand(item.shape, generator=generator).to(item.dtype)
        for item in step().inputs
    ]
    alone, tied = (simulate(spread(step(), f"fsdp=4,bucket_mb={size}"), {"fsdp": 4}, inputs) for size in (0, BUCKET_MB))
    assert all(torch.equal(x, y) for x, y in zip(alone, tied, strict=True))


def test_a_large_gradient_waits_for_what_reads_its_weight():
    """A tied embedding of more than 32 MB: its gradient's second product, whose factors are there before the gathered weight's, is the later one."""
    width, vocabulary = 128, 65_537
    large = captured(gpt2(layers=1, width=width, length=LENGTH, vocabulary=vocabulary), LENGTH)
    waits = []
    for node in spread(large, "fsdp=2").graph.nodes:
        if node.target is torch.ops.aten.mm.default and vocabulary in node.meta["val"].shape and node.meta["phase"] is Phase.BACKWARD:
            waits += [factor.args[1] for factor in node.args if factor.target is torch.ops.graphacc.after.default]
    assert [(wait.target, wait.args[0].meta["val"].shape[1], wait.meta["val"].shape[1]) for wait in waits] == [(torch.ops.aten.mm.default, vocabulary, width)]


def test_a_gradient_as_large_as_what_reads_the_weight():
    """As many rows as the weight has: the gradient of the activation has the weight's size, too, and is no gradient of a weight (Llama-8B, 4096 tokens)."""
    size, wide, ranks = 2048, 4608, 2
    length = ranks * size // BATCH
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=size, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=wide,
            max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        program = spread(captured(transformers.LlamaForCausalLM(config), length), f"fsdp={ranks}")
    program.verify()
    assert most_gathered(program)["backward"] <= 2


@pytest.mark.matrix
def test_compiled_for_cpu():
    """In XLA's schedule, too, and with temporaries of at most two buckets more than without buckets."""
    mesh = make_mesh(Strategy(fsdp=8), select_devices(8))
    temporaries = {}
    for choice in ("bucket_mb=0", *(f"bucket_mb={BUCKET_MB},prefetch={prefetch}" for prefetch in (0, 1))):
        program = Program.build(spread(step(), f"fsdp=8,{choice}"), mesh, cache_dir=None, memory_plan="xla", fast_compile=True)
        temporaries[choice] = program.memory.temp_bytes
        at_once = buckets_at_once(program.hlo_text(), EMBEDDING_BYTES, BUCKET_MB * 1e6)
        if choice != "bucket_mb=0":
            assert at_once <= int(choice[-1]) + 1, choice
            assert temporaries[choice] <= temporaries["bucket_mb=0"] + 2e6 * BUCKET_MB


@pytest.mark.parametrize("value", [-1, 0.5, True])
def test_bad_distances(value):
    with pytest.raises(StrategyError, match="prefetch=.* must be a whole number of at least 0"):
        Strategy(prefetch=value)
