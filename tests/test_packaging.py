"""What the package promises about its import and its metadata. Wheel, sdist and editable installs are tried by `.ci/run`."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import graphacc

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str) -> str:
    """Run `code` in a fresh interpreter outside of the source tree, importing from the source tree as it stands."""
    uninstalled = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path = [{str(ROOT)!r}] + [path for path in sys.path if path != {str(ROOT)!r}]
"""
    done = subprocess.run([sys.executable, "-c", uninstalled + code], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.matrix
def test_import_has_no_side_effects():
    code = """
import os, torch, jax
import jax._src.xla_bridge as bridge
def settings():
    torch_settings = torch.get_default_dtype(), torch.get_num_threads()
    return dict(os.environ), torch_settings, dict(jax.config.values), sys.path[:], len(sys.meta_path)
before = settings()
import graphacc, graphacc.optim
print("same" if settings() == before else "changed", bridge.backends_are_initialized())
"""
    assert python(code).split() == ["same", "False"]


def test_public_names_exist():
    for name in getattr(graphacc, "__all__", ()):
        assert hasattr(graphacc, name), name


def test_passes_import_from_a_source_tree_under_one_name_only():
    code = """
import graphacc.passes
print(graphacc.passes.__file__)
try:
    import passes
except ImportError as error:
    print(error)
"""
    assert python(code).splitlines() == [str(ROOT / "passes" / "__init__.py"), "import graphacc.passes, not passes"]


def test_the_version_is_written_once():
    assert "version" in PYPROJECT["project"]["dynamic"]
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "graphacc" / "__init__.py").read_text(), re.MULTILINE)
    assert version == graphacc.__version__


def test_packaged_folders_exist_and_no_jax_is_too_new():
    packages = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == {"graphacc": "graphacc", "graphacc/passes": "passes"}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in packages.values())
    extras = PYPROJECT["project"]["optional-dependencies"]
    bounds = re.findall(r"'jax(?:lib|\[\w+\])?([^\w\[][^']*)'", str(PYPROJECT["project"]["dependencies"] + extras["cuda"]))
    assert len(bounds) == 3 and set(bounds) == {">=0.10.2"}


def test_everything_that_is_imported_is_declared():
    """Under the name of its distribution, in the dependencies or in an extra."""
    project = PYPROJECT["project"]
    groups = (project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for group in groups for line in group}
    distributions = importlib.metadata.packages_distributions()
    imported = {name.partition(".")[0] for folder in ("graphacc", "passes") for path in (ROOT / folder).rglob("*.py") for name in _imported(path)}
    missing = {
        name for name in imported - sys.stdlib_module_names - {"graphacc", "passes"}
        if not {found.lower().replace("_", "-") for found in distributions.get(name, [name])} & declared
    }
    assert "torch" in imported and not missing, f"imported and not declared: {sorted(missing)}"


def _imported(path: pathlib.Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return whole + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def test_licences_of_vendored_code_are_in_the_wheel():
    """All that is compiled into the library, under csrc/third_party, is named in the metadata, which puts it into the wheel."""
    licences = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "third_party").rglob("LICENSE*")}
    folders = {path for path in (ROOT / "csrc" / "third_party").iterdir() if path.is_dir()}
    assert licences and licences == set(PYPROJECT["project"]["license-files"])
    assert {ROOT / licence for licence in licences} == {folder / "LICENSE" for folder in folders}, "vendored code without its licence"


def test_types_are_shipped():
    assert (ROOT / "graphacc" / "py.typed").is_file()
