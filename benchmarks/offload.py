"""ZeRO-Offload: what a step costs, and what is left on the devices, with the optimizer's state on the host.

One process, eight virtual CPU devices, the strategies in turn, so that all see the same machine. Bytes are those of one device in the compiled programs (arguments, and
temporaries of the largest), and of the host for all devices. On CPU device and host are one memory and share the cores, so seconds say what the way to the host
costs, not what a GPU gains.

    python benchmarks/offload.py                  # a minute on two cores
    python benchmarks/offload.py --width 512 --rounds 20
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers

import graphacc
from graphacc.graph import Kind

DEVICES = 8
STRATEGIES = ["fsdp=8", "fsdp=8,offload=optimizer", "fsdp=8,offload=optimizer,delay=1,delay_after=1"]


class Run:
    """One model under one strategy."""

    def __init__(self, strategy: str, args: argparse.Namespace):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=2048, n_positions=128, n_embd=args.width, n_layer=args.layers, n_head=args.width // 32, use_cache=False, bos_token_id=0, eos_token_id=0,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        self.strategy, self.seconds, self.losses = strategy, [], []
        self.model = graphacc.compile(transformers.GPT2LMHeadModel(config), strategy=f"{strategy},precision={args.precision}", devices=DEVICES, cache_dir=None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

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
            *(f"{held.get(kind, 0) / 1e6:.2f}" for kind in (Kind.PARAM, Kind.STATE, Kind.GRAD)), f"{memory.temporary_bytes / 1e6:.2f}", f"{memory.host_bytes / 1e6:.2f}", f"{self.losses[-1]:.4f}",
        ]  # fmt: skip
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
    print("| strategy | ms a step | ratio | parameters | state | gradients | temporaries | host | last loss |\n|" + " --- |" * 9)
    for run in runs:
        print(run.row(runs[0]))


if __name__ == "__main__":
    main()
