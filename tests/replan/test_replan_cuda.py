"""Executables that XLA:CUDA compiles for an H100 are planned and proved here without one, and run where there is one."""

import functools
import os
import pathlib
import random
import re
import subprocess
import sys

import h100
import jax
import pytest
import torch
from greedy import SOLVERS
from rewrites import Rewrite

import graphacc
from graphacc._compat import jax_ as compat
from graphacc.runtime import Program
from graphacc.runtime import program as program_module
from graphacc.runtime.replan import gpu, riegeli
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.liveness import Liveness, members
from graphacc.runtime.replan.model import Control, Mode
from graphacc.runtime.replan.planner import find_backend, plan_bytes, understand
from graphacc.runtime.replan.precedence import find_predecessors
from graphacc.runtime.replan.schema import read_schema
from graphacc.runtime.replan.solvers import core_solvers

if compat.cuda_library() is None:
    pytest.skip("JAX's CUDA plugin is not installed", allow_module_level=True)

NAMES = ("training_step", "loops", "branches", "remat_gpt", "collectives")
EXECUTABLE = "xla.gpu.GpuExecutableProto"
NVDISASM = pathlib.Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/nvdisasm"


def schema():
    return read_schema(compat.cuda_library())


def read(name: str):
    return gpu.read(schema(), open_envelope(h100.serialized(name)).executable)


def plan(data: bytes, **options):
    return plan_bytes(data, library=compat.cuda_library(), **{"solvers": SOLVERS, "seconds": 0.5, **options})


# --- plans ---


def test_the_schema_comes_from_the_plugin():
    fields = schema().message_class(EXECUTABLE).DESCRIPTOR.fields_by_name
    assert {*gpu.PLANNED_FIELDS, "hlo_module_with_config"} <= set(fields.keys())


@pytest.mark.parametrize("name", NAMES)
def test_cuda_programs_are_planned_and_proved(name):
    """The plan that is proved is the one that the final bytes hold, in both tables of allocations."""
    data = h100.serialized(name)
    planned = plan(data)
    assert find_backend(open_envelope(data).executable) is gpu.BACKEND
    assert planned.lower_bound <= planned.temporary_after <= planned.temporary_before
    assert planned.serialized is not None and planned.temporary_after < planned.temporary_before
    again = gpu.read(schema(), open_envelope(planned.serialized).executable)
    assert again.temporary.size == planned.temporary_after
    assert again.message.buffer_allocations.values[again.temporary.index].size == planned.temporary_after
    assert all(access.offset % gpu.ALIGNMENT == 0 for access in again.accesses if again.is_temporary(access))


def test_a_rematerialised_gpt_gains():
    """XLA computes the head's gradient late, and holds the logits' gradient beside the blocks' activations."""
    planned = plan(h100.serialized("remat_gpt"), solvers=core_solvers(1), seconds=3.0)
    assert planned.temporary_after < 0.85 * planned.temporary_before
    assert planned.temporary_after <= 1.01 * planned.lower_bound


def test_an_mlp_is_at_its_bound():
    planned = plan(h100.serialized("mlp"), solvers=core_solvers(1), tolerance=0.01)
    assert planned.serialized is None
    assert 0.99 * planned.temporary_before < planned.lower_bound <= planned.temporary_before


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x), y)


