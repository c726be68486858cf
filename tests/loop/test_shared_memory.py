"""Results that share memory, as a tensor and its views do: what the loop writes into one is seen in all."""

import itertools
from collections.abc import Callable

import pytest
import torch
from selection import each_once, with_matrix
from torch import Tensor, nn

import graphacc
from graphacc.errors import LoopError


class Results:
    """What a loop holds of one call."""

    def __init__(self, output: Tensor):
        self.output = output
        self.detached = output.detach()
        self.rows = output.detach()[4:]
        self.flat = self.detached.view(-1)
        self.repeated = output.detach()[:, :1].expand(-1, 3)
        self.windows = output.detach()[0].unfold(0, 2, 1)
        self.copied = self.detached.clone()

    def sums(self) -> list[float]:
        return [float(x.detach().double().sum()) for x in vars(self).values()]


def numpy_rows(results: Results) -> None:
    results.rows.numpy()[:] = 2.0


def output_itself(results: Results) -> None:
    with torch.no_grad():
        results.output.mul_(3)


WRITES: dict[str, Callable[[Results], object]] = {
    "mul": lambda results: results.detached.mul_(0.3),
    "rows": lambda results: results.rows.add_(1.0),
    "flat": lambda results: results.flat[3:5].zero_(),
    "element": lambda results: results.detached.__setitem__((0, 0), 5.0),
    "new view": lambda results: results.output.detach().mul_(3),
    "numpy": lambda results: results.detached.numpy().fill(0.3),
    "numpy rows": numpy_rows,
    "output": output_itself,
    "dlpack": lambda results: torch.from_dlpack(results.rows).fill_(7.0),
    "copy": lambda results: results.copied.mul_(2.0),
}


def train(write: str, when: str, *, reads: bool, compiled: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if compiled:
        model = graphacc.compile(model, strategy="dp=1", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        results = Results(model(torch.randn(16, 8, generator=torch.Generator().manual_seed(step))))
        loss = results.output.square().mean()
        if reads:
            found.append(results.rows.sum().item())
        optimizer.zero_grad()
        loss.backward()
        if when == "before the step":
            WRITES[write](results)
        optimizer.step()
        if when == "after the step":
            found += results.sums()[::-1] if reads else []
            WRITES[write](results)
        found += [*results.sums(), loss.item()]
    return found, [p.detach().clone() for p in model.parameters()]


FACTORS = list(WRITES), ("after the step", "before the step"), (True, False)
DIFFERENT = ("mul", "rows", "flat", "numpy", "dlpack")  # the others write in ways that these have, too
POSSIBLE = [case for case in itertools.product(*FACTORS) if case[:2] != ("output", "before the step")]  # backward has used it


@pytest.mark.parametrize(("write", "when", "reads"), with_matrix(POSSIBLE, [case for case in each_once(*FACTORS) if case in POSSIBLE and case[0] in DIFFERENT] + [("output", "after the step", True)]))
def test_a_write_is_seen_in_all_results_of_the_memory(write: str, when: str, reads: bool):
    expected, found = (train(write, when, reads=reads, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("give", [lambda y: y.detach().numpy(), lambda y: torch.from_dlpack(y.detach()).numpy()], ids=["numpy", "dlpack"])
def test_a_write_through_numpy_before_backward_is_refused(give: Callable):
    model = graphacc.compile(nn.Linear(4, 2), strategy="dp=1", devices=1)
    output = model(torch.ones(3, 4))
    array = give(output)
    assert array.shape == (3, 2)
    array += 1.0
    with pytest.raises(LoopError, match="written through NumPy or DLPack before backward"):
        (output * output.detach()).sum().backward()


def test_reading_through_numpy_before_backward_trains():
    model = graphacc.compile(nn.Linear(4, 2), strategy="dp=1", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    output = model(torch.ones(3, 4))
    array = output.detach().numpy()
    total = float(array.sum())
    output.sum().backward()
    optimizer.step()
    assert total == pytest.approx(output.sum().item(), rel=1e-6)
    torch.testing.assert_close(model.weight.detach(), before - 0.3)
    output.detach().zero_()
    assert not array.any()
