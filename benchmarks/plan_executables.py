"""Temporary memory of compiled training steps on CPU: XLA's two schedules against the planner, and the lower bound.

Every row is one model's whole step (forward, backward, AdamW) on one mesh, compiled three times: with XLA:CPU's default
schedule, with its memory-optimised one, and planned (`memory_plan="roam"`). The bound is certified: no order and no addresses
that keep the planned executable's dependencies and in-place updates need less. "seconds" is what planning took. The programs run
`--steps` steps from the same arrays; "bits" says whether all outputs of all devices are equal. "FX" is what
`graphacc.costs.memory` predicts from the graph, without compiling, and "FX/" that relative to what the planned program has.
`--timed N` adds the step time of the planned program relative to the memory-optimised and the default one, and of the
memory-optimised one relative to itself, which is how exact the other two are: medians of the ratios of N rounds, in each of which
all run. Claim them on a quiet machine only.

    python benchmarks/plan_executables.py     # all models, one device, fsdp=8 and tp=2,fsdp=4: fifteen minutes on two cores
    python benchmarks/plan_executables.py gpt2 vit --strategy tp=2,fsdp=4 --seconds 10 --timed 15
"""

import argparse
import contextlib
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

os.environ.setdefault("USE_TORCH_XLA", "0")

import jax
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import graphacc
from graphacc._compat.jax_ import x64
from graphacc.costs.memory import predict_memory
from graphacc.graph import StepGraph
from graphacc.runtime import Program, select_devices

HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH, BATCH = 256, 4, 8, 2048, 128, 8
STRATEGIES = ["one", "fsdp=8", "tp=2,fsdp=4"]
SCHEDULES = {"default": "DEFAULT", "memory": "MEMORY_OPTIMIZED"}

# --- models: the architectures of tests/zoo.py, large enough for temporaries to dominate ---

_DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS // 2,
    intermediate_size=2 * HIDDEN,
    max_position_embeddings=LENGTH,
    use_cache=False,
)


class Output(NamedTuple):
    loss: torch.Tensor


class Lstm(nn.Module):
    """Embedding, two LSTM layers and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_DECODER, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=HIDDEN, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN, image_size=64,
        patch_size=8, num_labels=100, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=100
    )
    return transformers.ResNetForImageClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=32, d_ff=4 * HIDDEN, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _tokens(length: int = LENGTH) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, length))
    return dict(input_ids=tokens, labels=tokens)


def _images() -> dict[str, torch.Tensor]:
    return dict(pixel_values=torch.randn(BATCH, 3, 64, 64), labels=torch.randint(100, (BATCH,)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2": (_gpt2, _tokens),
    "llama": (_llama, _tokens),
    "qwen3_moe": (_qwen3_moe, _tokens),
    "vit": (_vit, _images),
    "resnet": (_resnet, _images),
    "t5": (_t5, _tokens),
    "lstm": (Lstm, lambda: _tokens(32)),
}

# --- one row ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of temporaries on one device, and how the programs ran."""

    name: str
    strategy: str
    default: int
    memory: int
    planned: int
    lower_bound: int
    predicted: int  # from the graph
    seconds: float
    bits_equal: bool
    time_ratios: tuple[float, ...] | None  # planned / memory-optimised, planned / default, memory-optimised / itself

    @property
    def to_best(self) -> float:
        return self.planned / min(self.default, self.memory)

    @property
    def to_planned(self) -> float:
        """The prediction from the graph, relative to what the planned program has."""
        return self.predicted / self.planned

    @property
    def is_certified(self) -> bool:
        """Within 1 % of what is proved to be needed."""
        return self.planned <= 1.01 * self.lower_bound

    def cells(self) -> tuple[str, ...]:
        sizes = (self.default, self.memory, self.planned, self.lower_bound)
        ratios = (self.planned / self.default, self.to_best, self.planned / max(1, self.lower_bound))
        return (
            self.name,
            self.strategy,
            *(f"{size / 1e6:.2f}" for size in sizes),
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{self.seconds:.1f}",
            f"{self.predicted / 1e6:.1f}",
            f"{self.to_planned:.2f}",
            "equal" if self.bits_equal else "DIFFER",
            " ".join(f"{ratio:.2f}" for ratio in self.time_ratios or ()),
        )


HEADER = (
    *("model", "strategy", "default", "memory", "planned", "bound"),
    *("/default", "/best", "/bound", "seconds", "FX", "FX/", "bits", "time"),
)
WIDTHS = (10, 12, 8, 8, 8, 8, 8, 6, 6, 7, 7, 5, 6, 14)


def measure(name: str, strategy: str, options: argparse.Namespace) -> Row:
    """Compile one step three times and run it."""
    graph, mesh, planned, arguments = _capture(name, strategy, options.seconds)
    programs = {"planned": planned} | {
        title: Program.build(
            graph,
            mesh,
            cache_dir=None,
            memory_plan="xla",
            compiler_options={"xla_cpu_scheduler_type": f"CPU_SCHEDULER_TYPE_{schedule}"},
        )
        for title, schedule in SCHEDULES.items()
    }
    results = {title: _run(program, graph, arguments, options.steps) for title, program in programs.items()}
    return Row(
        name=name,
        strategy=strategy,
        default=programs["default"].memory.temp_bytes,
        memory=programs["memory"].memory.temp_bytes,
        planned=planned.memory.temp_bytes,
        lower_bound=planned.plan.lower_bound,
        predicted=predict_memory(graph).temporary_bytes,
        seconds=planned.plan.seconds,
        bits_equal=all(result == results["planned"] for result in results.values()),
        time_ratios=_time(programs, graph, arguments, options.timed) if options.timed else None,
    )


