"""Whether the processes of a run do the same: all of them must take part in every collective, in the same order.

Every process logs its actions that take part of all: a program that it compiles or runs, a sharded value that it reads. Two checks stand
on the log, neither of which slows a step down:

- Before a program is compiled, the processes exchange a digest of it in JAX's key-value store, and where two differ the
  whole description, so that the error can say which process differs and in what (`agree`). Before it is run, they wait until
  all have it (`meet`).
- The watchdog's beats carry the end of the log. Two logs with different actions in the same place (`conflict`), or a process that
  goes on after another has ended, mean a collective that never completes.
"""

import collections
import dataclasses
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from graphacc._compat.jax_ import DistributedService, KeyNotThere, read_key
from graphacc.errors import DistributedError

log = logging.getLogger("graphacc")

SHOWN_ACTIONS = 32
"""Of a log that a beat carries: more than a process can start before it waits for the first."""

COMPILES = "compiles "
"""The beginning of the action that `agree` checks."""

_MAX_LABEL = 300
_KEY = "graphacc/agreement"

Description = Mapping[str, Mapping[str, str]]
"""Section -> name -> value; the sections in the order in which a difference is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a process is."""

    count: int = 0  # its actions so far
    last: tuple[str, ...] = ()  # the last ones of them
    ended: bool = False  # its script has ended

    def action(self, number: int) -> str | None:
        """The action with a number, from 1; None where it is not shown."""
        place = number - 1 - (self.count - len(self.last))
        return self.last[place] if 0 <= place < len(self.last) else None


class ActionLog:
    """The actions of this process; written by the main thread, read by the watchdog's."""

    def __init__(self):
        self._lock = threading.Lock()
        self._count = 0
        self._last: collections.deque[str] = collections.deque(maxlen=SHOWN_ACTIONS)
        self._ended = False

    def add(self, action: str) -> int:
        """Returns the action's number, from 1."""
        with self._lock:
            self._count += 1
            self._last.append(action[:_MAX_LABEL])
            return self._count

    def end(self) -> None:
        with self._lock:
            self._ended = True

    def progress(self) -> Progress:
        with self._lock:
            return Progress(count=self._count, last=tuple(self._last), ended=self._ended)


def conflict(first: int, a: Progress, second: int, b: Progress) -> str | None:
    """Why process `first`, at `a`, and process `second`, at `b`, cannot be doing the same; None where they can.

    Examples:
        >>> conflict(0, Progress(count=2, last=("x", "y")), 1, Progress(count=1, last=("x",)))
        >>> conflict(0, Progress(count=2, last=("x", "y")), 1, Progress(count=2, last=("x", "z")))
        'the processes do different things: as its action 2, process 0 y, process 1 z'
    """
    start = max(a.count - len(a.last), b.count - len(b.last)) + 1
    for number in range(start, min(a.count, b.count) + 1):
        if not _agrees(a.action(number), b.action(number)):
            return (
                f"the processes do different things: as its action {number}, process {first} {a.action(number)}, "
                f"process {second} {b.action(number)}"
            )
    if a.count > b.count:
        first, a, second, b = second, b, first, a
    if a.ended and b.count > a.count:
        doing = b.action(a.count + 1) or "goes on"
        return f"process {first} has ended its script after {a.count} actions, but process {second} {doing} as its action {a.count + 1}"
    return None


def _agrees(action: str, other: str) -> bool:
    """Whether two actions in the same place can be the same; `agree` tells more of programs that differ."""
    return action == other or (action.startswith(COMPILES) and other.startswith(COMPILES))


