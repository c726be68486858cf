"""The strategy that the loop does not give: it is searched when the first step is about to be compiled, as nothing is known before."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from graphacc.graph import StepGraph
from graphacc.costs.hardware import Hardware
from graphacc.search import Plan, Request, Search

if TYPE_CHECKING:
    from graphacc.loop.engine import Engine

log = logging.getLogger("graphacc")


class Choice:
    """A search that is still to be made, and what came out.

    Until then programs without gradients (an evaluation before training) run under a strategy that every model can have; their state
    comes back to the host when the choice is another one.
    """

    def __init__(self, request: Request):
        self.request = request
        self.plan: Plan | None = None
        self.why_not = ""  # nothing is searched
        self._is_open = True

    def settle(self, engine: "Engine", joint: Callable[[], object], update: Callable[[], object] | None) -> None:
        """Search, once, and let the programs that follow have the strategy that was found.

        Args:
            joint: captures forward and backward.
            update: captures the optimizer's step; None: it is not known, as gradients are accumulated first.
        """
        if not self._is_open:
            return
        programs = engine.programs
        graph = joint()
        step = None if update is None else update()
        self._is_open = False
        if not isinstance(graph, StepGraph):
            self.why_not = "the model was captured by lazy tensors, which give no operators to estimate"
        elif any(compiled.kind != "forward" for compiled in programs.compiled):
            self.why_not = "parts of the loop ran as programs of their own before"
        if self.why_not:
            log.warning("graphacc: no strategy was searched, %s runs: %s", programs.strategy, self.why_not)
            return
        assert isinstance(graph, StepGraph)
        self.plan = Search(
            graph,
            step if isinstance(step, StepGraph) else None,
            Hardware.present(programs.num_devices),
            batch_dims={name: dim for name, dim in programs.batch_dims.items() if any(item.target == name for item in graph.inputs)},
            annotations=programs.annotations,
            accumulates=update is None,
        ).run(self.request)
        log.warning("graphacc: %s", self.plan.line)
        if self.plan.strategy != programs.strategy:
            engine.bring_home()
            programs.adopt(self.plan.strategy)
            engine.fallback.strategy = self.plan.strategy
