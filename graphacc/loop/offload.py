"""ZeRO-Offload: exact parameters and the optimizer's state on the host, which does the update (arXiv 2101.06840).

A program gives gradients, sharded as the state is. The host updates the blocks that this process's devices have gradients of, with `CPUAdam` for Adam and AdamW,
else with the optimizer's own code, which has to be one that updates every element by itself; new values go back in the dtype that programs read, and are
gathered by whatever gathers parameters.

With `Strategy.delay` a step starts its update and returns: it runs in a thread while the devices do the next step, at whose end the parameters on the devices
are replaced. What reads exact values (a parameter in the loop, the optimizer's state, a checkpoint, evaluation) waits for it.
"""

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

from graphacc.capture.optimizer import plain, run_step, stand_in, traceable_class
from graphacc.errors import StrategyError
from graphacc.graph import Input, Kind
from graphacc.loop.managed import Handle, handle_of
from graphacc.loop.optimizers import Binding
from graphacc.optim import CPUAdam
from graphacc.runtime.host_array import Bounds, HostArray
from graphacc.runtime.layout import sharding

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.programs import Programs

_ELEMENTWISE = (optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop)
"""Optimizers whose update of an element depends on that element alone, so that a block can be updated without the others."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """When an update ran, in seconds of `time.perf_counter`."""

    ready: float  # its gradients were there
    start: float  # it was asked for
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """One step of an optimizer on the host."""

    optimizer: optim.Optimizer
    groups: tuple[dict, ...]  # the settings of the groups as they were when the step was asked for
    members: tuple[Member, ...]

    def run(self) -> tuple[dict[str, tuple[Input, jax.Array, Mesh]], Span]:
        """Update the blocks; returns the parameters for the devices, by name."""
        start = time.perf_counter()
        blocks = list(self._blocks())
        ready = time.perf_counter()
        if _is_adam(self.optimizer) and all(block.param.dtype is torch.float32 for block in blocks):
            _step_adam(self.groups, blocks)
        else:
            _step_torch(self.optimizer, self.groups, blocks)
        copies: dict[str, dict[Bounds, Tensor]] = {}
        for block in blocks:
            if block.copy is not None:
                copies.setdefault(block.member.name, {})[block.key] = block.copy
        found = {}
        for member in self.members:
            if member.item is not None:
                array = HostArray(item=member.item, layout=member.master.layout, blocks=copies.get(member.name, {}))
                found[member.name] = member.item, array.on_devices(copy=False), member.mesh
        return found, Span(start=start, ready=ready, end=time.perf_counter())

    def _blocks(self) -> "Iterator[_Block]":
        for member in self.members:
            if isinstance(member.gradient, jax.Array):
                for shard in member.gradient.addressable_shards:
                    shard.data.copy_to_host_async()
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


def _step_adam(groups: Sequence[dict], blocks: Sequence[_Block]) -> None:
    """One pass over memory on all cores, copies included."""
    inner = CPUAdam(_groups(groups, blocks))
    inner.state.update({block.param: block.state for block in blocks})
    step = inspect.unwrap(CPUAdam.step)
    step(inner, grads={block.param: block.grad for block in blocks}, copies={block.param: block.copy for block in blocks if block.copy is not None})


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


def _own_step(optimizer_class: type[optim.Optimizer]):
    return inspect.unwrap(optimizer_class.step)


def _is_adam(optimizer: optim.Optimizer) -> bool:
    return _own_step(traceable_class(optimizer)) in {_own_step(known) for known in _ADAM}


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise StrategyError where blocks of a parameter cannot be updated by themselves."""
    if _own_step(traceable_class(optimizer)) not in {_own_step(known) for known in _ELEMENTWISE}:
        raise StrategyError(
            f"offload='optimizer' lets the host update every block of a parameter by itself, and {type(optimizer).__name__} is not known to update elements "
            f"without looking at others: use one of torch.optim's {', '.join(known.__name__ for known in _ELEMENTWISE)}, or leave offload out"
        )


