"""ZeRO-Offload: exact parameters and the optimizer's state on the host, which does the update (arXiv 2101.06840).

A program gives gradients, sharded as the state is. The host updates the blocks that this process's devices have gradients of, with `CPUAdam` for Adam and AdamW,
else with the optimizer's own code, which has to be one that updates every element by itself; new values go back in the dtype that programs read, and are
gathered by whatever gathers parameters.

Where nothing needs all gradients first, the program sends every gradient as it is made (`graphacc.runtime.gradient_stream`), and a thread updates what has
arrived while the program goes on; where something does, the update begins when the program has ended. Both give the same bits. A step that fails after the
first block was updated leaves parameters of no step: from then on everything that would read or update them is an error (`HalfUpdated`).

With `Strategy.delay` a step starts its update and returns: it runs in a thread while the devices do the next step, at whose end the parameters on the devices
are replaced. What reads exact values (a parameter in the loop, the optimizer's state, a checkpoint, evaluation) waits for it.
"""

import collections
import concurrent.futures
import dataclasses
import inspect
import time
import typing
from collections.abc import Iterator, Mapping, Sequence

import jax
import torch
from jax.sharding import Mesh
from torch import Tensor, optim

from graphacc.capture.optimizer import ELEMENTWISE, plain, run_step, stand_in, steps_like
from graphacc.errors import LoopError, StrategyError
from graphacc.graph import Input, Kind, Output
from graphacc.loop.managed import Handle, handle_of
from graphacc.loop.optimizers import Binding
from graphacc.optim import FP32_OR_BF16, CPUAdam
from graphacc.runtime.exchange import start_copy
from graphacc.runtime.gradient_stream import GradientStream, Staging
from graphacc.runtime.host_array import Bounds, HostArray
from graphacc.runtime.layout import sharding

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.programs import Compiled, Programs

_ADAM = (optim.Adam, optim.AdamW)

