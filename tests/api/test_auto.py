"""`strategy="auto"`: searched at the first step, said in one line, and the loop trains as PyTorch does."""

import copy
import dataclasses

import pytest
import torch
import training
import zoo
from torch import nn

import graphacc
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.strategy import Strategy


def trained(model: nn.Module, name: str, strategy, **options):
    """The compiled model and its losses, on eight devices."""
    model = graphacc.compile(copy.deepcopy(model), strategy=strategy, devices=8, **{"cache_dir": None, "fast_compile": True} | options)
    with training.captured_once("auto", name):
        return model, training.train(model, training.batches_of(name))


@pytest.mark.parametrize(("name", "strategy"), [("gpt2", None), ("llama", "auto,tp=2"), ("qwen3_moe", "auto,ep=2,dp=1"), ("resnet", "auto")])
@pytest.mark.default_cases("llama-auto,tp=2")
def test_the_choice_trains_as_pytorch_does(name, strategy, caplog):
    model, reference, expected = training.plainly_trained(name)
    model, losses = trained(model, name, strategy)
    training.assert_parity(reference, model, expected, losses)
    plan = model.plan
    assert plan.strategy == model.strategy and plan.strategy.num_devices == 8
    for pin in (strategy or "auto").split(",")[1:]:
        field, value = pin.split("=")
        assert getattr(plan.strategy, field) == int(value)
    assert caplog.text.count(plan.line) == 1 and plan.line in model.explain()
    whole = str(model.strategy)
    assert whole.startswith(f"{plan.strategy}\n") and all(line in whole for line in str(plan).splitlines())
    assert len(model.programs) == 1, "nothing was compiled before the choice"


@pytest.mark.matrix
def test_an_evaluation_before_training():
    """It runs under a strategy that every model can have; what lies on the devices then comes home."""
    model, reference, expected = training.plainly_trained("gpt2")
    compiled = graphacc.compile(copy.deepcopy(model), strategy="auto,fsdp=1", devices=8, cache_dir=None, fast_compile=True)
    batch = zoo.batch("gpt2", 0)
    with torch.no_grad():
        before = compiled(**batch).loss.item(), model(**batch).loss.item()
    assert before[0] == pytest.approx(before[1], rel=1e-5) and compiled.plan is None
    losses = training.train(compiled, training.batches_of("gpt2"))
    training.assert_parity(reference, compiled, expected, losses)
    assert compiled.plan is not None and compiled.plan.strategy.fsdp == 1


