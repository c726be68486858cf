"""Time and memory of pipelines: of the costs of each chunk of the model, and of the schedule that the chunks run by.

The costs of chunks come from a profile, whose layers are dealt out to the chunks as the stage passes deal them out (`Depth`), or from the
programs that those passes make (`chunks_of_segments`). Composed are

    seconds   the dearest stage's work for all microbatches, and the bubble: what the schedule, played with each chunk's own costs, takes longer
    memory    of the stage that needs most: its state, and what its microbatches in flight hold between forward and backward

A profile's estimate takes the bubble of equal stages but the dearest (Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv
2401.10241, section 2), an evaluation plays the schedule.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from graphacc.costs.hardware import Hardware
from graphacc.costs.memory import predict_memory
from graphacc.costs.repeats import Reduced
from graphacc.costs.seconds import collective_seconds
from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase
from graphacc.passes.attention import ATTACH_ATTENTION
from graphacc.passes.experts import ATTACH_EXPERTS
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import run_passes
from graphacc.passes.stages import Segment
from graphacc.passes.stages.assign import dealt
from graphacc.passes.stages.units import Unit, cuts, forward_part, units, work
from graphacc.search.cost import RETURNED, GraphCost, cost_of, value_bytes
from graphacc.search.estimate import Estimate, Profile, Timed, timed
from graphacc.strategy.axes import PP
from graphacc.strategy.schedules import Costs, Part, Schedule, build_schedule, simulate
from graphacc.strategy.spec import Strategy

_WEIGHTS_SHARE = 0.5
"""Of a backward, for gradients of weights: of the two products behind each product of the forward one."""
_SAVED_FOR_WEIGHTS, _HANDED_ON = 0.25, 0.4
"""Of what a forward leaves for its backward, where gradients of weights are computed apart: what these still read, and what a backward leaves for them as much as (GPT-2, Llama, Mixtral: 0.09 to 0.27, 0.31 to 0.46)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkCost:
    """What one chunk of the model takes for one microbatch, and keeps, on one device of its stage."""

    seconds: Mapping[Part, float]  # with the messages that are waited for
    exposed: Mapping[str, float]  # mesh axis -> seconds of these
    hidden: float
    update_seconds: float  # for all microbatches together, as the ones below
    update_exposed: Mapping[str, float]
    parameter_bytes: int
    state_bytes: int
    gradient_bytes: int  # that stay until the update
    other_bytes: int
    host_bytes: int
    held_bytes: int  # of one microbatch, from its forward to its backward,
    held_for_weights_bytes: int  # to the gradients of its weights, where these are computed apart,
    handed_on_bytes: int  # and from its backward to these
    working_bytes: int  # temporaries of the program that needs most
    sent_bytes: float  # to the next chunk, and back as a gradient


# ---- from a profile


