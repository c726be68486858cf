"""An HloStep as a function on global arrays, laid out for XLA's SPMD partitioner.

A `Program` is built from an HloStep as it is from a StepGraph; what differs is this function. Nothing is manual: the layouts of
inputs, outputs and links are given, and XLA partitions what is between. A parameter that ZeRO-3 splits along ``fsdp`` is gathered for
forward and backward, so that the partitioner does not choose to split a product's contracted dim instead, and every gradient
is brought to its layout as soon as it is there.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding

from graphacc.graph import Input, Kind, Output
from graphacc.hlo import Draw, HloStep, Key, Support, key_of
from graphacc.lowering.partitioned import partitioned_by_xla
from graphacc.lowering.registry import find
from graphacc.runtime.hlo_calls import caller
from graphacc.runtime.layout import dtype_of, partition_spec, sharding
from graphacc.strategy.axes import FSDP


def spmd_function(step: HloStep, mesh: Mesh) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of one array per input, to be compiled with the shardings of the signature."""
    links = {key_of(link): link for link in step.links}

    def constrain(key: Key, value: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(value.astype(dtype_of(links[key])), sharding(links[key], mesh)) if mesh.size > 1 else value

    shards = {key_of(item): item.shards for item in step.inputs}

    def gather(item: Input, value: jax.Array) -> jax.Array:
        return _gathered(value, dataclasses.replace(item, shards=shards.get(key_of(item), ())), mesh)

    support = Support(constrain=constrain, gather=gather, draw=_draw, call=caller(step, mesh), marks=step.marks if mesh.size > 1 else {})

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with partitioned_by_xla(mesh.size > 1):
            results = step.function(arrays, support)
        return tuple(_checked(value, out) for value, out in zip(results, step.outputs, strict=True))

    return function


def _draw(draw: Draw, key: jax.Array) -> jax.Array:
    return find(draw.operator)(None, key, draw.stream, draw.size, draw.size, None)


def _gathered(array: jax.Array, item: Input, mesh: Mesh) -> jax.Array:
    """A parameter with its annotated layout alone."""
    if item.kind is not Kind.PARAM or not any(shard.axis == FSDP for shard in item.shards):
        return array
    kept = Output(
        kind=item.kind, target=item.target, shape=item.shape, dtype=item.dtype, shards=tuple(s for s in item.shards if s.axis != FSDP)
    )
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, partition_spec(kept)))


def _checked(value: jax.Array, out: Output) -> jax.Array:
    """A result in its signature's dtype: torch_xla may compute in a wider one than torch says."""
    assert value.shape == out.shape, f"{out.kind.value} {out.target!r} has shape {value.shape} in the program, {out.shape} in the signature"
    return value.astype(dtype_of(out))
