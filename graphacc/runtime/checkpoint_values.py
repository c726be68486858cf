"""Python values in a checkpoint: what consists of tensors, numbers, text, None, and dicts, lists and tuples of them, as JSON with the tensors beside it.

Nothing is pickled. What JSON does not have is a dict with one key that names it: ``{"tensor": name}``, ``{"float": "nan"}``, ``{"tuple": [...]}``,
``{"dict": [[key, value], ...]}``, ``{"ordered": [[key, value], ...]}`` (an OrderedDict).
"""

import collections
import math
from collections.abc import Callable

import numpy as np
import torch

from graphacc.lowering.dtypes import to_jax
from graphacc.runtime.checkpoint_files import NAMES
from graphacc.runtime.exchange import numpy_view, torch_view

_DICTS = {"dict": dict, "ordered": collections.OrderedDict}


def encode(value: object, name: str, tensors: dict[str, torch.Tensor], place: str = "") -> object:
    """A value as JSON can hold it.

    Args:
        name: that its tensors get, each with a number behind it.
        tensors: takes copies of them.
        place: of the value in the one that is saved, for the message.

    Raises:
        TypeError: it holds something else; says what, and where.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (isinstance(value, float) and kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        key = f"{name}/{len(tensors)}"
        tensors[key] = _copy(value, place)
        return {"tensor": key}
    if isinstance(value, (list, tuple)) and kind in (list, tuple, torch.Size):
        items = [encode(item, name, tensors, f"{place}[{number}]") for number, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    for label, cls in _DICTS.items():
        if isinstance(value, dict) and kind is cls:
            return {label: [[encode(key, name, tensors, f"a key of {place or 'it'}"), encode(item, name, tensors, f"{place}[{key!r}]")] for key, item in value.items()]}
    raise TypeError(f"a {kind.__name__}" + (f" at {place}" if place else ""))


def decode(found: object, read: Callable[[str], np.ndarray]) -> object:
    """The value that `encode` was given.

    Args:
        read: gives the values of a tensor, by its name.
    """
    if isinstance(found, list):
        return [decode(item, read) for item in found]
    if not isinstance(found, dict):
        return found
    ((label, content),) = found.items()
    if label == "tensor":
        return torch_view(read(content))
    if label == "float":
        return float(content)
    if label == "tuple":
        return tuple(decode(item, read) for item in content)
    return _DICTS[label]((decode(key, read), decode(item, read)) for key, item in content)


def _copy(tensor: torch.Tensor, place: str) -> torch.Tensor:
    try:
        known = tensor.layout is torch.strided and not tensor.is_meta and to_jax(tensor.dtype) in NAMES
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"a tensor of {tensor.layout}, {tensor.dtype}, on {tensor.device}" + (f" at {place}" if place else ""))
    return torch_view(np.array(numpy_view(tensor)))