class Depth:
    """The forward part of a step in the order of the program, with the equal blocks that were left out of it, and with its attention and experts as they are when a step is cut."""

    def __init__(self, reduced: Reduced):
        step, _ = run_passes(reduced.step.copy(), [ATTACH_ATTENTION, ATTACH_EXPERTS], checks=False)
        forward = forward_part(step)
        self._units = units(forward, cuts(forward))
        expanded = _expanded(self._units, reduced)
        self._order = [i for i, _ in expanded]
        self._dealt_units = [dataclasses.replace(self._units[i], block=f"{self._units[i].block}#{number}") if number else self._units[i] for i, number in expanded]  # as blocks of their own, for a cut inside of a block costs more
        self._readers: dict[str, list[int]] = {}  # parameter -> the units that read it
        shares: dict[str, np.ndarray] = {}
        for i, unit in enumerate(self._units):
            for name in unit.parameters:
                self._readers.setdefault(name, []).append(i)
            for node in unit.nodes:
                path = node.meta.get("module_path") or ""
                shares.setdefault(path, np.zeros(len(self._units)))[i] += work(node) + 1e-9
        self._shares = {path: found / found.sum() for path, found in shares.items()}
        self.edges = functools.cache(self._dealt)
        self._counts = functools.cache(self._counted)
        self.parts = functools.lru_cache(maxsize=512)(self._parts)

    def _dealt(self, num_chunks: int, num_stages: int) -> list[int]:
        """Chunk c has the units at the places ``edges[c]`` to ``edges[c + 1] - 1`` of the order.

        Raises:
            StrategyError: there are fewer blocks than chunks.
        """
        found = self._dealt_units
        edges = dealt(found, num_chunks, num_stages) if len(found) >= num_chunks else None
        if edges is None:
            raise StrategyError(f"a pipeline of {num_chunks} chunks needs as many blocks between narrow cuts, and the model has {len(found)}")
        return edges

    def _counted(self, num_chunks: int, num_stages: int) -> np.ndarray:
        """How often each unit stands in each chunk [units, chunks]."""
        edges, counts = self.edges(num_chunks, num_stages), np.zeros((len(self._units), num_chunks))
        for chunk in range(num_chunks):
            for i in self._order[edges[chunk] : edges[chunk + 1]]:
                counts[i, chunk] += 1
        return counts

    def sent_bytes(self, num_chunks: int, num_stages: int) -> list[float]:
        """Between each chunk and the next, for the captured batch, before anything is split; 0 behind the last."""
        return [*(self._units[self._order[edge]].crossing_bytes for edge in self.edges(num_chunks, num_stages)[1:-1]), 0.0]

    def _parts(self, profile: Profile, num_chunks: int, num_stages: int) -> list[Profile]:
        """The profile's work and state in each chunk; equal chunks have one object.

        Raises:
            StrategyError: there are fewer blocks than chunks.
        """
        counts = self._counts(num_chunks, num_stages)
        last = np.zeros(num_chunks)
        last[-1] = 1.0

        @functools.cache
        def share(path: str) -> np.ndarray:
            """Of what stands once in each place of a module, how much each chunk has; behind all modules, the last chunk's."""
            while path not in self._shares:
                if not path:
                    return last
                path = path.rpartition(".")[0]
            found = self._shares[path] @ counts
            return found / found.sum()

        cost = profile.cost
        seconds = {phase: np.zeros(num_chunks) for phase in Phase}
        for kernel, time in zip(cost.kernels, cost.kernel_seconds, strict=True):
            seconds[kernel.phase] += kernel.count * time * share(kernel.path)
        saved = sum((item.size_bytes * item.count * share(item.path) for item in cost.held), np.zeros(num_chunks))
        working = np.zeros(num_chunks)
        for path, size in profile.working_bytes.items():
            working = np.maximum(working, size * (share(path) > 0))
        others, batch = (cost.other_bytes - cost.returned_bytes) / num_chunks, cost.batch_bytes / num_chunks
        totals = [sum((np.outer(both, share(path)) for path, both in item.by_path.items()), np.zeros((3, num_chunks))) for item in cost.moved]
        found: list[Profile] = []
        equal: dict[tuple[bytes, bool], Profile] = {}  # most chunks have as many of each layer as others
        for chunk in range(num_chunks):
            key = counts[:, chunk].tobytes(), chunk == num_chunks - 1
            if key in equal:
                found.append(equal[key])
                continue
            moved = tuple(
                dataclasses.replace(
                    item, number=float(number), size_bytes=float(size), beside_seconds=float(beside), by_path={}, each=tuple((path, one, count * share(path)[chunk]) for path, one, count in item.each)
                )
                for item, total in zip(cost.moved, totals)
                for number, size, beside in [total[:, chunk]]
            )
            returned = cost.returned_bytes if chunk == num_chunks - 1 else 0
            weights = tuple(dataclasses.replace(weight, count=number) for weight in cost.weights if (number := self._number_of(weight.name, counts, chunk, num_chunks)))
            part = dataclasses.replace(
                cost, kernels=(), kernel_seconds=(), seconds={phase: float(times[chunk]) for phase, times in seconds.items()},
                moved=moved, weights=weights, other_bytes=round(others + returned), batch_bytes=round(batch), returned_bytes=returned, saved_bytes=round(saved[chunk]), held=(),
            )  # fmt: skip
            equal[key] = dataclasses.replace(profile, cost=part, temporary_bytes=round(working[chunk]), released_bytes=round(working[chunk]), saved_bytes=0, working_bytes={})
            found.append(equal[key])
        return found

    def _number_of(self, name: str, counts: np.ndarray, chunk: int, num_chunks: int) -> int:
        """How many parameters of this name, those of equal blocks included, the chunk has; one that several units read once."""
        readers = self._readers.get(name)
        if readers is None:
            return int(chunk == num_chunks - 1)
        numbers = [counts[i, chunk] for i in readers]
        return round(max(numbers))


