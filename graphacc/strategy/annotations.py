"""Annotations: shardings that the user asks for, by name of a parameter or on a tensor; each is a pin that every policy respects."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from graphacc.errors import StrategyError
from graphacc.strategy.spec import AXES, Strategy

PINNABLE = ("tp", "ep")
"""Mesh axes that an annotation may name. How dp and fsdp split tensors follows from the batch and the ZeRO stage."""


class P(tuple):
    """What each dim of a tensor is split over: ``P("tp", None)`` splits dim 0 over tp and keeps dim 1 whole.

    An entry is the name of a mesh axis or None; dims at the end may be left out. The form of ``jax.sharding.PartitionSpec``,
    which is accepted as well.
    """

    def __new__(cls, *entries: str | None) -> "P":
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple:
        return tuple(self)  # for copies and pickles, which would give the entries as one

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


Annotations = Mapping[str, Iterable]  # pattern of parameter names -> P


def pinned_parameters(
    annotations: Annotations,
    marked: Mapping[str, P],
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    strategy: Strategy,
) -> dict[str, P]:
    """The pin of every annotated parameter, by its first name.

    Args:
        annotations: pattern (as in `fnmatch`, matched against every name of a parameter) -> spec.
        marked: name of a parameter -> the spec that `graphacc.mark_sharding` gave it.
        shapes: first name of every parameter -> its global shape.
        aliases: other name of a tied parameter -> its first name.

    Raises:
        StrategyError: lists all that is wrong: patterns that match nothing, specs that do not fit a tensor, an axis that is
            unknown or used twice, patterns that contradict each other about one parameter.
    """
    problems: list[str] = []
    pins: dict[str, dict[P, list[str]]] = {}
    names = {**{name: name for name in shapes}, **aliases}
    asked = [(repr(pattern), fnmatch.filter(names, pattern), entries) for pattern, entries in annotations.items()]
    asked += [(f"mark_sharding on {name!r}", [name], spec) for name, spec in marked.items()]
    problems += [_unmatched(pattern, names) for pattern in annotations if not fnmatch.filter(names, pattern)]
    for source, matched, entries in asked:
        spec = _checked(source, entries, problems)
        for name in sorted({names[name] for name in matched}) if spec is not None else ():
            if (problem := misfit(spec, shapes[name], strategy)) is not None:
                problems.append(f"{source} on {name!r}: {problem}")
            pins.setdefault(name, {}).setdefault(_trimmed(spec), []).append(source)
    for name, found in pins.items():
        if len(found) > 1:
            tied = [other for other, first in aliases.items() if first == name]
            also = f" (tied to {', '.join(tied)})" if tied else ""
            which = " and ".join(f"{spec!r} by {', '.join(sources)}" for spec, sources in found.items())
            problems.append(f"{name!r}{also} is pinned to {which}: keep one")
    if problems:
        raise StrategyError("the annotations cannot be followed:\n" + "\n".join(f"  {problem}" for problem in dict.fromkeys(problems)))
    return {name: next(iter(found)) for name, found in pins.items()}


def _trimmed(spec: P) -> P:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _checked(source: str, entries: Iterable, problems: list[str]) -> P | None:
    try:
        return checked_spec(entries)
    except StrategyError as error:
        problems.append(f"{source}: {error}")
        return None


def checked_spec(entries: Iterable) -> P:
    """A spec whose axes are known and used once.

    Raises:
        StrategyError: says which entry is wrong.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise StrategyError(f"{entries!r} is no sharding; write graphacc.P('tp', None) with one entry per dim")
    spec = P(*entries)
    for entry in spec:
        if entry is not None and entry not in AXES:
            raise StrategyError(f"{spec!r}: {entry!r} is no mesh axis; known are {', '.join(PINNABLE)}")
        if entry is not None and entry not in PINNABLE:
            raise StrategyError(f"{spec!r}: {entry!r} cannot be annotated; the strategy's own fields say what it splits. Use {' or '.join(PINNABLE)}")
    used = [entry for entry in spec if entry is not None]
    if len(used) != len(set(used)):
        raise StrategyError(f"{spec!r} uses an axis twice: a tensor can be split once along each axis")
    return spec


def misfit(spec: P, shape: tuple[int, ...], strategy: Strategy) -> str | None:
    """Why a tensor of `shape` cannot be split as `spec` says; None if it can."""
    if len(spec) > len(shape):
        return f"{spec!r} has {len(spec)} entries, the tensor has shape {list(shape)}: give at most {len(shape)}"
    for dim, axis in enumerate(spec):
        size = 1 if axis is None else getattr(strategy, axis)
        if shape[dim] % size:
            return f"{axis}={size} does not divide dim {dim} of shape {list(shape)}: split another dim, or choose a size that divides {shape[dim]}"
    return None


def _unmatched(pattern: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern.strip("*"), list(names), n=3, cutoff=0.3)
    return f"{pattern!r} matches no parameter" + (f"; near are {', '.join(near)}" if near else "")


def annotate(parameter: nn.Parameter, spec: P) -> None:
    """Remember a pin on a parameter, until its model is compiled."""
    parameter._graphacc_sharding = spec


def annotated(model: nn.Module) -> dict[str, P]:
    """The pins that `annotate` left on a model's parameters, by name."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        spec = parameter.__dict__.get("_graphacc_sharding") if isinstance(parameter, Tensor) else None
        if spec is not None:
            found[name] = spec
    return found
