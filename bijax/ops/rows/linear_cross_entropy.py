"""The cross entropy of a linear layer, without an array of all logits."""

import math
from typing import Any, Final

import jax
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import describe, flag, float_array, integer, real, same_dtype
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.linear_cross_entropy import gradients_kernel, over_rows, rows_at_once
from bijax.dispatch.matmul import Product
from bijax.ops.matmul._arguments import check_operands, precision_of
from bijax.ops.matmul._derivatives import differentiable_matmul
from bijax.ops.rows.cross_entropy import integer_labels, label_codes, losses_and_statistics

_OP: Final = "bijax.linear_cross_entropy"


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    transpose_w: bool = False,
    precision: Any = None,
    ignore_index: int | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """Returns `softmax_cross_entropy(matmul(x, w), labels)` with float32 logits, computed a few rows at a time.

    Rows are processed in sequential chunks of at most 1024, or of 2²⁷ logits if that is more, and the backward pass
    recomputes the logits, for a chunk of rows or of columns. With V columns the two passes need memory for 1024 × V
    logits and their gradients instead of M × V, and a third more operations in the products. Loss and gradients have
    the bits of the two separate functions: the gradients are accumulated from chunk to chunk.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        w: (K, V) of the same dtype, or (V, K) with `transpose_w`, as tied embeddings are stored.
        labels: (...,) of any integer dtype, in [0, V).
        transpose_w: Whether `w` is stored as (V, K).
        precision: As for `matmul`.
        ignore_index: Label of the rows to ignore; it need not be in [0, V).
        z_loss: Weight of the squared logsumexp; at least 0.

    Returns:
        (...,) float32. Rows that are left out give 0 and have a zero gradient.

    Raises:
        TypeError: If a dtype is unsupported, the dtypes of `x` and `w` differ, or `z_loss` or `ignore_index` is not a
            number that is known when the program is traced.
        ValueError: If the shapes do not fit, `z_loss` is negative or not finite, or a label is out of range. Traced
            labels out of range make their rows nan, as in `softmax_cross_entropy`.

    Guarantee: row-invariant, the gradient of `x` too; the gradient of `w` is split-invariant as that of `matmul` is.

    Example:
        >>> x, w = jnp.ones((3, 4)), jnp.zeros((4, 2))
        >>> [round(float(row), 4) for row in linear_cross_entropy(x, w, jnp.array([0, 1, -1]), ignore_index=-1)]
        [0.6931, 0.6931, 0.0]
    """
    x, w = float_array(_OP, "x", x), float_array(_OP, "w", w)
    same_dtype(_OP, x=x, w=w)
    transpose_w = flag(_OP, "transpose_w", transpose_w)
    check_operands(_OP, x, w, None, transpose_w)
    if w.ndim != 2:
        raise ValueError(f"{_OP}: w must have 2 dimensions, got w {describe(w)}.")
    wanted = integer_labels(_OP, labels)
    if x.shape[:-1] != wanted.shape:
        raise ValueError(
            f"{_OP}: labels must have the shape of x without its last dimension, got x {describe(x)} and labels"
            f" {describe(wanted)}."
        )
    z_loss = real(_OP, "z_loss", z_loss, least=0)
    ignore_index = None if ignore_index is None else integer(_OP, "ignore_index", ignore_index)
    rows = math.prod(wanted.shape)
    codes = label_codes(_OP, wanted, w.shape[0 if transpose_w else 1], ignore_index).reshape(rows, 1)
    product = Product("float32", transpose_w, precision_of(_OP, precision))
    return _losses(x.reshape(rows, x.shape[-1]), w, codes, z_loss, product).reshape(wanted.shape)


@custom_vjp(nondiff_argnums=(3, 4))
def _losses(x: jax.Array, w: jax.Array, codes: jax.Array, z_loss: float, product: Product) -> jax.Array:
    """(M, K), (K, V) and (M, 1) to (M, 1) float32."""
    return _forward(x, w, codes, z_loss, product)[0]


def _forward(x: jax.Array, w: jax.Array, codes: jax.Array, z_loss: float, product: Product) -> tuple[jax.Array, Arrays]:
    def one(_: None, chunk: Arrays) -> tuple[None, Arrays]:
        rows, codes = chunk
        return None, losses_and_statistics(differentiable_matmul(rows, w, None, product), codes, z_loss)

    _, (losses, m, log_sum) = over_rows(one, None, rows_at_once(w.shape[0 if product.transpose_w else 1]), x, codes)
    return losses, (x, w, codes, m, log_sum)


def _backward(z_loss: float, product: Product, saved: Arrays, ct: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    dx, dw = gradients_kernel(*saved, ct, z_loss=z_loss, product=product)
    return dx, dw, np.zeros(saved[2].shape, jax.dtypes.float0)


_losses.defvjp(_forward, _backward)
