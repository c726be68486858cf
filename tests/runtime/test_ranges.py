"""Profilers of torch and of JAX see the loop's steps, uploads and compilations by name."""

import gzip
import pathlib

import jax
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphacc

NAMES = ("graphacc.step", "graphacc.upload", "graphacc.compile")


def steps(count: int):
    """Trains, step by step."""
    model = graphacc.compile(nn.Linear(4, 4), devices=1, cache_dir=None, fast_compile=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11's, at every first use
def test_torch_profiler_sees_the_ranges():
    loop = steps(4)
    with profile(activities=[ProfilerActivity.CPU]) as first:
        next(loop)
    next(loop)  # without a profiler
    with profile(activities=[ProfilerActivity.CPU]) as further:
        list(loop)
    first, further = ({event.key: event for event in found.key_averages()} for found in (first, further))
    assert [first[name].count for name in (NAMES[0], NAMES[2])] == [1, 1]
    assert further["graphacc.step"].count == 2 and "graphacc.compile" not in further
    assert 2 * first["graphacc.upload"].count > further["graphacc.upload"].count >= 2  # the parameters, and then the batch alone
    assert first["graphacc.step"].cpu_time_total >= first["graphacc.compile"].cpu_time_total > 0


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # Python 3.13's about jaxlib's reader; as an error it ends the process
def test_jax_traces_hold_the_ranges(tmp_path: pathlib.Path):
    with jax.profiler.trace(tmp_path):
        list(steps(2))
    (found,) = tmp_path.rglob("*.xplane.pb")
    data = found.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    assert not [name for name in NAMES if name.encode() not in data]
    events = [
        event
        for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes
        for line in plane.lines
        for event in line.events
        if event.name == "graphacc.step"
    ]
    assert [dict(event.stats)["step_num"] for event in events] == [1, 2]
