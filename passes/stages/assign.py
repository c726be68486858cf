"""Which forward call belongs to which chunk of the model.

The units of the forward part (see units.py) are dealt out in order, to every chunk at least one, so that the dearest
chunk is as cheap as possible; exactly, by dynamic programming over (chunks so far, units so far). Where a stage has several chunks, units are then
moved on between chunks as long as that makes the dearest stage cheaper. A chunk costs its work, what the cut before it sends, and a little where that cut divides a
numbered block. Pins and the places where parameters already lie restrict the choice.
"""

import fnmatch
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch.fx

from graphacc.errors import StrategyError
from graphacc.graph import StepGraph
from graphacc.passes.stages.units import FLOPS_PER_BYTE, Forward, Unit, cuts, forward_part, narrowest, units
from graphacc.strategy.spec import Strategy

_BROKEN_BLOCK = 0.01  # of a chunk's mean cost, for a cut inside of a block, which costs no time, but whole blocks are easier to follow;
_BROKEN_WIDE = 0.1  # for one that sends more than the cuts around the block do: among other values, what backward reads on both sides
_MOVED_PARAMETER = 1e3  # flops per byte of a parameter that lies on another stage


def forward_chunks(step: StepGraph, strategy: Strategy, homes: Mapping[str, int]) -> dict[torch.fx.Node, int]:
    """Forward call -> chunk, from 0 to ``pp * chunks - 1``, never smaller than that of a call whose result it reads.

    Args:
        homes: parameter -> the stage where earlier programs keep it.

    Raises:
        StrategyError: there are more chunks than units, or the pins match nothing, contradict the order of the program, or
            leave a chunk empty.
    """
    forward = forward_part(step)
    pins = _pinned_calls(forward, strategy)
    found = units(forward, _with_pins(forward, cuts(forward), pins))
    num_chunks = strategy.pp * strategy.chunks
    if len(found) < num_chunks:
        raise StrategyError(_too_few(found, strategy))
    allowed = [{pins[node] for node in unit.nodes if node in pins} for unit in found]
    edges = _balanced(found, allowed, strategy, homes)
    return {
        node: chunk
        for chunk, (first, last) in enumerate(itertools.pairwise(edges))
        for unit in found[first:last]
        for node in unit.nodes
    }


def _too_few(found: Sequence[Unit], strategy: Strategy) -> str:
    count, chunks = strategy.pp * strategy.chunks, f" x chunks={strategy.chunks}" if strategy.chunks > 1 else ""
    return (
        f"pp={strategy.pp}{chunks} cuts the model into {count} parts, but it has only {len(found)} blocks between narrow cuts "
        f"({', '.join(_label(unit) for unit in found)}): set pp x chunks to at most {len(found)}"
    )


def _label(unit: Unit) -> str:
    """A unit by the module that does most of its work."""
    paths = [path for node in unit.nodes if (path := node.meta.get("module_path"))]
    return max(dict.fromkeys(paths), key=paths.count, default="code outside of modules")


def _pinned_calls(forward: Forward, strategy: Strategy) -> dict[torch.fx.Node, int]:
    """Call -> the chunk that a pin gives it; of several pins that match, the last one counts."""
    found: dict[torch.fx.Node, int] = {}
    num_chunks = strategy.pp * strategy.chunks
    for pattern, chunk in strategy.stages:
        if not 0 <= chunk < num_chunks:
            raise StrategyError(
                f"stages pins {pattern!r} to {chunk}, but pp={strategy.pp} has the numbers 0 to {num_chunks - 1}: "
                "choose one of them"
            )
        matched = [node for node in forward.nodes if _matches(node.meta.get("module_path") or "", pattern)]
        if not matched:
            paths = dict.fromkeys(node.meta.get("module_path") or "" for node in forward.nodes)
            known = ", ".join(path for path in paths if path)
            raise StrategyError(
                f"stages pins {pattern!r}, which matches no module that the forward calls: choose out of {known}"
            )
        found |= dict.fromkeys(matched, chunk)
    return found


