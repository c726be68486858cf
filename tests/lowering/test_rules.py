"""The meaning of single rules where torch and XLA differ, against eager torch."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers_lowering import check_lowering, run_lowered, step_graph, to_array, to_tensor
from operators_with_gradients import CASES, with_gradient
from selection import with_matrix
from tolerances import relative_error

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.capture.decompositions import decompositions
from graphacc.capture.functions import WrittenOut
from graphacc.errors import LoweringError
from graphacc.lowering.rules.matmul import PIECE, in_pieces, padded_product, padding

NAN, INF = float("nan"), float("inf")
aten = torch.ops.aten

INTEGERS = torch.tensor([-7, -6, -1, 0, 1, 6, 7, 2**40])
DIVISORS = torch.tensor([2, -4, 3, 5, -1, 4, -2, 3])
FLOATS = torch.tensor([-7.5, -0.0, 0.0, 2.5, NAN, INF, -INF, 1e-30])
OTHERS = torch.tensor([2.0, 3.0, -1.5, 0.0, 1.0, 2.0, -3.0, NAN])


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
def test_division_rounds_as_torch(mode):
    check_lowering(lambda a, b: torch.div(a, b, rounding_mode=mode), INTEGERS, DIVISORS)
    check_lowering(lambda a, b: torch.div(a, b, rounding_mode=mode), FLOATS, OTHERS)


@pytest.mark.parametrize("function", [torch.remainder, torch.fmod, torch.floor_divide])
def test_remainders_take_the_sign_that_torch_gives(function):
    check_lowering(function, INTEGERS, DIVISORS)
    check_lowering(function, FLOATS, OTHERS)


def test_integer_powers():
    base = torch.tensor([-1, -1, 1, 2, 3, 0, 5])
    check_lowering(torch.pow, base, torch.tensor([3, -2, -5, -1, 4, 0, 2]))
    for exponent in (0, 1, 2, 3, 7):
        check_lowering(lambda x: x**exponent, base)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2, 3, -1, -2, 1.7])
def test_float_powers(exponent):
    check_lowering(lambda x: x**exponent, FLOATS.abs())


def test_shifts_beyond_the_width():
    x, shift = torch.tensor([5, -5, 1, -1]), torch.tensor([1, 70, 64, 3])
    check_lowering(torch.bitwise_left_shift, x, shift)
    check_lowering(torch.bitwise_right_shift, x, shift)
    for dtype in (torch.uint8, torch.int8):
        packed = torch.tensor([255, 128, 127, 16, 1]).to(dtype)
        check_lowering(torch.bitwise_right_shift, packed, torch.tensor([4, 7, 1, 9, 0], dtype=dtype))
        check_lowering(torch.bitwise_left_shift, packed, torch.tensor([4, 1, 1, 9, 0], dtype=dtype))


@pytest.mark.parametrize("function", [torch.gcd, torch.lcm])
def test_divisors_of_the_least_integer(function):
    """`jnp.gcd` does not end there."""
    for dtype in (torch.int8, torch.int64):
        least = torch.iinfo(dtype).min
        x = torch.tensor([12, -8, 0, 0, 7, least, least, 3, least], dtype=dtype)
        check_lowering(function, x, torch.tensor([18, 12, 0, 5, -7, 6, 0, least, least], dtype=dtype))


def test_an_index_without_dims_copies_a_row():
    """torch's decomposition puts [1, 3] into [3]."""
    x, values = torch.zeros(4, 3), torch.tensor([[1.0, 2.0, 3.0]])
    check_lowering(lambda x, i, v: x.index_copy(0, i, v), x, torch.tensor(2), values)
    check_lowering(lambda x, i, v: x.index_put((i,), v, accumulate=True), x, torch.tensor([2, 2]), values)


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.fmax, torch.fmin])
def test_nan_in_elementwise_extremes(function):
    check_lowering(function, FLOATS, OTHERS)


@pytest.mark.parametrize(
    "function", [torch.amax, torch.amin, torch.max, torch.min, torch.argmax, torch.argmin, torch.median, torch.cummax, torch.sort]
)
def test_nan_in_reductions(function):
    x = torch.tensor([[1.0, NAN, 3.0], [4.0, 2.0, 2.0], [-INF, INF, 0.0]])
    check_lowering(lambda x: function(x, dim=1), x)


