"""The steps of recurrent layers as one operator: PyTorch's states and gradients, as one loop."""

import pytest
import torch
from helpers_lowering import run_lowered, step_graph
from torch import nn

from graphacc.capture.recurrent import Layers
from graphacc.ops.recurrence import recurrence

MODES = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


def layers(mode: str, biased: bool, **options) -> nn.RNNBase:
    torch.manual_seed(1)
    options |= {"nonlinearity": mode} if mode in ("tanh", "relu") else {}
    return MODES[mode](3, 4, bias=biased, **options).double()


def states(mode: str, count: int, batch: int) -> tuple:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(count, batch, 4, generator=generator, dtype=torch.float64) for _ in range(2 if mode == "lstm" else 1))


def with_gradients(function, count: int):
    """The results of `function`, and the gradients of its first `count` arguments of a sum that tells all results apart."""

    def run(*given):
        leaves = [x.detach().requires_grad_() for x in given[:count]]
        results = function(*leaves, *given[count:])
        total = sum((result * (i + 1)).sin().sum() for i, result in enumerate(results))
        return *(x.detach() for x in results), *torch.autograd.grad(total, leaves)

    return run


def flat(found) -> list:
    out, last = found
    return [out, *last] if isinstance(last, tuple) else [out, last]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "deep"])
@pytest.mark.default_cases(*(f"one-{mode}-{number % 2 == 0}" for number, mode in enumerate(MODES)), *(f"deep-{mode}-{number % 2 == 1}" for number, mode in enumerate(MODES)))
def test_layers_are_torchs(mode, biased, options):
    module = layers(mode, biased, **options)
    given = torch.randn(5, 2, 3, dtype=torch.float64), *states(mode, 4 if options else 1, 2)
    parameters = list(module.parameters())
    torchs = {"lstm": torch.lstm, "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[mode]

    def expected(x, *rest):
        first, weights = rest[: len(given) - 1], rest[len(given) - 1 :]
        return torchs(x, first if mode == "lstm" else first[0], list(weights), biased, module.num_layers, 0.0, False, module.bidirectional, False)

    def ours(x, *rest):
        first, weights = rest[: len(given) - 1], rest[len(given) - 1 :]
        found = Layers(weights, biased, module.num_layers, 0.0, False, module.bidirectional).run(mode, x, first[0], first[1] if mode == "lstm" else None, None)
        return [each for each in found if each is not None]

    inputs, count = (*given, *(p.detach() for p in parameters)), len(given) + len(parameters)
    wanted = with_gradients(expected, count)(*inputs)
    for got in (with_gradients(ours, count)(*inputs), run_lowered(step_graph(with_gradients(ours, count), *inputs), *inputs, jit=True)):
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_that_has_ended_keeps_its_state(mode):
    """Its states are those of a sequence of its own length, and gradients of later ones go through to them."""
    module, lengths = layers(mode, True), [5, 3, 1]
    x, (first, *cell) = torch.randn(5, 3, 3, dtype=torch.float64), states(mode, 1, 3)
    active = torch.arange(5).unsqueeze(1) < torch.tensor(lengths)
    of_input, of_state, bias, of_bias = (p.detach() for p in module.parameters())

    def ours(x, hidden, of_input, of_state, bias, of_bias, active, *cell):
        return recurrence(mode, nn.functional.linear(x, of_input, bias), hidden, cell[0] if cell else None, of_state, of_bias, active)[:1]

    def expected(x, hidden, of_input, of_state, bias, of_bias, active, *cell):
        columns = []
        for sample, length in enumerate(lengths):
            here = slice(sample, sample + 1)
            state = (hidden[None, here], cell[0][None, here]) if cell else hidden[None, here]
            weights = dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), (of_input, of_state, bias, of_bias)))
            out = torch.func.functional_call(module, weights, (x[:length, here], state))[0]
            columns.append(torch.cat((out, out[-1:].expand(5 - length, -1, -1))))
        return [torch.cat(columns, 1)]

    inputs = x, first[0], of_input, of_state, bias, of_bias, active, *(each[0] for each in cell)
    wanted = with_gradients(expected, 6)(*inputs)
    for got in (with_gradients(ours, 6)(*inputs), run_lowered(step_graph(with_gradients(ours, 6), *inputs), *inputs, jit=True)):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", ["lstm", "gru", "relu"])
def test_bf16_products_and_fp32_states(mode):
    """As under autocast: what is kept for the backward has the dtype of the products."""
    gates, hidden = torch.randn(6, 2, {"lstm": 16, "gru": 12, "relu": 4}[mode]), torch.randn(2, 4)
    weight, cell = torch.randn(gates.shape[2], 4) / 2, torch.randn(2, 4) if mode == "lstm" else None
    half = [gates.bfloat16(), hidden if mode != "relu" else hidden.bfloat16(), weight.bfloat16(), *([] if cell is None else [cell])]

    def ours(gates, hidden, weight, *cell):
        return recurrence(mode, gates, hidden, cell[0] if cell else None, weight, None, None)[:2]

    exact = with_gradients(ours, len(half))(*(x.float() for x in half))
    got = run_lowered(step_graph(with_gradients(ours, len(half)), *half), *half, jit=True)
    assert [x.dtype for x in got] == [x.dtype for x in with_gradients(ours, len(half))(*half)]
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=0.05, atol=0.05)


def test_a_step_costs_no_nodes():
    def run(gates, weight):
        return recurrence("gru", gates, gates[0, :, :4], None, weight, None, None)[:1]

    shapes = [(torch.randn(steps, 2, 12), torch.randn(12, 4)) for steps in (2, 50)]
    assert len({len(step_graph(with_gradients(run, 2), *inputs).graph.nodes) for inputs in shapes}) == 1
