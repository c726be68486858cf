"""Host Adam: graphacc.optim.CPUAdam against torch's AdamW and against the speed of the memory.

    python benchmarks/cpu_adam.py [--params 50e6] [--tensors 24] [--threads 2] [--rounds 15] [--json FILE]

All rows run in one process, one after the other in every round; a ratio is the median of the rounds' ratios, so that a
machine that is busy at times slows both sides of it. Each optimizer has the state that it allocates itself; parameters
and gradients are shared. "memory traffic" reads and writes what an fp32 Adam step does, and adds only. Before each row there
is a pause, because OpenMP's threads spin for some milliseconds after their last work, on the cores that the next row needs.

On a machine with other work, `--threads 1 --cpu-time` compares what the rows cost without counting the time in which other
processes ran. (With several threads, torch's OpenMP then waits for the slowest core, and CPUAdam's tasks move to the free one.)
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphacc.kernels import adam, library
from graphacc.optim import CPUAdam


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    run: Callable[[], object]
    bytes_per_param: int
    """What the row has to read and write."""
    peer: str
    """The name of the row that its ratio is taken against."""


@dataclass(frozen=True)
class Goal:
    name: str
    peer: str
    at_most: float


PAUSE_SECONDS = 0.02
GOALS = [
    Goal("CPUAdam", "AdamW(fused=True)", 1.05),
    Goal("CPUAdam", "memory traffic", 1 / 0.9),
    Goal("CPUAdam, bf16 copy out", "AdamW(fused=True), cast", 0.9),
]


def make_rows(num_params: int, num_tensors: int, threads: int) -> list[Row]:
    all_params, all_grads = torch.randn(num_params), torch.rand(num_params) * 1e-3
    params, grads_bf16, copies = [], {}, {}
    for values, grad in zip(all_params.tensor_split(num_tensors), all_grads.tensor_split(num_tensors), strict=True):
        param = torch.nn.Parameter(values)
        param.grad = grad
        params.append(param)
        grads_bf16[param] = grad.bfloat16()
        copies[param] = values.bfloat16()
    traffic_state = adam.huge_zeros_like(all_params), adam.huge_zeros_like(all_params)
    torch_foreach = torch.optim.AdamW(params, foreach=True)
    torch_fused = torch.optim.AdamW(params, fused=True)
    torch_fused.step()
    torch_foreach.state = torch_fused.state
    ours = CPUAdam(params)
    ours.step()

    def traffic():
        adam.traffic_probe(all_params, *traffic_state, all_grads, threads=threads)

    @torch.no_grad()
    def cast_out():
        torch_fused.step()
        for param, copy in copies.items():
            copy.copy_(param)

    @torch.no_grad()
    def cast_in_and_out():
        for param, grad in grads_bf16.items():
            param.grad.copy_(grad)
        cast_out()

    return [
        Row(name="memory traffic", run=traffic, bytes_per_param=28, peer="memory traffic"),
        Row(name="AdamW(foreach=True)", run=torch_foreach.step, bytes_per_param=28, peer="memory traffic"),
        Row(name="AdamW(fused=True)", run=torch_fused.step, bytes_per_param=28, peer="memory traffic"),
        Row(name="CPUAdam", run=ours.step, bytes_per_param=28, peer="AdamW(fused=True)"),
        Row(name="AdamW(fused=True), cast", run=cast_out, bytes_per_param=34, peer="AdamW(fused=True)"),
        Row(
            name="CPUAdam, bf16 copy out",
            run=lambda: ours.step(copies=copies),
            bytes_per_param=30,
            peer="AdamW(fused=True), cast",
        ),
        Row(name="cast, AdamW(fused=True), cast", run=cast_in_and_out, bytes_per_param=40, peer="AdamW(fused=True)"),
        Row(
            name="CPUAdam, bf16 gradients in, copy out",
            run=lambda: ours.step(grads=grads_bf16, copies=copies),
            bytes_per_param=28,
            peer="cast, AdamW(fused=True), cast",
        ),
    ]


def measure(rows: list[Row], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each row in each round, after one round that is not counted."""
    seconds = {row.name: [] for row in rows}
    for counted in [False] + [True] * rounds:
        for row in rows:
            time.sleep(PAUSE_SECONDS)
            start = clock()
            row.run()
            elapsed = clock() - start
            if counted:
                seconds[row.name].append(elapsed)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, peer: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[peer], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=50e6, help="parameters in all; about 48 bytes of memory for each")
    parser.add_argument("--tensors", type=int, default=24, help="the number of tensors that they are spread over")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of the one thread, for a busy machine")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1: it sees only the calling thread")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    print(
        f"{options.params:.3g} parameters in {options.tensors} tensors, {options.threads} threads, {options.rounds} rounds, "
        f"torch {torch.__version__}, kernels {library.default_isa()}, {platform.processor() or platform.machine()}"
    )
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows = make_rows(int(options.params), options.tensors, options.threads)
    seconds = measure(rows, options.rounds, clock)
    print(f"{'':38} {'ms':>8} {'GB/s':>6}  ratio")
    for row in rows:
        median = statistics.median(seconds[row.name])
        gigabytes = row.bytes_per_param * options.params / median / 1e9
        print(f"{row.name:38} {median * 1e3:8.1f} {gigabytes:6.1f}  {ratio(seconds, row.name, row.peer):.2f} x {row.peer}")
    print()
    reached = []
    for goal in GOALS:
        got = ratio(seconds, goal.name, goal.peer)
        reached.append({"name": goal.name, "peer": goal.peer, "ratio": got, "at_most": goal.at_most})
        print(f"{'reached' if got <= goal.at_most else 'MISSED':8} {goal.name}: {got:.3f} x {goal.peer}, at most {goal.at_most:.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "seconds": seconds, "goals": reached}, file, indent=1)


if __name__ == "__main__":
    main()
