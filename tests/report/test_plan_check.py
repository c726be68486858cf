"""A plan beside the compiled program, and as a page."""

import dataclasses
import functools
import html.parser

import pytest
import torch
import transformers

from graphacc._compat import jax_ as compat
from graphacc.cli import EXIT_ERROR, EXIT_SOLVED, main
from graphacc.errors import StrategyError
from graphacc.graph import Kind
from graphacc.report.plan_check import _graphs, check_plan
from graphacc.report.plan_page import page
from graphacc.runtime.absent import absent_mesh
from graphacc.search.model import search_and_plan
from graphacc.strategy import Strategy

SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()

def setup():
    with torch.device("meta"):
        return Model(), {"x": torch.zeros(64, 64)}
"""


@functools.cache
def planned(hardware: str, strategy: str):
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )  # fmt: skip
    ids = torch.zeros(16, 64, dtype=torch.long)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    return search_and_plan(model, {"input_ids": ids, "labels": ids}, hardware=hardware, strategy=strategy)


@pytest.mark.parametrize("strategy", ["fsdp=8", "dp=2,tp=2,fsdp=2"])
@pytest.mark.matrix
def test_a_plan_is_compiled_and_compared(strategy):
    """On virtual CPU devices: the arguments are what was planned to the byte, and so are the collectives."""
    check = check_plan(*planned("cpu:8", strategy))
    (planned_arguments, arguments), (predicted, found) = check.argument_bytes, check.temporary_bytes
    assert planned_arguments == pytest.approx(arguments, rel=0.001)
    assert predicted == pytest.approx(found, rel=0.35)  # XLA's own plan of a small program
    assert {"all-gather", "reduce-scatter"} <= set(check.collective_bytes)
    assert all(planned == compiled > 0 for planned, compiled in check.collective_bytes.values()), check.collective_bytes
    assert "all-gather (whole tensors)" in str(check)


@pytest.mark.skipif(compat.cuda_library() is None, reason="JAX's CUDA plugin is not installed")
@pytest.mark.parametrize(("hardware", "strategy"), [("8xH100", "fsdp=8"), ("2x8xH200", "fsdp=8,tp=2")])
def test_a_plan_is_compiled_for_gpus_that_are_not_here(hardware, strategy):
    check = check_plan(*planned(hardware, strategy))
    assert check.argument_bytes[0] == pytest.approx(check.argument_bytes[1], rel=0.001)
    assert all(planned == compiled for planned, compiled in check.collective_bytes.values()), check.collective_bytes


SEVERAL_PROGRAMS = ["fsdp=8,microbatches=2", "pp=2,fsdp=4,microbatches=4", "pp=2,dp=2,tp=2,microbatches=2,schedule=interleaved,chunks=2", "pp=4,dp=2,microbatches=4,schedule=zb-h1", "fsdp=8,zero=1,offload=optimizer,microbatches=2"]


@pytest.mark.parametrize("strategy", SEVERAL_PROGRAMS)
@pytest.mark.default_cases("pp=2,fsdp=4,microbatches=4")
def test_a_step_of_several_programs(strategy):
    """What stays on a device is what was planned, with gradients between programs, and so is what all runs of a step move."""
    check = check_plan(*planned("cpu:8", strategy))
    (planned_arguments, arguments), (predicted, found) = check.argument_bytes, check.temporary_bytes
    if "schedule" in strategy:  # of so small a model another stage is predicted to be the fullest
        assert 0.97 <= check.peak_bytes[0] / check.peak_bytes[1] <= 1.4
    else:
        assert planned_arguments == pytest.approx(arguments, rel=0.002)
        assert predicted == pytest.approx(found, rel=0.35)
    assert check.collective_bytes and all(planned == compiled > 0 for planned, compiled in check.collective_bytes.values()), check.collective_bytes
    assert (check.fullest and f"; fullest in {check.fullest}" in str(check)) or "offload" in strategy  # where the host updates there is one program


def test_an_update_is_cut_as_the_loop_cuts_it():
    """Messages join no tensors of several stages: what crosses is Adam's correction of the bias for each parameter of stage 1, a number."""
    search, plan = planned("cpu:8", "pp=2,fsdp=4,zero=1,microbatches=2")
    parts = [part for part in _graphs(search, plan.strategy) if part.updates]
    crossing = [item for part in parts for item in part.step.inputs if item.kind is Kind.CROSS]
    assert [part.stage for part in parts] == [0, 1] and [len(item.shape) for item in crossing] == [1] and crossing[0].shape[0] < 16


@pytest.mark.matrix
def test_several_programs_by_spmd():
    """Forward and backward, and the update, each by XLA's partitioner."""
    check = check_plan(*planned("cpu:8", "tp=2,fsdp=2,dp=2,tp_by=spmd,microbatches=2"))
    assert check.argument_bytes[0] == pytest.approx(check.argument_bytes[1], rel=0.002) and check.fullest in ("forward and backward", "update")


@pytest.mark.skipif(compat.cuda_library() is None, reason="JAX's CUDA plugin is not installed")
@pytest.mark.parametrize("strategy", SEVERAL_PROGRAMS)
def test_several_programs_for_gpus_that_are_not_here(strategy):
    check = check_plan(*planned("8xH100", strategy))
    assert "schedule" in strategy or check.argument_bytes[0] == pytest.approx(check.argument_bytes[1], rel=0.002)
    assert all(planned == compiled for planned, compiled in check.collective_bytes.values()), check.collective_bytes


def test_what_cannot_be_checked_says_why():
    with pytest.raises(StrategyError, match="there is a description of h100, h200"):
        absent_mesh(Strategy(fsdp=8), "L40S", 8)
    with pytest.raises(StrategyError, match="there is a description of h100, h200"):
        check_plan(*planned("8xL40S", "pp=2,dp=4,microbatches=2"))


class Text(html.parser.HTMLParser):
    """What a reader sees, and tags that are still open."""

    def __init__(self):
        super().__init__()
        self.text, self.open = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_plan_as_a_page(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "plan.html"
    script.write_text(SCRIPT)
    assert main(["plan", f"{script}:setup", "--hardware", "cpu:4", "--pin", "tp=1", "--html", str(output), "--check", "xla"]) == EXIT_SOLVED
    reader = Text()
    reader.feed(output.read_text())
    assert not reader.open
    said, printed = "".join(reader.text), capsys.readouterr().out
    strategy = printed.splitlines()[0]
    assert strategy in said and "tp=1" in said and "Rivals" in said and "ms a step" in said and "arguments and results" in printed
    assert main(["plan", f"{script}:setup", "--hardware", "8xL40S", "--check", "xla"]) == EXIT_ERROR
    assert "cannot be compiled without one" in capsys.readouterr().err


def test_a_page_escapes_what_it_shows():
    plan = planned("cpu:8", "dp=8")[1]
    assert "<b>" not in page(dataclasses.replace(plan, request="<b>auto</b>"))
