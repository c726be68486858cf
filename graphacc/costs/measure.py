"""Times products, streams and collectives on the devices of this process; run by `graphacc.costs.calibrate` in a process of its own.

    echo '{"num_devices": null, "quick": false}' | python -m graphacc.costs.measure     # the last line of its output is JSON

All devices do the same at the same time, so that what is measured is what each gets while all run, also where they share cores.
"""

import dataclasses
import json
import math
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
_LAUNCHES = 64
_EXCHANGES = 4  # collectives, one after the other
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One time, the shortest of several."""

    kind: str  # "product", "stream", "launch", or a collective
    seconds: float
    dtype: str = "fp32"
    dims: tuple[int, int, int] | None = None  # (m, k, n) of a product
    size_bytes: int = 0  # read and written; of a collective as in `collective_seconds`
    num_ranks: int = 1  # of a collective's groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is measured."""

    products: tuple[int, ...]  # smallest dims
    width: int  # the other two dims
    streams: tuple[int, ...]  # bytes of one array on one device
    collectives: tuple[int, ...]  # bytes
    rounds: int  # the shortest of so many counts


_ACCELERATOR = _Sizes(products=(64, 256, 1024, 4096, 8192), width=8192, streams=(2**20, 2**23, 2**26, 2**28), collectives=(2**16, 2**20, 2**24, 2**28), rounds=10)
_CPU = _Sizes(products=(16, 64, 256, 1024), width=1024, streams=(2**14, 2**17, 2**19, 2**21), collectives=(2**14, 2**16, 2**18, 2**20, 2**22), rounds=9)
_QUICK = _Sizes(products=(16, 256), width=256, streams=(2**14, 2**20), collectives=(2**14, 2**18, 2**21), rounds=3)


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


class _Bench:
    def __init__(self, devices: list, sizes: _Sizes):
        self.sizes, self.num_devices = sizes, len(devices)
        pairs = 2 if len(devices) % 2 == 0 else 1
        self.mesh = Mesh(np.array(devices).reshape(-1, pairs), _ALL)
        self.sharding = NamedSharding(self.mesh, PartitionSpec(_ALL))
        self.dispatch_seconds = 0.0
        self.dispatch_seconds = self._seconds(lambda x: x, self._array((8,)))

    def run(self) -> list[Measurement]:
        products = [self._product(size, dtype) for dtype in _DTYPES for size in self.sizes.products]
        return [*products, *map(self._stream, self.sizes.streams), self._launch(), *self._collectives()]

    def _product(self, smallest: int, dtype: str) -> Measurement:
        width = self.sizes.width

        def chain(x, weight):
            for _ in range(_CHAIN):
                x = lax.dot(x, weight, precision=lax.Precision.HIGHEST)
            return x

        seconds = self._seconds(chain, self._array((smallest, width), dtype), self._array((width, width), dtype))
        return Measurement(kind="product", seconds=seconds / _CHAIN, dtype=dtype, dims=(smallest, width, width))

    def _stream(self, size: int) -> Measurement:
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

        seconds = self._seconds(there_and_back, self._array((size // 4,)))
        return Measurement(kind="stream", seconds=seconds / (2 * _STREAMS), size_bytes=3 * size)

    def _launch(self) -> Measurement:
        """Of one of many small kernels, which cannot be fused."""

        def chain(x):
            for _ in range(_LAUNCHES):
                x = lax.dot(x, x, precision=lax.Precision.HIGHEST)
            return x

        return Measurement(kind="launch", seconds=self._seconds(chain, self._array((8, 8))) / _LAUNCHES)

    def _collectives(self) -> list[Measurement]:
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
        found, without = [], {}
        for axes, num_ranks in groups.items():
            for kind, collective in kinds.items():
                for size in self.sizes.collectives[:: 1 if axes == _ALL else 2]:
                    count = size // 4 // num_ranks * num_ranks
                    length = count // num_ranks if kind == "all_gather" else count
                    if length not in without:
                        without[length] = self._seconds(_chain_of_products(lambda x: x), *self._operands(length))
                    seconds = self._seconds(_chain_of_products(lambda x, run=collective, axes=axes: run(x, axes)), *self._operands(length)) - without[length]
                    found.append(Measurement(kind=kind, seconds=max(seconds, without[length] / 100) / _EXCHANGES, size_bytes=4 * count, num_ranks=num_ranks))
        return found

    def _operands(self, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        width = 256
        return self._array((length,)), self._array((64, width)), self._array((width, width))

    def _to_the_next(self, x: jax.Array, axes) -> jax.Array:
        """Every rank's array to the next rank of its group, as around a ring."""
        names = axes if isinstance(axes, tuple) else (axes,)
        count = math.prod(self.mesh.shape[name] for name in names)
        return lax.ppermute(x, axes, [(rank, (rank + 1) % count) for rank in range(count)])

    def _array(self, shape: tuple[int, ...], dtype: str = "fp32") -> jax.Array:
        """On every device one of this shape, whose sums and products stay small."""
        whole = (shape[0] * self.num_devices, *shape[1:])
        return jax.jit(lambda: jnp.full(whole, 1 / shape[-1], _DTYPES[dtype]), out_shardings=self.sharding)()

    def _seconds(self, function: Callable, *arrays: jax.Array) -> float:
        """Of one run on all devices, without what a program of no work takes."""
        spec = PartitionSpec(_ALL)
        run = jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=tuple(spec for _ in arrays), out_specs=spec, check_vma=False))
        jax.block_until_ready(run(*arrays))
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        count = max(1, round(0.005 / (time.perf_counter() - start)))
        best = float("inf")
        for _ in range(self.sizes.rounds):
            start = time.perf_counter()
            for _ in range(count):
                result = run(*arrays)
            jax.block_until_ready(result)
            best = min(best, (time.perf_counter() - start) / count)
        return max(best - self.dispatch_seconds, best / 10)


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
