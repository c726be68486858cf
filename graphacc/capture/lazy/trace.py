"""From a Python function to an HloStep: it runs once on lazy tensors, whose HLO is taken out and nothing executed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
from torch import Tensor

from graphacc._compat.jax_ import HloModule
from graphacc.capture.diagnose import explained
from graphacc.capture.lazy import xla
from graphacc.capture.lazy.dispatch import LazyMode
from graphacc.capture.lazy.rewrites import Rewrites
from graphacc.capture.source import SourceMode
from graphacc.capture.tracing import Results, Slot, unique_names
from graphacc.errors import CaptureError
from graphacc.graph import Input, Kind, Output
from graphacc.hlo import DTYPES, Captured, Draw, HloStep, Operand, Support, WholeCall


def trace(
    slots: Sequence[Slot],
    program: Callable[[list[Tensor]], Results],
    *,
    source: SourceMode,
    what: str,
    constants: str,
    first_stream: int = 0,
    replaced: Mapping[int, str] = MappingProxyType({}),
) -> HloStep:
    """Record `program`, which maps one tensor per slot to its results, as one HLO module.

    The sibling of `graphacc.capture.tracing.trace`: same arguments, same signature. What the slots stand for needs no memory.

    Raises:
        CaptureError: `program` asks for a value of a tensor, or calls what torch_xla cannot record; names the user's line.
    """
    with explained(what), xla.tracing():
        tensors = [xla.placeholder(slot.shape, slot.dtype) for slot in slots]
        places = {xla.leaf_id(tensor): place for place, tensor in enumerate(tensors)}
        key = next((tensor for slot, tensor in zip(slots, tensors) if slot.kind is Kind.KEY), None)
        mode = LazyMode(tensors, key, first_stream)
        with mode, Rewrites(), source, mode.streams.numbering() if mode.streams is not None else contextlib.nullcontext():
            results = program(list(tensors))
        _check_replaced(mode, replaced)
        return _signed(slots, places, mode, results, constants, what)


def _check_replaced(mode: LazyMode, replaced: Mapping[int, str]) -> None:
    for tensor in mode.moved():
        if id(tensor) in replaced:
            raise CaptureError(
                f"the forward reads and replaces the tensor {replaced[id(tensor)]!r}, which is no buffer: a captured step would start from "
                "the same value every time. Register it with register_buffer"
            )


def _signed(
    slots: Sequence[Slot], places: Mapping[int, int], mode: LazyMode, results: Results, prefix: str, what: str
) -> HloStep:
    tensors = [tensor for _, _, tensor in results]
    ids, values = xla.leaves(tensors)
    _check_random(ids, what)
    module = HloModule.from_proto(xla.hlo_proto(tensors))
    inputs = [
        Input(name=name, kind=slot.kind, target=slot.target, shape=slot.shape, dtype=slot.dtype, aliases=slot.aliases)
        for name, slot in zip(unique_names(slots), slots)
    ]
    constants, drawn, calls = {}, mode.drawn, mode.whole.calls
    key = next((place for place, slot in enumerate(slots) if slot.kind is Kind.KEY), None)
    feeds: list[int | Draw] = []  # what each parameter of the module takes: the input of that index, or random numbers
    for number, value in zip(ids, values):
        feeds.append(drawn.get(number) or places.get(number, len(inputs)))
        if number not in places and number not in drawn:
            target, value = f"{prefix}.{len(constants)}", _on_host(value)
            constants[target] = value
            inputs.append(Input(name=f"buffer_{target}", kind=Kind.BUFFER, target=target, shape=tuple(value.shape), dtype=value.dtype))

    unchanged = {i for i, parameter in module.passed_through.items() if _is_slot(results[i], inputs, feeds[parameter])}
    kept = [i for i in range(len(results)) if i not in unchanged]

    kinds = tuple(None if i in unchanged else kind for i, (kind, _, _) in enumerate(results))
    captured = Captured(module=module, inputs=tuple(inputs), feeds=tuple(feeds), results=kinds, calls=tuple(calls))
    updates = Kind.PARAM in kinds  # what is updated stays where it lies

    def function(arrays: Sequence[jax.Array], support: Support) -> list[jax.Array]:
        read = list(arrays) if updates else [support.gather(item, array) for item, array in zip(inputs, arrays, strict=True)]
        given = [support.draw(feed, arrays[key]) if isinstance(feed, Draw) else read[feed] for feed in feeds]
        marked, whole = _marked(captured, support.marks.get(captured, {}))
        made = marked.call(given, lambda number, operands: support.call(whole[number], operands))
        return [made[i] for i in kept]

    return HloStep(
        function=function,
        inputs=tuple(inputs),
        outputs=tuple(_output(*results[i]) for i in kept),
        num_operators=module.num_operators,
        constants=constants,
        calls=tuple(calls[number] for number in module.whole_calls),
        captured=(captured,),
    )


def _marked(captured: Captured, marks: Mapping[int, str]) -> tuple[HloModule, Sequence[WholeCall]]:
    """The module with marks of its values, and its calls by number."""
    if not marks:
        return captured.module, captured.calls
    types = {number: kind for operation in captured.module.operations for number, kind in zip(operation.results, operation.types) if kind is not None}
    calls = list(captured.calls)
    for value, spec in marks.items():
        shape, element = types[value]
        dtype = DTYPES[element]
        calls.append(WholeCall(operator="graphacc.mark_sharding.default", arguments=(Operand(dtype), spec), results=((shape, dtype),), module_path="", stack_trace=""))
    return captured.module.with_calls({value: len(captured.calls) + place for place, value in enumerate(marks)}), calls


def _is_slot(result: tuple[Kind, str, Tensor], inputs: Sequence[Input], feed: int | Draw) -> bool:
    """Whether a parameter or buffer would be given back as it came."""
    if isinstance(feed, Draw):
        return False
    item = inputs[feed]
    return item.kind in (Kind.PARAM, Kind.BUFFER) and result[:2] == (item.kind, item.target)


def _output(kind: Kind, target: str, tensor: Tensor) -> Output:
    return Output(kind=kind, target=target, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _on_host(value: Tensor) -> Tensor:
    with xla.executing():
        return xla.to_host(value)


def _check_random(ids: Sequence[int], what: str) -> None:
    if xla.seed_id() in ids:
        raise CaptureError(
            f"{what} cannot be captured: it calls a random operator that has no form which depends on the step's key alone, so that its "
            "numbers would be the same in every step. Write it with torch.rand, randn, randint, bernoulli, normal_, exponential_ or dropout"
        )
