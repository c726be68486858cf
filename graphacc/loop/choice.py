"""The strategy that the loop does not give: it is searched when the first step is about to be compiled, as nothing is known before."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from graphacc.capture.optimizer import ELEMENTWISE, steps_like
from graphacc.errors import StrategyError
from graphacc.loop.pipelined import adopted
from graphacc.graph import Kind, StepGraph
from graphacc.runtime import progress
from graphacc.runtime.distributed import share
from graphacc.costs.hardware import Hardware
from graphacc.search import Plan, Request, Search
from graphacc.strategy.axes import CP

if TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.programs import Programs

log = logging.getLogger("graphacc")


_REFUSED = "refused: "
_IN_PARTS = "parts of the loop run as programs of their own, or by PyTorch"


def _can_offload(engine: "Engine") -> bool:
    """Whether the host can do the updates of this loop, as far as it is known: by optimizers that update every element by itself, of values that are on the host, too."""
    if engine.verifier.remaining or any(handle.frees_host for handle in engine.handles.values()):
        return False
    return all(steps_like(binding.optimizer, ELEMENTWISE) for binding in engine.bindings)


class Choice:
    """A search that is still to be made, and what came out.

    Until then programs without gradients (an evaluation before training) run under a strategy that every model can have; their state
    comes back to the host when the choice is another one.

    Args:
        is_asked: the user asked for it. Otherwise it is the default, and that strategy stays where no other one can be found.
    """

    def __init__(self, request: Request, *, is_asked: bool = True):
        self.request, self.is_asked = request, is_asked
        self.plan: Plan | None = None
        self.why_not = ""  # nothing is searched
        self._is_open = True

    def _search(self, programs: "Programs", joint: StepGraph, update: StepGraph | None, *, offloads: bool) -> str:
        """The plan, or why there is none, as text for the other processes."""
        batch = {item.target for item in joint.inputs if item.kind is Kind.BATCH}
        try:
            search = Search(
                joint,
                update,
                Hardware.present(programs.num_devices),
                batch_dims={name: dim for name, dim in programs.batch_dims.items() if name in batch},
                annotations=programs.annotations,
                accumulates=update is None and programs.strategy.microbatches == 1,
                microbatches=programs.strategy.microbatches,
                offloads=offloads,
                frees_microbatches=not programs.local_batch,
            )
            self.plan = search.run(self.request, with_pin_costs=False)
        except StrategyError as error:
            return f"{_REFUSED}{error}"
        return self.plan.to_json()

    def settle(self, engine: "Engine", joint: Callable[[], object], update: Callable[[], object] | None) -> None:
        """Search, once, and let the programs that follow have the strategy that was found.

        Args:
            joint: captures forward and backward.
            update: captures the optimizer's step; None: it is not known, as gradients are accumulated first.
        """
        if not self._is_open:
            return
        with progress.building("the search for a strategy"):
            self._settle(engine, joint, update)

    def _settle(self, engine: "Engine", joint: Callable[[], object], update: Callable[[], object] | None) -> None:
        programs = engine.programs
        with progress.activity("capture"):
            graph = joint()
            step = None if update is None else update()
        why_not = ""
        if not isinstance(graph, StepGraph):
            why_not = "the model was captured by lazy tensors, which give no operators to estimate"
        elif any(compiled.kind != "forward" for compiled in programs.compiled):
            why_not = _IN_PARTS
        elif not self.is_asked and any(handle.frees_host and programs.holds(handle.kind, handle.name) for handle in engine.handles.values()):
            why_not = 'values of a model that was made on the meta device are on the devices already (strategy="auto" moves them)'
        if why_not:
            return self._keep(programs, why_not)
        assert isinstance(graph, StepGraph)
        with progress.activity("search"):
            found = share(lambda: self._search(programs, graph, step if isinstance(step, StepGraph) else None, offloads=_can_offload(engine)))
        if found.startswith(_REFUSED):
            if self.is_asked:
                raise StrategyError(found.removeprefix(_REFUSED))
            return self._keep(programs, found.removeprefix(_REFUSED))
        self._is_open = False
        self.plan = self.plan or Plan.from_json(found)
        log.warning("graphacc: %s", self.plan.line)
        programs.cp_is_asked = CP in self.request.pins
        programs.chose_microbatches = "microbatches" not in self.request.pins
        if self.plan.strategy != programs.strategy:
            engine.bring_home()
            engine.programs = adopted(programs, self.plan.strategy)
            engine.fallback.strategy = self.plan.strategy

    def leave(self, programs: "Programs") -> None:
        """An update is about to run whose gradients no program has given: there is no step to search for."""
        if self._is_open:
            self._keep(programs, _IN_PARTS)

    def _keep(self, programs: "Programs", why_not: str) -> None:
        """Go on with the strategy that there is."""
        self._is_open, self.why_not = False, why_not
        log.warning("graphacc: no strategy was searched, %s runs: %s", programs.strategy, why_not)
