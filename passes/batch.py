"""Which dim of every batch tensor is split, and along which data axes.

The data axes `dp`, `fsdp` and `ep` split the batch between them. Where their product does not divide it (the last batch of an
epoch), the batch is split along the axes that do divide it, and along the others every rank computes all rows. The program means the
same: what is computed on every rank is no partial sum, so nothing of it is counted twice.
"""

import itertools
import math
from collections.abc import Mapping

from graphacc.errors import StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.hlo import HloStep
from graphacc.strategy.axes import DATA_AXES
from graphacc.strategy.spec import Strategy

BatchDims = Mapping[str, int | None]
"""Target of every BATCH input -> the dim that is split over the data axes, or None."""


def default_batch_dims(step: StepGraph | HloStep) -> dict[str, int | None]:
    """Dim 0 of every batch input whose dim 0 has the batch size: that of the first argument with a dim, or else of the first input with one."""
    shapes = {item.target: item.shape for item in step.inputs if item.kind is Kind.BATCH}
    size = next((shape[0] for _, shape in sorted(shapes.items(), key=lambda each: not is_argument(each[0])) if shape), None)
    return {target: 0 if shape and shape[0] == size else None for target, shape in shapes.items()}


def is_argument(target: str) -> bool:
    """Whether a batch input is an argument of a call, and not what a module holds: ``model.args[0]``, ``kwargs['x']``."""
    return "args[" in target


def check_batch(step: StepGraph | HloStep, batch_dims: BatchDims) -> None:
    """Raise StrategyError unless `batch_dims` gives every batch input a dim that it has, or None."""
    targets = {item.target: item for item in step.inputs if item.kind is Kind.BATCH}
    if set(batch_dims) != set(targets):
        raise StrategyError(f"batch_dims names {sorted(batch_dims)}, the batch has {sorted(targets)}: give every one a dim, or None")
    for target, dim in batch_dims.items():
        shape = targets[target].shape
        if dim is not None and not 0 <= dim < len(shape):
            raise StrategyError(
                f"batch_dims[{target!r}] is {dim}, but that tensor has shape {list(shape)}: give a dim from 0, or None"
            )


def split_axes(step: StepGraph | HloStep, strategy: Strategy, batch_dims: BatchDims) -> dict[str, tuple[str, ...]]:
    """Target of every BATCH input -> the data axes that split it.

    The batch, the first input with a batch dim, is split along the axes whose product is the largest that divides it; an input of
    another size along those of them that divide it too.
    """
    sizes = _batch_sizes(step, batch_dims)
    axes = _dividing(strategy, DATA_AXES, next(iter(sizes.values()), 1))
    return {target: _dividing(strategy, axes, sizes[target]) if target in sizes else () for target in batch_dims}


def batch_dims_along(axis: str, axes: Mapping[str, tuple[str, ...]], batch_dims: BatchDims) -> dict[str, int | None]:
    """`batch_dims` for the partition along one data axis, given the `split_axes`."""
    return {target: dim if axis in axes[target] else None for target, dim in batch_dims.items()}


def unsplit_note(step: StepGraph | HloStep, strategy: Strategy, batch_dims: BatchDims) -> str | None:
    """What it costs that the data axes do not divide the batch; None where they do."""
    sizes, axes = _batch_sizes(step, batch_dims), split_axes(step, strategy, batch_dims)
    if not sizes:
        return None
    target, size = next(iter(sizes.items()))
    left = [axis for axis in DATA_AXES if getattr(strategy, axis) > 1 and axis not in axes[target]]
    if not left:
        return None
    over = " x ".join(f"{axis}={getattr(strategy, axis)}" for axis in left)
    return (
        f"the batch of {size} rows ({target!r}, dim {batch_dims[target]}) is not split over {over}, which does not divide it: along "
        f"{' and '.join(left)} every device computes the same rows, with the same results, in about "
        f"{math.prod(getattr(strategy, axis) for axis in left)} times the time of a split batch. Batches of a multiple of "
        f"{strategy.data_ranks} rows are split over all devices (DataLoader(drop_last=True) leaves a partial last batch out); where the batch is "
        f"another dim, name it: graphacc.compile(..., batch_dims={{{target!r}: 1}})"
    )


def _batch_sizes(step: StepGraph | HloStep, batch_dims: BatchDims) -> dict[str, int]:
    """Target -> size of the batch dim, of the batch inputs that have one."""
    return {
        item.target: item.shape[dim]
        for item in step.inputs
        if item.kind is Kind.BATCH and (dim := batch_dims[item.target]) is not None
    }


def _dividing(strategy: Strategy, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes whose sizes have the largest product that divides `size`; of equals the most axes."""
    axes = tuple(axis for axis in axes if getattr(strategy, axis) > 1)
    subsets = [subset for count in range(len(axes), -1, -1) for subset in itertools.combinations(axes, count)]
    products = {subset: math.prod(getattr(strategy, axis) for axis in subset) for subset in subsets}
    return max((subset for subset in subsets if size % products[subset] == 0), key=products.__getitem__)
