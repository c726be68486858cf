"""Functions of torch.nn.functional that are written in others before they are traced.

Their own operators keep results for a backward kernel of torch's that neither a partitioner nor XLA can follow.
"""

import typing
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction
from torch.overrides import TorchFunctionMode

from graphacc.capture.recurrent import Recurrent
from graphacc.errors import CaptureError
from graphacc.ops.ctc import NEVER


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """torch.nn.functional.embedding_bag as an embedding and a sum, mean or maximum over each bag.

    Args:
        input: [B, K], bags of K rows, or [N], bags that begin at `offsets` [B] ([B + 1] with `include_last_offset`).
        weight: [V, D].
        sparse: has no effect, gradients are dense.

    Returns:
        [B, D]; zeros for an empty bag.

    Raises:
        CaptureError: with `scale_grad_by_freq`.
        ValueError: the arguments do not go together.
    """
    if scale_grad_by_freq:
        raise CaptureError(
            "embedding_bag with scale_grad_by_freq=True is not available: torch's kernel for it disagrees with its own embedding "
            "about the gradient. Leave it out, or use F.embedding with scale_grad_by_freq and sum or average the rows"
        )
    weighted = per_sample_weights is not None
    fitting = mode in _BAGS and input.dim() == (2 if offsets is None else 1)
    if not fitting or (weighted and (mode, input.shape) != ("sum", per_sample_weights.shape)):
        raise ValueError(
            f"embedding_bag: input {list(input.shape)}, offsets {_shape(offsets)}, "
            f"per_sample_weights {_shape(per_sample_weights)} and mode {mode!r} do not go together"
        )
    rows = F.embedding(input, weight, max_norm=max_norm, norm_type=norm_type)
    if weighted:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = None if padding_idx is None else input != padding_idx % weight.shape[0]
    if offsets is None:
        return _equal_bags(rows, counted, mode)
    return _bags_at(rows, counted, offsets[:-1] if include_last_offset else offsets, mode)


_BAGS = ("sum", "mean", "max")


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


def _equal_bags(rows: Tensor, counted: Tensor | None, mode: str) -> Tensor:
    """[B, K, D] -> [B, D]."""
    if counted is None:
        return _first_maximum(rows) if mode == "max" else {"sum": rows.sum, "mean": rows.mean}[mode](1)
    kept = counted.unsqueeze(-1)
    if mode == "max":
        return torch.where(kept.any(1), _first_maximum(torch.where(kept, rows, -torch.inf)), 0.0)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total / kept.sum(1).clamp(min=1) if mode == "mean" else total


def _first_maximum(rows: Tensor) -> Tensor:
    """[B, K, D] -> [B, D]; of equal rows the first one has the gradient, as in torch's kernel."""
    return rows.max(1).values


