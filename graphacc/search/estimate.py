"""Time and memory of a strategy: evaluated on the graph of one device, or composed from a profile by arithmetic.

A profile is the graph of one rank of the model-parallel axes at the strategy's local batch (the real passes, with plain `dp` as data axes).
What `dp`, `fsdp` and `zero` add to it are collectives of known bytes and shares of the state:

    ZeRO-3    gather of every weight for forward and backward, scatter of its gradient  over fsdp; all-reduce of the scattered part over dp
    hpZ       gather over the hosts, kept; gathers of it within the host, for forward and backward
    ZeRO-1    scatter of every gradient, gather of the updated weight                   over fsdp; all-reduce of the scattered part over dp
    none      all-reduce of every gradient                                              over dp

(Rajbhandari et al., "ZeRO", 2020, section 7; Wang et al., "ZeRO++", 2023, section 3.2.) What ZeRO splits over fsdp it splits over cp as well: gathers and scatters over fsdp
then move the part that those over cp leave, and a profile's sums over cp become scatters. What tp and ep sum of gradients is scattered before. Collectives of the data axes, and
those of weights and gradients, hide behind the computation of their phase where the hardware runs them at the same time; what tp, cp and ep sum and exchange of activations is waited for.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from graphacc.costs.hardware import Hardware
from graphacc.graph import Phase
from graphacc.passes.communication.buckets import MAX_BYTES, SHARE, SMALL_BYTES
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.zero import split_before
from graphacc.search.cost import GraphCost, Moved, Weight, move_seconds
from graphacc.strategy.axes import CP, DP, FSDP, GRADIENT_AXES
from graphacc.strategy.spec import Strategy

_HIDE = (Role.WEIGHT, Role.GRADIENT)

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
class _Messages:
    """What one rank moves in a microbatch, and in the update."""

    moved: tuple[Moved, ...]
    scattered: tuple[float, ...]  # sizes of the messages that scatter gradients first; none: gradients stay whole
    transient_bytes: int  # of what is gathered


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
    working_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # module -> the most that is stored while one of its calls runs, besides what backward reads of forward

    @property
    def update_bytes(self) -> int:
        """That the whole update reads and writes: parameters and state both, gradients once."""
        return sum(weight.count * (3 * weight.size_bytes + 2 * self.state_bytes[weight.name]) for weight in self.cost.weights if weight.trained)

    def floor(self, strategy: Strategy, hardware: Hardware) -> float:
        """Seconds of what every rank computes and waits for, also where one of the model axes is larger; of a pipeline, without its bubble.

        Not in it: what the data axes may divide or hide, and what moves weights and gradients over a model axis, which shrinks with the weights that another axis splits.
        """
        once = self.cost.seconds[Phase.FORWARD] + self.cost.seconds[Phase.BACKWARD] - _stream_seconds(_cast_bytes(self.cost.weights), hardware)
        return strategy.microbatches / strategy.pp * (once + sum(move_seconds(item, strategy.mesh, hardware) for item in self._waited_for))

    def bounded_by(self, here: Strategy, larger: Strategy, hardware: Hardware) -> float:
        """Seconds below which a strategy does not fall whose model axes are multiples of those of `here`, of which this is the profile.

        That is `floor`, and what the data axes do not hide behind it: tp and ep leave a rank a part of the weights, and cp all. Of a pipeline it is
        that of the mean stage, and the bubble of equal ones, of which "zb-h1" leaves the forward.
        """
        factor = here.microbatches / here.pp / larger.microbatches
        data = self._share(here.tp * here.ep / (larger.tp * larger.ep), hardware).composed(larger, hardware)
        seconds = {phase: factor * self.cost.seconds[phase] + data.seconds[phase] / larger.pp for phase in Phase}
        seconds[Phase.FORWARD] -= factor * _stream_seconds(_cast_bytes(self.cost.weights), hardware)
        moved = [*(item.times(factor) for item in self._waited_for), *(item.times(1 / larger.pp) for item in data.moved)]
        found = dataclasses.replace(data, update_seconds=data.update_seconds / larger.pp)
        busy = estimated(found, timed(seconds, moved, larger, hardware, count=larger.microbatches))
        waits = larger.microbatches * (seconds[Phase.FORWARD] if larger.schedule == "zb-h1" else seconds[Phase.FORWARD] + seconds[Phase.BACKWARD])
        bubbles = 0.0 if hardware.shared_cores else (larger.pp - 1) / (larger.microbatches * larger.chunks)
        return dataclasses.replace(busy, bubble_seconds=bubbles * waits).on(hardware).seconds

    @functools.cached_property
    def _shares(self) -> dict[tuple[float, Hardware], "Profile"]:
        return {}

    def _share(self, share: float, hardware: Hardware) -> "Profile":
        """Of nothing but the weights, of each so much; made once."""
        if (known := self._shares.get((share, hardware))) is not None:
            return known
        weights = tuple(
            dataclasses.replace(weight, size_bytes=int(share * weight.size_bytes), travels_bytes=int(share * weight.travels_bytes), shape=(), gradient_is_strided=False)
            for weight in self.cost.weights
        )
        seconds = dict.fromkeys(Phase, 0.0) | {Phase.FORWARD: _stream_seconds(_cast_bytes(weights), hardware)}
        cost = dataclasses.replace(self.cost, weights=weights, seconds=seconds, moved=())
        found = dataclasses.replace(self, cost=cost, state_bytes={name: int(share * size) for name, size in self.state_bytes.items()})
        self._shares[share, hardware] = found
        return found

    @functools.cached_property
    def _waited_for(self) -> list[Moved]:
        """The messages of the model axes that every rank waits for, also where one of these is larger."""
        return [item for item in self.cost.moved if item.axis not in GRADIENT_AXES and item.role not in _HIDE]

    def gradient_bytes(self, strategy: Strategy) -> int:
        """Of the gradients that stay between programs: whole ones below ZeRO-2, unless they leave for the host."""
        whole = sum(weight.count * weight.size_bytes for weight in self.cost.weights if weight.trained)
        return whole // strategy.zero_ranks if strategy.zero_stage >= 2 or strategy.offload is not None else whole

    def estimate(self, strategy: Strategy, hardware: Hardware, *, sums_once: bool = False) -> Estimate:
        """Compose the estimate of a strategy with this profile's model-parallel axes.

        Args:
            sums_once: gradients are summed over the ranks after the last microbatch, as Megatron-LM does; our programs do it after each.
        """
        found = self.composed(strategy, hardware)
        return estimated(found, timed(found.seconds, found.moved, strategy, hardware, sums_once=sums_once, count=strategy.microbatches)).on(hardware)

    def _temporary_bytes(self, strategy: Strategy, hardware: Hardware, scattered: Sequence[float]) -> int:
        """Of the moment at which the backward begins, or of its end, when all gradients wait for the update; planned programs of CPUs update at once.

        Args:
            scattered: sizes of the messages that scatter gradients, one of which is on its way while the next is made; none: gradients stay whole.
        """
        if hardware.shared_cores:
            return self.temporary_bytes + self.cost.saved_bytes
        sent = round(min(sum(scattered), 2 * max(scattered, default=0)))
        begin = (self.released_bytes if scattered else self.temporary_bytes) + self.cost.saved_bytes
        end = 0
        if self.updates and strategy.microbatches == 1 and strategy.offload is None:
            whole = sum(weight.count * weight.size_bytes for weight in self.cost.weights if weight.trained)
            end = (whole // strategy.zero_ranks if scattered else whole) + max(0, self.released_bytes - self.saved_bytes)
        return max(begin, end) + sent

    def _host_update_seconds(self, strategy: Strategy, hardware: Hardware, share: float) -> float:
        """What a step waits for an update on the host, of which every rank has a share; 0 where the hardware does not say what that takes.

        It begins when all gradients are there, as it does on GPUs; with `Strategy.delay` beside the next step's forward and backward.
        """
        trained = share * sum(weight.count * weight.size_bytes for weight in self.cost.weights if weight.trained)
        back = trained / 2 if strategy.precision == "bf16" else trained
        taken = hardware.host_update_seconds(gradient_bytes=trained, parameter_bytes=back, update_bytes=self.update_bytes * share)
        if taken is None:
            return 0.0
        beside = strategy.microbatches * sum(self.cost.seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)) if strategy.delay and not hardware.shared_cores else 0.0
        return max(0.0, taken - beside)

    def composed(self, strategy: Strategy, hardware: Hardware) -> Composed:
        """With what `dp`, `fsdp` and `zero` add."""
        stage, weights = strategy.zero_stage, self.cost.weights
        kept = sum(weight.count * weight.size_bytes for weight in weights)
        trained = sum(weight.count * weight.size_bytes for weight in weights if weight.trained)
        state = sum(weight.count * self.state_bytes.get(weight.name, 0) for weight in weights)
        messages = self._messages_of(strategy)
        share = 1 / strategy.zero_ranks
        cast = [weight for weight in weights if weight.travels_bytes < weight.size_bytes] if stage == 3 else []  # each rank casts its part, and keeps that
        offloads = strategy.offload is not None
        kept_bytes = kept // 2 if offloads and strategy.precision == "bf16" else kept
        seconds = dict(self.cost.seconds)
        seconds[Phase.FORWARD] -= _stream_seconds(_cast_bytes(cast) * (1 - share), hardware)
        for phase, size in _reordered_bytes(weights, strategy).items():
            seconds[phase] += _stream_seconds(size, hardware)
        transient = messages.transient_bytes - round(sum(weight.count * weight.travels_bytes for weight in cast if weight.gathers > 1) * (1 - share))
        return Composed(
            seconds=seconds,
            moved=messages.moved,
            update_seconds=self._host_update_seconds(strategy, hardware, share) if offloads else _stream_seconds(self.update_bytes * share, hardware),
            sizes={
                "parameter_bytes": round(kept_bytes * (share if stage == 3 else 1.0)),
                "state_bytes": 0 if offloads else round(state * share),
                "host_bytes": round((state + trained) * share) if offloads else 0,
                "other_bytes": self.cost.other_bytes,
                "temporary_bytes": self._temporary_bytes(strategy, hardware, messages.scattered) + transient,
            },
        )

    def _messages_of(self, strategy: Strategy) -> "_Messages":
        """What a strategy moves in a microbatch; made once for all that share the state alike."""
        alike = strategy.zero_stage, strategy.fsdp, strategy.cp, strategy.dp > 1, strategy.hpz, strategy.bucket_mb, strategy.prefetch, strategy.reduces_narrow
        if alike not in self._known_messages:
            self._known_messages[alike] = self._made_messages(strategy)
        return self._known_messages[alike]

    @functools.cached_property
    def _known_messages(self) -> dict[tuple, "_Messages"]:
        return {}

    def _made_messages(self, strategy: Strategy) -> "_Messages":
        stage, ranks = strategy.zero_stage, strategy.fsdp
        weights = [weight for weight in self.cost.weights for _ in range(weight.count)]
        trained = [weight for weight in weights if weight.trained]
        gathered = [weight.travels_bytes for weight in weights]
        gradients = [weight.travels_bytes if strategy.reduces_narrow else weight.size_bytes for weight in trained]
        moved, secondary = [item for item in self.cost.moved if item.axis not in GRADIENT_AXES], 0
        bucket = _bucket_bytes(strategy, sum(gathered))
        within = strategy.cp if stage else 1  # ranks that share what those of fsdp leave
        if stage == 3:
            again = [weight.travels_bytes for weight in weights if weight.gathers > 1]
            if (group := strategy.hpz) > 1:  # two steps, of which backward repeats the one within a node
                once = [weight.travels_bytes for weight in weights if weight.gathers <= 1]
                secondary = sum(again) // group // within
                across = _gathers(Phase.FORWARD, [size // group // within for size in again], bucket, f"{FSDP}%{group}")
                moved += [_gathers(Phase.FORWARD, once, bucket, FSDP, within), across]
                moved += [_gathers(phase, again, bucket, f"{FSDP}/{group}", within) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            elif ranks > 1:
                moved += [_gathers(phase, sizes, bucket, FSDP, within) for phase, sizes in ((Phase.FORWARD, gathered), (Phase.BACKWARD, again))]
            if within > 1:
                moved += [_gathers(phase, sizes, bucket, CP) for phase, sizes in ((Phase.FORWARD, gathered), (Phase.BACKWARD, again))]
        elif stage:
            updated = [weight.size_bytes for weight in trained]
            moved += [_gathers(Phase.UPDATE, updated, bucket, axis, parts) for axis, size, parts in ((FSDP, ranks, within), (CP, within, 1)) if size > 1]
        scattered = _messages(gradients, bucket, bucket // 2)
        summed = functools.partial(_sums, bucket=bucket, ranks=strategy.zero_ranks)
        sums = [item for item in moved if item.each]
        moved = [item for item in moved if not item.each]
        moved += [_gradients(item.axis, item.kind, summed([(size, count) for _, size, count in item.each])) for item in sums if not (stage and item.axis == CP)]
        if within > 1:
            moved.append(_gradients(CP, "reduce_scatter", scattered))
        elif strategy.cp > 1 and not any(item.axis == CP for item in sums):  # of weights alone
            moved.append(_gradients(CP, "all_reduce", summed([(size, 1) for size in gradients])))
        if stage and ranks > 1:
            moved.append(_gradients(FSDP, "reduce_scatter", _messages([size / within for size in gradients], bucket, bucket // 2)))
        if strategy.dp > 1:
            moved.append(_gradients(DP, "all_reduce", summed([(size, 1) for size in gradients])))
        transient = min(sum(gathered), (strategy.prefetch + 1) * bucket) if stage == 3 else 0
        transient += transient // within if within > 1 and ranks > 1 else 0  # what fsdp gives and cp gathers
        return _Messages(moved=tuple(moved), scattered=scattered if stage else (), transient_bytes=transient + secondary)


def evaluated(cost: GraphCost, strategy: Strategy, hardware: Hardware, *, update_seconds: float, **sizes: int) -> Estimate:
    """The estimate of a whole program of one device, with the bytes that it keeps by part."""
    found = Composed(seconds=cost.seconds, moved=cost.moved, update_seconds=update_seconds, sizes=sizes)
    return estimated(found, timed(cost.seconds, cost.moved, strategy, hardware, count=strategy.microbatches)).on(hardware)


def estimated(found: Composed, time: Timed) -> Estimate:
    return Estimate(
        compute_seconds=sum(time.compute.values()),
        update_seconds=found.update_seconds,
        exposed_seconds=time.exposed_by_axis(),
        hidden_seconds=time.hidden,
        **found.sizes,
    )


def timed(seconds: Mapping[Phase, float], moved: Sequence[Moved], strategy: Strategy, hardware: Hardware, *, sums_once: bool = False, count: int = 1) -> Timed:
    """Which messages hide behind computation.

    Args:
        seconds: of the kernels of each phase. Those of the update, which is memory traffic, are not read.
        sums_once: as of `Profile.estimate`.
        count: microbatches, each of which runs forward and backward, and, unless `sums_once`, reduces its gradients.
    """
    seconds = {phase: count * seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}
    exposed: dict[tuple[Phase, str], float] = {}
    hideable: dict[Phase, dict[str, float]] = {phase: {} for phase in seconds}
    for item in moved:
        axis = item.axis.partition("/")[0].partition("%")[0]
        once = item.phase is Phase.UPDATE or (sums_once and item.role is Role.GRADIENT)
        time = move_seconds(item, strategy.mesh, hardware) * (1 if once else count)
        if (axis in GRADIENT_AXES or item.role in _HIDE) and not hardware.shared_cores and item.phase is not Phase.UPDATE:
            hideable[item.phase][axis] = hideable[item.phase].get(axis, 0.0) + time
        else:
            exposed[item.phase, axis] = exposed.get((item.phase, axis), 0.0) + time
    hidden = 0.0
    for phase, by_axis in hideable.items():
        total = sum(by_axis.values())
        behind = min(total, seconds[phase])
        hidden += behind
        seconds[phase] += behind * (SLOWED - 1)
        for axis, time in by_axis.items() if total > behind else ():
            exposed[phase, axis] = exposed.get((phase, axis), 0.0) + (total - behind) * time / total
    return Timed(compute=seconds, exposed=exposed, hidden=hidden)


def _reordered_bytes(weights: Sequence[Weight], strategy: Strategy) -> dict[Phase, int]:
    """Read and written by copies around gathers and scatters of what is split along another dim than the first: ranks' blocks are interleaved there."""
    found: dict[Phase, int] = dict.fromkeys(Phase, 0)
    for weight in weights if strategy.zero_stage else ():
        travels = weight.count * weight.travels_bytes
        gradient = travels if strategy.reduces_narrow else weight.count * weight.size_bytes
        split = split_before(weight.shape, strategy.cp, strategy.fsdp)
        if strategy.hpz > 1 and weight.gathers > 1:  # the parts of a node come into the order of the ranks
            found[Phase.FORWARD] += 2 * travels // strategy.cp
            found[Phase.BACKWARD] += 2 * travels // strategy.cp
        if split is None:
            continue
        steps = 1 / strategy.cp * (strategy.cp > 1 and strategy.fsdp > 1)  # what one step gives is put together for the next one
        if split.dim:
            steps += 1
        if strategy.zero_stage == 3:
            found[Phase.FORWARD] += round(2 * steps * travels)
            found[Phase.BACKWARD] += round(2 * steps * travels * (weight.gathers > 1))
        if weight.trained:
            strided = (travels + gradient) * weight.gradient_is_strided if split.dim else 0
            found[Phase.BACKWARD] += round(2 * steps * gradient) + strided
    return found


