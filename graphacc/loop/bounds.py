"""Bounds of indices: labels and indices in the batch that are out of range raise, as in PyTorch, where a compiled program would read another element.

While code runs on fake tensors, `decisions.Recorder` notes a `Bound` for every operator whose index follows from the batch. At every call of that code the
bounds are checked on the real batch, before anything runs. What is not checked: an index that follows from parameters, from random numbers or
from floating-point values (positions that `topk` gives are in range by construction); one that follows from buffers is checked when the code is
recorded, and so is one that follows from constants alone.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator

import torch
from torch import Tensor

from graphacc.errors import BatchIndexError, BatchValueError

if typing.TYPE_CHECKING:
    from graphacc.loop.decisions import Operation, Slot
    from graphacc.loop.tape import External, Param


@dataclasses.dataclass(frozen=True)
class Range:
    """What the elements of an index have to be in: [low, high), or `ignored`."""

    low: int
    high: int
    ignored: int | None = None

    def allows(self, value: object) -> bool:
        return value == self.ignored or (isinstance(value, (int, float)) and self.low <= value < self.high)

    def violation(self, index: Tensor) -> int | None:
        """The first element that is outside, if any."""
        if not index.numel():
            return None
        least, most = torch.aminmax(index)
        if self.low <= least.item() and most.item() < self.high:
            return None
        outside = (index < self.low) | (index >= self.high)
        if self.ignored is not None:
            outside &= index != self.ignored
        return int(index[outside][0].item()) if outside.any() else None


@dataclasses.dataclass(frozen=True)
class NonZero(Range):
    """What the divisors of integers have to be."""

    low: int = 0
    high: int = 0

    def allows(self, value: object) -> bool:
        return value != 0

    def violation(self, index: Tensor) -> int | None:
        return 0 if bool((index == 0).any()) else None


@dataclasses.dataclass(frozen=True)
class TrueElements(Range):
    """How many elements of a mask may be true: `low` or more, less than `high`."""

    def violation(self, index: Tensor) -> int | None:
        repeats = 1
        for dim, stride in enumerate(index.stride()):
            if stride == 0 and index.shape[dim] > 1:  # of an expanded mask its elements are counted once
                repeats *= index.shape[dim]
                index = index.narrow(dim, 0, 1)
        count = repeats * int(torch.count_nonzero(index))
        return None if self.low <= count < self.high else count


@dataclasses.dataclass(frozen=True)
class Bound:
    """An index that recorded code uses, and what it has to be in."""

    operations: "tuple[Operation, ...]"  # that give it from the batch, in order
    index: "Slot | External | Param"
    range: Range
    function: str  # whose index it is
    line: str  # of the user's code
    every_call: bool  # whether other batches may break it, and computing it costs little
    source: "External | None"  # whose elements the index has, some or all of them

    def error(self, value: int) -> BatchIndexError | BatchValueError:
        if isinstance(self.range, NonZero):
            return BatchValueError(
                f"{self.function}: ZeroDivisionError: integers are divided by 0, which follows from the batch.{chr(10) + '  ' + self.line if self.line else ''}\n"
                "  remedy: correct the batch, or divide by a clamped number. Nothing has been computed with this batch."
            )
        if isinstance(self.range, TrueElements):
            return BatchValueError(
                f"{self.function}: {value} elements of the mask are true, which follows from the batch, and there are values for {self.range.high - 1} of them."
                f"{chr(10) + '  ' + self.line if self.line else ''}\n  remedy: correct the batch. Nothing has been computed with this batch."
            )
        ignored = "" if self.range.ignored is None else f" (or ignore_index={self.range.ignored})"
        return BatchIndexError(
            f"{self.function}: the index {value} in the batch is out of range: it has to be at least {self.range.low} and less than {self.range.high}{ignored}."
            f"{chr(10) + '  ' + self.line if self.line else ''}\n  remedy: correct the batch, or make the dimension that is indexed larger than its largest index. "
            "Nothing has been computed with this batch."
        )


_MOVES = {"view", "_unsafe_view", "slice", "select", "clone", "alias", "detach", "lift_fresh", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "split",
          "split_with_sizes", "unbind", "flip", "roll", "repeat"}  # fmt: skip
"""Operators whose results have only elements of their argument."""


def moves_elements(operation: "Operation", allowed: Range) -> bool:
    """Whether the results of an operator have only elements of its first argument, or constants that are allowed."""
    if isinstance(allowed, TrueElements):  # moving may repeat them
        return False
    name = operation.function._schema.name.removeprefix("aten::")
    return name in _MOVES or (name == "constant_pad_nd" and allowed.allows(operation.leaves[-1]))


_ALONG_DIM = {"gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy"}
"""Operators with arguments (self, dim, index, ...), which take no negative index."""


_DIVISIONS = {"div", "floor_divide", "remainder", "fmod"}


def indices_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Iterator[tuple[Tensor, Range]]:
    """The indices among the arguments of an operator, and what they have to be in."""
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    if name in _DIVISIONS:
        integers = all(isinstance(arg, int) or (isinstance(arg, Tensor) and not arg.is_floating_point() and not arg.is_complex()) for arg in args[:2])
        if integers and isinstance(args[1], Tensor) and (name != "div" or kwargs.get("rounding_mode")):
            yield args[1], NonZero()
    elif name in ("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"):
        scores, target = args[:2]
        ignored = None if name == "multi_margin_loss" else args[4]
        yield target, Range(0, scores.shape[min(1, scores.dim() - 1)], ignored)
    elif name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        yield args[1], Range(0, args[0].shape[0])
    elif name in _ALONG_DIM:
        x, dim, index = args[:3]
        yield index, Range(0, x.shape[dim] if x.dim() else 1)
    elif name == "take":
        yield args[1], Range(-args[0].numel(), args[0].numel())
    elif name == "masked_scatter":
        x, mask, source = args
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        repeats = math.prod(shape) // max(1, mask.numel())
        yield mask, TrueElements(0, source.numel() // max(1, repeats) + 1)
    elif name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
        dim = 0
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is not None and not is_mask:
                yield index, Range(-args[0].shape[dim], args[0].shape[dim])
            dim += index.dim() if is_mask else 1
