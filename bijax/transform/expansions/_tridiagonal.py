"""Tridiagonal systems, by elimination with exchanges of neighbouring rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.transform.expansions._stacks import over_stack


def tridiagonal_solve(
    dl: jax.Array, d: jax.Array, du: jax.Array, b: jax.Array, *, perturb_singular: bool = False, **_: Any
) -> jax.Array:
    """Solves tridiagonal systems, as `jax.lax.linalg.tridiagonal_solve` does; all nan where one is singular.

    Of a row and the next, the row with the larger entry in the column is the pivot; with `perturb_singular`, pivots
    that are tiny relative to the largest entry of the triangle are enlarged.

    Source: LAPACK, xGTSV.
    """

    def solve(b: jax.Array, dl: jax.Array, d: jax.Array, du: jax.Array) -> jax.Array:
        if b.size == 0:
            return b
        # A row of the triangle (three entries and its right-hand side), for each column; the last row remains.
        zero = jnp.zeros((), d.dtype)

        def eliminate(row: Any, following: Any) -> Any:
            (pivot, right, rhs), (below, diagonal, after, next_rhs) = row, following
            exchange = jnp.abs(below) > jnp.abs(pivot)
            top = [lax.select(exchange, y, x) for x, y in ((pivot, below), (right, diagonal), (zero, after))]
            rest = [lax.select(exchange, x, y) for x, y in ((pivot, below), (right, diagonal), (zero, after))]
            top_rhs, rest_rhs = jnp.where(exchange, next_rhs, rhs), jnp.where(exchange, rhs, next_rhs)
            # Both are zero if the column is zero.
            factor = jnp.where(top[0] == 0, zero, rest[0] / jnp.where(top[0] == 0, jnp.ones_like(zero), top[0]))
            left = rest[1] - factor * top[1], rest[2] - factor * top[2], rest_rhs - factor * top_rhs
            return left, (*top, top_rhs)

        last, rows = lax.scan(eliminate, (d[0], du[0], b[0]), (dl[1:], d[1:], du[1:], b[1:]))
        ends = last[0], zero, zero, last[2]
        pivots, right, second, rhs = (jnp.concatenate([x, e[None]]) for x, e in zip(rows, ends, strict=True))
        right = right.at[-1].set(zero)
        if perturb_singular:
            largest = jnp.max(jnp.abs(jnp.stack([pivots, right, second])))
            limits = np.finfo(d.dtype)
            least = jnp.maximum(largest * limits.eps, limits.tiny)
            pivots = jnp.where(jnp.abs(pivots) < least, jnp.where(pivots < 0, -least, least), pivots)

        def substitute(known: Any, row: Any) -> Any:
            (x1, x2), (pivot, right, second, rhs) = known, row
            x = (rhs - right * x1 - second * x2) / pivot
            return (x, x1), x

        nothing = jnp.zeros_like(b[0])
        x = lax.scan(substitute, (nothing, nothing), (pivots, right, second, rhs), reverse=True)[1]
        return jnp.where((pivots != 0).all(), x, jnp.full_like(x, jnp.nan))

    return over_stack(solve, b, dl, d, du)
