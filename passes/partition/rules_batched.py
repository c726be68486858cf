"""Rules of operators that work on matrices, vectors, transforms or pairs at the end of a batch, and of what arranges such ends."""

from collections.abc import Sequence

from graphacc.passes.partition.rules import Call, Dims, Labels, rule
from graphacc.passes.partition.rules_pointwise import broadcast_labels, pointwise

# Operator -> dims at the end of every tensor operand that belong together, and of every result; what is before is a batch, broadcast.
_CORES = {
    "aten.cholesky.default": ([2], [2]),
    "aten.cholesky_inverse.default": ([2], [2]),
    "aten.cholesky_solve.default": ([2, 2], [2]),
    "aten.linalg_cholesky_ex.default": ([2], [2, 0]),
    "aten._linalg_eigh.default": ([2], [1, 2]),
    "aten._linalg_svd.default": ([2], [2, 1, 2]),
    "aten.linalg_householder_product.default": ([2, 1], [2]),
    "aten.linalg_inv_ex.default": ([2], [2, 0]),
    "aten.linalg_lu.default": ([2], [2, 2, 2]),
    "aten.linalg_lu_factor_ex.default": ([2], [2, 1, 0]),
    "aten.linalg_matrix_exp.default": ([2], [2]),
    "aten.linalg_qr.default": ([2], [2, 2]),
    "aten.linalg_solve_triangular.default": ([2, 2], [2]),
    "aten.lu_unpack.default": ([2, 1], [2, 2, 2]),
    "aten._cdist_forward.default": ([2, 2], [2]),
    "aten._cdist_backward.default": ([2, 2, 2, 2], [2]),
    "aten.view_as_complex.default": ([1], [0]),
    "aten.view_as_real.default": ([0], [1]),
}


def _batched(operands: list[int], results: list[int]):
    def of_batch(call: Call) -> Dims:
        (value, core), *_ = [(value, core) for value, core in zip(call.results, results) if value is not None]
        batch = tuple(value.shape[: len(value.shape) - core])
        labels = {
            operand.name: [*broadcast_labels(operand.shape[: len(operand.shape) - core], batch), *[None] * core]
            for operand, core in zip(call.operands, operands, strict=True)
        }
        return Dims(labels, [[*range(len(batch)), *[None] * core] for core in results])

    return of_batch


for _name, _cores in _CORES.items():
    rule(_name)(_batched(*_cores))


@rule("aten.complex.default aten.polar.default aten._conj.default aten._conj_physical.default")
def _complex(call: Call) -> Dims:
    return pointwise(call)


def _without(rank: int, whole: Sequence[int]) -> Labels:
    held = {dim % rank for dim in whole}
    return [None if dim in held else dim for dim in range(rank)]


@rule("aten._fft_c2c.default aten._fft_r2c.default aten._fft_c2r.default")
def _transform(call: Call) -> Dims:
    """What is transformed is kept whole."""
    labels = _without(len(call.shape("self")), call["dim"])
    return Dims({"self": labels}, [labels])


@rule("aten.unfold.default")
def _windows(call: Call) -> Dims:
    labels = _without(len(call.shape("self")), [call["dimension"]])
    return Dims({"self": labels}, [[*labels, None]])


@rule("aten.unfold_backward.default")
def _windows_backward(call: Call) -> Dims:
    labels = _without(len(call["input_sizes"]), [call["dim"]])
    return Dims({"grad_in": [*labels, None]}, [labels], size="input_sizes")


def _beside_diagonal(call: Call, rank: int) -> tuple[Labels, Labels]:
    """Labels of the tensor with both dims of the diagonal, and of that with the diagonal as its last dim."""
    labels = _without(rank, [call["dim1"], call["dim2"]])
    return labels, [*(label for label in labels if label is not None), None]


@rule("aten.diagonal.default aten.diagonal_copy.default")
def _diagonal(call: Call) -> Dims:
    whole, diagonal = _beside_diagonal(call, len(call.shape("self")))
    return Dims({"self": whole}, [diagonal])


@rule("aten.diagonal_backward.default")
def _diagonal_backward(call: Call) -> Dims:
    whole, diagonal = _beside_diagonal(call, len(call["input_sizes"]))
    return Dims({"grad_output": diagonal}, [whole], size="input_sizes")


@rule("aten.diag_embed.default")
def _diagonal_matrix(call: Call) -> Dims:
    whole, diagonal = _beside_diagonal(call, len(call.shape("self")) + 1)
    return Dims({"self": diagonal}, [whole])


@rule("aten.diagonal_scatter.default")
def _onto_diagonal(call: Call) -> Dims:
    whole, diagonal = _beside_diagonal(call, len(call.shape("self")))
    return Dims({"self": whole, "src": diagonal}, [whole])


@rule("aten.searchsorted.Tensor")
def _search(call: Call) -> Dims:
    """Every row of a sorted tensor is searched by itself; a single sequence, for values that may be split at will."""
    rank, sorted_rank = len(call.shape("self")), len(call.shape("sorted_sequence"))
    labels = list(range(rank)) if sorted_rank == 1 else _without(rank, [-1])
    operands = {"self": labels, "sorted_sequence": [None] if sorted_rank == 1 else labels, "sorter": [None] if sorted_rank == 1 else labels}
    return Dims({operand.name: operands[operand.name] for operand in call.operands}, [labels])
