"""Linear algebra on batches of matrices, through jax's own decompositions (LAPACK on the CPU)."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast
from graphacc.lowering.registry import register

_HIGHEST = lax.Precision.HIGHEST


def _no_error(ctx, index):
    """The status output of the ``_ex`` operators: XLA reports no failure, it gives NaN."""
    return jnp.zeros(ctx.element(index).shape, ctx.element(index).dtype)


@register("aten._linalg_check_errors.default")
def _check_errors(ctx, info, name, *, is_matrix):
    """Raising from inside a compiled program is impossible; what failed is NaN."""
    return None


def _transposed(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _cholesky(x, upper):
    factor = lax.linalg.cholesky(_transposed(x) if upper else x, symmetrize_input=False)
    return _transposed(factor) if upper else factor


@register("aten.cholesky.default")
def _cholesky_old(ctx, x, upper=False):
    return _cholesky(jnp.triu(x) if upper else jnp.tril(x), upper)


@register("aten.linalg_cholesky_ex.default")
def _cholesky_ex(ctx, x, *, upper=False, check_errors=False):
    return _cholesky(x, upper), _no_error(ctx, 1)


@register("aten.cholesky_solve.default")
def _cholesky_solve(ctx, b, factor, upper=False):
    lower = _transposed(factor) if upper else factor
    first = _solve_triangular(lower, b, upper=False)
    return _solve_triangular(_transposed(lower), first, upper=True)


@register("aten.cholesky_inverse.default")
def _cholesky_inverse(ctx, factor, upper=False):
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(ctx, identity, factor, upper)


def _solve_triangular(a, b, *, upper, left=True, unitriangular=False):
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@register("aten.linalg_solve_triangular.default")
def _linalg_solve_triangular(ctx, a, b, *, upper, left=True, unitriangular=False):
    return _solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)


@register("aten.triangular_solve.default")
def _triangular_solve(ctx, b, a, upper=True, transpose=False, unitriangular=False):
    system = jnp.swapaxes(a, -1, -2) if transpose else a
    solution = _solve_triangular(system, b, upper=upper != transpose, unitriangular=unitriangular)
    return solution, jnp.broadcast_to(a, ctx.element(1).shape)


@register("aten.linalg_qr.default")
def _qr(ctx, x, mode="reduced"):
    if mode == "r":
        return jnp.zeros(ctx.element(0).shape, x.dtype), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


@register("aten._linalg_svd.default")
def _svd(ctx, x, full_matrices=False, compute_uv=True, *, driver=None):
    if not compute_uv:
        empty = [jnp.zeros(ctx.element(i).shape, x.dtype) for i in (0, 2)]
        return empty[0], jnp.linalg.svd(x, compute_uv=False), empty[1]
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


@register("aten._linalg_eigh.default")
def _eigh(ctx, x, UPLO="L", compute_v=True):
    values, vectors = jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(ctx.element(1).shape, x.dtype)


@register("aten.linalg_inv_ex.default")
def _inv(ctx, x, *, check_errors=False):
    return jnp.linalg.inv(x), _no_error(ctx, 1)


@register("aten.linalg_eig.default")
def _eig(ctx, x):
    return tuple(jnp.linalg.eig(x))


def _svd_like(x, hermitian):
    """U, S and V^H with S >= 0; a hermitian matrix is read from its lower triangle."""
    if not hermitian:
        return jnp.linalg.svd(x, full_matrices=False)
    values, vectors = jnp.linalg.eigh(x, UPLO="L", symmetrize_input=False)
    return vectors * jnp.sign(values)[..., None, :], jnp.abs(values), _transposed(vectors)


@register("aten.linalg_pinv.atol_rtol_tensor")
def _pinv(ctx, x, *, atol=None, rtol=None, hermitian=False):
    u, s, vh = _svd_like(x, hermitian)
    largest = jnp.max(s, axis=-1, keepdims=True, initial=0)
    default = max(x.shape[-2:]) * np.asarray(jnp.finfo(x.dtype).eps, s.dtype) if atol is None else np.zeros((), s.dtype)
    relative = jnp.asarray(default if rtol is None else rtol)[..., None] * largest
    bound = relative if atol is None else jnp.maximum(relative, jnp.asarray(atol)[..., None])
    inverse = jnp.where(s > bound, 1 / s, 0)
    return cast(jnp.matmul(_transposed(vh) * inverse[..., None, :], _transposed(u), precision=_HIGHEST), ctx.dtype)


def _lu(x):
    """LU with torch's 1-based pivots."""
    lu, pivots, _ = lax.linalg.lu(x)
    return lu, pivots + np.int32(1)


