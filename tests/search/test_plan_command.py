"""`graphacc plan`: a script's function gives the model, the answer is a plan that the library replays."""

import pytest

from graphacc.cli import EXIT_ERROR, EXIT_SOLVED, main
from graphacc.search import Plan

SCRIPT = '''
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()

def setup():
    with torch.device("meta"):
        return Model(64), {"x": torch.zeros(32, 64)}, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def positional():
    return Model(16), (torch.zeros(8, 16),)

def wrong():
    return Model(16)
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_plan(script, tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["plan", f"{script}:setup", "--hardware", "8xH100", "--pin", "fsdp=2", "--pin", "tp=1", "--output", str(output)]) == EXIT_SOLVED
    said = capsys.readouterr().out
    plan = Plan.load(output)
    assert plan.strategy.fsdp == 2 and plan.strategy.num_devices == 8 and said.startswith(f"{plan.strategy}\nfor 8xH100, out of auto,fsdp=2,tp=1: ")
    momentum = sum(size for size in (64 * 256, 256, 256 * 64, 64)) * 4
    assert plan.estimate.state_bytes == pytest.approx(momentum / 2, rel=0.01), "SGD keeps one tensor, and fsdp=2 half of it"


def test_one_strategy_alone(script, capsys):
    assert main(["plan", f"{script}:positional", "--hardware", "cpu:4", "--strategy", "dp=4"]) == EXIT_SOLVED
    said = capsys.readouterr().out
    assert said.startswith("dp=4\nfor cpu:4, out of dp=4: ") and "rival" not in said


def test_a_pipeline(script, capsys):
    """Evaluated alone, and found where the number of microbatches is left to the search."""
    assert main(["plan", f"{script}:setup", "--hardware", "4xH100", "--strategy", "pp=2,dp=2,microbatches=4"]) == EXIT_SOLVED
    said = capsys.readouterr().out
    assert said.startswith("dp=2,pp=2,microbatches=4\nfor 4xH100") and "bubble" in said
    assert main(["plan", f"{script}:setup", "--hardware", "4xH100", "--pin", "pp=2", "--pin", "microbatches=auto"]) == EXIT_SOLVED
    said = capsys.readouterr().out
    assert "pp=2,microbatches=" in said.splitlines()[0] and "out of auto,pp=2,microbatches=auto: " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([":setup"], "SCRIPT:FUNCTION"),
        (["{script}:nothing"], "has no function 'nothing': it has Model"),
        (["{script}:wrong"], "returned Model: return (model, batch)"),
        (["{script}:setup", "--hardware", "8xH999"], "'8xH999' is unknown"),
        (["{script}:setup", "--hardware", "cpu:8", "--pin", "tp=3"], "auto with tp=3 on 8 devices"),
        (["{script}:setup", "--hardware", "cpu:8", "--memory", "0.00001"], "no strategy of 8 devices fits into 10,737 bytes per device. It would fit with"),
        (["{script}:setup", "--hardware", "cpu:8", "--output", "plan.txt"], "ends in .json"),
        (["{script}:setup", "--hardware", "cpu:2", "--strategy", "dp=4"], "dp=4 needs 4 devices, the hardware has 2"),
        (["{script}:setup", "--hardware", "cpu:2", "--strategy", "dp=2", "--pin", "tp=2"], "give one of them"),
    ],
)
@pytest.mark.default_cases("arguments0-SCRIPT:FUNCTION", "arguments4-auto with tp=3 on 8 devices", "arguments8-give one of them")
def test_what_is_wrong_is_one_line(arguments, message, script, capsys):
    assert main(["plan", *(argument.format(script=script) for argument in arguments)]) == EXIT_ERROR
    said = capsys.readouterr()
    assert said.err.startswith("graphacc: ") and message in said.err and not said.out
