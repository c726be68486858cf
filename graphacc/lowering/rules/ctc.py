"""The recursion of the CTC loss as a loop over frames."""

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from graphacc.lowering.registry import register
from graphacc.ops.ctc import NEVER


def _ways(alpha, skips):
    never = jnp.asarray(NEVER, alpha.dtype)
    before = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=NEVER)
    return jnp.stack((alpha, before[:, 1:-1], jnp.where(skips, before[:, :-2], never)))


@register("graphacc.ctc_forward.default")
def _ctc_forward(ctx, first, emitted, skips, active):
    def frame(alpha, here):
        emitted, has = here
        following = jnp.maximum(logsumexp(_ways(alpha, skips), axis=0) + emitted, jnp.asarray(NEVER, alpha.dtype))
        alpha = jnp.where(has[:, None], following, alpha)
        return alpha, alpha

    return lax.scan(frame, first, (emitted, active))[1]


@register("graphacc.ctc_backward.default")
def _ctc_backward(ctx, grad, first, emitted, skips, active, alphas):
    before = jnp.concatenate((first[None], alphas[:-1]))[: emitted.shape[0]]

    def frame(following, here):
        grad, alpha, emitted, has = here
        total, has = following + grad, has[:, None]
        ways = _ways(alpha, skips)
        reached = logsumexp(ways, axis=0)
        of_emitted = jnp.where(has & (reached + emitted >= NEVER), total, 0)
        stay, step, skip = jnp.exp(ways - reached) * of_emitted
        skip = jnp.where(skips, skip, 0)
        back = stay + jnp.pad(step, ((0, 0), (0, 1)))[:, 1:] + jnp.pad(skip, ((0, 0), (0, 2)))[:, 2:]
        return jnp.where(has, back, total), of_emitted

    return lax.scan(frame, jnp.zeros_like(first), (grad, before, emitted, active), reverse=True)
