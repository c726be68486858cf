"""The steps of a recurrent layer as a loop."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register
from graphacc.lowering.rules.matmul import dot


def _where(active, new, old):
    return new if active is None else jnp.where(active[:, None], new, old)


def _step(mode, gates, recurrent, hidden, cell):
    if mode == "lstm":
        i, f, g, o = jnp.split(gates + recurrent, 4, 1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * cell + i * g
        return o * jnp.tanh(cell), cell, jnp.concatenate((i, f, g, o), 1)
    if mode == "gru":
        (r, z, n), (of_r, of_z, of_n) = jnp.split(gates, 3, 1), jnp.split(recurrent, 3, 1)
        r, z = jax.nn.sigmoid(r + of_r), jax.nn.sigmoid(z + of_z)
        n = jnp.tanh(n + r * of_n)
        return (hidden - n) * z + n, cell, jnp.concatenate((r, z, n, of_n), 1)
    total = gates + recurrent
    return jnp.tanh(total) if mode == "tanh" else jnp.maximum(total, 0), cell, total[:, :0]


@register("graphacc.recurrence.default")
def _recurrence(ctx, mode, gates, hidden, cell, weight, bias, active):
    accumulated = wide(gates.dtype)
    offset = 0 if bias is None else cast(bias, accumulated)

    def step(state, here):
        (hidden, cell), (gates, active) = state, here
        recurrent = dot(cast(hidden, weight.dtype), weight, ((1,), (1,)), out_dtype=accumulated) + offset
        following, following_cell, kept = _step(mode, cast(gates, accumulated), recurrent, cast(hidden, accumulated), cast(cell, accumulated))
        state = _where(active, cast(following, hidden.dtype), hidden), _where(active, cast(following_cell, cell.dtype), cell)
        return state, (*state, cast(kept, weight.dtype))

    (_, last), (outputs, cells, kept) = lax.scan(step, (hidden, hidden[:, :0] if cell is None else cell), (gates, active))
    return outputs, last, cells, kept


def _step_back(mode, grad, grad_cell, output, before, cell, cell_before, kept):
    """As in `ops/recurrence.py`."""
    if mode == "lstm":
        i, f, g, o = jnp.split(kept, 4, 1)
        squashed = jnp.tanh(cell)
        grad_cell = grad_cell + grad * o * (1 - squashed * squashed)
        parts = (grad_cell * g * i * (1 - i), grad_cell * cell_before * f * (1 - f), grad_cell * i * (1 - g * g), grad * squashed * o * (1 - o))
        of_gates = jnp.concatenate(parts, 1)
        return of_gates, of_gates, 0.0, grad_cell * f
    if mode == "gru":
        r, z, n, of_n = jnp.split(kept, 4, 1)
        new = grad * (1 - z) * (1 - n * n)
        reset, update = new * of_n * r * (1 - r), grad * (before - n) * z * (1 - z)
        return jnp.concatenate((reset, update, new), 1), jnp.concatenate((reset, update, new * r), 1), grad * z, grad_cell
    of_gates = grad * (1 - output * output) if mode == "tanh" else jnp.where(output <= 0, 0, grad)
    return of_gates, of_gates, 0.0, grad_cell


@register("graphacc.recurrence_backward.default")
def _recurrence_backward(ctx, mode, grad, grad_cell, hidden, cell, weight, outputs, cells, kept, active):
    accumulated = wide(kept.dtype)
    widened = functools.partial(cast, dtype=accumulated)
    before = jnp.concatenate((hidden[None], outputs[:-1]))
    cells_before = cells if cell is None else jnp.concatenate((cell[None], cells[:-1]))

    def step(state, here):
        (of_hidden, of_cell), (grad, active, *values) = state, here
        total = of_hidden + grad
        of_gates, of_recurrent, rest, following_cell = _step_back(mode, widened(total), widened(of_cell), *map(widened, values))
        following = rest + dot(cast(of_recurrent, weight.dtype), weight, ((1,), (0,)), out_dtype=accumulated)
        of_gates = of_gates if active is None else jnp.where(active[:, None], of_gates, 0)
        state = _where(active, cast(following, hidden.dtype), total), _where(active, cast(following_cell, of_cell.dtype), of_cell)
        return state, cast(of_gates, kept.dtype)

    (of_hidden, of_cell), of_gates = lax.scan(step, (jnp.zeros_like(hidden), grad_cell), (grad, active, outputs, before, cells, cells_before, kept), reverse=True)
    return of_gates, of_hidden, of_cell
