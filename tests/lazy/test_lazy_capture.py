"""What lazy capture records, what it refuses, and that it leaves the process as it was."""

import copy
import os
import pathlib
import resource
import subprocess
import sys

import lazy_models
import pytest
import torch
import torch.nn.functional as F
from lazy_models import DepthSchedule, NumpySchedule, ReadsBatch
from tolerances import assert_close
from torch import nn
from training import assert_parity, compiled, train

import graphacc
from graphacc.capture import Batch, capture_forward, capture_joint
from graphacc.capture.lazy import LAZY
from graphacc.errors import CaptureError
from graphacc.graph import Kind
from graphacc.loop import fallback

pytestmark = pytest.mark.lazy


def capture(model: nn.Module, *leaves):
    batch = Batch(leaves=leaves, paths=tuple(f"args[{i}]" for i in range(len(leaves))))
    return capture_joint(model, lambda module, given: (module(*given).sum(), []), batch, backend=LAZY)


def run(function, *tensors):
    """`function` of tensors, by lazy capture and JAX on one device; returns a list of tensors."""
    step = capture_forward(
        nn.Module(),
        lambda module, given: (None, list(function(*given))),
        Batch(leaves=tensors, paths=tuple(f"args[{i}]" for i in range(len(tensors)))),
        backend=LAZY,
    )
    from graphacc.runtime import Program, make_mesh, select_devices, to_device, to_torch

    mesh = make_mesh(graphacc.Strategy(), select_devices(1))
    program = Program.build(step, mesh, cache_dir=None, fast_compile=True, memory_plan="xla")
    fed = iter(tensors)
    feeds = []
    for item in step.inputs:
        constant = step.constants.get(item.target)
        key = torch.tensor([1, 2]) if item.kind is Kind.KEY else None
        feeds.append(to_device(next(value for value in (constant, key) if value is not None) if item.kind is not Kind.BATCH else next(fed), item, mesh))
    return [to_torch(array, item) for array, item in zip(program(*feeds), step.outputs)]


def test_signature():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    step = capture(model, torch.randn(5, 4))
    assert [(item.kind, item.target, item.trainable) for item in step.inputs] == [
        (Kind.PARAM, "0.weight", True),
        (Kind.PARAM, "0.bias", False),
        (Kind.PARAM, "1.weight", True),
        (Kind.PARAM, "1.bias", True),
        (Kind.BUFFER, "1.running_mean", False),
        (Kind.BUFFER, "1.running_var", False),
        (Kind.BUFFER, "1.num_batches_tracked", False),
        (Kind.BATCH, "args[0]", False),
        (Kind.KEY, "key", False),
    ]
    assert [(out.kind, out.target) for out in step.outputs] == [
        (Kind.LOSS, "loss"),
        *((Kind.GRAD, name) for name in ("0.weight", "1.weight", "1.bias")),
        *((Kind.BUFFER, name) for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")),
    ]


def test_unchanged_buffers_are_no_outputs():
    model = nn.BatchNorm1d(3).eval()
    step = capture(model, torch.randn(5, 3))
    assert not [out for out in step.outputs if out.kind is Kind.BUFFER]


def test_parameters_need_no_memory():
    """A model of 8 GB, which has no data at all, is captured; what the process holds grows by less than a tenth of that."""
    capture(nn.Linear(2, 2), torch.randn(1, 2))  # starts torch_xla
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(8)))
    step = capture(model, torch.empty(4, 16384, device="meta"))
    assert len([out for out in step.outputs if out.kind is Kind.GRAD]) == 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800_000  # KB


def test_dtypes_are_promoted_as_torch_does():
    def function(x, half, number):
        return x * number, half + number, torch.where(x > 0, x, number), half * x[0], (x > number).int() + number, x.pow(number)

    given = torch.randn(3, 4).abs(), torch.randn(4).bfloat16(), torch.tensor(0.37, dtype=torch.float64)
    for got, expected in zip(run(function, *given), function(*given), strict=True):
        assert_close(got, expected)


