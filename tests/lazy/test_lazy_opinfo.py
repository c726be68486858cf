"""A sample of torch's own operator database, recorded by lazy tensors as one program, against eager torch; and values and gradients where branches meet."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from operator_database import op_db
from operators_with_gradients import CASES, CHECKED, with_gradient
from test_lazy_capture import run
from tolerances import RELATIVE, assert_close
from torch.utils import _pytree as pytree

from graphacc.capture import Batch, capture_forward
from graphacc.capture.lazy import LAZY
from graphacc.errors import CaptureError

pytestmark = [pytest.mark.lazy, pytest.mark.filterwarnings("ignore")]  # torch's and numpy's, about the samples themselves

EVERY, SAMPLES = 10, 2
FLOOR = 0.6  # of the sampled entries, what is recorded; the others are refused with a message
UNDETERMINED = (
    "empty", "rand", "normal", "uniform", "bernoulli", "multinomial", "dropout", "cauchy", "exponential", "geometric", "sort", "topk",
    "multi_head_attention", "scaled_dot_product",  # with dropout
    "native_batch_norm",  # what it saves for a backward of its own
    "svd", "eig", "pca_lowrank", "rrelu", "kthvalue", "mode", "median",
    "jiterator",  # on CUDA only
    "corrcoef",  # of two samples, whose gradient is zero but for rounding
)  # fmt: skip
FIXED = ("aminmax", "roll", "norm.fro", "amax", "_chunk_cat", "nn.functional.adaptive_avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.nll_loss")
"""Entries about which torch_xla's own forms are wrong, or end the process."""


def cases(dtype: torch.dtype = torch.float32):
    """(name, function of tensors, tensors)."""
    chosen = [op for i, op in enumerate(op_db()) if i % EVERY == 0 or op.full_name in FIXED]
    for op in chosen:
        if dtype not in op.dtypes or any(word in op.full_name for word in UNDETERMINED):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), 12 if op.full_name in FIXED else SAMPLES):
            flat, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

            def call(*tensors, op=op, flat=flat, structure=structure, places=places):
                values = dict(enumerate(flat)) | dict(zip(places, tensors))
                first, args, kwargs = pytree.tree_unflatten([values[i] for i in range(len(flat))], structure)
                return [x for x in pytree.tree_leaves(op.op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]

            yield op.full_name, call, [flat[i].detach().clone() for i in places]


def is_recorded(call, tensors) -> bool:
    batch = Batch(leaves=tuple(tensors), paths=tuple(f"args[{i}]" for i in range(len(tensors))))
    try:
        capture_forward(torch.nn.Module(), lambda module, given: (None, call(*given)), batch, backend=LAZY)
    except CaptureError:
        return False
    return True


def check_together(found) -> None:
    """All that is recorded of (name, function of tensors, tensors) agrees with eager torch, in one program."""
    expected = [call(*tensors) for _, call, tensors in found]

    def together(*tensors):
        given = iter(tensors)
        return [x for _, call, own in found for x in call(*itertools.islice(given, len(own)))]

    got = iter(run(together, *(x.clone() for _, _, own in found for x in own)))
    for (name, _, _), results in zip(found, expected):
        for i, result in enumerate(results):
            tolerance = RELATIVE[torch.float64] if result.dtype == torch.complex128 else None
            assert_close(next(got), result, tolerance=tolerance, what=f"{name}, result {i}")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_what_is_recorded_agrees_with_eager_torch(dtype):
    torch.manual_seed(0)
    found = list(cases(dtype))
    recorded = [case for case in found if case[2] and is_recorded(*case[1:])]
    check_together(recorded)
    if dtype == torch.float32:
        assert {name for name, _, _ in recorded} >= set(FIXED)
    assert len({name for name, _, _ in recorded}) >= FLOOR * len({name for name, _, _ in found})


def with_gradients(function):
    """Results and the gradients of a loss that weights each element otherwise, of a function of tensors; of integers the results alone."""

    def both(*given):
        with torch.enable_grad():  # a forward alone is captured without
            leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in given]
            values = function(*leaves)
            values = [x.resolve_conj() for x in (values if isinstance(values, list) else [values])]
            real = [torch.view_as_real(x) if x.is_complex() else x for x in values if x.requires_grad]
            wanted = [x for x in leaves if x.requires_grad]
            if not real or not wanted:
                return [x.detach() for x in values]
            loss = sum((x.float() * torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape)).sum() for x in real)
            return [x.detach() for x in values] + [x.resolve_conj() for x in torch.autograd.grad(loss, wanted, allow_unused=True) if x is not None]

    return both


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_of_what_is_recorded(dtype):
    """Also of samples rounded to halves, among which are ties, zeros and the bounds of activations."""
    torch.manual_seed(0)
    found = []
    for name, call, tensors in cases(dtype):
        rounded = [(x * 2).round() / 2 if x.is_floating_point() else x for x in tensors]
        for given in (tensors, rounded):
            try:
                with_gradients(call)(*given)
            except (RuntimeError, NotImplementedError):  # no gradient, or none at such numbers
                continue
            found.append((name, with_gradients(call), given))
    check_together([case for case in found if case[2] and is_recorded(*case[1:])])


