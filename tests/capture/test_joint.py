"""Every model of the zoo: loss, gradients and buffers of the joint graph against eager PyTorch, and the form of the graph."""

import copy

import pytest
import torch
import zoo
from capturing import batch_of, batch_values, joint_of, key, loss_of, model_values, operators, run
from tolerances import LOSS, assert_close, relative_error

from graphacc.capture import capture_forward
from graphacc.graph import Kind, Phase

GRADIENT = 2e-5  # of the largest gradient of the model for those that are mathematically zero, else of the gradient itself


def assert_gradients(got, model):
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {target for kind, target in got if kind is Kind.GRAD} == set(expected)
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        if grad.abs().max() < 1e-5 * largest:
            assert (got[Kind.GRAD, name] - grad).abs().max() < GRADIENT * 1e-2 * largest, name
        else:
            assert_close(got[Kind.GRAD, name], grad, tolerance=GRADIENT, what=name)


def untouched(model):
    state = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = [dict(vars(module)) for module in model.modules()]

    def check():
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert tensor is state[name][0] and tensor._version == state[name][2] and torch.equal(tensor, state[name][1]), name
            assert tensor.grad is None
        for module, before in zip(model.modules(), attributes):
            assert list(vars(module)) == list(before) and all(vars(module)[key] is before[key] for key in before)

    return check


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.default_cases("gpt2", "qwen3_moe", "resnet", "tied_mlp")
def test_joint_equals_eager(name):
    model, kwargs = zoo.MODELS[name]()
    check_untouched = untouched(model)
    step = joint_of(model, kwargs)
    check_untouched()

    reference = copy.deepcopy(model)
    other = zoo.batch(name, seed=3)
    loss = reference(**other).loss
    loss.backward()
    got = run(step, model_values(model, step) | batch_values(other) | key())
    assert relative_error(got[Kind.LOSS, "loss"], loss) < LOSS
    assert_gradients(got, reference)
    changed = {n for n, buffer in reference.named_buffers() if not torch.equal(buffer, dict(model.named_buffers())[n])}
    assert {target for kind, target in got if kind is Kind.BUFFER} == changed
    for target in changed:
        assert_close(got[Kind.BUFFER, target], reference.get_buffer(target), what=target)
    assert_form(name, step)


def assert_form(name, step):
    unwanted = {op for op in operators(step) if op.startswith("prims.") or "as_strided" in op or op in UNWANTED}
    assert not unwanted
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    assert {node.meta["phase"] for node in calls} == {Phase.FORWARD, Phase.BACKWARD}
    phases = [node.meta["phase"] for node in calls if node.target is torch.ops.graphacc.sdpa_backward.default]
    assert all(phase is Phase.BACKWARD for phase in phases)
    assert sum(bool(node.meta["stack_trace"]) for node in calls) > 0.9 * len(calls)
    assert sum(bool(node.meta["module_path"]) for node in calls) > 0.4 * len(calls)  # the rest is the root module itself
    assert ("graphacc.sdpa.default" in operators(step)) == (name not in ("resnet", "lstm_lm", "tied_mlp"))


UNWANTED = {
    "aten.addmm.default",
    "aten.t.default",
    "aten.transpose.int",
    "aten._unsafe_view.default",
    "aten.split.Tensor",
    "aten.detach.default",
    "aten.alias.default",
    "aten.var_mean.correction",
    "aten.native_layer_norm.default",
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten.nll_loss_forward.default",
    "aten.native_dropout.default",
    "aten.lift_fresh_copy.default",
}


def test_every_node_names_the_users_line():
    model, kwargs = zoo.MODELS["tied_mlp"]()
    step = joint_of(model, kwargs)
    (product,) = [n for n in step.graph.nodes if n.target is torch.ops.aten.tanh.default]
    assert "hidden = torch.tanh(self.frozen(self.embedding(input_ids)))" in product.meta["stack_trace"]
    products = [n for n in step.graph.nodes if n.target is torch.ops.aten.mm.default and n.meta["phase"] is Phase.BACKWARD]
    assert {n.meta["module_path"] for n in products} == {"head", "hidden", "frozen"}
    assert all("zoo.py" in n.meta["stack_trace"] for n in products)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # eager's own fast path
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "nn_transformer"])
@pytest.mark.default_cases("gpt2", "nn_transformer")
def test_forward_in_evaluation(name):
    model, kwargs = zoo.MODELS[name]()
    model.eval()
    loss = loss_of(kwargs)
    step = capture_forward(model, lambda m, leaves: (None, [loss(m, leaves)[0]]), batch_of(kwargs))
    assert {out.kind for out in step.outputs} == {Kind.USER}, "evaluation changes no buffer"
    with torch.no_grad():
        expected = model(**kwargs).loss
    got = run(step, model_values(model, step) | batch_values(kwargs) | key())
    assert relative_error(got[Kind.USER, "0"], expected) < LOSS
    assert all(node.meta["phase"] is Phase.FORWARD for node in step.graph.nodes if node.op == "call_function")


def test_forward_in_training_mode_gives_buffers():
    model, kwargs = zoo.MODELS["resnet"]()
    loss = loss_of(kwargs)
    step = capture_forward(model, lambda m, leaves: (None, [loss(m, leaves)[0]]), batch_of(kwargs))
    assert sum(out.kind is Kind.BUFFER for out in step.outputs) == len(list(model.buffers()))
