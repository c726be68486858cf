"""What is counted as stored when the memory of a step is predicted."""

import operator

import pytest
import torch
import torch.fx

from graphacc.costs.memory import predict_memory
from graphacc.graph import Input, Kind, Output, StepGraph

aten = torch.ops.aten
SIZE = 64
BYTES = 4 * SIZE


def step(compute, shape: tuple[int, ...] = (SIZE,), dtype: torch.dtype = torch.float32) -> StepGraph:
    """The graph of `compute(call, x, y)` for two inputs, float32[64]; it returns the sums of two values."""
    graph = torch.fx.Graph()

    def place(node: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
        node.meta["val"] = value
        return node

    def call(target, *args):
        values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
        return place(graph.call_function(target, args), target(*values))

    x, y = (place(graph.placeholder(name), torch.empty(shape, dtype=dtype, device="meta")) for name in "xy")
    graph.output(tuple(call(aten.sum.default, value) for value in compute(call, x, y)))
    inputs = tuple(Input(name=n, kind=Kind.BATCH, target=n, shape=shape, dtype=dtype) for n in "xy")
    outputs = tuple(Output(kind=Kind.USER, target=n, shape=(), dtype=dtype) for n in "ab")
    return StepGraph(graph=graph, inputs=inputs, outputs=outputs)


def twice(call, value, y):
    """Two element-wise users, each of which ends in a sum."""
    return call(aten.mul.Tensor, value, y), call(aten.sub.Tensor, value, y)


@pytest.mark.parametrize(
    "compute, stored",
    [
        (lambda call, x, y: twice(call, call(aten.neg.default, x), y), 0),
        (lambda call, x, y: twice(call, call(aten.add.Tensor, x, 1.0), y), 0),
        (lambda call, x, y: twice(call, call(aten.sigmoid.default, x), y), BYTES),
        (lambda call, x, y: twice(call, call(aten.add.Tensor, x, y), y), BYTES),
        (lambda call, x, y: (call(aten.sigmoid.default, x), call(aten.add.Tensor, x, y)), 0),
    ],
    ids=["cheap", "cheap with a scalar", "expensive", "of two tensors", "one user each"],
)
def test_what_several_users_share_is_stored_unless_it_is_cheap(compute, stored):
    assert predict_memory(step(compute), cpu=True).temporary_bytes == stored


@pytest.mark.parametrize("dtype, target, stored", [("float32", aten.sigmoid, 0), ("bfloat16", aten.sigmoid, 0), ("float32", aten.tanh, 0), ("bfloat16", aten.tanh, BYTES // 2)])
def test_a_gpu_computes_again_what_takes_no_longer_than_memory(dtype, target, stored):
    """A tanh takes longer than it takes to read narrow numbers."""
    assert predict_memory(step(lambda call, x, y: twice(call, call(target.default, x), y), dtype=getattr(torch, dtype))).temporary_bytes == stored


def test_a_gpu_computes_again_what_is_made_of_one_stored_tensor():
    """SiLU multiplies a tensor by its own sigmoid."""

    def compute(call, x, y):
        x = call(aten.cumsum.default, x, 0)
        return twice(call, call(aten.mul.Tensor, x, call(aten.sigmoid.default, x)), x)

    assert [predict_memory(step(compute), cpu=cpu).temporary_bytes for cpu in (False, True)] == [BYTES, 2 * BYTES]


def test_a_value_dies_before_the_others_of_its_call():
    """The indices of the first sort, int64, are free when the second sort makes its two values."""

    def compute(call, x, y):
        for _ in range(2):
            x = call(operator.getitem, call(aten.sort.default, x), 0)
        return call(aten.neg.default, x), y

    assert predict_memory(step(compute)).temporary_bytes == BYTES + 3 * BYTES


def test_arguments_and_outputs_are_counted_apart():
    memory = predict_memory(step(lambda call, x, y: twice(call, call(aten.exp.default, x), y)), cpu=True)
    assert (memory.argument_bytes, memory.output_bytes, memory.peak_bytes) == (2 * BYTES, 8, 3 * BYTES + 8)


@pytest.mark.parametrize("reads_again, stored", [(False, BYTES), (True, 3 * BYTES)])
def test_what_nothing_else_reads_is_written_over(reads_again, stored):
    """The sigmoid of a cumulated sum stands where the sum stood, unless something reads that as well."""

    def compute(call, x, y):
        total = call(aten.cumsum.default, x, 0)
        one, other = twice(call, call(aten.sigmoid.default, total), y)
        return one, call(aten.add.Tensor, other, call(aten.cumsum.default, total, 0)) if reads_again else other

    assert predict_memory(step(compute), cpu=True, planned=True).temporary_bytes == stored


@pytest.mark.parametrize("target, args, stored", [(aten.neg, (), [0, 4]), (aten.cumsum, (0,), [BYTES, 2 * BYTES])], ids=["element by element", "otherwise"])
def test_what_waits_is_a_copy_on_a_cpu(target, args, stored):
    """Made of `x` and of one word of what it waits for, unless who reads it computes it on the fly."""

    def compute(call, x, y):
        return call(target.default, call(torch.ops.graphacc.after.default, x, y), *args), y

    assert [predict_memory(step(compute), cpu=cpu, planned=True).temporary_bytes for cpu in (False, True)] == stored


@pytest.mark.parametrize("rows, stored", [(8, 4), (8192, 3)], ids=["small", "large"])
def test_small_products_of_one_factor_are_one_on_a_gpu(rows, stored):
    """A sum reads its part of that where it is, and keeps all of it; a product reads a copy of its part."""

    def compute(call, x, y):
        one, other = call(aten.mm.default, x, y), call(aten.mm.default, x, call(aten.neg.default, y))
        return one, call(aten.mm.default, other, y)

    assert predict_memory(step(compute, shape=(rows, rows))).temporary_bytes == stored * 4 * rows * rows
