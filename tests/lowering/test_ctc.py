"""The recursion of the CTC loss: PyTorch's loss and gradient, as one loop."""

import pytest
import torch
import torch.nn.functional as F
from helpers_lowering import run_lowered, step_graph

from graphacc.capture.functions import ctc_loss

OPERATORS = {"graphacc.ctc_forward.default", "graphacc.ctc_backward.default"}


def example(frames: int, width: int):
    generator = torch.Generator().manual_seed(frames)
    logits = torch.randn(frames, 4, 9, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, 9, (4, width), generator=generator)
    targets[0, 1:2] = targets[0, 0:1]  # a label that is said twice needs a blank between
    input_lengths = torch.tensor([frames, max(frames - 2, 1), frames, 1])
    target_lengths = torch.tensor([width, min(width, 2), 0, min(width, 3)])  # the last has no path where the width is above 1
    return logits, targets, input_lengths, target_lengths


def loss_and_gradient(function):
    def run(logits, *rest):
        logits = logits.detach().requires_grad_()
        loss = function(logits.log_softmax(2), *rest, zero_infinity=True)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    return run


@pytest.mark.parametrize(("frames", "width"), [(30, 7), (12, 3), (1, 1), (5, 0)])
@pytest.mark.default_cases("30-7", "5-0")
def test_the_loss_and_its_gradient(frames, width):
    inputs = example(frames, width)
    expected = loss_and_gradient(F.ctc_loss)(*inputs)
    for x, y in zip(loss_and_gradient(ctc_loss)(*inputs), expected):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    step = step_graph(loss_and_gradient(ctc_loss), *inputs)
    for x, y in zip(run_lowered(step, *inputs, jit=True), expected):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    found = {str(node.target) for node in step.graph.nodes if "ctc" in str(node.target)}
    assert found == (OPERATORS if frames > 1 else set())


def test_a_frame_costs_no_nodes():
    assert len({len(step_graph(loss_and_gradient(ctc_loss), *example(frames, 3)).graph.nodes) for frames in (8, 64)}) == 1



def test_the_gradient_is_torchs_where_no_log_softmax_comes_before():
    logits, *rest = example(9, 3)
    for reduction in ("mean", "sum"):
        given = [logits.detach().requires_grad_() for _ in range(2)]
        for x, function in zip(given, (F.ctc_loss, ctc_loss)):
            function(x - 3, *rest, reduction=reduction, zero_infinity=True).backward()
        torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-12, atol=1e-12)
