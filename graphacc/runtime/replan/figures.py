"""What planning a program's memory gave: the figures and maps that are reported, and kept with the compiled program."""

import dataclasses
import json

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer

FORMAT = 4  # of `to_json`; plans with another number are made again: raise it also when the planner gets better


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How the temporaries of one compiled program are laid out, and what is proved about it. Sizes are bytes of one device."""

    changed: bool  # whether the program runs with a plan of ours
    reason: str  # why XLA's plan was kept; empty where it was not
    temporary_before: int  # XLA's arena of temporaries
    temporary_after: int  # the arena that the program runs with
    lower_bound: int  # no plan that keeps these thunks' dependencies and in-place updates needs less; 0: unknown
    seconds: float  # from reading to loading, further compilations included; of the process that made the plan
    schedule: str = ""  # XLA's schedule that the plan starts from, where it is known
    from_cache: bool = False  # made by an earlier compilation
    map_before: AddressProblem | None = None  # every value with its steps and offset under XLA's plan; None: not read
    map_after: AddressProblem | None = None  # under ours; None where XLA's was kept

    @property
    def is_optimal(self) -> bool:
        """Whether the bound proves that nothing better exists."""
        return bool(self.lower_bound) and self.temporary_after <= self.lower_bound

    def summary(self) -> str:
        """One line for the user."""
        mb = 1e6
        line = f"temporary memory {self.temporary_before / mb:.1f}"
        if self.temporary_after != self.temporary_before:
            line += f" -> {self.temporary_after / mb:.1f}"
        line += " MB"
        if self.lower_bound:
            line += f" (lower bound {self.lower_bound / mb:.1f} MB)"
        line += ", from the cache" if self.from_cache else f", {self.seconds:.1f} s"
        return line if self.changed else f"{line}; XLA's plan kept: {self.reason}"

    def to_json(self) -> str:
        """On one line."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("map_before", "map_after"):
            fields[name] = None if fields[name] is None else _rows(fields[name])
        return json.dumps({"format": FORMAT, **fields})

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """The plan that `to_json` wrote, as one that comes from a cache.

        Raises:
            ValueError, KeyError, TypeError: the text is something else.
        """
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError("a memory plan of another format")
        for name in ("map_before", "map_after"):
            fields[name] = None if fields[name] is None else _problem(fields[name])
        return cls(**fields | {"from_cache": True})


def _rows(problem: AddressProblem) -> list[tuple[str, int, int, int, int]]:
    return [(b.name, b.lower, b.upper, b.size, b.offset) for b in problem.buffers]


def _problem(rows: list[list]) -> AddressProblem:
    fields = ("name", "lower", "upper", "size", "offset")
    return AddressProblem(buffers=tuple(LiveBuffer(**dict(zip(fields, row, strict=True))) for row in rows))
