"""Equal layers are traced once: the graph is, node by node, the one of a trace of every layer; what is not equal is traced whole."""

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from graphacc._compat.torch_ import patched
from graphacc.capture import Batch, capture_forward, capture_joint
from graphacc.capture import model as capture_model
from graphacc.graph import CHECKPOINT, StepGraph

LAYERS = 7


class Block(nn.Module):
    """Attention and two products with dropout, as in a transformer."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.out, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.1), scale

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))) * self.scale


class Tower(nn.Module):
    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.first, self.blocks, self.last, self.drop = nn.Linear(4, 8), nn.ModuleList(blocks), nn.Linear(8, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1])
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x, mask)
        return self.last(self.drop(x))

    def call(self, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return block(x, mask)


def tower(**kinds) -> Tower:
    """A tower of equal blocks, some of which are others, by number ("b5")."""
    return Tower([kinds.get(f"b{i}") or Block() for i in range(LAYERS)])


def loss(model: nn.Module, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    result = model(*leaves)
    return result.square().mean(), [result]


def both(model: nn.Module, leaves: tuple[Tensor, ...] = (torch.randn(2, 3, 4),), forward=loss, capture=capture_joint, **options) -> tuple[StepGraph, StepGraph, bool]:
    """The step with equal layers traced once, the one with every layer traced, and whether they were made in two ways."""
    batch = Batch(leaves=leaves, paths=tuple(f"args[{i}]" for i in range(len(leaves))))
    unrolled, looked_for, made, steps = capture_model.unrolled, capture_model.candidates, [], []

    def observed(*args):
        made.append(False)
        result = unrolled(*args)
        made[-1] = True
        return result

    for candidates in (looked_for, lambda model: {}):
        with patched(capture_model, unrolled=observed, candidates=candidates):
            steps.append(capture(model, forward, batch, **options))
    return steps[0], steps[1], bool(made) and all(made)


def described(step: StepGraph) -> list:
    """Everything that a step says, but for names of nodes."""
    numbers = {node: i for i, node in enumerate(step.graph.nodes)}
    lines = []
    for node in step.graph.nodes:
        args = repr(fx.map_arg((node.args, node.kwargs), lambda operand: f"%{numbers[operand]}"))
        target = "" if node.op == "placeholder" else str(node.target)
        value = node.meta.get("val")
        form = (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else None
        lines.append((node.op, target, args, form, *(str(node.meta.get(key)) for key in ("phase", "module_path", "stack_trace", CHECKPOINT))))
    return [lines, step.inputs, step.outputs, {name: value.tolist() for name, value in step.constants.items()}]


def assert_same(copied: StepGraph, whole: StepGraph) -> None:
    for found, expected in zip(described(copied), described(whole), strict=True):
        for one, other in zip(found, expected):
            assert one == other
        assert len(found) == len(expected)


class BatchNormBlock(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(3), nn.ReLU())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + super().forward(x)


class SharedScale(Tower):
    """All blocks read one trained tensor, whose gradient is the sum of what all give."""

    def __init__(self):
        super().__init__([Block() for _ in range(LAYERS)])
        self.scale = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.scale(x).mean(dim=(0, 2))[None, :].expand(3, 3)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shared)
        return self.last(x)


class Checkpointed(Tower):
    def call(self, block, x, mask):
        return torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)


class Entry:
    """What one layer keeps in a `Store`, in the way of transformers' caches of keys and values."""

    def __init__(self):
        self.keys, self.is_filled, self.length = None, False, 0


class Store:
    def __init__(self, entries: int):
        self.entries = [Entry() for _ in range(entries)]
        self.filled: dict[int, bool] = {}
        self.calls = 0

    def update(self, number: int, keys: Tensor) -> Tensor:
        if number == len(self.entries):
            self.entries.append(Entry())
        entry = self.entries[number]
        if not entry.is_filled:
            entry.keys, entry.is_filled = torch.tensor([]), True
        entry.keys, entry.length = torch.cat([entry.keys, keys], dim=-2), entry.length + keys.shape[-2]
        self.filled[number] = True
        return entry.keys


