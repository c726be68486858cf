"""Rules of products, attention and convolutions.

Legend: m, n free dims, k contracted, b batch; h heads, t queries, s keys, d and e head sizes.
"""

from graphacc.passes.partition.rules import Call, Dims, Labels, rule

_SUM = {"k": "sum"}


@rule("aten.mm.default")
def _mm(call: Call) -> Dims:
    return Dims({"self": "mk", "mat2": "kn"}, ["mn"], reduce=_SUM, linear=("self", "mat2"), matmul=True)


@rule("aten.bmm.default")
def _bmm(call: Call) -> Dims:
    return Dims({"self": "bmk", "mat2": "bkn"}, ["bmn"], reduce=_SUM, linear=("self", "mat2"), matmul=True)


@rule("aten.mv.default")
def _mv(call: Call) -> Dims:
    return Dims({"self": "mk", "vec": "k"}, ["m"], reduce=_SUM, linear=("self", "vec"))


@rule("aten.dot.default")
def _dot(call: Call) -> Dims:
    return Dims({"self": "k", "tensor": "k"}, [""], reduce=_SUM, linear=("self", "tensor"))


@rule("aten.addmm.default")
def _addmm(call: Call) -> Dims:
    added = _added(call, "mn")
    return Dims({"self": added, "mat1": "mk", "mat2": "kn"}, ["mn"], reduce=_SUM, once=("self",), matmul=True)


@rule("aten.baddbmm.default")
def _baddbmm(call: Call) -> Dims:
    added = _added(call, "bmn")
    return Dims({"self": added, "batch1": "bmk", "batch2": "bkn"}, ["bmn"], reduce=_SUM, once=("self",), matmul=True)


def _added(call: Call, result: str) -> Labels:
    """Labels of the tensor that is added to a product and broadcasts to it."""
    shape = call.shape("self")
    return [None if size == 1 else label for size, label in zip(shape, result[len(result) - len(shape) :])]


def _mask(call: Call, name: str) -> Labels:
    """Labels of a mask that broadcasts to [b, h, t, s]."""
    operand = call.operand(name)
    shape = () if operand is None else operand.shape
    labels = "bh.."[4 - len(shape) :]
    return [None if size == 1 or label == "." else label for size, label in zip(shape, labels)]


def _attention(call: Call, operands: dict[str, str], results: list[str]) -> Dims:
    """Batch and heads may be split; heads only if every query head has a key/value head of its own."""
    heads = "h" if call.shape("q")[1] == call.shape("k")[1] else None
    labels: dict[str, Labels] = {name: ["b", heads, *[None] * (len(text) - 2)] for name, text in operands.items()}
    masks = {
        name: ["b" if x == "b" else heads if x == "h" else None for x in _mask(call, name)] for name in ("mask", "dropout_mask")
    }
    return Dims({**labels, **masks}, [["b", heads, *[None] * (len(text) - 2)] for text in results])


@rule("graphacc.sdpa.default")
def _sdpa(call: Call) -> Dims:
    return _attention(call, {"q": "bhtd", "k": "bhsd", "v": "bhse"}, ["bhte", "bht"])


@rule("graphacc.sdpa_backward.default")
def _sdpa_backward(call: Call) -> Dims:
    operands = {"grad": "bhte", "q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "lse": "bht"}
    return _attention(call, operands, ["bhtd", "bhsd", "bhse"])


def _batch_first(rank: int) -> Labels:
    return ["b", *[None] * (rank - 1)]


@rule("aten.convolution.default")
def _convolution(call: Call) -> Dims:
    rank = len(call.shape("input"))
    linear = () if call.operand("bias") is not None else ("input", "weight")
    return Dims({"input": _batch_first(rank)}, [_batch_first(rank)], linear=linear)


@rule("aten.convolution_backward.default")
def _convolution_backward(call: Call) -> Dims:
    batch = _batch_first(len(call.shape("input")))
    whole = [None] * len(batch)
    return Dims({"grad_output": batch, "input": batch}, [batch, whole, [None]], reduce={"b": "sum"})
