"""ZeRO++: what travels as codes, what stays exact, what the backward gathers within groups; on all ranks in lockstep, in processes, and compiled."""

import collections

import pytest
import torch
import training
import zoo
from selection import with_matrix
from simulate import simulate
from tolerances import relative_error
from zoo_steps import partitioned, shared_case

import graphacc
from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase
from graphacc.ops.quantize import error_bound, message_bytes
from graphacc.passes.accumulation import accumulating
from graphacc.passes.communication.quantize import EXCHANGE, GATHER, SCATTER
from graphacc.passes.communication.secondary import is_across_nodes
from graphacc.passes.partition.plan import Role
from graphacc.runtime.reference import run_reference
from graphacc.strategy import Strategy

SMALL = "quant_min_size=512"  # the zoo's models are small
QW, QG = f"quantized_weights=True,{SMALL}", f"quantized_gradients=True,{SMALL}"
ALL = f"quantized_weights=True,quantized_gradients=True,hpz=2,{SMALL}"


def moves(step) -> dict:
    """Collective and group -> what moves."""
    found = collections.defaultdict(list)
    for node in step.graph.nodes:
        if "move" in node.meta:
            found[node.target, node.args[-1]].append(node.meta["move"])
    return found


def results(name: str, strategy: str):
    case, inputs, _ = shared_case(name)
    step, _ = partitioned(case.step, strategy)
    return step, simulate(step, Strategy.parse(strategy).mesh, inputs)


@pytest.mark.parametrize(
    ("name", "base", "with_hpz"),
    [
        ("gpt2", "fsdp=4", "fsdp=4,hpz=2,bucket_mb=0"),
        ("gpt2", "fsdp=4,bucket_mb=0", "fsdp=4,hpz=2,bucket_mb=0.02"),
        ("tied_mlp", "fsdp=4", "fsdp=4,hpz=2"),
        ("resnet", "dp=2,fsdp=4", "dp=2,fsdp=4,hpz=2"),
        ("gpt2", "fsdp=4,tp=2", "fsdp=4,tp=2,hpz=2"),
        ("gpt2", f"fsdp=4,{QW}", f"fsdp=4,{QW},hpz=2"),
    ],
)
@pytest.mark.default_cases("gpt2-fsdp=4-fsdp=4,hpz=2,bucket_mb=0")
def test_a_secondary_partition_keeps_the_bits(name, base, with_hpz):
    _, expected = results(name, base)
    step, got = results(name, with_hpz)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    found = moves(step)
    again = [move for move in found[GATHER, "fsdp"] if move.role is Role.WEIGHT and move.phase is Phase.BACKWARD]
    assert found[GATHER, "fsdp/2"] and not again
    across = [node for node in step.graph.nodes if is_across_nodes(node)]
    assert across and all(node.meta["phase"] is Phase.FORWARD for node in across)
    assert any(node.meta["val"].dtype == torch.uint8 for node in across) == ("quantized" in with_hpz)


@pytest.mark.parametrize("extra", [QW, f"{QG},node_size=2", ALL])
@pytest.mark.default_cases("quantized_weights=True,quant_min_size=512")
def test_buckets_change_no_bits(extra):
    _, alone = results("gpt2", f"fsdp=4,bucket_mb=0,{extra}")
    step, joined = results("gpt2", f"fsdp=4,bucket_mb=0.02,{extra}")
    assert all(torch.equal(x, y) for x, y in zip(alone, joined, strict=True))
    assert any(move.tensors > 1 for items in moves(step).values() for move in items)


