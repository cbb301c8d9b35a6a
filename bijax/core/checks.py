"""Checks of what users pass in, with messages that say what was expected, what was passed and what to do."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.explicit_axes import gathered
from pallas_kernels.errors import UnsupportedError

FLOATS = ("float32", "bfloat16", "float16")


def describe(x: Any) -> str:
    """Returns dtype and shape for messages, for example 'float32[2,3]', or else the type."""
    try:
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return f"{dtype}[{','.join(map(str, jnp.shape(x)))}]"
    except (TypeError, ValueError, OverflowError):
        return type(x).__name__


def as_array(op: str, name: str, x: Any, holds: str) -> jax.Array | np.ndarray:
    """Returns a JAX array unchanged, and anything else as a NumPy array, so that no conversion changes a value.

    Args:
        op: Name of the operation.
        name: Name of the argument.
        x: The value passed.
        holds: What it should hold, for the message.

    Raises:
        TypeError: If it is no array of numbers, nor nested sequences of them.
    """
    if isinstance(x, jax.Array):
        check_sizes(op, name, x)
        return gathered(x)
    try:
        array = np.asarray(x)
    except (TypeError, ValueError) as error:  # NumPy raises a ValueError for lists of unequal lengths
        raise TypeError(f"{op}: {name} must be an array of {holds}, got {type(x).__name__}.") from error
    if array.dtype.kind in "OSU":
        raise TypeError(f"{op}: {name} must be an array of {holds}, got {type(x).__name__}.")
    return array


def check_sizes(op: str, name: str, x: jax.Array) -> None:
    """Checks that the size of every axis is known.

    Raises:
        UnsupportedError: If one is symbolic.
    """
    if not all(isinstance(n, int) for n in x.shape):
        raise UnsupportedError(
            f"{op}: {name} must have axes of known sizes, got {describe(x)}; symbolic sizes (jax.export.symbolic_shape)"
            " are not supported. Export one program for each batch size, which has the same bits in every row."
        )


def integer_array(op: str, name: str, x: Any, *, on_host: bool = True) -> Any:
    """Returns `x` as an array of integers.

    Args:
        op: Name of the operation.
        name: Name of the argument.
        x: The value passed.
        on_host: Whether a JAX array with known values becomes a NumPy array, so that they can be checked.

    Raises:
        TypeError: If it holds no integers.
    """
    array = as_array(op, name, x, "integers")
    if not (array.size or hasattr(x, "dtype")):  # an empty list
        array = np.asarray(array).astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must hold integers, got {describe(array)}; convert it with .astype(jnp.int32).")
    return np.asarray(array) if on_host and not isinstance(array, jax.core.Tracer) else array


def float_array(op: str, name: str, x: Any) -> jax.Array:
    """Returns `x` as an array.

    Raises:
        TypeError: If `x` is not an array of a supported floating type.
    """
    try:
        array = gathered(jnp.asarray(x))
    except (TypeError, ValueError, OverflowError) as error:  # a ValueError for None and for lists of unequal lengths
        raise TypeError(f"{op}: {name} must be an array of {' or '.join(FLOATS)}, got {type(x).__name__}.") from error
    check_sizes(op, name, array)
    if array.dtype.name not in FLOATS:
        raise TypeError(
            f"{op}: {name} must have one of the dtypes {', '.join(FLOATS)}, got {describe(array)};"
            f" convert it first, for example with {name}.astype(jnp.float32)."
        )
    return array


def row_vector(op: str, name: str, vector: Any, x: jax.Array, rows: str = "x") -> jax.Array | None:
    """Returns `vector` as an array of the length of the rows of `x`; None if it is None.

    Args:
        op: Name of the operation.
        name: Name of the vector.
        vector: The value passed, or None.
        x: The rows, (..., C).
        rows: Name of `x`.

    Raises:
        TypeError: If the vector is not an array of a supported floating type.
        ValueError: If `x` has no dimensions, or the vector's shape is not (C,).
    """
    if x.ndim < 1:
        raise ValueError(f"{op}: {rows} must have at least 1 dimension, got {describe(x)}.")
    if vector is None:
        return None
    array = float_array(op, name, vector)
    if array.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have the shape {x.shape[-1:]} of a row of {rows}, got {name} {describe(array)}"
            f" and {rows} {describe(x)}."
        )
    return array


def same_dtype(op: str, **arrays: jax.Array | None) -> None:
    """Checks that the arrays that are present share one dtype.

    Raises:
        TypeError: If they do not.
    """
    given = {n: a for n, a in arrays.items() if a is not None}
    if len({a.dtype for a in given.values()}) > 1:
        came = ", ".join(f"{n} {describe(a)}" for n, a in given.items())
        raise TypeError(f"{op}: the arguments must share one dtype, got {came}; convert them to a common one first.")


def float_dtype(op: str, name: str, dtype: Any) -> np.dtype[Any]:
    """Returns `dtype` if it is a supported floating type.

    Raises:
        TypeError: If it is not.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be one of {', '.join(FLOATS)}, got {dtype!r}.") from error
    if found.name not in FLOATS:
        raise TypeError(f"{op}: {name} must be one of {', '.join(FLOATS)}, got {found.name}.")
    return found