@register("aten.linalg_lu_factor_ex.default")
def _lu_factor(ctx, x, *, pivot=True, check_errors=False):
    return *_lu(x), _no_error(ctx, 2)


def _permutation(pivots, size):
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(np.int32) - 1, size)


def _unpack(lu, pivots):
    rows, columns = lu.shape[-2:]
    k = min(rows, columns)
    lower = jnp.tril(lu[..., :, :k], -1) + jnp.eye(rows, k, dtype=lu.dtype)
    order = _permutation(pivots, rows)
    # Row order[i] of A is row i of L U: P[order[i], i] = 1.
    matrix = jnp.swapaxes(jax.nn.one_hot(order, rows, dtype=lu.dtype), -1, -2)
    return matrix, lower, jnp.triu(lu[..., :k, :])


@register("aten.linalg_lu.default")
def _linalg_lu(ctx, x, *, pivot=True):
    return _unpack(*_lu(x))


@register("aten.lu_unpack.default")
def _lu_unpack(ctx, lu, pivots, unpack_data=True, unpack_pivots=True):
    matrix, lower, upper = _unpack(lu, pivots)
    empty = [jnp.zeros(value.shape, lu.dtype) for value in ctx.val]
    return matrix if unpack_pivots else empty[0], lower if unpack_data else empty[1], upper if unpack_data else empty[2]


def _solve_factored(lu, pivots, b):
    batch = np.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu, b = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (lu, b))
    pivots = jnp.broadcast_to(pivots, batch + pivots.shape[-1:])
    b = jnp.take_along_axis(b, _permutation(pivots, lu.shape[-1])[..., None], -2)
    return _solve_triangular(lu, _solve_triangular(lu, b, upper=False, unitriangular=True), upper=True)


def _solve_factored_adjoint(lu, pivots, b):
    batch = np.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu, b = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (lu, b))
    pivots = jnp.broadcast_to(pivots, batch + pivots.shape[-1:])
    first = _solve_triangular(_transposed(lu), b, upper=False)
    second = _solve_triangular(_transposed(lu), first, upper=True, unitriangular=True)
    back = jnp.argsort(_permutation(pivots, lu.shape[-1]), axis=-1)
    return jnp.take_along_axis(second, back[..., None], -2)


@register("aten.linalg_lu_solve.default")
def _lu_solve(ctx, lu, pivots, b, *, left=True, adjoint=False):
    if left:
        return (_solve_factored_adjoint if adjoint else _solve_factored)(lu, pivots, b)
    # X A = B  <=>  A^H X^H = B^H
    return _transposed((_solve_factored if adjoint else _solve_factored_adjoint)(lu, pivots, _transposed(b)))


@register("aten.linalg_householder_product.default")
def _householder_product(ctx, x, tau):
    return lax.linalg.householder_product(x, tau)


@register("aten.linalg_matrix_exp.default")
def _matrix_exp(ctx, x):
    if not x.size:
        return x
    double = jnp.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else jnp.float64
    return cast(jax.scipy.linalg.expm(cast(x, double)), x.dtype)  # JAX's approximants of single precision are right to 1e-4 only


@register("aten.linalg_cross.default")
def _cross(ctx, a, b, *, dim=-1):
    a, b = (jnp.broadcast_to(x, ctx.shape) for x in (a, b))
    return jnp.roll(a, -1, dim) * jnp.roll(b, -2, dim) - jnp.roll(a, -2, dim) * jnp.roll(b, -1, dim)
