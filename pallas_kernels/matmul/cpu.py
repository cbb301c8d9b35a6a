"""Matmul on the CPU: XLA's own dot on tiles of fixed shape, in forms that all mean the same contract.

XLA:CPU hands a dot to a library that cuts K by the number of rows. The forms below keep K in the contract's blocks
whatever the rows; which form is fast depends on the rows, so `pallas_kernels.schedule.cpu` orders them. The form
"gemv" with one row is the reference: a step is used only after it gave the reference's bits on this machine.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._tiles import isolate, map_row_tiles, pad_columns, pad_rows, run_isolated
from pallas_kernels.contract import MatmulContract
from pallas_kernels.schedule.cpu import Step, matmul_ladder, steps_by_preference

_REFERENCE = Step("gemv", 1)
_FEWEST_COLUMNS = 8
_REFERENCE_COLUMNS = 2048

_Matmul = Callable[[jax.Array, jax.Array], jax.Array]


def matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool = False) -> jax.Array:
    """Multiplies rows by weights.

    Args:
        x: (M, K) float32, bfloat16 or float16. Narrow types are widened to float32, which is exact.
        w: (K, N), or (N, K) with `transpose_w`.
        contract: Order of the sum over K.
        transpose_w: Whether `w` is stored as (N, K). No transposed copy is made where
            XLA's own dot honours the contract.

    Returns:
        (M, N) float32.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import matmul_contract
        >>> c = matmul_contract(2, transpose_w=False)
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=c).tolist()
        [[2.0], [2.0], [2.0]]
    """
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    if 0 in (m, k, n):
        return jnp.zeros((m, n), jnp.float32)
    x, w = (a.astype(jnp.float32) for a in isolate(x, w))
    if n < _FEWEST_COLUMNS:  # a dot with a single column is another operation to XLA
        w = pad_rows(w, _FEWEST_COLUMNS) if transpose_w else pad_columns(w, _FEWEST_COLUMNS)
        return matmul(x, w, contract=contract, transpose_w=transpose_w)[:, :n]
    ladder = matmul_ladder(k, contract.k_block, transpose_w=transpose_w)

    def step_for(rows: int) -> Step:
        for step in steps_by_preference(ladder, rows):
            if honours_contract(step, k, n, contract, transpose_w):
                return step
        return _REFERENCE

    def program_for(rows: int) -> Callable[[jax.Array], tuple[jax.Array]]:
        dot = _form(step_for(rows), contract, transpose_w)
        return lambda tile: (dot(tile, w),)

    out = jax.ShapeDtypeStruct((n,), jnp.float32)
    return map_row_tiles(program_for, lambda rows: step_for(rows).rows, [x], [out])[0]


def _form(step: Step, contract: MatmulContract, transpose_w: bool) -> _Matmul:
    """Returns the program of a step."""
    if step.form == "whole":
        dims = (((1,), (1 if transpose_w else 0,)), ((), ()))
        return lambda x, w: lax.dot_general(x, w, dims)
    stack = _stack_columns if step.form == "columns" else _stack_rows
    return lambda x, w: _blocks(stack, x, isolate(w.T)[0] if transpose_w else w, contract.k_block)


def _blocks(stack: _Matmul, x: jax.Array, w: jax.Array, k_block: int) -> jax.Array:
    """Adds the products over the blocks of K, upwards."""
    k = x.shape[1]
    whole = k // k_block
    partials = []
    if whole:
        # (K, N) weights are a stack of blocks without being copied.
        stacked = stack(
            x[:, : whole * k_block].reshape(-1, whole, k_block), w[: whole * k_block].reshape(whole, k_block, -1)
        )
        partials = list(isolate(stacked)[0])
    if whole * k_block < k:
        tail = stack(x[:, None, whole * k_block :], w[None, whole * k_block :])
        partials.append(isolate(tail)[0][0])
    return functools.reduce(lax.add, partials)


def _stack_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """(T, blocks, b) x (blocks, b, N): every block a product of row-major operands."""
    (x,) = isolate(x.transpose(1, 0, 2))
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))


def _stack_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same with the rows stored as columns, which XLA hands to another library, faster for few rows."""
    (x,) = isolate(x.transpose(1, 2, 0))
    return lax.dot_general(x, w, (((1,), (1,)), ((0,), (0,))))


@functools.cache
def honours_contract(step: Step, k: int, n: int, contract: MatmulContract, transpose_w: bool) -> bool:
    """Returns whether a step gives the reference's bits on this machine, at every position of its tile.

    The comparison runs once per process and shape, on normal data, on a huge dynamic range and on
    `linspace(-100, 100)`. Its result depends on the machine and the jaxlib version, never on time or on the batch.

    Args:
        step: The step to try.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the result, at least 1.
        contract: Order of the sum over K.
        transpose_w: Whether the weights are stored as (N, K).
    """
    if step == _REFERENCE:
        return True
    rows, weights = _probe(k, n, transpose_w)
    expected = _expected(rows[: step.rows], np.asarray(weights), contract, transpose_w)
    actual = np.asarray(_compile(step, k, n, contract, transpose_w)(np.resize(rows, (step.rows, k)), weights))
    return bool((actual.view(np.uint32) == np.resize(expected, actual.shape).view(np.uint32)).all())


def _probe(k: int, n: int, transpose_w: bool) -> tuple[np.ndarray, jax.Array]:
    """Returns 3 hostile rows (3, k) and weights, float32."""
    rng = np.random.default_rng(k * 1_000_003 + n)
    rows = rng.standard_normal((3, k))
    rows[1] *= 2.0 ** rng.integers(-30, 30, k)
    rows[2] = np.linspace(-100, 100, k)
    return rows.astype(np.float32), _ahead_of_time(functools.partial(_scattered, k, n, transpose_w))()


def _scattered(k: int, n: int, transpose_w: bool) -> jax.Array:
    """Returns weights spread over [-1, 1), made by XLA in place: those of a vocabulary are large."""
    i, j = (lax.broadcasted_iota(jnp.uint32, (n, k) if transpose_w else (k, n), axis) for axis in (0, 1))
    mixed = (i * jnp.uint32(0x9E3779B1) + j) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - 1


def _expected(rows: np.ndarray, weights: np.ndarray, contract: MatmulContract, transpose_w: bool) -> np.ndarray:
    """Returns the products of rows by the reference, which reads (K, N) weights, some columns at a time."""
    weights = weights.T if transpose_w else weights
    parts = []
    for start in range(0, weights.shape[1], _REFERENCE_COLUMNS):
        part = np.ascontiguousarray(weights[:, start : start + _REFERENCE_COLUMNS])
        reference = _compile_reference(*part.shape, contract)
        parts.append(np.concatenate([np.asarray(reference(row[None], part)) for row in rows]))
    return np.concatenate(parts, axis=1)


@functools.cache
def _compile_reference(k: int, n: int, contract: MatmulContract) -> Callable[..., jax.Array]:
    return _compile(_REFERENCE, k, n, contract, transpose_w=False)


def _compile(step: Step, k: int, n: int, contract: MatmulContract, transpose_w: bool) -> Callable[..., jax.Array]:
    dot = _form(step, contract, transpose_w)
    shapes = (
        jax.ShapeDtypeStruct((step.rows, k), jnp.float32),
        jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), jnp.float32),
    )
    return _ahead_of_time(lambda x, w: run_isolated(lambda t: (dot(t, w),), x)[0], *shapes)


def _ahead_of_time(function: Callable[..., jax.Array], *arguments: Any) -> Callable[..., jax.Array]:
    # A jitted call in here would become a part of the program that is being traced.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(function).lower(*arguments).compile()
