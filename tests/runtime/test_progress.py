"""The first step says what it does and for how long; steps that build nothing say nothing."""

import logging
import os
import pty
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import graphacc
from graphacc.runtime import progress

SCRIPT = """
import logging, sys, torch, graphacc

def run(text, **options):
    sys.stderr.write(f"<{text}>")
    model = graphacc.compile(torch.nn.Linear(4, 4), cache_dir=None, fast_compile=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        sys.stderr.write(f"<step {step}>")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        float(model.weight.detach().sum())

run("default", strategy="auto", devices=2)
logging.getLogger("graphacc").setLevel(logging.WARNING)
run("quiet", devices=1)
"""


def trained(steps: int) -> nn.Module:
    model = graphacc.compile(nn.Linear(4, 4), devices=1, cache_dir=None, fast_compile=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if " took " in record.getMessage()]


def test_one_line_for_a_program_with_the_seconds_of_its_parts(caplog):
    caplog.set_level(logging.INFO, logger="graphacc")
    model = trained(3)
    (line,) = lines(caplog)
    total, *parts = map(float, re.findall(r"([\d.]+) s", line))
    assert re.sub(r"[\d.]+ s", "S", line) == "graphacc: the step program took S: capture S, passes S, compile S, plan of memory S"
    assert 0.5 * total <= sum(parts) <= total + 0.03  # rounded; the rest is between the activities, on a machine with other work
    (compiled,) = model.programs
    assert compiled.capture_seconds == pytest.approx(parts[0], abs=0.006) and compiled.compile_seconds == pytest.approx(parts[2] + parts[3], abs=0.02)


def test_a_level_of_warning_switches_it_off(caplog):
    caplog.set_level(logging.WARNING, logger="graphacc")
    trained(1)
    assert not lines(caplog)


def test_an_activity_inside_another_one_stops_its_time(caplog):
    caplog.set_level(logging.INFO, logger="graphacc")
    with progress.building("a thing") as built, progress.activity("outer") as outer:
        time.sleep(0.02)
        with progress.activity("inner") as inner:
            time.sleep(0.2)
    assert 0.2 <= inner.seconds <= outer.seconds - 0.02 <= built.seconds
    (line,) = lines(caplog)
    alone, inside = map(float, re.search(r"outer ([\d.]+) s, inner ([\d.]+) s", line).groups())
    assert alone + inside == pytest.approx(outer.seconds, abs=0.02) and inside == pytest.approx(inner.seconds, abs=0.02)


def test_what_fails_has_no_line(caplog):
    caplog.set_level(logging.INFO, logger="graphacc")
    with pytest.raises(ValueError, match="no"), progress.building("a thing"), progress.activity("outer"):
        raise ValueError("no")
    assert not lines(caplog)
    with progress.activity("alone") as alone:  # outside of a build it is timed only
        pass
    assert alone.seconds > 0


@pytest.mark.matrix
def test_a_terminal_shows_the_activities_while_they_go_on():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            text += os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait(60) == 0, text
    first, second, quiet, last = re.search("<step 0>(.*)<step 1>(.*)<quiet><step 0>(.*)<step 1>(.*)", text.decode(), re.DOTALL).groups()
    assert re.search(r"\r\x1b\[Kgraphacc: the (step program|search for a strategy): capture \S+ s.* \.\.\.\r", first), first
    shown = [line.rpartition("\x1b[K")[2] for line in first.splitlines() if " took " in line]
    assert [re.sub(r"[\d.]+ s", "S", line) for line in shown] == [
        "graphacc: the search for a strategy took S: capture S, search S",
        "graphacc: the step program took S: capture S, passes S, compile S, plan of memory S",
    ]
    assert not second.strip() and not quiet.strip() and not last.strip(), (second, quiet, last)
