"""What each part of the memory planner gives, on training steps captured from models: memory and planning seconds, as in ROAM's ablation.

One row for each way to plan a step, in MB (1e6 bytes) of one arena, over parameters, state, batch and what is computed between:

- program, best fit: the program's own order, and XLA's heuristic for addresses;
- heuristics: the best of the usual orders (updates at once, XLA's list scheduler, LPMF, BFS, DFS), and best fit;
- joint program: order and addresses by one integer program on CP-SAT from the program's order, which is what MODeL (arXiv 2210.12924)
  solves; in intervals where that paper has a binary for every tensor and step. "-": nothing better in its time, or too large for it;
- order alone: our order, and best fit;
- layout alone: the program's order, and our addresses;
- both: our order and addresses.

"live" is the peak of live bytes of the order: what the arena has above it is fragmentation. The bound holds for every order.

    python benchmarks/plan_ablation.py                    # small steps, some minutes on two cores
    python benchmarks/plan_ablation.py resnet50-1 gpt2    # models of plan_order.py
"""

import argparse
import dataclasses
import os
import time

import plan_order
import torch
import transformers
from torch import nn

from graphacc.passes.memory.addresses import best_fit, solve_addresses
from graphacc.passes.memory.joint import solve_jointly
from graphacc.passes.memory.order.graph import compile_problem, live_ranges
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.plan import stored_buffers
from graphacc.passes.memory.problem import AddressProblem, Problem
from graphacc.passes.memory.validate import check_addresses

MAX_JOINT = 2_000  # operators: building the joint program of a larger step takes longer than its time
ALIGNMENT = 64


class _Perceptron(nn.Module):
    """Two layers; called like the models of `transformers`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, pixel_values, labels):
        loss = nn.functional.cross_entropy(self.layers(pixel_values), labels)
        return transformers.modeling_outputs.ImageClassifierOutput(loss=loss)


SMALL = {
    "perceptron": (_Perceptron, lambda: {"pixel_values": torch.empty(64, 256), "labels": torch.zeros(64, dtype=torch.long)}),
    "gpt2-2x128": (lambda: plan_order.gpt2(n_embd=128, n_layer=2, n_head=4, vocab_size=2000), lambda: plan_order.tokens(128)),
    "resnet18-1": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=100, layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
        ),
        lambda: plan_order.images(1),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to plan."""

    name: str
    height: int | None  # bytes of the arena; None: nothing found
    live: int | None  # bytes; the peak of the order
    seconds: float


def arena(problem: Problem, order: tuple[int, ...]) -> AddressProblem:
    """The address problem of an order."""
    stored = stored_buffers(problem, order, live_ranges(problem, order))
    return AddressProblem(buffers=tuple(buffer for buffer in stored if buffer is not None), alignment=ALIGNMENT)


def measure(name: str, problem: Problem, order: tuple[int, ...], begin: float, *, seconds: float | None) -> Row:
    """Addresses for an order: by best fit, or in `seconds` by ours; `begin` is when planning began."""
    addresses = arena(problem, order)
    offsets = best_fit(addresses) if seconds is None else solve_addresses(addresses, seconds=seconds).offsets
    height, took = check_addresses(addresses, offsets), time.perf_counter() - begin
    return Row(name=name, height=height, live=compile_problem(problem).peak(order), seconds=took)


def ablate(problem: Problem, seconds: float) -> tuple[list[Row], int]:
    """All rows, and the bound."""
    program, graph = tuple(range(len(problem.operators))), compile_problem(problem)
    rows = [measure("program, best fit", problem, program, time.perf_counter(), seconds=None)]
    begin = time.perf_counter()
    best = min((HEURISTICS[heuristic](graph) for heuristic in plan_order.BASELINES), key=graph.peak)
    rows.append(measure("heuristics", problem, best, begin, seconds=None))
    rows.append(_joint(problem, rows[0].height, seconds))
    begin = time.perf_counter()
    plan = solve_order(problem, seconds=seconds)
    ordered = time.perf_counter() - begin
    rows.append(measure("order alone", problem, plan.order, begin, seconds=None))
    rows.append(measure("layout alone", problem, program, time.perf_counter(), seconds=seconds))
    rows.append(measure("both", problem, plan.order, time.perf_counter() - ordered, seconds=seconds))
    return rows, plan.lower_bound


def _joint(problem: Problem, known: int | None, seconds: float) -> Row:
    begin = time.perf_counter()
    height = live = None
    if len(problem.operators) <= MAX_JOINT:
        program = tuple(range(len(problem.operators)))
        answer = solve_jointly(problem, below=known or 0, lower_bound=0, alignment=ALIGNMENT, seconds=seconds, known=program)
        if answer.order:
            stored = stored_buffers(problem, answer.order, live_ranges(problem, answer.order))
            offsets = [offset for buffer, offset in zip(stored, answer.offsets, strict=True) if buffer is not None]
            height = check_addresses(arena(problem, answer.order), offsets)
            live = compile_problem(problem).peak(answer.order)
    return Row(name="joint program", height=height, live=live, seconds=time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**SMALL, **plan_order.MODELS}
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(known)}; {', '.join(SMALL)} by default")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for an order, for addresses, and for the joint program")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - known.keys():
        parser.error(f"unknown models {sorted(unknown)}; there are {list(known)}")
    plan_order.MODELS.update(SMALL)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; MB (1e6 bytes), seconds of planning")
    for name in arguments.models or SMALL:
        problem = plan_order.capture(name)
        rows, bound = ablate(problem, arguments.seconds)
        print(f"{name}: {len(problem.operators)} operators, lower bound {bound / 1e6:.3f} MB", flush=True)
        for row in rows:
            memory = f"{row.height / 1e6:12.3f}{row.live / 1e6:12.3f}" if row.height and row.live else f"{'-':>12s}{'-':>12s}"
            saved = f"{100 * (1 - row.height / rows[0].height):8.1f} %" if row.height and rows[0].height else f"{'-':>10s}"
            print(f"  {row.name:20s}{memory}{saved}{row.seconds:9.2f} s", flush=True)


if __name__ == "__main__":
    main()
