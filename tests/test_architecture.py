"""The example in ARCHITECTURE.md is what the code prints: one small step, at every stage of its way.

    python tests/test_architecture.py     # writes the stages into the document
"""

import pathlib
import re

import torch
from torch import nn

import graphacc
from graphacc.graph import StepGraph
from graphacc.loop.programs import Programs
from graphacc.passes.planning import Planner

DOCUMENT = pathlib.Path(__file__).parents[1] / "ARCHITECTURE.md"
_BLOCK = r"(<!-- example: {} -->\n```\n)(.*?)(```\n)"


def stages() -> dict[str, str]:
    """A two-layer network with SGD under ZeRO-3 on two devices: what is recorded, captured, planned and compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    model = graphacc.compile(model, strategy="fsdp=2", devices=2, cache_dir=None, fast_compile=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = []
    before = Programs._spread
    Programs._spread = lambda self, graph, dims, **told: (captured.append((graph.copy(), dims)), before(self, graph, dims, **told))[1]
    try:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        recorded = [_name(call.function) for call in model._graphacc_engine.gradients.pending.calls]
        optimizer.step()
    finally:
        Programs._spread = before
    ((step, dims),) = captured
    plan = Planner(step, batch_dims=dims).plan(model.strategy.plain)
    moves = [f"{move.phase.value:9}{move.collective:15}{move.role.value:11}{move.value:18}{move.source} -> {move.target}, {move.size_bytes} bytes" for move in plan.moves]
    return {
        "recorded": "\n".join([*recorded, "backward()", "optimizer.step()"]) + "\n",
        "captured": _text(step),
        "planned": "\n".join(moves) + "\n",
        "program": _text(model.programs[0].graph),
    }


def _name(function) -> str:
    return getattr(function, "__name__", "model(...)")


def _text(step: StepGraph) -> str:
    lines = []
    for node in step.graph.nodes:
        if node.op == "call_function":
            shape = "x".join(map(str, node.meta["val"].shape)) or "number"
            arguments = ", ".join(map(str, node.args))
            lines.append(f"{node.meta['phase'].value:9}{shape:8}{node.name} = {str(node.target).removesuffix('.default')}({arguments})")
    return "\n".join(lines) + "\n"


def test_the_example_is_what_the_code_prints():
    text = DOCUMENT.read_text()
    for name, printed in stages().items():
        match = re.search(_BLOCK.format(name), text, re.DOTALL)
        assert match is not None, name
        assert match[2] == printed, f"{name}: run `python tests/test_architecture.py`"


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, printed in stages().items():
        text = re.sub(_BLOCK.format(name), lambda match: match[1] + printed + match[3], text, flags=re.DOTALL)
    DOCUMENT.write_text(text)
