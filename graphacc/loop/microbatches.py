"""What is cut into microbatches besides the model's arguments, and numbers that the loop takes of their results.

Of the tensors that the loop gives (labels, but also tables of prototypes, and weights of classes) those are cut without which its code cannot be run on a
part of the batch. Of the numbers (right answers, a maximum) a mean is the mean of the microbatches' means; any other number is computed by PyTorch, of values
with the batch in dim 0, which are put together.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.capture.diagnose import Passing
from graphacc.loop.tape import Call, Param, Ref, Tape

_MEANS = {torch.mean, Tensor.mean}
_LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.gaussian_nll_loss, F.poisson_nll_loss, F.margin_ranking_loss, F.hinge_embedding_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.soft_margin_loss),
    *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.ctc_loss, F.kl_div, F.triplet_margin_with_distance_loss),
}
"""Functions that give a mean over the batch unless they are told otherwise."""
_LINEAR = {getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "neg", "mul", "rmul", "truediv")}
_LINEAR |= {getattr(owner, name) for owner in (torch, Tensor) for name in ("add", "sub", "mul", "div", "neg")}
_SAME = {Tensor.detach, Tensor.clone, Tensor.float, Tensor.double, Tensor.cpu, Tensor.squeeze, Tensor.mean}


class CutOtherwise(Passing):
    """Code cannot be run on a part of the batch; further tensors are cut in the next attempt."""


class Attempts:
    """What is cut in one capture after the other, until the code can be run: `Engine.cut`."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self._before: dict[int, frozenset[int]] = {}  # call that failed -> what was cut then
        self._left: dict[int, list[frozenset[int]]] = {}  # and what may be cut besides

    def cut_more(self, env: Mapping[int, Tensor]) -> bool:
        """After a replay that failed; False if nothing is left to be tried.

        Args:
            env: the values that it gave.
        """
        tape, calls = self.tape, self.tape.forward_calls
        cut = tape.engine.cut.get(tape.forward_key, frozenset())
        failed = next((place for place, call in enumerate(calls) if not env.keys() >= set(call.results)), len(calls))
        if failed not in self._left:
            self._before[failed] = cut
            here = sorted(self._candidates(calls[failed]) - cut) if failed < len(calls) else []
            earlier = frozenset(index for call in calls[:failed] for index in self._candidates(call)) - cut
            options = [frozenset({index}) for index in here] + [frozenset(here)] * (len(here) > 1) + [frozenset({*here, *earlier})] * bool(earlier)
            self._left[failed] = options
        if not self._left[failed]:
            return False
        tape.engine.cut[tape.forward_key] = self._before[failed] | self._left[failed].pop(0)
        return True

    def _candidates(self, call: Call) -> set[int]:
        """The tensors among a call's arguments that may be cut: of the size of the batch, or with the rows of each example together, as a result beside them has them."""
        tape, size = self.tape, _batch_size(self.tape)
        makers = {index: other for other in tape.forward_calls for index in other.results}
        flat = {tape.values[leaf.index].shape[0] for leaf in call.leaves if isinstance(leaf, Ref) and size is not None and _is_flat(tape, makers, leaf.index, size)}
        found = tape.loose.intersection(call.externals)
        return {index for index in found if tape.externals[index].dim() and tape.externals[index].shape[0] in {size, *flat}}


def _is_flat(tape: Tape, makers: Mapping[int, Call], index: int, size: int) -> bool:
    """Whether dim 0 of a result is the batch and dims behind it in one, in this order."""
    shape = tape.values[index].shape
    call = makers.get(index)
    if call is None or tape.engine.is_model(call.function) or not shape or shape[0] == size or shape[0] % size:
        return False
    for leaf in call.leaves:
        if isinstance(leaf, Ref) and tape.values[leaf.index].dim():
            if tape.values[leaf.index].shape[0] == size and call.function in _FLATTENS:
                return True
            if tape.values[leaf.index].shape[0] == shape[0] and _is_flat(tape, makers, leaf.index, size):
                return True
    return False


_FLATTENS = {Tensor.flatten, Tensor.view, Tensor.reshape, torch.flatten, torch.reshape}


