"""Recurrent layers of torch.nn, and packed sequences, as one operator for every layer and direction (`ops/recurrence.py`).

How many rows a packed sequence has is decided by the values of its lengths, and a program has fixed shapes. Packed during a capture, its rows stay padded: the
tensor that is called its data has all T B rows, and a layer's steps leave the states of samples alone that have ended. Whatever else looks at such a tensor
would see those rows; only what is known here may.

Legend: T steps, B samples, I features of the input, H of the state, L layers, D directions.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _VF
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import in_transform, without_onednn
from graphacc.errors import CaptureError
from graphacc.ops.recurrence import state_dtype


@dataclasses.dataclass(frozen=True)
class Layers:
    """What torch's functions of recurrent layers have besides the sequence and the states."""

    parameters: Sequence[Tensor]
    biased: bool
    count: int
    dropout: float
    training: bool
    bidirectional: bool

    def run(self, mode: str, x: Tensor, hidden: Tensor, cell: Tensor | None, active: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, B, I], hidden and cell [L D, B, H] -> the last layer's states [T, B, D H], and the last states of all."""
        hiddens, cells, step = [], [], 4 if self.biased else 2
        directions = 2 if self.bidirectional else 1
        for layer in range(self.count):
            found = []
            for direction in range(directions):
                place = len(hiddens)
                parameters = self.parameters[place * step : (place + 1) * step]
                out, last, last_cell = _direction(mode, x, hidden[place], None if cell is None else cell[place], parameters, active, backwards=direction == 1)
                found.append(out)
                hiddens.append(last)
                cells.append(last_cell)
            x = torch.cat(found, 2) if self.bidirectional else found[0]
            if self.dropout and self.training and layer < self.count - 1:
                x = F.dropout(x, self.dropout)
        return x, torch.stack(hiddens), None if cell is None else torch.stack(cells)


