"""Buckets and prefetch in the schedule that XLA:CUDA makes for H100s; no GPU is needed."""

import functools
import re

import h100
import jax
import jax.numpy as jnp
import pytest
import torch
from gpt2_steps import bert, buckets_at_once, captured, gpt2, llama, spread
from graphs import trace
from torch.nn import functional as F

from graphacc._compat import jax_ as compat
from graphacc.costs.memory import predict_memory
from graphacc.graph import Kind
from graphacc.lowering import lower
from graphacc.lowering.rules.matmul import PIECE, PIECED_BYTES
from graphacc.passes.communication import release
from graphacc.report.communication import Collective, read_collectives
from graphacc.report.schedule import Computation, kind_of, read_module
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

if compat.cuda_library() is None:
    pytest.skip("JAX's CUDA plugin is not installed", allow_module_level=True)

LAYERS, WIDTH, LENGTH, VOCABULARY = 3, 512, 128, 8192
WEIGHTS = "bucket_mb=10"
BUCKET_BYTES = 10e6


@functools.cache
def step():
    return captured(gpt2(layers=LAYERS, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY), LENGTH)


@functools.cache
def compiled(choice: str) -> tuple[Program, str, list[Collective]]:
    mesh = h100.like(make_mesh(Strategy(fsdp=8), select_devices(8)))
    program = Program.build(spread(step(), f"fsdp=8,{choice}"), mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
    hlo = program.hlo_text()
    return program, hlo, list(read_collectives(hlo, mesh))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_buckets_are_gathered_at_once(prefetch):
    _, hlo, _ = compiled(f"{WEIGHTS},prefetch={prefetch}")
    assert buckets_at_once(hlo, 0.03 * BUCKET_BYTES, BUCKET_BYTES) == prefetch + 1


def test_what_is_exposed_and_what_it_costs():
    """Both gathers are there, on their way beside something, with next to no memory more; scatters wait for no other scatter and are as planned."""
    before, _, _ = compiled("bucket_mb=0")
    after, hlo, found = compiled(f"{WEIGHTS},prefetch=1")
    entry = list(read_module(hlo).values())[-1]
    gathers = [item for item in found if item.kind == "all-gather"]
    scatters = [item for item in found if item.kind == "reduce-scatter"]
    parameters = sum(parameter.numel() * 4 for parameter in gpt2(layers=LAYERS, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY).parameters())
    assert 1.9 * parameters < sum(item.size_bytes for item in gathers) <= 2 * parameters  # the backward reads no bias
    behind = sum(item.exposed_bytes for item in gathers[1:])  # nothing runs before the first one has come
    assert behind <= 0.05 * sum(item.size_bytes for item in gathers)
    assert after.memory.temp_bytes <= 1.04 * before.memory.temp_bytes
    assert sum(item.size_bytes for item in scatters) == parameters
    assert not entry.chained("reduce-scatter")
    assert all(item.size_bytes <= BUCKET_BYTES for item in scatters if len(item.tensor_bytes) > 1 or item.size_bytes != VOCABULARY * WIDTH * 4)


def test_without_prefetch_gathers_are_exposed():
    """What the report would miss if it took every start and end for an overlap."""
    exposed = [sum(item.exposed_bytes for item in compiled(f"{WEIGHTS},prefetch={prefetch}")[2] if item.kind == "all-gather") for prefetch in (0, 1)]
    assert exposed[0] > 3 * exposed[1]


def test_factors_of_an_odd_length_are_not_copied():
    """XLA pads both for a product of its own."""
    length = 5 * PIECE + 1001
    width = PIECED_BYTES // (2 * 4 * length) + 1
    inputs = [(Kind.BATCH, "a", torch.empty(width, length)), (Kind.BATCH, "b", torch.empty(length, width))]
    ours = trace(lambda a, b: (a.sin() @ b.sin(), a.sin(), b.sin()), inputs, [(Kind.USER, str(i)) for i in range(3)])
    temporaries = []
    with compat.x64():
        for product in (lambda a, b: (jnp.sin(a) @ jnp.sin(b), jnp.sin(a), jnp.sin(b)), lower(ours)):
            compiled = h100.compile(jax.jit(product), [jax.ShapeDtypeStruct(item[2].shape, jnp.float32) for item in inputs])
            temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] > PIECED_BYTES > 2 * temporaries[1]


