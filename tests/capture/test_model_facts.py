"""Facts of models that a capture must keep: ties, frozen layers, buffers, constants, hooks, attributes, attention."""

import copy

import pytest
import torch
import torch.nn.functional as F
from capturing import Session, batch_of, batch_values, joint_of, key, loss_of, model_values, operators, run
from tolerances import assert_close, relative_error
from torch import nn

from graphacc.capture import Batch, capture_forward, capture_joint
from graphacc.errors import CaptureError
from graphacc.graph import Kind

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Applied(nn.Module):
    """Calls ``function(self, x)``; `weight` is a parameter, further attributes are set as given."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def check(model, kwargs, step=None):
    """Loss, gradients and buffers equal eager's; returns the graph and its results."""
    reference = copy.deepcopy(model)
    loss = loss_of(kwargs)(reference, list(batch_of(kwargs).leaves))[0]
    loss.backward()
    step = step or joint_of(model, kwargs)
    got = run(step, model_values(model, step) | batch_values(kwargs) | key())
    assert_close(got[Kind.LOSS, "loss"], loss.detach(), what="loss")
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert {target for kind, target in got if kind is Kind.GRAD} == set(expected)
    for name, grad in expected.items():
        assert_close(got[Kind.GRAD, name], grad, what=name)
    for kind, target in got:
        if kind is Kind.BUFFER:
            assert_close(got[kind, target], reference.get_buffer(target), what=target)
    return step, got


def test_tied_weight_is_one_input_with_one_summed_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    step, _ = check(Applied(lambda self, x: self.net(x).square().mean(), net=model), {"x": X})
    (tied,) = [item for item in step.inputs if item.target == "net.0.weight"]
    assert tied.aliases == ("net.2.weight",)


def test_shared_module_and_frozen_parameter():
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    step, _ = check(Applied(lambda self, x: self.b(self.a(x)).square().mean(), a=layer, b=layer), {"x": X})
    trainable = {item.target: item.trainable for item in step.inputs if item.kind is Kind.PARAM}
    assert trainable == {"weight": False, "a.weight": True, "a.bias": False}


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_written_in_place_or_replaced(in_place):
    def forward(self, x):
        if in_place:
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        else:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return ((x @ self.weight) * self.average).sum()

    model = Applied(forward)
    model.register_buffer("average", torch.ones(4))
    model.register_buffer("still", torch.ones(4))
    _, got = check(model, {"x": X})
    assert [target for kind, target in got if kind is Kind.BUFFER] == ["average"]
    assert torch.equal(model.average, torch.ones(4)), "the model itself is untouched"


def test_buffers_carry_over_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = Applied(lambda self, x: self.net(x).square().mean(), net=model)
    reference = copy.deepcopy(wrapped)
    session = Session(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), {"x": X})
    eager = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i in range(3):
        x = X * (i + 1) + i
        eager.zero_grad()
        reference(x).backward()
        eager.step()
        session.run({"x": x})
    assert session.values[Kind.BUFFER, "net.1.num_batches_tracked"] == 3
    for name, buffer in reference.named_buffers():
        assert_close(session.values[Kind.BUFFER, name], buffer, tolerance=1e-4, what=name)


def test_constants_become_inputs_or_fills():
    table = torch.arange(4.0)
    model = Applied(
        lambda self, x: ((x @ self.weight + self.table) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor(3.0)).sum(),
        table=table,
    )
    step, _ = check(model, {"x": X})
    assert list(step.constants) == ["<const>.0", "<const>.1"]
    assert {tuple(value.tolist()) for value in step.constants.values()} == {(0, 1, 2, 3), (1, 2, 3, 4)}


def test_attribute_state_is_refused_and_mere_storing_is_not():
    def moving(self, x):
        self.average = 0.9 * self.average + x.mean()
        return (x @ self.weight).sum() * self.average

    with pytest.raises(CaptureError, match="reads and replaces the tensor 'average'"):
        joint_of(Applied(moving, average=torch.zeros(())), {"x": X})

    def storing(self, x):
        self.last = x @ self.weight
        return self.last.sum()

    model = Applied(storing, last=torch.zeros(3))
    check(model, {"x": X})
    assert torch.equal(model.last, torch.zeros(3))


