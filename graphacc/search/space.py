"""What the search may choose: every strategy of a number of devices that agrees with the pins.

Chosen are the sizes of the mesh axes (`dp`, `fsdp`, `tp`, `cp`, `ep`), the ZeRO stage, sequence parallelism and how attention crosses `cp`;
and what backward computes again (`remat`), for strategies that would not fit without.
Never chosen is what changes results: precision, the capacity factor, quantised communication; nor microbatches, whose mean is the loss of
the whole batch for some losses only, nor, as it needs them, `pp`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphacc.errors import StrategyError
from graphacc.strategy.axes import CP, DATA_AXES, DP, EP, FSDP, MODEL_AXES, PP, SPMD_AXES, TP
from graphacc.strategy.spec import CONTEXTS, Strategy, field_text, parse_fields

CHOSEN = (*SPMD_AXES, "zero", "sequence_parallel", "context", "remat")
"""The fields that the search fills in where they are not pinned."""


REMATS: tuple[Any, ...] = ((("*", "cheap"),), (("*", "products"),), "blocks")
"""What is tried of `remat`, from the one that computes least again; all blocks keep the same (`Strategy.remat`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched: pins are fields of `Strategy` with the values that they must have."""

    devices: int
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.devices < 1:
            raise StrategyError(f"devices={self.devices}: a strategy needs at least one device")
        fixed = {name: value for name, value in self.pins.items() if name not in CHOSEN}
        if fixed.get(PP, 1) != 1:
            raise StrategyError(
                f"auto with pp={fixed[PP]}: pipelines are not searched yet, as microbatches are part of what the user decides; "
                f"write the strategy whole, such as 'pp={fixed[PP]},fsdp={max(1, self.devices // fixed[PP])},microbatches=8'"
            )
        for axis in SPMD_AXES:
            size = self.pins.get(axis, 1)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1 or self.devices % size:
                raise StrategyError(f"auto with {axis}={size!r} on {self.devices} devices: an axis has a size that divides the number of devices")

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return ",".join(["auto", *(f"{name}={field_text(value)}" for name, value in self.pins.items())])

    @classmethod
    def parse(cls, text: str, devices: int) -> "Request":
        """Read ``"auto"`` or ``"auto,tp=2,precision=bf16"``.

        Raises:
            StrategyError: a field is unknown, set twice, or has a value that it cannot have.
        """
        first, _, rest = text.partition(",")
        if first.strip() != "auto":
            raise StrategyError(f"strategy {text!r}: a search is asked for by 'auto', with pins behind it as in 'auto,tp=2'")
        return cls(devices=devices, pins=parse_fields(rest))

    def without(self, name: str) -> "Request":
        """The same request with one pin less."""
        return dataclasses.replace(self, pins={key: value for key, value in self.pins.items() if key != name})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Facts of a step, and of the hardware, that bound the space before anything is evaluated."""

    batch_size: int | None = None  # rows that the data axes split; None: no batch
    num_experts: int = 0  # that `ep` can split
    model_ranks: int | None = None  # tp * cp at most, unless one of them is pinned: the devices of one host
    needed: frozenset[str] = frozenset()  # axes that annotations name


@dataclasses.dataclass
class Refusals:
    """Candidates that were not evaluated, by reason."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def candidates(request: Request, limits: Limits, refusals: Refusals) -> Iterator[Strategy]:
    """Every strategy that the request allows; what cannot be is noted with its reason. ZeRO-2 is ZeRO-1 in a program of a whole step."""
    for sizes in _meshes(request.devices, [request.pins.get(axis) for axis in SPMD_AXES]):
        mesh = dict(zip(SPMD_AXES, sizes))
        reason = _refusal(mesh, request, limits)
        if reason is not None:
            refusals.add(reason)
            continue
        for choice in _choices(mesh, request):
            fields = {**request.pins, **mesh, **choice}
            try:
                yield Strategy(**fields)
            except StrategyError as error:
                refusals.add(str(error))


def first_strategy(request: Request) -> Strategy:
    """A strategy that agrees with the pins, for what runs before the search: what is left of the devices forms `fsdp`."""
    left = request.devices
    for axis in SPMD_AXES:
        left //= request.pins.get(axis, 1)
    axis = FSDP if FSDP not in request.pins else DP
    fields = {key: value for key, value in request.pins.items() if not (key == "zero" and axis == DP and request.pins[FSDP] == 1)}
    try:
        return Strategy(**{**fields, **({axis: left} if left > 1 or axis not in fields else {})})
    except StrategyError:
        return Strategy(dp=request.devices)


def _meshes(devices: int, pins: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Sizes of the axes whose product is the number of devices."""
    if len(pins) == 1:
        if pins[0] in (None, devices):
            yield (devices,)
        return
    for size in (n for n in range(1, devices + 1) if devices % n == 0):
        if pins[0] in (None, size):
            for rest in _meshes(devices // size, pins[1:]):
                yield (size, *rest)


def _refusal(mesh: Mapping[str, int], request: Request, limits: Limits) -> str | None:
    data = math.prod(mesh[axis] for axis in DATA_AXES)
    if limits.batch_size is not None and limits.batch_size % data and not set(DATA_AXES) & set(request.pins):
        return f"the data axes do not divide the batch of {limits.batch_size} rows"
    if mesh[EP] > 1 and EP not in request.pins and (not limits.num_experts or limits.num_experts % mesh[EP]):
        return f"ep does not divide {limits.num_experts} experts" if limits.num_experts else "no experts for ep to split"
    pinned = set(MODEL_AXES) & set(request.pins)
    if limits.model_ranks is not None and not pinned and mesh[TP] * mesh[CP] > limits.model_ranks:
        return f"tp * cp is larger than the {limits.model_ranks} devices of a host"
    missing = [axis for axis in sorted(limits.needed) if axis in mesh and mesh[axis] == 1 and axis not in request.pins]
    if missing:
        return f"annotations split tensors along {missing[0]}"
    return None


def _choices(mesh: Mapping[str, int], request: Request) -> Iterator[dict[str, Any]]:
    """The fields that say how the axes of a mesh are used."""
    free = {
        "zero": (None, 1) if mesh[FSDP] > 1 and request.pins.get("microbatches", 1) == 1 else (None, 2, 1) if mesh[FSDP] > 1 else (None,),
        "sequence_parallel": (False, True) if mesh[TP] > 1 else (False,),
        "context": CONTEXTS if mesh[CP] > 1 else CONTEXTS[:1],
    }
    names = [name for name in free if name not in request.pins]
    for values in itertools.product(*(free[name] for name in names)):
        yield dict(zip(names, values))
