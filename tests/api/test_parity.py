"""Five AdamW steps with a learning-rate schedule, compared with plain PyTorch: every model under every data strategy."""

import pytest
import zoo
from training import check_parity

STRATEGIES = (None, "dp=8", "fsdp=8,zero=1", "fsdp=8,zero=2", "fsdp=8,zero=3", "dp=2,fsdp=4")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda text: text or "one device")
@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_training_equals_plain_pytorch(name, strategy):
    model = check_parity(name, strategy)
    assert [compiled.kind for compiled in model.programs] == ["step"], model.explain()
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight
