"""Equal blocks that are left out: sums stay exact, what differs stays, and the shorter step is that of a shorter model."""

import collections
import dataclasses
import gc
import math
import time

import pytest
import torch
import zoo
from deep_models import captured, deep_model, deep_steps
from gpt2_steps import spread
from tolerances import assert_close
from torch import nn
from torch.utils.flop_counter import flop_registry

from graphacc.capture import hyperparameters
from graphacc.costs.memory import predict_memory
from graphacc.costs.repeats import Reduced, reduce_repeats
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.partition import Move
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel
from graphacc.passes.planning import Planner
from graphacc.strategy import Strategy

WIDTH = 8


def tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return [x for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, torch.Tensor)]


def flops(node: torch.fx.Node) -> int:
    counter = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if counter is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return counter(*args, **kwargs, out_val=node.meta["val"])


def sums(step: StepGraph, counts: dict[str, int] | None = None) -> collections.Counter:
    """Nodes, operations and bytes by operator, bytes of inputs by kind; weighted."""
    total = collections.Counter()
    kinds = {item.name: item for item in step.inputs}
    for node in step.graph.nodes:
        if node.op != "output":
            weight = 1 if counts is None else counts[node.name]
            what = kinds[node.name].kind if node.name in kinds else str(node.target)
            total["nodes", what] += weight
            total["bytes", what] += weight * sum(x.numel() * x.dtype.itemsize for x in tensors(node))
            total["flops", what] += weight * flops(node)
    return total


def groups(reduced: Reduced) -> list[tuple[int, tuple[str, ...]]]:
    """Of every class: how many groups it has, and the first module of those that are left."""
    return [(len(item.groups), tuple(group[0] for group in item.kept)) for item in reduced.classes]


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("gpt2", {"transformer.h": 6}),
        ("llama", {"model.layers": 6}),
        ("mixtral", {"model.layers": 6}),
        ("t5", {"encoder.block": 4, "decoder.block": 4}),  # the first ones make the bias of all, the gradient's sum begins at the last
        pytest.param("qwen3", {"model.layers": 6}, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", {"model.layers": 6}, marks=pytest.mark.matrix),
        pytest.param("bert", {"bert.encoder.layer": 6}, marks=pytest.mark.matrix),
        pytest.param("vit", {"vit.layers": 6}, marks=pytest.mark.matrix),
        # no gradient comes to the other tokens of the last layer of images
        pytest.param("clip", {"vision_model.encoder.layers": 5, "text_model.encoder.layers": 6}, marks=pytest.mark.matrix),
        pytest.param("nn_transformer", {"transformer.encoder.layers": 6, "transformer.decoder.layers": 5}, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.default_cases("gpt2-classes0-2", "gpt2-classes0-3")
def test_sums_over_counts_are_those_of_the_whole_step(name, classes, keep):
    for step in deep_steps(name, 6):
        before = str(step.graph)
        reduced = reduce_repeats(step, keep)
        found = {kept[0].rpartition(".")[0]: number for number, kept in groups(reduced)}
        assert found == classes, reduced.notes
        assert all(len(kept) == keep for _, kept in groups(reduced))
        assert sums(reduced.step, reduced.counts) == sums(step)
        assert len(reduced.step.graph.nodes) < len(step.graph.nodes) and str(step.graph) == before
        reduced.step.verify()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_moe"])
def test_casts_of_parameters_belong_to_their_blocks(name):
    """Under bf16 they are made outside of all modules, and those of gradients too."""
    for step in deep_steps(name, 6, "bf16"):
        reduced = reduce_repeats(step)
        assert [number for number, _ in groups(reduced)] == [6], reduced.notes
        assert sums(reduced.step, reduced.counts) == sums(step)
        reduced.step.verify()


@pytest.mark.parametrize("name", ["tied_mlp", "lstm_lm", pytest.param("resnet", marks=pytest.mark.matrix), "gpt2"])
@pytest.mark.default_cases("tied_mlp", "gpt2")
def test_what_does_not_repeat_stays_as_it_is(name):
    step = deep_steps(name, 2)[1]
    reduced = reduce_repeats(step)
    assert reduced.step is step and not reduced.classes and set(reduced.counts.values()) == {1}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.matrix), pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_three_layers_stand_for_six(name):
    for three, six in zip(deep_steps(name, 3), deep_steps(name, 6), strict=True):
        reduced = reduce_repeats(three).of_depth(6)
        assert sums(reduced.step, reduced.counts) == sums(six) and sorted(reduced.blocks.values()) == [1, 5]
    with pytest.raises(ValueError, match="0 classes"):
        reduce_repeats(deep_steps(name, 2)[0]).of_depth(6)


STRATEGIES = ["dp=8", "fsdp=8", "tp=2,fsdp=4", "cp=2,fsdp=4"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "t5", "bert", "qwen3_moe", "clip"))])
@pytest.mark.default_cases("gpt2", "mixtral")
def test_splits_of_dropped_blocks_are_those_of_the_one_that_is_left(name):
    step, _ = deep_steps(name, 6)
    reduced, names = reduce_repeats(step), [item.target for item in step.inputs if item.kind is Kind.PARAM]
    assert len(reduced.step.inputs) < len(step.inputs)
    splits = find_tensor_parallel(step, 2, {}).splits
    assert reduced.everywhere(find_tensor_parallel(reduced.step, 2, {}).splits, names) == splits and splits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "mixtral", "t5", "bert"))])
