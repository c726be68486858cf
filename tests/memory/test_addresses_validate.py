"""The validator names every rule that a problem or a plan breaks."""

import dataclasses

import pytest

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, Buffer, LiveBuffer, Operator, Problem, Status
from graphacc.passes.memory.validate import check_address_plan, check_addresses, check_order, check_problem

A = LiveBuffer(name="a", lower=0, upper=4, size=8)
B = LiveBuffer(name="b", lower=2, upper=6, size=4)
C = LiveBuffer(name="c", lower=4, upper=8, size=8)
GOOD = AddressProblem(buffers=(A, B, C), alignment=4, capacity=12)


def test_a_solution_has_a_height():
    assert check_addresses(GOOD, (0, 8, 0)) == 12


@pytest.mark.parametrize(
    "offsets, rule",
    [
        ((0, 8), "count: 2 offsets for 3 buffers"),
        ((0, -4, 0), "negative: buffer 'b' is at -4"),
        ((0, 9, 0), "alignment: buffer 'b' is at 9"),
        ((0, 12, 0), "capacity: buffer 'b' ends at 16, the capacity is 12"),
        ((0, 4, 0), r"overlap: 'b' at \[4, 8\) and 'a' at \[0, 8\) both live at time 2"),
        ((4, 0, 0), r"overlap: 'c' at \[0, 8\) and 'b' at \[0, 4\) both live at time 4"),
    ],
)
def test_a_broken_solution_is_caught(offsets, rule):
    with pytest.raises(PlanError, match=rule):
        check_addresses(GOOD, offsets)


def test_every_overlap_is_caught_wherever_it_hides():
    """A buffer that overlaps one far below its neighbour in the order of starts."""
    buffers = (
        LiveBuffer(name="tall", lower=0, upper=9, size=100),
        LiveBuffer(name="above", lower=1, upper=9, size=10),
        LiveBuffer(name="inside", lower=2, upper=9, size=1),
    )
    with pytest.raises(PlanError, match="overlap: 'inside'.*'tall'"):
        check_addresses(AddressProblem(buffers=buffers), (0, 100, 50))


def test_a_moved_fixed_buffer_is_caught():
    fixed = dataclasses.replace(GOOD, buffers=(dataclasses.replace(A, offset=4), B, C))
    with pytest.raises(PlanError, match="fixed: buffer 'a' is at 0, must be at 4"):
        check_addresses(fixed, (0, 8, 0))


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"size": 0}, "size: buffer 'a' has 0 bytes"),
        ({"size": -1}, "size: buffer 'a' has -1 bytes"),
        ({"upper": 0}, r"live range: buffer 'a' lives in \[0, 0\)"),
        ({"name": "b"}, "repeated id: buffer 'b' occurs twice"),
        ({"size": 1 << 63}, "overflow: buffer 'a'"),
        ({"size": 1 << 62}, "overflow: all sizes add up to"),
        ({"offset": 3}, "fixed: buffer 'a' is fixed at 3, not a multiple of the alignment 4"),
        ({"offset": -4}, "fixed: buffer 'a' is fixed at -4"),
    ],
)
def test_a_malformed_buffer_is_caught(change, rule):
    with pytest.raises(PlanError, match=rule):
        check_problem(dataclasses.replace(GOOD, buffers=(dataclasses.replace(A, **change), B)))


def test_fixed_buffers_that_overlap_are_caught():
    with pytest.raises(PlanError, match="overlap: 'b'.*'a'"):
        check_problem(AddressProblem(buffers=(dataclasses.replace(A, offset=0), dataclasses.replace(B, offset=4))))


@pytest.mark.parametrize("field, value", [("alignment", 0), ("capacity", -1)])
def test_a_malformed_problem_is_caught(field, value):
    with pytest.raises(PlanError, match=f"{field}: {value} bytes"):
        check_problem(dataclasses.replace(GOOD, **{field: value}))


def plan(**changes) -> AddressPlan:
    values = {"status": Status.OPTIMAL, "offsets": (0, 8, 0), "height": 12, "lower_bound": 12, "bound_source": "", "seconds": 0.0}
    return AddressPlan(**values | changes)


def test_figures_of_a_plan_must_agree():
    check_address_plan(GOOD, plan())
    with pytest.raises(PlanError, match="height: the plan says 11 bytes, its offsets need 12"):
        check_address_plan(GOOD, plan(height=11))
    with pytest.raises(PlanError, match="lower bound: 13 bytes is above"):
        check_address_plan(GOOD, plan(lower_bound=13))


def chain(**fields) -> Problem:
    """make writes x; use reads x and writes y; update overwrites x."""
    return Problem(
        operators=(
            Operator(name="make", reads=(), writes=(0,), workspace=5),
            Operator(name="use", reads=(0,), writes=(1,)),
            Operator(name="update", reads=(), writes=(0,)),
            Operator(name="other", reads=(), writes=(2,), after=(0,)),
        ),
        buffers=(Buffer(name="x", size=10), Buffer(name="y", size=3, is_output=True), Buffer(name="z", size=2)),
        **fields,
    )


def test_a_peak_counts_live_buffers_and_workspace():
    """make: x + 5 = 15. use: x + y = 13. update: x + y. other: y + z."""
    assert check_order(chain(), (0, 1, 2, 3)) == 15
    assert check_order(chain(), (0, 3, 1, 2)) == 15


def test_inputs_live_from_the_start():
    problem = chain()
    inputs = (*problem.buffers[:2], dataclasses.replace(problem.buffers[2], is_input=True))
    assert check_order(dataclasses.replace(problem, buffers=inputs), (0, 1, 2, 3)) == 17


@pytest.mark.parametrize(
    "order, rule",
    [
        ((0, 1, 2), "count: the order must name each of the 4 operators once"),
        ((0, 1, 2, 2), "count"),
        ((1, 0, 2, 3), "dependency: 'use' runs before 'make', but reads 'x'"),
        ((0, 2, 1, 3), "dependency: 'update' runs before 'use', but overwrites 'x', which the other reads"),
        ((3, 0, 1, 2), "dependency: 'other' runs before 'make', but has it in `after`"),
    ],
)
def test_a_broken_order_is_caught(order, rule):
    with pytest.raises(PlanError, match=rule):
        check_order(chain(), order)