def test_topk_takes_nan_as_the_largest():
    x = torch.tensor([3.0, NAN, 5.0, -INF])
    check_lowering(lambda x: torch.topk(x, 2), x)
    check_lowering(lambda x: torch.topk(x, 3, largest=False), x)


def test_rounding_is_half_to_even():
    check_lowering(torch.round, torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]))


def test_promotion_follows_torch():
    check_lowering(lambda x: x + 1.5, torch.tensor([1, 2]))
    check_lowering(lambda x: x > 1.5, torch.tensor([1, 2]))
    check_lowering(lambda x, y: x == y, torch.tensor([1, 2**24 + 1]), torch.tensor(2.0**24))
    check_lowering(lambda x, y: x * y, torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor(1.001))
    check_lowering(lambda x: x.sum(), torch.tensor([True, True]))
    check_lowering(lambda x: x.mean(dtype=torch.float64), torch.tensor([1, 2]))


def test_bf16_and_a_number_are_rounded_once():
    x = torch.linspace(0.5, 2, 200).bfloat16()
    check_lowering(lambda x: x * 1.001 - 0.001, x, tolerance=0.0)


def test_sort_keeps_the_order_of_equals():
    x = torch.tensor([2, 1, 2, 1, 0, 2])
    for descending in (False, True):
        check_lowering(lambda x: torch.sort(x, stable=True, descending=descending), x)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate):
    x = torch.zeros(4, 3, 5)
    rows, columns = torch.tensor([[0, 2], [3, -1]]), torch.tensor([1, 0])
    unique = [(rows, columns), (rows,), (None, columns), (rows, None, columns), (None, None, torch.tensor([4, 2, 0]))]
    for index in unique if not accumulate else [*unique, (torch.tensor([1, 1, 1]), torch.tensor([0, 0, 2]))]:
        if accumulate is False and index[0] is rows:
            index = (torch.tensor([[0, 2], [3, 1]]), *index[1:])
        shape = aten.index.Tensor(x, list(index)).shape
        for values in (torch.randn(shape), torch.randn(shape[-1:]), torch.tensor(2.0)):
            check_lowering(lambda x, v: aten.index_put.default(x, list(index), v, accumulate), x, values)


def test_index_put_with_a_mask():
    x, mask = torch.zeros(4, 3), torch.tensor([True, False, True, True])
    for values in (torch.tensor(2.0), torch.randn(3), torch.randn(3, 3)):
        check_lowering(lambda x, m, v: aten.index_put.default(x, [m], v), x, mask, values)
    check_lowering(lambda x, m, v: aten.index_put.default(x, [m], v, True), x, torch.rand(4, 3) > 0.5, torch.tensor(2.0))
    check_lowering(lambda x, m, v: aten.index_put.default(x, [m], v, True), x, torch.zeros(4, dtype=torch.bool), torch.randn(0, 3))


def test_scatter_forms():
    x, source = torch.randn(3, 5), torch.randn(3, 5)
    one, two = torch.tensor([[1], [4], [0]]), torch.tensor([[0, 2], [1, 3]])
    for index in (one, two):
        check_lowering(lambda x, i: x.scatter(1, i, 2.0), x, index)
        check_lowering(lambda x, i, s: x.scatter(1, i, s), x, index, source)
        check_lowering(lambda x, i, s: x.scatter_add(1, i, s), x, index, source)
        check_lowering(lambda x, i: x.gather(1, i), x, index)


def test_embedding_gradient_sums_repeated_rows_and_skips_padding():
    grad, index = torch.randn(2, 3, 4), torch.tensor([[0, 1, 1], [5, 0, 2]])
    for dtype in (torch.float32, torch.bfloat16):
        check_lowering(lambda g, i: aten.embedding_dense_backward(g, i, 6, 2, False), grad.to(dtype), index)
    check_lowering(lambda g, i: aten.embedding_dense_backward(g, i, 6, -1, True), grad, index)


