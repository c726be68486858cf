"""Five AdamW steps with a learning-rate schedule, compared with plain PyTorch: every model under every data strategy."""

import pytest
import torch
import zoo
from selection import with_matrix
from training import batches_of, check_parity, compiled, train

from graphacc.graph import StepGraph
from graphacc.loop.execution import Execution
from graphacc.loop.programs import Programs

STRATEGIES = (None, "dp=8", "fsdp=8,zero=1", "fsdp=8,zero=3", "dp=2,fsdp=4")
CASES = [(name, strategy) for name in sorted(zoo.MODELS) for strategy in STRATEGIES]
CASES += [("gpt2", "fsdp=8,zero=2")]  # zero=1's program, see tests/passes/test_zoo_partition.py
DEFAULT = [
    ("gpt2", None), ("gpt2", "fsdp=8,zero=3"), ("llama", "fsdp=8,zero=1"), ("lstm_lm", "dp=2,fsdp=4"), ("mixtral", "fsdp=8,zero=3"),
    ("resnet", "fsdp=8,zero=3"), ("t5", "dp=8"), ("tied_mlp", "fsdp=8,zero=1"), ("vit", "dp=2,fsdp=4"),
]  # fmt: skip
"""Every kind of model under one strategy, and every strategy for one of them."""


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, DEFAULT), ids=[f"{name}-{strategy or 'one device'}" for name, strategy in CASES])
@pytest.mark.default_cases("gpt2-one device", "gpt2-fsdp=8,zero=3", "tied_mlp-fsdp=8,zero=1")
def test_training_equals_plain_pytorch(name, strategy):
    model = check_parity(name, strategy)
    assert [compiled.kind for compiled in model.programs] == ["step"], model.explain()
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight


def described(step: StepGraph) -> list[str]:
    """Every node with its target, arguments, shapes and dtypes; and the signature."""
    values = [[(x.shape, x.dtype) for x in torch.utils._pytree.tree_leaves(n.meta.get("val")) if isinstance(x, torch.Tensor)] for n in step.graph.nodes]
    nodes = [f"{n.name} = {n.target} {n.args} {n.kwargs} {value}" for n, value in zip(step.graph.nodes, values)]
    return [*nodes, *map(str, step.inputs), *map(str, step.outputs)]


class Captured(Exception):
    """The graphs are there; compiling them is left out."""


@pytest.mark.matrix
def test_what_is_captured_does_not_depend_on_the_strategy(monkeypatch):
    """So the other tests may capture once (`training.captured_once`)."""
    capture, found = Execution.capture, {}

    def recording(execution, *arguments):
        step = capture(execution, *arguments)
        found.setdefault(str(execution.engine.programs.strategy), []).append(described(step))
        return step

    def stop(programs, kind, reason, capture):
        capture()
        raise Captured

    monkeypatch.setattr(Execution, "capture", recording)
    monkeypatch.setattr(Programs, "_compile", stop)
    for strategy in (None, "fsdp=4,tp=2,sequence_parallel=true", "dp=2,cp=2,context=ring"):
        model, _ = zoo.MODELS["gpt2"]()
        with pytest.raises(Captured):
            train(compiled(model, strategy), batches_of("gpt2", 1))
    first, *others = found.values()
    assert len(others) == 2 and [len(step) > 100 for step in first] == [True, True]
    assert all(steps == first for steps in others)
