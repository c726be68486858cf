"""Checks problems and plans, slowly and obviously, sharing no code with the solvers. Every failure names its rule."""

import bisect
from collections.abc import Sequence

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, LiveBuffer, Problem

MAX_BYTES = 1 << 62  # sums of sizes and of two offsets stay within int64


def check_problem(problem: AddressProblem) -> None:
    """Raise PlanError unless the problem is one that can be asked."""
    if problem.alignment < 1:
        raise PlanError(f"alignment: {problem.alignment} bytes, must be at least 1")
    if problem.capacity is not None and not 0 <= problem.capacity <= MAX_BYTES:
        raise PlanError(f"capacity: {problem.capacity} bytes, must be from 0 to {MAX_BYTES}")
    names = set()
    for buffer in problem.buffers:
        _check_buffer(buffer, problem.alignment)
        if buffer.name in names:
            raise PlanError(f"repeated id: buffer {buffer.name!r} occurs twice; ids must be unique")
        names.add(buffer.name)
    total = sum(-(-b.size // problem.alignment) * problem.alignment for b in problem.buffers)
    if total > MAX_BYTES:
        raise PlanError(f"overflow: all sizes add up to {total} bytes, at most {MAX_BYTES} are supported")
    fixed = [b for b in problem.buffers if b.offset is not None]
    _check_disjoint(fixed, [b.offset for b in fixed])


def check_addresses(problem: AddressProblem, offsets: Sequence[int]) -> int:
    """Check that offsets solve the problem.

    Args:
        offsets: bytes, one per buffer.

    Returns:
        The height of the arena in bytes.

    Raises:
        PlanError: with the rule that is broken first: count, fixed, negative, alignment, capacity, overlap.
    """
    if len(offsets) != len(problem.buffers):
        raise PlanError(f"count: {len(offsets)} offsets for {len(problem.buffers)} buffers")
    for buffer, offset in zip(problem.buffers, offsets, strict=True):
        if buffer.offset is not None and offset != buffer.offset:
            raise PlanError(f"fixed: buffer {buffer.name!r} is at {offset}, must be at {buffer.offset}")
        if offset < 0:
            raise PlanError(f"negative: buffer {buffer.name!r} is at {offset}")
        if offset % problem.alignment:
            raise PlanError(f"alignment: buffer {buffer.name!r} is at {offset}, not a multiple of {problem.alignment}")
        if problem.capacity is not None and offset + buffer.size > problem.capacity:
            end = offset + buffer.size
            raise PlanError(f"capacity: buffer {buffer.name!r} ends at {end}, the capacity is {problem.capacity}")
    _check_disjoint(problem.buffers, offsets)
    return max((offset + b.size for b, offset in zip(problem.buffers, offsets, strict=True)), default=0)


def check_address_plan(problem: AddressProblem, plan: AddressPlan) -> None:
    """Raise PlanError unless the plan's offsets and figures agree with the problem and with each other."""
    if not plan.offsets and problem.buffers:
        return
    height = check_addresses(problem, plan.offsets)
    if height != plan.height:
        raise PlanError(f"height: the plan says {plan.height} bytes, its offsets need {height}")
    if plan.lower_bound > height:
        raise PlanError(f"lower bound: {plan.lower_bound} bytes is above the height of a solution, {height}")


def check_order(problem: Problem, order: Sequence[int]) -> int:
    """Check that an order is one of the problem's operators that keeps the dependencies of the program order.

    A reader stays between the same writers of what it reads, and the writers of a buffer keep their sequence.

    Returns:
        The peak of live bytes: inputs live from the start, outputs to the end, others from their first writer to their last
        use; an operator's workspace lives while it runs.

    Raises:
        PlanError: with the rule that is broken first: count, dependency.
    """
    if sorted(order) != list(range(len(problem.operators))):
        raise PlanError(f"count: the order must name each of the {len(problem.operators)} operators once")
    position = {operator: place for place, operator in enumerate(order)}
    for before, after, why in _dependencies(problem):
        if position[before] > position[after]:
            first, second = problem.operators[before].name, problem.operators[after].name
            raise PlanError(f"dependency: {second!r} runs before {first!r}, but {why}")
    return _peak(problem, order)


def _check_buffer(buffer: LiveBuffer, alignment: int) -> None:
    if buffer.size <= 0:
        raise PlanError(f"size: buffer {buffer.name!r} has {buffer.size} bytes, must be positive")
    if buffer.upper <= buffer.lower:
        raise PlanError(f"live range: buffer {buffer.name!r} lives in [{buffer.lower}, {buffer.upper}), which is empty")
    if max(abs(buffer.lower), abs(buffer.upper), buffer.size, buffer.offset or 0) > MAX_BYTES:
        raise PlanError(f"overflow: buffer {buffer.name!r} has a value beyond {MAX_BYTES}")
    if buffer.offset is not None and (buffer.offset < 0 or buffer.offset % alignment):
        raise PlanError(f"fixed: buffer {buffer.name!r} is fixed at {buffer.offset}, not a multiple of the alignment {alignment}")


def _check_disjoint(buffers: Sequence[LiveBuffer], offsets: Sequence[int]) -> None:
    """No two buffers that live at the same time overlap.

    A sweep over time. The live buffers are kept in order of address; as they are disjoint, a new one need only be compared
    with the one below it and the one above it.
    """
    starts = [(b.lower, 1, i) for i, b in enumerate(buffers)]
    ends = [(b.upper, 0, i) for i, b in enumerate(buffers)]  # at the same time, ends come first: live ranges are half-open
    live: list[tuple[int, int]] = []  # (offset, buffer)
    for time, is_start, i in sorted(starts + ends):
        place = bisect.bisect_left(live, (offsets[i], i))
        if not is_start:
            del live[place]
            continue
        for offset, other in live[max(place - 1, 0) : place + 1]:
            if offset < offsets[i] + buffers[i].size and offsets[i] < offset + buffers[other].size:
                raise PlanError(
                    f"overlap: {_where(buffers[i], offsets[i])} and {_where(buffers[other], offset)} both live at time {time}"
                )
        live.insert(place, (offsets[i], i))


def _where(buffer: LiveBuffer, offset: int) -> str:
    return f"{buffer.name!r} at [{offset}, {offset + buffer.size})"


def _dependencies(problem: Problem) -> list[tuple[int, int, str]]:
    """(operator, operator that must run later, why), from the program order."""
    found = []
    for buffer, value in enumerate(problem.buffers):
        writer, readers = None, []
        for i, operator in enumerate(problem.operators):
            if buffer in operator.reads and writer is not None:
                found.append((writer, i, f"reads {value.name!r}, which the other writes"))
            if buffer in operator.writes:
                why = f"overwrites {value.name!r}, which the other reads"
                found.extend((reader, i, why) for reader in readers if reader != i)
                if writer is not None:
                    found.append((writer, i, f"writes {value.name!r} after the other"))
                writer, readers = i, []
            if buffer in operator.reads:
                readers.append(i)
    for i, operator in enumerate(problem.operators):
        found.extend((before, i, "has it in `after`") for before in operator.after)
    return found


def _peak(problem: Problem, order: Sequence[int]) -> int:
    uses: list[list[int]] = [[] for _ in problem.buffers]
    for place, i in enumerate(order):
        for buffer in (*problem.operators[i].reads, *problem.operators[i].writes):
            uses[buffer].append(place)
    live = [problem.operators[i].workspace for i in order]
    for buffer, places in zip(problem.buffers, uses, strict=True):
        first = 0 if buffer.is_input else min(places, default=0)
        last = len(order) - 1 if buffer.is_output else max(places, default=-1)
        for place in range(first, last + 1):
            live[place] += buffer.size
    return max(live, default=0)
