"""What a strategy takes, by arithmetic from a profile of its model axes or by the real passes on the whole graph.

A profile is the program of one rank of (tp, cp, ep) at the strategy's local batch, of a step in which equal layers are left out; `estimate.py` composes from it what
the data axes and ZeRO add, `pipeline.py` what stages and their schedule do. Evaluations read the whole program. Tests hold the two within 2 % in time.
"""

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from graphacc import collector
from graphacc._compat.torch_ import without_function_modes
from graphacc.capture import stitch
from graphacc.costs.hardware import Hardware
from graphacc.costs.memory import predict_memory, released_bytes, saved_for_backward, unchanged, working_bytes
from graphacc.costs.repeats import reduce_repeats
from graphacc.errors import GraphError, StrategyError
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.passes.accumulation import accumulating
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.experts import find_experts
from graphacc.passes.microbatches import Inseparable, in_microbatches
from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel, pinned_placements
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import Pass, key_of, run_passes
from graphacc.passes.stages import Segment, cut, marked_places, update_places
from graphacc.search.cost import RETURNED, Moved, cost_of, path_of, value_bytes
from graphacc.search.estimate import Estimate, Profile, evaluated
from graphacc.search.pipeline import ChunkCost, Depth, chunks_of_profile, chunks_of_segments, estimate_of
from graphacc.strategy.axes import CP, EP, TP
from graphacc.strategy.schedules import build_schedule
from graphacc.strategy.spec import Strategy

log = logging.getLogger("graphacc")

MARGIN = 0.08
"""Of temporaries, over what is predicted."""
MODEL_PARALLEL = (TP, "sequence_parallel", CP, "context", EP)
PROFILED = (*MODEL_PARALLEL, "precision", "reduce_dtype", "capacity_factor", "loss_chunks")
"""Fields that decide a profile, besides the local batch."""

Made = TypeVar("Made", Profile, Estimate)