def _bags_at(rows: Tensor, counted: Tensor | None, offsets: Tensor, mode: str) -> Tensor:
    """[N, D] -> [B, D]; rows that do not count go to one bag more, which is dropped."""
    num_bags = offsets.shape[0]
    bag = torch.searchsorted(offsets, torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device), right=True) - 1
    bag = bag if counted is None else torch.where(counted, bag, num_bags)
    out = rows.new_zeros(num_bags + 1, rows.shape[1])
    if mode == "max":
        place, values = bag.unsqueeze(1).expand_as(rows), rows.detach()
        largest = out.scatter_reduce(0, place, values, "amax", include_self=False).gather(0, place)
        row = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
        found = torch.where((values == largest) | values.isnan(), row, rows.shape[0])
        first = torch.full(out.shape, rows.shape[0], device=rows.device).scatter_reduce(0, place, found, "amin")[:-1]  # of equal rows, which has the gradient, as in torch's kernel
        return torch.where(first < rows.shape[0], rows.gather(0, first.clamp(max=rows.shape[0] - 1)), 0.0) if rows.shape[0] else out[:-1]
    total = out.index_add(0, bag, rows)[:-1]
    if mode == "sum":
        return total
    size = rows.new_zeros(num_bags + 1).index_add(0, bag, torch.ones_like(rows[:, 0]))[:-1]
    return total / size.clamp(min=1).unsqueeze(1)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """torch.nn.functional.ctc_loss by the forward recursion over time (Graves et al., "Connectionist Temporal Classification", 2006, section 4.1).

    Lengths stay tensors: only the width of concatenated targets is a number, their greatest length.

    Args:
        log_probs: [T, B, C] or [T, C].
        targets: [B, S] padded, or [sum of target_lengths] concatenated.
        input_lengths, target_lengths: [B] or a number.
    """
    reduction = ("none", "mean", "sum")[reduction] if isinstance(reduction, int) else reduction
    device = log_probs.device
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    input_lengths, target_lengths = (torch.as_tensor(x, device=device).long().reshape(-1) for x in (input_lengths, target_lengths))
    targets = targets.long() if targets.dim() == 2 else _padded_targets(targets.long(), target_lengths)
    num_steps, width = log_probs.shape[0], targets.shape[1]
    labels = torch.full((targets.shape[0], 2 * width + 1), blank, dtype=torch.int64, device=device)  # [B, L]: blanks around every target
    labels[:, 1::2] = targets
    place = torch.arange(2 * width + 1, device=device)
    skips = (place % 2 == 1) & (labels != F.pad(labels, (2, 0), value=blank)[:, :-2])  # [B, L]: no blank is needed before
    inside = labels.clamp(0, log_probs.shape[2] - 1).expand(num_steps, -1, -1)
    emitted = log_probs.gather(2, inside)  # [T, B, L]
    never = torch.full_like(emitted[0], NEVER)
    alpha = torch.where(place < 2, emitted[0], never)
    alpha = torch.where(place <= 2 * target_lengths.unsqueeze(1), alpha, never)
    if num_steps > 1:
        active = torch.arange(1, num_steps, device=device).unsqueeze(1) < input_lengths  # [T - 1, B]
        alpha = torch.ops.graphacc.ctc_forward(alpha, emitted[1:], skips, active)[-1]
    last = (2 * target_lengths).unsqueeze(1)
    ends = torch.cat((alpha.gather(1, last), torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), NEVER)), 1)
    total = torch.logsumexp(ends, 1)
    possible = total > NEVER / 2
    infinite = 0.0 if zero_infinity else -torch.where(possible, 0.0, total + log_probs.sum((0, 2))) * torch.inf  # its gradient is NaN, as torch's
    losses = torch.where(possible, -total + _normalising(log_probs, input_lengths), infinite)
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if alone else losses


def _normalising(log_probs: Tensor, input_lengths: Tensor) -> Tensor:
    """Zeros, [B], with the gradient of the sum of all probabilities.

    Torch's gradient is the one with regard to what a log_softmax is taken of, whether `log_probs` [T, B, C] come from one or not.
    """
    sums = log_probs.exp().sum(2)
    read = torch.arange(log_probs.shape[0], device=log_probs.device).unsqueeze(1) < input_lengths
    return torch.where(read, sums - sums.detach(), 0.0).sum(0)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """torch.nn.functional.embedding whose gradient is dense: the same numbers, zeros written out."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _padded_targets(targets: Tensor, lengths: Tensor) -> Tensor:
    """Concatenated targets as [B, greatest length]."""
    width = int(lengths.max()) if lengths.numel() else 0
    starts = lengths.cumsum(0) - lengths
    places = starts.unsqueeze(1) + torch.arange(width, device=targets.device)
    return targets[places.clamp(max=max(targets.numel() - 1, 0))] if targets.numel() else targets.new_zeros(lengths.numel(), width)


def multilabel_margin_loss(input: Tensor, target: Tensor, size_average=None, reduce=None, reduction: str = "mean") -> Tensor:
    """torch.nn.functional.multilabel_margin_loss; torch's decomposition (2.9) also counts targets behind the first -1.

    Args:
        input: [N, C] or [C].
        target: class numbers, int64, of input's shape; in each row those before the first -1 count. A number alone is a row of one class.
    """
    if input.dim() == 0 and target.dim() == 0:
        input, target = input.reshape(1), target.reshape(1)
    if input.shape != target.shape or input.dim() not in (1, 2):
        raise ValueError(f"multilabel_margin_loss: input {list(input.shape)} and target {list(target.shape)} must have one shape, [N, C] or [C]")
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    counts = (target >= 0).to(torch.int64).cumprod(-1) == 1
    place = torch.where(counts, target, 0)
    is_target = ((place.unsqueeze(-1) == torch.arange(input.shape[-1], device=input.device)) & counts.unsqueeze(-1)).any(-2)
    margin = 1.0 - input.gather(-1, place).unsqueeze(-1) + input.unsqueeze(-2)  # [N, targets, C]
    counted = counts.unsqueeze(-1) & ~is_target.unsqueeze(-2) & (margin > 0)
    loss = torch.where(counted, margin, 0.0).sum((-1, -2)) / input.shape[-1]
    return {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}[reduction](loss)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """torch.nn.functional.one_hot without the assertion that torch 2.13 traces into it; its range is checked with the batch (`loop/bounds.py`)."""
    if num_classes < 1 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)
    return torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device).scatter(-1, tensor.unsqueeze(-1), 1)


def _with_wide_classes(function: Callable) -> Callable:
    """A loss of classes whose classes may be uint8, as masks of images are. torch's kernels take them; its decompositions gather by int64 alone, and torch_xla computes another loss."""

    def loss(input, target, *args, **kwargs):
        return function(input, target.to(torch.int64) if target.dtype is torch.uint8 else target, *args, **kwargs)

    return loss


