"""Time and memory of a strategy: evaluated on the graph of one device, or composed from a profile by arithmetic.

A profile is the graph of one rank of the model-parallel axes at the strategy's local batch (the real passes, with plain `dp` as data axes).
What `dp`, `fsdp` and `zero` add to it are collectives of known bytes and shares of the state:

    ZeRO-3    gather of every weight for forward and backward, scatter of its gradient  over fsdp; all-reduce of the scattered part over dp
    ZeRO-1    scatter of every gradient, gather of the updated weight                   over fsdp; all-reduce of the scattered part over dp
    none      all-reduce of every gradient                                              over dp

(Rajbhandari et al., "ZeRO", 2020, section 7.) Collectives of the data axes hide behind the computation of their phase where the
hardware runs them at the same time; sums and exchanges of tp, cp and ep are waited for.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from graphacc.costs.hardware import Hardware
from graphacc.graph import Phase
from graphacc.passes.communication.buckets import MAX_BYTES, SHARE, SMALL_BYTES
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.zero import state_split
from graphacc.search.cost import GraphCost, Moved, Weight, move_seconds
from graphacc.strategy.axes import DP, FSDP, GRADIENT_AXES
from graphacc.strategy.spec import Strategy

SLOWED = 1.05
"""How much longer computation takes beside collectives (Galvatron measures 1.1 to 1.3 on PCIe; NVLink's copies take few multiprocessors)."""


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
    host_bytes: int = 0  # exact parameters and the optimizer's state that the device's host has for it (`Strategy.offload`)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.update_seconds + sum(self.exposed_seconds.values())

    @property
    def bytes_per_device(self) -> int:
        return self.parameter_bytes + self.state_bytes + self.other_bytes + self.temporary_bytes

    def parts(self) -> dict[str, float]:
        """What the seconds are spent on."""
        return {"compute": self.compute_seconds, "update": self.update_seconds, **{f"{axis} communication": s for axis, s in self.exposed_seconds.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What one rank of (tp, cp, ep) computes, moves and keeps, at one local batch."""

    cost: GraphCost
    temporary_bytes: int
    state_bytes: Mapping[str, int]  # parameter -> bytes of its optimizer state on this rank
    update_bytes: int  # that the whole update reads and writes

    def floor(self, strategy: Strategy, hardware: Hardware) -> float:
        """Seconds of what every rank computes and waits for, also where one of the model axes is larger.

        Not in it: what the data axes may divide or hide, and sums of gradients over a model axis, which shrink with the weights that another axis splits.
        """
        cast = sum(weight.count * (weight.size_bytes + weight.travels_bytes) for weight in self.cost.weights if weight.travels_bytes < weight.size_bytes)
        waited = [item for item in self.cost.moved if item.axis not in GRADIENT_AXES and item.role is not Role.GRADIENT]
        once = self.cost.seconds[Phase.FORWARD] + self.cost.seconds[Phase.BACKWARD] - _stream_seconds(cast, hardware)
        return strategy.microbatches * (once + sum(move_seconds(item, strategy.mesh, hardware) for item in waited))

    def gradient_bytes(self, strategy: Strategy) -> int:
        """Of the gradients that stay between programs: whole ones below ZeRO-2, unless they leave for the host."""
        whole = sum(weight.count * weight.size_bytes for weight in self.cost.weights if weight.trained)
        return whole // strategy.fsdp if strategy.zero_stage >= 2 or strategy.offload is not None else whole

    def estimate(self, strategy: Strategy, hardware: Hardware, *, sums_once: bool = False) -> Estimate:
        """Compose the estimate of a strategy with this profile's model-parallel axes.

        Args:
            sums_once: gradients are summed over the ranks after the last microbatch, as Megatron-LM does; our programs do it after each.
        """
        stage, ranks = strategy.zero_stage, strategy.fsdp
        weights = [weight for weight in self.cost.weights for _ in range(weight.count)]
        kept = sum(weight.size_bytes for weight in weights)
        trained = [weight for weight in weights if weight.trained]
        state = sum(self.state_bytes.get(weight.name, 0) for weight in weights)
        gathered = [weight.travels_bytes for weight in weights]
        gradients = [weight.travels_bytes if strategy.reduces_narrow else weight.size_bytes for weight in trained]
        moved = [item for item in self.cost.moved if item.axis not in GRADIENT_AXES]
        bucket = _bucket_bytes(strategy, sum(gathered))
        if stage == 3:
            again = [weight.travels_bytes for weight in weights if weight.gathers > 1]
            moved += [_gathers(phase, sizes, bucket) for phase, sizes in ((Phase.FORWARD, gathered), (Phase.BACKWARD, again))]
        elif stage:
            moved.append(_gathers(Phase.UPDATE, [weight.size_bytes for weight in trained], bucket))
        if stage:
            moved.append(_gradients(FSDP, "reduce_scatter", _messages(gradients, bucket, bucket // 2)))
        if strategy.dp > 1:
            parts = [size // ranks for size in gradients] if stage else gradients
            moved.append(_gradients(DP, "all_reduce", _messages(parts, bucket, SMALL_BYTES)))
        share = 1 / ranks if stage else 1.0
        transient = min(sum(gathered), (strategy.prefetch + 1) * bucket) if stage == 3 else 0
        cast = [weight for weight in weights if weight.travels_bytes < weight.size_bytes] if stage == 3 else []  # each rank casts its part, and keeps that
        offloads = strategy.offload is not None
        kept_bytes = kept // 2 if offloads and strategy.precision == "bf16" else kept
        seconds = dict(self.cost.seconds)
        seconds[Phase.FORWARD] -= _stream_seconds(sum(weight.size_bytes + weight.travels_bytes for weight in cast) * (1 - share), hardware)
        for phase, size in _reordered_bytes(weights, strategy).items():
            seconds[phase] += _stream_seconds(size, hardware)
        transient -= round(sum(weight.travels_bytes for weight in cast if weight.gathers > 1) * (1 - share))
        return _estimate(
            seconds=seconds,
            update=0.0 if offloads else _stream_seconds(self.update_bytes * share, hardware),
            moved=moved,
            strategy=strategy,
            hardware=hardware,
            sums_once=sums_once,
            parameter_bytes=round(kept_bytes * (share if stage == 3 else 1.0)),
            state_bytes=0 if offloads else round(state * share),
            host_bytes=round((state + sum(weight.size_bytes for weight in trained)) * share) if offloads else 0,
            other_bytes=self.cost.other_bytes,
            temporary_bytes=self.temporary_bytes + self.cost.saved_bytes + transient,
        )


def evaluated(cost: GraphCost, strategy: Strategy, hardware: Hardware, *, update_seconds: float, **sizes: int) -> Estimate:
    """The estimate of a whole program of one device, with the bytes that it keeps by part."""
    seconds = {phase: cost.seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}
    return _estimate(seconds=seconds, update=update_seconds, moved=list(cost.moved), strategy=strategy, hardware=hardware, sums_once=False, **sizes)


def _estimate(
    *, seconds: Mapping[Phase, float], update: float, moved: list[Moved], strategy: Strategy, hardware: Hardware, sums_once: bool, **sizes: int
) -> Estimate:
    count = strategy.microbatches  # each runs forward and backward, and, unless `sums_once`, reduces its gradients
    seconds = {phase: count * time for phase, time in seconds.items()}
    exposed: dict[str, float] = {}
    hideable = dict.fromkeys(Phase, 0.0)
    by_axis: dict[tuple[Phase, str], float] = {}
    for item in moved:
        axis = item.axis.partition("/")[0].partition("%")[0]
        once = item.phase is Phase.UPDATE or (sums_once and item.role is Role.GRADIENT)
        time = move_seconds(item, strategy.mesh, hardware) * (1 if once else count)
        if axis in GRADIENT_AXES and not hardware.shared_cores and item.phase is not Phase.UPDATE:
            hideable[item.phase] += time
            by_axis[item.phase, axis] = by_axis.get((item.phase, axis), 0.0) + time
        else:
            exposed[axis] = exposed.get(axis, 0.0) + time
    hidden, slowed = 0.0, 0.0
    for phase, total in hideable.items():
        behind = min(total, seconds.get(phase, 0.0))
        hidden += behind
        slowed += behind * (SLOWED - 1)
        for (at, axis), time in by_axis.items():
            if at is phase and total > behind:
                exposed[axis] = exposed.get(axis, 0.0) + (total - behind) * time / total
    compute = sum(seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)) + slowed
    return Estimate(compute_seconds=compute, update_seconds=update, exposed_seconds=exposed, hidden_seconds=hidden, **sizes)


def _reordered_bytes(weights: Sequence[Weight], strategy: Strategy) -> dict[Phase, int]:
    """Read and written by copies around gathers and scatters of what is split along another dim than the first: ranks' blocks are interleaved there."""
    found: dict[Phase, int] = dict.fromkeys(Phase, 0)
    for weight in weights if strategy.zero_stage else ():
        split = state_split(weight.shape, strategy.fsdp)
        if split is None or split.dim == 0:
            continue
        if strategy.zero_stage == 3:
            found[Phase.FORWARD] += 2 * weight.travels_bytes
            found[Phase.BACKWARD] += 2 * weight.travels_bytes * (weight.gathers > 1)
        if weight.trained:
            gradient = weight.travels_bytes if strategy.reduces_narrow else weight.size_bytes
            found[Phase.BACKWARD] += 2 * gradient + (weight.travels_bytes + gradient) * weight.gradient_is_strided
    return found


def _gathers(phase: Phase, sizes: Sequence[int], bucket: int) -> Moved:
    """Small tensors have messages of their own (see `graphacc.passes.communication.buckets`)."""
    small = [size for size in sizes if size <= SMALL_BYTES]
    messages = _messages(small, bucket, bucket) + _messages([size for size in sizes if size > SMALL_BYTES], bucket, bucket // 2)
    return Moved(axis=FSDP, kind="all_gather", role=Role.WEIGHT, phase=phase, sizes=messages, counts=(1,) * len(messages))


def _gradients(axis: str, kind: str, messages: tuple[int, ...]) -> Moved:
    return Moved(axis=axis, kind=kind, role=Role.GRADIENT, phase=Phase.BACKWARD, sizes=messages, counts=(1,) * len(messages))


def _messages(sizes: Sequence[int], bucket: int, alone: int) -> tuple[int, ...]:
    """Messages of at most `bucket` bytes, in order; what is larger than `alone` is one by itself."""
    messages, filling = [], 0
    for size in sizes:
        if size > alone:
            messages.append(size)
        elif filling + size > bucket:
            messages.append(filling)
            filling = size
        else:
            filling += size
    return tuple([*messages, *([filling] if filling else [])])


def _bucket_bytes(strategy: Strategy, weights: int) -> int:
    if strategy.bucket_mb is None:
        return max(1, min(MAX_BYTES, weights // SHARE))
    return round(strategy.bucket_mb * 1e6)


def _stream_seconds(size: float, hardware: Hardware) -> float:
    return size / (hardware.chip.memory_bandwidth * hardware.chip.memory_efficiency)


