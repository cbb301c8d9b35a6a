"""Eigenvalues of Hermitian matrices and singular values, by Jacobi's rotations in a fixed order.

All pairs of columns are rotated against each other in rounds of disjoint pairs (a tournament); a sweep contains every
pair once, and the number of sweeps depends only on the length and the dtype.

Source: R. P. Brent and F. T. Luk, The solution of singular-value and symmetric eigenvalue problems on multiprocessor
arrays, SIAM Journal on Scientific and Statistical Computing 6 (1985).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.transform.expansions._qr import apply, reflect
from bijax.transform.expansions._stacks import adjoint, over_stack

Arrays = tuple[jax.Array, ...]


def eigh(
    a: jax.Array, *, lower: bool, sort_eigenvalues: bool, subset_by_index: tuple[int, int] | None = None, **_: Any
) -> Arrays:
    """Returns eigenvectors and eigenvalues of Hermitian matrices, reading one triangle."""

    def decompose(a: jax.Array) -> Arrays:
        vectors, values = _eigh(a, lower)
        if sort_eigenvalues:
            order = jnp.argsort(values)
            vectors, values = vectors[:, order], values[order]
        first, last = subset_by_index or (0, a.shape[0])
        return vectors[:, first:last], values[first:last]

    return over_stack(decompose, a)


def svd(
    a: jax.Array,
    *,
    full_matrices: bool,
    compute_uv: bool,
    subset_by_index: tuple[int, int] | None = None,
    **_: Any,
) -> Arrays:
    """Returns singular values, and left and right singular vectors, as `jax.lax.linalg.svd` does."""

    def decompose(a: jax.Array) -> Arrays:
        m, n = a.shape
        first, last = subset_by_index or (0, min(m, n))
        u, s, v = _svd(a, full_matrices) if m >= n else _svd(adjoint(a), full_matrices)[::-1]
        if not compute_uv:
            return (s[first:last],)
        if subset_by_index is not None and (first, last) != (0, min(m, n)):
            u, v = u[:, first:last], v[:, first:last]
        return s[first:last], u, adjoint(v)

    return over_stack(decompose, a)


def _eigh(a: jax.Array, lower: bool) -> Arrays:
    n = a.shape[0]
    real = a.real.dtype
    if n == 0:
        return a, jnp.zeros(0, real)
    half = (n + 1) // 2
    triangle = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    diagonal = jnp.diagonal(a)
    a = triangle + adjoint(triangle) + jnp.diag(lax.real(diagonal).astype(a.dtype) if _is_complex(a) else diagonal)
    a, scale = _scaled(a)
    a = jnp.pad(a, (0, 2 * half - n))
    eye = jnp.eye(half, dtype=bool)

    def round_(_: Any, state: Arrays) -> Arrays:
        a, v = state
        d = jnp.diagonal(a)
        d = lax.real(d) if _is_complex(a) else d
        rotation, change = _rotation(d[:half], d[half:], jnp.diagonal(a[:half, half:]))
        a = adjoint(_turned(adjoint(_turned(a, rotation)), rotation))
        top, bottom = (d[:half] - change).astype(a.dtype), (d[half:] + change).astype(a.dtype)
        zero = jnp.zeros((), a.dtype)
        a = jnp.block(
            [
                [jnp.where(eye, top, a[:half, :half]), jnp.where(eye, zero, a[:half, half:])],
                [jnp.where(eye, zero, a[half:, :half]), jnp.where(eye, bottom, a[half:, half:])],
            ]
        )
        return _moved(_moved(a, 0), 1), _moved(_turned(v, rotation), 1)

    rounds = _sweeps(n, real) * (2 * half - 1)
    a, v = lax.fori_loop(0, rounds, round_, (a, jnp.eye(2 * half, dtype=a.dtype)))
    values = jnp.diagonal(a)[:n]
    return v[:n, :n], (lax.real(values) if _is_complex(a) else values) * scale


def _svd(a: jax.Array, full_matrices: bool) -> Arrays:
    """Returns u, s and v of a matrix that is at least as high as wide."""
    m, n = a.shape
    real = a.real.dtype
    if n == 0:
        return jnp.eye(m, m if full_matrices else 0, dtype=a.dtype), jnp.zeros(0, real), jnp.zeros((0, 0), a.dtype)
    a, scale = _scaled(a)
    packed, taus, _ = reflect(a)
    half = (n + 1) // 2
    b = jnp.pad(jnp.triu(packed[:n]), ((0, 0), (0, 2 * half - n)))

    def round_(_: Any, state: Arrays) -> Arrays:
        b, v = state
        left, right = b[:, :half], b[:, half:]
        norms = [_squares(side).sum(0) for side in (left, right)]
        rotation, _ = _rotation(norms[0], norms[1], (left.conj() * right).sum(0))
        return _moved(_turned(b, rotation), 1), _moved(_turned(v, rotation), 1)

    rounds = _sweeps(n, real) * (2 * half - 1)
    b, v = lax.fori_loop(0, rounds, round_, (b, jnp.eye(2 * half, dtype=a.dtype)))
    b, v = b[:, :n], v[:n, :n]
    s = lax.sqrt(_squares(b).sum(0))
    order = jnp.argsort(s, descending=True)
    b, v, s = b[:, order], v[:, order], s[order]
    # The reflections that diagonalise the orthogonal columns give orthonormal ones, also for zero columns.
    inner, inner_taus, _ = reflect(b)
    d = jnp.diagonal(inner)
    d = lax.real(d) if _is_complex(b) else d
    u = apply(inner, inner_taus, jnp.eye(n, dtype=a.dtype)) * jnp.where(d < 0, -1, 1).astype(a.dtype)
    columns = m if full_matrices else n
    whole = jnp.eye(m, columns, dtype=a.dtype).at[:n, :n].set(u)
    return apply(packed, taus, whole), s * scale, v


def _is_complex(a: jax.Array) -> bool:
    return bool(jnp.iscomplexobj(a))


def _squares(a: jax.Array) -> jax.Array:
    return lax.real(a) * lax.real(a) + lax.imag(a) * lax.imag(a) if _is_complex(a) else a * a


def _scaled(a: jax.Array) -> Arrays:
    """Returns a matrix divided by its largest element, and that element."""
    largest = jnp.abs(a).max()
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    return a / scale.astype(a.dtype), scale


def _sweeps(n: int, dtype: Any) -> int:
    # Convergence is quadratic at the end: the last sweep squares the remaining error.
    return (6 if dtype == jnp.float64 else 5) + max(1, (n - 1).bit_length())


def _rotation(p: jax.Array, q: jax.Array, pq: jax.Array) -> tuple[Arrays, jax.Array]:
    """Returns the rotation that makes the off-diagonal elements zero, and by how much the diagonal changes."""
    size = jnp.abs(pq)
    none = size < float(np.finfo(size.dtype).tiny)
    safe = jnp.where(none, jnp.ones_like(size), size)
    ratio = (q - p) / (2 * safe)
    tangent = jnp.where(ratio < 0, -1, 1).astype(ratio.dtype) / (jnp.abs(ratio) + lax.sqrt(1 + ratio * ratio))
    tangent = jnp.where(none, jnp.zeros_like(tangent), tangent)
    cosine = 1 / lax.sqrt(1 + tangent * tangent)
    phase = jnp.where(none, jnp.ones_like(pq), pq / safe.astype(pq.dtype))
    sine = tangent * cosine
    return (cosine.astype(pq.dtype), sine.astype(pq.dtype), phase.conj()), tangent * size


def _turned(a: jax.Array, rotation: Arrays) -> jax.Array:
    """Rotates the columns of the first half against the second half."""
    cosine, sine, phase = rotation
    half = a.shape[1] // 2
    left, right = a[:, :half], a[:, half:] * phase
    return jnp.concatenate([cosine * left - sine * right, sine * left + cosine * right], axis=1)


def _moved(a: jax.Array, axis: int) -> jax.Array:
    """Moves all columns except the first to the next position of the tournament."""
    half = a.shape[axis] // 2
    if half == 1:
        return a

    def part(start: int, stop: int) -> jax.Array:
        return lax.slice_in_dim(a, start, stop, axis=axis)

    pieces = [part(0, 1), part(half, half + 1), part(1, half - 1), part(half + 1, 2 * half), part(half - 1, half)]
    return jnp.concatenate(pieces, axis=axis)