@pytest.mark.default_cases("gpt2-dp=8")
def test_programs_are_linear_in_the_depth(name, strategy):
    """Bytes of collectives, arguments and temporaries of 6 layers, from the programs of 2 and of 3 that are left."""
    step = deep_steps(name, 6)[1]
    shorter = [reduce_repeats(step, keep) for keep in (2, 3)]
    more = len(shorter[0].classes[0].groups) - 2
    two, three = (program(reduced.step, strategy) for reduced in shorter)
    found = {key: two[key] + more * (three[key] - two[key]) for key in two | three}
    expected = program(step, strategy)
    temporary, wanted = found.pop("temporary"), expected.pop("temporary")
    assert found == expected
    assert temporary == wanted


def program(step: StepGraph, strategy: str) -> collections.Counter:
    """Bytes of the program of one rank: of its memory, and of its collectives by axis, kind and role."""
    local = spread(step, f"{strategy},bucket_mb=0")
    memory = predict_memory(local)
    total = collections.Counter(argument=memory.argument_bytes, output=memory.output_bytes, temporary=memory.temporary_bytes)
    for move in (node.meta["move"] for node in local.graph.nodes if "move" in node.meta):
        total[move.axis, move.collective, move.role] += move.size_bytes
    return total


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gpt2", "mixtral", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "t5", "clip"))])
@pytest.mark.default_cases("gpt2-dp=8", "gpt2-fsdp=8", "gpt2-tp=2,fsdp=4", "gpt2-cp=2,fsdp=4")
def test_moves_of_a_plan_count_once_for_every_block(name, strategy):
    step = deep_steps(name, 6)[1]
    reduced = reduce_repeats(step)
    assert moves(reduced.step, strategy, lambda move: weight(move, reduced)) == moves(step, strategy, lambda move: 1)


def weight(move: Move, reduced: Reduced) -> int:
    if move.phase is Phase.UPDATE:
        return reduced.counts.get(move.value) or reduced.counts[move.reader]
    return next((number for path, number in reduced.blocks.items() if f"{move.layer}.".startswith(f"{path}.")), 1)


def moves(step: StepGraph, strategy: str, weight) -> collections.Counter:
    plan = Planner(step, batch_dims=default_batch_dims(step)).plan(Strategy.parse(strategy))
    total = collections.Counter()
    for move in plan.moves:
        total[move.axis, move.collective, move.role] += weight(move) * move.size_bytes
    return total


