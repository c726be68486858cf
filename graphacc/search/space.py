"""What the search may choose: every strategy of a number of devices that agrees with the pins.

Chosen are the sizes of the mesh axes (`pp`, `dp`, `fsdp`, `tp`, `cp`, `ep`), the ZeRO stage, sequence parallelism, how attention crosses
`cp`, and the schedule of a pipeline; and what backward computes again (`remat`), for strategies that would not fit without. Where no strategy fits, all
are tried again with the optimizer's state on the host (`offload`).
Never chosen is what changes results: precision, the capacity factor, quantised communication. Microbatches, and so pipelines, are chosen where they
together give what the batch gives (`graphacc.passes.microbatches`), or where the request says ``microbatches=auto``.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphacc.errors import StrategyError
from graphacc.strategy.axes import AXES, CP, DATA_AXES, DP, EP, FSDP, MODEL_AXES, PP, TP
from graphacc.strategy.schedules import check_schedule
from graphacc.strategy.spec import CONTEXTS, Strategy, field_text, parse_fields

CHOSEN = (*AXES, "zero", "hpz", "sequence_parallel", "context", "remat", "schedule", "chunks", "offload")
"""The fields that the search fills in where they are not pinned."""


MICROBATCHES = tuple(2**i for i in range(8))
"""What is tried where they are chosen."""
CHUNKS = (2, 4)
"""Of each stage of an interleaved pipeline, where they are chosen."""
REMATS: tuple[Any, ...] = ((("*", "cheap"),), (("*", "products"),), "blocks")
"""What is tried of `remat`, from the one that computes least again; all blocks keep the same (`Strategy.remat`)."""


_FREE = "microbatches=auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched: pins are fields of `Strategy` with the values that they must have."""

    devices: int
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chooses_microbatches: bool = False  # also where the loss is then the mean of their losses
    exact_microbatches: bool = False  # they give what the batch gives, so that they are chosen unasked; the search finds out

    def __post_init__(self):
        if self.devices < 1:
            raise StrategyError(f"devices={self.devices}: a strategy needs at least one device")
        if self.pins.get("stages"):
            raise StrategyError("auto with stages: they name chunks of one pipeline; leave them out, or write the strategy whole")
        for axis in AXES:
            size = self.pins.get(axis, 1)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1 or self.devices % size:
                raise StrategyError(f"auto with {axis}={size!r} on {self.devices} devices: an axis has a size that divides the number of devices")

    @property
    def has_microbatches(self) -> bool:
        return self.frees_microbatches or self.pins.get("microbatches", 1) > 1

    @property
    def frees_microbatches(self) -> bool:
        """Whether their number is to be found."""
        return "microbatches" not in self.pins and (self.chooses_microbatches or self.exact_microbatches)

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return ",".join(["auto", *(f"{name}={field_text(value)}" for name, value in self.pins.items()), *(["microbatches=auto"] if self.chooses_microbatches else [])])

    @classmethod
    def parse(cls, text: str, devices: int) -> "Request":
        """Read ``"auto"``, ``"auto,tp=2,precision=bf16"`` or ``"auto,microbatches=auto"``.

        Raises:
            StrategyError: a field is unknown, set twice, or has a value that it cannot have.
        """
        first, _, rest = text.partition(",")
        if first.strip() != "auto":
            raise StrategyError(f"strategy {text!r}: a search is asked for by 'auto', with pins behind it as in 'auto,tp=2'")
        parts = [part.strip() for part in rest.split(",")]
        is_free = [part.replace(" ", "") == _FREE for part in parts]
        return cls(devices=devices, pins=parse_fields(",".join(part for part, free in zip(parts, is_free) if not free)), chooses_microbatches=any(is_free))

    def with_pin(self, name: str, value: object) -> "Request":
        """The same request with one pin more."""
        return dataclasses.replace(self, pins={**self.pins, name: value})

    def without(self, name: str) -> "Request":
        """The same request with one pin less."""
        return dataclasses.replace(self, pins={key: value for key, value in self.pins.items() if key != name})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Facts of a step, and of the hardware, that bound the space before anything is evaluated."""

    batch_size: int | None = None  # rows that the data axes and microbatches split; None: no batch
    num_experts: int = 0  # that `ep` can split
    host_devices: int | None = None  # tp * cp at most, unless one of them is pinned or a ring goes around hosts, and what gathers of hpZ stay within; None: all are alike
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
    for sizes in _meshes(request.devices, [request.pins.get(axis, 1 if axis == PP and not request.has_microbatches else None) for axis in AXES]):
        mesh: dict[str, int] = dict(zip(AXES, sizes))
        reason = _refusal(mesh, request, limits)
        if reason is not None:
            refusals.add(reason)
            continue
        for count in _microbatches(mesh, request, limits):
            for choice in _choices(mesh, count, request, limits):
                fields = {**request.pins, **mesh, **choice, "microbatches": count}
                try:
                    strategy = Strategy(**fields)
                    if strategy.pp > 1:
                        check_schedule(strategy.schedule, strategy.pp, count, strategy.chunks)
                except StrategyError as error:
                    refusals.add(str(error))
                    continue
                yield strategy


def _microbatches(mesh: Mapping[str, int], request: Request, limits: Limits) -> Sequence[int]:
    """Numbers of microbatches to choose from."""
    if not request.frees_microbatches:
        return (int(request.pins.get("microbatches", 1)),)
    rows = None if limits.batch_size is None else limits.batch_size // math.prod(mesh[axis] for axis in DATA_AXES)
    return [count for count in MICROBATCHES if count >= mesh[PP] and (count == 1 or (rows is not None and rows % count == 0))]


def first_strategy(request: Request) -> Strategy:
    """A strategy that agrees with the pins, for what runs before the search: what is left of the devices forms `fsdp`; stages need microbatches."""
    pins = {key: value for key, value in request.pins.items() if "microbatches" in request.pins or key not in (PP, "schedule", "chunks")}
    left = request.devices
    for axis in AXES:
        left //= pins.get(axis, 1)
    axis = FSDP if FSDP not in pins else DP
    fields = {key: value for key, value in pins.items() if not (key == "zero" and axis == DP and pins[FSDP] == 1)}
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
    if limits.batch_size is not None and limits.batch_size % (data * request.pins.get("microbatches", 1)) and not set(DATA_AXES) & set(request.pins):
        return f"the data axes do not divide the batch of {limits.batch_size} rows"
    if mesh[EP] > 1 and EP not in request.pins and (not limits.num_experts or limits.num_experts % mesh[EP]):
        return f"ep does not divide {limits.num_experts} experts" if limits.num_experts else "no experts for ep to split"
    pinned = set(MODEL_AXES) & set(request.pins)
    if not pinned and _leaves_host(mesh, limits) and not _may_ring(mesh, request, limits):
        return f"tp * cp is larger than the {limits.host_devices} devices of a host"
    missing = [axis for axis in sorted(limits.needed) if axis in mesh and mesh[axis] == 1 and axis not in request.pins]
    if missing:
        return f"annotations split tensors along {missing[0]}"
    return None


def _leaves_host(mesh: Mapping[str, int], limits: Limits) -> bool:
    """Whether ranks of `tp` and `cp` that belong together are on several hosts."""
    return limits.host_devices is not None and mesh[TP] * mesh[CP] > limits.host_devices


def _may_ring(mesh: Mapping[str, int], request: Request, limits: Limits) -> bool:
    """Whether `cp` may join several hosts: there are fewer rows than devices, and keys that go around a ring travel beside attention, and from each host to one other."""
    has_few_rows = limits.batch_size is not None and limits.batch_size < request.devices
    return has_few_rows and mesh[TP] <= (limits.host_devices or 1) and request.pins.get("context", "ring") == "ring"


def _choices(mesh: Mapping[str, int], microbatches: int, request: Request, limits: Limits) -> Iterator[dict[str, Any]]:
    """The fields that say how the axes of a mesh are used."""
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    if mesh[PP] > 1:
        schedules += ("zb-h1", 1), *(("interleaved", chunks) for chunks in CHUNKS if microbatches % mesh[PP] == 0)
        if "schedule" in request.pins or "chunks" in request.pins:
            schedules += ("gpipe", 1), ("interleaved", request.pins.get("chunks", 2))
    schedules = tuple(dict.fromkeys(item for item in schedules if request.pins.get("schedule", item[0]) == item[0] and request.pins.get("chunks", item[1]) == item[1]))
    free = {
        "zero": _stages(mesh, microbatches),
        "sequence_parallel": (False, True) if mesh[TP] > 1 else (False,),
        "context": CONTEXTS[:1] if mesh[CP] == 1 else ("ring",) if _leaves_host(mesh, limits) and not set(MODEL_AXES) & set(request.pins) else CONTEXTS,
    }
    names = [name for name in free if name not in request.pins]
    for (schedule, chunks), *values in itertools.product(schedules, *(free[name] for name in names)):
        found = dict(zip(names, values)) | {"schedule": schedule, "chunks": chunks}
        yield found
        if "hpz" not in request.pins and found.get("zero", request.pins.get("zero")) in (None, 3) and (within := _ranks_of_host(mesh, limits)) is not None:
            yield found | {"hpz": within}


def _stages(mesh: Mapping[str, int], microbatches: int) -> tuple[int | None, ...]:
    """ZeRO's stages over `fsdp`, `cp` and `ep`, None for what a strategy does without one."""
    split = (1,) if microbatches == 1 else (2, 1)
    if mesh[FSDP] > 1:
        return (None, *split)
    return (None, 3, *split) if mesh[CP] * mesh[EP] > 1 else (None,)


def _ranks_of_host(mesh: Mapping[str, int], limits: Limits) -> int | None:
    """Ranks of `fsdp` that share a host, to whose links ZeRO++'s hpZ keeps the gathers of backward; None where all do, or each has a host of its own."""
    if limits.host_devices is None or mesh[PP] > 1:
        return None
    within, left = divmod(limits.host_devices, math.prod(mesh[axis] for axis in (TP, CP, EP)))
    return within if not left and 1 < within < mesh[FSDP] and mesh[FSDP] % within == 0 else None
