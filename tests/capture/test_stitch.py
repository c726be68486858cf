"""Joining graphs: what is wired, what stays an input, and what is refused."""

import pytest
import torch
from capturing import batch_of, joint_of, run
from torch import nn, optim

import graphacc.capture.update
from graphacc._compat.torch_ import fake_mode
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


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """The parameters whose updates were traced and then copied."""
    names: list[str] = []

    def spy(step, *rest, **options):
        names[:] = [item.target for item in step.inputs if item.kind is Kind.PARAM]
        return replicated(step, *rest, **options)

    monkeypatch.setattr(graphacc.capture.update, "replicated", spy)
    return names


@pytest.mark.parametrize(("optimizer", "expected"), [(optim.AdamW, ["first.weight"]), (optim.Adafactor, ["first.weight", "first.bias"])])
def test_parameters_of_one_kind_are_traced_once_and_copied(optimizer, expected, traced):
    """Three weights and three biases: one traced update where it works element by element, which Adafactor's does not."""
    model = Model()
    update = capture_update(model, optimizer(model.parameters()), NAMES)
    assert traced == expected
    assert [out.target for out in update.outputs if out.kind is Kind.PARAM] == NAMES
    shapes = [tuple(node.meta["val"].shape) for node in update.graph.nodes if node.op == "call_function"]
    assert shapes.count((3, 3)) == shapes.count((3,)) > 3 or optimizer is optim.Adafactor


ELEMENTWISE = {
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True, maximize=True),
    "SGD nesterov": lambda p: optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, lr=0.1),
    "RMSprop centered": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    **{cls.__name__: cls for cls in (optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.ASGD, optim.Rprop)},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.default_cases("AdamW amsgrad", "SGD nesterov", "ASGD", "Rprop")
def test_copies_for_other_shapes_are_what_their_operators_give(name, traced):
    """Of all parameters with dims, one dtype and contiguous memory, one is traced; every value has the shape, dtype and strides that its operator gives."""
    model = nn.Module()
    forms = {"matrix": torch.randn(4, 6), "row": torch.randn(1, 6), "one": torch.randn(1), "none": torch.randn(0), "vector": torch.randn(6), "rounded": torch.randn(6).bfloat16()}
    forms |= {"scalar": torch.randn(()), "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "transposed": torch.randn(3, 5).t()}
    for key, value in forms.items():
        model.register_parameter(key, nn.Parameter(value))
    update = capture_update(model, ELEMENTWISE[name](model.parameters()), list(forms))
    assert traced == ["matrix", "rounded", "scalar", "image", "transposed"]
    assert {item.target: item.shape for item in update.inputs if item.kind is Kind.GRAD} == {key: tuple(value.shape) for key, value in forms.items()}
    for node in update.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            with fake_mode():
                given = node.target(*args, **kwargs)
            noted = node.meta["val"]
            assert (given.shape, given.dtype, given.stride()) == (noted.shape, noted.dtype, noted.stride()), node.format_node()


def test_signature_of_copied_updates():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    names = [name for name, _ in model.named_parameters()]
    update = capture_update(model, optim.AdamW(model.parameters()), names)
    assert [item.target for item in update.inputs if item.kind is Kind.PARAM] == names
    assert [item.target for item in update.inputs if item.kind is Kind.GRAD] == names
    assert len({item.name for item in update.inputs}) == 5 * 60 + 1


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.default_cases("AdamW amsgrad", "NAdam", "ASGD", "SGD nesterov")
def test_equal_numbers_are_one_input_and_one_output(name):
    """Of parameters that are alike; values are those of the update in which each has its own."""
    torch.manual_seed(0)
    model = nn.ParameterDict({key: nn.Parameter(torch.randn(shape)) for key, shape in {"a": (4, 3), "b": (5,), "late": (2, 2), "c": (4, 3), "none": ()}.items()})
    names = list(model.keys())
    optimizer = ELEMENTWISE[name](model.parameters())
    apart = capture_update(model, optimizer, names)
    joined = capture_update(model, optimizer, names, alike={each: each == "late" for each in names})
    values = {(item.kind, item.target): torch.tensor(1e-2, dtype=item.dtype) if item.kind is Kind.HYPER else torch.rand(item.shape).to(item.dtype) for item in apart.inputs}
    numbers = {(item.kind, item.target) for item in apart.inputs if item.kind is Kind.STATE and not item.shape and not item.target.startswith("none/")}
    for (kind, target) in numbers:
        values[kind, target] = torch.tensor(7.0 if target.startswith("late") else 3.0, dtype=values[kind, target].dtype)
    shared = {(item.kind, each) for item in joined.inputs for each in item.aliases}
    assert shared == {(kind, target) for kind, target in numbers if target[0] in "bc"}, "a's numbers are b's and c's"
    expected, got = run(apart, values), run(joined, {key: value for key, value in values.items() if key not in shared})
    for key, value in expected.items():
        if key not in shared:
            torch.testing.assert_close(got.pop(key), value, rtol=0, atol=0, equal_nan=True, msg=str(key))
        else:
            assert torch.equal(value, expected[key[0], "a" + key[1][1:]])
    assert not got
    if numbers and "none" in names:
        assert len(joined.graph.nodes) < len(apart.graph.nodes)
