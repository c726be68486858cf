"""Strategy: everything that may be chosen about how a step runs, in one frozen value."""

import dataclasses
import json
import math

from graphacc.errors import StrategyError

AXES = ("pp", "dp", "fsdp", "tp", "cp", "ep")
"""Mesh axes, outermost first. `tp` carries sequence parallelism too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a training step is spread over devices. None leaves a choice free for the search."""

    dp: int = 1  # replicas that split the batch and keep whole parameters
    fsdp: int = 1  # ranks that split the batch and the state that `zero` names
    zero: int | None = None  # ZeRO stage on `fsdp`: 1 optimizer state, 2 and gradients, 3 and parameters; None: 3
    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallelism
    ep: int = 1  # expert parallelism
    microbatches: int = 1  # the batch is cut in so many, whose gradients are accumulated before one update
    precision: str = "fp32"  # "fp32", or "bf16": compute in bf16, fp32 masters

    def __post_init__(self):
        for axis in AXES:
            _check_count(axis, getattr(self, axis))
        _check_count("microbatches", self.microbatches)
        if self.zero not in (None, 1, 2, 3):
            raise StrategyError(f"zero={self.zero!r} is no ZeRO stage: set zero to 1, 2 or 3")
        if self.precision not in ("fp32", "bf16"):
            raise StrategyError(f"precision={self.precision!r} is unknown: set precision to 'fp32' or 'bf16'")
        if self.zero is not None and self.fsdp == 1:
            raise StrategyError(f"zero={self.zero} shards over the fsdp axis, which has size 1: set fsdp to the number of ranks, or leave zero unset")

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in force: 0 without an fsdp axis."""
        if self.fsdp == 1:
            return 0
        return 3 if self.zero is None else self.zero

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, outermost first, without the axes of size 1."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    @property
    def num_devices(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def replace(self, **changes) -> "Strategy":
        """The same strategy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Read ``"dp=2,fsdp=4,zero=3"``, the form of the command line.

        Raises:
            StrategyError: an unknown field (the known ones are listed) or a value that is no number.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, int | str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name not in known:
                raise StrategyError(f"strategy {text!r}: {part!r} sets no known field; write name=value with a name out of {', '.join(known)}")
            if name in values:
                raise StrategyError(f"strategy {text!r}: {name} is set twice; keep one")
            values[name] = value if name == "precision" else _parse_int(text, part, value)
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Strategy":
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """The shortest text that `parse` reads back."""
        changed = [f"{f.name}={value}" for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default]
        return ",".join(changed)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StrategyError(f"{name}={value!r} must be a whole number of at least 1")


def _parse_int(text: str, part: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise StrategyError(f"strategy {text!r}: {part!r} needs a whole number") from None
