"""A raw trace copied into a graph that a StepGraph may hold: named placeholders, no aliases, no attributes, one kind of meta."""

import typing
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from graphacc.ops.facts import OpKind, of_kind
from graphacc._compat.torch_ import fake_mode, new_graph
from graphacc.errors import CaptureError
from graphacc.graph import CHECKPOINT, Phase

aten = torch.ops.aten

_SAME_VALUE = of_kind(OpKind.SAME) - {aten.clone.default}
_SAME_IF_UNCHANGED = of_kind(OpKind.CAST, OpKind.RESHAPE, OpKind.PERMUTE) | {aten.clone.default, aten.expand.default, aten.slice.Tensor}
_PLACEMENT = ("device", "pin_memory", "layout", "non_blocking")


def rebuilt(
    module: fx.GraphModule, names: Sequence[str], phase: Phase, replaced: Mapping[int, str]
) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Copy `module`'s graph without what carries no meaning.

    Aliases and conversions that change nothing disappear, tensors that the trace lifted become ``aten.full`` nodes or
    further placeholders, device arguments are dropped, and dead code is removed.

    Args:
        names: a name for every placeholder.
        phase: the phase of placeholders and of nodes that none was noted for.
        replaced: id -> name of tensors that the traced code replaced, and may not have read.

    Returns:
        The graph, and the value of every placeholder beyond `names`, under the placeholder's name.

    Raises:
        CaptureError: the trace lifted a tensor that requires a gradient, or one that it replaced; or an operator gives no result.
    """
    forward_of = _notes_by_sequence(module.graph)
    _drop_ranges(module)
    _check_effects(module, phase, forward_of)
    module.graph.eliminate_dead_code()  # also what has no value, such as a gradient that was not asked for
    graph = new_graph()
    copies: dict[fx.Node, fx.Node] = {}
    old_placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert len(old_placeholders) == len(names), f"{len(old_placeholders)} placeholders for {len(names)} inputs"
    for node, name in zip(old_placeholders, names):
        copies[node] = _placeholder(graph, name, node.meta["val"], phase)
    _check_lifted(module, replaced)
    for node in module.graph.nodes:
        _leave_out_empty(node)
    module.graph.eliminate_dead_code()  # the empty tensors
    constants = _copy_constants(module, graph, copies, phase, forward_of)
    for node in module.graph.nodes:
        if node.op == "call_function":
            copies[node] = copies[node.args[0]] if _is_identity(node) else _copy(graph, node, copies, phase, forward_of)
    results = module.graph.output_node().args[0]
    graph.output(tuple(copies[node] for node in results))
    return graph, constants


def _placeholder(graph: fx.Graph, name: str, value: Tensor, phase: Phase) -> fx.Node:
    node = graph.placeholder(name)
    node.meta.update({"val": value, "phase": phase, "module_path": "", "stack_trace": ""})
    return node


def _copy_constants(
    module: fx.GraphModule, graph: fx.Graph, copies: dict[fx.Node, fx.Node], phase: Phase, forward_of: dict[int, dict]
) -> dict[str, Tensor]:
    """Copy get_attr nodes, one for each distinct tensor; returns the values of those that became placeholders."""
    lifted = [node for node in module.graph.nodes if node.op == "get_attr"]
    values = {node: getattr(module, node.target) for node in lifted}
    constants: dict[str, Tensor] = {}
    made: dict[int, fx.Node] = {}
    for node in sorted(lifted, key=lambda node: _is_uniform(values[node])):
        value = values[node]
        if id(value) not in made:
            fake = _fake_like(value)
            if _is_uniform(value):
                made[id(value)] = graph.call_function(
                    aten.full.default, (list(value.shape), value.flatten()[0].item()), {"dtype": value.dtype}
                )
                made[id(value)].meta = {"val": fake, **_note(node, phase, forward_of)}
            else:
                made[id(value)] = _placeholder(graph, f"constant_{len(constants)}", fake, phase)
                constants[made[id(value)].name] = value.detach().cpu()
        copies[node] = made[id(value)]
    return constants


def _fake_like(value: Tensor) -> Tensor:
    with fake_mode():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _is_uniform(value: Tensor) -> bool:
    """Whether all elements are the same number (False for NaN, complex and empty tensors)."""
    if value.numel() == 0 or value.is_complex():
        return False
    return bool((value == value.flatten()[0]).all())


def _drop_ranges(module: fx.GraphModule) -> None:
    """Ranges of torch.profiler, which newer versions of torch trace, mean nothing in a program."""
    for node in reversed(list(module.graph.nodes)):
        if isinstance(node.target, OpOverload) and node.target.namespace == "profiler" and not node.users:
            module.graph.erase_node(node)


def _check_effects(module: fx.GraphModule, phase: Phase, forward_of: dict[int, dict]) -> None:
    """No operator may be called for what it does alone; torch 2.13 keeps assertions on tensors alive, 2.9 drops them as dead code."""
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and not node.target._schema.returns:
            raise called_for_effect(node.target, _note(node, phase, forward_of)["stack_trace"])


def called_for_effect(target: OpOverload, where: str) -> CaptureError:
    """The refusal of an operator without results."""
    remedy = "torch.linalg.solve_ex, inv_ex and cholesky_ex, which do not check," if target is torch.ops.aten._linalg_check_errors.default else "checks of the batch's values by `if` and `raise`, or outside of the model,"
    return CaptureError(
        f"{target} gives no result and is called for what it does, such as a check of values on the device, which a compiled program cannot do.\n"
        f"{where.strip() or 'code of a library'}\nPyTorch runs this model; one with {remedy} is compiled"
    )


def _check_lifted(module: fx.GraphModule, replaced: Mapping[int, str]) -> None:
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        where = (next(iter(node.users)).meta.get("custom") or {}).get("stack_trace", "")
        if id(value) in replaced:
            raise CaptureError(
                f"the forward reads and replaces the tensor {replaced[id(value)]!r}, which is no buffer: a captured step "
                f"would start from "
                f"the same value every time. Register it with register_buffer.\n{where}"
            )
        if value.requires_grad:
            raise CaptureError(
                f"the model uses a tensor of shape {list(value.shape)} that requires a gradient but is no registered "
                f"parameter: a captured "
                f"step trains registered parameters only. Make it an nn.Parameter attribute of a submodule.\n{where}"
            )


def _leave_out_empty(node: fx.Node) -> None:
    """``cat`` takes an empty tensor of one dim beside tensors of any shape (caches start with one): it adds nothing."""
    if node.target is not aten.cat.default:
        return
    result, operands = node.meta["val"], typing.cast("list[fx.Node]", node.args[0])
    kept = [operand for operand in operands if tuple(operand.meta["val"].shape) != (0,)]
    if not kept or len(kept) == len(operands) or any(operand.meta["val"].dtype != result.dtype for operand in kept):
        return
    if len(kept) == 1:
        node.target, node.args, node.kwargs = aten.clone.default, (kept[0],), {"memory_format": torch.contiguous_format}
    else:
        node.args = (kept, *node.args[1:])


def _is_identity(node: fx.Node) -> bool:
    """Whether a node gives its first argument back: same values, and the same strides, which a view may need."""
    if node.target in _SAME_VALUE:
        return True
    if node.target not in _SAME_IF_UNCHANGED or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if before is None or (before.shape, before.dtype, before.stride()) != (after.shape, after.dtype, after.stride()):
        return False
    return node.target is not aten.permute.default or list(node.args[1]) == sorted(d % len(node.args[1]) for d in node.args[1])


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], phase: Phase, forward_of: dict[int, dict]) -> fx.Node:
    args = fx.map_arg(node.args, copies.__getitem__)
    kwargs = {key: value for key, value in fx.map_arg(node.kwargs, copies.__getitem__).items() if key not in _PLACEMENT}
    copy = graph.call_function(node.target, args, kwargs)
    copy.meta = {"val": node.meta["val"], **_note(node, phase, forward_of)}
    return copy


def _notes_by_sequence(graph: fx.Graph) -> dict[int, dict]:
    """Number of an autograd node -> what was noted at the forward operator that made it."""
    notes: dict[int, dict] = {}
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if custom.get("phase") is Phase.FORWARD and "seq_nr" in node.meta:
            notes.setdefault(node.meta["seq_nr"], custom)
    return notes


def _note(node: fx.Node, phase: Phase, forward_of: dict[int, dict]) -> dict:
    custom = node.meta.get("custom") or {}
    source = forward_of.get(custom["sequence"], {}) if "sequence" in custom else custom
    return {
        "phase": custom.get("phase", phase),
        "module_path": source.get("module_path", ""),
        "stack_trace": source.get("stack_trace", ""),
        **({CHECKPOINT: custom[CHECKPOINT]} if CHECKPOINT in custom else {}),
    }
