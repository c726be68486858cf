"""The search: every strategy is estimated from a profile of its model-parallel axes, and the best ones by the real passes on the whole graph.

    1  candidates       every strategy that the request allows (`space.py`)
    2  profiles         the real passes for each (tp, cp, ep, local batch), on a graph in which equal layers are left out
    3  estimates        each candidate by arithmetic (`estimate.py`), in order of time; those that do not fit also with rematerialisation
    4  finalists        the real passes on the whole graph; the first ones that fit into the memory
    5  offload          where none does, all of it again with the optimizer's state on the host, which takes nothing but arithmetic and finalists

Profiles take nearly all of the time, so they are made in order of a lower bound, from small sizes of the model axes to large ones, until the
bounds of all others are above a strategy that fits: what a profile computes and exchanges over its model axes (`Profile.floor`) bounds those
in which one of these axes is larger, or a device works on more and smaller parts of the batch; before one is profiled, so does that together with what its data axes
would exchange, as no axis but tp and ep divides the weights (`Profile.bounded_by`). Of a profile's own pipelines, whose chunks make an estimate dear, those
are estimated that this bound leaves within what the model errs: rivals and ties are among them. That neither saves work or exchanges of a rank is a
property of the model of costs, which tests hold against estimates of every candidate; within it the order is optimal. So is that more microbatches
save nothing but a pipeline's bubble. What the model errs is said with the plan.
"""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.search.estimate import Estimate, Profile
from graphacc.search.evaluate import MODEL_PARALLEL, PROFILED, Evaluator
from graphacc.search.plan import Plan, Rival, size_text
from graphacc.search.space import CHOSEN, MICROBATCHES, REMATS, Limits, Refusals, Request, candidates
from graphacc.strategy.axes import EP, PP, TP
from graphacc.strategy.spec import OPTIMIZER, Strategy, field_text

FINALISTS = 3
"""Strategies that fit and are evaluated on the whole graph, at most, before the best is taken."""
AGREES = 0.02
"""Relative difference of estimate and evaluation up to which the first finalist is taken: the others' estimates then hold as well."""
TIE = 0.01
"""Relative difference in time below which less memory and fewer axes decide."""
HPZ_SAVES = 0.05
"""Share of a step that hpZ has to save, which takes more memory; its estimates are up to 4 % below what the real passes give."""
_BOUNDS = 4
"""Profiles by which one is bounded that is not made."""
_SHOWN = 5

Ranking = list[tuple[Strategy, Estimate]]


