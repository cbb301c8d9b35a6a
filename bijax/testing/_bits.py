"""Numbers as bit patterns: the unsigned view and the distance in units in the last place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
FLOAT_NAMES = tuple(MANTISSA_BITS)
_INTEGER_NAMES = ("bool", *(f"{sign}int{width}" for width in (8, 16, 32, 64) for sign in ("", "u")))
_NARROW_NAMES = ("float8_e4m3fn", "float8_e5m2")
_NAMES = (*FLOAT_NAMES, *_NARROW_NAMES, *_INTEGER_NAMES)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

NAN_DISTANCE = np.uint64(2**64 - 1)
"""`ulp_distance`'s result where a nan has no distance. No two numbers are this far apart."""


def to_numpy(x: ArrayLike) -> np.ndarray:
    """Gives `x` as a NumPy array, or says why its bits cannot be compared."""
    extended = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    array = None if extended else np.asarray(x)
    if array is None or array.dtype.name not in _NAMES:
        dtype = getattr(x, "dtype", type(x).__name__) if array is None else array.dtype
        raise TypeError(
            f"expected one of the dtypes {', '.join(_NAMES)}; got {dtype}. "
            "Take the real and imaginary parts of a complex array, and jax.random.key_data of PRNG keys."
        )
    return array


def is_float(dtype: np.dtype) -> bool:
    """Whether `dtype` is one of the four floating types with a ULP distance."""
    return dtype.name in FLOAT_NAMES


def bits(x: ArrayLike) -> np.ndarray:
    """Views an array as unsigned integers of the same width.

    Args:
        x: array of any shape; float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, bool or an integer
            type of 8 to 64 bits.

    Returns:
        An array of the same shape, uint8, uint16, uint32 or uint64. It shares memory with `x` where it can.

    Raises:
        TypeError: the dtype is unsupported (complex numbers, PRNG keys, strings, ...).

    Example:
        >>> import jax.numpy as jnp
        >>> [hex(b) for b in bits(jnp.array([0.0, -0.0, 1.0], jnp.bfloat16))]
        ['0x0', '0x8000', '0x3f80']
    """
    array = to_numpy(x)
    return array.view(_UNSIGNED[array.dtype.itemsize])


def unequal_bits(a: np.ndarray, b: np.ndarray, nan_bits: bool) -> np.ndarray:
    """Tells where two arrays of one shape and dtype differ in their bits.

    Args:
        a: array of a dtype of `bits`.
        b: array to compare with.
        nan_bits: whether two nans of other sign or payload differ.
    """
    unequal: np.ndarray = bits(a) != bits(b)
    if nan_bits or not is_float(a.dtype) or not unequal.any():
        return unequal
    return unequal & ~(np.isnan(a) & np.isnan(b))


def ulp_distance(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """Counts the representable values from each element of `a` to the element of `b`, in units in the last place.

    Neighbouring values have distance 1, and so have the largest finite value and infinity. The order is that of
    values: +0 and -0 are one value and have distance 0, although `assert_bits_equal` tells them apart. Two nans with
    identical bits have distance 0; a nan against a number, or against a nan of other sign or payload, has no
    distance and gives `NAN_DISTANCE`, the largest uint64.

    Args:
        a: float16, bfloat16, float32 or float64 array of any shape.
        b: array of the same shape and dtype.

    Returns:
        uint64 array of that shape. (The range of float64 does not fit int64.)

    Raises:
        TypeError: the dtypes differ, or are not among the four.
        ValueError: the shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> a = jnp.array([1.0, 0.0, -1.0, jnp.nan], jnp.float32)
        >>> b = jnp.array([1.0000001, -0.0, 1.0, 1.0], jnp.float32)
        >>> ulp_distance(a, b)[:3]
        array([         1,          0, 2130706432], dtype=uint64)
        >>> bool(ulp_distance(a, b)[3] == NAN_DISTANCE)
        True
    """
    a, b = to_numpy(a), to_numpy(b)
    if a.dtype != b.dtype or not is_float(a.dtype):
        raise TypeError(
            f"ulp_distance expects two arrays of one dtype among {', '.join(FLOAT_NAMES)}; got {a.dtype} and "
            f"{b.dtype}. Convert one of them explicitly if that is what you mean."
        )
    if a.shape != b.shape:
        raise ValueError(
            f"ulp_distance expects two arrays of one shape; got {a.shape} and {b.shape}. Broadcast them first if "
            "that is what you mean."
        )
    bits_a, bits_b = bits(a).astype(np.uint64), bits(b).astype(np.uint64)
    sign_bit = np.uint64(1 << (8 * a.dtype.itemsize - 1))
    magnitude_a, magnitude_b = bits_a & ~sign_bit, bits_b & ~sign_bit
    # Sign and magnitude stay apart, so that no intermediate value can wrap, not even from -max to max.
    same_sign = (bits_a & sign_bit) == (bits_b & sign_bit)
    gap = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    infinity = bits(np.asarray(jnp.inf, a.dtype)).astype(np.uint64)
    nan = (magnitude_a > infinity) | (magnitude_b > infinity)
    # With a nan the sum may exceed the range of the dtype, never that of uint64.
    distance = np.where(same_sign, gap, magnitude_a + magnitude_b)
    return np.asarray(np.where(nan, np.where(bits_a == bits_b, np.uint64(0), NAN_DISTANCE), distance))
