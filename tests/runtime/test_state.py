"""The state between programs: kept by kind and target, and moved to another layout where a program wants one."""

import dataclasses

import pytest
import torch
from step_graphs import an_input, sgd_step, split

from graphacc.graph import Kind
from graphacc.runtime import Program, TrainState, make_mesh, select_devices, to_device, to_torch
from graphacc.runtime.devices import stage_meshes
from graphacc.runtime.state import Slots
from graphacc.strategy import Strategy

WHOLE = []
ROWS = [split("fsdp", 4)]
ROWS_DP = [split("dp", 2), split("fsdp", 4)]
COLUMNS = [split("fsdp", 4, 1)]
INTERLEAVED = [split("dp", 2, 1, outer=3), split("fsdp", 4, 0)]
LAYOUTS = {"whole": WHOLE, "rows": ROWS, "rows of both axes": ROWS_DP, "columns": COLUMNS, "interleaved": INTERLEAVED}


@pytest.fixture
def mesh():
    return make_mesh(Strategy(dp=2, fsdp=4), select_devices(8))


@pytest.mark.parametrize("new", list(LAYOUTS.values()), ids=list(LAYOUTS))
@pytest.mark.parametrize("old", list(LAYOUTS.values()), ids=list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool], ids=str)
@pytest.mark.default_cases("torch.bool-whole-whole", "torch.bool-whole-rows", "torch.bool-whole-rows of both axes", "torch.bool-whole-columns", "torch.bool-whole-interleaved", "torch.bool-rows-whole", "torch.bool-rows-rows", "torch.bool-rows-rows of both axes", "torch.bool-rows-columns", "torch.bool-rows-interleaved", "torch.bool-rows of both axes-whole", "torch.bool-rows of both axes-rows", "torch.bool-rows of both axes-rows of both axes", "torch.bool-rows of both axes-columns", "torch.bool-rows of both axes-interleaved", "torch.bool-columns-whole", "torch.bool-columns-rows", "torch.bool-columns-rows of both axes", "torch.bool-columns-columns", "torch.bool-columns-interleaved", "torch.bool-interleaved-whole", "torch.bool-interleaved-rows", "torch.bool-interleaved-rows of both axes", "torch.bool-interleaved-columns", "torch.bool-interleaved-interleaved")
def test_a_value_is_given_in_the_layout_that_is_wanted(mesh, old, new, dtype):
    tensor = torch.randn(10, 6).to(dtype)
    state = TrainState(mesh)
    before, wanted = an_input(Kind.GRAD, "w", (10, 6), dtype, old), an_input(Kind.GRAD, "w", (10, 6), dtype, new)
    state.set(before, to_device(tensor, before, mesh))
    array = state.get(wanted)
    assert array.sharding == to_device(tensor, wanted, mesh).sharding
    assert torch.equal(to_torch(array, wanted), tensor)
    assert state.find(Kind.GRAD, "w") == (array, wanted)


def test_the_same_layout_is_the_same_array(mesh):
    item = an_input(Kind.PARAM, "w", (10, 6), shards=ROWS)
    array = to_device(torch.zeros(10, 6), item, mesh)
    state = TrainState(mesh)
    state.set(item, array)
    assert state.get(item) is array


def test_keys_and_bytes(mesh):
    state = TrainState(mesh)
    for kind, target, shards in ((Kind.PARAM, "w", ROWS), (Kind.STATE, "w/exp_avg", ROWS), (Kind.STATE, "w/step", WHOLE)):
        shape = () if target == "w/step" else (10, 6)
        item = an_input(kind, target, shape, shards=shards)
        state.set(item, to_device(torch.zeros(shape), item, mesh))
    assert state.holds(Kind.STATE, "w/step") and not state.holds(Kind.PARAM, "w/step")
    assert list(state.keys()) == [(Kind.PARAM, "w"), (Kind.STATE, "w/exp_avg"), (Kind.STATE, "w/step")]
    assert state.bytes_per_device(Kind.PARAM) == 3 * 6 * 4  # ten rows over four ranks: three each
    assert state.bytes_per_device() == 2 * 3 * 6 * 4 + 4
    state.discard(Kind.PARAM, "w")
    state.discard(Kind.PARAM, "w")
    assert not state.holds(Kind.PARAM, "w") and state.bytes_per_device(Kind.PARAM) == 0


def test_two_programs_share_one_state(mesh):
    """The state goes through a program on dp=2 x fsdp=4 and its bytes are those that the program counts."""
    program = Program.build(sgd_step(2, 4), mesh, cache_dir=None)
    state = TrainState(mesh)
    w, x = torch.randn(8, 12), torch.randn(16, 8) * 0.1
    state.set(program.inputs[0], to_device(w, program.inputs[0], mesh))
    batch = to_device(x, program.inputs[1], mesh)
    assert state.bytes_per_device() == program.memory.alias_bytes
    for _ in range(2):
        new, _ = program(state.get(program.inputs[0]), batch)
        state.set(program.outputs[0], new)
    once = w - 0.2 * x.t() @ (x @ w)
    torch.testing.assert_close(to_torch(*state.find(Kind.PARAM, "w")), once - 0.2 * x.t() @ (x @ once))