class Search(Evaluator):
    """The strategies of one captured step on one hardware.

    Args:
        frees_microbatches: they may be chosen unasked, where they give what the batch gives.
        offloads: the host may have the optimizer's state where nothing else fits; for optimizers that update every element by itself.
        options: as of `Evaluator`.
    """

    def __init__(self, joint: StepGraph, update: StepGraph | None, hardware: Hardware, *, offloads: bool = True, frees_microbatches: bool = True, **options: Any):
        super().__init__(joint, update, hardware, **options)
        self.offloads, self.frees_microbatches = offloads, frees_microbatches

    # ---- the search

    def run(self, request: Request, *, with_pin_costs: bool = True) -> Plan:
        """The fastest strategy that fits.

        Args:
            with_pin_costs: say what each pin costs, for which the strategies without it are estimated too.

        Raises:
            StrategyError: none does; with the pins and limits that conflict, and the least change of each that would do.
        """
        start, before = time.perf_counter(), sum(self.seconds.values())
        request = self._with_free_microbatches(request)
        ranked, finalists, num_slower, refusals = self._best(request)
        if not ranked:
            raise StrategyError(self._no_candidate(request, refusals))
        refused = [found for strategy, _ in ranked if isinstance(found := self._exact.get(strategy), str)]
        if len(refused) == len(ranked):
            raise StrategyError(self._no_candidate(request, Refusals(counts=dict(collections.Counter(refused)))))
        num_here, here = len(ranked), min(ranked, key=lambda item: (self.needed(self._known(*item)), str(item[0])))
        if not finalists and self._can_offload(request):
            there, finalists, num_slower, _ = self._best(_on_host(request))
            ranked = there if finalists else ranked + there
        if not finalists:
            raise StrategyError(self._infeasible(request, ranked))
        strategy, estimate = min(finalists, key=lambda item: item[1].seconds)
        notes = self._notes(strategy, ranked)
        if strategy.offload is not None and "offload" not in request.pins:
            least = f"the least is {size_text(self.needed(self._known(*here)))} of {size_text(self.memory_bytes)} ({here[0] or 'one device'})"
            notes = (f"offload: none of {num_here} strategies with the optimizer's state on the devices fits, {least}", *notes)
        pin_costs = self._pin_costs(request, ranked) if with_pin_costs else {}
        self._spent("estimates", start + sum(self.seconds.values()) - before)  # the rest
        return Plan(
            strategy=strategy,
            estimate=estimate,
            hardware=self.hardware,
            request=request.text,
            rivals=self._rivals(strategy, estimate, ranked),
            num_evaluated=len(ranked),
            num_slower=num_slower,
            num_over_memory=sum(not self.fits(found) for _, found in ranked),
            refusals=dict(refusals.counts),
            pin_costs=pin_costs,
            tokens=_tokens(self.joint, self.batch_dims, self.microbatches),
            model=described(self.joint),
            search_seconds=dict(self.seconds),
            notes=notes,
        )

    def _with_free_microbatches(self, request: Request) -> Request:
        """The request, in which microbatches are free where they give what the batch gives.

        CPU devices share their cores and memory, which no pipeline saves: there they are free where one is asked for.

        Raises:
            StrategyError: a pipeline is asked for, and no microbatches.
        """
        asks = request.pins.get(PP, 1) != 1
        if request.has_microbatches or "microbatches" in request.pins or not self.frees_microbatches or (self._is_cpu and not asks):
            return request
        if not self.microbatches_apart:
            return dataclasses.replace(request, exact_microbatches=True)
        if asks:
            raise StrategyError(
                f"auto with pp={request.pins[PP]}: a pipeline works on microbatches, which are not chosen unasked here, as each would stand for itself and the loss be the mean of theirs: "
                f"{self.microbatches_apart}; add microbatches=8, or microbatches=auto"
            )
        return request

    def _best(self, request: Request) -> tuple[Ranking, Ranking, int, Refusals]:
        """Candidates with their estimates; those that the real passes have evaluated, and that fit; how many others are slower; what was refused."""
        limit = 0.0
        while True:
            refusals = Refusals()
            ranked, limit, num_slower = self._ranked(request, refusals, limit)
            finalists = self._finalists(ranked)
            taken = min((estimate.seconds for _, estimate in finalists), default=math.inf)
            if not num_slower or taken <= limit:
                return ranked, finalists, num_slower, refusals
            limit = taken  # the real passes do not confirm the estimate that others were left out for

    def _can_offload(self, request: Request) -> bool:
        """Whether the host may have the optimizer's state; that of CPU devices has no memory of its own."""
        return "offload" not in request.pins and self.offloads and not self._is_cpu

    def plan_of(self, strategy: Strategy) -> Plan:
        """The plan of one strategy, which is not searched."""
        return Plan(
            strategy=strategy,
            estimate=self.evaluate(strategy),
            hardware=self.hardware,
            request=str(strategy),
            tokens=_tokens(self.joint, self.batch_dims, self.microbatches),
            model=described(self.joint),
            search_seconds=dict(self.seconds),
            notes=self._notes(strategy),
        )

    def _ranked(self, request: Request, refusals: Refusals, limit: float = 0.0) -> tuple[Ranking, float, int]:
        """Candidates with their estimates, the fastest first; equal ones by memory, number of axes and text, so that plans do not flip.

        Returns:
            Them; seconds, at least `limit`, above which bounds left others out; and how many others there are.
        """
        groups: dict[tuple, list[Strategy]] = {}  # strategies that share a profile
        for strategy in candidates(request, self.limits(), refusals):
            groups.setdefault((*self.profile_key(strategy), strategy.pp, strategy.microbatches), []).append(strategy)
        bounds = dict.fromkeys(sorted(groups, key=lambda key: (math.prod(_sizes(groups[key][0])), groups[key][0].microbatches)), 0.0)  # seconds that no strategy of a profile falls below
        found: Ranking = []
        profiled: list[tuple[Strategy, Profile]] = []
        best, num_slower = math.inf, 0
        while bounds:
            at = min(bounds, key=bounds.__getitem__)
            if bounds.pop(at) > max(limit, best * (1 + AGREES)):
                num_slower += sum(map(len, groups.values()))
                break
            members, profile = groups.pop(at), None
            if self._is_slower(members, profiled, max(limit, best * (1 + AGREES))):
                num_slower += len(members)
                continue
            with contextlib.suppress(StrategyError):  # `_estimated` notes it
                profile = self.profile_of(members[0])
                profiled.append((members[0], profile))
                floor = profile.floor(members[0], self.hardware)
                for key in bounds:
                    if _is_within(members[0], groups[key][0]):
                        bounds[key] = max(bounds[key], floor)
                if floor > max(limit, best * (1 + AGREES)):
                    num_slower += len(members)
                    continue
            left_out = [] if profile is None else self._far(members, profile, max(limit, best * (1 + AGREES)))
            num_slower += len(left_out)
            far = {strategy for strategy, _ in left_out}
            ranked = self._estimated([strategy for strategy in members if strategy not in far], refusals)
            busy = min((estimate.seconds - estimate.bubble_seconds - estimate.waiting_seconds for _, estimate in ranked + left_out), default=0.0)
            for key in bounds:  # more microbatches make smaller bubbles, and save nothing else
                if _has_more_microbatches(groups[key][0], members[0]):
                    bounds[key] = max(bounds[key], busy)
            if "remat" not in request.pins:
                ranked += self._rematerialised(ranked, best)
            found += ranked
            best = min([best, *(estimate.seconds for _, estimate in ranked if self.fits(estimate))])
        return sorted(found, key=_order), max(limit, best * (1 + AGREES)), num_slower

    def _far(self, members: list[Strategy], profile: Profile, limit: float) -> Ranking:
        """The pipelines among strategies of one profile that are above `limit` by more than the model errs, with what bounds them: of a pipeline a bound takes a tenth of an estimate."""
        if members[0].pp == 1:
            return []
        found = [(strategy, profile.bounded_by(members[0], strategy, self.hardware)) for strategy in members]
        return [(strategy, bound) for strategy, bound in found if bound.seconds > limit * (1 + self.hardware.error)]

    def _is_slower(self, members: list[Strategy], profiled: list[tuple[Strategy, Profile]], limit: float) -> bool:
        """Whether all strategies of one profile, which is not made yet, are above `limit` by one of the profiles of the largest model axes below theirs."""
        first = members[0]
        if first.offload is not None or self.profile_key(first) in self._profiles:
            return False
        within = sorted((item for item in profiled if _is_within(item[0], first)), key=lambda item: -math.prod(_sizes(item[0])))
        left = members
        for below, profile in within[:_BOUNDS]:  # one has the exchange of tokens, another one that of heads
            left = [strategy for strategy in left if profile.bounded_by(below, strategy, self.hardware).seconds <= limit]
            if not left:
                return True
        return False

    def _estimated(self, strategies: Iterable[Strategy], refusals: Refusals) -> Ranking:
        found: dict[Strategy, Estimate] = {}
        for strategy in strategies:
            try:
                found[strategy] = self.estimate(strategy)
            except StrategyError as error:
                refusals.add(str(error))
        for strategy in [strategy for strategy in found if strategy.hpz > 1]:
            plain = found.get(strategy.replace(hpz=1))
            if plain is not None and found[strategy].seconds > plain.seconds * (1 - HPZ_SAVES):
                del found[strategy]
                refusals.add(f"hpz saves less than {100 * HPZ_SAVES:.0f} % of the step, and takes more memory")
        return sorted(found.items(), key=_order)

    def _rematerialised(self, ranked: Ranking, best: float) -> Ranking:
        """Candidates over the memory with the least rematerialisation that lets them fit, or the most there is.

        Recomputation only adds time, so what is slower already than a strategy that fits, in `best` seconds, is left as it is.
        """
        best = min([best, *(estimate.seconds for _, estimate in ranked if self.fits(estimate))])
        found, strategies = [], {strategy for strategy, _ in ranked}
        for strategy, estimate in ranked:
            if estimate.seconds >= best:
                break
            saved = estimate.temporary_bytes if strategy.pp > 1 or best == math.inf else self.profile_of(strategy).saved_for_backward
            least = dataclasses.replace(estimate, temporary_bytes=max(0, estimate.temporary_bytes - saved))
            if self.fits(estimate) or not self.fits(least) or _gathers_over_all(strategy) in strategies:
                continue
            tried = [item for remat in REMATS[-1:] if (item := self._with_remat(strategy, remat)) is not None]  # spares most
            if tried and self.fits(tried[0][1]):
                less = (item for remat in REMATS[:-1] if (item := self._with_remat(strategy, remat)) is not None)
                tried = [next((item for item in less if self.fits(item[1])), tried[0])]
                best = min(best, tried[0][1].seconds)
            found += tried
        return found

    def _with_remat(self, strategy: Strategy, remat: Any) -> tuple[Strategy, Estimate] | None:
        other = strategy.replace(remat=remat)
        with contextlib.suppress(StrategyError):
            return other, self.estimate(other)
        return None

    def _finalists(self, ranked: Ranking) -> Ranking:
        """The first ones that fit by the real passes, until one takes the time that was estimated; at most `FINALISTS`.

        What is estimated a quarter above the memory is left out; so is hpZ above the memory, which takes more than the same without.
        """
        found: Ranking = []
        strategies = {strategy for strategy, _ in ranked}
        left = [item for item in ranked if self.fits(item[1]) or (self.needed(item[1]) <= 1.25 * self.memory_bytes and _gathers_over_all(item[0]) not in strategies)]
        while left and len(found) < FINALISTS:
            ties = [item for item in left if item[1].seconds <= left[0][1].seconds * (1 + TIE)]
            strategy, estimate = min(ties, key=lambda item: (not self.fits(item[1]), item[1].bytes_per_device, len(item[0].mesh), str(item[0])))
            left.remove((strategy, estimate))
            with contextlib.suppress(StrategyError):
                exact = self.evaluate(strategy)
                if self.fits(exact):
                    found.append((strategy, exact))
                    if abs(exact.seconds / estimate.seconds - 1) <= AGREES:
                        break
        return found

    def limits(self) -> Limits:
        """What of the space cannot be, before anything is evaluated."""
        experts = {item.shape[0] for item in self.joint.inputs if item.kind is Kind.PARAM and item.target in self._experts}
        named = {axis for spec in self.annotations.values() for axis in spec if axis is not None}
        inner = self.hardware.levels[0].size if self.hardware.levels and not self.hardware.shared_cores else None
        return Limits(
            batch_size=self.batch_size, num_experts=min(experts, default=0), host_devices=inner, needed=frozenset(named) & {TP, EP}
        )

    # ---- explanation

    def _rivals(self, strategy: Strategy, chosen: Estimate, ranked: Ranking) -> tuple[Rival, ...]:
        """The best of each other kind of mesh, with what it lost by."""
        found, kinds = [], {_kind(strategy)}
        for other, estimate in ranked:
            if _kind(other) in kinds or len(found) == _SHOWN:
                continue
            kinds.add(_kind(other))
            shown = self._known(other, estimate)
            tie = self.fits(shown) and shown.seconds <= chosen.seconds * (1 + self.hardware.error)
            found.append(Rival(strategy=other, estimate=shown, reason=self._reason(chosen, shown), is_tie=tie))
        return tuple(found)

    def _reason(self, chosen: Estimate, other: Estimate) -> str:
        if not self.fits(other):
            return f"needs {size_text(self.needed(other))} of {size_text(self.memory_bytes)}"
        mine, theirs = chosen.parts(), other.parts()
        difference = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
        name = max(difference, key=lambda key: (difference[key], key))
        total = other.seconds / chosen.seconds - 1
        if difference[name] <= 1e-6 * chosen.seconds:
            return f"{100 * total:+.1f} %: no faster, with more memory or more axes"
        return f"{100 * total:+.1f} %, most of it {name}, {1e3 * difference[name]:+.3g} ms"

    def _pin_costs(self, request: Request, ranked: Ranking) -> dict[str, float]:
        """Relative time that each pin costs, by estimates alone."""
        best = self._best_that_fits(ranked)
        found = {}
        for name in (name for name in request.pins if name in CHOSEN):
            free = self._fastest(request.without(name))
            if best is not None and free is not None:
                found[f"{name}={field_text(request.pins[name])}"] = best / free - 1
        return found

    def _fastest(self, request: Request) -> float | None:
        """Seconds of the fastest strategy of a request that fits, by estimates alone; None: none does."""
        found = self._best_that_fits(self._ranked(request, Refusals())[0])
        if found is None and self._can_offload(request):
            found = self._best_that_fits(self._ranked(_on_host(request), Refusals())[0])
        return found

    def _best_that_fits(self, ranked: Ranking) -> float | None:
        return next((estimate.seconds for strategy, estimate in ranked if self.fits(self._known(strategy, estimate))), None)

    def _known(self, strategy: Strategy, estimate: Estimate) -> Estimate:
        """The evaluation of a strategy where it was made, else its estimate."""
        exact = self._exact.get(strategy)
        return exact if isinstance(exact, Estimate) else estimate

    def _no_candidate(self, request: Request, refusals: Refusals) -> str:
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in sorted(refusals.counts.items(), key=lambda item: -item[1]))
        return f"{request.text} on {request.devices} devices: no strategy agrees with the pins and the step:{reasons or ' the sizes do not multiply to the number of devices'}"

    def _infeasible(self, request: Request, ranked: Ranking) -> str:
        """A minimal set of pins that conflicts with the memory, and the least change of each, and of the memory, that would do."""
        conflict = [name for name in request.pins if name in CHOSEN]
        for name in list(conflict):
            relaxed = dataclasses.replace(request, pins={key: value for key, value in request.pins.items() if key not in CHOSEN or (key in conflict and key != name)})
            if self._fastest(relaxed) is None:
                conflict.remove(name)
        needs = [(self.needed(self._known(strategy, estimate)), strategy) for strategy, estimate in ranked if not isinstance(self._exact.get(strategy), str)]
        least, smallest = min(needs, key=lambda item: (item[0], str(item[1])))
        pins = " with " + " and ".join(f"{name}={field_text(request.pins[name])}" for name in conflict) if conflict else ""
        lines = [
            f"no strategy of {request.devices} devices{pins} fits into {size_text(self.memory_bytes)} per device. It would fit with",
            f"  {size_text(least)} per device ({smallest})",
        ]
        for name in conflict:
            relaxed = request.without(name)
            requests = [relaxed, _on_host(relaxed)] if self._can_offload(relaxed) else [relaxed]
            ranking = (item for each in requests for item in self._ranked(each, Refusals())[0])
            freed = [s for s, e in ranking if getattr(s, name) != request.pins[name] and self.fits(self._known(s, e))]
            if freed:
                lines.append(f"  {name}={field_text(getattr(freed[0], name))} in the place of {name}={field_text(request.pins[name])} ({freed[0]})")
        if not request.has_microbatches and (fitting := self._with_microbatches(smallest)) is not None:
            loss = f", whose loss is the mean of theirs: {self.microbatches_apart}" if self.microbatches_apart else ""
            lines.append(f"  microbatches={fitting.microbatches} ({fitting}){loss}")
        if not conflict:
            lines.append("  more devices, a smaller batch, or accumulation over several smaller ones")
        return "\n".join(lines)

    def _with_microbatches(self, strategy: Strategy) -> Strategy | None:
        """The strategy with the fewest microbatches that let it fit; None where none do."""
        rows = self.batch_size
        for count in MICROBATCHES[1:]:
            if rows is None or rows % (strategy.data_ranks * count):
                continue
            with contextlib.suppress(StrategyError):
                found = strategy.replace(microbatches=count)
                if self.fits(self.estimate(found)):
                    return found
        return None

    def _notes(self, strategy: Strategy, ranked: Iterable[tuple[Strategy, Estimate]] = ()) -> tuple[str, ...]:
        unknown = "the optimizer is not known yet: AdamW's state is assumed", self.update is None
        unknown_host = self.hardware.host_update_seconds(gradient_bytes=1.0, parameter_bytes=1.0, update_bytes=1.0) is None
        on_host = f"offload: what the update on the host takes is not known of {self.hardware.chip.name}, and not in the seconds", strategy.offload is not None and unknown_host
        by_xla = "tp_by='spmd': seconds and bytes are those of GraphAcc's passes, and XLA's partitioner makes other collectives; --check xla compiles what it makes", strategy.tp_by == "spmd"
        refused = [f"{other} was left out, as the passes refuse it: {reason}" for other, _ in ranked if isinstance(reason := self._exact.get(other), str)]
        return (*(text for text, holds in (unknown, on_host, by_xla) if holds), *refused)


