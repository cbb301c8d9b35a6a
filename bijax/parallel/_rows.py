"""Rows that all devices have, cut over the devices and put together again. Rows are copied and never added."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.checks import as_array, describe, integer
from bijax.parallel._axes import (
    Axis,
    check_differentiable,
    check_equal_on_all,
    names_of,
    size_of,
    vary_over,
)
from bijax.parallel._sums import gathered

_OWN, _ALL = "bijax.parallel.own_rows", "bijax.parallel.all_rows"


def own_rows(x: Any, axis: Axis, *, fill: Any = 0) -> jax.Array:
    """Returns this device's part of rows that all devices have; `all_rows` is the way back.

    Device d of D has the rows from d * R on, where R is T / D, rounded up.

    Args:
        x: (T, ...), the same on all devices of the axis.
        axis: Name of the mesh axis, or a tuple of names; None for one device.
        fill: What the rows after the last one are filled with, where D does not divide T.

    Returns:
        (R, ...) of the dtype of `x`.

    Raises:
        TypeError: If `x` is no array, or the axis is invalid.
        ValueError: If `x` has no dimension or varies over the axis, or the axis is unknown.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: rows are copied and never added, in the gradient too, so no bit depends on the number of devices.

    Example:
        >>> own_rows(jnp.arange(3.0), None).tolist()
        [0.0, 1.0, 2.0]
    """
    x = _rows(_OWN, x)
    size_of(_OWN, axis)
    check_equal_on_all(_OWN, "x", x, axis, "it is cut already")
    if axis is None:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _part(x, axis, fill)
    return _own_rows(x, axis, fill, x.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _own_rows(x: jax.Array, axis: Axis, fill: Any, number: int) -> jax.Array:
    return _part(x, axis, fill)


def _own_rows_forward(x: jax.Array, axis: Axis, fill: Any, number: int) -> tuple[jax.Array, None]:
    check_differentiable(_OWN, axis)
    return _part(x, axis, fill), None


def _own_rows_backward(axis: Axis, fill: Any, number: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_together(g, axis, number),)


_own_rows.defvjp(_own_rows_forward, _own_rows_backward)


def all_rows(x: Any, axis: Axis, *, number: int | None = None) -> jax.Array:
    """Returns the rows of all devices, in the order of the devices; the way back from `own_rows`.

    Args:
        x: (R, ...), this device's rows.
        axis: As for `own_rows`.
        number: How many rows to return, without those that `own_rows` filled in; all by default.

    Returns:
        (number, ...), the same on all devices of the axis.

    Raises:
        TypeError: If `x` is no array, the axis is invalid, or `number` is not an integer.
        ValueError: If `x` has no dimension, the axis is unknown, or there are fewer than `number` rows.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: as `own_rows`.

    Example:
        >>> all_rows(jnp.arange(3.0), None, number=2).tolist()
        [0.0, 1.0]
    """
    x = _rows(_ALL, x)
    total = size_of(_ALL, axis) * x.shape[0]
    number = total if number is None else integer(_ALL, "number", number)
    if not 0 <= number <= total:
        raise ValueError(f"{_ALL}: number must be from 0 to {total}, the rows of all devices, got {number}.")
    if axis is None:
        return x[:number]
    x = vary_over(axis, x)
    return _all_rows(x, axis, number) if jnp.issubdtype(x.dtype, jnp.inexact) else _together(x, axis, number)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_rows(x: jax.Array, axis: Axis, number: int) -> jax.Array:
    return _together(x, axis, number)


def _all_rows_forward(x: jax.Array, axis: Axis, number: int) -> tuple[jax.Array, None]:
    check_differentiable(_ALL, axis)
    return _together(x, axis, number), None


def _all_rows_backward(axis: Axis, number: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_part(g, axis, 0),)


_all_rows.defvjp(_all_rows_forward, _all_rows_backward)


def _part(x: jax.Array, axis: Axis, fill: Any) -> jax.Array:
    count = size_of(_OWN, axis)
    own = -(-x.shape[0] // count)
    padding = [(0, own * count - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]
    padded = vary_over(axis, jnp.pad(x, padding, constant_values=fill))
    return lax.dynamic_slice_in_dim(padded, lax.axis_index(names_of(axis)) * own, own)


def _together(x: jax.Array, axis: Axis, number: int) -> jax.Array:
    return gathered(x, axis, 0, to="invarying")[:number]


def _rows(op: str, x: Any) -> jax.Array:
    x = as_array(op, "x", x, "numbers")
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least one dimension, got {describe(x)}.")
    return jnp.asarray(x)