def integer(op: str, name: str, number: Any) -> int:
    """Returns a number that is fixed when the program is traced.

    Raises:
        TypeError: If it is not an integer; a bool is not.
    """
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError as error:
        raise TypeError(f"{op}: {name} must be an integer, got {_came(number)}.") from error


def flag(op: str, name: str, value: Any) -> bool:
    """Returns a truth value that is fixed when the program is traced.

    Raises:
        TypeError: If it is neither a bool nor 0 or 1.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{op}: {name} must be True or False when the program is traced, got {_came(value)}; pass it with"
            " static_argnames of jax.jit, or choose with jax.lax.cond."
        )
    if not (isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1))):
        raise TypeError(f"{op}: {name} must be True or False, got {_came(value)}.")
    return bool(value)


def check_callable(op: str, fn: Any) -> None:
    """Checks that something is a function, or another callable, that JAX can trace.

    Raises:
        TypeError: If it is not.
    """
    if isinstance(fn, (jax.stages.Lowered, jax.stages.Compiled, jax.stages.Traced)):
        raise TypeError(
            f"{op}: expected a function, got {type(fn).__name__}, a program that is already built; pass the function"
            " that it was built from."
        )
    if isinstance(fn, staticmethod):  # callable, but what is made of it would get the instance as first argument
        raise TypeError(f"{op}: expected a function, got staticmethod; put @staticmethod above the other decorators.")
    if not callable(fn):
        raise TypeError(f"{op}: expected a function, got {type(fn).__name__}.")


def real(op: str, name: str, number: Any, *, least: float = -math.inf) -> float:
    """Returns a number that is fixed when the program is traced.

    Raises:
        TypeError: If it is not a number; a bool is not.
        ValueError: If it is not finite, or below `least`.
    """
    if isinstance(number, jax.core.Tracer):
        raise TypeError(
            f"{op}: {name} must be a number that is known when the program is traced, got {_came(number)}; pass it with"
            " static_argnames of jax.jit, or as a Python number."
        )
    try:
        if isinstance(number, (bool, str)):
            raise TypeError
        value = float(number)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be a number, got {_came(number)}.") from error
    if not (math.isfinite(value) and value >= least):
        limit = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{op}: {name} must be a finite number{limit}, got {value}.")
    return value


def _came(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"a traced {describe(value)}"
    return f"{value!r} of type {type(value).__name__}"


def axis_index(op: str, axis: int, ndim: int) -> int:
    """Returns `axis` counted from the front.

    Raises:
        TypeError: If `axis` is not an integer; a bool is not.
        ValueError: If an array of `ndim` dimensions has no such axis.
    """
    axis = integer(op, "an axis", axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis must be in [{-ndim}, {ndim}) for an array of {ndim} dimensions, got {axis}.")
    return axis % ndim


def axis_indices(op: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns a set of axes counted from the front, in ascending order; None means all of them.

    Raises:
        TypeError: If an axis is not an integer.
        ValueError: If an axis does not exist or is named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    named = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    found = sorted(axis_index(op, a, ndim) for a in named)
    if len(set(found)) != len(found):
        raise ValueError(f"{op}: an axis is named twice in {tuple(named)} for an array of {ndim} dimensions.")
    return tuple(found)
