"""Random operators of the model, rewritten while tracing to counter-based ones on the step's key.

Every random operator gets a stream of its own, numbered in the order of the program, and its values depend on the key, the
stream and the element's global index alone (see graphacc.ops.random). Numbers differ from those of torch's generators;
distributions are the same, up to 24 random bits in a uniform number.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc.errors import CaptureError

aten = torch.ops.aten


_IN_PLACE = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
}


class Streams:
    """Decompositions of the random operators of one trace.

    Args:
        key: the traced key input, int64[2].
        first: number of the first stream.
    """

    def __init__(self, key: Tensor, first: int = 0):
        self.key = key
        self.count = first

    @contextlib.contextmanager
    def numbering(self) -> Iterator[None]:
        """`streams_from` is about these inside."""
        _numbering.now, before = self, getattr(_numbering, "now", None)
        try:
            yield
        finally:
            _numbering.now = before

    def table(self) -> dict[torch._ops.OpOverload, Callable]:
        """Operator -> decomposition, for `trace_functional`."""
        return {
            aten.rand.default: self._rand,
            aten.rand.generator: self._rand,
            aten.rand_like.default: self._rand_like,
            aten.randn.default: self._randn,
            aten.randn.generator: self._randn,
            aten.randn_like.default: self._randn_like,
            aten.randint.default: lambda high, size, **kw: self._randint(0, high, size, **kw),
            aten.randint.low: self._randint,
            aten.randint_like.default: lambda x, high, **kw: self._randint(0, high, x.shape, **{"dtype": x.dtype, **kw}),
            aten.randint_like.low_dtype: lambda x, low, high, **kw: self._randint(low, high, x.shape, **{"dtype": x.dtype, **kw}),
            aten.randperm.default: self._randperm,
            aten.bernoulli.default: lambda p, generator=None: (self.uniform(p.shape) >= 1 - p).to(p.dtype),
            aten.bernoulli.p: lambda x, p=0.5, generator=None: (self.uniform(x.shape) >= 1 - p).to(x.dtype),
            aten.bernoulli.Tensor: lambda x, p, generator=None: (self.uniform(x.shape) >= 1 - p).to(x.dtype),
            aten.native_dropout.default: self._dropout,
            aten.uniform.default: self._uniform,
            aten.exponential.default: self._exponential,
            aten.normal_functional.default: self._normal,
            aten.normal.float_Tensor: lambda mean, std, generator=None: mean + std * self.gaussian(std.shape, std.dtype),
            aten.normal.Tensor_float: lambda mean, std=1.0, generator=None: mean + std * self.gaussian(mean.shape, mean.dtype),
            aten.normal.Tensor_Tensor: self._normal_tensors,
            aten.normal.float_float: self._normal_size,
            aten.multinomial.default: self._multinomial,
            aten.rrelu_with_noise_functional.default: self._rrelu,
        }

    def bits(self, size) -> Tensor:
        """32 random bits per element, int64."""
        size = list(size)
        stream, self.count = self.count, self.count + 1
        return torch.ops.graphacc.random_bits(self.key, stream, size, size, None)

    def uniform(self, size) -> Tensor:
        """Uniform float32 in [0, 1)."""
        size = list(size)
        stream, self.count = self.count, self.count + 1
        return torch.ops.graphacc.random_uniform(self.key, stream, size, size, None)

    def gaussian(self, size, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, by Box and Muller's transform of two uniform streams."""
        radius = torch.sqrt(-2.0 * torch.log(1.0 - self.uniform(size)))
        return (radius * torch.cos(2.0 * math.pi * self.uniform(size))).to(dtype)

    def _rand(self, size, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
        return self.uniform(size).to(dtype or torch.get_default_dtype())

    def _rand_like(self, x: Tensor, *, dtype=None, **_layout) -> Tensor:
        return self.uniform(x.shape).to(dtype or x.dtype)

    def _randn(self, size, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
        return self.gaussian(size, dtype or torch.get_default_dtype())

    def _randn_like(self, x: Tensor, *, dtype=None, **_layout) -> Tensor:
        return self.gaussian(x.shape, dtype or x.dtype)

    def _randint(self, low: int, high: int, size, *, dtype=None, **_layout) -> Tensor:
        if high - low > 2**32:
            raise CaptureError(
                f"randint over [{low}, {high}) spans more than 2**32 values, a random operator gives 32 bits; narrow the range"
            )
        return (self.bits(size) % (high - low) + low).to(dtype or torch.int64)

    def _randperm(self, n: int, *, dtype=None, **_layout) -> Tensor:
        return torch.argsort(self.bits([n]), stable=True).to(dtype or torch.int64)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0.0:
            return x, torch.ones(x.shape, dtype=torch.bool, device=x.device)
        kept = self.uniform(x.shape) >= p
        return x * kept.to(x.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept

    def _rrelu(self, x: Tensor, noise: Tensor, lower=0.125, upper=1 / 3, training: bool = False, generator=None) -> tuple[Tensor, Tensor]:
        """The result, and the noise that the backward reads; in evaluation it reads none."""
        if not training:
            return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise
        slope = torch.where(x > 0, 1.0, self.uniform(x.shape) * (upper - lower) + lower).to(x.dtype)
        return x * slope, slope

    def _uniform(self, x: Tensor, low: float = 0.0, high: float = 1.0, generator=None) -> Tensor:
        return (self.uniform(x.shape) * (high - low) + low).to(x.dtype)

    def _exponential(self, x: Tensor, lambd: float = 1.0, generator=None) -> Tensor:
        return (-torch.log(1.0 - self.uniform(x.shape)) / lambd).to(x.dtype)

    def _normal(self, x: Tensor, mean: float = 0.0, std: float = 1.0, generator=None) -> Tensor:
        return self.gaussian(x.shape, x.dtype) * std + mean

    def _normal_tensors(self, mean: Tensor, std: Tensor, generator=None) -> Tensor:
        shape = torch.broadcast_shapes(mean.shape, std.shape)
        return mean + std * self.gaussian(shape, torch.result_type(mean, std))

    def _normal_size(self, mean: float, std: float, size, *, generator=None, dtype=None, **_layout) -> Tensor:
        return self.gaussian(size, dtype or torch.get_default_dtype()) * std + mean

    def _multinomial(self, weights: Tensor, num_samples: int, replacement: bool = False, generator=None) -> Tensor:
        """The largest of weight / exponential noise: without replacement the first few, with it one draw per sample."""
        if not replacement:
            noise = -torch.log(1.0 - self.uniform(weights.shape))
            return torch.topk(weights / noise.clamp_min(1e-30), num_samples, dim=-1)[1]
        shape = [*weights.shape[:-1], num_samples, weights.shape[-1]]
        noise = -torch.log(1.0 - self.uniform(shape))
        return torch.argmax(weights.unsqueeze(-2) / noise.clamp_min(1e-30), dim=-1)


_numbering = threading.local()


@contextlib.contextmanager
def streams_from(first: int | None) -> Iterator[int]:
    """Number the streams inside from `first` on, which others may have had, and those after it as ever; None goes on with the next number. Yields the first number."""
    streams: Streams | None = getattr(_numbering, "now", None)
    if streams is None:
        yield 0
        return
    reached = streams.count
    streams.count = reached if first is None else first
    yield streams.count
    streams.count = max(reached, streams.count)


def keyed_randomness(seed: int, counter: int, first: int = 0) -> "KeyedRandomness":
    """A mode in which PyTorch draws the numbers that a captured step draws with this key, operator by operator, from stream `first` on."""
    return KeyedRandomness(torch.tensor([seed & 0xFFFFFFFF, counter & 0xFFFFFFFF], dtype=torch.int64), first)


class KeyedRandomness(TorchDispatchMode):
    """See `keyed_randomness`."""

    supports_higher_order_operators = True  # which run as they are (flex_attention's, which draws nothing)

    def __init__(self, key: Tensor, first: int):
        super().__init__()
        self._streams = Streams(key, first)
        self._table = self._streams.table()
        self._open = contextlib.ExitStack()

    def __enter__(self):
        self._open.enter_context(self._streams.numbering())
        return super().__enter__()

    def __exit__(self, *failure):
        self._open.close()
        return super().__exit__(*failure)

    @property
    def count(self) -> int:
        """The number of the next stream."""
        return self._streams.count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.rrelu_with_noise.default:
            result, noise = self._table[aten.rrelu_with_noise_functional.default](*args, **kwargs)
            args[1].copy_(noise)
            return result
        rule = self._table.get(_IN_PLACE.get(func, func))
        if rule is None:
            return func(*args, **kwargs)
        result = rule(*args, **kwargs)
        return args[0].copy_(result) if func in _IN_PLACE else result


class DrawsNoted(TorchDispatchMode):
    """Notes whether an operator inside draws random numbers, of those that a captured step draws with its key."""

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.native_dropout.default:
            self.found |= args[1] != 0.0 and args[2] is not False
        elif func in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_functional.default):
            self.found |= bool(args[4] if len(args) > 4 else kwargs.get("training", False))
        elif _IN_PLACE.get(func, func) in _DRAWING:
            self.found = True
        return func(*args, **kwargs)


_DRAWING = frozenset(Streams(torch.empty(0)).table())
