"""The cost of `bijax.invariant` for factorisations of many small matrices on a CPU, and for a small Gaussian process.

    python -m benchmarks.bench_linalg [--json FILE]

`ratio` is plain JAX's time over that of the same function under `bijax.invariant`, `first_ratio` the same of the first
call, with nothing cached; both in processor time, with alternating calls.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.scipy.linalg import expm, solve_triangular

import bijax
from benchmarks.harness import cell, processor_us, run

BATCHES: Final = (8, 64, 512)
SIZES: Final = {"float32": (2, 6, 16), "float64": (3, 6, 16)}
FIRST_CALLS: Final = 2
SHORTEST_S: Final = 0.01
"""How long a timed call takes at least."""

Function = Callable[[jax.Array], Any]


def gradient(function: Function) -> Function:
    """The gradient of a number that is made of all results."""
    return jax.grad(lambda x: sum(jnp.sin(r).sum() for r in jax.tree.leaves(function(x))))


def evidence(x: jax.Array) -> jax.Array:
    """The log-likelihood of Gaussian processes at the first column of matrices, with values of the second one."""

    def one(at: jax.Array, values: jax.Array) -> jax.Array:
        kernel = jnp.exp(-0.5 * ((at[:, None] - at) / 0.7) ** 2) + 0.01 * jnp.eye(len(at))
        lower = jnp.linalg.cholesky(kernel)
        white = solve_triangular(lower, values, lower=True)
        return -0.5 * (white * white).sum() - jnp.log(jnp.diagonal(lower)).sum()

    return jax.vmap(one)(x[:, :, 0] * 5, x[:, :, 1])


FUNCTIONS: Final[dict[str, Function]] = {
    "inv": jnp.linalg.inv,
    "solve": lambda a: jnp.linalg.solve(a, a[:, :, :1]),
    "cholesky": jnp.linalg.cholesky,
    "eigh": jnp.linalg.eigh,
    "svd": jnp.linalg.svd,
    "qr": jnp.linalg.qr,
    "lu": jax.scipy.linalg.lu,
    "triangular_solve": lambda a: solve_triangular(a, a, lower=True),
    "det": jnp.linalg.det,
    "slogdet": jnp.linalg.slogdet,
    "pinv": jnp.linalg.pinv,
    "lstsq": jax.vmap(lambda a: jnp.linalg.lstsq(a, a[:, :1])[0]),
    "expm": expm,
    "gradient of inv": gradient(jnp.linalg.inv),
    "gradient of solve": gradient(lambda a: jnp.linalg.solve(a, a[:, :, :1])),
    "gradient of cholesky": gradient(jnp.linalg.cholesky),
    "gradient of eigh": gradient(jnp.linalg.eigh),
    "gradient of svd": gradient(lambda a: jnp.linalg.svd(a, full_matrices=False)),
    "Gaussian process": evidence,
    "gradient of a Gaussian process": gradient(evidence),
}


def matrices(batch: int, n: int, dtype: str) -> jax.Array:
    """Symmetric positive definite matrices."""
    x = jax.random.normal(jax.random.key(n), (batch, n, n), dtype)
    return x @ x.mT / n + jnp.eye(n, dtype=dtype)


def repeated(function: Callable[..., Any], x: jax.Array, times: int) -> Callable[[], Any]:
    """Returns a call that runs a program several times: the clock of all threads is too coarse for a single run."""

    def call() -> Any:
        for _ in range(times):
            found = jax.block_until_ready(function(x))
        return found

    return call


def first_s(function: Callable[..., Any], x: jax.Array) -> float:
    """Returns the least processor time of several first calls, in seconds."""
    taken = []
    for _ in range(FIRST_CALLS):
        jax.clear_caches()
        start = time.process_time()
        jax.block_until_ready(jax.jit(function)(x))
        taken.append(time.process_time() - start)
    return min(taken)


def wall_s(program: Callable[..., Any], x: jax.Array) -> float:
    """Returns about how long a run of a compiled program takes, in seconds."""
    jax.block_until_ready(program(x))
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    return time.perf_counter() - start


def measure(case: tuple[str, str, int, int]) -> dict[str, Any]:
    name, dtype, n, batch = case
    with jax.enable_x64(dtype == "float64"):
        x = matrices(batch, n, dtype)
        plain, ours = FUNCTIONS[name], bijax.invariant(FUNCTIONS[name])
        plain_s, ours_s = (first_s(function, x) for function in (plain, ours))
        programs = [jax.jit(function) for function in (ours, plain)]
        times = max(1, round(SHORTEST_S / max(wall_s(program, x) for program in programs)))
        calls = [repeated(program, x, times) for program in programs]
        ours_us, plain_us = (us / times for us in processor_us(calls, seconds=0.4))
    found = cell(ours_us, plain_us, function=name, dtype=dtype, n=n, batch=batch)
    return {
        **found,
        "first_ours_s": round(ours_s, 3),
        "first_xla_s": round(plain_s, 3),
        "first_ratio": round(plain_s / ours_s, 3),
    }


def main() -> None:
    cases = [
        (name, dtype, n, batch)
        for name in FUNCTIONS
        for dtype, sizes in SIZES.items()
        for n in sizes
        for batch in BATCHES
    ]
    run("linalg", cases, measure)


if __name__ == "__main__":
    main()