class Offload:
    """The exact parameters and the optimizers' state of one model on this process's host, and the updates that run."""

    def __init__(self, *, delay: int, delay_after: int):
        self.delay, self.delay_after = delay, delay_after
        self.masters: dict[str, HostArray] = {}  # of parameters that were updated; before, the loop's own tensor is exact
        self.layouts: dict[str, tuple[Input, Mesh]] = {}  # of exact parameters, and of the state that is shaped like them
        self.state: dict[str, dict[Bounds, BlockState]] = {}
        self.spans: list[Span] = []  # of the last updates
        self._running: dict[int, concurrent.futures.Future] = {}  # by identity of the binding
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="graphacc-offload")

    # ---- values

    def state_targets(self, name: str) -> list[str]:
        """The targets of the optimizer's state of one parameter."""
        return [f"{name}/{key}" for key in next(iter(self.state.get(name, {}).values()), {})]

    def find(self, kind: Kind, target: str) -> tuple[HostArray, Input] | None:
        """An exact parameter, or a tensor of an optimizer's state."""
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
        """Bytes of exact parameters and state on this process's host."""
        state = (tensor for blocks in self.state.values() for held in blocks.values() for tensor in held.values())
        return {Kind.PARAM: sum(master.nbytes for master in self.masters.values()), Kind.STATE: sum(tensor.nbytes for tensor in state)}

    # ---- updates

    def submit(self, key: int, update: Update, programs: "Programs", *, delayed: bool) -> None:
        """Run an update: now, or beside the next step if it is `delayed`."""
        if not delayed:
            self._publish(update.run(), programs)
            return
        if (before := self._running.pop(key, None)) is not None:
            self._publish(before.result(), programs)
        self._running[key] = self._worker.submit(update.run)

    def finish(self) -> None:
        """Wait for the updates that run; exact values may be read then."""
        for future in self._running.values():
            future.result()

    def drain(self, programs: "Programs") -> None:
        """Finish what runs, and give the devices the results."""
        while self._running:
            _, future = self._running.popitem()
            self._publish(future.result(), programs)

    def _publish(self, result: tuple[dict[str, tuple[Input, jax.Array, Mesh]], Span], programs: "Programs") -> None:
        arrays, span = result
        for item, array, mesh in arrays.values():
            programs.state.set(item, array, mesh)
        self.spans = [*self.spans[-99:], span]


def submit(engine: "Engine", binding: Binding, names: Sequence[str], *, from_host: frozenset[str]) -> None:
    """Let the host do an optimizer's step.

    Args:
        names: the parameters that have a gradient.
        from_host: those of them whose gradient is on the host already; the others' are on the devices.
    """
    programs = engine.programs
    offload = programs.offload
    assert offload is not None
    wanted = {handle.name: group for group, settings in enumerate(binding.optimizer.param_groups) for handle in _handles(settings["params"])}
    if not binding.state_on_device:
        offload.drain(programs)
    masters = {name: _master(engine, offload, engine.handles[name]) for name in names}
    if not binding.state_on_device:
        _adopt_state(engine, offload, binding)
        binding.state_on_device = True
    members = []
    for name in names:
        master, mesh = masters[name], offload.layouts[name][1]
        item = None
        if programs.state.holds(Kind.PARAM, name):
            item = dataclasses.replace(master.item, dtype=programs.state.find(Kind.PARAM, name)[1].dtype)
        gradient = _from_host(engine, master, mesh) if name in from_host else _from_devices(engine, master, mesh)
        state = offload.state.setdefault(name, {})
        members.append(Member(name=name, group=wanted[name], master=master, gradient=gradient, state=state, item=item, mesh=mesh))
    groups = tuple({key: _held(value) for key, value in group.items() if key != "params"} for group in binding.optimizer.param_groups)
    delayed = offload.delay > 0 and engine.steps >= offload.delay_after
    offload.submit(id(binding), Update(optimizer=binding.optimizer, groups=groups, members=tuple(members)), programs, delayed=delayed)


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


def _master(engine: "Engine", offload: Offload, handle: Handle) -> HostArray:
    """The exact values of a parameter, sharded as its first gradient was."""
    name, state = handle.name, engine.programs.state
    if handle.host_is_newer:
        offload.forget(name)
    if name not in offload.masters:
        value = handle.host_value()
        known = offload.layouts.get(name)
        if known is None or (known[0].shape, known[0].dtype) != (tuple(value.shape), value.dtype):
            kind = next((kind for kind in (Kind.GRAD, Kind.PARAM) if state.holds(kind, name)), None)
            shards, mesh = ((), state.mesh) if kind is None else (state.find(kind, name)[1].shards, state.mesh_of(kind, name))
            known = Input(name="", kind=Kind.PARAM, target=name, shape=tuple(value.shape), dtype=value.dtype, shards=shards), mesh
            offload.layouts[name] = known
        offload.masters[name] = HostArray.of(value, *known)
    return offload.masters[name]


def _adopt_state(engine: "Engine", offload: Offload, binding: Binding) -> None:
    """What the optimizer holds as state becomes that of the blocks; its tensors are let go, and fetched again where somebody looks."""
    held = binding.optimizer.state
    for name in binding.names:
        handle = engine.handles[name]
        values = {key: torch.as_tensor(value) for key, value in (dict.pop(held, handle.tensor, None) or {}).items() if value is not None}
        if values:
            _master(engine, offload, handle)
        offload.load_state(name, values)


__all__ = ["Offload", "Span", "check_optimizer", "submit"]
