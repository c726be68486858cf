"""Train a small GPT-2 on the source of Python's standard library: ``python -m graphacc.examples.train_gpt``.

The model is transformers' GPT-2 with random weights; a token is a byte. On CPU the step runs on eight virtual devices. The same
in two processes, each with half of the devices: ``torchrun --nproc-per-node=2 -m graphacc.examples.train_gpt``.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Iterator

VOCABULARY = 256  # a token is a byte


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    os.environ.setdefault("USE_TORCH_XLA", "0")  # transformers would otherwise move to torch_xla's runtime
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import graphacc

    try:
        train(args)
    except graphacc.GraphAccError as error:
        if graphacc.distributed.process_count() > 1:
            raise  # the other processes hear of an error that nobody catches
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphacc.examples.train_gpt", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=None, help="number of devices (default: 8 virtual ones on CPU, all on others)")
    parser.add_argument("--strategy", default=None, metavar="TEXT", help="such as fsdp=8, dp=2,fsdp=4,zero=2 or auto,tp=2 (default: auto, which searches)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all devices")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after the warm-up; it ends at zero by a cosine")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="steps in which the learning rate rises linearly")
    parser.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="total norm that gradients are clipped to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--save", type=pathlib.Path, metavar="DIR", help="write a checkpoint here every --save-every steps and at the end")
    parser.add_argument("--save-every", type=int, default=20, metavar="N")
    parser.add_argument("--resume", type=pathlib.Path, metavar="DIR", help="continue exactly from this checkpoint")
    return parser.parse_args(arguments)


@dataclasses.dataclass
class Progress:
    """What the run has shown so far."""

    losses: list[float] = dataclasses.field(default_factory=list)  # of every step, those before a resume included
    step_seconds: list[float] = dataclasses.field(default_factory=list)  # of the steps of this process


def train(args: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    import graphacc

    torch.manual_seed(args.seed)
    graphacc.distributed.initialize()
    first = graphacc.distributed.is_first_process()
    devices = default_devices(args)
    model = graphacc.compile(build_model(args), strategy=args.strategy, devices=devices, precision=args.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, args))
    progress = Progress()
    if args.resume is not None:
        extra = graphacc.load_checkpoint(args.resume, model, optimizer)
        progress.losses = extra["losses"]
        scheduler.load_state_dict(extra["scheduler"])
    if first:
        searched = model.strategy.num_devices > 1 and (args.strategy is None or args.strategy.startswith("auto"))
        chosen = f"{args.strategy or 'auto'}, searched at the first step," if searched else model.strategy.plain
        print(f"strategy: {chosen} on {model.strategy.num_devices} devices, {count_parameters(model):,} parameters", flush=True)
    start = len(progress.losses)
    bar = tqdm(total=args.steps, initial=start, unit="step", disable=None if first else True)
    for step, batch in zip(range(start, args.steps), batches(args, start)):
        began = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress.losses.append(loss.item())
        progress.step_seconds.append(time.perf_counter() - began)
        bar.set_postfix(loss=f"{progress.losses[-1]:.4f}", refresh=False)
        bar.update()
        if args.save is not None and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            extra = {"losses": progress.losses, "scheduler": scheduler.state_dict()}
            graphacc.save_checkpoint(args.save, model, optimizer, extra=extra)
    bar.close()
    if first:
        report(args, model, progress)


def schedule(step: int, args: argparse.Namespace) -> float:
    """The part of the learning rate that a step uses: linear warm-up, then a cosine over all steps."""
    warmup = min(1.0, (step + 1) / max(args.warmup, 1))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / max(args.steps, 1)))


def default_devices(args: argparse.Namespace) -> int | None:
    """Eight virtual devices on a machine without an accelerator, or what --strategy needs."""
    import graphacc
    from graphacc.runtime import default_platform

    if args.devices is not None:
        return args.devices
    if args.strategy is not None and not args.strategy.startswith("auto"):
        return graphacc.Strategy.parse(args.strategy).num_devices
    return 8 if default_platform() == "cpu" else None


def build_model(args: argparse.Namespace):
    """GPT-2 from its configuration, with random weights."""
    with warnings.catch_warnings(), contextlib.suppress(DeprecationWarning):
        from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=args.length,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def count_parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def corpus() -> bytes:
    """The source of the standard library's top-level modules, in the order of their names."""
    folder = pathlib.Path(os.__file__).parent
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def batches(args: argparse.Namespace, first: int) -> Iterator:
    """Batches of random windows, int64 [batch, length]; batch number `first` comes first, and depends on its number alone."""
    import torch

    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
    step = first
    while True:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        yield torch.stack([text[s : s + args.length] for s in starts]).long()
        step += 1


def report(args: argparse.Namespace, model, progress: Progress) -> None:
    """Print the figures of the run, and write them to --json."""
    if not progress.step_seconds:
        print(f"nothing to do: the checkpoint already has {len(progress.losses)} of {args.steps} steps")
        return
    steady = progress.step_seconds[1:] or progress.step_seconds  # the first step compiles
    seconds = statistics.median(steady)
    tokens_per_second = args.batch * args.length / seconds
    memory = model.memory()
    print(model.explain())
    print(f"step time: {seconds * 1e3:.1f} ms (median), {tokens_per_second:,.0f} tokens per second")
    print(f"memory per device: predicted {memory.predicted_bytes / 1e6:.1f} MB, measured {memory.measured_bytes / 1e6:.1f} MB")
    if args.json is not None:
        write_json(args.json, result(model, progress, seconds, tokens_per_second, memory))
    print(f"loss: {progress.losses[0]:.4f} -> {progress.losses[-1]:.4f} after {len(progress.losses)} steps")


def result(model, progress: Progress, seconds: float, tokens_per_second: float, memory) -> dict:
    return {
        "losses": progress.losses,
        "step_seconds": progress.step_seconds,
        "median_step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "memory": dataclasses.asdict(memory),
        "strategy": str(model.strategy.plain),
        "devices": model.strategy.num_devices,
    }


def write_json(path: pathlib.Path, value: dict) -> None:
    """Write at once or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
