"""What a search may choose: all strategies of a number of devices, with pins, and the reasons of what is left out."""

import math

import pytest

from graphacc.errors import StrategyError
from graphacc.search.space import Limits, Refusals, Request, candidates, first_strategy


def found(text: str, devices: int, **limits):
    refusals = Refusals()
    return list(candidates(Request.parse(text, devices), Limits(**limits), refusals)), refusals


def test_every_mesh_of_eight_devices():
    """Counted by hand: 20 ways to write 8 as an ordered product of four axes, with what each axis can do."""
    chosen, refusals = found("auto", 8, batch_size=8)
    assert len(chosen) == len(set(chosen)) == 88 and all(strategy.num_devices == 8 for strategy in chosen)
    assert len({tuple(strategy.mesh.items()) for strategy in chosen}) == 20
    assert refusals.counts["no experts for ep to split"] == 15
    assert any("context='ring' needs contiguous blocks" in reason for reason in refusals.counts)
    assert {strategy.zero_stage for strategy in chosen} == {0, 1, 3}


@pytest.mark.parametrize(("text", "holds"), [("auto,tp=2", lambda s: s.tp == 2), ("auto,fsdp=1,cp=1", lambda s: s.fsdp == s.cp == 1), ("auto,zero=1,fsdp=4", lambda s: s.zero == 1)])
def test_pins_hold(text, holds):
    chosen, _ = found(text, 8, batch_size=8)
    everything, _ = found("auto", 8, batch_size=8)
    assert chosen and all(map(holds, chosen)) and set(chosen) == {strategy for strategy in everything if holds(strategy) and strategy.fsdp % (4 if "fsdp=4" in text else 1) == 0 and ("fsdp=4" not in text or strategy.fsdp == 4)}


def test_limits():
    chosen, refusals = found("auto", 16, batch_size=4, num_experts=6, host_devices=8)
    assert max(strategy.data_ranks for strategy in chosen) == 4 and refusals.counts["the data axes do not divide the batch of 4 rows"]
    assert {strategy.ep for strategy in chosen} == {1, 2} and refusals.counts["ep does not divide 6 experts"]
    assert refusals.counts["tp * cp is larger than the 8 devices of a host"] == 1  # tp=16
    across = [strategy for strategy in chosen if strategy.tp * strategy.cp > 8]
    assert {(strategy.tp, strategy.cp) for strategy in across} == {(1, 16), (2, 8), (4, 4), (8, 2)} and {strategy.context for strategy in across} == {"ring"}
    for text, rows in (("auto", 16), ("auto,context=ulysses", 4)):
        within, refusals = found(text, 16, batch_size=rows, host_devices=8)
        assert max(strategy.tp * strategy.cp for strategy in within) == 8 and refusals.counts["tp * cp is larger than the 8 devices of a host"] == 5
    assert all(strategy.tp > 1 for strategy in found("auto", 8, needed=frozenset({"tp"}))[0])
    assert all(strategy.num_devices == 6 and math.prod(strategy.mesh.values()) == 6 for strategy in found("auto", 6)[0])


def test_what_changes_results_is_never_chosen():
    chosen, _ = found("auto", 8, num_experts=8)
    fixed = ("precision", "reduce_dtype", "capacity_factor", "microbatches", "quantized_weights", "quantized_gradients", "pp", "hpz")
    assert len({tuple(getattr(strategy, name) for name in fixed) for strategy in chosen}) == 1
    assert all(strategy.precision == "bf16" for strategy in found("auto,precision=bf16", 8)[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("automatic", "a search is asked for by 'auto'"),
        ("auto,tpp=2", "'tpp=2' sets no known field"),
        ("auto,tp=2,tp=4", "tp is set twice"),
        ("auto,tp=3", "auto with tp=3 on 8 devices"),
    ],
)
def test_bad_requests(text, message):
    with pytest.raises(StrategyError, match=message):
        Request.parse(text, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", "fsdp=8"), ("auto,tp=2", "fsdp=4,tp=2"), ("auto,fsdp=2", "dp=4,fsdp=2"), ("auto,tp=8", "tp=8"), ("auto,fsdp=1,zero=1", "dp=8"), ("auto,dp=8", "dp=8")],
)
def test_the_strategy_before_the_search(text, expected):
    assert str(first_strategy(Request.parse(text, 8))) == expected
