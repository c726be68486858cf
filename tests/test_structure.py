"""The dependencies between folders go one way, and importing graphacc has no side effects."""

import ast
import collections
import pathlib
import subprocess
import sys
import types

from selection import slices_of

import graphacc
from graphacc.strategy import AXES

ROOT = pathlib.Path(graphacc.__file__).parent
PASSES = pathlib.Path(sys.modules["graphacc"].__path__[-1]) / "passes"

MAY_IMPORT = {
    "errors": set(),
    "_compat": set(),
    "cache": set(),
    "collector": set(),
    "graph": {"errors", "_compat"},
    "hlo": {"errors", "_compat", "graph"},
    "ops": {"_compat", "kernels"},
    "kernels": {"", "errors"},
    "optim": {"errors", "kernels"},
    "strategy": {"errors", "graph", "ops"},
    "costs": {"", "errors", "cache", "graph", "ops", "passes.memory"},
    "passes.memory": {"errors", "kernels"},
    "capture": {"errors", "_compat", "graph", "hlo", "ops", "lowering"},
    "passes": {"collector", "errors", "_compat", "graph", "hlo", "ops", "strategy", "costs"},
    "lowering": {"errors", "_compat", "graph", "ops", "kernels"},
    "search": {"_compat", "collector", "errors", "cache", "graph", "ops", "passes", "strategy", "costs", "capture"},
    "runtime": {"errors", "cache", "_compat", "graph", "hlo", "kernels", "ops", "strategy", "lowering", "passes.memory"},
    "loop": {"collector", "errors", "_compat", "graph", "hlo", "ops", "capture", "costs", "optim", "passes", "runtime", "search", "strategy"},
    "api": {"_compat", "costs", "errors", "loop", "runtime", "search", "strategy"},
    "checkpoints": {"errors", "graph", "loop", "runtime"},
    "report": {"errors", "cache", "graph", "hlo", "strategy", "runtime", "loop", "passes", "passes.memory", "search"},
    "distributed": {"runtime"},
    "doctor": {"", "_compat", "cache", "capture", "costs", "errors", "kernels"},
    "plan_command": {"errors", "report", "search"},
    "cli": {"doctor", "plan_command", "errors", "costs", "report", "passes.memory", "search"},
    "examples": {"", "integrations", "runtime"},
    "integrations": set(),
}
"""Folder or module -> what it may import from graphacc; "" is the public package itself."""


def _owner(parts: tuple[str, ...]) -> str:
    if parts[:2] == ("passes", "memory"):
        return "passes.memory"
    return parts[0] if parts else ""


def _imports(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Dotted names below graphacc that a file imports, as parts."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module
            names = [f"{base}.{alias.name}" for alias in node.names] if base in ("graphacc", "graphacc.passes") else [base]
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] == "graphacc":
                found.add(parts[1:])
    return found


def _files():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "passes" and parts != ("__init__",):
            yield path, parts
    for path in sorted((PASSES if PASSES.is_dir() else ROOT / "passes").rglob("*.py")):
        yield path, ("passes", *path.relative_to(PASSES if PASSES.is_dir() else ROOT / "passes").with_suffix("").parts)


def test_dependencies_go_one_way():
    wrong = []
    for path, parts in _files():
        owner = _owner(parts)
        assert owner in MAY_IMPORT, f"{path}: no rule for {owner!r}; add it to MAY_IMPORT"
        for imported in _imports(path):
            target = _owner(imported)
            if target != owner and target not in MAY_IMPORT[owner]:
                wrong.append(f"{'/'.join(parts)} imports graphacc.{'.'.join(imported)}")
    assert not wrong, "\n".join(wrong)


MAX_OPERATORS = 3
OWN_OPERATORS = {
    "passes/attention/find.py": "the pattern of a sum over repeated keys, in which order tells",
    "passes/attention/masks.py": "comparisons as differences of positions",
    "graphacc/capture/checkpointed.py": "what torch.utils.checkpoint's policies may name",
    "graphacc/capture/randomness.py": "how each of torch's generators is drawn with a key",
    "graphacc/capture/lazy/dispatch.py": "what torch_xla does with an operator",
    "graphacc/capture/lazy/whole.py": "what torch_xla does with an operator",
    "graphacc/capture/lazy/written_out.py": "what torch_xla lacks",
    "graphacc/costs/memory.py": "what XLA fuses, and what it computes once for each reader",
    "graphacc/costs/work.py": "FLOPs of the operators that torch's registry does not know",
    "graphacc/loop/decisions.py": "operators whose results have sizes that follow from values",
    "passes/lengths/rules_reduce.py": "what each reduction may read in the place of padding",
}
"""Module -> why it has a collection of more than MAX_OPERATORS operators of its own: what it does with them, no fact about them."""


