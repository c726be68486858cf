"""A model's forward and backward as a StepGraph.

The model's own code runs once, on fake tensors that stand for every distinct parameter and buffer, and autograd runs inside the
trace. A tied weight is therefore one input with one summed gradient, a buffer is an output whether it was written
in place or re-assigned, and a custom autograd.Function keeps its backward.

With ``precision="bf16"`` parameters are cast to bf16 inside the graph, so gradients come out in their own dtype through the casts.
Matrix products run in bf16 whatever widened their inputs (autocast), losses are computed in fp32. The batch and buffers are never cast:
running statistics and position tables stay exact, and so do times, indices and targets that are given as floats.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphacc._compat.torch_ import annotate_nodes, compiling, decided_branches, fake_mode
from graphacc.capture.attention import whole_attention
from graphacc.capture.backend import FX, Backend
from graphacc.capture.borrow import Named, borrowed, distinct_buffers, distinct_parameters, substitute
from graphacc.capture.checkpointed import Checkpoints
from graphacc.capture.diagnose import Passing
from graphacc.capture.equal_layers import CallLog, Run, candidates, handing_on
from graphacc.capture.functions import WrittenOut
from graphacc.capture.guards import ForeignWrites, no_python_randomness, quiet_failures, watched_attributes
from graphacc.capture.source import SourceMode
from graphacc.capture.tracing import KEY, Results, Slot, unique_names
from graphacc.capture.unroll import unrolled
from graphacc.errors import CaptureError, ParameterWritten
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.hlo import HloStep

log = logging.getLogger("graphacc")

ForwardFn = Callable[[nn.Module, list[Tensor]], tuple[Tensor | None, list[Tensor]]]
"""(model, batch leaves) -> (loss, further outputs of the user)."""

Forward = Callable[[], tuple[Tensor | None, list[Tensor]]]
"""A ForwardFn with its arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of one call, flattened."""

    leaves: tuple[Tensor, ...]  # examples: only shape, dtype and strides are read
    paths: tuple[str, ...]  # a stable name for each, such as "args[0]" or "kwargs['input_ids']"


def capture_joint(
    model: nn.Module, fn: ForwardFn, batch: Batch, *, precision: str = "fp32", backend: Backend = FX
) -> StepGraph | HloStep:
    """Capture loss and gradients.

    Args:
        model: left exactly as it is; its parameters may be on any device, also meta.
        fn: calls the model on the leaves of a batch.
        precision: "fp32" (the parameters' own dtypes) or "bf16".
        backend: what records it; FX gives a StepGraph, LAZY an HloStep.

    Returns:
        A graph with inputs PARAM, BUFFER, BATCH and KEY, and outputs LOSS, USER (one per further output), BUFFER (those
        that change) and GRAD (parameters that receive one; only these are `trainable`).

    Raises:
        CaptureError: the model cannot be captured, or gives no scalar loss that depends on a parameter.
    """
    return _capture(model, fn, batch, precision, _with_gradients, backend)


def capture_forward(
    model: nn.Module, fn: ForwardFn, batch: Batch, *, precision: str = "fp32", backend: Backend = FX
) -> StepGraph | HloStep:
    """Capture the outputs without gradients, in the mode (training or evaluation) that the model is in.

    Returns:
        A graph with inputs PARAM, BUFFER, BATCH and KEY, and outputs LOSS (where `fn` gives one), USER and BUFFER.

    Raises:
        CaptureError: the model cannot be captured.
    """
    return _capture(model, fn, batch, precision, _without_gradients, backend, hooks=False)


def capture_vjp(
    model: nn.Module, fn: ForwardFn, batch: Batch, *, seeds: Sequence[int], inputs: Sequence[int], precision: str = "fp32", backend: Backend = FX
) -> StepGraph | HloStep:
    """Capture the vector-Jacobian product of the outputs of `fn`.

    Args:
        batch: the leaves that `fn` reads, and gradients of its outputs.
        seeds: which leaves are the gradients, one for every output.
        inputs: which leaves get a gradient.

    Returns:
        A graph with inputs PARAM, BUFFER, BATCH and KEY, and outputs GRAD, and USER "input <leaf>" for the leaves that receive one. Hooks
        of parameters are not in it: autograd runs them.

    Raises:
        CaptureError: the model cannot be captured.
    """

    def program(parameters: dict[str, Tensor], forward: Forward, leaves: list[Tensor]) -> Results:
        return _vector_jacobian_product(parameters, forward, [leaves[i] for i in seeds], {f"input {i}": leaves[i] for i in inputs})

    return _without_buffers(_capture(model, fn, batch, precision, program, backend, wanted=frozenset(inputs), hooks=False))


def _without_buffers(step: StepGraph | HloStep) -> StepGraph:
    """Without the outputs of buffers that the forward part changes a second time."""
    assert isinstance(step, StepGraph), "lazy tensors do not record vector-Jacobian products"
    kept = [i for i, out in enumerate(step.outputs) if out.kind is not Kind.BUFFER]
    results = step.results
    step.graph.output_node().args = (tuple(results[i] for i in kept),)
    step.outputs = tuple(step.outputs[i] for i in kept)
    step.graph.eliminate_dead_code()
    return step


def _capture(
    model: nn.Module,
    fn: ForwardFn,
    batch: Batch,
    precision: str,
    program: Callable[[dict[str, Tensor], Forward, list[Tensor]], Results],
    backend: Backend,
    wanted: frozenset[int] = frozenset(),
    hooks: bool = True,
) -> StepGraph | HloStep:
    if precision not in ("fp32", "bf16"):
        raise CaptureError(f"precision={precision!r} is unknown: use 'fp32' or 'bf16'")
    capture = _Capture(model, fn, batch, precision, program, backend, wanted, hooks)
    step = (capture.by_equal_layers() if backend.replicates else None) or capture.whole()
    _check_unchanged(step)
    return _with_trainable(step)


class _Capture:
    """One capture: of the whole model, or of some of its layers for all."""

    def __init__(
        self,
        model: nn.Module,
        fn: ForwardFn,
        batch: Batch,
        precision: str,
        program: Callable[[dict[str, Tensor], Forward, list[Tensor]], Results],
        backend: Backend,
        wanted: frozenset[int],
        hooks: bool,
    ):
        self.model, self.fn, self.batch, self.precision = model, fn, batch, precision
        self.program, self.backend, self.wanted, self.hooks = program, backend, wanted, hooks
        self.parameters, self.buffers = distinct_parameters(model), distinct_buffers(model)

    def whole(self) -> StepGraph | HloStep:
        return self._trace(self.parameters, self.buffers)

    def by_equal_layers(self) -> StepGraph | None:
        """The same graph as `whole`, of which equal layers are copies of one; None: there are none, or they are not understood."""
        layers = candidates(self.model)
        runs = self._runs(layers) if layers else []
        if not runs:
            return None
        left_out = tuple(f"{path}." for run in runs for path in run.copied)
        parameters, buffers = ([item for item in items if not item.name.startswith(left_out)] for items in (self.parameters, self.buffers))
        slots = [*self._slots(self.parameters, self.buffers), KEY]
        names = {(slot.kind, slot.target): name for slot, name in zip(slots, unique_names(slots))}
        try:
            step = self._trace(parameters, buffers, runs)
            assert isinstance(step, StepGraph), "lazy tensors do not copy layers"
            for run in runs:
                step = unrolled(step, run, names)
        except Passing:  # for who has asked for this capture, and asks for another one
            raise
        except Exception as error:  # what is wrong with the model itself the whole trace says again
            log.info("graphacc: every layer of %s is traced: %s", type(self.model).__name__, str(error).partition("\n")[0])
            return None
        return step

    def _runs(self, layers: Mapping[str, nn.Module]) -> list[Run]:
        """The runs of equal layers in a forward on fake tensors."""
        found: list[Run] = []

        def observed(stand_ins: Mapping[Tensor, Named], forward: Forward) -> tuple[Tensor | None, list[Tensor]]:
            calls = CallLog(layers, stand_ins)
            with calls.watching():
                loss, outputs = forward()
            found.extend(calls.runs([tensor for tensor in (loss, *outputs) if tensor is not None]))
            raise _Observed

        slots = [*self._slots(self.parameters, self.buffers), KEY]
        try:
            with self._contexts(), quiet_failures(), fake_mode():
                self._run([slot.fake() for slot in slots], self.parameters, self.buffers, {}, observed)
        except _Observed:
            return found
        except Passing:
            raise
        except Exception as error:  # the trace meets it, too, and says where
            log.debug("graphacc: equal layers are not looked for: %s", error)
        return []

    def _slots(self, parameters: Sequence[Named], buffers: Sequence[Named]) -> list[Slot]:
        slots = [Slot.like(Kind.PARAM, item.name, item.tensor, item.aliases) for item in parameters]
        slots += [Slot.like(Kind.BUFFER, item.name, item.tensor, item.aliases) for item in buffers]
        return slots + [Slot.like(Kind.BATCH, path, leaf) for path, leaf in zip(self.batch.paths, self.batch.leaves, strict=True)]

    def _trace(self, parameters: Sequence[Named], buffers: Sequence[Named], runs: Sequence[Run] = ()) -> StepGraph | HloStep:
        """The program on these parameters and buffers of the model, traced; of the runs some layers alone."""
        replaced: dict[int, str] = {}

        def called(_, forward: Forward) -> tuple[Tensor | None, list[Tensor]]:
            with handing_on(self.model, runs):
                return forward()

        with self._contexts():
            return self.backend.trace(
                [*self._slots(parameters, buffers), KEY],
                lambda tensors: self._run(tensors, parameters, buffers, replaced, called),
                source=SourceMode({id(module): path for path, module in self.model.named_modules()}, Phase.FORWARD),
                what=f"the model {type(self.model).__name__}",
                constants="<const>",
                replaced=replaced,
            )

    def _run(
        self,
        tensors: list[Tensor],
        parameters: Sequence[Named],
        buffers: Sequence[Named],
        replaced: dict[int, str],
        called: Callable[[Mapping[Tensor, Named], Forward], tuple[Tensor | None, list[Tensor]]],
    ) -> Results:
        """The program on one tensor per slot; `called` calls the forward."""
        precision, model = self.precision, self.model
        ends = len(parameters), len(parameters) + len(buffers)
        trained = [_leaf(item, tensor, self.hooks) for item, tensor in zip(parameters, tensors)]
        held = tensors[ends[0] : ends[1]]
        given = [leaf.detach().requires_grad_() if i in self.wanted else leaf for i, leaf in enumerate(tensors[ends[1] : -1])]
        with torch.enable_grad():  # also where a backward program is captured, inside PyTorch's backward
            computed = _to_bf16(trained) if precision == "bf16" else trained
        items = [*parameters, *buffers]
        substitute(model, dict(zip((id(item.tensor) for item in items), [*computed, *held])))

        def forward() -> tuple[Tensor | None, list[Tensor]]:
            with computing_in(precision, self.backend.device_type), watched_attributes(model, replaced), no_python_randomness(), ForeignWrites():
                return self.fn(model, given)

        stand_ins = dict(zip([*computed, *held], items))
        results = self.program(dict(zip((item.name for item in parameters), trained)), lambda: called(stand_ins, forward), given)
        results += [(Kind.PARAM, item.name, tensor) for item, tensor in zip(parameters, trained)]  # also after `parameter.data = ...`
        return results + [(Kind.BUFFER, item.name, _current(model, item)) for item in buffers]

    @contextlib.contextmanager
    def _contexts(self) -> Iterator[None]:
        """What the model's code runs in; the model is as before behind it."""
        packed = any("position_ids" in path for path in self.batch.paths)
        with borrowed(self.model, hooks=True), contextlib.ExitStack() as stack:
            stack.enter_context(compiling())
            stack.enter_context(decided_branches(packed_sequences=packed, checkpointed=Checkpoints(self.model, marks=self.backend is FX)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # a torch.compile inside the model is traced through
            stack.enter_context(whole_attention())
            stack.enter_context(WrittenOut())
            yield


class _Observed(Exception):
    """The forward has been seen: what follows it is not needed."""


def _leaf(item: Named, tensor: Tensor, hooks: bool) -> Tensor:
    """A leaf for a parameter, with the hooks that the user registered on it if they belong to the program."""
    if not hooks:
        return tensor.requires_grad_(item.tensor.requires_grad)
    if item.tensor._post_accumulate_grad_hooks:
        raise CaptureError(
            f"parameter {item.name!r} has a hook that runs when its gradient is accumulated "
            f"(register_post_accumulate_grad_hook), which a "
            "captured step does not do: change gradients between backward() and step(), or with Tensor.register_hook"
        )
    leaf = tensor.requires_grad_(item.tensor.requires_grad)
    for hook in (item.tensor._backward_hooks or {}).values() if leaf.requires_grad else ():
        leaf.register_hook(hook)
    return leaf


def _without_gradients(parameters: dict[str, Tensor], forward: Forward, leaves: list[Tensor]) -> Results:
    with torch.enable_grad():  # the calls of a recording have their own mode, for which their code may ask
        loss, outputs = forward()
    return _loss_result(loss) + _user_results(outputs)


def _vector_jacobian_product(parameters: dict[str, Tensor], forward: Forward, seeds: list[Tensor], inputs: dict[str, Tensor]) -> Results:
    with torch.enable_grad():
        _, outputs = forward()
        pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
        _note_backward([output for output, _ in pairs])
        trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        wanted = [*trained.values(), *inputs.values()]
        seeds = [seed.to(output.dtype) for output, seed in pairs]
        gradients = torch.autograd.grad([output for output, _ in pairs], wanted, seeds, allow_unused=True) if pairs and wanted else []
    annotate_nodes({"phase": Phase.FORWARD, "module_path": "", "stack_trace": ""})
    names = [*((Kind.GRAD, name) for name in trained), *((Kind.USER, name) for name in inputs)]
    return [(kind, name, grad) for (kind, name), grad in zip(names, gradients) if grad is not None]


def _with_gradients(parameters: dict[str, Tensor], forward: Forward, leaves: list[Tensor]) -> Results:
    with torch.enable_grad():
        loss, outputs = forward()
        _check_loss(loss)
        _note_backward([loss])
        wanted = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    annotate_nodes({"phase": Phase.FORWARD, "module_path": "", "stack_trace": ""})
    results = _loss_result(loss) + _user_results(outputs)
    return results + [(Kind.GRAD, name, grad) for name, grad in zip(wanted, gradients) if grad is not None]


def _loss_result(loss: Tensor | None) -> Results:
    return [] if loss is None else [(Kind.LOSS, "loss", _widened(loss.detach()).reshape(()))]


def _user_results(outputs: Sequence[Tensor]) -> Results:
    return [(Kind.USER, str(i), tensor.detach()) for i, tensor in enumerate(outputs)]


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the loss is {loss!r}, not a tensor: a training step needs a scalar tensor to differentiate; "
            "pass the labels to the model, or return a loss"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss has shape {list(loss.shape)}, but only a scalar can be differentiated: reduce it with .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: check requires_grad of the parameters, and "
            "that the "
            "forward neither runs under torch.no_grad() nor detaches its result"
        )


def _note_backward(results: Sequence[Tensor]) -> None:
    """Let every backward node say which forward operator it belongs to, as ``meta["custom"]["sequence"]``."""
    annotate_nodes({"phase": Phase.BACKWARD})
    seen, stack = set(), [result.grad_fn for result in results]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        function.register_prehook(_noting(function._sequence_nr()))
        stack.extend(following for following, _ in function.next_functions)


def _noting(sequence: int) -> Callable[[object], None]:
    return lambda _grads: annotate_nodes({"phase": Phase.BACKWARD, "sequence": sequence})


def _current(model: nn.Module, item: Named) -> Tensor:
    path, _, attribute = item.name.rpartition(".")
    found = model.get_submodule(path)._buffers[attribute]
    if found is None or (found.shape, found.dtype) != (item.tensor.shape, item.tensor.dtype):
        now = "None" if found is None else f"{list(found.shape)} {found.dtype}"
        raise CaptureError(
            f"the forward makes the buffer {item.name!r} {now} from {list(item.tensor.shape)} {item.tensor.dtype}: what a program keeps from step to step has "
            "one shape; allocate it at its full size and fill it"
        )
    return found


def _check_unchanged(step: StepGraph | HloStep) -> None:
    written = [out.target for out in step.outputs if out.kind is Kind.PARAM]
    if written:
        raise ParameterWritten(written)


def _with_trainable(step: StepGraph | HloStep) -> StepGraph | HloStep:
    trained = {out.target for out in step.outputs if out.kind is Kind.GRAD}
    step.inputs = tuple(
        dataclasses.replace(item, trainable=item.target in trained) if item.kind is Kind.PARAM else item for item in step.inputs
    )
    return step


def _to_bf16(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(torch.bfloat16) if tensor.dtype in (torch.float32, torch.float64) else tensor for tensor in tensors]


_LOSSES = frozenset(
    getattr(F, name)
    for name in (
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
        "gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss",
        "margin_ranking_loss", "hinge_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss",
        "triplet_margin_loss",
    )
)  # fmt: skip


class _LossesInFp32(TorchFunctionMode):
    """Losses of torch.nn.functional widen their tensors first."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _LOSSES:
            args = tuple(_widened(arg) if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {name: _widened(arg) if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def computing_in(precision: str, device_type: str):
    """The contexts in which the model's code runs for a precision."""
    if precision == "fp32":
        yield
        return
    with torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False), _LossesInFp32():
        yield