def test_a_head_of_an_odd_vocabulary_multiplies_aligned_rows():
    """Logits and both gradients in bf16: no product reads or writes rows of 4,097, and one array of the logits' gradient is made, which both products read."""

    def step(x, weight, labels):
        logits = x @ weight.t()
        grad = (logits.float().softmax(-1) - F.one_hot(labels, 4097)).bfloat16()
        return grad @ weight, grad.t() @ x

    inputs = [(Kind.BATCH, "x", torch.empty(2048, 256)), (Kind.BATCH, "w", torch.empty(4097, 256)), (Kind.BATCH, "labels", torch.zeros(2048, dtype=torch.long))]
    inputs = [(kind, name, value.bfloat16() if value.is_floating_point() else value) for kind, name, value in inputs]
    with compat.x64():
        arguments = [jax.ShapeDtypeStruct(item[2].shape, jnp.bfloat16 if item[2].is_floating_point() else jnp.int64) for item in inputs]
        text = h100.compile(jax.jit(lower(trace(step, inputs, [(Kind.USER, str(i)) for i in range(2)]))), arguments).as_text()
    products = [line for line in text.splitlines() if " dot(" in line or "__cublas" in line]
    assert len(products) >= 3 and not any("4097" in line.partition("metadata")[0] for line in products)
    assert len(re.findall(r"= bf16\[2048,4160\]\S* fusion\(.*calls=%fused_pad", text)) == 1


def test_what_several_products_read_is_joined_once():
    """As the gradients of queries, keys and values are."""

    def step(a, b, weight, x):
        both = torch.cat([a.sin(), b.sin()], 1)
        return both @ weight, both.t() @ x

    inputs = [(Kind.BATCH, name, torch.empty(shape)) for name, shape in (("a", (4096, 512)), ("b", (4096, 512)), ("w", (1024, 512)), ("x", (4096, 512)))]
    inputs = [(kind, name, value.bfloat16()) for kind, name, value in inputs]
    arguments = [jax.ShapeDtypeStruct(item[2].shape, jnp.bfloat16) for item in inputs]
    with compat.x64():
        text = h100.compile(jax.jit(lower(trace(step, inputs, [(Kind.USER, str(i)) for i in range(2)]))), arguments).as_text()
    assert len(re.findall(r"fusion\(.*calls=%\S*concatenate", text)) == 1


@functools.cache
def llama_temporaries(strategy: str, limit: float) -> tuple[int, int]:
    """Bytes of temporaries, predicted and of XLA, where gradients of up to `limit` bytes may be whole."""
    chosen = Strategy.parse(strategy)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(release, "IN_FLIGHT_BYTES", limit)
        local = spread(captured(llama(layers=6, width=WIDTH, length=LENGTH, vocabulary=512), LENGTH, chosen.precision), strategy)
    mesh = h100.like(make_mesh(chosen, select_devices(chosen.num_devices)))
    memory = Program.build(local, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST).memory
    return predict_memory(local).temporary_bytes, memory.temp_bytes + memory.output_bytes - memory.alias_bytes


@pytest.mark.parametrize("strategy", ["fsdp=8,remat=blocks,precision=bf16", "tp=8,sequence_parallel=true,precision=bf16"])
def test_the_backward_lets_whole_tensors_go(strategy):
    """XLA scatters gradients late, and multiplies what was gathered for them later still, unless the backward waits; what is predicted then is what XLA needs."""
    (_, without), (predicted, found) = llama_temporaries(strategy, 1e12), llama_temporaries(strategy, 1e6)
    assert found < 0.9 * without, (found, without)
    assert predicted == pytest.approx(found, rel=0.15), strategy


@functools.cache
def large_vocabulary(strategy: str, length: int) -> tuple[int, int]:
    """Bytes of temporaries of a GPT-2 with a vocabulary of 32,001, predicted and of XLA."""
    chosen = Strategy.parse(strategy)
    with torch.device("meta"):
        local = spread(captured(gpt2(layers=2, width=WIDTH, length=length, vocabulary=32001), length, chosen.precision), strategy)
    mesh = h100.like(make_mesh(chosen, select_devices(chosen.num_devices)))
    memory = Program.build(local, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST).memory
    return predict_memory(local).temporary_bytes, memory.temp_bytes + memory.output_bytes - memory.alias_bytes


@pytest.mark.parametrize("strategy", ["dp=4,tp=2", "fsdp=8", "dp=2,fsdp=2,tp=2", "fsdp=4,cp=2"])
@pytest.mark.default_cases("dp=4,tp=2", "fsdp=4,cp=2")
def test_the_gradient_of_logits_is_there_once(strategy):
    """Padded for products, masked for one of them where the vocabulary is split, read by what waits for it. Neither logits nor the table's zeros stay through the backward."""
    predicted, found = large_vocabulary(f"{strategy},precision=bf16", 1024)
    logits = 2 * 1024 * 32001  # of a device, in bf16
    assert predicted == pytest.approx(found, rel=0.1), strategy
    assert found < 3.3 * logits, (found, logits)


