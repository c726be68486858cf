"""Every architecture of transformers that a generic rule makes small: three training steps against plain PyTorch, each model in a process of its own.

    python benchmarks/architectures.py                                          # causal language models under fsdp=2
    python benchmarks/architectures.py --of seq2seq --strategy tp=2
    python benchmarks/architectures.py --of base --strategy pp=2,microbatches=2 --only 'gpt|llama'

Sizes of 32, two layers, four heads, a vocabulary of 120, images of 32; dropouts are 0, and routers that begin at zero are random. Language models have labels of which some do
not count, of each sequence other ones; of other models the loss is a mean of fixed weights times every result with the batch in front. A model that draws, in PyTorch with four seeds, is left out.

Prints a line for each model type, and how many have which outcome:

    equal      losses within 1e-4, and every parameter within 2 % of how far training moved it
    WRONG      neither
    apart      the microbatches cannot give what the batch gives (the reason), so that there is nothing to compare
    PyTorch    parts of it are run by PyTorch, with the reason; what comes out is equal
    refused    a GraphAccError
    not made   the rule gives it sizes or inputs that plain PyTorch does not take, or it draws, or its time is over
"""

import argparse
import collections
import copy
import json
import math
import os
import re
import subprocess
import sys
import warnings
from typing import Any

ROWS, LENGTH, IMAGE, VOCABULARY = 4, 12, 32, 120
MAPPINGS = {"base": "MODEL_MAPPING", "causal": "MODEL_FOR_CAUSAL_LM_MAPPING", "masked": "MODEL_FOR_MASKED_LM_MAPPING", "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
            "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"}  # fmt: skip
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "d_embed": 32, "model_dim": 32, "hidden_dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "n_inner": 64, "d_inner": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8,
    "vocab_size": VOCABULARY, "image_size": IMAGE, "patch_size": 8, "max_position_embeddings": 64, "n_positions": 64, "max_length": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False, "state_size": 8, "time_step_rank": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def shrink(config: Any, seen: set[int]) -> None:
    """Set what the configuration and those in it have of `SIZES`; dropouts become 0."""
    if id(config) in seen:
        return
    seen.add(id(config))
    for name, value in list(vars(config).items()):
        plain = name.lstrip("_")
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, seen)
        elif plain in SIZES and isinstance(value, (int, float)) and type(value) is not bool:
            setattr(config, name, SIZES[plain])
        elif ("drop" in plain or plain.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif "drop" in plain and isinstance(value, (list, tuple)) and all(isinstance(item, float) for item in value):
            setattr(config, name, type(value)([0.0] * len(value)))
        elif plain == "layer_types" and isinstance(value, (list, tuple)):
            setattr(config, name, list(value)[:2])
    if hasattr(config, "use_cache"):
        config.use_cache = False


def made(of: str, model_type: str):
    """The model, with conditioned routers, and its inputs."""
    import torch
    import transformers

    mapping = getattr(transformers, MAPPINGS[of])
    config_class = transformers.CONFIG_MAPPING[model_type]
    model_class = mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, (tuple, list)) else model_class
    config = config_class()
    shrink(config, set())
    torch.manual_seed(0)
    model = model_class(config)
    if sum(p.numel() for p in model.parameters()) > 3_000_000:
        raise ValueError("the rule leaves it large")
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train(), of, model.main_input_name


def batch_of(model, of: str, main: str, step: int) -> dict:
    import torch

    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
    counts = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
    labels = tokens.masked_fill(~counts, -100)
    if main == "pixel_values":
        given = {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE, generator=g)}
        return given | ({"labels": torch.arange(ROWS) % 2} if of == "images" else {})
    if main in ("input_values", "input_features"):
        return {main: torch.randn(*((ROWS, 640) if main == "input_values" else (ROWS, 80, 64)), generator=g)}
    given = {"input_ids": tokens}
    if of == "seq2seq":
        return given | {"labels": labels}
    if of == "base" and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens.flip(1)
    return given | ({"labels": labels} if of in ("causal", "masked") else {})


def loss_of(model, of: str, batch: dict):
    import torch

    result = model(**batch)
    if of != "base":
        return result.loss
    values = [value for value in result.to_tuple() if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad and value.shape[:1] == (ROWS,)]
    if not values:
        raise ValueError("no result has the batch in front")
    return sum((value * torch.cos(torch.arange(value[0].numel())).view(value.shape[1:])).mean() for value in values)


def trained(model, of: str, main: str, seed: int) -> list[float]:
    import torch

    torch.manual_seed(seed)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, of, batch_of(model, of, main, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def far(a: float, b: float, tolerance: float = 1e-4) -> bool:
    return not abs(a - b) <= tolerance * max(1.0, abs(b))


def compared(of: str, model_type: str, strategy: str) -> tuple[str, str]:
    """The outcome for one type, and why."""
    import graphacc

    try:
        model, of, main = made(of, model_type)
        first = copy.deepcopy(model)
        others = [trained(copy.deepcopy(model), of, main, seed) for seed in (2, 3, 4)]
        expected = trained(first, of, main, 1)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    if any(far(a, b, 1e-6) for other in others for a, b in zip(expected, other, strict=True)) or not all(map(math.isfinite, expected)):
        return "not made", "it draws, or its loss is not finite"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        ours = graphacc.compile(model, strategy=strategy, devices=graphacc.Strategy.parse(strategy).num_devices, cache_dir=None, fast_compile=True)
        losses = trained(ours, of, main, 1)
    except graphacc.GraphAccError as error:
        return "refused", f"{type(error).__name__}: {error}"
    engine = ours._graphacc_engine
    apart = next((joint.why_apart for joint in engine.execution._joints.values() if joint.why_apart), "")
    reference = first.state_dict()
    worst = max(
        ((value.double() - reference[name].double()).abs().max().item() / max(1e-4, (reference[name].double() - before[name].double()).abs().max().item()), name)
        for name, value in ours.state_dict().items()
        if value.is_floating_point()
    )
    wrong = f"losses {losses}, PyTorch {expected}; {worst[1]} differs by {worst[0]:.2g} of its movement" if any(map(far, losses, expected)) or worst[0] > 0.02 else ""
    if apart:
        return "apart", apart
    if wrong:
        return "WRONG", wrong
    return ("PyTorch", next(iter(engine.by_pytorch.counts))) if engine.by_pytorch.counts else ("equal", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=MAPPINGS, default="causal")
    parser.add_argument("--strategy", default="fsdp=2")
    parser.add_argument("--only", default="", help="model types that match")
    parser.add_argument("--seconds", type=int, default=150, help="for one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        print(json.dumps(compared(args.of, args.one, args.strategy)))
        return
    import transformers

    types = [config.model_type for config in getattr(transformers, MAPPINGS[args.of]) if re.search(args.only, config.model_type)]
    found: dict[str, list[str]] = collections.defaultdict(list)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    for model_type in sorted(set(types)):
        command = [sys.executable, __file__, "--of", args.of, "--strategy", args.strategy, "--one", model_type]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=args.seconds, env=environment, check=False)
            lines = run.stdout.splitlines()
            outcome, why = json.loads(lines[-1]) if run.returncode == 0 and lines else ("CRASHED", run.stderr[-300:])
        except subprocess.TimeoutExpired:
            outcome, why = "not made", f"more than {args.seconds} s"
        found[outcome].append(model_type)
        print(f"{model_type:32} {outcome:9} {' '.join(why.split())[:240]}", flush=True)
    print(f"{args.of} under {args.strategy}: " + ", ".join(f"{outcome} {len(names)}" for outcome, names in sorted(found.items())))
    if found["WRONG"] or found["CRASHED"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
