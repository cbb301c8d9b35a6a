"""Variances and standard deviations over any set of axes, in a fixed order of additions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import axis_indices, flag, float_array, integer
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.rows import define_row_kernel
from bijax.ops.rows.reductions import arrange
from pallas_kernels.parts.xla.tiles import isolate


def var(x: ArrayLike, axis: int | Sequence[int] | None = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """Averages the squared distances from the mean along the given axes.

    Both sums, of the elements and of the squares, are computed in float32 in the order of
    `pallas_kernels.contract.RowContract`, the second one in a second pass, so that the variance keeps its digits when
    the mean is large. The result is rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes along which to compute the variance; all by default.
        ddof: Subtracted from the number of elements in the divisor; at least 0.
        keepdims: Whether the axes stay, with length 1.

    Returns:
        An array of the dtype of `x`; nan where `ddof` leaves nothing to divide by, as with `jnp.var`.

    Raises:
        TypeError: If the dtype is unsupported or `ddof` is not an integer.
        ValueError: If an axis does not exist or is named twice, or `ddof` is negative.

    Guarantee: row-invariant; the gradient too. (Rows are the elements of one result.)

    Example:
        >>> var(jnp.array([[1.0, 3.0], [5.0, 5.0]]), axis=1, ddof=1).tolist()
        [2.0, 0.0]
    """
    return _over_axes("bijax.var", x, axis, ddof, keepdims, root=False)


def std(x: ArrayLike, axis: int | Sequence[int] | None = None, *, ddof: int = 0, keepdims: bool = False) -> jax.Array:
    """Returns the square root of the variance along the given axes, computed as in `var` and rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes along which to compute the standard deviation; all by default.
        ddof: As in `var`.
        keepdims: Whether the axes stay, with length 1.

    Returns:
        An array of the dtype of `x`; nan where the divisor is not positive, as with `jnp.std`. Its gradient is nan
        where all elements are equal, as with `jnp.std`.

    Raises:
        TypeError: If the dtype is unsupported or `ddof` is not an integer.
        ValueError: If an axis does not exist or is named twice, or `ddof` is negative.

    Guarantee: row-invariant; the gradient too. (Rows are the elements of one result.)

    Example:
        >>> std(jnp.array([[1.0, 3.0], [5.0, 9.0]]), axis=1).tolist()
        [1.0, 2.0]
    """
    return _over_axes("bijax.std", x, axis, ddof, keepdims, root=True)


def _over_axes(
    op: str, x: Any, axis: int | Sequence[int] | None, ddof: int, keepdims: bool, *, root: bool
) -> jax.Array:
    array, keepdims = float_array(op, "x", x), flag(op, "keepdims", keepdims)
    axes = axis_indices(op, axis, array.ndim)
    ddof = integer(op, "ddof", ddof)
    if ddof < 0:
        raise ValueError(f"{op}: ddof must be at least 0, got {ddof}.")
    if axes:
        arranged, shape = arrange(array, axes, keepdims)
    else:
        arranged, shape = array.reshape(array.size, 1, 1), array.shape
    y = (_standard_deviation if root else _variance)(arranged, ddof)
    return y.reshape(shape).astype(array.dtype)


@custom_vjp(nondiff_argnums=(1,))
def _variance(x: jax.Array, ddof: int) -> jax.Array:
    """(A, R, B) to (A, B) float32."""
    return _forward(x, ddof)[0]


def _forward(x: jax.Array, ddof: int) -> tuple[jax.Array, Arrays]:
    y, mean = _kernel({"x": x}, ddof=ddof)
    return y, (x, mean)


def _backward(ddof: int, saved: Arrays, g: jax.Array) -> Arrays:
    x, mean = saved
    return _gradient_kernel({"x": x, "mean": mean, "g": g}, ddof=ddof)


_variance.defvjp(_forward, _backward)


@custom_vjp(nondiff_argnums=(1,))
def _standard_deviation(x: jax.Array, ddof: int) -> jax.Array:
    """(A, R, B) to (A, B) float32."""
    return _root_forward(x, ddof)[0]


def _root_forward(x: jax.Array, ddof: int) -> tuple[jax.Array, Arrays]:
    y, saved = _forward(x, ddof)
    (root,) = isolate(jnp.sqrt(isolate(y)[0]))
    return root, (*saved, root)


def _root_backward(ddof: int, saved: Arrays, g: jax.Array) -> Arrays:
    *rest, root = saved
    g, twice = isolate(g, root + root)
    return _backward(ddof, tuple(rest), isolate(g / twice)[0])


_standard_deviation.defvjp(_root_forward, _root_backward)

_kernel = define_row_kernel("variance")
_gradient_kernel = define_row_kernel("variance_gradient")