@pytest.mark.parametrize("strategy", ["dp=4,tp=2", "fsdp=8"])
@pytest.mark.matrix
def test_a_table_is_summed_in_fp32(strategy):
    """Where the table's gradient is most of the temporaries."""
    predicted, found = large_vocabulary(f"{strategy},precision=bf16", 128)
    assert predicted == pytest.approx(found, rel=0.03), strategy


@pytest.mark.parametrize("strategy", ["fsdp=4,tp=2,precision=bf16", "fsdp=8,precision=bf16", "dp=4,tp=2"])
@pytest.mark.default_cases("fsdp=4,tp=2,precision=bf16", "dp=4,tp=2")
def test_what_layers_keep_is_what_xla_keeps(strategy):
    """Products of one factor joined, of which the gathers' barriers copy parts; cuDNN's attention without a copy of its result, or loops over keys; no SiLU."""
    chosen = Strategy.parse(strategy)
    with torch.device("meta"):
        local = spread(captured(llama(layers=6, width=WIDTH, length=1024, vocabulary=512), 1024, chosen.precision), strategy)
    mesh = h100.like(make_mesh(chosen, select_devices(chosen.num_devices)))
    memory = Program.build(local, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST).memory
    found = memory.temp_bytes + memory.output_bytes - memory.alias_bytes
    assert predict_memory(local).temporary_bytes == pytest.approx(found, rel=0.04), strategy


RANKS = 4


def around_a_ring(kind: str) -> Computation:
    """The program of two layers of a GPT-2, or of a BERT, whose attention is not causal: 1,024 tokens on each of four devices."""
    chosen = Strategy.parse(f"cp={RANKS},context=ring,precision=bf16")
    make = gpt2 if kind == "causal" else bert
    with torch.device("meta"):
        local = spread(captured(make(layers=2, width=WIDTH, length=RANKS * 1024, vocabulary=512), RANKS * 1024, chosen.precision), str(chosen))
    program = Program.build(local, h100.like(make_mesh(chosen, select_devices(RANKS))), cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
    return list(read_module(program.hlo_text()).values())[-1]


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_what_goes_around_a_ring_travels_beside_attention(kind):
    """In each step but the last one message, of the next step's keys and in the backward of the gradients of the last step's, while all kernels of the step run; then the gradients go home."""
    entry = around_a_ring(kind)
    kernels = {item.name for item in entry if item.opcode == "custom-call" and "fmha" in item.text}
    later = 2 if kind == "causal" else 1  # kernels of each step but the first
    beside = [[item.name in kernels for item in entry.between(start)].count(True) for start in entry if kind_of(start) == "collective-permute"]
    forward, backward = [1, *[later] * (RANKS - 2)], [1, *[later] * (RANKS - 1)]
    assert [count for count in beside if count] == [*forward, *forward, *backward, *backward]
    assert len(kernels) == 2 * 2 * (1 + later * (RANKS - 1))


def test_a_ring_keeps_what_is_predicted():
    """The next step's keys while those of this one are read, what is added up once, and nothing of other steps."""
    chosen = Strategy.parse(f"cp={RANKS},context=ring,precision=bf16")
    with torch.device("meta"):
        local = spread(captured(llama(layers=2, width=WIDTH, length=RANKS * 1024, vocabulary=512, factor=1), RANKS * 1024, chosen.precision), str(chosen))
    memory = Program.build(local, h100.like(make_mesh(chosen, select_devices(RANKS))), cache_dir=None, memory_plan="xla", compiler_options=h100.FAST).memory
    assert predict_memory(local).temporary_bytes == pytest.approx(memory.temp_bytes + memory.output_bytes - memory.alias_bytes, rel=0.05)


def test_a_head_is_not_waited_for():
    """It stays gathered from forward to backward: gathered again it would have to be there before anything of the backward runs."""
    chosen = Strategy.parse("fsdp=8,precision=bf16")
    with torch.device("meta"):
        local = spread(captured(llama(layers=2, width=WIDTH, length=1024, vocabulary=32_768), 1024, chosen.precision), str(chosen))
    mesh = h100.like(make_mesh(chosen, select_devices(8)))
    program = Program.build(local, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
    head = 2 * 32_768 * WIDTH
    gathers = [item for item in read_collectives(program.hlo_text(), mesh) if item.kind == "all-gather"]
    assert [item.size_bytes for item in gathers if item.size_bytes >= head] == [head, head]  # the table first, whose gather nothing can run beside
    assert sum(item.exposed_bytes for item in gathers) <= 1.1 * head