def digest(description: Description) -> str:
    """16 hexadecimal digits, equal where the descriptions are."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


def agree(service: DistributedService, number: int, description: Description, pause: float, limit: float) -> None:
    """Wait until every process is about to compile the same program.

    Args:
        number: of this action, the same in every process.
        pause: seconds of waiting after which the log says who is waited for, again and again.
        limit: seconds after which it is an error that a process has not come.

    Raises:
        DistributedError: in every process, with the same text: the programs differ, and in what; or a process has not come.
    """
    mine, prefix = digest(description), f"{_KEY}/{number}"
    service.client.key_value_set(f"{prefix}/description/{service.process_id}", json.dumps(description))
    service.client.key_value_set(f"{prefix}/digest/{service.process_id}", mine)
    waits = _Waits(service, pause, limit)
    others = [rank for rank in range(service.num_processes) if rank != service.process_id]
    if all(waits.read(f"{prefix}/digest/{rank}", rank) == mine for rank in others):
        return
    known = [json.loads(waits.read(f"{prefix}/description/{rank}", rank)) for rank in range(service.num_processes)]
    rank = next(rank for rank, other in enumerate(known) if digest(other) != digest(known[0]))
    raise DistributedError(f"the processes do not train the same: {difference(0, known[0], rank, known[rank])}")


def meet(service: DistributedService, number: int, pause: float) -> None:
    """Wait until every process has compiled the program of an action, however long that takes.

    One that finds it in its cache would otherwise wait inside the first collective, which Gloo allows for 30 s where it is
    the first of a group of devices (jaxlib 0.10.2).

    Args:
        number: of the action, the same in every process.
        pause: seconds of waiting after which the log says who is waited for, again and again.
    """
    service.client.key_value_set(f"{_KEY}/{number}/compiled/{service.process_id}", "yes")
    waits = _Waits(service, pause, math.inf, "has been compiling {:.0f} s longer")
    for rank in range(service.num_processes):
        waits.read(f"{_KEY}/{number}/compiled/{rank}", rank)


def share(service: DistributedService, number: int, make: Callable[[], str], pause: float) -> str:
    """What process 0 makes, in every process; the others wait, however long that takes.

    Args:
        number: of this call, the same in every process.
        pause: seconds of waiting after which the log says what is waited for, again and again.
    """
    key = f"{_KEY}/shared/{number}"
    if service.process_id:
        return _Waits(service, pause, math.inf, "has been searching {:.0f} s").read(key, 0)
    value = make()
    service.client.key_value_set(key, value)
    return value


@dataclasses.dataclass
class _Waits:
    """Reads what other processes write into the key-value store, all of it before one moment."""

    service: DistributedService
    pause: float
    limit: float
    what: str = "has not come to the next program for {:.0f} s"

    def __post_init__(self):
        self.start = time.monotonic()

    def read(self, key: str, rank: int) -> str:
        while True:
            try:
                return read_key(self.service, key, self.pause)
            except KeyNotThere:
                seconds = time.monotonic() - self.start
                self._complain(rank, seconds)

    def _complain(self, rank: int, seconds: float) -> None:
        if seconds >= self.limit:
            raise DistributedError(
                f"process {rank} has not come to the program that process {self.service.process_id} is about to compile, for {seconds:.0f} s: "
                "every process must make the same calls in the same order; where one has much work of its own in between, give a larger "
                "GRAPHACC_TIMEOUT (a tenth of this wait)"
            )
        log.warning("graphacc: waiting for process %d, which %s", rank, self.what.format(seconds))


_PHRASES = {
    "batch": ("passed {name} {value}", "did not pass {name}"),
    "operators": ("has {value} in {name}", "has no operators in {name}"),
}
_REMEDIES = {
    "batch": "pass batches of the same shapes in every process (drop_last=True for the last one)",
    "operators": "the model's code must not depend on the process; look for other modes, options, or branches on the rank",
}
_REMEDY = "start the same script, with the same settings, in every process"


def difference(first: int, a: Description, second: int, b: Description) -> str:
    """The first difference between what process `first` and process `second` are about to compile, and what to do."""
    section, name = next(
        (section, name)
        for section in dict.fromkeys([*a, *b])
        for name in dict.fromkeys([*a.get(section, {}), *b.get(section, {})])
        if a.get(section, {}).get(name) != b.get(section, {}).get(name)
    )
    with_value, without = _PHRASES.get(section, ("has {name} {value}", "has no {name}"))

    def says(description: Description) -> str:
        value = description.get(section, {}).get(name)
        return (without if value is None else with_value).format(name=name, value=value)

    return f"process {second} {says(b)}, process {first} {says(a)}: {_REMEDIES.get(section, _REMEDY)}"