def test_writes_into_views_are_kept():
    def function(x):
        zeros = torch.zeros(4, 6)
        zeros[1:3, ::2] += x[1:3, ::2]
        zeros.view(-1)[5:9].fill_(7.0)
        zeros.t()[0].mul_(3.0)
        counts = torch.arange(6).reshape(2, 3)
        counts[0].add_(counts[1])
        stacked = torch.stack([zeros[0], x[0]])
        stacked[1].clamp_(max=0.0)
        x[x > 0.5] = 0.25
        x.diagonal().zero_()
        return zeros, counts, stacked, x, torch.eye(3).fill_diagonal_(5.0)

    x = torch.randn(4, 6)
    for got, expected in zip(run(function, x.clone()), function(x.clone()), strict=True):
        assert_close(got, expected)


def test_products_keep_their_batch_dims():
    def function(q, k):
        scores = q @ k.transpose(-1, -2)
        scores[0, 0] = 1.0
        return scores, torch.matmul(scores, k), torch.matmul(q[:, :1], k.transpose(-1, -2))

    given = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    for got, expected in zip(run(function, *given), function(*given), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("order", [float("inf"), 0, 1, 2, 2.5])
def test_norms(order):
    """torch_xla's own forms are wrong (infinity) or run on the host (0), which reads the placeholder."""
    x = torch.randn(3, 4)
    got = run(lambda x: [torch.norm(x, p=order), torch.linalg.vector_norm(x, order, dim=1)], x)
    for value, expected in zip(got, (torch.norm(x, p=order), torch.linalg.vector_norm(x, order, dim=1)), strict=True):
        assert_close(value, expected)


def test_an_empty_list_of_dims_is_all_dims():
    def function(x):
        norms = x.norm(), torch.norm(x, dim=()), torch.linalg.vector_norm(x, 2, ())
        return *norms, x.amax(), x.amin(keepdim=True), x.sum(()), x.mean([]), *torch.var_mean(x, ()), x.nansum(()), x.sum(0).sum([])

    x = torch.randn(3, 4)
    for got, expected in zip(run(function, x), function(x), strict=True):
        assert_close(got, expected)


def test_new_tensors_and_views_of_dims_of_size_1():
    def function(x):
        new = x.new_tensor([1.0, 2.0, 3.0])
        new[0] = 5.0
        shifted = x.new_tensor(1.0) + x
        return new, shifted.select(5, 0).select(3, 0), torch.nn.functional.adaptive_avg_pool2d(x[..., 0, :, 0], (9, 4)), torch.roll(x[:0], 1, 0)

    x = torch.randn(2, 3, 9, 1, 7, 2)
    for got, expected in zip(run(function, x), function(x), strict=True):
        assert_close(got, expected)


def test_counts():
    x = torch.tensor([[0.0, 2.0, -1.0], [0.0, 0.0, 3.0]])
    got = run(lambda x: [torch.count_nonzero(x), torch.count_nonzero(x, 1), torch.count_nonzero(x, (0, 1))], x)
    for value, expected in zip(got, [torch.tensor(3), torch.tensor([2, 1]), torch.tensor(3)], strict=True):
        assert torch.equal(value, expected) and value.dtype == expected.dtype


def test_values_that_are_known_may_be_read():
    def function(x):
        mask = torch.tensor([True, False, True])
        kept = torch.arange(3)[mask]
        assert kept.tolist() == [0, 2] and bool(mask.any())
        return x[:, kept], x.cpu() * 2, x.to("cpu", torch.float64)

    x = torch.randn(2, 3)
    for got, expected in zip(run(function, x), (x[:, [0, 2]], x * 2, x.double()), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * x.sum().item(), "(?s)test_lazy_capture.py.*x.sum.*remedy: choose with torch.where"),
        (lambda x: x * float(torch.rand(())), "(?s)value of a tensor"),
        (lambda x: x[x > 0], "(?s)aten.index.Tensor.*keep the full shape"),
        (lambda x: x * x.nonzero().sum(), "(?s)aten.nonzero.*keep the full shape"),
        (lambda x: x * torch.from_numpy(x.detach().numpy()), "(?s)NumPy"),
        (lambda x: x * len(str(x)), "(?s)value of a tensor"),
        (lambda x: x + torch.empty(3).random_(), "random operator"),
        (lambda x: x.t().as_strided((3,), (1,)), "as_strided depends on how a tensor lies in memory"),
        (torch.special.airy_ai, "torch_xla has no HLO for aten.special_airy_ai"),
    ],
    ids=["item", "random item", "mask", "nonzero", "numpy", "print", "random_", "as_strided", "host operator"],
)
def test_what_cannot_be_recorded_is_refused(function, message):
    with pytest.raises(graphacc.CaptureError, match=message):
        run(function, torch.randn(3, 3))