def test_write_into_a_foreign_tensor_is_refused():
    table = torch.zeros(4)

    def forward(self, x):
        table.add_(1.0)
        return (x @ self.weight).sum()

    with pytest.raises(CaptureError, match="writes into a tensor of shape \\[4\\]"):
        joint_of(Applied(forward), {"x": X})
    assert torch.equal(table, torch.zeros(4))


@pytest.mark.parametrize("through_data", [True, False])
def test_write_into_a_parameter_is_refused(through_data):
    def forward(self, x):
        with torch.no_grad():
            (self.weight.data if through_data else self.weight).clamp_(-0.5, 0.5)
        return (x @ self.weight).sum()

    model = Applied(forward)
    with pytest.raises(CaptureError, match="writes into parameter\\(s\\) weight"):
        joint_of(model, {"x": X})
    assert model.weight.max() > 1


def test_changing_number_is_warned_of():
    def forward(self, x):
        self.calls += 1
        return (x @ self.weight).sum() * self.calls

    model = Applied(forward, calls=0)
    with pytest.warns(UserWarning, match="attribute 'calls' from 0 to 1"):
        joint_of(model, {"x": X})
    assert model.calls == 0


def test_unregistered_parameter_is_refused():
    with pytest.raises(CaptureError, match="no registered parameter"):
        joint_of(
            Applied(lambda self, x: (x @ self.weight + self.hidden[0]).sum(), hidden=[nn.Parameter(torch.ones(4))]), {"x": X}
        )


def test_an_assertion_on_values_is_refused():
    """Torch 2.9 would drop it as dead code."""

    def forward(self, x):
        torch._assert_async((x < 2).all())
        return (x @ self.weight).sum()

    with pytest.raises(CaptureError, match=r"_assert_async.*gives no result[\s\S]*test_model_facts.py.*\n *torch._assert_async"):
        joint_of(Applied(forward), {"x": X})


def test_gradient_hooks_run():
    model = Applied(lambda self, x: (x @ self.weight).square().sum())
    plain = run(joint_of(model, {"x": X}), model_values(model, joint_of(model, {"x": X})) | batch_values({"x": X}) | key())
    model.weight.register_hook(lambda grad: grad * 3)
    step = joint_of(model, {"x": X})
    hooked = run(step, model_values(model, step) | batch_values({"x": X}) | key())
    assert_close(hooked[Kind.GRAD, "weight"], 3 * plain[Kind.GRAD, "weight"])
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match="'weight' has a hook"):
        joint_of(model, {"x": X})


def test_meta_parameters():
    step = joint_of(Applied(lambda self, x: (x @ self.weight).sum()).to("meta"), {"x": X})
    assert step.placeholders[0].meta["val"].device.type == "cpu"


def test_sparse_embedding_gets_a_dense_gradient():
    model = Applied(lambda self, x: (self.table(x) @ self.weight).sum(), table=nn.Embedding(5, 4, sparse=True))
    kwargs = {"x": torch.tensor([1, 1, 3])}
    step = joint_of(model, kwargs)
    got = run(step, model_values(model, step) | batch_values(kwargs) | key())
    assert_close(got[Kind.GRAD, "table.weight"].sum(1), torch.tensor([0.0, 2, 0, 1, 0]) * model.weight.sum())
    assert model.table.sparse


