"""Parts of objects by their paths, what a call has written, and the same written for a later layer."""

import torch

from graphacc.capture.written_objects import Holder, Written, changed, state, step_between, write_as


class Thing:
    def __init__(self, **parts):
        vars(self).update(parts)


def test_parts_and_what_is_new():
    tensor, other = torch.zeros(2), torch.zeros(2)
    thing = Thing(kept=[Thing(x=None), Thing(x=tensor)], flag=False, scale=0.0)
    before = state(thing)
    assert before == {
        (): Holder(Thing),
        ("kept",): Holder(list),
        ("kept", 0): Holder(Thing),
        ("kept", 0, "x"): None,
        ("kept", 1): Holder(Thing),
        ("kept", 1, "x"): tensor,
        ("flag",): False,
        ("scale",): 0.0,
    }
    thing.kept[0].x, thing.kept[1].x, thing.scale = other, tensor, -0.0
    thing.kept.append({"y": 1})
    after = state(thing)
    assert before is not None and after is not None
    assert changed(before, after) == [("kept", 0, "x"), ("kept", 2), ("kept", 2, "y"), ("scale",)]
    del thing.flag
    assert changed(before, state(thing) or {}) is None


def test_what_is_not_understood():
    shared = Thing()
    for part in (iter([1]), lambda: 0, {1, 2}, (1, torch.zeros(1)), torch.nn.Linear(1, 1), torch.Generator(), {(1, 2): 3}, Thing(a=shared, b=shared)):
        assert state(Thing(part=part)) is None, part
    assert state(torch.nn.Linear(1, 1)) is None


def test_steps_between_paths():
    assert step_between(("a", 2, "x", 0), ("a", 3, "x", 0)) == (1, 0)
    assert step_between(("a",), ("a",)) == ()
    assert step_between(("a", 2), ("b", 3)) is None and step_between(("a", 2), ("a", "b")) is None and step_between(("a",), ("a", 1)) is None


def test_a_later_layer_writes_its_own():
    tensor = torch.zeros(2)
    thing = Thing(kept=[Thing(x=None), Thing(x=tensor)], found={2: True})
    for path, step in ((("kept", 1), (1,)), (("kept", 1, "x"), (1,)), (("found", 2), (2,))):
        write_as(thing, Written(argument=0, path=path, step=step), 1)
    assert len(thing.kept) == 3 and thing.kept[2] is not thing.kept[1] and thing.kept[2].x is tensor
    assert thing.found == {2: True, 4: True}
