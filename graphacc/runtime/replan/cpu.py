"""XLA:CPU: `xla.cpu.CompilationResultProto` <-> `Executable`.

Sources: openxla/xla `xla/backends/cpu/runtime/*_thunk.cc` (`buffer_uses()` of each kind) and
`thunk_executor.cc`: at load, the executor builds its graph from the read and write sets in sequence order, so the sequential
meaning of the new sequence is the contract.
"""

from typing import Any

from google.protobuf import message

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.model import (
    Access,
    Backend,
    Control,
    Executable,
    Mode,
    Sequence,
    Thunk,
    find_slices,
    follow,
    read_allocations,
    reorder_thunks,
)
from graphacc.runtime.replan.schema import Schema, find_unknown_fields

ALIGNMENT = 64  # cpu_function_runtime::MinAlign
THUNK_SEQUENCES = frozenset({"xla.cpu.ThunkSequenceProto"})
_KERNEL_OBJECT_FILES = 2  # CompilationResultProto.ObjFileKind.KERNELS: a program of thunks

_R, _W, _U = Mode.READ, Mode.WRITE, Mode.UPDATE
_ACCESSES: dict[str, tuple[tuple[str, Mode], ...]] = {
    "kernel_thunk": (("arguments_buffers.slice", _R), ("results_buffers.slice", _W)),
    "copy_thunk": (("src_buffer_shape.slice", _R), ("dst_buffer_shape.slice", _W)),
    "dot_thunk": (("lhs_buffer_shape.slice", _R), ("rhs_buffer_shape.slice", _R), ("out_buffer_shape.slice", _W)),
    "convolution_thunk": (("input_buffer_shape.slice", _R), ("kernel_buffer_shape.slice", _R), ("output_buffer_shape.slice", _W)),
    "sort_thunk": (("inputs_shapes.slice", _U),),
    "top_k_thunk": (("values_buffer", _R), ("output_buffer", _W), ("indices_buffer", _W)),
    "fft_thunk": (("input_buffer_shape.slice", _R), ("output_buffer_shape.slice", _W)),
    "rng_get_and_update_state_thunk": (("state_buffer", _U),),
    "rng_seed_thunk": (("dest_buffer", _W),),
    "custom_call_thunk": (("op_buffers.arguments_shapes.slice", _R), ("op_buffers.results_shapes.slice", _W)),
    "collective_thunk": (
        ("op_buffers.source_shapes_buffer_slices.slice", _R),
        ("op_buffers.destination_shapes_buffer_slices.slice", _W),
    ),
    "partition_id_thunk": (("logical_id_buffer", _W),),
    "replica_id_thunk": (("logical_id_buffer", _W),),
    "infeed_thunk": (("infeed_buffers_shapes.slice", _W),),
    "outfeed_thunk": (("outfeed_buffers_shapes.slice", _R),),
    "ynn_fusion_thunk": (("arguments_shapes.slice", _R), ("results_shapes.slice", _W)),
    "while_thunk": (("cond_buffer", _U),),
    "conditional_thunk": (("branch_index_buffer", _R),),
    "call_thunk": (),
}
"""Kind -> where its slices are, and what it does with them. A kind that is missing here is not understood."""

_ORDERED = {
    "collective_thunk": "collective",
    "infeed_thunk": "effect",
    "outfeed_thunk": "effect",
    "rng_seed_thunk": "effect",
    "rng_get_and_update_state_thunk": "effect",
}


_COMMUNICATOR = "communicator"
"""The resource of thunks that share one."""
_COLLECTIVE_COMMUNICATOR = 2  # xla.cpu.ResourceProto.Kind


def read(schema: Schema, data: bytes) -> Executable:
    """The model of a serialised CPU executable.

    Raises:
        NotUnderstood: it is not one, it is damaged, or it holds something unknown.
    """
    result = parse(schema, data)
    _check_result(result)
    effects = _instructions_with_effects(result.hlo_module.hlo_module)
    executable = Executable(
        root=_read_sequence(result.thunk_sequence, effects),
        allocations=read_allocations(result.buffer_assignment.buffer_allocations),
        alignment=ALIGNMENT,
        assignment=result.buffer_assignment,
        instruction_names=_instruction_names(result.hlo_module.hlo_module),
        message=result,
        planned_fields=("thunk_sequence", "buffer_assignment"),
    )
    executable.alignment = max([ALIGNMENT, *_kernel_alignments(executable)])
    _check_collectives(executable)
    return executable


def parse(schema: Schema, data: bytes) -> Any:
    """The CompilationResultProto in some bytes.

    Raises:
        NotUnderstood: they are none.
    """
    result = schema.message_class("xla.cpu.CompilationResultProto")()
    try:
        result.ParseFromString(data)
    except message.DecodeError as error:
        raise NotUnderstood(f"not a CompilationResultProto: {error}") from None
    return result


def write(executable: Executable) -> bytes:
    """The bytes of the executable as its messages now stand."""
    return executable.message.SerializeToString(deterministic=True)


def release_collectives(executable: Executable) -> None:
    """Let a plan choose the order of the outermost collectives: at run time they wait for each other in that order, on all devices of the executable."""
    for thunk in executable.root.thunks:
        thunk.ordered -= {"collective", _COMMUNICATOR}