@pytest.mark.parametrize(("name", "left"), [("gpt2", 2), ("t5", 4), pytest.param("llama", 2, marks=pytest.mark.matrix)])
@pytest.mark.default_cases("gpt2-2")
def test_the_reduced_step_trains_the_model_without_the_dropped_layers(name, left):
    """Losses and parameters of two steps, against PyTorch with a model of as many layers as are left of six."""
    model, batch = deep_model(name, 6)
    reduced = reduce_repeats(captured(model, batch)[1])
    step = reduced.step
    dropped = {path for item in reduced.classes for group in set(item.groups) - set(item.kept) for path in group}
    short, _ = deep_model(name, left)
    stay = [name for name, _ in model.named_parameters() if not any(name.startswith(f"{path}.") for path in dropped)]
    origin = dict(zip((name for name, _ in short.named_parameters()), stay, strict=True))
    optimizer = zoo.adamw(short)
    values = {}
    with torch.no_grad():
        for name, parameter in short.named_parameters():
            parameter.copy_(model.get_parameter(origin[name]))
            values[Kind.PARAM, origin[name]] = parameter.clone()
    values |= {(Kind.BUFFER, name): x for name, x in model.named_buffers()} | {(Kind.BUFFER, name): x for name, x in step.constants.items()}
    for item in step.inputs:
        if item.kind is Kind.STATE:
            values[item.kind, item.target] = torch.zeros(item.shape, dtype=item.dtype)
    values |= {(Kind.HYPER, name): torch.tensor(x, dtype=torch.float64) for name, x in hyperparameters(optimizer).items()}
    values |= {(Kind.BATCH, name): x for name, x in batch.items()} | {(Kind.KEY, "key"): torch.tensor([1, 2])}
    for _ in range(2):
        expected = short(**batch).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        with torch.no_grad():
            results = torch.fx.Interpreter(nn.Module(), graph=step.graph).run(*[values[item.kind, item.target] for item in step.inputs])
        given = {(item.kind, item.target): x for item, x in zip(step.outputs, results, strict=True)}
        assert_close(given[Kind.LOSS, "loss"], expected.detach())
        values |= {key: x for key, x in given.items() if key in values}
    for name, parameter in short.named_parameters():
        assert_close(values[Kind.PARAM, origin[name]], parameter.detach())


# Small models, each of which has something that a reduction could miss. [B, D] throughout.


class Block(nn.Module):
    def __init__(self, window: float = 1.0):
        super().__init__()
        self.norm, self.inner, self.window = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), window

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)) * self.window)


@dataclasses.dataclass
class Result:
    loss: torch.Tensor