@pytest.mark.parametrize("strategy", ["dp=1", "fsdp=8"])
def test_steps_that_graphacc_compiles_are_planned(strategy):
    """The graph of a step that ran on CPU, lowered for H100s in their place."""
    model = graphacc.compile(Classifier(), strategy=strategy, devices=8 if strategy == "fsdp=8" else 1, cache_dir=None, memory_plan="xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(128, 64), torch.randint(64, (128,))).backward()
    optimizer.step()
    (compiled,) = model.programs
    program = Program.build(compiled.graph, h100.like(compiled.program.mesh), cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
    planned = plan(compat.serialize(program._compiled))
    assert planned.lower_bound <= planned.temporary_after <= planned.temporary_before
    assert planned.num_values > 3
    kinds = {t.kind for t in gpu.read(schema(), open_envelope(compat.serialize(program._compiled)).executable).thunks}
    assert ("all_gather_thunk" in kinds) == (strategy == "fsdp=8")


def test_cuda_programs_of_several_devices_are_planned_where_that_is_asked_for(monkeypatch, caplog):
    monkeypatch.delenv("GRAPHACC_PLAN_CUDA", raising=False)
    program_module._log_once.cache_clear()
    assert program_module._can_plan(h100.like(jax.make_mesh((1,), ("dp",))))
    mesh = h100.like(jax.make_mesh((8,), ("dp",)))
    with caplog.at_level("INFO", logger="graphacc"):
        assert not program_module._can_plan(mesh)
    assert "GRAPHACC_PLAN_CUDA=1 asks for them" in caplog.text
    monkeypatch.setenv("GRAPHACC_PLAN_CUDA", "1")
    assert program_module._can_plan(mesh)
    assert program_module._schedules({}, mesh) == ("",)


def test_plans_are_the_same_every_time():
    first, second = (plan(h100.serialized("branches"), seconds=60.0) for _ in range(2))
    assert first.serialized == second.serialized


# --- what a CUDA executable does ---


def test_the_kinds_of_thunks_are_what_these_tests_are_for():
    kinds = {name: {t.kind for t in read(name).thunks} for name in NAMES}
    assert {"while_thunk", "dynamic_slice_fusion_thunk"} <= kinds["remat_gpt"]
    assert kinds["remat_gpt"] & {"gemm_thunk", "cublas_lt_matmul_thunk"}
    assert "conditional_thunk" in kinds["branches"] and "while_thunk" in kinds["loops"]
    assert {"async_start_thunk", "async_done_thunk", "all_gather_thunk", "reduce_scatter_thunk"} <= kinds["collectives"]


@pytest.mark.parametrize("name", ["training_step", "remat_gpt", "loops"])
def test_in_place_updates_are_found_through_the_operands(name, monkeypatch):
    """A kernel that updates an operand in place lists it once, as written."""

    def hidden(executable):
        return [t for t in executable.thunks for a in t.accesses if a.mode is Mode.UPDATE and t.kind == "custom_kernel_thunk"]

    assert hidden(read(name))
    monkeypatch.setattr("graphacc.runtime.replan.hlo_slots.OperandSlots.of", lambda self, instruction: frozenset())
    assert len(hidden(read(name))) == 0


def test_without_the_hidden_reads_nothing_is_planned(monkeypatch):
    monkeypatch.setattr("graphacc.runtime.replan.hlo_slots.OperandSlots.of", lambda self, instruction: frozenset())
    with pytest.raises(NotUnderstood):
        plan(h100.serialized("remat_gpt"))


def test_what_a_region_touches_stays_until_it_is_done():
    executable = read("collectives")
    values, _, liveness = understand(executable)
    regions = [(sequence.thunks[t.waits_for], t) for sequence in executable.sequences for t in sequence.thunks if t.waits_for is not None]
    num_held = 0
    for start, done in regions:
        assert start.control is Control.CALL and start.kind == "async_start_thunk"
        touched = [a for t in executable.family(start) for a in t.accesses]
        assert [places(a) for a in touched] == [places(a) for a in done.accesses]
        held = {values.of_access[a.index].index for a in touched if a.index in values.of_access}
        steps = liveness.occupied[liveness.timeline.end[start.index] : liveness.timeline.begin[done.index] + 1]
        assert all(occupied >> value & 1 for occupied in steps for value in held)
        num_held += len(held)
    assert num_held


def places(access) -> tuple:
    return access.allocation, access.offset, access.end, access.mode.writes


def test_what_runs_beside_a_region_stays_beside_it():
    executable = read("collectives")
    values, _, _ = understand(executable)
    predecessors = find_predecessors(executable.root, values)
    num_beside = 0
    for place, thunk in enumerate(executable.root.thunks):
        for between in range(place if thunk.waits_for is None else thunk.waits_for + 1, place):
            assert thunk.waits_for in predecessors[between] and between in predecessors[place]
            num_beside += 1
    assert num_beside


def kernels_of(name: str, folder: pathlib.Path) -> list[str]:
    """A program's kernels as PTX, where XLA dumps it, or as the machine code that jaxlib 0.11 keeps in the thunks."""
    build, options = h100.PROGRAMS[name]
    h100.compile(*build(), options | {"xla_dump_to": str(folder)})
    kernels = [kernel for path in folder.glob("*.ptx") for kernel in path.read_text().split(".visible .entry")[1:]]
    if kernels:
        return kernels
    *_, main = riegeli.read_records(open_envelope(h100.serialized(name)).executable)
    thunks = schema().message_class(EXECUTABLE).FromString(main).thunks
    for thunk in thunks:
        cubin = thunk.custom_kernel_thunk.custom_kernel.kernel_spec.cubin.data
        if cubin:
            path = folder / "kernel.cubin"
            path.write_bytes(cubin)
            kernels.append(subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout)
    return kernels


def test_kernels_wait_for_their_predecessors_first(tmp_path):
    """They are launched early (`use_pdl`). A kernel that touched memory before it waits would depend on XLA's order."""
    kernels = kernels_of("branches", tmp_path)
    assert kernels
    for kernel in kernels:
        memory = re.search(r"\b(ld|st|red|atom)\S*\.global|cp\.async|prefetch|\b(LDG|STG|RED|ATOM|LDGSTS|UBLK|CCTL)", kernel)
        wait = re.search(r"griddepcontrol\.wait|\bACQBULK\b", kernel)
        assert memory is None or (wait and wait.start() < memory.start())
        assert not re.search(r"griddepcontrol\.launch_dependents|\bPREEXIT\b", kernel)


# --- a rewrite that is wrong in one place is always caught ---


@functools.cache
def right_rewrite(name: str) -> Rewrite:
    found = Rewrite(h100.serialized(name), compat.cuda_library())
    found.check(found.reread())
    return found


@pytest.fixture(params=NAMES)
def planned(request) -> Rewrite:
    return right_rewrite(request.param)


def move(planned: Rewrite, moved, offset: int):
    """The planned program with one value at another offset of a larger arena."""
    broken, names = planned.reread(), planned.names()
    slices = {id(a.slice): a for a in broken.accesses}.values()  # a region's accesses share them with those that wait
    owners = {id(a.slice): (t, i) for t in reversed(broken.thunks) for i, a in enumerate(t.accesses)}
    for access in slices:
        thunk, place = owners[id(access.slice)]
        was = planned.values.executable.thunks[names[thunk.index]].accesses[place]
        if planned.values.of_access.get(was.index) is moved:
            access.slice.offset += offset - planned.offsets[moved.index]
    broken.temporary.message.size = max(broken.temporary.size, offset + moved.size)
    return broken


def test_two_live_values_in_one_place_are_caught(planned):
    occupied = set(Liveness(planned.values, planned.orders).occupied)
    shared = [value for value in planned.values.all if len(value.thunks) > 1]
    pairs = {(a, b) for a in shared for b in shared if a is not b and any(o >> a.index & o >> b.index & 1 for o in occupied)}
    assert pairs
    for moved, onto in random.Random(1).sample(sorted(pairs, key=lambda pair: (pair[0].index, pair[1].index)), min(8, len(pairs))):
        with pytest.raises(VerificationError):
            planned.check(move(planned, moved, planned.offsets[onto.index]))


def test_an_illegal_update_in_place_is_caught():
    """A result put where an operand of its thunk dies: the bytes flow as before, but the kernel was not compiled for it."""
    planned = right_rewrite("remat_gpt")
    values, liveness = planned.values, Liveness(planned.values, planned.orders)
    num_moved = 0
    for thunk in (t for t in values.executable.thunks if t.control is Control.LEAF):
        results = [values.of_access[a.index] for a in thunk.accesses if a.mode is Mode.WRITE and a.index in values.of_access]
        operands = [values.of_access[a.index] for a in thunk.accesses if a.mode is Mode.READ and a.index in values.of_access]
        for moved, onto in ((a, b) for a in results for b in operands if a is not b):
            if meets_only(planned, liveness, moved, onto, liveness.timeline.middle[thunk.index]):
                with pytest.raises(VerificationError, match="its buffers overlap otherwise"):
                    planned.check(move(planned, moved, planned.offsets[onto.index]))
                num_moved += 1
                if num_moved == 6:
                    return
    raise AssertionError(f"only {num_moved} thunks could be made to update in place")


def meets_only(planned: Rewrite, liveness: Liveness, moved, onto, step: int) -> bool:
    """Whether `moved`, put where `onto` lies, shares bytes with no value that is live with it, but with `onto` at one step."""
    start = planned.offsets[onto.index]
    for time, occupied in enumerate(liveness.occupied):
        for value in members(occupied, planned.values) if occupied >> moved.index & 1 else ():
            offset = planned.offsets[value.index]
            shares = value is not moved and offset < start + moved.size and start < offset + value.size
            if shares and not (value is onto and time == step):
                return False
    return True


def test_a_dropped_dependency_is_caught(planned):
    """Two neighbours, the second of which must follow the first, change places, and the order says so."""
    pairs = []
    for sequence in planned.original.sequences:
        predecessors = find_predecessors(planned.values.executable.sequences[sequence.index], planned.values)
        order = planned.orders.get(sequence.index, tuple(range(len(sequence.thunks))))
        pairs += [(sequence, order, i) for i in range(len(order) - 1) if order[i] in predecessors[order[i + 1]]]
    beside = [p for p in pairs if is_performance_only(p)]
    pairs = [p for p in pairs if p not in beside]
    assert pairs
    for sequence, order, i in random.Random(3).sample(pairs, min(10, len(pairs))):
        swapped = (*order[:i], order[i + 1], order[i], *order[i + 2 :])
        with pytest.raises((VerificationError, NotUnderstood)):
            planned.check(swap(planned, sequence, i), {**planned.orders, sequence.index: swapped})


def is_performance_only(pair) -> bool:
    """What runs beside a region and does not depend on it may leave it: that is slower, not wrong."""
    sequence, order, i = pair
    first, second = sequence.thunks[order[i]], sequence.thunks[order[i + 1]]
    if second.waits_for is not None:
        return order[i] != second.waits_for
    return first.kind == "async_start_thunk"


def swap(planned: Rewrite, old, place: int):
    """The planned program with two neighbours of a sequence of the original swapped."""
    broken, names = planned.reread(), planned.names()
    members = {t.index for t in old.thunks}
    sequence = next(s for s in broken.sequences if {names[t.index] for t in s.thunks} == members)
    order = list(range(len(sequence.thunks)))
    order[place], order[place + 1] = order[place + 1], order[place]
    gpu.BACKEND.reorder(sequence, tuple(order))
    return broken


def test_work_that_enters_a_region_it_depends_on_is_caught():
    """Whoever waits for a region gets its results only behind it, and may overwrite its operands only there."""
    planned = right_rewrite("collectives")
    values = planned.values
    sequence = planned.original.root
    order = list(planned.orders.get(0, range(len(sequence.thunks))))
    predecessors = find_predecessors(values.executable.root, values)
    num_moved = 0
    for done in (p for p, t in enumerate(sequence.thunks) if t.waits_for is not None):
        at = order.index(done)
        for behind in range(at + 1, len(order)):
            if done in predecessors[order[behind]] and not (predecessors[order[behind]] & set(order[at + 1 : behind])):
                moved = [*order[:at], order[behind], *order[at:behind], *order[behind + 1 :]]
                broken = planned.reread()
                gpu.BACKEND.reorder(broken.root, tuple(order.index(place) for place in moved))
                with pytest.raises(VerificationError):
                    planned.check(broken, {**planned.orders, 0: tuple(moved)})
                num_moved += 1
    assert num_moved


def test_other_changes_are_caught(planned):
    broken = planned.reread()
    broken.message.module_name += "x"
    with pytest.raises(VerificationError, match="module_name"):
        planned.check(broken)
    broken = planned.reread()
    kernel = next(t for t in broken.thunks if t.kind == "custom_kernel_thunk")
    kernel.message.custom_kernel_thunk.custom_kernel.shared_memory_bytes += 1
    with pytest.raises(VerificationError, match="changed more of it than its offsets"):
        planned.check(broken)
    broken = planned.reread()
    broken.parts = (*broken.parts[:-1], broken.parts[-1] + b"\x62\x00")  # one more constant
    with pytest.raises(VerificationError, match="beside its message"):
        planned.check(broken)
    broken = planned.reread()
    for access in broken.accesses:
        if broken.is_temporary(access):
            access.slice.offset += 128 if access.slice.offset % gpu.ALIGNMENT == 0 else 0
    broken.temporary.message.size += 128
    with pytest.raises(VerificationError, match="moved by"):
        planned.check(broken)


# --- damaged and unknown input ---


def test_damaged_bytes_are_refused():
    envelope = open_envelope(h100.serialized("branches"))
    rng = random.Random(0)
    for _ in range(50):
        damaged = bytearray(envelope.executable)
        damaged[rng.randrange(64, len(damaged))] ^= 1 << rng.randrange(8)
        with pytest.raises(NotUnderstood, match="Riegeli"):
            plan(envelope.with_executable(bytes(damaged)))
    for length in [0, 10, 64, *rng.sample(range(len(envelope.executable)), 20)]:
        with pytest.raises(NotUnderstood):
            plan(envelope.with_executable(envelope.executable[:length]))


def change(name: str, edit) -> bytes:
    """A program's bytes after an edit of its message."""
    envelope = open_envelope(h100.serialized(name))
    *parts, main = riegeli.read_records(envelope.executable)
    message = schema().message_class(EXECUTABLE).FromString(main)
    edit(message)
    return envelope.with_executable(riegeli.write_records([*parts, message.SerializeToString(deterministic=True)]))


def unknown_thunk(message):
    message.thunks[0].ClearField(message.thunks[0].WhichOneof("impl"))


def unsupported_thunk(message):
    message.thunks[0].norm_thunk.SetInParent()


def unknown_field(message):
    message.thunks[0].MergeFromString(b"\xc2\x3e\x01z")


def concurrent_region(message):
    message.thunks[0].thunk_info.concurrent_region_id = 1


def other_colour(message):
    for table in (message.buffer_assignment.buffer_allocations, message.buffer_allocations.values):
        table[0].color = 1


def two_arenas(message):
    for table in (message.buffer_assignment.buffer_allocations, message.buffer_allocations.values):
        for allocation in table:
            allocation.is_entry_computation_parameter = allocation.is_constant = allocation.maybe_live_out = False


def tables_differ(message):
    message.buffer_allocations.values[0].size += 256


def out_of_bounds(message):
    first_kernel(message).args[0].slice.offset = 1 << 40


def other_flags(message):
    first_kernel(message).written.append(True)


def other_names(message):
    for thunk in message.thunks:
        thunk.thunk_info.profile_annotation = "other"


def no_thunks(message):
    del message.thunks[:]


def first_kernel(message):
    return next(t for t in message.thunks if t.HasField("custom_kernel_thunk")).custom_kernel_thunk


def no_end(message):
    places = [i for i, t in enumerate(message.thunks) if t.HasField("async_done_thunk")]
    del message.thunks[places[0]]


def no_start(message):
    places = [i for i, t in enumerate(message.thunks) if t.HasField("async_start_thunk")]
    del message.thunks[places[0]]


def started_twice(message):
    place = next(i for i, t in enumerate(message.thunks) if t.HasField("async_start_thunk"))
    message.thunks.insert(place, message.thunks[place])


@pytest.mark.parametrize(
    "edit, says",
    [
        (unknown_thunk, "unknown thunk None"),
        (unsupported_thunk, "unknown thunk norm_thunk"),
        (unknown_field, "fields that its schema does not know"),
        (concurrent_region, "may run beside others"),
        (other_colour, "memory of colour 1"),
        (two_arenas, "arenas of temporaries"),
        (tables_differ, "two tables of allocations differ"),
        (out_of_bounds, "bytes \\[1099511627776"),
        (other_flags, "flags"),
        (other_names, "no instruction 'other'"),
        (no_thunks, "not a sequence of thunks"),
        (no_end, "do not end in the sequence"),
        (no_start, "ends in a sequence that does not start it"),
        (started_twice, "started twice"),
    ],
)
def test_what_is_not_understood_is_named(edit, says):
    with pytest.raises(NotUnderstood, match=says):
        plan(change("collectives", edit))


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not compat.accelerator_present(), reason="no GPU")
def test_planned_programs_give_the_same_bits_on_a_gpu():
    job = pathlib.Path(__file__).parent / "cuda_job.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, str(job)], env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
