"""Hostile data: rows on which a change in the order of operations, or a leak between rows, shows."""

from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike

from bijax.testing._bits import FLOAT_NAMES, MANTISSA_BITS, bits, is_float

_Fill = Callable[[np.random.Generator, tuple[int, ...], np.dtype], np.ndarray]


def hostile_rows(seed: int, shape: tuple[int, ...], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Makes arrays for bitwise sweeps, by name.

    A row is a vector along the last axis.

    - `normal`: the standard normal distribution.
    - `linspace`: evenly spaced from -100 to 100 over the whole array.
    - `wide`: either sign, magnitudes spread evenly over two thirds of the dtype's exponents; a product of two of
      them still fits.
    - `huge`: either sign, in the highest two binades, so that most sums overflow.
    - `denormal`: either sign, every element denormal.
    - `zeros`: +0 and -0.
    - `inf`, `nan`: normal rows, among which every second row, the first one included, holds infinities of either
      sign, or nans: rows 0, 4, 8, ... in all elements, rows 2, 6, 10, ... in one element.
    - `cancelling`: each row sums to exactly zero: shuffled pairs v, -v of wide magnitudes (and a zero where the length
      is odd), so that nothing but rounding is left in its sum.

    Args:
        seed: the same seed, shape and dtype give the same bits.
        shape: shape of every array, at least one axis.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        A dict from name to NumPy array of that shape and dtype.

    Raises:
        TypeError: `dtype` is not among the four.
        ValueError: `shape` has no axis.

    Example:
        >>> data = hostile_rows(0, (4, 6), "float32")
        >>> sorted(data)
        ['cancelling', 'denormal', 'huge', 'inf', 'linspace', 'nan', 'normal', 'wide', 'zeros']
        >>> float(data["cancelling"].astype("float64").sum())
        0.0
    """
    resolved = np.dtype(dtype)
    if not is_float(resolved):
        raise TypeError(f"hostile_rows expects a dtype among {', '.join(FLOAT_NAMES)}; got {resolved}.")
    if not shape:
        raise ValueError(
            f"hostile_rows expects a shape of at least one axis (a row); got {shape}. Pass (n,) for one row."
        )
    rng = np.random.default_rng(seed)
    return {name: fill(rng, tuple(shape), resolved) for name, fill in _HOSTILE.items()}


def neighbour_rows(kind: str, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes rows that are hostile in every element, as neighbours of the rows under test."""
    return _NEIGHBOURS[kind](rng, shape, dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def _linspace(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.linspace(-100.0, 100.0, int(np.prod(shape))).reshape(shape).astype(dtype)


def _wide(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    exponent_bits = 8 * dtype.itemsize - 1 - MANTISSA_BITS[dtype.name]
    reach = 2 ** (exponent_bits - 1) // 3
    exponents = rng.integers(-reach, reach, shape, endpoint=True)
    return np.ldexp(_signs(rng, shape) * rng.uniform(1.0, 2.0, shape), exponents).astype(dtype)


def _huge(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    infinity = int(bits(np.asarray(np.inf, dtype))[()])
    return _from_magnitudes(rng, shape, dtype, infinity - (2 << MANTISSA_BITS[dtype.name]), infinity)


def _denormal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _from_magnitudes(rng, shape, dtype, 1, 1 << MANTISSA_BITS[dtype.name])


def _zeros(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _from_magnitudes(rng, shape, dtype, 0, 1)


def _infinities(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return (_signs(rng, shape) * np.inf).astype(dtype)


def _nans(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def _cancelling(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    half = _wide(rng, (*shape[:-1], shape[-1] // 2), dtype)
    odd = np.zeros((*shape[:-1], shape[-1] % 2), dtype)
    return rng.permuted(np.concatenate([half, -half, odd], axis=-1), axis=-1)


def _beside_finite(special: _Fill) -> _Fill:
    def fill(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        out = _normal(rng, shape, dtype)
        rows = out.reshape(int(np.prod(shape[:-1])), shape[-1])
        rows[::4] = special(rng, rows[::4].shape, dtype)
        single = np.arange(2, len(rows), 4)
        if shape[-1]:
            rows[single, rng.integers(0, shape[-1], single.shape)] = special(rng, single.shape, dtype)
        return out

    return fill


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([-1.0, 1.0]), shape)


def _from_magnitudes(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, low: int, high: int
) -> np.ndarray:
    # Built from bit patterns: arithmetic on the host may flush denormals or overflow.
    unsigned = bits(np.empty((), dtype)).dtype
    sign = rng.integers(0, 2, shape, dtype=np.uint64) << np.uint64(8 * dtype.itemsize - 1)
    return (rng.integers(low, high, shape, dtype=np.uint64) | sign).astype(unsigned).view(dtype)


_HOSTILE: dict[str, _Fill] = {
    "normal": _normal,
    "linspace": _linspace,
    "wide": _wide,
    "huge": _huge,
    "denormal": _denormal,
    "zeros": _zeros,
    "inf": _beside_finite(_infinities),
    "nan": _beside_finite(_nans),
    "cancelling": _cancelling,
}
_NEIGHBOURS: dict[str, _Fill] = {
    "normal": _normal,
    "huge": _huge,
    "inf": _infinities,
    "nan": _nans,
    "zeros": _zeros,
    "denormal": _denormal,
}
NEIGHBOUR_KINDS = tuple(_NEIGHBOURS)
