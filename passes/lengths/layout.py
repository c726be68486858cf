"""Which elements of a padded tensor stand for elements of the unpadded one.

A dim that grows with a length is read as [outer, length + offset, inner], as a batch of sequences that was flattened is. In the padded
program the middle is the bucket's length; its first ``length + offset`` places are the unpadded tensor's, in order, and what stands behind
them is padding. The other dims are the same in both.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """A dim that grows with a length."""

    symbol: int  # number of the length
    offset: int  # the middle has this many places more than the length
    factor: int = 1  # outer * inner
    inner: int | None = 1  # None: the tensor is constant along the dim, so any reading is right

    @property
    def outer(self) -> int:
        return self.factor // (self.inner or 1)

    def known(self) -> "Length":
        """One reading of a dim of constants."""
        return dataclasses.replace(self, inner=1) if self.inner is None else self


Layout = tuple[Length | None, ...]
"""For every dim of a tensor its `Length`; None for one that does not grow."""


def joined(one: Length | None, other: Length | None) -> Length | None:
    """The reading of a dim in which two tensors are taken together.

    Raises:
        ValueError: they are different.
    """
    if one is None or other is None:
        return one or other
    if one == other or other == dataclasses.replace(one, inner=None):
        return one
    if one == dataclasses.replace(other, inner=None):
        return other
    raise ValueError("its operands are flattened in different orders")


def regrouped(before: Sequence[int], layout: Layout, after: Sequence[int], wanted: Layout) -> Layout:
    """The layout of a row-major reshape.

    Args:
        before, after: shapes, padded.
        wanted: of every dim of the result what is known: symbol, offset and factor.

    Raises:
        ValueError: a length's places would not stay in the middle of a dim.
    """
    found: list[Length | None] = [None] * len(after)
    for sources, targets in _groups(before, after):
        lengths = [(dim, item) for dim in sources if (item := layout[dim]) is not None]
        for target in targets:
            want = wanted[target]
            if want is None:
                continue
            alike = [(dim, item) for dim, item in lengths if (item.symbol, item.offset) == (want.symbol, want.offset)]
            if len(alike) != 1:
                raise ValueError("a length is divided")
            dim, item = alike[0]
            if item.inner is None:
                constant = len(sources) == 1 or want.factor == item.factor
                if not constant:
                    raise ValueError("constants along a length are joined with others")
                found[target] = want if len(sources) == 1 else dataclasses.replace(want, inner=_right(before, dim, sources) // _right(after, target, targets))
                continue
            inner, rest = divmod(_right(before, dim, sources) * item.inner, _right(after, target, targets))
            if rest or not inner or want.factor % inner:
                raise ValueError("a length is divided")
            found[target] = dataclasses.replace(want, inner=inner)
        if len([target for target in targets if wanted[target] is not None]) != len(lengths):
            raise ValueError("two lengths become one dim")
    return tuple(found)


def _right(shape: Sequence[int], dim: int, group: Sequence[int]) -> int:
    """Elements behind one place of a dim, inside of a group of dims."""
    count = 1
    for other in group:
        if other > dim:
            count *= shape[other]
    return count


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of the two shapes that hold the same elements, as short as they can be."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        sources, targets, left, right = [], [], 1, 1
        while not (sources or targets) or left != right:
            if (left <= right and i < len(before)) or j == len(after):
                sources.append(i)
                left *= before[i]
                i += 1
            else:
                targets.append(j)
                right *= after[j]
                j += 1
        groups.append((sources, targets))
    return groups