def _matches(path: str, pattern: str) -> bool:
    return bool(path) and (fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*"))


def _with_pins(forward: Forward, places: list[int], pins: Mapping[torch.fx.Node, int]) -> list[int]:
    """The places to cut, with one more wherever the pinned chunk changes and none lies."""
    result, last = set(places), None
    for i, node in enumerate(forward.nodes):
        if node not in pins:
            continue
        if last is not None and pins[node] != pins[forward.nodes[last]]:
            before = forward.nodes[last]
            if pins[node] < pins[before]:
                raise StrategyError(
                    f"stages pins module {before.meta['module_path']!r} to {pins[before]} and {node.meta['module_path']!r}, "
                    f"which runs after it, to {pins[node]}: chunks follow the order of the program, so give later modules the "
                    "same or larger numbers"
                )
            if not any(last < place <= i for place in result):
                result.add(narrowest(forward, last + 1, i))
        last = i
    return sorted(result)


def _balanced(found: Sequence[Unit], allowed: Sequence[set[int]], strategy: Strategy, homes: Mapping[str, int]) -> list[int]:
    """Edges of the chunks in the list of units, as pins and the places of parameters let them be."""
    num_chunks = strategy.pp * strategy.chunks
    plain = None if strategy.stages else dealt(found, num_chunks, strategy.pp)
    if plain is not None and not any(_moved(unit, chunk % strategy.pp, homes) for chunk, (first, last) in enumerate(itertools.pairwise(plain)) for unit in found[first:last]):
        return plain
    dear = 1.0 if strategy.chunks == 1 else 1e3  # of several chunks a stage has, it is not the dearest that is waited for

    def costs(unit: Unit, chunk: int) -> float:
        return unit.cost + dear * _moved(unit, chunk % strategy.pp, homes)

    edges = dealt(found, num_chunks, strategy.pp, costs, lambda place, chunk: not allowed[place] - {chunk})
    if edges is None:
        raise StrategyError(
            f"stages={dict(strategy.stages)} leaves no way to give each of the {num_chunks} chunks a part of the model, in "
            "order: pin fewer modules, or to other numbers"
        )
    return edges


def dealt(
    found: Sequence[Unit],
    num_chunks: int,
    num_stages: int,
    costs: Callable[[Unit, int], float] | None = None,
    may_lie: Callable[[int, int], bool] = lambda place, chunk: True,
) -> list[int] | None:
    """Edges of the chunks in a list of units: chunk c is units ``edges[c]`` to ``edges[c + 1] - 1``; None where there is no way.

    Args:
        num_stages: chunk c runs on stage c % num_stages.
        costs: of a unit in a chunk; None: the unit's everywhere, and every unit may be anywhere.
        may_lie: whether the unit at a place may be in a chunk.
    """
    count = len(found)
    entry = _entry_costs(found, num_chunks)
    own = [unit.cost for unit in found]
    most = math.inf if costs is not None else sum(own) / num_chunks + max(own) + 2 * max(entry)  # dealing out greedily never exceeds this
    best: list[dict[int, tuple[float, float, int]]] = [
        {0: (0.0, 0.0, 0)}
    ]  # units so far -> dearest chunk, sum of squares, last edge
    for chunk in range(num_chunks):
        row: dict[int, tuple[float, float, int]] = {}
        rest = num_chunks - chunk - 1
        for first, (dearest, squares, _) in best[-1].items():
            cost = entry[first]
            for last in range(first, count - rest):
                if not may_lie(last, chunk):
                    break
                cost += own[last] if costs is None else costs(found[last], chunk)
                if cost > most and last > first:
                    break
                option = (max(dearest, cost), squares + cost * cost, first)
                row[last + 1] = min(option, row.get(last + 1, option))
        best.append(row)
    if count not in best[-1]:
        return None
    edges = [count]
    for row in reversed(best[1:]):
        edges.append(row[edges[-1]][2])
    return edges[::-1] if costs is not None or num_chunks == num_stages else _evened(edges[::-1], own, entry, num_stages)


def _evened(edges: list[int], own: Sequence[float], entry: Sequence[float], num_stages: int) -> list[int]:
    """Edges by which stages of several chunks cost alike: a unit passes from one chunk to another, and each chunk between them passes one on, as long as that helps."""
    total = sum(own) or 1.0
    so_far = np.concatenate([[0.0], np.cumsum(own)]) / total
    dues = np.array([*entry, 0.0]) / total
    place = np.arange(len(edges))
    moves = np.array([[sign * ((place >= first) & (place <= last)) for sign in (1, -1)] for first in range(1, len(edges) - 1) for last in range(first, len(edges) - 1)])
    moves = moves.reshape(-1, len(edges))

    def ranked(options: np.ndarray) -> np.ndarray:
        """Dearest stage, dearest chunk, sum of squares [options, 3]; infinite where a chunk is empty."""
        cost = so_far[options[:, 1:]] - so_far[options[:, :-1]] + dues[options[:, :-1]]
        cost[(options[:, 1:] <= options[:, :-1]).any(1)] = np.inf
        return np.stack([cost.reshape(len(options), -1, num_stages).sum(1).max(1), cost.max(1), (cost * cost).sum(1)], 1)

    here = np.array(edges)
    while True:
        options = np.concatenate([here[None], here[None] + moves])
        found = ranked(options).round(9)
        first = int(np.lexsort(found.T[::-1])[0])
        if tuple(found[first]) >= tuple(found[0]):
            return here.tolist()
        here = options[first]


def _entry_costs(found: Sequence[Unit], num_chunks: int) -> list[float]:
    """What a chunk pays for the cut before it, by the unit that it starts with."""
    mean = sum(unit.cost for unit in found) / num_chunks
    inside = [False, *(bool(before.block) and before.block == unit.block for before, unit in itertools.pairwise(found))]
    edges = [i for i, is_inside in enumerate(inside) if not is_inside]
    costs, edge = [], 0  # the last one of these so far
    for i, (unit, is_inside) in enumerate(zip(found, inside)):
        edge += edge + 1 < len(edges) and edges[edge + 1] <= i
        around = [found[at].crossing_bytes for at in edges[edge : edge + 2] if at]
        share = 0.0 if not is_inside else _BROKEN_BLOCK if unit.crossing_bytes <= max(around, default=0.0) else _BROKEN_WIDE
        costs.append(FLOPS_PER_BYTE * unit.crossing_bytes + share * mean if i else 0.0)
    return costs


def _moved(unit: Unit, stage: int, homes: Mapping[str, int]) -> float:
    return sum(_MOVED_PARAMETER * size for name, size in unit.parameters.items() if homes.get(name, stage) != stage)
