"""Sums and means over any set of axes, each result in a fixed order of additions."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import axis_indices, flag, float_array
from bijax.core.derivative import custom_vjp
from bijax.dispatch.rows import define_row_kernel
from pallas_kernels.parts.xla.lanes import divide
from pallas_kernels.parts.xla.tiles import isolate


def sum(x: ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> jax.Array:
    """Adds the elements along the given axes.

    The elements of one result, in row-major order of the axes, are added in float32 in the order of
    `pallas_kernels.contract.RowContract`, which depends on their number alone. The result is rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes to add along; all by default. No axes give `x` back.
        keepdims: Whether the axes stay, with length 1.

    Returns:
        An array of the dtype of `x`. The sum of nothing is 0; a sum of zeros is +0, as with `jnp.sum`.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If an axis does not exist or is named twice.

    Guarantee: row-invariant; the gradient too. (Rows are the elements of one result.)

    Example:
        >>> sum(jnp.ones((2, 300)), axis=1).tolist()
        [300.0, 300.0]
    """
    return _over_axes("bijax.sum", x, axis, keepdims, mean=False)


def mean(x: ArrayLike, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> jax.Array:
    """Averages the elements along the given axes: their `sum` in float32, divided by their number.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes to average along; all by default. No axes give `x` back.
        keepdims: Whether the axes stay, with length 1.

    Returns:
        An array of the dtype of `x`. The mean of nothing is nan, as with `jnp.mean`.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If an axis does not exist or is named twice.

    Guarantee: row-invariant; the gradient too. (Rows are the elements of one result.)

    Example:
        >>> mean(jnp.arange(6.0).reshape(2, 3), axis=(0, 1)).tolist()
        2.5
    """
    return _over_axes("bijax.mean", x, axis, keepdims, mean=True)


def _over_axes(op: str, x: Any, axis: int | Sequence[int] | None, keepdims: bool, *, mean: bool) -> jax.Array:
    array, keepdims = float_array(op, "x", x), flag(op, "keepdims", keepdims)
    axes = axis_indices(op, axis, array.ndim)
    if not axes:
        return array
    arranged, shape = arrange(array, axes, keepdims)
    return _reduce(arranged, arranged.shape[1], array.dtype, mean).reshape(shape).astype(array.dtype)


def arrange(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns `x` as (A, R, B), R being the elements along the axes in row-major order, and the result's shape.

    Args:
        x: Array of any shape.
        axes: Axes of a row, ascending, at least one.
        keepdims: Whether the axes stay in the result's shape, with length 1.
    """
    kept = tuple(a for a in range(x.ndim) if a not in axes)
    shape = tuple(n if a in kept else 1 for a, n in enumerate(x.shape) if keepdims or a in kept)
    if axes != tuple(range(axes[0], axes[-1] + 1)):
        x = x.transpose((*kept, *axes))
        axes = tuple(range(len(kept), x.ndim))
    edges = (0, axes[0], axes[-1] + 1, x.ndim)
    before, length, after = (math.prod(x.shape[i:j]) for i, j in itertools.pairwise(edges))
    return x.reshape(before, length, after), shape


@custom_vjp(nondiff_argnums=(1, 2, 3))
def _reduce(x: jax.Array, length: int, dtype: jnp.dtype, mean: bool) -> jax.Array:
    """(A, R, B) to (A, B) float32; `length` is R and `dtype` that of x."""
    return _kernel({"x": x}, mean=mean)[0]


@custom_vjp(nondiff_argnums=(1, 2, 3))
def _spread(g: jax.Array, length: int, dtype: jnp.dtype, mean: bool) -> jax.Array:
    """The transpose of `_reduce`: (A, B) float32 to (A, R, B)."""
    if mean:
        (g,) = isolate(divide(g, length))
    return jnp.broadcast_to(g.astype(dtype)[:, None], (g.shape[0], length, g.shape[1]))


def _reduce_forward(x: jax.Array, length: int, dtype: jnp.dtype, mean: bool) -> tuple[jax.Array, None]:
    return _reduce(x, length, dtype, mean), None


def _reduce_backward(length: int, dtype: jnp.dtype, mean: bool, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_spread(g, length, dtype, mean),)


def _spread_forward(g: jax.Array, length: int, dtype: jnp.dtype, mean: bool) -> tuple[jax.Array, None]:
    return _spread(g, length, dtype, mean), None


def _spread_backward(length: int, dtype: jnp.dtype, mean: bool, _: None, ct: jax.Array) -> tuple[jax.Array]:
    return (_reduce(ct, length, dtype, mean),)


_reduce.defvjp(_reduce_forward, _reduce_backward)
_spread.defvjp(_spread_forward, _spread_backward)

_kernel = define_row_kernel("sum_axis")