@contextlib.contextmanager
def expected_failures() -> Iterator[None]:
    """What is tried inside may fail, of which torch need not tell."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def note_of_repetition(count: int, repeated: str) -> str:
    """What the user should know where every microbatch does the work of all."""
    return (
        f"with microbatches={count} the loss is that of the whole batch, but every microbatch computes {repeated}, for the whole batch, which costs time and memory: "
        "name the dim of the examples by graphacc.compile(..., batch_dims={...}), let the forward take rows by tensors' sizes, or leave microbatches out"
    )


def note_of_loss(tape: Tape, why: str) -> str:
    """What the user should know of a loss that is the mean of the microbatches' own.

    Args:
        why: the microbatches cannot be computed so that together they give what the batch gives.
    """
    size, count = _batch_size(tape), tape.engine.programs.strategy.microbatches
    makers = {index: call for call in tape.forward_calls for index in call.results}
    note = f"with microbatches={count} every microbatch stands for itself, as in a loop that accumulates gradients, and the loss is the mean of theirs: {why}"
    if tape.loss is None or size is None or _is_mean(tape, makers, tape.loss, size):
        return note
    return (
        f"{note}. This loss is not seen to be a mean over the batch: of a sum, or of a sum over the size of the whole batch, the mean is 1/{count}: take .mean(), or multiply by {count}. "
        "Where it sets rows of the batch in relation to each other (pairs by chunk(2)), every microbatch makes pairs of its own: leave microbatches out, or put the pairs into a dim of "
        "their own, behind the batch"
    )


def numbers_of_batch(tape: Tape) -> dict[int, tuple[list[Call], set[int]]]:
    """The numbers among `tape.outputs` that are no means of the microbatches' ones, each with the calls that give it and the values that these begin with."""
    size, calls = _batch_size(tape), tape.forward_calls
    if size is None or any(call.writes or call.replaces is not None for call in calls):
        return {}
    makers = {index: call for call in calls for index in call.results}
    found = {}
    for index in tape.outputs:
        if tape.values[index].dim() == 0 and index in makers and not _is_mean(tape, makers, index, size):
            path = _back(tape, makers, index, size)
            if path is not None:
                numbers, starts = path
                found[index] = [call for call in calls if any(call is other for other in numbers)], starts
    return found


def computed(tape: Tape, index: int, calls: list[Call], starts: set[int]) -> Callable[[], Tensor]:
    """A function that computes a number of values of the whole batch."""

    def fetch() -> Tensor:
        env = {start: tape.value(start) for start in starts}
        externals = {place: tape.given(place) for call in calls for place in call.externals}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            tape.replay(calls, env, externals, {})
        return env[index]

    return fetch


def _is_mean(tape: Tape, makers: dict[int, Call], index: int, size: int) -> bool:
    """Whether a number is a mean over the batch, or a sum of such, or one that does not depend on the batch at all."""
    call = makers.get(index)
    if call is None or tape.engine.is_model(call.function):
        return True  # what the model itself gives is taken for a mean, as its loss is
    inputs = [leaf.index for leaf in call.leaves if isinstance(leaf, Ref)]
    args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)
    if call.function in _LOSSES:
        return kwargs.get("reduction", "mean") in ("mean", "batchmean") and "sum" not in args and kwargs.get("size_average") is None
    if call.function in _MEANS and all(_has_batch(tape, i, size) for i in inputs):
        return True
    if call.function in _SAME | _LINEAR:
        return len(inputs) <= (1 if _multiplies(call.function) else 2) and all(tape.values[i].dim() == 0 and _is_mean(tape, makers, i, size) for i in inputs)
    return False


def _multiplies(function: Callable) -> bool:
    return any(word in function.__name__ for word in ("mul", "div"))


def _back(tape: Tape, makers: dict[int, Call], index: int, size: int) -> tuple[list[Call], set[int]] | None:
    """The calls from values with the batch in dim 0 to a number, and those values; None if it is computed of something else, too."""
    calls, starts, stack = [], set(), [index]
    while stack:
        call = makers[stack.pop()]
        if tape.engine.is_model(call.function) or call.draws or any(isinstance(leaf, Param) for leaf in call.leaves):
            return None
        calls.append(call)
        for leaf in call.leaves:
            if not isinstance(leaf, Ref) or leaf.index in starts:
                continue
            if _has_batch(tape, leaf.index, size):
                starts.add(leaf.index)
            else:
                stack.append(leaf.index)
    return calls, starts


def _batch_size(tape: Tape) -> int | None:
    return next((leaf.shape[0] for index, leaf in enumerate(tape.externals) if leaf.dim() and index not in tape.loose), None)


def _has_batch(tape: Tape, index: int, size: int) -> bool:
    shape = tape.values[index].shape
    return bool(shape) and shape[0] == size
