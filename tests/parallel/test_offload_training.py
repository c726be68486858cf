"""Training under offload="optimizer": losses and parameters of plain PyTorch, wherever the state is sharded."""

import pytest
import zoo
from pipeline.pipelines import APART, check_pipeline
from selection import with_matrix
from training import batches_of, captured_once

from graphacc.graph import Kind

CASES = [
    *[("gpt2", f"fsdp=8,zero={stage}") for stage in (1, 2, 3)],
    *[(name, strategy) for name in ("llama", "resnet") for strategy in ("fsdp=8", "pp=2,microbatches=2")],
    ("llama", "tp=2,fsdp=4"), ("gpt2", "tp=2,fsdp=4"), ("gpt2", "pp=2,microbatches=2"), ("gpt2", "pp=2,fsdp=2,tp=2,microbatches=4"),
    ("gpt2", "dp=2,fsdp=2,microbatches=2"), ("gpt2", "cp=2"), ("llama", "fsdp=2,cp=2"), ("gpt2", "cp=2,zero=3"), ("mixtral", "ep=2"), ("mixtral", "fsdp=2,ep=2"), ("mixtral", "ep=4,zero=3"), ("t5", "fsdp=4"), ("tied_mlp", "fsdp=4"), ("gpt2", "fsdp=4,hpz=2"),
    ("gpt2", "fsdp=4,remat=blocks"),
]  # fmt: skip
DEFAULT = [("gpt2", "fsdp=8,zero=3"), ("llama", "tp=2,fsdp=4"), ("gpt2", "pp=2,microbatches=2")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, DEFAULT))
@pytest.mark.default_cases("gpt2-pp=2,microbatches=2")
def test_training_equals_plain_pytorch(name, strategy):
    model, _ = zoo.MODELS[name]()
    with captured_once("offload", name):
        model = check_pipeline(model, batches_of(name, 3), f"{strategy},offload=optimizer", apart=name in APART)
    held, kept = model.bytes_per_device(), model.host_bytes()
    assert held[Kind.STATE] == held[Kind.GRAD] == 0
    assert kept[Kind.STATE] >= 2 * kept[Kind.PARAM] > 0
    assert not any(one.kind in ("step", "update") for one in model.programs)
