"""Products of a float32 matrix already split into bfloat16 limbs by a bfloat16 array, on GPUs with such kernels."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bijax.core.architecture import target_for
from bijax.dispatch.kernels import run_kernel


@dataclass(frozen=True)
class ProductOfParts:
    """A product with one operand split into limbs.

    Attributes:
        count: Number of limbs.
        rows: Lengths of all dimensions of that operand but the last.
        batch: Dimensions of the other operand that match the first ones of `rows`.
        contracting: Dimensions of the other operand that are contracted with it: one with the last dimension, or one
            with each of the others, in their order.
        over_rows: Whether the rows are contracted, not the last dimension.
        on_the_left: Whether the split operand is the left one.
        dtype: Dtype of the result.
    """

    count: int
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    contracting: tuple[int, ...]
    over_rows: bool
    on_the_left: bool
    dtype: str


def product_of_parts(x: jax.Array, other: jax.Array, *, product: ProductOfParts) -> jax.Array:
    """Multiplies as `bijax.lax.dot_general` does for the operand with the limbs `x`.

    Args:
        x: (count * M, C) bfloat16, as in `parts.matmul_of_parts`; M is the size of `product.rows`.
        other: The other operand, bfloat16.
        product: The product.

    Returns:
        (batch..., lhs free..., rhs free...), of the dtype of the product.

    Guarantee: as `bijax.lax.dot_general`.
    """
    taken = *product.batch, *product.contracting
    free = tuple(d for d in range(other.ndim) if d not in taken)
    by_rows = not free or max(free) < max(product.contracting)
    groups = (free, product.contracting) if by_rows and not product.over_rows else (product.contracting, free)
    lead, rows = product.rows[: len(product.batch)], product.rows[len(product.batch) :]
    stack = (math.prod(lead),) if lead else ()
    weights = other.transpose([*product.batch, *groups[0], *groups[1]])
    weights = weights.reshape([*stack, *(math.prod(other.shape[d] for d in group) for group in groups)])
    x = x.reshape(*stack, -1, x.shape[1])
    own: tuple[int, ...]
    target, dtype = target_for("cuda"), product.dtype
    if product.over_rows:
        y = run_kernel("weight_gradient_of_parts", target, product.count, x, weights, out_dtype=dtype)
        own = x.shape[-1:]
    else:
        y = run_kernel("matmul_of_parts", target, product.count, x, weights, transpose_w=by_rows, out_dtype=dtype)
        own = rows
    y = y.reshape(*lead, *own, *(other.shape[d] for d in free))
    first = range(len(lead), len(lead) + len(own))
    return y if product.on_the_left else jnp.moveaxis(y, first, range(-len(own), 0))
