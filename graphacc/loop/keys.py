"""The keys of the random numbers in what is compiled: (seed, how many recordings there have been under it).

They follow PyTorch's generator: after ``torch.manual_seed(s)`` the same recordings draw the same numbers again, also within
``torch.random.fork_rng()``, and where its state is set to one from before (``torch.set_rng_state``), they draw the numbers from then. Where
recordings begin under a generator that has moved since it was seeded, they are counted from a number that its state gives: a process that goes on
from another's state draws other numbers than that one's first steps did. A compiled program takes nothing from that generator; so that its state
tells one call from another, each that draws takes one number from it. A model that draws nothing takes nothing. A call that begins where an earlier
one of its recording did draws that one's numbers again.
"""

import collections
import hashlib

import torch

from graphacc._compat.torch_ import outside_of_transforms, without_modes
from graphacc.runtime.distributed import share

_MAX_SEEDS = 256
"""Seeds whose count is remembered, for loops that go back to one (`fork_rng`)."""
_MAX_STATES = 4096
"""States of the generator whose key is remembered, for loops that go back to one."""


class RandomKeys:
    """The key of the next recording.

    Args:
        seed: the first word.
        follows: whether `torch.manual_seed` sets it anew. Not where the user has chosen the seed, nor with several processes, which may
            seed their loops differently and must draw alike: they count from what the first process's generator gives.
        chosen: whether the user has chosen the seed; then recordings are counted from 0.
    """

    def __init__(self, seed: int, *, follows: bool, chosen: bool):
        self.seed, self.counter = seed, 0
        self._follows = follows
        self._torch_seed = torch.initial_seed()
        self._counts = chosen  # recordings under the present seed, from a number on that is known
        self._counters: collections.OrderedDict[int, int] = collections.OrderedDict()  # seed -> `counter` when it was left
        self._draws = False  # a call, or a program, has drawn numbers
        self._draws_unseen = False  # a program has, and no call of it
        self._key = seed, 0  # of the present recording
        self._began: bytes | None = None  # where the generator stood when the present recording began, if that is known,
        self._moved = b""  # and then
        self._fresh: tuple[int, torch.Tensor] | None = None  # torch's seed, and the state of a generator that was just given it
        self._known: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()  # state of the generator -> the key of a recording that found it

    def next(self) -> tuple[int, int]:
        self.begin()
        if not self._follows:
            self.counter += 1
            return self.seed, self.counter
        if not self._draws:  # the generator says nothing of recordings that take nothing from it
            self.counter += 1
            self._began, self._key = None, (self.seed, self.counter)
            return self._key
        state = _state()
        key = self._known.get(state)
        if key is None:
            if self._just_seeded():
                self.counter = 0
            self.counter += 1
            key = self.seed, self.counter
        self._begin(state, key)
        if self._draws_unseen:
            _draw()
            self._moved = _state()
        return key

    def begin(self) -> None:
        """Find where `counter` begins, if it has not begun under the present seed."""
        if self._follows:
            self._follow()
        if not self._counts:
            self._counts, self.counter = True, int(share(lambda: str(0 if self._just_seeded() else _first_count())))

    def _begin(self, state: bytes, key: tuple[int, int]) -> None:
        """The present recording began where the generator stood at `state`."""
        self._began = self._moved = state
        self._known.setdefault(state, key)
        if len(self._known) > _MAX_STATES:
            self._known.popitem(last=False)

    def state(self) -> bytes | None:
        """Where the generator stands; None where keys do not follow it."""
        return _state() if self._follows else None

    def first(self) -> bytes | None:
        """`state`, for the first call of a recording that draws: what `next` took does not count."""
        if (state := self.state()) is None:
            return None
        if self._began is None:
            self._begin(state, self._key)
        return self._began if state == self._moved else state

    def went_back(self) -> bool:
        """Whether the generator stands where an earlier recording began."""
        return self._draws and (state := self.state()) is not None and state not in (self._began, self._moved) and state in self._known

    def draw(self) -> None:
        """A call that draws numbers was recorded."""
        self._draws = True
        _draw()

    def note_draws(self) -> None:
        """A program is about to run that draws numbers, though no call that it is made of was seen to: the optimizer does, or lazy tensors."""
        if self._follows and not self._draws_unseen:
            if self._began is None:
                self._begin(_state(), self._key)
            self._draws = self._draws_unseen = True
            _draw()

    def restart(self, seed: int, counter: int) -> None:
        """Go on from a checkpoint; the next ``torch.manual_seed`` sets it anew."""
        self.seed, self.counter, self._counts = seed, counter, True
        self._torch_seed = torch.initial_seed()
        self._counters.clear()
        self._counters[seed] = counter  # the loop may set the generator's state from then, too
        self._known.clear()
        if self._draws and self._just_seeded():
            _draw()

    def _follow(self) -> None:
        now = torch.initial_seed()
        if now != self._torch_seed:
            if self._counts:
                self._counters[self.seed] = self.counter
            if len(self._counters) > _MAX_SEEDS:
                self._counters.popitem(last=False)
            self.seed, self._torch_seed = now & 0xFFFFFFFF, now
            counter = self._counters.pop(self.seed, None)
            self._counts, self.counter = counter is not None, counter or 0
            if not self._draws and self._just_seeded():  # no step of this process
                self.counter = 0

    def _just_seeded(self) -> bool:
        now = torch.initial_seed()
        with without_modes(), outside_of_transforms():
            if self._fresh is None or self._fresh[0] != now:
                self._fresh = now, torch.Generator().manual_seed(now).get_state()
            return torch.equal(torch.default_generator.get_state(), self._fresh[1])


def _state() -> bytes:
    with without_modes(), outside_of_transforms():
        return hashlib.blake2b(torch.default_generator.get_state().numpy().data, digest_size=16).digest()


def _first_count() -> int:
    return int.from_bytes(_state()[:4], "little") >> 2  # 30 bits, behind which there is room


def _draw() -> None:
    with without_modes(), outside_of_transforms():
        torch.empty((), dtype=torch.int64).random_()
