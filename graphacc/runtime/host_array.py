"""Arrays whose blocks are on the host: one torch tensor for every block that the devices of this process would hold.

The layout is that of an array on the devices (`graphacc.runtime.layout`): an item gives shape and shards, blocks are padded. A block that several
devices would hold is there once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from torch import Tensor

from graphacc.graph import Input
from graphacc.runtime.distributed import process_count, process_index
from graphacc.runtime.exchange import numpy_view, place, start_copy, stored, to_torch, torch_view
from graphacc.runtime.layout import bounds, dtype_of, pieces, sharding, stored_shape

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) of every dim of a block, in the stored array."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostShard:
    """One block, as `jax.Shard` describes one on a device."""

    index: tuple[slice, ...]
    replica_id: int  # 0: of all processes that hold the block, this one saves it
    data: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostArray:
    """The blocks of one tensor."""

    item: Input
    layout: NamedSharding
    blocks: Mapping[Bounds, Tensor]

    @classmethod
    def of(cls, value: Tensor, item: Input, mesh: Mesh) -> "HostArray":
        """Copies of the blocks of a global tensor."""
        host, layout = stored(numpy_view(value.to(item.dtype)), item), sharding(item, mesh)
        return cls(item=item, layout=layout, blocks={key: torch_view(np.array(host[_slices(key)], order="C")) for key in _keys(item, layout)})

    @classmethod
    def view(cls, array: jax.Array, item: Input) -> "HostArray":
        """The blocks of an array, of which those on CPU devices share its memory: they are only read. Waits for the array."""
        shards = {_key(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        for data in shards.values():
            start_copy(data)
        layout = array.sharding
        assert isinstance(layout, NamedSharding), layout
        return cls(item=item, layout=layout, blocks={key: _host_tensor(data) for key, data in shards.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """With padding, as that of an array on the devices."""
        return stored_shape(self.item)

    @property
    def nbytes(self) -> int:
        """On this process's host."""
        return sum(block.nbytes for block in self.blocks.values())

    @property
    def addressable_shards(self) -> list[HostShard]:
        """The blocks, as checkpoints read them."""
        owner: dict[Bounds, int] = {}
        for device, index in self.layout.devices_indices_map(self.shape).items():
            owner.setdefault(_key(index, self.shape), device.process_index)
        own = process_index()
        return [HostShard(index=_slices(key), replica_id=int(owner[key] != own), data=numpy_view(block)) for key, block in self.blocks.items()]

    def copy(self) -> "HostArray":
        return dataclasses.replace(self, blocks={key: block.clone() for key, block in self.blocks.items()})

    def on_devices(self, *, copy: bool = True) -> jax.Array:
        """The array on the devices; without `copy` it may share the blocks' memory, which nobody writes then."""
        blocks = {key: numpy_view(block) for key, block in self.blocks.items()}
        return place(self.shape, dtype_of(self.item), self.layout, lambda index: blocks[_key(index, self.shape)], copy=copy)

    def to_torch(self) -> Tensor:
        """The global tensor; in a run of several processes all of them read it."""
        if process_count() > 1:
            return to_torch(self.on_devices(), self.item)
        result = torch.empty(self.item.shape, dtype=self.item.dtype)
        host = numpy_view(result)
        for key, block in self.blocks.items():
            values = numpy_view(block)
            for here, there in pieces(_slices(key), self.item):
                host[there] = values[here]
        return result


def blocks_of_devices(layout: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Bounds]:
    """The block that each device of this process holds of an array of `shape`, with padding."""
    return {device: _key(index, shape) for device, index in layout.addressable_devices_indices_map(shape).items() if index is not None}


def _keys(item: Input, layout: NamedSharding) -> set[Bounds]:
    return set(blocks_of_devices(layout, stored_shape(item)).values())


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple((part.start, part.stop) for part in bounds(index, shape))


def _slices(key: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in key)


def _host_tensor(data: jax.Array) -> Tensor:
    data.block_until_ready()
    if data.platform() == "cpu":
        return torch.from_dlpack(data)
    return torch_view(np.array(data))
