"""The decompositions of a training step: what is broken up while tracing, so that a small set of operators remains.

Kept whole: attention (graphacc::sdpa), convolution, embedding, pooling, sorting, cumulative operators and everything that
is elementary. Normalisations become plain sums and element-wise operators, which a partitioner follows without a rule of
their own; losses become gathers, comparisons and sums; no prims operator is made where ATen has an equivalent.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from graphacc._compat.torch_ import foreach_operators, solve_factors_transposed, without_modes

aten = torch.ops.aten

_FROM_TORCH = [
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm_backward,
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward, aten.batch_norm_backward,
    aten._batch_norm_with_update_functional, aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward,
    aten.nll_loss_forward, aten.nll_loss2d_forward, aten.nll_loss2d_backward,
    aten._log_softmax, aten._softmax, aten._safe_softmax, aten._log_softmax_backward_data, aten._softmax_backward_data,
    aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward, aten.threshold_backward,
    aten.hardtanh_backward, aten.hardswish_backward, aten.hardsigmoid_backward, aten.leaky_relu_backward, aten.mish_backward,
    aten.native_dropout_backward, aten.addmv, aten.addr, aten.addbmm,
    aten.upsample_bilinear2d, aten.upsample_nearest2d, aten.upsample_nearest1d, aten.upsample_nearest3d,
    aten.rsub, aten.mse_loss, aten.mse_loss_backward, aten.logit_backward, aten.elu_backward, aten.softplus_backward,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.linalg_vector_norm, aten.index_add, aten.masked_fill,
    aten.masked_scatter, aten.expand_as, aten.stack, aten.unfold_backward,
    aten.std, aten.norm, aten.logsumexp, aten.huber_loss, aten.huber_loss_backward, aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.triu, aten.tril, aten.frac, aten.trace, aten.dot, aten.mv, aten.vdot,
    aten.select_scatter, aten.diagonal_backward, aten._cdist_forward, aten.eye, aten.aminmax, aten.xlogy, aten.sinc,
    aten._unsafe_index, aten._unsafe_index_put, aten._unsafe_masked_index, aten._unsafe_masked_index_put_accumulate,
    aten.glu, aten.glu_backward, aten.prelu, aten._prelu_kernel, aten._prelu_kernel_backward, aten.roll, aten.rot90,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.nan_to_num, aten.celu, aten.im2col, aten.col2im, aten.linspace,
]  # fmt: skip

_KEPT_WHOLE = [
    aten._scaled_dot_product_flash_attention_for_cpu,  # its inference decomposition gives wrong gradients in a joint graph
    aten.embedding_dense_backward, aten.max_pool2d_with_indices_backward, aten.avg_pool2d_backward,
    aten._adaptive_avg_pool2d, aten.convolution_backward, aten._grouped_mm, aten.topk, aten.sort,
    aten.lerp, aten.addcmul, aten.addcdiv,  # of every parameter's update: 10 operators of AdamW instead of 15
]  # fmt: skip

_OWN: dict[torch._ops.OpOverload, Callable] = {}


def _decomposes(*operators: torch._ops.OpOverload):
    def register(function):
        for operator in operators:
            _OWN[operator] = function
        return function

    return register


@functools.cache
def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Operator -> decomposition; random operators are not in it (see `randomness`)."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(_FROM_TORCH))
    for packet in _KEPT_WHOLE:
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    table.update(_OWN)
    table.update(_foreach_decompositions())
    return table


def _dims(x: Tensor, dim: int | list[int] | None) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _accumulated(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@_decomposes(aten.detach.default)
def _detach(x: Tensor) -> Tensor:
    """As torch's, without a wrapper that takes as long as five operators. Not the operand itself: a sparse one would end the process."""
    return aten.alias.default(x)


