"""Models that are made on the meta device: their values are made or loaded shard by shard."""

import copy
import functools

import pytest
import safetensors.torch
import torch
from tolerances import relative_error
from torch import nn
from training import batches_of, captured_once, compiled

import graphacc


class Net(nn.Module):
    """Modules that are initialised in different ways: by themselves, by their owner, after others, and not at all."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.rnn = nn.GRU(16, 16)
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        h = self.norm((h + self.attention(h, h, h, need_weights=False)[0]).transpose(1, 2)).transpose(1, 2)
        return self.head(h)


def on_meta(build, seed: int = 0):
    """(a model of the CPU, the same of the meta device); the generator is where it was before the first one's construction."""
    torch.manual_seed(seed)
    plain = build()
    torch.manual_seed(seed)
    with torch.device("meta"):
        meta = build()
    torch.manual_seed(seed)
    return plain, meta


def host_bytes(model) -> int:
    """Memory of the host copies of parameters and buffers."""
    handles = model._graphacc_engine.handles.values()
    with torch._C.DisableTorchFunctionSubclass():
        return sum(handle.tensor.untyped_storage().nbytes() for handle in handles)


def steps(model, count: int = 3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    x = torch.arange(64).view(8, 8) % 20
    for _ in range(count):
        loss = nn.functional.cross_entropy(model(x).transpose(1, 2), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False))


def test_modules_make_what_an_ordinary_construction_makes():
    plain, meta = on_meta(Net)
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.1)
    kept = meta.embed.weight
    model = compiled(meta, "fsdp=4")
    after = torch.random.get_rng_state()
    assert model.embed.weight is kept is model.head.weight and optimizer.param_groups[0]["params"][0] is kept
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        if name != "head.weight":
            assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.random.get_rng_state(), after)


def test_training_holds_no_copy_on_the_host():
    plain, meta = on_meta(Net, seed=1)
    model = compiled(meta, "fsdp=4")
    assert host_bytes(model) == 0
    assert relative_error(torch.tensor(steps(model)), torch.tensor(steps(plain))) < 1e-5
    assert host_bytes(model) == 0
    assert relative_error(model.attention.in_proj_weight, plain.attention.in_proj_weight) < 1e-4


@pytest.mark.matrix
def test_transformers_own_scheme_makes_parameters_and_buffers():
    plain, meta = on_meta(llama)
    batches = batches_of("llama", 2)
    model = compiled(meta, "fsdp=2,tp=2")
    for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected), name
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        found = []
        for batch in batches:
            loss = one(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert relative_error(torch.tensor(losses[1]), torch.tensor(losses[0])) < 1e-5
    assert host_bytes(model) == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of transformers, and its weights in several files with an index."""
    torch.manual_seed(5)
    model = llama()
    directory = tmp_path_factory.mktemp("weights")
    model.save_pretrained(directory, max_shard_size="8KB")
    assert (directory / "model.safetensors.index.json").exists()
    return model, directory


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=2,tp=2", "pp=2,fsdp=2,microbatches=2", "auto"])
@pytest.mark.default_cases("fsdp=4", "fsdp=2,tp=2")
def test_sharded_files_are_loaded_by_slices(saved, strategy):
    plain, directory = saved
    _, meta = on_meta(llama)
    model = compiled(meta, strategy, **({"devices": 2} if strategy == "auto" else {}))
    assert graphacc.load_safetensors(model, directory) == ([], [])
    assert host_bytes(model) == 0 or strategy.startswith("pp")
    tokens = torch.arange(64).view(4, 16) * 5 % 128
    batch = {"input_ids": tokens, "labels": tokens}
    with captured_once("meta llama", "pp" in strategy):
        loss = model(**batch).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert abs(loss.item() - plain(**batch).loss.item()) < 1e-5
    for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected), name


def test_each_process_reads_only_what_its_devices_hold(saved, monkeypatch):
    from graphacc.runtime import weight_files

    read, original = [], weight_files.Weight.read
    monkeypatch.setattr(weight_files.Weight, "read", lambda self, index, dtype: read.append((self, index)) or original(self, index, dtype))
    _, meta = on_meta(llama)
    model = compiled(meta, "fsdp=4")
    graphacc.load_safetensors(model, saved[1])
    sizes = [tuple(part.stop - part.start for part in index) for weight, index in read if weight.shape == (128, 32)]
    assert sizes == [(32, 32)] * 4


def test_loading_keeps_what_an_initialiser_would_write(saved):
    """The rotary frequencies are in no file: transformers' scheme makes them, and leaves what was loaded."""
    plain, directory = saved
    _, meta = on_meta(llama)
    model = compiled(meta, "fsdp=2")
    graphacc.load_safetensors(model, directory)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected), name


