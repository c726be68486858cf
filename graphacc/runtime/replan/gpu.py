"""XLA:CUDA: `xla.gpu.GpuExecutableProto`, split over the records of a Riegeli file, <-> `Executable`.

Sources: openxla/xla `xla/backends/gpu/runtime/*_thunk.cc` (`buffer_uses()` of each kind), `xla/service/gpu/gpu_executable.cc` and
`xla/util/split_proto`. Thunks run in order on one stream, apart from asynchronous regions: the thunks inside an `async_start_thunk`
run on another stream, after everything before it and beside everything up to the `async_done_thunk` of the same number. Here that
one reads and updates once more all that the region touched: so nothing that conflicts with the region can run beside it, and
whatever it touches stays in place until it is done.

Kernels of jaxlib 0.10.2 are launched while their predecessors still run (`use_pdl`), and wait for them first of all. Command
buffers are made at load, from the order and the addresses that are found then.
"""

import dataclasses
from collections.abc import Iterator

from google.protobuf import message

from graphacc.runtime.replan import riegeli
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.hlo_slots import OperandSlots
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

ALIGNMENT = 256  # kXlaAllocatedBufferAlignBytes
THUNK_SEQUENCES = frozenset({"xla.gpu.ThunkSequenceProto", "xla.gpu.ThunkProto"})
PLANNED_FIELDS = ("thunks", "buffer_assignment", "buffer_allocations")
_EXECUTABLE = "xla.gpu.GpuExecutableProto"
_PART_FIELDS = frozenset({"constants", "dnn_compiled_graphs"})  # of a message that stands in a record of its own

_R, _W, _U = Mode.READ, Mode.WRITE, Mode.UPDATE
_COPY = (("source_buffer.slice", _R), ("destination_buffer.slice", _W))
_COLLECTIVE = (("buffers.source_buffer.slice", _R), ("buffers.destination_buffer.slice", _W))
_ACCESSES: dict[str, tuple[tuple[str, Mode], ...]] = {
    "convolution_thunk": (("operand_buffers.slice", _R), ("result_buffers.slice", _W), ("scratch_buffer", _W)),
    "copy_thunk": _COPY,
    "device_to_device_copy_thunk": tuple((f"copy_thunk.{path}", mode) for path, mode in _COPY),
    "memzero_thunk": (("dest_buffer.slice", _W),),
    "memset32bit_value_thunk": (("dest_buffer", _W),),
    "fft_thunk": (("input_buffer", _R), ("output_buffer", _W)),
    "triangular_solve_thunk": (("a_buffer.slice", _R), ("b_buffer.slice", _U), ("temp_buffer.slice", _W)),
    "custom_call_thunk": (("operands.shaped_slice.slice", _R), ("results.shaped_slice.slice", _W)),
    "replica_id_thunk": (("dest_buffer", _W),),
    "partition_id_thunk": (("dest_buffer", _W),),
    "rng_seed_thunk": (("dest_buffer", _W),),
    "all_gather_thunk": _COLLECTIVE,
    "all_reduce_thunk": _COLLECTIVE,
    "reduce_scatter_thunk": _COLLECTIVE,
    "all_to_all_thunk": _COLLECTIVE,
    "collective_permute_thunk": _COLLECTIVE,
    "collective_broadcast_thunk": _COLLECTIVE,
    "collective_kernel_thunk": _COLLECTIVE,
    "dynamic_slice_fusion_thunk": (("parameter_buffers", _R), ("result_buffers", _W)),
    "while_thunk": (("condition_result_buffer_index", _U),),
    "conditional_thunk": (("branch_index_buffer.slice", _R),),
    "sequential_thunk": (),
    "async_start_thunk": (),
    "async_done_thunk": (),
}
"""Kind -> where its slices are, and what it does with them. A kind that is missing here and in `_SPECIAL` is not understood."""

_COLLECTIVES = frozenset(kind for kind, accesses in _ACCESSES.items() if accesses is _COLLECTIVE)
_CONTROL = {
    "while_thunk": Control.WHILE,
    "conditional_thunk": Control.CONDITIONAL,
    "sequential_thunk": Control.CALL,
    "async_start_thunk": Control.CALL,
}


