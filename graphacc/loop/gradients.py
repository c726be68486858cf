"""The gradients of one model's parameters: where each is, and what ``parameter.grad`` gives.

A gradient is a value of the pending recording, which had its backward and has not run; or lies in an accumulator on the devices; or is an ordinary
tensor, which the loop wrote or PyTorch computed; or was consumed by a step (`SPENT`), or cleared (`ZERO`).
"""

import functools
import itertools
import logging
import operator
import sys
import typing
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphacc._compat.torch_ import storage_users
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop import build, columns
from graphacc.loop.decisions import memory_of
from graphacc.loop.fallback import NOT_COMPILED, explanation
from graphacc.loop.managed import SPENT, ZERO, Handle
from graphacc.loop.microbatches import note_of_loss, note_of_repetition, numbers_of_batch
from graphacc.loop.promise import Promise
from graphacc.loop.tape import Tape

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine


log = logging.getLogger("graphacc")

_NAME, _GRADIENT, _IS_VIEWED = map(operator.attrgetter, ("name", "grad", "viewed"))


class Gradients:
    """Follows ``backward()``, ``zero_grad()``, and reads and writes of ``parameter.grad``."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.pending: Tape | None = None  # had its backward, not yet run
        self._noted: set[str] = set()  # what was said of microbatches
        self.accumulated: set[str] = set()  # parameters whose gradient so far lies on the devices
        self.host_grads: dict[str, Tensor] = {}  # gradients that the loop wrote, to be uploaded before they are added to

    def _note_microbatches(self, tape: Tape) -> None:
        """Say what microbatches cost here, or mean, once for each reason."""
        execution = self.engine.execution
        cut, why = execution.parts(tape), execution.why_apart(tape)
        note = note_of_loss(tape, why) if why else note_of_repetition(cut.count, cut.repeated) if cut is not None and cut.repeated else ""
        if note and note not in self._noted:
            self._noted.add(note)
            log.warning("graphacc: %s", note)

    def backward(self, tape: Tape) -> None:
        """``loss.backward()`` was recorded on `tape`."""
        with self.engine.lock:
            self._settle_pending()
            tape.outputs = tape.live()
            if self.engine.programs.strategy.microbatches > 1 and not self.engine.programs.chose_microbatches:
                numbers = tape.numbers = numbers_of_batch(tape)
                tape.outputs = sorted({*tape.outputs, *(start for _, starts in numbers.values() for start in starts)} - numbers.keys() - {tape.loss})
            self.engine.execution.settle_length(tape)
            if tape.bucket is None and (why := self.engine.loss_forms.too_many(tape)) is not None:
                self._by_autograd(tape, self.engine.by_pytorch.run_loss, why)
                return
            try:
                trained = self.engine.fallback.attempt(lambda: self.engine.execution.trained(tape))
            except NOT_COMPILED as error:
                self.engine.refuse(tape, error)
                self._by_autograd(tape, self.engine.by_pytorch.run, explanation(error))
                return
            if self.engine.programs.strategy.microbatches > 1:
                self._note_microbatches(tape)
            self.pending = tape
            self.engine.ways_back.follow(tape)
            everything = self.engine.handles.values()
            for giver in set(filter(None, map(_giver, everything))) if not columns.are(columns.host_grads(everything), None) else ():
                giver.let_go_of_gradients()
            held = self._bind(tape, list(map(self.engine.handles.__getitem__, trained)))
            if self.engine.torch_steps or held:
                self.force(tape)
                for handle, own in held.items():
                    _replace(handle, own)
            elif any(map(_IS_VIEWED, everything)) and any(handle.kind is Kind.PARAM and handle.is_shared for handle in everything):
                self.engine.execution.run_grad(tape)  # a tensor that shares a parameter's memory may be written at any time

    def _bind(self, tape: Tape, trained: Sequence[Handle]) -> dict[Handle, Tensor]:
        """Let the gradients of a backward be values of its recording; returns the ordinary ones that the loop holds, which these are to be added to."""
        start, names = len(tape.values), list(map(_NAME, trained))
        tape.values += self.engine.fakes.gradients_of(trained)
        tape.grad_values = dict(zip(names, range(start, len(tape.values)), strict=True))
        held = {}
        if any(map(operator.is_, map(_GRADIENT, trained), itertools.repeat(SPENT))) or not columns.are(columns.host_grads(trained), None):
            for handle in trained:
                if handle.grad is SPENT:
                    continue  # what this adds to is not known; the loop may clear it before it is used, as that of two optimizers in turn does
                if (own := handle.host_grad) is not None:
                    if is_held(own):
                        held[handle] = own
                    if handle in held or handle.name in self.accumulated or bool(own.any()):
                        self.host_grads[handle.name] = self._with_accumulated(handle.name, own)
                        self.accumulated.add(handle.name)
                    handle.host_grad = None  # zeros that nobody holds, of `zero_grad(set_to_none=False)`, are as good as nothing
            trained = [handle for handle in trained if handle.grad is not SPENT]
            names = list(map(_NAME, trained))
        tape.grad_bindings = dict(zip(names, map(tape.grad_values.__getitem__, names)))
        for handle in trained:
            handle.grad = tape
        return held

    def _by_autograd(self, tape: Tape, run: Callable[[Tape, str], None], why: str) -> None:
        """The backward of a recording by PyTorch's autograd, of which `run` makes its values results."""
        loss, tape.loss, tape.backward_at = tape.loss, None, None
        run(tape, why)
        value = tape.value(loss)
        if value.requires_grad:  # else all that took a gradient was frozen since, and backward() gives none
            value.backward()

    def _settle_pending(self) -> None:
        """Before another backward: the gradients of the last one go to the accumulators."""
        tape, self.pending = self.pending, None
        if tape is None or tape.closed:
            return
        if tape.gradient_calls or tape.grad_bindings != tape.grad_values or not set(tape.live()).isdisjoint(tape.grad_values.values()):
            self.force(tape)
            return
        if not tape.has_run:
            self.engine.execution.run_grad(tape)
        self.engine.close(tape)

    def read(self, handle: Handle) -> Tensor | None:
        """``parameter.grad``."""
        tape, own = handle.grad, handle.host_grad
        if own is None and isinstance(tape, Tape) and not tape.closed:
            return tape.promise(tape.grad_bindings[handle.name])
        if tape is SPENT:
            return handle.spent
        if tape is ZERO or isinstance(tape, Tape):
            self.settle(handle)
        if isinstance(handle.grad, Tape):
            return handle.grad.promise(handle.grad.grad_bindings[handle.name])
        return handle.host_grad

    def settle(self, handle: Handle) -> None:
        """Make ``parameter.grad`` the ordinary tensor that PyTorch would have there."""
        if handle.grad is SPENT:
            raise used_again(handle, "reading it")
        if handle.grad is ZERO:
            handle.host_grad = handle.zeros() if handle.host_grad is None else handle.host_grad
            handle.grad = None
        if isinstance(handle.grad, Tape) and not handle.grad.closed:
            self.force(handle.grad)
        elif isinstance(handle.grad, Tape):  # it lies in the accumulators
            total = self._after_code(handle.grad, handle.name)
            handle.host_grad = total if handle.host_grad is None else handle.host_grad + total
            handle.grad = None
            self.accumulated.discard(handle.name)

    def _after_code(self, tape: Tape, name: str) -> Tensor:
        """A gradient of a backward whose program has run, after the gradient code that followed it."""
        if tape.grad_bindings[name] == tape.grad_values[name]:
            return self.engine.programs.fetch(Kind.GRAD, name)
        grads = {other: self.engine.programs.fetch(Kind.GRAD, other) for other in tape.grad_values}
        return self._replay_code(tape, grads)[tape.grad_bindings[name]]

    def _replay_code(self, tape: Tape, grads: dict[str, Tensor]) -> dict[int, Tensor]:
        """Let PyTorch run the code on gradients; returns every value of it."""
        code = build.GradientCode(tape=tape, names=tuple(tape.grad_bindings), max_norm=None)
        externals = [tape.whole_external(i) for i in code.external_indices]
        values = [tape.value(i) for i in code.forward_values]
        with self.engine.by_pytorch.on_host(tape), torch.no_grad():
            return code.replay(grads, [*externals, *values, *(handle.host_value() for handle in code.handles)])

    def used_by(self, optimizer: torch.optim.Optimizer, handles: Sequence[Handle]) -> Sequence[Handle]:
        """Before a step of these parameters: those that have gradients, each of which is of one backward, or is an ordinary tensor.

        Raises:
            LoopError: an earlier step has consumed one.
        """
        if self.pending is not None and columns.are(map(_GRADIENT, handles), self.pending) and columns.are(columns.host_grads(handles), None):
            return handles  # in an ordinary loop
        for handle in handles:
            if handle.grad is SPENT:
                raise used_again(handle, f"{type(optimizer).__name__}.step()")
            if handle.grad is ZERO or (handle.grad is not None and handle.host_grad is not None):
                self.settle(handle)
        return [handle for handle in handles if handle.has_grad]

    def spend(self, handles: Sequence[Handle]) -> None:
        """A step has consumed these gradients, but for ordinary tensors."""
        for tape in dict.fromkeys(map(_GRADIENT, handles)):
            if isinstance(tape, Tape):
                of_it = handles if columns.are(map(_GRADIENT, handles), tape) else [handle for handle in handles if handle.grad is tape]
                names = list(map(_NAME, of_it))
                self.accumulated.difference_update(names)
                given = zip(itertools.repeat(weakref.ref(tape)), map(tape.grad_bindings.__getitem__, names))
                for handle, giver in zip(of_it, given):
                    handle.given_by, handle.grad = giver, SPENT

    def write(self, handle: Handle, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        name = handle.name
        if isinstance(value, Promise):
            if value.tape is self.pending and not value.tape.closed:
                value.tape.grad_bindings[name] = value.index
                handle.host_grad, handle.grad = None, value.tape
                return
            value = value.tape.value(value.index)
        tape, handle.grad = handle.grad, None
        handle.host_grad = value
        if self.accumulated or self.host_grads:
            self.accumulated.discard(name)
            self.host_grads.pop(name, None)
        if isinstance(tape, Tape):
            tape.grad_bindings.pop(name, None)
            if tape is self.pending and not tape.grad_bindings:
                self._drop_pending()

    def zero(self, handle: Handle) -> None:
        """``parameter.grad.zero_()``, where no tensor holds the gradient; one that the loop has read, and holds since, stays the gradient."""
        held = _held_since(handle)
        self.write(handle, None)
        if held is None:
            handle.grad = ZERO
        else:
            handle.host_grad = held.zero_()

    def _drop_pending(self) -> None:
        """All gradients of the pending backward were cleared: what remains is its effect on buffers, and the values that the loop holds."""
        tape, self.pending = self.pending, None
        derived = {*tape.grad_values.values(), *(index for call in tape.gradient_calls for index in call.results)}
        if not derived.isdisjoint(tape.live()):
            self.force(tape)
            return
        if not tape.has_run:
            self.engine.execution.run_forward(tape, sorted({*tape.outputs, tape.loss}), keep_buffers=True)
        self.engine.close(tape)

    def force(self, tape: Tape) -> None:
        """Compute everything on the tape now; the gradients become ordinary host tensors."""
        grads = self._whole(tape)
        env = self._replay_code(tape, grads)
        bound = set(tape.grad_bindings.values())
        for value, tensor in env.items():
            if not tape.has_value(value):
                tape.fulfil(value, tensor)
            elif value in bound:
                env[value] = tape.value(value)  # the loop may hold it: it stays the gradient
        for name, value in tape.grad_bindings.items():
            handle = self.engine.handles[name]
            handle.given_by = (weakref.ref(tape), value) if handle.host_grad is None else None
            handle.host_grad = env[value] if handle.host_grad is None else handle.host_grad + env[value]
            handle.grad = None
        self.accumulated -= set(tape.grad_values)
        if self.pending is tape:
            self.pending = None
        self.engine.close(tape)

    def _whole(self, tape: Tape) -> dict[str, Tensor]:
        """The gradients that its backward gave, with what was accumulated before, on the host."""
        if not tape.has_run:
            try:
                self.engine.execution.run_grad(tape)
            except NOT_COMPILED as error:
                self.engine.refuse(tape, error)
                return self._by_pytorch(tape, explanation(error))
        read = {index for call in tape.gradient_calls for index in tape.reads(call)} | set(tape.live())  # also of what the loop has replaced since
        return {name: self.engine.programs.fetch(Kind.GRAD, name) for name, index in tape.grad_values.items() if name in self.accumulated or index in read}

    def _by_pytorch(self, tape: Tape, why: str) -> dict[str, Tensor]:
        self.engine.by_pytorch.note("a step's forward and backward", why)
        env = self.engine.by_pytorch.replay(tape)
        wanted = {name: self.engine.handles[name].tensor for name in tape.grad_bindings}
        with torch._C.DisableTorchFunctionSubclass():
            found = dict(zip(wanted, torch.autograd.grad(env[tape.loss], list(wanted.values()), allow_unused=True)))
        for index in (tape.loss, *tape.outputs):
            tape.fulfil(index, env[index].detach())
        tape.has_run = True
        return {name: self._with_accumulated(name, grad) for name, grad in found.items() if grad is not None}

    def _with_accumulated(self, name: str, grad: Tensor) -> Tensor:
        before = self.host_grads.pop(name, None)
        if name in self.accumulated and before is None:
            before = self.engine.programs.fetch(Kind.GRAD, name)
        self.accumulated.discard(name)
        return grad if before is None else before + grad

    def clip_on_host(self, handles: Sequence[Handle]) -> None:
        """``max_grad_norm``, for a step that PyTorch runs."""
        if self.engine.options.max_grad_norm is None:
            return
        grads = {handle.name: handle.host_grad for handle in handles if handle.host_grad is not None}
        if grads:
            for name, grad in build.clip_total_norm(grads, self.engine.options.max_grad_norm).items():
                self.engine.handles[name].host_grad = grad


def is_held(gradient: Tensor) -> bool:
    """Whether the loop has another way to an ordinary gradient than ``parameter.grad``, by which it sees what PyTorch adds in place."""
    if gradient.layout is not torch.strided:
        return False
    return storage_users(gradient) > 1 or sys.getrefcount(gradient) > _references_of_one()


@functools.cache
def _references_of_one() -> int:
    """References to a gradient that nothing but its parameter and the caller of `is_held` holds."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    gradient = parameter.grad

    def count(gradient: Tensor) -> int:
        return sys.getrefcount(gradient)

    return count(gradient)


def _giver(handle: Handle) -> Tape | None:
    """The recording of which an ordinary gradient is a value."""
    return handle.given_by[0]() if handle.host_grad is not None and handle.given_by is not None else None


def _replace(handle: Handle, held: Tensor) -> None:
    """Put the gradient, whose new sum is in another tensor, into the one that the loop holds, as PyTorch adds in place."""
    total = handle.host_grad
    if total is not None and total is not held:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            held.copy_(total)
        handle.host_grad = held


def _held_since(handle: Handle) -> Tensor | None:
    """The gradient that a step has consumed as an ordinary tensor, if the loop holds it, or a view of it, which stay what they are to each other."""
    if handle.given_by is None or handle.grad is not SPENT or (tape := handle.given_by[0]()) is None:
        return None
    index = handle.given_by[1]
    fake = tape.values[index]
    held = [i for i, reference in tape.promises.items() if reference() is not None and memory_of(tape.values[i]) == memory_of(fake)]
    if not held:
        return None
    base = tape.value(index) if index in held or tape.has_value(index) else None
    if base is None or base.stride() != fake.stride() or base.storage_offset() != fake.storage_offset():
        base = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype)
    for i in {index, *held}:
        other = tape.values[i]
        tape.fulfil(i, base if i == index else base.as_strided(other.size(), other.stride(), other.storage_offset()))
    return base


def used_again(handle: Handle, what: str) -> LoopError:
    return LoopError(
        f"{what} would use the gradient of {handle.name!r} again, which an earlier compiled step consumed, and to which PyTorch would have added those of later "
        "backwards: call zero_grad() after every step, and backward() before the next, or keep gradients with graphacc.compile(..., keep_gradients=True), "
        "which takes their memory and runs every step in two programs"
    )
