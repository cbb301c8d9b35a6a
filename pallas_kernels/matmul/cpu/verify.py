"""The slow reference of a contract, and adversarial operands to compare programs with it.

The reference multiplies one row at a time by weights (K, N), block by block. XLA's own code for that is a loop over K
of fused multiply-adds on whole vectors of columns; columns that do not fill a vector would take another code path, so
they are padded. Float32 products are computed without XLA (`exact`), which would take 30 to 100 ms to compile each
shape; float64 products, and those of a compiler that does not fuse, are compiled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul.cpu.exact import fused_chains
from pallas_kernels.matmul.cpu.forms import in_blocks, stack_rows
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options
from pallas_kernels.runtime.repeated_rows import aligned, repeated_rows

_VECTOR = 8
_MOST_TRIALS = 32
_TRIED_PRODUCTS = 1 << 20
_COMPILED_COLUMNS = 128
_COMPARED_AT_ONCE = 1 << 18
_PROBED_K = 33

KINDS_OF_COLUMNS = 67


def reference(x: jax.Array, w: jax.Array, k_block: int, *, transpose_w: bool = False) -> jax.Array:
    """(1, K) x (K, N), or (N, K) with `transpose_w`, in the contract's order by construction."""
    if transpose_w:
        (w,) = isolate(row_major(w.T))
    n = w.shape[1]
    if n % _VECTOR:
        (w,) = isolate(jnp.pad(w, ((0, 0), (0, -n % _VECTOR))))
    return in_blocks(stack_rows, x[None], w[None], k_block)[0, :, :n]


def trials(rows: int, k: int, n: int) -> int:
    """Returns the number of operand sets on which to compare a program.

    A short sum in another order agrees in three of four elements, and small programs have few elements, so each
    position needs many comparisons. Long sums nearly always differ.

    Args:
        rows: Rows of the program, over all entries of a stack.
        k: Length of the contracted dimension.
        n: Columns of the result.
    """
    return max(1, min(_MOST_TRIALS, _TRIED_PRODUCTS // (rows * k * n)))


def probe_rows(k: int, dtype: str = "float32", trial: int = 0) -> np.ndarray:
    """Returns adversarial rows (3, k): normal, a huge dynamic range, and `linspace(-100, 100)`."""
    rng = np.random.default_rng((k, trial))
    rows = rng.standard_normal((3, k))
    rows[1] *= 2.0 ** rng.integers(-30, 30, k)
    rows[2] = np.linspace(-100, 100, k)
    return rows.astype(dtype)


def probe_weights(k: int, n: int, transpose_w: bool, trial: int = 0) -> np.ndarray:
    """Returns float32 weights spread over [-1, 1), (K, N) or (N, K); columns repeat after `KINDS_OF_COLUMNS`.

    The number of kinds is prime, so that each position in a vector or tile sees all of them.
    """
    kinds = _kinds_of_columns(k, n, trial)
    if transpose_w:
        return repeated_rows(np.ascontiguousarray(kinds.T), n)
    some = kinds.shape[1]
    cut = n - n % some
    weights = aligned((k, n))
    weights[:, :cut].reshape(k, -1, some)[:] = kinds[:, None]
    weights[:, cut:] = kinds[:, : n - cut]
    return weights


def _kinds_of_columns(k: int, n: int, trial: int) -> np.ndarray:
    i, j = np.arange(k, dtype=np.uint32)[:, None], np.arange(min(n, KINDS_OF_COLUMNS), dtype=np.uint32)
    mixed = i * np.uint32(0x9E3779B1) + (j + np.uint32(trial << 20))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0xC2B2AE35)
    mixed >>= np.uint32(8)
    weights = mixed.astype(np.float32)
    weights *= np.float32(2.0**-23)
    weights -= np.float32(1)
    return weights


def expected(k: int, n: int, contract: MatmulContract, trial: int) -> np.ndarray:
    """Returns the contract's products (3, kinds) of `probe_rows` and of each kind of column of `probe_weights`."""
    return _expected(k, min(n, KINDS_OF_COLUMNS), contract, trial)


@cached_for_options(maxsize=1024)
def _expected(k: int, kinds: int, contract: MatmulContract, trial: int) -> np.ndarray:
    rows, weights = probe_rows(k, contract.dtype, trial), _kinds_of_columns(k, kinds, trial).astype(contract.dtype)
    if contract.dtype == "float32" and _compiler_fuses():
        return fused_chains(rows, weights, contract.k_block)
    return _compiled_products(rows, weights, contract)


def gives_expected(actual: np.ndarray, k: int, contract: MatmulContract, *, first: int = 0, trial: int = 0) -> bool:
    """Returns whether products have the bits of the contract.

    Args:
        actual: (..., N), the products of `probe_rows`, cycling through their kinds, and `probe_weights`.
        k: Length of the contracted dimension.
        contract: Order of the sums.
        first: Kind of the first row.
        trial: Index of the operand set.
    """
    n = actual.shape[-1]
    kinds = np.take(expected(k, n, contract, trial), np.arange(n) % KINDS_OF_COLUMNS, axis=1)
    kinds = np.roll(kinds, -first, axis=0)
    unsigned = f"u{actual.itemsize}"
    found, wanted = actual.reshape(-1, n).view(unsigned), kinds.view(unsigned)
    whole = len(found) - len(found) % len(wanted)
    groups = found[:whole].reshape(-1, *wanted.shape)
    some = max(1, _COMPARED_AT_ONCE // wanted.size)  # they stay in the cache
    same = all((groups[i : i + some] == wanted).all() for i in range(0, len(groups), some))
    return same and bool((found[whole:] == wanted[: len(found) - whole]).all())


@cached_for_options()
def _compiler_fuses() -> bool:
    """Returns whether XLA compiles the reference to chains of fused multiply-adds.

    False if optimizations are off or the processor has no such instruction. The compiled reference is then the only
    order available to all shapes.
    """
    contract, k = MatmulContract(_PROBED_K), _PROBED_K
    rows, weights = probe_rows(k), _kinds_of_columns(k, KINDS_OF_COLUMNS, 0)
    found, wanted = _compiled_products(rows, weights, contract), fused_chains(rows, weights, contract.k_block)
    return bool((found.view(np.uint32) == wanted.view(np.uint32)).all())


def _compiled_products(rows: np.ndarray, weights: np.ndarray, contract: MatmulContract) -> np.ndarray:
    """Returns the reference's products, one row at a time."""
    (k, n), columns = weights.shape, _COMPILED_COLUMNS
    part = np.pad(weights, ((0, 0), (0, columns - n)))
    compiled = _compile_reference(k, columns, contract)
    return np.concatenate([np.asarray(compiled(row[None], part)) for row in rows])[:, :n]


@cached_for_options(maxsize=256)
def _compile_reference(k: int, n: int, contract: MatmulContract) -> Callable[..., Any]:
    shapes = (jax.ShapeDtypeStruct((1, k), contract.dtype), jax.ShapeDtypeStruct((k, n), contract.dtype))

    def one_row(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = isolate(x, w)
        return isolate(reference(x, w, contract.k_block))[0]

    return ahead_of_time(one_row, *shapes)
