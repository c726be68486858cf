"""Programs for several lengths: a batch whose length changes is padded to the next bucket, and the program masks the padding (`passes/lengths`).

A recording keeps the shapes that the loop gave. What is captured for it is the same recording at the bucket's length, and once more at one
less for each length, which tells what in the graph depends on it. That the recording's own code does the same at the loop's length (``if
x.shape[1] > 40``) is checked for every new length: all operators that its calls ran on fake tensors, with all their numbers and shapes,
must be those of the bucket's recording, but for numbers that grow with the length. What is not proved is compiled for its own length, and
said once.
"""

import copy
import dataclasses
import functools
import logging
import typing
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.capture import FX, objects
from graphacc.errors import GraphAccError
from graphacc.graph import StepGraph
from graphacc.loop.decisions import Recorder
from graphacc.loop.identity import Identity
from graphacc.loop.promise import NotRecorded
from graphacc.loop.tape import Call, External, Param, Ref, Tape, View
from graphacc.passes.lengths import Length, LengthRefused, Masked, affine, length_input, mask_lengths
from graphacc.passes.lengths.layout import Layout
from graphacc.strategy import Strategy
from graphacc.strategy.axes import CP, EP, PP

if typing.TYPE_CHECKING:
    from graphacc.loop.build import GradientCode
    from graphacc.loop.engine import Engine

log = logging.getLogger("graphacc")

MAX_KNOWN = 4096
"""Recordings whose bucket is remembered."""

SHORTEST_BUCKET = 8
"""What depends on a length is read from captures at it and at one less, which must not be special."""

