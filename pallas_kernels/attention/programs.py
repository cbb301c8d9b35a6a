"""Pieces of the attention programs whose bits do not depend on the number of rows around them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import LANES, SCORE_BLOCK
from pallas_kernels.parts.xla.fused_chain import fused_dot
from pallas_kernels.parts.xla.rounded_chain import rounded_dot
from pallas_kernels.parts.xla.tiles import isolate

Axes = tuple[tuple[int, ...], tuple[int, ...]]
DotDimensions = tuple[Axes, Axes]
Binary = Callable[[jax.Array, jax.Array], jax.Array]


def dot(a: jax.Array, b: jax.Array, dimensions: DotDimensions, *, fused: bool) -> jax.Array:
    """Returns a product of float32 arrays with one contracted axis.

    Args:
        a: Left operand.
        b: Right operand.
        dimensions: As in `lax.dot_general`.
        fused: Whether it is chains of fused multiply-adds; otherwise one chain of rounded products.
    """
    if not fused:
        return rounded_dot(a, b, dimensions)
    return fused_dot(a, b, dimensions, block=SCORE_BLOCK)


def lane_tree(x: jax.Array, op: Binary) -> jax.Array:
    """Reduces the last axis by a halving tree: lane i with lane i + n/2, and so on.

    The operations are exact or correctly rounded, so that their bits do not depend on how they are compiled. Three
    kernels of several levels each are faster than one kernel for each level. They run over the rows of a matrix, for
    which XLA:CPU compiles fewer nested loops.

    Args:
        x: (..., n), n a power of two.
        op: `lax.add` or `larger`.

    Returns:
        (...).
    """
    before = x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    for width in (32, 8, 1):
        parts = [x[..., i : i + width] for i in range(0, x.shape[-1], width)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [op(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        (x,) = isolate(parts[0])
    return x[..., 0].reshape(before)


def row_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sums (..., R) of a * b (..., R, H), in blocks of lanes upwards and a tree over the lanes."""
    (products,) = isolate(a * b)
    missing = -products.shape[-1] % LANES
    products = jnp.pad(products, [(0, 0)] * (products.ndim - 1) + [(0, missing)])
    total = products[..., :LANES]
    for i in range(LANES, products.shape[-1], LANES):
        total = total + products[..., i : i + LANES]
    return lane_tree(total, lax.add)


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the larger one; either where one is nan, which `lax.max` would not do, at a third of its cost."""
    return lax.select(a > b, a, b)


def seen_product(
    weights: jax.Array,
    seen: jax.Array,
    values: jax.Array,
    dimensions: DotDimensions,
    *,
    fused: bool,
    finite: bool = False,
) -> jax.Array:
    """Multiplies weights by values, where values that a row does not see leave no trace in it.

    A weight of zero would still carry nan and infinities (0 * inf is nan) and the sign of a zero. So zeros come out
    as +0, and values that are not finite take part only in the rows that see them.

    Args:
        weights: Zero where `seen` is false.
        seen: bool, of a shape that is broadcast to that of `weights`.
        values: The other operand; its last axis is a free one.
        dimensions: As in `lax.dot_general`. The result's last two axes must be a free axis of the weights and the
            last axis of the values.
        fused: As for `dot`.
        finite: Whether all values are known to be finite.

    Returns:
        float32.
    """
    plain = dot(weights, values, dimensions, fused=fused)

    def careful() -> jax.Array:
        return _product_with_specials(weights, seen, values, dimensions, fused)

    # A value that is not finite shows in every row, so one row tells.
    product = plain if finite else lax.cond(jnp.all(jnp.isfinite(plain[..., 0, :])), lambda: plain, careful)
    return jnp.where(product == 0, jnp.float32(0), product)


def _product_with_specials(
    weights: jax.Array, seen: jax.Array, values: jax.Array, dimensions: DotDimensions, fused: bool
) -> jax.Array:
    """Adds what IEEE arithmetic makes of nan and infinities to the product of the finite values."""
    infinite = jnp.where(jnp.isinf(values), jnp.sign(values), jnp.float32(0))
    signs, size = jnp.sign(weights), jnp.abs(infinite)
    # Sums of small integers are exact in any order, and one dot with another batch dimension takes three of them.
    left = (signs, jnp.abs(signs), seen.astype(jnp.float32))
    right = (infinite, size, size + jnp.isnan(values))
    contracted, batched = ((_shifted(a), _shifted(b)) for a, b in dimensions)
    sums = dot(stacked(*left), stacked(*right), (contracted, ((0, *batched[0]), (0, *batched[1]))), fused=fused)
    difference, count, all_seen = sums[0], sums[1], sums[2]
    product = dot(weights, jnp.where(jnp.isfinite(values), values, jnp.float32(0)), dimensions, fused=fused)
    product = jnp.where(count + difference > 0, product + jnp.inf, product)
    product = jnp.where(count - difference > 0, product - jnp.inf, product)
    # What is seen but counts neither as +inf nor as -inf is a nan, or an infinity with the weight zero.
    return jnp.where(all_seen > count, jnp.nan, product)


def stacked(*arrays: jax.Array) -> jax.Array:
    """Returns arrays of one dtype and of the shape of the first one along a new first axis, as a choice by the index.

    A concatenation on a CPU is a kernel of its own, which XLA compiles anew wherever it stands.
    """
    shape = (len(arrays), *arrays[0].shape)
    index = lax.broadcasted_iota(jnp.int32, shape, 0)
    result = jnp.broadcast_to(arrays[-1], shape)
    for i, array in enumerate(arrays[:-1]):
        result = lax.select(index == i, jnp.broadcast_to(array, shape), result)
    return result


def _shifted(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)
