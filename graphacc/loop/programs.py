"""The compiled programs of one model: built on demand from StepGraphs, kept by what makes them differ, run on one state."""

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Mapping

import jax
import torch
from torch import Tensor

from graphacc.graph import Input, Kind, Output, StepGraph
from graphacc.passes.pipeline import build_pipeline, default_batch_dims
from graphacc.passes.runner import run_passes
from graphacc.runtime import Program, TrainState, make_mesh, select_devices, to_device, to_torch
from graphacc.strategy import Strategy

log = logging.getLogger("graphacc")

STATE_KINDS = (Kind.PARAM, Kind.BUFFER, Kind.STATE, Kind.GRAD)
"""Kinds of values that stay on the devices between programs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program and how it came about."""

    kind: str  # "step", "grad", "update" or "forward"
    reason: str  # why it was compiled
    graph: StepGraph  # as it was lowered: local along the data axes
    program: Program
    constants: dict[str, jax.Array]  # target -> tensor that the trace lifted; its own, for names repeat between programs
    capture_seconds: float
    pass_seconds: float
    compile_seconds: float


class Programs:
    """The programs of one model on one mesh, and the state that they share."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        num_devices: int,
        batch_dims: Mapping[str, int | None],
        cache_dir: str | None,
        fast_compile: bool,
    ):
        self.strategy = strategy
        self.batch_dims = dict(batch_dims)
        self.cache_dir = cache_dir
        self.fast_compile = fast_compile
        self.mesh = make_mesh(strategy, select_devices(num_devices))
        self.state = TrainState(self.mesh)
        self.compiled: list[Compiled] = []
        self._by_key: dict[Hashable, Compiled] = {}
        self._aspects: dict[str, dict[str, Hashable]] = {}

    def get(self, kind: str, aspects: Mapping[str, Hashable], capture: Callable[[], StepGraph]) -> Compiled:
        """The program of `kind` for these aspects of the loop; compiled if it is new."""
        key = (kind, tuple(aspects.items()))
        if key not in self._by_key:
            reason = self._reason(kind, dict(aspects))
            if not reason.startswith("first"):
                log.warning("graphacc: compiling another %s program: %s", kind, reason)
            self._by_key[key] = self._compile(kind, reason, capture)
            self.compiled.append(self._by_key[key])
        return self._by_key[key]

    def run(self, compiled: Compiled, feeds: Mapping[tuple[Kind, str], object]) -> dict[tuple[Kind, str], Callable[[], Tensor]]:
        """Run a program on the state and on `feeds` (the inputs that are no state: a tensor or a number each).

        Returns:
            For each output that is no state, a function that fetches the value to the host.
        """
        graph = compiled.graph
        results = compiled.program(*(self._argument(compiled, item, feeds) for item in graph.inputs))
        fetch = {}
        for item, array in zip(graph.outputs, results):
            if item.kind in STATE_KINDS:
                self.state.set(item, array)
            else:
                fetch[item.kind, item.target] = _fetcher(array, item)
        return fetch

    def _argument(self, compiled: Compiled, item: Input, feeds: Mapping[tuple[Kind, str], object]) -> jax.Array:
        if item.target in compiled.constants:
            return compiled.constants[item.target]
        return self.state.get(item) if item.kind in STATE_KINDS else self._feed(item, feeds[item.kind, item.target])

    def put(self, compiled: Compiled, kind: Kind, target: str, value: Tensor) -> None:
        """Upload a value in the layout that a program wants it in."""
        item = next(item for item in compiled.graph.inputs if (item.kind, item.target) == (kind, target))
        self.state.set(item, to_device(value.to(item.dtype), item, self.mesh))

    def holds(self, kind: Kind, target: str) -> bool:
        return self.state.holds(kind, target)

    def fetch(self, kind: Kind, target: str) -> Tensor:
        """A value of the state as a global tensor on the host."""
        array, item = self.state.find(kind, target)
        return to_torch(array, item)

    def state_targets(self, name: str) -> list[str]:
        """The targets of the optimizer's state of one parameter."""
        return [target for kind, target in self.state.keys() if kind is Kind.STATE and target.rpartition("/")[0] == name]

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of one parameter, on the host."""
        return {target.rpartition("/")[2]: self.fetch(Kind.STATE, target) for target in self.state_targets(name)}

    def _feed(self, item: Input, value: object):
        return to_device(value if isinstance(value, Tensor) else torch.tensor(value, dtype=item.dtype), item, self.mesh)

    def _compile(self, kind: str, reason: str, capture: Callable[[], StepGraph]) -> Compiled:
        start = time.perf_counter()
        graph = capture()
        captured = time.perf_counter()
        graph, _ = run_passes(graph, build_pipeline(graph, self.strategy, batch_dims=self._dims(kind, graph)))
        passed = time.perf_counter()
        program = Program.build(graph, self.mesh, name=kind, cache_dir=self.cache_dir, fast_compile=self.fast_compile)
        return Compiled(
            kind=kind,
            reason=reason,
            graph=graph,
            program=program,
            constants={
                item.target: to_device(graph.constants[item.target], item, self.mesh) for item in graph.inputs if item.target in graph.constants
            },
            capture_seconds=captured - start,
            pass_seconds=passed - captured,
            compile_seconds=time.perf_counter() - passed,
        )

    def _dims(self, kind: str, graph: StepGraph) -> dict[str, int | None]:
        """Batch input -> the dim that is split; an evaluation batch that does not divide is given whole to every device."""
        dims = default_batch_dims(graph)
        dims |= {target: dim for target, dim in self.batch_dims.items() if target in dims}
        if kind == "forward":
            shapes = {item.target: item.shape for item in graph.inputs if item.kind is Kind.BATCH}
            ranks = self.strategy.dp * self.strategy.fsdp
            dims = {target: None if dim is None or shapes[target][dim] % ranks else dim for target, dim in dims.items()}
        return dims

    def _reason(self, kind: str, aspects: dict[str, Hashable]) -> str:
        """What is new against the last program of this kind."""
        before = self._aspects.get(kind)
        self._aspects[kind] = aspects
        if before is None:
            return f"first {kind}"
        changed = [name for name, value in aspects.items() if before.get(name) != value]
        return "other " + ", ".join(changed)


def _fetcher(array, item: Output) -> Callable[[], Tensor]:
    return lambda: to_torch(array, item)
