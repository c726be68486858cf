"""Lists and dicts that the loop gives to a call of the model, whose code may change them: ``cache["h"] = h``, ``losses.append(loss)``, ``batch.pop("labels")``.

A recorded call gets containers of its own. What its code leaves in them is a result of the call, and goes into those of the loop.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any

from graphacc.loop.promise import NotRecorded

_FILLED = (list, dict, collections.deque)


class Containers:
    """The containers in a tree of arguments, and what each holds."""

    def __init__(self, arguments: object):
        self._held = [(container, list(_children(container))) for container in _inside(arguments)]

    def are_changed(self) -> bool:
        """Whether code has changed one.

        Raises:
            NotRecorded: a container was put into the place of another, so that nobody can tell which the loop is to find there.
        """
        changed = False
        for container, before in self._held:
            now = list(_children(container))
            if len(now) != len(before) or any(name != other or x is not y for (name, x), (other, y) in zip(now, before)):
                changed = True
                known = dict(before)
                for name, value in now:
                    if isinstance(value, _FILLED) and value is not known.get(name) and isinstance(known.get(name), _FILLED):
                        raise NotRecorded(f"its code puts another {type(value).__name__} into an argument, in the place of one")
        return changed


def check_apart(arguments: object, is_held: Callable[[object], bool]) -> None:
    """Before a call that changes containers among its arguments.

    Args:
        is_held: whether its code can find a container elsewhere, too.

    Raises:
        NotRecorded: what it leaves in one of them is seen in another place while it runs, which containers of its own would not show.
    """
    found: set[int] = set()
    for container in _inside(arguments):
        if id(container) in found or is_held(container):
            raise NotRecorded(f"its code changes a {type(container).__name__} that it is given, and has it in two places")
        found.add(id(container))


def refill(given: object, after: object) -> None:
    """Let the containers of a tree hold what those at the same places of another hold."""
    if isinstance(given, tuple):
        for child, other in zip(given, after):  # type: ignore[call-overload]
            refill(child, other)
    elif isinstance(given, _FILLED):
        known = dict(_children(given))
        content = []
        for name, value in _children(after):
            held: Any = known.get(name)
            if isinstance(held, (*_FILLED, tuple)) and isinstance(value, type(held)):
                refill(held, value)
                value = held
            content.append((name, value))
        if [(name, id(value)) for name, value in content] == [(name, id(value)) for name, value in known.items()]:
            return
        given.clear()
        given.update(content) if isinstance(given, dict) else given.extend(value for _, value in content)


def _children(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _inside(tree: object) -> Iterator[Any]:
    if isinstance(tree, _FILLED):
        yield tree
    if isinstance(tree, (tuple, *_FILLED)):
        for _, child in _children(tree):
            yield from _inside(child)
