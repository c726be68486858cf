"""Every pair of mesh axes, and three at once, train as plain PyTorch does; the README's table is made of this list."""

import pathlib

import pytest
import zoo
from pipeline.pipelines import APART, check_pipeline
from selection import with_matrix
from training import batches_of, captured_once

from graphacc import Strategy

COMBINATIONS = [
    ("gpt2", "pp=2,dp=2,microbatches=2"),
    ("gpt2", "pp=2,fsdp=2,microbatches=2"),
    ("gpt2", "pp=2,tp=2,microbatches=2"),
    ("gpt2", "pp=2,cp=2,microbatches=2"),
    ("mixtral", "pp=2,ep=2,microbatches=2"),
    ("gpt2", "dp=2,fsdp=2"),
    ("gpt2", "dp=2,tp=2"),
    ("gpt2", "dp=2,cp=2"),
    ("mixtral", "dp=2,ep=2"),
    ("gpt2", "fsdp=2,tp=2"),
    ("gpt2", "fsdp=2,cp=2,context=ring"),
    ("mixtral", "fsdp=2,ep=2"),
    ("gpt2", "tp=2,sequence_parallel=True,cp=2"),
    ("mixtral", "tp=2,ep=2"),
    ("mixtral", "cp=2,ep=2"),
    ("gpt2", "pp=2,fsdp=2,tp=2,microbatches=4"),
    ("llama", "dp=2,fsdp=2,tp=2,sequence_parallel=True"),
    ("mixtral", "fsdp=2,tp=2,ep=2"),
    ("llama", "cp=4,zero=3"),
    ("gpt2", "pp=2,cp=2,zero=1,microbatches=2"),
    ("mixtral", "fsdp=2,cp=2,ep=2"),
    ("mixtral", "zero=3,ep=4"),
    ("mixtral", "pp=2,zero=1,ep=2,microbatches=2"),
]
DEFAULT = [
    case
    for case in COMBINATIONS
    if case[1] in ("pp=2,cp=2,microbatches=2", "pp=2,ep=2,microbatches=2", "pp=2,fsdp=2,tp=2,microbatches=4", "fsdp=2,tp=2,ep=2", "cp=2,ep=2")
]
"""Every axis with every other one, but for `dp`, whose place `fsdp` takes."""
NAMES = {"gpt2": "GPT-2", "llama": "Llama", "mixtral": "Mixtral"}
README = pathlib.Path(__file__).parents[2] / "README.md"


def table() -> str:
    """The README's table."""
    rows = [f"| `{strategy}` | {Strategy.parse(strategy).num_devices} | {NAMES[name]} |" for name, strategy in COMBINATIONS]
    return "\n".join(["| strategy | devices | model |", "| --- | --- | --- |", *rows])


@pytest.mark.parametrize(("name", "strategy"), with_matrix(COMBINATIONS, DEFAULT), ids=[strategy for _, strategy in COMBINATIONS])
@pytest.mark.default_cases("pp=2,fsdp=2,tp=2,microbatches=4")
def test_training_equals_plain_pytorch(name, strategy):
    model, _ = zoo.MODELS[name]()
    with captured_once("combination", name):
        check_pipeline(model, batches_of(name, 3), strategy, apart=name in APART)


def test_every_pair_of_axes_is_there():
    axes = ("pp", "dp", "fsdp", "tp", "cp", "ep")
    tested = [set(Strategy.parse(strategy).mesh) for _, strategy in COMBINATIONS]
    missing = [(a, b) for i, a in enumerate(axes) for b in axes[i + 1 :] if not any({a, b} <= mesh for mesh in tested)]
    assert not missing


@pytest.mark.skipif(not README.exists(), reason="an installed package has no README beside its tests")
def test_the_readme_shows_this_table():
    assert table() in README.read_text(encoding="utf-8")
