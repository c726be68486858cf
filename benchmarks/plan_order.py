"""Operator order: the planner against the usual heuristics, on training steps captured from real models.

Forward, backward and AdamW of one device, as ATen operators, before XLA. Peaks count parameters, state and batch; views share
memory, new parameters and state are written in place. The models are built from their configurations on the meta device, so
nothing is allocated. "best known" is the lowest of the program's own order, updates at once, XLA's list scheduler and inductor's
LPMF, BFS and DFS, all written anew in `passes/memory/order/heuristics.py`. The bound is proved: no order has a lower peak.

    python benchmarks/plan_order.py                      # all, about five minutes on two cores
    python benchmarks/plan_order.py resnet50-1 gpt2 --seconds 20
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import transformers
from torch import nn

from graphacc.capture.model import Batch, capture_joint
from graphacc.capture.stitch import stitch
from graphacc.capture.update import capture_update
from graphacc.costs.fx_problem import problem_from_step
from graphacc.graph import Kind
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import Problem

BASELINES = [name for name in HEURISTICS if name != "eager free"]  # that one is ours
Tensors = dict[str, torch.Tensor]


def images(batch_size: int) -> Tensors:
    return {"pixel_values": torch.empty(batch_size, 3, 224, 224), "labels": torch.zeros(batch_size, dtype=torch.long)}


def tokens(length: int) -> Tensors:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _resnet50() -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))


def _mobilenetv2() -> nn.Module:
    return transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=1001))


def _efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, num_labels=1000
    )
    return transformers.EfficientNetForImageClassification(config)


def gpt2(**sizes: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "resnet50-1": (_resnet50, lambda: images(1)),
    "resnet50-32": (_resnet50, lambda: images(32)),
    "mobilenetv2-1": (_mobilenetv2, lambda: images(1)),
    "mobilenetv2-32": (_mobilenetv2, lambda: images(32)),
    "efficientnet-b0-1": (_efficientnet, lambda: images(1)),
    "efficientnet-b0-32": (_efficientnet, lambda: images(32)),
    "bert-base": (lambda: transformers.BertForMaskedLM(transformers.BertConfig()), lambda: tokens(512)),
    "gpt2": (gpt2, lambda: tokens(1024)),
    "gpt2-xl": (lambda: gpt2(n_embd=1600, n_layer=48, n_head=25), lambda: tokens(1024)),
}
"""Name, with the batch size where it is not 1 -> how to build the model, and its batch."""


def capture(name: str) -> Problem:
    """The order problem of one training step."""
    build, make_batch = MODELS[name]
    with torch.device("meta"):
        model, tensors = build().train(), make_batch()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = Batch(leaves=tuple(tensors.values()), paths=tuple(tensors))
    joint = capture_joint(model, lambda m, leaves: (m(**dict(zip(tensors, leaves))).loss, []), batch)
    grads = [output.target for output in joint.outputs if output.kind is Kind.GRAD]
    update = capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), grads)
    return problem_from_step(stitch(joint, update))[0]


def report(name: str, seconds: float) -> bool:
    """Print one row; whether it holds what we claim."""
    problem = capture(name)
    graph = compile_problem(problem)
    peaks, begin = {}, time.perf_counter()
    for heuristic in BASELINES:
        peaks[heuristic] = graph.peak(HEURISTICS[heuristic](graph))
    heuristics_seconds = time.perf_counter() - begin
    plan = solve_order(problem, seconds=seconds)
    best = min(peaks.values())
    columns = [f"{peaks[heuristic] / 1e6:11.2f}" for heuristic in BASELINES]
    columns += [f"{value / 1e6:11.2f}" for value in (best, plan.peak, plan.lower_bound)]
    figures = f"{plan.gap * 100:9.4f}{heuristics_seconds:8.1f}{plan.seconds:8.1f}"
    print(f"{name:19s}{len(problem.operators):7d}{''.join(columns)}{figures}  {plan.bound_source}", flush=True)
    return plan.peak <= best and plan.gap <= 2e-4 and plan.seconds < 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--seconds", type=float, default=29.0, help="time for each plan")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - MODELS.keys()
    if unknown:
        parser.error(f"unknown models {sorted(unknown)}; there are {list(MODELS)}")
    titles = ["program", "immediate", "XLA list", "LPMF", "BFS", "DFS", "best known", "planned", "bound"]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} cores; MB (1e6 bytes), seconds")
    header = "".join(f"{title:>11s}" for title in titles)
    print(f"{'model':19s}{'ops':>7s}{header}{'gap %':>9s}{'heur s':>8s}{'plan s':>8s}  bound by")
    missed = [name for name in arguments.models or MODELS if not report(name, arguments.seconds)]
    print("peak <= best known, gap <= 0.02 % and under 30 s: " + (f"not for {', '.join(missed)}" if missed else "all"))


if __name__ == "__main__":
    main()
