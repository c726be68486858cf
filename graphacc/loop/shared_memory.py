"""Values of one recording that share memory, as a tensor and its views do: programs give each by itself, and the loop gets them in one memory.

What the loop writes into one is then seen in all, also what it writes into those that it has before others are read.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from graphacc._compat.torch_ import without_modes
from graphacc.loop.decisions import memory_of


class SharedMemory:
    """The memory of the values that were fetched so far, by that of the fake tensors that stand for them."""

    def __init__(self):
        self._memories: dict[int, _Memory] = {}

    def put(self, fake: Tensor, fetch: Callable[[], Tensor], others: Iterable[tuple[Tensor, object]]) -> Tensor:
        """The tensor that the loop gets for a value.

        Args:
            fetch: gives it as a program computed it.
            others: the values that share memory with it, each with its tensor, or something else if it was not fetched.
        """
        key = memory_of(fake)
        if key not in self._memories:
            others = list(others)
            if not others or not all(_has_memory(other) for other in (fake, *(other for other, _ in others))):
                return fetch()
            present = next(((other, value) for other, value in others if isinstance(value, Tensor)), None)
            self._memories[key] = _Memory(fake, present)
        return self._memories[key].put(fake, fetch)

    def forget(self, memory: int) -> None:
        """What a call has written into is computed again."""
        self._memories.pop(memory, None)


class _Memory:
    """One memory, and which of its bytes hold values."""

    def __init__(self, fake: Tensor, present: tuple[Tensor, Tensor] | None):
        self.begin = 0  # where that of the fake tensors begins in this, in bytes
        self._filled: Tensor | None = None  # by byte; None: those of `_first` alone
        self._first: tuple | None = None  # form of the first value
        if present is None:
            self.storage = torch.UntypedStorage(fake.untyped_storage().nbytes())
        else:
            other, value = present
            self.storage = value.untyped_storage()
            self.begin = _offset(value) - _offset(other)
            self._first = _form(other)

    def put(self, fake: Tensor, fetch: Callable[[], Tensor]) -> Tensor:
        begin = self.begin + _offset(fake)
        if not _has_memory(fake) or begin < 0 or begin % fake.itemsize or begin + _extent(fake) > self.storage.nbytes():
            return fetch()  # one that was not yet made when another was read has more memory than that
        with without_modes(), torch.no_grad():
            own = torch.empty(0, dtype=fake.dtype).set_(self.storage, begin // fake.itemsize, fake.size(), fake.stride())
            if self._first is None:
                self._first = _form(fake)
                _write(own, fetch())
            elif self._first != _form(fake):
                self._fill(own, fetch)
        return own

    def _fill(self, own: Tensor, fetch: Callable[[], Tensor]) -> None:
        """Write what no other value has written: the loop may have changed that since."""
        if self._filled is None:
            assert self._first is not None
            self._filled = torch.zeros(self.storage.nbytes(), dtype=torch.bool)
            offset, size, stride, itemsize = self._first
            first = self._filled.as_strided((*size, itemsize), (*(step * itemsize for step in stride), 1), self.begin + offset)
            _write(first, torch.ones((), dtype=torch.bool).expand(first.shape))
        form = (*own.size(), own.itemsize), (*(step * own.itemsize for step in own.stride()), 1), _offset(own)
        filled = self._filled.as_strided(*form)
        if bool(filled.all()):
            return
        here = torch.empty(0, dtype=torch.uint8).set_(self.storage).as_strided(*form)
        given = fetch().contiguous().reshape(*own.size(), 1).view(torch.uint8)
        _write(here, torch.where(filled, here, given))
        _write(filled, torch.ones((), dtype=torch.bool).expand(filled.shape))


def _has_memory(fake: Tensor) -> bool:
    """Whether the elements are what lies in the memory."""
    return fake.layout is torch.strided and not fake.is_conj() and not fake.is_neg() and fake.numel() > 0


def _form(fake: Tensor) -> tuple:
    return _offset(fake), tuple(fake.size()), tuple(fake.stride()), fake.itemsize


def _offset(tensor: Tensor) -> int:
    """Of the first element, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    return (1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride()))) * tensor.itemsize


def _write(tensor: Tensor, value: Tensor) -> None:
    """Write into a tensor whose elements may be in one place (expanded dims, windows), where they are equal."""
    end = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.size()) if size > 1):
        if stride < end:
            break
        end += stride * (size - 1)
    else:
        tensor.copy_(value)
        return
    count = _extent(tensor) // tensor.itemsize
    places = torch.arange(count).as_strided(tensor.size(), tensor.stride())
    tensor.as_strided((count,), (1,))[places] = value
