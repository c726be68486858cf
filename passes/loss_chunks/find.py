"""The region of a step in which logits exist: from the head's product through the loss and back to the gradients' products.

    hidden [T, D] --\
                     mm --> logits [T, V] --> the loss of every row [T] --> (outside: their sum, the mean)
    weight [D, V] --/          |                        |
                               v                        v
    (outside: labels [T]) --> gradient of the logits [T, V] <-- (outside: the seed, divided by the number of labels)
                               |                |
                               v                v
                gradient of hidden [T, D]   gradient of the weight [V, D]

A value is *wide* if it follows from the logits, element for element, and has at least half as many. The region is made of the product, all wide
values, of what is as large and is made of other things for them (the one-hot labels, a mask), the calls that read these, and whatever stands between
two of those calls; and of transpositions and constants. What leaves it is not wide, or the logits would be stored after all.
"""

import dataclasses
from collections.abc import Iterator

import torch
import torch.fx

from graphacc.costs.work import node_work
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.partition.report import source_line
from graphacc.passes.stages.values import VIEWS

AFTER = torch.ops.graphacc.after.default
_PRODUCTS = of_kind(OpKind.PRODUCT)
_MADE_AGAIN = of_kind(OpKind.PERMUTE)  # which XLA would store where they enter a loop
_MADE_OF_NOTHING = of_kind(OpKind.FILL, OpKind.COUNT)
_LARGER_THAN_HIDDEN = 2  # times: logits that are smaller are not what a step's memory goes into


class Refused(Exception):
    """Why a head is not computed in chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """The calls that a loop over chunks replaces."""

    product: torch.fx.Node  # that gives the logits
    hidden: torch.fx.Node  # the operand of it that has the tokens
    nodes: tuple[torch.fx.Node, ...]  # in the order of the graph
    made: frozenset[torch.fx.Node]  # those of them that follow from the logits; the others are copied, if something else reads them too
    wide: frozenset[torch.fx.Node]  # those of them that are as large as the logits, and must not be stored
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]

    @property
    def source(self) -> str:
        """The user's line of the product."""
        return source_of(self.product)

    def with_nodes(self, graph: torch.fx.Graph, more: set[torch.fx.Node]) -> "Region":
        """The same with further calls, which follow from its results."""
        return _bounded(graph, self.product, self.hidden, {*self.nodes, *more}, self.made | more, self.wide)


def find_heads(step: StepGraph) -> list[torch.fx.Node]:
    """The products of the forward whose results are logits, largest first: of a weight, read by no further layer, with a backward; and of these
    the ones whose results are at least half as large as the largest."""
    weights = weights_of(step)
    layers = _followed_by_layers(step)
    found = []
    for node in step.graph.nodes:
        if node.target in _PRODUCTS and node.meta["phase"] is Phase.FORWARD and node not in layers and hidden_of(node, weights) is not None and _has_backward(node):
            found.append(node)
    found.sort(key=_size, reverse=True)
    return [node for node in found if 2 * _size(node) >= _size(found[0])]


def hidden_of(product: torch.fx.Node, weights: set[torch.fx.Node]) -> torch.fx.Node | None:
    """The factor that is no weight, of a product with one."""
    places = facts(product.target).factors
    assert places is not None
    factors = [product.args[place] for place in places]
    others = [factor for factor in factors if isinstance(factor, torch.fx.Node) and factor not in weights]
    return others[0] if len(others) == 1 else None


def find_region(step: StepGraph, product: torch.fx.Node, hidden: torch.fx.Node) -> Region:
    """The region of one head.

    Raises:
        Refused: it cannot be computed in chunks, whatever their number.
    """
    if _size(product) <= _LARGER_THAN_HIDDEN * _size(hidden):
        raise Refused(f"its result {_shape(product)} is hardly larger than what it reads, {_shape(hidden)}, so that chunks would save nothing")
    region = _bounded(step.graph, product, hidden, *_grown(step.graph, product))
    for node in region.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional" or node.target is torch.ops.graphacc.permute_ranks.default:
            raise Refused(f"ranks communicate between the logits and their gradient ({node.target} of {_shape(node)}), as for a vocabulary that is split over them: such a head has no chunks yet")
        if node.meta["phase"] is Phase.UPDATE:
            raise Refused(f"the update reads its logits ({described(node)})")
    for node in region.outputs:
        if node in region.wide:
            raise Refused(_why_stored(node, region, set(step.results)))
    return region


def _why_stored(node: torch.fx.Node, region: Region, results: set[torch.fx.Node]) -> str:
    others = [user for user in node.users if user not in region.nodes and user.op == "call_function"]
    if node in results or any(user in results and user.target in VIEWS for user in others):
        return (
            "the loop still holds its logits when the step runs, so that all of them have to be there: keep the loss alone (`loss = model(...).loss`), "
            "or `del` what the model returned before the step"
        )
    return f"its logits are read elsewhere, by {', '.join(map(described, others))}"