@_decomposes(aten.var_mean.correction)
def _var_mean(x: Tensor, dim=None, *, correction=None, keepdim=False) -> tuple[Tensor, Tensor]:
    """Two passes of plain sums: mean, then the mean of the squares of the centred values."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    wide = _accumulated(x)
    mean = wide.sum(dims, keepdim=True) / count
    centred = wide - mean
    divisor = max(0.0, count - (1.0 if correction is None else float(correction)))
    squares = (centred * centred.conj()).real if centred.is_complex() else centred * centred
    var = squares.sum(dims, keepdim=True) / divisor
    if not keepdim:
        mean, var = mean.squeeze(dims), var.squeeze(dims)
    return var.to(x.real.dtype if x.is_complex() else x.dtype), mean.to(x.dtype)


@_decomposes(aten.var.correction)
def _var(x: Tensor, dim=None, *, correction=None, keepdim=False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@_decomposes(aten.std.correction)
def _std(x: Tensor, dim=None, *, correction=None, keepdim=False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0].sqrt()


@_decomposes(aten.std_mean.correction)
def _std_mean(x: Tensor, dim=None, *, correction=None, keepdim=False) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), mean


def _storage_order(x: Tensor) -> list[int] | None:
    """The permutation of dims in which a dense tensor is contiguous, if it is not so already."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
    return order if not x.is_contiguous() and x.permute(order).is_contiguous() else None


@_decomposes(aten.as_strided.default)
def _as_strided(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """Of a contiguous tensor: what a partition gathers is contiguous, whatever it was before."""
    if (order := _storage_order(x)) is None:
        return NotImplemented
    return aten.as_strided.default(x.permute(order), size, stride, storage_offset)


@_decomposes(aten.as_strided_scatter.default)
def _as_strided_scatter(x: Tensor, source: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    if (order := _storage_order(x)) is None:
        return NotImplemented
    result = aten.as_strided_scatter.default(x.permute(order), source, size, stride, storage_offset)
    return result.permute([order.index(dim) for dim in range(x.dim())])


def _lu_of(a: Tensor, if_contiguous: bool = True) -> tuple[Tensor, Tensor, Tensor, bool]:
    """The factors that torch keeps for a backward: of a real contiguous matrix those of its transpose, by which backward goes, too.

    Decided here, as a later pass does not know how a matrix is laid out in memory.

    Args:
        if_contiguous: whether a contiguous matrix is transposed at all.
    """
    transposed = if_contiguous and a.is_contiguous() and not a.is_complex()
    return *aten.linalg_lu_factor_ex.default(a.mT if transposed else a), transposed


def _permutation_sign(lu: Tensor, pivots: Tensor) -> Tensor:
    swapped = pivots != torch.arange(1, lu.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * (swapped.sum(-1) % 2)).to(lu.dtype)


@_decomposes(aten._linalg_solve_ex.default)
def _linalg_solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, info, transposed = _lu_of(a, solve_factors_transposed())
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if vector else b
    result = aten.linalg_lu_solve.default(lu, pivots, right, left=left or vector, adjoint=transposed)
    return result.squeeze(-1) if vector else result, lu, pivots, info


@_decomposes(aten._linalg_det.default)
def _linalg_det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots, _, _ = _lu_of(a)
    return _permutation_sign(lu, pivots) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


@_decomposes(aten._linalg_slogdet.default)
def _linalg_slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, _, _ = _lu_of(a)
    diagonal = lu.diagonal(0, -2, -1)
    return _permutation_sign(lu, pivots) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), lu, pivots


@_decomposes(aten.native_group_norm.default)
def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """[n, c, ...] normalised over each of `groups` blocks of channels; also the mean and 1 / deviation, [n, groups]."""
    wide = _accumulated(x).reshape(n, groups, c // groups * size)
    var, mean = _var_mean(wide, [2], correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    out = ((wide - mean) * rstd).reshape(x.shape)
    channels = [1, c, *[1] * (x.dim() - 2)]
    out = out if weight is None else out * weight.reshape(channels)
    out = out if bias is None else out + bias.reshape(channels)
    return out.to(x.dtype), mean.reshape(n, groups).to(x.dtype), rstd.reshape(n, groups).to(x.dtype)


@_decomposes(aten.sum.default)
def _sum(x: Tensor, *, dtype=None) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.dim())), dtype=dtype)


