"""What a mask says: bounds on positions, segments, a bias. Read off the expression that makes the mask, so that no [T, S] tensor is needed.

A mask is a sum of floating terms, or a bool. A term ``where(seen, bias, low)`` or ``where(hidden, low, bias)`` with a constant `low`
says which positions are seen. What is seen is a conjunction, whose factors are
- positions compared (``key <= query``, ``key > query - window``), or any other constant: evaluated, and read as a band;
- values that do not vary along the queries or along the keys (padding), which become segments;
- ``ids_of_queries == ids_of_keys`` (packed sequences), which are segments.
A factor that is none of these stays a bias of 0 and -inf.

Legend: B batch, H heads, T queries, S keys.
"""

import dataclasses
import math

import torch
from torch import fx

from graphacc.graph import StepGraph
from graphacc.ops.facts import OpKind, draws, of_kind
from graphacc.ops.flash_attention import EmptyRows

aten = torch.ops.aten
LARGEST_CONSTANT = 2**26
"""Elements of the largest constant that is evaluated."""

LOW = -6e4
"""A constant at or below this hides a position where another is seen; models add -inf, the lowest number of a dtype, or -1e9."""

ABSORBING = -1e30
"""A finite constant at or below this leaves nothing of a score that it is added to: a row of nothing else is uniform."""

