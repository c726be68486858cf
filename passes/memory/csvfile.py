"""Address problems and solutions as CSV files in MiniMalloc's format: `id,lower,upper,size`, and `offset` in solutions.

Live ranges are half-open. An `offset` column in a problem fixes the buffers where it is not empty.
"""

import csv
import pathlib
from collections.abc import Sequence

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer
from graphacc.passes.memory.validate import check_problem

COLUMNS = ("id", "lower", "upper", "size")


def read_problem(path: str | pathlib.Path, *, capacity: int | None = None, alignment: int = 1) -> AddressProblem:
    """Read a problem.

    Raises:
        PlanError: the file has not the columns, a value is no integer, or the problem is malformed.
        OSError: the file cannot be read.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    rows = list(csv.reader(text.splitlines()))
    if not rows:
        raise PlanError(f"{path}: the file is empty; expected a header line with the columns {', '.join(COLUMNS)}")
    header = [name.strip() for name in rows[0]]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise PlanError(f"{path}: the header {header} has no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    buffers = tuple(_buffer(f"{path}, line {number}", header, row) for number, row in enumerate(rows[1:], start=2) if row)
    if not buffers:
        raise PlanError(f"{path}: no buffers below the header")
    problem = AddressProblem(buffers=buffers, capacity=capacity, alignment=alignment)
    try:
        check_problem(problem)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return problem


def write_solution(path: str | pathlib.Path, problem: AddressProblem, offsets: Sequence[int]) -> None:
    """Write a problem's buffers with their offsets."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "offset"])
        for buffer, offset in zip(problem.buffers, offsets, strict=True):
            writer.writerow([buffer.name, buffer.lower, buffer.upper, buffer.size, offset])


def _buffer(where: str, header: list[str], row: list[str]) -> LiveBuffer:
    if len(row) != len(header):
        raise PlanError(f"{where}: {len(row)} values for {len(header)} columns")
    values = dict(zip(header, (value.strip() for value in row), strict=True))
    offset = values.get("offset", "")
    return LiveBuffer(
        name=values["id"],
        lower=_integer(where, "lower", values["lower"]),
        upper=_integer(where, "upper", values["upper"]),
        size=_integer(where, "size", values["size"]),
        offset=_integer(where, "offset", offset) if offset else None,
    )


def _integer(where: str, column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"{where}: {column} is {text!r}, expected an integer") from None
