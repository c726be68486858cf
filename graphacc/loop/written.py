"""What a call of the model leaves in the attributes of its modules."""

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from graphacc.capture.numbers import Number, Values
from graphacc.capture.python_state import PLAIN, snapshot
from graphacc.errors import CaptureError
from graphacc.loop.places import MISSING, Held

TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "__dict__", "__class__"})
"""What a module holds of its own accord; no attributes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What a call of the model leaves in attributes of its modules, by label."""

    buffers: bool = False  # whether it changes buffers
    replaced: frozenset[str] = frozenset()  # those of them in whose place it puts another tensor
    tensors: tuple[str, ...] = ()  # results of the program
    others: dict[str, object] = dataclasses.field(default_factory=dict)  # plain values, the same in every call
    numbers: dict[str, Callable[[Values], int | float]] = dataclasses.field(default_factory=dict)  # computed anew in every call
    values: Values = dataclasses.field(default_factory=dict)  # of the numbers that were inputs
    before: dict[str, object] = dataclasses.field(default_factory=dict)  # what was there when the call began
    held: tuple[Held, ...] = ()  # the Python state that it has read
    fills: bool = False  # whether it changes lists or dicts that it is given


def attributes_written(model: nn.Module, before: Mapping[str, dict], given: Mapping[str, object]) -> dict[str, object]:
    """Label -> new value of the attributes of modules that are not as they were `before`, nor as they were `given`.

    Raises:
        CaptureError: the new value is neither a tensor nor a number or another plain value, or an attribute is gone.
    """
    found = {}
    for path, module in model.named_modules():
        prefix = f"model.{path}." if path else "model."
        if deleted := before[path].keys() - vars(module).keys() - TABLES:
            raise CaptureError(f"the forward deletes {prefix}{min(deleted)}, which a compiled program does not do in every step: set it to None")
        for name, value in vars(module).items():
            label = prefix + name
            if name in TABLES or value is before[path].get(name, MISSING) or value is given.get(label, MISSING):
                continue
            old = before[path].get(name, MISSING)
            if type(value) is Number:
                found[label] = value
                continue
            if isinstance(module, nn.RNNBase) and name in ("_flat_weights", "_flat_weights_names", "_flat_weight_refs"):
                continue
            if isinstance(value, (*PLAIN, Tensor)):
                if isinstance(value, Tensor) or snapshot(value) != snapshot(old):
                    found[label] = value
            elif old is MISSING or snapshot(value) != snapshot(old):
                raise CaptureError(
                    f"the forward sets {label} to a new {type(value).__name__}, which a compiled program does not do in every step: "
                    "keep tensors and numbers in attributes of their own, or return them"
                )
    return found


def plain_attributes_written(model: nn.Module, before: Mapping[str, dict]) -> dict[str, object]:
    """Label -> new value of the attributes of modules whose plain value is not as it was `before`."""
    return {
        f"model.{path}.{name}" if path else f"model.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in TABLES and isinstance(value, PLAIN) and type(value) is not Number and value is not before[path].get(name, MISSING)
    }
