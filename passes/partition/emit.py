"""Writing the local graph: operator calls with fake values, collectives, and changes of placement."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from graphacc.ops.facts import OpKind, of_kind
from graphacc._compat.torch_ import fake_mode, new_graph
from graphacc.graph import Phase
from graphacc.passes.edit import infer
from graphacc.passes.partition.placement import Shard, local_shape, size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.report import Collective

aten, collective, mesh = torch.ops.aten, torch.ops._c10d_functional, torch.ops.graphacc
_META = ("phase", "module_path", "stack_trace", "segment", "region", "recomputed", "checkpoint", "chunked", "origin", "filled")
_VIEWS = of_kind(OpKind.RESHAPE)


class Emitter:
    """Appends nodes to the local graph. New nodes take phase, module and source line from `node`, the one in work."""

    def __init__(self, axis: str, num_ranks: int):
        self.axis = axis
        self.num_ranks = num_ranks
        self.graph = new_graph()
        self._names: set[str] = set()  # of its nodes: where one is taken, fx tries all numbers from 1 on, and counts on by itself where it is given none
        self.node: torch.fx.Node = None  # of the unpartitioned graph; set by who writes
        self.collectives: list[Collective] = []  # in the order in which they are written
        self._mode = fake_mode()
        self._index: torch.fx.Node | None = None
        self.exchanges: dict[torch.fx.Node, Any] = {}  # local ids -> what `routing` made of them
        self.ring_blocks: dict[torch.fx.Node, list] = {}  # local log-sum-exp of a ring -> those of its blocks
        self._offsets: dict[tuple[int, ...], torch.fx.Node] = {}
        self.masked: dict[torch.fx.Node, torch.fx.Node] = {}  # value -> the one that is read in its place

    def placeholder(self, node: torch.fx.Node, shape: tuple[int, ...]) -> torch.fx.Node:
        self.node = node
        value = node.meta["val"]
        if tuple(value.shape) != shape or not self._owns(value):
            value = _empty(shape, value.dtype, value.device)
        return self._finish(self.graph.placeholder(node.name), value)

    def operand(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node:
        """An input of a scratch graph."""
        return self._finish(self.graph.placeholder("operand"), _empty(shape, dtype, torch.device("cpu")))

    def item(self, value: Any, index: int) -> torch.fx.Node:
        """One of several results."""
        return value[index] if isinstance(value, list) else self.call(operator.getitem, value, index)

    def repeat(self, args: tuple, kwargs: dict, before: Sequence[torch.fx.Node], after: Sequence[torch.fx.Node]) -> torch.fx.Node:
        """The call of `node` with operands `after` where it has `before`; if these have the very same values, so has the result."""
        same = before and all(x.meta["val"] is y.meta["val"] for x, y in zip(after, before))
        if not same or not self._owns(self.node.meta["val"]):
            return self.call(self.node.target, *args, **kwargs)
        name = None if self.node.name in self._names else self.node.name
        new = self.graph.create_node("call_function", self.node.target, args, kwargs, name=name)
        return self._finish(new, self.node.meta["val"])

    def _owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is self._mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Append a call; its fake value is computed by running it on the fake values of its arguments."""
        try:
            value = infer(target, args, kwargs)
        except (RuntimeError, ValueError):
            if target not in _VIEWS:
                raise
            # Other strides than before partitioning: a view that is none any more.
            args = (self.call(aten.clone.default, args[0], memory_format=torch.contiguous_format), *args[1:])
            value = infer(target, args, kwargs)
        name = self.node.name if target is self.node.target and self.node.name not in self._names else None
        return self._finish(self.graph.create_node("call_function", target, args, kwargs, name=name), value)

    def _finish(self, new: torch.fx.Node, value: Any) -> torch.fx.Node:
        meta = self.node.meta
        self._names.add(new.name)
        for key in _META:
            if key in meta:
                new.meta[key] = meta[key]  # set one by one: to assign `meta` makes fx look the node up again
        new.meta["val"] = value
        if "move" in meta and new.target is self.node.target:  # a collective over another axis
            move, whole = meta["move"], meta["val"].numel()
            new.meta["move"] = dataclasses.replace(move, size_bytes=move.size_bytes * value.numel() // max(1, whole))  # of this rank's part
        return new

    # Collectives

    def _collective(self, kind: str, size: int, target: Any, *args: Any) -> torch.fx.Node:
        new = self.call(target, self._contiguous(args[0]), *args[1:])
        self.collectives.append(Collective(kind, new, size))
        return self.call(collective.wait_tensor.default, new)

    def all_reduce(self, x: torch.fx.Node, op: str) -> torch.fx.Node:
        return self._collective("all_reduce", _size(x), collective.all_reduce.default, x, op, self.axis)

    def all_gather(self, x: torch.fx.Node, split: Shard, shape: tuple[int, ...]) -> torch.fx.Node:
        """The whole tensor, of global `shape`, out of every rank's part."""
        gathered = self._collective(
            "all_gather", _size(x) * self.num_ranks, collective.all_gather_into_tensor.default, x, self.num_ranks, self.axis
        )
        if split.dim or split.outer > 1:
            parts = _blocks(_shape(x), split)  # [before, outer, rest, after]
            gathered = self.call(aten.view.default, gathered, [self.num_ranks, *parts])
            gathered = self.call(aten.permute.default, gathered, [1, 2, 0, 3, 4])
            whole = list(_shape(x))
            whole[split.dim] *= self.num_ranks
            gathered = self.call(aten.view.default, self._contiguous(gathered), whole)
        if split.padding:
            gathered = self._contiguous(self.call(aten.slice.Tensor, gathered, split.dim, 0, shape[split.dim]))
        return gathered

    def reduce_scatter(self, x: torch.fx.Node, split: Shard) -> torch.fx.Node:
        """This rank's part of the sum of all ranks' tensors."""
        x = self.pad(x, split)
        local = local_shape(_shape(x), Shard(split.dim, split.outer), self.num_ranks)
        if split.dim or split.outer > 1:
            before, outer, rest, after = _blocks(local, split)
            x = self.call(aten.view.default, self._contiguous(x), [before, outer, self.num_ranks, rest, after])
            x = self._contiguous(self.call(aten.permute.default, x, [2, 0, 1, 3, 4]))
            x = self.call(aten.view.default, x, [self.num_ranks * local[0], *local[1:]] if local else [self.num_ranks])
        return self._collective(
            "reduce_scatter", _size(x), collective.reduce_scatter_tensor.default, x, "sum", self.num_ranks, self.axis
        )

    def all_to_all(self, x: torch.fx.Node, source: Shard, to: Shard) -> torch.fx.Node:
        """From one dim split to another: every rank sends each other rank its block of dim `to` and joins the blocks of dim `source`.

        The ranks' blocks stand in front, in a dim of their own, so that a split along another axis passes through.
        """
        shape = _shape(x)
        rank_dim = to.dim + 1
        blocks = [*shape[: to.dim], to.outer, self.num_ranks, shape[to.dim] // (to.outer * self.num_ranks), *shape[to.dim + 1 :]]
        x = self.call(aten.view.default, self._contiguous(x), blocks)
        order = [rank_dim, *(dim for dim in range(len(blocks)) if dim != rank_dim)]
        x = self._contiguous(self.call(aten.permute.default, x, order))
        local = [*shape[: to.dim], shape[to.dim] // self.num_ranks, *shape[to.dim + 1 :]]
        x = self.call(aten.view.default, x, [self.num_ranks, *local])
        x = self.exchange(x)
        parts = [self.num_ranks, *local[: source.dim], source.outer, local[source.dim] // source.outer, *local[source.dim + 1 :]]
        x = self.call(aten.view.default, x, parts)
        order = [*range(1, source.dim + 2), 0, *range(source.dim + 2, len(parts))]
        x = self._contiguous(self.call(aten.permute.default, x, order))
        local[source.dim] *= self.num_ranks
        return self.call(aten.view.default, x, local)

    def permute_ranks(self, x: torch.fx.Node, targets: list[int], role: Role | None = None) -> torch.fx.Node:
        """`x` of the rank that sends to this one; rank i sends to ``targets[i]``."""
        new = self.call(mesh.permute_ranks.default, self._contiguous(x), targets, self.axis)
        self.collectives.append(Collective("permute", new, _size(x), role))
        return new

    def exchange(self, x: torch.fx.Node) -> torch.fx.Node:
        """[ranks, ...]: block i goes to rank i, and block i of the result comes from it."""
        sizes = [1] * self.num_ranks
        return self._collective("all_to_all", _size(x), collective.all_to_all_single.default, x, sizes, sizes, self.axis)

    # Parts of a replicated tensor

    def shard(self, x: torch.fx.Node, split: Shard) -> torch.fx.Node:
        return self.call(mesh.shard.default, self.pad(x, split), split.dim, split.outer, self.num_ranks, self.axis)

    def pad(self, x: torch.fx.Node, split: Shard) -> torch.fx.Node:
        """`x` with zeros behind the end of the split dim, as many as make it divide."""
        if not split.padding:
            return x
        behind = len(_shape(x)) - 1 - split.dim
        return self.call(aten.constant_pad_nd.default, x, [0, 0] * behind + [0, split.padding], 0)

    def to_front(self, x: torch.fx.Node, dim: int) -> torch.fx.Node:
        """Dims 0 and `dim` change places."""
        return self.call(aten.transpose.int, x, 0, dim) if dim else x

    def mask_padding(self, x: torch.fx.Node, dim: int, size: int, value: float) -> torch.fx.Node:
        """`x`, a block along `dim` of `size` elements in all, with `value` where it stands behind their end.

        Zeros in what the backward has made are for all who read `x`, also before: a gradient of logits that is stored as it is for one product, and with zeros for the other, takes twice the memory.
        """
        if value or x.op != "call_function" or x.meta["phase"] is not Phase.BACKWARD:
            return self._masked(x, dim, size, value)
        following, index = x.next, self._index
        with self.graph.inserting_before(following):
            self._index = None  # the one that there is may come later
            masked = self._masked(x, dim, size, value)
        self._index = index
        x.replace_all_uses_with(masked, delete_user_cb=lambda user: user is not masked)
        self.masked[x] = masked
        return masked

    def _masked(self, x: torch.fx.Node, dim: int, size: int, value: float) -> torch.fx.Node:
        local, rank = _shape(x)[dim], len(_shape(x))
        device = x.meta["val"].device
        place = self.call(aten.arange.start_step, 0, local, 1, dtype=torch.int64, device=device)
        place = self.call(aten.add.Tensor, place, self.call(aten.mul.Scalar, self.axis_index(), local))
        inside = self.call(aten.view.default, self.call(aten.lt.Scalar, place, size), [local if i == dim else 1 for i in range(rank)])
        dtype = x.meta["val"].dtype
        if math.isinf(value) and not dtype.is_floating_point:
            value = torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min
        fill = self.call(aten.full.default, [], value, dtype=dtype, device=device)
        return self.call(aten.where.self, inside, x, fill)

    def on_first_rank(self, x: torch.fx.Node) -> torch.fx.Node:
        """`x` on rank 0 and zeros elsewhere: a partial sum."""
        first = self.call(aten.eq.Scalar, self.axis_index(), 0)
        return self.call(aten.where.self, first, x, self.call(aten.zeros_like.default, x))

    def axis_index(self) -> torch.fx.Node:
        if self._index is None:
            self._index = self.call(mesh.axis_index.default, self.num_ranks, self.axis)
        return self._index

    def offset(self, rank: int, dim: int, size: int) -> torch.fx.Node:
        """int64[rank]: where this rank's block of `size` elements along `dim` starts; 0 in the other dims."""
        key = (rank, dim, size)
        if key not in self._offsets:
            start = self.call(aten.view.default, self.call(aten.mul.Scalar, self.axis_index(), size), [1])
            self._offsets[key] = self.call(aten.constant_pad_nd.default, start, [dim, rank - 1 - dim], 0)
        return self._offsets[key]

    def _contiguous(self, x: torch.fx.Node) -> torch.fx.Node:
        return x if x.meta["val"].is_contiguous() else self.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The fake value of a dense tensor; one for all inputs of a form."""
    return infer(aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": device})


def _shape(x: torch.fx.Node) -> tuple[int, ...]:
    return tuple(x.meta["val"].shape)


def _size(x: torch.fx.Node) -> int:
    return size_bytes(_shape(x), x.meta["val"].dtype)


def _blocks(local: tuple[int, ...], split: Shard) -> tuple[int, int, int, int]:
    """Sizes of a local shape read as [before, outer, rest, after] around the split dim."""
    return (
        math.prod(local[: split.dim]),
        split.outer,
        local[split.dim] // split.outer,
        math.prod(local[split.dim + 1 :]),
    )