class Chain(nn.Module):
    """`layers` blocks; `extra` makes a loss of the values before, between and behind them."""

    def __init__(self, layers, extra=None):
        super().__init__()
        self.layers, self.extra = nn.ModuleList(layers), extra
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = [self.stem(x)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        loss = self.head(hidden[-1]).square().mean()
        return Result(loss if self.extra is None else loss + self.extra(hidden))


def reduced_chain(layers, extra=None, prepare=lambda model: None, **options) -> list[tuple[int, tuple[str, ...]]]:
    """Classes of the whole step, whose sums are checked."""
    model = Chain(layers, extra)
    prepare(model)
    step = captured(model, {"x": torch.randn(4, WIDTH)}, **options)[1]
    reduced = reduce_repeats(step)
    assert sums(reduced.step, reduced.counts) == sums(step)
    return groups(reduced)


def test_a_chain_of_equal_blocks():
    assert reduced_chain([Block() for _ in range(6)]) == [(6, ("layers.0", "layers.5"))]


def test_blocks_that_differ_in_a_constant_are_not_taken_together():
    layers = [Block() for _ in range(8)]
    layers[4].window = 2.0
    assert reduced_chain(layers) == [(4, ("layers.0", "layers.3")), (3, ("layers.5", "layers.7"))]
    layers = [Block() for _ in range(6)]
    layers[5].norm.eps = 1e-3
    assert reduced_chain(layers) == [(5, ("layers.0", "layers.4"))]
    model = Chain(layers)
    reduced = reduce_repeats(captured(model, {"x": torch.randn(4, WIDTH)})[0])
    assert any("layers.5 is not taken together with layers.4" in note and "0.001" in note for note in reduced.notes)


def test_random_streams_may_differ_and_probabilities_not():
    def layers(*probabilities):
        return [nn.Sequential(Block(), nn.Dropout(p)) for p in probabilities]

    assert reduced_chain(layers(0.1, 0.1, 0.1, 0.1)) == [(4, ("layers.0", "layers.3"))]
    assert reduced_chain(layers(0.1, 0.2, 0.1, 0.3)) == []


def test_blocks_that_alternate_repeat_in_groups():
    assert reduced_chain([Block(1.0 + (i % 3 == 2)) for i in range(12)]) == [(4, ("layers.0", "layers.9"))]


def test_stages_of_blocks_of_different_widths():
    def stage(*windows):
        return nn.Sequential(*(Block(window) for window in windows))

    found = reduced_chain([stage(1.0, 1.0, 1.0), stage(2.0, 2.0, 2.0, 2.0)])
    assert found == [(3, ("layers.0.0", "layers.0.2")), (4, ("layers.1.0", "layers.1.3"))]


def test_residuals_that_the_module_around_adds():
    class Around(Chain):
        def forward(self, x):
            x = self.stem(x)
            for layer in self.layers:
                x = x + layer(x)
            return Result(self.head(x).square().mean())

    model = Around([nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
    step = captured(model, {"x": torch.randn(4, WIDTH)})[1]
    reduced = reduce_repeats(step)
    assert groups(reduced) == [(5, ("layers.0", "layers.4"))], reduced.notes  # what the last one gives is added for the head
    assert sums(reduced.step, reduced.counts) == sums(step)


@pytest.mark.parametrize("detach", [False, True])
def test_a_block_that_a_later_part_reads_is_left(detach):
    def third(hidden):
        return (hidden[3].detach() if detach else hidden[3]).exp().mean()

    found = reduced_chain([Block() for _ in range(9)], third)
    kept = {path for _, paths in found for path in paths}
    inside = {f"layers.{i}" for number, paths in found for i in range(int(paths[0][7:]) + 1, int(paths[-1][7:]))}
    assert "layers.2" in kept or "layers.2" not in inside
    assert found[-1][1][-1] == "layers.8" and found[-1][0] >= 5


def test_a_sum_that_each_block_adds_to_grows_with_the_blocks():
    """The counts of a router's tokens by expert, as transformers adds them up (not differentiable: all blocks are alike)."""

    def extra(hidden):
        total = torch.zeros(WIDTH)
        for x in hidden[1:]:
            total = total + (x.detach() > 0).sum(0)
        return total.sum()

    steps = [captured(Chain([Block() for _ in range(layers)], extra), {"x": torch.randn(4, WIDTH)})[1] for layers in (3, 4, 7)]
    *short, seven = steps
    assert sums(seven)["nodes", "aten.add.Tensor"] > sums(short[0])["nodes", "aten.add.Tensor"]
    for step, keep in ((short[0], 2), (short[1], 2), (short[1], 3)):
        reduced = reduce_repeats(step, keep).of_depth(7)
        assert sums(reduced.step, reduced.counts) == sums(seven)


@pytest.mark.parametrize(
    "extra",
    [
        lambda hidden: torch.stack(hidden[1:]).exp().mean(),
        lambda hidden: torch.cat(hidden[1:], 1).exp().mean(),
        lambda hidden: sum(x.exp().mean() for x in hidden[1:]),
    ],
    ids=["stack", "cat", "sum"],
)
@pytest.mark.default_cases("cat")
def test_what_is_read_of_every_block_forbids_nothing(extra):
    ((number, kept),) = reduced_chain([Block() for _ in range(7)], extra)
    assert number >= 5 and len(kept) == 2  # the first and the last one may be left: their gradients are summed up otherwise


def test_clipped_by_the_norm_of_all_gradients():
    def clipped(grads, extras):
        total = torch.nn.utils.get_total_norm(list(grads.values()), foreach=False)
        return {name: grad * (1.0 / (total + 1e-6)).clamp(max=1.0) for name, grad in grads.items()}

    assert reduced_chain([Block() for _ in range(6)], transform=clipped) == [(6, ("layers.0", "layers.5"))]


def test_a_learning_rate_of_its_own_for_every_block():
    def decayed(model):
        return torch.optim.AdamW([{"params": module.parameters(), "lr": 0.1**i} for i, module in enumerate((model.stem, *model.layers, model.head))])

    assert reduced_chain([Block() for _ in range(6)], make_optimizer=decayed) == [(6, ("layers.0", "layers.5"))]


def test_frozen_and_tied_parameters():
    def freeze(model):
        for layer in model.layers:
            layer.norm.requires_grad_(False)

    def tie(model):
        for layer in model.layers:
            layer.inner.weight = model.head.weight

    assert reduced_chain([Block() for _ in range(6)], prepare=freeze) == [(6, ("layers.0", "layers.5"))]
    ((number, _),) = reduced_chain([Block() for _ in range(6)], prepare=tie)  # the gradient is summed up from the last one on
    assert number >= 4


def test_time_for_every_node(capsys):
    step = deep_steps("gpt2", 12)[1]
    gc.disable()  # as the runner of passes does
    start = time.process_time()
    reduced = reduce_repeats(step)
    seconds = time.process_time() - start
    gc.enable()
    with capsys.disabled():
        print(f"\n{len(step.graph.nodes)} -> {len(reduced.step.graph.nodes)} nodes, {1e6 * seconds / len(step.graph.nodes):.1f} microseconds for each")
    assert seconds < 2 and math.prod(number for number, _ in groups(reduced)) == 12
