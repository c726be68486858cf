"""An executable of XLA:CPU that is quick to load: without the bodies of what has been compiled to machine code.

An executable holds its whole HLO module. Loading makes that three times over, and for every product by YNNPACK goes through all of its instructions until it meets
the one that the thunk names (``YnnFusionThunkFromProto``, jaxlib 0.10.2): with 1,208 products among 70,000 instructions most of what loading takes. Of a fusion that is
a kernel nothing is read but its name, shape and operands; here it becomes a custom call with these, and the computation that it called is left out. Thunks, buffers and schedule stay
as they are. The module as XLA made it is kept beside, compressed, for whoever asks for the program's text or cost (`whole_module`).
"""

import dataclasses
import os
import zlib
from typing import Any

from graphacc.runtime.replan import riegeli
from graphacc.runtime.replan.cpu import parse
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.schema import read_schema

MIN_BYTES = 1 << 20
"""Of an executable; a smaller one is loaded in less time than it takes to read the schema."""

MODULE_FIELD = 1917
"""Of the envelope, our own; XLA skips fields that it does not know."""

KERNEL = "graphacc.kernel"
"""Target of the custom calls in the place of kernels. Nothing runs them: the thunks do that."""

_COMPILED = frozenset({"kLoop", "kInput", "kOutput"})
"""Kinds of fusions that XLA:CPU compiles; it runs the others by libraries, which read their computations."""


def quick_to_load(serialized: bytes, library: os.PathLike) -> bytes:
    """The same executable, of ``LoadedExecutable.serialize()``, without the bodies of kernels; as it is where it has no products, or is small, or is not understood.

    Args:
        library: the shared library of XLA that wrote it, for its schema.
    """
    if len(serialized) < MIN_BYTES:
        return serialized
    try:
        envelope = open_envelope(serialized)
        if riegeli.is_record_file(envelope.executable):
            return serialized  # of XLA:CUDA
        result = parse(read_schema(library), envelope.executable)
    except NotUnderstood:
        return serialized
    module = result.hlo_module.hlo_module.SerializeToString(deterministic=True)
    if not leave_out_kernels(result):
        return serialized
    kept = dataclasses.replace(envelope, others=(*envelope.others, (MODULE_FIELD, zlib.compress(module, 1))))
    return kept.with_executable(result.SerializeToString(deterministic=True))


def whole_module(serialized: bytes) -> bytes | None:
    """The HloModuleProto that was compiled, compressed by zlib; None where the executable holds it itself."""
    return dict(open_envelope(serialized).others).get(MODULE_FIELD)


def leave_out_kernels(result: Any) -> bool:
    """Take the bodies of kernels out of a CompilationResultProto; False where nothing looks for products in it: then it stays as it is."""
    module = result.hlo_module.hlo_module
    products = {thunk.ynn_fusion_thunk.instruction_id for thunk in result.thunk_sequence.thunks if thunk.WhichOneof("impl") == "ynn_fusion_thunk"}
    if not products:
        return False
    called = {computation.id: {i.id: list(i.called_computation_ids) for i in computation.instructions} for computation in module.computations}
    kernels = {i.id for computation in module.computations for i in computation.instructions if i.opcode == "fusion" and i.fusion_kind in _COMPILED} - products
    owner = {instruction: computation for computation, instructions in called.items() for instruction in instructions}
    assignment = result.buffer_assignment
    places = [*(buffer.defined_at for buffer in assignment.logical_buffers), *(alias.location for alias in assignment.buffer_aliases)]
    kept: set[int] = set()
    waiting = [module.entry_computation_id, *(owner[place.instruction_id] for place in places)]  # reductions' functions have buffers
    while waiting:
        each = waiting.pop()
        if each not in kept:
            kept.add(each)
            waiting += [inner for instruction, inners in called[each].items() if instruction not in kernels for inner in inners]
    computations = [computation for computation in module.computations if computation.id in kept]
    for instruction in (i for computation in computations for i in computation.instructions if i.id in kernels):
        instruction.opcode, instruction.custom_call_target = "custom-call", KERNEL
        for field in ("called_computation_ids", "fusion_kind"):
            instruction.ClearField(field)
    del module.computations[:]
    module.computations.extend(computations)
    for key in module.schedule.sequences.keys() - kept:
        del module.schedule.sequences[key]
    return True
