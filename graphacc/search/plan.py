"""A plan: the strategy that a search has chosen, why, and what it was measured against; it can be kept in a file and replayed."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping

from graphacc.cache import replace_file
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.search.estimate import Estimate
from graphacc.strategy.spec import Strategy

_FORMAT = 1
_MS, _GIB, _MIB = 1e3, 2**30, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rival:
    """A strategy that was not chosen."""

    strategy: Strategy
    estimate: Estimate
    reason: str  # what it lost by
    is_tie: bool = False  # within the error of the model of the chosen one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search found."""

    strategy: Strategy
    estimate: Estimate
    hardware: Hardware
    request: str  # what was searched: "auto" and the pins
    rivals: tuple[Rival, ...] = ()
    num_evaluated: int = 1  # strategies
    num_slower: int = 0  # strategies that are left out: smaller sizes of their model axes already take longer than the chosen one
    num_over_memory: int = 0  # of those evaluated: need more memory than there is
    refusals: Mapping[str, int] = dataclasses.field(default_factory=dict)  # reason -> strategies that cannot be
    pin_costs: Mapping[str, float] = dataclasses.field(default_factory=dict)  # pin -> relative time that it costs
    tokens: int | None = None  # rows of the batch times their length, as far as it has one
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)  # parameter -> shape, dtype and whether it is trained
    search_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # part of the search -> seconds
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.estimate.seconds

    @property
    def digest(self) -> str:
        """What several processes must agree on."""
        return hashlib.sha256(json.dumps([str(self.strategy), sorted(self.model.items())]).encode()).hexdigest()[:16]

    @property
    def line(self) -> str:
        """The choice and the reason, in one line."""
        others = next((f"; next: {rival.strategy or 'one device'}, {rival.reason}" for rival in self.rivals), "")
        sizes = f"{self.estimate.seconds * _MS:.3g} ms a step and {size_text(self.estimate.bytes_per_device)} per device predicted"
        offloads = next((f"; {note}" for note in self.notes if note.startswith("offload: none of ")), "")
        return f"strategy {self.strategy or 'one device'}: {sizes}, the best of {self.num_evaluated + self.num_slower}{others}{offloads}"

    def __str__(self) -> str:
        estimate = self.estimate
        rate = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second is not None else ""
        lines = [
            f"{self.strategy or 'one device'}",
            f"for {self.hardware}, out of {self.request}: {estimate.seconds * _MS:.4g} ms a step{rate}, {size_text(estimate.bytes_per_device)} per device",
            "time:   " + ", ".join(f"{name} {seconds * _MS:.3g} ms" for name, seconds in estimate.parts().items()) + f"; hidden communication {estimate.hidden_seconds * _MS:.3g} ms",
            f"memory: parameters {size_text(estimate.parameter_bytes)}, optimizer state {size_text(estimate.state_bytes)}, buffers, batch and results {size_text(estimate.other_bytes)}, "
            f"temporaries {size_text(estimate.temporary_bytes)}; at most {size_text(self.hardware.usable_bytes)}"
            + (f"; on the host, for each device: {size_text(estimate.host_bytes)} of exact parameters and optimizer state" if estimate.host_bytes else ""),
            f"evaluated {self.num_evaluated} strategies, {self.num_over_memory} of them over the memory; "
            + (f"{self.num_slower} more are slower by bounds: what smaller sizes of their model axes compute and exchange takes longer already; " if self.num_slower else "")
            + f"{sum(self.refusals.values())} cannot be" + "".join(f"\n    {count} x {reason}" for reason, count in sorted(self.refusals.items(), key=lambda item: -item[1])),
            f"optimal within the model of costs, whose seconds are expected within ±{100 * self.hardware.error:.0f} % ({self.hardware.error_source}; constants: {self.hardware.source})",
        ]
        lines += [f"the pin {pin} costs {100 * cost:+.1f} %" for pin, cost in self.pin_costs.items()]
        lines += [f"rival: {rival.strategy or 'one device'}: {rival.estimate.seconds * _MS:.4g} ms, {size_text(rival.estimate.bytes_per_device)}: {rival.reason}{' (a tie within the error)' if rival.is_tie else ''}" for rival in self.rivals]
        lines += [f"note: {note}" for note in self.notes]
        if self.search_seconds:
            lines.append("searched in " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.search_seconds.items()))
        return "\n".join(lines)

    def to_json(self) -> str:
        values = {
            "format": _FORMAT,
            "strategy": json.loads(self.strategy.to_json()),
            "request": self.request,
            "hardware": json.loads(self.hardware.to_json()),
            "model": dict(self.model),
            "estimate": dataclasses.asdict(self.estimate),
            "tokens": self.tokens,
        }
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            StrategyError: it is no plan, or one of another format.
        """
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']!r}, expected {_FORMAT}")
            return cls(
                strategy=Strategy.from_json(json.dumps(values["strategy"])),
                estimate=Estimate(**values["estimate"]),
                hardware=Hardware.from_json(json.dumps(values["hardware"]), name=name),
                request=str(values["request"]),
                tokens=values["tokens"],
                model={str(key): str(value) for key, value in values["model"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StrategyError(f"{name} is no plan ({type(error).__name__}: {error}): write one with `graphacc plan --output`, or Plan.save") from None

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to a file, whole or not at all."""
        replace_file(pathlib.Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"), name=str(path))

    def check(self, model: Mapping[str, str], num_devices: int, chip: str) -> None:
        """That this plan was made for a model and devices.

        Raises:
            StrategyError: with the first difference.
        """
        difference = _first_difference(self.model, model)
        if difference is None and self.strategy.num_devices != num_devices:
            difference = f"it is for {self.strategy.num_devices} devices, and there are {num_devices}"
        if difference is None and self.hardware.chip.name.lower() != chip.lower():
            difference = f"it is for {self.hardware.chip.name}, and this is {chip}"
        if difference is not None:
            raise StrategyError(f'the plan {self.strategy} was made for something else: {difference}. Plan again, or give the strategy itself: strategy="{self.strategy}"')


def _first_difference(planned: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    for name in _merged(planned, given):
        if name not in given:
            return f"its parameter {name!r} {planned[name]} is not in this model"
        if name not in planned:
            return f"this model's parameter {name!r} {given[name]} is not in it"
        if planned[name] != given[name]:
            return f"its parameter {name!r} is {planned[name]}, this model's {given[name]}"
    return None


def _merged(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def size_text(number: int) -> str:
    return f"{number / _GIB:.2f} GiB" if number >= _GIB else f"{number / _MIB:.1f} MiB" if number >= _MIB else f"{number:,} bytes"