def read(schema: Schema, data: bytes) -> Executable:
    """The model of a serialised CUDA executable.

    Raises:
        NotUnderstood: it is not one, it is damaged, or it holds something unknown.
    """
    *parts, main = _read_records(data)
    _check_parts(schema, parts)
    result = _parse(schema, _EXECUTABLE, main)
    _check_result(result)
    module = result.hlo_module_with_config.hlo_module
    return Executable(
        root=_Reader(module, result.buffer_assignment).sequence(result),
        allocations=read_allocations(result.buffer_assignment.buffer_allocations),
        alignment=ALIGNMENT,
        assignment=result.buffer_assignment,
        instruction_names={i.id: i.name for c in module.computations for i in c.instructions},
        message=result,
        planned_fields=PLANNED_FIELDS,
        parts=tuple(parts),
    )


def write(executable: Executable) -> bytes:
    """The bytes of the executable as its messages now stand; both tables of allocations are those of the assignment."""
    result = executable.message
    table = _table(result)
    del result.buffer_allocations.values[:]
    result.buffer_allocations.values.extend(table)
    return riegeli.write_records([*executable.parts, result.SerializeToString(deterministic=True)])


def _parse(schema: Schema, name: str, data: bytes) -> message.Message:
    parsed = schema.message_class(name)()
    try:
        parsed.ParseFromString(data)
    except message.DecodeError as error:
        raise NotUnderstood(f"not a {name}: {error}") from None
    return parsed


# --- the records ---


def _read_records(data: bytes) -> list[bytes]:
    records = riegeli.read_records(data)
    if len(records) < 2:
        raise NotUnderstood(f"the executable is split into {len(records)} records, expected a manifest and more")
    return records


def _check_parts(schema: Schema, parts: list[bytes]) -> None:
    """All records but the last: the manifest, single fields, and messages that hold nothing that concerns memory."""
    manifest, *parts = parts
    split = _parse(schema, "xla.SplitProtoManifest", manifest)
    kinds = [record.WhichOneof(record.DESCRIPTOR.oneofs[0].name) for record in split.records]
    if split.result_proto_type != _EXECUTABLE or len(kinds) != len(parts) + 1 or kinds[-1] != "proto_merge_record":
        raise NotUnderstood(f"the executable is a split {split.result_proto_type!r} of the records {kinds}, expected {_EXECUTABLE}")
    for kind, record, part in zip(kinds, split.records, parts):
        if kind == "proto_merge_record":
            fields = {field.name for field, _ in _parse(schema, _EXECUTABLE, part).ListFields()}
        else:
            fields = {_overridden_field(schema, record)}
        if not fields <= _PART_FIELDS | {"asm_text", "binary"}:
            raise NotUnderstood(f"a record of the executable holds {sorted(fields)}, expected it in the last one")


def _overridden_field(schema: Schema, record: message.Message) -> str:
    path = record.field_override_record.field_path
    field = schema.message_class(_EXECUTABLE).DESCRIPTOR.fields_by_number.get(path[0].field_number) if path else None
    return "an unknown field" if field is None else field.name


def _check_result(result: message.Message) -> None:
    if not result.thunks or not result.HasField("buffer_assignment") or not result.HasField("hlo_module_with_config"):
        raise NotUnderstood("the executable is not a sequence of thunks with its program and its buffer assignment")
    if list(result.buffer_allocations.values) != _table(result):
        raise NotUnderstood("the executable's two tables of allocations differ")
    tables = (*result.thunks, result.buffer_assignment, result.buffer_allocations)
    unknown = [path for table in tables for path in find_unknown_fields(table)]
    if unknown:
        raise NotUnderstood(f"the executable has fields that its schema does not know: {unknown[:3]}")
    for allocation in result.buffer_allocations.values:
        if allocation.color:
            raise NotUnderstood(f"allocation {allocation.index} lies in memory of colour {allocation.color}, expected 0")


def _table(result: message.Message) -> list[message.Message]:
    """The assignment's allocations, as the executable's own table has them: from jaxlib 0.11 on without the buffers that are assigned to them."""
    table = list(result.buffer_assignment.buffer_allocations)
    if not any(allocation.assigned for allocation in result.buffer_allocations.values):
        table = [type(allocation).FromString(allocation.SerializeToString()) for allocation in table]
        for allocation in table:
            allocation.ClearField("assigned")
    return table


# --- thunks ---


