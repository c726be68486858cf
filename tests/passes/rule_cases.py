"""One small call or more for every operator that has a partition rule, in float64.

A case is the operator's name, a function of its tensors, and the tensors: a tuple is the shape of a floating tensor, an `ints`
is an integer tensor, a `bools` a mask.
"""

import dataclasses

import torch

import graphacc.ops  # noqa: F401  (registers the operators)

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.graphacc


@dataclasses.dataclass(frozen=True)
class ints:
    shape: tuple
    below: int


@dataclasses.dataclass(frozen=True)
class bools:
    shape: tuple


X = (4, 8, 4)
P = (4, 4, 8, 8)  # planes


def _call(name, *args, **kwargs):
    """`name` called with `args`, where ... stands for the next tensor."""
    namespace, packet, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def function(*tensors):
        left = iter(tensors)
        filled = [
            next(left) if arg is ... else [next(left) for _ in arg] if arg and isinstance(arg, list) and arg[0] is ... else arg
            for arg in args
        ]
        result = target(*filled, **kwargs)
        return [x for x in result if x is not None] if isinstance(result, (tuple, list)) else [result]

    return function


def _case(name, tensors, *args, **kwargs):
    return name, _call(name, *args, **kwargs), tensors


def _pointwise():
    yield _case("aten.add.Tensor", [X, X], ..., ...)
    yield _case("aten.add.Tensor", [X, (4,)], ..., ...)
    yield _case("aten.add.Tensor", [X], ..., 1.0)
    yield _case("aten.sub.Tensor", [X, (8, 1)], ..., ..., alpha=2)
    yield _case("aten.mul.Tensor", [X, X], ..., ...)
    yield _case("aten.mul.Tensor", [(1, 8, 1), (4, 1, 4)], ..., ...)
    yield _case("aten.div.Tensor", [X, (1, 8, 4)], ..., ...)
    yield _case("aten.neg.default", [X], ...)
    yield _case("aten.exp.default", [X], ...)
    yield _case("aten.maximum.default", [X, (4, 1, 4)], ..., ...)
    yield _case("aten.where.self", [bools(X), X, (8, 4)], ..., ..., ...)
    yield _case("aten._to_copy.default", [X], ..., dtype=torch.float32)
    yield _case("aten._to_copy.default", [ints(X, 9)], ..., dtype=torch.float64)
    yield _case("prims.convert_element_type.default", [X], ..., torch.float32)
    yield _case("prims.div.default", [X, X], ..., ...)
    yield _case("aten.alias.default", [X], ...)
    yield _case("aten.view.dtype", [X], ..., torch.int64)
    yield _case("aten.view.dtype", [X], ..., torch.float32)
    yield _case("aten.detach.default", [X], ...)
    yield _case("aten.lift_fresh_copy.default", [X], ...)
    yield _case("aten.clone.default", [X], ...)
    yield _case("aten.copy.default", [X, (4,)], ..., ...)
    yield _case("aten.masked_fill.Tensor", [X, bools((4, 1, 4)), ()], ..., ..., ...)
    yield _case("aten.fill.Scalar", [X], ..., 2.0)
    yield _case("aten.fill.Tensor", [X, ()], ..., ...)
    yield "aten.bucketize.Tensor", lambda x: [aten.bucketize.Tensor(x, torch.arange(-1.0, 1.0))], [X]
    yield "_c10d_functional.wait_tensor.default", lambda x: [x.sum(0).sum(0)], [X]
    for name in ("zeros_like", "ones_like", "empty_like"):
        yield f"aten.{name}.default", lambda x, f=getattr(aten, name): [torch.where(x == x, x, f(x))], [X]
    yield _case("aten.full_like.default", [X], ..., 3.0)
    yield _case("graphacc.after.default", [X, (4, 8)], ..., ...)
    yield "graphacc.barrier.default", lambda x, y: list(torch.ops.graphacc.barrier([x, y])), [X, (4, 8)]
    yield _case("graphacc.mark_sharding.default", [X], ..., "tp,,")
    frames = (8, 4, 8)  # [T, B, L]
    yield _case("graphacc.ctc_forward.default", [(4, 8), frames, bools((4, 8)), bools((8, 4))], ..., ..., ..., ...)
    yield _case("graphacc.ctc_backward.default", [frames, (4, 8), frames, bools((4, 8)), bools((8, 4)), frames], ..., ..., ..., ..., ..., ...)
    steps, state = (6, 4, 12), (4, 3)  # [T, B, 4 * H], [B, H]
    yield _case("graphacc.recurrence.default", [steps, state, state, (12, 3), (12,), bools((6, 4))], "lstm", ..., ..., ..., ..., ..., ...)
    yield _case("graphacc.recurrence.default", [(6, 4, 9), state, (9, 3)], "gru", ..., ..., None, ..., None, None)
    states = (6, 4, 3)
    backward = [states, state, state, state, (12, 3), states, states, steps, bools((6, 4))]
    yield _case("graphacc.recurrence_backward.default", backward, "lstm", ..., ..., ..., ..., ..., ..., ..., ..., ...)


