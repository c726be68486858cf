"""Joining graphs: what is wired, what stays an input, and what is refused."""

import pytest
import torch
from capturing import batch_of, joint_of
from torch import nn, optim

import graphacc.capture.update
from graphacc.capture import capture_joint, capture_update, stitch
from graphacc.capture.replicate import replicated
from graphacc.errors import GraphError
from graphacc.graph import Input, Kind

X = torch.ones(4, 3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.third(self.second(self.first(x))).square().mean()


NAMES = [name for name, _ in Model().named_parameters()]


def graphs(**options):
    model = Model()

    def forward(m, leaves):
        return m(*leaves), [leaves[0].sum()]

    joint = capture_joint(model, forward, batch_of({"x": X}))
    return model, joint, capture_update(model, optim.AdamW(model.parameters()), NAMES, **options)


def test_signature_of_the_whole_step():
    _, joint, update = graphs()
    step = stitch(joint, update)
    kinds = [item.kind for item in step.inputs]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] is not kind] == [
        Kind.PARAM, Kind.BATCH, Kind.KEY, Kind.STATE, Kind.HYPER,
    ]  # fmt: skip
    assert {out.kind for out in step.outputs} == {Kind.LOSS, Kind.USER, Kind.PARAM, Kind.STATE}
    assert len(step.donations()) == 4 * len(NAMES)
    metas = [node.meta for node in step.graph.nodes if node.op != "output"]
    assert all({"val", "phase", "module_path", "stack_trace"} <= set(meta) for meta in metas)


def test_user_outputs_of_the_joint_graph_feed_gradient_code():
    extra = Input(name="", kind=Kind.USER, target="0", shape=(), dtype=torch.float32)
    _, joint, update = graphs(transform=lambda grads, extras: {n: g * extras[0] for n, g in grads.items()}, extras=[extra])
    step = stitch(joint, update)
    assert not any(item.kind in (Kind.USER, Kind.GRAD) for item in step.inputs)


def test_missing_gradient_is_named():
    model, _, update = graphs()
    model.second.requires_grad_(False)
    with pytest.raises(GraphError, match="reads \\['second.weight', 'second.bias'\\]"):
        stitch(joint_of(model, {"x": X}), update)


def test_parameters_of_one_kind_are_traced_once_and_copied(monkeypatch):
    """Three weights and three biases: two traced updates, six in the graph."""
    traced = []

    def spy(step, representatives):
        traced.extend(item.target for item in step.inputs if item.kind is Kind.PARAM)
        return replicated(step, representatives)

    monkeypatch.setattr(graphacc.capture.update, "replicated", spy)
    _, _, update = graphs()
    assert traced == ["first.weight", "first.bias"]
    assert [out.target for out in update.outputs if out.kind is Kind.PARAM] == NAMES
    roots = [node for node in update.graph.nodes if node.target is torch.ops.aten.sqrt.default and node.meta["val"].dim() > 0]
    assert len(roots) == 6


def test_signature_of_copied_updates():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    names = [name for name, _ in model.named_parameters()]
    update = capture_update(model, optim.AdamW(model.parameters()), names)
    assert [item.target for item in update.inputs if item.kind is Kind.PARAM] == names
    assert [item.target for item in update.inputs if item.kind is Kind.GRAD] == names
    assert len({item.name for item in update.inputs}) == 5 * 60 + 1
