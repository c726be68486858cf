"""Which cases the README's command runs, and which are left to the matrix (`pytest -m matrix`), which can be run in slices (`--slice 2/5`)."""

import zlib
from collections.abc import Collection, Iterable, Sequence

import pytest


def with_matrix(cases: Iterable, default: Collection) -> list:
    """Cases for `pytest.mark.parametrize`: those in `default` as they are, the others marked `matrix`."""
    cases = list(cases)
    unknown = [case for case in default if case not in cases]
    assert default and not unknown, f"no such cases: {unknown}"
    return [case if case in default else _in_matrix(case) for case in cases]


def each_once(*factors: Sequence) -> list[tuple]:
    """Every value of every factor with some values of the others: as many tuples as the longest factor has values, which is the first."""
    assert all(len(factor) <= len(factors[0]) for factor in factors)
    cases = []
    for number, first in enumerate(factors[0]):
        rest, case = number, [first]
        for factor in factors[1:]:
            rest, digit = divmod(rest, len(factor))
            case.append(factor[digit])
        cases.append(tuple(case))
    return cases


def _in_matrix(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)


class DefaultCases:
    """Plugin: ``@pytest.mark.default_cases("gpt2-fsdp=8")`` names the cases of a test, as pytest does, that are not left to the matrix."""

    def __init__(self):
        self._missing: dict[str, set[str]] = {}  # test -> named cases that were not collected

    def pytest_itemcollected(self, item: pytest.Item):
        mark = item.get_closest_marker("default_cases")
        if mark is None:
            return
        case = item.callspec.id
        self._missing.setdefault(item.nodeid.partition("[")[0], set(mark.args)).discard(case)
        if case not in mark.args:
            item.add_marker(pytest.mark.matrix)

    def pytest_collection_finish(self, session: pytest.Session):
        missing = {test: sorted(cases) for test, cases in self._missing.items() if cases}
        if missing and not any("::" in argument for argument in session.config.args):
            raise pytest.UsageError(f"default_cases names cases that do not exist: {missing}")


def slices_of(items: Iterable[pytest.Item], count: int) -> dict[str, int]:
    """Test -> its slice, from 1 to `count`.

    Each file's tests are dealt out in turn; those of one model (the parameter `name`) share captures and stay together.
    """
    groups: dict[str, dict[str, int]] = {}
    slices = {}
    for item in items:
        path = item.nodeid.partition("::")[0]
        numbers = groups.setdefault(path, {})
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        number = numbers.setdefault(str(parameters.get("name", item.nodeid)), len(numbers))
        slices[item.nodeid] = 1 + (zlib.crc32(path.encode()) + number) % count
    return slices