def test_tensors_from_outside():
    constant = torch.randn(40, 3)
    assert_close(run(lambda x: [x @ constant.t()], torch.ones(2, 3))[0], torch.ones(2, 3) @ constant.t())
    with pytest.raises(graphacc.CaptureError, match="no registered parameter"):
        weight = nn.Parameter(torch.randn(3))
        run(lambda x: [x * weight], torch.ones(2, 3))

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.state = nn.Linear(3, 3), torch.zeros(3)

        def forward(self, x):
            self.state = self.state + 1
            return self.linear(x) + self.state

    with pytest.raises(graphacc.CaptureError, match="'state', which is no buffer"):
        capture(Keeps(), torch.ones(2, 3))


def test_control_flow_on_the_batch_is_run_by_pytorch(caplog):
    reference = ReadsBatch()
    model = compiled(copy.deepcopy(reference), None)
    batches = [lazy_models.vectors(seed) for seed in range(2)]
    assert_parity(reference, model, train(reference, batches), train(model, batches), by_pytorch=True)
    assert "lazy tensors was tried too" in caplog.text and "lazy_models.py" in caplog.text and "logits.mean" in caplog.text


def test_without_torch_xla_pytorch_runs_what_fx_refuses(monkeypatch, caplog):
    monkeypatch.setattr(fallback, "installed", lambda: False)
    reference = NumpySchedule()
    model = compiled(copy.deepcopy(reference), None)
    batches = [lazy_models.vectors(seed) for seed in range(2)]
    assert_parity(reference, model, train(reference, batches), train(model, batches), by_pytorch=True)
    assert 'capture="lazy" may follow' in caplog.text and "numpy" in caplog.text


def test_fx_alone_does_not_fall_back():
    model = compiled(NumpySchedule(), None, capture="fx")
    with pytest.raises(graphacc.CaptureError, match="numpy"):
        train(model, [lazy_models.vectors(0)])


def test_axes_that_hlo_does_not_have():
    with pytest.raises(graphacc.StrategyError, match="pp need a graph of operators"):
        graphacc.compile(nn.Linear(2, 2), strategy="pp=2,microbatches=2", devices=2, capture="lazy")