def _expanded(found: Sequence[Unit], reduced: Reduced) -> list[tuple[int, int]]:
    """Units in their order, those that stand for several groups of blocks as often, each with the number of its group among these."""
    groups = {path: (i, k) for i, item in enumerate(reduced.classes) for k, group in enumerate(item.kept) for path in group}

    def group_of(unit: Unit) -> tuple[int, int] | None:
        weights: dict[tuple[int, int] | None, float] = {}
        for node in unit.nodes:
            path = node.meta.get("module_path") or ""
            while path and path not in groups:
                path = path.rpartition(".")[0]
            key = groups.get(path)
            weights[key] = weights.get(key, 0.0) + work(node) + 1e-9
        return max(weights, key=lambda key: weights[key])

    order: list[tuple[int, int]] = []
    labels = [group_of(unit) for unit in found]
    start = 0
    while start < len(found):
        end = start + 1
        while end < len(found) and labels[end] == labels[start] and labels[start] is not None:
            end += 1
        label = labels[start]
        item = None if label is None else reduced.classes[label[0]]
        times = 1 if item is None or label is None or label[1] != 1 else 1 + len(item.groups) - len(item.kept)
        order += [(i, number) for number in range(times) for i in range(start, end)]
        start = end
    return order


def chunks_of_profile(profile: Profile, depth: Depth, strategy: Strategy, hardware: Hardware, batch_share: float, *, sums_once: bool = False) -> list[ChunkCost]:
    """Costs of the chunks, by arithmetic.

    Args:
        batch_share: of the captured batch, how much of it one microbatch of a device has; `cp` divides it further.
        sums_once: as of `Profile.estimate`.

    Raises:
        StrategyError: the model has fewer blocks than the strategy has chunks.
    """
    num_chunks = strategy.pp * strategy.chunks
    sent_share = batch_share / strategy.cp / (strategy.tp if strategy.sequence_parallel else 1)
    parts = depth.parts(profile, num_chunks, strategy.pp)
    costs = {id(part): _chunk_of(part, strategy, hardware, sums_once) for part in {id(part): part for part in parts}.values()}
    return [dataclasses.replace(costs[id(part)], sent_bytes=sent * sent_share) for part, sent in zip(parts, depth.sent_bytes(num_chunks, strategy.pp), strict=True)]


