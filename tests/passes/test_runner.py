"""The runner: checks after every pass, reports, names."""

import pytest
import torch
from graphs import trace

from graphacc.errors import GraphError, StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.runner import Pass, run_passes, select


def _step() -> StepGraph:
    return trace(lambda x: (x + 1, x.sum())[:1], [(Kind.BATCH, "x", torch.ones(2, 3))], [(Kind.USER, "0")])


def test_reports_say_what_each_pass_did():
    _, reports = run_passes(_step(), [DEAD_CODE, COMMON_SUBEXPRESSIONS], debug=["dead-code"])
    assert [(report.name, report.rewrites) for report in reports] == [("dead-code", 1), ("common-subexpressions", 0)]
    assert reports[0].num_nodes == (4, 3) and reports[0].seconds > 0
    assert "aten.sum" in reports[0].before and "aten.sum" not in reports[0].after
    assert reports[1].before is None
    assert "dead-code: 1 rewrites, 4 -> 3 nodes" in str(reports[0])


def _drop_phase(step, log):
    for node in step.graph.nodes:
        if node.op == "call_function":
            del node.meta["phase"]
    return step


def _use_before_definition(step, log):
    last = [node for node in step.graph.nodes if node.op == "call_function"][-1]
    step.placeholders[0].prepend(last)
    return step


def _own_rule(step):
    raise GraphError("there is no such node")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Pass(name="drop-phase", exact=True, run=_drop_phase), "pass 'drop-phase' broke the graph: node 'add' .* has no phase"),
        (
            Pass(name="reorder", exact=True, run=_use_before_definition),
            "pass 'reorder' broke the graph: node '.*' reads '.*', which stands behind it",
        ),
        (
            Pass(name="rule", exact=True, run=lambda step, log: step, verify=_own_rule),
            "pass 'rule' broke the graph: there is no such node",
        ),
    ],
)
def test_error_names_the_pass_that_broke_the_graph(broken, message):
    with pytest.raises(GraphError, match=message):
        run_passes(_step(), [DEAD_CODE, broken])


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (["last"], r"pass 'last', or one in front of it that reports no rewrite \('first', 'drop-phase'\), broke the graph"),
        (["rewriting", "last"], r"pass 'rewriting', or one in front of it that reports no rewrite \('first', 'drop-phase'\), broke the graph"),
        (["last", "rewriting"], r"pass 'rewriting', or one in front of it that reports no rewrite \('first', 'drop-phase', 'last'\), broke the graph"),
    ],
)
def test_passes_that_report_no_rewrite_are_checked_with_the_next_that_does(behind, message):
    silent = {name: Pass(name=name, exact=True, run=lambda step, log: step) for name in ("first", "last")}
    passes = silent | {"rewriting": Pass(name="rewriting", exact=True, run=lambda step, log: log.rewrote() or step)}
    breaking = Pass(name="drop-phase", exact=True, run=_drop_phase)
    with pytest.raises(GraphError, match=f"{message}: node 'add' .* has no phase"):
        run_passes(_step(), [passes["first"], breaking, *map(passes.__getitem__, behind)])


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(StrategyError, match="no pass 'dead' in this pipeline: choose out of dead-code, common-subexpressions"):
        run_passes(_step(), [DEAD_CODE, COMMON_SUBEXPRESSIONS], debug=["dead"])
    assert select([DEAD_CODE, COMMON_SUBEXPRESSIONS], ["dead-code"]) == [DEAD_CODE]