def test_weights_as_int8():
    """Every gather of a large weight carries its message, vectors and small weights travel as they are, and the loss moves a little."""
    (exact, expected), (step, got) = results("gpt2", "fsdp=4,bucket_mb=0"), results("gpt2", f"fsdp=4,bucket_mb=0,{QW}")
    before, after = moves(exact)[GATHER, "fsdp"], moves(step)[GATHER, "fsdp"]
    assert len(before) == len(after)
    quantized = [move for move in after if move.bits]
    assert 0 < len(quantized) < len(after)
    numel = [move.size_bytes // 4 for move, other in zip(before, after) if other.bits]
    assert [move.size_bytes for move in quantized] == [4 * message_bytes(n // 4, 8, 256) for n in numel]
    vectors = {item.target for item in step.inputs if item.kind is Kind.PARAM and len(item.shape) < 2}
    assert vectors and all(size < 512 for size in (move.size_bytes // 4 for move in after if not move.bits))
    loss = next(i for i, item in enumerate(step.outputs) if item.kind is Kind.LOSS)
    assert 0 < relative_error(got[loss], expected[loss]) < 0.01
    assert moves(exact)[SCATTER, "fsdp"] == moves(step)[SCATTER, "fsdp"]


@pytest.mark.parametrize(("extra", "groups"), [("", ("fsdp",)), (",node_size=2", ("fsdp/2", "fsdp%2")), (",node_size=4", ("fsdp",)), (",node_size=1", ("fsdp",))])
@pytest.mark.default_cases(",node_size=2-groups1")
def test_gradients_as_int4(extra, groups):
    """One exchange, or one in the node and one across; each sum errs by at most the errors of what was added."""
    case, _, _ = shared_case("gpt2")
    grads = [i for i, item in enumerate(case.joint.outputs) if item.kind is Kind.GRAD]
    given = case.inputs(case.joint)
    exact, _ = partitioned(case.joint.copy(), "fsdp=4,zero=2,bucket_mb=0")
    step, _ = partitioned(case.joint.copy(), f"fsdp=4,zero=2,bucket_mb=0,{QG}{extra}")
    found = moves(step)
    assert {group for target, group in found if target is EXCHANGE} == set(groups)
    assert len({len(found[EXCHANGE, group]) for group in groups}) == 1
    num_exact = sum(move.bits is None for move in found[SCATTER, "fsdp"])
    assert num_exact and len(found[EXCHANGE, groups[0]]) + num_exact == len(moves(exact)[SCATTER, "fsdp"])
    got, expected = simulate(step, {"fsdp": 4}, given), simulate(exact, {"fsdp": 4}, given)
    changed = 0
    for i in grads:
        # Rank r's gradients are below 4 times the largest mean here; two quantisations of sums of at most four.
        bound = error_bound(4) * 4 * len(groups) * max(expected[i].abs().max().item(), 1e-12) * 4
        assert (got[i] - expected[i]).abs().max() <= bound
        changed += not torch.equal(got[i], expected[i])
    assert changed == len(found[EXCHANGE, groups[0]])


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=4,zero=2", "dp=4", "dp=2,fsdp=2"])
def test_a_gradient_that_is_accumulated_travels_like_others(strategy):
    """Found by the matrix: under microbatches no gradient was known as one, so that none was joined or quantised. Over late axes none travels before the update."""
    case, _, _ = shared_case("gpt2")
    quantized = f",{QG}" if "fsdp" in strategy else ""
    alone, _ = partitioned(case.joint.copy(), f"{strategy},bucket_mb=0.02{quantized}")
    summed, _ = partitioned(accumulating(case.joint.copy()), f"{strategy},bucket_mb=0.02{quantized}")
    late = Strategy.parse(strategy).late_axes
    expected, got = ({key: [(move.role, move.size_bytes) for move in items] for key, items in moves(step).items()} for step in (alone, summed))
    assert any(role is Role.GRADIENT for items in expected.values() for role, _ in items)
    assert got == {(kind, axis): [item for item in items if axis not in late or item[0] is not Role.GRADIENT] for (kind, axis), items in expected.items()}


@pytest.mark.parametrize("strategy", with_matrix(["fsdp=4," + ALL, "dp=2,fsdp=2," + QW, "fsdp=4," + QG], ["fsdp=4," + ALL]))
@pytest.mark.matrix
def test_processes_have_the_bits_of_the_simulation(strategy):
    """Torch's own collectives between processes, with a process group for every part of an axis."""
    case, inputs, _ = shared_case("tied_mlp")
    step, _ = partitioned(case.step, strategy)
    mesh = Strategy.parse(strategy).mesh
    for x, y in zip(run_reference(step, mesh, inputs), simulate(step, mesh, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    with_matrix(
        [f"{base},{extra}" for base in ("fsdp=8", "dp=2,fsdp=4", "fsdp=4,tp=2", "fsdp=4,microbatches=2") for extra in (QW, QG, ALL + ",bucket_mb=0.02", ALL + ",precision=bf16", f"hpz=2,{SMALL}")],
        [f"fsdp=8,{ALL},bucket_mb=0.02", f"dp=2,fsdp=4,{ALL},precision=bf16"],
    ),
)
@pytest.mark.default_cases("fsdp=8,quantized_weights=True,quantized_gradients=True,hpz=2,quant_min_size=512,bucket_mb=0.02")
def test_training_on_eight_devices(strategy):
    """Compiled: the loss falls as with exact communication, and hpz alone keeps the bits."""
    exact = ",".join(part for part in strategy.split(",") if not part.startswith(("quant", "hpz", "bucket")))
    losses, states = [], []
    for chosen in (exact, strategy):
        model, _ = zoo.MODELS["gpt2"]()
        training.compiled(model, chosen)
        with training.captured_once("zero++"):
            losses.append(training.train(model, training.batches_of("gpt2", steps=3) * 2, scheduled=False))
        states.append(model.state_dict())
    assert losses[1][-1] < losses[1][0]
    if "quantized" in strategy:
        assert all(abs(x - y) < 0.02 * y for x, y in zip(losses[1], losses[0])) and losses[0] != losses[1]
    else:
        assert losses[0] == losses[1] and all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.matrix
def test_what_is_said():
    model, _ = zoo.MODELS["gpt2"]()
    training.compiled(model, f"fsdp=8,{ALL},bucket_mb=0.02")
    training.train(model, training.batches_of("gpt2", steps=1), scheduled=False)
    assert "changes numerics: quantized_weights: " in str(model.strategy) and "changes numerics: quantized_gradients: " in str(model.strategy)
    text = model.explain(passes=True)
    assert "gathers of weights as int8" in text and "scatters of gradients as int4" in text and "gathers of the backward within groups of 2" in text
    with pytest.raises(StrategyError, match="verify=1: changes numerics"):
        graphacc.verify(model)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fsdp=8,hpz=8", "hpz=8 is all of fsdp=8"),
        ("fsdp=8,hpz=3", "hpz=3 does not divide fsdp=8"),
        ("fsdp=8,zero=2,hpz=2", "second gather of ZeRO-3"),
        ("dp=8,quantized_gradients=True", "which has size 1"),
        ("fsdp=8,zero=1,quantized_weights=True", "would keep the error"),
        ("pp=2,fsdp=4,hpz=2,microbatches=2", "leave hpz out, or set pp=1"),
        ("fsdp=8,quantized_gradients=True,node_size=3", "node_size=3 does not divide"),
        ("fsdp=8,node_size=4", "is for quantized_gradients"),
        ("fsdp=8,quantized_weights=True,quant_block=7", "must be even"),
        ("fsdp=8,quantized_weights=2", "must be True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy, message):
    with pytest.raises(StrategyError, match=message):
        Strategy.parse(strategy)


@pytest.mark.lazy
def test_lazily_captured_models_refuse():
    with pytest.raises(StrategyError, match="quantized_weights rewrite collectives"):
        graphacc.compile(torch.nn.Linear(8, 8), strategy="fsdp=2,quantized_weights=True", devices=2, capture="lazy", cache_dir=None)


class Adapter(torch.nn.Module):
    """Two frozen layers and a low-rank update of the first (LoRA)."""

    def __init__(self, width: int = 64, rank: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.a, self.b = torch.nn.Parameter(torch.randn(width, rank) / 8), torch.nn.Parameter(torch.zeros(rank, 4 * width))
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x) + x @ self.a @ self.b))


def adapted(strategy: str, keep: bool = True):
    model = training.compiled(Adapter(), strategy)
    if not keep:
        model._graphacc_engine.programs.frozen = frozenset
    optimizer = torch.optim.AdamW([model.a, model.b], lr=1e-2)
    return model, optimizer, [adapter_step(model, optimizer, seed) for seed in range(3)]


def adapter_step(model, optimizer, seed: int) -> float:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def kept(model) -> dict:
    return {item.target: item.shape for compiled in model.programs for item in compiled.graph.inputs if item.codes is not None}


def test_frozen_weights_are_kept_as_codes(tmp_path):
    """The same bits as if they were quantised in every step; the loop's tensors, and checkpoints, stay exact."""
    strategy = f"fsdp=8,hpz=2,{QW}"
    model, optimizer, losses = adapted(strategy)
    assert kept(model) == {"up.weight": (8, message_bytes(2048, 8, 256)), "down.weight": (8, message_bytes(2048, 8, 256))}
    again, _, expected = adapted(strategy, keep=False)
    assert losses == expected and not kept(again)
    assert torch.equal(model.up.weight, Adapter().up.weight)
    graphacc.save_checkpoint(tmp_path / "saved", model, optimizer)
    exact, other, _ = adapted("fsdp=4,tp=2")
    with torch.no_grad():
        exact.up.weight.zero_()
    graphacc.load_checkpoint(tmp_path / "saved", exact, other)
    assert torch.equal(exact.up.weight, Adapter().up.weight) and torch.equal(exact.a, model.a)
    assert adapter_step(exact, other, 7) == pytest.approx(adapter_step(model, optimizer, 7), rel=0.01)


def test_frozen_weights_of_four_bits():
    model, _, losses = adapted(f"fsdp=8,{QW},frozen_bits=4")
    assert kept(model)["up.weight"] == (8, message_bytes(2048, 4, 256))
    assert "2 weights that are not trained are kept as int4: 2080 bytes on a rank in the place of 16384" in model.explain(passes=True)
    plain = Adapter()
    optimizer = torch.optim.AdamW([plain.a, plain.b], lr=1e-2)
    expected = [adapter_step(plain, optimizer, seed) for seed in range(3)]
    assert losses == pytest.approx(expected, rel=0.02) and losses != expected


def test_a_frozen_weight_that_is_trained_starts_from_its_exact_value():
    model, _, _ = adapted(f"fsdp=8,{QW}")
    model.up.weight.requires_grad_(True)
    optimizer = torch.optim.SGD([model.up.weight], lr=0.0)
    adapter_step(model, optimizer, 5)
    assert torch.equal(model.up.weight, Adapter().up.weight)
    with torch.no_grad():
        model.down.weight.mul_(0)  # a write reaches the codes
        assert torch.equal(model(torch.ones(16, 64)), model.down.bias.expand(16, -1))


@pytest.mark.parametrize("extra", ["", f",{QW}"])
@pytest.mark.default_cases("")
def test_memory_of_the_secondary_partition(extra):
    """Above ZeRO-3's temporaries: at most the weights that are read twice, divided by the group (section 3.2), 1 % for alignment; and the copy
    of one weight that brings it into the order of the ranks, which quantised ones do without."""

    def temporaries(strategy: str) -> tuple[int, str]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(part for _ in range(8) for part in (torch.nn.Linear(256, 256, bias=False), torch.nn.Tanh())))
        model = training.compiled(model, strategy, fast_compile=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        (compiled,) = model.programs
        return compiled.program.memory.temp_bytes, model.explain(passes=True)

    alone, _ = temporaries(f"fsdp=8{extra}")
    together, text = temporaries(f"fsdp=8,hpz=4{extra}")
    numel = 7 * 256 * 256  # the first layer's weight is not read by the backward
    kept = 8 * 7 * message_bytes(256 * 256 // 8, 8, 256) // 4 if extra else 4 * numel // 4
    assert f"out of {kept} kept by a rank" in text
    assert together - alone <= 1.01 * kept + (0 if extra else 4 * 256 * 256)
