"""Passes and their runner.

A pass takes a StepGraph and gives one, in place or new. Its parameters are bound when the list of passes is built, and
the runner knows no pass by name. After every pass that has rewritten something, and behind the last one, the runner checks the graph and says which pass broke it.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from graphacc import collector
from graphacc.errors import GraphError, StrategyError
from graphacc.graph import StepGraph


@dataclasses.dataclass
class Log:
    """What a pass says about its work while it runs."""

    rewrites: int = 0  # changes that it made to the graph
    details: Any = None  # a report of its own, such as a PartitionReport

    def rewrote(self, count: int = 1) -> None:
        self.rewrites += count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One rewriting of a graph, with its parameters bound."""

    name: str
    exact: bool  # results stay the same bit for bit
    run: Callable[[StepGraph, Log], StepGraph]
    optional: bool = False  # the program gives the same values without it: it is left out in the search for the pass at fault
    verify: Callable[[StepGraph], None] | None = None  # what must hold afterwards, besides StepGraph.verify
    decide: Callable[[StepGraph], Any] | None = None  # of a partition: its AxisPlan, of which `run` makes the program
    key: Hashable = None  # two passes with equal keys do the same to the same step; None: the name is the key


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassReport:
    """What one pass did."""

    name: str
    exact: bool
    seconds: float
    rewrites: int
    num_nodes: tuple[int, int]  # before and after
    details: Any = None
    before: str | None = None  # the graph's text, with debugging on
    after: str | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {self.rewrites} rewrites, {self.num_nodes[0]} -> {self.num_nodes[1]} nodes, {self.seconds:.2f} s"
        return text if self.details is None else f"{text}\n{self.details}"


def key_of(passes: Iterable[Pass]) -> tuple[Hashable, ...]:
    """Equal for passes that do the same to the same step."""
    return tuple(item.key or item.name for item in passes)


def run_passes(
    step: StepGraph, passes: Sequence[Pass], *, debug: Iterable[str] | bool = False, checks: bool = True
) -> tuple[StepGraph, list[PassReport]]:
    """Run `passes` in order, checking the graph after each that has rewritten something, and at the end.

    Args:
        step: may be changed in place.
        debug: names of the passes whose graphs are kept as text in their reports; True for all.
        checks: False for a graph that is only read.

    Returns:
        The rewritten graph and one report per pass.

    Raises:
        GraphError: names the pass that broke the graph.
        StrategyError: `debug` names a pass that is not in the list.
    """
    shown = {item.name for item in passes} if debug is True else set(debug or ())
    select(passes, shown)
    reports: list[PassReport] = []
    unchecked: list[str] = []  # passes that report no rewrite
    with collector.paused():
        for item in passes:
            before = step.graph
            step, report = _run_one(step, item, item.name in shown)
            reports.append(report)
            if not checks:
                continue
            is_rewritten = report.rewrites > 0 or step.graph is not before or report.num_nodes[0] != report.num_nodes[1]
            if is_rewritten or len(reports) == len(passes):
                _check(step.verify, item, unchecked)
                unchecked.clear()
            else:
                unchecked.append(item.name)
            if item.verify is not None:
                _check(functools.partial(item.verify, step), item, ())
    return step, reports


def _run_one(step: StepGraph, item: Pass, shown: bool) -> tuple[StepGraph, PassReport]:
    before, count = str(step.graph) if shown else None, len(step.graph.nodes)
    log, start = Log(), time.perf_counter()
    result = item.run(step, log)
    report = PassReport(
        name=item.name,
        exact=item.exact,
        seconds=time.perf_counter() - start,
        rewrites=log.rewrites,
        num_nodes=(count, len(result.graph.nodes)),
        details=log.details,
        before=before,
        after=str(result.graph) if shown else None,
    )
    return result, report


def _check(holds: Callable[[], None], item: Pass, unchecked: Sequence[str]) -> None:
    """
    Args:
        holds: raises GraphError otherwise.
        unchecked: the passes in front of `item` whose graph was not looked at.
    """
    try:
        holds()
    except GraphError as error:
        others = f", or one in front of it that reports no rewrite ({', '.join(map(repr, unchecked))})," if unchecked else ""
        raise GraphError(f"pass {item.name!r}{others} broke the graph: {error}") from error


def select(passes: Sequence[Pass], names: Iterable[str]) -> list[Pass]:
    """The passes with these names, in the order of the list.

    Raises:
        StrategyError: lists the known names.
    """
    wanted, known = set(names), [item.name for item in passes]
    for name in sorted(wanted):
        if name not in known:
            raise StrategyError(f"there is no pass {name!r} in this pipeline: choose out of {', '.join(dict.fromkeys(known))}")
    return [item for item in passes if item.name in wanted]