def test_names_shapes_and_dtypes_that_differ(tmp_path):
    model = compiled(on_meta(functools.partial(nn.Linear, 4, 8))[1], "fsdp=2")
    weight, bias = torch.randn(8, 4), torch.randn(8)
    safetensors.torch.save_file({"x.weight": weight.bfloat16(), "x.bias": bias, "x.more": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(graphacc.CheckpointError, match=r"(?s)5 differences.*missing: weight \[8, 4\].*unexpected: x.more.*rename="):
        graphacc.load_safetensors(model, tmp_path)
    found = graphacc.load_safetensors(model, tmp_path, strict=False, rename=lambda name: f"x.{name}")
    assert found == ([], ["x.more"])
    assert torch.equal(model.weight, weight.bfloat16().float()) and torch.equal(model.bias, bias)
    safetensors.torch.save_file({"weight": weight.t().contiguous(), "bias": bias}, tmp_path / "model.safetensors")
    with pytest.raises(graphacc.CheckpointError, match=r"different: weight is \[4, 8\] in the files, \[8, 4\] here"):
        graphacc.load_safetensors(model, tmp_path, strict=False)


def test_files_that_are_missing_or_cut_off(tmp_path, saved):
    model = compiled(on_meta(functools.partial(nn.Linear, 4, 8))[1], None)
    with pytest.raises(graphacc.CheckpointError, match="there are no weights at"):
        graphacc.load_safetensors(model, tmp_path)
    for name in ("a", "b"):
        safetensors.torch.save_file({"weight": torch.ones(8, 4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(graphacc.CheckpointError, match="holds 2 safetensors files and no"):
        graphacc.load_safetensors(model, tmp_path)
    whole = (tmp_path / "a.safetensors").read_bytes()
    for length, message in ((len(whole) - 4, "is cut off: 'weight' ends"), (20, "its header cannot be read")):
        (tmp_path / "a.safetensors").write_bytes(whole[:length])
        with pytest.raises(graphacc.CheckpointError, match=message):
            graphacc.load_safetensors(model, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"bias": "b.safetensors"}}')
    with pytest.raises(graphacc.CheckpointError, match="names 1 tensors that the files do not hold, the first bias in b.safetensors"):
        graphacc.load_safetensors(model, tmp_path)


class Bare(nn.Module):
    """A parameter and a buffer that no method of a module makes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.scale + self.table


def test_what_nobody_makes_is_refused_by_name_and_can_be_written():
    plain, meta = on_meta(Bare)
    model = compiled(meta, "fsdp=2")
    with pytest.raises(graphacc.LoopError, match=r"(?s)2 values .* are missing.*parameter scale \[4\] of Bare.*buffer table \[4\].*load_safetensors"):
        model(torch.ones(2, 4)).sum().item()
    with pytest.raises(graphacc.LoopError, match=r"parameter scale \[4\] of Bare"), torch.no_grad():
        model.scale.sum()
    nn.init.ones_(model.scale)
    model.table = torch.arange(4.0)
    for one in (plain, model):
        one(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert torch.equal(model.inner.weight, plain.inner.weight)
    assert relative_error(model.scale, plain.scale) < 1e-6


def test_the_loop_initialises_after_to_empty():
    """torchtitan's way: `to_empty`, then the model's own code; values go to the devices one after the other."""
    _, meta = on_meta(functools.partial(nn.Sequential, nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
    meta = meta.to("meta")
    model = compiled(meta, "fsdp=2")
    assert model.to_empty(device="cpu") is model
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number / 100)
            assert host_bytes(model) <= 64 * 16 * 4
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.fill_(number / 100)
    x = torch.linspace(-1, 1, 64).view(4, 16)
    assert torch.allclose(model(x), plain(x))


def test_a_state_dict_fills_a_model_of_the_meta_device():
    plain, meta = on_meta(Net, seed=2)
    model = compiled(meta, "fsdp=4")
    model.load_state_dict(plain.state_dict())
    assert relative_error(torch.tensor(steps(model, 1)), torch.tensor(steps(plain, 1))) < 1e-5


def test_a_checkpoint_fills_a_model_of_the_meta_device(tmp_path):
    plain, meta = on_meta(Net, seed=3)
    first = compiled(plain, None)
    losses = steps(first, 1)
    assert losses
    graphacc.save_checkpoint(tmp_path / "c", first)
    model = compiled(meta, "fsdp=4")
    graphacc.load_checkpoint(tmp_path / "c", model)
    assert host_bytes(model) == 0
    assert relative_error(torch.tensor(steps(model, 2)), torch.tensor(steps(first, 2))) < 1e-5


def test_tensors_that_can_never_get_a_value():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        model.table = torch.arange(4)
    with pytest.raises(graphacc.GraphAccError, match="attribute 'table' of the model .* on the meta device"):
        compiled(model, None)


@pytest.mark.parametrize("offload", ["", ",offload=optimizer"])
def test_real_parts_stay_as_they_are(offload):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.device("meta"):
        head = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 16), head)
    model[0].load_state_dict(plain[0].state_dict())
    model = compiled(model, f"fsdp=2{offload}")
    x = torch.linspace(-1, 1, 128).view(8, 16)
    model(x).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[1].weight.abs().max() <= 0.25 and model[1].weight.std() > 0.05


class Branchy(nn.Module):
    """Follows values of its parameters, so that PyTorch runs it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x)
        return self.second(h * 2 if h.mean().item() > 100 else torch.relu(h))


def descend(model, steps: int = 2) -> torch.Tensor:
    optimizer, losses, x = torch.optim.AdamW(model.parameters(), lr=0.05), [], torch.linspace(-1, 1, 128).view(8, 16)
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))


def test_values_are_made_for_whoever_looks_first():
    """A check against PyTorch, a copy, and a decay of all parameters that the loop does itself."""
    plain, meta = on_meta(two_layers)
    assert relative_error(descend(compiled(meta, "fsdp=2", verify=1)), descend(plain)) < 1e-5
    plain, meta = on_meta(two_layers)
    assert relative_error(descend(copy.deepcopy(compiled(meta, "fsdp=2"))), descend(plain)) == 0
    plain, meta = on_meta(two_layers)
    model = compiled(meta, "fsdp=2")
    for one in (plain, model):
        descend(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
    assert host_bytes(model) <= 16 * 4 * 4  # of the last one, the others are on the devices again
    assert relative_error(descend(model), descend(plain)) < 1e-5


@pytest.mark.matrix
def test_a_model_that_pytorch_runs():
    plain, meta = on_meta(Branchy)
    assert relative_error(descend(compiled(meta, "fsdp=2")), descend(plain)) < 1e-5


def test_a_part_that_is_replaced_after_compiling():
    plain, meta = on_meta(two_layers)
    model = compiled(meta, "fsdp=2")
    model[1] = nn.Linear(16, 4)
    plain[1].load_state_dict(model[1].state_dict())
    assert relative_error(descend(model), descend(plain)) < 1e-5