class Evaluator:
    """One captured step on one hardware.

    Args:
        joint: forward and backward, with global shapes; not changed.
        update: the optimizer's step; None: not known yet, AdamW's state and traffic are assumed.
        batch_dims: as of `build_pipeline`.
        annotations: parameter -> mesh axis of every dim.
        memory_bytes: of one device that a step may use; None: what the hardware has.
        accumulates: gradients stay on the devices between programs, of which forward and backward are one, and the update another.
        microbatches: of how many equal parts of the batch `joint` has one.
        capture: gives the joint of another number of microbatches; None: there is none.
    """

    def __init__(
        self,
        joint: StepGraph,
        update: StepGraph | None,
        hardware: Hardware,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        annotations: Mapping[str, Iterable[str | None]] | None = None,
        memory_bytes: int | None = None,
        accumulates: bool = False,
        microbatches: int = 1,
        capture: Callable[[int], StepGraph] | None = None,
    ):
        self.joint, self.update, self.hardware, self.accumulates = joint, update, hardware, accumulates
        self.microbatches = microbatches
        self._is_cpu = hardware.shared_cores > 0
        self._joints = {microbatches: joint}
        self._capture = capture
        self.batch_dims = default_batch_dims(joint) | dict(batch_dims or {})
        self.annotations = {name: tuple(spec) for name, spec in (annotations or {}).items()}
        self.memory_bytes = hardware.usable_bytes if memory_bytes is None else memory_bytes
        self.seconds: dict[str, float] = {}
        self._profiles: dict[tuple, Profile | str] = {}  # a reason, where the passes refuse
        self._begun: dict[tuple, StepGraph] = {}
        self._exact: dict[Strategy, Estimate | str] = {}
        self._splits: dict[int, Mapping] = {}
        self._experts = find_experts(joint)
        self.reduced = reduce_repeats(joint)
        self._state = _state_bytes(update)

    @property
    def batch_size(self) -> int | None:
        """Rows that the data axes and microbatches split; None without a batch."""
        sizes = [item.shape[dim] for item in self.joint.inputs if item.kind is Kind.BATCH and (dim := self.batch_dims.get(item.target)) is not None]
        return self.microbatches * sizes[0] if sizes else None

    @functools.cached_property
    def microbatches_apart(self) -> str:
        """Why microbatches would not give what the batch gives, or not save anything; empty if they do."""
        if self.microbatches > 1:
            return f"the step was captured with {self.microbatches} of them"
        rows = self.batch_size
        if rows is None or rows % 2:
            return "no examples are seen in the batch" if rows is None else f"the batch has {rows} examples"
        start = time.perf_counter()
        try:
            with without_function_modes(), collector.paused():
                return in_microbatches(self.joint, 2, self.batch_dims).repeated
        except (Inseparable, GraphError) as error:
            return str(error)
        finally:
            self._spent("microbatches", start)

    def profile_of(self, strategy: Strategy) -> Profile:
        """What a rank of the strategy's model axes does at its local batch.

        Raises:
            StrategyError: the passes refuse the strategy.
        """
        return self._made_once(self._profiles, self.profile_key(strategy), lambda: self._profile(strategy), "profiles")

    def estimate(self, strategy: Strategy) -> Estimate:
        """By arithmetic from a profile.

        Raises:
            StrategyError: the passes refuse the strategy.
        """
        profile = self.profile_of(strategy)
        if strategy.pp > 1:
            return estimate_of(self._chunks(profile, strategy), strategy, self.hardware, plays=False)
        found = profile.estimate(strategy, self.hardware)
        return self._with_gradients(found, strategy)

    def _chunks(self, profile: Profile, strategy: Strategy) -> list[ChunkCost]:
        return chunks_of_profile(profile, self._depth, strategy, self.hardware, self.microbatches / (strategy.microbatches * strategy.data_ranks))

    @functools.cached_property
    def _depth(self) -> Depth:
        return Depth(self.reduced)

    def evaluate(self, strategy: Strategy) -> Estimate:
        """By the real passes on the whole graph.

        Raises:
            StrategyError: the passes refuse the strategy.
        """
        return self._made_once(self._exact, strategy, lambda: self._evaluate(strategy), "finalists")

    def _made_once(self, known: dict[Any, Made | str], key: Hashable, make: Callable[[], Made], part: str) -> Made:
        """What is kept under a key, or made now; where it was refused, a StrategyError with the reason."""
        if key not in known:
            start = time.perf_counter()
            try:
                with without_function_modes():
                    known[key] = make()
            except Exception as error:
                known[key] = _reason_of(error)
            self._spent(part, start)
        found = known[key]
        if isinstance(found, str):
            raise StrategyError(found)
        return found

    def fits(self, estimate: Estimate) -> bool:
        return self.needed(estimate) <= self.memory_bytes

    def needed(self, estimate: Estimate) -> int:
        """Bytes of a device that a step may need: temporaries with their margin, and with what another order of collectives would add."""
        return round(estimate.bytes_per_device + estimate.order_bytes + MARGIN * estimate.temporary_bytes)

    def profile_key(self, strategy: Strategy) -> tuple:
        return (*(getattr(strategy, name) for name in PROFILED), _profiled_remat(strategy), self._rows(strategy))

    def _rows(self, strategy: Strategy) -> int:
        """By how much the data axes and microbatches divide the rows of the captured batch."""
        return strategy.dp * strategy.fsdp * strategy.microbatches // self.microbatches

    def _profile(self, strategy: Strategy) -> Profile:
        plain = Strategy(
            **{name: getattr(strategy, name) for name in PROFILED},
            remat=_profiled_remat(strategy),
            dp=self._rows(strategy),
            bucket_mb=0,
        )
        local = self._begun_alike(plain)
        with unchanged(local):
            return self._read(local)

    def _read(self, local: StepGraph) -> Profile:
        """The profile of a program of one device."""
        cost = cost_of(local, self.hardware, self.reduced.count, self._experts)
        whole = {item.target: _input_bytes(item) for item in self.joint.inputs if item.kind is Kind.PARAM}
        state = {w.name: round(self._state_of(w.name, whole[w.name]) * w.size_bytes / max(1, whole[w.name])) for w in cost.weights if w.trained}
        working: dict[str, int] = {}
        for node, size in working_bytes(local, cpu=self._is_cpu).items():
            working[path_of(node)] = max(size, working.get(path_of(node), 0))
        return Profile(
            cost=cost,
            temporary_bytes=predict_memory(local, cpu=self._is_cpu).temporary_bytes,
            released_bytes=released_bytes(local, cpu=self._is_cpu),
            saved_bytes=sum(saved_for_backward(local, cpu=self._is_cpu).values()),
            state_bytes=state,
            updates=self.update is not None and not self.accumulates,
            accumulates=self.accumulates,
            working_bytes=working,
        )

    def _evaluate(self, strategy: Strategy) -> Estimate:
        """The update's traffic is known without a graph: parameters and state are read and written once, gradients read."""
        if strategy.pp > 1:
            chunks = chunks_of_segments(self.segments_of(strategy), self._chunks(self.profile_of(strategy), strategy), strategy, self.hardware)
            return estimate_of(chunks, strategy, self.hardware, plays=True)
        profile = self.estimate(strategy)
        update = self._update_in(strategy)
        local = self.program_of(strategy)
        with unchanged(local):
            memory, cost = predict_memory(local, cpu=self._is_cpu, planned=self._is_cpu), cost_of(local, self.hardware)
        held = dict.fromkeys(Kind, 0)
        for node, item in zip(local.placeholders, local.inputs):
            held[item.kind] += value_bytes(node)
        returned = sum(value_bytes(node) for node, item in zip(local.results, local.outputs) if item.kind in RETURNED)
        found = evaluated(
            cost,
            strategy,
            self.hardware,
            update_seconds=profile.update_seconds,
            in_update=self._moved_by_update(strategy) if update is None else (),
            parameter_bytes=held[Kind.PARAM],
            state_bytes=profile.state_bytes if update is None else held[Kind.STATE],
            other_bytes=sum(size for kind, size in held.items() if kind not in (Kind.PARAM, Kind.STATE)) + (strategy.microbatches - 1) * held[Kind.BATCH] + strategy.microbatches * returned,
            temporary_bytes=memory.temporary_bytes,
            order_bytes=memory.ordered_bytes - memory.temporary_bytes,
            host_bytes=profile.host_bytes,
        )
        return found if held[Kind.GRAD] else self._with_gradients(found, strategy)

    def _moved_by_update(self, strategy: Strategy) -> list[Moved]:
        """What the update moves as a program of its own, known without its graph."""
        return [item for item in self.profile_of(strategy).composed(strategy, self.hardware).moved if item.phase is Phase.UPDATE]

    def program_of(self, strategy: Strategy) -> StepGraph:
        """The step's program of one device: with the update where that is known and in the same program.

        Raises:
            StrategyError, GraphError: the passes refuse the strategy.
        """
        return self.local(self.step_of(strategy), strategy)

    def step_of(self, strategy: Strategy) -> StepGraph:
        """The captured step: with the update where that is known and in the same program; gradients that stay between programs add up."""
        update, joint = self._update_in(strategy), self._joint_of(strategy)
        if strategy.microbatches > 1 or (self.accumulates and strategy.offload is None):
            return accumulating(joint)
        return joint if update is None else stitch(joint, update)

    def segments_of(self, strategy: Strategy) -> list[Segment]:
        """The programs of forward and backward of one microbatch, of all stages of a pipeline.

        Raises:
            StrategyError, GraphError: the passes refuse the strategy.
        """
        local = self.local(self.step_of(strategy), strategy)
        schedule = build_schedule(strategy.schedule, strategy.pp, strategy.microbatches, strategy.chunks)
        places = marked_places(local, strategy.pp, strategy.pp * strategy.chunks, schedule.splits_backward)
        return cut(local, places, strategy.within_stage.mesh)

    def update_segments_of(self, strategy: Strategy, homes: Mapping[str, int]) -> list[Segment]:
        """The programs of the update, of all stages of a pipeline.

        Args:
            homes: parameter -> its stage.

        Raises:
            StrategyError, GraphError: the passes refuse the strategy, or there is no update.
        """
        if self.update is None:
            raise StrategyError(f"{strategy}: the step has no update")
        local = self.local(self.update, strategy, homes)
        owners = {item.target: homes.get(item.target, 0) for item in local.inputs if item.kind in (Kind.PARAM, Kind.GRAD)}
        return cut(local, update_places(local, owners), strategy.within_stage.mesh)

    def _joint_of(self, strategy: Strategy) -> StepGraph:
        """Forward and backward of one of the strategy's microbatches."""
        count = strategy.microbatches
        if count not in self._joints:
            if not self.microbatches_apart:
                with without_function_modes():
                    self._joints[count] = in_microbatches(self.joint, count, self.batch_dims).step
            elif self._capture is None:
                raise StrategyError(f"{strategy}: the step was captured with {self.microbatches} microbatches")
            else:
                self._joints[count] = self._capture(count)
        return self._joints[count]

    def _update_in(self, strategy: Strategy) -> StepGraph | None:
        """The update, where it is a part of the step's program."""
        return None if self.accumulates or strategy.microbatches > 1 or strategy.offload is not None else self.update

    def local(self, step: StepGraph, strategy: Strategy, homes: Mapping[str, int] = MappingProxyType({})) -> StepGraph:
        """The program of one device that the passes make of a captured graph; homes as of `build_pipeline`."""
        with collector.paused():
            return run_passes(step.copy(), self._passes(step, strategy, homes))[0]

    def _passes(self, step: StepGraph, strategy: Strategy, homes: Mapping[str, int] = MappingProxyType({})) -> list[Pass]:
        return build_pipeline(step, strategy, batch_dims=self.dims_of(step), splits=self.splits_of(strategy), homes=homes, experts=self._experts)

    def _begun_alike(self, strategy: Strategy) -> StepGraph:
        """The program of one device of the reduced step, unchecked, as it is only read. What stands in front of each partition is kept, for strategies that begin alike; a partition does not change it."""
        step = self.reduced.step
        passes = self._passes(step, strategy)
        keys = key_of(passes)
        ends = [i for i, item in enumerate(passes) if i and item.decide is not None]
        known = max((end for end in ends if keys[:end] in self._begun), default=0)
        found = self._begun[keys[:known]] if known else step.copy()
        with collector.paused():
            for start, end in itertools.pairwise([known, *(end for end in ends if end > known), len(passes)]):
                found, _ = run_passes(found, passes[start:end], checks=False)
                if end < len(passes):
                    self._begun[keys[:end]] = found
        return found

    def splits_of(self, strategy: Strategy) -> Mapping[str, Shard] | None:
        """The splits of parameters along `tp`; None without the axis."""
        if strategy.tp == 1:
            return None
        if strategy.tp not in self._splits:
            pinned = pinned_placements(self.annotations, TP)
            if pinned:  # they may tell equal blocks apart
                self._splits[strategy.tp] = find_tensor_parallel(self.joint, strategy.tp, pinned).splits
            else:
                found = find_tensor_parallel(self.reduced.step, strategy.tp, {}).splits
                self._splits[strategy.tp] = self.reduced.everywhere(found, (item.target for item in self.joint.inputs if item.kind is Kind.PARAM))
        return self._splits[strategy.tp]

    def dims_of(self, step: StepGraph) -> dict[str, int | None]:
        """Target of every BATCH input -> the dim that is split over the data axes; code on gradients has inputs of its own."""
        return {item.target: self.batch_dims.get(item.target) for item in step.inputs if item.kind is Kind.BATCH}

    def _with_gradients(self, estimate: Estimate, strategy: Strategy) -> Estimate:
        """With the gradients that stay between programs, where any do."""
        if self._update_in(strategy) is not None or (self._is_cpu and not self.accumulates and strategy.microbatches == 1 and strategy.offload is None):
            return estimate
        kept = self.profile_of(strategy).gradient_bytes(strategy)
        return dataclasses.replace(estimate, other_bytes=estimate.other_bytes + kept)

    def _state_of(self, name: str, parameter_bytes: int) -> int:
        return 2 * parameter_bytes if self._state is None else self._state.get(name, 0)

    def _spent(self, part: str, start: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def _reason_of(error: Exception) -> str:
    """Why the passes do not take a strategy. Other errors than refusals are defects of a pass; the plan lists them, and the other strategies can still be chosen."""
    text = str(error).partition("\n")[0]
    if isinstance(error, (StrategyError, GraphError)):
        return text
    log.debug("graphacc: a pass failed in the search", exc_info=error)
    return f"a pass failed: {type(error).__name__}: {text}"


def _state_bytes(update: StepGraph | None) -> dict[str, int] | None:
    """Parameter -> bytes of its optimizer state, whole."""
    if update is None:
        return None
    found: dict[str, int] = {}
    for item in update.inputs:
        if item.kind is Kind.STATE:
            name = item.target.rpartition("/")[0]
            found[name] = found.get(name, 0) + _input_bytes(item)
    return found


def _input_bytes(item) -> int:
    size = item.dtype.itemsize
    for n in item.shape:
        size *= n
    return size


def _profiled_remat(strategy: Strategy) -> str | tuple[tuple[str, str], ...]:
    """What of `remat` a profile knows: "auto" looks at the memory of the whole graph, and is left to the finalists."""
    return "none" if strategy.remat == "auto" else strategy.remat
