"""Times products, streams and collectives on the devices of this process; run by `graphacc.costs.calibrate` in a process of its own.

    echo '{"num_devices": null, "quick": false}' | python -m graphacc.costs.measure     # the last line of its output is JSON

All devices do the same at the same time, so that what is measured is what each gets while all run, also where they share cores. Every round runs all
programs, so that what else the machine does for a moment is in one of many rounds of each, and not in all rounds of one.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ALL: tuple[str, ...] = ("group", "pair")  # axes of the mesh: together all devices, and "pair" groups of two
_CHAIN = 4  # products, one after the other
_STREAMS = 8  # element-wise kernels, one after the other
_UPDATED = 4  # parameters of an update
_LAUNCHES = 64
_EXCHANGES = 4  # collectives, one after the other
_ROWS = {"short": 64, "long": 256}  # of the products between them
_LATE = 2**14  # bytes of the collectives by which lateness is measured
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One time, the shortest of several; of "lateness" the usual one."""

    kind: str  # "product", "stream", "update", "launch", "lateness" (what a collective takes more behind long products than behind short ones), or a collective
    seconds: float
    dtype: str = "fp32"
    dims: tuple[int, int, int] | None = None  # (m, k, n) of a product
    size_bytes: int = 0  # read and written; of a collective as in `collective_seconds`
    num_ranks: int = 1  # of a collective's groups
    computing_seconds: float = 0.0  # of "lateness": the products between two collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is measured."""

    products: tuple[tuple[int, int], ...]  # (smallest dim, the other two dims)
    streams: tuple[int, ...]  # bytes of one array on one device
    collectives: tuple[int, ...]  # bytes
    rounds: int  # of which the shortest counts


_ACCELERATOR = _Sizes(products=tuple((size, 8192) for size in (64, 256, 1024, 4096, 8192)), streams=(2**20, 2**23, 2**26, 2**28), collectives=(2**16, 2**20, 2**24, 2**28), rounds=10)
_CPU = _Sizes(products=((16, 256), (64, 256), (256, 256), (1024, 1024)), streams=(2**14, 2**17, 2**19, 2**21), collectives=(2**14, 2**16, 2**18, 2**20, 2**22), rounds=25)
_QUICK = _Sizes(products=((16, 256), (256, 256)), streams=(2**14, 2**20), collectives=(2**14, 2**18, 2**21), rounds=3)


def _chain_of_products(collective: Callable) -> Callable:
    """Collectives between products, each of which waits for the other: in a step ranks do not arrive together, and each meeting waits for the last of them.

    On virtual devices that share cores a collective takes 1.5 to 2.5 times as long so as in a row of collectives.
    """

    def chain(x, rows, weight):
        for _ in range(_EXCHANGES):
            x = collective(x)
            rows = lax.dot(rows, weight, precision=lax.Precision.HIGHEST) + x[0]
            x = lax.dynamic_update_index_in_dim(x, rows[0, 0], 0, 0)
        return x

    return chain


class _Timed:
    """A program of all devices, and the times of its runs.

    Args:
        in_place: it gives what it takes, which the next run takes.
    """

    def __init__(self, run: Callable, arrays: tuple[jax.Array, ...], *, in_place: bool = False):
        self._run, self._arrays, self._in_place = run, arrays, in_place
        self._rounds: list[float] = []
        self._start()
        start = time.perf_counter()
        self._start()
        self._count = max(1, round(0.005 / (time.perf_counter() - start)))  # runs of a round

    def _start(self) -> None:
        jax.block_until_ready(self._next())

    def _next(self) -> object:
        result = self._run(*self._arrays)
        if self._in_place:
            self._arrays = result
        return result

    def round(self) -> None:
        start = time.perf_counter()
        for _ in range(self._count):
            result = self._next()
        jax.block_until_ready(result)
        self._rounds.append((time.perf_counter() - start) / self._count)

    def seconds(self, dispatch: float) -> float:
        """Of the shortest run, without what a program of no work takes."""
        best = min(self._rounds)
        return max(best - dispatch, best / 10)

    def usual_seconds(self) -> float:
        """The median."""
        return statistics.median(self._rounds)

    def usual_seconds_more(self, other: "_Timed") -> float:
        """How much longer than the other's run of the same round: ranks are late in some runs only, and the machine's speed is not that of another round."""
        return statistics.median(mine - theirs for mine, theirs in zip(self._rounds, other._rounds, strict=True))