@pytest.mark.parametrize(
    "net, shape",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2), nn.AvgPool2d(2)), (2, 3, 8, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)),
            (2, 3, 8, 8),
        ),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.SiLU(), nn.ConvTranspose1d(4, 3, 2)), (2, 3, 8)),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Softmax(-1), nn.LogSoftmax(0)), (8, 4)),
        (nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.RMSNorm(4), nn.Softplus(), nn.PReLU(), nn.Hardswish()), (8, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (5, 2, 4)),
    ],
    ids=["groupnorm", "instancenorm", "conv1d", "weight norm", "activations", "seq first transformer"],
)
@pytest.mark.default_cases("groupnorm", "weight norm")
def test_layers(net, shape):
    x = torch.randn(shape)
    step, _ = check(
        Applied(lambda self, x: (self.net(x) * torch.linspace(0, 1, x.shape[-1])[:1]).square().mean(), net=net), {"x": x}
    )
    assert not {op for op in operators(step) if op.startswith("prims.") or "as_strided" in op}


@pytest.mark.parametrize("loss", ["plain", "smoothed", "weighted", "summed", "none", "images"])
def test_cross_entropies(loss):
    options = {
        "plain": dict(ignore_index=2),
        "smoothed": dict(label_smoothing=0.1),
        "weighted": dict(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        "summed": dict(reduction="sum"),
        "none": dict(reduction="none"),
        "images": dict(),
    }[loss]
    shape = (8, 4) if loss != "images" else (2, 4, 2, 2)
    target = torch.arange(8) % 4 if loss != "images" else (torch.arange(8) % 4).reshape(2, 2, 2)

    def forward(self, x):
        return (F.cross_entropy((x @ self.weight).reshape(shape), target, **options) * 0.5).sum()

    check(Applied(forward), {"x": X})


MASK = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(2))
Q = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "call, whole",
    [
        (lambda q, k, w: F.scaled_dot_product_attention(q, k, k, is_causal=True), True),
        (lambda q, k, w: F.scaled_dot_product_attention(q, k[:, :2], k[:, :2], enable_gqa=True, scale=0.3), True),
        (lambda q, k, w: F.scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(6, 6).tril().bool()), True),
        (lambda q, k, w: F.scaled_dot_product_attention(q[0], k[0], k[0], attn_mask=MASK), True),
        (lambda q, k, w: F.scaled_dot_product_attention(q, k, k, attn_mask=(w[:1, :1] * torch.ones(6, 6))), False),
        (lambda q, k, w: F.scaled_dot_product_attention(q[None], k[None], k[None]), False),
    ],
    ids=["causal", "grouped", "bool mask", "3-d", "learned bias", "5-d"],
)
def test_attention(call, whole):
    model = Applied(lambda self, x: (call(x @ self.weight, x * 0.5, self.weight) ** 2).sum())
    step, _ = check(model, {"x": Q})
    assert ("graphacc.sdpa.default" in operators(step)) == whole


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_in_evaluation_with_padding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    batch = Batch(leaves=(x, padding), paths=("args[0]", "args[1]"))
    step = capture_forward(encoder, lambda m, leaves: (None, [m(leaves[0], src_key_padding_mask=leaves[1])]), batch)
    got = run(step, model_values(encoder, step) | {(Kind.BATCH, "args[0]"): x, (Kind.BATCH, "args[1]"): padding} | key())
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
    assert relative_error(got[Kind.USER, "0"][0], expected[0]) < 2e-5
    assert relative_error(got[Kind.USER, "0"][1, :3], expected[1, :3]) < 2e-5
    assert torch.backends.mha.get_fastpath_enabled()


def test_further_outputs_are_user_outputs():
    model = Applied(lambda self, x: x @ self.weight)

    def forward(m, leaves):
        out = m(*leaves)
        return out.sum(), [out, leaves[0]]

    step = capture_joint(model, forward, batch_of({"x": X}))
    assert [(out.kind, out.target) for out in step.outputs] == [
        (Kind.LOSS, "loss"), (Kind.USER, "0"), (Kind.USER, "1"), (Kind.GRAD, "weight"),
    ]  # fmt: skip


def test_layer_drop_switched_off():
    def forward(self, x):
        if torch.rand([]) < self.layerdrop:
            return x.sum()
        return (x @ self.weight).sum()

    check(Applied(forward, layerdrop=0.0), {"x": X})
    with pytest.raises(CaptureError, match="value of a tensor"):
        joint_of(Applied(forward, layerdrop=0.1), {"x": X})
