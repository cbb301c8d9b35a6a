"""Forward substitution: rows of the inverse of a unit lower triangular matrix, each from the rows before it."""

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.parts.xla.opaque import apart_from_sums
from pallas_kernels.parts.xla.positions import fold_positions
from pallas_kernels.parts.xla.tiles import isolate

_BLOCK: Final = 32


def substitute(
    a: jax.Array, known: jax.Array, rows: jax.Array, valid: jax.Array, first: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of the inverse T of I + A: T_t = e_t - (a_t0 T_0 + a_t1 T_1 + ...), each product rounded.

    The products are added in ascending order, starting at 0. All rows that are computed add the products of one row
    before the next row is known; a row that is computed alone adds them in the same order.

    Args:
        a: (B, H, R, C) float32, the rows of A, zeros from the diagonal on.
        known: (B, H, C, C) float32, the rows of T before the first valid one; zeros elsewhere.
        rows: (B, R) int32, the places of the rows.
        valid: (B, R) bool, which to compute.
        first: (B,) int32, the place of the first valid row; C if there is none.
        dtype: The dtype to which the rows are rounded later.

    Returns:
        The rows (B, H, R, C), and (B, H, R) bool, whether they are finite in `dtype`. A row that is not is zero.
    """
    r, c = a.shape[2:]

    def add_known(total: jax.Array) -> jax.Array:
        def add(total: jax.Array, i: jax.Array) -> jax.Array:
            left = lax.dynamic_slice_in_dim(a, i, 1, 3)
            return total + apart_from_sums(left * lax.dynamic_slice_in_dim(known, i, 1, 2))

        return fold_positions(add, total, 0, c)

    some = ((first > 0) & (first < c)).any()
    (total,) = isolate(lax.cond(some, add_known, lambda total: total, jnp.zeros(a.shape, jnp.float32)))
    if r == c:
        return _whole(a, total, valid, dtype)
    places = jnp.clip(rows, 0, c - 1)[:, None, None]
    between = jnp.where(valid[:, None, None], jnp.take_along_axis(a, places, 3), 0)
    found, usable = [], []
    for i in range(r):
        unit = (jnp.arange(c, dtype=jnp.int32) == rows[:, i : i + 1]).astype(jnp.float32)[:, None]
        row, fine = _row(unit, total[:, :, i], valid[:, i], dtype)
        found.append(row)
        usable.append(fine)
        if i < r - 1:
            (total,) = isolate(total + apart_from_sums(between[:, :, :, i, None] * row[:, :, None]))
    return jnp.stack(found, 2), jnp.stack(usable, 2)


def _whole(a: jax.Array, total: jax.Array, valid: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Computes all rows of a chunk, in blocks.

    A block adds only to the rows from its first one on, and only the columns up to its last one: the others are zeros.
    """
    b, h, r, _ = a.shape
    block = min(r, _BLOCK)
    found, usable = jnp.zeros(a.shape, jnp.float32), jnp.zeros((b, h, r), bool)
    for start in range(0, r, block):
        width = start + block
        unit = jnp.eye(r, width, dtype=jnp.float32)
        left = a[:, :, start:, start:width]

        def step(
            i: jax.Array,
            carry: tuple[jax.Array, jax.Array, jax.Array],
            start: int = start,
            unit: jax.Array = unit,
            left: jax.Array = left,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            total, found, usable = carry
            at = lax.dynamic_index_in_dim(total, i, 2, keepdims=False)
            one = lax.dynamic_index_in_dim(unit, start + i, 0, keepdims=False)
            row, fine = _row(one, at, lax.dynamic_index_in_dim(valid, start + i, 1, keepdims=False), dtype)
            factor = lax.dynamic_slice_in_dim(left, i, 1, 3)
            total = isolate(total + apart_from_sums(factor * row[:, :, None]))[0]
            found = lax.dynamic_update_slice_in_dim(found, row[:, :, None], i, 2)
            return total, found, lax.dynamic_update_slice_in_dim(usable, fine[..., None], i, 2)

        part = total[:, :, start:, :width]
        new = jnp.zeros((b, h, block, width), jnp.float32), jnp.zeros((b, h, block), bool)
        part, rows, fine = lax.fori_loop(0, block, step, (part, *new))
        total = lax.dynamic_update_slice(total, part, (0, 0, start, 0))
        found = lax.dynamic_update_slice(found, rows, (0, 0, start, 0))
        usable = lax.dynamic_update_slice(usable, fine, (0, 0, start))
    return found, usable


def _row(unit: jax.Array, total: jax.Array, valid: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """(B, H, C): e_t minus the sum of products; zero if it is not valid or not finite."""
    (row,) = isolate(unit - total)
    fine = jnp.isfinite(row.astype(dtype)).all(-1)
    return jnp.where(valid[:, None, None] & fine[..., None], row, 0), fine