CONVOLUTIONS = [
    # input, weight, stride, padding, dilation, transposed, output padding, groups
    ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 4, 9, 8), (6, 2, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
    ((2, 4, 7, 7), (4, 1, 3, 3), [1, 1], [2, 2], [2, 2], False, [0, 0], 4),
    ((2, 4, 5, 6), (4, 3, 3, 2), [2, 3], [1, 0], [1, 1], True, [1, 2], 1),
    ((2, 4, 5, 6), (4, 3, 3, 2), [2, 1], [1, 1], [2, 1], True, [1, 0], 2),
    ((1, 2, 5, 5, 5), (3, 2, 2, 3, 2), [2, 1, 1], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_its_gradients(case):
    x, weight, *config = case
    x, weight = torch.randn(x), torch.randn(weight)
    channels = weight.shape[1] * config[-1] if config[3] else weight.shape[0]
    bias = torch.randn(channels)
    check_lowering(lambda x, w, b: aten.convolution(x, w, b, *config), x, weight, bias)
    grad = torch.randn(aten.convolution(x, weight, bias, *config).shape)
    check_lowering(lambda g, x, w: aten.convolution_backward(g, x, w, [channels], *config, [True] * 3), grad, x, weight)
    check_lowering(lambda g, x, w: aten.convolution_backward(g, x, w, [channels], *config, [False, True, False]), grad, x, weight)


@pytest.mark.parametrize(
    "config", [(3, 2, 1, 1, False), (2, 2, 0, 1, True), ([3, 2], [1, 2], [1, 0], [2, 1], False), (3, 2, 1, 1, True)]
)
def test_max_pool_and_its_gradient(config):
    x = torch.randn(2, 3, 9, 10)
    x[0, 0, 2, 3] = NAN
    check_lowering(lambda x: aten.max_pool2d_with_indices(x, *config), x)
    out, indices = aten.max_pool2d_with_indices(x, *config)
    check_lowering(lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *config, i), torch.randn_like(out), x, indices)


@pytest.mark.parametrize(
    "config", [(3, 2, 1, False, True, None), (3, 2, 1, True, False, None), (2, 2, 0, True, True, 3), (7, 3, 3, True, True, None)]
)
def test_avg_pool_and_its_gradient(config):
    x = torch.randn(2, 3, 9, 10)
    config = ([config[0]] * 2, [config[1]] * 2, [config[2]] * 2, *config[3:])
    check_lowering(lambda x: aten.avg_pool2d(x, *config), x)
    check_lowering(lambda g, x: aten.avg_pool2d_backward(g, x, *config), torch.randn_like(aten.avg_pool2d(x, *config)), x)


@pytest.mark.parametrize("kernel, stride, padding, ceil_mode", [(64, 64, 0, True), (9, 4, 4, False), ((6, 20), (1, 20), (3, 2), True), (12, 1, 6, False)])
def test_averages_over_windows_that_exceed_the_plane(kernel, stride, padding, ceil_mode):
    """EfficientNet averages everything by a kernel of its number of channels."""
    x = torch.randn(2, 3, 9, 11)
    x[0, 0, 8, 10] = torch.inf
    pool = functools.partial(F.avg_pool2d, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=False)
    check_lowering(pool, x)

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(pool(x).sin().sum(), x)[0]

    check_lowering(gradient, x.clamp(max=3))


@pytest.mark.parametrize("kernel, options", [((3, 2), dict(dilation=(1, 2), padding=(2, 1), stride=(2, 1))), (9, dict(padding=4, stride=3)), (1, dict(stride=4))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_and_their_gradient(kernel, options, dtype):
    x = torch.randn(2, 3, 10, 12).to(dtype)
    patches = functools.partial(F.unfold, kernel_size=kernel, **options)
    check_lowering(patches, x)
    check_lowering(lambda columns: F.fold(columns, (10, 12), kernel, **options), torch.randn(patches(x).shape).to(dtype))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (4, 7)])
def test_adaptive_pools_and_their_gradients(size):
    x = torch.randn(2, 3, 8, 10)
    check_lowering(lambda x: aten._adaptive_avg_pool2d(x, size), x)
    check_lowering(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), torch.randn(2, 3, *size), x)
    check_lowering(lambda x: aten.adaptive_max_pool2d(x, size), x)
    out, indices = aten.adaptive_max_pool2d(x, size)
    check_lowering(lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i), torch.randn_like(out), x, indices)


def test_upsampling_gradients():
    grad, size, inner = torch.randn(2, 3, 7, 9), [7, 9], [2, 3, 4, 5]
    check_lowering(lambda g: aten.upsample_nearest2d_backward(g, size, inner), grad)
    for align in (False, True):
        check_lowering(lambda g: aten.upsample_bilinear2d_backward(g, size, inner, align), grad)
        check_lowering(lambda g: aten.upsample_bicubic2d_backward(g, size, inner, align), grad)


