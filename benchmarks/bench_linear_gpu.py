"""Linear layers and stacks of products on a Hopper GPU, through the public functions: XLA's and ours in the same run.

    python -m benchmarks.bench_linear_gpu

`forward` is a product, `both` the product and its two gradients. Times are device times of all kernels of a call
(CUPTI), medians of rounds in turns, as long products heat a GPU; calls cycle through sets of arguments that together do
not fit into the L2 cache. `temporary` is what the compiled program needs in addition to its arguments and results, in
MB.
"""

import argparse
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.device_time import in_turns_us
from benchmarks.harness import add_json, cell, save

ROTATED_BYTES: Final = 250_000_000  # several times the L2 cache
THREADS: Final = 8
CALLS: Final = 12

Product = Callable[[jax.Array, jax.Array], jax.Array]


class Case(NamedTuple):
    """One line of the table: a product of x (..., M, K) and w (..., K, N), or (N, K)."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    transpose_w: bool = False
    backward: bool = True


CASES: Final = (
    Case("linear", (4096, 4096), (4096, 4096)),
    Case("linear (N, K)", (4096, 4096), (4096, 4096), transpose_w=True),
    Case("linear", (8192, 4096), (4096, 14336)),
    Case("linear", (512, 4096), (4096, 4096)),
    Case("linear", (16, 4096), (4096, 4096)),
    Case("linear", (2048, 576), (576, 1536)),
    Case("stack", (32, 512, 512), (32, 512, 512), backward=False),
    Case("stack", (256, 128, 128), (256, 128, 128), backward=False),
    Case("stack", (32, 512, 512), (32, 512, 512)),
    Case("stack", (256, 128, 128), (256, 128, 128)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_linear_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    with ThreadPoolExecutor(THREADS) as pool:
        pending = [[pool.submit(compiled, case, product) for product in products(case)] for case in CASES]
        programs = [[program.result() for program in row] for row in pending]
    cells = [measure(case, row) for case, row in zip(CASES, programs, strict=True)]
    save("linear_bf16", cells, arguments.json)


def products(case: Case) -> tuple[Product, Product, Product]:
    """Returns XLA's product, the library's, and XLA's program under `bijax.invariant`."""

    def stock(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w.swapaxes(-1, -2) if case.transpose_w else w)

    return stock, functools.partial(bijax.matmul, transpose_w=case.transpose_w), bijax.invariant(stock)


def compiled(case: Case, product: Product) -> Any:
    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(product, x, w)
        return y, *pull(g)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes(case)]
    return jax.jit(both if case.backward else product).lower(*arrays).compile()


def shapes(case: Case) -> list[tuple[int, ...]]:
    g = (*case.x[:-1], case.w[-2 if case.transpose_w else -1])
    return [case.x, case.w, g] if case.backward else [case.x, case.w]


def measure(case: Case, programs: list[Any]) -> dict[str, Any]:
    sizes = shapes(case)
    sets = max(2, min(8, math.ceil(ROTATED_BYTES / sum(2 * math.prod(s) for s in sizes))))
    data = [tuple(array(s, seed + i) for i, s in enumerate(sizes)) for seed in range(sets)]
    xla_us, ours_us, invariant_us = in_turns_us(programs, data, CALLS)
    temporary = [round(program.memory_analysis().temp_size_in_bytes / 1e6, 3) for program in programs]
    flops = 2 * math.prod(case.x) * sizes[1][-2 if case.transpose_w else -1] * (3 if case.backward else 1)
    found = cell(
        ours_us,
        xla_us,
        case=case.name,
        x=case.x,
        w=case.w,
        what="both" if case.backward else "forward",
        invariant_us=round(invariant_us, 2),
        temporary_xla_mb=temporary[0],
        temporary_ours_mb=temporary[1],
        temporary_invariant_mb=temporary[2],
    )
    print(
        f"{case.name:14s} {found['what']:8s} {case.x!s:18s} {case.w!s:18s} xla {xla_us:8.2f} us  ours {ours_us:8.2f} us"
        f"  ratio {found['ratio']:.3f}  {flops / ours_us / 1e6:4.0f} TFLOP/s  invariant {xla_us / invariant_us:.3f}"
        f"  temporary MB {temporary}",
        flush=True,
    )
    return found


def array(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.resize(np.roll(pattern(), 7919 * seed), shape))


@functools.cache
def pattern() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(4_000_037).astype(jnp.bfloat16)


if __name__ == "__main__":
    main()