def test_values_of_64_bits_move_to_the_choice():
    """Parameters in float64 and a counter in int64 lie on the devices already when the strategy changes."""

    class Counting(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
            self.register_buffer("calls", torch.full((8,), 2**40))

        def forward(self, x):
            self.calls.add_(1)
            return super().forward(x)

    def train(model):
        draw = torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with torch.no_grad():
            yield model(torch.randn(8, 256, generator=draw, dtype=torch.float64)).sum().item()
        for _ in range(3):
            loss = model(torch.randn(64, 256, generator=draw, dtype=torch.float64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    torch.manual_seed(0)
    reference = Counting().double()
    model = graphacc.compile(copy.deepcopy(reference), strategy="auto", devices=8, cache_dir=None, fast_compile=True)
    assert list(train(model)) == pytest.approx(list(train(reference)), rel=1e-12)
    assert str(model.plan.strategy) != "fsdp=8", "nothing has moved"
    assert torch.equal(model.calls, reference.calls)
    for (name, value), expected in zip(model.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_code_between_backward_and_step():
    """A running total in a tensor is an input of the whole step that forward and backward do not have."""

    def train(model):
        optimizer, total = torch.optim.AdamW(model.parameters(), lr=0.01), torch.zeros(())
        for step in range(3):
            loss = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).pow(2).mean()
            loss.backward()
            total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            yield total.item()

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = graphacc.compile(copy.deepcopy(reference), devices=8, cache_dir=None, fast_compile=True)
    assert list(train(model)) == pytest.approx(list(train(reference)), rel=1e-6)
    assert model.plan is not None


def test_accumulated_gradients():
    """Two backwards before a step: the optimizer is not known when the choice is made, and that is said."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    model = graphacc.compile(copy.deepcopy(reference), strategy="auto", devices=8, cache_dir=None, fast_compile=True)
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.Adam(one.parameters(), lr=1e-2), []
        for step in range(4):
            loss = one(torch.randn(16, 16, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            found.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(found)
    training.assert_parity(reference, model, *losses)
    assert "the optimizer is not known yet" in str(model.plan)


def test_a_plan_is_replayed(tmp_path):
    model, reference, expected = training.plainly_trained("gpt2")
    batch = zoo.batch("gpt2", 0, 8)
    plan = graphacc.plan(model, batch, zoo.adamw(model), hardware="cpu:8", tp=2)
    plan.save(tmp_path / "plan.json")
    for given in (plan, str(tmp_path / "plan.json")):
        compiled = graphacc.compile(copy.deepcopy(model), strategy=given, cache_dir=None, fast_compile=True)
        assert compiled.strategy == plan.strategy and compiled.strategy.tp == 2
    with training.captured_once("auto", "gpt2"):
        training.assert_parity(reference, compiled, expected, training.train(compiled, training.batches_of("gpt2")))
    with pytest.raises(StrategyError, match="was made for something else: its parameter .*Plan again"):
        graphacc.compile(zoo.MODELS["llama"]()[0], strategy=plan)
    with pytest.raises(StrategyError, match="it is for 8 devices, and there are 4"):
        graphacc.compile(copy.deepcopy(model), strategy=plan, devices=4)


def test_one_device_has_nothing_to_search():
    model = graphacc.compile(nn.Linear(4, 4), strategy="auto", devices=1, cache_dir=None)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.plan is None and model.strategy == Strategy()


@pytest.fixture
def without_memory(monkeypatch):
    """Devices that nothing fits on."""
    small = Hardware.parse("cpu:8")
    small = small.replace(chip=small.chip.__class__(**{**vars(small.chip), "memory_bytes": 20_000}))
    monkeypatch.setattr(Hardware, "present", classmethod(lambda cls, devices=None: small))


@pytest.mark.matrix
def test_what_does_not_fit_is_said_before_anything_is_compiled(without_memory):
    model, batch = zoo.MODELS["gpt2"]()[0], zoo.batch("gpt2", 0, 8)
    model = graphacc.compile(model, strategy="auto", devices=8, cache_dir=None)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch).loss.backward()
    for _ in range(2):  # nor under another strategy when it is tried again
        with pytest.raises(StrategyError, match="no strategy of 8 devices fits into .*It would fit with"):
            optimizer.step()
    assert not model.programs and model.plan is None


# ---- without a strategy: fsdp over all devices, where the search cannot speak


def kept(model: nn.Module, caplog, reason: str) -> None:
    assert model.strategy == Strategy(fsdp=8) and model.plan is None
    said = [record.getMessage() for record in caplog.records if "no strategy was searched" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("graphacc: no strategy was searched, fsdp=8 runs: ") and reason in said[0]


@pytest.mark.matrix
def test_the_default_of_what_does_not_fit(without_memory, caplog):
    model, reference, expected = training.plainly_trained("gpt2")
    model, losses = trained(model, "gpt2", None)
    training.assert_parity(reference, model, expected, losses)
    kept(model, caplog, "no strategy of 8 devices fits into")


def test_the_default_of_regions(caplog):
    """A generator whose gradient comes through another model is a function of PyTorch's autograd."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 16), nn.Linear(16, 1)
    found = []
    for make in (copy.deepcopy, lambda model: graphacc.compile(copy.deepcopy(model), devices=8, cache_dir=None, fast_compile=True)):
        generator, judge = map(make, plain)
        optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
        for step in range(3):
            loss = judge(generator(torch.randn(16, 8, generator=torch.Generator().manual_seed(step)))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.item(), generator))
    training.assert_parity(found[0][1], found[1][1], [found[0][0]], [found[1][0]], by_pytorch=True)
    kept(found[1][1], caplog, "parts of the loop run as programs of their own")


def test_the_default_of_values_that_only_the_devices_have(caplog, tmp_path):
    """Loaded from a checkpoint into a model of the meta device."""

    def build():
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    reference = build()
    graphacc.save_checkpoint(tmp_path, training.compiled(copy.deepcopy(reference), None))
    with torch.device("meta"):
        model = build()
    model = graphacc.compile(model, devices=8, cache_dir=None, fast_compile=True)
    graphacc.load_checkpoint(tmp_path, model)
    training.check_both(reference, model, lambda one, step: one(torch.randn(16, 16, generator=torch.Generator().manual_seed(step))).square().mean(), steps=3)
    kept(model, caplog, "made on the meta device")


@pytest.mark.matrix
def test_on_the_meta_device_and_for_hardware_that_is_not_here():
    """A model of 13 GB, planned without its weights."""
    import transformers

    with torch.device("meta"):
        config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000, use_cache=False)
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(32, 2048, dtype=torch.long)
    plan = graphacc.plan(model, {"input_ids": ids, "labels": ids}, hardware="2x8xH100", precision="bf16")
    assert plan.strategy.num_devices == 16 and plan.strategy.precision == "bf16" and plan.estimate.bytes_per_device < 80e9
    assert plan.tokens_per_second > 1e4 and plan.estimate.parameter_bytes >= 4 * 3.4e9 / 16
    assert next(model.parameters()).device.type == "meta"
    whole = graphacc.plan(model, {"input_ids": ids, "labels": ids}, hardware="2x8xH100", strategy="dp=16,precision=bf16")
    assert whole.strategy == Strategy(dp=16, precision="bf16") and whole.estimate.bytes_per_device > plan.estimate.bytes_per_device


# ---- microbatches and pipelines that nobody asked for


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def sequences(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Some labels do not count, of each sequence other ones."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(32, (rows, 24), generator=generator)
    return x, x.roll(-1, 1).masked_fill(torch.arange(24) >= torch.randint(1, 25, (rows, 1), generator=generator), -100)


def of_tokens(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def against_each_other(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out[:, 0] @ out[:, -1].T, torch.arange(len(out)))


LOOPS = {"alike": [(16, of_tokens)] * 3, "a last batch of another size": [(16, of_tokens), (16, of_tokens), (6, of_tokens), (3, of_tokens)],
         "another loss": [(16, of_tokens), (16, against_each_other), (16, of_tokens)]}  # fmt: skip


@pytest.mark.parametrize(("strategy", "memory"), [("auto,dp=4,remat=none,offload=none", 300_000), ("auto,pp=2", 2**30)])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.default_cases("a last batch of another size-auto,pp=2-1073741824", "another loss-auto,dp=4,remat=none,offload=none-300000")
def test_microbatches_are_chosen_where_they_give_what_the_batch_gives(monkeypatch, caplog, loop, strategy, memory):
    """The search takes the devices for four GPUs."""
    gpus = Hardware.parse("4xH100")
    gpus = gpus.replace(chip=dataclasses.replace(gpus.chip, memory_bytes=memory), reserve_bytes=0)
    monkeypatch.setattr(Hardware, "present", classmethod(lambda cls, devices=None: gpus))
    torch.manual_seed(0)
    model, found = Language(), []
    for chosen in (graphacc.Strategy(), strategy):
        one = graphacc.compile(copy.deepcopy(model), strategy=chosen, devices=4 if chosen is strategy else 1, cache_dir=None, fast_compile=True, seed=1)
        optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), []
        for step, (rows, loss_of) in enumerate(loop):
            x, y = sequences(step, rows)
            loss = loss_of(one(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, one.state_dict()))
        assert not one._graphacc_engine.by_pytorch.counts
    assert one.strategy.microbatches > 1 and "microbatches" not in one.plan.request
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-3, atol=1e-5)
    assert "stands for itself" not in caplog.text
