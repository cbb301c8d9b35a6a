"""The LU factorisation with partial pivoting, by columns, in blocks of fixed width."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.transform.expansions._stacks import blocks, matmul, over_stack
from bijax.transform.expansions._triangular import substitute

Factors = tuple[jax.Array, jax.Array, jax.Array]


def lu(a: jax.Array, **_: Any) -> Factors:
    """Factorises matrices, as `jax.lax.linalg.lu` does; the pivot is the first of the largest elements of a column.

    Source: G. H. Golub and C. F. Van Loan, Matrix Computations, 4th edition, section 3.4.
    """
    return over_stack(_lu, a)


def _lu(a: jax.Array) -> Factors:
    m, n = a.shape
    k = min(m, n)
    if k == 0:
        return a, jnp.zeros(0, jnp.int32), jnp.arange(m, dtype=jnp.int32)
    count, width = blocks(k)
    a = jnp.pad(a, ((0, max(0, count * width - m)), (0, max(0, count * width - n))))
    rows, columns = jnp.arange(a.shape[0], dtype=jnp.int32), jnp.arange(a.shape[1], dtype=jnp.int32)
    state = a, rows, jnp.zeros(k, jnp.int32)

    def block(i: jax.Array, state: Factors) -> Factors:
        a, permutation, pivots = state
        start = jnp.int32(i) * width

        def step(j: jax.Array, state: Factors) -> Factors:
            panel, order, pivots = state
            here = start + j
            # Padding rows are never pivots, whatever they hold.
            size = jnp.where((rows >= here) & (rows < m), _size(panel[:, j]), -1)
            pivot = jnp.argmax(size).astype(jnp.int32)
            panel, order = _swapped(panel, here, pivot), _swapped(order, here, pivot)
            column, row = panel[:, j], panel[here]
            divisor = jnp.where(column[here] == 0, jnp.ones_like(column[here]), column[here])
            factors = jnp.where(rows > here, column / divisor, column)
            rest = (rows[:, None] > here) & (columns[:width] > j)
            panel = jnp.where(rest, panel - factors[:, None] * row, panel)
            return panel.at[:, j].set(factors), order, pivots.at[here].set(pivot)

        panel = lax.dynamic_slice_in_dim(a, start, width, axis=1)
        panel, order, pivots = lax.fori_loop(0, jnp.minimum(width, k - start), step, (panel, rows, pivots))
        a = lax.dynamic_update_slice_in_dim(a[order], panel, start, axis=1)
        if a.shape[1] > width:
            right = columns >= start + width
            above = lax.dynamic_slice_in_dim(a, start, width)
            triangle = lax.dynamic_slice_in_dim(panel, start, width)
            above = jnp.where(right, substitute(triangle, above, unit_diagonal=True), above)
            a = lax.dynamic_update_slice_in_dim(a, above, start, axis=0)
            rest = (rows[:, None] >= start + width) & right
            a = jnp.where(rest, a - matmul(panel, above), a)
        return a, permutation[order], pivots

    a, permutation, pivots = lax.fori_loop(0, count, block, state)
    return a[:m, :n], pivots, permutation[:m]


def _size(x: jax.Array) -> jax.Array:
    return jnp.abs(lax.real(x)) + jnp.abs(lax.imag(x)) if jnp.iscomplexobj(x) else jnp.abs(x)


def _swapped(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    index = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(index == i, x[j], jnp.where(index == j, x[i], x))
