"""Time and memory of a strategy: evaluated on the graph of one device, or composed from a profile by arithmetic.

A profile is the graph of one rank of the model-parallel axes at the strategy's local batch (the real passes, with plain `dp` as data axes).
What `dp`, `fsdp` and `zero` add to it are collectives of known bytes and shares of the state:

    ZeRO-3    gather of every weight for forward and backward, scatter of its gradient  over fsdp; all-reduce of the scattered part over dp
    hpZ       gather over the hosts, kept; gathers of it within the host, for forward and backward
    ZeRO-1    scatter of every gradient, gather of the updated weight                   over fsdp; all-reduce of the scattered part over dp
    none      all-reduce of every gradient                                              over dp

(Rajbhandari et al., "ZeRO", 2020, section 7; Wang et al., "ZeRO++", 2023, section 3.2.) What ZeRO splits over fsdp it splits over cp as well, and over ep all but experts: gathers and
scatters over fsdp then move the part that those over cp and ep leave, and a profile's sums over these become scatters. What tp sums of gradients is scattered before. Collectives of the
data axes, and those of weights and gradients, hide behind the computation of their phase where the hardware runs them at the same time; what tp, cp and ep sum and exchange of activations
is waited for.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from graphacc.costs.hardware import Hardware
from graphacc.graph import Phase
from graphacc.passes.communication.buckets import MAX_BYTES, SHARE, SMALL_BYTES
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.zero import split_before
from graphacc.search.cost import GraphCost, Moved, Weight, group_of, move_seconds
from graphacc.strategy.axes import CP, DP, EP, FSDP, GRADIENT_AXES, TP, ZERO_AXES
from graphacc.strategy.spec import Strategy

_HIDE = (Role.WEIGHT, Role.GRADIENT)
"""What may be on its way while anything else is computed."""

SLOWED = 1.05
"""How much longer computation takes beside collectives (Galvatron measures 1.1 to 1.3 on PCIe; NVLink's copies take few multiprocessors)."""

WAITING = 0.005
"""Share of a step by which each doubling of the hosts makes it longer, as all wait for the slowest. `benchmarks/published.py` has 15 series of equal work per chip on 1 to 256
hosts; without this, published seconds grow faster than predicted ones in 12 of them, by 0.6 % for each doubling in the median."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step of a strategy takes, on one device."""

    compute_seconds: float
    update_seconds: float
    exposed_seconds: Mapping[str, float]  # mesh axis -> time in which a device waits for its collectives
    hidden_seconds: float  # of collectives that run beside computation
    parameter_bytes: int
    state_bytes: int  # of the optimizer
    other_bytes: int  # buffers, batch, gradients that stay between programs
    temporary_bytes: int
    order_bytes: int = 0  # more temporaries, if the compiler keeps the order of collectives
    bubble_seconds: float = 0.0  # in which the dearest stage of a pipeline has nothing to do
    waiting_seconds: float = 0.0  # for the slowest host
    host_bytes: int = 0  # exact parameters and the optimizer's state that the device's host has for it (`Strategy.offload`)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.update_seconds + self.bubble_seconds + self.waiting_seconds + sum(self.exposed_seconds.values())

    @property
    def bytes_per_device(self) -> int:
        return self.parameter_bytes + self.state_bytes + self.other_bytes + self.temporary_bytes

    def parts(self) -> dict[str, float]:
        """What the seconds are spent on."""
        idle = {name: seconds for name, seconds in {"bubble": self.bubble_seconds, "slowest host": self.waiting_seconds}.items() if seconds}
        return {"compute": self.compute_seconds, "update": self.update_seconds, **idle, **{f"{axis} communication": s for axis, s in self.exposed_seconds.items()}}

    def on(self, hardware: Hardware) -> "Estimate":
        """With what hosts wait for each other."""
        return dataclasses.replace(self, waiting_seconds=WAITING * math.log2(hardware.num_hosts) * self.seconds) if hardware.num_hosts > 1 else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composed:
    """What a strategy makes of a profile: work and messages of one microbatch, of the update, and bytes by part."""

    seconds: Mapping[Phase, float]  # of kernels
    moved: tuple[Moved, ...]
    update_seconds: float
    sizes: Mapping[str, int]  # the bytes of an `Estimate`


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sent:
    """Messages of one kind."""

    number: int = 0
    size_bytes: float = 0.0  # of all together
    largest_bytes: float = 0.0

    def __add__(self, other: "_Sent") -> "_Sent":
        return _Sent(number=self.number + other.number, size_bytes=self.size_bytes + other.size_bytes, largest_bytes=max(self.largest_bytes, other.largest_bytes))

    def divided(self, ranks: int) -> "_Sent":
        """As many, of a part of each."""
        return _Sent(number=self.number, size_bytes=self.size_bytes / ranks, largest_bytes=self.largest_bytes / ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Messages:
    """What one rank moves in a microbatch, and in the update."""

    moved: tuple[Moved, ...]
    scattered: _Sent  # what scatters gradients first; nothing: gradients stay whole
    transient_bytes: int  # of what is gathered
    reordered_bytes: Mapping[Phase, int]  # read and written by copies around them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of computation, and those in which a device waits for messages."""

    compute: Mapping[Phase, float]  # with what messages beside it cost
    exposed: Mapping[tuple[Phase, str], float]  # (phase, mesh axis)
    hidden: float

    def exposed_by_axis(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (_, axis), seconds in self.exposed.items():
            found[axis] = found.get(axis, 0.0) + seconds
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """What one rank of (tp, cp, ep) computes, moves and keeps, at one local batch."""

    cost: GraphCost
    temporary_bytes: int
    released_bytes: int  # the same, where gradients leave as they are made
    saved_bytes: int  # that are saved for the backward, of these
    state_bytes: Mapping[str, int]  # parameter -> bytes of its optimizer state on this rank
    updates: bool = True  # in the program of the backward
    accumulates: bool = False  # gradients add up in every run, and not only where there are microbatches
    working_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # module -> the most that is stored while one of its calls runs, besides what backward reads of forward

    @property
    def saved_for_backward(self) -> int:
        """Bytes of the temporaries that backward reads of forward: rematerialisation spares no more."""
        return self.saved_bytes + self.cost.saved_bytes

    @functools.cached_property
    def _totals(self) -> dict[str, "_Total"]:
        """Bytes of all weights, by what of them."""
        weights = self.cost.weights
        return {
            "parameters": _total(weights, lambda weight: weight.size_bytes),
            "trained": _total(weights, lambda weight: weight.size_bytes if weight.trained else 0),
            "state": _total(weights, lambda weight: self.state_bytes.get(weight.name, 0)),
            "update": _total(weights, lambda weight: 3 * weight.size_bytes + 2 * self.state_bytes[weight.name] if weight.trained else 0),  # parameters and state are read and written, gradients read
            "casts": _total(weights, _cast_bytes),
            "cast for backward": _total(weights, lambda weight: weight.travels_bytes if _cast_bytes(weight) and weight.gathers > 1 else 0),
        }

    def floor(self, strategy: Strategy, hardware: Hardware) -> float:
        """Seconds of what every rank computes and waits for, also where one of the model axes is larger; of a pipeline, without its bubble.

        Not in it: what the data axes may divide or hide, and what moves weights and gradients over a model axis, which shrinks with the weights that another axis splits.
        """
        once = self.cost.seconds[Phase.FORWARD] + self.cost.seconds[Phase.BACKWARD] - _stream_seconds(self._totals["casts"].all_bytes, hardware)
        mesh = strategy.mesh
        return strategy.microbatches / strategy.pp * (once + sum(move_seconds(item, mesh, hardware) for item in self._waited_for))

    def bounded_by(self, here: Strategy, larger: Strategy, hardware: Hardware) -> Estimate:
        """Seconds below which a strategy does not fall, with its bubble and without, whose model axes are those of `here`, of which this is the profile, or multiples of them; the bytes are no bound.

        That is `floor`, with the activations that tp sums and ep exchanges of as many more samples as tp gives a rank, and what the data axes do not hide behind it:
        tp leaves a rank a part of the weights, ep of those of experts, and cp all. Of a pipeline it is that of the mean stage, and the bubble of equal ones, of which
        "zb-h1" leaves the forward.
        """
        factor = here.microbatches / here.pp / larger.microbatches
        data = self._share(here.tp / larger.tp, here.ep / larger.ep, hardware).composed(larger, hardware)
        seconds = {phase: factor * self.cost.seconds[phase] + data.seconds[phase] / larger.pp for phase in Phase}
        seconds[Phase.FORWARD] -= factor * _stream_seconds(self._totals["casts"].all_bytes, hardware)
        moved = [*(item.times(factor, larger.tp / here.tp if item.axis in (TP, EP) else 1.0) for item in self._waited_for), *(item.times(1 / larger.pp) for item in data.moved)]
        found = dataclasses.replace(data, update_seconds=data.update_seconds / larger.pp)
        busy = estimated(found, timed(seconds, moved, larger, hardware, count=larger.microbatches, are_all=False))
        waits = larger.microbatches * (seconds[Phase.FORWARD] if larger.schedule == "zb-h1" else seconds[Phase.FORWARD] + seconds[Phase.BACKWARD])
        bubbles = 0.0 if hardware.shared_cores else (larger.pp - 1) / (larger.microbatches * larger.chunks)
        return dataclasses.replace(busy, bubble_seconds=bubbles * waits).on(hardware)

    @functools.cached_property
    def _shares(self) -> dict[tuple[float, float, Hardware], "Profile"]:
        return {}

    def _share(self, share: float, of_experts: float, hardware: Hardware) -> "Profile":
        """Of nothing but the weights, of each so much, and of experts so much of that; made once."""
        if (known := self._shares.get((share, of_experts, hardware))) is not None:
            return known
        shares = {weight.name: share * of_experts if weight.is_of_experts else share for weight in self.cost.weights}
        weights = tuple(
            dataclasses.replace(
                weight, size_bytes=int(shares[weight.name] * weight.size_bytes), travels_bytes=int(shares[weight.name] * weight.travels_bytes), shape=(), gradient_is_strided=False
            )
            for weight in self.cost.weights
        )
        seconds = dict.fromkeys(Phase, 0.0) | {Phase.FORWARD: _stream_seconds(sum(weight.count * _cast_bytes(weight) for weight in weights), hardware)}
        cost = dataclasses.replace(self.cost, weights=weights, seconds=seconds, moved=())
        found = dataclasses.replace(self, cost=cost, state_bytes={name: int(shares[name] * size) for name, size in self.state_bytes.items()})
        self._shares[share, of_experts, hardware] = found
        return found

    @functools.cached_property
    def _waited_for(self) -> list[Moved]:
        """The messages of the model axes that every rank waits for, also where one of these is larger."""
        return [item for item in self.cost.moved if item.axis not in GRADIENT_AXES and item.role not in (*_HIDE, Role.KEYS)]

    def gradient_bytes(self, strategy: Strategy) -> int:
        """Of the gradients that stay between programs: whole ones below ZeRO-2, unless they leave for the host."""
        return round(self._totals["trained"].kept(strategy, stage=2 if strategy.offload is None else 1))

    def estimate(self, strategy: Strategy, hardware: Hardware, *, sums_once: bool = False) -> Estimate:
        """Compose the estimate of a strategy with this profile's model-parallel axes.

        Args:
            sums_once: gradients are summed over the ranks after the last microbatch, and their products add up by themselves, as in Megatron-LM; our programs do it after each where ZeRO splits gradients, and in front of the update otherwise.
        """
        found = self.composed(strategy, hardware, adds_up=not sums_once, sums_late=not sums_once)
        return estimated(found, timed(found.seconds, found.moved, strategy, hardware, sums_once=sums_once, count=strategy.microbatches)).on(hardware)

    def _temporary_bytes(self, strategy: Strategy, hardware: Hardware, scattered: _Sent) -> int:
        """Of the moment at which the backward begins, or of its end, when all gradients wait for the update; planned programs of CPUs update at once.

        Args:
            scattered: the messages that scatter gradients, one of which is on its way while the next is made; none: gradients stay whole.
        """
        if hardware.shared_cores:
            return self.temporary_bytes + self.cost.saved_bytes
        sent = round(min(scattered.size_bytes, 2 * scattered.largest_bytes))
        begin = (self.released_bytes if scattered.number else self.temporary_bytes) + self.cost.saved_bytes
        end = 0
        if self.updates and strategy.microbatches == 1 and strategy.offload is None:
            end = round(self._totals["trained"].kept(strategy)) + max(0, self.released_bytes - self.saved_bytes)
        return max(begin, end) + sent

    def _host_update_seconds(self, strategy: Strategy, hardware: Hardware) -> float:
        """What a step waits for an update on the host, of which every rank has a share; 0 where the hardware does not say what that takes.

        It begins when all gradients are there, as it does on GPUs; with `Strategy.delay` beside the next step's forward and backward.
        """
        trained, updated = self._totals["trained"].kept(strategy), self._totals["update"].kept(strategy)
        back = trained / 2 if strategy.precision == "bf16" else trained
        taken = hardware.host_update_seconds(gradient_bytes=trained, parameter_bytes=back, update_bytes=updated)
        if taken is None:
            return 0.0
        beside = strategy.microbatches * sum(self.cost.seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)) if strategy.delay and not hardware.shared_cores else 0.0
        return max(0.0, taken - beside)

    def composed(self, strategy: Strategy, hardware: Hardware, *, adds_up: bool = True, sums_late: bool = True) -> Composed:
        """With what `dp`, `fsdp` and `zero` add.

        Args:
            adds_up: gradients of several runs are added to those so far, which takes time.
            sums_late: these are summed over `Strategy.late_axes` by the update's program.
        """
        several = strategy.microbatches > 1 or self.accumulates
        totals, messages = self._totals, self._messages_of(strategy, strategy.late_axes if sums_late and several else ())
        kept, state = totals["parameters"].kept(strategy, stage=3), totals["state"].kept(strategy)
        offloads = strategy.offload is not None
        seconds = dict(self.cost.seconds)
        seconds[Phase.FORWARD] -= _stream_seconds(totals["casts"].all_bytes - totals["casts"].kept(strategy, stage=3), hardware)  # each rank casts its part, and keeps that
        for phase, size in messages.reordered_bytes.items():
            seconds[phase] += _stream_seconds(size, hardware)
        if adds_up and (strategy.microbatches > 1 or (self.accumulates and not offloads)):
            seconds[Phase.BACKWARD] += _stream_seconds(3 * self.gradient_bytes(strategy), hardware)  # a gradient, and the sum before and behind it
        transient = messages.transient_bytes - round(totals["cast for backward"].all_bytes - totals["cast for backward"].kept(strategy, stage=3))
        return Composed(
            seconds=seconds,
            moved=messages.moved,
            update_seconds=self._host_update_seconds(strategy, hardware) if offloads else _stream_seconds(totals["update"].kept(strategy), hardware) / hardware.chip.update_rate,
            sizes={
                "parameter_bytes": round(kept / 2 if offloads and strategy.precision == "bf16" else kept),
                "state_bytes": 0 if offloads else round(state),
                "host_bytes": round(state + totals["trained"].kept(strategy)) if offloads else 0,
                "other_bytes": self.cost.other_bytes + (strategy.microbatches - 1) * (self.cost.batch_bytes + self.cost.returned_bytes),
                "temporary_bytes": self._temporary_bytes(strategy, hardware, messages.scattered) + transient,
            },
        )

    def _messages_of(self, strategy: Strategy, late: tuple[str, ...]) -> "_Messages":
        """What a strategy moves in a microbatch, and in the update, which sums gradients over the `late` axes; made once for all that share the state alike."""
        alike = late, strategy.zero_stage, strategy.fsdp, strategy.cp, strategy.ep, strategy.dp > 1, strategy.hpz, strategy.bucket_mb, strategy.prefetch, strategy.reduces_narrow, strategy.pp > 1
        if alike not in self._known_messages:
            self._known_messages[alike] = self._made_messages(strategy, late)
        return self._known_messages[alike]

    @functools.cached_property
    def _known_messages(self) -> dict[tuple, "_Messages"]:
        return {}

    def _made_messages(self, strategy: Strategy, late: tuple[str, ...]) -> "_Messages":
        weights = self.cost.weights
        trained = [weight for weight in weights if weight.trained]
        again = [weight for weight in weights if _is_gathered_again(weight, strategy)]
        steps = _zero_steps(strategy)
        split = [weight for weight in weights if any(_splits(axis, weight) for axis in steps)]
        gathered = sum(weight.count * weight.travels_bytes for weight in (split if steps else weights))
        bucket = _bucket_bytes(strategy, gathered)

        def travelling(read: Sequence[Weight], axis: str) -> list[tuple[int, int, int]]:
            return [(weight.travels_bytes, weight.count, _parts(weight, axis, strategy)) for weight in read if _splits(axis, weight)]

        moved, secondary = [item for item in self.cost.moved if item.axis not in GRADIENT_AXES], 0
        for axis in steps if strategy.zero_stage == 3 else ():
            if axis == FSDP and (group := strategy.hpz) > 1:  # two steps, of which backward repeats the one within a node
                once = [weight for weight in weights if not _is_gathered_again(weight, strategy)]
                parts = [(size // group // ranks, count, 1) for size, count, ranks in travelling(again, axis)]
                secondary = sum(size * count for size, count, _ in parts)
                moved += [_gathers(Phase.FORWARD, travelling(once, axis), bucket, axis), _gathers(Phase.FORWARD, parts, bucket, f"{axis}%{group}")]
                moved += [_gathers(phase, travelling(again, axis), bucket, f"{axis}/{group}") for phase in (Phase.FORWARD, Phase.BACKWARD)]
            else:
                moved += [_gathers(phase, travelling(read, axis), bucket, axis) for phase, read in ((Phase.FORWARD, weights), (Phase.BACKWARD, again))]
        for axis in steps if strategy.zero_stage in (1, 2) else ():
            updated = [(weight.size_bytes, weight.count, _parts(weight, axis, strategy)) for weight in trained if _splits(axis, weight)]
            moved.append(_gathers(Phase.UPDATE, updated, bucket, axis))

        def gradients(made: Sequence[Weight], parts_of: str | None = None, narrow: bool = strategy.reduces_narrow) -> list[tuple[float, int]]:
            sizes = ((weight, weight.travels_bytes if narrow else weight.size_bytes) for weight in made if weight.trained)
            return [(size if parts_of is None else size / _parts(weight, parts_of, strategy), weight.count) for weight, size in sizes]

        summed = functools.partial(_sums, bucket=bucket, ranks=strategy.zero_ranks)
        sums = [item for item in moved if item.each]
        moved = [item for item in moved if not item.each]
        moved += [_gradients(item.axis, item.kind, summed(_in_layers([(size, count) for _, size, count in item.each]))) for item in sums if item.axis not in steps]
        for axis in (CP, EP):
            if getattr(strategy, axis) > 1 and axis not in steps and not any(item.axis == axis for item in sums):  # of weights alone
                moved.append(_gradients(axis, "all_reduce", summed(gradients([weight for weight in weights if _splits(axis, weight)]))))
        for axis in steps:
            tensors = gradients([weight for weight in weights if _splits(axis, weight)], parts_of=axis, narrow=strategy.reduces_narrow and axis not in late)
            moved.append(_gradients(axis, "reduce_scatter", _messages(tensors, bucket, bucket // 2)))
        if strategy.dp > 1:
            moved.append(_gradients(DP, "all_reduce", summed(gradients(weights, narrow=strategy.reduces_narrow and DP not in late))))
        moved = [dataclasses.replace(item, phase=Phase.UPDATE) if item.role is Role.GRADIENT and item.axis in late else item for item in moved]
        transient = min(gathered, (strategy.prefetch + 1) * bucket) if strategy.zero_stage == 3 else 0
        sizes_between = itertools.accumulate((getattr(strategy, axis) for axis in steps[:-1]), lambda total, size: total * size)
        transient += sum(transient // size for size in sizes_between)  # what one step gives and the next one gathers
        return _Messages(
            moved=tuple(moved),
            scattered=_messages([] if FSDP in late else gradients(split), bucket, bucket // 2),
            transient_bytes=transient + secondary,
            reordered_bytes=_reordered_bytes(weights, strategy, bucket),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Total:
    """Bytes of all weights of a rank, before ZeRO."""

    of_experts: int
    of_others: int

    @property
    def all_bytes(self) -> int:
        return self.of_experts + self.of_others

    def kept(self, strategy: Strategy, stage: int = 1) -> float:
        """What is left to a rank of what ZeRO splits from a stage on."""
        return self.of_experts / strategy.zero_ranks_of_experts + self.of_others / strategy.zero_ranks if strategy.zero_stage >= stage else self.all_bytes


def _total(weights: Sequence[Weight], size_of: Callable[[Weight], int]) -> _Total:
    of_experts, of_others = (sum(weight.count * size_of(weight) for weight in weights if weight.is_of_experts is which) for which in (True, False))
    return _Total(of_experts=of_experts, of_others=of_others)


def _zero_steps(strategy: Strategy) -> tuple[str, ...]:
    """The axes over which ZeRO splits, one after the other; weights are gathered over them in the other order."""
    return _larger_than_one(strategy.cp, strategy.ep, strategy.fsdp) if strategy.zero_stage else ()


@functools.lru_cache(maxsize=4096)
def _larger_than_one(*sizes: int) -> tuple[str, ...]:
    return tuple(axis for axis, size in zip(ZERO_AXES, sizes, strict=True) if size > 1)


def _is_gathered_again(weight: Weight, strategy: Strategy) -> bool:
    """Whether ZeRO-3 gathers a weight in the backward, too."""
    stays = weight.is_head and strategy.pp == 1 and weight.travels_bytes >= (strategy.bucket_mb or 0) * 1e6
    return weight.gathers > 1 and not stays


def _splits(axis: str, weight: Weight) -> bool:
    """Whether ZeRO splits a weight along one of its axes."""
    return axis != EP or not weight.is_of_experts


def _parts(weight: Weight, axis: str, strategy: Strategy) -> int:
    """The number of parts in which the axes before this one have split a weight."""
    return _product_before(axis, weight.is_of_experts, strategy.cp, strategy.ep)


@functools.lru_cache(maxsize=4096)
def _product_before(axis: str, is_of_experts: bool, cp: int, ep: int) -> int:
    sizes = {CP: cp, EP: 1 if is_of_experts else ep}
    return math.prod(sizes[other] for other in ZERO_AXES[: ZERO_AXES.index(axis)])


def evaluated(cost: GraphCost, strategy: Strategy, hardware: Hardware, *, update_seconds: float, in_update: Sequence[Moved], **sizes: int) -> Estimate:
    """The estimate of a whole program of one device, with the bytes that it keeps by part.

    Args:
        in_update: what the update moves, where that is another program.
    """
    moved = (*cost.moved, *in_update)
    found = Composed(seconds=cost.seconds, moved=moved, update_seconds=update_seconds, sizes=sizes)
    return estimated(found, timed(cost.seconds, moved, strategy, hardware, count=strategy.microbatches)).on(hardware)


def estimated(found: Composed, time: Timed) -> Estimate:
    return Estimate(
        compute_seconds=sum(time.compute.values()),
        update_seconds=found.update_seconds,
        exposed_seconds=time.exposed_by_axis(),
        hidden_seconds=time.hidden,
        **found.sizes,
    )


def timed(seconds: Mapping[Phase, float], moved: Sequence[Moved], strategy: Strategy, hardware: Hardware, *, sums_once: bool = False, count: int = 1, are_all: bool = True) -> Timed:
    """Which messages hide behind computation.

    Args:
        seconds: of the kernels of each phase. Those of the update, which is memory traffic, are not read.
        sums_once: as of `Profile.estimate`.
        count: microbatches, each of which runs forward and backward, and, unless `sums_once` or a message says so by its phase, reduces its gradients.
        are_all: these are all messages of the phases: so much is computed between two of them. Otherwise none waits for ranks that come late.
    """
    seconds, mesh = {phase: count * seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}, strategy.mesh
    exposed: dict[tuple[Phase, str], float] = {}
    hideable: dict[Phase, dict[str, float]] = {phase: {} for phase in seconds}
    hidden, free = 0.0, dict(seconds)  # of computation, with no message beside it yet
    for item in moved:
        axis = item.whole_axis
        once = item.phase is Phase.UPDATE or (sums_once and item.role is Role.GRADIENT)
        time = move_seconds(item, mesh, hardware) * (1 if once else count)
        if (axis in GRADIENT_AXES or item.role in _HIDE) and not hardware.shared_cores and item.phase is not Phase.UPDATE:
            hideable[item.phase][axis] = hideable[item.phase].get(axis, 0.0) + time
            continue
        if item.role is Role.KEYS and not hardware.shared_cores:
            behind = min(time, count * item.beside_seconds)
            hidden += behind
            free[item.phase] -= behind
            seconds[item.phase] += behind * (SLOWED - 1)
            time -= behind
        exposed[item.phase, axis] = exposed.get((item.phase, axis), 0.0) + time
    for (phase, axis), late in _lateness(seconds, moved, strategy, hardware).items() if are_all else ():
        exposed[phase, axis] = exposed.get((phase, axis), 0.0) + late
    for phase, by_axis in hideable.items():
        total = sum(by_axis.values())
        behind = min(total, max(0.0, free[phase]))
        hidden += behind
        seconds[phase] += behind * (SLOWED - 1)
        for axis, time in by_axis.items() if total > behind else ():
            exposed[phase, axis] = exposed.get((phase, axis), 0.0) + (total - behind) * time / total
    return Timed(compute=seconds, exposed=exposed, hidden=hidden)


def _lateness(seconds: Mapping[Phase, float], moved: Sequence[Moved], strategy: Strategy, hardware: Hardware) -> dict[tuple[Phase, str], float]:
    """(phase, mesh axis) -> what its messages wait for ranks that share cores, between two of which each computes a part of the phase."""
    found: dict[tuple[Phase, str], float] = {}
    for phase in seconds if hardware.lateness else ():
        sent = [item for item in moved if item.phase is phase and item.number > 0]  # a chunk of a pipeline may have nothing of what others send
        number = sum(item.number for item in sent)
        for item in sent:
            ranks = group_of(item.axis, strategy.mesh, hardware)[-1]
            key = phase, item.whole_axis
            found[key] = found.get(key, 0.0) + item.number * hardware.late_seconds(ranks, seconds[phase] / number)
    return found


def _reordered_bytes(weights: Sequence[Weight], strategy: Strategy, bucket: int) -> dict[Phase, int]:
    """Read and written by copies around gathers and scatters.

    Of what is split along another dim than the first ranks' blocks are interleaved. Of two steps what the first one gathers is taken apart and put
    together for the second, and what it scatters is put together, unless it is a message by itself.
    """
    found: dict[Phase, int] = dict.fromkeys(Phase, 0)
    steps = _zero_steps(strategy)
    for weight in weights if strategy.zero_stage else ():
        axes = [axis for axis in steps if _splits(axis, weight)]
        travels = weight.count * weight.travels_bytes
        gradient = travels if strategy.reduces_narrow else weight.count * weight.size_bytes
        if strategy.hpz > 1 and _is_gathered_again(weight, strategy):  # the parts of a node come into the order of the ranks
            parts = _parts(weight, FSDP, strategy)
            found[Phase.FORWARD] += 2 * travels // parts
            found[Phase.BACKWARD] += 2 * travels // parts
        split = split_before(weight.shape, getattr(strategy, axes[0]), math.prod(getattr(strategy, axis) for axis in axes[1:])) if axes else None
        if split is None:
            continue
        between = [_parts(weight, axis, strategy) for axis in axes[1:]]
        if strategy.zero_stage == 3:
            copied = (split.dim > 0) + sum(2 / parts for parts in between if weight.travels_bytes <= bucket // 2)
            found[Phase.FORWARD] += round(2 * copied * travels)
            found[Phase.BACKWARD] += round(2 * copied * travels * _is_gathered_again(weight, strategy))
        if weight.trained:
            copied = (split.dim > 0) + sum(1 / parts for parts in between if gradient <= weight.count * parts * (bucket // 2))
            strided = (travels + gradient) * weight.gradient_is_strided if split.dim else 0
            found[Phase.BACKWARD] += round(2 * copied * gradient) + strided
    return found


def _gathers(phase: Phase, tensors: Sequence[tuple[int, int, int]], bucket: int, axis: str) -> Moved:
    """Small tensors have messages of their own (see `graphacc.passes.communication.buckets`).

    Args:
        tensors: bytes of one when it is whole, how many there are, and the number of parts of which one is gathered here.
    """
    small = [(size, count) for size, count, _ in tensors if size <= SMALL_BYTES]
    large = [(size, count) for size, count, _ in tensors if size > SMALL_BYTES]
    number = _messages(small, bucket, bucket).number + _messages(large, bucket, bucket // 2).number
    return Moved(axis=axis, kind="all_gather", role=Role.WEIGHT, phase=phase, number=number, size_bytes=round(sum(size * count / parts for size, count, parts in tensors)))


def _gradients(axis: str, kind: str, sent: _Sent) -> Moved:
    return Moved(axis=axis, kind=kind, role=Role.GRADIENT, phase=Phase.BACKWARD, number=sent.number, size_bytes=sent.size_bytes)


def _in_layers(sizes: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """Tensors in their order, of (size, how many there are): those of as many follow on each other in every layer."""
    return [(size, 1) for count, run in itertools.groupby(sizes, key=lambda item: round(item[1])) for size in [size for size, _ in run] * count]


def _sums(tensors: Sequence[tuple[float, int]], bucket: int, ranks: int) -> _Sent:
    """Messages of sums of gradients, of (size, how many there are), which have been scattered over so many ranks before."""
    if ranks == 1:
        return _messages(tensors, bucket, SMALL_BYTES)
    joined = _messages([(size, count) for size, count in tensors if size <= bucket // 2], bucket, bucket // 2)
    return joined.divided(ranks) + _messages([(size / ranks, count) for size, count in tensors if size > bucket // 2], bucket, SMALL_BYTES)


def _messages(tensors: Sequence[tuple[float, int]], bucket: int, alone: int) -> _Sent:
    """Messages of at most `bucket` bytes, of tensors in order, (size, how many there are); what is larger than `alone` is one by itself."""
    number, largest, filling = 0, 0.0, 0.0
    for size, count in tensors:
        if size > alone:
            number, largest = number + count, max(largest, size)
            continue
        while count:
            if filling and filling + size > bucket:
                number, largest, filling = number + 1, max(largest, filling), 0.0
            taken = min(count, max(1, int((bucket - filling) // size))) if size else count
            filling, count = filling + taken * size, count - taken
    if filling:
        number, largest = number + 1, max(largest, filling)
    return _Sent(number=number, size_bytes=sum(size * count for size, count in tensors), largest_bytes=largest)


def _bucket_bytes(strategy: Strategy, weights: int) -> int:
    if strategy.bucket_mb is None:
        return max(1, min(MAX_BYTES, weights // SHARE))
    return round(strategy.bucket_mb * 1e6)


def _cast_bytes(weight: Weight) -> int:
    """Read and written by the cast of a weight to the dtype in which it is computed with."""
    return weight.size_bytes + weight.travels_bytes if weight.travels_bytes < weight.size_bytes else 0


def _stream_seconds(size: float, hardware: Hardware) -> float:
    return size / (hardware.chip.memory_bandwidth * hardware.chip.memory_efficiency)


