"""graphacc::chunked: the text of a body, PyTorch's run of it against XLA's, and programs that are found by their graphs."""

import jax
import pytest
import torch
from graphs import trace
from tolerances import assert_close

from graphacc import lowering
from graphacc._compat.jax_ import x64
from graphacc.graph import Kind, StepGraph
from graphacc.lowering.dtypes import from_torch
from graphacc.ops.chunked import MAX, MIN, SAME, SUM, Body, Split, read
from graphacc.passes.edit import Editor
from graphacc.runtime import make_mesh, select_devices
from graphacc.runtime.lowered_cache import digest_of
from graphacc.strategy import Strategy

CHUNKED = torch.ops.graphacc.chunked.default
ROWS, COLUMNS, CHUNKS = 12, 5, 3


def body(dtype: torch.dtype, split: Split = Split(0)) -> Body:
    """Of [12, 5] and a row [5]: rows, their number in the chunk, and what sums, maxima and minima there are."""

    def chunk(number, x, row):
        y = torch.tanh(x * row)
        whole = y.sum(split.dim)
        return y, whole, y.amax(0), y.argmax(1).amin(), row + 1, y * number

    local = torch.ones(split.local((ROWS, COLUMNS), CHUNKS), dtype=dtype)
    inputs = [(Kind.BATCH, "n", torch.tensor(0)), (Kind.BATCH, "x", local), (Kind.BATCH, "row", torch.ones(COLUMNS, dtype=dtype))]
    step = trace(chunk, inputs, [(Kind.USER, str(i)) for i in range(6)])
    return Body(chunks=CHUNKS, splits=(split,), results=(split, SUM, MAX, MIN, SAME, split), graph=step.graph)


def step_of(text: str, x: torch.Tensor, row: torch.Tensor) -> StepGraph:
    step = trace(lambda x, row: (x.clone(),), [(Kind.BATCH, "x", x), (Kind.BATCH, "row", row)], [(Kind.USER, "0")])
    (call,) = [node for node in step.graph.nodes if node.op == "call_function"]
    edit = Editor(step.graph, call)
    first = edit.item(edit(CHUNKED, [step.placeholders[0]], [step.placeholders[1]], text), 0)
    call.replace_all_uses_with(first)
    step.graph.erase_node(call)
    step.verify()
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [Split(0), Split(0, outer=2)])
def test_chunks_give_what_the_whole_gives(dtype, split):
    text = body(dtype, split).write()
    assert read(text).write() == text
    x, row = torch.randn(ROWS, COLUMNS).to(dtype), torch.randn(COLUMNS).to(dtype)
    y = torch.tanh(x * row)
    numbers = torch.arange(CHUNKS).repeat_interleave(ROWS // CHUNKS // split.outer).repeat(split.outer)
    expected = [y, y.float().sum(0).to(dtype), y.amax(0), y.argmax(1).amin(), row + 1, y * numbers[:, None]]
    found = CHUNKED([x], [row], text)
    with x64():
        lowered = jax.jit(lambda x, row: lowering.registry.find(CHUNKED)(context(text, x, row), [x], [row], text))(from_torch(x), from_torch(row))
    for i, (eager, compiled, wanted) in enumerate(zip(found, lowered, expected, strict=True)):
        assert_close(eager, wanted, what=f"result {i}")
        assert_close(torch.from_dlpack(compiled), wanted, what=f"compiled result {i}")


def context(text: str, x: jax.Array, row: jax.Array) -> lowering.Context:
    values = CHUNKED([torch.zeros(x.shape, dtype=_dtype(x))], [torch.zeros(row.shape, dtype=_dtype(row))], text)
    return lowering.Context(None, values)


def _dtype(x: jax.Array) -> torch.dtype:
    return getattr(torch, str(x.dtype))


def test_a_sum_of_16_bits_is_rounded_once():
    """256 ones and then ones: in bf16 256 + 1 is 256."""
    step = trace(lambda number, x: (x.sum(0),), [(Kind.BATCH, "n", torch.tensor(0)), (Kind.BATCH, "x", torch.ones(1, 1).bfloat16())], [(Kind.USER, "0")])
    text = Body(chunks=512, splits=(Split(0),), results=(SUM,), graph=step.graph).write()
    (total,) = CHUNKED([torch.ones(512, 1).bfloat16()], [], text)
    assert total.item() == 512


def test_the_body_is_part_of_a_programs_digest():
    x, row = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)
    text = body(torch.float32).write()
    mesh = make_mesh(Strategy(), select_devices(1))
    found = {digest_of(step_of(each, x, row), mesh) for each in (text, text.replace("aten.tanh", "aten.sin"))}
    assert len(found) == 2 and None not in found


def test_operators_of_a_body_need_rules_too():
    text = body(torch.float32).write().replace("aten.tanh.default", "aten.nonzero.default")
    step = step_of(body(torch.float32).write(), torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS))
    (call,) = [node for node in step.graph.nodes if node.target is CHUNKED]
    call.update_arg(2, text)
    assert [item.op for item in lowering.missing(step)] == ["aten.nonzero.default"]