def _direction(
    mode: str, x: Tensor, hidden: Tensor, cell: Tensor | None, parameters: Sequence[Tensor], active: Tensor | None, *, backwards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, in one direction: all states [T, B, H] in the order of the steps, the last one in the direction's, and the last cell state."""
    of_input, of_state, *biases = parameters
    gates = F.linear(x, of_input, biases[0] if biases else None)
    dtype = state_dtype(mode, gates, hidden, cell)
    if backwards:
        gates, active = gates.flip(0), None if active is None else active.flip(0)
    bias = biases[1].to(gates.dtype) if biases else None
    states = hidden.to(dtype), None if cell is None else cell.to(dtype)
    out, last_cell, _, _ = torch.ops.graphacc.recurrence(mode, gates, *states, of_state.to(gates.dtype), bias, active)
    return out.flip(0) if backwards else out, out[-1], last_cell


def _run(mode: str, x: Tensor, states: Any, rest: Sequence, active: Tensor | None) -> list[Tensor]:
    """Of what torch's functions are given: the states of all steps, and the last ones."""
    if x.shape[0] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    hidden, cell = states if mode == "lstm" else (states, None)
    return [each for each in Layers(*rest).run(mode, x, hidden, cell, active) if each is not None]


@dataclasses.dataclass(frozen=True)
class _Sequences:
    """What was packed."""

    lengths: Tensor  # int64 [B], descending
    shape: tuple[int, int]  # (T, B)

    def active(self, steps: int) -> Tensor:
        """bool [steps, B]."""
        return torch.arange(steps, device=self.lengths.device).unsqueeze(1) < self.lengths

    def longest(self) -> int:
        """The greatest length; where that is T, as of batches that are padded to it, no program is for it alone."""
        steps = self.shape[0]
        return steps if bool(self.lengths[0] == steps) else int(self.lengths[0])


def _of(tensor: object) -> _Sequences | None:
    """What a tensor has the rows, or the batch sizes, of."""
    return getattr(tensor, _MARK, None) if isinstance(tensor, Tensor) else None


def check_unpacked(leaves: Iterable[object]) -> None:
    """What code outside of a capture gets must have its real rows.

    Raises:
        CaptureError: one is the data, or the batch sizes, of a sequence that was packed in the capture.
    """
    if any(_of(leaf) is not None for leaf in leaves):
        raise CaptureError(_LOOKS_AT_ROWS.format("the code that gets a result of the model"))


class Recurrent:
    """The functions. What they pack is known by an attribute of its tensors."""

    def __init__(self) -> None:
        self._has_packed = False
        self._functions: dict[Callable, Callable] = {
            torch.lstm: self._lstm,
            torch.gru: lambda *args: self._layers("gru", torch.gru, args),
            torch.rnn_tanh: lambda *args: self._layers("tanh", torch.rnn_tanh, args),
            torch.rnn_relu: lambda *args: self._layers("relu", torch.rnn_relu, args),
            _VF._pack_padded_sequence: self._pack,
            _VF._pad_packed_sequence: self._pad,
        }

    def replacement(self, func: Callable, args: tuple, kwargs: dict) -> Callable | None:
        """What is called in place of a function, if anything.

        Raises:
            CaptureError: it looks at the rows of packed sequences.
        """
        found = self._functions.get(func)
        if found is not None or not self._has_packed:
            return found
        packed, sequences = next(((leaf, held) for leaf in pytree.tree_leaves((args, kwargs)) if (held := _of(leaf)) is not None), (None, None))
        if packed is None or sequences is None or func in _LOOK_AT_NO_ROWS or (func is Tensor.size and args[1:] == (-1,)):
            return None
        if args and args[0] is packed and packed.dim() == 1 and packed.dtype == torch.int64:  # its batch sizes
            if func is Tensor.__getitem__ and args[1] == 0:
                return lambda *_: sequences.shape[1]
            if func is Tensor.__len__ or (func is Tensor.size and args[1:] == (0,)):
                return lambda *_: sequences.longest()
        raise CaptureError(_LOOKS_AT_ROWS.format(getattr(func, "__name__", func)))

    def _keep(self, tensor: Tensor, sequences: _Sequences) -> Tensor:
        setattr(tensor, _MARK, sequences)
        self._has_packed = True
        return tensor

    def _lstm(self, *args) -> tuple[Tensor, Tensor, Tensor]:
        """torch.lstm; hx is (h, c), [L D, B, H] each."""
        hidden, cell = args[2] if isinstance(args[1], Tensor) else args[1]
        if hidden.shape != cell.shape and _of(args[0]) is None:  # with projections
            with without_onednn():
                out, last_hidden, last_cell = torch.lstm(*args)
            return out, last_hidden.reshape(hidden.shape), last_cell.reshape(cell.shape)  # torch's decomposition (2.9) gives them a dim more
        if hidden.shape != cell.shape:
            raise CaptureError("an LSTM with projections (proj_size) of a packed sequence: leave out proj_size and add a Linear, or give it the padded tensor")
        return self._layers("lstm", torch.lstm, args)

    def _layers(self, mode: str, function: Callable, args: tuple) -> Any:
        """`function`, of (input, states, parameters, ..., batch_first) or of (data, batch sizes, states, parameters, ...)."""
        if isinstance(args[2], tuple | list) == (mode == "lstm") and isinstance(args[1], Tensor):
            sequences = _of(args[0])
            if sequences is None:
                raise CaptureError(_PACKED_OUTSIDE)
            x, active = args[0].unflatten(0, sequences.shape), sequences.active(sequences.shape[0])
            out, *states = _run(mode, x, args[2], args[3:], active)
            return self._keep(out.flatten(0, 1), sequences), *states
        if in_transform():
            with without_onednn():
                return function(*args)
        x, states, *rest, batch_first = args
        out, *states = _run(mode, x.transpose(0, 1) if batch_first else x, states, rest, None)
        return out.transpose(0, 1) if batch_first else out, *states

    def _pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """torch._pack_padded_sequence: input [T, B, ...] or [B, T, ...]; its rows, all of them, and the batch sizes [T].

        Raises:
            RuntimeError: as torch's.
        """
        x = input.transpose(0, 1) if batch_first else input
        if lengths.dim() != 1 or lengths.shape[0] != x.shape[1]:
            raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {lengths.numel()} (batch_size={x.shape[1]})")
        if bool((lengths <= 0).any()):
            raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0")
        if bool((lengths[1:] > lengths[:-1]).any()):
            raise RuntimeError("`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass `enforce_sorted=False` to pack_padded_sequence")
        if bool(lengths[0] > x.shape[0]):
            raise RuntimeError(f"pack_padded_sequence: a length is above the {x.shape[0]} steps of the input")
        sequences = _Sequences(lengths, (x.shape[0], x.shape[1]))
        return self._keep(x.flatten(0, 1), sequences), self._keep(sequences.active(x.shape[0]).sum(1), sequences)

    def _pad(self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> tuple[Tensor, Tensor]:
        """torch._pad_packed_sequence: [total_length, B, ...] or [B, total_length, ...], and the lengths [B]."""
        sequences = _of(data)
        if sequences is None:
            raise CaptureError(_PACKED_OUTSIDE)
        x = data.unflatten(0, sequences.shape)[:total_length]
        more = total_length - x.shape[0]
        x = torch.cat((x, x.new_zeros(more, *x.shape[1:]))) if more else x
        active = sequences.active(total_length)
        x = torch.where(active.reshape(*active.shape, *[1] * (x.dim() - 2)), x, padding_value)
        return x.transpose(0, 1) if batch_first else x, sequences.lengths.clone()


_MARK = "_graphacc_packed"
_LOOKS_AT_ROWS = (
    "{} looks at the rows of a packed sequence, whose number is decided by the values of its lengths, but every shape in a captured step is fixed: "
    "between pack_padded_sequence and pad_packed_sequence give it to nn.LSTM, nn.GRU and nn.RNN alone, and do the rest with the padded tensor"
)
_PACKED_OUTSIDE = (
    "a sequence that was packed outside of the model has as many rows as its lengths sum up to, another number for every batch: give the model the padded tensor and the lengths, "
    "and call pack_padded_sequence in its forward"
)
_LOOK_AT_NO_ROWS = frozenset({Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("ndim", "dtype", "device", "is_cuda", "requires_grad"))})