@_decomposes(aten.mean.default)
def _mean(x: Tensor, *, dtype=None) -> Tensor:
    return aten.mean.dim(x, list(range(x.dim())), dtype=dtype)


@_decomposes(aten._is_all_true.default)
def _is_all_true(x: Tensor) -> Tensor:
    return aten.all.default(x)


@_decomposes(aten._is_any_true.default)
def _is_any_true(x: Tensor) -> Tensor:
    return aten.any.default(x)


@_decomposes(aten.addmm.default)
def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return _product_sum(aten.mm.default, x, a, b, beta, alpha)


@_decomposes(aten.baddbmm.default)
def _baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return _product_sum(aten.bmm.default, x, a, b, beta, alpha)


def _product_sum(multiply: Callable, x: Tensor, a: Tensor, b: Tensor, beta, alpha) -> Tensor:
    """beta x + alpha a b. A linear layer's product stays in bf16 (torch's decomposition computes it in fp32); with factors, as in
    Muon's iteration, the sum is rounded once, as torch's kernels do."""
    if beta == alpha == 1:
        return multiply(a, b) + x
    product = multiply(_accumulated(a), _accumulated(b)) * alpha
    return (product if beta == 0 else product + _accumulated(x) * beta).to(a.dtype)


@_decomposes(aten.t.default)
def _t(x: Tensor) -> Tensor:
    return x if x.dim() < 2 else aten.permute.default(x, [1, 0])


@_decomposes(aten.transpose.int)
def _transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return aten.permute.default(x, order)


@_decomposes(aten.view.default)
def _view(x: Tensor, size: list[int]) -> Tensor:
    """What stands for ``as_strided`` lies in memory otherwise than PyTorch expects: a view that this does not allow is one of a copy."""
    if x.is_contiguous():
        return NotImplemented
    with without_modes():
        try:
            torch.empty_strided(x.shape, x.stride(), device="meta").view(size)
        except (RuntimeError, ValueError):
            pass
        else:
            return NotImplemented
    return aten.view.default(x.contiguous(), size)


@_decomposes(aten._unsafe_view.default, aten._reshape_alias.default)
def _unsafe_view(x: Tensor, size: list[int], stride: list[int] | None = None) -> Tensor:
    return aten.view.default(x, size)


@_decomposes(aten.split.Tensor)
def _split(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    length = x.shape[dim]
    return [
        aten.slice.Tensor(x, dim, start, min(start + split_size, length))
        for start in range(0, max(length, 1), max(split_size, 1))
    ]


@_decomposes(aten.split_with_sizes.default)
def _split_with_sizes(x: Tensor, split_sizes: list[int], dim: int = 0) -> list[Tensor]:
    ends = [sum(split_sizes[: i + 1]) for i in range(len(split_sizes))]
    return [aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(split_sizes, ends)]


@_decomposes(aten.unbind.int)
def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]


@_decomposes(aten.slice_backward.default)
def _slice_backward(grad: Tensor, input_sizes: list[int], dim: int, start: int, end: int, step: int) -> Tensor:
    size = input_sizes[dim]
    dim = dim % len(input_sizes)
    first = min(max(start + size if start < 0 else start, 0), size)
    if step != 1:
        return aten.slice_scatter.default(grad.new_zeros(input_sizes), grad, dim, first, end, step)
    padding = [0, 0] * (len(input_sizes) - dim)
    padding[-2:] = [first, size - first - grad.shape[dim]]
    return grad if padding[-2:] == [0, 0] else aten.constant_pad_nd.default(grad, padding, 0)


@_decomposes(aten.select_backward.default)
def _select_backward(grad: Tensor, input_sizes: list[int], dim: int, index: int) -> Tensor:
    dim = dim % len(input_sizes)
    index = index % input_sizes[dim]
    return _slice_backward(grad.unsqueeze(dim), input_sizes, dim, index, index + 1, 1)


