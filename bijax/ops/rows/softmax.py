"""Softmax, log_softmax and logsumexp over any set of axes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from bijax.core.checks import axis_indices, flag, float_array
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.rows import as_rows, define_row_kernel


def softmax(x: ArrayLike, axis: int | Sequence[int] | None = -1) -> jax.Array:
    """Returns exp(x) divided by its sum along the given axes, computed in float32 and rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes that make up one row; None means all.

    Returns:
        An array of the shape and dtype of `x`. A row of nothing but -inf, or with +inf or nan, gives nan, as
        `jax.nn.softmax` does.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If an axis does not exist or is named twice.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> softmax(jnp.zeros((1, 4))).tolist()
        [[0.25, 0.25, 0.25, 0.25]]
    """
    rows, back = _rows("bijax.softmax", x, axis)
    return back(_softmax(rows))


def log_softmax(x: ArrayLike, axis: int | Sequence[int] | None = -1) -> jax.Array:
    """Returns x minus its `logsumexp` along the given axes, computed in float32 and rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes that make up one row; None means all.

    Returns:
        An array of the shape and dtype of `x`. A row of nothing but -inf, or with +inf or nan, gives nan, as
        `jax.nn.log_softmax` does.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If an axis does not exist or is named twice.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> log_softmax(jnp.array([7.0])).tolist()
        [0.0]
    """
    rows, back = _rows("bijax.log_softmax", x, axis)
    return back(_log_softmax(rows))


def logsumexp(x: ArrayLike, axis: int | Sequence[int] | None = -1, *, keepdims: bool = False) -> jax.Array:
    """Returns the logarithm of the sum of exp(x) along the given axes, computed in float32 and rounded once.

    Args:
        x: Array of any shape, float32, bfloat16 or float16.
        axis: Axis or axes that make up one row; None means all.
        keepdims: Whether the axes stay, with length 1.

    Returns:
        An array of the dtype of `x`. A row of nothing, or of nothing but -inf, gives -inf; one with +inf gives +inf.

    Raises:
        TypeError: If the dtype is unsupported.
        ValueError: If an axis does not exist or is named twice.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> logsumexp(jnp.array([[3.0], [-jnp.inf]])).tolist()
        [3.0, -inf]
    """
    rows, _ = _rows("bijax.logsumexp", x, axis)
    shape, axes = jnp.shape(x), axis_indices("bijax.logsumexp", axis, jnp.ndim(x))
    keepdims = flag("bijax.logsumexp", "keepdims", keepdims)
    y = _logsumexp(rows).astype(rows.dtype)
    return y.reshape(tuple(1 if a in axes else n for a, n in enumerate(shape) if keepdims or a not in axes))


def _rows(op: str, x: Any, axis: int | Sequence[int] | None) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    x = float_array(op, "x", x)
    return as_rows(x, axis_indices(op, axis, x.ndim))


@custom_vjp()
def _softmax(x: jax.Array) -> jax.Array:
    return _softmax_kernel({"x": x})[0]


def _softmax_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _softmax(x)
    return y, y


def _softmax_backward(y: jax.Array, g: jax.Array) -> Arrays:
    return _softmax_gradient_kernel({"y": y, "g": g})


_softmax.defvjp(_softmax_forward, _softmax_backward)


@custom_vjp()
def _log_softmax(x: jax.Array) -> jax.Array:
    return _log_softmax_kernel({"x": x})[0]


def _log_softmax_forward(x: jax.Array) -> tuple[jax.Array, Arrays]:
    y, m, log_sum = _log_softmax_kernel({"x": x})
    return y, (x, m, log_sum)


def _log_softmax_backward(saved: Arrays, g: jax.Array) -> Arrays:
    x, m, log_sum = saved
    return _log_softmax_gradient_kernel({"x": x, "m": m, "log_sum": log_sum, "g": g})


_log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)


@custom_vjp()
def _logsumexp(x: jax.Array) -> jax.Array:
    """(M, C) to (M, 1) float32."""
    return _logsumexp_forward(x)[0]


def _logsumexp_forward(x: jax.Array) -> tuple[jax.Array, Arrays]:
    m, log_sum = _logsumexp_kernel({"x": x})
    return m + log_sum, (x, m, log_sum)


def _logsumexp_backward(saved: Arrays, g: jax.Array) -> Arrays:
    x, m, log_sum = saved
    return _logsumexp_gradient_kernel({"x": x, "m": m, "log_sum": log_sum, "g": g})


_logsumexp.defvjp(_logsumexp_forward, _logsumexp_backward)

_softmax_kernel = define_row_kernel("softmax")
_softmax_gradient_kernel = define_row_kernel("softmax_gradient")
_log_softmax_kernel = define_row_kernel("log_softmax")
_log_softmax_gradient_kernel = define_row_kernel("log_softmax_gradient")
_logsumexp_kernel = define_row_kernel("logsumexp")
_logsumexp_gradient_kernel = define_row_kernel("logsumexp_gradient")
