"""Argument checks for inference-engine operations: integers, vectors of scales, named shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, float_array
from bijax.core.explicit_axes import gathered


def is_known(*arrays: Any) -> bool:
    """Returns whether the values of all arrays are known while the program is traced; None counts as known."""
    return not any(isinstance(a, jax.core.Tracer) for a in arrays)


def array_of_8_bits(op: str, name: str, x: Any) -> jax.Array:
    """Returns `x` as an array of int8 or float8_e4m3fn.

    Raises:
        TypeError: If it is not an integer array.
    """
    array = _array(op, name, x, "int8 or float8_e4m3fn")
    if array.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise TypeError(
            f"{op}: {name} must have the dtype int8 or float8_e4m3fn, got {describe(array)}; quantise it first, for"
            " example with bijax.scale_dynamic_quant."
        )
    return array


def narrowed(numbers: Any, low: int, high: int) -> jax.Array:
    """Returns integers as int32; values outside [low, high] become `low - 1` before the conversion."""
    numbers = jnp.asarray(numbers)
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(jnp.int32)
    return jnp.where((numbers >= low) & (numbers <= high), numbers.astype(jnp.int32), jnp.int32(low - 1))


def capped_sums(numbers: jax.Array, cap: int) -> jax.Array:
    """Returns cumulative sums of int32 numbers in [0, cap], clamped to `cap`, so that none overflows."""

    def add(total: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.minimum(total, cap - number) + number

    return jax.lax.associative_scan(add, numbers)


def scale_vector(op: str, name: str, x: Any, shape: Sequence[int | str], sizes: dict[str, int]) -> jax.Array:
    """Returns `x` as a floating array of a shape whose lengths have names; see `check_shape`.

    Raises:
        TypeError: If it is not a floating array.
        ValueError: If it has another shape.
    """
    array = float_array(op, name, x)
    check_shape(op, name, array, shape, sizes)
    return array


def cache_scale(op: str, name: str, x: Any, sizes: dict[str, int]) -> jax.Array:
    """Returns the scales of an 8-bit cache, (K, D) per channel or (K,) per head.

    Raises:
        TypeError: If they are not a floating array.
        ValueError: If they have another shape.
    """
    array = float_array(op, name, x)
    check_shape(op, name, array, ("K",) if array.ndim == 1 else ("K", "D"), sizes)
    return array


def check_shape(op: str, name: str, x: Any, shape: Sequence[int | str], sizes: dict[str, int]) -> None:
    """Checks a shape, and learns from it the lengths that are not known yet.

    Args:
        op: Name of the operation.
        name: Name of the argument.
        x: The array.
        shape: Its dimensions, each a length or the name of one.
        sizes: Lengths by name; a name that is not in it yet takes the length that `x` has there.

    Raises:
        ValueError: If the number of dimensions or a length is another.
    """
    dims = jnp.shape(x)
    learnt = dict(sizes)
    if len(dims) == len(shape):
        for length, expected in zip(dims, shape, strict=True):
            if isinstance(expected, str):
                learnt.setdefault(expected, length)
        if all(n == (learnt[e] if isinstance(e, str) else e) for n, e in zip(dims, shape, strict=True)):
            sizes.update(learnt)
            return
    names = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    known = [f"{n}={sizes[n]}" for n in dict.fromkeys(s for s in shape if isinstance(s, str)) if n in sizes]
    given = f" with {', '.join(known)}" if known else ""
    raise ValueError(f"{op}: {name} must have the shape ({names}){given}, got {describe(x)}.")


def check_known(op: str, name: str, numbers: Any, low: int, high: int, meaning: str) -> None:
    """Checks integers that are known while the program is traced.

    Raises:
        ValueError: If one lies outside [low, high].
    """
    if not is_known(numbers):
        return
    wrong = np.argwhere((numbers < low) | (numbers > high))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"{op}: {name} must be in [{low}, {high}] ({meaning}), got {numbers[at]} at {at} and {len(wrong)} such"
            f" numbers in {describe(numbers)}."
        )


def _array(op: str, name: str, x: Any, expected: str) -> jax.Array:
    try:
        return gathered(jnp.asarray(x))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{op}: {name} must be an array of {expected}, got {type(x).__name__}.") from error
