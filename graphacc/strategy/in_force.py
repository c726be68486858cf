"""The strategy in force: what was chosen, and for every parameter how it is split and who decided that."""

import dataclasses

from graphacc.strategy.spec import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDecision:
    """How one parameter lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    spec: str  # the axes of every dim: "tp, fsdp" splits dim 0 over tp and dim 1 over fsdp, "-" is a whole dim
    decided_by: str  # "user", "policy" or "default", of each axis in turn
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StrategyInForce(Strategy):
    """A strategy with what it means for every parameter; equal to the plain strategy."""

    tensors: tuple[TensorDecision, ...] = dataclasses.field(default=(), repr=False)
    reason: str = dataclasses.field(default="", repr=False)  # why it was chosen, where it was searched

    @classmethod
    def of(cls, strategy: Strategy, tensors: tuple[TensorDecision, ...], reason: str = "") -> "StrategyInForce":
        return cls(**{field.name: getattr(strategy, field.name) for field in dataclasses.fields(Strategy)}, tensors=tensors, reason=reason)

    @property
    def plain(self) -> Strategy:
        """The strategy alone."""
        return Strategy(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Strategy)})

    def replace(self, **changes) -> Strategy:
        return self.plain.replace(**changes)

    def to_json(self) -> str:
        return self.plain.to_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self.plain == (other.plain if isinstance(other, StrategyInForce) else other)

    def __hash__(self) -> int:
        return hash(self.plain)

    def __str__(self) -> str:
        """The strategy's own text, below it one line per parameter, and why it was chosen."""
        header = ("parameter", "shape", "split over", "decided by", "why")
        rows = [(t.name, str(list(t.shape)), t.spec, t.decided_by, t.reason) for t in self.tensors]
        first = [str(self.plain), *self.plain.changes_numerics]
        last = ["searched:", *(f"  {line}" for line in self.reason.splitlines())] if self.reason else []
        if not rows:
            return "\n".join([*first, *last])
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
        return "\n".join([*first, *lines, *last])
