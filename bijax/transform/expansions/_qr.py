"""The QR factorisation by Householder's reflections, column by column."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.transform.expansions._stacks import over_stack

Arrays = tuple[jax.Array, ...]


def geqrf(a: jax.Array, **_: Any) -> Arrays:
    """Factorises matrices into packed reflections and their scales, like LAPACK's geqrf.

    Source: G. H. Golub and C. F. Van Loan, Matrix Computations, 4th edition, section 5.2.
    """
    return over_stack(lambda a: reflect(a)[:2], a)


def householder_product(a: jax.Array, taus: jax.Array, **_: Any) -> jax.Array:
    """Returns the first columns of the product of reflections, like LAPACK's orgqr."""

    def columns(a: jax.Array, taus: jax.Array) -> jax.Array:
        return apply(a, taus, jnp.eye(a.shape[0], a.shape[1], dtype=a.dtype))

    return over_stack(columns, a, taus)


def qr(a: jax.Array, *, pivoting: bool, full_matrices: bool, **_: Any) -> Arrays:
    """Factorises matrices, as `jax.lax.linalg.qr` does; a pivot is the first of the columns of largest norm."""

    def factorise(a: jax.Array) -> Arrays:
        m, n = a.shape
        packed, taus, order = reflect(a, pivoting)
        columns = m if full_matrices else min(m, n)
        q = apply(packed, taus, jnp.eye(m, columns, dtype=a.dtype))
        r = jnp.triu(packed[:columns])
        return (q, r, order) if pivoting else (q, r)

    return over_stack(factorise, a)


def reflect(a: jax.Array, pivoting: bool = False) -> Arrays:
    """Returns the packed reflections and upper triangle of a matrix, their scales, and the order of the columns."""
    m, n = a.shape
    k = min(m, n)
    order = jnp.arange(n, dtype=jnp.int32)
    if k == 0:
        return a, jnp.zeros(0, a.dtype), order
    rows, columns = jnp.arange(m), jnp.arange(n)

    def step(j: jax.Array, state: Arrays) -> Arrays:
        a, taus, order = state
        if pivoting:
            norms = jnp.where(columns >= j, _norms(jnp.where(rows[:, None] >= j, a, jnp.zeros_like(a))), -1)
            pivot = jnp.argmax(norms)
            a, order = _swapped(a, j, pivot), _swapped(order, j, pivot)
        column = a[:, j]
        v, tau, beta = _reflection(column, j)
        products = (v.conj()[:, None] * a).sum(0)
        a = jnp.where(columns > j, a - (tau.conj() * v)[:, None] * products, a)
        column = jnp.where(rows > j, v, jnp.where(rows == j, beta, column))
        return a.at[:, j].set(column), taus.at[j].set(tau), order

    return lax.fori_loop(0, k, step, (a, jnp.zeros(k, a.dtype), order))


def apply(packed: jax.Array, taus: jax.Array, c: jax.Array) -> jax.Array:
    """Multiplies a matrix c (m, k) from the left by packed reflections, the last one first."""
    rows, count = jnp.arange(packed.shape[0]), taus.shape[0]
    if c.size == 0 or count == 0:
        return c

    def step(i: jax.Array, c: jax.Array) -> jax.Array:
        j = count - 1 - i
        v = jnp.where(rows > j, packed[:, j], (rows == j).astype(packed.dtype))
        return c - (taus[j] * v)[:, None] * (v.conj()[:, None] * c).sum(0)

    return lax.fori_loop(0, count, step, c)


def _reflection(column: jax.Array, j: jax.Array) -> Arrays:
    """Returns v (1 at j, 0 above), tau and beta such that I - conj(tau) v v* maps a column to beta at j, 0 below."""
    rows = jnp.arange(column.shape[0])
    alpha = column[j]
    tail = jnp.where(rows > j, column, jnp.zeros_like(column))
    is_zero = (tail == 0).all()
    if jnp.iscomplexobj(column):
        is_zero &= lax.imag(alpha) == 0
    real = lax.real(alpha) if jnp.iscomplexobj(column) else alpha
    norm = _norms(jnp.where(rows >= j, column, jnp.zeros_like(column))[:, None])[0]
    beta = jnp.where(real < 0, norm, -norm).astype(column.dtype)
    safe = jnp.where(is_zero, jnp.ones_like(beta), beta)
    tau = jnp.where(is_zero, jnp.zeros_like(beta), (safe - alpha) / safe)
    divisor = jnp.where(is_zero, jnp.ones_like(beta), alpha - safe)
    v = jnp.where(rows == j, jnp.ones_like(column), tail / divisor)
    return v, tau, jnp.where(is_zero, alpha, beta)


def _norms(a: jax.Array) -> jax.Array:
    """Returns the norms of the columns of a matrix, scaled so that no square overflows."""
    size = jnp.abs(a)
    largest = size.max(0)
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    ratio = size / scale
    return scale * lax.sqrt((ratio * ratio).sum(0))


def _swapped(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns an array with two entries of its last axis swapped."""
    index = jnp.arange(x.shape[-1])
    return jnp.where(index == i, x[..., j, None], jnp.where(index == j, x[..., i, None], x))
