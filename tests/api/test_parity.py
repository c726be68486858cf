"""Five AdamW steps with a learning-rate schedule, compared with plain PyTorch: every model under every data strategy."""

import pytest
import zoo
from training import check_parity

STRATEGIES = (None, "dp=8", "fsdp=8,zero=1", "fsdp=8,zero=3", "dp=2,fsdp=4")
CASES = [(name, strategy) for name in sorted(zoo.MODELS) for strategy in STRATEGIES]
CASES += [("gpt2", "fsdp=8,zero=2")]  # zero=1's program, see tests/passes/test_zoo_partition.py


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=[f"{name}-{strategy or 'one device'}" for name, strategy in CASES])
def test_training_equals_plain_pytorch(name, strategy):
    model = check_parity(name, strategy)
    assert [compiled.kind for compiled in model.programs] == ["step"], model.explain()
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight
