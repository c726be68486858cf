"""The keys of the random numbers in what is compiled: (seed, how many recordings there have been under it).

They follow PyTorch's generator: after ``torch.manual_seed(s)`` the same recordings draw the same numbers again, also within
``torch.random.fork_rng()``. A compiled program takes nothing from that generator, so one that has just been seeded looks the same after a
step; the first program that draws numbers under a seed therefore takes one from it.
"""

import collections

import torch

from graphacc._compat.torch_ import without_modes

_MAX_SEEDS = 256
"""Seeds whose count is remembered, for loops that go back to one (`fork_rng`)."""


class RandomKeys:
    """The key of the next recording.

    Args:
        seed: the first word.
        follows: whether `torch.manual_seed` sets it anew. Not where the user has chosen the seed, nor with several processes, which may
            seed their loops differently and must draw alike.
    """

    def __init__(self, seed: int, *, follows: bool):
        self.seed, self.counter = seed, 0
        self._follows = follows
        self._torch_seed = torch.initial_seed()
        self._counters: collections.OrderedDict[int, int] = collections.OrderedDict()  # torch's seed -> `counter` when it was left
        self._draws = False  # a program has drawn numbers
        self._fresh: tuple[int, torch.Tensor] | None = None  # torch's seed, and the state of a generator that was just given it

    def next(self) -> tuple[int, int]:
        if self._follows:
            self._follow()
        self.counter += 1
        return self.seed, self.counter

    def note_draws(self) -> None:
        """A program that draws numbers is about to run."""
        if self._follows and not self._draws:
            self._draws = True
            if self._just_seeded():
                _draw()

    def restart(self, seed: int, counter: int) -> None:
        """Go on from a checkpoint; the next ``torch.manual_seed`` sets it anew."""
        self.seed, self.counter = seed, counter
        self._torch_seed = torch.initial_seed()
        self._counters.clear()
        if self._draws and self._just_seeded():
            _draw()

    def _follow(self) -> None:
        now = torch.initial_seed()
        if now != self._torch_seed:
            self._counters[self._torch_seed] = self.counter
            if len(self._counters) > _MAX_SEEDS:
                self._counters.popitem(last=False)
            self.seed, self.counter, self._torch_seed = now & 0xFFFFFFFF, self._counters.pop(now, 0), now
        if self._draws and self._just_seeded():
            self.seed, self.counter = now & 0xFFFFFFFF, 0
            _draw()

    def _just_seeded(self) -> bool:
        now = torch.initial_seed()
        with without_modes():
            if self._fresh is None or self._fresh[0] != now:
                self._fresh = now, torch.Generator().manual_seed(now).get_state()
            return torch.equal(torch.default_generator.get_state(), self._fresh[1])


def _draw() -> None:
    with without_modes():
        torch.empty((), dtype=torch.int64).random_()
