"""Triangular systems and the Cholesky factorisation, by columns, in blocks of fixed width."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.transform.expansions._stacks import adjoint, at, blocks, matmul, over_stack


def triangular_solve(
    a: jax.Array,
    b: jax.Array,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> jax.Array:
    """Solves triangular systems, as `jax.lax.linalg.triangular_solve` does.

    Unknown j is its remaining right-hand side divided by the diagonal; column j times it is subtracted from the other
    rows; for rows outside the block, as one product per block of unknowns.

    Source: G. H. Golub and C. F. Van Loan, Matrix Computations, 4th edition, section 3.1.
    """

    def solve(a: jax.Array, b: jax.Array) -> jax.Array:
        turned = transpose_a != (not left_side)  # from the right, x a = b is aᵀ xᵀ = bᵀ
        a = a.conj() if conjugate_a else a
        a, b = a.T if turned else a, b if left_side else b.T
        x = _solve(a, b, unit_diagonal, down=lower != turned)
        return x if left_side else x.T

    return over_stack(solve, a, b)


def _solve(a: jax.Array, b: jax.Array, unit_diagonal: bool, down: bool) -> jax.Array:
    """Solves a x = b for b (n, k) and a triangle a (n, n); the rest of a is not read.

    Args:
        a: The matrix.
        b: The right-hand sides.
        unit_diagonal: Whether the diagonal is assumed to be ones.
        down: Whether to use the lower triangle, and solve for the first unknown first.
    """
    n = a.shape[0]
    if b.size == 0:
        return b
    count, width = blocks(n)
    if count == 1:
        return substitute(a, b, unit_diagonal, down)
    if not down:  # backwards, an upper triangle is a lower one
        return _solve(a[::-1, ::-1], b[::-1], unit_diagonal, down=True)[::-1]
    a, b = padded(a, count * width), jnp.pad(b, ((0, count * width - n), (0, 0)))
    rows = jnp.arange(count * width)

    def block(i: jax.Array, b: jax.Array) -> jax.Array:
        start = i * width
        columns = lax.dynamic_slice_in_dim(a, start, width, axis=1)
        triangle = lax.dynamic_slice_in_dim(columns, start, width)
        x = substitute(triangle, lax.dynamic_slice_in_dim(b, start, width), unit_diagonal)
        # A select, not a product by zero: the rows above may hold anything.
        b = jnp.where(rows[:, None] >= start + width, b - matmul(columns, x), b)
        return lax.dynamic_update_slice_in_dim(b, x, start, axis=0)

    solved: jax.Array = lax.fori_loop(0, count, block, b)
    return solved[:n]


def padded(a: jax.Array, n: int) -> jax.Array:
    """Returns a square matrix padded with rows and columns of the identity."""
    size = a.shape[0]
    a = jnp.pad(a, (0, n - size))
    index = jnp.arange(n)
    return jnp.where((index >= size) & (index[:, None] == index), jnp.ones_like(a), a)


def substitute(a: jax.Array, b: jax.Array, unit_diagonal: bool, down: bool = True) -> jax.Array:
    """Solves a x = b for a triangle of at most one block, unknown by unknown; arguments as for `_solve`."""
    n = a.shape[0]
    rows = lax.broadcasted_iota(jnp.int32, (n, 1), 0)

    def step(i: jax.Array, b: jax.Array) -> jax.Array:
        j = i if down else n - 1 - i
        x, column = at(b, j, 0), at(a, j, 1)
        if not unit_diagonal:
            x = x / at(column, j, 0)
        rest = b - column * x
        return jnp.where(rows == j, x, jnp.where(rows > j if down else rows < j, rest, b))

    return lax.fori_loop(0, n, step, b)


def cholesky(a: jax.Array, **_: Any) -> jax.Array:
    """Factorises Hermitian matrices, reading their lower triangles; all nan where one is not positive.

    Column j of the remainder is divided by the root of its diagonal, and the outer product of the entries below it is
    subtracted from the rest; after each block of columns, as one product.

    Source: G. H. Golub and C. F. Van Loan, Matrix Computations, 4th edition, section 4.2.
    """
    return over_stack(_cholesky, a)


def _cholesky(a: jax.Array) -> jax.Array:
    n = a.shape[0]
    if n == 0:
        return a
    count, width = blocks(n)
    a = padded(a, count * width)
    rows, columns = jnp.arange(count * width), jnp.arange(width)

    def block(i: jax.Array, a: jax.Array) -> jax.Array:
        start = i * width

        def step(j: jax.Array, panel: jax.Array) -> jax.Array:
            column = panel[:, j]
            root = lax.sqrt(lax.real(column[start + j]) if jnp.iscomplexobj(a) else column[start + j]).astype(a.dtype)
            below = jnp.where(rows > start + j, column / root, jnp.zeros_like(column))
            row = lax.dynamic_slice_in_dim(below, start, width).conj()
            rest = (rows[:, None] > start + j) & (columns > j)
            panel = jnp.where(rest, panel - below[:, None] * row, panel)
            return panel.at[:, j].set(jnp.where(rows == start + j, root, below))

        panel = lax.fori_loop(0, width, step, lax.dynamic_slice_in_dim(a, start, width, axis=1))
        if count > 1:
            rest = (rows[:, None] >= start + width) & (rows >= start + width)
            a = jnp.where(rest, a - matmul(panel, adjoint(panel)), a)
        return lax.dynamic_update_slice_in_dim(a, panel, start, axis=1)

    a = lax.fori_loop(0, count, block, a)[:n, :n]
    diagonal = jnp.diagonal(a)
    positive = ((lax.real(diagonal) if jnp.iscomplexobj(a) else diagonal) > 0).all()
    return jnp.where(positive, jnp.tril(a), jnp.full_like(a, jnp.nan))