def test_a_value_that_another_stage_reads_is_copied_until_it_is_replaced():
    first, second = stage_meshes(Strategy(pp=2, fsdp=4), select_devices(8))
    state = TrainState(first)
    rows, columns = an_input(Kind.PARAM, "w", (10, 6), shards=ROWS), an_input(Kind.PARAM, "w", (10, 6), shards=COLUMNS)
    tensor = torch.randn(10, 6)
    state.set(rows, to_device(tensor, rows, first), first)
    whole = state.bytes_per_device()
    copy = state.get(rows, second)
    assert copy.sharding.device_set == set(second.devices.flat) and torch.equal(to_torch(copy, rows), tensor)
    assert state.get(rows, second) is copy, "copied once"
    assert torch.equal(to_torch(state.get(columns, second), columns), tensor), "in another layout"
    assert state.find(Kind.PARAM, "w")[0].sharding.device_set == set(first.devices.flat), "it stays where it lives"
    assert state.bytes_per_device() == whole, "the stage that holds most"
    state.set(rows, to_device(tensor + 1, rows, first), first)
    assert torch.equal(to_torch(state.get(rows, second), rows), tensor + 1), "an update reaches the other stage"
    state.set(rows, to_device(tensor + 2, rows, second), second)
    assert state.find(Kind.PARAM, "w")[0].sharding.device_set == set(second.devices.flat), "a value may move"
    assert torch.equal(to_torch(state.get(rows, first), rows), tensor + 2)
    state.discard(Kind.PARAM, "w")
    assert not state.holds(Kind.PARAM, "w") and state.bytes_per_device() == 0


NUMBERS = [f"{name}/step" for name in "abcd"]


@pytest.fixture
def counted(mesh):
    """A state with a count of steps of 3 for every one of four parameters, `program` that reads one and gives the next, and what the state holds."""
    state = TrainState(mesh)

    def number(target, aliases=()):
        return dataclasses.replace(an_input(Kind.STATE, target, ()), aliases=tuple(aliases))

    for target in NUMBERS:
        state.set(number(target), to_device(torch.tensor(3.0), number(target), mesh))
        state.note_number(target, 3.0)

    def step(*groups):
        slots = Slots(number(first, others) for first, *others in groups)
        arrays = state.get_all(slots)
        after = [to_device(to_torch(array, item) + 1, item, mesh) for array, item in zip(arrays, slots.items)]
        for array in arrays:
            array.delete()  # it was donated
        state.set_results(slots, after)

    return state, step, lambda: [to_torch(*state.find(Kind.STATE, target)).item() for target in NUMBERS]


def test_equal_numbers_are_one_array(counted):
    state, step, held = counted
    assert len(set(state.numbers().values())) == 1, "set to the same value"
    step(NUMBERS)
    assert held() == [4, 4, 4, 4] and len({id(state.find(Kind.STATE, target)[0]) for target in NUMBERS}) == 1
    assert sorted(target for _, target in state.keys()) == NUMBERS and state.bytes_per_device() == 4
    version = state.version
    step(NUMBERS)
    assert state.version == version and len(set(state.numbers().values())) == 1 and held() == [5] * 4


def test_numbers_part_where_a_program_reads_some(counted):
    state, step, held = counted
    step(NUMBERS)
    a, b, c, d = NUMBERS
    step([b, c])
    assert held() == [4, 5, 5, 4]
    labels = state.numbers()
    assert labels[a] == labels[d] != labels[b] == labels[c]
    step([c])
    assert held() == [4, 5, 6, 4]
    step([a, d], [b], [c])
    assert held() == [5, 6, 7, 5]


def test_a_number_that_is_set_or_forgotten_leaves_the_others(counted, mesh):
    state, step, held = counted
    step(NUMBERS)
    a, b, c, d = NUMBERS
    item = an_input(Kind.STATE, a, ())
    state.set(item, to_device(torch.tensor(9.0), item, mesh))
    assert held() == [9, 4, 4, 4] and state.numbers()[a] != state.numbers()[b] == state.numbers()[d]
    step([a], [b, c, d])
    state.discard(Kind.STATE, b, d)
    assert not state.holds(Kind.STATE, b) and not state.holds(Kind.STATE, d)
    assert to_torch(*state.find(Kind.STATE, c)).item() == 5 and to_torch(*state.find(Kind.STATE, a)).item() == 10
    state.discard(Kind.STATE, *NUMBERS)
    assert not list(state.keys()) and state.bytes_per_device() == 0
