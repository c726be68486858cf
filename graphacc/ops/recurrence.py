"""A recurrent layer's steps over time as one operator: unrolled, XLA would compile every step by itself.

Elman, "Finding structure in time", 1990; Hochreiter and Schmidhuber, "Long short-term memory", 1997; Cho et al., "Learning phrase representations using RNN
encoder-decoder", 2014, in the forms of torch.nn.RNN, LSTM and GRU. The products of the inputs stand before the operator and the gradients of the weights behind
its backward, each as one product over all steps.

Legend: T steps, B samples, H features of the state, G = H * (4 for an LSTM, 3 for a GRU, 1), K features that the backward needs: 4 H, 4 H, 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
"""Kinds of layers -> products per step and feature of the state."""
KEPT = {"lstm": 4, "gru": 4, "tanh": 0, "relu": 0}
"""Kinds of layers -> values that the backward needs, per step and feature of the state."""


def state_dtype(mode: str, gates: Tensor, hidden: Tensor, cell: Tensor | None) -> torch.dtype:
    """The dtype that the state has from the first step on, where products have another (autocast)."""
    if mode in ("tanh", "relu"):
        return gates.dtype
    return torch.promote_types(gates.dtype, hidden.dtype if cell is None else cell.dtype)


@torch.library.custom_op("graphacc::recurrence", mutates_args=())
def recurrence(
    mode: str, gates: Tensor, hidden: Tensor, cell: Tensor | None, weight: Tensor, bias: Tensor | None, active: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states after every step.

    Args:
        mode: "lstm", "gru", "tanh" or "relu".
        gates: floating point [T, B, G], the products of the inputs, with their bias, in torch.nn's order of gates.
        hidden: [B, H], before the first step, in `state_dtype`.
        cell: [B, H], of an LSTM, in the same dtype.
        weight: [G, H] in the dtype of `gates`.
        bias: [G], of the products of the state.
        active: bool [T, B], where a sample has the step; elsewhere its state stays.

    Returns:
        Hidden states [T, B, H]; the last cell state [B, H]; cell states [T, B, H] and [T, B, K] for the backward, without a gradient. Of layers without a
        cell state those have 0 features.
    """
    outputs, cells, kept = [], [], []
    state = hidden[:, :0] if cell is None else cell
    for i, step in enumerate(gates):
        recurrent = F.linear(hidden.to(weight.dtype), weight, bias)
        following, following_state, values = _step(mode, step, recurrent, hidden, state)
        if active is not None:
            following, following_state = (torch.where(active[i].unsqueeze(1), new, old) for new, old in ((following, hidden), (following_state, state)))
        hidden, state = following, following_state
        outputs.append(hidden)
        cells.append(state)
        kept.append(values)
    return torch.stack(outputs), state.clone(), torch.stack(cells), torch.stack(kept)