class _Reader:
    """Reads thunk messages of one program."""

    def __init__(self, module: message.Message, assignment: message.Message):
        self._slots = OperandSlots(module, assignment)
        instructions = [i for c in module.computations for i in c.instructions]
        self._names = {i.name for i in instructions}
        self._effects = {i.name: i.custom_call_has_side_effect for i in instructions if i.opcode == "custom-call"}

    def sequence(self, root: message.Message) -> Sequence:
        thunks: list[Thunk] = []
        started: dict[int, int] = {}  # number of an asynchronous region -> place of its start
        for place, thunk in enumerate(root.thunks):
            if thunk.HasField("async_done_thunk"):
                thunks.append(self._done(thunk, thunks, started))
                continue
            thunks.append(self._thunk(thunk, [t for t in thunks if t.waits_for is None]))
            if thunk.HasField("async_start_thunk") and started.setdefault(thunk.async_start_thunk.async_execution_id, place) != place:
                raise NotUnderstood(f"asynchronous region {thunk.async_start_thunk.async_execution_id} is started twice")
        if started:
            raise NotUnderstood(f"asynchronous regions {sorted(started)} do not end in the sequence that starts them")
        return Sequence(thunks=thunks, message=root)

    def _thunk(self, thunk: message.Message, earlier: list[Thunk]) -> Thunk:
        kind = thunk.WhichOneof("impl")
        if kind not in _ACCESSES and kind not in _SPECIAL:
            raise NotUnderstood(f"unknown thunk {kind} of {thunk.thunk_info.profile_annotation!r}")
        if thunk.thunk_info.HasField("concurrent_region_id"):
            raise NotUnderstood(f"{kind} {thunk.thunk_info.profile_annotation!r} may run beside others that its buffers do not tell")
        content = getattr(thunk, kind)
        name = self._name(thunk)
        nested = tuple(self.sequence(s) for s in _nested(kind, content))
        if kind == "async_start_thunk":
            _keep_order(nested[0])
        found = Thunk(
            kind=kind,
            name=name,
            message=thunk,
            accesses=_read_accesses(kind, name, content),
            control=_CONTROL.get(kind, Control.LEAF),
            nested=nested,
            has_trip_count=kind == "while_thunk" and content.HasField("trip_count"),
            ordered=self._ordered(kind, name).union(*(t.ordered for s in nested for t in s.thunks)) - {_REGION},
        )
        self._restore_reads(found, [t for t in earlier if t.name == name])
        return found

    def _name(self, thunk: message.Message) -> str:
        """The HLO instruction of a thunk: its annotation, which may have a path in front."""
        annotation = thunk.thunk_info.profile_annotation
        return annotation if annotation in self._names else annotation.rpartition("/")[2]

    def _ordered(self, kind: str, name: str) -> frozenset[str]:
        if kind == "rng_seed_thunk" or (kind == "custom_call_thunk" and self._effects.get(name, True)):
            return frozenset({"effect"})
        return frozenset({"collective"} if kind in _COLLECTIVES else ())

    def _restore_reads(self, thunk: Thunk, earlier: list[Thunk]) -> None:
        """A write into the slot of an operand, or onto what an earlier thunk of the same instruction wrote, reads what is there."""
        written = [access for access in thunk.accesses if access.mode is Mode.WRITE and access.size]
        if not written:
            return
        operands = self._slots.of(thunk.name)
        before = [access for t in earlier for access in t.accesses if access.mode.writes]
        for access in written:
            if any(slot.overlaps(access) for slot in operands) or any(access.overlaps(other) for other in before):
                access.mode = Mode.UPDATE

    def _done(self, thunk: message.Message, thunks: list[Thunk], started: dict[int, int]) -> Thunk:
        number = thunk.async_done_thunk.async_execution_id
        if number not in started:
            raise NotUnderstood(f"asynchronous region {number} ends in a sequence that does not start it")
        place = started.pop(number)
        accesses = tuple(
            dataclasses.replace(access, mode=Mode.UPDATE if access.mode.writes else Mode.READ)
            for access in _accesses_below(thunks[place])
        )
        return Thunk(kind="async_done_thunk", name=self._name(thunk), message=thunk, accesses=accesses, waits_for=place)


_REGION = "region"


def _keep_order(sequence: Sequence) -> None:
    """The thunk that waits for a region lists its accesses in the region's order."""
    for thunk in sequence.thunks:
        thunk.ordered |= {_REGION}
        for nested in thunk.nested:
            _keep_order(nested)


def _accesses_below(thunk: Thunk) -> Iterator[Access]:
    yield from thunk.accesses
    for sequence in thunk.nested:
        for nested in sequence.thunks:
            yield from _accesses_below(nested)


