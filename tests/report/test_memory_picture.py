"""Pictures of memory plans of real programs."""

import re

import pytest
import torch
import zoo
from torch import nn
from training import compiled

import graphacc
from graphacc.errors import PlanError
from graphacc.report import memory_plan
from graphacc.runtime.replan.compiling import CPU_SCHEDULES
from graphacc.runtime.replan.cpu import ALIGNMENT


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model, batch = zoo.MODELS["gpt2"](batch_size=16)
    model = compiled(model, None)
    model(**batch).loss.backward()
    zoo.adamw(model).step()
    return model


def program_of(model: nn.Module):
    return model.programs[0].program


@pytest.mark.matrix
def test_a_page_shows_both_plans(model, tmp_path):
    program = program_of(model)
    memory_plan(program, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page
    assert "planned by GraphAcc: " in page
    xla, ours = (int(text.replace(",", "")) for text in re.findall(r"<h2>(?:XLA|planned)[^<]*: ([\d,]+) bytes", page))
    plan = program.plan
    assert program.memory.temp_bytes == plan.temporary_after < xla
    assert f"({plan.schedule.lower().replace('_', '-')} schedule)" in page  # XLA's plan is drawn for the schedule that is kept, and reported for the first;
    assert xla <= plan.temporary_before or plan.schedule != CPU_SCHEDULES[0]  # there it may hold what nothing touches
    assert 0 <= plan.temporary_after - ours < ALIGNMENT  # the last value may end before the arena does
    assert f"lower bound: {program.plan.lower_bound:,} bytes" in page


@pytest.mark.matrix
def test_a_png_is_drawn(model, tmp_path):
    memory_plan(program_of(model), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_not_planned_cannot_be_drawn(tmp_path):
    model = compiled(nn.Linear(4, 1), None, memory_plan="xla")
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(PlanError, match='no memory plan to draw: it was compiled with memory_plan="xla"'):
        memory_plan(program_of(model), tmp_path / "plan.html")


def test_the_default_plans_and_explains(model):
    plan = program_of(model).plan
    assert plan.changed and plan.temporary_after < plan.temporary_before
    assert f"step: temporary memory {plan.temporary_before / 1e6:.1f} -> " in model.explain()


def test_wrong_choices_are_refused():
    with pytest.raises(graphacc.GraphAccError, match="memory_plan='best' is unknown"):
        graphacc.compile(nn.Linear(2, 2), memory_plan="best")