BOUNDS = torch.tensor([[-6.0, -3, -3, -1, -1, -0.5], [0, 0, 0, 1, 1, 2.5], [3, 3, 6, -2.5, 0.5, 0], [-0.5, 7.5, -7.5, 1.5, -1.5, 4]])
"""Zeros, ties in rows and columns, and the bounds of activations."""
NOT_FINITE = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1]]).repeat(64, 24)


def other(x):
    return x.flip(-1).roll(3, 0)


AT_BOUNDS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "elu_inplace": lambda x: F.elu_(x * 1, 0.5),
    "celu": lambda x: F.celu(x, 1.3),
    "selu": F.selu,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.5),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "leaky_relu": lambda x: F.leaky_relu(x, -0.2),
    "threshold": lambda x: F.threshold(x, 1.0, 7.0),
    "prelu": lambda x: F.prelu(x, torch.tensor(0.2)),
    "logsigmoid": F.logsigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
}
AT_TIES = {
    "sgn": torch.sgn,
    "abs": torch.abs,
    "pow": lambda x: x**2 + x**0,
    "atan2": lambda x: torch.atan2(x, other(x)),
    "maximum": lambda x: torch.maximum(x, other(x)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(0).values,
    "sort": lambda x: x.sort(1).values,
    "cummax": lambda x: [*x.cummax(1)],
    "cummin": lambda x: [*x.cummin(0)],
    "cumprod": lambda x: x.cumprod(1),
    "logsumexp": lambda x: (x / (x > 0)).logsumexp(1),
    "remainder": lambda x: x % -0.7,
    "floor_divide": lambda x: x + torch.floor_divide(x.detach(), 0.3),
    "div": lambda x: x + torch.div(x, 0.7, rounding_mode="floor"),
    "round": lambda x: x + x.round(),
    "max_pool": lambda x: F.max_pool2d(x.reshape(1, 1, 4, 6), 3, 1, 1),
    "embedding": lambda x: F.embedding(x.detach().long().abs() % 4, x, padding_idx=1, scale_grad_by_freq=True),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "einsum": lambda x: torch.einsum("bi,bj->ij", x, other(x)),
}
IN_HALF_PRECISION = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "elu": F.elu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "var": lambda x: x.var(1),
}
OF_INTEGERS = {
    "shift_right": lambda x: [x >> 1, x >> 63, x >> (x.abs() % 4), torch.bitwise_right_shift(-37, x.abs() % 5)],
    "shift_left": lambda x: [x << 2, x << 64, x << (x.abs() % 4)],
    "division": lambda x: [x // 3, x // -3, torch.div(x, -2, rounding_mode="trunc"), torch.div(x, 0.7, rounding_mode="floor"), x / 2],
    "remainder": lambda x: [x % 3, x % -3, torch.fmod(x, 3)],
    "bits": lambda x: [x & 6, x | -6, x ^ 5, ~x, ~(x > 0), ~x.to(torch.uint8)],
    "cumulative": lambda x: [x.int().cumsum(1), (x > 0).cumsum(1), x.int().cumprod(1), x.int().sum(1), (x > 0).sum(0)],
    "clamp": lambda x: [x.clamp(-2.5, 3.5), x.clamp(-2, 3), x.clamp(min=0.5)],
}
_ROW = torch.tensor([1j, 2 - 1j, -3.0 + 0.5j])
_DOUBLE = _ROW.to(torch.complex128)
OF_COMPLEX = {
    "number": lambda z, y: [z * 1j, 1j * z, z * (2 + 1j), z / (1 + 2j), 1j / (z + 9), z.real * 1j, z + 1j],
    "constant": lambda z, y: [z * _ROW, z @ _ROW.conj(), z * _ROW.conj().imag, z * _DOUBLE, z @ _DOUBLE[None].mH.to(z.dtype)],
    "product": lambda z, y: [z * y.conj(), z @ y.mH, z.reshape(2, 2, 3) @ y.reshape(2, 3, 2), z.reshape(1, 2, 2, 3) @ y.reshape(1, 2, 3, 2)],
    "einsum": lambda z, y: [torch.einsum("bi,ij->bj", z, y[:3]), torch.einsum(z, [0, 1], y, [0, 2], [1, 2]), torch.einsum("bi,bj,bk->ijk", z, y, z.conj())],
    "einsum_operator": lambda z, y: torch.ops.aten.einsum("bi,bj->ij", [z, y.conj()]),
    "quotient": lambda z, y: [z / (y + 9), z.real / (y + 9), z / (y.real + 9), (y + 9).reciprocal()],
    "functions": lambda z, y: [(z * 0.1).tanh(), (z * 0.1).sigmoid(), z.exp(), (z + 9).log(), (z + 9) ** 1j, (z + 9) ** (y * 0.1), z**3, z.abs(), z.angle(), z.sgn()],
    "reductions": lambda z, y: [z.norm(), z.mean(), z.var(1), z.prod(1), z.cumsum(1), torch.linalg.vector_norm(z, dim=1)],
    "mixed": lambda z, y: [torch.addcmul(z, y, z, value=1j), torch.addmm(z[:, :1], z, y.T, beta=1j, alpha=2 - 1j), z.masked_fill(z.real > 0, 1j)],
    "made": lambda z, y: [torch.complex(z.real, y.imag), torch.polar(z.real, y.real), z * torch.full((3,), 1j)],
    "fft": lambda z, y: [torch.fft.fft(z), torch.fft.irfft(torch.fft.rfft(z.real) * torch.fft.rfft(y.real).conj())],
}


def assigned(z, y):
    result = z * 1
    result[0] = y[1].conj()
    result[1] *= 1j
    result.conj()[2].mul_(2j)
    return result


def of_complex(function):
    """A function of two complex tensors as one of one."""
    return lambda z: function(z, other(z))


def test_where_branches_meet():
    """torch_xla's own forms have wrong gradients of elu, others than torch at bounds and ties, and let a NaN vanish."""
    normal = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    check_together([(name, with_gradients(f), [x]) for name, f in (AT_BOUNDS | AT_TIES).items() for x in (BOUNDS, normal)])
    check_together([(name, with_gradients(f), [NOT_FINITE]) for name, f in AT_BOUNDS.items()])


def test_half_precision():
    """torch rounds once, at the end of an operator."""
    normal = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = [(name, with_gradients(f), [x.to(dtype)]) for name, f in IN_HALF_PRECISION.items() for x in (BOUNDS, normal) for dtype in (torch.float16, torch.bfloat16)]
    check_together(found)


def test_integers():
    check_together([(name, with_gradients(f), [(BOUNDS * 3).long()]) for name, f in OF_INTEGERS.items()])


def test_complex_numbers():
    """torch_xla's own forms drop the imaginary parts of numbers and the conjugations of backward."""
    z = torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)))
    check_together([(name, with_gradients(of_complex(f)), [z]) for name, f in (OF_COMPLEX | {"assigned": assigned}).items()])


@pytest.mark.matrix
def test_operators_with_gradients():
    """Those that torch_xla has no HLO for are computed by their rules of the FX capture."""
    names = [name for name in CASES if name != CHECKED]
    functions, tensors = zip(*map(with_gradient, names))
    expected = [result for function, x in zip(functions, tensors) for result in function(x)]

    def together(*given):
        with torch.enable_grad():  # a forward alone is captured without
            return [result for function, x in zip(functions, given) for result in function(x)]

    got = run(together, *tensors)
    for result, wanted, name in zip(got, expected, [name for name in names for _ in range(2)], strict=True):
        assert_close(result, wanted, what=name)
