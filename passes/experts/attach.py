"""The pass: routing to experts by a sort becomes `sort_rows`, `unsort_rows` and `expert_offsets`, and its products `grouped_mm`.

A captured mixture of experts sorts the ids of its experts, looks tokens up in the order of that sort, multiplies the rows of every
expert, and puts them back. Written so, every step reads positions in the whole batch, and a partition can only gather. Written as
operators on rows and ids, a device can route its own rows (`passes.partition.routing`). The graph is read, not the names of modules; a
sort whose order is used in any other way stays as it is.

Results are the same but for the order of a sum: the gradients of a token's copies are added in the order of its experts' places, not of
their ids.
"""

import dataclasses

from torch import fx

from graphacc.graph import StepGraph
from graphacc.passes.cleanup import remove_dead_code
from graphacc.passes.edit import Editor
from graphacc.passes.experts.find import Routing, find_routing, rewrite_products
from graphacc.passes.runner import Log, Pass


@dataclasses.dataclass(frozen=True)
class Routed:
    """One sort or product of the graph, and what became of it."""

    module_path: str
    what: str
    attached: bool


@dataclasses.dataclass(frozen=True)
class ExpertReport:
    """Every routing of the graph, in its order, then products that were left."""

    found: tuple[Routed, ...]

    @property
    def missed(self) -> tuple[Routed, ...]:
        return tuple(item for item in self.found if not item.attached)

    def __str__(self) -> str:
        return "\n".join(f"  {'attached' if item.attached else 'left'}: {item.module_path or '(no module)'}: {item.what}" for item in self.found)


def attach_experts(step: StepGraph, log: Log) -> StepGraph:
    """Replace every routing whose order is used in known ways."""
    found = []
    for node in list(step.graph.nodes):
        if (routing := find_routing(node)) is not None:
            if not routing.unknown:
                _write(step, routing)
                log.rewrote()
            what = routing.unknown or f"{routing.ids.meta['val'].shape[0]} rows to {routing.num_experts} experts"
            found.append(Routed(node.meta.get("module_path", ""), what, not routing.unknown))
    for node in rewrite_products(step, log):
        found.append(Routed(node.meta.get("module_path", ""), f"{node.name} ({node.target}) has offsets that are not known", False))
    log.details = ExpertReport(tuple(found)) if found else None
    return remove_dead_code(step, Log())


ATTACH_EXPERTS = Pass(name="attach-experts", exact=False, optional=True, run=attach_experts)


def _write(step: StepGraph, routing: Routing) -> None:
    for old, make in routing.replace:
        new: fx.Node = make(Editor(step.graph, old))
        assert new.meta["val"].shape == old.meta["val"].shape and new.meta["val"].dtype == old.meta["val"].dtype, f"{old.name}: {new.meta}"
        old.replace_all_uses_with(new)