def test_grid_sampler_gradient():
    x, grid = torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2) * 1.8 - 0.9
    grad = torch.randn(2, 3, 4, 4)
    check_lowering(lambda g, x, grid: aten.grid_sampler_2d_backward(g, x, grid, 0, 0, False, [True, True]), grad, x, grid)
    for wanted, mask in enumerate(([True, False], [False, True])):
        check_lowering(lambda g, x, grid: aten.grid_sampler_2d_backward(g, x, grid, 0, 0, False, mask)[wanted], grad, x, grid)


def test_as_strided_of_a_dense_input():
    x = torch.arange(24.0).reshape(4, 6)
    check_lowering(lambda x: x.as_strided((4, 2), (6, 1), 3), x)  # columns 3 and 4: a slice
    check_lowering(lambda x: x.as_strided((2, 12), (12, 1)), x)  # a reshape
    check_lowering(lambda x: x.as_strided((5, 4), (4, 1), 2), x)  # a run of the storage
    check_lowering(lambda x: x.as_strided((6, 4), (1, 6)), x)  # the transpose
    check_lowering(lambda x: x.as_strided((3, 3), (2, 3), 1), x)  # overlapping: a gather
    check_lowering(lambda x: x.as_strided((4, 3), (0, 2)), x)  # an expansion


def test_as_strided_addresses_the_storage_of_a_transposed_input():
    step = step_graph(lambda x: x.as_strided((3, 4), (1, 3), 2), torch.empty(2, 5, 3).permute(2, 0, 1))
    x = torch.empty(2, 5, 3).permute(2, 0, 1).copy_(torch.arange(30.0).reshape(3, 2, 5))
    (got,) = run_lowered(step, x)
    assert torch.equal(got, x.as_strided((3, 4), (1, 3), 2))


def test_as_strided_scatter():
    check_lowering(lambda x, s: torch.as_strided_scatter(x, s, (2, 3), (6, 2), 1), torch.zeros(4, 6), torch.randn(2, 3))


def test_as_strided_outside_the_input_is_refused():
    base = torch.arange(20.0)
    with pytest.raises(LoweringError, match="of whose 20 elements the tensor shows 10"):
        run_lowered(step_graph(lambda x: x.as_strided((2, 2), (10, 1), 0), base[10:]), base[10:])


def test_bool_index_is_refused():
    mask = torch.tensor([True, False])
    step = step_graph(lambda x, i: aten.index.Tensor(x, [i]), torch.zeros(2, 3), mask.long())
    with pytest.raises(LoweringError, match="input .* the graph says torch.int64"):
        run_lowered(step, torch.zeros(2, 3), mask)


LOSSES = [(0, None), (1, None), (2, None), (0, "weight"), (1, "weight"), (2, "weight")]


@pytest.mark.parametrize(("reduction", "weighted"), LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nll_loss_and_its_gradient(reduction, weighted, dtype):
    logp, target = torch.randn(6, 5).log_softmax(1).to(dtype), torch.tensor([0, 4, -100, 2, 2, -100])
    weight = torch.rand(5).to(dtype) if weighted else None
    config = (weight, reduction, -100)
    if weight is None:
        check_lowering(lambda p, t: aten.nll_loss_forward(p, t, *config), logp, target)
    else:
        check_lowering(lambda p, t, w: aten.nll_loss_forward(p, t, w, *config[1:]), logp, target, weight)
    loss, total = aten.nll_loss_forward(logp, target, *config)
    grad = torch.randn_like(loss)
    tensors = (grad, logp, target, total) + (() if weight is None else (weight,))
    check_lowering(lambda g, p, t, total, w=None: aten.nll_loss_backward(g, p, t, w, *config[1:], total), *tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_and_its_gradient(dtype):
    x, weight, bias, grad = (torch.randn(shape).to(dtype) for shape in ((2, 3, 8), (8,), (8,), (2, 3, 8)))
    check_lowering(lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5), x, weight, bias)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    check_lowering(
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [8], m, r, w, b, [True] * 3),
        grad,
        x,
        mean,
        rstd,
        weight,
        bias,
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_gradient(training):
    x, grad = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    weight, bias, mean, var = torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5
    if training:
        check_lowering(lambda *a: aten._native_batch_norm_legit_functional(*a, True, 0.1, 1e-5), x, weight, bias, mean, var)
    else:
        check_lowering(lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0], x, weight, bias, mean, var)
    _, save_mean, save_rstd = aten.native_batch_norm(x, weight, bias, mean.clone(), var.clone(), training, 0.1, 1e-5)
    if training:
        tensors = (grad, x, weight, mean, var, save_mean, save_rstd)
        check_lowering(lambda *a: aten.native_batch_norm_backward(*a, True, 1e-5, [True] * 3), *tensors)