def _nested(kind: str, content: message.Message) -> list[message.Message]:
    match kind:
        case "while_thunk":
            return [content.condition_thunk_sequence, content.body_thunk_sequence]
        case "conditional_thunk":
            return list(content.branch_thunks)
        case "sequential_thunk":
            return [content]
        case "async_start_thunk":
            return [content.thunks]
    return []


# --- accesses ---


def _read_accesses(kind: str, name: str, content: message.Message) -> tuple[Access, ...]:
    try:
        entries = _SPECIAL[kind](content) if kind in _SPECIAL else _listed(kind, content)
    except NotUnderstood as error:
        raise NotUnderstood(f"{kind} {name!r}: {error}") from None
    if kind == "dynamic_slice_fusion_thunk":
        _check_updates(name, content)
    accesses = tuple(
        Access(mode=mode, allocation=s.buffer_allocation_index, offset=s.offset, size=s.size, slice=s) for s, mode in entries
    )
    num_slices = sum(1 for _ in find_slices(content, THUNK_SEQUENCES))
    if num_slices != len(accesses):
        raise NotUnderstood(f"{kind} {name!r} names {num_slices} slices, of which {len(accesses)} are understood")
    return accesses


_Entries = list[tuple[message.Message, Mode]]  # slices, and what is done with them


def _listed(kind: str, content: message.Message) -> _Entries:
    return [(s, mode) for path, mode in _ACCESSES[kind] for s in follow(content, path)]


def _flagged(slices: list[message.Message], written) -> _Entries:
    if len(slices) != len(written):
        raise NotUnderstood(f"{len(slices)} buffers have {len(written)} flags that tell which are written")
    return [(s, _W if flag else _R) for s, flag in zip(slices, written)]


def _gemm(content: message.Message) -> _Entries:
    entries = [(content.lhs_buffer, _R), (content.rhs_buffer, _R)]
    entries.append((content.output_buffer, _U if _has_beta(content) else _W))
    return entries + [(s, _W) for s in follow(content, "workspace")]


def _cublas_lt(content: message.Message) -> _Entries:
    """d = a b + beta c, with what is added and scaled on the way; without beta, c only names d once more."""
    if not content.HasField("gemm_config"):
        raise NotUnderstood("a grouped product")
    beta = _has_beta(content)
    c, d = content.c.slice, content.d.slice
    if not beta and (c.buffer_allocation_index, c.offset, c.size) != (d.buffer_allocation_index, d.offset, d.size):
        raise NotUnderstood("an addend that is multiplied by zero, and is not the result")
    entries = [(content.a.slice, _R), (content.b.slice, _R), (c, _R if beta else _W), (d, _W)]
    read, written = ("bias", "a_scale", "b_scale", "c_scale", "d_scale"), ("aux", "d_amax", "workspace")
    for names, mode in ((read, _R), (written, _W)):
        entries += [(s, mode) for name in names for s in follow(content, f"{name}.slice")]
    return entries


def _has_beta(content: message.Message) -> bool:
    return bool(content.gemm_config.beta)


def _select_k(content: message.Message) -> _Entries:
    if len(content.args) != 3:
        raise NotUnderstood(f"{len(content.args)} buffers, expected values, the largest, and their places")
    return list(zip(content.args, (_R, _W, _W)))


_SPECIAL = {
    "kernel_thunk": lambda content: _flagged(list(content.args), content.written),
    "custom_kernel_thunk": lambda content: _flagged(follow(content, "args.slice"), content.written),
    "cudnn_thunk": lambda content: _flagged(follow(content, "args.slice"), content.output_args),
    "gemm_thunk": _gemm,
    "cublas_lt_matmul_thunk": _cublas_lt,
    "select_k_thunk": _select_k,
}
"""Kind -> its slices and what it does with them, where that depends on more than the field."""


def _check_updates(name: str, content: message.Message) -> None:
    """A result that is written in part lies in the parameter that it updates: what it leaves alone has been read there."""
    parameters = {(s.buffer_allocation_index, s.offset, s.size) for s in content.parameter_buffers}
    for result in content.results:
        if result.HasField("parameter_number") or result.HasField("update_config") or result.update_offsets:
            s = content.result_buffers[result.result_number]
            if (s.buffer_allocation_index, s.offset, s.size) not in parameters:
                raise NotUnderstood(f"dynamic_slice_fusion_thunk {name!r} updates a part of a buffer that is none of its parameters")


BACKEND = Backend(read=read, write=write, reorder=reorder_thunks, release_collectives=lambda executable: None, thunk_sequences=THUNK_SEQUENCES)
