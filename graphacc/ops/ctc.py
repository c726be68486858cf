"""The recursion over time of the CTC loss as one operator: unrolled, XLA would compile every frame of a recording by itself.

Graves et al., "Connectionist Temporal Classification", 2006, section 4.1. Legend: T frames after the first, B samples, L labels with blanks between.
With a[l] the logarithm of the probability of all paths that are at label l,

    a'[l] = max(NEVER, log(exp a[l] + exp a[l - 1] + skips[l] exp a[l - 2]) + emitted[l])   in frames that the sample has (`active`), else a[l]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e30
"""The logarithm of no probability: finite, so that gradients of it are zeros and not NaN."""


def _ways(alpha: Tensor, skips: Tensor) -> Tensor:
    """[3, B, L]: by staying, from the label before, and over one."""
    before = F.pad(alpha, (2, 0), value=NEVER)
    return torch.stack((alpha, before[:, 1:-1], torch.where(skips, before[:, :-2], NEVER)))


@torch.library.custom_op("graphacc::ctc_forward", mutates_args=())
def ctc_forward(first: Tensor, emitted: Tensor, skips: Tensor, active: Tensor) -> Tensor:
    """The recursion's value in every frame.

    Args:
        first: floating point [B, L], in the frame before.
        emitted: [T, B, L], logarithms of the labels' probabilities.
        skips: bool [B, L], whether a label may follow the one before its blank.
        active: bool [T, B], whether a sample has the frame.

    Returns:
        [T, B, L].
    """
    alpha, found = first, torch.empty_like(emitted)
    for i, (frame, has) in enumerate(zip(emitted, active)):
        following = (_ways(alpha, skips).logsumexp(0) + frame).clamp(min=NEVER)
        alpha = found[i] = torch.where(has.unsqueeze(1), following, alpha)
    return found


@ctc_forward.register_fake
def _(first, emitted, skips, active):
    assert emitted.shape[1:] == first.shape == skips.shape and emitted.shape[:2] == active.shape, "ctc_forward: shapes do not fit"
    return emitted.new_empty(emitted.shape)


@torch.library.custom_op("graphacc::ctc_backward", mutates_args=())
def ctc_backward(grad: Tensor, first: Tensor, emitted: Tensor, skips: Tensor, active: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `first` and `emitted`, from that of the result `alphas`."""
    following, grads = torch.zeros_like(first), torch.zeros_like(emitted)
    for i in reversed(range(len(emitted))):
        total, has = following + grad[i], active[i].unsqueeze(1)
        ways = _ways(alphas[i - 1] if i else first, skips)
        reached = ways.logsumexp(0)
        grads[i] = torch.where(has & (reached + emitted[i] >= NEVER), total, 0.0)
        stay, step, skip = (ways - reached).exp() * grads[i]
        skip = torch.where(skips, skip, 0.0)
        back = stay + F.pad(step, (0, 1))[:, 1:] + F.pad(skip, (0, 2))[:, 2:]
        following = torch.where(has, back, total)
    return following, grads


@ctc_backward.register_fake
def _(grad, first, emitted, skips, active, alphas):
    return first.new_empty(first.shape), emitted.new_empty(emitted.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def _gradients(ctx, grad):
    first, emitted, skips, active, alphas = ctx.saved_tensors
    of_first, of_emitted = torch.ops.graphacc.ctc_backward(grad, first, emitted, skips, active, alphas)
    return of_first, of_emitted, None, None


ctc_forward.register_autograd(_gradients, setup_context=_save)