def _named(tree: ast.AST) -> list[tuple[int, int]]:
    """Line and number of operators of every literal collection of overloads (``aten.view.default``)."""
    found = []
    for node in ast.walk(tree):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        names = [ast.unparse(item).split(".") for item in items if isinstance(item, ast.Attribute)]
        overloads = [name for name in names if len(name) - 2 * (name[:2] == ["torch", "ops"]) == 3 and name[0].lstrip("_") in OPERATORS]
        found.append((getattr(node, "lineno", 0), len(overloads)))
    return found


OPERATORS = {"torch", "aten", "prims", "ops", "own", "mesh", "random", "collective"}


def test_facts_about_operators_stand_in_one_table():
    """What an operator does is said in ops/facts.py; a longer list elsewhere needs a reason that is its module's own."""
    assert max(count for _, count in _named(ast.parse("x = {aten.a.default: 1, torch.ops.aten.b.Tensor: 2, torch.ops.aten: 3}"))) == 2
    lists = {"/".join(("graphacc", *parts) if parts[0] != "passes" else parts) + ".py": _named(ast.parse(path.read_text())) for path, parts in _files()}
    longer = {name: max(found)[1] for name, items in lists.items() if (found := [(count, line) for line, count in items if count > MAX_OPERATORS])}
    wrong = [f"{name}:{line}" for name, line in longer.items() if name not in OWN_OPERATORS]
    assert not wrong, f"lists of operators outside of graphacc/ops/facts.py: {wrong}; use of_kind, or give a reason in OWN_OPERATORS"
    assert set(OWN_OPERATORS) <= set(longer), f"no longer needed: {sorted(set(OWN_OPERATORS) - set(longer))}"


def test_passes_edit_graphs_with_one_editor():
    """`Editor` inserts calls; what makes a new graph (`Emitter`, the cutter of stages, the operators of HLO) adds nodes to that."""
    makers = {"passes/edit", "passes/partition/emit", "passes/stages/cut", "passes/hlo/operators"}
    calls = ("call_function", "create_node")
    wrong = [
        f"{'/'.join(parts)}:{node.lineno}"
        for path, parts in _files()
        if parts[0] == "passes" and "/".join(parts) not in makers
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in calls
    ]
    assert not wrong, f"graphs are edited otherwise than by passes.edit.Editor: {wrong}"


def test_mesh_axes_are_named_in_one_place():
    wrong = [
        f"{'/'.join(parts)}:{node.lineno} {node.value!r}"
        for path, parts in _files()
        if parts[0] != "strategy"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in AXES
    ]
    assert not wrong, f"mesh axes as literals; use the names and roles of graphacc.strategy.axes: {wrong}"


def test_importing_has_no_side_effects():
    code = (
        "import os, sys, jax, torch; before = dict(os.environ);"
        "import graphacc; from graphacc import compile, train_step, Strategy, save_checkpoint;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, 'a JAX backend was started';"
        "assert not jax.config.jax_enable_x64; assert dict(os.environ) == before, 'the environment was changed';"
        "assert 'torch_xla' not in sys.modules and 'transformers' not in sys.modules; print('clean')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "clean", result.stderr


def test_every_test_is_in_the_default_or_in_one_slice_of_the_matrix(request):
    """`-m "not matrix"` and `-m matrix` leave nothing out, nor do the slices of what they select."""
    assert request.config.getini("addopts")[-2:] == ["-m", "not matrix"]
    slices = slices_of(request.session.items, 5)
    assert set(slices) == {item.nodeid for item in request.session.items} and set(slices.values()) <= set(range(1, 6))
    parts = [types.SimpleNamespace(nodeid=f"tests/test_x.py::test[{i}]") for i in range(12)]
    assert sorted(collections.Counter(slices_of(parts, 5).values()).values()) == [2, 2, 2, 3, 3]
    models = [types.SimpleNamespace(nodeid=f"tests/test_x.py::test[{i}]", callspec=types.SimpleNamespace(params={"name": i % 2})) for i in range(12)]
    assert len({slices_of(models, 5)[item.nodeid] for item in models[::2]}) == 1


def test_public_names_exist():
    for name in graphacc.__all__:
        assert getattr(graphacc, name) is not None