def _gathers(phase: Phase, sizes: Sequence[int], bucket: int, axis: str, parts: int = 1) -> Moved:
    """Small tensors have messages of their own (see `graphacc.passes.communication.buckets`).

    Args:
        sizes: of whole tensors, of which so many `parts` each are gathered here.
    """
    small = [size for size in sizes if size <= SMALL_BYTES]
    messages = _messages(small, bucket, bucket) + _messages([size for size in sizes if size > SMALL_BYTES], bucket, bucket // 2)
    return Moved(axis=axis, kind="all_gather", role=Role.WEIGHT, phase=phase, number=len(messages), size_bytes=sum(messages) // parts)


def _gradients(axis: str, kind: str, messages: tuple[float, ...]) -> Moved:
    return Moved(axis=axis, kind=kind, role=Role.GRADIENT, phase=Phase.BACKWARD, number=len(messages), size_bytes=sum(messages))


def _sums(sizes: Sequence[tuple[float, float]], bucket: int, ranks: int) -> tuple[float, ...]:
    """Messages of sums of gradients, of (size, how many there are), which have been scattered over so many ranks before; those of as many follow on each other in every layer."""
    each = [size for count, run in itertools.groupby(sizes, key=lambda item: round(item[1])) for size in [size for size, _ in run] * count]
    if ranks == 1:
        return _messages(each, bucket, SMALL_BYTES)
    joined = _messages([size for size in each if size <= bucket // 2], bucket, bucket // 2)
    alone = _messages([size / ranks for size in each if size > bucket // 2], bucket, SMALL_BYTES)
    return (*(size / ranks for size in joined), *alone)


def _messages(sizes: Sequence[float], bucket: int, alone: int) -> tuple[float, ...]:
    """Messages of at most `bucket` bytes, in order; what is larger than `alone` is one by itself."""
    messages, filling = [], 0
    for size in sizes:
        if size > alone:
            messages.append(size)
        elif filling and filling + size > bucket:
            messages.append(filling)
            filling = size
        else:
            filling += size
    return tuple([*messages, *([filling] if filling else [])])


def _bucket_bytes(strategy: Strategy, weights: int) -> int:
    if strategy.bucket_mb is None:
        return max(1, min(MAX_BYTES, weights // SHARE))
    return round(strategy.bucket_mb * 1e6)


def _cast_bytes(weights: Sequence[Weight]) -> int:
    """Read and written by the casts of weights to the dtype in which they are computed with."""
    return sum(weight.count * (weight.size_bytes + weight.travels_bytes) for weight in weights if weight.travels_bytes < weight.size_bytes)


def _stream_seconds(size: float, hardware: Hardware) -> float:
    return size / (hardware.chip.memory_bandwidth * hardware.chip.memory_efficiency)


