"""What a contract's result is, by a reference that is slow and sure, and hostile operands to compare it on.

The reference multiplies one row at a time by weights (K, N), block by block. XLA's own code for that is a loop over K
around fused multiply-adds on whole vectors of columns; columns that fill no vector would take another road, so they
are padded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import MatmulContract
from pallas_kernels.ops.matmul.cpu.forms import in_blocks, stack_rows
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import isolate, next_power_of_two

_VECTOR = 8
_LARGE = 1 << 20
_COLUMNS_AT_A_TIME = 2048
_FEWEST_COLUMNS = 256
_MOST_TRIALS = 32
_TRIED_PRODUCTS = 1 << 20


def reference(x: jax.Array, w: jax.Array, k_block: int, *, transpose_w: bool = False) -> jax.Array:
    """(1, K) x (K, N), or (N, K) with `transpose_w`, in the contract's order by construction."""
    if transpose_w:
        (w,) = isolate(row_major(w.T))
    n = w.shape[1]
    if n % _VECTOR:
        (w,) = isolate(jnp.pad(w, ((0, 0), (0, -n % _VECTOR))))
    return in_blocks(stack_rows, x[None], w[None], k_block)[0, :, :n]


def trials(rows: int, k: int, n: int) -> int:
    """Returns on how many sets of operands to compare a program.

    A short sum in another order comes out alike in three elements of four, and small programs have few elements: each
    position of the result has to be looked at often. Long sums differ nearly always.

    Args:
        rows: Rows of the program, those of all entries of a stack together.
        k: Length of the contracted dimension.
        n: Columns of the result.
    """
    return max(1, min(_MOST_TRIALS, _TRIED_PRODUCTS // (rows * k * n)))


def probe_rows(k: int, dtype: str = "float32", trial: int = 0) -> np.ndarray:
    """Returns hostile rows (3, k): normal, of a huge dynamic range, and `linspace(-100, 100)`."""
    rng = np.random.default_rng((k, trial))
    rows = rng.standard_normal((3, k))
    rows[1] *= 2.0 ** rng.integers(-30, 30, k)
    rows[2] = np.linspace(-100, 100, k)
    return rows.astype(dtype)


def probe_weights(k: int, n: int, transpose_w: bool, trial: int = 0) -> Any:
    """Returns an array of weights spread over [-1, 1); large ones, as those of a vocabulary, are made by XLA."""
    shape = (n, k) if transpose_w else (k, n)
    if k * n > _LARGE:
        return ahead_of_time(functools.partial(_scatter, jnp, *shape, trial))()
    return _scatter(np, *shape, trial)


def _scatter(xp: Any, rows: int, columns: int, trial: int) -> Any:
    i, j = xp.arange(rows, dtype=xp.uint32)[:, None], xp.arange(columns, dtype=xp.uint32)
    mixed = (i * xp.uint32(0x9E3779B1) + j + xp.uint32(trial << 20)) * xp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> xp.uint32(15))) * xp.uint32(0xC2B2AE35)
    return (mixed >> xp.uint32(8)).astype(xp.float32) * xp.float32(2.0**-23) - xp.float32(1)


@functools.lru_cache(maxsize=1024)
def expected(k: int, n: int, contract: MatmulContract, transpose_w: bool, trial: int = 0) -> np.ndarray:
    """Returns the reference's products (3, n) of `probe_rows` and `probe_weights`, some columns at a time."""
    weights = np.asarray(probe_weights(k, n, transpose_w, trial)).astype(contract.dtype, copy=False)
    weights = weights.T if transpose_w else weights
    rows = probe_rows(k, contract.dtype, trial)
    parts = []
    cpu = jax.local_devices(backend="cpu")[0]
    for start in range(0, n, _COLUMNS_AT_A_TIME):
        part = weights[:, start : start + _COLUMNS_AT_A_TIME]
        # One compiled reference serves many numbers of columns.
        columns = max(_FEWEST_COLUMNS, next_power_of_two(part.shape[1]))
        if part.shape[1] < columns:
            part = np.pad(part, ((0, 0), (0, columns - part.shape[1])))
        with jax.ensure_compile_time_eval():  # a program may be being traced
            part = jax.device_put(part, cpu)
        compiled = _compile_reference(k, columns, contract)
        parts.append(np.concatenate([np.asarray(compiled(row[None], part)) for row in rows]))
    return np.concatenate(parts, axis=1)[:, :n]


@functools.lru_cache(maxsize=256)
def _compile_reference(k: int, n: int, contract: MatmulContract) -> Callable[..., Any]:
    shapes = (jax.ShapeDtypeStruct((1, k), contract.dtype), jax.ShapeDtypeStruct((k, n), contract.dtype))

    def one_row(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = isolate(x, w)
        return isolate(reference(x, w, contract.k_block))[0]

    return ahead_of_time(one_row, *shapes)


def ahead_of_time(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns the compiled function, for use while another program is being traced."""
    # A jitted call in here would become a part of the program that is being traced.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(function).lower(*arguments).compile()