class Scheduled(torch.optim.Optimizer):
    """An optimizer of one's own whose step reads a schedule out of a tensor, which a trace on fake tensors cannot."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        factor = torch.linspace(1.0, 0.5, 2)[1].item()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * factor * group["lr"])


def test_an_optimizer_that_fx_cannot_trace():
    batches = [lazy_models.vectors(seed) for seed in range(3)]
    reference = DepthSchedule()
    model = compiled(copy.deepcopy(reference), None, capture="lazy")
    expected = train(reference, batches, lambda model: Scheduled(model.parameters()))
    assert_parity(reference, model, expected, train(model, batches, lambda model: Scheduled(model.parameters())))


@pytest.mark.matrix
def test_importing_torch_xla_leaves_the_process_as_it_was():
    code = (
        "import os, torch; before = dict(os.environ); default = torch.get_default_device();"
        "torch.ones(1, requires_grad=True).sum().backward();"  # autograd's threads are made before torch_xla comes
        "from graphacc.capture import Batch, capture_joint; from graphacc.capture.lazy import LAZY;"
        "import sys; assert 'torch_xla' not in sys.modules;"
        "capture_joint(torch.nn.Linear(2, 2), lambda m, x: (m(x[0]).sum(), []), Batch(leaves=(torch.ones(1, 2),), paths=('x',)), backend=LAZY);"
        "assert 'torch_xla' in sys.modules and dict(os.environ) == before and torch.get_default_device() == default;"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, 'a JAX backend was started';"
        "print('clean')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"TPU_SKIP_MDS_QUERY": "1"})
    assert result.stdout.strip() == "clean", result.stderr


@pytest.mark.matrix
def test_importing_torch_xla_replaces_nothing_of_torch():
    """torch_xla's import replaces nn.GRU, clip_grad_norm_, new_group and settings of torch.compile for the whole process."""
    job = pathlib.Path(__file__).with_name("process_state.py")
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1"}
    result = subprocess.run([sys.executable, "-W", "ignore", job], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_the_second_result_of_an_operator_is_an_index():
    """index_select and embedding on the places of a sort, as pack_padded_sequence has them, ended the process."""

    def function(x, lengths):
        order = torch.sort(lengths, descending=True)[1]
        return [x.index_select(0, order), torch.nn.functional.embedding(lengths.topk(2)[1], x), x[lengths[:, None].min(1)[1]]]

    x, lengths = torch.randn(4, 6), torch.tensor([3, 7, 1, 5])
    for got, expected in zip(run(function, x, lengths), function(x, lengths), strict=True):
        assert torch.equal(got, expected)


class Packed(torch.nn.Module):
    """Sequences of several lengths through a recurrent layer, whose rows without padding are as many as the lengths sum up to."""

    def __init__(self, kind, enforce_sorted):
        super().__init__()
        self.layer, self.head = kind(6, 8, 2, batch_first=True, bidirectional=True), torch.nn.Linear(16, 5)
        self.enforce_sorted = enforce_sorted

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        return self.head(self.layer(packed)[0].data)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
@pytest.mark.parametrize("kind, enforce_sorted", [(torch.nn.LSTM, False), (torch.nn.GRU, True)])
def test_packed_sequences_are_run_by_pytorch(kind, enforce_sorted):
    """Their lengths decide the shapes; what both captures refuse gives PyTorch's losses, and never ends the process."""
    torch.manual_seed(0)
    reference = Packed(kind, enforce_sorted)
    model = graphacc.compile(copy.deepcopy(reference), devices=1, cache_dir=None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for lengths in ([7, 5, 3, 1], [7, 7, 2, 2]):
        x, losses = torch.randn(4, 7, 6), []
        for each, optimizer in zip((reference, model), optimizers):
            loss = each(x, torch.tensor(lengths if enforce_sorted else lengths[::-1])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-6
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(reference.state_dict().values(), model.state_dict().values()))
    assert any("runs by PyTorch" in reason for reason in model._graphacc_engine.by_pytorch.counts)


def test_complex_numbers_as_pairs_can_be_permuted():
    """torch_xla takes their shape for the complex tensor's, so that XLA ended the process."""
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))

    def pairs(x):
        return torch.view_as_real(torch.fft.rfft(x).transpose(1, 2)).transpose(1, 2).contiguous()

    (found,) = run(lambda x: (pairs(x),), x)
    assert_close(found, pairs(x))


@torch.library.custom_op("graphacc_tests::rows_written", mutates_args=())
def rows_written(x: torch.Tensor) -> torch.Tensor:
    """Its code writes into tensors and views of its own."""
    found, doubled = torch.zeros_like(x), x.clone()
    found[0].add_(1)
    found[:, 1:].copy_(x[:, :-1])
    found.t()[0] = x.sum()
    return found + doubled.mul_(2)


@rows_written.register_fake
def _(x):
    return torch.empty_like(x)


def test_writes_in_the_code_of_a_custom_operator():
    x = torch.randn(3, 4)
    (got,) = run(lambda x: [rows_written(x * 2) + rows_written(x.t()).t()], x)
    assert_close(got, rows_written(x * 2) + rows_written(x.t().contiguous()).t())


def test_ctc_loss():
    log_probs, targets = torch.randn(12, 3, 6).log_softmax(2), torch.randint(1, 6, (3, 4))
    lengths = torch.tensor([12, 10, 9]), torch.tensor([4, 2, 3])

    @torch.enable_grad()
    def loss_and_gradient(log_probs, *rest):
        log_probs = log_probs.detach().requires_grad_()
        loss = F.ctc_loss(log_probs, *rest)
        return [loss.detach(), *torch.autograd.grad(loss, log_probs)]

    for got, expected in zip(run(loss_and_gradient, log_probs, targets, *lengths), loss_and_gradient(log_probs, targets, *lengths), strict=True):
        assert_close(got, expected)


