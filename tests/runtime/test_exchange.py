"""Tensors to the devices and back: every dtype and layout, padding included, and no memory shared unasked."""

import itertools

import jax
import numpy as np
import pytest
import torch
from step_graphs import an_input, split

from graphacc.graph import Kind, local_shape
from graphacc.lowering.dtypes import to_jax
from graphacc.runtime import make_mesh, select_devices, to_device, to_torch
from graphacc.runtime.exchange import numpy_view, torch_view
from graphacc.strategy import Strategy

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]

LAYOUTS = {
    "replicated": (Strategy(fsdp=8), (5, 3), []),
    "dim 0": (Strategy(fsdp=8), (16, 3), [split("fsdp", 8)]),
    "dim 1 padded": (Strategy(fsdp=8), (3, 10), [split("fsdp", 8, 1)]),
    "fewer rows than ranks": (Strategy(fsdp=8), (3, 2), [split("fsdp", 8)]),
    "one of two axes": (Strategy(dp=2, fsdp=4), (6, 2), [split("fsdp", 4)]),
    "two axes on one dim": (Strategy(dp=2, fsdp=4), (16, 2), [split("dp", 2), split("fsdp", 4)]),
    "two axes on one dim, other order": (Strategy(dp=2, fsdp=4), (16, 2), [split("fsdp", 4), split("dp", 2)]),
    "two axes on two dims": (Strategy(dp=2, fsdp=4), (3, 9), [split("dp", 2, 0), split("fsdp", 4, 1)]),
    "interleaved": (Strategy(tp=2, fsdp=4), (5, 12), [split("tp", 2, 1, outer=3)]),
    "interleaved, then rows and padding": (Strategy(tp=2, fsdp=4), (12, 3), [split("tp", 2, 0, outer=3), split("fsdp", 4, 0)]),
    "interleaved on two dims": (Strategy(tp=2, fsdp=4), (8, 12), [split("tp", 2, 1, outer=3), split("fsdp", 4, 0, outer=2)]),
    "0-d": (Strategy(dp=2, fsdp=4), (), []),
    "empty": (Strategy(fsdp=8), (0, 4), [split("fsdp", 8)]),
    "one device": (Strategy(), (5, 7), []),
}


def mesh_of(strategy):
    return make_mesh(strategy, select_devices(strategy.num_devices))


def values(shape, dtype):
    raw = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randn(shape) * 50
    return raw.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def aligned_ones(size: int) -> torch.Tensor:
    memory = torch.ones(size + 1024)
    first = -memory.data_ptr() % 4096 // 4
    return memory[first : first + size]


@pytest.mark.parametrize("layout, dtype", list(itertools.product(LAYOUTS, DTYPES)), ids=str)
def test_round_trip(layout, dtype):
    strategy, shape, shards = LAYOUTS[layout]
    item = an_input(Kind.PARAM, "p", shape, dtype, shards)
    tensor = values(shape, dtype)
    array = to_device(tensor, item, mesh_of(strategy))
    assert array.dtype == to_jax(dtype) and {s.data.shape for s in array.addressable_shards} == {local_shape(shape, shards)}
    assert same(to_torch(array, item), tensor)
    assert same(to_torch(array, item, copy=False), tensor)


def test_blocks_lie_major_to_minor_and_padding_is_zero():
    """rows 0..9 over dp=2 and fsdp=2 of 4 devices: [0 1 2] [3 4 -] | [5 6 7] [8 9 -], as the program of one device cuts them"""
    mesh = mesh_of(Strategy(dp=2, fsdp=2))
    item = an_input(Kind.BATCH, "x", (10,), torch.int64, [split("dp", 2), split("fsdp", 2)])
    array = to_device(torch.arange(10), item, mesh)
    at = {shard.device: np.asarray(shard.data).tolist() for shard in array.addressable_shards}
    assert [at[device] for device in mesh.devices.flat] == [[0, 1, 2], [3, 4, 0], [5, 6, 7], [8, 9, 0]]


def test_interleaved_blocks():
    """A fused projection of three parts over tp=2: every rank holds its half of each part."""
    item = an_input(Kind.PARAM, "x", (12,), torch.int64, [split("tp", 2, outer=3)])
    array = to_device(torch.arange(12), item, mesh_of(Strategy(tp=2)))
    assert [np.asarray(s.data).tolist() for s in array.addressable_shards] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
@pytest.mark.parametrize(
    "strategy, shards", [(Strategy(), []), (Strategy(fsdp=8), []), (Strategy(fsdp=8), [split("fsdp", 8)])], ids=str
)
def test_the_users_tensor_may_change_at_once(strategy, shards, size):
    """The tensor is aligned to a page, so JAX would take its memory over."""
    item = an_input(Kind.BATCH, "x", (size,), shards=shards)
    tensor = aligned_ones(size)
    array = to_device(tensor, item, mesh_of(strategy))
    tensor.fill_(7)
    result = to_torch(array, item)
    assert same(result, torch.ones(size))
    result.fill_(9)
    assert same(to_torch(array, item), torch.ones(size))


@pytest.mark.parametrize("shards", [[], [split("fsdp", 8)]], ids=str)
def test_donating_what_came_from_torch_reuses_device_memory_and_spares_the_tensor(shards):
    mesh = mesh_of(Strategy(fsdp=8))
    item = an_input(Kind.PARAM, "p", (1 << 18,), shards=shards)
    tensor = torch.zeros(1 << 18)
    array = to_device(tensor, item, mesh)
    to_torch(array, item)
    before = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted() and [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards] == before
    assert tensor.count_nonzero() == 0


def test_memory_is_shared_where_the_caller_allows_it():
    mesh = mesh_of(Strategy())
    item = an_input(Kind.BATCH, "x", (1 << 20,))
    tensor = aligned_ones(1 << 20)
    array = to_device(tensor, item, mesh)
    assert to_torch(array, item, copy=False).data_ptr() == array.addressable_shards[0].data.unsafe_buffer_pointer()
    shared = to_device(tensor, item, mesh, copy=False)
    assert shared.addressable_shards[0].data.unsafe_buffer_pointer() == tensor.data_ptr()
    assert same(to_torch(shared, item), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(1).expand(4, 3),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.randn(4, 3, dtype=torch.complex64).conj(),
        torch.arange(12.0).view(3, 4).t().bfloat16().requires_grad_(),
    ],
    ids=["transposed", "expanded", "strided", "conjugated", "requires grad"],
)
def test_unusual_tensors(tensor):
    item = an_input(Kind.PARAM, "p", (4, 3), tensor.dtype, [split("fsdp", 8)])
    assert same(to_torch(to_device(tensor, item, mesh_of(Strategy(fsdp=8))), item), tensor.detach().resolve_conj())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_and_torch_views_share_memory(dtype):
    tensor = values((6,), dtype)
    view = numpy_view(tensor)
    assert view.dtype == to_jax(dtype)
    back = torch_view(view)
    assert same(back, tensor) and back.data_ptr() == tensor.data_ptr()


def test_exchange_compiles_nothing(caplog):
    """A new shape costs no compilation: JAX would log one."""
    item = an_input(Kind.BATCH, "x", (11, 13), shards=[split("fsdp", 8)])
    with jax.log_compiles(True), caplog.at_level("WARNING"):
        to_torch(to_device(torch.zeros(11, 13), item, mesh_of(Strategy(fsdp=8))), item)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
