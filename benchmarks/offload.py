"""ZeRO-Offload: what a step costs, what of the host's update the program hides, and what is left on the devices.

One process, eight virtual CPU devices, the strategies in turn, so that all see the same machine. Bytes are those of one device in the compiled programs (arguments, and
temporaries of the largest), and of the host for all devices. On CPU device and host are one memory and share the cores, so seconds say what the way to the host
costs, not what a GPU gains.

"tail / update" is what was left of an update when its program had ended, over what the update took (medians): 0 is hidden, 1 and more behind the program. "keep" is the
same step whose gradients stay on the devices until their program has ended, as it is where something needs all of them first.

The second table is about the bytes of one device while the step runs, as compiled, against two for every parameter, two buckets of gradients, and the activations. "On their way" is what
gradients (sent to the host, or to be scattered before) take at the most at one time, "activations" what all other temporaries do, both from the map of the compiled program's memory.

    python benchmarks/offload.py                  # two minutes on two cores
    python benchmarks/offload.py --width 512 --rounds 20
"""

import argparse
import collections
import os
import re
import statistics
import time

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers

import graphacc
from graphacc.graph import Kind

DEVICES = 8
STRATEGIES = ["fsdp=8", "fsdp=8,offload=optimizer", "fsdp=8,offload=optimizer,keep", "fsdp=8,offload=optimizer,delay=1,delay_after=1"]
OPTIMIZER_BYTES = 16  # of a parameter in bf16 with its gradient, exact value and two moments


class Run:
    """One model under one strategy."""

    def __init__(self, strategy: str, args: argparse.Namespace, devices: int = DEVICES):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=2048, n_positions=128, n_embd=args.width, n_layer=args.layers, n_head=args.width // 32, use_cache=False, bos_token_id=0, eos_token_id=0,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        self.strategy, self.seconds, self.losses = strategy, [], []
        keep = strategy.endswith("keep")
        text = f"{strategy.removesuffix('keep').rstrip(',')},precision={args.precision}"
        self.model = graphacc.compile(transformers.GPT2LMHeadModel(config), strategy=text.lstrip(","), devices=devices, cache_dir=None, keep_gradients=keep)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def largest_message(self) -> int:
        """Bytes of the largest bucket of gradients on one device, before it is scattered; without buckets of the largest gradient."""
        graph = self.model.programs[0].graph
        scattered = [node.args[0].meta["val"] for node in graph.graph.nodes if str(node.target) == "_c10d_functional.reduce_scatter_tensor.default"]
        kept = [parameter.numel() * 4 for parameter in self.model.parameters()]
        return max([value.numel() * value.dtype.itemsize for value in scattered] or kept)

    def tail(self) -> str:
        offload = self.model._graphacc_engine.programs.offload
        spans = [] if offload is None else [span for span in offload.spans[3:] if span.tail_seconds is not None]
        if not spans:
            return ""
        tail, update = (1e3 * statistics.median(found) for found in zip(*((span.tail_seconds, span.update_seconds) for span in spans)))
        return f"{tail:.1f} / {update:.1f} = {tail / update:.2f}"

    def step(self, ids: torch.Tensor) -> None:
        start = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    def row(self, first: "Run") -> str:
        memory, held = self.model.memory(), self.model.bytes_per_device()
        median = statistics.median(self.seconds[3:])
        cells = [
            self.strategy, f"{1e3 * median:.1f}", f"{median / statistics.median(first.seconds[3:]):.2f}",
            *(f"{held.get(kind, 0) / 1e6:.2f}" for kind in (Kind.PARAM, Kind.STATE, Kind.GRAD)), f"{memory.temporary_bytes / 1e6:.2f}", f"{memory.host_bytes / 1e6:.2f}", f"{self.losses[-1]:.4f}", self.tail(),
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


def temporaries(run: Run) -> tuple[int, int]:
    """Most bytes that gradients take at one time, and that all else does, in the program that sends them."""
    program = run.model.programs[0].program
    assert program.plan is not None
    buffers = (program.plan.map_after or program.plan.map_before).buffers
    names = set(re.findall(r"custom-call\(%([^,]+),[^\n]*gacc_send_to_host", program.hlo_text())) | set(re.findall(r"reduce-scatter\(%([^,)]+)", program.hlo_text()))
    gradients, others = collections.Counter(), collections.Counter()
    for buffer in buffers:
        for step in range(buffer.lower, buffer.upper):
            (gradients if buffer.name in names else others)[step] += buffer.size
    return max(gradients.values()), max(others.values())


def bytes_row(run: Run) -> str:
    """The program that sends its gradients against two bytes per parameter, two buckets and the activations; under ZeRO-3 parameters are split, too."""
    measured, (on_their_way, activations) = run.model.memory().measured_bytes, temporaries(run)
    parameters, buckets = 2 * run.num_parameters, 2 * run.largest_message
    sizes = OPTIMIZER_BYTES * run.num_parameters, measured, parameters, buckets, on_their_way, activations
    cells = [run.strategy, *(f"{size / 1e6:.2f}" for size in sizes), f"{measured / (parameters + buckets + activations):.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    args = parser.parse_args()
    batches = torch.randint(2048, (args.rounds + 3, 16, 128), generator=torch.Generator().manual_seed(0))
    runs = [Run(strategy, args) for strategy in STRATEGIES]
    for ids in batches:
        for run in runs:
            run.step(ids)
    print(f"GPT-2 {args.layers} x {args.width}, {args.precision}, batch 16 x 128, {args.rounds} rounds; MB of one device between steps, temporaries of its largest program, MB of the host")
    print("| strategy | ms a step | ratio | parameters | state | gradients | temporaries | host | last loss | tail / update, ms |\n|" + " --- |" * 10)
    for run in runs:
        print(run.row(runs[0]))
    alone = Run("offload=optimizer", args, devices=1)
    alone.step(batches[0][:2])
    print("\nMB of one device while the step runs")
    print("| strategy | 16 N | measured | 2 N | 2 buckets | gradients on their way | activations | measured over 2 N + 2 buckets + activations |\n|" + " --- |" * 8)
    print(bytes_row(alone))
    print(bytes_row(runs[1]))


if __name__ == "__main__":
    main()
