"""The operators that stay whole in an HloStep, as JAX functions of global arrays.

An operator of torch's is computed by its rule in `graphacc.lowering`, and XLA partitions what that consists of.

XLA's partitioner cannot look into a kernel: it would gather every operand. So attention is made manual over the whole mesh: its batch is
split along the data axes where the step's batch is, and its heads along ``tp`` where parameters of the module that calls it are.
Every device then runs the kernel on what it has; with fewer key heads than devices, on a copy. Where sizes do not divide, every
device computes the whole.

Legend: B batch, H query heads, G key/value heads.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils import _pytree as pytree

from graphacc._compat.jax_ import x64
from graphacc._compat.torch_ import described
from graphacc.errors import StrategyError
from graphacc.graph import Kind
from graphacc.hlo import HloStep, Operand, WholeCall
from graphacc.lowering.dtypes import cast, to_jax, wide
from graphacc.lowering.interpret import run_graph
from graphacc.lowering.partitioned import partitioned_by_xla
from graphacc.lowering.registry import find
from graphacc.strategy.axes import TP

log = logging.getLogger("graphacc")

_SHARED = ("bias", "q_segments", "kv_segments", "key", "start")
_OPTIONS = ("left", "right", "scale", "empty_rows", "dropout", "stream", "global_size")
_ARGUMENTS = {
    "graphacc.flash_attention.default": ("q", "k", "v", *_SHARED, *_OPTIONS),
    "graphacc.flash_attention_backward.default": ("grad", "q", "k", "v", *_SHARED, "out", "lse", *_OPTIONS, "bias_grad"),
}
_EVERYWHERE = PartitionSpec()


def caller(step: HloStep, mesh: Mesh) -> Callable[[WholeCall, Sequence[jax.Array]], list[jax.Array]]:
    """The function that computes a whole call of `step` from one array per operand."""
    places = _Places.of(step, mesh)

    def call(whole: WholeCall, operands: Sequence[jax.Array]) -> list[jax.Array]:
        if not whole.operator.startswith("graphacc."):
            results = _lowered(whole, [cast(array, to_jax(each.dtype)) for array, each in zip(operands, _operands(whole), strict=True)])
        else:
            given = iter(operands)
            arguments = [cast(next(given), to_jax(each.dtype)) if isinstance(each, Operand) else each for each in whole.arguments]
            results = _attention(whole, arguments, places) if whole.operator in _ARGUMENTS else [_marked(whole, *arguments, places)]
        for result, (shape, dtype) in zip(results, whole.results, strict=True):
            wanted = shape, to_jax(dtype)
            assert (result.shape, result.dtype) == wanted, f"{whole.operator} gives {result.aval}, not {wanted}"
        return results

    return call


def _operands(whole: WholeCall) -> list[Operand]:
    return [leaf for leaf in pytree.tree_leaves((whole.arguments, dict(whole.keywords))) if isinstance(leaf, Operand)]


def _lowered(whole: WholeCall, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of an operator of torch's, by its rule: run as a graph of this one node."""
    operator, graph = functools.reduce(getattr, whole.operator.split("."), torch.ops), torch.fx.Graph()
    unfed = iter(arrays)

    def feed(operand: Operand) -> torch.fx.Node:
        node = graph.placeholder("operand")
        node.meta["val"] = torch.empty(next(unfed).shape, dtype=operand.dtype, device="meta")
        return node

    args, kwargs = pytree.tree_map_only(Operand, feed, (whole.arguments, dict(whole.keywords)))
    call = graph.call_function(operator, args, kwargs)
    call.meta["stack_trace"] = whole.stack_trace
    call.meta["val"] = described(operator, *torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"]))
    graph.output(call)
    with x64():
        return [leaf for leaf in jax.tree.leaves(run_graph(graph, arrays)) if leaf is not None]


@dataclasses.dataclass(frozen=True)
class _Places:
    """How a step lies on its mesh."""

    mesh: Mesh
    data_axes: tuple[str, ...]  # along which the batch is split
    parameters: dict[str, bool]  # every name of every parameter -> whether it is split along tp

    @classmethod
    def of(cls, step: HloStep, mesh: Mesh) -> "_Places":
        split = [item.shards for item in step.inputs if item.kind is Kind.BATCH and item.shards]
        names = {
            name: any(shard.axis == TP for shard in item.shards)
            for item in step.inputs
            if item.kind is Kind.PARAM
            for name in (item.target, *item.aliases)
        }
        return cls(mesh, tuple(shard.axis for shard in split[0]) if split else (), names)

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def batch(self, size: int) -> tuple[str, ...] | None:
        """The axes along which a dim 0 of `size` is split."""
        return self.data_axes if self.data_axes and size % self.size(self.data_axes) == 0 else None

    def heads(self, module: str) -> str | None:
        """The axis along which the heads of an attention in `module` are split: that of the nearest parameters around it."""
        while True:
            prefix = f"{module}." if module else ""
            split = [is_split for name, is_split in self.parameters.items() if name.startswith(prefix)]
            if split or not module:
                return TP if any(split) else None
            module = module.rpartition(".")[0]


def _marked(whole: WholeCall, x: jax.Array, spec: str, places: _Places) -> jax.Array:
    """`x` split as the text of a spec says ("tp,,"). Along the data axes it stays as it is; a spec without axes keeps it whole along tp."""
    named = spec.split(",") + [""] * (x.ndim - len(spec.split(",")))
    axes = [axis if axis in places.mesh.shape else None for axis in named]
    for dim, axis in enumerate(axes):
        if axis and x.shape[dim] % places.mesh.shape[axis]:
            raise StrategyError(
                f"mark_sharding at {_place(whole)}: {axis}={places.mesh.shape[axis]} does not divide dim {dim} of shape {list(x.shape)}: split "
                f"another dim, or choose {axis} out of the divisors of {x.shape[dim]}"
            )
    if places.mesh.size == 1 or (any(named) and not any(axes)):
        return x
    free = PartitionSpec.UNCONSTRAINED
    entries = [axis or free for axis in axes] if any(axes) else [places.batch(x.shape[0]) if x.ndim else None]
    return jax.lax.with_sharding_constraint(x, NamedSharding(places.mesh, PartitionSpec(*entries)))


def _place(whole: WholeCall) -> str:
    """The innermost line of the user's code, or the module."""
    lines = [line.strip() for line in whole.stack_trace.splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else f"module {whole.module_path!r}"


def _attention(whole: WholeCall, arguments: list, places: _Places) -> list[jax.Array]:
    names = _ARGUMENTS[whole.operator]
    given = dict(zip(names, arguments, strict=True))
    rule = find(whole.operator)
    if places.mesh.size == 1:
        return list(rule(None, *arguments))
    batch, heads = places.batch(given["q"].shape[0]), _heads(whole, given, places)
    copies = _copies(given["q"].shape[1], given["k"].shape[1], places.mesh.shape[heads]) if heads else 1
    given |= {name: jnp.repeat(given[name], copies, axis=1) for name in ("k", "v") if copies > 1}
    arrays = {name: value for name, value in given.items() if isinstance(value, jax.Array)}
    specs = {name: _spec(name, value, batch, heads) for name, value in arrays.items()}

    def local(arrays: dict[str, jax.Array]) -> list[jax.Array]:
        own = given | arrays
        if given["dropout"]:
            own["start"] = _start(own, batch, heads, places)
        with partitioned_by_xla(False):
            results = list(rule(None, *(own[name] for name in names)))
        if given.get("bias_grad"):
            results[3] = _summed(results[3], specs["bias"], batch, heads)
        return results

    outs = _out_specs(given, specs, batch, heads)
    split = jax.shard_map(local, mesh=places.mesh, in_specs=(specs,), out_specs=outs, axis_names=set(places.mesh.axis_names), check_vma=False)
    results = split(arrays)
    if "grad" in given:
        results[1:3] = [_over_copies(grad, copies) for grad in results[1:3]]
    return results


def _heads(whole: WholeCall, given: dict, places: _Places) -> str | None:
    """The axis of the heads; what hinders it where the module asks for one is logged."""
    axis, sizes = places.heads(whole.module_path), (given["q"].shape[1], given["k"].shape[1])
    if axis and not _copies(*sizes, places.mesh.shape[axis]):
        _log_once(
            f"attention of {whole.module_path or 'the model'} runs with all heads on every device of {axis}: {axis}={places.mesh.shape[axis]} "
            f"does not divide its {sizes[0]} query heads (and {sizes[1]} key heads) into equal groups"
        )
        return None
    return axis


def _copies(heads: int, kv_heads: int, num_ranks: int) -> int:
    """How many copies of every key head let each device hold those of its query heads; 0 where the heads do not divide."""
    copies = num_ranks // math.gcd(kv_heads, num_ranks)
    return copies if heads % (kv_heads * copies) == 0 else 0


def _over_copies(grad: jax.Array, copies: int) -> jax.Array:
    """The gradient of a key or value, [B, G * copies, S, D] -> [B, G, S, D], from that of its copies."""
    if copies == 1:
        return grad
    split = grad.reshape(grad.shape[0], -1, copies, *grad.shape[2:])
    return jnp.sum(cast(split, wide(grad.dtype)), axis=2).astype(grad.dtype)


@functools.cache
def _log_once(message: str) -> None:
    log.warning("graphacc: %s", message)


def _spec(name: str, array: jax.Array, batch: tuple[str, ...] | None, heads: str | None) -> PartitionSpec:
    """The layout of an operand; a dim of the bias that broadcasts stays whole."""
    if name in ("key", "start"):
        return _EVERYWHERE
    if name in ("q_segments", "kv_segments"):
        return PartitionSpec(batch)
    if name != "bias":
        return PartitionSpec(batch, heads)
    shape = (1,) * (4 - array.ndim) + array.shape
    entries = [batch if shape[0] > 1 else None, heads if shape[1] > 1 else None, None, None]
    return PartitionSpec(*entries[4 - array.ndim :])


def _out_specs(given: dict, specs: dict[str, PartitionSpec], batch: tuple[str, ...] | None, heads: str | None) -> list[PartitionSpec]:
    whole = PartitionSpec(batch, heads)
    if "grad" not in given:
        return [whole, whole]
    return [whole, whole, whole, specs["bias"] if given["bias_grad"] else _EVERYWHERE]


def _start(given: dict, batch: tuple[str, ...] | None, heads: str | None, places: _Places) -> jax.Array:
    """The place of this device's block in the global scores [B, H, T, S], int64 [4]."""
    index = [jax.lax.axis_index(axes) * size if axes else 0 for axes, size in ((batch, given["q"].shape[0]), (heads, given["q"].shape[1]))]
    own = jnp.stack([jnp.asarray(each, np.int64) for each in (*index, 0, 0)])
    return own if given["start"] is None else own + given["start"]


def _summed(grad: jax.Array, spec: PartitionSpec, batch: tuple[str, ...] | None, heads: str | None) -> jax.Array:
    """The bias' gradient over the devices between which the bias is not split."""
    used = [axis for entry in spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
    missing = [axis for axis in (*(batch or ()), *([heads] if heads else [])) if axis not in used]
    return jax.lax.psum(grad, tuple(missing)) if missing else grad
