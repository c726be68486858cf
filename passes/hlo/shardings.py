"""Layouts of an HloStep: the shards of its inputs, outputs and links, from which XLA's SPMD partitioner makes the program.

- the batch, and results that have its dim 0, are split along ``dp`` and ``fsdp``, as far as these divide it;
- parameters that an annotation names, or of which `graphacc.passes.hlo.marks` found it, are split along ``tp``, and with them their gradients and optimizer state;
- ZeRO splits along ``fsdp`` what its stage names: 1 optimizer state, 2 gradients too, 3 parameters too.

Every choice gives the same numbers. Unlike the manual partition of StepGraphs nothing is padded: a tensor of which no dim
divides stays whole.
"""

import dataclasses
from collections.abc import Mapping

from graphacc.errors import StrategyError
from graphacc.graph import Input, Kind, MeshShard, Output, local_shape
from graphacc.hlo import HloStep
from graphacc.passes.batch import check_batch, split_axes
from graphacc.strategy.annotations import P
from graphacc.strategy.axes import CP, EP, FSDP, PP
from graphacc.strategy.spec import AXES, Strategy

Item = Input | Output
_FROM_STAGE = {Kind.STATE: 1, Kind.GRAD: 2, Kind.PARAM: 3}  # the ZeRO stage from which on a kind is split


def with_layouts(step: HloStep, strategy: Strategy, *, batch_dims: Mapping[str, int | None], annotations: Mapping[str, P]) -> HloStep:
    """The same step with the shards that a strategy gives.

    Args:
        batch_dims: target of every BATCH input -> the dim that is split over the data axes, or None.
        annotations: first name of a parameter -> what each dim is split over, as `pinned_parameters` checked it.

    Raises:
        StrategyError: `batch_dims` does not fit the signature.
    """
    check_batch(step, batch_dims)
    layout = _Layout(step, strategy, batch_dims, annotations)

    def placed(items):
        return tuple(dataclasses.replace(item, shards=layout.shards(item)) for item in items)

    links = tuple(dataclasses.replace(item, shards=layout.of_link(item)) for item in step.links)
    return dataclasses.replace(step, inputs=placed(step.inputs), outputs=placed(step.outputs), links=links)


def check_axes(strategy: Strategy) -> None:
    """Raise StrategyError where a strategy has axes that lazily captured programs do not have."""
    later = [axis for axis in (PP, CP, EP) if getattr(strategy, axis) > 1]
    if later:
        raise StrategyError(
            f"{strategy}: the axes {', '.join(later)} need a graph of operators, which capture by lazy tensors does not give; use dp, fsdp and "
            'tp, or capture="fx"'
        )
    rewriting = dict(quantized_weights=strategy.quantized_weights, quantized_gradients=strategy.quantized_gradients, hpz=strategy.hpz > 1)
    asked = [name for name, wanted in rewriting.items() if wanted]
    if asked:
        raise StrategyError(
            f"{strategy}: {', '.join(asked)} rewrite collectives of a graph, which capture by lazy tensors does not give (XLA makes its own): leave them "
            'out, or use capture="fx"'
        )
    if strategy.offload is not None:
        raise StrategyError(
            f"{strategy}: offload takes gradients and parameters of a graph of operators, which capture by lazy tensors does not give: leave it out, or use "
            'capture="fx"'
        )
    if strategy.loss_chunks > 1:
        raise StrategyError(
            f"{strategy}: loss_chunks finds the head in a graph of operators, which capture by lazy tensors does not give: leave it out, or use capture=\"fx\""
        )
    if strategy.remat != "none":
        raise StrategyError(
            f"{strategy}: remat computes operators of a graph again, which capture by lazy tensors does not give: leave it out, or use capture=\"fx\""
        )


class _Layout:
    """The shards of every item of one step."""

    def __init__(self, step: HloStep, strategy: Strategy, batch_dims: Mapping[str, int | None], annotations: Mapping[str, P]):
        self.strategy = strategy
        self.batch_dims = batch_dims
        self.owners = {item.target: item for item in step.inputs if item.kind in (Kind.PARAM, Kind.GRAD)}
        self.owners |= {item.target: item for item in (*step.outputs, *step.links) if item.kind is Kind.GRAD}
        self.owners |= {item.target: item for item in step.inputs if item.kind is Kind.PARAM}
        self.annotations = annotations
        self.axes = split_axes(step, strategy, batch_dims)
        self.batch = _batch(step, batch_dims)

    def shards(self, item: Item) -> tuple[MeshShard, ...]:
        if item.kind is Kind.BATCH:
            dim = self.batch_dims[item.target]
            return () if dim is None else self._data(item.target, dim)
        if item.kind is Kind.USER:
            is_batch = self.batch is not None and item.shape and item.shape[0] == self.batch.shape[0]
            return self._data(self.batch.target, 0) if is_batch else ()
        if item.kind in _FROM_STAGE:
            return self._state(item)
        return ()

    def of_link(self, gradient: Output) -> tuple[MeshShard, ...]:
        """A gradient inside of a step lies like the state that it updates: there ZeRO-1 and 2 are the same."""
        return self._state(Output(kind=Kind.STATE, target=f"{gradient.target}/", shape=gradient.shape, dtype=gradient.dtype))

    def _data(self, target: str, dim: int) -> tuple[MeshShard, ...]:
        axes = [axis for axis in AXES if axis in self.axes[target]]
        return tuple(MeshShard(axis=axis, size=getattr(self.strategy, axis), dim=dim) for axis in axes)

    def _state(self, item: Item) -> tuple[MeshShard, ...]:
        name = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
        owner = self.owners.get(name)
        if owner is None or owner.shape != item.shape:
            return ()  # a step count
        shards = self._annotated(name)
        if self.strategy.zero_stage < _FROM_STAGE[item.kind] or not self.strategy.zero_stage:
            return shards
        return shards + _split(item.shape, shards, self.strategy.fsdp)

    def _annotated(self, name: str) -> tuple[MeshShard, ...]:
        axes = enumerate(self.annotations.get(name, ()))
        return tuple(MeshShard(axis=axis, size=size, dim=dim) for dim, axis in axes if axis and (size := getattr(self.strategy, axis)) > 1)


def _split(shape: tuple[int, ...], shards: tuple[MeshShard, ...], num_ranks: int) -> tuple[MeshShard, ...]:
    """A further split along ``fsdp``: dim 0 if it divides, else the largest dim that does; none if no dim does."""
    local = local_shape(shape, shards)
    fitting = [dim for dim, size in enumerate(local) if size and size % num_ranks == 0]
    if not fitting:
        return ()
    dim = 0 if fitting[0] == 0 else max(fitting, key=lambda dim: local[dim])
    return (MeshShard(axis=FSDP, size=num_ranks, dim=dim),)


def _batch(step: HloStep, batch_dims: Mapping[str, int | None]) -> Input | None:
    """The first batch input whose dim 0 is the batch's."""
    return next((item for item in step.inputs if item.kind is Kind.BATCH and batch_dims[item.target] == 0), None)