def test_group_norm_gradient():
    x, grad, weight = torch.randn(2, 6, 5), torch.randn(2, 6, 5), torch.randn(6)
    _, mean, rstd = aten.native_group_norm(x, weight, None, 2, 6, 5, 3, 1e-5)
    check_lowering(lambda *a: aten.native_group_norm_backward(*a, 2, 6, 5, 3, [True] * 3), grad, x, mean, rstd, weight)


@pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "silu",
        "softplus",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "mish",
        "hardtanh",
        "log_softmax",
        "softmax",
        "glu",
    ],
)
def test_gradients_of_activations(name):
    function = getattr(torch.nn.functional, name)
    kwargs = {"dim": -1} if name in ("log_softmax", "softmax", "glu") else {}

    def gradient(x):
        x = x.requires_grad_()
        return torch.autograd.grad(function(x, **kwargs).square().sum(), x)[0]

    x = torch.linspace(-4.1, 4.3, 24).reshape(4, 6)
    check_lowering(gradient, x)


GRADIENTS = {
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().abs() / 5),
    "bce_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().abs() / 5),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2, reduction="sum"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2, beta=0.7),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2, delta=0.7),
    "soft_margin": lambda x: F.soft_margin_loss(x, x.detach().sign()),
    "log_sigmoid": F.logsigmoid,
    "logit": lambda x: torch.logit(x.sigmoid(), 1e-3),
    "prelu": lambda x: F.prelu(x, x[0, 0, :1].abs()),
    "reflect1d": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "reflect2d": lambda x: F.pad(x[None], (2, 1, 1, 0), mode="reflect"),
    "reflect3d": lambda x: F.pad(x[None, None], (2, 1, 1, 0, 1, 1), mode="reflect"),
    "rms_norm": lambda x: F.rms_norm(x, [6], x[0, 0]),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "select": lambda x: x.select(1, 2) * x[:, 0, ::1],
    "strided_slice": lambda x: x[:, 1:4:2, -3:],
    "im2col": lambda x: F.unfold(x[None], 2, padding=1, stride=2),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    with_matrix(itertools.product(GRADIENTS, [torch.float32, torch.bfloat16]), [(name, torch.bfloat16 if number % 3 == 0 else torch.float32) for number, name in enumerate(GRADIENTS)]),
)
def test_gradients_of_losses_pads_and_views(name, dtype):
    def gradient(x):
        x = x.requires_grad_()
        return torch.autograd.grad(GRADIENTS[name](x).float().square().sum(), x)[0]

    check_lowering(gradient, torch.linspace(-4.1, 4.3, 48).reshape(2, 4, 6).to(dtype))


def test_matrix_exponential_is_right_to_single_precision():
    x = torch.randn(8, 6)
    for w in (x.T @ x, -x.T @ x, x[:6] - x[:6].T):
        for norm in (0.4, 1.9, 7.0, 14.0):
            w = w * (norm / w.abs().sum(0).max())
            (got,), exact = run_lowered(step_graph(torch.matrix_exp, w), w), torch.matrix_exp(w.double())
            assert (got - exact).abs().max() < 2e-6 * exact.abs().max()


def test_foreach_lists():
    x, y = [torch.rand(2, 3) + 1, torch.rand(4) + 1], [torch.rand(2, 3) + 1, torch.rand(4) + 1]
    calls = [
        lambda a, b: torch._foreach_add(a, b, alpha=0.5),
        lambda a, b: torch._foreach_mul(a, [2.0, 3.0]),
        lambda a, b: torch._foreach_div(a, torch.tensor(2.0)),
        lambda a, b: torch._foreach_lerp(a, b, 0.3),
        lambda a, b: torch._foreach_addcmul(a, a, b, [0.5, 2.0]),
        lambda a, b: torch._foreach_addcdiv(a, a, b, value=0.5),
        lambda a, b: torch._foreach_pow(2.0, a),
        lambda a, b: torch._foreach_maximum(a, b),
        lambda a, b: torch._foreach_sqrt(torch._foreach_neg(torch._foreach_neg(a))),
        lambda a, b: torch._foreach_norm(a),
    ]
    for call in calls:
        check_lowering(lambda a0, a1, b0, b1: call([a0, a1], [b0, b1]), *x, *y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype):
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe is not None
    x, weight, ends = torch.randn(7, 4).to(dtype), torch.randn(3, 4, 5).to(dtype), torch.tensor([2, 2, 7], dtype=torch.int32)
    check_lowering(torch.ops.transformers.grouped_mm_fallback, x, weight, ends)
    check_lowering(torch.ops.transformers.grouped_mm_fallback_backward, x, weight, ends, torch.randn(7, 5).to(dtype))


