"""From a tape to StepGraphs (or HloSteps): the forward part, the gradients, the update, and the whole step."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from graphacc import hlo
from graphacc.capture.borrow import TensorsNow
from graphacc.capture import Backend, Batch, capture_forward, capture_gradients, capture_joint, capture_update, capture_vjp, stitch
from graphacc.capture.diagnose import Passing
from graphacc.errors import CaptureError, LoopError, RowsCounted, StrategyError
from graphacc.graph import Input, Kind, Phase, StepGraph
from graphacc.hlo import HloStep
from graphacc.loop.bounds import Range, indices_of
from graphacc.loop.managed import Handle
from graphacc.loop.microbatches import Attempts, CutOtherwise, expected_failures
from graphacc.loop.tape import Param, Ref, Tape
from graphacc.ops.chunked import Split
from graphacc.passes import accumulation
from graphacc.passes.microbatches import joined

Step = StepGraph | HloStep
"""What the two ways to capture give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientCode:
    """What happens to the gradients between backward and the update, and the values from outside that it needs."""

    tape: Tape
    names: tuple[str, ...]  # parameters whose gradients the update uses
    max_norm: float | None  # clip the total norm of the gradients to this, last
    results: tuple[int, ...] = ()  # value indices that the loop still holds, such as the norm before clipping

    @property
    def external_indices(self) -> list[int]:
        return sorted({index for call in self.tape.gradient_calls for index in call.externals})

    @property
    def forward_values(self) -> list[int]:
        """Value indices of the forward part that the gradient code reads."""
        made = set(self.tape.grad_values.values())
        found: set[int] = set()
        for call in self.tape.gradient_calls:
            found |= {leaf.index for leaf in call.leaves if isinstance(leaf, Ref)} - made
            made |= set(call.results)
        return sorted(found)

    @property
    def handles(self) -> list[Handle]:
        """The parameters and buffers that the gradient code reads."""
        leaves = (leaf for call in self.tape.gradient_calls for leaf in call.leaves)
        names = dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Param))
        return [self.tape.engine.handles[name] for name in names]

    def inputs(self) -> list[Input]:
        """The inputs besides gradients: externals as BATCH, values of the forward part as USER, parameters and buffers."""
        tape = self.tape
        externals = [_input(Kind.BATCH, tape.external_paths[i], tape.externals[i]) for i in self.external_indices]
        values = [
            _input(Kind.LOSS, "loss", tape.values[i]) if i == tape.loss else _input(Kind.USER, str(i), tape.values[i])
            for i in self.forward_values
        ]
        return externals + values + [_input(handle.kind, handle.name, handle.host_value()) for handle in self.handles]

    def key(self) -> tuple:
        tape = self.tape
        bindings = tuple(zip(self.names, map(tape.grad_values.get, self.names), map(tape.grad_bindings.get, self.names)))
        return tape.gradient_key, bindings, self.max_norm, self.results

    def update_gradients(self, env: dict[int, Tensor]) -> dict[str, Tensor]:
        """Parameter name -> the gradient that the update uses, from the values of the gradient code."""
        result = {name: env[self.tape.grad_bindings[name]] for name in self.names}
        return result if self.max_norm is None else clip_total_norm(result, self.max_norm)

    def replay(self, grads: dict[str, Tensor], extras: Sequence[Tensor]) -> dict[int, Tensor]:
        """Run the gradient code; returns every value of it by index."""
        tape, given = self.tape, iter(extras)
        externals = {index: next(given) for index in self.external_indices}
        env = {index: next(given) for index in self.forward_values}
        named = {handle.name: next(given) for handle in self.handles}
        env |= {tape.grad_values[name]: grad.clone() for name, grad in grads.items()}
        tape.replay(tape.gradient_calls, env, externals, named)
        return env