@_decomposes(aten.elu_backward.default)
def _elu_backward(grad: Tensor, alpha, scale, input_scale, is_result: bool, x: Tensor) -> Tensor:
    """Also of selu and celu. A NaN gives NaN, here and below as torch's kernels have it; its decompositions (2.9) have other branches."""
    slope = x + alpha * scale if is_result else torch.exp(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, grad * scale, grad * slope * input_scale)


@_decomposes(aten.hardtanh_backward.default)
def _hardtanh_backward(grad: Tensor, x: Tensor, low, high) -> Tensor:
    return torch.where((x > low) & (x < high), grad, 0.0)


@_decomposes(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def _shrink_backward(grad: Tensor, x: Tensor, bound) -> Tensor:
    return torch.where((x > bound) | (x < -bound), grad, 0.0)


@_decomposes(aten.hardswish_backward.default)
def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, grad * (x / 3 + 0.5)))


@_decomposes(aten.smooth_l1_loss_backward.default)
def _smooth_l1_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = x - target
    grad = grad / x.numel() if reduction == 1 else grad
    inside = grad * difference / beta
    return torch.where(difference >= beta, grad, torch.where(difference <= -beta, -grad, inside))


@_decomposes(aten.soft_margin_loss_backward.default)
def _soft_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """As torch's kernel has it, which overflows to NaN where exp does."""
    z = torch.exp(-target * x)
    grad = grad / x.numel() if reduction == 1 else grad
    return -target * z / (1 + z) * grad


@_decomposes(aten.rrelu_with_noise_backward.default)
def _rrelu_backward(grad: Tensor, x: Tensor, noise: Tensor, lower, upper, training: bool, self_is_result: bool) -> Tensor:
    if training and upper - lower > 1e-6:
        return grad * noise
    return torch.where(x > 0, grad, grad * ((lower + upper) / 2))


@_decomposes(aten.nll_loss_backward.default)
def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total_weight: Tensor
) -> Tensor:
    """Comparisons with the class number instead of a scatter into zeros: element-wise, so it fuses with softmax's backward.

    What is asked of each of as many elements as there are logits is one comparison of 32 bits; what a row can be asked is asked once.
    """
    dim = 0 if x.dim() < 2 else 1
    target = torch.where(target == ignore_index, -1, target).to(torch.int32).unsqueeze(dim)
    classes = torch.arange(x.shape[dim], dtype=torch.int32, device=x.device)
    if weight is not None:
        weight = weight if dim == 0 else weight.unsqueeze(0)
    if reduction == 1:
        grad = grad / total_weight
    elif reduction == 0:
        grad = grad.unsqueeze(dim)
    value = -grad if weight is None else -grad * weight
    return torch.where(classes == target, value, torch.zeros((), dtype=x.dtype, device=x.device)).expand(x.shape)


