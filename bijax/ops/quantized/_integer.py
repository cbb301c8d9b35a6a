"""Products of int8 matrices in int32, and their epilogue."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.checks import describe
from bijax.ops.elementwise.call import elementwise

LONGEST_SUM: Final = (2**31 - 1) // (128 * 128)
"""Products of int8 that fit in a sum of int32, whatever they are."""


@functools.cache
def _rescale(dtype: Any) -> Any:
    return elementwise(
        lambda total, row, column: (total.astype(jnp.float32) * row * column.astype(jnp.float32)).astype(dtype)
    )


@functools.cache
def _add_bias(dtype: Any) -> Any:
    # A separate step, or a compiler could contract the sum with a product.
    return elementwise(lambda y, bias: (y + bias.astype(jnp.float32)).astype(dtype))


def integer_product(x: jax.Array, w: jax.Array, transpose_x: bool = False, transpose_w: bool = False) -> jax.Array:
    """Multiplies (M, K) by (K, N) int8, each possibly stored the other way round, to exact sums in int32.

    Sums of integers are the same in every order, so any product that XLA chooses has these bits.
    """
    dims = ((0 if transpose_x else 1,), (1 if transpose_w else 0,)), ((), ())
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.int32)


def dequantize(
    total: jax.Array, per_token_scale: jax.Array, weight_scale: jax.Array, bias: jax.Array | None, dtype: Any
) -> jax.Array:
    """Returns total * per_token_scale * weight_scale + bias in float32, from left to right, rounded to `dtype`.

    Args:
        total: (M, N) int32.
        per_token_scale: (M,) float32.
        weight_scale: Array that broadcasts with `total`.
        bias: (N,) or None.
        dtype: Dtype of the result.
    """
    y = _rescale(dtype if bias is None else jnp.dtype(jnp.float32))(total, per_token_scale[:, None], weight_scale)
    return y if bias is None else _add_bias(dtype)(y, bias)


def check_terms(op: str, name: str, x: jax.Array, terms: int) -> None:
    """Checks that sums of this many int8 products fit in int32.

    Raises:
        ValueError: If they do not.
    """
    if terms > LONGEST_SUM:
        raise ValueError(
            f"{op}: at most {LONGEST_SUM} products of int8 can be summed in int32, got {terms} in {name}"
            f" {describe(x)}; cut the operands and add the results."
        )
