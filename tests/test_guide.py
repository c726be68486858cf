"""docs/guide.md: its Python runs, its commands are those that other tests run, and what it names exists."""

import ast
import importlib
import pathlib
import re
import runpy
import shlex
import tomllib

import pytest

import graphacc
from graphacc import cli

ROOT = pathlib.Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
TEXT = GUIDE.read_text()
EXAMPLES = re.findall(r"`python -m (graphacc\.examples\.\w+)`", TEXT)


def blocks(language: str) -> list[tuple[int, str]]:
    """Line number and content of the code blocks in a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [(TEXT.count("\n", 0, match.start(1)), match[1]) for match in found]


@pytest.mark.matrix
def test_every_python_block_runs(tmp_path, monkeypatch, capsys):
    """In one file, whose lines have the guide's numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [""] * (TEXT.count("\n") + 1)
    for start, content in blocks("python"):
        code = content.splitlines()
        lines[start : start + len(code)] = code
    script = tmp_path / "guide.py"
    script.write_text("\n".join(lines))
    names = runpy.run_path(str(script))
    said = capsys.readouterr().out
    assert len(names["losses"]) == 10 and names["losses"][-1] < names["losses"][0]
    assert "verified: 1 steps" in said
    assert "guide.py" in said, "the refusal names the line"


def test_commands_are_tested():
    """torchrun by tests/distributed, the examples by tests/examples, the doctor by test_doctor."""
    commands = [line for _, content in blocks("bash") for line in content.splitlines()]
    assert commands == ["torchrun --nproc-per-node=2 -m graphacc.examples.train_gpt", "graphacc doctor"]
    assert "torch.distributed.run" in (ROOT / "tests" / "distributed" / "test_processes.py").read_text()
    assert cli.main(shlex.split(commands[1])[1:]) == 0


def test_every_example_is_in_the_guide_and_can_be_run():
    files = {path.stem for path in (ROOT / "graphacc" / "examples").glob("*.py")} - {"__init__", "train_gpt"}
    assert {name.rpartition(".")[2] for name in EXAMPLES} == files
    for name in EXAMPLES:
        module = importlib.import_module(name)
        assert ast.unparse(ast.parse(pathlib.Path(module.__file__).read_text()).body[-1]) == "if __name__ == '__main__':\n    run(train)"


def test_extras_and_errors_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r"graphacc\[([\w,]+)\]", TEXT) for name in names.split(",")]
    assert named and set(named) <= extras.keys()
    errors = set(re.findall(r"\b(\w+Error)\b", TEXT)) - {"AssertionError"}
    assert errors and all(issubclass(getattr(graphacc, name), graphacc.GraphAccError) for name in errors)