def reorder(sequence: Sequence, order: tuple[int, ...]) -> None:
    """Put the thunk messages of one sequence into `order`, and let its resources point at their new places."""
    reorder_thunks(sequence, order)
    place = {old: new for new, old in enumerate(order)}
    for resource in sequence.message.thunk_resources:
        resource.thunk_indices[:] = sorted(place[i] for i in resource.thunk_indices)


def _check_collectives(executable: Executable) -> None:
    """Loaded from bytes, a nested sequence has a communicator of its own, and its collectives lose their order against the others."""
    for thunk in executable.thunks:
        if thunk.nested and "collective" in thunk.ordered:
            raise NotUnderstood(f"{thunk.kind} {thunk.name!r} holds collectives, whose order is lost where a program is loaded from bytes")


def _check_result(result: message.Message) -> None:
    if result.obj_files_kind != _KERNEL_OBJECT_FILES or not result.thunk_sequence.thunks:
        raise NotUnderstood("the executable is not a sequence of thunks")
    if not result.object_files:
        raise NotUnderstood("the executable has lost its code: it was itself loaded from bytes; jaxlib cannot serialise it again")
    unknown = find_unknown_fields(result.thunk_sequence) + find_unknown_fields(result.buffer_assignment)
    if unknown:
        raise NotUnderstood(f"the executable has fields that its schema does not know: {unknown[:3]}")


def _read_sequence(sequence: message.Message, effects: dict[str, bool]) -> Sequence:
    thunks = [_read_thunk(thunk, effects) for thunk in sequence.thunks]
    for number, resource in enumerate(sequence.thunk_resources):
        for i in resource.thunk_indices:
            if not 0 <= i < len(thunks):
                raise NotUnderstood(f"resource {number} names thunk {i} of {len(thunks)}")
            thunks[i].ordered |= {_COMMUNICATOR if resource.resource.kind == _COLLECTIVE_COMMUNICATOR else "resource"}
    resources = tuple(frozenset(resource.thunk_indices) for resource in sequence.thunk_resources)
    return Sequence(thunks=thunks, message=sequence, resources=resources)


def _read_thunk(thunk: message.Message, effects: dict[str, bool]) -> Thunk:
    kind = thunk.WhichOneof("impl")
    if kind not in _ACCESSES:
        raise NotUnderstood(f"unknown thunk {kind} of {thunk.info.op_name!r}")
    content = getattr(thunk, kind)
    nested = tuple(_read_sequence(s, effects) for s in _nested(kind, content))
    return Thunk(
        kind=kind,
        name=thunk.info.op_name,
        message=thunk,
        accesses=_read_accesses(kind, thunk.info.op_name, content),
        control=_CONTROL.get(kind, Control.LEAF),
        nested=nested,
        has_trip_count=kind == "while_thunk" and content.trip_count.contains_value,
        ordered=_ordered(kind, thunk.info.op_name, effects).union(*(t.ordered for s in nested for t in s.thunks)),
    )


_CONTROL = {"while_thunk": Control.WHILE, "conditional_thunk": Control.CONDITIONAL, "call_thunk": Control.CALL}


def _nested(kind: str, content: message.Message) -> list[message.Message]:
    match kind:
        case "while_thunk":
            return [content.cond_sequence, content.body_sequence]
        case "conditional_thunk":
            return list(content.branch_sequences)
        case "call_thunk":
            return [content.called_sequence]
    return []


def _read_accesses(kind: str, name: str, content: message.Message) -> tuple[Access, ...]:
    accesses = tuple(
        Access(mode=mode, allocation=s.buffer_allocation_index, offset=s.offset, size=s.size, slice=s)
        for path, mode in _ACCESSES[kind]
        for s in follow(content, path)
    )
    num_slices = sum(1 for _ in find_slices(content, THUNK_SEQUENCES))
    if num_slices != len(accesses):
        raise NotUnderstood(f"{kind} {name!r} names {num_slices} slices, of which {len(accesses)} are understood")
    return accesses


def _ordered(kind: str, name: str, effects: dict[str, bool]) -> frozenset[str]:
    if kind == "custom_call_thunk":
        return frozenset({"effect"} if effects.get(name, True) else ())
    return frozenset({_ORDERED[kind]} if kind in _ORDERED else ())


def _instructions_with_effects(module: message.Message) -> dict[str, bool]:
    instructions = (i for c in module.computations for i in c.instructions)
    return {i.name: i.custom_call_has_side_effect for i in instructions if i.opcode == "custom-call"}


def _instruction_names(module: message.Message) -> dict[int, str]:
    return {i.id: i.name for c in module.computations for i in c.instructions}


def _kernel_alignments(executable: Executable) -> list[int]:
    kernels = [t.message.kernel_thunk for t in executable.thunks if t.kind == "kernel_thunk"]
    return [k.min_alignment.value for k in kernels if k.min_alignment.contains_value]


BACKEND = Backend(read=read, write=write, reorder=reorder, release_collectives=release_collectives, thunk_sequences=THUNK_SEQUENCES)
