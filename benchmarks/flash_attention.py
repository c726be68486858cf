"""FlashAttention on the CPU: our kernel against torch's scaled_dot_product_attention and XLA's unfused attention.

    python benchmarks/flash_attention.py [--threads 2] [--rounds 5] [--lengths 256,1024,4096,16384] [--dims 64,128] [--json FILE]

Forward and backward of one call in fp32, batch 1, as many heads as keep the work of the shorter lengths measurable. All rows of a
configuration run in turn in every round; the table has the fastest round and the median of the rounds' ratios to torch. Peak memory is
what the process's resident set grows by from before the call, with its inputs and output gradient in place, to its peak
(Linux: VmHWM, reset through /proc/self/clear_refs), in MB and in sizes of one input [1, heads, T, D]: memory is linear in T where
that stays the same while T grows. The unfused attention is left out above --unfused tokens, where
its [T, T] tensors take gigabytes.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable

HEADS = {256: 32, 1024: 8, 4096: 4}
"""Length -> heads; 2 above."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="256,1024,4096,16384")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--unfused", type=int, default=4096, help="the largest length for XLA's unfused attention")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


options = parse()
os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import graphacc  # noqa: E402
from graphacc.lowering.dtypes import from_torch  # noqa: E402
from graphacc.lowering.rules.attention import attend, attend_backward  # noqa: E402

Run = Callable[[], object]


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_bytes(run: Run) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    run()
    return status("VmHWM") - before


def rows_of(length: int, dim: int, causal: bool) -> dict[str, Run]:
    heads = HEADS.get(length, 2)
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, heads, length, dim)

    def step(attention: Callable) -> Run:
        return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

    rows = {
        "torch": step(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal)),
        "graphacc": step(lambda *x: graphacc.flash_attention(*x, causal=causal)),
    }
    if length <= options.unfused:
        arrays = [jax.numpy.asarray(from_torch(x)) for x in (q, k, v, grad)]
        scale = 1 / math.sqrt(dim)

        @jax.jit
        def unfused(q, k, v, grad):
            out, lse = attend(q, k, v, None, None, causal, scale)
            return attend_backward(grad, q, k, v, None, None, out, lse, causal, scale)

        rows["XLA unfused"] = lambda: jax.block_until_ready(unfused(*arrays))
    return rows


def measure(rows: dict[str, Run]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds in each round and peak bytes, after one round that is not counted."""
    for run in rows.values():
        run()
    memory = {name: peak_bytes(run) for name, run in rows.items()}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, run in rows.items():
            time.sleep(0.02)  # OpenMP's threads spin for a while after their last work
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds, memory


def main() -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}, jax {jax.__version__}"
    print(f"{versions}, {options.threads} threads, {options.rounds} rounds; fp32, forward and backward")
    print(f"{'T':>6} {'D':>4} {'heads':>5} {'causal':>6} {'':12} {'ms':>9} {'x torch':>8} {'peak MB':>8} {'inputs':>7}")
    results = []
    for length in map(int, options.lengths.split(",")):
        for dim in map(int, options.dims.split(",")):
            for causal in (False, True):
                seconds, memory = measure(rows_of(length, dim, causal))
                heads = HEADS.get(length, 2)
                input_bytes = heads * length * dim * 4
                for name, times in seconds.items():
                    ratio = statistics.median(a / b for a, b in zip(times, seconds["torch"], strict=True))
                    print(
                        f"{length:6} {dim:4} {heads:5} {'yes' if causal else 'no':>6} {name:12} {min(times) * 1e3:9.2f} "
                        f"{ratio:8.2f} {memory[name] / 1e6:8.1f} {memory[name] / input_bytes:7.1f}",
                        flush=True,
                    )
                    result = {"T": length, "D": dim, "heads": heads, "causal": causal, "name": name, "seconds": times}
                    results.append(result | {"ratio": ratio, "peak_bytes": memory[name]})
    worst = max(result["ratio"] for result in results if result["name"] == "graphacc")
    print(f"{'reached' if worst <= 1 else 'MISSED'}: graphacc is at most {worst:.2f} x torch's time, goal 1.00")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"options": vars(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
