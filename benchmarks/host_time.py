"""Claim: a step of a tiny model takes at most 600 us of CPU time on one device, and 1500 us on eight.

Trains an MLP 32-32-1 with AdamW, by PyTorch eager and by GraphAcc on one and on eight (virtual CPU) devices, in turn in one process. The model computes next to
nothing: what is measured is what the loop, the recording, the uploads and the start of a program cost in every step. Prints for each the CPU time of the process
(with XLA's threads, or autograd's), that of the loop's own thread, and the wall time, of the fastest and of the median round. Under ZeRO-3 eight devices exchange
ten messages in a step, and what XLA's threads spend on those is no host time: there the thread of the loop is held to the bound.

    python benchmarks/host_time.py --deep             # 148 parameters, whose gradients are clipped: what each of them costs in every step; no bound
"""

import argparse
import json
import os
import statistics
import time

DEPTH = 74
"""Layers of the deep model."""

LOOPS = {"eager": None, "one device": "dp=1", "eight: dp=8": "dp=8", "eight: fsdp=8": "fsdp=8"}
"""Name of a row -> the strategy; None: PyTorch eager."""

BOUNDS = {"one device": ("process", 600), "eight: dp=8": ("process", 1500), "eight: fsdp=8": ("thread", 1500)}
"""Name of a row -> the time that is held to a bound, and the bound in microseconds."""

CLOCKS = {"process": time.process_time_ns, "thread": time.thread_time_ns, "wall": time.perf_counter_ns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50, help="of one round")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch's operators, which gain nothing from more")
    parser.add_argument("--deep", action="store_true", help="a model of many parameters, and clipping")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import torch

    torch.set_num_threads(args.threads)
    loops = {name: make_loop(strategy, args.deep) for name, strategy in LOOPS.items() if not args.deep or strategy in (None, "dp=1")}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for loop in loops.values():
        loop(20)
    for _ in range(args.rounds):
        for name, loop in loops.items():
            before = {clock: read() for clock, read in CLOCKS.items()}
            loop(args.steps)
            rounds[name].append({clock: (read() - before[clock]) / args.steps / 1e3 for clock, read in CLOCKS.items()})
    figures = {}
    print(f"{'us per step':15}" + "".join(f"{clock + ': least':>16}{'median':>9}" for clock in CLOCKS))
    for name, found in rounds.items():
        least, median = ({clock: pick(each[clock] for each in found) for clock in CLOCKS} for pick in (min, statistics.median))
        figures[name] = {"least": least, "median": median}
        print(f"{name:15}" + "".join(f"{least[clock]:16.0f}{median[clock]:9.0f}" for clock in CLOCKS))
    for name, (clock, bound) in ({} if args.deep else BOUNDS).items():
        found = figures[name]["least"][clock]
        print(f"{name}: {found:.0f} us of the {clock}'s CPU time, bound {bound}: {'holds' if found <= bound else 'does not hold'}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


def make_loop(strategy: str | None, deep: bool = False):
    """A function that trains some steps, by eager (None) or compiled under a strategy."""
    import torch
    from torch import nn

    import graphacc

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(DEPTH - 1)), nn.Linear(32, 1)) if deep else nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if strategy is not None:
        model = graphacc.compile(model, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 32), torch.randn(64, 1)

    def loop(steps: int) -> None:
        for _ in range(steps):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if deep:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss.item()

    return loop


if __name__ == "__main__":
    main()