def described(step: StepGraph) -> dict[str, str]:
    """What a plan is for: every parameter with its shape, dtype, and whether it is trained."""
    return {item.target: describe_parameter(item.shape, item.dtype, item.trainable) for item in step.inputs if item.kind is Kind.PARAM}


def describe_parameter(shape: Iterable[int], dtype: object, trained: bool) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}{'' if trained else ', not trained'}"


def _order(item: tuple[Strategy, Estimate]) -> tuple:
    strategy, estimate = item
    return estimate.seconds, estimate.bytes_per_device, len(strategy.mesh), str(strategy)


def _sizes(strategy: Strategy) -> tuple[int, ...]:
    return strategy.tp, strategy.cp, strategy.ep


def _on_host(request: Request) -> Request:
    """The request with the optimizer's state on the host; in a pipeline that is one process's, which nobody gets unasked."""
    alone = request if PP in request.pins else request.with_pin(PP, 1)
    return alone.with_pin("offload", OPTIMIZER)


def _gathers_over_all(strategy: Strategy) -> Strategy | None:
    """A strategy with hpZ without it."""
    return strategy.replace(hpz=1) if strategy.hpz > 1 else None


def _is_within(smaller: Strategy, larger: Strategy) -> bool:
    """Whether the profile of one strategy bounds the other's: its model axes are divisors of the other's, and used alike, and a device works on fewer and larger parts of the batch."""
    if larger.microbatches * smaller.pp % (smaller.microbatches * larger.pp):
        return False
    divide = all(large % small == 0 for small, large in zip(_sizes(smaller), _sizes(larger), strict=True))
    return divide and (smaller.tp == 1 or smaller.sequence_parallel == larger.sequence_parallel) and (smaller.cp == 1 or smaller.context == larger.context)


def _has_more_microbatches(strategy: Strategy, other: Strategy) -> bool:
    """Whether a strategy's group differs from the other's by its number of microbatches, a multiple."""
    alike = all(getattr(strategy, name) == getattr(other, name) for name in (*PROFILED, PP))
    return alike and strategy.microbatches > other.microbatches and strategy.microbatches % other.microbatches == 0


def _kind(strategy: Strategy) -> tuple:
    """Strategies of one kind differ by how they share the state, and by how many microbatches there are."""
    return tuple(getattr(strategy, name) for name in (*MODEL_PARALLEL, PP, "schedule")), strategy.fsdp > 1, strategy.zero_stage, strategy.remat


def _tokens(step: StepGraph, batch_dims: Mapping[str, int | None], microbatches: int) -> int | None:
    """Elements of the first batch input of whole numbers, which are tokens; else rows; of all microbatches."""
    rows = None
    for item in step.inputs:
        dim = batch_dims.get(item.target) if item.kind is Kind.BATCH else None
        if dim is not None:
            if not item.dtype.is_floating_point and len(item.shape) == 2:
                return microbatches * item.shape[0] * item.shape[1]
            rows = rows or microbatches * item.shape[dim]
    return rows