def clip_total_norm(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Scale all gradients by min(1, max_norm / (total 2-norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` does."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads.values()]
    scale = torch.clamp(max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0)
    return {name: grad * scale.to(grad.dtype) for name, grad in grads.items()}


def joint_graph(
    backend: Backend, model: nn.Module, tape: Tape, outputs: Sequence[int], precision: str, microbatches: int
) -> Step:
    """Forward and backward up to ``tape.loss``; `outputs` are the values that are returned besides.

    With several microbatches it is the graph of one of them, and its loss is divided by their number.
    """

    def forward(module: nn.Module, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        env: dict[int, Tensor] = {}
        try:
            with expected_failures() if microbatches > 1 else contextlib.nullcontext():
                tape.replay(tape.forward_calls, env, dict(enumerate(leaves)), TensorsNow(module))
        except Exception as error:
            if not isinstance(error, Passing) and microbatches > 1 and attempts.cut_more(env):
                raise CutOtherwise from error
            raise
        if microbatches == 1:
            return env[tape.loss], [env[i] for i in outputs]
        results = [i for call in tape.forward_calls if tape.engine.is_model(call.function) for i in call.results if tape.values[i].dim()]
        shapes.append(not results or any(env[i].shape != tape.values[i].shape for i in results))
        return env[tape.loss] / microbatches, [env[i] for i in outputs]

    attempts = Attempts(tape)
    shapes: list[bool] = []  # whether results are as large as the microbatch
    whole = batch_of(tape, tape.forward_calls)
    while True:
        leaves = tuple(microbatch(leaf, tape, index, microbatches, 0) for index, leaf in enumerate(whole.leaves))
        try:
            with tape.as_recorded():
                step = capture_joint(model, forward, dataclasses.replace(whole, leaves=leaves), precision=precision, backend=backend)
            step = _renumber(step, outputs)
            if not all(shapes):
                cut = [path for index, path in enumerate(whole.paths) if _microbatch_dim(tape, index, microbatches) is not None]
                raise RowsCounted(
                    f"microbatches={microbatches} cut {', '.join(map(repr, cut))}, and the model's results are as large as those of the whole batch: what was cut are no examples "
                    "(words of all texts, nodes of a graph).\n  remedy: name the dim of the examples, or None, by graphacc.compile(..., batch_dims={...}), or leave microbatches out"
                )
            if microbatches > 1 and isinstance(step, StepGraph):
                _check_row_numbers(step, tape)
            return step
        except CutOtherwise:
            continue
        except CaptureError as error:
            uncut = [f"{path!r} {list(leaf.shape)}" for index, (path, leaf) in enumerate(zip(whole.paths, whole.leaves)) if leaf.dim() and _microbatch_dim(tape, index, microbatches) is None]
            if microbatches > 1 and uncut:
                error.add_note(
                    f"microbatches={microbatches} cut the batch, and leave {', '.join(uncut)} whole: if the rows of each example stand together in one of them, say so by "
                    "graphacc.compile(..., batch_dims={its name: 0}), or flatten it by .view(-1) or .flatten() of a tensor with the batch in dim 0"
                )
            elif microbatches > 1:
                error.add_note(
                    f"microbatches={microbatches} cut the batch, of which the code sees a part: one that sets its examples in relation to each other (pairs of rows, a contrastive loss) "
                    "needs all of it: leave microbatches out"
                )
            raise


def _check_row_numbers(step: StepGraph, tape: Tape) -> None:
    """Nothing that the loop gives counts rows of the whole batch (``logits[torch.arange(B), y]``, a permutation), of which a microbatch has a part.

    Raises:
        CaptureError: an index that follows from the batch has another range in the graph of a microbatch than where the call was recorded.
    """
    known = frozenset().union(*(call.ranges for call in tape.forward_calls))
    integers: set[torch.fx.Node] = set()  # that follow from integers of the batch, and from constants, alone
    constants: set[torch.fx.Node] = set()
    kinds = dict(zip(step.placeholders, step.inputs))
    for node in step.graph.nodes:
        value = node.meta.get("val")
        if node in kinds:
            integers |= {node} if kinds[node].kind is Kind.BATCH and not node.meta["val"].is_floating_point() else set()
        if node.op != "call_function":
            continue
        operands = set(node.all_input_nodes)
        if not operands:
            constants.add(node)
        elif isinstance(value, Tensor) and not value.is_floating_point() and operands <= integers | constants and operands & integers:
            integers.add(node)
        if node.meta.get("phase") is not Phase.FORWARD or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        given = {id(operand.meta["val"]): operand for operand in operands}
        found = [(given.get(id(index)), allowed) for index, allowed in indices_of(node.target, args, kwargs)]
        for place, (index, allowed) in enumerate(found):
            is_new = allowed.high not in {ends[place] for ends in known if len(ends) == len(found)}
            if index in integers and (is_new or _goes_beyond(kinds.get(index), allowed, tape)):
                line = node.meta.get("stack_trace", "").rstrip()
                raise RowsCounted(
                    f"{node.target} has an index that the loop gives and that counts rows of the whole batch, of which a microbatch has {allowed.high}.{chr(10) + line if line else ''}\n"
                    "  remedy: make the numbers of rows in the model's forward (torch.arange(len(x))), or leave microbatches out"
                )


def _goes_beyond(item: Input | None, allowed: Range, tape: Tape) -> bool:
    """Whether a part of a tensor that the loop gives is out of range as an index in its microbatch, for sizes that are equal by chance."""
    if item is None or item.target not in tape.external_paths:
        return False
    external, count = tape.external_paths.index(item.target), tape.engine.programs.strategy.microbatches
    return any(allowed.violation(microbatch(tape.given(external), tape, external, count, part)) is not None for part in range(count))


def forward_graph(
    backend: Backend, model: nn.Module, tape: Tape, outputs: Sequence[int], precision: str, keep_buffers: bool
) -> Step:
    """The forward part alone, without gradients; buffers that it changes are outputs if they are to be kept."""

    def forward(module: nn.Module, leaves: list[Tensor]) -> tuple[None, list[Tensor]]:
        env: dict[int, Tensor] = {}
        tape.replay(tape.forward_calls, env, dict(enumerate(leaves)), TensorsNow(module))
        return None, [env[i] for i in outputs]

    batch = batch_of(tape, tape.forward_calls)
    with tape.as_recorded():
        step = _renumber(capture_forward(model, forward, batch, precision=precision, backend=backend), outputs)
    return step if keep_buffers else _without_outputs(step, Kind.BUFFER)


def vjp_graph(backend: Backend, model: nn.Module, tape: Tape, outputs: Sequence[int], inputs: Sequence[int], precision: str) -> Step:
    """From gradients of the values `outputs` to those of the externals `inputs` and of the parameters; the forward part is computed in it, too."""
    batch = batch_of(tape, tape.forward_calls)
    count = len(batch.leaves)

    def forward(module: nn.Module, leaves: list[Tensor]) -> tuple[None, list[Tensor]]:
        env: dict[int, Tensor] = {}
        tape.replay(tape.forward_calls, env, dict(enumerate(leaves[:count])), TensorsNow(module))
        return None, [env[i] for i in outputs]

    seeds = tuple(torch.empty(tape.values[i].shape, dtype=tape.values[i].dtype, device="meta") for i in outputs)
    batch = Batch(leaves=batch.leaves + seeds, paths=batch.paths + tuple(gradient_path(i) for i in outputs))
    with tape.as_recorded():
        return capture_vjp(model, forward, batch, seeds=range(count, count + len(seeds)), inputs=inputs, precision=precision, backend=backend)


def gradient_path(index: int) -> str:
    """What the gradient of a value is called as an input."""
    return f"gradient of result {index}"


def accumulating(joint: Step) -> Step:
    """The same step with every gradient added to an input of kind GRAD, which the sum replaces."""
    return hlo.accumulating(joint) if isinstance(joint, HloStep) else accumulation.accumulating(joint)


def microbatch(tensor: Tensor, tape: Tape, external: int, count: int, part: int) -> Tensor:
    """Part `part` of `count` of a batch tensor, along its batch dim; a tensor without one stays whole.

    The batch dim is the one that `batch_dims` names (None: none), else dim 0 where that has the batch size, or is the batch and the dims behind it
    together (``labels.view(-1)``). Such a tensor that is no argument of the model (labels, but also a table of prototypes) is cut only where the code
    that reads it cannot do with all of it.

    Args:
        external: the tensor's number on the tape.

    Raises:
        StrategyError: the batch cannot be cut into `count` equal parts.
    """
    dim = _microbatch_dim(tape, external, count) if count > 1 else None
    if dim is None:
        return tensor
    _check_size(tape.rows.get(external, tensor.shape[dim]), count)
    return part_of(tensor, dim, count, part)


def microbatch_dims(tape: Tape, step: StepGraph, count: int) -> dict[str, int | None]:
    """Target of each BATCH input of `step` -> the dim of its examples, along which it is cut: any choice gives the same results.

    Raises:
        StrategyError: the batch cannot be cut into `count` equal parts.
    """
    for size in _cut_sizes(tape, count):
        _check_size(size, count)
    externals = {path: index for index, path in enumerate(tape.external_paths)}
    return {item.target: _microbatch_dim(tape, externals[item.target], count) for item in step.inputs if item.kind is Kind.BATCH and item.target in externals}


def can_be_cut(tape: Tape, count: int) -> bool:
    """Whether the batch can be cut into `count` equal parts."""
    sizes = _cut_sizes(tape, count)
    return bool(sizes) and all(size % count == 0 for size in sizes)


def _cut_sizes(tape: Tape, count: int) -> list[int]:
    """The numbers of examples in the tensors from outside that are cut."""
    dims = [(index, _microbatch_dim(tape, index, count)) for index in range(len(tape.externals))]
    return [tape.rows.get(index, tape.externals[index].shape[dim]) for index, dim in dims if dim is not None]


def part_of(tensor: Tensor, dim: int, count: int, part: int) -> Tensor:
    """One of `count` equal parts of a tensor."""
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, part * size, size)


def _check_size(size: int, count: int) -> None:
    if size % count:
        raise StrategyError(f"microbatches={count} does not divide the batch of {size}: choose a batch size that is a multiple of {count}, or other microbatches")


def _microbatch_dim(tape: Tape, external: int, count: int) -> int | None:
    """The dim along which a tensor from outside is cut into microbatches."""
    asked, tensor = tape.engine.programs.batch_dims, tape.externals[external]
    if (path := tape.external_paths[external]) in asked:
        return asked[path]
    given = [(path, leaf) for index, (path, leaf) in enumerate(zip(tape.external_paths, tape.externals)) if index not in tape.loose or path in asked]
    sizes = (leaf.shape[dim] for path, leaf in given if (dim := asked.get(path, 0)) is not None and dim < leaf.dim())
    if external in tape.engine.cut.get(tape.forward_key, ()):
        return 0
    rows = tape.rows.get(external, tensor.shape[0] if tensor.dim() else None)
    if rows is None or rows != next(sizes, None):
        return None
    return None if external in tape.loose and rows != count else 0  # one row fits everything


def from_microbatches(parts: Sequence[Callable[[], Tensor]], like: Tensor, how: Split | str | None = None) -> Callable[[], Tensor]:
    """A function that gives a value of the whole batch from its microbatches.

    Args:
        parts: fetch one microbatch's value each.
        like: has the shape that the value has for the whole batch.
        how: as `Microbatches.results` says; None: each microbatch stands for itself, and values are joined along the dim that grows with them, or are the mean of numbers.
    """
    if how is not None:
        return lambda: joined([part() for part in parts], how)
    if len(parts) == 1:
        return parts[0]

    def fetch() -> Tensor:
        values = [part() for part in parts]
        shape = tuple(values[0].shape)
        if not shape and values[0].is_floating_point():
            return torch.stack(values).mean()
        joined = [dim for dim, size in enumerate(shape) if (*shape[:dim], size * len(values), *shape[dim + 1 :]) == tuple(like.shape)]
        if joined:
            return torch.cat(values, joined[0])
        raise LoopError(
            f"the loop reads a {values[0].dtype} of shape {list(like.shape)} that is computed from the model's results, in "
            f"microbatches={len(parts)} parts of shape {list(shape)}: only values with the batch in one dim and floating-point numbers, whose "
            "mean is taken, can be put together; compute others from such values after optimizer.step()"
        )

    return fetch


def _without_outputs(step: Step, kind: Kind) -> Step:
    if isinstance(step, HloStep):
        return hlo.without_outputs(step, kind)
    kept = [i for i, out in enumerate(step.outputs) if out.kind is not kind]
    results = step.results
    step.graph.output_node().args = (tuple(results[i] for i in kept),)
    step.outputs = tuple(step.outputs[i] for i in kept)
    step.graph.eliminate_dead_code()
    return step


def gradient_graph(backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, code: GradientCode) -> Step:
    """Gradient code alone: from gradients to those that an update uses."""
    return _captured_update(capture_gradients, backend, model, optimizer, code)


def update_graph(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, code: GradientCode, dynamic: frozenset[str], alike: Mapping[str, Hashable] | None
) -> Step:
    """Gradient code and the optimizer's step; arguments as of `capture_update`."""
    if not code.tape.gradient_calls and code.max_norm is None and not code.results:
        return capture_update(model, optimizer, code.names, dynamic=dynamic, alike=alike, backend=backend)
    return _captured_update(capture_update, backend, model, optimizer, code, dynamic=dynamic, alike=alike)


def _captured_update(capture: Callable[..., Step], backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, code: GradientCode, **options) -> Step:
    env: dict[int, Tensor] = {}

    def transform(grads: dict[str, Tensor], extras: Sequence[Tensor]) -> dict[str, Tensor]:
        env.update(code.replay(grads, extras))
        return code.update_gradients(env)

    return capture(
        model,
        optimizer,
        tuple(code.tape.grad_values) if code.tape.gradient_calls else code.names,
        transform=transform,
        extras=code.inputs(),
        updated=code.names,
        results=lambda: {str(index): env[index] for index in code.results},
        backend=backend,
        **options,
    )


def step_graph(joint: Step, update: Step) -> Step:
    """The whole step as one graph."""
    return hlo.joined(joint, update) if isinstance(joint, HloStep) else stitch(joint, update)


def batch_of(tape: Tape, calls: Sequence) -> Batch:
    """The externals that recorded calls use, as the batch of a capture (all up to the last one used)."""
    count = max((index for call in calls for index in call.externals), default=-1) + 1
    return Batch(leaves=tuple(tape.externals[:count]), paths=tuple(tape.external_paths[:count]))


def _input(kind: Kind, target: str, like: Tensor) -> Input:
    return Input(name="", kind=kind, target=target, shape=tuple(like.shape), dtype=like.dtype)


def _renumber(step: Step, outputs: Sequence[int]) -> Step:
    """Name USER outputs by their value index on the tape instead of their position."""
    targets = {str(position): str(index) for position, index in enumerate(outputs)}
    step.outputs = tuple(
        dataclasses.replace(out, target=targets[out.target]) if out.kind is Kind.USER else out for out in step.outputs
    )
    return step
