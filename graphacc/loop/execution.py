"""Captures graphs of recordings, and runs their programs: what they read is brought to the devices before, what they changed is noted behind."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from graphacc import collector
from graphacc.capture import FX, hyperparameters, init_optimizer_state
from graphacc.capture.guards import no_python_randomness
from graphacc.capture.optimizer import is_separable
from graphacc.errors import RowsCounted
from graphacc.graph import Kind, StepGraph
from graphacc.loop import build, microbatches, offload
from graphacc.loop.buckets import Cut, reads_lengths
from graphacc.loop.identity import Identity
from graphacc.loop.managed import Handle
from graphacc.loop.model_call import RecordedCode
from graphacc.loop.optimizers import Binding
from graphacc.loop.programs import GRAD_TO_HOST, BatchForms, Compiled, number_bits
from graphacc.loop.promise import written_too_early
from graphacc.loop.tape import Tape
from graphacc.passes.microbatches import NUMBER, Inseparable, Microbatches, in_microbatches
from graphacc.passes.stream import SENT, STREAM

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.step_logger import StepLogger

_OF_FORWARD = ("step", "grad", GRAD_TO_HOST, "forward")
"""Kinds of programs that have a forward part."""

MAX_JOINTS = 16
"""Captured graphs of forward and backward that are kept for further programs of them."""

_IS_MISSING, _IS_STALE, _IS_VIEWED, _FREES_HOST = map(operator.attrgetter, ("missing", "host_is_stale", "viewed", "frees_host"))

_RESULTS = operator.attrgetter("results")

_ALIKE = "parameters with equal counts of steps"
"""Aspect of a program that updates, see `Execution._alike`."""

_GOLDEN = 0x9E3779B9
"""Multiplied with a microbatch's number, spreads it over 32 bits (the golden ratio), so that its random key is its own."""


@dataclasses.dataclass(frozen=True)
class _Joint:
    """Forward and backward of a recording, or of one of its microbatches."""

    step: build.Step
    parts: Microbatches | None = None
    why_apart: str = ""

    @functools.cached_property
    def trained(self) -> list[str]:
        """The parameters that get gradients."""
        return [output.target for output in self.step.outputs if output.kind is Kind.GRAD]