def _move():
    yield _case("aten.view.default", [X], ..., [32, 4])
    yield _case("aten.view.default", [X], ..., [4, 4, 2, 4])
    yield _case("aten.view.default", [X], ..., [2, 2, 32])
    yield _case("aten._unsafe_view.default", [X], ..., [128])
    yield _case("aten.permute.default", [X], ..., [2, 0, -2])
    yield _case("aten.permute_copy.default", [X], ..., [1, 0, 2])
    yield _case("aten.transpose.int", [X], ..., 0, -1)
    yield _case("aten.t.default", [(4, 8)], ...)
    yield _case("aten.unsqueeze.default", [X], ..., -2)
    yield _case("aten.squeeze.default", [(4, 1, 8)], ...)
    yield _case("aten.squeeze.dim", [(4, 1, 8)], ..., 1)
    yield _case("aten.squeeze.dim", [(4, 1, 8)], ..., 0)
    yield _case("aten.squeeze.dims", [(4, 1, 8)], ..., [0, 1])
    yield _case("aten.expand.default", [(4, 1, 4)], ..., [4, -1, 8, 4])
    yield _case("prims.broadcast_in_dim.default", [(4, 1)], ..., [4, 8, 4], [0, 2])
    yield _case("aten.slice.Tensor", [X], ..., 1, 1, 7, 2)
    yield _case("aten.slice.Tensor", [X], ..., 1, 1, 2**63 - 1, 2)
    yield _case("aten.slice.Tensor", [X], ..., 1, 0, 8, 4)
    yield _case("aten.slice.Tensor", [(4, 12, 4)], ..., 1, 4, 12)
    yield _case("aten.slice.Tensor", [X], ..., 1, 0, 4)
    yield _case("aten.flip.default", [X], ..., [1])
    yield _case("aten.roll.default", [X], ..., [1, 2], [0, 1])
    yield _case("aten.roll.default", [X], ..., [3])
    yield _case("aten.cumsum.default", [X], ..., -1)
    yield _case("aten.cumprod.default", [X], ..., 0)
    yield _case("aten.tril.default", [X], ..., 1)
    yield _case("aten.triu.default", [X], ...)
    yield _case("aten.select.int", [X], ..., 1, 3)
    yield _case("aten.split.Tensor", [X], ..., 3, 1)
    yield _case("aten.split.Tensor", [X], ..., 4, 1)
    yield _case("aten.split_with_sizes.default", [(4, 16, 4)], ..., [8, 4, 4], 1)
    yield _case("aten.slice_backward.default", [(4, 4, 4)], ..., [4, 8, 4], 1, 4, 8, 1)
    yield _case("aten.cat.default", [X, (4, 4, 4)], [..., ...], 1)
    yield _case("aten.split_with_sizes.default", [X], ..., [1, 7], 1)
    yield _case("aten.unbind.int", [X], ..., 0)
    yield _case("aten.slice_backward.default", [(4, 3, 4)], ..., [4, 8, 4], 1, 1, 7, 2)
    yield _case("aten.slice_backward.default", [(4, 4, 4)], ..., [4, 8, 4], 1, 1, 2**63 - 1, 2)
    yield _case("aten.slice_backward.default", [(4, 2, 4)], ..., [4, 8, 4], 1, 0, 8, 4)
    yield _case("aten.select_backward.default", [(4, 4)], ..., [4, 8, 4], 1, 2)
    yield _case("aten.slice_scatter.default", [X, (4, 3, 4)], ..., ..., 1, 1, 7, 2)
    yield _case("aten.select_scatter.default", [X, (4, 4)], ..., ..., 1, 2)
    yield _case("aten.constant_pad_nd.default", [X], ..., [0, 0, 1, 2], 0.0)
    yield _case("aten.constant_pad_nd.default", [X], ..., [1, 0], 5.0)
    yield _case("aten.cat.default", [X, X, X], [..., ..., ...], 0)
    yield _case("aten.cat.default", [X, (4, 2, 4)], [..., ...], 1)
    yield _case("aten.stack.default", [X, X], [..., ...], 1)
    yield _case("aten.repeat.default", [X], ..., [2, 3, 1, 2])
    for name, args in (("zeros", ()), ("ones", ()), ("full", (7.0,)), ("empty", ())):
        yield (
            f"aten.new_{name}.default",
            lambda x, f=getattr(aten, f"new_{name}").default, a=args: [torch.where(x == x, x, f(x, [4, 8, 4], *a))],
            [X],
        )
    yield "aten.as_strided.default", lambda x: [aten.as_strided(x.clone(), [4, 4], [8, 1])], [X]
    yield "aten.as_strided_scatter.default", lambda x, y: [aten.as_strided_scatter(x.clone(), y, [4, 4], [8, 1])], [X, (4, 4)]
    yield "graphacc.shard.default", lambda x, y: [x.new_ones(8, 4) * y, (x.sum((0, 1)) + 1).expand(4, 8, 4) * x], [X, (8, 4)]


