"""What the backward would put off: how many whole gradients, and gathered factors, there are at a time under the schedule that scatters and multiplies as late as it can."""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
import zoo
from gpt2_steps import captured, gpt2, llama, mixtral, spread
from training import assert_parity, compiled, train

from graphacc.graph import Kind, Phase, StepGraph
from graphacc.lowering.rules.collectives import _with_one_element_behind
from graphacc.passes.communication import release
from graphacc.passes.communication.buckets import GATHER, SCATTER, _sums_behind, goes_further, readers
from graphacc.passes.partition.plan import Role

LAYERS, WIDTH, LENGTH, VOCABULARY = 4, 256, 16, 512
LARGEST = 4 * WIDTH * 4 * WIDTH  # bytes of the gradient of an MLP's weight
WAIT_FOR = torch.ops.graphacc.wait_for.default


SIZES = dict(layers=LAYERS, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY)


@functools.cache
def step(name: str, precision: str = "fp32") -> StepGraph:
    model = mixtral(**SIZES | {"layers": 6}) if name == "mixtral" else (gpt2 if name == "gpt2" else llama)(**SIZES)
    return captured(model, LENGTH, precision)


def laziest(program: StepGraph, put_off: set[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """Where each call stands in the order of the program, but that these are not done before something else waits for them."""
    order: dict[torch.fx.Node, int] = {}
    for node in program.graph.nodes:
        left = [] if node in put_off else [node]
        while left:
            waiting = [read for read in left[-1].all_input_nodes if read not in order]
            if waiting:
                left.extend(waiting)
            else:
                order.setdefault(left.pop(), len(order))
    return order


def most_whole(program: StepGraph) -> int:
    """Bytes of gradients that could be made and are not scattered yet, at most; what a product that is put off is made of counts as its result."""
    last = [node for node in program.graph.nodes if node.target is SCATTER and node.meta["move"].role is Role.GRADIENT and not goes_further(node)]
    gradients = [release._Gradient.scattered_by(node) for node in last]
    sums = {behind for gradient in gradients for node in gradient.way if node.target is SCATTER for behind in _sums_behind(node)}
    waits = {user for node in sums for user in node.users}
    order = laziest(program, {node for gradient in gradients for node in (gradient.maker, *gradient.way)} | sums | waits)
    changes = [0] * (len(order) + 1)
    for gradient in gradients:
        changes[max(order[read] for read in gradient.maker.all_input_nodes)] += gradient.size_bytes
        changes[order[gradient.done]] -= gradient.size_bytes
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["fsdp=8", "fsdp=8,zero=2", "fsdp=8,remat=blocks", "tp=2,fsdp=4", "cp=2,fsdp=4"])
@pytest.mark.default_cases("fsdp=8-bf16-gpt2", "fsdp=8,remat=blocks-bf16-llama", "fsdp=8-bf16-mixtral")
def test_few_gradients_are_whole(monkeypatch, strategy, precision, name):
    strategy = f"{strategy},precision={precision},bucket_mb=0.05"
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", 10**12)
    unbounded = most_whole(spread(step(name, precision), strategy))
    limit = LARGEST // 2
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", limit)
    assert most_whole(spread(step(name, precision), strategy)) <= limit + 3 * LARGEST < 0.6 * unbounded


def test_experts_wait_for_scatters(monkeypatch):
    """Where attention's gradients are small nothing else in a layer could: what a layer's expert products of the backward read comes behind an earlier scatter."""
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", LARGEST // 2)
    monkeypatch.setattr(release, "is_small", lambda scatter: scatter.meta["move"].size_bytes < LARGEST // 4)
    program = spread(step("mixtral", "bf16"), "fsdp=8,precision=bf16,bucket_mb=0.05")
    waiting = {node for node in program.graph.nodes if node.target is WAIT_FOR and node.meta["phase"] is Phase.BACKWARD}
    products = [node for node in program.graph.nodes if node.target is torch.ops.graphacc.grouped_mm_weight_grad.default]
    assert len(products) == 12 and sum(not waiting.isdisjoint(node.all_input_nodes) for node in products) >= 6


@pytest.mark.parametrize("strategy", ["tp=2,sequence_parallel=true", "tp=2,fsdp=4,sequence_parallel=true", "tp=2,sequence_parallel=true,remat=blocks"])
def test_gathered_factors_do_not_wait_for_their_products(monkeypatch, strategy):
    """Megatron's sequence parallelism: the gradient of every row-parallel layer's output is gathered, for its input's gradient and its weight's."""
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", 1)
    program = spread(step("llama"), strategy)
    order = laziest(program, {node for node in program.graph.nodes if node.target in release._PRODUCTS and node.meta["phase"] is Phase.BACKWARD and release._is_put_off(node)})
    gathers = [node for node in program.graph.nodes if node.target is GATHER and node.meta["phase"] is Phase.BACKWARD and node.meta["move"].role is Role.ACTIVATION]
    lives = sorted((order[gather], max(order[reader] for reader in readers(gather))) for gather in gathers)
    at_once = max(sum(begin <= at <= end for begin, end in lives) for at, _ in lives)
    assert len(lives) > 2 * LAYERS and at_once <= 4, (at_once, len(lives))


@pytest.mark.parametrize("strategy", ["fsdp=8", "tp=2,fsdp=4,sequence_parallel=true", "pp=2,microbatches=2,fsdp=4", "fsdp=8,quantized_gradients=true,quant_min_size=1"])
def test_what_the_loop_gets_stays(monkeypatch, strategy):
    """With waits wherever there may be one: PyTorch's losses and parameters, or those of the program without waits where that sends other gradients."""
    reference = llama(**SIZES)
    batches = [dict(input_ids=(ids := torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(i))), labels=ids) for i in range(3)]
    plain, waiting = copy.deepcopy(reference), compiled(copy.deepcopy(reference), strategy)
    if "quantized" in strategy:
        plain = compiled(plain, strategy)
    expected = train(plain, batches)
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", 1)
    losses = train(waiting, batches)
    assert sum(node.target is WAIT_FOR for program in waiting.programs for node in program.graph.graph.nodes) > 2 * LAYERS
    assert_parity(plain, waiting, expected, losses)


@pytest.mark.parametrize("strategy", ["fsdp=8", "tp=2,fsdp=4", "cp=2,fsdp=4", "cp=8"])
def test_the_backward_begins_behind_the_loss(strategy):
    """What this rank adds to the loss: not the sum over the ranks, which would have to come first."""
    program = spread(step("llama"), strategy)
    loss = program.results[program.output_indices(Kind.LOSS)[0]]
    assert loss.target is torch.ops._c10d_functional.wait_tensor.default or strategy.startswith("tp")
    first = next(node for node in program.graph.nodes if node.target is WAIT_FOR and node.meta["phase"] is Phase.BACKWARD)
    value, waited = first.all_input_nodes
    assert value.meta["val"].numel() == 1 and waited is release._local(loss) and waited.meta["phase"] is Phase.FORWARD
    assert not any(user.meta["phase"] is Phase.BACKWARD for user in value.users if user is not first)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.default_cases("gpt2")
def test_products_of_a_tied_head_are_not_put_off(name):
    """The gradient of a weight that is used twice is a sum; along `tp` its product is waited for like others."""
    program = spread(captured((gpt2 if name == "gpt2" else llama)(**SIZES | {"vocabulary": 1056}), LENGTH), "tp=2,dp=4")
    heads = [node for node in program.graph.nodes if node.target in release._PRODUCTS and node.meta["phase"] is Phase.BACKWARD and 1056 // 2 in node.meta["val"].shape]
    assert len([node for node in heads if release._is_put_off(node)]) == 1


def test_padding_is_masked_for_all_who_read_it():
    """Of a vocabulary that ranks do not divide: the logits' gradient is stored once, with zeros in its padding, for the product that sums over it and for the other one."""
    program = spread(captured(gpt2(**SIZES | {"vocabulary": 1055}), LENGTH), "tp=2,dp=4")
    products = [node for node in program.graph.nodes if node.target in release._PRODUCTS and node.meta["phase"] is Phase.BACKWARD]
    tokens, rows = 2 * LENGTH, 1056 // 2

    def source(node: torch.fx.Node) -> torch.fx.Node:
        while node.target in release.VIEWS or node.target is torch.ops.aten.permute.default:
            node = node.all_input_nodes[0]
        return node

    read = [source(factor) for product in products for factor in product.all_input_nodes if sorted(factor.meta["val"].shape) == sorted((tokens, rows))]
    assert len(read) == 2 and read[0] is read[1] and read[0].target is torch.ops.aten.where.self


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x).relu()
        return zoo.Output(torch.nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels), None)


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=4,zero=2,remat=blocks"])
def test_gradients_of_convolutions(monkeypatch, strategy):
    """They are one of several results of their operator."""
    monkeypatch.setattr(release, "IN_FLIGHT_BYTES", 1)
    torch.manual_seed(0)
    plain = Convolutions()
    batches = [dict(x=torch.randn(8, 64, 6, 6), labels=torch.randint(8, (8,))) for _ in range(3)]
    waiting = compiled(copy.deepcopy(plain), strategy)
    expected, losses = train(plain, batches), train(waiting, batches)
    (program,) = waiting.programs
    waits = [node for node in program.graph.graph.nodes if node.target is WAIT_FOR]
    assert len(waits) >= 2, "the backward of a convolution waits for gradients behind it"
    assert_parity(plain, waiting, expected, losses)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_waiting_on_gpus_changes_no_bit(dtype):
    """The form that waits by a dependency of data, run here."""
    x, dependency = jnp.asarray([[-0.0, jnp.nan, 3.0], [jnp.inf, 5.0, 6.0]]).astype(dtype), jnp.asarray([[7.5]], jnp.bfloat16)
    got = jax.jit(_with_one_element_behind)(x, dependency)
    assert (got.dtype, got.shape) == (x.dtype, x.shape) and got.tobytes() == x.tobytes()
