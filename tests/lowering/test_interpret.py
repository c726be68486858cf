"""The registry and the interpreter: missing operators, wrong rules, freed values, custom operators."""

import jax
import numpy as np
import pytest
import torch
from helpers_lowering import check_lowering, run_lowered, step_graph, to_array

import graphacc.lowering
import graphacc.ops  # registers the operators that rules name
from graphacc._compat.jax_ import x64
from graphacc.errors import LoweringError
from graphacc.lowering import interpret, registry

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def library():
    """A namespace of operators for one test; rules that the test adds are taken out again."""
    before = dict(registry._rules)
    with torch.library._scoped_library("lowering_test", "FRAGMENT") as lib:
        yield lib
    registry._rules.clear()
    registry._rules.update(before)


def _define(lib, name, function, schema="(Tensor x) -> Tensor"):
    lib.define(f"{name}{schema}")
    lib.impl(name, function, "CompositeExplicitAutograd")
    lib.impl(name, function, "Meta")
    return getattr(torch.ops.lowering_test, name).default


def test_missing_operators_are_listed_all_at_once_with_count_and_source_line(library):
    one = _define(library, "one", torch.sin)
    two = _define(library, "two", torch.cos)
    step = step_graph(lambda x: one(x) + two(one(x)), X)
    calls = [node for node in step.graph.nodes if node.target is one]
    calls[0].meta["stack_trace"] = (
        '  File "train.py", line 3, in <module>\n    loss = model(x)\n  File "model.py", line 12, in forward\n    y = one(x)\n'
    )
    found = graphacc.lowering.missing(step)
    assert [(item.op, item.count) for item in found] == [("lowering_test.one.default", 2), ("lowering_test.two.default", 1)]
    assert found[0].source == 'File "model.py", line 12, in forward: y = one(x)'
    with pytest.raises(LoweringError) as error:
        graphacc.lowering.lower(step)
    message = str(error.value)
    for part in (
        "2 operators",
        "lowering_test.one.default (2×)",
        "model.py",
        "line 12",
        "lowering_test.two.default (1×)",
        "graphacc.lowering.register",
    ):
        assert part in message


def test_an_operator_that_cannot_have_a_rule_says_why():
    with pytest.raises(LoweringError, match=r"(?s)aten\.rand_like\.default.*graphacc::random_uniform"):
        graphacc.lowering.check(step_graph(torch.rand_like, X))


def test_check_passes_where_nothing_is_missing():
    step = step_graph(lambda x: x.sin().sum(), X)
    graphacc.lowering.check(step)
    assert graphacc.lowering.missing(step) == []


def test_a_user_rule_is_used(library):
    scale = _define(library, "scale", lambda x, factor: x * factor, "(Tensor x, float factor) -> Tensor")
    graphacc.lowering.register(scale)(lambda ctx, x, factor: (x * factor).astype(ctx.dtype))
    check_lowering(lambda x: scale(x, 2.5), X)


def test_a_composite_custom_operator_needs_no_rule(library):
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x.sin() * 2, "CompositeImplicitAutograd")
    check_lowering(torch.ops.lowering_test.composite.default, X)


def test_a_second_rule_is_an_error():
    with pytest.raises(ValueError, match="aten.add.Tensor already has a lowering rule, of graphacc.lowering.rules.pointwise.add"):
        graphacc.lowering.register(torch.ops.aten.add.Tensor)(lambda ctx, a, b: a)


def test_register_wants_an_overload():
    with pytest.raises(TypeError, match="operator overloads such as"):
        graphacc.lowering.register(torch.ops.aten.add)


@pytest.mark.parametrize(
    ("rule", "text"),
    [(lambda ctx, x: x[:1], r"\[2, 3\], got torch.float32\[1, 3\]"), (lambda ctx, x: x > 0, r"got torch.bool\[2, 3\]")],
)
def test_a_rule_with_a_wrong_shape_or_dtype_is_named(library, rule, text):
    wrong = _define(library, "wrong", torch.sin)
    graphacc.lowering.register(wrong)(rule)
    step = step_graph(wrong, X)
    next(node for node in step.graph.nodes if node.target is wrong).meta["stack_trace"] = (
        '  File "model.py", line 7, in forward\n    wrong(x)\n'
    )
    with pytest.raises(LoweringError, match=rf"(?s)lowering_test.wrong.default.*model.py.*line 7.*{text}"):
        run_lowered(step, X)


def test_a_rule_that_fails_is_named(library):
    bad = _define(library, "bad", torch.sin)

    @graphacc.lowering.register(bad)
    def rule(ctx, x):
        raise KeyError("lost")

    with pytest.raises(LoweringError, match="lowering_test.bad.default.*KeyError"):
        run_lowered(step_graph(bad, X), X)


def test_a_wrong_argument_is_named():
    with x64():
        lowered = graphacc.lowering.lower(step_graph(torch.sin, X))
        with pytest.raises(LoweringError, match=r"input '\w+'.*\[2, 3\], got torch.float32\[3, 2\]"):
            lowered(to_array(X.T))
        with pytest.raises(LoweringError, match="takes 1 inputs"):
            lowered()


def test_every_value_is_freed_after_its_last_use():
    step = step_graph(lambda x: (x.sin() + x).cos(), X)
    freed = interpret._last_uses(step.graph, {})
    names = {node.name: sorted(used.name for used in dead) for node, dead in freed.items()}
    placeholder = step.inputs[0].name
    assert names["add"] == sorted(["sin", placeholder]) and names["cos"] == ["add"]


def test_the_hlo_names_the_module():
    step = step_graph(torch.sin, X)
    for node in step.graph.nodes:
        node.meta["module_path"] = "model.layers.0.attention"
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(to_array(X)).compile().as_text()
    assert "model.layers.0.attention" in text


def test_every_rule_names_an_operator_that_exists():
    absent = {
        name
        for name in registry.registered() | set(registry.refused())
        if not name.startswith("transformers.") and _resolve(name) is None
    }
    assert absent == set()


def test_decomposed_operators_have_a_decomposition():
    from graphacc._compat.torch_ import decomposition
    from graphacc.lowering.rules.decomposed import DECOMPOSED

    assert [name for name in DECOMPOSED if decomposition(_resolve(name)) is None] == []


def _resolve(name):
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator, None), overload, None)


def test_results_keep_64_bits():
    x = torch.tensor([2**40 + 1])
    (got,) = run_lowered(step_graph(lambda x: x * 3, x), x)
    assert got.dtype == torch.int64 and got.item() == 3 * (2**40 + 1)
    assert np.asarray(got).dtype == np.int64
