"""Checks of what users pass to matmul and its relatives."""

from typing import Any

import jax
import numpy as np

from bijax.core.checks import describe, float_dtype, integer
from bijax.dispatch.precision import precision_name
from pallas_kernels.contract import split_count
from pallas_kernels.matmul.activations import ACTIVATIONS


def result_dtype(op: str, x: jax.Array, preferred: Any) -> np.dtype[Any]:
    """Returns the dtype of the result: `x.dtype` unless another is preferred.

    Raises:
        TypeError: If the preferred one is unsupported.
    """
    return x.dtype if preferred is None else float_dtype(op, "preferred_element_type", preferred)


def precision_of(op: str, precision: Any) -> str:
    """Returns the name of a precision.

    Raises:
        ValueError: If JAX has no such precision.
    """
    try:
        return precision_name(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{op}: precision must be one that jax.lax.dot takes, got {precision!r}.") from error


def splits_of(op: str, split_k: Any, k: int, n: int) -> int:
    """Returns the number of K splits, 1 for none. It does not depend on the rows.

    Raises:
        ValueError: If `split_k` is invalid.
    """
    if split_k is None:
        return 1
    if isinstance(split_k, str) and split_k == "auto":
        return split_count(k, n)
    try:
        splits = integer(op, "split_k", split_k)
    except TypeError:
        splits = 0
    if splits < 1 or splits & (splits - 1):
        raise ValueError(f'{op}: split_k must be a power of two, "auto" or None, got {split_k!r}.')
    return splits


def check_activation(op: str, activation: Any) -> None:
    """Checks the name of an activation.

    Raises:
        ValueError: If there is no activation of that name.
    """
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(
            f"{op}: activation must be one of {', '.join(ACTIVATIONS)} or None, got {activation!r}; apply another one"
            " with bijax.elementwise to a float32 result (preferred_element_type=jnp.float32)."
        )


def check_operands(op: str, x: jax.Array, w: jax.Array, bias: jax.Array | None, transpose_w: bool) -> None:
    """Checks ranks and shapes of the operands of a product.

    Raises:
        ValueError: If they do not fit.
    """
    came = f"got x {describe(x)} and w {describe(w)} with transpose_w={transpose_w}"
    if x.ndim < 1 or w.ndim < 2:
        raise ValueError(f"{op}: x must have at least 1 and w at least 2 dimensions, {came}.")
    if w.ndim > 2 and x.shape[:-2] != w.shape[:-2]:
        raise ValueError(f"{op}: the leading dimensions of x and w must be equal when w has some, {came}.")
    k, n = (w.shape[-1], w.shape[-2]) if transpose_w else (w.shape[-2], w.shape[-1])
    if x.shape[-1] != k:
        raise ValueError(
            f"{op}: the last dimension of x must be the contracted dimension K={k} of w, {came};"
            f" pass transpose_w={not transpose_w} if w is stored the other way."
        )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{op}: bias must have the shape ({n},) of w's columns, got bias {describe(bias)}, {came}.")