def _capture(name: str, strategy: str, seconds: float) -> tuple[StepGraph, jax.sharding.Mesh, Program, list[jax.Array]]:
    """Train one step; returns its graph, mesh and planned program, and copies of the arguments that it was called with."""
    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    where = dict(devices=1, strategy=graphacc.Strategy()) if strategy == "one" else dict(strategy=strategy)
    model = graphacc.compile(make(), cache_dir=None, plan_seconds=seconds, **where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with _recorded_call() as arguments:
        model(**make_batch()).loss.backward()
        optimizer.step()
    (compiled,) = model.programs
    return compiled.graph, compiled.program.mesh, compiled.program, arguments


@contextlib.contextmanager
def _recorded_call() -> Iterator[list[jax.Array]]:
    """Copies of the arguments of the one program that is called meanwhile."""
    call, found = Program.__call__, []

    def recorded(program: Program, *arrays: jax.Array):
        found.extend(_copy(arrays))
        return call(program, *arrays)

    Program.__call__ = recorded
    try:
        yield found
    finally:
        Program.__call__ = call


def _copy(arrays) -> list[jax.Array]:
    with x64():
        return [jax.device_put(np.array(array), array.sharding) for array in arrays]


def _step(program: Program, graph: StepGraph, arguments: list[jax.Array]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """The next step's arguments, and this one's results."""
    results = jax.block_until_ready(program(*arguments))
    following = list(arguments)
    for output, replaced in graph.donations().items():
        following[replaced] = results[output]
    return following, results


def _run(program: Program, graph: StepGraph, arguments: list[jax.Array], steps: int) -> list[bytes]:
    """The bytes of all outputs of all devices after every step."""
    found = []
    current = _copy(arguments)
    for _ in range(steps):
        current, results = _step(program, graph, current)
        found += [np.asarray(shard.data).tobytes() for array in results for shard in array.addressable_shards]
    return found


def _time(programs: dict[str, Program], graph: StepGraph, arguments: list[jax.Array], count: int) -> tuple[float, ...]:
    """Medians, over rounds in each of which all run in random order: planned / memory, planned / default, memory / itself."""
    running = programs | {"again": programs["memory"]}
    current = {title: _copy(arguments) for title in running}
    rounds: list[dict[str, float]] = []
    for _ in range(count + 1):
        seconds = {}
        for title in random.sample(list(running), len(running)):
            start = time.perf_counter()
            current[title], _ = _step(running[title], graph, current[title])
            seconds[title] = time.perf_counter() - start
        rounds.append(seconds)
    pairs = (("planned", "memory"), ("planned", "default"), ("memory", "again"))
    return tuple(statistics.median(seconds[a] / seconds[b] for seconds in rounds[1:]) for a, b in pairs)


# --- the table ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument(
        "--strategy", action="append", help=f'"one" (device) or a strategy; repeatable (default: {" ".join(STRATEGIES)})'
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="plan_seconds (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="steps whose bits are compared (default 3)")
    parser.add_argument("--timed", type=int, default=0, metavar="N", help="steps to time; default: none")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown models {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    transformers.logging.set_verbosity_error()
    print("MB of one device; columns with / are planned relative to that; time: planned / memory, planned / default, memory / itself")
    _print(HEADER)
    rows = []
    strategies = options.strategy or STRATEGIES
    select_devices(max(1 if text == "one" else graphacc.Strategy.parse(text).num_devices for text in strategies))
    for strategy in strategies:
        for name in options.models:
            rows.append(measure(name, strategy, options))
            _print(rows[-1].cells())
    _conclude(rows)


def _print(cells: tuple[str, ...]) -> None:
    padded = [cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
    print("  ".join(padded), flush=True)


def _conclude(rows: list[Row]) -> None:
    to_default = statistics.mean(row.planned / row.default for row in rows)
    to_best = statistics.mean(row.to_best for row in rows)
    print(f"mean planned / default {to_default:.3f} (claim: at most 0.85)")
    print(f"mean planned / better schedule {to_best:.3f} (claim: at most 0.95)")
    above = [f"{row.name} {row.strategy}" for row in rows if row.planned > row.default]
    open_ = [f"{row.name} {row.strategy} ({row.planned / max(1, row.lower_bound):.3f})" for row in rows if not row.is_certified]
    print(f"above XLA's default: {', '.join(above) or 'none'}; more than 1 % above the bound: {', '.join(open_) or 'none'}")
    predictions = [row.to_planned for row in rows]
    print(f"prediction from the graph / planned: {min(predictions):.2f} to {max(predictions):.2f}")
    print(f"bits: {'all equal' if all(row.bits_equal for row in rows) else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