def set_item(tensor: Tensor, key, value) -> None:
    """``tensor[key] = value``. Where a mask has the rows and one value is for all of them (the token of masked positions), it is written through ``torch.where``: the gradient of such
    a value is a sum over the rows, for which torch's own backward asks how many they are.
    """
    mask = key[0] if isinstance(key, tuple) and key and all(other is Ellipsis or other == slice(None) for other in key[1:]) else key
    if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.dim() > 0 and mask.shape == tensor.shape[: mask.dim()]:
        columns = tensor.dim() - mask.dim()
        if isinstance(value, Tensor) and value.requires_grad and value.dtype == tensor.dtype and all(size == 1 for size in value.shape[: max(0, value.dim() - columns)]):
            value = value.reshape(value.shape[max(0, value.dim() - columns) :])
            tensor.copy_(torch.where(mask.reshape(*mask.shape, *[1] * columns), value, tensor))
            return
    Tensor.__setitem__(tensor, key, value)


def index_put_(tensor: Tensor, indices: tuple[Tensor, ...], values: Tensor, accumulate: bool = False) -> Tensor:
    """``tensor.index_put_``, as `set_item` does it."""
    if accumulate or len(indices) != 1 or not isinstance(indices[0], Tensor):
        return Tensor.index_put_(tensor, indices, values, accumulate)
    set_item(tensor, indices[0], values)
    return tensor


def _no_sparse_tensors(*args, **kwargs):
    """Raise CaptureError; on fake tensors that require a gradient torch itself would end the process (2.9)."""
    raise CaptureError("the code makes a sparse tensor, which a compiled program does not have: use the dense one (.to_dense()), or make it outside of the model's parts that are to be compiled")


def _keeps_no_gradient(*args, **kwargs):
    """Raise CaptureError: nobody would find the gradient at what stands for a tensor in a capture."""
    raise CaptureError("the forward calls retain_grad(), and a program does not keep the gradient of what it computes inside: return the tensor, and let the loop call retain_grad() on the result")


class _ProductOfExperts(torch.autograd.Function):
    """transformers' grouped product with a backward of products; in older releases (5.17) its own asks how many rows each expert has."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        return torch.ops.transformers.grouped_mm_fallback.default(rows, weight, offsets)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, offsets = ctx.saved_tensors
        grad_rows = torch.ops.transformers.grouped_mm_fallback.default(grad, weight.mT, offsets)
        return grad_rows, torch.ops.graphacc.grouped_mm_weight_grad(rows, grad, offsets.int()), None


def _product_of_experts(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return typing.cast(Tensor, _ProductOfExperts.apply(input, weight, offs))


def _of_transformers(func: object) -> Callable | None:
    """What stands for an operator of transformers."""
    is_product = getattr(func, "_qualified_op_name", "") == "transformers::grouped_mm_fallback"
    return _product_of_experts if is_product and not _has_backward() else None


def _has_backward() -> bool:
    return hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")


class WrittenOut(TorchFunctionMode):
    """Calls the functions of this module in place of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self._recurrent = Recurrent()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise CaptureError(f"the forward gives {getattr(func, '__name__', func)} a generator of its own, and a program draws other numbers in every step: draw with torch's default one, or outside of the model and pass the numbers in")
        function = _WRITTEN_OUT.get(func) or _of_transformers(func) or self._recurrent.replacement(func, args, kwargs) or func
        return function(*args, **kwargs)


_WRITTEN_OUT = {
    typing.cast(typing.Any, Tensor.data).__get__: Tensor.detach,  # with the version counter of the tensor, by which writes are noticed
    Tensor.retain_grad: _keeps_no_gradient,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.cross_entropy: _with_wide_classes(F.cross_entropy),
    F.nll_loss: _with_wide_classes(F.nll_loss),
    F.one_hot: one_hot,
    Tensor.__setitem__: set_item,
    Tensor.index_put_: index_put_,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    **{getattr(Tensor, name): _no_sparse_tensors for name in ("to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "sparse_mask")},
    **{getattr(torch, f"sparse_{kind}_tensor"): _no_sparse_tensors for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")},
}
