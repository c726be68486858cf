"""Programs that two processes share are planned in each: the same bits as with XLA's plan, whatever becomes of planning in one of them."""

import functools

import pytest
from planned_job import SECONDS
from processes import HERE, finish, start
from selection import with_matrix

JOB = str(HERE / "planned_job.py")
STRATEGIES = ("fsdp=8", "dp=2,fsdp=4")


@functools.cache
def gpt2(strategy: str) -> list[dict]:
    return [process.results[0][strategy] for process in finish(start([JOB, "gpt2", strategy]))]


@pytest.mark.parametrize("strategy", with_matrix(STRATEGIES, ["dp=2,fsdp=4"]))
@pytest.mark.matrix
def test_both_processes_run_with_their_plan_and_with_the_bits_of_xlas(strategy):
    for found in gpt2(strategy):
        plan = found["plan"]
        assert plan["changed"] and plan["schedule"] == "MEMORY_OPTIMIZED" and plan["line"], plan
        assert plan["lower_bound"] <= plan["temporary_after"] < plan["temporary_before"]
        assert found["planned"] == found["plain"] == gpt2(strategy)[0]["plain"]


@pytest.mark.parametrize("strategy", with_matrix(STRATEGIES, ["dp=2,fsdp=4"]))
@pytest.mark.matrix
def test_the_order_of_the_collectives_is_that_of_xla_in_both_processes(strategy):
    orders = [found[name] for found in gpt2(strategy) for name in ("order", "planned order")]
    assert all(order == orders[0] for order in orders) and len(orders[0]) > 20


@pytest.fixture(scope="module")
def unalike(tmp_path_factory):
    return [process.results[0] for process in finish(start([JOB, "unalike", str(tmp_path_factory.mktemp("caches"))]))]


@pytest.mark.matrix
def test_the_bits_are_equal_whatever_one_process_does(unalike):
    runs = [run for found in unalike for run in found["runs"].values()]
    assert len(runs) == 12 and {run["bits"] for run in runs} == {runs[0]["bits"]}


@pytest.mark.parametrize(
    "case, changed, from_cache",
    [
        ("cold", (True, True), (False, False)),
        ("warm in one", (True, True), (True, False)),
        ("warm", (True, True), (True, True)),
        ("no time in one", (True, None), (False, False)),
        ("failed in one", (True, False), (False, False)),
    ],
)
@pytest.mark.matrix
def test_each_process_plans_for_itself(unalike, case, changed, from_cache):
    plans = [found["runs"][case]["plan"] for found in unalike]
    for plan, expected, cached in zip(plans, changed, from_cache):
        assert expected in (plan["changed"], None) and plan["from_cache"] is cached, plan
    assert ("the planner of process 1 is broken" in plans[1]["reason"]) == (case == "failed in one")


@pytest.mark.matrix
def test_no_process_starts_before_all_have_compiled(unalike):
    """Gloo gives the first collective of a group of devices 30 s, and a process that must compile and plan may need longer."""
    first, second = (found["late"] for found in unalike)
    assert second["compiled"] - first["compiled"] > SECONDS / 2 and first["started"] > second["compiled"]
