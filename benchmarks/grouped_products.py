"""Claim: the products of a mixture's experts take at most 1.05 of the time of a loop of torch products, one for each expert.

The product of all experts and both of its gradients, as the custom calls that a compiled step makes, against torch.mm of each expert's rows in
a loop, in turn in one process with the same number of threads. XLA's own ragged dot stands beside them.
"""

import argparse
import os
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--rows", type=int, default=2048, help="of all experts")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # XLA sizes its thread pool by it
    import torch

    torch.set_num_threads(args.threads)
    print(f"{args.rows} rows, [{args.hidden}, {args.intermediate}] for each expert, {args.threads} threads, torch {torch.__version__}, {args.rounds} rounds")
    for dtype in args.dtype:
        for experts in args.experts:
            measure(experts, getattr(torch, dtype), args)


def measure(experts: int, dtype, args: argparse.Namespace) -> None:
    """Print medians of the product, the gradient of the rows and that of the weights."""
    import torch

    torch.manual_seed(0)
    rows, grad = torch.randn(args.rows, args.hidden, dtype=dtype), torch.randn(args.rows, args.intermediate, dtype=dtype)
    weight = torch.randn(experts, args.hidden, args.intermediate, dtype=dtype)
    ends = torch.bincount(torch.randint(experts, (args.rows,)), minlength=experts).cumsum(0).int()
    calls = {"torch, a loop": lambda: loop(rows, grad, weight, ends)} | compiled(rows, grad, weight, ends)
    seconds = {name: [] for name in calls}
    for number in range(args.rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    base = medians["torch, a loop"]
    figures = ", ".join(f"{name} {value:.2f} ms ({value / base:.2f}; min {min(seconds[name]) * 1e3:.2f})" for name, value in medians.items())
    print(f"{experts} experts, {str(dtype).removeprefix('torch.')}: {figures}", flush=True)


def loop(rows, grad, weight, ends):
    """The three products, expert by expert."""
    import torch

    out, grad_rows, grad_weight = torch.empty_like(grad), torch.empty_like(rows), torch.empty_like(weight)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end], weight[expert], out=out[start:end])
        torch.mm(grad[start:end], weight[expert].T, out=grad_rows[start:end])
        torch.mm(rows[start:end].T, grad[start:end], out=grad_weight[expert])
        start = end
    return out, grad_rows, grad_weight


def compiled(rows, grad, weight, ends) -> dict:
    """The same by GraphAcc's lowering and by XLA's ragged dots, checked against the loop."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    from graphacc.lowering.dtypes import from_torch
    from graphacc.lowering.rules import cpu_products

    arrays = [jnp.asarray(from_torch(x)) for x in (rows, grad, weight, ends)]

    def ours(rows, grad, weight, ends):
        grad_rows = cpu_products.grouped(grad, weight.mT, ends, transposed=True)
        return cpu_products.grouped(rows, weight, ends), grad_rows, cpu_products.grouped_outer(rows, grad, ends)

    def ragged(rows, grad, weight, ends):
        out, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, jnp.diff(ends, prepend=0)), rows, weight)
        return out, *pull(grad)

    expected = loop(rows, grad, weight, ends)
    calls = {}
    for name, function in (("GraphAcc", ours), ("XLA's ragged dot", ragged)):
        built = jax.jit(function).lower(*arrays).compile()
        for got, want in zip(built(*arrays), expected, strict=True):
            want = want.float().numpy()
            error = np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max()
            assert error < 2e-2, f"{name}: error {error}"
        calls[name] = lambda built=built: jax.block_until_ready(built(*arrays))
    return calls


if __name__ == "__main__":
    main()
