"""Cross entropy of logits against integer labels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import as_array, describe, float_array, integer, real
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.rows import define_row_kernel

_OP = "bijax.softmax_cross_entropy"


def softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, *, ignore_index: int | None = None, z_loss: float = 0.0
) -> jax.Array:
    """Returns logsumexp(logits) - logits[label] + z_loss * logsumexp(logits) ** 2 for each row of logits.

    Computed in float32. The backward pass recomputes the softmax; no one-hot array is made.

    Args:
        logits: (..., V) float32, bfloat16 or float16.
        labels: (...,) of any integer dtype, in [0, V).
        ignore_index: Label of the rows to ignore; it need not be in [0, V).
        z_loss: Weight of the squared logsumexp; at least 0.

    Returns:
        (...,) float32. Rows that are left out give 0 and have a zero gradient, whatever their logits.

    Raises:
        TypeError: If a dtype is unsupported, or `z_loss` is not a number or `ignore_index` not an integer that is
            known when the program is traced.
        ValueError: If the shapes do not fit, `z_loss` is negative or not finite, or a label is out of range. Labels
            that are traced (inside `jax.jit`, `jax.vmap`, ...) have no values to look at: there, a label out of range
            makes its row nan, loss and gradient.

    Guarantee: row-invariant; the gradient too.

    Example:
        >>> logits = jnp.zeros((3, 4)).at[0, 1].set(jnp.inf)
        >>> loss = softmax_cross_entropy(logits, jnp.array([-1, 0, 3]), ignore_index=-1)
        >>> [round(float(row), 4) for row in loss]
        [0.0, 1.3863, 1.3863]
    """
    logits = float_array(_OP, "logits", logits)
    wanted = integer_labels(_OP, labels)
    if logits.ndim < 1 or logits.shape[:-1] != wanted.shape:
        raise ValueError(
            f"{_OP}: labels must have the shape of logits without its last dimension, got logits {describe(logits)}"
            f" and labels {describe(wanted)}."
        )
    z_loss = real(_OP, "z_loss", z_loss, least=0)
    ignore_index = None if ignore_index is None else integer(_OP, "ignore_index", ignore_index)
    rows = math.prod(wanted.shape)
    codes = label_codes(_OP, wanted, logits.shape[-1], ignore_index).reshape(rows, 1)
    return row_losses(logits.reshape(rows, logits.shape[-1]), codes, z_loss).reshape(wanted.shape)


def integer_labels(op: str, labels: Any) -> Any:
    """Returns labels as they came, traced or as a NumPy array, so that no conversion can change a value."""
    array = as_array(op, "labels", labels, "integers")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: labels must be integers, got {describe(array)}; one-hot labels are not supported.")
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def label_codes(op: str, labels: Any, columns: int, ignore_index: int | None) -> jax.Array:
    """Returns labels as int32 for the kernel: -1 for rows to be left out, `columns` for labels out of range."""
    limits = np.iinfo(labels.dtype)
    # Numbers that the dtype of the labels cannot hold are not compared with them.
    ignored = labels != labels
    if ignore_index is not None and limits.min <= ignore_index <= limits.max:
        ignored = labels == ignore_index
    valid = labels >= 0
    if columns <= limits.max:
        valid &= labels < columns
    if not isinstance(labels, jax.core.Tracer):
        wrong = ~(valid | ignored)
        if wrong.any():
            row = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"{op}: labels must be in [0, {columns}), the columns of logits, or ignore_index={ignore_index}; got"
                f" {int(labels[row])} at {row} and {int(wrong.sum())} such labels in {describe(labels)}."
            )
    valid_labels = jnp.where(valid, labels, 0).astype(jnp.int32)
    return jnp.where(ignored, -1, jnp.where(valid, valid_labels, columns))


@custom_vjp(nondiff_argnums=(2,))
def row_losses(x: jax.Array, codes: jax.Array, z_loss: float) -> jax.Array:
    """(M, V) and (M, 1) of `label_codes` to (M, 1) float32, without checks."""
    return _forward(x, codes, z_loss)[0]


def _forward(x: jax.Array, codes: jax.Array, z_loss: float) -> tuple[jax.Array, Arrays]:
    loss, m, log_sum = losses_and_statistics(x, codes, z_loss)
    return loss, (x, codes, m, log_sum)


def losses_and_statistics(x: jax.Array, codes: jax.Array, z_loss: float) -> Arrays:
    """Returns the losses of `row_losses`, and the maximum and the logarithm of the sum of each row, (M, 1) float32."""
    return _kernel({"x": x, "labels": codes}, z_loss=z_loss)


def _backward(z_loss: float, saved: Arrays, g: jax.Array) -> tuple[jax.Array, np.ndarray]:
    x, codes, m, log_sum = saved
    arrays = {"x": x, "labels": codes, "m": m, "log_sum": log_sum, "g": g}
    (dx,) = _gradient_kernel(arrays, z_loss=z_loss)
    return dx, np.zeros(codes.shape, jax.dtypes.float0)


row_losses.defvjp(_forward, _backward)

_kernel = define_row_kernel("cross_entropy")
_gradient_kernel = define_row_kernel("cross_entropy_gradient")
