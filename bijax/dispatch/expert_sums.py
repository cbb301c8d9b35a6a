"""The weighted sum of the rows of each token's experts as one primitive, in one kernel where there is one.

That kernel has the bits of the element-wise programs that it stands for, which serve where there is none.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, define_kernel, in_front, unfold_rows
from bijax.dispatch.kernels import as_tuple, run_if_served, run_kernel
from pallas_kernels.target import Target


def weighted(row: jax.Array, weight: jax.Array, used: jax.Array) -> jax.Array:
    """Returns elements of rows times weights in float32, 0 for those that are not used."""
    return jnp.where(used, row.astype(jnp.float32) * weight.astype(jnp.float32), jnp.float32(0))


def total(*terms: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum of terms in their order, rounded once; +0 rather than -0."""
    found = functools.reduce(lambda a, b: a + b, terms)
    # The sign of a zero would tell which experts are on other ranks.
    return jnp.where(found == 0, jnp.float32(0), found).astype(dtype)


def _backend(target: Target, rows: jax.Array, row: jax.Array, weights: jax.Array, *, dtype: str) -> Arrays:
    found = run_if_served("add_expert_rows", target, None, rows, row, weights, dtype=dtype, like=_shapes)
    if found is not None:
        return as_tuple(found)
    read = jnp.take(rows, row, axis=0, mode="clip")
    of_rows = [jnp.broadcast_to(a[..., None], read.shape) for a in (weights, row >= 0)]
    # Products and sums are two steps, or a compiler could contract them.
    terms = _elementwise(target, _products, read, *of_rows)
    return (_elementwise(target, _Sum(dtype), *(terms[:, i] for i in range(row.shape[1]))),)


def _elementwise(target: Target, program: Callable[..., Arrays], *arrays: jax.Array) -> jax.Array:
    (found,) = run_kernel("elementwise", target, None, *arrays, program=program, like=_shapes_of_program)
    return jnp.asarray(found)


def _products(row: jax.Array, weight: jax.Array, used: jax.Array) -> Arrays:
    return (weighted(row, weight, used),)


@dataclass(frozen=True)
class _Sum:
    dtype: str

    def __call__(self, *terms: jax.Array) -> Arrays:
        return (total(*terms, dtype=self.dtype),)


def _shapes_of_program(*arrays: jax.Array, program: Callable[..., Arrays]) -> Arrays:
    return program(*arrays)


def _shapes(rows: jax.Array, row: jax.Array, _: jax.Array, *, dtype: str) -> Arrays:
    return (jnp.zeros((row.shape[0], rows.shape[1]), dtype),)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """Makes one list of the rows of all entries; rows that all entries share stay as they are."""
    rows, (row, weights) = arrays[0], in_front(size, arrays[1:], axes[1:])
    if axes[0] is not None:
        rows = jnp.moveaxis(rows, axes[0], 0)
        first = jnp.arange(size, dtype=row.dtype)[:, None, None] * rows.shape[1]
        row, rows = jnp.where(row >= 0, row + first, row), rows.reshape(-1, rows.shape[2])
    merged = [a.reshape(-1, a.shape[2]) for a in (row, weights)]
    return unfold_rows(size, add_expert_rows_kernel(rows, *merged, **parameters))


add_expert_rows_kernel: Final = define_kernel("add_expert_rows", _backend, _fold, _shapes)
"""(R, C), row (T, topk) int32, weights (T, topk) and `dtype`: (T, C), the sum of the rows of a token times its weights.

R and topk are at least 1. A negative row counts as zero."""