def _reduce():
    for name, args in (
        ("sum.default", ()),
        ("mean.default", ()),
        ("max.default", ()),
        ("min.default", ()),
        ("linalg_vector_norm.default", ()),
    ):
        yield _case(f"aten.{name}", [X], ..., *args)
    yield _case("aten.sum.dim_IntList", [X], ..., [0, -1], True)
    yield _case("aten.sum.dim_IntList", [ints(X, 9)], ..., [1])
    yield _case("aten.mean.dim", [X], ..., [0, 1])
    yield _case("aten.linalg_vector_norm.default", [X], ..., 1, [1])
    yield _case("aten.linalg_vector_norm.default", [X], ..., 2, [0, 1], True)
    yield _case("prims.sum.default", [X], ..., [0, 1])
    yield _case("aten.amax.default", [ints((4, 8), 9)], ..., [1])
    yield _case("aten.amin.default", [ints((4, 8), 9)], ..., [0])
    yield _case("aten.amax.default", [X], ..., [0], True)
    yield _case("aten.amin.default", [X], ..., [0, 1])
    yield _case("aten.any.default", [bools(X)], ...)
    for name, dim in (("any.dim", 1), ("any.dims", [0, 1]), ("all.dim", 1)):
        yield _case(f"aten.{name}", [bools(X)], ..., dim)
    yield _case("aten.all.default", [bools(X)], ...)
    yield _case("aten.var.correction", [X], ..., [0, 2], correction=1)
    yield _case("prims.var.default", [X], ..., [0], 0.0)
    yield _case("aten.var_mean.correction", [X], ..., [0, 2], correction=0)
    yield _case("aten.var_mean.correction", [X], ..., [1], keepdim=True)
    for name in ("prod.dim_int", "argmax.default", "argmin.default", "max.dim", "min.dim", "median.dim", "mode.default"):
        yield _case(f"aten.{name}", [X], ..., 1)
    yield _case("aten.logsumexp.default", [X], ..., [1], True)
    yield _case("aten._softmax.default", [X], ..., 1, False)
    yield _case("aten._log_softmax.default", [X], ..., -1, False)
    yield _case("aten._safe_softmax.default", [X], ..., 0)
    yield _case("aten._softmax_backward_data.default", [X, X], ..., ..., 1, torch.float64)
    yield _case("aten._log_softmax_backward_data.default", [X, X], ..., ..., 1, torch.float64)
    yield _case("aten.sort.default", [X], ..., 1)
    yield "aten.sort.stable", lambda x: list(aten.sort.stable(x, stable=True, dim=1)), [X]
    yield _case("aten.topk.default", [X], ..., 3, 1)
    yield _case("aten.cummax.default", [X], ..., 0)
    yield _case("aten.cummin.default", [X], ..., 1)
    yield _case("aten.logcumsumexp.default", [X], ..., 2)
    yield _case("aten.histc.default", [X], ..., 5, -2, 2)
    yield _case("aten.histc.default", [X], ..., 5)