BlockState = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter in one update."""

    name: str
    group: int
    master: HostArray
    gradient: jax.Array | HostArray
    state: dict[Bounds, BlockState]
    item: Input | None  # of the parameter on the devices, in the layout of its master; None: the devices do not have it
    mesh: Mesh


class HalfUpdated(LoopError):
    """An update stopped after some blocks were new, and others were not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """When an update ran, in seconds of `time.perf_counter`."""

    start: float  # it was asked for; its program was started, if it sends its gradients
    arrivals: tuple[tuple[float, int], ...]  # when gradients were in the host's memory, and their bytes
    updates: tuple[tuple[float, float], ...]  # from and to when the optimizer worked on them
    program_end: float | None  # the program that made the gradients had ended; None: nobody waited for that, as the update was delayed
    end: float  # the new parameters were ready for the devices

    @property
    def update_seconds(self) -> float:
        """What the optimizer took."""
        return sum(end - start for start, end in self.updates)

    @property
    def tail_seconds(self) -> float | None:
        """What of the update was left when the program had ended."""
        return None if self.program_end is None else max(0.0, self.end - self.program_end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """One step of an optimizer on the host."""

    optimizer: optim.Optimizer
    groups: tuple[dict, ...]  # the settings of the groups as they were when the step was asked for
    members: tuple[Member, ...]
    stream: GradientStream | None  # that gradients arrive by; None: they are there

    def run(self) -> tuple[dict[str, tuple[Input, jax.Array, Mesh]], Span]:
        """Update the blocks; returns the parameters for the devices, by name.

        Raises:
            HalfUpdated: some blocks are new.
        """
        start = time.perf_counter() if self.stream is None else self.stream.opened
        members = {member.name: member for member in self.members}
        blocks = {(block.member.name, block.key): block for block in self._blocks()}
        left = collections.Counter(name for name, _ in blocks)  # parameter -> blocks that are old
        program_end = time.perf_counter() if self.stream is None else None
        arrivals, updates, arrays = [], [], {}
        try:
            for found in self._arrivals(blocks):
                began = time.perf_counter()
                self._step([blocks[each] for each, _, _ in found])
                updates.append((began, time.perf_counter()))
                arrivals += [(seconds, size_bytes) for _, seconds, size_bytes in found]
                names = [name for (name, _), _, _ in found]
                left.subtract(names)
                arrays |= {name: _for_devices(members[name], blocks) for name in set(names) if not left[name] and members[name].item is not None}
        except Exception as error:
            num_new = len(arrivals)
            if not num_new:
                raise
            raise HalfUpdated(
                f"an optimizer's step failed when {num_new} of {len(blocks)} blocks of parameters on the host were new ({type(error).__name__}: {error}): "
                "parameters and state belong to no step any more. Make the model and the optimizer again, and load the last checkpoint"
            ) from error
        return arrays, Span(start=start, arrivals=tuple(arrivals), updates=tuple(updates), program_end=program_end, end=time.perf_counter())

    def _arrivals(self, blocks: "Mapping[tuple[str, Bounds], _Block]") -> Iterator[list[tuple[tuple[str, Bounds], float, int]]]:
        """The blocks whose gradients are there, when they were, and their bytes."""
        if self.stream is None:
            now = time.perf_counter()
            yield [(each, now, block.grad.nbytes) for each, block in blocks.items()]
            return
        for found in self.stream.arrivals():
            yield [((each.name, each.key), each.seconds, each.size_bytes) for each in found]

    def _step(self, blocks: "Sequence[_Block]") -> None:
        if is_adam(self.optimizer) and all(block.param.dtype is torch.float32 for block in blocks):
            _step_adam(self.groups, blocks)
        else:
            _step_torch(self.optimizer, self.groups, blocks)

    def _blocks(self) -> "Iterator[_Block]":
        for member in self.members:
            if isinstance(member.gradient, jax.Array):
                for shard in member.gradient.addressable_shards:
                    start_copy(shard.data)
        for member in self.members:
            gradient = member.gradient if isinstance(member.gradient, HostArray) else HostArray.view(member.gradient, member.master.item)
            for key, param in member.master.blocks.items():
                copy = None if member.item is None else torch.empty(param.shape, dtype=member.item.dtype)
                yield _Block(member=member, key=key, param=param, grad=gradient.blocks[key], copy=copy, state=member.state.setdefault(key, {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    member: Member
    key: Bounds
    param: Tensor
    grad: Tensor
    copy: Tensor | None  # gets the new values
    state: BlockState


def _for_devices(member: Member, blocks: Mapping[tuple[str, Bounds], _Block]) -> tuple[Input, jax.Array, Mesh]:
    """A parameter's new values."""
    assert member.item is not None
    copies = {key: copy for key in member.master.blocks if (copy := blocks[member.name, key].copy) is not None}
    return member.item, HostArray(item=member.item, layout=member.master.layout, blocks=copies).on_devices(copy=False), member.mesh


def _step_adam(groups: Sequence[dict], blocks: Sequence[_Block]) -> None:
    """One pass over memory on all cores, copies included."""
    inner = CPUAdam(_groups(groups, blocks))
    inner.state.update({block.param: block.state for block in blocks})
    step = inspect.unwrap(CPUAdam.step)
    copied = {block.param: block.copy for block in blocks if block.copy is not None and block.copy.dtype in FP32_OR_BF16}
    step(inner, grads={block.param: block.grad for block in blocks}, copies=copied)
    for block in blocks:
        if block.copy is not None and block.param not in copied:
            block.copy.copy_(block.param)


def _step_torch(optimizer: optim.Optimizer, groups: Sequence[dict], blocks: Sequence[_Block]) -> None:
    """The optimizer's own step on blocks."""
    inner = stand_in(optimizer, _groups(groups, blocks), {block.param: block.state for block in blocks})
    for block in blocks:
        block.param.grad = block.grad.to(block.param.dtype)
    run_step(inner)
    for block in blocks:
        block.param.grad = None
        if block.copy is not None:
            block.copy.copy_(block.param)


def _groups(groups: Sequence[dict], blocks: Sequence[_Block]) -> list[dict]:
    found: list[dict] = [{**plain(group), "params": []} for group in groups]
    for block in blocks:
        found[block.member.group]["params"].append(block.param)
    return [group for group in found if group["params"]]


def is_adam(optimizer: optim.Optimizer) -> bool:
    """Whether `CPUAdam` does its update."""
    return steps_like(optimizer, _ADAM)


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise StrategyError where blocks of a parameter cannot be updated by themselves."""
    if not steps_like(optimizer, ELEMENTWISE):
        raise StrategyError(
            f"offload='optimizer' lets the host update every block of a parameter by itself, and {type(optimizer).__name__} is not known to update elements "
            f"without looking at others: use one of torch.optim's {', '.join(known.__name__ for known in ELEMENTWISE)}, or leave offload out"
        )


class Offload:
    """The exact parameters and the optimizers' state of one model on this process's host, and the updates that run."""

    def __init__(self, *, delay: int, delay_after: int):
        self.delay, self.delay_after = delay, delay_after
        self.masters: dict[str, HostArray] = {}  # of parameters that were updated; before, the loop's own tensor is exact
        self.layouts: dict[str, tuple[Input, Mesh]] = {}  # of exact parameters, and of the state that is shaped like them
        self.state: dict[str, dict[Bounds, BlockState]] = {}
        self.spans: list[Span] = []  # of the last updates
        self.num_updates: collections.Counter[str | None] = collections.Counter()  # why updates began when their program had ended; None: they began before
        self._half_updated: HalfUpdated | None = None
        self._free: dict[tuple[Output, ...], list[Staging]] = {}  # by the gradients that they are for
        self._used: dict[GradientStream, tuple[Output, ...]] = {}
        self._running: dict[int, concurrent.futures.Future] = {}  # by identity of the binding
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="graphacc-offload")

    # ---- values

    def state_targets(self, name: str) -> list[str]:
        """The targets of the optimizer's state of one parameter."""
        return [f"{name}/{key}" for key in next(iter(self.state.get(name, {}).values()), {})]

    def find(self, kind: Kind, target: str) -> tuple[HostArray, Input] | None:
        """An exact parameter, or a tensor of an optimizer's state."""
        self.check()
        if kind is Kind.PARAM and target in self.masters:
            return self.masters[target], self.masters[target].item
        name, _, key = target.rpartition("/")
        if kind is not Kind.STATE or name not in self.state:
            return None
        like, mesh = self.layouts[name]
        at, first = next((at, held[key]) for at, held in self.state[name].items())
        if first.dim() and tuple(first.shape) == tuple(stop - start for start, stop in at):
            item = dataclasses.replace(like, kind=kind, target=target, dtype=first.dtype)
            return HostArray(item=item, layout=sharding(item, mesh), blocks={at: held[key] for at, held in self.state[name].items()}), item
        item = Input(name="", kind=kind, target=target, shape=tuple(first.shape), dtype=first.dtype)
        return HostArray.of(first, item, mesh), item

    def load_state(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Take over the optimizer's state of one parameter, global tensors; none begins anew."""
        self.state.pop(name, None)
        if not values:
            return
        item, mesh = self.layouts[name]
        blocks: dict[Bounds, BlockState] = {key: {} for key in self.masters[name].blocks}
        for label, value in values.items():
            whole = tuple(value.shape) == item.shape and value.dim() > 0
            split = HostArray.of(value, dataclasses.replace(item, dtype=value.dtype), mesh).blocks if whole else {}
            for key, held in blocks.items():
                held[label] = split[key] if whole else value.detach().clone()
        self.state[name] = blocks

    def forget(self, name: str) -> None:
        """The loop has written a parameter: its own tensor is exact now."""
        self.finish()
        self.masters.pop(name, None)
        for future in self._running.values():
            future.result()[0].pop(name, None)

    @property
    def host_bytes(self) -> dict[Kind, int]:
        """Bytes of exact parameters, state and gradients on this process's host."""
        stagings = [stream.staging for stream in list(self._used)] + [staging for free in list(self._free.values()) for staging in list(free)]
        state = (tensor for blocks in self.state.values() for held in blocks.values() for tensor in held.values())
        return {Kind.PARAM: sum(master.nbytes for master in self.masters.values()), Kind.STATE: sum(tensor.nbytes for tensor in state),
                Kind.GRAD: sum(staging.nbytes for staging in stagings)}  # fmt: skip

    # ---- updates

    def check(self) -> None:
        """Raise HalfUpdated where a step has failed in its middle."""
        if self._half_updated is not None:
            raise HalfUpdated(str(self._half_updated)) from self._half_updated

    def open_stream(self, compiled: "Compiled", mesh: Mesh) -> GradientStream:
        """What a run of the program sends its gradients to; to be given to `submit`, or back by `close_stream`."""
        items = compiled.sent_gradients
        free = self._free.setdefault(items, [])
        ticket = next(item for item in compiled.graph.inputs if item.kind is Kind.STREAM)
        stream = GradientStream(free.pop() if free else Staging(items, ticket, mesh))
        self._used[stream] = items
        return stream

    def close_stream(self, stream: GradientStream) -> None:
        """Its memory is free for others."""
        if (items := self._used.pop(stream, None)) is not None:
            stream.close()
            self._free[items].append(stream.staging)

    def submit(self, key: int, update: Update, programs: "Programs", *, delayed: bool) -> None:
        """Run an update: now, or beside the next step if it is `delayed`. One whose gradients still arrive runs in the thread in any case."""
        self.check()
        if not delayed and update.stream is None:
            self._publish(update.run(), programs)
            return
        if key in self._running:
            self._settle(key, programs)
        self._running[key] = self._worker.submit(self._run, update)
        if not delayed:
            assert update.stream is not None
            self._settle(key, programs, update.stream.end_of_program())

    def _run(self, update: Update) -> tuple[dict[str, tuple[Input, jax.Array, Mesh]], Span]:
        """In the thread."""
        try:
            self.check()
            return update.run()
        except HalfUpdated as error:
            self._half_updated = error
            raise
        finally:
            if update.stream is not None:
                self.close_stream(update.stream)

    def finish(self) -> None:
        """Wait for the updates that run; exact values may be read then."""
        self.check()
        for future in self._running.values():
            future.result()

    def drain(self, programs: "Programs") -> None:
        """Finish what runs, and give the devices the results."""
        self.check()
        while self._running:
            self._settle(next(iter(self._running)), programs)

    def _settle(self, key: int, programs: "Programs", program_end: float | None = None) -> None:
        future = self._running[key]
        concurrent.futures.wait([future])  # an interrupt while it waits leaves the update to whoever comes next
        del self._running[key]
        arrays, span = future.result()
        self._publish((arrays, dataclasses.replace(span, program_end=span.program_end or program_end)), programs)

    def _publish(self, result: tuple[dict[str, tuple[Input, jax.Array, Mesh]], Span], programs: "Programs") -> None:
        arrays, span = result
        for item, array, mesh in arrays.values():
            programs.state.set(item, array, mesh)
        self.spans = [*self.spans[-99:], span]

    def lines(self) -> list[str]:
        """What `explain()` says about the updates."""
        found = [f"{self.num_updates[None]} update(s) on the host began while their program was sending gradients"] if self.num_updates[None] else []
        return found + [f"{count} update(s) on the host began when their program had ended: {why}" for why, count in self.num_updates.items() if why is not None]


def open_stream(engine: "Engine", binding: Binding, compiled: "Compiled") -> GradientStream | str:
    """What a run of a program sends its gradients to, or why they cannot be sent.

    Args:
        compiled: of the kind GRAD_TO_HOST; what it reads is on the devices.
    """
    programs = engine.programs
    offload = programs.offload
    assert offload is not None
    items = {item.target: item for item in compiled.sent_gradients}
    _bring(engine, offload, binding, {name: (item, programs.mesh) for name, item in items.items()})
    for name, item in items.items():
        kept, mesh = offload.layouts[name]
        if (kept.shape, kept.shards, mesh) != (item.shape, item.shards, programs.mesh):
            return f"the exact values of {name!r} are sharded otherwise than its gradient"
    return offload.open_stream(compiled, programs.mesh)


def delays(engine: "Engine") -> bool:
    """Whether the update of the step that is about to run is delayed."""
    offload = engine.programs.offload
    return offload is not None and offload.delay > 0 and engine.steps >= offload.delay_after


def _bring(engine: "Engine", offload: Offload, binding: Binding, layouts: Mapping[str, tuple[Output, Mesh] | None]) -> None:
    """Have the exact parameters and the optimizer's state on the host.

    Args:
        layouts: parameter -> how its gradient is sharded; None: as the one on the devices is.
    """
    if not binding.state_on_device:
        offload.drain(engine.programs)
    for name, layout in layouts.items():
        _master(engine, offload, engine.handles[name], layout)
    if not binding.state_on_device:
        _adopt_state(engine, offload, binding)
        binding.state_on_device = True


def update_of(
    engine: "Engine", binding: Binding, names: Sequence[str], *, from_host: frozenset[str] = frozenset(), stream: GradientStream | None = None
) -> Update:
    """An optimizer's step, for the host to do.

    Args:
        names: the parameters that have a gradient.
        from_host: those of them whose gradient is on the host already; the others' are on the devices.
        stream: where all gradients arrive.
    """
    programs = engine.programs
    offload = programs.offload
    assert offload is not None
    wanted = {handle.name: group for group, settings in enumerate(binding.optimizer.param_groups) for handle in _handles(settings["params"])}
    _bring(engine, offload, binding, dict.fromkeys(names))
    members = []
    for name in names:
        master, mesh = offload.masters[name], offload.layouts[name][1]
        item = None
        if programs.state.holds(Kind.PARAM, name):
            item = dataclasses.replace(master.item, dtype=programs.state.find(Kind.PARAM, name)[1].dtype)
        if stream is not None:
            gradient = stream.staging.arrays[name]
        else:
            gradient = _from_host(engine, master, mesh) if name in from_host else _from_devices(engine, master, mesh)
        state = offload.state.setdefault(name, {})
        members.append(Member(name=name, group=wanted[name], master=master, gradient=gradient, state=state, item=item, mesh=mesh))
    groups = tuple({key: _held(value) for key, value in group.items() if key != "params"} for group in binding.optimizer.param_groups)
    return Update(optimizer=binding.optimizer, groups=groups, members=tuple(members), stream=stream)


def _from_devices(engine: "Engine", master: HostArray, mesh: Mesh) -> jax.Array | HostArray:
    """A parameter's gradient, which the devices do not keep, unless the loop wants to read it."""
    name, state = master.item.target, engine.programs.state
    array = state.get(dataclasses.replace(master.item, kind=Kind.GRAD, dtype=state.find(Kind.GRAD, name)[1].dtype), mesh)
    if engine.options.keep_gradients:
        return HostArray.view(array, master.item).copy()  # the next backward adds to it in place
    state.discard(Kind.GRAD, name)
    return array


def _from_host(engine: "Engine", master: HostArray, mesh: Mesh) -> HostArray:
    gradient = engine.handles[master.item.target].host_grad
    assert gradient is not None
    return HostArray.of(gradient, master.item, mesh)


def _handles(parameters: Sequence[Tensor]) -> Iterator[Handle]:
    return (handle for parameter in parameters if (handle := handle_of(parameter)) is not None)


def _held(value: object) -> object:
    """A setting as it is now: the loop may change a learning rate that is a tensor while the update waits."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _master(engine: "Engine", offload: Offload, handle: Handle, layout: tuple[Output, Mesh] | None = None) -> HostArray:
    """The exact values of a parameter, sharded as its first gradient was.

    Args:
        layout: of a gradient that is not on the devices, for the first time.
    """
    name, state = handle.name, engine.programs.state
    if handle.host_is_newer:
        offload.forget(name)
    if name not in offload.masters:
        value = handle.host_value()
        known = offload.layouts.get(name)
        if known is None or (known[0].shape, known[0].dtype) != (tuple(value.shape), value.dtype):
            kind = next((kind for kind in (Kind.GRAD, Kind.PARAM) if state.holds(kind, name)), None)
            shards, mesh = ((), state.mesh) if kind is None else (state.find(kind, name)[1].shards, state.mesh_of(kind, name))
            if layout is not None:
                shards, mesh = layout[0].shards, layout[1]
            known = Input(name="", kind=Kind.PARAM, target=name, shape=tuple(value.shape), dtype=value.dtype, shards=shards), mesh
            offload.layouts[name] = known
        offload.masters[name] = HostArray.of(value, *known)
    return offload.masters[name]


def _adopt_state(engine: "Engine", offload: Offload, binding: Binding) -> None:
    """What the optimizer holds as state becomes that of the blocks; its tensors are let go, and fetched again where somebody looks, unless the loop holds them, too."""
    held, stays = binding.optimizer.state, binding.is_held
    for name in binding.names:
        handle = engine.handles[name]
        entry = dict.get(held, handle.tensor)
        values = {key: torch.as_tensor(value) for key, value in (entry or {}).items() if value is not None}
        if stays:
            values = {key: value.clone() for key, value in values.items()}
        elif entry:
            entry.clear()  # and keeps its place among the others
        if values:
            _master(engine, offload, handle)
        offload.load_state(name, values)


__all__ = ["GradientStream", "HalfUpdated", "Offload", "Span", "check_optimizer", "delays", "is_adam", "open_stream", "update_of"]