WITH_OPTIONS = {
    "logit": (lambda x: torch.logit(x, eps=0.1), (3, 4)),
    **{f"diagonal {dims}": (lambda x, dims=dims: x.diagonal(1, *dims) * 2.0, (3, 4, 5)) for dims in ((0, 1), (1, 0), (0, 2), (2, 1), (-2, -1))},
    "diagonal written": (lambda x: _diagonal_written(x), (3, 4, 5)),
    **{
        f"{mode} by {scale}": (lambda x, mode=mode, scale=scale: F.interpolate(x, scale_factor=scale, mode=mode), (2, 3, 4, 4))
        for mode in ("nearest", "bilinear")
        for scale in (2, 1.7, 0.6)
    },
    "singular values": (torch.linalg.svdvals, (2, 3, 3)),
    "spectrum": (lambda x: torch.fft.fft(x).abs(), (3, 4)),
    "half a spectrum": (lambda x: torch.fft.ihfft(x).abs(), (3, 4)),  # of the shape of the one before torch_xla remembers
}


def _diagonal_written(x):
    x = x.clone()
    x.diagonal(0, 0, 1).mul_(2.0)
    return x


def test_options_that_torch_xla_ignores():
    """Values and gradients."""

    @torch.enable_grad()
    def with_gradient(function, x):
        x = x.detach().requires_grad_()
        result = function(x)
        weights = torch.arange(result.numel(), dtype=x.dtype, device=x.device).reshape(result.shape)
        return [result.detach(), *torch.autograd.grad((result * weights).sum(), x)]

    for name, (function, shape) in WITH_OPTIONS.items():
        x = torch.randn(shape)
        for got, expected in zip(run(lambda x, function=function: with_gradient(function, x), x), with_gradient(function, x), strict=True):
            assert_close(got, expected, what=name)


class Autocast(nn.Module):
    """Its `tolist` is what torch.fx cannot follow where no answers are given: with `batch="local"`."""

    def __init__(self, enabled: bool = True):
        super().__init__()
        self.linear, self.enabled = nn.Linear(8, 8), enabled

    def forward(self, x):
        scale = torch.linspace(1.0, 0.5, 2).tolist()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = self.linear(x)
        return y * scale[1]


def test_autocast_in_the_model_is_refused():
    with pytest.raises(CaptureError, match=r"(?s)y = self\.linear\(x\).*torch\.autocast.*no effect on lazy tensors"):
        compiled(Autocast(), None, capture="lazy")(torch.randn(4, 8))
    assert compiled(Autocast(enabled=False), None, capture="lazy")(torch.randn(4, 8)).dtype == torch.float32


@pytest.mark.parametrize("around", [False, True])
def test_pytorch_runs_a_model_that_lazy_tensors_would_run_without_autocast(around):
    reference, x = Autocast(), torch.randn(4, 8)
    model = compiled(copy.deepcopy(reference), "dp=1", devices=1, batch="local")
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        got, expected = model(x), reference(x)
    assert (got.dtype, expected.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(got, expected) and model._graphacc_engine.by_pytorch.counts


@pytest.mark.parametrize("invert", [torch.inverse, torch.linalg.inv, lambda x: torch.linalg.solve(x, torch.ones(3))])
def test_matrices_are_checked_as_in_pytorch(invert, caplog):
    """A program would go on with NaN."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(2 * torch.eye(3))

        def forward(self, x):
            return invert(self.weight * x).square().mean()

    model = compiled(Model(), None, capture="auto")
    model(torch.ones(3, 3) + torch.eye(3)).backward()
    assert "one with torch.linalg.solve_ex, inv_ex and cholesky_ex, which do not check, is compiled" in caplog.text
    with pytest.raises(torch.linalg.LinAlgError, match="singular|is zero"):
        model(torch.zeros(3, 3))