def _matmul():
    yield _case("aten.mm.default", [(4, 8), (8, 12)], ..., ...)
    yield _case("aten.bmm.default", [(4, 4, 8), (4, 8, 4)], ..., ...)
    yield _case("aten.mv.default", [(4, 8), (8,)], ..., ...)
    yield _case("aten.dot.default", [(8,), (8,)], ..., ...)
    yield _case("aten.addmm.default", [(12,), (4, 8), (8, 12)], ..., ..., ..., beta=2, alpha=3)
    yield _case("aten.baddbmm.default", [(4, 1, 4), (4, 4, 8), (4, 8, 4)], ..., ..., ...)
    q, grouped, row = (4, 4, 8, 4), (4, 2, 8, 4), (4, 4, 8)
    yield _case("graphacc.sdpa.default", [q, q, q], ..., ..., ..., None, None, True, 0.5)
    yield _case("graphacc.sdpa.default", [q, grouped, grouped, bools((4, 1, 1, 8))], ..., ..., ..., ..., None, False, 0.5)
    yield _case("graphacc.sdpa.default", [q, q, q, (4, 8, 8), (4, 4, 8, 8)], ..., ..., ..., ..., ..., False, 0.5)
    args = (..., ..., ..., ..., None, None, ..., ..., True, 0.5)
    yield _case("graphacc.sdpa_backward.default", [q, q, q, q, q, row], *args)
    yield _case("graphacc.sdpa.default", [q, (4, 1, 8, 4), (4, 1, 8, 4)], ..., ..., ..., None, None, True, 0.5)
    yield _case("graphacc.sdpa_backward.default", [q, q, (4, 1, 8, 4), (4, 1, 8, 4), q, row], *args)
    yield _case("graphacc.sdpa_backward.default", [q, q, grouped, grouped, q, row], *args)
    yield from _flash(q, grouped, row)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield _case("aten.convolution.default", [P, (8, 4, 3, 3), (8,)], ..., ..., ..., *shape)
    yield _case("aten.convolution.default", [P, (8, 4, 3, 3)], ..., ..., None, *shape)
    backward = ([8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield _case(
        "aten.convolution_backward.default", [(4, 8, 8, 8), P, (8, 4, 3, 3)], ..., ..., ..., *backward, [True, True, True]
    )
    yield _case(
        "aten.convolution_backward.default", [(4, 8, 8, 8), P, (8, 4, 3, 3)], ..., ..., ..., *backward, [False, True, False]
    )


def _flash(q, grouped, row):
    """Causal; grouped heads with padding; a bias with a gradient and dropout, whose numbers depend on the place of a block."""
    forward, backward = "graphacc.flash_attention.default", "graphacc.flash_attention_backward.default"
    causal, dropped = (-1, 0, 0.5, 0, 0.0, 0, []), (3, 2, 0.5, 0, 0.3, 7, [4, 4, 8, 8])
    ids = lambda x: (x * 2).floor().to(torch.int32)  # noqa: E731
    none = (None,) * 5
    yield _case(forward, [q, q, q], ..., ..., ..., *none, *causal)
    yield _case(backward, [q, q, q, q, q, row], *[...] * 4, *none, ..., ..., *causal, False)
    operator = torch.ops.graphacc.flash_attention.default
    yield forward, lambda q, k, v, a, b: list(operator(q, k, v, None, ids(a), ids(b), None, None, *causal)), [q, *[grouped] * 2, *[(4, 8)] * 2]
    key = ints((2,), 99)
    yield _case(forward, [q, q, q, (4, 8, 8), key], *[...] * 4, None, None, ..., None, *dropped)
    for bias in ((4, 8, 8), (4, 1, 1, 8), (1, 4, 8, 1)):
        tensors = [q, q, grouped, grouped, bias, key, q, row]
        yield _case(backward, tensors, *[...] * 5, None, None, ..., None, ..., ..., *dropped, True)


def _index():
    yield _case("aten.embedding.default", [(12, 8), ints((4, 8), 12)], ..., ...)
    for by_frequency in (False, True):
        yield _case("aten.embedding_dense_backward.default", [X, ints((4, 8), 12)], ..., ..., 12, 3, by_frequency)
    yield _case("aten.gather.default", [X, ints((4, 2, 4), 8)], ..., 1, ...)
    yield _case("aten.gather.default", [X, ints((2, 8, 4), 4)], ..., 2, ...)
    yield _case("aten.scatter.value", [X, ints((4, 1, 4), 8)], ..., 1, ..., 2.0)
    yield _case("aten.scatter.src", [X, ints((4, 1, 4), 8), (4, 1, 4)], ..., 1, ..., ...)
    yield _case("aten.scatter_add.default", [X, ints((4, 2, 4), 8), (4, 2, 4)], ..., 1, ..., ...)
    yield _case("aten.scatter_reduce.two", [X, ints((4, 2, 4), 8), (4, 2, 4)], ..., 1, ..., ..., "amax")
    yield _case("aten.index_select.default", [X, ints((4,), 8)], ..., 1, ...)
    yield _case("aten.index_add.default", [X, ints((4,), 8), (4, 4, 4)], ..., 1, ..., ...)
    for index in (aten.index.Tensor, aten._unsafe_index.Tensor):
        name = f"aten.{index._schema.name.removeprefix('aten::')}.Tensor"
        yield name, lambda x, i, f=index: [f(x, [i])], [X, ints((4, 8), 4)]
        yield name, lambda x, i, j, f=index: [f(x, [None, i, j])], [X, ints((4, 1), 8), ints((4,), 4)]
        yield name, lambda x, i, j, f=index: [f(x, [i, None, j])], [X, ints((4,), 4), ints((4,), 4)]
        yield name, lambda x, i, f=index: [f(x, [torch.arange(4), i])], [X, ints((4,), 8)]
        yield name, lambda x, i, f=index: [f(x, [torch.arange(4).unsqueeze(1), i])], [X, ints((4, 8), 8)]
        yield name, lambda x, f=index: [f(x, [torch.arange(4), None, torch.arange(4)])], [X]
    for put in (aten.index_put.default, aten._unsafe_index_put.default):
        name = f"aten.{put._schema.name.removeprefix('aten::')}.default"
        yield name, lambda x, i, v, f=put: [f(x, [i], v, True)], [X, ints((4, 8), 4), (4, 8, 8, 4)]
        yield name, lambda i, v, f=put: [f(v.new_zeros(12, 4), [i], v, True)], [ints((4, 8), 12), X]
        yield name, lambda x, i, v, f=put: [f(x, [torch.arange(4), i], v, True)], [X, ints((4,), 8), (4, 4)]
        yield name, lambda x, i, v, f=put: [f(x, [torch.arange(4), i], v, False)], [X, ints((4,), 8), (4, 4)]
        yield name, lambda x, v, f=put: [f(x, [torch.arange(4), None, torch.arange(4)], v, False)], [X, (4, 8)]
        yield name, lambda x, i, v, f=put: [f(x, [None, i], v, False)], [X, ints((1,), 8), (4, 1, 4)]


def _nn():
    yield _case("aten.native_layer_norm.default", [X, (4,), (4,)], ..., [4], ..., ..., 1e-5)
    stats = (4, 8, 1)
    yield _case(
        "aten.native_layer_norm_backward.default", [X, X, stats, stats, (4,), (4,)], ..., ..., [4], ..., ..., ..., ..., [True] * 3
    )
    yield _case("aten.native_group_norm.default", [P, (4,), (4,)], ..., ..., ..., 4, 4, 64, 2, 1e-5)
    yield _case(
        "aten.native_group_norm_backward.default", [P, P, (4, 2), (4, 2), (4,)], ..., ..., ..., ..., ..., 4, 4, 64, 2, [True] * 3
    )
    line, cube = (4, 4, 8), (4, 4, 8, 4, 4)
    for mode in ("reflection", "replication"):
        yield _case(f"aten.{mode}_pad1d.default", [line], ..., [1, 2])
        yield _case(f"aten.{mode}_pad1d_backward.default", [(4, 4, 11), line], ..., ..., [1, 2])
        yield _case(f"aten.{mode}_pad2d.default", [P], ..., [1, 2, 0, 1])
        yield _case(f"aten.{mode}_pad2d_backward.default", [(4, 4, 9, 11), P], ..., ..., [1, 2, 0, 1])
    half, pool = (4, 4, 4, 4), ([2, 2], [2, 2], [0, 0])
    yield _case("aten.max_pool2d_with_indices.default", [P], ..., [2, 2])
    yield _case("aten.max_pool2d_with_indices_backward.default", [half, P, ints(half, 64)], ..., ..., *pool, [1, 1], False, ...)
    yield _case("aten.avg_pool2d.default", [P], ..., [2, 2])
    yield _case("aten.avg_pool2d_backward.default", [half, P], ..., ..., *pool, False, True, None)
    yield _case("aten._adaptive_avg_pool2d.default", [P], ..., [4, 4])
    yield _case("aten._adaptive_avg_pool2d_backward.default", [half, P], ..., ...)
    yield _case("aten.adaptive_max_pool2d.default", [P], ..., [4, 4])
    yield _case("aten.adaptive_max_pool2d_backward.default", [half, P, ints(half, 64)], ..., ..., ...)
    small, pool3 = (4, 4, 4, 2, 2), ([2] * 3, [2] * 3, [0] * 3)
    yield _case("aten.max_pool3d_with_indices.default", [cube], ..., [2, 2, 2])
    yield _case(
        "aten.max_pool3d_with_indices_backward.default", [small, cube, ints(small, 128)], ..., ..., *pool3, [1] * 3, False, ...
    )
    yield _case("aten.avg_pool3d.default", [cube], ..., [2, 2, 2])
    yield _case("aten.avg_pool3d_backward.default", [small, cube], ..., ..., *pool3, False, True, None)
    yield _case("aten._adaptive_avg_pool3d.default", [cube], ..., [2, 2, 2])
    yield _case("aten._adaptive_avg_pool3d_backward.default", [(4, 4, 2, 2, 2), cube], ..., ...)
    up2, up3 = (4, 4, 16, 16), (4, 4, 16, 8, 8)
    for mode, flags in (("nearest2d", ()), ("bilinear2d", (False,)), ("bicubic2d", (False,))):
        if flags:
            yield _case(f"aten.upsample_{mode}.default", [P], ..., [16, 16], *flags)
        yield _case(f"aten.upsample_{mode}_backward.default", [up2], ..., [16, 16], list(P), *flags)
    for mode, flags in (("nearest3d", ()), ("trilinear3d", (False,))):
        if flags:
            yield _case(f"aten.upsample_{mode}.default", [cube], ..., [16, 8, 8], *flags)
        yield _case(f"aten.upsample_{mode}_backward.default", [up3], ..., [16, 8, 8], list(cube), *flags)
    grid = (4, 8, 8, 2)
    yield _case("aten.grid_sampler_2d.default", [P, grid], ..., ..., 0, 0, False)
    for mask in ([True, True], [True, False], [False, True]):
        yield _case("aten.grid_sampler_2d_backward.default", [P, P, grid], ..., ..., ..., 0, 0, False, mask)
    yield _case("aten.im2col.default", [P], ..., [3, 3], [1, 1], [1, 1], [1, 1])
    yield _case("aten.pixel_shuffle.default", [P], ..., 2)
    yield _case("aten.pixel_unshuffle.default", [P], ..., 2)


def _batched():
    """Matrices that can be factored, whatever they are multiplied with, at the end of a batch of 4 x 8."""
    batch, rows = (4, 8, 4, 4), (4, 8, 4, 3)

    def operator(name):
        return getattr(aten, name).default

    def definite(x):
        return x @ x.mT + 4 * torch.eye(4, dtype=x.dtype)

    def of_matrix(name, results=slice(None), make=definite):
        def run(x):
            found = operator(name)(make(x))
            return list(found)[results] if isinstance(found, tuple) else [found]

        return f"aten.{name}.default", run, [batch]

    for name in ("cholesky", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_qr", "cholesky_inverse"):
        yield of_matrix(name)
    yield of_matrix("linalg_matrix_exp", make=lambda x: x / 8)
    yield of_matrix("_linalg_eigh", results=slice(1))
    yield of_matrix("_linalg_svd", results=slice(1, 2))
    for matrices in (batch, (8, 4, 4)):
        yield "aten.cholesky_solve.default", lambda x, y: [aten.cholesky_solve(y, definite(x))], [matrices, rows]
        yield "aten.linalg_solve_triangular.default", lambda x, y: [aten.linalg_solve_triangular(definite(x), y, upper=False)], [matrices, rows]
    factors = lambda x: aten.linalg_lu_factor_ex(definite(x))[:2]  # noqa: E731
    yield "aten.lu_unpack.default", lambda x: list(aten.lu_unpack(*factors(x))), [batch]
    yield _case("aten.linalg_householder_product.default", [(4, 8, 4, 3), (4, 8, 3)], ..., ...)
    yield _case("aten._cdist_forward.default", [(4, 8, 4, 3), (4, 8, 5, 3)], ..., ..., 2.0, 2)
    yield _case("aten._cdist_backward.default", [(4, 8, 4, 5), (4, 8, 4, 3), (4, 8, 5, 3), (4, 8, 4, 5)], ..., ..., ..., 2.0, ...)
    yield "aten.view_as_complex.default", lambda x: [torch.view_as_real(torch.view_as_complex(x).exp())], [(4, 8, 4, 2)]
    yield "aten.view_as_real.default", lambda x: [torch.view_as_real(torch.view_as_complex(x) * 2)], [(4, 8, 4, 2)]
    for name in ("complex", "polar"):
        yield f"aten.{name}.default", lambda x, y, call=operator(name): [torch.view_as_real(call(x, y))], [(4, 8), (4, 8)]
    for name in ("_conj", "_conj_physical"):
        conjugate = lambda x, y, call=operator(name): [torch.view_as_real(aten._conj_physical(call(torch.complex(x, y))))]  # noqa: E731
        yield f"aten.{name}.default", conjugate, [(4, 8), (4, 8)]
    for dims in ([1], [0, 2]):
        both = lambda x, y, dims=dims: aten._fft_c2c(torch.complex(x, y), dims, 0, True)  # noqa: E731
        yield "aten._fft_c2c.default", lambda x, y, both=both: [torch.view_as_real(both(x, y))], [(4, 8, 4), (4, 8, 4)]
        yield "aten._fft_r2c.default", lambda x, dims=dims: [torch.view_as_real(aten._fft_r2c(x, dims, 0, True))], [(4, 8, 4)]
        yield "aten._fft_c2r.default", lambda x, y, dims=dims: [aten._fft_c2r(torch.complex(x, y), dims, 0, 2 * x.shape[dims[-1]] - 2)], [(4, 8, 4), (4, 8, 4)]
    yield _case("aten.unfold.default", [(4, 8, 4)], ..., 1, 3, 2)
    yield _case("aten.unfold_backward.default", [(4, 3, 4, 3)], ..., [4, 8, 4], 1, 3, 2)
    for dims in ((0, 1), (-1, 1)):
        yield _case("aten.diagonal.default", [(4, 8, 4)], ..., 1, *dims)
        yield _case("aten.diagonal_copy.default", [(4, 8, 4)], ..., 1, *dims)
        yield _case("aten.diag_embed.default", [(4, 8)], ..., -1, *dims)
        on_diagonal = tuple(torch.empty(X).diagonal(1, *dims).shape)
        yield _case("aten.diagonal_backward.default", [on_diagonal], ..., list(X), 1, *dims)
        yield _case("aten.diagonal_scatter.default", [X, on_diagonal], ..., ..., 1, *dims)
    yield "aten.searchsorted.Tensor", lambda x, y: [aten.searchsorted(x.sort().values, y)], [(4, 8), (4, 4)]
    yield "aten.searchsorted.Tensor", lambda x, y: [aten.searchsorted(x.sort().values, y)], [(8,), (4, 4)]
    yield _case("aten.kthvalue.default", [(4, 8, 4)], ..., 2, 1)
    yield _case("aten.nanmedian.dim", [(4, 8, 4)], ..., 1)
    line = (4, 4, 8)
    yield _case("aten.upsample_linear1d.default", [line], ..., [16], False)
    yield _case("aten.upsample_linear1d_backward.default", [(4, 4, 16)], ..., [16], list(line), False)
    yield _case("aten.upsample_nearest1d_backward.default", [(4, 4, 16)], ..., [16], list(line))
    plane = (4, 4, 8, 8)
    for mode in ("bilinear", "bicubic"):
        yield _case(f"aten._upsample_{mode}2d_aa.default", [plane], ..., [4, 4], False)
        yield _case(f"aten._upsample_{mode}2d_aa_backward.default", [(4, 4, 4, 4)], ..., [4, 4], list(plane), False)
    yield "aten.max_unpool2d.default", lambda x: [aten.max_unpool2d(*aten.max_pool2d_with_indices(x, [2, 2]), [8, 8])], [plane]
    yield _case("aten.col2im.default", [(4, 36, 64)], ..., [8, 8], [3, 3], [1, 1], [1, 1], [1, 1])
    yield _case("aten.channel_shuffle.default", [plane], ..., 2)
    cube, points = (4, 4, 4, 4, 4), (4, 4, 4, 4, 3)
    yield _case("aten.grid_sampler_3d.default", [cube, points], ..., ..., 0, 0, False)
    yield _case("aten.grid_sampler_3d_backward.default", [cube, cube, points], ..., ..., ..., 0, 0, False, [True, True])


def _experts():
    """Sorted rows are read in the tensor's order too; buckets only on their way there and back."""
    ids, matrices = ints((8,), 4), (4, 4, 8)
    offsets = lambda i: ops.expert_offsets(i, 4)  # noqa: E731
    yield _case("graphacc.sort_rows.default", [(8, 4), ids], ..., ...)
    yield "graphacc.sort_rows.default", lambda x, i: [ops.sort_rows(x, i).cumsum(0), ops.sort_rows(i, i)], [(8, 4), ids]
    yield "graphacc.sort_rows.default", lambda x, y, i: [ops.sort_rows(x, i).exp() + y, (ops.sort_rows(x, i) * y).sum(0)], [(8, 4), (8, 4), ids]
    yield _case("graphacc.unsort_rows.default", [(8, 4), ids], ..., ...)
    yield "graphacc.unsort_rows.default", lambda x, i: [ops.unsort_rows(ops.sort_rows(x, i).exp(), i)], [(8, 4), ids]
    yield _case("graphacc.expert_offsets.default", [ids], ..., 4)
    yield _case("graphacc.grouped_mm.default", [(8, 4), matrices, ints((4,), 9)], ..., ..., ...)
    yield (
        "graphacc.grouped_mm.default",
        lambda x, w, i: [ops.unsort_rows(ops.grouped_mm(ops.sort_rows(x, i), w, offsets(i)), i), ops.grouped_mm(x, w, offsets(i))],
        [(8, 4), matrices, ids],
    )
    yield _case("graphacc.grouped_mm_weight_grad.default", [(8, 4), (8, 8), ints((4,), 9)], ..., ..., ...)
    yield (
        "graphacc.grouped_mm_weight_grad.default",
        lambda x, y, i: [ops.grouped_mm_weight_grad(ops.sort_rows(x, i), ops.sort_rows(y, i), offsets(i))],
        [(8, 4), (8, 4), ids],
    )
    for name in ("bucket_rows", "unbucket_rows"):
        yield f"graphacc.{name}.default", lambda x, i: [ops.unbucket_rows(ops.bucket_rows(x, i, 2, 2, 8, 0) * 2, i, 2)], [(8, 4), ids]


CASES = [*_pointwise(), *_move(), *_reduce(), *_matmul(), *_index(), *_nn(), *_batched(), *_experts()]