def test_constants_of_random_numbers_are_refused_with_the_way_out():
    with pytest.raises(LoweringError, match="graphacc::random_uniform"):
        run_lowered(step_graph(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(3)), torch.ones(3))


def test_math_constants_are_not_rounded_to_the_default_dtype():
    x = torch.tensor([1.0], dtype=torch.float64)
    check_lowering(lambda x: x * math.pi + 1e-12, x)


@pytest.mark.parametrize("name", [name for name in CASES if "rrelu" not in name])  # rrelu is no operator of a StepGraph
@pytest.mark.default_cases("antialiased", "bilinear", "nearest_exact", "adaptive_max", "replicated_2d", "pdist", "multilabel_margin", "solve", "det", "inverse", "cdist_1.5", "grid_2d_bilinear_zeros_False", "grid_2d_bilinear_border_False", "grid_2d_nearest_reflection_False", "grid_2d_bicubic_zeros_False")
def test_operators_with_gradients(name):
    function, x = with_gradient(name)
    with WrittenOut():
        step = step_graph(function, x, decompositions=decompositions())
    check_lowering(function, x, step=step)


def test_spread_and_short_time_transforms_of_complex_numbers():
    window = {"window": torch.hann_window(16), "n_fft": 16, "hop_length": 4}

    def spread(x):
        x = x.detach().requires_grad_()
        z = torch.complex(x, x.flip(0) ** 2)
        result = z.std(1) + torch.var_mean(z, 1, correction=0)[0]
        return result.detach(), torch.autograd.grad(result.sum(), x)[0]

    def back_and_forth(x):
        return torch.istft(torch.stft(x, **window, return_complex=True) * 0.5, **window, length=x.shape[-1])

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for function in (spread, back_and_forth):
        check_lowering(function, x, step=step_graph(function, x, inside_mode=True, decompositions=decompositions()))


@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hann", "kaiser"])
def test_windows(name):
    window = getattr(torch, f"{name}_window")

    def both(x):
        return x * window(9), x * window(9, False)

    check_lowering(both, torch.ones(9), step=step_graph(both, torch.ones(9), inside_mode=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_a_product_in_pieces(dtype, tolerance):
    """As on GPUs: whole pieces and a rest, summed in fp32."""
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in ((3, 2 * PIECE + 77), (2 * PIECE + 77, 5)))
    got = to_tensor(in_pieces(to_array(a), to_array(b), to_array(a).dtype))
    assert got.dtype is dtype and relative_error(got.double(), a.double() @ b.double()) < tolerance


@pytest.mark.parametrize(
    ("sizes", "transposed", "added"),
    [
        ((256, 64, 1500), (False, True), [0, 0, 36]),  # logits: of the weight's rows
        ((256, 1500, 64), (False, False), [0, 36, 0]),  # the gradient of what came in
        ((1500, 256, 64), (True, False), [36, 0, 0]),  # that of the weight
        ((1500, 256, 64), (False, False), [0, 0, 0]),  # whole rows, one more or less
        ((256, 64, 1504), (False, True), [0, 0, 0]),
    ],
)
def test_a_padded_product(sizes, transposed, added):
    """As on GPUs, whose tensor cores read aligned rows: the same products with zeros behind."""
    n, k, m = sizes
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in ((n, k), (k, m)))
    left, right = to_array(a), to_array(b)
    assert padding(left, right, transposed) == added
    assert padding(left.astype("float32"), right.astype("float32"), transposed) == [0, 0, 0]
    got = to_tensor(padded_product(left, right, transposed, added, left.dtype))
    assert got.shape == (n, m) and relative_error(got.double(), a.double() @ b.double()) < 4e-3
