"""What passes did is shown to the user: their reports on request, gathers that an operator forced without being asked."""

import logging

import pytest
import torch
from torch import nn

import graphacc


class Distances(nn.Module):
    """The distances of all samples from each other have no partition rule, so that the batch is gathered for them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 4)

    def forward(self, x):
        return nn.functional.pdist((x @ self.weight).flatten(1))


def trained(steps: int = 2, **options) -> nn.Module:
    torch.manual_seed(0)
    model = graphacc.compile(Distances(), devices=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING, logger="graphacc")
    return lambda: [record.getMessage() for record in caplog.records if "gathers" in record.getMessage()]


def test_a_forced_gather_is_said_once_with_line_and_bytes(told):
    trained(strategy="dp=2")
    lines = [text for text in told() if "pdist" in text]
    assert lines and len(lines) == len(set(lines))
    assert "test_explain_passes.py:" in lines[0] and "MB in all, in every step" in lines[0] and "no partition rule" in lines[0]


def test_reports_of_passes():
    model = trained(strategy="fsdp=2")
    assert "partition-fsdp" not in model.explain()
    text = model.explain(passes=True)
    assert "step, partition-fsdp: " in text and "fsdp over 2 ranks:" in text and "all_gather of weight in forward: 1, 64 bytes" in text
    assert all(report.details.plan.actions == () for report in model.programs[0].passes if report.name == "partition-fsdp")
