"""Schedules: complete and free of deadlock, with the bubble and the memory that the papers give; broken ones are caught."""

import dataclasses
import random

import pytest

from graphacc.errors import StrategyError
from graphacc.strategy.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Part,
    build_schedule,
    dispatch_order,
    simulate,
    validate,
)

SIZES = [(2, 2), (2, 6), (3, 5), (4, 4), (4, 8), (4, 16), (8, 8), (8, 24)]
"""Stages and microbatches."""


def _schedules():
    for stages, microbatches in SIZES:
        for name in SCHEDULES:
            if name != "interleaved":
                yield build_schedule(name, stages, microbatches)
            elif microbatches % stages == 0:
                yield build_schedule(name, stages, microbatches, 2)
                yield build_schedule(name, stages, microbatches, 3)


ALL = list(_schedules())


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: f"{s.name}-p{s.num_stages}-m{s.num_microbatches}-c{s.num_chunks}")
def test_every_schedule_is_valid_and_has_the_bubble_of_its_paper(schedule):
    """Equal costs. p stages, m microbatches, v chunks per stage; F, B and W take 1 each."""
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks // schedule.num_stages
    bubble, work = {
        "gpipe": (3 * (p - 1), 3 * m),  # arXiv 1811.06965, section 2.3
        "1f1b": (3 * (p - 1), 3 * m),  # arXiv 2104.04473, section 2.2.1
        "interleaved": (3 * (p - 1) / v, 3 * m),  # section 2.2.2
        "zb-h1": (p - 1, 3 * m),  # arXiv 2401.10241, table 2: (p - 1) (T_F + T_B - T_W)
    }[schedule.name]
    found = simulate(schedule)
    assert found.bubble_fraction == pytest.approx(bubble / (work + bubble))
    assert found.makespan == pytest.approx(v * (work + bubble))


def test_live_microbatches():
    """GPipe holds all microbatches, 1F1B p - s on stage s, ZB-H1 no more than 1F1B's first stage."""
    assert simulate(build_schedule("gpipe", 4, 8)).peak_live == (8, 8, 8, 8)
    assert simulate(build_schedule("1f1b", 4, 8)).peak_live == (4, 3, 2, 1)
    assert simulate(build_schedule("zb-h1", 4, 8)).peak_live == (4, 4, 4, 4)
    assert simulate(build_schedule("interleaved", 4, 8, 2)).peak_live == (11, 9, 7, 5)  # chunks, each half as large


def test_zero_bubble_with_unequal_costs():
    costs = Costs(forward=1.0, backward=1.2, weights=0.8)
    found = simulate(build_schedule("zb-h1", 4, 8), costs)
    bubble = 3 * (1.0 + 1.2 - 0.8)
    assert found.makespan == pytest.approx(8 * 3.0 + bubble)


def test_transfers_lengthen_a_run():
    schedule = build_schedule("1f1b", 4, 8)
    assert simulate(schedule, Costs(transfer=0.5)).makespan > simulate(schedule).makespan


def broken(schedule, generator):
    """A schedule with one thing wrong, and what it is."""
    stages = [list(actions) for actions in schedule.stages]
    stage = generator.choice(stages)
    place = generator.randrange(len(stage))
    match generator.choice(["drop", "double", "invent", "move", "early"]):
        case "drop":
            stage.pop(place)
        case "double":
            stage.insert(generator.randrange(len(stage) + 1), stage[place])
        case "invent":
            stage.append(Action(Part.FORWARD, schedule.num_microbatches, stage[0].chunk))
        case "move":
            others = [actions for actions in stages if actions is not stage]
            generator.choice(others).append(stage.pop(place))
        case "early":
            backward = next(a for a in stage if a.part is Part.BACKWARD)
            stage.remove(backward)
            stage.insert(0, backward)
    return dataclasses.replace(schedule, stages=tuple(map(tuple, stages)))


@pytest.mark.parametrize("seed", range(40))
def test_a_broken_schedule_is_caught(seed):
    generator = random.Random(seed)
    schedule = generator.choice(ALL)
    validate(schedule)
    with pytest.raises(StrategyError, match="missing|times|does not exist|is on stage|deadlocks"):
        validate(broken(schedule, generator))


def test_a_deadlock_names_who_waits_for_whom():
    schedule = build_schedule("1f1b", 2, 2)
    first, second = schedule.stages
    crossed = (first[0], first[2], first[1], first[3])  # F0 B0 F1 B1 on stage 0: B0 needs stage 1, which can do it
    validate(dataclasses.replace(schedule, stages=(crossed, second)))
    stuck = (second[2], second[3], second[0], second[1])  # stage 1 begins with F1, stage 0 does it only after B0
    with pytest.raises(
        StrategyError, match=r"deadlocks; waiting: stage 0 for B0 of chunk 1 before B0 of chunk 0; stage 1 for F1 of chunk 0"
    ):
        validate(dataclasses.replace(schedule, stages=(crossed, stuck)))


def test_swapped_actions_are_found_or_harmless():
    """Any order that the validator accepts can really be played: every action stands behind what it reads."""
    generator = random.Random(0)
    accepted = 0
    for schedule in ALL[:20]:
        for _ in range(10):
            stages = [list(actions) for actions in schedule.stages]
            stage = generator.choice(stages)
            i, j = generator.sample(range(len(stage)), 2)
            stage[i], stage[j] = stage[j], stage[i]
            changed = dataclasses.replace(schedule, stages=tuple(map(tuple, stages)))
            try:
                order = dispatch_order(changed)
            except StrategyError:
                continue
            accepted += 1
            place = {action: n for n, action in enumerate(order)}
            assert all(place[other] < place[action] for action in order for other in changed.requirements(action))
            for actions in changed.stages:
                assert sorted(actions, key=place.get) == list(actions)
    assert accepted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 4, 1), "schedule='2f2b' is unknown: choose one of gpipe, 1f1b, interleaved, zb-h1"),
        (("1f1b", 4, 3, 1), "pp=4 needs at least as many microbatches as stages .* got microbatches=3: set microbatches=4"),
        (("interleaved", 4, 6, 2), "rounds of pp=4, which does not divide microbatches=6"),
        (("interleaved", 2, 4, 1), "set chunks=2 or more"),
        (("1f1b", 2, 4, 2), "chunks=2 is for schedule='interleaved' alone"),
    ],
)
def test_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(StrategyError, match=message):
        build_schedule(*arguments)
