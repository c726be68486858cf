"""Order problems and their plans as JSON files.

A problem is ``{"operators": [...], "buffers": [...]}`` with the fields of `Operator` and `Buffer`; those that have a default may
be left out. Buffers and operators are named by their index, as in `Problem`. A plan is an object with the order of the operators,
and the offset and the live range (places in the order, half-open) of every buffer.
"""

import dataclasses
import json
import pathlib

from graphacc.errors import PlanError
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.problem import Buffer, Operator, Plan, Problem


def read_order_problem(path: str | pathlib.Path) -> Problem:
    """Read a problem.

    Raises:
        PlanError: the file is no such JSON, a field is missing, unknown or of another type, or the problem is malformed.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(content, dict) or set(content) != {"operators", "buffers"}:
        raise PlanError(f'{path}: expected an object with the fields "operators" and "buffers"')
    problem = Problem(
        operators=tuple(_records(path, Operator, "operators", content["operators"])),
        buffers=tuple(_records(path, Buffer, "buffers", content["buffers"])),
    )
    _check(path, problem)
    return problem


def write_order_problem(path: str | pathlib.Path, problem: Problem) -> None:
    """Write what `read_order_problem` reads."""
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(problem)), encoding="utf-8")


def write_plan(path: str | pathlib.Path, problem: Problem, plan: Plan) -> None:
    """Write the solution of a problem."""
    content = dict(
        order=plan.order.order,
        offsets=plan.addresses.offsets[: len(problem.buffers)],
        live_ranges=plan.live_ranges,
        peak=plan.order.peak,
        height=plan.addresses.height,
        lower_bound=plan.order.lower_bound,
    )
    pathlib.Path(path).write_text(json.dumps(content), encoding="utf-8")


def _records(path: str | pathlib.Path, kind: type, name: str, rows: object) -> list:
    if not isinstance(rows, list):
        raise PlanError(f"{path}: {name} must be a list")
    return [_record(f"{path}: {name}[{i}]", kind, row) for i, row in enumerate(rows)]


def _record(where: str, kind: type, row: object):
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(row, dict) or not required <= set(row) <= set(fields):
        allowed = f"{', '.join(sorted(required))}, and at most {', '.join(sorted(fields))}"
        raise PlanError(f"{where}: expected an object with {allowed}")
    return kind(**{name: _value(f"{where}.{name}", fields[name].type, value) for name, value in row.items()})


def _value(where: str, kind: object, value: object):
    if kind == tuple[int, ...]:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise PlanError(f"{where} is {value!r}, expected a list of integers")
    if type(value) is not kind:
        raise PlanError(f"{where} is {value!r}, expected {kind.__name__}")
    return value


def _check(path: str | pathlib.Path, problem: Problem) -> None:
    """Raise PlanError unless the problem is one that can be asked."""
    if not problem.operators:
        raise PlanError(f"{path}: no operators")
    sizes = [(f"buffer {b.name!r}", b.size) for b in problem.buffers]
    sizes += [(f"the workspace of operator {o.name!r}", o.workspace) for o in problem.operators]
    for where, size in sizes:
        if size < 0:
            raise PlanError(f"{path}: {where} has {size} bytes, must be at least 0")
    try:
        compile_problem(problem)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
