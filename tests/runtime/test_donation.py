"""Every new value takes the memory of the one that it replaces."""

import re

import pytest
import zoo
from training import batches_of, compiled, train


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
def test_outputs_are_written_over_the_inputs_that_they_replace(strategy):
    """By shape alone JAX would mix up parameters and moments of one shape, and XLA then copies all of them aside and back."""
    model = compiled(zoo.MODELS["tied_mlp"]()[0], strategy)
    train(model, batches_of("tied_mlp", steps=1))
    (entry,) = model.programs
    header = entry.program.hlo_text().splitlines()[0]
    aliases = {int(input): int(output) for output, input in re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)}
    donations = entry.graph.donations()
    assert len(donations) == 3 * 3 + 1 and set(aliases) == set(donations.values())  # three parameters with two moments, and one count for all
    behind = len(entry.graph.inputs)
    flattened = sorted(range(len(entry.graph.outputs)), key=lambda output: donations.get(output, behind + output))
    assert {input: flattened[output] for input, output in aliases.items()} == {input: output for output, input in donations.items()}
