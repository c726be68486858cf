"""The timeline of a pipeline, from a real run."""

import struct

import pytest
from pipelines import Blocks, compiled, data, train
from zoo import adamw

import graphacc
from graphacc.report import timeline
from graphacc.strategy.schedules import build_schedule


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.default_cases("zb-h1")
def test_timeline_of_a_run(tmp_path, schedule):
    model = compiled(Blocks(), f"pp=2,microbatches=4,schedule={schedule}")
    train(model, data(2), adamw)
    found = timeline(model, tmp_path / "timeline.png")
    plan = build_schedule(schedule, 2, 4)
    for bars in (found.measured, found.ideal):
        for stage, actions in enumerate(plan.stages):
            done = [(bar.part, bar.microbatch) for bar in sorted(bars, key=lambda bar: bar.start) if bar.stage == stage]
            assert sorted(done) == sorted((a.part.value, a.microbatch) for a in actions)
    ends = {(bar.part, bar.chunk, bar.microbatch): bar for bar in found.measured}
    for (part, chunk, microbatch), bar in ends.items():
        assert 0 <= bar.start <= bar.end
        if part == "F" and chunk == 1:
            assert bar.start >= ends["F", 0, microbatch].end
        if part == "B" and chunk == 0:
            assert bar.start >= ends["B", 1, microbatch].end
    assert 0 <= found.ideal_bubble < 1 and 0 <= found.measured_bubble < 1
    header = (tmp_path / "timeline.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:])[0] == 1400


def test_nothing_to_draw():
    with pytest.raises(graphacc.StrategyError, match="has no pipeline to draw: set pp"):
        timeline(compiled(Blocks(), "dp=2"))
    with pytest.raises(graphacc.LoopError, match="has not run yet"):
        timeline(compiled(Blocks(), "pp=2,microbatches=2"))
    with pytest.raises(TypeError, match="no compiled model"):
        timeline(Blocks())