class Keeping(Block):
    """A block that keeps what it makes in an object, and reads it there."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, mask: Tensor, store: Store) -> Tensor:
        return super().forward(store.update(self.number, x), mask)


class KeepingTower(Tower):
    block: type[Keeping] = Keeping

    def __init__(self, prepared: int = LAYERS):
        super().__init__([self.block(number) for number in range(LAYERS)])
        self.prepared = prepared

    def forward(self, x: Tensor) -> Tensor:
        x, mask, store = self.first(x), torch.zeros(3, 3), Store(self.prepared)
        for block in self.blocks:
            x = block(x, mask, store)
        assert [entry.length for entry in store.entries] == [3] * LAYERS and len(store.filled) == LAYERS
        return self.last(x) + self.read_behind(store)

    def read_behind(self, store: Store) -> Tensor | float:
        return 0.0


class ReadBehind(KeepingTower):
    """What a block keeps is read behind the last one."""

    def read_behind(self, store):
        return store.entries[4].keys.mean()


class ReadsAnother(Keeping):
    """A block that reads what the block before it keeps."""

    def forward(self, x, mask, store):
        return super().forward(x, mask, store) + (store.entries[self.number - 1].keys.mean() if self.number else 0.0)


class ReadsAnotherTower(KeepingTower):
    block = ReadsAnother


class CountsInStore(Keeping):
    def forward(self, x, mask, store):
        store.calls += 1
        return super().forward(x, mask, store)


class CountingTower(KeepingTower):
    block = CountsInStore


MODELS = {
    "an object that layers write": KeepingTower,
    "an object that grows by what layers write": lambda: KeepingTower(prepared=0),
    "dropout": tower,
    "batch norm": lambda: Tower([BatchNormBlock() for _ in range(LAYERS)]),
    "a shared tensor with a gradient": SharedScale,
    "checkpointed": lambda: Checkpointed([Block() for _ in range(LAYERS)]),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(LAYERS)), nn.Linear(8, 1)),
    "another first block": lambda: tower(b0=Block(0.5)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default_cases("a shared tensor with a gradient", "an object that layers write", "batch norm")
def test_copies_are_what_a_trace_of_every_layer_gives(name):
    copied, whole, in_two_ways = both(MODELS[name]())
    assert in_two_ways
    assert_same(copied, whole)
    assert not copied.constants, "the empty tensors that caches begin with are nobody's"


@pytest.mark.matrix
def test_copies_in_bf16_and_without_gradients():
    for options in (dict(precision="bf16"), dict(capture=capture_forward)):
        copied, whole, in_two_ways = both(tower(), **options)
        assert in_two_ways, options
        assert_same(copied, whole)


class Square(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * Square.factor


class CustomBackward(Block):
    def forward(self, x, mask):
        return x + Square.apply(super().forward(x, mask))


class Counting(Block):
    calls = 0

    def forward(self, x, mask):
        self.calls = self.calls + 1
        return super().forward(x, mask)


class Leaking(Tower):
    """The results of one block are read behind the last one."""

    which = 5

    def forward(self, x):
        x, mask, seen = self.first(x), torch.zeros(3, 3), []
        for block in self.blocks:
            x = block(x, mask)
            seen.append(x)
        return self.last(x) + seen[self.which].mean()


class Hooked(Block):
    def forward(self, x, mask):
        x = super().forward(x, mask)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return x


class SavedOtherwise(Block):
    """What is kept for backward is not what backward reads."""

    def forward(self, x, mask):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2 if saved.is_floating_point() else saved):
            return super().forward(x, mask)


def frozen(number: int) -> Tower:
    model = tower()
    model.blocks[number].mix.bias.requires_grad_(False)
    return model


def tied(number: int) -> Tower:
    model = tower()
    model.blocks[number].out.weight = model.blocks[0].out.weight
    return model


UNEQUAL = {
    "another constant": lambda: tower(b4=Block(0.5)),
    "another probability": lambda: _with_probability(tower(), 4, 0.3),
    "evaluation mode": lambda: _with_mode(tower(), 4),
    "a frozen parameter": lambda: frozen(4),
    "a tied weight": lambda: tied(4),
    "a custom autograd.Function": lambda: Tower([CustomBackward() for _ in range(LAYERS)]),
    "a count of calls": lambda: Tower([Counting() for _ in range(LAYERS)]),
    "a count in an argument": CountingTower,
    "a kept value that is read later": ReadBehind,
    "a value that another layer keeps": ReadsAnotherTower,
    "a result that is read later": lambda: Leaking([Block() for _ in range(LAYERS)]),
    "a hook on gradients": lambda: Tower([Hooked() for _ in range(LAYERS)]),
    "hooks on saved tensors": lambda: Tower([SavedOtherwise() for _ in range(LAYERS)]),
    "too few": lambda: Tower([Block() for _ in range(4)]),
}


def _with_probability(model: Tower, number: int, p: float) -> Tower:
    model.blocks[number].drop.p = p
    return model


def _with_mode(model: Tower, number: int) -> Tower:
    model.blocks[number].eval()
    return model


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.default_cases("another constant")
def test_what_is_not_equal_is_traced(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the count of calls is a fixed number, which a warning says
        copied, whole, in_two_ways = both(UNEQUAL[name]())
    assert not in_two_ways
    assert_same(copied, whole)


@pytest.mark.matrix
def test_a_run_between_unequal_layers_is_copied():
    model = Tower([Block(0.5), *(Block() for _ in range(LAYERS)), Block(0.25)])
    copied, whole, in_two_ways = both(model)
    assert in_two_ways
    assert_same(copied, whole)


def test_a_parameter_with_a_hook_is_traced():
    model = tower()
    model.blocks[4].out.weight.register_hook(lambda grad: grad * 3)
    copied, whole, in_two_ways = both(model)
    assert not in_two_ways
    assert_same(copied, whole)


def test_the_model_is_left_as_it_was():
    model = tower()
    before = {path: {name: id(value) for name, value in vars(module).items()} for path, module in model.named_modules()}
    call = nn.Module.__call__
    both(model)
    assert before == {path: {name: id(value) for name, value in vars(module).items()} for path, module in model.named_modules()}
    assert nn.Module.__call__ is call


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "mixtral", "t5", "gpt2 checkpointed", "gpt2 bf16", "vit", "llama with a cache", "gpt2 with a cache", "t5 with a cache", "router"])
def test_transformers(family):
    transformers = pytest.importorskip("transformers")
    ids, options, copied_layers = torch.randint(100, (2, 16)), {}, True
    small = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4)
    gpt2 = transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=LAYERS, n_head=2, use_cache="cache" in family, bos_token_id=0, eos_token_id=0)
    experts = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False)
    t5 = dict(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, decoder_start_token_id=0, use_cache="cache" in family)
    leaves, forward = (ids,), lambda model, leaves: _loss_and_logits(model(input_ids=leaves[0], labels=leaves[0]))
    if family.startswith("gpt2"):
        model = transformers.GPT2LMHeadModel(gpt2)
        if "checkpointed" in family:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers 5 has another name for it
                model.gradient_checkpointing_enable()
        options = dict(precision="bf16") if "bf16" in family else {}
    elif family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, use_cache=False))
    elif family == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**small))
    elif family in ("mixtral", "router"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, **experts, output_router_logits=family == "router"))
        copied_layers = family == "mixtral"  # the loss of the routers reads every layer's logits
    elif family.startswith("t5"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**t5))
    elif family == "vit":
        config = transformers.ViTConfig(**{key: value for key, value in small.items() if key != "vocab_size"}, image_size=16, patch_size=8)
        model = transformers.ViTForImageClassification(config)
        leaves, forward = (torch.randn(2, 3, 16, 16),), lambda model, leaves: (model(leaves[0]).logits.square().mean(), [])
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    copied, whole, in_two_ways = both(model.train(), leaves, forward, **options)
    assert in_two_ways == copied_layers
    assert_same(copied, whole)


def _loss_and_logits(result) -> tuple[Tensor, list[Tensor]]:
    return result.loss, [result.logits]


@pytest.mark.matrix
def test_layers_of_two_lists():
    model = nn.Sequential(tower(), nn.Linear(1, 4), tower())
    copied, whole, in_two_ways = both(model)
    assert in_two_ways
    assert_same(copied, whole)
    assert len({dataclasses.astuple(item)[2] for item in copied.inputs}) == len(copied.inputs)