@_decomposes(aten.full_like.default)
def _full_like(x: Tensor, value, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
    return aten.full.default(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)


def _filled(value: int):
    def like(x: Tensor, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
        return aten.full.default(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)

    def new(x: Tensor, size, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
        return aten.full.default(size, value, dtype=dtype or x.dtype, device=device or x.device)

    def made(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
        return aten.full.default(size, value, dtype=dtype or torch.get_default_dtype(), device=device)

    return like, new, made


_ZEROS, _ONES = _filled(0), _filled(1)
_OWN.update({aten.zeros_like.default: _ZEROS[0], aten.new_zeros.default: _ZEROS[1], aten.zeros.default: _ZEROS[2]})
_OWN.update({aten.ones_like.default: _ONES[0], aten.new_ones.default: _ONES[1], aten.ones.default: _ONES[2]})
_OWN.update({aten.empty_like.default: _ZEROS[0], aten.new_empty.default: _ZEROS[1], aten.empty.memory_format: _ZEROS[2]})


@_decomposes(aten.new_full.default)
def _new_full(x: Tensor, size, value, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return aten.full.default(size, value, dtype=dtype or x.dtype, device=device or x.device)


@_decomposes(aten.scalar_tensor.default)
def _scalar_tensor(value, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return aten.full.default([], value, dtype=dtype or torch.get_default_dtype(), device=device)


@_decomposes(aten.arange.default)
def _arange(end, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return aten.arange.start_step(0, end, 1, dtype=dtype, device=device)


@_decomposes(aten.arange.start)
def _arange_start(start, end, *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return aten.arange.start_step(start, end, 1, dtype=dtype, device=device)


@_decomposes(aten.fill.Scalar)
def _fill_scalar(x: Tensor, value) -> Tensor:
    return aten.full.default(x.shape, value, dtype=x.dtype, device=x.device)


@_decomposes(aten.fill.Tensor, aten.copy.default)
def _fill_tensor(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


@_decomposes(aten.floor_divide.default)
def _floor_divide(x, y) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


_OWN.update({aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor})


@_decomposes(aten.add.Scalar)
def _add_scalar(x: Tensor, y, alpha=1) -> Tensor:
    return aten.add.Tensor(x, y, alpha=alpha)


@_decomposes(aten.sub.Scalar)
def _sub_scalar(x: Tensor, y, alpha=1) -> Tensor:
    return aten.sub.Tensor(x, y, alpha=alpha)


@_decomposes(aten._unsafe_index_put.default)
def _unsafe_index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    return aten.index_put.default(x, indices, values, accumulate)


@_decomposes(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """w = v g / |v|, the norm over all dims but `dim`."""
    others = [d for d in range(v.dim()) if d != dim]
    inner = (grad * v).sum(others, keepdim=True)
    return g / norms * (grad - v * inner / (norms * norms)), inner / norms


@_decomposes(aten.index_put.default)
def _index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``x[mask] = number`` is a where; anything else stays."""
    mask = indices[0]
    if mask is None or mask.dtype != torch.bool or values.numel() != 1 or any(index is not None for index in indices[1:]):
        return NotImplemented
    mask = mask.view([*mask.shape, *[1] * (x.dim() - mask.dim())])
    return torch.where(mask, x + values.reshape(()) if accumulate else values.reshape(()).to(x.dtype), x)


def _foreach_decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """aten::_foreach_x -> a list of x, for every functional foreach operator."""
    renamed = {"norm": torch.linalg.vector_norm, "clamp_max": torch.minimum, "clamp_min": torch.maximum}
    table = {}
    for name in foreach_operators():
        base = name.removeprefix("_foreach_")
        function = renamed.get(base) or getattr(torch, base, None)
        packet = getattr(aten, name)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            if function is not None and len(operator._schema.returns) == 1 and not operator._schema.is_mutable:
                table[operator] = functools.partial(_one_by_one, function)
    return table


def _one_by_one(function: Callable, *args, **kwargs) -> list[Tensor]:
    """Apply `function` to the i-th elements of all list arguments, for every i."""
    count = next(len(arg) for arg in args if isinstance(arg, (list, tuple)))

    def pick(arg, i):
        return arg[i] if isinstance(arg, (list, tuple)) else arg

    def call(i):
        arguments, named = [pick(arg, i) for arg in args], {key: pick(value, i) for key, value in kwargs.items()}
        if function in (torch.addcmul, torch.addcdiv) and len(arguments) == 4:
            named["value"] = arguments.pop()
        if function in (torch.minimum, torch.maximum):
            arguments[1] = torch.as_tensor(arguments[1], dtype=arguments[0].dtype)
        return function(*arguments, **named)

    return [call(i) for i in range(count)]


@_decomposes(aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: list[int]) -> Tensor:
    """The gradient of the source: the k-th element of it went where the k-th true element of `mask` is."""
    mask = mask.expand(grad.shape).reshape(-1)
    place = (mask.to(torch.int64).cumsum(0) - 1).clamp(min=0, max=math.prod(sizes) - 1)
    taken = torch.where(mask, grad.reshape(-1), 0.0)
    return grad.new_zeros(math.prod(sizes)).scatter_add(0, place, taken).reshape(sizes)