_SAME = of_kind(OpKind.SAME) | {aten.expand.default}
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_COMPARE = {aten.le.Tensor: (0, "<="), aten.lt.Tensor: (-1, "<="), aten.ge.Tensor: (0, ">="), aten.gt.Tensor: (1, ">=")}
_FLIPPED = {"<=": ">=", ">=": "<="}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A condition that stays a tensor: a bias of 0 and -inf."""

    node: fx.Node  # bool, or floating with 0 where it is seen
    negated: bool  # True is hidden

    @property
    def meta(self) -> dict:
        return self.node.meta


@dataclasses.dataclass
class Reading:
    """What a mask says about the scores of one attention."""

    left: int = -1
    right: int = -1
    queries: list[fx.Node] = dataclasses.field(default_factory=list)  # bool, constant along the keys
    keys: list[fx.Node] = dataclasses.field(default_factory=list)  # bool, constant along the queries
    ids: list[tuple[fx.Node, fx.Node]] = dataclasses.field(default_factory=list)  # of queries and keys, to be equal
    bias: list[fx.Node | Kept] = dataclasses.field(default_factory=list)  # floating, added
    empty_rows: EmptyRows = EmptyRows.ZEROS
    notes: list[str] = dataclasses.field(default_factory=list)

    def bound(self, left: int, right: int) -> None:
        """Narrow the band."""
        self.left = left if self.left < 0 else self.left if left < 0 else min(left, self.left)
        self.right = right if self.right < 0 else self.right if right < 0 else min(right, self.right)

    def __str__(self) -> str:
        parts = []
        if self.right == 0:
            parts.append("causal" if self.left < 0 else f"causal window of {self.left + 1}")
        elif self.right > 0 or self.left >= 0:
            parts.append(f"window ({self.left}, {self.right})")
        parts += ["padding"] if self.keys or self.queries else []
        parts += ["segments"] if self.ids else []
        parts += [f"bias {list(node.meta['val'].shape)}" for node in self.bias]
        return ", ".join(parts + self.notes) or "no mask"


@dataclasses.dataclass(frozen=True)
class _Condition:
    """A bool that says which positions are seen."""

    node: fx.Node
    negated: bool  # it says which are hidden
    low: float  # what hidden positions get: added to the score, or -inf
    replaces_bias: bool  # a bias stands in the other branch, so that hidden positions do not depend on it


class Masks:
    """Reads the masks of one graph."""

    def __init__(self, step: StepGraph):
        names = {item.name: item.target for item in step.inputs}
        self._values = {
            node: step.constants[names[node.name]] for node in step.placeholders if names[node.name] in step.constants
        }
        self._static: dict[fx.Node, bool] = {}

    def read(self, terms: list[fx.Node], q_len: int, kv_len: int, *, causal: bool = False, nan_rows: bool = False) -> Reading | str:
        """What the sum of `terms` says, or why it cannot be said.

        Args:
            terms: each a bool (True is seen) or floating, broadcastable to [B, H, T, S].
            causal: additionally, key <= query.
            nan_rows: a row without a key is NaN (a plain softmax of -inf), where a kernel gives zeros.
        """
        conditions, bias = [], []
        for term in terms:
            self._collect(term, conditions, bias)
        reading = Reading(bias=bias)
        if causal:
            reading.bound(-1, 0)
        left = [(condition, self._read_bands(condition, reading, q_len, kv_len)) for condition in conditions]
        data = [(condition, factors) for condition, factors in left if factors]
        never_empty = reading.left < 0 or q_len - 1 - reading.left <= kv_len - 1
        lows = {condition.low for condition in conditions}
        finite = [condition for condition in conditions if condition.low != -math.inf]
        alone = len(conditions) == 1 and not causal and conditions[0].low <= ABSORBING
        if finite and not alone and (data or not never_empty):
            return self._as_bias(terms, causal)
        if nan_rows and -math.inf in lows and (data or not never_empty):
            return "a row whose keys are all masked is NaN in this softmax, and the mask depends on data"
        for condition, factors in data:
            self._read_data(condition, factors, reading)
        if finite and (data or not never_empty):
            replaces = any(condition.replaces_bias for condition in finite)
            reading.empty_rows = EmptyRows.UNIFORM_CONSTANT if replaces else EmptyRows.UNIFORM
        if len(reading.ids) + bool(reading.keys or reading.queries) > 1:
            return "segments and padding together"
        return reading

    def _as_bias(self, terms: list[fx.Node], causal: bool) -> Reading | str:
        """The sum itself: finite lows add up, and in a row without a key it matters which ones a position has."""
        if any(term.meta["val"].dtype == torch.bool for term in terms):
            return "a bool mask and one of finite numbers together"
        return Reading(right=0 if causal else -1, bias=list(terms), notes=["masks of several terms, or of no lowest number"])

    # Terms

    def _collect(self, term: fx.Node, conditions: list[_Condition], bias: list[fx.Node]) -> None:
        if term.meta["val"].dtype == torch.bool:
            conditions.append(_Condition(term, False, -math.inf, False))
            return
        node = _through(term)
        if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
            for arg in node.args:
                self._collect(arg, conditions, bias)
            return
        if node.target is aten.where.self:
            cond, yes, no = node.args
            for low, other, negated in ((self.scalar(no), yes, False), (self.scalar(yes), no, True)):
                if low is not None and low <= LOW:
                    zero = self._is_zero(other)
                    conditions.append(_Condition(cond, negated, low, not zero))
                    if not zero:
                        self._collect(other, conditions, bias)
                    return
        if not self._is_zero(node) and not self._constant_condition(node, conditions):
            bias.append(term if node.meta["val"].shape == term.meta["val"].shape else node)

    def _constant_condition(self, node: fx.Node, conditions: list[_Condition]) -> bool:
        """A constant of zeros and one low number, as ``triu(full(-inf))``."""
        value = self.value(node)
        if value is None or value.numel() < 2:
            return False
        low = value.min().item()
        if low > LOW or not ((value == 0) | (value == low)).all():
            return False
        conditions.append(_Condition(node, False, low, False))
        return True

    # Factors of what is seen

    def _read_bands(self, condition: _Condition, reading: Reading, q_len: int, kv_len: int) -> list[fx.Node]:
        """Read the factors that are constant bands; returns the others."""
        left = []
        for factor in self._factors(condition):
            band = self._band(factor, condition, q_len, kv_len)
            if band is None:
                left.append(factor)
            else:
                reading.bound(*band)
        return left

    def _factors(self, condition: _Condition) -> list[fx.Node]:
        """The conjuncts of a condition; a hidden one is split nowhere."""
        if condition.negated:
            return [condition.node]
        factors, stack = [], [condition.node]
        while stack:
            node = _through(stack.pop())
            if node.target in _AND and all(isinstance(arg, fx.Node) for arg in node.args):
                stack += node.args
            else:
                factors.append(node)
        return factors

    def _band(self, factor: fx.Node, condition: _Condition, q_len: int, kv_len: int) -> tuple[int, int] | None:
        """(left, right) of a factor that is a constant band; (-1, -1) if everything is seen."""
        if not condition.negated and (band := self._compared(factor)) is not None:
            return _unbounded(*band, q_len, kv_len)
        value = self.value(factor)
        if value is None:
            return None
        seen = value if value.dtype == torch.bool else value == 0
        seen = ~seen if condition.negated else seen
        while seen.dim() > 2:
            if not (seen == seen[:1]).all():
                return None
            seen = seen[0]
        return _band_of(seen.expand(q_len, kv_len))

    def _compared(self, node: fx.Node) -> tuple[int | None, int | None] | None:
        """Bounds (lowest, highest) of key - query, where a node compares positions of keys and queries."""
        if node.target not in _COMPARE or node.meta["val"].dim() < 2:
            return None
        slack, sense = _COMPARE[node.target]
        offsets = [self._position(arg) for arg in node.args]
        if None in offsets or offsets[0][1] == offsets[1][1]:
            return None
        (first, along), (second, _) = offsets
        bound = second - first + slack  # of args[0] - args[1], as positions
        if along == -2:
            bound, sense = -bound, _FLIPPED[sense]
        return (None, bound) if sense == "<=" else (bound, None)

    def _position(self, node: object) -> tuple[int, int] | None:
        """(offset, dim) of a constant that is its own index along `dim`, -1 for keys or -2 for queries, plus an offset."""
        value = self.value(node) if isinstance(node, fx.Node) else None
        if value is None or value.is_floating_point() or value.dim() < 1 or value.numel() < 2:
            return None
        dim = -1 if value.shape[-1] == value.numel() else -2
        if value.dim() < -dim or value.shape[dim] != value.numel():
            return None
        offset = value.flatten() - torch.arange(value.numel())
        return (int(offset[0]), dim) if (offset == offset[0]).all() else None

    def _read_data(self, condition: _Condition, factors: list[fx.Node], reading: Reading) -> None:
        """Factors that are no bands become segments, or stay a bias."""
        for factor in factors:
            shape = (1,) * (4 - factor.meta["val"].dim()) + tuple(factor.meta["val"].shape)
            whole = condition.negated or factor.meta["val"].dtype != torch.bool or self.static(factor)
            if not whole and shape[1] == shape[2] == 1:
                reading.keys.append(factor)
            elif not whole and shape[1] == shape[3] == 1:
                reading.queries.append(factor)
            elif not whole and (ids := _compared_ids(factor)) is not None:
                reading.ids.append(ids)
            else:
                reading.notes.append(f"a mask {list(shape)} that is no band and no padding stays a tensor")
                reading.bias.append(Kept(factor, condition.negated))

    # Constants

    def static(self, node: fx.Node) -> bool:
        """The node depends on no input."""
        if node not in self._static:
            if node.op == "placeholder":
                self._static[node] = node in self._values
            else:
                known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
                self._static[node] = known and not draws(node.target) and all(self.static(used) for used in node.all_input_nodes)
        return self._static[node]

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a constant; None for what depends on an input, or is large."""
        if node in self._values:
            return self._values[node]
        if not isinstance(node.meta["val"], torch.Tensor) or not self.static(node) or node.meta["val"].numel() > LARGEST_CONSTANT:
            return None
        values = {used: self.value(used) for used in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result = node.target(*args, **kwargs)
        if node.meta["val"].numel() <= LARGEST_CONSTANT // 64:  # larger ones are made again where they are needed
            self._values[node] = result
        return result

    def scalar(self, node: object) -> float | None:
        """The number that a constant of one element, or of equal ones, has."""
        if not isinstance(node, fx.Node):
            return node if isinstance(node, (int, float)) else None
        node = _through(node)
        if node.target is aten.full.default:
            return float(node.args[1])
        value = self.value(node) if node.meta["val"].numel() == 1 else None
        return None if value is None else value.item()

    def _is_zero(self, node: object) -> bool:
        return self.scalar(node) == 0


def _through(node: fx.Node) -> fx.Node:
    """Past operators that only repeat values, or change the width of their dtype."""
    while node.target in _SAME or (node.target is aten._to_copy.default and _kind(node) == _kind(node.args[0])):
        node = node.args[0]
    return node


def _kind(node: fx.Node) -> str:
    value = node.meta["val"]
    return "bool" if value.dtype == torch.bool else "float" if value.is_floating_point() else "integer"


def _compared_ids(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(ids of the queries [B, 1, T, 1], ids of the keys [B, 1, 1, S]) of an equality."""
    if node.target is not aten.eq.Tensor:
        return None
    found: dict[str, fx.Node] = {}
    for arg in node.args:
        shape = (1,) * (4 - arg.meta["val"].dim()) + tuple(arg.meta["val"].shape)
        if shape[1] != 1 or arg.meta["val"].is_floating_point():
            return None
        if shape[2] == 1:
            found["keys"] = arg
        elif shape[3] == 1:
            found["queries"] = arg
    return (found["queries"], found["keys"]) if len(found) == 2 else None


def _unbounded(low: int | None, high: int | None, q_len: int, kv_len: int) -> tuple[int, int] | None:
    """(left, right) of bounds on key - query, -1 where a bound hides nothing; None where no such pair says it."""
    left = -1 if low is None or low <= -(q_len - 1) else -low
    right = -1 if high is None or high >= kv_len - 1 else high
    if (left < 0 and low is not None and low > -(q_len - 1)) or (right < 0 and high is not None and high < kv_len - 1):
        return None
    return left, right


def _band_of(seen: torch.Tensor) -> tuple[int, int] | None:
    """(left, right) of a bool [T, S] that is a band."""
    if seen.all():
        return -1, -1
    q_len, kv_len = seen.shape
    ahead = torch.arange(kv_len, dtype=torch.int32) - torch.arange(q_len, dtype=torch.int32)[:, None]
    inside = ahead[seen]
    if inside.numel() == 0:
        return None
    low, high = int(inside.min()), int(inside.max())
    if not torch.equal(seen, (ahead >= low) & (ahead <= high)):
        return None
    return _unbounded(low, high, q_len, kv_len)