def _chunk_of(part: Profile, strategy: Strategy, hardware: Hardware, sums_once: bool) -> ChunkCost:
    """Costs of one chunk that sends nothing on."""
    composed = part.composed(strategy, hardware, sums_late=not sums_once)
    late = [item for item in composed.moved if sums_once and item.role is Role.GRADIENT]
    time = timed(composed.seconds, [item for item in composed.moved if item not in late], strategy, hardware)
    behind = timed({**dict.fromkeys(Phase, 0.0), Phase.BACKWARD: time.compute[Phase.BACKWARD]}, late, strategy, hardware, are_all=False).exposed_by_axis()
    forward, backward = (_seconds_of(time, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    splits = strategy.schedule == "zb-h1"
    weights = _WEIGHTS_SHARE * backward if splits else 0.0
    for_weights, handed_on = (round(share * part.cost.saved_bytes) if splits else 0 for share in (_SAVED_FOR_WEIGHTS, _HANDED_ON))
    return ChunkCost(
        seconds={Part.FORWARD: forward, Part.BACKWARD: backward - weights, Part.WEIGHTS: weights},
        exposed=_exposed(time, update=False),
        hidden=time.hidden,
        update_seconds=composed.update_seconds,
        update_exposed=_sums([_exposed(time, update=True), behind]),
        gradient_bytes=part.gradient_bytes(strategy),
        held_bytes=part.cost.saved_bytes - for_weights,
        held_for_weights_bytes=for_weights,
        handed_on_bytes=handed_on,
        working_bytes=composed.sizes["temporary_bytes"] - part.cost.saved_bytes + handed_on,
        sent_bytes=0.0,
        **{name: composed.sizes[name] for name in ("parameter_bytes", "state_bytes", "other_bytes", "host_bytes")},
    )


def _seconds_of(time: Timed, phase: Phase) -> float:
    return time.compute[phase] + sum(seconds for (at, _), seconds in time.exposed.items() if at is phase)


def _exposed(time: Timed, *, update: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for (phase, axis), seconds in time.exposed.items():
        if (phase is Phase.UPDATE) is update:
            found[axis] = found.get(axis, 0.0) + seconds
    return found


# ---- from the programs


def chunks_of_segments(segments: Sequence[Segment], estimates: Sequence[ChunkCost], strategy: Strategy, hardware: Hardware) -> list[ChunkCost]:
    """Costs of the chunks, read out of their programs.

    Args:
        segments: of forward and backward of one microbatch, whose gradients add up, cut.
        estimates: from a profile: the update, whose traffic is known without a graph, the state of all chunks, which is shared out as gradients are, and what lies on the host.
    """
    parts: dict[tuple[int, Part], Segment] = {(segment.place.index, Part(segment.place.part)): segment for segment in segments}
    makers = {item.target: segment.place for segment in segments for item in segment.step.outputs if item.kind is Kind.CROSS}
    sizes = {item.target: value_bytes(node) for segment in segments for node, item in zip(segment.step.results, segment.step.outputs) if item.kind is Kind.CROSS}
    state, gradients = sum(estimate.state_bytes for estimate in estimates), sum(_inputs_of(segments, Kind.GRAD).values())
    found = []
    for chunk, estimate in enumerate(estimates):
        mine = {part: parts[chunk, part] for part in Part if (chunk, part) in parts}
        costs: dict[Part, GraphCost] = {part: cost_of(segment.step, hardware) for part, segment in mine.items()}
        times = {part: timed(cost.seconds, cost.moved, strategy, hardware) for part, cost in costs.items()}
        crossing = {(part, item.target): Part(makers[item.target].part) for part, segment in mine.items() for item in segment.step.inputs if item.kind is Kind.CROSS}
        made = {(maker, part): {target for (at, target), by in crossing.items() if (by, at) == (maker, part)} for maker in Part for part in Part}
        late = made[Part.FORWARD, Part.WEIGHTS]
        sent = sum(sizes[target] for target in {item.target for item in _reads(segments, chunk + 1)} if makers[target].index == chunk)
        exposed: dict[str, float] = {}
        for time in times.values():
            for axis, seconds in time.exposed_by_axis().items():
                exposed[axis] = exposed.get(axis, 0.0) + seconds
        kept = {kind: _inputs_of(mine.values(), kind) for kind in (Kind.PARAM, Kind.BUFFER, Kind.BATCH, Kind.GRAD)}
        returned = sum(value_bytes(node) for segment in mine.values() for node, item in zip(segment.step.results, segment.step.outputs) if item.kind in RETURNED)
        found.append(
            dataclasses.replace(
                estimate,
                seconds={part: sum(_seconds_of(times[part], phase) for phase in (Phase.FORWARD, Phase.BACKWARD)) if part in times else 0.0 for part in Part},
                exposed=exposed,
                hidden=sum(time.hidden for time in times.values()),
                parameter_bytes=sum(kept[Kind.PARAM].values()),
                state_bytes=round(state * sum(kept[Kind.GRAD].values()) / max(1, gradients)),
                gradient_bytes=sum(kept[Kind.GRAD].values()),
                other_bytes=sum(kept[Kind.BUFFER].values()) + strategy.microbatches * (sum(kept[Kind.BATCH].values()) + returned),
                held_bytes=sum(sizes[target] for target in made[Part.FORWARD, Part.BACKWARD] - late),
                held_for_weights_bytes=sum(sizes[target] for target in late),
                handed_on_bytes=sum(sizes[target] for target in made[Part.BACKWARD, Part.WEIGHTS]),
                working_bytes=max(predict_memory(segment.step, cpu=hardware.shared_cores > 0).temporary_bytes + _fresh_bytes(segment) for segment in mine.values()),
                sent_bytes=float(sent),
            )
        )
    return found


def _inputs_of(segments: Iterable[Segment], kind: Kind) -> dict[str, int]:
    """Target of every input of a kind -> bytes on a device."""
    return {item.target: value_bytes(node) for segment in segments for node, item in zip(segment.step.placeholders, segment.step.inputs) if item.kind is kind}


def _reads(segments: Sequence[Segment], chunk: int) -> list:
    return [item for segment in segments if segment.place.index == chunk and segment.place.part == Part.FORWARD.value for item in segment.step.inputs if item.kind is Kind.CROSS]


def _fresh_bytes(segment: Segment) -> int:
    """Of results that are neither held nor returned: gradients that go back to the chunk before, and what replaces nothing."""
    step, donated = segment.step, segment.step.donations()
    is_forward = segment.place.part == Part.FORWARD.value
    return sum(value_bytes(node) for i, (node, item) in enumerate(zip(step.results, step.outputs)) if i not in donated and item.kind not in RETURNED and not (item.kind is Kind.CROSS and is_forward))


# ---- composition


def estimate_of(chunks: Sequence[ChunkCost], strategy: Strategy, hardware: Hardware, *, plays: bool) -> Estimate:
    """Of a step of all microbatches.

    Args:
        plays: the schedule is played with each chunk's costs; otherwise its bubble is estimated.
    """
    schedule = _schedule(strategy.schedule, strategy.pp, strategy.microbatches, strategy.chunks)
    group = hardware.group(strategy.mesh, PP)
    transfers = [float(collective_seconds("permute", chunk.sent_bytes, hardware, group)) if chunk.sent_bytes else 0.0 for chunk in chunks]
    stages = [[chunks[i] for i in schedule.chunks_of(stage)] for stage in range(strategy.pp)]
    busy = [strategy.microbatches * sum(sum(chunk.seconds.values()) for chunk in stage) for stage in stages]
    dearest = max(range(strategy.pp), key=busy.__getitem__)
    counted, share, bubble, waits = stages[dearest], strategy.microbatches, 0.0, {}
    if hardware.shared_cores:  # a stage that waits leaves its cores to the others
        counted, share = list(chunks), strategy.microbatches / strategy.pp
        waits[PP] = share * 2 * sum(transfers)
    elif plays:
        costs = [
            Costs(forward=chunk.seconds[Part.FORWARD], backward=chunk.seconds[Part.BACKWARD], weights=chunk.seconds[Part.WEIGHTS], transfer=transfer)
            for chunk, transfer in zip(chunks, _sent_by(transfers), strict=True)
        ]
        bubble = simulate(schedule, costs).makespan - busy[dearest]
    else:
        others = [stage for i, stage in enumerate(stages) if i != dearest]
        bubble = sum(sum(_fill_seconds(chunk) for chunk in stage) / len(stage) for stage in others) + 2 * sum(transfers)
    exposed: dict[str, float] = dict(waits)
    for chunk in counted:
        for axis, seconds in chunk.exposed.items():
            exposed[axis] = exposed.get(axis, 0.0) + share * seconds
    compute = share * sum(sum(chunk.seconds.values()) for chunk in counted) - sum(exposed.values()) + waits.get(PP, 0.0)
    updates = [(sum(chunk.update_seconds for chunk in stage), _sums(chunk.update_exposed for chunk in stage)) for stage in stages]
    update, messages = max(updates, key=lambda item: item[0] + sum(item[1].values()))
    for axis, seconds in messages.items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds
    temporary = [_temporary_bytes(schedule, stage, chunks) for stage in range(strategy.pp)]
    needs = [sum(c.parameter_bytes + c.state_bytes + c.gradient_bytes + c.other_bytes for c in stage) + size for stage, size in zip(stages, temporary, strict=True)]
    fullest = max(range(strategy.pp), key=needs.__getitem__)
    return Estimate(
        compute_seconds=compute,
        update_seconds=update,
        exposed_seconds=exposed,
        hidden_seconds=share * sum(chunk.hidden for chunk in counted),
        bubble_seconds=bubble,
        parameter_bytes=sum(chunk.parameter_bytes for chunk in stages[fullest]),
        state_bytes=sum(chunk.state_bytes for chunk in stages[fullest]),
        other_bytes=sum(chunk.other_bytes + chunk.gradient_bytes for chunk in stages[fullest]),
        temporary_bytes=temporary[fullest],
        host_bytes=max(sum(chunk.host_bytes for chunk in stage) for stage in stages),
    ).on(hardware)


def _sums(rows) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for axis, seconds in row.items():
            found[axis] = found.get(axis, 0.0) + seconds
    return found


def _sent_by(transfers: Sequence[float]) -> list[float]:
    """What a value takes that leaves each chunk: forward over its own edge, backward over the one before; the dearer one."""
    return [max(own, before) for own, before in zip(transfers, [0.0, *transfers])]


def _fill_seconds(chunk: ChunkCost) -> float:
    """What a stage adds to the bubble: a forward and a backward, but for what gradients of weights fill."""
    return sum(chunk.seconds.values()) - 2 * chunk.seconds[Part.WEIGHTS]


def _temporary_bytes(schedule: Schedule, stage: int, chunks: Sequence[ChunkCost]) -> int:
    """What microbatches in flight hold, at most, and the program that runs beside."""
    mine = schedule.chunks_of(stage)
    backwards, all_parts = _live(schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.num_chunks // schedule.num_stages, stage)
    held, for_weights, handed_on = (np.array([getattr(chunks[i], name) for i in mine]) for name in ("held_bytes", "held_for_weights_bytes", "handed_on_bytes"))
    total = backwards @ held + all_parts @ for_weights + (all_parts - backwards) @ handed_on
    return int(total.max()) + max(chunks[i].working_bytes for i in mine)


@functools.lru_cache(maxsize=512)
def _schedule(name: str, num_stages: int, num_microbatches: int, chunks: int) -> Schedule:
    return build_schedule(name, num_stages, num_microbatches, chunks)


@functools.lru_cache(maxsize=2048)
def _live(name: str, num_stages: int, num_microbatches: int, chunks: int, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Microbatches of each of the stage's chunks, behind each of its actions [actions, chunks]; every row once: those whose backward is to come, and those of which any part is."""
    schedule = _schedule(name, num_stages, num_microbatches, chunks)
    last = Part.WEIGHTS if schedule.splits_backward else Part.BACKWARD
    live, rows = np.zeros((2, chunks), dtype=int), {}
    for action in schedule.stages[stage]:
        for row, end in zip(live, (Part.BACKWARD, last)):
            row[action.chunk // num_stages] += (action.part is Part.FORWARD) - (action.part is end)
        rows[live.tobytes()] = live.copy()
    found = np.stack([*rows.values()])
    return found[:, 0], found[:, 1]
