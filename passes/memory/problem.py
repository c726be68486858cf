"""What a planner is asked, and what it answers: plain values, with no solver and no framework behind them.

Two problems. *Addresses*: buffers with fixed half-open live ranges get offsets so that no two that live at the same time
overlap, and the arena is low. *Order*: operators that read and write buffers are ordered, within their dependencies, so
that the sum of the live buffers is small at its peak. All sizes and offsets are bytes.
"""

import dataclasses
import enum


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveBuffer:
    """One buffer of an address problem."""

    name: str
    lower: int  # first time at which it lives
    upper: int  # first time at which it no longer lives (half-open)
    size: int  # bytes, positive
    offset: int | None = None  # a fixed address, or None to be chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressProblem:
    """Buffers with live ranges, to be packed into one arena."""

    buffers: tuple[LiveBuffer, ...]
    alignment: int = 1  # every offset is a multiple of it
    capacity: int | None = None  # decide whether they fit this height; None: minimise the height


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of an order problem."""

    name: str
    reads: tuple[int, ...]  # indices of buffers
    writes: tuple[int, ...]  # indices of buffers that it creates (first writer) or updates in place (later writers)
    after: tuple[int, ...] = ()  # indices of operators that must run before, besides the data dependencies
    workspace: int = 0  # bytes that live while it runs, alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer of an order problem."""

    name: str
    size: int  # bytes
    is_input: bool = False  # lives from the start
    is_output: bool = False  # lives to the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Operators in a valid program order, and the buffers that they work on."""

    operators: tuple[Operator, ...]
    buffers: tuple[Buffer, ...]


class Status(enum.Enum):
    """How a solver ended."""

    OPTIMAL = "optimal"  # the bound proves that nothing better exists
    FEASIBLE = "feasible"  # valid, with a gap to the bound
    INFEASIBLE = "infeasible"  # proved: nothing fits the capacity
    OUT_OF_TIME = "out of time"  # the budget ended without an answer
    CANCELLED = "cancelled"  # the caller asked to stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressPlan:
    """Offsets for an address problem."""

    status: Status
    offsets: tuple[int, ...]  # one per buffer, in the problem's order; empty where there is no solution
    height: int  # bytes of the arena that they need
    lower_bound: int  # no arena is lower
    bound_source: str  # what proves the bound, such as "max live"
    seconds: float

    @property
    def gap(self) -> float:
        """(height - lower_bound) / lower_bound."""
        return (self.height - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderPlan:
    """An order for an order problem."""

    status: Status
    order: tuple[int, ...]  # indices of operators
    peak: int  # largest sum of live bytes
    lower_bound: int  # no order has a lower peak
    bound_source: str
    seconds: float

    @property
    def gap(self) -> float:
        """(peak - lower_bound) / lower_bound."""
        return (self.peak - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Order and addresses together."""

    order: OrderPlan
    addresses: AddressPlan
    live_ranges: tuple[tuple[int, int], ...]  # of every buffer, as positions in the order, half-open
    lower_bound: int  # bytes; no order has a lower arena

    @property
    def limit(self) -> str:
        """What keeps the arena from being lower, as far as it is known."""
        height, peak = self.addresses.height, self.order.peak
        if height <= self.lower_bound:
            return "nothing: no order and no addresses need less"
        if height > peak:
            return f"fragmentation: {height - peak} bytes of the arena are above the peak of live bytes"
        return f"the order: its peak is {peak - self.lower_bound} bytes above what is proved to be needed"
