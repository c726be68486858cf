"""Order problems as JSON files, and the command that plans them."""

import json

import pytest

from graphacc import cli
from graphacc.errors import PlanError
from graphacc.passes.memory.jsonfile import read_order_problem, write_order_problem
from graphacc.passes.memory.problem import Buffer, Operator, Problem
from graphacc.passes.memory.validate import check_order

# Finishing one chain before the other starts needs 10 + 1 + 1 bytes; the program order needs 10 + 10 + 1.
WIDE = Problem(
    operators=(
        Operator(name="a", reads=(), writes=(0,)),
        Operator(name="b", reads=(), writes=(1,)),
        Operator(name="a end", reads=(0,), writes=(2,)),
        Operator(name="b end", reads=(1,), writes=(3,)),
    ),
    buffers=(
        Buffer(name="A", size=10),
        Buffer(name="B", size=10),
        Buffer(name="a", size=1, is_output=True),
        Buffer(name="b", size=1, is_output=True),
    ),
)


@pytest.fixture
def path(tmp_path):
    write_order_problem(tmp_path / "problem.json", WIDE)
    return tmp_path / "problem.json"


def test_a_problem_is_read_as_it_was_written(path):
    assert read_order_problem(path) == WIDE


def test_the_command_plans_order_and_addresses(path, tmp_path, capsys):
    solution, picture = tmp_path / "plan.json", tmp_path / "plan.html"
    assert cli.main(["plan-memory", str(path), "--output", str(solution), "--picture", str(picture)]) == 0
    plan = json.loads(solution.read_text())
    assert check_order(WIDE, plan["order"]) == plan["peak"] == plan["lower_bound"] == plan["height"] == 12
    out = capsys.readouterr().out
    assert "order: optimal: peak 12 bytes" in out and "addresses: optimal: 12 bytes" in out
    assert picture.read_text().count("<svg") == 2


def operators(**changes) -> str:
    operator = {"name": "a", "reads": [], "writes": [0]} | changes
    return json.dumps({"operators": [operator], "buffers": [{"name": "x", "size": 4}]})


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not a JSON file"),
        ("[]", 'the fields "operators" and "buffers"'),
        ('{"operators": [], "buffers": []}', "no operators"),
        ('{"operators": {}, "buffers": []}', "operators must be a list"),
        (operators(reads=["x"]), r"operators\[0\].reads is \['x'\], expected a list of integers"),
        (operators(reads=[True]), "expected a list of integers"),
        (operators(colour=1), "expected an object with name, reads, writes"),
        (operators(name=3), r"operators\[0\].name is 3, expected str"),
        (operators(writes=[7]), "names buffer 7, but there are 1"),
        (operators(writes=[-1]), "names buffer -1, but there are 1"),
        (operators(after=[0]), "must run after operator 0"),
        (operators(reads=[0], writes=[]), "which nothing before it writes"),
        (operators(workspace=-1), "the workspace of operator 'a' has -1 bytes"),
    ],
)
def test_wrong_files_are_refused(text, says, tmp_path):
    (tmp_path / "problem.json").write_text(text)
    with pytest.raises(PlanError, match=says):
        read_order_problem(tmp_path / "problem.json")


def test_a_capacity_is_not_for_orders(path, capsys):
    assert cli.main(["plan-memory", str(path), "--capacity", "3"]) == 2
    assert "--capacity" in capsys.readouterr().err
