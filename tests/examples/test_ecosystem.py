"""The examples with other libraries: losses as plain PyTorch gives them to 1e-6, by as few programs as their loops allow.

They need the extra `ecosystem`; a library that is not installed leaves its tests out.
"""

import functools
import importlib
import pathlib

import pytest
import torch
from selection import with_matrix
from tolerances import RELATIVE

import graphacc
from graphacc.examples import run

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guide.md"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves

TOLERANCE = 1e-6  # of a loss, relative to it where that is above 1
BF16 = RELATIVE[torch.bfloat16]
"""The same under autocast, which rounds results to 8 bits; XLA keeps more of them inside of fusions."""
LIBRARIES = {"pyg": "torch_geometric", "trainer": "accelerate"}
"""Example -> the library that it needs, where that is not its name; transformers' Trainer needs accelerate."""
CASES = {
    "lightning": {},
    "lightning manual": dict(manual=True),
    "accelerate": {},
    "peft": {},
    "trl sft": {},
    "trl dpo": dict(method="dpo"),
    "diffusers": {},
    "pyg": {},
    "trainer": {},
    "trainer adamw": dict(optim="adamw_torch", lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.0),
    "trainer original": dict(original=True, optim="adamw_torch", predict_with_generate=False),
    "trainer without filter": dict(original=True, logging_nan_inf_filter=False, optim="adamw_torch", predict_with_generate=False),
    "trainer accumulation": dict(gradient_accumulation_steps=2, steps=3),
    "trainer bf16": dict(bf16=True, optim="adamw_torch", predict_with_generate=False),
    "trainer checkpointing": dict(gradient_checkpointing=True, optim="adamw_torch", predict_with_generate=False),
    **{f"timm {name}": dict(name=f"test_{name}") for name in ("vit", "resnet", "efficientnet", "convnext", "nfnet", "byobnet", "vit2", "convnext2", "mambaout")},
}
DEFAULT = ("lightning", "lightning manual", "accelerate", "peft", "trl sft", "trl dpo", "diffusers", "pyg", "trainer", "timm vit")
ONE_STEP_PROGRAM = ("lightning", "peft", "diffusers", "pyg", "timm", "trainer")
"""Their loops read nothing between backward and step, but these."""
READS = ("trainer original", "trainer accumulation")


@pytest.mark.parametrize("case", with_matrix(CASES, DEFAULT))
def test_losses_are_those_of_plain_pytorch(case, monkeypatch):
    name = case.split()[0]
    pytest.importorskip(LIBRARIES.get(name, name))
    if name == "lightning":  # it looks for TPUs where torch_xla was imported before, and fails without one
        monkeypatch.setattr("lightning.fabric.accelerators.xla.XLAAccelerator.is_available", staticmethod(lambda: False))
    train = importlib.import_module(f"graphacc.examples.{name}").train
    _, expected = train(lambda model: model, **CASES[case])
    model, losses = train(functools.partial(graphacc.compile, strategy="fsdp=2", fast_compile=True, cache_dir=None), **CASES[case])
    for step, (got, want) in enumerate(zip(losses, expected, strict=True)):
        assert abs(got - want) <= (BF16 if CASES[case].get("bf16") else TOLERANCE) * max(1.0, abs(want)), f"step {step}: {got}, plain PyTorch {want}"
    kinds = {line.split()[0] for line in model.explain().splitlines()[1:] if line.split()[0] in ("step", "grad", "update", "forward", "backward")}
    assert losses and (kinds - {"forward"} == {"step"} or case in READS or not case.startswith(ONE_STEP_PROGRAM)), model.explain()
    if case in DEFAULT and GUIDE.exists():
        assert last_line(losses) in GUIDE.read_text(), f"docs/guide.md should say, for {case}: {last_line(losses)}"


def last_line(losses: list[float]) -> str:
    return f"loss: {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps"


def test_examples_print_programs_and_losses(capsys):
    """As their modules do where they are run."""

    def train(compile):
        import torch

        model = compile(torch.nn.Linear(4, 4))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        train.losses = losses
        return model, losses

    run(train)
    said = capsys.readouterr().out.strip().splitlines()
    assert said[0].startswith("program") and said[1].startswith("step") and said[-1] == last_line(train.losses)