class Execution:
    """The programs of one model's recordings."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.tracing = False  # a graph is captured
        self.updates = 0  # programs so far that changed parameters
        self.observers: "list[StepLogger]" = []  # they measure steps
        self._joints: dict[tuple, _Joint] = {}

    def joint(self, tape: Tape) -> build.Step:
        """Forward and backward of a recording, or of one of its microbatches."""
        return self._joint(tape, self.count(tape)).step

    def trained(self, tape: Tape) -> list[str]:
        """The parameters that a backward gives gradients."""
        return self._joint(tape, self.count(tape)).trained

    def count(self, tape: Tape) -> int:
        """The number of microbatches of a recording: the strategy's; where the search has chosen that, the next smaller one that gives what the batch gives."""
        programs = self.engine.programs
        asked = programs.strategy.microbatches
        if asked == 1 or not programs.chose_microbatches:
            return asked
        count = next(count for count in range(asked, 0, -1) if count == 1 or build.can_be_cut(tape, count))
        parts = self._joint(tape, count).parts
        return 1 if parts is None or parts.repeated else count

    def parts(self, tape: Tape) -> Microbatches | None:
        """How the recording's batch is cut so that its parts together give what it gives as a whole; None: there is one part, or each stands for itself."""
        return self._joint(tape, self.count(tape)).parts

    def why_apart(self, tape: Tape) -> str:
        """Why the microbatches of a recording stand each for itself, so that the loss is the mean of theirs; empty if they do not."""
        return self._joint(tape, self.count(tape)).why_apart

    def _joint(self, tape: Tape, count: int) -> "_Joint":
        code = tape.forward_key if tape.bucket is None else tape.bucket
        key = (self.engine.fallback.backend.name, code, tape.loss, tuple(tape.outputs), tape.frozen, count)
        if key not in self._joints:
            self._joints[key] = self._captured_joint(tape, count)
            while len(self._joints) > MAX_JOINTS:
                self._joints.pop(next(iter(self._joints)))
        return self._joints[key]

    def _captured_joint(self, tape: Tape, count: int) -> "_Joint":
        capture = self._joint_capture(tape, count)
        if tape.bucket is not None:
            return _Joint(tape.bucket.take(_joint_program(tape), capture))
        if count == 1 or self.engine.fallback.backend is not FX:
            return _Joint(capture(tape), why_apart="" if count == 1 else "it was captured by lazy tensors")
        whole = self._joint(tape, 1).step
        assert isinstance(whole, StepGraph), "captured as an fx graph"
        try:
            parts = in_microbatches(whole, count, build.microbatch_dims(tape, whole, count))
        except Inseparable as error:
            if not self.engine.programs.chose_microbatches and any(call.reads for call in tape.forward_calls):
                raise RowsCounted(
                    f"the code asks for values of the batch, of which microbatches={count} have a part each, and they cannot give together what the batch gives: {error}.\n"
                    "  remedy: leave microbatches out, or compute with masks instead"
                ) from error
            return _Joint(whole if self.engine.programs.chose_microbatches else capture(tape), why_apart=str(error))
        return _Joint(parts.step, parts)

    def _joint_capture(self, tape: Tape, microbatches: int = 1) -> Callable[[Tape], build.Step]:
        """Captures forward and backward of a recording with the results of this one; of its first microbatch, if it has several."""
        engine, strategy = self.engine, self.engine.programs.strategy
        tensors = [handle.tensor for handle in engine.handles.values() if handle.kind is Kind.PARAM]
        functions = [owner for call in tape.forward_calls if isinstance(owner := getattr(call.function, "__self__", None), type) and issubclass(owner, torch.autograd.Function)]

        def capture(like: Tape) -> build.Step:
            with engine.guards.noting_backward(tensors, functions), no_python_randomness():
                return self.capture(build.joint_graph, like, tape.outputs, strategy.precision, microbatches)

        return capture

    def settle_length(self, tape: Tape) -> None:
        """Give a recording that has a backward its bucket of lengths, if it has one."""
        if self.engine.buckets is not None:
            self.engine.buckets.settle(tape, _joint_program(tape), self._joint_capture(tape))

    def _choose(self, tape: Tape, update: Callable[[], build.Step] | None = None) -> None:
        """Search the strategy, if that is still to be done; captures are kept for the program."""
        if self.engine.choice is not None:
            self.engine.choice.settle(self.engine, lambda: self.engine.fallback.attempt(lambda: self.joint(tape)), update)

    def run_forward(self, tape: Tape, outputs: Sequence[int], *, keep_buffers: bool) -> None:
        """Compute values of the forward part."""
        self.engine.settle_buffers(ahead=tape, are_written=keep_buffers and self.engine.writes_buffers(tape))
        wanted = [index for index in outputs if not tape.has_value(index)]
        program = ("forward", tuple(wanted), keep_buffers)

        def capture(like: Tape) -> build.Step:
            return self.capture(build.forward_graph, like, wanted, self.engine.programs.strategy.precision, keep_buffers)

        if self.engine.buckets is not None:
            self.engine.buckets.settle(tape, program, capture)
        compiled = self.program(
            "forward",
            {**self.forward_aspects(tape), "results": tuple(wanted), "buffers kept": keep_buffers},
            lambda: capture(tape) if tape.bucket is None else tape.bucket.take(program, capture),
        )
        with self.engine.verifier.watching(compiled, tape, outputs=wanted, keep_buffers=keep_buffers):
            self._fulfil(tape, self._run(compiled, tape), program)

    def run_grad(self, tape: Tape) -> None:
        """Forward and backward; adds to the gradients on the devices."""
        self._choose(tape)
        count, cut, accumulates = self.count(tape), self.parts(tape), self._accumulates(tape)
        compiled = self.program(
            "grad",
            {**self.forward_aspects(tape), "results": tuple(tape.outputs), "accumulation": accumulates},
            lambda: build.accumulating(self.joint(tape)) if accumulates else self.joint(tape),
        )
        if accumulates:
            self._prepare_accumulators(compiled, tape.grad_values)
        self.upload(compiled, tape)
        feeds = self.feeds_of_parts(compiled, tape)
        with self.engine.verifier.watching(compiled, tape):
            parts = self.engine.programs.run_microbatches(compiled, feeds)
            self.note_run(compiled, count)
            self._mark_stale(compiled)
            tape.fulfil(tape.loss, lambda: torch.stack([part[Kind.LOSS, "loss"]() for part in parts]).sum())
            for index in tape.outputs:
                fetch = build.from_microbatches([part[Kind.USER, str(index)] for part in parts], tape.values[index], cut and cut.results[str(index)])
                tape.fulfil(index, _cut(tape, _joint_program(tape), index, fetch))
            for index, (calls, starts) in tape.numbers.items():
                tape.fulfil(index, microbatches.computed(tape, index, calls, starts))
            self.engine.gradients.accumulated |= set(tape.grad_bindings)
            tape.has_run = True

    def _accumulates(self, tape: Tape) -> bool:
        """Whether a program of gradients adds to those so far. Where the host updates, most of these programs begin anew, and accumulators would be zeros to upload."""
        programs, gradients = self.engine.programs, self.engine.gradients
        if programs.offload is None or programs.strategy.microbatches > 1 or programs.strategy.pp > 1:
            return True
        return any(name in gradients.accumulated or name in gradients.host_grads for name in tape.grad_values)

    def _prepare_accumulators(self, compiled: Compiled, names: Iterable[str]) -> None:
        """The gradients so far, on the devices: kept if they are there, uploaded if the loop wrote them, zero otherwise."""
        gradients, programs = self.engine.gradients, self.engine.programs
        written = {name: gradients.host_grads.pop(name) for name in names if name in gradients.host_grads}
        for name, value in written.items():
            programs.put(compiled, Kind.GRAD, name, value)
        programs.put_zeros(compiled, Kind.GRAD, [name for name in names if name not in written and name not in gradients.accumulated])

    def run_step(self, tape: Tape, binding: Binding, names: tuple[str, ...]) -> None:
        """The whole step in one program."""
        code = self._gradient_code(tape, names)
        if tape.bucket is not None and reads_lengths(tape, code):
            tape.bucket = None
        alike = self._alike(binding, names)
        captured: dict[str, build.Step] = {}

        def update() -> build.Step:
            backend = self.engine.fallback.backend.name
            if backend not in captured:
                captured[backend] = self._captured_update(binding, code, alike)
            return captured[backend]

        self._choose(tape, update)
        if not self.engine.programs.runs_whole_steps:  # the host is to do the update
            self.run_update(tape, binding, names)
            return
        aspects = {**self.forward_aspects(tape), "results": tuple(tape.outputs), **_update_aspects(binding, code, alike)}
        compiled = self.program("step", aspects, lambda: build.step_graph(self.joint(tape), update()))
        self._expect_apart(binding, names, aspects, compiled)
        self._upload_optimizer_state(compiled, binding)
        with self.engine.verifier.watching(compiled, tape, binding=binding, code=code):
            self._fulfil(tape, self._run(compiled, tape, binding=binding), _joint_program(tape))
        self._after_update(binding)
        self.engine.gradients.pending = None
        self.engine.close(tape)

    def run_update(self, tape: Tape | None, binding: Binding, names: tuple[str, ...]) -> None:
        """The update alone, from gradients on the devices (and from the host, where the loop wrote them)."""
        if self.engine.programs.offload is not None and self._update_while_it_runs(tape, binding, names):
            return
        if tape is not None and not tape.has_run:
            self.run_grad(tape)
        if self.engine.choice is not None:
            self.engine.choice.leave(self.engine.programs)
        if tape is not None and any(name in tape.grad_values and name not in tape.grad_bindings for name in names):
            self.engine.gradients.force(tape)  # code on gradients reads one that the loop has meanwhile replaced
            tape = None
        if tape is None:
            tape = Tape(self.engine, (self.engine.keys.seed, self.engine.keys.counter))
        for name in names:
            if name not in tape.grad_bindings:
                tape.grad_values[name] = tape.grad_bindings[name] = tape.add_value(self.engine.fakes.gradient_of(self.engine.handles[name]))
        code = self._gradient_code(tape, names)
        if self.engine.programs.offload is None:
            self._run_update_program(tape, binding, code)
        else:
            self._update_on_host(tape, binding, code)
        self._end_update(tape, binding)

    def _end_update(self, tape: Tape, binding: Binding) -> None:
        self._after_update(binding)
        if self.engine.gradients.pending is tape:
            self.engine.gradients.pending = None  # the next step may have gradients that PyTorch computed
        self.engine.close(tape)

    def _update_while_it_runs(self, tape: Tape | None, binding: Binding, names: tuple[str, ...]) -> bool:
        """Forward, backward and update; the host updates what has arrived while the program goes on. False, and nothing has run, where it needs all gradients first."""
        if tape is not None and not tape.has_run:
            self._choose(tape)
        host = self.engine.programs.offload
        if host is None:
            return False
        if not offload.delays(self.engine):
            host.drain(self.engine.programs)  # an interrupt may have left an update
        why = self._needs_all_gradients(tape, binding, names)
        if tape is not None and why is None:
            compiled = self.program(GRAD_TO_HOST, {**self.forward_aspects(tape), "results": tuple(tape.outputs)}, lambda: self.joint(tape))
            self.upload(compiled, tape)
            stream = offload.open_stream(self.engine, binding, compiled)
            if isinstance(stream, offload.GradientStream):
                host.num_updates[None] += 1
                self._run_and_update(tape, binding, names, compiled, stream)
                return True
            why = stream
        host.num_updates[why] += 1
        return False

    def _run_and_update(self, tape: Tape, binding: Binding, names: tuple[str, ...], compiled: Compiled, stream: offload.GradientStream) -> None:
        programs = self.engine.programs
        host = programs.offload
        assert host is not None
        try:
            fetched = programs.run(compiled, {**self.feeds(compiled, tape), (Kind.STREAM, STREAM): stream.ticket})
            stream.sent = typing.cast(typing.Any, fetched.pop((Kind.STREAM, SENT))).array
            self.note_run(compiled)
            self._mark_stale(compiled)
            self._fulfil(tape, fetched, _joint_program(tape))
            update = offload.update_of(self.engine, binding, names, stream=stream)
        except BaseException:
            host.close_stream(stream)
            raise
        for name in names:
            self.engine.handles[name].host_is_stale = True  # also where an interrupt ends the wait for the update
        host.submit(id(binding), update, programs, delayed=offload.delays(self.engine))  # from here on the stream is the update's
        for name in names:
            self.engine.handles[name].mark_stale()
        self.updates += 1
        tape.has_run = True
        self._end_update(tape, binding)

    def _needs_all_gradients(self, tape: Tape | None, binding: Binding, names: tuple[str, ...]) -> str | None:
        """Why the host cannot begin an update before it has all gradients; None: it can."""
        if tape is None or tape.has_run:
            return "gradients were read or written before the step"
        programs, options = self.engine.programs, self.engine.options
        strategy, platform = programs.strategy, programs.mesh.devices.flat[0].platform
        if platform != "cpu":
            return f"{platform} devices cannot tell the host that a gradient is there"
        if strategy.pp > 1 or strategy.microbatches > 1:
            return "gradients of several microbatches are added up"
        if self._accumulates(tape) or any(self.engine.handles[name].host_grad is not None for name in names):
            return "gradients are added to those of an earlier backward, or to ones that the loop wrote"
        if not set(names) == set(tape.grad_bindings) == set(tape.grad_values):
            return "the optimizer does not update all parameters that have a gradient"
        if tape.gradient_calls or tape.grad_bindings != tape.grad_values or options.max_grad_norm is not None:
            return "code on gradients, such as clipping, comes between backward and the step"
        if options.keep_gradients or self._gradient_code(tape, names).results:
            return "the loop keeps gradients"
        if not offload.is_adam(binding.optimizer) or any(self.engine.handles[name].form[1] is not torch.float32 for name in names):
            return f"{type(binding.optimizer).__name__} on these parameters runs by its own code"
        return None

    def _run_update_program(self, tape: Tape, binding: Binding, code: build.GradientCode) -> None:
        alike = self._alike(binding, code.names)
        aspects = _update_aspects(binding, code, alike)
        compiled = self.program("update", aspects, lambda: self._captured_update(binding, code, alike))
        self._expect_apart(binding, code.names, aspects, compiled)
        self._upload_gradients(compiled, code)
        self._upload_optimizer_state(compiled, binding)
        with self.engine.verifier.watching(compiled, tape, binding=binding, code=code):
            self._fulfil(tape, self._run(compiled, tape, binding=binding))

    def _update_on_host(self, tape: Tape, binding: Binding, code: build.GradientCode) -> None:
        """The update by the host; code on gradients runs on the devices before."""
        programs = self.engine.programs
        host = programs.offload
        assert host is not None
        offload.check_optimizer(binding.optimizer)
        runs_code = bool(tape.gradient_calls or code.results) or code.max_norm is not None
        if runs_code:
            compiled = self.program(
                "gradients",
                _update_aspects(binding, code, None),
                lambda: self.capture(build.gradient_graph, binding.optimizer, code),
            )
            self._upload_gradients(compiled, code)
            self._fulfil(tape, self._run(compiled, tape))
        from_host = () if runs_code else [name for name in code.names if self.engine.handles[name].host_grad is not None]
        update = offload.update_of(self.engine, binding, code.names, from_host=frozenset(from_host))
        host.submit(id(binding), update, programs, delayed=offload.delays(self.engine))
        for name in code.names:
            self.engine.handles[name].mark_stale()
        self.updates += 1

    def _upload_gradients(self, compiled: Compiled, code: build.GradientCode) -> None:
        """Gradients that the loop wrote."""
        for name in code.names:
            if (own := self.engine.handles[name].host_grad) is not None:
                self.engine.programs.put(compiled, Kind.GRAD, name, own)

    def _after_update(self, binding: Binding) -> None:
        """The state on the devices is new: fetched copies are out of date, and a tensor that the loop holds sees the new values at once."""
        binding.copies = {}
        if binding.is_held:
            self.engine.fetch_optimizer_state(binding)

    def _gradient_code(self, tape: Tape, names: tuple[str, ...]) -> build.GradientCode:
        made = {*tape.grad_values.values(), *itertools.chain.from_iterable(map(_RESULTS, tape.gradient_calls))}
        results = tuple(index for index in tape.live() if index in made and not tape.has_value(index))
        return build.GradientCode(tape=tape, names=names, max_norm=self.engine.options.max_grad_norm, results=results)

    def capture(self, build_graph: Callable[..., build.Step], *args) -> build.Step:
        with self.engine.direct_calls(), self._traced(), collector.paused(), torch.autocast("cpu", enabled=False):
            return build_graph(self.engine.fallback.backend, self.engine.model, *args)

    def _captured_update(self, binding: Binding, code: build.GradientCode, alike: Identity | None) -> build.Step:
        equal = None if alike is None else dict(zip(code.names, _places(alike), strict=True))
        with binding.noting():
            return self.capture(build.update_graph, binding.optimizer, code, binding.dynamic, equal)

    def _alike(self, binding: Binding, names: tuple[str, ...]) -> Identity | None:
        """For each parameter, the place of the first one whose state has equal numbers, such as counts of steps; None where a program cannot have them in common.

        Those that are on the devices are not read: known to be equal are numbers that are one array, or that were uploaded with equal values.
        """
        programs, optimizer = self.engine.programs, binding.optimizer
        if programs.strategy.pp > 1 or programs.offload is not None or not is_separable(optimizer):
            return None
        looked_at = programs.state, programs.state.version, names
        if binding.state_on_device and binding.alike is not None and binding.alike[0] == looked_at:
            return binding.alike[1]
        numbers: dict[str, list] = collections.defaultdict(list)
        for target, number in programs.state.numbers().items() if binding.state_on_device else ():
            owner, _, key = target.rpartition("/")
            numbers[owner].append((key, number))
        first: dict[tuple, int] = {}
        places = []
        for place, name in enumerate(names):
            if not self.engine.handles[name].form[0]:  # all of its state has no dims
                places.append(place)
                continue
            held = numbers.get(name) or [
                (key, ("set", number_bits(torch.as_tensor(value))))
                for key, value in dict.get(optimizer.state, self.engine.handles[name].tensor, {}).items()
                if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim())
            ]
            places.append(first.setdefault(tuple(sorted(held)), place))
        found = Identity(tuple(places))
        binding.alike = looked_at, found
        return found

    def _expect_apart(self, binding: Binding, names: tuple[str, ...], aspects: dict[str, object], compiled: Compiled) -> None:
        """Numbers that a program does not have in common, of parameters of several groups, are not known to be equal behind it: it is the program for that case, too."""
        alike = aspects[_ALIKE]
        if not isinstance(alike, Identity) or (id(compiled), alike) in binding.apart:
            return
        binding.apart.add((id(compiled), alike))
        numbers: dict[str, list[int]] = collections.defaultdict(list)
        for number, item in enumerate(compiled.state_inputs):
            for target in () if item.shape else (item.target, *item.aliases):
                numbers[target.rpartition("/")[0]].append(number)
        first: dict[tuple, int] = {}
        places = tuple(first.setdefault((known, *numbers[name]), place) for place, (known, name) in enumerate(zip(_places(alike), names, strict=True)))
        if places != alike.value:
            self.engine.programs.also(compiled.kind, aspects, {**aspects, _ALIKE: Identity(places)})

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        before, self.tracing = self.tracing, True
        try:
            yield
        finally:
            self.tracing = before

    def program(self, kind: str, aspects: dict[str, object], capture: Callable[[], build.Step]) -> Compiled:
        self.engine.verifier.note_capture(capture)
        return self.engine.fallback.attempt(lambda: self.engine.programs.get(kind, aspects, capture))

    def forward_aspects(self, tape: Tape) -> dict[str, object]:
        code, batch = tape.forward_key
        if tape.bucket is not None:
            code, batch = tape.bucket.code, tuple((index, *tape.bucket.tape.external_key(index)) for index, *_ in batch)
        batch = BatchForms.of(batch, tuple(tape.external_paths[index] for index, *_ in batch))
        return {"batch shapes": batch, "recorded code or module modes": RecordedCode((code, tape.loss, tape.frozen))}

    def _run(
        self, compiled: Compiled, tape: Tape, *, binding: Binding | None = None
    ) -> dict[tuple[Kind, str], Callable[[], Tensor]]:
        """Bring the host's news to the devices, run, and mark what the program changed."""
        self.upload(compiled, tape)
        fetched = self.engine.programs.run(compiled, self.feeds(compiled, tape, binding=binding))
        self.note_run(compiled)
        self._mark_stale(compiled)
        return fetched

    def note_run(self, compiled: Compiled, times: int = 1) -> None:
        """Tell those who measure steps that a program has been started."""
        for observer in self.observers:
            observer.ran(compiled, times)

    def feeds(
        self, compiled: Compiled, tape: Tape, *, binding: Binding | None = None, microbatch: int | None = None
    ) -> dict[tuple[Kind, str], object]:
        """The inputs of a program that are no state."""
        count = 1 if microbatch is None else self.count(tape)
        feeds: dict[tuple[Kind, str], object] = {(Kind.KEY, "key"): [microbatch_seed(tape, microbatch or 0), tape.counter & 0xFFFFFFFF]}
        if compiled.draws and not tape.drawn_at:
            self.engine.keys.note_draws()
        padded = tape.bucket if compiled.kind in _OF_FORWARD else None
        if padded is not None:
            feeds |= {(Kind.BATCH, target): length for target, length in padded.length_inputs(tape).items()}
        for index, path in enumerate(tape.external_paths):
            tensor = tape.given(index) if count == 1 else tape.external(index)
            if padded is not None:
                tensor = padded.pad(index, tensor)
            if count > 1:
                tensor = build.microbatch(tensor, tape, index, count, microbatch or 0)
            feeds[Kind.BATCH, path] = tensor
        if binding is not None:
            feeds |= {(Kind.HYPER, name): value for name, value in hyperparameters(binding.optimizer, binding.dynamic).items()}
        for item in compiled.values_read:
            feeds[item.kind, item.target] = tape.value(tape.loss if item.kind is Kind.LOSS else int(item.target))
        return feeds

    def feeds_of_parts(self, compiled: Compiled, tape: Tape) -> list[dict[tuple[Kind, str], object]]:
        """`feeds` of a program of gradients, for every microbatch in order."""
        count, cut = self.count(tape), self.parts(tape)
        if cut is None:
            return [self.feeds(compiled, tape, microbatch=number) for number in range(count)]
        given = self.feeds(compiled, tape)
        shared = given | {(Kind.BATCH, target): given[Kind.BATCH, path] for target, path in cut.whole.items()}
        tensors = {path: (typing.cast(Tensor, given[Kind.BATCH, path]), split.dim) for path, split in cut.splits.items()}
        return [
            shared | {(Kind.BATCH, NUMBER): number} | {(Kind.BATCH, path): build.part_of(tensor, dim, count, number) for path, (tensor, dim) in tensors.items()}
            for number in range(count)
        ]

    def _mark_stale(self, compiled: Compiled) -> None:
        changed = list(map(self.engine.handles.__getitem__, compiled.written))
        if any(map(_IS_VIEWED, changed)) or any(map(_FREES_HOST, changed)):
            for handle in changed:
                handle.mark_stale()
        else:
            for handle in changed:
                handle.host_is_stale = True
        self.updates += compiled.updates

    def upload(self, compiled: Compiled, tape: Tape) -> None:
        """Parameters and buffers that are not on the devices yet, or were written on the host.

        Raises:
            LoopError: the recording would read what was written behind it.
        """
        if tape.lost is not None:
            raise written_too_early(tape.lost)
        waiting = [other for other in (self.engine.tape, self.engine.gradients.pending) if other is not None and other is not tape and not other.has_run]
        deferred = self.engine.deferred
        deferred.flush()
        read = list(map(self.engine.handles.get, compiled.model_targets))  # None: a constant of the program's
        handles = [handle for handle in read if handle is not None] if None in read else typing.cast("list[Handle]", read)
        if any(map(_IS_MISSING, handles)):
            deferred.require(handles)
        lacking = set(map(id, compiled.looked_at.under(self.engine.programs)))
        both = zip(compiled.model_inputs, read) if lacking or None in read else itertools.compress(zip(compiled.model_inputs, read), map(operator.not_, map(_IS_STALE, read)))
        for item, handle in both:
            if handle is not None and (handle.host_is_newer or id(item) in lacking):
                handle.refresh()  # as the devices have it in another form
                if compiled.kind != "update" and self.engine.by_pytorch.written_since(handle, tape):
                    raise written_too_early(handle.name)
                for other in waiting:
                    if self.engine.by_pytorch.written_since(handle, other):
                        other.lost = handle.name
                self.engine.programs.put(compiled, item.kind, item.target, handle.host_value())
                handle.mark_uploaded()
                if item.codes is None:  # else the host has the only exact value
                    handle.release()

    def _upload_optimizer_state(self, compiled: Compiled, binding: Binding) -> None:
        programs = self.engine.programs
        if not binding.state_on_device:  # also of parameters that this program does not update
            programs.discard_state(binding.names)
        missing = [] if programs.state.holds_all(compiled.state_keys) else [item for item in compiled.state_inputs if not programs.state.holds(item.kind, item.target)]
        keys: dict[str, list[str]] = collections.defaultdict(list)
        for item in missing:
            name, _, key = item.target.rpartition("/")
            keys[name].append(key)
        if missing:
            with binding.noting():
                for name, state in init_optimizer_state(self.engine.model, binding.optimizer, sorted(keys)):
                    for key in keys[name]:
                        programs.put(compiled, Kind.STATE, f"{name}/{key}", state[key])
                    self.engine.handles[name].let_go()
        if programs.strategy.pp == 1:  # stages share nothing
            programs.state.unite_for(compiled.read)
        binding.state_on_device = True

    def _fulfil(self, tape: Tape, fetched: dict[tuple[Kind, str], Callable[[], Tensor]], program: tuple | None = None) -> None:
        """Note where the results of a program are.

        Args:
            program: of the recording's bucket, if it has one.
        """
        for (kind, target), fetch in fetched.items():
            index = tape.loss if kind is Kind.LOSS else int(target)
            if index is not None and tape.was_read(index):
                continue  # it stays the tensor that the loop may have
            tape.fulfil(index, _cut(tape, program, index, fetch))


def _joint_program(tape: Tape) -> tuple:
    """What tells forward and backward of a recording from other programs of it."""
    return ("joint", tape.loss, tuple(tape.outputs), tape.frozen)


def _cut(tape: Tape, program: tuple | None, index: int | None, fetch: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that fetches a value without the padding of the recording's bucket."""
    if tape.bucket is None or program is None:
        return fetch
    layout = tape.bucket.results[program].get(str(index), ())
    return Cut(fetch, layout, tape.bucket.lengths_of(tape)) if any(layout) else fetch


def _places(alike: Identity) -> tuple[int, ...]:
    return typing.cast("tuple[int, ...]", alike.value)


def _update_aspects(binding: Binding, code: build.GradientCode, alike: Identity | None) -> dict[str, object]:
    return {"optimizer settings": binding.key(), "gradient code": code.key(), "dtypes and shapes": code.tape.engine.form, _ALIKE: alike}


def microbatch_seed(tape: Tape, microbatch: int) -> int:
    """First word of the random key of one microbatch."""
    return tape.seed ^ (microbatch * _GOLDEN & 0xFFFFFFFF)
