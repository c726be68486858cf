"""Who partitions along `tp`: GraphAcc's passes, with explicit collectives, beside XLA's SPMD partitioner with the same marks (`Strategy.tp_by`).

For GPT-2, Llama, T5 and a Mixtral-like model, all small, with AdamW on eight virtual devices: MB of whole tensors in collectives by kind, what a device sends, temporaries, the step's
time (medians of interleaved rounds), and the losses' largest difference from plain PyTorch's in the same run. `h100` compiles the step for eight H100s, which need not
be there, and reads the same figures, and how much of the collectives is exposed, from the compiled program; nothing runs.

    python benchmarks/partitioners.py cpu                                       # ten minutes on two cores
    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2     # no GPU is needed
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/partitioners.py h100
"""

import argparse
import collections
import copy
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "replan"))

import h100
import torch
import transformers
from torch import Tensor, nn

import graphacc
from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.graph import Kind
from graphacc.loop.by_spmd import spmd_step
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.report import communication
from graphacc.report.communication import Communication, read_collectives
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

STRATEGIES = ["dp=4,tp=2", "dp=2,tp=4", "dp=2,tp=4,sequence_parallel=true", "fsdp=4,tp=2", "fsdp=4,tp=2,sequence_parallel=true"]


def models(batch: int, length: int) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """Name -> a model, and its batch."""
    torch.manual_seed(0)
    size = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=4096, use_cache=False)
    gpt2 = dict(n_embd=256, n_layer=4, n_head=8, n_positions=length, vocab_size=4096, bos_token_id=0, eos_token_id=0, use_cache=False)
    t5 = dict(d_model=256, d_kv=32, d_ff=688, num_layers=3, num_heads=8, vocab_size=4096, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    made = {
        "GPT-2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)),
        "T5": transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "Mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**(size | dict(intermediate_size=176)), num_local_experts=8, experts_implementation="grouped_mm")),
    }
    ids = torch.randint(4096, (batch, length))
    return {name: (model, {"input_ids": ids, "labels": ids.clone()}) for name, model in made.items()}


def program_of(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Program:
    """The whole step, with AdamW, compiled for eight H100s."""
    names = list(batch)
    leaves = Batch(leaves=tuple(batch.values()), paths=tuple(names))
    joint = capture_joint(model, lambda model, leaves: (model(**dict(zip(names, leaves))).loss, []), leaves)
    gradients = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    step = stitch(joint, capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients))
    dims = default_batch_dims(step)
    if strategy.tp_by == "spmd":
        splits = find_tensor_parallel(step, strategy.tp, {}).splits
        local, _ = spmd_step(step.copy(), strategy, splits=splits, batch_dims=dims)
    else:
        local, _ = run_passes(step.copy(), build_pipeline(step, strategy, batch_dims=dims))
    mesh = h100.like(make_mesh(strategy, select_devices(strategy.num_devices)))
    return Program.build(local, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)


class Loop:
    """A training loop on one batch."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]):
        self.model, self.batch, self.losses, self.seconds = model, batch, [], []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self) -> None:
        start = time.perf_counter()
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def described(found: Communication, temporary_bytes: int) -> list[str]:
    """Cells of a row: MB by kind of collective, MB that a device sends, and of temporaries."""
    sizes: collections.Counter[str] = collections.Counter()
    for item in found.collectives:
        sizes[item.kind] += item.size_bytes
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return [*(f"{sizes[kind] / 1e6:.1f}" if sizes[kind] else "-" for kind in kinds), f"{found.traffic_bytes / 1e6:.1f}", f"{temporary_bytes / 1e6:.1f}"]


def both(strategy: str, make: Callable[[str], object]) -> Iterable[tuple[str, object]]:
    for tp_by in ("passes", "spmd"):
        yield tp_by, make(strategy if tp_by == "passes" else f"{strategy},tp_by=spmd")


def on_cpu(args: argparse.Namespace) -> None:
    print("| model | strategy | tp_by | all-reduce MB | all-gather | reduce-scatter | all-to-all | permute | sent by a device | temporaries | step ms | spmd over passes | loss error |\n|" + " --- |" * 13)
    for name, (model, batch) in models(args.batch, args.length).items():
        if args.models and name not in args.models:
            continue
        plain = Loop(copy.deepcopy(model), batch)
        for _ in range(args.rounds + 1):
            plain.step()
        for strategy in args.strategies:
            loops = dict(both(strategy, lambda text: Loop(graphacc.compile(copy.deepcopy(model), strategy=text), batch)))
            for _ in range(args.rounds + 1):
                for loop in loops.values():
                    loop.step()
            ratios = [one / other for one, other in zip(loops["spmd"].seconds[1:], loops["passes"].seconds[1:])]
            for tp_by, loop in loops.items():
                (program,) = loop.model.programs
                error = max(abs(got - want) / abs(want) for got, want in zip(loop.losses, plain.losses, strict=True))
                cells = described(communication(loop.model), program.program.memory.temp_bytes)
                ratio = f"{statistics.median(ratios):.2f}" if tp_by == "spmd" else ""
                print(f"| {name} | {strategy} | {tp_by} | {' | '.join(cells)} | {statistics.median(loop.seconds[1:]) * 1e3:.0f} | {ratio} | {error:.0e} |", flush=True)


def for_h100(args: argparse.Namespace) -> None:
    print("| model | strategy | tp_by | all-reduce MB | all-gather | reduce-scatter | all-to-all | permute | sent by a device | temporaries | exposed MB |\n|" + " --- |" * 11)
    for name, (model, batch) in models(args.batch, args.length).items():
        if args.models and name not in args.models:
            continue
        for strategy in args.strategies:
            for tp_by, program in both(strategy, lambda text: program_of(model, batch, Strategy.parse(text))):
                found = Communication(collectives=tuple(read_collectives(program.hlo_text(), program.mesh)))
                print(f"| {name} | {strategy} | {tp_by} | {' | '.join(described(found, program.memory.temp_bytes))} | {found.exposed_bytes / 1e6:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["cpu", "h100"])
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    (on_cpu if args.target == "cpu" else for_h100)(args)


if __name__ == "__main__":
    main()
