"""The plan of a whole strategy, as data: where every value of a captured step is placed along every mesh axis, and what moves.

    planner = Planner(step, batch_dims=default_batch_dims(step))
    print(planner.plan(Strategy(tp=2, fsdp=4)))

Axes are decided one after the other, each on the program that the axes before it leave to one rank. The last axis, and with it
every strategy of one axis, is decided without a graph being written; graphs between two axes are kept, so that strategies share what
they begin with alike. No operator is run: what an operator gives is known from the layers and the strategies before (`passes.edit.infer`).
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from graphacc import collector
from graphacc.graph import Input, Output, StepGraph
from graphacc.passes.communication.scatter_first import sums_in_front_of
from graphacc.passes.partition import AxisPlan, Move, Role, write
from graphacc.passes.partition.placement import REPLICATE, Placement, Shard
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel
from graphacc.passes.partition.write import signature
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import Log, Pass, key_of
from graphacc.strategy.spec import Strategy

_MAX_KEPT = 32  # graphs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a strategy does to a captured step."""

    strategy: Strategy
    axes: tuple[AxisPlan, ...]  # in the order in which they are decided
    placements: Mapping[str, Mapping[str, Placement]]  # value of the captured step -> mesh axis -> placement; an axis left out: replicated
    moves: tuple[Move, ...]  # along all axes; `size_bytes` is of what the other axes leave to a rank
    inputs: tuple[Input, ...]  # of the program of one rank
    outputs: tuple[Output, ...]

    def received_bytes(self, axis: str | None = None) -> int:
        """Bytes that one rank receives in a step, over one axis or all."""
        return sum(received_bytes(move, self.strategy.mesh[move.axis]) for move in self.moves if axis in (None, move.axis))

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[int]] = collections.defaultdict(lambda: [0, 0])
        for move in self.moves:
            if move.travels:
                row = rows[move.axis, move.phase.value, move.collective, move.role.value]
                row[0], row[1] = row[0] + 1, row[1] + move.size_bytes
        lines = [f"{'axis':6}{'phase':10}{'collective':16}{'of':18}{'count':>6}{'MB':>10}"]
        lines += [f"{axis:6}{phase:10}{kind:16}{role:18}{count:6}{size / 1e6:10.1f}" for (axis, phase, kind, role), (count, size) in sorted(rows.items())]
        return "\n".join([str(self.strategy) or "one device", *lines])


def received_bytes(move: Move, num_ranks: int) -> int:
    """What one rank receives in a bandwidth-optimal algorithm: (n - 1) / n of a tensor, for an all-reduce twice that
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009)."""
    if not move.travels:
        return 0
    if move.collective == "permute":
        return move.size_bytes
    share = move.size_bytes * (num_ranks - 1) // num_ranks
    return 2 * share if move.collective == "all_reduce" else share


@dataclasses.dataclass(frozen=True)
class _State:
    """A step between two passes, and where it has the values of the captured one and what moved so far."""

    step: StepGraph
    names: Mapping[str, str]  # value of the captured step -> node
    moves: tuple[tuple[Move, str, int], ...] = ()  # move, the node of its collective ("" for none), ranks over which later axes split it
    axes: tuple[AxisPlan, ...] = ()
    placements: Mapping[str, Mapping[str, Placement]] = dataclasses.field(default_factory=dict)

    def decided(self, plan: AxisPlan) -> "_State":
        """With one axis more, whose program is not written."""
        placements = dict(self.placements)
        for value, name in self.names.items():
            placement = plan.placements.get(name, REPLICATE)
            if placement != REPLICATE and not isinstance(placement, tuple):
                placements[value] = {**placements.get(value, {}), plan.axis: placement}
        scattered = _sums_of_parts(self.step, plan)
        before = [(move, name, ranks * (plan.num_ranks if name in scattered else _ranks(plan, name))) for move, name, ranks in self.moves]
        moves = (*before, *((move, "", 1) for move in plan.moves))
        return dataclasses.replace(self, axes=(*self.axes, plan), placements=placements, moves=moves)

    def written(self, plan: AxisPlan) -> "_State":
        """With one axis more, as the program of one of its ranks."""
        decided = self.decided(plan)
        step, report = write(self.step, plan)
        homes, collectives = report.homes, iter(report.collectives)
        before = [(move, homes.get(name, ""), ranks) for move, name, ranks in decided.moves[: len(self.moves)]]
        new = [(move, next(collectives).node.name if move.travels else "", 1) for move in plan.moves]
        names = {value: homes[name] for value, name in self.names.items() if name in homes}
        return dataclasses.replace(decided, step=step, names=names, moves=(*before, *new))