AUTOMATIC = (*range(SHORTEST_BUCKET, 64, 8), *(octave + octave * quarter // 4 for octave in (64 * 2**power for power in range(15)) for quarter in range(4)))
"""The lengths of ``bucket_lengths="auto"``: multiples of 8, which tensor cores want, and four in an octave, so that padding is at most a quarter of what is longer than 32, an eighth on average."""

_NEAR = (0, -1, 1)
"""Offsets from a length that are recognised in tensors given to the loop's own functions, such as labels without the first token."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Recordings of one code whose lengths are padded to the same ones."""

    code: Identity  # what they have in common
    lengths: tuple[int, ...]  # padded
    inputs: Mapping[int, Layout]  # external -> its layout, of those that grow
    tape: Tape  # the recording at these lengths
    others: tuple[Tape, ...]  # at the same lengths but for one each, which is one less
    numbers: tuple  # that identify the code at `lengths`
    numbers_of_others: tuple[tuple, ...]
    results: dict[tuple, Mapping[str, Layout]] = dataclasses.field(default_factory=dict)  # program -> layouts of the values that it gives
    steps: dict[tuple, StepGraph] = dataclasses.field(default_factory=dict)  # program -> its graph, until it is taken
    refused: set[tuple] = dataclasses.field(default_factory=set)  # programs that cannot be masked

    def lengths_of(self, tape: Tape) -> tuple[int, ...]:
        return _lengths(tape, self.inputs)

    def why_not(self, tape: Tape) -> str | None:
        """Why this recording is not the same code at its own lengths, if it is not."""
        lengths = self.lengths_of(tape)
        if any(real > padded for real, padded in zip(lengths, self.lengths)):
            return "it is longer"
        expected, found = [self._number(place, lengths) for place in range(len(self.numbers))], _numbers_of(tape)
        if len(expected) != len(found):
            return f"the code runs {len(found)} operators and arguments at length {_shown(lengths)}, {len(expected)} at {_shown(self.lengths)}"
        operator = ""
        for number, wanted in zip(found, expected):
            if isinstance(number, torch._ops.OpOverload):
                operator = f"{number}: "
            if type(number) is not type(wanted) or repr(number) != repr(wanted):
                return f"the code does something else at length {_shown(lengths)} than at {_shown(self.lengths)}: {operator}{number!r} instead of {wanted!r}"
        return None

    def _number(self, place: int, lengths: Sequence[int]) -> object:
        """What the same code has in this place at other lengths."""
        value = self.numbers[place]
        found = self._varying.get(place)
        return value if found is None else type(value)(found.at(lengths))

    @functools.cached_property
    def _varying(self) -> dict:
        if any(len(numbers) != len(self.numbers) for numbers in self.numbers_of_others):
            raise LengthRefused("its operators depend on the length")
        rows = enumerate(zip(self.numbers, *self.numbers_of_others, strict=True))
        try:
            found = {place: affine(value, others, self.lengths) for place, (value, *others) in rows}
        except ValueError as error:
            raise LengthRefused(f"a number in the forward depends on the length, but is no multiple of it: {error}") from error
        return {place: number for place, number in found.items() if number is not None}

    def take(self, program: tuple, capture: Callable[[Tape], object]) -> StepGraph:
        """The graph of a program that `Buckets.settle` has found possible."""
        return self.steps.pop(program) if program in self.steps else self.masked(capture).step

    def masked(self, capture: Callable[[Tape], object]) -> Masked:
        """One program for all these recordings.

        Raises:
            GraphAccError: the padding cannot be kept from its results, or it cannot be captured at these lengths.
        """
        graphs = [capture(tape) for tape in (self.tape, *self.others)]
        steps = [graph for graph in graphs if isinstance(graph, StepGraph)]
        if len(steps) < len(graphs):
            raise LengthRefused("it was captured by lazy tensors, which give no operators to mask")
        inputs = {self.tape.external_paths[index]: layout for index, layout in self.inputs.items()}
        return mask_lengths(steps[0], steps[1:], inputs, self.lengths)

    def length_inputs(self, tape: Tape) -> dict[str, int]:
        """Target of an input that is a length -> its value for a recording."""
        return {length_input(symbol): length for symbol, length in enumerate(self.lengths_of(tape))}

    def pad(self, index: int, tensor: Tensor) -> Tensor:
        """A tensor of the batch with zeros behind its end."""
        layout = self.inputs.get(index, ())
        for dim, length in enumerate(layout):
            if length is not None:
                parts = tensor.unflatten(dim, (length.outer, -1, typing.cast(int, length.inner)))
                padded = parts.new_zeros((*parts.shape[: dim + 1], self.lengths[length.symbol] + length.offset, *parts.shape[dim + 2 :]))
                padded.narrow(dim + 1, 0, parts.shape[dim + 1]).copy_(parts)
                tensor = padded.flatten(dim, dim + 2)
        return tensor


@dataclasses.dataclass(frozen=True)
class Cut:
    """Fetches a value of a padded program, at its real length."""

    fetch: typing.Any  # gives the padded value
    layout: Layout
    lengths: tuple[int, ...]

    def __call__(self) -> Tensor:
        value = self.fetch()
        for dim, item in enumerate(self.layout):
            if item is not None:
                length = item.known()
                parts = value.unflatten(dim, (length.outer, -1, typing.cast(int, length.inner)))
                value = parts.narrow(dim + 1, 0, self.lengths[length.symbol] + length.offset).flatten(dim, dim + 2)
        return value.contiguous()

    def is_ready(self) -> bool:
        return self.fetch.is_ready()


class Buckets:
    """The buckets of one engine.

    Args:
        sizes: lengths that batches are padded to, in ascending order.
        dims: path of a tensor from outside -> the dims that are lengths; others are recognised (`_recognised`).
    """

    def __init__(self, engine: "Engine", sizes: Sequence[int], dims: Mapping[str, Sequence[int]]):
        self.engine, self.sizes, self.dims = engine, tuple(sizes), dict(dims)
        self._buckets: dict[tuple[Identity, tuple[int, ...]], Bucket] = {}  # code and padded lengths -> the bucket
        self._inputs: list[Mapping[int, Layout]] = []  # of earlier recordings, those with more lengths before: two may be equal by chance
        self._known: dict[tuple, Bucket | None] = {}  # key of a recording -> its bucket
        self._said: set[str] = set()

    def settle(self, tape: Tape, program: tuple, capture: Callable[[Tape], object]) -> None:
        """Find the bucket of a recording, for one program of it; it has none where the padding cannot be kept from the results.

        Args:
            program: what tells this program from others of the same recording.
            capture: captures its graph from a recording.
        """
        bucket = tape.bucket = self._bucket_of(tape)
        if bucket is None or program in bucket.results:
            return
        if program not in bucket.refused:
            try:
                masked = bucket.masked(capture)
                bucket.results[program], bucket.steps[program] = masked.results, masked.step
                return
            except GraphAccError as error:
                bucket.refused.add(program)
                self._say(tape, str(error))
        tape.bucket = None

    # ---- which bucket

    def _bucket_of(self, tape: Tape) -> Bucket | None:
        key = tape.forward_key
        if key not in self._known:
            while len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            try:
                self._known[key] = self._find(tape)
            except GraphAccError as error:
                self._known[key] = None
                self._say(tape, str(error))
        return self._known[key]

    def _find(self, tape: Tape) -> Bucket | None:
        """The bucket of a recording of a new form.

        Raises:
            GraphAccError: it cannot be padded.
        """
        inputs = self._recognised(tape)
        if not inputs:
            return None
        inputs = next((known for known in self._inputs if _fits(tape, known, inputs)), inputs)
        if inputs not in self._inputs:
            self._inputs = sorted((*self._inputs, inputs), key=_num_lengths, reverse=True)
        if (why := why_not_under(self.engine.programs.strategy)) is not None:
            raise LengthRefused(why)
        if self.engine.fallback.backend is not FX:
            raise LengthRefused("it is captured by lazy tensors, which give no operators to mask")
        if any(call.reads or call.replaces is not None for call in tape.forward_calls):
            raise LengthRefused("the code of the model asks for values of the batch")
        lengths = _lengths(tape, inputs)
        padded = tuple(next((size for size in self.sizes if size >= length), length) for length in lengths)
        if any(length > self.sizes[-1] for length in lengths):
            raise LengthRefused(f"it is longer than the largest bucket, {self.sizes[-1]}: add one to bucket_lengths")
        smallest = min(lengths[length.symbol] + length.offset for layout in inputs.values() for length in layout if length)
        if smallest < 2:
            raise LengthRefused("a sequence of one element is broadcast, so its program is another one")
        code = Identity(_code(tape, inputs))
        try:
            return self._bucket(tape, code, inputs, lengths, padded)
        except GraphAccError:
            below = tuple(size - 1 for size in padded)  # at its full length a table of positions is taken whole, and not sliced
            if any(length > size for length, size in zip(lengths, below)):
                raise
            return self._bucket(tape, code, inputs, lengths, below)

    def _bucket(self, tape: Tape, code: Identity, inputs: Mapping[int, Layout], lengths: tuple[int, ...], padded: tuple[int, ...]) -> Bucket:
        """The bucket of a recording that is padded to these lengths.

        Raises:
            GraphAccError: the code does something else at its length.
        """
        bucket = self._buckets.get((code, padded))
        found = self._new(tape, code, inputs, lengths, padded) if bucket is None else bucket
        if (why := found.why_not(tape)) is not None:
            raise LengthRefused(why)
        self._buckets[code, padded] = found
        return found

    def _new(self, tape: Tape, code: Identity, inputs: Mapping[int, Layout], lengths: tuple[int, ...], padded: tuple[int, ...]) -> Bucket:
        wanted = [padded, *((*padded[:symbol], padded[symbol] - 1, *padded[symbol + 1 :]) for symbol in range(len(padded)))]
        tapes = [self._at(tape, inputs, lengths, each) for each in wanted]
        first, *others = tapes
        return Bucket(code, padded, inputs, first, tuple(others), _numbers_of(first), tuple(map(_numbers_of, others)))

    def _recognised(self, tape: Tape) -> dict[int, Layout]:
        """The externals that grow with lengths, and their layouts: those that `dims` names, and

        - dim 1 of the first tensor of integers (of any numbers, if there is none) with two dims or more: the first length;
        - dim 1 of further arguments of the model of the same size, and of integers of another size: a length of its own;
        - what the loop's own functions get, if its dim 1 has such a size or one more or less, or if it is such a batch flattened.
        """
        used = sorted({index for call in tape.forward_calls for index in call.externals})
        shapes = {index: tuple(tape.externals[index].shape) for index in used}
        integers = {index: not tape.externals[index].is_floating_point() for index in used}
        several = [index for index in used if len(shapes[index]) > 1]
        first = next((index for index in several if integers[index]), several[0] if several else None)
        sizes: list[int] = []  # length -> its size
        found: dict[int, Layout] = {}

        def length(size: int) -> Length:
            if size not in sizes:
                sizes.append(size)
            return Length(symbol=sizes.index(size), offset=0)

        for index in sorted(used, key=lambda index: index != first):
            path, shape = tape.external_paths[index], shapes[index]
            if path in self.dims:
                grown = {dim % len(shape): length(shape[dim]) for dim in self.dims[path]} if shape else {}
            elif len(shape) > 1:
                near = self._near(shape[1], sizes, 1, path)
                own = near is None and shape[1] > 1 and path.startswith("model.") and (index == first or integers[index])
                grown = {1: length(shape[1])} if own else {} if near is None else {1: near}
            else:
                near = self._near(shape[0], sizes, shapes[first][0], path) if shape and first is not None else None
                grown = {} if near is None else {0: near}
            if grown:
                found[index] = tuple(grown.get(dim) for dim in range(len(shape)))
        return found

    def _near(self, size: int, sizes: Sequence[int], factor: int, path: str) -> Length | None:
        """The length of a tensor's dim of `size`, which is `factor` sequences of about that length."""
        for offset in (0,) if path.startswith("model.") else _NEAR:
            for symbol, known in enumerate(sizes):
                if size == factor * (known + offset) and known + offset > 1:
                    return Length(symbol=symbol, offset=offset, factor=factor)
        return None

    # ---- the same recording at other lengths

    def _at(self, tape: Tape, inputs: Mapping[int, Layout], lengths: tuple[int, ...], wanted: tuple[int, ...]) -> Tape:
        """The recording as it would be with batches of the lengths `wanted`.

        Raises:
            GraphAccError: the calls cannot be made at these lengths.
        """
        like = copy.copy(tape)
        like.externals = [_resized(tensor, inputs.get(index, ()), wanted) for index, tensor in enumerate(tape.externals)]
        like.sources = like.externals
        like.bucket, like.promises = None, {}
        like.forget_values()
        sizes = {}
        for index, layout in inputs.items():
            for length in (item for item in layout if item):
                old, new = (sizes_of[length.symbol] + length.offset for sizes_of in (lengths, wanted))
                rows = max(length.factor, tape.externals[index].shape[0] if layout[0] is None else 1)
                sizes |= {old: new, rows * old: rows * new}
        plain, scaled = list(tape.forward_calls), [_with_sizes(self.engine.is_model(call.function), call, sizes) for call in tape.forward_calls]
        try:
            like.calls = self._replayed(like, scaled)
        except GraphAccError:
            if all(one is other for one, other in zip(plain, scaled)):
                raise
            like.calls = self._replayed(like, plain)  # a number was equal by chance
        return like

    def _replayed(self, tape: Tape, calls: Sequence[Call]) -> list[Call]:
        """The calls, run on fake tensors of the tape's externals, with the operators that they ran."""
        env: dict[int, Tensor] = {}
        engine, made = self.engine, []

        def resolve(leaf):
            if isinstance(leaf, Ref):
                return env[leaf.index]
            return engine.fake(tape.externals[leaf.index] if isinstance(leaf, External) else leaf) if isinstance(leaf, (External, Param)) else leaf

        for call in calls:
            args, kwargs = pytree.tree_unflatten([resolve(leaf) for leaf in call.leaves], call.spec)
            recorder = Recorder([], [], None, _no_input, notes_operators=True)
            try:
                with torch.set_grad_enabled(call.grad_enabled), engine.autocast(call.autocast):
                    result = engine.run_fake(call.asked, args, kwargs, recorder)
            except (GraphAccError, NotRecorded) as error:
                raise LengthRefused(f"the same code fails where the batch is {', '.join(str(list(tensor.shape)) for tensor in tape.externals)}: {error}") from error
            tensors = [leaf for leaf in objects.flatten(result)[0] if isinstance(leaf, Tensor)]
            places = [leaf for leaf in call.result_leaves if isinstance(leaf, (Ref, External, View, Param))]
            if len(tensors) != len(places):
                raise LengthRefused("its results depend on the length")
            env |= {place.index: tensor for place, tensor in zip(places, tensors) if isinstance(place, Ref)}
            made.append(dataclasses.replace(call, operators=tuple(recorder.operators)))
        return made

    def _say(self, tape: Tape, why: str) -> None:
        """What a recording is compiled for instead, once for each reason."""
        if why not in self._said:
            self._said.add(why)
            shapes = ", ".join(f"{path} {list(tensor.shape)}" for path, tensor in zip(tape.external_paths, tape.externals))
            log.warning("graphacc: bucket_lengths: this batch (%s) is compiled for its own length: %s", shapes, why)


def _no_input(tensor: Tensor):
    raise LengthRefused("the shape of a tensor depends on values of the batch")


def _resized(tensor: Tensor, layout: Layout, lengths: Sequence[int]) -> Tensor:
    """A tensor of the same form at other lengths."""
    if not any(layout):
        return tensor
    sizes = [size if item is None else item.factor * (lengths[item.symbol] + item.offset) for size, item in zip(tensor.shape, layout)]
    return torch.zeros(sizes, dtype=tensor.dtype)


def _with_sizes(is_model: bool, call: Call, sizes: Mapping[int, int]) -> Call:
    """A call of the loop's own functions whose numbers are other sizes (``view(batch * length, -1)``)."""
    if is_model or not any(type(leaf) is int and leaf in sizes for leaf in call.leaves):
        return call
    return dataclasses.replace(call, leaves=tuple(sizes.get(leaf, leaf) if type(leaf) is int else leaf for leaf in call.leaves))


def _code(tape: Tape, inputs: Mapping[int, Layout]) -> tuple:
    """What recordings have in common whose lengths alone may differ."""
    places = (Ref, External, Param)
    calls = tuple(
        (call.asked, call.spec, call.results, call.grad_enabled, call.autocast, tuple(leaf if isinstance(leaf, places) else type(leaf) for leaf in call.leaves))
        for call in tape.forward_calls
    )
    externals = []
    for index, tensor in enumerate(tape.externals):
        layout = inputs.get(index, (None,) * tensor.dim())
        externals.append((tape.external_paths[index], tensor.dtype, layout, tuple(0 if item else size for size, item in zip(tensor.shape, layout))))
    return calls, tuple(externals)


def _numbers_of(tape: Tape) -> tuple:
    """All that the calls got and did but for tensors, in order."""
    places = (Ref, External, Param)
    return tuple(item for call in tape.forward_calls for part in (call.leaves, call.operators) for item in part if not isinstance(item, places))


def _num_lengths(inputs: Mapping[int, Layout]) -> int:
    return len({length.symbol for layout in inputs.values() for length in layout if length})


def _fits(tape: Tape, inputs: Mapping[int, Layout], recognised: Mapping[int, Layout]) -> bool:
    """Whether an earlier recording's lengths can be those of this one, of which as many dims grow."""
    if {index: list(map(bool, layout)) for index, layout in inputs.items()} != {index: list(map(bool, layout)) for index, layout in recognised.items()}:
        return False
    sizes: dict[int, set] = {}
    for index, layout in inputs.items():
        for dim, length in enumerate(layout):
            if length is not None:
                sizes.setdefault(length.symbol, set()).add((_middle(tape.externals[index], dim, length), tape.externals[index].shape[dim] % length.factor))
    return all(len(found) == 1 and next(iter(found))[1] == 0 for found in sizes.values())


def _lengths(tape: Tape, inputs: Mapping[int, Layout]) -> tuple[int, ...]:
    found = {length.symbol: _middle(tape.externals[index], dim, length) for index, layout in inputs.items() for dim, length in enumerate(layout) if length}
    return tuple(found[symbol] for symbol in range(len(found)))


def _middle(tensor: Tensor, dim: int, length: Length) -> int:
    return tensor.shape[dim] // length.factor - length.offset


def _shown(lengths: Sequence[int]) -> str:
    return " x ".join(map(str, lengths))


def why_not_under(strategy: Strategy) -> str | None:
    """Why lengths are not bucketed under a strategy."""
    for name in (PP, CP, EP, "microbatches"):
        if (value := getattr(strategy, name)) > 1:
            return f"bucket_lengths does not go together with {name}={value}: pad the batches to a few lengths yourself, or choose dp, fsdp and tp"
    return None


def reads_lengths(tape: Tape, code: "GradientCode") -> bool:
    """Whether code on gradients reads values of the forward part, or tensors of the batch, that grow with a length."""
    grown = set(() if tape.bucket is None else tape.bucket.inputs)
    return bool(grown.intersection(code.external_indices)) or any(tape.values[index].dim() for index in code.forward_values)
