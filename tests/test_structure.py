"""The dependencies between folders go one way, and importing graphacc has no side effects."""

import ast
import collections
import pathlib
import subprocess
import sys
import types

from selection import slices_of

import graphacc

ROOT = pathlib.Path(graphacc.__file__).parent
PASSES = pathlib.Path(sys.modules["graphacc"].__path__[-1]) / "passes"

MAY_IMPORT = {
    "errors": set(),
    "_compat": set(),
    "cache": set(),
    "graph": {"errors"},
    "hlo": {"errors", "graph"},
    "ops": {"_compat", "kernels"},
    "kernels": {"", "errors"},
    "optim": {"errors", "kernels"},
    "strategy": {"errors", "graph", "ops"},
    "costs": {"", "errors", "cache", "graph", "ops", "passes.memory"},
    "passes.memory": {"errors", "kernels"},
    "capture": {"errors", "_compat", "graph", "hlo", "ops", "lowering"},
    "passes": {"errors", "_compat", "graph", "hlo", "ops", "strategy", "costs"},
    "lowering": {"errors", "_compat", "graph", "ops", "kernels"},
    "search": {"errors", "cache", "graph", "ops", "passes", "strategy", "costs", "capture"},
    "runtime": {"errors", "cache", "_compat", "graph", "hlo", "kernels", "ops", "strategy", "lowering", "passes.memory"},
    "loop": {"errors", "_compat", "graph", "hlo", "capture", "costs", "optim", "passes", "runtime", "search", "strategy"},
    "api": {"costs", "errors", "loop", "runtime", "search", "strategy"},
    "checkpoints": {"errors", "graph", "loop", "runtime"},
    "report": {"errors", "graph", "strategy", "runtime", "loop", "passes", "passes.memory"},
    "distributed": {"runtime"},
    "doctor": {"", "cache", "capture", "costs", "errors", "kernels"},
    "cli": {"doctor", "errors", "costs", "report", "passes.memory", "search"},
    "examples": {"", "runtime"},
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
