"""Bytes of the values of a graph."""

import math

import torch
import torch.fx


def sizes(node: torch.fx.Node) -> list[int]:
    """Bytes of each value that a node returns."""
    values = node.meta["val"]
    values = values if isinstance(values, (tuple, list)) else [values]
    return [math.prod(v.shape) * v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values]


def size_bytes(node: torch.fx.Node) -> int:
    """Bytes of all of them."""
    return sum(sizes(node))
