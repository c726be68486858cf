"""Operators whose gradients have kernels of their own in torch: name -> (shape of one tensor, function of it)."""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

CHECKED = "solve_checked"  # raises for a singular matrix, which a program cannot do: captures refuse it

CASES = {
    "antialiased": ((2, 3, 7, 9), lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True)),
    "antialiased_up": ((2, 3, 7, 9), lambda x: F.interpolate(x, size=(14, 11), mode="bilinear", antialias=True, align_corners=True)),
    "antialiased_bicubic": ((2, 3, 7, 9), lambda x: F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True)),
    "bicubic": ((2, 3, 7, 9), lambda x: F.interpolate(x, size=(4, 11), mode="bicubic")),
    "bilinear": ((2, 3, 7, 9), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bilinear_corners": ((2, 3, 7, 9), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)),
    "linear": ((2, 3, 9), lambda x: F.interpolate(x, scale_factor=1.7, mode="linear")),
    "trilinear": ((2, 2, 3, 4, 5), lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "nearest_exact": ((2, 3, 7, 9), lambda x: F.interpolate(x, size=(4, 11), mode="nearest-exact")),
    "adaptive_average": ((2, 3, 7, 9), lambda x: F.adaptive_avg_pool2d(x, (3, 4))),
    "adaptive_average_1d": ((2, 3, 7), lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive_average_3d": ((2, 2, 4, 5, 7), lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4))),
    "adaptive_max": ((2, 3, 7, 9), lambda x: F.adaptive_max_pool2d(x, (3, 4))),
    "adaptive_max_3d": ((2, 2, 4, 5, 7), lambda x: F.adaptive_max_pool3d(x, (2, 3, 4))),
    "uneven_average": ((2, 3, 8, 8), lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    "replicated_1d": ((2, 2, 5), lambda x: F.pad(x, (1, 2), mode="replicate")),
    "replicated_2d": ((2, 2, 4, 5), lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate")),
    "replicated_3d": ((2, 2, 3, 4, 5), lambda x: F.pad(x, (1, 2, 1, 0, 2, 1), mode="replicate")),
    "cdist_broadcast": ((3, 5, 4), lambda x: torch.cdist(x, x[:1].flip(1) * 1.1)),
    "cdist_self": ((3, 5, 4), lambda x: torch.cdist(x, x)),
    "pdist": ((6, 4), F.pdist),
    "multi_margin": ((8, 6), lambda x: F.multi_margin_loss(x, torch.arange(8) % 6, reduction="none")),
    "multi_margin_weighted": ((8, 6), lambda x: F.multi_margin_loss(x, torch.arange(8) % 6, p=2, margin=0.5, weight=torch.linspace(0.5, 1, 6))),
    "multi_margin_of_one": ((6,), lambda x: F.multi_margin_loss(x, torch.tensor(2), reduction="sum")),
    "multilabel_margin": ((8, 6), lambda x: F.multilabel_margin_loss(x, _labels(), reduction="none")),
    "multilabel_margin_mean": ((8, 6), lambda x: F.multilabel_margin_loss(x, _labels())),
    "multilabel_margin_of_one": ((6,), lambda x: F.multilabel_margin_loss(x, _labels()[3], reduction="sum")),
    "rrelu_in_evaluation": ((8, 6), lambda x: F.rrelu(x, training=False)),
    "rrelu_without_a_choice": ((8, 6), lambda x: F.rrelu(x, 0.3, 0.3, training=True)),
    "logcumsumexp": ((8, 6), lambda x: x.logcumsumexp(1)),
    "solve": ((3, 4, 4), lambda x: _solve(x + 3 * torch.eye(4), x)),
    "solve_of_transposed": ((3, 4, 4), lambda x: _solve((x + 3 * torch.eye(4)).mT, x)),
    "solve_vector": ((4, 4), lambda x: _solve(x + 3 * torch.eye(4), x[0])),
    "solve_from_the_right": ((3, 4, 4), lambda x: _solve(x + 3 * torch.eye(4), x, left=False)),
    CHECKED: ((4, 4), lambda x: torch.linalg.solve(x + 3 * torch.eye(4), x)),
    "det": ((3, 4, 4), torch.linalg.det),
    "det_of_transposed": ((3, 4, 4), lambda x: torch.linalg.det(x.mT + 0.1)),
    "slogdet": ((3, 4, 4), lambda x: torch.linalg.slogdet(x)[1]),
    "logdet_of_one": ((1, 1), lambda x: torch.logdet(x.abs())),
    "inverse": ((3, 4, 4), lambda x: torch.linalg.inv_ex(x + 3 * torch.eye(4)).inverse),
    "triangular": ((3, 4, 4), lambda x: torch.linalg.solve_triangular(x.tril() + 4 * torch.eye(4), x, upper=False)),
}
CASES |= {f"cdist_{p}": ((3, 5, 4), functools.partial(lambda p, x: torch.cdist(x, x.flip(1) * 1.1, p=p), p)) for p in (0.5, 1.0, 1.5, 2.0, 3.0, torch.inf)}


def _solve(a: Tensor, b: Tensor, **options: bool) -> Tensor:
    return torch.linalg.solve_ex(a, b, **options).result


def _labels() -> Tensor:
    """Rows of class numbers, of which -1 ends each at another place."""
    return torch.arange(48).reshape(8, 6) % 7 - 1


def _sampled_2d(mode: str, padding: str, corners: bool, x: Tensor) -> Tensor:
    grid = 1.3 * torch.tanh(0.7 * x[:, :2, :, :4].permute(0, 2, 3, 1) + 0.05)
    return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)


def _sampled_3d(mode: str, padding: str, corners: bool, x: Tensor) -> Tensor:
    grid = 1.3 * torch.tanh(0.7 * x[:, :, :3, :4, :5].permute(0, 2, 3, 4, 1) + 0.05)
    return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)


for _mode, _padding, _corners in itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)):
    _given = _mode, _padding, _corners
    CASES["grid_2d_" + "_".join(map(str, _given))] = (2, 2, 5, 6), functools.partial(_sampled_2d, *_given)
    if _mode != "bicubic":
        CASES["grid_3d_" + "_".join(map(str, _given))] = (2, 3, 4, 5, 6), functools.partial(_sampled_3d, *_given)


def with_gradient(name: str):
    """(function, tensor): the function gives an operator's result and its gradient for a loss that weights each element otherwise."""
    shape, operator = CASES[name]

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        result = operator(x)
        weights = torch.linspace(0.3, 1.7, result.numel()).reshape(result.shape)
        return result.detach(), torch.autograd.grad((result * weights).sum(), x)[0]

    return both, torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