class _Bench:
    def __init__(self, devices: list, sizes: _Sizes):
        self.sizes, self.num_devices = sizes, len(devices)
        pairs = 2 if len(devices) % 2 == 0 else 1
        self.mesh = Mesh(np.array(devices).reshape(-1, pairs), _ALL)
        self.sharding = NamedSharding(self.mesh, PartitionSpec(_ALL))
        self._programs: list[_Timed] = []
        self._arrays: dict[tuple, jax.Array] = {}
        self._idle = self._timed(lambda x: x, self._array((8,)))

    def run(self) -> list[Measurement]:
        found = [self._product(*dims, dtype) for dtype in _DTYPES for dims in self.sizes.products]
        found += [*map(self._stream, self.sizes.streams), self._update(self.sizes.streams[-1]), self._launch(), *self._collectives(), *self._latenesses()]
        for _ in range(self.sizes.rounds):
            for program in self._programs:
                program.round()
        return [measured() for measured in found]

    def _product(self, smallest: int, width: int, dtype: str) -> Callable[[], Measurement]:
        def chain(x, weight):
            for _ in range(_CHAIN):
                x = lax.dot(x, weight, precision=lax.Precision.HIGHEST)
            return x

        timed = self._timed(chain, self._array((smallest, width), dtype), self._array((width, width), dtype))
        size = (2 * smallest * width + width**2) * jnp.dtype(_DTYPES[dtype]).itemsize
        return lambda: Measurement(kind="product", seconds=self._seconds(timed) / _CHAIN, dtype=dtype, dims=(smallest, width, width), size_bytes=size)

    def _stream(self, size: int) -> Callable[[], Measurement]:
        """Of one of several element-wise kernels as in training: each reads what was just written, and the later ones what the earlier ones have left, in turn.

        They are turns of loops, as XLA fuses what follows one another, on the CPU across `optimization_barrier` too.
        """

        def there_and_back(x):
            def forward(i, state):
                x, kept = state
                x = x * 2 + 1
                return x, lax.dynamic_update_index_in_dim(kept, x, i, 0)

            def backward(i, state):
                x, kept = state
                return x * lax.dynamic_index_in_dim(kept, _STREAMS - 1 - i, 0, keepdims=False) + 1, kept

            state = x, jnp.zeros((_STREAMS, *x.shape), x.dtype)
            return lax.fori_loop(0, _STREAMS, backward, lax.fori_loop(0, _STREAMS, forward, state))[0]

        timed = self._timed(there_and_back, self._array((size // 4,)))
        return lambda: Measurement(kind="stream", seconds=self._seconds(timed) / (2 * _STREAMS), size_bytes=3 * size)

    def _update(self, size: int) -> Callable[[], Measurement]:
        """Of Adam's update of parameters of `size` bytes each, in place: every run has the results of the one before."""

        def update(gradient, parameter, mean, square):
            mean, square = mean + (gradient - mean) * 0.1, square * 0.999 + gradient * gradient * 0.001
            return gradient, parameter * 0.999 - 1e-3 * mean / (jnp.sqrt(square) + 1e-8), mean, square

        def step(*tensors):
            return tuple(x for i in range(0, len(tensors), 4) for x in update(*tensors[i : i + 4]))

        ones = self._array((size // 4,))
        tensors = (ones + i for i in range(4 * _UPDATED))
        timed = self._timed(step, *tensors, in_place=True)
        return lambda: Measurement(kind="update", seconds=self._seconds(timed), size_bytes=7 * _UPDATED * size)

    def _launch(self) -> Callable[[], Measurement]:
        """Of one of many small kernels, which cannot be fused."""

        def chain(x):
            for _ in range(_LAUNCHES):
                x = lax.dot(x, x, precision=lax.Precision.HIGHEST)
            return x

        timed = self._timed(chain, self._array((8, 8)))
        return lambda: Measurement(kind="launch", seconds=self._seconds(timed) / _LAUNCHES)

    def _collectives(self) -> list[Callable[[], Measurement]]:
        if self.num_devices == 1:
            return []
        groups = {_ALL: self.num_devices}
        if self.num_devices > self.mesh.shape["pair"] == 2:
            groups[_ALL[1:]] = 2
        kinds: dict[str, Callable] = {  # each gives what it takes, so that several follow one another in one program, as in a step
            "all_gather": lambda x, axes: lax.all_gather(x, axes, tiled=True)[: len(x)],
            "reduce_scatter": lambda x, axes: lax.dynamic_update_slice_in_dim(x, lax.psum_scatter(x, axes, tiled=True), 0, 0),
            "all_reduce": lax.psum,
            "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
            "permute": self._to_the_next,
        }
        found: list[Callable[[], Measurement]] = []
        without: dict[int, _Timed] = {}
        for axes, num_ranks in groups.items():
            for kind, collective in kinds.items():
                for size in self.sizes.collectives[:: 1 if axes == _ALL else 2]:
                    count = size // 4 // num_ranks * num_ranks
                    length = count // num_ranks if kind == "all_gather" else count
                    if length not in without:
                        without[length] = self._timed(_chain_of_products(lambda x: x), *self._operands(length))
                    timed = self._timed(_chain_of_products(lambda x, run=collective, axes=axes: run(x, axes)), *self._operands(length))
                    found.append(functools.partial(self._exchange, kind, timed, without[length], 4 * count, num_ranks))
        return found

    def _latenesses(self) -> list[Callable[[], Measurement]]:
        """Of ranks that share cores: how much longer the same collective takes where more was computed before it."""
        if self.num_devices == 1 or self.mesh.devices.flat[0].platform != "cpu":
            return []
        programs = {}
        for length, rows in _ROWS.items():
            operands = self._operands(_LATE // 4, rows)
            programs[length] = self._timed(_chain_of_products(lambda x: x), *operands), self._timed(_chain_of_products(lambda x: lax.psum(x, _ALL)), *operands)

        def measured() -> Measurement:
            waits = {length: with_sums.usual_seconds_more(alone) / _EXCHANGES for length, (alone, with_sums) in programs.items()}
            computing = (programs["long"][0].usual_seconds() - programs["short"][0].usual_seconds()) / _EXCHANGES
            return Measurement(kind="lateness", seconds=waits["long"] - waits["short"], num_ranks=self.num_devices, computing_seconds=computing)

        return [measured]

    def _exchange(self, kind: str, timed: _Timed, without: _Timed, size: int, num_ranks: int) -> Measurement:
        products = self._seconds(without)
        seconds = max(self._seconds(timed) - products, products / 100) / _EXCHANGES
        return Measurement(kind=kind, seconds=seconds, size_bytes=size, num_ranks=num_ranks)

    def _operands(self, length: int, rows: int = _ROWS["short"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        width = 256
        return self._array((length,)), self._array((rows, width)), self._array((width, width))

    def _to_the_next(self, x: jax.Array, axes) -> jax.Array:
        """Every rank's array to the next rank of its group, as around a ring."""
        names = axes if isinstance(axes, tuple) else (axes,)
        count = math.prod(self.mesh.shape[name] for name in names)
        return lax.ppermute(x, axes, [(rank, (rank + 1) % count) for rank in range(count)])

    def _array(self, shape: tuple[int, ...], dtype: str = "fp32") -> jax.Array:
        """On every device one of this shape, whose sums and products stay small."""
        if (shape, dtype) not in self._arrays:
            whole = (shape[0] * self.num_devices, *shape[1:])
            self._arrays[shape, dtype] = jax.jit(lambda: jnp.full(whole, 1 / shape[-1], _DTYPES[dtype]), out_shardings=self.sharding)()
        return self._arrays[shape, dtype]

    def _timed(self, function: Callable, *arrays: jax.Array, in_place: bool = False) -> _Timed:
        """A program that every round runs."""
        spec = PartitionSpec(_ALL)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=tuple(spec for _ in arrays), out_specs=spec, check_vma=False)
        run = jax.jit(mapped, donate_argnums=range(len(arrays)) if in_place else ())
        self._programs.append(_Timed(run, arrays, in_place=in_place))
        return self._programs[-1]

    def _seconds(self, program: _Timed) -> float:
        return program.seconds(self._idle.seconds(0.0))


def main() -> None:
    """Reads what is asked for, measures, and prints what was found."""
    asked = json.load(sys.stdin)
    devices = jax.devices()
    if asked["num_devices"] is not None and asked["num_devices"] > len(devices):
        print(json.dumps({"error": f"{asked['num_devices']} devices were asked for, and {len(devices)} are there ({devices[0].device_kind}): ask for at most so many"}))
        return
    devices = devices[: asked["num_devices"]]
    sizes = _QUICK if asked["quick"] else _CPU if devices[0].platform == "cpu" else _ACCELERATOR
    measurements = _Bench(devices, sizes).run()
    memory = devices[0].memory_stats() or {}
    print(
        json.dumps(
            {
                "device_kind": devices[0].device_kind,
                "num_devices": len(devices),
                "memory_bytes": memory.get("bytes_limit"),
                "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
            }
        )
    )


if __name__ == "__main__":
    main()