def _ranks(plan: AxisPlan, name: str) -> int:
    return plan.num_ranks if isinstance(plan.placements.get(name), Shard) else 1


def _sums_of_parts(step: StepGraph, plan: AxisPlan) -> set[str]:
    """The sums of gradients that are made behind the scatters of this plan (`SCATTER_FIRST`)."""
    scattered = {move.value for move in plan.moves if move.collective == "reduce_scatter" and move.role is Role.GRADIENT}
    return {sums.name for node in step.graph.nodes if node.name in scattered for sums in sums_in_front_of(node, scattered=True)}


class Planner:
    """Plans one captured step under many strategies.

    Args:
        step: a captured step, with global shapes. It is not changed.
        batch_dims, splits, experts: as of `build_pipeline`.
    """

    def __init__(
        self,
        step: StepGraph,
        *,
        batch_dims: Mapping[str, int | None],
        splits: Mapping[str, Shard] | None = None,
        experts: Collection[str] | None = None,
    ):
        self.step, self.batch_dims, self.splits, self.experts = step, dict(batch_dims), splits, experts
        self._states: collections.OrderedDict[tuple, _State] = collections.OrderedDict()  # keys of passes -> what they leave
        self._plans: collections.OrderedDict[tuple, AxisPlan] = collections.OrderedDict()
        self._found: dict[int, Mapping[str, Shard]] = {}  # tp -> splits

    def plan(self, strategy: Strategy) -> StepPlan:
        """The plan of `strategy`; stages of a pipeline and microbatches are not part of it.

        Raises:
            StrategyError: the strategy does not fit the step, as in `build_pipeline`.
        """
        with collector.paused():
            return self._planned(strategy.within_stage)

    def _planned(self, strategy: Strategy) -> StepPlan:
        splits = self.splits
        if splits is None and strategy.tp > 1:
            if strategy.tp not in self._found:
                self._found[strategy.tp] = find_tensor_parallel(self.step, strategy.tp, {}).splits
            splits = self._found[strategy.tp]
        passes = build_pipeline(self.step, strategy, batch_dims=self.batch_dims, splits=splits, experts=self.experts)
        last = max((i for i, item in enumerate(passes) if item.decide is not None), default=None)
        state = self._after(passes if last is None else passes[:last])
        inputs, outputs = state.step.inputs, state.step.outputs
        if last is not None:
            plan = self._decide(passes[: last + 1], state.step)
            state, (inputs, outputs) = state.decided(plan), signature(state.step, plan)
        moves = tuple(move if ranks == 1 else dataclasses.replace(move, size_bytes=move.size_bytes // ranks) for move, _, ranks in state.moves)
        return StepPlan(strategy=strategy, axes=state.axes, placements=state.placements, moves=moves, inputs=inputs, outputs=outputs)

    def _after(self, passes: Sequence[Pass]) -> _State:
        """The step after these passes; the longest beginning that is known is not run again."""
        known = max((i for i in range(1, len(passes) + 1) if key_of(passes[:i]) in self._states), default=0)
        if known:
            state = self._states[key_of(passes[:known])]
            self._states.move_to_end(key_of(passes[:known]))
        else:
            state = _State(self.step, {node.name: node.name for node in self.step.graph.nodes})
        fresh = False  # whether the step is nobody else's, so that a pass may change it in place
        for i, item in enumerate(passes[known:], start=known):
            if item.decide is not None:
                state, fresh = state.written(self._decide(passes[: i + 1], state.step)), True
            else:
                step = item.run(state.step if fresh else state.step.copy(), Log())
                present = {node.name for node in step.graph.nodes}
                names = {value: name for value, name in state.names.items() if name in present}
                state, fresh = dataclasses.replace(state, step=step, names=names), True
            if i + 1 == len(passes) or passes[i + 1].decide is not None:
                _remember(self._states, key_of(passes[: i + 1]), state)
                fresh = False
        return state

    def _decide(self, passes: Sequence[Pass], step: StepGraph) -> AxisPlan:
        """The plan of the last of these passes."""
        key = key_of(passes)
        if key not in self._plans:
            decide = passes[-1].decide
            assert decide is not None, f"{passes[-1].name} is no partition"
            _remember(self._plans, key, decide(step))
        return self._plans[key]


def _remember(kept: collections.OrderedDict, key: tuple, value: object) -> None:
    kept[key] = value
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
