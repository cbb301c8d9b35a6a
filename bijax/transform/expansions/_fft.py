"""Discrete Fourier transforms as invariant products with small matrices.

XLA hands a transform to a library (on a GPU cuFFT), which plans it by the number of rows. Here a transform of length
n = n1 n2 is n2 transforms of length n1, a multiplication by roots of unity, and n1 transforms of length n2; a short one
is a product with its matrix. A length with a large prime factor uses a convolution of a power-of-two length
(Bluestein). So the order of all sums depends only on the length. On a CPU the library computes longer transforms
(`_fft_blocks`).

Source: J. W. Cooley and J. W. Tukey, An algorithm for the machine calculation of complex Fourier series, Mathematics of
Computation 19 (1965); L. I. Bluestein, A linear filtering approach to the computation of the discrete Fourier
transform, IEEE Transactions on Audio and Electroacoustics 18 (1970).
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parts = tuple[jax.Array, jax.Array]

_FACTOR: Final = 32
"""The largest factor that a length is divided by."""
_PRIME: Final = 64
"""The largest length without such a factor that is a single product."""


def fft(x: jax.Array, *, fft_type: Any, fft_lengths: Sequence[int]) -> jax.Array:
    """Transforms the last axes, as `jax.lax.fft` does.

    Args:
        x: Array of a complex dtype, or of a real one for RFFT.
        fft_type: FFT, IFFT, RFFT or IRFFT.
        fft_lengths: Lengths of the transformed axes: 1 to 3.
    """
    kind = fft_type if isinstance(fft_type, str) else fft_type.name
    *outer, last = (int(n) for n in fft_lengths)
    if x.size == 0:
        columns = {"RFFT": last // 2 + 1, "IRFFT": last}.get(kind, x.shape[-1])
        dtype = x.real.dtype if kind == "IRFFT" else jnp.result_type(x, jnp.complex64)
        return jnp.zeros((*x.shape[:-1], columns), dtype)
    sign = 1 if kind.startswith("I") else -1
    parts: Parts
    if kind == "RFFT":
        parts = _along(-1, (x, jnp.zeros_like(x)), last, sign)
        parts = parts[0][..., : last // 2 + 1], parts[1][..., : last // 2 + 1]
    else:
        parts = lax.real(x), lax.imag(x)
    axes = range(-1 - len(outer), -1)
    for axis, length in zip(axes, outer, strict=True):
        parts = _along(axis, parts, length, sign)
    if kind in ("FFT", "IFFT"):
        parts = _along(-1, parts, last, sign)
    elif kind == "IRFFT":
        parts = _along(-1, _mirrored(parts, last), last, sign)
    if sign > 0:
        scale = float(np.prod([*outer, last]))
        parts = parts[0] / scale, parts[1] / scale
    return parts[0] if kind == "IRFFT" else lax.complex(*parts)


def _mirrored(parts: Parts, n: int) -> Parts:
    """Returns the whole spectrum of a real signal from its first half; purely real entries get no imaginary part."""
    a, b = (v[..., : n // 2 + 1] for v in parts)
    k = np.arange(n // 2 + 1)
    b = jnp.where(jnp.asarray((k == 0) | (2 * k == n)), jnp.zeros_like(b), b)
    inner = slice(1, (n + 1) // 2)
    return (
        jnp.concatenate([a, a[..., inner][..., ::-1]], axis=-1),
        jnp.concatenate([b, -b[..., inner][..., ::-1]], axis=-1),
    )


def _along(axis: int, parts: Parts, n: int, sign: int) -> Parts:
    """Transforms one axis of length n."""
    a, b = (jnp.moveaxis(v, axis, -1) for v in parts)
    a, b = _transform(a, b, n, sign)
    return jnp.moveaxis(a, -1, axis), jnp.moveaxis(b, -1, axis)


def _transform(a: jax.Array, b: jax.Array, n: int, sign: int) -> Parts:
    """Transforms the last axis, of length n, without a factor 1/n."""
    if n <= _FACTOR:
        return _product(a, b, n, sign)
    first = next(f for f in range(_FACTOR, 0, -1) if n % f == 0)
    if first == 1:
        return _product(a, b, n, sign) if n <= _PRIME else _bluestein(a, b, n, sign)
    second = n // first
    # Of x[j1 n2 + j2] the sums over j1; of these, transposed, the sums over j2 are X[k1 + n1 k2].
    a, b = (v.reshape(*v.shape[:-1], first, second).swapaxes(-1, -2) for v in (a, b))
    a, b = _product(a, b, first, sign)
    turns = np.multiply.outer(np.arange(second), np.arange(first))
    a, b = _turned(a, b, turns, n, sign)
    a, b = _transform(a.swapaxes(-1, -2), b.swapaxes(-1, -2), second, sign)
    return tuple(v.swapaxes(-1, -2).reshape(*v.shape[:-2], n) for v in (a, b))  # type: ignore[return-value]


def _product(a: jax.Array, b: jax.Array, n: int, sign: int) -> Parts:
    """Multiplies the last axis by the matrix of the transform: one real product of twice the length."""
    if n == 1:
        return a, b
    c, s = _roots(np.multiply.outer(np.arange(n), np.arange(n)), n, sign, a.dtype)
    matrix = jnp.asarray(np.block([[c, s], [-s, c]]))
    both = jnp.concatenate([a, b], axis=-1)
    result = jnp.matmul(both, matrix, precision=lax.Precision.HIGHEST)
    return result[..., :n], result[..., n:]


def _bluestein(a: jax.Array, b: jax.Array, n: int, sign: int) -> Parts:
    """Transforms as a convolution: jk = (j² + k² - (k - j)²) / 2."""
    length = 1 << (2 * n - 1).bit_length()
    squares = np.arange(n) ** 2
    a, b = _turned(a, b, squares, 2 * n, sign)
    a, b = (jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, length - n)]) for v in (a, b))
    chirp = np.zeros(length, np.complex128)
    root = np.exp(-sign * 1j * np.pi * (squares % (2 * n)) / n)
    chirp[:n], chirp[length - n + 1 :] = root, root[:0:-1]
    kernel = np.fft.fft(chirp) / length
    c, d = (jnp.asarray(v, a.dtype) for v in (kernel.real, kernel.imag))
    a, b = _transform(a, b, length, -1)
    a, b = a * c - b * d, a * d + b * c
    a, b = _transform(a, b, length, 1)
    return _turned(a[..., :n], b[..., :n], squares, 2 * n, sign)


def _turned(a: jax.Array, b: jax.Array, turns: np.ndarray, n: int, sign: int) -> Parts:
    """Multiplies by the n-th roots of unity to some powers."""
    c, s = map(jnp.asarray, _roots(turns, n, sign, a.dtype))
    return a * c - b * s, a * s + b * c


def _roots(turns: np.ndarray, n: int, sign: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of fractions of a circle, rounded once."""
    angle = 2 * np.pi * (turns % n) / n
    return np.cos(angle).astype(dtype), (sign * np.sin(angle)).astype(dtype)
