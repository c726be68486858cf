"""graphacc.integrations.transformers: losses that are not finite are logged as Trainer logs them, by one program; torch_xla is left alone."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import graphacc

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


class Regression(nn.Module):
    """Its loss is what the batch says wherever that is not zero; gradients stay finite."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, wrong):
        return {"loss": self.layer(x).square().mean() + torch.where(wrong.sum() != 0, wrong.sum(), 0.0)}


def rows(wrong: dict[int, float], steps: int = 9) -> list[dict[str, torch.Tensor]]:
    """Of `steps` batches of four rows; `wrong` is step -> what is added to its loss."""
    x = torch.randn(4 * steps, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "wrong": torch.tensor(wrong.get(i // 4, 0.0))} for i, row in enumerate(x)]


def train(kind: type, model: nn.Module, folder: str, wrong: dict[int, float], **options) -> list[float]:
    import transformers

    defaults = dict(per_device_train_batch_size=4, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, learning_rate=0.05)
    arguments = transformers.TrainingArguments(folder, num_train_epochs=1, **defaults | options)
    trainer = kind(model, arguments, train_dataset=rows(wrong))
    trainer._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    assert arguments.logging_nan_inf_filter == options.get("logging_nan_inf_filter", True)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        pytest.param(dict(logging_steps=3), {1: float("nan"), 3: float("inf"), 5: -float("inf"), 6: float("nan"), 7: float("nan")}, id="in the middle and first"),
        pytest.param(dict(logging_steps=1), {2: float("nan")}, id="every step", marks=pytest.mark.matrix),
        pytest.param(dict(logging_steps=3, logging_nan_inf_filter=False), {4: float("nan")}, id="switched off", marks=pytest.mark.matrix),
    ],
)
def test_losses_that_are_not_finite_are_logged_as_by_trainer(tmp_path, options, wrong):
    import transformers

    from graphacc.integrations.transformers import Trainer

    torch.manual_seed(0)
    model = Regression()
    torch.manual_seed(0)
    compiled = graphacc.compile(Regression(), strategy="fsdp=2", fast_compile=True, cache_dir=None)
    expected = train(transformers.Trainer, model, str(tmp_path), wrong, **options)
    got = train(Trainer, compiled, str(tmp_path), wrong, **options)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(compiled.state_dict(), model.state_dict(), rtol=1e-6, atol=1e-6)
    kinds = [line.split()[0] for line in compiled.explain().splitlines()[1:] if line.split()[0] in ("step", "grad", "update", "forward")]
    assert kinds == ["step"], compiled.explain()


def llama(noise: float | None, folder: str, compile=None, **options):
    """Losses of Trainer with a tiny Llama, and its parameters."""
    import transformers

    from graphacc.examples import tiny_llama, tokens

    torch.manual_seed(0)
    model = tiny_llama() if compile is None else compile(tiny_llama())
    defaults = dict(max_steps=3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, neftune_noise_alpha=noise)
    arguments = transformers.TrainingArguments(folder, **defaults | options)
    data = [{"input_ids": row, "labels": row} for batch in tokens(3) for row in batch]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=True if "num_train_epochs" in options else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.matrix
def test_neftune_trains_as_pytorch_does_with_the_same_noise(tmp_path):
    """Its noise is drawn in the model, where a program's random numbers are others than eager PyTorch's: `verify` gives PyTorch the same."""
    losses, model = llama(5.0, str(tmp_path), lambda model: graphacc.compile(model, strategy="fsdp=2", fast_compile=True, cache_dir=None, verify=3))
    assert "verified: 3 steps" in model.explain()
    assert abs(losses[0] - llama(None, str(tmp_path))[0][0]) > 1e-4, "no noise was added"


@pytest.mark.matrix
def test_a_resumed_run_goes_on(tmp_path):
    """Saved after two of three steps by the compiled model, resumed compiled and by plain PyTorch; without the loader's order, which Trainer restores."""
    compile = lambda model: graphacc.compile(model, strategy="fsdp=2", fast_compile=True, cache_dir=None)  # noqa: E731
    whole, _ = llama(None, str(tmp_path / "whole"))
    llama(None, str(tmp_path / "saved"), compile, save_strategy="steps", save_steps=2)
    for way in (compile, None):
        losses, _ = llama(None, str(tmp_path / "saved"), way, num_train_epochs=1)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=1e-6, atol=1e-6)


BESIDE = """
import os
before = dict(os.environ)
{first}
import graphacc.integrations.transformers as integration
assert {{k: v for k, v in os.environ.items() if k in ("USE_TORCH_XLA",)}} == {{k: v for k, v in before.items() if k in ("USE_TORCH_XLA",)}}
import transformers, sys
arguments = transformers.TrainingArguments(".", use_cpu=True, report_to="none")
print(arguments.device, "torch_xla" in sys.modules)
"""


@pytest.mark.lazy
@pytest.mark.parametrize("first", [pytest.param("", id="first"), pytest.param("import accelerate", id="after accelerate", marks=pytest.mark.matrix)])
def test_trainer_stays_on_the_cpu_beside_torch_xla(first):
    environment = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"}
    result = subprocess.run([sys.executable, "-c", BESIDE.format(first=first)], capture_output=True, text=True, env=environment)
    if first:
        assert "import graphacc.integrations.transformers first" in result.stderr
    else:
        assert result.stdout.split() == ["cpu", "False"], result.stderr
