"""HloStep: one training step, or a part of it, as StableHLO with the signature of a StepGraph.

Where a StepGraph holds operators, an HloStep holds a JAX-traceable function that calls the captured modules, so two
captures are joined, and gradients accumulated, by composing functions. Every shape is global: how it is spread over a mesh is
said by the shards of its inputs, outputs and links, and XLA's SPMD partitioner does the rest.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import torch

from graphacc._compat.jax_ import HloModule
from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, Output, stands_for

Key = tuple[Kind, str]
DTYPES = {
    "i1": torch.bool, "ui8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "ui32": torch.uint32, "ui64": torch.uint64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "complex<f32>": torch.complex64, "complex<f64>": torch.complex128,
}  # fmt: skip
"""Element types of HLO."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers on the step's key, for the whole of a tensor (see graphacc.ops.random)."""

    operator: str  # "graphacc.random_bits.default" or "graphacc.random_uniform.default"
    stream: int
    size: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Stands for a tensor among the arguments of a `WholeCall`."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeCall:
    """An operator that stays whole in the captured HLO: a custom call that names it by its place in the step's table."""

    operator: str  # "graphacc.flash_attention.default"
    arguments: tuple  # all of the operator's, an `Operand` in the place of each tensor
    keywords: tuple[tuple[str, object], ...] = ()  # those that are given by name, alike
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each
    module_path: str  # the submodule that called it; for a backward that of the forward
    stack_trace: str  # lines of the user's code; "" for a backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """What a step needs of the runtime, which lowers it."""

    constrain: Callable[[Key, jax.Array], jax.Array]  # gives the value of a link its layout
    gather: Callable[[Input, jax.Array], jax.Array]  # an input as forward and backward read it: without the layout of ZeRO
    draw: Callable[[Draw, jax.Array], jax.Array]  # random numbers from the key
    call: Callable[[WholeCall, Sequence[jax.Array]], Sequence[jax.Array]]  # the results, from one array per `Operand`
    marks: "Mapping[Captured, Mapping[int, str]]"  # values of a module, by number, and how they are split: the text of a spec (",tp")


Function = Callable[[Sequence[jax.Array], Support], Sequence[jax.Array]]
"""(one array per input, support) -> one array per output."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """One captured module, and what it takes and gives."""

    module: HloModule
    inputs: tuple[Input, ...]
    feeds: tuple[int | Draw, ...]  # what each parameter of the module takes: the input of that index, or random numbers
    results: tuple[Kind | None, ...]  # of all that it gives; None for an input that it gives back as it came
    calls: tuple[WholeCall, ...]  # by number


@dataclasses.dataclass(kw_only=True)
class HloStep:
    """A captured step and its signature."""

    function: Function
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    num_operators: int  # of the captured HLO
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # target of a BUFFER input -> its fixed value
    links: tuple[Output, ...] = ()  # gradients that one part gives and the next takes
    calls: tuple[WholeCall, ...] = ()  # the operators that are whole in it
    captured: tuple[Captured, ...] = ()  # the modules that its function calls
    marks: Mapping[Captured, Mapping[int, str]] = dataclasses.field(default_factory=dict)  # see `Support`
    unread: frozenset[str] | None = None  # names of inputs that nothing reads; None: not known

    def donations(self) -> dict[int, int]:
        """Output index -> index of the input that it replaces (same kind and target)."""
        by_key = {key_of(item): i for i, item in enumerate(self.inputs)}
        return {i: by_key[key] for i, out in enumerate(self.outputs) if (key := key_of(out)) in by_key}


def key_of(item: Input | Output) -> Key:
    return item.kind, item.target


def joined(first: HloStep, second: HloStep) -> HloStep:
    """Both steps as one: an input of `second` is wired, by kind and target, to an output of `first` (but not to a buffer),
    else to the input of `first`, else it is an input of the whole. Gradients that `first` gives become links.

    Raises:
        GraphError: `second` reads a tensor of another shape, or one that is no value of the user of another dtype, than `first` has.
    """
    known = {key_of(item): item for item in (*first.inputs, *first.outputs)}
    _check_wiring(known, second)
    outside = [item for item in second.inputs if key_of(item) not in known]
    inputs = (*first.inputs, *outside)
    links = tuple(out for out in first.outputs if out.kind is Kind.GRAD)
    kept = [i for i, out in enumerate(first.outputs) if out.kind is not Kind.GRAD]
    linked = {key_of(out) for out in links}

    def function(arrays: Sequence[jax.Array], support: Support) -> list[jax.Array]:
        env = dict(zip(map(key_of, inputs), arrays))
        results = first.function(arrays[: len(first.inputs)], support)
        made = {key_of(out): value for out, value in zip(first.outputs, results) if out.kind is not Kind.BUFFER}
        env |= {key: support.constrain(key, value) if key in linked else value for key, value in made.items()}
        read = [_as_promised(env[key_of(item)], item) for item in second.inputs]
        return [results[i] for i in kept] + list(second.function(read, support))

    return HloStep(
        function=function,
        inputs=inputs,
        outputs=tuple(first.outputs[i] for i in kept) + second.outputs,
        num_operators=first.num_operators + second.num_operators,
        constants=first.constants | second.constants,
        links=(*first.links, *links, *second.links),
        calls=(*first.calls, *second.calls),
        captured=(*first.captured, *second.captured),
    )


def _as_promised(array: jax.Array, item: Input) -> jax.Array:
    """A value of the user in the dtype that it was promised in (see `stands_for`)."""
    return array.astype(str(item.dtype).removeprefix("torch.")) if item.kind is Kind.USER and item.dtype.is_floating_point else array


def accumulating(joint: HloStep) -> HloStep:
    """The same step with every gradient added to an input of kind GRAD, which the sum replaces."""
    grads = [i for i, out in enumerate(joint.outputs) if out.kind is Kind.GRAD]
    sums = tuple(_as_input(joint.outputs[i]) for i in grads)

    def function(arrays: Sequence[jax.Array], support: Support) -> list[jax.Array]:
        results = list(joint.function(arrays[: len(joint.inputs)], support))
        for i, so_far in zip(grads, arrays[len(joint.inputs) :], strict=True):
            results[i] = so_far + results[i]
        return results

    return dataclasses.replace(joint, function=function, inputs=(*joint.inputs, *sums))


def without_outputs(step: HloStep, kind: Kind) -> HloStep:
    """The same step without its outputs of one kind."""
    kept = [i for i, out in enumerate(step.outputs) if out.kind is not kind]

    def function(arrays: Sequence[jax.Array], support: Support) -> list[jax.Array]:
        results = step.function(arrays, support)
        return [results[i] for i in kept]

    return dataclasses.replace(step, function=function, outputs=tuple(step.outputs[i] for i in kept))


def _as_input(out: Output) -> Input:
    name = f"{out.kind.value}_so_far_{out.target}"
    return Input(name=name, kind=out.kind, target=out.target, shape=out.shape, dtype=out.dtype, shards=out.shards)


def _check_wiring(known: dict[Key, Input | Output], second: HloStep) -> None:
    for item in second.inputs:
        source = known.get(key_of(item), item)
        if not stands_for(source, item):
            raise GraphError(
                f"the second step reads {item.kind.value} {item.target!r} as {item.dtype}{list(item.shape)}, "
                f"the first gives {source.dtype}{list(source.shape)}"
            )