def _grown(graph: torch.fx.Graph, product: torch.fx.Node) -> tuple[set[torch.fx.Node], frozenset[torch.fx.Node], frozenset[torch.fx.Node]]:
    """All calls of the region, those of them that follow from logits, and those that are as large."""
    least = _size(product)
    roots, inside = [product], set[torch.fx.Node]()
    wide, large, small = set[torch.fx.Node](), set[torch.fx.Node](), set[torch.fx.Node]()
    while True:
        before = len(roots), len(inside)
        wide |= _wide(roots, least)
        inside |= wide | {user for node in wide for user in readers(node)}
        inside |= _between(graph, inside)
        more, small, heads = _pulled(inside, least)
        large |= more
        inside |= more
        roots += sorted(heads)
        if before == (len(roots), len(inside)):
            break
    made, ends = set(roots), set()  # `ends`: gradients' products and views of them, whatever their size
    for node in graph.nodes:
        if node in inside and any(operand in made for operand in operands(node)):
            made.add(node)
            if node not in roots and (node.target in _PRODUCTS or (node.target in VIEWS and node.args[0] in ends)):
                ends.add(node)
            elif 2 * _size(node) >= least:
                wide.add(node)
    return inside | small, frozenset(made), frozenset(wide | large)


def _wide(roots: list[torch.fx.Node], least: int) -> set[torch.fx.Node]:
    found, left = set(roots), list(roots)
    while left:
        for user in readers(left.pop()):
            if user not in found and user.target not in _PRODUCTS and 2 * _size(user) >= least:
                found.add(user)
                left.append(user)
    return found


def _pulled(inside: set[torch.fx.Node], least: int) -> tuple[set[torch.fx.Node], set[torch.fx.Node], set[torch.fx.Node]]:
    """What the region makes for itself, as large as the logits and not; and products that large, which are further heads in it (a teacher's)."""
    large, small, heads, left = set(), set(), set(), list(inside)
    while left:
        node = left.pop()
        for operand in operands(node):
            if operand in inside or operand in large or operand in small or operand.op != "call_function":
                continue
            is_factor = node.target in _PRODUCTS or node in small  # of a product, seen through transpositions: a weight may have any size
            is_large = 2 * _size(operand) >= least and not is_factor and getattr(operand.target, "namespace", "") != "_c10d_functional"
            if is_large and operand.target in _PRODUCTS:
                heads.add(operand)
            elif is_large or operand.target in _MADE_AGAIN or (operand.target in _MADE_OF_NOTHING and not operand.all_input_nodes):
                (large if is_large else small).add(operand)
                left.append(operand)
    return large, small, heads


def _bounded(
    graph: torch.fx.Graph,
    product: torch.fx.Node,
    hidden: torch.fx.Node,
    inside: set[torch.fx.Node],
    made: frozenset[torch.fx.Node],
    wide: frozenset[torch.fx.Node],
) -> Region:
    nodes = tuple(node for node in graph.nodes if node in inside)
    inputs = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    outputs = tuple(node for node in nodes if node in made and any(user not in inside for user in node.users if not waits_alone(user, node)))
    return Region(product=product, hidden=hidden, nodes=nodes, made=made, wide=wide, inputs=tuple(inputs), outputs=outputs)


def waits_alone(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether `user` is only ordered behind a value, and reads nothing of it."""
    return user.target is AFTER and user.args[0] is not node


def operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a call reads; not what it waits for."""
    return node.all_input_nodes[:1] if node.target is AFTER else node.all_input_nodes


def readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The calls that read a value."""
    return (user for user in node.users if user.op == "call_function" and not waits_alone(user, node))


def _between(graph: torch.fx.Graph, inside: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The calls that follow from some of the region, and from which others of it follow."""
    behind, before = set[torch.fx.Node](), set[torch.fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and any(operand in inside or operand in behind for operand in operands(node)):
            behind.add(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and any(user in inside or user in before for user in readers(node)):
            before.add(node)
    return behind & before


def weights_of(step: StepGraph) -> set[torch.fx.Node]:
    """Parameters, and views and casts of them."""
    found = {node for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    for node in step.graph.nodes:
        if node.target in VIEWS and node.args[0] in found:
            found.add(node)
    return found


def _followed_by_layers(step: StepGraph) -> set[torch.fx.Node]:
    """The calls of the forward from which another call follows that costs operations: a product, a convolution, an attention."""
    found: set[torch.fx.Node] = set()
    costly = {node for node in step.graph.nodes if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD and node_work(node).flops}
    for node in reversed(list(step.graph.nodes)):
        if node.op == "call_function" and any((user in costly or user in found) and user.meta["phase"] is Phase.FORWARD for user in readers(node)):
            found.add(node)
    return found


def _has_backward(node: torch.fx.Node) -> bool:
    """Whether a product of backward follows from a call."""
    seen, left = {node}, [node]
    while left:
        for user in readers(left.pop()):
            if user.meta["phase"] is Phase.BACKWARD and user.target in _PRODUCTS:
                return True
            if user not in seen and user.meta["phase"] is not Phase.UPDATE:
                seen.add(user)
                left.append(user)
    return False


def _size(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return max((x.numel() for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, torch.Tensor)), default=0)


def _shape(node: torch.fx.Node) -> list[int]:
    value = node.meta["val"]
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def source_of(node: torch.fx.Node) -> str:
    """The user's line of a call; its module where that is unknown."""
    return source_line(node.meta.get("stack_trace")) or node.meta.get("module_path") or node.name


def described(node: torch.fx.Node) -> str:
    """A call for the user."""
    where = source_line(node.meta.get("stack_trace"))
    return f"{node.target}{f' at {where}' if where else ''}"
