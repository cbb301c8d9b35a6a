"""Products with an epilogue, gated products and split K on a Hopper GPU, through the public functions, and XLA's.

    python -m benchmarks.bench_fused_gpu

XLA gets the same formula under `jax.jit` and fuses what it can. Times are device times of all kernels of a call
(CUPTI), medians of rounds in turns; calls cycle through sets of arguments that together do not fit into the L2 cache.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import bijax
from benchmarks.bench_linear_gpu import CALLS, ROTATED_BYTES, THREADS, array
from benchmarks.device_time import in_turns_us
from benchmarks.harness import add_json, cell, save

Shape = tuple[int, ...]


class Case(NamedTuple):
    """One line of the table."""

    name: str
    m: int
    k: int
    n: int
    shapes: tuple[Shape, ...]
    xla: Callable[..., jax.Array]
    ours: Callable[..., jax.Array]


def cases() -> Iterator[Case]:
    """Yields bias and activation, bias, residual, gated products, then `split_k="auto"`."""
    for k, n in ((4096, 4096), (4096, 14336)):
        for m in (8, 64, 512, 4096):
            x, w, bias, y = (m, k), (k, n), (n,), (m, n)
            for name in ("gelu", "silu"):
                activation = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}[name]
                yield Case(
                    f"bias, {name}",
                    *(m, k, n),
                    (x, w, bias),
                    lambda x, w, b, f=activation: f(x @ w + b),
                    lambda x, w, b, f=name: bijax.matmul(x, w, bias=b, activation=f),
                )
            yield Case(
                "bias", m, k, n, (x, w, bias), lambda x, w, b: x @ w + b, lambda x, w, b: bijax.matmul(x, w, bias=b)
            )
            yield Case(
                "residual",
                *(m, k, n),
                (x, w, y),
                lambda x, w, r: x @ w + r,
                lambda x, w, r: bijax.matmul(x, w, residual=r),
            )
            if n != k:
                yield Case(
                    "gated, silu",
                    *(m, k, n),
                    (x, w, w),
                    lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
                    bijax.gated_matmul,
                )
    for k, n in ((8192, 1280), (4096, 1024)):
        for m in (1, 8, 16, 32, 64, 128):
            yield Case("shards", m, k, n, ((m, k), (k, n)), jnp.matmul, lambda x, w: bijax.matmul(x, w, split_k="auto"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_fused_gpu needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    found = list(cases())
    with ThreadPoolExecutor(THREADS) as pool:
        pending = [[pool.submit(compiled, case, program) for program in (case.xla, case.ours)] for case in found]
        programs = [[program.result() for program in row] for row in pending]
    cells = [measure(case, *row) for case, row in zip(found, programs, strict=True)]
    save("fused_bf16", cells, arguments.json)


def compiled(case: Case, program: Callable[..., jax.Array]) -> Any:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.shapes]
    return jax.jit(program).lower(*arrays).compile()


def measure(case: Case, xla: Any, ours: Any) -> dict[str, Any]:
    sets = max(2, min(16, math.ceil(ROTATED_BYTES / sum(2 * math.prod(s) for s in case.shapes))))
    data = [tuple(array(s, seed + i) for i, s in enumerate(case.shapes)) for seed in range(sets)]
    xla_us, ours_us = in_turns_us([xla, ours], data, CALLS)
    temporary = [round(program.memory_analysis().temp_size_in_bytes / 1e6, 3) for program in (xla, ours)]
    line = cell(
        ours_us,
        xla_us,
        m=case.m,
        k=case.k,
        n=case.n,
        case=case.name,
        temporary_xla_mb=temporary[0],
        temporary_ours_mb=temporary[1],
    )
    print(
        f"{case.name:12s} {case.m:5d} {case.k:6d} {case.n:7d}  xla {xla_us:8.2f} us  ours {ours_us:8.2f} us"
        f"  ratio {line['ratio']:.3f}  temporary MB {temporary}",
        flush=True,
    )
    return line


if __name__ == "__main__":
    main()