def _step(mode: str, gates: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if mode == "lstm":
        i, f, g, o = (gates + recurrent).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = f * cell + i * g
        return o * cell.tanh(), cell, torch.cat((i, f, g, o), 1)
    if mode == "gru":
        (r, z, n), (of_r, of_z, of_n) = gates.chunk(3, 1), recurrent.chunk(3, 1)
        r, z = (r + of_r).sigmoid(), (z + of_z).sigmoid()
        n = (n + r * of_n).tanh()
        return (hidden - n) * z + n, cell, torch.cat((r, z, n, of_n), 1)
    total = gates + recurrent
    return total.tanh() if mode == "tanh" else total.relu(), cell, total[:, :0]


@recurrence.register_fake
def _(mode, gates, hidden, cell, weight, bias, active):
    (steps, batch, width), size = gates.shape, hidden.shape[1]
    assert steps > 0 and width == GATES[mode] * size and weight.shape == (width, size) and hidden.shape[0] == batch, "recurrence: shapes do not fit"
    assert weight.dtype == gates.dtype and hidden.dtype == state_dtype(mode, gates, hidden, cell), "recurrence: dtypes do not fit"
    of_cell = 0 if cell is None else size
    outputs, cells = hidden.new_empty((steps, batch, size)), hidden.new_empty((steps, batch, of_cell))
    return outputs, hidden.new_empty((batch, of_cell)), cells, gates.new_empty((steps, batch, KEPT[mode] * size))


@torch.library.custom_op("graphacc::recurrence_backward", mutates_args=())
def recurrence_backward(
    mode: str,
    grad: Tensor,
    grad_cell: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    weight: Tensor,
    outputs: Tensor,
    cells: Tensor,
    kept: Tensor,
    active: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gates`, `hidden` and `cell`, from those of the hidden states [T, B, H] and of the last cell state [B, H].

    The other arguments are those of `recurrence`, and its results. Without a cell state its gradient has 0 features.
    """
    of_hidden, of_cell, found = torch.zeros_like(hidden), grad_cell, []
    first_cell = hidden[:, :0] if cell is None else cell
    for i in reversed(range(len(grad))):
        before, cell_before = (outputs[i - 1], cells[i - 1]) if i else (hidden, first_cell)
        total = of_hidden + grad[i]
        of_gates, of_recurrent, rest, following_cell = _step_back(mode, total, of_cell, outputs[i], before, cells[i], cell_before, kept[i])
        following = (rest + of_recurrent.to(weight.dtype) @ weight).to(hidden.dtype)
        if active is not None:
            has = active[i].unsqueeze(1)
            of_gates, following, following_cell = torch.where(has, of_gates, 0), torch.where(has, following, total), torch.where(has, following_cell, of_cell)
        of_hidden, of_cell = following, following_cell
        found.append(of_gates.to(kept.dtype))
    return torch.stack(found[::-1]), of_hidden, of_cell.clone()


def _step_back(mode, grad, grad_cell, output, before, cell, cell_before, kept):
    """Gradients of the gates, of the state's products, of the state besides, and of the cell state before."""
    if mode == "lstm":
        i, f, g, o = kept.chunk(4, 1)
        squashed = cell.tanh()
        grad_cell = grad_cell + grad * o * (1 - squashed * squashed)
        parts = (grad_cell * g * i * (1 - i), grad_cell * cell_before * f * (1 - f), grad_cell * i * (1 - g * g), grad * squashed * o * (1 - o))
        of_gates = torch.cat(parts, 1)
        return of_gates, of_gates, 0.0, grad_cell * f
    if mode == "gru":
        r, z, n, of_n = kept.chunk(4, 1)
        new = grad * (1 - z) * (1 - n * n)
        reset, update = new * of_n * r * (1 - r), grad * (before - n) * z * (1 - z)
        return torch.cat((reset, update, new), 1), torch.cat((reset, update, new * r), 1), grad * z, grad_cell
    of_gates = grad * (1 - output * output) if mode == "tanh" else torch.where(output <= 0, 0, grad)
    return of_gates, of_gates, 0.0, grad_cell


@recurrence_backward.register_fake
def _(mode, grad, grad_cell, hidden, cell, weight, outputs, cells, kept, active):
    return kept.new_empty((*grad.shape[:2], weight.shape[0])), hidden.new_empty(hidden.shape), grad_cell.new_empty(grad_cell.shape)


def _save(ctx, inputs, output):
    ctx.mode, _, hidden, cell, weight, bias, active = inputs
    outputs, _, cells, kept = output
    ctx.has_bias = bias is not None
    ctx.save_for_backward(hidden, cell, weight, active, outputs, cells, kept)


def _gradients(ctx, grad, grad_cell, _of_cells, _of_kept):
    hidden, cell, weight, active, outputs, cells, kept = ctx.saved_tensors
    of_gates, of_hidden, of_cell = torch.ops.graphacc.recurrence_backward(ctx.mode, grad, grad_cell, hidden, cell, weight, outputs, cells, kept, active)
    of_recurrent = of_gates
    if ctx.mode == "gru":  # its reset gate stands between
        size = hidden.shape[1]
        of_recurrent = torch.cat((of_gates[..., : 2 * size], of_gates[..., 2 * size :] * kept[..., :size]), 2)
    before = torch.cat((hidden.unsqueeze(0), outputs[:-1])).to(weight.dtype)
    of_weight = of_recurrent.flatten(0, 1).T @ before.flatten(0, 1)
    of_bias = of_recurrent.sum((0, 1)) if ctx.has_bias else None
    return None, of_gates, of_hidden, None if cell is None else of_cell, of_weight, of_bias, None


recurrence.register_autograd(_gradients, setup_context=_save)
