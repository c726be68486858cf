"""From StepGraphs to memory problems: what shares memory, what is written in place, and in which order."""

import operator

import pytest
import torch
import torch.fx
from torch import nn

from graphacc.capture.model import Batch, capture_joint
from graphacc.capture.stitch import stitch
from graphacc.capture.update import capture_update
from graphacc.costs.fx_problem import problem_from_step
from graphacc.graph import Input, Kind, Output, StepGraph
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.validate import check_order

aten = torch.ops.aten
ROW = 4 * 8  # bytes of float32[8]


class _Builder:
    """A StepGraph of float32[8] values, one call after the other."""

    def __init__(self, *kinds: Kind):
        self.graph = torch.fx.Graph()
        self.inputs, self.kinds = [], kinds
        for i in range(len(kinds)):
            node = self.graph.placeholder(f"in{i}")
            node.meta["val"] = torch.empty(8, device="meta")
            self.inputs.append(node)

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
        node.meta["val"] = target(*values)
        return node

    def step(self, **results) -> StepGraph:
        """The keyword `in0=node` returns a node in place of that input; others are outputs of the user."""
        self.graph.output(tuple(results.values()))
        inputs = tuple(
            Input(name=f"in{i}", kind=kind, target=f"in{i}", shape=(8,), dtype=torch.float32) for i, kind in enumerate(self.kinds)
        )
        kinds = {f"in{i}": kind for i, kind in enumerate(self.kinds)}
        outputs = tuple(
            Output(kind=kinds.get(name, Kind.USER), target=name, shape=(8,), dtype=torch.float32) for name in results
        )
        return StepGraph(graph=self.graph, inputs=inputs, outputs=outputs)


def _by_name(problem):
    buffers = [buffer.name for buffer in problem.buffers]
    return {op.name: ([buffers[b] for b in op.reads], [buffers[b] for b in op.writes]) for op in problem.operators}


def test_views_share_their_base_and_inputs_stay():
    b = _Builder(Kind.BATCH)
    x = b.call(aten.relu.default, b.inputs[0])
    rows = b.call(aten.view.default, x, [2, 4])
    column = b.call(aten.permute.default, rows, [1, 0])
    back = b.call(aten.permute.default, b.call(aten.exp.default, column), [1, 0])
    out = b.call(aten.view.default, back, [8])
    problem, nodes = problem_from_step(b.step(out=out))
    assert _by_name(problem) == {"relu_default": (["in0"], ["relu_default"]), "exp_default": (["relu_default"], ["exp_default"])}
    assert [node.name for node in nodes] == ["relu_default", "exp_default"]
    flags = {buffer.name: (buffer.size, buffer.is_input, buffer.is_output) for buffer in problem.buffers}
    assert flags == {"in0": (ROW, True, True), "relu_default": (ROW, False, False), "exp_default": (ROW, False, True)}


def test_several_results_are_several_buffers():
    b = _Builder(Kind.BATCH)
    both = b.call(aten.var_mean.correction, b.inputs[0])
    mean = b.call(operator.getitem, both, 1)
    out = b.call(aten.mul.Tensor, b.inputs[0], mean)
    problem, _ = problem_from_step(b.step(out=out))
    assert _by_name(problem) == {
        "var_mean_correction": (["in0"], ["var_mean_correction", "var_mean_correction.1"]),
        "mul_tensor": (["in0", "var_mean_correction.1"], ["mul_tensor"]),
    }


def test_a_replaced_input_is_written_in_place_after_its_readers():
    b = _Builder(Kind.PARAM, Kind.BATCH)
    new = b.call(aten.mul.Tensor, b.inputs[0], 0.9)
    late = b.call(aten.add.Tensor, b.inputs[0], b.inputs[1])  # reads the old value after the new one is there
    problem, _ = problem_from_step(b.step(in0=new, late=late))
    assert [op.name for op in problem.operators] == ["add_tensor", "mul_tensor"]
    assert _by_name(problem)["mul_tensor"] == (["in0"], ["in0"])
    assert [op.workspace for op in problem.operators] == [0, 0]


def test_a_reader_of_the_old_value_that_needs_the_new_one_forbids_writing_in_place():
    b = _Builder(Kind.PARAM)
    new = b.call(aten.mul.Tensor, b.inputs[0], 0.9)
    change = b.call(aten.sub.Tensor, new, b.inputs[0])
    problem, _ = problem_from_step(b.step(in0=new, change=change))
    assert _by_name(problem)["mul_tensor"] == (["in0"], ["mul_tensor"])
    assert problem.buffers[1].is_output


def test_two_updates_that_read_each_others_old_value_are_not_both_in_place():
    b = _Builder(Kind.PARAM, Kind.PARAM)
    first = b.call(aten.add.Tensor, b.inputs[0], b.inputs[1])
    second = b.call(aten.sub.Tensor, b.inputs[0], b.inputs[1])
    problem, _ = problem_from_step(b.step(in0=first, in1=second))
    in_place = [op.name for op in problem.operators if problem.buffers[op.writes[0]].is_input]
    assert len(in_place) == 1
    assert check_order(problem, range(2)) == 3 * ROW


def test_an_in_place_write_that_is_not_element_wise_needs_workspace():
    b = _Builder(Kind.PARAM)
    new = b.call(aten.cumsum.default, b.inputs[0], 0)
    problem, _ = problem_from_step(b.step(in0=new))
    assert problem.operators[0].workspace == ROW


@pytest.fixture(scope="module")
def training_step() -> StepGraph:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    batch = Batch(leaves=(torch.randn(4, 16), torch.randn(4, 8)), paths=("x", "y"))
    joint = capture_joint(model, lambda m, leaves: (nn.functional.mse_loss(m(leaves[0]), leaves[1]), []), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grads = [output.target for output in joint.outputs if output.kind is Kind.GRAD]
    return stitch(joint, capture_update(model, optimizer, grads))


def test_a_captured_training_step(training_step):
    problem, nodes = problem_from_step(training_step)
    assert len(nodes) == len(problem.operators)
    stored = sum(buffer.size for buffer in problem.buffers if buffer.is_input)
    assert stored == sum(4 * tensor.numel() for tensor in _parameters()) * 3 + 4 * 6 + (64 + 32) * 4 + _hyper_bytes(training_step)
    replaced = {training_step.inputs[i].name for i in training_step.donations().values()}
    written = {problem.buffers[b].name for op in problem.operators for b in op.writes if problem.buffers[b].is_input}
    assert written == replaced
    before = check_order(problem, range(len(problem.operators)))
    plan = solve_order(problem, seconds=2.0)
    assert check_order(problem, plan.order) == plan.peak <= before
    assert plan.peak > stored


def _parameters():
    return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)).parameters()


def _hyper_bytes(step):
    return 8 * len(step.input_indices(Kind.HYPER)) + 16 * len(step.input_indices(Kind.KEY))
